"""How often does a READ wait for the interpreter, and what does the engine lose by a shorter switch interval?

`python -m tests.bench.bench_waits`: the production actors and a real NIXL agent read eight blocks, again and again,
from another process that holds the lease. The engine thread computes in pure Python meanwhile and never lets go by
itself. So each time that a thread of the connector needs the interpreter between a command and its report, it waits for
the switch interval, and the slope of the median over the interval is how often that is.


Columns
  done p50, p99   from the command until the engine thread can see the report
  engine          what the engine computes a second while READs follow each other without a pause, and while none is
                  open, as a ratio: what it pays for giving the interpreter away
  a READ costs    the same loss as time of the engine thread for each READ

What it does not show: a network card (there the bytes move without the processor; here the two processes and the engine
share two cores), a forward pass, which lets the interpreter go by itself.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable

import trio

from connector.clock import BootClock
from connector.config import ConnectorOptions
from connector.protocol import PeerAddress
from tests.actors.engines import HOST, Engine, engine, lease_of, until
from tests.bench.source import other_process, tell, wait_for_end

READS = 60
BLOCKS = 8
INTERVALS_MS = (5.0, 2.0, 0.5, 0.1)
LEASE_SECONDS = 600.0


def serve() -> None:
    """The other process: a prefill engine that has lent a lease for each READ, until standard input ends."""

    async def main() -> None:
        options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS)
        async with engine("p", serves=True, options=options, clock=BootClock()) as p:
            for number in range(READS * len(INTERVALS_MS)):
                p.lend(f"remote-{number}")
            tell(p.address.port)
            await trio.to_thread.run_sync(wait_for_end, abandon_on_cancel=True)

    trio.run(main)


class Decode:
    """A decode engine whose actors run in a thread of their own, as they do in production."""

    def __init__(self, peer: PeerAddress) -> None:
        self._peer = peer
        self._ready = threading.Event()
        self._engine: Engine
        self._token: trio.lowlevel.TrioToken
        self._stop: trio.Event
        self._thread = threading.Thread(target=trio.run, args=(self._run,))

    def __enter__(self) -> Decode:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._token.run_sync_soon(lambda: self._stop.set())
        self._thread.join()

    async def _run(self) -> None:
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        async with engine("d", clock=BootClock()) as self._engine:
            numbers = range(READS * len(INTERVALS_MS))
            for number in numbers:
                self._engine.wait_for(str(number), lease_of(f"remote-{number}"), self._peer)
            records = self._engine.trace.records
            await until(lambda: sum(r.machine == "hold" and r.to_state == "held" for r in records) >= len(numbers))
            self._ready.set()
            await self._stop.wait()

    def ask(self, number: int) -> None:
        blocks = list(range(BLOCKS))
        self._token.run_sync_soon(self._engine.pull, str(number), self._peer, blocks, blocks)

    def reports(self) -> int:
        return len(self._engine.events)

    def require_all_done(self) -> None:
        failed = [failure for _, failure in self._engine.failures]
        assert not failed, failed


def compute(until_true: Callable[[], bool]) -> tuple[int, float]:
    """The engine thread: (rounds of pure Python, seconds)."""
    started = time.perf_counter()
    rounds = 0
    while not until_true():
        rounds += 1
        sum(range(200))
    return rounds, time.perf_counter() - started


def measure(decode: Decode, interval_ms: float, numbers: range) -> tuple[list[float], float, float]:
    """(milliseconds from each command to its report; engine's speed with READs; without)."""
    sys.setswitchinterval(interval_ms / 1000)
    done_ms: list[float] = []
    rounds, seconds = 0, 0.0
    for number in numbers:
        reports = decode.reports()
        asked = time.perf_counter()
        decode.ask(number)
        of_read = compute(lambda reports=reports: decode.reports() > reports)
        done_ms.append((time.perf_counter() - asked) * 1000)
        rounds, seconds = rounds + of_read[0], seconds + of_read[1]
    ends = time.perf_counter() + 1.0
    alone, alone_seconds = compute(lambda: time.perf_counter() > ends)
    return done_ms, rounds / seconds, alone / alone_seconds


def main() -> None:
    with other_process("tests.bench.bench_waits", "--serve") as (_, port):
        medians: dict[float, float] = {}
        with Decode(PeerAddress(engine_id="p", host=HOST, port=port, tp_size=1)) as decode:
            print(f"{'interval, ms':>14}{'done p50, ms':>14}{'done p99, ms':>14}{'engine':>9}{'a READ costs, ms':>18}")
            for index, interval_ms in enumerate(INTERVALS_MS):
                done_ms, beside, alone = measure(decode, interval_ms, range(index * READS, (index + 1) * READS))
                medians[interval_ms] = statistics.median(done_ms)
                costs_ms = statistics.fmean(done_ms) * (1 - beside / alone)
                p99 = sorted(done_ms)[int(0.99 * (READS - 1))]
                print(
                    f"{interval_ms:14.1f}{medians[interval_ms]:14.2f}{p99:14.2f}{beside / alone:9.2f}{costs_ms:18.3f}"
                )
            decode.require_all_done()
        slope = statistics.linear_regression(list(medians), list(medians.values())).slope
        print(f"waits for the interpreter, from a command to its report: {slope:.1f} (slope of the median)")


if __name__ == "__main__":
    serve() if "--serve" in sys.argv[1:] else main()
