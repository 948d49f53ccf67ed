"""The audit of a project's network alone: only if no client trains, and never taken for one of its own training."""

import html
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_privacy.auditing.app import network_alone, network_found
from fl_privacy.auditing.app.audit import AppAudit, AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import App, read_app
from fl_privacy.auditing.app.check import stops_of
from fl_privacy.auditing.app.network_alone import ClientsAlone, NetworkAlone
from fl_privacy.auditing.app.network_found import BuiltNetworks, DefinedNetworks
from fl_privacy.auditing.app.network_inputs import CodeSizes, task_for
from fl_privacy.auditing.app.scripts import parsed
from fl_privacy.auditing.app.stand_in import Drawing
from fl_privacy.cli.main import run_command_line
from fl_privacy.errors import UserError
from fl_privacy.measure.answer import Answer
from fl_privacy.report.audit_file import record_of_json, record_to_json
from fl_privacy.report.audit_page import AuditRecord, render_audit
from tests.flower import project_parts as parts
from tests.selection import few

from .untouched_apps import attacked_only, written_once

SERVER = """
import flwr as fl
fl.server.start_server(server_address="0.0.0.0:8080", config={"num_rounds": 1})
"""
NET = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, num_classes, width):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 3, stride=3), nn.Linear(width * 81, num_classes)
    def forward(self, x):
        return self.last(torch.relu(self.first(x)).flatten(1))
"""
CRASHES = """
import flwr as fl
from model import Net
class FlowerClient(fl.client.NumPyClient):
    def __init__(self):
        self.net = Net(num_classes=int("7"), width=4)
        raise ConnectionError("redis at 10.0.0.1 does not answer")
fl.client.start_numpy_client(server_address="x", client=FlowerClient())
"""
NEVER_STARTS = """
import flwr as fl
from model import Net
WIDTH = 4
raise OSError("weights are missing")
net = Net(7, width=WIDTH)
fl.client.start_numpy_client(server_address="x", client=None)
"""


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def audited(folder: Path, out: Path, **asked: Any) -> tuple[AppAudit, dict[str, Any]]:
    request = AppAuditRequest(out=out, victims=1, clients=1, seconds=0.1, nodes=2, **{"stand_in": True, **asked})
    with written_once(), attacked_only({"gradient"}):
        session = audit_app(read_app(folder), request)
    return session, json.loads((session.page.parent / "audit.json").read_text())


@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize("client", few([CRASHES, NEVER_STARTS], 1, all_but_fuzz=2))
def test_a_network_is_audited_alone_if_no_client_trains(tmp_path: Path, client: str) -> None:
    folder = written(tmp_path / "app", server=SERVER, client=client, model=NET)
    session, record = audited(folder, tmp_path / "out")
    why = "redis at 10.0.0.1 does not answer" if client == CRASHES else "weights are missing"
    assert record["headline"].startswith("Only the app's network was audited, on random inputs: ")
    assert record["further"][0].startswith("The app's own training was not audited: ")
    assert record["network_alone"].endswith("alone, trained by plain SGD on random images of 1 x 28 x 28 values")
    assert why in record["problems"][0] and record["rungs"][0]["counts"]["judged"] == 1
    assert record["survivors"] == [] and record["models"] == {"Net": 2}
    page = session.page.read_text()
    first = re.search(r"<h1[^>]*>(.*?)</h1>", page)
    assert first is not None and len(first[1].split()) <= 25 and why not in first[1]
    shown, folded = page.split("<summary>The error in full</summary>")
    assert f"{record['further'][0]}.</strong>" in html.unescape(shown) and why in folded
    assert "differential privacy or secure aggregation, were not tested" in page
    assert "made by the app's own code" not in page and "What clients send in the clear" not in page
    assert "Net(num_classes" not in page if client == CRASHES else "Net(7, width=WIDTH)" in page


def test_nothing_changes_without_drawn_data_or_if_a_client_trains(tmp_path: Path) -> None:
    folder = written(tmp_path / "app", server=SERVER, client=NEVER_STARTS, model=NET)
    session, record = audited(folder, tmp_path / "out", stand_in=False)
    assert record["headline"].startswith("Nothing to audit: no client answered") and "network_alone" not in record
    assert "weights are missing" in session.silence


def test_data_in_the_clear_are_not_hidden_by_a_network_alone(tmp_path: Path) -> None:
    script = """
