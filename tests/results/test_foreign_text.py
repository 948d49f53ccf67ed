"""Text of a file that somebody may have sent."""

import os
from pathlib import Path

import pytest

from fl_privacy.errors import UserError
from fl_privacy.files.foreign import read_text


def test_only_ordinary_text_of_bounded_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "fine").write_text("ä", encoding="utf-8")
    assert read_text(tmp_path / "fine") == "ä"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(20 << 30)
    for name, line in {
        "pipe": "a pipe or a device",
        "bytes": "to be UTF-8 text",
        "sparse": "at most 64 MiB, but has 20480",
        "gone": "No such file",
        ".": "a folder",
    }.items():
        with pytest.raises(UserError, match=line):
            read_text(tmp_path / name)
