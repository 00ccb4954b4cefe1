"""What one event costs the cores, while they have 10, 100, 1,000 and 10,000 requests and leases in hand.

`python -m tests.bench.bench_cores` passes requests and leases through a `RemoteEngine` and a `Lending`, one after the
other, from their first event to their last, beside so many others that are in the middle of their lives: requests whose
READs are in flight and whose leases are held on two ranks of P; leases that another engine holds. An event is a call of
`handle` and what follows from it at once: the `advance` that an executor calls after it, and `next_deadline`, which it
asks for its timer. The two cores of an engine's scheduler, `Loads` and `Granting`, have no timers; of theirs, as many
requests load, or are computed to be lent.

The figures are microseconds of the processor for one event, from the fastest of several rounds: on a busy machine that
is the one in which others disturbed its caches least. The last column is the cost at 10,000 divided by that at 10. It
should be near 1: what grows is how far a heap is deep, and what the processor's caches hold. A renewal is one of the
leases in hand, in a round of all of them; they travel in messages of many.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeAlias

from statemachine import granting, lending, loads, remote_engine
from statemachine.draining import Draining
from statemachine.grant import Terms
from statemachine.granting import Granting
from statemachine.kernel import Event
from statemachine.lease import LeaseName
from statemachine.lending import Lending, LendingLimits
from statemachine.loads import Loads
from statemachine.remote_engine import EngineLimits, RemoteEngine

SECOND = 1_000_000_000
IN_HAND = (10, 100, 1_000, 10_000)
LIVES = 300
"""Requests or leases that one round passes through."""
ROUNDS = 7
TURNS = 3
WORKERS = ("PP 0 TP 0", "PP 0 TP 1")
RANKS = len(WORKERS)
ADDRESS = "10.0.0.1:5600"
ENGINE = EngineLimits(
    lease_ns=30 * SECOND,
    margin_ns=SECOND // 20,
    request_ns=120 * SECOND,
    quiesce_ns=30 * SECOND,
    grace_ns=2 * SECOND,
    backoff_first_ns=SECOND // 2,
    backoff_max_ns=30 * SECOND,
    incompatible_ns=60 * SECOND,
    retries=1,
)
LENDING = LendingLimits(lease_ns=30 * SECOND, total_ns=3600 * SECOND)

Costs: TypeAlias = dict[str, float]
"""Microseconds by kind of event."""


class CostsTaken:
    """Sums up, by kind of event, what events cost."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    def count(self, name: str, spent_ns: int, events: int = 1) -> None:
        self._spent[name] = self._spent.get(name, 0) + spent_ns
        self._counts[name] = self._counts.get(name, 0) + events

    def take(self) -> Costs:
        """What events have cost since the last time."""
        costs = {name: spent / self._counts[name] / 1000 for name, spent in self._spent.items()}
        self._spent, self._counts = {}, {}
        return costs


class Clock(CostsTaken):
    """Hands events to a core of a rank."""

    def __init__(self, core: RemoteEngine | Lending) -> None:
        super().__init__()
        self._core = core
        self.now_ns = 1

    def feed(self, event: Event) -> None:
        core, now_ns = self._core, self.now_ns
        began = time.thread_time_ns()
        core.handle(event, now_ns)
        deadline_ns = core.next_deadline()
        if deadline_ns is not None and deadline_ns <= now_ns:
            core.advance(now_ns)
            core.next_deadline()
        self.count(type(event).__name__, time.thread_time_ns() - began)


# --- decode ---------------------------------------------------------------------------------------------------------


def _begin_request(clock: Clock, name: str) -> LeaseName:
    """Up to its READs, its lease being held on both ranks."""
    lease = LeaseName(name, 7)
    clock.feed(remote_engine.Announced(request_id=name, lease=lease, address=ADDRESS, age_ns=0))
    clock.feed(remote_engine.Started(request_id=name, lease=lease, address=ADDRESS, age_ns=0))
    clock.feed(remote_engine.BlocksResolved(request_id=name, connection=1, reads=RANKS))
    for rank in range(RANKS):
        clock.feed(
            remote_engine.HoldAnswered(
                connection=1, rank=rank, sent_ns=clock.now_ns, held=((lease, 30 * SECOND),), gone=()
            )
        )
    return lease


def _end_request(clock: Clock, name: str, lease: LeaseName) -> None:
    for read in range(RANKS):
        clock.feed(remote_engine.ReadEnded(request_id=name, read=read, connection=1, ended_ns=clock.now_ns))
    for rank in range(RANKS):
        clock.feed(remote_engine.ReleaseAnswered(connection=1, rank=rank, leases=(lease,)))


def measure_remote_engine(in_hand: int) -> Costs:
    core = RemoteEngine("p", ADDRESS, ENGINE)
    clock = Clock(core)
    first = LeaseName("first", 7)
    core.handle(remote_engine.Announced(request_id="first", lease=first, address=ADDRESS, age_ns=0), clock.now_ns)
    core.handle(remote_engine.Connected(connection=1, workers=WORKERS, is_builtin=False, life="1"), clock.now_ns)
    for number in range(in_hand):
        _begin_request(clock, f"in-hand-{number}")
    best: Costs = {}
    for round_number in range(ROUNDS):
        clock.take()
        for number in range(LIVES):
            name = f"{round_number}-{number}"
            _end_request(clock, name, _begin_request(clock, name))
        clock.now_ns += 14 * SECOND
        _renew(core, clock, in_hand)
        _keep_lowest(best, clock.take())
    return best


