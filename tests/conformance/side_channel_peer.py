"""A listener in a process of its own, for tests that kill it: `python -m tests.conformance.side_channel_peer`.

It says its port in one line, and answers every request with the same frames.
"""

from __future__ import annotations

import sys

import trio

from connector.ports.zmq_bridge import ZmqSideChannel
from tests.conformance.side_channel_suite import HOST, serve


async def main() -> None:
    listener = ZmqSideChannel().listen(HOST, 0)
    sys.stdout.write(f"{listener.port}\n")
    sys.stdout.flush()
    await serve(listener, lambda frames: frames)


if __name__ == "__main__":
    trio.run(main)
