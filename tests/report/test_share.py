"""What shows images is its owner's alone; copies to pass on have none, unless asked for."""

import base64
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
import yaml

from fl_privacy.cli.main import run_command_line
from fl_privacy.errors import UserError
from fl_privacy.report import share_report, write_report
from fl_privacy.runs.folder import read_run
from tests.results.runs import defended, record

pytestmark = pytest.mark.usefixtures("undrawn_charts")

needs_modes = pytest.mark.skipif(sys.platform == "win32", reason="needs file modes")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    changes = {"data": {"name": "cifar10", "root": "/home/ada/photographs"}}
    paths = [record(out, changes=changes, adaptive=0.05), record(out, changes=defended(scale=0.1), noise=0.9)]
    for path in paths:
        write_report([path])
        (path / "model.safetensors").write_bytes(b"weights")
        (path / "captures").mkdir()
        (path / "captures" / "update").write_bytes(b"update")
    return paths


@needs_modes
def test_what_shows_images_is_its_owners_alone(runs):
    for run in runs:
        assert mode(run / "report.html") == 0o600
        for folder in ("reconstructions", "pictures"):
            assert mode(run / folder) == 0o700
            assert files(run / folder) and {mode(path) for path in files(run / folder)} == {0o600}


@needs_modes
def test_it_is_private_from_its_first_byte_on(tmp_path, monkeypatch):
    seen = []
    replace = Path.replace

    def watched(path, target):
        seen.append((Path(target).name, mode(path)))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    umask = os.umask(0)
    try:
        path = record(tmp_path)
        write_report([path])
    finally:
        os.umask(umask)
    assert {m for name, m in seen if name.startswith("r") and not name.startswith("run.json")} == {0o600}
    assert mode(path / "reconstructions") == mode(path / "pictures") == 0o700


@needs_modes
def test_a_page_that_others_could_read_is_closed_again(runs):
    (runs[0] / "report.html").chmod(0o644)
    write_report([runs[0]])
    assert mode(runs[0] / "report.html") == 0o600


def test_a_copy_has_figures_and_no_pictures(runs, tmp_path):
    page = share_report(runs[:1], tmp_path / "deep" / "copy")
    assert page == tmp_path / "deep" / "copy" / runs[0].name / "report.html"
    text = page.read_text()
    assert "without pictures" in text and "<img" not in text and "data:image" not in text
    assert "PSNR" in text and "recognizable" in text and str(runs[0].parent) not in text
    names = {path.relative_to(page.parent).as_posix() for path in files(page.parent)}
    assert names == {
        "run.json", "config.yaml", "environment.json", "threat_model.json", "defense.json", "partition.json",
        "metrics.jsonl", "summary.json", "share.json", "report.html",
    }  # fmt: skip
    assert not any(b"/home/ada" in path.read_bytes() for path in files(page.parent))
    assert read_run(page.parent).identity.config["data"]["root"] == "photographs"
    assert read_run(page.parent).summary == read_run(runs[0]).summary
    again = write_report([page.parent]).read_text()
    assert "without pictures" in again and "<img" not in again
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["copy"]


@pytest.mark.long
def test_with_consent_a_copy_has_pictures_for_its_owner(runs, tmp_path):
    page = share_report(runs[:1], tmp_path / "copy", with_originals=True)
    text = page.read_text()
    assert "It holds attacked images" in text and "data:image/png" in text
    assert (page.parent / "pictures" / "reconstructions.png").is_file()
    names = {path.name for path in files(page.parent)}
    assert "round-0001.safetensors" in names and not names & {"model.safetensors", "update"}
    if sys.platform != "win32":
        assert {mode(path) for path in files(tmp_path / "copy")} == {0o600}
        assert {mode(path) for path in (tmp_path / "copy").rglob("*") if path.is_dir()} == {0o700}


def test_a_copy_without_pictures_never_gets_them_back(runs, tmp_path):
    first = share_report(runs[:1], tmp_path / "first").parent
    (first / "reconstructions").mkdir()
    (first / "reconstructions" / "round-0001.safetensors").write_bytes(
        (runs[0] / "reconstructions" / "round-0001.safetensors").read_bytes()
    )
    second = share_report([first], tmp_path / "second", with_originals=True)
    assert "without pictures" in second.read_text() and "<img" not in second.read_text()
    assert not (second.parent / "reconstructions").exists()


@pytest.mark.long
def test_several_runs_are_copied_with_their_comparison(runs, tmp_path):
    page = share_report(runs, tmp_path / "copy")
    assert page == tmp_path / "copy" / "comparison.html"
    for run in runs:
        assert f'href="./{run.name}/report.html"' in page.read_text()
        assert (tmp_path / "copy" / run.name / "report.html").is_file()
        original = base64.b64encode((run / "pictures" / "reconstructions.png").read_bytes()[:60])
        assert not any(original in path.read_bytes() for path in files(tmp_path / "copy"))


def test_wrong_requests_are_one_line_and_leave_nothing(runs, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    with pytest.raises(UserError, match="expected to be a new folder"):
        share_report(runs, taken)
    with pytest.raises(UserError, match="no such folder"):
        share_report([tmp_path / "nowhere"], tmp_path / "copy")
    assert run_command_line(["report", str(runs[0]), "--with-originals"]) == 2
    assert run_command_line(["report", str(runs[0]), "--share", str(tmp_path / "a"), "--out", "b.html"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"] and (taken / "file").read_text() == "mine"


def test_the_command_line_shares(runs, tmp_path, capsys):
    assert run_command_line(["report", str(runs[0]), "--share", str(tmp_path / "copy")]) == 0
    sentence, page = capsys.readouterr().out.splitlines()
    assert "6 of 6 attacked images" in sentence
    assert Path(page).read_text().count("without pictures") == 1


@pytest.mark.parametrize("root", ["/home/Ada Byron/" + "long name of a folder " * 6 + "/2024", "/home/ada: b/it's/x"])
def test_paths_that_yaml_folds_or_quotes_are_left_out(tmp_path, root):
    run = record(tmp_path / "runs", changes={"data": {"name": "cifar10", "root": root}})
    (run / "config.yaml").write_text(yaml.safe_dump({"data": {"root": root}}))

    share_report([run], tmp_path / "copy")

    config = (tmp_path / "copy" / run.name / "config.yaml").read_text()
    assert yaml.safe_load(config)["data"] == {"name": "cifar10", "root": Path(root).name}
    assert "home" not in config


@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
@pytest.mark.parametrize("name", ["threat_model.json", "config.yaml"])
def test_a_link_out_of_a_foreign_folder_is_not_followed(tmp_path, name):
    run = record(tmp_path / "runs")
    content = (run / name).read_text() if (run / name).exists() else "[]"
    (run / name).unlink(missing_ok=True)
    (tmp_path / "other").write_text(content)
    (run / name).symlink_to(tmp_path / "other")

    with pytest.raises(UserError, match="is a link"):
        share_report([run], tmp_path / "copy")

    assert not (tmp_path / "copy").exists()


def test_copies_never_share_a_name(runs, tmp_path):
    for place in ("a/run-2", "b/run"):
        shutil.copytree(runs[0], tmp_path / place)
    share_report([tmp_path / "a/run-2", tmp_path / "b/run"], tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"run", "run-2", "comparison.html"}
