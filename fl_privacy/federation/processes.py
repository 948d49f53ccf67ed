"""Work on independent parts by single-threaded processes on all cores, with bitwise equal results for any number.

Workers are started once measurements show that it pays, and are kept; work that can't be sent stays here.
"""

import logging
import os
import pickle
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fl_privacy.federation.cores import LEFT, usable_cores
from fl_privacy.models.gradients.memory import share_among
from fl_privacy.rng import cpu_threads

logger = logging.getLogger(__name__)

R = TypeVar("R")

Done = Callable[[float], None]
"""Callback with the finished share of a part, in [0, 1]."""


Part = Callable[[Done], R]
"""Function that computes a part, picklable with all it needs."""


STARTING = 4.0
"""Least savings in seconds that justify starting processes, each of which imports PyTorch."""

STARTED = 0.3
"""Least savings in seconds that justify using running processes."""

_WATCHED = 1.0
"""Seconds of work before the first estimate."""

_UNSURE = 3.0
"""Factor on the savings estimated before the first part has ended, since attacks that end early report too little;
twice that at first."""

_LOOK_EVERY = 0.2

_IDLE = 120.0
"""Seconds after which an idle process ends."""

_HEARD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name))
"""Signals that a terminal sends to all processes; this one ends the others."""


def in_processes(
    parts: Sequence[Part[R]],
    *,
    weights: Sequence[float],
    processes: int | None = None,
    threads: int = 1,
    report: Done = lambda share: None,
) -> list[R]:
    """Compute all of ``parts`` and return their results in order.

    Args:
        parts: independent parts with their own seeds.
        weights: relative work of the parts.
        processes: most processes including this one; ``None`` takes as many as there are cores for ``threads`` each.
        threads: CPU threads of each; they affect the last bits.

    Raises:
        Exception: error of a part, after which no other starts and the workers are ended.
    """
    most = max(1, usable_cores() // threads) if processes is None else processes
    with cpu_threads(threads), tempfile.TemporaryDirectory(prefix="fl-privacy-") as folder:
        others = _Others(min(most, len(parts)) - 1, threads, Path(folder) / "done")
        work = _Work(parts, weights, others, report)
        return work.results()


class _Work(Generic[R]):
    def __init__(self, parts: Sequence[Part[R]], weights: Sequence[float], others: "_Others", report: Done) -> None:
        self._parts, self._weights, self._report = parts, np.array(weights, dtype=np.float64), report
        self._others, self._waiting = others, list(range(len(parts)))
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
                _end_all()
            raise
        finally:
            share_among(1)
        return [self._found[number] for number in range(len(self._parts))]

    def _do_one(self) -> None:
        self._own, self._began = self._waiting.pop(0), time.perf_counter()
        self._found[self._own] = self._parts[self._own](self._here)
        self._done[self._own] = 1.0
        self._seconds_here += time.perf_counter() - self._began
        self._done_here += self._weights[self._own]
        self._began = time.perf_counter()

    def _here(self, share: float) -> None:
        self._done[self._own] = share
        if time.perf_counter() - self._looked > _LOOK_EVERY:
            self._look()

    def _look(self) -> None:
        self._looked = time.perf_counter()
        for future in [future for future in self._elsewhere if future.done()]:
            self._take(self._elsewhere.pop(future), future)
        if self._error is None and self._others.most and self._waiting and self._pays():
            self._hand_out()
        if self._elsewhere:
            there = np.memmap(self._others.tally, np.float64, "r", shape=len(self._parts))
            for number in self._elsewhere.values():
                self._done[number] = there[number]
        self._report(float(self._done @ self._weights / self._weights.sum()))

    def _pays(self) -> bool:
        now = time.perf_counter() - self._began if self._own not in self._found else 0.0
        elapsed, current = self._seconds_here + now, self._weights[self._own]
        if elapsed < _WATCHED and not self._others.running:
            return False
        share = self._done[self._own] if now else 0.0
        speed = max(self._done_here + share * current, 1e-9) / elapsed
        if not self._done_here and not share:
            speed = current / elapsed  # at most
        left = (1 - share) * current if now else 0.0
        alone = float(left + self._weights[self._waiting].sum()) / speed
        others = min(self._others.most, len(self._waiting)) + len(self._elsewhere)
        together = max(alone / (others + 1), float(self._weights[self._waiting].max()) / speed)
        if self._others.running:
            return alone - together > STARTED
        if self._done_here:
            return alone - together > STARTING
        return alone - together > (_UNSURE if elapsed > STARTING else 2 * _UNSURE) * STARTING

    def _hand_out(self) -> None:
        while self._waiting and len(self._elsewhere) < self._others.most:
            number = self._waiting[-1]
            payload = _packed(self._parts[number])
            if payload is None:
                self._others.most = 0
                return
            if not self._others.tally.exists():
                self._others.tally.write_bytes(bytes(8 * len(self._parts)))
            if not self._elsewhere:
                logger.info("%d parts are left, for up to %d processes.", len(self._waiting), 1 + self._others.most)
            try:
                future = self._others.do(payload, number)
            except (OSError, BrokenExecutor) as error:
                logger.warning("No other process could be started (%s); this one goes on alone.", error)
                self._others.most = 0
                return
            self._elsewhere[future] = self._waiting.pop()

    def _take(self, number: int, future: "Future[bytes]") -> None:
        try:
            told = pickle.loads(future.result())  # noqa: S301  (of this package's own process)
        except (BrokenExecutor, OSError) as error:
            told = _Unfit(_name(error))
            logger.warning("A process was ended, perhaps for lack of memory; this one does its part (%s).", told.reason)
        if isinstance(told, _Unfit):
            logger.debug("A part can't be done elsewhere: %s", told.reason)
            self._others.most = 0
            self._waiting.append(number)
            self._done[number] = 0.0
            return
        told.said()
        self._done[number] = 1.0
        if told.error is not None:
            self._error = self._error or told.error
        else:
            self._found[number] = told.result


@dataclass(frozen=True)
class _Unfit:
    reason: str


@dataclass(frozen=True)
class _Told:
    result: Any
    error: BaseException | None
    warned: list[str]
    logged: list[logging.LogRecord]

    def said(self) -> None:
        for message in self.warned:
            warnings.warn(message, stacklevel=2)
        for record in self.logged:
            own = logging.getLogger(record.name)
            if own.isEnabledFor(record.levelno):
                own.handle(record)


def _name(error: BaseException) -> str:
    return type(error).__name__


def _packed(part: Part[Any]) -> bytes | None:
    import cloudpickle  # noqa: PLC0415

    try:
        packed: bytes = cloudpickle.dumps(part)
    except Exception as error:  # noqa: BLE001  (of anybody's attack)
        logger.debug("The work stays in one process, since it can't be sent: %s", error)
        return None
    return packed


class _Pool:
    executor: Any = None


_pool = _Pool()


@dataclass(eq=False)
class _Others:
    """Worker processes.

    Attributes:
        most: most processes; 0 if none may be used any more.
        tally: file of finished shares, one number per part.
    """

    most: int
    threads: int
    tally: Path

    @property
    def running(self) -> bool:
        executor = _pool.executor
        there = 0 if executor is None or executor._flags.broken else len(executor._processes or ())
        return there >= self.most > 0

    def do(self, payload: bytes, number: int) -> "Future[bytes]":
        from loky import get_reusable_executor  # noqa: PLC0415

        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(self.threads))
        with _unheard():
            _pool.executor = get_reusable_executor(
                max_workers=self.most,
                timeout=_IDLE,
                initializer=_begin,
                initargs=(os.getpid(), self.threads, self.most + 1),
                env={**single, LEFT: "1"},
            )
            future: Future[bytes] = _pool.executor.submit(_elsewhere, payload, str(self.tally), number)
        return future


