"""Stand-ins of pickles, certificates and arrays; other scripts where one fails."""

import ast
import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fl_privacy.auditing.app import hub_models, odd_files
from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.lent import older_names_lent
from fl_privacy.auditing.app.odd_files import Few, Score, saved_by_torch
from fl_privacy.auditing.app.scripts import SourceFile, find_scripts
from fl_privacy.auditing.app.stand_in import Drawing, column
from fl_privacy.auditing.app.stood_in import stood_in
from fl_privacy.errors import UserError
from tests.flower import project_parts as parts
from tests.flower.untouched_apps import attacked_only


def drawing_of(code: str, folder: Path) -> Drawing:
    return Drawing([SourceFile(folder / "app.py", ast.parse(code))], folder)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_arrays_have_the_shape_that_a_function_takes_by_default(tmp_path: Path) -> None:
    code = (
        "def build(input_shape=(48, 48, 3), classes=4):\n    return Sequential([Conv2D(8, 3, input_shape=input_shape)])"
    )
    assert odd_files.archive(drawing_of(code, tmp_path), "node1/X.npy").shape[1:] == (48, 48, 3)


def test_files_of_torch_have_the_keys_that_the_code_takes_of_them(tmp_path: Path) -> None:
    code = """
import torch
def load(path, weights):
    part, kept = torch.load(path, map_location="cpu"), torch.load(weights)
    blob = torch.load(path)
    net.load_state_dict(kept["model_state_dict"])
    return blob["features"], blob["labels"]
net = torch.nn.Linear(12, 3)
"""
    found = saved_by_torch(drawing_of(code, tmp_path), "parts/client_0.pt")
    assert {*found} == {"features", "labels"} and found["features"].shape == (600, 12)
    with stood_in(drawing_of("", tmp_path)):
        torch.nn.Linear(12, 3).load_state_dict(found)
    assert found["labels"].unique().tolist() == [0, 1, 2] and found["features"].dtype == torch.float32


def test_pickles_are_drawn_by_their_names_and_by_what_they_are_unpacked_to(tmp_path: Path) -> None:
    code = """
import pickle
with open("label_encoder.pkl", "rb") as file:
    encoder = pickle.load(file)
assert encoder.transform(["b", "a", "b"]).tolist() == [1, 0, 1] and len(encoder.classes_) == 3
with open("data.pkl", "rb") as file:
    X, y = pickle.load(file)
assert X.shape == (600, 5) and y.shape == (600,) and set(y) == {0, 1, 2}
with open("made.pkl", "wb") as file:
    pickle.dump(4, file)
with open("made.pkl", "rb") as file:
    assert pickle.load(file) == 4
"""
    drawing = drawing_of(f"n_features = 5\nnum_classes = 3\n{code}", tmp_path)
    with stood_in(drawing):
        exec(code, {})
    assert drawing.asked["label_encoder.pkl"] == "an encoder of labels" and "data.pkl" in drawing.in_words()
    with pytest.raises(FileNotFoundError):
        exec(code.replace("label_encoder", "gone"), {})


def test_a_saved_vectorizer_and_the_shares_of_clients_are_drawn(tmp_path: Path) -> None:
    code = """
import joblib, json
import pandas as pd
table = pd.read_csv("data/mails.csv")
assert {"mail_number", "text", "spam_label"}.issubset(table.columns)
with open("results/partitions_iid.json") as file:
    shares = json.load(file)
rows = table.iloc[shares["2"]]
vectorizer = joblib.load("results/tfidf_vectorizer.pkl")
found = vectorizer.transform(rows["text"].tolist())
assert found.shape == (len(rows), len(vectorizer.vocabulary_)) and found.nnz > 5 * len(rows)
"""
    drawing = drawing_of(code, tmp_path)
    with stood_in(drawing):
        exec(code, {})
    assert "a vectorizer of drawn texts" in drawing.in_words() and "600 examples for 10 clients" in drawing.in_words()


def test_folders_to_write_to_are_made(tmp_path: Path) -> None:
    with stood_in(drawing_of("", tmp_path)):
        torch.save({"a": 1}, "models/last.pt")
        importlib.import_module("pandas").DataFrame({"a": [1]}).to_csv("results/one/rounds.csv")
    assert torch.load(tmp_path / "models" / "last.pt") == {"a": 1} and (tmp_path / "results/one/rounds.csv").exists()


