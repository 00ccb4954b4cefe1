"""Counts what the machines do, in the trio thread, and hands the figures to the engine thread.

The recorder (`connector/runtime/recorder.py`) tells of every step: from these come how many instances are in a state,
how often it was entered and why, how long it lasted, and a few things that can be told from single transitions.
It is always on, so it has to be cheap (`tests/bench/bench_trace.py`).

Handing over costs neither thread a lock. The trio thread adds to integers in one list and appends durations to a deque;
the engine thread copies the list, which is one call that nothing can come between, and subtracts what it saw last
time. A core tells its observers before its executor reports anything, so when the engine thread takes the outcome of a
request, the figures already contain its end. That makes the gauges right when the engine falls asleep: vLLM steps as
long as a request waits or a lease is held, and the step that ends the last of them takes figures without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from connector.clock import NS_PER_SECOND
from connector.observe import catalogue
from connector.observe.catalogue import Metric
from statemachine import hold, lease, peer, request
from statemachine.kernel import Event

SAMPLES_MAX = 1 << 16
"""Durations that wait for the engine thread, which takes them with every step. If it makes none, the oldest go."""


class Taken(NamedTuple):
    """Figures since the last time, by key of the series."""

    counts: dict[str, int]
    samples: dict[str, list[float]]


class _State(NamedTuple):
    """What is done when a state is entered or left.

    Attributes:
        entered: slot of its transitions, if they have no reason.
        by_reason: slots by reason, otherwise.
        living: slot of its gauge; None in a terminal state.
        lasted: key of its duration.
    """

    machine: str
    entered: int
    by_reason: dict[str, int]
    living: int | None
    lasted: str


_KEYS: list[str] = []
"""By slot: of what series it is the number. First the counters, then the gauges."""


def _slot(metric: Metric, *values: str) -> int:
    _KEYS.append(metric.key(*values))
    return len(_KEYS) - 1


_ENTERED = {values: _slot(catalogue.TRANSITIONS, *values) for values in catalogue.TRANSITIONS.series}
_RETRIES = _slot(catalogue.RETRIES)
_HOLDS = {side: _slot(catalogue.HOLDS, side) for (side,) in catalogue.HOLDS.series}
_RENEWALS = {side: _slot(catalogue.RENEWALS, side) for (side,) in catalogue.RENEWALS.series}
_COUNTERS = len(_KEYS)
_GAUGE_OF = {request.MACHINE.name: catalogue.REQUESTS, peer.MACHINE.name: catalogue.PEERS}
"""By machine. Those of the other two come from the scheduler's process, or are of no interest."""

_HANDSHAKE_SECONDS = {
    values[0]: catalogue.HANDSHAKE_SECONDS.key(*values) for values in catalogue.HANDSHAKE_SECONDS.series
}
_LEASE_MARGIN_SECONDS = catalogue.LEASE_MARGIN_SECONDS.key()
_WAKE_UP_SECONDS = catalogue.WAKE_UP_SECONDS.key()


def _states() -> dict[Any, _State]:
    found = {}
    for machine in catalogue.MACHINES:
        gauge = _GAUGE_OF.get(machine.name)
        for state in machine.states:
            reasons = catalogue.reasons(state)
            slots = {reason: _ENTERED[machine.name, state.value, reason] for reason in reasons}
            is_living = gauge is not None and state not in machine.terminal
            found[state] = _State(
                machine=machine.name,
                entered=slots[reasons[-1]],
                by_reason=slots if len(slots) > 1 else {},
                living=_slot(gauge, state.value) if is_living and gauge is not None else None,
                lasted=catalogue.STATE_SECONDS.key(machine.name, state.value),
            )
    return found


_STATES = _states()


class Figures:
    """See the module's docstring. What counts and notes belongs to the trio thread, the rest to the engine's."""

    def __init__(self) -> None:
        # By slot; counters only ever grow.
        self._numbers = [0] * len(_KEYS)
        self._samples: deque[tuple[str, float]] = deque(maxlen=SAMPLES_MAX)
        self._changes = 0
        # Of the engine thread: what it saw last.
        self._changes_taken = 0
        self._changes_shown = -1
        self._taken = self._numbers.copy()

    # --- trio thread ------------------------------------------------------------------------------------------------

    def count(self, before: Any, event: Event | None, after: Any, in_before_ns: int) -> None:
        """A step into another state, after so long in the one before; `before` and `event` are None for a value that
        was made."""
        numbers, state = self._numbers, after.state
        self._changes += 1
        here = _STATES[state]
        numbers[here.by_reason.get(_reason(after), here.entered) if here.by_reason else here.entered] += 1
        if here.living is not None:
            numbers[here.living] += 1
        if before is None:
            return
        there = _STATES[before.state]
        if there.living is not None:
            numbers[there.living] -= 1
        seconds = in_before_ns / NS_PER_SECOND
        self._samples.append((there.lasted, seconds))
        special = _BETWEEN.get((before.state, state))
        if special is not None:
            special(numbers, self._samples, seconds, event, after)

    def count_within(self, before: Any, event: Event | None) -> None:
        """A step that led to the same state."""
        numbers = self._numbers
        self._changes += 1
        match event:
            case hold.HeldByPeer():
                numbers[_RENEWALS[catalogue.DECODE]] += 1
            case lease.Held(engine_id=engine_id):
                is_new = all(holder.engine_id != engine_id for holder in before.holders)
                numbers[(_HOLDS if is_new else _RENEWALS)[catalogue.PREFILL]] += 1
            case lease.Renewed():
                numbers[_RENEWALS[catalogue.PREFILL]] += 1
            case _:
                pass

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
        """The actors are dead, and whatever they had in hand is nobody's any more."""
        if any(self._numbers[_COUNTERS:]):
            self._numbers[_COUNTERS:] = [0] * (len(_KEYS) - _COUNTERS)
            self._changes += 1


def _reason(value: Any) -> str:
    failure = getattr(value, "failure", None)
    if failure is not None:
        kind: str = failure.kind
        return kind
    return catalogue.WHY_GONE.get(getattr(value, "why", None) or "", catalogue.OTHER)


# --- what single transitions tell -------------------------------------------------------------------------------------

_Samples = deque[tuple[str, float]]


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
