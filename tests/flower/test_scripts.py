"""Projects without Flower's app format: what is found in them, and that they run up to a page, nothing edited."""

import importlib
import json
import os
import signal
import sys
import typing
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr import common
from flwr.server import strategy

from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.check import stops_of
from fl_privacy.auditing.app.lent import moved_names_lent
from fl_privacy.auditing.app.scripts import NoScriptError, cells_of, find_scripts, parsed, usual_for
from fl_privacy.auditing.app.started import ScriptRunner, _Clients, start_scripts
from fl_privacy.auditing.app.tapped_grid import _described
from fl_privacy.auditing.clear_text.findings import Loaded, findings_of
from fl_privacy.auditing.clear_text.inventory import UP
from fl_privacy.cli.main import run_command_line
from fl_privacy.errors import UserError
from tests.flower import project_parts as parts
from tests.flower.untouched_apps import attacked_only, written_once

pytestmark = pytest.mark.usefixtures("few_evaluations", "path_put_back")


@pytest.fixture
def path_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


PARAMETERS = common.ndarrays_to_parameters([np.zeros(2)])


def project(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def audited(folder: Path, out: Path, *only: str, **options: Any) -> dict[str, Any]:
    """Audit scripts, and attack the scenarios in ``only``."""
    chosen = options.pop("chosen", None)
    request = AppAuditRequest(out=out, victims=2, **{"seconds": 0.0, **options})
    with written_once(), attacked_only({*only}):
        session = audit_app(read_app(folder, chosen), request)
    return json.loads((session.page.parent / "audit.json").read_text())


def counts_in(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [rung["counts"] for rung in record["rungs"] if rung["counts"]]


def test_a_simulation_comes_before_a_server_and_its_module_may_hold_the_call(tmp_path: Path) -> None:
    folder = project(tmp_path, server=parts.SERVER, client=parts.CLIENT, simulation=parts.SIMULATION)
    found = find_scripts(folder)
    assert found is not None and found.server.name == "simulation.py" and found.clients == ()
    inner = "import flwr as fl\n\n\ndef begin():\n    fl.simulation.start_simulation(client_fn=None, num_clients=2)\n"
    folder = project(
        tmp_path / "b", engine=inner, main='from engine import begin\nif __name__ == "__main__":\n    begin()\n'
    )
    found = find_scripts(folder)
    assert found is not None and found.server.name == "main.py"


@pytest.mark.parametrize("way", ["from .server import begin", "from . import server", "import server"])
def test_a_script_whose_own_start_calls_nothing_comes_last(tmp_path: Path, way: str) -> None:
    inner = "import logging\nimport flwr as fl\nlogger = logging.getLogger(__name__)\n\n\ndef begin():\n"
    inner += "    fl.simulation.start_simulation(client_fn=print, num_clients=2)\n\n\n"
    inner += 'if __name__ == "__main__":\n    print("Use begin() to start a simulation")\n'
    study = f'{way}\nif __name__ == "__main__":\n    {"server." * ("import server" in way)}begin()\n'
    folder = project(tmp_path / "fraud", server=inner, study=study)
    (folder / "__init__.py").touch()
    found = find_scripts(folder)
    assert found is not None and found.server.name == "study.py" and start_scripts(found, folder).nodes == 2


def test_numbered_clients_are_all_taken_and_tests_are_not(tmp_path: Path) -> None:
    plain = "import flwr as fl\nfl.client.start_client(server_address='x', client=None)\n"
    folder = project(tmp_path, server=parts.SERVER, client_1=plain, client_2=plain, tests__client=plain)
    found = find_scripts(folder)
    assert found is not None and [path.name for path in found.clients] == ["client_1.py", "client_2.py"]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ('parser.add_argument("--partition-id", type=int, default=0)', ("--partition-id", "{partition}")),
        ('parser.add_argument("cid", type=int)', ("{partition}",)),
        ('parser.add_argument("-i", "--id", choices=["a", "b"])', ("--id", "{partition:a|b}")),
        ('parser.add_argument("--node-id", choices=range(1, N + 1))', ("--node-id", "{partition+1}")),
        ('parser.add_argument("--epoch", required=True)', ("--epoch", "1")),
        ('parser.add_argument("--train_end_idx", type=int, default=0)', ("--train_end_idx", "200")),
        ('parser.add_argument("--ahead", required=True, choices=range(0, 7))', ("--ahead", "0")),
        ('parser.add_argument("--mode", required=True, choices=["iid", "skewed"])', ("--mode", "iid")),
        ('parser.add_argument("--num-clients", required=True)', ("--num-clients", "{nodes}")),
        ('parser.add_argument("--num-clients", default=2)', ()),
        ('parser.add_argument("--min_available_clients", type=int)', ("--min_available_clients", "{nodes}")),
        ('parser.add_argument("--server-ip", required=True)', ("--server-ip", "127.0.0.1:8080")),
        ('parser.add_argument("--id", action="store_true")', ()),
        ('WAYS = ["mean", "median"]\nparser.add_argument("--way", required=True, choices=WAYS)', ("--way", "mean")),
        ('WAYS = {"mean": 1}\nparser.add_argument("way", choices=list(WAYS.keys()))', ("mean",)),
        ('parser.add_argument("--size", nargs=2, type=int, required=True)', ("--size", "1", "1")),
        ('parser.add_argument("--size", nargs=1000000000000, type=int, required=True)', ("--size", "1")),
        ("print(sys.argv[1])", ("{partition}",)),
        ("if sys.argv[1] == 'server': pass\nelif sys.argv[1] == 'client': pass", ("client",)),
        ('parser.add_argument("--mode", default="server", choices=["server", "client"])', ("--mode", "client")),
        ("if len(sys.argv) < 3: sys.exit('usage')", ("{partition}", "1")),
        ('parser.add_argument("--region", required=True)', ("--region", "{partition}")),
        ('parser.add_argument("--region", required=True, help="where it is, e.g. north")', ("--region", "north")),
        ('parser.add_argument("--strength", type=float, required=True)', ("--strength", "0.1")),
        ('parser.add_argument("--defense")\nif parser.parse_args().defense == "noise": pass', ()),
        ('parser.add_argument("--partition", choices=["iid", "noniid"], required=True)', ("--partition", "iid")),
        ('parser.add_argument("--until_epoch", type=int)', ()),
        ('parser.add_argument("--rounds", type=int)\nparser.add_argument("--batch-size")', ("--rounds", "1")),
        ('parser.add_argument("--cid", help="starting from 1")', ("--cid", "{partition+1}")),
        (
            'parser.add_argument("--client_num")\nparser.add_argument("--cid")\n'
            'parser.add_argument("--site", choices=["north", "south"])',
            ("--client_num", "{nodes}", "--cid", "{partition}", "--site", "{partition:north|south}"),
        ),
        (
            'parser.add_argument("--client_number")\nparser.add_argument("--partition")',
            ("--client_number", "{partition}", "--partition", "{partition}"),
        ),
        (
            "def begin(group: str, node_id: int, client_count: int, rate: float, share: float = 0.2): ...\n"
            "import fire\nfire.Fire(begin)",
            ("--group", "group", "--node_id", "{partition}", "--client_count", "{nodes}", "--rate", "0.1"),
        ),
        (
            "import click\n@click.command()\n@click.option('--cid', type=int, required=True)\n"
            "@click.option('--quiet', is_flag=True)\ndef begin(cid, quiet): ...",
            ("--cid", "{partition}"),
        ),
    ],
)
def test_arguments_are_guessed_from_the_parser(tmp_path: Path, asked: str, given: tuple[str, ...]) -> None:
    client = f"import argparse, sys\nimport flwr as fl\nparser = argparse.ArgumentParser()\n{asked}\n"
    client += "fl.client.start_client(server_address='x', client=None)\n"
    found = find_scripts(project(tmp_path, server=parts.SERVER, client=client))
    assert found is not None and found.client_arguments == given


