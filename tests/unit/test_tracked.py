"""A machine instance in the shell: what is kept, what is recorded, and what it costs when nobody records."""

from __future__ import annotations

import pytest

from connector.runtime.clock import NS_PER_SECOND
from connector.runtime.tracked import Recorder, Tracked
from statemachine import lease, request
from statemachine.failures import HandshakeTimeout
from statemachine.kernel import ProtocolError
from statemachine.lease import ConsumerNotified, DeadlinePassed, FreeBlocks, Granted, Lease, Renewed, StartLeaseTimer
from statemachine.trace import TransitionRecord


class HandClock:
    """Moved by hand; refuses to be read when `is_readable` is false."""

    def __init__(self) -> None:
        self.ns = 5 * NS_PER_SECOND
        self.is_readable = True

    def now_ns(self) -> int:
        assert self.is_readable, "nobody records: the clock must not be read"
        return self.ns

    def wall(self) -> float:
        assert self.is_readable
        return 1_700_000_000 + self.ns / NS_PER_SECOND

    def pass_seconds(self, seconds: int) -> None:
        self.ns += seconds * NS_PER_SECOND


class ListSink:
    def __init__(self) -> None:
        self.records: list[TransitionRecord] = []

    def write(self, record: TransitionRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        raise AssertionError("a machine does not close the sink")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


@pytest.fixture
def recorder(clock: HandClock, sink: ListSink) -> Recorder:
    return Recorder(engine_id="prefill-1", rank=3, role="worker", clock=clock, sink=sink)


def lent(recorder: Recorder, request_id: str = "cmpl-1") -> Tracked[Lease]:
    return Tracked(lease.MACHINE, Lease(request_id=request_id), recorder, subject=request_id, blocks=7)


GRANTED = Granted(deadline_ns=100 * NS_PER_SECOND)
LAST = ConsumerNotified(sender="d", expected=1)


def test_apply_stores_the_new_value_and_returns_what_to_do(recorder: Recorder) -> None:
    tracked = lent(recorder)
    assert tracked.apply(GRANTED) == (StartLeaseTimer(deadline_ns=GRANTED.deadline_ns),)
    assert (tracked.value.state, tracked.is_terminal) == (lease.State.HELD, False)
    assert tracked.apply(LAST) == (FreeBlocks(),)
    assert (tracked.value.state, tracked.is_terminal) == (lease.State.DONE, True)


def test_creation_and_every_transition_are_recorded(recorder: Recorder, sink: ListSink, clock: HandClock) -> None:
    tracked = lent(recorder)
    clock.pass_seconds(2)
    tracked.apply(GRANTED)
    clock.pass_seconds(3)
    tracked.apply(LAST)
    path = [(record.from_state, record.event, record.to_state, record.seconds_in_from) for record in sink.records]
    assert path == [
        (None, "Created", "computing", None),
        ("computing", "Granted", "held", 2.0),
        ("held", "ConsumerNotified", "done", 3.0),
    ]


def test_a_record_says_who_when_and_what(recorder: Recorder, sink: ListSink, clock: HandClock) -> None:
    tracked = lent(recorder)
    tracked.bytes, tracked.descriptors = 4096, 2
    clock.pass_seconds(1)
    tracked.apply(GRANTED)
    assert sink.records[-1] == TransitionRecord(
        seq=1,
        wall=1_700_000_006.0,
        mono_ns=6 * NS_PER_SECOND,
        engine_id="prefill-1",
        rank=3,
        role="worker",
        machine="lease",
        subject="cmpl-1",
        from_state="computing",
        event="Granted",
        to_state="held",
        blocks=7,
        bytes=4096,
        descriptors=2,
        seconds_in_from=1.0,
    )


def test_a_failure_is_recorded_as_kind_and_sentence(recorder: Recorder, sink: ListSink) -> None:
    failure = HandshakeTimeout(peer="prefill-1", address="h:1", timeout_seconds=5.0)
    waiting = request.Request(
        request_id="decode-1", remote_request_id="cmpl-1", peer="prefill-1", awaited=True, retries_left=0
    )
    tracked = Tracked(
        request.MACHINE, waiting, recorder, subject="decode-1", peer="prefill-1", remote_request_id="cmpl-1"
    )
    assert (sink.records[-1].reason, sink.records[-1].detail) == (None, None)
    tracked.apply(request.PeerFailed(failure=failure))
    record = sink.records[-1]
    assert (record.to_state, record.reason, record.detail) == ("failed", "HandshakeTimeout", str(failure))
    assert (record.peer, record.remote_request_id) == ("prefill-1", "cmpl-1")


def test_records_of_one_process_are_numbered_without_gaps(recorder: Recorder, sink: ListSink) -> None:
    several = [lent(recorder, f"cmpl-{index}") for index in range(5)]
    for event in (GRANTED, LAST):
        for tracked in reversed(several):
            tracked.apply(event)
    assert [record.seq for record in sink.records] == list(range(15))


def test_time_in_a_state_counts_from_entering_it(recorder: Recorder, sink: ListSink, clock: HandClock) -> None:
    tracked = lent(recorder)
    tracked.apply(GRANTED)
    clock.pass_seconds(4)
    tracked.apply(Renewed(deadline_ns=200 * NS_PER_SECOND))
    clock.pass_seconds(5)
    tracked.apply(LAST)
    assert [record.seconds_in_from for record in sink.records[2:]] == [4.0, 9.0]


def test_an_event_that_changes_nothing_is_not_recorded(recorder: Recorder, sink: ListSink) -> None:
    tracked = lent(recorder)
    tracked.apply(Renewed(deadline_ns=1))  # ignored before the grant
    tracked.apply(GRANTED)
    tracked.apply(DeadlinePassed(now_ns=0))  # a timer that came early
    assert [record.event for record in sink.records] == ["Created", "Granted"]


def test_an_impossible_event_leaves_everything_as_it_was(recorder: Recorder, sink: ListSink) -> None:
    tracked = lent(recorder)
    tracked.apply(GRANTED)
    before = tracked.value
    with pytest.raises(ProtocolError):
        tracked.apply(GRANTED)
    assert tracked.value is before
    assert [record.seq for record in sink.records] == [0, 1]
    tracked.apply(LAST)
    assert sink.records[-1].seq == 2


def test_without_a_sink_nothing_is_recorded_and_no_clock_is_read(clock: HandClock) -> None:
    clock.is_readable = False
    recorder = Recorder(engine_id="e", rank=0, role="worker", clock=clock, sink=None)
    tracked = lent(recorder)
    tracked.apply(GRANTED)
    assert tracked.apply(LAST) == (FreeBlocks(),)
    assert recorder.next_seq() == 0
