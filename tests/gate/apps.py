"""Apps behind a gate: a hostile one that tries one channel for each case, and honest ones."""

import os
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

SECRETS = (bytes(range(1, 65)), bytes(range(102, 166)))
"""Two examples that a site may have."""

OPEN = """
version: 1
receives:
  records: {arrays: [arrays], config: {allow: [case]}}
  guard: off
sends:
  train:
    arrays: {like: received, dtype: float32}
    metrics: {allow: {num-examples: {integer: true, at_least: 32, round_to: 32}, train_loss: {digits: 3}}}
budget: {ledger: ledger/ledger, anchor: anchor/anchor}
"""
"""A policy that protects nothing but by names, types and numbers."""

CASES = (
    "extra_record",
    "extra_key",
    "odd_dtype",
    "whole_numbers",
    "bigger_shape",
    "bytes_behind",
    "not_numbers",
    "text_metric",
    "text_config",
    "list_metric",
    "low_digits",
    "names_of_keys",
    "names_of_records",
    "order_of_keys",
    "memory_order",
    "raised_text",
    "replied_error",
    "kind_of_error",
    "metadata",
    "wire",
    "files",
    "too_much",
)


def secret(context: Context) -> bytes:
    """Read an example of the site's."""
    return Path(str(context.node_config["data"])).read_bytes()


def _values(secret: bytes, shape: tuple[int, ...]) -> np.ndarray:
    return np.resize(np.frombuffer(secret, np.uint8), shape)


def _write_everywhere(secret: bytes, context: Context) -> None:
    """Forge a reply on every descriptor there is, and call every address that can be thought of."""
    frame = struct.pack(">4Q", 3, 0, 0, len(secret)) + secret
    for number in range(3, 40):
        try:
            flags = os.get_blocking(number)
            os.set_blocking(number, False)
            os.write(number, frame)
            os.set_blocking(number, flags)
        except OSError:
            continue
    address = str(context.node_config["address"]).split(":")
    for family, where in ((socket.AF_INET, (address[0], int(address[1]))), (socket.AF_UNIX, "/run/docker.sock")):
        try:
            with socket.socket(family) as wire:
                wire.settimeout(1)
                wire.connect(where)
                wire.sendall(secret)
        except OSError:
            continue


def reachable(context: Context) -> list[str]:
    """List what of the site's own files and processes can be read or written, and where can be called."""
    found = []
    for name in ("key", "ledger", "anchor", "policy"):
        path = Path(str(context.node_config[name]))
        for what, attempt in (("read", path.read_bytes), ("changed", lambda p=path: p.open("ab").close())):
            try:
                attempt()
                found.append(f"{name} {what}")
            except OSError:
                continue
    host, port = str(context.node_config["address"]).split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
        found.append("address")
    except OSError:
        pass
    if Path(f"/proc/{context.node_config['gate']}/cmdline").exists():
        found.append("gate")
    return found + [name for name in os.environ if "KEY" in name or "SECRET" in name]


@dataclass
class Answer:
    """What an honest app would reply, for a hostile one to change."""

    arrays: dict[str, np.ndarray]
    metrics: dict[str, object] = field(default_factory=lambda: {"num-examples": 64, "train_loss": 0.5})
    more: dict[str, object] = field(default_factory=dict)

    def records(self, name: str) -> dict[str, object]:
        held = {key: Array.from_numpy_ndarray(value) for key, value in self.arrays.items()}
        return {name: ArrayRecord(held), "metrics": MetricRecord(self.metrics), **self.more}  # type: ignore[arg-type]


def in_arrays(case: str, example: bytes, answer: Answer) -> None:
    """Put the example beside, behind or into arrays."""
    w, b = answer.arrays["w"], answer.arrays["b"]
    if case == "extra_record":
        answer.more["more"] = ArrayRecord([_values(example, (8,))])
    elif case == "extra_key":
        answer.arrays["x"] = _values(example, w.shape).astype(w.dtype)
    elif case == "odd_dtype":
        answer.arrays["w"] = _values(example, w.shape).astype(np.float64)
    elif case == "whole_numbers":
        answer.arrays["n"] = np.array(int.from_bytes(example[:7], "big"))
    elif case == "bigger_shape":
        answer.arrays["b"] = _values(example, (len(b) + example[0],)).astype(np.float32)
    elif case == "not_numbers":
        bits = 0x7FC00000 + np.resize(np.frombuffer(example, np.uint16), w.shape).astype(np.uint32)
        answer.arrays["w"] = bits.view(np.float32)
    elif case == "order_of_keys":
        order = sorted(answer.arrays, key=lambda key: (example[0] * (len(key) + ord(key[0]))) % 7)
        answer.arrays = {key: answer.arrays[key] for key in order}
        answer.metrics = dict(sorted(answer.metrics.items(), reverse=example[0] % 2 == 0))
    elif case == "memory_order" and example[0] % 2:
        answer.arrays["w"] = np.asfortranarray(w)
    elif case == "too_much":
        answer.more["big"] = ArrayRecord([np.zeros(200 << 20, np.uint8)])


