"""Runs in which a page would say less than the rows do: texts that count as read without the words, and with them.

    python experiments/word_cases.py

Each case is a run of ``fl-privacy`` with a text an upload. *Descents* is what ``attack=tag``, which looks for no words,
reads of the same uploads; the rows of ``attack=auto`` are judged once as if no word had been looked for, and once as
its page judges them. One line of ``--out``/rows.jsonl for each, as it comes.
"""

import argparse
from pathlib import Path

from row_file import Row, RowFile

from fl_privacy.errors import UserError
from fl_privacy.measure.counts import counts_of
from fl_privacy.runs.attack import attack_experiment
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.folder import Run, read_run
from fl_privacy.runs.folder.verdict import verdict_of
from fl_privacy.runs.run_location import Monitor

COMMON = "data=sst2 data.max_length=24 victims=4 federation.clients=2"
ATTACKS = {"auto": "attack=auto attack.evaluations=25", "descents": "attack=tag attack.iterations=200"}
ADAPTERS = "model=bert_tiny model.lora_rank=64"
FROZEN = "model=bert_tiny federation.plan.frozen=[words.weight,positions.weight]"
ADAMW = "federation=fedavg federation.plan.optimizer=adamw federation.plan.lr=1e-3"
CASES = {
    "8-bit rounding": "model=bert_tiny defense=quantization defense.bits=8",
    "pruning 0.9": "model=bert_tiny defense=pruning defense.rate=0.9",
    "pruning 0.99": "model=bert_tiny defense=pruning defense.rate=0.99",
    "4-bit rounding": "model=bert_tiny defense=quantization defense.bits=4",
    "2-bit rounding": "model=bert_tiny defense=quantization defense.bits=2",
    "1 % of the elements shared": "model=bert_tiny defense=selective_sharing defense.share=0.01",
    "noise of 0.0003": "model=bert_tiny defense=dp_noise defense.scale=0.0003",
    "one step of AdamW": f"model=bert_tiny {ADAMW}",
    "one step of AdamW, 8-bit rounding": f"model=bert_tiny {ADAMW} defense=quantization defense.bits=8",
    "frozen embeddings, 8-bit rounding": f"{FROZEN} defense=quantization defense.bits=8",
    "frozen embeddings, pruning 0.5": f"{FROZEN} defense=pruning defense.rate=0.5",
    "adapters of rank 64": ADAPTERS,
    "adapters of rank 64, 8-bit rounding": f"{ADAPTERS} defense=quantization defense.bits=8",
    "adapters of rank 64, one step of AdamW": f"{ADAPTERS} {ADAMW}",
}


def run_of(name: str, attack: str, folder: Path) -> Run | str:
    """Run a case by an attack; return why not where it fails."""
    words = f"{COMMON} {ATTACKS[attack]} {CASES[name]} out={folder}".split()
    try:
        return read_run(attack_experiment(compose_run(words), Monitor()))
    except UserError as error:
        return str(error)[:300]


def by_descents(name: str, folder: Path) -> Row:
    """Run a case by descents alone."""
    run = run_of(name, "descents", folder)
    if isinstance(run, str):
        return {"descents_reason": run}
    records = [dict(record) for record in run.of_kind("image")]
    return {"read_by_descents": counts_of(records).read, "tone_by_descents": str(verdict_of(run).tone)}


def measured(name: str, folder: Path) -> Row:
    """Run a case and judge its rows twice."""
    run = run_of(name, "auto", folder)
    if isinstance(run, str):
        return {"reason": run}
    records = [dict(record) for record in run.of_kind("image")]
    without = [{k: v for k, v in record.items() if not k.startswith("word")} for record in records]
    before, after, verdict = counts_of(without), counts_of(records), verdict_of(run)
    words_there = sum(int(record.get("words_there") or 0) for record in records)
    return {
        "texts": len(records),
        "read_without_words": before.read,
        "read": after.read,
        "words": words_there,
        "words_named": sum(int(record.get("words_read") or 0) for record in records),
        "words_false": sum(int(record.get("words_false") or 0) for record in records),
        "word_f1": round(sum(float(record.get("word_f1") or 0.0) for record in records) / max(1, len(records)), 4),
        "tone": str(verdict.tone),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("experiments/rows/word_cases"))
    parser.add_argument("--runs", type=Path, default=Path("runs/word_cases"))
    options = parser.parse_args()
    rows = RowFile(options.out)
    for name, settings in CASES.items():
        key = {"case": name, "settings": settings}
        if rows.find({"case": name}) is None:
            print(rows.add(key, measured(name, options.runs)), flush=True)
    for name, settings in CASES.items():
        found = rows.find({"case": name})
        if found is not None and not any("descents" in column for column in found):
            print(rows.add({"case": name, "settings": settings}, found | by_descents(name, options.runs)), flush=True)


if __name__ == "__main__":
    main()
