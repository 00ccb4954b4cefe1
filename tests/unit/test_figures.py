"""Figures of the machines: real cores tell them what happens, and the engine's side takes them."""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from typing import Any

import pytest

from connector.observe import catalogue
from connector.observe.catalogue import Metric
from connector.observe.traced import MACHINES
from connector.runtime.figures import SAMPLES_MAX, Figures, Taken
from connector.runtime.recorder import Recorder
from statemachine import hold, peer, remote_engine, request
from statemachine.failures import HandshakeTimeout, TransferError
from statemachine.kernel import Event
from statemachine.lease import LeaseName
from statemachine.lending import Computing, Granted, HeartbeatNotified, HoldAsked, Lending, LendingLimits, ReleaseAsked
from statemachine.remote_engine import (
    BlocksResolved,
    Connected,
    ConnectFailed,
    EngineLimits,
    HoldAnswered,
    ReadEnded,
    RemoteEngine,
    Retire,
    Started,
    TornDown,
    Unwatched,
)
from statemachine.trace import TraceSink

SECOND = 1_000_000_000
LEASE = LeaseName("p-r", 7)
LIMITS = EngineLimits(
    lease_ns=30 * SECOND,
    margin_ns=SECOND,
    request_ns=100 * SECOND,
    quiesce_ns=10 * SECOND,
    grace_ns=SECOND,
    backoff_first_ns=SECOND,
    backoff_max_ns=4 * SECOND,
    incompatible_ns=60 * SECOND,
    retries=1,
)
TIMED_OUT = HandshakeTimeout(peer="p", address="h:1", timeout_seconds=5.0)
LOST = TransferError(peer="p", operation="READ", error="reset", transport_lost=True)


class FakeClock:
    ns = 1000 * SECOND

    def now_ns(self) -> int:
        return self.ns

    def wall(self) -> float:
        return 0.0


def recorder(figures: Figures, clock: FakeClock | None = None, sink: TraceSink | None = None) -> Recorder:
    return Recorder(engine_id="d", rank=0, role="worker", clock=clock or FakeClock(), sink=sink, figures=figures)


