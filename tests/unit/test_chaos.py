"""The parts of the chaos run that need no engine: plans, proxies, and the verdict."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.chaos.load import Call, Results, Usage
from tests.chaos.plan import LIFE_KINDS, PREFILL, Kind, draw_plan, load_plan, save_plan
from tests.chaos.proxy import Proxy, ProxyThread
from tests.chaos.remains import SERVER, WORKER, Process, grown
from tests.chaos.report import Report, render

PATIENCE_SECONDS = 10.0


def test_a_plan_is_a_value_of_its_seed(tmp_path: Path) -> None:
    plan = draw_plan(1, 300)
    assert plan == draw_plan(1, 300)
    assert plan.faults != draw_plan(2, 300).faults
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("seed", range(5))
def test_five_minutes_have_every_kind(seed: int) -> None:
    plan = draw_plan(seed, 300)
    counts = Counter(fault.kind for fault in plan.faults)
    assert set(counts) == set(Kind)
    assert all(counts[kind] >= 2 for kind in LIFE_KINDS)
    assert {fault.engine for fault in plan.of(LIFE_KINDS)} == set(PREFILL)
    assert list(plan.faults) == sorted(plan.faults, key=lambda fault: fault.at_seconds)


# --- proxies ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def thread() -> Iterator[ProxyThread]:
    with ProxyThread() as running:
        yield running


@contextlib.contextmanager
def echo() -> Iterator[int]:
    """Sends back what it receives; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(1000):
                    connection.sendall(data)

        accepting = threading.Thread(target=serve)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_SECONDS)


def test_a_proxy_passes_holds_back_resets_and_refuses(thread: ProxyThread) -> None:
    with echo() as port:
        proxy = thread.proxy(port, names_control=False)
        with connected(proxy) as client:
            client.sendall(b"one")
            assert client.recv(10) == b"one"
            proxy.holds_back = True
            client.sendall(b"two")
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(10)
            client.settimeout(PATIENCE_SECONDS)
            proxy.holds_back = False
            assert client.recv(10) == b"two"
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                client.recv(10)
        with connected(proxy) as client:
            proxy.refuse()
            with pytest.raises(ConnectionResetError):
                client.recv(10)
        with pytest.raises(ConnectionRefusedError):
            connected(proxy)
        proxy.listen()
        with connected(proxy) as client:
            client.sendall(b"three")
            assert client.recv(10) == b"three"
        assert proxy.control is None


def test_a_proxy_of_nobody_resets(thread: ProxyThread) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        proxy = thread.proxy(free.getsockname()[1], names_control=False)
        with pytest.raises(ConnectionResetError), connected(proxy) as client:
            client.recv(10)


@pytest.mark.parametrize("filler", [b"", bytes(50), bytes(500), bytes(300_000)])
def test_the_proxy_of_a_side_channel_stands_before_the_control_socket_too(thread: ProxyThread, filler: bytes) -> None:
    """Short frames, long ones, and those that come in pieces; what is no handshake passes as it is."""
    context = zmq.Context()
    try:
        side, control = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (side, control)]
        proxy = thread.proxy(ports[0], names_control=True)
        asker = context.socket(zmq.REQ)
        asker.connect(f"tcp://127.0.0.1:{proxy.port}")
        payload = {"agent_metadata_bytes": filler, "actor": {"life": "x", "control_port": ports[1]}}
        for said in (payload, {"error": "none"}, [1, 2]):
            asker.send(b"get")
            sender, empty, _ = side.recv_multipart()
            side.send_multipart([sender, empty, msgspec.msgpack.encode(said), b"clock"])
            heard, clock = asker.recv_multipart()
            assert clock == b"clock"
            if said is payload:
                assert proxy.control is not None
                moved = {"life": "x", "control_port": proxy.control.port}
                assert msgspec.msgpack.decode(heard) == payload | {"actor": moved}
            else:
                assert msgspec.msgpack.decode(heard) == said
        link = context.socket(zmq.DEALER)
        assert proxy.control is not None
        link.connect(f"tcp://127.0.0.1:{proxy.control.port}")
        link.send(b"hold")
        assert control.recv_multipart()[1:] == [b"hold"]
        port = proxy.control.port
        proxy.forget_control()
        assert proxy.control is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS)
    finally:
        context.destroy(linger=0)


