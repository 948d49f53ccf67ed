"""A static review of an app's code."""

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fl_privacy.auditing.app.bundle import ROUNDS_KEYS, App, read_app
from fl_privacy.auditing.app.scripts import constant, dotted
from fl_privacy.errors import visible
from fl_privacy.site.gate.entries import epsilon_of

MOST_ROUNDS, MOST_FILES, MOST_BYTES = 1_000_000, 2000, 1 << 20
"""Largest number of rounds and of files that are reviewed, and largest size of a file in bytes."""

DEFENSES = {
    "fixedclipping_mod": "clips each client's update; without noise of the server that bounds nothing",
    "adaptiveclipping_mod": "clips each client's update by a bound that adapts; without noise that bounds nothing",
    "LocalDpMod": "clips and adds noise on the client",
    "secaggplus_mod": "masks updates, so that the server sees sums alone",
    "secagg_mod": "masks updates, so that the server sees sums alone",
    "DifferentialPrivacyServerSideFixedClipping": "the server adds noise to the sum; it sees each update before",
    "DifferentialPrivacyServerSideAdaptiveClipping": "the server adds noise to the sum; it sees each update before",
    "DifferentialPrivacyClientSideFixedClipping": "clients clip, the server adds noise; it sees each update before",
    "DifferentialPrivacyClientSideAdaptiveClipping": "clients clip, the server adds noise; it sees each update before",
    "SecAggPlusWorkflow": "masks updates, so that the server sees sums alone",
    "SecAggWorkflow": "masks updates, so that the server sees sums alone",
    "PrivacyEngine": "DP-SGD of Opacus, within the training of a client",
}
"""Names of Flower's and Opacus's protections -> their effects."""

PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
NETWORK = {
    *("requests", "httpx", "urllib", "aiohttp", "socket", "ftplib"),
    *("smtplib", "boto3", "wandb", "mlflow", "paramiko"),
}
DANGEROUS = {"eval", "exec", "system", "popen", "Popen", "run", "call", "check_call", "check_output"}
"""Functions of Python, ``os`` and ``subprocess`` that execute their arguments."""

ANSWERS = {"train", "evaluate", "query"}

DELTA = 1e-5
"""Default delta of an epsilon."""

_STRATEGY = re.compile(r"(Fed|Krum|MultiKrum|Bulyan|QFed|FaultTolerant|DifferentialPrivacy)\w*|Strategy")
_PRIVACY = re.compile(
    r"epsilon|(^|\.)(target[-_])?delta$|(?<!attacker-)(?<!attacker_)noise|clip|max[-_]?grad[-_]?norm"
    r"|num[-_]?shares|reconstruction[-_]?threshold|privacy[-_]?budget",
    re.IGNORECASE,
)
_MULTIPLIER = re.compile(r"noise[-_]?multiplier", re.IGNORECASE)
_CENTRAL = "DifferentialPrivacy"


@dataclass(frozen=True, kw_only=True)
class CodeNote:
    """One thing in the code, with file and line."""

    what: str
    where: str


