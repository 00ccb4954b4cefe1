"""ZMTP 3.0 by hand: just enough to be let in by a ROUTER, and to send it what no library would."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version, mechanism, not as a server, filler: 64 bytes."""

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame; its length as one byte or as eight."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body


def ready(kind: bytes = b"DEALER", identity: bytes = b"") -> bytes:
    """The command that ends the handshake of mechanism NULL."""
    properties = b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", kind), (b"Identity", identity))
    )
    return frame(b"\x05READY" + properties, COMMAND)


HELLO = GREETING + ready()
HELLO_BYTES = len(HELLO)
"""A ROUTER's has the same length: the names of the two kinds have."""


def message(*frames: bytes) -> bytes:
    """A message as engines send them: an empty frame, and these."""
    return b"".join(frame(each, MORE) for each in (b"", *frames[:-1])) + frame(frames[-1])


def endless(part: bytes = bytes(65536)) -> bytes:
    """One more part of a message that has no last one."""
    return frame(part, MORE)


EMPTY = frame(b"", MORE)
"""Two bytes on the wire, and 64 in libzmq's memory."""


def many_frames(count: int) -> bytes:
    """A message of so many empty frames, and a last one."""
    return EMPTY * count + frame(b"end")


PATIENCE_SECONDS = 30.0
"""Longer than a listener lets a greeting take: who is refused in the middle of one may be ended only then."""


def connect(address: tuple[str, int], source: str = "", said: Sequence[bytes] = ()) -> socket.socket:
    """A connection from the address `source` of this machine, with some bytes sent; what follows `HELLO` is sent when
    it was answered, as the protocol wants it."""
    connection = socket.socket()
    connection.settimeout(PATIENCE_SECONDS)
    connection.bind((source, 0))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the listener has ended it, maybe at once
        connection.connect(address)
        for each in said:
            connection.sendall(each)
            if each == HELLO:
                await_hello(connection)
    return connection


def await_hello(connection: socket.socket) -> None:
    """Read what a listener of ours says first, to its end; nothing when it ends the connection instead."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while len(said) < HELLO_BYTES and (received := connection.recv(HELLO_BYTES - len(said))):
            said += received


def is_ended(connection: socket.socket, seconds: float) -> bool:
    """Whether the other end closes it within this time; what it sends until then is thrown away."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
