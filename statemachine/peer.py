"""One remote prefill engine, as a decode rank sees it.

    idle           nothing is known but its address
    handshaking    one handshake is in flight; every waiting request shares its outcome
    ready          connected: its agent is loaded and its descriptor lists are prepared
    draining       the connection is to be rebuilt or given up; READs in flight end first
    backoff        the last attempt failed; requests fail at once until the delay is over
    incompatible   it answered, and KV cannot be exchanged; like backoff, with a longer delay
    gone           given up: replaced by another engine at its address, or evicted

Why `draining` comes before rebuilding: after a transport error the same agent must be removed before it can be added
again (nixl.md fact 7), and removing an agent while a READ is in flight hides the end of that READ. If READs do not
end in time the connection is abandoned as it is (`AbandonConnection`): it stays loaded until they do.

A failed peer fails requests at once while it backs off, so that a dead engine does not fill the decode engine's block
pool with requests that wait for it. The delay doubles from attempt to attempt, with jitter; the shell computes it.
"""

from __future__ import annotations

import msgspec

from statemachine.failures import Failure, PeerRetired
from statemachine.kernel import NO_EFFECTS, Effect, Effects, Event, Machine, MachineState, pairs, to


class State(MachineState):
    IDLE = "idle"
    HANDSHAKING = "handshaking"
    READY = "ready"
    DRAINING = "draining"
    BACKOFF = "backoff"
    INCOMPATIBLE = "incompatible"
    GONE = "gone"


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the machine.

    `failures` counts handshakes that failed in a row. While draining, `wanted` says that requests wait for the rebuilt
    connection, `retiring` that there will be none. `failure` is the last one.
    """

    engine_id: str
    state: State = State.IDLE
    failures: int = 0
    wanted: bool = False
    retiring: bool = False
    failure: Failure | None = None


class Wanted(Event, frozen=True, kw_only=True):
    """A request needs this peer."""


class HandshakeSucceeded(Event, frozen=True, kw_only=True):
    """Everything is validated and prepared."""


class HandshakeFailed(Event, frozen=True, kw_only=True):
    """The attempt failed and left no trace."""

    failure: Failure


class HandshakeIncompatible(Event, frozen=True, kw_only=True):
    """The peer answered; the two engines cannot exchange KV."""

    failure: Failure


class BackoffElapsed(Event, frozen=True, kw_only=True):
    """The delay after a failed attempt is over."""


class ConnectionSuspect(Event, frozen=True, kw_only=True):
    """A READ or a notification said that the connection is lost, or the engine was found to have restarted."""

    failure: Failure


class ReadsDrained(Event, frozen=True, kw_only=True):
    """No READ from this peer is in flight any more."""


class QuiesceTimeout(Event, frozen=True, kw_only=True):
    """READs from this peer do not end."""


class Retired(Event, frozen=True, kw_only=True):
    """Another engine has taken its address, it was evicted, or the connector stops."""


class StartHandshake(Effect, frozen=True, kw_only=True):
    """Begin one attempt, bounded in time."""


class AnnounceReady(Effect, frozen=True, kw_only=True):
    """Wake every waiting request."""


class AnnounceFailed(Effect, frozen=True, kw_only=True):
    """Fail every waiting request."""

    failure: Failure
    incompatible: bool = False


class StartBackoff(Effect, frozen=True, kw_only=True):
    """Feed BackoffElapsed after a delay that grows with `failures`."""

    failures: int


class DrainReads(Effect, frozen=True, kw_only=True):
    """Post nothing more to this connection; feed ReadsDrained when (or if already) nothing is in flight."""


class TearDownConnection(Effect, frozen=True, kw_only=True):
    """Release its descriptor lists and remove its agent."""


class AbandonConnection(Effect, frozen=True, kw_only=True):
    """READs never ended: keep the agent until they do, then tear down."""


def _start(peer: Peer, event: Wanted | ReadsDrained) -> tuple[Peer, Effects]:
    return msgspec.structs.replace(peer, state=State.HANDSHAKING, wanted=False), (StartHandshake(),)


def _connect(peer: Peer, event: HandshakeSucceeded) -> tuple[Peer, Effects]:
    if peer.retiring:
        assert peer.failure is not None
        draining = msgspec.structs.replace(peer, state=State.DRAINING, failures=0)
        return draining, (AnnounceFailed(failure=peer.failure), DrainReads())
    return msgspec.structs.replace(peer, state=State.READY, failures=0, failure=None), (AnnounceReady(),)


def _fail(peer: Peer, event: HandshakeFailed) -> tuple[Peer, Effects]:
    failures = peer.failures + 1
    announce = AnnounceFailed(failure=event.failure)
    if peer.retiring:
        return msgspec.structs.replace(peer, state=State.GONE, failure=event.failure), (announce,)
    failed = msgspec.structs.replace(peer, state=State.BACKOFF, failures=failures, failure=event.failure)
    return failed, (announce, StartBackoff(failures=failures))


def _refuse(peer: Peer, event: HandshakeIncompatible) -> tuple[Peer, Effects]:
    failures = peer.failures + 1
    announce = AnnounceFailed(failure=event.failure, incompatible=True)
    if peer.retiring:
        return msgspec.structs.replace(peer, state=State.GONE, failure=event.failure), (announce,)
    refused = msgspec.structs.replace(peer, state=State.INCOMPATIBLE, failures=failures, failure=event.failure)
    return refused, (announce, StartBackoff(failures=failures))


def _reject(peer: Peer, event: Wanted) -> tuple[Peer, Effects]:
    assert peer.failure is not None
    return peer, (AnnounceFailed(failure=peer.failure, incompatible=peer.state is State.INCOMPATIBLE),)


def _rest(peer: Peer, event: BackoffElapsed) -> tuple[Peer, Effects]:
    return msgspec.structs.replace(peer, state=State.IDLE), NO_EFFECTS


def _announce(peer: Peer, event: Wanted) -> tuple[Peer, Effects]:
    return peer, (AnnounceReady(),)


def _suspect(peer: Peer, event: ConnectionSuspect) -> tuple[Peer, Effects]:
    return msgspec.structs.replace(peer, state=State.DRAINING, failure=event.failure), (DrainReads(),)


def _want_later(peer: Peer, event: Wanted) -> tuple[Peer, Effects]:
    if peer.retiring:
        assert peer.failure is not None
        return peer, (AnnounceFailed(failure=peer.failure),)
    return msgspec.structs.replace(peer, wanted=True), NO_EFFECTS


def _rebuild(peer: Peer, event: ReadsDrained) -> tuple[Peer, Effects]:
    if peer.retiring:
        return msgspec.structs.replace(peer, state=State.GONE), (TearDownConnection(),)
    if peer.wanted:
        peer, effects = _start(peer, event)
        return peer, (TearDownConnection(), *effects)
    return msgspec.structs.replace(peer, state=State.IDLE), (TearDownConnection(),)


def _abandon(peer: Peer, event: QuiesceTimeout) -> tuple[Peer, Effects]:
    assert peer.failure is not None
    announce = AnnounceFailed(failure=peer.failure)
    if peer.retiring:
        return msgspec.structs.replace(peer, state=State.GONE), (AbandonConnection(), announce)
    failures = peer.failures + 1
    backing_off = msgspec.structs.replace(peer, state=State.BACKOFF, failures=failures, wanted=False)
    return backing_off, (AbandonConnection(), announce, StartBackoff(failures=failures))


def _retire_connected(peer: Peer, event: Retired) -> tuple[Peer, Effects]:
    failure = PeerRetired(peer=peer.engine_id)
    return msgspec.structs.replace(peer, state=State.DRAINING, retiring=True, failure=failure), (DrainReads(),)


def _retire_later(peer: Peer, event: Retired) -> tuple[Peer, Effects]:
    failure = PeerRetired(peer=peer.engine_id)
    announce: Effects = (AnnounceFailed(failure=failure),) if peer.wanted else NO_EFFECTS
    return msgspec.structs.replace(peer, retiring=True, wanted=False, failure=failure), announce


def _retire_now(peer: Peer, event: Retired) -> tuple[Peer, Effects]:
    return msgspec.structs.replace(peer, state=State.GONE), NO_EFFECTS


_IDLE, _HANDSHAKING, _READY, _DRAINING = State.IDLE, State.HANDSHAKING, State.READY, State.DRAINING
_BACKOFF, _INCOMPATIBLE, _GONE = State.BACKOFF, State.INCOMPATIBLE, State.GONE
_RESULTS = (HandshakeSucceeded, HandshakeFailed, HandshakeIncompatible)
_WITHOUT_CONNECTION = (_IDLE, _HANDSHAKING, _BACKOFF, _INCOMPATIBLE)

MACHINE: Machine[Peer] = Machine(
    name="peer",
    states=State,
    initial=_IDLE,
    terminal=frozenset({_GONE}),
    events=(
        Wanted,
        HandshakeSucceeded,
        HandshakeFailed,
        HandshakeIncompatible,
        BackoffElapsed,
        ConnectionSuspect,
        ReadsDrained,
        QuiesceTimeout,
        Retired,
    ),
    table={
        (_IDLE, Wanted): to(_start, _HANDSHAKING),
        (_IDLE, Retired): to(_retire_now, _GONE),
        (_HANDSHAKING, HandshakeSucceeded): to(_connect, _READY, _DRAINING),
        (_HANDSHAKING, HandshakeFailed): to(_fail, _BACKOFF, _GONE),
        (_HANDSHAKING, HandshakeIncompatible): to(_refuse, _INCOMPATIBLE, _GONE),
        (_HANDSHAKING, Retired): to(_retire_later, _HANDSHAKING),
        (_READY, Wanted): to(_announce, _READY),
        (_READY, ConnectionSuspect): to(_suspect, _DRAINING),
        (_READY, Retired): to(_retire_connected, _DRAINING),
        (_DRAINING, Wanted): to(_want_later, _DRAINING),
        (_DRAINING, ReadsDrained): to(_rebuild, _IDLE, _HANDSHAKING, _GONE),
        (_DRAINING, QuiesceTimeout): to(_abandon, _BACKOFF, _GONE),
        (_DRAINING, Retired): to(_retire_later, _DRAINING),
        (_BACKOFF, Wanted): to(_reject, _BACKOFF),
        (_BACKOFF, BackoffElapsed): to(_rest, _IDLE),
        (_BACKOFF, Retired): to(_retire_now, _GONE),
        (_INCOMPATIBLE, Wanted): to(_reject, _INCOMPATIBLE),
        (_INCOMPATIBLE, BackoffElapsed): to(_rest, _IDLE),
        (_INCOMPATIBLE, Retired): to(_retire_now, _GONE),
    },
    ignored={
        **pairs((_HANDSHAKING,), (Wanted,), "the attempt in flight answers this request too"),
        **pairs(_WITHOUT_CONNECTION, (ConnectionSuspect,), "late news of a connection that is gone already"),
        **pairs((_DRAINING,), (ConnectionSuspect,), "it is being rebuilt already"),
        **pairs((*_WITHOUT_CONNECTION, _READY), (QuiesceTimeout,), "a timer of a connection that has drained since"),
        **pairs((_IDLE, _HANDSHAKING, _READY, _DRAINING), (BackoffElapsed,), "a timer of an earlier failure"),
    },
    impossible={
        **pairs((_IDLE, _READY, _DRAINING, _BACKOFF, _INCOMPATIBLE), _RESULTS, "no handshake is in flight"),
        **pairs((*_WITHOUT_CONNECTION, _READY), (ReadsDrained,), "only a draining connection is waited for"),
    },
)
