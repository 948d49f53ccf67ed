"""What the head of a language model gives away: the last token of each text, which no attention layer tells."""

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.certificate import least_squares
from fl_privacy.gradients import loss_gradients
from fl_privacy.gradients.watch import entering
from fl_privacy.models import TextModel
from fl_privacy.types import Batch, ModelState, Tensors

_ROUNDED = 1e-6
"""Share of the gradient that is known below which what is left of it is rounding."""


def next_tokens(tokens: Tensor) -> Tensor:
    """(B, L) the labels of a language model: each next token, -100 where none follows."""
    follows = torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), -1)], 1)
    return follows.masked_fill(follows < 0, -100)


def last_tokens(model: TextModel, gradient: Tensors, tokens: Tensor, *, longest: int) -> Tensor:
    """``tokens`` (B, L) with the one added to each that its last position predicts.

    All other predictions are known, hence what they add to the head's gradient. The rest is a sum over the texts of
    what enters the head at the last position times p - y, a least squares system for y. A head tied to the embeddings
    has the gradient of these in the rows of the texts' own tokens as well, hardly any of it along what enters it. The
    client may have scaled its gradient, as clipping does: by how much, what is known says.
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
    if scale is None:  # what is left is below zero, of any scale, for the right token alone
        found = -least_squares(states.T, seen.T)
    else:
        found = predicted - least_squares(states.T, (seen / scale - known).T)
    found = found.argmax(1)
    longer = torch.cat([tokens, tokens.new_full((len(tokens), 1), -1)], 1)
    grows = lengths < longest
    longer[rows[grows], lengths[grows]] = found[grows]
    return longer


def _scale(seen: Tensor, known: Tensor, states: Tensor, tokens: Tensor) -> float | None:
    """Factor of the client's between the gradient (V, d) that is ``seen`` and the one whose part ``known`` (V, d) is.

    Across all ``states`` (B, d) that enter the head at last positions nothing is unknown. The rows of ``tokens``, which
    the embeddings' gradient may be part of, do not count.

    Returns:
        ``None`` where nothing is known across them, or what is known is not in what was seen.
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
    """Name of the weight and module of the last linear layer that puts out a number for each token."""
    tokens, names = model.words.num_embeddings, {id(p): name for name, p in model.named_parameters()}
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == tokens]
    return (names[id(heads[-1].weight)], heads[-1]) if heads else None
