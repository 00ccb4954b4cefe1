"""At a limit of threads: what needs one fails with a sentence that says so, once, and works when there are more."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import trio

from connector import thread_limit
from connector.ports import curve_keys
from connector.ports.curve_keys import CurveKeys
from connector.ports.host_names import HostNames
from connector.ports.nixl import MemoryRange, NixlCallFailed
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.nixl_agent import thread as nixl_thread
from connector.ports.side_channel import NameNotResolved
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.runtime import listener as runtime_listener
from connector.runtime.thread import ActorThread, ThreadStartError
from connector.thread_limit import NO_THREAD_LEFT, NoThreadLeft, require_threads
from connector.tools.cli.main import main as nixl_actor
from connector.waiting_threads import call_in_thread
from tests.rig.key_files import Fleet
from tests.rig.listener import make_listener_thread, one_rank
from tests.rig.network import free_port
from tests.rig.patience import PATIENCE_SECONDS
from tests.rig.thread_limit import REFUSED, no_thread_left


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            await test()

    trio.run(main)


def test_a_call_that_raises_is_told_from_one_that_was_not_made() -> None:
    def raises() -> None:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        with no_thread_left(), pytest.raises(NoThreadLeft):
            await call_in_thread(lambda: 1)
        assert await call_in_thread(lambda: 1) == 1
        with pytest.raises(RuntimeError, match="can't start"):
            await call_in_thread(raises)

    run(test)


def test_a_host_name_cannot_be_looked_up_and_later_it_can() -> None:
    async def test() -> None:
        names = HostNames()
        with no_thread_left(), pytest.raises(NameNotResolved) as raised:
            await names.address("localhost", 5600)
        assert raised.value.error == f"{NO_THREAD_LEFT}: {REFUSED}"
        assert await names.address("localhost", 5600)

    run(test)


def test_accepted_keys_stay_in_use_and_nothing_has_crashed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_keys, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(curve_keys, "LOOK_WAIT_SECONDS", PATIENCE_SECONDS)  # a thread may come to run late
    fleet = Fleet(tmp_path)
    member, other = fleet.member("member"), fleet.member("other")

    async def test() -> None:
        keys: CurveKeys = member.keys()
        fleet.accept(other, by=member)
        with no_thread_left():
            for _ in range(3):
                await keys.look_again()
                assert set(keys.accepted.values()) == {"member"}
        await keys.look_again()
        assert set(keys.accepted.values()) == {"member", "other"}

    run(test)
    assert caplog.text.count(NO_THREAD_LEFT) == 1
    assert "crashed" not in caplog.text


def test_the_listener_says_once_that_it_cannot_look_at_files(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    monkeypatch.setattr(runtime_listener, "LOOK_AGAIN_SECONDS", 0.01)
    listener = make_listener_thread("127.0.0.1", free_port(), {(0, 0): one_rank()}, look_again=look)
    listener.start()
    try:
        until(lambda: looks > 0)
        with no_thread_left():
            until(lambda: NO_THREAD_LEFT in caplog.text)
            time.sleep(0.1)
        before = looks
        until(lambda: looks > before)
    finally:
        listener.stop()
    assert caplog.text.count(NO_THREAD_LEFT) == 1
    assert "crashed" not in caplog.text


def test_actors_and_an_agent_that_cannot_start_say_why() -> None:
    async def nobody() -> None:
        return None

    thread: ActorThread[None] = ActorThread("actors", nobody, lambda error: None)  # type: ignore[arg-type]
    memory = np.zeros(4096, np.uint8)
    with no_thread_left():
        with pytest.raises(ThreadStartError, match="no more threads"):
            thread.start()
        with pytest.raises(NixlCallFailed, match="no more threads"):
            RealNixlPort.open("x", [MemoryRange(memory.ctypes.data, memory.nbytes)])
    assert thread.stop(0.0)


def test_room_for_threads_is_asked_for_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_limit, "THREAD_GONE_SECONDS_MAX", PATIENCE_SECONDS)
    before = os.listdir("/proc/self/task")
    require_threads(3)
    assert set(os.listdir("/proc/self/task")) <= set(before)
    with no_thread_left(), pytest.raises(NoThreadLeft):
        require_threads(1)


def test_sockets_are_not_opened_where_libzmq_would_end_the_process() -> None:
    with no_thread_left(), pytest.raises(NoThreadLeft):
        ZmqSideChannel()


def test_an_agent_is_not_made_where_ucx_would_end_the_process() -> None:
    memory = np.zeros(4096, np.uint8)
    refused = mock.patch.object(nixl_thread, "require_threads", side_effect=NoThreadLeft(RuntimeError(REFUSED)))
    with refused, pytest.raises(NixlCallFailed, match="no more threads"):
        RealNixlPort.open("x", [MemoryRange(memory.ctypes.data, memory.nbytes)])


def test_a_command_that_cannot_ask_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["ps"], ["drain"], ["meet", "127.0.0.1:1"]):
        monkeypatch.setattr(sys, "argv", ["nixl-actor", *command, "127.0.0.1:1"])
        with no_thread_left(), pytest.raises(SystemExit) as ended:
            nixl_actor()
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"nixl-actor cannot ask: {NO_THREAD_LEFT}: {REFUSED}\n"
