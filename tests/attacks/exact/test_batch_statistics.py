"""Batch norm around the first layer is undone by the running statistics that a client sends back."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_privacy import Observation, reconstruct
from fl_privacy.attacks.exact import ExactInversion, spear
from fl_privacy.attacks.exact.batch_norm import centered, find_normalized_outputs
from fl_privacy.attacks.exact.spear import orthogonal_factors
from fl_privacy.types import Certainty, LocalPlan, Reconstruction

Optimizer = Literal["sgd", "adam", "adamw"]


def rows(activation: type[nn.Module] = nn.ReLU, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(14, momentum=momentum)
    nn.init.normal_(norm.bias)
    return nn.Sequential(norm, nn.Linear(14, 64), activation(), nn.Linear(64, 3))


def pictures() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def flat_pictures() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 3))


def step(net: nn.Module, examples: Tensor) -> Observation:
    before = copy.deepcopy(net)
    F.cross_entropy(net(examples), torch.arange(len(examples))).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    plan, shape = LocalPlan(lr=0.1, steps=1), tuple(examples.shape[1:])
    return Observation.of_update(before, net, plan, input_shape=shape, num_examples=len(examples))


def drawn(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("net", "examples"),
    [
        (rows(), drawn(2, 14)),
        (rows(nn.Tanh), drawn(2, 14)),
        (rows(momentum=None), drawn(2, 14)),
        (rows().double(), drawn(3, 14).double()),
        (pictures(), drawn(2, 1, 8, 8)),
        (flat_pictures().double(), drawn(2, 1, 8, 8).double()),
    ],
    ids=["rows", "without ReLU", "cumulative", "three rows", "images", "images, each value"],
)
def test_examples_are_read_through_batch_norm(net: nn.Module, examples: Tensor) -> None:
    found = reconstruct(step(net, examples), "exact")
    assert found.batch is not None and found.certainty is Certainty.PROVEN
    apart = (found.batch.inputs[:, None].double() - examples[None].double()).abs().flatten(2).amax(2)
    assert float(apart.amin(0).max()) < 1e-4
    assert sorted(found.batch.labels.tolist()) == list(range(len(examples)))


def test_a_single_image_is_read_by_the_statistics_of_its_pixels() -> None:
    found = reconstruct(step(pictures(), drawn(1, 1, 8, 8)), "exact")
    assert found.batch is not None and float((found.batch.inputs - drawn(1, 1, 8, 8)).abs().max()) < 1e-4


def test_without_the_statistics_it_is_said() -> None:
    seen = step(rows(), drawn(2, 14))
    held = Observation.of_update(rows(), list(seen.upload.tensors.values()), seen.plan, input_shape=14, num_examples=2)
    assert "BatchNorm1d" in (reconstruct(held, "exact").failure or "")


def test_two_examples_are_read_from_an_update_in_single_precision() -> None:
    """Where rounding hides whether the update is reproduced, signs and statistics still say what was there."""
    found = reconstruct(step(flat_pictures(), drawn(2, 1, 8, 8)), "exact")
    assert found.batch is not None
    apart = (found.batch.inputs[:, None] - drawn(2, 1, 8, 8)[None]).abs().flatten(2).median(2).values
    assert float(apart.amin(0).max()) < 1e-4


def normalized_outputs(
    features: int = 30, hidden: int = 64, activation: type[nn.Module] = nn.ReLU, drop: float = 0.0, bias: bool = True
) -> nn.Module:
    """Build a network for rows whose fully connected layers are followed by batch norm."""
    torch.manual_seed(1)
    layers = nn.Linear(features, hidden, bias=bias), nn.BatchNorm1d(hidden), activation(), nn.Dropout(drop)
    deeper = nn.Linear(hidden, 32), nn.BatchNorm1d(32), activation(), nn.Dropout(drop), nn.Linear(32, 2)
    net = nn.Sequential(*layers, *deeper)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            module.weight.data[::3] *= -1
            nn.init.normal_(module.bias, 0, 0.1)
    return net


def seen_of(net: nn.Module, examples: Tensor, *, optimizer: Optimizer = "sgd", lr: float = 0.01) -> Observation:
    """Observe a client that uploads weights and running statistics after one step."""
    before, kinds = copy.deepcopy(net), {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    F.cross_entropy(net(examples), torch.arange(len(examples)) % 2).backward()
    kinds[optimizer](net.parameters(), lr=lr).step()
    decay = 0.01 if optimizer == "adamw" else 0.0
    plan = LocalPlan(shares="weights", lr=lr, steps=1, optimizer=optimizer, weight_decay=decay)
    shape = tuple(examples.shape[1:])
    return Observation.of_update(before, net, plan, input_shape=shape, num_examples=len(examples))


def worst_of(found: Reconstruction, examples: Tensor) -> float:
    assert found.batch is not None, found.failure
    apart = (found.batch.inputs[:, None].double() - examples[None].double()).abs().flatten(2).amax(2)
    return float(apart.amin(0).max())


def coded(number: int, features: int, seed: int = 0) -> Tensor:
    """Draw rows of 6 numbers and of categories in one-hot encoding, five each."""
    rng, rows = torch.Generator().manual_seed(seed), torch.zeros(number, features)
    rows[:, :6] = torch.rand(number, 6, generator=rng)
    for start in range(6, features, 5):
        width = min(5, features - start)
        rows[torch.arange(number), start + torch.randint(width, (number,), generator=rng)] = 1
    return rows


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(
    "net",
    [normalized_outputs(), normalized_outputs(drop=0.3), normalized_outputs(activation=nn.Tanh, bias=False)],
    ids=["plain", "dropout", "tanh, no bias"],
)
def test_two_rows_are_solved_by_the_statistics_of_outputs(net: nn.Module, optimizer: Optimizer) -> None:
    found = reconstruct(seen_of(copy.deepcopy(net), drawn(2, 30), optimizer=optimizer, lr=0.001), "auto")
    assert found.certainty is Certainty.CONSISTENT and found.member == "exact"
    assert worst_of(found, drawn(2, 30)) < 1e-3


@pytest.mark.parametrize(("size", "hidden", "drop"), [(3, 64, 0.0), (4, 64, 0.3), (8, 128, 0.0), (16, 256, 0.3)])
def test_more_rows_are_solved_by_zeros_of_a_relu_behind_the_norm(size: int, hidden: int, drop: float) -> None:
    rows = coded(size, 41)
    found = reconstruct(seen_of(normalized_outputs(41, hidden, drop=drop), rows), "exact")
    assert found.certainty is Certainty.CONSISTENT and worst_of(found, rows) < 2e-3


def test_equal_rows_are_counted_by_their_rotation() -> None:
    rows = coded(3, 30)[[0, 1, 2, 2]]
    net = normalized_outputs().double()
    found = reconstruct(seen_of(net, rows.double()), "exact")
    assert worst_of(found, rows) < 1e-3 and found.batch is not None
    assert sorted((torch.cdist(found.batch.inputs.double(), rows.double()) < 1e-2).sum(1).tolist()) == [1, 1, 2, 2]


def test_ranges_complete_a_mean_that_few_outputs_leave_open() -> None:
    rows = coded(4, 78)
    assert worst_of(reconstruct(seen_of(normalized_outputs(78, 64), rows), "exact"), rows) < 1e-2


def test_a_shift_that_no_output_shows_is_not_taken_for_a_solution() -> None:
    found = reconstruct(seen_of(normalized_outputs(78, 64), drawn(2, 78)), "exact")
    assert found.certainty is Certainty.APPROXIMATE and found.batch is not None
    differences = [rows.diff(dim=0).abs() for rows in (found.batch.inputs, drawn(2, 78))]
    assert float((differences[0] - differences[1]).abs().max()) < 0.05 < worst_of(found, drawn(2, 78))
    assert any("shift" in note for note in found.notes)


def test_inputs_without_weights_are_not_taken_for_solved() -> None:
    net = normalized_outputs()
    next(net.parameters()).data[:, 7] = 0
    found = reconstruct(seen_of(net, drawn(2, 30)), "exact")
    assert found.certainty is Certainty.APPROXIMATE


@pytest.mark.parametrize("scale", [1e-2, 1e-1])
def test_statistics_with_noise_are_no_solution(scale: float) -> None:
    seen, rng = seen_of(normalized_outputs(), drawn(2, 30)), torch.Generator().manual_seed(0)
    noisy = {
        name: value + scale * torch.randn(value.shape, generator=rng) * value.is_floating_point()
        for name, value in seen.upload.buffers.items()
    }
    found = reconstruct(replace(seen, upload=replace(seen.upload, buffers=noisy)), "exact")
    assert found.certainty is Certainty.APPROXIMATE


def test_noise_on_gradients_alone_hides_no_pair() -> None:
    rows, rng = drawn(2, 30), torch.Generator().manual_seed(0)
    seen = seen_of(normalized_outputs(drop=0.3), rows)
    update = seen.update()
    noisy = {
        name: value + 3 * update[name].std() * torch.randn(value.shape, generator=rng)
        for name, value in seen.upload.tensors.items()
    }
    found = reconstruct(replace(seen, upload=replace(seen.upload, tensors=noisy)), "exact")
    assert found.certainty is Certainty.CONSISTENT and worst_of(found, rows) < 1e-3


def test_statistics_of_another_batch_are_no_solution() -> None:
    seen, other = (seen_of(normalized_outputs(), rows) for rows in (drawn(4, 30), drawn(5, 30)[1:]))
    found = reconstruct(replace(seen, upload=replace(seen.upload, buffers=other.upload.buffers)), "exact")
    assert found.certainty is Certainty.APPROXIMATE


class _Noisy(nn.Module):
    """Adds noise to its inputs in training."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 0.05 * torch.randn_like(inputs) if self.training else inputs


