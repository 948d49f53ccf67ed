"""Observe Opacus in a client's training."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fl_privacy.dp_check.check import FEWEST_DRAWS, SECONDS, DpCheckRequest, tested
from fl_privacy.dp_check.claims import Claim, Facts, Stated, recompute
from fl_privacy.dp_check.draws import Mechanism, Neighbors
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.types import Tensors

MOST_DRAWS = 500  # default number of steps of Opacus' optimizer on either neighbor

SIZE_IS_PUBLIC = (
    "The number of a client's records counts as public: Opacus divides the noised sum by the expected batch size, which"
    " follows from it (arXiv 2605.15648)."
)


@dataclass(eq=False)
class OpacusWatch:
    """Record of what Opacus does in a client's training, and of optimizer steps that bypass it."""

    module: Any = None
    optimizer: Any = None
    sample_rate: float = 1.0  # sample rate of its batches, the largest if several
    poisson: bool | None = True  # ``True`` for Poisson samples; ``None`` if the batches came from no loader
    claims: list[tuple[float, float]] = field(default_factory=list)  # (epsilon, delta), computed or targets
    multipliers: list[float] = field(default_factory=list)  # noise multiplier of each private step
    divisors: list[float] = field(default_factory=list)  # number that divides the noised sum, of each private step
    on_model: int = 0  # number of other optimizers' steps on the private model's parameters
    others: int = 0  # number of other optimizers' steps on anything else
    inputs: Tensor | None = None  # at most two examples of the last batch that entered the module
    examples: float = math.inf  # number of examples of the private loader
    _parameters: dict[int, Tensor] = field(default_factory=dict)
    _before: list[Tensor] = field(default_factory=list)
    _batches: "list[Sampled]" = field(default_factory=list)
    _trained_on: "list[Sampled]" = field(default_factory=list)
    _drawn: bool = False
    _inside: bool = False

    @property
    def bare_steps(self) -> int:
        """Return the number of observed steps that changed uploaded values without Opacus' noise."""
        if self.multipliers:
            return self.on_model
        moved = not all(map(torch.equal, self._before, self._parameters.values()))
        return self.on_model + self.others or int(moved)

    def verdicts(self, asked: DpCheckRequest, *, rounds: int) -> list[ClaimVerdict]:
        """Return two checks: of the epsilon that Opacus reports, and of the noise in one step.

        ``asked``: the claim to check, and settings of the test. ``rounds``: number of rounds; each has its own
        accountant, so that the true epsilon is that of all rounds together.
        """
        if self.optimizer is None:
            return []
        facts = self._facts()
        claim, notes = self._claim(asked, facts), []
        if claim is None:
            return []
        facts = replace(facts, rounds=claim.rounds)
        if self.bare_steps:
            notes.append(
                f"The private optimizer made {len(self.multipliers)} steps, and {self.bare_steps} were made without it:"
                " nothing clips these or adds noise to them. Step the optimizer that make_private returned alone."
            )
        if self.divisors and self.divisors[0] > 1:
            notes.append(SIZE_IS_PUBLIC)
        every = recompute(replace(facts, rounds=rounds), delta=claim.delta).epsilon if rounds > claim.rounds else None
        if every is not None:
            notes.append(
                f"Each round makes an accountant anew: {claim.epsilon:.3g} is of one round; all {rounds} rounds spend"
                f" {every:.3g} together."
            )
        name = "Opacus in a client's training"
        if self.multipliers and not self.bare_steps and self.inputs is not None:
            found = attempt(lambda: self._drawn_step(name, claim, facts, asked))
            if not isinstance(found, Failure):
                return [replace(found, notes=(*found.notes, *notes))]
            notes.append(f"A step of Opacus could not be drawn here: {found.reason}.")
        recomputed = recompute(facts, delta=claim.delta)
        return [ClaimVerdict(subject=name, claim=claim, recomputed=recomputed, notes=tuple(notes))]

    def _drawn_step(self, name: str, claim: Claim, facts: Facts, asked: DpCheckRequest) -> ClaimVerdict:
        assert self.inputs is not None
        held = replace(claim, sampled=facts)
        stated = Stated(claim=held, facts=facts, clip_norm=float(self.optimizer.max_grad_norm), unit="example")
        mechanism, pair = step_of(self.module, self.optimizer, self.inputs)
        started = time.perf_counter()
        mechanism(pair.first)
        slow = 5 * MOST_DRAWS * (time.perf_counter() - started) > SECONDS
        draws = asked.draws or (FEWEST_DRAWS if slow else MOST_DRAWS)
        question = replace(asked, epsilon=None, like=None, clip_norm=None, draws=draws)
        return tested(name, mechanism, stated, question, pair=pair)

    def _claim(self, asked: DpCheckRequest, facts: Facts) -> Claim | None:
        if asked.epsilon is not None:
            return asked.claim(None, "the user", unit="example")
        if self.claims:
            epsilon, delta = self.claims[-1]
            return Claim(epsilon=epsilon, delta=delta, unit="example", by="Opacus")
        multiplier, promised = float(self.optimizer.noise_multiplier), facts
        if not multiplier or not asked.delta or not (self.bare_steps or self.multipliers):
            return None
        if self.bare_steps:
            promised = Facts(noise_multiplier=multiplier)
        epsilon = recompute(promised, delta=asked.delta).epsilon or 0.0
        return Claim(epsilon=epsilon, delta=asked.delta, unit="example", by="Opacus' noise multiplier")

    def _facts(self) -> Facts:
        if self.bare_steps:
            return Facts(noise_multiplier=0.0)
        steps, missing = len(self.multipliers), []
        multiplier = float(self.optimizer.noise_multiplier)
        if len(set(self.multipliers)) > 1:
            # without sampling, releases of several multipliers equal as many of this one
            multiplier = (sum(z**-2 for z in self.multipliers if z) / steps) ** -0.5 if all(self.multipliers) else 0.0
            missing = ["one noise multiplier for all steps (it changes while the client trains)"]
        elif self.multipliers:
            multiplier = self.multipliers[0]
        if multiplier and len(set(self.divisors)) > 1:
            # the noise's scale in d values shows a step from B to B + 1 like a shift of sqrt(2 d) / B deviations
            size, values = min(self.divisors), sum(p.numel() for p in self.optimizer.params)
            multiplier = (multiplier**-2 + 2 * values / size**2) ** -0.5
            missing.append(
                "that batches' sizes are no secret (the noised sums are divided by them, so that the scale of the noise"
                f" shows them, like a noise multiplier of {multiplier:.3g} in all; arXiv 2605.15648)"
            )
        facts = Facts(noise_multiplier=multiplier, releases=steps, missing=tuple(missing))
        sampling: Any = None if self.poisson is None else "poisson" if self.poisson else "shuffle"
        return replace(facts, sample_rate=min(1.0, self.sample_rate), sampling=sampling)

    def begin(self, module: nn.Module, optimizer: Any) -> None:
        self._parameters = {id(p): p for p in module.parameters()}
        self._before, self._batches, self._trained_on, self.multipliers, self.divisors = [], [], [], [], []

    def batch(self, sampler: Any) -> None:
        self._drawn = True
        self._batches.append(_sampled_by(sampler))

    def enters(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and len(inputs[0]):
            self.inputs = inputs[0][:2].detach()
        if module.training and torch.is_grad_enabled():
            if not self._before:
                self._before = [p.detach().clone() for p in self._parameters.values()]
            self._trained_on += self._batches
            self._batches = []
            if any(isinstance(t, Tensor) and t.dim() and len(t) >= self.examples for t in tree_leaves((inputs, named))):
                self._trained_on.append((False, 1.0))

    def private_step(self, optimizer: Any) -> None:
        if optimizer is not self.optimizer:
            return
        self.multipliers.append(float(optimizer.noise_multiplier))
        self.divisors.append(float(optimizer.expected_batch_size or 1) if optimizer.loss_reduction == "mean" else 1.0)
        if rates := [rate for poisson, rate in self._trained_on if poisson]:
            self.sample_rate = max(self.sample_rate, *rates)
        elif self._trained_on:
            least = min(rate for _, rate in self._trained_on)
            self.sample_rate = least if len(self.multipliers) == 1 else min(self.sample_rate, least)
            self.poisson = False
        elif not self._drawn:
            self.poisson = None
        self._trained_on = []

    def other_step(self, optimizer: Any) -> None:
        if self._inside or self.optimizer is None:
            return
        owned = any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])
        self.on_model += owned
        self.others += not owned


