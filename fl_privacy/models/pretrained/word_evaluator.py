"""The evaluation network for texts, which estimates the share of random words (Refiner, appendix F)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.models.pretrained.evaluator import EvaluatorPlan, Progress, fitted
from fl_privacy.rng import derive_generator, derive_seed

TEXTS = EvaluatorPlan(widths=(64, 64), epochs=10, batch_size=64, lr=1e-3)
"""Default training plan of ``fl-privacy train-evaluator`` for texts."""


@dataclass(frozen=True, eq=False)
class WordBox:
    """Box [0, 1] around the embeddings (n, d) of all tokens: the counterpart of pixel ranges."""

    table: Tensor

    def coordinates(self, embeddings: Tensor) -> Tensor:
        """Turn embeddings (..., d) into coordinates (..., d) in [0, 1]."""
        return (embeddings - self._low) / self._side

    def embeddings(self, coordinates: Tensor) -> Tensor:
        """Turn coordinates (..., d) in [0, 1] into embeddings (..., d)."""
        return self._low + self._side * coordinates

    def words(self, tokens: Tensor) -> Tensor:
        """Turn tokens (...) into coordinates (..., d); padding takes those of token 0."""
        return self.coordinates(self.table[tokens.clamp_min(0)])

    def random_words(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        """Draw coordinates (*shape, d) of uniform tokens."""
        drawn = torch.randint(len(self.table), tuple(shape), generator=rng, device=rng.device)
        return self.words(drawn.to(self.table.device))

    @cached_property
    def _low(self) -> Tensor:
        return self.table.amin(0)

    @cached_property
    def _side(self) -> Tensor:
        return (self.table.amax(0) - self._low).clamp_min(torch.finfo(self.table.dtype).tiny)


class WordEvaluator(nn.Module):
    """D of Refiner for texts: convolutions over words (d = ``width``), then the probability that each is random.

    The paper's DistilBERT is too large to run in each step.
    """

    def __init__(self, *, width: int, widths: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        if min(width, *widths) < 1:
            raise UserError(f"An evaluation network is expected to get widths of at least 1, but got {tuple(widths)}.")
        self.input_shape, self.widths = (width,), tuple(widths)
        self.layers = nn.ModuleList(nn.Conv1d(a, b, 3, padding=1) for a, b in pairwise([width, *widths]))
        self.head = nn.Linear(widths[-1], 1)

    def word_logits(self, words: Tensor, there: Tensor) -> Tensor:
        """Return the log odds (N, L) that words (N, L, d) are random; ``there`` (N, L) masks padding."""
        kept = there.to(words.dtype).unsqueeze(1)
        states = (2 * words - 1).mT * kept
        for layer in self.layers:
            states = layer(states).relu() * kept
        logits: Tensor = self.head(states.mT).squeeze(-1)
        return logits

    def forward(self, words: Tensor, there: Tensor) -> Tensor:
        """Predict the share (N,) of random words in [0, 1]."""
        kept = there.to(words.dtype)
        return (self.word_logits(words, there).sigmoid() * kept).sum(1) / kept.sum(1).clamp_min(1)


def mix_with_random_words(
    box: WordBox, tokens: Tensor, ratios: Tensor, rng: torch.Generator, *, blended: Tensor
) -> tuple[Tensor, Tensor]:
    """Replace shares ``ratios`` (N,) in [0, 1] of the words of ``tokens`` (N, L), padded with -1, by random ones.

    In texts ``blended`` (N,) all words are blended with random ones by the share, like robust data, instead. Return
    coordinates (N, L, d), and the randomness of each word (N, L).
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
    """Fit the predicted to the true share of random words in public ``tokens`` (N, L), by binary cross entropy of each.

    Every other text has words replaced, as published; in the others all are blended. ``table`` (n, d) holds the tokens'
    embeddings; -1 pads.
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
def random_word_curve(
    network: WordEvaluator, tokens: Tensor, table: Tensor, ratios: Tensor, *, seed: int = 0
) -> Tensor:
    """Predict the share of random words in each text (N, L) at each true share (R,), by replacement, (R, N)."""
    box, rng, tokens = WordBox(table.detach()), torch.Generator().manual_seed(seed), tokens.long()
    whole, rows = torch.zeros(len(tokens), dtype=torch.bool), []
    for ratio in ratios.tolist():
        words, _ = mix_with_random_words(box, tokens, torch.full((len(tokens),), ratio), rng, blended=whole)
        rows.append(network(words, tokens >= 0))
    return torch.stack(rows)
