"""``make picture``: what a server reads of four photographs, undefended and defended; the README's picture.

The photographs are those of the package scikit-image, in the public domain or under CC0: astronaut (NASA), cat
(S. van der Walt), coffee (R. Michel), rocket (SpaceX).
"""

import io
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fl_privacy.cli.main import run_command_line
from fl_privacy.runs.folder import Attacker, read_run

RUNS = "runs/picture"
"""Where finished attacks are kept, so that it goes on where it was stopped."""

TARGET = Path(__file__).resolve().parent / "assets" / "picture.png"
COMMON = "data=photograph data.image_size=32 model=lenet_dlg attack=auto victims=4"
ROWS = {
    "read, undefended": "defense=none",
    "read through 8 bits": "defense=quantization",
    "read through pruning": "defense=pruning defense.rate=0.9 threat_model=adaptive",
}


def read(settings: str) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Run an attack; return originals, the better attacker's guesses, and their mean PSNR in dB."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = run_command_line(["attack", *COMMON.split(), *settings.split(), f"out={RUNS}"])
    if status:
        raise SystemExit(f"fl-privacy attack {COMMON} {settings} ended with status {status}")
    run = read_run(Path(printed.getvalue().splitlines()[-1]))
    pairs, _ = run.read_pairs()
    shown = [pairs[key] for key in sorted(pairs)]
    means = {who: found.metrics["psnr"].mean for who in Attacker if (found := run.summary.last_by(who))}
    most = max(means, key=lambda who: means[who])
    guesses = [pair.adaptive if most is Attacker.ADAPTIVE else pair.guess for pair in shown]
    return [pair.original for pair in shown], guesses, means[most]


def main() -> None:
    """Draw the rows."""
    rows: list[tuple[str, list[np.ndarray]]] = []
    for name, settings in ROWS.items():
        originals, guesses, psnr = read(settings)
        rows += [("clients' images", originals)] if not rows else []
        rows.append((f"{name}\n{psnr:.1f} dB", guesses))
        print(f"{name}: {psnr:.1f} dB", flush=True)
    figure = Figure(figsize=(6.4, 1.22 * len(rows)), dpi=100, facecolor="white")
    axes = figure.subplots(len(rows), len(rows[0][1]), squeeze=False)
    for line, (name, images) in zip(axes, rows, strict=True):
        for axis, image in zip(line, images, strict=True):
            axis.imshow(image.transpose(1, 2, 0), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, labelpad=8)
    figure.subplots_adjust(left=0.25, right=0.99, top=0.99, bottom=0.01, wspace=0.04, hspace=0.04)
    figure.savefig(TARGET, pil_kwargs={"optimize": True})
    print(f"{TARGET} ({TARGET.stat().st_size >> 10} kB)")


if __name__ == "__main__":
    main()
