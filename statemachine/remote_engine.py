"""The core of a decode rank for one remote prefill engine: its connection, every request that reads from it, the leases
that it wants from it, and what it owes.

Sans I/O, as h11 and aioquic are: `handle(event, now_ns)` returns what to do, `next_deadline()` says when
`advance(now_ns)` has something to do. The executor (`connector/runtime/peer_actor.py`) carries out effects in order,
feeds what comes of them, calls `advance` after each batch of events, and decides nothing. Nothing here reads a clock:
`now_ns` is the executor's, and never goes back. Production, the model checker and both levels of the simulator run
this object.

What is composed. One `peer` machine; one `departure` machine; one `request` machine for each request that is to be
read; one `hold` machine for each lease that somebody here wants and each rank of P that we deal with.

    peer       who waits for it is told when it is ready, and when it fails
    requests   those in pending_handshake or proving wait for the peer; READs stand on one connection
    claims     a claim is a lease with those here who want it (announced or reading) and its hold on each rank of P
    reads      counted by connection: what is in flight, and what has failed and may still be written (unsettled)

Rules that are nobody's machine:

* A request holds its lease from the moment it is announced, which is before it is scheduled. The READ does not wait for
  the answer; the report does (`request.py`).
* The release is owed when the last of a claim's users has ended, and is said until P has confirmed it or the lease must
  be over. A lease that was released here is consumed: who names it again is refused.
* A READ that failed may go on in part. It counts as quiescent when NIXL has shown that it is over, or when its
  connection has been torn down and the grace of the back end has passed.
* A request that is quarantined makes its connection suspect, as a lost transport does: nothing more is read over it.
* An engine that answers nothing of what is asked for the length of a lease makes its connection suspect: none of its
  leases has been renewed, and a READ that waits for it would be waited for until its deadline.
* An engine that had said that it would end, and whose connection has ended, is not waited for (`departure.py`): what
  wants anything of it fails with `PeerLeaving`, and what it is owed is forgotten. What fails because of the engine
  that is in its place says so.
* A connection is given up in this order: no new READ, the end of those in flight, the removal of its agents; the next
  handshake begins after that. One whose READs do not end, or whose agents cannot be removed because READs of somebody
  else do not end, is left standing until they do.
* Cores that know one engine by different sizes stand on the same agents. What makes a connection of one of them suspect
  makes those of the others suspect, and is over for none of them before the agents are removed for all.
* What is held of an engine that is given up ends with it: who is still in the scheduler's queue has it held anew.
* Nothing is assumed of a lease that has a number. Built-in engines give none out, so where one answers as the engine
  that has lent it, that one has ended: it was put back to the built-in connector under its id.

The cost of an event does not grow with the number of requests or leases in hand, but for events that concern all of
them (the peer is ready, or lost). Renewals of many leases travel in one message.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import msgspec

from statemachine import departure, hold, peer, request
from statemachine.deadlines import NS_PER_SECOND, Deadlines
from statemachine.failures import (
    ActorCrashed,
    BadParams,
    BlocksConsumed,
    ConnectionRefused,
    ControlLinkLost,
    Failure,
    HandshakeRefused,
    Incompatible,
    NotAllowed,
    PeerBackoff,
    PeerLeaving,
    PeerRetired,
    PeerSilent,
    ReadNeverEnded,
    TransferError,
    is_transport_lost,
)
from statemachine.kernel import Effect, Event, Machine, ProtocolError
from statemachine.lease import LEASES_PER_MESSAGE_MAX, LeaseName
from statemachine.remembered import Remembered
from statemachine.trace import Noted, Observer, StepSeen

CONSUMED_MAX = 1 << 14
"""Released leases that are remembered, the newest ones. P remembers longer, unless it is a built-in engine."""

DRIFT_DIVISOR = 6
"""Of what P says remains, a sixth is taken off: two clocks of which one is slewed forward and one back at the most that
chrony does (83,333 ppm each) part by that much."""

HEARTBEATS_PER_LEASE = 6
ATTEMPTS_PER_LEASE = 6
"""Handshakes with an engine that is away, to say releases."""
RESENDS_PER_LEASE = 20
SAID_EARLY_DIVISOR = 2
"""What is due within half of the pause before something is said again goes with what is due now."""

ASSUMED_OVER = (
    "the lease of a built-in engine, taken to have begun when this engine first heard of the request, is over"
)

RESTARTED = "the engine is another process than the one that lent them"
REPLACED = "the engine runs the built-in connector now, and one with this connector has lent them"
RESIZED = "the engine has come back with another number of ranks"
LEFT = "the engine has ended, as it had said"
RETIRED = "the engine was given up here: another one has its place, it was idle, or the connector stops"

Address: TypeAlias = Hashable
"""Where the engine's side channel is; opaque to the core."""

TimerKey: TypeAlias = tuple[str, Any]
"""What is waited for and whose: ("deadline" | "quiesce" | "proof", request id), ("assumed" | "over", lease),
("grace", connection), ("answer" | "silence", rank of P), ("backoff" | "again" | "drain", None)."""


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


class Announced(Event, frozen=True, kw_only=True):
    """A request is known, and waits in the scheduler's queue. Started or Settled follows."""

    request_id: str
    lease: LeaseName
    address: Address
    age_ns: int


class Started(Event, frozen=True, kw_only=True):
    """Its blocks are allocated: read into them. The engine awaits a report."""

    request_id: str
    lease: LeaseName
    address: Address
    age_ns: int


class Settled(Event, frozen=True, kw_only=True):
    """Nothing has to be read for it (full prefix hit, or it ended before it was scheduled). Nothing is reported."""

    request_id: str
    lease: LeaseName
    address: Address


class MeetAsked(Event, frozen=True, kw_only=True):
    """Connect the engine, although no request needs it yet."""

    address: Address


class AbortAsked(Event, frozen=True, kw_only=True):
    """The engine gave a request up; it may have ended already."""

    request_id: str


# --- events: from the world -----------------------------------------------------------------------------------------


class Connected(Event, frozen=True, kw_only=True):
    """The handshake succeeded. `connection` numbers it; `workers` names, for people, the ranks of P that deal with us,
    in the order in which they are numbered from now on. `life` names the processes of P."""

    connection: int
    workers: tuple[str, ...]
    is_builtin: bool
    life: str


class ConnectFailed(Event, frozen=True, kw_only=True):
    """The handshake failed and left nothing behind."""

    failure: Failure


class BlocksResolved(Event, frozen=True, kw_only=True):
    """Answer to ResolveBlocks: so many READs are needed."""

    request_id: str
    connection: int
    reads: int


class BlocksRejected(Event, frozen=True, kw_only=True):
    """Answer to ResolveBlocks: the request names blocks that P does not have."""

    request_id: str
    failure: BadParams


