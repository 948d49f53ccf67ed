"""What a site computes of the others' updates from the global models and its own."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fl_privacy.errors import UserError
from fl_privacy.federation import Server, ServerPlan
from fl_privacy.federation.another_site import AnotherSite, estimated_share, seen_by_sites, single_uploads
from fl_privacy.federation.server_optimizer import ServerOptimizer, ServerSteps
from fl_privacy.types import LocalPlan, ModelState, Upload

NAMES = ("w", "b")


def start(seed: int = 0) -> ModelState:
    rng = torch.Generator().manual_seed(seed)
    return ModelState({n: torch.randn(300, generator=rng) / 10 for n in NAMES}, {"mean": torch.zeros(3)})


def upload(seed: int, examples: int, sent: ModelState, shares: str) -> Upload:
    rng = torch.Generator().manual_seed(seed)
    change = {n: torch.randn(300, generator=rng) / 100 for n in NAMES}
    tensors = {n: sent.parameters[n] + t for n, t in change.items()} if shares == "weights" else change
    return Upload(tensors=tensors, buffers={"mean": torch.full((3,), float(seed))}, num_examples=examples)


def federation(shares: str, **rules: object) -> tuple[Server, AnotherSite]:
    local = LocalPlan(shares=shares)  # type: ignore[arg-type]
    plan = ServerPlan(**rules)  # type: ignore[arg-type]
    server = Server(state=start(), local_plan=local, plan=plan, clients=[0, 1, 2, 3], seed=0)
    return server, AnotherSite(plan=plan, local_plan=local)


def relative(found: Upload, truth: Upload, sent: ModelState, shares: str) -> float:
    less = sent.parameters if shares == "weights" else dict.fromkeys(NAMES, torch.zeros(300))
    wrong = sum(float((found.tensors[n] - truth.tensors[n]).square().sum()) for n in NAMES)
    return (wrong / sum(float((truth.tensors[n] - less[n]).square().sum()) for n in NAMES)) ** 0.5


@pytest.mark.parametrize("shares", ["gradient", "delta", "weights"])
@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_of_two_sites_each_has_the_other_s_update_in_every_round(shares: str, rule: str) -> None:
    server, site = federation(shares, lr=0.5, optimizer=ServerOptimizer(name=rule))  # type: ignore[arg-type]
    for round in (1, 2, 3):
        sent = server.state
        other, own = upload(round, 3, sent, shares), upload(10 + round, 5, sent, shares)
        server.receive({0: other, 1: own}, round)
        found = site.rest(sent, server.state, {1: own}, {0: 3, 1: 5})
        assert found is not None
        assert found.num_examples == 3
        assert relative(found, other, sent, shares) < 1e-5
        torch.testing.assert_close(found.buffers["mean"], other.buffers["mean"])


@pytest.mark.parametrize("rule", ["adam", "yogi"])
def test_the_first_step_of_adam_and_yogi_is_undone(rule: str) -> None:
    server, site = federation("delta", lr=0.1, optimizer=ServerOptimizer(name=rule))  # type: ignore[arg-type]
    sent = server.state
    other, own = (upload(seed, 4, sent, "delta") for seed in (1, 2))
    server.receive({0: other, 1: own}, 1)
    found = site.rest(sent, server.state, {1: own}, {0: 4, 1: 4})
    assert found is not None
    assert relative(found, other, sent, "delta") < 1e-3


def test_with_a_tiny_tau_adam_s_first_step_is_a_sign() -> None:
    server, site = federation("delta", lr=0.1, optimizer=ServerOptimizer(name="adam", tau=1e-12))
    sent = server.state
    other, own = (upload(seed, 4, sent, "delta") for seed in (1, 2))
    server.receive({0: other, 1: own}, 1)
    found = site.rest(sent, server.state, {1: own}, {0: 4, 1: 4})
    assert found is not None
    assert relative(found, other, sent, "delta") > 0.3


@pytest.mark.parametrize("rule", ["adam", "yogi"])
def test_moments_are_those_of_the_server(rule: str) -> None:
    server, site = (ServerSteps(rule=ServerOptimizer(name=rule)) for _ in range(2))  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(0)
    for _ in range(3):  # each mean as large as the last or smaller, so that the smaller of two roots is right
        mean = torch.randn(50, generator=rng, dtype=torch.float64).abs() / 1000
        torch.testing.assert_close(site.mean_behind(server.step({"w": mean}))["w"], mean, rtol=1e-3, atol=1e-7)


def test_colluding_sites_are_left_with_the_mean_of_the_others() -> None:
    server, site = federation("delta")
    sent = server.state
    uploads = {client: upload(client, client + 1, sent, "delta") for client in range(4)}
    server.receive(uploads, 1)
    found = site.rest(sent, server.state, {c: uploads[c] for c in (2, 3)}, {c: c + 1 for c in range(4)})
    assert found is not None
    for name in NAMES:
        mean = (uploads[0].tensors[name] + 2 * uploads[1].tensors[name]) / 3
        torch.testing.assert_close(found.tensors[name], mean, rtol=1e-3, atol=1e-6)


def test_a_site_that_is_not_asked_sees_the_mean_and_alone_it_sees_nothing() -> None:
    server, site = federation("delta")
    sent, other = server.state, upload(1, 2, server.state, "delta")
    server.receive({0: other}, 1)
    found = site.rest(sent, server.state, {}, {0: 2})
    assert found is not None
    assert relative(found, other, sent, "delta") < 1e-5
    assert site.rest(sent, server.state, {0: other}, {0: 2}) is None
    assert site.rest(sent, sent, {}, {0: 2}) is None, "no value of the model changed"


def test_an_upload_far_larger_than_the_others_is_in_the_mean_that_is_left() -> None:
    sent = start()
    uploads = {client: upload(client, 1, sent, "delta") for client in range(4)}
    uploads[0] = replace(uploads[0], tensors={n: 1000 * t for n, t in uploads[0].tensors.items()})
    seen = seen_by_sites(sent, uploads, [3], ServerPlan(), LocalPlan(shares="delta"))
    for name in NAMES:
        mean = torch.stack([uploads[client].tensors[name] for client in range(3)]).mean(0)
        assert float((seen.tensors[name] - mean).norm() / mean.norm()) < 1e-5


def test_the_stated_rounding_is_the_error() -> None:
    server, site = federation("gradient", lr=0.01)
    sent = server.state
    other, own = (upload(seed, 1, sent, "gradient") for seed in (1, 2))
    server.receive({0: other, 1: own}, 1)
    found = site.rest(sent, server.state, {1: own}, {0: 1, 1: 1})
    assert found is not None
    wrong = torch.cat([found.tensors[n] - other.tensors[n] for n in NAMES]).std()
    assert 0.5 < float(wrong) / found.rounding < 2


def test_the_server_s_noise_hides_from_a_site_and_not_from_the_server() -> None:
    server, site = federation("delta", noise=0.02)
    sent = server.state
    other, own = (upload(seed, 1, sent, "delta") for seed in (1, 2))
    server.receive({0: other, 1: own}, 1)
    found = site.rest(sent, server.state, {1: own}, {0: 1, 1: 1})
    assert found is not None
    wrong = torch.cat([found.tensors[n] - other.tensors[n] for n in NAMES]).std()
    assert float(wrong) == pytest.approx(2 * 0.02, rel=0.15)


@pytest.mark.parametrize(("name", "value"), [("name", "adagrad"), ("momentum", 1.0), ("beta2", -0.1), ("tau", 0.0)])
def test_a_wrong_rule_ends_in_a_line(name: str, value: object) -> None:
    with pytest.raises(UserError, match="is expected"):
        ServerOptimizer(**{name: value})  # type: ignore[arg-type]


def test_means_of_different_participants_give_single_updates() -> None:
    sent = start()
    uploads = {client: upload(client, client + 1, sent, "delta") for client in range(4)}

    def mean_of(*clients: int) -> tuple[dict[int, int], Upload]:
        numbers = {client: client + 1 for client in clients}
        total = sum(numbers.values())
        mean = {n: sum(k / total * uploads[c].tensors[n] for c, k in numbers.items()) for n in NAMES}
        return numbers, Upload(tensors=mean, num_examples=total)  # type: ignore[arg-type]

    together = single_uploads([mean_of(0, 1), mean_of(0, 1), mean_of(2, 3)])
    assert not together
    found = single_uploads([mean_of(2, 3), mean_of(0, 1, 2), mean_of(0, 1)])
    assert list(found) == [2, 3]
    for client, made in found.items():
        assert made.num_examples == client + 1
        assert relative(made, uploads[client], sent, "delta") < 1e-4
    assert list(single_uploads([mean_of(1), mean_of(0, 1)])) == [0, 1]


def gradients(seed: int, examples: int, words: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return gradients of a layer (60, 40) from so many examples, and of the rows of an embedding (50, 30)."""
    rng = torch.Generator().manual_seed(seed)
    layer = sum(torch.outer(torch.randn(60, generator=rng), torch.randn(40, generator=rng)) for _ in range(examples))
    rows = torch.zeros(50, 30)
    rows[list(words)] = torch.randn(len(words), 30, generator=rng)
    return {"w": layer / examples / 10, "words": rows / 10}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("examples", "words", "how"),
    [
        ((30, 25, 40), (range(10), range(5, 20), range(30)), "values"),  # rows 20 to 29 are the own site's alone
        ((5, 9, 4), (range(10), range(10), range(10)), "rank"),
        ((30, 25, 40), (range(10), range(10), range(10)), "equal"),
    ],
)
def test_a_site_that_is_given_no_numbers_estimates_its_share(
    examples: tuple[int, ...], words: tuple[range, ...], how: str
) -> None:
    rng, local, plan = torch.Generator().manual_seed(0), LocalPlan(shares="gradient"), ServerPlan(lr=0.5)
    sent = ModelState({n: torch.randn(v.shape, generator=rng) / 10 for n, v in gradients(0, 1, [0]).items()})
    server = Server(state=sent, local_plan=local, plan=plan, clients=[0, 1, 2], seed=0)
    pairs = enumerate(zip(examples, words, strict=True))
    uploads = {c: Upload(tensors=gradients(c, n, rows), num_examples=n) for c, (n, rows) in pairs}
    server.receive(uploads, 1)
    site = AnotherSite(plan=plan, local_plan=local, knows_numbers=False)
    # the numbers of the others are never read
    found = site.rest(sent, server.state, {2: uploads[2]}, {0: 10**6, 1: 7, 2: examples[2]})
    ((share, said),) = site.shares
    assert found is not None and said.split()[-1 if how == "rank" else 0] == how
    left = examples[0] + examples[1]
    for name in ("w", "words"):
        truth = sum(examples[c] / left * uploads[c].tensors[name] for c in (0, 1))
        off = float((found.tensors[name] - truth).norm() / torch.as_tensor(truth).norm())
        assert off > 0.05 if how == "equal" else off < 0.01
    assert found.num_examples == (2 * examples[2] if how == "equal" else left)
    assert share == pytest.approx(1 / 3 if how == "equal" else examples[2] / sum(examples), rel=1e-3)


