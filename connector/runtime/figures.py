"""Counts what the machines do, in the trio thread, and hands the figures to the engine thread.

The recorder (`connector/runtime/recorder.py`) hands over the steps: from these come how many instances are in a state,
how often it was entered and why, how long it lasted, and a few things that can be told from single transitions.
It is always on, so it has to be cheap (`tests/bench/bench_trace.py`).

What else happens in that thread and is only counted (`Figures.note`) goes the same way: strangers and peers can cause
it while the engine is idle, so nothing may pile up.

Handing over costs neither thread a lock: `Figures` says beside each field which thread writes it. The recorder catches
up before an executor reports a result, so when the engine thread takes the end of a request, the figures already
contain its end. That makes the gauges right when the engine falls asleep: vLLM steps as long as a request waits or a
lease is held, and the step that ends the last of them takes figures without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from connector.clock import NS_PER_SECOND
from connector.observe import catalogue
from connector.observe.catalogue import Metric
from connector.observe.traced import MACHINES
from statemachine import hold, lease, peer, request
from statemachine.kernel import Event

SAMPLES_MAX = 1 << 16
"""Durations that wait for the engine thread, which takes them with every step. If it makes none, the oldest go."""


_Samples: TypeAlias = deque[tuple[str, float]]


class Taken(NamedTuple):
    """Figures since the last time, by key of the series."""

    counts: dict[str, int]
    samples: dict[str, list[float]]


class _Arrow(NamedTuple):
    """What is done when an instance comes from one state to another, or is made.

    Attributes:
        entered: slot of the transitions into the new state, if they have no reason.
        by_reason: slots by reason, otherwise.
        came, left: slots of the gauges of the new state and of the one before; None where there is none.
        lasted: key of the durations of the state before; None: there is none.
        special: what this pair of states tells besides.
    """

    entered: int
    by_reason: dict[str, int]
    came: int | None
    left: int | None
    lasted: str | None
    special: Callable[[list[int], _Samples, float, Any, Any], None] | None


_KEYS: list[str] = []
"""By slot: of what series it is the number. First the counters, then the gauges."""

_SLOTS: dict[tuple[str, ...], int] = {}
"""By the name of the metric and the values of its labels, which cost less to look up than to make a key of."""


def _slot(metric: Metric, *values: str) -> int:
    slot = _SLOTS[metric.name, *values] = len(_KEYS)
    _KEYS.append(metric.key(*values))
    return slot


_ENTERED = {values: _slot(catalogue.TRANSITIONS, *values) for values in catalogue.TRANSITIONS.series}
_RETRIES = _slot(catalogue.RETRIES)
_HOLDS = {side: _slot(catalogue.HOLDS, side) for (side,) in catalogue.HOLDS.series}
_RENEWALS = {side: _slot(catalogue.RENEWALS, side) for (side,) in catalogue.RENEWALS.series}
for _metric in (
    catalogue.FAILED_TRANSFERS,
    catalogue.READS_FAILED,
    catalogue.HANDSHAKES_FAILED,
    catalogue.FAILED_NOTIFICATIONS,
    catalogue.LATE_NOTIFICATIONS,
    catalogue.STRAY_RELEASES,
    catalogue.TURNED_AWAY,
    catalogue.TRACE_RECORDS_MISSING,
    catalogue.CRASHES,
):
    for _values in _metric.series:
        _slot(_metric, *_values)
_COUNTERS = len(_KEYS)
_GAUGE_OF = {request.MACHINE.name: catalogue.REQUESTS, peer.MACHINE.name: catalogue.PEERS}
"""By machine. Those of the other two come from the scheduler's process, or are of no interest."""

_HANDSHAKE_SECONDS = {
    values[0]: catalogue.HANDSHAKE_SECONDS.key(*values) for values in catalogue.HANDSHAKE_SECONDS.series
}
_LEASE_MARGIN_SECONDS = catalogue.LEASE_MARGIN_SECONDS.key()
_WAKE_UP_SECONDS = catalogue.WAKE_UP_SECONDS.key()


