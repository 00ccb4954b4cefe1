"""The texts that D sends to a P through NIXL where one of the two is a built-in engine: releases and heartbeats.

    release    <request id on P>:<number of consumers>    "I hold these blocks now; that many ranks will say so"
    heartbeat  HB:<request id>,<request id>,...           "I still want these blocks; extend their leases"

NIXL delivers bytes from any agent that can reach ours, also from ones we never added, so `parse_notification` never
raises: what is not one of the two becomes `Malformed`. A request id may contain colons (the last one separates), and
an id that contains a comma cannot be named in a heartbeat. A text that starts with `HB:` is a heartbeat, but could
also be the release of a request whose id begins that way: `Heartbeat.or_release` says how it reads then, and who knows
which leases there are decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from connector.wire.bounded import ID_LENGTH_MAX, RANKS_MAX, render_untrusted

HEARTBEAT_PREFIX = "HB:"
MESSAGE_BYTES_MAX = 4 << 20
"""Largest message looked at. A built-in D puts all its waiting requests into one heartbeat, about 60 bytes each."""
HEARTBEAT_BYTES_MAX = 64 << 10
"""Largest heartbeat that we send; more requests make more messages."""
REQUEST_IDS_MAX = 1 << 16


class Release(msgspec.Struct, frozen=True):
    """One consumer has read `request_id`; `consumers` is how many are going to say so to this rank."""

    request_id: str
    consumers: int


class Heartbeat(msgspec.Struct, frozen=True):
    """The sender still waits for these requests. Each is there once, in the sender's order."""

    request_ids: tuple[str, ...]
    or_release: Release | None = None
    """The same text read as a release; None: it cannot be one."""


class Malformed(msgspec.Struct, frozen=True):
    """Neither a release nor a heartbeat. `found` is a bounded rendering of the message."""

    reason: str
    found: str


Notification: TypeAlias = Release | Heartbeat | Malformed


def encode_release(request_id: str, consumers: int) -> bytes:
    """The notification that goes with D's READ of `request_id` (its id on P)."""
    if not 1 <= consumers <= RANKS_MAX:
        raise ValueError(f"consumers must be from 1 to {RANKS_MAX}, not {consumers}")
    return f"{request_id}:{consumers}".encode()


def encode_heartbeats(request_ids: Iterable[str], bytes_max: int = HEARTBEAT_BYTES_MAX) -> list[bytes]:
    """Heartbeats that name `request_ids`, as few messages of at most `bytes_max` bytes as that takes.

    Ids that a heartbeat cannot name (see the module's text) are left out: their leases end as granted.
    """
    messages: list[bytes] = []
    batch: list[bytes] = []
    batch_bytes = len(HEARTBEAT_PREFIX)
    for request_id in request_ids:
        encoded = request_id.encode()
        if not encoded or b"," in encoded:
            continue
        if batch and batch_bytes + len(encoded) > bytes_max:
            messages.append(_heartbeat(batch))
            batch, batch_bytes = [], len(HEARTBEAT_PREFIX)
        batch.append(encoded)
        batch_bytes += len(encoded) + 1
    if batch:
        messages.append(_heartbeat(batch))
    return messages


def parse_notification(message_untrusted: bytes) -> Notification:
    """Read one notification. Never raises."""
    if len(message_untrusted) > MESSAGE_BYTES_MAX:
        return _malformed(f"longer than {MESSAGE_BYTES_MAX} bytes", message_untrusted)
    try:
        text = message_untrusted.decode()
    except UnicodeDecodeError:
        return _malformed("not UTF-8", message_untrusted)
    release = _parse_release(text, message_untrusted)
    if not text.startswith(HEARTBEAT_PREFIX):
        return release
    or_release = release if isinstance(release, Release) else None
    heartbeat = _parse_heartbeat(text, message_untrusted)
    if isinstance(heartbeat, Heartbeat):
        return msgspec.structs.replace(heartbeat, or_release=or_release)
    return or_release or heartbeat


def _parse_heartbeat(text: str, message: bytes) -> Heartbeat | Malformed:
    listed = text[len(HEARTBEAT_PREFIX) :]
    if listed.count(",") >= REQUEST_IDS_MAX:
        return _malformed(f"more than {REQUEST_IDS_MAX} request ids", message)
    # Each once: whatever looks for them takes a step for each, and a sender could name one that is lent over and over.
    request_ids = tuple(request_id for request_id in dict.fromkeys(listed.split(",")) if request_id)
    if any(len(request_id) > ID_LENGTH_MAX for request_id in request_ids):
        return _malformed(f"a request id longer than {ID_LENGTH_MAX} characters", message)
    return Heartbeat(request_ids)


def _parse_release(text: str, message: bytes) -> Release | Malformed:
    request_id, separator, consumers = text.rpartition(":")
    if not separator or not request_id:
        return _malformed("no request id and consumer count", message)
    if len(request_id) > ID_LENGTH_MAX:
        return _malformed(f"a request id longer than {ID_LENGTH_MAX} characters", message)
    # `int` alone would accept signs, spaces, underscores and the digits of every script.
    if not (consumers.isascii() and consumers.isdigit() and len(consumers) <= len(str(RANKS_MAX))):
        return _malformed("consumer count is not a number", message)
    if not 1 <= int(consumers) <= RANKS_MAX:
        return _malformed(f"consumer count is not from 1 to {RANKS_MAX}", message)
    return Release(request_id, int(consumers))


def _heartbeat(batch: list[bytes]) -> bytes:
    return HEARTBEAT_PREFIX.encode() + b",".join(batch)


def _malformed(reason: str, message: bytes) -> Malformed:
    return Malformed(reason, render_untrusted(message))
