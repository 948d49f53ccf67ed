"""The differential privacy claims of a Flower app: its strategy, its clients' mods, and Opacus in their training."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp.strategy import Strategy

from fl_privacy.auditing.app.bundle import App as Project, read_app
from fl_privacy.auditing.app.check import stops_of
from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.auditing.strategy import AuditedStrategy
from fl_privacy.auditing.strategy_report import DRAWS, uncovered
from fl_privacy.defenses import Defense
from fl_privacy.dp_check.bounds import gaussian_epsilon
from fl_privacy.dp_check.check import DpCheckRequest, tested
from fl_privacy.dp_check.mechanism import shown_epsilon
from fl_privacy.dp_check.of_defense import on_defense
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.effects import Noise, SparseVector
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.audit_protocol import numbers_of
from fl_privacy.flower.dp_mechanisms import mechanism_of_mod, stated_by, together, verdicts_on
from fl_privacy.flower.grids import LocalGrid
from fl_privacy.flower.inside.identity import identify_process, identity_put_back
from fl_privacy.flower.inside.legacy import FitIns, fitins_to_recorddict, ndarrays_to_parameters, parameters_to_ndarrays
from fl_privacy.flower.opacus_watch import OpacusWatch, watched_opacus
from fl_privacy.flower.records import PARTITION, PARTITIONS, ROUND, to_tensor
from fl_privacy.rng import streams_put_back
from fl_privacy.runs.folder.claims import records_of
from fl_privacy.types import Tensors

MOST_VALUES, NODES = 20_000, 2
"""Largest number of values of a drawn update (a larger model is represented by the first values of each array), and
number of nodes."""


class _Started(BaseException):
    """Exception that stops a server app when its training starts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClaimedApp:
    """The parts of an app in which its differential privacy claims are found.

    ``strategy``: the started one; ``None`` for Flower's legacy API, or if none was started. ``arrays``: initial model.
    """

    folder: Path
    client: ClientApp
    strategy: Strategy | None = None
    arrays: ArrayRecord | None = None
    rounds: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    run_config: Mapping[str, Any] = field(default_factory=dict)
    project: Project | None = None
    problems: Sequence[str] = ()

    @property
    def mods(self) -> list[Mod]:
        """Return the mods around training, the outermost first: of the training function, or else of the client."""
        answers = getattr(self.client, "_registered_funcs", {})
        answer, found = next((each for name, each in answers.items() if name.startswith("train")), None), list[Mod]()
        while inspect.isfunction(answer) and "_mod" in (inner := inspect.getclosurevars(answer).nonlocals):
            found.append(inner["_mod"])
            answer = inner["_ffn"]
        return found or list(getattr(self.client, "_mods", []))


def claims_of_app(folder: Path, asked: DpCheckRequest, *, train: bool = True) -> list[ClaimVerdict]:
    """Find, recompute and test the differential privacy claims of the app in ``folder``.

    The app's code is executed: its server until the training starts and, if ``train``, one client's training.
    ``UserError`` if ``folder`` is no Flower app, or its server fails.
    """
    app = begun_app(folder)
    found = _on_parts(app, asked)
    reply, watch, problems = _trained(app) if train and app.arrays is not None else (None, OpacusWatch(), ())
    found += watch.verdicts(asked, rounds=app.rounds)
    records = reply.content.metric_records.values() if reply is not None and reply.has_content() else ()
    notes = (*app.problems, *problems, *uncovered(name for record in records for name in record))
    if not found:
        return [ClaimVerdict(subject=folder.resolve().name, claim=None, notes=notes)]
    return [replace(found[0], notes=(*found[0].notes, *notes)), *found[1:]]


def _on_parts(app: ClaimedApp, asked: DpCheckRequest) -> list[ClaimVerdict]:
    known = replace(asked, rounds=max(asked.rounds, app.rounds), like=_shapes(app))
    found = _on_mods(app, known)
    subject = app.strategy.strategy if isinstance(app.strategy, AuditedStrategy) else app.strategy
    if subject is not None and stated_by(subject) is not None:
        found += verdicts_on(subject, known, name=f"the server's {type(subject).__name__}", mods=app.mods)
    return found


def claims_in_words(
    folder: Path, client: ClientApp, taken: Mapping[str, Any], watch: OpacusWatch, defense: Defense | None = None
) -> list[str]:
    """Test an app's claims of differential privacy with few draws; return sentences on results and the tests' limits.

    ``client``: the app's; ``watch`` observed its training. ``taken``: arguments of the strategy's ``start``, with the
    strategy as ``self``; empty if none was started. ``defense``: a defense that acted on the uploads, if any.
    """
    strategy = taken["self"] if isinstance(taken.get("self"), Strategy) else None
    rounds, arrays = taken.get("num_rounds") or 1, taken.get("initial_arrays")
    app = ClaimedApp(folder=folder, client=client, strategy=strategy, arrays=arrays, rounds=rounds)
    with streams_put_back(), identity_put_back():
        asked = DpCheckRequest(draws=DRAWS)
        noised = defense is not None and any(isinstance(p.effect, Noise | SparseVector) for p in defense.parts)
        put = replace(asked, rounds=rounds, like=_shapes(app) if noised else None)
        elements = sum(array.numpy().size for array in (arrays or {}).values()) if put.like else 0
        found = attempt(
            lambda: [
                *_on_parts(app, asked),
                *watch.verdicts(DpCheckRequest(), rounds=rounds),
                *(on_defense(defense, put, elements=elements) if defense is not None and put.like else ()),
            ]
        )
    if isinstance(found, Failure):
        return [f"A claim of differential privacy was not tested: {found.reason}."]
    said = []
    for record in records_of(found):
        said.append(f"{record.subject}: {record.headline} ({record.sentence.removesuffix('.')}).")
        said += record.footnotes
    return said


