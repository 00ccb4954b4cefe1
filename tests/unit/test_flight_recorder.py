"""The ring of the last steps: what is kept, what is left out, and that a step is rendered as a trace would."""

from __future__ import annotations

import msgspec

from connector.observe.flight_recorder import NO_AMOUNTS, FlightRecorder, Step, is_about, is_bad_end, render
from connector.observe.traced import CREATED, MACHINES
from connector.runtime.recorder import Recorder
from statemachine import hold, lease, lending, peer, request
from statemachine.failures import AbortedByClient, ConnectionRefused
from statemachine.lease import LeaseName
from statemachine.lending import Lending, LendingLimits
from tests.unit.test_recorder import HandClock, ListSink

LIMITS = LendingLimits(lease_ns=10**9, total_ns=10**10)
LEASE = LeaseName("cmpl-abc-0-1", 7)


def recorder(sink: ListSink | None = None) -> tuple[Recorder, HandClock]:
    clock = HandClock()
    made = Recorder(engine_id="e", rank=1, role="worker", clock=clock, sink=sink)
    if sink is not None:
        sink.catch_up = made.catch_up
    return made, clock


def fill(flight: FlightRecorder, count: int) -> None:
    for number in range(count):
        value = request.Request(request_id=f"r{number}", lease=LEASE, peer="p", retries_left=0)
        flight.keep((number, None, None, value, "p", NO_AMOUNTS, number))


def test_the_oldest_steps_make_room_for_new_ones() -> None:
    flight = FlightRecorder(steps_kept=4)
    fill(flight, 10)
    assert [Step._make(step).after.request_id for step in flight.newest_first()] == ["r9", "r8", "r7", "r6"]
    assert flight.oldest_ns() == 6


def test_bad_ends_outlive_the_other_steps() -> None:
    own, clock = recorder()
    own.flight = FlightRecorder(steps_kept=4, bad_ends_kept=2)
    core = Lending(LIMITS, own.observer(None))
    core.handle(lending.Computing(lease=LEASE), clock.ns)
    core.handle(lending.Granted(lease=LEASE), clock.ns)
    clock.pass_seconds(1)
    core.advance(clock.ns)
    for number in range(8):
        clock.pass_seconds(1)
        core.handle(lending.Computing(lease=LeaseName("other", number)), clock.ns)
    own.catch_up()
    kept = own.flight.newest_first()
    assert len(kept) == 5
    assert Step._make(kept[-1]).after.state is lease.State.EXPIRED
    assert Step._make(kept[-1]).after.name == LEASE
    assert sum(Step._make(step).after.state is lease.State.EXPIRED for step in kept) == 1


def test_ends_at_which_nothing_is_wrong_take_no_place_of_bad_ones() -> None:
    """Every last turn of a conversation with read-back ends so, and every client that leaves."""
    own, clock = recorder()
    own.flight = FlightRecorder(steps_kept=1)
    core = Lending(LIMITS, own.observer(None))
    for number, fixed_ns in enumerate((None, 10**9)):
        core.handle(lending.Computing(lease=LeaseName(f"l{number}", number)), clock.ns)
        core.handle(lending.Granted(lease=LeaseName(f"l{number}", number), fixed_ns=fixed_ns), clock.ns)
    clock.pass_seconds(1)
    core.advance(clock.ns)
    clock.pass_seconds(1)
    core.handle(lending.Computing(lease=LEASE), clock.ns)
    own.catch_up()
    assert [Step._make(step).after.name.request_id for step in own.flight.newest_first()[1:]] == ["l0"]
    for failure, is_kept in ((AbortedByClient(), False), (ConnectionRefused(peer="p", address="h:1"), True)):
        failed = request.Request(request_id="r", lease=LEASE, peer="p", retries_left=0, failure=failure)
        assert is_bad_end(msgspec.structs.replace(failed, state=request.State.FAILED)) == is_kept
        assert not is_bad_end(failed)


def test_the_record_of_an_answer_that_is_lent_back_says_so_while_nobody_has_asked_for_it() -> None:
    sink = ListSink()
    own, clock = recorder(sink)
    core = Lending(LIMITS, own.observer(None))
    core.handle(lending.Computing(lease=LEASE), clock.ns)
    core.handle(lending.Granted(lease=LEASE, fixed_ns=10**9), clock.ns)
    clock.pass_seconds(1)
    core.advance(clock.ns)
    own.catch_up()
    told = [(each.to_state, each.reason, each.detail) for each in sink.records]
    assert told == [("computing", None, None), ("held", "lent_back", None), ("expired", "lent_back", None)]


