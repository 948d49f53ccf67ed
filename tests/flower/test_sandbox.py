"""An app under ``audit --sandbox`` that tries to get out: files of its user, another folder, the network."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fl_privacy.gate import kernel

from .untouched_apps import PLAIN, write

OUT = """
import json as _json, os as _os, socket as _socket
def _tried(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "done"
def _connect():
    with _socket.create_connection(("127.0.0.1", {port}), timeout=2):
        pass
open("tried.json", "w").write(_json.dumps({{
    "here": _tried(lambda: open("own.txt", "w").close()),
    "home": _tried(lambda: open("{home}/.profile", "a").close()),
    "new": _tried(lambda: open("{home}/new.txt", "w").close()),
    "removed": _tried(lambda: _os.remove("{home}/.profile")),
    "network": _tried(_connect),
}}))
"""

allowed = shutil.which("unshare") and not subprocess.run(["unshare", "-rn", "true"], check=False).returncode


@pytest.mark.skipif(not allowed, reason="this system does not allow `unshare -rn`")
@pytest.mark.skipif(sys.platform != "linux" or not kernel.landlock_abi(), reason="this kernel has no Landlock")
def test_app_in_the_sandbox_writes_its_folder_and_nothing_else(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".profile").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = OUT.format(home=home, port=server.getsockname()[1]) + PLAIN
        app = write(tmp_path / "app", "app_out", client)
        command = [sys.executable, "-m", "fl_privacy", "audit", app, "--nodes", 2, "--victims", 1, "--seconds", 1]
        ended = subprocess.run(
            [*map(str, command), "--sandbox", "--out", tmp_path / "audit"],
            env={**os.environ, "HOME": str(home), "HF_HOME": str(tmp_path / "hub")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    audited = tmp_path / "audit" / "audit-app_out"
    tried = json.loads((audited / "files" / "tried.json").read_text())
    assert tried.pop("network") != "done"
    assert tried == {
        "here": "done",
        "home": "PermissionError",
        "new": "PermissionError",
        "removed": "PermissionError",
    }
    assert [file.name for file in home.iterdir()] == [".profile"]
    assert (home / ".profile").read_text() == "mine"
    page = (audited / "report.html").read_text()
    assert "no network; writes only --out, temporary files, data caches (Landlock" in page
