"""What a site's policy holds back: hostile apps, honest ones, kills, full disks, floating-point noise, cost.

    PYTHONPATH=. python experiments/site_policy.py [--only hostile weights ...] [--flower CHECKOUT --mirror DIR]

Each part adds its rows to ``--out``. ``honest`` needs a checkout of Flower and data under hub names, as
``flower_examples.py`` makes them. The federation of real nodes is ``site_policy_federation.py``.
"""

import argparse
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from row_file import Row, RowFile, takes_rows
from torch import nn

from fl_privacy.flower.app_process import Cell
from fl_privacy.flower.gate import Gate
from fl_privacy.flower.inside.identity import identify_process
from fl_privacy.flower.inside.serialized import bytes_of, message_bytes, message_of
from fl_privacy.models import ResNet18
from fl_privacy.site.gate.ledger import Ledger, LedgerError
from fl_privacy.site.gate.policy import SitePolicy, read_policy
from tests.gate import apps
from tests.gate.apps import OPEN, SECRETS

HERE = Path(__file__).resolve().parent
KILLS, FULL, ROUNDS = 20, 5, 30
IMAGES, STEPS = 2500, 10
"""Images of an epoch, and steps by which its time is told."""

NOISED = OPEN + "protect: {clip_norm: CLIP, noise: {noise_multiplier: NOISE}}\n"


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=ROUNDS, help="rounds of what is timed, examples of what is read")
    takes_rows(parser)
    asked = parser.parse_args()
    identify_process()
    kept = RowFile(asked.out)
    for name in asked.only:
        for key, figures in PARTS[name](asked):
            print(kept.add({"kind": name, **key}, figures), flush=True)


Found = Iterator[tuple[Row, Row]]


@contextmanager
def site(policy: str) -> Iterator[Path]:
    """Make a site's folder with a policy, a key, and an example; it is removed with the block."""
    folder = Path(tempfile.mkdtemp(prefix="fl-privacy-site-"))
    try:
        for name in ("data", "ledger", "anchor"):
            (folder / name).mkdir(mode=0o700)
        (folder / "node.key").write_bytes(b"the key of the node")
        (folder / "site.yaml").write_text(policy)
        (folder / "site.yaml").chmod(0o600)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def policy_in(folder: Path, **limits: Any) -> SitePolicy:
    """Load the policy of a site, whose app reads its data."""
    policy = read_policy(folder / "site.yaml")
    return replace(policy, app=replace(policy.app, reads=(folder / "data",), **limits))


def question(case: int = 0, w: np.ndarray | None = None) -> Message:
    """Return a training message."""
    w = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32) if w is None else w
    arrays = {"w": w, "b": np.zeros(8, np.float32), "n": np.array(3)}
    content = {
        "arrays": ArrayRecord({key: Array.from_numpy_ndarray(value) for key, value in arrays.items()}),
        "config": ConfigRecord({"case": case}),
    }
    made = message_of(message_bytes(Message(RecordDict(content), 1, "train")))
    made.metadata.__dict__["_message_id"] = "1"
    return made


def context(folder: Path) -> Context:
    """Return a node's context, which tells the app all that it would have to guess."""
    config = {
        "data": str(folder / "data" / "example"),
        "key": str(folder / "node.key"),
        "ledger": str(folder / "ledger" / "ledger"),
        "anchor": str(folder / "anchor" / "anchor"),
        "policy": str(folder / "site.yaml"),
        "address": "127.0.0.1:9092",
        "gate": os.getpid(),
    }
    return Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})


def wire(reply: Message) -> bytes:
    """Return all of a reply that an app could have touched, as bytes of the wire."""
    about = reply.metadata
    told = f"{about.dst_node_id} {about.src_node_id} {about.message_type} {about.group_id} ".encode()
    return told + (
        f"{reply.error.code} {reply.error.reason}".encode() if reply.has_error() else bytes_of(reply.content)
    )


