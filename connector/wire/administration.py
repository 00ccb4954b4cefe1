"""Messages that change what an engine does, as its operator wants. `nixl-actor drain` and `meet` send them.

    tool -> side channel     b"drain_engine"         -> DrainReport   begin to drain; what has become of it
    own engine -> worker     Leave                   -> LeaveTaken    tell your decode engines that we leave
    tool -> worker           Meet                    -> MeetReport    connect these engines before a request needs them

The first is asked of the engine as a whole, on its side channel: one frame, and two in return as for every question
there, the second of which (the listener's clock) is not looked at. It may be repeated: draining begins once, and each
answer says how far it has come. The second is what the scheduler process then tells each of its workers on their
control sockets (`connector/runtime/draining.py`). The third goes to the control socket of each rank of a decode
engine, and may be repeated as well. One msgpack map in one frame each. Built-in engines are sent none of these.

A process that reaches the sockets of an engine can send the first and the third, as it can read KV. The second has a
secret in it, which a worker makes when it starts and vLLM carries to the scheduler process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from connector.wire.bounded import (
    ID_LENGTH_MAX,
    DecodeFailed,
    Natural,
    Place,
    decode_frame,
    decode_msgpack,
    shorten,
)

_DRAIN_ENGINE = b"drain_engine"
REPORT_BYTES_MAX = 1 << 16

LEAVE_SECRET_BYTES = 16

MEET_PLACES_MAX = 64
"""A message names at most so many places."""

PROBLEM_LENGTH_MAX = 1024
"""Characters of what a place says about its last attempt. It quotes what another engine has said."""

MEET_REPORT_BYTES_MAX = MEET_PLACES_MAX * (4 * (ID_LENGTH_MAX + PROBLEM_LENGTH_MAX) + 1024)
"""A character takes four bytes at most; the rest is for the place and for names of our own."""


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The engine is to end: its leases are renewed for `grace_ns` at most, and its decode engines are told.

    `secret`: of the worker that it is sent to; only the processes of its engine know it. A worker that left alone would
    lose what its engine goes on to lend.
    """

    grace_ns: Natural
    secret: Annotated[bytes, Meta(min_length=LEAVE_SECRET_BYTES, max_length=LEAVE_SECRET_BYTES)]


class LeaveTaken(msgspec.Struct, frozen=True, kw_only=True, tag="leave_taken"):
    """They are told. `leases` of this worker have not ended."""

    leases: Natural


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag="meet"):
    """Connect the prefill engines at these places, host:port of their side channels, and keep them connected."""

    places: Annotated[tuple[Place, ...], Meta(max_length=MEET_PLACES_MAX)]


class PlaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """How far one has come.

    Attributes:
        state: that of `statemachine.introduction`, met when it is connected; unknown: it was not taken.
        engine_id: of the engine that has answered there.
        problem: why the last attempt failed.
        kind: of the failure (`statemachine.failures`) that this was, if it has a type.
    """

    place: str
    state: str
    engine_id: str
    problem: str
    kind: str = ""


class MeetReport(msgspec.Struct, frozen=True, kw_only=True, tag="meet_report"):
    """A row for each place of the question, as this rank sees it."""

    rows: Annotated[tuple[PlaceRow, ...], Meta(max_length=MEET_PLACES_MAX)]


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far an engine has come.

    Attributes:
        state: draining, or drained: nothing is lent any more, or the grace period is over, and the engine may be ended.
        seconds: since it began.
        seconds_left: until the grace period is over.
        lent: prefills that are lent, or were accepted before and will be.
        not_lent: prefills that have come since, and are answered without kv_transfer_params.
        answering: requests whose answers it writes itself. It does not wait for them; vLLM does, for
            `--shutdown-timeout`.
    """

    state: Literal["draining", "drained"]
    seconds: float
    seconds_left: float
    lent: Natural
    not_lent: Natural
    answering: Natural


class _Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The payload of the reply; an engine that refuses says why, as it does to a handshake."""

    drain: DrainReport | None = None
    error: str | None = None


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(tuple[bytes])
_reply_decoder = msgspec.msgpack.Decoder(_Reply)
_taken_decoder = msgspec.msgpack.Decoder(LeaveTaken)
_met_decoder = msgspec.msgpack.Decoder(MeetReport)


def encode_drain() -> bytes:
    """The frame that asks an engine to drain."""
    return _encoder.encode((_DRAIN_ENGINE,))


def is_drain(frames_untrusted: Sequence[bytes]) -> bool:
    """Whether a question on the side channel is that one."""
    try:
        return decode_frame(_request_decoder, frames_untrusted, bytes_max=64) == (_DRAIN_ENGINE,)
    except DecodeFailed:
        return False


def encode_report(report: DrainReport) -> bytes:
    """The payload of the answer."""
    return _encoder.encode(_Reply(drain=report))


def decode_report(frames_untrusted: Sequence[bytes]) -> DrainReport:
    """Read the answer. Raises DecodeFailed, for a refusal as well."""
    if len(frames_untrusted) != 2:
        raise DecodeFailed(f"expected 2 frames, got {len(frames_untrusted)}")
    reply = decode_msgpack(_reply_decoder, frames_untrusted[0], bytes_max=REPORT_BYTES_MAX)
    if reply.drain is None:
        raise DecodeFailed(f"it does not drain: {shorten(reply.error or 'no reason is given')}")
    return reply.drain


def decode_leave_taken(frames_untrusted: Sequence[bytes]) -> LeaveTaken:
    """Read a worker's answer. Raises DecodeFailed."""
    return decode_frame(_taken_decoder, frames_untrusted, bytes_max=1024)


def decode_meet_report(frames_untrusted: Sequence[bytes]) -> MeetReport:
    """Read a worker's answer. Raises DecodeFailed."""
    return decode_frame(_met_decoder, frames_untrusted, bytes_max=MEET_REPORT_BYTES_MAX)
