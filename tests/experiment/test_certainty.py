"""How sure the attacker is reaches records, summary and page."""

from pathlib import Path

from tests.experiment.runs import run


def test_proven_images_are_counted(tmp_path: Path) -> None:
    found = run("attack", "model=mlp", "attack=exact", "victims=2", "batch_size=3", out=tmp_path)
    assert [victim["certainty"] for victim in found.records("image")] == ["proven"] * 6
    assert found.json("summary.json")["certainties"] == {"proven": 6}
    page = (found.path / "report.html").read_text()
    assert "Proven exact</dt><dd>6 of 6" in page
    assert "label found, proven" in page


def test_of_a_descent_nothing_is_said_to_be_proven(tmp_path: Path) -> None:
    found = run("attack", "attack=idlg", "attack.iterations=2", "victims=2", out=tmp_path)
    assert found.json("summary.json")["certainties"] == {"approximate": 2}
    assert "Proven exact" not in (found.path / "report.html").read_text()


def test_the_member_that_read_an_image_is_named(tmp_path: Path) -> None:
    found = run("attack", "model=mlp", "attack=auto", "attack.evaluations=60", "victims=2", out=tmp_path)
    assert [image["member"] for image in found.records("image")] == ["exact"] * 2
    assert found.json("summary.json")["members"] == {"exact": 2}
    assert "Guesses come from these attacks: exact (2 of 2)." in (found.path / "report.html").read_text()
