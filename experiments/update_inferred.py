"""What ``fl-privacy audit-update`` infers from two files before any attack, next to the truth, in eleven trainings.

    python experiments/update_inferred.py --out experiments/rows/update_inferred

CIFAR-10 images, and rows of random numbers; networks have initial values and train by plain SGD. A minute.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torchvision
from row_file import Row, RowFile, takes_rows
from safetensors.torch import save_file
from torch import nn

from fl_privacy.auditing.update_audit import UpdateAudit, UpdateAuditRequest
from fl_privacy.auditing.update_given import network_of
from fl_privacy.data import load_data
from fl_privacy.models import MLP, LeNet

NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "LeNet": partial(LeNet, num_classes=10, in_channels=3, image_size=32),
    "MLP": partial(MLP, num_classes=10, in_channels=3, image_size=32),
    "ResNet-18": partial(torchvision.models.resnet18, num_classes=10),
    "ViT": partial(
        torchvision.models.VisionTransformer,
        **{"image_size": 32, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 96, "mlp_dim": 192},
        num_classes=10,
    ),
    "MLP of 14 columns": lambda: nn.Sequential(
        nn.Linear(14, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
    ),
}


@dataclass(frozen=True)
class Case:
    """A training: the network, examples of each step, steps and learning rate; ``trains`` is batch norm's mode."""

    network: str
    examples: int
    steps: int
    lr: float
    trains: bool = False


CASES = (
    Case("LeNet", 1, 1, 0.1),
    Case("LeNet", 4, 1, 0.01),
    Case("LeNet", 2, 4, 0.1),
    Case("MLP", 1, 1, 0.1),
    Case("MLP", 8, 1, 1.0),
    Case("ViT", 1, 1, 0.1),
    Case("ResNet-18", 1, 1, 0.1),
    Case("ResNet-18", 8, 3, 0.05, trains=True),
    Case("MLP of 14 columns", 1, 1, 0.1),
    Case("MLP of 14 columns", 3, 1, 0.5),
    Case("MLP of 14 columns", 4, 8, 0.05),
)


def made(network: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[network]()


def audited(case: Case, place: Path) -> Row:
    net, rng = made(case.network).train(case.trains), torch.Generator().manual_seed(0)
    save_file(net.state_dict(), place / "before.safetensors")
    test, classes = load_data("cifar10_exact").test, []
    optimizer = torch.optim.SGD(net.parameters(), lr=case.lr)
    for step in range(case.steps):
        batch = test.batch(torch.arange(step * case.examples, (step + 1) * case.examples))
        inputs, labels = batch.inputs, batch.labels
        if "columns" in case.network:
            inputs, labels = torch.randn(case.examples, 14, generator=rng), labels % 5
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        classes += labels.tolist()
    save_file(net.state_dict(), place / "after.safetensors")
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom update_inferred import made\n"
    (place / "net.py").write_text(f"{code}def net(): return made({case.network!r})\n")
    model, shape = f"{place}/net.py:net", tuple(inputs.shape[1:])
    asked = UpdateAuditRequest(
        before=place / "before.safetensors", after=place / "after.safetensors", model=model, shape=shape, out=place
    )
    audit = UpdateAudit(asked, network_of(model), lambda text: None)
    (found,) = audit.found
    number = len(classes)
    likely = [] if found.classes is None else (found.classes * number).round().int().tolist()
    return {
        "kind": "rows" if len(shape) == 1 else "images",
        "kind_inferred": audit.kind.data,
        "examples_inferred": found.examples or "not",
        "steps_inferred": found.steps or "not",
        "lr_times_steps": case.lr * case.steps,
        "lr_times_steps_inferred": found.rate or "not",
        "classes": counted(Counter(classes)),
        "classes_inferred": counted({k: n for k, n in enumerate(likely) if n}) or "not",
    }


def counted(classes: Mapping[int, int]) -> str:
    return ", ".join(f"{k}" + f" (x{n})" * (n > 1) for k, n in sorted(classes.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    takes_rows(parser)
    kept = RowFile(parser.parse_args().out)
    for case in CASES:
        key = {"network": case.network, "examples": case.examples, "steps": case.steps}
        if kept.find(key) is None:
            with tempfile.TemporaryDirectory() as place:
                print(kept.add(key, audited(case, Path(place))), flush=True)


if __name__ == "__main__":
    main()
