"""Questions about what lives, asked over real sockets of engines of real actors and real NIXL."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import trio

from connector.config import ConnectorOptions
from connector.ports.side_channel import ReplyAddress
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.protocol import LoadFailed, LocalPrefill, LocalPrefillsSeen, RoomFound, RoomLacking
from connector.runtime.inspector import LISTS_KEPT, QUESTIONS_OF_ONE_MAX, QUESTIONS_WAITING_MAX
from connector.runtime.introducer import kind_of
from connector.tools.asking import Address
from connector.tools.cli.tables import tables
from connector.tools.diagnosis import diagnose
from connector.tools.explanation import explain, find, live_of
from connector.tools.live import Question, Survey, opened_surveyor
from connector.wire.control import decode_request, encode_request
from connector.wire.inspection import (
    ROWS_MAX,
    WHATS,
    AnyRow,
    EngineFacts,
    EngineRow,
    HoldRow,
    Inspect,
    IntroductionRow,
    LeaseRow,
    LocalPrefillRow,
    PeerRow,
    QuarantineRow,
    ReadRow,
    RecordRow,
    RequestRow,
    What,
    WithoutRoomRow,
    decode_inspected,
)
from statemachine.failures import DeviceMemoryExhausted
from tests.actors.engines import HOST, Engine, WarpedClock, engine, lend_by_all, parallel_engine, until
from tests.actors.late_reads import Answer, LateReads
from tests.actors.test_pull import run
from tests.rig.network import free_port

OPTIONS = ConnectorOptions(
    transfer_retries=0, request_timeout_seconds=3.0, quiesce_timeout_seconds=0.5, backoff_initial_seconds=0.1
)
UPTIME = re.compile(r'"uptime_seconds": ?[0-9.]+|goes-away/0 +\S+ +[0-9.]+ (?:m?s|min [0-9]+ s)')
"""In what `ps` prints, of an engine that answers."""
LEAP_SECONDS = 10.0
"""More than a test takes, and less than a lease time."""
EVERYTHING = tuple(Question(what=what) for what in WHATS)


def address_of(engine: Engine) -> Address:
    return Address(HOST, engine.address.port)


async def asked(*engines: Engine, questions: tuple[Question, ...] = EVERYTHING) -> Survey:
    async with opened_surveyor(seconds=30.0) as surveyor:
        found = await surveyor.survey([address_of(each) for each in engines], questions)
    assert [error for each in engines for error in each.crashes] == []
    assert [rank.problem for each in found.engines for rank in each.ranks if rank.problem] == []
    return found


def test_a_request_that_was_served_is_shown_on_both_sides() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", serves=True) as d:
            d.borrow("a-request", lend_by_all([p], "a-lease"), p.address, [1, 2], [3, 4])
            await until(lambda: p.sent("a-lease"))
            found = await asked(d)
            assert [each.problem for each in found.engines] == [None, None]
            assert [each.engine_id for each in found.engines] == ["d", "p"]
            of_d, of_p = found.engines
            assert of_p.named_by == ("d",)
            (peer,) = of_d.of(PeerRow)
            assert (peer.engine_id, peer.state, peer.requests, peer.holds) == ("p", "ready", 0, 0)
            assert not of_d.of(RequestRow)
            assert not of_p.of(LeaseRow)
            held = "remote_agents", "remote_descriptor_lists", "local_descriptor_lists", "read_handles"
            for side, counts in ((of_d, (1, 1, 1, 0)), (of_p, (0, 0, 0, 0))):
                (row,) = side.of(EngineRow)
                assert tuple(getattr(row.counts, name) for name in held) == counts, side.engine_id
            paths = {
                machine: [row.record.to_state for row in reversed(side.of(RecordRow)) if row.record.machine == machine]
                for side, machine in ((of_d, "request"), (of_d, "hold"), (of_p, "lease"))
            }
            # The bytes may be here before the answer that P keeps the blocks.
            assert [state for state in paths["request"] if state != "proving"] == [
                "pending_handshake",
                "reading",
                "done",
            ]
            assert paths["hold"][-1] == "released"
            assert paths["lease"] == ["computing", "held", "done"]

    run(test)


class Terminal:
    """A command in a terminal of its own, and everything that it has printed there."""

    def __init__(self, *arguments: str) -> None:
        self.text = ""
        self._ours, theirs = os.openpty()
        environment = os.environ | {"COLUMNS": "300", "LINES": "50", "TERM": "xterm"}
        # What runs in the background may have been told to ignore Ctrl-C, and hands that on.
        command = ["env", "--default-signal=INT", sys.executable, "-m", "connector", *arguments]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # that is how a terminal says that nobody is left
            while said := os.read(self._ours, 1 << 16):
                self.text += said.decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._ours)


@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "screen"])
def test_ps_looks_again_until_ctrl_c_also_when_the_engine_has_gone(form: list[str]) -> None:
    async def test() -> None:
        async with engine("goes-away", serves=True) as p:
            watch = ["ps", "--watch", "--interval", "0.1", "--engine", str(address_of(p)), *form]
            terminal = Terminal(*watch)
            stack.callback(terminal.close)
            # Each look shows it anew: the engine's id once in a table, and how long it has been up.
            await until(lambda: len(set(UPTIME.findall(terminal.text))) >= 3, seconds=60)
            assert "nothing listens" not in terminal.text
        await until(lambda: terminal.text.count("nothing listens") >= 3, seconds=60)
        assert terminal.process.poll() is None
        terminal.process.send_signal(signal.SIGINT)
        assert await until(lambda: terminal.process.poll() is not None, seconds=60)
        assert terminal.process.returncode == 0
        for word in ("Traceback", "Aborted"):
            assert word not in terminal.text

    with contextlib.ExitStack() as stack:
        run(test)


def test_what_waits_is_shown_with_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        options = ConnectorOptions(request_timeout_seconds=60.0)
        async with engine("p", serves=True) as p, engine("d", serves=True, options=options) as d:
            d.borrow("before", lend_by_all([p], "before"), p.address, [1], [1])
            await until(lambda: d.received("before"))
            late = LateReads(monkeypatch, d.port.agent_name, Answer.IN_FLIGHT)
            d.borrow("reads", lend_by_all([p], "lent-reads"), p.address, [4, 6, 9], [1, 3, 5])
            d.wait_for("waits", lend_by_all([p], "lent-waits"), p.address)
            await until(lambda: late.posted)
            for name in ("lent-reads", "lent-waits"):
                await until(lambda name=name: d.trace.path("hold", f"{name}/0")[-1:] == ["held"])
            await trio.sleep(0.2)
            found = await asked(d, p)
            of_d, of_p = found.engines
            rows = {row.request_id: row for row in of_d.of(RequestRow)}
            assert set(rows) == {"reads", "waits"}
            reads, waits = rows["reads"], rows["waits"]
            assert (reads.state, reads.waits_for, reads.blocks, reads.reads) == ("reading", "reads", 3, 1)
            assert reads.since_seconds is not None
            assert reads.since_seconds >= 0.1
            assert reads.until_seconds is not None
            assert 50 < reads.until_seconds < 60
            assert reads.proven_seconds is not None
            assert reads.proven_seconds > 10
            assert (waits.state, waits.waits_for, waits.until_seconds) == ("queued", "scheduler", None)
            assert (waits.peer, waits.remote_request_id, waits.lease_number) == ("p", "lent-waits", 1)
            (peer,) = of_d.of(PeerRow)
            assert (peer.requests, peer.queued, peer.loading_blocks, peer.quarantined_blocks) == (1, 1, 3, 0)
            (shown,) = [table for table in tables(found) if table.title == "Peers"]
            cells = {column.header: list(column.cells) for column in shown.columns}
            assert (cells["loading blocks"], cells["quarantined blocks"]) == (["3"], ["0"])
            (read,) = of_d.of(ReadRow)
            assert (read.request_id, read.peer) == ("reads", "p")
            assert read.age_seconds >= 0.1
            assert {row.remote_request_id: row.state for row in of_d.of(HoldRow)} == {
                "lent-reads": "held",
                "lent-waits": "held",
            }
            leases = {row.request_id: row for row in of_p.of(LeaseRow)}
            assert set(leases) == {"lent-reads", "lent-waits"}
            (holder,) = leases["lent-reads"].holders
            assert (holder.engine_id, holder.ranks, holder.released_count) == ("d", 1, 0)
            assert (holder.address, holder.is_connected) == ("127.0.0.1", True)
            assert of_p.of(EngineRow)[0].leases_by_state == {"held": 2}
            late.let_go()
            monkeypatch.undo()

    run(test)


def test_a_quarantine_is_shown_until_it_is_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", serves=True, options=OPTIONS) as d:
            d.borrow("before", lend_by_all([p], "before"), p.address, [1], [1])
            await until(lambda: d.received("before"))
            late = LateReads(monkeypatch, d.port.agent_name, Answer.IN_FLIGHT)
            d.borrow("a", lend_by_all([p], "remote-a"), p.address, [4, 6, 9], [1, 3, 5])
            await until(lambda: d.received("a"))
            found = await asked(d)
            (row,) = found.engines[0].of(QuarantineRow)
            assert (row.request_id, row.remote_request_id, row.peer, row.blocks) == ("a", "remote-a", "p", 3)
            assert found.engines[0].of(EngineRow)[0].counts.quarantined_blocks == 3
            late.let_go()

            async def is_lifted() -> bool:
                return not (await asked(d)).engines[0].of(QuarantineRow)

            with trio.fail_after(10.0):
                while not await is_lifted():
                    await trio.sleep(0.1)

    run(test)


def test_why_a_request_waits_behind_a_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose blocks cannot be had, because READs do not end: what `why` says of it, and of the one that failed."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", serves=True, options=OPTIONS) as d:
            d.borrow("before", lend_by_all([p], "before"), p.address, [1], [1])
            await until(lambda: d.received("before"))
            late = LateReads(monkeypatch, d.port.agent_name, Answer.IN_FLIGHT)
            d.borrow("stuck", lend_by_all([p], "lent-stuck"), p.address, [4, 6, 9], [1, 3, 5])
            d.wait_for("waits", lend_by_all([p], "lent-waits"), p.address)
            await until(lambda: d.received("stuck"))
            records, live = live_of((await asked(d)).rows())
            (waits,) = (explain(case, live) for case in find("waits", records, live))
            assert waits.cause.startswith("Quarantined: 3")
            assert "because READs from p have not ended" in waits.cause
            (stuck,) = (explain(case, live) for case in find("stuck", records, live))
            assert stuck.cause.startswith("Quarantined: READs from prefill engine p did not end in time")
            late.let_go()
            monkeypatch.undo()

    run(test)


def test_a_request_that_was_read_and_could_not_be_finished_is_not_said_to_be_loaded() -> None:
    """Its READs have ended well, and the device had no memory: `why` ended with status 0."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", serves=True) as d:
            for name in ("fails", "loads"):
                d.borrow(name, lend_by_all([p], f"lent-{name}"), p.address, [1], [1])
                await until(lambda name=name: d.received(name))
            d.supervisor.deliver(LoadFailed(request_id="fails", failure=DeviceMemoryExhausted(error="no memory")))
            records, live = live_of((await asked(d)).rows())
            for text, kind in (("fails", "DeviceMemoryExhausted"), ("loads", None)):
                assert [explain(case, live).kind for case in find(text, records, live)] == [kind]

    run(test)


