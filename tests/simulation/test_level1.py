"""Level 1 over several dozen seeds, its determinism, its coverage of the tables, and oracles that do complain.

A seed that fails here is replayed by `python -m tests.simulation --level 1 --seed N`. What is broken on purpose is a
handler of a table or a part of the modelled shell; each must be noticed by the oracle that is there for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connector.runtime.clock import ClockSample
from statemachine import lease, peer, request, transfer
from statemachine.explore import Machines
from statemachine.failures import AbortedByClient, Quarantined
from statemachine.kernel import NO_EFFECTS, Effects
from tests.simulation.broken import broken
from tests.simulation.faults import LEVEL1_KINDS, Fault, Kind, Plan, draw_plan
from tests.simulation.level1.actor import PeerActor, Question, Run
from tests.simulation.level1.clock import DriftingClock
from tests.simulation.level1.decode import DecodeRank, Pull
from tests.simulation.level1.heap import LOOK_NS, MILLISECOND, SECOND, EventHeap
from tests.simulation.level1.prefill import RATE_PPB_MAX
from tests.simulation.level1.run import Result, simulate
from tests.simulation.level1.shape import draw_cluster
from tests.simulation.level1.transport import Read
from tests.simulation.shrink import shrink

ROOT = Path(__file__).parents[2]
SEEDS = 60
SEEDS_OF_A_MUTANT = 60
MACHINES = (request.MACHINE, lease.MACHINE, peer.MACHINE, transfer.MACHINE)


def fault(kind: Kind, target: str, at: float, seconds: float, probability: float = 1.0) -> Fault:
    return Fault(kind=kind, target=target, at_seconds=at, duration_seconds=seconds, probability=probability)


INCOMPATIBLE = fault(Kind.INCOMPATIBLE, "p0", 0.0, 4.0)

# --- seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int) -> None:
    result = simulate(draw_plan(seed, LEVEL1_KINDS))
    assert result.violations == []
    assert result.requests > 20
    assert result.outcomes["done"] > 0


def test_without_faults_every_request_is_served() -> None:
    for seed in range(6):
        result = simulate(Plan(seed=seed, faults=[]))
        assert result.violations == []
        allowed = {"done", "not awaited", "AbortedByClient", "TooManyPeers", "BlocksConsumed", "LeaseNotProven"}
        assert set(result.outcomes) <= allowed
        assert result.outcomes["LeaseNotProven"] < 0.1 * result.requests  # they queue for longer than a lease lasts


def test_every_transition_of_every_table_is_taken() -> None:
    missing = {(machine.name, state.value, event.__name__) for machine in MACHINES for state, event in machine.table}
    for seed in range(100):
        for plan in (draw_plan(seed, LEVEL1_KINDS), stubborn_plan(seed), Plan(seed=seed, faults=[INCOMPATIBLE])):
            missing -= set(simulate(plan).transitions)
        if not missing:
            return
    assert missing == set()


def stubborn_plan(seed: int) -> Plan:
    """READs that do not end while their engines are replaced, and everything else that is rarely seen together."""
    return Plan(
        seed=seed,
        faults=[
            fault(Kind.INCOMPATIBLE, "p0", 0.0, 0.1),
            fault(Kind.READ_STALL, "d0>p0", 0.2, 2.0),
            fault(Kind.READ_LATE, "d0>p0", 0.3, 3.0, 0.3),
            fault(Kind.READ_ERROR, "d0>p0", 0.4, 3.0, 0.1),
            fault(Kind.ABORT, "d0", 0.5, 3.0, 0.7),
            fault(Kind.CRASH_NEW_ID, "p0", 1.5, 0.0),
            fault(Kind.MESSAGE_LOSS, "d0>p0", 1.6, 0.5),
            fault(Kind.CRASH_NEW_ID, "p0", 2.6, 0.0),
            fault(Kind.ACTOR_CRASH, "d0", 2.0, 1.5),
        ],
    )


# --- determinism ----------------------------------------------------------------------------------------------------

PRINT_FINGERPRINTS = """
from tests.simulation.faults import LEVEL1_KINDS, draw_plan
from tests.simulation.level1.run import simulate
for seed in (3, 7, 9):
    print(simulate(draw_plan(seed, LEVEL1_KINDS)).fingerprint())
