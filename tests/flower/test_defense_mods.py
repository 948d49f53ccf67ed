"""A defense as a mod, and within a client's own training function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict, UserConfig

from fl_privacy import audit, defend, defense_mod, load_observations, probe_mod
from fl_privacy.defenses import (
    Defense,
    ats,
    compose,
    dm,
    dp_noise,
    dp_sgd,
    fdl_pp,
    instahide,
    pruning,
    quantization,
    refiner,
    soteria,
    split_fed,
    spn,
)
from fl_privacy.errors import UserError
from fl_privacy.flower import answer_once_mod, private_loader, train_step
from fl_privacy.flower.inside.identity import identify_process
from fl_privacy.flower.records import load_state
from fl_privacy.types.plan import Normalization
from tests.flower import foreign_app as app
from tests.flower.foreign_app import Net

PARAMETERS = [name for name, _ in Net().named_parameters()]


def replies(tmp_path: Any, *mods: Any) -> list[Any]:
    app.start(audit(app.fedavg(), model=Net, data=app.pictures, out=tmp_path, attack="none"), app.client_app(mods))
    (folder,) = tmp_path.glob("audit-*")
    return load_observations(folder / "captures", Net())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return replies(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("told", [{"model": Net}, {"names": PARAMETERS}])
def test_statistics_and_counters_pass_as_they_are(told: dict[str, Any], plain: list[Any], tmp_path: Any) -> None:
    noised = replies(tmp_path, defense_mod(dp_noise(scale=0.5, clip_norm=1.0), **told))

    for clean, defended in zip(plain, noised, strict=True):
        for name, value in clean.upload.buffers.items():
            torch.testing.assert_close(defended.upload.buffers[name], value)
        noise = torch.cat([(defended.upload.tensors[n] - clean.upload.tensors[n]).flatten() for n in PARAMETERS])
        assert 0.3 < noise.std() < 0.7


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_a_message_without_content_is_no_way_around_a_defense(kind: str) -> None:
    """An app that does not look at what it is sent would answer with weights that nothing acted on, without end."""
    context, asked = Context(0, 1, {}, RecordDict(), {}), list[Message]()
    identify_process()
    empty = Message(Error(1), reply_to=Message(RecordDict(), dst_node_id=1, message_type=kind))

    def app_of_its_own(message: Message, context: Context) -> Message:
        asked.append(message)
        return Message(RecordDict({"arrays": ArrayRecord(Net().state_dict())}), reply_to=message)

    probe = probe_mod(model=Net, train=app.train, dataset=app.own_pictures)
    for mod in (defense_mod(pruning(rate=0.5)), answer_once_mod(), probe):
        reply = mod(empty, context, app_of_its_own)
        assert reply.has_error() and "with content is expected" in reply.error.reason
    assert not asked


def test_buffers_can_be_withheld_or_defended_like_parameters(plain: list[Any], tmp_path: Any) -> None:
    for buffers in ("withheld", "defended"):
        mod = defense_mod(dp_noise(scale=0.5, clip_norm=1.0), model=Net, buffers=buffers)
        for clean, defended in zip(plain, replies(tmp_path / buffers, mod), strict=True):
            mean = defended.upload.buffers["norm.running_mean"]
            assert torch.equal(mean, defended.sent.buffers["norm.running_mean"]) == (buffers == "withheld")
            assert not torch.equal(mean, clean.upload.buffers["norm.running_mean"])


def test_probes_are_defended_as_well_in_front_of_the_probe_mod(tmp_path: Any) -> None:
    probe = probe_mod(model=Net, train=app.train, dataset=app.own_pictures)
    observed = replies(tmp_path, defense_mod(pruning(rate=0.9)), probe)
    probes = [o for o in observed if o.id.probe is not None]
    assert probes and all(float((o.update()["fc.weight"] == 0).float().mean()) > 0.5 for o in probes)


WITHIN: list[Callable[[], Defense]] = [refiner, soteria, spn, fdl_pp, split_fed, ats, dp_sgd, instahide, dm]


@pytest.mark.parametrize("make", WITHIN)
def test_what_a_mod_can_not_do_it_says_in_a_line(make: Callable[[], Defense]) -> None:
    for attempt in (lambda: defense_mod(make(), model=Net), lambda: defend(object(), make(), model=Net)):
        with pytest.raises(UserError, match=r"acts within the training: .*fl_privacy.flower.train_step"):
            attempt()


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: defense_mod(dp_noise(scale=0.1)), "give model=Net or names="),
        (lambda: defend(object(), compose(pruning(), dp_noise(scale=0.1))), "give model=Net or names="),
        (lambda: defense_mod(pruning(), model=Net, names=PARAMETERS), "one at a time"),
        (lambda: defense_mod(pruning(), model=Net, buffers="gone"), "kept, withheld, defended"),
        (lambda: defense_mod(pruning(), model="Net"), "or its class, but got str"),
        (lambda: probe_mod(model=Net, train=lambda net: None, dataset=[]), r"train\(net, loader, config\)"),
        (lambda: probe_mod(model=Net, train=lambda net, loader, epochs: None, dataset=[]), "wrap it"),
        (lambda: train_step(dm(), Net()), "make the client a PrivacyClient"),
        (lambda: next(private_loader([], soteria())), "use train_step"),
    ],
)
def test_wrong_mods_are_one_line(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        make()


def context() -> Context:
    return Context(1, 1, UserConfig({"partition-id": 0, "num-partitions": 2}), RecordDict(), UserConfig())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    examples = app.pictures(0)
    return torch.stack([image for image, _ in examples]), torch.tensor([label for _, label in examples])


def gradients(net: Net) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


NORMALIZATION = Normalization((0.5,), (0.5,))


def test_a_step_without_a_defense_is_a_backward_pass() -> None:
    own, stepped = fresh().train(), fresh().train()
    images, labels = batch()
    F.cross_entropy(own(images), labels).backward()

    with train_step(Defense(), stepped, normalization=NORMALIZATION, seed=0) as step:
        step(images, labels)

    for name, gradient in gradients(own).items():
        torch.testing.assert_close(gradients(stepped)[name], gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(stepped.norm.running_mean, own.norm.running_mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [soteria, spn, split_fed, dp_sgd, lambda: refiner(privacy="mse"), ats])
def test_defenses_of_the_training_act_in_a_step(make: Callable[[], Defense]) -> None:
    images, labels = batch()
    plain, net, place = fresh(), fresh(), context()
    plain.norm.eval()
    net.norm.eval()
    with train_step(Defense(), plain, seed=0) as step:
        step(images, labels)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with train_step(make(), net, place, normalization=NORMALIZATION, seed=0) as step:
        loss = step(images, labels)

    assert loss.isfinite() and all(g.isfinite().all() for g in gradients(net).values())
    assert any(not torch.allclose(g, gradients(plain)[n], rtol=1e-3, atol=1e-6) for n, g in gradients(net).items())
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())


class Words(torch.nn.Module):
    """Tokens (B, 5) to logits (B, 2)."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 4, sparse=sparse)
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.embedding(tokens).mean(1))
        return out


