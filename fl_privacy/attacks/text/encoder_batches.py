"""Infer the positions of a batch's words, and which stood together, by the gradient of an encoder's first block alone.

Its inputs LN(w + p) are linear up to scale, so the gradient has parts D_w and E_p, each E_p the sum of D_w of the words
there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.certificate import least_squares
from fl_privacy.attacks.text.spans import entering_block
from fl_privacy.attacks.text.token_candidates import Lengths
from fl_privacy.models import TextModel
from fl_privacy.models.gradients.hooks import entering
from fl_privacy.types import Tensors

_STEPS = 400
"""Steps of the search for the shares of positions."""
_ALONE, _LEAST = 0.6, 0.02
"""Share of a word's part above which it counts as having stood at one position only, and below which as not there."""
_PASSES, _NOISE = 25, 1e-6
"""Passes of expectation maximization, and the variance of its noise."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of the gradient that belong to each word and each position.

    Attributes:
        words: (V, m) D_w, float64.
        positions: (P, m) E_p, whose sum is that of the words.
        attended: (V, 2, d) the words' parts behind queries and keys.
    """

    words: Tensor
    positions: Tensor
    attended: Tensor


@dataclass(frozen=True, eq=False)
class GuessedTexts:
    """Reconstructed texts in which most tokens are right.

    Attributes:
        tokens: (n,) possible ones for each position.
        texts: (L,) each, the shortest first; as long as the longest if lengths are unknown.
        held: (L,) ``True`` for a word that stood at one position only.
    """

    tokens: Sequence[Tensor]
    texts: Sequence[Tensor]
    held: Sequence[Tensor]


def disaggregated(model: TextModel, gradient: Tensors, words: Tensor, lengths: Lengths) -> GuessedTexts | None:
    """Guess the texts by the first block's parts of ``words`` (V,); ``None`` if the model doesn't allow it."""
    number, longest = lengths.number, lengths.longest
    parts = parts_of(model, gradient, words, longest)
    if parts is None:
        return None
    shares = shares_of(parts)
    most, where = shares.max(1)
    alone = (most > _ALONE).nonzero().flatten()
    if len(alone) < number:
        return None
    positions = where[alone]
    possible = shares > _LEAST
    possible[alone] = nn.functional.one_hot(positions, longest).bool()
    standing = possible.nonzero()
    support = supports(model, parts, alone, words[standing[:, 0]], standing[:, 1])
    own = (standing == torch.stack([alone, positions], 1)[:, None]).all(-1).int().argmax(1)
    groups = grouped(support[:, own], positions, number)
    members = [(groups == group).nonzero().flatten() for group in range(number)]
    members.sort(key=lambda group: int(positions[group].max()) if len(group) else 0)
    texts, held = [], []
    likeliest = shares.argmax(0)
    for group, length in zip(members, lengths.told or [longest] * number, strict=True):
        text = words[likeliest]
        text[positions[group]] = words[alone[group]]
        texts.append(text[:length])
        held.append(torch.isin(torch.arange(length, device=text.device), positions[group]))
    possible[most <= _ALONE] = True
    possible[likeliest, torch.arange(longest, device=words.device)] = True  # if no word was alone
    return GuessedTexts([words[at] for at in possible.T], texts, held)


@torch.no_grad()
def parts_of(model: TextModel, gradient: Tensors, words: Tensor, longest: int) -> Parts | None:
    """Split the gradient into the parts of ``words`` (V,) and of ``longest`` positions.

    ``None`` without gradients of separate queries, keys and values behind a layer norm, or with too many words.
    """
    names, norm = model.attention_weights[0], model.entry_norm
    if norm is None or len(names) != 3 or model.transposed or not all(name in gradient for name in names):
        return None
    with entering({"norm": norm}) as calls:
        entering_block(model, words[:, None].expand(-1, longest), 0)
    sums = calls[0].inputs.double()
    sums = (sums - sums.mean(-1, keepdim=True)) * norm.weight.double()
    offset = norm.bias.double()[None]
    directions = torch.cat([sums[:, 0], sums[0, 1:] - sums[0, :1], offset])
    if len(directions) > directions.shape[1]:
        return None
    rows = torch.cat([gradient[name].double() for name in names])
    solved = least_squares(directions.T, rows.T)
    of_words, behind = solved[: len(words)], solved[len(words) : -1]
    of_positions = torch.cat([of_words.sum(0, keepdim=True) - behind.sum(0, keepdim=True), behind])
    pairs = [(of_words, of_positions)]
    if model.word_weight in gradient and model.position_weight in gradient:
        rows_of = gradient[str(model.position_weight)][model.first_position :][:longest]
        pairs.append((gradient[model.word_weight][words].double(), rows_of.double()))
    scales = [1 / one.norm().clamp_min(1e-300) for one, _ in pairs]
    width = rows.shape[1]
    return Parts(
        torch.cat([one * scale for (one, _), scale in zip(pairs, scales, strict=True)], 1),
        torch.cat([other * scale for (_, other), scale in zip(pairs, scales, strict=True)], 1),
        of_words[:, : 2 * width].reshape(-1, 2, width),
    )


