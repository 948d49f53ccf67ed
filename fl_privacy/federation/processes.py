"""Compute independent parts in processes on all cores, with bitwise equal results for any number of processes."""

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fl_privacy.federation.cores import LEFT, usable_cores
from fl_privacy.files import temporary_folder
from fl_privacy.models.gradients.memory import share_among
from fl_privacy.rng import cpu_threads

logger: logging.Logger = logging.getLogger(__name__)

R = TypeVar("R")

Done = Callable[[float], None]  # callback with the finished share of a part, in [0, 1]
Part = Callable[[Done], R]  # function that computes a part, picklable with all it needs


STARTING = 4.0  # least savings in seconds that justify starting processes, each of which imports PyTorch
STARTED = 0.3  # least savings in seconds that justify using running processes
_WATCHED = 1.0  # seconds of work before the first estimate

_UNSURE = 3.0
"""Factor on ``STARTING`` while no part has ended and estimates are unsure; twice that in the first seconds."""

_LOOK_EVERY = 0.2

_IDLE = 120.0  # seconds after which an idle process ends

_HEARD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name))
"""Signals that a terminal sends to all processes; workers block them, since this process ends the workers."""


class _Pool:
    executor: Any = None


_pool = _Pool()


@contextmanager
def worker_processes(
    number: int, *, threads: int, environment: Mapping[str, str], sharers: int = 1, prepare: Callable[[], object] = int
) -> Iterator[Any]:
    """Yield loky's executor of ``number`` processes; later calls with the same arguments reuse the processes.

    ``threads``: CPU threads of each process. ``environment``: variables that differ from this process's. ``sharers``:
    number of all processes that divide the machine's memory. ``prepare``: function called at a process's start.
    """
    from loky import get_reusable_executor  # noqa: PLC0415

    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    warnings.filterwarnings("ignore", "A worker stopped while", UserWarning)  # another one takes its place
    masked = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD) if masked else set()
    try:
        _pool.executor = get_reusable_executor(
            max_workers=number,
            timeout=_IDLE,
            initializer=_begin,
            initargs=(os.getpid(), os.getcwd(), threads, sharers, prepare),  # noqa: PTH109  (as a plain text)
            env={**os.environ, **single, **environment},
        )
        yield _pool.executor
    finally:
        if masked:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int, folder: str, threads: int, sharers: int, prepare: Callable[[], object]) -> None:
    def end_with_parent() -> None:
        if os.name == "posix":
            while os.getppid() == parent:
                time.sleep(0.1)
        elif (process := multiprocessing.parent_process()) is not None:
            process.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    share_among(sharers)
    prepare()


def end_workers(waiting: Iterable[Future[Any]] = (), *, patience: float = 0.0) -> None:
    """Cancel the tasks ``waiting`` and end the workers by SIGKILL; with ``patience`` (seconds), first by SIGTERM."""
    executor, _pool.executor = _pool.executor, None
    if executor is None:
        return
    unfinished = [future for future in waiting if not future.cancel()]
    if patience:
        for worker in list((executor._processes or {}).values()):
            worker.terminate()
    late = wait(unfinished, timeout=patience).not_done
    with suppress(Exception):
        executor.shutdown(wait=True, kill_workers=bool(late) or not patience)


