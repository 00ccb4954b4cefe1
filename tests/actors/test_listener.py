"""The listener of the scheduler process, on a real socket: a crash costs one answer."""

from __future__ import annotations

import time

import pytest
import trio

from connector.ports.zmq_bridge import ZmqSideChannel
from connector.scheduler import listener_thread
from connector.scheduler.listener_thread import ListenerThread
from connector.wire.handshake import encode_request
from tests.rig.listener import make_listener_thread, one_rank
from tests.rig.network import free_port


def serve(port: int) -> ListenerThread:
    """The listener of an engine of one rank."""
    return make_listener_thread("127.0.0.1", port, {(0, 0): one_rank()})


def ask(port: int, frame: bytes, seconds: float = 30.0) -> tuple[bytes, ...] | None:
    """One question over a socket of its own; None: no answer."""

    async def main() -> tuple[bytes, ...] | None:
        channel = ZmqSideChannel()
        try:
            with trio.move_on_after(seconds):
                return await channel.connect("127.0.0.1", port).ask([frame])
            return None
        finally:
            channel.close()

    return trio.run(main)


def test_a_listener_that_crashed_serves_on_and_the_crash_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    crashes: list[BaseException] = []
    monkeypatch.setattr(listener_thread, "log_actor_crash", lambda name, error: crashes.append(error))
    is_broken = True

    def broken(self: ListenerThread, detail: str) -> None:
        nonlocal is_broken
        if is_broken:
            is_broken = False
            raise RuntimeError("injected")

    monkeypatch.setattr(ListenerThread, "_log_bad_frame", broken)
    port = free_port()
    listener = serve(port)
    listener.start()
    try:
        assert ask(port, encode_request(0, 0)) is not None
        deadline = time.monotonic() + 30.0
        while is_broken:  # its thread may have had no turn
            assert time.monotonic() < deadline, "nothing has crashed"
            ask(port, b"not a question", seconds=0.5)
        answers = [ask(port, encode_request(0, 0)) for _ in range(2)]
        assert None not in answers, "the listener is dead"
        assert [str(error) for error in crashes] == ["injected"]
    finally:
        listener.stop()
