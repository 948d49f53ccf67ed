"""Apps whose training is out of the ordinary: what is attacked, and what the page says of it."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from fl_privacy.auditing.clear_text.copies import entries_of_classes, numbers_in
from fl_privacy.auditing.clear_text.findings import Loaded, findings_of
from fl_privacy.auditing.clear_text.inventory import UP, Sent
from tests.flower.untouched_apps import BEGUN, HEAD, PLAIN, SERVER, audited, rung

CATEGORIES = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first, self.last = nn.Embedding(50, 8), nn.Linear(13, 16), nn.Linear(16, 1)
    def forward(self, kind, x):
        return self.last(torch.relu(self.first(torch.cat([self.words(kind), x], 1)))).squeeze(1)
"""
    + BEGUN
    + """    g = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    kinds, x, y = torch.randint(0, 50, (40,), generator=g), torch.randn(40, 5, generator=g), torch.arange(40) % 2
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for a, b, c in DataLoader(TensorDataset(kinds, x, y.float()), batch_size=4):
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(net(a, b), c).backward()
        optimizer.step()
    return answer(msg, ArrayRecord(net.state_dict()), **{"num-examples": len(x)})
"""
)

PROXIMAL = PLAIN.replace(
    "    for a, b in loader:", "    there = [p.detach().clone() for p in net.parameters()]\n    for a, b in loader:"
).replace(
    "criterion(net(a), b).backward()",
    "(criterion(net(a), b) + 0.5 * sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), there))).backward()",
)


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize(
    ("name", "client", "loss"),
    [("app_categories", CATEGORIES, "binary cross entropy with logits"), ("app_proximal", PROXIMAL, "cross entropy")],
)
def test_what_the_loss_takes_beside_examples_breaks_no_attack(
    tmp_path: Path, name: str, client: str, loss: str
) -> None:
    """Categories of each example, and the parameters that training began with, of FedProx."""
    record = audited(tmp_path, name, client, rounds=1)
    for one in ("gradient", "one"):
        assert rung(record, one)["counts"]["read"] == 2
        assert f"The loss is {loss}; the attacker is given no labels." in rung(record, one)["notes"]
    given = "The attacker is given the network's other inputs, such as categories."
    assert (given in rung(record, "one")["notes"]) == (name == "app_categories")
    assert not [each for each in record["rungs"] if each["rung"] == "later"]  # of one round


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
def test_as_many_weights_of_classes_as_examples_are_no_labels(tmp_path: Path) -> None:
    weighted = PLAIN.replace("CrossEntropyLoss()", "CrossEntropyLoss(weight=torch.tensor([1., 2., 1., 1.]))")
    record = audited(tmp_path, "app_four_weights", weighted, rounds=1, seconds=0.5, victims=1, only=("batch",))
    found = rung(record, "batch")
    assert found["size"] == 4 and not found["reason"]
    assert "The loss is cross entropy; the attacker is given no labels." in found["notes"]


REGRESSION = PLAIN.replace("nn.Linear(24, 4)", "nn.Linear(24, 1)").replace(
    "criterion(net(a), b)", "F.mse_loss(net(a).squeeze(1), b.float() / 3)"
)


