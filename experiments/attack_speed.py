"""How much faster the engine attacks many victims than the plain loop attacks one after the other.

    python experiments/attack_speed.py --models lenet resnet20 --victims 1 8 32 128 --threads 2 --compile off on

Both sides run the same mathematics (Inverting Gradients: cosine, total variation, signed Adam; and DLG's L-BFGS with
100 pairs) on the same threads, measured in turn in one process; the median over the repeats is reported, with
quartiles. The loop runs what the authors' public code runs, which also differentiates by the parameters; the lean one
differentiates by the image alone. The images are noise: the time of an iteration does not depend on them. What happens
once, such as compiling, is not counted. On a machine that others use as well, ``--clock cpu --threads 1`` counts the
process's own time.

The peak is that of the engine's own products: its convolutions and matrix products, each at its shapes, back to back.
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

from fl_privacy.attacks import GradientInversion, idlg, inverting_gradients
from fl_privacy.attacks.gradient_inversion.grouping import group_victims, victims_of
from fl_privacy.attacks.gradient_inversion.preparation import prepare
from fl_privacy.attacks.gradient_inversion.settings import Compile
from fl_privacy.attacks.optimizers import LBFGS
from fl_privacy.models import ConvNet, LeNet, ResNet18, ResNet20
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.gradients.memory import freed_memory_kept
from fl_privacy.rng import cpu_threads
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId


def convnet_3(width: int = 32) -> nn.Module:
    """Build three convolutions with batch norm (32, 64, 64 channels), the last two with pooling."""
    layers = []
    for inner, outer, pooled in ((3, width, False), (width, 2 * width, True), (2 * width, 2 * width, True)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pooled else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * 64, 10))


SHAPE = {"in_channels": 3, "image_size": 32, "num_classes": 10}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lambda: LeNet(**SHAPE, init="uniform_0.5"),
    "convnet": lambda: ConvNet(**SHAPE, width=8),
    "convnet_3": convnet_3,
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
    low: float
    high: float
    lean_ratio: float
    victims_per_hour: float
    gflops: float
    peak_gflops: float
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
    """What published attacks run, one victim at a time; ``lean`` without derivatives by the parameters."""

    def __init__(self, model: nn.Module, victim: Observation, *, lean: bool = False) -> None:
        self._model = model.eval()
        self._parameters = [p.requires_grad_() for p in model.parameters()]
        self._observed = [victim.upload.tensors[name] for name, _ in model.named_parameters()]
        self._label = victim.knowledge.labels
        self._device = self._observed[0].device
        self._lean = lean

    def _gradients(self, image: Tensor) -> tuple[Tensor, ...]:
        loss = F.cross_entropy(self._model(image), self._label)
        return torch.autograd.grad(loss, self._parameters, create_graph=True)

    def _differentiate(self, loss: Tensor, image: Tensor) -> None:
        """Differentiate the loss by the image and, unless lean, by all parameters as ``backward`` does."""
        if self._lean:
            (image.grad,) = torch.autograd.grad(loss, image)
            return
        image.grad = None
        self._model.zero_grad()
        loss.backward()

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
            self._differentiate(self.cosine(image), image)
            image.grad.sign_()
            optimizer.step()
            with torch.no_grad():
                image.clamp_(0, 1)

    def lbfgs(self, iterations: int) -> None:
        image = torch.randn(1, 3, 32, 32, device=self._device).requires_grad_()
        optimizer = torch.optim.LBFGS([image], max_iter=MOVES, tolerance_grad=0, tolerance_change=0)

        def closure() -> Tensor:
            loss = self.squared(image)
            self._differentiate(loss, image)
            return loss

        for _ in range(iterations):
            optimizer.step(closure)


class Products(TorchDispatchMode):
    """The matrix products and convolutions of what runs within it, by shape.

    Attributes:
        found: (operation, its arguments) -> how often it is run, and multiplications and additions of once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[object, ...], tuple[int, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        counted = OPERATIONS.get(func._overloadpacket)
        if counted:
            product = (func, *(_hashable(argument) for argument in args))
            self.found[product] = (self.found.get(product, (0, 0))[0] + 1, counted(args, result))
        return result


def _of_products(arguments, result) -> int:
    return 2 * result.numel() * arguments[-1].shape[-2]


def _of_convolution(arguments, result) -> int:
    return 2 * result.numel() * arguments[1][0].numel()


def _of_derivatives(arguments, result) -> int:
    """Count the operations of a convolution's derivatives: by images, by weights, or by both."""
    return 2 * arguments[0].numel() * arguments[2][0].numel() * sum(arguments[-1][:2])


aten = torch.ops.aten
OPERATIONS = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm), _of_products),
    **dict.fromkeys((aten.convolution, aten._slow_conv2d_forward), _of_convolution),
    **dict.fromkeys((aten.convolution_backward, aten._slow_conv2d_backward), _of_derivatives),
}


