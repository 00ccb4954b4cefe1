"""The listener of the scheduler process, on a real socket."""

from __future__ import annotations

import contextlib
import logging
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
import trio

from connector.clock import BootClock, to_ns
from connector.ports.doorman import connections_max
from connector.ports.gate import ANYBODY, Access, network_of
from connector.ports.side_channel import AccessRefused
from connector.ports.zmq_bridge import ZmqSideChannel, channel
from connector.runtime import draining
from connector.runtime import listener as runtime_listener
from connector.runtime.listener import HandshakeListener
from connector.runtime.thread import ThreadStartError
from connector.scheduler import listener_thread
from connector.scheduler.listener_thread import ListenerThread
from connector.wire.administration import Leave, LeaveTaken, encode_drain
from connector.wire.control import decode_request, encode_answer
from connector.wire.handshake import encode_request
from statemachine.granting import LentCounts
from tests.rig.listener import make_listener_thread, one_rank
from tests.rig.network import free_port
from tests.rig.patience import PATIENCE_SECONDS

HOST = "127.0.0.1"
LIFE = "0123456789abcdef" * 2
DEATHS: list[str] = []


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def served(port: int) -> Iterator[ListenerThread]:
    """An engine of one rank."""
    listener = make(port, DEATHS.append)
    listener.start()
    yield listener
    listener.stop()


