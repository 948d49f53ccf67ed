"""How much faster the engine attacks many victims than the plain loop attacks one after the other.

    python experiments/attack_speed.py --models lenet resnet20 --victims 1 8 32 128 --threads 2 --compile off on

Both sides run the same mathematics (Inverting Gradients: cosine, total variation, signed Adam; and DLG's L-BFGS with
100 pairs) on the same threads, measured in turn in one process; the median over the repeats is reported. The images
are noise: the time of an iteration does not depend on them. What happens once, such as compiling, is not counted. On a
machine that others use as well, ``--clock cpu --threads 1`` counts the process's own time.
"""

import argparse
import itertools
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from row_file import RowFile, takes_rows
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fl_privacy.attacks import GradientInversion, idlg, inverting_gradients
from fl_privacy.attacks.gradient_inversion.settings import Compile
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.gradients import loss_gradients
from fl_privacy.models import ConvNet, LeNet, ResNet18, ResNet20
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

SHAPE = {"in_channels": 3, "image_size": 32, "num_classes": 10}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: LeNet(**SHAPE, init="uniform_0.5"),
    "convnet": lambda: ConvNet(**SHAPE, width=8),
    "resnet20": lambda: ResNet20(**SHAPE, width=16),
    "resnet18": lambda: ResNet18(**SHAPE),
}
MOVES = 20
WARM_UP = 25
"""Evaluations before those that are measured: an attack has recorded by then, or compiled, what it runs."""
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Row:
    """Times are those of one evaluation of one victim."""

    model: str
    attack: str
    compile: str
    victims: int
    loop_ms: float
    engine_ms: float
    ratio: float
    victims_per_hour: float
    gflops: float
    share_of_peak: float
    peak_memory_mb: float


def observe(model: nn.Module, count: int, device: str) -> list[Observation]:
    sent, plan = ModelState.of(model), LocalPlan(batch_norm="eval")
    victims = []
    for number in range(count):
        batch = Batch(torch.rand(1, 3, 32, 32, device=device), torch.tensor([number % 10], device=device))
        tensors = loss_gradients(model, sent, batch, batch_norm="eval").gradients
        victims.append(
            Observation(
                id=VictimId(0, 0, number),
                model=model,
                sent=sent,
                upload=Upload(tensors=tensors, num_examples=1),
                plan=plan,
                input_shape=(3, 32, 32),
                num_classes=10,
                knowledge=Knowledge(labels=batch.labels),
            )
        )
    return victims


class Loop:
    """What published attacks run, one victim at a time."""

    def __init__(self, model: nn.Module, victim: Observation) -> None:
        self._model = model.eval()
        self._parameters = [p.requires_grad_() for p in model.parameters()]
        self._observed = [victim.upload.tensors[name] for name, _ in model.named_parameters()]
        self._label = victim.knowledge.labels
        self._device = self._observed[0].device

    def _gradients(self, image: Tensor) -> tuple[Tensor, ...]:
        loss = F.cross_entropy(self._model(image), self._label)
        return torch.autograd.grad(loss, self._parameters, create_graph=True)

    def cosine(self, image: Tensor) -> Tensor:
        dot = squared = observed = torch.zeros((), device=self._device)
        for guess, seen in zip(self._gradients(image), self._observed, strict=True):
            dot, squared = dot + (guess * seen).sum(), squared + guess.pow(2).sum()
            observed = observed + seen.pow(2).sum()
        across = (image[..., 1:] - image[..., :-1]).abs().mean()
        down = (image[..., 1:, :] - image[..., :-1, :]).abs().mean()
        return 1 - dot / (squared.sqrt() * observed.sqrt()) + 1e-4 * (across + down)

    def squared(self, image: Tensor) -> Tensor:
        pairs = zip(self._gradients(image), self._observed, strict=True)
        return torch.stack([(guess - seen).pow(2).sum() for guess, seen in pairs]).sum()

    def inverting_gradients(self, iterations: int) -> None:
        image = torch.randn(1, 3, 32, 32, device=self._device).requires_grad_()
        optimizer = torch.optim.Adam([image], lr=0.1)
        for _ in range(iterations):
            (gradient,) = torch.autograd.grad(self.cosine(image), image)
            image.grad = gradient.sign_()
            optimizer.step()
            with torch.no_grad():
                image.clamp_(0, 1)

    def lbfgs(self, iterations: int) -> None:
        image = torch.randn(1, 3, 32, 32, device=self._device).requires_grad_()
        optimizer = torch.optim.LBFGS([image], max_iter=MOVES, tolerance_grad=0, tolerance_change=0)

        def closure() -> Tensor:
            loss = self.squared(image)
            (image.grad,) = torch.autograd.grad(loss, image)
            return loss

        for _ in range(iterations):
            optimizer.step(closure)


