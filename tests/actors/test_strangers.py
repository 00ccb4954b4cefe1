"""Engines with keys and address ranges, of real actors, real sockets and real NIXL: who is served, and who is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from connector.config import ConnectorOptions
from connector.ports import curve_keys
from connector.protocol import PeerAddress
from connector.tools.asking import tool_access
from connector.tools.live import opened_surveyor
from statemachine.failures import NotAllowed
from tests.actors.engines import HOST, Engine, engine, lend_by_all, until
from tests.actors.test_inspection import EVERYTHING, address_of
from tests.actors.test_peers import failure_of
from tests.actors.test_pull import run
from tests.rig.key_files import Fleet, Member
from tests.rig.looks import look_patiently
from tests.rig.network import free_port

AT_ONCE = 20.0
"""What a refusal may take on a machine that stands still. One that comes with the handshake's timeout says so."""


@pytest.fixture(autouse=True)
def looks_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """At keys and at greetings: the product goes by what it knows when that takes too long."""
    monkeypatch.setattr(curve_keys, "LOOK_WAIT_SECONDS", AT_ONCE)
    look_patiently(monkeypatch, AT_ONCE)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def with_keys(member: Member, **options: object) -> ConnectorOptions:
    return ConnectorOptions(curve_directory=str(member.directory), **options)  # type: ignore[arg-type]


async def serves(d: Engine, p: Engine, name: str) -> None:
    d.borrow(name, lend_by_all([p], f"remote-{name}"), p.address, [1], [1])
    ended = await until(lambda: d.received(name))
    assert ended.failure is None, ended.failure
    await until(lambda: p.sent(f"remote-{name}"))


async def is_refused(d: Engine, p: Engine | PeerAddress, name: str) -> str:
    """What the request fails with, at once; P goes on as if nobody had come."""
    lease = lend_by_all([p], f"remote-{name}") if isinstance(p, Engine) else None
    d.pull(name, p, [1], [1]) if lease is None else d.borrow(name, lease, p.address, [1], [1])  # type: ignore[union-attr]
    failure = await failure_of(d, name, AT_ONCE)
    assert isinstance(failure, NotAllowed), failure
    assert d.crashes == []
    return failure.detail


def test_engines_with_keys_serve_each_other_and_tools_with_keys(fleet: Fleet) -> None:
    p_keys, d_keys, tool = fleet.friends("p", "d", "tool")

    async def test() -> None:
        of_p, of_d = with_keys(p_keys), with_keys(d_keys)
        async with engine("p", serves=True, options=of_p) as p, engine("d", serves=True, options=of_d) as d:
            for number in range(3):
                await serves(d, p, f"a{number}")
            async with opened_surveyor(10.0, 10.0, tool_access(str(tool.directory))) as surveyor:
                found = await surveyor.survey([address_of(d)], EVERYTHING)
            assert [each.engine_id for each in found.engines if each.answers] == ["d", "p"]
            async with opened_surveyor(10.0, 10.0) as surveyor:
                found = await surveyor.survey([address_of(d)], EVERYTHING)
            assert [each.problem_kind for each in found.engines] == ["NotAllowed"]
            assert "--keys" in str(found.engines[0].problem)
            assert (p.refused, d.refused) == ([], [])

    run(test)


@pytest.mark.parametrize("kind", ["unknown key", "no key", "key on one side"])
def test_a_stranger_is_refused_at_once_and_told_why(fleet: Fleet, kind: str) -> None:
    p_keys, d_keys = fleet.friends("p", "d")
    unknown = fleet.member("unknown")
    fleet.accept(p_keys, by=unknown)
    of_p = ConnectorOptions() if kind == "key on one side" else with_keys(p_keys)
    of_stranger = {
        "unknown key": with_keys(unknown),
        "no key": ConnectorOptions(),
        "key on one side": with_keys(d_keys),
    }[kind]
    expected = {"unknown key": "does not let us in", "no key": "curve_directory", "key on one side": "no key"}

    async def test() -> None:
        async with engine("p", serves=True, options=of_p) as p:
            async with engine("stranger", options=of_stranger) as stranger:
                assert expected[kind] in await is_refused(stranger, p, "a")
            async with engine("d", options=with_keys(d_keys) if of_p.curve_directory else of_p) as d:
                await serves(d, p, "b")

    run(test)


def test_control_sockets_let_no_stranger_in_who_knows_where_they_are(fleet: Fleet) -> None:
    """He may have been told by the side channel before his key was taken away."""
    p_keys, d_keys = fleet.friends("p", "d")

    async def test() -> None:
        async with engine("p", serves=True, options=with_keys(p_keys)) as p:
            fleet.forget(d_keys, by=p_keys)
            with trio.fail_after(AT_ONCE):
                await trio.sleep(curve_keys.LOOK_SECONDS * 1.1)
                channel = d_keys.channel()
                try:
                    link = await channel.open_link(HOST, p.control.port, p.control_key)
                    link.send([b"let me in"])
                    with pytest.raises(Exception, match="does not let us in"):
                        await link.receive()
                finally:
                    channel.close()
            assert len(p.refused) == 1
            assert d_keys.keys().public_key.decode() in p.refused[0]
            assert p.failures == []

    run(test)


def test_d_connects_to_no_address_outside_of_its_ranges() -> None:
    """Neither to one that a request names, nor to a control socket that a listener names."""

    async def test() -> None:
        elsewhere = ConnectorOptions(allowed_peers=("10.0.0.0/8",))
        async with engine("p", serves=True) as p, engine("d", options=elsewhere) as d:
            assert "allowed_peers" in await is_refused(d, p, "a")
            knocked = PeerAddress(engine_id="x", host="localhost", port=free_port(), tp_size=1)
            assert "allowed_peers" in await is_refused(d, knocked, "b")
        side_channel_only = ConnectorOptions(allowed_peers=("127.0.0.1",))
        async with engine("p", serves=True) as p, engine("d", options=side_channel_only) as d:
            await serves(d, p, "c")
            assert p.listener is not None
            lying = p.payload().replace(HOST.encode(), b"127.0.0.9")
            p.listener._payloads = {(0, 0): lying}
            async with engine("d2", options=side_channel_only) as d2:
                detail = await is_refused(d2, p, "e")
            assert "its control socket at 127.0.0.9" in detail

    run(test)


def test_p_answers_nobody_from_outside_of_its_ranges() -> None:
    async def test() -> None:
        elsewhere = ConnectorOptions(allowed_peers=("10.0.0.0/8",))
        async with engine("p", serves=True, options=elsewhere) as p, engine("d") as d:
            assert "does not let us in" in await is_refused(d, p, "a")
            assert any("allowed_peers" in why for why in p.refused)

    run(test)


def test_a_mixed_fleet_meets_over_side_channels_without_keys(fleet: Fleet) -> None:
    """Those with keys have them on their control sockets all the same, which nobody without keys gets into."""
    p_keys, d_keys = fleet.friends("p", "d")

    async def test() -> None:
        mixed = {"allow_insecure_peers": True}
        async with engine("p", serves=True, options=with_keys(p_keys, **mixed)) as p:
            async with engine("d", options=with_keys(d_keys, **mixed)) as d:
                await serves(d, p, "a")
            async with engine("strict", options=with_keys(d_keys)) as strict:
                assert "no key" in await is_refused(strict, p, "b")
            async with engine("keyless") as keyless:
                detail = await is_refused(keyless, p, "c")
                assert "its control socket" in detail
                assert "curve_directory" in detail
        async with engine("p", serves=True) as p, engine("d", options=with_keys(d_keys, **mixed)) as d:
            await serves(d, p, "d")

    run(test)
