"""Show a paper's table on the page of its preset: published figures next to ours, and its picture."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from fl_privacy.report.gallery import data_uri
from fl_privacy.report.ppc import ppc_view_of, sample_of
from fl_privacy.runs.folder import Attacker, Run, read_run
from fl_privacy.runs.folder.ongoing import IDENTITY
from fl_privacy.runs.folder.paper import read_paper
from fl_privacy.runs.folder.study import Versus

PICTURED = 6
"""Most images in a row of a paper's picture."""


def paper_view_of(run: Run) -> dict[str, Any] | None:
    """Return what ``paper.html.j2`` shows of the table that ``run`` leads, or ``None``.

    ``printed`` says whether the paper has figures of each column, ``orders`` whether ours order the lines alike, by the
    95 % intervals if there are any;
    ``strips`` are rows of images as data URIs, without those of runs that are gone.
    """
    if (record := read_paper(run.path)) is None:
        return None
    samples, pairs = [], {}
    for line in record["lines"]:
        places = [[run.path if name == run.name else run.path.parent / name for name in of] for of in line["folders"]]
        there = [[read_run(place) for place in of] for of in places if all((p / IDENTITY).is_file() for p in of)]
        pictured = there and run.shared != "figures"
        pairs[line["name"]] = list(there[0][-1].read_pairs()[0].values())[:PICTURED] if pictured else []
        for training, *_, attacked in [(of[0], *of) for of in there if len(line["folders"]) > 1]:
            sample = sample_of(
                [attacked.summary.plain],
                mechanism=line["name"],
                strength=attacked.name,
                versus=Versus("", Attacker.PLAIN),
                accuracy=training.summary.final_accuracy,
                update_distortion=attacked.summary.update_distortion,
                training=training.name,
            )
            samples += [sample] if sample else []
    strips = [
        (
            title,
            ["" if (image := getattr(pair, kind, None)) is None else data_uri(image) for pair in pairs.get(line, ())],
        )
        for title, line, kind in record["strips"]
    ]
    curves, columns = ppc_view_of(samples), zip(*(line["figures"] for line in record["lines"]), strict=True)
    printed, orders = [], {}
    for name, column in zip(record["columns"], columns, strict=True):
        printed.append(any(figure[0] is not None for figure in column))
        both = sorted(
            (f[0], f[1] if f[2] is None else f[2], f[1] if f[3] is None else f[3]) for f in column if None not in f[:2]
        )
        steps = [(a[2] < b[1], b[2] < a[1]) for a, b in pairwise(both) if a[0] < b[0]]
        if steps:
            said = "order" if all(more for more, _ in steps) else "are too few to order"
            orders[name] = "do not order" if any(less for _, less in steps) else said
    return {
        "record": record,
        "printed": printed,
        "orders": orders,
        "strips": [strip for strip in strips if any(strip[1])],
        "charts": {name: chart for of in (curves.curves.values() if curves else ()) for name, chart in of.items()},
    }
