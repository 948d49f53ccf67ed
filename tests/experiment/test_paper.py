"""A paper's preset runs with its baselines, and its page begins with what the paper publishes next to ours."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_privacy.data import sources
from fl_privacy.errors import UserError
from fl_privacy.files import CONFIG_DIR
from fl_privacy.report import share_report
from fl_privacy.report.ppc import paper_view_of
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.folder import read_run
from fl_privacy.runs.folder.records import PAPER, read_paper
from fl_privacy.runs.paper import PaperTable, paper_table
from tests.docs.published_commands import published
from tests.experiment.runs import FEW_CANDIDATES, Run, run

TABLES = yaml.safe_load((CONFIG_DIR / "papers.yaml").read_text())
COMPARED = ("psnr", "mse", "transformed_psnr psnr", "cap.reconstruction", "cap.tracing")
"""Figures of which docs/published has those of all data that it names."""


def table(name: str, *overrides: str) -> PaperTable:
    found = paper_table(TABLES[name]["command"], [f"experiment={name}", *overrides])
    assert found is not None
    return found


def numbers(content: Any, *, published: bool = False) -> Iterator[float]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from numbers(value, published=published or key == "published")
    elif isinstance(content, list):
        for value in content:
            yield from numbers(value, published=published)
    elif published and isinstance(content, int | float):
        yield float(content)


@pytest.mark.parametrize("name", TABLES)
def test_published_figures_are_those_of_the_results(name: str) -> None:
    paper = {"sapag": "5_sapag", "fdl": "3_fdl_pp", "spn": "2_spn", "ats": "4_ats", "refiner": "1_refiner"}
    there = set(numbers(published()[f"{paper[name.split('_', maxsplit=1)[0]]}.yaml"]))
    titles = [title for title, of in TABLES[name]["figures"].items() if of in COMPARED and title != "MSE"]
    found = [
        of[line][t] for of in TABLES[name]["published"] for line in TABLES[name]["lines"] for t in titles if line in of
    ]
    assert found and {float(value) for value in found} <= there


@pytest.mark.parametrize("name", TABLES)
def test_all_lines_compose_and_the_full_form_is_the_preset(name: str) -> None:
    assert all(table(name).runs().values())
    full, preset = table(name, "paper=full", "data=mnist_mini"), compose_run([f"experiment={name}", "data=mnist_mini"])
    if not full.full:
        assert full.settings() == preset
    for title in TABLES[name]["published"]:
        assert title.keys() - {"at", "when"} <= TABLES[name]["lines"].keys()
    assert {line for _, line, _ in TABLES[name]["picture"]["rows"]} <= TABLES[name]["lines"].keys()


def test_what_the_user_sets_wins_over_the_short_form() -> None:
    assert table("sapag_paper").settings().victims == 2
    assert table("sapag_paper", "victims=7").settings().victims == 7
    assert {config.victims for (((_, config),),) in table("sapag_paper", "victims=7").runs().values()} == {7}


@pytest.mark.parametrize("override", ["attack=dlg", "attack.form=normalized", "weights=runs/a", "captured=runs/a"])
def test_another_attack_is_one_run_as_before(override: str) -> None:
    assert paper_table("attack", ["experiment=sapag_paper", override]) is None
    assert paper_table("run", ["experiment=sapag_paper"]) is None


@pytest.mark.parametrize(
    "overrides", [["paper=full"], ["experiment=smoke", "paper=short"], ["experiment=sapag_paper", "paper=half"]]
)
def test_a_form_needs_a_paper(overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"paper"):
        paper_table("attack", overrides)


def test_data_that_are_not_there_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_PRIVACY_DATA", str(tmp_path))
    monkeypatch.setattr(sources, "HUB_SECONDS", 0.01)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    sources._open.cache_clear()
    assert table("sapag_paper").with_data().settings().data["name"] == "photograph"
    with pytest.raises(UserError):
        table("sapag_paper", "data=svhn").with_data()


@pytest.fixture(scope="module")
def sapag(tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("skimage")
    settings = ("data=photograph", "victims=2", "attack.iterations=1", FEW_CANDIDATES)
    return run("attack", "experiment=sapag_paper", *settings, out=tmp_path_factory.mktemp("sapag"))


def test_the_page_begins_with_the_paper(sapag: Run) -> None:
    assert sapag.status == 0
    page = (sapag.path / "report.html").read_text()
    before = page[: page.index("<h1")]
    assert "55.91" in before and "43.91" in before and ">DLG<" in before
    assert "No figure is published for these data" in before and "victims" not in before.partition("paper=full")[2]
    assert before.count('<img src="data:image/png') == 10  # truth, DLG and three forms of two images
    record = read_paper(sapag.path)
    assert record is not None
    for line in record["lines"]:
        metrics = json.loads((sapag.path.parent / line["folders"][0][0] / "summary.json").read_text())["attacked"][-1][
            "plain"
        ]
        assert line["figures"][1][1] == pytest.approx(metrics["metrics"]["psnr"]["mean"])
        assert line["figures"][1][4] == 2


def test_a_copy_has_the_figures_without_images(sapag: Run, tmp_path: Path) -> None:
    page = share_report([sapag.path], tmp_path / "copy").read_text()
    assert "55.91" in page and "data:image/png" not in page
    own = share_report([sapag.path], tmp_path / "own", with_originals=True).read_text()
    assert own[: own.index("<h1")].count('<img src="data:image/png') == 2  # the baselines' folders are not copied


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([1.0, 10.0, 9.0, 11.0, 4], [2.0, 20.0, 19.0, 21.0, 4], "order"),
        ([1.0, 10.0, 9.0, 20.0, 4], [2.0, 20.0, 19.0, 21.0, 4], "are too few to order"),
        ([1.0, 22.0, 21.5, 23.0, 4], [2.0, 20.0, 19.0, 21.0, 4], "do not order"),
        ([1.0, 10.0, None, None, 1], [2.0, 20.0, None, None, 1], "are too few to order"),
        ([1.0, None, None, None, 0], [2.0, 20.0, None, None, 1], None),
    ],
)
def test_an_order_is_claimed_if_intervals_are_apart(
    sapag: Run, tmp_path: Path, first: list[float | None], second: list[float | None], said: str | None
) -> None:
    copy = tmp_path / sapag.path.name
    shutil.copytree(sapag.path, copy)
    lines = [{"name": name, "folders": [["gone"]], "figures": [of]} for name, of in (("A", first), ("B", second))]
    content = json.loads((copy / PAPER).read_text())
    (copy / PAPER).write_text(json.dumps({**content, "columns": ["PSNR"], "lines": lines}))
    view = paper_view_of(read_run(copy))
    assert view is not None and view["orders"].get("PSNR") == said and not view["strips"]


@pytest.mark.parametrize("folder", ["../elsewhere", "a/b", "..", ""])
def test_a_record_names_no_folder_elsewhere(sapag: Run, tmp_path: Path, folder: str) -> None:
    content = json.loads((sapag.path / PAPER).read_text())
    content["lines"][0]["folders"] = [[folder]]
    (tmp_path / PAPER).write_text(json.dumps(content))
    with pytest.raises(UserError, match="more than a name"):
        read_paper(tmp_path)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"columns": ["MSE"]}, "another length"),
        ({"strips": [["Ground truth", "DLG"]]}, "another length"),
        ({"lines": [{"name": "DLG", "folders": [], "figures": [["many"] * 5]}]}, "figures is expected"),
        ({"title": 3}, "title is expected"),
    ],
)
def test_a_damaged_record_is_one_line(sapag: Run, tmp_path: Path, change: dict[str, Any], wrong: str) -> None:
    (tmp_path / PAPER).write_text(json.dumps({**json.loads((sapag.path / PAPER).read_text()), **change}))
    with pytest.raises(UserError, match=wrong):
        read_paper(tmp_path)


@pytest.mark.long
def test_cap_is_the_mean_of_accuracy_times_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attacks of two iterations, and two strengths of a line at most."""
    tables = copy.deepcopy(TABLES)
    for settings in tables["spn_paper"]["lines"].values():
        del settings[2:]
    short = tables["spn_paper"]["attack"]["short"]
    short[short.index("attack.iterations=30")] = "attack.iterations=2"
    monkeypatch.setattr("fl_privacy.runs.paper._tables", lambda: tables)
    small = ("data=mnist_mini", "federation.rounds=2", "evaluate_every=2")
    found = run("run", "experiment=spn_paper", *small, out=tmp_path)
    assert found.status == 0
    record = read_paper(found.path)
    assert record is not None
    for line in record["lines"]:
        trained, attacked = (
            [json.loads((tmp_path / names[place] / "summary.json").read_text()) for names in line["folders"]]
            for place in (0, 1)
        )
        rmse = [one["attacked"][-1]["plain"]["metrics"]["rmse"]["mean"] for one in attacked]
        products = [one["final_accuracy"] * each for one, each in zip(trained, rmse, strict=True)]
        assert line["figures"][0][1] == pytest.approx(sum(products) / len(products))
    page = (found.path / "report.html").read_text()
    for title in ("SPN · Reconstruction", "DP · Tracing", 'aria-label="SPN: accuracy'):
        assert title in page
