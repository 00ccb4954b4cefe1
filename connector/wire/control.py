"""Messages on the control socket of a P worker: D says what it holds and what it releases, P says until when.

    D -> P   Hold       these leases are still wanted     -> HoldAnswer  for how long each is held, or why it is not
    D -> P   Release    these leases are no more wanted   -> Released    which releases P has counted
    D -> P   AskSums    the checksums of a lease          -> Sums        a part of them; only to a P that makes them
    P -> D   Leaving    P is to end, and keeps what it lends for so long; to engines that have sent a Hold
    tool     Inspect    show what lives                   -> Inspected   see `connector.wire.inspection`
    own engine, tool    see `connector.wire.administration`

One msgpack map in one frame each. Only durations cross: `Hold.sent_ns` is D's own clock, which P echoes and does not
read. A message is about at most LEASES_PER_MESSAGE_MAX leases, so that its size has a bound; an engine that has
more sends more messages. The same checks run where a message is made and where one is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from connector.wire.administration import Leave, LeaveTaken, Meet, MeetReport
from connector.wire.bounded import (
    ID_LENGTH_MAX,
    IDENTIFIER_PATTERN,
    NUMBER_MAX,
    RANKS_MAX,
    Identifier,
    Natural,
    decode_frame,
    decode_msgpack,
    shorten,
)
from connector.wire.inspection import Inspect
from statemachine.lease import LEASES_PER_MESSAGE_MAX, LeaseName

WHY_LENGTH_MAX = 200
"""Characters."""
ANSWER_BYTES_MAX = 2 << 20
"""What is said to a D has at most so many bytes: more than the largest message, which has 512 leases with an id and a
reason of the longest kind, 4 bytes to a character."""
REQUEST_BYTES_MAX = (1 << 20) + (1 << 16)
"""What is said to a worker has at most so many bytes: 512 leases with an id."""

SUMS_PART_BYTES = 1 << 20
SUMS_PARTS_MAX = 256
"""Enough for 33 million checksums: a prompt of a million tokens in blocks of 16, in 500 layers."""

_LEASES = Meta(max_length=LEASES_PER_MESSAGE_MAX)
_Leases: TypeAlias = Annotated[tuple[LeaseName, ...], _LEASES]
_is_identifier = re.compile(IDENTIFIER_PATTERN).match
Incarnation: TypeAlias = Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{32})?\Z")]


class HeldLease(NamedTuple):
    """P holds the lease for `remaining_ns` from when it made the answer."""

    request_id: str
    number: int
    remaining_ns: int

    @property
    def lease(self) -> LeaseName:
        return LeaseName(self.request_id, self.number)


class GoneLease(NamedTuple):
    """P does not hold the lease, and never will again."""

    request_id: str
    number: int
    why: str
    """For people: at most WHY_LENGTH_MAX printable characters."""

    @property
    def lease(self) -> LeaseName:
        return LeaseName(self.request_id, self.number)


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """D wants the blocks of `leases` to be kept."""

    engine_id: Identifier
    """D's."""
    rank: Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
    """Number of the sender among the ranks of its engine."""
    ranks: Annotated[int, Meta(ge=1, le=RANKS_MAX)]
    """How many ranks of that engine are partners of this P rank."""
    sent_ns: Natural
    leases: _Leases
    incarnation: Incarnation = ""
    """What the sender calls itself to this P alone, for as long as it knows it; empty: it has no such name."""

    def __post_init__(self) -> None:
        _require_bounded(self.leases)


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """This rank of D is done with `leases`. The fields are those of `Hold`."""

    engine_id: Identifier
    rank: Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
    ranks: Annotated[int, Meta(ge=1, le=RANKS_MAX)]
    leases: _Leases
    incarnation: Incarnation = ""

    def __post_init__(self) -> None:
        _require_bounded(self.leases)


class HoldAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="hold_answer"):
    """What became of each lease of a `Hold`, in any order. A lease that is named in neither list is not answered."""

    sent_ns: Natural
    """`sent_ns` of the `Hold` that this answers."""
    held: Annotated[tuple[HeldLease, ...], _LEASES] = ()
    gone: Annotated[tuple[GoneLease, ...], _LEASES] = ()
    agent: Annotated[str, Meta(max_length=ID_LENGTH_MAX)] = ""
    """Name of the NIXL agent in the process that answers: what D reads has to be that one's. Empty: it does not say."""

    def __post_init__(self) -> None:
        _require_bounded([*self.held, *self.gone])
        for held in self.held:
            if not 0 <= held.remaining_ns <= NUMBER_MAX:
                raise ValueError(f"remaining_ns is not from 0 to {NUMBER_MAX}")
        for gone in self.gone:
            if len(gone.why) > WHY_LENGTH_MAX or not gone.why.isprintable():
                raise ValueError(f"why is longer than {WHY_LENGTH_MAX} characters, or not printable")


class Released(msgspec.Struct, frozen=True, kw_only=True, tag="released"):
    """P has counted the release of `leases`, or had nothing to count: it need not be sent again."""

    leases: _Leases

    def __post_init__(self) -> None:
        _require_bounded(self.leases)


class AskSums(msgspec.Struct, frozen=True, kw_only=True, tag="ask_sums"):
    """D wants the checksums of the blocks of a lease, of which `part` is the next part. Not answered while P has none:
    the lease has not been granted, or is over, which the answer to a hold says."""

    lease: LeaseName
    part: Annotated[int, Meta(ge=0, lt=SUMS_PARTS_MAX)]

    def __post_init__(self) -> None:
        _require_bounded([self.lease])


