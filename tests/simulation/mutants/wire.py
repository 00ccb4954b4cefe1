"""Mutants of what lies under the actors: frames and notifications, clocks, timers, mailboxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import trio

from connector.runtime import clock, handshake, lease_keeper, listener, peer_actor
from connector.runtime.clock import NS_PER_SECOND, ClockSample
from connector.runtime.lease_keeper import LeaseKeeper
from connector.runtime.mailbox import Mailbox
from connector.runtime.timers import TimerQueue
from connector.wire.handshake import HandshakeError, HandshakeReply, decode_reply, encode_reply
from connector.wire.notifications import Heartbeat, Notification, Release, encode_heartbeats, encode_release
from statemachine.failures import WrongEngine
from tests.simulation.faults import Kind
from tests.simulation.mutants.actors import LONG_QUEUE, NOT_AN_ERROR_OF_THE_PRODUCT
from tests.simulation.mutants.mutant import Mutant, Patch, fault

REPLACEMENTS = tuple(fault(Kind.CRASH_NEW_ID, "p0", at, 0.05) for at in (1.0, 1.5, 2.0, 2.5, 3.0))
ANOTHER_MODEL = (fault(Kind.INCOMPATIBLE, "p0", 0.5, 3.0),)
GARBAGE = (fault(Kind.GARBAGE, "p0", 0.5, 1.0),)

# --- frames and notifications ---------------------------------------------------------------------------------------


def _let_bad_frames_through(patch: Patch) -> None:
    patch.attribute(listener, "BadFrame", NOT_AN_ERROR_OF_THE_PRODUCT)


def _parse_without_checks(patch: Patch) -> None:
    def parse(message: bytes) -> Notification:
        text = message.decode()
        if text.startswith("HB:"):
            return Heartbeat(tuple(text[3:].split(",")))
        request_id, _, consumers = text.rpartition(":")
        return Release(request_id, int(consumers))

    patch.attribute(lease_keeper, "parse_notification", parse)


def _talk_to_anybody(patch: Patch) -> None:
    def decode(frames: Sequence[bytes], *, peer: str, address: str, expected_hash: str | None) -> HandshakeReply:
        try:
            return decode_reply(frames, peer=peer, address=address, expected_hash=expected_hash)
        except HandshakeError as error:
            if not isinstance(error.failure, WrongEngine):
                raise
            return decode_reply(frames, peer=error.failure.found, address=address, expected_hash=expected_hash)

    patch.attribute(handshake, "decode_reply", decode)


def _any_hash_will_do(patch: Patch) -> None:
    def decode(frames: Sequence[bytes], *, peer: str, address: str, expected_hash: str | None) -> HandshakeReply:
        return decode_reply(frames, peer=peer, address=address, expected_hash=None)

    patch.attribute(handshake, "decode_reply", decode)


def _release_by_another_name(patch: Patch) -> None:
    def encode(request_id: str, consumers: int) -> bytes:
        return encode_release(f"cmpl-{request_id}", consumers)

    patch.attribute(peer_actor, "encode_release", encode)


def _announce_too_many_consumers(patch: Patch) -> None:
    patch.attribute(
        peer_actor, "encode_release", lambda request_id, consumers: encode_release(request_id, consumers + 1)
    )


def _beat_for_one(patch: Patch) -> None:
    def encode(request_ids: Iterable[str]) -> list[bytes]:
        return encode_heartbeats(list(request_ids)[:1])

    patch.attribute(peer_actor, "encode_heartbeats", encode)


WIRE = (
    Mutant(
        name="bad frame kills the listener",
        row=38,
        broken="a malformed handshake request raises in the listener's loop",
        apply=_let_bad_frames_through,
        faults=GARBAGE,
        oracle="health",
    ),
    Mutant(
        name="notifications unchecked",
        row=38,
        broken="a malformed notification raises in the lease keeper's loop",
        apply=_parse_without_checks,
        faults=GARBAGE,
        oracle="health",
    ),
    Mutant(
        name="any engine will do",
        row=66,
        broken="a handshake succeeds with whatever engine answers at the address",
        apply=_talk_to_anybody,
        faults=(*REPLACEMENTS, fault(Kind.LONG_QUEUE, "d0", 0.5, 3.0)),
        oracle="recovery",
    ),
    Mutant(
        name="any hash will do",
        row=16,
        broken="the hash of what two engines must have in common is not compared",
        apply=_any_hash_will_do,
        faults=ANOTHER_MODEL,
        oracle="bytes",
    ),
    Mutant(
        name="release by another name",
        row=53,
        broken="releases name the request as the decode engine calls it",
        apply=_release_by_another_name,
        oracle="handed back",
    ),
    Mutant(
        name="too many consumers announced",
        row=54,
        broken="a release says that one consumer more is to come",
        apply=_announce_too_many_consumers,
        oracle="handed back",
    ),
    Mutant(
        name="heartbeat for one",
        row=62,
        broken="of all requests that wait for an engine, a heartbeat names only the first",
        apply=_beat_for_one,
        faults=LONG_QUEUE,
        oracle="kept alive",
    ),
)

# --- clocks ---------------------------------------------------------------------------------------------------------


def _read_their_clock_as_ours(patch: Patch) -> None:
    patch.attribute(ClockSample, "earliest_local_ns", lambda self, remote_ns: remote_ns)


def _forget_the_round_trip(patch: Patch) -> None:
    earliest = ClockSample.earliest_local_ns

    def without_error(self: ClockSample, remote_ns: int) -> int:
        return earliest(self, remote_ns) + self.error_ns

    patch.attribute(ClockSample, "earliest_local_ns", without_error)


def _forget_drift(patch: Patch) -> None:
    patch.attribute(clock, "RELATIVE_DRIFT", 0.0)


def _answer_with_an_old_clock(patch: Patch) -> None:
    first: dict[bytes, float] = {}

    def encode(payload: bytes, clock_seconds: float) -> tuple[bytes, bytes]:
        return encode_reply(payload, first.setdefault(payload, clock_seconds))

    patch.attribute(listener, "encode_reply", encode)


class _WallClock:
    """What `Clock.wall` says, as if it were monotonic."""

    def __init__(self, real: clock.Clock) -> None:
        self._real = real

    def now_ns(self) -> int:
        return round(self._real.wall() * NS_PER_SECOND)

    def wall(self) -> float:
        return self._real.wall()


def _time_leases_by_the_wall(patch: Patch) -> None:
    original = LeaseKeeper.__init__

    def changed(self: LeaseKeeper, **arguments: Any) -> None:
        original(self, **arguments)
        self._clock = _WallClock(self._clock)

    patch.attribute(LeaseKeeper, "__init__", changed)


CLOCKS = (
    Mutant(
        name="deadline of another clock",
        row=9,
        broken="the end of a lease, stamped by the prefill engine's clock, is compared with the decode engine's",
        apply=_read_their_clock_as_ours,
        oracle="proof",
    ),
    Mutant(
        name="clock error ignored",
        row=9,
        broken="half the round trip, by which a measured clock may be wrong, is not taken off",
        apply=_forget_the_round_trip,
        faults=(fault(Kind.MESSAGE_DELAY, "p0>d0", 0.0, 4.0),),
        oracle="proof",
    ),
    Mutant(
        name="drift ignored",
        row=9,
        broken="clocks are taken to run equally fast since they were compared",
        apply=_forget_drift,
        oracle="proof",
    ),
    Mutant(
        name="old clock in the reply",
        row=9,
        broken="the listener answers with the clock of its first answer",
        apply=_answer_with_an_old_clock,
        oracle="proof",
    ),
    Mutant(
        name="leases timed by the wall clock",
        row=9,
        broken="leases end by a clock that is set back and forth",
        apply=_time_leases_by_the_wall,
        faults=tuple(fault(Kind.WALL_CLOCK_JUMP, "p0", at, 0.1) for at in (1.0, 2.0, 3.0)),
        oracle="held",
    ),
)

# --- timers and mailboxes -------------------------------------------------------------------------------------------


class _QueueInOrder(TimerQueue[Any]):
    """Looks at deadlines in the order in which their keys came, and stops at the first that is not due."""

    def seconds_to_next(self, now_ns: int) -> float:
        if not self._deadlines:
            return float("inf")
        deadline_ns = next(iter(self._deadlines.values()))[0]
        return max(0, deadline_ns - now_ns) / NS_PER_SECOND

    def pop_due(self, now_ns: int) -> list[Any]:
        due: list[Any] = []
        for key, (deadline_ns, _) in self._deadlines.items():
            if deadline_ns > now_ns:
                break
            due.append(key)
        for key in due:
            self.cancel(key)
        return due


def _reap_in_order(patch: Patch) -> None:
    patch.attribute(lease_keeper, "TimerQueue", _QueueInOrder)


def _miss_the_wake_up(patch: Patch) -> None:
    async def wait(self: Mailbox[Any], timeout_seconds: float) -> None:
        self._arrived = trio.Event()
        with trio.move_on_after(timeout_seconds):
            await self._arrived.wait()

    patch.attribute(Mailbox, "wait", wait)


def _lose_messages(patch: Patch) -> None:
    put = Mailbox.put

    def put_most(self: Mailbox[Any], message: object) -> bool:
        counts[id(self)] = counts.get(id(self), 0) + 1
        return bool(counts[id(self)] % 50 == 0 or put(self, message))

    counts: dict[int, int] = {}
    patch.attribute(Mailbox, "put", put_most)


PLUMBING = (
    Mutant(
        name="reaper stops at a live head",
        row=52,
        broken="leases are looked at in the order of their grants, up to the first that was renewed",
        apply=_reap_in_order,
        faults=(
            fault(Kind.NOTIFICATION_LOSS, "d0>p0", 0.0, 12.0, 0.3),
            fault(Kind.LONG_QUEUE, "d0", 0.0, 12.0, 0.2),
        ),
        oracle="in time",
    ),
    Mutant(
        name="wake-up missed",
        row=44,
        broken="a message that arrives before its actor waits does not wake it",
        apply=_miss_the_wake_up,
        oracle="recovery",
    ),
    Mutant(
        name="messages lost",
        row=44,
        broken="every fiftieth message to an actor is lost",
        apply=_lose_messages,
        oracle="bound",
    ),
)

MUTANTS = (*WIRE, *CLOCKS, *PLUMBING)
