"""``make gallery``: every attack and every defense on the same six digits, a picture and its figures each.

The pictures and ``figures.json`` are what the pages of the methods show. What is there already is kept; ``--again``
makes it anew, and names (``defense-spn``) choose.
"""

import argparse
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import yaml
from PIL import Image

from fl_privacy.cli.main import run_command_line
from fl_privacy.runs.config.compose import merge_overrides
from fl_privacy.runs.folder import Attacker, LeakageResult, read_run

DOCS = Path(__file__).resolve().parent
GALLERY = DOCS / "assets" / "gallery"
VICTIMS = 6
LARGER = 2

COMMON = "data=mnist_mini model=lenet_dlg victims=6"
QUICK = "attack=idlg attack.iterations=100 threat_model=adaptive"
"""By which defenses are attacked."""

SPECIAL = {
    "attack-auto": "attack=auto attack.budget=quick",
    "attack-analytic": "model=mlp attack=analytic",
    "attack-cocktail_party": "model=mlp attack=cocktail_party batch_size=4",
    "attack-maximum_a_posteriori": "model=lenet defense=quantization defense.bits=1 attack=maximum_a_posteriori"
    " threat_model=strongest",
    "attack-blind_deconvolution": "model=lenet defense=split_fed attack=blind_deconvolution threat_model=strongest",
    "attack-exact": "model=mlp attack=exact",
    "attack-sme": "model=lenet federation=fedavg federation.plan.epochs=null federation.plan.steps=20"
    " federation.plan.lr=0.01 federation.plan.momentum=0 attack=sme",
    "attack-adam_dlg": "attack=adam_dlg attack.iterations=1000 attack.lr=0.1",
    "attack-inverting_gradients": "model=lenet attack=inverting_gradients attack.iterations=300",
    "attack-grad_inversion": "attack=grad_inversion attack.iterations=300",
    "attack-ats_adam_cosine": "model=lenet attack=ats_adam_cosine attack.iterations=300",
    "attack-model_inversion": "model=lenet5 defense=split_fed attack=model_inversion attack.lr=1 attack.iterations=60"
    " attack.line_search=strong_wolfe threat_model=shown_features",
    "attack-refiner_aware": "model=lenet defense=refiner attack=refiner_aware attack.iterations=300",
    "attack-sapag": "attack=sapag attack.iterations=100",
    "defense-split_fed": "model=lenet5 defense=split_fed attack=inverting_gradients attack.iterations=200"
    " threat_model=adaptive",
    "defense-fdl_pp": "model=lenet5 defense=fdl_pp attack=inverting_gradients attack.iterations=200"
    " threat_model=adaptive",
}
"""Where the common settings do not fit."""


def jobs() -> dict[str, str]:
    """Name of the picture -> settings of its attack."""
    told = yaml.safe_load((DOCS / "methods.yaml").read_text())
    found = {}
    usual = {"attack": "attack={} attack.iterations=100", "defense": "defense={} " + QUICK}
    for kind, settings in usual.items():
        for method in told[kind].values():
            if "needs" not in method:
                name = method["options"][0]
                found[f"{kind}-{name}"] = settings.format(name)
    told = {name: SPECIAL.get(name, settings).split() for name, settings in found.items()}
    return {name: " ".join(merge_overrides(COMMON.split(), settings)) for name, settings in told.items()}


def make(name: str, settings: str) -> dict[str, object]:
    """Attack, keep the picture, and return the figures."""
    with TemporaryDirectory() as out:
        printed = io.StringIO()
        with redirect_stdout(printed):
            status = run_command_line(["attack", *settings.split(), f"out={out}"])
        if status:
            raise SystemExit(f"{name}: fl-privacy attack {settings} ended with status {status}")
        run = read_run(Path(printed.getvalue().splitlines()[-1]))
        pairs, _ = run.read_pairs()
        shown = [pairs[key] for key in sorted(pairs)][:VICTIMS]
        rows = [[getattr(pair, which) for pair in shown] for which in ("original", "guess", "adaptive")]
        kept = [row for row in rows if any(image is not None for image in row)]
        like = shown[0].original
        pixels = np.concatenate([np.concatenate([_framed(image, like) for image in row], 2) for row in kept], 1)
        picture = Image.fromarray(pixels[0])
        size = (picture.width * LARGER, picture.height * LARGER)
        picture.resize(size, Image.Resampling.NEAREST).save(GALLERY / f"{name}.png", optimize=True)
        by = {attacker: found for attacker in Attacker if (found := run.summary.last_by(attacker))}
    return {"command": f"fl-privacy attack {settings}", "by": {str(who): _figures(what) for who, what in by.items()}}


def _figures(leakage: LeakageResult) -> dict[str, object]:
    psnr = leakage.metrics["psnr"]
    recognizable = next(bound.recognizable for bound in leakage.thresholds if bound.metric == "psnr")
    return {"mean": psnr.mean, "ci95": psnr.ci95, "n": psnr.n, "recognizable": recognizable}


def _framed(image: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    """Put a white frame around an image; a grey one stands in for a missing image."""
    shown = np.full_like(like, 128) if image is None else image
    return np.pad(shown, ((0, 0), (2, 2), (2, 2)), constant_values=255)


def main() -> None:
    """Make what is missing or was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as attack-dlg; all that are missing by default")
    parser.add_argument("--again", action="store_true", help="also draw what is there")
    asked = parser.parse_args()
    chosen = asked.names
    GALLERY.mkdir(parents=True, exist_ok=True)
    path = GALLERY / "figures.json"
    figures = json.loads(path.read_text()) if path.is_file() else {}
    for name, settings in jobs().items():
        there = name in figures and (GALLERY / f"{name}.png").is_file() and not asked.again
        if there or (chosen and name not in chosen):
            continue
        print(name, flush=True)
        figures[name] = make(name, settings)
        path.write_text(json.dumps(dict(sorted(figures.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
