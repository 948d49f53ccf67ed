"""What NVFlare's PercentilePrivacy hides: updates of one image in one step behind it, audited as two files.

    python experiments/nvflare_filters.py --network lenet --victims 24 --out experiments/rows/nvflare_filters
    python experiments/nvflare_filters.py --network resnet18 --each 1 --out experiments/rows/nvflare_filters

A row for each audit, of ``--each`` updates: lossless CIFAR-10 images that ``fl-privacy audit-update`` reconstructs
without knowledge of the filter, next to the control, the guesses at other updates; and the share of values that the
filter made zero, and the number that it cut, in an update. Networks have their initial values; batch norm normalizes by
the statistics sent. A number as ``--budget`` is seconds for an image.

Behind blocks, equations of one image begin at a convolution whose input all paths pass, if it has channels and taps
enough for the positions. The row counts convolutions, those passed by all paths, and those where equations can begin.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torchvision
from PIL import Image
from row_file import RowFile, takes_rows
from safetensors.torch import save_file
from torch import nn

from fl_privacy.attacks.exact.residual import Residual, _shapes, can_be_blind, input_of, traced
from fl_privacy.auditing.update_audit import UpdateAuditRequest, audit_update
from fl_privacy.data import load_data
from fl_privacy.defenses import percentile
from fl_privacy.models import LeNet

NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    "lenet": (partial(LeNet, num_classes=10, in_channels=3, image_size=32), 32),
    "resnet18": (partial(torchvision.models.resnet18, num_classes=10), 32),
    "densenet121": (partial(torchvision.models.densenet121, num_classes=10), 64),
}
LR = 0.1


def made(network: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[network][0]().eval()


def equations_of(network: str) -> dict[str, int]:
    """Count a network's convolutions, and those at which equations can begin; nothing for a chain of layers."""
    graph, side = traced(made(network).double()), NETWORKS[network][1]
    assert graph is not None and graph.logits is not None
    found = Residual(graph, graph.logits, _shapes(graph, torch.zeros(1, 3, side, side, dtype=torch.float64)))
    passed = [node for node in found.convolutions if input_of(node) in set(found.cuts)]
    if len(passed) == len(found.convolutions):
        return {}
    begin = sum(can_be_blind(found.convolution(node)) for node in passed)
    return {"convolutions": len(found.convolutions), "passed_by_all": len(passed), "begin": begin}


def audited(
    network: str, place: Path, *, first: int, victims: int, share: float, gamma: float, budget: str | float
) -> dict[str, object]:
    net, side = made(network), NETWORKS[network][1]
    test = load_data("cifar10_exact").test
    save_file(net.state_dict(), place / "before.safetensors")
    for folder in ("updates", "others"):
        (place / folder).mkdir()
    defense, dropped, cut = percentile(percentile=share, gamma=gamma), 0.0, 0
    for number in range(first, (end := first + victims) + 300):
        pixels = Image.fromarray(test.images[number].permute(1, 2, 0).numpy())
        pixels = pixels.resize((side, side), Image.Resampling.BICUBIC)
        name = f"victim-{number:02d}"
        folder = place / "truth" / name if number < end else place / "others"
        folder.mkdir(parents=True, exist_ok=True)
        pixels.save(folder / f"{name}.png")
        if number >= end:
            continue
        image = torchvision.transforms.functional.to_tensor(pixels)[None]
        loss = nn.functional.cross_entropy(net(image), test.labels[number : number + 1])
        found = torch.autograd.grad(loss, list(net.parameters()))
        names = [name for name, _ in net.named_parameters()]
        step = {name: -LR * gradient for name, gradient in zip(names, found, strict=True)}
        filtered = defense.apply(step)
        lost = sum(int(((change == 0) & (step[name] != 0)).sum()) for name, change in filtered.items())
        dropped += lost / sum(change.numel() for change in filtered.values()) / victims
        cut += sum(int((change.abs() < step[name].abs()).sum()) for name, change in filtered.items()) - lost
        after = dict(net.state_dict())
        after |= {name: after[name] + change for name, change in filtered.items()}
        save_file(after, place / "updates" / f"{name}.safetensors")
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom nvflare_filters import made\n"
    (place / "net.py").write_text(f"{code}def net(): return made({network!r})\n")
    began = time.process_time()
    done = audit_update(
        UpdateAuditRequest(
            before=place / "before.safetensors",
            after=place / "updates",
            model=f"{place}/net.py:net",
            shape=(3, side, side),
            examples=(1,),
            data=place / "truth",
            others=place / "others",
            out=place / "out",
            budget=budget,
        )
    )
    (answer,) = done.answers
    counts, control = answer.counts, answer.control
    assert counts is not None, answer.reason
    return {
        "reconstructed": counts.read,
        "of": counts.judged + counts.failures,
        "low": counts.interval[0],
        "high": counts.interval[1],
        "control": None if control is None else control.read,
        **equations_of(network),
        "share_dropped": round(dropped, 6),
        "values_cut": round(cut / victims),
        "first_line": done.record().headline,
        "seconds": round(time.process_time() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=list(NETWORKS), default="lenet")
    parser.add_argument("--victims", type=int, default=24)
    parser.add_argument("--percentile", type=float, default=10)
    parser.add_argument("--gamma", type=float, default=0.01)
    parser.add_argument("--each", type=int, help="updates of an audit; default all")
    parser.add_argument("--budget", default="quick")
    takes_rows(parser)
    options = parser.parse_args()
    kept, each = RowFile(options.out), options.each or options.victims
    key = {name: getattr(options, name) for name in ("network", "percentile", "gamma", "budget")}
    for first in range(0, options.victims, each):
        own = {**key, "first": first, "victims": min(each, options.victims - first)}
        if kept.find(own) is None:
            with tempfile.TemporaryDirectory() as place:
                budget = float(options.budget) if options.budget.isdigit() else options.budget
                given = {"share": options.percentile, "gamma": options.gamma, "budget": budget}
                row = audited(options.network, Path(place), first=first, victims=own["victims"], **given)
            print(kept.add(own, row), flush=True)


if __name__ == "__main__":
    main()
