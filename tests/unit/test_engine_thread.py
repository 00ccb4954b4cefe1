"""What the connector costs the engine thread, in counts: the same on any machine, whatever else runs on it.

The production connector in vLLM's configuration, with the thread of the actors but nobody in it. What the thread of the
actors does is counted in `tests/simulation/test_counts.py`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import trio
from prometheus_client import CollectorRegistry
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from connector.nixl_connector import NixlActorConnector
from connector.observe import hang_notice
from connector.protocol import Command, Permutation, ReceiveEnded
from connector.runtime.thread import ActorThread
from connector.step_metadata import StepMetadata, WorkerReport
from connector.worker.cache_memory import CacheMemory
from connector.worker.connector_worker import LATE_SECONDS
from connector.worker.finishing import Finishing, run_at_once
from connector.worker.landing import BlockPermuter
from connector.worker.packing import PackedBlocks
from statemachine.failures import Failure, PackingFailed
from tests.rig.given_actors import give_actors
from tests.rig.pulls import pull
from tests.rig.work import Counted
from tests.unit.hybrid_engine import HybridEngine, full
from tests.unit.test_stats import across_processes, our_prometheus, value

FEW, MANY = 10, 1000
"""Blocks of a request."""
CALLS_OF_AN_IDLE_STEP = 19
CALLS_OF_FIGURES_OF_AN_IDLE_STEP = 18
"""Of a worker and of the scheduler's process, for metrics and reports."""
CALLS_OF_A_REQUEST = 66
"""From the command to vLLM's being told, with what the steps cost anyway."""
CALLS_OF_A_FURTHER_REQUEST = 19
"""In the same steps."""
HEARD_SECONDS_MAX = 30.0


class Nobody:
    """In place of the supervisor: it does nothing but hear. `heard` is released for each command."""

    def __init__(self, heard: threading.Semaphore) -> None:
        self._heard = heard
        self._stopped = trio.Event()

    def deliver(self, command: Command) -> None:
        self._heard.release()

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


@dataclass
class CountingToken:
    """Wakes the loop, and counts how often."""

    token: trio.lowlevel.TrioToken
    wake_ups: list[Callable[[], object]] = field(default_factory=list)

    def run_sync_soon(self, callback: Callable[[], object]) -> None:
        self.wake_ups.append(callback)
        self.token.run_sync_soon(callback)


@dataclass
class Engine:
    """Both roles of a connector, and the work of its steps."""

    scheduler: NixlActorConnector
    worker: NixlActorConnector
    vllm: HybridEngine
    token: CountingToken
    heard: threading.Semaphore

    def build(self, commands: Sequence[Command] = ()) -> Counted:
        """The scheduler's part of a step in which so much was decided."""
        self.scheduler._scheduler_side._commands.extend(commands)
        with Counted() as work:
            metadata = self.scheduler.build_connector_meta(None)
        assert isinstance(metadata, StepMetadata)
        assert metadata.commands == list(commands)
        return work

    def load(self, commands: Sequence[Command] = ()) -> Counted:
        self.worker.bind_connector_metadata(StepMetadata(list(commands)))
        with Counted() as work:
            self.worker.start_load_kv(None)
        self.worker.clear_connector_metadata()
        for _ in commands:  # or the next step would find the actors awake
            assert self.heard.acquire(timeout=HEARD_SECONDS_MAX)
        return work

    def finish(self, ended: Sequence[str] = ()) -> Counted:
        """The actors have reported these since the last step."""
        for request_id in ended:
            outcome = ReceiveEnded(request_id=request_id, failure=None, local_block_ids=[], quarantined=False)
            self.worker._worker_side.ledger.record(outcome)
        with Counted() as work:
            _, received = self.worker.get_finished(set())
        assert received == set(ended)
        return work

    def tell_figures(self) -> tuple[Counted, list[object]]:
        """What vLLM asks for at the end of each step, and what it gets."""
        with Counted() as work:
            told: list[object] = [
                self.worker.get_kv_connector_stats(),
                self.worker.build_connector_worker_meta(),
                self.scheduler.get_kv_connector_stats(),
            ]
        return work, [each for each in told if each is not None]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)
    vllm = HybridEngine([full()])
    worker = NixlActorConnector(vllm.config, KVConnectorRole.WORKER, vllm.cache_config)
    errors: list[BaseException] = []

    heard = threading.Semaphore(0)

    async def nobody() -> Nobody:
        return Nobody(heard)

    thread: ActorThread[Any] = ActorThread("nobody", nobody, errors.append)
    thread.start()
    assert thread._token is not None
    token = CountingToken(thread._token)
    thread._token = token  # type: ignore[assignment]
    give_actors(worker._worker_side, thread)
    scheduler = vllm.scheduler.connector
    assert isinstance(scheduler, NixlActorConnector)
    found = Engine(scheduler, worker, vllm, token, heard)
    # What is done once: imports, caches.
    found.build([pull("warm", [1])])
    found.load([pull("warm", [1])])
    assert heard.acquire(timeout=HEARD_SECONDS_MAX), "of the first step the actors are told that it is one"
    found.finish(["warm"])
    token.wake_ups.clear()
    yield found
    worker.shutdown()
    assert errors == []


