"""Tracing over what was attacked, and where it is recorded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_privacy.data import Examples
from fl_privacy.federation import Client
from fl_privacy.measure import ImageScore, VictimScore
from fl_privacy.measure.distortion import Tracing
from fl_privacy.runs.attack_stage import Tracer
from fl_privacy.types import LocalPlan, VictimId
from tests.experiment.runs import run


def score(victim: int, *, client: int = 0, exact: bool = True, images: int = 1) -> VictimScore:
    originals = torch.rand((images, 1, 4, 4), generator=torch.Generator().manual_seed(victim))
    guesses = originals.clone() if exact else torch.full_like(originals, float(victim == 0))
    return VictimScore(
        id=VictimId(1, client, victim),
        images=tuple(ImageScore(image=k, guess=k, values={}) for k in range(images)),
        originals=originals,
        guesses=guesses,
        attack_loss=0.0,
    )


@pytest.mark.parametrize("exact", [True, False])
def test_victims_of_one_client_are_dealt_in_order(exact: bool) -> None:
    found = Tracer(participants=3)([score(k, exact=exact, images=2) for k in range(7)])
    assert found is not None
    assert (found.participants, found.queries) == (3, 14)
    # black guesses are all alike, so that everybody is traced to one participant
    assert found.distance == 0 if exact else found.distance > 0.4


def test_clients_are_told_apart_where_there_are_several() -> None:
    found = Tracer(participants=5)([score(k, client=k % 2) for k in range(6)])
    assert found is not None and (found.participants, found.distance) == (2, 0.0)


def test_one_owner_cannot_be_told_from_others() -> None:
    assert Tracer(participants=10)([score(0)]) is None
    assert Tracer(participants=1)([score(0), score(1)]) is None


@pytest.mark.parametrize(("victims", "images"), [(12, 1), (3, 4), (2, 8)])
def test_batches_of_any_size_are_traced_among_as_many(victims: int, images: int) -> None:
    found = Tracer(participants=10)([score(k, images=images) for k in range(victims)])
    assert found is not None and (found.participants, found.distance) == (10, 0.0)
    useless = Tracer(participants=10)([score(k, exact=False, images=images) for k in range(1, 1 + victims)])
    assert useless is not None and useless.distance > 0.8


def unread(victim: int, *, failure: str | None = None) -> VictimScore:
    return replace(score(victim), images=(ImageScore(image=0, guess=None, values={}, failure=failure),))


def test_nothing_reconstructed_traces_nobody() -> None:
    found = Tracer(participants=10)([unread(k) for k in range(3)])
    assert found is not None and (found.distance, found.participants, found.queries) == (1.0, 3, 3)


def test_a_failed_attack_is_not_counted_as_traced_wrongly() -> None:
    assert Tracer(participants=10)([unread(k, failure="failed") for k in range(3)]) is None
    found = Tracer(participants=10)([score(0), score(1), unread(9, failure="failed")])
    assert found == Tracing(distance=0.0, attacked_distance=0.0, participants=2, queries=2)


def test_a_run_records_it_for_each_attacker(tmp_path: Path) -> None:
    done = run(
        "attack", "attack=dlg", "attack.iterations=2", "attack.start=pattern", "model=dlnet", "defense=spn",
        "victims=4", "tracing=2", "threat_model=adaptive", out=tmp_path,
    )  # fmt: skip
    assert done.status == 0
    records = done.records("tracing")
    assert [(r["attacker"], r["participants"], r["queries"]) for r in records] == [("plain", 2, 4), ("adaptive", 2, 4)]
    summary = json.loads((done.path / "summary.json").read_text())
    assert (summary["tracing"]["queries"], summary["tracing"]["participants"]) == (4, 2)
    assert summary["tracing"]["chance"] == 0.5
    page = (done.path / "report.html").read_text()
    assert page.count("of 4 images; guessing gets 50.0\N{NO-BREAK SPACE}%") == 1, (
        "in a tile, of the attacker that traced best"
    )
    assert page.count('<td class="number" data-label="Number of images">4</td>') == 2
    assert summary["tracing"]["mean"] == records[0]["distance"]
    assert summary["adaptive"]["tracing"]["mean"] == records[1]["distance"]


def owner(examples: Examples, client: int, indices: list[int]) -> Client:
    return Client(
        id=client, examples=examples, indices=torch.tensor(indices), model=torch.nn.Identity(), plan=LocalPlan()
    )


def noise(number: int) -> Examples:
    images = torch.randint(256, (number, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Examples(images, torch.zeros(number, dtype=torch.long), ("only",))


def scored(examples: Examples, index: int, *, client: int = 0) -> VictimScore:
    found = score(index, client=client)
    images = examples.batch(torch.tensor([index])).inputs
    return replace(found, originals=images, guesses=images.clone())


def test_other_images_of_the_client_are_dealt_like_the_attacked_ones() -> None:
    examples = noise(60)
    scores = [scored(examples, k) for k in (3, 14, 15, 9, 26, 5)]
    tracer = Tracer(participants=3, clients={0: owner(examples, 0, list(range(50)))}, queries=36, seed=1)
    found = tracer(scores)
    assert found is not None and (found.participants, found.queries) == (3, 36)
    # the six that were attacked are traced rightly, of the other thirty about a third
    assert found.attacked_distance == 0 and 0.3 < found.distance < 30 / 36
    assert found == tracer(scores)
    everything = replace(tracer, queries=1000)(scores)
    assert everything is not None and everything.queries == 50
    assert replace(tracer, queries=2)(scores) == Tracing(distance=0.0, attacked_distance=0.0, participants=3, queries=6)


def test_other_images_belong_to_the_client_that_has_them() -> None:
    examples = noise(40)
    examples.images[:] //= 8
    examples.images[:20] += 200
    clients = {
        0: owner(examples, 0, list(range(20))),
        1: owner(examples, 1, list(range(20, 40))),
        2: owner(examples, 2, []),
    }
    scores = [scored(examples, 0), scored(examples, 25, client=1)]
    # the images of one client are bright, those of the other dark
    assert Tracer(clients=clients, queries=40)(scores) == Tracing(
        distance=0.0, attacked_distance=0.0, participants=2, queries=40
    )


def test_the_configuration_asks_for_more_images(tmp_path: Path) -> None:
    done = run(
        "attack", "attack=dlg", "attack.iterations=1", "model=dlnet", "victims=2", "tracing_queries=100", out=tmp_path
    )
    assert done.status == 0
    (record,) = done.records("tracing")
    assert (record["participants"], record["queries"]) == (2, 100)
