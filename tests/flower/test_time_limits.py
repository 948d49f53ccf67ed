"""An audit's time limit ends what the app would do for hours: training on drawn data, and scripts of their own."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import flwr.simulation
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_privacy.auditing.app import audit, environment
from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.environment import around, remedies
from fl_privacy.auditing.app.started import ScriptRunner
from fl_privacy.auditing.app.tapped_grid import TappedGrid
from fl_privacy.auditing.instrument.watch import TrainingWatch
from fl_privacy.errors import UserError
from tests.flower.test_stand_in import HEAD, LOADERS, NET, TAIL
from tests.flower.untouched_apps import attacked_only, written_once


def audited(folder: Path, main: str, **asked: Any) -> dict[str, Any]:
    (folder / "app").mkdir(exist_ok=True)
    (folder / "app" / "main.py").write_text(main)
    request = AppAuditRequest(out=folder / "out", victims=1, clients=1, stand_in=True, **{"seconds": 0.0, **asked})
    with written_once(), attacked_only(()):
        session = audit_app(read_app(folder / "app"), request)
    return json.loads((session.page.parent / "audit.json").read_text())


@pytest.mark.parametrize(
    ("lasts", "batch", "seen_so"), [(0.0, 4, (5, 20, True)), (0.0, 12, (3, 28, True)), (math.inf, 4, (9, 36, False))]
)
def test_a_pass_is_a_small_batch_once_the_training_is_late(lasts: float, batch: int, seen_so: Any) -> None:
    late = [False]
    net, loader = nn.Linear(3, 2), DataLoader(TensorDataset(torch.rand(12, 3)), batch_size=batch)
    with TrainingWatch(late=lambda: late[0]).looking() as seen:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            for (rows,) in loader:
                net(rows).sum().backward()
                optimizer.step()
            late[0] = not lasts
        with torch.no_grad():
            assert sum(len(rows) for (rows,) in loader) == (12 if lasts else min(batch, 8))
    assert (seen.steps, seen.loaded, seen.hurried) == seen_so


def test_training_on_drawn_data_ends_in_time_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "LEAST_TRAINED", 0.0)
    inputs, classes, loader = LOADERS["torchvision"]
    record = audited(tmp_path, HEAD + NET.format(inputs=inputs, classes=classes) + loader + TAIL)
    assert any("a pass over drawn data had one batch (in PyTorch, of at most 8" in each for each in record["notes"])
    first = (tmp_path / "out" / "audit-app" / "report.html").read_text().partition("</header>")[0]
    assert "Training was cut short, as it took too long." in first
    assert record["facts"]["Optimizer"].endswith(", 1 step in a round")
    own = "loader = DataLoader(TensorDataset(torch.rand(24, 9), torch.arange(24) % 2), batch_size=8)\n"
    record = audited(tmp_path, HEAD + NET.format(inputs=9, classes=2) + own + TAIL)
    assert not any("drawn" in each for each in record["notes"]), "real data are trained on as ever"
    assert record["facts"]["Optimizer"].endswith(", 3 steps in a round")


def test_clients_that_join_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lasts, (inputs, classes, loader) = list[float](), LOADERS["torchvision"]
    monkeypatch.setattr(audit, "LEAST_TRAINED", 0.5)
    tapped = TappedGrid._tapped

    def noted(grid: TappedGrid, message: Any) -> Any:
        lasts.append(grid.longest())
        return tapped(grid, message)

    monkeypatch.setattr(TappedGrid, "_tapped", noted)
    tail = TAIL.replace("num_clients=2", "num_clients=2, strategy=fl.server.strategy.FedAvg(min_available_clients=4)")
    assert tail != TAIL
    audited(tmp_path, HEAD + NET.format(inputs=inputs, classes=classes) + loader + tail, seconds=8.0)
    assert lasts[-1] == 2.0


def test_a_script_that_starts_no_flower_in_time_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LONGEST_STARTED", 1.0)
    trains = HEAD + NET.format(inputs=4, classes=2) + "while True:\n    sum(range(1000))\n" + TAIL
    why = audited(tmp_path, trains)["further"][0]
    assert why.endswith("not audited: main.py did not start Flower within 1 s; raise --seconds to wait longer")


def test_a_notebook_out_of_time_says_so_rather_than_what_failed_before(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": each} for each in ("1 / 0", "while True:\n    sum(range(1000))")]
    (tmp_path / "main.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(UserError, match=r"main.ipynb did not start Flower within 1 s"):
        ScriptRunner(tmp_path, 1.0).run(tmp_path / "main.ipynb", ())


def test_flower_loads_no_tensorflow_for_an_app_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("import flwr as fl\nfl.simulation.start_simulation()\n")
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flwr, "simulation", flwr.simulation)  # put back, like the modules
    for name in [each for each in sys.modules if each.startswith("flwr.simulation")]:
        monkeypatch.delitem(sys.modules, name)
    with around(read_app(tmp_path / "app"), tmp_path / "files", None):
        assert "flwr.simulation.run_simulation" in sys.modules
    assert "tensorflow" not in sys.modules


def test_a_script_starts_no_ray(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    text = "import flwr, ray\nfrom ray import init\ninit(num_cpus=1)\nassert not ray.is_initialized()\n"
    (tmp_path / "app" / "main.py").write_text(f"{text}flwr.simulation.start_simulation(num_clients=4)\n")
    app = read_app(tmp_path / "app")
    with around(app, tmp_path / "files", None):
        assert ScriptRunner(app.folder).run(app.folder / "main.py", ())["simulations"]


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        ("while self.device is None:\n            time.sleep(0.2)", "TimeoutError: it waits in a loop for"),
        ("socket.create_server(('127.0.0.1', 0)).accept()", "TimeoutError: timed out"),
    ],
)
def test_what_a_client_waits_for_without_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: str, said: str
) -> None:
    monkeypatch.setattr(environment, "LONGEST_IDLE", 1.0)
    code = f"""
import socket, time
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg


class Board:
    def __init__(self):
        self.device = None

    def train(self):
        {wait}


app = ClientApp()


@app.train()
def train(message, context):
    Board().train()


server = ServerApp()


@server.main()
def main(grid, context):
    FedAvg(fraction_evaluate=0.0).start(grid=grid, initial_arrays=ArrayRecord(), num_rounds=1)


from flwr.simulation import run_simulation
run_simulation(server_app=server, client_app=app, num_supernodes=2)
"""
    record = audited(tmp_path, code)
    shown = " ".join([record["headline"], *record["problems"]])
    assert said in shown and "called in main.py, line 1" in shown, shown
    assert remedies([shown])[-1].startswith("Nothing outside of the app answers here")
