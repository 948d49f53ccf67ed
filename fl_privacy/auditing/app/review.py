"""A static review of the code of an app or of scripts."""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_privacy.auditing.app.bundle import ROUNDS_KEYS, App, read_app
from fl_privacy.auditing.app.defaults import Defaults, derived
from fl_privacy.auditing.app.scripts import CLIENT_CLASSES, called, constant, dotted, parsed
from fl_privacy.errors import visible
from fl_privacy.files import shipped
from fl_privacy.site.gate.entries import epsilon_of

MOST_ROUNDS = 1_000_000  # largest number of rounds for which an epsilon is computed

DEFENSES: Mapping[str, str] = shipped(__file__, "protections.yaml")
"""Names of Flower's and Opacus's protections -> their effects."""

PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
NETWORK = {
    *("requests", "httpx", "urllib", "aiohttp", "socket", "ftplib"),
    *("smtplib", "boto3", "wandb", "mlflow", "paramiko"),
}
DANGEROUS = {"eval", "exec", "system", "popen", "Popen", "run", "call", "check_call", "check_output"}
"""Functions of Python, ``os`` and ``subprocess`` that execute their arguments."""

ANSWERS = {"train", "evaluate", "query"}
OF_CLIENTS = ("fit", "evaluate", "get_parameters", "get_properties")
"""Messages that a client app answers by decorated functions, and methods of Flower's older clients that do."""

DELTA = 1e-5  # default delta of an epsilon

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
    """A finding in the code, with file and line."""

    what: str
    where: str


@dataclass(frozen=True, kw_only=True)
class Review:
    """Findings in the code of an unedited app."""

    app: str
    server: str
    client: str
    answers: list[CodeNote] = field(default_factory=list)  # kinds of messages, and methods of older clients
    strategies: list[CodeNote] = field(default_factory=list)
    claims: list[CodeNote] = field(default_factory=list)
    protections: list[CodeNote] = field(default_factory=list)
    off: list[CodeNote] = field(default_factory=list)  # protections in the code that do not run by default
    mods: list[CodeNote] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # run config settings on privacy
    pins: dict[str, bool] = field(default_factory=dict)  # dependency -> ``True`` if pinned to a version
    pickles: list[CodeNote] = field(default_factory=list)
    network: list[CodeNote] = field(default_factory=list)  # modules other than Flower that use the network
    runs: list[CodeNote] = field(default_factory=list)  # places that execute code or commands from text
    unread: list[str] = field(default_factory=list)  # files that could not be parsed

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)

    def in_words(self) -> str:
        none = "Protections: none of Flower's mods and strategies, and no Opacus; the app's own code may protect."
        lines = [
            f"{self.app}: {', '.join(filter(None, (self.server, self.client)))}; parsed, not run.",
            *_section("Clients answer", self.answers),
            *(_section("Strategies", self.strategies) or ["Strategies: none of Flower's is named."]),
            *(_section("Protections", self.protections) or [none]),
            *_section("Off by default, so no protection", self.off),
            *_section("What the settings of differential privacy come to", self.claims),
            *_section("Mods", self.mods),
        ]
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
    """Review the app or scripts in a folder or bundle, without running them; ``UserError`` if ``path`` has none."""
    app = read_app(path)
    ran = () if app.scripts is None else dict.fromkeys((app.scripts.server, *app.scripts.clients))
    names = [each.relative_to(app.folder).as_posix() for each in ran]
    found = Review(
        app=app.name,
        server=app.server or names[0],
        client=app.client or ", ".join(names[1:]),
        settings={key: value for key, value in app.config.items() if _PRIVACY.search(key)},
        pins={text: "==" in text or " @ " in text for text in app.dependencies},
    )
    files = parsed(app.folder, found.unread)
    trees = {path.relative_to(app.folder).as_posix(): file.tree for path, file in files.items()}
    defaults, clients = Defaults(trees.values(), app.config), derived(files.values(), CLIENT_CLASSES)
    for name, tree in trees.items():
        file = _File(tree, name, found, defaults)
        try:
            for node in ast.walk(tree):
                file.look(node)
                if isinstance(node, ast.ClassDef) and node.name in clients:
                    found.answers.extend(
                        CodeNote(what=f"{each.name} of {node.name}", where=file.place(each))
                        for each in node.body
                        if isinstance(each, ast.FunctionDef) and each.name in OF_CLIENTS
                    )
        except RecursionError:
            found.unread.append(name)
    found.claims.extend(_central_claims(app, found))
    return found


