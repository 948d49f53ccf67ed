"""Somebody else's Flower app is audited by a line."""

import importlib
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flwr.server.strategy as legacy
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Result
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, Normalize

from fl_privacy import audit, defense_mod, load_observations, probe_mod
from fl_privacy.attacks import inverting_gradients
from fl_privacy.cli.main import run_command_line
from fl_privacy.defenses import dp_noise, pruning
from fl_privacy.errors import UserError
from fl_privacy.flower import LocalGrid
from fl_privacy.report.audit_file import read_captured, write_audit
from fl_privacy.report.audit_page import AuditRecord, audit_of_run
from fl_privacy.report.audit_parts import Captured
from fl_privacy.runs.folder import Attacker, Run, read_run, verdict_of
from tests.flower import foreign_app as app
from tests.flower.foreign_app import Net, pictures

pytestmark = pytest.mark.usefixtures("undrawn_charts")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICK = "inverting_gradients attack.iterations=150"
HARDLY = "inverting_gradients attack.iterations=3"
"""For audits of which it is not looked at what was read."""
probe = probe_mod(model=Net, train=app.train, dataset=app.own_pictures)


def run_in(out: Path) -> Run:
    (folder,) = out.glob("audit-*")
    return read_run(folder)


def mean_psnr(run: Run) -> float:
    return run.summary.plain.metrics["psnr"].mean


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run an audit of two rounds whose clients answer probes, and return its folder."""
    out = tmp_path_factory.mktemp("audited")
    audited = audit(app.fedavg(), model=Net, data=pictures, out=out, attack=QUICK, victims=4)
    app.start(audited, app.client_app([probe]), rounds=2)
    return out


def test_a_page_shows_what_single_images_give_away(probed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(probed)

    page, record = (run.path / "report.html").read_text(), audit_of_run(run.name, verdict_of(run))
    assert (
        run.finished
        and "audit of a Flower app" in page
        and re.findall(r'class="of">(Round \d)<', page) == ["Round 1", "Round 2"]
    )
    assert [step.counts for step in record.steps] == [one.counts for one in verdict_of(run).readings]
    assert record.tone == verdict_of(run).tone and ("tag leak" in page) == (record.tone == "leak")
    assert [entry.round for entry in run.summary.attacked] == [1, 2]
    assert run.summary.attacked[0].metrics["psnr"].mean > 15
    assert run.summary.plain.images == 4 and run.summary.plain.failures == 0
    told = " ".join(run.threat_model)
    assert "normalized before the model: (x - 0.5) / 0.5" in told
    assert "running statistics were uploaded" in told and "weights, whose change holds the gradient" in told
    assert len(load_observations(run.path / "captures", Net())) == 2 * (app.CLIENTS + 4)
    captured = read_captured(run.path)
    assert captured is not None and captured.site is not None and captured.site[1] == app.CLIENTS
    assert captured.site[0].judged == 4 and "Another site: the other&#39;s upload" in page


@pytest.mark.long
def test_a_defense_shows_on_the_page(probed: Path, tmp_path: Path) -> None:
    mods = [defense_mod(dp_noise(scale=0.05, clip_norm=1.0), model=Net, buffers="withheld", seed=1), probe]
    app.start(
        audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack=QUICK, victims=4), app.client_app(mods)
    )
    run = run_in(tmp_path)

    assert run.summary.adaptive is not None
    assert run.defenses == ("dp_noise",) and "defended by dp_noise" in (run.path / "report.html").read_text()
    assert mean_psnr(run) < run_in(probed).summary.attacked[0].metrics["psnr"].mean - 5


def test_the_training_is_the_one_without_audit(tmp_path: Path) -> None:
    def final(result: Result) -> dict[str, torch.Tensor]:
        assert result.arrays is not None
        return result.arrays.to_torch_state_dict()

    with torch.random.fork_rng():
        alone = final(app.start(app.fedavg(), rounds=2))
        audited = audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack="none")
        together = final(app.start(audited, app.client_app([probe]), rounds=2))
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        torch.testing.assert_close(value, together[name], rtol=1e-5, atol=1e-6)


def test_clients_without_a_mod_are_read_too(tmp_path: Path) -> None:
    """Their updates are of few images, so that these are attacked."""
    app.start(audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack=QUICK, rounds=1))
    run = run_in(tmp_path)

    assert "From the training updates themselves, of 6 images each" in (run.path / "report.html").read_text()
    assert run.summary.plain.images == app.CLIENTS * app.EACH
    assert "are these yours?" in (run.path / "report.html").read_text()  # nobody said whose update is whose


@pytest.mark.long
def test_updates_of_many_steps_are_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_privacy.runs import app as foreign  # noqa: PLC0415

    monkeypatch.setattr(foreign, "MOST_STEPS", 1)
    strategy = audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack=QUICK, rounds=1, victims=2)
    app.start(strategy, app.client_app(batch_size=2))
    run = run_in(tmp_path)

    told = " ".join(run.threat_model)
    assert "computed by the server itself" in told and "Clients took 3 local steps on 6 examples" in told
    assert run.summary.plain.images == 2 and mean_psnr(run) > 15
    assert audit_of_run(run.name, verdict_of(run)).tone == "open"  # no client's upload leaks
    page = (run.path / "report.html").read_text()
    assert (
        "undefended uploads of one image each that the server made itself" in page and "never leaves the client" in page
    )


def make_strategy(kind: type[Any]) -> Any:
    few = {"fraction_evaluate": 0.0, "min_train_nodes": app.CLIENTS, "min_available_nodes": app.CLIENTS}
    special: dict[str, dict[str, Any]] = {
        "FedProx": {"proximal_mu": 0.1},
        "Krum": {"num_malicious_nodes": 0},
        "MultiKrum": {"num_malicious_nodes": 0, "num_nodes_to_select": 2},
        "Bulyan": {"num_malicious_nodes": 0},
    }
    return kind(**few, **special.get(kind.__name__, {}))


OTHERS = ("Strategy", "Result", "DifferentialPrivacy", "FedXgb", "QFedAvg")
"""No strategies of their own, of trees, or (q-FedAvg) unable to average batch norm's counters."""


