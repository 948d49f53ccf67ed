from functools import partial

import pytest

from fl_privacy.defenses import ClientState
from fl_privacy.federation import Audit, Probe
from fl_privacy.federation.interception import Interceptor
from fl_privacy.runs.attack_stage import update_distortion
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.ground_truth import GroundTruth
from fl_privacy.runs.setup import build_setup
from fl_privacy.types import VictimId


def observations(federation, audit, batch_size=2):
    seen = []
    interceptor = Interceptor(
        model=federation.model,
        plan=federation.server.local_plan,
        input_shape=federation.dataset.train.input_shape,
        num_classes=federation.dataset.train.num_classes,
        sink=seen.append,
    )
    sent = federation.server.state
    for probe in audit.probes:
        client = federation.clients[probe.client]
        result = client.probe(sent, ClientState(), round=1, probe=probe.number, batch_size=batch_size)
        interceptor.capture(probe.in_round(1), sent=sent, upload=result.upload)
    for number in audit.clients:
        result = federation.clients[number].update(sent, ClientState(), round=1)
        interceptor.capture(VictimId(1, number), sent=sent, upload=result.upload)
    return seen


def measure_of(federation, batch_size=2):
    return partial(update_distortion, GroundTruth(clients=federation.clients, batch_size=batch_size))


@pytest.mark.parametrize("federation", ["fedsgd", "fedavg"])
@pytest.mark.parametrize(
    "audit", [Audit(probes=(Probe(0, 0), Probe(1, 3)), batch_size=2), Audit(uploads="update", clients=frozenset({1}))]
)
def test_only_the_defense_makes_a_difference(federation, audit):
    options = [f"federation={federation}", "federation.clients=4", "federation.plan.batch_size=32"]
    defended = build_setup(compose_run([*options, "defense=pruning", "defense.rate=0.6"]))
    measure = measure_of(defended)
    for observation in observations(defended, audit):
        found, solving = measure(observation)
        assert solving == {}
        assert found.zeros == pytest.approx(0.6, abs=0.02)
        assert found.cosine**2 + found.signal_to_distortion**-2 == pytest.approx(1, abs=1e-4)
    undefended = build_setup(compose_run(options))
    for observation in observations(undefended, audit):
        assert measure(observation)[0].signal_to_distortion == float("inf")


def test_the_equations_of_a_fully_connected_layer_are_measured():
    audit = Audit(probes=(Probe(0, 0),), batch_size=1)
    options = ["model=mlp", "model.widths=[16]", "federation.clients=4", "defense=dp_noise"]
    figures = []
    for scale in ("1e-6", "10"):
        federation = build_setup(compose_run([*options, f"defense.scale={scale}"]))
        (observation,) = observations(federation, audit, 1)
        figures.append(measure_of(federation, 1)(observation)[1])
    weak, strong = figures
    assert weak["condition"] == strong["condition"] > 1
    assert weak["solvable"] == 1 and weak["contraction"] < 1e-3 and weak["error_bound"] < 1e-2
    assert strong["solvable"] == 0 and strong["error_bound"] == float("inf")


@pytest.mark.parametrize(
    ("options", "batch_size", "measured"),
    [
        ([], 2, False),
        (["federation=fedavg"], 1, True),
        (["federation=fedavg", "federation.plan.optimizer=adam"], 1, False),
    ],
    ids=["batch", "steps of SGD", "steps of Adam"],
)
def test_the_equations_are_those_of_one_example_and_of_gradients(options, batch_size, measured):
    common = ["model=mlp", "model.widths=[16]", "federation.clients=4", "defense=dp_noise", "defense.scale=1e-7"]
    federation = build_setup(compose_run([*common, *options]))
    audit = Audit(probes=(Probe(0, 0),), batch_size=batch_size)
    (observation,) = observations(federation, audit, batch_size)
    figures = measure_of(federation, batch_size)(observation)[1]
    assert (figures["solvable"] == 1 and figures["error_bound"] < 0.1) if measured else figures == {}
