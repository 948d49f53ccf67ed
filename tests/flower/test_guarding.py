"""The guard as a mod, and the installed SecAgg+ asked for both kinds of key shares."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp

from fl_privacy.attacks.malicious import Fishing, Inconsistent
from fl_privacy.federation.replies import WITHHELD
from fl_privacy.flower.grids import FIRST_NODE, LocalGrid
from fl_privacy.flower.inside.identity import identify_process
from fl_privacy.flower.mods.guard_mod import guard_mod, secagg_refusal
from fl_privacy.flower.records import to_record
from fl_privacy.types import ModelState
from tests.flower.secagg_check import try_double_listing

from ..malicious import rounds


def answers(values: ModelState, grid: LocalGrid) -> Any:
    arrays = to_record({**values.parameters, **values.buffers})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    (reply,) = grid.send_and_receive([Message(content, FIRST_NODE, "train", group_id="1")])
    return reply


def test_a_mod_refuses_what_the_guard_refuses() -> None:
    model = rounds.network("lenet")
    app = ClientApp(
        mods=[guard_mod(model, lambda context: rounds.digits().train.batch(rounds.shuffled(rounds.digits().train, 16)))]
    )

    @app.train()
    def train(message: Message, context: Any) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    grid, state = LocalGrid([0], app), ModelState.of(model)
    assert answers(state, grid).has_content()
    for attack, reason in ((Fishing(), "rows of classifier.weight are zero"), (Inconsistent(client=1), "is zero")):
        reply = answers(attack.informed(rounds.public()).craft(model, state, 0), grid)
        assert reply.has_error()
        assert reason in reply.error.reason
        assert "\n" not in reply.error.reason
    other = answers(ModelState.of(rounds.network("lenet", seed=1)), grid)
    assert "was replaced since the round before" in other.error.reason
    misshapen = ModelState({**state.parameters, "classifier.bias": torch.zeros(3)})
    assert "use the architecture agreed on" in answers(misshapen, grid).error.reason
    assert answers(state, grid).has_content()


def asked_node(app: ClientApp, values: ModelState, round: int, folder: Path, kind: str = "train") -> Message:
    """Ask a deployed node, as it starts."""
    node = UserConfig({"partition-id": 0, "fl-privacy-state": str(folder)})
    context = Context(1, 1, node, RecordDict(), UserConfig({}))
    arrays = to_record({**values.parameters, **values.buffers})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": round})})
    return app(Message(content, 1, kind), context)


def test_how_a_model_answers_the_examples_is_one_counted_question_a_round(tmp_path: Path, caplog: Any) -> None:
    model, state = rounds.network("lenet"), ModelState.of(rounds.network("lenet"))
    batch = rounds.digits().train.batch(rounds.shuffled(rounds.digits().train, 16))
    identify_process()

    def app(examples: Any) -> ClientApp:
        made = ClientApp(mods=[guard_mod(model, examples)])
        for decorate in (made.train(), made.evaluate()):
            decorate(lambda message, _: Message(RecordDict(), reply_to=message))
        return made

    guarded = app(lambda context: batch)
    dead = ModelState({n: p - 9 if n.endswith("bias") else p for n, p in state.parameters.items()}, state.buffers)
    for kind in ("train", "evaluate"):
        said = [asked_node(guarded, dead, 1, tmp_path, kind) for _ in range(2)]
        assert [reply.error.reason for reply in said] == [f"The guard refused: {WITHHELD}"] * 2
        assert "answered before" in asked_node(guarded, state, 1, tmp_path, kind).error.reason
        assert asked_node(guarded, state, 2, tmp_path, kind).has_content()
        assert asked_node(app(None), dead, 1, tmp_path, kind).has_content(), "its weights look like any others"
    assert "of this client's examples through" in caplog.text


def test_crafted_models_are_not_evaluated_either(tmp_path: Path) -> None:
    model = rounds.network("lenet")
    app = ClientApp(mods=[guard_mod(model)])
    app.evaluate()(lambda message, _: Message(RecordDict(), reply_to=message))
    crafted = Fishing().informed(rounds.public()).craft(model, ModelState.of(model), 0)
    identify_process()
    assert "rows of classifier.weight are zero" in asked_node(app, crafted, 1, tmp_path, "evaluate").error.reason


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"stage": "setup", "share_number": 5, "threshold": 2}, True),
        ({"stage": "setup", "share_number": 4, "threshold": 2}, True),
        ({"stage": "setup", "share_number": 5, "threshold": 3}, False),
        ({"stage": "unmask", "active_node_id_list": [1, 2], "dead_node_id_list": [2]}, True),
        ({"stage": "unmask", "active_node_id_list": [1, 1], "dead_node_id_list": [2]}, True),
        ({"stage": "unmask", "active_node_id_list": [1, 3], "dead_node_id_list": [2]}, False),
    ],
)
def test_what_a_secagg_server_may_ask(asked: dict[str, Any], refused: bool) -> None:
    from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage  # noqa: PLC0415

    values = {getattr(Key, name.upper()): value for name, value in asked.items()}
    values[Key.STAGE] = getattr(Stage, asked["stage"].upper())
    assert (secagg_refusal(ConfigRecord(values)) is not None) == refused


def test_both_kinds_of_shares_are_given_by_no_guarded_client() -> None:
    """Whether clients without the guard give them is the installed version's business: see the page on its limits."""
    rng = np.random.default_rng(0)
    uploads = [rng.normal(size=(40, 5)) for _ in range(5)]
    guarded = try_double_listing(uploads, victim=1, guarded=True)
    assert guarded.recovered is None
    assert all("is named as active and as dropped" in reason for reason in guarded.refusals)
    bare = try_double_listing(uploads, victim=1)
    if bare.recovered is None:
        assert bare.refusals
    else:
        assert bare.error < 1e-4
        assert np.abs(bare.mean - np.mean(uploads, 0)).max() < 1e-4
