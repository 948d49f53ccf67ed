"""How many cells of table rows behind a defense the best attacker with public rows is expected to reconstruct.

    python experiments/row_bound.py --draws 24 --steps 20 --evaluations 0 --out experiments/rows/row_bound
    python experiments/row_bound.py --defense noise --batch 1 --draws 96 --out experiments/rows/row_bound

The uploads and the attacker of ``row_noise.py``. The posterior (likelihood of the update under the known defense, and
the attack's prior of public rows) is sampled twice: by sequential Monte Carlo from the prior, and by Markov chains from
the client's rows, which no attacker knows. The best answer is each cell's likeliest value. A row for each victim:

``bound``, ``bound_of_truth``: share of the best answer's cells that the posterior expects to be right, by the draws of
either kind; the best answer to one half of the draws is held against the other half. ``gap``: difference of the two
kinds' mean negative log densities, in nats: near 0 if the draws agree. ``typical``: that of the draws, less that of the
client's rows: near 0 on average if the prior suits them. ``mode``: share of cells of the best answer to the draws from
the prior that are right. ``mode_of_truth``: the same of the other draws; no attacker reaches it. ``cells``, ``ahead``:
share of right cells of the attack's answer, and by how many nats its posterior density exceeds that of the client's
rows; not with ``--evaluations 0``. ``usual``: share of the usual row. ``control``: that or the 95 % quantile of random
public rows.

``--doubt`` is the relative error allowed for the largest magnitude of each rounded tensor, which rounding leaves exact;
the attack ends at 0.03. The bound holds for attackers that use it no more exactly. Rows that are there are not computed
again.
"""

import argparse
import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from row_file import RowFile, takes_rows
from row_noise import ahead, observed, right
from torch import Tensor

from fl_privacy.attacks.gradient_inversion.grouping import Groups
from fl_privacy.attacks.gradient_inversion.objectives import L2
from fl_privacy.attacks.gradient_inversion.preparation import prepare
from fl_privacy.attacks.gradient_inversion.settings import Settings
from fl_privacy.attacks.likelihood.rows import LikeliestRows, RowSearch, _coded, begin_search, row_moves
from fl_privacy.measure.tables import control_cells, right_cells, usual_row
from fl_privacy.progress import no_progress
from fl_privacy.types import Batch, Observation
from fl_privacy.types.schema import Schema, schema_of

TRIED = 9  # values of a cell that are drawn at a time
HOT = 300.0  # first temperature of the likelihood
FIRST_DOUBT = 0.3  # of the first draws
EDGE = 5e-4  # least probability of a bit, so that guesses which do not quite reach the largest magnitude stay possible


def search_of(observation: Observation, doubt: float) -> RowSearch:
    """Return the attack's posterior of one observation."""
    (group,) = Groups([observation], progress=no_progress)
    prepared = prepare(Settings(objective=L2(), compile="off"), group, 0)
    search = begin_search(prepared, prepared.victims[0], row_moves(prepared, observation), None)
    search.doubt = doubt
    return search


