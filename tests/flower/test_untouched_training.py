"""What an audit says of the real training, of apps without loaders, of silent clients, and by its options."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.instrument.watch import OnlyExamples, TrainingWatch
from fl_privacy.auditing.scenario_members import separated
from fl_privacy.cli.main import run_command_line
from fl_privacy.measure.answer import Answer, Scenario
from fl_privacy.report.audit_page import AuditRecord
from tests.flower import project_parts as parts
from tests.flower.untouched_apps import PLAIN, audited, rung, write

LOADER = "    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)\n"
UNLOADED = PLAIN.replace(LOADER, "").replace(
    "for a, b in loader:", "for a, b in ((x[k : k + 4], y[k : k + 4]) for k in range(0, 40, 4)):"
)
FEW = PLAIN.replace("TensorDataset(x, y)", "TensorDataset(x[:8], y[:8])").replace("nn.Sigmoid()", "nn.Tanh()")


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_the_real_training_is_attacked_on_a_sample(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_sample", PLAIN, seconds=10.0, victims=1, only=("all",))
    real = rung(record, "all")
    assert real["counts"]["judged"] == 16 and real["control"]["judged"] == 16
    assert any("compared with 16 of 40 examples" in note for note in real["notes"])
    assert not any("real training was not attacked" in line for line in record["further"])
    late = audited(tmp_path / "late", "app_late", PLAIN, victims=1, only=())
    assert any(
        "No single example of your real training was attacked: no time was left" in line for line in late["further"]
    )


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_few_steps_are_undone(tmp_path: Path) -> None:
    real = rung(audited(tmp_path, "app_few_steps", FEW, seconds=2.0, victims=1, only=("all",)), "all")
    assert real["counts"]["judged"] == 8, real["reason"]
    assert any("replays all 2 steps" in note for note in real["notes"])


def test_a_real_training_that_was_not_attacked_is_in_the_first_lines() -> None:
    answer = Answer(scenario=Scenario(name="all"), reason="its code fails")
    assert AuditRecord(app="a", answers=[answer]).further == ["Your real training was not attacked: its code fails"]


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_an_example_is_singled_out_without_a_loader(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_unloaded", UNLOADED, seconds=4.0, only=("gradient", "one", "batch"))
    for name in ("gradient", "one"):
        found = rung(record, name)
        assert found["counts"]["exact"] == found["counts"]["judged"] == 2, found["reason"]
        assert found["control"]["read"] == 0 and found["size"] == 1
    assert rung(record, "batch")["size"] == 4 and rung(record, "batch")["counts"]["judged"] == 4


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_the_fewest_examples_that_work_take_the_place_of_one(tmp_path: Path) -> None:
    zero = "        optimizer.zero_grad()"
    wants = f"        if len(a) < 3: raise ValueError('Expected more than 1 value per channel')\n{zero}"
    record = audited(tmp_path, "app_of_three", PLAIN.replace(zero, wants, 1), seconds=1.0, only=("one",))
    one = rung(record, "one")
    assert one["size"] == 3 and "each of 3 examples" in one["made"] and "takes no fewer" in one["made"]
    assert one["counts"]["judged"] + one["counts"]["failures"] == 6


def _trained(only: OnlyExamples, target: Any) -> tuple[Any, torch.nn.Module]:
    torch.manual_seed(0)
    net, x = torch.nn.Linear(3, 3), torch.rand(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with TrainingWatch(program=True, only=only).looking() as seen:
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x), target(x)).backward()
            optimizer.step()
    return seen, net


def test_targets_are_cut_with_their_inputs_and_later_steps_change_nothing() -> None:
    torch.manual_seed(1)
    other = torch.rand(6, 3)
    seen, net = _trained(OnlyExamples(first=2, at_call=True), lambda x: other)
    assert seen.cut and seen.steps == 1 and seen.loaded == 1
    lengths = {len(value) for value in seen.program.constants.values() if value.dim()}
    assert lengths == {1}
    assert any(torch.equal(value[0], other[2]) for value in seen.program.constants.values() if value.dim())
    weight = seen.before["parts.0.weight"] - 0.1 * seen.gradients["parts.0.weight"]
    assert torch.allclose(net.weight, weight)


def test_an_autoencoders_target_stays_its_input() -> None:
    seen, _ = _trained(OnlyExamples(first=0, at_call=True), lambda x: x.view(6, 3) + 0)
    assert sum(value.shape == (1, 3) for value in seen.program.constants.values()) == 1


@pytest.mark.parametrize("only", [None, OnlyExamples(number=1)], ids=["all", "one"])
def test_a_loader_that_is_looked_at_before_the_training_trains(only: OnlyExamples | None) -> None:
    net, loader = nn.Linear(3, 1), DataLoader(TensorDataset(torch.rand(8, 3)), batch_size=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with TrainingWatch(only=only).looking() as seen:
        assert next(iter(loader))[0].shape[1] == 3
        for _ in range(2):
            for (rows,) in loader:
                optimizer.zero_grad()
                net(rows).sum().backward()
                optimizer.step()
    assert seen.loaded == (16 if only is None else 1) and seen.steps == (4 if only is None else 1)


FAILS = "    def get_parameters(self, config):\n        import no_such_module\n"


def test_a_client_that_fails_at_the_first_message_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = parts.NETWORK.replace("    def get_parameters(self, config):\n", FAILS, 1)
    for name, text in (("server", parts.SERVER), ("client", parts.CLIENT), ("network", network)):
        (tmp_path / f"{name}.py").write_text(text)
    session = audit_app(read_app(tmp_path), AppAuditRequest(out=tmp_path / "out", victims=1, seconds=0.1))
    wanted = "Nothing to audit: no client answered: ModuleNotFoundError: No module named 'no_such_module'"
    assert session.content["headline"].startswith(f"{wanted} (network.py, line ")
    assert session.line.count("no_such_module") == 1
    client = parts.CLIENT.replace('"--client-id", type=int', '"--hospital-name"')
    (tmp_path / "client.py").write_text(client)
    session = audit_app(read_app(tmp_path), AppAuditRequest(out=tmp_path / "out", victims=1, seconds=0.1))
    assert "UserError" not in session.line and session.line.count("refuses its arguments") == 1
    (tmp_path / "server.py").write_text(
        parts.SERVER.replace("fl.server.start_server(", "fl.server.start_server(server=7, ")
    )
    session = audit_app(read_app(tmp_path), AppAuditRequest(out=tmp_path / "out", victims=1, seconds=0.1))
    assert session.content["headline"].startswith("Nothing to audit: the app's server ended before it asked a client: ")


def test_rounds_are_counted_though_no_client_is_in_all(tmp_path: Path) -> None:
    from tests.flower.untouched_apps import SERVER  # noqa: PLC0415

    server = SERVER.replace("FedAvg(", "FedAvg(fraction_train=0.25, min_train_nodes=1, ")
    assert audited(tmp_path, "app_sampled", PLAIN, server, nodes=6, rounds=4, victims=1)["rounds"] == 4


def test_json_is_all_of_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(
        tmp_path / "app", "app_json", PLAIN.replace("    net = Net()\n", "    net = Net()\n    print('hi')\n", 1)
    )
    command = [
        "audit",
        str(folder),
        "--out",
        str(tmp_path / "out"),
        "--nodes",
        "2",
        "--victims",
        "1",
        "--seconds",
        "0.1",
    ]
    assert run_command_line([*command, "--json", "--seed", "5"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["app"] == "app_json" and "Page: " in said.err and "hi" in said.err
    assert "seed 5, cpu" in next(tmp_path.rglob("report.html")).read_text()
    assert run_command_line([*command, "--device", "tpu"]) == 2
    assert "device is expected to be auto, cpu or cuda" in capsys.readouterr().err


def test_membership_is_said_at_low_false_positive_rates() -> None:
    rng = np.random.default_rng(0)

    def said(number: int) -> str:
        inside, outside, *before = (rng.normal(mean, 1, number) for mean in (3, 0, 0, 0))
        return separated(inside, outside, *before, "").notes[-1]

    few = said(200)
    assert "at 1 % FPR 0." in few and "at 0.1 % FPR not measured (needs 1,000 non-members, has 200)" in few
    assert "not measured" not in said(1000)


def test_a_part_called_alone_before_the_network_is_no_second_network() -> None:
    features = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    watch = TrainingWatch(program=True)
    with watch.looking() as seen:
        features(torch.rand(1, 2, 2))  # to learn a size
        network = nn.Sequential(features, nn.Linear(3, 2))
        network(torch.rand(1, 2, 2))
        loaded = {name: torch.rand_like(value) for name, value in network.state_dict().items()}
        network.load_state_dict(loaded)
        nn.functional.cross_entropy(network(torch.rand(1, 2, 2)), torch.tensor([1])).backward()
        torch.optim.SGD(network.parameters(), lr=0.1).step()
    assert seen.modules == [network]
    assert set(seen.gradients) == set(seen.before) == {f"parts.0.{name}" for name in loaded}
    assert all(torch.equal(seen.before[f"parts.0.{name}"], value) for name, value in loaded.items())


@pytest.mark.parametrize("anew", [True, False])
def test_a_client_asked_again_steps_from_the_optimizer_s_first_state(anew: bool) -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

    def step(sign: float, only: OnlyExamples | None = None) -> tuple[Any, torch.Tensor]:
        before = net.bias.detach().clone()
        with TrainingWatch(only=only).looking() as seen:
            for (rows,) in DataLoader(TensorDataset(torch.ones(2, 3)), batch_size=2):
                optimizer.zero_grad()
                (sign * net(rows).sum()).backward()
                optimizer.step()
        return seen, net.bias.detach() - before

    (first, _), (second, _) = step(1.0), step(1.0)
    assert first.anew and not second.anew
    held = [each.clone() for each in optimizer.state[net.bias].values()]
    _, moved = step(-1.0, OnlyExamples(anew=anew))
    assert (abs(moved.item() - 0.1) < 1e-4) == anew, "a first step of Adam has the length of its learning rate"
    same = all(map(torch.equal, held, optimizer.state[net.bias].values()))
    assert same == anew