async def holds_are(d: Engine, state: str) -> Survey:
    """Of D, with what else is said then."""
    while True:
        found = await asked(d)
        if [row.state for row in found.engines[0].of(HoldRow)] == [state]:
            return found
        await trio.sleep(0.05)


def test_why_a_queued_request_will_fail_whose_prefill_engine_has_ended() -> None:
    """D knows before vLLM schedules it, and what P has promised before is worth nothing any more."""

    async def test() -> None:
        async with engine("d", serves=True, options=OPTIONS) as d:
            async with engine("p", serves=True) as p:
                d.wait_for("waits", lend_by_all([p], "lent-waits"), p.address)
                await holds_are(d, "held")
            found = await holds_are(d, "gone")
            (row,) = found.engines[0].of(RequestRow)
            assert (row.state, row.proven_seconds) == ("queued", None)
            assert found.engines[0].of(HoldRow)[0].proven_seconds is None
            records, live = live_of(found.rows())
            (waits,) = (explain(case, live) for case in find("waits", records, live))
            assert waits.cause.startswith("PeerLeaving: prefill engine p does not keep its blocks any more")
            while [row.state for row in found.engines[0].of(PeerRow)] != ["idle"]:
                await trio.sleep(0.05)
                found = await asked(d)
            answers = [each for each in diagnose(found) if each.check in ("answers", "peers")]
            assert [(each.level, each.what.partition(") ")[2]) for each in answers] == [
                ("note", "has ended, as it had said")
            ]

    run(test)


