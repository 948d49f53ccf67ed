"""Counts are whole numbers; an error line says so, before anything is computed."""

from collections.abc import Callable

import pytest

from fl_privacy.attacks.optimizers.lbfgs import LBFGS
from fl_privacy.defenses import instahide, soteria_mixing
from fl_privacy.errors import UserError


@pytest.mark.parametrize(
    "made",
    [
        lambda: instahide(k=2.5),  # type: ignore[arg-type]
        lambda: soteria_mixing(slices=2.5),  # type: ignore[arg-type]
        lambda: soteria_mixing(directions=1.5),  # type: ignore[arg-type]
        lambda: LBFGS(inner=2.5),  # type: ignore[arg-type]
        lambda: LBFGS(history=2.5),  # type: ignore[arg-type]
    ],
)
def test_a_count_is_whole(made: Callable[[], object]) -> None:
    with pytest.raises(UserError, match="whole number"):
        made()
