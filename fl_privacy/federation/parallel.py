"""Attack parts of the victims in parallel, by all cores or by a Ray cluster."""

import copy
import logging
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from fl_privacy.attacks import Progress, ReconstructionAttack, no_progress
from fl_privacy.attacks.attack import trained_on
from fl_privacy.attacks.gradient_inversion.execution import multiplications_of_a_layer
from fl_privacy.checks.packages import expect_package
from fl_privacy.errors import UserError
from fl_privacy.federation.cores import Tally
from fl_privacy.federation.processes import Done, in_processes
from fl_privacy.models.pretrained.generator import Provenance
from fl_privacy.rng import derive_seed, streams_put_back
from fl_privacy.types import Observation, Reconstruction
from fl_privacy.types.modality import modality_of

SWITCHED_OFF = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
"""Variables set to 0, so that Ray listens on loopback only, reports no usage, and hides no GPUs from clients."""


PATIENCE = 5.0  # seconds to wait for a cluster's answer


def joins_cluster() -> bool:
    """Return whether RAY_ADDRESS names a cluster."""
    return bool(os.environ.get("RAY_ADDRESS"))


def expect_answer() -> None:
    """Raise ``UserError`` unless RAY_ADDRESS answers within ``PATIENCE`` seconds."""
    address = os.environ.get("RAY_ADDRESS", "").rpartition("://")[2]
    if not address or address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(_no_cluster("it is no address"))
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except OSError as error:
        raise UserError(_no_cluster(error.strerror or str(error))) from error
    if os.environ.get("RAY_USE_TLS", "0") == "0" and not _speaks_grpc(address):
        raise UserError(_no_cluster("what answers there is no Ray"))


def _speaks_grpc(address: str) -> bool:
    import grpc  # noqa: PLC0415

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=PATIENCE)
        except grpc.FutureTimeoutError:
            return False
    return True


def _no_cluster(reason: str) -> str:
    return (
        f"RAY_ADDRESS is expected to name a cluster that runs (HOST:PORT, or auto), but got"
        f" {os.environ.get('RAY_ADDRESS')!r}: {reason.rstrip('.')}; start it, or unset RAY_ADDRESS to work here."
    )


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Join the running Ray cluster or that of RAY_ADDRESS; if there is none, start one on the loopback interface."""
    for name in SWITCHED_OFF:
        os.environ.setdefault(name, "0")
    import ray  # noqa: PLC0415

    started = not ray.is_initialized()
    if started:
        expect_answer()
        own = {"num_cpus": os.cpu_count() or 1, "num_gpus": torch.cuda.device_count(), "include_dashboard": False}
        resources: dict[str, Any] = {} if joins_cluster() else own
        paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
        try:
            ray.init(**resources, runtime_env=paths, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # of its own kind only in part: a start that takes too long is a plain Exception
            ray.shutdown()
            if joins_cluster():
                raise UserError(_no_cluster(one_line(error))) from error
            raise UserError(
                f"Ray is expected to start on this machine, but does not ({one_line(error).rstrip('.')}); end other"
                " work, or go without Ray: backend=loop."
            ) from error
    try:
        yield
    finally:
        if started:
            ray.shutdown()


def cause_of(error: Exception) -> BaseException:
    """Return the error that Ray's exception wraps, or ``error`` itself."""
    return getattr(error, "cause", None) or error


def one_line(error: Exception) -> str:
    """Format ``cause_of(error)`` in one line."""
    cause = cause_of(error)
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


logger: logging.Logger = logging.getLogger(__name__)

_LOOK_EVERY = 0.5

LOSSES = 2  # most restarts of a part whose process or machine is lost


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedAttack:
    """Attack that runs ``attack`` on parts of the victims in Ray tasks, here or in the cluster of RAY_ADDRESS.

    Results equal those of one process up to the last bits. If a task fails, its victims count as failures. ``shards``:
    number of parts. ``device``: on ``cuda``, each task gets a GPU or a share of one. ``UserError`` if Ray is not
    installed, or the cluster does not answer.
    """

    attack: ReconstructionAttack
    shards: int
    threads: int
    device: torch.device

    def __post_init__(self) -> None:
        expect_package("ray", f"attack.shards={self.shards}")
        expect_answer()

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        parts = cut(observations, self.shards)
        if len(parts) < 2:
            return self.attack(observations, seed=seed, progress=progress)
        with ray_cluster():
            found = self._attack([[(p, observations[p]) for p in part] for part in parts], seed, progress)
        return [found[position] for position in range(len(observations))]

    def provenance(self, image: Sequence[int]) -> Provenance | None:
        return trained_on(self.attack, image)

    def _attack(
        self, parts: Sequence[list[tuple[int, Observation]]], seed: int, progress: Progress
    ) -> dict[int, Reconstruction]:
        import ray  # noqa: PLC0415
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        tally = ray.remote(Tally).options(num_cpus=0, scheduling_strategy=here).remote()
        options = {"max_retries": LOSSES, "scheduling_strategy": "SPREAD", **self._share(len(parts))}
        start, attack = ray.remote(attack_part).options(**options), ray.put(self.attack)

        def begun(number: int) -> Any:
            def tell(done: float) -> None:
                tally.tell.remote(number, done)

            own = [observation for _, observation in parts[number]]
            return start.remote(attack, own, seed=seed, threads=self.threads, tell=tell)

        tasks = {begun(number): part for number, part in enumerate(parts)}
        found: dict[int, Reconstruction] = {}
        total = sum(map(len, parts))
        try:
            while tasks:
                ready, _ = ray.wait(list(tasks), timeout=_LOOK_EVERY)
                for task in ready:
                    part = tasks.pop(task)
                    found |= zip((p for p, _ in part), _result(task, [o for _, o in part]), strict=True)
                done = max(len(found), ray.get(tally.total.remote())) if tasks else total
                progress(int(1000 * done), 1000 * total)
        finally:
            for task in tasks:
                ray.cancel(task, force=True)
        return found

    def _share(self, tasks: int) -> dict[str, Any]:
        import ray  # noqa: PLC0415

        if self.device.type != "cuda":
            return {"num_cpus": 0}  # clients in Ray processes hold all CPUs
        gpus = int(ray.available_resources().get("GPU", 0))
        if gpus < 1:
            raise UserError(
                f"attack.shards={self.shards} is expected to find a free GPU, but Ray has none;"
                " set backend.num_gpus=0, or use attack.device=cpu."
            )
        return {"num_cpus": 0, "num_gpus": 1 / math.ceil(tasks / gpus)}


