"""Tables that are drawn in place of missing, empty or other ones, and rows by which an app filters them."""

import ast
import importlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fl_privacy.auditing.app import odd_files
from fl_privacy.auditing.app.hub_models import fit
from fl_privacy.auditing.app.scripts import SourceFile
from fl_privacy.auditing.app.stand_in import Drawing
from fl_privacy.auditing.app.stood_in import stood_in


def drawing_of(code: str, folder: Path) -> Drawing:
    return Drawing([SourceFile(folder / "app.py", ast.parse(code))], folder)


def run(code: str, folder: Path, names: str = "", **fitted: int) -> Drawing:
    """Run ``code`` as a script of ``folder``, whose code also has ``names``."""
    place, drawing = folder / "app.py", drawing_of(f"{code}\n{names}", folder)
    drawing.fitted = fitted
    place.write_text(code)
    with stood_in(drawing):
        exec(compile(code, str(place), "exec"), {})
    return drawing


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("listing", ["os.listdir(folder)", "next(os.walk(folder))[2]"])
@pytest.mark.parametrize("before", ["missing", "empty", "kept"])
def test_a_folder_of_tables_has_one_for_each_client(tmp_path: Path, listing: str, before: str) -> None:
    if before != "missing":
        (tmp_path / "data/cells").mkdir(parents=True)
    if before == "kept":
        (tmp_path / "data/cells/README.md").write_text("Put the tables here.")
    drawing = run(
        f"""
import os
import pandas as pd
folder = "data/cells"
files = sorted({listing})
files = [name for name in files if name.endswith(".csv")]
assert len(files) >= 10, files
first, last = (pd.read_csv(os.path.join(folder, name)) for name in (files[0], files[-1]))
assert len(first) == len(last) == 800 and not first["volt"].equals(last["volt"])
""",
        tmp_path,
    )
    assert "drawn rows" in drawing.in_words()


def test_a_folder_of_the_apps_own_tables_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "data/site").mkdir(parents=True)
    (tmp_path / "data/site/a.csv").write_text("volt\n1\n")
    code = "import os\nfound = [each for each in os.listdir('{}') if each.endswith('.csv')]\nassert found == {}\n"
    assert not run(code.format("data/site", "['a.csv']"), tmp_path).asked
    assert not run(code.format("data", "[]"), tmp_path).asked, "its tables are in folders of their own"


@pytest.mark.parametrize("content", ["", "version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 7168\n"])
@pytest.mark.parametrize("name", ["flows.csv", "flows.npy"])
def test_an_empty_file_or_a_pointer_to_one_elsewhere_is_missing(tmp_path: Path, content: str, name: str) -> None:
    (tmp_path / name).write_text(content)
    read = "pandas.read_csv" if name.endswith("csv") else "numpy.load"
    assert name in run(f"import numpy, pandas\nassert len({read}('{name}')) >= 600\n", tmp_path).asked


def test_a_table_without_the_columns_that_the_code_reads_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "posts.csv").write_text('2401,Games,Positive,"well, then"\n2402,Games,Negative,no\n')
    (tmp_path / "other.csv").write_text("text,label,more\na,1,2\n")
    code = """
import pandas as pd
table, other = pd.read_csv("posts.csv"), pd.read_csv("other.csv")
assert other.shape == (1, 3)
"""
    names = "table.rename_column('label', 'labels')\ntable['text']"
    before = run(f"{code}assert len(table) == 1\n", tmp_path, names)
    assert not before.asked and fit(before, "KeyError: 'text' (task.py, line 3)") == {"tables": 1}
    assert not fit(before, "KeyError: 'epochs'"), "no column"
    code += "assert len(table) == 800 and set(table['label']) == {0, 1} and table['text'][0].count(' ') > 2\n"
    after = run(f"{code}assert 'labels' not in table.columns", tmp_path, names, tables=1)
    assert "800 drawn rows" in after.in_words() and "posts.csv, whose columns are others" in after.in_words()