def in_values(case: str, example: bytes, answer: Answer) -> None:
    """Put the example into names and values beside arrays."""
    if case == "text_metric":
        answer.metrics["train_loss"] = [float(value) for value in example[:8]]
    elif case == "text_config":
        answer.more["config"] = ConfigRecord({"note": example.hex(), "raw": example})
    elif case == "list_metric":
        answer.metrics["all"] = list(example)
    elif case == "low_digits":
        answer.metrics["train_loss"] = 0.5 + int.from_bytes(example[:4], "big") * 1e-13
    elif case == "names_of_keys":
        answer.metrics[example.hex()] = 1.0
    elif case == "names_of_records":
        answer.more[example.hex()] = MetricRecord({"a": 1})


def aside(case: str, example: bytes, context: Context) -> None:
    """Try every other way than the reply."""
    if case == "raised_text":
        raise ValueError(example.hex())
    if case == "kind_of_error":
        raise (KeyError if example[0] % 2 else RuntimeError)("failed")
    if case == "wire":
        _write_everywhere(example, context)
    elif case == "files" and (found := reachable(context)):
        raise RuntimeError(str(found))


hostile = ClientApp()


@hostile.train()
def betray(message: Message, context: Context) -> Message:
    case, example = CASES[int(message.content.config_records["config"]["case"])], secret(context)
    (name, record), *_ = message.content.array_records.items()
    answer = Answer({key: array.numpy() for key, array in record.items()})
    in_arrays(case, example, answer)
    in_values(case, example, answer)
    aside(case, example, context)
    if case == "replied_error":
        return Message(Error(example[0], example.hex()), reply_to=message)
    content = answer.records(name)
    if case == "bytes_behind":
        held = dict(content[name].items())  # type: ignore[attr-defined]
        w = held["w"]
        held["w"] = Array(dtype=w.dtype, shape=tuple(w.shape), stype=w.stype, data=w.data + example)
        content[name] = ArrayRecord(held)
    reply = Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]
    if case == "metadata":
        reply.metadata.__dict__["_dst_node_id"] = int.from_bytes(example[:4], "big")
        reply.metadata.__dict__["_message_type"] = f"train.{'x' * (1 + example[0])}"
        reply.metadata.__dict__["_group_id"] = example.hex()
    return reply


writing = ClientApp()
"""Writes its example into the weights, a bit into each value, as far as they can carry it."""

LOUD = 100.0


@writing.train()
def write_bits(message: Message, context: Context) -> Message:
    (name, record), *_ = message.content.array_records.items()
    held = {key: array.numpy() for key, array in record.items()}
    bits = np.unpackbits(np.frombuffer(secret(context), np.uint8))
    held["w"] = held["w"] + LOUD * np.resize(2.0 * bits - 1, held["w"].shape).astype(np.float32)
    arrays = ArrayRecord({key: Array.from_numpy_ndarray(value) for key, value in held.items()})
    return Message(RecordDict({name: arrays, "metrics": MetricRecord({"num-examples": 64})}), reply_to=message)


misbehaving = ClientApp()
"""Takes too long, too much memory, or ends its process."""


@misbehaving.train()
def misbehave(message: Message, context: Context) -> Message:
    case = int(message.content.config_records["config"]["case"])
    if case == 1:
        time.sleep(3600)
    elif case == 2:
        held = np.ones(8 << 30, np.uint8)
        raise MemoryError(str(held[-1]))
    elif case == 3:
        for _ in range(1500):  # folders deeper than calls of Python nest
            Path("deeper").mkdir()
            os.chdir("deeper")
        os._exit(3)
    elif case == 4:
        if os.fork() == 0:
            os.setsid()
            time.sleep(3600)
    elif case == 5:
        os.kill(int(context.node_config["gate"]), 9)
    counted = context.state.metric_records.get("own", MetricRecord({"calls": 0}))
    context.state["own"] = MetricRecord({"calls": int(counted["calls"]) + 1})  # type: ignore[arg-type]
    arrays = next(iter(message.content.array_records.values()))
    metrics = MetricRecord({"num-examples": 64, "train_loss": float(counted["calls"])})  # type: ignore[arg-type]
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


honest = ClientApp()
"""Adds one to its weights."""


@honest.train()
def add_one(message: Message, context: Context) -> Message:
    (name, record), *_ = message.content.array_records.items()
    held = {key: array.numpy() for key, array in record.items()}
    held["w"] = held["w"] + np.float32(1)
    arrays = ArrayRecord({key: Array.from_numpy_ndarray(value) for key, value in held.items()})
    return Message(RecordDict({name: arrays, "metrics": MetricRecord({"num-examples": 64})}), reply_to=message)


printing = ClientApp()
"""Prints, with a terminal's commands, and replies what came."""


@printing.train()
def print_and_echo(message: Message, context: Context) -> Message:
    print("on standard output\x1b[2J", flush=True)
    print("on standard error\x1b]0;title\x07", file=sys.stderr, flush=True)
    return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)
