"""Check an audit's arguments before the training, test claims of differential privacy, and report."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Result, Strategy

from fl_privacy.auditing.server_step import PLAIN_MEAN
from fl_privacy.auditing.session import AuditSession
from fl_privacy.auditing.strategy_model import AuditedModel
from fl_privacy.checks import whole
from fl_privacy.dp_check.check import DpCheckRequest
from fl_privacy.dp_check.claims import Claim, Facts, recompute
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.effects import Description, to_plain
from fl_privacy.errors import UserError
from fl_privacy.federation import ServerPlan, audited_rounds
from fl_privacy.federation.interception import CaptureWriter, ObservationBuffer, ids_of, recognize_training
from fl_privacy.flower.audit_protocol import ProbedImages
from fl_privacy.flower.curious import HonestButCurious
from fl_privacy.flower.dp_mechanisms import stated_by, verdicts_on
from fl_privacy.flower.records import CLIENT, PARTITION, to_tensor
from fl_privacy.report.audit_page import AuditRecord
from fl_privacy.report.audit_parts import Captured
from fl_privacy.runs.build import attack_called
from fl_privacy.runs.folder import RunFolder
from fl_privacy.runs.folder.claims import ClaimRecord, records_of
from fl_privacy.runs.folder.ongoing import CAPTURES
from fl_privacy.types import LocalPlan, ModelState, Observation, VictimId
from fl_privacy.types.plan import Normalization


def expect_strategy(strategy: object) -> None:
    """Raise ``UserError`` unless this is a Flower strategy that trains a network."""
    kind = strategy if isinstance(strategy, type) else type(strategy)
    if isinstance(strategy, FedXgbBagging | FedXgbCyclic):
        raise UserError(f"A network is expected to be trained, but {kind.__name__} trains trees; use `audit APP`.")
    if isinstance(strategy, Strategy):
        return
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise UserError(
            f"strategy is expected to be made, but got the class {kind.__name__}; write {kind.__name__}(...)."
        )
    if any(base.__module__.startswith("flwr.server.strategy") for base in kind.__mro__):
        raise UserError(
            f"A strategy of flwr.serverapp.strategy is expected, but {kind.__name__} is one of the legacy"
            f" flwr.server.strategy; use flwr.serverapp.strategy.{kind.__name__}, and for NumPyClients"
            " fl_privacy.flower.numpy_client_app(client_fn)."
        )
    raise UserError(
        f"A strategy of flwr.serverapp.strategy is expected, but got {kind.__name__}; try audit(FedAvg(), model=Net)."
    )


def expect_rounds(rounds: object) -> None:
    """Raise ``UserError`` unless ``rounds`` is a name such as ``last``, a number from 1 on, or a list of numbers."""
    several = isinstance(rounds, list | tuple | set | frozenset | range)
    if isinstance(rounds, str) or not rounds or not (several or isinstance(rounds, int)):
        audited_rounds(rounds if isinstance(rounds, str) else [], 1, name="rounds", most="num_rounds")
        return
    for one in rounds if several else [rounds]:  # type: ignore[attr-defined]
        whole("rounds", one, at_least=1, example=1)


MOST_PARTITION, AGREED = 999_999_999, 0.5
"""Largest number of a client, and share of clients above which their stated defense counts as the training's."""


def partition_of(reply: Message) -> int | None:
    """Return the partition that a reply's client claims, if any."""
    record = reply.content.config_records.get(CLIENT)
    number = None if record is None else record.get(PARTITION)
    return number if type(number) is int and 0 <= number <= MOST_PARTITION else None


