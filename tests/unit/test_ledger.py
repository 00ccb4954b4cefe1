"""The engine thread's book: what vLLM waits for is told exactly once, also when the actors die."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from connector.clock import to_ns
from connector.observe.stats import ConnectorStats
from connector.protocol import (
    LeaseComputing,
    LeaseGranted,
    Memory,
    QuarantineLifted,
    ReceiveEnded,
    RejectPull,
    SendEnded,
    StartPull,
    SumsWanted,
    TrackLease,
    WorkerEvent,
    WorkerStopped,
)
from connector.step_metadata import WorkerReport
from connector.worker.finishing import Loaded
from connector.worker.ledger import REASON_LENGTH_MAX, TransferLedger
from statemachine.failures import AbortedByClient, BadParams, ConnectorStopped, DeviceMemoryExhausted, PackingFailed
from statemachine.lease import LeaseName
from tests.rig.pulls import pull, release_unread

LEASE_SECONDS = 9.0


class SettableClock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def now_ns(self) -> int:
        return to_ns(self.seconds)

    def wall(self) -> float:
        return 0.0


def ledger() -> tuple[TransferLedger, SettableClock]:
    clock = SettableClock()
    return TransferLedger(clock, LEASE_SECONDS), clock


def ended(request_id: str, blocks: list[int], *, failed: bool = False, quarantined: bool = False) -> WorkerEvent:
    failure = AbortedByClient() if failed else None
    return ReceiveEnded(request_id=request_id, failure=failure, local_block_ids=blocks, quarantined=quarantined)


def test_what_no_read_has_written_is_named_once_and_only_for_loaded_requests() -> None:
    book, _ = ledger()
    unfilled = Memory(addresses=np.array([64]), lengths=np.array([8]))
    for request_id, failed in (("a", False), ("b", True)):
        book.enter(pull(request_id, [1]))
        book.record(msgspec.structs.replace(ended(request_id, [1], failed=failed), unfilled=unfilled))
    book.take_results()
    assert book.take_loaded() == [Loaded(request_id="a", block_ids=([1],), permutation=None, unfilled=unfilled)]
    assert book.take_loaded() == []


def test_a_figure_is_not_worth_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    book, _ = ledger()

    def fail(*_: object) -> None:
        raise RuntimeError("a bug in the figures")

    for fold in ("add", "count_loaded", "count_failed"):
        monkeypatch.setattr(ConnectorStats, fold, fail)
    book.enter(pull("a", [1]))
    book.record(ended("a", [1]))
    results = book.take_results()
    (loaded,) = book.take_loaded()
    book.end_loaded(set(), {loaded.request_id: PackingFailed(error="no room")}, results)
    assert results.failed_recving == {"a"}
    assert book._open_receives == {}


def test_a_loaded_request_that_could_not_be_finished_has_failed() -> None:
    """It is reported and counted once, as failed."""
    book, _ = ledger()
    for request_id in ("a", "b"):
        book.enter(pull(request_id, [1]))
        book.record(ended(request_id, [1]))
    results = book.take_results()
    assert len(book.take_loaded()) == 2
    book.end_loaded({"b"}, {"a": PackingFailed(error="no kernel")}, results)
    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"a"})
    assert book._open_receives == {}
    stats = book.take_stats()
    assert stats is not None
    assert stats.data["counts"] == {"completed_receives": 1, "failed_receives|PackingFailed": 1}


def test_no_figure_goes_back_where_a_device_finishes_in_a_later_step() -> None:
    """A counter of Prometheus that goes back raises in vLLM's front end, which ends all of its requests."""
    book, _ = ledger()
    book.enter(pull("a", [1]))
    book.record(ended("a", [1]))
    book.take_results()
    assert [each.request_id for each in book.take_loaded()] == ["a"]
    assert book.take_stats() is None
    results = book.take_results()
    book.end_loaded(set(), {"a": DeviceMemoryExhausted(error="CUDA out of memory")}, results)
    stats = book.take_stats()
    assert stats is not None
    assert stats.data["counts"] == {"failed_receives|DeviceMemoryExhausted": 1}


