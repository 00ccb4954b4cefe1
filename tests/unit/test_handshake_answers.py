"""What the ranks of an engine answer must fit together, before anything is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from connector.clock import BootClock
from connector.config import ConnectorOptions
from connector.layout.geometry import RankId
from connector.protocol import PeerAddress
from connector.runtime import handshake
from connector.wire import control
from connector.wire.handshake import HandshakeError, HandshakeReply
from connector.wire.identity import NOT_PACKED
from statemachine.failures import ControlLinkLost, Failure, HandshakeRefused
from tests.rig.facts import NO_IDENTITY, facts

PEER = PeerAddress(engine_id="p", host="host", port=1, tp_size=2, dcp_size=1, pp_size=1)


def answer(tp_rank: int, life: str = "a" * 32) -> HandshakeReply:
    metadata: Any = None
    actor = facts(life=life, tp_size=2, tp_rank=tp_rank, control_host="host", control_port=2)
    return HandshakeReply(metadata=metadata, actor=actor)


@pytest.mark.parametrize("answered", [0, 1])
def test_an_answer_about_another_rank_than_was_asked_about_is_refused(
    monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    async def ask(*arguments: object) -> tuple[bytes, ...]:
        return ()

    monkeypatch.setattr(handshake, "_ask", ask)
    monkeypatch.setattr(handshake, "decode_reply", lambda *frames, **expected: answer(answered))
    context: Any = SimpleNamespace(
        options=ConnectorOptions(),
        clock=BootClock(),
        local=SimpleNamespace(compatibility_hash="x", identity=NO_IDENTITY, not_packed=NOT_PACKED),
    )

    async def exchange() -> HandshakeReply:
        return await handshake._exchange(context, PEER, RankId(0, 1))

    if answered == 1:
        assert trio.run(exchange) == answer(1)
        return
    with pytest.raises(HandshakeError) as refused:
        trio.run(exchange)
    assert isinstance(refused.value.failure, HandshakeRefused)
    assert "(0, 0) when asked about (0, 1)" in str(refused.value.failure)


def test_ranks_of_two_lives_of_an_engine_make_no_connection() -> None:
    handshake._require_one_life(PEER, [answer(0), answer(1)])
    with pytest.raises(HandshakeError) as refused:
        handshake._require_one_life(PEER, [answer(0), answer(1, life="b" * 32)])
    assert isinstance(refused.value.failure, HandshakeRefused)


class Stranger:
    """A link to somebody who answers every question with the same words, or never (None)."""

    def __init__(self, answer: tuple[bytes, ...] | None) -> None:
        self.answer = answer
        self.is_closed = False

    def send(self, frames: object) -> bool:
        return True

    async def receive(self) -> tuple[bytes, ...]:
        if self.answer is None:
            await trio.sleep_forever()
        assert self.answer is not None
        return self.answer

    def close(self) -> None:
        self.is_closed = True


WRONG = tuple(control.encode_answer(control.Released(leases=())))


@pytest.mark.parametrize(
    ("answered", "why"),
    [
        (tuple(control.encode_answer(control.HoldAnswer(sent_ns=0, agent="its"))), None),
        (WRONG, "not the answer to a hold"),
        (None, f"nothing came within {ConnectorOptions().handshake_timeout_seconds:g} s"),
    ],
    ids=["right", "wrong", "nothing"],
)
def test_a_control_socket_that_answers_something_else_is_refused(
    answered: tuple[bytes, ...] | None, why: str | None
) -> None:
    """Who listens there does not know what a hold is: that is found in the handshake, not when a proof is missing."""
    link = Stranger(answered)

    async def open_link(host: str, port: int, server_key: str | None) -> Stranger:
        return link

    layout = SimpleNamespace(engine_id="d", tp_rank=0)
    context: Any = SimpleNamespace(
        options=ConnectorOptions(),
        clock=BootClock(),
        local=SimpleNamespace(layout=layout),
        side_channel=SimpleNamespace(open_link=open_link),
    )
    facts = answer(0).actor
    assert facts is not None

    async def connect() -> object:
        return await handshake._open_link(context, PEER, facts, 1)

    clock = MockClock(autojump_threshold=0)
    if why is None:
        assert trio.run(connect, clock=clock) == (link, "its")
        return
    with pytest.raises(HandshakeError) as refused:
        trio.run(connect, clock=clock)
    failure = refused.value.failure
    assert isinstance(failure, ControlLinkLost)
    assert failure.detail == f"its control socket at host:2 did not answer: {why}"
    assert link.is_closed


def test_a_handshake_that_fails_at_its_last_control_socket_leaves_nothing() -> None:
    """The first rank's control socket works, that of the second says something else."""
    links = [Stranger(tuple(control.encode_answer(said))) for said in (control.HoldAnswer(sent_ns=0), WRONG)]
    opened = iter(links)
    loaded: list[str] = []

    async def open_link(host: str, port: int, server_key: str | None) -> Stranger:
        link = next(opened)
        await trio.sleep(0 if link is links[0] else 0.01)
        return link

    async def load_agent(metadata: bytes, owner: object) -> str:
        loaded.append(metadata.decode())
        return loaded[-1]

    async def unload_agent(agent: str, owner: object, failure: Failure | None, on_removed: object) -> None:
        assert failure is None, "nothing was read over it"
        loaded.remove(agent)

    context: Any = SimpleNamespace(
        options=ConnectorOptions(),
        clock=BootClock(),
        local=SimpleNamespace(layout=SimpleNamespace(engine_id="d", tp_rank=0)),
        side_channel=SimpleNamespace(open_link=open_link),
        reads=SimpleNamespace(load_agent=load_agent, unload_agent=unload_agent),
    )
    ranks = [RankId(0, number) for number in (0, 1)]
    told: Any = [SimpleNamespace(remote_rank=rank, consumers=1) for rank in ranks]
    replies: Any = [
        SimpleNamespace(metadata=SimpleNamespace(agent_metadata=b"agent %d" % number), actor=answer(number).actor)
        for number in (0, 1)
    ]
    plan: Any = SimpleNamespace(reads=(), notify_only=told)

    async def load() -> object:
        return await handshake._load(context, PEER, "owner", ranks, replies, plan, {})

    with pytest.raises(HandshakeError):
        trio.run(load)
    assert [link.is_closed for link in links] == [True, True]
    assert loaded == []
