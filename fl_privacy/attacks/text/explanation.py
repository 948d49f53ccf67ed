"""Compare updates of guessed texts with the observed one, to infer labels, copies and last tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import comb

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fl_privacy.attacks.exact.certificate import ROUNDING, Reproduction, least_squares
from fl_privacy.attacks.text.token_candidates import CLEAR
from fl_privacy.models import TextModel
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.gradients.hooks import entering
from fl_privacy.types import Batch, ModelState, Observation, Tensors

_ROUNDED = 1e-6  # share of the known gradient below which a rest is rounding


def next_tokens(tokens: Tensor) -> Tensor:
    """Return the next tokens (B, L) as labels, -100 if none follows."""
    follows = torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), -1)], 1)
    return follows.masked_fill(follows < 0, -100)


def last_tokens(model: TextModel, gradient: Tensors, tokens: Tensor, *, longest: int) -> Tensor:
    """Append to each text in ``tokens`` (B, L) one more token, the inferred label of its last position.

    The label follows by least squares from the output layer's gradient, minus the part that is due to known labels. The
    gradient is first divided by the client's scaling, see :func:`_scale`. Texts of ``longest`` tokens are not extended.
    """
    head = head_of(model)
    if head is None or head[0] not in gradient:
        return tokens
    name, module = head
    there, labels = tokens >= 0, next_tokens(tokens)
    lengths, rows = there.sum(1), torch.arange(len(tokens), device=tokens.device)
    seen = int(there.sum()) * gradient[name].to(module.weight)
    with torch.no_grad(), entering({"head": module}) as calls:
        predicted = model(tokens).mT.softmax(-1)[rows, lengths - 1]
    states = calls[0].inputs[rows, lengths - 1]
    known, scale = torch.zeros_like(seen), None
    if bool((labels >= 0).any()):
        state = ModelState(dict(model.named_parameters()), dict(model.named_buffers()))
        known = int((labels >= 0).sum()) * loss_gradients(model, state, Batch(tokens, labels)).gradients[name]
        scale = _scale(seen, known, states, torch.unique(tokens[there]))
    if scale is None:  # at any scale, the rest is negative for the right token alone
        found = -least_squares(states.T, seen.T)
    else:
        found = predicted - least_squares(states.T, (seen / scale - known).T)
    found = found.argmax(1)
    longer = torch.cat([tokens, tokens.new_full((len(tokens), 1), -1)], 1)
    grows = lengths < longest
    longer[rows[grows], lengths[grows]] = found[grows]
    return longer


def _scale(seen: Tensor, known: Tensor, states: Tensor, tokens: Tensor) -> float | None:
    """Return the factor by which the client multiplied its gradient; ``None`` if it is unknown or not positive.

    ``seen``: output layer's gradient. ``known``: its part due to known labels. Only elements without any other part are
    compared: not rows of ``tokens``, to which a tied layer adds the embeddings' gradient, and not directions of the
    last hidden ``states`` (B, d).
    """
    others = torch.ones(len(seen), dtype=torch.bool, device=seen.device)
    others[tokens] = False
    along = torch.linalg.qr(states.T)[0]
    left = known[others] - known[others] @ along @ along.T
    length = float(left.norm())
    if length <= _ROUNDED * float(known.norm()):
        return None
    factor = float((seen[others] * left).sum()) / length**2
    return factor if factor > 0 else None


def head_of(model: TextModel) -> tuple[str, nn.Linear] | None:
    """Return (name of the weight, layer) for the last linear layer with an output for each token, or ``None``."""
    tokens, names = model.words.num_embeddings, {id(p): name for name, p in model.named_parameters()}
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == tokens]
    return (names[id(heads[-1].weight)], heads[-1]) if heads else None


_MOST = 256  # largest number of ways to repeat texts that are tried
_WHOLE = 0.05  # largest distance of a number of copies from a whole number


@dataclass(frozen=True, eq=False)
class Explanation:
    """Compares the updates that guessed texts would give with the observed one, in double precision."""

    observation: Observation
    model: TextModel
    gradient: Tensors

    def labelled(self, texts: Sequence[Tensor]) -> Batch | None:
        tokens = pad_sequence(list(texts), batch_first=True, padding_value=-1)
        if self.model.next_token:
            tokens = last_tokens(self.model, self.gradient, tokens, longest=self.observation.input_shape[0])
            return Batch(tokens, next_tokens(tokens))
        labels = self._reproduction.labels(tokens)
        return None if labels is None else Batch(tokens, labels)

    def distance(self, batch: Batch) -> float:
        return self._reproduction.distance(batch) if len(batch.inputs) == self._number else float("inf")

    def repeated(self, texts: Sequence[Tensor], rank: int) -> Batch | None:
        """Find how often each of ``texts`` (L,) occurs in the batch, such that it reproduces the update exactly.

        Return this batch; ``None`` if none or several fit, or if a text hardly changes the update. The scale has to
        fit, too, so clipped updates do not. ``texts``: all different. ``rank``: rank of the first attention layer's
        gradient; the batch has at least as many different pairs of token and position.
        """
        if len({pair for text in texts for pair in enumerate(text.tolist())}) < rank:
            return None
        if not 0 < len(texts) < self._number or comb(self._number - 1, len(texts) - 1) > _MOST:
            return None
        found: list[tuple[float, Batch]] = []
        for ends in combinations(range(1, self._number), len(texts) - 1):
            copies = [end - begin for begin, end in pairwise([0, *ends, self._number])]
            batch = self.labelled([text for text, times in zip(texts, copies, strict=True) for _ in range(times)])
            settled = None if batch is None else _settled(batch, copies)
            if settled is not None:
                found.append((self._reproduction.distance(settled, any_scale=False), settled))
        near = [(apart, batch) for apart, batch in found if apart < CLEAR * ROUNDING]
        if len(near) != 1 or not near[0][0] < ROUNDING:
            return None
        batch = near[0][1]
        predicted = (batch.labels >= 0).reshape(len(batch.inputs), -1).sum(1)
        all_needed = bool(predicted.all()) and all(
            self._reproduction.share(Batch(text[None], label[None]), float(some) / int(predicted.sum()))
            > CLEAR * ROUNDING
            for text, label, some in zip(batch.inputs, batch.labels, predicted, strict=True)
        )
        return batch if all_needed else None

    @property
    def _number(self) -> int:
        return self.observation.upload.num_examples

    @cached_property
    def _reproduction(self) -> Reproduction:
        return Reproduction(self.observation, self.model)


def _settled(batch: Batch, copies: Sequence[int]) -> Batch | None:
    """Replace the soft labels of each text's copies by classes with the same total; ``None`` if one is not whole."""
    if not batch.labels.is_floating_point():
        return batch
    classes = []
    for own, times in zip(torch.split(batch.labels, list(copies)), copies, strict=True):
        sums = own.sum(0)
        whole = sums.round().long()
        if int(whole.sum()) != times or float((sums - whole).abs().max()) > _WHOLE:
            return None
        classes.append(torch.arange(len(whole), device=whole.device).repeat_interleave(whole))
    return Batch(batch.inputs, torch.cat(classes))
