"""One time for the records of several processes, whose clocks nobody has compared.

Within a process the monotonic clock counts. Its zero is tied to the wall clock of its machine, by the median of all
records; a wall clock that is set while the process runs moves nothing. Wall clocks of several machines differ. What
happened is evidence for by how much: an answer does not come before its question, and a question not before it was
asked. For a decode rank and a prefill rank that had the same lease

    D wants the lease        <= P's first `Held`        only where no other engine held the lease
    P's first `Held`         <= D hears `HeldByPeer`
    D lets go                <= P's lease is done
    P's first `ReaderDone`   <= D hears `ReleaseConfirmed`
    P grants                 <= D starts to read        a fast reader may overtake the grant by a step of P's engine, so
                                                        this is used loosely, and only where nothing else bounds it

so the clock of P, seen from D, is known within an interval: often as short as a round trip. Clocks that agree with all
of these are left alone. Others are shifted, process by process, beginning with the one that most others agree with,
then the one whose interval is narrowest, so that what is known holds; of a short round trip, the middle is taken.

Clocks that run at different rates can contradict every shift. Then the middle of the contradiction is taken, unless the
wall clocks lie within it; its size is `Clock.error_ns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median_low
from typing import TypeAlias

from connector.clock import NS_PER_SECOND
from connector.observe.history import History, Story, begins_process
from statemachine import hold, lease, request
from statemachine.trace import TransitionRecord

PLACE_ALONE_NS = 1_000_000
"""The middle of an interval that is shorter than this is taken; of a longer one, the end that moves the clock least."""

OVERTAKES_NS = 200_000_000
"""By how much a READ may begin before the record of its grant."""

AGREES_NS = 50_000
"""A contradiction of no more is none: the wall clock and the monotonic one are read one after the other."""

Place: TypeAlias = tuple[str, str, int]
"""Engine id, role, rank."""

_Interval: TypeAlias = tuple[float, float]
"""The least and the greatest value that a shift may have, in nanoseconds."""

_SAID, _RELEASED, _GRANTED = lease.Held.__name__, lease.ReaderDone.__name__, lease.Granted.__name__
_HEARD, _LET_GO, _CONFIRMED = hold.HeldByPeer.__name__, hold.Unwanted.__name__, hold.ReleaseConfirmed.__name__
_READS = request.PeerReady.__name__


@dataclass(kw_only=True)
class Clock:
    """The clock of one process. `zero_ns`: Unix time in nanoseconds at which its monotonic clock shows 0.

    Attributes:
        shift_ns: what was added to the wall clock, which is part of `zero_ns`.
        pairs: how many pairs of events say where it is.
        error_ns: by how much the evidence contradicts itself.
    """

    engine_id: str
    role: str
    rank: int
    zero_ns: int
    shift_ns: int = 0
    pairs: int = 0
    error_ns: int = 0

    def at(self, mono_ns: int) -> int:
        """Unix time in nanoseconds, shifted."""
        return self.zero_ns + mono_ns


@dataclass
class _Pair:
    """The clocks of a decode rank and a prefill rank. P's has to be shifted by at least `low_ns` more than D's, and by
    at most `high_ns`; `granted_ns` is what grants say of the latter."""

    decode: Clock
    prefill: Clock
    low_ns: float = -inf
    high_ns: float = inf
    granted_ns: float = inf

    def decode_first(self, decode_ns: int, prefill_ns: int) -> None:
        """What D did came before what P did."""
        self.low_ns = max(self.low_ns, self.decode.at(decode_ns) - self.prefill.at(prefill_ns))
        self._count()

    def prefill_first(self, prefill_ns: int, decode_ns: int) -> None:
        self.high_ns = min(self.high_ns, self.decode.at(decode_ns) - self.prefill.at(prefill_ns))
        self._count()

    def granted_first(self, prefill_ns: int, decode_ns: int) -> None:
        ahead_ns = self.decode.at(decode_ns) - self.prefill.at(prefill_ns)
        self.granted_ns = min(self.granted_ns, ahead_ns + OVERTAKES_NS)

    def interval(self) -> _Interval:
        """By how much P's clock may be shifted more than D's: at least, and at most."""
        return self.low_ns, self.high_ns if self.high_ns < inf else self.granted_ns

    def _count(self) -> None:
        self.decode.pairs += 1
        self.prefill.pairs += 1


def clocks(stories: Iterable[Story]) -> dict[int, Clock]:
    """The clock of each history, by `id(history)`; histories of one process share theirs."""
    stories = list(stories)
    by_history = _clocks_of_lives(stories)
    together = _by_engine(_paired(stories, by_history))
    _place(together)
    _follow(by_history.values(), together)
    return by_history


def all_histories(stories: Iterable[Story]) -> Iterator[History]:
    """Each one once, though samples of one prompt share their leases."""
    seen: set[int] = set()
    for story in stories:
        for history in (*story.leases, *story.holds, *story.requests):
            if id(history) not in seen:
                seen.add(id(history))
                yield history


def lives(stories: Iterable[Story]) -> list[list[History]]:
    """What each process wrote, by its own clock. An engine id may have been used before by another process
    (`begins_process`)."""
    places: dict[Place, list[History]] = {}
    for history in all_histories(stories):
        first = history.records[0]
        places.setdefault((first.engine_id, first.role, first.rank), []).append(history)
    for instances in places.values():
        instances.sort(key=lambda history: (history.records[0].mono_ns, history.records[0].seq))
    return [life for instances in places.values() for life in _split(instances)]


def lease_of_each_hold(story: Story) -> list[History | None]:
    """For every hold of the story the lease that it is D's knowledge of, None where P's side is not known.

    A hold counts the partners of its D rank on P: all ranks, or those that have its part of the heads, which lie
    next to each other.
    """
    leases = sorted(story.leases, key=lambda each: each.rank)
    of_rank: dict[int, list[History]] = {}
    for held in story.holds:
        of_rank.setdefault(held.rank, []).append(held)
    ranks_of_d = max([each.rank + 1 for each in story.requests] + [len(of_rank)], default=1)
    found: dict[int, History] = {}
    for rank, holds in of_rank.items():
        first = 0 if len(holds) >= len(leases) else rank * len(leases) // ranks_of_d
        for held in holds:
            partner = held.subject.rpartition("/")[2]
            if not partner.isdecimal():
                continue  # somebody has put other ids into the trace
            number = first + int(partner)
            if number < len(leases):
                found[id(held)] = leases[number]
    return [found.get(id(held)) for held in story.holds]


# --- inside -----------------------------------------------------------------------------------------------------------


def known_order(lent: History, held: History) -> Iterator[tuple[TransitionRecord, TransitionRecord]]:
    """Pairs of records of a lease and of D's knowledge of it: the first of each pair came before the second."""
    answered = first_record(held, _HEARD)
    pairs = [(first_record(lent, _SAID), answered), (first_record(lent, _RELEASED), first_record(held, _CONFIRMED))]
    if answered is not None and lent.state == lease.State.DONE.value:
        pairs.append((first_record(held, _LET_GO), lent.records[-1]))
    for before, after in pairs:
        if before is not None and after is not None:
            yield before, after


