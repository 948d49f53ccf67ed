"""Which attacked examples a page shows first."""

from fl_privacy.report.gallery import from_many


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