@pytest.mark.parametrize("front", [nn.Dropout(0.2), _Noisy()], ids=["dropout", "noise"])
@pytest.mark.parametrize("size", [2, 4])
def test_inputs_that_are_changed_at_random_before_the_layer_are_not_certified(front: nn.Module, size: int) -> None:
    seen = seen_of(nn.Sequential(front, *normalized_outputs().children()), drawn(size, 30))
    assert reconstruct(seen, "exact").certainty is Certainty.APPROXIMATE


@pytest.mark.parametrize("size", [2, 4])
def test_a_mean_without_redundant_outputs_is_certified_only_in_range(size: int) -> None:
    """The rest of the network does not see a wrong mean, as of a pruned buffer."""
    rows = drawn(size, 30)
    seen = seen_of(normalized_outputs(30, 30), rows)
    found = reconstruct(seen, "exact")
    assert found.certainty is Certainty.CONSISTENT and worst_of(found, rows) < 1e-2
    pruned = {**seen.upload.buffers, "1.running_mean": torch.zeros(30)}
    found = reconstruct(replace(seen, upload=replace(seen.upload, buffers=pruned)), "exact")
    assert found.certainty is Certainty.APPROXIMATE


@pytest.mark.parametrize("rows", [drawn(2, 78) * 3 - 1, coded(4, 78) * 2 - 0.5], ids=["numbers", "categories"])
def test_ranges_that_are_left_complete_no_mean(rows: Tensor) -> None:
    found = reconstruct(seen_of(normalized_outputs(78, 64), rows), "exact")
    assert worst_of(found, rows) > 0.05 and found.certainty is Certainty.APPROXIMATE


