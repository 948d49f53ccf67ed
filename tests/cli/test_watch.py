"""The growing page on loopback: for whoever has its address, for reading alone, up to date, and gone on Ctrl-C."""

import gc
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

from fl_privacy.cli.watching import LOOPBACK, WatchServer
from fl_privacy.errors import UserError
from fl_privacy.report.live import WatchedFolder
from fl_privacy.runs.folder import Run, RunFolder
from fl_privacy.runs.folder.ongoing import (
    PICTURES,
    PROGRESS,
    TEXTS,
    Teller,
    read_ongoing,
    read_planned,
    write_planned,
)
from fl_privacy.types.film import Frame, TextFrame
from tests.results.runs import config, record, round_report, score


@contextmanager
def serving(folder):
    with WatchServer(WatchedFolder(folder)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(5)


def ask(server, path, *, method="GET", host=None, body=None, within=True):
    connection = http.client.HTTPConnection(LOOPBACK, server.server_port, timeout=20)
    headers = {"Host": host or f"{LOOPBACK}:{server.server_port}"}
    connection.request(method, f"/{server.secret}/{path}" if within else path, body=body, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    record(folder, label="done")
    record(folder, label="going", finish=False)
    (folder / "secret.txt").write_text("not a page")
    return folder


@pytest.fixture(scope="module")
def server(out):
    with serving(out) as one:
        yield one


def test_it_is_on_loopback_alone_under_a_secret(server):
    assert server.server_address[0] == "127.0.0.1" and len(server.secret) >= 20
    assert WatchServer(server.watched).secret != server.secret
    for path in ("/", "/status", "/x/", f"/{server.secret[:-1]}/", f"/{server.secret}x/", "/%ff/", "//"):
        assert ask(server, path, within=False)[0] in {404, 400}, path
    status, text, headers = ask(server, "")
    assert status == 200 and "1 of 2 started runs" in text
    assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer" and "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "secret.txt", "../secret.txt", "..%2fsecret.txt", "%2e%2e/", "....//", "done/../../etc/passwd", "/etc/passwd",
        "done-x/report.html", "%00", "status/../secret.txt", "C:%5c", ".locks/", "done/metrics.jsonl",
    ],
)  # fmt: skip
def test_no_address_becomes_a_path(server, path):
    status, text, _ = ask(server, path)
    assert status == 404 and "not a page" not in text and "root:" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_nothing_is_written(server, out, method):
    before = sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*"))
    status, _, headers = ask(server, "", method=method, body=b"x=1")
    assert status == 405 and headers["Allow"] == "GET, HEAD"
    ask(server, "")
    ask(server, "comparison.html")
    assert sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*")) == before


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example", "[::1]"])
def test_another_name_of_this_machine_is_refused(server, host):
    assert ask(server, "", host=host)[0] == 403
    assert ask(server, "", host=f"localhost:{server.server_port}")[0] == 200


def test_every_run_has_its_page_and_the_finished_are_compared(server, out):
    text = ask(server, "")[1]
    for link in re.findall(r'href="\./([^"]*)"', text):
        status, page, _ = ask(server, link)
        assert status == 200 and "<h1" in page, link
    assert text.count("/report.html") == 2
    going = next(path.name for path in out.glob("going-*"))
    page = ask(server, f"{going}/report.html")[1]
    assert "interrupted" not in page and 'http-equiv="refresh"' in page and 'src="./status"' in page
    assert "frame-src &#39;self&#39;" in page and "<script" not in page
    done = next(path.name for path in out.glob("done-*"))
    assert 'http-equiv="refresh"' not in ask(server, f"{done}/report.html")[1]
    assert ask(server, "", method="HEAD")[1] == ""


