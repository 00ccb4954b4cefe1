"""Which weights an adapter has: what two engines compare beside its name.

Requests of it: `tests/unit/test_other_prompts.py`, `tests/unit/test_read_back.py`. In real engines:
`tests/e2e/test_beyond_tokens.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from connector.scheduler import adapters
from connector.scheduler.adapters import LATE_MAX, LOOK_NS, AdapterWeights
from connector.weights import adapter_files
from tests.rig.patience import PATIENCE_SECONDS
from tests.rig.thread_limit import no_thread_left
from tests.unit.adapter_files import save_adapter
from tests.unit.hand_clock import HandClock


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that comes late, as on a busy machine, is waited for where its end is not the matter."""
    monkeypatch.setattr(adapters, "WAIT_SECONDS", PATIENCE_SECONDS)


def request(path: Path | str | None) -> Request:
    adapter = None if path is None else LoRARequest("adapter", 1, str(path))
    return Request("r", [1, 2], SamplingParams(max_tokens=1), None, lora_request=adapter)


def test_equal_weights_are_equal_wherever_they_lie(tmp_path: Path) -> None:
    here = save_adapter(tmp_path / "here", 1.0)
    there = save_adapter(
        tmp_path / "there", 1.0, target_modules=["v_proj", "q_proj"], base_model_name_or_path="another", task_type="X"
    )
    known = AdapterWeights(HandClock())
    found = known.of(request(here))
    assert found == known.of(request(there)) == AdapterWeights(HandClock()).of(request(here))
    assert found is not None
    assert len(found) == 32


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"lora_alpha": 8},
        {"r": 4},
        {"use_rslora": True},
        {"target_modules": "all"},
        {"rank_pattern": {"q_proj": 1}},
        {"alpha_pattern": {"q_proj": 32}},
    ],
)
def test_other_weights_are_others(config: dict[str, Any], tmp_path: Path) -> None:
    known = AdapterWeights(HandClock())
    first = known.of(request(save_adapter(tmp_path / "first", 1.0)))
    other = known.of(request(save_adapter(tmp_path / "other", 1.0 if config else 2.0, **config)))
    assert None not in (first, other)
    assert first != other


def test_files_that_were_written_over_are_read_again(tmp_path: Path) -> None:
    clock = HandClock()
    known = AdapterWeights(clock)
    path = save_adapter(tmp_path / "adapter", 1.0)
    first = known.of(request(path))
    save_adapter(path, 2.0)
    os.utime(path / "adapter_model.safetensors", ns=(1, 1))  # whatever the resolution of its times
    assert known.of(request(path)) == first, "looked at a moment ago"
    clock.ns += LOOK_NS
    second = known.of(request(path))
    assert second not in (first, None)
    shutil.rmtree(path)
    clock.ns += LOOK_NS
    assert known.of(request(path)) is None


def test_nothing_is_not_another_thing(tmp_path: Path) -> None:
    """PEFT writes more entries with each version."""
    known = AdapterWeights(HandClock())
    first = known.of(request(save_adapter(tmp_path / "first", 1.0)))
    written = {"alpha_pattern": {}, "modules_to_save": None, "use_dora": False}
    assert first == known.of(request(save_adapter(tmp_path / "other", 1.0, **written))) is not None


def test_only_the_files_that_vllm_loads_are_looked_at(tmp_path: Path) -> None:
    """Beside an adapter there may be a model into which it was merged, what training has left, and anything else."""
    known = AdapterWeights(HandClock())
    first, same, other = (
        save_adapter(tmp_path / name, 2.0 if name == "other" else 1.0) for name in ["first", "same", "other"]
    )
    for crowded in (same, other):
        save_file({"model": torch.ones(8)}, crowded / "model-00001-of-00001.safetensors")
        index = {"weight_map": {"model": "model-00001-of-00001.safetensors"}}
        (crowded / "model.safetensors.index.json").write_text(json.dumps(index))
        (crowded / "dangling").symlink_to("nowhere")
        os.mkfifo(crowded / "pipe.safetensors")
    found = [known.of(request(path)) for path in (first, same, other)]
    assert None not in found
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("stays", ["adapter_model.bin", "adapter_model.pt"])
def test_adapters_of_other_formats(stays: str, tmp_path: Path) -> None:
    """vLLM takes the first that is there of three."""
    known = AdapterWeights(HandClock())
    paths = [save_adapter(tmp_path / str(weights), weights) for weights in (1.0, 2.0)]
    for path in paths:
        (path / "adapter_model.safetensors").rename(path / stays)
        if stays == "adapter_model.bin":
            (path / "adapter_model.pt").write_bytes(b"2")
    found = [known.of(request(path)) for path in paths]
    assert None not in found
    assert found[0] != found[1]


