"""Where UCX's address stands in an agent's metadata; found without the product's parser."""

from __future__ import annotations

BEFORE_ADDRESS = b"UCX|c"
LENGTH_BYTES = 8


def in_version(metadata: bytes, version: int) -> bytes:
    """The same metadata, whose UCX address claims to be of this version: four bits of one byte differ."""
    changed = bytearray(metadata)
    at = metadata.index(BEFORE_ADDRESS) + len(BEFORE_ADDRESS) + LENGTH_BYTES
    changed[at] = changed[at] & 0xF0 | version
    return bytes(changed)
