"""What an encrypted linear layer costs, and what training under encryption would cost by that measure.

    python experiments/encrypted_layer.py --inputs 784 --outputs 84

Measures, with TenSEAL CKKS, one vector times a plain matrix and the squaring that stands for an activation in
CryptoNets (Gilad-Bachrach et al. 2016). The extrapolation multiplies the seconds of one product by the
multiplications of a training step and by the number of steps; it leaves out the bootstrapping that training would need
and is an estimate from below.
"""

import argparse
import time

import numpy as np
import tenseal
import torch
from row_file import RowFile, takes_rows
from torch import nn

from fl_privacy.models import LeNet5


def multiplications(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Count the multiplications in a forward pass of one image."""
    counted: list[int] = []

    def count(layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        positions = output[0].numel() // output.shape[1]
        counted.append(layer.weight[0].numel() * output.shape[1] * positions)  # type: ignore[operator,index]

    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    model(torch.zeros(1, *shape))
    for handle in handles:
        handle.remove()
    return sum(counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=784)
    parser.add_argument("--outputs", type=int, default=84)
    parser.add_argument("--repeats", type=int, default=3)
    takes_rows(parser)
    options = parser.parse_args()
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 8192, coeff_mod_bit_sizes=[60, 40, 40, 60])
    context.global_scale = 2**40
    context.generate_galois_keys()
    rng = np.random.default_rng(0)
    values = rng.normal(size=options.inputs)
    matrix = rng.normal(size=(options.inputs, options.outputs)) / np.sqrt(options.inputs)
    encrypted = tenseal.ckks_vector(context, values.tolist())
    product, seconds = encrypted, []
    for _ in range(options.repeats):
        started = time.process_time()
        product = encrypted.mm(matrix.tolist())
        seconds.append(time.process_time() - started)
    error = float(np.abs(np.array(product.decrypt()) - values @ matrix).max())
    started = time.process_time()
    squared = product.square()
    squaring = time.process_time() - started
    size = len(squared.serialize())
    layer = sorted(seconds)[len(seconds) // 2]
    each = layer / (options.inputs * options.outputs)
    print(f"{options.inputs} x {options.outputs}: {layer:.2f} CPU seconds (error {error:.1e})")
    print(f"squaring the result: {squaring:.3f} CPU seconds, {size} bytes")
    needed = multiplications(LeNet5(in_channels=1, image_size=28, num_classes=10), (1, 28, 28))
    forward = each * needed
    epoch = 3 * forward * 60_000
    print(f"LeNet5 on one image: {needed} multiplications, extrapolated to {forward:.1f} s forward")
    RowFile(options.out).add(
        {"inputs": options.inputs, "outputs": options.outputs},
        {"cpu_seconds": layer, "repeats": options.repeats, "forward_seconds": forward, "epoch_days": epoch / 86_400},
    )
    print(f"An epoch of 60,000 images, forward and twice that backward, extrapolated to {epoch / 86_400:.0f} days")


if __name__ == "__main__":
    main()
