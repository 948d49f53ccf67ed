"""Texts that are put together out of the tokens at each position."""

import torch
from torch import Tensor

from fl_privacy.attacks.text.assembly import Assembly
from fl_privacy.attacks.text.candidates import Candidates

TRUTH = torch.tensor([1, 1, 1, 0])


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
