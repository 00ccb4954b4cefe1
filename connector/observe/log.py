"""Lines for people: how the engine is set up, what becomes of its peers, and every request that went wrong.

Failures are data; this is the only place that makes them into text for a terminal. What is said when:

    at start            what runs, with which options; what is registered, where it listens        info
    a peer              connected; lost or out of reach: what was noticed first, what to do; back  info
    a request           it ended otherwise than loaded: kind, request, engine, age, what to do     warning
                        it has waited for WAIT_SAID_AFTER_SECONDS: in vLLM's queue; or for what,
                        and how much longer                                                    info
    a lease on P        nobody released it in time: who held it, for how long, what to do          warning
    the quarantine      its limit is reached, and nothing is read any more; blocks have come back  warning
    what others send    it makes no sense, or names what is not lent                               warning
    a bug               with its traceback; what a peer does wrong never has one                   error

The first word of a warning is the kind of the failure, which is also the `reason` in the trace. The sentence of the
failure says what happened; what to do about it (`advice_of`) is put behind it here, and nowhere else in a line.
What followed from a lost peer is in the lines of the requests that it cost; the line of the peer has the cause.

`EventLog` hears of peers and leases as the recorder does: as an observer of what the cores step. It is told of the
rare steps only (of connections, and ends of leases), so a request that is served costs no call. `FailureLog` is told of
failures by whoever carries out their report.

Three rules hold for every line:

* Text from outside (request ids, engine ids, messages of exceptions) never reaches the terminal raw: control
  characters are escaped and the length is bounded, so that no peer can forge a line or flood the log with one.
* A burst is shortened, and says so. A dead prefill engine may fail a thousand requests in a second; the first lines
  say everything that there is to say, and the trace holds every single one. It leaves room for what fails otherwise.
* A client that goes away is not a failure of the system; it is logged at debug level and takes no other line's place.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from connector.clock import NS_PER_SECOND
from connector.observe.advice import advice_of
from connector.wire.bounded import shorten
from statemachine import lease, peer, remote_engine
from statemachine.failures import ADVICE_FOLLOWS, AbortedByClient, Failure, LeaseExpired, PeerFailure, PeerLeaving
from statemachine.kernel import Event
from statemachine.trace import LogSteps

if TYPE_CHECKING:
    from connector.clock import Clock

LINES_PER_WINDOW = 30
"""Lines of one kind of log within one window; the others are counted."""

LINES_PER_CAUSE = 5
"""Of these, lines of one kind of failure with one engine."""

WINDOW_SECONDS = 10.0

CAUSES_COUNTED_MAX = 16
"""Pairs of kind and engine whose lines are counted apart within a window; the others are counted together."""

STRANGERS_COUNTED_MAX = 1024
QUIET_SECONDS = 600.0
"""Addresses whose misdeeds are counted apart, and when one is forgotten that does nothing more."""

WAIT_SAID_AFTER_SECONDS = 2.0
"""A request that waits longer is said once while it waits: for blocks in vLLM's queue, and then for its KV."""

SUBJECT_LENGTH_MAX = 200
SENTENCE_LENGTH_MAX = 1000
ADVICE_LENGTH_MAX = 600
TEXT_LENGTH_MAX = 1900
"""Longest texts of one line, in characters. The last one has room for a sentence with what to do, and an engine."""

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


class _Window:
    """How many lines may be written now. `admits` says whether this one may, and counts it if not.

    At most `LINES_PER_WINDOW` lines within `WINDOW_SECONDS`, and `LINES_PER_CAUSE` of them for one cause. The first
    line that is left out of a cause is replaced by one that says so; the next line after the window is preceded by one
    that says how many were left out.
    """

    def __init__(self, writer: str, level: int, now: Now) -> None:
        self._writer = writer
        self._level = level
        self._now = now
        self._end = now() + WINDOW_SECONDS
        self._lines = 0
        self._lines_of: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

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
        return False

    def _roll(self) -> None:
        now = self._now()
        if now < self._end:
            return
        if self._left_out:
            counted = ", ".join(f"{cause} {lines}" for cause, lines in self._left_out.items())
            total = sum(self._left_out.values())
            get_logger().log(self._level, "%d more lines were left out: %s [%s]", total, counted, self._writer)
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
        self._window = _Window(where, logging.WARNING, now)
        # How often, and when last. Who was heard of last comes last.
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


