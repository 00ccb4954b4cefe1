"""What the core of a remote engine is driven by and what it answers: limits, events, effects."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, TypeAlias

import msgspec

from statemachine.failures import ActorCrashed, BadParams, ChecksumsMissing, Failure, TransferError
from statemachine.kernel import Effect, Event
from statemachine.lease import LeaseName

Address: TypeAlias = Hashable
"""Where the engine's side channel is; opaque to the core."""

TimerKind: TypeAlias = Literal[
    "deadline",
    "quiesce",
    "proof",
    "assumed",
    "release_given_up",
    "grace",
    "answer",
    "answer_grace",
    "backoff",
    "release_retry",
    "drain",
]
TimerKey: TypeAlias = tuple[TimerKind, Any]
"""What is waited for and whose: ("deadline" | "quiesce" | "proof", request id), ("grace", connection),
("assumed" | "release_given_up", lease), ("answer" | "answer_grace", rank of P),
("backoff" | "release_retry" | "drain", None)."""


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in nanoseconds.

    Attributes:
        lease_ns: kv_lease_duration; how long a lease lasts that nobody renews.
        margin_ns: taken off every proof.
        request_ns: of a request's whole transfer, from when it is started.
        quiesce_ns: wait for READs to become quiescent, of a failed request and of a connection that is given up.
        grace_ns: how long a READ that failed may go on after its connection was torn down.
        backoff_first_ns, backoff_max_ns: delay after a failed handshake; it doubles.
        incompatible_ns: the same where KV cannot be exchanged.
        retries: new attempts of one request after a lost transport.
    """

    lease_ns: int
    margin_ns: int
    request_ns: int
    quiesce_ns: int
    grace_ns: int
    backoff_first_ns: int
    backoff_max_ns: int
    incompatible_ns: int
    retries: int


# --- events: from the engine ----------------------------------------------------------------------------------------
#
# `message` is what has said it; opaque to the core, which gives it back with PassToSuccessor. `registration`: how often
# P, a built-in one, had registered its KV cache when it lent the blocks; 0: it does not say.


class Announced(Event, frozen=True, kw_only=True):
    """A request is known, and waits in the scheduler's queue. Started or ReleaseUnread follows."""

    request_id: str
    lease: LeaseName
    address: Address
    age_ns: int
    registration: int = 0
    message: Any = None


class Started(Event, frozen=True, kw_only=True):
    """Its blocks are allocated: read into them. The engine awaits a report. `keeps_lease`: the lease is kept when the
    request has ended, and until LetGo, although nobody may want it: others may come that do."""

    request_id: str
    lease: LeaseName
    address: Address
    age_ns: int
    registration: int = 0
    keeps_lease: bool = False
    message: Any = None


class ReleaseUnread(Event, frozen=True, kw_only=True):
    """Nothing has to be read for it (full prefix hit, or it ended before it was scheduled), or nothing can be (it was
    turned away before it came here; then `keeps_lease` as in Started). Nothing is reported."""

    request_id: str
    lease: LeaseName
    address: Address
    keeps_lease: bool = False
    message: Any = None


class LetGo(Event, frozen=True, kw_only=True):
    """Of the requests that the engine knows, none wants this lease any more, or will."""

    lease: LeaseName
    message: Any = None


class MeetAsked(Event, frozen=True, kw_only=True):
    """Connect the engine, although no request needs it yet."""

    address: Address
    message: Any = None


class AbortAsked(Event, frozen=True, kw_only=True):
    """The engine gave a request up; it may have ended already."""

    request_id: str
    message: Any = None


FromEngine: TypeAlias = Announced | Started | ReleaseUnread | LetGo | MeetAsked | AbortAsked


# --- events: from the world -----------------------------------------------------------------------------------------


class Connected(Event, frozen=True, kw_only=True):
    """The handshake succeeded. `connection` numbers it; `workers` names, for people, our partners on P,
    in the order in which they are numbered from now on. `life` names the processes of P."""

    connection: int
    workers: tuple[str, ...]
    is_builtin: bool
    life: str


class ConnectFailed(Event, frozen=True, kw_only=True):
    """The handshake failed and left nothing behind."""

    failure: Failure


class BlocksResolved(Event, frozen=True, kw_only=True):
    """Answer to ResolveBlocks: so many READs are needed. `are_checked`: what each of them leaves is to be checked."""

    request_id: str
    connection: int
    reads: int
    are_checked: bool = False


class BlocksRejected(Event, frozen=True, kw_only=True):
    """Answer to ResolveBlocks: the request names blocks that P does not have, or cannot be verified."""

    request_id: str
    failure: BadParams | ChecksumsMissing


class ReadEnded(Event, frozen=True, kw_only=True):
    """One READ has ended. Without a failure all its bytes are here, if it was wanted. May be told again.

    `is_quiescent` false: it failed, and parts of it may still be in flight. `was_wanted` false: it was given up before
    its turn came, and never posted.
    """

    request_id: str
    read: int
    connection: int
    ended_ns: int
    failure: Failure | None = None
    is_quiescent: bool = True
    was_wanted: bool = True


class ReadChecked(Event, frozen=True, kw_only=True):
    """Answer to CheckRead. Without a failure the bytes are those that P has lent. May come when nobody waits for it any
    more."""

    request_id: str
    read: int
    connection: int
    failure: Failure | None = None


class TornDown(Event, frozen=True, kw_only=True):
    """Answer to TearDown: the agents of this connection are removed, as far as NIXL could; where it had not failed,
    perhaps only for this core."""

    connection: int


