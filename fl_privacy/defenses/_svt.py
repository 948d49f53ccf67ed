"""NVFlare's filter SVTPrivacy: Laplace noise on elements chosen by the sparse vector technique."""

import math

import torch
from torch import Tensor

from fl_privacy import checks
from fl_privacy.defenses._dp_noise import sample_noise
from fl_privacy.defenses.defense import ClientState, Defense
from fl_privacy.defenses.privacy import svt_split
from fl_privacy.effects import Part, SparseVector
from fl_privacy.types import Tensors


def svt(
    *,
    fraction: float = 0.1,
    epsilon: float = 0.1,
    noise_var: float = 0.1,
    gamma: float = 1e-5,
    tau: float = 1e-6,
    replace: bool = True,
    steps: int = 1,
) -> Defense:
    """Upload some elements with noise, chosen by the sparse vector technique (NVFlare 2.9's SVTPrivacy).

    Elements are clamped to ``gamma``. Epsilon grows with the number of elements: ``privacy.svt_epsilon`` gives about
    70,000 a round for 7 million elements with these defaults.

    Args:
        fraction: share of the elements that are uploaded, in (0, 1]; the others are zero.
        epsilon: privacy budget for choosing the elements, above 0.
        noise_var: privacy budget of each uploaded value, above 0: Laplace noise of scale 2 gamma / noise_var.
        gamma: largest magnitude of an element per local step, above 0.
        tau: threshold of an element's magnitude for the choice, at least 0.
        replace: ``True`` draws with replacement among the elements above the noised threshold, and so uploads fewer.
        steps: number of local steps.
    """
    checks.number("defense.fraction", fraction, above=0, at_most=1, example=0.1)
    for name, value in {"epsilon": epsilon, "noise_var": noise_var, "gamma": gamma}.items():
        checks.number(f"defense.{name}", value, above=0, example=0.1)
    checks.number("defense.tau", tau, at_least=0, example=1e-6)
    checks.one_of("defense.replace", replace, (True, False))
    checks.whole("defense.steps", steps, at_least=1, example=1)
    scale = 2 * gamma / noise_var

    def on_upload(tensors: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        values = torch.cat([t.detach().flatten().double() for t in tensors.values()]) / steps
        cut, shared = values.clamp(-gamma, gamma), min(math.ceil(len(values) * fraction), len(values))
        of_threshold, of_query = svt_split(epsilon, shared)
        threshold = tau + sample_noise(values[:1], "laplace", gamma / of_threshold, rng)
        accepted = torch.zeros_like(values, dtype=torch.bool)
        while int(accepted.sum()) < shared:
            noise = sample_noise(values, "laplace", 2 * gamma * shared / of_query, rng)
            accepted |= cut.abs() + noise >= threshold
        places = accepted.nonzero().flatten().cpu()
        drawn = torch.randint(len(places), (shared,), generator=rng, device=rng.device).cpu()
        drawn = drawn if replace else torch.randperm(len(places), generator=rng, device=rng.device).cpu()[:shared]
        chosen = torch.unique(places[drawn]).to(values.device)
        kept: Tensor = torch.zeros_like(values)
        kept[chosen] = (cut[chosen] + sample_noise(cut[chosen], "laplace", scale, rng)) * steps
        parts = torch.split(kept, [t.numel() for t in tensors.values()])
        return {name: part.view(t.shape).to(t) for (name, t), part in zip(tensors.items(), parts, strict=True)}

    settings = {
        "fraction": fraction, "epsilon": epsilon, "noise_var": noise_var, "tau": tau, "replace": replace, "steps": steps
    }  # fmt: skip
    effect = SparseVector(bound=gamma * steps, noise_std=math.sqrt(2) * scale * steps, dropped=1 - fraction)
    return Defense(parts=(Part("svt", settings, effect, strength="noise_var"),), upload=(on_upload,))
