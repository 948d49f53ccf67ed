"""Two Ray machines on loopback, of which one is lost in the middle of the work: run as a process of its own.

Prints a line of JSON: what came of an attack in parts, and of a training, beside those that nothing befell.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fl_privacy.attacks import idlg
from fl_privacy.federation import Round
from fl_privacy.federation.parallel import SWITCHED_OFF, ShardedAttack
from fl_privacy.flower import rounds_on_ray
from fl_privacy.flower.ray_nodes import RayGrid
from tests.attacks.victims import observations, smooth_net
from tests.flower.test_backends import assert_same_run

MACHINE: dict[str, Any] = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
QUICKLY_MISSED = {"health_check_period_ms": 500, "health_check_failure_threshold": 4, "health_check_timeout_ms": 2000}


Lose = Callable[[], None]


def attack_in_parts(lose: Lose) -> dict[str, Any]:
    attack, victims = idlg(iterations=200, enough=0, dtype="float64"), observations(smooth_net(), 6)
    expected, lost_at = attack(victims, seed=3), list[float]()

    def progress(done: int, total: int) -> None:
        if done and not lost_at:
            lose()
            lost_at.append(done / total)

    sharded = ShardedAttack(attack=attack, shards=6, threads=1, device=torch.device("cpu"))
    found = sharded(victims, seed=3, progress=progress)
    same = [
        one.batch is not None and other.batch is not None and torch.equal(one.batch.inputs, other.batch.inputs)
        for one, other in zip(found, expected, strict=True)
    ]
    return {"lost_at": lost_at, "same": same, "failures": [one.failure for one in found]}


def train(lose: Lose) -> dict[str, Any]:
    def losing(*args: Any, **settings: Any) -> Generator[Round, None, Any]:
        rounds = rounds_on_ray(*args, **settings)
        while True:
            try:
                round = next(rounds)
            except StopIteration as end:
                return end.value
            yield round
            if round.number == 1:
                lose()

    asked_again, reply = list[int](), RayGrid._reply

    def counting(self: RayGrid, errand: Any, *, done: bool) -> Any:
        found = reply(self, errand, done=done)
        asked_again.append(found is None)
        return found

    RayGrid._reply = counting  # type: ignore[method-assign]
    recording = assert_same_run(losing)
    return {"asked_again": sum(asked_again), "excluded": [dict(report.excluded) for report in recording.reports]}


def children(pid: int) -> list[int]:
    """List the processes that a raylet has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(status.parent.name))
    return found


def main() -> None:
    """Ray reads the environment when it is imported."""
    os.environ.update(dict.fromkeys(SWITCHED_OFF, "0"))
    os.environ.update({"RAY_worker_niceness": "0"} | {f"RAY_{k}": str(v) for k, v in QUICKLY_MISSED.items()})
    import ray  # noqa: PLC0415
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    cluster = Cluster(initialize_head=True, head_node_args={**MACHINE, "include_dashboard": False})
    os.environ["RAY_ADDRESS"] = cluster.address
    results: dict[str, Any] = {}
    try:
        for name, work in {"attack": attack_in_parts, "training": train}.items():
            other = cluster.add_node(**MACHINE)
            pid = other.all_processes["raylet"][0].process.pid

            def lose(pid: int = pid) -> None:
                for each in [pid, *children(pid)]:
                    os.kill(each, signal.SIGKILL)

            results[name] = work(lose)
            cluster.remove_node(other)
            time.sleep(1.0)
    finally:
        if ray.is_initialized():
            ray.shutdown()
        cluster.shutdown()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
