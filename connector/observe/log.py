"""How lines for people are written: the logger, how many of them there may be, and what is said of a bug.

Every module that logs does so with `get_logger`: at start what runs, with which options, what is registered and where
it listens. What becomes of peers, leases and requests is in `event_log`. A bug is said with its traceback
(`log_crash`), at level error; what a peer does wrong never has one.

Two rules hold for every line:

* Text from outside (request ids, engine ids, messages of exceptions) never reaches the terminal raw: control
  characters are escaped and the length is bounded, so that no peer can forge a line or flood the log with one.
* A burst is shortened, and says so. A dead prefill engine may fail a thousand requests in a second; the first lines
  say everything that there is to say, and the trace holds every single one. It leaves room for what fails otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from connector.wire.bounded import shorten

LINES_PER_WINDOW = 30
"""Lines of one kind of log within one window; the others are counted."""

LINES_PER_CAUSE = 5
"""How many of these lines may be about one kind of failure with one engine."""

WINDOW_SECONDS = 10.0

CAUSES_COUNTED_MAX = 16
"""Pairs of kind and engine whose lines are counted apart within a window; the others are counted together."""

STRANGERS_COUNTED_MAX = 1024
QUIET_SECONDS = 600.0
"""Addresses whose misdeeds are counted apart, and when one is forgotten that does nothing more."""

SUBJECT_LENGTH_MAX = 200
"""Longest text that says what a line is about, in characters."""

TRACEBACK_LINES_AT_START = 50
TRACEBACK_LINES_AT_END = 150
TRACEBACK_LINE_LENGTH_MAX = 500
"""Bounds on a logged traceback; what it leaves out is in the middle."""

_LOGGER_NAME = "vllm.nixl_actor_connector"

Now = Callable[[], float]
"""A monotonic clock, in seconds."""


class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines cost nobody more than the line.

    Python's own handlers keep what goes wrong with a stream to themselves, as long as they can say so on stderr; with
    that closed, or with a handler of somebody else's, an error of writing would come out of the call. Lines are
    written in the middle of everything, also on the engine thread, so it ends here.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        # The frame that a line is said to come from is the caller's, not this one.
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})


def is_said(count: int) -> bool:
    """Whether there is a line for the `count`-th of what others may cause as often as they like: for each power of two,
    so that nobody fills the log."""
    return count & (count - 1) == 0


def get_logger() -> SafeLogger:
    """The connector's logger; its methods never raise.

    It lies below `vllm` because that is the only name for which vLLM sets up a handler and a level (and which follows
    VLLM_LOGGING_LEVEL); lines of any other logger below the level warning would be lost, and the rest unformatted.
    """
    return _logger


_logger = SafeLogger(logging.getLogger(_LOGGER_NAME), {})


class Window:
    """How many lines may be written now. `admits` says whether this one may, and counts it if not.

    At most `LINES_PER_WINDOW` lines within `WINDOW_SECONDS`, and `LINES_PER_CAUSE` of them for one cause. The first
    line that is left out of a cause is replaced by one that says so; the next line after the window, which may come
    much later, is preceded by one that says how many were left out, and how long ago.
    """

    def __init__(self, writer: str, level: int, now: Now) -> None:
        self._writer = writer
        self._level = level
        self._now = now
        self._end = now() + WINDOW_SECONDS
        self._lines = 0
        self._lines_of: dict[str, int] = {}
        self._left_out: dict[str, int] = {}
        self._left_out_at = 0.0

    def admits(self, cause: str) -> bool:
        self._roll()
        if cause not in self._lines_of and len(self._lines_of) >= CAUSES_COUNTED_MAX:
            cause = "other causes"
        # Also one that comes when no line is left is counted apart, and is one of so many.
        lines = self._lines_of.setdefault(cause, 0)
        if self._lines < LINES_PER_WINDOW and lines < LINES_PER_CAUSE:
            self._lines += 1
            self._lines_of[cause] = lines + 1
            return True
        if cause not in self._left_out:
            said = "%s: further lines are only counted until %g s are over [%s]"
            get_logger().log(self._level, said, cause, WINDOW_SECONDS, self._writer)
        self._left_out[cause] = self._left_out.get(cause, 0) + 1
        self._left_out_at = self._now()
        return False

    def _roll(self) -> None:
        now = self._now()
        if now < self._end:
            return
        if self._left_out:
            counted = ", ".join(f"{cause} {lines}" for cause, lines in self._left_out.items())
            total = sum(self._left_out.values())
            said = "%d more lines were left out: %s; the last one %.0f s ago [%s]"
            get_logger().log(self._level, said, total, counted, now - self._left_out_at, self._writer)
        self._end = now + WINDOW_SECONDS
        self._lines = 0
        self._lines_of.clear()
        self._left_out.clear()


class StrangerLog:
    """What strangers do to a listener: a line for each power of two of one address.

    So a port scanner neither fills the log nor keeps an engine out of it that is turned away because its key is
    missing. An address of which nothing was heard for QUIET_SECONDS is counted from one again.

    Args:
        where: which listener.
        now: monotonic clock in seconds.
    """

    def __init__(self, where: str, *, now: Now = time.monotonic) -> None:
        self._where = where
        self._now = now
        self._window = Window(where, logging.WARNING, now)
        # How often, and when last. The latest comes last.
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def __call__(self, stranger: str, sentence: str) -> None:
        """`stranger`: an address, or a word for those whose address is not known."""
        now = self._now()
        count, heard_at = self._counts.pop(stranger, (0, now))
        count = 1 if now - heard_at > QUIET_SECONDS else count + 1
        self._counts[stranger] = count, now
        if len(self._counts) > STRANGERS_COUNTED_MAX:
            self._counts.popitem(last=False)
        if is_said(count) and self._window.admits(stranger):
            get_logger().warning("%s: %s (%s, number %d)", self._where, shorten(sentence, 500), stranger, count)


class ProblemLog:
    """What is wrong with files that are looked at again and again: each problem once, as long as it lasts."""

    def __init__(self) -> None:
        self._lasting: Mapping[str, str] = {}

    def __call__(self, problems: Mapping[str, str], so: str = "") -> None:
        """`problems`: all that there are now, in sentences, by what has them; `so`: what follows from each."""
        for name, problem in problems.items():
            if self._lasting.get(name) != problem:
                get_logger().error("%s; %s", problem, so)
        self._lasting = problems


def log_crash(actor_name: str, error: BaseException) -> None:
    """One error entry with the traceback: `actor_name` raised `error`, which is a bug.

    The traceback is part of the message, not `exc_info`, because the text of an exception may come from outside. Each
    of its lines is escaped, bounded and marked with a bar, so that none can be mistaken for an entry of its own.
    """
    lines = "".join(traceback.format_exception(error)).rstrip("\n").split("\n")
    shown = "\n".join("  | " + shorten(line, TRACEBACK_LINE_LENGTH_MAX) for line in _without_middle(lines))
    get_logger().error("%s crashed; please report this:\n%s", shorten(actor_name, SUBJECT_LENGTH_MAX), shown)


class CrashCount:
    """For what is only looked at (figures, records, spans), which must cost nobody anything: a bug in it ends here,
    with a line for the first, the second, the fourth and so on, because it may come with every step.

    Args:
        write: a line with a traceback: what raised it, what it raised.
        count: called each time.
    """

    def __init__(
        self, write: Callable[[str, BaseException], None] = log_crash, count: Callable[[], None] = lambda: None
    ) -> None:
        self._write = write
        self._count = count
        self._crashes = 0

    def note(self, what: str, error: BaseException) -> None:
        self._crashes += 1
        self._count()
        if is_said(self._crashes):
            self._write(f"{what} (number {self._crashes})", error)


def root_cause(error: BaseException) -> BaseException:
    """What was raised first: trio wraps what its tasks raise in groups, and those in errors of its own."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


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
