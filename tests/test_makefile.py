"""What ``make`` runs is there."""

import re
import shlex

import pytest

from tests import selection
from tests.test_shape import ROOT


class Collected:
    """A plugin that notes what pytest would run."""

    names: tuple[str, ...] = ()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = tuple(item.nodeid for item in session.items)


@pytest.mark.long
@pytest.mark.parametrize("target", ["kill", "test-deploy", "test-gpu", "test-cluster"])
def test_a_target_finds_its_tests(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones are left out where nobody asks for them, and a target of long ones alone finds none."""
    (line,) = re.findall(
        rf"^{target}:.*\n\t.*\$\(BIN\)/pytest (tests/.*)$",
        (ROOT / "Makefile").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(selection, "LEFT_OUT", set())
    unneeded = [word for name in ("cacheprovider", "faulthandler", "xdist") for word in ("-p", f"no:{name}")]
    collected = Collected()
    assert pytest.main(["--collect-only", *unneeded, *shlex.split(line)], plugins=[collected]) == 0
    assert any("/test_" in name for name in collected.names)
