"""`audit --stand-in`: apps whose data are missing come to a page on drawn examples, which says so first."""

import ast
import importlib
import importlib.util
import json
import linecache
import os
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fl_privacy.auditing.app import odd_files
from fl_privacy.auditing.app.audit import AppAudit, AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.environment import data_sets_of
from fl_privacy.auditing.app.lent import (
    absent_left_out,
    cpu_lent,
    evaluate_generator,
    fit_generator,
    loaded_here,
    older_names_lent,
)
from fl_privacy.auditing.app.odd_files import fill
from fl_privacy.auditing.app.scripts import SourceFile, parsed
from fl_privacy.auditing.app.stand_in import Drawing, Shape, column, pictures, sounds, texts
from fl_privacy.auditing.app.stood_in import Hooks, stood_in
from fl_privacy.auditing.instrument.fitted import FittedBy
from fl_privacy.auditing.instrument.watch import replaced
from fl_privacy.federation.replies import Failure, attempt
from tests.flower.untouched_apps import attacked_only, written_once
from tests.selection import few

HEAD = """
import flwr as fl, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""
TAIL = """
class FlowerClient(fl.client.NumPyClient):
    def __init__(self):
        self.net = Net()
    def get_parameters(self, config):
        return [value.numpy() for value in self.net.state_dict().values()]
    def fit(self, parameters, config):
        self.net.load_state_dict(dict(zip(self.net.state_dict(), map(torch.tensor, parameters))))
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(images), labels).backward()
            optimizer.step()
        return self.get_parameters({}), 40, {}
    def evaluate(self, parameters, config):
        return 1.0, 40, {}
fl.simulation.start_simulation(client_fn=lambda cid: FlowerClient(), num_clients=2)
"""
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear({inputs}, 24), nn.Linear(24, {classes})
    def forward(self, x):
        return self.last(torch.relu(self.first(x.flatten(1))))
"""
LOADERS = {
    "torchvision": (784, 10, """
from torchvision import transforms
from torchvision.datasets import MNIST
sets = MNIST("data", train=True, download=True, transform=transforms.ToTensor())
loader = DataLoader(torch.utils.data.Subset(sets, range(40)), batch_size=8)
"""),
    "hub": (3072, 10, """
from datasets import load_dataset
from torchvision.transforms import ToTensor
rows = load_dataset("uoft-cs/cifar10", split="train").select(range(40))
images = torch.stack([ToTensor()(row["img"]) for row in rows])
loader = DataLoader(TensorDataset(images, torch.tensor(rows["label"][:])), batch_size=8)
"""),
    "pandas": (6, 2, """
import pandas as pd
frame = pd.read_csv("/somewhere/heart.csv")
labels = frame["diagnosis"]
rows = frame.drop(columns=["diagnosis"]).values[:40]
loader = DataLoader(TensorDataset(torch.tensor(rows).float(), torch.tensor(labels.values[:40])), batch_size=8)
"""),
}  # fmt: skip


@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize("kind", few(LOADERS, 1, all_but_fuzz=3))
def test_missing_data_are_drawn_and_the_page_says_so(tmp_path: Path, kind: str) -> None:
    inputs, classes, loading = LOADERS[kind]
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "main.py").write_text(HEAD + NET.format(inputs=inputs, classes=classes) + loading + TAIL)
    request = AppAuditRequest(out=tmp_path / "out", victims=2, clients=1, seconds=0.1, stand_in=True)
    with written_once(), attacked_only({"gradient"}):
        session = audit_app(read_app(folder), request)
    record = json.loads((session.page.parent / "audit.json").read_text())
    assert not record["problems"], record["problems"]
    assert record["rungs"] and record["rungs"][0]["counts"]["judged"] == 2
    page = session.page.read_text()
    assert "data were not here and were made up" in page
    without = AppAuditRequest(out=tmp_path / "out2", victims=1, clients=1, seconds=0.1)
    if kind == "pandas":
        with pytest.raises(Exception, match=r"heart\.csv"):
            audit_app(read_app(folder), without)


def test_a_column_whose_values_are_counted_has_few(tmp_path: Path) -> None:
    code = """
import pandas as pd
frame = pd.read_csv("flows.csv")
parts = {part: frame[frame["Slice"] == part] for part in sorted(frame["Slice"].unique())}
assert len(parts) == 2 and frame["bytes"].nunique() == 2 and frame["speed"].max() > 2
assert frame["Label"].nunique() == 5 and frame["client_id"].nunique() > 2
"""
    with stood_in(Drawing([SourceFile(tmp_path / "app.py", ast.parse(f"num_classes = 5\n{code}"))], tmp_path)):
        exec(code, {})


SCANS = """
from datasets import load_dataset
from torchvision.transforms import ToTensor
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 5, stride=4), nn.Linear(2 * 11 * 11, 3)
    def forward(self, x):
        return self.last(torch.relu(self.first(x)).flatten(1))
rows = load_dataset("somebody/scans", split="train").select(range(40))
images = torch.stack([ToTensor()(row["image"]) for row in rows])
loader = DataLoader(TensorDataset(images, torch.tensor(rows["label"][:])), batch_size=8)
"""
COLUMNS = (
    NET.format(inputs=14, classes=2)
    + """
import pandas as pd
frame = pd.read_csv("/somewhere/heart.csv")
rows = pd.concat([frame.drop(columns=["diagnosis"]), frame[["age", "pulse"]]], axis=1).values[:40]
loader = DataLoader(TensorDataset(torch.tensor(rows).float(), torch.tensor(frame["diagnosis"].values[:40])), 8)
"""
)


@pytest.mark.parametrize(
    ("code", "shape"), [(SCANS, "channels 1, side 48"), (COLUMNS, "columns -2")], ids=["pictures", "rows"]
)
def test_examples_are_drawn_again_in_the_shape_that_the_network_takes(tmp_path: Path, code: str, shape: str) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "main.py").write_text(HEAD + code + TAIL)
    request = AppAuditRequest(out=tmp_path / "out", victims=1, clients=1, seconds=0.0, stand_in=True)
    with written_once(), attacked_only(()):
        session = audit_app(read_app(folder), request)
    record = json.loads((session.page.parent / "audit.json").read_text())
    assert not record["problems"] and record["models"], record["headline"]
    assert f"Random data have the shape that its network takes ({shape})." in record["notes"]


