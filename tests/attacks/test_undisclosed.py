"""What nobody says of a client: batch size, loss, mode, scale, wrappers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fl_privacy import Observation, reconstruct
from fl_privacy.attacks.gradient_inversion.infer_client import ONE_OUTPUT, SOFT_LABELS, WHOLE_LABELS, disclosed
from fl_privacy.defenses import ClientState, pruning
from fl_privacy.errors import UserError
from fl_privacy.models.losses import CROSS_ENTROPY
from fl_privacy.types import Certainty
from fl_privacy.types.user_gradients import computed_in

SHAPE = (1, 4, 4)
BITS = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]])


def connected(classes: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, classes))


def images(count: int) -> torch.Tensor:
    return torch.rand((count, *SHAPE), generator=torch.Generator().manual_seed(1))


def observed(net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, of=F.cross_entropy, **told) -> Observation:
    gradients = torch.autograd.grad(of(net(inputs), labels), list(net.parameters()))
    return Observation.of_gradients(net, gradients, input_shape=SHAPE, **told)


def test_examples_are_counted() -> None:
    seen = observed(connected(), images(3), torch.tensor([0, 1, 1]))
    assert seen.upload.num_examples == 3 and "3 examples" in seen.notes[0]


def test_a_batch_size_that_nothing_tells_is_asked_for() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(UserError, match="batch_size is expected"):
        observed(net, images(4), torch.tensor([0, 1, 1, 0]))


def test_a_stated_batch_size_wins_over_the_rank_with_a_note() -> None:
    seen = observed(connected(), images(3), torch.tensor([0, 1, 1]), batch_size=1)
    assert seen.upload.num_examples == 1 and "has rank 3, more than batch_size=1" in seen.notes[0]


def pruned_gradients(net: nn.Module, rate: float) -> dict[str, torch.Tensor]:
    gradients = torch.autograd.grad(F.cross_entropy(net(images(1)), torch.tensor([1])), list(net.parameters()))
    named = dict(zip(dict(net.named_parameters()), gradients, strict=True))
    return pruning(rate=rate).upload[0](named, ClientState(), torch.Generator())  # type: ignore[return-value]


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.9])
def test_zeros_of_a_defense_are_no_further_examples(rate: float) -> None:
    """Half of the bias or of a row at zero raises the rank; of one image it is not that of two or of fourteen."""
    net = connected()
    pruned = pruned_gradients(net, rate)
    with pytest.raises(UserError, match="batch_size is expected"):
        Observation.of_gradients(net, pruned, input_shape=SHAPE)
    assert Observation.of_gradients(net, pruned, input_shape=SHAPE, batch_size=1).upload.num_examples == 1


def test_small_values_dropped_from_an_early_layer_alone_are_no_further_examples() -> None:
    net = connected()
    gradients = list(torch.autograd.grad(F.cross_entropy(net(images(1)), torch.tensor([1])), list(net.parameters())))
    gradients[0] = gradients[0] * (gradients[0].abs() > gradients[0].abs().quantile(0.7))
    assert Observation.of_gradients(net, gradients, input_shape=SHAPE).upload.num_examples == 1


@pytest.mark.parametrize("told", [{}, {"loss": "bce"}, {"loss": nn.BCEWithLogitsLoss()}])
def test_answers_of_yes_and_no_are_read(told: dict) -> None:
    seen = observed(connected(), images(1), BITS, F.binary_cross_entropy_with_logits, **told)
    found = reconstruct(seen, "exact")
    assert found.certainty is Certainty.PROVEN and torch.allclose(found.batch.labels.float(), BITS, atol=1e-3)
    assert told or "binary cross entropy" in found.notes[0]


def test_smoothed_labels_are_noticed() -> None:
    seen = observed(connected(), images(1), torch.tensor([2]), nn.CrossEntropyLoss(label_smoothing=0.1))
    assert "smoothed by 0.1" in reconstruct(seen, "exact").notes[0]


SMOOTHED = nn.CrossEntropyLoss(label_smoothing=0.2)


def trained(labels: torch.Tensor) -> nn.Module:
    """Sure of the labels of its images."""
    net = connected(10)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(images(len(labels))), labels).backward()
        optimizer.step()
    return net


def test_of_a_batch_it_is_said_that_labels_are_taken_for_whole_ones() -> None:
    labels = torch.tensor([0, 2, 2])
    plain = disclosed([observed(connected(10), images(3), labels)])[0]
    assert plain.observation.notes[-1] == WHOLE_LABELS and plain.observation.loss is CROSS_ENTROPY
    one = disclosed([observed(connected(), images(1), labels[:1])])[0]
    assert WHOLE_LABELS not in one.observation.notes
    told = disclosed([observed(connected(10), images(3), labels, loss="cross_entropy")])[0]
    assert WHOLE_LABELS not in told.observation.notes


def test_smoothed_labels_of_a_batch_are_noticed_where_more_classes_are_asked_for_than_there_are_examples() -> None:
    labels = torch.tensor([0, 2, 2])
    soft = disclosed([observed(trained(labels), images(3), labels, SMOOTHED)])[0]
    assert soft.observation.notes[-1] == SOFT_LABELS
    plain = disclosed([observed(trained(labels), images(3), labels)])[0]
    assert plain.observation.notes[-1] == WHOLE_LABELS


def test_smoothed_labels_of_a_batch_are_solved_for_where_its_images_are() -> None:
    labels = torch.tensor([0, 2, 7])
    found = reconstruct(observed(connected(10), images(3), labels, SMOOTHED), "auto")
    read = found.batch.labels
    assert WHOLE_LABELS not in found.notes, "what was read reproduces the update"
    assert found.certainty is Certainty.PROVEN and read.shape == (3, 10)
    assert sorted(read.argmax(1).tolist()) == labels.tolist()
    assert torch.allclose(read.max(1).values, torch.tensor(0.82, dtype=read.dtype), atol=1e-3)


@pytest.mark.parametrize("of", [F.mse_loss, F.binary_cross_entropy_with_logits])
def test_another_loss_of_a_batch_is_asked_for(of) -> None:
    rows = F.one_hot(torch.tensor([0, 2, 7]), 10).float()
    found = reconstruct(observed(connected(10), images(3), rows, of), "auto")
    assert found.batch is None and "give loss=" in found.failure


def test_slopes_as_small_as_their_rounding_deny_no_cross_entropy() -> None:
    net, inputs = connected(), images(2)
    with torch.no_grad():
        net[-1].weight.mul_(0.1)
        net[-1].bias.copy_(torch.tensor([16.6, 0.0, 0.1, 0.2, 0.3]))  # others are near the rounding of 1
    seen = observed(net, inputs, torch.zeros(2, dtype=torch.long))
    slopes = next(reversed(seen.upload.tensors.values()))
    assert 0 < float(slopes.abs().max()) < 1e-6 and float(slopes.sum().abs()) > 1e-4 * float(slopes.norm())
    assert disclosed([seen])[0].observation.loss is CROSS_ENTROPY


def test_numbers_are_no_known_loss_of_many_outputs_and_that_is_said() -> None:
    seen = observed(connected(), images(1), torch.tensor([[0.3, -2.0, 4.0, 1.0, 0.7]]), F.mse_loss)
    assert "give the client's loss=" in (reconstruct(seen, "idlg").failure or "")


def test_a_function_is_a_loss() -> None:
    def focal(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(outputs, labels, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    found = reconstruct(observed(connected(), images(1), torch.tensor([3]), focal, loss=focal), "exact")
    assert found.certainty is Certainty.PROVEN and found.batch.labels.tolist() == [3]


def test_unnormalized_class_weights_leave_the_labels() -> None:
    weights = torch.tensor([0.1, 2.0, 2.0, 2.0, 2.0])

    def weighted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (weights[labels] * F.cross_entropy(outputs, labels, reduction="none")).mean()

    seen = observed(connected(), images(4), torch.zeros(4, dtype=torch.long), weighted, loss=weighted, batch_size=4)
    found = reconstruct(seen, "idlg", iterations=1)
    assert found.batch.labels.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("attack", ["analytic", "exact", "auto"])
def test_standardized_inputs_are_not_cut(attack: str) -> None:
    inputs = 4 * images(1) - 2
    found = reconstruct(observed(connected(), inputs, torch.tensor([1])), attack)
    assert torch.allclose(found.batch.inputs, inputs, atol=1e-4) and "input_range" in found.notes[0]


def test_another_range_is_searched_in() -> None:
    inputs = 2 * images(1) - 1
    found = reconstruct(observed(connected(), inputs, torch.tensor([1]), input_range=(-1, 1)), "exact")
    assert torch.allclose(found.batch.inputs, inputs, atol=1e-4) and not found.notes


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = connected()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(F.dropout(inputs, 0.3, training=self.training))


def test_the_mode_is_the_models_and_draws_in_training_are_left_out() -> None:
    evaluated = observed(Dropping().eval(), images(1), torch.tensor([1]))
    assert evaluated.plan.mode == "eval"
    assert reconstruct(evaluated, "exact").certainty is Certainty.PROVEN
    (trained,) = disclosed([observed(Dropping().train(), images(1), torch.tensor([1]))])
    assert trained.observation.plan.mode == "eval" and "draws at random" in trained.observation.notes[0]


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = connected()

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.inner(inputs)}


def test_outputs_in_a_mapping_are_taken() -> None:
    def of_logits(made: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(made["logits"], labels)

    assert (
        reconstruct(observed(Mapped(), images(1), torch.tensor([1]), of_logits), "exact").certainty is Certainty.PROVEN
    )


def test_wrappers_are_taken_off() -> None:
    seen = observed(nn.DataParallel(connected()), images(1), torch.tensor([1]))
    assert reconstruct(seen, "exact").certainty is Certainty.PROVEN


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_a_norm_of_the_output_layers_weight_does_no_harm(norm) -> None:
    net = connected()
    net[3] = norm(net[3])
    found = reconstruct(observed(net, images(1), torch.tensor([1]), batch_size=1), "idlg", iterations=1)
    assert found.failure is None and found.batch.labels.tolist() == [1]


def test_tied_weights_are_taken_under_both_names() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))
    net[3].weight = net[1].weight
    F.cross_entropy(net(images(1)), torch.tensor([1])).backward()
    gradients = {name: p.grad for name, p in net.named_parameters(remove_duplicate=False)}
    seen = Observation.of_gradients(net, gradients, input_shape=SHAPE, batch_size=1)
    assert "3.weight" not in seen.upload.tensors and reconstruct(seen, "idlg", iterations=1).failure is None


def in_half_precision(net: nn.Module, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    with torch.autocast("cpu", dtype=dtype):
        loss = F.cross_entropy(net(images(count)), torch.arange(count))
    return list(torch.autograd.grad(loss, list(net.parameters())))


@pytest.mark.parametrize("factor", [1.0, 0.37, 1 / 3], ids=["plain", "clipped", "averaged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_no_other_loss(dtype: torch.dtype, factor: float) -> None:
    """Its gradients add up to zero but for its own rounding, which is stored in single precision."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 5))
    gradients = [factor * g for g in in_half_precision(net, 4, dtype)]
    seen = Observation.of_gradients(net, gradients, input_shape=SHAPE, batch_size=4)
    assert disclosed([seen])[0].wrong is None
    found = reconstruct(seen, "exact")
    apart = (found.batch.inputs[:, None] - images(4)[None]).abs().flatten(2).amax(2)
    assert bool((apart.amin(0) < 0.01).all())


