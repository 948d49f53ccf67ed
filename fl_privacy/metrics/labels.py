"""Labels recovered, one value per image."""

from torch import Tensor


def hard_labels(labels: Tensor) -> Tensor:
    """(N,) class indices of labels that are indices (N,) or class probabilities (N, K)."""
    return labels.argmax(1) if labels.ndim == 2 else labels


def pair_labels(guesses: Tensor, truths: Tensor) -> Tensor:
    """``guesses`` (B,) in an order in which as many as can be equal ``truths`` (B,); those that do stay where they are.

    Labels are recovered for a batch, not for an image: its guess tells how often each class occurs, and whether it
    does must not depend on how its pixels were matched.
    """
    order = (guesses != truths).long().argsort(stable=True)
    guesses, truths = guesses[order], truths[order]
    same = _numbered(truths)[:, None] == _numbered(guesses)
    paired = truths.clone()
    paired[~same.any(1)] = guesses[~same.any(0)]
    return paired[order.argsort()]


def _numbered(labels: Tensor) -> Tensor:
    """Labels (B,) made distinct by how often they occurred before."""
    return labels * len(labels) + (labels[:, None] == labels).tril(-1).sum(1)


def label_correct(guesses: Tensor, truths: Tensor) -> Tensor:
    """1 where the class is right, else 0: (N,) float64 from labels (N,) or (N, K)."""
    return (hard_labels(guesses) == hard_labels(truths)).double()
