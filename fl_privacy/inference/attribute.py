"""What is the example behind an update like, beside its class? Learned from the gradients of public examples."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.gradients import GradientClassifier, GradientSketch, sketched_examples
from fl_privacy.inference.kinds import About
from fl_privacy.inference.read_round import ReadRound, mean_gradient
from fl_privacy.rng import derive_generator

HEADS = {"linear": 0, "mlp": 128}
"""Methods -> width of the classifier's hidden layer."""

TITLES = {"linear": "Linear classifier of gradients", "mlp": "Neural classifier of gradients"}


@dataclass(frozen=True, kw_only=True)
class AttributeInference:
    """An attribute of the example behind an update of a single one (Cui et al. 2023, "RecUP-FL", Sec. 3).

    The attacker computes the gradients of public examples at the values that were sent, trains classifiers that tell
    their attribute from them, and applies these to the victims' gradients. Logarithms of probabilities are added up
    over the rounds in which the same example is read.

    Attributes:
        methods: ``linear`` and ``mlp``.
        public: so many examples with known attributes, of the split that is not attacked.
    """

    about: ClassVar[About] = About.ATTRIBUTE
    methods: Sequence[str] = tuple(HEADS)
    public: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        for name in self.methods:
            checks.one_of("inference.attribute.methods", name, HEADS)
        checks.whole("inference.attribute.public", self.public, at_least=2, example=1000)

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> "AttributeWatch":
        """Of ``candidates`` victims, with ``classes`` possible attributes."""
        return AttributeWatch(self, {name: torch.zeros(candidates, classes) for name in self.methods})


@dataclass(eq=False)
class AttributeWatch:
    """(V, A) sums of logarithms of probabilities, by method."""

    settings: AttributeInference
    total: dict[str, Tensor] = field(repr=False)
    _seen: set[int] = field(default_factory=set, init=False)

    def add(self, read: ReadRound) -> None:
        """Classify the victims read in a round.

        Raises:
            UserError: the attacker holds no public examples whose attribute is known.
        """
        if not read.victims:
            return
        if read.public is None or read.public_attributes is None:
            raise UserError("Public examples with known attributes are expected, but there are none.")
        number = min(self.settings.public, len(read.public))
        public, attributes = read.public.first(number), read.public_attributes[:number].to(read.device)
        for place, (model, sent, own) in enumerate(read.victims_sent):
            observations = [read.victims[column] for column in own]
            gradients = [mean_gradient(observation) for _, observation in observations]
            shapes = {name: sent.parameters[name] for name in gradients[0]}
            rng = derive_generator(read.seed, "inference", "attribute", read.round, place)
            sketch = GradientSketch.of(shapes, rng)
            known = sketched_examples(model, sent, public, observations[0][1].plan, sketch)
            stacked = {n: torch.stack([g[n].to(read.device) for g in gradients]) for n in shapes}
            asked = sketch(stacked)
            rows = torch.tensor([row for row, _ in observations])
            for name, total in self.total.items():
                head = GradientClassifier.fit(known, attributes, total.shape[1], rng, hidden=HEADS[name])
                total[rows] += head(asked).log_softmax(1).nan_to_num().cpu()
            self._seen.update(rows.tolist())

    def answers(self) -> dict[str, Tensor]:
        """(V, A) of each method, higher for what is more likely; NaN for victims that were never read."""
        unseen = [row for row in range(len(next(iter(self.total.values())))) if row not in self._seen]
        found = {name: total.clone() for name, total in self.total.items()}
        for total in found.values():
            total[unseen] = torch.nan
        return found

    def titles(self) -> dict[str, tuple[str, str]]:
        """Title and source of each method."""
        return {name: (TITLES[name], "Cui et al. 2023") for name in self.total}
