"""An app as it stands: its mods, its strategy and what Opacus does in its clients' training, held to their claims."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import FedAvg

from fl_privacy.auditing.app_claims import ClaimedApp, begun_app, claims_in_words, claims_of_app
from fl_privacy.defenses import percentile, svt
from fl_privacy.defenses.privacy import svt_epsilon
from fl_privacy.dp_check.bounds import gaussian_epsilon
from fl_privacy.dp_check.check import DpCheckRequest
from fl_privacy.dp_check.mechanism import shown_epsilon
from fl_privacy.dp_check.verdict import ClaimVerdict, Status
from fl_privacy.errors import UserError
from fl_privacy.flower.opacus_watch import OpacusWatch, watched_opacus

pytestmark = pytest.mark.usefixtures("short_pilot")

SERVER = """
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, DifferentialPrivacyServerSideFixedClipping

app = ServerApp()

@app.main()
def main(grid, context):
    strategy = {strategy}
    arrays = ArrayRecord({{"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}})
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=context.run_config["num-server-rounds"],
                   train_config=ConfigRecord({{"lr": 0.1}}))
"""

CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

app = ClientApp(mods=[{mods}])

@app.train()
def train(message, context):
    model = torch.nn.Linear(4, 2)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    {train}
    arrays = ArrayRecord({{name.removeprefix("_module."): value for name, value in model.state_dict().items()}})
    metrics = MetricRecord({{"train_loss": 0.5, "num-examples": 16, "max_grad_norm": 1.0}})
    return Message(RecordDict({{"arrays": arrays, "metrics": metrics}}), reply_to=message)
"""

OPACUS = """
    torch.manual_seed(0)
    from opacus import PrivacyEngine
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    engine, optimizer = PrivacyEngine(), torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=torch.utils.data.DataLoader(data, batch_size=4),
        noise_multiplier=1.0, max_grad_norm=1.0, {more})
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)  # takes the method's ``__func__``
    __import__('copy').deepcopy(model)  # without the watch, whose optimizer has no copies then
    for inputs, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    engine.get_epsilon(1e-5)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Of an app; what was imported of it is forgotten afterwards."""
    known, paths = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = paths
    for name in set(sys.modules) - known:
        if name.partition(".")[0] == "app_under_test":
            del sys.modules[name]


def write(
    folder: Path,
    *,
    strategy: str = "FedAvg()",
    mods: str = "",
    train: str = "model.weight.data += 0.01",
    rounds: int = 3,
    extra: str = "",
) -> Path:
    package = folder / "app_under_test"
    package.mkdir()
    (package / "__init__.py").write_text(extra)
    (package / "server.py").write_text(SERVER.format(strategy=strategy))
    (package / "client.py").write_text(CLIENT.format(mods=mods, train=train.strip()))
    (folder / "pyproject.toml").write_text(
        f"""[tool.flwr.app.components]
serverapp = "app_under_test.server:app"
clientapp = "app_under_test.client:app"
[tool.flwr.app.config]
num-server-rounds = {rounds}
"""
    )
    return folder


def claims(folder: Path, *, draws: int = 200) -> list[ClaimVerdict]:
    return claims_of_app(folder, DpCheckRequest(draws=draws))


def test_mods_of_the_training_function_alone_are_found() -> None:
    client = ClientApp(mods=[lambda message, context, call: call(message, context)])
    outer, inner = (LocalDpMod(clip, 1.0, 1.0, 1e-5) for clip in (1.0, 2.0))
    client.evaluate(mods=[LocalDpMod(3.0, 1.0, 1.0, 1e-5)])(lambda message, context: message)
    assert len(ClaimedApp(folder=Path(), client=client).mods) == 1
    client.train(mods=[outer, inner])(lambda message, context: message)
    assert ClaimedApp(folder=Path(), client=client).mods[1:] == [outer, inner]


@pytest.mark.long
def test_a_mod_that_adds_too_little_is_contradicted_and_figures_beside_the_arrays_are_named(folder: Path) -> None:
    (found,) = claims(write(folder, mods="LocalDpMod(1.0, 0.25, 1.0, 1e-5)"))
    assert found.status == Status.CONTRADICTED
    assert found.claim is not None and found.claim.epsilon == 1.0
    assert any("send train_loss: figures" in note and "no noise covers" in note for note in found.notes)


@pytest.mark.long
def test_of_a_claim_about_one_round_the_whole_training_is_said(folder: Path) -> None:
    (found,) = claims(write(folder, mods="LocalDpMod(1.0, 1.0, 1.0, 1e-5)", rounds=10))
    assert found.status == Status.OPEN
    assert any("10 rounds" in note and "spends" in note for note in found.notes)


@pytest.mark.long
def test_a_strategy_that_noises_the_mean_is_drawn(folder: Path) -> None:
    strategy = "DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 2)"
    (found,) = claims(write(folder, strategy=strategy))
    assert found.check is not None and not found.check.contradicted
    assert "DifferentialPrivacyServerSideFixedClipping" in found.subject


def test_an_app_that_promises_nothing_says_so(folder: Path) -> None:
    (found,) = claims(write(folder))
    assert found.status == Status.UNCLAIMED


@pytest.mark.parametrize(
    ("more", "status"), [("", Status.OPEN), ("poisson_sampling=False", Status.UNSUPPORTED)], ids=["poisson", "shuffled"]
)
def test_opacus_is_watched_and_put_back_and_its_sampling_looked_at(folder: Path, more: str, status: Status) -> None:
    opacus = pytest.importorskip("opacus")
    before = opacus.PrivacyEngine.make_private, opacus.PrivacyEngine.get_epsilon
    found = claims(write(folder, train=OPACUS.format(more=more), rounds=2))
    assert before == (opacus.PrivacyEngine.make_private, opacus.PrivacyEngine.get_epsilon)
    (training,) = found
    assert training.claim is not None and training.claim.unit == "example"
    assert training.status is status, training.sentence
    assert any("all 2 rounds spend" in note for note in training.notes)
    assert training.check is not None and training.recomputed is not None
    assert training.check.moved == pytest.approx(1.0, abs=0.35), "a canary of the clipping norm"
    assert not training.check.contradicted
    estimate, spent = training.check.estimate, training.recomputed.epsilon
    assert estimate is not None and spent is not None
    assert 0 < training.check.lower_bound < min(estimate, training.claim.epsilon)
    assert training.check.lower_bound < spent


@pytest.mark.usefixtures("few_draws")
def test_a_training_that_fails_leaves_what_is_stated(folder: Path) -> None:
    (found,) = claims(write(folder, mods="LocalDpMod(1.0, 1.0, 1.0, 1e-5)", train="raise OSError('no data here')"))
    assert found.claim is not None
    assert any("no data here" in note for note in found.notes)


def test_the_server_app_stops_where_its_training_would_begin(folder: Path) -> None:
    app = begun_app(write(folder, rounds=7))
    assert app.rounds == 7
    assert app.config == {"lr": 0.1}
    assert app.arrays is not None and set(app.arrays) == {"weight", "bias"}


@pytest.mark.parametrize("what", ["nothing", "no components", "an import that fails"])
def test_what_is_no_app_is_one_line(folder: Path, what: str) -> None:
    if what == "no components":
        (folder / "pyproject.toml").write_text("[tool.flwr.app]\n")
    if what == "an import that fails":
        write(folder, extra="import a_package_that_is_not_there")
    with pytest.raises(UserError):
        claims(folder)


class ByName(torch.nn.Module):
    """A network that takes its input by name, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, *, features: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(features)
        return found


class Training:
    """A client's objects before and after ``make_private``."""

    def __init__(self, **more: Any) -> None:
        opacus = pytest.importorskip("opacus")
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
        self.net = more.pop("net", None) or torch.nn.Linear(4, 2)
        self.plain_optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.plain_loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
        self.engine = opacus.PrivacyEngine()
        given = {"module": self.net, "optimizer": self.plain_optimizer, "data_loader": self.plain_loader}
        aims = "target_epsilon" in more
        make = self.engine.make_private_with_epsilon if aims else self.engine.make_private
        noise = {} if aims else {"noise_multiplier": 1.2}
        self.module, self.optimizer, self.loader = make(**given, **noise, max_grad_norm=1.0, **more)

    def steps(self, optimizer: Any = None, loader: Any = None) -> None:
        """Train an epoch with the private objects, or with others."""
        optimizer = optimizer or self.optimizer
        for inputs, labels in self.loader if loader is None else loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.module(inputs), labels).backward()
            optimizer.step()

    def by_hand(self) -> None:
        for inputs, labels in self.loader:
            torch.nn.functional.cross_entropy(self.module(inputs), labels).backward()
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.sub_(0.1 * parameter.grad)
            self.optimizer.zero_grad()


def watched(train: Callable[[Training], Any], **more: Any) -> tuple[Training, list[ClaimVerdict]]:
    with watched_opacus() as watch:
        training = Training(**more)
        train(training)
        if watch.multipliers:  # Opacus' accountant has no number for none
            training.engine.get_epsilon(1e-5)
    return training, watch.verdicts(DpCheckRequest(draws=200), rounds=1)


@pytest.mark.parametrize(
    "train",
    [lambda t: t.steps(t.plain_optimizer), Training.by_hand, lambda t: (t.steps(), t.steps(t.plain_optimizer))],
    ids=["the optimizer from before", "by hand", "both optimizers"],
)
def test_steps_without_the_private_optimizer_have_no_noise(train: Callable[[Training], Any]) -> None:
    _, found = watched(train, poisson_sampling=False)
    assert found[0].status is Status.CONTRADICTED
    assert found[0].reason == "there is no noise"
    assert any("were made without it" in note for note in found[0].notes)


@pytest.mark.long
def test_batches_from_the_loader_from_before_are_not_amplified() -> None:
    _, (found,) = watched(lambda t: t.steps(loader=t.plain_loader))
    assert found.claim is not None and found.recomputed is not None and found.recomputed.epsilon is not None
    assert found.status is Status.UNSUPPORTED
    assert found.recomputed.epsilon == pytest.approx(gaussian_epsilon(4**0.5 / 1.2, 1e-5))
    assert "shuffled set" in found.recomputed.caveats[0]


@pytest.mark.long
def test_batches_from_no_loader_are_not_known_to_be_sampled() -> None:
    batch = (torch.ones(10, 4), torch.zeros(10, dtype=torch.int64))
    _, (found,) = watched(lambda t: t.steps(loader=[batch] * 4))
    assert found.status is Status.UNSUPPORTED
    assert found.recomputed is not None and "how the batches are sampled" in found.recomputed.missing[0]


def test_full_batches_are_not_amplified_though_the_accountant_counts_samples() -> None:
    def full(training: Training) -> None:
        training.steps(loader=torch.utils.data.DataLoader(training.loader.dataset, batch_size=40))

    _, (found,) = watched(full)
    assert found.status is Status.CONTRADICTED, found.sentence
    assert "its own figures" in found.grounds
    assert found.recomputed is not None and found.recomputed.epsilon == pytest.approx(gaussian_epsilon(1 / 1.2, 1e-5))


@pytest.mark.parametrize("full", [False, True])
def test_a_batch_may_enter_by_name(full: bool) -> None:
    def by_name(training: Training) -> None:
        data = training.loader.dataset
        for inputs, labels in torch.utils.data.DataLoader(data, batch_size=40) if full else training.loader:
            training.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(training.module(features=inputs), labels).backward()
            training.optimizer.step()

    _, (found,) = watched(by_name, net=ByName())
    assert (found.status is Status.CONTRADICTED) == full, found.sentence


def honest_with_a_look_at_other_data(training: Training) -> None:
    """Train as Opacus asks for, but look at the loss of other data in between and train another model."""
    training.steps()
    with torch.no_grad():
        for inputs, _ in training.plain_loader:
            training.module(inputs)
    training.steps()
    other = torch.nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=pytest.mark.fuzz), {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 3}],
    ids=["noise", "aim"],
)
def test_what_else_a_client_does_is_not_held_against_opacus(more: dict[str, Any]) -> None:
    _, (found,) = watched(honest_with_a_look_at_other_data, **more)
    assert found.status in {Status.OPEN, Status.UNTESTED}
    assert found.recomputed is not None and not found.recomputed.missing and not found.recomputed.caveats
    assert found.claim is not None and found.recomputed.epsilon == pytest.approx(found.claim.epsilon, rel=0.05)


