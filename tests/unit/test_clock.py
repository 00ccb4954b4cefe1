"""Clock arithmetic: a bound that is sometimes wrong is not a bound.

A remote clock is modelled exactly, as a fraction: an offset, a rate within the assumed drift, and a reading somewhere
in the round trip that nobody can know. Whatever these are, the sample's interval must contain the true offset, and no
instant of the remote clock may come earlier in local time than `earliest_local_ns` says.
"""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from connector.config import ConnectorOptions
from connector.runtime.clock import NS_PER_SECOND, RELATIVE_DRIFT, ClockSample, MonotonicClock, to_ns

READING_ERROR_NS = 2
"""A clock shows whole nanoseconds; two readings are compared."""

HOUR_NS = 3600 * NS_PER_SECOND

_offsets_ns = st.integers(-(10**18), 10**18)
_starts_ns = st.integers(0, 10**18)
_delays_ns = st.integers(0, 5 * NS_PER_SECOND)
_drifts_ppm = st.integers(-100, 100)


class RemoteClock:
    """Shows `reading_ns` at the local time `at_ns`, and runs faster than ours by `drift_ppm`."""

    def __init__(self, *, reading_ns: int, at_ns: int, drift_ppm: int) -> None:
        self._reading_ns = reading_ns
        self._at_ns = at_ns
        self._rate = 1 + Fraction(drift_ppm, 1_000_000)

    def reading_ns(self, at_ns: int) -> int:
        return round(self._reading_ns + (at_ns - self._at_ns) * self._rate)

    def shows_at_ns(self, reading_ns: int) -> Fraction:
        """The local time at which it shows `reading_ns`."""
        return self._at_ns + (reading_ns - self._reading_ns) / self._rate


def measure(*, sent_ns: int, request_ns: int, reply_ns: int, remote: RemoteClock) -> ClockSample:
    return ClockSample.from_round_trip(
        sent_ns=sent_ns,
        received_ns=sent_ns + request_ns + reply_ns,
        remote_ns=remote.reading_ns(sent_ns + request_ns),
    )


# --- the sample -----------------------------------------------------------------------------------------------------


def test_a_symmetric_round_trip_finds_the_offset_exactly() -> None:
    sample = ClockSample.from_round_trip(sent_ns=1000, received_ns=1200, remote_ns=5100)
    assert (sample.offset_ns, sample.error_ns, sample.measured_ns) == (4000, 100, 1200)


def test_the_earliest_local_time_takes_off_offset_error_and_drift() -> None:
    sample = ClockSample.from_round_trip(sent_ns=0, received_ns=200, remote_ns=NS_PER_SECOND + 100)
    deadline_ns = 2 * NS_PER_SECOND
    earliest_ns = sample.earliest_local_ns(deadline_ns)
    assert earliest_ns <= NS_PER_SECOND - 100
    # A bound that takes off a second too much would be safe, and useless.
    assert earliest_ns >= NS_PER_SECOND - 100 - round(2 * RELATIVE_DRIFT * NS_PER_SECOND)


@given(start_ns=_starts_ns, offset_ns=_offsets_ns, request_ns=_delays_ns, reply_ns=_delays_ns)
@settings(max_examples=500, deadline=None)
@example(start_ns=0, offset_ns=0, request_ns=0, reply_ns=0)
@example(start_ns=0, offset_ns=0, request_ns=1, reply_ns=0)
@example(start_ns=1, offset_ns=0, request_ns=0, reply_ns=1)
def test_the_true_offset_lies_within_the_error(start_ns: int, offset_ns: int, request_ns: int, reply_ns: int) -> None:
    sample = ClockSample.from_round_trip(
        sent_ns=start_ns,
        received_ns=start_ns + request_ns + reply_ns,
        remote_ns=start_ns + request_ns + offset_ns,
    )
    assert abs(sample.offset_ns - offset_ns) <= sample.error_ns
    # And it is no wider than the ignorance: half the round trip, rounded up.
    assert 2 * sample.error_ns <= request_ns + reply_ns + 1


# --- remote deadlines in local time ---------------------------------------------------------------------------------


