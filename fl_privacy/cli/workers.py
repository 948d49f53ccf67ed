"""Jobs in single-threaded processes, so that results do not depend on the number of processes."""

import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool

from fl_privacy.cli.faults import STOPPING, Interrupted, in_a_line, interruptible, recognized
from fl_privacy.errors import UserError
from fl_privacy.federation.cores import shared_among
from fl_privacy.federation.processes import end_workers, worker_processes
from fl_privacy.runs.study import Job

GRACE_SECONDS = 20.0

_stopped = threading.Event()
"""Stop flag of a worker process."""


def run_in_processes(jobs: Sequence[Job], processes: int, *, on_done: Callable[[Job, str | None], None]) -> None:
    """Run all ``jobs`` in worker processes.

    Args:
        processes: number of parallel processes; they always end with this one.
        on_done: receiver of each finished job, with its error or ``None``.

    Raises:
        UserError: a process died.
    """
    if not jobs:
        return
    workers, waiting = min(processes, len(jobs)), dict[Future[str | None], Job]()
    try:
        with worker_processes(workers, threads=1, environment=shared_among(workers), prepare=_stop_at_sigterm) as pool:
            for job in jobs:
                waiting[pool.submit(_do, job)] = job
        for done in as_completed(waiting):
            on_done(waiting[done], done.result())
    except BrokenProcessPool as error:
        raise UserError(
            "A worker is expected to live as long as its jobs, but one was killed, perhaps for lack of memory;"
            " lower --jobs and start again, finished jobs are kept."
        ) from error
    except BaseException:
        end_workers(waiting, patience=GRACE_SECONDS)
        raise


def _stop_at_sigterm() -> None:
    """Refuse further jobs after SIGTERM; a running one is interrupted, which is never a client's fault."""
    signal.signal(signal.SIGTERM, lambda number, frame: _stopped.set())


def _do(job: Job) -> str | None:
    from fl_privacy.cli.jobs import run_job  # noqa: PLC0415
    from fl_privacy.cli.underway import WrittenMonitor  # noqa: PLC0415

    if _stopped.is_set():
        return "interrupted"
    try:
        with interruptible():
            run_job(job.command, job.config, WrittenMonitor(job.folder))
    except Interrupted:
        _stopped.set()
        return "interrupted"
    except STOPPING as error:
        if (fault := recognized(error)) is None:
            raise
        return in_a_line(fault)
    return None