@pytest.mark.parametrize("make", [dp_sgd, Defense])
def test_sparse_embeddings_step_as_dense_ones(make: Callable[[], Defense]) -> None:
    tokens, labels, found = torch.arange(20).reshape(4, 5), torch.tensor([0, 1, 0, 1]), []
    for sparse in (True, False):
        torch.manual_seed(0)
        net = Words(sparse=sparse)
        with train_step(make(), net, seed=0) as step:
            step(tokens, labels)
        found.append(gradients(net))
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient)


@pytest.mark.parametrize(
    ("net", "inputs"),
    [(torch.nn.Linear(4, 2), torch.zeros(0, 4)), (Words(sparse=True), torch.zeros(0, 5, dtype=torch.int64))],
    ids=["values", "tokens"],
)
def test_an_empty_poisson_batch_is_a_step_of_noise(net: torch.nn.Module, inputs: torch.Tensor) -> None:
    for multiplier in (0.0, 2.0):
        with train_step(dp_sgd(clip_norm=0.5, noise_multiplier=multiplier), net, seed=0) as step:
            loss = step(inputs, torch.zeros(0, dtype=torch.int64))
        assert float(loss) == 0.0
        noise = torch.cat([g.flatten() for g in gradients(net).values()])
        assert float(noise.std()) == pytest.approx(0.5 * multiplier, rel=0.5)


def test_private_parts_are_trained_along_and_stay_on_the_node() -> None:
    images, labels = batch()
    for make, kept in ((spn, "private/fc.spn.weight"), (split_fed, "private/conv.weight")):
        place, values = context(), []
        for _ in range(2):
            net = fresh()
            with train_step(make(), net, place, lr=0.5, normalization=NORMALIZATION, seed=0) as step:
                step(images, labels)
            values.append(load_state(place.state).tensors[kept].clone())
            assert all(kept.removeprefix("private/") != n for n in gradients(net))
            assert torch.equal(net.conv.weight, fresh().conv.weight)
        assert not torch.equal(*values)


def test_private_parts_that_are_frozen_stay_as_they_are() -> None:
    """Without noise they would learn what shapes the uploads to come."""
    images, labels = batch()
    for defense in (split_fed(start="shared"), compose(split_fed(start="shared"), dp_sgd())):
        net, place = fresh().eval(), context()
        net.conv.requires_grad_(False)
        with train_step(defense, net, place, lr=0.5, seed=0) as step:
            step(images, labels)
        assert torch.equal(load_state(place.state).tensors["private/conv.weight"], net.conv.weight)
        assert net.fc.weight.grad is not None and net.fc.weight.grad.any()


def test_batches_are_changed_for_a_training_that_stays_as_it_is() -> None:
    images, labels = batch()
    loaders: list[Any] = [[(images, labels)], [{"img": images, "label": labels}]]
    for loader in loaders:
        (changed,) = private_loader(loader, ats(), normalization=NORMALIZATION, seed=3)
        assert type(changed) is type(loader[0])
        other = changed["img"] if isinstance(changed, dict) else changed[0]
        assert other.shape == images.shape and not torch.equal(other, images)
        assert other.min() >= -1 - 1e-5 and other.max() <= 1 + 1e-5


def test_quantized_replies_keep_what_is_no_parameter(plain: list[Any], tmp_path: Any) -> None:
    mod = defense_mod(quantization(bits=2), model=Net)
    for clean, defended in zip(plain, replies(tmp_path, mod), strict=True):
        counter = "norm.num_batches_tracked"
        assert torch.equal(clean.upload.buffers[counter], defended.upload.buffers[counter])
        assert len(defended.update()["fc.weight"].mul(1e4).round().unique()) <= 6
