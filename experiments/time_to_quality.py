"""CPU seconds until an image is read at 20 and 30 dB (LeNet) or 15 dB (ResNet-20): ``attack=auto`` and a plain loop.

    python experiments/time_to_quality.py --out experiments/rows/time_to_quality --minutes 30
    python experiments/time_to_quality.py --out experiments/rows/time_to_quality --minutes 0   # of what there is

The loop is the authors' public algorithm as our own program, in the same process and on one thread: DLG's L-BFGS with
inferred labels (Zhao et al. 2020) on LeNet, signed Adam on the angle with total variation (Geiping et al. 2020) on
ResNet-20. It attacks one victim after the other, and the clock stands still while its image is compared with the
truth. ``auto`` gives no image away before its end, so that it is run with more and more evaluations, each run from
the start and timed whole; the first that reaches the quality counts. Many victims together begin with the evaluations
that the median victim took alone. Both sides see when to stop, and what a victim takes that never gets there is the
time of all it was given.

One line of ``runs.jsonl`` in ``--runs`` for each victim of either side, and for each run on many victims together: a
run that was stopped goes on where it was. ``rows.jsonl`` is the table of them, a line for each network and quality.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from auto_table import Cell, network, victims_of
from torch import Tensor, nn

from fl_privacy.attacks import AutoAttack
from fl_privacy.data import Dataset, load_data
from fl_privacy.files import write_whole
from fl_privacy.types import Batch, Observation

TARGETS: Mapping[str, tuple[float, ...]] = {"LeNet sigmoid": (20.0, 30.0), "ResNet-20": (15.0,)}
"""In dB."""

BUDGETS: Mapping[str, tuple[int, ...]] = {
    "LeNet sigmoid": (100, 200, 300, 450, 600, 900, 1200, 1800, 2400),
    "ResNet-20": (100, 200, 300, 450, 600, 900, 1200),
}
"""Evaluations of ``auto``."""

MOVES = 20
"""Of L-BFGS between two looks at the image."""


@dataclass(frozen=True)
class Row:
    """What one attack of a run cost and read.

    Attributes:
        model: attacked.
        side: ``loop`` or ``auto``.
        victims: attacked together.
        number: of the victim where it is attacked alone; 0 of those together.
        evaluations: of the loss, in all.
        seconds: of CPU, of all victims.
        psnr: of each, in dB, at the end.
        reached: of a loop the seconds after which each target was reached, ``null`` where it never was.
    """

    model: str
    side: str
    victims: int
    number: int
    evaluations: int
    seconds: float
    psnr: list[float]
    reached: list[float | None]


def decibels(image: Tensor, truth: Tensor) -> float:
    error = (image.detach().clamp(0, 1).float() - truth).square().mean()
    return min(200.0, float(-10 * error.clamp_min(1e-20).log10()))


class Loop:
    """A published attack on one victim, whose clock stands still while somebody looks at the truth."""

    def __init__(self, model: nn.Module, seen: Observation, truth: Batch, targets: Sequence[float]) -> None:
        self._model = model.eval()
        self._parameters = [p.requires_grad_() for p in model.parameters()]
        self._observed = [seen.upload.tensors[name] for name, _ in model.named_parameters()]
        bias = [t for t in self._observed if t.shape == (seen.num_classes,)][-1]
        self._label = bias.argmin()[None]
        self._truth, self._targets = truth.inputs, targets
        self.seconds, self.evaluations, self.psnr = 0.0, 0, 0.0
        self.reached: list[float | None] = [None] * len(targets)
        self._since = time.process_time()

    def _gradients(self, image: Tensor) -> tuple[Tensor, ...]:
        self.evaluations += 1
        loss = F.cross_entropy(self._model(image), self._label)
        return torch.autograd.grad(loss, self._parameters, create_graph=True)

    def _arrived(self, image: Tensor) -> bool:
        """Say whether ``image`` reaches the best target's PSNR, or is not finite."""
        self.seconds += time.process_time() - self._since
        if bool(image.isfinite().all()):
            self.psnr = decibels(image, self._truth)
            for k, target in enumerate(self._targets):
                if self.reached[k] is None and self.psnr >= target:
                    self.reached[k] = self.seconds
        over = None not in self.reached or not bool(image.isfinite().all())
        self._since = time.process_time()
        return over

    def dlg(self, iterations: int) -> None:
        image = torch.randn_like(self._truth).requires_grad_()
        optimizer = torch.optim.LBFGS([image], max_iter=MOVES)

        def closure() -> Tensor:
            pairs = zip(self._gradients(image), self._observed, strict=True)
            loss = torch.stack([(guess - seen).pow(2).sum() for guess, seen in pairs]).sum()
            (image.grad,) = torch.autograd.grad(loss, image)
            return loss

        for _ in range(iterations):
            optimizer.step(closure)
            if self._arrived(image):
                break

    def inverting_gradients(self, iterations: int) -> None:
        """Run Inverting Gradients on images normalized by 0.5 and 0.25, as published."""
        image = torch.randn_like(self._truth).requires_grad_()
        optimizer = torch.optim.Adam([image], lr=0.1)
        stages = [int(iterations * share) for share in (3 / 8, 5 / 8, 7 / 8)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, stages, 0.1)
        for _ in range(iterations):
            gradients = self._gradients(0.5 + 0.25 * image)
            dot = torch.stack([(g * o).sum() for g, o in zip(gradients, self._observed, strict=True)]).sum()
            squared = torch.stack([g.pow(2).sum() for g in gradients]).sum()
            observed = torch.stack([o.pow(2).sum() for o in self._observed]).sum()
            across = (image[..., 1:] - image[..., :-1]).abs().mean()
            down = (image[..., 1:, :] - image[..., :-1, :]).abs().mean()
            loss = 1 - dot / (squared * observed).sqrt() + 1e-4 * (across + down)
            (gradient,) = torch.autograd.grad(loss, image)
            image.grad = gradient.sign_()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                image.clamp_(-2, 2)
            if self._arrived(0.5 + 0.25 * image.detach()):
                break