Sampled = tuple[bool, float]  # (``True`` for a Poisson sample, probability that a batch holds an example)


def _sampled_by(sampler: Any) -> Sampled:
    from opacus.utils import uniform_sampler as of  # noqa: PLC0415

    if isinstance(sampler, of.UniformWithReplacementSampler | of.DistributedUniformWithReplacementSampler):
        return True, float(sampler.sample_rate)
    inner, size = getattr(sampler, "sampler", None), getattr(sampler, "batch_size", None)
    if inner is None or (found := _sampled_by(inner))[0]:
        return (False, 0.0) if inner is None else found
    return False, 1 / math.ceil(len(inner) / size) if size and len(inner) else 0.0


def step_of(module: nn.Module, optimizer: Any, inputs: Tensor) -> tuple[Mechanism, Neighbors]:
    """Return a function from a batch to the noised sum of its clipped gradients, and two neighboring batches.

    ``module``: module that Opacus made private; its last layer's outputs count as logits. ``optimizer``: optimizer that
    Opacus made; its state and accountant do not change.
    """
    example = inputs[:1].detach()
    canary = 50 * torch.randn(example.shape, generator=torch.Generator().manual_seed(0)).to(example)
    hook, multiplier = getattr(optimizer, "step_hook", None), optimizer.noise_multiplier

    def mechanism(batch: Tensor, *, scale: float = 1.0) -> Tensors:
        optimizer._is_last_step_skipped = False  # a training that ended within a batch leaves it set
        optimizer.zero_grad(set_to_none=True)
        outputs = module(batch)
        labels = torch.zeros(len(batch), dtype=torch.int64, device=outputs.device)
        # the least likely class gives a gradient as long as the clipping allows
        labels[1:] = outputs[1:].detach().argmin(1)
        nn.functional.cross_entropy(outputs, labels).backward()
        optimizer.step_hook, optimizer.noise_multiplier = None, scale * multiplier
        try:
            optimizer.pre_step()
        finally:
            optimizer.step_hook, optimizer.noise_multiplier = hook, multiplier
        size = float(optimizer.expected_batch_size or 1)
        return {str(n): p.grad.detach() * size for n, p in enumerate(optimizer.params) if p.grad is not None}

    what = "a batch with a canary against the batch without it"
    first, second = torch.cat([example, canary]), example
    sums = mechanism(first, scale=0.0), mechanism(second, scale=0.0)
    shift = {name: value - sums[1][name] for name, value in sums[0].items()}
    return mechanism, Neighbors(first=first, second=second, what=what, shift=shift)


