"""DAGER's public code and ours on the same gradients: the same texts, and the seconds that a token takes.

    python experiments/dager_code.py --program CHECKOUT --older-python PYTHON

CHECKOUT is of insait-institute/dager-gradient-inversion, PYTHON has packages that it runs with (its ``environment.yml``
names them). The networks are of 12 blocks, as that code expects, 128 wide and as drawn, in folders of the names that it
knows, so that nothing of it is edited. One line of ``--out``/rows.jsonl for each batch size and network; the same
command goes on.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from row_file import Row, RowFile
from safetensors.torch import load_file

from fl_privacy.attacks import Dager
from fl_privacy.attacks.attack import within
from fl_privacy.checks.packages import minilm_folder
from fl_privacy.data.texts import build_tokenizer
from fl_privacy.models import hugging_face
from fl_privacy.types import Certainty, Knowledge, LocalPlan, ModelState, Observation, Upload, VictimId

TOLERANCE = {1: "1e-7", 2: "1e-7", 4: "1e-8"}
"""Of the rank by batch size, as the authors' readme has it."""

FILTERS = {"gpt2": "all", "bert-base-uncased": "maxB"}
"""Of the first layer, as their scripts have it."""

END = "<|endoftext|>"


def network_folder(folder: Path, name: str, texts: list[str]) -> Path:
    """Write a drawn network of ``name``'s kind and its tokenizer into ``folder``/``name``."""
    import transformers  # noqa: PLC0415
    from tokenizers import decoders  # noqa: PLC0415

    place = folder / name
    if (place / "model.safetensors").is_file():
        return place
    place.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    if name == "gpt2":
        tokenizer = build_tokenizer("bpe", texts, 8000)
        tokenizer.add_special_tokens([END])
        tokenizer.decoder = decoders.ByteLevel()
        size, told = tokenizer.get_vocab_size(), {"eos_token": END}
        config = transformers.GPT2Config(
            vocab_size=size,
            n_positions=64,
            n_embd=128,
            n_layer=12,
            n_head=4,
            eos_token_id=size - 1,
            bos_token_id=size - 1,
        )
        network: Any = transformers.GPT2ForSequenceClassification(config)
    else:
        tokenizer = build_tokenizer(str(minilm_folder()), texts, 0)
        told = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
        config = transformers.BertConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=128,
            num_hidden_layers=12,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=64,
        )
        network = transformers.BertForSequenceClassification(config)
    tokenizer.save(str(place / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **told}
    if name == "gpt2":  # as the real one's: GPT-2 would add the embeddings of token types
        about["model_input_names"] = ["input_ids", "attention_mask"]
    (place / "tokenizer_config.json").write_text(json.dumps(about))
    network.save_pretrained(place)
    return place


def authors_answers(folder: Path, name: str, texts: list[list[str]], labels: list[list[int]], asked: Any) -> list[Any]:
    """Run the authors' program; return what it read and how long it took, batch by batch."""
    size = len(texts[0])
    arguments = f"--dataset sst2 --split val --n_inputs {len(texts)} --batch_size {size} --l1_filter {FILTERS[name]}"
    arguments += (
        f" --l2_filter non-overlap --model_path {name} --device cpu --task seq_class --rank_tol {TOLERANCE[size]}"
    )
    if asked.threshold:
        arguments += f" --l1_span_thresh {asked.threshold}"
    told = {"program": str(asked.program.absolute()), "arguments": arguments.split(), "texts": texts, "labels": labels}
    (folder / "asked.json").write_text(json.dumps(told))
    (folder / "answered.json").unlink(missing_ok=True)
    command = [str(asked.older_python.absolute()), str(Path(__file__).with_name("dager_authors.py").absolute())]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, cwd=folder, check=False, timeout=asked.limit, capture_output=True)
        if done.returncode < 0:
            raise SystemExit(f"the authors' program was ended by signal {-done.returncode}; start the command again")
    found = folder / "answered.json"
    return json.loads(found.read_text()) if found.is_file() else []


def _name_of(theirs: str) -> str:
    """Return our name of a parameter."""
    head = theirs.replace("score.", "classifier.")
    return head if head.startswith("classifier.") else f"network.{theirs.partition('.')[2]}"