@pytest.mark.parametrize("name", sorted(n for n in strategies.__all__ if not n.startswith(OTHERS)))
def test_any_strategy_of_flower_is_audited(name: str, tmp_path: Path) -> None:
    strategy = make_strategy(getattr(strategies, name))

    app.start(audit(strategy, model=Net, data=pictures, out=tmp_path, attack="none"))

    assert len(list((run_in(tmp_path).path / "captures").rglob("client-*.json"))) == app.CLIENTS


@pytest.mark.long
@pytest.mark.usefixtures("few_draws")
def test_a_strategy_around_others_and_one_with_a_start_of_its_own(tmp_path: Path) -> None:
    class Counting(FedAvg):
        started = 0

        def start(self, grid: Any, initial_arrays: ArrayRecord, num_rounds: int = 3, **more: Any) -> Result:
            self.started += 1
            return super().start(grid, initial_arrays, num_rounds, **more)

    own = Counting(fraction_evaluate=0.0)
    around = DifferentialPrivacyServerSideFixedClipping(app.fedavg(), 1e-9, 1.0, app.CLIENTS)
    for number, strategy in enumerate((own, around)):
        app.start(audit(strategy, model=Net, data=pictures, out=tmp_path / str(number), attack="none"))
        assert len(list(tmp_path.glob(f"{number}/audit-*/captures/round-1/client-*.json"))) == app.CLIENTS
    assert own.started == 1


def silent(reply: Callable[[Message], Message]) -> ClientApp:
    silenced = ClientApp()

    @silenced.train()
    def train(message: Message, context: Context) -> Message:
        return reply(message)

    return silenced


def test_nothing_captured_is_said_and_the_training_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(message: Message) -> Message:
        raise RuntimeError("no disk")

    strategy = audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack=QUICK)
    assert isinstance(app.start(strategy, silent(failing)), Result)
    assert re.search(r"captured none.*no disk", strategy.failure)
    assert capsys.readouterr().err == f"audit: no page. {strategy.failure}\n"


def test_what_the_update_shows_is_believed(tmp_path: Path) -> None:
    """Of a plan that was told wrongly."""
    plan = {"lr": 5.0, "epochs": 2, "batch_size": 6}
    audited = audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack="none", plan=plan)
    app.start(audited, app.client_app([probe], batch_size=2))
    told = " ".join(run_in(tmp_path).threat_model)
    assert "The plan says 2 local steps on 6 examples, but batch norm counted 3" in told
    assert "The plan's learning rate is 5, but the output layer's bias implies about" in told
    plans = {o.id.probe is None: o.plan for o in load_observations(run_in(tmp_path).path / "captures", Net())}
    assert plans[True].epochs == 3 and plans[False].epochs == 1


def without_truth(captures: Path, *more: str) -> list[str]:
    return [
        "attack",
        f"captured={captures}",
        "model=custom",
        "model._target_=tests.flower.foreign_app.Net",
        "attack=inverting_gradients",
        "attack.iterations=3",
        *more,
    ]


