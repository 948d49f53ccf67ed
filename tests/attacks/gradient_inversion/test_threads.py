"""Attacks on small layers take one CPU thread, whatever was set, and leave the setting as it was."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_privacy.attacks import AutoAttack, ModelInversion, inverting_gradients
from fl_privacy.attacks.gradient_inversion.execution import WORTHWHILE, fitting_threads, multiplications_of_a_layer
from fl_privacy.models import Front
from fl_privacy.rng import cpu_threads
from tests.attacks.victims import examples, observations, smooth_net


@pytest.mark.parametrize(("multiplications", "threads"), [(WORTHWHILE - 1, 1), (WORTHWHILE, 2)])
def test_one_thread_for_small_layers_and_as_many_as_were_set_for_large_ones(multiplications, threads):
    with cpu_threads(2):
        with fitting_threads(multiplications):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2


def test_multiplications_are_those_of_convolutions_and_matrices():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
    convolution, matrix = 2 * 4 * 9 * 36, 4 * 36 * 5
    assert multiplications_of_a_layer(model, torch.rand(4, 3, 2, 8, 8)) == 12 * (convolution + matrix) // 2


@pytest.mark.long
@pytest.mark.parametrize("attack", [inverting_gradients(iterations=4), AutoAttack(evaluations=60)])
def test_results_are_the_same_with_more_threads(attack):
    seen, found, used = observations(smooth_net(), 2), [], set()
    for threads in (1, 2):
        with cpu_threads(threads):
            found.append(attack(seen, seed=0, progress=lambda done, total: used.add(torch.get_num_threads())))
            assert torch.get_num_threads() == threads
    assert 1 in used
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.batch.inputs, other.batch.inputs)
        assert one.loss == other.loss


def test_private_layers_are_inverted_with_one_thread_where_they_are_small():
    (seen,), used = observations(smooth_net(), 1), set()
    features = Front(seen.model, "2")(examples(1).inputs).detach()
    told = replace(seen, knowledge=replace(seen.knowledge, features=features, features_at="2"))
    with cpu_threads(2):
        attack = ModelInversion(iterations=2)
        (found,) = attack(
            [told], seed=0, progress=lambda done, total: used.add((done < total, torch.get_num_threads()))
        )
        assert torch.get_num_threads() == 2
    assert found.failure is None
    assert {threads for busy, threads in used if busy} == {1}
