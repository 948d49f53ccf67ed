"""The page of one run."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from fl_privacy.metrics import METRICS, aggregate
from fl_privacy.report.charts import Curve, line_chart, partition_chart
from fl_privacy.report.cost import figures_of
from fl_privacy.report.page import render
from fl_privacy.report.settings import batch_norm_in_words, chosen, overview
from fl_privacy.report.verdict import bound_in_words, verdict
from fl_privacy.report.victims import SHOWN, view_all, view_extremes
from fl_privacy.results import Attacker, Pair, Run

CURVES_SHOWN = 100


def render_run(run: Run, pairs: Mapping[tuple[str, int], Pair], problems: list[str]) -> str:
    """The HTML of ``run`` with its pictures ``pairs``; ``problems`` are told in a banner."""
    return render(
        "run.html.j2",
        run=run,
        summary=run.summary,
        adaptive=run.summary.get("adaptive"),
        verdict=verdict(run.summary),
        problems=problems,
        lede=_lede(run),
        batch_norm=batch_norm_in_words([run.summary]),
        extremes=view_extremes(run, pairs),
        victims=view_all(run, pairs),
        victims_left_out=max(0, run.summary["images"] - SHOWN),
        leakage=_leakage_rows(run),
        tracing=_tracing_rows(run),
        by_round=_round_rows(run),
        charts=_charts(run),
        figures=figures_of(run.summary) if run.summary["perturbation"] else [],
        partition_picture=_partition(run),
        excluded=_excluded(run),
        overview=overview(run),
        environment=_environment_rows(run),
    )


def _lede(run: Run) -> str:
    """What was done, in a sentence."""
    attack, defense = chosen(run, "attack"), chosen(run, "defense")
    clients = run.identity.config.get("federation", {}).get("clients")
    rounds = len(run.of_kind("round"))
    trained = f"{chosen(run, 'model')} on {chosen(run, 'data')}"
    where = f" by {clients} clients over {rounds} rounds" if clients and rounds else ""
    guarded = "undefended" if run.identity.undefended or defense == "none" else f"defended by {defense}"
    against = f", attacked by {attack}" if attack and attack != "none" else ""
    against += ", with and without knowledge of the defense" if run.summary.get("adaptive") else ""
    return f"{trained}, trained{where}, {guarded}{against}." if rounds else f"{trained}, {guarded}{against}."


def _leakage_rows(run: Run) -> list[dict[str, Any]]:
    """A row for each metric and attacker, the ones with a bound judged by their mean."""
    plain = _rows_of(run.summary, "plain")
    adaptive = _rows_of(run.summary["adaptive"], "adaptive") if run.summary.get("adaptive") else []
    order = list(dict.fromkeys(row["name"] for row in [*plain, *adaptive]))
    return sorted([*plain, *adaptive], key=lambda row: order.index(row["name"]))


def _rows_of(summary: Mapping[str, Any], attacker: Attacker) -> list[dict[str, Any]]:
    order = sorted(summary["metrics"], key=lambda name: list(METRICS).index(name) if name in METRICS else len(METRICS))
    bounds = {bound["metric"]: bound for bound in summary["thresholds"]}
    rows = []
    for name in order:
        statistic, bound = summary["metrics"][name], bounds.get(name)
        above = bound is not None and statistic["mean"] >= bound["value"]
        rows.append(
            {
                "name": name,
                "attacker": attacker,
                "description": METRICS[name].description if name in METRICS else "",
                "statistic": statistic,
                "bound": bound,
                "bound_in_words": bound_in_words(bound) if bound else "",
                "leaks": bound is not None and above == (bound["leaks"] == "above"),
            }
        )
    return rows


def _tracing_rows(run: Run) -> list[dict[str, Any]]:
    """A row for each attacker whose reconstructions were traced, if the summary also says what chance would."""
    found = {"plain": run.summary, "adaptive": run.summary.get("adaptive") or {}}
    rows = {attacker: summary.get("tracing") for attacker, summary in found.items()}
    return [{"attacker": attacker, **row} for attacker, row in rows.items() if row and "chance" in row]


def _round_rows(run: Run) -> list[dict[str, Any]]:
    """Means by attacked round and attacker, where more than one round was attacked."""
    rounds = sorted({victim["round"] for victim in run.of_kind("victim")})
    attackers: tuple[Attacker, ...] = ("plain", "adaptive") if run.summary.get("adaptive") else ("plain",)
    measured = [name for name in METRICS if name in run.summary["metrics"]]
    rows = []
    for round in rounds if len(rounds) > 1 else ():
        for attacker in attackers:
            victims = [v for v in run.of_kind("victim", attacker) if v["round"] == round and v["failure"] is None]
            means = {name: aggregate([v[name] for v in victims if v.get(name) is not None]) for name in measured}
            shown = {k: s.mean if s else None for k, s in means.items()}
            rows.append({"round": round, "attacker": attacker, "n": len(victims), "means": shown})
    return rows


def _charts(run: Run) -> dict[str, Markup]:
    """Accuracy, losses and the attacker's loss, as far as they were recorded."""
    charts = {}
    if tested := run.summary["rounds"]:
        x, y = [r["round"] for r in tested], [r["accuracy"] for r in tested]
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
    if spent:
        charts["Privacy spent"] = line_chart(
            [Curve(x=[round for round, _ in spent], y=[epsilon for _, epsilon in spent])],
            x="Round",
            y=f"Epsilon at delta = {run.summary['privacy']['delta']:.3g}",
            alt=f"Epsilon over rounds, up to {spent[-1][1]:.3g}",
        )
    histories = [h["loss"] for h in run.of_kind("history")]
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