def test_values_of_options_are_those_of_the_project_s_own_commands(tmp_path: Path) -> None:
    asked = 'parser.add_argument("--mode", required=True)\nparser.add_argument("--out", required=True)'
    page = "dry-run.py --mode q; docker run --mode r\n`python a/run.py --mode b \\\n --out c` & run.py --mode d"
    assert given_to(tmp_path, asked, page) == ("--mode", "b", "--out", "c")
    assert given_to(tmp_path, asked, "python -m a.run --mode b && x.py --out q") == ("--mode", "b", "--out", "0")


@pytest.mark.parametrize(
    ("asked", "page", "given"),
    [
        ('"--batch-size", type=int, choices=[16, 64]', "", ("16",)),
        ('"--batch-size", type=int, choices=range(2, 20)', "", ("2",)),
        ('"--device", choices=["cuda", "mps"]', "", ("cuda",)),
        ('"--device", choices={"mps", "cuda"}', "", ("cuda",)),
        ('"--device", type=click.Choice(["cuda", "mps"])', "", ("cuda",)),
        ('"--nodes", choices=[3, 4]', "", ("3",)),
        ('"--port", type=int', "", ("8080",)),
        ('"--ip", type=int', "", ("1",)),
        ('"--lr", type=int', "", ("1",)),
        ('"--dataset", choices=["mnist", "cifar10"]', "--dataset cifar10", ("cifar10",)),
        ('"--dataset", choices=["mnist", "cifar10"]', "--dataset DATASET", ("mnist",)),
        ('"--dataset"', "--dataset MNIST", ("MNIST",)),
        ('"--dataset"', "--dataset DATASET", ("0",)),
        ('"--dataset"', "--dataset NAME", ("0",)),
        ('"--dataset"', "--dataset path/to/x", ("0",)),
        ('"--alpha", type=float', "--alpha ALPHA", ("0.1",)),
        ('"--alpha", type=float', "--alpha 0.5", ("0.5",)),
        ('"--examples", type=int', "--examples many", ("1",)),
    ],
)
def test_values_of_options_are_ones_that_its_parser_takes(
    tmp_path: Path, asked: str, page: str, given: tuple[str, ...]
) -> None:
    assert given_to(tmp_path, f"parser.add_argument({asked}, required=True)", f"run.py {page}")[1:] == given


