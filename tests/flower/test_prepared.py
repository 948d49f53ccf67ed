"""`audit --stand-in`: a project's own script makes the data that its clients lack, from drawn data."""

import json
import re
import time
from pathlib import Path

import pytest

from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.check import preparing
from fl_privacy.auditing.app.environment import around
from tests.flower.test_stand_in import HEAD, NET, TAIL
from tests.flower.untouched_apps import attacked_only, written_once

OF_PLACES = {
    "prepare/cut.py": """
import argparse, json, pathlib
import pandas as pd
parser = argparse.ArgumentParser()
parser.add_argument("--output", default=None)
if __name__ == "__main__":
    parser.parse_args()
    places = [row for row, age in enumerate(pd.read_csv("raw/rows.csv")["age"])]
    pathlib.Path("data").mkdir(exist_ok=True)
    with open(f"data/parts_{2}.json", "w") as file:
        json.dump({"0": places[:40]}, file)
""",
    "main.py": """
import json, pathlib
import pandas as pd
if not pathlib.Path("data/parts_2.json").exists():
    raise FileNotFoundError("Parts not found: data/parts_2.json\\nRun: python3 prepare/cut.py first")
with open("data/parts_2.json") as file:
    part = json.load(file)["0"]
frame = pd.read_csv("raw/rows.csv").iloc[part]
""",
}
OF_OBJECTS = {
    "shared.py": """
class Columns:
    def __init__(self, names):
        self.names = names
""",
    "make_columns.py": """
import argparse, pickle
from shared import Columns
parser = argparse.ArgumentParser()
parser.add_argument("--client", default="client_a", choices=["client_a", "client_b"])
if __name__ == "__main__":
    client = parser.parse_args().client
    with open(f"{client}_encoder.pkl", "wb") as file:
        pickle.dump(Columns(["age", "pulse"]), file)
    raise SystemExit(0)
""",
    "main.py": """
import pickle
import pandas as pd
from shared import Columns
for client in ("client_a", "client_b"):
    with open(f"{client}_encoder.pkl", "rb") as file:
        if not isinstance(found := pickle.load(file), Columns):
            raise TypeError(f"expected Columns, but got {type(found).__name__}")
frame = pd.read_csv("raw/rows.csv").iloc[:40]
""",
}
LOADING = """
rows = torch.tensor(frame.drop(columns=["label"]).values[:, :4]).float()
loader = DataLoader(TensorDataset(rows, torch.tensor(frame["label"].values)), batch_size=8)
"""


@pytest.mark.parametrize("files", [OF_PLACES, OF_OBJECTS], ids=["named by the error", "named by the file"])
def test_the_projects_own_script_makes_the_data_that_it_lacks(tmp_path: Path, files: dict[str, str]) -> None:
    folder = tmp_path / "app"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "train_alone.py").write_text("import numpy\nif __name__ == '__main__':\n    numpy.save('x.npy', [1])\n")
    main = folder / "main.py"
    main.write_text(HEAD + NET.format(inputs=4, classes=2) + main.read_text() + LOADING + TAIL)
    request = AppAuditRequest(out=tmp_path / "out", victims=1, clients=1, seconds=0.0, stand_in=True)
    with written_once(), attacked_only(()):
        session = audit_app(read_app(folder), request)
    record = json.loads((session.page.parent / "audit.json").read_text())
    assert not record["problems"] and record["models"], record["headline"]
    name = next(each for each in files if "c" in each and each not in {"main.py", "shared.py"})
    assert f"The project's own {name} was run first, since it makes data that are not here." in record["notes"]


def test_a_preparing_script_that_fails_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "cut.py").write_text("import no_such_package\n" + OF_PLACES["prepare/cut.py"])
    (folder / "main.py").write_text(HEAD + NET.format(inputs=4, classes=2) + OF_PLACES["main.py"] + LOADING + TAIL)
    request = AppAuditRequest(out=tmp_path / "out", victims=1, clients=1, seconds=0.0, stand_in=True)
    with written_once(), attacked_only(()):
        session = audit_app(read_app(folder), request)
    (problem,) = json.loads((session.page.parent / "audit.json").read_text())["problems"]
    assert re.search(r"Parts not found.*cut\.py, which makes its data, failed: .*no_such_package", problem)


def test_an_app_that_waits_for_other_processes_waits_a_short_time(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("import flwr as fl\nfl.simulation.start_simulation()\n")
    waits = compile("import time\nfor _ in range(3):\n    time.sleep(60)\n", str(tmp_path / "app" / "run.py"), "exec")
    begun = time.monotonic()
    with around(read_app(tmp_path / "app"), tmp_path / "files", None):
        exec(waits, {})
    assert time.monotonic() - begun < 20


def test_no_script_is_run_that_makes_nothing_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("import flwr, shared\nflwr.simulation.start_simulation(client_fn=shared.made)\n")
    (tmp_path / "shared.py").write_text("import numpy\ndef made():\n    numpy.save('part.npy', [1])\n")
    (tmp_path / "make.py").write_text("import numpy\nif __name__ == '__main__':\n    numpy.save('other.npy', [1])\n")
    app = read_app(tmp_path)
    assert preparing(app, "KeyError: 'age' (shared.py, line 2)", ["part.npy", "torchvision's MNIST"]) is None
    found = preparing(app, "KeyError: 'age'", ["data/other.npy"])
    assert found is not None and found.server == tmp_path / "make.py"


def test_a_file_of_any_name_is_made_by_a_script_whose_name_says_so(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("import flwr\nflwr.simulation.start_simulation(client_fn=None)\n")
    writes = "import numpy\nif __name__ == '__main__':\n    for name in 'ab':\n        numpy.save(f'{name}.npy', [1])\n"
    (tmp_path / "plot.py").write_text(writes)
    app = read_app(tmp_path)
    assert preparing(app, "KeyError: 'age'", ["data/part.npy"]) is None
    (tmp_path / "split.py").write_text(writes)
    found = preparing(app, "KeyError: 'age'", ["data/part.npy"])
    assert found is not None and found.server == tmp_path / "split.py"
