"""Render the page of a run, or of a strategy's audit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from markupsafe import Markup

from fl_privacy.attacks import malicious
from fl_privacy.measure import METRICS
from fl_privacy.measure.registry import TEXT_METRIC
from fl_privacy.report import gallery
from fl_privacy.report.bars import Bar, bar_of_counts, bars_of
from fl_privacy.report.charts import Curve, line_chart, partition_chart, top_of
from fl_privacy.report.gallery import films_of_run
from fl_privacy.report.headline import UPLOADS, approval, bound_in_words, headline_of
from fl_privacy.report.inferred import views_of
from fl_privacy.report.page import render
from fl_privacy.report.ppc import paper_view_of
from fl_privacy.report.settings import batch_norm_in_words, chosen, figures_of, overview
from fl_privacy.report.words import span
from fl_privacy.runs.config.parse import select
from fl_privacy.runs.folder import Attacker, Film, LeakageResult, Pair, Run, Sentence, Verdict, verdict_of
from fl_privacy.runs.folder.leakage import AttackedUploads, facts_of, in_round, modality_attacked, worst_by
from fl_privacy.runs.folder.pictures import RowPair
from fl_privacy.runs.folder.verdict import LEAK, tone_of
from fl_privacy.types.modality import ROWS, TEXTS, Modality
from fl_privacy.types.victim_ids import Certainty


def is_audit(run: Run) -> bool:
    """Return whether ``run`` attacked clients of a third-party app."""
    config = run.identity.config
    return select(config, "choices.federation") == "app" or config.get("command") == "audit"


def audit_lede(run: Run) -> str:
    """Describe the audited app and its training."""
    config = run.identity.config
    rounds = select(config, "federation.rounds") if config.get("command") == "audit" else None
    by = f" by {strategy}" if (strategy := chosen(run, "federation")) else ""
    trained = f"{chosen(run, 'model')} of a Flower app"
    trained += f", trained{by} over {rounds} round{'s' if rounds != 1 else ''}" if rounds else ""
    defended = f"defended by {' and '.join(run.defenses)}, as clients say"
    guarded = defended if run.defenses else "undefended as far as clients say"
    against = f", attacked by {chosen(run, 'attack')}" if run.of_kind("image") else ""
    source = facts_of(run).source
    alone = f" The attack targets {UPLOADS[source]}." if source is AttackedUploads.SERVER else ""
    return f"{trained}, {guarded}{against}.{alone}"


def what_was_done(run: Run) -> str:
    """Describe training and attack in a few sentences."""
    if is_audit(run):
        return audit_lede(run)
    attack, defense = chosen(run, "attack"), chosen(run, "defense")
    clients = select(run.identity.config, "federation.clients")
    rounds = len(run.of_kind("round"))
    data, loaded = chosen(run, "data"), str(select(run.identity.config, "data.name") or "")
    data = loaded if loaded.startswith(f"{data}_") else data  # a part of it, such as cifar100_samples
    trained = f"{chosen(run, 'model')} on {data}"
    of = f"{clients} client{'s' * (clients != 1)} over {rounds} round{'s' * (rounds != 1)}"
    where = f" by {of}" if clients and rounds else ""
    guarded = "undefended" if run.identity.undefended or defense == "none" else f"defended by {defense}"
    if frozen := select(run.identity.config, "federation.plan.frozen"):
        guarded += f", with {' and '.join(map(str, frozen))} frozen"
    against = f", attacked by {attack}" if attack and attack != "none" and run.of_kind("image") else ""
    inferred = chosen(run, "inference").replace("+", ", ")
    against += f", asked about {inferred}" if inferred and inferred != "none" else ""
    server = chosen(run, "server")
    if server and server != "honest":
        against = f", attacked by a malicious server ({server})" + ("" if _reads_itself(run) else f" and{against[1:]}")
    done = f"{trained}, trained{where}, {guarded}{against}." if rounds else f"{trained}, {guarded}{against}."
    return f"{done} {uploads_of(run)}".strip()


def _reads_itself(run: Run) -> bool:
    """Return ``True`` if the malicious server copies images from an upload, so that no attack is needed."""
    section = run.identity.config.get("server")
    target = str(section.get("_target_", "")) if isinstance(section, Mapping) else ""
    known = target.startswith(("fl_privacy.malicious.", "fl_privacy.attacks.malicious."))
    attack = getattr(malicious, target.rpartition(".")[2], None) if known else None
    return attack is not None and bool(attack.reads_images)


def uploads_of(run: Run) -> str:
    """Describe the contents of attacked uploads; empty for an app's audit, or if nothing was attacked."""
    if not run.summary.attacked or is_audit(run):
        return ""
    config, trained = run.identity.config, bool(run.of_kind("round"))
    plan, uploads = select(config, "federation.plan"), select(config, "intercept.uploads") or "probe"
    plan = plan if isinstance(plan, Mapping) else {}
    if uploads == "probe" or not plan:
        return _probed(run, plan, trained)
    said = "The attack targets the training updates themselves, each"
    if plan.get("shares", "gradient") == "gradient":
        return f"{said} the gradient of {_batch(run, plan)} {modality_attacked(run.summary.attacked).one}s."
    return f"{said} of {_local_training(run, plan)}."


