"""What a command says at its end."""

import pytest

from fl_privacy.report.terminal import to_do
from fl_privacy.runs.folder.leakage import AttackFacts
from fl_privacy.runs.folder.verdict import LEAK, Ground, Verdict
from fl_privacy.types.modality import IMAGES, ROWS, TEXTS, Modality


@pytest.mark.parametrize(("modality", "grid"), [(IMAGES, "quick"), (TEXTS, "text"), (ROWS, "tables")])
@pytest.mark.parametrize("undefended", [False, True])
def test_examples_that_were_read_are_defended_by_a_grid_of_their_kind(
    modality: Modality, grid: str, undefended: bool
) -> None:
    verdict = Verdict(tone=LEAK, ground=Ground.READ, modality=modality, facts=AttackFacts(undefended=undefended))
    assert f"`fl-privacy trade-off {grid}`" in to_do(verdict)