def in_processes(
    parts: Sequence[Part[R]],
    *,
    weights: Sequence[float],
    processes: int | None = None,
    threads: int = 1,
    report: Done = lambda share: None,
) -> list[R]:
    """Compute all of ``parts`` and return their results in order; the first error of a part is raised.

    ``parts``: independent parts with their own seeds. ``weights``: relative work of the parts. ``processes``: most
    processes including this one; ``None`` takes as many as there are cores for ``threads`` each. ``threads``: CPU
    threads of each process; they affect the last bits. ``report``: callback with the finished share of all work, in [0,
    1].
    """
    most = max(1, usable_cores() // threads) if processes is None else processes
    with cpu_threads(threads), temporary_folder("fl-privacy-work-") as folder:
        others = min(most, len(parts)) - 1
        return _Work(parts, weights, report, others=others, threads=threads, tally=folder / "done").results()


class _Work(Generic[R]):
    def __init__(
        self,
        parts: Sequence[Part[R]],
        weights: Sequence[float],
        report: Done,
        *,
        others: int,
        threads: int,
        tally: Path,
    ) -> None:
        self._parts, self._weights, self._report = parts, np.array(weights, dtype=np.float64), report
        self._others, self._threads = others, threads  # most worker processes; 0 if none may be used any more
        self._tally = tally  # file of the finished shares of the parts, which the workers write
        self._waiting = list(range(len(parts)))
        self._elsewhere, self._found = dict[Future[bytes], int](), dict[int, R]()
        self._own, self._done_here, self._began, self._looked = 0, 0.0, time.perf_counter(), 0.0
        self._seconds_here = 0.0
        self._error: BaseException | None = None
        self._done = np.zeros(len(parts))

    def results(self) -> list[R]:
        try:
            while self._waiting or self._elsewhere:
                share_among(1 + len(self._elsewhere))
                if self._waiting:
                    self._do_one()
                else:
                    wait(self._elsewhere, timeout=_LOOK_EVERY, return_when=FIRST_COMPLETED)
                self._look()
                if self._error is not None:
                    raise self._error
        except BaseException:
            if self._elsewhere:
                end_workers()
            raise
        finally:
            share_among(1)
        return [self._found[number] for number in range(len(self._parts))]

    def _do_one(self) -> None:
        def done_here(share: float) -> None:
            self._done[self._own] = share
            if time.perf_counter() - self._looked > _LOOK_EVERY:
                self._look()

        self._own, self._began = self._waiting.pop(0), time.perf_counter()
        self._found[self._own] = self._parts[self._own](done_here)
        self._done[self._own] = 1.0
        self._seconds_here += time.perf_counter() - self._began
        self._done_here += self._weights[self._own]
        self._began = time.perf_counter()

    def _look(self) -> None:
        self._looked = time.perf_counter()
        for future in [future for future in self._elsewhere if future.done()]:
            self._take(self._elsewhere.pop(future), future)
        if self._error is None and self._others and self._waiting and self._pays():
            self._hand_out()
        if self._elsewhere:
            there = np.memmap(self._tally, np.float64, "r", shape=len(self._parts))
            for number in self._elsewhere.values():
                self._done[number] = there[number]
        self._report(float(self._done @ self._weights / self._weights.sum()))

    def _pays(self) -> bool:
        executor = _pool.executor
        running = (0 if executor is None or executor._flags.broken else len(executor._processes or ())) >= self._others
        now = time.perf_counter() - self._began if self._own not in self._found else 0.0
        elapsed, current = self._seconds_here + now, self._weights[self._own]
        if elapsed < _WATCHED and not running:
            return False
        share = self._done[self._own] if now else 0.0
        speed = max(self._done_here + share * current, 1e-9) / elapsed
        if not self._done_here and not share:
            speed = current / elapsed  # at most
        left = (1 - share) * current if now else 0.0
        alone = float(left + self._weights[self._waiting].sum()) / speed
        others = min(self._others, len(self._waiting)) + len(self._elsewhere)
        together = max(alone / (others + 1), float(self._weights[self._waiting].max()) / speed)
        if running:
            return alone - together > STARTED
        if self._done_here:
            return alone - together > STARTING
        return alone - together > (_UNSURE if elapsed > STARTING else 2 * _UNSURE) * STARTING

    def _hand_out(self) -> None:
        import cloudpickle  # noqa: PLC0415

        while self._waiting and len(self._elsewhere) < self._others:
            number = self._waiting[-1]
            try:
                payload: bytes = cloudpickle.dumps(self._parts[number])
            except Exception as error:  # noqa: BLE001  (of anybody's attack)
                logger.debug("The work stays in one process, since it can't be sent: %s", error)
                self._others = 0
                return
            if not self._tally.exists():
                self._tally.write_bytes(bytes(8 * len(self._parts)))
            if not self._elsewhere:
                logger.info("%d parts are left, for up to %d processes.", len(self._waiting), 1 + self._others)
            try:
                with worker_processes(
                    self._others, threads=self._threads, environment={LEFT: "1"}, sharers=self._others + 1
                ) as executor:
                    future: Future[bytes] = executor.submit(_elsewhere, payload, str(self._tally), number)
            except (OSError, BrokenExecutor) as error:
                logger.warning("No other process could be started (%s); this one goes on alone.", error)
                self._others = 0
                return
            self._elsewhere[future] = self._waiting.pop()

    def _take(self, number: int, future: "Future[bytes]") -> None:
        try:
            result = pickle.loads(future.result())  # noqa: S301  (of this package's own process)
        except (BrokenExecutor, OSError) as error:
            result = type(error).__name__
            logger.warning("A process was ended, perhaps for lack of memory; this one does its part (%s).", result)
        if isinstance(result, str):
            logger.debug("A part can't be done elsewhere: %s", result)
            self._others = 0
            self._waiting.append(number)
            self._done[number] = 0.0
            return
        for message in result.warned:
            warnings.warn(message, stacklevel=2)
        for record in result.logged:
            if (own := logging.getLogger(record.name)).isEnabledFor(record.levelno):
                own.handle(record)
        self._done[number] = 1.0
        if result.error is not None:
            self._error = self._error or result.error
        else:
            self._found[number] = result.value


@dataclass(frozen=True)
class _Result:
    value: Any
    error: BaseException | None
    warned: list[str]
    logged: list[logging.LogRecord]


def _elsewhere(payload: bytes, tally: str, number: int) -> bytes:
    """Compute a pickled part of the work in a worker process; return its pickled ``_Result``.

    If the part can't be unpickled here, return the pickled reason. ``tally``: file of an array, whose element
    ``number`` gets the finished share of the part.
    """
    import cloudpickle  # noqa: PLC0415

    try:
        part = pickle.loads(payload)  # noqa: S301  (of the process that started this one)
    except Exception as missing:  # noqa: BLE001  (of modules that are not found here)
        return pickle.dumps(f"{type(missing).__name__}: {missing}")
    there = np.memmap(tally, np.float64, "r+")
    kept, value = _Kept(), None
    error: BaseException | None = None
    logging.getLogger().addHandler(kept)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            try:
                value = part(partial(there.__setitem__, number))
            except (Exception, SystemExit) as raised:  # noqa: BLE001  (returned to the caller)
                error = _sendable(raised)
    finally:
        logging.getLogger().removeHandler(kept)
    warned = dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning))
    packed: bytes = cloudpickle.dumps(_Result(value, error, list(warned), kept.records))
    return packed


def _sendable(error: BaseException) -> BaseException:
    """Return ``error`` if it can be pickled, else a substitute with the same class name and message."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:  # noqa: BLE001  (whatever a foreign exception makes of it)
        return type(type(error).__name__, (RuntimeError,), {})(str(error))
    return error


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self.records.append(record)
