"""The start of a worker while NIXL registers for long: how long it may, and what is said meanwhile.

NIXL's part is real, behind a first act of the agent's thread that takes as long as a test wants.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.config import VllmConfig

from connector.config import parse_options
from connector.ports.nixl import NixlCallFailed
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.nixl_agent import thread as agent_thread
from connector.worker.connector_worker import ConnectorWorker
from tests.unit.log_lines import Lines, listening
from tests.unit.vllm_setup import allocate, attention_spec, cache_config

RELEASE_SECONDS = 60.0


class SlowNixl:
    """Stands in front of `RealNixlPort.open`: the agent's thread begins when `release` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, until_told: bool) -> None:
        """`until_told`: it is set when the worker is told of the wait."""
        self.release = threading.Event()
        self.limits: list[float] = []
        """What the worker has allowed, in seconds."""
        self._until_told = until_told
        self._open_port = RealNixlPort.open
        monkeypatch.setattr(agent_thread, "OPEN_PROGRESS_SECONDS", 0.02)
        monkeypatch.setattr(RealNixlPort, "open", self.open)

    def open(self, *args: Any, timeout_seconds: float, on_wait: Callable[[float], None], **rest: Any) -> RealNixlPort:
        self.limits.append(timeout_seconds)

        def note(seconds: float) -> None:
            on_wait(seconds)
            if self._until_told:
                self.release.set()

        rest["prepare_thread"] = lambda: self.release.wait(RELEASE_SECONDS)
        return self._open_port(*args, timeout_seconds=timeout_seconds, on_wait=note, **rest)


@pytest.fixture
def lines() -> Iterator[Lines]:
    with listening() as lines:
        yield lines


@pytest.mark.parametrize(("extra", "seconds"), [({}, 1800.0), ({"registration_timeout_seconds": 77.5}, 77.5)])
def test_the_log_says_what_the_start_waits_for(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    lines: Lines,
    extra: dict[str, float],
    seconds: float,
) -> None:
    slow = SlowNixl(monkeypatch, until_told=True)
    caches = cache_config(attention_spec())
    worker = ConnectorWorker(config, caches, parse_options(extra, {}))
    try:
        worker.register_kv_caches(allocate(caches))
        assert worker.handshake_metadata is not None
    finally:
        worker.shutdown()
    assert slow.limits == [seconds]
    said = next(text for text in lines.texts if text.startswith("NIXL has been registering"))
    limit = re.escape(f"(registration_timeout_seconds: {seconds:g})")
    assert re.search(rf" \d+\.\d GB of KV cache for \d+ s {limit}$", said)


def test_a_registration_without_end_is_given_up(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = SlowNixl(monkeypatch, until_told=False)
    before = set(threading.enumerate())
    caches = cache_config(attention_spec())
    worker = ConnectorWorker(config, caches, parse_options({"registration_timeout_seconds": 0.1}, {}))
    try:
        with pytest.raises(NixlCallFailed, match=r"within 0\.1 s"):
            worker.register_kv_caches(allocate(caches))
        assert worker.handshake_metadata is None
    finally:
        stuck.release.set()
        worker.shutdown()
    for thread in set(threading.enumerate()) - before:
        thread.join(RELEASE_SECONDS)
        assert not thread.is_alive()
