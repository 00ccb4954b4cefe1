"""A misspelt option stops the start of an engine, with an error that a user can act on."""

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
