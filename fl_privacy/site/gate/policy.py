"""Policy of a site on messages, and its parser."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.files.foreign import expanded, open_regular
from fl_privacy.site.gate import READY
from fl_privacy.site.gate.bundles import Runs, read_runs
from fl_privacy.site.gate.entries import FACTORS, Limits
from fl_privacy.site.gate.ledger import Ledger
from fl_privacy.site.gate.plain_yaml import listed, mapping, names, place_of, table
from fl_privacy.site.gate.protecting import Noising
from fl_privacy.site.gate.rules import Rule

VERSION = 1
LARGEST_POLICY = 1 << 20
KINDS = ("train", "evaluate", "query")
DTYPES = ("float16", "float32", "float64")
COUNTERS = ("int8", "int16", "int32", "int64", "uint8", "bool")  # types of a model's whole numbers

MIB = 1 << 20
LOAD_SECONDS = 600.0  # seconds for an app to start, in addition to those for a message
MOST_CELLS = 4  # most runs that have a process at a time
LEAST_MEMORY = 512  # least ``app.memory_mib``, with which PyTorch can be loaded


@dataclass(frozen=True, kw_only=True)
class Values:
    """Values that a policy allows in a message: names of their records, and a rule for each key."""

    records: tuple[str, ...]
    rules: Mapping[str, Rule] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Receives:
    """Parts of messages that the app may receive; ``run_config``: keys of the run's settings, ``None`` for all."""

    arrays: tuple[str, ...] = ()
    config: Values = field(default_factory=lambda: Values(records=("config",)))
    run_config: tuple[str, ...] | None = ()
    guard: bool = True
    most_bytes: int = 1024 * MIB


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Rule for arrays that an app may send: those received, with the same names and shapes, or new ones (``lists``).

    Attributes:
        dtypes: allowed floating-point types of received arrays, or allowed types of ``lists``.
        counters: ``received`` to return whole numbers as they were received, ``sent`` to send those of the app.
        record: name of the reply's only record of arrays; ``None`` for the received records' names.
        lists: name -> largest shape of a new array; either all of these arrays are sent or none.
    """

    dtypes: tuple[str, ...] = ("float32",)
    counters: str = "received"
    record: str | None = None
    lists: Mapping[str, tuple[int, ...]] | None = None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Allowed content of replies to one kind of message."""

    arrays: Arrays | None = None
    metrics: Values = field(default_factory=lambda: Values(records=()))
    config: Values = field(default_factory=lambda: Values(records=()))

    @property
    def bits(self) -> float:
        """Return the most bits of information that an app can put in a reply, apart from arrays."""
        bits = 0.0
        for values in (self.metrics, self.config):
            free = [rule.bits + 1 for rule in values.rules.values() if rule.value is None]
            bits += len(values.records) * (sum(free) + 1) - (len(free) < len(values.rules))  # a value makes its record
        return bits


@dataclass(frozen=True, kw_only=True)
class Protect:
    """How the model's change in a reply is protected: by clipping and noise, or by a defense."""

    noising: Noising | None = None  # clipping and noise; ``None`` if ``defense`` acts instead
    unit: str = "client"  # unit of protection, see ``entries.FACTORS``
    defense: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Privacy budget of the node's data, and the two files that record what is spent."""

    epsilon: float | None  # largest epsilon; ``None`` for no limit
    delta: float
    ledger: Path
    anchor: Path  # file with the digest of the ledger's last entry, in a folder that is not restored together with it


@dataclass(frozen=True, kw_only=True)
class AppLimits:
    """Limits on the app's process."""

    reads: tuple[Path, ...] = ()  # readable paths in addition to Python and its packages
    writes: tuple[Path, ...] = ()  # writable paths in addition to a temporary folder
    environment: tuple[str, ...] = ()
    most_bytes: int = 8192 * MIB  # memory of the process with its children, and of files in its temporary folder
    most_processes: int = 128
    seconds: float = 3600.0
    required: bool = True  # ``True`` if the gate only starts with isolation from network and files


