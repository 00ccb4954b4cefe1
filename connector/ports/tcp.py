"""What the kernel says of a TCP connection or listener by its descriptor, which belongs to somebody else and may be
closed any moment.

libzmq keeps the parts of a message until the last one has come, however many they are, and says nothing of it. The
bytes that have come over a connection since its last whole message are what it may keep: `TCP_INFO` of Linux has them.
Those that libzmq has not read yet are the kernel's, which keeps no more than twice the receive buffer that it was asked
for.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_RECEIVED_BYTES = struct.Struct("128xQ")
"""Where `tcpi_bytes_received` is in `struct tcp_info`."""

_COUNT = struct.Struct("i")
"""What `FIONREAD` answers."""

_WAITING = struct.Struct("24xI")
"""Where `tcpi_unacked` is, which for a listener is the length of its queue."""


def received_bytes(descriptor: int) -> int:
    """Bytes that the connection has received since it was opened; 0 when it has ended already."""
    return _tcp_info(descriptor, _RECEIVED_BYTES)


def unread_bytes(descriptor: int) -> int:
    """Received bytes that the kernel still has; 0 when the connection has ended already. Whatever has its descriptor by
    then answers something, or that it cannot: to ask changes nothing, and a wrong number excuses one measurement."""
    try:
        return int(_COUNT.unpack(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(_COUNT.size)))[0])
    except OSError:
        return 0


def waiting(listener: int) -> int:
    """Connections that wait to be accepted."""
    return _tcp_info(listener, _WAITING)


def listening_port(descriptor: int) -> int:
    """The port at which it listens; 0: it is no listener of TCP."""
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError:
        return 0
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        listener.detach()
        return 0

    def port(listener: socket.socket) -> int:
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return 0
        return int(listener.getsockname()[1])

    return _asked(listener, port, 0)


def peer_address(descriptor: int) -> str:
    """Numeric; empty when the connection has ended already."""
    try:
        connection = socket.socket(fileno=descriptor)  # the kernel says of which family its addresses are
    except OSError:
        return ""
    return _asked(connection, lambda connection: str(connection.getpeername()[0]), "")


def _tcp_info(descriptor: int, field: struct.Struct) -> int:
    try:
        # What it is said to be spares three calls of the kernel that would find it out. Only addresses depend on it.
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return 0

    def facts(connection: socket.socket) -> int:
        return int(field.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, field.size))[0])

    return _asked(connection, facts, 0)


def _asked(connection: socket.socket, question: Callable[[socket.socket], T], otherwise: T) -> T:
    """The answer; its descriptor stays open."""
    try:
        return question(connection)
    except (OSError, struct.error, IndexError, TypeError):  # it has ended, or is something else by now
        return otherwise
    finally:
        connection.detach()
