"""Find the likeliest table rows given the updates, the defense and public rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fl_privacy.attacks.attack import Report, even_share, part_of, timely
from fl_privacy.attacks.gradient_inversion.evident_defense import undo_evident_defenses
from fl_privacy.attacks.gradient_inversion.grouping import Group, Groups, failed
from fl_privacy.attacks.gradient_inversion.labels import policy_for
from fl_privacy.attacks.gradient_inversion.objectives import L2
from fl_privacy.attacks.gradient_inversion.preparation import Prepared, PreparedVictim, prepare
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.attacks.gradient_inversion.targets import NotAttackableError
from fl_privacy.attacks.likelihood.attack import Guesser, Likelihood, likelihood_of_victims, sentences
from fl_privacy.attacks.likelihood.channel import UNLIKELY
from fl_privacy.models.gradients import differentiable_twice
from fl_privacy.progress import Progress, counted, no_progress
from fl_privacy.rng import cpu_threads, derive_generator
from fl_privacy.types import Batch, Observation, Reconstruction, Tensors
from fl_privacy.types.schema import Schema, schema_of

MEMBER = "maximum a posteriori"
_WORTH = 3  # guesses that take the time of one evaluation of loss and gradient
_STARTS, _LAST = 6, 2  # parallel searches, at first and in the second half
_BEGINNINGS = 1000  # public batches that are compared for the starts
_WHOLE = 48  # public rows that are tried instead of a whole one
_TOGETHER = 10  # largest number of columns that are changed at once
_MOST_CLASSES = 16  # classes that are tried for a row
_HOT, _COLD = 2.0, 0.6  # first temperature of the search, in nats, and share of it after which it is zero
_SCALE = 0.3, 0.03  # first and last ``doubt`` of :meth:`Channel.loss`
_IMPOSSIBLE = 1e30  # loss of guesses whose upload is not finite
_ELEMENTS = 1 << 19  # elements of uploads that are guessed at a time, few enough for a cache
_CODES = 32  # most codes of a column: its commonest categories and one for the rest, or intervals of a number
_COUNT, _TRUST = 0.5, 4.0  # number added to each count, and weight, in rows, of a column's own shares
_LARGEST_TREE = 4096  # most codes of all columns together for dependencies between columns
_FEWEST, _IMAGINED = 50, 2000  # fewest public rows, and rows drawn by the schema without them
_DRAWN = 12  # public values of a number that are tried at a time
_STEPS = (0.1, 0.4, 1.2, 4.0)  # steps of a number from its present value, in tolerances


@dataclass(frozen=True, eq=False)
class RowPrior:
    """Tree-shaped distribution of rows (Chow and Liu 1968); the class is the last of the D columns."""

    schema: Schema
    edges: Tensor  # (numbers, E) upper ends of the numbers' intervals, infinite as padding
    codes: Tensor  # (G, L) codes of the columns' categories
    parents: Tensor  # (D,) column on which each depends; the root on itself
    log_shares: Tensor  # (D, Q, Q) log probability of a column's code (last) given its parent's

    def surprise(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log density of each of ``rows`` with its label."""
        found = _coded(self.schema, self.edges, self.codes, rows, labels)
        columns = torch.arange(found.shape[-1], device=found.device)
        return -self.log_shares[columns, found[..., self.parents], found].sum(-1)


