"""Refiner: upload of the gradient of robust data, noise-like images whose gradient is close to the true one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses.defense import ClientState, Defense, LocalStep
from fl_privacy.defenses.robust_data import (
    Gap,
    Importance,
    Judge,
    Pixels,
    RobustSpace,
    RobustTexts,
    batch_gap,
    descend,
    example_gap,
    importance,
    integrated_gradients,
    integrated_gradients_of_step,
    layer_depths,
    own_gradients,
    pull_within,
)
from fl_privacy.effects import Part, RobustGradient
from fl_privacy.errors import UserError
from fl_privacy.models import TextModel, has_batch_norm
from fl_privacy.models.pretrained.evaluator import WordBox, WordEvaluator
from fl_privacy.models.pretrained.evaluator_files import CachedEvaluator, find_word_evaluator, name_of_words
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, ModelState, Tensors
from fl_privacy.types.modality import modality_of


def fingerprints(images: Tensor) -> Tensor:
    """Return a hash int64 (B,) of each image or text (B, ...); the padding of texts does not change it."""
    values = images.detach() if images.is_floating_point() else images.detach() + 1
    bits = values.float().contiguous().flatten(1).view(torch.int32).long()
    odd = torch.randint(2**62, (bits.shape[1],), generator=derive_generator(0, "fingerprints")) * 2 + 1
    return (bits * odd.to(bits.device)).sum(1)


class ImageMemory:
    """Cache of robust data (Refiner's noise-like images or texts) in a ``ClientState``, by the original's hash."""

    def __init__(self, state: ClientState, owner: str) -> None:
        self._state = state
        self._keys, self._images, self._fresh = (f"{owner}/{part}" for part in ("keys", "images", "fresh"))

    def recall(self, keys: Tensor, default: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the robust data (noise-like images or texts that replace the client's) cached under ``keys`` (B,).

        Rows of ``default`` replace missing ones. Also return two masks (B,): rows cached at all, and in this round.
        """
        if self._keys not in self._state.tensors:
            nothing = torch.zeros(len(keys), dtype=torch.bool)
            return default, nothing, nothing
        match = keys.cpu().unsqueeze(1) == self._state.tensors[self._keys].cpu()
        found, at = match.any(1), match.int().argmax(1)
        kept = _as_wide(self._state.tensors[self._images], default.shape[1])[at].to(default) / 255
        fresh = found & self._state.tensors[self._fresh].cpu()[at]
        return torch.where(found.to(default.device).view(-1, *[1] * (default.dim() - 1)), kept, default), found, fresh

    def remember(self, keys: Tensor, images: Tensor) -> None:
        tensors = self._state.tensors
        new = keys.cpu(), (images * 255).round().byte().cpu(), torch.ones(len(keys), dtype=torch.bool)
        if self._keys in tensors:
            stay = ~torch.isin(tensors[self._keys].cpu(), new[0])
            widest = max(images.shape[1], tensors[self._images].shape[1])
            kept = _as_wide(tensors[self._images].cpu(), widest)[stay]
            new = new[0], _as_wide(new[1], widest), new[2]
            old = tensors[self._keys].cpu()[stay], kept, tensors[self._fresh].cpu()[stay]
            new = tuple(torch.cat(pair) for pair in zip(old, new, strict=True))  # type: ignore[assignment]
        tensors.update(zip((self._keys, self._images, self._fresh), new, strict=True))

    def end_round(self, *, forget: bool) -> None:
        if self._keys not in self._state.tensors:
            return
        if forget:
            for name in (self._keys, self._images, self._fresh):
                del self._state.tensors[name]
        else:
            self._state.tensors[self._fresh] = torch.zeros_like(self._state.tensors[self._fresh])


def _as_wide(images: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(images, (0, 0, 0, width - images.shape[1])) if images.dim() == 3 else images


_CHUNK_ELEMENTS = 1 << 24
"""Most elements of per-example gradients at once; differentiation takes several times their 64 MB."""


def refiner(
    *,
    epsilon: float = 0.1,
    alpha: float = 0.5,
    beta: float = 1.0,
    iterations: int = 10,
    lr: float = 1.0,
    decay: float = 0.95,
    weights: Importance = "product",
    utility: Literal["relative", "absolute"] = "relative",
    privacy: Judge = "evaluator",
    match: Literal["batch", "example"] = "batch",
    per: Literal["step", "round"] = "step",
    warm_start: bool = False,
    evaluator: str | Sequence[str] | None = None,
) -> Defense:
    """Upload the gradient of noise-like data that is close to the client's gradient (Refiner, Fan et al. 2025).

    These robust data start at ``(1 - alpha) x + alpha v``, v noise, for the client's examples x, and descend on ``UM -
    beta PM`` (Eq. 2). The utility metric UM is the weighted distance of the gradients (Eq. 4). The privacy metric PM is
    the share of noise in the data that a trained network, the evaluator, predicts. The uploaded gradient is projected
    within ``epsilon`` of the true one (appendix J).

    For texts (appendix F), robust data are word embeddings within the range of all tokens' embeddings, v are random
    words, PM is the share of random words, and the gradient of the embeddings is not uploaded.

    Compose it before other defenses, since it replaces the gradient. Shared batch-norm statistics are those of the true
    images. The paper names no optimizer; gradient descent with its step size reaches its noise shares.

    Args:
        epsilon: largest l2 distance of the uploaded gradient to the true one, at least 0; it is no privacy budget.
        alpha: share of noise in the start, in [0, 1].
        beta: weight of PM, at least 0.
        iterations: number of descent steps iota, at least 1.
        lr: step size, above 0.
        decay: ratio tau of each layer's weight in UM to that of the layer before, in (0, 1].
        weights: weight of an element in UM: |gradient x value|, |gradient|, |value| or 1; ``integrated_gradients``
            takes the mean gradient on the line from zero to the values, 20 passes a step (appendix A).
        utility: ``relative`` divides UM by that of pure noise. ``absolute`` is Eq. 2 as printed, in which UM counts
            little: its gradient is 3 to 8 orders of magnitude smaller than PM's (LeNet).
        privacy: choice of PM: the ``evaluator``, or ``mse``, the paper's baseline.
        match: gradient to match, of the ``batch`` or of each ``example``.
        per: ``step`` makes robust data in each local step, ``round`` once per round for each image.
        warm_start: ``True`` starts from the robust data of an earlier round, if all images of a batch have some, with
            half the iterations. An attacker then sees similar noise again.
        evaluator: file of ``fl-privacy train-evaluator``; ``None`` takes a small one, for gray images and texts only.
            With a list, client k takes file k modulo its length.
    """
    made = _Refinement(**locals())
    return Defense(
        parts=(Part("refiner", made.settings, RobustGradient(), strength="epsilon"),),
        prepare=(made.prepare,),
        texts=(made.prepare_texts,),
        gradient=(made.on_gradient,),
        upload=(made.on_upload,) if warm_start or per == "round" else (),
    )


@dataclass(frozen=True, kw_only=True)
class _Refinement:
    epsilon: float
    alpha: float
    beta: float
    iterations: int
    lr: float
    decay: float
    weights: Importance
    utility: Literal["relative", "absolute"]
    privacy: Judge
    match: Literal["batch", "example"]
    per: Literal["step", "round"]
    warm_start: bool
    evaluator: str | Sequence[str] | None
    judges: Sequence["_Judge"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        checks.number("defense.epsilon", self.epsilon, at_least=0, example=0.1)
        checks.number("defense.alpha", self.alpha, at_least=0, at_most=1, example=0.5)
        checks.number("defense.beta", self.beta, at_least=0, example=1.0)
        checks.whole("defense.iterations", self.iterations, at_least=1, example=10)
        checks.number("defense.lr", self.lr, above=0, example=1.0)
        checks.number("defense.decay", self.decay, above=0, at_most=1, example=0.95)
        checks.one_of("defense.weights", self.weights, get_args(Importance))
        checks.one_of("defense.utility", self.utility, ("relative", "absolute"))
        checks.one_of("defense.privacy", self.privacy, ("evaluator", "mse"))
        checks.one_of("defense.match", self.match, ("batch", "example"))
        checks.one_of("defense.per", self.per, ("step", "round"))
        checks.one_of("defense.warm_start", self.warm_start, (True, False))
        object.__setattr__(self, "judges", [_Judge(file) for file in _files(self.evaluator)])

    @property
    def settings(self) -> dict[str, Any]:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        listed = isinstance(self.evaluator, Sequence) and not isinstance(self.evaluator, str)
        return own | {"evaluator": _files(self.evaluator)} if listed else own

    def prepare(self, input_shape: Sequence[int]) -> None:
        if self.privacy == "evaluator":
            for judge in self.judges:
                judge.of_images(input_shape)

    def prepare_texts(self, model: TextModel, public: Tensor | None) -> None:
        if self.privacy == "evaluator":
            table = model.words.weight.detach()
            for judge in self.judges:
                judge.keep(table, find_word_evaluator(judge.file, table, public))

    def on_gradient(self, tensors: Tensors, step: LocalStep) -> Tensors:
        if self.match == "example" and step.plan.batch_norm == "train" and has_batch_norm(step.model):
            raise UserError(
                "defense.match is expected to be batch for a model that normalizes by the batch, but got example;"
                " set federation.plan.batch_norm=eval, take a model with group norm, or match=batch."
            )
        space = self._space(step)
        target = {name: gradient for name, gradient in tensors.items() if name not in space.withheld}
        data = space.inputs(self._robust_data(target, step, space))
        robust = replace(step, batch=Batch(data, step.batch.labels)).gradients().gradients
        return pull_within({name: robust[name].detach() for name in target}, target, self.epsilon)

    def on_upload(self, tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        ImageMemory(state, "refiner").end_round(forget=not self.warm_start)
        return tensors

    def _space(self, step: LocalStep) -> RobustSpace:
        own = self.judges[step.state.number % len(self.judges)]
        if modality_of(step.model).continuous:
            return Pixels(step.batch.inputs, own.of_images)
        assert isinstance(step.model, TextModel)
        table = step.sent.parameters[step.model.word_weight]
        if self.privacy == "evaluator" and own.judging(table) is None:
            self.prepare_texts(step.model, None)
        if (judge := own.judging(table)) is not None:
            judge = judge.to(step.batch.inputs.device)
        return RobustTexts(step.batch.inputs, WordBox(table.detach()), step.model.word_weight, judge)

    def _robust_data(self, target: Tensors, step: LocalStep, space: RobustSpace) -> Tensor:
        true, noise = space.true, space.noise(step.rng)
        start = torch.lerp(true, noise, self.alpha)
        if not self.warm_start and self.per == "step":
            return self._refine(start, noise, target, step, space, steps=self.iterations)
        memory, keys = ImageMemory(step.state, "refiner"), fingerprints(step.batch.inputs)
        start, found, fresh = memory.recall(keys, start)
        if self.per == "round" and fresh.all():
            return start
        steps = max(1, self.iterations // 2) if found.all() else self.iterations
        data = self._refine(start, noise, target, step, space, steps=steps)
        memory.remember(keys, data)
        return data

    def _refine(
        self, start: Tensor, noise: Tensor, target: Tensors, step: LocalStep, space: RobustSpace, *, steps: int
    ) -> Tensor:
        depths = layer_depths(step.model, step.sent, space.inputs(space.true)[:1])
        if self.match == "batch":
            weights = self._weights(step, space, target, depths)
            gap = batch_gap(step, target, weights, space.inputs, start)
            return self._solve(start, noise, space, gap, steps=steps)
        chunk = max(1, _CHUNK_ELEMENTS // sum(t.numel() for t in target.values()))
        refined = []
        for first in range(0, len(start), chunk):
            some = slice(first, first + chunk)
            part = replace(step, batch=Batch(step.batch.inputs[some], step.batch.labels[some]))
            own_space = self._space(part)
            clean = own_gradients(part, own_space.inputs(own_space.true))
            own = {n: g.detach() for n, g in clean.items() if n in target}
            weights = self._weights(part, own_space, own, depths)
            gap = example_gap(part, own, weights, own_space.inputs)
            refined.append(self._solve(start[some], noise[some], own_space, gap, steps=steps))
        return torch.cat(refined)

    def _weights(self, step: LocalStep, space: RobustSpace, target: Tensors, depths: dict[str, int]) -> Tensors:
        values = step.sent.parameters
        if self.weights != "integrated_gradients":
            return importance(target, values, depths, by=self.weights, decay=self.decay)
        inputs = space.inputs(space.true)
        if self.match == "batch":
            found = integrated_gradients_of_step(replace(step, batch=Batch(inputs, step.batch.labels)))
        else:

            def gradient_at(at: Tensors) -> Tensors:
                return own_gradients(replace(step, sent=ModelState(at, step.sent.buffers)), inputs)

            found = integrated_gradients({name: value.detach() for name, value in values.items()}, gradient_at)
        found = {name: found[name].detach() for name in target}
        return importance(found, values, depths, by="gradient", decay=self.decay)

    def _solve(self, start: Tensor, noise: Tensor, space: RobustSpace, gap: Gap, *, steps: int) -> Tensor:
        unit = gap(noise).detach() if self.utility == "relative" else torch.ones((), device=noise.device)
        unit = unit.clamp_min(torch.finfo(unit.dtype).tiny)
        measure = space.privacy(self.privacy)
        *_, data = descend(start, gap, measure, unit=unit, beta=self.beta, lr=self.lr, iterations=steps)
        return data


def _files(evaluator: str | Sequence[str] | None) -> list[str | None]:
    if evaluator is None or isinstance(evaluator, str | Path):
        return [evaluator]
    if not isinstance(evaluator, Sequence) or not evaluator or not all(isinstance(f, str) and f for f in evaluator):
        raise UserError(
            "defense.evaluator is expected to be a file, or a list with a file for each client, but got"
            f" {evaluator!r}; make them by `fl-privacy train-evaluator`."
        )
    return list(evaluator)


class _Judge:
    def __init__(self, file: str | None) -> None:
        self.file, self.of_images = file, CachedEvaluator(file)
        self._judges: dict[str, WordEvaluator] = {}

    def keep(self, table: Tensor, judge: WordEvaluator) -> None:
        name = name_of_words(table)
        self._judges.pop(name, None)
        self._judges[name] = judge

    def judging(self, table: Tensor) -> WordEvaluator | None:
        last = next(reversed(self._judges.values()), None)
        return self._judges.get(name_of_words(table), last) if len(self._judges) > 1 else last
