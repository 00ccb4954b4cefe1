"""Transition records of several processes, put together to what each request went through."""

from __future__ import annotations

from typing import Any

import msgspec

from connector.observe.history import histories, matching, stories
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


def pulled(subject: str, remote: str, **fields: Any) -> list[TransitionRecord]:
    return records("request", "D", subject, PULLED, **({"peer": "P", "remote_request_id": remote} | fields))


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
