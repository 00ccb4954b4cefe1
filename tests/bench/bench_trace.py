"""What one transition costs: the table alone, as a core takes it with tracing off, and with tracing on.

`python -m tests.bench.bench_trace` takes the production tables along the path of a healthy request: on D the machines
`request` (pending_handshake -> reading -> done) and `hold` (wanted -> held -> releasing -> released), on P the machine
`lease` (computing -> held -> done, with a hold and the release). Each round runs all variants one after the other, so
that a busy machine disturbs them alike.

Columns, microseconds per transition, from the fastest round unless it says median; on a busy machine the fastest round
is the one in which nobody else had the processor, and the median shows what the others took
  table       `Machine.step` alone, without a core
  off         what the observer of the recorder adds to that without a sink: a tuple in the flight recorder, for people
              who ask afterwards; design target: less than 0.1, which the call alone takes
  on          what the observer of the recorder adds to that, the making of the record and the write to the file
              included; design target: less than 5
  on median   the same over all rounds
  bytes       length of a trace line

What it does not show: what a core does beside the step (`tests/unit` counts that), the wait for a slow or busy disk
(lines go to the operating system, which writes them back when it likes), the first touch of the processor's caches in
an actor that does other things in between, and other threads that want the interpreter's lock.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from connector.clock import BootClock
from connector.observe.trace_log import JsonLinesSink, open_trace_log
from connector.runtime.recorder import Recorder
from statemachine import hold, lease, request
from statemachine.kernel import Event, Machine
from statemachine.lease import LeaseName

ROUNDS = 300
INSTANCES_PER_ROUND = 40
ENGINE_ID = "c3a1d5de-4d5c-4f5c-9c43-2d3a1f7a5b10"
REQUEST_ID = "cmpl-3f0a4b0d5f9e4c8e8d7a-0-9b1c"

LEASE = LeaseName(REQUEST_ID, 2**40)

_FAR_NS = 2**62
Life = tuple[Machine[Any], Any, list[Event]]

LIVES: list[Life] = [
    (
        request.MACHINE,
        request.Request(request_id=REQUEST_ID, lease=LEASE, peer=ENGINE_ID, retries_left=1),
        [
            request.PeerReady(connection=1, reads=1),
            request.ReadCompleted(read=0, completed_ns=1, proven_until_ns=_FAR_NS),
        ],
    ),
    (
        hold.MACHINE,
        hold.Hold(lease=LEASE, rank=0),
        [hold.HeldByPeer(proven_until_ns=_FAR_NS), hold.LetGo(), hold.ReleaseConfirmed()],
    ),
    (
        lease.MACHINE,
        lease.Lease(name=LEASE),
        [
            lease.Granted(deadline_ns=1, latest_ns=_FAR_NS, blocks=2048),
            lease.Held(engine_id=ENGINE_ID, rank=0, ranks=1, deadline_ns=_FAR_NS),
            lease.ReaderDone(engine_id=ENGINE_ID, rank=0, ranks=1),
        ],
    ),
]
"""Machine, first value, and the events of a healthy life."""


def table_alone(life: Life) -> float:
    """Seconds for one round."""
    machine, first, events = life
    step = machine.step
    start = time.perf_counter()
    for _ in range(INSTANCES_PER_ROUND):
        value = first
        for event in events:
            value, _effects = step(value, event)
    return time.perf_counter() - start


def observed(life: Life, sink: JsonLinesSink | None) -> float:
    """Seconds for one round of transitions, each told to the observer as the cores do; that instances are made is told
    before."""
    machine, first, events = life
    recorder = Recorder(engine_id=ENGINE_ID, rank=0, role="worker", clock=BootClock(), sink=sink)
    observe = recorder.observer(ENGINE_ID, lambda _: (2048, 1 << 28, 4096))
    name, step, subjects = machine.name, machine.step, [(LEASE, number) for number in range(INSTANCES_PER_ROUND)]
    if observe is not None:
        for subject in subjects:
            observe(name, subject, None, None, first)
    start = time.perf_counter()
    for subject in subjects:
        value = first
        for event in events:
            before = value
            value, _effects = step(before, event)
            if observe is not None:
                observe(name, subject, before, event, value)
    return time.perf_counter() - start


class Cost(NamedTuple):
    """Microseconds per transition: of the table, added without a sink, added by the sink."""

    table: float
    off: float
    on: float


def measure(life: Life, sink: JsonLinesSink) -> tuple[Cost, Cost]:
    """From the fastest rounds, and the median over all."""
    variants: list[Callable[[], float]] = [
        lambda: table_alone(life),
        lambda: observed(life, None),
        lambda: observed(life, sink),
    ]
    rounds = [[variant() for variant in variants] for _ in range(ROUNDS)]
    microseconds = 1e6 / (INSTANCES_PER_ROUND * len(life[2]))

    def cost(summary: Callable[[Sequence[float]], float]) -> Cost:
        table, off, on = (summary(column) * microseconds for column in zip(*rounds, strict=True))
        return Cost(table, off - table, on - off)

    return cost(min), cost(statistics.median)


def main() -> None:
    print(f"{ROUNDS} rounds of {INSTANCES_PER_ROUND} instances; microseconds per transition\n")
    print(f"{'machine':10}{'table':>11}{'off':>11}{'on':>11}{'on median':>11}{'bytes':>11}")
    for life in LIVES:
        with tempfile.TemporaryDirectory() as directory:
            sink = open_trace_log(Path(directory), engine_id=ENGINE_ID, role="worker", rank=0)
            fastest, median = measure(life, sink)
            sink.close()
            lines = sink.path.read_bytes().splitlines()
        added = "".join(f"{f'{figure:+.3f}':>11}" for figure in (fastest.off, fastest.on, median.on))
        print(f"{life[0].name:10}{fastest.table:11.3f}{added}{round(statistics.mean(map(len, lines))):11}")


if __name__ == "__main__":
    main()
