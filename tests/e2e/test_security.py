"""Two real engines with all of docs/operations/security.md: served, rolled, forged, repeated, and strangers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq
from typer.testing import CliRunner

from connector.tools.cli.main import app
from connector.wire.handshake import encode_request
from tests.e2e.client import PrefillDecode
from tests.e2e.cluster import HANDSHAKE_TIMEOUT_SECONDS, Room, Traces, prompt, small_options, wait_for
from tests.e2e.engines import LOOPBACK, Engine, EngineSet
from tests.rig.key_files import Fleet, Member

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

TOKENS = 100
STRANGE_ADDRESS = "127.0.0.9"
"""Of this machine, and outside of allowed_peers."""


@dataclass
class Guarded:
    """A producer and a consumer that share keys with a tool."""

    prefill: Engine
    decode: Engine
    service: PrefillDecode
    traces: Traces
    params_keys: Path
    fleet: Fleet
    members: dict[str, Member]
    """By name: the pairs of both engines, and that of the tool."""

    @property
    def tool(self) -> Member:
        return self.members["tool"]

    def begin_life(self, member: Member) -> None:
        """Of the producer, with this pair."""
        config = {**self.prefill.options.extra_config, "curve_directory": str(member.directory)}
        self.prefill.restart(extra_config=config).wait_healthy()

    def command(self, *arguments: str) -> tuple[int, str]:
        """`nixl-actor` at the decode engine."""
        engine = f"{LOOPBACK}:{self.decode.options.side_channel_port}"
        result = CliRunner().invoke(app, [*arguments, "--engine", engine, "--timeout", "20"])
        return result.exit_code, result.output

    def sockets(self) -> int:
        """Descriptors of the producer's processes."""
        count = 0
        for pid in os.listdir("/proc"):
            if pid.isdecimal():
                try:
                    if os.getpgid(int(pid)) == self.prefill.pid:
                        count += len(os.listdir(f"/proc/{pid}/fd"))
                except (ProcessLookupError, FileNotFoundError):
                    continue
        return count

    def fails(self, key: str, kind: str, text: str, params: Mapping[str, Any]) -> str:
        """D's request with these parameters ends as `kind`; what is said of it."""
        assert self.service.decode(text, params, key).status == 500
        record = self.traces.last_record(key)
        assert (record.to_state, record.reason) == ("failed", kind)
        return record.detail or ""


