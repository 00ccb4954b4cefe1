"""How a decode rank asks who is there before a request needs it: what is answered, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
import trio
from trio.testing import MockClock

from connector.clock import to_ns
from connector.config import ConnectorOptions
from connector.ports.side_channel import SideChannel
from connector.protocol import MeetPeer
from connector.runtime.introducer import BUILTIN, Introducer
from connector.wire.handshake import encode_error, encode_payload, encode_reply
from connector.wire.metadata import encode_agent_metadata
from statemachine.roster import PeerKey
from tests.rig.facts import facts
from tests.unit.test_wire_handshake import LAYOUT, METADATA

PLACE = "p.example:5600"
OWN = "decode"
SIZES = {"tp_size": 4, "dcp_size": 2, "pp_size": 3}


class ScriptedChannel:
    """Side channel whose every question gets this answer; None: none."""

    def __init__(self, answer: tuple[bytes, bytes] | None) -> None:
        self.answer = answer
        self.closed = 0

    def connect(self, host: str, port: int) -> ScriptedChannel:
        assert f"{host}:{port}" == PLACE
        return self

    async def ask(self, frames: Sequence[bytes]) -> tuple[bytes, bytes]:
        if self.answer is None:
            await trio.sleep_forever()
        assert self.answer is not None
        return self.answer

    def close(self) -> None:
        self.closed += 1


class TrioClock:
    def now_ns(self) -> int:
        return to_ns(trio.current_time())


def ask_once(answer: tuple[bytes, bytes] | None, own_engine_id: str = OWN) -> tuple[list[MeetPeer], list[PeerKey], str]:
    """Whom the roster is told to meet, whose connection is looked for, and what the tool shows as the problem."""
    told: list[MeetPeer] = []
    looked_for: list[PeerKey] = []
    crashes: list[BaseException] = []
    channel = ScriptedChannel(answer)

    def is_connected(key: PeerKey) -> bool:
        looked_for.append(key)
        return True

    async def main() -> str:
        options = ConnectorOptions(known_peers=(PLACE,), handshake_timeout_seconds=5, backoff_initial_seconds=60)
        introducer = Introducer(
            options=options,
            own_engine_id=own_engine_id,
            identity="d/0",
            side_channel=cast(SideChannel, channel),
            clock=TrioClock(),
            meet=told.append,
            is_connected=is_connected,
            say=lambda line: None,
            log_crash=lambda task, error: crashes.append(error),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(introducer.run)
            await trio.sleep(6)
            nursery.cancel_scope.cancel()
        report, _ = introducer.name([PLACE])
        return report.rows[0].problem

    problem = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert crashes == []
    assert channel.closed == 1, "asked once, and its requester is closed"
    return told, looked_for, problem


def payload(**changes: Any) -> tuple[bytes, bytes]:
    return encode_reply(encode_payload("hash", encode_agent_metadata(METADATA), facts(**SIZES, **changes)), 1.0)


def test_an_engine_is_met_in_the_sizes_that_it_says() -> None:
    told, looked_for, problem = ask_once(payload())
    assert looked_for == [PeerKey(LAYOUT.engine_id, 4, 2, 3)]
    assert [(each.peer.tp_size, each.peer.dcp_size, each.peer.pp_size) for each in told] == [(4, 2, 3)]
    assert problem == ""


def test_this_engine_itself_is_not_met() -> None:
    told, _, problem = ask_once(payload(), own_engine_id=LAYOUT.engine_id)
    assert (told, problem) == ([], "")


def _builtin() -> tuple[bytes, bytes]:
    said = msgspec.msgpack.decode(payload()[0])
    del said["actor"]
    return encode_reply(msgspec.msgpack.encode(said), 1.0)


def _of_many_layers() -> tuple[bytes, bytes]:
    said = msgspec.to_builtins(METADATA, builtin_types=(bytes,)) | {"region_names": ["a"] * 1_000_000}
    return encode_reply(encode_payload("hash", msgspec.msgpack.encode(said), facts(**SIZES)), 1.0)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "no answer within 5 s"),
        (encode_reply(encode_error("not yet"), 1.0), "not yet"),
        ((b"\xff", b""), "what listens there is not a NIXL connector"),
        (_builtin(), BUILTIN),
        (_of_many_layers(), "what listens there is not a NIXL connector: Expected `array` of length <= 4096"),
    ],
    ids=["silence", "an error", "garbage", "a built-in engine", "more layers than there are"],
)
def test_what_does_not_let_itself_be_met_is_told_with_the_reason(
    answer: tuple[bytes, bytes] | None, problem: str
) -> None:
    told, _, said = ask_once(answer)
    assert told == []
    assert said.startswith(problem)
