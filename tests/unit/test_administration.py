"""`nixl-actor drain` and `nixl-actor meet`: at engines that say nothing they end when they were told to; of several
engines each is asked, and a name that several have is nobody's."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import msgspec
import pytest
import trio
from typer.testing import CliRunner

from connector.clock import to_ns
from connector.tools import administration
from connector.tools.asking import Address
from connector.tools.cli.main import app
from connector.tools.live import Question, survey
from connector.wire.administration import MEET_PLACES_MAX, PROBLEM_LENGTH_MAX, MeetReport, PlaceRow, decode_meet_report
from connector.wire.bounded import HOST_LENGTH_MAX, ID_LENGTH_MAX
from connector.wire.handshake import encode_payload, encode_reply, parse_request
from connector.wire.metadata import encode_agent_metadata
from statemachine.granting import LentCounts
from tests.rig.facts import facts
from tests.rig.listener import make_listener_thread, one_rank
from tests.rig.name_server import name_server
from tests.rig.network import free_port
from tests.rig.patience import PATIENCE_SECONDS
from tests.unit.test_wire_handshake import METADATA

HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
def long_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an option each answer may take so long that nobody takes a machine that stands still for it."""
    monkeypatch.setattr(administration, "ASK_SECONDS", 4 * PATIENCE_SECONDS)


@pytest.fixture
def silent() -> Iterator[str]:
    """Accepts connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.usefixtures("long_answers")
@pytest.mark.parametrize("command", ["drain", "meet"])
def test_the_timeout_bounds_the_first_question_too(silent: str, command: str) -> None:
    begun = time.monotonic()
    places = ["127.0.0.1:1"] * (command == "meet")
    answer = CliRunner().invoke(app, [command, silent, *places, "--timeout", "0.2"])
    assert time.monotonic() - begun < PATIENCE_SECONDS
    assert answer.exit_code == 2
    assert answer.output == f"{silent}: no answer within 0.2 s: it hangs or is stopped, or cannot be reached\n"


class HangingNames:
    """A side channel whose listener answers, while the name of the control socket's host is looked up for long."""

    async def ask(self, frames: Sequence[bytes]) -> tuple[bytes, ...]:
        return encode_reply(encode_payload("hash", encode_agent_metadata(METADATA), facts()), 5.0)

    def connect(self, host: str, port: int) -> HangingNames:
        return self

    async def open_link(self, host: str, port: int, server_key: str | None = None) -> NoReturn:
        await trio.sleep(administration.ASK_SECONDS)
        raise AssertionError("nobody waits for so long")

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("long_answers")
def test_a_name_server_that_hangs_keeps_nobody_from_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "ZmqSideChannel", lambda access: HangingNames())
    begun = time.monotonic()
    answer = CliRunner().invoke(app, ["meet", "127.0.0.1:1", "127.0.0.1:2", "--timeout", "0.2"])
    assert time.monotonic() - begun < PATIENCE_SECONDS
    assert answer.exit_code == 2
    assert answer.output == "PP 0 TP 0 of the engine at 127.0.0.1:1 did not answer at 10.0.0.1:40000 within 0.2 s\n"


class Ranks:
    """A side channel of an engine of two ranks. One meets a place for ever unless the other one is asked, too."""

    def __init__(self) -> None:
        self._asked: set[int] = set()

    async def ask(self, frames: Sequence[bytes]) -> tuple[bytes, ...]:
        rank = parse_request(frames).tp_rank
        said = facts(tp_size=2, tp_rank=rank, control_port=40_000 + rank)
        return encode_reply(encode_payload("hash", encode_agent_metadata(METADATA), said), 5.0)

    def connect(self, host: str, port: int) -> Ranks:
        return self

    async def open_link(self, host: str, port: int, server_key: str | None = None) -> RankLink:
        return RankLink(port - 40_000, self._asked)

    def close(self) -> None:
        pass


class RankLink:
    def __init__(self, rank: int, asked: set[int]) -> None:
        self._rank, self._asked = rank, asked

    def send(self, frames: Sequence[bytes]) -> None:
        self._asked.add(self._rank)

    async def receive(self) -> Sequence[bytes]:
        state = "met" if len(self._asked) == 2 else "meeting"
        row = PlaceRow(place="127.0.0.1:2", state=state, engine_id="p", problem="")
        return (msgspec.msgpack.encode(MeetReport(rows=(row,))),)

    def close(self) -> None:
        pass


def test_the_longest_report_is_read() -> None:
    row = PlaceRow(
        place=HOST_LENGTH_MAX * "h" + ":65535",
        state="connecting",
        engine_id=ID_LENGTH_MAX * "\N{ROCKET}",
        problem=PROBLEM_LENGTH_MAX * "\N{ROCKET}",
        kind="HandshakeMalformed",
    )
    report = MeetReport(rows=MEET_PLACES_MAX * (row,))
    assert decode_meet_report([msgspec.msgpack.encode(report)]) == report