class FailureLog:
    """One warning per failure: kind, subject, sentence, what to do. For use by one thread; called with a subject and
    why it failed.

    Args:
        engine_id, rank: who writes; in every line, because engines often share a terminal.
        now: monotonic clock in seconds.
    """

    def __init__(self, engine_id: str, rank: int, *, now: Now = time.monotonic) -> None:
        self._writer = _writer(engine_id, rank)
        self._window = _Window(self._writer, logging.WARNING, now)

    def __call__(self, subject: str, failure: Failure) -> None:
        if isinstance(failure, AbortedByClient):
            level = logging.DEBUG
        else:
            level = logging.WARNING
            if not self._window.admits(_cause(failure)):
                return
        logger = get_logger()
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "%s: %s: %s [%s]",
                failure.kind,
                shorten(subject, SUBJECT_LENGTH_MAX),
                _with_advice(failure),
                self._writer,
            )


class EventLog:
    """What becomes of peers and leases, and requests that wait. For use by one thread.

    Args:
        engine_id, rank: who writes.
        clock: that of the cores.
        log_failure: where a lease that has expired is said.
        now: monotonic clock in seconds, for the bound on lines.
    """

    def __init__(
        self,
        engine_id: str,
        rank: int,
        *,
        clock: Clock,
        log_failure: Callable[[str, Failure], None],
        now: Now = time.monotonic,
    ) -> None:
        self._writer = _writer(engine_id, rank)
        self._clock = clock
        self._log_failure = log_failure
        self._window = _Window(self._writer, logging.INFO, now)

    def observer_of_peer(self, describe: Callable[[], str]) -> LogSteps:
        """For the core of one remote engine. `describe` names it and says where it is."""
        return _PeerObserver(self, self._clock, describe)

    def observe_lease(
        self, machine: str, subject: Hashable, before: object, event: Event | None, after: object
    ) -> None:
        """Told of every other state of a lease. One that lends blocks back for a fixed time may well end unread."""
        assert isinstance(after, lease.Lease)
        if after.state is not lease.State.EXPIRED or not (after.is_renewable or after.holders):
            return
        failure = LeaseExpired(
            lent_seconds=(self._clock.now_ns() - after.granted_ns) / NS_PER_SECOND,
            blocks=after.blocks,
            holders=holders_in_words(after),
        )
        self._log_failure(f"request {after.name.request_id}", failure)

    def waits(self, subject: str, what: str) -> None:
        """A request has waited for a while; `what` says for what, and until when."""
        self.write("waiting", f"{subject} still waits: {what}")

    def queued(self, subject: str, request_id: str) -> None:
        """A request has waited for a while before vLLM has allocated blocks for it."""
        what = "in vLLM's queue, for blocks to load its KV into"
        self.write("queued", f"{subject} still waits: {what}{ADVICE_FOLLOWS}nixl-actor why {shorten(request_id)}")

    def finds_no_room(self, subject: str, tokens: int, quarantined: int, lent_back: int) -> None:
        """A request needs more blocks than are left beside those that nobody knows when they come back."""
        kept = f"{quarantined} blocks are in quarantine and {lent_back} are lent back"
        what = f"its {tokens} tokens do not fit into the KV cache while {kept}; others are served before it"
        self.write("no room", f"{subject} waits: {what}{ADVICE_FOLLOWS}nixl-actor ps", logging.WARNING)

    def loads_nothing(self, subject: str) -> None:
        """A request whose load has failed finds no room: vLLM keeps for it what is free, and loads need that."""
        why = "its load has failed, and no room is left to compute its prompt"
        what = "until it has its blocks, no KV is loaded, and prompts are computed here"
        self.write("loads", f"{subject}: {why}; {what}{ADVICE_FOLLOWS}nixl-actor ps", logging.WARNING)

    def loads_again(self) -> None:
        """All of these have their blocks, or have ended."""
        self.write("loads", "KV is loaded again: no request whose load has failed waits for room", logging.WARNING)

    def leaves(self, engine: str, grace_seconds: float) -> None:
        """An engine is to end."""
        self.write("leaving", f"engine {engine} leaves: what it lends can be read for {grace_seconds:.0f} s at most")

    def quarantine(self, blocks: int, limit_blocks: int, *, is_full: bool) -> None:
        """The limit of quarantined blocks was reached, or there are fewer again. `blocks`: how many there are."""
        if is_full:
            text = (
                f"{blocks} KV blocks are in quarantine, because READs that have not ended may still write into them, "
                f"and quarantine_limit allows {limit_blocks}: from now on nothing is read from any engine, so that the "
                "pool does not drain. Requests whose KV is elsewhere fail at once (QuarantineFull; what that means is "
                "up to kv_load_failure_policy), all others are served. Another line says when blocks have come back"
            )
            self.write("quarantine full", text, logging.WARNING)
        else:
            text = f"blocks have come back from quarantine, {blocks} are left of which {limit_blocks} are allowed"
            self.write("quarantine over", f"{text}: KV is read again", logging.WARNING)

    def kept_aside(self, blocks: int) -> None:
        """On D's scheduler side: so many blocks are in quarantine from this step on."""
        self.write("quarantined", f"{blocks} blocks are quarantined until their READs have ended", logging.WARNING)

    def given_back(self, blocks: int) -> None:
        """So many have come back with this step."""
        self.write("quarantine lifted", f"{blocks} quarantined blocks are free again")

    def write(self, cause: str, text: str, level: int = logging.INFO) -> None:
        """One line, unless there were too many with this cause."""
        if self._window.admits(cause):
            get_logger().log(level, "%s [%s]", shorten(text, TEXT_LENGTH_MAX), self._writer)


