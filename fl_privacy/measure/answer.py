"""Questions about what uploads leak, and their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fl_privacy.files import shipped
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Estimate
from fl_privacy.measure.rule import above_chance

Kind = Literal["image", "row", "node", "graph", "text", "other"]
QuestionName = Literal["examples", "labels", "classes", "words", "members", "participants", "continued"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Question that an audit answers, such as which examples can be reconstructed, with its titles on pages."""

    title: str
    measure: str = ""  # title of the measured figure; empty if examples are counted
    scenarios: int  # largest number of answers of one observer, any of which makes a page red


QUESTIONS: Mapping[QuestionName, Question] = {
    name: Question(**fields) for name, fields in shipped(__file__, "questions.json").items()
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Situation that an answer is about: the attacked uploads, such as those after one step on one example."""

    name: str = ""
    title: str = ""
    uploads: str = ""  # description in a phrase
    leaves: bool = True  # ``False`` if such uploads never leave a client
    examples: int = 1  # most examples behind one upload
    source: str = ""  # description of the attacked data, if not an upload of ``examples`` examples in one step

    @property
    def asked(self) -> bool:
        """Return whether only the audit asked for such uploads."""
        alone = self.name in ("one", "batch", "later")
        return alone or not self.leaves or (self.name == "site" and bool(self.uploads or not self.source))


@dataclass(frozen=True, kw_only=True, eq=False)
class Shown:
    """Original example and its guess, to show on a page; ``reconstructed``: whether the guess is good enough."""

    original: Any  # image (C, H, W) in [0, 1], features of a row in [0, 1], or word numbers of a text
    guess: Any  # guess in the same form, or ``None``
    reconstructed: bool  # ``True`` if the guess counts as a reconstruction


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """Answer to a question of an audit, such as how many examples can be reconstructed from a client's uploads.

    The answer is a number of examples by outcome (``counts``) or a statistic (``estimate``).
    """

    question: QuestionName = "examples"
    scenario: Scenario = field(default_factory=Scenario)
    kind: Kind = "other"
    counts: Counts | None = None  # number of examples by outcome; ``None`` if none was attacked
    estimate: Estimate | None = None  # figure with its 95 % interval; ``None`` if not measured
    control: Counts | Estimate | None = None  # result from uploads without these examples, if any
    labels: tuple[int, int] | None = None  # number of examples whose class was inferred, and of those with a known one
    reason: str = ""
    seconds: float = 0.0
    notes: Sequence[str] = ()
    shown: Sequence[Shown] = ()
    observer: Literal["server", "another_site", "outsider"] = "server"  # who sees the uploads
    among: int = 0  # number of answers of which any makes a page red; 0 takes the question's ``scenarios``

    def __post_init__(self) -> None:
        if self.question not in get_args(QuestionName) or self.kind not in get_args(Kind):
            raise ValueError(f"there is no question {self.question!r} about examples of the kind {self.kind!r}")

    @property
    def above_chance(self) -> bool:
        found = self.counts if self.counts is not None else self.estimate
        if found is None or (self.counts is None and self.control is None):
            return False
        return above_chance(found, among=self.among or QUESTIONS[self.question].scenarios, control=self.control)

    @property
    def leaks(self) -> bool:
        return self.scenario.leaves and self.above_chance

    @property
    def sampled(self) -> bool:
        """Return whether only some of an upload's examples were compared with guesses."""
        known = Counts() if self.counts is None else self.counts  # texts count once for each upload
        return self.scenario.name == "all" and known.groups < known.images < self.scenario.examples

    @property
    def share(self) -> float:
        return (self.counts.share or 0.0) if self.counts is not None else 0.0
