"""Honest apps of Flower's checkout, unedited, without and with a gate that protects nothing: are the bytes the same?

    PYTHONPATH=. python experiments/site_policy_honest.py --flower CHECKOUT --mirror DIR [--out ROWS] [--only NAME ...]

Each app runs three times with the same seed, in a process of its own: twice without, to see that it repeats itself, and
once behind a gate whose policy names what the app sends, rounds nothing and protects nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from flower_examples import SETTINGS, Setting
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from row_file import RowFile, takes_rows

HERE = Path(__file__).resolve().parent
APPS = (
    "quickstart-pytorch",
    "quickstart-numpy",
    "quickstart-sklearn",
    "quickstart-jax",
    "quickstart-tensorflow",
    "federated-vae",
    "custom-mods",
    "quickstart-huggingface",
    "quickstart-monai",
    "quickstart-pytorch-lightning",
    "fl-tabular",
    "opacus",
)
LIMIT = 900.0


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", type=Path, required=True, help="a checkout of Flower's repository")
    parser.add_argument("--mirror", type=Path, required=True, help="data sets by hub name, see flower_examples.py")
    parser.add_argument("--only", nargs="*", default=list(APPS))
    parser.add_argument("--here", help=argparse.SUPPRESS)
    takes_rows(parser)
    asked = parser.parse_args()
    if asked.here:
        print("\n" + json.dumps(compared(asked.here, asked.flower, asked.mirror)))
        return
    kept = RowFile(asked.out)
    for name in asked.only:
        command = [
            sys.executable,
            __file__,
            "--flower",
            str(asked.flower),
            "--mirror",
            str(asked.mirror),
            "--here",
            name,
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        environment["HF_HOME"] = str(asked.mirror.absolute() / "hf")
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
            row = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            print(f"{name}: took longer than {LIMIT:g} s", flush=True)
            continue
        except (ValueError, IndexError):
            print(f"{name}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            continue
        print(name, row, flush=True)
        if row["replies"]:
            kept.add({"kind": "honest", "app": name}, row)


def compared(name: str, flower: Path, mirror: Path) -> dict[str, Any]:
    """Run an app three times and compare its replies."""
    from fl_privacy.auditing.app import trial  # noqa: PLC0415
    from fl_privacy.auditing.app.bundle import read_app  # noqa: PLC0415
    from fl_privacy.flower.gate import Gate  # noqa: PLC0415
    from fl_privacy.flower.inside.serialized import bytes_of  # noqa: PLC0415
    from fl_privacy.site.gate.policy import parse_policy  # noqa: PLC0415

    setting = SETTINGS.get(name, Setting())
    app = read_app(flower / "examples" / name / setting.folder)
    runs: list[list[tuple[str, bytes, bytes]]] = []
    seen: list[tuple[Message, Message | None]] = []
    original = trial.CountingGrid._answer

    def noted(self: Any, message: Message) -> Message:
        kind, asked = str(message.metadata.message_type), message.content
        reply = original(self, message)
        failed = reply.has_error()
        runs[-1].append((kind, b"" if failed else bytes_of(reply.content), b"" if failed else values_of(reply)))
        seen.append((Message(asked, 1, kind), None if reply.has_error() else Message(reply.content, 1, kind)))
        return reply

    trial.CountingGrid._answer = noted  # type: ignore[method-assign]
    settings = trial.TrialSettings(
        nodes=min(setting.nodes, 4),
        rounds=1,
        run_config=(setting.config.format(mirror=mirror),) if setting.config else (),
        node_config=(setting.node_config.replace("{mirror}", str(mirror)),) if setting.node_config else (),
        mirror=mirror.absolute(),
    )
    with tempfile.TemporaryDirectory() as files, trial.around(app.folder, Path(files), settings.mirror):
        begun, refused = app.load(trial.stops_of), Counter[str]()
        config = app.with_config(settings.run_config, settings.rounds)

        def guarded(message: Message, context: Context) -> Message:
            return gates[int(context.node_config["partition-id"])](message, context, begun.client)

        for _ in range(2):
            runs.append([])
            trial._run(begun.server, begun.client, config, settings)
        policy = parse_policy(json.dumps(naming_all(seen)).encode(), name, Path(tempfile.gettempdir()))
        gates = [Gate(policy, name=app.name) for _ in range(settings.nodes)]
        runs.append([])
        trial._run(begun.server, guarded, config, settings)
        for gate in gates:
            refused.update(detail for _, detail in gate.refused)
    first, second, behind = ([each for each in run if each[1]] for run in runs)
    pairs = list(zip(first, behind, strict=False))
    same = sum(a[2] == b[2] for a, b in pairs)
    ordered = same - sum(a[1] == b[1] for a, b in pairs)
    floats = (
        "weights and figures"
        if any(reply and any(reply.content.array_records.values()) for _, reply in seen)
        else "figures alone"
    )
    return {
        "replies": len(first),
        "errors_of_its_own": sum(not each[1] for each in runs[0]),
        "same": same,
        "other_memory_order": ordered,
        "repeatable": sum(a == b for a, b in zip(first, second, strict=False)),
        "note": floats + (f"; refused: {refused.most_common(1)[0][0]:.80}" if refused else ""),
    }


def values_of(reply: Message) -> bytes:
    """Return what ``bytes_of`` does, but for the order in memory of arrays, which is the message's behind a gate."""
    from fl_privacy.flower.inside.serialized import bytes_of  # noqa: PLC0415

    content = RecordDict()
    for name, record in reply.content.items():
        if isinstance(record, ArrayRecord):
            ordered = {k: np.ascontiguousarray(a.numpy()).reshape(a.shape) for k, a in record.items()}
            record = ArrayRecord({k: Array.from_numpy_ndarray(a) for k, a in ordered.items()})  # noqa: PLW2901
        content[name] = record
    return bytes_of(content)


