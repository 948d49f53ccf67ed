import json
import math
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fl_privacy.errors import UserError
from fl_privacy.files import make_private_folder, write_private, write_whole
from fl_privacy.measure import Statistic
from fl_privacy.runs.folder import Attacker, RunFolder, find_baseline, read_run
from fl_privacy.runs.folder.identity import repeat_hash, run_hash, training_hash

from .runs import config, defended, record, round_report, score


def open_folder(out, settings, **options):
    return RunFolder.open_or_create(out, label="a", config=settings, config_text="seed: 0", **options)


def test_a_finished_run_reads_back_as_it_was_recorded(tmp_path):
    path = record(tmp_path, failures=1, undefended_accuracy=0.8)
    run = read_run(path)
    assert run.finished and not run.problems
    assert run.identity.config == config()
    assert len(run.of_kind("round")) == 12 and len(run.of_kind("image")) == 12 and len(run.of_kind("attack")) == 2
    assert run.of_kind("round")[4]["excluded"] == {"3": "the reply holds NaN"}
    assert run.environment["seed"] == 0 and "torch" in run.environment["packages"]
    assert len(run.partition.counts) == 4
    summary = run.summary
    assert summary.plain.failures == 1 and summary.plain.metrics["psnr"].n == 5, "of the last round, not of both"
    assert summary.pmm == pytest.approx(100 * summary.final_accuracy / 0.8)
    assert summary.seconds.attack == 63 and summary.upload_bytes == 15_000_000
    low, high = summary.plain.metrics["psnr"].ci95
    assert low < summary.plain.metrics["psnr"].mean < high


def test_reconstructions_read_back_to_a_byte(tmp_path):
    pairs, problems = read_run(record(tmp_path, failures=1)).read_pairs()
    assert not problems and len(pairs) == 12
    expected = score(1, 3, noise=0.1 * (0.5 + 3 / 6 + 1 / 24))
    found = pairs["round-1/client-3/victim-3", 0]
    assert abs(found.guess / 255 - expected.guesses[0].numpy()).max() <= 0.5 / 255 + 1e-6
    assert pairs["round-1/client-0/victim-0", 0].guess is None


def test_the_adaptive_attacker_is_recorded_beside_the_plain_one(tmp_path):
    plain = read_run(record(tmp_path, label="plain", failures=1))
    both = read_run(record(tmp_path, label="both", failures=1, adaptive=0.01))
    assert plain.summary.adaptive is None
    own = {"attacked": (), "countermeasures": (), "seconds": None}
    assert replace(both.summary, **own) == replace(plain.summary, **own)
    of_plain = [[f for f in run.summary.attacked if f.attacker is Attacker.PLAIN] for run in (plain, both)]
    assert of_plain[0] == of_plain[1]
    assert all(found.attacker is Attacker.PLAIN for found in plain.summary.attacked)
    assert both.summary.seconds.attack == plain.summary.seconds.attack
    adaptive = both.summary.adaptive
    assert adaptive.images == adaptive.metrics["psnr"].n == 6 and adaptive.failures == 0
    assert adaptive.metrics["psnr"].mean > both.summary.plain.metrics["psnr"].mean + 10
    assert both.summary.seconds.adaptive == 10
    assert both.summary.countermeasures == ("It looks twice.", "In round 1 thrice.", "In round 12 thrice.")
    written = json.loads((both.path / "summary.json").read_text())
    assert written["adaptive"]["metrics"]["psnr"]["n"] == 6 and written["adaptive"]["seconds"] == 10
    assert written["attacked"][-1]["plain"]["metrics"] == written["metrics"]
    assert [v["attacker"] for v in both.of_kind("image")] == ["plain"] * 12
    assert [v["attacker"] for v in both.of_kind("image", "adaptive")] == ["adaptive"] * 12
    pairs, problems = both.read_pairs()
    pair = pairs["round-1/client-3/victim-3", 0]
    assert not problems and len(pairs) == 12
    errors = [abs(guess.astype(float) - pair.original).mean() for guess in (pair.guess, pair.adaptive)]
    assert errors[1] < 0.5 * errors[0]
    assert pairs["round-1/client-0/victim-0", 0].guess is None


