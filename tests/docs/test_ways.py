"""The files that a reader opens, as docs/architecture.md lists them, exist and are no more than it says."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = {"an upload to its page": 40, "audit APP": 32, "attack=auto": 35}


def test_every_listed_file_is_there_and_their_number_is_as_stated() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    stated, block = re.findall(r"What a reader opens, in order \((.*?) files.*?```text\n(.*?)```", text, re.DOTALL)[0]
    ways = dict(re.findall(r"^(\S.*)\n((?:  .*\n)+)", block, re.MULTILINE))
    assert ways.keys() == MOST.keys()
    numbers = []
    for way, listed in ways.items():
        files = []
        for entry in listed.split():
            folder, names = re.fullmatch(r"([^{]*)(?:\{(.*)\})?", entry).groups()  # type: ignore[union-attr]
            files += [folder + name for name in names.split(",")] if names else [folder]
        assert [file for file in files if not (ROOT / "fl_privacy" / f"{file}.py").exists()] == []
        assert len(set(files)) == len(files) <= MOST[way]
        numbers.append(len(files))
    assert [int(number) for number in re.findall(r"\d+", stated)] == numbers