import flwr as fl
from model import Net
class Client(fl.client.NumPyClient):
    def get_parameters(self, config):
        return []
    def fit(self, parameters, config):
        raise OSError("no weights")
    def evaluate(self, parameters, config):
        return 0.0, 1, {"of": "anna.meier@example.org"}
fl.simulation.start_simulation(
    client_fn=lambda cid: Client().to_client(), num_clients=2, config=fl.server.ServerConfig(num_rounds=1),
    strategy=fl.server.strategy.FedAvg(min_fit_clients=2, min_evaluate_clients=2),
)
"""
    session, record = audited(written(tmp_path / "app", main=script, model=NET), tmp_path / "out")
    assert session.silence.startswith("no client trained: OSError")
    assert record["headline"].startswith("Clients send facts about their data in the clear: an e-mail address")


def test_in_a_sandbox_the_reason_has_its_remedy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    client = NEVER_STARTS.replace("weights are missing", "Network is unreachable")
    folder, out = written(tmp_path / "app", server=SERVER, client=client, model=NET), tmp_path / "out"
    command = [
        "audit",
        str(folder),
        "--sandbox",
        "--stand-in",
        "--victims",
        "1",
        "--seconds",
        "0.001",
        "--out",
        str(out),
    ]
    assert run_command_line(command) == 0
    record = json.loads((out / "audit-app" / "audit.json").read_text())
    assert record["network_alone"].startswith("Net (model.py) alone")
    assert "Network is unreachable" in record["problems"][0] and "sandbox" in record["problems"][0]
    assert "The app's own training was not audited: no client answered" in capfd.readouterr().out


@pytest.mark.parametrize(
    "model",
    [
        "x = 1\n",
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = nn.Sequential(nn.Linear(2, 2))\n    def forward(self, x, y):\n        return x\n",
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, secret):\n        super().__init__()\n",
    ],
)
def test_without_a_network_that_trains_the_message_stays(tmp_path: Path, model: str) -> None:
    client = "import flwr as fl\nraise OSError('gone')\nfl.client.start_numpy_client(server_address='x', client=None)\n"
    folder = written(tmp_path / "app", server="import model\n" + SERVER, client=client, model=model)
    _, record = audited(folder, tmp_path / "out")
    _, before = audited(folder, tmp_path / "before", stand_in=False)
    assert {**record, "seconds": 0} == {**before, "seconds": 0}


def test_an_error_before_any_page_stays_as_it_was(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "app", main="import flwr as fl\nraise OSError('gone')\nfl.simulation.start_simulation()\n"
    )
    said = []
    for stand_in in (False, True):
        with pytest.raises(UserError) as caught:
            audited(folder, tmp_path / "out", stand_in=stand_in)
        said.append(str(caught.value))
    assert said[0] == said[1] and not list((tmp_path / "out").rglob("report.html"))


def first_of(folder: Path, *, built: BuiltNetworks | None = None, chosen: str = "") -> network_alone.TrainedAlone:
    app = App(folder=folder, name="x", server="", client="", config={})
    alone = NetworkAlone.of(app, reason="", seconds=1.0, built=built, chosen=chosen)
    alone.load(lambda app: "")
    return alone.found[0]


LAYERS = {
    "gray": ("nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten(), nn.Linear(2 * 576, 10))", "images", (1, 28, 28)),
    "resized": (
        "nn.Sequential(nn.Conv2d(3, 2, 5), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3))\n"
        "import torchvision.transforms as T\nt = T.Resize((40, 48))\nwindow.resize(480, 360)",
        "images",
        (3, 40, 48),
    ),
    "flat": ("nn.Sequential(nn.Flatten(), nn.Linear(784, 10))", "images", (1, 28, 28)),
    "rows": ("nn.Sequential(nn.Linear(13, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())", "rows", (13,)),
    "tokens": ("nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(64, 2))", "texts", (16,)),
    "signal": ("nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(90, 4))", "windows", (2, 32)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_the_input_is_inferred_from_layers_and_code(tmp_path: Path, kind: str) -> None:
    code, named, shape = LAYERS[kind]
    built, _, more = code.partition("\n")
    text = f"from torch import nn\ndef make_model():\n    return {built}\n{more}\n"
    made = first_of(written(tmp_path, model=text))
    assert (made.task.kind, made.task.shape) == (named, shape)
    inputs, _ = made.task.draw(3, np.random.default_rng(0))
    assert inputs.shape == (3, *shape) and (named != "images" or (inputs.min() >= 0 and inputs.max() <= 1))
    assert torch.equal(inputs, made.task.draw(3, np.random.default_rng(0))[0])


def test_a_recurrent_network_takes_windows_and_an_autoencoder_its_inputs(tmp_path: Path) -> None:
    recurrent = """