def test_the_page_grows_with_the_run(tmp_path):
    settings = config(federation={"rounds": 4, "clients": 2})
    opened = RunFolder.open_or_create(tmp_path, label="x", config=settings, config_text="")
    with opened as folder, serving(opened.path) as server:
        assert "Training, round 1 of 4" in ask(server, "status")[1]
        folder.add_round(round_report(1, seconds=10.0))
        text = ask(server, "status")[1]
        assert "Training, round 2 of 4, 25.0 %, about 30 s left" in text and 'http-equiv="refresh"' in text
        tell = folder.teller.telling("Attacking 3 updates", lambda done, total: None)
        tell(1, 2)
        assert "Attacking 3 updates, 50.0 %" in ask(server, "status")[1]
        assert "No image was attacked" in ask(server, "")[1]
        folder.add_victim(score(1, 0, noise=0.05))
        folder.add_attack(round=1, victims=1, seconds=1.0)
        server.watched._kept.clear()
        assert '<h1 class="tone-leak">' in ask(server, "")[1]
        folder.finish()
        assert "Finished" in ask(server, "status")[1] and not (folder.path / PROGRESS).exists()


def test_a_record_that_is_being_written_is_no_damage_and_a_damaged_one_is_told(tmp_path):
    run = record(tmp_path, label="x", finish=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "ima')
    with serving(run) as server:
        assert "damaged" not in ask(server, "")[1]
        (run / "run.json").write_text("{")
        status, text, headers = ask(server, "status")
        assert status == 503 and "run.json is expected to describe a run" in text and headers["Refresh"] == "5"


def test_what_an_attack_has_by_now_is_shown_and_gone_when_it_is_over(tmp_path):
    run = record(tmp_path, label="x", finish=False)
    teller = Teller(run)
    teller.picture([Frame(0, torch.full((3, 8, 8), k, dtype=torch.uint8)) for k in range(5)], pieces=lambda _: [])
    assert (run / PICTURES).stat().st_mode & 0o077 == 0
    with serving(run) as server:
        assert ask(server, "status")[1].count('<img src="data:image/png') == 3
        (run / PICTURES).write_bytes(b"damaged")
        assert "<img" not in ask(server, "status")[1]
        teller.clear()
        assert not (run / PICTURES).exists() and ask(server, "status")[0] == 200


def test_records_of_the_runs_of_a_sweep_do_not_stay_in_memory(tmp_path):
    for label in ("a", "b", "c"):
        record(tmp_path, label=label, finish=label != "c")
    with serving(tmp_path) as server:
        for page in ("", "status", "comparison.html", f"{next(tmp_path.glob('a-*')).name}/report.html"):
            assert ask(server, page)[0] == 200
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is Run]


def test_a_plan_says_how_much_is_left(tmp_path):
    done = record(tmp_path, label="done")
    write_planned(tmp_path, [done.name, "later"])
    with serving(tmp_path) as server:
        text = ask(server, "status")[1]
        assert "1 of 2 planned runs finished" in text and 'http-equiv="refresh"' in text
        (tmp_path / "plan.json").unlink()
        write_planned(tmp_path, [done.name])
        assert 'http-equiv="refresh"' not in ask(server, "status")[1]


def test_it_goes_on_until_all_that_was_planned_and_has_begun_is_finished(tmp_path):
    done = record(tmp_path, label="done")
    with serving(tmp_path) as server:
        for plan, shown, over in (
            (["later", "last"], "0 of 2 planned runs finished", False),
            ([], "All 1 runs are finished", False),
            ([done.name], "1 of 1 planned runs finished", True),
        ):
            (tmp_path / "plan.json").unlink(missing_ok=True)
            write_planned(tmp_path, plan)
            for page in ("", "status"):
                assert ('http-equiv="refresh"' in ask(server, page)[1]) is not over, (plan, page)
            assert shown in ask(server, "status")[1]
        going = record(tmp_path, label="going", finish=False)
        assert 'http-equiv="refresh"' in ask(server, "")[1], "another command fills the folder as well"
        going.rename(going.with_name(f"{going.name}-interrupted-1"))
        assert 'http-equiv="refresh"' not in ask(server, "")[1] and going.name not in ask(server, "")[1]


def test_a_damaged_run_hides_no_other_and_a_lost_folder_is_a_line(tmp_path, capsys):
    out = tmp_path / "runs"
    record(out, label="done")
    damaged = record(out, label="bad")
    (damaged / "run.json").write_text("{")
    with serving(out) as server:
        page = ask(server, "")[1]
        assert "1 of 2 started runs" in page and "is damaged" in page and "Latest reconstructions" in page
        assert "is damaged" in ask(server, "status")[1] and ask(server, "comparison.html")[0] == 200
        assert ask(server, f"{damaged.name}/report.html")[0] == 503
        out.rename(tmp_path / "elsewhere")
        status, text, headers = ask(server, "")
        assert status == 503 and "\n" not in text and headers["Refresh"] == "5"
    assert capsys.readouterr().err == ""


