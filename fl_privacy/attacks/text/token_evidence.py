"""Infer tokens and positions from a few directions that an update contains (ours).

If an update of b tokens contains k of n directions, these hold a share of about k / b of a present token's squared
length, and of k / n of any other token's. This holds also under noise, and gives the expected number of false tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.attacks.text.token_candidates import entering_layers
from fl_privacy.models import TextModel
from fl_privacy.models.gradients.choose_method import decayed, number_of_steps
from fl_privacy.models.gradients.hooks import entering, leaving
from fl_privacy.types import Observation, Tensors

_SAME = 1e-5  # relative difference of two inputs of a layer that is rounding
_LENGTH, _AT = 4, (1, 3)  # length of the texts that probe layers, and the places of the compared token
_ADAM_EPS = 1e-8
_ULPS = 4.0  # roundings in single precision by which a step of Adam from zero may be off


@dataclass(frozen=True, eq=False)
class Entrance:
    """A linear layer before any attention, whose input depends on one token only."""

    weight: str  # name of its parameter, (O, d), or (d, O) if ``transposed``
    module: str  # path of the layer whose input is a function of token and position
    through: str | None  # name of the weight (d, n) of a linear layer directly before, such as an adapter's A
    transposed: bool
    positioned: bool  # ``True`` if a token's input depends on its position


def entrances_of(model: TextModel, uploaded: Tensors) -> list[Entrance]:
    """Find uploaded linear layers whose input depends on only one token and its position."""
    names = {id(p): name for name, p in model.named_parameters()}
    named = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
    weighted = {path: m for path, m in named.items() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    layers = {path: m for path, m in weighted.items() if not any(m.children())}
    # texts (3, 4) with one token in common, twice in the first
    size = model.words.num_embeddings
    a, b, c, d = (min(size - 1, size * k // 5) for k in (1, 2, 3, 4))
    tokens = torch.tensor([[a, b, c, b], [a, b, d, c], [d, b, c, a]]).to(model.words.weight.device)
    with torch.no_grad(), ExitStack() as stack:
        entered = stack.enter_context(entering(layers))
        left = stack.enter_context(leaving(layers))
        model(tokens)
    inputs = {call.name: call.inputs for call in entered}
    outputs = {id(call.output): call.name for call in left}
    found, seen = [], list[str]()
    for path, states in inputs.items():
        weight = names.get(id(layers[path].weight), "")
        if weight not in uploaded or not _of_one_token(states):
            continue
        before = outputs.get(id(states))
        own = before if before is not None and _of_one_token(inputs[before]) else path
        through = None if own == path else names[id(layers[own].weight)]
        own = next((other for other in seen if _same_inputs(inputs[other], inputs[own])), own)
        seen.append(own)
        positioned = not _same_inputs(inputs[own][0, _AT[0]], inputs[own][0, _AT[1]])
        found.append(Entrance(weight, own, through, not isinstance(layers[path], nn.Linear), positioned))
    return found


def _of_one_token(states: Tensor) -> bool:
    if states.dim() != 3 or states.shape[:2] != (3, _LENGTH):
        return False
    one, two, three = states[:, _AT[0]]
    return _same_inputs(one, two) and _same_inputs(one, three) and not _same_inputs(states[0, 0], one)


def _same_inputs(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool((one - two).norm() <= _SAME * one.norm().clamp_min(1e-12))


@dataclass(frozen=True, eq=False)
class View:
    """Gradient of a layer; each of its m rows is a weighted sum of the layer's inputs (n,) for the batch's tokens."""

    rows: Tensor  # float64
    module: str  # path of the layer whose input is a function of token and position
    through: Tensor | None  # (n, d) factor of that input; ``None``: n = d


def views_of(observation: Observation, entrances: Sequence[Entrance]) -> list[View]:
    """Return the gradients of ``entrances`` as views; those of layers with the same input are concatenated."""
    gradient = slopes(observation, [entrance.weight for entrance in entrances])
    direct: dict[str, list[Tensor]] = {}
    views = []
    for entrance in entrances:
        rows = gradient[entrance.weight]
        rows = (rows.T if entrance.transposed else rows).double()
        if not bool(rows.any()) or not bool(rows.isfinite().all()):
            continue
        if entrance.through is None:
            direct.setdefault(entrance.module, []).append(rows / rows.norm())
        else:
            views.append(View(rows, entrance.module, observation.sent.parameters[entrance.through].double()))
    return [View(torch.cat(parts), module, None) for module, parts in direct.items()] + views


@torch.no_grad()
def slopes(observation: Observation, names: Sequence[str]) -> Tensors:
    """Return the update of the parameters ``names`` as gradients, up to a factor, as far as the optimizer permits.

    Adam's first step moves each element by lr g / (abs(g) + 1e-8). This is solved for g, which is capped if rounding
    hides its size. Several steps of Adam are only divided by the learning rate.
    """
    plan = observation.plan
    if plan.shares == "gradient" or plan.optimizer == "sgd":
        found = as_gradient(observation)
        return {name: found[name] for name in names}
    steps = number_of_steps(observation.upload.num_examples, plan)
    updates, slopes = observation.update(), dict[str, Tensor]()
    for name in names:
        sent = observation.sent.parameters[name].double()
        slopes[name] = (decayed(sent, plan, steps) - sent - updates[name].double()) / plan.lr
        if steps == 1:
            step, stored = slopes[name], updates[name]
            halved = stored.is_floating_point() and bool((stored.bfloat16().to(stored.dtype) == stored).all())
            kind = torch.bfloat16 if halved else torch.float32
            rounding = _ULPS * torch.finfo(torch.float32).eps + torch.finfo(kind).eps * ((sent / plan.lr).abs() + 1)
            slopes[name] = step.sign() * _ADAM_EPS * step.abs() / (1 - step.abs()).maximum(rounding)
    return slopes


_FRAMED, _EACH = 16, 512  # tokens per dimension to estimate coordinates from, and tokens to estimate usual shares
_RIDGE = 1e-4  # share of the candidates' largest variance below which whitening stops
_PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # shares of all directions that are tried if an update's rows have full rank
_ROUNDING = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)  # shares of the largest singular value below which values may be rounding
_LEFT = 3  # least number of directions, next to an eighth of all, that have to be left out
_TRIMMED = 0.02  # share of candidates at either end that is left out of the usual shares
_OF_ENDS = 1.2  # factor by which trimming lowers the spread
_NEVER = 1e-10  # least share of a vector in or outside of some directions
_AT_ONCE = 1 << 24  # elements held at a time
_SHORTLIST = 1024  # tokens whose positions are compared one by one
_LIKE = 1e-2  # share of a token outside of the tokens before it above which that rest is compared
_MOST_CHANCE = 0.01  # largest chance of a rest's share at which a token counts as present next to similar ones
FALSE_SHARE, FALSE_PER_TEXT = 0.1, 0.5
"""Accepted mean number of false tokens: as a share of those found, and for each text."""


def few_false(expected: Tensor, texts: int) -> int:
    """Return how many of k ranked tokens to accept, so that few are false.

    ``expected``: (k,) expected number of false tokens among the first 1, 2, ..., k. At most the share ``FALSE_SHARE``
    of the accepted tokens, and ``FALSE_PER_TEXT`` for each of ``texts`` texts, may be false.
    """
    numbers = torch.arange(1, len(expected) + 1, device=expected.device)
    within = (expected <= (FALSE_SHARE * numbers).clamp_max(FALSE_PER_TEXT * texts)).nonzero()
    return int(within[-1]) + 1 if len(within) else 0


@dataclass(frozen=True, eq=False)
class Pairs:
    """Tokens inferred for one victim, and the evidence for each of them at each position."""

    tokens: Tensor  # (k,) tokens found, the surest first
    evidence: Tensor  # (k, L) minus the log probability of as much by chance; L is 1 without positions
    expected_false: float  # mean number of tokens among them by chance
    candidates: int  # number of tokens, or of pairs of token and position, that were compared
    alike: int = 0  # number of tokens that may be found only because they resemble others
    directions: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()


class EvidenceCandidates:
    """Inputs that each token of the vocabulary, at each position, gives to the first layers of the sent ``model``."""

    def __init__(self, model: TextModel, length: int, *, positioned: bool, rng: torch.Generator) -> None:
        self._model, self.length = model, length if positioned else 1
        self.size = model.words.num_embeddings
        self._order = torch.randperm(self.size, generator=rng)
        self._samples: dict[str, Tensor] = {}
        self._frames: dict[tuple[str, int], WhitenedFrame] = {}

    def of(self, tokens: Tensor, path: str) -> Tensor:
        texts = tokens[:, None].expand(-1, self.length).to(self._model.words.weight.device)
        return entering_layers(self._model, texts, [path])

    def parts(self, width: int) -> Iterator[Tensor]:
        yield from torch.split(torch.arange(self.size), max(1, _AT_ONCE // (self.length * width)))

    def sample(self, path: str) -> Tensor:
        """Return float64 inputs (m, L, d) of the layer ``path`` for m sampled tokens at each position."""
        if path not in self._samples:
            self._samples[path] = self.of(self._order[: min(_EACH, self.size // 2)], path).double()
        return self._samples[path]

    def spread(self, path: str) -> Tensor:
        """Return float64 inputs (m, d) of layer ``path`` for m tokens not in :meth:`sample`, to whiten inputs by."""
        tokens = self._order[min(_EACH, self.size // 2) :][: _FRAMED * self.sample(path).shape[-1]]
        parts = []
        for begin in range(self.length):
            some = tokens[begin :: self.length]
            if len(some):
                parts.append(self.of(some, path)[:, begin].double())
        return torch.cat(parts)

    def frame(self, view: View) -> "WhitenedFrame":
        key = (view.module, 0 if view.through is None else hash(view.through.sum().item()))
        if key not in self._frames:
            sample = self.spread(view.module)
            seen = sample if view.through is None else sample @ view.through.T
            values, directions = torch.linalg.eigh(seen.T @ seen / len(seen))
            own = directions / values.clamp_min(_RIDGE * float(values[-1])).sqrt()
            self._frames[key] = WhitenedFrame(view.module, own, own if view.through is None else view.through.T @ own)
        return self._frames[key]


@dataclass(frozen=True, eq=False)
class WhitenedFrame:
    """Linear coordinates in which the inputs of all tokens have equal variance in all directions."""

    path: str
    own: Tensor  # (n, n) map of an update's rows
    whole: Tensor  # (d, n) map of the inputs of ``path``


@dataclass(frozen=True, eq=False)
class _Basis:
    """The directions that one layer's gradient spans, for one victim."""

    frame: WhitenedFrame
    rows: Tensor  # (K, n) orthonormal in the frame, the leading ones first
    numbers: tuple[int, ...]  # numbers of leading rows that are tried, by _ROUNDING and _PARTS; 0 for none
    usual: Tensor  # (2, numbers, L) a candidate's usual share, and the degrees of freedom of its spread
    direct: bool  # ``True`` if no adapter is between input and layer
    best: Tensor  # (numbers, V) each token's evidence at its best position

    def evidence(self, states: Tensor, whole: Tensor) -> Tensor:
        """Return the evidence (R, n, L) that n tokens are at L positions, for R choices of leading directions.

        Evidence is minus the log of a bound on the probability that a random token has as large a share of its squared
        length in these directions. ``states``: (n, L, d) inputs of the layer. ``whole``: (n, L) squared lengths in
        ``frame``.
        """
        share = _shares(states @ (self.frame.whole @ self.rows.T).to(states), whole, self.numbers).double()
        usual, freedom = self.usual.to(share).unsqueeze(2)
        empty = torch.tensor(self.numbers, device=share.device)[:, None, None] == 0
        return _seldom(share, usual, freedom).masked_fill(empty, 0.0)


