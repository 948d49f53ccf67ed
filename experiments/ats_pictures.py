"""Clean images, what an attack reads of them, what ATS makes of them, what an attack reads then (ATS, Figures 8, 9).

    python experiments/ats_pictures.py CLEAN_RUN DEFENDED_RUN --out pictures.png

Takes two finished attacks on the same victims: with `defense=none` and with `defense=ats`.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from fl_privacy.runs.folder import Pair, Run, read_run

ROWS = ("clean", "read of it", "transformed", "read of it")


def pictures(run: Run) -> dict[tuple[str, int], Pair]:
    pairs, problems = run.read_pairs()
    for problem in problems:
        print(problem)
    return dict(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clean", type=Path)
    parser.add_argument("defended", type=Path)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("ats.png"))
    arguments = parser.parse_args()
    mpl.use("agg")
    clean, defended = read_run(arguments.clean), read_run(arguments.defended)
    ours, theirs = pictures(clean), pictures(defended)
    keys = [key for key in ours if key in theirs][: arguments.images]
    names = ("psnr", "transformed_psnr")
    figures = {
        run: {(v["id"], v["image"]): v.get(name) for v in run.of_kind("image")}
        for run, name in zip((clean, defended), names, strict=True)
    }
    figure = Figure(figsize=(1.1 * len(keys) + 1, 4.8), layout="constrained", dpi=150)
    cells = figure.subplots(len(ROWS), len(keys), squeeze=False)
    for column, key in enumerate(keys):
        images = (ours[key].original, ours[key].guess, theirs[key].transformed, theirs[key].guess)
        captions = ("", figures[clean][key], "", figures[defended][key])
        for row, (image, caption) in enumerate(zip(images, captions, strict=True)):
            cell = cells[row][column]
            cell.set(xticks=[], yticks=[])
            cell.set_xlabel(f"{caption:.1f} dB" if caption else "", fontsize=7)
            if column == 0:
                cell.set_ylabel(ROWS[row], fontsize=8)
            if image is not None:
                shown = image.transpose(1, 2, 0)
                cell.imshow(shown, cmap="gray", vmin=0, vmax=255)
    figure.savefig(arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