def test_what_is_there_is_loaded_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": [1, 2]}).to_csv("there.csv", index=False)
    np.save("there.npy", np.arange(3))
    with stood_in(Drawing([], tmp_path)) as drawing:
        assert pd.read_csv("there.csv").shape == (2, 1) and np.load("there.npy").tolist() == [0, 1, 2]
        Path("there.txt").write_text("1 2")
        assert np.loadtxt(fname="there.txt").tolist() == [1, 2] and np.load(file="there.npy").tolist() == [0, 1, 2]
        assert drawing.asked == {} and drawing.in_words() == ""
        gone = pd.read_csv("gone.csv")
        assert len(gone) > 100 and gone["a column that nobody named"].dtype.kind == "f"
        assert np.load("gone.npz")["x_train"].shape[1:] == (28, 28)
        assert np.loadtxt("gone.txt").ndim == 2
    assert set(drawing.asked) == {"gone.csv", "gone.npz", "gone.txt"}
    with pytest.raises(FileNotFoundError):
        pd.read_csv("gone.csv")


def test_drawn_examples_are_the_same_again_and_of_their_kind() -> None:
    import numpy as np  # noqa: PLC0415

    one, two = (pictures(20, Shape(side=28, channels=1), np.random.default_rng(3)) for _ in range(2))
    assert one.shape == (20, 28, 28, 1) and one.dtype == np.uint8 and (one == two).all()
    within = np.abs(one[0].astype(float) - one[10]).mean()
    between = np.abs(one[0].astype(float) - one[1:10]).mean()
    assert within < between, "pictures of a class are more alike"
    assert all(8 <= len(text.split()) <= 24 for text in texts(5, 2, np.random.default_rng(0)))
    assert list(column("is_fraud", 4, 2, np.random.default_rng(0))) == [0, 1, 0, 1]


def test_packages_that_report_elsewhere_are_left_out() -> None:
    with absent_left_out() as silent:
        import wandb  # noqa: PLC0415

        with wandb.init(project="x") as run:
            run.log({"loss": 1.0})
        assert wandb.config.lr is not None and silent == ["wandb"]

        @wandb.decorated
        def kept() -> int:
            return 3

        assert kept() == 3
    assert "wandb" not in sys.modules