def test_a_request_that_is_done_is_told_once() -> None:
    book, _ = ledger()
    book.enter(pull("a", [1, 2]))
    assert book._open_receives.keys() == {"a"}
    book.record(ended("a", [1, 2]))
    book.record(ended("a", [1, 2]))
    results = book.take_results()
    assert (results.finished_recving, results.failed_recving) == (set(), set())
    assert [each.request_id for each in book.take_loaded()] == ["a"]
    assert book._open_receives == {}
    book.take_results()
    assert book.take_loaded() == []


def test_transfers_are_open_from_the_first_word_of_a_request_on() -> None:
    """Its peer is met while it waits in the scheduler's queue."""
    book, _ = ledger()
    assert not book.is_open
    for command in (pull("a", [1]), release_unread("b")):
        name = command.request_id
        book.enter(TrackLease(request_id=name, lease=command.lease, peer=command.peer, age_seconds=0.0))
        assert (book.is_open, book._open_receives) == (True, {})
        book.enter(command)
        is_read = isinstance(command, StartPull)
        assert book.is_open == is_read
        if is_read:
            book.record(ended(name, [1]))
            book.take_results()
    assert not book.is_open


def test_a_failed_request_is_told_once() -> None:
    book, _ = ledger()
    book.enter(RejectPull(request_id="a", local_block_ids=[3], failure=BadParams(field="f", expected="e", found="g")))
    book.record(ended("a", [3], failed=True))
    results = book.take_results()
    assert (results.finished_recving, results.failed_recving) == ({"a"}, {"a"})
    assert book.take_results().failed_recving == set()
    assert book.take_report() is None


def test_what_nobody_waits_for_is_not_told() -> None:
    book, _ = ledger()
    book.enter(release_unread("a"))
    book.record(ended("a", []))
    book.record(SendEnded(lease=LeaseName("never lent", 1), expired=False))
    results = book.take_results()
    assert not results.finished_recving
    assert not results.finished_sending


def test_quarantined_blocks_are_reported_and_lifted() -> None:
    book, _ = ledger()
    book.enter(pull("a", [4, 5]))
    book.record(ended("a", [4, 5], failed=True, quarantined=True))
    book.record(QuarantineLifted(local_block_ids=[4, 5]))
    book.take_results()
    report = book.take_report()
    assert report is not None
    assert (report.quarantined, report.lifted) == ([[4, 5]], [[4, 5]])
    assert book.take_report() is None


def test_when_the_actors_die_every_waiting_request_fails_with_its_blocks_quarantined() -> None:
    book, _ = ledger()
    book.enter(pull("a", [1]))
    book.enter(pull("b", [2]))
    book.record(ended("a", [1]))  # it came through before the death was noticed
    book.fail_closed(RuntimeError("dead"))
    results = book.take_results()
    assert [each.request_id for each in book.take_loaded()] == ["a"]
    assert results.finished_recving == {"b"}
    assert results.failed_recving == {"b"}
    report = book.take_report()
    assert report is not None
    assert report.quarantined == [[2]]
    assert report.stopped is not None


def test_when_the_actors_are_dead_new_requests_are_refused_and_their_blocks_are_free() -> None:
    book, _ = ledger()
    command = pull("a", [1])
    book.fail_closed(RuntimeError("dead"))
    book.enter(command)
    book.refuse(command, "its actors died earlier")
    assert book._events[-1].failure == ConnectorStopped(detail="its actors died earlier")
    wrong = BadParams(field="remote_host", expected="a host name", found="7")
    book.enter(RejectPull(request_id="b", local_block_ids=[2], failure=wrong))
    book.refuse(RejectPull(request_id="b", local_block_ids=[2], failure=wrong), "its actors died earlier")
    assert book._events[-1].failure == wrong, "and why the request is refused stays the cause"
    book.fail_closed(RuntimeError("dead"))
    assert book.take_results().failed_recving == {"a", "b"}
    report = book.take_report()
    assert report is not None
    assert report.quarantined == []