@dataclass(eq=False)
class NamingServer(HonestButCurious):
    """An honest-but-curious server that gives each node a permanent number.

    The number is the partition that the node claims, else the rank of its id; the next free one if that is taken.
    """

    partitions: dict[int, int] = field(default_factory=dict, init=False)
    _numbers: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def client_of(self, message: Message, reply: Message) -> int:
        node = message.metadata.dst_node_id
        if node not in self._numbers:
            here = set(self._node_ids)
            taken = {number for other, number in self._numbers.items() if other in here}
            stated = partition_of(reply)
            ranked = self._node_ids.index(node) if node in here else len(self._node_ids)
            number = ranked if stated is None else stated
            while number in taken:
                number = (number + 1) % (MOST_PARTITION + 1)
            for gone in [other for other, theirs in self._numbers.items() if theirs == number]:
                del self._numbers[gone]
            self._numbers[node] = number
            self.partitions.pop(number, None)
            if stated is not None:
                self.partitions[number] = stated
        return self._numbers[node]


@dataclass(eq=False)
class AuditReport(AuditSession):
    """The audit of a strategy; captured updates are attacked after the training, as in a run.

    Attributes:
        partitions: client number -> partition that the client claims.
        identified: numbers of clients that claimed a partition in any round so far.
        nodes: largest number of nodes connected at once; ``None`` before the training.
        server: rule by which the strategy applies the mean update, or the reason why it does not.
    """

    out: Path
    attack: Any
    strategy: str
    model: AuditedModel
    victims: int

    def __post_init__(self) -> None:
        self._attack, self._attack_name = attack_called(self.attack)
        self._reset()

    def _reset(self) -> None:
        super().__init__(self.out)
        self._found, self.seen = Counter[str](), Counter[str]()
        self._images, self._defenses = dict[VictimId, ProbedImages](), dict[int, Description]()
        self.partitions: Mapping[int, int] = {}
        self.nodes: int | None = None
        self._run: RunFolder | None = None
        self.result: Result | None = None
        self._given, self.identified = frozenset[str](), set[int]()
        self.server: ServerPlan | str = PLAIN_MEAN

    def open(self, plan: LocalPlan, given: frozenset[str], audited: Sequence[int], rounds: int) -> None:
        """Create the folder of the audit; a folder with the same settings is moved aside.

        ``given``: fields of ``plan`` that the user gave. ``audited``: rounds to audit.
        """
        from fl_privacy.runs.folder.records import dump_json  # noqa: PLC0415

        self._reset()
        self._given = given
        config, label = self._config(plan, audited, rounds), f"audit-{self.strategy}-{self.model.name}"
        text = dump_json(config, indent=1)
        try:
            run = RunFolder.open_or_create(self.out, label=label, config=config, config_text=text, overwrite=True)
        except OSError as error:
            raise UserError(
                f"out is expected to be a folder that can be written, but {self.out} can't be ({error.strerror});"
                " name another."
            ) from error
        self._run, self.folder, captures = run, run.path, run.path / CAPTURES
        self._writer, self._observations = CaptureWriter(captures), ObservationBuffer(captures, written=True)
        self.write()

    def close(self) -> None:
        if self._run is not None:
            self._run.close()

    def captured(self, observation: Observation) -> None:
        known, said = recognize_training(observation, self._given)
        self._found.update(said)
        self._writer.write(known)
        self._observations.append(known)

    def probed(self, victim: VictimId, images: ProbedImages) -> None:
        stated = images.normalization
        channels = {len(stated.mean), len(stated.std)} if stated else {1}
        if not channels <= {1, self.model.input_shape[0]}:
            raise UserError(
                f"A client is expected to normalize images of {self.model.input_shape[0]} channels, but {victim} says"
                f" {stated.in_words() if stated else ''}; correct its transform."
            )
        self._images[victim] = images
        self.write()

    def defended(self, client: int, parts: Description) -> None:
        if (parts and not self._defenses.get(client)) or client not in self._defenses:
            self._defenses[client] = parts
            self.write()

    def attack_all(self) -> None:
        from fl_privacy.runs.app import CapturedApp, as_clients_normalize, report_app  # noqa: PLC0415
        from fl_privacy.runs.run_location import LineMonitor  # noqa: PLC0415

        assert self._run is not None
        if not self._observations:
            raise self._nothing()
        own, stated, source = self.model.normalization, self._normalizations(), self.model.source
        seen = as_clients_normalize(self._observations, stated, own)
        captured = CapturedApp(
            observations=seen,
            source=source,
            record=self.record(),
            found=self._found,
            victims=self.victims,
            server=self.server,
        )
        self.line = report_app(captured, self._attack, self._attack_name, self._run, monitor=LineMonitor())

    def record(self, going_on: str = "") -> AuditRecord:
        observed = {observation.client for observation in ids_of(self._observations)}
        defenses = {client: parts for client, parts in self._defenses.items() if client in observed}
        spelled = {client: json.dumps(to_plain(parts), sort_keys=True) for client, parts in defenses.items()}
        usual, number = Counter(spelled.values()).most_common(1)[0] if spelled else ("", 0)
        most = next((defenses[client] for client, text in spelled.items() if text == usual), ())
        return AuditRecord(
            app=self.strategy,
            problems=[f"{why} ({n} times)" if n > 1 else why for why, n in self.seen.items() if why],
            notes=self._sources(),
            going_on=going_on,
            nodes=self.nodes,
            captured=Captured(
                model=self.model.path,
                normalization=self.model.normalization,
                normalizations=self._normalizations(),
                defense=most if number > AGREED * len(defenses) else (),
                defenses=defenses,
                fingerprints={str(victim): tuple(images.fingerprints) for victim, images in self._images.items()},
                rates_estimated="lr" not in self._given,
                partitions=self.partitions,
                identified=frozenset(self.identified),
            ),
        )

    def _normalizations(self) -> dict[int, Normalization | None]:
        if self.model.normalization_given:
            return {}
        found: dict[int, Normalization | None] = {}
        for victim, images in self._images.items():
            found.setdefault(victim.client, images.normalization)
        return found

    def _sources(self) -> list[str]:
        if self.model.normalization_given:
            return ["The normalization of images was given."]
        clients = Counter(self._normalizations().values())
        said = [
            f"{'Clients' if number == clients.total() else f'{number} of {clients.total()} clients'} say that they"
            f" normalize images by {one.in_words()}."
            for one, number in clients.most_common()
            if one is not None
        ]
        seen = self.model.source.normalization
        return said or ([f"The images of data are normalized by {seen.in_words()}."] if seen else [])

    def _nothing(self) -> UserError:
        from fl_privacy.runs.weights import MODEL, write_weights  # noqa: PLC0415

        kept, path = "", self.folder / MODEL
        if self.result is not None and self.result.arrays is not None:
            write_weights(path, ModelState({k: to_tensor(v.numpy()) for k, v in self.result.arrays.items()}))
            kept = f" The trained weights are in {path}."
        why = max(self.seen, key=lambda reason: self.seen[reason], default="").rstrip(".")
        why = why or "no client replied in the audited rounds"
        return UserError(
            f"The audit is expected to capture updates, but captured none, which says nothing about privacy: {why};"
            f" audit rounds in which clients train, and see the warnings above.{kept}"
        )

    def _config(self, plan: LocalPlan, audited: Sequence[int], rounds: int) -> dict[str, Any]:
        normalization, data, attack = self.model.normalization, self.model.source.name, self._attack_name
        return {
            "command": "audit",
            "choices": {"data": data, "model": "custom", "federation": self.strategy, "attack": attack},
            "data": {"name": data},
            "model": {
                "_target_": self.model.path,
                "input_shape": list(self.model.input_shape),
                "num_classes": self.model.num_classes,
                **({} if normalization is None else asdict(normalization)),
            },
            "federation": {"strategy": self.strategy, "rounds": rounds, "plan": asdict(plan)},
            "attack": {"name": attack},
            "intercept": {"uploads": "both", "rounds": list(audited)},
            "victims": self.victims,
            "batch_size": 1,
            "seed": 0,
        }


