"""Which attacked examples a page shows first."""

from types import SimpleNamespace
from typing import Any

import pytest

from fl_privacy.report.gallery import best_rows, best_rows_in_words, from_many, gallery_title
from fl_privacy.types.victim_ids import Attacker


def row(client: int, victim: int, number: int) -> dict[str, object]:
    return {"client": client, "id": f"round-0/client-{client}/victim-{victim}", "image": number}


def test_rows_come_from_as_many_clients_as_there_are() -> None:
    """Most audits read all rows of an upload equally well: its rows alone tell nothing of the other clients."""
    ranked = [row(0, 0, 0), row(0, 0, 1), row(0, 1, 0), row(2, 0, 0), row(1, 0, 0), row(1, 0, 1)]
    assert from_many(ranked, 3, "row") == [ranked[0], ranked[3], ranked[4]]


def test_rows_of_one_client_come_from_several_uploads_and_are_different() -> None:
    ranked = [row(0, 0, 0), row(0, 0, 1), row(0, 0, 0), row(0, 1, 0), row(0, 1, 0)]
    assert from_many(ranked, 2, "row") == [ranked[0], ranked[3]]
    assert from_many(ranked, 5, "row") == [ranked[0], ranked[1], ranked[3]], "the same row twice is one"


def recorded(*rows: tuple[int, int, int, float]) -> Any:
    """Make a run with rows of (client, victim, number, share of right cells)."""
    more = {"round": 0, "certainty": "approximate", "member": ""}
    found = [{**row(*place), **more, "cells_right": share} for *place, share in rows]
    return SimpleNamespace(of_kind=lambda kind, attacker=Attacker.PLAIN: found if attacker is Attacker.PLAIN else [])


@pytest.mark.parametrize(
    ("rows", "said", "ranks"),
    [
        ([(0, 0, 0, 0.9), (0, 0, 1, 0.8), (1, 0, 0, 0.2)], "", ["Best", "Second", "Third"]),
        ([(0, 0, 0, 0.9), (0, 1, 0, 0.8), (1, 0, 0, 0.2)], "of each of 3 uploads", ["Best", "Second", "Third"]),
        ([(0, 0, 0, 0.9), (0, 0, 1, 0.8), (1, 0, 0, 0.5), (2, 0, 0, 0.1)], "of each of 3 clients", ["", "", ""]),
        ([(0, 0, 0, 0.9), (0, 0, 1, 0.8)], "", ["Best", "Second"]),
        ([(0, 0, 0, 0.9)], "", [""]),
        ([(0, 0, 0, 0.0), (1, 0, 0, 0.0)], "the same share of right cells", ["", ""]),
    ],
)
def test_rows_are_called_the_best_only_of_what_they_are_the_best_of(
    rows: list[tuple[int, int, int, float]], said: str, ranks: list[str]
) -> None:
    run = recorded(*rows)
    words = best_rows_in_words(run)
    assert said in words and bool(words) is bool(said)
    assert [view["rank"] for view in best_rows(run, {})] == ranks


def test_one_example_is_not_all_of_them() -> None:
    assert gallery_title(recorded((0, 0, 0, 1.0)), "row") == "The attacked row"
    assert gallery_title(recorded((0, 0, 0, 1.0), (0, 0, 1, 1.0)), "row") == "All 2 attacked rows"