def test_what_reports_to_a_server_is_left_out_though_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for name in ("mlflow", "prometheus_client"):
        (installed / f"{name}.py").write_text("def start(server):\n    raise ConnectionError(server)\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(installed)
    with absent_left_out() as silent:
        for name in ("mlflow", "prometheus_client"):
            importlib.import_module(name).start("http://mlflow:5000")
    assert silent == ["mlflow", "prometheus_client"]
    with pytest.raises(ConnectionError):
        importlib.import_module("mlflow").start("http://mlflow:5000")
    sys.modules.pop("mlflow")


def test_a_folder_of_runs_is_no_tracker_and_a_module_of_that_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    (tmp_path / "aim.py").write_text("target = 3\n")
    with absent_left_out() as silent:
        monkeypatch.syspath_prepend(tmp_path)
        wandb, aim = map(importlib.import_module, ("wandb", "aim"))
        assert wandb.init() is not None and aim.target == 3 and silent == ["wandb"]
    with absent_left_out() as silent:
        assert importlib.import_module("wandb").init() is not None and silent == ["wandb"]
    sys.modules.pop("aim", None)


def test_a_library_that_asks_for_a_tracker_learns_that_it_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages" / "asks_for_trackers.py"
    library.parent.mkdir()
    library.write_text("import importlib.util\nthere = importlib.util.find_spec('wandb') is not None\n")
    monkeypatch.syspath_prepend(library.parent)
    with absent_left_out() as silent:
        assert not importlib.import_module("asks_for_trackers").there
        assert importlib.util.find_spec("wandb") is not None and silent == ["wandb"]


def drawing_of(code: str, folder: Path) -> Drawing:
    (folder / "code.py").write_text(code)
    return Drawing(list(parsed(folder).values()), folder)


def test_columns_are_found_behind_constants_and_hold_the_texts_that_they_are_compared_with(tmp_path: Path) -> None:
    code = "LABEL = 'Outcome'\nCOLS = ['Age', 'Sex']\nprint(df[COLS], df[LABEL])\n"
    code += "df['Sex'] = df['Sex'].map({'M': 0, 'F': 1})\nsick = df['Outcome'] == 'ill'\n"
    code += "y = df['Attrition'].values\nimg_key = 'photo'\nbatch[img_key]\nkey = 'a'\nkey = 'b'\nbatch[key]\n"
    drawing = drawing_of(code, tmp_path)
    table = drawing.table("patients.csv")
    assert {"Age", "Sex", "Outcome"} <= {*table.columns}
    assert {*table["Sex"]} == {"M", "F"} and {*table["Outcome"]} == {"ill", "other"}
    assert table["Age"].dtype.kind == "f" and {*table["Attrition"]} == {0, 1}
    assert "photo" in drawing.names and not {"a", "b"} & {*drawing.names}


def test_missing_weights_leave_a_network_as_it_begins_and_the_page_says_so(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    before, there = net.weight.detach().clone(), tmp_path / "there.pth"
    torch.save({"weight": before + 1, "bias": net.bias.detach()}, there)
    drawing = drawing_of("net = nn.Conv2d(1, 8, 3)", tmp_path)
    with stood_in(drawing):
        net.load_state_dict(torch.hub.load_state_dict_from_url("http://127.0.0.1:1/net.pth", model_dir=str(tmp_path)))
        net.load_state_dict(torch.load("no_model.pt")["state_dict"])
        assert torch.equal(net.weight, before)
        said = drawing.in_words()
        assert said.startswith("The pretrained parts were not here") and said.count("net.pth and 1 more") == 1
        assert "uploads are the app's" not in said, "its network is not the app's"
        images, labels = torch.load("client_0_train.pt")[:4]
        assert images.shape == (4, 1, 28, 28) and labels.tolist() == [0, 1, 0, 1]
        net.load_state_dict(torch.load("round_3.pt"))
        assert torch.equal(net.weight, before)
        net.load_state_dict(torch.load(there))
    assert torch.equal(net.weight, before + 1)
    with pytest.raises(FileNotFoundError):
        torch.load("no_model.pt")


@pytest.mark.parametrize(
    ("end", "read"), [("jpg", "Image.open(path).size == (64, 64)"), ("wav", "len(heard(path)) > 0")]
)
def test_missing_folders_of_an_authors_machine_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, read: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code = f"""
import os
from PIL import Image
from scipy.io.wavfile import read
def heard(path):
    with open(path, "rb") as file:
        rate, values = read(file)
    return values[:rate // 16000]
root = "/srv/of_the_author/data/client_1"
classes = sorted(os.listdir(root))
files = [os.path.join(root, each, name) for each in classes for name in os.listdir(os.path.join(root, each))]
assert len(classes) == 3 and len(files) == 72 and all(map(os.path.isfile, files))
path = files[5]
assert path.endswith(".{end}")
assert {read}
"""
    with stood_in(drawing_of(f"of = {{'no': 0, 'mild': 1, 'severe': 2}}\nend = '.{end}'", tmp_path)):
        exec(code, {})


def test_made_up_sounds_differ_by_class_and_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth as many as pictures at most."""
    assert odd_files.MOST_DRAWN == 20_000
    monkeypatch.setattr(odd_files, "MOST_DRAWN", 3_000)
    heard = [np.abs(np.fft.rfft(each)).argmax() for each in sounds(100, 100, np.random.default_rng(0))]
    assert len({*heard}) == 100
    drawing = drawing_of("net = Net(num_classes=1000)\nend = '.wav'", tmp_path)
    fill(drawing, tmp_path / "made")
    assert len([*tmp_path.glob("made/*.wav")]) == 300


def test_missing_folders_and_files_are_drawn_where_the_app_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drawing = drawing_of("files = glob('*.jpg')\nof = {'no': 0, 'mild': 1, 'severe': 2}", tmp_path)
    code = """
import os, torch
from PIL import Image
assert sorted(os.listdir("scans/train")) == ["mild", "no", "severe"]
assert len(os.listdir("scans/train/mild")) == 24 and Image.open("scans/train/mild/1.jpg").size == (64, 64)
assert len(os.listdir("scans/normal")) == 72 and Image.open("elsewhere/9.png").size == (64, 64)
with open("flows.csv") as file, open("made.csv", "w") as made:
    made.write(file.readline())
    assert sum(1 for _ in file) == 800
import pandas
assert len(pandas.read_csv("ratings/ratings.csv")) == 800
assert [len(part) for part in torch.utils.data.random_split(range(600), [50_000, 10_000])] == [500, 100]
import glob, pathlib
(path,) = pathlib.Path("dataset/10%").glob("*.csv")
assert len(pandas.read_csv(path)) == 800
assert glob.glob("sites/*/part_[0-9].csv") == ["sites/1/part_1.csv"]
assert [str(path) for path in pathlib.Path("raw").rglob("*.csv")] == ["raw/1.csv"]
pathlib.Path("client_data").mkdir()
assert glob.glob("client_data/*.csv") == ["client_data/1.csv"]
assert not glob.glob("results/*.csv") and not glob.glob("*.tsv") and glob.glob("mad*.csv") == ["made.csv"]
"""
    with stood_in(drawing):
        exec(code, {})
        with pytest.raises(FileNotFoundError):
            exec("import os; os.listdir('results')", {})
    assert Path("made.csv").read_text().count("\n") == 1
    with pytest.raises(FileNotFoundError):
        exec("open('flows.csv')", {})


def test_an_app_that_ends_without_its_folder_of_data_goes_on(tmp_path: Path) -> None:
    code = """
import os, pathlib, sys
def looked(folder):
    if not pathlib.Path(folder).exists():
        raise FileNotFoundError(folder)
    if not os.path.isdir(folder):
        print("none")
        sys.exit(1)
    assert pathlib.Path(folder).is_dir(), folder
    if os.path.isdir(folder):
        print("there")
    else:
        raise NotADirectoryError(folder)
    if os.path.isdir(folder):
        raise FileExistsError(folder)
    found = os.path.exists(folder)
    if not found:
        sys.exit(1)
    gone = [str(each) for each in [folder] if not pathlib.Path(each).exists()]
    if gone:
        raise FileNotFoundError(gone)
    return os.path.exists(folder)
"""
    (tmp_path / "looks.py").write_text(code)
    told: dict[str, object] = {}
    exec(compile(code, str(tmp_path / "looks.py"), "exec"), told)
    with stood_in(drawing_of("", tmp_path)):
        assert not told["looked"](tmp_path / "dataset"), "a condition that ends nothing gets the truth"
        with pytest.raises(FileNotFoundError):
            told["looked"](tmp_path / "runs")
    with pytest.raises(FileNotFoundError):
        told["looked"](tmp_path / "dataset")


def test_what_an_app_writes_where_it_may_not_goes_to_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with stood_in(drawing_of("", tmp_path)):
        code = "import os\nos.makedirs('/sys/app/logs', exist_ok=True)\nopen('/sys/app/logs/a', 'w').write('b')\n"
        code += "import sqlite3\nsqlite3.connect('/sys/app/logs/kept.db').execute('create table t (x)')\n"
        exec(f"{code}assert sorted(os.listdir('/sys/app/logs')) == ['a', 'kept.db']", {})
    assert (tmp_path / "elsewhere/sys/app/logs/a").read_text() == "b"


def test_a_table_that_the_app_removes_first_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with stood_in(drawing_of("", tmp_path)):
        for place, remove in ((Path("a.csv"), Path.unlink), (Path("b.csv"), os.remove)):
            assert place.exists(), "it could be drawn"
            remove(place)
            assert not place.exists(), "and is written anew"
            place.write_text("x")
            assert place.exists()
            remove(place)
    assert not [*tmp_path.glob("*.csv")]


def test_other_removals_are_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = """
import os, shutil, tempfile
os.makedirs("kept/inner")
for name in ("kept/a.csv", "kept/inner/b.bin", "c"):
    open(name, "w").close()
os.symlink("nowhere", "link.csv")
shutil.rmtree("kept")
os.remove(b"c")
os.unlink("link.csv")
with tempfile.TemporaryDirectory(dir=".") as folder:
    open(os.path.join(folder, "d.csv"), "w").close()
for _ in range(2):
    if os.path.exists("shard.pt"):
        os.remove("shard.pt")
"""
    with stood_in(drawing_of("", tmp_path)):
        exec(code, {})
        for gone in ("lock.pid", "results/e.csv", "shard.pt"):
            with pytest.raises(FileNotFoundError):
                exec(f"import os\nos.remove('{gone}')", {})
    assert [each.name for each in tmp_path.iterdir()] == ["code.py"]


@pytest.mark.long
def test_places_of_a_larger_data_set_are_few_drawn_examples(tmp_path: Path) -> None:
    drawing = drawing_of("fds = FederatedDataset(partitioner=NaturalIdPartitioner(partition_by='writer_id'))", tmp_path)
    with stood_in(drawing):
        assert len(torch.utils.data.Subset(range(9), [8])) == 1
        hub = importlib.import_module("datasets").load_dataset("someone/cifar10", None, None, None, "test")
        assert len(hub) == 200, "its split by place"
        assert len(hub.select(range(5000, 9000))) == 200 and hub.select([7, 900])["label"] == [7]
        assert set(drawing.hub("flwrlabs/femnist", None, "train")["writer_id"]) == {str(n) for n in range(15)}
        assert len(torch.utils.data.Subset(range(600), range(50_000, 60_000))) == 600
        assert list(torch.utils.data.Subset(range(600), range(590, 620))) == list(range(590, 600))
        assert len(torch.utils.data.Subset(range(600), torch.arange(598, 700))) == 2
        assert list(torch.utils.data.Subset(range(600), range(600 - 3000, 600))) == list(range(600))
        assert len(hub.select(iter(range(9)))) == 9
        with pytest.raises(ValueError, match="train"):
            drawing.saved("partitions/client_0")["train"]
        assert {*drawing.saved("all")} == {"train", "test"}


def test_columns_of_a_format_are_arrays_as_before_datasets_4(tmp_path: Path) -> None:
    rows = importlib.import_module("datasets").Dataset.from_dict({"x": [[1.0, 2.0]] * 3, "y": [0, 1, 2]})
    with data_sets_of(None):
        assert list(rows["y"]) == [0, 1, 2]
        rows.set_format("numpy")
        assert (rows["x"] / 2.0).shape == (3, 2) and rows["y"][np.array([2, 0])].tolist() == [2, 0]
        assert rows.with_transform(lambda batch: {"y": [n + 1 for n in batch["y"]]})["y"][:1] == [1]


def test_sizes_of_a_larger_data_set_divide_the_drawn_one_in_proportion(tmp_path: Path) -> None:
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    rows = importlib.import_module("datasets").Dataset.from_dict({"label": [n % 3 for n in range(600)]})
    made = [
        partitioners.SizePartitioner([30_000, 20_000]),
        partitioners.InnerDirichletPartitioner([30_000, 20_000], partition_by="label", alpha=1.0),
    ]
    drawing = drawing_of("", tmp_path)
    for each in made:
        each.dataset = rows
        with stood_in(drawing):
            with pytest.raises(ValueError, match="size"):
                each.load_partition(0)
            drawing.note("someone/cifar10", "600 drawn pictures")
            assert [len(each.load_partition(n)) for n in (0, 1)] == [360, 240]
        drawing.asked.clear()
    with stood_in(drawing):
        drawing.note("someone/cifar10", "600 drawn pictures")
        parts = torch.utils.data.random_split(range(600), [45_000, 5_000])
        assert [len(each) for each in parts] == [540, 60]
        assert len(torch.utils.data.DataLoader(range(60), batch_size=1024, drop_last=True)) == 1
        assert len(torch.utils.data.DataLoader(range(60), 32, drop_last=True)) == 1
        drawing.asked.clear()
        assert len(torch.utils.data.DataLoader(range(60), batch_size=1024, drop_last=True)) == 0


def test_tables_of_a_database_that_is_not_here_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("sqlalchemy")
    library.create_engine = lambda address: 1 / 0  # type: ignore[attr-defined]
    pytest.importorskip("datasets")  # looks for it, too
    monkeypatch.setitem(sys.modules, "sqlalchemy", library)
    code = """
import pandas, sqlalchemy
rows = pandas.read_sql_query("select * from payments", sqlalchemy.create_engine(None))
assert rows[["amount", "is_fraud"]].shape == (800, 2) and set(rows["is_fraud"]) == {0, 1}
pieces = pandas.read_sql(sql="select * from payments", con=None, chunksize=500)
assert [*next(pieces)[["amount"]]] == ["amount"]
"""
    with stood_in(drawing_of(code, tmp_path)) as drawing:
        exec(code, {})
    assert [*drawing.asked] == ["select * from payments"]


def test_a_table_has_the_column_by_which_it_is_divided_among_clients(tmp_path: Path) -> None:
    drawn = drawing_of("partitioner = NaturalIdPartitioner(partition_by='Player')\n", tmp_path).table("plays.csv")
    assert drawn["Player"].nunique() == 20 and "Player" in drawn.columns and len(drawn.columns) == 12


def test_pictures_of_an_unknown_set_have_the_networks_channels(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for channels, mode in ((1, "L"), (3, "RGB")):
        drawn = drawing_of(f"net = Conv2d({channels}, 6, 5)\nx = row['image']\n", tmp_path)
        assert drawn.hub("somebody/scans", None, "train")[0]["image"].mode == mode


def test_columns_that_are_located_by_name_are_drawn_at_once(tmp_path: Path) -> None:
    drawn = drawing_of("", tmp_path).table("pulses.csv")
    assert drawn.loc[:, ("age", "pulse")].shape == (800, 2) and drawn.loc[:5, "weight"].shape == (6,)
    assert drawn.loc[drawn["age"] > 0, ["age"]].shape == (800, 1) and drawn.loc[3]["age"] == drawn["age"][3]
    assert drawn.loc[:, [name == "age" for name in drawn.columns]].columns.tolist() == ["age"]
    drawn.loc[3, "age"] = 7.0
    assert drawn.loc[3, "age"] == 7.0 and {"age", "pulse", "weight"} <= {*drawn.columns}


def test_columns_that_are_used_as_strings_are_strings(tmp_path: Path) -> None:
    code = "a = rows['Nation'].str.strip()\nb = rows['school'] + '_1'\nc = rows['Label'].str.lower()\n"
    code += (
        "p = rows['pace'] + 1\nd = rows['review'].str.lower()\ne = rows['sex'].str.upper()\nf = rows['sex'] == 'male'\n"
    )
    drawn = drawing_of(code, tmp_path).table("marks.csv")
    for name in ("Nation", "school", "Label"):
        assert drawn[name].str.len().min() > 0 and drawn[name].nunique() == 3
    assert drawn["pace"].dtype.kind == "f" and drawn["review"].nunique() > 3
    assert set(drawn["sex"]) == {"male", "other"}, "strings that the code names come first"


def test_a_table_has_no_column_that_the_app_adds_itself(tmp_path: Path) -> None:
    code = """
rows["target"] = rows["Label"].apply(int)
rows["day"] = to_datetime(rows.day)
rows["pace"] = rows["pace"].fillna(0)
"""
    drawn = drawing_of(code, tmp_path).table("flows.csv")
    assert {"Label", "day", "pace"} <= {*drawn.columns} and "target" not in drawn.columns


@pytest.mark.parametrize("what", ["[each for each in unused if each in rows.columns]", "unused"])
def test_columns_that_are_dropped_by_a_list_are_drawn_beyond_the_features(tmp_path: Path, what: str) -> None:
    code = f"unused = ['Flow ID']\nunused = ['Src IP']\nrows = rows.drop({what}, axis=1)\nnet = Linear(6, 2)\n"
    drawn = drawing_of(code, tmp_path).table("flows.csv")
    assert len(drawn.drop(["Flow ID", "Src IP", "label"], axis=1).columns) == 6 and len(drawn.columns) == 9


def test_inputs_that_are_cut_from_a_table_are_as_many_as_the_network_takes(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = "net = Linear(4, 2)\nrows, y = table.values, table['label']\n{} = rows[:, 3:-2].astype(float)\n"
    for_inputs = drawing_of(code.format("X"), tmp_path)
    assert for_inputs.table("honey.csv").iloc[:, 3:-2].shape[1] == 4
    assert len(for_inputs.hub("somebody/honey", None, "train").column_names) == 9
    assert len(drawing_of(code.format("late"), tmp_path).table("honey.csv").columns) == 5, "no slice of inputs"
    assert drawing_of("net = Linear(4, 2)\nx = rows[:, :-1]", tmp_path).table("honey.csv").shape[1] == 5


def test_pictures_have_the_flags_that_the_code_reads_of_an_example(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = "def group(row):\n    return 2 * int(row['Male']) + row['Young'], row['image'], config['lr']\n"
    code += "rows = table[['image', 'label']]\nexample['pixels'] = example['image']\n"
    for name in ("somebody/faces", "somebody/cifar10"):
        drawn = drawing_of(code, tmp_path).hub(name, None, "train")
        assert {*drawn.column_names} - {"image", "img", "label"} == {"Male", "Young"}
        assert set(drawn["Male"]) == {0, 1} and drawn["Male"][:] != drawn["Young"][:]


def test_columns_that_the_run_config_names_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    config = {"dataset-input-feature": "scan_image", "dataset-target-feature": "kind", "num-features": 3, "lr": "adam"}
    assert Drawing([], tmp_path, 0, config).names == ["scan_image", "kind"]
    sized = Drawing([], tmp_path, 0, {"input-dim": 67, "num-classes": 5})
    assert (sized.features, sized.classes) == (67, 5)
    code = SourceFile(tmp_path / "app.py", ast.parse("x, y = batch[key], batch['img']\n"))
    drawn = Drawing([code], tmp_path, 0, config).hub("somebody/letters", None, "train")
    assert {*drawn.column_names} == {"scan_image", "kind"} and drawn[0]["scan_image"].size == (32, 32)
    saved = Drawing([code], tmp_path, 0, {"dataset-name": "somebody/emnist_letters"}).saved(
        "clients/client_6/train_data"
    )
    assert saved.features["label"].num_classes == 26 and saved[0]["image"].size == (28, 28)


def test_a_saved_set_without_its_rows_is_drawn_as_it_declares_itself(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        series=datasets.Sequence(datasets.Value("float64"), length=16),
        label=datasets.ClassLabel(names=["normal", "defect"]),
        speed=datasets.Value("int32"),
        image=datasets.Image(),
        text=datasets.Value("string"),
    )
    place = tmp_path / "clinic" / "part_0"
    (place / "train").mkdir(parents=True)
    (place / "train" / "dataset_info.json").write_text(json.dumps({"features": kinds.to_dict()}))
    with stood_in(drawing_of("", tmp_path)) as drawing:
        drawn = datasets.load_from_disk("/home/somebody/clinic/part_0/train")  # of its author
        assert Path("/home/somebody/clinic/part_0").is_dir() and not Path("/home/somebody/clinic").exists()
    assert drawn.features == kinds and len(drawn) == 600 and set(drawn["label"]) == {0, 1}
    assert np.std(drawn[0]["series"]) > 0 and len(drawn[0]["series"]) == 16
    assert "600 drawn examples with columns series, label, speed, image, text" in drawing.in_words()


def test_pairs_of_texts_and_columns_that_are_removed_are_drawn(tmp_path: Path) -> None:
    code = """
def tokens(rows):
    return tokenizer(rows["premise"], rows["hypothesis"], truncation=True)
rows = data.map(tokens, batched=True, remove_columns=["idx", "premise", "hypothesis"])
"""
    drawn = drawing_of(code, tmp_path).hub("glue", "rte", "test")
    assert set(drawn.column_names) == {"premise", "hypothesis", "label", "idx"} and set(drawn["label"]) == {0, 1}
    plain = drawing_of('rows = tokenizer(data["text"])', tmp_path).hub("imdb", None, "test")
    assert set(plain.column_names) == {"text", "label"}


def test_a_mirror_gives_the_split_that_is_named_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("datasets")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "test.csv").write_text("a\n1\n")
    monkeypatch.setattr(library, "load_dataset", lambda *args, **told: (args, told))
    with data_sets_of(tmp_path):
        (kind,), told = library.load_dataset("someone/one", None, None, None, "test")
        assert kind == "csv" and told["split"] == "test" and [*told["data_files"]] == ["test"]
        own = library.load_dataset("csv", None, None, "own.csv", "train")
        assert own == (("csv", None), {"data_dir": None, "data_files": "own.csv", "split": "train"})


def test_the_cpu_is_lent_where_a_gpu_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with cpu_lent() as asked:
        net = torch.nn.Linear(2, 2).to(torch.device("cuda"))
        assert net(torch.zeros(1, 2).to("cuda:0").cuda()).device.type == "cpu" and asked == ["cuda", "cuda:0"]
        assert torch.cuda.get_device_name(0) == "CPU" and torch.cuda.synchronize()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).to("cuda")


def test_sets_of_keras_and_openml_have_their_shapes_and_the_page_names_them(tmp_path: Path) -> None:
    hooks = Hooks(drawing_of("", tmp_path), lambda path, name: False)

    def unreachable(*args: object) -> None:
        raise OSError("no network")

    (images, labels), (_, tests) = hooks.fetched(partial(hooks.keras, "cifar10"), unreachable)
    assert images.shape == (600, 32, 32, 3) and labels.shape == (600, 1) and len(tests) == 200
    rows = hooks.fetched(hooks.openml, unreachable, 554).get_data(dataset_format="array")[0]
    assert rows.shape == (800, 785) and {*rows[:, -1]} == {*range(10)}
    assert "Keras's cifar10" in hooks.drawing.in_words() and "mnist_784" in hooks.drawing.in_words()


def test_trainings_of_keras_are_recorded_with_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Network:
        def fit(self, x: object, y: object, epochs: int = 1) -> int:
            return epochs

    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(Model=type("Model", (Network,), {})))
    fitted = FittedBy()
    with fitted.looking():
        network = sys.modules["keras"].Model()
        assert network.fit(np.zeros((4, 2, 2)), np.eye(3)[[0, 2, 2, 1]], epochs=5) == 5
        assert network.fit(np.zeros((2, 2)), np.array([[0.5], [1.0]])) == 1  # no classes
    (fit,) = fitted.fits
    assert fit.kind == "network" and fit.rows.shape == (4, 4) and fit.labels.tolist() == [0, 2, 2, 1]


def test_defaults_before_a_slash_are_read(tmp_path: Path) -> None:
    assert drawing_of("def net(num_classes=7, /, width=3): ...", tmp_path).classes == 7


def test_a_set_of_pictures_takes_its_arguments_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.chdir(tmp_path)
    with stood_in(drawing_of("", tmp_path)):
        made = datasets.MNIST("data", False, None, None, True)
    assert not made.train and made.data.shape == (200, 28, 28)


def test_an_apps_own_files_are_found_in_other_folders_and_by_paths_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files" / "code").mkdir(parents=True)
    (tmp_path / "files" / "code" / "config.json").write_text('{"rounds": 3}')
    monkeypatch.chdir(tmp_path / "files")
    with stood_in(drawing_of("", tmp_path / "files")):
        assert Path("config.json").exists() and json.loads(Path("../code/config.json").read_text()) == {"rounds": 3}
        with open("code\\config.json") as file:  # noqa: PTH123
            assert json.load(file) == {"rounds": 3}
        with open("../Code//config.json") as file:  # noqa: PTH123
            assert json.load(file) == {"rounds": 3}, "capitals of folders do not count on Windows"
        with open("config.json", "w") as file:  # noqa: PTH123
            file.write("{}")
        with open("logs/one/run.log", "a") as file:  # noqa: PTH123
            file.write("begun")
        with pytest.raises(FileNotFoundError):
            open("other.json")  # noqa: PTH123, SIM115
    assert (tmp_path / "files" / "config.json").read_text() == "{}"
    assert (tmp_path / "files" / "code" / "config.json").read_text() == '{"rounds": 3}'


def test_names_of_earlier_libraries_are_lent_to_code_that_has_them() -> None:
    pandas = pytest.importorskip("pandas")
    with older_names_lent("import numpy as np, pandas\nnp.float; table.append; np.Inf"):
        assert np.float is float and np.Inf == np.inf  # type: ignore[attr-defined]
        table = pandas.DataFrame({"a": [1]}).append({"a": 2}, ignore_index=True)
        assert table["a"].tolist() == [1, 2]
        texts = pandas.DataFrame({"kind": ["tcp", "udp"]})
        texts.loc[0, "kind"] = 0  # an error from pandas 3 on
        assert texts["kind"].tolist() == [0, "udp"]
    assert not hasattr(pandas.DataFrame, "append")
    with older_names_lent("import torch\niter(loader).next()"):
        assert iter(torch.utils.data.DataLoader([1, 2])).next().tolist() == [1]  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with older_names_lent("import torch\nReduceLROnPlateau(optimizer, 'min', verbose=True)"):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", patience=0, verbose=True)  # type: ignore[call-arg]
        plateau.step(1.0)
        plateau.step(2.0)
        assert plateau.get_last_lr() == [0.1]
    with older_names_lent("import numpy"), pytest.raises(AttributeError):
        np.float  # type: ignore[attr-defined]  # noqa: B018


def test_modules_of_earlier_libraries_are_lent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("keras", "keras.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["keras"].utils = sys.modules["keras.utils"]  # type: ignore[attr-defined]
    sys.modules["keras.utils"].to_categorical = np.eye  # type: ignore[attr-defined]
    code = "from keras.utils.np_utils import to_categorical\nassert to_categorical(2).sum() == 2"
    with older_names_lent(code):
        exec(code, {})
    with pytest.raises(ImportError):
        exec(code, {})
    with older_names_lent("from keras.preprocessing.text import Tokenizer"):  # of a Keras that can't be imported
        assert "keras.preprocessing.text" not in sys.modules


def test_methods_of_keras_that_took_generators_keep_their_arguments() -> None:
    calls: list[tuple[str, object, dict[str, object]]] = []
    model = SimpleNamespace(
        fit=lambda x, **given: calls.append(("fit", x, given)),
        evaluate=lambda x, **given: calls.append(("evaluate", x, given)),
    )
    fit_generator(model, "batches", 5, epochs=2, workers=4, use_multiprocessing=True)
    evaluate_generator(model, generator="batches", steps=3)
    assert calls == [
        ("fit", "batches", {"steps_per_epoch": 5, "epochs": 2}),
        ("evaluate", "batches", {"steps": 3}),
    ]


def test_folders_of_pictures_are_drawn_by_whatever_name_they_are_given(tmp_path: Path) -> None:
    hooks = Hooks(
        drawing_of("layers.Dense(64)\nlayers.Dense(units=3, activation='softmax')", tmp_path), lambda *_: False
    )

    def listed(directory: str, labels: str) -> list[str]:
        return sorted(path.name for path in Path(directory).iterdir())

    assert hooks.folder(listed, labels="inferred", directory="/gone/train") == ["class_0", "class_1", "class_2"]
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.png").touch()
    assert hooks.folder(listed, directory=str(tmp_path / "flat"), labels=None) == ["1.png"], "pictures without classes"


def test_loaders_start_no_processes() -> None:
    with replaced(torch.utils.data.DataLoader, "__init__", loaded_here):
        loader = torch.utils.data.DataLoader([1, 2, 3], 2, num_workers=4, persistent_workers=True, drop_last=True)
    assert loader.num_workers == 0 and [len(batch) for batch in loader] == [2]


def test_a_package_that_is_not_installed_matters_only_when_it_is_called() -> None:
    names: dict[str, object] = {}
    code = "import gone_as_such.inner as inner\nfrom gone_as_such.more import Base\nclass Own(Base): ...\n"
    with absent_left_out(["gone_as_such"]) as silent:
        exec(code, names)
        assert eval("inner.__version__", names)
        for what in ("inner.begin()", "Own()", "Base.of(3)", "inner.begin.__code__.co_varnames"):
            with pytest.raises(ModuleNotFoundError, match="gone_as_such is not installed here"):
                eval(what, names)
        assert isinstance(3, names["Base"]) is False and silent == []  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        exec("import gone_as_such", {})


def test_a_missing_package_may_be_prepared_on_import_but_gives_no_result(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    with absent_left_out(["gone_as_such"]):
        alone = {"gone_as_such.init()": False, "found = gone_as_such.init()": True}
        inner = {"gone_as_such.Config().apply(3)": True, "print(gone_as_such.load('weights'))": True}
        for code, fails in {**alone, **inner}.items():
            file.write_text(f"import gone_as_such\n{code}\n")
            linecache.checkcache(str(file))
            found = attempt(partial(exec, compile(file.read_text(), str(file), "exec"), {}))
            assert (isinstance(found, Failure) and "is called" in found.reason) is fails, code


def test_a_list_of_columns_that_is_made_from_itself_is_no_endless_search(tmp_path: Path) -> None:
    code = "COLS = df.columns.tolist()\nCOLS = [c for c in COLS if c != 'y']\nprint(df[COLS], df['age'])\n"
    assert "age" in drawing_of(code, tmp_path).table("patients.csv").columns


def test_many_places_of_the_same_kind_are_one_phrase(tmp_path: Path) -> None:
    drawing = Drawing([], tmp_path)
    assert drawing.in_words() == ""
    for number in range(6):
        drawing.note(f"partition_{number}/train", "600 drawn rows")
    drawing.note("scaler.pkl", "a drawn scaler")
    said = "600 drawn rows in place of partition_0/train and 5 more; a drawn scaler in place of scaler.pkl."
    assert said in drawing.in_words()


def test_a_missing_list_of_records_is_drawn_like_the_one_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "broken.json").write_text("{")
    (tmp_path / "data" / "ham.json").write_text('[{"text": "so it is", "label": 0, "who": "a1"}]')
    with stood_in(drawing_of("", tmp_path)) as drawing:
        found = json.loads((tmp_path / "data" / "spam.json").read_text())
        with pytest.raises(FileNotFoundError):
            (tmp_path / "settings.json").read_text()
    assert len(found) == 600 and [each["label"] for each in found[:3]] == [0, 1, 0] and " " in found[0]["text"]
    assert list(found[0]) == ["text", "label", "who"] and "drawn records with text, label, who" in drawing.in_words()


def test_a_missing_list_that_the_code_can_do_without_is_not_drawn(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text('[{"round": 1.0, "loss": 0.5}]')
    place, file, names = tmp_path / "results.json", tmp_path / "task.py", dict[str, Any]()
    code = (
        f"import json\ntry:\n    found = json.load(open({str(place)!r}))\nexcept FileNotFoundError:\n    found = []\n"
    )
    file.write_text(code)
    linecache.checkcache(str(file))
    with stood_in(drawing_of("", tmp_path)):
        exec(compile(code, str(file), "exec"), names)
    assert names["found"] == []


@pytest.mark.parametrize(("place", "of_versions"), [("/app/src/task.py", False), ("/x/site-packages/lib/a.py", True)])
def test_a_name_that_the_apps_own_module_lacks_is_of_no_version(place: str, of_versions: bool) -> None:
    why = f"The app raised ImportError: cannot import name 'Net' from 'src.task' ({place}) (app.py, line 1)"
    asked: Any = SimpleNamespace(
        drawing=None, unmade="", versions=["it asks for torch==2.1.1, and 2.15.0 is installed."]
    )
    assert ("Other versions may be why" in AppAudit.on_drawn(asked, why)) is of_versions


def test_a_version_is_blamed_whose_package_the_error_names() -> None:
    versions = [
        "it asks for torch==2.3.1, and 2.15.0 is installed.",
        "it asks for trl==0.8.1, and 1.16.0 is installed.",
    ]
    why = "ImportError: cannot import name 'Collator' from 'trl' (/x/site-packages/trl/__init__.py)"
    said = AppAudit.on_drawn(SimpleNamespace(drawing=None, unmade="", versions=versions), why)  # type: ignore[arg-type]
    assert said.endswith("Other versions may be why: it asks for trl==0.8.1, and 1.16.0 is installed.")


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("AttributeError: Can only use .str accessor with string values, not floating", "Drawn data"),
        ("TypeError: 'dict' object is not callable", "Drawn data"),
        ("AttributeError: module 'numpy' has no attribute 'float'", "Other versions"),
        ("TypeError: fit() got an unexpected keyword argument 'workers'", "Other versions"),
        ("OSError: no space left", ""),
        ("NameError: name 'RecommenderModel' is not defined (client/fl_client.py, line 80)", ""),
    ],
)
def test_an_error_names_drawn_data_or_versions_as_its_kind_allows(tmp_path: Path, why: str, said: str) -> None:
    drawing = drawing_of("", tmp_path)
    drawing.note("a.csv", "8 drawn rows")
    asked: Any = SimpleNamespace(
        drawing=drawing, unmade="", versions=["it asks for torch==2.1.1, and 2.15.0 is installed."]
    )
    found = AppAudit.on_drawn(asked, why)
    assert [each for each in ("Drawn data", "Other versions") if each in found] == ([said] if said else [])


def test_networks_take_their_weights_by_name(tmp_path: Path) -> None:
    net, weights = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).state_dict()
    with stood_in(drawing_of("", tmp_path)):
        net.load_state_dict(state_dict=weights, strict=True)
        assert torch.equal(net.weight, weights["weight"])
        torch.save(weights, tmp_path / "w.pth")
        with cpu_lent():
            assert torch.equal(torch.load(f=tmp_path / "w.pth", map_location="cuda")["weight"], net.weight)
        net.load_state_dict(state_dict=torch.load("gone_model.pth"), strict=True)
    assert torch.equal(net.weight, weights["weight"])


def test_more_clients_than_drawn_examples_get_some_each(tmp_path: Path) -> None:
    drawing = drawing_of("", tmp_path)
    with stood_in(drawing):
        drawing.note("somebody's set", "drawn examples")
        parts = torch.utils.data.random_split(range(600), [0] * 1000)  # 600 // 1000 of each
        assert [len(part) for part in parts] == [8] * 1000 and [*parts[80]] == [*range(40, 48)]
        assert [len(part) for part in torch.utils.data.random_split(range(600), [0.5, 0.5])] == [300, 300]


def test_as_many_examples_are_drawn_as_many_clients_divide(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    drawing = drawing_of("", tmp_path)
    with stood_in(drawing):
        partitioner = partitioners.PathologicalPartitioner(100, "label", 2)
        drawn = drawing.hub("ylecun/mnist", None, "train")
        assert len(drawn) == 2000 and "2000 drawn pictures" in drawing.in_words()
        partitioner.dataset = drawn
        assert len(partitioner.load_partition(99)) >= 10


def test_rows_of_the_hub_have_more_columns_than_the_code_names(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = "rows = part['Concentration_Class']\nx = part.values[:, 4:-2]\n"
    drawn = drawing_of(code, tmp_path).hub("somebody/spectra.csv", None, "train")
    assert len(drawn.column_names) == 10 and drawn.column_names[-1] == "Concentration_Class"
    drawn = drawing_of(f"{code}net = Linear(4, 2)\n", tmp_path).hub("somebody/spectra.csv", None, "train")
    assert len(drawn.column_names) == 10, "four inputs, between four columns and two"


def test_files_that_a_package_lacks_are_not_drawn(tmp_path: Path) -> None:
    drawing = drawing_of("", tmp_path)
    with stood_in(drawing), pytest.raises(FileNotFoundError):
        Path("/elsewhere/lib/site-packages/peft-0.6.2.dist-info/entry_points.txt").read_text()
    assert not drawing.asked


def test_a_part_that_an_app_leaves_empty_stays_so(tmp_path: Path) -> None:
    drawing = drawing_of("", tmp_path)
    with stood_in(drawing):
        drawing.note("somebody's set", "drawn examples")
        assert [len(part) for part in torch.utils.data.random_split(range(600), [600, 0])] == [600, 0]
        assert [len(part) for part in torch.utils.data.random_split(range(600), [50_000, 0])] == [600, 0]


def test_columns_hold_what_a_mapping_names_and_what_a_function_adds_texts_to(tmp_path: Path) -> None:
    code = """
kinds = {"nv": 0, "mel": 1, "df": 2}
rows["label"] = rows["dx"].map(kinds)
def place(x):
    return os.path.join("scans", x + ".jpg")
rows["path"] = rows["scan_code"].apply(place)
rows["head"] = rows["lesion"].apply(lambda text: text.split("_")[0])
rows["photo"] = rows["image_id"].apply(place)
rows["twice"] = rows["size"].apply(lambda x: x + 1)
"""
    drawn = drawing_of(code, tmp_path).table("scans.csv")
    assert {*drawn["dx"]} == {"nv", "mel", "df"} and drawn["size"].dtype.kind == "f"
    assert all(isinstance(each, str) for name in ("scan_code", "lesion") for each in drawn[name])
    assert drawn["image_id"].nunique() == len(drawn), "each picture has a file of its own"


def test_a_table_has_no_more_columns_than_the_network_takes(tmp_path: Path) -> None:
    drawing = drawing_of("x = rows[['a', 'b', 'c', 'd', 'e', 'f']]\nWIDTH = 4\nnet = Linear(WIDTH, 2)\n", tmp_path)
    assert drawing.features == 4 and drawing.table("rows.csv").shape[1] == 7
    drawing.fitted = {"columns": -2}
    assert [*drawing.table("rows.csv").columns] == ["a", "b", "c", "d", "label"]