class _PeerObserver:
    """Hears of every other state of one connection, and says what became of it.

    An outage begins with the first failure that is noticed and ends when the engine is connected again. Within it a
    failed attempt is said again only when it fails otherwise than the one before: that tells more of the cause.
    """

    def __init__(self, log: EventLog, clock: Clock, describe: Callable[[], str]) -> None:
        self._log = log
        self._clock = clock
        self._describe = describe
        self._handshake_began_ns = 0
        self._away_since_ns: int | None = None
        self._last_kind: str | None = None

    def __call__(self, machine: str, subject: Hashable, before: object, event: Event | None, after: object) -> None:
        if before is None:
            return
        assert isinstance(before, peer.Peer)
        assert isinstance(after, peer.Peer)
        came_from, is_in = before.state, after.state
        if is_in is peer.State.HANDSHAKING:
            self._handshake_began_ns = self._clock.now_ns()
        elif is_in is peer.State.READY:
            self._say_connected()
        elif came_from is peer.State.HANDSHAKING and isinstance(event, peer.HandshakeFailed):
            self._say_away("cannot be reached", event.failure)
        elif came_from is peer.State.READY and isinstance(event, peer.ConnectionSuspect):
            if isinstance(event.failure, PeerLeaving):
                self._say_left(event.failure)
            else:
                self._say_away("is lost", event.failure)
        elif isinstance(event, peer.Retired):
            self._write("given up", "is given up: another one is at its address, it was idle for long, or we stop")

    def _say_connected(self) -> None:
        now_ns = self._clock.now_ns()
        took = f"the handshake took {(now_ns - self._handshake_began_ns) / NS_PER_SECOND:.3f} s"
        if self._away_since_ns is None:
            self._write("connected", f"is connected; {took}")
        else:
            self._write("back", f"is back after {(now_ns - self._away_since_ns) / NS_PER_SECOND:.1f} s; {took}")
        self._away_since_ns = self._last_kind = None

    def _say_away(self, what: str, failure: Failure) -> None:
        if self._away_since_ns is None:
            self._away_since_ns = self._clock.now_ns()
        if failure.kind != self._last_kind:
            self._last_kind = failure.kind
            self._write(failure.kind, f"{what}: {failure.kind}: {_with_advice(failure)}")

    def _say_left(self, failure: PeerLeaving) -> None:
        """That it cannot be reached from now on is no news."""
        self._away_since_ns, self._last_kind = self._clock.now_ns(), failure.kind
        self._write("left", "has ended, as it had said")

    def _write(self, cause: str, text: str) -> None:
        self._log.write(cause, f"engine {self._describe()} {text}")