def test_a_large_epsilon_hides_no_wrong_mean() -> None:
    net = normalized_outputs()
    net.get_submodule("1").eps = 100.0  # type: ignore[assignment]
    seen = seen_of(net, drawn(2, 30))
    moved = {**seen.upload.buffers, "1.running_mean": seen.upload.buffers["1.running_mean"] + 0.02}
    found = reconstruct(replace(seen, upload=replace(seen.upload, buffers=moved)), "exact")
    assert found.certainty is Certainty.APPROXIMATE


@pytest.mark.parametrize(("order", "sure"), [([0, 1, 2], True), ([0, 0, 1, 2, 2, 2], False)])
def test_two_rows_are_completed_if_they_occur_once(order: list[int], sure: bool) -> None:
    rows = coded(3, 30)[order].double()
    seen = seen_of(normalized_outputs().double(), rows)
    layer = find_normalized_outputs(seen)
    assert layer is not None
    known, rng = centered(seen, layer), torch.Generator().manual_seed(0)
    assert known is not None
    searched = orthogonal_factors(known.joined, known.values, len(order), rng=rng, starts=64)
    whole = next(found for found, missing in searched if not missing)
    times = len(order) * (whole[:, -1] / whole.norm(dim=1)).square()
    one = (times - (1 if sure else 2)).abs().argmin()
    completed, missing = spear._orthogonal(whole[one][None], known.joined, known.values, len(order))
    found = known.inputs(completed, missing)
    assert missing == 2 and found is not None and found[1] == sure
    assert (float(torch.cdist(found[0], rows).amin(1).max()) < 1e-2) == sure


@pytest.mark.parametrize("wrong", [lambda v: v[:3], lambda v: v[None], lambda v: v.sum(), lambda v: v * torch.nan])
@pytest.mark.parametrize("net", [rows(), normalized_outputs(14)], ids=["before", "behind"])
def test_malformed_statistics_break_nothing_off(wrong: Callable[[Tensor], Tensor], net: nn.Module) -> None:
    seen = seen_of(copy.deepcopy(net), drawn(4, 14))
    bad = {name: wrong(value) if value.dim() else value for name, value in seen.upload.buffers.items()}
    found = reconstruct(replace(seen, upload=replace(seen.upload, buffers=bad)), "exact", rounds=1)
    assert found.certainty is Certainty.APPROXIMATE and "error of its own" not in (found.failure or "")


def test_a_norm_behind_an_activation_is_not_taken_for_that_of_outputs() -> None:
    net = nn.Sequential(nn.Linear(30, 64), nn.ReLU(inplace=True), nn.BatchNorm1d(64), nn.Linear(64, 2))
    assert find_normalized_outputs(seen_of(net, drawn(2, 30))) is None


def test_without_uploaded_statistics_nothing_is_solved() -> None:
    seen = seen_of(normalized_outputs(), drawn(2, 30))
    found = reconstruct(replace(seen, upload=replace(seen.upload, buffers={})), "exact", rounds=1)
    assert found.batch is None or worst_of(found, drawn(2, 30)) > 0.05


def test_victims_of_one_group_have_statistics_of_their_own() -> None:
    """Norms in front of the first layer, and behind it, differ from one client to the next."""
    examples = [drawn(2, 14), drawn(4, 14)[2:]]
    for net in (rows(), normalized_outputs(14, 32)):
        first, second = (step(copy.deepcopy(net), own) for own in examples)
        found = ExactInversion()([first, replace(second, model=first.model, sent=first.sent)], seed=0)
        assert max(worst_of(one, own) for one, own in zip(found, examples, strict=True)) < 1e-3