"""


def test_a_seed_gives_the_same_fingerprint_in_every_process() -> None:
    here = [simulate(draw_plan(seed, LEVEL1_KINDS)).fingerprint() for seed in (3, 7, 9)]
    assert len(set(here)) == 3
    for hash_seed in ("1", "4711"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PRINT_FINGERPRINTS]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, check=True, timeout=60, capture_output=True, text=True
        )
        assert done.stdout.split() == here


def test_wall_clocks_that_jump_change_nothing_but_the_trace() -> None:
    plain = simulate(Plan(seed=4, faults=[]))
    jumps = [fault(Kind.WALL_CLOCK_JUMP, engine, 0.5, 0.1) for engine in ("p0", "d0")]
    jumping = simulate(Plan(seed=4, faults=jumps))
    assert jumping.requests == plain.requests
    assert [(each.subject, each.event, each.to_state) for each in jumping.trace()] == [
        (each.subject, each.event, each.to_state) for each in plain.trace()
    ]
    assert [each.wall for each in jumping.trace()] != [each.wall for each in plain.trace()]


def test_the_trace_follows_each_instance_from_state_to_state() -> None:
    result = simulate(draw_plan(5, LEVEL1_KINDS))
    state: dict[tuple[str, int, str, str], str] = {}
    records = list(result.trace())
    assert len(records) > 1000
    assert result.trace_lines().count(b"\n") == len(records)
    for record in records:
        if record.machine == "peer":
            continue  # Another life of the decode engine has peers of the same names.
        key = (record.engine_id, record.rank, record.machine, record.subject)
        assert record.from_state == state.get(key, record.from_state)
        state[key] = record.to_state


# --- its parts ------------------------------------------------------------------------------------------------------


def test_events_happen_in_the_order_of_time_and_then_of_entry() -> None:
    heap, happened = EventHeap(), list[tuple[int, str]]()

    def note(name: str) -> None:
        happened.append((heap.now_ns, name))
        if name == "b":
            heap.after(0, note, "d")

    heap.at(5, note, "c")
    heap.at(2, note, "a")
    heap.at(2, note, "b")
    heap.run_until(4)
    assert happened == [(2, "a"), (2, "b"), (2, "d")]
    heap.run_until(5)
    assert happened[-1] == (5, "c")


class Thing:
    def __init__(self) -> None:
        self.is_over = False


@pytest.mark.parametrize("delay_ns", [0, 1, LOOK_NS, 2 * LOOK_NS - 1, 2 * LOOK_NS, 3 * LOOK_NS + 7, SECOND])
def test_timers_that_are_kept_aside_fire_on_time(delay_ns: int) -> None:
    heap, fired = EventHeap(), list[tuple[int, int]]()
    things = [Thing() for _ in range(100)]

    def fire(argument: tuple[int, Thing]) -> None:
        fired.append((heap.now_ns, argument[0]))

    def start(argument: tuple[int, Thing]) -> None:
        heap.unless_over(heap.now_ns + delay_ns, fire, argument, argument[1])

    for number, thing in enumerate(things):
        heap.at(number * 7 * MILLISECOND, start, (number, thing))
        if number % 2:
            heap.at(number * 7 * MILLISECOND + 1, lambda thing: setattr(thing, "is_over", True), thing)
    heap.run_until(3 * SECOND)
    step = 1 if delay_ns < 2 * LOOK_NS else 2  # those that are over by then are left out
    assert fired == [(number * 7 * MILLISECOND + delay_ns, number) for number in range(0, 100, step)]


def test_a_clock_finds_the_first_moment_at_which_it_shows_a_time() -> None:
    for rate_ppb in (-RATE_PPB_MAX, -1, 0, 1, RATE_PPB_MAX):
        clock = DriftingClock(zero_ns=123_456_789, rate_ppb=rate_ppb)
        clock.change_rate(10 * SECOND, -rate_ppb)
        for true_ns in (10 * SECOND, 10 * SECOND + 1, 17 * SECOND + 123, 999 * SECOND + 999_999_999):
            local_ns = clock.local_ns(true_ns)
            found_ns = clock.true_ns(local_ns)
            assert clock.local_ns(found_ns) >= local_ns
            assert clock.local_ns(found_ns - 1) < local_ns


# --- broken tables --------------------------------------------------------------------------------------------------

State = request.State
PENDING, READING, DRAINING, FAILED = State.PENDING_HANDSHAKE, State.READING, State.DRAINING, State.FAILED
Broken = Callable[[], Machines]


def ended(value: request.Request, state: State, failure: Any) -> request.Request:
    return msgspec.structs.replace(value, state=state, failure=failure, in_flight=frozenset())


def report_before_drained() -> Machines:
    def handler(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
        failure = AbortedByClient()
        return ended(value, FAILED, failure), (request.Report(failure=failure),)

    return Machines(request=broken(request.MACHINE, (READING, request.Aborted), handler, FAILED))


def done_without_proof() -> Machines:
    """Neither the end of the READ nor the timer of the lease asks whether P still held the blocks."""

    def complete(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
        left = value.in_flight - {event.read}
        if left:
            return msgspec.structs.replace(value, in_flight=left), NO_EFFECTS
        return ended(value, State.DONE, None), (request.SendRelease(), request.Report(failure=None))

    def go_on(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
        return value, NO_EFFECTS

    believing = broken(request.MACHINE, (READING, request.ReadCompleted), complete, State.DONE)
    return Machines(request=broken(believing, (READING, request.LeaseLapsed), go_on, READING))


def quarantine_nothing() -> Machines:
    def handler(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
        failure = Quarantined(transfers=1, waited_seconds=1, cause="x")
        return ended(value, FAILED, failure), (request.Report(failure=failure),)

    return Machines(request=broken(request.MACHINE, (DRAINING, request.QuiesceTimeout), handler, FAILED))


def abort_without_release() -> Machines:
    def handler(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
        after, effects = request.MACHINE.step(value, event)
        return after, tuple(effect for effect in effects if not isinstance(effect, request.SendRelease))

    drain = broken(request.MACHINE, (DRAINING, request.ReadCompleted), handler)
    return Machines(request=broken(drain, (PENDING, request.Aborted), handler))


def report_twice_after_draining() -> Machines:
    def handler(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
        after, effects = request.MACHINE.step(value, event)
        return after, (*effects, *(effect for effect in effects if isinstance(effect, request.Report)))

    return Machines(request=broken(request.MACHINE, (DRAINING, request.ReadCompleted), handler))


def fail_without_report() -> Machines:
    def handler(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
        return ended(value, FAILED, event.failure), NO_EFFECTS

    return Machines(request=broken(request.MACHINE, (PENDING, request.PeerFailed), handler, FAILED))


def wait_for_reads_for_ever() -> Machines:
    def handler(value: request.Request, event: Any) -> tuple[request.Request, Effects]:
        return value, NO_EFFECTS

    return Machines(request=broken(request.MACHINE, (DRAINING, request.QuiesceTimeout), handler, DRAINING))


def free_at_the_first_consumer() -> Machines:
    def handler(value: lease.Lease, event: Any) -> tuple[lease.Lease, Effects]:
        return msgspec.structs.replace(value, state=lease.State.DONE), (lease.FreeBlocks(),)

    return Machines(lease=broken(lease.MACHINE, (lease.State.HELD, lease.ConsumerNotified), handler))


def count_messages_instead_of_senders() -> Machines:
    def handler(value: lease.Lease, event: Any) -> tuple[lease.Lease, Effects]:
        stranger = f"{event.sender}, message {len(value.consumers)}"
        return lease.MACHINE.step(value, msgspec.structs.replace(event, sender=stranger))

    return Machines(lease=broken(lease.MACHINE, (lease.State.HELD, lease.ConsumerNotified), handler))


def never_expire() -> Machines:
    def handler(value: lease.Lease, event: Any) -> tuple[lease.Lease, Effects]:
        return value, NO_EFFECTS

    return Machines(lease=broken(lease.MACHINE, (lease.State.HELD, lease.DeadlinePassed), handler))


def free_twice() -> Machines:
    def handler(value: lease.Lease, event: Any) -> tuple[lease.Lease, Effects]:
        after, effects = lease.MACHINE.step(value, event)
        return after, effects * 2

    return Machines(lease=broken(lease.MACHINE, (lease.State.HELD, lease.DeadlinePassed), handler))


def renew_backwards() -> Machines:
    def handler(value: lease.Lease, event: Any) -> tuple[lease.Lease, Effects]:
        sooner = event.deadline_ns - 3 * SECOND
        return msgspec.structs.replace(value, deadline_ns=sooner), (lease.StartLeaseTimer(deadline_ns=sooner),)

    return Machines(lease=broken(lease.MACHINE, (lease.State.HELD, lease.Renewed), handler))


def rebuild_under_reads() -> Machines:
    def handler(value: peer.Peer, event: Any) -> tuple[peer.Peer, Effects]:
        return msgspec.structs.replace(value, state=peer.State.IDLE), (peer.TearDownConnection(),)

    return Machines(peer=broken(peer.MACHINE, (peer.State.READY, peer.Retired), handler, peer.State.IDLE))


def leave_the_wanting_unanswered() -> Machines:
    def handler(value: peer.Peer, event: Any) -> tuple[peer.Peer, Effects]:
        return value, NO_EFFECTS

    return Machines(peer=broken(peer.MACHINE, (peer.State.READY, peer.Wanted), handler))


def back_off_for_ever() -> Machines:
    def handler(value: peer.Peer, event: Any) -> tuple[peer.Peer, Effects]:
        return value, NO_EFFECTS

    pair = (peer.State.BACKOFF, peer.BackoffElapsed)
    return Machines(peer=broken(peer.MACHINE, pair, handler, peer.State.BACKOFF))


def lift_no_quarantine() -> Machines:
    def handler(value: transfer.Transfer, event: Any) -> tuple[transfer.Transfer, Effects]:
        return msgspec.structs.replace(value, state=transfer.State.DONE), (transfer.ReleaseHandle(),)

    return Machines(transfer=broken(transfer.MACHINE, (transfer.State.STUCK, transfer.Completed), handler))


def keep_handles_of_errors() -> Machines:
    def handler(value: transfer.Transfer, event: Any) -> tuple[transfer.Transfer, Effects]:
        errored = msgspec.structs.replace(value, state=transfer.State.ERRORED, failure=event.failure)
        return errored, (transfer.Inform(failure=event.failure),)

    return Machines(transfer=broken(transfer.MACHINE, (transfer.State.POSTED, transfer.Errored), handler))


STALL = fault(Kind.READ_STALL, "d0>p0", 0.2, 4.0)
LATE = fault(Kind.READ_LATE, "d0>p0", 0.2, 4.0, 0.3)
ERRORS = fault(Kind.READ_ERROR, "d0>p0", 0.2, 4.0)
SLOW = fault(Kind.READ_SLOW, "d0>p0", 0.2, 4.0)
ABORTS = fault(Kind.ABORT, "d0", 0.2, 4.0)
DUPLICATES = fault(Kind.NOTIFICATION_DUPLICATE, "d0>p0", 0.0, 4.0)
LOSSES = fault(Kind.NOTIFICATION_LOSS, "d0>p0", 0.0, 4.0)
CRASH = fault(Kind.CRASH_NEW_ID, "p0", 1.0, 0.05)
DEAF = fault(Kind.MESSAGE_LOSS, "d0>p0", 0.0, 3.0)


@pytest.mark.parametrize(
    ("machines", "faults", "oracle"),
    [
        (report_before_drained, [STALL, ABORTS], "block reuse"),
        (done_without_proof, [STALL], "bytes"),
        (quarantine_nothing, [LATE], "block reuse"),
        (abort_without_release, [], "give back"),
        (report_twice_after_draining, [STALL], "report once"),
        (fail_without_report, [DEAF], "bound"),
        (wait_for_reads_for_ever, [LATE], "bound"),
        (free_at_the_first_consumer, [], "bytes"),
        (count_messages_instead_of_senders, [DUPLICATES, SLOW], "bytes"),
        (never_expire, [LOSSES], "free once"),
        (free_twice, [LOSSES], "free once"),
        (renew_backwards, [SLOW], "bytes"),
        (rebuild_under_reads, [LATE, CRASH], "agent"),
        (leave_the_wanting_unanswered, [], "isolation"),
        (back_off_for_ever, [DEAF], "recovery"),
        (lift_no_quarantine, [LATE], "leaks"),
        (keep_handles_of_errors, [ERRORS], "leaks"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_broken_table_is_noticed(machines: Broken, faults: list[Fault], oracle: str) -> None:
    made = machines()
    expect(oracle, lambda plan: simulate(plan, made), faults)


def expect(oracle: str, run: Callable[[Plan], Result], faults: list[Fault]) -> None:
    for seed in range(SEEDS_OF_A_MUTANT):
        if any(each.oracle == oracle for each in run(Plan(seed=seed, faults=faults)).violations):
            return
    pytest.fail(f"the oracle {oracle!r} saw nothing in {SEEDS_OF_A_MUTANT} seeds")


# --- a broken shell -------------------------------------------------------------------------------------------------


def let_go_before_the_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = PeerActor._leave

    def at_once(self: PeerActor, remote_id: str, pull: Pull) -> None:
        self.holders.get(remote_id, set()).intersection_update({pull})
        leave(self, remote_id, pull)

    monkeypatch.setattr(PeerActor, "_leave", at_once)
    monkeypatch.setattr(DecodeRank, "__init__", without_memory_of_what_was_consumed(DecodeRank.__init__))


def forget_what_was_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an actor that is evicted would, if its memory were its own."""
    retire = PeerActor.retire

    def forget(self: PeerActor, argument: None) -> None:
        self.rank.consumed.clear()
        retire(self, argument)

    monkeypatch.setattr(PeerActor, "retire", forget)


