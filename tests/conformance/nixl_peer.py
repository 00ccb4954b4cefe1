"""A peer in a process of its own, for tests that pause or kill it: `python -m tests.conformance.nixl_peer BACKEND...`.

It registers memory that follows `nixl_suite.pattern`, says so in one line, and then does what it is told, one JSON
object a line, until its standard input ends. Lines of its own begin with "@", as NIXL writes to standard output too.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import sys
import uuid

import numpy as np
import trio

from connector.ports.nixl import MemoryRange, NixlEvent, NotificationReceived
from connector.ports.nixl_agent import RealNixlPort
from tests.conformance.nixl_suite import BLOCK_BYTES, BLOCKS, pattern


def say(**fields: object) -> None:
    sys.stdout.write("@" + json.dumps(fields) + "\n")
    sys.stdout.flush()


async def serve(port: RealNixlPort, address: int) -> None:
    received: list[tuple[str, str]] = []

    def on_event(event: NixlEvent) -> None:
        if isinstance(event, NotificationReceived):
            received.append((event.sender, base64.b64encode(event.message_untrusted).decode()))

    port.set_event_callback(on_event)
    port.expect_notifications(True)
    say(metadata=base64.b64encode(port.agent_metadata).decode(), address=address)
    pending = b""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as orders:
        async for chunk in orders:
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                await obey(port, json.loads(line), received, address)


async def obey(port: RealNixlPort, order: dict[str, str], received: list[tuple[str, str]], address: int) -> None:
    match order["do"]:
        case "notifications":
            say(notifications=received)
        case "notify":
            name = await port.add_remote_agent(base64.b64decode(order["metadata"]))
            await port.send_notification(name, base64.b64decode(order["message"]))
            say(sent=True)
        case "lose":
            page = ctypes.c_void_p(address + int(order["block"]) * BLOCK_BYTES)
            say(lost=ctypes.CDLL(None).munmap(page, ctypes.c_size_t(BLOCK_BYTES)) == 0)


def main() -> None:
    pages = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
    memory = np.frombuffer(pages, dtype=np.uint8).reshape(BLOCKS, BLOCK_BYTES)
    for block in range(BLOCKS):
        memory[block] = np.frombuffer(pattern(block), dtype=np.uint8)
    address = memory.ctypes.data
    port = RealNixlPort.open(f"peer-{uuid.uuid4()}", [MemoryRange(address, memory.nbytes)], sys.argv[1:])
    trio.run(serve, port, address)
    os._exit(0)  # the memory may have holes by now: nothing may look at it again


if __name__ == "__main__":
    main()
