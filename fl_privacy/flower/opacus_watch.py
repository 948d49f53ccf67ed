"""What Opacus is asked to do in a client's training, seen from outside: its noise, its sampling, its own epsilon."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.dp_check.asked import Asked, tested
from fl_privacy.dp_check.claims import Claim, Facts, Stated, recompute
from fl_privacy.dp_check.draws import Mechanism, Neighbors
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.types import Tensors

MOST_DRAWS = 500
"""Steps of Opacus' optimizer on either neighbor where their number is not given."""


@dataclass(eq=False)
class OpacusWatch:
    """Observes what Opacus does in a training.

    Attributes:
        module: the last that was made private.
        optimizer: its.
        sample_rate: of its batches.
        poisson: whether batches are Poisson samples.
        claims: (epsilon, delta) that its accountant was asked for.
        engines: accountants that were made: epsilon of each starts from none.
        inputs: the last batch that entered the module.
    """

    module: Any = None
    optimizer: Any = None
    sample_rate: float = 1.0
    poisson: bool = True
    claims: list[tuple[float, float]] = field(default_factory=list)
    engines: int = 0
    inputs: Tensor | None = None

    def verdicts(self, asked: Asked, *, rounds: int) -> list[ClaimVerdict]:
        """Check Opacus' epsilon, if asked for, against its noise, and one step against its noise multiplier.

        Args:
            asked: how.
            rounds: of the training, each of which makes an accountant anew.
        """
        if self.optimizer is None:
            return []
        steps = max(1, _steps(self.optimizer))
        facts = Facts(
            noise_multiplier=float(self.optimizer.noise_multiplier),
            sample_rate=min(1.0, self.sample_rate),
            sampling="poisson" if self.poisson else "shuffle",
            releases=steps,
        )
        found = []
        if self.claims:
            epsilon, delta = self.claims[-1]
            claim = Claim(epsilon=epsilon, delta=delta, unit="example", by="Opacus")
            every = recompute(replace(facts, rounds=rounds), delta=delta).epsilon
            note = (
                f"Each round makes an accountant anew: {epsilon:.3g} is of one round; all {rounds} rounds spend"
                f" {every:.3g} together."
                if rounds > 1 and every is not None
                else ""
            )
            found.append(
                ClaimVerdict(
                    subject="Opacus' accountant in a client's training",
                    claim=claim,
                    recomputed=recompute(facts, delta=delta),
                    notes=(note,) if note else (),
                )
            )
        return [*found, *self._one_step(asked)]

    def _one_step(self, asked: Asked) -> list[ClaimVerdict]:
        """Draw the gradient of a step with a canary in the batch and without it."""
        if self.inputs is None or len(self.inputs) < 1:
            return []
        once = Stated(
            claim=None, facts=Facts(noise_multiplier=float(self.optimizer.noise_multiplier)),
            clip_norm=float(self.optimizer.max_grad_norm), unit="example",
        )  # fmt: skip
        draws = asked.draws or MOST_DRAWS
        question = Asked(delta=asked.delta, draws=draws, seed=asked.seed)
        mechanism, pair = step_of(self.module, self.optimizer, self.inputs)
        return [tested("one step of Opacus on a batch with the record", mechanism, once, question, pair=pair)]


def _steps(optimizer: Any) -> int:
    return int(getattr(optimizer, "_fl_privacy_steps", 0))


def step_of(module: nn.Module, optimizer: Any, inputs: Tensor) -> tuple[Mechanism, Neighbors]:
    """Make a function of one step: from a batch to the noised sum of its clipped gradients.

    Args:
        module: that Opacus made private; its last layer's outputs are taken for logits.
        optimizer: that Opacus made; neither its state nor its accountant is moved.
        inputs: a batch that entered the module.
    """
    example = inputs[:1].detach()
    canary = 50 * torch.randn(example.shape, generator=torch.Generator().manual_seed(0)).to(example)
    hook = getattr(optimizer, "step_hook", None)

    def mechanism(batch: Tensor) -> Tensors:
        optimizer._is_last_step_skipped = False  # as a training that was cut off within a batch leaves it
        optimizer.zero_grad(set_to_none=True)
        outputs = module(batch)
        labels = torch.zeros(len(batch), dtype=torch.int64, device=outputs.device)
        # Of the least likely class: its gradient is as long as the clipping lets it be.
        labels[1:] = outputs[1:].detach().argmin(1)
        nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step_hook = None
        try:
            optimizer.pre_step()
        finally:
            optimizer.step_hook = hook
        size = float(optimizer.expected_batch_size or 1)
        return {str(n): p.grad.detach() * size for n, p in enumerate(optimizer.params) if p.grad is not None}

    pair = Neighbors(
        first=torch.cat([example, canary]), second=example, what="a batch with a canary against the batch without it"
    )
    return mechanism, pair


@contextmanager
def watched_opacus() -> Iterator[OpacusWatch]:
    """Watch what Opacus is asked to do; where it is not installed, nothing is seen."""
    watch = OpacusWatch()
    if find_spec("opacus") is None:
        yield watch
        return
    from opacus import PrivacyEngine  # noqa: PLC0415

    make, ask = PrivacyEngine.make_private, PrivacyEngine.get_epsilon

    def make_private(self: Any, **given: Any) -> Any:
        made = make(self, **given)
        watch.module, watch.optimizer = made[0], made[1]
        loader = given["data_loader"]
        watch.sample_rate = 1 / max(1, len(loader))
        watch.poisson = given.get("poisson_sampling", True)
        watch.engines += 1
        watch.optimizer._fl_privacy_steps = 0
        _count_steps(watch.optimizer)
        made[0].register_forward_pre_hook(lambda module, inputs: _keep(watch, inputs))
        return made

    def get_epsilon(self: Any, delta: float) -> float:
        found = ask(self, delta)
        watch.claims.append((float(found), float(delta)))
        return float(found)

    PrivacyEngine.make_private, PrivacyEngine.get_epsilon = make_private, get_epsilon
    try:
        yield watch
    finally:
        PrivacyEngine.make_private, PrivacyEngine.get_epsilon = make, ask


def _count_steps(optimizer: Any) -> None:
    step = optimizer.step

    def counted_step(*given: Any, **more: Any) -> Any:
        found = step(*given, **more)
        # Parts of a batch that are only added up (``BatchMemoryManager``) release nothing.
        optimizer._fl_privacy_steps += not getattr(optimizer, "_is_last_step_skipped", False)
        return found

    optimizer.step = counted_step


def _keep(watch: OpacusWatch, inputs: tuple[Any, ...]) -> None:
    if inputs and isinstance(inputs[0], Tensor) and len(inputs[0]):
        watch.inputs = inputs[0][:2].detach()