@given(
    start_ns=_starts_ns,
    offset_ns=_offsets_ns,
    request_ns=_delays_ns,
    reply_ns=_delays_ns,
    asked_after_ns=st.integers(0, HOUR_NS),
    ahead_ns=st.integers(-HOUR_NS, HOUR_NS),
)
@settings(max_examples=500, deadline=None)
def test_without_drift_a_deadline_never_comes_earlier_than_said(
    start_ns: int, offset_ns: int, request_ns: int, reply_ns: int, asked_after_ns: int, ahead_ns: int
) -> None:
    remote = RemoteClock(reading_ns=start_ns + offset_ns, at_ns=start_ns, drift_ppm=0)
    sample = measure(sent_ns=start_ns, request_ns=request_ns, reply_ns=reply_ns, remote=remote)
    now_ns = sample.measured_ns + asked_after_ns
    deadline_ns = remote.reading_ns(now_ns) + ahead_ns
    assert sample.earliest_local_ns(deadline_ns) <= remote.shows_at_ns(deadline_ns)


@given(
    start_ns=_starts_ns,
    offset_ns=_offsets_ns,
    drift_ppm=_drifts_ppm,
    request_ns=_delays_ns,
    reply_ns=_delays_ns,
    asked_after_ns=st.integers(0, HOUR_NS),
    ahead_ns=st.integers(0, 24 * HOUR_NS),
)
@settings(max_examples=1000, deadline=None)
@example(
    start_ns=0, offset_ns=0, drift_ppm=100, request_ns=0, reply_ns=1000, asked_after_ns=0, ahead_ns=30 * NS_PER_SECOND
)
def test_with_drift_a_deadline_never_comes_earlier_than_said(
    start_ns: int,
    offset_ns: int,
    drift_ppm: int,
    request_ns: int,
    reply_ns: int,
    asked_after_ns: int,
    ahead_ns: int,
) -> None:
    """The clock goes on drifting until the deadline; a bound must hold then, not only when it was computed."""
    remote = RemoteClock(reading_ns=start_ns + offset_ns, at_ns=start_ns, drift_ppm=drift_ppm)
    sample = measure(sent_ns=start_ns, request_ns=request_ns, reply_ns=reply_ns, remote=remote)
    now_ns = sample.measured_ns + asked_after_ns
    deadline_ns = remote.reading_ns(now_ns) + ahead_ns
    earliest_ns = sample.earliest_local_ns(deadline_ns)
    assert earliest_ns <= remote.shows_at_ns(deadline_ns) + READING_ERROR_NS


@given(
    offset_ns=_offsets_ns,
    drift_ppm=_drifts_ppm,
    request_ns=_delays_ns,
    reply_ns=_delays_ns,
    asked_after_ns=st.integers(0, 60 * NS_PER_SECOND),
    ahead_ns=st.integers(0, 30 * NS_PER_SECOND),
)
@settings(max_examples=500, deadline=None)
def test_with_the_default_margin_a_default_lease_is_never_believed_too_long(
    offset_ns: int, drift_ppm: int, request_ns: int, reply_ns: int, asked_after_ns: int, ahead_ns: int
) -> None:
    """What the proof of a request is made of: the bound, less the option lease_margin_seconds."""
    remote = RemoteClock(reading_ns=offset_ns, at_ns=0, drift_ppm=drift_ppm)
    sample = measure(sent_ns=0, request_ns=request_ns, reply_ns=reply_ns, remote=remote)
    now_ns = sample.measured_ns + asked_after_ns
    deadline_ns = remote.reading_ns(now_ns) + ahead_ns
    proven_ns = sample.earliest_local_ns(deadline_ns) - to_ns(ConnectorOptions().lease_margin_seconds)
    assert proven_ns <= remote.shows_at_ns(deadline_ns)


# --- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "nanoseconds"),
    [(0.0, 0), (1e-9, 1), (0.3, 300_000_000), (30, 30 * NS_PER_SECOND), (-0.5, -500_000_000)],
)
def test_seconds_become_whole_nanoseconds(seconds: float, nanoseconds: int) -> None:
    assert to_ns(seconds) == nanoseconds


def test_the_monotonic_clock_is_the_one_that_listeners_report() -> None:
    clock = MonotonicClock()
    before_ns = time.perf_counter_ns()
    now_ns = clock.now_ns()
    assert before_ns <= now_ns <= time.perf_counter_ns()
    assert abs(clock.wall() - time.time()) < 60
