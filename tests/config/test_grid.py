from pathlib import Path

import pytest

from fl_privacy.errors import UserError
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.config.study import GRIDS, UNDEFENDED, load_grid, names_in
from tests.selection import few

SECTIONS = """
settings: [data=mnist_mini, federation.rounds=3]
train: [evaluate_every=3]
attack: [victims=2]
attacks: {one: [attack=idlg, attack.iterations=7]}
weights: initial
defenses: {P: [defense=pruning, "defense.rate=0.5,0.9"]}
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    return str(path)


def overridden(*overrides, tmp_path):
    grid = load_grid(written(tmp_path, SECTIONS), overrides)
    last = grid.points[-1]
    return compose_run(grid.training(last)), compose_run(grid.attacking(last, grid.cells[0]))


@pytest.mark.parametrize("name", few(names_in(GRIDS), 4))
def test_shipped_grids_compose(name):
    grid = load_grid(name)
    families = {point.family: point for point in grid.points}
    assert UNDEFENDED in families and len(families) > 2
    for point in families.values():
        training = compose_run(grid.training(point))
        assert training.choices["attack"] == "none"
        for cell in grid.cells:
            attacked = compose_run(grid.attacking(point, cell))
            assert attacked.defense == training.defense
            assert attacked.model == training.model or grid.weights() == "initial"


def test_each_strength_is_a_point(tmp_path):
    points = load_grid(written(tmp_path, SECTIONS)).points
    assert [(p.family, p.strength) for p in points] == [(UNDEFENDED, ""), ("P", "rate 0.5"), ("P", "rate 0.9")]
    assert compose_run(points[1].overrides).defense["rate"] == 0.5


def test_the_users_overrides_win(tmp_path):
    training, attack = overridden("federation.rounds=9", "attack.iterations=1", "victims=5", tmp_path=tmp_path)
    assert training.federation.rounds == attack.federation.rounds == 9
    assert attack.attack["iterations"] == 1 and attack.victims == 5
    assert training.choices["attack"] == "none"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SECTIONS + "attakcs: {}", "did you mean attack"),
        (SECTIONS.replace("weights: initial", "weights: last"), "initial or final"),
        (SECTIONS.replace("train: [evaluate_every=3]", ""), "train"),
        (SECTIONS.replace("[defense=pruning,", "[defense=pruning, 'seed=0,1',"), "One key"),
        (SECTIONS.replace("{P: ", "{Undefended: "), "names of their own"),
        ("[1, 2]", "list"),
        ("a: [", "YAML"),
    ],
)
def test_a_wrong_grid_is_one_line(tmp_path, text, expected):
    with pytest.raises(UserError, match=expected) as error:
        load_grid(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_an_unknown_grid_names_the_known_ones():
    with pytest.raises(UserError, match="papers, quick, refiner"):
        load_grid("paper")
