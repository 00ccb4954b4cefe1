"""What the two sides of the connector tell each other, and the names of leases on the way through both schedulers."""

from __future__ import annotations

import pickle
import time

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.protocol import Command, LeaseComputing, LeaseGranted, LeaseWithdrawn, RejectPull, StartPull, TrackLease
from connector.step_metadata import HandshakeMetadata, StepMetadata, WorkerReport
from connector.wire.identity import KvIdentity, LayerIdentity
from statemachine.lease import LeaseName
from tests.rig.facts import LEAVE_SECRET, facts
from tests.unit.hybrid_engine import HybridEngine, full

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def test_what_a_rank_says_of_itself_survives_the_way_to_the_scheduler() -> None:
    """vLLM pickles it."""
    layer = LayerIdentity(group=0, dtype="bfloat16", content_bytes=(4,))
    identity = KvIdentity(factors={"model": "tiny"}, layers={"layer.0": layer}, group_tokens=(16,))
    extension = facts(life="", tp_size=4, dcp_size=2, pp_size=3, tp_rank=1, pp_rank=2, identity=identity)
    metadata = HandshakeMetadata("hash", b"agent", extension, LEAVE_SECRET)
    assert pickle.loads(pickle.dumps(metadata)) == metadata


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(None, None, None), ("first", None, "first"), (None, "second", "second"), ("first", "second", "first")],
)
def test_a_worker_that_stopped_is_reported_for_all(first: str | None, second: str | None, expected: str | None) -> None:
    report = WorkerReport(quarantined=[[1]], stopped=first).aggregate(WorkerReport(lifted=[[2]], stopped=second))
    assert report == WorkerReport(quarantined=[[1]], lifted=[[2]], stopped=expected)


def test_commands_survive_the_way_to_a_worker() -> None:
    """vLLM pickles step metadata; a lease stays a LeaseName, not just an equal tuple."""
    sent = StepMetadata([LeaseComputing(lease=LeaseName("a", 1))])
    (command,) = pickle.loads(pickle.dumps(sent)).commands
    assert command == sent.commands[0]
    assert type(command.lease) is LeaseName


def test_a_lease_has_one_name_from_its_request_to_its_end() -> None:
    prefill, decode = HybridEngine([full()]), HybridEngine([full()])
    for name in ("a", "b", "c"):
        prefill.prefill(name, list(range(40)))
    leases = [LeaseName(name, prefill.params[name]["lease_number"]) for name in ("a", "b", "c")]
    assert len({lease.number for lease in leases}) == 3
    assert _leases(prefill, LeaseComputing) == _leases(prefill, LeaseGranted) == leases
    pull = decode.load("d", list(range(40)), prefill.params["b"])
    assert (pull.request_id, pull.lease) == ("d", leases[1])
    (track,) = [command for command in decode.commands if isinstance(command, TrackLease)]
    assert (track.request_id, track.lease, track.peer) == ("d", pull.lease, pull.peer)
    assert 0 <= track.age_seconds <= pull.age_seconds


def test_a_request_that_comes_again_has_another_lease() -> None:
    """A D may still have the parameters of the first one."""
    prefill = HybridEngine([full()])
    for _ in range(2):
        prefill.finished.clear()
        prefill.prefill("a", list(range(40)))
        prefill.step(KVConnectorOutput(finished_sending={"a"}))
    first, second = _leases(prefill, LeaseGranted)
    assert first.request_id == second.request_id == "a"
    assert first.number != second.number


def test_a_request_that_ends_early_withdraws_its_lease() -> None:
    prefill = HybridEngine([full()], batch_tokens=16)
    prefill.submit("a", list(range(40)), REMOTE_DECODE)
    prefill.step()
    prefill.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    prefill.step()
    (lease,) = _leases(prefill, LeaseComputing)
    assert lease.request_id == "a"
    assert _leases(prefill, LeaseWithdrawn) == [lease]


def test_parameters_of_a_builtin_prefill_name_a_lease_without_number() -> None:
    prefill, decode = HybridEngine([full()]), HybridEngine([full()])
    prefill.prefill("a", list(range(40)))
    del prefill.params["a"]["lease_number"]
    assert decode.load("d", list(range(40)), prefill.params["a"]).lease == LeaseName("a", 0)


def _leases(engine: HybridEngine, kind: type[Command]) -> list[LeaseName]:
    return [each.lease for each in engine.commands if isinstance(each, kind)]  # type: ignore[union-attr]


def test_how_long_a_request_was_known_before_it_was_scheduled_is_said_on_both_sides() -> None:
    prefill, decode = HybridEngine([full()]), HybridEngine([full()])
    before_ns = time.monotonic_ns()
    prefill.prefill("a", list(range(40)))
    decode.load("d", list(range(40)), prefill.params["a"])
    decode.submit("e", list(range(40)), prefill.params["a"] | {"remote_num_tokens": "many"})
    decode.step()
    passed_seconds = (time.monotonic_ns() - before_ns) / 1e9
    (computing,) = [each for each in prefill.commands if isinstance(each, LeaseComputing)]
    ages = [each.age_seconds for each in decode.commands if isinstance(each, StartPull | RejectPull)]
    assert len(ages) == 2
    for age_seconds in (computing.age_seconds, *ages):
        assert 0 < age_seconds < passed_seconds