def test_pages_and_settings_are_ordinary_files_of_the_project(tmp_path: Path) -> None:
    folder, asked = tmp_path / "a", 'parser.add_argument("--config", required=True)'
    for name in ("docs.md", "sub/Makefile", "config.conf", ".github"):
        (folder / name).mkdir(parents=True)
    (tmp_path / "page.md").write_text("run.py --config outside")
    os.mkfifo(folder / "pipe.md")
    for name, to in {"a.md": "gone", "b.md": tmp_path / "page.md", "c.md": "/dev/zero", "d": tmp_path}.items():
        (folder / name).symlink_to(to)
    (folder / "z.md").write_text("run.py --config other")
    assert given_to(folder, asked, "") == ("--config", "other")
    (folder / "z.md").unlink()
    assert given_to(folder, asked, "") == ("--config", "0")
    names = ["docker-compose.yml", "package.json", ".pre-commit-config.yaml", ".github/config.yml", "tests/config.yml"]
    for name in [*names, "alpha.json", "config.yaml", "sub/run.yaml"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    for name in ("sub/run.yaml", "config.yaml", "alpha.json"):
        assert given_to(folder, asked, "") == ("--config", name)
        (folder / name).unlink()
    assert given_to(folder, asked, "") == ("--config", "0")


def given_to(folder: Path, asked: str, page: str) -> tuple[str, ...]:
    start = "import argparse\nimport flwr as fl\nparser = argparse.ArgumentParser()\n"
    project(folder, run=f"{start}{asked}\nfl.simulation.start_simulation(client_fn=None, num_clients=2)\n")
    if page:
        (folder / "README.md").write_text(page)
    found = find_scripts(folder)
    assert found is not None
    return found.server_arguments


@pytest.mark.parametrize(("guard", "given"), [("", ("1",)), ("if len(sys.argv) > 1: ", ())])
def test_a_server_gets_a_place_in_argv_that_it_reads_whatever_is_given(
    tmp_path: Path, guard: str, given: tuple[str, ...]
) -> None:
    server = f"import sys\nimport flwr as fl\n{guard}print('localhost:' + sys.argv[1])\nfl.server.start_server()\n"
    found = find_scripts(project(tmp_path, server=server, client=parts.CLIENT))
    assert found is not None and found.server_arguments == given


def test_a_script_needs_no_ray_of_its_own(tmp_path: Path) -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    code = "import flwr as fl, ray\nray.init(local_mode=True, include_dashboard=False)\n"
    code += "fl.simulation.start_simulation(client_fn=lambda cid: None, num_clients=4)\n"
    (tmp_path / "main.py").write_text(code)
    found = find_scripts(tmp_path)
    assert found is not None and start_scripts(found, tmp_path).nodes == 4


def test_clients_train_though_their_servers_evaluation_fails(tmp_path: Path) -> None:
    server = parts.SERVER.replace("FedAvg(", "FedAvg(evaluate_fn=lambda number, weights, config: 1 / 0, ")
    folder = project(tmp_path / "a", server=server, client=parts.CLIENT, network=parts.NETWORK)
    record = audited(folder, tmp_path / "out", "gradient")
    said = "The server's own evaluation failed, and was left out: ZeroDivisionError: division by zero"
    assert counts_in(record)[0]["exact"] == 2 and sum(said in each for each in record["problems"]) == 1


def test_clients_of_before_flower_1_are_asked(tmp_path: Path) -> None:
    client = """
import flwr as fl
from flwr.common import EvaluateRes, FitRes, ParametersRes, parameters_to_weights, weights_to_parameters
from network import FlowerClient


class Early(fl.client.Client):
    def __init__(self):
        self.own = FlowerClient(1)

    def get_parameters(self):
        return ParametersRes(parameters=weights_to_parameters(self.own.get_parameters({})))

    def fit(self, ins):
        made, number, _ = self.own.fit(parameters_to_weights(ins.parameters), ins.config)
        return FitRes(
            parameters=weights_to_parameters(made), num_examples=number, num_examples_ceil=number, fit_duration=0.1
        )

    def evaluate(self, ins):
        return EvaluateRes(num_examples=24, loss=1.0, accuracy=0.1)


fl.client.start_client("localhost:8080", Early())
"""
    record = audited(project(tmp_path / "a", client=client, network=parts.NETWORK), tmp_path / "out", "gradient")
    assert counts_in(record)[0]["exact"] == 2 and not record["problems"]


def test_a_package_with_modules_named_as_the_projects_is_still_missing(tmp_path: Path) -> None:
    main = "from gone_package.utils import scatter\nimport flwr\nflwr.simulation.start_simulation()\n"
    folder = project(tmp_path, main=main, utils="def scatter(): ...\n")
    assert "imports gone_package" in stops_of(read_app(folder))
    (folder / "main.py").write_text("from torch.utils import data\nfrom flwr.simulation import start_simulation\n")
    assert not parsed(folder)[folder / "main.py"].imports


def test_half_of_a_project_is_told_from_no_project(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has code that starts a server of Flower, but no script that starts a client"):
        read_app(project(tmp_path / "a", server=parts.SERVER))
    asleep = "import flwr as fl\ndef begin():\n    fl.client.start_client(client=None)\n"
    with pytest.raises(UserError, match="has code that starts a client of Flower, but no script that starts a client"):
        read_app(project(tmp_path / "b", client=asleep))


def test_clients_without_a_server_are_asked_by_plain_averaging(tmp_path: Path) -> None:
    reads = "        assert config['server_round'] == config['epochs'] == 1 and config['lr'] == 0.01\n"
    network = parts.NETWORK.replace(
        "def fit(self, parameters, config):\n", f"def fit(self, parameters, config):\n{reads}"
    )
    record = audited(project(tmp_path / "a", site=parts.CLIENT, network=network), tmp_path / "out", "gradient")
    assert record["rounds"] == 1 and counts_in(record)[0]["exact"] == 2
    assert "In place of a server of the project, FedAvg with usual settings asks site.py" in " ".join(record["notes"])


@pytest.mark.parametrize("kind", ["ValueError", "PermissionError"])
def test_clients_are_asked_by_plain_averaging_where_their_server_fails(tmp_path: Path, kind: str) -> None:
    failing = f"raise {kind}('no certificate')\n{parts.SERVER}"
    folder = project(tmp_path / "a", server=failing, client=parts.CLIENT, network=parts.NETWORK)
    record = audited(folder, tmp_path / "out", "gradient")
    assert counts_in(record)[0]["exact"] == 2 and "no certificate" in " ".join(record["problems"])


def test_a_client_that_is_named_needs_no_start_that_is_seen(tmp_path: Path) -> None:
    hidden = "import flwr\nif __name__ == '__main__':\n    getattr(flwr.client, 'start_client')()\n"
    found = find_scripts(project(tmp_path, server=parts.SERVER, other=hidden), clients=["other.py"])
    assert found is not None and [each.name for each in (found.server, *found.clients)] == ["server.py", "other.py"]


def test_a_module_that_an_installed_package_lacks_is_one_of_another_version(tmp_path: Path) -> None:
    folder = project(tmp_path, main="import torch.gone\nimport flwr\nflwr.simulation.start_simulation()\n")
    with pytest.raises(UserError, match=r"imports torch\.gone, which the torch here does not have: install"):
        read_app(folder).load(lambda app: "")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="such code runs there")
def test_code_of_a_later_python_is_named_as_such(tmp_path: Path) -> None:
    later = "try:\n    pass\nexcept ValueError, TypeError:\n    pass\n"
    folder = project(tmp_path, main="import later\nimport flwr\nflwr.simulation.start_simulation()\n", later=later)
    with pytest.raises(UserError, match=r"is written for Python 3\.14 or later"):
        read_app(folder).load(stops_of)


def test_a_folder_of_another_name_stands_for_a_package_that_is_missing(tmp_path: Path) -> None:
    main = "from earlier.task import N\nimport flwr as fl\nfl.simulation.start_simulation(print, N)\n"
    project(tmp_path, src__main=main, src__task="N = 1\n", src__net="N = 1\n")
    with pytest.raises(UserError, match=r"imports earlier, which is not installed|imports earlier, which neither"):
        read_app(tmp_path).load(stops_of)
    project(tmp_path, src__main=f"from earlier.net import N\n{main}")
    assert read_app(tmp_path).load(stops_of).nodes == 1, "its folder of another name is it"
    assert not stops_of(read_app(tmp_path))
    del sys.modules["earlier"]
    (tmp_path / "requirements.txt").write_text("Earlier[all]==1.0")
    with pytest.raises(UserError, match=r"imports earlier, which is not installed"):
        read_app(tmp_path).load(stops_of)


def test_a_function_that_a_command_of_the_package_calls_starts_flower(tmp_path: Path) -> None:
    code = "import flwr as fl\ndef simulate(rounds=1):\n    fl.simulation.run_simulation(1, 2, num_supernodes=3)\n"
    folder = project(tmp_path, scripts__run=f"{code}def another(name):\n    fl.server.start_server(name)\n")
    found = find_scripts(folder)
    assert found is not None and found.server.name == "run.py"
    assert ScriptRunner(folder).run(found.server, ())["simulations"][0]["num_supernodes"] == 3
    project(tmp_path, scripts__run=f"{code}button.on_click(simulate)\n")
    assert find_scripts(folder) is None, "it waits for a button"


@pytest.mark.parametrize("head", ["def go(a, /)", "def go(*, a)", "@app.route('/')\ndef go()", "@fixture\ndef go()"])
def test_a_function_that_takes_arguments_or_is_another_library_s_is_no_start(tmp_path: Path, head: str) -> None:
    start = f"import flwr as fl\n{head}:\n    fl.simulation.run_simulation(1, 2, num_supernodes=3)\n"
    assert find_scripts(project(tmp_path, run=start)) is None
    assert find_scripts(project(tmp_path, run=start.replace(head, "@click.command()\ndef go(*, a=1, b=2)"))) is not None


def test_a_client_s_script_gets_the_number_of_clients_that_joined(tmp_path: Path) -> None:
    client = "import sys\nimport flwr as fl\nfrom network import FlowerClient\nfirst, count = map(int, sys.argv[1:])\n"
    client += "assert first < count\nfl.client.start_numpy_client(server_address='x', client=FlowerClient(first))\n"
    folder = project(tmp_path / "a", server=parts.SERVER, client=client, network=parts.NETWORK)
    chosen = {"server": "server.py", "clients": ["client.py"], "client_arguments": ["{partition}", "{nodes}"]}
    record = audited(folder, tmp_path / "out", nodes=3, chosen=chosen)
    assert not record["problems"] and record["models"] == {"Net": 3}


def test_a_script_may_start_all_in_threads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "from threading import Thread\nimport flwr as fl\n"
    code += "def client(number):\n    fl.client.start_client(client=number)\n"
    code += "def server():\n    fl.server.start_server()\nif __name__ == '__main__':\n"
    code += "    each = [*(Thread(target=client, args=[n]) for n in (7, 8)), Thread(target=server)]\n"
    code += "    for one in each:\n        one.start()\n        one.join()\n"
    scripts, runner = find_scripts(project(tmp_path, all=code)), ScriptRunner(tmp_path)
    assert scripts is not None and len(runner.run(scripts.server, ())["servers"]) == 1
    made = _Clients(scripts, runner, [], 3)
    assert [made._new(partition, 3)["client"] for partition in range(3)] == [7, 8, 7]
    assert "Traceback" not in capfd.readouterr().err


def test_a_folder_of_other_code_has_no_scripts(tmp_path: Path) -> None:
    assert find_scripts(project(tmp_path, main="print('start_server(')\n", broken="def (")) is None
    with pytest.raises(NoScriptError, match="expected to have a script that starts clients"):
        read_app(tmp_path)


def test_a_simulation_is_audited_for_the_rounds_that_are_asked(tmp_path: Path) -> None:
    folder = project(tmp_path / "a", main=parts.SIMULATION, network=parts.NETWORK)
    record = audited(folder, tmp_path / "out", "gradient")
    assert record["nodes"] == 3 and record["rounds"] == 1
    assert counts_in(record)[0]["exact"] == counts_in(record)[0]["judged"] == 2
    assert "main.py is run" in " ".join(record["notes"])


@pytest.mark.long
def test_two_apps_in_one_script_are_audited(tmp_path: Path) -> None:
    record = audited(project(tmp_path / "a", app=parts.APPS, network=parts.NETWORK), tmp_path / "out", rounds=2)
    assert record["nodes"] == 2 and record["rounds"] == 2 and not record["problems"]


SHARE = """
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

server, client = ServerApp(), ClientApp()

@client.train()
def train(message, context):
    return Message(RecordDict({"m": MetricRecord({"loss": 1.0})}), reply_to=message)

@server.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    asked = {"c": ConfigRecord({"server-round": 1})}
    sent = [Message(RecordDict(asked), each, "train") for each in nodes[: len(nodes) // 5]]
    print(list(grid.send_and_receive(sent))[0])

run_simulation(server_app=server, client_app=client, num_supernodes=50)
"""


@pytest.mark.parametrize(("own", "joined"), [(50, 10), (5, 5)])
def test_as_many_clients_join_as_a_share_of_them_needs(tmp_path: Path, own: int, joined: int) -> None:
    folder = project(tmp_path / "a", main=SHARE.replace("num_supernodes=50", f"num_supernodes={own}"))
    record = audited(folder, tmp_path / "out", nodes=3)
    assert record["nodes"] == joined and record["rounds"] == 1
    assert f"Of 3 clients the server chose none, so that {joined} joined." in record["problems"]
    assert "its clients took no training step of PyTorch" in record["headline"]


def test_errors_are_said_where_no_client_trains(tmp_path: Path) -> None:
    failing = "    if context.node_config['partition-id']:\n        raise OSError('no genes.rds')\n    return Message"
    folder = project(tmp_path / "a", main=SHARE.replace("    return Message", failing))
    record = audited(folder, tmp_path / "out", nodes=10)
    assert ", and errors came 1 times: OSError: no genes.rds" in record["headline"]


def test_a_script_that_ends_without_a_start_is_quoted(tmp_path: Path) -> None:
    shows = "import logging\ntry:\n    1 / 0\nexcept Exception as error:\n    {}\n"
    for show in ("print('Failed:', error)", "logging.error('Failed: %s', error)"):
        (tmp_path / "main.py").write_text(shows.format(show) + "import flwr\nif 0: flwr.server.start_server()")
        (tmp_path / "client.py").write_text("import flwr\nflwr.client.start_client()")
        found = find_scripts(tmp_path)
        assert found is not None
        with pytest.raises(UserError, match=r"ended without\. It last said: Failed: division by zero\. If that is"):
            start_scripts(found, tmp_path)


def test_a_server_and_its_clients_are_audited_and_asked_again_unchanged(tmp_path: Path) -> None:
    folder = project(tmp_path / "a", server=parts.SERVER, client=parts.CLIENT, network=parts.NETWORK)
    record = audited(folder, tmp_path / "out", "gradient", "one")
    assert record["nodes"] == 3 and not record["problems"]
    assert "--client-id {partition:1|2|3}" in " ".join(record["notes"])
    assert counts_in(audited(folder, tmp_path / "again", "gradient", "one"))[:2] == counts_in(record)[:2]


def test_a_client_script_sets_up_its_log_as_in_a_process_of_its_own(tmp_path: Path) -> None:
    log = "import logging\nlogger = logging.getLogger(__name__)\nif not logger.handlers:\n"
    log += "    form = logging.Formatter()\n    logger.addHandler(logging.StreamHandler())\nprint(form)\n"
    folder = project(tmp_path, client=f"import helper\n{log}import flwr as fl\nfl.client.start_client()\n", helper=log)
    runner = ScriptRunner(folder)
    for partition in range(2):
        assert any(runner.run(folder / "client.py", (), partition=partition).values())


def test_a_client_script_that_answers_signals_begins_in_another_thread(tmp_path: Path) -> None:
    script = "import signal\nsignal.signal(signal.SIGTERM, print)\nimport flwr as fl\nfl.client.start_client()\n"
    folder, before = project(tmp_path, client=script), signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        assert any(pool.submit(ScriptRunner(folder).run, folder / "client.py", ()).result().values())
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_script_within_a_package_is_run_as_by_its_module(tmp_path: Path) -> None:
    start = "import flwr\nflwr.simulation.start_simulation(num_clients=NUMBER)\n"
    folder = project(
        tmp_path,
        own____init__="",
        own__parts="NUMBER = 3",
        own__main=f"from .parts import NUMBER\nassert __package__ == 'own' and __name__ == '__main__'\n{start}",
        own__inner____init__="",
        own__inner__main=f"from ..parts import NUMBER\nassert __package__ == 'own.inner'\n{start}",
        plain__main="assert not __package__\nNUMBER = 3\n" + start,
    )
    for place in ("own", "own/inner", "plain"):
        assert any(ScriptRunner(folder).run(folder / place / "main.py", ()).values())


def test_types_are_still_had_from_flower_s_module_of_them() -> None:
    with moved_names_lent():
        assert getattr(importlib.import_module("flwr.common.typing"), "Dict") is typing.Dict  # noqa: B009, UP006


def test_objects_that_no_message_holds_are_shared_as_in_earlier_simulations() -> None:
    compat: Any = importlib.import_module("flwr.compat.common.recorddict_compat")
    given = {"lr": 0.1, "rates": [0.5, 1.0], "none": None, "plan": {"a": (1, 2)}, "name": "x"}
    with moved_names_lent() as lent:
        sent = [
            compat.recorddict_to_fitins(
                compat.fitins_to_recorddict(common.FitIns(PARAMETERS, given), True), True
            ).config,
            compat.recorddict_to_evaluateres(
                compat.evaluateres_to_recorddict(
                    common.EvaluateRes(common.Status(common.Code.OK, ""), 0.5, 3, given)  # type: ignore[arg-type]
                )
            ).metrics,
        ]
        assert sent == [given, given] and sent[0]["plan"] is given["plan"]
        assert lent == [f"objects in place of numbers and texts ({key})" for key in ("rates", "none", "plan")]


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor, lambda ages: {"ages": np.array(ages)}])
def test_what_a_client_sends_in_an_object_is_found(kind: Any) -> None:
    compat: Any = importlib.import_module("flwr.compat.common.recorddict_compat")
    ages = np.arange(20, 60, 2) % 37 + 18.5
    status, seen = common.Status(common.Code.OK, ""), Loaded(columns={"age": ages}, examples=len(ages))
    with moved_names_lent():
        sent = compat.fitres_to_recorddict(common.FitRes(status, PARAMETERS, 3, {"held": kind(ages.tolist())}), True)
        (leak,) = findings_of(_described(sent, UP, "train", 1, 1), seen, (), trained=True)
    assert leak.severity == "data" and "column age" in leak.what