@dataclass(frozen=True, kw_only=True)
class SitePolicy:
    """Policy of a site, as stated in its file.

    Attributes:
        runs: rules for apps sent with a run; ``None`` if only an installed app runs.
        sends: allowed replies by kind of message, such as ``train`` or ``query.stats``; other kinds are refused.
        drops: ``True`` removes unnamed content if possible, instead of refusing the whole reply.
        bare: ``True`` hides the reasons of refusals from the coordinator.
        every_seconds: a reply is sent this time after the message, or a multiple of it; 0 sends at once.
        digest: beginning of the file's SHA-256.
    """

    receives: Receives = field(default_factory=Receives)
    sends: Mapping[str, Reply] = field(default_factory=dict)
    drops: bool = False
    bare: bool = False
    every_seconds: float = 0.0
    protect: Protect | None = None
    budget: Budget | None = None
    rounds_per_day: int | None = None
    app: AppLimits = field(default_factory=AppLimits)
    runs: Runs | None = None
    digest: str = ""

    @property
    def noising(self) -> Noising | None:
        return self.protect.noising if self.protect else None

    @property
    def limits(self) -> Limits:
        return Limits(
            epsilon=self.budget.epsilon if self.budget else None,
            delta=self.budget.delta if self.budget else 1e-5,
            factor=FACTORS[self.protect.unit] if self.protect else 1.0,
            rounds_per_day=self.rounds_per_day,
        )

    def rho(self, kind: str) -> float | None:
        """Return a reply's privacy cost (zCDP) by the message's ``kind``: 0 without weights, ``None`` without noise."""
        reply = self.reply(kind)
        if reply is None or reply.arrays is None:
            return 0.0
        return self.noising.rho if self.noising else None

    def reply(self, kind: str) -> Reply | None:
        return self.sends.get(plain_kind(kind))


def plain_kind(message_type: str) -> str:
    """Return the kind of a Flower message: its type without ``.default``."""
    return message_type.removesuffix(".default")