from torch import nn
class Net(nn.Module):
    def __init__(self, input_size=6, hidden=5):
        super().__init__()
        self.lstm, self.last = nn.LSTM(input_size, hidden, batch_first=True), nn.Linear(hidden, 1)
    def forward(self, x):
        return self.last(self.lstm(x)[0][:, -1])
loss = nn.MSELoss()
"""
    made = first_of(written(tmp_path / "a", model=recurrent))
    assert (made.task.kind, made.task.shape, made.task.loss) == ("windows", (16, 6), "mean squared error")
    encoder = "from torch import nn\nnet = nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 9))\nloss = nn.MSELoss()\n"
    made = first_of(written(tmp_path / "b", model=encoder))
    assert made.task.inputs_are_targets and made.task.loss == "mean squared error"


@pytest.mark.parametrize(
    ("output", "code", "loss"),
    [
        ("nn.Linear(4, 3)", "", "cross entropy"),
        ("nn.Linear(4, 3), nn.LogSoftmax(1)", "nn.NLLLoss()", "negative log-likelihood"),
        ("nn.Linear(4, 1)", "nn.BCEWithLogitsLoss()", "binary cross entropy of logits"),
        ("nn.Linear(4, 1), nn.Sigmoid()", "nn.BCEWithLogitsLoss()", "binary cross entropy"),
        ("nn.Linear(4, 1), nn.Sigmoid()", "", "binary cross entropy"),
        ("nn.Linear(4, 1)", "", "mean squared error"),
        ("nn.Linear(4, 3)", "nn.MSELoss(); nn.MSELoss(); nn.CrossEntropyLoss()", "cross entropy"),
    ],
)
def test_the_loss_is_the_codes_or_fits_the_output(tmp_path: Path, output: str, code: str, loss: str) -> None:
    torch.manual_seed(0)
    text = f"from torch import nn\nnet = nn.Sequential(nn.Linear(5, 4), {output})\n{code}\n"
    assert first_of(written(tmp_path, model=text)).task.loss == loss


def test_settings_are_those_of_the_code(tmp_path: Path) -> None:
    text = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.2)
def train(net, batch_size=4): ...
"""
    files = parsed(written(tmp_path, a=text))
    drawing = Drawing(list(files.values()), tmp_path)
    assert (CodeSizes.of(files.values(), drawing, {}).rate, CodeSizes.of(files.values(), drawing, {}).batch) == (0.2, 4)
    assert CodeSizes.of([], drawing, {"learning-rate": 0.5}).rate == 0.5


def test_networks_of_clients_come_first_and_parts_of_networks_last(tmp_path: Path) -> None:
    other = "from torch import nn\nclass Teacher(nn.Module):\n    pass\nfor _ in range(3):\n    Teacher(); Teacher()\n"
    client = (
        "from flwr.client import NumPyClient\nfrom model import Net\ndef client_fn(cid):\n    return Net(5, width=2)\n"
    )
    folder = written(tmp_path, model=NET, client=client, teacher=other)
    app = App(folder=folder, name="", server="", client="", config={})
    names = [each.code for each in DefinedNetworks(app).networks()]
    assert names[0] == "as Net(5, width=2)" and names.index("as Teacher()") > 1


def test_a_layer_that_only_networks_build_is_no_network(tmp_path: Path) -> None:
    """Nothing builds ``Whole`` either, but ``Merging`` is built inside of it."""
    code = """
from torch import nn
class Merging(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
    def forward(self, x):
        return self.linear(x)
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.merging, self.last = Merging(), nn.Linear(4, 2)
    def forward(self, x):
        return self.last(self.merging(x))
"""
    app = App(folder=written(tmp_path, model=code), name="", server="", client="", config={})
    assert {each.name for each in DefinedNetworks(app).networks()} == {"Whole"}


