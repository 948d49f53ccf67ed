"""Parts of gradient inversion that differ between images, texts and table rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fl_privacy.attacks.gradient_inversion.embeddings import WordEmbeddings, longest_text
from fl_privacy.attacks.gradient_inversion.settings import (
    ImageSource,
    Settings,
    Shape,
    Space,
    VictimContext,
    scaled_to_range,
)
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError, as_gradient
from fl_privacy.errors import UserError
from fl_privacy.models import TextModel
from fl_privacy.models.gradients import frozen_copy
from fl_privacy.models.gradients.hooks import leaving
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.types import Observation
from fl_privacy.types.film import Snapshot
from fl_privacy.types.modality import IMAGES, ROWS, TEXTS, Modality, modality_of
from fl_privacy.types.schema import Schema, schema_of

_ROUNDING = 2e-6  # share of the bias' gradient below which the rest of a category's column is rounding
_DRAWN = 256  # random rows from which the gradients of a class's rows are estimated
_LEAST, _RARE = 0.02, 1e-4  # least share of a category that may be present, and in a first guess


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is inferred about a table: the categories that occur, and each class's mean row of F encoded values."""

    present: Tensor  # (F,) ``False`` for categories that no row has
    shares: Tensor  # (K, F) share of each category and mean of each number, for each of K classes


def first_linear(model: nn.Module, width: int) -> str | None:
    """Return the path of the first layer if it is linear with a bias and takes rows (B, F); else ``None``."""
    for path, module in model.named_modules():
        if next(module.children(), None) is None and next(module.parameters(), None) is not None:
            sound = isinstance(module, nn.Linear) and module.in_features == width and module.bias is not None
            return path if sound else None
    return None


@lru_cache(maxsize=4)
def evidence_of(observation: Observation, schema: Schema, counts: tuple[float, ...]) -> Evidence | None:
    """Infer categories and means of columns from the first layer, if any. ``counts`` (K,): rows by class."""
    path = first_linear(observation.model, schema.width)
    gradient = as_gradient(observation)
    if path is None or not {f"{path}.weight", f"{path}.bias"} <= gradient.keys():
        return None
    weight, bias = (gradient[f"{path}.{name}"].detach().cpu().double() for name in ("weight", "bias"))
    if not bool(bias.any()):
        return None
    # Each row contributes the loss's gradient at the layer's output to the columns of its categories. In an untrained
    # network, these are similar for all rows of a class, so that the sums show how many rows have a category.
    shift, scale = schema.shift.double(), schema.scale.double()
    sums = weight * scale + bias[:, None] * shift
    large = weight.norm(dim=0) * scale + bias.norm() * shift.abs()
    present = sums.norm(dim=0) > _ROUNDING * large.clamp_min(_ROUNDING * bias.norm())
    present[schema.number_values] = True
    for own, real in zip(*schema.groups, strict=True):
        if not bool(present[own[real]].any()):
            present[own[real]] = True
    shares = _posterior(sums, _slopes_of_random_rows(observation, schema, path), schema, counts)
    return Evidence(present, _valid_means(shares, schema, present))


def _slopes_of_random_rows(observation: Observation, schema: Schema, path: str) -> Tensor:
    sent = observation.assumed()
    like = next(iter(sent.parameters.values()))
    model = frozen_copy(observation.model, sent, observation.plan, device=like.device, dtype=torch.float32).eval()
    rows, loss = schema.drawn(_DRAWN, torch.Generator().manual_seed(0)).to(like.device), observation.loss
    found: list[Tensor] = []
    with torch.enable_grad(), leaving({path: model.get_submodule(path)}) as calls:
        outputs = model(rows.requires_grad_())
        for label in range(observation.num_classes):
            answer = (loss or CROSS_ENTROPY)(outputs, torch.full((len(rows),), label, device=like.device))
            found.append(torch.autograd.grad(answer, calls[0].output, retain_graph=True)[0])
    return observation.plan.loss_scale * len(rows) * torch.stack(found).detach().cpu().double()