@pytest.mark.parametrize("of", [F.binary_cross_entropy_with_logits, F.mse_loss])
def test_another_loss_in_mixed_precision_is_none_of_classes(of) -> None:
    net = connected()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = of(net(images(4)).float(), F.one_hot(torch.arange(4), 5).float())
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    seen = Observation.of_gradients(net, gradients, input_shape=SHAPE, batch_size=4)
    assert "A cross entropy is expected" in (disclosed([seen])[0].wrong or "")


def test_the_rank_of_rounded_values_is_none_of_examples() -> None:
    net = connected()
    seen = Observation.of_gradients(net, in_half_precision(net, 1, torch.bfloat16), input_shape=SHAPE, batch_size=1)
    assert seen.notes == ()


def test_values_show_in_which_type_they_were_computed() -> None:
    exact = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert computed_in(exact.to(kind).double()) is kind
    assert computed_in(exact.bfloat16().float() + exact.flip(0).bfloat16().float()) is torch.bfloat16


@pytest.mark.parametrize("kept", [0.02, 0.3])
def test_a_pruned_update_is_none_of_another_loss(kept: float) -> None:
    net, labels = connected(), torch.tensor([1])
    gradients = torch.autograd.grad(F.cross_entropy(net(images(1)), labels), list(net.parameters()))
    least = torch.cat([g.flatten() for g in gradients]).abs().quantile(1 - kept)
    pruned = [g * (g.abs() >= least) for g in gradients]
    seen = Observation.of_gradients(net, pruned, input_shape=SHAPE, batch_size=1)
    assert reconstruct(seen, "idlg", iterations=1).failure is None


