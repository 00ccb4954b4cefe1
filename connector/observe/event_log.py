"""Lines about what becomes of peers, leases and requests.

Failures are data; this is the only place that makes them into text for a terminal. What is said when:

    a peer            connected; lost or out of reach: what was noticed first, what to do; back    info
    a request         it ended otherwise than loaded: kind, request, engine, age, what to do       warning
                      it has waited for WAIT_SAID_AFTER_SECONDS: in vLLM's queue; or for what,
                      and how much longer                                                          info
    a lease on P      nobody released it in time: who held it, for how long, what to do            warning
    the quarantine    its limit is reached, and nothing is read any more; blocks have come back    warning
    what others send  it makes no sense, or names what is not lent                                 warning

The first word of a warning is the kind of the failure, which is also the `reason` in the trace. The sentence of the
failure says what happened; what to do about it (`advice_of`) is put behind it here, and nowhere else in a line.
What followed from a lost peer is in the lines of the requests that it cost; the line of the peer has the cause.

`EventLog` hears of peers and leases as the recorder does: as an observer of what the cores step. It is told of the rare
steps only (of connections, and ends of leases), so a request that is served costs no call. `FailureLog` is told of
failures by the code that reports them. A client that goes away is not a failure of the system; it is logged at debug
level and takes no other line's place.

The rules for all lines are in `log`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from connector.clock import NS_PER_SECOND
from connector.observe.advice import advice_of, why_command
from connector.observe.log import SUBJECT_LENGTH_MAX, Now, Window, get_logger
from connector.wire.bounded import shorten
from statemachine import lease, peer, remote_engine
from statemachine.failures import ADVICE_FOLLOWS, AbortedByClient, Failure, LeaseExpired, PeerFailure, PeerLeaving
from statemachine.kernel import Event
from statemachine.trace import LogSteps

if TYPE_CHECKING:
    from connector.clock import Clock

WAIT_SAID_AFTER_SECONDS = 2.0
"""A request that waits longer is said once while it waits: for blocks in vLLM's queue, and then for its KV."""

SENTENCE_LENGTH_MAX = 1000
ADVICE_LENGTH_MAX = 600
TEXT_LENGTH_MAX = 1900
"""Longest texts of one line, in characters. The last one has room for a sentence with what to do, and an engine."""

_NAMES_ENGINES = f"{ADVICE_FOLLOWS}nixl-actor ps names the engines whose READs do not end"