def test_every_rank_of_every_decode_engine_may_connect_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limit of descriptors it is counted how many may."""
    counted: list[int] = []

    def count() -> int:
        counted.append(connections_max())
        return counted[-1]

    monkeypatch.setattr(channel, "connections_max", count)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    listener = make(port, DEATHS.append)
    try:
        listener.start()
        assert counted == [connections_max()]
        assert counted[0] > 512 // 4
    finally:
        listener.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def make(
    port: int,
    on_death: Callable[[str], None],
    *,
    host: str = HOST,
    control: tuple[str, int] = ("10.0.0.1", 40_000),
    count: Callable[[], LentCounts] = lambda: LentCounts(0, 0),
    grace_seconds: float = 60.0,
) -> ListenerThread:
    return ListenerThread(
        host,
        port,
        {(0, 0): one_rank(*control)},
        LIFE,
        on_death=on_death,
        clock=BootClock(),
        grace_ns=to_ns(grace_seconds),
        lease_ns=to_ns(30),
        count=count,
    )


def ask(port: int, frame: bytes, seconds: float = PATIENCE_SECONDS) -> tuple[dict[str, object], float] | None:
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


def test_an_engine_that_has_slept_is_another_one(served: ListenerThread, port: int) -> None:
    """And whoever asks is told of its workers where they are now."""
    first = ask(port, encode_request(0, 0))
    served.serve({(0, 0): one_rank("10.0.0.2", 40_001)}, LIFE[::-1])
    second = ask(port, encode_request(0, 0))
    assert first is not None
    assert second is not None
    said: list[Any] = [each[0]["actor"] for each in (first, second)]
    assert [each["life"] for each in said] == [LIFE, LIFE[::-1]]
    at = [(each["control_host"], each["control_port"]) for each in said]
    assert at == [("10.0.0.1", 40_000), ("10.0.0.2", 40_001)]


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
    while HandshakeListener._answer is not answer:  # on a busy machine a question may not come in time
        assert ask(port, encode_request(0, 0), seconds=0.5) is None
    for _ in range(2):
        served_again = ask(port, encode_request(0, 0))
        assert served_again is not None
        assert "agent_metadata_bytes" in served_again[0]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("handshake listener crashed")
    assert "RuntimeError: injected" in line
    assert served.totals == {"crashes": 1}


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
    listener = make_listener_thread(HOST, port, {(0, 0): one_rank()}, look_again=look)
    listener.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while looks < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ask(port, encode_request(0, 0)) is not None
    listener.stop()
    assert looks >= 4
    assert "RuntimeError: injected" in caplog.text


def test_strangers_are_counted_by_why_they_were_turned_away(port: int) -> None:
    def totals_after(access: Access, frame: bytes) -> Mapping[str, int]:
        listener = make_listener_thread(HOST, port, {(0, 0): one_rank()}, access=access)
        listener.start()
        with contextlib.suppress(AccessRefused):
            assert ask(port, frame) is not None
        listener.stop()
        return listener.totals

    assert totals_after(ANYBODY, encode_request(0, 0)) == {}
    assert totals_after(ANYBODY, b"?") == {"turned_away|side_channel|malformed": 1}
    refused = totals_after(Access(networks=(network_of("10.0.0.0/8"),)), encode_request(0, 0))
    assert set(refused) == {"turned_away|side_channel|refused"}


def test_an_engine_that_has_stopped_says_so_to_everybody(served: ListenerThread, port: int) -> None:
    """And to a tool where its workers are: they may know why."""
    before = ask(port, encode_request(0, 0))
    served.stop_serving("its workers died")
    answers = [ask(port, frame) for frame in (encode_request(0, 0), encode_request(3, 3), b"?", encode_drain())]
    assert before is not None
    said = {"error": "its workers died"}
    assert [answer and answer[0] for answer in answers] == [said | {"actor": before[0]["actor"]}, said, said, said]


def test_a_thread_that_dies_is_logged_and_told(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    crashes: list[str] = []
    deaths: list[str] = []
    monkeypatch.setattr(listener_thread, "log_actor_crash", lambda name, error: crashes.append(f"{name}: {error}"))
    listener = make(port, deaths.append)
    listener.start()
    token = listener._thread._token
    assert token is not None

    def die() -> None:
        raise RuntimeError("injected")

    token.run_sync_soon(die)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not deaths and time.monotonic() < deadline:
        time.sleep(0.01)
    listener.stop()
    (line,) = crashes
    assert line.startswith("handshake listener's thread: ")
    assert listener.totals == {"crashes": 1}
    (reason,) = deaths
    assert reason.startswith("the handshake listener died: ")


def test_a_thread_that_is_stopped_has_not_died(port: int) -> None:
    deaths: list[str] = []
    listener = make(port, deaths.append)
    listener.start()
    listener.stop()
    assert deaths == []


def test_an_address_that_is_taken_is_an_error_at_start_and_no_crash(
    served: ListenerThread, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes: list[str] = []
    monkeypatch.setattr(listener_thread, "log_actor_crash", lambda name, error: crashes.append(name))
    with pytest.raises(ThreadStartError, match="in use") as refused:
        make(port, DEATHS.append).start()
    assert f"{HOST}:{port}" in str(refused.value)
    assert "a VLLM_NIXL_SIDE_CHANNEL_PORT of its own" in str(refused.value)
    assert crashes == []


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 5600), (HOST, 70_000)], ids=["not ours", "no port"])
def test_an_address_that_cannot_be_used_is_an_error_that_names_the_variables(host: str, port: int) -> None:
    with pytest.raises(ThreadStartError, match=f"{host}:{port}") as refused:
        make(port, DEATHS.append, host=host).start()
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST has to be an address of this machine" in str(refused.value)
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in str(refused.value)


def test_an_address_is_not_blamed_where_no_descriptor_is_left(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "is_descriptor_left", lambda: False)
    with pytest.raises(ThreadStartError, match=r"Too many open files; .* raise the hard limit") as refused:
        make(port, DEATHS.append).start()
    assert "VLLM_NIXL_SIDE_CHANNEL" not in str(refused.value)


# --- an engine that is to end -----------------------------------------------------------------------------------------


class Worker:
    """A worker's control socket, in a thread of its own: it says that its decode engines are told."""

    def __init__(self) -> None:
        self.heard: list[Leave] = []
        self._ports: queue.Queue[int] = queue.Queue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._serve,), daemon=True)
        self._thread.start()
        self.port = self._ports.get(timeout=PATIENCE_SECONDS)

    async def _serve(self) -> None:
        channel = ZmqSideChannel()
        try:
            control = channel.listen(HOST, 0)
            self._ports.put(control.port)
            while not self._is_over.is_set():
                with trio.move_on_after(0.05):
                    asked = await control.receive()
                    message = decode_request(asked.frames_untrusted)
                    assert isinstance(message, Leave)
                    self.heard.append(message)
                    control.reply(asked.reply_address, encode_answer(LeaveTaken(leases=1)))
        finally:
            channel.close()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE_SECONDS)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with pytest.MonkeyPatch.context() as patch:
        # Or a machine that stands still makes one of it that cannot be told.
        patch.setattr(draining, "TELL_SECONDS", PATIENCE_SECONDS)
        made = Worker()
        yield made
        made.stop()