@contextmanager
def _unheard() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int, threads: int, sharers: int) -> None:
    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if os.name == "posix":
        threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    share_among(sharers)


def _elsewhere(payload: bytes, tally: str, number: int) -> bytes:
    import cloudpickle  # noqa: PLC0415

    try:
        part = pickle.loads(payload)  # noqa: S301  (of the process that started this one)
    except Exception as missing:  # noqa: BLE001  (of modules that are not found here)
        return pickle.dumps(_Unfit(f"{_name(missing)}: {missing}"))
    there = np.memmap(tally, np.float64, "r+")
    kept, result = _Kept(), None
    error: BaseException | None = None
    logging.getLogger().addHandler(kept)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            try:
                result = part(partial(there.__setitem__, number))
            except (Exception, SystemExit) as raised:  # noqa: BLE001  (returned to the caller)
                error = _sendable(raised)
    finally:
        logging.getLogger().removeHandler(kept)
    warned = dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning))
    packed: bytes = cloudpickle.dumps(_Told(result, error, list(warned), kept.records))
    return packed


def _sendable(error: BaseException) -> BaseException:
    """Return ``error``, or one of the same name and message if it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:  # noqa: BLE001  (whatever a foreign exception makes of it)
        return type(_name(error), (RuntimeError,), {})(str(error))
    return error


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self.records.append(record)


def _end_all() -> None:
    executor, _pool.executor = _pool.executor, None
    if executor is not None:
        with suppress(Exception):
            executor.shutdown(wait=True, kill_workers=True)
