"""The page of one run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from fl_privacy.metrics import METRICS
from fl_privacy.metrics.registry import IMAGE_METRIC, TEXT_METRIC
from fl_privacy.report.attacked import what_was_done
from fl_privacy.report.charts import Curve, line_chart, partition_chart, top_of
from fl_privacy.report.claims import claim_views
from fl_privacy.report.cost import figures_of
from fl_privacy.report.film import films_of_run
from fl_privacy.report.gallery import SHOWN, gallery_title, view_all, view_extremes
from fl_privacy.report.headline import bound_in_words, headline_of
from fl_privacy.report.inferred import views_of
from fl_privacy.report.page import render
from fl_privacy.report.sentences import all_sentences, extreme_sentences
from fl_privacy.report.settings import batch_norm_in_words, overview
from fl_privacy.results import Attacker, Film, Pair, Reading, Run, Sentence, TextFilm, Verdict, verdict_of
from fl_privacy.results.readings import in_round, kind_of, worst_by
from fl_privacy.results.verdict import tone_of
from fl_privacy.victim_ids import Certainty

CURVES_SHOWN = 100
ROUNDS_SHOWN = 12
"""More attacked rounds than these are a curve, and their table is closed."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a run's folder holds of its victims; nothing where it was shared with figures alone.

    Attributes:
        pairs: original and reconstruction, by id and image.
        sentences: likewise, of texts.
        films: of how some were read, by who did.
        problems: what could not be read.
    """

    pairs: Mapping[tuple[str, int], Pair] = field(default_factory=dict)
    sentences: Mapping[tuple[str, int], Sentence] = field(default_factory=dict)
    films: Mapping[Attacker, Sequence[Film | TextFilm]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run) -> "Shown":
        """Read from the folder of ``run``."""
        if run.shared == "figures":
            return cls()
        pairs, unpaired = run.read_pairs()
        sentences, unread = run.read_sentences()
        films, damaged = run.read_films()
        return cls(pairs=pairs, sentences=sentences, films=films, problems=(*unpaired, *unread, *damaged))


def render_run(run: Run, shown: Shown, *, problems: Sequence[str] = (), live: bool = False) -> str:
    """The HTML of ``run`` with what is ``shown`` of it; ``problems``, and those of what is shown, are told in a banner.

    A page that is ``live`` is of a run that goes on, and refreshes itself.
    """
    pairs, sentences = shown.pairs, shown.sentences
    verdict = verdict_of(run)
    found = verdict.readings
    last = in_round(found, max((reading.round for reading in found), default=0))
    proven = [reading for reading in found if reading.leakage.certainties.get(Certainty.PROVEN)]
    traced = [(reading, reading.leakage.tracing) for reading in found if reading.leakage.tracing]
    kind = "text" if sentences else kind_of(found)
    return render(
        "run.html.j2",
        live=live,
        kind=kind,
        sentences=all_sentences(run, sentences) if sentences else [],
        extreme_sentences=extreme_sentences(run, sentences, TEXT_METRIC) if sentences else [],
        run=run,
        summary=run.summary,
        adaptive=run.summary.adaptive,
        verdict=headline_of(verdict, kind),
        claims=claim_views(run.claims),
        counted=_count_rows(verdict, last),
        problems=[*problems, *shown.problems],
        lede=what_was_done(run),
        main_tiles=_main_tiles(found),
        labels=worst_by("label_correct", last),
        proven=max(proven, key=lambda reading: reading.leakage.certainties[Certainty.PROVEN], default=None),
        traced=min(traced, key=lambda pair: pair[1].mean)[0] if traced else None,
        readings=found,
        last_round=last[0].round if last and len({reading.round for reading in found}) > 1 else None,
        batch_norm=batch_norm_in_words([run.summary]),
        extremes=[] if sentences else view_extremes(run, pairs),
        images=[] if sentences else view_all(run, pairs),
        images_left_out=max(0, len(run.of_kind("image")) - SHOWN),
        gallery_title=gallery_title(run).replace("images", f"{kind}s"),
        films=films_of_run(run, shown.films, pairs, sentences),
        leakage=_leakage_rows(last),
        members=[reading for reading in last if reading.leakage.members],
        tracing=[reading for reading, _ in traced],
        inferred=views_of(run.summary.inferred),
        by_round=_round_rows(verdict),
        many_rounds=len({reading.round for reading in found}) > ROUNDS_SHOWN,
        over_rounds=_over_rounds(found),
        charts=_charts(run),
        figures=figures_of(run.summary) if run.summary.update_distortion or "node_fits" in run.summary.upload else [],
        partition_picture=_partition(run),
        excluded=_excluded(run),
        overview=overview(run),
        environment=_environment_rows(run),
    )


def _main_tiles(found: Sequence[Reading]) -> list[dict[str, Any]]:
    """The last attacked round and the first, each by the attacker with the larger mean, beside the other's."""
    rounds = sorted({reading.round for reading in found})
    tiles = []
    for round in dict.fromkeys([rounds[-1], rounds[0]]) if rounds else ():
        of_round = in_round(found, round)
        main = TEXT_METRIC if kind_of(found) == "text" else IMAGE_METRIC
        worst = worst_by(main, of_round)
        if worst is None:
            continue
        others = [reading for reading in of_round if reading is not worst]
        tiles.append(
            {
                "metric": main,
                "title": f"Mean {METRICS[main].title}" + (f", round {round}" if len(rounds) > 1 else ""),
                "statistic": worst.statistic(main),
                "who": worst.among(of_round),
                "others": [(other.attacker, other.statistic(main)) for other in others],
            }
        )
    return tiles


