"""An audit and the training that it looks at are apart: neither moves or ends the other."""

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, Result
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fl_privacy import audit, probe_mod
from fl_privacy.flower import LocalGrid
from fl_privacy.runs.build import attack_called
from fl_privacy.runs.folder import read_run
from fl_privacy.types import Observation, Reconstruction
from tests.flower import liars
from tests.flower.liars import Small, as_bytes, own_pictures, pictures, train

pytestmark = pytest.mark.usefixtures("undrawn_charts")


class Augmented(Dataset[tuple[Tensor, int]]):
    """Images that are shifted, flipped or made darker at random, by the stream that ``draw`` takes."""

    def __init__(self, client: int, draw: Callable[["Augmented"], float]) -> None:
        self.pictures, self.draw = pictures(client), draw
        self.rng, self.generator = np.random.default_rng(client), torch.Generator().manual_seed(client)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.pictures[index]
        drawn = self.draw(self)
        return (image.flip(2) if drawn < 0.5 else image.roll(1, 2)) * (0.5 + drawn / 2), label


DRAWS: dict[str, Callable[[Augmented], float]] = {
    "torch": lambda data: float(torch.rand(())),
    "numpy": lambda data: float(np.random.rand()),
    "python": lambda data: random.random(),
    "a generator of NumPy's within": lambda data: float(data.rng.random()),
    "a generator of PyTorch's within": lambda data: float(torch.rand((), generator=data.generator)),
}


def augmented_app(draw: Callable[[Augmented], float], mods: list[Any] | None = None) -> ClientApp:
    kept: dict[int, Augmented] = {}

    def data_of(context: Context) -> Augmented:
        client = int(context.node_config["partition-id"])
        return kept.setdefault(client, Augmented(client, draw))

    probe = probe_mod(model=Small, train=train, dataset=data_of)
    app = ClientApp(mods=[probe] if mods is None else [*mods, probe])

    @app.train()
    def train_message(message: Message, context: Context) -> Message:
        net, data = Small(), data_of(context)
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        train(net, DataLoader(data, batch_size=2, shuffle=True))
        metrics = MetricRecord({"num-examples": len(data)})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def final(draw: Callable[[Augmented], float], seed: int, out: Path | None) -> dict[str, bytes]:
    """Weights after two rounds from ``seed``, audited into ``out``; the model is made after the audit."""
    for seeded in (torch.manual_seed, np.random.seed, random.seed):
        seeded(seed)
    app, strategy = augmented_app(draw), liars.fedavg(2)
    if out is not None:
        data = Augmented(0, draw)
        strategy = audit(strategy, model=Small, data=data, out=out, attack="analytic", victims=2, rounds="all")
    initial = ArrayRecord(Small().state_dict())
    result = strategy.start(LocalGrid(range(2), app), initial, num_rounds=2, train_config=ConfigRecord({"lr": 0.1}))
    return as_bytes(result)


@pytest.mark.parametrize(("stream", "seed"), [*zip(DRAWS, range(5), strict=True)])
def test_the_training_is_the_one_without_audit_bit_for_bit(stream: str, seed: int, tmp_path: Path) -> None:
    assert final(DRAWS[stream], seed, None) == final(DRAWS[stream], seed, tmp_path)


def trained(strategy: Any, app: ClientApp, **config: Any) -> Result:
    torch.manual_seed(0)
    initial = ArrayRecord(Small().state_dict())
    grid = LocalGrid(range(2), app)
    return strategy.start(grid, initial, num_rounds=1, train_config=ConfigRecord({"lr": 0.1, **config}))


def audited(out: Path, **settings: Any) -> Any:
    given = {"model": Small, "data": pictures, "out": out, "attack": "analytic", "victims": 4, **settings}
    return audit(given.pop("strategy", None) or liars.fedavg(2), **given)


@pytest.mark.parametrize("stream", ["torch", "numpy", "python"])
def test_images_that_a_transform_draws_at_random_are_found(stream: str, tmp_path: Path) -> None:
    """What the model was fed, not what is stored."""
    strategy = audited(tmp_path, data=lambda client: Augmented(client, DRAWS[stream]))
    trained(strategy, augmented_app(DRAWS[stream]))
    (folder,) = tmp_path.glob("audit-*")
    (found,) = read_run(folder).summary.attacked
    assert found.metrics["psnr"].n == 4 and found.metrics["psnr"].mean > 60


@pytest.mark.long
@pytest.mark.usefixtures("few_draws")
def test_probes_pass_a_mod_of_flower_that_takes_one_config_record(tmp_path: Path) -> None:
    around = DifferentialPrivacyClientSideFixedClipping(liars.fedavg(2), 1e-9, 100.0, 2)
    strategy = audited(tmp_path, strategy=around)
    trained(strategy, augmented_app(DRAWS["torch"], [fixedclipping_mod]))
    (folder,) = tmp_path.glob("audit-*")
    assert len(list(folder.rglob("victim-*.json"))) == 4 and strategy.failure is None


