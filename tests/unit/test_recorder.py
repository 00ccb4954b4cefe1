"""The trace of the cores: what is recorded of each step of a machine, and what it costs when nobody records.

The steps are those of a production core; `Lending` has one machine for each lease.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connector.clock import NS_PER_SECOND
from connector.observe.flight_recorder import FlightRecorder
from connector.protocol import PeerAddress
from connector.runtime.figures import Figures
from connector.runtime.recorder import Recorder
from statemachine import lending, remote_engine
from statemachine.failures import HandshakeTimeout
from statemachine.kernel import Event, ProtocolError
from statemachine.lease import LeaseName
from statemachine.lending import Lending, LendingLimits
from statemachine.remote_engine import EngineLimits, RemoteEngine
from statemachine.trace import TransitionRecord

LEASE = LeaseName("cmpl-1", 7)
COMPUTING = lending.Computing(lease=LEASE)
GRANTED = lending.Granted(lease=LEASE, blocks=7)
HEARTBEAT = lending.HeartbeatNotified(sender="d", request_ids=("cmpl-1",))
READ = lending.ReleaseNotified(sender="d", request_id="cmpl-1", ranks=1)
LIMITS = LendingLimits(lease_ns=100 * NS_PER_SECOND, total_ns=900 * NS_PER_SECOND)


class HandClock:
    """Moved by hand; refuses to be read when `is_readable` is false."""

    def __init__(self) -> None:
        self.ns = 5 * NS_PER_SECOND
        self.is_readable = True
        self.set_by_seconds = 0

    def now_ns(self) -> int:
        assert self.is_readable, "nobody records: the clock must not be read"
        return self.ns

    def wall(self) -> float:
        assert self.is_readable
        return 1_700_000_000 + self.set_by_seconds + self.ns / NS_PER_SECOND

    def pass_seconds(self, seconds: int) -> None:
        self.ns += seconds * NS_PER_SECOND


class ListSink:
    """What was written; `catch_up` of the recorder that writes to it is called before somebody looks."""

    def __init__(self) -> None:
        self.written: list[TransitionRecord] = []
        self.writes = 0
        self.catch_up: Callable[[], None] = lambda: None

    @property
    def records(self) -> list[TransitionRecord]:
        self.catch_up()
        return self.written

    def write(self, *records: TransitionRecord) -> None:
        self.written.extend(records)
        self.writes += 1

    def close(self) -> None:
        raise AssertionError("a core does not close the sink")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


@pytest.fixture
def recorder(clock: HandClock, sink: ListSink) -> Recorder:
    made = Recorder(engine_id="engine-1", rank=3, role="kv_consumer", clock=clock, sink=sink)
    sink.catch_up = made.catch_up
    return made


@pytest.fixture
def lend(recorder: Recorder, clock: HandClock) -> Callable[..., None]:
    """Feeds a core events, each after some seconds."""
    core = Lending(LIMITS, recorder.observer(None))

    def feed(event: Event, seconds: int = 0) -> None:
        clock.pass_seconds(seconds)
        core.handle(event, clock.ns)

    return feed


def reading_core(recorder: Recorder) -> RemoteEngine:
    """A decode rank's core for an engine that it has not met yet."""
    limits = EngineLimits(
        lease_ns=30 * NS_PER_SECOND,
        margin_ns=0,
        request_ns=120 * NS_PER_SECOND,
        quiesce_ns=30 * NS_PER_SECOND,
        grace_ns=NS_PER_SECOND,
        backoff_first_ns=NS_PER_SECOND,
        backoff_max_ns=NS_PER_SECOND,
        incompatible_ns=NS_PER_SECOND,
        retries=1,
    )
    address = PeerAddress(engine_id="prefill-1", host="h", port=1, tp_size=1)
    observe = recorder.observer("prefill-1", lambda request_id: (3, 4096, 2))
    return RemoteEngine("prefill-1", address, limits, observe=observe)


def start(core: RemoteEngine, clock: HandClock) -> None:
    core.handle(remote_engine.Started(request_id="decode-1", lease=LEASE, address=core.address, age_ns=0), clock.ns)


