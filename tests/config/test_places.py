"""Somebody else's grid or track does not lead out of the working directory."""

from pathlib import Path

import pytest

from fl_privacy.errors import UserError
from fl_privacy.runs.config.study import GRIDS, load_grid, names_in
from fl_privacy.runs.config.untrusted import expect_below_here

OUTSIDE = (
    "out=/any/path",
    "weights=/etc/passwd",
    "data.root='~/pictures'",
    "defense.public=../others",
    "+own=[a,/b]",
    "+own={a:/b}",
    "out='C:\\\\folder'",
    "out=a/../../b",
)


@pytest.mark.parametrize("override", OUTSIDE)
def test_a_place_elsewhere_is_refused(override: str) -> None:
    with pytest.raises(UserError, match="only paths below the working directory"):
        expect_below_here(["model=lenet", override], where="The grid x")


def test_places_below_and_other_values_are_taken() -> None:
    expect_below_here(["out=runs/mine", "seed=1", "data.path=some/set", "defense.rate=0.1,0.5"], where="The grid x")


def test_a_grid_from_elsewhere_is_held_to_it_and_the_command_line_is_not(tmp_path: Path) -> None:
    assert "tiny" in names_in(GRIDS)
    text = "settings: [out=/any]\ntrain: []\nattack: []\nattacks: {}\nweights: initial\ndefenses: {}\n"
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UserError, match="set it on the command line"):
        load_grid(str(tmp_path / "own.yaml"))
    (tmp_path / "own.yaml").write_text(text.replace("out=/any", "seed=1"))
    assert "out=/any" in load_grid(str(tmp_path / "own.yaml"), ["out=/any"]).trainings[""]
