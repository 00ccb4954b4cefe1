"""The connection to one remote prefill engine, as a decode rank sees it.

    idle            nothing is known but its address
    handshaking     one handshake is in flight; every waiting request shares its outcome
    ready           connected: its agents are loaded, its descriptor lists prepared, its control sockets open
    draining        the connection is to be rebuilt or given up; READs in flight end first
    disconnecting   no READ is in flight; the agents are being removed
    backoff         the last attempt failed, or its connection was of no use; requests fail at once until the delay is
                    over, or the abandoned connection is gone for which the attempt failed
    incompatible    it answered, and KV cannot be exchanged; like backoff, with a longer delay
    gone            given up: replaced by another engine at its address, evicted, or the connector stops. A peer that is
                    recalled is a fresh value

Why `draining` comes before rebuilding: after a transport error the same agent must be removed before it can be added
again, and removing an agent while a READ is in flight hides the end of that READ (docs/nixl.md). If READs do not end
in time the connection is abandoned as it is: it stays loaded until they do, and no other is made to the same process
before. Why `disconnecting` has a state of its own:
an agent that is added while it is still being removed stays broken. It is bounded, too: who shares the agents may have
READs that do not end.

What makes a ready connection suspect: a READ or a notification that found the transport lost, a READ that ended with
an error and may still be in flight in part, a request that was quarantined, a control socket that was reset or over
which nothing is answered any more, or any of these on another core that shares this connection's agents. No new READ is
posted before the connection has been rebuilt.

A failed peer fails requests at once while it backs off, so that a dead engine does not fill the decode engine's block
pool with requests that wait for it. The delay doubles from attempt to attempt, with jitter; not where the engine's port
refused the connection, which costs nobody any time (`remote_engine`). An attempt that was made only to say releases
begins no back-off: the engine that takes the place of a dead one must not find one that nobody needed.

A connection is of use once a READ has ended well over it. So is one that has stood for as long as the longest back-off
and is lost while nobody reads: an engine that is met before a request needs it, or is seldom asked, may be lost like
that again and again. One that was of no use is rebuilt at once, because it may have met a process that was about to
end; the second in a row, and those after it, wait as after a failed attempt.
Otherwise an engine that answers handshakes, and whose data nobody can read, would be shaken hands with for every
request, and each new connection keeps a file descriptor open on both sides (docs/nixl.md).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from statemachine.failures import BadParams, Failure, Incompatible, PeerRetired
from statemachine.kernel import NO_EFFECTS, Effect, Event, Machine, MachineState, pairs, to

LOSSES_BEFORE_BACKOFF = 1
"""So many connections in a row may be lost without having been of use before the next one has to wait."""


class State(MachineState):
    IDLE = "idle"
    HANDSHAKING = "handshaking"
    READY = "ready"
    DRAINING = "draining"
    DISCONNECTING = "disconnecting"
    BACKOFF = "backoff"
    INCOMPATIBLE = "incompatible"
    GONE = "gone"


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine.

    Attributes:
        failures: attempts that failed in a row.
        losses: connections in a row that were lost without having been of use.
        is_retiring: there will be no next one.
        failure: the last one.
    """

    engine_id: str
    state: State = State.IDLE
    failures: int = 0
    losses: int = 0
    is_retiring: bool = False
    failure: Failure | None = None


class Wanted(Event, frozen=True, kw_only=True):
    """Somebody needs this peer."""


class HandshakeSucceeded(Event, frozen=True, kw_only=True):
    """Everything is validated and prepared."""


class HandshakeFailed(Event, frozen=True, kw_only=True):
    """The attempt failed and left no trace. `begins_backoff`: a pause follows. Not where it was made only to say what
    is owed, nor where the port of an engine that had left refuses it."""

    failure: Failure
    begins_backoff: bool = True


class BackoffElapsed(Event, frozen=True, kw_only=True):
    """The delay after a failed attempt is over, or what the attempt failed for is: an abandoned connection."""


class ConnectionSuspect(Event, frozen=True, kw_only=True):
    """Nothing may be read over this connection any more; see the module's docstring, also for what is of use."""

    failure: Failure
    was_of_use: bool


class ReadsDrained(Event, frozen=True, kw_only=True):
    """No READ on this connection is in flight any more."""


class QuiesceTimeout(Event, frozen=True, kw_only=True):
    """READs on this connection do not end, or its agents are not removed."""


class TornDown(Event, frozen=True, kw_only=True):
    """The agents of the connection that was drained are removed."""


class Retired(Event, frozen=True, kw_only=True):
    """Another engine has taken its address, it was evicted, or the connector stops."""


class StartHandshake(Effect, frozen=True, kw_only=True):
    """Begin one attempt, bounded in time."""


