"""Training of an image generator on public images, which can be interrupted and resumed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.models.pretrained.generator import GeneratorShape, ImageDiscriminator, ImageGenerator
from fl_privacy.rng import derive_generator, derive_seed

TrainingProgress = Callable[[int, int, float, float], None]
"""Function (steps done, total steps, discriminator's loss, generator's loss) -> None."""


@dataclass(frozen=True, kw_only=True)
class GeneratorPlan:
    """Plan for training a generator with Adam."""

    latent: int = 128
    width: int = 48  # filters of the generator's last but one layer, and of the discriminator's first
    conditional: bool = True
    steps: int = 10_000
    batch_size: int = 64
    lr: float = 2e-4
    beta: float = 0.5  # decay of Adam's first moment, in [0, 1)
    average: float = 0.999  # decay of the running mean of the generator's values, which is the result; in [0, 1)
    flip: bool = False  # ``True`` mirrors each image with probability 1/2
    # largest random shift in pixels of all images, against memorizing a few hundred (DiffAugment, Zhao et al. 2020)
    shift: int = 0

    def __post_init__(self) -> None:
        for name, least in (("latent", 1), ("width", 1), ("steps", 1), ("batch_size", 2), ("shift", 0)):
            checks.whole(name, getattr(self, name), at_least=least, example=max(least, 64))
        checks.number("lr", self.lr, above=0, example=2e-4)
        for name in ("beta", "average"):
            checks.number(name, getattr(self, name), at_least=0, below=1, example=0.5)

    def shape(self, images: Tensor, num_classes: int) -> GeneratorShape:
        channels, height, width = images.shape[1:]
        if height != width:
            raise UserError(
                f"A generator's images are expected to be square, but are {height}x{width}; set data.image_size=32."
            )
        known = num_classes if self.conditional else 0
        return GeneratorShape(channels=channels, size=height, latent=self.latent, width=self.width, num_classes=known)


class GeneratorTraining:
    """Resumable training on images (N, C, H, W) uint8 with labels (N,); each step has its own random stream.

    The discriminator has the hinge loss (Miyato et al. 2018); the resulting generator is a running mean over steps.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        num_classes: int,
        plan: GeneratorPlan,
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(images) < 2:
            raise UserError(f"A generator is expected to get at least 2 images, but got {len(images)}; add some.")
        self.plan, self.seed, self.done = plan, seed, 0
        self._images, self._labels = images.to(device), labels.to(device)
        shape = plan.shape(images, num_classes)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(seed, "generator", "model"))
            self.generator = ImageGenerator(shape).to(device)
            self._discriminator = ImageDiscriminator(shape).to(device)
            self.average = ImageGenerator(shape).to(device)
        self.average.load_state_dict(self.generator.state_dict())
        self.average.requires_grad_(False).eval()
        betas = (plan.beta, 0.999)
        self._of_generator = torch.optim.Adam(self.generator.parameters(), lr=plan.lr, betas=betas)
        self._of_discriminator = torch.optim.Adam(self._discriminator.parameters(), lr=plan.lr, betas=betas)
        self._parts = {"generator": self.generator, "discriminator": self._discriminator, "average": self.average}
        self._optimizers = {"of_generator": self._of_generator, "of_discriminator": self._of_discriminator}

    def run(self, progress: TrainingProgress = lambda done, total, discriminator, generator: None) -> Self:
        while self.done < self.plan.steps:
            losses = self._step(self.done)
            self.done += 1
            progress(self.done, self.plan.steps, *losses)
        return self

    def result(self) -> ImageGenerator:
        return self.average

    def _step(self, number: int) -> tuple[float, float]:
        rng = derive_generator(self.seed, "generator", "step", number)
        real, labels = self._batch(number, rng)
        latents = torch.randn(2, len(real), self.plan.latent, generator=rng).to(real.device)
        shifts = torch.randint(-self.plan.shift, self.plan.shift + 1, (3, len(real), 2), generator=rng)
        with torch.no_grad():
            made = self.generator(latents[0], labels)
        both = torch.cat([self._moved(real, shifts[0]), self._moved(made, shifts[1])])
        scores_real, scores_made = self._discriminator(both, labels.repeat(2)).chunk(2)
        against = F.relu(1 - scores_real).mean() + F.relu(1 + scores_made).mean()
        _move(self._of_discriminator, against)
        made = self.generator(latents[1], labels)
        self._discriminator.requires_grad_(False)
        towards = -self._discriminator(self._moved(made, shifts[2]), labels).mean()
        _move(self._of_generator, towards)
        self._discriminator.requires_grad_(True)
        weight = 1 - min(self.plan.average, (1 + number) / (10 + number))  # so that initial values are soon forgotten
        with torch.no_grad():
            values = self.generator.state_dict()
            for name, mean in self.average.state_dict().items():
                if mean.is_floating_point():
                    mean.lerp_(values[name], weight)
                else:
                    mean.copy_(values[name])
        return against.item(), towards.item()

    def _batch(self, number: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        size, count = min(self.plan.batch_size, len(self._images)), len(self._images)
        epoch, place = divmod(number, count // size)
        order = torch.randperm(count, generator=derive_generator(self.seed, "generator", "epoch", epoch))
        chosen = order[place * size : (place + 1) * size].to(self._images.device)
        images = self._images[chosen].float() / 255
        if self.plan.flip:
            mirrored = (torch.rand(size, generator=rng) < 0.5).to(images.device)
            images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        return images, self._labels[chosen]

    def _moved(self, images: Tensor, shifts: Tensor) -> Tensor:
        most = self.plan.shift
        if not most:
            return images
        side = images.shape[-1]
        padded = F.pad(images, (most, most, most, most))
        places = torch.arange(side) + most
        rows, columns = (places - shifts[:, axis, None] for axis in (0, 1))
        picked = torch.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]
        moved: Tensor = padded.permute(0, 2, 3, 1)[tuple(index.to(images.device) for index in picked)]
        return moved.permute(0, 3, 1, 2)

    def state(self) -> dict[str, Tensor]:
        """Return all tensors, by name, from which another process can continue the training bit for bit."""
        found = {"done": torch.tensor(self.done)}
        for part, module in self._parts.items():
            found |= {f"{part}/{name}": value for name, value in module.state_dict().items()}
        for part, optimizer in self._optimizers.items():
            for number, moments in optimizer.state_dict()["state"].items():
                found |= {f"{part}/{number}/{name}": value for name, value in moments.items()}
        return {name: value.detach().cpu().contiguous() for name, value in found.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        try:
            for part, module in self._parts.items():
                module.load_state_dict(_below(state, part))
            for part, optimizer in self._optimizers.items():
                moments: dict[int, dict[str, Tensor]] = {}
                for name, value in _below(state, part).items():
                    number, _, key = name.partition("/")
                    moments.setdefault(int(number), {})[key] = value
                optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
            self.done = int(state["done"])
        except (RuntimeError, KeyError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"This training's state is expected, but got another ({reason}); remove it.") from error


def _below(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}/"): value for name, value in state.items() if name.startswith(f"{part}/")}


def _move(optimizer: torch.optim.Adam, loss: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
