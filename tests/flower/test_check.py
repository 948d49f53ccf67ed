"""What `audit --check` says of an app without running it, and that an audit stops where packages are missing."""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.clientapp import ClientApp

from fl_privacy.auditing.app.bundle import modules_in, read_app
from fl_privacy.auditing.app.check import check_app, stops_of
from fl_privacy.auditing.app.lent import keras_lent
from fl_privacy.cli.main import run_command_line
from fl_privacy.errors import UserError

PROJECT = """
[project]
name = "clinic"
requires-python = ">=3.99"
dependencies = ["medmnist==3.0.1", "numpy<1.0", "scikit-learn>=1.0"]
[tool.flwr.app.components]
serverapp = "clinic.server_app:app"
clientapp = "clinic.client_app:app"
[tool.flwr.app.config]
num-server-rounds = 7
[tool.flwr.federations.local]
options.num-supernodes = 4
"""
CODE = """
import medmnist, cv2
import pandas as pd
from flwr.client.numpy_client import NumPyClient
from clinic.task import train
raise SystemExit("it was run")
"""
TASK = """
import requests
from datasets import load_dataset
from torchvision.datasets import MNIST
import torchvision
try:
    import nowhere_at_all
except ImportError:
    pass

def train():
    import tensorflow_of_nobody
    pd.read_csv("data/patients.csv"), pd.read_csv("data/there.csv"), open("log.txt", "w")
    torchvision.datasets.CIFAR10("data"), load_dataset("owner/set"), open("/home/author/notes.json")
"""


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    for name, text in {
        "pyproject.toml": PROJECT, "clinic/server_app.py": CODE, "clinic/client_app.py": CODE, "clinic/task.py": TASK,
        "clinic/unused.py": "import never_reached", "data/there.csv": "a,b\n1,2\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_everything_that_is_missing_is_found_without_running_it(clinic: Path) -> None:
    found = check_app(read_app(clinic))
    assert found.missing == {"cv2": "opencv-python-headless", "medmnist": "medmnist==3.0.1"}
    assert set(found.later) == {"nowhere_at_all", "tensorflow_of_nobody"}
    assert "pip install opencv-python-headless 'medmnist==3.0.1'" in found.stops
    assert found.python == ">=3.99" and len(found.versions) == 1 and "numpy<1.0" in found.versions[0]
    assert found.lent == ["flwr.client.numpy_client.NumPyClient"]
    assert found.network == ["requests"] and found.nodes == 4 and found.rounds == 7
    assert {each.what: each.there for each in found.data} == {
        "read_csv('data/patients.csv')": False,
        "read_csv('data/there.csv')": True,
        "torchvision's CIFAR10": None,
        "load_dataset('owner/set')": None,
        "open('/home/author/notes.json')": False,
    }
    json.dumps(found.as_plain())


def test_the_command_says_it_and_an_audit_stops(clinic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["audit", str(clinic), "--check"]) == 1
    said = capsys.readouterr().out
    assert "Stops: The app clinic imports cv2, medmnist" in said and "--stand-in" in said and "patients.csv" in said
    for sandbox in ([], ["--sandbox"]):
        assert run_command_line(["audit", str(clinic), "--out", str(clinic / "out"), *sandbox]) == 2
        assert "pip install" in capsys.readouterr().err
    assert not (clinic / "out").exists()


START = "import flwr, cv2, gone_package\nflwr.simulation.start_simulation(client_fn=lambda cid: None, num_clients=2)\n"
POETRY = """
[tool.poetry.dependencies]
python = "^3.8"
opencv-python = "^4.8.1"
gone_package = { version = "1.2.0", extras = ["all"] }
numpy = "^0.5.1"
torch = "*"
"""
LISTED = "opencv-python>=4.8.1,<5  # pictures\n\n# numbers\n--index-url=here\ngone_package==1.2.0\nnumpy<0.6,>=0.5.1\n"


@pytest.mark.parametrize(("file", "text"), [("pyproject.toml", POETRY), ("requirements.txt", LISTED)])
def test_scripts_have_the_versions_that_their_project_names(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(START)
    (tmp_path / file).write_text(text)
    found = check_app(read_app(tmp_path))
    assert found.missing["gone_package"] == "gone_package==1.2.0"
    (said,) = found.versions
    assert "numpy" in said and "0.5.1" in said and "<0.6" in said


@pytest.mark.parametrize(
    "text", ["[tool.poetry]", "[", "[project]\ndependencies = 3", "[tool.poetry.dependencies]\na = 3"]
)
def test_a_project_file_that_names_no_versions_is_no_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(START)
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "requirements.txt").write_bytes(b"\xff")
    assert not check_app(read_app(tmp_path)).versions


def test_a_list_of_packages_that_is_a_pipe_or_begins_with_a_mark_is_read_or_left(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(START)
    (tmp_path / "requirements.txt").write_bytes("\ufeffnumpy<0.6\n".encode())
    assert check_app(read_app(tmp_path)).versions
    (tmp_path / "requirements.txt").unlink()
    os.mkfifo(tmp_path / "requirements.txt")
    (tmp_path / "pyproject.toml").symlink_to("/dev/zero")
    assert not check_app(read_app(tmp_path, {"server": "main.py"})).versions


def test_a_module_without_the_app_that_is_named(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(clinic))
    (clinic / "clinic" / "server_app.py").write_text("")
    with pytest.raises(UserError, match=r"clinic\.server_app defines no app, which pyproject\.toml names"):
        read_app(clinic).load(stops_of)
    for name in modules_in(clinic):
        del sys.modules[name]


def test_a_module_that_is_named_and_not_there(clinic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clinic / "pyproject.toml").write_text(PROJECT.replace("clinic.server_app", "hospital_of_nobody.server_app"))
    assert run_command_line(["audit", str(clinic)]) == 2
    assert "hospital_of_nobody.server_app" in capsys.readouterr().err


def test_a_module_is_found_by_another_spelling(clinic: Path) -> None:
    for half in ("server", "client"):
        (clinic / "clinic" / f"{half}_app.py").rename(clinic / "clinic" / f"{half.title()}App.py")
    found = read_app(clinic)
    assert (found.server, found.client) == ("clinic.ServerApp:app", "clinic.ClientApp:app")
    assert "names clinic.server_app:app and clinic.client_app:app, which are not there" in found.misnamed
    assert not check_app(found).modules
    (clinic / "clinic" / "server_app.py").write_text("")
    assert read_app(clinic).server == "clinic.server_app:app"


def test_an_app_that_has_all_is_let_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["audit", "examples/flower_quickstart", "--check"]) == 0
    assert "all that it imports at its start are here" in capsys.readouterr().out


def test_code_that_nests_without_end_ends_in_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = "import flwr as fl\nfl" + ".a" * 4000 + "()\nif " + "(" * 90 + "1" + ")" * 90 + " == '__main__':\n    pass\n"
    (tmp_path / "deep.py").write_text(deep)
    (tmp_path / "server.py").write_text("import flwr as fl\nfl.server.start_server()\n")
    (tmp_path / "client.py").write_text("import flwr as fl\nfl.client.start_client(client=None)\n")
    assert run_command_line(["audit", str(tmp_path), "--check"]) == 0
    assert "server.py is run as the server" in capsys.readouterr().out


def test_a_module_of_its_own_is_no_package_to_install_and_src_holds_modules(clinic: Path) -> None:
    (clinic / "clinic" / "task.py").write_text("import helpers\ndef train(): ...\n")
    assert "helpers, of its own" in check_app(read_app(clinic)).stops
    (clinic / "clinic").rename(clinic / "src")
    found = check_app(read_app(clinic))
    assert found.runs.startswith("src.server_app:app and src.client_app:app, not") and not found.modules
    assert "its pyproject.toml names clinic.server_app:app and clinic.client_app:app" in read_app(clinic).misnamed
    (clinic / "src" / "server_app.py").write_text("from clinic.task import train\n")
    assert "clinic" not in check_app(read_app(clinic)).missing
    assert read_app(clinic).renamed == {"clinic": str(clinic / "src")}
    for name in ("server_app.py", "client_app.py"):
        (clinic / name).write_text("")
    assert check_app(read_app(clinic)).modules, "two folders hold both"
    for name in ("server_app.py", "client_app.py"):
        (clinic / "src" / name).rename(clinic / name)
    assert (read_app(clinic).server, read_app(clinic).client) == ("server_app:app", "client_app:app")
    for name in ("server_app.py", "client_app.py"):
        (clinic / name).rename(clinic / "src" / name)
    (clinic / "src" / "clinic").mkdir()
    assert check_app(read_app(clinic)).modules
    (clinic / "src" / "server_app.py").rename(clinic / "src" / "clinic" / "server_app.py")
    (clinic / "src" / "client_app.py").rename(clinic / "src" / "clinic" / "client_app.py")
    assert not check_app(read_app(clinic)).modules


def test_the_folder_of_an_app_is_the_package_that_it_names(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("unused.py", "server_app.py", "client_app.py", "task.py"):
        (clinic / "clinic" / name).rename(clinic / name)
    (clinic / "clinic").rmdir()
    (clinic / "task.py").write_text("cache = []\n")
    for half, kind in (("server", "ServerApp"), ("client", "ClientApp")):
        code = f"from flwr.{half}app import {kind}\nfrom .task import cache\napp = {kind}()\n"
        (clinic / f"{half}_app.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path])
    app = read_app(clinic)
    assert not check_app(app).stops and app.renamed == {"clinic": str(clinic)}
    assert isinstance(app.load(stops_of).client, ClientApp)
    for name in modules_in(clinic):
        del sys.modules[name]


@pytest.mark.parametrize("server", [".server:app", "/abs/x.server:app", "..a.b:app"])
def test_names_that_are_no_modules_are_no_folders_to_search(clinic: Path, server: str) -> None:
    text = (clinic / "pyproject.toml").read_text()
    (clinic / "pyproject.toml").write_text(text.replace("clinic.server_app:app", server))
    assert not read_app(clinic).misnamed


def test_all_of_an_apps_modules_are_its_own_whatever_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my-site-packages" / "app"
    (folder / "fl_privacy_demo").mkdir(parents=True)
    (folder / "fl_privacy_demo" / "task.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    importlib.import_module("fl_privacy_demo.task")
    assert sorted(modules_in(folder)) == ["fl_privacy_demo", "fl_privacy_demo.task"]
    for name in modules_in(folder):
        del sys.modules[name]


def test_code_that_ends_when_it_runs_again_is_shared(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(clinic))
    lock = clinic / "lock"
    once = f"import sys\nfrom pathlib import Path\nlock = Path({str(lock)!r})\n"
    (clinic / "clinic" / "task.py").write_text(once + "if lock.exists():\n    sys.exit('runs')\nlock.touch()\n")
    for half, kind in (("server", "ServerApp"), ("client", "ClientApp")):
        code = f"from flwr.{half}app import {kind}\nfrom clinic import task\napp = {kind}()\n"
        (clinic / "clinic" / f"{half}_app.py").write_text(code)
    loaded = read_app(clinic).load(stops_of)
    assert isinstance(loaded.client, ClientApp)
    assert sys.modules["clinic.client_app"].task is sys.modules["clinic.server_app"].task
    for name in modules_in(clinic):
        del sys.modules[name]


def test_server_and_clients_share_no_module(clinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(clinic))
    for name, code in {
        "task.py": "cache = []\n",
        "server_app.py": """
import clinic.nets.small.one
from flwr.serverapp import ServerApp
from clinic.task import cache
app = ServerApp()
""",
        "nets/__init__.py": "",
        "nets/small/one.py": "",  # a folder without __init__.py
        "client_app.py": """
import clinic.nets.small.one
from flwr.clientapp import ClientApp
from clinic.task import cache
app = ClientApp()
@app.query()
def answer(message, context):
    from clinic import task
    cache.append(message)
    return task.cache is cache, len(cache)
""",
    }.items():
        (clinic / "clinic" / name).parent.mkdir(parents=True, exist_ok=True)
        (clinic / "clinic" / name).write_text(code)
    client = read_app(clinic).load(stops_of).client
    asked: Any = SimpleNamespace(metadata=SimpleNamespace(message_type="query"))
    of_server = sys.modules["clinic.server_app"]
    assert isinstance(client, ClientApp) and [client(asked, None) for _ in range(2)] == [(True, 1), (True, 2)]
    assert of_server.cache == [] and sys.modules["clinic.task"].cache is of_server.cache
    modules = [name for name in sys.modules if name.partition(".")[0] == "clinic"]
    for each in modules:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.chdir(clinic)
    (clinic / "clinic" / "task.py").write_text("import os\ncache = []\nos.mkdir('runs')\n")
    assert [read_app(clinic).load(stops_of).client(asked, None) for _ in range(2)] == [(True, 1), (True, 2)]
    for each in modules:
        monkeypatch.delitem(sys.modules, each)


def test_an_app_in_a_folder_of_a_repository_is_found(clinic: Path) -> None:
    (clinic / "one").mkdir()
    for path in (clinic / "pyproject.toml", clinic / "clinic"):
        path.rename(clinic / "one" / path.name)
    assert read_app(clinic).folder == clinic / "one"
    (clinic / "two").mkdir()
    (clinic / "two" / "pyproject.toml").write_text(PROJECT)
    with pytest.raises(UserError, match="to hold one app, but holds 2: name one of one, two"):
        read_app(clinic)


def test_modules_around_the_folder_of_the_app_are_found(clinic: Path) -> None:
    (clinic / "app").mkdir()
    for path in (clinic / "pyproject.toml", clinic / "clinic"):
        path.rename(clinic / "app" / path.name)
    (clinic / "layers.py").touch()
    (clinic / "app" / "clinic" / "task.py").write_text("from layers import Net\nfrom utils.data import load")
    (clinic / "utils").mkdir()
    (clinic / "utils" / "data.py").touch()
    said = (
        f"imports layers, utils, of its own, which its folder does not have: set PYTHONPATH={clinic}, which holds them."
    )
    assert said in check_app(read_app(clinic / "app")).stops
    named = PROJECT.replace("dependencies = [", 'dependencies = ["layers==1.0", ')
    (clinic / "app" / "pyproject.toml").write_text(named)
    assert check_app(read_app(clinic / "app")).above == {"utils": str(clinic)}


def test_modules_in_the_folder_of_all_temporary_files_are_no_app_s(
    clinic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(clinic.parent))
    (clinic / "clinic" / "task.py").write_text("from layers import Net")
    (clinic.parent / "layers.py").touch()
    assert not check_app(read_app(clinic)).above


@pytest.mark.parametrize("named", [":app", "..:app"])
def test_an_app_without_a_module_is_one_line(tmp_path: Path, named: str) -> None:
    components = f'[tool.flwr.app.components]\nserverapp = "{named}"\nclientapp = "c:app"\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "x"\n{components}')
    with pytest.raises(UserError, match="expected to name serverapp and clientapp"):
        read_app(tmp_path)


def test_texts_that_no_file_can_be_named_are_not_there(clinic: Path) -> None:
    (clinic / "clinic" / "task.py").write_text(f"import pandas as pd\npd.read_json({'x' * 400!r})\n")
    asked = check_app(read_app(clinic)).data
    assert [(each.where, each.there) for each in asked] == [("clinic/task.py:2", False)]


GEO = "from torch_geo_of_nobody.data import Data\nfrom torch_geo_of_nobody.utils import degree\n"
STARTED = "import flwr as fl\nfl.simulation.start_simulation(client_fn=print, num_clients=2)\n"


@pytest.mark.parametrize(
    ("data", "utils"),
    [("", ""), ("from torch_geo_of_nobody.data import Data\n", "def degree(): ...\n"), ("Data, _ = 1, degree\n", "")],
)
def test_a_library_with_modules_named_as_the_app_s_is_missing(tmp_path: Path, data: str, utils: str) -> None:
    for name, code in {"run": GEO + STARTED, "data": f"def load(): ...\n{data}", "utils": utils}.items():
        (tmp_path / f"{name}.py").write_text(code)
    assert "install torch-geo-of-nobody" in stops_of(read_app(tmp_path))


def test_packages_that_an_app_can_do_without_are_no_folders_of_it(tmp_path: Path) -> None:
    guarded = "".join(f"    {line}\n" for line in GEO.splitlines())
    (tmp_path / "run.py").write_text(f"try:\n{guarded}except ImportError:\n    Data = None\n{STARTED}")
    (tmp_path / "data.py").write_text("class Data: ...\n")
    (tmp_path / "utils.py").write_text("async def degree(): ...\n")
    assert not read_app(tmp_path).renamed
    (tmp_path / "run.py").write_text(GEO + STARTED)
    assert read_app(tmp_path).renamed == {"torch_geo_of_nobody": str(tmp_path)}
    (tmp_path / "run.py").write_text(GEO.replace("torch_geo_of_nobody", "torch_geometric") + STARTED)
    if importlib.util.find_spec("torch_geometric") is None:
        assert not read_app(tmp_path).renamed, "a library by its name"


def test_an_app_at_the_root_of_its_folder_leaves_no_module_behind(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / f"root{number}"
        folder.mkdir()
        (folder / "client.py").write_text(f"A = {number}\n")
        (folder / "model.py").write_text("B = 1\n")
        code = "from cool_of_nobody.client import A\nfrom cool_of_nobody.model import B\n" + STARTED
        (folder / "run.py").write_text(code.replace("num_clients=2", "num_clients=A"))
        assert read_app(folder).load(stops_of).nodes == number
        assert "cool_of_nobody" in modules_in(folder)
        for name in modules_in(folder):
            del sys.modules[name]


def test_long_files_are_read_in_no_time(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(f"import none_of_nobody\n{STARTED}")
    (tmp_path / "long.py").write_text("\n" * 20_000)
    begun = time.process_time()
    assert "none_of_nobody" in stops_of(read_app(tmp_path)) and not keras_lent("\n" * 20_000, list)
    assert time.process_time() - begun < 2


def test_a_module_that_is_loaded_by_name_is_no_lack_of_flower(clinic: Path) -> None:
    text = (clinic / "pyproject.toml").read_text().replace("clinic.server_app", "gone_of_nobody.server_app")
    (clinic / "pyproject.toml").write_text(text)
    with pytest.raises(UserError, match="imports gone_of_nobody, which neither"):
        read_app(clinic).load(lambda app: "")