def first_record(history: History, event: str) -> TransitionRecord | None:
    """The first record of this event."""
    return next((record for record in history.records if record.event == event), None)


def _clocks_of_lives(stories: Sequence[Story]) -> dict[int, Clock]:
    found: dict[int, Clock] = {}
    for life in lives(stories):
        first = life[0].records[0]
        zero_ns = median_low(_zero_ns(record) for history in life for record in history.records)
        clock = Clock(engine_id=first.engine_id, role=first.role, rank=first.rank, zero_ns=zero_ns)
        found.update((id(history), clock) for history in life)
    return found


def _split(instances: Sequence[History]) -> list[list[History]]:
    lives: list[list[History]] = []
    for history in instances:
        if not lives or begins_process(history.records[0].seq, lives[-1][-1].records[0].seq):
            lives.append([])
        lives[-1].append(history)
    return lives


def _zero_ns(record: TransitionRecord) -> int:
    return round(record.wall * NS_PER_SECOND) - record.mono_ns


def _paired(stories: Sequence[Story], clock_of: dict[int, Clock]) -> list[_Pair]:
    """Every decode rank with every prefill rank that was its partner, and what is known of their clocks."""
    found: dict[tuple[int, int], _Pair] = {}
    holders: dict[int, set[str]] = {}
    for story in stories:
        for lent in story.leases:
            holders.setdefault(id(lent), set()).update(each.engine_id for each in story.holds)

    def pair_of(decode: Clock, prefill: Clock) -> _Pair:
        return found.setdefault((id(decode), id(prefill)), _Pair(decode, prefill))

    for story in stories:
        for held, known in zip(story.holds, lease_of_each_hold(story), strict=True):
            if known is not None and clock_of[id(held)] is not clock_of[id(known)]:
                is_alone = len(holders[id(known)]) == 1
                _compare_hold(pair_of(clock_of[id(held)], clock_of[id(known)]), known, held, is_alone=is_alone)
        for reader in story.requests:
            for lent in story.leases:
                if clock_of[id(reader)] is not clock_of[id(lent)]:
                    _compare_grant(pair_of(clock_of[id(reader)], clock_of[id(lent)]), lent, reader)
    return list(found.values())