def _posterior(sums: Tensor, slopes: Tensor, schema: Schema, counts: Sequence[float]) -> Tensor:
    """Estimate the encoded mean row (K, F) of each of K classes: shares of categories, and means of numbers.

    ``sums`` (M, F): for each input column, the gradient at the layer's M outputs, summed over rows; assumed to be
    Gaussian. ``slopes`` (K, N, M): such gradients of N random rows of each class. ``counts`` (K,): rows of each class.
    """
    classes, size, usual = len(slopes), sum(counts), schema.usual.double()
    means = slopes.mean(1) / size
    spread = (slopes - slopes.mean(1, keepdim=True)).flatten(0, 1) / size
    noise = spread.T @ spread / len(spread) + 1e-12 * means.square().sum() * torch.eye(means.shape[1]).double()
    of_class = torch.tensor(counts, dtype=torch.float64).clamp_min(0.1)
    found = torch.empty(classes, sums.shape[1], dtype=torch.float64)
    root = torch.linalg.cholesky(noise + 1e-6 * noise.diagonal().mean() * torch.eye(len(noise)).double())
    white = torch.linalg.solve_triangular(root, torch.cat([means.T, sums], 1), upper=False)
    model, seen = white[:, :classes], white[:, classes:]
    categories = torch.ones(sums.shape[1], dtype=torch.bool)
    categories[schema.number_values] = False
    for place in range(sums.shape[1]):
        share = float(usual[place].clamp(0.005, 0.995)) if bool(categories[place]) else 1.0
        prior = of_class * (share if bool(categories[place]) else float(usual[place]))
        wide = of_class * share * (1.0 - share if bool(categories[place]) else 1.0)
        rows = max(1.0, share * size)
        precision = model.T @ model / rows + torch.diag(1 / wide)
        found[:, place] = torch.linalg.solve(precision, model.T @ seen[:, place] / rows + prior / wide)
    return (found / of_class[:, None]).float()


def _valid_means(shares: Tensor, schema: Schema, present: Tensor) -> Tensor:
    found = shares.clone()
    places, there = schema.groups
    if len(places):
        own = torch.where(there & present[places], shares[:, places].clamp(_LEAST, 1), 0.0)
        own = own / own.sum(-1, keepdim=True).clamp_min(1e-9)
        found[:, places[there]] = own[:, there]
    numbers, (low, high) = schema.number_values, schema.bounds
    means = (shares[:, numbers] - schema.shift[numbers]) / schema.scale[numbers]
    found[:, numbers] = means.clamp(-1, 1).maximum(low).minimum(high)
    return found


_FAR = -1e9  # logit that pads columns with fewer categories than the largest