@dataclass(frozen=True, kw_only=True)
class Review:
    """Findings in the code of an unedited app.

    Attributes:
        answers: answered messages, as the Message API names them.
        settings: run config settings on privacy.
        pins: dependencies -> ``True`` if pinned to a version.
        network: modules other than Flower that use the network.
        runs: places that execute code or commands from text.
    """

    app: str
    server: str
    client: str
    answers: list[CodeNote] = field(default_factory=list)
    strategies: list[CodeNote] = field(default_factory=list)
    claims: list[CodeNote] = field(default_factory=list)
    protections: list[CodeNote] = field(default_factory=list)
    mods: list[CodeNote] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    pins: dict[str, bool] = field(default_factory=dict)
    pickles: list[CodeNote] = field(default_factory=list)
    network: list[CodeNote] = field(default_factory=list)
    runs: list[CodeNote] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)

    def in_words(self) -> str:
        lines = [f"{self.app}: {self.server}, {self.client}; parsed, not run."]
        lines += _section("Clients answer", self.answers)
        lines += _section("Strategies", self.strategies) or ["Strategies: none of Flower's is named."]
        none = "Protections: none of Flower's mods and strategies, and no Opacus; the app's own code may protect."
        lines += _section("Protections", self.protections) or [none]
        lines += _section("What the settings of differential privacy come to", self.claims)
        lines += _section("Mods", self.mods)
        if settings := ", ".join(f"{k}={v}" for k, v in self.settings.items()):
            lines.append(f"Settings that have to do with privacy: {settings}")
        if loose := [name for name, pinned in self.pins.items() if not pinned]:
            lines.append(f"Not pinned to a version: {', '.join(loose)}.")
        lines += _section("Pickles, which run what they hold when they are unpacked", self.pickles)
        lines += _section("Contacts hosts other than Flower's", self.network)
        lines += _section("Runs code or commands", self.runs)
        lines += [f"Not read: {name}" for name in self.unread]
        lines.append("`fl-privacy audit APP` runs the app and shows what its uploads leak.")
        return "\n".join(map(visible, lines))


def review_app(path: str | Path) -> Review:
    """Review the app in the folder or bundle ``path`` without running it; ``UserError`` if it is no Flower app."""
    app = read_app(path)
    found = Review(
        app=app.name,
        server=app.server,
        client=app.client,
        settings={key: value for key, value in app.config.items() if _PRIVACY.search(key)},
        pins={text: "==" in text or " @ " in text for text in app.dependencies},
    )
    sources = (file for file in sorted(app.folder.rglob("*.py")) if file.is_file() and not file.is_symlink())
    parts = ((file, file.relative_to(app.folder).parts) for file in sources)
    files = list(islice((f for f, names in parts if not any(n.startswith(".") for n in names)), MOST_FILES + 1))
    if len(files) > MOST_FILES:
        found.unread.append(f"files after the first {MOST_FILES}")
    for file in files[:MOST_FILES]:
        name = file.relative_to(app.folder).as_posix()
        try:
            if file.stat().st_size > MOST_BYTES:
                found.unread.append(f"{name} (larger than {MOST_BYTES >> 10} KiB)")
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                _look(node, name, found)
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError, MemoryError, OSError):
            found.unread.append(name)
    found.claims.extend(_central_claims(app, found))
    return found


def _look(node: ast.AST, file: str, found: Review) -> None:
    where = f"{file}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        found.network.extend(CodeNote(what=module, where=where) for module in modules if _top(module) in NETWORK)
        found.pickles.extend(CodeNote(what=module, where=where) for module in modules if _top(module) in PICKLES)
    elif isinstance(node, ast.ClassDef):
        for base in filter(_STRATEGY.fullmatch, (dotted(each).rpartition(".")[2] for each in node.bases)):
            found.strategies.append(CodeNote(what=f"{node.name}, which is derived from {base}", where=where))
    elif isinstance(node, ast.FunctionDef):
        _look_at_answers(node, file, found)
    elif isinstance(node, ast.Call):
        _look_at_call(node, where, found)
        for keyword in node.keywords:
            if keyword.arg == "mods" and isinstance(keyword.value, ast.List | ast.Tuple):
                for each in keyword.value.elts:
                    name = dotted(each.func if isinstance(each, ast.Call) else each)
                    kind = DEFENSES.get(name.rpartition(".")[2])
                    what = name or "a mod that is made on the spot"
                    known = found.mods if kind is None else found.protections
                    known.append(CodeNote(what=what if kind is None else f"{name}: {kind}", where=where))


