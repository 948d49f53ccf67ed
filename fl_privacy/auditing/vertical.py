"""Labels in vertical learning, inferred from the vectors of single examples."""

import importlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from scipy.cluster.vq import kmeans, vq
from scipy.optimize import linear_sum_assignment
from scipy.stats.contingency import crosstab

from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.measure.answer import Answer, Scenario
from fl_privacy.measure.intervals import share_interval
from fl_privacy.measure.roc import Estimate

LOSSES = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "nll_loss", "mse_loss")
"""PyTorch's functional losses, which its modules call."""

LEAST_EXAMPLES, MOST_CLASSES, MOST_NODES, MOST_KEPT, MOST_VALUES, SHUFFLES = 20, 20, 8, 20, 1 << 20, 20
"""Smallest number of examples; most classes, nodes, arrays of a node, values of an array; shuffles of the control."""


class SplitTraining:
    """Record of split learning: examples' vectors exchanged with clients that have no loss, and the server's labels."""

    def __init__(self) -> None:
        self._labels: np.ndarray = np.empty(0)
        self._clients_have_labels = False
        self.sent = defaultdict[int, deque[np.ndarray]](lambda: deque(maxlen=MOST_KEPT))
        self.received = defaultdict[int, deque[np.ndarray]](lambda: deque(maxlen=MOST_KEPT))

    @contextmanager
    def looking(self, *, client: bool = False) -> Iterator[None]:
        """Record labels passed to the server's losses until the block ends; ``client``: note that one has labels."""
        functional = importlib.import_module("torch.nn.functional")
        with ExitStack() as stack:
            for name in LOSSES:
                stack.enter_context(replaced(functional, name, partial(self._on_loss, client)))
            yield

    def _on_loss(self, client: bool, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._clients_have_labels |= client
        given = dict(zip(("input", "target"), args, strict=False)) | kwargs
        labels = attempt(lambda: classes_in(given["target"]) if given["input"].requires_grad else np.empty(0))
        if not client and not isinstance(labels, Failure) and len(labels):
            if not np.array_equal(labels, self._labels):
                self.sent.clear()
                self.received.clear()
            self._labels = labels
        return loss(*args, **kwargs)

    def note(
        self, node: int, down: Mapping[str, np.ndarray], up: Mapping[str, np.ndarray], *, own_loss: bool = False
    ) -> None:
        """Keep those arrays sent to a node (``down``) or by it (``up``) that have a vector for each labeled example.

        ``own_loss``: ``True`` if the client differentiated a loss, and so has labels.
        """
        self._clients_have_labels |= own_loss
        for kept, arrays in ((self.received, down), (self.sent, up)):
            for array in arrays.values() if node in kept or len(kept) < MOST_NODES else ():
                fits = array.dtype.kind == "f" and array.ndim > 1 and len(array) == len(self._labels)
                if fits and 0 < array.size <= MOST_VALUES and np.isfinite(array).all():
                    kept[node].append(array.reshape(len(array), -1).astype(np.float32))

    def answers(self) -> Iterator[Answer]:
        """Yield an answer on how well a client infers labels from the vectors that the server returns."""
        if self._clients_have_labels or not (self.received and self.sent):
            return
        labels, number, classes = self._labels, len(self._labels), int(self._labels.max()) + 1
        tried = [_right(vectors, labels) for vectors in self.received.values()]
        right, control = (max(each) for each in zip(*tried, strict=True))
        note = (
            f"Clients can infer {right} of {number} labels from what the server sends for each example, such as"
            f" gradients: its directions form {classes} groups, one for each class but for its name. The control is"
            f" the best of {SHUFFLES} shuffles of the labels."
        )
        grouped, shuffled = _right([vectors for kept in self.sent.values() for vectors in kept], labels)
        note += f" What clients send, such as embeddings, groups {grouped} of {number} (shuffled: {shuffled})."
        usual = float(np.bincount(labels).max()) / number
        (low, high), (least, most) = share_interval(right, number), share_interval(control, number)
        messages = max(map(len, self.received.values()))
        yield Answer(
            question="labels",
            observer="another_site",
            scenario=Scenario(uploads=f"{messages} messages to one client, {number} examples, {classes} classes"),
            estimate=Estimate(value=right / number, low=low, high=high, chance=usual),
            control=Estimate(value=control / number, low=least, high=most, chance=usual),
            notes=(note,),
        )


def classes_in(target: Any) -> np.ndarray:
    """Return the classes (N,) of a loss's target (N,) or (N, 1); empty if the target does not look like classes."""
    values, classes = np.unique(target.detach().cpu().numpy().reshape(len(target)), return_inverse=True)
    usual = len(classes) >= LEAST_EXAMPLES and 1 < len(values) <= MOST_CLASSES and (values == values.round()).all()
    return classes if usual else classes[:0]


def _right(messages: Iterable[np.ndarray], labels: np.ndarray) -> tuple[int, int]:
    vectors, rng = np.concatenate([_directions(each) for each in messages], 1), np.random.default_rng(0)
    groups = clusters_of(vectors, int(labels.max()) + 1)
    return labels_right(groups, labels), max(labels_right(groups, rng.permutation(labels)) for _ in range(SHUFFLES))


def _directions(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)


def clusters_of(vectors: np.ndarray, number: int) -> np.ndarray:
    """Group vectors (N, D) into ``number`` clusters by their direction (Li et al. 2022, arXiv 2102.08504)."""
    rows = _directions(vectors)
    return vq(rows, kmeans(rows, number, seed=0)[0])[0]


def labels_right(groups: np.ndarray, labels: np.ndarray) -> int:
    """Count labels that are right if clusters (``groups``) are assigned to classes in the best way."""
    table = crosstab(groups, labels).count
    return int(table[linear_sum_assignment(table, maximize=True)].sum())
