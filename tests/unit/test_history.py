"""Transition records of several processes, put together to what each request went through."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from connector.observe.history import (
    OUTCOMES,
    History,
    begins_process,
    best_named,
    deciding_rank,
    histories,
    matching,
    stories,
)
from connector.observe.spans import times_of
from connector.observe.traced import TERMINAL
from connector.tools.explanation import Live, explain, find
from connector.tools.summary import slow, summarize
from connector.tools.timeline.export import document
from statemachine import hold, lease, request
from statemachine.kernel import Machine
from statemachine.trace import TransitionRecord

Step = tuple[str | None, str, str]
PULLED: tuple[Step, ...] = (
    (None, "Created", "pending_handshake"),
    ("pending_handshake", "PeerReady", "reading"),
    ("reading", "ReadCompleted", "reading"),
    ("reading", "ReadCompleted", "done"),
)
LENT: tuple[Step, ...] = (
    (None, "Created", "computing"),
    ("computing", "Granted", "held"),
    ("held", "ReaderDone", "done"),
)


def records(
    machine: str, engine_id: str, subject: str, steps: tuple[Step, ...], *, at: float = 0.0, **fields: Any
) -> list[TransitionRecord]:
    """One instance; a second between two steps, from `at` on."""
    return [
        TransitionRecord(
            seq=number,
            wall=at + number,
            mono_ns=round((at + number) * 1e9),
            engine_id=engine_id,
            role="kv_consumer",
            machine=machine,
            subject=subject,
            from_state=from_state,
            event=event,
            to_state=to_state,
            **({"rank": 0, "lease_number": 1} | fields),
        )
        for number, (from_state, event, to_state) in enumerate(steps)
    ]


def pulled(subject: str, remote: str, steps: tuple[Step, ...] = PULLED, **fields: Any) -> list[TransitionRecord]:
    first, *others = records("request", "D", subject, steps, **({"peer": "P", "remote_request_id": remote} | fields))
    return [first, *(msgspec.structs.replace(each, age_seconds=None) for each in others)]


def test_a_stay_is_one_visit_however_many_events_it_saw() -> None:
    (history,) = histories(pulled("a-d", "a-p"))
    assert history.states == ("pending_handshake", "reading", "done")
    assert [visit.seconds for visit in history.visits] == [1.0, 2.0, None]
    assert [visit.event for visit in history.visits] == ["Created", "PeerReady", "ReadCompleted"]
    assert history.is_over
    assert history.seconds == 3.0


def test_without_its_creation_a_history_begins_with_what_is_known() -> None:
    (history,) = histories(pulled("a-d", "a-p")[1:])
    assert history.states == ("pending_handshake", "reading", "done")


def test_a_subject_that_is_created_again_is_another_instance() -> None:
    first, second = histories([*pulled("a-d", "a-p"), *pulled("a-d", "a-p", at=10)[:2]])
    assert first.is_over
    assert not second.is_over


def test_both_sides_and_all_ranks_are_one_story() -> None:
    written = [
        *pulled("a-d", "a-p", rank=0),
        *pulled("a-d", "a-p", rank=1),
        *records("hold", "D", "a-p/0", ((None, "Created", "wanted"),), peer="P", remote_request_id="a-p"),
        *records("lease", "P", "a-p", LENT, rank=0),
        *records("lease", "P", "a-p", LENT, rank=1),
    ]
    (story,) = stories(histories(written))
    assert [(each.engine_id, each.rank) for each in story.requests] == [("D", 0), ("D", 1)]
    assert [(each.engine_id, each.rank) for each in story.leases] == [("P", 0), ("P", 1)]
    assert [each.states for each in story.holds] == [("wanted",)]
    assert story.names == {"a-d", "a-p"}


def test_a_request_id_that_p_gives_twice_names_two_leases() -> None:
    written = [
        *records("lease", "P", "a-p", LENT, lease_number=1),
        *records("lease", "P", "a-p", LENT, lease_number=2, at=100),
        *pulled("first", "a-p", lease_number=1),
        *pulled("second", "a-p", lease_number=2, at=100),
    ]
    for story, number in zip(stories(histories(written)), (1, 2), strict=True):
        assert [each.records[0].lease_number for each in story.leases] == [number]


def test_a_hold_that_is_still_released_is_not_the_next_one_of_the_same_id() -> None:
    steps = (
        (None, "Created", "wanted"),
        ("wanted", "HeldByPeer", "held"),
        ("held", "Unwanted", "releasing"),
        ("releasing", "ReleaseConfirmed", "released"),
    )
    fields = {"peer": "P", "remote_request_id": "p"}
    written = records("hold", "D", "p/0", steps, **fields)
    written += records("hold", "D", "p/0", steps[:2], at=2.5, lease_number=2, **fields)
    written.sort(key=lambda record: record.mono_ns)
    assert [each.states for each in histories(written)] == [
        ("wanted", "held", "releasing", "released"),
        ("wanted", "held"),
    ]


def test_parameters_without_a_number_name_the_lease_if_p_has_given_its_id_once() -> None:
    written = [*records("lease", "P", "a-p", LENT, lease_number=5), *pulled("a-d", "a-p", lease_number=0)]
    (story,) = stories(histories(written))
    assert [each.subject for each in story.leases] == ["a-p"]
    twice = stories(histories([*written, *records("lease", "P", "a-p", LENT, lease_number=6, at=50)]))
    assert [len(story.leases) for story in twice if story.requests] == [0]
    assert len(twice) == 3


def test_samples_of_one_prompt_have_a_story_each_and_share_the_lease() -> None:
    written = [*records("lease", "P", "a-p", LENT), *pulled("0_a-d", "a-p"), *pulled("1_a-d", "a-p", at=5)]
    found = stories(histories(written))
    assert [story.requests[0].subject for story in found] == ["0_a-d", "1_a-d"]
    assert found[0].leases == found[1].leases != []


def test_parameters_that_are_used_twice_are_two_stories() -> None:
    written = [*pulled("a-d", "a-p"), *pulled("a-d", "a-p", at=50)]
    assert [story.requests[0].visits[0].wall for story in stories(histories(written))] == [0, 50]


def test_a_lease_that_nobody_asked_for_is_a_story_of_its_own() -> None:
    (story,) = stories(histories(records("lease", "P", "a-p", LENT[:2])))
    assert story.requests == []
    assert not story.is_over
    assert story.names == {"a-p"}


def test_a_lease_without_a_request_has_the_holds_of_every_decode_engine() -> None:
    holds = [
        *records("hold", "D", "a-p/0", ((None, "Created", "wanted"),), peer="P", remote_request_id="a-p"),
        *records("hold", "E", "a-p/0", ((None, "Created", "wanted"),), peer="P", remote_request_id="a-p", at=1),
        *records("hold", "E", "a-p/0", ((None, "Created", "wanted"),), peer="Q", remote_request_id="a-p", at=1),
    ]
    (story,) = stories(histories([*records("lease", "P", "a-p", LENT), *holds]))
    assert [each.engine_id for each in story.holds] == ["D", "E"]
    with_request = stories(histories([*records("lease", "P", "a-p", LENT), *pulled("a-d", "a-p"), *holds]))
    assert [[each.engine_id for each in story.holds] for story in with_request] == [["D"]]


def test_leases_of_another_engine_with_the_same_id_do_not_belong_to_the_request() -> None:
    written = [*pulled("a-d", "a-p", peer="P"), *records("lease", "Q", "a-p", LENT, at=9)]
    first, second = stories(histories(written))
    assert first.leases == []
    assert [each.engine_id for each in second.leases] == ["Q"]


def test_a_request_is_found_by_any_of_its_names_the_exact_one_first() -> None:
    written = [*pulled("cmpl-a-0-dd", "cmpl-a-0-pp"), *pulled("cmpl-a-next-0-dd", "cmpl-b-0-pp", at=10)]
    found = stories(histories(written))
    for name, subjects in (
        ("cmpl-a-0-dd", ["cmpl-a-0-dd"]),
        ("cmpl-b-0-pp", ["cmpl-a-next-0-dd"]),
        ("a-0", ["cmpl-a-0-dd"]),
        ("a", ["cmpl-a-0-dd", "cmpl-a-next-0-dd"]),
        ("ext", ["cmpl-a-next-0-dd"]),
        ("nobody", []),
    ):
        assert [story.requests[0].subject for story in matching(found, name)] == subjects, name


def test_the_wait_before_the_first_record_is_known() -> None:
    first, *others = pulled("a-d", "a-p")
    (history,) = histories([msgspec.structs.replace(first, age_seconds=1.5), *others])
    assert history.queued_seconds == 1.5


@pytest.mark.parametrize(
    ("seq", "before", "begins"),
    [(1, 0, False), (7, 3, False), (3, 3, False), (0, 0, True), (0, 9, True), (5, 9, True)],
)
def test_another_process_counts_its_records_anew(seq: int, before: int, begins: bool) -> None:
    """A number that comes twice is a mistake of one process; its first numbers may be missing."""
    assert begins_process(seq, before) == begins


# --- how it ended ---------------------------------------------------------------------------------------------------

ENDS: dict[str, tuple[Step, ...]] = {
    "failed": ((None, "Created", "pending_handshake"), ("pending_handshake", "PeerFailed", "failed")),
    "draining": (*PULLED[:2], ("reading", "ReadFailed", "draining")),
    "reading": PULLED[:2],
    "expired": (*PULLED[:2], ("reading", "DeadlinePassed", "expired")),
    "done": PULLED,
}


def on_rank(rank: int, end: str, kind: str | None = None, **fields: Any) -> list[TransitionRecord]:
    *before, last = pulled("a-d", "a-p", rank=rank, steps=ENDS[end], **fields)
    return [*before, msgspec.structs.replace(last, reason=kind, detail=kind)]


@pytest.mark.parametrize("machine", [request.MACHINE, hold.MACHINE, lease.MACHINE], ids=lambda machine: machine.name)
def test_every_end_is_an_outcome_and_every_other_state_is_open(machine: Machine[Any, Any]) -> None:
    for state in (state.value for state in machine.states):
        (history,) = histories(records(machine.name, "D", "a", ((None, "Created", state),)))
        assert (history.outcome == "open") == (state not in TERMINAL[machine.name]), state


@pytest.mark.parametrize(
    ("machine", "state", "reason", "outcome"),
    [
        ("request", "failed", "LeaseOver", "failed"),
        ("request", "failed", "AbortedByClient", "aborted"),
        ("request", "done", "DeviceMemoryExhausted", "failed"),
        ("request", "draining", "AbortedByClient", "open"),
        ("hold", "released", None, "done"),
        ("hold", "gone", "expired", "expired"),
        ("lease", "withdrawn", None, "withdrawn"),
        ("lease", "superseded", None, "expired"),
        ("lease", "expired", None, "expired"),
        ("lease", "a state of a later version", None, "open"),
    ],
)
def test_what_one_rank_came_to(machine: str, state: str, reason: str | None, outcome: str) -> None:
    (history,) = histories(records(machine, "D", "a", ((None, "Created", state),), reason=reason))
    assert history.outcome == outcome


@pytest.mark.parametrize(
    ("ranks", "decides"),
    [
        ([on_rank(0, "done"), on_rank(1, "failed", "LeaseOver")], 1),
        ([on_rank(0, "reading"), on_rank(1, "failed", "LeaseOver")], 1),
        ([on_rank(0, "expired", "DeadlineExceeded"), on_rank(1, "failed", "LeaseOver", at=9)], 1),
        ([on_rank(0, "reading"), on_rank(1, "failed", "AbortedByClient")], 1),
        ([on_rank(0, "done"), on_rank(1, "reading")], 1),
        # The first that failed, though it began later by the clock: each has its own.
        ([on_rank(0, "expired", "DeadlineExceeded"), on_rank(1, "expired", "PeerSilent", age_seconds=5.0)], 0),
        ([on_rank(0, "expired", "DeadlineExceeded", age_seconds=5.0), on_rank(1, "expired", "PeerSilent", at=50)], 1),
        # One that has failed and waits for its READs, before one in which nothing has happened for longer.
        ([on_rank(0, "reading"), on_rank(1, "draining", "PeerSilent")], 1),
        ([on_rank(0, "reading", age_seconds=0.5), on_rank(1, "reading")], 1),
        ([on_rank(0, "done", age_seconds=0.5), on_rank(1, "done")], 0),
    ],
)
def test_one_rank_decides(ranks: list[list[TransitionRecord]], decides: int) -> None:
    found = [history for rank in ranks for history in histories(rank)]
    assert deciding_rank(found).rank == deciding_rank(found[::-1]).rank == decides


def test_whoever_shows_a_request_has_the_same_rank_decide() -> None:
    """One rank has failed and the other still reads."""
    written = [*on_rank(0, "reading"), *on_rank(1, "failed", "LeaseOver")]
    told = stories(histories(written))
    (outcome,) = summarize(histories(written), told).outcomes
    assert (outcome.state, outcome.reason) == ("failed", "LeaseOver")
    (slow_one,) = slow(told, 1)
    assert (slow_one.outcome, slow_one.reason, slow_one.rank) == ("failed", "LeaseOver", 0)
    (case,) = find("a-d", written, Live())
    assert (explain(case, Live()).outcome, explain(case, Live()).rank) == ("failed", 1)
    made = document(told, title="t")
    (row,) = made.stories
    assert row.deciding == row.requests[1]
    assert OUTCOMES[made.histories[row.deciding].outcome] == "failed"


def test_what_ranks_tell_of_their_times_has_the_same_one_decide() -> None:
    def both(*ranks: list[TransitionRecord]) -> tuple[History, ...]:
        return tuple(history for rank in ranks for history in histories(rank))

    for found in (
        both(on_rank(0, "done"), on_rank(1, "failed", "LeaseOver")),
        both(on_rank(0, "done", age_seconds=0.5), on_rank(1, "done")),
        both(on_rank(0, "expired", "DeadlineExceeded"), on_rank(1, "expired", "PeerSilent", age_seconds=5.0)),
    ):
        times = [each for each in map(times_of, found) if each is not None]
        assert deciding_rank(times).rank == deciding_rank(found).rank


def test_the_wait_for_kv_lasts_until_all_ranks_have_ended() -> None:
    """vLLM is told then, though one has failed before."""
    written = [*on_rank(0, "done"), *on_rank(1, "failed", "LeaseOver")]
    assert summarize(histories(written), stories(histories(written))).kv_wait.longest == 3.0
    written = [*on_rank(0, "reading"), *on_rank(1, "failed", "LeaseOver")]
    assert summarize(histories(written), stories(histories(written))).kv_wait.count == 0


def of_the_same_process(found: list[TransitionRecord]) -> list[TransitionRecord]:
    """As it goes on with its numbers."""
    return [msgspec.structs.replace(each, seq=each.seq + 100) for each in found]


def test_one_that_hangs_is_the_slowest_and_counts_until_the_end_of_its_process() -> None:
    """Not until that of another process, which was started in its place."""
    hangs = pulled("hangs", "p1", PULLED[:2])
    done = of_the_same_process(pulled("done", "p2", at=5000.0))
    killed = pulled("killed", "p3", PULLED[:2], at=100.0, rank=1)
    after = pulled("after", "p4", at=5000.0, rank=1)
    found = slow(stories(histories([*hangs, *done, *killed, *after])), 4)
    assert (found[0].request_id, found[0].seconds) == ("hangs", 5003.0)
    assert (found[0].state, found[0].outcome) == ("reading", "open")
    assert {each.request_id: each.seconds for each in found[1:]} == {"killed": 1.0, "done": 3.0, "after": 3.0}


def test_where_one_of_several_ranks_hangs_its_time_is_that_of_the_request() -> None:
    later = of_the_same_process(pulled("later", "p2", at=60.0, rank=1))
    written = [*on_rank(0, "done"), *on_rank(1, "reading"), *later]
    (slowest, _) = slow(stories(histories(written)), 2)
    assert (slowest.rank, slowest.seconds, slowest.state) == (1, 63.0, "reading")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("six", ["cmpl-six-0-9f793e26"]),
        ("cmpl-six", ["cmpl-six-0-9f793e26"]),
        ("six-0", ["cmpl-six-0-9f793e26"]),
        ("six-again", ["cmpl-six-again-0-8b5c282d", "cmpl-six-again-1-8b5c282e"]),
        ("six-again-1", ["cmpl-six-again-1-8b5c282e"]),
        ("talk", ["0_chatcmpl-talk-8b5c282d", "1_chatcmpl-talk-8b5c282d"]),
        ("chatcmpl-talk-2", ["chatcmpl-talk-2-8b5c282d"]),
        ("again", ["cmpl-six-again-0-8b5c282d", "cmpl-six-again-1-8b5c282e"]),
    ],
)
def test_the_id_of_a_client_is_not_one_that_it_begins(name: str, meant: list[str]) -> None:
    every = [
        "cmpl-six-0-9f793e26",
        "cmpl-six-again-0-8b5c282d",
        "cmpl-six-again-1-8b5c282e",
        "0_chatcmpl-talk-8b5c282d",
        "1_chatcmpl-talk-8b5c282d",
        "chatcmpl-talk-2-8b5c282d",
    ]
    assert best_named(every, lambda each: [each], name) == meant
