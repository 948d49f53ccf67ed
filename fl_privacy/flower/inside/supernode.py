"""A SuperNode's messages, answered by one lasting process instead of one for each message."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore import interceptors as asking_as
from flwr.supercore.constant import TaskType
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fl_privacy.federation.replies import Failure, attempt

logger: logging.Logger = logging.getLogger(__name__)

APP_RAISED = 2
"""Flower's error code for an exception in a ClientApp."""

POLL_SECONDS = 0.1
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
COMPONENT = "flwr-clientapp"


@dataclass(frozen=True)
class SuperNodeAddress:
    """Address HOST:PORT of a SuperNode's Runtime API, and the secret of ``--superexec-auth-secret-file``."""

    address: str
    secret: bytes

    def client(self, *interceptors: Any, patient: bool = True) -> RuntimeHttpClient:
        """Connect to it; a patient connection retries."""
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,
            root_certificates=None,
            interceptors=[asking_as.RuntimeVersionHttpInterceptor(component_name=COMPONENT), *interceptors],
            retry_invoker=make_simple_http_retry_invoker() if patient else None,
        )


@dataclass(frozen=True)
class Ended:
    """Outcome of a SuperNode's process.

    Attributes:
        not_admitted: ``True`` if the SuperLink does not know its key, still counts the node as connected, or failed.
        lost: reason why an admitted node no longer gets messages, in a line; empty if it ended as asked.
    """

    status: int
    not_admitted: bool
    lost: str = ""


class _Listening(logging.Handler):
    """Notices that the SuperLink did not activate the node, and that a part of the SuperNode has ended.

    One reply of HTTP status 500, for example from a locked SuperLink database, ends Flower's message loop or heartbeat
    thread: the node keeps asking, but gets no messages.
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


def run_supernode(arguments: Sequence[str]) -> Ended:
    """Run Flower's own ``flower-supernode`` in this process, until it ends."""
    from flwr.supernode.cli import flower_supernode  # noqa: PLC0415  (its signal handlers are this process's)

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


def answer_messages(node: SuperNodeAddress, app: Callable[[Message, Context], Message]) -> NoReturn:
    """Answer messages by ``app``, one after the other, without executing any code of the run's bundle."""
    protected = frozenset({ACQUIRE})
    authority = asking_as.SuperExecAuthHttpInterceptor(master_secret=node.secret, protected_methods=protected)
    asking = node.client(authority, patient=False)
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    while True:
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
        token = found.token
        if isinstance(lost := attempt(lambda: _answer(node, token, app)), Failure):  # noqa: B023
            logger.warning("A message could not be answered, its run may have ended: %s", lost.reason)


def _answer(node: SuperNodeAddress, token: str, app: Callable[[Message, Context], Message]) -> None:
    client = node.client(asking_as.RuntimeTokenHttpInterceptor(token))

    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError as error:
            return not error.response.is_server_error
        return True

    alive = HeartbeatSender(beat)
    alive.start()
    context: Context | None = None
    status, details = SubStatus.COMPLETED, ""
    try:
        message, context, _, _ = pull_task_input(client)
        reply = attempt(lambda: app(message, context))
        if isinstance(reply, Failure):
            status, details = SubStatus.FAILED, reply.reason
            reply = Message(Error(APP_RAISED, reply.reason), reply_to=message)
        push_message(client, reply, context)
    finally:
        push_task_output(client, context, status, details)
        if alive.is_running:
            alive.stop()
        client.close()