def _by_engine(pairs: Iterable[_Pair]) -> list[_Pair]:
    """All processes of an engine, its lives too, are taken to share a wall clock: what is known of one is known of all.
    A clock of each stands for the others."""
    stands_for: dict[str, Clock] = {}
    found: dict[tuple[str, str], _Pair] = {}
    for pair in pairs:
        decode = stands_for.setdefault(pair.decode.engine_id, pair.decode)
        prefill = stands_for.setdefault(pair.prefill.engine_id, pair.prefill)
        if decode is prefill:
            continue
        both = found.setdefault((decode.engine_id, prefill.engine_id), _Pair(decode, prefill))
        both.low_ns = max(both.low_ns, pair.low_ns)
        both.high_ns = min(both.high_ns, pair.high_ns)
        both.granted_ns = min(both.granted_ns, pair.granted_ns)
    return list(found.values())


def _follow(clocks: Iterable[Clock], placed: Iterable[_Pair]) -> None:
    """Shift each clock as the one that stands for its engine."""
    first = {each.engine_id: each for pair in placed for each in (pair.decode, pair.prefill)}
    for clock in {id(each): each for each in clocks}.values():
        leader = first.get(clock.engine_id)
        if leader is not None and leader is not clock:
            clock.shift_ns, clock.error_ns = leader.shift_ns, leader.error_ns
            clock.zero_ns += clock.shift_ns


def _compare_hold(pair: _Pair, lent: History, held: History, *, is_alone: bool) -> None:
    said = first_record(lent, _SAID)
    if said is not None and is_alone and held.records[0].from_state is None:
        pair.decode_first(held.records[0].mono_ns, said.mono_ns)
    for before, after in known_order(lent, held):
        if before.machine == lease.MACHINE.name:
            pair.prefill_first(before.mono_ns, after.mono_ns)
        else:
            pair.decode_first(before.mono_ns, after.mono_ns)


def _compare_grant(pair: _Pair, lent: History, reader: History) -> None:
    granted, began = first_record(lent, _GRANTED), first_record(reader, _READS)
    if granted is not None and began is not None:
        pair.granted_first(granted.mono_ns, began.mono_ns)


def _place(pairs: Sequence[_Pair]) -> None:
    """Shift what contradicts the evidence, clock by clock, next the one that those placed before know best."""
    of_clock: dict[int, list[_Pair]] = {}
    for pair in pairs:
        of_clock.setdefault(id(pair.decode), []).append(pair)
        of_clock.setdefault(id(pair.prefill), []).append(pair)
    waiting = {id(clock): clock for pair in pairs for clock in (pair.decode, pair.prefill)}
    agreeing = {key: sum(_contains(pair.interval(), 0) for pair in of_clock[key]) for key in waiting}
    known: dict[int, list[_Interval]] = {}
    while waiting:
        if known:
            key = min(known, key=lambda each: min(high - low for low, high in known[each]))
        else:
            key = max(waiting, key=lambda each: (agreeing[each], waiting[each].pairs))
        clock = waiting.pop(key)
        _shift(clock, known.pop(key, []))
        for pair in of_clock[key]:
            low, high = pair.interval()
            if clock is pair.decode and id(pair.prefill) in waiting:
                known.setdefault(id(pair.prefill), []).append((clock.shift_ns + low, clock.shift_ns + high))
            elif clock is pair.prefill and id(pair.decode) in waiting:
                known.setdefault(id(pair.decode), []).append((clock.shift_ns - high, clock.shift_ns - low))


def _contains(interval: _Interval, ns: float) -> bool:
    """Evidence that contradicts itself leaves alone what lies between its parts."""
    low, high = interval
    return min(low, high) - AGREES_NS <= ns <= max(low, high) + AGREES_NS


def _shift(clock: Clock, intervals: Sequence[_Interval]) -> None:
    """By what the narrowest says, and the others as far as they agree with it."""
    low, high = -inf, inf
    for other_low, other_high in sorted(intervals, key=lambda each: each[1] - each[0]):
        if max(low, other_low) <= min(high, other_high):
            low, high = max(low, other_low), min(high, other_high)
        elif other_low > other_high and low == -inf:
            clock.error_ns = round(other_low - other_high)
            low, high = other_high, other_low
        else:
            clock.error_ns = max(clock.error_ns, round(max(other_low - high, low - other_high)))
    if _contains((low, high), 0):
        return
    if high - low < max(PLACE_ALONE_NS, clock.error_ns):
        clock.shift_ns = round((low + high) / 2)
    else:
        clock.shift_ns = round(low if low > 0 else high)
    clock.zero_ns += clock.shift_ns