class Decode:
    """A core of D whose figures are taken, driven by hand. Effects are dropped."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.figures = Figures()
        self.recorder = recorder(self.figures, self.clock)
        self.core = RemoteEngine("p", "h:1", LIMITS, observe=self.recorder.observer("p"))

    def tell(self, *events: Event, after_seconds: float = 0.0) -> None:
        self.clock.ns += round(after_seconds * SECOND)
        for event in events:
            self.core.handle(event, self.clock.ns)
            self.core.advance(self.clock.ns)
        self.recorder.catch_up()

    def start(self, request_id: str = "r") -> None:
        self.tell(Started(request_id=request_id, lease=LEASE, address="h:1", age_ns=0))

    def connect(self, number: int = 1, after_seconds: float = 0.0) -> None:
        connected = Connected(connection=number, workers=("PP 0 TP 0",), is_builtin=False, life="life")
        self.tell(connected, after_seconds=after_seconds)

    def read(self, request_id: str = "r", connection: int = 1) -> None:
        self.tell(BlocksResolved(request_id=request_id, connection=connection, reads=1))

    def held(self, remaining_seconds: float, connection: int = 1) -> None:
        remaining = round(remaining_seconds * SECOND)
        self.tell(
            HoldAnswered(connection=connection, rank=0, sent_ns=self.clock.ns, held=((LEASE, remaining),), gone=())
        )

    def end_read(self, failure: TransferError | None = None, connection: int = 1) -> None:
        ended = ReadEnded(
            request_id="r", read=0, connection=connection, ended_ns=self.clock.ns, failure=failure, is_quiescent=True
        )
        self.tell(ended)

    def take(self) -> Taken:
        return self.figures.take() or Taken({}, {})

    def gauges(self) -> dict[str, float]:
        """Those that are not 0."""
        return {key: value for key, value in self.figures.gauges().items() if value}


def test_a_healthy_request_is_counted_timed_and_gone() -> None:
    d = Decode()
    d.tell(Unwatched())
    assert d.gauges() == {"peers|idle": 1}
    d.start()
    assert d.gauges() == {"requests|pending_handshake": 1, "peers|handshaking": 1}
    d.connect(after_seconds=0.5)
    d.read()
    d.held(12.0)
    assert d.gauges() == {"requests|reading": 1, "peers|ready": 1}
    d.tell(after_seconds=2.0)
    d.end_read()
    assert d.gauges() == {"peers|ready": 1}

    taken = d.take()
    assert taken.counts == {
        "transitions|peer|idle|none": 1,
        "transitions|peer|handshaking|none": 1,
        "transitions|peer|ready|none": 1,
        "transitions|request|pending_handshake|none": 1,
        "transitions|request|reading|none": 1,
        "transitions|request|done|none": 1,
        "transitions|hold|wanted|none": 1,
        "transitions|hold|held|none": 1,
        "transitions|hold|releasing|none": 1,
        "holds|decode": 1,
    }
    assert taken.samples["handshake_seconds|connected"] == [0.5]
    assert taken.samples["state_seconds|request|pending_handshake"] == [0.5]
    assert taken.samples["state_seconds|request|reading"] == [2.0]
    # Of 12 s a sixth goes for drift and 1 s for the margin; the READ took 2 s.
    assert taken.samples["lease_margin_seconds"] == [pytest.approx(7.0)]
    assert d.figures.take() is None


def test_a_renewal_is_no_second_hold() -> None:
    d = Decode()
    d.start()
    d.connect()
    for _ in range(3):
        d.held(12.0)
    assert (d.take().counts["holds|decode"], d.gauges()) == (1, {"requests|pending_handshake": 1, "peers|ready": 1})
    d.held(12.0)
    assert d.take().counts == {"renewals|decode": 1}


def test_a_failure_is_counted_by_its_kind_and_its_handshake_as_failed() -> None:
    d = Decode()
    d.start()
    d.tell(ConnectFailed(failure=TIMED_OUT), after_seconds=5.0)
    taken = d.take()
    assert taken.counts["transitions|request|failed|HandshakeTimeout"] == 1
    assert taken.counts["transitions|peer|backoff|HandshakeTimeout"] == 1
    assert taken.samples["handshake_seconds|failed"] == [5.0]
    assert d.gauges() == {"peers|backoff": 1}
    d.tell(after_seconds=2.0)
    d.core.advance(d.clock.ns)
    d.recorder.catch_up()
    assert d.take().counts["transitions|peer|idle|none"] == 1, "it rests no more, and not because of the failure before"


def test_a_retry_is_counted_and_a_peer_that_ends_is_gone() -> None:
    d = Decode()
    d.start()
    d.connect()
    d.read()
    d.end_read(LOST)
    d.tell(TornDown(connection=1))
    counts = d.take().counts
    assert counts["retries"] == 1
    assert counts["transitions|peer|draining|TransferError"] == 1
    assert d.gauges() == {"requests|pending_handshake": 1, "peers|handshaking": 1}
    d.tell(Retire())
    d.tell(ConnectFailed(failure=TIMED_OUT))
    assert d.gauges() == {}


def test_what_p_says_of_a_lease_that_is_gone_is_a_label_only_if_it_is_known() -> None:
    for why, reason in [
        ("expired", "expired"),
        ("<b>any text</b>" * 100, "other"),
        (remote_engine.RESTARTED, "restarted"),
        (remote_engine.REPLACED, "replaced"),
    ]:
        d = Decode()
        d.start()
        d.connect()
        d.tell(HoldAnswered(connection=1, rank=0, sent_ns=d.clock.ns, held=(), gone=((LEASE, why),)))
        counts = d.take().counts
        assert counts[f"transitions|hold|gone|{reason}"] == 1
        assert counts["transitions|request|expired|LeaseOver"] == 1


def test_p_counts_who_holds_and_who_holds_again() -> None:
    figures = Figures()
    own = recorder(figures)
    core = Lending(LendingLimits(lease_ns=100, total_ns=1000), own.observer(None))
    core.handle(Computing(lease=LEASE), 0)
    core.handle(Granted(lease=LEASE), 1)
    for engine_id in ("d1", "d2", "d1"):
        asked = HoldAsked(reply_to=0, engine_id=engine_id, rank=0, ranks=1, sent_ns=0, leases=(LEASE,))
        core.handle(asked, 2)
    core.handle(HeartbeatNotified(sender="s", request_ids=(LEASE.request_id,)), 3)
    for engine_id in ("d1", "d2"):
        core.handle(ReleaseAsked(reply_to=0, engine_id=engine_id, rank=0, ranks=1, leases=(LEASE,)), 4)
    own.catch_up()
    taken = figures.take()
    assert taken is not None
    assert taken.counts == {
        "transitions|lease|computing|none": 1,
        "transitions|lease|held|none": 1,
        "transitions|lease|done|none": 1,
        "holds|prefill": 2,
        "renewals|prefill": 2,
    }
    assert taken.samples == {"state_seconds|lease|computing": [1e-9], "state_seconds|lease|held": [3e-9]}


@pytest.mark.parametrize(("fixed_ns", "reason"), [(None, "none"), (20 * SECOND, "lent_back")])
def test_an_answer_that_is_lent_back_and_not_read_is_counted_apart(fixed_ns: int | None, reason: str) -> None:
    clock, figures = FakeClock(), Figures()
    own = recorder(figures, clock)
    core = Lending(LendingLimits(lease_ns=10 * SECOND, total_ns=100 * SECOND), own.observer(None))
    for event in (Computing(lease=LEASE), Granted(lease=LEASE, fixed_ns=fixed_ns)):
        core.handle(event, clock.ns)
    clock.ns = core.next_deadline() or 0
    core.advance(clock.ns)
    own.catch_up()
    taken = figures.take()
    assert taken is not None
    expired = {key: count for key, count in taken.counts.items() if "|lease|expired|" in key}
    assert expired == {f"transitions|lease|expired|{reason}": 1}


def test_every_key_is_a_series_of_the_catalogue_and_every_transition_of_the_tables_has_one() -> None:
    series = {metric.key(*values) for metric in catalogue.OURS for values in metric.series}
    figures = Figures()
    gauges = figures.take_gauges()
    assert gauges is not None
    assert set(gauges) <= series
    transitions = {values[:2] for values in catalogue.TRANSITIONS.series}
    assert transitions == {(each.name, state.value) for each in MACHINES for state in each.states}


def test_nobody_is_left_of_actors_that_died() -> None:
    d = Decode()
    d.start()
    assert any((d.figures.take_gauges() or {}).values())
    d.figures.clear()
    assert d.gauges() == {}
    shown = d.figures.take_gauges()
    assert shown is not None, "it is shown, too"
    assert not any(shown.values())


def test_a_wake_up_is_a_figure() -> None:
    figures = Figures()
    figures.note_wake_up(0.25)
    assert figures.take() == Taken({}, {"wake_up_seconds": [0.25]})


def test_figures_that_nobody_takes_are_bounded() -> None:
    figures = Figures()
    for _ in range(SAMPLES_MAX + 10):
        figures.note_wake_up(0.0)
    taken = figures.take()
    assert taken is not None
    assert len(taken.samples["wake_up_seconds"]) == SAMPLES_MAX


def test_what_crashes_is_counted() -> None:
    figures = Figures()
    figures.note(catalogue.CRASHES)
    figures.note(catalogue.CRASHES)
    assert figures.take() == ({"crashes": 2}, {})
    assert figures.take() is None


def test_who_is_turned_away_is_counted_by_where_and_why() -> None:
    figures = Figures()
    for where, why in ((catalogue.CONTROL_SOCKET, catalogue.REFUSED), (catalogue.NOTIFICATIONS, catalogue.DROPPED)):
        figures.note(catalogue.TURNED_AWAY, where, why)
    assert figures.take() == ({"turned_away|control_socket|refused": 1, "turned_away|notifications|dropped": 1}, {})


NOTED = (
    (catalogue.LATE_NOTIFICATIONS, ()),
    (catalogue.STRAY_RELEASES, ()),
    (catalogue.FAILED_NOTIFICATIONS, ()),
    (catalogue.READS_FAILED, ()),
    (catalogue.HANDSHAKES_FAILED, ()),
    (catalogue.TURNED_AWAY, (catalogue.CONTROL_SOCKET, catalogue.MALFORMED)),
)


@pytest.mark.parametrize(("metric", "values"), NOTED, ids=[metric.name for metric, _ in NOTED])
def test_an_idle_engine_keeps_nothing_of_what_is_only_counted(metric: Metric, values: tuple[str, ...]) -> None:
    """It takes no figures, and strangers may go on for days."""
    figures = Figures()

    def note(times: int) -> int:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(times):
            figures.note(metric, *values)
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        note(300)
        assert note(10_000) < 10_000 * 8, "not even a reference to each"
    finally:
        tracemalloc.stop()
    assert figures.take() == ({metric.key(*values): 10_300}, {})
    assert figures.take() is None
    figures.note(metric, *values)
    assert figures.take() == ({metric.key(*values): 1}, {})


@pytest.mark.parametrize(
    "metric", [catalogue.READS_FAILED, catalogue.HANDSHAKES_FAILED, catalogue.FAILED_NOTIFICATIONS]
)
def test_what_fails_below_a_request_counts_as_a_failed_transfer_too(metric: Metric) -> None:
    """As the built-in connector counts."""
    figures = Figures()
    figures.note_failed(metric)
    assert figures.take() == ({metric.key(): 1, catalogue.FAILED_TRANSFERS.key(): 1}, {})


def test_records_that_are_missing_in_the_trace_are_counted() -> None:
    figures = Figures()
    figures.note(catalogue.TRACE_RECORDS_MISSING, times=3)
    figures.note(catalogue.TRACE_RECORDS_MISSING, times=4)
    taken = figures.take()
    assert taken is not None
    assert taken.counts == {"trace_records_missing": 7}
    assert figures.take() is None


def test_nothing_is_lost_or_counted_twice_between_two_threads() -> None:
    figures = Figures()
    own = recorder(figures)
    observe = own.observer("p")
    fresh = request.Request(request_id="r", lease=LEASE, peer="p", retries_left=1)
    ended, _ = request.MACHINE.step(fresh, request.Aborted())
    rounds = 20_000

    def live() -> None:
        for _ in range(rounds):
            observe(0, [("request", "r", None, None, fresh), ("request", "r", fresh, request.Aborted(), ended)])
            own.catch_up()

    thread = threading.Thread(target=live)
    thread.start()
    counts: Counter[str] = Counter()
    samples = 0
    is_over = False
    while not is_over:
        is_over = not thread.is_alive()
        taken = figures.take()
        if taken is not None:
            counts.update(taken.counts)
            samples += sum(map(len, taken.samples.values()))
        gauges = figures.take_gauges() or {}
        assert 0 <= gauges.get("requests|pending_handshake", 0) <= 1
    thread.join()
    assert counts == {
        "transitions|request|pending_handshake|none": rounds,
        "transitions|request|failed|AbortedByClient": rounds,
    }
    assert samples == rounds


def test_a_trace_and_figures_are_fed_together() -> None:
    class Sink:
        def __init__(self) -> None:
            self.records: list[Any] = []

        def write(self, *records: Any) -> None:
            self.records.extend(records)

        def close(self) -> None: ...

    sink, figures = Sink(), Figures()
    own = recorder(figures, sink=sink)
    observe = own.observer("p")
    observe(0, [("hold", (LEASE, 0), None, None, hold.Hold(lease=LEASE, rank=0))])
    observe(1, [("peer", "p", None, None, peer.Peer(engine_id="p"))])
    own.catch_up()
    taken = figures.take()
    assert taken is not None
    assert sum(taken.counts.values()) == len(sink.records) == 2