def _look_at_call(node: ast.Call, where: str, found: Review) -> None:
    name = dotted(node.func)
    last = name.rpartition(".")[2]
    if last in DEFENSES:
        found.protections.append(CodeNote(what=f"{last}: {DEFENSES[last]}", where=where))
        if last == "LocalDpMod" and (claim := _local_claim(node)):
            found.claims.append(CodeNote(what=claim, where=where))
    elif _STRATEGY.fullmatch(last) and last not in ("FederatedDataset", "Strategy"):
        found.strategies.append(CodeNote(what=last, where=where))
    # Python's own ``eval`` or ``exec``, not a network's ``net.eval()``
    plain = isinstance(node.func, ast.Name) and name in {"eval", "exec"}
    own = plain or name in {"builtins.eval", "builtins.exec"}
    if last in DANGEROUS and (_top(name) in {"os", "subprocess"} or own):
        found.runs.append(CodeNote(what=name, where=where))
    if any(k.arg == "trust_remote_code" and constant(k.value) is True for k in node.keywords):
        found.runs.append(CodeNote(what=f"code that {name or 'a call'} fetches (trust_remote_code)", where=where))
    if last == "read_pickle":
        found.pickles.append(CodeNote(what=name, where=where))
    if name in ("torch.load", "np.load", "numpy.load"):
        given = next((k.value for k in node.keywords if k.arg in ("weights_only", "allow_pickle")), None)
        if isinstance(given, ast.Constant) and given.value is (name != "torch.load"):
            found.pickles.append(CodeNote(what=f"{name} of any object", where=where))


def _look_at_answers(node: ast.FunctionDef, file: str, found: Review) -> None:
    app = found.client.partition(":")[2]
    for each in node.decorator_list:
        called = each.func if isinstance(each, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in ANSWERS and dotted(called.value) == app:
            given = constant(each.args[0]) if isinstance(each, ast.Call) and each.args else None
            what = f"{called.attr}.{given}" if isinstance(given, str) else called.attr
            found.answers.append(CodeNote(what=what, where=f"{file}:{node.lineno}"))


def _local_claim(node: ast.Call) -> str:
    told = dict(zip(("clipping_norm", "sensitivity", "epsilon", "delta"), map(constant, node.args), strict=False))
    told |= {k.arg: constant(k.value) for k in node.keywords if k.arg}
    clip, sensitivity, epsilon = (_finite(told.get(name)) for name in ("clipping_norm", "sensitivity", "epsilon"))
    if clip is None or sensitivity is None or epsilon is None or sensitivity < 0:
        return ""
    said = f"LocalDpMod claims epsilon {epsilon:g} for each round alone"
    if sensitivity >= clip:
        return said
    if not sensitivity:
        return f"{said}; it adds no noise, since its sensitivity is 0"
    small = f"it is {clip / sensitivity:.3g} times too small for the claim"
    return (
        f"{said}; its noise is that of a sensitivity of {sensitivity:g}, but updates are clipped to {clip:g}: {small}"
    )


def _central_claims(app: App, found: Review) -> Iterator[CodeNote]:
    """Yield the epsilon of the run config's noise multiplier under Flower's strategies."""
    if not any(note.what.startswith(_CENTRAL) for note in found.protections):
        return
    rounds = next((app.config[key] for key in ROUNDS_KEYS if key in app.config), 1)
    rounds = rounds if isinstance(rounds, int) and not isinstance(rounds, bool) and 0 < rounds <= MOST_ROUNDS else 1
    for key, value in app.config.items():
        if _MULTIPLIER.search(key) and (multiplier := _finite(value)) is not None:
            share = 1 / multiplier if multiplier > 0 else math.inf
            epsilon = epsilon_of(rounds * share * share / 2, DELTA)
            yield CodeNote(
                what=f"a client that takes part in {rounds} round{'s' * (rounds != 1)} spends epsilon {epsilon:.3g} at"
                f" delta {DELTA:g}, toward who sees the aggregated model alone",
                where=f"{key}={value}",
            )


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _top(name: str) -> str:
    return name.partition(".")[0]


def _section(title: str, notes: list[CodeNote]) -> list[str]:
    return [f"{title}:", *(f"  {note.what} ({note.where})" for note in dict.fromkeys(notes))] if notes else []
