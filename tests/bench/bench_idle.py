"""What does a worker cost that has met many engines and has nothing to do?

`python -m tests.bench.bench_idle`: the production actors, a real NIXL agent and real sockets read one block from each
of 0, 10 and 100 live engines, which are all in one other process, and are left alone then. Columns

  peers   engines that it is connected to
  D       processor time of the reader's process for each second of rest: actors, the agent's thread, UCX's, ZMQ's
  P       that of each of the 100 engines; those that were not read from have a lease out

What it does not show: the engine around a worker, and vLLM's own loops. The cases `idle` and `idle-alone` of
`make bench` have those, with one peer.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import AsyncExitStack

import psutil
import trio

from connector.clock import BootClock
from connector.config import ConnectorOptions
from connector.protocol import PeerAddress
from tests.actors.engines import HOST, Engine, engine, until
from tests.bench.source import other_process, tell, wait_for_end

PEERS = (0, 10, 100)
REST_SECONDS = 10.0
SETTLE_SECONDS = 2.0
"""Releases are confirmed, pauses between polls grow to their longest."""
LEASE_SECONDS = 600.0


def serve() -> None:
    """The other process: engines that have lent one lease each, until standard input ends."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            ports = []
            for number in range(max(PEERS)):
                options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS)
                p = await stack.enter_async_context(
                    engine(f"p{number}", serves=True, options=options, clock=BootClock())
                )
                p.lend(f"remote-{number}")
                ports.append(p.address.port)
            tell(ports)
            await trio.to_thread.run_sync(wait_for_end, abandon_on_cancel=True)

    trio.run(main)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, all its threads together."""
    times = psutil.Process(pid).cpu_times()
    seconds: float = times.user + times.system
    return seconds


async def rest(d: Engine, peers: list[PeerAddress], prefill_pid: int) -> None:
    """Meet those of `peers` that are not met yet, and print what doing nothing costs then."""
    for number, peer in enumerate(peers):
        if d.received(str(number)) is None:
            d.pull(str(number), peer, [1], [1])
            ended = await until(lambda number=number: d.received(str(number)), seconds=60)
            assert ended.failure is None, ended.failure
    await trio.sleep(SETTLE_SECONDS)
    pids = (os.getpid(), prefill_pid)
    before, began = [cpu_seconds(pid) for pid in pids], time.monotonic()
    await trio.sleep(REST_SECONDS)
    passed = time.monotonic() - began
    ours, theirs = ((cpu_seconds(pid) - each) / passed for pid, each in zip(pids, before, strict=True))
    print(f"{len(peers):7}{ours:10.4f}{theirs / max(PEERS):10.4f}", flush=True)


def main() -> None:
    with other_process("tests.bench.bench_idle", "--serve") as (prefill_pid, ports):
        peers = [
            PeerAddress(engine_id=f"p{number}", host=HOST, port=port, tp_size=1) for number, port in enumerate(ports)
        ]

        async def measure() -> None:
            async with engine("d", clock=BootClock()) as d:
                print(f"{'peers':>7}{'D, cores':>10}{'P, cores':>10}")
                for count in PEERS:
                    await rest(d, peers[:count], prefill_pid)

        trio.run(measure)


if __name__ == "__main__":
    serve() if "--serve" in sys.argv[1:] else main()
