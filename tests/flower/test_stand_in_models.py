"""Networks, tokenizers and sets that are not here; networks of scikit-learn, trained by PyTorch and attacked."""

import importlib
import json
import time
import warnings
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier, MLPRegressor

from fl_privacy.auditing.app.audit import AppAuditRequest, audit_app
from fl_privacy.auditing.app.bundle import read_app
from fl_privacy.auditing.app.hub_models import _or_drawn
from fl_privacy.auditing.app.scripts import parsed
from fl_privacy.auditing.app.stand_in import OF_FILES, Drawing
from fl_privacy.auditing.app.stood_in import stood_in
from fl_privacy.auditing.instrument.fitted import FromSklearn, InLayers, sklearn_lent
from fl_privacy.auditing.instrument.matching import matched
from fl_privacy.auditing.scenario_scores import TimeSpent
from fl_privacy.measure import lpips
from tests.flower.test_stand_in import HEAD, NET, TAIL
from tests.flower.untouched_apps import attacked_only, written_once
from tests.selection import few

APP = """
import flwr as fl, numpy as np
from sklearn.datasets import load_wine
from sklearn.neural_network import MLPClassifier
rows, labels = load_wine(return_X_y=True)
rows = (rows - rows.mean(0)) / rows.std(0)
model = MLPClassifier((24,), solver="sgd", learning_rate_init=0.1, momentum=0.0, max_iter=1, warm_start=True)
model.fit(rows, labels)
class Client(fl.client.NumPyClient):
    def get_parameters(self, config):
        return [*model.coefs_, *model.intercepts_]
    def fit(self, parameters, config):
        model.coefs_, model.intercepts_ = list(parameters[:2]), list(parameters[2:])
        model.fit(rows, labels)
        return self.get_parameters({}), len(rows), {}
    def evaluate(self, parameters, config):
        return 1.0, len(rows), {}
fl.simulation.start_simulation(client_fn=lambda cid: Client(), num_clients=2)
"""


def drawing(folder: Path, code: str) -> Drawing:
    (folder / "app.py").write_text(code)
    return Drawing(list(parsed(folder).values()), folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("AutoModelForSequenceClassification", "distilbert-base-uncased"),
        ("BertForSequenceClassification", "bert-base-uncased"),
        ("AutoModelForCausalLM", "gpt2"),
        ("AutoModelForSequenceClassification", "somebody/says-no-kind"),
    ],
)
def test_a_network_of_the_hub_that_is_not_here_is_a_small_one_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    drawn = drawing(tmp_path, "import transformers")
    with stood_in(drawn):
        told = {"num_labels": 3} if "Classification" in kind else {}
        network = getattr(transformers, kind).from_pretrained(name, **told)
        words = transformers.AutoTokenizer.from_pretrained(name)(["the patient", "Xy!"], padding=True)
    ids = torch.tensor(words["input_ids"])
    outputs = network(input_ids=ids, attention_mask=torch.tensor(words["attention_mask"])).logits
    assert outputs.shape[-1] == (3 if told else network.config.vocab_size)
    assert sum(each.numel() for each in network.parameters()) < 3_000_000
    assert (ids[0] != ids[1]).any() and ids.max() < network.config.vocab_size
    said = f"a small {type(network).__name__} as it begins, without trained weights, in place of {name}"
    assert said in drawn.in_words()
    with pytest.raises(OSError, match=r"connect|not a"):
        getattr(transformers, kind).from_pretrained(name)  # the block ended


def test_networks_are_named_by_keyword_and_made_of_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    drawn, name = drawing(tmp_path, "import transformers"), {"pretrained_model_name_or_path": "bert-tiny-x"}
    with stood_in(drawn):
        transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.from_pretrained(**name))
        assert "a small BertConfig, without trained weights, in place of bert-tiny-x" in drawn.in_words()
        assert transformers.AutoTokenizer.from_pretrained(**name)("the patient")["input_ids"]
        transformers.BertModel.from_pretrained(**name)
    assert "a small BertModel as it begins, without trained weights, in place of bert-tiny-x" in drawn.in_words()
    assert drawn.in_words().startswith("The pretrained parts were not here")


