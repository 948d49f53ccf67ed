import re

import pytest

from fl_privacy.defenses.privacy import epsilon
from fl_privacy.errors import UserError
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.privacy import calibrated, privacy_of
from fl_privacy.runs.setup import build_setup


def configured(*overrides):
    return compose_run(["federation.clients=4", "federation.rounds=6", *overrides])


def privacy(*overrides, accountant="rdp"):
    return privacy_of(build_setup(configured(*overrides)), delta=1e-5, accountant=accountant)


def statement(*overrides):
    return privacy(*overrides).statement


def epsilons(text):
    total = re.match(r"\((\S+), 1e-05\)", text)
    first = re.search(r"After one round epsilon is (\S+)\.", text)
    return float(total[1]), float(first[1]) if first else None


@pytest.mark.parametrize("defense", ["none", "pruning", "dp_noise"])
def test_without_clipped_noise_no_guarantee_is_claimed(defense):
    assert statement(f"defense={defense}").startswith("No differential privacy guarantee")


def test_a_defense_that_names_no_part_goes_by_the_name_of_what_made_it():
    own = ("defense=custom", "defense._target_=tests.experiment.strangers.halved")
    assert "none is known of halved, whose noise" in statement(*own)


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


def test_every_round_has_the_epsilon_spent_so_far():
    options = ("defense=dp_sgd", "federation.plan.batch_size=32", "partition=dirichlet")
    found = privacy(*options)
    clients = build_setup(configured(*options)).clients.values()
    rate = 32 / min(len(client.indices) for client in clients)
    expected = [epsilon(noise_multiplier=1.0, sample_rate=rate, delta=1e-5, steps=k) for k in range(1, 7)]
    assert found.epsilons == pytest.approx(expected, rel=1e-6)
    assert found.epsilon(6) == found.epsilons[-1]


def test_a_client_that_waits_for_its_turn_spends_nothing_more():
    epsilons = privacy("defense=local_dp", "federation=round_robin").epsilons
    assert len(set(epsilons[:4])) == len(set(epsilons[4:])) == 1
    assert epsilons[3] < epsilons[4]


def test_without_guarantee_there_is_a_reason_and_no_epsilon():
    found = privacy("defense=dp_noise")
    assert found.epsilons is None and found.epsilon(3) is None
    assert "clipped" in found.missing


@pytest.mark.long
@pytest.mark.parametrize(
    "defense",
    [
        ("defense=dp_sgd", "federation.plan.batch_size=250"),
        pytest.param(("defense=dp_sgd", "federation=fedavg", "partition=dirichlet"), marks=pytest.mark.fuzz),
        ("defense=dp_noise", "defense.clip_norm=0.5"),
        ("defense=dp_noise", "defense.clip_norm=0.5", "defense.clip_scope=layer"),
    ],
)
def test_noise_for_a_budget_spends_it(defense):
    config = calibrated(configured(*defense, "privacy.epsilon=3"))
    found = privacy_of(build_setup(config), delta=1e-5, accountant="rdp")
    assert 2.99 < found.epsilons[-1] <= 3
    assert calibrated(config) is config


def test_an_undefended_run_stays_so_and_other_defenses_have_no_budget():
    plain = calibrated(configured("privacy.epsilon=3"))
    assert plain == configured()
    for defense in ("pruning", "local_dp", "dp_noise"):
        with pytest.raises(UserError, match=r"guarantee|dp_sgd"):
            calibrated(configured(f"defense={defense}", "privacy.epsilon=3"))