class ReadEnded(Event, frozen=True, kw_only=True):
    """One READ has ended. Without a failure all its bytes are here, if it was wanted, and where that is verified they
    are those that P has lent. May be told again.

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


class NoteLeaving(Effect, frozen=True, kw_only=True):
    """The engine is to end, and keeps what it lends for `grace_ns` at most; said once."""

    grace_ns: int


class NoteHandshakeFailure(Effect, frozen=True, kw_only=True):
    """A handshake failed that requests wait for; said once, however many they are."""


# --- views: what lives, for people; nothing of them leads back into the core ------------------------------------------


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it is now. Times are those of the clock that the core is driven by.

    Attributes:
        started_ns: when its blocks were allocated here.
        deadline_ns: by when it ends, at the latest by draining.
        entered_ns: when it came into its state, where a timer of the core says so; None: look into the trace.
        until_ns: how long it stays in its state at most.
    """

    value: request.Request
    started_ns: int | None
    deadline_ns: int | None
    entered_ns: int | None
    until_ns: int | None


class ClaimView(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that somebody here wants, or that is owed a release.

    Attributes:
        heard_ns: when this engine first heard of a request that names it.
        users: ids of the requests that want it; `queued` are those of them that were announced and not started.
        holds: by rank of P; empty until P was first met.
    """

    lease: LeaseName
    heard_ns: int
    users: tuple[str, ...]
    queued: tuple[str, ...]
    holds: tuple[hold.Hold, ...]


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """The connection, and how much stands on it.

    Attributes:
        ranks: of P that are dealt with; 0 without a connection.
        backoff_until_ns: None unless it backs off.
        leaves_ns: when the grace period is over of an engine that is to end; None: it has not said so.
        reads: ordered and not ended, over all connections; `unsettled` have failed and may still write.
    """

    peer: peer.Peer
    is_builtin: bool
    ranks: int
    backoff_until_ns: int | None
    leaves_ns: int | None
    requests: int
    claims: int
    reads: int
    unsettled: int
    quarantined: int


# --- parts ----------------------------------------------------------------------------------------------------------


class _Connection:
    """One connection, for as long as something stands on it.

    Attributes:
        open_reads: READs ordered on it that have not ended, as (request id, number). Its agents are removed only when
            there is none.
        unsettled: READs that failed on it and may still write, as (request id, number).
        failure: what first made it suspect.
        is_torn_down: its agents are removed. It is forgotten when nothing is unsettled either.
    """

    __slots__ = (
        "failure",
        "is_builtin",
        "is_tearing_down",
        "is_torn_down",
        "number",
        "open_reads",
        "unsettled",
        "workers",
    )

    def __init__(self, number: int, workers: tuple[str, ...], *, is_builtin: bool) -> None:
        self.number = number
        self.workers = workers
        self.is_builtin = is_builtin
        self.open_reads: dict[tuple[str, int], None] = {}
        self.unsettled: dict[tuple[str, int], None] = {}
        self.failure: Failure | None = None
        self.is_tearing_down = False
        self.is_torn_down = False

    @property
    def ranks(self) -> int:
        """How many ranks of P deal with us."""
        return len(self.workers)

    def copy(self) -> _Connection:
        other = _Connection(self.number, self.workers, is_builtin=self.is_builtin)
        other.open_reads = dict(self.open_reads)
        other.unsettled = dict(self.unsettled)
        other.failure = self.failure
        other.is_tearing_down, other.is_torn_down = self.is_tearing_down, self.is_torn_down
        return other

    def freeze(self) -> Hashable:
        return (
            self.number,
            self.ranks,
            self.is_builtin,
            frozenset(self.open_reads),
            frozenset(self.unsettled),
            type(self.failure),
            self.is_tearing_down,
            self.is_torn_down,
        )


class _Claim:
    """A lease that somebody here wants, or that is owed a release.

    Attributes:
        heard_ns: when this engine first heard of a request that names it; may lie before the clock's zero.
        users: ids of the requests that want it, announced or in hand.
        holds: by rank of P; empty until P was first met.
    """

    __slots__ = ("heard_ns", "holds", "lease", "users")

    def __init__(self, lease: LeaseName, heard_ns: int) -> None:
        self.lease = lease
        self.heard_ns = heard_ns
        self.users: dict[str, None] = {}
        self.holds: list[hold.Hold] = []

    @property
    def proven_until_ns(self) -> int:
        return min((each.proven_until_ns for each in self.holds), default=-1)

    @property
    def gone(self) -> str | None:
        """Why P does not keep it, if any rank said so."""
        return next((each.why for each in self.holds if each.state is hold.State.GONE), None)

    @property
    def is_over(self) -> bool:
        return bool(self.holds) and all(hold.MACHINE.is_terminal(each) for each in self.holds)

    def copy(self) -> _Claim:
        other = _Claim(self.lease, self.heard_ns)
        other.users = dict(self.users)
        other.holds = list(self.holds)
        return other


# --- the core -------------------------------------------------------------------------------------------------------


class RemoteEngine:
    """See the module's docstring.

    Args:
        identity: of this rank; makes the jitter of its back-off its own.
        observe: told of every step; that the machine of the connection was made is said with the first event.
    """

    def __init__(
        self,
        engine_id: str,
        address: Address,
        limits: EngineLimits,
        *,
        identity: str = "",
        observe: Observer | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.address = address
        """Requests may name the engine at different addresses; the newest is tried next. A working connection is kept
        whatever they say: if the engine did move, READs fail or its control sockets are reset."""
        self._limits = limits
        self._identity = identity
        self._note: Callable[[Noted], object] | None = None
        self._whose: object = None
        if observe is not None:
            self._note, self._whose = observe
        self._peer = peer.Peer(engine_id=engine_id)
        self._departure = departure.Departure()
        # Requests that have not ended. Removed in the step that reports them, so each is reported exactly once.
        self._requests: dict[str, request.Request] = {}
        # Of these, the ids in pending_handshake, and those in proving; in order of arrival.
        self._waiting: dict[str, None] = {}
        self._proving: dict[str, None] = {}
        # By lease; dropped when it has no users and nothing is owed.
        self._claims: dict[LeaseName, _Claim] = {}
        # Those of them that have users, and were not given up because the engine has left.
        self._wanted: set[LeaseName] = set()
        # Leases that were released here. None of them gets a user again.
        self._consumed = Remembered(CONSUMED_MAX)
        # The one that is ready, draining or disconnecting; None in every other state of the peer.
        self._current: _Connection | None = None
        # Of the latest connection; None before the first.
        self._life: str | None = None
        # Everything that something still stands on, the current one included.
        self._connections: dict[int, _Connection] = {}
        # Requests that ended in quarantine, with their READs that may still write; never empty sets.
        self._quarantined: dict[str, set[int]] = {}
        self._timers: Deadlines[TimerKey] = Deadlines()
        # How many ranks of P are spoken to; 0 unless the peer is ready.
        self._ranks = 0
        # When a lease is to be asked for, or its release said, again; by lease and rank of P. One heap for all ranks:
        # the next deadline costs the same however many there are. Empty unless the peer is ready.
        self._dues: Deadlines[tuple[LeaseName, int]] = Deadlines()
        self._backoff_until_ns = 0
        self._effects: list[Effect] = []
        # Steps that the observer has not been told of.
        self._unseen: list[StepSeen] = []
        self._unseen.append(("peer", engine_id, None, None, self._peer))

    # --- driving ----------------------------------------------------------------------------------------------------

    def next_deadline(self) -> int | None:
        timer_ns, due_ns = self._timers.next_ns(), self._dues.next_ns()
        if timer_ns is None or due_ns is None:
            return timer_ns if due_ns is None else due_ns
        return min(timer_ns, due_ns)

    def advance(self, now_ns: int) -> list[Effect]:
        """Do what is due. One deadline at a time: if one raises, the others stay due."""
        while (key := self._timers.take_due(now_ns)) is not None:
            self._fire(key, now_ns)
            self._settle(now_ns)
        self._send_due(now_ns)
        return self._take_effects(now_ns)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Take one event in; returns what to do, in order."""
        match event:
            case ReadEnded():
                self._end_read(event, now_ns)
            case Announced():
                self._announce(event, now_ns)
            case Started():
                self._start(event, now_ns)
            case BlocksResolved():
                self._resolve(event, now_ns)
            case BlocksRejected(request_id=request_id, failure=failure):
                if request_id in self._waiting:
                    self._step_request(request_id, request.ParamsRejected(failure=failure), now_ns)
            case HoldAnswered():
                self._take_hold_answer(event, now_ns)
            case ReleaseAnswered():
                self._take_release_answer(event)
            case Settled():
                self._settle_without_reading(event, now_ns)
            case MeetAsked(address=address):
                self.address = address
                if self._peer.state is peer.State.IDLE:
                    self._step_peer(peer.Wanted(), now_ns)
            case AbortAsked(request_id=request_id):
                self._step_request(request_id, request.Aborted(), now_ns)
            case Connected():
                self._connect(event, now_ns)
            case ConnectFailed(failure=failure):
                self._fail_handshake(failure, now_ns, is_awaited=self._is_awaited)
            case TornDown(connection=number):
                self._end_tear_down(number, now_ns)
            case LinkLost(connection=number, detail=detail):
                self._suspect(number, ControlLinkLost(**self._of_peer(), detail=detail), now_ns)
            case LeavingSaid(connection=number, grace_ns=grace_ns):
                if self._current is not None and number == self._current.number:
                    self._step_departure(departure.Said(until_ns=now_ns + grace_ns), now_ns)
            case NotificationFailed(connection=number, failure=failure):
                if failure.transport_lost:
                    self._suspect(number, failure, now_ns)
            case SharedAgentsLost(connection=number, failure=failure):
                self._suspect(number, failure, now_ns)
            case Retire():
                self._step_peer(peer.Retired(), now_ns)
            case Stop(failure=failure):
                self._fail_requests(failure, now_ns)
                self._drop_claims()
                self._step_peer(peer.Retired(), now_ns)
            case Unwatched():
                self._give_up_on_reads(now_ns)
            case Crashed(failure=crash):
                is_awaited = self._is_awaited
                self._fail_requests(crash, now_ns)
                refused = HandshakeRefused(**self._of_peer(), detail=str(crash))
                self._fail_handshake(refused, now_ns, is_awaited=is_awaited)
            case _:
                raise TypeError(f"{type(event).__name__} is not an event of this core")
        self._settle(now_ns)
        return self._take_effects(now_ns)

    @property
    def state(self) -> peer.State:
        """Of the connection."""
        return self._peer.state

    @property
    def is_unused(self) -> bool:
        """Nobody waits for this engine or reads from it. Releases may be owed: their leases end by themselves too."""
        return not (self._requests or self._quarantined or self._wanted) and all(
            each is self._current and not each.open_reads for each in self._connections.values()
        )

    @property
    def is_connected(self) -> bool:
        return self._current is not None

    @property
    def is_leaving(self) -> bool:
        """Given up already; READs that hang may keep it for long."""
        return self._peer.is_retiring or self._peer.state is peer.State.GONE

    @property
    def takes_nobody(self) -> bool:
        """Given up, and nobody is left in it: who comes now belongs to its successor, which begins as soon as the
        connection is torn down."""
        return self.is_finished or (self.is_leaving and self.is_unused)

    @property
    def is_finished(self) -> bool:
        """Given up, and everything that touched it has ended."""
        return (
            self._peer.state is peer.State.GONE
            and not self._requests
            and not self._connections
            and not self._quarantined
        )

    def wants(self, request_id: str) -> bool:
        """Whether a READ of this request is still to be posted; asked when its turn has come. Not if its connection has
        become suspect since it was ordered."""
        return self._peer.state is peer.State.READY and self.is_reading(request_id)

    def is_reading(self, request_id: str) -> bool:
        """Whether what its READs leave counts; also over a connection that has become suspect meanwhile."""
        found = self._requests.get(request_id)
        return found is not None and found.state is request.State.READING

    # --- requests ---------------------------------------------------------------------------------------------------

    def _announce(self, event: Announced, now_ns: int) -> None:
        if self._is_consumed(event.lease):
            return  # it is told so when it starts
        self.address = event.address
        self._claim(event.lease, event.request_id, now_ns - event.age_ns, now_ns)

    def _start(self, event: Started, now_ns: int) -> None:
        request_id = event.request_id
        fresh = request.Request(
            request_id=request_id,
            lease=event.lease,
            peer=self.engine_id,
            retries_left=self._limits.retries,
            age_ns=event.age_ns,
        )
        self._requests[request_id] = fresh
        self._waiting[request_id] = None
        self._unseen.append(("request", request_id, None, None, fresh))
        if self._is_consumed(event.lease):
            consumed = BlocksConsumed(**self._of_peer(), remote_request_id=event.lease.request_id)
            self._step_request(request_id, request.PeerFailed(failure=consumed), now_ns)
            return
        self.address = event.address
        claim = self._claim(event.lease, request_id, now_ns - event.age_ns, now_ns)
        if claim.gone is not None:
            has_left = claim.gone == LEFT
            ended = request.PeerFailed(failure=self._left()) if has_left else request.LeaseGone(why=claim.gone)
            self._step_request(request_id, ended, now_ns)
            return
        self._timers.set(("deadline", request_id), now_ns + self._limits.request_ns)
        self._await_peer(request_id, now_ns)

    def _settle_without_reading(self, event: Settled, now_ns: int) -> None:
        if self._is_consumed(event.lease):
            return
        self.address = event.address
        self._claim(event.lease, event.request_id, now_ns, now_ns)
        self._leave(event.lease, event.request_id, now_ns)

    def _is_consumed(self, lease: LeaseName) -> bool:
        """Whether its release was said, or is owed: P may free the blocks at any time."""
        claim = self._claims.get(lease)
        return _text(lease) in self._consumed or (claim is not None and bool(claim.holds) and not claim.users)

    def _await_peer(self, request_id: str, now_ns: int) -> None:
        """Offer the connection if there is one; otherwise it comes, or its failure does."""
        if self._peer.state is peer.State.READY:
            self._offer(request_id)
        else:
            self._step_peer(peer.Wanted(), now_ns)

    def _offer(self, request_id: str) -> None:
        assert self._current is not None
        self._effects.append(ResolveBlocks(request_id=request_id, connection=self._current.number))

    def _resolve(self, event: BlocksResolved, now_ns: int) -> None:
        current = self._current
        is_ready = current is not None and current.number == event.connection and self._peer.state is peer.State.READY
        if not is_ready or event.request_id not in self._waiting:
            return  # it ended meanwhile, or waits for the next connection
        self._step_request(event.request_id, request.PeerReady(connection=event.connection, reads=event.reads), now_ns)

    def _step_request(self, request_id: str, event: Event, now_ns: int) -> None:
        """Step a request, if it has not ended."""
        before = self._requests.get(request_id)
        if before is None:
            return
        try:
            after, effects = request.MACHINE.step(before, event)
        except ProtocolError as error:
            if isinstance(event, request.ShellFailed):
                raise  # every living state takes it
            # A mistake in this file costs the one request that it concerns, which ends as after a crash: seen by all.
            crash = ActorCrashed(actor="request machine", error=str(error))
            self._step_request(request_id, request.ShellFailed(failure=crash), now_ns)
            match event:
                case request.ReadCompleted(read=read) | request.ReadFailed(read=read, is_quiescent=True):
                    self._step_request(request_id, request.ReadQuiesced(read=read), now_ns)
            return
        self._requests[request_id] = after
        self._unseen.append(("request", request_id, before, event, after))
        if after.state is not before.state:
            self._move_between_indexes(request_id, after.state)
        for effect in effects:
            match effect:
                case request.PostReads():
                    self._post_reads(after)
                case request.AskForProof():
                    self._ask_for_proof(after, now_ns)
                case request.StartQuiesceTimer():
                    self._timers.set(("quiesce", request_id), now_ns + self._limits.quiesce_ns)
                case request.AwaitPeer():
                    self._timers.cancel(("quiesce", request_id))
                    self._await_peer(request_id, now_ns)
                case request.Report(failure=failure):
                    self._end_request(after, failure, now_ns)

    def _move_between_indexes(self, request_id: str, state: request.State) -> None:
        self._waiting.pop(request_id, None)
        self._proving.pop(request_id, None)
        if state is request.State.PENDING_HANDSHAKE:
            self._waiting[request_id] = None
        elif state is request.State.PROVING:
            self._proving[request_id] = None

    def _end_request(self, ended: request.Request, failure: Failure | None, now_ns: int) -> None:
        """Report it once, and let go of what it wanted. Where READs may still write, its blocks are quarantined."""
        request_id = ended.request_id
        del self._requests[request_id]
        self._waiting.pop(request_id, None)
        self._proving.pop(request_id, None)
        for kind in ("deadline", "quiesce", "proof"):
            self._timers.cancel((kind, request_id))
        if ended.in_flight:
            self._quarantined[request_id] = set(ended.in_flight)
        self._effects.append(Report(request_id=request_id, failure=failure, is_quarantined=bool(ended.in_flight)))
        self._leave(ended.lease, request_id, now_ns)
        if ended.in_flight:
            waited_seconds = self._limits.quiesce_ns / NS_PER_SECOND
            self._suspect(ended.connection, ReadNeverEnded(**self._of_peer(), waited_seconds=waited_seconds), now_ns)

    def _fail_requests(self, failure: Failure, now_ns: int) -> None:
        for request_id in list(self._requests):
            self._step_request(request_id, request.ShellFailed(failure=failure), now_ns)

    def _give_up_on_reads(self, now_ns: int) -> None:
        """Requests that wait for READs have waited long enough: they end in quarantine."""
        for request_id in list(self._requests):
            self._step_request(request_id, self._quiesce_timeout, now_ns)

    @property
    def _quiesce_timeout(self) -> request.QuiesceTimeout:
        return request.QuiesceTimeout(waited_seconds=self._limits.quiesce_ns / NS_PER_SECOND)

    # --- reads ------------------------------------------------------------------------------------------------------

    def _post_reads(self, reading: request.Request) -> None:
        assert self._current is not None
        self._current.open_reads.update(((reading.request_id, read), None) for read in sorted(reading.in_flight))
        self._effects.append(PostReads(request_id=reading.request_id, connection=reading.connection))

    def _end_read(self, event: ReadEnded, now_ns: int) -> None:
        connection = self._connections.get(event.connection)
        if connection is None or (event.request_id, event.read) not in connection.open_reads:
            return  # told again, by an executor that crashed over it
        self._take_read_end(connection, event, now_ns)
        del connection.open_reads[event.request_id, event.read]

    def _take_read_end(self, connection: _Connection, event: ReadEnded, now_ns: int) -> None:
        failure = event.failure
        # The peer first: a request that may try again must find it draining, not ready on a broken connection.
        if failure is not None and (is_transport_lost(failure) or not event.is_quiescent):
            self._suspect(event.connection, failure, now_ns)
        if not event.is_quiescent:
            connection.unsettled[event.request_id, event.read] = None
        found = self._requests.get(event.request_id)
        if found is None or found.connection != event.connection or event.read not in found.in_flight:
            if event.is_quiescent:
                self._quiesce_quarantined(event.request_id, event.read)
        elif not event.was_wanted:
            if found.state is request.State.READING:
                # Not wanted on this connection: it was given up after the READ was ordered.
                assert self._peer.failure is not None
                self._step_request(event.request_id, request.PeerLost(failure=self._peer.failure), now_ns)
            self._step_request(event.request_id, request.ReadQuiesced(read=event.read), now_ns)
        elif failure is not None:
            self._step_request(
                event.request_id,
                request.ReadFailed(read=event.read, failure=failure, is_quiescent=event.is_quiescent),
                now_ns,
            )
        else:
            claim = self._claims.get(found.lease)
            proven_until_ns = claim.proven_until_ns if claim is not None else -1
            self._step_request(
                event.request_id,
                request.ReadCompleted(read=event.read, completed_ns=event.ended_ns, proven_until_ns=proven_until_ns),
                now_ns,
            )

    def _quiesce_quarantined(self, request_id: str, read: int) -> None:
        writing = self._quarantined.get(request_id)
        if writing is None:
            return
        writing.discard(read)
        if not writing:
            del self._quarantined[request_id]
            self._effects.append(LiftQuarantine(request_id=request_id))

    def _settle_reads(self, connection: _Connection, now_ns: int) -> None:
        """The back end's grace is over: what failed on this connection writes no more."""
        del self._connections[connection.number]
        for request_id, read in connection.unsettled:
            found = self._requests.get(request_id)
            if found is not None and found.connection == connection.number:
                self._step_request(request_id, request.ReadQuiesced(read=read), now_ns)
            else:
                self._quiesce_quarantined(request_id, read)

    # --- the connection ---------------------------------------------------------------------------------------------

    def _step_peer(self, event: Event, now_ns: int) -> None:
        before = self._peer
        self._peer, effects = peer.MACHINE.step(before, event)
        self._unseen.append(("peer", self.engine_id, before, event, self._peer))
        for effect in effects:
            match effect:
                case peer.StartHandshake():
                    self._effects.append(StartHandshake(address=self.address))
                case peer.AnnounceReady():
                    self._announce_ready(now_ns)
                case peer.AnnounceFailed(failure=failure):
                    self._announce_failed(failure, now_ns, was_refused=isinstance(event, peer.Wanted))
                case peer.StartBackoff():
                    self._back_off(effect, now_ns)
                case peer.DrainReads():
                    self._speak_to(0)
                    self._timers.set(("drain", None), now_ns + self._limits.quiesce_ns)
                case peer.TearDown():
                    assert self._current is not None
                    self._timers.set(("drain", None), now_ns + self._limits.quiesce_ns)
                    self._tear_down(self._current)
                case peer.Abandon(failure=failure):
                    self._abandon(failure, now_ns)

    def _connect(self, event: Connected, now_ns: int) -> None:
        connection = _Connection(event.connection, event.workers, is_builtin=event.is_builtin)
        self._connections[event.connection] = connection
        if self._peer.state is not peer.State.HANDSHAKING:
            return  # its executor crashed meanwhile, and the attempt was answered for; `_settle` tears it down
        self._current = connection
        self._step_departure(departure.Connected(), now_ns)
        was_another, self._life = self._life not in (None, event.life), event.life
        for claim in list(self._claims.values()) if was_another and event.is_builtin else ():
            # It says nothing about its leases, and what we have heard of so far may all be of the process before.
            if not claim.holds:
                self._begin_holds(claim, connection.ranks)
            self._lose_everywhere(claim, RESTARTED, now_ns)
        self._step_peer(peer.HandshakeSucceeded(), now_ns)

    def _fail_handshake(self, failure: Failure, now_ns: int, *, is_awaited: bool) -> None:
        if self._peer.state is peer.State.HANDSHAKING:
            has_left, cause = self._departure.state is not departure.State.STAYS, failure
            # That it has left explains all but what somebody says who is there instead.
            if has_left and not isinstance(failure, Incompatible | BadParams | NotAllowed):
                cause = self._left(failure)
            if has_left:
                self._step_departure(departure.AttemptFailed(), now_ns, cause)
            if is_awaited:
                self._effects.append(NoteHandshakeFailure())
            if has_left:
                # Where the port refuses, asking again costs nothing: no pause, in which a new process is not found.
                is_awaited = is_awaited and not isinstance(failure, ConnectionRefused)
            elif not is_awaited:
                self._timers.set(("again", None), now_ns + self._limits.lease_ns // ATTEMPTS_PER_LEASE)
            self._step_peer(peer.HandshakeFailed(failure=cause, is_awaited=is_awaited), now_ns)

    def _suspect(self, number: int, failure: Failure, now_ns: int) -> None:
        """Nothing may be read over this connection any more, if it is the current one."""
        connection = self._connections.get(number)
        if connection is not None and connection.failure is None:
            connection.failure = failure
        if self._current is not None and number == self._current.number:
            has_ended = isinstance(failure, ControlLinkLost) or is_transport_lost(failure)
            if has_ended and self._departure.state is departure.State.LEAVING:
                failure = self._left(failure)
            self._step_peer(peer.ConnectionSuspect(failure=failure), now_ns)
            if has_ended:
                self._step_departure(departure.ConnectionEnded(), now_ns)

    def _step_departure(self, event: Event, now_ns: int, cause: Failure | None = None) -> None:
        """`cause`: why what is lost with it is lost, if not because it has left."""
        self._departure, effects = departure.MACHINE.step(self._departure, event)
        for effect in effects:
            match effect:
                case departure.NoteLeaving():
                    self._effects.append(NoteLeaving(grace_ns=self._departure.until_ns - now_ns))
                case departure.LoseEverything():
                    self._lose_everything(cause or self._left(), now_ns)

    def _lose_everything(self, cause: Failure, now_ns: int) -> None:
        """The engine has left. What waits in the scheduler's queue is told when it starts."""
        for claim in list(self._claims.values()):
            if not claim.holds:
                self._begin_holds(claim, max(1, self._ranks))
            self._lose_holds(claim, LEFT)
            self._drop_if_over(claim)
        self._fail_requests(cause, now_ns)
        self._wanted.clear()

    def _left(self, failure: Failure | None = None) -> PeerLeaving:
        """Why nothing can be had of an engine that has left; `failure`: what has shown it."""
        return PeerLeaving(**self._of_peer(), detail=failure.kind if failure is not None else "")

    def _speak_to(self, ranks: int) -> None:
        """From now on say what is to be said of leases to so many ranks; nothing is due yet."""
        for rank in range(self._ranks):
            self._has_answered(rank)
        self._ranks = ranks
        self._dues.clear()

    def _announce_ready(self, now_ns: int) -> None:
        """Ask for every lease that somebody wants, say every release that is owed, and offer the connection."""
        connection = self._current
        assert connection is not None
        if self._ranks != connection.ranks:
            self._speak_to(connection.ranks)
            for claim in list(self._claims.values()):
                self._meet(claim, connection, now_ns)
            self._send_due(now_ns)
        for request_id in list(self._waiting):
            self._offer(request_id)

    def _announce_failed(self, failure: Failure, now_ns: int, *, was_refused: bool) -> None:
        if was_refused and self._peer.state is peer.State.BACKOFF:
            failure = PeerBackoff(
                **self._of_peer(),
                retry_in_seconds=max(0, self._backoff_until_ns - now_ns) / NS_PER_SECOND,
                last=failure.kind,
            )
        for request_id in (*self._waiting, *self._proving):
            self._step_request(request_id, request.PeerFailed(failure=failure), now_ns)

    def _back_off(self, effect: peer.StartBackoff, now_ns: int) -> None:
        limits = self._limits
        if effect.is_incompatible:
            delay_ns = limits.incompatible_ns
        elif isinstance(self._peer.failure, ConnectionRefused) or self._departure.state is departure.State.LEFT:
            # Asking again costs a round trip, and an engine that is started again is to be served at once.
            delay_ns = limits.backoff_first_ns
        else:
            delay_ns = min(limits.backoff_max_ns, limits.backoff_first_ns << min(effect.failures - 1, 30))
        # Between half and all of it, by who asks whom how often: two decode ranks do not come back together, and the
        # same run comes out the same.
        draw = zlib.crc32(f"{self._identity}/{self.engine_id}/{effect.failures}".encode()) / 2**32
        self._backoff_until_ns = now_ns + round(delay_ns * (0.5 + draw / 2))
        self._timers.set(("backoff", None), self._backoff_until_ns)

    def _tear_down(self, connection: _Connection) -> None:
        connection.is_tearing_down = True
        self._effects.append(TearDown(connection=connection.number, failure=connection.failure))

    def _end_tear_down(self, number: int, now_ns: int) -> None:
        connection = self._connections[number]
        connection.is_torn_down = True
        if connection.unsettled:
            self._timers.set(("grace", number), now_ns + self._limits.grace_ns)
        else:
            del self._connections[number]
        if connection is self._current:
            self._current = None
            self._timers.cancel(("drain", None))
            self._step_peer(peer.TornDown(), now_ns)

    def _abandon(self, failure: Failure, now_ns: int) -> None:
        """READs on the current connection, or on its agents, did not end in time: it stays until they do, and nobody
        waits for them."""
        connection, self._current = self._current, None
        assert connection is not None
        self._timers.cancel(("drain", None))
        for reading in list(self._requests.values()):
            if reading.state is request.State.READING and reading.connection == connection.number:
                self._step_request(reading.request_id, request.PeerLost(failure=failure), now_ns)
                # It has waited as long as a request that failed by itself.
                self._step_request(reading.request_id, self._quiesce_timeout, now_ns)

    # --- claims -----------------------------------------------------------------------------------------------------

    def _claim(self, lease: LeaseName, request_id: str, heard_ns: int, now_ns: int) -> _Claim:
        """`request_id` wants the lease: it is held from now on, and not released before the request has ended."""
        self._wanted.add(lease)
        claim = self._claims.get(lease)
        if claim is not None:
            self._timers.cancel(("over", lease))
            claim.users[request_id] = None
            return claim
        claim = self._claims[lease] = _Claim(lease, heard_ns)
        claim.users[request_id] = None
        if self._peer.state is peer.State.READY:
            assert self._current is not None
            self._meet(claim, self._current, now_ns)
        return claim

    def _meet(self, claim: _Claim, connection: _Connection, now_ns: int) -> None:
        """P is connected: say what there is to say about this lease, to each rank."""
        if claim.holds and len(claim.holds) != connection.ranks:
            self._lose_everywhere(claim, RESIZED, now_ns)
            return
        for rank, each in enumerate(claim.holds):
            if not hold.MACHINE.is_terminal(each):
                self._step_hold(claim, rank, hold.Reconnected())
        if not claim.holds:
            self._begin_holds(claim, connection.ranks)
            if not claim.users:
                self._let_go(claim)
        if connection.is_builtin and claim.lease.number:
            self._lose_everywhere(claim, REPLACED, now_ns)
            return
        if connection.is_builtin:
            until_ns = claim.heard_ns + self._limits.lease_ns - self._limits.margin_ns
            for rank in range(connection.ranks):
                self._step_hold(claim, rank, hold.Assumed(until_ns=until_ns))
            self._timers.set(("assumed", claim.lease), until_ns)
        for rank, each in enumerate(claim.holds):
            if not hold.MACHINE.is_terminal(each):
                self._dues.set((claim.lease, rank), now_ns)

    def _begin_holds(self, claim: _Claim, ranks: int) -> None:
        for rank in range(ranks):
            fresh = hold.Hold(lease=claim.lease, rank=rank)
            claim.holds.append(fresh)
            self._unseen.append(("hold", (claim.lease, rank), None, None, fresh))

    def _step_hold(self, claim: _Claim, rank: int, event: Event) -> None:
        before = claim.holds[rank]
        after, effects = hold.MACHINE.step(before, event)
        claim.holds[rank] = after
        if after is not before:
            self._unseen.append(("hold", (claim.lease, rank), before, event, after))
        for effect in effects:
            match effect:
                case hold.SayReleased():
                    if rank < self._ranks:  # there are fewer where P is not connected, or has come back smaller
                        self._dues.set((claim.lease, rank), 0)

    def _leave(self, lease: LeaseName, request_id: str, now_ns: int) -> None:
        """One request less wants this lease; the last one lets go of it."""
        claim = self._claims.get(lease)
        if claim is None or request_id not in claim.users:
            return
        del claim.users[request_id]
        if claim.users:
            return
        self._wanted.discard(lease)
        if claim.holds:
            self._let_go(claim)
        # Else P was never met: it may be named again, and P is told when it is met in time.
        if self._drop_if_over(claim):
            return
        self._timers.set(("over", lease), max(claim.proven_until_ns, now_ns + self._limits.lease_ns))

    def _let_go(self, claim: _Claim) -> None:
        self._consumed.add(_text(claim.lease))
        for rank, each in enumerate(claim.holds):
            if not hold.MACHINE.is_terminal(each):
                self._step_hold(claim, rank, hold.LetGo())

    def _drop_if_over(self, claim: _Claim) -> bool:
        if claim.users or not claim.is_over:
            return False
        self._drop(claim)
        return True

    def _drop(self, claim: _Claim) -> None:
        self._claims.pop(claim.lease, None)
        self._wanted.discard(claim.lease)
        self._timers.cancel(("assumed", claim.lease))
        self._timers.cancel(("over", claim.lease))
        for rank in range(self._ranks):
            self._dues.cancel((claim.lease, rank))

    def _drop_claims(self) -> None:
        """Nothing is asked for or said any more: the leases end by themselves."""
        for claim in list(self._claims.values()):
            self._lose_holds(claim, RETIRED)
            self._drop(claim)

    def _ask_for_proof(self, proving: request.Request, now_ns: int) -> None:
        self._timers.set(("proof", proving.request_id), now_ns + self._limits.lease_ns)
        claim = self._claims[proving.lease]
        for rank in range(self._ranks):
            if claim.holds[rank].proven_until_ns < proving.last_completed_ns:
                self._dues.set((proving.lease, rank), now_ns)

    def _take_hold_answer(self, event: HoldAnswered, now_ns: int) -> None:
        if self._current is None or event.connection != self._current.number or event.sent_ns > now_ns:
            return
        self._has_answered(event.rank)
        for lease, remaining_ns in event.held:
            claim = self._claims.get(lease)
            if claim is not None and claim.holds:  # without, P was not asked over this connection
                self._prove(claim, event.rank, event.sent_ns, remaining_ns, now_ns)
        for lease, why in event.gone:
            claim = self._claims.get(lease)
            if claim is not None and claim.holds:
                self._lose(claim, event.rank, why, now_ns)

    def _prove(self, claim: _Claim, rank: int, sent_ns: int, remaining_ns: int, now_ns: int) -> None:
        if hold.MACHINE.is_terminal(claim.holds[rank]):
            return
        reach_ns = remaining_ns - remaining_ns // DRIFT_DIVISOR - self._limits.margin_ns
        self._step_hold(claim, rank, hold.HeldByPeer(proven_until_ns=sent_ns + max(0, reach_ns)))
        if claim.holds[rank].state is hold.State.HELD and self._ranks:
            # Before half of what was granted is gone.
            self._dues.set((claim.lease, rank), max(now_ns + self._resend_ns, sent_ns + reach_ns // 2))
        if self._proving:
            proven = request.LeaseProven(proven_until_ns=claim.proven_until_ns)
            for user in [each for each in claim.users if each in self._proving]:
                self._step_request(user, proven, now_ns)

    def _lose(self, claim: _Claim, rank: int, why: str, now_ns: int) -> None:
        if hold.MACHINE.is_terminal(claim.holds[rank]):
            return
        self._step_hold(claim, rank, hold.GoneAtPeer(why=why))
        self._tell_gone(claim, why, now_ns)

    def _lose_everywhere(self, claim: _Claim, why: str, now_ns: int) -> None:
        """All ranks before anybody is told: the last user to end would release what is left."""
        self._lose_holds(claim, why)
        self._tell_gone(claim, why, now_ns)

    def _lose_holds(self, claim: _Claim, why: str) -> None:
        for rank, each in enumerate(claim.holds):
            if not hold.MACHINE.is_terminal(each):
                self._step_hold(claim, rank, hold.GoneAtPeer(why=why))

    def _tell_gone(self, claim: _Claim, why: str, now_ns: int) -> None:
        for user in list(claim.users):
            self._step_request(user, request.LeaseGone(why=why), now_ns)
        self._drop_if_over(claim)

    def _take_release_answer(self, event: ReleaseAnswered) -> None:
        if self._current is not None and event.connection == self._current.number:
            self._has_answered(event.rank)
        for lease in event.leases:
            claim = self._claims.get(lease)
            if claim is not None and claim.holds and claim.holds[event.rank].state is hold.State.RELEASING:
                self._step_hold(claim, event.rank, hold.ReleaseConfirmed())
                self._drop_if_over(claim)

    def _send_due(self, now_ns: int) -> None:
        """Say what is due to each rank, many leases in one message: with what is due now goes what is due soon. Leases
        that came at different moments are renewed together from then on."""
        connection, first_ns = self._current, self._dues.next_ns()
        if connection is None or first_ns is None or first_ns > now_ns:
            return
        alike: dict[tuple[int, hold.State], list[LeaseName]] = {}
        while (due := self._dues.take_due(now_ns + self._resend_ns // SAID_EARLY_DIVISOR)) is not None:
            lease, rank = due
            alike.setdefault((rank, self._claims[lease].holds[rank].state), []).append(lease)
        for (rank, state), leases in alike.items():
            for first in range(0, len(leases), LEASES_PER_MESSAGE_MAX):
                batch = tuple(leases[first : first + LEASES_PER_MESSAGE_MAX])
                self._say(connection, rank, state, batch, now_ns)

    def _say(
        self, connection: _Connection, rank: int, state: hold.State, leases: tuple[LeaseName, ...], now_ns: int
    ) -> None:
        number, is_builtin = connection.number, connection.is_builtin
        again_ns = now_ns + self._resend_ns
        if state in hold.MACHINE.terminal:
            return
        if state is hold.State.RELEASING and is_builtin:
            self._effects.append(NotifyReleases(connection=number, rank=rank, leases=leases))
            for lease in leases:
                self._step_hold(self._claims[lease], rank, hold.ReleaseConfirmed())
                self._drop_if_over(self._claims[lease])
            return
        if state is hold.State.RELEASING:
            self._effects.append(SendRelease(connection=number, rank=rank, leases=leases))
        elif is_builtin:
            self._effects.append(SendHeartbeat(connection=number, rank=rank, leases=leases))
            again_ns = now_ns + self._limits.lease_ns // HEARTBEATS_PER_LEASE
        else:
            self._effects.append(SendHold(connection=number, rank=rank, sent_ns=now_ns, leases=leases))
        if not is_builtin and not self._expects_answer(rank):
            self._timers.set(("answer", rank), now_ns + self._limits.lease_ns - self._resend_ns)
        for lease in leases:
            self._dues.set((lease, rank), again_ns)

    def _expects_answer(self, rank: int) -> bool:
        return ("answer", rank) in self._timers or ("silence", rank) in self._timers

    def _has_answered(self, rank: int) -> None:
        self._timers.cancel(("answer", rank))
        self._timers.cancel(("silence", rank))

    @property
    def _resend_ns(self) -> int:
        return min(NS_PER_SECOND, self._limits.lease_ns // RESENDS_PER_LEASE)

    # --- time, and what follows -------------------------------------------------------------------------------------

    def _fire(self, key: TimerKey, now_ns: int) -> None:
        kind, subject = key
        limits = self._limits
        match kind:
            case "deadline":
                timeout = request.DeadlinePassed(timeout_seconds=limits.request_ns / NS_PER_SECOND)
                self._step_request(subject, timeout, now_ns)
            case "quiesce":
                self._step_request(subject, self._quiesce_timeout, now_ns)
            case "proof":
                unproven = request.ProofTimeout(waited_seconds=limits.lease_ns / NS_PER_SECOND)
                self._step_request(subject, unproven, now_ns)
            case "answer":
                # It may be that it was us who stood still, and that its answer waits to be heard.
                self._timers.set(("silence", subject), now_ns + self._resend_ns)
            case "silence":
                assert self._current is not None
                silent = PeerSilent(
                    **self._of_peer(),
                    worker=self._current.workers[subject],
                    waited_seconds=limits.lease_ns / NS_PER_SECOND,
                )
                self._suspect(self._current.number, silent, now_ns)
            case "assumed":
                self._lose_everywhere(self._claims[subject], ASSUMED_OVER, now_ns)
            case "over":
                self._give_up(self._claims[subject])
            case "grace":
                self._settle_reads(self._connections[subject], now_ns)
            case "again":
                pass  # the timer kept `_settle` from it
            case "backoff":
                self._step_peer(peer.BackoffElapsed(), now_ns)
            case "drain":
                self._step_peer(peer.QuiesceTimeout(), now_ns)

    def _give_up(self, claim: _Claim) -> None:
        """The lease must be over, whether P has heard of our release or not."""
        for rank, each in enumerate(claim.holds):
            if each.state is hold.State.RELEASING:
                self._step_hold(claim, rank, hold.GiveUp())
        self._drop(claim)

    def _settle(self, now_ns: int) -> None:
        """After every event: what follows from the counts, and nobody may wait for something that will not come."""
        current = self._current
        if current is not None and self._peer.state is peer.State.DRAINING and not current.open_reads:
            self._step_peer(peer.ReadsDrained(), now_ns)
        if len(self._connections) > (current is not None):
            for connection in self._connections.values():
                if connection is not self._current and not (connection.open_reads or connection.is_tearing_down):
                    self._tear_down(connection)
        if self._peer.state is peer.State.IDLE and (self._waiting or self._proving or self._has_something_to_say):
            self._step_peer(peer.Wanted(), now_ns)
        elif (self._peer.is_retiring or self._peer.state is peer.State.GONE) and (self._waiting or self._proving):
            self._announce_failed(PeerRetired(peer=self.engine_id), now_ns, was_refused=False)
        if self.is_finished:
            self._drop_claims()

    @property
    def _has_something_to_say(self) -> bool:
        """Whether leases alone are worth a handshake: somebody wants one, or is owed its release and the last attempt
        to say so was a while ago."""
        is_owed = bool(self._claims) and self._departure.state is not departure.State.LEFT
        return bool(self._wanted) or (is_owed and ("again", None) not in self._timers)

    @property
    def _is_awaited(self) -> bool:
        return bool(self._waiting or self._proving or self._wanted)

    def _of_peer(self) -> dict[str, Any]:
        return {"peer": self.engine_id, "address": str(self.address)}

    def _take_effects(self, now_ns: int) -> list[Effect]:
        # After everything that is to be done: an observer that raises costs records, and the effects come next time.
        if self._unseen:
            steps, self._unseen = self._unseen, []
            if self._note is not None:
                self._note((self._whose, now_ns, steps))
        effects, self._effects = self._effects, []
        return effects

    # --- for people -------------------------------------------------------------------------------------------------

    def view(self) -> EngineView:
        connections = self._connections.values()
        is_backing_off = self._peer.state in (peer.State.BACKOFF, peer.State.INCOMPATIBLE)
        return EngineView(
            peer=self._peer,
            is_builtin=self._current is not None and self._current.is_builtin,
            ranks=self._current.ranks if self._current is not None else 0,
            backoff_until_ns=self._backoff_until_ns if is_backing_off else None,
            leaves_ns=self._departure.until_ns if self._departure.state is departure.State.LEAVING else None,
            requests=len(self._requests),
            claims=len(self._claims),
            reads=sum(len(each.open_reads) for each in connections),
            unsettled=sum(len(each.unsettled) for each in connections),
            quarantined=len(self._quarantined),
        )

    def request_ids(self) -> list[str]:
        """Of the requests that have not ended, in order of arrival."""
        return list(self._requests)

    def view_request(self, request_id: str) -> RequestView | None:
        """None: it has ended, or was never started."""
        value = self._requests.get(request_id)
        if value is None:
            return None
        deadline_ns = self._timers.get(("deadline", request_id))
        entered_ns, until_ns = None, deadline_ns
        timer, length_ns = {
            request.State.DRAINING: ("quiesce", self._limits.quiesce_ns),
            request.State.PROVING: ("proof", self._limits.lease_ns),
        }.get(value.state, ("", 0))
        if (ends_ns := self._timers.get((timer, request_id))) is not None:
            entered_ns, until_ns = ends_ns - length_ns, ends_ns
        started_ns = deadline_ns - self._limits.request_ns if deadline_ns is not None else None
        return RequestView(
            value=value, started_ns=started_ns, deadline_ns=deadline_ns, entered_ns=entered_ns, until_ns=until_ns
        )

    def queued(self) -> list[tuple[str, LeaseName]]:
        """The requests that were announced and not started, with the leases that they want."""
        return [
            (user, lease) for lease, claim in self._claims.items() for user in claim.users if user not in self._requests
        ]

    def claimed(self) -> list[LeaseName]:
        """The leases that somebody here wants, or that are owed a release."""
        return list(self._claims)

    def view_claim(self, lease: LeaseName) -> ClaimView | None:
        claim = self._claims.get(lease)
        if claim is None:
            return None
        return ClaimView(
            lease=lease,
            heard_ns=claim.heard_ns,
            users=tuple(claim.users),
            queued=tuple(user for user in claim.users if user not in self._requests),
            holds=tuple(claim.holds),
        )

    def quarantined(self) -> list[tuple[str, int]]:
        """Requests that ended while READs might still write into their blocks, with how many of these are left."""
        return [(request_id, len(reads)) for request_id, reads in self._quarantined.items()]

    # --- for the explorer -------------------------------------------------------------------------------------------

    def copy(self) -> RemoteEngine:
        other = type(self)(self.engine_id, self.address, self._limits, identity=self._identity)
        other._note, other._whose = self._note, self._whose
        other._peer = self._peer
        other._departure = self._departure
        other._requests = dict(self._requests)
        other._waiting, other._proving = dict(self._waiting), dict(self._proving)
        other._claims = {lease: claim.copy() for lease, claim in self._claims.items()}
        other._wanted = set(self._wanted)
        other._consumed = self._consumed.copy()
        other._connections = {number: connection.copy() for number, connection in self._connections.items()}
        other._life = self._life
        other._current = other._connections[self._current.number] if self._current is not None else None
        other._quarantined = {request_id: set(reads) for request_id, reads in self._quarantined.items()}
        other._timers = self._timers.copy()
        other._ranks = self._ranks
        other._dues = self._dues.copy()
        other._backoff_until_ns = self._backoff_until_ns
        return other

    def freeze(self, now_ns: int) -> Hashable:
        """Equal for two cores that behave alike from `now_ns` on. Times are relative to it."""
        return (
            self.address,
            self._peer,
            frozenset(self._freeze_request(each, now_ns) for each in self._requests.values()),
            frozenset(self._freeze_claim(each, now_ns) for each in self._claims.values()),
            frozenset(self._wanted),
            self._consumed.freeze(),
            frozenset(each.freeze() for each in self._connections.values()),
            self._current.number if self._current is not None else None,
            self._life,
            frozenset((request_id, frozenset(reads)) for request_id, reads in self._quarantined.items()),
            self._timers.freeze(now_ns),
            self._ranks,
            self._dues.freeze(now_ns),
            self._departure.state,
        )

    def _freeze_request(self, value: request.Request, now_ns: int) -> request.Request:
        if not (value.last_completed_ns or value.age_ns):
            return value
        last_completed_ns = value.last_completed_ns and value.last_completed_ns - now_ns
        return msgspec.structs.replace(value, last_completed_ns=last_completed_ns, age_ns=0)

    def _freeze_claim(self, claim: _Claim, now_ns: int) -> Hashable:
        holds = tuple(
            msgspec.structs.replace(
                each,
                proven_until_ns=each.proven_until_ns - now_ns if each.proven_until_ns >= 0 else -1,
            )
            for each in claim.holds
        )
        # When it was heard of matters until a built-in engine is met, and only for the length of a lease.
        age_ns = min(now_ns - claim.heard_ns, self._limits.lease_ns)
        return (claim.lease, frozenset(claim.users), holds, age_ns if not claim.holds else 0)


def _text(lease: LeaseName) -> str:
    """Of no other lease."""
    return f"{lease.number} {lease.request_id}"


MACHINES: tuple[Machine[Any], ...] = (request.MACHINE, peer.MACHINE, hold.MACHINE, departure.MACHINE)
"""What is composed here."""
