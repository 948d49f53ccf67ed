"""What is read of rows: exactly where that is possible, else by descents."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy.attacks import (
    AnalyticInversion,
    AutoAttack,
    CocktailParty,
    Dager,
    ExactInversion,
    ReconstructionAttack,
    inverting_gradients,
    model_inversion,
    reconstruct,
    tableak,
)
from fl_privacy.attacks.exact.certificate import model_as_sent
from fl_privacy.attacks.gradient_inversion.labels import choose_labels
from fl_privacy.attacks.gradient_inversion.other_modalities import TableRows, evidence_of, pool
from fl_privacy.measure.tables import assign, right_cells
from fl_privacy.models import FlTabular, TableLogistic, TableResNet
from fl_privacy.types import Certainty, Observation
from fl_privacy.types.schema import Schema
from tests.tables.tables import dataset, observe


def share_right(rows: torch.Tensor, truth: torch.Tensor) -> float:
    schema = dataset().train.schema
    guess, cells = schema.cells(rows), schema.cells(truth)
    return float(right_cells(schema, guess[assign(schema, guess, cells)], cells).double().mean())


@pytest.mark.parametrize("attack", [AnalyticInversion(), ExactInversion(), AutoAttack(budget="quick")])
def test_one_row_is_read_as_it_is_and_not_cut_to_pixels(attack: AutoAttack) -> None:
    observation, rows = observe(1, known=False)
    assert float(rows.inputs.min()) < -0.01 or float(rows.inputs.max()) > 1.01
    (found,) = attack([observation], seed=0)
    assert found.batch is not None and not found.notes
    torch.testing.assert_close(found.batch.inputs, rows.inputs, atol=1e-3, rtol=1e-3)
    assert int(found.batch.labels) == int(rows.labels)


def test_a_batch_behind_a_relu_is_proven() -> None:
    for seed in range(5):
        observation, rows = observe(4, seed, known=False)
        (found,) = ExactInversion()([observation], seed=0)
        assert found.batch is not None
        if found.certainty is Certainty.PROVEN:
            assert share_right(found.batch.inputs, rows.inputs) == 1
    assert found.certainty is Certainty.PROVEN


@pytest.mark.parametrize("network", [TableLogistic, FlTabular, TableResNet])
def test_one_row_behind_other_networks(network: type) -> None:
    observation, rows = observe(1, known=False, network=network)
    (found,) = ExactInversion()([observation], seed=0)
    assert found.batch is not None and int(found.batch.labels) == int(rows.labels)
    assert share_right(found.batch.inputs, rows.inputs) == 1


def test_labels_are_counted_behind_a_sigmoid() -> None:
    for seed in range(5):
        observation, rows = observe(6, seed, known=False, network=FlTabular)
        model = model_as_sent(observation).float()
        labels, source = choose_labels(observation, "auto", model, loss_scale=1.0, seed=0)
        assert labels is not None and source == "inferred"
        assert abs(int(labels.sum()) - int(rows.labels.sum())) <= 1


def test_several_rows_behind_a_linear_model_are_never_proven() -> None:
    for seed in range(5):
        observation, _ = observe(3, seed, network=TableLogistic)
        (found,) = AutoAttack(evaluations=60)([observation], seed=0)
        assert found.certainty is not Certainty.PROVEN


def test_the_first_layer_shows_which_categories_no_row_has() -> None:
    schema = dataset().train.schema
    categories = torch.ones(schema.width, dtype=torch.bool)
    categories[schema.number_values] = False
    for size in (1, 3, 8):
        for seed in range(10):
            observation, rows = observe(size, seed)
            counts = tuple(rows.labels.bincount(minlength=2).tolist())
            found = evidence_of(observation, schema, counts)
            assert found is not None
            there = (schema.raw(rows.inputs) > 0.5).any(0)
            assert torch.equal(found.present[categories], there[categories])


def test_noise_leaves_no_category_out() -> None:
    observation, _ = observe(3)
    noisy = {name: t + 1e-3 * torch.randn_like(t) for name, t in observation.upload.tensors.items()}
    seen = replace(observation, upload=replace(observation.upload, tensors=noisy))
    found = evidence_of(seen, dataset().train.schema, (1, 2))
    assert found is not None and bool(found.present.all())


def test_free_variables_are_always_rows() -> None:
    schema = dataset().train.schema
    source = TableRows(schema=schema)
    free = 50 * torch.randn(2, 3, schema.width, generator=torch.Generator().manual_seed(0))
    held = torch.ones(2, schema.width)
    held[:, schema.starts[2]] = 0
    rows = schema.raw(source.rows(free, held))
    places, there = schema.groups
    sums = torch.where(there, rows[..., places], 0.0).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert float(rows[..., schema.starts[2]].abs().max()) == 0
    numbers = rows[..., schema.number_values]
    low, high = ([getattr(c, end) for c in schema.columns if c.is_number] for end in ("low", "high"))
    assert bool((numbers >= torch.tensor(low) - 1e-3).all() and (numbers <= torch.tensor(high) + 1e-3).all())


def test_attempts_in_other_orders_are_pooled_into_one() -> None:
    data = dataset().train
    truth, schema = data.inputs[:6], data.schema
    rng = torch.Generator().manual_seed(0)
    attempts = torch.stack([truth[torch.randperm(6, generator=rng)] for _ in range(5)])
    attempts = attempts + 0.05 * torch.randn(attempts.shape, generator=rng)
    found = pool(schema, attempts, torch.arange(5.0))
    assert share_right(found.rows, truth) == 1
    assert float(found.certainty.min()) > 0.5


@pytest.mark.long
def test_tableak_reads_more_than_the_usual_row_and_is_the_same_again() -> None:
    observations = [observe(4, seed) for seed in range(2)]
    attack = tableak(iterations=80, restarts=3)
    found = attack([o for o, _ in observations], seed=0)
    for one, (_, rows) in zip(found, observations, strict=True):
        assert one.batch is not None and one.cells_certain is not None
        assert share_right(one.batch.inputs, rows.inputs) > 0.8
        assert one.cells_certain.shape == (4, 5)
    again = attack([o for o, _ in observations], seed=0)
    assert all(torch.equal(a.batch.inputs, b.batch.inputs) for a, b in zip(found, again, strict=True))  # type: ignore[union-attr]


def test_what_never_saw_the_update_reads_less() -> None:
    """The same attack on the update of other rows is the control."""
    (own, rows), (other, _) = observe(2, 0), observe(2, 1)
    attack = tableak(iterations=60, restarts=2)
    seen, unseen = (attack([o], seed=0)[0].batch for o in (own, other))
    assert seen is not None and unseen is not None
    assert share_right(seen.inputs, rows.inputs) > share_right(unseen.inputs, rows.inputs) + 0.2


def test_gradients_of_a_network_of_ones_own() -> None:
    rows = dataset().train.inputs[:3]
    schema = Schema.inferred(dataset().train.inputs)
    torch.manual_seed(0)
    hidden = nn.Linear(rows.shape[1], 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()
    net = nn.Sequential(*hidden, nn.Linear(32, 2))
    loss = nn.functional.cross_entropy(net(rows), torch.tensor([0, 1, 1]))
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    seen = Observation.of_gradients(net, gradients, input_shape=rows.shape[1:], batch_size=3, schema=schema)
    found = reconstruct(seen, "exact")
    assert found.batch is not None and found.certainty is Certainty.PROVEN and not hasattr(net, "schema")
    assert share_right(found.batch.inputs, rows) == 1


@pytest.mark.parametrize("attack", [CocktailParty(), model_inversion(iterations=1), Dager()])
def test_attacks_that_are_of_images_or_texts_alone_say_so(attack: ReconstructionAttack) -> None:
    (found,) = attack([observe(2)[0]], seed=0)
    assert found.failure is not None and "expected" in found.failure and "error of its own" not in found.failure


def test_an_attack_of_images_seeks_rows_as_well() -> None:
    observation, rows = observe(1)
    (found,) = inverting_gradients(iterations=60, total_variation=0.1)([observation], seed=0)
    assert found.batch is not None and found.batch.inputs.shape == rows.inputs.shape
    torch.testing.assert_close(
        dataset().train.schema.nearest(found.batch.inputs), found.batch.inputs, atol=1e-4, rtol=0
    )
