"""What a client's round takes on a small device, kept with the run."""

from pathlib import Path

from fl_privacy.runs.folder.ongoing import METRICS, expect_finished
from fl_privacy.runs.folder.records import RecordWriter


def append_node_cost(
    path: Path,
    *,
    fits: bool,
    memory: int,
    peak_bytes: int,
    held_by: str,
    cpu_seconds: float | None = None,
    seconds: float | None = None,
    joules: float | None = None,
    repeats: int | None = None,
) -> None:
    """Append to a finished run, in folder ``path``, what a client's round takes on a small device.

    Args:
        path: of the run.
        fits: whether it was done with the memory there was.
        memory: bytes that there were.
        peak_bytes: of its own, at most.
        held_by: who held it to that memory.
        cpu_seconds: of a round; ``None``, like the others, where it was not done.
        seconds: as ``cpu_seconds``, by the clock.
        joules: as ``seconds``, of the whole processor; ``None`` where the kernel does not say.
        repeats: rounds that these are the median of.

    Raises:
        UserError: the run has not finished.
    """
    expect_finished(path)
    with RecordWriter(path / METRICS) as records:
        records.append(
            {
                "kind": "node",
                "fits": fits,
                "memory": memory,
                "peak_bytes": peak_bytes,
                "held_by": held_by,
                "cpu_seconds": cpu_seconds,
                "seconds": seconds,
                "joules": joules,
                "repeats": repeats,
            }
        )