def test_a_relative_import_from_beyond_all_folders_is_the_script_s_error(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(f"from {'.' * 50} import parts\n")
    with pytest.raises(UserError, match="ImportError: attempted relative import with no known parent package"):
        ScriptRunner(tmp_path).run(tmp_path / "main.py", ())


def test_a_log_line_that_can_t_be_formatted_stops_no_script(tmp_path: Path) -> None:
    log = "import flwr, logging\nlogging.raiseExceptions = False\nlogging.error('%d', 'a')\n"
    (tmp_path / "main.py").write_text(f"{log}flwr.client.start_client()")
    assert any(ScriptRunner(tmp_path).run(tmp_path / "main.py", ()).values())


def test_names_of_options_take_no_time() -> None:
    assert usual_for("n" + "eval" * 40 + "!") is None


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedProx"])
def test_strategies_take_options_as_before_flower_1(name: str) -> None:
    with moved_names_lent():
        kind = getattr(strategy, name)
        more = {"proximal_mu": 0.1} if name == "FedProx" else {}
        more |= {"initial_parameters": []} if name == "FedAdam" else {}
        made = kind(fraction_eval=0.5, min_eval_clients=3, eval_fn=len, **more)
        assert (made.fraction_evaluate, made.min_evaluate_clients, made.evaluate_fn(1, [2, 2], {})) == (0.5, 3, 2)


def test_replies_without_a_status_are_noted_and_unknown_arguments_are_errors() -> None:
    with moved_names_lent() as lent:
        common.FitRes(status=common.Status(common.Code.OK, ""), parameters=PARAMETERS, num_examples=3, metrics={})
        assert not lent
        for _ in range(2):
            early = common.FitRes(parameters=PARAMETERS, num_examples=3, num_examples_ceil=4, fit_duration=0.5)  # type: ignore[call-arg]
            assert (early.num_examples, early.metrics, early.status.code) == (3, {}, common.Code.OK)
        assert common.EvaluateRes(loss=1.0, num_examples=3, accuracy=0.5).loss == 1.0  # type: ignore[call-arg]
        assert common.GetParametersRes(parameters=PARAMETERS).parameters is PARAMETERS  # type: ignore[call-arg]
        names = ("FitRes", "EvaluateRes", "GetParametersRes")
        assert lent == [f"flwr.common.{name} without status" for name in names]
        for more in ({"status": early.status}, {}):
            with pytest.raises(TypeError, match="num_exmples"):
                common.FitRes(parameters=PARAMETERS, num_exmples=3, **more)  # type: ignore[call-arg,arg-type]


def test_an_evaluation_of_the_weights_alone_is_one_as_before_flower_1() -> None:
    with moved_names_lent():
        for name in ("eval_fn", "evaluate_fn"):
            made = strategy.FedAvg(**{name: lambda weights: (float(sum(weights)), {})})  # type: ignore[arg-type]
            assert made.evaluate_fn is not None and made.evaluate_fn(1, [np.ones(())], {}) == (1.0, {})
        for present in (lambda number, weights, config: (float(number), config), lambda *given: (given[0], given[2])):
            made = strategy.FedAvg(evaluate_fn=present)
            assert made.evaluate_fn is not None and made.evaluate_fn(3, [], {}) == (3.0, {})


@pytest.mark.long
def test_a_client_of_before_flower_1_is_asked_as_it_was(tmp_path: Path) -> None:
    network = parts.NETWORK.replace("def get_parameters(self, config)", "def get_parameters(self)")
    network = network.replace("self.get_parameters({})", "weights_to_parameters and self.get_parameters()")
    network += "\nfrom flwr.common import Weights, weights_to_parameters\n"
    record = audited(project(tmp_path / "a", app=parts.SIMULATION, network=network), tmp_path / "out", "gradient")
    assert not record["problems"] and counts_in(record)[0]["exact"] == 2
    assert "flwr.common.Weights" in " ".join(record["notes"])


@pytest.mark.long
def test_as_many_clients_join_as_a_server_waits_for(tmp_path: Path) -> None:
    folder = project(tmp_path / "a", server=parts.SERVER, client=parts.CLIENT, network=parts.NETWORK)
    record = audited(folder, tmp_path / "out", nodes=2)
    assert any("more than 2 clients" in problem for problem in record["problems"])
    assert sum(record["models"].values()) == 3


@pytest.mark.long
def test_a_project_s_own_module_comes_before_a_package_of_that_name(tmp_path: Path) -> None:
    import datasets  # noqa: PLC0415

    main = f"from datasets import NUMBER\nassert NUMBER == 3\n{parts.SIMULATION}"
    folder = project(tmp_path / "a", main=main, datasets="NUMBER = 3\n", network=parts.NETWORK)
    assert audited(folder, tmp_path / "out")["nodes"] == 3
    assert importlib.import_module("datasets") is datasets


@pytest.mark.long
def test_a_notebook_is_a_script(tmp_path: Path) -> None:
    folder = project(tmp_path / "a", network=parts.NETWORK)
    lines = [
        "%matplotlib inline\n",
        "!pip install flwr\n",
        "pip install torch\n",
        *parts.SIMULATION.splitlines(keepends=True),
    ]
    cells = [{"cell_type": "code", "source": each} for each in (["%%bash\n", "ls | wc\n"], ["shown.show()\n"], lines)]
    (folder / "federated.ipynb").write_text(json.dumps({"cells": cells}))
    record = audited(folder, tmp_path / "out")
    assert record["nodes"] == 3 and any(
        "'shown.show()' of federated.ipynb failed" in each for each in record["problems"]
    )


def test_a_cell_that_fails_is_named_if_no_other_starts_flower(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": each} for each in ("print(1)", "rows = gone", "len(rows)")]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert cells_of(tmp_path / "a.ipynb") == ["print(1)", "rows = gone", "len(rows)"]
    with pytest.raises(UserError, match="name 'gone' is not defined"):
        ScriptRunner(tmp_path).run(tmp_path / "a.ipynb", ())
    started = {"cell_type": "code", "source": "import flwr\nflwr.simulation.start_simulation(num_clients=4)"}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [*cells, started]}))
    runner = ScriptRunner(tmp_path)
    assert runner.run(tmp_path / "a.ipynb", ())["simulations"] == [{"num_clients": 4}]
    error = "NameError: name 'gone' is not defined (a.ipynb, line 1)"
    assert len(runner.failed) == 2 and runner.failed[0] == f"The cell 'rows = gone' of a.ipynb failed: {error}"


