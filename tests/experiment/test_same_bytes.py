"""Equal runs leave equal bytes, on however many cores."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.experiment.runs import Run, run

SETTINGS = (
    "model=lenet", "victims=3", "attack=inverting_gradients", "threat_model=adaptive",
    "defense=soteria",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attacked(out: Path, *, cores: int, threads: int = 1, iterations: int = 20) -> Run:
    torch.set_num_threads(cores)
    found = run("attack", *SETTINGS, f"attack.iterations={iterations}", f"attack_threads={threads}", out=out)
    assert torch.get_num_threads() == cores
    return found


def reconstructions(found: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((found.path / "reconstructions").iterdir())}


@pytest.mark.long
def test_reconstructions_are_equal_bytes_whatever_the_threads_around_them(tmp_path: Path) -> None:
    first, second = (attacked(tmp_path / str(cores), cores=cores) for cores in (1, 3))
    assert first.path.name == second.path.name
    assert reconstructions(first) == reconstructions(second) != {}
    assert first.records("image") == second.records("image")


@pytest.mark.long
def test_threads_are_told_apart_by_the_folder(tmp_path: Path) -> None:
    one, two = (attacked(tmp_path, cores=2, threads=threads, iterations=1) for threads in (1, 2))
    assert one.path.name != two.path.name
