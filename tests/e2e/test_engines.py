"""The harness itself, with a small HTTP server in place of vLLM: nothing it starts may stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import reaper
from tests.e2e.engines import ROOT, Engine, EngineFailed, EngineOptions, EngineSet, free_port

TIMEOUT_SECONDS = 20.0
PROCESSES = 3

STAND_IN = """
import http.server, signal, subprocess, sys
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); "
import multiprocessing.shared_memory
shared = multiprocessing.shared_memory.SharedMemory(create=True, size=100)
print("shared", shared.name, flush=True)
child = subprocess.Popen([sys.executable, "-c", ignore + "time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BROKEN = {
    "broken": "raise SystemExit('no such model')",
    "talkative": "print('a start', 'Traceback of the cause', *(f'line {n}' for n in range(1, 200)), sep='\\n')",
    "loses a worker": "print('WorkerProc initialization failed')",
    "loses a worker with a connector": "print('Creating v1 connector', 'WorkerProc initialization failed')",
}
"""Programs that end at once."""


@dataclass(frozen=True, kw_only=True)
class StandIn(EngineOptions):
    """An 'engine' with a child process that ignores SIGTERM, and shared memory, which has a process of Python's watch
    over it."""

    behaviour: str = "plain"
    recovers: bool = False
    """Whether it behaves at its second start."""

    def start(self, log_path: Path) -> subprocess.Popen[bytes]:
        first = not log_path.exists() or not log_path.stat().st_size
        program = BROKEN.get(self.behaviour, STAND_IN) if first or not self.recovers else STAND_IN
        return self.start_command([sys.executable, "-c", program, str(self.http_port), self.behaviour], log_path)


@pytest.fixture
def engines() -> Iterator[EngineSet]:
    with EngineSet() as engines:
        yield engines


def options(tmp_path: Path, behaviour: str = "plain", name: str = "stand-in", *, recovers: bool = False) -> StandIn:
    return StandIn(name=name, model=tmp_path, logs=tmp_path, behaviour=behaviour, recovers=recovers)


def wait_until_empty(group: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (members := reaper.members(group)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert members == []


def wait_until_gone(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not path.exists()


def shared_memory(log: str) -> Path:
    return reaper.SHARED_MEMORY / log.split()[1]


def test_start_reports_progress_and_stop_leaves_no_process(engines: EngineSet, tmp_path: Path) -> None:
    seen: list[str] = []
    (engine,) = engines.start(options(tmp_path), progress=lambda engines, _: seen.append(engines[0].start_phase()))
    assert seen[0] == "importing vLLM"
    assert engine.healthy()
    assert "listening" in engine.log_tail()
    assert len(reaper.members(engine.pid)) == PROCESSES
    assert shared_memory(engine.log()).exists()
    assert engine.stop()
    assert reaper.members(engine.pid) == []
    assert not engine.healthy()
    assert not shared_memory(engine.log()).exists()


def test_an_engine_that_ignores_sigterm_is_killed(engines: EngineSet, tmp_path: Path) -> None:
    (engine,) = engines.start(options(tmp_path, "stubborn"))
    assert not engine.stop(timeout_seconds=0.5)
    assert reaper.members(engine.pid) == []


def test_kill_takes_the_whole_group_and_restart_comes_back_on_the_same_port(engines: EngineSet, tmp_path: Path) -> None:
    (engine,) = engines.start(options(tmp_path))
    killed = engine.pid
    engine.kill()
    assert reaper.members(killed) == []
    assert not shared_memory(engine.log()).exists()
    engine.restart().wait_healthy(TIMEOUT_SECONDS)
    assert engine.pid != killed


def test_a_paused_engine_is_stopped_too(engines: EngineSet, tmp_path: Path) -> None:
    (engine,) = engines.start(options(tmp_path))
    engine.pause()
    assert engine.stop()
    assert reaper.members(engine.pid) == []


def test_an_engine_that_does_not_start_says_why(engines: EngineSet, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="no such model"):
        engines.start(options(tmp_path, "broken"))


def test_the_first_sign_of_trouble_is_shown_with_the_end_of_the_log(engines: EngineSet, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed) as failed:
        engines.start(options(tmp_path, "talkative"))
    shown = [line.removeprefix("  | ") for line in str(failed.value).splitlines()]
    assert shown[1:3] == ["Traceback of the cause", "line 1"]
    assert "..." in shown
    assert shown[-2] == "line 199"
    assert "a start" not in shown


def test_an_engine_that_lost_a_worker_before_it_had_a_connector_is_started_once_more(
    engines: EngineSet, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="stand-in lost a worker"):
        (engine,) = engines.start(options(tmp_path, "loses a worker", recovers=True))
    assert engine.healthy()


def test_an_engine_that_loses_its_worker_again_has_failed(engines: EngineSet, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="lost a worker"), pytest.raises(EngineFailed, match="ended while starting"):
        engines.start(options(tmp_path, "loses a worker"))


def test_an_engine_that_lost_a_worker_with_its_connector_has_failed(engines: EngineSet, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="ended while starting"):
        engines.start(options(tmp_path, "loses a worker with a connector", recovers=True))


def test_an_exception_inside_the_block_ends_all(tmp_path: Path) -> None:
    started: list[Engine] = []

    def interrupted() -> None:
        with EngineSet() as engines:
            started.extend(engines.start(options(tmp_path, name="one"), options(tmp_path, name="two")))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(started) == 2
    assert [reaper.members(engine.pid) for engine in started] == [[], []]


def test_engines_end_even_when_the_program_is_killed(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "from tests.e2e.test_engines import EngineSet, options\n"
        "engine, = EngineSet().start(options(pathlib.Path(sys.argv[1])))\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert runner.stdout is not None
        group = int(runner.stdout.readline())
        assert len(reaper.members(group)) == PROCESSES
    finally:
        os.kill(runner.pid, signal.SIGKILL)
        runner.wait(TIMEOUT_SECONDS)
    wait_until_empty(group)
    wait_until_gone(shared_memory((tmp_path / "stand-in.log").read_text()))


def test_free_ports_are_never_given_twice() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == len(ports)