def test_built_networks_are_kept_whole_with_their_arguments(tmp_path: Path) -> None:
    path = written(tmp_path, used=NET + "nets = [Net(n, width=2) for n in (3, 4)]\nloss = nn.BCELoss()\n") / "used.py"
    built = BuiltNetworks(tmp_path)
    with built.looking():
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "used"})
        torch.nn.Linear(2, 2)  # not of the project
    (network,) = built.networks(set(), tmp_path)
    assert network.name == "Net" and network.make().last.out_features == 3  # type: ignore[union-attr]
    assert built.of_losses == Counter(BCELoss=1)
    built.end()
    assert built.networks(set(), tmp_path) == []


HOSTILE = {
    "endless body": "class Net(nn.Module):\n    while True:\n        pass\n",
    "endless forward": "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.a = nn.Linear(2, 2)\n    def forward(self, x):\n        while True:\n            pass\n",
    "huge": "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.a = nn.Linear(2 * 10**4, 10**4)\n    def forward(self, x):\n        return self.a(x)\n",
    "two inputs": "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.a = nn.Linear(2, 2)\n    def forward(self, x, y):\n        return self.a(x)\n",
    "unknown argument": "class Net(nn.Module):\n    def __init__(self, secret):\n        super().__init__()\n"
    "        self.a = nn.Linear(2, 2)\n    def forward(self, x):\n        return self.a(x)\n",
    "ends the process": "import sys\nclass Net(nn.Module):\n    def __init__(self):\n        sys.exit(3)\n",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_network_that_can_not_be_built_is_skipped_and_named(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_alone, "LEAST_SECONDS", 0.3)
    fine = "class Other(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    fine += "        self.a = nn.Linear(3, 2)\n"
    fine += "    def forward(self, x):\n        return self.a(x)\n"
    head = "from torch import nn\n"
    uses = "from flwr.client import NumPyClient\nfrom model import Net\nNet()\n"
    folder = written(tmp_path, model=head + HOSTILE[kind], other=head + fine, c=uses)
    made = first_of(folder)
    assert made.network.name == "Other" and made.skipped[0].startswith("Net (model.py): ")
    assert kind != "huge" or "200 million parameters" in made.skipped[0]


def test_a_module_with_imports_that_fail_still_defines_its_network(tmp_path: Path) -> None:
    model = (
        "import not_there_at_all\nfrom .parts import SIZE\nraise OSError('no data')\n"
        + NET
        + "net = Net(SIZE, width=3)\n"
    )
    folder = written(tmp_path / "package", model=model, parts="SIZE = 6\n")
    made = first_of(folder.parent)
    assert made.task.classes == 6 and made.network.place == "package/model.py"


def test_arguments_come_from_calls_settings_options_and_names(tmp_path: Path) -> None:
    model = """
from dataclasses import dataclass
from torch import nn
@dataclass
class Sizes:
    hidden: int = 3
def create_net(rows, config, sizes: Sizes, num_classes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(rows + config["width"] + config.get("more", 1) + sizes.hidden, num_classes)
        def forward(self, x):
            return self.last(x)
    return Net()
"""
    parses = (
        "import argparse\nfrom model import create_net\np = argparse.ArgumentParser()\n"
        "p.add_argument('--rows', default=4)\nargs = p.parse_args()\n"
        "def client_fn(cid):\n    data = load()\n    return create_net(args.rows, data.cfg, num_classes=data.k)\n"
    )
    folder = written(tmp_path, model=model, main=parses)
    (folder / "config.yaml").write_text("model:\n  width: 20\n  num-classes: 6\nimage_size: [9, 9]\n")
    made = first_of(folder)
    assert (made.task.shape, made.task.classes) == ((28,), 6)


@pytest.mark.fuzz  # where Keras is installed
def test_keras_networks_are_trained_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    if pytest.importorskip("keras").config.backend() != "torch":
        pytest.skip("Keras runs on another backend")
    text = """
import keras
def create_model():
    return keras.Sequential([
        keras.Input(shape=(8, 8, 1)), keras.layers.Conv2D(2, 3), keras.layers.Flatten(),
        keras.layers.Dense(4, activation="softmax"),
    ])
"""
    made = first_of(written(tmp_path, model=text))
    assert (made.task.kind, made.task.shape, made.task.loss) == ("images", (8, 8, 1), "cross entropy of probabilities")


def test_a_network_is_chosen_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "app", server=SERVER, client=NEVER_STARTS, model=NET)
    assert first_of(folder, chosen="model.py:Net").network.place == "model.py"
    with pytest.raises(
        UserError, match=r"--network is expected to name .*FILE:NAME \(model\.py:Net\).*'model\.py:Nett'"
    ):
        first_of(folder, chosen="model.py:Nett")
    assert run_command_line(["audit", str(folder), "--check", "--stand-in", "--network", "model.py:Net"]) == 0
    assert "none" not in capsys.readouterr().out
    assert run_command_line(["audit", str(folder), "--network", "model.py:Net"]) == 2
    assert "--network is expected with --stand-in" in capsys.readouterr().err


