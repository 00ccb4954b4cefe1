"""How many bytes a TCP connection has received, asked of the kernel: `TCP_INFO` of Linux.

libzmq keeps the parts of a message until the last one has come, however many they are, and tells nobody. The bytes
that have come over a connection since its last whole message are what it may keep.
"""

from __future__ import annotations

import socket
import struct

_RECEIVED_BYTES = struct.Struct("128xQ")
"""Where `tcpi_bytes_received` is in `struct tcp_info`."""


def received_bytes(descriptor: int) -> int:
    """Since it was opened; 0 when the connection has ended already."""
    try:
        looked_at = socket.socket(fileno=descriptor)
    except OSError:
        return 0
    try:
        facts = looked_at.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_BYTES.size)
        return int(_RECEIVED_BYTES.unpack(facts)[0])
    except (OSError, struct.error):
        return 0
    finally:
        looked_at.detach()