class Figures:
    """See the module's docstring. Each method belongs to the thread under whose heading it stands."""

    def __init__(self) -> None:
        # By slot; counters only ever grow. The trio thread alone adds to them (`clear` writes when that thread has
        # ended). The engine thread copies the whole list, one call that nothing can come between, and subtracts what it
        # saw last time.
        self._numbers = [0] * len(_KEYS)
        # The trio thread appends; the engine thread takes from the other end. Each is one call of the deque.
        self._samples: deque[tuple[str, float]] = deque(maxlen=SAMPLES_MAX)
        # The trio thread alone raises it, after what it stands for: a thread that sees it finds all of that.
        self._changes = 0
        # The engine thread alone reads and writes these: what it saw last.
        self._changes_taken = 0
        self._changes_shown = -1
        self._taken = self._numbers.copy()

    # --- trio thread ------------------------------------------------------------------------------------------------

    def count(self, steps: Iterable[tuple[Any, ...]]) -> None:
        """Steps as the flight recorder keeps them (`flight_recorder.Step`), in order."""
        numbers, samples = self._numbers, self._samples
        for at_ns, before, event, after, _, _, since_ns in steps:
            state, came_from = after.state, None if before is None else before.state
            if state is came_from:
                self._count_within(before, event)
                continue
            entered, by_reason, came, left, lasted, special = _ARROWS[came_from][state]
            numbers[by_reason.get(_reason(after), entered) if by_reason else entered] += 1
            if came is not None:
                numbers[came] += 1
            if left is not None:
                numbers[left] -= 1
            if lasted is not None:
                seconds = (at_ns - since_ns) / NS_PER_SECOND
                samples.append((lasted, seconds))
                if special is not None:
                    special(numbers, samples, seconds, event, after)
        self._changes += 1

    def _count_within(self, before: Any, event: Event | None) -> None:
        """A step that led to the same state."""
        kind = event.__class__
        if kind is hold.HeldByPeer:
            slot = _RENEWALS[catalogue.DECODE]
        elif kind is lease.Held:
            slot = _HOLDS[catalogue.PREFILL]
            for holder in before.holders:
                if holder.engine_id == event.engine_id:  # type: ignore[union-attr]
                    slot = _RENEWALS[catalogue.PREFILL]
        elif kind is lease.Renewed:
            slot = _RENEWALS[catalogue.PREFILL]
        else:
            return
        self._numbers[slot] += 1

    def note(self, metric: Metric, *values: str, times: int = 1) -> None:
        """This has happened, which no transition tells. `values`: of the metric's labels."""
        self._numbers[_SLOTS[metric.name, *values]] += times
        self._changes += 1

    def note_failed(self, metric: Metric) -> None:
        """A READ, a handshake or a notification has failed, of which the built-in connector counts the sum."""
        self.note(metric)
        self.note(catalogue.FAILED_TRANSFERS)

    def note_wake_up(self, seconds: float) -> None:
        """The actors have woken up so long after the engine's call."""
        self._samples.append((_WAKE_UP_SECONDS, seconds))
        self._changes += 1

    # --- engine thread ----------------------------------------------------------------------------------------------

    def take(self) -> Taken | None:
        """What has happened since the last call; None: nothing."""
        changes = self._changes
        if changes == self._changes_taken:
            return None
        self._changes_taken = changes
        before, now = self._taken, self._numbers.copy()
        self._taken = now
        counts = {_KEYS[slot]: now[slot] - before[slot] for slot in range(_COUNTERS) if now[slot] != before[slot]}
        samples: dict[str, list[float]] = {}
        waiting = self._samples
        while waiting:
            key, value = waiting.popleft()
            samples.setdefault(key, []).append(value)
        return Taken(counts, samples) if counts or samples else None

    def take_gauges(self) -> dict[str, float] | None:
        """How many instances are in each state now, if anything has happened since the last call."""
        changes = self._changes
        if changes == self._changes_shown:
            return None
        self._changes_shown = changes
        return self.gauges()

    def gauges(self) -> dict[str, float]:
        """How many instances are in each state now."""
        return dict(zip(_KEYS[_COUNTERS:], self._numbers[_COUNTERS:], strict=True))

    def clear(self) -> None:
        """The actors are dead, and there is nothing in their hands any more."""
        if any(self._numbers[_COUNTERS:]):
            self._numbers[_COUNTERS:] = [0] * (len(_KEYS) - _COUNTERS)
            self._changes += 1


