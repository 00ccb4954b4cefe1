"""How often one thread wakes another for a READ, counted: each time may be a wait for the interpreter.

Real ports. The way from the engine thread is counted in `tests/unit/test_engine_thread.py`. Nobody wakes the engine
thread: what the actors tell it lies in a deque until its next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import trio

from connector.ports.nixl_agent.call_queue import CallQueue
from tests.actors.engines import Engine, engine, lease_of, until
from tests.actors.test_pull import run

REQUESTS = 20
WAKE_UPS_PER_READ = 3
"""Of the actors' thread: NIXL has the READ, it has ended, what NIXL's telemetry says of it."""


class WakeUps(Counter[str]):
    """Those of the two threads of one engine: `agent` and `actors`."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        ring, queue = CallQueue.ring, engine.port._thread._calls

        def rung(rung_queue: CallQueue[Any]) -> None:
            self["agent"] += rung_queue is queue
            ring(rung_queue)

        token = engine.port._token
        assert token is not None
        monkeypatch.setattr(CallQueue, "ring", rung)
        monkeypatch.setattr(engine.port, "_token", _NotingToken(token, self))


class _NotingToken:
    def __init__(self, token: trio.lowlevel.TrioToken, wake_ups: WakeUps) -> None:
        self._token = token
        self._wake_ups = wake_ups

    def run_sync_soon(self, callback: Callable[[], object]) -> None:
        self._wake_ups["actors"] += 1
        self._token.run_sync_soon(callback)


async def pull_all(d: Engine, p: Engine, names: list[str], *, at_once: bool) -> None:
    for name in names:
        p.lend(f"remote-{name}")
        d.pull(name, p, [5, 6], [1, 2])
        if not at_once:
            await until(lambda name=name: d.received(name))  # type: ignore[misc]
    for name in names:
        assert (await until(lambda name=name: d.received(name))).failure is None  # type: ignore[misc]
        await until(lambda name=name: p.sent(f"remote-{name}"))  # type: ignore[misc]


@pytest.mark.parametrize("at_once", [False, True], ids=["one after another", "at once"])
def test_a_read_wakes_the_agents_thread_once_and_the_actors_a_few_times(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            wake_ups = WakeUps(d, monkeypatch)
            d.wait_for("first", lease_of("remote-first"), p.address)
            await pull_all(d, p, ["first"], at_once=False)  # they meet
            await until(lambda: d.counts().reads == 0)
            assert wake_ups["actors"] > 0  # they are counted; of those at once one wake-up may do for all
            wake_ups.clear()
            await pull_all(d, p, [f"r{number}" for number in range(REQUESTS)], at_once=at_once)
            assert wake_ups["agent"] == REQUESTS
            assert wake_ups["actors"] <= WAKE_UPS_PER_READ * REQUESTS

    run(test)