def test_the_record_of_a_lease_that_expired_says_who_held_it() -> None:
    sink = ListSink()
    own, clock = recorder(sink)
    core = Lending(LIMITS, own.observer(None))
    other = LeaseName("nobody's", 8)
    for each in (LEASE, other):
        core.handle(lending.Computing(lease=each), clock.ns)
        core.handle(lending.Granted(lease=each), clock.ns)
    asked = lending.HoldAsked(reply_to=b"", engine_id="d", rank=0, ranks=2, sent_ns=0, leases=(LEASE,))
    core.handle(asked, clock.ns)
    clock.pass_seconds(1)
    core.advance(clock.ns)
    own.catch_up()
    details = {each.subject: each.detail for each in sink.records if each.to_state == "expired"}
    assert details == {
        LEASE.request_id: "held by d (0 of 2 ranks are done)",
        other.request_id: "no decode engine has asked for it",
    }
    assert {each.detail for each in sink.records if each.to_state != "expired"} == {None}


def test_a_step_that_stays_in_its_state_is_only_traced() -> None:
    sink = ListSink()
    own, clock = recorder(sink)
    core = Lending(LIMITS, own.observer(None))
    core.handle(lending.Computing(lease=LEASE), clock.ns)
    core.handle(lending.Granted(lease=LEASE), clock.ns)
    asked = lending.HoldAsked(reply_to=b"", engine_id="d", rank=0, ranks=1, sent_ns=0, leases=(LEASE,))
    core.handle(asked, clock.ns)
    assert [each.to_state for each in sink.records] == ["computing", "held", "held"]
    assert [Step._make(step).after.state.value for step in own.flight.newest_first()] == ["held", "computing"]


def test_what_is_kept_is_rendered_as_it_was_traced() -> None:
    sink = ListSink()
    own, clock = recorder(sink)
    core = Lending(LIMITS, own.observer(None))
    for event in (
        lending.Computing(lease=LEASE),
        lending.Granted(lease=LEASE, blocks=3),
        lending.Computing(lease=LEASE),
    ):
        clock.pass_seconds(1)
        core.handle(event, clock.ns)
    clock.pass_seconds(5)
    own.catch_up()
    steps = own.flight.newest_first()[::-1]
    rendered = [own.render(step, number) for number, step in enumerate(steps)]
    fields = ("seq", "mono_ns", "engine_id", "rank", "machine", "subject", "from_state", "event", "to_state", "blocks")
    assert [[getattr(each, name) for name in fields] for each in rendered] == [
        [getattr(each, name) for name in fields] for each in sink.records
    ]
    assert [round(each.wall, 3) for each in rendered] == [round(each.wall, 3) for each in sink.records]


def test_every_machine_has_a_name_and_is_found_by_its_request() -> None:
    failed = request.Request(
        request_id="cmpl-d-0-2",
        lease=LEASE,
        peer="p",
        retries_left=0,
        state=request.State.FAILED,
        failure=ConnectionRefused(peer="p", address="h:1"),
    )
    values = {
        failed: ("cmpl-d-0-2", "cmpl-abc-0-1", 7),
        hold.Hold(lease=LEASE, rank=2): ("cmpl-abc-0-1/2", "cmpl-abc-0-1", 7),
        lease.Lease(name=LEASE): ("cmpl-abc-0-1", None, 7),
        peer.Peer(engine_id="p"): ("p", None, None),
    }
    for value, expected in values.items():
        rendered = render((0, None, None, value, None, NO_AMOUNTS, 0), 0, 0.0, "e", 0, "kv_both")
        assert (rendered.subject, rendered.remote_request_id, rendered.lease_number) == expected
        assert rendered.machine == type(value).__name__.lower()
        assert is_about(value, "abc") == (not isinstance(value, peer.Peer))
    assert is_about(failed, "cmpl-d")
    assert not is_about(failed, "xyz")


def test_no_event_can_be_taken_for_the_step_that_makes_an_instance() -> None:
    assert not any(event.__name__ == CREATED for machine in MACHINES for event in machine.events)
