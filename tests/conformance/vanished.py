"""A machine that vanishes without a word: `python -m tests.conformance.vanished`, in a network of its own.

Both ends of a link are in this process, and the network between them is the loopback of a namespace, which is switched
off: nothing that is sent is acknowledged, and nobody is told. What is printed says how the link has ended, and after
how long, or that it goes on. Times are production's, divided by `--faster`.
"""

from __future__ import annotations

import argparse
import fcntl
import socket
import struct
import time

import trio

from connector.ports.side_channel import LinkEnded
from connector.ports.zmq_bridge import ZmqSideChannel, channel
from tests.conformance.side_channel_suite import HOST, serve

GIVEN_UP_SECONDS = 60
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def switch_loopback(*, on: bool) -> None:
    name = struct.pack("16sh14x", b"lo", 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        (flags,) = struct.unpack_from("h", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, name), 16)
        flags = flags | _IFF_UP if on else flags & ~_IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


async def main(*, is_asked: bool, loses_a_probe: bool) -> None:
    switch_loopback(on=True)
    side_channel = ZmqSideChannel()
    listener = side_channel.listen(HOST, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, lambda frames: frames)
        link = await side_channel.open_link(HOST, listener.port)
        link.send([b"before"])
        assert await link.receive() == (b"before",)
        begun = time.monotonic()
        if loses_a_probe:
            await trio.sleep(channel.KEEPALIVE_IDLE_SECONDS / 2)
        switch_loopback(on=False)
        if loses_a_probe:
            await trio.sleep(channel.KEEPALIVE_IDLE_SECONDS / 2 + channel.KEEPALIVE_PROBE_SECONDS / 2)
            switch_loopback(on=True)
        if is_asked:
            link.send([b"after"])
        with trio.move_on_after(2 * channel.UNACKNOWLEDGED_SECONDS if loses_a_probe else GIVEN_UP_SECONDS):
            try:
                await link.receive()
            except LinkEnded as error:
                print(f"lost after {time.monotonic() - begun:.1f} s: {error.error}")  # noqa: T201
                nursery.cancel_scope.cancel()
                return
        link.send([b"still there"])
        with trio.move_on_after(GIVEN_UP_SECONDS):
            assert await link.receive() == (b"still there",)
            print("goes on")  # noqa: T201
        nursery.cancel_scope.cancel()
    side_channel.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faster", type=int, default=1, help="a divisor of all times, of which whole seconds are left")
    parser.add_argument("--asked", action="store_true", help="something is said when nobody is there any more")
    parser.add_argument("--loses-a-probe", action="store_true", help="the network is away for the first probe alone")
    arguments = parser.parse_args()
    channel.UNACKNOWLEDGED_SECONDS //= arguments.faster
    channel.KEEPALIVE_IDLE_SECONDS //= arguments.faster
    channel.KEEPALIVE_PROBE_SECONDS //= arguments.faster
    trio.run(lambda: main(is_asked=arguments.asked, loses_a_probe=arguments.loses_a_probe))
