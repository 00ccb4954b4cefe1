"""What waits for the device, and for which of its steps; with events that a test ends in place of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from connector.config import ConnectorOptions
from connector.protocol import (
    AbortPull,
    AfterSteps,
    Command,
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    StartPull,
    TrackLease,
)
from connector.step_metadata import StepMetadata
from connector.worker import actors, device_stream
from connector.worker.actors import ACTORS_THREAD
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.step_fence import StepFence, end_of_steps_on, writes_late
from statemachine.lease import LeaseName
from tests.rig.pulls import pull, release_unread
from tests.unit.vllm_setup import allocate, attention_spec, cache_config, engine_config, single_rank, write_model


class End:
    def __init__(self) -> None:
        self.is_over = False
        self.waits = 0

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.waits += 1


class Device:
    """Its steps end when a test says so."""

    def __init__(self) -> None:
        self.ends: list[End] = []

    def end_of_steps(self) -> End:
        self.ends.append(End())
        return self.ends[-1]


def test_a_read_waits_for_the_last_step_before_it() -> None:
    device = Device()
    fence = StepFence(device.end_of_steps)
    assert fence.with_steps(pull("a", [1])) == pull("a", [1]), "there was no step"
    told: list[Any] = []
    for name in ("a", "b"):
        fence.note_step()
        told.append(fence.with_steps(pull(name, [1])))
        assert isinstance(told[-1], AfterSteps)
        assert told[-1].command == pull(name, [1])
    fence.note_step()
    assert [each.are_over() for each in told] == [False, False]
    device.ends[0].is_over = True
    assert [each.are_over() for each in told] == [True, False]


def test_nothing_else_waits() -> None:
    device = Device()
    fence = StepFence(device.end_of_steps)
    fence.note_step()
    first = pull("a", [1])
    others: list[Command] = [
        TrackLease(request_id="b", lease=LeaseName("p-b", 1), peer=first.peer, age_seconds=0.0),
        LeaseComputing(lease=LeaseName("r", 1)),
        LeaseGranted(lease=LeaseName("s", 2), blocks=1),
        LeaseWithdrawn(lease=LeaseName("s", 1)),
        AbortPull(request_id="c"),
        release_unread("a"),
    ]
    assert [fence.with_steps(command) for command in others] == others


def test_a_processor_has_nothing_to_wait_for() -> None:
    assert end_of_steps_on(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("is_second", "drafts", "has_states", "expected"),
    [
        (True, "padded", False, True),
        (True, None, True, True),
        (True, None, False, False),
        (False, "padded", True, False),
        (False, "begun when tokens are known", False, True),
        (False, None, True, False),
    ],
)
def test_which_steps_write_when_vllm_knows_what_they_came_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_second: bool,
    drafts: str | None,
    has_states: bool,
    expected: bool,
) -> None:
    config = engine_config(write_model(tmp_path))
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: is_second))
    speculative = SimpleNamespace(disable_padded_drafter_batch=drafts != "padded")
    monkeypatch.setattr(config, "speculative_config", None if drafts is None else speculative)
    assert writes_late(config, has_states=has_states, is_last_stage=True) is expected
    of_states = is_second and has_states
    assert writes_late(config, has_states=has_states, is_last_stage=False) is of_states, "only the last one drafts"


def test_the_worker_tells_the_actors_what_a_read_waits_for_and_waits_for_a_prompt_to_lend(tmp_path: Path) -> None:
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
            worker._fence = StepFence(device.end_of_steps)
            worker.note_step(StepMetadata())
            worker.start_load_kv(StepMetadata(commands=[pull("a", [1])]))
            (waiting,) = (each for each in posted if isinstance(each, AfterSteps))
            assert waiting.command == pull("a", [1])
            assert not any(isinstance(each, StartPull) for each in posted)
            assert not waiting.are_over()
            device.ends[0].is_over = True
            assert waiting.are_over()
            worker.note_step(StepMetadata(ends_prompt_to_lend=True))
            assert [end.waits for end in device.ends] == [0, 1]
        finally:
            worker.shutdown()


def test_the_threads_that_call_cuda_have_made_the_device_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a question about an event CUDA takes the current device, and makes a context where there is none."""
    config = engine_config(write_model(tmp_path / "model"))
    (tmp_path / "rendezvous").mkdir()
    caches = cache_config(attention_spec())
    made_current: list[tuple[str, torch.device]] = []

    def make_current(device: torch.device) -> None:
        made_current.append((threading.current_thread().name.partition("-")[0], device))

    with single_rank(config, tmp_path / "rendezvous"):
        monkeypatch.setattr(actors, "make_current", make_current)
        worker = ConnectorWorker(config, caches, ConnectorOptions())
        try:
            worker.register_kv_caches(allocate(caches))
        finally:
            worker.shutdown()
    assert sorted(made_current) == [
        (name, torch.device("cpu")) for name in sorted(("nixl", ACTORS_THREAD.partition("-")[0]))
    ]


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", ["cuda:1"]), ("cpu", [])])
def test_a_processor_is_nobodys_current_device(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: list[str]
) -> None:
    made: list[str] = []
    monkeypatch.setattr(current_platform, "set_device", lambda found: made.append(str(found)), raising=False)
    device_stream.make_current(torch.device(device))
    assert made == expected
