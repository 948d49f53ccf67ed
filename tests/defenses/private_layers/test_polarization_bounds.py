"""What SPN proves of its polarization loss (Fan et al. 2020, Lemma 5.5 and Propositions 5.1 to 5.3)."""

import torch

from fl_privacy.defenses._spn import polarization_loss

BITS = 16


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs (N, K), labels (N,), codes (C, K)."""
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(2, (5, BITS), generator=rng).double() * 2 - 1
    labels = torch.arange(40) % 5
    outputs = codes[labels] * 0.6 + torch.randn(40, BITS, generator=rng, dtype=torch.float64)
    return outputs, labels, codes


def hamming(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (BITS - one @ other.mT) / 2


def losses(outputs: torch.Tensor, labels: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """(N,) of each example."""
    return torch.stack([
        polarization_loss(v[None], codes, label[None], 1.0) for v, label in zip(outputs, labels, strict=True)
    ])  # fmt: skip


def test_the_loss_bounds_the_distance_to_the_code() -> None:
    for seed in range(20):
        outputs, labels, codes = drawn(seed)
        bits = torch.where(outputs > 0, 1.0, -1.0).double()
        distance = (BITS - (bits * codes[labels]).sum(1)) / 2
        assert bool((distance <= losses(outputs, labels, codes) + 1e-9).all())


def test_it_bounds_distances_within_and_between_classes() -> None:
    for seed in range(20):
        outputs, labels, codes = drawn(seed)
        bits = torch.where(outputs > 0, 1.0, -1.0).double()
        each = losses(outputs, labels, codes)
        mean = torch.stack([each[labels == c].mean() for c in range(len(codes))])
        apart = torch.stack([
            torch.stack([hamming(bits[labels == x], bits[labels == y]).mean() for y in range(len(codes))])
            for x in range(len(codes))
        ])  # fmt: skip
        target, other = hamming(codes, codes), ~torch.eye(len(codes), dtype=torch.bool)
        assert bool((apart.diagonal() <= 2 * mean + 1e-9).all())  # Proposition 5.1
        assert float((target - apart)[other].sum()) <= 2 * (len(codes) - 1) * float(mean.sum()) + 1e-9  # 5.2
        inside, between = float(apart.diagonal().sum()), float(apart[other].sum())
        assert inside - between <= 2 * len(codes) * float(mean.sum()) - float(target[other].sum()) + 1e-9  # 5.3