def counts(works: Sequence[Counted]) -> list[tuple[int, int]]:
    return [(work.calls, work.lines) for work in works]


def whole_life(engine: Engine, request_id: str, blocks: int) -> list[Counted]:
    commands = [pull(request_id, list(range(blocks)))]
    return [engine.build(commands), engine.load(commands), engine.finish([request_id])]


def test_no_python_runs_for_each_block(engine: Engine) -> None:
    few, many = [whole_life(engine, f"r{blocks}", blocks) for blocks in (FEW, MANY)]
    assert counts(many) == counts(few)
    assert sum(work.calls for work in many) <= CALLS_OF_A_REQUEST


def test_an_idle_step_costs_the_same_whatever_is_open(engine: Engine) -> None:
    def idle_step() -> list[Counted]:
        """The cheapest of a few: in a step of a busy machine it may be time to show that the actors are late."""
        steps = [[engine.build(), engine.load(), engine.finish()] for _ in range(5)]
        return min(steps, key=counts)

    alone = []
    for number in range(64):
        # One that loads and one that waits in the queue.
        engine.load([pull(f"r{number}", [number])])
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "p",
            "remote_request_id": f"remote-w{number}",
            "remote_host": "h",
            "remote_port": 1,
            "remote_block_ids": [[1]],
            "tp_size": 1,
        }
        engine.vllm.submit(f"w{number}", range(16), params)
        engine.scheduler.build_connector_meta(None)
        if number == 0:
            alone = idle_step()
    among_many = idle_step()
    assert (
        len(engine.scheduler._scheduler_side._loads.queued)
        == len(engine.worker._worker_side.ledger._open_receives)
        == 64
    )
    assert counts(among_many) == counts(alone)
    assert sum(work.calls for work in among_many) <= CALLS_OF_AN_IDLE_STEP


def test_figures_of_an_idle_step_cost_the_same_whatever_is_open(engine: Engine) -> None:
    engine.tell_figures()
    alone, told_alone = engine.tell_figures()
    for number in range(64):
        engine.load([pull(f"r{number}", [number])])
        engine.build()
    engine.tell_figures()
    among_many, told_among_many = engine.tell_figures()
    assert (told_alone, told_among_many) == ([], [])
    assert counts([among_many]) == counts([alone])
    assert alone.calls <= CALLS_OF_FIGURES_OF_AN_IDLE_STEP


