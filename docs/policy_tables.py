"""Tables of docs/site_policy.md, from experiments/rows/site_policy."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kept_rows import ROWS, markdown, read_rows

Row = Mapping[str, Any]


def policy_table(kind: str, folder: Path = ROWS) -> str:
    """One of ``TABLES``; "Not run." without rows."""
    rows = [row for row in read_rows("site_policy", folder) if row["kind"] == kind]
    return TABLES[kind](rows) if rows else "Not run."


def _yes(said: bool) -> str:
    return "yes" if said else "no"


def _hostile(rows: Sequence[Row]) -> str:
    lines = [
        [row["case"].replace("_", " "), _yes(row["same_bytes"]), _yes(row["example_found"]), row["answer"]]
        for row in rows
    ]
    heads = ["where the app puts the example", "reply the same whatever it knows", "example in the bytes", "what left"]
    return markdown(heads, lines)


def _weights(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        noise = "none" if row["noise_multiplier"] is None else f"{row['noise_multiplier']:g}"
        clip = "none" if row["clip_norm"] is None else f"{row['clip_norm']:g}"
        shares = [f"{100 * row[name]:.1f} %" for name in ("bits_read", "best_decoder_expected", "control")]
        lines.append([clip, noise, *shares])
    return markdown(
        ["clip norm", "noise multiplier", "bits recovered", "by theory", "guessed without the update"], lines
    )


def _honest(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        same = f"{row['same']} of {row['replies']}"
        note = row["note"]
        if row["errors_of_its_own"]:  # the policy then does not name what it never saw
            note = f"{note.partition(';')[0]}; {row['errors_of_its_own']} errors of its own, without the gate too"
        if row["other_memory_order"]:
            note += f"; {row['other_memory_order']} with arrays in the memory order of the message"
        lines.append([row["app"], same, f"{row['repeatable']} of {row['replies']}", note])
    return markdown(
        ["app of Flower, unedited", "replies equal behind the gate", "equal in two runs without", ""], lines
    )


def _kills(rows: Sequence[Row]) -> str:
    heads = ["ended by", "times", "replies that left", "entries", "left without an entry", "torn lines"]
    return markdown(
        heads,
        [
            [
                row["what"],
                str(row["times"]),
                *(f"{row[name]:,}" for name in ("replies_left", "entries", "left_without_entry", "torn_lines")),
            ]
            for row in rows
        ],
    )


def _full(rows: Sequence[Row]) -> str:
    lines = [[r["what"], str(r["replies_left"]), str(r["entries_sent"]), "; ".join(r["then"])] for r in rows]
    return markdown(["", "replies that left", "entries of replies", "then"], lines)


def _rollback(rows: Sequence[Row]) -> str:
    return markdown(
        ["ledger", "at the start", "a gate that runs"],
        [[row["what"], row["noticed_at_start"] or "not noticed", row["running_gate"]] for row in rows],
    )


def _floating(rows: Sequence[Row]) -> str:
    names = {"torch": "`torch.randn`, float32", "gate": "the gate's"}
    lines = [[names[row["noise"]], f"{row['advantage']:.3f}", str(row["releases"])] for row in rows]
    return markdown(["noise", "advantage of the attacker", "releases of each kind"], lines)


def _overhead(rows: Sequence[Row]) -> str:
    heads = ["model", "policy", "gate adds a round", "gate and process add", "an epoch of 2,500 images", "share of it"]
    lines = []
    for row in rows:
        added, epoch = row["gate_and_process_add_s"], row["epoch_s"]
        assert row["images"] == 2500
        times = [f"{1000 * row['gate_adds_s']:.1f} ms", f"{1000 * added:.1f} ms", f"{epoch:.1f} s"]
        lines.append([row["model"], row["policy"], *times, f"{100 * added / epoch:.1f} %"])
    return markdown(heads, lines)


def _federation(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        ledger = ", ".join(f"{number} {what}" for what, number in sorted(row.get("ledger", {}).items()))
        train = f"{row['train_replies']} replies, {row['train_failures']} failures"
        evaluate = f"{row['evaluate_replies']} replies, {row['evaluate_failures']} refused"
        lines.append(
            [
                str(row["sites_with_policy"]),
                str(row["rounds"]),
                f"{row['seconds'] / row['rounds']:.0f}",
                train,
                evaluate,
                ledger,
                str(row.get("refused_in_log", "")),
            ]
        )
    heads = [
        "sites with a policy",
        "rounds",
        "seconds a round",
        "training",
        "evaluation",
        "the site's ledger",
        "refusals in its log",
    ]
    return markdown(heads, lines)


def _example(rows: Sequence[Row]) -> str:
    lines = []
    for row in (row for row in rows if "equal" in row):
        unlike = ", ".join(row["unlike"]) if row["equal"] < row["replies"] else ""
        told = [f"not equal: {unlike}"] if unlike else []
        if unlike and row.get("models"):
            told.append(f"of the models that the server sent, {row['models_equal']} of {row['models']} are equal")
        why = "; ".join([*told, *filter(None, [row.get("note")]), *row["why"]])
        lines.append([row["app"], f"{row['equal']} of {row['replies']}", str(row["refused"]), why])
    table = markdown(["app of Flower, unedited", "replies equal behind the gate", "refused", ""], lines)
    reasons: dict[str, list[str]] = {}
    for row in (row for row in rows if "reason" in row):
        reasons.setdefault(row["reason"], []).append(row["example"])
    others = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    missing = {row["example"] for row in read_rows("flower_examples")} - {"docs", *(row["example"] for row in rows)}
    rest = [f"Not compared: {'; '.join(others)}."] if others else []
    rest += [f"Not run: {', '.join(sorted(missing))}."] if missing else []
    return "\n\n".join([table, *rest])


def _bundle(rows: Sequence[Row]) -> str:
    heads = ["", "CPU s of the app", "other CPU s, medians", "same arrays", "CPU, ratio", "clock, ratio"]
    lines = list[list[str]]()
    for row in rows:
        for name, shown in (("plain", "a plain process"), ("gated", "behind the gate")):
            seconds = [f"{row[f'{name}_{what}']:.2f}" for what in ("app_cpu_s", "other_cpu_s")]
            ratios = [_yes(row["same_arrays"]), f"{row['cpu_ratio']:.2f}", f"{row['ratio']:.2f}"]
            lines.append([shown, *seconds, *(ratios if name == "gated" else ["", "", ""])])
    return markdown(heads, lines)


def _transcript(rows: Sequence[Row]) -> str:
    lines = list[str]()
    for step in rows[-1]["steps"]:
        lines += [f"{step['who']}$ {step['command']}", *step["said"], ""]
    return "\n".join(["```text", *lines[:-1], "```"])


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "hostile": _hostile,
    "weights": _weights,
    "honest": _honest,
    "kills": _kills,
    "full": _full,
    "rollback": _rollback,
    "floating": _floating,
    "overhead": _overhead,
    "federation": _federation,
    "example": _example,
    "bundle": _bundle,
    "transcript": _transcript,
}
