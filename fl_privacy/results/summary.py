"""What is known of a run: its accuracy, leakage and cost."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fl_privacy.metrics import Statistic
from fl_privacy.metrics.epsilon_bounds import promises_little
from fl_privacy.metrics.registry import IMAGE_METRIC, TEXT_METRIC
from fl_privacy.results.counts import Counts
from fl_privacy.results.findings import Finding
from fl_privacy.victim_ids import Attacker


@dataclass(frozen=True, kw_only=True)
class Recognized:
    """How many of ``n`` images a paper's own threshold counts; see ``metrics.Threshold``. No verdict rests on it."""

    metric: str
    value: float
    leaks: Literal["above", "below"]
    source: str
    recognizable: int
    n: int


@dataclass(frozen=True, kw_only=True)
class Traced(Statistic):
    """The tracing distance over the attacks on a round.

    Attributes:
        attacked: distance of the attacked images alone.
        queries: images that were asked for.
        participants: among whom they were traced, at most.
        chance: distance of guessing.
    """

    attacked: float
    queries: int
    participants: int
    chance: float


@dataclass(frozen=True, kw_only=True)
class Leakage:
    """What one attacker achieved in one round.

    Attributes:
        metrics: by name, over the images on which the attack did not fail; intervals are over uploads.
        counts: how many were read.
        thresholds: the counts of the papers, for the metrics that have one.
        tracing: ``None`` where nothing was traced.
        label_sources: how labels were found -> on how many images.
        certainties: how sure the attacker itself is -> of how many images, see :class:`fl_privacy.types.Certainty`.
        members: which of the attacks that were tried read them -> how many images; empty of an attack that is one.
        images: that were attacked.
        failures: of them.
    """

    metrics: Mapping[str, Statistic] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    thresholds: tuple[Recognized, ...] = ()
    tracing: Traced | None = None
    label_sources: Mapping[str, int] = field(default_factory=dict)
    certainties: Mapping[str, int] = field(default_factory=dict)
    members: Mapping[str, int] = field(default_factory=dict)
    images: int = 0
    failures: int = 0

    @property
    def main(self) -> str:
        """The metric that is shown first: of images PSNR, of texts the F1 of their tokens."""
        return TEXT_METRIC if TEXT_METRIC in self.metrics else IMAGE_METRIC

    def recognized_by(self, metric: str) -> Recognized | None:
        """The count of a paper by ``metric``; ``None`` where that was not measured."""
        return next((bound for bound in self.thresholds if bound.metric == metric), None)


@dataclass(frozen=True, kw_only=True)
class AttackedRound:
    """What leaked in a round; ``by`` has the attackers that attacked it. An image attacked in two rounds is one."""

    round: int
    by: Mapping[Attacker, Leakage]


@dataclass(frozen=True, kw_only=True)
class TestedRound:
    """A round after which the model was tested, its accuracy in [0, 1] and the epsilon spent by then, if any."""

    round: int
    accuracy: float
    epsilon: float | None


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Epsilon after the last round, what it refers to, or why it is ``missing``.

    Attributes:
        epsilon: ``None`` where there is no guarantee.
        delta: of epsilon.
        accountant: that computed it.
        missing: why there is no guarantee.
        unit: what is protected, ``example`` or ``client``; ``None`` where that was not recorded.
        covered: whether the accountant's assumptions hold for how this run drew its batches.
        rounds: of training that it covers.
    """

    epsilon: float | None
    delta: float
    accountant: str
    missing: str | None
    unit: str | None = None
    covered: bool = False
    rounds: int = 0

    @property
    def promises_little(self) -> bool:
        """Whether there is an epsilon, but one that must not be taken for protection."""
        return self.epsilon is not None and promises_little(epsilon=self.epsilon, delta=self.delta)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """How long it took; ``defense`` is summed over clients, ``total`` is wall time, ``None`` where it is not known."""

    training: float
    defense: float
    attack: float
    adaptive: float
    total: float | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Of a run.

    Attributes:
        finished: whether it came to its end.
        attacked: the attacked rounds in order.
        countermeasures: what the adaptive attacker did against the defense, a sentence each.
        batch_norm: modes in the attacked uploads, none for models without.
        update_distortion: what the defense did to the updates, by figure.
        upload: of one client's reply in one round: ``upload_bytes`` and ``defense_seconds``.
        privacy: ``None`` where nothing was trained.
        tested: the rounds after which the model was tested.
        final_accuracy: in [0, 1]; ``None`` where nothing was tested.
        undefended_accuracy: of the same training without defense.
        pmm: in percent.
        seconds: it took.
        upload_bytes: by all clients together.
        inferred: what inference attacks found out beside images.
    """

    finished: bool
    attacked: tuple[AttackedRound, ...]
    countermeasures: tuple[str, ...]
    batch_norm: tuple[str, ...]
    update_distortion: Mapping[str, Statistic]
    upload: Mapping[str, Statistic]
    privacy: Spent | None
    tested: tuple[TestedRound, ...]
    final_accuracy: float | None
    undefended_accuracy: float | None
    pmm: float | None
    seconds: Seconds
    upload_bytes: int
    inferred: tuple[Finding, ...] = ()

    def last_by(self, attacker: Attacker) -> Leakage | None:
        """What ``attacker`` achieved in the last round that it attacked; ``None`` if it attacked none."""
        return next((entry.by[attacker] for entry in reversed(self.attacked) if attacker in entry.by), None)

    @property
    def plain(self) -> Leakage:
        """By the plain attacker in the last round; nothing where there was none."""
        return self.last_by(Attacker.PLAIN) or Leakage()

    @property
    def adaptive(self) -> Leakage | None:
        """By the adaptive attacker in the last round."""
        return self.last_by(Attacker.ADAPTIVE)

    def as_json(self) -> dict[str, Any]:
        """What ``summary.json`` holds beside the verdict: what the plain attacker read in the last round, and all else
        beside it."""
        content = asdict(self)
        del content["finished"], content["countermeasures"]
        seconds = content["seconds"].pop("adaptive")
        adaptive = None
        if self.adaptive is not None:
            adaptive = {**_plain(self.adaptive), "countermeasures": self.countermeasures, "seconds": seconds}
        attacked = [
            {"round": entry.round, **{a: _plain(entry.by[a]) if a in entry.by else None for a in Attacker}}
            for entry in self.attacked
        ]
        status = "finished" if self.finished else "interrupted"
        return {"status": status, **_plain(self.plain), **content, "adaptive": adaptive, "attacked": attacked}


def _plain(leakage: Leakage) -> dict[str, Any]:
    return {**asdict(leakage), "counts": leakage.counts.as_plain()}
