"""A wrong option stops the start of an engine, with an error that a user can act on."""

from __future__ import annotations

from pathlib import Path

import pytest

from connector.config import ConnectorOptions
from tests.e2e.cluster import Room
from tests.e2e.engines import EngineFailed, EngineOptions, EngineSet
from tests.e2e.tiny_model import tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]


def test_an_unknown_option_stops_the_start(room: Room, tmp_path: Path) -> None:
    """The log names it, says what was probably meant and lists all options."""
    room.clear()
    misspelt = EngineOptions(
        name="misspelt", model=tiny_llama(), logs=tmp_path, extra_config={"kv_lease_durations": 10}, context_tokens=512
    )
    with EngineSet() as engines:
        with pytest.raises(EngineFailed, match="ended while starting"):
            engines.start(misspelt)
        log = (tmp_path / "misspelt.log").read_text()
    assert "unknown option" in log
    assert "kv_lease_durations" in log
    assert "did you mean kv_lease_duration?" in log
    for option in ConnectorOptions.__struct_fields__:
        assert f"{option}=" in log
    assert "kv_lease_durations" in last_error(log)


def test_options_that_contradict_each_other_stop_the_start(room: Room, tmp_path: Path) -> None:
    """The error names both, with their values."""
    room.clear()
    contradicting = EngineOptions(
        name="contradicting",
        model=tiny_llama(),
        logs=tmp_path,
        extra_config={"request_timeout_seconds": 2, "handshake_timeout_seconds": 7},
        context_tokens=512,
    )
    with EngineSet() as engines:
        with pytest.raises(EngineFailed, match="ended while starting"):
            engines.start(contradicting)
        log = (tmp_path / "contradicting.log").read_text()
    assert "option request_timeout_seconds (2) is less than handshake_timeout_seconds (7)" in last_error(log)


def last_error(log: str) -> str:
    """The last line of our error. On a CPU it is raised in a worker, and the lines of vLLM's that follow it
    only say that this has ended; with CUDA graphs it is the last line (`tests/unit/test_options_at_start.py`)."""
    said = [line for line in log.splitlines() if "OptionError: " in line]
    assert said, "no OptionError"
    return said[-1]
