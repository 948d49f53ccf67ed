"""What a shell offers behind what was typed."""

import os
import subprocess
import sys

from fl_privacy.cli.completion import complete_override


def test_keys_and_options_go_on_from_what_was_typed() -> None:
    assert "defense=" in complete_override("def")
    assert "federation.rounds=" in complete_override("federation.ro")
    assert complete_override("defense=pru") == ["defense=pruning"]
    assert complete_override("defense=none,dp_s") == ["defense=none,dp_sgd"]
    assert complete_override("federation.rounds=") == []
    assert "experiment=demo" in complete_override("experiment=")


def test_a_shell_is_answered() -> None:
    asked = {"_FL_PRIVACY_COMPLETE": "complete_bash", "COMP_WORDS": "fl-privacy run defense=pru", "COMP_CWORD": "2"}
    program = "import sys; sys.argv = ['fl-privacy']; from fl_privacy.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["defense=pruning"], "")