def test_a_module_that_a_cell_lacks_is_looked_for_in_the_project(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "near.py").write_text("clients = 5")
    code = ("import near", "import flwr\nflwr.simulation.start_simulation(num_clients=4)")
    cells = [{"cell_type": "code", "source": each} for each in ("gone", *code)]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    runner = ScriptRunner(tmp_path)
    assert runner.run(tmp_path / "a.ipynb", ())["simulations"] and len(runner.failed) == 1
    (tmp_path / "lib" / "near.py").unlink()
    with pytest.raises(UserError, match="near"):
        ScriptRunner(tmp_path).run(tmp_path / "a.ipynb", ())


def test_questions_to_a_person_and_places_in_argv_are_answered_by_their_names(tmp_path: Path) -> None:
    server = "how_many = int(input('Number of rounds? '))\nassert how_many == 1\n" + parts.SERVER
    client = "import sys\nimport flwr as fl\nfrom network import FlowerClient\nwords = sys.argv\n"
    client += "cid = int(words[1])\nport = words[2]\nassert port == '8080' and len(words) == 3\n"
    client += "fl.client.start_numpy_client(server_address=f'127.0.0.1:{port}', client=FlowerClient(cid))\n"
    folder = project(tmp_path / "a", server=server, client=client, network=parts.NETWORK)
    record = audited(folder, tmp_path / "out", nodes=3)
    assert not record["problems"] and record["models"]