def test_a_value_by_which_rows_are_chosen_is_of_some_of_them(tmp_path: Path) -> None:
    run(
        """
import pandas as pd
table = pd.read_csv("incomes.csv")
state = 6
for part in (
    table.query(f"ST == {state}"),
    table[table["ST"] == state],
    table.loc[table["ST"] == state],
    table.loc[table["ST"] == state, ["AGE", "label"]],
    table[(table["town"] == "Oslo") & (table["ST"] == state)],
):
    assert 100 < len(part) < len(table) and set(part["label"]) == {0, 1}
assert len(table[table["ST"] == 6].merge(table[table["ST"] == 7], on="AGE")) < 400, "other rows for another value"
assert table[table["AGE"].isna()].empty and table.query("AGE < 0").empty
assert len(table[table["label"] == 1]) == 400
assert not (table["ST"] == state).any(), "a question gets the truth"
""",
        tmp_path,
        "table.drop('ST')",
    )


def test_as_many_columns_are_inputs_as_the_code_has_numbers_for(tmp_path: Path) -> None:
    drawn = drawing_of(
        """
n_features = 20
rows["INCOME"] = np.where(fetched["target"] > 50, 1, 0)
first = config["server_round"]
guesses = pd.concat([x, pd.DataFrame(guessed, columns=["INCOME_guessed"])], axis=1)["INCOME_guessed"]
train = rows.drop("ST", axis=1)
x, y = train.drop("INCOME", axis=1), train["INCOME"]
""",
        tmp_path,
    ).table("train.csv")
    assert drawn.drop("ST", axis=1).drop("INCOME", axis=1).shape[1] == 20
    assert "INCOME_guessed" not in drawn.columns


def test_a_folder_outside_the_audits_own_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, project = tmp_path / "files", tmp_path / "project"
    here.mkdir()
    (project / "data").mkdir(parents=True)
    listing = (
        "import os\ntry:\n    found = os.listdir({!r})\nexcept FileNotFoundError:\n    found = []\nfound = '.csv'\n"
    )
    for place, path in ((here, "../data"), (project, "data"), (project, "train_images")):
        monkeypatch.chdir(place)
        run(listing.format(path), here)
    assert sorted(each.relative_to(tmp_path).as_posix() for each in tmp_path.rglob("*")) == [
        *("files", "files/app.py", "project", "project/data"),
    ]


def test_a_question_for_rows_is_answered_alike_in_each_process(tmp_path: Path) -> None:
    code = """
import pandas as pd
table = pd.read_csv("incomes.csv")
assert table["ST"].__eq__(table) is NotImplemented
one, other = (table[table["ST"].isin(values)] for values in (["Oslo", "Rome"], {"Rome": 1, "Oslo": 2}))
assert 100 < len(one) < len(table) and one.equals(other)
"""
    run(code, tmp_path, "table.drop('ST')")


def test_a_table_is_found_by_its_path_among_options(tmp_path: Path) -> None:
    (tmp_path / "posts.csv").write_text("2401;Positive\n2402;no\n")
    code = "import pandas as pd\ntable = pd.read_csv(sep=';', filepath_or_buffer='posts.csv')\n"
    drawn = run(f"{code}assert len(table) == 800\n", tmp_path, "table['text']", tables=1)
    assert [*drawn.asked] == ["posts.csv, whose columns are others than the code names"]


def test_a_small_file_that_may_not_be_opened_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise PermissionError("no right to read")

    (tmp_path / "note.txt").write_text("short")
    monkeypatch.setattr(odd_files.os, "open", refuse)
    assert not odd_files.is_missing("note.txt") and odd_files.is_missing("no\0name")


def test_a_style_of_plots_that_is_not_here_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run("import matplotlib.pyplot as plt\nplt.style.use(['of-a-journal'])\n", tmp_path)


def test_labels_of_each_value_are_as_wide_as_the_rows(tmp_path: Path) -> None:
    run(
        """
import numpy as np, os
folder = os.path.join("data/processed", "MILL")
if not os.path.exists(folder):
    raise Exception("run the script first")
train, labels = (np.load(os.path.join(folder, f"{name}.npy")) for name in ("train", "labels"))
assert train.shape[1] == labels.shape[1] and set(np.unique(labels)) == {0, 1}
""",
        tmp_path,
    )
    assert np.ndim(odd_files.array(drawing_of("", tmp_path), "labels", "labels.npy")) == 1
    assert importlib.import_module("pandas") is pd
