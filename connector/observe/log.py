"""Lines for people: one per failure, one block per crash.

Failures are data; this is the only place that makes them into text for a terminal. Three rules hold for every line:

* Text from outside (request ids, engine ids, messages of exceptions) never reaches the terminal raw: control
  characters are escaped and the length is bounded, so that no peer can forge a line or flood the log with one.
* A burst is shortened, and says so. A dead prefill engine may fail a thousand requests in a second; the first lines
  say everything that there is to say, and the trace holds every single one.
* A client that goes away is not a failure of the system; it is logged at debug level and takes no other line's place.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable

from connector.wire.bounded import shorten
from statemachine.failures import AbortedByClient, Failure

LINES_PER_WINDOW = 30
"""Failures that are logged within one window; the others are counted."""

WINDOW_SECONDS = 10.0

SUBJECT_LENGTH_MAX = 200
SENTENCE_LENGTH_MAX = 1000
"""Longest texts of one line, in characters."""

TRACEBACK_LINES_AT_START = 50
TRACEBACK_LINES_AT_END = 150
TRACEBACK_LINE_LENGTH_MAX = 500
"""Bounds on a logged traceback; what it leaves out is in the middle."""

_LOGGER_NAME = "vllm.nixl_actor_connector"

Now = Callable[[], float]
"""A monotonic clock, in seconds."""


def get_logger() -> logging.Logger:
    """The connector's logger.

    It lies below `vllm` because that is the only name for which vLLM sets up a handler and a level (and which follows
    VLLM_LOGGING_LEVEL); lines of any other logger below the level warning would be lost, and the rest unformatted.
    """
    return logging.getLogger(_LOGGER_NAME)


class FailureLog:
    """One line per failure: subject, kind, sentence. For use by one thread; called with a subject and why it failed.

    At most `LINES_PER_WINDOW` lines within `WINDOW_SECONDS`. When that is reached one line says that more are being
    left out, and the next failure after the window is preceded by one that says how many were.

    Args:
        engine_id, rank: who writes; in every line, because engines often share a terminal.
        now: monotonic clock in seconds.
    """

    def __init__(self, engine_id: str, rank: int, *, now: Now = time.monotonic) -> None:
        self._writer = f"{shorten(engine_id, SUBJECT_LENGTH_MAX)} rank {rank}"
        self._now = now
        self._window_end = now() + WINDOW_SECONDS
        self._lines = 0
        self._suppressed = 0

    def __call__(self, subject: str, failure: Failure) -> None:
        if isinstance(failure, AbortedByClient):
            self._write(logging.DEBUG, subject, failure)
            return
        self._roll_window()
        if self._lines < LINES_PER_WINDOW:
            self._lines += 1
            self._write(logging.WARNING, subject, failure)
            return
        if self._suppressed == 0:
            get_logger().warning(
                "[%s] %d failures within %g s; further ones are only counted until that time is over",
                self._writer,
                LINES_PER_WINDOW,
                WINDOW_SECONDS,
            )
        self._suppressed += 1

    def _roll_window(self) -> None:
        now = self._now()
        if now < self._window_end:
            return
        if self._suppressed:
            get_logger().warning("[%s] %d more failures were not logged", self._writer, self._suppressed)
        self._window_end = now + WINDOW_SECONDS
        self._lines = 0
        self._suppressed = 0

    def _write(self, level: int, subject: str, failure: Failure) -> None:
        logger = get_logger()
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "[%s] %s: %s: %s",
                self._writer,
                shorten(subject, SUBJECT_LENGTH_MAX),
                failure.kind,
                shorten(str(failure), SENTENCE_LENGTH_MAX),
            )


def log_crash(actor_name: str, error: BaseException) -> None:
    """One error entry with the traceback: `actor_name` raised `error`, which is a bug.

    The traceback is part of the message, not `exc_info`, because the text of an exception may come from outside. Each
    of its lines is escaped, bounded and marked with a bar, so that none can be mistaken for an entry of its own.
    """
    lines = "".join(traceback.format_exception(error)).rstrip("\n").split("\n")
    shown = "\n".join("  | " + shorten(line, TRACEBACK_LINE_LENGTH_MAX) for line in _without_middle(lines))
    get_logger().error("%s crashed; please report this:\n%s", shorten(actor_name, SUBJECT_LENGTH_MAX), shown)


def _without_middle(lines: list[str]) -> list[str]:
    """The start tells where it ran, the end what was raised; what is between them may be very long."""
    left_out = len(lines) - TRACEBACK_LINES_AT_START - TRACEBACK_LINES_AT_END
    if left_out <= 0:
        return lines
    return [
        *lines[:TRACEBACK_LINES_AT_START],
        f"... {left_out} lines left out ...",
        *lines[-TRACEBACK_LINES_AT_END:],
    ]
