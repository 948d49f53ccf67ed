"""What bfloat16 and channels-last memory save of an attack's time, and what bfloat16 costs the reconstruction.

    python experiments/number_formats.py --out experiments/rows/number_formats

Times are of one evaluation of the loss and its derivative by the images, as published attacks run it, and of single
convolutions with both derivatives; the other format's beside float32's in turn in one process, CPU time, medians and
quartiles of the ratios. PSNR is of the same attack from the same start on photographs, with the products in either
precision and pixels, weights and gradients kept in float32. Rows that are there already are kept.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import attack_speed
import torch
from row_file import RowFile, takes_rows
from torch import Tensor, nn

from fl_privacy.data import load_data
from fl_privacy.measure.images import psnr
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

FORMATS = ("bfloat16", "channels_last")
CONVOLUTIONS = {
    "lenet": (12, 12, 5, 16),
    "convnet": (32, 64, 3, 32),
    "resnet20": (64, 64, 3, 8),
    "resnet18": (64, 64, 3, 32),
}
"""Channels in and out, width of the kernel, and height of the images."""


def precision(name: str):
    """Choose bfloat16 products, or leave the precision as it is."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if name == "bfloat16" else nullcontext()


def laid_out(name: str) -> torch.memory_format:
    return torch.channels_last if name == "channels_last" else torch.contiguous_format


def ratios(make: Callable[[str], Callable[[], object]], format: str, repeats: int) -> dict[str, float]:
    """Measure how many times as fast a format is as float32 in contiguous layout."""
    usual, other = make("float32"), make(format)
    taken = []
    for _ in range(repeats + 1):
        pair = []
        for work in (usual, other):
            began = time.process_time()
            work()
            pair.append(time.process_time() - began)
        taken.append(pair)
    low, middle, high = statistics.quantiles([a / b for a, b in taken[1:]], n=4, method="inclusive")
    return {"faster": middle, "faster_low": low, "faster_high": high, "pairs": repeats}


def convolution(model: str, images: int) -> Callable[[str], Callable[[], object]]:
    """Make one of ``model``'s convolutions with its derivatives."""
    inner, outer, kernel, size = CONVOLUTIONS[model]

    def make(format: str) -> Callable[[], object]:
        layout = laid_out(format)
        layer = nn.Conv2d(inner, outer, kernel, padding=kernel // 2).to(memory_format=layout)
        inputs = torch.rand(images, inner, size, size).contiguous(memory_format=layout).requires_grad_()

        def work() -> None:
            with precision(format):
                outputs = layer(inputs)
            torch.autograd.grad(outputs.float().square().sum(), (inputs, layer.weight))

        return work

    return make


def evaluation(model: str, evaluations: int) -> Callable[[str], Callable[[], object]]:
    """Make some evaluations of the loss of one victim."""

    def make(format: str) -> Callable[[], object]:
        torch.manual_seed(0)
        network, layout = attack_speed.MODELS[model](), laid_out(format)
        (seen,) = attack_speed.observe(network, 1, "cpu")
        loop = attack_speed.Loop(network.to(memory_format=layout), seen, lean=True)
        image = torch.rand(1, 3, 32, 32).contiguous(memory_format=layout).requires_grad_()

        def work() -> None:
            for _ in range(evaluations):
                with precision(format):
                    loss = loop.cosine(image)
                torch.autograd.grad(loss, image)

        return work

    return make


def observed(model: nn.Module, image: Tensor, label: Tensor) -> Observation:
    sent, plan = ModelState.of(model), LocalPlan(batch_norm="eval")
    tensors = loss_gradients(model, sent, Batch(image, label), batch_norm="eval").gradients
    return Observation(
        id=VictimId(0, 0, 0),
        model=model,
        sent=sent,
        upload=Upload(tensors=tensors, num_examples=1),
        plan=plan,
        input_shape=tuple(image.shape[1:]),
        num_classes=10,
        knowledge=Knowledge(labels=label),
    )


def reconstructed(model: str, photograph: Batch, format: str, iterations: int) -> float:
    """Attack one photograph with ``iterations`` steps of signed Adam; return the PSNR of its reconstruction."""
    torch.manual_seed(0)
    network = attack_speed.MODELS[model]().eval()
    loop = attack_speed.Loop(network, observed(network, photograph.inputs, photograph.labels), lean=True)
    image = torch.rand(photograph.inputs.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    optimizer = torch.optim.Adam([image], lr=0.1)
    falling = torch.optim.lr_scheduler.MultiStepLR(optimizer, [int(iterations * k) for k in (0.375, 0.625, 0.875)], 0.1)
    for _ in range(iterations):
        with precision(format):
            loss = loop.cosine(image)
        (image.grad,) = torch.autograd.grad(loss, image)
        image.grad.sign_()
        optimizer.step()
        falling.step()
        with torch.no_grad():
            image.clamp_(0, 1)
    return float(psnr(image.detach(), photograph.inputs).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CONVOLUTIONS), default=list(CONVOLUTIONS))
    parser.add_argument("--images", type=int, default=8, help="that a single convolution takes at once")
    parser.add_argument("--evaluations", type=int, default=5, help="of a measurement")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--victims", type=int, default=8, help="photographs")
    parser.add_argument("--iterations", type=int, default=300, help="of the attack")
    parser.add_argument("--data", default="cifar10_exact")
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    torch.set_num_threads(1)
    for model in options.models:
        made = {"evaluation": evaluation(model, options.evaluations), "convolution": convolution(model, options.images)}
        for item, make in made.items():
            for format in FORMATS:
                key = {"item": item, "of": model, "format": format}
                row = kept.find(key) or kept.add(key, ratios(make, format, options.repeats))
                print(
                    f"{item:11} {model:9} {format:13} {row['faster']:.2f} times as fast"
                    f" [{row['faster_low']:.2f}, {row['faster_high']:.2f}]",
                    flush=True,
                )
    photographs = load_data(options.data).test
    for model in options.models:
        for format in ("float32", "bfloat16"):
            key = {"attacked": model, "format": format, "iterations": options.iterations}
            row = kept.find(key)
            if row is None:
                batches = [photographs.batch(torch.tensor([number])) for number in range(options.victims)]
                found = [reconstructed(model, batch, format, options.iterations) for batch in batches]
                row = kept.add(key, {"psnr": statistics.mean(found), "victims": options.victims})
            print(f"PSNR        {model:9} {format:13} {row['psnr']:.1f} dB", flush=True)


if __name__ == "__main__":
    main()
