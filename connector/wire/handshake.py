"""Frames of the side channel: D asks P's scheduler process what one of P's ranks looks like.

    request   one frame, message pack of (b"get_meta_msg", pp rank, tp rank); older engines leave the pp rank out
    reply     two frames: payload, and P's `time.perf_counter` in seconds when it answered
    payload   {"compatibility_hash": text, "agent_metadata_bytes": bytes, "actor": {"life": hex, ...}}
              or {"error": text}

The payload is decoded in two phases, so that engines of different versions get a clear answer instead of a decoding
error: first the outer map, then the hash is compared, and only when it is equal the metadata inside. `actor` is this
connector's own addition: facts about P that no client is believed on, where P's control socket is, and what its KV is
(`identity`), which is compared instead of the hash. The built-in decoder ignores it, and its absence tells us that the
peer is a built-in engine. A built-in D reads the error payload as a malformed one, which
fails its handshake just as well.

The listener's clock is for built-in peers, which measure the offset between the two clocks with it. We ignore it:
nothing of ours compares the clocks of two processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from connector.wire.bounded import (
    HOST_LENGTH_MAX,
    HOST_PATTERN,
    IDENTIFIER_PATTERN,
    OPTIONAL_IDENTIFIER_PATTERN,
    PORT_MAX,
    RANKS_MAX,
    DecodeFailed,
    Fields,
    decode_frame,
    decode_msgpack,
    render_untrusted,
    require_beside,
    shorten,
)
from connector.wire.device_allocations import DeviceAllocations
from connector.wire.identity import NOT_PACKED, Difference, KvIdentity, differing_factors, differing_layers
from connector.wire.metadata import METADATA_BYTES_MAX, AgentMetadata, decode_agent_metadata
from statemachine.failures import Failure, HandshakeMalformed, HandshakeRefused, Incompatible, WrongEngine

GET_METADATA = b"get_meta_msg"
REQUEST_BYTES_MAX = 64
PUBLIC_KEY_PATTERN = r"\A[!-~]{40}\Z"
"""A key of CURVE in its text form (Z85)."""
LIFE_PATTERN = r"\A[0-9a-f]{32}\Z"
EXTENSION_BYTES_MAX = 1 << 20
"""A payload without its metadata has at most so many bytes: `identity` has some two hundred for each layer."""
PAYLOAD_BYTES_MAX = METADATA_BYTES_MAX + EXTENSION_BYTES_MAX
ERROR_LENGTH_MAX = 500
"""Longest error text sent or quoted, in characters."""
SAME_HASH = (
    "the hash covers vLLM version, connector version, model, dtype, KV cache dtype, attention backend, hybrid cache "
    "manager and speculative decoding: start both engines with the same. The option enforce_handshake_compat=false "
    "skips this comparison"
)
"""What to do where hashes differ and nothing says why."""

OTHERS_NAMED_MAX = 5
"""Fields that differ beside the first one."""

_Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
_Size: TypeAlias = Annotated[int, Meta(ge=1, le=RANKS_MAX)]


class MetadataRequest(msgspec.Struct, frozen=True):
    """A peer asks for the metadata of one of our ranks. The rank may not exist."""

    pp_rank: int
    tp_rank: int


class HandshakeError(Exception):
    """A handshake that failed; `failure` is the typed reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class ActorExtension(msgspec.Struct, frozen=True, kw_only=True):
    """What this connector adds to the payload: facts about P and this rank of it.

    Sizes and ranks are those of transfers, as in `kv_transfer_params` and `RankLayout`.
    """

    life: Annotated[str, Meta(pattern=LIFE_PATTERN)]
    """Names this run of P's scheduler process: an engine that was restarted has another one."""
    tp_size: _Size
    dcp_size: _Size
    pp_size: _Size
    tp_rank: _Rank
    pp_rank: _Rank
    control_host: Annotated[str, Meta(max_length=HOST_LENGTH_MAX, pattern=HOST_PATTERN)]
    control_port: Annotated[int, Meta(ge=1, le=PORT_MAX)]
    """Where this rank's worker takes the messages of `connector.wire.control`."""
    control_key: Annotated[str, Meta(pattern=PUBLIC_KEY_PATTERN)] | None = None
    """The public key of that socket; None: it has none, and speaks without encryption."""
    verify: Annotated[str, Meta(max_length=16, pattern=OPTIONAL_IDENTIFIER_PATTERN)]
    """The value of its option `verify`, which says which blocks it has checksums of."""
    identity: KvIdentity
    device_allocations: DeviceAllocations | None = None
    """None: this rank's KV is not on a device of CUDA, or CUDA does not say it."""
    draining: Literal["", "draining", "drained"] = ""
    """Whether P is to end, and how far it has come (`statemachine.draining`); for tools."""

    def __post_init__(self) -> None:
        # Holds where we make one, and msgspec turns it into a failed decode where a peer did.
        if self.tp_rank >= self.tp_size or self.pp_rank >= self.pp_size:
            raise ValueError(
                f"rank {self.pp_rank}, {self.tp_rank} is outside of {self.pp_size} stages of {self.tp_size} ranks"
            )