def test_certificates_are_empty(tmp_path: Path) -> None:
    with stood_in(drawing_of("", tmp_path)) as drawing:
        assert Path(".cache/ca.crt").read_bytes() == b"" and Path("server.key").read_text() == ""
        with pytest.raises(FileNotFoundError):
            Path("configs/weather.yaml").read_text()
    assert list(drawing.asked) == [".cache/ca.crt", "server.key"]


def test_a_file_on_another_machine_is_the_one_of_that_name_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "heart.csv").write_text("age,target\n61,1\n")
    pandas = importlib.import_module("pandas")
    with stood_in(drawing_of("", tmp_path)) as drawing:
        for place in ("/Users/somebody/work/heart.csv", "C:\\Users\\somebody\\heart.csv"):
            assert pandas.read_csv(place)["age"].tolist() == [61], place
        assert not drawing.asked


def test_drawn_tables_have_as_many_rows_and_columns_as_the_code_counts_on(tmp_path: Path) -> None:
    code = """
import pandas as pd
data = pd.read_csv("patients.csv").iloc[2200:, :]
data = data.drop("Unnamed: 0", axis=1)
y = data["SOURCE"]
X = data.drop("SOURCE", axis=1)
assert X.shape == (2200, 16) and set(y) == {0, 1}, (X.shape, set(y))
"""
    with stood_in(drawing_of(f"n_features = 16\n{code}", tmp_path)):
        exec(code, {})


def test_arrays_have_the_shape_that_enters_the_network(tmp_path: Path) -> None:
    with stood_in(drawing_of("Input(shape=(60, 2))", tmp_path)):
        assert np.load("train_X.npy").shape == (600, 60, 2) and np.load("trainY.npy").shape == (600,)
    with stood_in(drawing_of("Conv2D(8, 3, input_shape=(48, 48, 3))", tmp_path)):
        assert np.load("testx.npy").shape == (200, 48, 48, 3)


def test_few_examples_answer_code_that_has_the_number_of_many() -> None:
    few = np.arange(600 * 4).reshape(600, 2, 2).view(Few)
    assert np.reshape(few, (60_000, 2, 2, 1)).shape == (600, 2, 2, 1) and (few / 2).reshape(60_000, 4).shape == (600, 4)
    assert few[50_000:].shape == (100, 2, 2) and few[:50_000].shape == (600, 2, 2)
    assert few[np.arange(59_000, 59_100)].shape == (100, 2, 2) and few[10:20, :1].shape == (10, 1, 2)
    with pytest.raises(ValueError, match="reshape"):
        few.reshape(600, 3)


def test_other_scripts_are_run_where_no_client_trains_by_the_first(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "app" / name).mkdir(parents=True)
        for part in ("server", "client", "network"):
            (tmp_path / "app" / name / f"{part}.py").write_text(getattr(parts, part.upper()))
    (tmp_path / "app" / "a" / "client.py").write_text("raise NameError('nothing')\n" + parts.CLIENT)
    asked = AppAuditRequest(out=tmp_path / "out", victims=1, clients=1, seconds=0.0)
    with attacked_only(()):
        last = audit_app(read_app(tmp_path / "app"), asked).last
    assert last.models and not last.silence
    assert any("No client trained by a/server.py" in one and "nothing" in one for one in last.problems)
    (tmp_path / "app" / "b" / "client.py").write_text("raise KeyError('none')\n" + parts.CLIENT)
    session = audit_app(read_app(tmp_path / "app"), asked)
    assert "nothing" in session.last.silence and not any("b/server.py" in one for one in session.last.problems)
    record = json.loads((session.page.parent / "audit.json").read_text())
    assert "nothing" in record["headline"] and "b/server.py: no client answered: " in record["problems"][-1]
    chosen = {"server": "b/server.py", "clients": ["a/client.py"]}
    assert read_app(tmp_path / "app", chosen).another() is None


def test_the_first_error_counts_where_no_script_starts(tmp_path: Path) -> None:
    for name in ("one", "two"):
        text = f"import flwr as fl\nraise ValueError('{name}')\nfl.simulation.start_simulation(client_fn=None)\n"
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(UserError, match="one"):
        audit_app(read_app(tmp_path), AppAuditRequest(out=tmp_path / "out"))


