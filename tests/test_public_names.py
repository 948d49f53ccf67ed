import subprocess
import sys
from importlib import import_module

import pytest

import fl_privacy


def test_the_names_are_those_of_their_rooms() -> None:
    for home, names in fl_privacy._HOMES.items():
        room = import_module(home)
        for name in names:
            assert getattr(fl_privacy, name) is getattr(room, name)
            assert name in dir(fl_privacy)
    assert sorted(name for names in fl_privacy._HOMES.values() for name in names) == fl_privacy.__all__


def test_a_name_that_is_none_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'attck'"):
        fl_privacy.attck  # noqa: B018


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    """That a name of the core brings no Flower along is seen by ``test_core_imports``."""
    program = "import fl_privacy, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
