import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_privacy.data import Examples
from fl_privacy.defenses import ClientState, Defense, refiner
from fl_privacy.defenses._refiner import ImageMemory, fingerprints
from fl_privacy.defenses.robust_data import (
    batch_gap,
    descend,
    example_gap,
    importance,
    layer_depths,
    own_gradients,
    pull_within,
)
from fl_privacy.errors import UserError
from fl_privacy.federation import Client
from fl_privacy.files import networks as network_files
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.pretrained.evaluator import EvaluationNetwork, EvaluatorPlan, WordEvaluator, train_evaluator
from fl_privacy.models.pretrained.evaluator_files import load_evaluator, save_evaluator
from fl_privacy.rng import derive_generator
from fl_privacy.types import Batch, LocalPlan, ModelState
from tests.selection import few

from ..harness import clean_gradient, flat, local_step, run, small_evaluator, small_model

MODULE = importlib.import_module("fl_privacy.defenses._refiner")


def judge():
    return load_evaluator(Path(small_evaluator()))


def trained_step(*, examples=4):
    """Make a step at trained weights, where gradients depend on the images."""
    model = small_model()
    rng = derive_generator(3, "training")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(60):
        labels = torch.randint(0, 5, (32,), generator=rng)
        images = 0.2 * labels.view(-1, 1, 1, 1) * torch.rand(32, 3, 16, 16, generator=rng)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return local_step(model, examples=examples)


def unchanged(images):
    """Of images the model takes what is optimized."""
    return images


def gap_of(step, target=None, **options):
    target = target or clean_gradient(step)
    depths = layer_depths(step.model, step.sent, step.batch.inputs[:1])
    weights = importance(target, step.sent.parameters, depths, **{"by": "product", "decay": 0.95, **options})
    return batch_gap(step, target, weights, unchanged, step.batch.inputs)


