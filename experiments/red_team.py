"""The strongest attacker against each defense: by 1 to 1,000 uploads, with and without public images, beside a control.

    python experiments/red_team.py --out runs/red_team --minutes 60
    python experiments/red_team.py --out runs/red_team --minutes 0    # the table of what there is
    python experiments/red_team.py --out runs/red_team --version before --only auto   # older package

Digits, and photographs behind what resists, behind a LeNet that nobody has trained (``--data``, ``--model``), every
defense of the track ``laptop`` at each of its strengths. ``auto`` is ``attack=auto`` at a budget by an attacker who
knows the defense; the strongest member is its likelihood, or blind deconvolution, alone. Uploads are of the same
examples and model, drawn anew each time. One row for each cell as it comes, so that a run that was stopped goes on
where it was. The control is what the same guesses are worth for another victim: the same prior with another update.
The ``sum`` of top-k uploads with error feedback comes last (``--only sum``).
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from row_file import Row, RowFile, takes_rows

from fl_privacy.attacks import AutoAttack, ReconstructionAttack
from fl_privacy.defenses import compose, dp_noise, split_fed
from fl_privacy.defenses.defense import ClientState, Defense
from fl_privacy.effects import Part
from fl_privacy.runs.config.compose import compose_run
from fl_privacy.runs.setup import Setup, build_untrained
from fl_privacy.types import Observation, Reconstruction, Tensors

TRACK = Path(__file__).parents[1] / "fl_privacy" / "tracks" / "laptop.yaml"

FIRST = (
    "Quantization 1",
    "SplitFed",
    "FDL-PP",
    "Gaussian noise 1e-1",
    "Gaussian noise 3e-2",
    "Quantization 2",
    "Laplace noise 3e-2",
    "DP-SGD 0.1",
    "Selective sharing 0.01",
    "Pruning 0.99",
    "Soteria, mixing 0.1",
    "Refiner 1",
    "PPDL 0.01",
    "Local DP 300",
)
"""Those that earlier pages were green for."""

UNREAD = ("DP-SGD 0.5", "DP-SGD 2")
"""Behind which the track read no photograph: these are attacked with photographs as well."""

READ = ("exact", "identified", "recognizable")


@dataclass(frozen=True)
class Cell:
    """One cell of the table: who attacks, how many uploads, with how many public images."""

    attacker: str
    uploads: int
    public: int


CELLS = (
    Cell("strongest member", 1, 4000),
    Cell("auto quick", 1, 0),
    Cell("auto quick", 1, 4000),
    Cell("strongest member", 1, 0),
    Cell("strongest member", 10, 4000),
    Cell("strongest member", 100, 4000),
    Cell("auto standard", 1, 4000),
)

THOUSAND = Cell("strongest member", 1000, 4000)
"""Behind normal noise of known size alone, whose updates are joined as their mean."""

FEEDBACK = "Top-k 0.01 with feedback"
"""The largest hundredth of an update is sent, and the rest is added to the next one (Stich et al. 2018)."""

HIDING = "RecUP-FL 0.5"
"""It hides an attribute, which these digits have."""

OWN = (
    *(("mnist_mini", FEEDBACK, Cell("sum", uploads, 0)) for uploads in (1, 10, 100)),
    *(("mnist_parity", HIDING, cell) for cell in CELLS[:4]),
)
"""Cells of these defenses alone."""

NOISES = ("Gaussian noise 1e-1", "DP-SGD 0.5", "DP-SGD 2")

ELEVEN = (
    ("mnist_mini", "Quantization 1", 1, 4000),
    ("mnist_mini", "Quantization 1", 5, 4000),
    ("mnist_mini", "Quantization 1", 20, 0),
    ("mnist_mini", "Gaussian noise 1e-1", 1, 4000),
    ("mnist_mini", "Gaussian noise 1e-1", 10, 4000),
    ("mnist_mini", "SplitFed", 1, 4000),
    ("mnist_mini", "FDL-PP", 1, 4000),
    ("mnist_mini", "Signs of tensors", 1, 4000),
    ("cifar10_exact", "Gaussian noise 1e-2", 1, 4000),
    ("mnist_mini", "Quantization 1", 1, 0),
    ("mnist_mini", "Gaussian noise 1e-1", 10, 0),
)
"""The rows in which ``auto`` was beaten within an hour, with the number of uploads and of public images."""


def defenses() -> dict[str, tuple[str, ...]]:
    """Return the overrides of each defense and strength, those first that are most doubtful."""
    named = {}
    for family, overrides in yaml.safe_load(TRACK.read_text())["defenses"].items():
        parts = [str(override).partition("=") for override in overrides]
        choices = [[f"{key}={value}" for value in values.split(",")] for key, _, values in parts]
        varied = [place for place, values in enumerate(choices) if len(values) > 1]
        for chosen in itertools.product(*choices):
            strength = " ".join(chosen[place].partition("=")[2] for place in varied)
            named[f"{family} {strength}".strip()] = chosen
    named["Gaussian noise 1e-1"] = ("defense=dp_noise", "defense.clip_norm=1", "defense.scale=1e-1")
    named[FEEDBACK] = ("defense=none",)
    named["SplitFed, noise 1e-2"] = ("defense=custom", "defense._target_=red_team.split_fed_with_noise")
    named[HIDING] = ("defense=recup_fl",)
    named["Signs of tensors"] = ("defense=custom", "defense._target_=red_team.signs_of_tensors")
    order = {name: place for place, name in enumerate(FIRST)}
    return dict(sorted(named.items(), key=lambda pair: order.get(pair[0], len(order))))


def split_fed_with_noise() -> Defense:
    """Keep the first layer with the clients, and add noise to the rest of a clipped update."""
    return compose(split_fed(), dp_noise(clip_norm=1.0, scale=1e-2))


def signs_of_tensors() -> Defense:
    """Turn the sign of each tensor of an update with probability 1/2: a defense that nobody has described."""

    def on_upload(update: Tensors, state: ClientState, rng: torch.Generator) -> Tensors:
        return {name: value if torch.rand((), generator=rng) < 0.5 else -value for name, value in update.items()}

    return Defense(parts=(Part("signs_of_tensors", {}),), upload=(on_upload,))


def by_victim(observations: Sequence[Observation]) -> list[list[Observation]]:
    """Group the uploads of the same examples."""
    found: dict[tuple[int, int | None], list[Observation]] = {}
    for one in observations:
        found.setdefault((one.id.client, one.id.probe), []).append(one)
    return list(found.values())


def fed_back(observations: Sequence[Observation], share: float = 0.01) -> list[Observation]:
    """Send the largest elements of each update and of what was left of earlier ones of the same client."""
    left: dict[tuple[int, int | None], dict[str, torch.Tensor]] = {}
    sent = []
    for one in observations:
        victim, update = (one.id.client, one.id.probe), dict(one.upload.tensors)
        update = {name: value + left[victim][name] if victim in left else value for name, value in update.items()}
        sizes = torch.cat([value.abs().flatten() for value in update.values()])
        bound = sizes.topk(max(1, round(share * len(sizes)))).values[-1]
        kept = {name: torch.where(value.abs() >= bound, value, 0) for name, value in update.items()}
        left[victim] = {name: value - kept[name] for name, value in update.items()}
        sent.append(replace(one, upload=replace(one.upload, tensors=kept)))
    return sent


def of_sum(observations: Sequence[Observation], *, seed: int) -> list[Reconstruction]:
    """Attack the mean of all uploads of the same examples: what feedback leaves out now, it sends later."""
    joined = []
    for uploads in by_victim(observations):
        means = {
            name: sum(o.upload.tensors[name] for o in uploads) / len(uploads) for name in uploads[0].upload.tensors
        }
        joined.append(replace(uploads[-1], upload=replace(uploads[-1].upload, tensors=means)))
    return AutoAttack(budget="quick")(joined, seed=seed)


def attack_of(attacker: str, private: bool) -> Callable[..., list[Reconstruction]] | ReconstructionAttack:
    """Build the attack of a cell."""
    if attacker == "sum":
        return of_sum
    if attacker.startswith("auto"):
        return AutoAttack(budget=attacker.partition(" ")[2])  # type: ignore[arg-type]
    from fl_privacy.attacks import BlindDeconvolution, MaximumAPosteriori  # noqa: PLC0415  (older packages have none)

    return BlindDeconvolution() if private else MaximumAPosteriori()


def attacked(
    setup: Setup, cell: Cell, observations: Sequence[Observation], attack: ReconstructionAttack | None = None
) -> Row:
    """Attack the observations of all uploads together, by ``attack`` or that of the cell, and judge the last ones."""
    torch.manual_seed(0)
    number = min(cell.public, len(setup.unattacked))
    truth = setup.ground_truth()
    public = None
    if number:
        public = setup.unattacked.batch(torch.linspace(0, len(setup.unattacked) - 1, number).long())
    known = replace(setup.knowledge(truth), public=public, defense=setup.defense.parts or None)
    asked = [known.of_adaptive(known.of_plain(each)) for each in observations]
    attack = attack or attack_of(cell.attacker, bool(setup.defense.private))
    began, used = time.perf_counter(), time.process_time()
    found = attack(asked, seed=0)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    victims = len(setup.audit.probes)
    found, asked = found[-victims:], asked[-victims:]
    judge = replace(setup.judge(truth), prior=cell.public > 0)
    figures = judged(judge.scores(found, asked))
    control = judged(judge.scores(exchanged(found), asked))
    joined = max(1, len(observations) // victims) if asked[0].knowledge.same_data is not None else 1
    return {
        **figures,
        "joined": joined,
        "control_psnr": control["psnr"],
        "control_read": control["read"],
        "cpu_seconds": round(used, 1),
        "seconds": round(seconds, 1),
        "members": sorted({each.member for each in found}),
        "failure": next((each.failure for each in found if each.failure), None),
    }


def exchanged(found: Sequence[Reconstruction]) -> list[Reconstruction]:
    """Give each victim what was made of the next one's update."""
    return [replace(found[(place + 1) % len(found)], id=each.id) for place, each in enumerate(found)]


