"""What an agent's metadata say of it, as far as they can be read for certain.

NIXL documents no format. Metadata are fields one after the other, each with its key, the length of its value in eight
bytes, the value and a bar: the agent's name, the number of its connections, and for each back end its name and the
address at which it is connected to; memory follows. Whatever does not look like that reads as nothing here, and is left
to NIXL to judge.
"""

from __future__ import annotations

from connector.ports.nixl import AgentName
from connector.ports.nixl_agent.names import agent_text

_BEGIN = b"nixlSerDes|"
_LENGTH_BYTES = 8
_BACKENDS_MAX = 64

_VERSION_MASK = 0x0F
UCX_ADDRESS_VERSION_KNOWN = 1
"""The newest version of addresses that UCX 1.23 can write and read; it counts from 0."""


class _Unreadable(Exception):
    """Other bytes than expected."""


class _Reader:
    """Reads fields in turn; raises _Unreadable."""

    def __init__(self, metadata: bytes) -> None:
        if not metadata.startswith(_BEGIN):
            raise _Unreadable
        self._metadata = metadata
        self._at = len(_BEGIN)

    def take(self, key: bytes, *, is_last: bool = False) -> bytes:
        """The value of the next field. `is_last`: nothing has to follow it."""
        value_at = self._at + len(key) + _LENGTH_BYTES
        if not self._metadata.startswith(key, self._at):
            raise _Unreadable
        end = value_at + int.from_bytes(self._metadata[value_at - _LENGTH_BYTES : value_at], "little")
        if not is_last and self._metadata[end : end + 1] != b"|":
            raise _Unreadable
        self._at = end + 1
        return self._metadata[value_at:end]


def agent_named_in(metadata: bytes) -> AgentName | None:
    """Whose metadata these are; None: no agent's."""
    try:
        return agent_text(_Reader(metadata).take(b"Agent", is_last=True))
    except _Unreadable:
        return None


def ucx_address_in(metadata: bytes) -> bytes | None:
    """The address of its UCX worker; None: it has none, or it cannot be read."""
    try:
        fields = _Reader(metadata)
        fields.take(b"Agent")
        for _ in range(min(int.from_bytes(fields.take(b"Conns"), "little"), _BACKENDS_MAX)):
            backend, address = fields.take(b"t"), fields.take(b"c")
            if backend == b"UCX":
                return address
    except _Unreadable:
        pass
    return None


def ucx_version(metadata: bytes) -> int | None:
    """The version in which its UCX address is written; None: see `ucx_address_in`."""
    address = ucx_address_in(metadata)
    return address[0] & _VERSION_MASK if address else None