def _count_rows(verdict: Verdict, last: Sequence[Reading]) -> list[dict[str, Any]]:
    """How many each attacker read in the last attacked round, and in the round in which most leaks."""
    most = verdict.most
    shown = [*last, *([r for r in verdict.readings if most and r.round == most.round and r not in last])]
    source = verdict.facts.source
    return [{"round": r.round, "attacker": r.attacker, "counts": r.counts, "tone": tone_of([r], source)} for r in shown]


def _leakage_rows(found: Sequence[Reading]) -> list[dict[str, Any]]:
    """A row for each metric and attacker of one round, the worst first; with a paper's own count where it has one."""
    names = list(dict.fromkeys(name for reading in found for name in reading.leakage.metrics))
    order = sorted(names, key=lambda name: list(METRICS).index(name) if name in METRICS else len(METRICS))
    rows = []
    for name in order:
        worst = worst_by(name, found)
        for reading in sorted(found, key=lambda reading: reading is not worst):
            statistic, bound = reading.statistic(name), reading.counted_by(name)
            if statistic is None:
                continue
            rows.append(
                {
                    "name": name,
                    "attacker": reading.attacker,
                    "description": METRICS[name].description if name in METRICS else "",
                    "statistic": statistic,
                    "bound": bound,
                    "bound_in_words": bound_in_words(bound) if bound else "",
                }
            )
    return rows


def _round_rows(verdict: Verdict) -> list[dict[str, Any]]:
    """Means by attacked round and attacker, where more than one round was attacked."""
    found = verdict.readings
    if len({reading.round for reading in found}) < 2:
        return []
    measured = [name for name in METRICS if any(reading.statistic(name) for reading in found)]
    return [
        {
            "round": reading.round,
            "attacker": reading.attacker,
            "counts": reading.counts,
            "tone": tone_of([reading], verdict.facts.source),
            "means": {name: s.mean if (s := reading.statistic(name)) else None for name in measured},
        }
        for reading in found
    ]


