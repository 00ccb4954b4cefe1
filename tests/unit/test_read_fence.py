"""READs wait for steps that may still write into their blocks; with events that a test ends in place of a device's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig

from connector.config import ConnectorOptions
from connector.protocol import AbortPull, Command, LeaseComputing, LeaseGranted, StartPull, TrackLease
from connector.step_metadata import StepMetadata
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.read_fence import ReadFence, end_of_steps_on, writes_late
from statemachine.lease import LeaseName
from tests.rig.pulls import pull
from tests.unit.vllm_setup import allocate, attention_spec, cache_config, engine_config, single_rank, write_model


class End:
    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


class Device:
    """Its steps end when a test says so."""

    def __init__(self) -> None:
        self.ends: list[End] = []

    def end_of_steps(self) -> End:
        self.ends.append(End())
        return self.ends[-1]


def test_a_read_waits_for_the_steps_before_it_and_nothing_overtakes_it() -> None:
    device = Device()
    fence = ReadFence(device.end_of_steps)
    first, abort, later = pull("a", [1]), AbortPull(request_id="a"), pull("b", [1])
    assert fence.let_through([first]) == [first], "there was no step"
    fence.note_step()
    assert fence.let_through([first, abort]) == []
    fence.note_step()
    assert fence.let_through([later]) == []
    device.ends[0].is_over = True
    assert fence.let_through() == [first, abort]
    device.ends[1].is_over = True
    assert fence.let_through() == [later]
    assert fence.let_through() == []


def test_leases_are_told_while_a_read_waits() -> None:
    """P has lent what D asks for by now, and D keeps its queue's leases, whenever the next step comes."""
    device = Device()
    fence = ReadFence(device.end_of_steps)
    fence.note_step()
    first = pull("a", [1])
    others: list[Command] = [
        TrackLease(request_id="b", lease=LeaseName("p-b", 1), peer=first.peer, age_seconds=0.0),
        LeaseComputing(lease=LeaseName("r", 1)),
        LeaseGranted(lease=LeaseName("s", 2), lease_seconds=1.0, blocks=1),
        AbortPull(request_id="c"),
    ]
    assert fence.let_through([first, *others]) == others
    assert fence.let_through(others[1:2]) == others[1:2]
    device.ends[0].is_over = True
    assert fence.let_through() == [first]


def test_what_asks_for_no_read_goes_at_once() -> None:
    device = Device()
    fence = ReadFence(device.end_of_steps)
    fence.note_step()
    others: list[Command] = [
        LeaseGranted(lease=LeaseName("r", 1), lease_seconds=1.0, blocks=1),
        pull("a", [1], awaited=False),
    ]
    assert fence.let_through(others) == others


def test_a_processor_has_nothing_to_wait_for() -> None:
    assert end_of_steps_on(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("is_second", "drafts", "has_states", "expected"),
    [
        (True, True, False, True),
        (True, False, True, True),
        (True, False, False, False),
        (False, True, True, False),
    ],
)
def test_which_steps_write_when_vllm_knows_what_they_came_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_second: bool,
    drafts: bool,
    has_states: bool,
    expected: bool,
) -> None:
    config = engine_config(write_model(tmp_path))
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: is_second))
    monkeypatch.setattr(config, "speculative_config", SimpleNamespace() if drafts else None)
    assert writes_late(config, has_states=has_states) is expected


def test_the_worker_posts_a_read_when_the_step_before_it_is_over(tmp_path: Path) -> None:
    """And others that were held, in the engine's next step, though it has no commands."""
    config = engine_config(write_model(tmp_path / "model"))
    (tmp_path / "rendezvous").mkdir()
    caches = cache_config(attention_spec())
    device = Device()
    with single_rank(config, tmp_path / "rendezvous"):
        worker = ConnectorWorker(config, caches, ConnectorOptions())
        worker.register_kv_caches(allocate(caches))
        posted: list[Any] = []
        try:
            assert worker._thread is not None
            worker._thread.post = posted.append  # type: ignore[method-assign]
            worker._fence = ReadFence(device.end_of_steps)
            worker.note_step()
            worker.start_load_kv(StepMetadata(commands=[pull("a", [1])]))
            worker.get_transfer_results()
            assert not any(isinstance(each, StartPull) for each in posted)
            device.ends[0].is_over = True
            worker.start_load_kv(StepMetadata())
            assert [each.request_id for each in posted if isinstance(each, StartPull)] == ["a"]
        finally:
            worker.shutdown()