@pytest.mark.parametrize("activation", [torch.nn.Sigmoid, torch.nn.ReLU])
def test_a_background_that_all_examples_share_is_not_taken_for_the_own_s(activation: type[torch.nn.Module]) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(400, 64), activation(), torch.nn.Linear(64, 10))
        updates = []
        for number in (30, 70):
            images = torch.rand(number, 20, 20)
            images[:, :5] = images[:, :, :4] = -0.4  # normalized black
            loss = torch.nn.functional.cross_entropy(model(images.flatten(1)), torch.randint(10, (number,)))
            names = [name for name, _ in model.named_parameters()]
            updates.append(dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True)))
        own, rest = ({n: t.double() for n, t in each.items()} for each in updates)
        mean = {n: 0.3 * own[n] + 0.7 * rest[n] for n in own}
        found = estimated_share(mean, own, {n: torch.full_like(t, 1e-9) for n, t in mean.items()})
        assert found is None or found[0] == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("sites", [2, 4])
def test_a_step_of_adam_is_not_taken_for_values_that_the_own_examples_alone_change(share: float, sites: int) -> None:
    rng = torch.Generator().manual_seed(0)
    signs = []
    for _ in range(sites):  # rows of a layer of pixels, which are not negative, have one sign each
        rows = torch.randn(64, 1, generator=rng).sign().repeat(1, 100)
        signs.append({"w": torch.where(rows == 0, 1, rows).double() / 1000})
    signs[0]["w"][:, :5] = 0  # pixels that are dark in all own images
    own, left = signs[0], (1 - share) / (sites - 1)
    mean = {"w": share * own["w"] + sum(left * other["w"] for other in signs[1:])}
    found = estimated_share(mean, own, {"w": torch.full_like(own["w"], 1e-9)})
    assert found == (pytest.approx(share, rel=1e-3), "the other sign's values")


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_the_weight_decay_of_adamw_does_not_blur_the_signs(share: float) -> None:
    rng, plan = torch.Generator().manual_seed(0), ServerPlan()
    local = LocalPlan(shares="delta", lr=1e-3, steps=1, optimizer="adamw", weight_decay=0.05)
    sent = ModelState({"w": torch.randn(64, 100, generator=rng) / 5})
    examples, uploads = (round(10 * (1 - share)), round(10 * share)), dict[int, Upload]()
    for client, number in enumerate(examples):
        signs = torch.randn(64, 1, generator=rng).sign().expand(-1, 100)
        step = -local.lr * (signs + local.weight_decay * sent.parameters["w"])
        uploads[client] = Upload(tensors={"w": step}, num_examples=number)
    server = Server(state=sent, local_plan=local, plan=plan, clients=[0, 1], seed=0)
    server.receive(uploads, 1)
    site = AnotherSite(plan=plan, local_plan=local, knows_numbers=False)
    site.rest(sent, server.state, {1: uploads[1]}, {0: 10**6, 1: examples[1]})
    assert site.shares == [(pytest.approx(share, rel=1e-2), "the other sign's values")]