def said_together(said: Iterable[tuple[str, str]]) -> str:
    """Join pairs (name, sentence) to one text; a sentence that all names share is given once, without names."""
    names: dict[str, list[str]] = {}
    for name, sentence in said:
        if sentence and name not in names.setdefault(sentence, []):
            names[sentence].append(name)
    if len(names) < 2:
        return "".join(names)
    return " ".join(f"{', '.join(of)}: {sentence[0].lower()}{sentence[1:]}" for sentence, of in names.items())


def _probed(run: Run, plan: Mapping[str, Any], trained: bool) -> str:
    number = int(run.identity.config.get("batch_size") or 1)
    kind = modality_attacked(run.summary.attacked).one
    images = f"one {kind} each, the worst case" if number == 1 else f"{number} {kind}s each"
    others = facts_of(run).summed
    means = f"means over {others} other sites, of uploads computed" if others > 1 else "uploads computed"
    attacked = f"The attack targets {means} from {images}"
    if not trained or not plan:
        return f"{attacked}."
    if plan.get("shares", "gradient") == "gradient":
        return f"{attacked}; the training batches of {_batch(run, plan)} were not attacked."
    return f"{attacked}; the training updates, each of {_local_training(run, plan)}, were not attacked."


def _batch(run: Run, plan: Mapping[str, Any]) -> str:
    sizes, size = _client_sizes(run), plan.get("batch_size")
    if not sizes:
        return str(size) if size else "all of a client's"
    return span([min(number, int(size)) if size else number for number in sizes])


def _local_training(run: Run, plan: Mapping[str, Any]) -> str:
    kind = modality_attacked(run.summary.attacked).one
    if steps := plan.get("steps"):
        return f"{steps} local step{'s' if steps != 1 else ''} on batches of {_batch(run, plan)} {kind}s"
    epochs, sizes = plan.get("epochs") or 1, _client_sizes(run)
    images = f"the {span(sizes)} {kind}s of a client" if sizes else f"all {kind}s of a client"
    return f"{epochs} epoch{'s' if epochs != 1 else ''} over {images} in batches of {_batch(run, plan)}"


def _client_sizes(run: Run) -> list[int]:
    return [n for row in run.partition.counts if (n := sum(row))] if run.partition else []


CURVES_SHOWN = 100
ROUNDS_SHOWN = 12  # most attacked rounds in an open table; more are drawn as a curve


@dataclass(frozen=True, kw_only=True)
class ShownVictims:
    """Originals and guesses in a run's folder, by victim id and example number; empty if only metrics were shared."""

    pairs: Mapping[tuple[str, int], Pair] = field(default_factory=dict)
    sentences: Mapping[tuple[str, int], Sentence] = field(default_factory=dict)
    rows: Mapping[tuple[str, int], RowPair] = field(default_factory=dict)
    films: Mapping[Attacker, Sequence[Film]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run) -> "ShownVictims":
        if run.shared == "figures":
            return cls()
        (pairs, unpaired), (sentences, unread) = run.read_pairs(), run.read_sentences()
        (rows, torn), (films, damaged) = run.read_rows(), run.read_films()
        problems = (*unpaired, *unread, *torn, *damaged)
        return cls(pairs=pairs, sentences=sentences, rows=rows, films=films, problems=problems)

    def modality(self, found: Sequence[LeakageResult]) -> Modality:
        kept = {TEXTS: self.sentences, ROWS: self.rows}
        return next((modality for modality, shown in kept.items() if shown), modality_attacked(found))


def _audited(run: Run, verdict: Verdict) -> Any:
    """Return the content of an audit's page, loaded only here because it needs PyTorch, unlike other pages."""
    from fl_privacy.report.audit_file import read_captured  # noqa: PLC0415
    from fl_privacy.report.audit_page import audit_of_run  # noqa: PLC0415

    captured = read_captured(run.path)
    return audit_of_run(run.name, verdict, None if captured is None else captured.site)