def test_clients_in_the_folder_of_their_server_are_taken(tmp_path: Path) -> None:
    for name in ("main", "main2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "server.py").write_text(parts.SERVER)
        (tmp_path / name / "client.py").write_text(parts.CLIENT)
    found = find_scripts(tmp_path)
    assert found is not None and [each.parent for each in found.clients] == [found.server.parent]


def test_a_metric_of_the_hub_is_counted_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = ModuleType("evaluate")
    hub.load = lambda *args: 1 / 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evaluate", hub)
    code = "import datasets, evaluate\nmetric = datasets.load_metric('glue', 'mrpc')\n"
    with older_names_lent(code), stood_in(drawing_of(code, tmp_path)) as drawing:
        told: dict[str, Any] = {}
        exec(code, told)
    assert "glue mrpc" in Score.asked and not drawing.in_words()  # no data were drawn
    told["metric"].add_batch(predictions=torch.tensor([0, 1]), references=[0, 0])
    found = told["metric"].compute(predictions=[1, 2], references=[1, 2])
    assert found == pytest.approx({"accuracy": 3 / 4, "precision": 5 / 6, "recall": 5 / 6, "f1": 7 / 9})
    assert told["metric"].compute(predictions=[1], references=[1])["accuracy"] == 1


def test_a_pair_in_a_pickle_that_numpy_loads_is_drawn_by_its_names(tmp_path: Path) -> None:
    code = "class Set:\n    def __init__(self, path):\n        self.images, self.labels = np.load(path)\n"
    told: dict[str, Any] = {"np": np}
    with stood_in(drawing_of(f"{code}net = Conv2d(1, 8, 3)\n", tmp_path)):
        exec(code, told)
        made = told["Set"]("partitions/train_part0.pkl")
    assert made.images.shape == (600, 28, 28) and made.labels.shape == (600,)


@pytest.mark.parametrize(("end", "drawn"), [("return {'round': None}", False), ("raise", True)])
def test_a_pickle_that_an_app_can_do_without_is_not_drawn(tmp_path: Path, end: str, drawn: bool) -> None:
    code = "import pickle\ndef load(path):\n    try:\n        with open(path, 'rb') as file:\n"
    code += "            return pickle.load(file)\n"
    code += f"    except FileNotFoundError:\n        {end}\n"
    (tmp_path / "script.py").write_text(code)
    told: dict[str, Any] = {}
    drawing = drawing_of(code, tmp_path)
    with stood_in(drawing):
        exec(compile(code, str(tmp_path / "script.py"), "exec"), told)
        found = told["load"](tmp_path / "dict_info.pickle")
    assert bool(drawing.asked) is drawn and (drawn or found == {"round": None})


@pytest.mark.parametrize(
    ("option", "page", "given"),
    [
        ('"--expid", required=True', "python src/fl.py --config ./c \\\n --expid profile_a --iid", "profile_a"),
        ('"-c", "--config", required=True', "`python -m fl -c ./configs/fed.yaml`", "./configs/fed.yaml"),
        ('"--config", required=True', "", "configs/fl.yaml"),
        ('"--expid", required=True', "python fl.py --expid <YOURS>", "{partition}"),
        ('"--data", required=True', "python fl.py --data a.csv\npython fl.py --data b.csv", "{partition:a.csv|b.csv}"),
        ('"--expid", required=True', "python fl.py --expid first\npython fl.py --expid other", "first"),
        ('"--rounds", required=True', "python fl.py --rounds 100", "1"),
        ('"-nc", "--nc", type=int', "python fl.py runs/ -nc 8 -m best.pth", "8"),
    ],
)
def test_options_are_given_as_in_the_projects_own_commands(tmp_path: Path, option: str, page: str, given: str) -> None:
    script = "import argparse, flwr as fl\np = argparse.ArgumentParser()\np.add_argument(%s)\n"
    (tmp_path / "fl.py").write_text(script % option + "fl.client.start_client(server_address='x', client=None)\n")
    (tmp_path / "README.md").write_text(f"How to run it:\n{page}\n")
    (tmp_path / "configs").mkdir()
    for name in ("alone.yaml", "fl.yaml"):
        (tmp_path / "configs" / name).write_text("")
    found = find_scripts(tmp_path)
    assert found is not None and found.client_arguments[1] == given


def test_ratings_are_whole_and_users_stand_in_several_rows() -> None:
    rng = np.random.default_rng(0)
    assert {*column("rating", 200, 2, rng)} == {1, 2, 3, 4, 5}
    for name in ("userId", "movie_id"):
        assert 20 < len({*column(name, 200, 2, rng)}) <= 40
    assert len({*column("paid", 200, 2, rng)}) > 40


def test_a_saved_set_of_the_hub_has_examples_by_their_columns(tmp_path: Path) -> None:
    code = "{}\nfor batch in loader:\n    net(batch['image']), batch['label'], rule['label1']\nConv2d(1, 8)\n"
    found = saved_by_torch(drawing_of(code.format("from flwr_datasets import FederatedDataset"), tmp_path), "train.pt")
    assert found[0]["image"].shape == (1, 28, 28) and found[3]["label"] == 1
    with stood_in(drawing_of("", tmp_path)):
        torch.nn.Linear(1, 1).load_state_dict(found)  # by a file's name that does not speak of weights
    other = saved_by_torch(drawing_of(code.format("import torchvision"), tmp_path), "train.pt")
    assert isinstance(other, torch.utils.data.TensorDataset)


@pytest.mark.parametrize("held", ["", "notes"])
def test_pictures_are_drawn_where_a_folder_has_none_by_class(tmp_path: Path, held: str) -> None:
    folders = importlib.import_module("torchvision.datasets")
    (tmp_path / "data" / held).mkdir(parents=True)
    with stood_in(drawing_of("nn.Linear(4, 3)", tmp_path / "files")):
        assert len(folders.ImageFolder(str(tmp_path / "data")).classes) == 3


@pytest.mark.parametrize("folder", ["results/run_001", "mlruns", "tb_logs", "trainResults", "data/output", "saved"])
def test_results_that_an_app_writes_are_not_there_unless_it_ends_without(tmp_path: Path, folder: str) -> None:
    code = "import os\ndef looked(path):\n    if not os.path.exists(path):\n        raise FileNotFoundError(path)\n"
    (tmp_path / "looks.py").write_text(code)
    told: dict[str, Any] = {}
    exec(compile(code, str(tmp_path / "looks.py"), "exec"), told)
    with stood_in(drawing_of("", tmp_path)):
        assert Path("data/rounds.csv").exists() and not Path(f"{folder}/rounds.csv").exists()
        told["looked"](f"{folder}/rounds.csv")


def test_a_folder_is_of_results_by_whole_words(tmp_path: Path) -> None:
    names = ["dialogues", "catalog", "technology", "runtime_data", "models/../data", "ModelNet40", "models/data/raw"]
    with stood_in(drawing_of("", tmp_path)):
        drawn = [name for name in names if Path(name, "x.csv").exists()]
    assert drawn == names


def test_a_server_has_the_clients_of_its_name(tmp_path: Path) -> None:
    for name in ("fl", "sim_of_it"):
        (tmp_path / f"{name}_server.py").write_text("import flwr as fl\nfl.server.start_server()\n")
        (tmp_path / f"{name}_client.py").write_text("import flwr as fl\nfl.client.start_client()\n")
    for but, name in (([], "fl"), ([tmp_path / "fl_server.py"], "sim_of_it")):
        found = find_scripts(tmp_path, but=but)
        assert found is not None and [each.stem for each in found.clients] == [f"{name}_client"]


def test_recordings_and_scans_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("datasets")  # which would import the packages below
    made: dict[str, Any] = {name: ModuleType(name) for name in ("mne", "mne.io", "edf", "nibabel", "SimpleITK")}
    for name, module in made.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    mne, io, edf, nibabel, sitk = made.values()
    mne.io, mne.create_info, io.RawArray = io, lambda *given: given, lambda values, info, **options: (values, info)
    io.__getattr__ = lambda name: getattr(edf, name)  # as MNE's, which loads what is used
    edf.read_raw_edf = edf.read_raw_bdf = nibabel.load = sitk.ReadImage = lambda path, **options: f"read {path}"
    nibabel.Nifti1Image, sitk.GetImageFromArray = lambda values, affine: values, lambda values: values
    (tmp_path / "there.edf").touch()
    code = """
import os, mne, nibabel, SimpleITK as sitk
assert os.path.exists("records/a.edf") and mne.io.read_raw_edf("there.edf", preload=True) == "read there.edf"
recording, info = mne.io.read_raw_edf("records/a.edf", preload=True)
assert recording.shape == (32, 60 * 256) and info == (32, 256, "eeg")
volume, labels = nibabel.load("scan.nii"), sitk.ReadImage("scan_seg.mha")
assert volume.shape == (64, 64, 32) and labels.shape == (32, 64, 64)
assert 0 <= volume.min() < volume.max() <= 1 and {*labels.ravel().tolist()} == {0, 1}
"""
    drawing = drawing_of(code, tmp_path)
    with stood_in(drawing):
        exec(code, {})
        drawing.fitted["rate"] = 512
        exec("import mne\nassert mne.io.read_raw_edf('records/a.edf')[1][1] == 512", {})
    assert "a drawn scan of 32 slices, 64 x 64 each" in drawing.in_words()


def test_the_length_of_recordings_that_a_network_takes_is_found(tmp_path: Path) -> None:
    drawing = drawing_of("", tmp_path)
    drawing.note("a.edf", "a drawn recording")
    net = torch.nn.Sequential(torch.nn.Conv1d(20, 2, 1), torch.nn.Flatten(), torch.nn.Linear(2048, 2))
    with stood_in(drawing), pytest.raises(RuntimeError):
        net(torch.zeros(3, 20, 512))
    assert hub_models.fit(drawing) == {"rate": 512}


def test_a_text_of_labels_names_files_as_the_code_splits_its_lines(tmp_path: Path) -> None:
    code = """
def read(name):
    with open(name) as file:
        return [line.rstrip().split(", ") for line in file]
assert read("y_train/labels.txt")[:3] == [["0.png", "0"], ["1.png", "1"], ["2.png", "2"]]
assert len(read("corpus.txt")[0]) == 1
"""
    (tmp_path / "app.py").write_text(code)
    with stood_in(drawing_of("num_classes = 3", tmp_path)):
        exec(compile(code, str(tmp_path / "app.py"), "exec"), {})


def test_a_network_of_keras_names_the_shape_that_it_takes(tmp_path: Path) -> None:
    drawing = drawing_of("", tmp_path)
    drawing.unfit = SimpleNamespace(input_shape=(None, 32, 32, 3)), (8, 64, 64, 3)
    assert hub_models.fit(drawing) == {"channels": 3, "side": 32}
    drawing.unfit = SimpleNamespace(input_shape=(None, 12)), (8, 10)
    assert hub_models.fit(drawing) == {"columns": 2}


def test_the_classes_that_a_network_tells_apart_are_found(tmp_path: Path) -> None:
    drawing = drawing_of("", tmp_path)
    drawing.note("a.csv", "drawn rows")
    net = torch.nn.Sequential(torch.nn.Linear(4, 3))
    with stood_in(drawing), pytest.raises(IndexError, match="out of bounds") as caught:
        torch.nn.functional.cross_entropy(net(torch.zeros(1, 4)), torch.tensor([8]))
    assert hub_models.fit(drawing, str(caught.value)) == {"classes": 3} and hub_models.fit(drawing) == {}


STRATEGY = """
class Strategy(fl.server.strategy.FedAvg):
    def configure_fit(self, server_round, parameters, client_manager):
        return [(name, fl.common.FitIns(parameters, {})) for name in client_manager.all()]
"""


@pytest.mark.parametrize(
    ("server", "said"), [(STRATEGY, "object has no attribute"), ("class Strategy: pass", "AttributeError")]
)
def test_clients_are_asked_by_fedavg_if_their_server_fails(tmp_path: Path, server: str, said: str) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "network.py").write_text(parts.NETWORK)
    code = parts.SIMULATION.replace("fl.server.strategy.FedAvg(),", "Strategy(),")
    code = code.replace("if __name__", f"{server}\nif __name__")
    (folder / "run.py").write_text(code)
    asked = AppAuditRequest(out=tmp_path / "out", victims=1, clients=1, seconds=0.0)
    with attacked_only(()):
        last = audit_app(read_app(folder), asked).last
    assert last.models and not last.silence
    (why,) = [one for one in last.problems if "FedAvg asked its clients" in one]
    assert "run.py: the app's server" in why and said in why and "Other versions" not in why
