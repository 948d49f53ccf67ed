"""Attacks on uploads of clients that fit trees, regressions or sums."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from fl_privacy.attacks import trees
from fl_privacy.attacks.fitted import LogisticOptimum, Moments, last_row, rows_alone, rows_between
from fl_privacy.auditing.clear_text.findings import Leak, leak_of
from fl_privacy.auditing.instrument.fitted import Fitted
from fl_privacy.auditing.scenario_problem import reason_of
from fl_privacy.auditing.scenario_scores import EXACT_ROW, MOST_SHOWN, TimeSpent
from fl_privacy.errors import UserError
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.files import shipped
from fl_privacy.measure.answer import Answer, Scenario, Shown
from fl_privacy.measure.counts import Counts
from fl_privacy.measure.intervals import binomial_tail, chance_of_upload, combined
from fl_privacy.measure.tables import pinned_rows
from fl_privacy.types.schema import TOLERANCE

MOST_CELLS, SWEEPS, VICTIMS = 3_000_000, 8, 20
"""Largest product of rows, features and trees of a search, its sweeps, and number of attacked rows of a client."""

DRAWN, MANY_ROWS = (9, 2), 500
"""Number of random guesses, whose best is the chance level, for a client with few and with over ``MANY_ROWS`` rows."""

SCENARIOS: Mapping[str, Scenario] = {
    name: Scenario(name=name, **fields) for name, fields in shipped(__file__, "scenarios.yaml")["fitted"].items()
}
"""Attack scenarios on fitted models by name."""

LINEAR = {"Ridge", "LinearRegression", "SGDRegressor"}  # scikit-learn's regressions of numbers


def _not_attacked(name: str, reason: str) -> Answer:
    return Answer(scenario=replace(SCENARIOS[name], uploads=""), kind="row", reason=reason)


@dataclass(eq=False)
class FittedUploads:
    """Messages of clients that fit trees (``exchanges``) or other models (``parameters``), by client.

    Both hold pairs: what the server sent, and the client's reply.
    """

    exchanges: dict[int, list[tuple[bytes, bytes]]] = field(default_factory=dict)
    parameters: dict[int, list[tuple[list[np.ndarray], list[np.ndarray]]]] = field(default_factory=dict)
    fits: dict[int, list[Fitted]] = field(default_factory=dict)
    problems: dict[str, int] = field(default_factory=dict)

    def note(
        self, client: int, sent: Mapping[str, np.ndarray], reply: Mapping[str, np.ndarray], fits: Sequence[Fitted]
    ) -> list[Leak]:
        models = {key: array.tobytes() for key, array in reply.items() if array.dtype == np.uint8 and array.ndim == 1}
        found: list[Leak] = []
        for key, model in models.items():
            if trees.is_model(model):
                before = sent[key].tobytes() if key in sent else b""
                self.exchanges.setdefault(client, []).append((before, model))
                self.fits.setdefault(client, []).extend(fits[-1:])
                leaks = attempt(lambda: _tree_leaks(trees.read_exchange(before, model), key))  # noqa: B023
                if isinstance(leaks, Failure):
                    self.problems[leaks.reason] = self.problems.get(leaks.reason, 0) + 1
                else:
                    found += leaks
        if fits and reply and not models and fits[-1].kind not in {"trees", "network"}:
            self.parameters.setdefault(client, []).append((list(sent.values()), list(reply.values())))
            self.fits.setdefault(client, []).append(fits[-1])
        return found

    def attack_all(self, *, clients: int, seed: int, seconds: float) -> Iterator[Answer]:
        """Attack at most ``clients`` clients, with an answer for each kind of uploads, or the reason of its failure."""
        attacks: dict[str, Callable[[], Answer]] = {}
        if self.exchanges:
            chosen, read = list(self.exchanges)[:clients], trees.read_exchange
            of_server = partial(_trees, self, chosen, lambda client: [read(*pair) for pair in self.exchanges[client]])
            attacks["trees"] = partial(of_server, seed=seed, seconds=seconds)
        if len(self.exchanges) > 1:
            attacks["site"] = partial(self._trees_of_others, clients, seed, seconds)
        kinds = {client: fits[-1].kind for client, fits in self.fits.items() if client in self.parameters}
        regressions = {"LogisticRegression", *LINEAR}
        for name, of_kind, attacked in (("logistic", regressions, _optima), ("sums", {"GaussianNB"}, _sums)):
            if chosen := [client for client, one in kinds.items() if one in of_kind][:clients]:
                attacks[name] = partial(attacked, self, chosen, seed)
        for name, attack in attacks.items():
            made = attempt(attack)
            if isinstance(made, Failure):
                site, failed = name == "site", f"the attack failed ({made.reason[:200]})"
                made = _not_attacked(name, reason_of(made) if site else failed)
                made = replace(made, observer="another_site" if site else "server")
            yield made

    def _trees_of_others(self, clients: int, seed: int, seconds: float) -> Answer:
        """Attack as the last client, which infers other clients' trees from the models that the server sends it.

        ``clients``: largest number of clients to attack. ``seconds``: time limit.
        """
        site, pairs = list(self.exchanges.items())[-1]
        others = [client for client in self.exchanges if client != site]
        rounds = [trees.read_others(sent, after, own) for (sent, own), (after, _) in pairwise(pairs)]
        given = next((one.sent for one in rounds if one.sent is not None), None)
        if given is not None and len(trees.read_model(pairs[-1][1]).trees) > len(given.trees):
            raise UserError("Clients reply one after another with whole models: a site sees the server's, as above.")
        divided = trees.divide_among_sites(rounds, len(others)) if rounds else ()
        uploaded = {
            c: [{t.digest for t in trees.read_model(reply).trees} for _, reply in self.exchanges[c]] for c in others
        }
        whose, right, total, exact = dict[int, list[trees.Exchange]](), 0, 0, list[str]()
        for one in divided:
            exact += [leak.what for leak in _tree_leaks(one[0], "")]
            owners = [{c for c in others for new in uploaded[c] if t.digest in new} for r in one for t in r.reply.trees]
            owner = next(iter(owners[0]))  # of the first tree, for scoring alone
            right, total = right + sum(owner in each for each in owners), total + len(owners)
            whose[owner] = list(one)
        if not whose:
            raise UserError(
                "A site first sees others' trees in the second round, but only one ran; run more by --rounds."
            )
        answer = _trees(self, list(whose)[:clients], whose.__getitem__, seed=seed, seconds=seconds, name="site")
        note = f"Of {total} new trees of {len(others)} other sites, {right} are divided to the site of its first tree"
        note += f" (by chance {total // len(others)})." if len(others) > 1 else ", the only other."
        return replace(answer, observer="another_site", notes=(note, *exact, *answer.notes))


def _tree_leaks(one: trees.Exchange, where: str) -> list[Leak]:
    own = trees.own_trees([one])
    found = [leak_of("thresholds", where, sum(map(len, trees.thresholds(own, one.reply.features))))]
    if own and not own[0].before:
        training, weight = trees.infer_training(own), one.reply.positive_weight
        first = trees.count_first_tree(own, one.reply.objective, training, positive_weight=weight)
        if first.whole:
            labels = np.array([leaf.labels for leaf in first.leaves if leaf.labels])
            single = sum(leaf.rows for leaf in first.leaves if leaf.labels and 0 in leaf.labels)
            said = f", {int(labels[:, 1].sum())} of them positive" if labels.size else ""
            said += f", {single} of them in regions of a single label, which is therefore known" if single else ""
            found.append(leak_of("regions", where, len(first.leaves), first.rows, said))
    return found


def _trees(
    kept: FittedUploads,
    clients: Sequence[int],
    seen: Callable[[int], Sequence[trees.Exchange]],
    *,
    seed: int,
    seconds: float,
    name: str = "trees",
) -> Answer:
    spent, shown, notes = TimeSpent(), list[Shown](), list[str]()
    chances, cells = list[float](), list[tuple[int, float, float]]()
    reason, rounds = "", 0
    exact = close = blind = total = 0
    for client in clients:
        if spent() > seconds:
            notes.append(f"No time was left of {seconds:.0f} seconds for further clients.")
            break
        fit = kept.fits.get(client, [])
        found = attempt(lambda: _reconstructed(seen(client), fit, seed))  # noqa: B023
        if isinstance(found, Failure):
            reason = reason_of(found)
            continue
        rounds = max(rounds, len(kept.exchanges[client]) - (name == "site"))
        if not fit:
            reason = "rows given to XGBoost are expected, to judge guesses, but none were seen; use xgboost.DMatrix"
            continue
        truth = np.column_stack([fit[-1].rows, fit[-1].labels])
        categories = [f for f in range(truth.shape[1]) if len(np.unique(truth[:, f])) <= 6]
        guesses = np.column_stack([found.rows, found.labels])
        scored = pinned_rows(truth, guesses, categories)
        others = [one[-1] for number, one in kept.fits.items() if number != client and one]
        rng, draws = np.random.default_rng(seed), range(DRAWN[len(truth) > MANY_ROWS])
        drawn = [pinned_rows(truth, _without(truth, others, rng), categories) for _ in draws]
        unseen, most = drawn[0], (1 + max(round(one.rows * len(truth)) for one in drawn)) / (1 + len(truth))
        same, pinned = _exact_rows(truth, guesses, scored.guess), round(scored.rows * len(truth))
        chances.append(binomial_tail(pinned, len(truth), most))
        exact, close = exact + same, close + pinned - same
        blind, total = blind + round(unseen.rows * len(truth)), total + len(truth)
        cells.append((len(truth), scored.cells, unseen.cells))
        shown += _shown(truth, guesses, scored.match, scored.right)
    if not cells:
        return _not_attacked(name, reason or "no tree was parsed")
    nothing, chance = total - exact - close, combined(chances)
    weights, *shares = zip(*cells, strict=True)
    ours, theirs = (100 * float(np.average(share, weights=weights)) for share in shares)
    notes.insert(
        0,
        f"A row counts as reconstructed if every feature is within {TOLERANCE} deviations (categories: equal) and its"
        f" label is right. {ours:.0f} % of single cells are right, compared with {theirs:.0f} % of guesses that never"
        " saw the trees (as many rows of another client, or the client's columns shuffled if there is no other).",
    )
    return Answer(
        scenario=replace(SCENARIOS[name], uploads=f"{rounds} round{'s' * (rounds != 1)} of trees"),
        kind="row",
        counts=Counts(exact=exact, recognizable=close, nothing=nothing, groups=len(cells), chance=chance),
        control=Counts(recognizable=blind, nothing=total - blind, groups=len(cells)),
        seconds=spent(),
        notes=tuple(notes),
        shown=sorted(shown, key=lambda one: not one.reconstructed)[:MOST_SHOWN],
    )


def _reconstructed(rounds: Sequence[trees.Exchange], fit: Sequence[Fitted], seed: int) -> trees.TreeReconstruction:
    own, stated = trees.own_trees(rounds), len(fit[-1].rows) if fit else 0
    different = len({tree.digest for one in own for tree in (*one.before, one.tree)})
    if stated * rounds[0].reply.features * different > MOST_CELLS:
        raise UserError(
            f"Rows times features times trees are expected to be at most {MOST_CELLS}, but there are"
            f" {stated} rows and {different} trees; call fl_privacy.attacks.trees.reconstruct_rows, which takes longer"
        )
    positives = round(float(np.mean(1 / (1 + np.exp(-own[0].base_margin)))) * stated) if own else 0
    return trees.reconstruct_rows(rounds, rows=stated, positives=positives, chains=1, sweeps=SWEEPS, seed=seed)


def _without(truth: np.ndarray, others: Sequence[Fitted], rng: np.random.Generator) -> np.ndarray:
    tables = [np.column_stack([one.rows, one.labels]) for one in others]
    own = _in_any_order(truth)
    pool = [table for table in tables if table.shape[1] == truth.shape[1] and _in_any_order(table) != own]
    if not pool:
        return np.stack([rng.permutation(column) for column in truth.T], 1)
    rows = np.concatenate(pool)
    return np.asarray(rows[rng.permutation(len(rows))[: len(truth)]])


def _in_any_order(table: np.ndarray) -> list[bytes]:
    return sorted(row.tobytes() for row in table)


def _exact_rows(truth: np.ndarray, guesses: np.ndarray, match: np.ndarray) -> int:
    here = np.flatnonzero(match >= 0)
    spread = np.nanmax(truth, 0) - np.nanmin(truth, 0)
    apart = np.abs(truth[here] - guesses[match[here]])
    return int((np.nan_to_num(apart) <= EXACT_ROW * spread).all(1).sum())


def _shown(truth: np.ndarray, guesses: np.ndarray, match: np.ndarray, right: np.ndarray) -> list[Shown]:
    low, spread = np.nanmin(truth, 0), np.maximum(np.nanmax(truth, 0) - np.nanmin(truth, 0), 1e-12)
    order = np.argsort(-right.sum(1), kind="stable")[:MOST_SHOWN]
    truth, guesses = (truth - low) / spread, (guesses - low) / spread
    return [
        Shown(original=truth[row].tolist(), guess=guesses[match[row]].tolist(), reconstructed=bool(right[row].all()))
        for row in order
        if match[row] >= 0
    ]


def _optima(kept: FittedUploads, clients: Sequence[int], seed: int) -> Answer:
    """Reconstruct rows of each client from its other rows and its upload; the control uses the sent model instead."""
    began, read, unseen, judged, residuals = time.perf_counter(), 0, 0, 0, []
    shown, chances = list[Shown](), list[float]()
    rng = np.random.default_rng(seed)
    for client in clients:
        fit = kept.fits[client][-1]
        sent, reply = kept.parameters[client][-1]
        optima = [_optimum(arrays, fit) for arrays in (reply, sent)]
        if optima[0] is None:
            continue
        labels = fit.labels if optima[0].linear else np.searchsorted(np.array(fit.classes), fit.labels)
        apart = optima[0].residuals(fit.rows, labels)  # of the optimum's equations, as a share of their terms
        weights = optima[0].weights / optima[0].inverse_penalty
        unmet = np.column_stack([apart.T @ fit.rows - weights, apart.sum(0)])
        terms = np.column_stack([np.abs(apart).T @ np.abs(fit.rows), np.abs(apart).sum(0)])
        residuals.append(float(np.abs(unmet).sum() / max(terms.sum(), 1e-300)))
        low, spread = fit.rows.min(0), np.maximum(np.ptp(fit.rows, axis=0), 1e-12)
        for row in map(int, rng.permutation(len(fit.rows))[:VICTIMS]):
            rest = np.arange(len(fit.rows)) != row
            guess, other = (_guess(each, fit.rows, labels, rest) for each in optima)
            made = [each is not None and np.abs(each - fit.rows[row]) <= EXACT_ROW * spread for each in (guess, other)]
            hits = [bool(np.all(each)) for each in made]
            read, unseen, judged = read + hits[0], unseen + hits[1], judged + 1
            chance = 1.0
            if guess is not None:  # the share of the client's rows that fit the guess as well
                apart = np.abs((fit.rows - guess) / spread).max(1)
                chance = chance_of_upload(-np.concatenate([apart[row : row + 1], np.delete(apart, row)])[None], 1)
            chances.append(chance)
            original, guessed = (None if v is None else ((v - low) / spread).tolist() for v in (fit.rows[row], guess))
            shown.append(Shown(original=original, guess=guessed, reconstructed=hits[0]))
    if not judged:
        reason = "weights and intercepts of the fitted model are expected, but the reply has other arrays; upload these"
        return _not_attacked("logistic", reason)
    left = float(np.median(residuals))
    note = (
        "The upload is the optimum of the client's loss, so weights are equations on its rows: sums of rows, weighted"
        " by what the model does not explain."
        if left < 1e-2
        else "The upload is not the optimum of the client's loss: the fit stopped before it or has another penalty. The"
        " equations of an optimum do not hold, which hides rows from this attack, but maybe not from others."
    )
    return Answer(
        scenario=SCENARIOS["logistic"],
        kind="row",
        counts=Counts(exact=read, nothing=judged - read, groups=judged, chance=combined(chances)),
        control=Counts(exact=unseen, nothing=judged - unseen, groups=judged),
        seconds=time.perf_counter() - began,
        notes=(f"{note} What is left of these equations is {left:.2g} of their terms.",),
        shown=sorted(shown, key=lambda one: not one.reconstructed)[:MOST_SHOWN],
    )


def _optimum(arrays: Sequence[np.ndarray], fit: Fitted) -> LogisticOptimum | None:
    classes, features = len(fit.classes), fit.rows.shape[1]
    linear, settings = fit.kind in LINEAR, fit.settings
    height = 1 if linear or classes == 2 else classes
    weights = [*_finite(arrays, (height, features)), *(_finite(arrays, (features,)) if linear else ())]
    intercepts = [*_finite(arrays, (height,)), *(_finite(arrays, ()) if linear else ())]
    if not weights or not intercepts:
        return None
    factor = 1 / float(settings.get("C", 1.0)) if not linear else float(settings.get("alpha", 1.0))
    factor *= len(fit.rows) if fit.kind == "SGDRegressor" else 1  # whose loss is a mean
    none = fit.kind == "LinearRegression" or settings.get("penalty", "l2") is None or not factor
    weight, intercept = weights[0].reshape(height, features), intercepts[0].reshape(height)
    inverse = np.inf if none else 1 / factor
    return LogisticOptimum(weights=weight, intercepts=intercept, inverse_penalty=inverse, linear=linear)


def _finite(arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> list[np.ndarray]:
    fitting = [array.astype(float) for array in arrays if array.shape == shape and array.dtype.kind in "fiub"]
    return [array for array in fitting if np.isfinite(array).all()]


def _guess(model: LogisticOptimum | None, rows: np.ndarray, labels: np.ndarray, rest: np.ndarray) -> np.ndarray | None:
    found = None if model is None else attempt(lambda: last_row(model, rows[rest], labels[rest]))
    return None if found is None or isinstance(found, Failure) else found[0]


def _sums(kept: FittedUploads, clients: Sequence[int], seed: int) -> Answer:
    began, exact, part, chances = time.perf_counter(), 0, 0, list[float]()
    for client in clients:
        fits = kept.fits[client]
        rounds = [_moments(reply, fit) for (_, reply), fit in zip(kept.parameters[client], fits, strict=False)]
        asked = _rows_between(rounds, fits)
        last = rounds[-1]
        asked += [(row, fits[-1].rows) for _, row in rows_alone(last)] if last is not None else []
        held = [(row, table) for row, table in asked if row is not None and _is_there(row, table)]
        chances += [min(1.0, len(table) * float(_near(row, table).mean(0).prod())) for row, table in held]
        chances += [1.0] * (len(asked) - len(held))  # with shuffled columns, an upper bound on each
        there = [row for row, _ in held]
        whole = sum(not np.isnan(row).any() for row in there)
        exact, part = exact + whole, part + len(there) - whole
    if not chances:
        single = all(len(kept.parameters[client]) < 2 for client in clients)
        reason = (
            "only one round ran, and --rounds gives more; means and variances of two rounds give each row that"
            " came or went between them exactly (fl_privacy.attacks.fitted.rows_between)"
            if single
            else "no row came or went between two rounds, and none is alone in its class; means and variances give"
            " such rows exactly (fl_privacy.attacks.fitted.rows_between)"
        )
        return _not_attacked("sums", reason)
    nothing = len(chances) - exact - part
    return Answer(
        scenario=SCENARIOS["sums"],
        kind="row",
        counts=Counts(exact=exact, recognizable=part, nothing=nothing, groups=len(chances), chance=combined(chances)),
        seconds=time.perf_counter() - began,
    )


def _rows_between(
    rounds: Sequence[Moments | None], fits: Sequence[Fitted]
) -> list[tuple[np.ndarray | None, np.ndarray]]:
    """Compute the rows that a client's data gained or lost between rounds, from the means and variances that it sent.

    Return pairs: the row, or ``None`` if it can't be computed, and the fitted table that contains it.
    """
    found: list[tuple[np.ndarray | None, np.ndarray]] = []
    for before, after, old, new in zip(rounds, rounds[1:], fits, fits[1:], strict=False):
        for one in rows_between(before, after) if before is not None and after is not None else ():
            if not one.change:
                found += [(one.rows[0], old.rows), (one.rows[1], new.rows)]
                continue
            table = new.rows if one.change > 0 else old.rows
            single = one.rows[0] if len(one.rows) else None
            found += [(single if k == 0 else None, table) for k in range(abs(one.change))]
    return found


_LEAST_SHARE = 0.5  # smallest share of known values in a row; a replaced row has only the changed ones


def _is_there(row: np.ndarray, table: np.ndarray) -> bool:
    return (~np.isnan(row)).mean() >= _LEAST_SHARE and bool(_near(row, table).all(1).any())


def _near(row: np.ndarray, table: np.ndarray) -> np.ndarray:
    spread = np.maximum(np.ptp(table, axis=0), 1e-12)
    return np.asarray((np.abs(table - row) <= EXACT_ROW * spread)[:, ~np.isnan(row)])


def _moments(arrays: Sequence[np.ndarray], fit: Fitted) -> Moments | None:
    shape = (len(fit.classes), fit.rows.shape[1])
    tables, counts = (_finite(arrays, each) for each in (shape, shape[:1]))
    whole = [array for array in counts if (array == np.round(array)).all() and array.tolist() != list(fit.classes)]
    if len(tables) < 2:
        return None
    return Moments(means=tables[0], variances=tables[1], counts=whole[0] if whole else None)