def judged(scores: Sequence[Any]) -> Row:
    """Count what was read, by the verdict's own rule."""
    images = [image for score in scores for image in score.images]
    outcomes = [str(i.outcome) for i in images]
    values = [min(image.values["psnr"], 100.0) for image in images if "psnr" in image.values]
    return {
        "images": len(images),
        "read": sum(outcome in READ for outcome in outcomes),
        "identified": sum(outcome in READ[:2] for outcome in outcomes),
        "psnr": round(sum(values) / len(values), 2) if values else None,
        "best": round(max(values), 2) if values else None,
    }


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, Cell]]:
    """Yield data, defense and cell: the eleven, photographs behind what resisted, what was doubtful, then the rest."""
    for attacker in ("auto quick", "auto standard"):
        for data, name, uploads, public in ELEVEN:
            yield data, name, Cell(attacker, uploads, public)
    if options.eleven:
        return
    for cell, name in itertools.product(CELLS, UNREAD):
        yield "cifar10_exact", name, cell
    for name in NOISES:
        yield "mnist_mini", name, THOUSAND
    for doubtful in (True,) if options.doubtful else (True, False):
        for cell in CELLS:
            for name in defenses():
                if name not in (FEEDBACK, HIDING) and (name in FIRST) == doubtful:
                    yield "mnist_mini", name, cell
    yield from OWN


