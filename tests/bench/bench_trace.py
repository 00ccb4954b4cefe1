"""What one transition costs: the table alone, through the shell with tracing off, and with tracing on.

`python -m tests.bench.bench_trace` takes the production tables along the path of a healthy request: on D the machine
`request` (pending_handshake -> reading -> done), on P the machine `lease` (computing -> held -> done, with a renewal).
Each round runs all variants one after the other, so that a busy machine disturbs them alike.

Columns, microseconds per transition, from the fastest round unless it says median; on a busy machine the fastest round
is the one in which nobody else had the processor, and the median shows what the others took
  table       `Machine.step` alone, without the shell
  off         what `Tracked.apply` adds to that without a sink; design target: less than 0.1
  on          what the JSON lines sink adds to that, the making of the record and the write to the file included;
              design target: less than 5
  on median   the same over all rounds
  bytes       length of a trace line

What it does not show: the wait for a slow or busy disk (lines go to the operating system, which writes them back when
it likes), the first touch of the processor's caches in an actor that does other things in between, and other threads
that want the interpreter's lock.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from connector.observe.trace_log import JsonLinesSink, open_trace_log
from connector.runtime.clock import MonotonicClock
from connector.runtime.tracked import Recorder, Tracked
from statemachine import lease, request
from statemachine.kernel import Event, Machine

ROUNDS = 300
INSTANCES_PER_ROUND = 40
ENGINE_ID = "c3a1d5de-4d5c-4f5c-9c43-2d3a1f7a5b10"
REQUEST_ID = "cmpl-3f0a4b0d5f9e4c8e8d7a-0-9b1c"

_FAR_NS = 2**62
Life = tuple[Machine[Any], Any, list[Event]]

LIVES: list[Life] = [
    (
        request.MACHINE,
        request.Request(
            request_id=REQUEST_ID, remote_request_id=REQUEST_ID, peer=ENGINE_ID, awaited=True, retries_left=1
        ),
        [
            request.PeerReady(now_ns=0, reads=1, proof=request.Proof(proven_until_ns=_FAR_NS, basis="granted")),
            request.ReadCompleted(read=0, completed_ns=1),
        ],
    ),
    (
        lease.MACHINE,
        lease.Lease(request_id=REQUEST_ID),
        [
            lease.Granted(deadline_ns=1),
            lease.Renewed(deadline_ns=_FAR_NS),
            lease.ConsumerNotified(sender=ENGINE_ID, expected=1),
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


def through_shell(life: Life, sink: JsonLinesSink | None) -> float:
    """Seconds for one round of transitions; making the instances is not counted."""
    machine, first, events = life
    recorder = Recorder(engine_id=ENGINE_ID, rank=0, role="worker", clock=MonotonicClock(), sink=sink)
    instances = [
        Tracked(machine, first, recorder, subject=REQUEST_ID, peer=ENGINE_ID, remote_request_id=REQUEST_ID, blocks=2048)
        for _ in range(INSTANCES_PER_ROUND)
    ]
    start = time.perf_counter()
    for tracked in instances:
        for event in events:
            tracked.apply(event)
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
        lambda: through_shell(life, None),
        lambda: through_shell(life, sink),
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