def shares_of(parts: Parts) -> Tensor:
    """Return the share of each word's part from each position (V, P), at least 0 and 1 in all."""
    lengths = parts.words.norm(dim=1, keepdim=True).clamp_min(1e-12)
    atoms = parts.words / lengths
    gram, aim = atoms @ atoms.T, atoms @ parts.positions.T
    rate = 1 / float(torch.linalg.eigvalsh(gram)[-1])
    found: Tensor = _on_simplex(torch.zeros_like(aim), lengths)
    ahead = found
    momentum = 1.0
    for _ in range(_STEPS):
        moved = _on_simplex(ahead - rate * (gram @ ahead - aim), lengths)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = moved + (momentum - 1) / following * (moved - found)
        found, momentum = moved, following
    shares: Tensor = found / lengths
    return shares


def _on_simplex(rows: Tensor, sums: Tensor) -> Tensor:
    """Project each row (V, P) onto the simplex of sum (V, 1)."""
    ordered = rows.sort(1, descending=True).values
    excess = (ordered.cumsum(1) - sums) / torch.arange(1, rows.shape[1] + 1, device=rows.device)
    last = (ordered > excess).sum(1, keepdim=True) - 1
    return (rows - excess.gather(1, last)).clamp_min(0)


@torch.no_grad()
def supports(model: TextModel, parts: Parts, alone: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return how much (T, n) the gradients of the words ``alone`` (T,) need each token's keys and queries.

    The ``tokens`` (n,) are at ``positions`` (n,). Sparse Bayesian learning (Tipping 2001), one variance for all heads.
    """
    longest = int(positions.max()) + 1
    inputs = entering_block(model, tokens[:, None].expand(-1, longest), 0)[torch.arange(len(tokens)), positions]
    queries, keys = (
        model.get_submodule(name.removesuffix(".weight"))(inputs).double() for name in model.attention_weights[0][:2]
    )
    keys = keys - keys.mean(0)  # the gradient behind a softmax has coefficients whose sum is zero
    heads = (model.heads, -1)
    atoms = torch.cat([of.unflatten(1, heads).permute(1, 2, 0) for of in (keys, queries)])
    atoms = atoms / atoms.square().sum(1).mean(0).sqrt().clamp_min(1e-12)
    behind = parts.attended[alone]
    behind = behind / behind.norm(dim=2, keepdim=True).clamp_min(1e-300)
    seen = behind.unflatten(2, heads).flatten(1, 2)
    return torch.cat([_variances(atoms, some) for some in seen.split(16)])


def _variances(atoms: Tensor, seen: Tensor) -> Tensor:
    """Estimate variances (T, n) of the coefficients of ``atoms`` (H, m, n) in ``seen`` (T, H, m), by EM."""
    size = atoms.shape[1]
    noise = _NOISE * torch.eye(size, dtype=atoms.dtype, device=atoms.device)
    found = atoms.new_full((len(seen), atoms.shape[2]), 1 / atoms.shape[2])
    for _ in range(_PASSES):
        spread = torch.einsum("hmn,tn,hkn->thmk", atoms, found, atoms) + noise
        solved = torch.linalg.solve(spread, torch.cat([atoms.expand(len(seen), -1, -1, -1), seen[..., None]], -1))
        mean = found[:, None] * torch.einsum("hmn,thm->thn", atoms, solved[..., -1])
        left = found[:, None] - found[:, None].square() * torch.einsum("hmn,thmn->thn", atoms, solved[..., :-1])
        found = (mean.square() + left).mean(1)
    return found


def grouped(support: Tensor, positions: Tensor, number: int) -> Tensor:
    """Assign each (T,) to a group by mutual ``support``: normalized affinity's eigenvectors (Damle, Minden, Ying 2019).

    Args:
        support: (T, T) at least 0.
        positions: (T,) different ones within a group.
    """
    affinity = support.masked_fill(positions[:, None] == positions, 0)
    affinity = affinity / affinity.sum(1, keepdim=True).clamp_min(1e-300)
    affinity = affinity + affinity.T
    degree = affinity.sum(1).clamp_min(1e-12).rsqrt()
    leading = torch.linalg.eigh(degree[:, None] * affinity * degree)[1][:, -number:]
    left, picked = leading.clone(), []
    for _ in range(number):
        picked.append(int(left.norm(dim=1).argmax()))
        direction = nn.functional.normalize(left[picked[-1]], dim=0)
        left = left - (left @ direction)[:, None] * direction
    u, _, v = torch.linalg.svd(leading[picked].T)
    groups: Tensor = (leading @ (u @ v)).abs().argmax(1)
    return groups