def worker_name(pp_rank: int, tp_rank: int) -> str:
    """For people. Pipeline and tensor rank, as `ps --json` has them."""
    return f"PP {pp_rank} TP {tp_rank}"


class Advertisement(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of one of its ranks to a process that does not mean to read from it: a tool, which expects
    nothing.

    `error`: why it cannot be read from. It says nothing else then, but `actor` where it has served before.
    """

    compatibility_hash: str | None
    metadata: AgentMetadata | None
    actor: ActorExtension | None
    """None: it runs the built-in connector."""
    error: str | None


class HandshakeReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that passed all checks of form, of the hash and of the engine id."""

    metadata: AgentMetadata
    actor: ActorExtension | None
    """None: the peer runs the built-in connector."""


class _Payload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outer map, of a success or of an error."""

    compatibility_hash: Annotated[str, Meta(max_length=256, pattern=IDENTIFIER_PATTERN)] | None = None
    agent_metadata_bytes: Annotated[bytes, Meta(max_length=METADATA_BYTES_MAX)] | None = None
    actor: ActorExtension | None = None
    error: str | None = None


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(tuple[bytes, _Rank, _Rank])
_older_request_decoder = msgspec.msgpack.Decoder(tuple[bytes, _Rank])
_payload_decoder = msgspec.msgpack.Decoder(_Payload)


def encode_request(pp_rank: int, tp_rank: int) -> bytes:
    """The frame that asks for the metadata of one rank."""
    return _encoder.encode((GET_METADATA, pp_rank, tp_rank))


def parse_request(frames_untrusted: Sequence[bytes]) -> MetadataRequest:
    """Read a request frame, the current or the older form. Raises DecodeFailed."""
    try:
        message, pp_rank, tp_rank = _decode_request(frames_untrusted)
    except DecodeFailed as error:
        raise DecodeFailed(f"not a request for metadata: {error.detail}") from None
    if message != GET_METADATA:
        raise DecodeFailed(f"unknown request {render_untrusted(message)}")
    return MetadataRequest(pp_rank, tp_rank)


def _decode_request(frames: Sequence[bytes]) -> tuple[bytes, int, int]:
    try:
        return decode_frame(_request_decoder, frames, bytes_max=REQUEST_BYTES_MAX)
    except DecodeFailed as error:
        try:
            message, tp_rank = decode_frame(_older_request_decoder, frames, bytes_max=REQUEST_BYTES_MAX)
        except DecodeFailed:
            raise error from None
        return message, 0, tp_rank


def encode_payload(compatibility_hash: str, agent_metadata: bytes, extension: ActorExtension) -> bytes:
    """The payload of one rank; `agent_metadata` is what `encode_agent_metadata` made."""
    return _encoder.encode(
        _Payload(
            compatibility_hash=compatibility_hash,
            agent_metadata_bytes=agent_metadata,
            actor=extension,
        )
    )


def encode_error(detail: str, extension: ActorExtension | None = None) -> bytes:
    """The payload that says why there is no other."""
    return _encoder.encode(_Payload(error=shorten(detail, ERROR_LENGTH_MAX), actor=extension))


def encode_refusal(payload: bytes, detail: str) -> bytes:
    """In place of the payload of one rank that is read no more: why, and what a tool needs to ask its worker. Without
    the metadata, or a built-in engine, which does not know `error`, would go on."""
    return encode_error(detail, _payload_decoder.decode(payload).actor)


def encode_reply(payload: bytes, clock_seconds: float) -> tuple[bytes, bytes]:
    """The two frames of a reply. `clock_seconds` is `time.perf_counter()` of the listener's process, now."""
    return payload, _encoder.encode(clock_seconds)


def decode_reply(
    frames_untrusted: Sequence[bytes],
    *,
    peer: str,
    address: str,
    expected_hash: str | None,
    identity: KvIdentity,
    not_packed: str = NOT_PACKED,
) -> HandshakeReply:
    """Read a peer's reply. `peer` is the engine id that should answer at `address`.

    `expected_hash` is our own compatibility hash, or None to skip the comparison (enforce_handshake_compat false);
    `identity` is our own, and `not_packed` says why we do not put K and V in our order that lie as the tensor's shape
    says; empty: we do. Raises HandshakeError with HandshakeMalformed, HandshakeRefused, Incompatible or WrongEngine.
    """

    def malformed(field: str, detail: str) -> HandshakeError:
        return HandshakeError(HandshakeMalformed(peer=peer, address=address, field=field, detail=detail))

    if len(frames_untrusted) != 2:
        raise malformed("frames", f"expected 2, got {len(frames_untrusted)}")
    try:
        payload = _decode_payload(frames_untrusted[0])
    except DecodeFailed as error:
        raise malformed("payload", error.detail) from None
    if payload.error is not None:
        detail = shorten(payload.error, ERROR_LENGTH_MAX)
        raise HandshakeError(HandshakeRefused(peer=peer, address=address, detail=detail))
    if payload.compatibility_hash is None or payload.agent_metadata_bytes is None:
        raise malformed("payload", "compatibility_hash or agent_metadata_bytes is missing")
    if payload.actor is not None:
        differing = incompatibilities(
            identity, payload.actor.identity, enforce_factors=expected_hash is not None, not_packed=not_packed
        )
        if differing:
            raise HandshakeError(_differs(peer, address, differing))
    elif expected_hash is not None and payload.compatibility_hash != expected_hash:
        raise HandshakeError(_hash_mismatch(peer, address, expected_hash, payload.compatibility_hash))
    try:
        metadata = decode_agent_metadata(payload.agent_metadata_bytes)
    except DecodeFailed as error:
        raise malformed("agent_metadata", error.detail) from None
    if metadata.engine_id != peer:
        raise HandshakeError(WrongEngine(peer=peer, address=address, found=metadata.engine_id))
    if payload.actor is not None and payload.actor.dcp_size != metadata.dcp_size:
        detail = f"dcp_size is {metadata.dcp_size} in the metadata and {payload.actor.dcp_size} in the extension"
        raise malformed("actor", detail)
    return HandshakeReply(metadata=metadata, actor=payload.actor)


def decode_advertisement(frames_untrusted: Sequence[bytes]) -> Advertisement:
    """Read the reply of any engine. Raises DecodeFailed."""
    if len(frames_untrusted) != 2:
        raise DecodeFailed(f"expected 2 frames, got {len(frames_untrusted)}")
    payload = _decode_payload(frames_untrusted[0])
    agent_metadata = payload.agent_metadata_bytes
    return Advertisement(
        compatibility_hash=payload.compatibility_hash,
        metadata=decode_agent_metadata(agent_metadata) if agent_metadata is not None else None,
        actor=payload.actor,
        error=shorten(payload.error, ERROR_LENGTH_MAX) if payload.error is not None else None,
    )


def _decode_payload(payload_untrusted: bytes) -> _Payload:
    def look(fields: Fields) -> None:
        require_beside("agent_metadata_bytes", fields, len(payload_untrusted), EXTENSION_BYTES_MAX)

    return decode_msgpack(_payload_decoder, payload_untrusted, bytes_max=PAYLOAD_BYTES_MAX, look=look)


def incompatibilities(
    ours: KvIdentity, theirs: KvIdentity, *, enforce_factors: bool, not_packed: str = NOT_PACKED
) -> list[Difference]:
    """Why we cannot read their KV as far as identities go; empty: we can. The first is the plainest.

    `not_packed` says why we do not put K and V in our order that lie as the tensor's shape says; empty: we do.
    """
    factors = differing_factors(ours.factors, theirs.factors) if enforce_factors else []
    return [*factors, *differing_layers(ours.layers, theirs.layers, not_packed=not_packed)]


def _differs(peer: str, address: str, differing: Sequence[Difference]) -> Incompatible:
    first = differing[0]
    others = ", ".join(each.field for each in differing[1 : OTHERS_NAMED_MAX + 1])
    unnamed = len(differing) - 1 - OTHERS_NAMED_MAX
    also = f". Also differ: {others}" + (f" and {unnamed} more" if unnamed > 0 else "") if others else ""
    return Incompatible(
        peer=peer,
        address=address,
        field=first.field,
        local=first.local,
        remote=first.remote,
        advice=first.advice + also,
    )


def _hash_mismatch(peer: str, address: str, local: str, remote: str) -> Incompatible:
    return Incompatible(
        peer=peer,
        address=address,
        field="compatibility_hash",
        local=local,
        remote=remote,
        advice=SAME_HASH,
    )