class Bench:
    """The victims of one model, and what has been measured of them."""

    def __init__(self, model: str, data: Dataset, rows: Sequence[Row], options: argparse.Namespace) -> None:
        self.model, self.targets = model, TARGETS[model]
        self.rows = [row for row in rows if row.model == model]
        self._options, self._cell, self._data = options, Cell(model, trained=False, batch=1), data

    def warm_up(self) -> None:
        """Do what happens once in a process, which is not measured."""
        AutoAttack(evaluations=BUDGETS[self.model][0])(self._victims(0, 1)[0], seed=0)

    def missing(self) -> Iterator[Row]:
        """Measure and yield one by one the rows that are not there yet."""
        for number in range(self._options.alone):
            if not any(row.side == "loop" and row.number == number for row in self.rows):
                yield self._loop(number)
            while (budget := self._next_budget(1, number)) is not None:
                yield self._auto(1, number, budget)
        while (budget := self._next_budget(self._options.together, 0)) is not None:
            yield self._auto(self._options.together, 0, budget)

    def own(self, victims: int, number: int) -> list[Row]:
        """Return the runs of ``auto``, with the least evaluations first."""
        found = [row for row in self.rows if (row.side, row.victims, row.number) == ("auto", victims, number)]
        return sorted(found, key=lambda row: row.evaluations)

    def _next_budget(self, victims: int, number: int) -> int | None:
        runs, budgets = self.own(victims, number), BUDGETS[self.model]
        if not runs and victims > 1:
            return self._enough_alone()
        if runs and statistics.median(runs[-1].psnr) >= max(self.targets):
            return None
        return next((budget for budget in budgets if not runs or budget > runs[-1].evaluations), None)

    def _enough_alone(self) -> int:
        """Find how many evaluations the median victim needed to reach the lowest target alone."""
        least = []
        for number in range(self._options.alone):
            runs = self.own(1, number)
            enough = next((row.evaluations for row in runs if row.psnr[0] >= min(self.targets)), None)
            least.append(max(BUDGETS[self.model]) if enough is None else enough)
        return int(statistics.median_high(least))

    def _victims(self, first: int, count: int) -> tuple[list[Observation], list[Batch], nn.Module]:
        model = network(self._cell, self._data, self._options)
        wanted = argparse.Namespace(**{**vars(self._options), "victims": first + count})
        pairs = list(victims_of(model, self._cell, self._data, wanted))[first:]
        return [seen for seen, _ in pairs], [truth for _, truth in pairs], model

    def _loop(self, number: int) -> Row:
        (seen,), (truth,), model = self._victims(number, 1)
        torch.manual_seed(self._options.seed + number)
        loop = Loop(model, seen, truth, self.targets)
        if self.model.startswith("LeNet"):
            loop.dlg(self._options.iterations or 300)
        else:
            loop.inverting_gradients(self._options.iterations or 4800)
        return Row(self.model, "loop", 1, number, loop.evaluations, loop.seconds, [loop.psnr], loop.reached)

    def _auto(self, victims: int, number: int, budget: int) -> Row:
        seen, truths, _ = self._victims(number, victims)
        began = time.process_time()
        found = AutoAttack(evaluations=budget)(seen, seed=self._options.seed)
        took = time.process_time() - began
        pairs = zip(found, truths, strict=True)
        psnr = [decibels(one.batch.inputs, truth.inputs) if one.batch else 0.0 for one, truth in pairs]
        return Row(self.model, "auto", victims, number, budget, took, psnr, [])


