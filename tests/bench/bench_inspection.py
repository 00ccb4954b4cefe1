"""How long an inspection keeps the actors' loop from others: the longest turn that a question takes of it.

`python -m tests.bench.bench_inspection` asks the production inspector about a worker with ROWS requests and as many
leases, and a full flight recorder. The cores are real; nothing is connected.

Columns
  longest turn  milliseconds of the processor that the longest stretch of the trio loop without another task's turn
                took, in the best round
  one answer    milliseconds until a question is answered, all turns together
  rows          in that answer
  all answers   until all rows are told, a question after the other
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import trio

from connector.clock import BootClock
from connector.ports.nixl import PortCounts
from connector.runtime.inspector import Inspector
from connector.runtime.recorder import Recorder
from connector.wire.inspection import WHATS, EngineFacts, Inspect, decode_inspected
from statemachine import lending, remote_engine
from statemachine.introduction import PLACES_MAX, Introduction
from statemachine.lease import LeaseName
from statemachine.lending import Lending, LendingLimits
from statemachine.remote_engine import EngineLimits, RemoteEngine
from statemachine.roster import MemberView, PeerKey

ROWS = 5000
ROUNDS = 5
_S = 10**9
LIMITS = EngineLimits(
    lease_ns=30 * _S,
    margin_ns=0,
    request_ns=120 * _S,
    quiesce_ns=30 * _S,
    grace_ns=_S,
    backoff_first_ns=_S,
    backoff_max_ns=_S,
    incompatible_ns=_S,
    retries=1,
)


class Turns(trio.abc.Instrument):
    """How long each turn of a task takes."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._began = time.thread_time()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest_seconds = max(self.longest_seconds, time.thread_time() - self._began)


def worker() -> Inspector:
    """With so much to tell."""
    clock = BootClock()
    recorder = Recorder(engine_id="d", rank=0, role="worker", clock=clock, sink=None)
    of_peer, of_leases = recorder.observer("p"), recorder.observer(None)
    core = RemoteEngine("p", "10.0.0.1:5600", LIMITS, observe=of_peer)
    keeper = Lending(LendingLimits(lease_ns=_S, total_ns=_S), of_leases)
    for number in range(ROWS):
        lease = LeaseName(f"cmpl-3f0a4b0d5f9e4c8e8d7a{number}-0-9b1c", number + 1)
        started = remote_engine.Started(request_id=f"cmpl-{number}-0-1", lease=lease, address=core.address, age_ns=0)
        core.handle(started, clock.now_ns())
        keeper.handle(lending.Computing(lease=lease), clock.now_ns())
        keeper.handle(lending.Granted(lease=lease, blocks=16), clock.now_ns())
    recorder.catch_up()
    actor: Any = SimpleNamespace(
        core=core,
        observer=of_peer,
        amounts=lambda _: (16, None, None),
        quarantine=lambda _: None,
        quarantined_blocks=lambda: 0,
        loading_blocks=lambda: 0,
    )
    context: Any = SimpleNamespace(
        local=SimpleNamespace(layout=SimpleNamespace(engine_id="d", tp_rank=0, pp_rank=0, tp_size=1)),
        clock=clock,
        recorder=recorder,
        trace=None,
        reads=SimpleNamespace(
            waiting=list,
            in_hand=list,
            in_flight=0,
            local_lists=0,
            port=SimpleNamespace(counts=lambda: PortCounts(0, 0, 0, 0)),
        ),
    )
    known: Any = SimpleNamespace(view=lambda _: MemberView("10.0.0.1:5600", 0, False))
    leases: Any = SimpleNamespace(
        observer=of_leases, leases=keeper.leases, lease=keeper.lease, late_releases=0, notifications_dropped=0
    )
    unmet = {place: Introduction(place=place) for place in (f"p{number}:5600" for number in range(PLACES_MAX))}
    introducer: Any = SimpleNamespace(unmet=lambda: tuple(unmet.values()), get=unmet.get)
    control: Any = None
    return Inspector(
        facts=EngineFacts(),
        context=context,
        peers={PeerKey("p", 1, 1, 1): actor},
        roster=known,
        lease_keeper=leases,
        introducer=introducer,
        control=control,
        deferred=(),
        stopped=lambda: None,
    )


async def ask(inspector: Inspector, what: Any) -> tuple[float, float, int, float]:
    """Longest turn, time of the first answer, its rows, time of all answers; in seconds."""
    turns = Turns()
    trio.lowlevel.add_instrument(turns)
    began, position, first_seconds, first_rows = time.perf_counter(), 0, 0.0, 0
    next_row: int | None = 0
    while next_row is not None:
        frames = await inspector._answer(Inspect(number=position, what=what, first=next_row), b"tool")
        answer = decode_inspected(frames)
        if not position:
            first_seconds, first_rows = time.perf_counter() - began, len(answer.rows)
        position, next_row = position + 1, answer.next
    trio.lowlevel.remove_instrument(turns)
    return turns.longest_seconds, first_seconds, first_rows, time.perf_counter() - began


def main() -> None:
    inspector = worker()
    print(f"{ROWS} requests, {ROWS} leases, {len(inspector._context.recorder.flight)} steps; milliseconds\n")
    print(f"{'what':16}{'longest turn':>14}{'one answer':>12}{'rows':>7}{'all answers':>13}")
    for what in WHATS:
        rounds = [trio.run(ask, inspector, what) for _ in range(ROUNDS)]
        turn, first, rows, everything = (min(column) for column in zip(*rounds, strict=True))
        print(f"{what:16}{turn * 1e3:14.2f}{first * 1e3:12.2f}{rows:7}{everything * 1e3:13.1f}")


if __name__ == "__main__":
    main()
