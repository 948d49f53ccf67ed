"""DP-SGD on the client."""

from fl_privacy.defenses.base import Defense, LocalStep
from fl_privacy.defenses.checks import expect_number
from fl_privacy.defenses.noise import sample_noise
from fl_privacy.gradients import clipped_sum
from fl_privacy.types import Tensors


def dp_sgd(*, clip_norm: float = 1.0, noise_multiplier: float = 1.0) -> Defense:
    """Clip each example's gradient, add Gaussian noise to the sum, divide by the batch size (Abadi et al. 2016).

    It computes the gradient anew from the batch, so compose it before other defenses of the gradient. Private
    parameters are clipped and noised with the others: what they know of an example shapes the uploads to come.
    ``accounting.guarantee`` turns the noise multiplier into epsilon.

    Args:
        clip_norm: bound C on the l2 norm of one example's gradient, above 0.
        noise_multiplier: standard deviation of the noise on the sum, in units of C; at least 0.
    """
    expect_number("defense.clip_norm", clip_norm, above=0, example=1.0)
    expect_number("defense.noise_multiplier", noise_multiplier, at_least=0, example=1.0)

    def on_gradient(tensors: Tensors, step: LocalStep) -> Tensors:
        total = clipped_sum(step.model, step.sent, step.batch, clip_norm, plan=step.plan, changes=step.changes)
        std = noise_multiplier * clip_norm
        return {
            name: (total[name] + sample_noise(total[name], "gaussian", std, step.rng)) / len(step.batch)
            for name in total
        }

    return Defense(
        name="dp_sgd",
        gradient=(on_gradient,),
        public={"clip_norm": clip_norm, "noise_multiplier": noise_multiplier},
    )