@pytest.mark.long
def test_captures_are_attacked_later_without_and_with_truth(
    probed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_in(probed).path
    assert run_command_line(without_truth(folder, f"out={tmp_path}")) == 0
    alone = read_run(Path(capsys.readouterr().out.split()[-1]))
    page = (alone.path / "report.html").read_text()
    assert "are these yours?" in page and "Is this one of yours?" in page and "Net of a Flower app" in page
    assert ">not known</text>" in page and "the originals of" in page
    assert not alone.summary.plain.metrics and alone.summary.plain.images > 0

    images = tmp_path / "truth"
    save_pictures(images)
    assert run_command_line(without_truth(folder, f"out={tmp_path}", f"truth={images}")) == 0
    judged = read_run(Path(capsys.readouterr().out.split()[-1]))
    assert judged.summary.attacked[0].metrics["psnr"].n == 4
    assert run_command_line(["report", str(judged.path)]) == 0
    assert run_command_line(["attack", f"captured={folder}", f"out={tmp_path}"]) == 2
    assert "model._target_=tests.flower.foreign_app.Net" in capsys.readouterr().err


def save_pictures(folder: Path) -> None:
    from PIL import Image  # noqa: PLC0415

    for client in range(app.CLIENTS):
        for number, (image, label) in enumerate(pictures(client)):
            place = folder / str(label)
            place.mkdir(parents=True, exist_ok=True)
            levels = ((image * 0.5 + 0.5) * 255).round().to(torch.uint8)[0]
            Image.fromarray(levels.numpy()).save(place / f"{client}-{number}.png")


class Sized(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4)


class Flat(Net):
    """Takes images of any size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.sigmoid(self.norm(self.conv(x))).mean((2, 3)).repeat(1, 16))


def tried(out: Path, *, run: bool = False, strategy: Any = None, clients: int = 2, **settings: Any) -> None:
    given = {"model": Net, "data": pictures, "out": out, "attack": "none", **settings}
    audited = audit(strategy or app.fedavg(), **given)
    audited.patience = 0.05
    if run:
        app.start(audited, app.client_app([probe]), clients=clients)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no strategy": ({"strategy": "FedAvg"}, "A strategy of flwr.serverapp.strategy is expected, but got str"),
    "a strategy's class": ({"strategy": FedAvg}, "write FedAvg\\(...\\)"),
    "legacy strategy": (
        {"strategy": legacy.FedAvg()},
        "legacy flwr.server.strategy; use flwr.serverapp.strategy.FedAvg",
    ),
    "trees": ({"strategy": strategies.FedXgbBagging()}, "trains trees"),
    "no model": ({"model": "Net"}, "expected to be a torch.nn.Module or its class, but got str"),
    "model class with arguments": ({"model": Sized}, "give an instance, model=Sized"),
    "not a model": ({"model": dict}, "makes dict"),
    "no data and no shape": ({"data": None, "model": Flat}, "give input_shape"),
    "wrong input shape": ({"data": None, "input_shape": (3, 8, 8)}, "does not fit images of 3x8x8"),
    "shape that is none": ({"data": None, "input_shape": 8}, "try \\(3, 32, 32\\)"),
    "shape against the data": ({"input_shape": (1, 9, 9)}, "leave it out"),
    "wrong data path": ({"data": "./nowhere/images"}, "nowhere"),
    "empty data": ({"data": []}, "is empty"),
    "data of something else": ({"data": [1, 2, 3]}, "An example is expected to be \\(image, label\\)"),
    "data without labels": ({"data": [{"img": torch.zeros(1, 8, 8)}]}, "one of the keys label"),
    "wrong key of the plan": ({"plan": {"learning_rate": 0.1}}, "Unknown key plan.learning_rate"),
    "wrong value of the plan": ({"plan": {"lr": -1}}, "plan.lr is expected to be above 0"),
    "plan of something else": ({"plan": 0.1}, "dict\\(lr=0.1"),
    "rounds that do not exist": ({"rounds": [5], "run": True}, "rounds is expected within 1..1"),
    "rounds of something else": ({"rounds": "frist"}, "first, last, ends, all"),
    "no rounds": ({"rounds": []}, "expected to name rounds"),
    "unknown attack": ({"attack": "inverting"}, "inverting_gradients"),
    "transform of something else": ({"transform": Compose([])}, "expected to hold a torchvision Normalize"),
    "no clients": ({"run": True, "clients": 0}, "At least one client is expected"),
    "no victims": ({"victims": 0}, "victims is expected"),
    "another model": ({"model": Flat, "strategy": app.fedavg(), "run": True}, ""),
    "a model of other layers": (
        {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), "run": True},
        "expected to be those of model=Sequential",
    ),
    "audited twice": ({"strategy": "audited"}, "audited once"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_first_try_ends_in_one_line_or_works(name: str, tmp_path: Path) -> None:
    settings, line = WRONG[name]
    if settings.get("strategy") == "audited":
        settings = {**settings, "strategy": audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack=QUICK)}
    if not line:
        tried(tmp_path, **settings)
        return
    with pytest.raises(UserError, match=line) as raised:
        tried(tmp_path, **settings)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


RIGHT: dict[str, dict[str, Any]] = {
    "one round": {"rounds": "ends"},
    "an instance": {"model": Net()},
    "the one usual shape": {},
    "unnormalized data, told by mean and std": {"transform": (0.5, 0.5)},
    "a transform": {"transform": Compose([Normalize([0.5], [0.5])])},
    "an attack of its own": {"attack": inverting_gradients(iterations=5), "victims": 1},
    "a plan from the context": {
        "plan": Context(
            run_id=1,
            node_id=1,
            node_config=UserConfig(),
            state=RecordDict(),
            run_config=UserConfig({"local-epochs": 1, "learning-rate": 0.1, "name": "x"}),
        )
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_first_try_works(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried(tmp_path, run=True, **RIGHT[name])
    line = capsys.readouterr().out
    assert "audit: captured" in line and "report.html" in line


def test_an_audit_inside_another_strategy_says_so(tmp_path: Path) -> None:
    inner = audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack=QUICK)
    with pytest.raises(UserError, match="outermost"):
        app.start(DifferentialPrivacyServerSideFixedClipping(inner, 1e-9, 1.0, app.CLIENTS))


def started(module: Any, server: Any, clients: int, config: dict[str, Any]) -> None:
    """Start an example app in this process."""
    grid = LocalGrid(range(clients), module.app)
    for context in grid.contexts.values():
        context.run_config = UserConfig(config)
    server.main(grid, Context(1, 0, UserConfig(), RecordDict(), UserConfig(config)))


@pytest.mark.long
@pytest.mark.parametrize("example", [pytest.param("quickstart", marks=pytest.mark.fuzz), "veteran"])
def test_the_example_apps_show_images_and_less_behind_a_defense(
    example: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.ERROR)
    told = {"quickstart": ("flower_quickstart", 100), "veteran": ("flower_numpy_client", 40)}
    folder, iterations = told[example]
    monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    monkeypatch.setenv("QUICKSTART_DATA", "mnist_mini")
    found = []
    for defended in ("", "1"):
        monkeypatch.setenv(f"{example.upper()}_DEFENDED", defended)
        for name in [name for name in sys.modules if name.partition(".")[0] == example]:
            monkeypatch.delitem(sys.modules, name)
        client, server = (importlib.import_module(f"{example}.{side}_app") for side in ("client", "server"))
        out = tmp_path / f"out{defended}"
        config = {"clients": 2, "num-server-rounds": 1, "local-epochs": 1, "learning-rate": 0.1, "batch-size": 32}
        started(
            client,
            server,
            2,
            {**config, "audit": str(out), "attack": f"inverting_gradients attack.iterations={iterations}"},
        )
        attacked = run_in(out).summary.attacked
        read = {(leak.round, leak.attacker): leak.metrics["psnr"].mean for leak in attacked}
        assert f"; mean PSNR {max(read.values()):.1f} dB" in capsys.readouterr().out  # whoever read most
        found.append(read[attacked[0].round, Attacker.PLAIN])
    assert found[0] > found[1] + 3, found


def test_captures_are_for_their_owner_alone(probed: Path) -> None:
    folder = run_in(probed).path
    for path in (
        folder / "audit.json",
        *(folder / "captures").rglob("*.json"),
        *(folder / "captures").rglob("*.safetensors"),
    ):
        assert path.stat().st_mode & 0o077 == 0
    assert set(json.loads((folder / "audit.json").read_text())["fingerprints"])


def test_a_note_that_says_nothing_of_rates_is_read(tmp_path: Path) -> None:
    write_audit(tmp_path, AuditRecord(app="FedAvg", captured=Captured(model="net", rates_estimated=True)))
    content = json.loads((tmp_path / "audit.json").read_text())
    assert read_captured(tmp_path) == Captured(model="net", rates_estimated=True)
    del content["rates_estimated"]
    (tmp_path / "audit.json").write_text(json.dumps(content))
    assert read_captured(tmp_path) == Captured(model="net")
    (tmp_path / "audit.json").write_text(json.dumps(content | {"rates_estimated": "yes"}))
    with pytest.raises(UserError, match="damaged"):
        read_captured(tmp_path)


def test_an_app_that_was_run_has_no_captures(tmp_path: Path) -> None:
    write_audit(tmp_path, AuditRecord(app="net"))
    with pytest.raises(UserError, match=r"which keeps none; wrap the app's strategy in fl_privacy.audit"):
        read_captured(tmp_path)


def test_a_pruned_update_is_told_as_such(tmp_path: Path) -> None:
    mods = [defense_mod(pruning(rate=0.5)), probe]
    app.start(audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack="none"), app.client_app(mods))
    observed = load_observations(run_in(tmp_path).path / "captures", Net())
    assert all(float((o.update()["conv.weight"] == 0).float().mean()) > 0.2 for o in observed)


@pytest.mark.parametrize("travels", [True, False])
def test_a_client_that_keeps_its_own_batch_norm_is_said_and_probed_with_it(travels: bool, tmp_path: Path) -> None:
    def of_client(name: str) -> bool:
        return name.startswith("norm.")

    def kept_train(message: Message, context: Context) -> Message:
        net = Net()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict(), strict=False)
        if "own" in context.state.array_records:
            net.load_state_dict(context.state.array_records["own"].to_torch_state_dict(), strict=False)
        else:
            net.norm.weight.data += 2 + 4 * int(str(context.node_config["partition-id"]))
        app.train(net, DataLoader(app.own_pictures(context)), {"lr": 0.1})  # type: ignore[arg-type]
        state = net.state_dict()
        context.state["own"] = ArrayRecord({n: Array(t.numpy()) for n, t in state.items() if of_client(n)})
        sent = ArrayRecord({n: t for n, t in state.items() if travels or not of_client(n)})  # type: ignore[misc]
        return Message(RecordDict({"arrays": sent, "metrics": MetricRecord({"num-examples": 6})}), reply_to=message)

    client = ClientApp(mods=[probe])
    client.train()(kept_train)
    start = ArrayRecord({n: t for n, t in app.initial().to_torch_state_dict().items() if travels or not of_client(n)})  # type: ignore[misc]
    strategy = audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack=HARDLY, rounds=2, victims=2)
    strategy.start(LocalGrid(range(2), client), start, num_rounds=2, train_config=ConfigRecord({"lr": 0.1}))
    run = run_in(tmp_path)

    said = "keep their own batch norm, as in FedBN" if travels else "Batch norm stays with the clients"
    assert said in " ".join(run.threat_model)
    probes = [o for o in load_observations(run.path / "captures", Net()) if o.id.probe is not None]
    assert len(probes) == 2 and not any(of_client(n) for o in probes for n in o.upload.tensors)
    own = [float(o.assumed().parameters["norm.weight"].mean()) for o in probes]
    assert min(own) > 2 if travels else max(own) < 1.5


def test_models_that_return_a_structure_and_strategies_that_weigh_otherwise_are_audited(tmp_path: Path) -> None:
    class Structured(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return {"logits": super().forward(x), "hidden": x}

    client = ClientApp()

    @client.train()
    def trained(message: Message, context: Context) -> Message:
        net = Net()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        app.train(net, DataLoader(app.own_pictures(context), batch_size=6), {"lr": 0.1})  # type: ignore[arg-type]
        metrics = MetricRecord({"samples": 6})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    class Own(FedAvg):
        def told(self) -> str:
            return self.weighted_by_key

    strategy = audit(
        Own(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2, weighted_by_key="samples"),
        model=Structured,
        data=pictures,
        out=tmp_path,
        attack="none",
    )
    assert strategy.told() == "samples", "an app's own methods are reached"
    app.start(strategy, client)
    assert strategy.failure is None
    found = load_observations(tmp_path, Net())
    assert [o.upload.num_examples for o in found] == [6, 6]
    assert len(load_observations(run_in(tmp_path).path, Net())) == 2
    with pytest.raises(AttributeError, match="nothing_like_that"):
        strategy.nothing_like_that  # noqa: B018


def test_a_part_of_the_model_alone_is_said_to_be_one(tmp_path: Path) -> None:
    part = ArrayRecord({n: t for n, t in app.initial().to_torch_state_dict().items() if n.startswith("fc.")})  # type: ignore[misc]
    strategy = audit(app.fedavg(), model=Net, data=pictures, out=tmp_path, attack="none")
    with pytest.raises(UserError, match=r"conv\.bias and 1 more are not: the app exchanges 2 of 4, such as adapters"):
        strategy.start(LocalGrid(range(2), app.client_app()), part, num_rounds=1)
