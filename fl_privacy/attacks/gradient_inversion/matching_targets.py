"""Choose how the updates of one round are matched."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fl_privacy.attacks.adaptive import Circumstances, KnownDefense, Unknowns
from fl_privacy.attacks.adaptive.bounds import Bounds, widest
from fl_privacy.attacks.gradient_inversion.attackable import NotAttackableError
from fl_privacy.attacks.gradient_inversion.grouping import Group
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.gradient_inversion.layer_statistics import Target
from fl_privacy.attacks.gradient_inversion.objectives import weighted_names
from fl_privacy.attacks.gradient_inversion.other_modalities import search_of
from fl_privacy.attacks.gradient_inversion.priors import TotalVariation
from fl_privacy.attacks.gradient_inversion.problem import RoundUpdates
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.attacks.gradient_inversion.targets import (
    accumulated_gradient,
    as_gradient,
    matched_per_uploaded,
    needs_unrolling,
    stack,
)
from fl_privacy.models.gradients import Layered, Unrolled, VictimGradients, VictimModel, frozen_copy, victim_gradients
from fl_privacy.models.gradients.layered import factorize
from fl_privacy.models.losses import CROSS_ENTROPY, is_plain
from fl_privacy.types import Observation, Tensors
from fl_privacy.types.modality import modality_of


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRound:
    """Common parts of a group's victims in one round.

    Attributes:
        victim_model: model, matched tensors, plan and loss as known.
        ranks: ranks of the gradients that need not be formed.
        compared: weights whose gradients are formed and compared a few victims at a time.
    """

    observations: Mapping[int, Observation]
    victim_model: VictimModel
    unrolls: bool
    gradients: VictimGradients
    ranks: Mapping[str, int]
    compared: Collection[str]
    known: KnownDefense
    unknowns: Unknowns | None

    def matched(self, observation: Observation) -> Tensors:
        return accumulated_gradient(observation) if self.unrolls else as_gradient(observation)

    def of(self, positions: Sequence[int]) -> RoundUpdates:
        observations = [self.observations[position] for position in positions]
        parameter = next(self.victim_model.model.parameters())
        values = stack(
            [self.matched(o) for o in observations], list(self.victim_model.names), parameter.device, parameter.dtype
        )
        known = self.known.update_constraints(observations, self.matched)
        left = _left_by_optimizers(observations)
        known = replace(known, bounds=widest([known.bounds, left])).to(parameter.device, parameter.dtype)
        for name, (low, high) in left.items():
            unmatched = (low.isinf() & high.isinf()).to(parameter.device)
            values[name] = values[name].masked_fill(unmatched, 0) if name in values else values[name]
        targets = {name: Target.of(value, known.bounds.get(name)) for name, value in values.items()}
        factors = {}
        for name, rank in self.ranks.items():
            found = None if known.clip or name in known.bounds else factorize(values[name].flatten(2), rank)
            if found is not None:
                factors[name], targets[name] = found, targets[name].without_value()
        compared = () if known.clip or known.bounds else self.compared
        return RoundUpdates(
            gradients=self.gradients, targets=targets, factors=factors, clip=known.clip, compared=compared
        )


def _left_by_optimizers(observations: Sequence[Observation]) -> Bounds:
    """Stack the bounds that optimizers leave on gradients; empty if a client has none."""
    each = [o.knowledge.bounds for o in observations]
    told = [bounds for bounds in each if bounds is not None]
    if len(told) < len(each):
        return {}
    return {
        name: (torch.stack([b[name][0] for b in told]), torch.stack([b[name][1] for b in told])) for name in told[0]
    }


def prepare_round(settings: Settings, group: Group, *, device: torch.device, dtype: torch.dtype) -> PreparedRound:
    """Choose how the updates of ``group`` are matched.

    Raises:
        NotAttackableError: the model does not take the images, or can't be differentiated twice.
    """
    first = group.first
    uploaded = [name for name in first.sent.parameters if name in first.upload.tensors]
    names = weighted_names(settings.objective.layers, search_of(first.model).matched(uploaded, first.model))
    unrolls = needs_unrolling(first.plan, first.upload.num_examples, settings.local_steps)
    model = frozen_copy(first.model, first.assumed(), first.plan, device=device, dtype=dtype)
    victim_model = VictimModel(model, names, first.plan, loss=first.loss or CROSS_ENTROPY)
    trial = _trial(victim_model, first)
    gradients, ranks, compared = _choose(
        victim_model, trial, unrolls=unrolls, elementwise=settings.objective.elementwise
    )
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    learnable = [f"{path}.weight" for path in linear if f"{path}.weight" in names]
    circumstances = _circumstances(
        settings, first, names, unrolls=unrolls, learnable=learnable if isinstance(gradients, Layered) else []
    )
    known = KnownDefense.of(first, circumstances)
    unknowns = None
    if known.hidden or known.loss_factor != 1:
        plan = replace(first.plan, loss_scale=first.plan.loss_scale * known.loss_factor)
        victim_model = replace(victim_model, plan=plan, hidden=known.hidden.weight if known.hidden else None)
        unknowns = known.hidden.unknowns(model.get_parameter(known.hidden.weight)) if known.hidden else None
        gradients = gradients.under(victim_model)
    return PreparedRound(
        observations=group.observations,
        victim_model=victim_model,
        unrolls=unrolls,
        gradients=gradients,
        ranks=ranks,
        compared=compared,
        known=known,
        unknowns=unknowns,
    )


def _trial(victim_model: VictimModel, first: Observation) -> torch.Tensor:
    search = search_of(first.model)
    shape = (first.upload.num_examples, *search.input_of_one(first))
    parameter = next(victim_model.model.parameters())
    trial = search.trial(torch.rand((2, *shape), generator=torch.Generator().manual_seed(0)).to(parameter))
    try:
        with torch.no_grad():
            logits = victim_model.model(trial[0])
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise NotAttackableError(f"The model does not take inputs of shape {shape}: {reason}") from error
    expected = (shape[0], first.num_classes)
    if logits.shape[:2] != expected:
        raise NotAttackableError(f"The model is expected to return {expected}, but got {tuple(logits.shape)}.")
    return trial


def _choose(
    victim_model: VictimModel, trial: torch.Tensor, *, unrolls: bool, elementwise: bool
) -> tuple[VictimGradients, Mapping[str, int], Sequence[str]]:
    if unrolls:
        return _unrolled(victim_model, trial), {}, ()
    of_one = trial.shape[2:3] if getattr(victim_model.model, "next_token", False) else ()
    labels = torch.zeros((*trial.shape[:2], *of_one), dtype=torch.long, device=trial.device)
    try:
        chosen = victim_gradients(victim_model, trial, labels)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise NotAttackableError(f"The model can't be differentiated twice: {reason}") from error
    if not isinstance(chosen, Layered):
        return chosen, {}, ()
    if not elementwise:
        return chosen, chosen.ranks(trial, labels), ()
    by_parts = search_of(victim_model.model).elementwise_parts
    return chosen, {}, chosen.linear_weights(trial, labels) if by_parts else ()


def _unrolled(victim_model: VictimModel, trial: torch.Tensor) -> Unrolled:
    unrolled = Unrolled(victim_model)
    if not is_plain(victim_model.loss):
        labels = torch.zeros(trial.shape[:2], dtype=torch.long, device=trial.device)
        try:
            unrolled(trial, labels)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise NotAttackableError(
                f"Local steps of {victim_model.loss.name} can't be replayed by torch.func ({reason}); use"
                " attack.local_steps=first_order."
            ) from error
    return unrolled


def _circumstances(
    settings: Settings, first: Observation, names: Collection[str], *, unrolls: bool, learnable: Sequence[str]
) -> Circumstances:
    layer = output_layer(first.model, first.num_classes)
    pixels = settings.source is None and modality_of(first.model).pixels
    return Circumstances(
        head=layer[0] if layer else None,
        batch_size=first.upload.num_examples,
        plan=first.plan,
        unrolls=unrolls,
        matched_per_uploaded=matched_per_uploaded(first.plan, first.upload.num_examples, unrolls=unrolls),
        scales=settings.objective.elementwise,
        complete=set(names) == set(first.sent.parameters),
        smooths=not pixels or any(isinstance(prior, TotalVariation) for prior in settings.priors),
        pixels=pixels,
        learnable=learnable,
    )
