"""PPDL with differential privacy, as SPN is compared with it."""

from fl_privacy.defenses.base import Defense, compose
from fl_privacy.defenses.dp_noise import dp_noise
from fl_privacy.defenses.noise import Distribution
from fl_privacy.defenses.selective_sharing import selective_sharing


def ppdl(*, share: float = 0.05, noise: Distribution = "gaussian", scale: float = 0.01) -> Defense:
    """Noise on every gradient, then only the largest elements of the update are shared (Fan et al. 2020, Table 11).

    ``dp_noise`` at each local gradient, without clipping, composed with ``selective_sharing`` by magnitude.

    Args:
        share: theta, in (0, 1].
        noise: distribution of the noise.
        scale: standard deviation (Gaussian) or b (Laplace), at least 0.
    """
    return compose(dp_noise(noise=noise, scale=scale, at="gradient"), selective_sharing(share=share))