def test_actors_that_are_late_are_shown_and_then_no_more(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = engine.worker._worker_side
    engine.tell_figures()

    def shown() -> tuple[float, float] | None:
        reports = [each for each in engine.tell_figures()[1] if isinstance(each, WorkerReport)]
        gauges = [report.gauges[0] for report in reports if report.gauges]
        return (gauges[0]["mailbox_messages"], gauges[0]["loop_lag_seconds"]) if gauges else None

    for lateness, expected in [
        ((3, 0.2), None),
        ((3, 0.6), (3, 0.5)),
        ((3, 0.7), None),
        ((4, 1.3), (4, 1.25)),
        ((0, 0.0), (0, 0)),
        ((0, 0.0), None),
    ]:
        monkeypatch.setattr(type(worker._thread), "is_called", lateness[0] > 0)
        monkeypatch.setattr(worker._thread, "lateness", lambda found=lateness: found)
        assert shown() == expected, lateness


def test_a_call_of_nixl_that_does_not_return_is_shown_and_then_no_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = engine.worker._worker_side
    engine.tell_figures()
    for lag_seconds, expected in [(3.0, [3.0]), (3.0, []), (4.0, [4.0]), (0.0, [0.0]), (0.0, [])]:
        monkeypatch.setattr(worker._actors, "nixl_lag_seconds", lag_seconds)
        reports = [each for each in engine.tell_figures()[1] if isinstance(each, WorkerReport)]
        assert [each.gauges[0]["nixl_lag_seconds"] for each in reports if each.gauges] == expected


def test_what_the_actors_have_in_hand_is_told_when_it_changes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = engine.worker._worker_side
    engine.tell_figures()
    in_hand = [{"requests|reading": 2.0}, None, {"requests|reading": 2.0}, {"requests|reading": 0.0}]
    monkeypatch.setattr(worker._figures, "take_gauges", iter(in_hand).__next__)
    shown = []
    for _ in in_hand:
        reports = [each for each in engine.tell_figures()[1] if isinstance(each, WorkerReport)]
        shown.append([report.gauges[0]["requests|reading"] for report in reports])
    assert shown == [[2.0], [], [], [0.0]]


def test_the_page_shows_commands_that_wait_for_actors_who_are_held_up(engine: Engine) -> None:
    """The thread of the actors stands still, as in a system call that does not come back, while the engine steps: all
    the way from the thread's mailbox to what Prometheus reads."""
    registry = CollectorRegistry()
    page, gate = our_prometheus(registry), threading.Event()

    def shown() -> tuple[float | None, float | None]:
        """After one more step."""
        report = engine.worker.build_connector_worker_meta()
        engine.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        of_engine = engine.scheduler.get_kv_connector_stats()
        if of_engine is not None:
            page.observe(across_processes(of_engine))
        names = ("vllm:nixl_actor_mailbox_messages", "vllm:nixl_actor_loop_lag_seconds")
        return value(registry, names[0]), value(registry, names[1])

    def wait_until(is_so: Callable[[tuple[float, float]], bool]) -> None:
        deadline = time.monotonic() + HEARD_SECONDS_MAX
        while not is_so(shown()):
            assert time.monotonic() < deadline, shown()
            time.sleep(0.01)

    engine.token.token.run_sync_soon(gate.wait, HEARD_SECONDS_MAX)
    engine.worker.bind_connector_metadata(StepMetadata([pull("late-1", [1]), pull("late-2", [2])]))
    engine.worker.start_load_kv(None)
    engine.worker.clear_connector_metadata()
    wait_until(lambda late: late[0] == 2 and late[1] >= LATE_SECONDS)
    wait_until(lambda late: late[0] == 2 and late[1] >= 2 * LATE_SECONDS)
    gate.set()
    wait_until(lambda late: late == (0, 0))
    for _ in range(2):
        assert engine.heard.acquire(timeout=HEARD_SECONDS_MAX)
    engine.finish(["late-1", "late-2"])


def test_actors_that_hang_are_said_once_and_so_is_that_they_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is failed meanwhile: what they have begun may still write."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(hang_notice, "HANGS_SECONDS", 0.1)

    def said_by_steps(count: int) -> list[str]:
        deadline = time.monotonic() + HEARD_SECONDS_MAX
        while len(lines := [each for each in caplog.messages if "KV transfer actors" in each]) < count:
            assert time.monotonic() < deadline
            step()
        return lines

    def step() -> None:
        assert engine.worker.get_finished(set()) == (set(), set())
        engine.tell_figures()
        time.sleep(0.01)

    for episode in range(2):
        caplog.clear()
        gate = threading.Event()
        engine.token.token.run_sync_soon(gate.wait, HEARD_SECONDS_MAX)
        engine.worker.bind_connector_metadata(StepMetadata([pull(f"hung-{episode}", [1])]))
        engine.worker.start_load_kv(None)
        engine.worker.clear_connector_metadata()
        (begun,) = said_by_steps(1)
        assert "have not come" in begun
        assert f"py-spy dump --pid {os.getpid()}" in begun
        assert "kv-transfer-actors" in begun
        for _ in range(20):
            step()
        gate.set()
        _, ended = said_by_steps(2)
        assert "go on, after" in ended
        assert engine.heard.acquire(timeout=HEARD_SECONDS_MAX)
        engine.finish([f"hung-{episode}"])


def test_each_further_request_of_a_step_costs_the_same(engine: Engine) -> None:
    def step(first: int, stop: int) -> int:
        commands = [pull(f"r{number}", [number]) for number in range(first, stop)]
        works = [engine.build(commands), engine.load(commands), engine.finish([each.request_id for each in commands])]
        return sum(work.calls for work in works)

    of_one, of_two, of_many = step(0, 1), step(1, 3), step(3, 67)
    assert of_two - of_one <= CALLS_OF_A_FURTHER_REQUEST
    assert of_many - of_one == 63 * (of_two - of_one)


def test_the_actors_are_woken_once_for_each_step_that_has_commands(engine: Engine) -> None:
    engine.load([pull(f"r{number}", [number]) for number in range(64)])
    assert len(engine.token.wake_ups) == 1
    for _ in range(3):
        engine.load()
        engine.finish()
    assert len(engine.token.wake_ups) == 1


def test_a_request_that_cannot_be_packed_is_reported_as_failed_and_the_next_one_as_loaded(engine: Engine) -> None:
    """The kernel's error is in the log and in the figures, and vLLM does not see it raised."""

    class NoKernelForBlock3(PackedBlocks):
        def pack(self, permutation: Permutation) -> None:
            if 3 in permutation.kernel_blocks[0]:
                raise RuntimeError("no kernel")

    worker, cache = engine.worker._worker_side, torch.zeros(8, 1, 4, 8)
    worker._finishing = Finishing(
        run_at_once, BlockPermuter({}), CacheMemory([cache]), packed_blocks=NoKernelForBlock3()
    )
    logged: list[tuple[str, Failure]] = []
    worker._log_failure = lambda subject, failure: logged.append((subject, failure))  # type: ignore[assignment]
    engine.load([pull("a", [3]), pull("b", [4])])
    for name, block in (("a", 3), ("b", 4)):
        permutation = Permutation(kernel_blocks=(np.array([block]),), chunks=(1,), heads_first=True, packs=True)
        ended = ReceiveEnded(
            request_id=name, failure=None, local_block_ids=[], quarantined=False, permutation=permutation
        )
        worker.ledger.record(ended)
    results = engine.worker.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"a"})
    assert logged == [("request a", PackingFailed(error="RuntimeError('no kernel')"))]
    assert not worker.ledger._open_receives
