"""What was attacked and what was not, in words: the assumption that decides how much leaks."""

from collections.abc import Iterable, Mapping
from typing import Any

from fl_privacy import malicious
from fl_privacy.config.reading import select
from fl_privacy.report.app_audit import audit_lede, is_audit
from fl_privacy.report.settings import chosen
from fl_privacy.results import Attacker, Run
from fl_privacy.results.readings import kind_of, readings_of


def what_was_done(run: Run) -> str:
    """What was done and what was attacked, in a few sentences."""
    if is_audit(run):
        return audit_lede(run)
    attack, defense = chosen(run, "attack"), chosen(run, "defense")
    clients = select(run.identity.config, "federation.clients")
    rounds = len(run.of_kind("round"))
    trained = f"{chosen(run, 'model')} on {chosen(run, 'data')}"
    where = f" by {clients} clients over {rounds} rounds" if clients and rounds else ""
    guarded = "undefended" if run.identity.undefended or defense == "none" else f"defended by {defense}"
    against = f", attacked by {attack}" if attack and attack != "none" else ""
    inferred = chosen(run, "inference").replace("+", ", ")
    against += f", asked about {inferred}" if inferred and inferred != "none" else ""
    against += ", with and without knowledge of the defense" if run.summary.adaptive else ""
    server = chosen(run, "server")
    if server and server != "honest":
        against = f", read by a malicious server ({server})" + ("" if _reads_itself(run) else f" and{against[1:]}")
    done = f"{trained}, trained{where}, {guarded}{against}." if rounds else f"{trained}, {guarded}{against}."
    return f"{done} {assumptions(run)}".strip()


def _reads_itself(run: Run) -> bool:
    """Whether the malicious server needs no attack on what it reads."""
    section = run.identity.config.get("server")
    target = str(section.get("_target_", "")) if isinstance(section, Mapping) else ""
    attack = getattr(malicious, target.rpartition(".")[2], None) if target.startswith("fl_privacy.malicious.") else None
    return attack is not None and bool(attack.reads_images)


def assumptions(run: Run) -> str:
    """Sentences for the head of the page of ``run``; empty where nothing was attacked."""
    found = readings_of(run.summary)
    if not found:
        return ""
    sentences = [uploads_of(run)]
    if not run.identity.undefended and all(reading.attacker is Attacker.PLAIN for reading in found):
        sentences.append("No attacker knew of the defense; one that does may read more (threat_model=adaptive).")
    return " ".join(sentences)


def uploads_of(run: Run) -> str:
    """A sentence on what the attacked uploads of ``run`` were computed from; empty where nothing was attacked."""
    if not readings_of(run.summary) or is_audit(run):
        return ""
    config, trained = run.identity.config, bool(run.of_kind("round"))
    plan, uploads = select(config, "federation.plan"), select(config, "intercept.uploads") or "probe"
    plan = plan if isinstance(plan, Mapping) else {}
    return _probed(run, plan, trained) if uploads == "probe" or not plan else _updates(run, plan)


def said_together(said: Iterable[tuple[str, str]]) -> str:
    """Of (name, sentence): the sentence where all share it, else each with the names that it is of."""
    names: dict[str, list[str]] = {}
    for name, sentence in said:
        if sentence and name not in names.setdefault(sentence, []):
            names[sentence].append(name)
    if len(names) < 2:
        return "".join(names)
    return " ".join(f"{', '.join(of)}: {sentence[0].lower()}{sentence[1:]}" for sentence, of in names.items())


def _probed(run: Run, plan: Mapping[str, Any], trained: bool) -> str:
    number = int(run.identity.config.get("batch_size") or 1)
    kind = kind_of(readings_of(run.summary))
    images = f"one {kind} each, the worst case" if number == 1 else f"{number} {kind}s each"
    attacked = f"Attacked were uploads computed from {images}"
    if not trained or not plan:
        return f"{attacked}."
    if plan.get("shares", "gradient") == "gradient":
        return f"{attacked}; the training batches of {_batch(run, plan)} were not attacked."
    return f"{attacked}; the training updates, each of {_local_training(run, plan)}, were not attacked."


def _updates(run: Run, plan: Mapping[str, Any]) -> str:
    if plan.get("shares", "gradient") == "gradient":
        kind = kind_of(readings_of(run.summary))
        return f"Attacked were the training updates themselves, each the gradient of {_batch(run, plan)} {kind}s."
    return f"Attacked were the training updates themselves, each of {_local_training(run, plan)}."


def _batch(run: Run, plan: Mapping[str, Any]) -> str:
    """Images in a training batch: as set, or all that a client has where that is less."""
    sizes, size = _client_sizes(run), plan.get("batch_size")
    if not sizes:
        return str(size) if size else "all of a client's"
    return _span([min(number, int(size)) if size else number for number in sizes])


def _local_training(run: Run, plan: Mapping[str, Any]) -> str:
    kind = kind_of(readings_of(run.summary))
    if plan.get("steps"):
        return (
            f"{plan['steps']} local step{'s' if plan['steps'] != 1 else ''} on batches of {_batch(run, plan)} {kind}s"
        )
    epochs, sizes = plan.get("epochs") or 1, _client_sizes(run)
    images = f"the {_span(sizes)} {kind}s of a client" if sizes else f"all {kind}s of a client"
    return f"{epochs} epoch{'s' if epochs != 1 else ''} over {images} in batches of {_batch(run, plan)}"


def _client_sizes(run: Run) -> list[int]:
    return [n for row in run.partition.counts if (n := sum(row))] if run.partition else []


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(high) if low == high else f"{low} to {high}"
