"""How ATS's privacy score goes with the noise that attacks start from, in the course of a training (ATS, Figure 5).

    python experiments/ats_semi_trained.py DATA --weights runs/semi_trained --out experiments/rows/ats_semi_trained
    python experiments/ats_semi_trained.py DATA --weights runs/semi_trained --out experiments/rows/ats_semi_trained \
        --scored 5 --program CHECKOUT

The published PSNR of policies is that of such noise (`ats_floor.py`), so that no attack is needed to correlate a score
with it. A ResNet-20 is trained as the paper trains the network that scores, for fifty epochs on a tenth of the
examples (those of `cifar10_exact`), by the optimizer of `ats_falling_rate.py`; random policies are scored behind what
it is at the start and at the end of each learning rate. With ``--program``, a checkout of the authors' public code (Gao
et al., ATSPrivacy), its own function that scores an image is run as well, behind the last of these networks. DATA holds
the folders of the image sets. Rows that are there are kept, and so are the networks in ``--weights``.
"""

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from ats_correlation import images_of_all_classes, start_like, transformed_as
from ats_falling_rate import accuracy, course
from ats_trained_score import scores_of
from ats_trained_weights import network_of
from row_file import Row, RowFile, takes_rows
from safetensors.torch import load_file, save_file
from scipy.stats import pearsonr, spearmanr
from torch import Tensor, nn
from torch.nn import functional
from trained_resnet import MEAN, STD

from fl_privacy.data import load_data
from fl_privacy.data.transformations import Policy, random_policies
from fl_privacy.defenses.policy_search.scores import transformed_by
from fl_privacy.measure.images import psnr
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch

FUNCTIONS = ("calculate_dw", "cal_dis", "reconstruct")
"""Of the authors' file."""

STAGES = ("start", "1e-01", "1e-02", "1e-03", "1e-04")


def train_all(options: argparse.Namespace) -> None:
    """Write the network of each stage, unless it is there."""
    if all((options.weights / f"{stage}.safetensors").exists() for stage in STAGES):
        return
    options.weights.mkdir(parents=True, exist_ok=True)
    data, model = load_data("cifar10_exact", root=str(options.data)), network_of(options)
    save_file(model.state_dict(), options.weights / "start.safetensors")
    for rate in course(model, data, line="standard", epochs=options.epochs, rate=0.1):
        save_file(model.state_dict(), options.weights / f"{rate:.0e}.safetensors")
        print(f"{rate:.0e} {accuracy(model, data.test):.3f}", flush=True)


def add_rows(stage: str, options: argparse.Namespace, kept: RowFile) -> None:
    """Score the policies behind the network of a stage; keep how that goes with what noise and plain images come to."""
    data, model = load_data("cifar10_exact", root=str(options.data)), network_of(options)
    model.load_state_dict(load_file(options.weights / f"{stage}.safetensors"))
    every = images_of_all_classes(data.test, options.victims + options.scored)
    attacked = every.inputs[: options.victims]
    scored = Batch(every.inputs[options.victims :], every.labels[options.victims :])
    names = [str(policy) for policy in random_policies(options.policies, derive_generator(0, "experiment", "policies"))]
    goals = [transformed_as(attacked, name, "paper") for name in names]
    guessed = {
        "PSNR of noise": [start_like(goal) for goal in goals],
        "PSNR of a plain image": [goal.mean((2, 3), keepdim=True).expand_as(goal) for goal in goals],
    }
    scores = scores_of(model, scored, names)
    told: Row = {"stage": stage, "accuracy": accuracy(model, data.test), **key_of(options)}
    if options.program:
        scores = {"code": scores["code"], "program": scores_by_program(model, scored, names, options.program)}
        alike = pearsonr(*([scores[by][name] for name in names] for by in scores)).statistic
        print(kept.add({"policy": "our score with theirs", **told}, {"pearson": {"mean": alike, "n": len(names)}}))
    for variant in scores:
        own = [scores[variant][name] for name in names]
        for what, guesses in guessed.items():
            quality = [float(psnr(guess, goal).mean()) for guess, goal in zip(guesses, goals, strict=True)]
            found = pearsonr(own, quality)
            low, high = found.confidence_interval()
            figures = {"mean": found.statistic, "ci95": [low, high], "n": len(names)}
            key: Row = {"policy": f"score with {what}", "score": variant, **told}
            print(kept.add(key, {"pearson": figures, "spearman": spearmanr(own, quality).statistic}), flush=True)


def scores_by_program(model: nn.Module, batch: Batch, policies: Sequence[str], program: Path) -> dict[str, float]:
    """Score policies by the authors' function `reconstruct`, mean over the images as in their `main`.

    Of their file only the functions are run that it needs, on images normalized as theirs are, from the noise that our
    score starts from; their tensors stay where they are made.
    """
    tree = ast.parse((program / "benchmark" / "search_transform_attack.py").read_text())
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS]
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    there: dict[str, Any] = {
        "torch": torch,
        "F": functional,
        "opt": SimpleNamespace(data="cifar100"),
        "setup": {"dtype": torch.float, "device": torch.device("cpu")},
        "inversefed": SimpleNamespace(consts=SimpleNamespace(cifar10_mean=MEAN, cifar10_std=STD)),
        "num_images": 1,
        "ViTForImageClassification": type(None),
    }
    exec(compile(ast.Module([*wanted], []), "search_transform_attack.py", "exec"), there)
    own = Normalized(model, mean, std)
    own.eval()
    starts = torch.rand(batch.inputs.shape, generator=derive_generator(0, "search", "start"))
    found = {}
    for name in policies:
        goals = transformed_by(batch.inputs, Policy.parse(name, "paper"), seed=0)
        goals = (goals - mean[:, None, None]) / std[:, None, None]
        loader = SimpleNamespace(dataset=list(zip(goals, batch.labels.tolist(), strict=True)))
        with patch.object(torch.Tensor, "cuda", lambda tensor: tensor), patch.object(torch, "rand") as drawn:
            drawn.side_effect = list(starts.unsqueeze(1))
            areas = [there["reconstruct"](k, own, functional.cross_entropy, None, loader) for k in range(len(goals))]
        found[name] = sum(areas) / len(areas)
    return found


class Normalized(nn.Module):
    """A network that takes normalized images, in front of one that takes images in [0, 1]."""

    def __init__(self, model: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.model, self.mean, self.std = model, mean[:, None, None], std[:, None, None]

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, 3, H, W) normalized images to logits."""
        logits: Tensor = self.model(images * self.std + self.mean)
        return logits


def key_of(options: argparse.Namespace) -> Row:
    """Return the fields that name a measurement."""
    return {name: getattr(options, name) for name in ("network", "epochs", "policies", "victims", "scored")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--weights", type=Path, required=True, help="folder of the networks")
    parser.add_argument("--network", choices=("untrained", "lenet"), default="untrained", help="ResNet-20 or LeNet")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--policies", type=int, default=100)
    parser.add_argument("--victims", type=int, default=10, help="images whose PSNR to noise counts")
    parser.add_argument("--scored", type=int, default=10, help="images")
    parser.add_argument("--program", type=Path, help="checkout of the authors' code, whose scores are compared")
    takes_rows(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = RowFile(options.out)
    train_all(options)
    by = {"score": "program"} if options.program else {}
    for stage in STAGES[-1:] if options.program else STAGES:
        if kept.find({"stage": stage, **key_of(options), **by}) is None:
            add_rows(stage, options, kept)


if __name__ == "__main__":
    main()