def test_creation_and_every_transition_are_recorded(lend: Callable[..., None], sink: ListSink) -> None:
    lend(COMPUTING)
    lend(GRANTED, 2)
    lend(READ, 3)
    path = [(record.from_state, record.event, record.to_state, record.seconds_in_from) for record in sink.records]
    assert path == [
        (None, "Created", "computing", None),
        ("computing", "Granted", "held", 2.0),
        ("held", "ReaderDone", "done", 3.0),
    ]


def test_a_record_says_who_when_and_what(lend: Callable[..., None], sink: ListSink) -> None:
    lend(COMPUTING)
    lend(GRANTED, 1)
    assert sink.records[-1] == TransitionRecord(
        seq=1,
        wall=1_700_000_006.0,
        mono_ns=6 * NS_PER_SECOND,
        engine_id="engine-1",
        rank=3,
        role="kv_consumer",
        machine="lease",
        subject="cmpl-1",
        from_state="computing",
        event="Granted",
        to_state="held",
        lease_number=7,
        blocks=7,
        seconds_in_from=1.0,
        kept_until_ns=6 * NS_PER_SECOND + LIMITS.lease_ns,
    )


def test_a_request_is_recorded_with_its_peer_and_amounts(recorder: Recorder, sink: ListSink, clock: HandClock) -> None:
    start(reading_core(recorder), clock)
    (record,) = [each for each in sink.records if each.machine == "request"]
    assert (record.subject, record.peer, record.remote_request_id) == ("decode-1", "prefill-1", "cmpl-1")
    assert (record.blocks, record.bytes, record.descriptors) == (3, 4096, 2)
    assert (record.reason, record.detail) == (None, None)


def test_a_failure_is_recorded_as_kind_and_sentence(recorder: Recorder, sink: ListSink, clock: HandClock) -> None:
    core, failure = reading_core(recorder), HandshakeTimeout(peer="prefill-1", address="h:1", timeout_seconds=5.0)
    start(core, clock)
    core.handle(remote_engine.ConnectFailed(failure=failure), clock.ns)
    (record,) = [each for each in sink.records if each.machine == "request" and each.to_state == "failed"]
    assert (record.reason, record.detail) == ("HandshakeTimeout", str(failure))


def test_a_hold_is_named_by_the_lease_and_the_rank(recorder: Recorder, sink: ListSink, clock: HandClock) -> None:
    """What P says of a lease that is over is the reason."""
    core = reading_core(recorder)
    start(core, clock)
    core.handle(
        remote_engine.Connected(connection=1, workers=("PP 0 TP 0", "PP 0 TP 1"), is_builtin=False, life="a"), clock.ns
    )
    gone = remote_engine.HoldAnswered(connection=1, rank=1, sent_ns=clock.ns, held=(), gone=((LEASE, "expired"),))
    core.handle(gone, clock.ns)
    holds = [(each.subject, each.to_state, each.reason) for each in sink.records if each.machine == "hold"]
    assert holds[:2] == [("cmpl-1/0", "wanted", None), ("cmpl-1/1", "wanted", None)]
    assert ("cmpl-1/1", "gone", "expired") in holds
    assert {each.remote_request_id for each in sink.records if each.machine == "hold"} == {"cmpl-1"}


def test_until_when_blocks_are_kept_is_recorded_of_leases_and_of_what_is_proven_of_them(
    recorder: Recorder, lend: Callable[..., None], sink: ListSink, clock: HandClock
) -> None:
    lend(COMPUTING)
    lend(GRANTED)
    lend(HEARTBEAT, 40)
    granted_ns = clock.ns - 40 * NS_PER_SECOND
    promised = [granted_ns + LIMITS.lease_ns, clock.ns + LIMITS.heartbeat_ns]
    assert [each.kept_until_ns for each in sink.records] == [None, *promised]
    sink.records.clear()
    core = reading_core(recorder)
    start(core, clock)
    core.handle(remote_engine.Connected(connection=1, workers=("PP 0 TP 0",), is_builtin=False, life="a"), clock.ns)
    held = ((LEASE, NS_PER_SECOND),)
    core.handle(remote_engine.HoldAnswered(connection=1, rank=0, sent_ns=clock.ns, held=held, gone=()), clock.ns)
    before, after = (each.kept_until_ns for each in sink.records if each.machine == "hold")
    assert before is None
    assert after is not None
    assert clock.ns < after <= clock.ns + NS_PER_SECOND
    assert {each.kept_until_ns for each in sink.records if each.machine != "hold"} == {None}