def test_two_peers_that_share_an_engine_id_have_each_its_own_times() -> None:
    """Requests that describe one engine with different sizes lead to two peers."""

    async def test() -> None:
        clock = WarpedClock()
        options = ConnectorOptions(incompatible_backoff_seconds=60.0)
        async with engine("p", serves=True) as p, engine("d", serves=True, options=options, clock=clock) as d:
            lent = lend_by_all([p], "lent")
            d.wait_for("first", lent, p.address)
            first = await holds_are(d, "held")
            assert [row.state for row in first.engines[0].of(PeerRow)] == ["ready"]
            clock.leap(LEAP_SECONDS)
            d.wait_for("second", lent, msgspec.structs.replace(p.address, tp_size=2))
            await until(lambda: d.trace.path("peer", "p")[-1:] == ["incompatible"])
            of_d = (await asked(d)).engines[0]
            since_seconds = {row.state: row.since_seconds for row in of_d.of(PeerRow)}
            assert set(since_seconds) == {"ready", "incompatible"}
            assert since_seconds["ready"] > LEAP_SECONDS > since_seconds["incompatible"]

    run(test)


def test_every_rank_of_an_engine_is_asked() -> None:
    async def test() -> None:
        async with parallel_engine("p", 2, serves=True) as ranks:
            lend_by_all(ranks, "lent")
            found = await asked(ranks[0])
            (of_p,) = found.engines
            assert [(each.tp_rank, each.tp_size) for each in of_p.of(EngineRow)] == [(0, 2), (1, 2)]
            assert [each.request_id for each in of_p.of(LeaseRow)] == ["lent", "lent"]

    run(test)


