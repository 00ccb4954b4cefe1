"""What the ranks of an engine answer must fit together, before anything is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from connector.config import ConnectorOptions
from connector.layout.geometry import RankId
from connector.protocol import PeerAddress
from connector.runtime import handshake
from connector.wire.handshake import ActorExtension, HandshakeError, HandshakeReply
from statemachine.failures import HandshakeRefused

PEER = PeerAddress(engine_id="p", host="host", port=1, tp_size=2, dcp_size=1, pp_size=1)


def answer(tp_rank: int, life: str = "a" * 32) -> HandshakeReply:
    facts = ActorExtension(
        life=life, tp_size=2, dcp_size=1, pp_size=1, tp_rank=tp_rank, pp_rank=0, control_host="host", control_port=2
    )
    metadata: Any = None
    return HandshakeReply(metadata=metadata, actor=facts)


@pytest.mark.parametrize("answered", [0, 1])
def test_an_answer_about_another_rank_than_was_asked_about_is_refused(
    monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    async def ask(*arguments: object) -> tuple[bytes, ...]:
        return ()

    monkeypatch.setattr(handshake, "_ask", ask)
    monkeypatch.setattr(handshake, "decode_reply", lambda *frames, **expected: answer(answered))
    context: Any = SimpleNamespace(options=ConnectorOptions(), local=SimpleNamespace(compatibility_hash="x"))

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