def hostile(asked: argparse.Namespace) -> Found:
    """Compare replies of hostile apps that know two different examples."""
    with site(OPEN) as folder:
        policy = policy_in(folder)
        gate, cell = Gate(policy, name="hostile"), Cell("tests.gate.apps:hostile", policy.app)
        held = cell.start()
        try:
            for number, case in enumerate(apps.CASES):
                replies = []
                for example in SECRETS:
                    (folder / "data" / "example").write_bytes(example)
                    replies.append(gate(question(number), context(folder), cell))
                first, second = map(wire, replies)
                yield (
                    {"case": case},
                    {
                        "same_bytes": first == second,
                        "example_found": any(
                            e[:8] in f or e[:8].hex().encode() in f for e in SECRETS for f in (first, second)
                        ),
                        "answer": replies[0].error.reason if replies[0].has_error() else "left, as the policy has it",
                        "kept_apart": held.in_words(),
                    },
                )
        finally:
            cell.close()


def weights(asked: argparse.Namespace) -> Found:
    """Read 16 bits of an example from the weights of one reply, by clip and noise; a control never saw it."""
    for clip, noise in ((None, None), (1.0, 0.1), (1.0, 0.5), (1.0, 1.0), (1.0, 4.8), (0.1, 1.0), (10.0, 1.0)):
        text = OPEN if noise is None else NOISED.replace("CLIP", str(clip)).replace("NOISE", str(noise))
        with site(text) as folder:
            read, control = _bits_read(Gate(read_policy(folder / "site.yaml")), folder, asked.repeats)
        expected = 1.0 if noise is None else 0.5 * (1 + math.erf(1 / (4 * noise) / math.sqrt(2)))
        yield (
            {"clip_norm": clip, "noise_multiplier": noise},
            {"bits_read": read, "best_decoder_expected": expected, "control": control, "examples": asked.repeats},
        )


def _bits_read(gate: Gate, folder: Path, examples: int) -> tuple[float, float]:
    rng, right, guessed = np.random.default_rng(0), [], []
    before = np.zeros((64, 64), np.float32)
    for _ in range(examples):
        example = rng.bytes(2)
        (folder / "data" / "example").write_bytes(example)
        reply = gate(question(w=before), context(folder), apps.writing)
        change = reply.content.array_records["arrays"]["w"].numpy() - before
        bits = np.unpackbits(np.frombuffer(example, np.uint8))
        read = change.ravel().reshape(-1, len(bits)).sum(0) > 0  # each bit has a 16th of the values for itself
        right.append(np.mean(read == bits))
        guessed.append(np.mean((rng.random(len(bits)) < 0.5) == bits))
    return float(np.mean(right)), float(np.mean(guessed))


