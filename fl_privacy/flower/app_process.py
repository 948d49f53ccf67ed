"""An app in a process of its own, without network, key or ledger, which answers to the gate alone."""

import logging
import os
import time

from flwr.app import Context, Message

from fl_privacy.errors import UserError
from fl_privacy.flower.inside.serialized import context_bytes, context_of, message_from_parts, message_parts
from fl_privacy.site.gate.apart import LARGEST_WORD, Apart
from fl_privacy.site.gate.isolation import Isolation, Wishes
from fl_privacy.site.gate.policy import AppLimits
from fl_privacy.site.gate.rules import RefusedError

logger: logging.Logger = logging.getLogger(__name__)
LOAD_SECONDS = 600.0
MORE = 64 << 20  # bytes allowed for a reply and the app's state in addition to twice the message


class Cell:
    """An installed ``ClientApp`` (``package.module:attribute``) in a process that is started when it is needed."""

    def __init__(self, app: str, limits: AppLimits) -> None:
        self.app, self.limits = app, limits
        self.held: Isolation | None = None
        self._apart: Apart | None = None

    def start(self) -> Isolation:
        """Start the process and load the app; ``UserError`` if it can't be isolated as required, or can't be loaded."""
        self.close()
        wishes = Wishes(
            temporary="",
            reads=tuple(map(str, self.limits.reads)),
            writes=tuple(map(str, self.limits.writes)),
            sealed=True,
            most_bytes=self.limits.most_bytes,
            most_processes=self.limits.most_processes,
        )
        variables = {name: os.environ[name] for name in self.limits.environment if name in os.environ}
        try:
            self._apart = Apart("fl_privacy.cli.gated_app", wishes, variables)
            self.held = self._loaded(self._apart)
            return self.held
        except (OSError, UserError, ValueError, TypeError) as error:
            self.close()
            said = "said something else; repair it."  # the app's code wrote between the two answers
            if isinstance(error, OSError):
                raise UserError(
                    "--app is expected to have a process of its own, but the system has none to give"
                    f" ({error.strerror}); end others, or make room."
                ) from error
            if isinstance(error, RefusedError):
                said = f"does not answer: {error}."
            elif isinstance(error, UserError):
                raise
            raise UserError(f"--app is expected to be loaded, but {self.app} {said}") from error

    def _loaded(self, apart: Apart) -> Isolation:
        deadline = time.monotonic() + LOAD_SECONDS
        held = apart.begin({"app": self.app}, deadline)
        logger.warning("%s", held.in_words())
        if self.limits.required and not held.is_enough:
            raise UserError(
                f"app.isolation is expected to be had, but is not: {held.in_words()} Say isolation: where_possible to"
                " run the app all the same."
            )
        (reason,) = apart.receive(LARGEST_WORD, deadline)
        if reason:
            raise UserError(reason.decode(errors="replace"))
        return held

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the app's reply, and put its state into ``context``.

        A process that fails, is late or sends anything but one answer is ended, with a ``RefusedError``.
        """
        if self._apart is None or not self._apart.is_quiet:
            try:
                self.start()
            except UserError as error:
                raise RefusedError("isolation", str(error)) from error
        apart = self._apart
        assert apart is not None
        asked = [context_bytes(context), *message_parts(message)]
        deadline = time.monotonic() + self.limits.seconds
        try:
            apart.send(asked, deadline)
            failed, state, *reply = apart.receive(2 * sum(map(len, asked)) + MORE, deadline)
            answer = None if failed else message_from_parts(reply)
            kept = context_of(state).state
        except Exception as error:  # any error that malformed bytes raise
            self.close()
            if isinstance(error, RefusedError):
                raise
            raise RefusedError("app", f"it replied what is no message: {type(error).__name__}: {error}") from error
        context.state = kept
        if answer is None:
            raise RefusedError("app", failed.decode(errors="replace")[:1000])
        return answer

    def close(self) -> None:
        """End the process with everything it has started; a second call does nothing."""
        apart, self._apart = self._apart, None
        if apart is not None:
            apart.close()