def _result(task: Any, observations: Sequence[Observation]) -> list[Reconstruction]:
    import ray  # noqa: PLC0415

    try:
        found, warned = ray.get(task)
    except ray.exceptions.RayError as error:
        if isinstance(cause := cause_of(error), UserError):
            raise cause from error
        reason = f"The task that attacked this victim failed: {one_line(error)}"
        logger.warning("%s (%d victims)", reason, len(observations))
        return [Reconstruction(id=o.id, batch=None, failure=reason) for o in observations]
    for message in warned:
        warnings.warn(message, stacklevel=2)
    results: list[Reconstruction] = found
    return results


_TELL_EVERY = 0.5

Tell = Callable[[float], object]  # callback with the number of finished victims


def cut(observations: Sequence[Observation], parts: int) -> list[list[int]]:
    """Divide the positions of ``observations`` into at most ``parts`` lists of similar length, in order."""
    units: dict[tuple[bool, str], list[int]] = {}
    for position, observation in enumerate(observations):
        same = observation.knowledge.same_data
        units.setdefault((same is None, same or str(observation.id)), []).append(position)
    lists, count = list(units.values()), min(parts, len(units))
    ends = [k * len(lists) // count for k in range(count + 1)] if count else [0]
    return [[position for unit in lists[a:b] for position in unit] for a, b in pairwise(ends)]


def attack_part(
    attack: ReconstructionAttack, observations: Sequence[Observation], *, seed: int, threads: int, tell: Tell
) -> tuple[list[Reconstruction], list[str]]:
    """Attack a part of the victims, calling ``tell`` with the number of finished ones; return results and warnings."""
    torch.set_num_threads(threads)
    reported = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        if time.monotonic() - reported > _TELL_EVERY:
            reported = time.monotonic()
            tell(len(observations) * done / max(total, 1))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found = attack(observations, seed=seed, progress=progress)
    return found, list(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)))


_MOST_TOGETHER = 32
_TOGETHER = 24_000.0  # number of victims in a part, times the square root of a layer's multiplications for one victim

_UNKNOWN = 8


def victims_of_a_part(observations: Sequence[Observation]) -> int:
    """Return the number of victims that one part of a parallel attack should have, the same on any machine."""
    first = observations[0]
    shape = (1, max(1, first.upload.num_examples), *first.input_shape)
    if not modality_of(first.model).pixels:
        return _UNKNOWN
    try:
        work = multiplications_of_a_layer(copy.deepcopy(first.model).float().cpu().eval(), torch.zeros(shape))
    except Exception as error:  # noqa: BLE001  (of anybody's model)
        logger.debug("The work of a layer is not known: %s", error)
        return _UNKNOWN
    return max(1, min(_MOST_TOGETHER, int(_TOGETHER / math.sqrt(max(work, 1)))))


def attack_by_all_cores(
    attack: ReconstructionAttack,
    observations: Sequence[Observation],
    *,
    seed: int,
    threads: int | None = None,
    processes: int | None = None,
    progress: Progress = no_progress,
) -> list[Reconstruction]:
    """Attack all ``observations`` in parts by several processes; see ``federation.processes.in_processes``.

    The parts, and so the result, do not depend on ``processes``, the largest number of processes (``None``: all cores).
    ``attack`` must draw random numbers by ``seed`` and a victim's id alone. ``threads``: CPU threads of each process;
    ``None``: 1, or PyTorch's default if there is a single part.
    """
    devices = {str(getattr(one, "device", None) or "cpu") for one in (attack, getattr(attack, "attack", attack))}
    devices |= {str(value.device) for one in observations[:1] for value in one.upload.tensors.values()}
    on_cpu = all(device.startswith("cpu") for device in devices)
    apart = not isinstance(attack, ShardedAttack) and len(observations) > 1 and on_cpu
    parts = cut(observations, -(-len(observations) // victims_of_a_part(observations))) if apart else []
    if len(parts) < 2:
        return attack(observations, seed=seed, progress=progress)
    work = [partial(_attack_apart, attack, [observations[i] for i in part], seed, k) for k, part in enumerate(parts)]
    total = 1000 * len(observations)
    found = in_processes(
        work,
        weights=[len(part) for part in parts],
        processes=processes,
        threads=threads or 1,
        report=lambda share: progress(int(share * total), total),
    )
    by_place = dict[int, Reconstruction]()
    for part, own in zip(parts, found, strict=True):
        by_place |= zip(part, own, strict=True)
    return [by_place[place] for place in range(len(observations))]


def _attack_apart(
    attack: ReconstructionAttack, observations: Sequence[Observation], seed: int, number: int, done: Done
) -> list[Reconstruction]:
    with streams_put_back(derive_seed(seed, "part", number)):
        found = attack(observations, seed=seed, progress=lambda step, steps: done(step / max(steps, 1)))
    if not isinstance(found, list) or len(found) != len(observations):
        raise TypeError(f"an attack is expected to return one Reconstruction for each of {len(observations)} victims")
    return found