def render_run(run: Run, shown: ShownVictims, *, problems: Sequence[str] = (), live: bool = False) -> str:
    """Render the page of ``run`` with ``shown`` victims and a banner of problems; a ``live`` page refreshes itself."""
    verdict = verdict_of(run)
    found = verdict.readings
    last = in_round(found, max((reading.round for reading in found), default=0))
    proven = [reading for reading in found if reading.certainties.get(Certainty.PROVEN)]
    traced = [(reading, reading.tracing) for reading in found if reading.tracing]
    modality, audited = shown.modality(found), _audited(run, verdict) if is_audit(run) else None
    kind, first = modality.one, run.of_kind("image")[: gallery.SHOWN]
    extremes, images = gallery.views(run, shown.pairs) if modality.pixels else ([], iter(()))
    return render(
        "run.html.j2" if audited is None else "audit.html.j2",
        page=audited,
        bars=_bars(verdict, last) if audited is None else bars_of(audited.answers),
        live=live,
        paper=paper_view_of(run),
        kind=kind,
        rows=[gallery.row_view(one, shown.rows) for one in first] if shown.rows else [],
        best_rows=gallery.best_rows(run, shown.rows) if shown.rows else [],
        facts=verdict.facts,
        best_rows_said=gallery.best_rows_in_words(run) if shown.rows else "",
        sentences=[gallery.text_view(one, shown.sentences) for one in first] if shown.sentences else [],
        extreme_sentences=gallery.extreme_sentences(run, shown.sentences, TEXT_METRIC) if shown.sentences else [],
        run=run,
        verdict=headline_of(verdict, kind),
        claims=run.claims,
        counted=_counted(verdict, last),
        tone=lambda reading: tone_of([reading], verdict.facts.source),
        problems=[*problems, *shown.problems],
        lede=what_was_done(run),
        approval=approval(verdict),
        main_tiles=_main_tiles(found),
        labels=worst_by("label_correct", last),
        proven=max(proven, key=lambda reading: reading.certainties[Certainty.PROVEN], default=None),
        traced=min(traced, key=lambda pair: pair[1].mean)[0] if traced else None,
        readings=found,
        last_round=last[0].round if last and len({reading.round for reading in found}) > 1 else None,
        batch_norm=batch_norm_in_words([run.summary]),
        extremes=extremes,
        images=list(images),
        images_left_out=max(0, len(run.of_kind("image")) - gallery.SHOWN),
        gallery_title=gallery.gallery_title(run, kind),
        films=films_of_run(run, shown.films, {**shown.pairs, **shown.sentences}),
        leakage=[row for row in _leakage_rows(last) if not row["of_papers"]],
        other_leakage=[row for row in _leakage_rows(last) if row["of_papers"]],
        members=[reading for reading in last if reading.members],
        tracing=[reading for reading, _ in traced],
        inferred=views_of(run.summary.inferred),
        several_rounds=len({reading.round for reading in found}) > 1,
        means=[n for n, own in METRICS.items() if not own.of_papers and any(r.statistic(n) for r in found)],
        many_rounds=len({reading.round for reading in found}) > ROUNDS_SHOWN,
        over_rounds=_over_rounds(found),
        charts=_charts(run),
        figures=figures_of(run.summary) if run.summary.update_distortion or "node_fits" in run.summary.upload else [],
        partition_picture=partition_chart(run.partition.counts, run.partition.class_names) if run.partition else None,
        excluded=[(record["round"], *each) for record in run.of_kind("round") for each in record["excluded"].items()],
        overview=overview(run),
    )


def _main_tiles(found: Sequence[LeakageResult]) -> list[dict[str, Any]]:
    rounds = sorted({reading.round for reading in found})
    main = modality_attacked(found).metric if found else ""
    return [
        {
            "metric": main,
            "title": f"Mean {METRICS[main].name_within}" + (f", round {round}" if len(rounds) > 1 else ""),
            "statistic": worst.statistic(main),
            "who": worst.among(of_round),
            "others": [(other.attacker, other.statistic(main)) for other in of_round if other is not worst],
        }
        for round in dict.fromkeys([*rounds[-1:], *rounds[:1]])
        for of_round in (in_round(found, round),)
        if (worst := worst_by(main, of_round)) is not None
    ]