def is_asked(options: argparse.Namespace, data: str, name: str, cell: Cell) -> bool:
    """Say whether a cell is among those asked for."""
    if options.version == "before" and cell.attacker == "strongest member":
        return False
    asked = not options.defense or any(part in name for part in options.defense)
    there = not options.uploads or cell.uploads in options.uploads
    return asked and there and cell.attacker.startswith(options.only) and data in options.data


def run(options: argparse.Namespace, rows: RowFile) -> None:
    """Fill the table while there is time."""
    end, named = time.monotonic() + 60 * options.minutes, defenses()
    for data, name, cell in cells(options):
        key = {"version": options.version, "data": data, "model": options.model, "defense": name}
        key |= {"attacker": cell.attacker, "uploads": cell.uploads, "public": cell.public}
        if rows.find(key) is not None or not is_asked(options, data, name, cell):
            continue
        if time.monotonic() > end:
            return
        settings = [f"data={data}", f"model={options.model}", f"victims={options.victims}", *named[name]]
        setup = build_untrained(compose_run(settings))
        observations = [o for r in range(cell.uploads) for o in setup.observe(setup.server.state, round=r)]
        rows.add(key, attacked(setup, cell, fed_back(observations) if name == FEEDBACK else observations))
        print(data, name, cell, rows.rows[-1]["psnr"], rows.rows[-1]["read"], flush=True)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table: a defense a line, the cells across."""
    kinds = list(dict.fromkeys((r["version"], r["attacker"], r["uploads"], r["public"]) for r in rows))
    yield "| defense | " + " | ".join(_title(*kind) for kind in kinds) + " |"
    yield "|---" * (len(kinds) + 1) + "|"
    for name in dict.fromkeys(row["defense"] for row in rows):
        own = {(r["version"], r["attacker"], r["uploads"], r["public"]): r for r in rows if r["defense"] == name}
        yield f"| {name} | " + " | ".join(_shown(own.get(kind)) for kind in kinds) + " |"


def _title(version: str, attacker: str, uploads: int, public: int) -> str:
    return f"{attacker}, {version}: {uploads} upload{'s' * (uploads > 1)}, {'prior' if public else 'no prior'}"


def _shown(row: Row | None) -> str:
    if row is None:
        return ""
    if row["psnr"] is None:
        return "failed"
    control = f"control {row['control_psnr']} dB, {row['control_read']} read"
    return f"{row['psnr']} dB, {row['read']} of {row['images']} ({control}; {row['cpu_seconds']} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    takes_rows(parser)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--data", nargs="*", default=["mnist_mini", "cifar10_exact", "mnist_parity"])
    parser.add_argument("--eleven", action="store_true", help="only the rows in which auto was beaten")
    parser.add_argument("--doubtful", action="store_true", help="only these and what earlier pages were green for")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--version", choices=("before", "after"), default="after")
    parser.add_argument("--only", default="", help="attackers whose name begins so")
    parser.add_argument("--defense", nargs="*", help="defenses whose name contains one of these")
    parser.add_argument("--uploads", nargs="*", type=int, help="numbers of uploads; all of them by default")
    options = parser.parse_args()
    rows = RowFile(options.out)
    run(options, rows)
    print("\n".join(table(rows.rows)))


if __name__ == "__main__":
    main()
