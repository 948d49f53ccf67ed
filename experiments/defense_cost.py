"""Seconds per client and round of each defense, as ratios to the undefended step, beside Refiner's Table 4.

    python experiments/defense_cost.py --models lenet resnet10 resnet18 --batch-size 128 --device auto

A step is the gradient of one batch of random 3x32x32 images and the defense's hooks on it, as a client runs them.
The paper times whole defended rounds on an A10 GPU and has no undefended column, so that the ratios that can be
compared are those to its cheapest defense, GQ.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from row_file import RowFile, takes_rows
from torch import nn

from fl_privacy.defenses import (
    ClientState,
    Defense,
    LocalStep,
    dp_noise,
    dp_sgd,
    none,
    pruning,
    quantization,
    refiner,
    selective_sharing,
    soteria,
    soteria_mixing,
)
from fl_privacy.defenses._soteria import feature_scores, find_head, representation
from fl_privacy.federation.training import local_update
from fl_privacy.models import ConvNet, LeNet, ResNet10, ResNet18, ResNet34, ViT
from fl_privacy.models.gradients.memory import freed_memory_kept
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork
from fl_privacy.models.pretrained.evaluator_files import save_evaluator
from fl_privacy.types import Batch, LocalPlan, ModelState

Clock = Callable[[], float]


class Linears(nn.Module):
    """The linear layers of MiniLM-L6, 384 and 1536 wide, on 8 tokens that an image is cut into."""

    def __init__(self, *, in_channels: int, image_size: int, num_classes: int) -> None:
        super().__init__()
        layers = [layer for _ in range(6) for layer in (nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384))]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(384, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(inputs.reshape(len(inputs), -1, 384)).mean(1))
        return logits


MODELS: dict[str, Callable[..., nn.Module]] = {
    "lenet": LeNet,
    "convnet": partial(ConvNet, width=8),
    "resnet10": ResNet10,
    "resnet18": ResNet18,
    "resnet34": ResNet34,
    "vit": ViT,
    "linear": Linears,
}
STEPPED = ["lenet", "convnet", "resnet18", "linear"]
"""On which per-sample clipping is compared with a plain step."""

FILES = tempfile.TemporaryDirectory()


def evaluator(widths: tuple[int, int, int]) -> str:
    """Save an untrained evaluation network and return its file; training would not change its cost."""
    file = Path(FILES.name) / f"{widths[0]}.safetensors"
    save_evaluator(EvaluationNetwork(input_shape=(3, 32, 32), widths=widths), file, {})
    return str(file)


DEFENSES: dict[str, Defense] = {
    "none": none(),
    "pruning": pruning(rate=0.9),
    "gaussian": dp_noise(scale=0.01, clip_norm=1.0),
    "laplace": dp_noise(noise="laplace", scale=0.01, clip_norm=1.0),
    "gq": quantization(bits=8),
    "ppdl": selective_sharing(share=0.05),
    "dp_sgd": dp_sgd(),
    "soteria": soteria(scores="estimated"),
    "soteria_exact": soteria(),
    "soteria_mixing": soteria_mixing(),
    "refiner": refiner(evaluator=evaluator((128, 256, 512))),
    "refiner_warm": refiner(evaluator=evaluator((128, 256, 512)), iterations=5),
    "refiner_student": refiner(evaluator=evaluator((38, 77, 154))),
    "refiner_small": refiner(evaluator=evaluator((32, 64, 128))),
}
"""Refiner with the paper's evaluation network, with half the iterations (a warm start), with a student of that network
(``train-evaluator teacher=FILE``), with a smaller network."""

TABLE_4 = {
    "lenet": {
        "pruning": 0.0187, "gaussian": 0.0467, "laplace": 0.0469, "gq": 0.0179, "soteria": 0.4103,
        "refiner": 0.3340, "refiner_warm": 0.1418,
    },
    "resnet10": {
        "pruning": 0.0495, "gaussian": 0.7317, "laplace": 0.7322, "gq": 0.0277, "soteria": 11.3148,
        "refiner": 1.7341, "refiner_warm": 0.8523,
    },
    "resnet18": {
        "pruning": 0.0873, "gaussian": 1.8408, "laplace": 1.8414, "gq": 0.0514, "soteria": 21.7539,
        "refiner": 2.8539, "refiner_warm": 1.4262,
    },
    "resnet34": {
        "pruning": 0.1370, "gaussian": 3.3020, "laplace": 3.3025, "gq": 0.1050, "soteria": 39.4410,
        "refiner": 4.7012, "refiner_warm": 2.3548,
    },
    "vit": {
        "pruning": 1.1232, "gaussian": 15.5051, "laplace": 15.5236, "gq": 0.4489, "soteria": 347.5668,
        "refiner": 30.2268, "refiner_warm": 15.0234,
    },
}  # fmt: skip
"""Refiner, Table 4: seconds per client and round at batch 128; its Soteria is the exact one."""


def seconds(model: nn.Module, defense: Defense, batch: Batch, clock: Clock = time.perf_counter) -> float:
    """Measure seconds of one defended step."""
    synchronize(batch.inputs.device)
    started = clock()
    local_update(
        model,
        ModelState.of(model),
        [batch],
        num_examples=len(batch),
        plan=LocalPlan(batch_norm="eval"),
        defense=defense,
        state=ClientState(),
        rng=torch.Generator().manual_seed(0),
        private_rng=torch.Generator().manual_seed(1),
    )
    synchronize(batch.inputs.device)
    return clock() - started


def measured(
    model: nn.Module, defense: Defense, batch: Batch, *, repeats: int, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """Measure median seconds of a defended step, and its median ratio to a plain one right before it."""
    pairs = [(seconds(model, none(), batch, clock), seconds(model, defense, batch, clock)) for _ in range(repeats + 1)][
        1:
    ]
    return statistics.median(d for _, d in pairs), statistics.median(d / base for base, d in pairs)


def pairs(name: str, label: str, batch_size: int, repeats: int, clock: Clock) -> list[tuple[float, float]]:
    """Time steps defended by ``label``, or by Opacus' fast gradient clipping, each beside a plain one.

    Freed memory is kept, as in every round of a federation.
    """
    torch.manual_seed(0)
    model, batch = MODELS[name](in_channels=3, image_size=32, num_classes=10), random_batch(batch_size)
    step = (
        OpacusStep(model, batch, clock) if label == "opacus" else lambda: seconds(model, DEFENSES[label], batch, clock)
    )
    with freed_memory_kept():
        return [(step(), seconds(model, none(), batch, clock)) for _ in range(repeats + 1)][1:]


class OpacusStep:
    """Ghost clipping by Opacus: gradients are those of a reweighted loss, norms are had by hooks."""

    def __init__(self, model: nn.Module, batch: Batch, clock: Clock) -> None:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.requires_grad_(False).eval()
        self._module = GradSampleModuleFastGradientClipping(copy.deepcopy(model), max_grad_norm=1.0, strict=False)
        plain = torch.optim.SGD((p for p in self._module.parameters() if p.requires_grad), lr=0.01)
        sizes = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": len(batch)}
        self._optimizer = DPOptimizerFastGradientClipping(plain, **sizes)
        criterion = DPLossFastGradientClipping(self._module, self._optimizer, nn.CrossEntropyLoss())
        self._criterion, self._batch, self._clock = criterion, batch, clock
        self._module.train()
        for module in self._module.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()

    def __call__(self) -> float:
        """Measure seconds of one step."""
        started = self._clock()
        self._optimizer.zero_grad()
        self._criterion(self._module(self._batch.inputs), self._batch.labels).backward()
        self._optimizer.step()
        return self._clock() - started


def soteria_pairs(name: str, label: str, repeats: int, clock: Clock) -> list[tuple[float, float]]:
    """Time Soteria's scores of a batch of 8 beside one backward pass for each feature and example.

    Freed memory is kept, as in every round of a federation.
    """
    torch.manual_seed(0)
    model, batch = MODELS[name](in_channels=3, image_size=32, num_classes=10), random_batch(8)
    sent = ModelState.of(model)
    step = LocalStep(model, sent, batch, LocalPlan(batch_norm="eval"), ClientState(), torch.Generator().manual_seed(0))
    head = find_head(model, sent, batch.inputs[:1])

    def ours() -> float:
        started = clock()
        feature_scores(step, head, directions=32 if label == "soteria" else None)
        return clock() - started

    def loop() -> float:
        started = clock()
        for image in batch.inputs[:_LOOPED]:
            x = image.unsqueeze(0).requires_grad_()
            for feature in representation(model, sent, x, head)[0]:
                torch.autograd.grad(feature, x, retain_graph=True)[0].norm()
        return (clock() - started) * len(batch) / _LOOPED

    with freed_memory_kept():
        return [(ours(), loop()) for _ in range(repeats + 1)][1:]


_LOOPED = 2
"""Examples of a batch that the loop scores, each of which takes it as long."""


def random_batch(size: int) -> Batch:
    images = torch.rand(size, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return Batch(images, torch.arange(size) % 10)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet"], choices=MODELS)
    parser.add_argument(
        "--defenses", nargs="+", default=[d for d in DEFENSES if d != "soteria_exact"], choices=DEFENSES
    )
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cpu-seconds", action="store_true", help="of this process, where others share the machine")
    takes_rows(parser)
    options = parser.parse_args()
    kept, clock = RowFile(options.out), time.process_time if options.cpu_seconds else time.perf_counter
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if options.device == "auto" else options.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"Batch size {options.batch_size}, {where}, median of {options.repeats}\n")
    print("| model | defense | seconds | to undefended | to GQ | Refiner's, to GQ |")
    print("|---|---|---|---|---|---|")
    made = random_batch(options.batch_size)
    batch = Batch(made.inputs.to(device), made.labels.to(device))
    for name in options.models:
        torch.manual_seed(0)
        model = MODELS[name](in_channels=3, image_size=32, num_classes=10).to(device)
        _, gq = measured(model, DEFENSES["gq"], batch, repeats=options.repeats, clock=clock)
        for label in options.defenses:
            taken, ratio = measured(model, DEFENSES[label], batch, repeats=options.repeats, clock=clock)
            paper = TABLE_4.get(name, {})
            theirs = f"{paper[label] / paper['gq']:.1f}" if label in paper else ""
            key = {"model": name, "defense": label, "batch_size": options.batch_size, "device": where}
            kept.add(key, {"seconds": taken, "ratio": ratio, "to_gq": ratio / gq, "repeats": options.repeats})
            print(f"| {name} | {label} | {taken:.4f} | {ratio:.2f} | {ratio / gq:.2f} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