class AnnounceReady(Effect, frozen=True, kw_only=True):
    """Whatever waits for the connection can go on."""


class AnnounceFailed(Effect, frozen=True, kw_only=True):
    """Fail whatever waits for the connection."""

    failure: Failure


class Refuse(Effect, frozen=True, kw_only=True):
    """Fail who has come during the delay after the attempt that failed so."""

    failure: Failure


class StartBackoff(Effect, frozen=True, kw_only=True):
    """Feed BackoffElapsed after a delay, which depends on how often it failed and why."""

    failures: int
    is_incompatible: bool = False


class DrainReads(Effect, frozen=True, kw_only=True):
    """Bound the wait for READs in flight."""


class TearDown(Effect, frozen=True, kw_only=True):
    """Remove the agents of the connection, and say so."""


class Abandon(Effect, frozen=True, kw_only=True):
    """Keep the connection until its READs have ended and its agents can be removed. Whoever reads is told."""

    failure: Failure


Effects: TypeAlias = tuple[
    StartHandshake | AnnounceReady | AnnounceFailed | Refuse | StartBackoff | DrainReads | TearDown | Abandon, ...
]


def _start(peer: Peer, event: Wanted) -> tuple[Peer, Effects]:
    return msgspec.structs.replace(peer, state=State.HANDSHAKING), (StartHandshake(),)


def _connect(peer: Peer, event: HandshakeSucceeded) -> tuple[Peer, Effects]:
    if peer.is_retiring:
        assert peer.failure is not None
        draining = msgspec.structs.replace(peer, state=State.DRAINING, failures=0)
        return draining, (AnnounceFailed(failure=peer.failure), DrainReads())
    return msgspec.structs.replace(peer, state=State.READY, failures=0, failure=None), (AnnounceReady(),)


def _fail(peer: Peer, event: HandshakeFailed) -> tuple[Peer, Effects]:
    failures = peer.failures + 1
    announce = AnnounceFailed(failure=event.failure)
    failed = msgspec.structs.replace(peer, failures=failures, failure=event.failure)
    if peer.is_retiring:
        return msgspec.structs.replace(failed, state=State.GONE), (announce,)
    if not event.begins_backoff:
        return msgspec.structs.replace(peer, state=State.IDLE, failure=event.failure), NO_EFFECTS
    # BadParams: what the requests say of this engine is not true, and asking again will not make it so.
    is_incompatible = isinstance(event.failure, Incompatible | BadParams)
    state = State.INCOMPATIBLE if is_incompatible else State.BACKOFF
    backoff = StartBackoff(failures=failures, is_incompatible=is_incompatible)
    return msgspec.structs.replace(failed, state=state), (announce, backoff)


def _reject(peer: Peer, event: Wanted) -> tuple[Peer, Effects]:
    assert peer.failure is not None
    return peer, (Refuse(failure=peer.failure),)


def _rest(peer: Peer, event: BackoffElapsed) -> tuple[Peer, Effects]:
    return msgspec.structs.replace(peer, state=State.IDLE), NO_EFFECTS


def _suspect(peer: Peer, event: ConnectionSuspect) -> tuple[Peer, Effects]:
    losses = 0 if event.was_of_use else peer.losses + 1
    return msgspec.structs.replace(peer, state=State.DRAINING, losses=losses, failure=event.failure), (DrainReads(),)


def _tear_down(peer: Peer, event: ReadsDrained) -> tuple[Peer, Effects]:
    return msgspec.structs.replace(peer, state=State.DISCONNECTING), (TearDown(),)


def _disconnect(peer: Peer, event: TornDown) -> tuple[Peer, Effects]:
    if peer.is_retiring:
        return msgspec.structs.replace(peer, state=State.GONE), NO_EFFECTS
    if peer.losses > LOSSES_BEFORE_BACKOFF:
        assert peer.failure is not None
        # Somebody may have been offered the connection, and not have begun to read.
        announce = AnnounceFailed(failure=peer.failure)
        backoff = StartBackoff(failures=peer.losses - LOSSES_BEFORE_BACKOFF)
        return msgspec.structs.replace(peer, state=State.BACKOFF), (announce, backoff)
    return msgspec.structs.replace(peer, state=State.IDLE), NO_EFFECTS


def _abandon(peer: Peer, event: QuiesceTimeout) -> tuple[Peer, Effects]:
    assert peer.failure is not None
    effects = (Abandon(failure=peer.failure), AnnounceFailed(failure=peer.failure))
    if peer.is_retiring:
        return msgspec.structs.replace(peer, state=State.GONE), effects
    failures = peer.failures + 1
    backing_off = msgspec.structs.replace(peer, state=State.BACKOFF, failures=failures)
    return backing_off, (*effects, StartBackoff(failures=failures))