def _coded(schema: Schema, edges: Tensor, codes: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    places, there = (each.to(rows.device) for each in schema.groups)
    numbers = rows[..., schema.number_values.to(rows.device)]
    found = torch.empty((*labels.shape, len(schema.columns) + 1), dtype=torch.long, device=rows.device)
    which = schema.numbers.to(rows.device)
    found[..., :-1][..., which] = (numbers[..., None] > edges).sum(-1)
    if len(places):
        chosen = schema.raw(rows)[..., places].masked_fill(~there, -torch.inf).argmax(-1)
        found[..., :-1][..., ~which] = codes[torch.arange(len(places), device=rows.device), chosen]
    found[..., -1] = labels.clamp(0, _CODES - 1)
    return found


@lru_cache(maxsize=2)
def learn_rows(schema: Schema, rows: Tensor, labels: Tensor) -> RowPrior:
    """Learn the distribution of public rows (N, F) with labels (N,)."""
    numbers = rows[:, schema.number_values.to(rows.device)]
    ends = torch.linspace(0, 1, _CODES // 2 + 1, device=rows.device)[1:-1]
    edges = torch.quantile(numbers, ends, dim=0).mT.contiguous()
    edges[:, 1:][edges.diff(dim=1) == 0] = torch.inf
    edges = edges.sort(1).values
    places, there = (each.to(rows.device) for each in schema.groups)
    counts = torch.where(there, schema.raw(rows)[:, places].sum(0), -1.0)
    codes = counts.argsort(1, descending=True).argsort(1).clamp(max=_CODES - 1)
    coded = _coded(schema, edges, codes, rows, labels)
    widest = int(coded.max()) + 1
    hot = one_hot(coded, widest).to(rows)  # (N, D, Q)
    columns, shares = hot.shape[1], (hot.sum(0) + _COUNT) / (len(rows) + _COUNT * widest)
    parents = torch.arange(columns, device=rows.device)
    if columns * widest <= _LARGEST_TREE:
        together = (hot.flatten(1).mT @ hot.flatten(1)).view(columns, widest, columns, widest).transpose(1, 2)
        parents = _parents(together / len(rows), shares, len(rows))
    given = torch.einsum("ndp,ndq->dpq", hot[:, parents], hot)
    smoothed = (given + _TRUST * shares[:, None]) / (given.sum(2, keepdim=True) + _TRUST)
    root = parents == torch.arange(columns, device=rows.device)
    smoothed = torch.where(root[:, None, None], shares[:, None].expand_as(smoothed), smoothed)
    # the values of an interval share its probability
    found, where = smoothed.log(), schema.numbers.nonzero().flatten().tolist()
    for row, column in enumerate(where):
        inside = (torch.unique(numbers[:, row])[:, None] > edges[row]).sum(1).bincount(minlength=widest)
        found[column] -= inside.clamp_min(1).log()
    return RowPrior(schema, edges, codes, parents, found)


def _parents(joint: Tensor, shares: Tensor, rows: int) -> Tensor:
    """Return the parent of each of D columns (D,) in the tree with the most mutual information (Chow and Liu 1968).

    The root is its own parent. ``joint``: (D, D, Q, Q) and ``shares``: (D, Q) probabilities of Q codes. ``rows``:
    number of rows.
    """
    apart = shares[:, None, :, None] * shares[None, :, None]
    information = (joint * (joint.clamp_min(1e-12) / apart).log()).sum((2, 3))
    live = (joint > 0).flatten(2).sum(2)
    information = information - 0.5 * live / rows  # of independent columns, by chance
    parents = torch.arange(len(information), device=joint.device)
    best, from_column = information[-1].clone(), torch.full_like(parents, len(parents) - 1)
    best[-1] = -torch.inf
    for _ in range(len(parents) - 1):
        column = int(best.argmax())
        parents[column] = from_column[column]
        nearer = (information[column] > best) & best.isfinite()
        best, from_column = torch.where(nearer, information[column], best), from_column.masked_fill(nearer, column)
        best[column] = -torch.inf
    return parents


@dataclass(frozen=True, eq=False)
class RowMoves:
    """P possible changes of a row of F encoded values; each changes one column."""

    prior: RowPrior
    rows: Tensor  # (N, F) public rows
    labels: Tensor  # (N,)
    mask: Tensor  # (P, F) entries that a change replaces
    values: Tensor  # (P, F) their new values; :meth:`tried` draws those of numbers anew
    column: Tensor  # (P,) column of each change

    def tried(self, row: Tensor, rng: torch.Generator) -> Tensor:
        """Return changed rows (S, P, F): each of P changes, applied to the present ``row`` (S, F) of each search."""
        schema, searches = self.prior.schema, len(row)
        values, at = self.values.expand(searches, -1, -1), schema.number_values.to(row.device)
        if len(at):
            drawn = torch.randint(len(self.rows), (_DRAWN, len(at)), generator=rng).to(row.device)
            public = self.rows[drawn, at].mT.expand(searches, -1, -1)
            steps = torch.tensor([sign * step for step in _STEPS for sign in (-1, 1)]).to(row)
            shift, scale = (each.to(row)[at][:, None] for each in (schema.shift, schema.scale))
            unit = schema.tolerances[schema.numbers].to(row)[:, None] / scale
            digits = torch.tensor([[10.0**column.decimals] for column in schema.columns if column.is_number]).to(row)
            low, high = schema.bounds.to(row)[..., None]
            near = (row[:, at][..., None] + unit * steps).maximum(low).minimum(high)
            near = (((near * scale + shift) * digits).round() / digits - shift) / scale
            own = torch.cat([public, near], 2).flatten(1)
            kept = self.values[: len(self.values) - own.shape[1]].expand(searches, -1, -1)
            values = torch.cat([kept, own[..., None].expand(-1, -1, schema.width)], 1)
        return torch.where(self.mask, values, row[:, None])


def row_moves(prepared: Prepared, observation: Observation) -> RowMoves:
    """Build the changes of cells that a search tries, from public rows or, if these are few, rows drawn at random."""
    schema, known = schema_of(observation.model), observation.knowledge
    assert schema is not None
    rows, labels = known.public_images, known.public_labels
    if rows is None or labels is None or len(rows) < _FEWEST or labels.is_floating_point():
        rng = torch.Generator().manual_seed(0)
        rows = schema.drawn(_IMAGINED, rng)
        labels = torch.randint(observation.num_classes, (len(rows),), generator=rng)
    like = next(prepared.observer.parameters())
    rows, labels = rows.to(like), labels.to(like.device)
    places, there = (each.to(like.device) for each in schema.groups)
    columns, numbers = torch.arange(len(schema.columns), device=like.device), schema.numbers.to(like.device)
    whose, category = there.nonzero(as_tuple=True)
    at = schema.number_values.to(like.device).repeat_interleave(_DRAWN + 2 * len(_STEPS))
    mask = like.new_zeros(len(whose) + len(at), schema.width, dtype=torch.bool)
    values, begun = like.new_zeros(mask.shape), torch.arange(len(mask), device=like.device)
    mask[begun[: len(whose), None], places[whose]] = True
    values[begun[: len(whose)], places[whose, category]] = 1
    mask[begun[len(whose) :], at] = True
    column = torch.cat([columns[~numbers][whose], columns[numbers].repeat_interleave(_DRAWN + 2 * len(_STEPS))])
    encoded = (values - schema.shift.to(like)) / schema.scale.to(like)
    return RowMoves(learn_rows(schema, rows, labels), rows, labels, mask, encoded, column)


@dataclass(eq=False)
class RowSearch:
    """S parallel searches for one victim's rows (S, B, F) and labels (S, B), which change one row at a time."""

    likelihood: Likelihood
    moves: RowMoves
    rows: Tensor
    labels: Tensor
    classes: Sequence[int]  # labels that are tried; empty if they are known
    rng: torch.Generator
    additive: bool = False  # ``True`` if the upload is the mean of its rows' uploads
    doubt: float = _SCALE[0]  # relative error of :meth:`Channel.loss`
    losses: Tensor = field(init=False)  # (S,) negative log posterior density

    def __post_init__(self) -> None:
        self.losses = self.of_whole(self.rows, self.labels)

    def keep(self, number: int) -> None:
        best = self.losses.argsort()[:number]
        self.rows, self.labels, self.losses = self.rows[best], self.labels[best], self.losses[best]

    def of_whole(self, rows: Tensor, labels: Tensor) -> Tensor:
        surprise = self.moves.prior.surprise(rows, labels).sum(1)
        return self._losses(surprise, lambda guesser, some: guesser(rows[some], labels[some]))

    def of_one(self, place: int, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the loss (S, P) of each search s if ``rows[s, p]``, with its label, replaces the row at ``place``."""
        (searches, number), size, prior = labels.shape, self.labels.shape[1], self.moves.prior
        if not self.additive or size == 1:
            whole, own = (each[:, None].repeat_interleave(number, 1) for each in (self.rows, self.labels))
            whole[:, :, place], own[:, :, place] = rows, labels
            return self.of_whole(whole.flatten(0, 1), own.flatten(0, 1)).view(searches, number)
        others = [k for k in range(size) if k != place]
        kept = self.rows[:, others], self.labels[:, others]
        surprise = prior.surprise(*kept).sum(1, keepdim=True) + prior.surprise(rows, labels)
        rest = {id(guesser): guesser(*kept) for guesser, _ in self.likelihood.states}
        each, own = rows.flatten(0, 1)[:, None], labels.flatten()[:, None]

        def uploads(guesser: Guesser, some: Tensor) -> Tensors:
            alone = guesser(each[some], own[some])
            return {n: rest[id(guesser)][n][some // number].lerp(value, 1 / size) for n, value in alone.items()}

        return self._losses(surprise.flatten(), uploads).view(searches, number)

    def _losses(self, surprise: Tensor, uploads: Callable[[Guesser, Tensor], Tensors]) -> Tensor:
        elements = sum(value.shape[1] for value in self.likelihood.states[0][1][0].observed.values())
        found = []
        for some in torch.split(torch.arange(len(surprise), device=surprise.device), max(1, _ELEMENTS // elements)):
            loss = surprise[some]
            for guesser, channels in self.likelihood.states:
                guessed = uploads(guesser, some)
                loss = loss + torch.stack([one.loss(guessed, doubt=self.doubt) for one in channels]).sum(0)
            found.append(loss)
        return torch.cat(found).nan_to_num(_IMPOSSIBLE, _IMPOSSIBLE, _IMPOSSIBLE)

    def _drawn(self, losses: Tensor, temperature: float) -> Tensor:
        rand = torch.rand(losses.shape, generator=self.rng).clamp(1e-9, 1 - 1e-6).to(losses)
        return self.losses.view(-1, *[1] * (losses.dim() - 1)) - losses - temperature * (-rand.log()).log()

    def change(self, place: int, temperature: float) -> None:
        """Propose changes of the row at ``place`` in each search: of cells, its class or the whole row.

        Sample one, or none, with probabilities proportional to exp(-loss / ``temperature``).
        """
        moves, own, label = self.moves, self.rows[:, place], self.labels[:, place]
        searches, at = len(own), torch.arange(len(own), device=own.device)
        changed, column = moves.tried(own, self.rng), moves.column.expand(searches, -1)
        classes = torch.tensor(self.classes, device=own.device, dtype=label.dtype)
        public = torch.randint(len(moves.labels), (_WHOLE,), generator=self.rng).to(own.device)
        others = moves.labels[public].to(label).expand(searches, -1) if self.classes else label[:, None]
        as_many = own[:, None].expand(-1, len(classes), -1)
        found = torch.cat([changed, moves.rows[public].expand(searches, -1, -1), as_many], 1)
        same = label[:, None].expand(-1, len(moves.column))
        labels = torch.cat([same, others.expand(-1, _WHOLE), classes.expand(searches, -1)], 1)
        losses = self.of_one(place, found, labels)
        gains = self._drawn(losses, temperature)
        # the best changes of single columns, together
        single = gains[:, : len(moves.column)]
        best = single.new_full((searches, int(column.max()) + 1), -torch.inf)
        best, order = best.scatter_reduce(1, column, single, "amax").sort(1, descending=True)
        best, order = best[:, :_TOGETHER, None], order[:, :_TOGETHER, None]
        which = ((single[:, None] == best) & (column[:, None] == order)).int().argmax(2)
        together = own[:, None] + (changed[at[:, None], which] - own[:, None]).cumsum(1)
        joint = self.of_one(place, together, same[:, :1].expand(-1, together.shape[1]))
        found, labels = torch.cat([found, together], 1), torch.cat([labels, same[:, :1].expand(joint.shape)], 1)
        losses, gains = torch.cat([losses, joint], 1), torch.cat([gains, self._drawn(joint, temperature)], 1)
        gain, chosen = gains.max(1)
        take = gain > self._drawn(self.losses, temperature)
        self.rows[:, place] = torch.where(take[:, None], found[at, chosen], own)
        self.labels[:, place] = torch.where(take, labels[at, chosen], label)
        self.losses = torch.where(take, losses[at, chosen], self.losses)

    def certainty(self) -> Tensor:
        """Return the probability (B, C) of each cell's value relative to the others tried, for a single search."""
        schema, found = self.moves.prior.schema, []
        for place in range(self.labels.shape[1]):
            tried = self.moves.tried(self.rows[:, place], self.rng)
            losses = self.of_one(place, tried, self.labels[:, place, None].expand(-1, tried.shape[1]))
            apart = (schema.cells(tried[0]) - schema.cells(self.rows[0, place])).abs() > schema.tolerances
            column = self.moves.column.cpu()
            other = apart.gather(1, column[:, None])[:, 0] * (self.losses - losses[0]).cpu().exp()
            found.append(1 / (1 + torch.zeros(len(schema.columns)).index_add(0, column, other)))
        return torch.stack(found)


@dataclass(frozen=True, kw_only=True)
class LikeliestRows:
    """Attack that finds the rows with the largest posterior density, from all updates and a prior of rows.

    The likelihood follows from the defense, known or inferred from the update
    (:mod:`fl_privacy.attacks.likelihood.channel`), jointly over all updates of the same rows. Searches start from
    public rows or, if these are few, rows drawn by the schema. The prior, a tree of dependent columns, is learned from
    the same rows. Searches change cells, classes and whole rows, at a falling temperature.
    """

    evaluations: int = 4800  # evaluations of loss and gradient for each victim, which limit the time
    device: str | None = None  # ``None``: that of the sent model's values

    def __call__(
        self,
        observations: Sequence[Observation],
        *,
        seed: int,
        progress: Progress = no_progress,
        starts: Sequence[Batch | None] = (),
    ) -> list[Reconstruction]:
        groups = Groups(observations, progress=progress, see=undo_evident_defenses)
        for group in groups:
            with groups.attempt(group) as report:
                groups.results |= self._attack(group, seed, report, dict(enumerate(starts)))
        return groups.reconstructions()

    def _attack(
        self, group: Group, seed: int, report: Report, starts: Mapping[int, Batch | None]
    ) -> dict[int, Reconstruction]:
        parts = group.first.knowledge.defense
        if not parts or any(isinstance(part.effect, UNLIKELY) for part in parts):
            raise NotAttackableError("A defense with a known likelihood is expected, but got none; use attack=tableak.")
        with cpu_threads(1):
            settings = Settings(objective=L2(), compile="off", labels=policy_for(group.first), device=self.device)
            prepared = prepare(settings, group, seed)
        results = {p: failed(group.observations[p], why) for p, why in prepared.failures.items()}
        moves, victims = row_moves(prepared, group.first), prepared.victims
        for done, victim in enumerate(counted(MEMBER, victims)):
            shown = part_of(report, done / len(victims), (done + 1) / len(victims))
            with even_share(len(victims) - done), differentiable_twice(), torch.no_grad():
                search = begin_search(prepared, victim, moves, starts.get(victim.position))
                results[victim.position] = self._searched(search, victim, shown)
        return results

    def _searched(self, search: RowSearch, victim: PreparedVictim, report: Report) -> Reconstruction:
        size, each = search.labels.shape[1], len(search.moves.column) + _WHOLE + len(search.classes) + _TOGETHER
        work = _WORTH * self.evaluations * (size if search.additive else 1)
        of_sweep = each * size * (_STARTS + _LAST) / 2 * sum(len(channels) for _, channels in search.likelihood.states)
        sweeps, history = max(2, round(work / of_sweep)), []
        for number in timely(range(sweeps)):
            share = number / sweeps
            search.doubt = _SCALE[0] * (_SCALE[1] / _SCALE[0]) ** share
            search.losses = search.of_whole(search.rows, search.labels)
            if number == sweeps // 2:
                search.keep(_LAST)
            for place in torch.randperm(size, generator=search.rng).tolist():
                search.change(place, _HOT * max(0.0, 1 - share / _COLD))
            history.append(float(search.losses.min()))
            report((number + 1) / sweeps)
        search.keep(1)
        return _answer(search, victim, history)


def begin_search(prepared: Prepared, victim: PreparedVictim, moves: RowMoves, start: Batch | None) -> RowSearch:
    """Begin searches at the public rows of largest likelihood and, if given, at ``start``; ``moves``: changes to try.

    ``NotAttackableError`` if the likelihood of the updates is unknown.
    """
    likelihood, size = likelihood_of_victims(prepared, [victim]), prepared.shape[0]
    if not all(one.informative for _, channels in likelihood.states for one in channels):
        raise NotAttackableError("A defense with a known likelihood is expected, but got none; use attack=tableak.")
    observation, labels, classes = victim.observation, victim.labels, victim.observation.num_classes
    rng = derive_generator(prepared.seed, MEMBER, str(observation.id))
    if labels is not None and labels.dim() == 2:
        labels = labels.argmax(1)
    drawn = torch.randint(len(moves.labels), (_BEGINNINGS, size), generator=rng).to(moves.labels.device)
    rows, own = moves.rows[drawn], moves.labels[drawn]
    known = labels is not None and (victim.label_source == "known" or classes > _MOST_CLASSES)
    if labels is not None and known:
        own = labels.repeat(len(drawn), 1)
    additive = _is_additive(likelihood, rows[:2], own[:2])
    search = RowSearch(likelihood, moves, rows, own, () if known else range(min(classes, _MOST_CLASSES)), rng, additive)
    search.keep(_STARTS)
    if start is not None and start.labels.dim() == 1 and start.inputs.shape == rows.shape[1:]:
        search.rows[-1] = moves.prior.schema.nearest(start.inputs).to(rows)
        search.labels[-1] = own[0] if known else start.labels.to(own)
    return search


def _is_additive(likelihood: Likelihood, inputs: Tensor, labels: Tensor) -> bool:
    for guesser, _ in likelihood.states if labels.shape[1] > 1 else ():
        whole, each = guesser(inputs, labels), guesser(inputs.flatten(0, 1)[:, None], labels.flatten()[:, None])
        for name, value in whole.items():
            mean = each[name].reshape(*labels.shape, *value.shape[1:]).mean(1)
            if not float((mean - value).norm()) <= 1e-4 * float(value.norm()):
                return False
    return True


def _answer(search: RowSearch, victim: PreparedVictim, history: Sequence[float]) -> Reconstruction:
    if not (loss := float(search.losses[0])) < _IMPOSSIBLE:
        return failed(victim.observation, "A finite likelihood is expected, but got none; check the update.")
    return Reconstruction(
        id=victim.observation.id,
        batch=Batch(search.moves.prior.schema.nearest(search.rows[0].float().cpu()), search.labels[0].cpu()),
        loss=loss,
        history=tuple(history),
        label_source=victim.label_source if victim.label_source == "known" else "inferred",
        countermeasures=sentences(search.likelihood, "rows", same="rows"),
        member=MEMBER,
        cells_certain=search.certainty(),
    )
