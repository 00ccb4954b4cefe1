"""What one transition costs: the table alone, and what is added by the flight recorder, by metrics, and by the trace.

`python -m tests.bench.bench_trace` takes the production tables along the path of a healthy request: on D the machines
`request` (pending_handshake -> reading -> done) and `hold` (wanted -> held -> releasing -> released), on P the machine
`lease` (computing -> held -> done, with a hold and the release). Each round runs all variants one after the other, so
that a busy machine disturbs them alike.

Columns, microseconds per transition, from the fastest round unless it says median; on a busy machine the fastest round
is the one in which nobody else had the processor, and the median shows what the others took
  table       `Machine.step` alone, without a core
  noted       what a core adds to that, and its observer, before it says what is to be done. Production always does;
              aimed at less than 0.1
  flight      what is done when that has been carried out: a tuple in the flight recorder, for people who ask
              afterwards, and since when each instance is in its state. Production always does
  metrics     what the figures add to that; production always counts
  trace       what the trace adds to that: the making of the record, its way to the thread that writes, and what this
              thread takes of the interpreter meanwhile
  all         the four together; aimed at less than 5
  all median  the same over all rounds
  all by 4    as `all`, where four transitions are caught up with together, as when a message or an engine's step
              concerns several requests; in the other columns each is alone
  bytes       length of a trace line

Below: what the engine thread pays for a step in which figures have changed, and for one in which none have, and the
figures of a healthy request as it takes them from the trio thread, of all machines together.

What it does not show: what a core does beside the step (`tests/unit` counts that), the first touch of the processor's
caches in an actor that does other things in between, and other threads that want the interpreter's lock.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from connector.clock import BootClock
from connector.observe.trace_log import open_trace_log
from connector.observe.trace_writer import TraceWriter
from connector.runtime.figures import Figures
from connector.runtime.recorder import Recorder
from statemachine import hold, lease, request
from statemachine.kernel import Event, Machine
from statemachine.lease import LeaseName
from statemachine.trace import StepSeen

ROUNDS = 300
INSTANCES_PER_ROUND = 40
ENGINE_ID = "c3a1d5de-4d5c-4f5c-9c43-2d3a1f7a5b10"
REQUEST_ID = "cmpl-3f0a4b0d5f9e4c8e8d7a-0-9b1c"

LEASE = LeaseName(REQUEST_ID, 2**40)

_FAR_NS = 2**62
Life = tuple[Machine[Any, Any], Any, list[Event]]

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
        [hold.HeldByPeer(proven_until_ns=_FAR_NS), hold.Unwanted(), hold.ReleaseConfirmed()],
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


def observed(life: Life, sink: TraceWriter | None, figures: Figures | None = None, *, together: int = 1) -> float:
    """Seconds for one round of transitions, each told to the observer as the cores do, as if its event led to no other;
    that instances are made is told before. So many are caught up with `together`, of which a round is a multiple; 0:
    none is."""
    machine, first, events = life
    recorder = Recorder(engine_id=ENGINE_ID, rank=0, role="kv_consumer", clock=BootClock(), sink=sink, figures=figures)
    note, whose = observer = recorder.observer(ENGINE_ID, lambda _: (2048, 1 << 28, 4096))
    name, step, subjects = machine.name, machine.step, [(LEASE, number) for number in range(INSTANCES_PER_ROUND)]
    for subject in subjects:
        observer(0, [(name, subject, None, None, first)])
    catch_up = recorder.catch_up
    catch_up()
    unseen: list[StepSeen] = []
    left = together
    start = time.perf_counter()
    for subject in subjects:
        value = first
        for event in events:
            before = value
            value, _effects = step(before, event)
            unseen.append((name, subject, before, event, value))
            steps, unseen = unseen, []
            note((whose, 1, steps))
            if not together:
                continue
            left -= 1
            if not left:
                catch_up()
                left = together
    return time.perf_counter() - start


class Cost(NamedTuple):
    """Microseconds per transition: of the table, added by the note, the flight recorder, the figures, and the trace."""

    table: float
    noted: float
    flight: float
    metrics: float
    trace: float
    shared: float
    """All of it, with four together."""

    @property
    def added(self) -> float:
        return self.noted + self.flight + self.metrics + self.trace


def measure(life: Life, sink: TraceWriter) -> tuple[Cost, Cost]:
    """From the fastest rounds, and the median over all."""
    variants: list[Callable[[], float]] = [
        lambda: table_alone(life),
        lambda: observed(life, None, together=0),
        lambda: observed(life, None),
        lambda: observed(life, None, Figures()),
        lambda: observed(life, sink, Figures()),
        lambda: observed(life, sink, Figures(), together=4),
    ]
    rounds = [[variant() for variant in variants] for _ in range(ROUNDS)]
    microseconds = 1e6 / (INSTANCES_PER_ROUND * len(life[2]))

    def cost(summary: Callable[[Sequence[float]], float]) -> Cost:
        columns = zip(*rounds, strict=True)
        table, noted, flight, metrics, trace, shared = (summary(column) * microseconds for column in columns)
        return Cost(table, noted - table, flight - noted, metrics - flight, trace - metrics, shared - table)

    return cost(min), cost(statistics.median)


class Taking(NamedTuple):
    """Microseconds of the engine thread: a step with the figures of one request, of 40, and without any."""

    one: float
    many: float
    none: float


def measure_taking() -> Taking:
    """From the fastest rounds."""
    rounds = []
    for _ in range(ROUNDS):
        figures = Figures()
        recorder = Recorder(engine_id=ENGINE_ID, rank=0, role="", clock=BootClock(), sink=None, figures=figures)
        observe = recorder.observer(ENGINE_ID)
        seconds = []
        for requests in (1, INSTANCES_PER_ROUND, 0):
            for number in range(requests):
                for machine, first, events in LIVES:
                    value = first
                    observe(0, [(machine.name, (LEASE, number), None, None, value)])
                    for event in events:
                        before, (value, _effects) = value, machine.step(value, event)
                        observe(1, [(machine.name, (LEASE, number), before, event, value)])
            recorder.catch_up()
            start = time.perf_counter()
            figures.take()
            figures.take_gauges()
            seconds.append(time.perf_counter() - start)
        rounds.append(seconds)
    return Taking(*(min(column) * 1e6 for column in zip(*rounds, strict=True)))


def main() -> None:
    print(f"{ROUNDS} rounds of {INSTANCES_PER_ROUND} instances; microseconds per transition\n")
    columns = ("table", "noted", "flight", "metrics", "trace", "all", "all median", "all by 4", "bytes")
    print(f"{'machine':10}" + "".join(f"{column:>11}" for column in columns))
    for life in LIVES:
        with tempfile.TemporaryDirectory() as directory:
            log = open_trace_log(Path(directory), engine_id=ENGINE_ID, role="kv_consumer", rank=0)
            sink = TraceWriter(log)
            fastest, median = measure(life, sink)
            sink.close()
            lines = log.path.read_bytes().splitlines()
        figures = (*fastest[1:5], fastest.added, median.added, fastest.shared)
        added = "".join(f"{f'{figure:+.3f}':>11}" for figure in figures)
        print(f"{life[0].name:10}{fastest.table:11.3f}{added}{round(statistics.mean(map(len, lines))):11}")
    one, many, none = measure_taking()
    print("\nengine thread, microseconds of a step with the figures")
    print(f"of one request {one:.1f}, of {INSTANCES_PER_ROUND} requests {many:.1f}, of none {none:.2f}")


if __name__ == "__main__":
    main()