def test_infinite_and_missing_values_stay_standard_json(tmp_path):
    with open_folder(tmp_path, config()) as folder:
        folder.add_victim(score(1, 0, noise=0.1, exact=True))
        folder.add_round(round_report(train_loss=math.nan))
        folder.finish()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for line in (folder.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    run = read_run(folder.path)
    assert run.of_kind("image")[0]["psnr"] == math.inf and run.of_kind("round")[0]["train_loss"] is None
    inf = math.inf
    assert run.summary.plain.metrics["psnr"] == Statistic(
        mean=inf, ci95=None, n=1, groups=1, median=inf, min=inf, max=inf
    )


RECORD_AND_WAIT = """
import sys, time
from pathlib import Path
from tests.results.runs import config
from fl_privacy.runs.folder import RunFolder
folder = RunFolder.open_or_create(Path(sys.argv[1]), label="a", config=config(seed=9), config_text="")
folder.add_attack(round=1, victims=1, seconds=1.0)
print("ready", flush=True)
time.sleep(120)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_run_keeps_every_record_and_lets_go_of_its_folder(tmp_path):
    command = [sys.executable, "-c", RECORD_AND_WAIT, str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(UserError, match="another process"):
                open_folder(tmp_path, config(seed=9))
        finally:
            process.send_signal(signal.SIGKILL)
    (path,) = tmp_path.glob("a-*")
    assert read_run(path).of_kind("attack")[0]["seconds"] == 1.0
    with open_folder(tmp_path, config(seed=9)) as again:
        assert again.path == path and not again.finished
    assert len(list(tmp_path.glob("a-*-interrupted-1"))) == 1


def test_the_summary_of_a_killed_run_is_that_of_its_records(tmp_path):
    path = record(tmp_path)
    whole = read_run(path)
    (path / "summary.json").unlink()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "round", "round": 13, "accu')
    (path / "reconstructions" / "round-0013.safetensors").write_bytes(b"\x10\x00\x00")
    killed = read_run(path)
    assert not killed.finished and not killed.summary.finished
    assert killed.summary.plain == whole.summary.plain
    assert any("cut off" in problem for problem in killed.problems)
    pairs, problems = killed.read_pairs()
    assert len(pairs) == 12 and len(problems) == 1 and "round-0013" in problems[0]


def test_damage_in_the_middle_is_an_error_of_one_line(tmp_path):
    path = record(tmp_path)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([lines[0], "nonsense", *lines[1:]]))
    with pytest.raises(UserError, match="line 2 is damaged"):
        read_run(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no run.json"), ("{", "is damaged"), ("[]", "is damaged"), ('{"format": 2}', "update fl-privacy")],
)
def test_other_folders_are_refused_in_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no such folder"):
        read_run(tmp_path / "nowhere")


def test_finished_runs_are_found_again_and_nothing_is_deleted(tmp_path):
    path = record(tmp_path)
    again = RunFolder.open_or_create(tmp_path, label="cifar10-lenet", config=config(), config_text="")
    assert again.finished and again.path == path
    with pytest.raises(RuntimeError, match="finished"):
        again.add_attack(round=1, victims=1, seconds=1.0)
    with RunFolder.open_or_create(
        tmp_path, label="cifar10-lenet", config=config(), config_text="", overwrite=True
    ) as new:
        assert new.path == path and not new.finished
    assert read_run(tmp_path / f"{path.name}-previous-1").finished


def test_a_run_is_known_by_what_decides_its_numbers():
    settings = config()
    assert run_hash(settings) == run_hash(dict(reversed(settings.items())))
    assert run_hash(settings) == run_hash(settings | {"out": "elsewhere", "device": "cuda"})
    assert run_hash(settings) == run_hash(settings | {"choices": settings["choices"] | {"backend": "ray"}})
    assert run_hash(settings) != run_hash(settings | {"seed": 1})
    assert repeat_hash(settings) == repeat_hash(settings | {"seed": 1})
    assert training_hash(settings) == training_hash(config(**defended(scale=0.1), victims=100))
    assert training_hash(settings) != training_hash(config(federation={"clients": 5}))


def test_the_undefended_baseline_is_found(tmp_path):
    settings = config(**defended(scale=0.1))
    assert find_baseline(tmp_path / "nowhere", settings) is None
    record(tmp_path, changes={"seed": 3}, undefended=True)
    record(tmp_path, changes=defended(scale=0.5))
    assert find_baseline(tmp_path, settings) is None
    path = record(tmp_path, undefended=True)
    (tmp_path / "cifar10-aaaa").mkdir()
    (tmp_path / "cifar10-aaaa" / "summary.json").write_text("{")
    found, _ = find_baseline(tmp_path, settings)
    assert found == path


@pytest.mark.skipif(sys.platform == "win32", reason="needs file modes")
def test_private_files_are_closed_to_others(tmp_path):
    folder = tmp_path / "captured" / "tensors"
    make_private_folder(folder, tmp_path / "captured")
    write_private(folder / "update", b"secret")
    write_whole(tmp_path / "open", "text")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "update").stat().st_mode) == 0o600
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o666 & ~umask
    assert sorted(p.name for p in tmp_path.iterdir()) == ["captured", "open"]


def test_times_that_clients_keep_are_unknown_and_not_zero(tmp_path):
    with open_folder(tmp_path, config()) as folder:
        folder.add_round(round_report(defense_seconds=math.nan))
        folder.finish()
    summary = read_run(folder.path).summary
    assert summary.seconds.defense is None
    assert "defense_seconds" not in summary.upload and "upload_bytes" in summary.upload
