"""Rounds over a grid that misbehaves: nodes that are missing, silent, dead, or of another federation."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Server, ServerPlan, plain_rounds, run_all
from fl_privacy.flower import Federated, LocalGrid, rounds_on_grid, simulated_client_app
from fl_privacy.flower.grids import FIRST_NODE
from tests.federation import harness

NODE_UNAVAILABLE = 5


def grid(clients: Sequence[int] = range(harness.CLIENTS)) -> LocalGrid:
    return LocalGrid(clients, simulated_client_app(harness.clients()))


def start(grid: LocalGrid, rounds: int = 2, **settings: Any) -> tuple[Server, harness.Recording]:
    server, recording = settings.pop("server", None) or harness.server(), harness.Recording()
    strategy = Federated(server=server, on_round=recording.reports.append, patience=0.3, **settings)
    strategy.start(grid, strategy.arrays(), num_rounds=rounds)
    return server, recording


def test_too_few_nodes_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(UserError, match=r"each of 3 clients is expected, but 0 are connected; start more SuperNodes"):
        start(LocalGrid([], ClientApp()))


@pytest.mark.parametrize("nodes", [2, 4])
def test_another_number_of_nodes_is_an_error_that_names_the_remedy(nodes: int) -> None:
    with pytest.raises(UserError, match=rf"of {nodes}; set federation.clients={nodes}, or start 3 SuperNodes"):
        start(grid(range(nodes)))


def test_a_node_without_a_partition_is_an_error() -> None:
    subject = grid()
    del subject.contexts[FIRST_NODE].node_config["partition-id"]

    with pytest.raises(UserError, match="expected to have the number partition-id in its node config"):
        start(subject)


def test_random_node_ids_and_replies_in_any_order_change_nothing() -> None:
    class Shuffled(LocalGrid):
        def get_node_ids(self) -> list[int]:
            return random.Random(1).sample(list(self.contexts), len(self.contexts))

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            return super().send_and_receive(list(messages)[::-1])

    subject = Shuffled(range(harness.CLIENTS), simulated_client_app(harness.clients()))
    subject.contexts = {7919 * (5 - node) % 1000: context for node, context in subject.contexts.items()}
    for node, context in subject.contexts.items():
        context.node_id = node

    shuffled, _ = start(subject)
    straight, _ = start(grid())

    harness.assert_same_state(shuffled.state, straight.state)


def test_a_silent_client_is_excluded() -> None:
    class Lossy(LocalGrid):
        def deliver(self, messages: Sequence[Message]) -> list[Message]:
            lost = [m for m in messages if m.metadata.message_type == "train" and m.metadata.dst_node_id == FIRST_NODE]
            return [reply for m in messages if m not in lost for reply in super(Lossy, self).deliver([m])]

    _, recording = start(Lossy(range(harness.CLIENTS), simulated_client_app(harness.clients())))

    assert recording.reports[0].excluded == {0: "no reply in time"}
    assert recording.reports[0].clients == (1, 2)


def test_an_error_on_behalf_of_a_dead_node_counts_against_its_client() -> None:
    """Flower's server answers for a node that died, with its own node id."""

    class Haunted(LocalGrid):
        def deliver(self, messages: Sequence[Message]) -> list[Message]:
            replies = super().deliver(messages)
            for i, message in enumerate(messages):
                if message.metadata.message_type == "train" and message.metadata.dst_node_id == FIRST_NODE + 2:
                    replies[i] = Message(Error(NODE_UNAVAILABLE, "the node is gone\n"), reply_to=message)
                    replies[i].metadata.__dict__["_src_node_id"] = 1
            return replies

    _, recording = start(Haunted(range(harness.CLIENTS), simulated_client_app(harness.clients())))

    assert recording.reports[1].excluded == {2: "the node is gone"}


def test_a_node_that_leaves_is_excluded_and_may_come_back_under_another_id() -> None:
    subject = grid()
    seen = []

    def on_round(report: Any) -> None:
        seen.append((report.clients, dict(report.excluded)))
        if report.round == 1:
            context = subject.contexts.pop(FIRST_NODE + 1)
            subject.gone = context  # type: ignore[attr-defined]
        if report.round == 2:
            context = subject.gone  # type: ignore[attr-defined]
            context.node_id = 77
            subject.contexts[77] = context

    strategy = Federated(server=harness.server(), on_round=on_round, patience=0.3)
    strategy.start(subject, strategy.arrays(), num_rounds=3)

    assert seen == [((0, 1, 2), {}), ((0, 2), {1: "its node is not connected"}), ((0, 1, 2), {})]


