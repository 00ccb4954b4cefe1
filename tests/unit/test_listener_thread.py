"""The listener of the scheduler process, on a real socket."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
import trio

from connector.ports.zmq_bridge import ZmqSideChannel
from connector.runtime import listener as runtime_listener
from connector.runtime.listener import HandshakeListener
from connector.runtime.thread import ThreadStartError
from connector.scheduler import listener_thread
from connector.scheduler.listener_thread import ListenerThread
from connector.step_metadata import HandshakeMetadata
from connector.wire.handshake import encode_request
from tests.rig.network import free_port

HOST = "127.0.0.1"
LIFE = "0123456789abcdef" * 2
DEATHS: list[str] = []


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def served(port: int) -> Iterator[ListenerThread]:
    """An engine of one rank."""
    listener = ListenerThread(HOST, port, {(0, 0): metadata()}, LIFE, on_death=DEATHS.append)
    listener.start()
    yield listener
    listener.stop()


def metadata() -> HandshakeMetadata:
    return HandshakeMetadata(
        compatibility_hash="hash",
        agent_metadata=b"agent",
        tp_size=1,
        dcp_size=1,
        pp_size=1,
        tp_rank=0,
        pp_rank=0,
        control_host="10.0.0.1",
        control_port=40_000,
    )


def ask(port: int, frame: bytes, seconds: float = 5.0) -> tuple[dict[str, object], float] | None:
    """One question over a socket of its own: the payload and the listener's clock. None: no answer."""

    async def main() -> tuple[bytes, ...] | None:
        channel = ZmqSideChannel()
        try:
            with trio.move_on_after(seconds):
                return await channel.connect(HOST, port).ask([frame])
            return None
        finally:
            channel.close()

    frames = trio.run(main)
    if frames is None:
        return None
    payload, clock = frames
    return msgspec.msgpack.decode(payload), msgspec.msgpack.decode(clock)


def test_a_rank_is_served_with_its_facts_and_the_clock_that_builtin_peers_want(
    served: ListenerThread, port: int
) -> None:
    before = time.perf_counter()
    answer = ask(port, encode_request(0, 0))
    assert answer is not None
    payload, clock_seconds = answer
    assert before <= clock_seconds <= time.perf_counter()
    assert payload["compatibility_hash"] == "hash"
    assert payload["agent_metadata_bytes"] == b"agent"
    facts = payload["actor"]
    assert isinstance(facts, dict)
    assert (facts["life"], facts["control_host"], facts["control_port"]) == (LIFE, "10.0.0.1", 40_000)


def test_a_listener_that_crashed_serves_on_and_the_crash_is_logged(
    served: ListenerThread, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 11: it was dead, and nobody was told."""
    answer = HandshakeListener._answer

    def broken(self: HandshakeListener, frames_untrusted: tuple[bytes, ...]) -> bytes:
        monkeypatch.setattr(HandshakeListener, "_answer", answer)
        raise RuntimeError("injected")

    monkeypatch.setattr(HandshakeListener, "_answer", broken)
    assert ask(port, encode_request(0, 0), seconds=0.5) is None
    for _ in range(2):
        served_again = ask(port, encode_request(0, 0))
        assert served_again is not None
        assert "agent_metadata_bytes" in served_again[0]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("handshake listener crashed")
    assert "RuntimeError: injected" in line


def test_files_are_looked_at_again_and_a_look_that_raises_ends_nothing(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise RuntimeError("injected")

    monkeypatch.setattr(runtime_listener, "LOOK_AGAIN_SECONDS", 0.01)
    listener = ListenerThread(HOST, port, {(0, 0): metadata()}, LIFE, on_death=DEATHS.append, look_again=look)
    listener.start()
    deadline = time.monotonic() + 10
    while looks < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ask(port, encode_request(0, 0)) is not None
    listener.stop()
    assert looks >= 4
    assert "RuntimeError: injected" in caplog.text


def test_an_engine_that_has_stopped_says_so_to_everybody(served: ListenerThread, port: int) -> None:
    served.stop_serving("its workers died")
    for frame in (encode_request(0, 0), encode_request(3, 3), b"?"):
        answer = ask(port, frame)
        assert answer is not None
        assert answer[0] == {"error": "its workers died"}


def test_a_thread_that_dies_is_logged_and_told(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    crashes: list[str] = []
    deaths: list[str] = []
    monkeypatch.setattr(listener_thread, "log_actor_crash", lambda name, error: crashes.append(f"{name}: {error}"))
    listener = ListenerThread(HOST, port, {(0, 0): metadata()}, LIFE, on_death=deaths.append)
    listener.start()
    token = listener._thread._token
    assert token is not None

    def die() -> None:
        raise RuntimeError("injected")

    token.run_sync_soon(die)
    deadline = time.monotonic() + 10
    while not deaths and time.monotonic() < deadline:
        time.sleep(0.01)
    listener.stop()
    (line,) = crashes
    assert line.startswith("handshake listener's thread: ")
    (reason,) = deaths
    assert reason.startswith("the handshake listener died: ")


def test_a_thread_that_is_stopped_has_not_died(port: int) -> None:
    deaths: list[str] = []
    listener = ListenerThread(HOST, port, {(0, 0): metadata()}, LIFE, on_death=deaths.append)
    listener.start()
    listener.stop()
    assert deaths == []


def test_an_address_that_is_taken_is_an_error_at_start_and_no_crash(
    served: ListenerThread, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes: list[str] = []
    monkeypatch.setattr(listener_thread, "log_actor_crash", lambda name, error: crashes.append(name))
    with pytest.raises(ThreadStartError, match="in use"):
        ListenerThread(HOST, port, {(0, 0): metadata()}, LIFE, on_death=DEATHS.append).start()
    assert crashes == []