class Flops(TorchDispatchMode):
    """Counts the operations of products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.count += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def seconds(work: Callable[[int], object], iterations: int, device: str, clock: Clock = time.perf_counter) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = clock()
    work(iterations)
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def loop_seconds(work: Callable[[int], object], iterations: int, arguments: argparse.Namespace) -> float:
    """One iteration without what happens once: the difference of a long and a short run."""
    clock = CLOCKS[arguments.clock]
    long, short = (seconds(work, n, arguments.device, clock) for n in (2 + iterations, 2))
    return (long - short) / iterations


class EnoughError(Exception):
    """Ends an attack that has been measured."""


def engine_seconds(attack: GradientInversion, seen: list[Observation], clock: Clock, evaluations: int) -> float:
    """One evaluation of all victims, without what happens once: the median gap between reports of the whole attack,
    which is stopped after so many ``evaluations``."""
    reports: list[float] = []

    def progress(done: int, total: int) -> None:
        reports.append(clock())
        if len(reports) > WARM_UP + evaluations:
            raise EnoughError

    with suppress(EnoughError):
        attack(seen, seed=0, progress=progress)
    return statistics.median(after - before for before, after in pairwise(reports[WARM_UP:]))


def convolution_peak(device: str) -> float:
    """GFLOP per second of a large convolution."""
    images, weight = torch.randn(16, 128, 32, 32, device=device), torch.randn(128, 128, 3, 3, device=device)
    best = min(seconds(lambda _: F.conv2d(images, weight, padding=1), 1, device) for _ in range(10))
    return 2 * 16 * 128 * 128 * 9 * 1024 / best / 1e9


def memory_mb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def settings_of(attack: str, compile: Compile) -> GradientInversion:
    """As long as published."""
    if attack == "inverting_gradients":
        return inverting_gradients(compile=compile)
    optimizer = LBFGS(inner=MOVES, tolerance_grad=0, tolerance_change=0)
    return replace(idlg(enough=0, compile=compile), optimizer=optimizer)


def measure(
    name: str, attack: str, victims: int, compile: Compile, *, arguments: argparse.Namespace, peak: float
) -> Row:
    torch.manual_seed(0)
    device = arguments.device
    model = MODELS[name]().to(device)
    seen = observe(model, victims, device)
    reference = Loop(model, seen[0])
    evaluations = MOVES if attack == "lbfgs" else 1
    loop = reference.lbfgs if attack == "lbfgs" else reference.inverting_gradients
    iterations = max(1, arguments.iterations // evaluations)
    settings, clock = settings_of(attack, compile), CLOCKS[arguments.clock]
    loop(1)
    ours, theirs = [], []
    for _ in range(arguments.repeats):
        theirs.append(loop_seconds(loop, iterations, arguments) / evaluations)
        ours.append(engine_seconds(settings, seen, clock, iterations * evaluations) / victims)
    median = statistics.median(ours)
    with Flops() as counter:
        image = torch.rand(1, 3, 32, 32, device=device, requires_grad=True)
        torch.autograd.grad(reference.cosine(image), image)
    gflops = counter.count / median / 1e9
    return Row(
        model=name,
        attack=attack,
        compile=compile,
        victims=victims,
        loop_ms=1e3 * statistics.median(theirs),
        engine_ms=1e3 * median,
        ratio=statistics.median(t / o for t, o in zip(theirs, ours, strict=True)),
        victims_per_hour=3600 / (median * (300 * MOVES if attack == "lbfgs" else 4800)),
        gflops=gflops,
        share_of_peak=gflops / peak,
        peak_memory_mb=memory_mb(device),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--attacks", nargs="+", choices=("inverting_gradients", "lbfgs"), default=["inverting_gradients"]
    )
    parser.add_argument("--victims", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--compile", nargs="+", choices=("off", "on", "auto"), default=["off"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--iterations", type=int, default=20, help="evaluations of a measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    takes_rows(parser)
    arguments = parser.parse_args()
    kept = RowFile(arguments.out)
    torch.set_num_threads(arguments.threads)
    peak = convolution_peak(arguments.device)
    print(f"convolution peak {peak:.0f} GFLOP/s on {arguments.threads} threads ({arguments.device})")
    print(f"times on the {arguments.clock} clock")
    heads = f"{'model':9} {'attack':20} {'compile':7} {'V':>5} {'loop ms':>9} {'engine ms':>10}"
    print(f"{heads} {'ratio':>6} {'peak':>5} {'MB':>6}")
    wanted = itertools.product(arguments.models, arguments.attacks, arguments.compile, arguments.victims)
    for name, attack, compile, victims in wanted:
        row = measure(name, attack, victims, compile, arguments=arguments, peak=peak)
        key = {name: getattr(row, name) for name in ("model", "attack", "compile", "victims")}
        key |= {name: getattr(arguments, name) for name in ("threads", "clock", "device")}
        kept.add(key, {**asdict(row), "repeats": arguments.repeats, "peak_gflops": peak})
        print(
            f"{row.model:9} {row.attack:20} {row.compile:7} {row.victims:5} {row.loop_ms:9.2f} {row.engine_ms:10.3f}"
            f" {row.ratio:6.1f} {row.share_of_peak:5.0%} {row.peak_memory_mb:6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
