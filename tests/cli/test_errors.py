"""Wrong input is one line that says what was expected, what was given and what to do."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from fl_privacy.cli.main import run_command_line
from fl_privacy.runs.config import compose_run

WRONG = {
    "unknown attack": (["run", "attack=idgl"], "did you mean idlg?"),
    "unknown defense": (["run", "defense=prunning"], "did you mean pruning?"),
    "unknown data": (["run", "data=cifar11"], "did you mean cifar10"),
    "unknown model": (["run", "model=lennet"], "did you mean lenet?"),
    "unknown partition": (["run", "partition=dirichlett"], "did you mean dirichlet?"),
    "unknown federation": (["run", "federation=fedsdg"], "did you mean fedsgd?"),
    "unknown backend": (["run", "backend=rey"], "did you mean ray?"),
    "unknown experiment": (["run", "experiment=demmo"], "did you mean demo?"),
    "misspelt top-level key": (["run", "victms=3"], "did you mean victims?"),
    "misspelt nested key": (["run", "federation.cleints=3"], "did you mean clients?"),
    "misspelt plan key": (["run", "federation.plan.batchsize=3"], "did you mean batch_size?"),
    "misspelt attack key": (["run", "attack=idlg", "attack.iteratons=3"], "did you mean iterations?"),
    "added attack key": (["run", "attack=idlg", "+attack.foo=3"], "attack.foo"),
    "setting of an option that has none": (["run", "partition.alpha=1"], "allowed with partition=iid: nothing."),
    "misspelt command": (["atack"], "`fl-privacy --help` shows"),
    "misspelt flag": (["run", "--mutirun"], "`fl-privacy run --help` shows"),
    "policy that does not exist": (["policy", "check", "/nowhere/site.yaml"], "can't be read"),
    "claim of nothing": (["check-dp", "nothing_at_all"], "my_module:my_mod"),
    "no value": (["run", "seed"], "key=value"),
    "list without -m": (["run", "seed=0,1"], "-m"),
    "budget of a defense without guarantee": (["run", "defense=pruning", "privacy.epsilon=8"], "dp_sgd"),
    "budget without clipping": (["run", "defense=dp_noise", "privacy.epsilon=8"], "clipped"),
    "budget in words": (["run", "defense=dp_sgd", "privacy.epsilon=low"], "a number"),
    "unknown grid": (["trade-off", "paper"], "papers"),
    "no process": (["trade-off", "tiny", "--jobs", "0"], "at least 1"),
    "negative alpha": (["run", "partition=dirichlet", "partition.alpha=-1"], "alpha"),
    "no clients": (["run", "federation.clients=0"], "at least 1"),
    "clients in words": (["run", "federation.clients=ten"], "whole number"),
    "more clients than examples": (["run", "federation.clients=5000"], "clients"),
    "no rounds": (["run", "federation.rounds=0"], "at least 1"),
    "fraction over 1": (["run", "federation.fraction=1.5"], "(0, 1]"),
    "unknown aggregation": (["run", "federation.aggregation=median"], "round_robin"),
    "negative learning rate": (["run", "federation=fedavg", "federation.plan.lr=-1"], "above 0"),
    "steps of a shared gradient": (["run", "+federation.plan.steps=5"], "delta"),
    "round that is not run": (["run", "intercept.rounds=99"], "1..20"),
    "client that does not exist": (["run", "intercept.clients=[77]"], "0..9"),
    "more victims than data": (["run", "victims=9999"], "victims"),
    "batch of nothing": (["attack", "batch_size=0"], "at least 1"),
    "missing data folder": (["run", "data=image_folder", "data.root=/nowhere/at/all"], "/nowhere/at/all"),
    "image too small for the model": (["run", "model=convnet", "data.image_size=4"], "image"),
    "model that can't be imported": (["run", "model._target_=no.such.Model"], "no.such.Model"),
    "negative noise": (["run", "defense=dp_noise", "defense.scale=-1"], "scale"),
    "pruning everything twice": (["run", "defense=pruning", "defense.rate=1.5"], "rate"),
    "device that does not exist": (["run", "device=tpu9"], "device"),
    "attack without attack": (["attack", "attack=none"], "attack"),
    "capture that does not exist": (["attack", "captured=/nowhere/run"], "captured"),
    "weights that do not exist": (["attack", "weights=/nowhere/model.safetensors"], "weights"),
    "split that does not exist": (["attack", "split=valid"], "train or test"),
    "fraction in words": (["run", "federation.fraction=half"], "a number"),
    "server rate that is no number": (["run", "federation.server_lr=nan"], "a number"),
    "seed in words": (["run", "seed=abc"], "a whole number"),
    "truth in words": (["run", "threat_model.knows_labels=flase"], "true or false"),
    "half an example": (["run", "federation.plan.batch_size=1.5"], "a whole number"),
    "rate of nothing": (["run", "federation=fedavg", "federation.plan.lr=null"], "a number"),
    "Nesterov without momentum": (
        ["run", "federation=fedavg", "federation.plan.momentum=0", "federation.plan.nesterov=true"],
        "momentum",
    ),
    "attack at no time": (["run", "intercept.when=never"], "after or during"),
    "rounds in letters": (["run", "intercept.rounds=[1,a]"], "intercept.rounds"),
    "client that is no list": (["run", "intercept.clients=1"], "a list"),
    "option of nothing": (["run", "defense=null"], "none"),
    "section that is a number": (["run", "federation.plan=5"], "federation.plan"),
    "section that is taken away": (["run", "~intercept"], "intercept"),
    "added key of the federation": (["run", "+federation.foo=1"], "federation.foo"),
    "added key of the backend": (["run", "+backend.foo=1"], "backend.foo"),
    "CPUs in words": (["run", "backend=ray", "backend.num_cpus=few"], "a number"),
    "attack that tries never": (["run", "attack=idlg", "attack.restarts=0"], "at least 1"),
    "attack in half steps": (["run", "attack=idlg", "attack.iterations=1.5"], "a whole number"),
    "budget of an attack in other words": (["run", "attack.budget=long"], "quick"),
    "evaluations of an attack in halves": (["run", "attack.evaluations=1.5"], "a whole number"),
    "mean in letters": (["run", "model.mean=[a]"], "model.mean"),
    "name with a slash": (["run", "name=a/b"], "'a/b-mnist_mini"),
    "report of nothing": (["report", "/nowhere/run"], "/nowhere/run"),
    "no round to attack": (["run", "intercept.rounds=[]"], "intercept.rounds=ends"),
    "no client to attack": (["run", "intercept.clients=[]"], "intercept.clients=all"),
    "attack that goes uphill": (["run", "attack=inverting_gradients", "attack.lr=-1"], "attack.lr"),
    "attack that stands still": (["run", "attack=sapag", "attack.lr=0"], "attack.lr"),
    "L-BFGS that goes uphill": (["run", "attack=dlg", "attack.lr=-1"], "attack.lr"),
    "negative seed": (["run", "seed=-1"], "at least 0"),
    "negative seed of a search": (["search-policies", "seed=-1"], "at least 0"),
    "name in several lines": (["run", "name='a\nb'"], "name"),
    "name that goes up": (["run", "name=.."], "omit slashes and a first dot"),
    "colluder that is the victim": (["attack", "threat_model.colluder=0"], "threat_model.colluder"),
    "name of nothing": (["run", "name=''"], "name is expected to name something"),
    "captures of nothing": (["attack", "captured="], "captured is expected to name something"),
    "GPU of another kind": (["run", "device=gpu"], "auto, cpu or cuda"),
    "no actor": (["run", "backend=ray", "backend.actors=0"], "backend.actors"),
    "budget without noise": (["run", "privacy.epsilon=5"], "defense=dp_sgd"),
    "features of no module": (
        ["run", "threat_model.knows_features=true", "threat_model.features_at=nope"],
        "a module of the model",
    ),
    "features that nobody sees": (["run", "threat_model.features_at=nope"], "knows_features=true"),
    "layer beyond all memory": (["run", "model=mlp", "model.widths=[100000000000]"], "TB at once"),
    "page without a name": (["report", ".", "--out", ""], "--out is expected to be a file"),
    "brief without a name": (["report", ".", "--brief", "--out", ""], "--out is expected to be a file"),
    "accuracy that is gained": (["advise", "accuracy_loss=-1"], "at least 0"),
    "advice on data of no such name": (["advise", "data=cifar"], "did you mean cifar10"),
    "evaluator in no folder": (["train-evaluator", "data=mnist_mini", "out=/proc/x"], "/proc/x"),
    "generator in no folder": (["train-generator", "data=mnist_mini", "out=/proc/x"], "/proc/x"),
    "weights that are none": (["run", "weights=/etc/passwd"], "safetensors"),
    "captures for a training": (["run", "captured=/nowhere/run"], "fl-privacy attack"),
    "threshold that is no number": (["trade-off", "tiny", "--psnr-below", "nan"], "at least 0"),
}

TAKES_OUT = ("run", "attack", "trade-off", "search-policies")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_a_status(name, tmp_path, capfd):
    arguments, hint = WRONG[name]
    status = _run([*arguments, f"out={tmp_path}"] if arguments[0] in TAKES_OUT else arguments)
    error = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert status == 2
    assert len(error) == 1, error
    assert error[0].startswith("error: ")
    assert hint in error[0]
    assert error[0].lower().count("did you mean") <= 1


@pytest.mark.parametrize("blocked", ["/proc/here", "/dev/null/here"])
def test_an_out_folder_that_cannot_be_written(blocked, capfd):
    assert _run(["attack", "victims=1", f"out={blocked}"]) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert blocked in error[0]


def test_a_wrong_attack_is_told_before_anything_is_trained(tmp_path, capfd):
    assert _run(["run", "defense=pruning", "attack=idlg", "attack.iterations=-1", f"out={tmp_path}"]) == 2
    assert "attack.iterations" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["weights of another model", "not safetensors"])
def test_weights_that_do_not_fit(damage, tmp_path, capfd):
    file = tmp_path / "model.safetensors"
    if damage == "not safetensors":
        file.write_bytes(b"never mind")
    else:
        save_file({"some.weight": torch.zeros(3)}, file)
    assert _run(["attack", f"weights={file}", f"out={tmp_path}/runs"]) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "model.safetensors" in error[0]


def test_the_installed_command_exits_with_the_status():
    result = subprocess.run(
        [sys.executable, "-m", "fl_privacy", "run", "attack=idgl"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def _run(arguments: list[str]) -> int:
    return run_command_line(arguments)


def test_a_name_in_other_letters_is_taken(tmp_path):
    assert compose_run(["name=ünï"]).name == "ünï"
    assert compose_run([f"out={tmp_path}/数据"]).out == f"{tmp_path}/数据"
