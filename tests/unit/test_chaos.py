"""The parts of the chaos run that need no engine: plans, proxies, and the verdict."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from connector.tools.asking import Address
from connector.tools.live import EngineReport, RankReport
from connector.wire.inspection import EngineCounts, EngineFacts, EngineRow, PeerRow
from statemachine.trace import TransitionRecord
from tests.chaos.drains import COMMAND, SIGTERM, Disturbance, Drain
from tests.chaos.load import Call, Results, Usage
from tests.chaos.plan import LIFE_KINDS, PREFILL, Kind, draw_plan, load_plan, save_plan
from tests.chaos.proxy import Proxy, ProxyThread
from tests.chaos.remains import (
    SERVER,
    WORKER,
    Life,
    Process,
    grown,
    left_in_connector,
    sockets_of_reconnections,
)
from tests.chaos.report import Report, render
from tests.e2e.engines import LOOPBACK

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
    with ProxyThread(LOOPBACK) as running:
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
        proxy = thread.proxy((LOOPBACK, port), names_control=False)
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
        proxy = thread.proxy(free.getsockname(), names_control=False)
        with pytest.raises(ConnectionResetError), connected(proxy) as client:
            client.recv(10)


@pytest.mark.parametrize("filler", [b"", bytes(50), bytes(500), bytes(300_000)])
def test_the_proxy_of_a_side_channel_stands_before_the_control_socket_too(thread: ProxyThread, filler: bytes) -> None:
    """Short frames, long ones, and those that come in pieces; what is no handshake passes as it is."""
    context = zmq.Context()
    try:
        side, control = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (side, control)]
        proxy = thread.proxy((LOOPBACK, ports[0]), names_control=True)
        asker = context.socket(zmq.REQ)
        asker.connect(f"tcp://127.0.0.1:{proxy.port}")
        actor = {"life": "x", "control_host": "10.0.0.1", "control_port": ports[1]}
        payload = {"agent_metadata_bytes": filler, "actor": actor}
        for said in (payload, {"error": "none"}, [1, 2]):
            asker.send(b"get")
            sender, empty, _ = side.recv_multipart()
            side.send_multipart([sender, empty, msgspec.msgpack.encode(said), b"clock"])
            heard, clock = asker.recv_multipart()
            assert clock == b"clock"
            if said is payload:
                assert proxy.control is not None
                moved = {"life": "x", "control_host": LOOPBACK, "control_port": proxy.control.port}
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


def call(engine: str, usage: Usage = Usage.PLAIN, *, is_right: bool | None = None, **others: Any) -> Call:
    return Call(
        engine=engine, name="a", usage=usage, is_right=is_right, **({"at_seconds": 0.0, "seconds": 0.5} | others)
    )


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


# --- drains -----------------------------------------------------------------------------------------------------------

DRAINED = Drain(
    engine="p0", way=SIGTERM, from_seconds=100.0, to_seconds=110.0, lent_first=3, lent_last=0, end="by itself"
)


def failed(**others: Any) -> Call:
    """A plain request with p0, in the middle of its drain."""
    return call("fail", **({"prefill": "p0", "at_seconds": 105.0, "error": "HTTP 500"} | others))


def drained(*calls: Call, drain: Drain = DRAINED, disturbances: Sequence[Disturbance] = ()) -> Report:
    report = Report(connector="ours", seed=1, seconds=1.0, drains=[drain])
    report.count(Results([call("fail", is_right=True), call("recompute", is_right=True), *calls]), disturbances)
    return report


def test_a_drain_during_which_a_request_fails_breaks_a_promise() -> None:
    report = drained(failed())
    (said,) = report.broken_promises
    assert said == "p0, drained by SIGTERM at 100 s: fail answered a of 105.0 s with HTTP 500"
    assert drained(failed(at_seconds=90.0, seconds=10.5)).broken_promises, "it was served when the drain began"
    assert "SIGTERM: over, no prefill(s) still lent" in render([report])


@pytest.mark.parametrize(
    "seen",
    [
        failed(error=""),
        failed(prefill="p1"),
        failed(prefill=""),
        failed(at_seconds=111.0),
        failed(at_seconds=90.0),
        failed(usage=Usage.LATE),
    ],
    ids=["no failure", "another engine", "no engine", "too late", "too early", "by its client"],
)
def test_what_fails_elsewhere_is_not_held_against_a_drain(seen: Call) -> None:
    assert drained(seen).broken_promises == []


@pytest.mark.parametrize(
    ("disturbance", "is_excuse"),
    [
        (Disturbance("p0", 104.0, 106.0), True),
        (Disturbance("p0", 90.0, 100.0), True),
        (Disturbance("p0", 90.0, 98.0), False),
        (Disturbance("p0", 105.6, 107.0), False),
        (Disturbance("p1", 104.0, 106.0), False),
    ],
    ids=["meanwhile", "at most a lease before", "more than a lease before", "afterwards", "to another engine"],
)
def test_what_else_was_done_to_the_engine_explains_a_failure(disturbance: Disturbance, is_excuse: bool) -> None:
    report = drained(failed(), disturbances=[disturbance])
    assert (report.broken_promises == []) is is_excuse
    assert report.excused_in_drains == is_excuse


def test_an_engine_that_could_not_be_asked_is_ended_with_what_it_lends() -> None:
    not_asked = msgspec.structs.replace(DRAINED, way=COMMAND, lent_last=None, problem="no answer")
    assert drained(failed(), drain=not_asked).broken_promises == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lent_last": None}, "p0, drained by SIGTERM at 100 s: its drain was not over 10 s later"),
        ({"end": "killed"}, "p0, drained by SIGTERM at 100 s: it had to be killed"),
    ],
)
def test_a_drain_that_does_not_end_breaks_a_promise(changes: dict[str, Any], said: str) -> None:
    assert drained(drain=msgspec.structs.replace(DRAINED, **changes)).broken_promises == [said]


def test_what_was_lent_at_the_end_and_how_the_processes_ended_is_told() -> None:
    report = drained(drain=msgspec.structs.replace(DRAINED, lent_last=2, end="killed in their teardown"))
    assert report.broken_promises == []
    assert "SIGTERM: over, 2 prefill(s) still lent" in render([report])
    assert "SIGTERM: processes ended, killed in their teardown" in render([report])


def test_threads_sockets_and_files_that_are_left() -> None:
    few = Process(pid=1, threads=10, sockets=10, files=20, resident_bytes=1)
    many = msgspec.structs.replace(few, threads=12, sockets=13, files=21)
    assert grown({SERVER: few, WORKER: few}, {SERVER: few, WORKER: few}) == []
    assert grown({SERVER: many, WORKER: many}, {SERVER: few, WORKER: few}) == []
    of_server = ["API server: 3 more sockets", "API server: 1 more files"]
    of_worker = ["worker: 2 more threads", "worker: 3 more sockets", "worker: 1 more files"]
    left = of_server + of_worker
    assert grown({SERVER: few, WORKER: few}, {SERVER: many, WORKER: many}) == left
    assert grown({SERVER: few, WORKER: few}, {SERVER: many, WORKER: many}, worker_sockets=2) == left
    named = msgspec.structs.replace(many, names={"threads": {"a": 1, "b": 2}, "files": {"/dev/null": 1}})
    assert grown({WORKER: few}, {WORKER: named})[0] == "worker: 2 more threads (1 a, 2 b)"
    left.remove("worker: 3 more sockets")
    assert grown({SERVER: few, WORKER: few}, {SERVER: many, WORKER: many}, worker_sockets=3) == left


def met(decode: str, at: float, **others: Any) -> TransitionRecord:
    """A decode engine has connected to the prefill engine."""
    values = {"machine": "peer", "subject": "p0", "from_state": "handshaking", "to_state": "ready"} | others
    event = values.pop("event", "HandshakeSucceeded")
    return TransitionRecord(
        seq=0, wall=at, mono_ns=0, engine_id=decode, rank=0, role="kv_consumer", event=event, **values
    )


def test_sockets_of_connections_that_were_made_anew_are_not_the_connectors() -> None:
    life = Life("p0", 100.0, 200.0)
    each = {"fail": 1, "recompute": 2}
    once = [met("fail", 110.0), met("recompute", 111.0)]
    assert sockets_of_reconnections(once, life, each) == 0
    before_and_after = [met("fail", 99.0), met("recompute", 201.0)]
    others = [met("fail", 120.0, subject="p1"), met("fail", 120.0, event="HandshakeFailed", to_state="backoff")]
    assert sockets_of_reconnections([*once, *before_and_after, *others], life, each) == 0
    again = [met("fail", 120.0), met("fail", 130.0), met("recompute", 140.0)]
    assert sockets_of_reconnections([*once, *again], life, each) == 2 * 1 + 1 * 2
    tried = met("recompute", 150.0, event="HandshakeFailed", to_state="backoff", reason="FirstReadNeverEnded")
    assert sockets_of_reconnections([*once, *again, tried], life, each) == 2 * 1 + 2 * 2


def peer(engine_id: str) -> PeerRow:
    return PeerRow(
        engine_id=engine_id,
        address="10.0.0.1:5600",
        state="ready",
        since_seconds=1.0,
        failure=None,
        detail=None,
        failures=0,
        backoff_seconds=None,
        is_builtin=False,
        is_retiring=False,
        ranks=1,
        requests=0,
        queued=0,
        holds=0,
        reads=0,
        quarantined_requests=0,
        quarantined_blocks=0,
        unasked_seconds=1.0,
    )


def worker(counts: dict[str, int], *peers: PeerRow) -> EngineReport:
    """What it says of itself and of those it knows."""
    row = EngineRow(
        engine_id="fail",
        rank=0,
        tp_rank=0,
        pp_rank=0,
        tp_size=1,
        uptime_seconds=5.0,
        recorded_seconds=5.0,
        stopped=None,
        facts=EngineFacts(),
        counts=EngineCounts(**counts),
        peers_by_state={},
        leases_by_state={},
    )
    return EngineReport(address=Address("10.0.0.1", 5600), ranks=(RankReport(rank=(0, 0), rows=(row, *peers)),))


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, []),
        ({"leases": 1, "read_handles": 2}, ["2 read handles", "1 leases"]),
        ({"remote_agents": 3}, ["3 remote agents, not 2"]),
        ({"remote_descriptor_lists": 4}, ["4 remote descriptor lists, not 2"]),
        ({"local_descriptor_lists": 2}, ["2 local descriptor lists, not 1"]),
    ],
    ids=str,
)
def test_what_a_worker_must_not_hold_at_rest(counts: dict[str, int], said: list[str]) -> None:
    """It is connected to two ranks, of engines that live."""
    at_rest = {"remote_agents": 2, "remote_descriptor_lists": 2, "local_descriptor_lists": 1, "local_prefills": 9}
    peers = [peer(name) for name in ("p0", "p1")]
    assert left_in_connector(worker(at_rest | counts, *peers), {"p0", "p1"}) == said
    assert left_in_connector(worker(at_rest | counts, *peers), {"p0"}) == [*said, "peer p1 (ready)"]


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
