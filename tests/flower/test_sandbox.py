"""A whole audit in the sandbox: the page is the one without it, and what the app tried is told by its own replies."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.cli.audit import ALL_RIGHTS
from fl_privacy.cli.main import run_command_line
from tests.gate import probes
from tests.gate.test_apart import made_world

from .untouched_apps import PLAIN, write

TRIES = """
import json as _json
from tests.gate import probes as _probes
_places = _json.loads({places!r})
_found = {{name: str(one(_places) or "") for name, one in _probes.PROBES.items()}}
print("probes:", _json.dumps({{name: said for name, said in _found.items() if said}}), len(_found))
import os as _os
print("reports:", _os.environ["WANDB_MODE"])
import atexit as _atexit
_atexit.register(print, "Page: /etc/passwd")
"""
"""At the head of a client: what is tried in the process of the audit."""


def audit(app: Path, out: Path, *more: str) -> int:
    command = ["audit", str(app), "--nodes", "2", "--victims", "1", "--seconds", "0.001", "--out", str(out), *more]
    return run_command_line(command)


def page_of(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return page and record of the audit in ``folder``, without times and what says that there was a sandbox."""
    rows = r"<tr><th scope=\"row\">(Sandbox|Training took)</th><td>[^<]*</td></tr>"
    html = re.sub(rows, "", (folder / "report.html").read_text())
    record = json.loads((folder / "audit.json").read_text())
    del record["seconds"]
    for one in (*record["rungs"], *record["survivors"]):
        del one["seconds"]
    return re.sub(r"\b\d+(\.\d+)? m?s\b|\b[0-9a-f]{64}\b", "", html), record  # without times and the app's own hash


def test_an_app_in_the_sandbox_reaches_nothing_and_has_the_same_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as many threads on both sides, so that sums are the same
    assert audit(write(tmp_path / "plain", "app_out", PLAIN), tmp_path / "without") == 0
    assert ALL_RIGHTS in capfd.readouterr().err
    with made_world(tmp_path / "world") as world:
        places = json.dumps({key: value for key, value in world.items() if key != "listeners"})
        app = write(tmp_path / "trying", "app_out", TRIES.format(places=places) + PLAIN)
        out = Path(world["app"]) / "audit"  # where pages of other audits are
        ended = audit(app, out, "--sandbox", "--reads", world["app"])
        for listener in world["listeners"]:
            listener.settimeout(0)
            with pytest.raises(BlockingIOError):
                listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(10)
        assert Path(world["page"]).read_text() == "everything was read"
        assert (Path(world["app"]) / "own.txt").read_text() == "own"
    printed = capfd.readouterr()
    if "expected to find the means to isolate an app" in printed.err:
        pytest.skip(printed.err.strip())
    assert ended == 0, printed.err
    assert f"app: probes: {{}} {len(probes.PROBES)}" in printed.err, printed.err
    assert "app: reports: disabled" in printed.err
    assert printed.out.strip().splitlines()[-1].endswith(f"Page: {out}/audit-app_out/report.html")
    assert page_of(out / "audit-app_out") == page_of(tmp_path / "without" / "audit-app_out")
    assert "no network, terminal or files but" in (out / "audit-app_out" / "report.html").read_text()
    assert {path.name for path in (out / "audit-app_out").iterdir()} == {"report.html", "audit.json", "record.json"}
    assert not (tmp_path / "trying" / "app_out" / "__pycache__").exists()