@pytest.mark.usefixtures("few_evaluations")
def test_a_project_whose_scripts_wait_for_a_button_or_is_none_of_flower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = "import flwr as fl\nfrom model import Net\nclass App:\n    def on_button(self):\n"
    app += "        fl.simulation.start_simulation(client_fn=Net(5, width=2))\n"
    folder, out = written(tmp_path / "app", app=app, model=NET), str(tmp_path / "out")
    command = ["audit", str(folder), "--victims", "1", "--seconds", "0.001", "--out", out]
    with written_once(), attacked_only({"gradient"}):
        assert run_command_line(command) == 2
        assert "it may wait for a button" in capsys.readouterr().err
        assert run_command_line([*command, "--stand-in"]) == 0
        said = capsys.readouterr().out
        assert "Only the app's network was audited" in said and "training was not audited: " in said
        folder = written(tmp_path / "plain", model=NET.replace("num_classes, width", "num_classes=3, width=2"))
        command[1] = str(folder)
        assert run_command_line([*command, "--stand-in", "--network", "model.py:Net"]) == 0
        assert "The app's own training was not audited. " in capsys.readouterr().out


def test_the_record_of_a_network_alone_is_sent_and_never_approves() -> None:
    answer = Answer(scenario=network_alone_scenario(), reason="no time was left")
    record = AuditRecord(
        app="x", network_alone="Net (model.py) alone, trained by plain SGD on drawn rows of 3 values",
        not_audited="no Redis; --debug shows the traceback. More", answers=[answer], models={"Net": 2},
    )  # fmt: skip
    again = record_of_json(record_to_json(record))
    assert again.network_alone == record.network_alone and again.not_audited == record.not_audited
    assert again.headline.startswith("Only the app's network was audited, on random inputs: ")
    assert again.further[0] == "The app's own training was not audited: no Redis"
    assert dict(again.officer)["Can this training be approved?"].startswith("Not by this page")
    assert "a network alone" in render_audit(again) and "audit the app's own training" in again.next_step


def network_alone_scenario() -> Any:
    from fl_privacy.auditing.scenarios import scenario_of  # noqa: PLC0415

    return scenario_of("one")


@pytest.mark.usefixtures("few_evaluations")
def test_a_network_alone_is_compared_with_a_defense(tmp_path: Path) -> None:
    folder = written(tmp_path / "app", server=SERVER, client=NEVER_STARTS, model=NET)
    _, record = audited(folder, tmp_path / "out", network="model.py:Net", defense=("dp_noise", "defense.scale=0.1"))
    assert record["headline"].startswith("Only the app's network was audited, on random inputs: with dp_noise")
    assert record["problems"] == [] and record["before"]["network_alone"] == record["network_alone"]


def test_slow_statements_of_a_file_together_take_no_longer_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_alone, "LEAST_SECONDS", 0.5)
    model = "import time\n" + "x = time.sleep(0.3)\n" * 4 + NET + "    y = time.sleep(9)\n"
    folder, begun = written(tmp_path, model=model, uses="from model import Net\nNet(5, width=2)\n"), time.monotonic()
    with pytest.raises(UserError, match=r"Net \(model\.py\): .*TimeoutError"):
        first_of(folder)
    assert time.monotonic() - begun < 9