def _reason(value: Any) -> str:
    if value.__class__ is lease.Lease:
        return lease.LENT_BACK if value.may_end_unread else catalogue.NO_REASON
    failure = getattr(value, "failure", None)
    if failure is not None:
        kind: str = failure.kind
        return kind
    return catalogue.WHY_GONE.get(getattr(value, "why", None) or "", catalogue.OTHER)


# --- what single transitions tell -------------------------------------------------------------------------------------


def _count_hold(numbers: list[int], samples: _Samples, seconds: float, event: Any, after: Any) -> None:
    numbers[_HOLDS[catalogue.DECODE]] += 1


def _count_retry(numbers: list[int], samples: _Samples, seconds: float, event: Any, after: Any) -> None:
    numbers[_RETRIES] += 1


def _measure_margin(numbers: list[int], samples: _Samples, seconds: float, event: Any, after: Any) -> None:
    samples.append((_LEASE_MARGIN_SECONDS, (event.proven_until_ns - after.last_completed_ns) / NS_PER_SECOND))


def _measure_connected(numbers: list[int], samples: _Samples, seconds: float, event: Any, after: Any) -> None:
    samples.append((_HANDSHAKE_SECONDS[catalogue.CONNECTED], seconds))


def _measure_failed(numbers: list[int], samples: _Samples, seconds: float, event: Any, after: Any) -> None:
    samples.append((_HANDSHAKE_SECONDS[catalogue.FAILED], seconds))


_BETWEEN: dict[tuple[Any, Any], Callable[[list[int], _Samples, float, Any, Any], None]] = {
    (hold.State.WANTED, hold.State.HELD): _count_hold,
    (request.State.READING, request.State.PENDING_HANDSHAKE): _count_retry,
    (request.State.DRAINING, request.State.PENDING_HANDSHAKE): _count_retry,
    (request.State.READING, request.State.DONE): _measure_margin,
    (request.State.PROVING, request.State.DONE): _measure_margin,
    (peer.State.HANDSHAKING, peer.State.READY): _measure_connected,
    (peer.State.HANDSHAKING, peer.State.DRAINING): _measure_connected,
    **{
        (peer.State.HANDSHAKING, state): _measure_failed
        for state in (peer.State.IDLE, peer.State.BACKOFF, peer.State.INCOMPATIBLE, peer.State.GONE)
    },
}
"""By the states left and entered."""


def _arrows() -> dict[Any, dict[Any, tuple[Any, ...]]]:
    """By state before (None: the instance was made) and after: every pair of one machine. The fields of an `_Arrow` are
    in a plain tuple, because a named one is taken apart by way of an iterator, for every step."""
    found: dict[Any, dict[Any, tuple[Any, ...]]] = {}
    for machine in MACHINES:
        gauge = _GAUGE_OF.get(machine.name)
        living = {
            state: _slot(gauge, state.value) if gauge is not None and state not in machine.terminal else None
            for state in machine.states
        }
        for after in machine.states:
            reasons = catalogue.reasons(after)
            slots = {reason: _ENTERED[machine.name, after.value, reason] for reason in reasons}
            for before in (None, *machine.states):
                arrow = _Arrow(
                    entered=slots[reasons[-1]],
                    by_reason=slots if len(slots) > 1 else {},
                    came=living[after],
                    left=living[before] if before is not None else None,
                    lasted=catalogue.STATE_SECONDS.key(machine.name, before.value) if before is not None else None,
                    special=_BETWEEN.get((before, after)),
                )
                found.setdefault(before, {})[after] = tuple(arrow)
    return found


_ARROWS = _arrows()
