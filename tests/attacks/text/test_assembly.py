"""Texts that are put together out of the tokens at each position."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fl_privacy.attacks.text.encoder_assembly import Assembly, assemble
from fl_privacy.attacks.text.token_candidates import Candidates, Lengths

TRUTH = torch.tensor([1, 1, 1, 0])


def of_length(length: int) -> Lengths:
    """One text, told."""
    return Lengths(number=1, longest=length, known=(length,))


def never(texts: object) -> bool:
    return False


class TwoAtOnce(Assembly):
    """Whose residual grows with every single step from [0, 0, 1, 0] to the truth, and is zero behind both."""

    def residuals(self, texts: Tensor) -> Tensor:
        wrong = (texts != TRUTH).sum(1)
        return torch.where((texts[:, 0] == texts[:, 1]) & (wrong == 2), 0.1, wrong.float())


def test_two_tokens_at_once_lead_out_of_where_single_ones_do_not() -> None:
    tokens = [torch.tensor([0, 1]) for _ in TRUTH]
    candidates = Candidates(tokens, [torch.zeros(2) for _ in TRUTH], clear=True)
    assembly = TwoAtOnce(model=None, span=None, classified=0, candidates=candidates)  # type: ignore[arg-type]
    start = torch.tensor([[0, 0, 1, 0]])
    assert assembly.descend(start, fixed=3)[0].tokens.tolist() == start[0].tolist()
    assert assembly.exchanged(start)[0].tolist() == TRUTH.tolist()


class OftenStuck(Assembly):
    """Descents end in all ones, mostly, or in two of them, which are two tokens away from the truth: none."""

    def residuals(self, texts: Tensor) -> Tensor:
        ones = texts[:, 1:].float()
        near, far = (ones - TWO).abs().sum(1), (1 - ones).sum(1)
        found = 1 + torch.minimum(near, far)
        found[near == 0], found[far == 0], found[ones.sum(1) == 0] = 0.8, 0.7, 0.0
        return found


TWO = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("seed", [0, 1])
def test_texts_that_many_descents_end_in_leave_room_for_others(seed: int) -> None:
    tokens = [torch.tensor([0, 1]) for _ in range(10)]
    candidates = Candidates(tokens, [torch.zeros(2) for _ in tokens], clear=True)
    assembly = OftenStuck(model=None, span=None, classified=0, candidates=candidates)  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(seed)
    (found,) = assemble(assembly, lengths=of_length(10), tolerance=0.05, rng=rng, rounds=2, enough=never)
    assert found.tokens[1:].sum() == 0


class Twins(Assembly):
    """Whose third token can't be told from the second, which all texts are of."""

    def residuals(self, texts: Tensor) -> Tensor:
        return (texts == 0).sum(1).float()


def test_a_text_is_not_clear_that_a_candidate_the_search_has_dropped_fits_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = [torch.tensor([0, 1, 2]) for _ in range(4)]
    candidates = Candidates(tokens, [torch.zeros(3) for _ in tokens], clear=True)
    for kept in ([0, 1, 2], [0, 1]):
        fewer = replace(candidates, tokens=[torch.tensor(kept) for _ in tokens])
        monkeypatch.setattr(
            "fl_privacy.attacks.text.encoder_assembly.narrowed",
            lambda assembly, lengths, rng, fewer=fewer: replace(assembly, candidates=fewer),
        )
        assembly = Twins(model=None, span=None, classified=0, candidates=candidates)  # type: ignore[arg-type]
        rng = torch.Generator().manual_seed(0)
        (found,) = assemble(assembly, lengths=of_length(4), tolerance=0.05, rng=rng, rounds=2, enough=never)
        assert found.residual == 0 and not found.clear
    alone = replace(assembly, candidates=replace(candidates, tokens=[torch.tensor([0, 1]) for _ in tokens]))
    (found,) = assemble(alone, lengths=of_length(4), tolerance=0.05, rng=rng, rounds=2, enough=never)
    assert found.clear


@pytest.mark.parametrize(("left_out", "held"), [(0.06, True), (0.04, False)])
def test_texts_hold_where_what_is_in_none_is_ten_times_farther(left_out: float, held: bool) -> None:
    at, apart = [torch.tensor([3, 5]), torch.tensor([4])], [torch.tensor([1e-6, 0.03]), torch.tensor([5e-3])]
    candidates = Candidates(at, apart, clear=False, left_out=left_out)
    assert candidates.hold([torch.tensor([3, 4])]) is held
    assert not candidates.hold([torch.tensor([3, 4]), torch.tensor([5])])
    assert not candidates.hold([torch.tensor([6])]) and not candidates.hold([torch.tensor([3, 4, 4])])