def test_a_built_network_has_the_same_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_found, "MOST_PARAMETERS", 50)
    path = written(tmp_path, used="from torch import nn\nnet = nn.Sequential(nn.Linear(20, 3))\n") / "used.py"
    built = BuiltNetworks(tmp_path)
    with built.looking():
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "used"})
    with pytest.raises(UserError, match="more than are"):
        first_of(tmp_path, built=built)


def test_settings_are_not_those_of_hidden_folders(tmp_path: Path) -> None:
    for folder, width in ((".github", 3), ("conf", 4)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.yml").write_text(f"width: {width}\n")
    app = App(folder=tmp_path, name="", server="", client="", config={})
    assert DefinedNetworks(app).settings == {"width": 4}


def test_a_network_without_inputs_that_fit_says_so() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(4, 3))
    with pytest.raises(UserError, match="no usual input fits it"):
        task_for(network, CodeSizes(), Counter())


FOREST = """
import flwr as fl, pickle
import numpy as np
from sklearn.ensemble import RandomForestClassifier
class Base(fl.client.NumPyClient):
    pass
class Shop(Base):
    def __init__(self, x_shop, mystery):
        pass
class Bank(Base):
    def __init__(self, X_train, y_train, client_id, input_dim, depth=3):
        assert input_dim == X_train.shape[1]
        self.rows, self.labels, self.number = X_train, y_train, client_id
        self.forest = RandomForestClassifier(n_estimators=3, max_depth=depth, random_state=0)
    def get_parameters(self, config):
        return [np.frombuffer(pickle.dumps(self.forest), dtype=np.uint8)]
    def fit(self, parameters, config):
        self.forest.fit(self.rows, self.labels)
        return self.get_parameters(config), len(self.rows), {"site": self.number}
    def evaluate(self, parameters, config):
        return 1.0, len(self.rows), {}
"""
OF_LOADERS = parts.NETWORK.replace("def __init__(self, number):", "def __init__(self, cid, net, trainloader):")


@pytest.mark.parametrize("kind", ["rows", "loaders", "unknown"])
def test_clients_that_no_script_starts_are_made_with_drawn_data(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "bank"
    folder.mkdir()
    head, tail = OF_LOADERS.split("        generator =")[0], OF_LOADERS.split("batch_size=8, shuffle=True)\n")[1]
    code = FOREST if kind == "rows" else f"{head}        self.net, self.loader = net, trainloader\n{tail}"
    code = code.replace("trainloader", "mystery") if kind == "unknown" else code
    (folder / "client.py").write_text(code)
    (folder / "server.py").write_text("import flwr as fl\ndef main():\n    fl.server.start_server(config=None)\n")
    not_run = "No script starts a client."
    asked = AppAuditRequest(out=tmp_path / "out", victims=1, clients=1, seconds=0.0, stand_in=True, not_run=not_run)
    app = read_app(folder, {"network": True})
    last = audit_app(app, asked).last
    if kind == "unknown":
        assert last.not_audited.startswith(not_run) and "needs mystery, for which nothing states" in last.not_audited
        return
    made = "Bank (client.py), made with drawn X_train, y_train" if kind == "rows" else "made with drawn trainloader"
    assert not last.network_alone and last.drawn and any(made in each for each in last.problems)
    if kind == "rows":
        assert not any("x_shop" in each for each in last.problems)
        assert any("3 decision trees" in leak.what for leak in last.findings)
    else:
        assert last.models == {"Net": 2}


def test_clients_made_with_drawn_data_are_asked_again_in_their_first_state(tmp_path: Path) -> None:
    keeps = "import torch\nkept = []\n" + FOREST.replace("self.rows,", "kept.append(self)\n        self.rows,", 1)
    (tmp_path / "client.py").write_text(
        keeps.replace("        self.forest =", "        self.net = torch.nn.Linear(2, 1)\n        self.forest =")
    )
    app = ClientsAlone.of(read_app(tmp_path, {"network": True}), reason="No script.", seconds=1.0)
    client: Any = app.load(stops_of).client
    module: Any = next(
        each for each in [*sys.modules.values()] if vars(each).get("__file__") == f"{tmp_path}/client.py"
    )
    (made,) = module.kept
    before = made.net.weight.detach().clone()
    with client.unchanged(), torch.no_grad():
        made.net.weight += 1.0
    assert torch.equal(made.net.weight, before)
