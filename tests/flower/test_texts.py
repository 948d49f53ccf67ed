"""Texts through Flower, and through Ray's processes: the same federation to the last bit."""

from pathlib import Path

import pytest

from tests.experiment.runs import Run, run

pytest.importorskip("tokenizers")

SETTINGS = ("data.vocabulary_size=60", "data.max_length=8", "model=bert_tiny", "federation.clients=2", "victims=2")
SETTINGS += ("federation.rounds=1", "attack=dager", "bpki.bins=2", "baseline=false")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, words = (
        tmp_path_factory.mktemp("texts"),
        ["a", "fine", "dull", "warm", "film", "plot", "image", "acts", "joy", "ends"],
    )
    for label, shift in (("bad", 0), ("good", 5)):
        lines = [" ".join(words[(shift + k * step) % len(words)] for k in range(3, 8)) for step in range(1, 13)]
        (folder / f"{label}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def plain(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return federation(texts, "loop", tmp_path_factory.mktemp("loop"))


def federation(texts: Path, backend: str, out: Path) -> Run:
    found = run("run", "data=text_folder", f"data.root={texts}", *SETTINGS, f"backend={backend}", out=out)
    assert found.status == 0
    return found


def assert_same(found: Run, plain: Run) -> None:
    assert found.records("image") == plain.records("image") != []
    assert found.records("round") == plain.records("round") != []
    assert (found.path / "model.safetensors").read_bytes() == (plain.path / "model.safetensors").read_bytes()


def test_flower_trains_and_shows_the_same(plain: Run, texts: Path, tmp_path: Path) -> None:
    assert_same(federation(texts, "flower", tmp_path), plain)


@pytest.mark.fuzz
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_ray_trains_and_shows_the_same(plain: Run, texts: Path, tmp_path: Path) -> None:
    assert_same(federation(texts, "ray", tmp_path), plain)