@contextmanager
def watched_opacus() -> Iterator[OpacusWatch]:
    """Yield a record of what Opacus does within the context; it stays empty if Opacus is not installed."""
    watch = OpacusWatch()
    if find_spec("opacus") is None:
        yield watch
        return
    from opacus import PrivacyEngine  # noqa: PLC0415

    make, ask, aim = PrivacyEngine.make_private, PrivacyEngine.get_epsilon, PrivacyEngine.make_private_with_epsilon
    following = _BaseDataLoaderIter.__next__

    def make_private(self: Any, **given: Any) -> Any:
        made = make(self, **given)
        wrapped = isinstance(made[0], nn.Module)
        watch.module, watch.optimizer = made[0] if wrapped else given["module"], made[1]
        watch.sample_rate = 1 / max(1, len(given["data_loader"]))
        data: Any = given["data_loader"].dataset
        watch.examples = len(data) if hasattr(data, "__len__") and len(data) else math.inf
        watch.poisson = given.get("poisson_sampling", True)
        watch.begin(given["module"], made[1])
        _watch_steps(watch, made[1])

        def enters(*inputs: Any) -> None:  # a function, which copies of the network share, and not the watch's method
            watch.enters(*inputs)

        given["module"].register_forward_pre_hook(enters, with_kwargs=True)
        return made

    def make_private_with_epsilon(self: Any, **given: Any) -> Any:
        made = aim(self, **given)
        watch.claims.append((float(given["target_epsilon"]), float(given["target_delta"])))
        return made

    def get_epsilon(self: Any, delta: float) -> float:
        found = ask(self, delta)
        watch.claims.append((float(found), float(delta)))
        return float(found)

    def next_batch(self: Any) -> Any:
        found = following(self)
        watch.batch(self._index_sampler)
        return found

    hook = register_optimizer_step_post_hook(lambda optimizer, *_: watch.other_step(optimizer))
    PrivacyEngine.make_private, PrivacyEngine.get_epsilon = make_private, get_epsilon
    PrivacyEngine.make_private_with_epsilon = make_private_with_epsilon
    _BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        hook.remove()
        PrivacyEngine.make_private, PrivacyEngine.get_epsilon = make, ask
        PrivacyEngine.make_private_with_epsilon = aim
        _BaseDataLoaderIter.__next__ = following  # type: ignore[method-assign]


def _watch_steps(watch: OpacusWatch, optimizer: Any) -> None:
    step = optimizer.step

    def watched_step(_: Any, *given: Any, **more: Any) -> Any:
        watch._inside = True
        try:
            found = step(*given, **more)
        finally:
            watch._inside = False
        # parts of a batch that are only summed (``BatchMemoryManager``) release nothing
        if not getattr(optimizer, "_is_last_step_skipped", False):
            watch.private_step(optimizer)
        return found

    optimizer.step = MethodType(watched_step, optimizer)  # schedulers of PyTorch ask for its ``__func__``
