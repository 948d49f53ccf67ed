"""Texts for ``attack=auto``: read exactly where that is proven, else what reproduces the update best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fl_privacy.attacks.attack import Progress
from fl_privacy.attacks.exact.certificate import ROUNDING, Reproduction, model_as_sent
from fl_privacy.attacks.presets import inverting_gradients, tag
from fl_privacy.attacks.text import Dager
from fl_privacy.models import TextModel
from fl_privacy.types import Batch, Certainty, Observation, Reconstruction

TAG_RATE, TAG_DECAY = 0.2, 0.05
"""More of both than the preset has: embeddings that decay reach words sooner, also behind trained weights."""


@dataclass(frozen=True, kw_only=True)
class TextMembers:
    """DAGER, and for what it does not prove descents on the angle and on the distance of the gradients.

    Tokens leave no slope, so that the members are compared by how far the gradient of the tokens that each has read is
    from the update; the truth is never seen.

    Attributes:
        evaluations: of loss and gradient for each victim, shared by the descents.
        device: of the computation; that of the values sent if ``None``.
        most_victims: in one chunk; found from the free memory if ``None``.
    """

    evaluations: int
    device: str | None = None
    most_victims: int | None = None

    def __call__(self, observations: Sequence[Observation], *, seed: int, progress: Progress) -> list[Reconstruction]:
        """One reconstruction for each of ``observations``, which are of texts."""
        best = [replace(one, member="dager") for one in Dager()(observations, seed=seed)]
        left = [k for k, one in enumerate(best) if one.certainty is Certainty.APPROXIMATE]
        if not left:
            return best
        each = max(1, self.evaluations // 2)
        placed = {"device": self.device, "most_victims": self.most_victims}
        members = {
            "tag": replace(tag(iterations=each, lr=TAG_RATE, weight_decay=TAG_DECAY), **placed),  # type: ignore[arg-type]
            "inverting gradients": replace(inverting_gradients(iterations=each), **placed),  # type: ignore[arg-type]
        }
        apart = {k: _apart(observations[k], best[k]) for k in left}
        for name, member in members.items():
            for k, found in zip(
                left, member([observations[k] for k in left], seed=seed, progress=progress), strict=True
            ):
                distance = _apart(observations[k], found)
                if distance < apart[k] or (best[k].batch is None and found.batch is not None):
                    sure = Certainty.CONSISTENT if distance < ROUNDING else Certainty.APPROXIMATE
                    best[k], apart[k] = replace(found, member=name, certainty=sure), distance
        return best


def of_texts(observations: Sequence[Observation]) -> bool:
    """Whether ``observations`` are of texts."""
    return bool(observations) and all(isinstance(o.model, TextModel) for o in observations)


def _apart(observation: Observation, found: Reconstruction) -> float:
    """How far the gradient of what was ``found`` is from the update; infinite where nothing was."""
    if found.batch is None:
        return float("inf")
    reproduction = Reproduction(observation, model_as_sent(observation))
    batch = found.batch
    if batch.labels.dim() == 1 and (labels := reproduction.labels(batch.inputs)) is not None:
        batch = Batch(batch.inputs, labels)
    return reproduction.distance(batch)