def _over_rounds(found: Sequence[Reading]) -> Markup | None:
    """The main metric's mean over many attacked rounds, of each attacker; nothing where the table shows it."""
    if len({reading.round for reading in found}) <= ROUNDS_SHOWN:
        return None
    main = TEXT_METRIC if kind_of(found) == "text" else IMAGE_METRIC
    measured = [(r, s.mean) for r in found if (s := r.statistic(main))]
    top = top_of([mean for _, mean in measured], None)
    curves = []
    for attacker in dict.fromkeys(reading.attacker for reading, _ in measured):
        own = [(reading.round, min(mean, top)) for reading, mean in measured if reading.attacker == attacker]
        curves.append(Curve(x=[round for round, _ in own], y=[mean for _, mean in own], label=attacker))
    unit = f", {METRICS[main].unit}" if METRICS[main].unit else ""
    exact = ", exact ones on top" if any(mean > top for _, mean in measured) else ""
    title = f"Mean {METRICS[main].title}{unit}{exact}"
    return line_chart(curves, x="Round", y=title, alt=f"{title}, over the attacked rounds") if curves else None


def _charts(run: Run) -> dict[str, Markup]:
    """Accuracy, losses and the attacker's loss, as far as they were recorded."""
    charts = {}
    if tested := run.summary.tested:
        x, y = [r.round for r in tested], [r.accuracy for r in tested]
        charts["Test accuracy"] = line_chart(
            [Curve(x=x, y=y)],
            x="Round",
            y="Test accuracy",
            percent=True,
            alt=f"Test accuracy over rounds, from {100 * y[0]:.1f} % to {100 * y[-1]:.1f} %",
        )
    rounds = run.of_kind("round")
    losses = {"train": "train_loss", "test": "test_loss"}
    curves = [
        Curve(x=[r["round"] for r in kept], y=[r[field] for r in kept], label=label)
        for label, field in losses.items()
        if (kept := [r for r in rounds if r.get(field) is not None])
    ]
    if curves:
        charts["Loss"] = line_chart(curves, x="Round", y="Cross entropy", alt="Training and test loss over rounds")
    spent = [(r["round"], r["epsilon"]) for r in rounds if r.get("epsilon") is not None]
    if spent and run.summary.privacy:
        charts["Privacy spent"] = line_chart(
            [Curve(x=[round for round, _ in spent], y=[epsilon for _, epsilon in spent])],
            x="Round",
            y=f"Epsilon at delta = {run.summary.privacy.delta:.3g}",
            alt=f"Epsilon over rounds, up to {spent[-1][1]:.3g}",
        )
    histories = [h["loss"] for h in run.of_kind("history") if len(h["loss"]) > 1]
    if histories:
        charts["The attacker's loss"] = line_chart(
            [Curve(x=_shares(len(h)), y=h) for h in histories[:CURVES_SHOWN]],
            x="Share of the iterations, percent",
            y="Attack loss",
            log=all(value is not None and value > 0 for h in histories[:CURVES_SHOWN] for value in h),
            faint=True,
            alt=f"The attacker's own loss over its iterations, a line for each of {len(histories)} victims",
        )
    return charts


def _shares(length: int) -> list[float]:
    return [100 * k / max(1, length - 1) for k in range(length)]


def _partition(run: Run) -> Markup | None:
    if run.partition is None:
        return None
    counts = run.partition.counts
    alt = f"Examples of each class on each of {len(counts)} clients; the table below has the numbers"
    return partition_chart(counts, run.partition.class_names, alt=alt)


def _excluded(run: Run) -> list[str]:
    """Replies that did not count, a line each."""
    return [
        f"Round {record['round']}, client {client}: {reason}"
        for record in run.of_kind("round")
        for client, reason in record["excluded"].items()
    ]


def _environment_rows(run: Run) -> list[tuple[str, str]]:
    environment = dict(run.environment)
    packages = environment.pop("packages", {})
    gpus = environment.pop("gpus", [])
    rows = [(key.replace("_", " "), str(value)) for key, value in environment.items()]
    return [*rows, ("gpus", ", ".join(gpus) or "none"), *packages.items()]