def _retire_connected(peer: Peer, event: Retired) -> tuple[Peer, Effects]:
    failure = PeerRetired(peer=peer.engine_id)
    return msgspec.structs.replace(peer, state=State.DRAINING, is_retiring=True, failure=failure), (DrainReads(),)


def _retire_later(peer: Peer, event: Retired) -> tuple[Peer, Effects]:
    return msgspec.structs.replace(peer, is_retiring=True, failure=PeerRetired(peer=peer.engine_id)), NO_EFFECTS


def _retire_now(peer: Peer, event: Retired) -> tuple[Peer, Effects]:
    failure = PeerRetired(peer=peer.engine_id)
    return msgspec.structs.replace(peer, state=State.GONE, failure=failure), NO_EFFECTS


_IDLE, _HANDSHAKING, _READY, _DRAINING = State.IDLE, State.HANDSHAKING, State.READY, State.DRAINING
_DISCONNECTING, _BACKOFF, _INCOMPATIBLE, _GONE = (
    State.DISCONNECTING,
    State.BACKOFF,
    State.INCOMPATIBLE,
    State.GONE,
)
_RESULTS = (HandshakeSucceeded, HandshakeFailed)
_WITHOUT_CONNECTION = (_IDLE, _HANDSHAKING, _BACKOFF, _INCOMPATIBLE)
_GIVING_UP = (_DRAINING, _DISCONNECTING)

MACHINE: Machine[Peer, Effects] = Machine(
    name="peer",
    states=State,
    initial=_IDLE,
    terminal=frozenset({_GONE}),
    events=(
        Wanted,
        HandshakeSucceeded,
        HandshakeFailed,
        BackoffElapsed,
        ConnectionSuspect,
        ReadsDrained,
        QuiesceTimeout,
        TornDown,
        Retired,
    ),
    table={
        (_IDLE, Wanted): to(_start, _HANDSHAKING),
        (_IDLE, Retired): to(_retire_now, _GONE),
        (_HANDSHAKING, HandshakeSucceeded): to(_connect, _READY, _DRAINING),
        (_HANDSHAKING, HandshakeFailed): to(_fail, _IDLE, _BACKOFF, _INCOMPATIBLE, _GONE),
        (_HANDSHAKING, Retired): to(_retire_later, _HANDSHAKING),
        (_READY, ConnectionSuspect): to(_suspect, _DRAINING),
        (_READY, Retired): to(_retire_connected, _DRAINING),
        (_DRAINING, ReadsDrained): to(_tear_down, _DISCONNECTING),
        (_DRAINING, QuiesceTimeout): to(_abandon, _BACKOFF, _GONE),
        (_DRAINING, Retired): to(_retire_later, _DRAINING),
        (_DISCONNECTING, QuiesceTimeout): to(_abandon, _BACKOFF, _GONE),
        (_DISCONNECTING, TornDown): to(_disconnect, _IDLE, _BACKOFF, _GONE),
        (_DISCONNECTING, Retired): to(_retire_later, _DISCONNECTING),
        (_BACKOFF, Wanted): to(_reject, _BACKOFF),
        (_BACKOFF, BackoffElapsed): to(_rest, _IDLE),
        (_BACKOFF, Retired): to(_retire_now, _GONE),
        (_INCOMPATIBLE, Wanted): to(_reject, _INCOMPATIBLE),
        (_INCOMPATIBLE, BackoffElapsed): to(_rest, _IDLE),
        (_INCOMPATIBLE, Retired): to(_retire_now, _GONE),
    },
    ignored={
        **pairs((_HANDSHAKING,), (Wanted,), "the attempt in flight answers this one too"),
        **pairs(_GIVING_UP, (Wanted,), "the core sees who waits when it is torn down"),
        **pairs(_WITHOUT_CONNECTION, (ConnectionSuspect,), "late news of a connection that is gone already"),
        **pairs(_GIVING_UP, (ConnectionSuspect,), "it is being given up already"),
        **pairs((*_WITHOUT_CONNECTION, _READY), (QuiesceTimeout,), "a timer of a connection that has drained since"),
        **pairs((_IDLE, _HANDSHAKING, _READY, *_GIVING_UP), (BackoffElapsed,), "a timer of an earlier failure"),
    },
    impossible={
        **pairs((_IDLE, _READY, *_GIVING_UP, _BACKOFF, _INCOMPATIBLE), _RESULTS, "no handshake is in flight"),
        **pairs((_READY,), (Wanted,), "who comes is offered the connection by the core"),
        **pairs((*_WITHOUT_CONNECTION, _READY, _DISCONNECTING), (ReadsDrained,), "only who drains is waited for"),
        **pairs((*_WITHOUT_CONNECTION, _READY, _DRAINING), (TornDown,), "nothing is being torn down"),
    },
)