def ended_sends(book: TransferLedger) -> set[str]:
    """What a step of an engine whose actors are dead gives back."""
    book.fail_closed(None)
    return book.take_results().finished_sending


def test_when_the_actors_are_dead_blocks_are_lent_until_no_reader_can_believe_in_the_lease() -> None:
    book, clock = ledger()
    book.enter(LeaseGranted(lease=LeaseName("a", 1), blocks=1))
    clock.seconds += LEASE_SECONDS - 1.0
    assert ended_sends(book) == set()
    clock.seconds += LEASE_SECONDS - 0.5  # a reader may have renewed the lease just before the death
    assert ended_sends(book) == set()
    clock.seconds += 0.5
    assert ended_sends(book) == {"a"}
    assert book._open_sends == {}
    assert ended_sends(book) == set()


def test_when_the_actors_are_dead_blocks_of_a_fixed_lease_are_lent_for_as_long_as_any_reader_may_have_been_told() -> (
    None
):
    book, clock = ledger()
    book.enter(LeaseGranted(lease=LeaseName("a", 1), blocks=1, fixed_seconds=2 * LEASE_SECONDS))
    clock.seconds += LEASE_SECONDS
    assert ended_sends(book) == set()
    clock.seconds += 2 * LEASE_SECONDS - 0.5
    assert ended_sends(book) == set()
    clock.seconds += 0.5
    assert ended_sends(book) == {"a"}


def test_what_is_granted_after_the_death_of_the_actors_is_lent_for_one_lease_time() -> None:
    """The grant was decided before the scheduler process heard of the death."""
    book, clock = ledger()
    book.fail_closed(None)
    clock.seconds += 100.0
    book.enter(LeaseGranted(lease=LeaseName("a", 1), blocks=1))
    clock.seconds += LEASE_SECONDS - 0.5
    assert ended_sends(book) == set()
    clock.seconds += 0.5
    assert ended_sends(book) == {"a"}


def test_a_request_id_that_is_used_again_waits_for_no_end_of_the_former_lease() -> None:
    book, _ = ledger()
    book.enter(LeaseGranted(lease=LeaseName("a", 1), blocks=1))
    end = SendEnded(lease=LeaseName("a", 1), expired=True)
    book.record(end)
    book.enter(LeaseComputing(lease=LeaseName("a", 2)))
    assert not book.is_open
    assert book.take_results().finished_sending == set(), "vLLM would free the blocks of the other request"
    book.enter(LeaseGranted(lease=LeaseName("a", 2), blocks=1))
    book.record(end)
    assert book.take_results().finished_sending == set()
    book.record(SendEnded(lease=LeaseName("a", 2), expired=False))
    assert book.take_results().finished_sending == {"a"}


def test_the_death_of_the_actors_is_reported_until_it_is_taken_and_then_no_more() -> None:
    book, _ = ledger()
    for _ in range(3):
        book.fail_closed(RuntimeError("dead\n" * 1000))
        book.take_results()
    report = book.take_report()
    assert report is not None
    assert report.stopped is not None
    assert report.stopped.startswith("its actors died: RuntimeError")
    assert len(report.stopped) <= REASON_LENGTH_MAX
    assert report.stopped.isprintable()
    book.fail_closed(RuntimeError("dead"))
    assert book.take_report() is None


def test_actors_that_have_stopped_by_themselves_are_reported_too() -> None:
    book, _ = ledger()
    for reason in ("the NIXL thread has ended", "and so have its actors"):
        book.record(WorkerStopped(reason=reason))
    assert book.take_report() is None, "not before the worker events are taken"
    book.take_results()
    assert book.take_report() == WorkerReport(stopped="the NIXL thread has ended")
    assert book.take_report() is None


def test_what_is_to_be_summed_is_taken_once_and_is_no_result() -> None:
    book, _ = ledger()
    wanted = SumsWanted(ticket=1, stretches=())
    book.record(wanted)
    results = book.take_results()
    assert not results.finished_recving
    assert not results.finished_sending
    assert book.take_sums_wanted() == [wanted]
    assert book.take_sums_wanted() == []
    assert book.take_stats() is None
