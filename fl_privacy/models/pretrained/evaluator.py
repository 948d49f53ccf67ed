"""Refiner's evaluation network, which estimates the share of noise in an image or text, and its training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import checks
from fl_privacy.errors import UserError
from fl_privacy.rng import derive_generator, derive_seed


class EvaluationNetwork(nn.Module):
    """Refiner's evaluation network, which estimates the share of noise in images (Fan et al. 2025, App. D)."""

    def __init__(self, *, input_shape: Sequence[int], widths: Sequence[int] = (128, 256, 512)) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise UserError(f"input_shape is expected to be (C, H, W), but got {tuple(input_shape)}; try (3, 32, 32).")
        self.input_shape: tuple[int, ...] = checks.shape("input_shape", input_shape, example="try [3,32,32]")
        self.widths: tuple[int, ...] = checks.shape("widths", widths, example="try [128,256,512]")
        channels, height, width = input_shape
        layers: list[nn.Module] = []
        self.multiply_adds: int = 0
        """Number of multiply-adds for one image."""
        for inner, outer in pairwise([channels, *self.widths]):
            layers += [nn.Conv2d(inner, outer, 3, stride=2, padding=1), nn.ReLU()]
            height, width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
            self.multiply_adds += 9 * inner * outer * height * width
        self.features: nn.Sequential = nn.Sequential(*layers)
        self.head: nn.Linear = nn.Linear(self.widths[-1] * height * width, 1)
        self.multiply_adds += self.head.in_features

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits (N,) of the predicted share of noise in images (N, C, H, W) in [0, 1]."""
        return cast(Tensor, self.head(self.features(images).flatten(1)).squeeze(1))

    def forward(self, images: Tensor) -> Tensor:
        return torch.sigmoid(self.logits(images))


N = TypeVar("N", bound=nn.Module)
Progress = Callable[[int, int, float], None]  # (steps done, total steps, loss of the last one) -> None


@dataclass(frozen=True, kw_only=True)
class EvaluatorPlan:
    """Plan for training an evaluation network with Adam; the defaults are Refiner's (Fan et al. 2025, App. D)."""

    widths: tuple[int, ...] = (128, 256, 512)  # filters of each convolution
    levels: int = 11  # number of evenly spaced noise ratios; each epoch shows each image at all of them
    epochs: int = 20
    batch_size: int = 128
    lr: float = 1e-4

    def __post_init__(self) -> None:
        for name, least in (("levels", 2), ("epochs", 1), ("batch_size", 1)):
            checks.whole(name, getattr(self, name), at_least=least, example=20)
        object.__setattr__(self, "widths", checks.shape("widths", self.widths, example="try [128,256,512]"))
        checks.number("lr", self.lr, above=0, example=1e-4)


def fitted(
    network: N,
    number: int,
    plan: EvaluatorPlan,
    losses: Callable[[Tensor], Callable[[Tensor], Tensor]],
    *,
    seed: int,
    device: torch.device | str,
    progress: Progress,
) -> N:
    """Return ``network`` after training on ``number`` examples; an epoch shows every example at every noise level.

    ``losses(chosen)(places)`` returns the loss of a batch: ``chosen`` (B,) are indices of examples, and ``places`` (B,)
    modulo ``plan.levels`` the indices of their noise levels.
    """
    order = derive_generator(seed, "evaluator", "order")
    optimizer = torch.optim.Adam(network.parameters(), lr=plan.lr)
    total, done = plan.epochs * -(-number // plan.batch_size) * plan.levels, 0
    for _ in range(plan.epochs):
        for chosen in torch.split(torch.randperm(number, generator=order).to(device), plan.batch_size):
            loss_at, places = losses(chosen), torch.arange(len(chosen), device=device)
            for shift in range(plan.levels):
                loss = loss_at(places + shift)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                done += 1
                progress(done, total, loss.item())
    return network.requires_grad_(False).eval()


def train_evaluator(
    images: Tensor,
    plan: EvaluatorPlan,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Progress = lambda done, total, loss: None,
    teacher: EvaluationNetwork | None = None,
) -> EvaluationNetwork:
    """Return an evaluation network trained to predict the noise ratio of images blended with uniform noise.

    ``images`` (N, C, H, W) uint8 are public. The loss is Refiner's Eq. 5, a binary cross entropy, with the true ratios
    or with the predictions of ``teacher``, a larger network for images of the same shape (Hinton et al. 2015).
    """
    if teacher is not None and teacher.input_shape != tuple(images.shape[1:]):
        expected, got = ("x".join(map(str, shape)) for shape in (images.shape[1:], teacher.input_shape))
        raise UserError(
            f"teacher is expected to be an evaluation network for images of {expected}, but is one for {got};"
            " set data.channels and data.image_size to its shape or take another."
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "evaluator", "model"))
        network = EvaluationNetwork(input_shape=images.shape[1:], widths=plan.widths).to(device)
    noise = derive_generator(seed, "noise", device=device)
    public, levels = images.to(device), torch.linspace(0, 1, plan.levels, device=device)

    def losses(chosen: Tensor) -> Callable[[Tensor], Tensor]:
        batch = public[chosen].float() / 255

        def loss(places: Tensor) -> Tensor:
            ratios = levels[places % plan.levels]
            blended = blend_with_noise(batch, ratios, noise)
            with torch.no_grad():
                wanted = ratios if teacher is None else teacher(blended)
            return F.binary_cross_entropy_with_logits(network.logits(blended), wanted)

        return loss

    return fitted(network, len(images), plan, losses, seed=seed, device=device, progress=progress)