def test_weights_that_transformers_seeks_in_vain_are_not_here(tmp_path: Path) -> None:
    class Network:
        @classmethod
        def from_pretrained(cls, name: str) -> str:
            return None.endswith(name)  # type: ignore[attr-defined]  # as transformers 4.53 of a file that it has not

    found = _or_drawn(lambda kind, name: f"drawn {name}", Network.from_pretrained.__func__, Network, "somebody/net")  # type: ignore[attr-defined]
    assert found == "drawn somebody/net"

    def seek(kind: type, name: str) -> None:
        raise ValueError("Couldn't instantiate the backend tokenizer from one of: \n(1) a `tokenizers` library")

    assert _or_drawn(lambda kind, name: f"drawn {name}", seek, Network, "somebody/net") == "drawn somebody/net"


def test_errors_of_the_apps_own_stay(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    with stood_in(drawing(tmp_path, "import transformers")), pytest.raises(TypeError):
        transformers.AutoConfig.from_pretrained()


@pytest.mark.parametrize("name", few(OF_FILES))
def test_sets_of_torchvision_have_pictures_of_all_their_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sets = pytest.importorskip("torchvision.datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fl_privacy.auditing.app.stood_in.TRAIN", 60)
    drawn = drawing(tmp_path, "import torchvision")
    with stood_in(drawn):
        made = getattr(sets, name)("data")
        picture, label = made[7]
    side, shape = OF_FILES[name].side, OF_FILES[name]
    assert picture.size == (side, side) and len(picture.getbands()) == shape.channels
    assert len(made) == 60 and isinstance(made, getattr(sets, name))
    if name == "CelebA":
        assert len(label) == 40
    else:
        assert {made[n][1] for n in range(60)} == {*range(min(60, shape.classes))}
    assert f"torchvision's {name}" in drawn.in_words()


@pytest.mark.parametrize("solver", ["sgd", "adam"])
@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
def test_networks_of_scikit_learn_train_as_before(kind: type, solver: str) -> None:
    rows, labels = load_digits(return_X_y=True)
    rows = rows[:300] / 16 + 0.1  # without features that are always 0
    labels = labels[:300].astype(int if kind is MLPClassifier else float)
    trained = []
    for code in ("", "MLPClassifier"):
        with sklearn_lent(code), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = kind(
                hidden_layer_sizes=(8,), activation="tanh", solver=solver, max_iter=3, shuffle=False, random_state=0
            )
            trained.append(one.fit(rows, labels).partial_fit(rows, labels))
    for before, after in zip(trained[0].coefs_, trained[1].coefs_, strict=True):
        assert np.abs(before - after).max() < 1e-3 * np.abs(before).max()
    assert trained[1].loss_ == pytest.approx(trained[0].loss_, rel=1e-3)
    network = FromSklearn(trained[1])
    given = torch.tensor(rows[:5], dtype=torch.float32)
    torch.testing.assert_close(InLayers(network)(given), network(given))


@pytest.mark.usefixtures("few_evaluations")
def test_a_first_partial_fit_that_only_makes_the_network_is_not_the_training(tmp_path: Path) -> None:
    begun = """
    def __init__(self):
        self.model = MLPClassifier((24,), solver="sgd", learning_rate_init=0.1, momentum=0.0)
        self.model.partial_fit(np.zeros((3, 13)), [0, 1, 2], classes=[0, 1, 2])
    def get_parameters"""
    code = APP.replace("    def get_parameters", begun.lstrip("\n")).replace("model.fit(rows", "model.partial_fit(rows")
    head, _, client = code.partition("class Client")
    client = client.replace(" model.", " self.model.").replace("*model.", "*self.model.")
    rungs = rungs_of(tmp_path, head.partition("model = ")[0] + "class Client" + client, "one")
    assert rungs["one"]["counts"]["exact"] == 2 and not rungs["one"]["control"]["exact"], rungs["one"]["reason"]


def rungs_of(folder: Path, code: str, *only: str, victims: int = 2) -> dict[str, dict[str, Any]]:
    """Audit an app, of the scenarios in ``only`` alone."""
    (folder / "app").mkdir()
    (folder / "app" / "main.py").write_text(code)
    asked = AppAuditRequest(out=folder / "out", victims=victims, seconds=60)
    with written_once(), attacked_only({*only}):
        page = audit_app(read_app(folder / "app", None), asked).page
    return {one["rung"]: one for one in json.loads((page.parent / "audit.json").read_text())["rungs"]}


@pytest.mark.usefixtures("few_evaluations")
def test_a_network_of_scikit_learn_is_attacked(tmp_path: Path) -> None:
    rungs = rungs_of(tmp_path, APP, "one", victims=3)
    assert rungs["one"]["counts"]["exact"] == 3 and not rungs["one"]["control"]["exact"]


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_pixels_that_enter_as_whole_numbers_are_no_words(tmp_path: Path) -> None:
    code = NET.format(inputs=64, classes=4).replace("x.flatten(1)", "x.float().flatten(1) / 255")
    data = "TensorDataset(torch.randint(0, 256, (24, 1, 8, 8), dtype=torch.uint8), torch.arange(24) % 4)"
    whole = f"{HEAD}{code}\nloader = DataLoader({data}, batch_size=8)\n{TAIL}"
    rungs = rungs_of(tmp_path, whole, "gradient", "one", "batch")
    assert rungs["batch"]["counts"] and not any("words" in one["reason"] for one in rungs.values())
    for name in ("gradient", "one"):
        assert rungs[name]["counts"]["exact"] == 2, rungs[name]["reason"]


@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize("wrapped", ["net", "global model first"])
def test_a_penalty_on_parameters_of_a_wrapped_network_is_replayed(tmp_path: Path, wrapped: str) -> None:
    net = NET.format(inputs=12, classes=3)
    holder = """
class Holder(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._module = module
    def forward(self, x):
        return self._module(x)
"""
    first = "if not hasattr(self, 'old'): self.old = Net()\n            self.old(images)\n            "
    tail = TAIL.replace("self.net = Net()", "self.net = Holder(Net())").replace(
        "nn.functional.cross_entropy(self.net(images), labels)",
        "(nn.functional.cross_entropy(self.net(images), labels)"
        " + 0.01 * sum(each.square().sum() for each in self.net.parameters()))",
    )
    if wrapped != "net":
        tail = tail.replace("optimizer.zero_grad()", f"{first}optimizer.zero_grad()")
    data = "TensorDataset(torch.rand(120, 12), torch.arange(120) % 3)"
    whole = f"{HEAD}{net}{holder}\nloader = DataLoader({data}, batch_size=8)\n{tail}"
    rungs = rungs_of(tmp_path, whole, "gradient", "one")
    for name in ("gradient", "one"):
        assert rungs[name]["counts"] and rungs[name]["counts"]["judged"] == 2, rungs[name]["reason"]


def test_parameters_are_recognized_in_a_longer_dtype() -> None:
    after = {"weight": torch.rand(4, 3), "bias": torch.rand(4)}
    before = {name: torch.zeros_like(value) for name, value in after.items()}
    uploaded = {str(n): value.double().numpy() for n, value in enumerate(after.values())}
    assert matched(uploaded, {}, before, after, {}).parameters == {"0": "weight", "1": "bias"}
    uploaded["0"] = uploaded["0"] * (1 + 1e-5)
    assert "0" not in matched(uploaded, {}, before, after, {}).parameters


def test_waiting_is_no_time_of_an_attack() -> None:
    spent = TimeSpent()
    time.sleep(0.5)
    assert spent() < 0.4


def test_the_audits_own_weights_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> Any:
        raise URLError("no network")

    monkeypatch.setenv("FL_PRIVACY_DATA", str(tmp_path))
    monkeypatch.setattr(lpips, "PACKAGE", "not_there_at_all")
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with stood_in(Drawing([], tmp_path)) as drawing, pytest.raises(OSError, match="no network"):
        lpips.convolutions()
    assert drawing.asked == {}