def _counted(verdict: Verdict, last: Sequence[LeakageResult]) -> list[LeakageResult]:
    most = verdict.most
    return [*last, *(r for r in verdict.readings if most and r.round == most.round and r not in last)]


def _bars(verdict: Verdict, last: Sequence[LeakageResult]) -> list[Bar]:
    shown = verdict.readings if len(verdict.readings) <= ROUNDS_SHOWN else _counted(verdict, last)
    several = len({reading.attacker for reading in shown}) > 1
    return [
        bar_of_counts(
            (f"Round {reading.round}" if reading.round else "Not trained in this run")
            + (f", {reading.attacker} attacker" if several else ""),
            reading.counts,
            red=tone_of([reading], verdict.facts.source) == LEAK,
        )
        for reading in shown
    ]


def _leakage_rows(found: Sequence[LeakageResult]) -> list[dict[str, Any]]:
    measured = dict.fromkeys(name for reading in found for name in reading.metrics)
    names = [name for name in METRICS if name in measured] + [name for name in measured if name not in METRICS]
    rows = []
    for name in names:
        worst, shown = worst_by(name, found), METRICS.get(name)
        about = {"description": shown.description if shown else "", "of_papers": bool(shown and shown.of_papers)}
        for reading in sorted(found, key=lambda reading: reading is not worst):
            if (statistic := reading.statistic(name)) is not None:
                bound = reading.counted_by(name)
                row = {"name": name, "attacker": reading.attacker, "statistic": statistic, "bound": bound}
                rows.append({**row, **about, "bound_in_words": bound_in_words(bound) if bound else ""})
    return rows


def _over_rounds(found: Sequence[LeakageResult]) -> Markup | None:
    if len({reading.round for reading in found}) <= ROUNDS_SHOWN:
        return None
    main = modality_attacked(found).metric
    measured = [(r, s.mean) for r in found if (s := r.statistic(main))]
    top = top_of([mean for _, mean in measured], None)
    curves = []
    for attacker in dict.fromkeys(reading.attacker for reading, _ in measured):
        own = [(reading.round, min(mean, top)) for reading, mean in measured if reading.attacker == attacker]
        curves.append(Curve(x=[round for round, _ in own], y=[mean for _, mean in own], label=attacker))
    unit = f", {METRICS[main].unit}" if METRICS[main].unit else ""
    exact = ", exact ones on top" if any(mean > top for _, mean in measured) else ""
    title = f"Mean {METRICS[main].name_within}{unit}{exact}"
    return line_chart(curves, x="Round", y=title, alt=f"{title}, over the attacked rounds") if curves else None


def _charts(run: Run) -> dict[str, Markup]:
    charts = {}
    if tested := run.summary.tested:
        x, y = [r.round for r in tested], [r.accuracy for r in tested]
        alt = f"Test accuracy over rounds, from {100 * y[0]:.1f} % to {100 * y[-1]:.1f} %"
        charts["Test accuracy"] = line_chart([Curve(x=x, y=y)], x="Round", y="Test accuracy", percent=True, alt=alt)
    rounds = run.of_kind("round")
    curves = [
        Curve(x=[r["round"] for r in kept], y=[r[field] for r in kept], label=label)
        for label, field in (("train", "train_loss"), ("test", "test_loss"), ("epsilon", "epsilon"))
        if (kept := [r for r in rounds if r.get(field) is not None])
    ]
    if losses := [curve for curve in curves if curve.label != "epsilon"]:
        charts["Loss"] = line_chart(losses, x="Round", y="Cross entropy", alt="Training and test loss over rounds")
    if run.summary.privacy and (spent := [replace(curve, label="") for curve in curves if curve.label == "epsilon"]):
        y_axis, alt = f"Epsilon at delta = {run.summary.privacy.delta:.3g}", f"up to {spent[0].y[-1]:.3g}"
        charts["Privacy spent"] = line_chart(spent, x="Round", y=y_axis, alt=f"Epsilon over rounds, {alt}")
    histories = [h["loss"] for h in run.of_kind("history") if len(h["loss"]) > 1]
    if histories:
        shown = histories[:CURVES_SHOWN]
        charts["The attacker's loss"] = line_chart(
            [Curve(x=[100 * k / max(1, len(h) - 1) for k in range(len(h))], y=h) for h in shown],
            x="Share of the iterations, percent",
            y="Attack loss",
            log=all(value is not None and value > 0 for h in shown for value in h),
            faint=True,
            alt=f"The attacker's own loss over its iterations, a line for each of {len(histories)} victims",
        )
    return charts