KEYS = {name: name for name in ("epsilon", "delta", "noise_multiplier", "sample_rate")}
KEYS |= {name.replace("_", "-"): name for name in KEYS}
"""Metric of clients that train by Opacus -> its meaning."""

MOST_STATED, DRAWS = 1e12, 500
"""Limit above which a client's stated figures are ignored, and number of draws on either neighbor, so that the page is
not delayed."""

COUNTS = frozenset({"num-examples", "num_examples"})

SETTINGS = frozenset({"target_delta", "target-delta", "target_epsilon", "max_grad_norm", "max-grad-norm"})
"""Metrics that are training settings, and no figures of the client's data."""


@dataclass(eq=False)
class StatedByReplies:
    """Names of metrics in replies, and the weakest privacy guarantee in the last replies: ``stated``, name -> value."""

    stated: dict[str, float] = field(default_factory=dict)
    metrics: set[str] = field(default_factory=set)

    def see(self, replies: Sequence[Message]) -> None:
        found: dict[str, list[float]] = {}
        usable = (reply for reply in replies if not reply.has_error() and reply.has_content())
        for record in (record for reply in usable for record in reply.content.metric_records.values()):
            for name, value in list(record.items())[:64]:
                if type(value) in (int, float) and abs(value) < MOST_STATED:  # type: ignore[arg-type]
                    self.metrics.add(str(name)[:64])
                    if name in KEYS:
                        found.setdefault(KEYS[name], []).append(float(value))  # type: ignore[arg-type]
        for name, values in found.items():
            self.stated[name] = min(values) if name == "noise_multiplier" else max(values)