def test_environment_variables_that_are_not_set_get_usual_values_or_are_named(tmp_path: Path) -> None:
    server = "import os\nassert int(os.getenv('FLOWER_NUM_ROUNDS')) == 1 and os.getenv('NO_HOME', 'x') == 'x'\n"
    (tmp_path / "main.py").write_text(f"{server}import flwr\nflwr.simulation.start_simulation(num_clients=4)")
    runner = ScriptRunner(tmp_path)
    assert runner.run(tmp_path / "main.py", ())["simulations"]
    assert runner.failed == ["The environment variable FLOWER_NUM_ROUNDS is not set: 1 was taken"]
    (tmp_path / "main.py").write_text(f"{server}os.getenv('TRAINING_DB').lower()")
    with pytest.raises(UserError, match=r"AttributeError.* are not set: TRAINING_DB; --environment NAME"):
        runner.run(tmp_path / "main.py", ())


@pytest.mark.parametrize("asked", ["os.environ['{}']", "os.environ.get('{}')", "os.getenv('{}')"])
def test_environment_variables_have_the_values_that_the_project_s_commands_set(tmp_path: Path, asked: str) -> None:
    start = "import flwr\nflwr.simulation.start_simulation(num_clients=4)"
    server = f"import os\nassert {asked.format('ROUNDS')} == '1' and 'SITE' not in os.environ\n"
    server += f"assert {asked.format('PART')} == 'north' and os.environ.get('SITE', 'x') == 'x'\n"
    (tmp_path / "main.py").write_text(server + start)
    (tmp_path / "README.md").write_text("Say so:\n    export SITE=x\n    export PART=your_part\n")
    (tmp_path / "run.sh").write_text("export PART=north\nexport SITE='here'\npython main.py\nexport PART=south\n")
    runner = ScriptRunner(tmp_path)
    assert runner.run(tmp_path / "main.py", ())["simulations"]
    assert runner.failed == [
        "The environment variable ROUNDS is not set: 1 was taken",
        "The environment variable PART is not set: north was taken",
    ]
    (tmp_path / "main.py").write_text(f"import os\nassert os.getenv('SITE', 'x') == 'here'\n{start}")
    runner = ScriptRunner(tmp_path)
    assert runner.run(tmp_path / "main.py", ())["simulations"], "since its default fails"
    assert runner.failed == ["The environment variable SITE is not set: here was taken"]


