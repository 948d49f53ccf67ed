"""What people type for settings, attacks and their authors is answered by what it is called here."""

import pytest
import torch

from fl_privacy import Observation, reconstruct
from fl_privacy.attacks.named import attack_names
from fl_privacy.checks import aliases, one_of
from fl_privacy.errors import UserError
from fl_privacy.runs.config import compose_run
from fl_privacy.runs.config.parse import options

MEANT = {
    "attack.iterations=5": "attack.iterations (did you mean budget?)",
    "federation.local_epochs=2": "(did you mean federation=fedavg federation.plan.epochs?)",
    "federation.plan.local_epochs=2": "(did you mean federation=fedavg federation.plan.epochs?)",
    "federation=fedavg federation.plan.local_epochs=2": "(did you mean epochs?)",
    "federation.num_clients=3": "(did you mean clients?)",
    "learning_rate=0.1": "(did you mean federation=fedavg federation.plan.lr?)",
    "num_rounds=3": "(did you mean federation.rounds?)",
    "dataset=mnist": "(did you mean data?)",
    "epsilon=3": "(did you mean privacy.epsilon?)",
    "attack=dlg attack.learning_rate=1": "(did you mean lr?)",
    "attack=geiping": "(did you mean inverting_gradients?)",
    "attack=Geiping2020": "(did you mean inverting_gradients?)",
    "attack=zhu_et_al": "(did you mean dlg?)",
    "attack=zhu_et_al_2019": "(did you mean dlg?)",
    "attack=idgl": "(did you mean idlg?)",
    "attack=robbing_the_fed": "(did you mean server=imprint?)",
    "defense=gaussian": "(did you mean dp_noise?)",
    "defense=dp_noise defense.sigma=1": "(did you mean scale?)",
    "defense=dp_sgd defense.sigma=1": "(did you mean noise_multiplier?)",
    "model=resnet": "(did you mean resnet18?)",
    "partition=non_iid": "(did you mean dirichlet?)",
    "data=mnist data.path=x": "(did you mean root?)",
}
"""What is typed -> the answer."""


@pytest.mark.parametrize("typed", MEANT)
def test_what_is_meant_is_named(typed: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_run(typed.split())
    assert MEANT[typed] in str(caught.value)


def test_a_setting_of_another_kind_is_not_suggested() -> None:
    with pytest.raises(UserError) as caught:
        compose_run(["attack=exact", "attack.lr=1"])
    assert "did you mean" not in str(caught.value)


def test_an_attack_is_found_by_its_author_in_python_too() -> None:
    with pytest.raises(UserError, match=r"but got 'balunovic' \(did you mean lamp\?\)"):
        one_of("attack", "balunovic", attack_names())


def test_the_table_names_what_there_is() -> None:
    """No other name is an option itself, and each is of one option."""
    for group, names in aliases()["options"].items():
        there, others = set(options(group)), [other for each in names.values() for other in each]
        assert len(set(others)) == len(others) and not there & set(others), group
        for name in names:
            into, _, option = name.rpartition("=")
            assert option in (options(into) if into else there), name
    for name, others in aliases()["settings"].items():
        assert name not in others and len(set(others)) == len(others)
    for place in aliases()["elsewhere"].values():
        words = [word if "=" in word else f"{word}=null" for word in place.split()]
        with_defense = ["defense=dp_noise"] if "defense.clip_norm=null" in words else []
        restarts = ["attack=dlg"] if words[0] in ("attack.iterations=null", "attack.restarts=null") else []
        table = ["data=table"] if "data.path=null" in words else []
        try:
            compose_run([*with_defense, *restarts, *table, *words])
        except UserError as error:
            assert "Unknown key" not in str(error), place


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        ("data=adult", "table_mlp"),
        ("data=table data.path=x.csv", "table_mlp"),
        ("data=sst2", "bert_tiny"),
        ("data=mnist", "lenet"),
        ("data=adult model=logistic", "logistic"),
        ("data=adult model=lenet", "lenet"),
    ],
)
def test_a_table_or_text_has_a_model_of_its_own(typed: str, model: str) -> None:
    assert compose_run(typed.split()).choices["model"] == model


def test_an_option_of_an_attack_is_found_by_its_meaning_in_python_too() -> None:
    net, image = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 3)), torch.eye(3).view(1, 1, 3, 3)
    loss = torch.nn.functional.cross_entropy(net(image), torch.tensor([1]))
    seen = Observation.of_gradients(net, torch.autograd.grad(loss, list(net.parameters())), input_shape=(1, 3, 3))
    for attack, option, meant in (("auto", "iterations", "budget"), ("dlg", "learning_rate", "lr")):
        with pytest.raises(UserError, match=rf"but got {option} \(did you mean {meant}\?\)"):
            reconstruct(seen, attack, **{option: 5})
    with pytest.raises(UserError, match=r"but got 'geiping' \(did you mean inverting_gradients\?\)"):
        reconstruct(seen, "geiping")