def read_policy(path: str | Path) -> SitePolicy:
    """Load a site's policy from a file or :data:`READY`; ``UserError`` if it is wrong, or other users may write it."""
    if str(path) in READY:
        ready = files("fl_privacy.site.gate") / "policies" / f"{path}.yaml"
        return parse_policy(ready.read_bytes(), str(path), Path.cwd())
    place = expanded(path)
    try:
        with os.fdopen(open_regular(place), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size > LARGEST_POLICY:
                raise UserError(f"{place} is expected to be a file of at most 1 MiB, but is larger; shorten it.")
            if status.st_mode & 0o022 or status.st_uid not in (0, os.geteuid()):
                raise UserError(f"{place} is expected to be yours or root's, but others may write; chown or chmod it.")
            return parse_policy(file.read(), str(place), place.absolute().parent)
    except OSError as error:
        raise UserError(
            f"The policy {place} is expected to be a file, or one of {', '.join(READY)}, but can't be read"
            f" ({error.strerror}); check its name."
        ) from error


def parse_policy(content: bytes, name: str, folder: Path) -> SitePolicy:
    """Return the policy in ``content``, with paths relative to ``folder``; ``UserError`` on ``name`` if it is wrong."""
    from fl_privacy.site.gate.plain_yaml import loaded  # noqa: PLC0415

    parsed = loaded(content, name)
    try:
        return _policy(parsed, folder, hashlib.sha256(content).hexdigest()[:16])
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _policy(given: object, folder: Path, digest: str) -> SitePolicy:
    parts = ("version", "receives", "sends", "protect", "budget", "rounds_per_day", "app", "runs")
    top = table("The policy", given, *parts)
    checks.one_of("version", top.get("version"), (VERSION,))
    sends = dict(mapping("sends", top.get("sends")))
    unnamed, refusals = sends.pop("unnamed", "refuse"), sends.pop("refusals", "reason")
    every = sends.pop("every_seconds", 0.0)
    checks.one_of("sends.unnamed", unnamed, ("refuse", "drop"))
    checks.one_of("sends.refusals", refusals, ("reason", "bare"))
    checks.number("sends.every_seconds", every, at_least=0, at_most=86_400, example=10)
    replies = {kind: _reply(kind, reply) for kind, reply in sends.items()}
    if twice := [kind for kind in replies if plain_kind(kind) != kind and plain_kind(kind) in replies]:
        raise UserError(f"sends is expected to name {plain_kind(twice[0])} once, but names {twice[0]}, too; drop one.")
    rounds = top.get("rounds_per_day")
    budget = None if top.get("budget") is None else _budget(top["budget"], folder)
    policy = SitePolicy(
        receives=_receives(top.get("receives")),
        sends={plain_kind(kind): reply for kind, reply in replies.items() if reply is not None},
        drops=unnamed == "drop",
        bare=refusals == "bare",
        every_seconds=every,
        protect=None if top.get("protect") is None else _protect(top["protect"]),
        budget=budget,
        rounds_per_day=None if rounds is None else checks.whole("rounds_per_day", rounds, at_least=1, example=50),
        app=_app(top.get("app"), folder, brought=top.get("runs") is not None),
        runs=None if top.get("runs") is None else read_runs(top["runs"], folder, budget.ledger if budget else None),
        digest=digest,
    )
    if (policy.rounds_per_day is not None or policy.noising) and policy.budget is None:
        raise UserError(
            "protect.noise and rounds_per_day are expected with a budget that counts, but got none; add budget."
        )
    places = {"budget.ledger": budget.ledger, "budget.anchor": budget.anchor} if budget else {}
    places |= {"runs.folder": policy.runs.folder} if policy.runs else {}
    for name, place in places.items():
        if within := holder_of(place, (*policy.app.reads, *policy.app.writes)):
            raise UserError(f"{name} is expected to be away from what the app reads, but is in {within}; move it.")
    if policy.protect and any(reply.arrays and reply.arrays.counters == "sent" for reply in policy.sends.values()):
        raise UserError(
            "counters is expected to be received with protect, and arrays like received, but numbers that leave as the"
            " app sent them are protected by nothing; write counters: received."
        )
    if policy.budget and policy.budget.epsilon is not None and policy.noising is None:
        raise UserError("budget.epsilon is expected with protect.noise, but nothing makes noise; leave epsilon out.")
    return policy


def holder_of(place: Path, given: Iterable[Path]) -> Path | None:
    """Return the first of the folders ``given`` that contains ``place``, with links followed; ``None`` if none does."""
    real = place.resolve()
    return next((one for one in given if real.is_relative_to(one.resolve())), None)


def _receives(given: object) -> Receives:
    section = table("receives", given, "records", "run_config", "guard", "max_mib")
    records = table("receives.records", section.get("records"), "arrays", "config")
    guard, most, run_config = section.get("guard", True), section.get("max_mib", 1024), section.get("run_config", ())
    checks.one_of("receives.guard", guard, (True, False))
    checks.whole("receives.max_mib", most, at_least=1, at_most=65_536, example=1024)
    return Receives(
        arrays=names("receives.records.arrays", records.get("arrays", ())),
        config=_values("receives.records.config", records.get("config"), ("config",), Rule(exact=True), star=True),
        run_config=None if run_config == "any" else names("receives.run_config", run_config),
        guard=guard,
        most_bytes=most * MIB,
    )


def _reply(kind: str, given: object) -> Reply | None:
    if given == "refuse" or given is False:
        return None
    category, _, action = kind.partition(".")
    if category not in KINDS or (action and not action.isidentifier()):
        raise UserError(
            f"sends is expected to name train, evaluate, query or query.ACTION, but got {kind!r}; rename it."
        )
    section, where = table(f"sends.{kind}", given, "arrays", "metrics", "config"), f"sends.{kind}.arrays"
    arrays: Arrays | None = None
    if section.get("arrays") not in (None, False):
        stated = table(where, section["arrays"], "like", "finite", "dtype", "counters", "record", "lists")
        held = mapping(f"{where}.lists", stated.get("lists"))
        keys = names(f"{where}.lists", [*held])
        shapes = {key: checks.shape(f"{where}.lists.{key}", held[key], example="try 1000") for key in keys}
        lists = shapes if "lists" in stated else None
        counters = stated.get("counters", "received" if lists is None else "sent")
        if lists is None:
            checks.one_of(f"{where}.like", stated.get("like"), ("received",))
        elif both := {"like", "counters"} & stated.keys():
            raise UserError(f"{where} is expected to have one of {min(both)} and lists, but has both; drop one.")
        checks.one_of(f"{where}.finite", stated.get("finite", True), (True,))
        checks.one_of(f"{where}.counters", counters, ("received", "sent"))
        dtype = stated.get("dtype", "float32")
        for one in (dtypes := tuple(dtype) if isinstance(dtype, list) else (dtype,)):
            checks.one_of(f"{where}.dtype", one, DTYPES if lists is None else (*DTYPES, *COUNTERS))
        record = "arrays" if lists is not None and stated.get("record") is None else stated.get("record")
        if not isinstance(record, str | None):
            raise UserError(f"{where}.record is expected to be a name, but got {record!r:.80}; try arrays.")
        arrays = Arrays(dtypes=dtypes, counters=counters, record=record, lists=lists)
    named = [name for name in ("metrics", "config") if section.get(name) not in (None, False)]
    values = {n: _values(f"sends.{kind}.{n}", section[n], (n,), Rule()) for n in named}
    if "metrics" in values and any(rule.most_bytes is not None for rule in values["metrics"].rules.values()):
        raise UserError(
            f"sends.{kind}.metrics is expected to be numbers, but got most_bytes; write most_bytes under config."
        )
    if any(rule.most_letters is not None for one in values.values() for rule in one.rules.values()):
        raise UserError(f"sends.{kind} is expected to list texts by one_of, but got most_letters; list them.")
    return Reply(arrays=arrays, **values)


def _protect(given: object) -> Protect:
    part = mapping("protect", given)
    if "defense" in part:
        if not isinstance(part["defense"], str):
            raise UserError(f"protect.defense is expected to be a name, but got {part['defense']!r}; try pruning.")
        options = {str(key): value for key, value in part.items() if key != "defense"}
        return Protect(defense=part["defense"], options=options)
    part = table("protect", given, "clip_norm", "noise")
    noise = table("protect.noise", part.get("noise"), "mechanism", "noise_multiplier", "unit")
    checks.one_of("protect.noise.mechanism", noise.get("mechanism", "gaussian"), ("gaussian",))
    checks.one_of("protect.noise.unit", unit := noise.get("unit", "client"), FACTORS)
    for name, given_there, key in (("protect", part, "clip_norm"), ("protect.noise", noise, "noise_multiplier")):
        if key not in given_there:
            raise UserError(f"{name}.{key} is expected, but is missing; try 1.0.")
    return Protect(noising=Noising(clip_norm=part["clip_norm"], noise_multiplier=noise["noise_multiplier"]), unit=unit)


def _budget(given: object, folder: Path) -> Budget:
    section = table("budget", given, "epsilon", "delta", "per", "ledger", "anchor")
    checks.one_of("budget.per", section.get("per", "data"), ("data",))
    if "ledger" not in section:
        raise UserError("budget.ledger is expected to name a file, but is missing; try ledger: ledger.")
    ledger = place_of("budget.ledger", section["ledger"], folder)
    if "anchor" in section:
        anchor = place_of("budget.anchor", section["anchor"], folder)
    else:  # in the user's state folder, which no backup restores together with the ledger
        import platformdirs  # noqa: PLC0415

        name = hashlib.sha256(str(ledger).encode()).hexdigest()[:16]
        anchor = Path(platformdirs.user_state_dir("fl_privacy")) / "anchors" / name
    Ledger(ledger, anchor)  # checks that they are two places
    if (epsilon := section.get("epsilon")) is not None:
        checks.number("budget.epsilon", epsilon, above=0, at_most=1e6, example=8)
    delta = checks.number("budget.delta", section.get("delta", 1e-5), above=0, below=1, example=1e-5)
    return Budget(epsilon=epsilon, delta=delta, ledger=ledger, anchor=anchor)


def _app(given: object, folder: Path, *, brought: bool) -> AppLimits:
    limits = ("memory_mib", "processes", "seconds", "isolation", "network")
    section = table("app", given, "reads", "writes", "environment", *limits)
    checks.one_of("app.network", section.get("network", "none"), ("none",))
    isolations = ("required", "none") if brought else ("required", "where_possible", "none")
    checks.one_of("app.isolation", isolation := section.get("isolation", "required"), isolations)
    memory, processes = section.get("memory_mib", 8192), section.get("processes", 128)
    checks.whole("app.memory_mib", memory, at_least=LEAST_MEMORY, at_most=1 << 24, example=8192)
    checks.whole("app.processes", processes, at_least=1, at_most=100_000, example=128)
    return AppLimits(
        reads=tuple(place_of("app.reads", one, folder) for one in listed("app.reads", section.get("reads", ()))),
        writes=tuple(place_of("app.writes", one, folder) for one in listed("app.writes", section.get("writes", ()))),
        environment=names("app.environment", section.get("environment", ())),
        most_bytes=memory * MIB,
        most_processes=processes,
        seconds=checks.number("app.seconds", section.get("seconds", 3600.0), above=0, at_most=1e6, example=3600),
        required=isolation == "required",
    )


def _values(where: str, given: object, records: tuple[str, ...], rule: Rule, *, star: bool = False) -> Values:
    section = table(where, None if given is False else given, "records", "allow")
    named = names(f"{where}.records", section["records"]) if "records" in section else records
    if not named:
        raise UserError(f"{where}.records is expected to list names, but lists none; leave it out.")
    allowed = section.get("allow", ())
    if not isinstance(allowed, Mapping):
        allowed = dict.fromkeys(names(f"{where}.allow", allowed, star=True))
    names(f"{where}.allow", [*map(str, allowed)], star=star)
    rules = {str(key): Rule.read(f"{where}.{key}", one, rule) for key, one in allowed.items()}
    return Values(records=named, rules=rules)