_WAITS: dict[remote_engine.WaitsFor, str] = {
    "peer": "for the connection to that engine, which is {peer}",
    "checksums": "for the checksums of its blocks (verify), which that engine has not said yet",
    "reads": "for {reads} READ(s) from that engine to end",
    "proof": "all its bytes are here, and that engine is asked whether it still kept the blocks",
    "quiescence": "it has failed ({failure}), and {reads} READ(s) may still write into its blocks",
}


def describe_wait(waiting: remote_engine.RequestView, peer_state: peer.State) -> str:
    """What a request waits for that has not ended."""
    if waiting.waits_for == "peer" and peer_state is peer.State.HANDSHAKING:
        return "for the handshake with that engine"
    value = waiting.value
    failure = value.failure.kind if value.failure is not None else "a failure"
    return _WAITS[waiting.waits_for].format(peer=peer_state.value, reads=len(value.in_flight), failure=failure)


def log_crash(actor_name: str, error: BaseException) -> None:
    """One error entry with the traceback: `actor_name` raised `error`, which is a bug.

    The traceback is part of the message, not `exc_info`, because the text of an exception may come from outside. Each
    of its lines is escaped, bounded and marked with a bar, so that none can be mistaken for an entry of its own.
    """
    lines = "".join(traceback.format_exception(error)).rstrip("\n").split("\n")
    shown = "\n".join("  | " + shorten(line, TRACEBACK_LINE_LENGTH_MAX) for line in _without_middle(lines))
    get_logger().error("%s crashed; please report this:\n%s", shorten(actor_name, SUBJECT_LENGTH_MAX), shown)


class CrashCount:
    """For what is only looked at (figures, records, spans), which must cost nobody anything: a mistake in it ends here,
    with a line for the first, the second, the fourth and so on, because it may come with every step.

    Args:
        write: a line with a traceback: what raised it, what it raised.
    """

    def __init__(self, write: Callable[[str, BaseException], None] = log_crash) -> None:
        self._write = write
        self._crashes = 0

    def note(self, what: str, error: BaseException) -> None:
        self._crashes += 1
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


def _writer(engine_id: str, rank: int) -> str:
    return f"{shorten(engine_id, SUBJECT_LENGTH_MAX)} rank {rank}"


def _with_advice(failure: Failure) -> str:
    """What happened, and what to do about it."""
    advice = advice_of(failure)
    happened = str(failure).removesuffix(ADVICE_FOLLOWS + advice)
    return f"{shorten(happened, SENTENCE_LENGTH_MAX)}{ADVICE_FOLLOWS}{shorten(advice, ADVICE_LENGTH_MAX)}"


def _cause(failure: Failure) -> str:
    if isinstance(failure, PeerFailure):
        return f"{failure.kind} of engine {shorten(failure.peer)}"
    return failure.kind


def holders_in_words(ended: lease.Lease) -> str:
    """Who wanted its blocks, and how far each has come."""
    if not ended.holders:
        return "no decode engine has asked for it"
    held = "held by " + ", ".join(
        f"{holder.engine_id or 'built-in engines'} ({len(holder.released)} of {holder.ranks} ranks are done)"
        for holder in ended.holders
    )
    # Who holds it is alive, then: it is not the length of a lease that was too short.
    if not ended.is_renewable or ended.deadline_ns < ended.latest_ns:
        return held
    return f"{held}, and renewed until its limit (lease_limit_seconds, or the grace period of a drain)"
