"""`nixl-actor drain` and `nixl-actor meet` at engines that say nothing: they end when they were told to."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import pytest
import trio
from typer.testing import CliRunner

from connector.observe import administration
from connector.observe.cli.main import app
from connector.wire.handshake import encode_payload, encode_reply
from connector.wire.metadata import encode_agent_metadata
from tests.rig.facts import facts
from tests.unit.test_wire_handshake import METADATA


@pytest.fixture
def silent() -> Iterator[str]:
    """Accepts connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("command", ["drain", "meet"])
def test_the_timeout_bounds_the_first_question_too(silent: str, command: str) -> None:
    begun = time.monotonic()
    places = ["127.0.0.1:1"] * (command == "meet")
    answer = CliRunner().invoke(app, [command, silent, *places, "--timeout", "0.2"])
    assert time.monotonic() - begun < administration.ASK_SECONDS - 1
    assert answer.exit_code == 2
    assert answer.output == f"the engine at {silent} did not answer within 0.2 s\n"


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


def test_a_name_server_that_hangs_keeps_nobody_from_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "ZmqSideChannel", lambda access: HangingNames())
    begun = time.monotonic()
    answer = CliRunner().invoke(app, ["meet", "127.0.0.1:1", "127.0.0.1:2", "--timeout", "0.2"])
    assert time.monotonic() - begun < administration.ASK_SECONDS - 1
    assert answer.exit_code == 2
    assert answer.output == "rank (0, 0) of the engine at 127.0.0.1:1 did not answer at 10.0.0.1:40000 within 0.2 s\n"