def replying(change: Callable[[RecordDict], None]) -> ClientApp:
    app = liars.honest_app()

    def changed(message: Message, context: Context) -> Message:
        reply = app(message, context)
        change(reply.content)
        return reply

    return changed  # type: ignore[return-value]


def test_a_client_without_examples_does_not_end_it(tmp_path: Path) -> None:
    def nothing(content: RecordDict) -> None:
        content["metrics"]["num-examples"] = 0  # type: ignore[index]

    class Weighted(type(liars.fedavg(2))):  # type: ignore[misc]
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return next(iter(replies)).content["arrays"], None

    strategy = audited(tmp_path, strategy=Weighted(fraction_evaluate=0.0))
    assert trained(strategy, replying(nothing)).arrays is not None
    assert "expected to be of 1 to" in strategy.failure


def test_a_folder_that_is_gone_does_not_take_the_training_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def remove(content: RecordDict) -> None:
        shutil.rmtree(tmp_path, ignore_errors=True)

    strategy = audited(tmp_path)
    assert isinstance(trained(strategy, replying(remove)), Result)
    assert strategy.failure and capsys.readouterr().err.startswith("audit: no page. ")


def test_a_full_disk_does_not_take_the_training_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_privacy import files  # noqa: PLC0415

    strategy = audited(tmp_path)

    def fill(content: RecordDict) -> None:
        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files, "_replace", full)

    assert isinstance(trained(strategy, replying(fill)), Result)
    assert strategy.failure


@pytest.mark.long
def test_one_client_s_normalization_is_its_own(tmp_path: Path) -> None:
    def lie(content: RecordDict, probe: bool) -> None:
        if probe:
            told = dict(content.config_records["fl-privacy.probed"])
            content["fl-privacy.probed"] = ConfigRecord({**told, "mean": [0.4], "std": [0.2]})

    found = []
    for name, lies in (("true", {}), ("false", {2: lie})):
        strategy, _, rows = liars.audited(lies, 3, tmp_path / name)
        assert strategy.failure is None
        found.append(rows)
    assert found[0] == found[1]


@pytest.mark.long
def test_a_defense_that_one_of_three_tells_of_is_not_that_of_all(tmp_path: Path) -> None:
    def lie(content: RecordDict, probe: bool) -> None:
        content["fl-privacy.defended"] = ConfigRecord(
            {
                "parts": '[{"name": "pruning", "settings": {"rate": 0.9}, "strength": "rate",'
                ' "effect": {"effect": "Undeclared"}}]'
            }
        )

    strategy, _, rows = liars.audited({2: lie}, 3, tmp_path / "false")
    assert rows == liars.audited({}, 3, tmp_path / "true")[2], "who knows of a defense attacks those that tell of it"
    (folder,) = tmp_path.glob("false/audit-*")
    run = read_run(folder)
    assert run.summary.adaptive.metrics["psnr"].n == 2
    assert strategy.failure is None and run.defenses == ()
    told = " ".join(run.threat_model)
    assert "1 of 3 clients state a defense: pruning.rate=0.9." in told
    assert "2 of 3 clients state none." in told


def test_an_update_at_which_an_attack_fails_fails_alone(tmp_path: Path) -> None:
    made, _ = attack_called("analytic")
    assert made is not None

    def failing(observations: Sequence[Observation], **settings: Any) -> Sequence[Reconstruction]:
        if any(o.id.client == 2 for o in observations):
            raise ValueError("an update like this was never seen")
        return made(observations, **settings)

    strategy, _, rows = liars.audited({}, 3, tmp_path / "false", attack=failing)
    assert strategy.failure is None
    assert rows == liars.audited({}, 3, tmp_path / "true")[2]
    (folder,) = (tmp_path / "false").glob("audit-*")
    failed = [r["failure"] for r in read_run(folder).of_kind("image") if r["client"] == 2]
    assert len(failed) == 2 and all("never seen" in reason for reason in failed)


def test_an_array_of_another_dtype_is_no_reason_to_stop(tmp_path: Path) -> None:
    def lie(content: RecordDict, probe: bool) -> None:
        if probe:
            record = content.array_records["arrays"]
            content["arrays"] = ArrayRecord({k: Array(a.numpy().astype(complex)) for k, a in record.items()})

    strategy, _, rows = liars.audited({2: lie}, 3, tmp_path)
    assert strategy.failure is None and len(rows) == 4


def test_models_are_made_without_moving_the_streams() -> None:
    class Made(nn.Linear):
        def __init__(self) -> None:
            super().__init__(36, 3)

    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    probe_mod(model=Made, train=train, dataset=own_pictures)
    audit(liars.fedavg(2), model=liars.Small, data=pictures)
    assert torch.equal(torch.rand(3), expected)
