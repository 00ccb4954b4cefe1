"""A wrong option stops the start of an engine before it loads anything, and the log ends with what a user has to know.

The engines run on CPUs and in eager mode, where vLLM asks a connector's class for nothing before the model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connector.config import ConnectorOptions
from tests.e2e.cluster import Room
from tests.e2e.engines import CONNECTOR_MADE, EngineFailed, EngineOptions, EngineSet
from tests.e2e.tiny_model import tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

BEFORE_ANY_ENGINE = ("(EngineCore", "(VllmWorker", "Loading weights", "Starting to load model", CONNECTOR_MADE)
"""What the log must not have: what vLLM's other processes write, and what it says when it loads a model."""

STARTS: dict[str, dict[str, Any]] = {
    "as users start it": {"forks": False},
    "with the hybrid manager asked for": {"arguments": ("--no-disable-hybrid-kv-cache-manager",)},
    "one of several": {"beside_offloading": "after"},
    "by its own name": {"connector": "plugin"},
    "without its plug-in": {"environment": {"VLLM_PLUGINS": ""}},
}


def last_line(room: Room, logs: Path, extra_config: dict[str, Any], **how: Any) -> str:
    """Of the log of an engine that does not start with these options, and has not begun to load."""
    room.clear()
    options = EngineOptions(
        name="wrong", model=tiny_llama(), logs=logs, extra_config=extra_config, context_tokens=512, **how
    )
    with EngineSet() as engines:
        with pytest.raises(EngineFailed, match="ended while starting"):
            engines.start(options)
        log = (logs / "wrong.log").read_text()
    assert not [sign for sign in BEFORE_ANY_ENGINE if sign in log], log
    return log.splitlines()[-1]


@pytest.mark.parametrize("how", STARTS)
def test_an_unknown_option_stops_the_start(room: Room, tmp_path: Path, how: str) -> None:
    """The log's last line names it, says what was probably meant and lists all options."""
    said = last_line(room, tmp_path, {"kv_lease_durations": 10}, **STARTS[how])
    assert "unknown option 'kv_lease_durations', did you mean kv_lease_duration?" in said
    for option in ConnectorOptions.__struct_fields__:
        assert f"{option}=" in said


def test_options_that_contradict_each_other_stop_the_start(room: Room, tmp_path: Path) -> None:
    """The error names both, with their values."""
    contradicting = {"request_timeout_seconds": 2, "handshake_timeout_seconds": 7}
    said = last_line(room, tmp_path, contradicting)
    assert "option request_timeout_seconds (2) is less than handshake_timeout_seconds (7)" in said
