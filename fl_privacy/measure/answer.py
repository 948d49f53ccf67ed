"""An answer: one question about clients' examples, the uploads it was asked of, and what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fl_privacy.measure.counts import Counts
from fl_privacy.measure.roc import Estimate
from fl_privacy.measure.rule import above_chance

Kind = Literal["image", "row", "text", "other"]

QuestionName = Literal["examples", "classes", "words", "members"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about what uploads tell.

    Attributes:
        title: on a page.
        measure: the number that answers it; empty where examples are counted.
        scenarios: in which it is asked at most, of which any makes a page red.
    """

    title: str
    measure: str = ""
    scenarios: int


QUESTIONS: Mapping[QuestionName, Question] = {
    "examples": Question(title="Which examples a client trained on", scenarios=6),
    "classes": Question(
        title="Which client has more of which class than others",
        measure="correlation with the truth; 0 is what guessing gives",
        scenarios=3,
    ),
    "words": Question(
        title="Which client has which words or categories",
        measure="a client's own words or categories beside those read, F1; the control reads another client's upload",
        scenarios=3,
    ),
    "members": Question(
        title="Which of two examples a client trained on",
        measure="share of pairs that are told apart; 0.5 is what guessing gives",
        scenarios=3,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The uploads that a question was asked of.

    Attributes:
        name: in records.
        title: on a page.
        uploads: in a phrase.
        leaves: whether such uploads leave a client.
        examples: behind one upload, at most.
        source: what was attacked, where that is no upload of so many examples in a step.
    """

    name: str = ""
    title: str = ""
    uploads: str = ""
    leaves: bool = True
    examples: int = 1
    source: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shown:
    """An example and the guess at it, for a page.

    Attributes:
        original: an image (C, H, W) in [0, 1], the features of a row as shares of their ranges, or numbers of words.
        guess: likewise; ``None`` where there is none.
        reconstructed: whether the guess counts.
    """

    original: Any
    guess: Any
    reconstructed: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What an attacker found out from the uploads of a scenario.

    Attributes:
        question: name in ``QUESTIONS``.
        scenario: the uploads.
        kind: of the examples.
        counts: of examples, by what came of them; ``None`` where none was attacked.
        estimate: with its 95 % interval, where the question is answered by a number; ``None`` where none was measured.
        control: the same from uploads that do not hold these examples; ``None`` where there is none.
        labels: number of examples whose class was right, and of those whose class is known.
        reason: why there is neither counts nor estimate.
        seconds: that the attack took.
        notes: sentences for a page.
        shown: some of the examples.
    """

    question: QuestionName = "examples"
    scenario: Scenario = field(default_factory=Scenario)
    kind: Kind = "other"
    counts: Counts | None = None
    estimate: Estimate | None = None
    control: Counts | Estimate | None = None
    labels: tuple[int, int] | None = None
    reason: str = ""
    seconds: float = 0.0
    notes: Sequence[str] = ()
    shown: Sequence[Shown] = ()

    def __post_init__(self) -> None:
        if self.question not in get_args(QuestionName) or self.kind not in get_args(Kind):
            raise ValueError(f"there is no question {self.question!r} about examples of the kind {self.kind!r}")

    @property
    def above_chance(self) -> bool:
        """Say whether more was found than chance and the control allow; an estimate without control never is."""
        found = self.counts if self.counts is not None else self.estimate
        if found is None or (self.counts is None and self.control is None):
            return False
        return above_chance(found, among=QUESTIONS[self.question].scenarios, control=self.control)

    @property
    def leaks(self) -> bool:
        """Say whether that was found from what leaves a client."""
        return self.scenario.leaves and self.above_chance

    @property
    def share(self) -> float:
        """Return the share of examples that were reconstructed, of those judged; 0 where none was."""
        return (self.counts.share or 0.0) if self.counts is not None else 0.0