class FailureLog:
    """One warning per failure: kind, subject, sentence, what to do. For use by one thread; called with a subject and
    why it failed.

    Args:
        engine_id, rank: who writes; in every line, because engines often share a terminal.
        now: monotonic clock in seconds.
    """

    def __init__(self, engine_id: str, rank: int, *, now: Now = time.monotonic) -> None:
        self._writer = _writer(engine_id, rank)
        self._window = Window(self._writer, logging.WARNING, now)

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
        self._window = Window(self._writer, logging.INFO, now)

    def observer_of_peer(self, describe: Callable[[], str]) -> LogSteps:
        """For the core of one remote engine. `describe` names it and says where it is."""
        return _PeerObserver(self, self._clock, describe)

    def observer_of_lease(self, where: Callable[[str], str]) -> LogSteps:
        """To be told of every other state of a lease. `where`: a decode engine is, in words; empty: nobody knows."""

        def observe(machine: str, subject: Hashable, before: object, event: Event | None, after: object) -> None:
            assert isinstance(after, lease.Lease)
            # One that lends blocks back for a fixed time may well end unread.
            if after.state is not lease.State.EXPIRED or after.may_end_unread:
                return
            failure = LeaseExpired(
                lent_seconds=(self._clock.now_ns() - after.granted_ns) / NS_PER_SECOND,
                blocks=after.blocks,
                holders=lease.holders_in_words(after, where),
            )
            self._log_failure(f"request {after.name.request_id}", failure)

        return observe

    def waits(self, subject: str, what: str) -> None:
        """A request has waited for a while; `what` says for what, and until when."""
        self.write("requests that still wait", f"{subject} still waits: {what}")

    def queued(self, subject: str, request_id: str) -> None:
        """A request has waited for a while before vLLM has allocated blocks for it."""
        what = "in vLLM's queue, for blocks to load its KV into"
        self.write(
            "requests in vLLM's queue", f"{subject} still waits: {what}{ADVICE_FOLLOWS}{why_command(request_id)}"
        )

    def finds_no_room(self, subject: str, tokens: int, quarantined: int, lent_back: int) -> None:
        """A request needs more blocks than are left beside those of which it is not known when they come back."""
        kept = f"{quarantined} blocks are in quarantine and {lent_back} are lent back"
        what = f"its {tokens} tokens do not fit into the KV cache while {kept}; others are served before it"
        self.write(
            "requests that wait for room", f"{subject} waits: {what}{ADVICE_FOLLOWS}nixl-actor ps", logging.WARNING
        )

    def loads_nothing(self, subject: str) -> None:
        """A request whose load has failed finds no room: vLLM keeps for it what is free, and loads need that."""
        why = "its load has failed, and no room is left to compute its prompt"
        what = "until it has its blocks, no KV is loaded, and prompts are computed here"
        self.write("loads that have failed", f"{subject}: {why}; {what}{ADVICE_FOLLOWS}nixl-actor ps", logging.WARNING)

    def loads_again(self) -> None:
        """All of these have their blocks, or have ended."""
        self.write(
            "loads that have failed",
            "KV is loaded again: no request whose load has failed waits for room",
            logging.WARNING,
        )

    def leaves(self, engine: str, grace_seconds: float) -> None:
        """An engine is to end."""
        self.write(
            "engines that leave", f"engine {engine} leaves: what it lends can be read for {grace_seconds:.0f} s at most"
        )

    def quarantine(self, blocks: int, limit_blocks: int, *, is_full: bool) -> None:
        """The limit of quarantined blocks was reached, or there are fewer again. `blocks`: how many there are."""
        if is_full:
            text = (
                f"{blocks} KV blocks are in quarantine, because READs that have not ended may still write into them, "
                f"and quarantine_limit allows {limit_blocks}: from now on nothing is read from any engine, so that the "
                "rest of the pool is not lost too. Requests whose KV is elsewhere fail at once (QuarantineFull; "
                "kv_load_failure_policy says what follows), all others are served. Another line says when blocks have "
                "come back"
                f"{_NAMES_ENGINES}"
            )
            self.write("quarantine full", text, logging.WARNING)
        else:
            text = f"blocks have come back from quarantine, {blocks} are left of which {limit_blocks} are allowed"
            self.write("quarantine over", f"{text}: KV is read again", logging.WARNING)

    def blocks_quarantined(self, blocks: int, in_all: int) -> None:
        """On D's scheduler side: so many blocks are in quarantine from this step on, and with those of before."""
        what = f"{blocks} blocks are quarantined until their READs have ended, {in_all} in all"
        self.write("quarantined", f"{what}{_NAMES_ENGINES}", logging.WARNING)

    def given_back(self, blocks: int, left: int) -> None:
        """So many have come back with this step."""
        self.write("quarantine lifted", f"{blocks} quarantined blocks are free again, {left} are left")

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
            self._write(
                "given up", "is given up: another one is at its address, it was idle for long, or we stop or sleep"
            )

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
        """Say that the engine has ended. That it cannot be reached from now on is not said again."""
        self._away_since_ns, self._last_kind = self._clock.now_ns(), failure.kind
        self._write("left", "has ended or sleeps, as it had said")

    def _write(self, cause: str, text: str) -> None:
        self._log.write(cause, f"engine {self._describe()} {text}")


_WAITS: dict[remote_engine.WaitsFor, str] = {
    "peer": "for the connection to that engine, which is {peer}",
    "checksums": "for the checksums of its blocks (verify), which that engine has not said yet",
    "reads": "for {reads} READ(s) from that engine to end",
    "check": "all its bytes are here, and are compared with the checksums of that engine (verify)",
    "proof": "all its bytes are here, and that engine is asked whether it still kept the blocks",
    "quiescence": "it has failed ({failure}), and {reads} READ(s) may still write into its blocks",
}


def request_subject(request_id: str, age_seconds: float, detail: str = "") -> str:
    """What lines call a request that this engine has known for so long. `detail` tells which one, or what becomes of
    it."""
    which = f"{request_id}, {detail}" if detail else request_id
    return f"request {which}, known for {age_seconds:.1f} s"


def describe_wait(waiting: remote_engine.RequestView, peer_state: peer.State) -> str:
    """What a request waits for that has not ended."""
    if waiting.waits_for == "peer" and peer_state is peer.State.HANDSHAKING:
        return "for the handshake with that engine"
    value = waiting.value
    failure = value.failure.kind if value.failure is not None else "a failure"
    return _WAITS[waiting.waits_for].format(peer=peer_state.value, reads=len(value.awaited), failure=failure)


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
