"""Flower's examples, brought by `flwr run` to nodes that have nothing of them, without and with a site's gate.

    python experiments/run_bundles.py --flower CHECKOUT --data DATA --work FOLDER [--only NAME ...] [--out ROWS]
    python experiments/run_bundles.py --work FOLDER --pairs 5 [--out ROWS]    # what the gate costs a round
    python experiments/run_bundles.py --flower CHECKOUT --work FOLDER --transcript [--out ROWS]

Each example runs twice, against a SuperLink with TLS and registered keys on loopback: with Flower's own SuperNodes, and
with `fl-privacy supernode --policy`, whose policy names exactly what the first run's messages held and changes nothing.
All replies that the server got are compared, bit for bit. Both runs have the same `sitecustomize.py` on their nodes and
server: it takes data sets from a folder instead of the hub, prepares them in one process (children hang once JAX has
threads), seeds each call of an app, and writes down messages.
"""

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from flower_data import make_mirror
from flower_examples import NO_APP, NOT_TRIED, SETTINGS, Setting
from flwr.cli.build import build_fab_from_disk
from row_file import RowFile, takes_rows

from fl_privacy.errors import UserError
from fl_privacy.site.deploy.loopback import LoopbackFederation, Secured, free_port, loopback_federation
from fl_privacy.site.deploy.writing import Deployment, write_deployment
from fl_privacy.site.gate.bundles import read_bundle
from fl_privacy.site.gate.ledger import Ledger
from fl_privacy.site.gate.policy import read_policy

NODES = 2
MORE_NODES = {"flower-secure-aggregation": 5, "fl-dp-sa": 4, "vertical-fl": 3}
"""Example -> number of nodes for which its server waits."""

RUN_SECONDS = 1200.0

NOT_HERE = {
    **{name: why for name, why in NO_APP.items() if name != "docs"},
    **NOT_TRIED,
    "quickstart-monai": "finds its data where it works, and a bundle has none",
}
"""Example -> why nodes can't run it from its bundle."""

OLDER = "needs older packages than Flower's other examples"
"""Why FlowerTune's examples do not run without ``--older``."""

OF_THEIR_OWN = {
    "quickstart-catboost": "its model states its number and when it was trained",
    "flower-simulation-step-by-step-pytorch": "it draws a number from a generator that Flower's threads also use",
    "flower-secure-aggregation": "keys and masks are drawn anew",
    "fl-dp-sa": "keys, masks and noise are drawn anew",
}
"""Example -> why its replies differ in any two runs."""

