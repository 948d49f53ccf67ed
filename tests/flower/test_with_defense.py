"""``audit --with-defense``: an app without and with a defense on its clients' replies, on one page."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, RecordDict

from fl_privacy.auditing.app.defended import ReplyDefense, defense_called
from fl_privacy.auditing.instrument.matching import Matched
from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.defenses import pruning
from fl_privacy.errors import UserError
from fl_privacy.measure.answer import Answer, Scenario
from fl_privacy.measure.counts import Counts
from fl_privacy.report.audit_file import record_of_json, record_to_json
from fl_privacy.report.audit_page import AuditRecord, render_audit
from tests.flower.untouched_apps import LEGACY_SERVER, LINEAR, LISTED, PLAIN, SERVER, audited, rung

EVALUATED = f"""{PLAIN}
@app.evaluate()
def evaluate(msg, context):
    metrics = {{"accuracy": 0.5 + int(context.node_config["partition-id"]), "num-examples": 4}}
    return Message(RecordDict({{"metrics": MetricRecord(metrics)}}), reply_to=msg)
"""
EVALUATING = SERVER.replace("fraction_evaluate=0.0", "fraction_evaluate=1.0")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["soteria"],
            r"uploads alone \(.*dp_noise.*pruning.*quantization.*\), but soteria changes the gradient",
        ),
        (["dp_noise", "defense.at=gradient"], "but dp_noise changes the gradient of each step"),
        (["none"], "but none does nothing"),
        (["dp_noise scale=1"], "is expected as 'dp_noise defense.scale=0.1', but got 'dp_noise scale=1'"),
        (["dp_noises"], "dp_noise"),
        ([" "], "but got 'nothing'"),
        (["dp_noise defense.scales=1"], "scale"),
    ],
)
def test_a_defense_that_does_not_fit_is_refused_in_a_line(given: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        defense_called(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [["dp_noise defense.scale=0.5"], ["dp_noise.scale=0.5", "defense=dp_noise"]])
def test_settings_are_given_as_elsewhere(given: list[str]) -> None:
    assert defense_called(given).parts[0].settings["scale"] == 0.5


class Reply:
    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        record = ArrayRecord({key: Array(array) for key, array in arrays.items()})
        self.content = RecordDict({"arrays": record})

    def array(self, key: str) -> np.ndarray:
        return self.content.array_records["arrays"][key].numpy()


@pytest.mark.parametrize("shares", ["weights", "delta"])
def test_a_defense_acts_on_the_change_of_trained_parameters_alone(shares: str) -> None:
    before, change = torch.arange(10.0), torch.tensor([9.0, *[0.1] * 9])
    sent = before + change if shares == "weights" else change
    reply = Reply({"0": sent.numpy().astype(np.float16), "1": np.ones(3, np.float32)})
    seen = Watched(before={"w": before, "mean": torch.zeros(3)}, gradients={"w": before})
    found = Matched(parameters={"arrays/0": "w", "arrays/1": "mean"}, shares=shares)
    context: Any = Context(run_id=1, node_id=0, node_config={"partition-id": 0}, state=RecordDict(), run_config={})
    ReplyDefense(pruning(rate=0.9), seed=0)(reply, seen, found, context)  # type: ignore[arg-type]
    kept = torch.tensor([9.0, *[0.0] * 9])
    assert reply.array("0").dtype == np.float16 and reply.array("1").tolist() == [1, 1, 1]
    assert np.allclose(reply.array("0"), (before + kept if shares == "weights" else kept).numpy())
    with pytest.raises(UserError, match="expects parameters, but they are coded"):
        ReplyDefense(pruning(), seed=0)(reply, seen, replace(found, parameters={}), context)  # type: ignore[arg-type]


@pytest.mark.usefixtures("few_evaluations")
def test_both_runs_are_on_one_page(tmp_path: Path) -> None:
    record = audited(
        tmp_path,
        "app_compared",
        EVALUATED,
        EVALUATING,
        defense=("dp_noise defense.scale=10",),
        victims=4,
        only=("gradient", "one"),
        seconds=0.1,
    )
    before = record["before"]
    assert record["defense"] == "dp_noise" and before["tone"] == "leak" and record["tone"] == "open"
    assert rung(before, "one")["counts"]["read"] == 4 and rung(record, "one")["counts"]["read"] == 0
    assert record["figures"]["accuracy (clients' evaluation)"] == 1.0
    assert record["headline"].startswith("With dp_noise, the server reconstructed 0 of ")
    assert "; without it, 4 of 4 images. The app's accuracy stays the same" in record["headline"]
    assert "Only differential privacy is a guarantee" in next((tmp_path / "out").rglob("report.html")).read_text()
    assert not record["problems"] and "attacker knows it" in record["notes"][0]


def test_a_defense_acts_on_lists_of_arrays(tmp_path: Path) -> None:
    record = audited(
        tmp_path, "app_compared_list", LISTED, LEGACY_SERVER, defense=("quantization",), victims=1, only=("one",)
    )
    assert not record["problems"] and record["before"]["rungs"]


@pytest.mark.long
def test_the_first_line_says_how_many_replies_had_the_defense(tmp_path: Path) -> None:
    start = 'net.load_state_dict(msg.content["arrays"].to_torch_state_dict())\n'
    untrained = (
        '    if context.node_config["partition-id"]: return answer(msg, msg.content["arrays"], **{"num-examples": 9})\n'
    )
    client = PLAIN.replace(start, start + untrained)
    assert client != PLAIN
    record = audited(tmp_path, "app_partly", client, defense=("dp_noise defense.scale=10",), victims=1, seconds=0.1)
    assert record["headline"].startswith("With dp_noise on 1 of 2 replies, "), record["headline"]
    assert any("left without the defense" in problem for problem in record["problems"])


def test_a_defense_that_finds_no_parameters_is_not_tried(tmp_path: Path) -> None:
    record = audited(tmp_path, "app_compared_linear", LINEAR, defense=("dp_noise",))
    assert "before" not in record
    assert "The defense was not tried: no reply is known to hold trained parameters." in record["problems"]


QUIET = "With dp_noise, the server reconstructed 0 of 8 images from uploads of one example in one step;"


def answer(read: int) -> Answer:
    counts = Counts(exact=read, nothing=8 - read, groups=8, candidates=999)
    return Answer(scenario=Scenario(name="one"), kind="image", counts=counts, control=Counts(nothing=8, groups=8))


@pytest.mark.parametrize(
    ("without", "with_it", "headline", "next_step"),
    [
        (8, 0, f"{QUIET} without it, 8 of 8 images", "Put dp_noise into the ClientApp"),
        (8, 6, "With dp_noise, the server reconstructed 6 of 8 images from uploads of one example in one step;"
               " without it, 8 of 8 images", "It still leaks"),
        (0, 0, f"{QUIET} without it, the same", "Put dp_noise"),
    ],
)  # fmt: skip
def test_the_first_line_compares(without: int, with_it: int, headline: str, next_step: str) -> None:
    figures = {"eval_acc (clients' evaluation)": 0.5}
    before = AuditRecord(app="a", answers=[answer(without)], figures=figures)
    page = AuditRecord(app="a", answers=[answer(with_it)], defense="dp_noise", before=before)
    assert page.headline == headline and page.next_step.startswith(next_step)
    assert page.tone == ("leak" if with_it else "open")
    changed = replace(page, figures={"eval_acc (clients' evaluation)": 0.125})
    assert changed.headline == f"{headline}. The app's accuracy goes from 0.5 to 0.125"
    again = record_of_json(record_to_json(changed))
    assert render_audit(again) == render_audit(changed)
    shown = render_audit(changed)
    assert f"<td>{without} of 8; control 0 of 8</td><td>{with_it} of 8; control 0 of 8</td>" in shown


def test_a_record_within_a_record_holds_none() -> None:
    before = AuditRecord(app="a", answers=[answer(1)])
    text = record_to_json(AuditRecord(app="a", defense="pruning", before=before))
    told = json.loads(text)
    told["before"]["before"] = {}
    with pytest.raises(ValueError, match="is not part of what a sandbox sends"):
        record_of_json(json.dumps(told))
