"""Wall clocks of several machines: what happened says by how much they differ, and agreeing ones are left alone."""

from __future__ import annotations

import msgspec
import pytest

from connector.clock import NS_PER_SECOND
from connector.observe.clocks import AGREES_NS, Clock, all_histories, clocks, lease_of_each_hold
from connector.observe.history import Story, histories, stories
from statemachine.trace import TransitionRecord
from tests.simulation.faults import Fault, Kind, Plan
from tests.simulation.scripted import simulate
from tests.simulation.timeline import ZERO_WALL
from tests.unit.timeline_load import trace

ROUND_TRIP_NS = 1_000_000
"""More than there is between the question and the answer in `timeline_load`."""


def of_engines(shown: list[Story]) -> dict[str, Clock]:
    found = clocks(shown)
    return {history.engine_id: found[id(history)] for history in all_histories(shown)}


@pytest.mark.parametrize("ahead_seconds", [-7200.0, -0.02, 0.02, 3.5])
def test_a_clock_that_is_wrong_is_shifted_back(ahead_seconds: float) -> None:
    """Of P's and D's clocks, which agree among each other, one side moves."""
    found = of_engines(stories(histories(trace(200, ahead_seconds=ahead_seconds))))
    by_side = {side: {name: each for name, each in found.items() if name.startswith(side)} for side in ("pre", "dec")}
    moved = {name: found[name].shift_ns for name in by_side["pre"]}
    stayed = {name: found[name].shift_ns for name in by_side["dec"]}
    for prefill in moved.values():
        for decode in stayed.values():
            assert prefill - decode == pytest.approx(-ahead_seconds * NS_PER_SECOND, abs=ROUND_TRIP_NS)
    assert all(each.error_ns == 0 and each.pairs > 100 for each in found.values())


def test_clocks_that_agree_are_left_alone() -> None:
    assert {each.shift_ns for each in of_engines(stories(histories(trace(200)))).values()} == {0}


def test_afterwards_no_answer_comes_before_its_question() -> None:
    shown = stories(histories(trace(100, ahead_seconds=-1.0)))
    found = clocks(shown)
    for story in shown:
        (lent,) = story.leases
        (held,) = story.holds
        said = next(each for each in lent.records if each.event == "Held")
        asked, heard = held.records[0], held.records[1]
        on_p, on_d = found[id(lent)], found[id(held)]
        assert on_d.at(asked.mono_ns) - AGREES_NS <= on_p.at(said.mono_ns) <= on_d.at(heard.mono_ns) + AGREES_NS


def test_a_grant_alone_says_little_and_is_believed_where_there_is_nothing_else() -> None:
    """Without D's knowledge of the lease, only that no READ begins long before its grant."""
    shown = stories(histories(each for each in trace(50, ahead_seconds=600.0) if each.machine != "hold"))
    found = of_engines(shown)
    apart = found["prefill-a"].shift_ns - found["decode-a"].shift_ns
    assert -601 * NS_PER_SECOND < apart < -599 * NS_PER_SECOND


def test_a_wall_clock_that_is_set_meanwhile_moves_nothing() -> None:
    """Durations are those of the monotonic clock, and the median of the records says where it stands."""
    records = trace(200)
    late = sorted(each.mono_ns for each in records)[int(0.8 * len(records))]
    jumped = [
        msgspec.structs.replace(each, wall=each.wall + 3600.0)
        if each.engine_id == "decode-a" and each.mono_ns > late
        else each
        for each in records
    ]
    shown, plain = stories(histories(jumped)), stories(histories(records))
    before, after = (of_engines(each)["decode-a"].zero_ns for each in (plain, shown))
    assert abs(after - before) < 1000  # wall clocks are floats


def test_a_process_that_starts_again_has_a_clock_of_its_own() -> None:
    first = trace(20)
    again = [
        msgspec.structs.replace(
            each, mono_ns=each.mono_ns - 900 * NS_PER_SECOND, wall=each.wall + 60, lease_number=each.seq + 1000
        )
        for each in trace(20, seed=1)
    ]
    found = clocks(stories(histories([*first, *again])))
    assert len({id(clock) for clock in found.values()}) == 8


