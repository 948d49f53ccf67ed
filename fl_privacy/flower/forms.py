"""Forms of a client's answers, without their values; if the client fails, noise of this form leaves instead."""

from collections.abc import Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

FORMS = "fl-privacy.forms"
"""Record of ``context.state`` with the form of answers by kind, if there are no files."""

_TOOK = "fl-privacy.took"
"""Record of a form with the seconds of work behind the answer."""


def form_of(answer: RecordDict, seconds: float) -> RecordDict:
    """Return the form of ``answer``: its records, with empty arrays."""
    form = RecordDict({**answer, _TOOK: ConfigRecord({"seconds": seconds})})
    for name, record in answer.array_records.items():
        form[name] = ArrayRecord({k: Array.from_numpy_ndarray(np.empty(0, a.dtype)) for k, a in record.items()})
    return form


def like_form(form: RecordDict, arrays: Sequence[np.ndarray]) -> RecordDict | None:
    """Put ``arrays`` into the form of an earlier answer; ``None`` if that had another number of them."""
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
    """Return the seconds of work behind the answer."""
    return float(form.config_records[_TOOK]["seconds"])  # type: ignore[arg-type]
