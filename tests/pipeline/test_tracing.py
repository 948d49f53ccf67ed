"""Tracing over what was attacked, and where it is recorded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_privacy.metrics import ImageScore, VictimScore
from fl_privacy.pipeline.tracing import traced
from tests.pipeline.runs import run


def score(victim: int, *, client: int = 0, exact: bool = True, images: int = 1) -> VictimScore:
    originals = torch.rand((images, 1, 4, 4), generator=torch.Generator().manual_seed(victim))
    guesses = originals.clone() if exact else torch.full_like(originals, float(victim == 0))
    return VictimScore(
        id=f"round-1/client-{client}/victim-{victim}",
        images=tuple(ImageScore(image=k, guess=k, values={}) for k in range(images)),
        originals=originals,
        guesses=guesses,
        attack_loss=0.0,
    )


@pytest.mark.parametrize("exact", [True, False])
def test_victims_of_one_client_are_dealt_in_order(exact: bool) -> None:
    found = traced([score(k, exact=exact, images=2) for k in range(7)], participants=3)
    assert found is not None
    assert (found.participants, found.queries) == (3, 14)
    # black guesses are all alike, so that everybody is traced to one participant
    assert found.distance == 0 if exact else found.distance > 0.4


def test_clients_are_told_apart_where_there_are_several() -> None:
    found = traced([score(k, client=k % 2) for k in range(6)], participants=5)
    assert found is not None and (found.participants, found.distance) == (2, 0.0)


def test_one_owner_cannot_be_told_from_others() -> None:
    assert traced([score(0)], participants=10) is None
    assert traced([score(0), score(1)], participants=1) is None


@pytest.mark.parametrize(("victims", "images"), [(12, 1), (3, 4), (2, 8)])
def test_batches_of_any_size_are_traced_among_as_many(victims: int, images: int) -> None:
    found = traced([score(k, images=images) for k in range(victims)], participants=10)
    assert found is not None and (found.participants, found.distance) == (10, 0.0)
    useless = traced([score(k, exact=False, images=images) for k in range(1, 1 + victims)], participants=10)
    assert useless is not None and useless.distance > 0.8


def test_nothing_reconstructed_traces_nobody() -> None:
    failed = [
        replace(score(k), images=(ImageScore(image=0, guess=None, values={}, failure="failed"),)) for k in range(3)
    ]
    found = traced(failed, participants=10)
    assert found is not None and (found.distance, found.participants, found.queries) == (1.0, 3, 3)


def test_failed_victims_are_asked_for_but_answer_nobody() -> None:
    failed = VictimScore(
        id="round-1/client-1/victim-9",
        images=(ImageScore(image=0, guess=None, values={}, failure="failed"),),
        originals=torch.rand(1, 1, 4, 4),
        guesses=torch.zeros(1, 1, 4, 4),
        attack_loss=0.0,
    )
    found = traced([score(0), score(1), failed], participants=10)
    assert found is not None and found.queries == 3 and found.distance == pytest.approx(1 / 3)


def test_a_run_records_it_for_each_attacker(tmp_path: Path) -> None:
    done = run(
        "attack", "attack=dlg", "attack.iterations=2", "attack.start=pattern", "model=dlnet", "defense=spn",
        "victims=4", "tracing=2", "knows_defense=true", out=tmp_path,
    )  # fmt: skip
    assert done.status == 0
    records = done.records("tracing")
    assert [(r["attacker"], r["participants"], r["queries"]) for r in records] == [("plain", 2, 4), ("adaptive", 2, 4)]
    summary = json.loads((done.path / "summary.json").read_text())
    assert summary["tracing"]["mean"] == records[0]["distance"]
    assert summary["adaptive"]["tracing"]["mean"] == records[1]["distance"]
