"""Runs in which a page would say less than the rows do: texts that count as read without the words, and with them.

    python experiments/word_cases.py

Each case is a run of ``fl-privacy`` with a text an upload; its rows are judged once as if no word had been looked for,
and once as its page judges them. One line of ``--out``/rows.jsonl for each, as it comes.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from row_file import Row, RowFile

from fl_privacy.results import read_run
from fl_privacy.results.counts import counts_of
from fl_privacy.results.verdict import verdict_of

COMMON = "data=sst2 data.max_length=24 victims=4 federation.clients=2 attack=auto attack.evaluations=100"
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


def measured(name: str, folder: Path) -> Row:
    """Run a case and judge its rows twice."""
    place = folder / name.replace(" ", "_").replace(",", "").replace("%", "percent")
    words = f"{COMMON} {CASES[name]}".split()
    command = [sys.executable, "-m", "fl_privacy", "attack", *words, f"out={place}", "overwrite=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"reason": (done.stderr.strip().splitlines() or ["failed"])[-1][:300]}
    run = read_run(next(place.rglob("summary.json")).parent)
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
        if rows.find({"case": name}) is None:
            print(rows.add({"case": name, "settings": settings}, measured(name, options.runs)), flush=True)


if __name__ == "__main__":
    main()
