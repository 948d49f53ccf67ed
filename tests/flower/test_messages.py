"""What travels: tensors without loss, and nothing private."""

from collections.abc import Sequence

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fl_privacy.defenses import ClientState, Defense, instahide, spn
from fl_privacy.errors import UserError
from fl_privacy.flower import LocalGrid, rounds_on_grid, simulated_client_app
from fl_privacy.flower.records import MEMORY, load_state, save_state, to_record, to_tensors
from tests.federation import harness


class RecordingGrid(LocalGrid):
    """Keeps all bytes that a wire would have seen."""

    def __init__(self, clients: Sequence[int], defense: Defense = harness.HEAD) -> None:
        super().__init__(clients, simulated_client_app(harness.clients(defense=defense)))
        self.wire = bytearray()
        self.private: list[ClientState] = []

    def deliver(self, messages: Sequence[Message]) -> list[Message]:
        replies = super().deliver(messages)
        self.private += [load_state(context.state) for context in self.contexts.values()]
        for message in [*messages, *replies]:
            for part in get_all_nested_objects(message).values():
                self.wire += part.deflate()
        return replies


def recorded(defense: Defense) -> tuple[RecordingGrid, harness.Recording]:
    """Train two rounds over a grid that notes what goes through it."""
    grid, recording = RecordingGrid(range(harness.CLIENTS), defense), harness.Recording()
    audit, interceptor = harness.probes(1), recording.interceptor()
    recording.follow(rounds_on_grid(grid, harness.server(), rounds=2, audit=audit, interceptor=interceptor))
    return grid, recording


PRIVATE = {
    "head": (harness.HEAD, ("private/private.weight", "private/private.bias"), {"memory/rounds"}),
    "spn": (spn(), tuple(f"private/out.spn.{name}" for name in ("weight", "bias", "codes")), set()),
    "spn of three layers": (
        spn(widths=[9, 7]),
        tuple(
            f"private/out.spn.{name}"
            for name in (
                "weight",
                "bias",
                "codes",
                *(f"before.{k}.{part}" for k in (0, 1) for part in ("weight", "bias")),
            )
        ),
        set(),
    ),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_private_values_are_in_no_message(name: str) -> None:
    defense, values, rest = PRIVATE[name]
    grid, recording = recorded(defense)

    sent = recording.observations[0].sent.parameters["conv.weight"]
    assert sent.numpy().tobytes() in grid.wire, "the search finds what is sent"
    assert b"conv.weight" in grid.wire
    kept = [state.tensors for state in grid.private if state.tensors]
    assert len(kept) >= 2 * harness.CLIENTS, "of every round"
    for private in kept:
        assert private.keys() == {*values, *rest}
        for value in values:
            assert private[value].numpy().tobytes() not in grid.wire
    for word in (b"private", b"memory", b"spn", b"before"):
        assert word not in grid.wire


KEPT_IMAGES = {"exchanged": (harness.DATA, "exchange/noise"), "instahide": (instahide(), "instahide/images")}


@pytest.mark.parametrize(("defense", "name"), KEPT_IMAGES.values(), ids=KEPT_IMAGES.keys())
def test_what_a_defense_keeps_of_the_examples_is_in_no_message(defense: Defense, name: str) -> None:
    grid, _ = recorded(defense)

    for context in grid.contexts.values():
        kept = load_state(context.state).tensors[name]
        for example in kept:
            assert example.numpy().tobytes() not in grid.wire
    assert name.partition("/")[0].encode() not in grid.wire


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).T,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(5).double(),
        torch.randn(5).half(),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.tensor([float("nan"), float("-inf"), -0.0]),
        torch.ones(3, requires_grad=True),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)}",
)
def test_tensors_come_back_as_they_went(tensor: torch.Tensor) -> None:
    back = to_tensors(to_record({"a.b": tensor}))["a.b"]

    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.contiguous().numpy().tobytes() == tensor.detach().contiguous().numpy().tobytes()


def test_a_dtype_that_numpy_lacks_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match="convert it to float32"):
        to_record({"w": torch.ones(1, dtype=torch.bfloat16)})


def test_a_state_is_kept_and_found_again() -> None:
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    assert load_state(context.state).tensors == {}
    state = ClientState({"spn/head.weight": torch.randn(2, 2), "count": torch.tensor(3)})

    save_state(context.state, state)

    harness.assert_same_tensors(load_state(context.state).tensors, state.tensors)
    assert list(context.state) == [MEMORY]
