"""Strangers: connections that send what no engine sends, and connections that say nothing, or half of something."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

import msgspec
import zmq

CONNECT_SECONDS = 2.0
ZMQ_PATIENCE_MS = 200
HALF_OPEN = 24
"""Connections of one visit."""

GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48)
"""Of ZMTP 3.0, as a client."""
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"

BYTES = (
    b"GET /metrics HTTP/1.1\r\nHost: engine\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    bytes(20_000),
    GREETING[:10] + b"\xff" * 64,
    GREETING + b"\x04\x05\x09NOTHING",
    GREETING + READY + b"\x02" + (1 << 62).to_bytes(8, "big") + b"x",
    GREETING + READY + b"\x07\xff",
)
"""What is no ZMTP, or stops being it."""

MESSAGES = (
    [b""],
    [b"\xc1\xff\x00"],
    [b"x" * 100_000],
    [b"", b"\x91" * 1000],
    [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 977))],
    [b"", msgspec.msgpack.encode((b"get_something", 0, 0))],
    [msgspec.msgpack.encode({"type": "hold", "number": -1, "leases": [["x", 1]] * 5000})],
    [msgspec.msgpack.encode({"type": "release", "number": 1, "leases": "all of them"})],
    [msgspec.msgpack.encode({"type": "held", "number": 2**63 - 1})],
    [b""] * 40,
)
"""What is ZMTP, and no message of these engines."""


def send_garbage(address: tuple[str, int], rng: random.Random) -> None:
    """All of it, and some bytes at random, each on a connection of its own. An engine that has ended refuses."""
    noise = [rng.randbytes(rng.randrange(1, 3000)), GREETING + READY + rng.randbytes(rng.randrange(1, 3000))]
    for data in (*BYTES, *noise):
        with contextlib.suppress(OSError), socket.create_connection(address, CONNECT_SECONDS) as connection:
            connection.sendall(data)
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, ZMQ_PATIENCE_MS)
            dealer.connect("tcp://{}:{}".format(*address))
            for frames in (*MESSAGES, [rng.randbytes(rng.randrange(1, 300))]):
                with contextlib.suppress(zmq.Again):
                    dealer.send_multipart(frames, zmq.DONTWAIT)
            dealer.poll(ZMQ_PATIENCE_MS)
    finally:
        context.destroy(linger=0)


def keep_half_open(address: tuple[str, int], seconds: float, stop: threading.Event) -> int:
    """Connections that stop in the middle of the greeting, or before it, or behind it; how many were let in."""
    with contextlib.ExitStack() as stack:
        let_in = 0
        for number in range(HALF_OPEN):
            with contextlib.suppress(OSError):
                connection = stack.enter_context(socket.create_connection(address, CONNECT_SECONDS))
                connection.sendall((b"", GREETING[:11], GREETING, GREETING + READY[:9])[number % 4])
                let_in += 1
        stop.wait(seconds)
        return let_in