SITE = """
import hashlib, importlib.abc, importlib.util, json, os, random, sys
from pathlib import Path

def _datasets(module):
    original = module.load_dataset
    def load_dataset(path, name=None, *args, split=None, **more):
        folder = next((f for f in _folders(str(path), name) if f.is_dir()), None)
        if folder is None:
            return original(path, name, *args, split=split, **more)
        files = {}
        for file in sorted(folder.iterdir()):
            if file.suffix in KINDS:
                files.setdefault(file.stem.partition("-")[0], []).append(str(file))
        kind = KINDS[Path(next(iter(files.values()))[0]).suffix]
        return original(kind, data_files=files, split=split)
    module.load_dataset = load_dataset
    in_processes = module.Dataset.map
    def here(data, *args, num_proc=None, **more):
        return in_processes(data, *args, **more)
    module.Dataset.map = here

KINDS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json", ".json": "json"}

def _folders(path, name):
    mirror, short = Path(os.environ["SITE_MIRROR"]), path.rpartition("/")[2]
    for each in (path.replace("/", "__"), short, short.replace("-", "_"), short.replace("_", "-")):
        yield mirror / f"{each}__{name}"
        yield mirror / each

def _seed():
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].random.seed(0)
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(0)

def _client_app(module):
    call = module.ClientApp.__call__
    def called(app, message, context):
        _seed()
        return call(app, message, context)
    module.ClientApp.__call__ = called

def _server_app(module):
    call = module.ServerApp.__call__
    def called(app, grid, context):
        _seed()
        return call(app, grid, context)
    module.ServerApp.__call__ = called

def _told(message):
    about = {"kind": message.metadata.message_type}
    if not message.has_content():
        return {**about, "error": message.error.reason}
    content = message.content
    def digest(a):  # of values: a reply leaves in the memory order of the message
        return [a.dtype, list(a.shape), hashlib.sha256(a.numpy().tobytes()).hexdigest()]
    about["arrays"] = {n: {k: digest(a) for k, a in r.items()} for n, r in content.array_records.items()}
    about["metrics"] = {n: dict(r) for n, r in content.metric_records.items()}
    about["config"] = {n: {k: _plain(v) for k, v in r.items()} for n, r in content.config_records.items()}
    return about

def _plain(value):
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    return list(map(_plain, value)) if isinstance(value, list) else value

def _grid(module):
    push, pull = module.HttpGrid.push_messages, module.HttpGrid.pull_messages
    def keep(what, messages):
        with open(os.environ["SITE_HEARD"], "a") as file:
            for each in messages:
                file.write(json.dumps({"way": what, **_told(each)}) + chr(10))
    def pushed(grid, messages):
        messages = list(messages)
        keep("sent", messages)
        return push(grid, messages)
    def pulled(grid, ids):
        found = list(pull(grid, ids))
        keep("heard", found)
        return found
    module.HttpGrid.push_messages, module.HttpGrid.pull_messages = pushed, pulled

AFTER = {"datasets": _datasets, "flwr.clientapp.client_app": _client_app, "flwr.serverapp.server_app": _server_app,
         "flwr.superlink.grid.http_grid": _grid}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in AFTER:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        load, after = spec.loader.exec_module, AFTER[name]  # a spec may be looked for more than once
        def exec_module(module):
            load(module)
            after(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", type=Path, help="a checkout of Flower's repository")
    parser.add_argument("--data", type=Path, help="folder of data sets, NAME/SPLIT.parquet")
    parser.add_argument("--work", type=Path, required=True, help="folder for keys, logs and the mirror")
    parser.add_argument("--only", nargs="*", help="examples by name")
    parser.add_argument("--packages", type=Path, help="folder of more packages, which the site has installed")
    parser.add_argument("--older", type=Path, help="the same, with the versions that FlowerTune's examples pin")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--transcript", action="store_true", help="record two sites with different policies")
    parser.add_argument("--pairs", type=int, default=0, help="rounds of ResNet-18 with and without the gate, in turns")
    takes_rows(parser)
    asked = parser.parse_args()
    rows, work = RowFile(asked.out), asked.work.absolute()
    if asked.pairs:
        rows.add({"kind": "bundle"}, overhead(work / "overhead", asked.pairs))
        return
    if asked.transcript:
        app = asked.flower.absolute() / "examples" / "quickstart-numpy"
        rows.add({"kind": "transcript"}, {"steps": recorded(app, work / "transcript")})
        return
    if asked.flower is None or asked.data is None:
        parser.error("--flower and --data are expected, or --pairs")
    mirror = make_mirror(asked.data.absolute(), work / "mirror")
    for name in asked.only or dict.fromkeys([*SETTINGS, *NOT_HERE]):
        setting = SETTINGS.get(name, Setting())
        app = asked.flower.absolute() / "examples" / name / setting.folder
        key = {"kind": "example", "example": name}
        if asked.only is None and rows.find(key):
            continue
        started = time.perf_counter()
        try:
            if why := NOT_HERE.get(name) or (OLDER if setting.older and asked.older is None else ""):
                raise UserError(why)
            row = compared(app, setting, mirror, work / name, asked)
        except UserError as error:
            row = {"reason": str(error)[-300:]}
        if "reason" in row:
            row["reason"] = row["reason"].replace(str(work), "WORK").replace(str(asked.flower.absolute()), "FLOWER")
        rows.add(key, {**row, "seconds": round(time.perf_counter() - started, 1)})
        print(name, json.dumps(row), flush=True)


def compared(app: Path, setting: Setting, mirror: Path, work: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Run an example without and with the gate, and compare all replies."""
    shutil.rmtree(work, ignore_errors=True)
    try:
        bundle = read_bundle(build_fab_from_disk(app))
    except ValueError as error:
        raise UserError(f"Flower builds no bundle of it: {error}") from error
    plain = heard(app, setting, mirror, work / "plain", asked, "")
    policy = policy_of(plain, bundle.digest, mirror)
    row: dict[str, Any] = {
        "fab": bundle.digest,
        "app": f"{bundle.name} {bundle.version}",
        "rounds": asked.rounds,
        "replies": len(replies(plain)),
    }
    if errors := [each["error"] for each in replies(plain) if "error" in each]:
        return row | {"reason": f"without the gate, a client failed: {errors[0][:200]}"}
    gated = heard(app, setting, mirror, work / "gated", asked, policy)
    refused = [each["error"] for each in replies(gated) if "error" in each]
    equal = Counter(map(_key, replies(plain))) & Counter(map(_key, replies(gated)))
    sent, again = (Counter(_key(one["arrays"]) for one in each if one["way"] == "sent") for each in (plain, gated))
    sent.pop("{}", None)
    unlike = [
        key for one, other in zip(replies(plain), replies(gated), strict=False) for key in differences(one, other)
    ]
    return row | {
        "behind_the_gate": len(replies(gated)),
        "equal": equal.total(),
        "models": sent.total(),
        "models_equal": (sent & again).total(),
        "refused": len(refused),
        "why": sorted(set(refused))[:3],
        "unlike": sorted(set(unlike))[:8],
        "note": OF_THEIR_OWN.get(work.name, ""),
        "ledger": ledger_of(work / "gated", bundle.digest),
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """List the keys that differ."""
    if "error" in one or "error" in other:
        return []
    return [
        f"{kind}/{key}"
        for kind in ("arrays", "metrics", "config")
        for name, record in one[kind].items()
        for key, value in record.items()
        if other[kind].get(name, {}).get(key) != value
    ]


def replies(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the server heard, in the order of content: nodes may answer in any order."""
    found = [each for each in messages if each["way"] == "heard"]
    return sorted(found, key=lambda each: (each.get("round", 0), each["kind"], _key(each)))


def _key(reply: Mapping[str, Any]) -> str:
    return json.dumps(reply, sort_keys=True)


def policy_of(messages: list[dict[str, Any]], digest: str, mirror: Path) -> str:
    """Write a policy that names what the messages hold and changes nothing."""
    sent, config = set[str](), dict[str, Any]()
    for each in (each for each in messages if each["way"] == "sent"):
        sent |= set(each["arrays"])
        for record in each["config"].values():
            named = {"*" if NODE.fullmatch(key) else key: value for key, value in record.items()}
            for key, value in named.items():
                timed = isinstance(value, str) and DAY.search(value)
                config[key] = {"most_letters": len(value)} if timed else _rule(value, config.get(key))
    shapes = [_shapes(record) for each in messages if each["way"] == "sent" for record in each["arrays"].values()]
    records = {name for each in messages if each["way"] == "sent" for name in each["config"]}
    sends: dict[str, Any] = {each["kind"]: {} for each in messages if each["way"] == "sent"}  # some have no reply
    for each in (each for each in messages if each["way"] == "heard" and "error" not in each):
        reply = sends.setdefault(each["kind"], {})
        if each["arrays"]:
            (name, *_) = each["arrays"]
            dtypes = {a[0] for record in each["arrays"].values() for a in record.values()}
            dtypes |= {*reply.get("arrays", {}).get("dtype", ())}
            lists = reply.get("arrays", {}).get("lists")
            if lists is not None or not all(_shapes(record) in shapes for record in each["arrays"].values()):
                lists = dict(lists or {})
                for key, (_, shape, _) in each["arrays"][name].items():
                    most, *row = shape or [1]  # a number alone is refused
                    lists[key] = [max(1, most, *lists.get(key, [])[:1]), *row]
                reply["arrays"] = {"lists": lists, "record": name, "dtype": sorted(dtypes) or ["float32"]}
            else:
                floats = sorted(dtypes & {"float16", "float32", "float64"}) or ["float32"]
                rule: dict[str, Any] = {"like": "received", "dtype": floats, "counters": "sent"}
                reply["arrays"] = rule | ({} if name in sent else {"record": name})
        for kind in ("metrics", "config"):
            if each[kind]:
                held = reply.setdefault(kind, {"records": [], "allow": {}})
                held["records"] = sorted({*held["records"], *each[kind]})
                for record in each[kind].values():
                    held["allow"] |= {key: _rule(value, held["allow"].get(key)) for key, value in record.items()}
    policy = {
        "version": 1,
        "receives": {
            "records": {
                "arrays": sorted(sent),
                **({"config": {"records": sorted(records), "allow": config}} if records else {}),
            },
            "run_config": "any",
            "guard": False,
        },
        "sends": sends,
        "budget": {"ledger": "ledger/ledger", "anchor": "anchor/anchor"},
        "app": {
            "reads": [str(mirror)],
            "environment": ["SITE_MIRROR", "HF_HUB_OFFLINE", "TORCH_HOME", "HF_HOME", "WANDB_MODE"],
        },
        "runs": {"allow": [{"fab": digest}], "versions": "any"},
    }
    return yaml.safe_dump(policy, sort_keys=False)


RAISED = re.compile(r"^(?:ImportError|ModuleNotFoundError): [^(\n]*", re.MULTILINE)
DAY = re.compile(r"\d{4}-\d\d-\d\d")
"""Part of a received text that states when it was made, so that no policy can list it."""

NODE = re.compile("-?[0-9]{9,}")
"""A node's number as a key, which is drawn for each run."""


def _shapes(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: array[:2] for key, array in record.items()}


def _rule(value: Any, before: dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"most_bytes": max(1, value["bytes"], (before or {}).get("most_bytes", 1))}
    if isinstance(value, str):
        return {"one_of": sorted({value, *(before or {}).get("one_of", ())})}
    if isinstance(value, list):
        texts = [each for each in value if isinstance(each, str)]
        length: dict[str, Any] = {"length": max(1, len(value), (before or {}).get("length", 1))}
        if not value or (before and ("shorter" in before or len(value) != before.get("length"))):
            length["shorter"] = True
        if value and isinstance(value[0], dict):
            for each in value:
                before = _rule(each, before)
            return (before or {}) | length
        return length | ({"one_of": sorted({*texts, *(before or {}).get("one_of", ())})} if texts else {"exact": True})
    return {"exact": True}


def heard(  # noqa: PLR0917
    app: Path, setting: Setting, mirror: Path, work: Path, asked: argparse.Namespace, policy: str
) -> list[dict[str, Any]]:
    """Run an example on two nodes and return all messages that its server sent and heard."""
    (work / "own").mkdir(parents=True)
    (work / "own" / "sitecustomize.py").write_text(SITE)
    nodes = MORE_NODES.get(app.name, NODES)
    deployment = Deployment.read(write_deployment(work / "keys", nodes=nodes, host="localhost", port=8000).parent)
    server = deployment.superlink
    secured = Secured(server / "ca.crt", server / "superlink.crt", server / "superlink.key")
    packages = asked.older if setting.older else asked.packages
    paths = [work / "own", *([packages.absolute()] if packages else [])]
    variables = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONHASHSEED": "0",
        "SITE_MIRROR": str(mirror),
        "SITE_HEARD": str(work / "heard.jsonl"),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(mirror / "hf"),
        "TORCH_HOME": str(mirror / "torch"),
        "HF_DATASETS_CACHE": str(work / "cache"),
        "WANDB_MODE": "disabled",
    }
    with loopback_federation(LoopbackFederation(work / "run", secured, variables)) as federation:
        federation.start_superlink()
        for number in range(nodes):
            node = deployment.node(number)
            federation.register(node / "node.pub")
            own = tomllib.loads(setting.node_config.format(mirror=mirror, partition=number))
            config = {"partition-id": number, "num-partitions": setting.nodes, **own}
            if policy:
                site = work / f"site-{number}"
                site.mkdir(mode=0o700)
                (site / "site.yaml").write_text(policy)
                (site / "site.yaml").chmod(0o600)
                extra = ("--policy", str(site / "site.yaml"))
                federation.start_node(f"node-{number}", config, key=node / "node.key", extra=extra)
            else:
                start_flower_s(federation, f"node-{number}", config, node / "node.key")
        for number in range(nodes):
            federation.wait_for_node(f"node-{number}")
        federation.run("run", app, run_config(app, setting, mirror, asked.rounds))
        status = federation.wait("run", RUN_SECONDS)
        said = federation.said("run")
        raised = [line for log in work.glob("run/*.log") for line in RAISED.findall(log.read_text(errors="replace"))]
    place = work / "heard.jsonl"
    if status or not place.exists():
        raise UserError(f"the run ended with {status}: {' '.join((raised[-1] if raised else said).split())[-250:]}")
    return list(map(json.loads, place.read_text().splitlines()))


def start_flower_s(federation: LoopbackFederation, name: str, config: Mapping[str, object], key: Path) -> None:
    """Start Flower's own SuperNode, with a process for each message."""
    assert federation.secured is not None
    told = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    command = ["flower-supernode", "--superlink", federation.address, "--port", str(free_port()), "--node-config", told]
    command += ["--root-certificates", str(federation.secured.authority), "--auth-supernode-private-key", str(key)]
    federation.start(name, command)


def run_config(app: Path, setting: Setting, mirror: Path, rounds: int) -> dict[str, object]:
    """Return the settings of the run, with fewer rounds."""
    from fl_privacy.auditing.app.bundle import read_app  # noqa: PLC0415

    found = read_app(app)
    texts = [setting.config.format(mirror=mirror)] if setting.config else []
    told = found.with_config(texts, rounds)
    return {key: value for key, value in told.items() if found.config.get(key) != value}


def ledger_of(work: Path, digest: str) -> dict[str, int]:
    """Count the entries of both sites' ledgers; each names the bundle."""
    found = Counter[str]()
    for place in sorted(work.glob("site-*/site.yaml")):
        budget = read_policy(place).budget
        assert budget is not None
        for entry in Ledger(budget.ledger, budget.anchor).entries():
            found[f"{entry.kind} {entry.outcome}{'' if entry.fab == digest else ' of another bundle'}"] += 1
    return dict(found)


SITES = ("{{allow: [{{fab: {fab}}}]}}", "{{approve: each run}}")
NUMPY = """
version: 1
receives: {{records: {{arrays: [arrays], config: {{allow: [server-round]}}}}}}
sends:
  train: {{arrays: {{like: received, dtype: [float32, float64]}}, metrics: {{allow: [num-examples, random_metric]}}}}
  evaluate: {{metrics: {{allow: {{num-examples: {{}}, random_metric: {{length: 3}}}}}}}}
budget: {{ledger: ledger/ledger, anchor: anchor/anchor}}
runs: {runs}
"""
SHOWN = re.compile(
    r"ROUND|Sampled|Received \d|Received error|Aggregated MetricRecord|not approved|Successfully started"
)


def recorded(app: Path, work: Path) -> list[dict[str, Any]]:
    """Record commands of two sites and a researcher: an approved run, and one of the same app with a changed line."""
    shutil.rmtree(work, ignore_errors=True)
    steps, changed = list[dict[str, Any]](), work / "quickstart-numpy-changed"
    shutil.copytree(app, work / "quickstart-numpy")
    shutil.copytree(app, changed)
    client = next(changed.rglob("client_app.py"))
    client.write_text(client.read_text() + "# a changed line\n")
    fab = read_bundle(build_fab_from_disk(app)).digest

    def output(command: list[str], start: Path) -> str:
        given = [sys.executable, "-m", *command]
        return subprocess.run(given, capture_output=True, text=True, cwd=start, check=False).stdout

    def step(who: str, command: list[str], said: str) -> None:
        told = [re.sub(r"\x1b\[[0-9;]*m|INFO *: *|WARNING *: *", "", line).rstrip() for line in said.splitlines()]
        shown = " ".join(command).replace("fl_privacy", "fl-privacy", 1)
        steps.append({"who": who, "command": shown, "said": [line.replace(str(work), "...") for line in told if line]})

    deployment = Deployment.read(write_deployment(work / "keys", nodes=NODES, host="localhost", port=8000).parent)
    server = deployment.superlink
    secured = Secured(server / "ca.crt", server / "superlink.crt", server / "superlink.key")
    with loopback_federation(LoopbackFederation(work / "run", secured, {"OMP_NUM_THREADS": "1"})) as federation:
        federation.start_superlink()
        for number, runs in enumerate(SITES):
            site, node = work / f"site-{number}", deployment.node(number)
            site.mkdir(mode=0o700)
            (site / "site.yaml").write_text(NUMPY.format(runs=runs.format(fab=fab)))
            (site / "site.yaml").chmod(0o600)
            check = ["fl_privacy", "policy", "check", "site.yaml"]
            of_runs = filter(re.compile("[Rr]uns? (bring|of|that)|Each run").search, output(check, site).splitlines())
            step(f"site {number}", check, "\n".join(of_runs))
            federation.register(node / "node.pub")
            extra = ("--policy", str(site / "site.yaml"))
            federation.start_node(f"node-{number}", {"partition-id": number}, key=node / "node.key", extra=extra)
        for number in range(NODES):
            federation.wait_for_node(f"node-{number}")
        second = read_policy(work / "site-1" / "site.yaml").runs
        assert second is not None
        for name, decision in (("quickstart-numpy", "--yes"), (changed.name, "--refuse")):
            federation.run(name, work / name, {"num-server-rounds": 1})
            federation.wait_for(name, lambda: any(second.folder.glob("*.json")), "wait at a site", RUN_SECONDS)
            site, run = work / "site-1", next(second.folder.glob("*.json")).stem
            approve = ["fl_privacy", "policy", "approve", "site.yaml"]
            for command in (approve, [*approve, run, decision]):
                step("site 1", command, output(command, site))
            federation.wait(name, RUN_SECONDS)
            said = filter(SHOWN.search, federation.said(name).splitlines())
            step("researcher", ["flwr", "run", name, "hospitals", "--stream"], "\n".join(said))
        for number in range(NODES):
            show = ["fl_privacy", "policy", "show-ledger", "site.yaml"]
            step(f"site {number}", show, output(show, work / f"site-{number}"))
    return steps


IMAGES = 256
RESNET = f"""
import time
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torchvision.models import resnet18

client = ClientApp()

@client.train()
def train(message, context):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = resnet18(num_classes=10)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = torch.rand({IMAGES}, 3, 32, 32), torch.randint(0, 10, ({IMAGES},))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for x, y in zip(images.split(32), labels.split(32)):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({{"num-examples": {IMAGES}, "train_loss": float(loss), "cpu": time.process_time()}})
    return Message(RecordDict({{"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}}), reply_to=message)
"""
PROJECT = """
[project]
name = "resnet"
version = "1.0.0"
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "resnet_app:server"
clientapp = "resnet_app:client"
"""
PLAIN = """
import io, sys, zipfile
from flwr.app import Context, RecordDict
from flwr.common import serde
from flwr.proto.message_pb2 import Message
from flwr.supercore.object_ref import load_app
from flwr.supercore.task_identity import TaskIdentity
work, fab, asked, answer = sys.argv[1:]
zipfile.ZipFile(fab).extractall(work)
TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
app = load_app("resnet_app:client", ValueError, work)
message = serde.message_from_proto(Message.FromString(open(asked, "rb").read()))
reply = app(message, Context(1, 1, {}, RecordDict(), {}))
open(answer, "wb").write(serde.message_to_proto(reply).SerializeToString())
"""
"""A process for a message, as Flower starts one, without the exchange with its SuperNode."""

OPEN = """
version: 1
receives: {records: {arrays: [arrays]}, guard: off}
sends: {train: {arrays: {like: received, counters: sent}, metrics: {allow: [num-examples, train_loss, cpu]}}}
budget: {ledger: site/ledger, anchor: away/anchor}
runs: {allow: [{app: tests/resnet, version: 1.0.0}]}
"""


def overhead(work: Path, pairs: int) -> dict[str, Any]:
    """Time a round of ResNet-18 with and without the gate in turns: seconds of CPU of all processes, and of the clock.

    An isolated app's processes are killed after its reply, and so are counted just before.
    """
    import io  # noqa: PLC0415
    import zipfile  # noqa: PLC0415

    import torch  # noqa: PLC0415
    from flwr.app import ArrayRecord, Context, Message, RecordDict  # noqa: PLC0415
    from torchvision.models import resnet18  # noqa: PLC0415

    from fl_privacy.flower.app_process import Bundles  # noqa: PLC0415
    from fl_privacy.flower.gate import Gate  # noqa: PLC0415
    from fl_privacy.flower.inside.identity import identify_process  # noqa: PLC0415
    from fl_privacy.flower.inside.serialized import message_bytes, message_of  # noqa: PLC0415
    from fl_privacy.flower.inside.supernode import Brought  # noqa: PLC0415
    from fl_privacy.site.gate.apart import Apart  # noqa: PLC0415

    shutil.rmtree(work, ignore_errors=True)
    (work / "site").mkdir(parents=True, mode=0o700)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("pyproject.toml", PROJECT)
        archive.writestr("resnet_app.py", RESNET)
    (work / "app.fab").write_bytes(made.getvalue())
    (work / "site.yaml").write_text(OPEN)
    (work / "site.yaml").chmod(0o600)
    identify_process()
    torch.manual_seed(0)
    arrays = ArrayRecord(resnet18(num_classes=10).state_dict())
    asked = message_bytes(Message(RecordDict({"arrays": arrays}), 1, "train"))
    (work / "message").write_bytes(asked)
    bundles = Bundles(Gate(work / "site.yaml"))
    given = [str(work / name) for name in ("plain", "app.fab", "message", "reply")]

    def plain() -> Message:
        subprocess.run([sys.executable, "-c", PLAIN, *given], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return message_of((work / "reply").read_bytes())

    def gated() -> Message:
        message = message_of(asked)
        message.metadata.__dict__["_message_id"] = "1"
        reply = bundles.answer(message, Context(1, 1, {}, RecordDict(), {}), Brought(made.getvalue(), ()))
        assert reply is not None and reply.has_content(), bundles.gate.refused
        return reply

    killed, close, same = [0.0], Apart.close, True

    def counted(apart: Apart) -> None:
        if apart._process is not None:
            killed[0] += seconds_below(apart._process.pid)
        close(apart)

    Apart.close = counted  # type: ignore[method-assign]
    found: dict[str, list[tuple[float, float, float]]] = {"plain": [], "gated": []}
    for number in range(pairs):
        turns = [("plain", plain), ("gated", gated)]
        replies = []
        for name, run in turns if number % 2 else reversed(turns):
            cpu, clock = spent() + killed[0], time.perf_counter()
            replies.append(run())
            app = float(replies[-1].content.metric_records["metrics"]["cpu"])
            found[name].append((app, spent() + killed[0] - cpu - app, time.perf_counter() - clock))
        same &= replies[0].content.array_records["arrays"] == replies[1].content.array_records["arrays"]
        print(number, {name: values[-1] for name, values in found.items()}, flush=True)
    return {"pairs": pairs, "images": IMAGES, "same_arrays": same, **figures_of(found)}


def figures_of(found: Mapping[str, list[tuple[float, float, float]]]) -> dict[str, float]:
    """Return medians by kind of round, and the median ratio of the pairs."""
    medians = {
        f"{name}_{what}": statistics.median(each[index] for each in values)
        for name, values in found.items()
        for index, what in enumerate(("app_cpu_s", "other_cpu_s", "s"))
    }
    turns = list(zip(found["plain"], found["gated"], strict=True))
    return medians | {
        "cpu_ratio": statistics.median(sum(gated[:2]) / sum(plain[:2]) for plain, gated in turns),
        "ratio": statistics.median(gated[2] / plain[2] for plain, gated in turns),
    }


def spent() -> float:
    """Return the CPU seconds of this process and of the children that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def seconds_below(process: int) -> float:
    """Return the CPU seconds of all processes below one, which is not counted itself."""
    parents, spent = dict[int, int](), dict[int, int]()
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            _, parent, *fields = place.read_text().rpartition(")")[2].split()
            parents[number := int(place.parent.name)] = int(parent)
            spent[number] = sum(map(int, fields[9:13]))  # utime, stime, and those of children waited for

    def is_below(number: int) -> bool:
        return (parent := parents.get(number)) is not None and (parent == process or is_below(parent))

    return sum(ticks for number, ticks in spent.items() if is_below(number)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
