import subprocess
import sys
from importlib import import_module

import pytest

import fl_privacy

PACKAGES = ["", ".inference", ".malicious", ".measure", ".models", ".auditing.regression", ".runs.folder"]


@pytest.mark.parametrize("below", PACKAGES)
def test_each_name_is_found(below: str) -> None:
    package = import_module(f"fl_privacy{below}")
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)


def test_a_name_that_is_none_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'attck'"):
        fl_privacy.attck  # noqa: B018


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    """That a name of the core brings no Flower along is seen by ``test_core_imports``."""
    program = "import fl_privacy, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
