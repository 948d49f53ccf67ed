"""Answer a SuperNode's messages in one lasting process instead of one for each message."""

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore import interceptors as asking_as
from flwr.supercore.constant import TaskType
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign, decode_base64url
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.flower.inside.identity import TURN

logger: logging.Logger = logging.getLogger(__name__)

APP_RAISED = 2  # Flower's error code for an exception in a ClientApp

MOST_SIGNATURES = 100
POLL_SECONDS = 0.1
PUSH_SECONDS = 0.5
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
COMPONENT = "flwr-clientapp"


@dataclass(frozen=True)
class SuperNodeAddress:
    """Address HOST:PORT of a SuperNode's Runtime API, and the secret of ``--superexec-auth-secret-file``."""

    address: str
    secret: bytes

    def client(self, *interceptors: Any, patient: bool = True) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,
            root_certificates=None,
            interceptors=[asking_as.RuntimeVersionHttpInterceptor(component_name=COMPONENT), *interceptors],
            retry_invoker=make_simple_http_retry_invoker() if patient else None,
        )


@dataclass(frozen=True)
class Ended:
    """Result of a SuperNode's process."""

    status: int  # exit status
    not_admitted: bool  # ``True`` if the SuperLink failed, does not know the node's key, or counts it as connected
    lost: str = ""  # reason why an admitted node gets no more messages, in a line; empty if it ended as asked


class _Listening(logging.Handler):
    """Log handler that notices if the SuperLink refuses this node, or if a thread of the SuperNode ends.

    One HTTP status 500, as from a locked SuperLink database, silently ends Flower's message loop or heartbeat thread.
    """

    refused, lost = False, ""

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, Exception):
            self.lost = self.lost or _in_a_line(record.msg)
        self.refused = self.refused or any(sign in record.getMessage() for sign in _NOT_ACTIVATED)

    def end_node(self, died: threading.ExceptHookArgs) -> None:
        if died.exc_value is not None and not self.lost:
            self.lost = _in_a_line(died.exc_value)
            os.kill(os.getpid(), signal.SIGINT)


_NOT_ACTIVATED = (
    f"[code: {int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)}]",
    "Failed to initialize the connection to the SuperLink.\nServer error '500 ",
)


def _in_a_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


class _Ready:
    def __init__(self, state: Any, replies: Sequence[Message]) -> None:
        self._state, self._replies = state, replies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_messages_legacy(self, **_: Any) -> Sequence[Message]:
        return self._replies


def take_more_messages() -> None:
    """Let this process's SuperNode fetch messages while earlier ones are unanswered."""
    from flwr.supernode import start_client_internal as flower_node  # noqa: PLC0415

    pull, push = flower_node._pull_and_store_message, flower_node._push_messages
    unanswered = [0]

    def pull_next(**given: Any) -> int | None:
        run = pull(**given)
        unanswered[0] += run is not None
        return 0 if run is None and unanswered[0] else run  # 0: replies may be there, without a new message

    def push_ready(state: Any, **given: Any) -> None:
        if replies := state.get_messages_legacy(is_reply=True):
            unanswered[0] -= len(replies)
            push(state=_Ready(state, replies), **given)  # type: ignore[arg-type]
        else:
            time.sleep(PUSH_SECONDS)

    flower_node._pull_and_store_message = pull_next  # type: ignore[assignment]
    flower_node._push_messages = push_ready  # type: ignore[assignment]


def run_supernode(arguments: Sequence[str], *, holds: bool = False) -> Ended:
    """Run ``flower-supernode`` until it ends; if ``holds``, it fetches messages while earlier ones are unanswered."""
    from flwr.supernode.cli import flower_supernode  # noqa: PLC0415  (its signal handlers are this process's)

    if holds:
        take_more_messages()
    flower, listening = logging.getLogger("flwr"), _Listening()
    flower.propagate = False  # it writes its own lines
    flower.addHandler(listening)
    usual, threading.excepthook = threading.excepthook, listening.end_node
    sys.argv = ["flower-supernode", *arguments]
    try:
        flower_supernode()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Ended(int(bool(listening.lost)) or status, listening.refused, listening.lost)
    finally:
        threading.excepthook = usual
        flower.removeHandler(listening)
    return Ended(1, False, listening.lost or "it no longer asks for messages")