def test_a_script_that_starts_nothing_by_itself_runs_with_the_flags_that_a_page_says(tmp_path: Path) -> None:
    parser = "import argparse, flwr\nparser = argparse.ArgumentParser()\nparser.add_argument('--clients', default=3)\n"
    parser += "parser.add_argument('--all', action='store_true')\nargs = parser.parse_args()\n"
    main = f"{parser}if args.all:\n    flwr.simulation.start_simulation(num_clients=args.clients)\n"
    (tmp_path / "main.py").write_text(main)
    runner = ScriptRunner(tmp_path)
    assert not any(runner.run(tmp_path / "main.py", ()).values())
    (tmp_path / "README.md").write_text("Run `main.py`:\n\n    python main.py --clients 5 --all  # slow\n")
    runner = ScriptRunner(tmp_path)
    assert runner.run(tmp_path / "main.py", ())["simulations"] == [{"num_clients": 3}]
    assert runner.failed == ["main.py starts nothing alone: it ran with --all, as pages say"]


def test_a_script_that_fails_names_its_arguments_and_options_that_it_was_not_given(tmp_path: Path) -> None:
    parser = "import argparse, configparser\nparser = argparse.ArgumentParser()\nparser.add_argument('--data')\n"
    parser += "parser.add_argument('--settings', required=True)\nargs = parser.parse_args()\n"
    (tmp_path / "main.py").write_text(f"{parser}raise ValueError(args.data)\nimport flwr\nflwr.server.start_server()")
    lacks = r"ValueError: None \(main\.py, line 6\).* with the arguments --settings 0: .* have no default: --data;"
    with pytest.raises(UserError, match=lacks):
        ScriptRunner(tmp_path).run(tmp_path / "main.py", ["--settings", "0"])
    (tmp_path / "main.py").write_text(f"{parser}configparser.ConfigParser()[args.data or 'x']")
    with pytest.raises(UserError, match=r"KeyError: 'x' \(configparser\.py, line \d+, called in main\.py, line 6\)"):
        ScriptRunner(tmp_path).run(tmp_path / "main.py", ["--settings", "0"])
    library = tmp_path / "site-packages"
    library.mkdir()
    options = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('-o')\nparser.parse_args()"
    (library / "library.py").write_text(options)
    uses = f"import sys\nsys.path.append({str(library)!r})\nimport library\nraise ValueError(1)"
    (tmp_path / "main.py").write_text(uses)
    with pytest.raises(UserError) as caught:
        ScriptRunner(tmp_path).run(tmp_path / "main.py", [])
    assert "ValueError: 1" in str(caught.value) and "have no default" not in str(caught.value), (
        "a library's own options"
    )


