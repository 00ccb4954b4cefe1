"""A machine that vanishes without a word: `python -m tests.conformance.vanished SECONDS`, in a network of its own.

Both ends of a link are in this process, and the network between them is the loopback of a namespace, which is switched
off: nothing that is sent is acknowledged, and nobody is told. It prints how the link ended, and after how long.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import time

import trio

from connector.ports import zmq_bridge
from connector.ports.side_channel import LinkEnded
from connector.ports.zmq_bridge import ZmqSideChannel
from tests.conformance.side_channel_suite import HOST, serve

GIVEN_UP_SECONDS = 60
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def switch_loopback(*, on: bool) -> None:
    name = struct.pack("16sh14x", b"lo", 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        (flags,) = struct.unpack_from("h", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, name), 16)
        flags = flags | _IFF_UP if on else flags & ~_IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


async def main() -> None:
    switch_loopback(on=True)
    channel = ZmqSideChannel()
    listener = channel.listen(HOST, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, lambda frames: frames)
        link = await channel.open_link(HOST, listener.port)
        link.send([b"before"])
        assert await link.receive() == (b"before",)
        switch_loopback(on=False)
        begun = time.monotonic()
        link.send([b"after"])
        with trio.move_on_after(GIVEN_UP_SECONDS):
            try:
                await link.receive()
            except LinkEnded as error:
                print(f"lost after {time.monotonic() - begun:.1f} s: {error.error}")  # noqa: T201
        nursery.cancel_scope.cancel()
    channel.close()


if __name__ == "__main__":
    zmq_bridge.channel.UNACKNOWLEDGED_SECONDS = int(sys.argv[1])
    trio.run(main)
