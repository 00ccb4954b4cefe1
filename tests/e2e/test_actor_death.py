"""Engines whose actors die, with each value of the option `on_actor_death`: idle ones, and one with work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from connector.observe import catalogue as c
from tests.e2e.client import REQUEST_TRANSFER, Client
from tests.e2e.cluster import Room, prompt, wait_for
from tests.e2e.engines import Engine, EngineOptions, EngineSet
from tests.e2e.metrics_page import Page
from tests.e2e.mortal_connector import DEADLY_FILE_VARIABLE, LISTENER, WORKER
from tests.e2e.tiny_model import tiny_llama
from tests.rig.network import dead_params, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

END_SECONDS = 60.0
"""vLLM's API server looks every five seconds whether its engine is alive; it takes a moment to end."""

BUSY_SECONDS = 600
"""For how long the blocks of one request are lent, and vLLM's drain at SIGTERM may wait for that."""


@contextmanager
def mortal(
    tmp_path: Path, how: str, *, who: str = WORKER, config: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine that is idle but for a lease, and whose actors have just died: its worker's, or its listener."""
    deadly = tmp_path / "deadly"
    with EngineSet() as engines:
        (engine,) = engines.start(
            EngineOptions(
                name=how,
                model=tiny_llama(),
                logs=tmp_path,
                context_tokens=512,
                module_path="tests.e2e.mortal_connector",
                extra_config={"on_actor_death": how, **(config or {})},
                environment={DEADLY_FILE_VARIABLE: str(deadly)},
                **options,
            )
        )
        with Client(engine) as client:
            lent = client.complete(prompt(100, how), max_tokens=1, kv_transfer_params=REQUEST_TRANSFER)
            assert Page.of(client)[c.UP] == 1
        assert lent.kv_transfer_params
        deadly.write_text(who)
        wait_for(lambda: "transfers no KV any more" in engine.log() or None, "a line about the death")
        yield engine


def the_line(engine: Engine) -> str:
    (line,) = [each for each in engine.log().splitlines() if "this engine transfers no KV any more" in each]
    return line


def test_degrade_goes_on_without_kv_transfer(room: Room, tmp_path: Path) -> None:
    room.clear()
    with mortal(tmp_path, "degrade") as engine, Client(engine) as client:
        assert "its actors died: RuntimeError('killed by a test')" in the_line(engine)
        # A step is what tells the scheduler; P answers without parameters from then on.
        assert client.complete(prompt(20, "step"), max_tokens=1).ok
        wait_for(lambda: Page.of(client)[c.UP] == 0 or None, "the gauge of engines that can transfer KV is 0")
        lent = client.complete(prompt(100, "after"), max_tokens=1, kv_transfer_params=REQUEST_TRANSFER)
        assert lent.ok
        assert not lent.kv_transfer_params
        lost = client.complete(prompt(20, "lost"), kv_transfer_params=dead_params(free_port(), 1))
        assert lost.status == 500
        assert client.complete(prompt(20, "alone")).ok
        assert engine.healthy()


def test_exit_ends_an_idle_engine(room: Room, tmp_path: Path) -> None:
    """As where users start it, the signal to one process is not one to the API server, too (`own_signals`)."""
    room.clear()
    with mortal(tmp_path, "exit", changes="tests.e2e.own_signals") as engine:
        assert "on_actor_death=exit" in the_line(engine)
        wait_for(lambda: not engine.running or None, "the end of the API server", END_SECONDS)


def test_exit_ends_an_engine_core_that_has_work(room: Room, tmp_path: Path) -> None:
    """What is lent, and no SIGTERM, would keep it for BUSY_SECONDS, in which it takes no request."""
    room.clear()
    with mortal(
        tmp_path,
        "exit",
        who=LISTENER,
        config={"kv_lease_duration": BUSY_SECONDS, "drain_grace_seconds": BUSY_SECONDS},
        arguments=("--shutdown-timeout", str(BUSY_SECONDS)),
        changes="tests.e2e.own_signals",
    ) as engine:
        assert "the handshake listener died" in the_line(engine)
        wait_for(lambda: not engine.running or None, "the end of the API server", END_SECONDS)
