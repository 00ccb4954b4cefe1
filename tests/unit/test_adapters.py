"""Which weights an adapter has: what two engines compare beside its name.

Requests of it: `tests/unit/test_other_prompts.py`, `tests/unit/test_read_back.py`. In real engines:
`tests/e2e/test_beyond_tokens.py`.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from connector.scheduler import adapters
from connector.scheduler.adapters import LOOK_NS, AdapterWeights
from tests.unit.adapter_files import save_adapter
from tests.unit.hand_clock import HandClock


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


@pytest.mark.parametrize("config", [{}, {"lora_alpha": 8}, {"r": 4}, {"use_rslora": True}, {"target_modules": "all"}])
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
    os.utime(path / "model.safetensors", ns=(1, 1))  # whatever the resolution of its times
    assert known.of(request(path)) == first, "looked at a moment ago"
    clock.ns += LOOK_NS
    second = known.of(request(path))
    assert second not in (first, None)
    shutil.rmtree(path)
    clock.ns += LOOK_NS
    assert known.of(request(path)) is None


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
    clock, answers = HandClock(), threading.Event()
    looks = []
    path = save_adapter(tmp_path / "adapter", 1.0)

    def hang(path: str) -> Path:
        looks.append(path)
        answers.wait(60)
        return Path(path)

    monkeypatch.setattr(adapters, "adapter_directory", hang)
    monkeypatch.setattr(adapters, "WAIT_SECONDS", 0.01)
    known = AdapterWeights(clock)
    for _ in range(3):
        assert known.of(request(path)) is None
        clock.ns += LOOK_NS
    assert looks == [str(path)]
    assert caplog.text.count("file system hangs") == 1
    answers.set()
    monkeypatch.setattr(adapters, "WAIT_SECONDS", 60.0)
    while known.of(request(path)) is None:
        clock.ns += LOOK_NS
    assert len(known.of(request(path)) or "") == 32


def test_no_more_than_so_many_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS_MAX", 2)
    known = AdapterWeights(HandClock())
    for number in range(4):
        known.of(request(tmp_path / str(number)))
    assert list(known._known) == [str(tmp_path / "2"), str(tmp_path / "3")]