def ours(folder: Path, name: str, answers: list[Any], asked: Any) -> tuple[list[list[list[int]]], int, float]:
    """Read the same gradients by ours; return the texts of each batch, how many are proven, and seconds."""
    size = build_tokenizer(str(folder / name), [], 0).get_vocab_size()
    model = hugging_face(vocabulary_size=size, num_classes=2, name=str(folder / name)).eval()
    own, seen = dict(model.named_parameters()), []
    drawn = load_file(folder / "head.safetensors")
    own["classifier.weight"].data.copy_(drawn["weight"])
    own["classifier.bias"].data.copy_(drawn.get("bias", torch.zeros(2)))
    for number, one in enumerate(answers):
        tensors = {_name_of(n): g for n, g in load_file(folder / f"gradients_{number}.safetensors").items()}
        seen.append(
            Observation(
                id=VictimId(1, number, 0),
                model=model,
                sent=ModelState.of(model),
                upload=Upload(tensors={n: g for n, g in tensors.items() if n in own}, num_examples=len(one["tokens"])),
                plan=LocalPlan(),
                input_shape=(max(map(len, one["tokens"])),),
                num_classes=2,
                knowledge=Knowledge(),
            )
        )
    began = time.process_time()
    with within(asked.limit):
        found = Dager()(seen, seed=0)
    seconds = time.process_time() - began
    texts = [[] if f.batch is None else [row[row >= 0].tolist() for row in f.batch.inputs] for f in found]
    return texts, sum(f.certainty is Certainty.PROVEN for f in found), seconds


def exact(read: list[list[int]], truth: list[list[int]]) -> int:
    """Count the texts that were read token by token, each guess used once."""
    left, right = [list(guess) for guess in read], 0
    for text in truth:
        if text in left:
            left.remove(text)
            right += 1
    return right


def measured(name: str, size: int, asked: argparse.Namespace) -> Row:
    """Measure both on the same batches."""
    folder = asked.work / f"{name}_{size}"
    raw = asked.sentences
    place = network_folder(folder, name, [text for text, _ in raw])
    short = [(t, y) for t, y in raw if 4 <= len(t.split()) <= asked.words][: size * asked.number]
    assert len(short) == size * asked.number
    texts = [[t for t, _ in short[k : k + size]] for k in range(0, len(short), size)]
    labels = [[y for _, y in short[k : k + size]] for k in range(0, len(short), size)]
    answers = authors_answers(folder, place.name, texts, labels, asked)
    if not answers:
        return {"reason": "the authors' program gave no answer in time"}
    read, proven, seconds = ours(folder, place.name, answers, asked)
    truth, tokens = [a["tokens"] for a in answers], sum(len(t) for a in answers for t in a["tokens"])
    total = sum(map(len, truth))
    theirs = [exact(a["guessed"], t) for a, t in zip(answers, truth, strict=True)]
    mine = [exact(r, t) for r, t in zip(read, truth, strict=True)]
    return {
        "batches": len(answers),
        "texts": total,
        "tokens": tokens,
        "exact_authors": sum(theirs),
        "exact_ours": sum(mine),
        "proven_ours": proven,
        "failed_authors": sum(bool(a["reason"]) for a in answers),
        "seconds_a_token_authors": round(sum(a["seconds"] for a in answers) / tokens, 4),
        "seconds_a_token_ours": round(seconds / tokens, 4),
        "median_seconds_authors": round(statistics.median(a["seconds"] for a in answers), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, required=True, help="checkout of the authors' code")
    parser.add_argument("--older-python", type=Path, required=True, help="with the packages that it pins")
    parser.add_argument("--networks", nargs="+", choices=FILTERS, default=["gpt2"])
    parser.add_argument("--sizes", nargs="+", type=int, choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument("--threshold", default="", help="of the first layer's span; theirs, 1e-5, if left out")
    parser.add_argument("--number", type=int, default=4, help="of batches")
    parser.add_argument("--words", type=int, default=9, help="of a text, at most")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each cell of each program")
    parser.add_argument("--work", type=Path, default=Path("runs/dager_code"))
    parser.add_argument("--out", type=Path, default=Path("experiments/rows/dager_code"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    from fl_privacy.data.sources import ParquetFolder, environment_folder  # noqa: PLC0415

    place = environment_folder("sst2")
    assert place is not None, "set FL_PRIVACY_DATA"
    table = ParquetFolder(place).tables()["train"]
    asked.sentences = list(zip(map(str, table["sentence"][:]), map(int, table["label"][:]), strict=True))
    rows = RowFile(asked.out)
    for name in asked.networks:
        for size in asked.sizes:
            key = {"network": name, "batch": size, "words": asked.words}
            key |= {"threshold": asked.threshold} if asked.threshold else {}
            if rows.find(key) is None:
                print(rows.add(key, measured(name, size, asked)), flush=True)


if __name__ == "__main__":
    main()
