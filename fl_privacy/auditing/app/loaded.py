"""The rows, columns and labels that clients load through common libraries, for comparison with their replies."""

import importlib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_privacy.auditing.clear_text.findings import Loaded
from fl_privacy.auditing.instrument.fitted import Fitted
from fl_privacy.auditing.instrument.program import tensors_in
from fl_privacy.auditing.instrument.watch import Watched, replaced
from fl_privacy.checks.packages import loaded_when_used
from fl_privacy.federation.replies import Failure, attempt

MOST_ROWS = 20_000

MOST_CLASSES = 1000
"""Largest number of different labels that count as classes."""

READERS = (
    "read_csv",
    "read_parquet",
    "read_sql",
    "read_sql_table",
    "read_sql_query",
    "read_excel",
    "read_table",
    "read_json",
    "read_feather",
)
"""Loading functions of pandas."""


class LoadedBy:
    """Record which ``flwr_datasets`` partitions and pandas tables a client loads while it answers.

    Args:
        tables: columns of all tables loaded so far.
        since: time in seconds since 1970 after which a written file may be a log of the app.
        answered: number of messages so far; a longer table is no log but data that the app wrote.
    """

    def __init__(self, tables: dict[str, np.ndarray] | None = None, since: float = math.inf, answered: int = 0) -> None:
        self._since, self._answered = since, answered
        self._partitions: list[Any] = []
        self._tables: dict[str, np.ndarray] = {} if tables is None else tables

    @contextmanager
    def looking(self) -> Iterator[None]:
        with ExitStack() as stack:
            if importlib.util.find_spec("flwr_datasets") is not None:
                loaded_when_used("seaborn")  # imported by its plots
                owner = importlib.import_module("flwr_datasets").FederatedDataset
                stack.enter_context(replaced(owner, "load_partition", self._around))
            if importlib.util.find_spec("pandas") is not None:
                pandas = importlib.import_module("pandas")
                for name in READERS:
                    if hasattr(pandas, name):
                        stack.enter_context(replaced(pandas, name, self._around_reading))
            yield

    def _around_reading(self, read: Any) -> Any:
        def table(*args: Any, **kwargs: Any) -> Any:
            found = read(*args, **kwargs)
            short = attempt(lambda: len(found) <= self._answered)  # a table in pieces has no length
            written = attempt(lambda: Path(args[0]).stat().st_mtime) if args and short is True else 0.0
            if not isinstance(written, Failure) and written > self._since:
                return found

            def numbers() -> dict[str, np.ndarray]:
                chosen = [name for name in found.columns if found[name].dtype.kind in "iuf"]
                return {str(name): found[name].to_numpy()[:MOST_ROWS] for name in chosen}

            noted = attempt(numbers)
            self._tables.update({} if isinstance(noted, Failure) else noted)
            return found

        return table

    def _around(self, load: Any) -> Any:
        def loaded(*args: Any, **kwargs: Any) -> Any:
            found = load(*args, **kwargs)
            self._partitions.append(found)
            return found

        return loaded

    def of(self, seen: Watched, fits: Sequence[Fitted] = ()) -> Loaded:
        columns: dict[str, np.ndarray] = dict(self._tables)
        for partition in self._partitions[-1:]:
            found = attempt(lambda: _columns(partition))  # noqa: B023
            columns.update({} if isinstance(found, Failure) else found)
        rows, labels = _rows(seen)
        for partition in self._partitions[-1:] if labels is None else ():
            told = attempt(lambda: _classes(partition))  # noqa: B023
            labels = None if isinstance(told, Failure) else told
        # without a loader, count the examples that entered modules
        examples = seen.loaded or sum(len(next(iter(each), torch.empty(0))) for each in seen.inputs)
        for fit in fits[-1:] if labels is None else ():
            names, numbers = np.unique(fit.labels, return_inverse=True)
            plain = names.dtype.kind != "f" or bool((names == names.round()).all())
            labels = numbers if plain and len(names) <= MOST_CLASSES else None
            rows, examples = [*rows, fit.rows[:MOST_ROWS]], examples or len(fit.rows)
        return Loaded(rows=rows, columns=columns, labels=labels, examples=examples)


def _columns(partition: Any) -> dict[str, np.ndarray]:
    """Select the numeric columns, of at most ``MOST_ROWS`` rows."""
    kept = [
        name
        for name, kind in partition.features.items()
        if any(part in str(getattr(kind, "dtype", "")) for part in ("int", "float"))
        and str(getattr(kind, "dtype", "")).replace("float", "").replace("int", "").replace("u", "").isdigit()
    ]
    if not kept:
        return {}
    plain = partition.with_format("numpy", columns=kept)[:MOST_ROWS]
    return {name: np.asarray(plain[name]) for name in kept}


def _rows(seen: Watched) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Collect inputs (N, F) of the observed batches, and their labels."""
    batches = seen.batches or seen.inputs
    groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for batch in batches:
        for tensor in tensors_in(batch):
            if tensor.is_floating_point() and tensor.dim() >= 2:
                groups.setdefault(tuple(tensor.shape[1:]), []).append(tensor.flatten(1))
    rows = [torch.cat(parts).float().cpu().numpy() for parts in groups.values()]
    found = torch.cat(seen.labels).cpu().numpy() if seen.labels else None
    return rows, found if found is not None and len(found) == seen.loaded else None


def _classes(partition: Any) -> np.ndarray | None:
    names = [name for name, kind in partition.features.items() if hasattr(kind, "num_classes")]
    if not names and (likely := [name for name in ("label", "target", "species") if name in partition.features]):
        names = likely
    return np.asarray(partition.with_format("numpy", columns=names)[:][names[0]]) if len(names) == 1 else None
