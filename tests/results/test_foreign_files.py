"""What is in a folder that somebody sent: ordinary files of a size that can be read, or it is refused."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_privacy.errors import UserError
from fl_privacy.files.foreign import LARGEST_FILE, expect_file_name, expect_regular_files, expect_writable


def link(path: Path) -> None:
    path.symlink_to("/etc")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(LARGEST_FILE + 1)


@pytest.mark.parametrize(
    ("make", "word"), [(link, "link"), (os.mkfifo, "pipe"), (sparse, "MiB")], ids=["link", "pipe", "sparse file"]
)
@pytest.mark.parametrize("place", ["pictures", "within/one.json"])
def test_anything_else_is_refused(make: Callable[[Path], None], word: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "within").mkdir()
    (tmp_path / "run.json").write_text("{}")
    expect_regular_files(tmp_path)
    make(tmp_path / place)
    with pytest.raises(UserError, match=word):
        expect_regular_files(tmp_path)


def test_what_is_not_read_is_not_looked_into(tmp_path: Path) -> None:
    (tmp_path / "captures").mkdir()
    link(tmp_path / "captures" / "one")
    expect_regular_files(tmp_path, without=("captures",))


def test_places_to_write(tmp_path: Path) -> None:
    expect_writable(tmp_path / "new" / "file")
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(UserError, match="can't"):
        expect_writable(Path("/proc/none/file"))
    for none in (Path(), tmp_path):
        with pytest.raises(UserError, match="--out is expected to be a file"):
            expect_file_name(none)
