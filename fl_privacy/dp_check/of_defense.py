"""Checks of the privacy that this package's defenses claim."""

from dataclasses import replace

import torch
from torch import nn

from fl_privacy.defenses import ClientState, Defense, LocalStep
from fl_privacy.defenses.privacy import guarantee, svt_epsilon
from fl_privacy.dp_check.check import DpCheckRequest, recomputed_by, tested
from fl_privacy.dp_check.claims import Facts, Recomputed, Stated, Unit
from fl_privacy.dp_check.draws import Mechanism, Neighbors
from fl_privacy.dp_check.verdict import ClaimVerdict
from fl_privacy.effects import Clipped, ClippedExamples, Noise, SparseVector
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors


def on_defense(defense: Defense, asked: DpCheckRequest, *, elements: int | None = None) -> list[ClaimVerdict]:
    """Return verdicts on the privacy that ``defense`` claims, by recomputing epsilon.

    If the defense changes the upload, or the steps as in DP-SGD, its outputs are also tested by sampling. ``elements``:
    number of an update's elements, if ``asked`` has the shapes of only some tensors.
    """
    found = guarantee(defense, sample_rate=1.0, delta=asked.delta or 1e-5, num_tensors=len(asked.shapes))
    facts = Facts(
        noise_multiplier=None if found.missing else found.noise_multiplier,
        releases=found.steps_per_round,
        rounds=asked.rounds,
        missing=(f"a noise that gives an epsilon ({found.missing})",) if found.missing else (),
    )
    unit: Unit = "example" if any(isinstance(part.effect, ClippedExamples) for part in defense.parts) else "client"
    stated = Stated(claim=None, facts=facts, clip_norm=clip_norm_of(defense) or 1.0, unit=unit)
    if defense.upload and not defense.gradient:
        rng = derive_generator(asked.seed, "dp_check", "noise")

        def upload(update: Tensors) -> Tensors:
            for hook in defense.upload:
                update = hook(update, ClientState(), rng)
            return update

        verdict = tested(defense.name, upload, stated, asked)
        return [replace(verdict, recomputed=_by_composition(defense, asked, elements) or verdict.recomputed)]
    if len(defense.gradient) == 1 and stated.unit == "example":
        mechanism, pair = _one_step(defense, asked.seed)
        once = replace(stated, facts=replace(stated.facts, releases=1, rounds=1))
        return [tested(f"one step of {defense.name}", mechanism, once, replace(asked, rounds=1), pair=pair)]
    claim = asked.claim(None, defense.name)
    return [ClaimVerdict(subject=defense.name, claim=claim, recomputed=recomputed_by(stated, asked, claim))]


def _by_composition(defense: Defense, asked: DpCheckRequest, elements: int | None) -> Recomputed | None:
    parts = [part for part in defense.parts if isinstance(part.effect, SparseVector)]
    if len(parts) != 1 or len(defense.parts) != 1:
        return None
    given = {name: parts[0].settings[name] for name in ("fraction", "epsilon", "noise_var")}
    elements = elements or sum(value.numel() for value in asked.shapes.values())
    return Recomputed(
        rdp=None,
        pld=asked.rounds * svt_epsilon(elements, **given),
        delta=asked.delta,
        sampling=f"for {elements:,} elements, by composition",
        caveats=("Each shared element spends the budget of one: epsilon grows with the number of elements.",),
    )


def clip_norm_of(defense: Defense) -> float | None:
    """Return the l2 norm to which ``defense`` clips a unit's contribution; ``None`` if it does not clip."""
    for effect in (part.effect for part in defense.parts):
        clip = effect.clip if isinstance(effect, Noise) and not isinstance(effect, ClippedExamples) else effect
        if isinstance(clip, Clipped | ClippedExamples) and clip.norm:
            return clip.norm
    return None


def _one_step(defense: Defense, seed: int) -> tuple[Mechanism, Neighbors]:
    """Return DP-SGD's noised gradient sum of four examples as a mechanism, and a pair of batches to compare."""
    rng = derive_generator(seed, "dp_check", "examples")
    model = nn.Linear(8, 4, bias=False)
    nn.init.zeros_(model.weight)  # every class is as likely, so that no example's gradient vanishes
    inputs, labels = torch.randn(4, 8, generator=rng), torch.randint(4, (4,), generator=rng)
    canary, blank = inputs.clone(), inputs.clone()
    canary[0], blank[0] = 100 * torch.randn(8, generator=rng), 0.0
    sent = ModelState({name: p.detach() for name, p in model.named_parameters()}, {})
    plan, noise = LocalPlan(lr=0.1, batch_size=4), derive_generator(seed, "dp_check", "noise")

    def mechanism(batch: Batch) -> Tensors:
        step = LocalStep(model=model, sent=sent, batch=batch, plan=plan, state=ClientState(), rng=noise)
        return {name: value * len(batch) for name, value in defense.gradient[0](sent.parameters, step).items()}

    what = "a batch with a canary against one with an empty example in its place"
    return mechanism, Neighbors(first=Batch(canary, labels), second=Batch(blank, labels), what=what)