def test_no_rank_waits_until_another_one_has_met_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "ZmqSideChannel", lambda access: Ranks())
    reports = administration.meet(Address("127.0.0.1", 1), ["127.0.0.1:2"], timeout_seconds=30.0)
    assert {rank: report.rows[0].state for rank, report in reports.items()} == {(0, 0): "met", (0, 1): "met"}


@contextmanager
def engines(
    *places: tuple[str, int], count: Callable[[], LentCounts] = lambda: LentCounts(0, 0), grace_seconds: float = 60.0
) -> Iterator[None]:
    """Their listeners, and no worker: who could not be told that the engine drains is not waited for."""
    with ExitStack() as stack:
        for host, port in places:
            told = one_rank("127.0.0.1", free_port())
            told.agent_metadata = encode_agent_metadata(METADATA)
            ranks = {(0, 0): told}
            listener = make_listener_thread(host, port, ranks, count=count, grace_ns=to_ns(grace_seconds))
            listener.start()
            stack.callback(listener.stop)
        yield


def test_several_engines_drain_at_once_and_each_line_says_of_which_it_is() -> None:
    """As those of a data-parallel deployment do, one port after another."""
    ports = [free_port(), free_port()]
    names = [f"127.0.0.1:{port}" for port in ports]
    with engines(*(("127.0.0.1", port) for port in ports)):
        answer = CliRunner().invoke(app, ["drain", *names])
    assert answer.exit_code == 0, answer.output
    last = {line.rpartition(": drained after ")[0] for line in answer.output.splitlines() if "drained after" in line}
    assert last == set(names)


def test_one_that_does_not_answer_keeps_no_other_from_draining() -> None:
    port, nobody = free_port(), free_port()
    with engines(("127.0.0.1", port)):
        answer = CliRunner().invoke(app, ["drain", f"127.0.0.1:{nobody}", f"127.0.0.1:{port}"])
    assert answer.exit_code == 2
    assert f"127.0.0.1:{nobody}: nothing listens there" in answer.output
    assert f"127.0.0.1:{port}: drained after" in answer.output


def test_one_whose_grace_period_ends_with_something_lent_is_said_by_the_status() -> None:
    port = free_port()
    with engines(("127.0.0.1", port), count=lambda: LentCounts(2, 0), grace_seconds=0.2):
        answer = CliRunner().invoke(app, ["drain", f"127.0.0.1:{port}"])
    assert answer.exit_code == 1
    assert "2 prefill(s) are still lent, and the grace period is over" in answer.output


def test_who_waits_no_longer_for_one_is_told_that_it_has_not_drained() -> None:
    port = free_port()
    with engines(("127.0.0.1", port), count=lambda: LentCounts(2, 0)):
        answer = CliRunner().invoke(app, ["drain", f"127.0.0.1:{port}", "--timeout", "1"])
    assert answer.exit_code == 1
    assert "not drained in the time (--timeout): 2 prefill(s) are still lent" in answer.output


@pytest.mark.parametrize("answering", [0, 3])
def test_an_engine_that_still_answers_clients_is_not_said_to_be_at_its_end(answering: int) -> None:
    """A decode engine, or one of both roles: draining does not wait for its own requests."""
    port = free_port()
    with engines(("127.0.0.1", port), count=lambda: LentCounts(0, 0, answering)):
        answer = CliRunner().invoke(app, ["drain", f"127.0.0.1:{port}"])
    assert answer.exit_code == 0
    (line,) = [each for each in answer.output.splitlines() if each.startswith("drained after")]
    assert line.endswith("the engine may be ended") is (not answering)
    assert ("3 request(s) whose answers it writes end with the engine" in line) is bool(answering)


@pytest.mark.parametrize("command", ["drain", "meet"])
def test_a_name_of_several_engines_is_refused_and_changes_nothing(command: str) -> None:
    port = free_port()
    places = ["127.0.0.1:1"] * (command == "meet")
    asked: list[None] = []

    def count() -> LentCounts:
        asked.append(None)
        return LentCounts(0, 0)

    with name_server(), engines(*((host, port) for host in HOSTS), count=count):
        answer = CliRunner().invoke(app, [command, f"several:{port}", *places])
    assert answer.exit_code == 2
    assert answer.output == (
        f"several:{port} is 2 engines; name each that you mean: 127.0.0.1:{port}, 127.0.0.2:{port}\n"
    )
    assert not asked


def test_all_engines_of_a_name_are_asked() -> None:
    """The name of a headless Service is that of all its pods; a request is on one of them."""
    port = free_port()
    with name_server(), engines(*((host, port) for host in HOSTS)):
        addresses = [Address("several", port), Address("found", port)]
        found = survey(addresses, [Question(what="engine")], seconds=PATIENCE_SECONDS)
    assert [each.address for each in found.engines] == [
        *(Address(host, port) for host in HOSTS),
        Address("found", port),
    ]
    assert [each.problem for each in found.engines] == [None] * 3


def test_a_name_that_nobody_finds_is_reported_as_before() -> None:
    with name_server():
        found = survey([Address("unknown", 5600)], [Question(what="engine")], seconds=PATIENCE_SECONDS)
    (engine,) = found.engines
    assert engine.problem_kind == "AddressNotResolved"
