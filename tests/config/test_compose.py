import pytest
from omegaconf import OmegaConf

from fl_privacy.errors import UserError
from fl_privacy.runs.config import CONFIG_DIR, RunSettings, compose_run, expand_sweep, options, to_yaml


def test_defaults_are_resolved_and_choices_recorded():
    config = compose_run(["model=lenet_dlg", "seed=3"])
    assert config.seed == 3
    assert config.choices["model"] == "lenet_dlg"
    assert RunSettings.of(OmegaConf.create(to_yaml(config))) == config


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}={p.stem}")
def test_every_option_composes(path):
    assert compose_run([f"{path.parent.name}={path.stem}"]).choices[path.parent.name] == path.stem


def test_sweep_is_the_product_of_the_listed_values():
    jobs = expand_sweep(["seed=0,1", "defense=none,pruning", "victims=3"])
    assert jobs == [[f"seed={s}", f"defense={d}", "victims=3"] for s in (0, 1) for d in ("none", "pruning")]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("attack=idlgg", ("no option 'idlgg'", "did you mean idlg?", "allowed:", "inverting_gradients")),
        ("fedration.rounds=3", ("fedration", "did you mean federation?")),
        ("federation.ruonds=3", ("federation.ruonds", "did you mean rounds?")),
        ("federation.plan.batchsize=3", ("federation.plan.batchsize", "did you mean batch_size?")),
        ("attack.layers={'*.bias':0}", ("write keys without quotes, as in 'attack.layers={*.bias:0}'",)),
        ("attack.layers={fc:0", ("check that quotes and brackets are closed",)),
        ("sede=1", ("sede", "did you mean seed?")),
        ("+extra=1", ("extra",)),
        ("seed", ("key=value", "'seed'")),
        ("seed=1,2", ("-m",)),
        (f"seed={'[' * 300}{']' * 300}", ("300", "write less")),
        (f"data.classes=[{','.join(f'c{k}' for k in range(20_000))}]", ("32768 letters", "write less")),
        ("intercept.uploads.x=1", ("intercept.uploads",)),
    ],
)
def test_wrong_overrides_are_one_line_that_helps(override, expected):
    with pytest.raises(UserError) as error:
        compose_run([override])
    message = str(error.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


def test_options_are_those_of_the_folder():
    assert {"fedsgd", "fedavg"} <= set(options("federation"))


@pytest.mark.parametrize("value", ["[mlp,lenet]", "{mlp: 1}", "5", "true"])
def test_an_option_that_is_no_name_is_one_line(value):
    with pytest.raises(UserError, match="model has no option"):
        compose_run([f"model={value}"])


def test_of_a_setting_that_is_given_twice_the_last_wins():
    assert compose_run(["attack.iterations=3", "attack=idlg", "attack.iterations=30"]).attack["iterations"] == 30