def test_a_browser_that_goes_away_is_no_traceback(tmp_path, capsys):
    record(tmp_path, label="done")
    with serving(tmp_path) as server:
        with socket.create_connection((LOOPBACK, server.server_port)) as gone:
            gone.sendall(b"GET / HT")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert ask(server, "")[0] == 200
    assert capsys.readouterr().err == ""


def test_what_is_told_is_read_back_and_nothing_is_trusted(tmp_path):
    assert read_ongoing(tmp_path) is None and read_planned(tmp_path) == []
    shown = []
    tell = Teller(tmp_path).telling("x", lambda done, total: shown.append((done, total)))
    tell(1, 4)
    tell(2, 4)
    ongoing = read_ongoing(tmp_path)
    assert shown == [(1, 4), (2, 4)] and (ongoing.what, ongoing.share) == ("x", 0.25), "not more often than needed"
    for damaged in (
        "",
        "[]",
        "{}",
        '{"what": 1, "share": 0.5, "seconds": 1}',
        '{"what": "x", "share": "y"}',
        "[" * 9999,
    ):
        (tmp_path / PROGRESS).write_text(damaged)
        assert read_ongoing(tmp_path) is None
    (tmp_path / "plan.json").write_text(json.dumps({"jobs": [1]}))
    assert read_planned(tmp_path) == []


def test_texts_on_their_way_are_shown_token_by_token_and_gone_when_the_attack_is_over(tmp_path):
    run = record(tmp_path, label="x", finish=False)
    teller, vocabulary = Teller(run), ["", "warm", "##th", "<b>"]
    texts = [TextFrame(0, torch.tensor([1, 2, 3, -1])) for _ in range(5)]
    teller.picture(texts, pieces=lambda tokens: [vocabulary[k] for k in tokens.tolist() if k >= 0])
    assert (run / TEXTS).stat().st_mode & 0o077 == 0 and not (run / PICTURES).exists()
    with serving(run) as server:
        page = ask(server, "status")[1]
        assert page.count(">warm</span>") == page.count(">th</span>") == page.count(">&lt;b&gt;</span>") == 3
        for damaged in ("", "[]", '{"texts": [[1]]}', '{"texts": "x"}'):
            (run / TEXTS).write_text(damaged)
            status, page, _ = ask(server, "status")
            assert status == 200 and "current guesses" not in page
        teller.clear()
        assert not (run / TEXTS).exists()


def test_two_sweeps_in_a_folder_are_both_planned(tmp_path):
    write_planned(tmp_path, ["a-1", "a-2"])
    (tmp_path / "a-1").mkdir()
    (tmp_path / "a-1" / "summary.json").write_text("{}")
    write_planned(tmp_path, ["b-1", "b-2"])
    assert read_planned(tmp_path) == ["a-2", "b-1", "b-2"], "what was finished before is no part of it"
    stamp = (tmp_path / "plan.json").stat().st_mtime_ns
    write_planned(tmp_path, ["b-1", "b-2"])
    assert (tmp_path / "plan.json").stat().st_mtime_ns == stamp
    write_planned(tmp_path, ["a-1", "a-2"])
    assert sorted(read_planned(tmp_path)) == ["a-1", "a-2", "b-1", "b-2"], "a sweep that goes on plans all of it"


def test_a_folder_that_is_none_is_a_line(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        WatchedFolder(tmp_path / "none")


def test_ctrl_c_ends_the_command(tmp_path):
    command = [sys.executable, "-m", "fl_privacy", "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            address = lines[1].strip()
            assert address.startswith("http://127.0.0.1:")
            port, path = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/.*)", address).groups()
            connection = http.client.HTTPConnection(LOOPBACK, int(port), timeout=20)
            connection.request("GET", path)
            assert "Nothing is recorded yet" in connection.getresponse().read().decode()
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # in the background of a shell, and inherited
            os.kill(process.pid, signal.SIGTERM if ignored else signal.SIGINT)
            said, problem = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0 and "No longer watching" in said and not problem
