"""Tables of what was measured on texts, for the site's pages."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kept_rows import ROWS, Row, markdown, read_rows

from fl_privacy.report.advice import SHIPPED
from fl_privacy.runs.folder.study import MeasuredDefense, read_tables

METHODS: Mapping[str, str] = {
    "loss": "loss",
    "cosine": "gradient, cosine",
    "gradient_norm": "gradient, norm",
    "fedmia": "FedMIA, cosine",
    "fedmia_loss": "FedMIA, loss",
    "min_k": "least likely tokens",
    "final_loss": "final model, loss",
    "final_reference": "final model, loss compared with the first",
    "final_min_k": "final model, least likely tokens",
}


MEASURED: Mapping[str, str] = {"sst2": "SST-2", "ag_news": "AG News"}
"""Tables of ``fl-privacy advise`` -> what they are of."""


def texts_table(name: str, folder: Path = ROWS) -> str:
    """Render the rows of ``name``; "Not run." without any."""
    if name == "defenses":
        return _defenses()
    rows = read_rows(name, folder)
    return _TABLES[name](rows) if rows else "Not run."


def _defenses() -> str:
    """Render accuracy beside leakage of the tables that ``fl-privacy advise`` answers from."""
    files = {data: SHIPPED / f"{data}.json" for data in MEASURED}
    tables = {data: read_tables(file)[0] for data, file in files.items() if file.is_file()}
    lines: dict[str, list[str]] = {}
    for number, table in enumerate(tables.values()):
        for defense in table.defenses:
            line = lines.setdefault(defense.name, [defense.name, *["-"] * 3 * len(tables)])
            line[1 + 3 * number : 4 + 3 * number] = _defended(defense)
    heads = [f"{MEASURED[data]}: {head}" for data in tables for head in ("accuracy", "texts reconstructed", "F1")]
    return markdown(["", *heads], list(lines.values()))


def _defended(defense: MeasuredDefense) -> list[str]:
    """Return accuracy, texts that were read, and the mean F1 of tokens, by the strongest attacker."""
    found = defense.by_threat["adaptive"]
    exactly = f", {found.exact} word for word" if found.exact else ""
    return [f"{defense.accuracy:.1%}", f"{found.read} of {found.images}{exactly}", f"{found.psnr:.2f}"]


def _membership(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["model"],
            ("all" if row["trained"] == "all" else "adapters, head")
            + ("" if row["defense"] == "none" else f", {row['defense']}"),
            METHODS[row["method"]],
            f"{row['auc']:.2f} [{row['auc_low']:.2f}, {row['auc_high']:.2f}]",
            f"{row['control_auc']:.2f}",
            f"{row['tpr_at_1_percent']:.1%} [{row['tpr_low']:.1%}, {row['tpr_high']:.1%}]",
            f"{row['control_tpr']:.1%}",
        ]
        for row in rows
    ]
    heads = ["", "trained", "asked by", "AUC", "control", "TPR at 1 % FPR", "control"]
    return markdown(heads, lines)


def _bottlenecks(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        kind, _, size = row["adapters"].partition(" ")
        lines.append(
            [
                row["model"],
                row["data"],
                "behind the embeddings, units " + size if kind == "bottleneck" else "peft's LoRA, rank " + size,
                str(row["batch"]),
                f"{row['words']:.0f}",
                f"{row['f1']:.2f} (control {row['control_f1']:.2f})",
                str(row["false_words"]),
                f"{row['all_words_there']:.0%}",
                f"{row['exact']:.0%}",
                f"{row['rouge_l']:.2f}",
            ]
        )
    heads = ["", "data", "adapters", "batch", "words", "F1 of words", "false", "all words there", "exact", "ROUGE-L"]
    return markdown(heads, lines)


def _public_dager(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["network"] + (f", threshold {row['threshold']}" if "threshold" in row else ""),
            str(row["batch"]),
            str(row["texts"]),
            str(row["tokens"]),
            f"{row['exact_authors']} of {row['texts']}" + (" (error)" if row["failed_authors"] else ""),
            f"{row['exact_ours']} of {row['texts']}",
            f"{row['seconds_a_token_authors']:.3f}",
            f"{row['seconds_a_token_ours']:.3f}",
        ]
        for row in rows
    ]
    heads = ["kind", "batch", "texts", "tokens", "exact, theirs", "exact, ours", "s a token, theirs", "ours"]
    return markdown(heads, lines)


_TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "text_membership": _membership,
    "bottleneck_adapters": _bottlenecks,
    "dager_code": _public_dager,
}