def naming_all(messages: list[tuple[Message, Message | None]]) -> dict[str, Any]:
    """Write a policy that names what questions and answers hold, and rounds nothing."""
    arrays, received, sends = set[str](), Part(), dict[str, dict[str, Any]]()
    for question, reply in messages:
        arrays |= set(question.content.array_records)
        received.name(question.content.config_records)
        if reply is None:
            continue
        kind = str(question.metadata.message_type).removesuffix(".default")
        told = sends.setdefault(kind, {"metrics": Part(), "config": Part()})
        told["metrics"].name(reply.content.metric_records)
        told["config"].name(reply.content.config_records)
        if any(reply.content.array_records.values()):
            told["arrays"] = {"like": "received", "dtype": ["float16", "float32", "float64"], "counters": "sent"}
            if set(reply.content.array_records) != set(question.content.array_records):
                told["arrays"]["record"] = next(iter(reply.content.array_records))
    plain = {
        kind: {name: part.plain if isinstance(part, Part) else part for name, part in told.items()}
        for kind, told in sends.items()
    }
    records = {"arrays": sorted(arrays), "config": received.plain}
    return {"version": 1, "receives": {"records": records, "run_config": "any", "guard": False}, "sends": plain}


class Part:
    """Rules of metrics or settings, by what was seen of them."""

    def __init__(self) -> None:
        self.records, self.allow = dict[str, None](), dict[str, dict[str, Any]]()

    def name(self, records: Any) -> None:
        """Name all that ``records`` hold: numbers as they are, texts as those that were seen."""
        for record, values in records.items():
            self.records[record] = None
            for key, value in values.items():
                if isinstance(value, str):
                    listed = self.allow.setdefault(key, {"one_of": []})["one_of"]
                    listed.extend([value] if value not in listed else [])
                else:
                    length = {"length": len(value)} if isinstance(value, list) else {}
                    self.allow[key] = {"exact": True, **length}

    @property
    def plain(self) -> dict[str, Any]:
        """Return them as in a policy's file."""
        return {"records": list(self.records) or ["none"], "allow": self.allow}


if __name__ == "__main__":
    main()
