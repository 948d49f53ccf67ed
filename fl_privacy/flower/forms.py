"""What a client's answer looks like, without its values: what leaves in its place where the client fails."""

from collections.abc import Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fl_privacy.flower.inside.serialized import bytes_of, records_of

FORMS = "fl-privacy.forms"
"""Record of ``context.state``: by kind, what an answer looks like, where there are no files."""

_TOOK = "fl-privacy.took"
"""Record of a form: the seconds that the work behind the answer took."""


def form_of(answer: RecordDict, seconds: float) -> RecordDict:
    """Return what ``answer`` looks like: its records, with arrays of no values."""
    form = RecordDict({**answer, _TOOK: ConfigRecord({"seconds": seconds})})
    for name, record in answer.array_records.items():
        form[name] = ArrayRecord({k: Array.from_numpy_ndarray(np.empty(0, a.dtype)) for k, a in record.items()})
    return form


def like_form(form: RecordDict, arrays: Sequence[np.ndarray]) -> RecordDict | None:
    """Put ``arrays`` into what an earlier answer looked like; ``None`` where that had another number of them."""
    if sum(map(len, form.array_records.values())) != len(arrays):
        return None
    left = iter(arrays)
    answer = RecordDict({name: record for name, record in form.items() if name != _TOOK})
    for name, record in form.array_records.items():
        answer[name] = ArrayRecord(
            {k: Array.from_numpy_ndarray(np.asarray(next(left), dtype=a.dtype)) for k, a in record.items()}
        )
    return answer


def seconds_of(form: RecordDict) -> float:
    """Return how long the work behind the answer took."""
    return float(form.config_records[_TOOK]["seconds"])  # type: ignore[arg-type]


def form_in(records: RecordDict, kind: str) -> RecordDict | None:
    """Return the form that ``keep_form_in`` kept for a kind of question; ``None`` without one."""
    held = records.config_records[FORMS].get(kind) if FORMS in records.config_records else None
    return records_of(held) if isinstance(held, bytes) else None


def keep_form_in(records: RecordDict, kind: str, form: RecordDict) -> None:
    """Keep ``form`` among ``records``, those of a node's context."""
    kept = dict(records.config_records[FORMS]) if FORMS in records.config_records else {}
    records[FORMS] = ConfigRecord({**kept, kind: bytes_of(form)})
