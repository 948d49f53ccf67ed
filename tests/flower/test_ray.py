"""Clients in Ray processes give the bits of the plain loop too."""

import os
import time
from functools import partial
from typing import Any

import pytest

from fl_privacy.errors import UserError
from fl_privacy.federation import Client
from fl_privacy.flower import rounds_on_ray
from tests.federation import harness
from tests.flower.test_backends import CASES, ROUNDS, assert_same_run

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_ray_gives_the_bits_of_the_plain_loop() -> None:
    backend = partial(rounds_on_ray, num_cpus=0.5, actors=1)  # several: tests/experiment/test_same_numbers.py

    recording = assert_same_run(backend, **CASES["everything at once"])

    assert len(recording.reports) == ROUNDS


@pytest.mark.long
def test_a_process_that_dies_or_never_answers_costs_one_reply_and_is_replaced() -> None:
    recording = run(source=dying_then_sleeping, actors=1, timeout=10.0)

    assert [report.clients for report in recording.reports] == [(0, 2), (0, 2), (0, 1, 2)]
    assert "Died" in recording.reports[0].excluded[1]
    assert recording.reports[1].excluded == {1: "no reply within 10 s (backend.timeout)"}


def test_clients_that_can_not_be_made_say_why() -> None:
    with pytest.raises(UserError, match="but failed: FileNotFoundError: no data on this machine"):
        run(source=without_data, actors=1)


def without_data() -> dict[int, Client]:
    raise FileNotFoundError("no data on this machine")


def run(*, source: Any, actors: int, timeout: float = 3600.0) -> harness.Recording:
    recording = harness.Recording()
    recording.follow(
        rounds_on_ray(
            harness.server(),
            source,
            rounds=ROUNDS,
            audit=harness.updates(),
            interceptor=recording.interceptor(),
            num_cpus=0.5,
            actors=actors,
            timeout=timeout,
        )
    )
    return recording


def dying_then_sleeping() -> dict[int, Client]:
    clients = harness.clients()
    return clients | {1: Failing(**{name: getattr(clients[1], name) for name in clients[1].__dataclass_fields__})}


class Failing(Client):
    def update(self, sent: Any, state: Any, *, round: int) -> Any:
        if round == 1:
            os._exit(1)
        if round == 2:
            time.sleep(3600)
        return super().update(sent, state, round=round)
