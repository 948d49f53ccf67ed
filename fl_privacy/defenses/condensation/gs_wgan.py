"""GS-WGAN: images of a generator whose gradients from the private side are clipped and noised."""

import math

import torch
from torch import Tensor

from fl_privacy.defenses.base import Defense, LocalData
from fl_privacy.defenses.checks import expect_number
from fl_privacy.defenses.condensation.critic import Critic
from fl_privacy.defenses.condensation.generator import drawn_set, fresh_generator
from fl_privacy.defenses.condensation.kept import exchanging, of_every_class
from fl_privacy.defenses.epsilon import mixture_noise_multiplier
from fl_privacy.defenses.noise import sample_noise
from fl_privacy.progress import counted
from fl_privacy.types import Batch


def gs_wgan(
    *,
    images_per_class: int = 50,
    epsilon: float = 10.0,
    delta: float = 1e-5,
    critics: int = 50,
    iterations: int = 300,
    critic_steps: int = 2,
    lr: float = 1e-3,
    batch_size: int = 16,
    width: int = 16,
) -> Defense:
    """Train on images of a Wasserstein generator with sanitized gradients (GS-WGAN, Chen et al. 2020).

    The client's examples are split among ``critics``; each iteration draws one of them. What reaches the generator is
    the gradient by each generated image, clipped to norm 1 and noised. As an example is behind one critic only, most
    steps do not depend on it; the noise follows from ``epsilon`` and the number of iterations. The paper takes 1,000
    critics and 20,000 iterations; the defaults are for CPUs.

    Args:
        images_per_class: of every class.
        epsilon: budget of one example, above 0.
        delta: in (0, 1).
        critics: parts of the client's examples, at least 1.
        iterations: updates of the generator, at least 1.
        critic_steps: updates of the drawn critic before each.
        lr: of Adam, for both.
        batch_size: images of a step.
        width: of generator and critics.
    """
    for name, value in (
        ("images_per_class", images_per_class), ("critics", critics), ("iterations", iterations),
        ("critic_steps", critic_steps), ("batch_size", batch_size),
    ):  # fmt: skip
        expect_number(f"defense.{name}", value, at_least=1, example=50)
    expect_number("defense.lr", lr, above=0, example=1e-3)
    expect_number("defense.width", width, at_least=2, example=16)
    multiplier = mixture_noise_multiplier(epsilon=epsilon, share=1 / critics, steps=iterations, delta=delta)

    def make(batch: Batch, data: LocalData) -> Batch:
        rng, device = data.rng, batch.inputs.device
        generator = fresh_generator(batch, data.num_classes, rng, width=width)
        optimizer = torch.optim.Adam(generator.parameters(), lr=lr, betas=(0.5, 0.9))
        part = torch.randint(critics, (len(batch),), generator=rng, device=rng.device).to(device)
        judges: dict[int, Critic] = {}
        for _ in counted("training the generator", range(iterations)):
            number = int(torch.randint(critics, (1,), generator=rng, device=rng.device))
            rows = (part == number).nonzero().flatten()
            if number not in judges:
                own = Batch(batch.inputs[rows], batch.labels[rows])
                judges[number] = Critic(own, data.num_classes, rng, width=width, lr=lr)
            for _ in range(critic_steps):
                judges[number].train(generator, batch_size, rng)
            made = generator.draw_any(batch_size, rng)
            slope = judges[number].slope(made.inputs.detach(), made.labels)
            optimizer.zero_grad()
            torch.autograd.backward(made.inputs, sanitized(slope, multiplier, rng))
            optimizer.step()
        return drawn_set(generator, images_per_class, rng)

    return exchanging(
        "gs_wgan",
        make,
        outcome=of_every_class(images_per_class),
        public={
            "images_per_class": images_per_class,
            "epsilon": epsilon,
            "delta": delta,
            "noise_multiplier": multiplier,
            "critics": critics,
            "iterations": iterations,
            "critic_steps": critic_steps,
            "lr": lr,
            "batch_size": batch_size,
            "width": width,
        },
    )


def sanitized(slopes: Tensor, multiplier: float, rng: torch.Generator) -> Tensor:
    """Slopes (B, C, H, W) of which none exceeds norm 1, with noise.

    Two critics' slopes of a whole batch are 2 sqrt(B) apart at most: that is the sensitivity which the noise of
    deviation ``multiplier`` is relative to.
    """
    norms = slopes.flatten(1).norm(dim=1).clamp_min(1).view(-1, 1, 1, 1)
    noise = sample_noise(slopes, "gaussian", 1.0, rng)
    noised: Tensor = slopes / norms + 2 * math.sqrt(len(slopes)) * multiplier * noise
    return noised