def test_muted_features_are_no_other_loss() -> None:
    net, labels = connected(), torch.tensor([1])
    gradients = list(torch.autograd.grad(F.cross_entropy(net(images(1)), labels), list(net.parameters())))
    gradients[2] = gradients[2].clone()
    gradients[2][:, ::2] = 0
    seen = Observation.of_gradients(net, gradients, input_shape=SHAPE, batch_size=1)
    assert reconstruct(seen, "idlg", iterations=1).failure is None


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("of", [F.mse_loss, F.binary_cross_entropy_with_logits])
def test_a_network_of_one_output_needs_no_loss(of, count: int) -> None:
    """Numbers explain the slope of each example, whatever the loss is; a cross entropy has none."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    rows, targets = torch.rand(count, 6), torch.arange(float(count))[:, None] % 2
    gradients = torch.autograd.grad(of(net(rows), targets), list(net.parameters()))
    seen = Observation.of_gradients(net, gradients, input_shape=(6,), batch_size=count)
    loss = disclosed([seen])[0].observation.loss
    assert loss is not None and loss.targets != "classes"
    found = reconstruct(seen, "dlg", iterations=5)
    assert found.batch is not None, found.failure
    if count > 1:
        assert ONE_OUTPUT in found.notes


@pytest.mark.long
def test_rows_without_a_schema_end_in_a_line_and_no_error() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    gradients = torch.autograd.grad(F.mse_loss(net(torch.rand(4, 6)), 3 * torch.randn(4, 1)), list(net.parameters()))
    seen = Observation.of_gradients(net, gradients, input_shape=(6,), batch_size=4)
    found = reconstruct(seen, "auto", budget="quick")
    assert found.failure is None or "error of its own" not in found.failure
