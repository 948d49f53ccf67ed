"""Tables of drawn rows; columns and values that they lack are drawn on access."""

from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd
from pandas.core.indexing import _LocIndexer

SHARE = 0.25  # share of the rows that are of a value that an app looks for, and that no drawn row has


def table_of(drawn: Mapping[str, Any], draw: Callable[[str, int], Any]) -> Any:
    """Return a pandas table with the columns ``drawn``; ``draw(name, number of rows)`` makes others on access."""
    return type("Table", (_Table,), {"draw": staticmethod(draw)})(drawn)


class _Column(pd.Series):  # noqa: PLW1641
    _metadata = [*pd.Series._metadata, "sought"]  # noqa: RUF012
    sought = ""

    @property
    def _constructor(self) -> Any:
        return _Column

    def __eq__(self, other: object) -> Any:
        return self._seeking(super().__eq__(other), other)

    def isin(self, values: Any) -> Any:
        return self._seeking(super().isin(values), sorted(map(str, values)))

    def _seeking(self, found: Any, value: object) -> Any:
        if isinstance(found, _Column):  # not of a comparison with a table
            found.sought = f"{self.name} {value}"
        return found


class _Places(_LocIndexer):
    def __getitem__(self, key: Any) -> Any:
        rows, *rest = key if isinstance(key, tuple) and len(key) == 2 else (key,)
        for named in rest:
            listed = [named] if isinstance(named, str) else named if isinstance(named, list | tuple) else ()
            self.obj[[each for each in listed if isinstance(each, str)]]
        return super().__getitem__((_sought(rows), *rest) if rest else _sought(rows))


class _Table(pd.DataFrame):
    draw: Callable[[str, int], Any]

    @property
    def _constructor(self) -> Any:
        return type(self)

    @property
    def _constructor_sliced(self) -> Any:
        return _Column

    def __getitem__(self, key: Any) -> Any:
        for each in key if isinstance(key, list) else [key]:
            if isinstance(each, str) and each not in self.columns:
                self[each] = self.draw(each, len(self))
        return super().__getitem__(_sought(key))

    def query(self, expr: str, *args: Any, **kwargs: Any) -> Any:
        found = super().query(expr, *args, **kwargs)
        return found if len(found) or "==" not in expr else self[_some(expr, len(self))]

    @property
    def loc(self) -> Any:
        return _Places("loc", self)

    def to_numpy(self, *args: Any, **kwargs: Any) -> Any:  # numbers, also of texts, for what takes numbers
        plain = pd.DataFrame(self)
        for place, kind in enumerate(plain.dtypes if len(set(map(str, plain.dtypes))) > 1 else ()):
            if getattr(kind, "kind", "O") not in "biuf":
                plain.isetitem(place, pd.factorize(plain.iloc[:, place])[0])
        return plain.to_numpy(*args, **kwargs)

    @property
    def values(self) -> Any:
        return self.to_numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.to_numpy(), dtype)

    def drop(self, labels: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().drop(labels, *args, **{"errors": "ignore", **kwargs})


def _sought(key: Any) -> Any:
    none = isinstance(key, _Column) and key.sought and key.dtype == bool and not key.any()
    return _some(key.sought, len(key)) if none else key


def _some(sought: str, number: int) -> np.ndarray:
    return np.random.default_rng(crc32(sought.encode())).random(number) < SHARE
