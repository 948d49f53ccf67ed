"""Rows are found behind noise and one bit, by the likelihood of the update alone."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_privacy.attacks.auto import AutoAttack
from fl_privacy.attacks.gradient_inversion.labels import output_layer
from fl_privacy.attacks.likelihood.rows import MEMBER, LikeliestRows, learn_rows
from fl_privacy.data import TableExamples
from fl_privacy.defenses import ClientState, Defense, dp_noise, quantization
from fl_privacy.types import Observation
from tests.tables.tables import dataset, observe
from tests.tables.test_attacks import share_right

BIT, NOISE = quantization(bits=1), dp_noise(scale=0.02, clip_norm=1.0)


def behind(defense: Defense, size: int, seed: int) -> tuple[Observation, TableExamples]:
    """Defend an update of rows, and give the attacker the defense and the rows of others."""
    observation, rows = observe(size, seed, known=False)
    train = dataset().train
    assert isinstance(train, TableExamples)
    others = [k for k in range(len(train)) if not bool((train.inputs[k] == rows.inputs).all(1).any())]
    public = train.subset(torch.tensor(others)).batch(torch.arange(len(others)))
    tensors, rng = observation.upload.tensors, torch.Generator().manual_seed(seed)
    for on_upload in defense.upload:
        tensors = on_upload(tensors, ClientState(), rng)
    observation = replace(observation, upload=replace(observation.upload, tensors=tensors))
    known = observation.given(defense=defense.parts, public_images=public.inputs, public_labels=public.labels)
    return known, rows


@pytest.mark.long
@pytest.mark.parametrize("defense", [pytest.param(BIT, marks=pytest.mark.fuzz), NOISE])
def test_rows_are_found_and_those_of_another_update_are_not(defense: Defense) -> None:
    seen = [behind(defense, 1, seed) for seed in range(4)]
    found = LikeliestRows(evaluations=1500)([observation for observation, _ in seen], seed=0)
    batches = [one.batch for one in found if one.batch is not None]
    own = [share_right(batch.inputs, rows.inputs) for batch, (_, rows) in zip(batches, seen, strict=True)]
    control = [share_right(b.inputs, rows.inputs) for b, (_, rows) in zip(batches[1:] + batches[:1], seen, strict=True)]
    assert sum(own) / 4 >= 0.9 > 0.2 + sum(control) / 4


def test_auto_searches_behind_a_defense_and_undefended_rows_as_before() -> None:
    (defended, rows), (plain, _) = behind(BIT, 1, 0), observe(1, known=False)
    found, solved = (AutoAttack(evaluations=150)([one], seed=0)[0] for one in (defended, plain))
    assert found.batch is not None and found.cells_certain is not None
    assert found.member == MEMBER and found.cells_certain.shape == (1, 5) and solved.member == "exact"
    assert share_right(found.batch.inputs, rows.inputs) >= 0.8
    again = AutoAttack(evaluations=150)([defended], seed=0)[0].batch
    assert again is not None and torch.equal(again.inputs, found.batch.inputs)


@pytest.mark.parametrize("defended", [pytest.param(True, marks=pytest.mark.long), False])
def test_rows_are_found_without_the_output_layer(defended: bool) -> None:
    """A client may keep its own output layer, from which labels are inferred otherwise."""
    seen, rows = behind(BIT, 1, 0) if defended else observe(1, known=False)
    names = output_layer(seen.model, seen.num_classes)
    assert names is not None
    kept = {name: value for name, value in seen.upload.tensors.items() if name not in names}
    (found,) = AutoAttack(evaluations=60)([replace(seen, upload=replace(seen.upload, tensors=kept))], seed=0)
    assert found.batch is not None and share_right(found.batch.inputs, rows.inputs) >= 0.8


def test_the_prior_gives_each_interval_and_category_its_share() -> None:
    train = dataset().train
    prior = learn_rows(train.schema, train.inputs, torch.as_tensor(train.labels))
    own = prior.surprise(train.inputs, torch.as_tensor(train.labels))
    mixed = train.inputs.clone()
    mixed[:, : train.schema.starts[2]] = mixed[:, : train.schema.starts[2]].flip(0)
    assert float(own.mean()) < float(prior.surprise(mixed, torch.as_tensor(train.labels)).mean())


@pytest.mark.parametrize(("defense", "size"), [(BIT, 2), (NOISE, 1)])
def test_the_bound_samples_the_posterior_of_the_attack(
    defense: Defense, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "experiments"))
    row_bound = importlib.import_module("row_bound")
    seen, rows = behind(defense, size, 0)
    with torch.no_grad():
        search = row_bound.search_of(seen, 0.03)
        uploads = row_bound.Uploads(seen, noise=0.02 if defense is NOISE else None, doubt=0.03)
        inputs, labels = rows.inputs[None].repeat(4, 1, 1), rows.labels[None].long().repeat(4, 1)
        chains = row_bound.Chains(row_bound.Values(search), uploads, inputs, labels, 0)
        chains.temperature = 50.0 if defense is NOISE else 1.0  # one bit's law is rounded off where it is unlikely
        chains.sweep()
        chains.temperature = 1.0
        apart = chains.energies(chains.rows, chains.labels) - search.of_whole(chains.rows, chains.labels)
        assert not torch.equal(chains.rows[0], inputs[0]) and float(apart.max() - apart.min()) < 0.2
    found = search.moves.prior.schema.cells(rows.inputs)
    ordered, shares = row_bound.assigned(search.moves.prior.schema, found, found.flip(0)[None])
    assert torch.equal(ordered[0], found) and float(shares) == 1
    assert torch.equal(row_bound.best_answer(search.moves.prior.schema, ordered.repeat(3, 1, 1)), found)