def without_memory_of_what_was_consumed(init: Callable[..., None]) -> Callable[..., None]:
    class Forgetful(set[str]):
        def add(self, element: str) -> None:
            pass

    def made(self: DecodeRank, *arguments: Any) -> None:
        init(self, *arguments)
        self.consumed = Forgetful()

    return made


def believe_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the clock counts for the proof, not against it."""
    monkeypatch.setattr(
        ClockSample, "earliest_local_ns", lambda self, remote_ns: remote_ns - self.offset_ns + self.error_ns
    )


def keep_the_first_clock_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that was measured badly is not measured again before a request is told that nothing is proven."""
    monkeypatch.setattr(PeerActor, "_is_clock_to_blame", lambda self, run, latest_ns, now_ns: False)


def quarantine_on_paper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(self: PeerActor, run: Run, effect: request.Report) -> None:
        self.rank.life.hear_report(run.pull, self.rank.number, effect.failure, is_quarantined=False)

    monkeypatch.setattr(PeerActor, "_report", report)


def ask_one_peer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = PeerActor._ask

    def in_turn(self: PeerActor, question: Question) -> None:
        if any(actor._questions for actor in self.rank.peers.values() if actor is not self):
            self._heap.after(100 * MILLISECOND, self._ask, question)
        else:
            ask(self, question)

    monkeypatch.setattr(PeerActor, "_ask", in_turn)