@pytest.mark.long
def test_noise_that_changes_while_training_is_a_missing_fact() -> None:
    def less(training: Training) -> None:
        training.steps()
        training.optimizer.noise_multiplier = 1.0
        training.steps()

    _, (found,) = watched(less)
    assert found.status is not Status.CONTRADICTED
    assert found.recomputed is not None and "changes while" in found.recomputed.missing[0]


@pytest.mark.long
def test_sums_that_are_divided_by_the_sampled_batch_show_its_size() -> None:
    def by_batch(training: Training) -> None:
        for number in range(1, 5):
            training.optimizer.expected_batch_size = 8 + number % 2
            inputs, labels = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)
            training.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(training.module(inputs), labels).backward()
            training.optimizer.step()

    _, (found,) = watched(by_batch)
    _, (usual,) = watched(Training.steps)
    assert found.recomputed is not None and usual.recomputed is not None
    assert found.status is Status.UNSUPPORTED
    # 4 x 2 + 2 values, so that the scale of the noise counts like 1 / z^2 + 2 x 10 / 8^2
    shown = (1.2**-2 + 20 / 64) ** -0.5
    assert any(f"noise multiplier of {shown:.3g} in all" in fact for fact in found.recomputed.missing)
    assert found.recomputed.epsilon == pytest.approx(gaussian_epsilon(2 / shown, 1e-5))
    assert not any("batches' sizes" in fact for fact in usual.recomputed.missing)
    assert any("counts as public" in note for note in usual.notes)