def _renew(core: RemoteEngine, clock: Clock, in_hand: int) -> None:
    """Asking for all of them again, and the answers."""
    began = time.thread_time_ns()
    for effect in core.advance(clock.now_ns):
        if isinstance(effect, remote_engine.SendHold):
            held = tuple((lease, 30 * SECOND) for lease in effect.leases)
            core.handle(
                remote_engine.HoldAnswered(connection=1, rank=effect.rank, sent_ns=effect.sent_ns, held=held, gone=()),
                clock.now_ns,
            )
    core.next_deadline()  # drops the deadlines that the answers have moved
    clock.count("a renewal", time.thread_time_ns() - began, in_hand * RANKS)


# --- prefill --------------------------------------------------------------------------------------------------------


def _lend(clock: Clock, name: str) -> LeaseName:
    lease = LeaseName(name, 7)
    clock.feed(lending.Computing(lease=lease))
    clock.feed(lending.Granted(lease=lease))
    return lease


def _hold(clock: Clock, lease: LeaseName, engine_id: str) -> None:
    for rank in range(RANKS):
        clock.feed(
            lending.HoldAsked(
                reply_to=None,
                engine_id=engine_id,
                rank=rank,
                ranks=RANKS,
                sent_ns=clock.now_ns,
                leases=(lease,),
            )
        )


def measure_lending(in_hand: int) -> Costs:
    core = Lending(LENDING)
    clock = Clock(core)
    for number in range(in_hand):
        _hold(clock, _lend(clock, f"in-hand-{number}"), "another")

    def live(name: str) -> None:
        lease = _lend(clock, name)
        _hold(clock, lease, "d")
        for rank in range(RANKS):
            clock.feed(lending.ReleaseAsked(reply_to=None, engine_id="d", rank=rank, ranks=RANKS, leases=(lease,)))
        request_id = _lend(clock, f"{name}, by notifications").request_id
        clock.feed(lending.HeartbeatNotified(sender="d/0", request_ids=(request_id,)))
        for rank in range(RANKS):
            clock.feed(lending.ReleaseNotified(sender=f"d/{rank}", request_id=request_id, ranks=RANKS))

    return _lowest(clock, live)


# --- the scheduler --------------------------------------------------------------------------------------------------


class SchedulerClock(CostsTaken):
    """Hands events to a core of an engine's scheduler."""

    def __init__(self, core: Loads | Granting) -> None:
        super().__init__()
        self._core = core

    def feed(self, event: Event) -> None:
        began = time.thread_time_ns()
        if isinstance(event, loads.Asked):
            assert isinstance(self._core, Loads)
            self._core.ask(event)
        else:
            self._core.handle(event, 1)
        self.count(type(event).__name__, time.thread_time_ns() - began)


def measure_loads(in_hand: int) -> Costs:
    clock = SchedulerClock(Loads(shares=True))

    def begin(name: str) -> None:
        clock.feed(loads.Heard(request_id=name, source=name, lease=name))
        clock.feed(loads.Asked(request_id=name, room=loads.Room.ENOUGH, pays=True))
        clock.feed(loads.Allocated(request_id=name, loads=True))
        clock.feed(loads.StepScheduled(blocks_are_kept=False))

    for number in range(in_hand):
        begin(f"in-hand-{number}")

    def live(name: str) -> None:
        begin(name)
        clock.feed(loads.LoadEnded(request_id=name, has_failed=False))
        clock.feed(loads.Ended(request_id=name))

    return _lowest(clock, live)


def measure_granting(in_hand: int) -> Costs:
    clock, terms = SchedulerClock(Granting(1)), Terms(Draining(lease_ns=30 * SECOND), is_stopped=False)

    def begin(name: str) -> None:
        clock.feed(
            granting.Arrived(
                request_id=name, request=name, for_decode=True, is_wanted=True, is_nameable=True, terms=terms
            )
        )
        clock.feed(granting.Scheduled(request_id=name, is_wanted=True, terms=terms))

    for number in range(in_hand):
        begin(f"in-hand-{number}")

    def live(name: str) -> None:
        begin(name)
        clock.feed(granting.Finished(request_id=name, is_whole=True, free_share=1.0, is_waited_for=False, terms=terms))
        clock.feed(granting.LeaseOver(request_id=name))

    return _lowest(clock, live)


def _lowest(clock: CostsTaken, live: Callable[[str], None]) -> Costs:
    """What events cost in the fastest of several rounds, in each of which so many live from their first to their last;
    `live` passes one of this name through."""
    best: Costs = {}
    for round_number in range(ROUNDS):
        clock.take()
        for number in range(LIVES):
            live(f"{round_number}-{number}")
        _keep_lowest(best, clock.take())
    return best


def _keep_lowest(best: Costs, costs: Costs) -> None:
    for name, cost in costs.items():
        best[name] = min(cost, best.get(name, cost))


# --- the table ------------------------------------------------------------------------------------------------------


def show(name: str, measure: Callable[[int], Costs]) -> None:
    columns: list[Costs] = [{} for _ in IN_HAND]
    for _ in range(TURNS):
        for in_hand, column in zip(IN_HAND, columns, strict=True):
            _keep_lowest(column, measure(in_hand))
    print(f"{name:22}" + "".join(f"{in_hand:>9,}" for in_hand in IN_HAND) + "    ratio")
    for event in columns[0]:
        costs = [column[event] for column in columns]
        print(f"  {event:20}" + "".join(f"{cost:9.1f}" for cost in costs) + f"{costs[-1] / costs[0]:9.2f}")


def main() -> None:
    gc.disable()  # its rounds grow with what lives, whoever made it
    print("microseconds for one event, with so many requests or leases in hand")
    show("RemoteEngine", measure_remote_engine)
    show("Lending", measure_lending)
    show("Loads", measure_loads)
    show("Granting", measure_granting)


if __name__ == "__main__":
    main()
