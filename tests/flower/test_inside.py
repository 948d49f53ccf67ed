"""Flower's inside, a test for each thing that is leant on: when a new Flower breaks one, its name says what."""

import ast
import inspect
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import flwr
import pytest
from flwr.app import Context, Message, RecordDict, UserConfig as NodeConfig

import fl_privacy
from fl_privacy.flower.inside import legacy, supernode
from fl_privacy.flower.inside.identity import Run, identify_process
from tests.sources import nodes_of

PACKAGE = Path(fl_privacy.__file__).parent
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp")


def imports(path: Path) -> set[str]:
    """List the modules that a file imports from."""
    found = set()
    for node in nodes_of(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def test_the_inside_is_touched_in_one_folder_alone() -> None:
    touching = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for module in imports(path)
        if module.split(".")[0] == "flwr" and not module.startswith(PUBLIC)
    }

    assert touching
    assert {Path(path).parent.as_posix() for path in touching} == {"flower/inside"}


def test_the_version_is_one_that_is_supported() -> None:
    major, minor = (int(part) for part in flwr.__version__.split(".")[:2])

    assert (major, minor) >= (1, 41)
    assert major < 2


def test_messages_can_be_made_in_a_process_that_flower_did_not_start() -> None:
    identify_process()

    message = Message(RecordDict(), 7, "query")

    assert message.metadata.dst_node_id == 7
    assert "_message_id" in message.metadata.__dict__, "LocalGrid numbers messages by it"


def test_a_run_of_no_federation_can_be_made() -> None:
    assert Run.create_empty(run_id=1).run_id == 1


def test_a_context_takes_a_node_config_and_keeps_state() -> None:
    context = Context(
        run_id=1, node_id=2, node_config=NodeConfig({"a": 1}), state=RecordDict(), run_config=NodeConfig()
    )

    assert context.node_config["a"] == 1


def test_numpy_clients_become_legacy_clients() -> None:
    assert isinstance(legacy.NumPyClient().to_client(), legacy.LegacyClient)


def test_secagg_has_the_workflow_and_the_stages_that_the_rounds_lean_on() -> None:
    workflow = legacy.SecAggPlusWorkflow(
        num_shares=1.0,
        reconstruction_threshold=0.5,
        max_weight=10.0,
        clipping_range=8.0,
        quantization_range=2**22,
        timeout=1.0,
    )

    assert callable(workflow)
    assert list(inspect.signature(legacy.secaggplus_mod).parameters)[:2] == ["msg", "ctxt"]
    assert legacy.SecAggKey.MASKED_PARAMETERS
    assert legacy.RECORD_KEY_CONFIGS


def test_legacy_records_keep_the_keys_that_the_workflow_reads() -> None:
    assert legacy.WorkflowKey.CURRENT_ROUND
    assert legacy.MAIN_CONFIGS_RECORD != legacy.MAIN_PARAMS_RECORD


def test_parameters_go_there_and_back() -> None:
    array = legacy.parameters_to_ndarrays(legacy.ndarrays_to_parameters([__import__("numpy").arange(3.0)]))[0]

    assert array.tolist() == [0.0, 1.0, 2.0]


def test_a_supernode_s_messages_can_be_asked_for() -> None:
    node = supernode.SuperNodeAddress("127.0.0.1:1", bytes(32))
    client = node.client(patient=False)
    wanted = supernode.AcquireTaskRequest(supported_task_types=[supernode.TaskType.CLIENT_APP])

    with pytest.raises(supernode.httpx.TransportError):
        client.AcquireTask(wanted)
    assert wanted.supported_task_types == ["flwr-clientapp"]


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (supernode.pull_task_input, ["client"]),
        (supernode.push_message, ["client", "message", "context"]),
        (supernode.push_task_output, ["client", "context", "sub_status", "details"]),
    ],
)
def test_a_message_is_pulled_and_its_reply_pushed_as_expected(function: object, parameters: list[str]) -> None:
    assert callable(function)
    assert list(inspect.signature(function).parameters) == parameters


def test_a_supernode_leaves_answering_to_others_who_know_its_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert supernode.run_supernode(["--help"]) == supernode.Ended(0, not_admitted=False, lost="")

    said = capsys.readouterr().out
    for option in ("--isolation", "--superexec-auth-secret-file", "--port", "--node-config"):
        assert option in said


FAILED = "Server error '500 Internal Server Error' for url 'http://127.0.0.1:9092/v1/fleet/send-node-heartbeat'"


def heartbeat_that_dies() -> None:
    """As Flower's, to which a SuperLink whose database is locked has replied once."""

    def send() -> bool:
        raise RuntimeError(FAILED + "\nFor more information")

    signal.signal(signal.SIGINT, lambda number, frame: sys.exit(0))  # so does Flower
    supernode.HeartbeatSender(send).start()
    time.sleep(30)
    pytest.fail("the node goes on without its heartbeats")


def messages_that_end() -> None:
    """As Flower's loop, which logs what ended it and returns."""
    logging.getLogger("flwr").error(RuntimeError(FAILED))


@pytest.mark.parametrize("node", [heartbeat_that_dies, messages_that_end])
def test_a_node_that_gets_no_more_messages_ends(node: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", node)
    hook, interrupted = threading.excepthook, signal.getsignal(signal.SIGINT)
    try:
        assert supernode.run_supernode([]) == supernode.Ended(1, not_admitted=False, lost=FAILED)
    finally:
        signal.signal(signal.SIGINT, interrupted)
    assert threading.excepthook is hook


def test_a_superlink_that_fails_while_a_node_joins_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def join() -> None:
        logging.getLogger("flwr").error(
            "Exit Code: 600\nFailed to initialize the connection to the SuperLink.\n%s", FAILED
        )
        raise SystemExit(1)

    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", join)
    assert supernode.run_supernode([]) == supernode.Ended(1, not_admitted=True, lost="")