def test_records_of_one_process_are_numbered_without_gaps(recorder: Recorder, sink: ListSink, clock: HandClock) -> None:
    """Whichever core they come from."""
    cores = [Lending(LIMITS, recorder.observer(None)) for _ in range(3)]
    for event in (COMPUTING, GRANTED, READ):
        for core in reversed(cores):
            core.handle(event, clock.ns)
    start(reading_core(recorder), clock)
    assert [record.seq for record in sink.records] == list(range(len(sink.records)))
    assert len(sink.records) > 9


def test_what_is_caught_up_with_together_is_written_together(
    recorder: Recorder, sink: ListSink, clock: HandClock
) -> None:
    start(reading_core(recorder), clock)
    lending_core = Lending(LIMITS, recorder.observer(None))
    lending_core.handle(COMPUTING, clock.ns)
    assert sink.writes == 0
    recorder.catch_up()
    assert (sink.writes, len(sink.written)) == (1, 4)
    recorder.catch_up()
    assert sink.writes == 1


def test_a_time_of_day_that_was_set_is_in_the_records_soon_after(
    recorder: Recorder, lend: Callable[..., None], sink: ListSink, clock: HandClock
) -> None:
    lend(COMPUTING)
    assert sink.records[-1].wall == clock.wall()
    clock.set_by_seconds = 3600
    lend(GRANTED, 1)
    assert sink.records[-1].wall == clock.wall()


def test_time_in_a_state_counts_from_entering_it(lend: Callable[..., None], sink: ListSink) -> None:
    lend(COMPUTING)
    lend(GRANTED)
    lend(HEARTBEAT, 4)
    lend(READ, 5)
    assert [record.seconds_in_from for record in sink.records[2:]] == [4.0, 9.0]


def test_an_event_that_changes_nothing_is_not_recorded(lend: Callable[..., None], sink: ListSink) -> None:
    lend(COMPUTING)
    lend(HEARTBEAT)  # ignored before the grant
    lend(COMPUTING)  # scheduled again after a preemption
    lend(GRANTED)
    assert [record.event for record in sink.records] == ["Created", "Granted"]


def test_an_impossible_event_is_not_recorded(lend: Callable[..., None], sink: ListSink) -> None:
    lend(COMPUTING)
    lend(GRANTED)
    with pytest.raises(ProtocolError):
        lend(GRANTED)
    assert [record.seq for record in sink.records] == [0, 1]
    lend(READ)
    assert (sink.records[-1].seq, sink.records[-1].to_state) == (2, "done")


def test_nothing_is_kept_of_an_instance_that_has_ended(recorder: Recorder, clock: HandClock) -> None:
    """But for what is in the flight recorder, which is bounded."""
    observe = recorder.observer(None)
    core, kept = Lending(LIMITS, observe), observe.whose[3]
    for event in (COMPUTING, GRANTED):
        core.handle(event, clock.ns)
    recorder.catch_up()
    assert len(kept) == 1
    core.handle(READ, clock.ns)
    recorder.catch_up()
    assert kept == {}
    assert not recorder._notes


def test_without_a_sink_the_last_steps_are_kept_all_the_same(clock: HandClock) -> None:
    recorder = Recorder(engine_id="e", rank=0, role="worker", clock=clock, sink=None)
    core = Lending(LIMITS, recorder.observer(None))
    for event in (COMPUTING, GRANTED, READ):
        clock.pass_seconds(1)
        core.handle(event, clock.ns)
    recorder.catch_up()
    kept = [recorder.render(step, 0) for step in recorder.flight.newest_first()]
    assert [(each.from_state, each.to_state, each.seconds_in_from) for each in kept] == [
        ("held", "done", 1.0),
        ("computing", "held", 1.0),
        (None, "computing", None),
    ]
    assert core.leases() == ()


