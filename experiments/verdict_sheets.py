"""Runs over defenses, data sets and models, and sheets of their pictures to look at before the headline is read.

    python experiments/verdict_sheets.py --work runs/verdict_sheets
    python experiments/verdict_sheets.py --judged judged.txt --out experiments/rows/verdict_sheets

Each of ``RUNS`` is run once (what is finished is kept), and its originals and reconstructions are drawn as
``sheet-N.png`` under the run's number alone. Look at the sheets and write down for each number how many images a person
would say are shown: a line each, number and count, in the file that ``--judged`` names. Then a row of each such run
keeps that count beside what its page says, and ``--headlines`` prints the first line of each page.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from row_file import RowFile, takes_rows

from fl_privacy.report.headline import headline_of
from fl_privacy.runs.folder import read_run, verdict_of

INVERTING = "attack=inverting_gradients attack.iterations=300 attack.restarts=1"
AUTO = "attack=auto attack.budget=20"
SMALL = "victims=4"

RUNS = (
    *(
        f"attack {SMALL} data=cifar10_exact model=lenet {INVERTING} defense={defense}"
        for defense in (
            "none",
            "dp_noise defense.scale=0.001",
            "dp_noise defense.scale=0.01",
            "dp_noise defense.scale=0.1",
            "pruning defense.rate=0.9",
            "pruning defense.rate=0.99",
            "quantization defense.bits=4",
            "quantization defense.bits=1",
            "soteria",
            "soteria_mixing",
            "instahide",
            "ats",
        )
    ),
    *(
        f"attack {SMALL} data=mnist model=lenet {INVERTING} defense={defense}"
        for defense in ("none", "dp_noise defense.scale=0.01", "pruning defense.rate=0.99", "spn", "local_dp", "ppdl")
    ),
    *(
        f"attack {SMALL} data=olivetti model=lenet {INVERTING} defense={defense}"
        for defense in ("none", "dp_noise defense.scale=0.003", "quantization defense.bits=2", "dp_sgd")
    ),
    *(
        f"attack {SMALL} data=fashion_mnist model=mlp attack=analytic defense={defense}"
        for defense in (
            "none",
            "dp_noise defense.scale=0.001",
            "dp_noise defense.scale=0.1",
            "pruning defense.rate=0.99",
        )
    ),
    *(
        f"attack {SMALL} data=cifar10_exact model=resnet20 attack=inverting_gradients attack.iterations=150 defense={d}"
        for d in ("none", "pruning defense.rate=0.9", "dp_noise defense.scale=0.01")
    ),
    *(
        f"attack {SMALL} data=cifar10_exact model=lenet {INVERTING} threat_model=adaptive defense={defense}"
        for defense in (
            "pruning defense.rate=0.99",
            "quantization defense.bits=1",
            "dp_noise defense.scale=0.01",
            "spn",
        )
    ),
    f"attack victims=2 data=cifar10_exact model=lenet {INVERTING} federation.plan.batch_size=4",
    f"attack victims=2 data=mnist model=convnet {INVERTING} federation.plan.batch_size=2",
    f"attack victims=2 data=cifar10_exact model=lenet {INVERTING} federation=fedavg",
    f"attack {SMALL} data=cifar10_exact model=lenet attack=inverting_gradients attack.iterations=3",
    f"attack {SMALL} data=tiny_imagenet model=lenet {INVERTING}",
    f"attack {SMALL} data=olivetti model=lenet {AUTO} defense=pruning defense.rate=0.9",
    f"attack {SMALL} data=mnist model=lenet {AUTO} defense=dp_noise defense.scale=0.1",
)
"""Forty of them."""

_HEIGHT, _PER_SHEET = 96, 5


def main() -> None:
    """Run what is missing, and draw the sheets or print the headlines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/verdict_sheets"), help="folder of runs and sheets")
    parser.add_argument("--judged", type=Path, help="file of a line for each run: number, images that a person sees")
    takes_rows(parser)
    parser.add_argument("--headlines", action="store_true", help="print the first line of each run's page")
    options = parser.parse_args()
    if options.judged:
        _keep(options.judged.read_text(), options.work, RowFile(options.out))
        return
    folders = [_run(options.work, number, words) for number, words in enumerate(RUNS)]
    if options.headlines:
        for number, folder in enumerate(folders):
            print(f"{number:2d} {RUNS[number]}\n   {_headline(folder)}")
        return
    for first in range(0, len(folders), _PER_SHEET):
        rows = [_strip(number, folder) for number, folder in list(enumerate(folders))[first : first + _PER_SHEET]]
        sheet = Image.new("RGB", (max(r.width for r in rows), sum(r.height for r in rows)), "white")
        top = 0
        for row in rows:
            sheet.paste(row, (0, top))
            top += row.height
        sheet.save(options.work / f"sheet-{first // _PER_SHEET}.png")
    print(options.work)


def _keep(judged: str, work: Path, kept: RowFile) -> None:
    """Keep a row of each run that was looked at."""
    for line in filter(None, map(str.split, judged.splitlines())):
        number = int(line[0])
        folder = _run(work, number, RUNS[number])
        if folder is None:
            continue
        verdict = verdict_of(read_run(folder))
        counts, exposed = verdict.counts, verdict.exposed
        row = kept.add(
            {"run": RUNS[number].removeprefix("attack ").replace(INVERTING, "IG")},
            {
                "a person sees": int(line[1]),
                "the page says": counts.read,
                "in their place": exposed.recognizable if exposed else 0,
                "of": counts.judged,
                "tone": str(verdict.tone),
            },
        )
        print(number, row)


def _run(out: Path, number: int, words: str) -> Path | None:
    """Return the folder of a run's only finished folder, run first where it is missing; ``None`` if it failed."""
    place = out / f"{number:02d}"
    if not (found := [*place.glob("*/summary.json")]):
        command = [sys.executable, "-m", "fl_privacy", *words.split(), f"out={place}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{number}: {words}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        found = [*place.glob("*/summary.json")]
    return found[0].parent if found else None


def _headline(folder: Path | None) -> str:
    if folder is None:
        return "failed"
    verdict = verdict_of(read_run(folder))
    return f"{verdict.tone}: {headline_of(verdict)}"


def _strip(number: int, folder: Path | None) -> Image.Image:
    """Draw a run's originals above what the plain and the adaptive attacker made of them."""
    pairs = [] if folder is None else [*read_run(folder).read_pairs()[0].values()][:8]
    strip = Image.new("RGB", (40 + (_HEIGHT + 4) * 8, 3 * (_HEIGHT + 4) + 8), "white")
    ImageDraw.Draw(strip).text((4, _HEIGHT), str(number), fill="black")
    for place, pair in enumerate(pairs):
        for row, pixels in enumerate((pair.original, pair.guess, pair.adaptive)):
            if pixels is not None:
                shown = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
                image = Image.fromarray(np.ascontiguousarray(shown)).convert("RGB")
                at = (40 + place * (_HEIGHT + 4), row * (_HEIGHT + 4))
                strip.paste(image.resize((_HEIGHT, _HEIGHT), Image.Resampling.NEAREST), at)
    return strip


if __name__ == "__main__":
    main()
