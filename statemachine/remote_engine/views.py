"""What lives in the core of a remote engine, for people; nothing of it leads back into the core."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from statemachine import hold, peer, request
from statemachine.lease import LeaseName

WaitsFor: TypeAlias = Literal["peer", "checksums", "reads", "check", "proof", "quiescence"]
"""`checksums`: P is connected, and it is not known what to read. All that takes long then is what P has to say of its
blocks, with the option verify. `check`: all bytes are here, and are to be compared with that."""

_WAITS_FOR: dict[request.State, WaitsFor] = {
    request.State.PENDING_HANDSHAKE: "peer",
    request.State.READING: "reads",
    request.State.PROVING: "proof",
    request.State.DRAINING: "quiescence",
}


def waits_for(value: request.Request, peer_state: peer.State) -> WaitsFor:
    """What a request that has not ended waits for."""
    if value.state is request.State.PENDING_HANDSHAKE and peer_state is peer.State.READY:
        return "checksums"
    if value.state is request.State.READING and not value.in_flight:
        return "check"
    return _WAITS_FOR[value.state]


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it is now. Times are those of the clock that the core is driven by.

    Attributes:
        started_ns: when its blocks were allocated here.
        until_ns: how long it stays in its state at most.
    """

    value: request.Request
    waits_for: WaitsFor
    started_ns: int | None
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
        ranks: how many partners it has; 0 without a connection.
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