@dataclass(frozen=True, kw_only=True, eq=False)
class TableRows(ImageSource):
    """Source of V victims' table rows (V, B, F): softmax of free variables over categories, and bounded numbers.

    ``bounded``: ``True`` keeps numbers between the schema's bounds by a sigmoid. ``counted``: ``True`` infers how often
    each category occurs, leaves absent ones out, and starts from the shares. ``spread``: standard deviation of first
    variables.
    """

    schema: Schema
    bounded: bool = True
    counted: bool = True
    spread: float = 1.0

    def start(self, context: VictimContext) -> Tensor:
        schema, numbers = self.schema, self.schema.number_values
        drawn = self.spread * torch.randn(tuple(context.shape), generator=context.generator)
        middle = self._middles(context)
        categories = torch.ones(schema.width, dtype=torch.bool)
        categories[numbers] = False
        drawn[..., categories] += middle[..., categories].clamp_min(_RARE).log()
        low, high = schema.bounds
        bounded = (low + high).isfinite() if self.bounded else torch.zeros_like(low, dtype=torch.bool)
        # so that the numbers themselves are normal: a column of rare large values does not start in its middle
        own = middle[..., numbers] + drawn[..., numbers]
        inside = ((own - low) / (high - low).clamp_min(1e-6)).clamp(0.01, 0.99).logit()
        drawn[..., numbers] = torch.where(bounded, inside, own)
        return drawn.flatten()

    def _middles(self, context: VictimContext) -> Tensor:
        found, labels = self._evidence(context), context.labels
        if found is None:
            return self.schema.usual
        if labels is None or labels.dim() != 1 or labels.is_floating_point():
            return found.shares.mean(0)
        return found.shares[labels.cpu()]

    def _evidence(self, context: VictimContext) -> Evidence | None:
        if not self.counted:
            return None
        classes, size = context.observation.num_classes, context.observation.upload.num_examples
        counts = [size / classes] * classes
        if context.labels is not None:
            rows = context.labels if context.labels.is_floating_point() else one_hot(context.labels.long(), classes)
            counts = rows.float().sum(0).tolist()
        return evidence_of(context.observation, self.schema, tuple(counts))

    def held(self, context: VictimContext) -> Tensor:
        found = self._evidence(context)
        return torch.ones(self.schema.width) if found is None else found.present.float()

    def images(self, variables: Tensor, held: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        return self.rows(variables.reshape(-1, *shape), held)

    def rows(self, free: Tensor, held: Tensor) -> Tensor:
        """Turn free variables (V, B, F) into encoded rows; ``held`` (V, F) is 0 for categories that no row has."""
        schema = self.schema
        places, there = (each.to(free.device) for each in schema.groups)
        found = free
        if len(places):
            logits = torch.where((there & (held[:, places] > 0))[:, None], free[..., places], _FAR)
            found = found.index_copy(-1, places[there], logits.softmax(-1).flatten(-2)[..., there.flatten()])
        standard = (found - schema.shift.to(free)) / schema.scale.to(free)
        numbers = schema.number_values.to(free.device)
        if not len(numbers):
            return standard
        own = free[..., numbers]
        if self.bounded:
            low, high = schema.bounds.to(free)
            own = torch.where((low + high).isfinite(), low + (high - low) * own.sigmoid(), own)
        return standard.index_copy(-1, numbers, own)


def costs(schema: Schema, cells: Tensor, others: Tensor) -> Tensor:
    """Count, for each pair of rows of ``cells`` (..., B, C) and ``others``, the cells that differ, (..., B, B)."""
    return ((cells[..., :, None, :] - others[..., None, :, :]).abs() > schema.tolerances.to(cells)).sum(-1).double()


def assigned(cost: Tensor) -> Tensor:
    """Return the column (B,) assigned to each row of ``cost`` (B, B), with the least total."""
    if len(cost) == 1:
        return torch.zeros(1, dtype=torch.long)
    try:
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415
    except ImportError as error:
        raise UserError("Matching rows needs scipy, which is not installed; run `pip install scipy`.") from error
    return torch.as_tensor(linear_sum_assignment(cost.numpy())[1])


@dataclass(frozen=True, eq=False)
class Pooled:
    """Consensus ``rows`` (B, F) of many attempts at a table, encoded as for the model, and each cell's certainty.

    ``certainty`` (B, C), in [0, 1]: for a category, 1 - entropy of the attempts / largest possible entropy; for a
    number, the share of attempts near the median.
    """

    rows: Tensor
    certainty: Tensor


def pool(schema: Schema, attempts: Tensor, losses: Tensor, labels: Tensor | None = None) -> Pooled:
    """Return the median of attempts, their rows reordered to match the best attempt (TabLeak, section 4.1).

    R ``attempts`` (R, B, F) have ``losses`` (R,); only rows of equal ``labels`` (R, B) are exchanged.
    """
    order = losses.argsort()
    attempts = attempts[order]
    cells = schema.cells(attempts)
    cost = costs(schema, cells[:1], cells)
    apart = torch.cdist(attempts[:1].double(), attempts.double(), p=1) / schema.width
    if labels is not None and labels.dim() == 2:
        own = labels[order]
        cost = cost + 2.0 * len(schema.columns) * (own[:1, :, None] != own[:, None, :])
    aligned = torch.stack([own[assigned(each)] for own, each in zip(attempts, cost + 0.1 * apart, strict=True)])
    raw = schema.raw(aligned.double())
    rows = schema.nearest(((raw.median(0).values - schema.shift.double()) / schema.scale.double()).float())
    return Pooled(rows, _certainty(schema, raw, aligned))


def _certainty(schema: Schema, raw: Tensor, aligned: Tensor) -> Tensor:
    found = raw.new_zeros(raw.shape[1], len(schema.columns))
    places, there = schema.groups
    if len(places):
        shares = torch.where(there, raw[..., places], 0.0).clamp_min(0).mean(0)
        shares = shares / shares.sum(-1, keepdim=True).clamp_min(1e-12)
        entropy = -(shares * shares.clamp_min(1e-12).log()).sum(-1)
        found[:, ~schema.numbers] = 1 - entropy / there.sum(-1).double().clamp_min(2).log()
    cells = schema.cells(aligned)[..., schema.numbers]
    near = (cells - cells.median(0).values).abs() <= schema.tolerances[schema.numbers]
    found[:, schema.numbers] = near.double().mean(0)
    return found.clamp(0, 1)


_PROXIES, _CONTRAST = 64, 0.25
"""Number of inputs that stand in for a client's, for each kind, and the standard deviation of their pixels."""


@dataclass(frozen=True, eq=False)
class Restarted:
    """Result of one attempt at a victim's examples: ``images`` (B, ...) and ``labels`` (B,) or (B, K)."""

    restart: int
    loss: float
    accepted: bool
    images: Tensor
    labels: Tensor
    history: tuple[float, ...]
    film: tuple[Snapshot, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search settings for one kind of examples: images, texts or rows.

    Attributes:
        adapted: (settings, observation) -> settings adapted to this kind.
        variables_of_one: (observation, all observations of its group) -> shape of the variables optimized for an
            example.
        input_of_one: (observation) -> shape of one example at the model's input.
        matched: (names, model) -> names of the tensors to compare.
        proxies: (model, shape, rng) -> random inputs in place of the client's.
        answer: (settings, attempts, chosen attempt) -> reconstructed examples, and their cells' certainty or ``None``.
    """

    adapted: Callable[[Settings, Observation], Settings] = lambda settings, observation: settings
    variables_of_one: Callable[[Observation, Sequence[Observation]], tuple[int, ...]] = lambda o, _: o.input_shape
    input_of_one: Callable[[Observation], tuple[int, ...]] = lambda observation: observation.input_shape
    trial: Callable[[Tensor], Tensor] = lambda drawn: drawn  # random numbers (..., *input) -> inputs
    matched: Callable[[Sequence[str], nn.Module], list[str]] = lambda names, _: list(names)
    proxies: Callable[[nn.Module, tuple[int, ...], torch.Generator], Tensor]
    corrects: bool = True  # ``True`` shrinks the model's mean output for proxies toward equal shares
    read: Callable[[Settings, Tensor], Tensor]  # (settings, result) -> examples to report
    answer: Callable[[Settings, Sequence[Restarted], Restarted], tuple[Tensor, Tensor | None]] = (
        lambda settings, attempts, chosen: (chosen.images, None)
    )
    elementwise_parts: bool = False  # ``True`` compares weights of linear layers a few victims at a time
    completed: bool = True  # ``True`` infers what is undisclosed of a client first
    filmed: bool = True
    varies: str = ""  # reason why nothing can be compiled, or empty


def search_of(model: object) -> Search:
    """Return the search settings for the kind of examples that ``model`` takes."""
    return SEARCHES[modality_of(model)]


def as_wide(labels: Tensor | None, longest: int) -> Tensor | None:
    """Pad next-token labels (B, L) to ``longest`` tokens; return other labels unchanged."""
    if labels is None or labels.dim() != 2 or labels.is_floating_point():
        return labels
    return F.pad(labels, (0, longest - labels.shape[1]), value=-100)


def _proxy_images(model: nn.Module, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    if len(shape) != 3:
        raise NotAttackableError(
            f"Images (C, H, W) are expected, but the model takes inputs of shape {shape}; give the columns of rows by"
            " a schema, or reshape other inputs to images of one channel in front of the model."
        )
    return torch.cat([torch.rand((_PROXIES, *shape), generator=rng), _natural_noise(shape, rng)])


def _natural_noise(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    height, width = shape[-2:]
    rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    amplitude = (rows.square() + columns.square()).clamp_min(1 / max(height, width) ** 2).rsqrt()
    gray = torch.randn((_PROXIES, 1, height, width), generator=rng)
    colored = gray + 0.3 * torch.randn((_PROXIES, *shape), generator=rng)
    waves: Tensor = torch.fft.irfft2(torch.fft.rfft2(colored) * amplitude, s=(height, width))
    return torch.clamp(0.5 + _CONTRAST * waves / waves.flatten(1).std(1)[:, None, None, None], 0, 1)


def _seeking_words(settings: Settings, observation: Observation) -> Settings:
    values = observation.assumed().parameters[_text_model(observation.model).word_weight]
    dtype = torch.float64 if settings.dtype == "float64" else torch.float32
    table = values.to(settings.device or values.device, dtype)
    source = WordEmbeddings(table=table, first=settings.start, reading=settings.reading, norm=settings.embedding_norm)
    return replace(settings, source=source, priors=(), projection="none", space=Space())


def _text_model(model: nn.Module) -> TextModel:
    assert isinstance(model, TextModel)
    return model


def _schema(model: nn.Module) -> Schema:
    schema = schema_of(model)
    assert schema is not None
    return schema


def _seeking_rows(settings: Settings, observation: Observation) -> Settings:
    rows = TableRows(schema=_schema(observation.model), bounded=settings.bounded, counted=settings.counted)
    return replace(settings, source=rows, priors=(), projection="none", space=Space())


def _answer_of_rows(
    settings: Settings, attempts: Sequence[Restarted], chosen: Restarted
) -> tuple[Tensor, Tensor | None]:
    assert isinstance(settings.source, TableRows)
    schema, finite = settings.source.schema, [a for a in attempts if math.isfinite(a.loss)]
    columns = zip(*((a.images, torch.tensor(a.loss), a.labels) for a in finite), strict=True)
    pooled = pool(schema, *map(torch.stack, columns))
    if settings.pooled and not chosen.accepted:
        return pooled.rows, pooled.certainty
    order = assigned(costs(schema, schema.cells(chosen.images), schema.cells(pooled.rows)))
    return schema.nearest(chosen.images), pooled.certainty[order]


SEARCHES: Mapping[Modality, Search] = {
    IMAGES: Search(
        proxies=_proxy_images,
        read=lambda settings, found: (
            found if settings.as_they_come else scaled_to_range(found, settings.into_range)
        ).float(),
    ),
    TEXTS: Search(
        adapted=_seeking_words,
        variables_of_one=lambda first, others: (longest_text(others), _text_model(first.model).words.embedding_dim),
        input_of_one=lambda first: (*first.input_shape, _text_model(first.model).words.embedding_dim + 1),
        trial=lambda drawn: torch.cat([drawn[..., :-1], torch.ones_like(drawn[..., :1])], -1),
        # variables are embeddings, whose own gradient cannot be formed
        matched=lambda names, model: [name for name in names if name != _text_model(model).word_weight],
        proxies=lambda model, shape, rng: torch.randint(
            _text_model(model).words.num_embeddings, (_PROXIES, *shape), generator=rng
        ),
        corrects=False,
        read=lambda settings, found: cast(WordEmbeddings, settings.source).read(found),
        elementwise_parts=True,
        completed=False,
        varies="texts are of different lengths",
    ),
    ROWS: Search(
        adapted=_seeking_rows,
        proxies=lambda model, shape, rng: _schema(model).drawn(2 * _PROXIES, rng),
        read=lambda settings, found: found.float(),
        answer=_answer_of_rows,
        filmed=False,
    ),
}
