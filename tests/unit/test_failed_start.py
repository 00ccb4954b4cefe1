"""A start that fails leaves no socket open: the context of one would be waited for without end when it is collected,
and an engine that neither serves nor ends is not started again by anybody."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import VllmConfig

from connector.clock import BootClock, to_ns
from connector.config import parse_options
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.runtime.thread import ThreadStartError
from connector.scheduler import listener_thread
from connector.scheduler.listener_thread import ListenerThread
from connector.worker import actors
from connector.worker.connector_worker import ConnectorWorker
from statemachine.granting import LentCounts
from tests.rig.listener import one_rank
from tests.rig.network import free_port
from tests.unit.vllm_setup import allocate, attention_spec, cache_config


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ZmqSideChannel]:
    """Every side channel of this process."""
    channels: list[ZmqSideChannel] = []
    original = ZmqSideChannel.__init__

    def note(channel: ZmqSideChannel, *arguments: Any, **named: Any) -> None:
        original(channel, *arguments, **named)
        channels.append(channel)

    monkeypatch.setattr(ZmqSideChannel, "__init__", note)
    return channels


def break_down(*arguments: object, **named: object) -> None:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("step", ["open_control_socket", "ActorExtension", "engine_facts", "Supervisor"])
def test_of_a_worker(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, made: list[ZmqSideChannel], step: str
) -> None:
    monkeypatch.setattr(actors, step, break_down)
    caches = cache_config(attention_spec())
    worker = ConnectorWorker(config, caches, parse_options({}, {}))
    with pytest.raises(ThreadStartError, match="Too many open files"):
        worker.register_kv_caches(allocate(caches))
    worker.shutdown()
    assert [each._closed for each in made] == [True]
    assert made[0]._context.closed


@pytest.mark.parametrize("step", ["OwnWorker", "EngineDraining", "HandshakeListener"])
def test_of_a_listener(monkeypatch: pytest.MonkeyPatch, made: list[ZmqSideChannel], step: str) -> None:
    monkeypatch.setattr(listener_thread, step, break_down)
    listener = ListenerThread(
        "127.0.0.1",
        free_port(),
        {(0, 0): one_rank("10.0.0.1", 40_000)},
        "0123456789abcdef" * 2,
        on_death=lambda reason: None,
        clock=BootClock(),
        grace_ns=to_ns(60),
        lease_ns=to_ns(30),
        count=lambda: LentCounts(0, 0),
    )
    with pytest.raises(ThreadStartError, match="Too many open files"):
        listener.start()
    assert made
    assert all(each._closed and each._context.closed for each in made)
