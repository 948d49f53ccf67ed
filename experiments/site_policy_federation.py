"""Flower's quickstart app, not a line of it edited, on real nodes: one site with a policy, two without.

    python experiments/site_policy_federation.py --flower CHECKOUT --data DATA --work FOLDER [--out ROWS]

One SuperLink and three SuperNodes on loopback with TLS and keys, five rounds. The app asks for CIFAR-10 by its hub name
and finds 1,800 images in a cache of ``datasets``; nothing is downloaded.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from flower_data import part
from row_file import RowFile, takes_rows

from fl_privacy.site.deploy.loopback import LoopbackFederation, Secured, loopback_federation
from fl_privacy.site.deploy.writing import Deployment, write_deployment
from fl_privacy.site.gate.ledger import Ledger
from fl_privacy.site.gate.policy import read_policy

NODES, ROUNDS = 3, 5
IMAGES = {"train": 1800, "test": 300}
CONFIG = {"num-server-rounds": ROUNDS, "fraction-evaluate": 1.0, "learning-rate": 0.01, "local-epochs": 3}
RUN_SECONDS = 1500.0
POLICY = """
version: 1
receives:
  records: {{arrays: [arrays], config: {{allow: [lr, server-round]}}}}
  run_config: [batch-size, local-epochs]
sends:
  train:
    arrays: {{like: received, dtype: float32}}
    metrics: {{allow: {{num-examples: {{integer: true, at_least: 32, round_to: 32}}, train_loss: {{digits: 3}}}}}}
  evaluate: refuse
budget: {{ledger: ledger/ledger, anchor: anchor/anchor}}
app:
  reads: [{app}]
  writes: [{cache}]
  environment: [HF_HOME, HF_HUB_OFFLINE, HF_DATASETS_OFFLINE]
"""


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", type=Path, required=True, help="a checkout of Flower's repository")
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets, NAME/SPLIT.parquet")
    parser.add_argument("--work", type=Path, required=True, help="folder for keys, logs and caches; it is emptied")
    parser.add_argument("--without", action="store_true", help="no site has a policy")
    takes_rows(parser)
    asked = parser.parse_args()
    shutil.rmtree(asked.work, ignore_errors=True)
    asked.work.mkdir(parents=True)
    app, work = asked.flower.absolute() / "examples" / "quickstart-pytorch", asked.work.absolute()
    row = measured(app, asked.data, work, with_policy=not asked.without)
    key = {"kind": "federation", "app": "quickstart-pytorch", "sites_with_policy": int(not asked.without)}
    print(json.dumps(RowFile(asked.out).add(key, row), indent=1))


def measured(app: Path, data: Path, work: Path, *, with_policy: bool) -> dict[str, Any]:
    """Run the federation and return what it came to."""
    caches = [cached_images(data, work / f"cache-{number}") for number in range(NODES + 1)]
    deployment = Deployment.read(write_deployment(work / "keys", nodes=NODES, host="localhost", port=8000).parent)
    site = work / "site"
    site.mkdir(mode=0o700)
    (site / "site.yaml").write_text(POLICY.format(app=app, cache=caches[0]))
    (site / "site.yaml").chmod(0o600)
    server = deployment.superlink
    secured = Secured(server / "ca.crt", server / "superlink.crt", server / "superlink.key")
    common = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(app)}
    federation = LoopbackFederation(work / "run", secured, {**common, "HF_HOME": str(caches[NODES])})
    with loopback_federation(federation):
        federation.start_superlink()
        for number in range(NODES):
            federation.register(deployment.node(number) / "node.pub")
            extra = ("--app", "pytorchexample.client_app:app")
            extra += ("--policy", str(site / "site.yaml")) if number == 0 and with_policy else ()
            federation.environment = {**common, "HF_HOME": str(caches[number])}
            config = {"partition-id": number, "num-partitions": NODES}
            federation.start_node(f"node-{number}", config, key=deployment.node(number) / "node.key", extra=extra)
            federation.wait_for_node(f"node-{number}")
        federation.environment = {**common, "HF_HOME": str(caches[NODES])}
        started = time.perf_counter()
        federation.run("run", app, CONFIG)
        status = federation.wait("run", RUN_SECONDS)
        seconds = time.perf_counter() - started
        said, node = federation.said("run"), federation.said("node-0")
    return {
        "status": status,
        "seconds": seconds,
        **of_the_run(said),
        **(of_the_site(site, node) if with_policy else {}),
    }


def of_the_run(said: str) -> dict[str, Any]:
    """Count what the server's log tells."""
    results = [
        tuple(map(int, found)) for found in re.findall(r"aggregate_train: Received (\d+) results and (\d+) fail", said)
    ]
    evaluated = [
        tuple(map(int, found))
        for found in re.findall(r"aggregate_evaluate: Received (\d+) results and (\d+) fail", said)
    ]
    accuracy = re.findall(r"'accuracy': '?([0-9.e-]+)'?", said)
    return {
        "rounds": len(results),
        "train_replies": sum(each[0] for each in results),
        "train_failures": sum(each[1] for each in results),
        "evaluate_replies": sum(each[0] for each in evaluated),
        "evaluate_failures": sum(each[1] for each in evaluated),
        "accuracy": [float(each) for each in accuracy][-ROUNDS - 1 :],
        "errors_heard": sorted(set(re.findall(r"The site's policy lets no reply leave[^.]*\.", said))),
    }


def of_the_site(site: Path, log: str) -> dict[str, Any]:
    """Count what the policy's site has written down."""
    policy = read_policy(site / "site.yaml")
    assert policy.budget is not None
    entries = Ledger(policy.budget.ledger, policy.budget.anchor).entries()
    plain = " ".join(log.split())
    return {
        "ledger": dict(Counter(f"{entry.kind} {entry.outcome}" for entry in entries)),
        "refused_in_log": plain.count("Refused, since"),
        "kept_apart": next(iter(re.findall(r"The app is kept from[^.]*\.", plain)), ""),
        "said_nothing_bounds_weights": "Nothing bounds what the weights carry" in plain,
    }


def cached_images(data: Path, home: Path) -> Path:
    """Write a cache of ``datasets`` in which ``uoft-cs/cifar10`` is found offline, and return its home."""
    import datasets  # noqa: PLC0415

    source, made = home / "source", home / "made"
    source.mkdir(parents=True)
    part(data / "cifar10_exact", source, IMAGES)
    files = {split: str(source / f"{split}.parquet") for split in IMAGES}
    datasets.disable_progress_bars()
    datasets.load_dataset("parquet", data_files=files, cache_dir=str(made))
    (found,) = (folder for folder in made.glob("parquet/*/*/*") if folder.is_dir())
    into = home / "datasets" / "uoft-cs___cifar10" / "plain_text" / "0.0.0" / ("0" * 40)
    into.parent.mkdir(parents=True)
    shutil.copytree(found, into)
    for file in into.glob("parquet-*.arrow"):
        file.rename(into / file.name.replace("parquet-", "cifar10-"))
    told = json.loads((into / "dataset_info.json").read_text())
    told |= {"dataset_name": "cifar10", "config_name": "plain_text"}
    (into / "dataset_info.json").write_text(json.dumps(told))
    shutil.rmtree(made)
    shutil.rmtree(source)
    return home


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
