"""How large a batch ``attack=exact`` reads in front of a ReLU, and how long it takes: CPU seconds a victim.

python experiments/exact_batches.py --layers 1024x8 512x20 1024x32
"""

import argparse
import time

import torch
from row_file import RowFile, takes_rows

from fl_privacy.attacks import ExactInversion
from fl_privacy.data import load_data
from fl_privacy.measure import evaluate_all
from fl_privacy.models import MLP, build_model
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.types import Batch, Certainty, LocalPlan, ModelState, Observation, Upload, VictimId


def observe(width: int, truth: Batch, victim: int, seed: int) -> Observation:
    """Observe the gradient of ``truth`` by an untrained network whose first layer has ``width`` outputs."""
    settings = {"widths": [width, 128], "mean": [0.5], "std": [0.25]}
    channels, size = truth.inputs.shape[1:3]
    model = build_model(MLP, seed=seed, in_channels=channels, image_size=size, num_classes=10, **settings).eval()
    sent = ModelState.of(model)
    return Observation(
        id=VictimId(0, 0, victim),
        model=model,
        sent=sent,
        upload=Upload(tensors=loss_gradients(model, sent, truth).gradients, num_examples=len(truth)),
        plan=LocalPlan(),
        input_shape=tuple(truth.inputs.shape[1:]),
        num_classes=10,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=["1024x8", "512x20", "1024x32"], help="outputs x batch size")
    parser.add_argument("--data", default="cifar10_exact")
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    takes_rows(parser)
    options = parser.parse_args()
    kept = RowFile(options.out)
    torch.set_num_threads(1)
    images = load_data(options.data).test
    print("| outputs | batch | proven | worst image, dB | CPU seconds a victim |\n|---|---|---|---|---|")
    for layer in options.layers:
        width, count = map(int, layer.split("x"))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
        truths = [images.batch(order[v * count : (v + 1) * count]) for v in range(options.victims)]
        seen = [observe(width, truth, victim, options.seed) for victim, truth in enumerate(truths)]
        began = time.process_time()
        found = ExactInversion()(seen, seed=options.seed)
        took = (time.process_time() - began) / len(seen)
        proven = sum(one.certainty is Certainty.PROVEN for one in found)
        worst = min(image.values["psnr"] for score in evaluate_all(found, truths) for image in score.images)
        key = {"outputs": width, "batch": count, "victims": options.victims, "data": options.data}
        kept.add(key, {"proven": proven / len(found), "worst_psnr": worst, "cpu_seconds": took})
        print(f"| {width} | {count} | {proven} of {len(found)} | {worst:.0f} | {took:.2f} |", flush=True)


if __name__ == "__main__":
    main()