def begun_app(path: Path) -> ClaimedApp:
    """Import an app and run its server app until the training starts; ``UserError`` if it can't be imported."""
    project = read_app(path)
    begun = project.load(stops_of)
    identify_process()
    app = ClaimedApp(folder=project.folder, client=begun.client, run_config=project.config, project=project)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(app.run_config))
    make = getattr(begun.server, "_server_fn", None)
    if make is not None:
        parts = _not_failed(attempt(lambda: make(context)))
        said = ["The strategy is one of Flower's legacy API, whose own noise, if it adds any, is not looked at."]
        if (parameters := getattr(parts.strategy, "initial_parameters", None)) is None:
            said.append("The server sends no model of its own to start from.")
        arrays = None if parameters is None else ArrayRecord(parameters_to_ndarrays(parameters))
        return replace(app, rounds=getattr(parts.config, "num_rounds", 1) or 1, arrays=arrays, problems=tuple(said))
    taken: dict[str, Any] = {}

    def start(original: Any, self: Strategy, grid: Any, initial_arrays: Any, num_rounds: int = 3, **more: Any) -> Any:
        taken.update(strategy=self, arrays=initial_arrays, rounds=num_rounds, config=more.get("train_config") or {})
        raise _Started

    ended = None  # an audit's own start would open its folder
    with replaced(Strategy, "start", start), replaced(AuditedStrategy, "start", start), suppress(_Started):
        ended = attempt(lambda: begun.server(LocalGrid(range(NODES)), context))
    _not_failed(ended)
    if not taken:
        return replace(app, problems=("The server app started no strategy of Flower's Message API.",))
    return replace(app, **taken)


def _not_failed(ended: Any) -> Any:
    if isinstance(ended, Failure):
        raise UserError(f"The app's server app ended before its training ({ended.reason}); run it by `flwr run` first.")
    return ended


def _shapes(app: ClaimedApp) -> Tensors | None:
    if app.arrays is None:
        return None
    arrays = {name: to_tensor(array.numpy()) for name, array in app.arrays.items()}
    floats = {name: value for name, value in arrays.items() if value.is_floating_point() and value.numel()}
    total = sum(value.numel() for value in floats.values())
    modules = [getattr(mod, "__module__", type(mod).__module__) for mod in app.mods]
    if total <= MOST_VALUES or any(module.partition(".")[0] != "flwr" for module in modules):  # own ones ask for shapes
        return {name: torch.zeros(value.shape) for name, value in floats.items()}
    share = MOST_VALUES / total
    return {name: torch.zeros(max(1, int(value.numel() * share))) for name, value in floats.items()}


def _on_mods(app: ClaimedApp, asked: DpCheckRequest) -> list[ClaimVerdict]:
    found = []
    for mod in app.mods:
        stated = stated_by(mod, rounds=app.rounds)
        if stated is None:
            continue
        name, mechanism = type(mod).__name__, mechanism_of_mod(together(app.mods), config=numbers_of(app.config))
        verdict = tested(f"the clients' {name}", mechanism, stated_by(mod) or stated, asked)
        once, multiplier = stated.claim is not None and stated.claim.rounds < app.rounds, stated.facts.noise_multiplier
        if once and multiplier:
            total = shown_epsilon(gaussian_epsilon(app.rounds**0.5 / multiplier, asked.delta))
            said = f"The claim is about one round; the noise of the app's {app.rounds} rounds spends epsilon {total}."
            verdict = replace(verdict, notes=(*verdict.notes, said))
        found.append(verdict)
    return found


def _trained(app: ClaimedApp) -> tuple[Message | None, OpacusWatch, tuple[str, ...]]:
    assert app.arrays is not None
    node: dict[str, Any] = {PARTITION: 0, PARTITIONS: NODES}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=dict(app.run_config))
    config = ConfigRecord({**dict(app.config), ROUND: 1})
    content = RecordDict({"arrays": app.arrays, "config": config})
    if getattr(app.client, "_call", None) is not None:
        parameters = ndarrays_to_parameters([array.numpy() for array in app.arrays.values()])
        content = fitins_to_recorddict(FitIns(parameters, {}), keep_input=True)
    with watched_opacus() as watch:
        reply = attempt(lambda: app.client(Message(content, 1, "train"), context))
    if isinstance(reply, Failure):
        return None, watch, (f"A client's training could not be run here: {reply.reason}.",)
    if reply.has_error():
        return None, watch, (f"A client's training ended with an error: {reply.error.reason}.",)
    return reply, watch, ()