NO_SUMS = b""
"""In place of what `encode_sums` makes: P could not make them, and never will. D reads nothing of it."""


class Sums(msgspec.Struct, frozen=True, kw_only=True, tag="sums"):
    """Part `part` of `parts` of what `encode_sums` made."""

    lease: LeaseName
    part: Annotated[int, Meta(ge=0, lt=SUMS_PARTS_MAX)]
    parts: Annotated[int, Meta(ge=1, le=SUMS_PARTS_MAX)]
    content: Annotated[bytes, Meta(max_length=SUMS_PART_BYTES)]

    def __post_init__(self) -> None:
        _require_bounded([self.lease])


class LeaseSums(msgspec.Struct, frozen=True, kw_only=True):
    """The checksums of a lease on one rank.

    Attributes:
        blocks: kernel blocks, by cache group: little-endian int32, one after another.
        sums: region by region, as advertised, those of the blocks of its group, in their order: little-endian int64.
    """

    blocks: Annotated[tuple[bytes, ...], Meta(max_length=4096)]
    sums: bytes


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag="leaving"):
    """P is to end. It serves what it lends for `grace_ns` from when it said so, and then no more."""

    grace_ns: Natural


LeaseRequest: TypeAlias = Hold | Release
ControlRequest: TypeAlias = LeaseRequest | AskSums | Inspect | Leave | Meet
ControlAnswer: TypeAlias = HoldAnswer | Released | Sums | Leaving

_encoder = msgspec.msgpack.Encoder()
_sums_decoder = msgspec.msgpack.Decoder(LeaseSums)
_request_decoder: msgspec.msgpack.Decoder[ControlRequest] = msgspec.msgpack.Decoder(ControlRequest)
_answer_decoder: msgspec.msgpack.Decoder[ControlAnswer] = msgspec.msgpack.Decoder(ControlAnswer)


def encode_request(message: ControlRequest) -> tuple[bytes]:
    """The frames of a message to a worker."""
    return (_encoder.encode(message),)


def encode_answer(message: ControlAnswer | LeaveTaken | MeetReport) -> tuple[bytes]:
    """The frames of a message from a worker."""
    return (_encoder.encode(message),)


def encode_sums(sums: LeaseSums) -> bytes:
    """What travels in parts."""
    return _encoder.encode(sums)


def parts_of_sums(encoded: bytes) -> int:
    return max(1, -(-len(encoded) // SUMS_PART_BYTES))


def sums_answer(asked: AskSums, encoded: bytes) -> Sums | None:
    """The part that was asked for; None: there is no such part."""
    parts = parts_of_sums(encoded)
    if parts > SUMS_PARTS_MAX:
        encoded, parts = NO_SUMS, 1
    if asked.part >= parts:
        return None
    first = asked.part * SUMS_PART_BYTES
    return Sums(lease=asked.lease, part=asked.part, parts=parts, content=encoded[first : first + SUMS_PART_BYTES])


def decode_sums(encoded_untrusted: bytes) -> LeaseSums:
    """All parts, joined. Raises DecodeFailed."""
    return decode_msgpack(_sums_decoder, encoded_untrusted, bytes_max=SUMS_PART_BYTES * SUMS_PARTS_MAX)


def gone_lease(lease: LeaseName, why: str) -> GoneLease:
    """`why` may have any length and any characters; what is sent has neither."""
    return GoneLease(*lease, shorten(why, WHY_LENGTH_MAX))


def decode_request(frames_untrusted: Sequence[bytes]) -> ControlRequest:
    """Read what a D or a tool sent. Raises DecodeFailed."""
    return decode_frame(_request_decoder, frames_untrusted, bytes_max=REQUEST_BYTES_MAX)


def decode_answer(frames_untrusted: Sequence[bytes]) -> ControlAnswer:
    """D: read what a P sent. Raises DecodeFailed."""
    return decode_frame(_answer_decoder, frames_untrusted, bytes_max=ANSWER_BYTES_MAX)


def is_request_id(text: str) -> bool:
    """Whether engines take it for the id of a request. vLLM puts what a client sends (`X-Request-Id`) into its ids as
    it is, however long, and bytes that are no ASCII as control characters."""
    return len(text) <= ID_LENGTH_MAX and _is_identifier(text) is not None


def _require_bounded(leases: Iterable[LeaseName | HeldLease | GoneLease]) -> None:
    """Raise ValueError for too many leases or an impossible name; msgspec makes it a failed decode."""
    # The names not with msgspec.Meta: LeaseName belongs to the protocol, which has no bounds on text. The number with
    # both: the types bound it before anything is built, and this where a message is made and over two lists together.
    for count, lease in enumerate(leases, start=1):
        if count > LEASES_PER_MESSAGE_MAX:
            raise ValueError(f"more than {LEASES_PER_MESSAGE_MAX} leases")
        if not is_request_id(lease.request_id):
            raise ValueError(f"a request id is not 1 to {ID_LENGTH_MAX} characters without control characters")
        if not 0 <= lease.number <= NUMBER_MAX:
            raise ValueError(f"the number of a lease is not from 0 to {NUMBER_MAX}")