def kills(asked: argparse.Namespace) -> Found:
    """End a gate that answers by kill -9 at random moments; then look for a reply without its entry."""
    rng, text = random.Random(0), OPEN + "protect: {clip_norm: 1.0, noise: {noise_multiplier: 1.0}}\n"
    with site(text) as folder:
        replies, torn = folder / "replies", 0
        for kill in range(KILLS):
            process = _gate(folder, replies)
            _wait(lambda: replies.exists() and replies.read_text().count("up") > kill)  # noqa: B023
            time.sleep(rng.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
            process.wait()
        policy = read_policy(folder / "site.yaml")
        assert policy.budget is not None
        ledger = Ledger(policy.budget.ledger, policy.budget.anchor)
        torn = int(ledger.mend(0.5))
        entries, left = ledger.entries(), replies.read_text().count("left")
        yield (
            {"what": "kill -9"},
            {
                "times": KILLS,
                "replies_left": left,
                "entries": len(entries),
                "left_without_entry": max(0, left - sum(entry.outcome == "sent" for entry in entries)),
                "torn_lines": torn,
            },
        )


def full(asked: argparse.Namespace) -> Found:
    """Let a gate answer until the file system of its ledger, one of 64 KiB, is full."""
    rng, text = random.Random(1), OPEN
    for number in range(FULL):
        with site(text) as folder:
            replies, room = folder / "replies", 4096 * rng.randrange(3, 14)
            process = _gate(folder, replies, str(room))
            process.wait(120)
            said = replies.read_text().splitlines()
            left, refused = said.count("left"), [line for line in said if line.startswith("refused")]
            sent = next((int(line.rpartition(" ")[2]) for line in said if line.startswith("in the ledger")), -1)
            yield {"what": f"disk {number + 1}"}, {"replies_left": left, "entries_sent": sent, "then": refused[:1]}


def rollback(asked: argparse.Namespace) -> Found:
    """Put an older copy of the ledger back, and take the ledger away."""
    for what in ("older copy", "missing", "shortened", "one entry changed"):
        with site(OPEN) as folder:
            policy = read_policy(folder / "site.yaml")
            gate = Gate(policy)
            assert policy.budget is not None
            path = policy.budget.ledger
            message, app = question(), apps.honest
            for _ in range(3):
                gate(message, context(folder), app)
            older = path.read_bytes()
            gate(message, context(folder), app)
            newer = path.read_bytes()
            changed = {
                "older copy": older,
                "shortened": newer[:-40],
                "one entry changed": newer.replace(b'"number":2', b'"number":9'),
            }
            path.unlink() if what == "missing" else path.write_bytes(changed[what])
            try:
                Gate(policy)
                said = ""
            except LedgerError as error:
                said = str(error).replace(str(folder), "SITE")
            running = gate(message, context(folder), app)
            yield (
                {"what": what},
                {"noticed_at_start": said, "running_gate": running.error.reason if running.has_error() else "left"},
            )


def floating(asked: argparse.Namespace) -> Found:
    """Tell 0 from 1 behind Gaussian noise by the floating-point numbers that it can reach (Mironov 2012)."""
    from tests.gate.test_discrete_gaussian import RELEASES, SIZE, advantage, ours, torch_noised  # noqa: PLC0415

    torch.manual_seed(0)
    for name, release in (("torch", torch_noised), ("gate", ours)):
        yield {"noise": name}, {"advantage": advantage(release), "values": SIZE, "releases": RELEASES}


def overhead(asked: argparse.Namespace) -> Found:
    """Time rounds of a gate beside the same app without one, in turns, and a round's training, by size of the model."""
    for name, model, values in (
        ("LeNet-like, 62,006 values", blitz, 62_006),
        (
            "ResNet-18-like, 11.2 million values",
            lambda: ResNet18(in_channels=3, image_size=32, num_classes=10),
            11_181_642,
        ),
    ):
        epoch = _epoch(model())
        for kind, text in (
            ("filter", OPEN),
            ("clip and noise", OPEN + "protect: {clip_norm: 1.0, noise: {noise_multiplier: 1.0}}\n"),
        ):
            with site(text) as folder:
                found = _timed(folder, values, min(asked.repeats, 15))
            yield {"model": name, "policy": kind}, {**found, "epoch_s": epoch, "images": IMAGES}


def resnet() -> nn.Module:
    """Make a ResNet-18 for images of CIFAR-10."""
    return ResNet18(in_channels=3, image_size=32, num_classes=10)


def blitz() -> nn.Module:
    """Make a network as large as that of Flower's quickstart."""
    first = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    last = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*first, nn.Flatten(), *last)


def _epoch(model: nn.Module) -> float:
    """Seconds that an epoch of ``IMAGES`` images in batches of 32 takes, by the median of some steps."""
    optimizer, times = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), []
    images, labels = torch.rand(32, 3, 32, 32), torch.randint(0, 10, (32,))
    for _ in range(STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) * math.ceil(IMAGES / 32)


def _timed(folder: Path, values: int, repeats: int) -> Row:
    policy = policy_in(folder)
    gate, cell = Gate(policy), Cell("tests.gate.apps:honest", policy.app)
    cell.start()
    message = question(w=np.zeros(values, np.float32))
    plain, gated, inside = [], [], []
    (folder / "data" / "example").write_bytes(b"ab")
    try:
        for _ in range(repeats + 1):
            for times, answer in (
                (plain, lambda: apps.honest(message, context(folder))),
                (inside, lambda: gate(message, context(folder), apps.honest)),
                (gated, lambda: gate(message, context(folder), cell)),
            ):
                started = time.perf_counter()
                answer()
                times.append(time.perf_counter() - started)
    finally:
        cell.close()
    middle = {name: statistics.median(times[1:]) for name, times in (("app", plain), ("gate", inside), ("cell", gated))}
    return {
        "app_s": middle["app"],
        "gate_adds_s": middle["gate"] - middle["app"],
        "gate_and_process_add_s": middle["cell"] - middle["app"],
        "rounds": repeats,
    }


def _gate(folder: Path, replies: Path, *more: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, str(HERE / "site_policy_gate.py"), str(folder), str(replies), *more]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def _wait(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError("the gate does not start")
        time.sleep(0.01)


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "hostile": hostile,
    "weights": weights,
    "kills": kills,
    "full": full,
    "rollback": rollback,
    "floating": floating,
    "overhead": overhead,
}

if __name__ == "__main__":
    main()