@dataclass(frozen=True)
class Time:
    """Seconds a victim, and how many of so many victims got there."""

    seconds: float
    reached: int
    of: int

    @property
    def known(self) -> bool:
        """Say whether the time is the median victim's own, and not only a bound."""
        return 2 * self.reached > self.of

    def __str__(self) -> str:
        return f"{'' if self.known else '> '}{self.seconds:.2f} ({self.reached} of {self.of})"


def sooner(ours: Time | None, loop: Time | None) -> str:
    """Format how many times sooner we are; empty where that is not known."""
    if ours is None or loop is None or not ours.known:
        return ""
    return f"{'' if loop.known else '> '}{loop.seconds / ours.seconds:.1f}"


def loop_time(bench: Bench, target: float) -> Time | None:
    """Compute the loop's time to the target for the median victim."""
    loops = [row for row in bench.rows if row.side == "loop"]
    place = bench.targets.index(target)
    known = [row.reached[place] for row in loops]
    if not loops:
        return None
    took = [row.seconds if own is None else own for row, own in zip(loops, known, strict=True)]
    return Time(statistics.median(took), sum(own is not None for own in known), len(loops))


def alone_time(bench: Bench, target: float, count: int) -> Time | None:
    """Compute our time to the target for the median victim, by its first run that reaches it."""
    took, reached = [], 0
    for number in range(count):
        runs = bench.own(1, number)
        enough = next((row.seconds for row in runs if row.psnr[0] >= target), None)
        if runs:
            took.append(max(row.seconds for row in runs) if enough is None else enough)
            reached += enough is not None
    return Time(statistics.median(took), reached, len(took)) if took else None


def together_time(bench: Bench, target: float, count: int) -> Time | None:
    """Compute our time per victim, by the first joint run whose median victim reaches the target."""
    runs = bench.own(count, 0)
    enough = next((row for row in runs if statistics.median(row.psnr) >= target), runs[-1] if runs else None)
    if enough is None:
        return None
    return Time(enough.seconds / count, sum(value >= target for value in enough.psnr), count)


def summary(bench: Bench, target: float, options: argparse.Namespace) -> dict[str, object] | None:
    """Return a line of ``rows.jsonl``: seconds of the median victim, or a bound on them."""
    loop = loop_time(bench, target)
    alone, together = alone_time(bench, target, options.alone), together_time(bench, target, options.together)
    if loop is None or alone is None:
        return None
    row: dict[str, object] = {"model": bench.model, "decibels": target, "victims": loop.of}
    row |= {"loop": loop.seconds, "loop_reached": loop.reached / loop.of}
    row |= {"alone": alone.seconds, "alone_reached": alone.reached / alone.of}
    if alone.known:
        row["times"] = loop.seconds / alone.seconds
    if together is not None:
        row |= {"together": together.seconds, "together_reached": together.reached / together.of}
        row["victims_together"] = together.of
        if together.known:
            row["times_together"] = loop.seconds / together.seconds
    return row


def table(benches: Sequence[Bench], options: argparse.Namespace) -> Iterator[str]:
    yield f"| network | dB | loop, s | auto alone, s | times | auto among {options.together}, s a victim | times |"
    yield f"|{'---|' * 7}"
    for bench in benches:
        for target in bench.targets:
            loop = loop_time(bench, target)
            ours = alone_time(bench, target, options.alone), together_time(bench, target, options.together)
            cells = [bench.model, f"{target:.0f}", str(loop or "")]
            for one in ours:
                cells += [str(one or ""), sooner(one, loop)]
            yield f"| {' | '.join(cells)} |"


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/time_to_quality"))
    parser.add_argument("--runs", type=Path, default=Path("runs/time_to_quality"), help="of the single runs")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--models", nargs="*", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--alone", type=int, default=4, help="victims that are attacked one by one")
    parser.add_argument("--together", type=int, default=64, help="victims that are attacked at once")
    parser.add_argument("--iterations", type=int, help="of the loop; as published by default (300 and 4800)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path, began = options.runs / "runs.jsonl", time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    data, rows = load_data(options.data), read_rows(path)
    benches = [Bench(model, data, rows, options) for model in options.models]
    for bench in benches:
        if time.monotonic() - began >= 60 * options.minutes:
            break
        bench.warm_up()
        for row in bench.missing():
            bench.rows.append(row)
            with path.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            shown = f"{row.side}, {row.victims} victims, {row.evaluations} evaluations"
            print(f"{row.model}, {shown}: {statistics.median(row.psnr):.1f} dB, {row.seconds:.2f} s", flush=True)
            if time.monotonic() - began > 60 * options.minutes:
                break
    found = [summary(bench, target, options) for bench in benches for target in bench.targets]
    write_whole(options.out / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in found if row))
    print("\n".join(table(benches, options)))


if __name__ == "__main__":
    main()