def test_a_missing_file_that_an_argument_names_is_blamed_on_it(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("import sys\nopen(sys.argv[1] + '/train.json')")
    with pytest.raises(UserError, match=r"opens 0/train\.json, but there is none\. It ran with the arguments 0 1:"):
        ScriptRunner(tmp_path).run(tmp_path / "main.py", ["0", "1"])
    for given in ("sets/own", str(tmp_path / "sets")):
        with pytest.raises(UserError, match=r"opens .*/train\.json, but there is none\. It ran with the arguments"):
            ScriptRunner(tmp_path).run(tmp_path / "main.py", [given])
    (tmp_path / "main.py").write_text("open('train.json')")
    with pytest.raises(FileNotFoundError):
        ScriptRunner(tmp_path).run(tmp_path / "main.py", ["0", "1"])


@pytest.mark.parametrize(("end", "asks"), [("exit(0)", False), ("if len(sys.argv) < 9: sys.exit(1)", True)])
def test_a_script_that_ends_before_its_start_is_named_with_the_line(tmp_path: Path, end: str, asks: bool) -> None:
    (tmp_path / "main.py").write_text(f"import sys\nprint(sys.argv)\n{end}\nimport flwr\nflwr.server.start_server()")
    with pytest.raises(UserError, match=r"ended with SystemExit: \d \(main.py, line 3\) before it started") as caught:
        ScriptRunner(tmp_path).run(tmp_path / "main.py", ["4"])
    assert ("its arguments were 4: name them by" in str(caught.value)) == asks


def test_the_line_at_which_a_script_ends_is_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import sys\n\ndef end():\n    print(sys.argv)\n    sys.exit(1)\n")
    (tmp_path / "main.py").write_text("import helper\n\nhelper.end()\n\nexit()\nimport flwr\nflwr.start_server()")
    with pytest.raises(UserError, match="its arguments were none: name them by"):
        ScriptRunner(tmp_path).run(tmp_path / "main.py", [])


def test_a_changed_copy_of_flower_is_named_where_the_installed_one_lacks_something(tmp_path: Path) -> None:
    script = "import flwr\nflwr.simulation.start_simulation(num_clients=4, strategy=flwr.server.strategy.FedOwn())"
    folder = project(tmp_path / "a", main=script)
    (folder / "flwr").mkdir()
    (folder / "flwr" / "__init__.py").touch()
    installed = folder / ".venv" / "lib" / "site-packages" / "flwr"  # which may be the one that is run
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    with pytest.raises(UserError, match=r"'FedOwn'.*The copy of Flower in flwr is not run: the installed one is\.$"):
        read_app(folder).load(stops_of)


def test_a_question_that_comes_again_gets_another_answer(tmp_path: Path) -> None:
    server = "found = [input('Strategy (fedavg/fedprox): '), input('Strategy (fedavg/fedprox): ')]\n"
    server += "assert found == ['fedavg', 'fedprox'] and input('Decay [0.5]: ') == ''\n" + parts.SERVER
    folder = project(tmp_path / "a", server=server, client=parts.CLIENT, network=parts.NETWORK)
    assert audited(folder, tmp_path / "out")["models"]
    (folder / "server.py").write_text("while input('Name? ') != 'Eve':\n    pass\n" + parts.SERVER)
    record = audited(folder, tmp_path / "again")  # of the clients alone
    assert any("asks 'Name?' again and again" in each for each in record["problems"])


def test_modules_are_found_in_another_folder_of_the_project(tmp_path: Path) -> None:
    folder = project(tmp_path / "a", app=parts.SIMULATION)
    (folder / "inner" / "parts").mkdir(parents=True)
    (folder / "inner" / "parts" / "network.py").write_text(parts.NETWORK)
    assert audited(folder, tmp_path / "out")["nodes"] == 3


def test_files_are_found_from_the_folder_above_and_a_script_may_call_what_it_imports(tmp_path: Path) -> None:
    start = parts.SIMULATION.partition("if __name__")[0]
    start += "def main():\n    assert open('conf/rounds.txt').read() == '1'\n"
    start += "    fl.simulation.start_simulation(client_fn=client_fn, num_clients=3)\n"
    go = "from federated import main\nfor _ in [0]:\n    main()\n"
    folder = project(tmp_path / "a", code__go=go, code__federated=start, code__network=parts.NETWORK)
    (folder / "conf").mkdir()
    (folder / "conf" / "rounds.txt").write_text("1")
    assert audited(folder, tmp_path / "out")["nodes"] == 3


@pytest.mark.long
def test_a_strategy_may_call_a_round_as_before_flower_1(tmp_path: Path) -> None:
    named = "class Named(fl.server.strategy.FedAvg):\n    def configure_fit(self, rnd, parameters, client_manager):\n"
    named += "        return super().configure_fit(rnd, parameters, client_manager)\n"
    server = parts.SERVER.replace(
        "fl.server.strategy.FedAvg(",
        "Named(fraction_eval=0.5, eval_fn=lambda weights: None, initial_parameters=initial, ",
    ).replace("\n\n", f"\n{named}\n", 1)
    server = f"from network import FlowerClient\ninitial = FlowerClient(0).get_parameters({{}})\n{server}"
    folder = project(tmp_path / "a", server=server, client=parts.CLIENT, network=parts.NETWORK)
    record = audited(folder, tmp_path / "out", nodes=3)
    assert not record["problems"] and record["models"]


def test_why_no_message_left_is_named(tmp_path: Path) -> None:
    server = parts.SERVER.replace("FedAvg(", "FedAvg(on_fit_config_fn=lambda number: {'rate': number['rate']}, ")
    assert server != parts.SERVER
    folder = project(tmp_path / "a", server=server, client=parts.CLIENT, network=parts.NETWORK)
    record = audited(folder, tmp_path / "out", nodes=3)
    assert "TypeError" in record["headline"] or any("TypeError" in each for each in record["problems"]), record


def test_what_a_script_lacks_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = parts.CLIENT.replace('"--client-id", type=int', '"--hospital-name"')
    folder = project(tmp_path / "a", server=parts.SERVER, client=client, network=parts.NETWORK)
    record = audited(folder, tmp_path / "out")
    assert any("--client-args" in problem for problem in record["problems"])
    (folder / "server.py").write_text("import flwr as fl\nif open('gone'):\n    fl.server.start_server()\n")
    assert run_command_line(["audit", str(folder), "--out", str(tmp_path / "out")]) == 2
    (folder / "server.py").write_text("import flwr as fl\nif 0:\n    fl.server.start_server()\n")
    assert run_command_line(["audit", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "ended without" in capsys.readouterr().err
    (folder / "server.py").write_text(
        "import flwr as fl\nraise FileNotFoundError('No table')\nfl.server.start_server()\n"
    )
    assert run_command_line(["audit", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert (
        "raised FileNotFoundError: No table (server.py, line 2) when it is imported. It works"
        in capsys.readouterr().err
    )
    assert run_command_line(["audit", str(folder), "--script", "gone.py", "--out", str(tmp_path / "out")]) == 2
    assert "expect files of" in capsys.readouterr().err
    assert run_command_line(["audit", str(folder), "--script", "server.py", "--server", "server.py"]) == 2
    assert "--script or --server is expected, but got both" in capsys.readouterr().err
    (folder / "server.py").write_text(parts.SERVER)
    (folder / "client.py").write_text("")
    (folder / "pyproject.toml").write_text("[project]\nname = 'a'\n")
    assert run_command_line(["audit", str(folder), "--check"]) == 2
    assert "no script that starts a client when it is run" in capsys.readouterr().err
    (folder / "server.py").unlink()
    assert run_command_line(["audit", str(folder), "--check"]) == 2
    assert "is expected to have a script that starts clients" in capsys.readouterr().err


def test_code_that_no_script_calls_is_named(tmp_path: Path) -> None:
    server = "import flwr as fl\nclass Window:\n    def begin(self):\n        fl.server.start_server()\nWindow()\n"
    client = (
        "import flwr as fl\nclass Window:\n    def begin(self):\n        fl.client.start_client(client=1)\nWindow()\n"
    )
    with pytest.raises(UserError, match="code that starts Flower, but no script that does so when it is run"):
        read_app(project(tmp_path, server=server, client=client))


def test_calls_of_clients_without_a_group_are_answered_as_before_flower_1_12() -> None:
    servers, asked = importlib.import_module("flwr.server.server"), list[Any]()

    class Proxy:
        def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
            asked.append((ins, timeout, group_id))
            return common.FitRes(common.Status(common.Code.OK, ""), PARAMETERS, 3, {})

    with moved_names_lent():
        servers.fit_clients([(Proxy(), "ins")], 1, 0.5)
        servers.fit_clients([(Proxy(), "ins")], max_workers=1, timeout=None, group_id=2)
    assert asked == [("ins", 0.5, None), ("ins", None, 2)]
