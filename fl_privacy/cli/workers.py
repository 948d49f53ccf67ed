"""Jobs in single-threaded processes, so that results do not depend on the number of processes."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import FrameType

from fl_privacy.cli.faults import ENDING, STOPPING, Interrupted, in_a_line, interruptible, recognized
from fl_privacy.errors import UserError
from fl_privacy.federation.cores import shared_among
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
    workers = min(processes, len(jobs))
    environment = {**os.environ, **shared_among(workers)}
    with ProcessPoolExecutor(workers, _context(), _start, (environment,)) as pool:
        waiting = {pool.submit(_do, job): job for job in jobs}
        try:
            for done in as_completed(waiting):
                on_done(waiting[done], done.result())
        except BrokenProcessPool as error:
            raise UserError(
                "A worker is expected to live as long as its jobs, but one was killed, perhaps for lack of memory;"
                " lower --jobs and start again, finished jobs are kept."
            ) from error
        except (Interrupted, KeyboardInterrupt):
            pool.shutdown(wait=False, cancel_futures=True)
            _end(multiprocessing.active_children())
            raise


def _context() -> BaseContext:
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fl_privacy.cli.worker_imports"])
    return context


def _end(workers: Sequence[BaseProcess]) -> None:
    """Ask ``workers`` to end, so that they leave no semaphores behind; kill the others."""
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        worker.kill()


def _start(environment: Mapping[str, str]) -> None:
    """Set the command's ``environment`` in a worker, which may be forked from an older process."""
    import torch  # noqa: PLC0415

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)  # a terminal signals all of them; the parent ends them
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _stop(number: int, frame: FrameType | None) -> None:
    """End between jobs; within one, ``Interrupted`` is raised, which is never a client's fault."""
    _stopped.set()
    sys.exit(128 + number)


def _end_with_parent() -> None:
    """End a worker whose parent was killed, which would keep the lock of its run's folder."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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