def test_a_name_of_modelscope_is_not_one_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the hub may have something else under it."""
    path = save_adapter(tmp_path / "adapter", 1.0)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(path))
    assert AdapterWeights(HandClock()).of(request("some/name")) is not None
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert AdapterWeights(HandClock()).of(request("some/name")) is None


def test_a_directory_that_is_exchanged_is_read_again(tmp_path: Path) -> None:
    """Adapters of one kind are equally long, and what unpacks or copies them may give them the times they had."""
    clock = HandClock()
    known = AdapterWeights(clock)
    current = tmp_path / "current"
    versions = [save_adapter(tmp_path / str(weights), weights) for weights in (1.0, 2.0)]
    for file in (file for version in versions for file in version.iterdir()):
        os.utime(file, ns=(1, 1))
    current.symlink_to(versions[0])
    first = known.of(request(current))
    current.unlink()
    current.symlink_to(versions[1])
    clock.ns += LOOK_NS
    assert known.of(request(current)) not in (first, None)


def test_a_thread_that_does_not_start_is_no_end_of_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    known = AdapterWeights(clock)
    path = save_adapter(tmp_path / "adapter", 1.0)
    with no_thread_left():
        assert known.of(request(path)) is None
    assert "may have no more threads" in caplog.text
    clock.ns += LOOK_NS
    assert known.of(request(path)) is not None


class HangingFiles:
    """A file system whose adapters are found when `answers` is set, and not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.looks: list[str] = []
        monkeypatch.setattr(adapters, "adapter_files", self._find)

    def wait_for_looks(self, count: int) -> list[str]:
        """So many have begun, in threads that may come to run after they were given up."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.looks) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.looks

    def _find(self, path: str) -> tuple[Path, Path]:
        self.looks.append(path)
        self.answers.wait(60)
        return adapter_files(path)


def test_many_adapters_that_hang_are_not_waited_for_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, files = HandClock(), HangingFiles(monkeypatch)
    monkeypatch.setattr(adapters, "ADAPTERS_MAX", 8)
    monkeypatch.setattr(adapters, "WAIT_SECONDS", 0.5)
    known = AdapterWeights(clock)
    paths = [save_adapter(tmp_path / str(number), 1.0) for number in range(40)]
    began = time.monotonic()
    for _ in range(2):
        assert {known.of(request(path)) for path in paths} == {None}
        clock.ns += LOOK_NS
    assert time.monotonic() - began < 10, "two adapters' time, and not that of 80"
    assert len(files.wait_for_looks(LATE_MAX)) == LATE_MAX
    files.answers.set()
    while known.of(request(paths[0])) is None:
        clock.ns += LOOK_NS


def test_what_is_not_known_is_none(tmp_path: Path) -> None:
    known = AdapterWeights(HandClock())
    (tmp_path / "empty").mkdir()
    damaged = save_adapter(tmp_path / "damaged", 1.0)
    (damaged / "adapter_config.json").write_text("[]")
    nested = save_adapter(tmp_path / "nested", 1.0)
    (nested / "adapter_config.json").write_text("[" * 100_000)
    missing = ("missing", "empty")
    for path in (None, *map(tmp_path.joinpath, missing), damaged, nested, "nobody/nothing", "s3://bucket/adapter"):
        assert known.of(request(path)) is None


def test_a_file_system_that_hangs_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, files = HandClock(), HangingFiles(monkeypatch)
    path = save_adapter(tmp_path / "adapter", 1.0)
    monkeypatch.setattr(adapters, "WAIT_SECONDS", 0.01)
    known = AdapterWeights(clock)
    for _ in range(3):
        assert known.of(request(path)) is None
        clock.ns += LOOK_NS
    assert files.wait_for_looks(1) == [str(path)]
    assert caplog.text.count("does their file system hang") == 1
    files.answers.set()
    monkeypatch.setattr(adapters, "WAIT_SECONDS", PATIENCE_SECONDS)
    while known.of(request(path)) is None:
        clock.ns += LOOK_NS
    assert len(known.of(request(path)) or "") == 32


def test_no_more_than_so_many_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS_MAX", 2)
    known = AdapterWeights(HandClock())
    for number in range(4):
        known.of(request(tmp_path / str(number)))
    assert list(known._known) == [str(tmp_path / "2"), str(tmp_path / "3")]