# --- the verdict ------------------------------------------------------------------------------------------------------


def call(engine: str, usage: Usage = Usage.PLAIN, *, is_right: bool | None = None, **others: object) -> Call:
    return Call(engine=engine, name="a", usage=usage, at_seconds=0.0, is_right=is_right, **({"seconds": 0.5} | others))


def counted(*calls: Call) -> Report:
    report = Report(connector="ours", seed=1, seconds=1.0)
    report.count(Results([call("fail", is_right=True), call("recompute", is_right=True), *calls]))
    return report


def test_what_breaks_no_promise() -> None:
    report = counted(
        call("fail", error="HTTP 500"),
        call("fail", Usage.TWICE, error="HTTP 500"),
        call("recompute", Usage.MALFORMED, error="HTTP 400"),
        call("recompute", Usage.LEFT_WAITING, left=True, seconds=99.0),
    )
    assert report.broken_promises == []
    assert report.calls["fail"].errors == {"HTTP 500": 1}
    assert "HTTP 500" in render([report, report])


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (call("fail", is_right=False), "1 wrong answers"),
        (call("fail", seconds=60.0, error="ReadTimeout"), "1 calls did not end"),
        (call("recompute", error="HTTP 500"), "recompute: 1 clients saw HTTP 500"),
        (call("recompute", Usage.TWICE, error="HTTP 500"), "recompute: 1 clients saw parameters used twice: HTTP 500"),
    ],
)
def test_what_breaks_one(seen: Call, said: str) -> None:
    assert counted(seen).broken_promises == [said]


def test_bugs_deaths_and_leaks_break_promises() -> None:
    report = counted()
    report.deaths.append("fail: a process ended after 3 s")
    report.left.append("after the chaos, fail: 1 leases")
    report.traces_wrong.append("a record")
    report.calls["fail"].failures = {"ActorCrashed": 2, "ConnectionRefused": 5}
    assert report.broken_promises == [
        "fail: a process ended after 3 s",
        "fail: 2 ActorCrashed",
        "left: after the chaos, fail: 1 leases",
        "trace: a record",
    ]


def test_threads_and_sockets_that_are_left() -> None:
    few = Process(pid=1, threads=10, sockets=10, files=20, resident_bytes=1)
    many = msgspec.structs.replace(few, threads=12, sockets=11)
    assert grown({SERVER: few, WORKER: few}, {SERVER: few, WORKER: few}) == []
    assert grown({SERVER: few, WORKER: few}, {SERVER: many, WORKER: many}) == [
        "API server: 1 more sockets",
        "worker: 2 more threads",
        "worker: 1 more sockets",
    ]


def test_memory_that_grows_breaks_a_promise() -> None:
    report = counted()
    small, large = (
        Process(pid=1, threads=1, sockets=1, files=1, resident_bytes=megabytes * 1_000_000) for megabytes in (923, 1116)
    )
    report.processes_before, report.processes_after = {"recompute": {WORKER: small}}, {"recompute": {WORKER: small}}
    assert report.broken_promises == []
    report.processes_after = {"recompute": {WORKER: large}}
    assert report.broken_promises == ["left: recompute, worker: memory from 923 to 1116 MB"]


def test_a_run_without_an_answer_proves_nothing() -> None:
    report = Report(connector="ours", seed=1, seconds=1.0)
    report.count(Results([call("fail", error="HTTP 500")]))
    assert "recompute: no right answer at all" in report.broken_promises