def audited_claims(strategy: Strategy, replies: StatedByReplies, rounds: int) -> tuple[ClaimRecord, ...]:
    """Test the DP claims for ``rounds`` rounds: the strategy's by sampling its noise, and those in clients' replies."""
    found: list[ClaimVerdict] = []
    if stated_by(strategy) is not None:
        name, request = f"the server's {type(strategy).__name__}", DpCheckRequest(rounds=rounds, draws=DRAWS)
        found += verdicts_on(strategy, request, name=name)
    if "epsilon" in replies.stated:
        found.append(_of_clients(replies.stated, rounds))
    if found:
        found[0] = replace(found[0], notes=(*found[0].notes, *uncovered(sorted(replies.metrics))))
    return records_of(found)


def uncovered(metrics: Iterable[str]) -> tuple[str, ...]:
    """Return a sentence that warns of ``metrics`` on clients' data, which no noise covers; empty if there are none."""
    names = [name for name in metrics if name not in COUNTS | SETTINGS | KEYS.keys()]
    said = (
        f"Next to their arrays clients send {', '.join(names[:6])}: figures about their data that no noise covers;"
        " withhold them, or add noise and count them in."
    )
    return (said,) if names else ()


def _of_clients(stated: dict[str, float], rounds: int) -> ClaimVerdict:
    delta = stated.get("delta", 1e-5)
    if not 0 < delta < 1 or stated["epsilon"] < 0:
        return ClaimVerdict(subject="clients' own reports", claim=None, notes=("What they report is no epsilon.",))
    claim = Claim(epsilon=stated["epsilon"], delta=delta, unit="example", rounds=rounds, by="clients")
    multiplier, rate = stated.get("noise_multiplier"), stated.get("sample_rate", 1.0)
    multiplier = multiplier if multiplier is not None and multiplier >= 0 else None
    missing = ["their noise multiplier"] if multiplier is None else []
    facts = Facts(
        noise_multiplier=multiplier,
        sample_rate=rate if 0 < rate <= 1 else 1.0,
        sampling=None if rate < 1 else "none",
        rounds=rounds,
        missing=(*missing, "how many steps of a round add noise (taken to be one)"),
    )
    return ClaimVerdict(subject="clients' own reports", claim=claim, recomputed=recompute(facts, delta=delta))
