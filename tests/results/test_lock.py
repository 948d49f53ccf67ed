"""One process records a run, however many start it at the same time."""

import multiprocessing
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fl_privacy.errors import UserError
from fl_privacy.runs.folder import RunFolder, read_run
from fl_privacy.runs.folder.ongoing import LOCKS, hold, is_finished
from fl_privacy.runs.folder.summary import Summary, summarize

from .runs import config
from .starts import start_all

PROCESSES, ROUNDS = 10, 50


@pytest.mark.skipif(sys.platform == "win32", reason="needs a server that forks")
@pytest.mark.parametrize("left_behind", ["nothing", "an interrupted run"])
def test_of_five_hundred_simultaneous_starts_one_of_each_run_goes_on(tmp_path: Path, left_behind: str) -> None:
    configs = [config(seed=number) for number in range(ROUNDS)]
    if left_behind != "nothing":
        for each in configs:
            RunFolder.open_or_create(tmp_path, label="a", config=each, config_text="").close()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fl_privacy.runs.folder"])
    together, answers = context.Barrier(PROCESSES), context.SimpleQueue()
    processes = [
        context.Process(target=start_all, args=(tmp_path, configs, together, answers)) for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    found = Counter(answers.get() for _ in range(PROCESSES * ROUNDS))
    for process in processes:
        process.join(timeout=60)
    assert found == {(n, what): k for n in range(ROUNDS) for what, k in (("runs", 1), ("refused", PROCESSES - 1))}
    recorded = [path for path in tmp_path.glob("a-*") if is_finished(path)]
    assert len(recorded) == ROUNDS
    assert all(len(read_run(path).of_kind("attack")) == 1 for path in recorded)
    assert len(list(tmp_path.glob("a-*-interrupted-*"))) == (0 if left_behind == "nothing" else ROUNDS)


def test_a_second_thread_is_refused_as_well(tmp_path: Path) -> None:
    found: list[object] = []

    def start() -> None:
        try:
            found.append(RunFolder.open_or_create(tmp_path, label="a", config=config(), config_text=""))
        except UserError as error:
            found.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(entry, RunFolder) for entry in found) == 1
    assert sum("another process" in str(entry) for entry in found) == 7


def test_a_run_is_held_until_its_summary_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def watched(records: list[dict[str, Any]], **settings: Any) -> Summary:
        with pytest.raises(UserError, match="another process"):
            hold(folder.path)
        seen.append(True)
        return summarize(records, **settings)

    folder = RunFolder.open_or_create(tmp_path, label="a", config=config(), config_text="")
    monkeypatch.setattr("fl_privacy.runs.folder.writer.summarize", watched)
    folder.finish()
    assert seen
    hold(folder.path).release()


def test_deleting_the_folder_of_a_run_that_goes_on_frees_nothing(tmp_path: Path) -> None:
    with RunFolder.open_or_create(tmp_path, label="a", config=config(), config_text="") as folder:
        for file in folder.path.iterdir():
            file.unlink()
        folder.path.rmdir()
        with pytest.raises(UserError, match="another process"):
            RunFolder.open_or_create(tmp_path, label="a", config=config(), config_text="", overwrite=True)
    assert (tmp_path / LOCKS).is_dir()
