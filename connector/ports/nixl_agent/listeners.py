"""The TCP listeners of an agent's UCX, and whether they are still there.

UCX closes a listener for good when it finds no descriptor for a connection that has come, and tells nobody
(docs/nixl.md fact 38): from then on no engine can connect that has not before.

Other threads of the process open and close listeners, too, also while the agent is made. So a listener counts as UCX's
only if it was not there before the agent was, and if the address that the agent tells its peers has its port, behind
the byte with which UCX's addresses of a TCP interface begin. Where nothing is known for certain (no /proc, another
layout of addresses, an agent without TCP) there is nothing to watch.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from connector.ports.tcp import listening_port

_LENGTH_MASK = 0x3F
"""Of the byte before an address of an interface: its length. The other two bits are flags."""
_PORT_BYTES = 2
"""The address of a TCP interface is its port, in network order."""


class Listening(NamedTuple):
    """A socket of this process that listens. The kernel gives no two sockets one `inode` at a time."""

    descriptor: int
    inode: int
    port: int


def listening() -> list[Listening]:
    """All TCP sockets of this process that listen; none if it cannot be known."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []
    found = [Listening(descriptor, _inode(descriptor), listening_port(descriptor)) for descriptor in descriptors]
    return [each for each in found if each.port]


def of_agent(before: Collection[Listening], ucx_address: bytes | None) -> tuple[Listening, ...]:
    """Those that have come since `before` and belong to UCX's worker at this address."""
    inodes = {each.inode for each in before}
    return tuple(each for each in listening() if each.inode not in inodes and _names(ucx_address or b"", each.port))


def lost(listeners: Collection[Listening]) -> list[int]:
    """Ports of those that are not there any more."""
    return [each.port for each in listeners if _inode(each.descriptor) != each.inode]


def _names(ucx_address: bytes, port: int) -> bool:
    at = ucx_address.find(port.to_bytes(_PORT_BYTES, "big"), 1)
    while at > 0:
        if ucx_address[at - 1] & _LENGTH_MASK == _PORT_BYTES:
            return True
        at = ucx_address.find(port.to_bytes(_PORT_BYTES, "big"), at + 1)
    return False


def _inode(descriptor: int) -> int:
    """0: it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0