@dataclass(frozen=True)
class Brought:
    """A run's app as the node received it: the bundle of its code, with the signatures that Flower Hub attached."""

    content: bytes
    signatures: tuple[tuple[bytes, bytes], ...]

    @classmethod
    def of(cls, fab: Fab) -> "Brought":
        found = list[tuple[bytes, bytes]]()
        for text in fab.verifications.values():
            with suppress(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError):
                content = json.loads(text)
                signed = create_message_to_sign(hashlib.sha256(fab.content).digest(), content["signed_at"])
                found.append((signed, decode_base64url(content["signature"])))
        return cls(fab.content, tuple(found[:MOST_SIGNATURES]))


Answerer = Callable[[Message, Context, Brought], Message | None]
"""(message, context, bundle) -> reply, or ``None`` if the message has to be given again a little later."""


def answer_messages(
    node: SuperNodeAddress, app: Answerer, rest: Callable[[], None] = lambda: None, at_once: int = 0
) -> NoReturn:
    """Answer a SuperNode's messages using ``app``, without end.

    ``rest``: called between two messages, and while there are none. ``at_once``: number of messages that may be in
    progress, each in a thread; threads compute in turn (``inside.identity.TURN``). If ``app`` returns ``None``, it gets
    the message again later. ``at_once=0``: the calling thread answers, and ``app`` must not return ``None``.
    """
    pool, tasks = ThreadPoolExecutor(at_once) if at_once else None, dict[_Task, Future[bool]]()
    protected = frozenset({ACQUIRE})
    authority = asking_as.SuperExecAuthHttpInterceptor(master_secret=node.secret, protected_methods=protected)
    asking = node.client(authority, patient=False)
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    while True:
        for task in [task for task, answer in tasks.items() if answer.done()]:
            if not tasks.pop(task).result() and pool:
                tasks[task] = pool.submit(task.is_answered, app)
        with TURN:
            rest()
        try:
            found = asking.AcquireTask(wanted)
        except (httpx.TransportError, httpx.HTTPStatusError) as error:  # not there yet, or busy
            if isinstance(error, httpx.HTTPStatusError) and not error.response.is_server_error:
                raise
            time.sleep(1.0)
            continue
        if not (found.HasField("task") and found.token):
            time.sleep(POLL_SECONDS)
            continue
        task = _Task(node.client(asking_as.RuntimeTokenHttpInterceptor(found.token)))
        if pool:
            tasks[task] = pool.submit(task.is_answered, app)
        else:
            task.is_answered(app)


class _Task:
    """A message to answer, with heartbeats that reserve it for this process."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        self._client = client
        self._alive = HeartbeatSender(self._beat)
        self._alive.start()
        self._given: tuple[Message, Context, Brought] | None = None

    def _beat(self) -> bool:
        try:
            self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError as error:
            return not error.response.is_server_error
        return True

    def is_answered(self, app: Answerer) -> bool:
        """Send the reply of ``app``, or log why it failed; return ``False`` if the message must be tried again."""
        with TURN:
            done = attempt(lambda: self._answered(app))
        if isinstance(done, Failure):
            logger.warning("A message could not be answered, its run may have ended: %s", done.reason)
            return True
        return done

    def _answered(self, app: Answerer) -> bool:
        context: Context | None = None
        status, details, waits = SubStatus.COMPLETED, "", False
        try:
            if self._given is None:
                message, context, _, fab = pull_task_input(self._client)
                self._given = message, context, Brought.of(fab)
            message, context, brought = self._given
            reply = attempt(lambda: app(message, context, brought))
            if waits := reply is None:
                return False
            if isinstance(reply, Failure):
                status, details = SubStatus.FAILED, reply.reason
                reply = Message(Error(APP_RAISED, reply.reason), reply_to=message)
            push_message(self._client, reply, context)
        finally:
            if not waits:
                push_task_output(self._client, context, status, details)
                if self._alive.is_running:
                    self._alive.stop()
                self._client.close()
        return True