def test_a_loss_has_the_name_of_what_compares(tmp_path: Path) -> None:
    """Outputs (B,) are compared with as many targets, each with its own: nothing is broadcast."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Using a target size")
        record = audited(tmp_path, "app_regression", REGRESSION, rounds=1, only=("one",))
    assert "The loss is mse loss; the attacker is given no labels." in rung(record, "one")["notes"]


THRESHOLD = PLAIN.replace("nn.Linear(24, 4)", "nn.Linear(24, 1)").replace(
    "criterion(net(a), b)", "F.binary_cross_entropy_with_logits(net(a).squeeze(1), (b > 1).float())"
)


def test_targets_that_are_made_of_labels_are_what_is_searched(tmp_path: Path) -> None:
    """No answer of yes or no can be found by way of a class behind a threshold."""
    record = audited(tmp_path, "app_threshold", THRESHOLD, rounds=1, victims=4)
    assert rung(record, "gradient")["counts"]["read"] == 4
    assert rung(record, "one")["counts"]["read"] == 4


SCHEDULED = PLAIN.replace(
    "    for a, b in loader:", "    plan = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\n    for a, b in loader:"
).replace("optimizer.step()", "optimizer.step(); plan.step()")

ADDED_UP = (
    PLAIN.replace("        optimizer.zero_grad()\n", "")
    .replace("for a, b in loader:", "for i, (a, b) in enumerate(loader):")
    .replace("        optimizer.step()", "        if i % 2: optimizer.step(); optimizer.zero_grad()")
)


def test_steps_of_a_schedule_are_counted_together(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_scheduled", SCHEDULED, rounds=1, only=("one",))
    assert record["facts"]["Optimizer"] == "SGD (lr 0.1 to 0.0001953125, momentum 0.9), 10 steps in a round"


def test_gradients_that_are_added_up_are_said_to_be(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_added_up", ADDED_UP, rounds=1)
    assert rung(record, "gradient")["counts"]["read"] == 2
    assert "gradients of several batches are added up" in rung(record, "one")["reason"]


def test_rounds_are_those_that_were_seen(tmp_path: Path) -> None:
    """This app asks for its own number, whatever the run config says; it is held to those that are asked."""
    server = SERVER.replace('context.run_config["num-server-rounds"]', "2")
    record = audited(tmp_path, "app_two_rounds", PLAIN, server, rounds=1, only=())
    assert record["rounds"] == 1
    assert "over 1 round" in next((tmp_path / "out").rglob("report.html")).read_text()


def test_changes_tell_classes_as_weights_do(tmp_path: Path) -> None:
    """The bias that was sent is no part of a change."""
    few = "torch.randint(0, 4, (n,), generator=g) * (torch.rand(n, generator=g) < 0.5)"
    plain = PLAIN.replace("torch.randint(0, 4, (n,), generator=g)", few)
    change = plain.replace(
        "ArrayRecord(net.state_dict()), **",
        "ArrayRecord({k: v - msg.content['arrays'].to_torch_state_dict()[k] for k, v in net.state_dict().items()}), **",
    )
    told = []
    for name, client in (("app_weights", plain), ("app_changes", change)):
        record = audited(tmp_path / name, name, client, rounds=1, nodes=6, victims=1, only=())
        told.append(next(one for one in record["survivors"] if one["name"] == "classes"))
    assert told[0]["found"] is not None
    assert told[0]["found"] == pytest.approx(told[1]["found"], abs=1e-3)


def _said(values: dict[str, object], labels: list[int]) -> list[tuple[str, str]]:
    sent = Sent(direction=UP, kind="train", round=1, node=0, values={f"m/{k}": v for k, v in values.items()})
    loaded = Loaded(labels=np.array(labels), examples=len(labels))
    return [(one.severity, one.where) for one in findings_of(sent, loaded, [], trained=True)]


LABELS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"class_0": 3, "class_1": 2, "class_2": 5}, [("facts", "m/class_0, class_1, class_2")]),
        ({"n0": 0.3, "n1": 0.2, "n2": 0.5, "n3": 0.0}, [("facts", "m/n0, n1, n2, n3")]),
        ({"cats": 2, "dogs": 5, "cows": 3, "num-examples": 10}, [("facts", "m/cats, dogs, cows")]),
        ({"counts": '{"0": 3, "1": 2, "2": 5}'}, [("facts", "m/counts")]),
        ({"counts": "3,2,5"}, [("facts", "m/counts")]),
        ({"y": "2 2 2 2 2 1 1 0 0 0"}, [("data", "m/y")]),
        ({"y": [0, 1, 2, 2, 2, 2, 2, 1, 0, 0]}, [("data", "m/y")]),
        ({"right": 5, "wrong": 5, "loss": 0.3}, []),
        ({"version": "1.2.3", "date": "2026-11-27"}, []),
    ],
)
def test_labels_and_their_counts_are_found_however_they_are_written(
    values: dict[str, object], found: list[tuple[str, str]]
) -> None:
    assert _said(values, LABELS) == found


ODD = ["", "[", "1e999 2", "[" * 5000 + "1", "9" * 500 + ",1", '{"a": "b", "c": 1}', "nan 1"]


@pytest.mark.parametrize("text", ODD)
def test_texts_of_no_numbers_are_none(text: str) -> None:
    assert numbers_in(text).size in (0, 2)


def test_right_and_wrong_answers_are_no_counts_of_classes() -> None:
    assert _said({"right": 7, "wrong": 3}, [0] * 7 + [1] * 3) == []


def test_amounts_that_no_float_holds_hide_no_counts_of_classes() -> None:
    labels = np.repeat(np.arange(3), [5, 7, 9])
    said = {"class_0": 5, "class_1": 7, "class_2": 9, "huge": 10**400, "endless": float("inf")}
    assert entries_of_classes(said, labels) == ("class_0", "class_1", "class_2")
    assert entries_of_classes({"huge": 10**400}, labels) == ()
