"""The connector's threads leave a core that the model computes on, and stay on the CPUs that somebody chose."""

from __future__ import annotations

import os
import threading

import pytest
import trio

from connector.cpu_affinity import leave_single_cpu
from connector.runtime.thread import ActorThread

PARENT = {0, 1, 2, 3}


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """CPU masks by process; 0 is the calling thread."""
    of_process = {0: {5}, os.getppid(): PARENT}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: of_process[pid])
    monkeypatch.setattr(os, "sched_setaffinity", of_process.__setitem__)
    return of_process


def test_a_single_cpu_is_left_for_those_of_the_parent(masks: dict[int, set[int]]) -> None:
    leave_single_cpu()
    assert masks[0] == PARENT


def test_several_cpus_are_somebodys_choice(masks: dict[int, set[int]]) -> None:
    """Those of one NUMA node, for example."""
    masks[0] = {6, 7}
    leave_single_cpu()
    assert masks[0] == {6, 7}


def test_what_the_system_forbids_is_left_as_it_is(masks: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, mask: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    leave_single_cpu()
    assert masks[0] == {5}


class Idle:
    """An actor main that does nothing until it is stopped."""

    def __init__(self) -> None:
        self._stopped = trio.Event()
        self.ran_in: int | None = None

    def deliver(self, command: object) -> None:
        return

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        self.ran_in = threading.get_ident()
        task_status.started()
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


def test_the_actors_thread_leaves_a_single_cpu(masks: dict[int, set[int]]) -> None:
    mains: list[Idle] = []

    async def make_main() -> Idle:
        assert masks[0] == PARENT, "before anything runs"
        mains.append(Idle())
        return mains[0]

    thread = ActorThread[object]("actors", make_main, lambda error: None)
    thread.start()
    assert thread.stop(10.0)
    assert mains[0].ran_in != threading.get_ident()
