"""Infer membership from the global models: the final one, or those of all rounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_privacy.attacks.inference.read_round import ReadRound, losses_of, lowest_of
from fl_privacy.attacks.inference.shadow_models import SIGNALS, MembershipMethod, MethodOptions

OFFLINE = 0.3  # a of RMIA: the probability of members is estimated as a p_out + 1 - a (Zarifzadeh et al. 2024)
RIDGE = 1e-3  # penalty of the weights of stacked signals
SHORTEST, END = 8, 16  # least number of tokens of a tested text, and most tokens of its end


class FinalLoss(MembershipMethod):
    """Membership inference by the final global model's loss; all clients get the same score (Yeom et al. 2018)."""

    title, source = "Loss, final model", "Yeom et al. 2018"

    def __init__(self, candidates: int, clients: Sequence[int], options: MethodOptions) -> None:
        super().__init__(candidates, clients, options)
        self._seen: set[int] = set()

    def columns(self, read: ReadRound) -> Tensor:
        self._seen.update(super().columns(read).tolist())
        return torch.arange(self._total.shape[1])

    def scores(self) -> Tensor:
        found = super().scores()
        found[:, [column for column in range(found.shape[1]) if column not in self._seen]] = torch.nan
        return found

    def evidence(self, read: ReadRound) -> Tensor:
        found = self.final_evidence(read) if read.remaining == 0 else torch.full((len(read.candidates),), torch.nan)
        return found.unsqueeze(1).expand(-1, self._total.shape[1])

    def final_evidence(self, read: ReadRound) -> Tensor:
        return -read.measured(read.observations[0].model.to(read.device), read.published, losses_of)


class FinalReference(FinalLoss):
    """Membership inference by how far the loss falls from the first to the final model (Mireshghallah et al. 2022)."""

    title, source = "Loss, final model compared with the first", "Mireshghallah et al. 2022"  # eq. 3

    def evidence(self, read: ReadRound) -> Tensor:
        found = super().evidence(read)
        if bool(self._rounds.any()):
            return found
        return read.losses_before.nanmean(1, keepdim=True).expand_as(found) + found.nan_to_num(nan=0.0)


class FinalLowestTokens(FinalLoss):
    """Membership inference by a text's least likely tokens at the final model (Min-K% Prob, Shi et al. 2024)."""

    title, source = "Least likely tokens, final model", "Shi et al. 2024"
    of_tokens = True

    def final_evidence(self, read: ReadRound) -> Tensor:
        return read.measured(read.observations[0].model.to(read.device), read.published, lowest_of)