def student_plan(plan: EvaluatorPlan, teacher: EvaluationNetwork) -> EvaluatorPlan:
    """Return ``plan`` with so few filters that the network needs about a tenth of the operations of ``teacher``."""
    return replace(plan, widths=tuple(max(1, round(_STUDENT * width)) for width in teacher.widths))


_STUDENT = 0.3  # ratio of a student's filters to its teacher's


def uniform_noise(like: Tensor, rng: torch.Generator) -> Tensor:
    """Return uniform noise in [0, 1] with the shape of ``like``."""
    return torch.rand(like.shape, generator=rng, device=rng.device, dtype=like.dtype).to(like.device)


def blend_with_noise(images: Tensor, ratios: Tensor, rng: torch.Generator) -> Tensor:
    """Return ``(1 - r) x + r v``, v uniform noise, for images x (N, C, H, W) and ratios r (N,) (Refiner, sec. 3.3)."""
    return torch.lerp(images, uniform_noise(images, rng), ratios.to(images).view(-1, 1, 1, 1))


CHUNK = 512  # images judged at once


@torch.no_grad()
def noise_curve(network: EvaluationNetwork, images: Tensor, ratios: Tensor, *, seed: int = 0) -> Tensor:
    """Return the shares of noise (R, N) that ``network`` finds in N images, mixed with noise at R true ``ratios``."""
    device, rows = next(network.parameters()).device, []
    rng = torch.Generator(device=device).manual_seed(seed)
    for ratio in ratios.tolist():
        chunks = (chunk.to(device).float() / 255 for chunk in torch.split(images, CHUNK))
        blended = (blend_with_noise(chunk, torch.full((len(chunk),), ratio), rng) for chunk in chunks)
        rows.append(torch.cat([network(chunk).cpu() for chunk in blended]))
    return torch.stack(rows)


TEXTS = EvaluatorPlan(widths=(64, 64), epochs=10, batch_size=64, lr=1e-3)


