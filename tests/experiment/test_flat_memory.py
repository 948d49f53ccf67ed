"""A run takes as much memory after many rounds as after a few, whatever is intercepted of it."""

import gc
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_privacy.federation import Audit
from fl_privacy.federation.interception import Interceptor
from fl_privacy.flower import rounds_in_process
from fl_privacy.runs.attack_stage import WaitingAttack
from fl_privacy.runs.build import clients_of
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.folder.ongoing import move_aside
from fl_privacy.runs.run_location import plain_loop
from fl_privacy.runs.setup import build_setup
from fl_privacy.types import Observation, Upload
from tests.experiment.runs import TINY, run

ROUNDS = 12
BACKENDS: dict[str, Any] = {"loop": plain_loop, "flower": rounds_in_process}


def alive(*kinds: type) -> int:
    gc.collect()
    return sum(issubclass(type(each), kinds) for each in gc.get_objects())


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_round_leaves_anything_behind(backend: str) -> None:
    config = compose_run(
        ["federation.clients=3", f"federation.rounds={ROUNDS}", "federation.plan.batch_size=2", "attack=none"]
    )
    federation = build_setup(config)
    examples, held = federation.dataset.train, list[tuple[int, int]]()

    seen = set[str]()
    gc.collect()
    gc.freeze()  # what is there before the rounds needs no looking through after each
    tracemalloc.start()
    try:
        for round in BACKENDS[backend](
            federation.server,
            lambda: clients_of(config),
            rounds=ROUNDS,
            audit=Audit(
                rounds=frozenset(range(1, ROUNDS + 1)), uploads="update", clients=frozenset(federation.clients)
            ),
            interceptor=Interceptor(
                model=federation.model,
                plan=federation.server.local_plan,
                input_shape=examples.input_shape,
                num_classes=examples.num_classes,
            ),
        ):
            seen |= {str(observation.id) for observation in round}
            assert round.report.round == round.number
            held.append((alive(torch.Tensor), tracemalloc.get_traced_memory()[0]))
    finally:
        tracemalloc.stop()
    assert len(seen) == 3 * ROUNDS
    half, end = held[ROUNDS // 2], held[-1]
    assert end[0] == half[0], "tensors stay alive"
    upload = sum(t.nbytes for t in federation.server.state.parameters.values())
    assert end[1] - half[1] < upload, "less than one upload in all these rounds of three"


@pytest.mark.long
def test_updates_that_wait_for_their_attack_are_on_disk_and_read_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (
        *("federation.clients=3", "federation.rounds=5", "federation.plan.batch_size=1", "evaluate_every=5"),
        *("intercept.uploads=update", "intercept.rounds=all", "attack.iterations=2", "films=0"),
    )
    held = run("run", *settings, out=tmp_path / "held")
    counts, files, see, done = list[int](), list[int](), WaitingAttack.see, WaitingAttack.end_round
    seen = list["weakref.ref[Observation | Upload]"]()  # threads of other tests may make objects of these types, too

    def seeing(self: WaitingAttack, observation: Observation) -> None:
        seen.extend((weakref.ref(observation), weakref.ref(observation.upload)))
        see(self, observation)

    def counting(self: WaitingAttack) -> None:
        done(self)
        gc.collect()
        counts.append(sum(each() is not None for each in seen))
        files.append(len(list((self.stage.folder.path / ".waiting").rglob("*.json"))))

    monkeypatch.setattr(WaitingAttack, "see", seeing)
    monkeypatch.setattr(WaitingAttack, "end_round", counting)
    monkeypatch.setattr("fl_privacy.runs.run.MOST_HELD", 0)
    waited = run("run", *settings, out=tmp_path / "waited")
    assert files == [3, 6, 9, 12, 15]
    assert len(seen) == 2 * 15
    assert len(set(counts[1:])) == 1 and counts[-1] <= 4
    assert not (waited.path / ".waiting").exists()
    assert len(held.records("image")) == 15
    assert waited.records("image") == held.records("image")


def test_updates_that_waited_do_not_outlive_a_run_that_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, done = list[Path](), WaitingAttack.end_round

    def breaking_off(self: WaitingAttack) -> None:
        done(self)
        there.extend((self.stage.folder.path / ".waiting").rglob("*.json"))
        raise KeyboardInterrupt

    monkeypatch.setattr(WaitingAttack, "end_round", breaking_off)
    monkeypatch.setattr("fl_privacy.runs.run.MOST_HELD", 0)
    run("run", *TINY, "intercept.uploads=update", "intercept.rounds=all", out=tmp_path)
    assert there and not list(tmp_path.rglob(".waiting"))
    (killed := tmp_path / "killed" / ".waiting").mkdir(parents=True)
    move_aside(killed.parent, "interrupted")
    assert not list(tmp_path.rglob(".waiting"))
