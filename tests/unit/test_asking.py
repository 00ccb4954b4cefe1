"""Why an engine could not be asked: one kind and one sentence for each way in which a side channel fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import trio

from connector.observe.asking import Address, NotAsked, advertisement
from connector.ports.side_channel import (
    AccessRefused,
    LinkEnded,
    NameNotResolved,
    NotASideChannel,
    PortRefused,
    SideChannelError,
)
from connector.wire.handshake import encode_payload, encode_reply
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


@pytest.mark.parametrize(
    ("answer", "kind", "sentence"),
    [
        (NameNotResolved("h", 1, "why"), "AddressNotResolved", "the host name h does not resolve here (why)"),
        (PortRefused("h", 1, "why"), "ConnectionRefused", "nothing listens there"),
        (AccessRefused("h", 1, "why"), "NotAllowed", "this tool may not ask it: why (--keys)"),
        (NotASideChannel("h", 1, "why"), "HandshakeMalformed", "what listens there is not a NIXL connector: why"),
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