def post_what_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry finds the blocks still being written: the end of a READ is told before it has ended."""
    order = DecodeRank.order

    def tell_early(self: DecodeRank, read: Read) -> None:
        order(self, read)
        self._heap.after(MILLISECOND, forget_attempt, read)

    def forget_attempt(read: Read) -> None:
        if read.run.actor is not None and not read.run.is_over and read.is_flying:
            read.run.actor._apply(read.run, request.ReadCompleted(read=read.piece, completed_ns=0))

    monkeypatch.setattr(DecodeRank, "order", tell_early)


@pytest.mark.parametrize(
    ("break_it", "faults", "oracle"),
    [
        (let_go_before_the_siblings, [], "bytes"),
        (forget_what_was_consumed, [], "bytes"),
        (believe_the_clock, [fault(Kind.MESSAGE_DELAY, "p0>d0", 0.0, 4.0)], "bytes"),
        (keep_the_first_clock_sample, [fault(Kind.CLOG, "d0>p0", 0.0, 2.0)], "recovery"),
        (quarantine_on_paper_only, [LATE], "block reuse"),
        (ask_one_peer_at_a_time, [DEAF], "isolation"),
        (post_what_nobody_wants, [LATE], "bytes"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_broken_shell_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None],
    faults: list[Fault],
    oracle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    expect(oracle, simulate, faults)


def test_a_failing_plan_is_shrunk_to_the_fault_that_matters() -> None:
    machines = quarantine_nothing()
    harmless = [fault(Kind.WALL_CLOCK_JUMP, "d0", at, 0.1) for at in (0.5, 1.0)]
    for seed in range(SEEDS_OF_A_MUTANT):
        plan = Plan(seed=seed, faults=[harmless[0], LATE, harmless[1]])
        if any(each.oracle == "block reuse" for each in simulate(plan, machines).violations):
            assert shrink(plan, "block reuse", lambda plan: simulate(plan, machines)).faults == [LATE]
            return
    pytest.fail("no seed failed")


def test_shapes_differ_in_what_matters() -> None:
    clusters = [draw_cluster(seed) for seed in range(50)]
    assert {(each.prefill_ranks, each.decode_ranks) for each in clusters} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert {each.base.prefills for each in clusters} == {each.base.decodes for each in clusters} == {1, 2, 3}
    assert {each.reuses_last for each in clusters} == {True, False}