class SharedAgentsLost(Event, frozen=True, kw_only=True):
    """Another core has given this connection's agents up, because of `failure`."""

    connection: int
    failure: Failure


class HoldAnswered(Event, frozen=True, kw_only=True):
    """P's answer to a hold that was sent at `sent_ns` on our clock, with the nanoseconds that remain of each lease."""

    connection: int
    rank: int
    sent_ns: int
    held: tuple[tuple[LeaseName, int], ...]
    gone: tuple[tuple[LeaseName, str], ...]


class ReleaseAnswered(Event, frozen=True, kw_only=True):
    """P knows that we are done with these."""

    connection: int
    rank: int
    leases: tuple[LeaseName, ...]


class LinkLost(Event, frozen=True, kw_only=True):
    """A control connection was reset."""

    connection: int
    detail: str


class LeavingSaid(Event, frozen=True, kw_only=True):
    """A rank of P has said that the engine is to end, and keeps what it lends for `grace_ns` at most."""

    connection: int
    grace_ns: int


class NotificationFailed(Event, frozen=True, kw_only=True):
    """A notification to a built-in P could not be sent."""

    connection: int
    failure: TransferError


# --- events: from the supervisor ------------------------------------------------------------------------------------


class Retire(Event, frozen=True, kw_only=True):
    """Give this engine up."""


class Recall(Event, frozen=True, kw_only=True):
    """This engine is wanted after all, although it was retired: only READs that hang are left of it. It is connected
    anew, beside them, at this address."""

    address: Address


class Stop(Event, frozen=True, kw_only=True):
    """The connector stops: fail every request."""

    failure: Failure


class Unwatched(Event, frozen=True, kw_only=True):
    """After Stop: the executor ends, and nobody will be told of the end of a READ any more."""


class Crashed(Event, frozen=True, kw_only=True):
    """The executor raised and starts again: its tasks are gone, and with them the handshake in flight."""

    failure: ActorCrashed


# --- effects --------------------------------------------------------------------------------------------------------


class StartHandshake(Effect, frozen=True, kw_only=True):
    """Connect to the engine at `address`; feed Connected or ConnectFailed."""

    address: Address


class ResolveBlocks(Effect, frozen=True, kw_only=True):
    """Look up the request's blocks on this connection; feed BlocksResolved or BlocksRejected, at once or later."""

    request_id: str
    connection: int


class PostReads(Effect, frozen=True, kw_only=True):
    """Post the READs that were resolved; feed one ReadEnded for each."""

    request_id: str
    connection: int


class WithdrawReads(Effect, frozen=True, kw_only=True):
    """Nobody wants the READs of this request any more: those that are not posted yet end now, as not wanted."""

    request_id: str


class CheckRead(Effect, frozen=True, kw_only=True):
    """All bytes of this READ are here: find out whether they are those that P has lent; feed ReadChecked."""

    request_id: str
    read: int
    connection: int


class TearDown(Effect, frozen=True, kw_only=True):
    """Remove the agents of this connection, close its links; feed TornDown.

    Attributes:
        failure: the agents are of no use to anybody any more; TornDown is fed when they are removed for all.
            None: they are only not needed here, and others may keep them.
    """

    connection: int
    failure: Failure | None = None


class SendHold(Effect, frozen=True, kw_only=True):
    """Ask a rank to keep these leases. `sent_ns` travels along and comes back."""

    connection: int
    rank: int
    sent_ns: int
    leases: tuple[LeaseName, ...]


class SendRelease(Effect, frozen=True, kw_only=True):
    """Tell a rank that we are done with these leases."""

    connection: int
    rank: int
    leases: tuple[LeaseName, ...]


class SendHeartbeat(Effect, frozen=True, kw_only=True):
    """Tell a rank of a built-in P that we still wait for these requests."""

    connection: int
    rank: int
    leases: tuple[LeaseName, ...]


class NotifyReleases(Effect, frozen=True, kw_only=True):
    """Tell a rank of a built-in P that we are done with these requests."""

    connection: int
    rank: int
    leases: tuple[LeaseName, ...]


class Report(Effect, frozen=True, kw_only=True):
    """Tell the engine how a request has ended. `is_quarantined`: its blocks may still be written into."""

    request_id: str
    failure: Failure | None
    is_quarantined: bool


class LiftQuarantine(Effect, frozen=True, kw_only=True):
    """The blocks of a quarantined request are written into no more."""

    request_id: str


class PassToSuccessor(Effect, frozen=True, kw_only=True):
    """This core is finished, and the event came too late for it: it is for the core that takes its place."""

    event: FromEngine


class NoteLeaving(Effect, frozen=True, kw_only=True):
    """The engine is to end, and keeps what it lends for `grace_ns` at most; said once."""

    grace_ns: int


class NoteNotMet(Effect, frozen=True, kw_only=True):
    """For whoever wants the engine connected although no request needs it: an attempt has failed, or none is made
    during the delay after one that has."""

    failure: Failure


class NoteHandshakeFailure(Effect, frozen=True, kw_only=True):
    """A handshake failed that requests wait for; said once, however many they are."""


EngineEffect: TypeAlias = (
    StartHandshake
    | ResolveBlocks
    | PostReads
    | WithdrawReads
    | CheckRead
    | TearDown
    | SendHold
    | SendRelease
    | SendHeartbeat
    | NotifyReleases
    | Report
    | LiftQuarantine
    | PassToSuccessor
    | NoteLeaving
    | NoteHandshakeFailure
    | NoteNotMet
)
"""What the core of one prefill engine may have its executor do."""
