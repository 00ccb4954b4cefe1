"""What can be seen of UCX from outside, found without the product's code."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import psutil

BEFORE_ADDRESS = b"UCX|c"
LENGTH_BYTES = 8


def in_version(metadata: bytes, version: int) -> bytes:
    """The same metadata, whose UCX address claims to be of this version: four bits of one byte differ."""
    changed = bytearray(metadata)
    at = metadata.index(BEFORE_ADDRESS) + len(BEFORE_ADDRESS) + LENGTH_BYTES
    changed[at] = changed[at] & 0xF0 | version
    return bytes(changed)


def of_memory_type(metadata: bytes, number: int) -> bytes:
    """The same metadata, whose first list of memory claims to be of this type."""
    before = b"nixlSDList|t"
    at = metadata.index(before) + len(before) + LENGTH_BYTES
    return metadata[:at] + number.to_bytes(4, "little") + metadata[at + 4 :]


def unwritten(metadata: bytes) -> dict[str, bytes]:
    """The same metadata as NIXL would never write them, and reads them all the same."""
    begin, rest = b"nixlSerDes|", metadata.index(b"Conns")
    first, fields = metadata[:rest], metadata[rest + len(b"Conns") + LENGTH_BYTES + 8 + 1 :]
    one = (1).to_bytes(LENGTH_BYTES, "little")
    others = b"t" + one + b"X|c" + one + b"y|"

    def connections(count: int) -> bytes:
        return b"Conns" + (8).to_bytes(LENGTH_BYTES, "little") + count.to_bytes(8, "little") + b"|"

    return {
        "another bar": metadata.replace(BEFORE_ADDRESS, b"UCX!c"),
        "a name without end": begin + b"Agent" + b"\xff" * LENGTH_BYTES + metadata[rest:],
        "many back ends": first + connections(65) + 64 * others + fields,
    }


def listens(pid: int) -> list[tuple[str, int]]:
    """Addresses at which a process listens."""
    connections = psutil.Process(pid).net_connections("tcp")
    return sorted((each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN)


def names(metadata: bytes, port: int) -> bool:
    """Whether UCX's address tells peers of this port. Others of a process are vLLM's, some of which end it when they
    hear a stranger."""
    return any(bytes([length, *port.to_bytes(2, "big")]) in metadata for length in (0x02, 0x82))


@contextlib.contextmanager
def dropped(pid: int, metadata: bytes) -> Iterator[bytes]:
    """The metadata of a process as if what is sent to its ports of UCX were dropped: who listens there has no room."""
    ports = [port for _, port in listens(pid) if names(metadata, port)]
    assert ports
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("", 0), backlog=0))
        instead = listener.getsockname()[1]
        for _ in range(3):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", instead))
        for port in ports:
            metadata = metadata.replace(port.to_bytes(2, "big"), instead.to_bytes(2, "big"))
        yield metadata