def test_how_long_the_engine_knew_it_is_in_the_record_that_makes_it(
    recorder: Recorder, lend: Callable[..., None], sink: ListSink, clock: HandClock
) -> None:
    lend(lending.Computing(lease=LEASE, age_ns=3 * NS_PER_SECOND))
    lend(GRANTED)
    core = reading_core(recorder)
    started = remote_engine.Started(request_id="decode-1", lease=LEASE, address=core.address, age_ns=NS_PER_SECOND // 2)
    core.handle(started, clock.ns)
    ages = {(each.machine, each.event): each.age_seconds for each in sink.records}
    assert ages == {
        ("lease", "Created"): 3.0,
        ("lease", "Granted"): None,
        ("peer", "Created"): None,
        ("peer", "Wanted"): None,
        ("request", "Created"): 0.5,
    }


class BrokenFigures(Figures):
    """A hook for metrics that raises with every transition."""

    def count(self, steps: object) -> None:
        _raise(steps)


class BrokenSink(ListSink):
    """A trace that raises with every record, which sinks do not do."""

    def write(self, *records: TransitionRecord) -> None:
        raise OSError("no space left on device")


def _raise(*step: object) -> None:
    raise RuntimeError("injected")


def test_since_when_a_living_value_is_in_its_state_is_known_however_few_steps_are_kept(clock: HandClock) -> None:
    """A renewal is no other state, and what another core does changes nothing."""
    recorder = Recorder(
        engine_id="e", rank=0, role="worker", clock=clock, sink=None, flight=FlightRecorder(steps_kept=1)
    )
    observe, observe_other = recorder.observer(None), recorder.observer(None)
    core, other = Lending(LIMITS, observe), Lending(LIMITS, observe_other)

    def entered_ns() -> int | None:
        (value,) = core.leases()
        return recorder.entered_ns(observe, value)

    core.handle(COMPUTING, clock.ns)
    assert entered_ns() == clock.ns
    clock.pass_seconds(1)
    granted_ns = clock.ns
    core.handle(GRANTED, clock.ns)
    for each in (other, core):
        clock.pass_seconds(1)
        each.handle(COMPUTING if each is other else HEARTBEAT, clock.ns)
    assert entered_ns() == granted_ns
    (of_other,) = other.leases()
    assert recorder.entered_ns(observe, of_other) is None


@pytest.mark.parametrize("broken", ["figures", "sink", "log", "amounts"])
def test_what_only_looks_on_costs_a_core_nothing(clock: HandClock, broken: str) -> None:
    """Each breaks alone: the flight recorder, or the trace, goes on where it can."""
    crashes: list[str] = []
    sink = BrokenSink() if broken == "sink" else ListSink()
    recorder = Recorder(
        engine_id="e",
        rank=0,
        role="worker",
        clock=clock,
        sink=sink,
        figures=BrokenFigures() if broken == "figures" else None,
        log_crash=lambda what, error: crashes.append(what),
    )
    observe = recorder.observer("p", _raise if broken == "amounts" else None, log=_raise if broken == "log" else None)
    core = Lending(LIMITS, observe)
    served = []
    for event in (COMPUTING, GRANTED, READ):
        served += core.handle(event, clock.ns)
        recorder.catch_up()
    assert core.leases() == ()
    assert sum(isinstance(effect, lending.FreeBlocks) for effect in served) == 1
    asked = RemoteEngine("p", "p:1", reading_core(recorder)._limits, observe=observe)
    asked.handle(remote_engine.Started(request_id="d-1", lease=LEASE, address="p:1", age_ns=0), clock.ns)
    recorder.catch_up()
    assert asked.view_request("d-1") is not None
    assert crashes
    assert len(crashes) < 5  # powers of two
    assert len(recorder.flight.newest_first()) >= 3
    if broken == "figures":
        assert len(sink.records) > 3