def test_a_reply_without_sense_is_excluded() -> None:
    app = simulated_client_app(harness.clients())

    def answer(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and context.node_id == FIRST_NODE:
            return Message(RecordDict({"x": ConfigRecord({"y": 1})}), reply_to=message)
        return app(message, context)

    _, recording = start(LocalGrid(range(harness.CLIENTS), answer))  # type: ignore[arg-type]

    assert list(recording.reports[0].excluded) == [0]
    assert "KeyError" in recording.reports[0].excluded[0]


def test_a_client_app_that_crashes_is_excluded() -> None:
    app = simulated_client_app(harness.clients())

    def answer(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and context.node_id == FIRST_NODE:
            raise MemoryError("out of memory")
        return app(message, context)

    _, recording = start(LocalGrid(range(harness.CLIENTS), answer))  # type: ignore[arg-type]

    assert recording.reports[0].excluded == {0: "MemoryError: out of memory"}


def test_probes_that_fail_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    app = simulated_client_app(harness.clients(faults=((2, "raises"),)))

    start(LocalGrid(range(harness.CLIENTS), app), rounds=1, audit=harness.probes(1))

    assert "The probe round-1/client-2/victim-0 failed: RuntimeError: the disk of this client" in caplog.text


def test_the_result_of_flower_is_the_model_of_the_server() -> None:
    server = harness.server(rules=ServerPlan(lr=0.5))
    strategy = Federated(server=server)

    result = strategy.start(grid(), strategy.arrays(), num_rounds=2)

    assert result.arrays is not None
    arrays = result.arrays.to_torch_state_dict()
    harness.assert_same_tensors({name: arrays[name] for name in server.state.parameters}, server.state.parameters)
    reference = harness.server(rules=ServerPlan(lr=0.5))
    unwatched = harness.Recording().interceptor()
    run_all(plain_rounds(reference, harness.clients(), rounds=2, audit=Audit(), interceptor=unwatched))
    harness.assert_same_state(server.state, reference.state)
    assert list(result.train_metrics_clientapp) == [1, 2]


def test_nodes_that_can_not_start_say_why() -> None:
    def answer(message: Message, context: Context) -> Message:
        raise FileNotFoundError("no data on this machine")

    with pytest.raises(UserError, match="but failed: FileNotFoundError: no data on this machine"):
        start(LocalGrid(range(harness.CLIENTS), answer))  # type: ignore[arg-type]


def test_a_stranger_that_joins_later_is_left_aside(caplog: pytest.LogCaptureFixture) -> None:
    subject = grid()

    def on_round(report: Any) -> None:
        stranger = LocalGrid([9], ClientApp()).contexts[FIRST_NODE + 9]
        subject.contexts[FIRST_NODE + 9] = stranger

    strategy = Federated(server=harness.server(), on_round=on_round, patience=0.3)
    strategy.start(subject, strategy.arrays(), num_rounds=2)

    assert "Node 1009 is left aside" in caplog.text
    assert "holds 9 of 1" in caplog.text


def replace_after(round: int, subject: LocalGrid, *, keep: bool, seen: list[Any]) -> Any:
    """After ``round`` another node, 77, claims the partition of the second one, which stays or leaves."""

    def on_round(report: Any) -> None:
        seen.append((report.clients, dict(report.excluded)))
        if report.round == round:
            old = subject.contexts[FIRST_NODE + 1]
            if not keep:
                del subject.contexts[FIRST_NODE + 1]
            config, state = dict(old.node_config), RecordDict()
            subject.contexts[77] = Context(run_id=1, node_id=77, node_config=config, state=state, run_config={})

    return on_round


@pytest.mark.parametrize(
    ("keep", "bound", "last"),
    [
        (True, False, ((0, 1, 2), {})),
        (True, True, ((0, 1, 2), {})),
        (False, False, ((0, 1, 2), {})),
        (False, True, ((0, 2), {1: "its node is not connected"})),
    ],
)
def test_a_partition_belongs_to_the_node_that_claimed_it_first(
    keep: bool, bound: bool, last: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Another node takes it over only when that one has left, and never where nodes are told apart by their keys."""
    asked: list[int] = []

    class Watched(LocalGrid):
        def deliver(self, messages: Sequence[Message]) -> list[Message]:
            asked.extend(m.metadata.dst_node_id for m in messages if m.metadata.message_type == "train")
            return super().deliver(messages)

    subject, seen = Watched(range(harness.CLIENTS), simulated_client_app(harness.clients())), list[Any]()
    on_round = replace_after(1, subject, keep=keep, seen=seen)
    strategy = Federated(server=harness.server(), on_round=on_round, patience=0.3, bound=bound)
    strategy.start(subject, strategy.arrays(), num_rounds=3)

    assert seen[-1] == last
    assert (77 in asked) == (not keep and not bound)
    assert ("Node 77 is left aside: partition 1, which it claims, belongs to node 1001" in caplog.text) != (77 in asked)


def test_a_node_that_answers_nonsense_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    app = simulated_client_app(harness.clients())

    def answer(message: Message, context: Context) -> Message:
        if context.node_id == 5:
            return Message(RecordDict({"x": ConfigRecord({"y": 1})}), reply_to=message)
        return app(message, context)

    subject = LocalGrid(range(harness.CLIENTS), answer)  # type: ignore[arg-type]
    subject.contexts = {
        5: Context(run_id=1, node_id=5, node_config={}, state=RecordDict(), run_config={}),
        **subject.contexts,
    }

    _, recording = start(subject)

    assert [report.clients for report in recording.reports] == [(0, 1, 2)] * 2
    assert "Node 5 is left aside" in caplog.text


def test_nodes_that_do_not_agree_with_the_server_on_what_is_simulated_are_refused() -> None:
    with pytest.raises(UserError, match="expected to be deployed, but the one of partition 0 is not"):
        start(grid(), simulated=False)


def test_the_time_of_a_round_is_handed_to_the_grid() -> None:
    waited: list[float | None] = []

    class Timed(LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            waited.append(timeout)
            return super().send_and_receive(messages, timeout=timeout)

    server, recording = harness.server(), harness.Recording()
    recording.follow(
        rounds_on_grid(
            Timed(range(harness.CLIENTS), simulated_client_app(harness.clients())),
            server,
            rounds=1,
            audit=harness.probes(1),
            interceptor=recording.interceptor(),
            timeout=7.0,
        )
    )

    assert set(waited[1:]) == {7.0}
