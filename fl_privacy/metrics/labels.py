"""Labels recovered, one value per image."""

from torch import Tensor


def hard_labels(labels: Tensor) -> Tensor:
    """(N,) class indices of labels that are indices (N,) or class probabilities (N, K)."""
    return labels.argmax(1) if labels.ndim == 2 else labels


def label_correct(guesses: Tensor, truths: Tensor) -> Tensor:
    """1 where the class is right, else 0: (N,) float64 from labels (N,) or (N, K)."""
    return (hard_labels(guesses) == hard_labels(truths)).double()
