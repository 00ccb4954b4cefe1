"""Why an engine could not be asked: one kind and one sentence for each way in which a side channel fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from connector.ports.side_channel import (
    AccessRefused,
    ConnectionEnded,
    LinkEnded,
    NameNotResolved,
    NotASideChannel,
    PortRefused,
    SideChannelError,
)
from connector.ports.zmq_bridge.refusals import NO_KEY_HERE
from connector.tools.asking import Address, NotAsked, advertisement
from connector.tools.live import Question, RankReport, Surveyor
from connector.wire.handshake import Advertisement, encode_payload, encode_reply
from connector.wire.inspection import AnswerBuilder, Inspect, LocalPrefillRow
from connector.wire.metadata import encode_agent_metadata
from statemachine import failures
from tests.rig.facts import facts
from tests.unit.test_wire_handshake import METADATA

PLACE = Address("h", 1)


class Requester:
    """A side channel, and its only question. `answer` None: it says nothing."""

    def __init__(self, answer: SideChannelError | Sequence[bytes] | None) -> None:
        self._answer = answer
        self.is_closed = False

    def connect(self, host: str, port: int) -> Requester:
        return self

    async def ask(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        if isinstance(self._answer, SideChannelError):
            raise self._answer
        if self._answer is None:
            await trio.sleep_forever()
        return self._answer or ()

    def close(self) -> None:
        self.is_closed = True


def asked(requester: Any, seconds: float = math.inf) -> Any:
    return trio.run(advertisement, requester, PLACE, (0, 0), seconds)


KEYLESS = "it speaks to those only who have a key, and there is none here (curve_directory)"


@pytest.mark.parametrize(
    ("answer", "kind", "sentence"),
    [
        (NameNotResolved("h", 1, "why"), "AddressNotResolved", "the host name h does not resolve here (why)"),
        (PortRefused("h", 1, "why"), "ConnectionRefused", "nothing listens there"),
        (
            AccessRefused("h", 1, "why"),
            "NotAllowed",
            "this tool may not ask it: why; a tool has the keys of --keys or ",
        ),
        (AccessRefused("h", 1, NO_KEY_HERE), "NotAllowed", "this tool may not ask it: " + KEYLESS + "; a tool has"),
        (NotASideChannel("h", 1, "why"), "HandshakeMalformed", "what listens there is not a NIXL connector: why"),
        (ConnectionEnded("h", 1, "why"), "HandshakeRefused", "why"),
        (LinkEnded("h", 1, "why"), "HandshakeRefused", "why"),
        ((b"\xff",), "HandshakeMalformed", "what listens there is not a NIXL connector: "),
        (None, "HandshakeTimeout", "no answer within 0.01 s"),
    ],
    ids=str,
)
def test_each_way_to_fail_has_its_kind_and_sentence(answer: Any, kind: str, sentence: str) -> None:
    requester = Requester(answer)
    with pytest.raises(NotAsked) as raised:
        asked(requester, 0.01 if answer is None else math.inf)
    assert raised.value.kind == kind
    assert hasattr(failures, kind)
    assert raised.value.sentence.startswith(sentence)
    assert str(raised.value) == f"h:1: {raised.value.sentence}"
    assert requester.is_closed


def test_what_a_rank_says_of_itself_is_read() -> None:
    said = facts(tp_size=2)
    requester = Requester(encode_reply(encode_payload("hash", encode_agent_metadata(METADATA), said), 5.0))
    assert asked(requester).actor == said
    assert requester.is_closed


class Worker:
    """A control socket. `rows`: how many it tells before it falls silent."""

    def __init__(self, rows: int) -> None:
        self._left = rows

    async def open_link(self, host: str, port: int, server_key: str | None = None) -> Worker:
        return self

    def close(self) -> None: ...

    def send(self, frames: Sequence[bytes]) -> None:
        self._asked = msgspec.msgpack.decode(frames[0], type=Inspect)

    async def receive(self) -> Sequence[bytes]:
        if not self._left:
            await trio.sleep_forever()
        self._left -= 1
        row = LocalPrefillRow(request_id="r", reason="absent", tokens=1, age_seconds=1.0)
        answer = AnswerBuilder(1)
        answer.add(row)
        return answer.frames(self._asked, wall=0.0, total=9, first=self._asked.first, next_row=self._asked.first + 1)


def test_an_engine_with_more_workers_than_are_asked_is_not_shown_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.tools.live.WORKERS_MAX", 5)
    said = Advertisement(compatibility_hash="h", metadata=None, actor=facts(pp_size=2, tp_size=4), error=None)

    async def advertised(*_: Any) -> Advertisement:
        return said

    monkeypatch.setattr("connector.tools.live.advertisement", advertised)

    async def test() -> list[RankReport]:
        surveyor = Surveyor(Worker(0), 1.0, 1.0)  # type: ignore[arg-type]
        return await surveyor._ask_ranks(PLACE, said, [], trio.current_time() + 1)

    reports = trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))
    assert [each.rank for each in reports] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert [each.problem for each in reports[:-1]] == [None] * 5
    assert reports[-1].problem == "not asked, and none behind it: this tool asks 5 workers of an engine"
    assert [each.ran_out for each in reports] == [False] * 5 + [True]


def test_a_rank_for_which_no_time_was_left_is_not_said_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Advertisement(compatibility_hash="h", metadata=None, actor=facts(tp_size=2), error=None)
    monkeypatch.setattr("connector.tools.live.advertisement", lambda *_: trio.sleep_forever())

    async def test() -> list[RankReport]:
        surveyor = Surveyor(Worker(0), 1.0, 1.0)  # type: ignore[arg-type]
        return await surveyor._ask_ranks(PLACE, said, [], trio.current_time() + 1)

    _, late = trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))
    assert late.problem is not None
    assert "(--timeout)" in late.problem
    assert late.ran_out


@pytest.mark.parametrize(("rows", "word"), [(0, "the process hangs"), (3, "has told 3 row(s), and not all")])
def test_a_worker_that_had_no_time_for_all_of_its_answers_is_not_said_to_hang(rows: int, word: str) -> None:
    said = Advertisement(compatibility_hash="h", metadata=None, actor=facts(), error=None)

    async def test() -> RankReport:
        surveyor = Surveyor(Worker(rows), 1.0, 1.0)  # type: ignore[arg-type]
        return await surveyor._ask_worker(
            PLACE, (0, 0), said, [Question(what="local_prefills")], trio.current_time() + 1
        )

    report = trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))
    assert report.problem is not None
    assert word in report.problem
    assert ("--timeout" in report.problem) == report.ran_out == bool(rows)
    assert len(report.rows) == rows