def drain_until(port: int, state: str) -> dict[str, Any]:
    """What the engine says when it has come so far."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        answer = ask(port, encode_drain())
        assert answer is not None
        report: Any = answer[0]["drain"]
        if report["state"] == state:
            return dict(report)
        time.sleep(0.02)
    raise AssertionError(f"it is not {state}")


def test_an_engine_that_is_asked_to_drain_tells_its_worker_once_and_waits_for_what_is_lent(
    port: int, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    lent = [2]
    listener = make(port, DEATHS.append, control=(HOST, worker.port), count=lambda: LentCounts(lent[0], 5))
    listener.start()
    try:
        with caplog.at_level(logging.WARNING, logger="vllm.nixl_actor_connector"):
            before = ask(port, encode_request(0, 0))
            assert before is not None
            assert before[0]["actor"]["draining"] == ""  # type: ignore[index]
            began = time.monotonic()
            first = drain_until(port, "draining")
            assert (first["lent"], first["not_lent"]) == (2, 5)
            assert 59.9 - (time.monotonic() - began) < first["seconds_left"] <= 60
            meanwhile = ask(port, encode_request(0, 0))
            assert meanwhile is not None
            assert meanwhile[0]["actor"]["draining"] == "draining", "who holds a lease may still have to meet us"  # type: ignore[index]
            lent[0] = 0
            assert drain_until(port, "drained")["lent"] == 0
            after = ask(port, encode_request(0, 0))
            assert after is not None
            assert after[0]["actor"]["draining"] == "drained"  # type: ignore[index]
    finally:
        listener.stop()
    (leave,) = worker.heard
    assert (59.9 - (time.monotonic() - began)) * 1e9 < leave.grace_ns <= 60e9
    began, ended = [record.getMessage() for record in caplog.records]
    assert began.startswith("draining, because of nixl-actor drain: 2 prefill(s)")
    assert ended.startswith("drained after ")
    assert ended.endswith("nothing is lent any more; this engine may be ended")


def test_an_engine_that_makes_a_mistake_when_it_begins_to_drain_drains_all_the_same(
    port: int, worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked once: by SIGTERM. What waits for it would wait to the end of the grace period."""

    def broken(listener: ListenerThread, draining: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("injected")

    monkeypatch.setattr(ListenerThread, "_show_draining", broken)
    listener = make(port, DEATHS.append, control=(HOST, worker.port), count=lambda: LentCounts(0, 0))
    listener.start()
    try:
        listener.drain("SIGTERM", 60_000_000_000)
        drain_until(port, "drained")
    finally:
        listener.stop()
    assert len(worker.heard) == 1
    assert "draining crashed" in caplog.text


def test_the_grace_period_ends_a_drain(port: int, worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    listener = make(port, DEATHS.append, control=(HOST, worker.port), count=lambda: LentCounts(1, 0), grace_seconds=3.0)
    listener.start()
    try:
        with caplog.at_level(logging.WARNING, logger="vllm.nixl_actor_connector"):
            assert drain_until(port, "draining")["lent"] == 1
            assert drain_until(port, "drained")["lent"] == 1
    finally:
        listener.stop()
    assert "the grace period is over, and 1 prefill(s) are still lent" in caplog.records[-1].getMessage()


def test_a_worker_that_cannot_be_told_holds_nobody_up_for_long(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "TELL_SECONDS", 0.2)
    silent = free_port()
    listener = make(port, DEATHS.append, control=(HOST, silent))
    listener.start()
    try:
        with caplog.at_level(logging.WARNING, logger="vllm.nixl_actor_connector"):
            drain_until(port, "drained")
    finally:
        listener.stop()
    _, untold, ended = [record.getMessage() for record in caplog.records]
    assert untold.startswith(f"worker 0 at {HOST}:{silent} could not be told")
    assert ended.startswith("drained after ")