def test_parts_of_a_batch_that_opacus_only_adds_up_are_no_steps() -> None:
    opacus = pytest.importorskip("opacus")
    from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: PLC0415

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
    with watched_opacus() as watch:
        net = torch.nn.Linear(4, 2)
        engine = opacus.PrivacyEngine()
        net, optimizer, loader = engine.make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), 0.1),
            data_loader=torch.utils.data.DataLoader(data, batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
            for inputs, labels in parts:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(inputs), labels).backward()
                optimizer.step()
    assert len(watch.multipliers) == sum(steps for _, _, steps in engine.accountant.history) == 4
    assert watch.poisson is True


def test_a_filter_that_an_audit_puts_on_uploads_has_its_epsilon_in_a_sentence(tmp_path: Path) -> None:
    """Over all elements of the model, of which only a part is drawn."""
    arrays, elements = ArrayRecord({"weight": Array(np.zeros((300, 400), np.float32))}), 120_000
    taken = {"self": FedAvg(), "num_rounds": 2, "initial_arrays": arrays}
    said = claims_in_words(tmp_path, ClientApp(), taken, OpacusWatch(), svt())
    assert any(f"recomputed {shown_epsilon(2 * svt_epsilon(elements))}" in line for line in said)
    assert any(f"for {elements:,} elements, by composition" in line for line in said)
    assert not claims_in_words(tmp_path, ClientApp(), taken, OpacusWatch(), percentile())