def test_a_name_that_an_engine_advertises_is_resolved_before_there_is_traffic() -> None:
    """The tool has reached both by their addresses."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", serves=True) as d:
            for each, host in ((p, "no-such-host.invalid"), (d, "localhost")):
                each.supervisor._inspector._facts = EngineFacts(side_channel=f"{host}:{each.address.port}")
            of_p, of_d = (await asked(p, d)).engines
            assert of_p.not_resolved
            assert of_d.not_resolved is None

    run(test)


def test_two_addresses_of_one_engine_are_told_from_two_engines() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", serves=True) as d:
            for each in (p, d):
                facts = EngineFacts(
                    host_name="here", process_id=os.getpid(), side_channel=f"{HOST}:{each.address.port}"
                )
                each.supervisor._inspector._facts = facts
            async with opened_surveyor(seconds=30.0) as surveyor:
                addresses = [address_of(p), Address("localhost", p.address.port), address_of(d)]
                found = await surveyor.survey(addresses, EVERYTHING)
            (finding,) = [each for each in diagnose(found) if each.level == "problem"]
            assert (finding.check, finding.engines) == ("one engine", ("p",))
            for given in addresses[:2]:
                assert str(given) in finding.what

    run(test)


def test_only_what_matches_is_shown_and_pages_are_followed() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p:
            for number in range(600):
                p.lend(f"lent-{number:03}")
            everything = await asked(p, questions=(Question(what="leases"),))
            assert [row.request_id for row in everything.engines[0].of(LeaseRow)] == [
                f"lent-{number:03}" for number in range(600)
            ]
            some = await asked(p, questions=(Question(what="leases", match="ent-12"), Question(what="engine")))
            assert [row.request_id for row in some.engines[0].of(LeaseRow)] == [f"lent-12{n}" for n in range(10)]
            few = await asked(p, questions=(Question(what="records", match="lent-599", rows_max=1),))
            (row,) = few.engines[0].of(RecordRow)
            assert (row.record.subject, row.record.to_state) == ("lent-599", "held")

    run(test)


def test_a_newer_tool_is_told_that_there_are_no_rows_of_a_kind_that_came_later() -> None:
    """Without an answer it would wait until its time is over, and tell of nothing that it was to ask afterwards."""

    async def test() -> None:
        async with engine("p", serves=True) as p:
            p.lend("lent")
            question = decode_request(encode_request(Inspect(number=7, what="added_later", match="lent")))
            assert isinstance(question, Inspect)
            (frame,) = await p.supervisor._inspector._answer(question, b"tool")
            told = msgspec.msgpack.decode(frame)
            assert (told["number"], told["what"], told["rows"], told["next"]) == (7, "added_later", [], None)

    run(test)


async def pages(p: Engine, what: What, between: Callable[[], Awaitable[None]]) -> list[AnyRow]:
    """All that P tells of one kind, to a tool that lets something happen between two answers."""
    inspector, rows = p.supervisor._inspector, list[AnyRow]()
    first: int | None = 0
    while first is not None:
        (frame,) = await inspector._answer(Inspect(number=1, what=what, first=first), b"tool")
        answer = decode_inspected([frame])
        assert answer.first == first
        rows += answer.rows
        first = answer.next
        await between()
    assert not inspector._lists
    return rows


def test_what_lives_all_the_while_is_told_whatever_ends_between_two_answers() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p:
            ended = 0

            async def end_the_oldest() -> None:
                nonlocal ended
                for number in range(ended, ended + 20):
                    p.hear("d", b"lent-%d:1" % number)
                ended += 20
                await until(lambda: p.sent(f"lent-{ended - 1}"))

            for number in range(1000):
                p.lend(f"lent-{number}")
            await until(lambda: len(p.supervisor._lease_keeper.leases()) == 1000 or None)
            told = [row.request_id for row in await pages(p, "leases", end_the_oldest) if isinstance(row, LeaseRow)]
            assert len(told) == len(set(told))
            assert {f"lent-{number}" for number in range(ended, 1000)} <= set(told)

    run(test)


def test_a_first_question_that_was_sent_again_is_answered_from_the_same_list() -> None:
    """Its answer was late. The tool has taken the first one and goes on from there."""

    async def test() -> None:
        async with engine("p", serves=True) as p:
            inspector = p.supervisor._inspector

            async def ask(number: int, first: int) -> list[str]:
                question = Inspect(number=number, what="without_room", first=first, rows=3)
                (frame,) = await inspector._answer(question, b"tool")
                return [row.request_id for row in decode_inspected([frame]).rows if isinstance(row, WithoutRoomRow)]

            for name in "abcdef":
                inspector.note_no_room(RoomLacking(request_id=name, num_tokens=1, quarantined=1, lent_back=0))
            assert await ask(1, 0) == ["a", "b", "c"]
            inspector.note_room("a")
            assert await ask(1, 0) == ["b", "c", "d"]
            assert await ask(2, 3) == ["d", "e", "f"]
            inspector.note_room("b")
            assert await ask(3, 0) == ["c", "d", "e"]

    run(test)


def test_no_step_is_told_twice_whatever_is_recorded_between_two_answers() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p:
            lent = 0

            async def lend_more() -> None:
                nonlocal lent
                for number in range(lent, lent + 200):
                    p.lend(f"lent-{number}")
                lent += 200
                await until(lambda: len(p.supervisor._lease_keeper.leases()) == lent or None)

            await lend_more()
            identities = [row.identity for row in await pages(p, "records", lend_more)]
            assert len(identities) > ROWS_MAX
            assert len(identities) == len(set(identities))

    run(test)


def test_who_goes_on_in_a_list_that_is_not_kept_is_told_all_of_another_one() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p:
            for number in range(600):
                p.lend(f"lent-{number}")
            inspector, asked_at = p.supervisor._inspector, list[int]()
            inspect = inspector.ask

            def forget_one(question: Inspect, reply_to: ReplyAddress) -> None:
                asked_at.append(question.first)
                if len(asked_at) == 3:
                    inspector._lists.clear()
                inspect(question, reply_to)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(inspector, "ask", forget_one)
                found = await asked(p, questions=(Question(what="leases"),))
            told = [row.request_id for row in found.engines[0].of(LeaseRow)]
            assert told == [f"lent-{number}" for number in range(600)]
            assert asked_at == [0, 256, 512, 256, 512]

    run(test)


def test_lists_are_kept_for_a_while_and_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p:
            for number in range(600):
                p.lend(f"lent-{number}")
            await until(lambda: len(p.supervisor._lease_keeper.leases()) == 600 or None)
            inspector = p.supervisor._inspector

            async def fill(kept_seconds: float) -> None:
                monkeypatch.setattr("connector.runtime.inspector.LIST_KEPT_SECONDS", kept_seconds)
                for number in range(LISTS_KEPT + 5):
                    await inspector._answer(Inspect(number=1, what="leases"), b"tool %d" % number)
                assert [tool for tool, _, _ in inspector._lists] == [b"tool %d" % n for n in range(5, LISTS_KEPT + 5)]
                # The next question of anybody wakes the inspector, which then looks at what it keeps by itself.
                await asked(p, questions=(Question(what="engine"),))

            await fill(60.0)
            assert inspector._lists
            await fill(0.2)
            await until(lambda: not inspector._lists or None, seconds=60)

    run(test)


def test_an_engine_that_serves_no_more_is_asked_all_the_same() -> None:
    """What a worker still knows is wanted most then."""

    async def test() -> None:
        async with engine("p", serves=True) as p:
            assert p.listener is not None
            p.listener.stop_serving("a device is gone")
            found = await asked(p)
            (report,) = found.engines
            assert (report.answers, report.engine_id, report.refusal) == (True, "p", "a device is gone")
            assert [each.what for each in diagnose(found) if each.check == "answers"] == [
                "p serves no KV any more: a device is gone"
            ]

    run(test)


async def until_refused(port: int) -> None:
    """ZMQ closes what it listens at a moment after it was told to."""
    with trio.fail_after(10):
        while True:
            try:
                stream = await trio.open_tcp_stream(HOST, port)
            except OSError:
                return
            await stream.aclose()
            await trio.sleep(0.01)


def test_who_finds_no_worker_behind_a_listener_is_told_that_the_engine_may_sleep() -> None:
    """As that of an engine that sleeps has no control socket."""

    async def test() -> None:
        async with engine("p", serves=True) as p:
            p.control.close()
            await until_refused(p.control.port)
            async with opened_surveyor(seconds=30.0) as surveyor:
                (report,) = (await surveyor.survey([address_of(p)], EVERYTHING)).engines
            assert report.first_problem == (
                f"its control socket at {HOST}:{p.control.port} cannot be reached: the connection was refused, or there"
                " is no way to the host; its worker has ended, or the engine sleeps"
            )

    run(test)


def test_who_waits_for_a_worker_that_takes_no_connection_is_told_what_that_may_be() -> None:
    """As that of one without descriptors: the kernel lets people connect, and nobody comes to the door."""

    async def test() -> None:
        async with engine("p", serves=True) as p:
            p.control.close()
            await until_refused(p.control.port)
            with socket.create_server((HOST, p.control.port)):
                async with opened_surveyor(seconds=1.0) as surveyor:
                    (report,) = (await surveyor.survey([address_of(p)], EVERYTHING)).engines
        for word in ("did not answer", "hangs or is stopped", "no file descriptor left", "a firewall"):
            assert word in report.first_problem

    run(test)


def test_requests_without_parameters_are_counted_and_the_last_ones_named() -> None:
    async def test() -> None:
        async with engine("d", serves=True) as d:
            named = (LocalPrefill(request_id="cmpl-x-0-1", reason="absent", tokens=7),)
            d.supervisor.deliver(LocalPrefillsSeen(count=3, named=named))
            found = await asked(d)
            (row,) = found.engines[0].of(LocalPrefillRow)
            assert (row.request_id, row.reason, row.tokens) == ("cmpl-x-0-1", "absent", 7)
            assert found.engines[0].of(EngineRow)[0].counts.local_prefills == 3

    run(test)


def test_a_request_that_lacks_room_is_told_of_until_it_has_it() -> None:
    async def test() -> None:
        async with engine("d", serves=True) as d:
            for name in ("one", "two"):
                d.supervisor.deliver(RoomLacking(request_id=name, num_tokens=900, quarantined=7, lent_back=2))
            d.supervisor.deliver(RoomFound(request_id="one"))
            (row,) = (await asked(d)).engines[0].of(WithoutRoomRow)
            assert (row.request_id, row.tokens, row.quarantined_blocks, row.lent_back_blocks) == ("two", 900, 7, 2)

    run(test)


def test_engines_that_are_to_be_met_are_shown_until_they_are() -> None:
    async def test() -> None:
        port, options = free_port(), ConnectorOptions(backoff_initial_seconds=0.05, backoff_max_seconds=0.1)
        place = f"{HOST}:{port}"

        async def shown(d: Engine) -> IntroductionRow | None:
            found = await asked(d, questions=(Question(what="engine"), Question(what="introductions")))
            (row,) = found.engines[0].of(IntroductionRow) or [None]
            assert [table.title for table in tables(found)] == ["Engines", *["To be met"] * (row is not None)]
            return row

        options = msgspec.structs.replace(options, known_peers=(place,))
        async with engine("d", serves=True, options=options) as d:
            await until(lambda: any(value.failures for value in d.supervisor._introducer.unmet()) or None)
            row = await shown(d)
            assert row is not None
            assert (row.place, row.engine_id, row.failure, row.is_builtin) == (place, "", None, False)
            assert row.detail
            async with engine("unlike", serves=True, port=port, head_bytes=64):
                await until(lambda: any(kind_of(value.problem) for value in d.supervisor._introducer.unmet()) or None)
                row = await shown(d)
                assert row is not None
                assert (row.engine_id, row.failure) == ("unlike", "Incompatible")
            async with engine("p", serves=True, port=port):
                await until(lambda: not d.supervisor._introducer.unmet() or None)
                assert await shown(d) is None

    run(test)


def test_one_tool_leaves_room_for_another() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p:
            inspector = p.supervisor._inspector
            for number in range(QUESTIONS_WAITING_MAX):
                inspector.ask(Inspect(number=number, what="records"), b"greedy")
            inspector.ask(Inspect(number=1, what="engine"), b"modest")
            waiting = [reply_to for _, reply_to in inspector._questions]
            assert waiting == [b"greedy"] * QUESTIONS_OF_ONE_MAX + [b"modest"]
            found = await asked(p)
            assert found.engines[0].answers

    run(test)


def test_nonsense_is_no_question_and_costs_nobody_else() -> None:
    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d", serves=True) as d:
            channel = ZmqSideChannel()
            try:
                link = await channel.open_link(HOST, p.control.port)
                for frames in ([b"\xc1"], [b"\x81\xa4type\xa7inspect"], [b"x" * 100_000], [b"a", b"b"]):
                    link.send(frames)
                await until(lambda: len(p.failures) >= 4)
                found = await asked(p)
                assert found.engines[0].answers
            finally:
                channel.close()
            d.borrow("after", lend_by_all([p], "after"), p.address, [1], [1])
            assert (await until(lambda: d.received("after"))).failure is None

    run(test)
