"""What the kernel says of a TCP connection or listener by its descriptor, which belongs to somebody else and may be
closed any moment.

libzmq keeps the parts of a message until the last one has come, however many they are, and tells nobody. The bytes
that have come over a connection since its last whole message are what it may keep: `TCP_INFO` of Linux has them.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")

_RECEIVED_BYTES = struct.Struct("128xQ")
"""Where `tcpi_bytes_received` is in `struct tcp_info`."""

_WAITING = struct.Struct("24xI")
"""Where `tcpi_unacked` is, which for a listener is the length of its queue."""


def received_bytes(descriptor: int) -> int:
    """Since it was opened; 0 when the connection has ended already."""
    return _asked(descriptor, partial(_tcp_info, _RECEIVED_BYTES), 0)


def waiting(listener: int) -> int:
    """Connections that wait to be accepted."""
    return _asked(listener, partial(_tcp_info, _WAITING), 0)


def peer_address(descriptor: int) -> str:
    """Empty when the connection has ended already."""
    return _asked(descriptor, lambda connection: str(connection.getpeername()[0]), "")


def _tcp_info(field: struct.Struct, of: socket.socket) -> int:
    facts = of.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, field.size)
    return int(field.unpack(facts)[0])


def _asked(descriptor: int, question: Callable[[socket.socket], T], otherwise: T) -> T:
    try:
        # What it is said to be spares three calls of the kernel that would find it out, and changes no answer.
        looked_at = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return otherwise
    try:
        return question(looked_at)
    except (OSError, struct.error, IndexError, TypeError):  # it has ended, or is something else by now
        return otherwise
    finally:
        looked_at.detach()
