"""An attack on parts of the victims at the same time."""

import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fl_privacy.attacks import Progress, ReconstructionAttack, no_progress
from fl_privacy.attacks.attack import trained_on
from fl_privacy.errors import UserError
from fl_privacy.generator import Provenance
from fl_privacy.parallel.cluster import cause_of, expect_answer, expect_ray, on_this_node, one_line, ray_cluster
from fl_privacy.parallel.tally import Tally
from fl_privacy.types import Observation, Reconstruction

logger = logging.getLogger(__name__)

_LOOK_EVERY = 0.5

LOSSES = 2
"""So many times a part is begun anew, where its process or its machine is gone."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedAttack:
    """``attack`` in Ray tasks, each on a part of the victims, on this machine or the cluster that RAY_ADDRESS names.

    Each victim draws from its own random stream, so that its result is that of the attack in one process, up to the
    last bits of sums that other batch sizes take in another order.
    A task whose machine is gone is begun anew on another one, and gives the same; what others have finished is here
    already. The victims of a task that fails are failures; the others go on.

    Attributes:
        attack: what each task runs; can be pickled.
        shards: the number of parts, where there are as many victims.
        threads: CPU threads of each task.
        device: of the attack; where it is a GPU, each task gets one or a share.

    Raises:
        UserError: Ray is not installed, or the cluster does not answer.
    """

    attack: ReconstructionAttack
    shards: int
    threads: int
    device: torch.device

    def __post_init__(self) -> None:
        expect_ray(f"attack.shards={self.shards}")
        expect_answer()

    def __call__(
        self, observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress
    ) -> list[Reconstruction]:
        """Attack all ``observations``; see :class:`fl_privacy.attacks.attack.ReconstructionAttack`.

        Raises:
            UserError: the attack refuses its settings, or no GPU is free.
        """
        parts = cut(observations, self.shards)
        if len(parts) < 2:
            return self.attack(observations, seed=seed, progress=progress)
        with ray_cluster():
            found = self._attack([[(p, observations[p]) for p in part] for part in parts], seed, progress)
        return [found[position] for position in range(len(observations))]

    def provenance(self, image: Sequence[int]) -> Provenance | None:
        """What a part of the attack was trained on, for images (C, H, W)."""
        return trained_on(self.attack, image)

    def _attack(
        self, parts: Sequence[list[tuple[int, Observation]]], seed: int, progress: Progress
    ) -> dict[int, Reconstruction]:
        import ray  # noqa: PLC0415

        tally = ray.remote(Tally).options(num_cpus=0, scheduling_strategy=on_this_node()).remote()
        options = {"max_retries": LOSSES, "scheduling_strategy": "SPREAD", **self._share(len(parts))}
        start = ray.remote(_attack_shard).options(**options)
        attack = ray.put(self.attack)
        tasks = {
            start.remote(
                attack, [o for _, o in part], seed=seed, threads=self.threads, tally=tally, number=number
            ): part
            for number, part in enumerate(parts)
        }
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
        """What is set aside for a task: no CPU, since clients in Ray processes hold those while the attack runs."""
        import ray  # noqa: PLC0415

        if self.device.type != "cuda":
            return {"num_cpus": 0}
        gpus = int(ray.available_resources().get("GPU", 0))
        if gpus < 1:
            raise UserError(
                f"attack.shards={self.shards} is expected to find a free GPU, but Ray has none;"
                " set backend.num_gpus=0, or use attack.device=cpu."
            )
        return {"num_cpus": 0, "num_gpus": 1 / math.ceil(tasks / gpus)}


def _attack_shard(
    attack: ReconstructionAttack,
    observations: Sequence[Observation],
    *,
    seed: int,
    threads: int,
    tally: Any,
    number: int,
) -> tuple[list[Reconstruction], list[str]]:
    def tell(done: float) -> None:
        tally.tell.remote(number, done)

    return attack_part(attack, observations, seed=seed, threads=threads, tell=tell)


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

Tell = Callable[[float], object]
"""Takes the number of victims that are done."""


def cut(observations: Sequence[Observation], parts: int) -> list[list[int]]:
    """Positions of ``observations`` in at most ``parts`` parts of about the same size, in order.

    Updates that are known to come from the same examples stay together.
    """
    units: dict[tuple[bool, str], list[int]] = {}
    for position, observation in enumerate(observations):
        same = observation.knowledge.same_data
        units.setdefault((same is None, same or str(observation.id)), []).append(position)
    lists, count = list(units.values()), min(parts, len(units))
    return [
        [position for unit in lists[k * len(lists) // count : (k + 1) * len(lists) // count] for position in unit]
        for k in range(count)
    ]


def attack_part(
    attack: ReconstructionAttack, observations: Sequence[Observation], *, seed: int, threads: int, tell: Tell
) -> tuple[list[Reconstruction], list[str]]:
    """The reconstructions of a part, and the warnings on the way, which nobody would see otherwise."""
    torch.set_num_threads(threads)
    told = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_EVERY:
            told = time.monotonic()
            tell(len(observations) * done / max(total, 1))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found = attack(observations, seed=seed, progress=progress)
    return found, list(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)))
