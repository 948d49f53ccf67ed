"""What uploads of a whole training reveal about a client's classes, words and members, compared with a control."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fl_privacy.measure.answer import Answer, Scenario
from fl_privacy.measure.intervals import words_f1
from fl_privacy.measure.roc import Z95, Estimate, Separation, auc

LEAST_FREE = 5  # least number of independent values for a correlation
LEAST_CLIENTS = 3  # least number of clients for a correlation: two are always opposites
MOST_OUTPUTS = 4  # largest ratio of an array's length to the number of classes to take it for the output bias


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassTrace:
    """Change (K,) of the output bias in one upload, and the client's number of examples of each class (K,)."""

    change: np.ndarray
    counts: np.ndarray


def class_trace(
    sent: Mapping[str, np.ndarray], uploaded: Mapping[str, np.ndarray], labels: np.ndarray | None
) -> ClassTrace | None:
    """Return each class's change of the output bias and its number of examples; ``None`` if either is unknown.

    ``sent``, ``uploaded``: arrays by ``record/name`` (names of a Flower record and of its array). ``labels``: class
    indices (N,), if known.
    """
    if labels is None or not len(labels) or labels.dtype.kind not in "iu" or int(labels.min()) < 0:
        return None
    least = int(labels.max()) + 1
    ends = {key.partition("/")[2]: array for key, array in sent.items()}
    fitting = []
    for key in reversed(list(uploaded)):
        array, before = uploaded[key], ends.get(key.partition("/")[2])
        if array.ndim != 1 or array.dtype.kind != "f" or before is None or before.shape != array.shape:
            continue
        if max(least, 2) <= len(array) <= MOST_OUTPUTS * least and "running_" not in key:
            fitting.append(array.astype(np.float64) - before)
    change = min(fitting, key=len, default=None)  # the last of equally short ones
    if change is None or not np.isfinite(change).all() or not np.abs(change).max() > 0:
        return None
    return ClassTrace(change=change, counts=np.bincount(labels, minlength=len(change)).astype(np.float64))


def leaked_classes(traces: Sequence[ClassTrace]) -> Answer:
    """Measure how well changes of the output bias reveal which classes are more or less frequent at a client.

    The gradient of a cross entropy by that bias is the expected minus the actual share of each class (Wainakh et al.
    2022, "User-level label leakage from gradients").
    """
    if len({len(trace.change) for trace in traces}) != 1 or len(traces) < LEAST_CLIENTS:
        said = f"it needs {LEAST_CLIENTS} clients with known classes that upload their output layer's bias"
        return Answer(question="classes", reason=said)
    counts = np.stack([trace.counts / trace.counts.sum() for trace in traces])
    there = counts.sum(0) > 0
    changes = np.stack([trace.change / max(np.linalg.norm(trace.change), 1e-30) for trace in traces])[:, there]
    free = (len(traces) - 1) * (int(there.sum()) - 1)
    if free < LEAST_FREE:
        said = f"{len(traces)} clients with {int(there.sum())} classes are too few; raise --nodes"
        return Answer(question="classes", reason=said)
    truth = _apart(counts[:, there])
    if not np.abs(truth).max() > 1e-9:
        said = "all clients have the same share of each class: nothing can be inferred"
        return Answer(question="classes", reason=said)
    changes = _apart(changes)
    return Answer(
        question="classes",
        scenario=Scenario(uploads=f"{len(traces)} uploads of the whole training, {int(there.sum())} classes"),
        estimate=_correlation(changes, truth, free),
        control=_correlation(np.roll(changes, 1, 0), truth, free),
        notes=(
            "Only the last layer's bias is used, as its difference from the mean of all clients. The control uses"
            f" another client's upload. Since clients are compared with their mean, it is {-1 / (len(traces) - 1):.2f}"
            " on average.",
        ),
    )


def leaked_words(read: Sequence[tuple[set[int], set[int]]]) -> Answer:
    """Measure how well uploads reveal a client's words; ``read``: each client's true and inferred words."""
    if len(read) < LEAST_CLIENTS:
        said = f"it needs {LEAST_CLIENTS} clients that upload an embedding of words"
        return Answer(question="words", reason=said)
    common = set.intersection(*[truth for truth, _ in read])
    own = [(truth - common, guess - common) for truth, guess in read]
    turned = [(truth, own[(k + 1) % len(own)][1]) for k, (truth, _) in enumerate(own)]
    words = sum(len(truth) for truth, _ in own)
    return Answer(
        question="words",
        scenario=Scenario(uploads=f"{len(read)} uploads of the whole training, {words} words in all"),
        estimate=_mean([words_f1(*pair) for pair in own]),
        control=_mean([words_f1(*pair) for pair in turned]),
        notes=("Words that all clients have are left out.",),
    )


def leaked_members(inside: np.ndarray, outside: np.ndarray, before: tuple[np.ndarray, np.ndarray], made: str) -> Answer:
    """Measure membership inference from the decrease of each example's loss in training (Yeom et al. 2018).

    ``inside`` (P,), ``outside`` (N,): decreases for the client's training examples and for others, of the same classes
    if known. ``before``: their negative losses before training; the control is membership inference from these.
    ``made``: phrase that names the attacked uploads in the answer.
    """
    found = auc(Separation(positives=inside, negatives=outside))
    control = auc(Separation(positives=before[0], negatives=before[1]))
    note = "Score of an example: its loss under the model sent minus that under the client's; control: minus the first."
    return Answer(question="members", scenario=Scenario(uploads=made), estimate=found, control=control, notes=(note,))


def _apart(values: np.ndarray) -> np.ndarray:
    left = values - values.mean(0, keepdims=True)
    return np.asarray(left - left.mean(1, keepdims=True))


def _correlation(guess: np.ndarray, truth: np.ndarray, free: int) -> Estimate:
    size = float(np.linalg.norm(guess) * np.linalg.norm(truth))
    value = float((guess * truth).sum()) / size if size > 0 else 0.0
    wide = Z95 / math.sqrt(max(free - 2, 1))
    middle = math.atanh(max(-0.999999, min(0.999999, value)))
    return Estimate(value=value, low=math.tanh(middle - wide), high=math.tanh(middle + wide), chance=0.0)


def _mean(values: Sequence[float]) -> Estimate:
    from scipy.stats import t  # noqa: PLC0415

    numbers = np.asarray(values, dtype=np.float64)
    half = float(t.ppf(0.975, len(numbers) - 1)) * float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    value = float(numbers.mean())
    return Estimate(value=value, low=max(0.0, value - half), high=min(1.0, value + half), chance=0.0)