class Shuffled(nn.Module):
    """Layers that are called in another order than they were made, one of them never."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 5)
        self.unused = nn.Linear(2, 2)
        self.first = nn.Conv2d(3, 4, 16)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, inputs):
        return self.last(self.norm(self.first(inputs)).flatten(1))


def test_layers_are_numbered_in_the_order_of_the_forward_pass():
    model = Shuffled()
    depths = layer_depths(model, ModelState.of(model), torch.rand(1, 3, 16, 16))
    assert depths == {
        **{f"first.{p}": 1 for p in ("weight", "bias")},
        **{f"norm.{p}": 2 for p in ("weight", "bias")},
        **{f"last.{p}": 3 for p in ("weight", "bias")},
        **{f"unused.{p}": 4 for p in ("weight", "bias")},
    }


def test_utility_gap_is_the_weighted_sum_of_equation_4():
    step = local_step()
    target = clean_gradient(step)
    other = torch.rand_like(step.batch.inputs)
    found = loss_gradients(step.model, step.sent, Batch(other, step.batch.labels)).gradients
    layers = {"0": 1, "2": 2, "5": 3}
    for by, element in {
        "product": lambda g, value: g * value,
        "gradient": lambda g, value: g,
        "value": lambda g, value: value,
        "none": lambda g, value: torch.ones_like(g),
    }.items():
        expected = sum(
            (((element(g, step.sent.parameters[n]) * 0.9 ** layers[n[0]]).abs() * (found[n] - g)) ** 2).sum().item()
            for n, g in target.items()
        )
        torch.testing.assert_close(gap_of(step, by=by, decay=0.9)(other), torch.tensor([expected]))


def test_gradient_of_the_gap_is_that_of_finite_differences():
    step = local_step(small_model().double(), examples=2)
    step = replace(step, batch=Batch(step.batch.inputs.double(), step.batch.labels))
    own = {n: g.detach() for n, g in own_gradients(step, step.batch.inputs).items()}
    depths = layer_depths(step.model, step.sent, step.batch.inputs[:1])
    weights = importance(own, step.sent.parameters, depths, by="product", decay=0.95)
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64, generator=derive_generator(7))
    for gap in (gap_of(step), example_gap(step, own, weights, unchanged)):
        scale = 1 / gap(images).detach().mean()

        def scaled(x, gap=gap, scale=scale):
            return gap(x).sum() * scale

        slope = torch.autograd.functional.jacobian(scaled, images)
        rng = derive_generator(9)
        for _ in range(5):
            direction = torch.randn(images.shape, dtype=torch.float64, generator=rng)
            h = 1e-5
            difference = (scaled(images + h * direction) - scaled(images - h * direction)) / (2 * h)
            torch.testing.assert_close((slope * direction).sum(), difference, rtol=1e-6, atol=1e-8)


def test_gap_of_each_example_is_that_of_a_batch_of_one():
    step = local_step(examples=3)
    own = {n: g.detach() for n, g in own_gradients(step, step.batch.inputs).items()}
    depths = layer_depths(step.model, step.sent, step.batch.inputs[:1])
    others = torch.rand_like(step.batch.inputs)
    weights = importance(own, step.sent.parameters, depths, by="product", decay=0.95)
    together = example_gap(step, own, weights, unchanged)(others)
    for i in range(3):
        one = replace(step, batch=Batch(step.batch.inputs[i : i + 1], step.batch.labels[i : i + 1]))
        torch.testing.assert_close(together[i : i + 1], gap_of(one)(others[i : i + 1]), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("make", [local_step, trained_step])
def test_utility_gap_falls_and_noise_rises(make):
    step, network = make(), judge()
    noise = torch.rand(step.batch.inputs.shape, generator=derive_generator(4))
    start, gap = torch.lerp(step.batch.inputs, noise, 0.5), gap_of(step)
    unit = gap(noise).detach()
    steps = [start, *descend(start, gap, network, unit=unit, beta=1.0, lr=1.0, iterations=10)]
    gaps = torch.cat([gap(x).detach() / unit for x in steps])
    ratios = torch.stack([network(x).mean() for x in steps])
    assert (gaps[5:] < 0.3 * gaps[0]).all()
    assert (ratios.diff() > -1e-3).all()
    assert ratios[-1] > ratios[0] + 0.05
    assert all((x >= 0).all() and (x <= 1).all() for x in steps)


def test_the_paper_form_descends_equation_2_by_plain_steps():
    """UM absolute, PM the predicted share of noise, a step size of one: the bound on steps is not reached."""
    step, network = local_step(), judge()
    start, gap, unit = (
        torch.lerp(step.batch.inputs, torch.rand_like(step.batch.inputs), 0.5),
        gap_of(step),
        torch.ones(1),
    )
    found = list(descend(start, gap, network, unit=unit, beta=1.0, lr=1.0, iterations=10))
    assert len(found) == 10
    images = start
    for iterate in found:
        images = images.detach().requires_grad_()
        (slope,) = torch.autograd.grad(gap(images).sum() * len(images) - network(images).sum(), images)
        images = (images.detach() - slope).clamp(0, 1)
        torch.testing.assert_close(iterate, images)


@pytest.mark.parametrize("epsilon", few([0, 1e-6, 1e-3, 0.1, 10], 2))
@pytest.mark.parametrize("options", [{}, {"match": "example"}, {"alpha": 1.0}])
def test_upload_is_within_epsilon_of_the_true_gradient(epsilon, options):
    step = trained_step()
    clean = clean_gradient(step)
    upload = run(refiner(epsilon=epsilon, evaluator=small_evaluator(), **options), clean, step)
    distance = (flat(upload).double() - flat(clean).double()).norm()
    assert distance <= epsilon * (1 + 1e-4) + 1e-9 * flat(clean).norm()


def test_projection_goes_straight_towards_the_center():
    center = {"a": torch.zeros(3), "b": torch.ones(2)}
    far = {"a": torch.tensor([3.0, 0, 0]), "b": torch.tensor([1.0, 5.0])}
    near = pull_within(far, center, 2.5)
    torch.testing.assert_close(near, {"a": torch.tensor([1.5, 0, 0]), "b": torch.tensor([1.0, 3.0])})
    assert pull_within(far, center, 5.1) == far


def test_far_epsilon_uploads_the_gradient_of_robust_data_and_the_start_is_blended():
    step = local_step()
    clean = clean_gradient(step)
    upload = run(refiner(epsilon=1e6, lr=1e-30, alpha=0.3, evaluator=small_evaluator()), clean, step)
    noise = torch.rand(step.batch.inputs.shape, generator=derive_generator(0, "defense"))
    blended = Batch(0.7 * step.batch.inputs + 0.3 * noise, step.batch.labels)
    torch.testing.assert_close(upload, loss_gradients(step.model, step.sent, blended).gradients)


def test_examples_and_batch_agree_for_one_example():
    uploads = []
    for match in ("batch", "example"):
        step = local_step(examples=1)
        uploads.append(flat(run(refiner(match=match, evaluator=small_evaluator()), clean_gradient(step), step)))
    torch.testing.assert_close(*uploads, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_chunks_of_examples_change_nothing(monkeypatch):
    uploads = []
    for elements in (1 << 24, 3000, 1):
        monkeypatch.setattr(MODULE, "_CHUNK_ELEMENTS", elements)
        step = local_step(examples=3)
        uploads.append(flat(run(refiner(match="example", evaluator=small_evaluator()), clean_gradient(step), step)))
    torch.testing.assert_close(uploads[1:], [uploads[0]] * 2, rtol=1e-4, atol=1e-6)


def test_batch_norm_and_loss_scale_of_the_plan_hold():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 5))
    step = replace(local_step(model), plan=LocalPlan(loss_scale=3.0))
    clean = loss_gradients(model, step.sent, step.batch, loss_scale=3.0).gradients
    before = {name: b.clone() for name, b in step.sent.buffers.items()}
    upload = run(refiner(epsilon=0.05, evaluator=small_evaluator()), clean, step)
    assert 0 < (flat(upload) - flat(clean)).norm() <= 0.05 * (1 + 1e-4)
    assert all(torch.equal(b, before[n]) for n, b in step.sent.buffers.items())
    with pytest.raises(UserError, match="batch_norm=eval"):
        run(refiner(match="example", evaluator=small_evaluator()), clean, step)


def test_warm_start_begins_where_the_last_round_ended_with_half_the_iterations(monkeypatch):
    begun = []

    def record(start, *args, iterations, **options):
        begun.append((start, iterations))
        return descend(start, *args, iterations=iterations, **options)

    monkeypatch.setattr(MODULE, "descend", record)
    defense = refiner(warm_start=True, iterations=6, evaluator=small_evaluator())
    state = ClientState()
    for seed in (1, 2):
        step = replace(local_step(seed=seed), state=state)
        run(defense, clean_gradient(step), step)
    assert [iterations for _, iterations in begun] == [6, 3]
    *_, ended = descend(
        begun[0][0], gap_of(step), judge(), unit=gap_of(step)(noise_of(1)).detach(), beta=1, lr=1, iterations=6
    )
    torch.testing.assert_close(begun[1][0], ended, rtol=0, atol=0.5 / 255 + 1e-5)
    fewer = replace(local_step(seed=3, examples=2), state=state)
    run(defense, clean_gradient(fewer), fewer)
    assert begun[2][1] == 3
    more = replace(local_step(seed=4, examples=6), state=state)
    run(defense, clean_gradient(more), more)
    assert begun[3][1] == 6


def noise_of(seed):
    return torch.rand(4, 3, 16, 16, generator=derive_generator(seed, "defense"))


def test_once_a_round_keeps_the_robust_data_within_a_round_only(monkeypatch):
    calls = []
    monkeypatch.setattr(MODULE, "descend", lambda start, *_, **__: [calls.append(1) or start.clamp(0.2, 0.8)])
    defense, state = refiner(per="round", epsilon=1e6, evaluator=small_evaluator()), ClientState()
    (on_gradient,), (on_upload,) = defense.gradient, defense.upload
    steps = [replace(local_step(seed=seed), state=state) for seed in (1, 2)]
    first, second = (on_gradient(clean_gradient(step), step) for step in steps)
    assert len(calls) == 1
    torch.testing.assert_close(first, second, rtol=0.05, atol=1e-3)
    on_upload({}, state, steps[0].rng)
    assert not state.tensors
    on_gradient(clean_gradient(steps[0]), steps[0])
    assert len(calls) == 2


def test_images_are_found_by_their_content():
    images = torch.rand(50, 1, 4, 4)
    keys = fingerprints(images)
    assert len(keys.unique()) == 50
    assert torch.equal(fingerprints(images[[7]].clone()), keys[[7]])
    state = ClientState()
    kept = ImageMemory(state, "x")
    kept.remember(keys[:30], images[:30])
    kept.remember(keys[20:25], 1 - images[20:25])
    found = kept.recall(keys, torch.full_like(images, 0.123))
    torch.testing.assert_close(found[0][:20], images[:20], rtol=0, atol=0.5 / 255 + 1e-6)
    torch.testing.assert_close(found[0][20:25], 1 - images[20:25], rtol=0, atol=0.5 / 255 + 1e-6)
    assert (found[0][30:] == 0.123).all()
    assert torch.equal(found[1], torch.arange(50) < 30)
    kept.end_round(forget=False)
    assert not kept.recall(keys, images)[2].any()
    assert len(state.tensors["x/keys"]) == 30


@pytest.mark.long
def test_ablations_change_the_upload():
    uploads = {}
    for options in (
        {},
        {"beta": 10.0},
        {"iterations": 3},
        {"alpha": 0.1},
        {"decay": 0.5},
        {"weights": "none"},
        {"weights": "gradient"},
        {"weights": "value"},
        {"privacy": "mse"},
        {"utility": "absolute"},
    ):
        step = trained_step()
        uploads[str(options)] = flat(
            run(refiner(epsilon=1e6, evaluator=small_evaluator(), **options), clean_gradient(step), step)
        )
    values = list(uploads.values())
    assert not any(torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": -1},
        {"alpha": 1.1},
        {"beta": -1},
        {"iterations": 0},
        {"lr": 0},
        {"decay": 0},
        {"weights": "x"},
        {"utility": "x"},
        {"privacy": "x"},
        {"match": "x"},
        {"per": "x"},
        {"warm_start": 3},
        {"evaluator": []},
        {"evaluator": ["a", ""]},
        {"evaluator": 3},
    ],
)
def test_bad_options_are_one_line(wrong):
    with pytest.raises(UserError, match="expected") as error:
        refiner(**wrong)
    assert "\n" not in str(error.value)


def test_a_training_opens_the_evaluator_once(tmp_path, monkeypatch):
    file, opened = tmp_path / "evaluator.safetensors", []
    file.write_bytes(Path(small_evaluator()).read_bytes())
    really_open = network_files.safe_open
    monkeypatch.setattr(network_files, "safe_open", lambda *a, **k: opened.append(a) or really_open(*a, **k))
    defense, step = refiner(evaluator=str(file)), local_step()
    (prepare,) = defense.prepare
    prepare((3, 16, 16))
    for _ in range(3):
        run(defense, clean_gradient(step), step)
    assert len(opened) == 1


def test_missing_evaluator_is_said_before_the_training():
    (prepare,) = refiner().prepare
    with pytest.raises(UserError, match="train-evaluator"):
        prepare((3, 16, 16))
    (prepare,) = refiner(evaluator=small_evaluator()).prepare
    prepare((3, 16, 16))
    with pytest.raises(UserError, match=r"data\.image_size=32"):
        prepare((3, 32, 32))
    (prepare,) = refiner(privacy="mse").prepare
    prepare((3, 16, 16))


def other_evaluator(tmp_path):
    """File of a network that was trained less."""
    plan = EvaluatorPlan(widths=(4, 4, 4), epochs=1, lr=1e-2, batch_size=64)
    network = train_evaluator(torch.randint(256, (64, 3, 16, 16), dtype=torch.uint8), plan, seed=1)
    save_evaluator(network, tmp_path / "other.safetensors", {})
    return str(tmp_path / "other.safetensors")


@pytest.mark.long
def test_of_several_evaluators_every_client_takes_its_own(tmp_path):
    files = [small_evaluator(), other_evaluator(tmp_path)]

    def upload(number, evaluator):
        step = trained_step()
        step = replace(step, state=ClientState().of_client(number))
        return flat(run(refiner(epsilon=1e6, evaluator=evaluator), clean_gradient(step), step))

    assert torch.equal(upload(0, files), upload(0, files[0]))
    assert torch.equal(upload(3, files), upload(0, files[1]))
    assert not torch.equal(upload(0, files), upload(1, files))
    assert refiner(evaluator=tuple(files)).parts[0].settings["evaluator"] == files


def test_each_of_several_evaluators_is_looked_at_before_the_training(tmp_path):
    (prepare,) = refiner(evaluator=[small_evaluator(), str(tmp_path / "none.safetensors")]).prepare
    with pytest.raises(UserError, match=r"none\.safetensors"):
        prepare((3, 16, 16))


def test_clients_tell_the_defense_their_number():
    seen = []
    plain = Defense(gradient=(lambda tensors, step: seen.append(step.state.number) or tensors,))
    examples = Examples(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), torch.arange(8) % 5, 5)
    for number in (0, 4):
        client = Client(
            id=number,
            examples=examples,
            indices=torch.arange(8),
            model=small_model(),
            plan=LocalPlan(lr=0.1),
            defense=plain,
            seed=0,
        )
        client.update(ModelState.of(small_model()), ClientState(), round=1)
    assert seen == [0, 4]


@pytest.mark.parametrize("match", ["batch", "example"])
def test_integrated_gradients_weigh_otherwise_than_the_product(match):
    uploads = []
    for weights in ("product", "integrated_gradients"):
        step = trained_step()
        defense = refiner(epsilon=1e6, match=match, weights=weights, evaluator=small_evaluator())
        uploads.append(flat(run(defense, clean_gradient(step), step)))
    assert uploads[1].isfinite().all()
    assert not torch.equal(*uploads)


def test_both_ways_of_matching_integrate_alike_for_a_single_image():
    uploads = []
    for match in ("batch", "example"):
        step = trained_step(examples=1)
        defense = refiner(epsilon=1e6, match=match, weights="integrated_gradients", evaluator=small_evaluator())
        uploads.append(flat(run(defense, clean_gradient(step), step)))
    torch.testing.assert_close(*uploads, rtol=1e-4, atol=1e-6)


def test_one_width_alone_is_a_network_of_one_layer():
    assert EvaluatorPlan(widths=5).widths == WordEvaluator(width=3, widths=5).widths == (5,)
    with pytest.raises(UserError, match="widths is expected to be whole numbers of at least 1, but got 0"):
        EvaluatorPlan(widths=0)
    with pytest.raises(UserError, match="widths is expected to be whole numbers of at least 1, but got"):
        EvaluationNetwork(input_shape=(1, 8, 8), widths=())