@dataclass(frozen=True)
class Shape:
    """Of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def filled(self, device: str) -> Tensor:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return torch.randn(elements, device=device).as_strided(self.sizes, self.strides)


def _hashable(argument: object) -> object:
    if isinstance(argument, Tensor):
        return Shape(tuple(argument.shape), argument.stride())
    return tuple(argument) if isinstance(argument, list | torch.Size) else argument


def seconds_alone(product: tuple[object, ...], device: str, clock: Clock) -> float:
    """Measure one product alone: the least time of a few runs, on all threads or on one."""
    func, *arguments = product
    made = [argument.filled(device) if isinstance(argument, Shape) else argument for argument in arguments]
    taken = []
    for threads in {1, torch.get_num_threads()}:
        with torch.no_grad(), cpu_threads(threads):
            taken += [seconds(lambda _: func(*made), 1, device, clock) for _ in range(6)]
    return min(taken)


def peak(attack: GradientInversion, seen: list[Observation], device: str, clock: Clock) -> tuple[float, float]:
    """Count the operations of one victim's evaluation, and how many a second their products do alone."""
    (group,) = group_victims(victims_of(list(enumerate(seen))))
    prepared = prepare(attack, group, 0)
    first = [0] * len(prepared.victims)
    problem, variables = prepared.problem(prepared.victims, first), prepared.start(prepared.victims, first)[0]
    with Products() as products:
        problem.evaluate(variables)
    operations = sum(times * once for times, once in products.found.values())
    with freed_memory_kept():
        alone = sum(n * seconds_alone(product, device, clock) for product, (n, _) in products.found.items())
    return operations / len(seen), operations / alone


def seconds(work: Callable[[int], object], iterations: int, device: str, clock: Clock = time.perf_counter) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = clock()
    work(iterations)
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def loop_seconds(work: Callable[[int], object], iterations: int, arguments: argparse.Namespace) -> float:
    """Measure seconds of one iteration without the setup, as the difference of a long and a short run."""
    clock = CLOCKS[arguments.clock]
    long, short = (seconds(work, n, arguments.device, clock) for n in (2 + iterations, 2))
    return (long - short) / iterations


class EnoughError(Exception):
    """Ends an attack that has been measured."""


def engine_seconds(attack: GradientInversion, seen: list[Observation], clock: Clock, evaluations: int) -> float:
    """Measure seconds of one evaluation of all victims, without the setup.

    It is the median gap between reports of the whole attack, which is stopped after ``evaluations``.
    """
    reports: list[float] = []

    def progress(done: int, total: int) -> None:
        reports.append(clock())
        if len(reports) > WARM_UP + evaluations:
            raise EnoughError

    with suppress(EnoughError):
        attack(seen, seed=0, progress=progress)
    return statistics.median(after - before for before, after in pairwise(reports[WARM_UP:]))


def memory_mb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def settings_of(attack: str, compile: Compile) -> GradientInversion:
    """Build the attack with its published number of iterations."""
    if attack == "inverting_gradients":
        return inverting_gradients(compile=compile)
    optimizer = LBFGS(inner=MOVES, tolerance_grad=0, tolerance_change=0)
    return replace(idlg(enough=0, compile=compile), optimizer=optimizer)


def measure(name: str, attack: str, victims: int, compile: Compile, *, arguments: argparse.Namespace) -> Row:
    torch.manual_seed(0)
    device = arguments.device
    model = MODELS[name]().to(device)
    seen = observe(model, victims, device)
    evaluations = MOVES if attack == "lbfgs" else 1
    iterations = max(1, arguments.iterations // evaluations)
    settings, clock = settings_of(attack, compile), CLOCKS[arguments.clock]
    loops = [getattr(Loop(model, seen[0], lean=lean), attack) for lean in (False, True)]
    ours, theirs, leans = [], [], []
    for loop in loops:
        loop(1)
    for _ in range(arguments.repeats):
        for loop, taken in zip(loops, (theirs, leans), strict=True):
            taken.append(loop_seconds(loop, iterations, arguments) / evaluations)
        ours.append(engine_seconds(settings, seen, clock, iterations * evaluations) / victims)
    median = statistics.median(ours)
    operations, most = peak(settings, seen, device, clock)
    ratios = [t / o for t, o in zip(theirs, ours, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Row(
        model=name,
        attack=attack,
        compile=compile,
        victims=victims,
        loop_ms=1e3 * statistics.median(theirs),
        engine_ms=1e3 * median,
        ratio=middle,
        low=low,
        high=high,
        lean_ratio=statistics.median(t / o for t, o in zip(leans, ours, strict=True)),
        victims_per_hour=3600 / (median * (300 * MOVES if attack == "lbfgs" else 4800)),
        gflops=operations / median / 1e9,
        peak_gflops=most / 1e9,
        share_of_peak=operations / median / most,
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    takes_rows(parser)
    arguments = parser.parse_args()
    kept = RowFile(arguments.out)
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads ({arguments.device}), times on the {arguments.clock} clock")
    heads = f"{'model':9} {'attack':20} {'compile':7} {'V':>5} {'loop ms':>9} {'engine ms':>10}"
    print(f"{heads} {'ratio':>6} {'lean':>6} {'peak':>5} {'MB':>6}")
    wanted = itertools.product(arguments.models, arguments.attacks, arguments.compile, arguments.victims)
    for name, attack, compile, victims in wanted:
        row = measure(name, attack, victims, compile, arguments=arguments)
        key = {name: getattr(row, name) for name in ("model", "attack", "compile", "victims")}
        key |= {name: getattr(arguments, name) for name in ("threads", "clock", "device")}
        kept.add(key, {**asdict(row), "repeats": arguments.repeats})
        print(
            f"{row.model:9} {row.attack:20} {row.compile:7} {row.victims:5} {row.loop_ms:9.2f} {row.engine_ms:10.3f}"
            f" {row.ratio:6.1f} {row.lean_ratio:6.1f} {row.share_of_peak:5.0%} {row.peak_memory_mb:6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
