"""Nothing that a server sees of a defended client's reply tells a bit of an example, beside what noise covers."""

from pathlib import Path

import pytest
from flwr.app import Message

from fl_privacy.federation.replies import WITHHELD
from tests.flower.oracles import OTHERS, PRIVATE, ordinary, questions, seen, worlds
from tests.selection import few

ASKED = 8


ONE_OF_EACH = 14


@pytest.mark.parametrize("name", few(PRIVATE, 3, all_but_fuzz=ONE_OF_EACH))
def test_nothing_of_a_private_client_s_reply_tells_a_bit(name: str, tmp_path: Path) -> None:
    dark, bright = worlds(PRIVATE[name], name, tmp_path)
    assert all(world.ask(ordinary()).has_content() for world in (dark, bright))
    answered = 0
    for question in questions(ASKED):
        first = [seen(world.ask(question)) for world in (dark, bright)]
        assert first[0] == first[1]
        answered += "error" not in first[0]
        for other in (question, ordinary()):
            again = [seen(world.ask(other, again=True)) for world in (dark, bright)]
            assert again[0] == again[1]
    assert answered >= ASKED // 2, "a client that refuses everything tells nothing, and trains nobody"


@pytest.mark.parametrize("name", few(PRIVATE, 3, all_but_fuzz=ONE_OF_EACH))
def test_an_evaluation_of_a_private_client_tells_no_bit_either(name: str, tmp_path: Path) -> None:
    both = worlds(PRIVATE[name], name, tmp_path)
    for question in (ordinary("evaluate"), *questions(3, ("evaluate",))):
        dark, bright = (seen(world.ask(question)) for world in both)
        assert dark == bright
        assert "loss" not in str(dark.get("figures")) or name.startswith("train_step"), "which states NaN"


@pytest.mark.parametrize("name", few(OTHERS, 4, all_but_fuzz=len(OTHERS)))
def test_errors_of_other_clients_are_alike_and_counted(name: str, tmp_path: Path) -> None:
    dark, bright = worlds(OTHERS[name], name, tmp_path)
    for question in questions(ASKED):
        first = [world.ask(question) for world in (dark, bright)]
        reasons = [reply.error.reason if reply.has_error() else "" for reply in first]
        assert reasons[0] == reasons[1] or all(not reason or reason.endswith(WITHHELD) for reason in reasons)
        again = [world.ask(ordinary(), again=True) for world in (dark, bright)]
        assert again[0].has_error() == again[1].has_error()
        if any(reply.has_content() for reply in first):
            assert all("answered before" in reply.error.reason for reply in again), "also where the first one failed"


def figures(reply: Message) -> dict[str, float]:
    return {key: float(v) for record in reply.content.metric_records.values() for key, v in record.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", few(OTHERS, 4))
def test_an_evaluation_is_answered_once_a_round_in_three_digits(name: str, tmp_path: Path) -> None:
    _, bright = worlds(OTHERS[name], name, tmp_path)
    assert bright.ask(ordinary()).has_content()
    first = bright.ask(ordinary("evaluate"))
    assert first.has_content(), first.error.reason
    told = figures(first)
    assert told["loss"] > 0 and all(value == float(f"{value:.3g}") for value in told.values())
    other = next(iter(questions(1, ("evaluate",))))
    assert "answered before" in bright.ask(other, again=True).error.reason
    if (
        "its state" not in name and "itself" not in name
    ):  # asked itself, with the node's state alone, which keeps no answer
        assert figures(bright.ask(ordinary("evaluate"), again=True)) == told