def _shares(along: Tensor, whole: Tensor, numbers: Sequence[int]) -> Tensor:
    summed = along.square().cumsum(-1)
    shares = [
        (summed[..., k - 1] / whole.clamp_min(1e-30)).clamp(0, 1) if k else torch.zeros_like(whole) for k in numbers
    ]
    return torch.stack(shares)


def _seldom(share: Tensor, usual: Tensor, freedom: Tensor) -> Tensor:
    # returns -log of a bound on the chance that a random vector has at least ``share`` of its energy in a subspace,
    # with mean ``usual`` and ``freedom`` degrees of freedom (Dasgupta, Gupta 2003)
    share = share.maximum(usual).clamp_max(1 - _NEVER)
    rest = (1 - usual) * ((1 - share) / (1 - usual)).log()
    return -0.5 * freedom * (usual * (share / usual).log() + rest)


def _basis(view: View, candidates: EvidenceCandidates) -> _Basis | None:
    frame, width = candidates.frame(view), view.rows.shape[1]
    _, strengths, directions = torch.linalg.svd(view.rows, full_matrices=False)
    ranks = [int((strengths > share * float(strengths[0])).sum()) for share in _ROUNDING]
    most = width - max(_LEFT, width // 8)
    numbers = tuple(k if 0 < k <= most else 0 for k in (*ranks, *(min(ranks[0], int(p * width)) for p in _PARTS)))
    if not any(numbers):
        return None
    # the first k rows span the first k directions
    rows = torch.linalg.qr((directions[: max(numbers)] @ frame.own).T)[0].T
    along = candidates.sample(view.module) @ frame.whole
    shares = _shares(along @ rows.T, along.square().sum(-1), numbers)
    best = torch.full((len(numbers), candidates.size), -1.0, dtype=torch.float64)
    cut = int(_TRIMMED * shares.shape[1])
    kept = shares.sort(1).values[:, cut : shares.shape[1] - cut]
    mean, variance = kept.mean(1).clamp(1e-9, 1 - 1e-9), kept.var(1).clamp_min(1e-18)
    freedom = 2 * (mean * (1 - mean) / (_OF_ENDS * variance) - 1)
    usual = torch.stack([mean, freedom.clamp(1.0, float(width))])
    return _Basis(frame, rows, numbers, usual, view.through is None, best)


@torch.no_grad()
def found_pairs(
    victims: Sequence[Sequence[View]], candidates: EvidenceCandidates, *, texts: int, most: int
) -> list[Pairs | None]:
    """Find each victim's tokens: those whose inputs lie more in the spans of its gradients than by chance.

    ``victims``: each victim's views, one layer's gradient each. Views of LoRA adapters' B are used instead if these
    find more tokens. ``None`` if all views have full rank. ``texts``: number of texts. ``most``: largest number of
    tokens.
    """
    bases = [[basis for view in views if (basis := _basis(view, candidates)) is not None] for views in victims]
    every = [basis for own in bases for basis in own]
    for path in dict.fromkeys(basis.frame.path for basis in every):
        for tokens in candidates.parts(candidates.sample(path).shape[-1]):
            states = candidates.of(tokens, path)  # (n, L, d)
            lengths: dict[int, Tensor] = {}
            for basis in (basis for basis in every if basis.frame.path == path):
                if id(basis.frame) not in lengths:
                    lengths[id(basis.frame)] = (states @ basis.frame.whole.to(states)).square().sum(-1)
                basis.best[:, tokens] = basis.evidence(states, lengths[id(basis.frame)]).amax(-1).cpu()
    found = []
    for own in bases:
        alike = [[basis for basis in own if basis.direct == direct] for direct in (True, False)]
        pairs = [_named(some, candidates, texts, most) for some in alike if some]
        found.append(max(pairs, key=lambda each: len(each.tokens), default=None))
    return found


def _named(bases: Sequence[_Basis], candidates: EvidenceCandidates, texts: int, most: int) -> Pairs:
    """Choose at most ``most`` tokens of one victim with more evidence than chance explains.

    Evidence is summed over ``bases``, the spans of layers' gradients. ``texts``: number of texts.
    """
    total, together = candidates.size * candidates.length, torch.stack([basis.best for basis in bases]).sum(0)
    views = (torch.tensor([basis.numbers for basis in bases]) > 0).sum(0)
    which = int((total * _chance_of(together, views[:, None]) < FALSE_PER_TEXT).sum(1).argmax())
    shortlist = together[which].topk(min(_SHORTLIST, candidates.size)).indices
    pairs = torch.zeros(len(shortlist), candidates.length, dtype=torch.float64)
    for basis in bases:
        states = candidates.of(shortlist, basis.frame.path).double()
        pairs += basis.evidence(states, (states @ basis.frame.whole).square().sum(-1))[which].cpu()
    highest, order = pairs.amax(1).sort(descending=True)
    expected = total * 2 * len(views) * _chance_of(highest, views[which])
    count = min(few_false(expected, texts), most)
    tokens, evidence = shortlist[order[:count]], pairs[order[:count]]
    return Pairs(
        tokens=tokens,
        evidence=evidence,
        expected_false=float(expected[count - 1]) if count else 0.0,
        candidates=total,
        alike=_alike(bases, which, tokens, evidence, candidates) if count else 0,
        directions=tuple(basis.numbers[which] for basis in bases),
        widths=tuple(len(basis.frame.own) for basis in bases),
    )


def _alike(
    bases: Sequence[_Basis], which: int, tokens: Tensor, evidence: Tensor, candidates: EvidenceCandidates
) -> int:
    """Count the ``tokens`` (k,), the surest first, that may be found only because they resemble earlier ones.

    Similar tokens' embeddings share directions; only the component outside the span of earlier tokens proves a token.
    ``bases``: spans of layers' gradients. ``which``: index of the used choice of leading directions. ``evidence``: (k,
    L) that each token is at each position.
    """
    place, left = evidence.argmax(1), torch.zeros(len(tokens), dtype=torch.float64)
    used = [basis for basis in bases if basis.numbers[which]]
    for basis in used:
        states = candidates.of(tokens, basis.frame.path).double()
        own = states[torch.arange(len(tokens)), place] @ basis.frame.whole  # (k, n)
        apart, sizes = torch.linalg.qr(own.T)
        new = sizes.diagonal().abs() > _LIKE * own.norm(dim=1)[: len(sizes)]
        share = (basis.rows[: basis.numbers[which]] @ apart).square().sum(0) * new
        usual, freedom = basis.usual[:, which, place][:, : len(share)]
        remaining = 1 - torch.arange(len(share)) / len(basis.frame.own)
        left[: len(share)] += _seldom(share, usual, (freedom * remaining).clamp_min(1.0)).cpu()
    return int((candidates.length * _chance_of(left, torch.full((len(tokens),), len(used))) > _MOST_CHANCE).sum())


def _chance_of(evidence: Tensor, views: Tensor) -> Tensor:
    """Return a bound on the chance that a random token's evidence, summed over ``views`` gradients, is as large."""
    term, total = torch.ones_like(evidence), torch.zeros_like(evidence)
    for number in range(int(views.max())):
        total = total + term * (number < views)
        term = term * evidence / (number + 1)
    return torch.where(views > 0, (-evidence).exp() * total, 1.0)
