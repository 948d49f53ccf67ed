import re

import pytest

from fl_privacy.config import build_federation, compose
from fl_privacy.defenses.accounting import epsilon
from fl_privacy.pipeline.privacy import privacy_statement


def statement(*overrides):
    config = compose(["federation.clients=4", "federation.rounds=6", *overrides])
    return privacy_statement(build_federation(config), delta=1e-5, accountant="rdp")


def epsilons(text):
    total = re.match(r"\((\S+), 1e-05\)", text)
    first = re.search(r"After one round epsilon is (\S+)\.", text)
    return float(total[1]), float(first[1]) if first else None


@pytest.mark.parametrize("defense", ["none", "pruning", "dp_noise"])
def test_without_clipped_noise_no_guarantee_is_claimed(defense):
    assert statement(f"defense={defense}").startswith("No differential privacy guarantee")


def test_dp_sgd_counts_the_batches_of_every_round():
    text = statement("defense=dp_sgd", "federation.plan.batch_size=250")
    options = {"noise_multiplier": 1.0, "sample_rate": 0.25, "delta": 1e-5}
    expected = (epsilon(**options, steps=6), epsilon(**options, steps=1))
    assert epsilons(text) == pytest.approx(expected, rel=1e-3)
    assert "one example" in text
    assert "without replacement" in text


def test_local_epochs_are_several_releases():
    text = statement("defense=dp_sgd", "federation=fedavg", "federation.plan.batch_size=250")
    expected = epsilon(noise_multiplier=1.0, sample_rate=0.25, delta=1e-5, steps=24)
    assert epsilons(text)[0] == pytest.approx(expected, rel=1e-3)


def test_clients_in_turn_take_part_less_often():
    text = statement("defense=local_dp", "federation=round_robin")
    assert "one client" in text
    assert "after 2 rounds" in text
    assert epsilons(text)[1] <= 1


def test_the_worst_client_counts():
    options = ("defense=dp_sgd", "federation.plan.batch_size=32")
    assert epsilons(statement(*options, "partition=dirichlet"))[0] > epsilons(statement(*options))[0]


def test_shared_running_statistics_void_the_guarantee():
    resnet = ("defense=local_dp", "model=resnet10", "model.width=8")
    assert "statistics" in statement(*resnet)
    assert "one client" in statement(*resnet, "federation.plan.buffers=withheld")
