"""What an agent's metadata say of it, as far as they can be read for certain.

NIXL documents no format. Metadata are fields one after the other, each with its key, the length of its value in eight
bytes, the value and a bar: the agent's name, the number of its connections, and for each back end its name and the
address at which it is connected to; memory follows. NIXL itself looks at no bar, and takes a length that reaches beyond
the end for what is left: bytes that it never wrote may say to it what nobody else finds in them. So what is not written
as NIXL writes it is `MetadataUnreadable`.
"""

from __future__ import annotations

import re

from connector.ports.nixl import AgentName
from connector.ports.nixl_agent.names import agent_text

_BEGIN = b"nixlSerDes|"
_LENGTH_BYTES = 8
_BACKENDS_MAX = 64

_VERSION_MASK = 0x0F
UCX_ADDRESS_VERSION_KNOWN = 1
"""The newest version of addresses that UCX 1.23 can write and read; it counts from 0."""


MEMORY_TYPE_KNOWN = 5
"""The largest number of a type of memory that NIXL 1.5 takes."""
_MEMORY_TYPE = re.compile(rb"(?=nixlSDList.t.{8}(.{4}))", re.DOTALL)
"""Wherever NIXL may look for one: it takes any byte for a bar. Ahead, so that one may lie within another."""


class MetadataUnreadable(Exception):
    """Other bytes than NIXL writes."""


class _Reader:
    """Reads fields in turn; raises MetadataUnreadable."""

    def __init__(self, metadata: bytes) -> None:
        if not metadata.startswith(_BEGIN):
            raise MetadataUnreadable
        self._metadata = metadata
        self._at = len(_BEGIN)

    def take(self, key: bytes, *, is_last: bool = False) -> bytes:
        """The value of the next field. `is_last`: nothing has to follow it."""
        value_at = self._at + len(key) + _LENGTH_BYTES
        if not self._metadata.startswith(key, self._at):
            raise MetadataUnreadable
        end = value_at + int.from_bytes(self._metadata[value_at - _LENGTH_BYTES : value_at], "little")
        if not is_last and self._metadata[end : end + 1] != b"|":
            raise MetadataUnreadable
        self._at = end + 1
        return self._metadata[value_at:end]


def agent_named_in(metadata: bytes) -> AgentName | None:
    """Whose metadata these are; None: no agent's."""
    try:
        return agent_text(_Reader(metadata).take(b"Agent", is_last=True))
    except MetadataUnreadable:
        return None


def _ucx_addresses(metadata: bytes) -> list[bytes]:
    """Of all its connections over UCX, of which NIXL writes one. Raises MetadataUnreadable."""
    fields = _Reader(metadata)
    fields.take(b"Agent")
    count = int.from_bytes(fields.take(b"Conns"), "little")
    if count > _BACKENDS_MAX:
        raise MetadataUnreadable
    connections = [(fields.take(b"t"), fields.take(b"c")) for _ in range(count)]
    return [address for backend, address in connections if backend == b"UCX"]


def ucx_address_in(metadata: bytes) -> bytes | None:
    """The address of its UCX worker; None: it has none, or it cannot be read."""
    try:
        return next(iter(_ucx_addresses(metadata)), None)
    except MetadataUnreadable:
        return None


def ucx_version(metadata: bytes) -> int | None:
    """The newest version in which an address of UCX in it is written; None: it has none. Raises MetadataUnreadable."""
    return max((address[0] & _VERSION_MASK for address in _ucx_addresses(metadata) if address), default=None)


def newest_memory_type(metadata: bytes) -> int:
    """The largest number of a type of memory in it; 0: it has none, or that of main memory."""
    return max((int.from_bytes(found[1], "little") for found in _MEMORY_TYPE.finditer(metadata)), default=0)