class _File:
    def __init__(self, tree: ast.Module, name: str, found: Review, defaults: Defaults) -> None:
        self.name, self.found, self.defaults = name, found, defaults
        nodes = list(ast.walk(tree))
        given = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "mods"]
        self.mods = set(given)
        self.lists = {each.id for each in given if isinstance(each, ast.Name)}
        apps = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
        apps = [node for node in apps if called(node.value) == "ClientApp"]  # type: ignore[arg-type]
        self.apps = {dotted(each) for node in apps for each in node.targets} | {found.client.partition(":")[2]}

    def place(self, node: ast.AST) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 0)}"

    def look(self, node: ast.AST) -> None:
        found, where = self.found, self.place(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found.network.extend(CodeNote(what=module, where=where) for module in modules if _top(module) in NETWORK)
            found.pickles.extend(CodeNote(what=module, where=where) for module in modules if _top(module) in PICKLES)
        elif isinstance(node, ast.ClassDef):
            for base in filter(_STRATEGY.fullmatch, (dotted(each).rpartition(".")[2] for each in node.bases)):
                found.strategies.append(CodeNote(what=f"{node.name}, which is derived from {base}", where=where))
        elif isinstance(node, ast.FunctionDef):
            self._look_at_answers(node.decorator_list, where)
        elif isinstance(node, ast.Call):
            if (last := dotted(node.func).rpartition(".")[2]) in DEFENSES and self._protects(node, last):
                claim = _local_claim(node) if last == "LocalDpMod" else ""
                found.claims.extend([CodeNote(what=claim, where=where)] if claim else [])
            _look_at_call(node, where, found)
        elif isinstance(node, ast.Name | ast.Attribute):
            last = dotted(node).rpartition(".")[2]
            if last in DEFENSES and last.endswith("_mod") and self._is_mod(node):
                self._protects(node, last)
        if isinstance(node, ast.List | ast.Tuple) and node in self.mods:
            for each in node.elts:
                name = dotted(each.func if isinstance(each, ast.Call) else each)
                if name.rpartition(".")[2] not in DEFENSES and not isinstance(each, ast.Starred):
                    found.mods.append(CodeNote(what=name or "a mod that is made on the spot", where=where))

    def _look_at_answers(self, decorators: list[ast.expr], where: str) -> None:
        for each in (each for each in decorators if isinstance(each, ast.Call)):
            by = each.func
            if isinstance(by, ast.Attribute) and by.attr in ANSWERS and dotted(by.value) in self.apps:
                given = constant(each.args[0]) if each.args else None
                what = f"{by.attr}.{given}" if isinstance(given, str) else by.attr
                self.found.answers.append(CodeNote(what=what, where=where))

    def _protects(self, node: ast.AST, name: str) -> bool:
        if reason := self.defaults.off(node):
            self.found.off.append(CodeNote(what=f"{name}: {reason}", where=self.place(node)))
            return False
        unsure = self.defaults.unsure(node)
        condition = f"; only if {' and '.join(unsure)}" * bool(unsure)
        self.found.protections.append(CodeNote(what=f"{name}: {DEFENSES[name]}{condition}", where=self.place(node)))
        return True

    def _is_mod(self, node: ast.AST) -> bool:
        while node not in self.mods and (above := self.defaults.parents.get(node)) is not None:
            if isinstance(above, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = above.targets if isinstance(above, ast.Assign) else [above.target]
                return bool(self.lists & {dotted(each) for each in targets})
            if isinstance(above, ast.Call) and dotted(above.func).rpartition(".")[0] in self.lists:
                return True
            node = above
        return node in self.mods


def _look_at_call(node: ast.Call, where: str, found: Review) -> None:
    name = dotted(node.func)
    last = name.rpartition(".")[2]
    if last not in DEFENSES and _STRATEGY.fullmatch(last) and last not in ("FederatedDataset", "Strategy"):
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


def _local_claim(node: ast.Call) -> str:
    arguments = dict(zip(("clipping_norm", "sensitivity", "epsilon", "delta"), map(constant, node.args), strict=False))
    arguments |= {k.arg: constant(k.value) for k in node.keywords if k.arg}
    clip, sensitivity, epsilon = (_finite(arguments.get(name)) for name in ("clipping_norm", "sensitivity", "epsilon"))
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
    """Yield a note on a client's epsilon for each noise multiplier of Flower's central DP in the run config."""
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
    with suppress(OverflowError):
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None  # type: ignore[arg-type]
    return None


def _top(name: str) -> str:
    return name.partition(".")[0]


def _section(title: str, notes: list[CodeNote]) -> list[str]:
    return [f"{title}:", *(f"  {note.what} ({note.where})" for note in dict.fromkeys(notes))] if notes else []
