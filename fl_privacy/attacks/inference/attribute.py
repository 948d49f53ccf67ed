"""Infer an attribute of the example behind an update, by classifiers of public examples' gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.attacks.inference.kinds import About
from fl_privacy.attacks.inference.membership import MembershipWatch, cosines
from fl_privacy.attacks.inference.read_round import ReadRound, mean_gradient
from fl_privacy.attacks.inference.shadow_models import MembershipMethod, MethodOptions, averaged
from fl_privacy.errors import UserError
from fl_privacy.models.gradients import GradientClassifier, GradientSketch, sketched_examples
from fl_privacy.rng import derive_generator
from fl_privacy.types import ModelState, Observation

HEADS = {"linear": 0, "mlp": 128}  # methods and the width of their classifier's hidden layer
ADAPTIVE = "_adaptive"  # suffix of a method that learns from defended uploads
FEWEST = 2  # least number of public examples to learn from
TITLES = {"linear": "Linear classifier of gradients", "mlp": "Neural classifier of gradients"}


@dataclass(frozen=True, kw_only=True)
class AttributeInference:
    """Attack that infers an attribute of the single example behind an update (Cui et al. 2023, "RecUP-FL", Sec. 3).

    Classifiers learn the attribute from public examples' gradients at the sent model; log probabilities are summed.
    """

    about: ClassVar[About] = About.ATTRIBUTE
    adaptive: ClassVar[bool] = False
    methods: Sequence[str] = tuple(HEADS)  # classifiers, ``linear`` and ``mlp``
    public: int = 1000  # number of public examples with known attributes, from the split that is not attacked

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        for name in self.methods:
            checks.one_of("inference.attribute.methods", name, HEADS)
        checks.whole("inference.attribute.public", self.public, at_least=FEWEST, example=1000)

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> "AttributeWatch":
        names = [f"{name}{ADAPTIVE}" if self.adaptive else name for name in self.methods]
        total = {name: torch.zeros(candidates, classes) for name in names}
        return AttributeWatch(self, total, torch.zeros(candidates, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True)
class AdaptiveAttributeInference(AttributeInference):
    """Attribute inference by an attacker who knows the defense, but not the clients' secrets.

    The attack learns from defended uploads; ``threat_model=adaptive`` runs it next to :class:`AttributeInference`.
    """

    adaptive: ClassVar[bool] = True


@dataclass(eq=False)
class AttributeWatch:
    """Observer that sums log probabilities of the A values of an attribute for V victims over the rounds."""

    settings: AttributeInference
    total: dict[str, Tensor] = field(repr=False)  # name of a method -> sums (V, A)
    seen: Tensor = field(repr=False)  # (V,) ``True`` for victims with finite uploads so far

    def add(self, read: ReadRound) -> None:
        """Infer attributes of victims with finite uploads; ``UserError`` if too few public examples' are finite."""
        if not read.victims:
            return
        for place, (model, sent, own) in enumerate(read.grouped([each for _, each in read.victims])):
            observations = [read.victims[column] for column in own]
            rng = derive_generator(read.seed, "inference", "attribute", read.round, place)
            sketch = GradientSketch.of({name: sent.parameters[name] for name in observations[0][1].update()}, rng)
            asked = torch.cat([_sketched(sketch, observation, read) for _, observation in observations])
            finite = asked.isfinite().all(1)
            if not finite.any():
                continue
            asked, rows = asked[finite], torch.tensor([row for row, _ in observations])[finite.cpu()]
            known, attributes = self._known(read, model, sent, sketch)
            sound = known.isfinite().all(1)
            if (left := int(sound.sum())) < FEWEST:
                raise UserError(
                    f"At least {FEWEST} public examples with finite uploads are expected to learn an attribute from,"
                    f" but {left} of {len(known)} are; raise inference.attribute.public."
                )
            for name, total in self.total.items():
                hidden = HEADS[name.removesuffix(ADAPTIVE)]
                head = GradientClassifier.fit(known[sound], attributes[sound], total.shape[1], rng, hidden=hidden)
                total[rows] += head(asked).log_softmax(1).nan_to_num().cpu()
            self.seen[rows] = True

    def _known(
        self, read: ReadRound, model: nn.Module, sent: ModelState, sketch: GradientSketch
    ) -> tuple[Tensor, Tensor]:
        if self.settings.adaptive and read.rehearsal is not None:
            own, rehearsed = read.rehearsal.attributes, read.rehearsal.uploads(sent, self.settings.public)
            known = torch.cat([_sketched(sketch, observation, read) for observation in rehearsed])
            return known, own[: len(known)].to(read.device)
        if self.settings.adaptive or read.public is None or read.public_attributes is None:
            raise UserError("Public examples with attributes are expected, but got none; use data that has them.")
        public = read.public.first(min(self.settings.public, len(read.public)))
        known = sketched_examples(model, sent, public, read.victims[0][1].plan, sketch)
        return known, read.public_attributes[: len(known)].to(read.device)

    def answers(self) -> dict[str, Tensor]:
        return {name: torch.where(self.seen[:, None], total, torch.nan) for name, total in self.total.items()}

    def titles(self) -> dict[str, tuple[str, str]]:
        knowing = ", knows the defense" if self.settings.adaptive else ""
        return {n: (TITLES[n.removesuffix(ADAPTIVE)] + knowing, "Cui et al. 2023") for n in self.total}


def _sketched(sketch: GradientSketch, observation: Observation, read: ReadRound) -> Tensor:
    return sketch({name: t.to(read.device).unsqueeze(0) for name, t in mean_gradient(observation).items()})


def _above_mean(values: Tensor) -> Tensor:
    return values - values.nanmean(1, keepdim=True)


METHODS: dict[str, type[MembershipMethod]] = {
    "loss": averaged("Lowest loss (SIA)", "Hu et al. 2021", lambda read: -_above_mean(read.losses_after)),
    "cosine": averaged("Largest cosine", "Li et al. 2022", lambda read: _above_mean(cosines(read))),
}


@dataclass(frozen=True, kw_only=True)
class SourceInference:
    """Attack that infers which client has an example (Hu et al. 2021, "Source inference attacks")."""

    about: ClassVar[About] = About.SOURCE
    methods: Sequence[str] = tuple(METHODS)  # ``loss`` is the paper's, ``cosine`` compares gradients
    members: int = 1000  # number of the clients' examples whose owner is inferred

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        for name in self.methods:
            checks.one_of("inference.source.methods", name, METHODS)
        checks.whole("inference.source.members", self.members, at_least=2, example=1000)

    def begin(self, candidates: int, clients: Sequence[int], classes: int) -> MembershipWatch:
        return MembershipWatch({name: METHODS[name](candidates, clients, MethodOptions()) for name in self.methods})