class Uploads:
    """Negative log likelihood of rows behind two hidden layers, one bit or clipped noise, without whole gradients."""

    def __init__(self, observation: Observation, *, noise: float | None, doubt: float) -> None:
        sent = list(observation.assumed().parameters.values())
        self.weights, self.biases = [w.float() for w in sent[::2]], [b.float() for b in sent[1::2]]
        seen = [value.float() for value in observation.update().values()]
        # a bias is the weight of an input that is always 1
        self.seen = [torch.cat([w, b[:, None]], 1) for w, b in zip(seen[::2], seen[1::2], strict=True)]
        self.noise, self.doubt = noise, doubt
        self.largest = torch.stack([value.abs().max() for value in seen])
        self.std = [(max(noise or 0, 0) ** 2 + 1e-6 * v.square().mean()).sqrt() for v in seen]

    def factors(self, rows: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's errors (..., O) and inputs (..., I + 1); a row's gradient is their product."""
        inputs, live, hidden = [], [], rows
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            inputs.append(torch.cat([hidden, torch.ones_like(hidden[..., :1])], -1))
            hidden = hidden @ weight.mT + bias
            if place < len(self.weights) - 1:
                hidden = hidden.relu()
                live.append(hidden > 0)
        error = hidden.softmax(-1) - torch.nn.functional.one_hot(labels, hidden.shape[-1])
        errors = [error]
        for weight, alive in zip(self.weights[:0:-1], live[::-1], strict=True):
            errors.insert(0, (errors[0] @ weight) * alive)
        return list(zip(errors, inputs, strict=True))

    def of_noise(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the loss (...) of batches (..., B, F) under normal noise on the clipped mean gradient."""
        factors, size = self.factors(rows, labels), labels.shape[-1]
        squares, products, wholes = [], [], []
        for (error, inputs), seen in zip(factors, self.seen, strict=True):
            for part in (slice(0, -1), slice(-1, None)):
                own = inputs[..., part]
                gram = (error @ error.mT) * (own @ own.mT)
                squares.append(gram.sum((-2, -1)) / size**2)
                products.append(((error @ seen[:, part]) * own).sum((-2, -1)) / size)
                wholes.append(seen[:, part].square().sum())
        clip = (1 / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
        losses = [
            0.5 * (whole - 2 * clip * product + clip**2 * square) / std**2
            for square, product, whole, std in zip(squares, products, wholes, self.std, strict=True)
        ]
        return torch.stack(losses).sum(0)

    def rest(self, rows: Tensor, labels: Tensor, size: int) -> list[Tensor]:
        """Return what rows (S, b, F) add to the mean gradient of ``size`` rows, by layer (S, O, I + 1)."""
        return [torch.einsum("sbo,sbi->soi", error, inputs) / size for error, inputs in self.factors(rows, labels)]

    def of_bits(self, rest: list[Tensor], rows: Tensor, labels: Tensor, size: int) -> Tensor:
        """Return the loss (S, M) of one more row (S, M, F) next to the ``rest`` under rounding to one bit."""
        total = torch.zeros(labels.shape)
        for layer, (error, inputs) in enumerate(self.factors(rows, labels)):
            parts = slice(0, -1), slice(-1, None)
            for part, largest in zip(parts, self.largest[2 * layer : 2 * layer + 2], strict=True):
                signs = self.seen[layer][:, part].sign() / (2 * largest)
                kept, own = 0.5 + rest[layer][:, :, part] * signs, inputs[..., part]
                if layer or own.shape[-1] == 1:
                    chances = torch.addcmul(kept[:, None], (error / size)[..., None] * own[..., None, :], signs)
                    total += bit_losses(chances)
                else:  # most inputs are zeros, which leave their column as it is
                    active = int((own != 0).sum(-1).max())
                    at = (own != 0).float().topk(active, -1).indices  # (S, M, A)
                    chain, kept = torch.arange(len(kept))[:, None, None], kept.mT.contiguous()  # (S, I, O)
                    whole = -kept.clamp_min(EDGE).log().sum(-1)
                    more = own.gather(-1, at)[..., None] * (error / size)[..., None, :]
                    chances = torch.addcmul(kept[chain, at], more, signs.mT[at])
                    total += whole.sum(-1, keepdim=True) - whole[chain, at].sum(-1) + bit_losses(chances)
                    rest_sizes = (kept - 0.5).abs().amax(-1)[:, None].expand(*labels.shape, -1)
                    own_sizes = (chances - 0.5).abs().amax(-1)
                    sizes = 2 * rest_sizes.scatter(-1, at, own_sizes).amax(-1)
                    total += 0.5 * ((sizes - 1) / self.doubt).square()
                    continue
                high, low = chances.amax((-2, -1)) - 0.5, 0.5 - chances.amin((-2, -1))
                total += 0.5 * ((2 * torch.maximum(high, low) - 1) / self.doubt).square()
        return total


def bit_losses(chances: Tensor) -> Tensor:
    """Return the sum (S, M) of the negative logarithms of the bits' probabilities (S, M, O, I)."""
    flat = chances.flatten(2)
    whole = flat.shape[-1] // 4 * 4
    quads = flat[..., :whole].clamp_min(EDGE).view(*flat.shape[:2], 4, -1).prod(2)
    return -quads.log().sum(-1) - flat[..., whole:].clamp_min(EDGE).log().sum(-1)


@dataclass(eq=False)
class Values:
    """Values that each of D cells of a row, its class last, can have: encoded, and their codes in the prior."""

    search: RowSearch

    def __post_init__(self) -> None:
        prior, public = self.search.moves.prior, self.search.moves.rows
        schema = prior.schema
        self.prior, self.schema, self.encoded, self.codes = prior, schema, [], []
        number = group = 0
        for start, column in zip(schema.starts, schema.columns, strict=True):
            if column.is_number:
                values = public[:, start].unique()[:, None]
                codes = (values > prior.edges[number]).sum(-1)
                number += 1
            else:
                width = len(column.categories)
                span = slice(start, start + width)
                values = (torch.eye(width) - schema.shift[span]) / schema.scale[span]
                codes = prior.codes[group, :width]
                group += 1
            self.encoded.append(values)
            self.codes.append(codes)
        self.encoded.append(torch.tensor([[0], [1]]))
        self.codes.append(torch.tensor([0, 1]))
        self.children = [
            [c for c, p in enumerate(prior.parents.tolist()) if p == d and c != d] for d in range(len(self.codes))
        ]

    def coded(self, rows: Tensor, labels: Tensor) -> Tensor:
        return _coded(self.schema, self.prior.edges, self.prior.codes, rows, labels)

    def drawn(self, column: int, coded: Tensor, rng: torch.Generator) -> Tensor:
        """Draw indices (S, TRIED) of values of ``column`` by the prior, given the other cells' codes (S, D)."""
        shares, parent = self.prior.log_shares, int(self.prior.parents[column])
        own = shares[column, coded[:, parent]] if parent != column else shares[column, :1].expand(len(coded), -1)
        for child in self.children[column]:
            own = own + shares[child][:, coded[:, child]].mT
        chances = own[:, self.codes[column]].softmax(-1)
        return torch.multinomial(chances, TRIED, replacement=True, generator=rng)


class Chains:
    """S Markov chains on the posterior of a victim's rows (S, B, F) and labels (S, B)."""

    def __init__(self, values: Values, uploads: Uploads, rows: Tensor, labels: Tensor, seed: int) -> None:
        self.values, self.uploads, self.rows, self.labels = values, uploads, rows.clone(), labels.clone()
        self.rng = torch.Generator().manual_seed(seed)
        self.size = labels.shape[1]
        self.temperature = 1.0

    def losses(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log likelihood (S,) of whole batches."""
        if self.uploads.noise is not None:
            return self.uploads.of_noise(rows, labels)
        rest = self.uploads.rest(rows[:, 1:], labels[:, 1:], self.size)
        return self.uploads.of_bits(rest, rows[:, :1], labels[:, :1], self.size)[:, 0]

    def of_one(self, place: int, rest: list[Tensor] | None, rows: Tensor, labels: Tensor) -> Tensor:
        if rest is not None:
            parts = [rows.split(8), labels.split(8), *(layer.split(8) for layer in rest)]
            each = zip(*parts, strict=True)
            return torch.cat([self.uploads.of_bits(list(kept), some, own, self.size) for some, own, *kept in each])
        number = labels.shape[1]
        whole, own = (each[:, None].repeat_interleave(number, 1) for each in (self.rows, self.labels))
        whole[:, :, place], own[:, :, place] = rows, labels
        return self.uploads.of_noise(whole, own)

    def sweep(self) -> None:
        for place in torch.randperm(self.size, generator=self.rng).tolist():
            others = [k for k in range(self.size) if k != place]
            rest = None
            if self.uploads.noise is None:
                rest = self.uploads.rest(self.rows[:, others], self.labels[:, others], self.size)
            for column in torch.randperm(len(self.values.codes), generator=self.rng).tolist():
                self.redraw(place, column, rest)
        if self.size > 1:
            energies = self.energies(self.rows, self.labels)
            for _ in range(16):
                energies = self.swap(energies)

    def redraw(self, place: int, column: int, rest: list[Tensor] | None) -> None:
        """Draw a cell from its values drawn by the prior and the present one, by their likelihood."""
        coded = self.values.coded(self.rows[:, place], self.labels[:, place])
        drawn = self.values.drawn(column, coded, self.rng)
        rows = self.rows[:, place, None].repeat(1, TRIED + 1, 1)
        labels = self.labels[:, place, None].repeat(1, TRIED + 1)
        if column == len(self.values.schema.columns):
            labels[:, 1:] = drawn
        else:
            start = self.values.schema.starts[column]
            found = self.values.encoded[column][drawn]
            rows[:, 1:, start : start + found.shape[-1]] = found
        losses = self.of_one(place, rest, rows, labels)
        chosen = torch.multinomial((-losses / self.temperature).softmax(-1), 1, generator=self.rng)[:, 0]
        at = torch.arange(len(rows))
        self.rows[:, place], self.labels[:, place] = rows[at, chosen], labels[at, chosen]

    def swap(self, before: Tensor) -> Tensor:
        """Propose to exchange some cells of two rows."""
        one, other = torch.randperm(self.size, generator=self.rng)[:2].tolist()
        schema = self.values.schema
        chosen = torch.rand(len(schema.columns) + 1, generator=self.rng) < 1 / 15 * 2 ** float(
            torch.randint(4, (1,), generator=self.rng)
        )
        spans = torch.repeat_interleave(chosen[:-1], torch.tensor([len(c.shift) for c in schema.columns]))
        rows, labels = self.rows.clone(), self.labels.clone()
        for a, b in ((one, other), (other, one)):
            rows[:, a] = torch.where(spans, self.rows[:, b], self.rows[:, a])
            labels[:, a] = torch.where(chosen[-1], self.labels[:, b], self.labels[:, a])
        after = self.energies(rows, labels)
        take = torch.rand(len(rows), generator=self.rng).log() < before - after
        self.rows = torch.where(take[:, None, None], rows, self.rows)
        self.labels = torch.where(take[:, None], labels, self.labels)
        return torch.where(take, after, before)

    def energies(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log posterior density (S,), its likelihood by the temperature."""
        return self.losses(rows, labels) / self.temperature + self.values.prior.surprise(rows, labels).sum(1)

    def anneal(self, steps: int, hot: float) -> None:
        """Move S draws of the prior to the posterior: weigh, resample and move them at falling temperatures.

        Sequential Monte Carlo (Del Moral et al. 2006).
        """
        doubt = self.uploads.doubt
        self.temperature, self.uploads.doubt = math.inf, max(doubt, FIRST_DOUBT)
        for _ in range(3):
            self.sweep()
        for step in range(steps):
            share = step / (steps - 1)
            before = self.losses(self.rows, self.labels) / self.temperature
            self.temperature = hot ** (1 - share)
            self.uploads.doubt = max(doubt, FIRST_DOUBT) ** (1 - share) * doubt**share
            weights = (before - self.losses(self.rows, self.labels) / self.temperature).softmax(0)
            places = (torch.arange(len(weights)) + torch.rand(1, generator=self.rng)) / len(weights)
            chosen = torch.searchsorted(weights.cumsum(0), places).clamp(max=len(weights) - 1)
            self.rows, self.labels = self.rows[chosen], self.labels[chosen]
            self.sweep()


def assigned(schema: Schema, guess: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return samples (T, B, C) in the order that has most cells of ``guess`` (B, C) right, and these shares (T,)."""
    size = len(guess)
    hits = right_cells(schema, guess[None, :, None], samples[:, None]).double().mean(-1)  # (T, B, B)
    orders = torch.tensor(list(itertools.permutations(range(size))))
    shares = hits[:, torch.arange(size), orders].mean(-1)  # (T, P)
    best, chosen = shares.max(1)
    return samples.gather(1, orders[chosen][..., None].expand(-1, -1, samples.shape[-1])), best


def best_answer(schema: Schema, samples: Tensor) -> Tensor:
    """Return the cells (B, C) that are right in most of the samples (T, B, C), by their rows' assignment."""
    found, best = samples[-1], -1.0
    for start in range(0, len(samples), max(1, len(samples) // 8)):
        guess = samples[start]
        for _ in range(8):
            ordered, shares = assigned(schema, guess, samples)
            if float(shares.mean()) > best:
                best, found = float(shares.mean()), guess
            mode = torch.empty_like(guess)
            for row, column in itertools.product(*map(range, guess.shape)):
                values, counts = ordered[:, row, column].unique(return_counts=True)
                near = (values[:, None] - values).abs() <= float(schema.tolerances[column]) + 1e-9
                mode[row, column] = values[int((near.double() @ counts.double()).argmax())]
            if torch.equal(mode, guess):
                break
            guess = mode
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defense", choices=("quantization", "noise"), default="quantization")
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--bits", type=int, default=1, choices=(1,))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--victims", type=int, default=24)
    parser.add_argument("--first", type=int, default=None, help="number of these to do now")
    parser.add_argument("--evaluations", type=int, default=4800)
    parser.add_argument("--draws", type=int, default=64, help="draws of the posterior at a time")
    parser.add_argument("--steps", type=int, default=30, help="temperatures")
    parser.add_argument("--last", type=int, default=8, help="sweeps at the last temperature")
    parser.add_argument("--doubt", type=float, default=0.03)
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = RowFile(options.out)
    setup, seen, public = observed(options)
    truth, schema = setup.ground_truth(), schema_of(setup.model)
    known: dict[str, Any] = {"defense": setup.defense.parts}
    known |= {"public_images": public.inputs, "public_labels": public.labels}
    assert schema is not None
    usual = usual_row(schema.cells(public.inputs), schema).expand(options.batch, -1)
    for number, observation in enumerate(seen[: options.first]):
        strength = options.scale if options.defense == "noise" else options.bits
        key = {"defense": options.defense, "strength": strength, "seed": options.seed}
        key |= {"batch": options.batch, "victim": number, "evaluations": options.evaluations}
        key |= {"doubt": options.doubt, "draws": options.draws, "steps": options.steps}
        if kept.find(key) is not None:
            continue
        asked, own, began = observation.given(**known), truth.batch(observation.id), time.process_time()
        with torch.no_grad():
            figures = sampled(asked, own, options)
        if options.evaluations:
            (found,) = LikeliestRows(evaluations=options.evaluations)([asked], seed=0)
            if found.batch is None:
                raise SystemExit(found.failure)
            figures["cells"] = right(schema, found.batch.inputs, own.inputs)
            figures["ahead"] = ahead(asked, found.batch, own)
        cells = schema.cells(own.inputs)
        figures["usual"] = float(right_cells(schema, usual, cells).double().mean())
        figures["control"] = float(control_cells(schema.cells(public.inputs), cells, schema).mean())
        figures["cpu_seconds"] = time.process_time() - began
        print(kept.add(key, {name: round(value, 3) for name, value in figures.items()}), flush=True)


def sampled(observation: Observation, truth: Batch, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of draws of the posterior, found from the prior and from the client's rows ``truth``."""
    search = search_of(observation, options.doubt)
    moves, schema = search.moves, search.moves.prior.schema
    rows, labels = truth.inputs[None].float(), truth.labels[None].long()
    uploads = Uploads(observation, noise=options.scale if options.defense == "noise" else None, doubt=options.doubt)
    public = torch.randint(len(moves.rows), (options.draws, options.batch), generator=search.rng)
    blind = Chains(Values(search), uploads, moves.rows[public], moves.labels[public], options.seed)
    number = max(2, options.draws // 8)
    informed = Chains(blind.values, uploads, rows.repeat(number, 1, 1), labels.repeat(number, 1), options.seed)
    typical = float(informed.energies(rows, labels))
    blind.anneal(options.steps, HOT)
    figures: dict[str, float] = {}
    own, energies = schema.cells(truth.inputs)[None], []
    for name, chains, sweeps in (("", blind, options.last), ("_of_truth", informed, 8 * options.last)):
        samples, energy = [], []
        for sweep in range(sweeps):
            chains.sweep()
            if 4 * sweep >= sweeps:
                samples.append(schema.cells(chains.rows.flatten(0, 1)).view(-1, options.batch, len(schema.columns)))
                energy.append(chains.energies(chains.rows, chains.labels).mean())
        drawn = torch.stack(samples, 1)  # (S, T, B, C)
        halves = [each.flatten(0, 1) for each in (drawn[::2], drawn[1::2])]
        figures["mode" + name] = float(assigned(schema, best_answer(schema, drawn.flatten(0, 1)), own)[1])
        held = [assigned(schema, best_answer(schema, a), b)[1].mean() for a, b in (halves, halves[::-1])]
        figures["bound" + name] = float(torch.stack(held).mean())
        energies.append(float(torch.stack(energy).mean()))
    apart = search.of_whole(informed.rows, informed.labels) - informed.energies(informed.rows, informed.labels)
    assert float(apart.max() - apart.min()) < 0.5, "the attack's posterior, up to a constant"
    return {**figures, "gap": energies[0] - energies[1], "typical": energies[1] - typical}


if __name__ == "__main__":
    main()