def test_a_process_that_made_one_record_has_a_clock_of_its_own() -> None:
    """Its successor's first record has the same number."""
    first = next(each for each in trace(1) if each.machine == "lease")
    restarted = msgspec.structs.replace(
        first, subject="another", lease_number=7, mono_ns=first.mono_ns + NS_PER_SECOND, wall=first.wall + 600
    )
    assert first.seq == restarted.seq == 0
    found = clocks(stories(histories([first, restarted])))
    assert len({id(clock) for clock in found.values()}) == 2


def test_simulated_clocks_are_found_to_within_what_drift_allows() -> None:
    """A decode engine whose wall clock jumps by hours at the start; every process has its own zero and its own rate."""
    jump = Fault(kind=Kind.WALL_CLOCK_JUMP, target="d0", at_seconds=0.0, duration_seconds=0.1)
    result = simulate(Plan(seed=5, faults=[jump]))
    assert result.faults_fired[Kind.WALL_CLOCK_JUMP] == 1
    true_seconds = {id(record): seconds for seconds, record in result.timed_trace()}
    shown = stories(histories(result.trace))
    found = clocks(shown)
    assert max(abs(each.shift_ns) for each in found.values()) > NS_PER_SECOND

    def error(clock: Clock, record: TransitionRecord) -> float:
        return clock.at(record.mono_ns) / NS_PER_SECOND - ZERO_WALL - true_seconds[id(record)]

    errors = [error(found[id(each)], record) for each in all_histories(shown) for record in each.records]
    # Whichever side was believed: all are wrong by the same, but for drift.
    assert max(errors) - min(errors) < 0.2


def test_of_a_hold_whose_name_says_no_rank_the_lease_is_not_known() -> None:
    """Ids are put into traces that are given away."""
    written = [msgspec.structs.replace(each, subject="x") if each.machine == "hold" else each for each in trace(5)]
    told = stories(histories(written))
    assert {lease for story in told for lease in lease_of_each_hold(story)} == {None}
    assert clocks(told)


def story_of(ranks_of_d: int, holds_of_each: int, ranks_of_p: int) -> Story:
    def record(machine: str, engine_id: str, rank: int, subject: str) -> TransitionRecord:
        return TransitionRecord(
            seq=0,
            wall=1.0,
            mono_ns=1,
            engine_id=engine_id,
            rank=rank,
            role="worker",
            machine=machine,
            subject=subject,
            from_state=None,
            event="Created",
            to_state={"request": "reading", "hold": "held", "lease": "held"}[machine],
            peer=None if machine == "lease" else "P",
            remote_request_id=None if machine == "lease" else "r",
            lease_number=1,
        )

    (story,) = stories(
        histories(
            [
                *(record("request", "D", rank, "r-d") for rank in range(ranks_of_d)),
                *(
                    record("hold", "D", rank, f"r/{number}")
                    for rank in range(ranks_of_d)
                    for number in range(holds_of_each)
                ),
                *(record("lease", "P", rank, "r") for rank in range(ranks_of_p)),
            ]
        )
    )
    return story


@pytest.mark.parametrize(
    ("ranks_of_d", "holds_of_each", "ranks_of_p", "read"),
    [
        (1, 1, 1, [0]),
        (2, 1, 2, [0, 1]),
        (1, 2, 2, [0, 1]),
        (2, 2, 4, [0, 1, 2, 3]),
        (4, 1, 2, [0, 0, 1, 1]),
        (2, 2, 2, [0, 1, 0, 1]),
        (2, 1, 0, [None, None]),
    ],
)
def test_a_hold_is_of_the_rank_of_p_that_has_the_heads(
    ranks_of_d: int, holds_of_each: int, ranks_of_p: int, read: list[int | None]
) -> None:
    found = lease_of_each_hold(story_of(ranks_of_d, holds_of_each, ranks_of_p))
    assert [each and each.rank for each in found] == read