def rmia(own: Tensor, usual: Tensor, population: Tensor, usual_population: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return the share (N,) of a population that each example dominates by ``gamma`` (Zarifzadeh et al. 2024, eq. 2).

    ``own``, for N examples, and ``population``, for Z others, are probabilities of the true class at the attacked
    model; ``usual`` and ``usual_population`` are their means over reference models not trained on the example. Except
    for ties, ``gamma`` does not change the examples' order.
    """
    ratios, theirs = ratio_to_usual(own, usual), ratio_to_usual(population, usual_population).sort().values
    return torch.searchsorted(theirs, ratios / gamma).to(own.dtype) / len(theirs)


def ratio_to_usual(own: Tensor, usual: Tensor) -> Tensor:
    """Return the ratio of the probability ``own`` to the one expected if membership is unknown.

    ``usual``: mean over models not trained on the example, from which the mean over the other models is estimated.
    """
    return own / ((1 + OFFLINE) / 2 * usual + (1 - OFFLINE) / 2)


def ratio_to_others(read: ReadRound) -> Tensor:
    """Return log ratios (C, K) of C examples' true-class probability at each client to the others' mean."""
    likely = (-read.losses_after).exp()
    finite = likely.isfinite()
    known = likely.where(finite, 0.0)
    others = (known.sum(1, keepdim=True) - known) / (finite.sum(1, keepdim=True) - finite.int())
    return ratio_to_usual(likely, others).log()


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared:
    """Signals (such as the loss) of N examples: candidates for membership, then the attacker's own examples."""

    own: Tensor  # (N, S) of the attacked model
    references: Tensor  # (M, N, S) of reference models
    outside: Tensor  # (M, N) ``True`` if a reference model was not trained on the example
    candidates: int  # number of candidates

    def usual(self, values: Tensor) -> Tensor:
        counted = (self.outside & self.references.isfinite().all(2)).reshape(
            *self.outside.shape, *(1,) * (values.dim() - 2)
        )
        return values.where(counted, 0.0).sum(0) / counted.sum(0)

    def scaled(self, others: Tensor) -> Tensor:
        """Return signals, and their differences from the reference models' signals, as standardized features.

        ``others``: mask (N,) of the examples whose mean and standard deviation become 0 and 1.
        """
        ratio = ratio_to_usual((-self.own[:, :1]).exp(), self.usual((-self.references[..., :1]).exp())).log()
        found = torch.cat([self.own, self.own - self.usual(self.references), ratio], 1)
        sound = found[others & found.isfinite().all(1)]
        return (found - sound.mean(0)) / sound.std(0).clamp_min(1e-9)


def by_rmia(found: Compared) -> Tensor:
    """Return the scores (C,) of :func:`rmia` for C candidates; ``ratio_to_usual`` ranks those with equal scores."""
    number, own = found.candidates, (-found.own[:, 0]).exp()
    usual = found.usual((-found.references[..., 0]).exp())
    there = usual[number:].isfinite()
    ratios = ratio_to_usual(own[:number], usual[:number])
    return rmia(own[:number], usual[:number], own[number:][there], usual[number:][there]) + 1e-9 * ratios


def by_lira(found: Compared) -> Tensor:
    """Return offline LiRA's scores (C,): the margin minus its mean over reference models not trained on the example.

    The margin is log(p / (1 - p)) of the true class. The scores rank candidates like the one-sided likelihood-ratio
    test with one variance for all (Carlini et al. 2022, Sec. IV-C, VI-B).
    """
    return (found.own[:, 1] - found.usual(found.references[..., 1]))[: found.candidates]


def stacked(found: Compared) -> Tensor:
    """Return log odds (C,) of membership of C candidates, by logistic regression on signals such as the loss.

    Features are a model's signals, and their differences from the signals of reference models. The regression learns to
    detect the attacker's examples that each reference model was trained on. NaN for a single reference model.
    """
    if len(found.outside) == 1:
        return torch.full((found.candidates,), torch.nan)
    known, inside = list[Tensor](), list[Tensor]()
    pool = torch.arange(len(found.own)) >= found.candidates
    for place, outside in enumerate(found.outside):
        rest = torch.arange(len(found.outside)) != place
        one = replace(
            found, own=found.references[place], references=found.references[rest], outside=found.outside[rest]
        )
        features = one.scaled(outside & pool)
        sound = features.isfinite().all(1) & pool
        known.append(features[sound])
        inside.append(~outside[sound])
    given, labels = torch.cat(known), torch.cat(inside).double()
    weights = torch.zeros(given.shape[1] + 1, dtype=given.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def odds(features: Tensor) -> Tensor:
        return features @ weights[1:] + weights[0]

    def loss() -> Tensor:
        value = torch.nn.functional.binary_cross_entropy_with_logits(odds(given), labels)
        value = value + RIDGE * weights.square().sum()
        (weights.grad,) = torch.autograd.grad(value, weights)
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return odds(found.scaled(pool))[: found.candidates].detach()


BY_REFERENCES: dict[str, tuple[str, str, Callable[[Compared], Tensor]]] = {
    "rmia": ("RMIA", "Zarifzadeh et al. 2024", by_rmia),
    "lira": ("LiRA offline", "Carlini et al. 2022", by_lira),
    "stacked": ("Stacked signals", "loss, margin, entropy, augmentations, reference models", stacked),
}
"""Name of a comparison with reference models -> title, source, and scores (C,)."""


class ByReferences(FinalLoss):
    """Membership inference that compares global models with reference models trained without the candidates.

    Scores are NaN if the attacker has no public examples to train reference models on.
    """

    models = "final"
    compare: Callable[[Compared], Tensor]

    def evidence(self, read: ReadRound) -> Tensor:
        self.options.course.record(read, self.options.references)
        return super().evidence(read)

    def final_evidence(self, read: ReadRound) -> Tensor:
        course, number = self.options.course, len(read.candidates)
        if course.seen is None or course.references is None or course.inside is None:
            return torch.full((number,), torch.nan)
        chosen = list(range(SIGNALS)) if self.models == "final" else [*range(SIGNALS, 2 * SIGNALS), *range(SIGNALS)]
        outside = torch.ones(course.references.shape[:2], dtype=torch.bool)
        outside[:, number:] = ~course.inside
        few = slice(self.options.references)
        return type(self).compare(
            Compared(
                own=course.seen[:, chosen],
                references=course.references[few, :, chosen],
                outside=outside[few],
                candidates=number,
            )
        )


def by_references(models: str, name: str) -> type[ByReferences]:
    """Return the class of method ``name`` in ``BY_REFERENCES``, for the ``final`` model or those of all ``rounds``."""
    title, source, compare = BY_REFERENCES[name]
    of = "final model" if models == "final" else "all global models"
    shown = {"title": f"{title}, {of}", "source": source, "models": models, "compare": staticmethod(compare)}
    return type("ByReferences", (ByReferences,), shown)


@torch.no_grad()
def continued(logits: Callable[[Tensor], Tensor], texts: Sequence[Tensor], *, end: int = END) -> tuple[Tensor, Tensor]:
    """Test if a language model completes texts from their beginnings (Carlini et al. 2023, Def. 3.1).

    For the N texts that are long enough, return (N,) ``True`` if the greedy continuation equals the text's end, and the
    log probability (N,) that a sampled one does (Hayes et al. 2024). ``logits``: function from L tokens (1, L) to a
    score of each token of the vocabulary. The end of a text is its last half, of at most ``end`` tokens.
    """
    greedy, sampled = list[bool](), list[float]()
    for text in (text for text in texts if len(text) >= SHORTEST):
        last = min(end, len(text) // 2)
        likely = logits(text[None].long())[0, -last - 1 : -1].log_softmax(-1)
        greedy.append(bool((likely.argmax(-1) == text[-last:]).all()))
        sampled.append(float(likely.gather(-1, text[-last:, None].long()).sum()))
    return torch.tensor(greedy), torch.tensor(sampled, dtype=torch.float64)
