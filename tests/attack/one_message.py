"""One message of very many empty frames at a control socket: for how long another client is not answered.

    python -m tests.attack.one_message [--without-end] FRAMES [FRAMES ...]

The socket is in this process and answers everything. The sender is a process of its own, at another address of this
machine; it says a few words, which are answered, and then the message. A line for each number of frames: whether all of
them were taken (each before anybody else is heard), the longest wait of another client and of another task of the same
loop, and the memory that was added. What `make attack` tries again and again is tried once here, and looked at all the
time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from typing import Any

import trio

from connector.ports.side_channel import Link, Listener
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.worker.control_socket import open_control_socket
from tests.attack.zmtp import EMPTY, HELLO, connect, frame, message
from tests.rig.process import resident_bytes

HOST, STRANGER = "127.0.0.1", "127.0.0.2"
WORDS = 4
"""After so many messages frames take longest: libzmq tells its other thread of each that is taken."""
PIECE = 1 << 16
"""Frames that are handed to the kernel together."""
MB = 1 << 20
SETTLED_SECONDS = 2.0
"""Before the sender begins, and after what it has sent has come to its end."""


def send(port: int, frames: int, has_end: bool) -> None:
    """Entry point of the sender's process."""
    said = (HELLO, message(b"a word") * WORDS)
    with contextlib.suppress(OSError), connect((HOST, port), STRANGER, said) as connection:
        time.sleep(SETTLED_SECONDS)
        for left in range(frames, 0, -PIECE):
            connection.sendall(EMPTY * min(PIECE, left))
        if has_end:
            connection.sendall(frame(b"end"))
        connection.settimeout(None)
        while connection.recv(1 << 16):  # until it is ended
            pass


class Watch:
    """The longest times, in seconds, and the most memory, in bytes."""

    def __init__(self) -> None:
        self.client_seconds = self.task_seconds = 0.0
        self.memory_bytes = 0
        self.answers = 0

    async def ask(self, link: Link) -> None:
        while True:
            began = time.monotonic()
            link.send([b"hello"])
            await link.receive()
            self.answers += 1
            self.client_seconds = max(self.client_seconds, time.monotonic() - began)
            await trio.sleep(0.01)

    async def look(self) -> None:
        before = resident_bytes()
        while True:
            began = time.monotonic()
            await trio.sleep(0)
            self.task_seconds = max(self.task_seconds, time.monotonic() - began)
            self.memory_bytes = max(self.memory_bytes, resident_bytes() - before)
            await trio.sleep(0.01)


async def serve(listener: Listener) -> None:
    while True:
        request = await listener.receive()
        listener.charge(request.reply_address, 1)
        listener.reply(request.reply_address, request.frames_untrusted)


async def attacked(frames: int, has_end: bool, limit_seconds: float) -> str:
    """A line of the table."""
    watch, ended = Watch(), list[str]()
    serving, asking = ZmqSideChannel(), ZmqSideChannel()
    _, listener = open_control_socket(serving, HOST, lambda what, failure: ended.append(str(failure)))
    context: Any = multiprocessing.get_context("spawn")
    sender = context.Process(target=send, args=(listener.port, frames, has_end), daemon=True)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, listener)
            link = await asking.open_link(HOST, listener.port)
            nursery.start_soon(watch.ask, link)
            nursery.start_soon(watch.look)
            await trio.sleep(SETTLED_SECONDS)
            sender.start()  # it imports what this module does, for half a minute on a busy machine
            with trio.move_on_after(limit_seconds):
                while not ended and not listener.counts().oversized_requests:
                    await trio.sleep(0.1)
            # Everybody is heard again when the message is gone.
            answers = watch.answers
            with trio.fail_after(limit_seconds):
                while watch.answers < answers + 2:
                    await trio.sleep(0.1)
            await trio.sleep(SETTLED_SECONDS)
            nursery.cancel_scope.cancel()
    finally:
        sender.kill()
        sender.join()
        serving.close()
        asking.close()
    cells = (
        f"{frames:,}",
        "all" if listener.counts().oversized_requests else "none",
        f"{watch.client_seconds:.2f}",
        f"{watch.task_seconds:.2f}",
        f"{watch.memory_bytes / MB:.0f}",
        "yes" if ended else "no",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack.one_message", description=__doc__)
    parser.add_argument("frames", nargs="+", type=int, metavar="FRAMES")
    parser.add_argument("--without-end", action="store_true", help="the last frame never comes")
    parser.add_argument("--limit-seconds", type=float, default=60.0, help="to wait for what becomes of it")
    options = parser.parse_args()
    print("| frames | taken | client waits (s) | task waits (s) | memory added (MB) | sender ended |")
    print("|---|---|---|---|---|---|", flush=True)
    for frames in options.frames:
        print(trio.run(attacked, frames, not options.without_end, options.limit_seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