@dataclass(frozen=True, eq=False)
class WordBox:
    """Scaling of word embeddings to [0, 1], by the range of each of d coordinates in the embedding ``table`` (n, d)."""

    table: Tensor

    def coordinates(self, embeddings: Tensor) -> Tensor:
        return (embeddings - self._low) / self._side

    def embeddings(self, coordinates: Tensor) -> Tensor:
        return self._low + self._side * coordinates

    def words(self, tokens: Tensor) -> Tensor:
        """Return the embeddings (..., d) of tokens (...), scaled to [0, 1]; padding gets the embedding of token 0."""
        return self.coordinates(self.table[tokens.clamp_min(0)])

    def random_words(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        drawn = torch.randint(len(self.table), tuple(shape), generator=rng, device=rng.device)
        return self.words(drawn.to(self.table.device))

    @cached_property
    def _low(self) -> Tensor:
        return self.table.amin(0)

    @cached_property
    def _side(self) -> Tensor:
        return (self.table.amax(0) - self._low).clamp_min(torch.finfo(self.table.dtype).tiny)


class WordEvaluator(nn.Module):
    """Network of Refiner, a defense, that rates texts by predicting for each word whether a random one replaced it.

    It has convolutions over words; ``width`` is the length of a word embedding. The paper's DistilBERT is larger.
    """

    def __init__(self, *, width: int, widths: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        self.input_shape: tuple[int, ...] = checks.shape("width", width, example="try 64")
        self.widths: tuple[int, ...] = checks.shape("widths", widths, example="try [64,64]")
        convolutions = (nn.Conv1d(a, b, 3, padding=1) for a, b in pairwise([width, *self.widths]))
        self.layers: nn.ModuleList = nn.ModuleList(convolutions)
        self.head: nn.Linear = nn.Linear(self.widths[-1], 1)

    def word_logits(self, words: Tensor, there: Tensor) -> Tensor:
        """Return logits (N, L) that words (N, L, d) are random replacements; ``there`` (N, L) is false for padding."""
        kept = there.to(words.dtype).unsqueeze(1)
        states = (2 * words - 1).mT * kept
        for layer in self.layers:
            states = layer(states).relu() * kept
        return cast(Tensor, self.head(states.mT).squeeze(-1))

    def forward(self, words: Tensor, there: Tensor) -> Tensor:
        """Return the predicted share (N,) of random words in texts (N, L, d); ``there`` (N, L) is false for padding."""
        kept = there.to(words.dtype)
        return (self.word_logits(words, there).sigmoid() * kept).sum(1) / kept.sum(1).clamp_min(1)


def mix_with_random_words(
    box: WordBox, tokens: Tensor, ratios: Tensor, rng: torch.Generator, *, blended: Tensor
) -> tuple[Tensor, Tensor]:
    """Replace the share ``ratios`` (N,) of each text's words by random words, or blend all its words with random ones.

    Return scaled embeddings (N, L, d) (see :class:`WordBox`), and each word's share of randomness (N, L). ``tokens``:
    (N, L), padded with -1. ``blended`` (N,): true for texts in which all words are blended.
    """
    words, noise = box.words(tokens), box.random_words(tokens.shape, rng)
    exchanged = torch.rand(tokens.shape, generator=rng).to(ratios) < ratios[:, None]
    shares = torch.where(blended[:, None], ratios[:, None], exchanged.to(ratios))
    return torch.lerp(words, noise, shares.unsqueeze(-1).to(words)), shares


def train_word_evaluator(
    tokens: Tensor,
    table: Tensor,
    plan: EvaluatorPlan,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Progress = lambda done, total, loss: None,
) -> WordEvaluator:
    """Return a network trained to predict which words of public texts ``tokens`` (N, L) are replaced by random ones.

    In half of the texts, random words replace some words (Fan et al. 2025); in the others, each word's embedding is
    blended with a random word's. ``table`` (n, d) has the tokens' embeddings; texts are padded with -1.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "evaluator", "model"))
        network = WordEvaluator(width=table.shape[1], widths=plan.widths).to(device)
    noise, box = derive_generator(seed, "noise"), WordBox(table.detach().to(device))
    public, levels = tokens.long().to(device), torch.linspace(0, 1, plan.levels, device=device)

    def losses(chosen: Tensor) -> Callable[[Tensor], Tensor]:
        batch = public[chosen]
        batch = batch[:, : max(1, int((batch >= 0).sum(1).max()))]
        there = batch >= 0

        def loss(places: Tensor) -> Tensor:
            ratios = levels[places % plan.levels]
            words, shares = mix_with_random_words(box, batch, ratios, noise, blended=places % 2 == 1)
            return F.binary_cross_entropy_with_logits(network.word_logits(words, there)[there], shares[there])

        return loss

    return fitted(network, len(tokens), plan, losses, seed=seed, device=device, progress=progress)


@torch.no_grad()
def random_word_curve(network: WordEvaluator, tokens: Tensor, table: Tensor, ratios: Tensor) -> Tensor:
    """Return shares (R, N) of random words found in texts (N, L) for R ``ratios``; ``table`` (n, d): embeddings."""
    box, rng, tokens = WordBox(table.detach()), torch.Generator().manual_seed(0), tokens.long()
    whole, rows = torch.zeros(len(tokens), dtype=torch.bool), []
    for ratio in ratios.tolist():
        words, _ = mix_with_random_words(box, tokens, torch.full((len(tokens),), ratio), rng, blended=whole)
        rows.append(network(words, tokens >= 0))
    return torch.stack(rows)