@pytest.fixture(scope="module")
def guarded(room: Room, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    room.clear()
    directory = tmp_path_factory.mktemp("guarded")
    fleet, runner = Fleet(directory / "keys"), CliRunner()
    members = [fleet.member(name) for name in ("prefill", "decode", "tool")]
    for one in members:
        for other in members:
            if one is not other:
                fleet.accept(one, by=other)
    params_keys = directory / "params.keys"
    assert runner.invoke(app, ["keys", "params", "add", str(params_keys), "--id", "old"]).exit_code == 0
    traces = Traces(directory / "traces")
    of_all = {
        "params_keys_file": str(params_keys),
        "allowed_peers": ["127.0.0.1", "10.255.0.0/16"],
        "handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS,
    }
    prefill, decode, _ = members
    with EngineSet() as engines:
        started = engines.start(
            *(
                small_options(
                    directory,
                    member.name,
                    core=core,
                    kv_role=role,
                    trace_directory=traces.directory,
                    extra_config={**of_all, "curve_directory": str(member.directory)},
                )
                for core, (member, role) in enumerate(((prefill, "kv_producer"), (decode, "kv_consumer")))
            )
        )
        service = PrefillDecode(*started)
        try:
            yield Guarded(*started, service, traces, params_keys, fleet, {each.name: each for each in members})
        finally:
            service.close()


def serves(guarded: Guarded, key: str) -> None:
    text = prompt(TOKENS, key)
    answer = guarded.service.pd(text, key)
    assert answer.ok, answer.error
    assert answer.token_ids == guarded.service.alone(text).token_ids
    guarded.traces.assert_plain(key)


def test_prompts_are_read_and_nothing_is_warned_of(guarded: Guarded) -> None:
    for number in range(3):
        serves(guarded, f"plain-{number}")
    for engine in (guarded.prefill, guarded.decode):
        lines = [line for line in engine.log().splitlines() if "WARNING" in line]
        assert not [line for line in lines if "security" in line or "refused a connection" in line]


def test_forged_parameters_fail_and_reach_nobody(guarded: Guarded) -> None:
    """A client of D names an address of his own: D does not knock there."""
    text = prompt(TOKENS, "forged")
    params = guarded.service.prefill(text, "forged-p").kv_transfer_params
    assert params is not None
    with socket.create_server((LOOPBACK, 0)) as door:
        door.setblocking(False)
        port = door.getsockname()[1]
        assert "not that of these values" in guarded.fails(
            "forged-address", "ParamsForged", text, params | {"remote_host": LOOPBACK, "remote_port": port}
        )
        stripped = {name: value for name, value in params.items() if name != "signature"}
        assert "not signed" in guarded.fails("forged-unsigned", "ParamsForged", text, stripped)
        with pytest.raises(BlockingIOError):
            door.accept()
    answer = guarded.service.decode(text, params, "not-forged")
    assert answer.ok, "the genuine ones are still good"


def test_genuine_parameters_are_of_use_once(guarded: Guarded) -> None:
    text = prompt(TOKENS, "replayed")
    params = guarded.service.prefill(text, "replayed-p").kv_transfer_params
    assert guarded.service.decode(text, params, "replayed-1").ok
    guarded.traces.ended_request("replayed-1")
    # With another salt, or D would have all of it cached.
    ask = guarded.service.decode_client.complete
    answer = ask(text, request_id="replayed-2", kv_transfer_params=params, cache_salt="replayed-2")
    assert answer.ok, "computed"
    status, said = guarded.command("why", "replayed-2", "--keys", str(guarded.tool.directory))
    assert (status, said.partition(":")[0]) == (1, "AlreadyRead")


def test_a_stranger_gets_no_answer_and_leaves_nothing(guarded: Guarded) -> None:
    """At both sockets of P: a ZMQ client without a key, and one from an address that is not allowed."""
    serves(guarded, "before-strangers")
    control = next(
        int(line.rpartition("control socket")[2].split(";")[0].rpartition(":")[2])
        for line in guarded.prefill.log().splitlines()
        if "control socket" in line
    )
    before = guarded.sockets()
    with zmq.Context() as context:
        strangers = []
        for port in (guarded.prefill.options.side_channel_port, control):
            for source in ("", f"{STRANGE_ADDRESS}:0;"):
                for _ in range(20):
                    stranger = context.socket(zmq.DEALER)
                    stranger.setsockopt(zmq.LINGER, 0)
                    stranger.connect(f"tcp://{source}{LOOPBACK}:{port}")
                    stranger.send_multipart([b"", encode_request(0, 0)])
                    strangers.append(stranger)
        serves(guarded, "among-strangers")
        assert not any(stranger.poll(0) for stranger in strangers)
        for stranger in strangers:
            stranger.close()
    wait_for(lambda: guarded.sockets() <= before or None, "the end of the strangers' connections")
    serves(guarded, "after-strangers")


def test_tools_ask_with_keys_and_are_refused_without(guarded: Guarded) -> None:
    serves(guarded, "asked-about")
    status, said = guarded.command("why", "asked-about", "--keys", str(guarded.tool.directory))
    assert (status, said.splitlines()[0].partition(":")[0]) == (0, "Done"), said
    status, said = guarded.command("ps", "--keys", str(guarded.tool.directory))
    assert status == 0
    assert "prefill" in said
    status, said = guarded.command("ps")
    assert status == 2
    assert "may not ask" in said


def test_keys_of_parameters_are_rolled_while_engines_run(guarded: Guarded) -> None:
    file, runner = str(guarded.params_keys), CliRunner()
    for step, command in (
        ("accepted", ["add", file, "--id", "new"]),
        ("signs", ["use", file, "new"]),
        ("alone", ["drop", file, "old"]),
    ):
        counts = {each: each.log().count("was read again") for each in (guarded.prefill, guarded.decode)}
        assert runner.invoke(app, ["keys", "params", *command]).exit_code == 0
        for engine, count in counts.items():
            wait_for(lambda engine=engine, count=count: engine.log().count("was read again") > count or None, step)  # type: ignore[misc]
        serves(guarded, f"rolled-{step}")
    params = guarded.service.prefill(prompt(TOKENS, "rolled"), "rolled-p").kv_transfer_params
    assert params is not None
    assert params["signature"].startswith("new:")


def test_the_pair_of_an_engine_is_rolled(guarded: Guarded) -> None:
    """As security.md says: the new public key beside the old, a restart with the new pair, the old key taken away."""
    old, decode, tool = (guarded.members[name] for name in ("prefill", "decode", "tool"))
    new = guarded.members["prefill-new"] = guarded.fleet.member("prefill-new")
    for other in (decode, tool):
        guarded.fleet.accept(other, by=new)
        guarded.fleet.accept(new, by=other)
    serves(guarded, "pair-old")
    guarded.begin_life(new)
    serves(guarded, "pair-new")
    asks_as_old = "ps", "--json", "--keys", str(old.directory)
    assert guarded.command(*asks_as_old)[0] == 0, "it is accepted still"
    for other in (decode, tool):
        guarded.fleet.forget(old, by=other)
    status, said = wait_for(
        lambda: refused if (refused := guarded.command(*asks_as_old))[0] else None, "the old key being refused"
    )
    assert status == 2
    assert "our public key not among its accepted keys" in said
    serves(guarded, "pair-alone")


def test_only_members_drain_an_engine(guarded: Guarded) -> None:
    """Its processes tell each other with the engine's own keys. Afterwards it lends no more."""
    address = f"{LOOPBACK}:{guarded.prefill.options.side_channel_port}"
    refused = CliRunner().invoke(app, ["drain", address, "--no-wait"])
    assert refused.exit_code == 2, refused.output
    serves(guarded, "not-drained")
    drained = CliRunner().invoke(app, ["drain", address, "--keys", str(guarded.tool.directory)])
    assert drained.exit_code == 0, drained.output
    answer = guarded.service.prefill(prompt(TOKENS, "drained"), "drained-p")
    assert answer.ok
    assert not answer.kv_transfer_params
    wait_for(lambda: " leaves: what it lends" in guarded.decode.log() or None, "D being told")


def test_an_engine_with_a_pair_that_was_withdrawn_is_not_read_from(guarded: Guarded) -> None:
    """P is started with the pair that was rolled: D does not speak to it, though it still accepts D."""
    guarded.begin_life(guarded.members["prefill"])
    text = prompt(TOKENS, "withdrawn")
    params = guarded.service.prefill(text, "withdrawn-p").kv_transfer_params
    assert params is not None
    guarded.fails("withdrawn", "NotAllowed", text, params)
