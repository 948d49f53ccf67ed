"""What a client's round takes on a small device, kept with the run."""

from pathlib import Path

from fl_privacy.errors import UserError
from fl_privacy.results.folder import is_finished
from fl_privacy.results.records import RecordWriter


def append_node_cost(
    path: Path, *, fits: bool, memory: int, peak_bytes: int, held_by: str, **cost: float | None
) -> None:
    """What a client's round of the finished run in folder ``path`` takes on a small device, after its other records.

    Args:
        path: of the run.
        fits: whether it was done with the memory there was.
        memory: bytes that there were.
        peak_bytes: of its own, at most.
        held_by: who held it to that memory.
        cost: ``cpu_seconds``, ``seconds`` and ``joules`` of a round, ``repeats``.

    Raises:
        UserError: the run has not finished.
    """
    if not is_finished(path):
        raise UserError(f"{path} is expected to hold a finished run, but has no summary.json; start the run again.")
    with RecordWriter(path / "metrics.jsonl") as records:
        records.append(
            {"kind": "node", "fits": fits, "memory": memory, "peak_bytes": peak_bytes, "held_by": held_by, **cost}
        )
