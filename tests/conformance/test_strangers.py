"""Who may connect, on real sockets: address ranges, keys, engines without keys, and what a stranger costs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import trio
import zmq

from connector.ports import curve_keys, tcp, zmq_bridge
from connector.ports.curve_keys import CurveKeys, KeyDirectoryError, make_pair
from connector.ports.gate import Access, Gate
from connector.ports.side_channel import AccessRefused, LinkEnded, NotASideChannel, PortRefused, SideChannel
from connector.ports.zmq_bridge import ZmqLink, ZmqSideChannel
from connector.ports.zmq_bridge.refusals import NO_KEY_HERE, NOT_LET_IN
from statemachine import admission
from tests.conformance.side_channel_suite import AT_ONCE_SECONDS, HOST, serve, until
from tests.rig.key_files import Fleet

ELSEWHERE = Access(networks=(ip_network("10.0.0.0/8"), ip_network("fd00::/8")))
LOOPBACK = Access(networks=(ip_network("127.0.0.1"),))
STRANGERS = 300
ANSWERED_SECONDS = 20.0
"""In which a question is answered: many keys may be tried before, and many strangers knock meanwhile."""


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for as long as a slow machine needs: the product takes the keys of before, or who has not greeted yet for
    something else, when that takes too long."""
    monkeypatch.setattr(curve_keys, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(curve_keys, "LOOK_WAIT_SECONDS", ANSWERED_SECONDS)
    monkeypatch.setattr(zmq_bridge.requester, "GREETING_SECONDS", ANSWERED_SECONDS)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(60.0):
            await main()

    trio.run(bounded)


async def ask(
    channel: SideChannel,
    port: int,
    question: bytes = b"hello",
    host: str = HOST,
    *,
    seconds: float = ANSWERED_SECONDS,
) -> tuple[bytes, ...]:
    with trio.fail_after(seconds), closing(channel.connect(host, port)) as requester:
        return await requester.ask([question])


async def refusal(channel: SideChannel, port: int, host: str = HOST) -> str:
    """What is said to somebody who is not let in, at once."""
    with pytest.raises(AccessRefused) as refused:
        await ask(channel, port, host=host, seconds=AT_ONCE_SECONDS)
    return refused.value.error


class Served:
    """A listener of `channel` that answers, and what it was asked."""

    def __init__(self, channel: SideChannel) -> None:
        self.heard: list[tuple[bytes, ...]] = []
        self.listener = channel.listen(HOST, 0)
        self.port = self.listener.port

    def _answer(self, frames: tuple[bytes, ...]) -> Sequence[bytes]:
        self.heard.append(frames)
        return frames

    async def run(self) -> None:
        await serve(self.listener, self._answer)


# --- address ranges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("11.1.2.3", False),
        ("::ffff:11.1.2.3", False),
        ("fd00::1", True),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("127.0.0.1", False),
        ("::1", False),
        ("::a01:203", False),
    ],
)
def test_addresses_in_ranges(address: str, expected: bool) -> None:
    assert ELSEWHERE.allows_address(address) is expected
    assert Access().allows_address(address)


def test_who_connects_from_outside_of_the_ranges_is_not_heard() -> None:
    """Both come from this machine: the one from 127.0.0.2, the other from 127.0.0.1."""

    async def main() -> None:
        refused: list[tuple[str, str]] = []
        guarded = ZmqSideChannel(
            Access(networks=(ip_network("127.0.0.2"),)), lambda address, said: refused.append((address, said))
        )
        stranger = ZmqSideChannel()
        served = Served(guarded)
        with closing(guarded), closing(stranger), zmq.Context() as context, context.socket(zmq.DEALER) as member:
            member.setsockopt(zmq.LINGER, 0)
            member.connect(f"tcp://127.0.0.2:0;{HOST}:{served.port}")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                assert "allowed_peers" in await refusal(stranger, served.port)
                member.send_multipart([b"", b"I may"])
                await until(lambda: bool(member.poll(0)))
                nursery.cancel_scope.cancel()
            assert served.heard == [(b"I may",)]
            # Said again if libzmq has connected again before its owner had a turn.
            assert set(refused) == {("127.0.0.1", "127.0.0.1 may not connect: it is not in allowed_peers")}

    run(main)


@pytest.mark.parametrize("host", [HOST, "localhost", "127.1.2.3"])
def test_nothing_connects_to_where_it_may_not(host: str) -> None:
    """A request must not make this engine knock at any door of its network."""

    async def main() -> None:
        with socket.socket() as door, closing(ZmqSideChannel(ELSEWHERE)) as channel:
            door.bind(("0.0.0.0", 0))
            door.listen()
            door.setblocking(False)
            port = door.getsockname()[1]
            said = await refusal(channel, port, host)
            assert "not in allowed_peers of this engine" in said
            with pytest.raises(AccessRefused):
                await channel.open_link(host, port)
            await trio.sleep(0.2)
            with pytest.raises(BlockingIOError):
                door.accept()

    run(main)


# --- keys -----------------------------------------------------------------------------------------------------------


def test_members_hear_each_other_and_nobody_else_reads_along(fleet: Fleet) -> None:
    """Through a proxy that keeps all bytes: neither question nor answer is among them."""
    one, other = fleet.friends("one", "other")
    seen = bytearray()

    async def forward(source: trio.SocketStream, target: trio.SocketStream) -> None:
        async for chunk in source:
            seen.extend(chunk)
            await target.send_all(chunk)

    async def main() -> None:
        with closing(one.channel()) as serving, closing(other.channel()) as asking:
            served = Served(serving)

            async def carry(client: trio.SocketStream) -> None:
                async with await trio.open_tcp_stream(HOST, served.port) as server, trio.open_nursery() as both:
                    both.start_soon(forward, client, server)
                    await forward(server, client)
                    both.cancel_scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                (proxy,) = await trio.open_tcp_listeners(0, host=HOST)
                nursery.start_soon(trio.serve_listeners, carry, [proxy])
                port = proxy.socket.getsockname()[1]
                assert await ask(asking, port, b"a secret of ours") == (b"a secret of ours",)
                nursery.cancel_scope.cancel()
            assert served.heard == [(b"a secret of ours",)]

    run(main)
    assert len(seen) > 200
    assert b"secret" not in seen


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_was_taken_is_counted_to_the_byte(fleet: Fleet, encrypted: bool) -> None:
    """At both ends: what is left over of the bytes that have come is taken for a message that has not ended."""
    one, other = fleet.friends("one", "other")
    sizes = (0, 1, 222, 223, 255, 256, 20_000)

    async def main() -> None:
        with (
            closing(one.channel() if encrypted else ZmqSideChannel()) as serving,
            closing(other.channel() if encrypted else ZmqSideChannel()) as asking,
        ):
            listener = serving.listen(HOST, 0, frames_max=2)
            link = await asking.open_link(HOST, listener.port, serving.public_key)
            assert isinstance(link, ZmqLink)
            beside: list[tuple[int, int]] = []
            for frames in ([bytes(size)] * count for size in sizes for count in (1, 2, 1)):
                link.send([b"", *frames, b""])  # dropped: these are too many frames
                link.send(frames)
                request = await listener.receive()
                assert len(request.frames_untrusted) == len(frames)
                listener.reply(request.reply_address, frames)
                assert len(await link.receive()) == len(frames)
                ((number, connection),) = listener._doorman._connections.items()
                known = listener._doorman._admission._connections[number]
                beside.append(
                    (
                        tcp.received_bytes(connection.descriptor) - known.finished_bytes,
                        link._monitor.received_bytes() - link._finished_bytes,
                    )
                )
            assert len(set(beside)) == 1
            assert 0 < max(beside[0]) <= admission.HANDSHAKE_BYTES_MAX

    run(main)


def test_why_two_may_not_speak_is_said_on_both_sides(fleet: Fleet) -> None:
    one, other = fleet.friends("one", "other")
    unknown = fleet.member("unknown")
    fleet.accept(one, by=unknown)

    async def main() -> None:
        refused: list[str] = []
        with contextlib.ExitStack() as stack:

            def opened(channel: ZmqSideChannel) -> ZmqSideChannel:
                return stack.enter_context(closing(channel))

            serving = opened(ZmqSideChannel(Access(keys=one.keys()), lambda address, said: refused.append(said)))
            plain, keyless = opened(ZmqSideChannel()), opened(ZmqSideChannel())
            of_other, of_unknown = opened(other.channel()), opened(unknown.channel())
            async with trio.open_nursery() as nursery:
                served, unguarded = Served(serving), Served(plain)
                nursery.start_soon(served.run)
                nursery.start_soon(unguarded.run)
                assert "our public key not among its accepted" in await refusal(of_unknown, served.port)
                assert "there is none here (curve_directory)" in await refusal(keyless, served.port)
                assert "it has no key" in await refusal(of_other, unguarded.port)
                fleet.forget(one, by=other)
                assert "not among the 1 keys that are accepted here" in await refusal(of_other, served.port)
                nursery.cancel_scope.cancel()
            assert (served.heard, unguarded.heard) == ([], [])
        (line,) = set(refused)  # said again if libzmq has connected again before its owner had a turn
        assert line.startswith("127.0.0.1 may not connect: its public key")
        assert unknown.keys().public_key.decode() in line

    run(main)


@pytest.mark.parametrize("told", ["nothing", "another key"])
def test_a_link_needs_the_key_of_its_listener(fleet: Fleet, told: str) -> None:
    one, other = fleet.friends("one", "other")
    stranger = fleet.member("stranger")

    async def main() -> None:
        with closing(one.channel()) as serving, closing(other.channel()) as asking:
            listener = serving.listen(HOST, 0)
            key = None if told == "nothing" else stranger.keys().public_key.decode()
            with pytest.raises(AccessRefused):
                await asking.open_link(HOST, listener.port, key)
            # Another key, which is accepted: it is not the one of this listener.
            link = await asking.open_link(HOST, listener.port, other.keys().public_key.decode())
            with trio.fail_after(AT_ONCE_SECONDS), pytest.raises(LinkEnded):
                await link.receive()

    run(main)


def test_the_right_one_of_many_keys_is_found_and_remembered(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"engine-{number:02}" for number in range(30)]
    *_, serving_member, asking_member = fleet.friends(*names)
    attempts: list[bytes | None] = []
    make_client = ZmqSideChannel.make_client

    def counted(self: ZmqSideChannel, address: str, key: bytes | None) -> zmq_bridge.frames.Socket:
        attempts.append(key)
        return make_client(self, address, key)

    monkeypatch.setattr(ZmqSideChannel, "make_client", counted)

    async def main() -> None:
        with closing(serving_member.channel()) as serving, closing(asking_member.channel()) as asking:
            served = Served(serving)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                await ask(asking, served.port)
                assert 1 <= len(attempts) <= 30
                for _ in range(3):
                    attempts.clear()
                    await ask(asking, served.port)
                    assert attempts == [serving_member.keys().public_key]
                nursery.cancel_scope.cancel()

    run(main)


def test_keys_are_rolled_without_a_restart_of_those_who_accept_them(fleet: Fleet) -> None:
    """The asker gets a new pair: it is accepted beside the old one, and then instead of it."""
    serving_member, old = fleet.friends("serving", "old")
    new = fleet.member("new")
    fleet.accept(serving_member, by=new)

    async def main() -> None:
        with closing(serving_member.channel()) as serving:
            served = Served(serving)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                with closing(old.channel()) as before, closing(new.channel()) as after:
                    await ask(before, served.port)
                    await refusal(after, served.port)
                    fleet.accept(new, by=serving_member)
                    await ask(before, served.port)
                    await ask(after, served.port)
                    fleet.forget(old, by=serving_member)
                    await ask(after, served.port)
                    await refusal(before, served.port)
                nursery.cancel_scope.cancel()

    run(main)


def test_the_key_of_a_server_is_rolled_while_both_are_accepted(fleet: Fleet) -> None:
    """The server starts anew with another pair, at the same address; the asker goes on."""
    old, new, asking_member = fleet.friends("old", "new", "asking")

    async def main() -> None:
        with closing(asking_member.channel()) as asking:
            port = 0
            for each in (old, new, old):
                with closing(each.channel()) as serving:
                    listener = serving.listen(HOST, port)
                    port = listener.port
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(serve, listener, lambda frames: frames)
                        await ask(asking, port)
                        nursery.cancel_scope.cancel()

    run(main)


def test_a_folder_that_cannot_be_read_leaves_the_keys_of_before(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    serving_member, asking_member = fleet.friends("serving", "asking")

    async def main() -> None:
        with closing(serving_member.channel()) as serving, closing(asking_member.channel()) as asking:
            served = Served(serving)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                serving_member.accepted.rename(serving_member.accepted.with_name("moved"))
                await ask(asking, served.port)
                nursery.cancel_scope.cancel()

    run(main)
    assert "the keys of before stay in use" in caplog.text


def test_a_file_without_a_key_keeps_none_of_the_others_accepted(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once. The key that it had before stays: somebody may be writing it just now."""
    monkeypatch.setattr(curve_keys, "LOOK_SECONDS", 0.0)
    member, rolled, leaving = (fleet.member(name) for name in ("member", "rolled", "leaving"))
    for each in (rolled, leaving):
        fleet.accept(each, by=member)
    (rolled_file, leaving_file) = (member.accepted / f"{each.name}.key" for each in (rolled, leaving))

    async def main() -> None:
        keys = member.keys()

        async def accepted() -> set[str]:
            await keys.look_again()
            return set(keys.accepted.values())

        (member.accepted / "notes.key").write_text("keys of the fleet")
        written = rolled_file.read_text()
        rolled_file.write_text("half writ")
        for _ in range(3):
            assert await accepted() == {"member", "rolled", "leaving"}
        leaving_file.unlink()
        assert await accepted() == {"member", "rolled"}
        rolled_file.write_text(written)
        assert await accepted() == {"member", "rolled"}
        rolled_file.unlink()
        assert await accepted() == {"member"}

    run(main)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    assert all("stays accepted until it is deleted" in each for each in errors)


class HangingFolder:
    """A folder of accepted keys on a file system that is away until `come_back`."""

    def __init__(self, folder: Path) -> None:
        self.looks = 0
        self._folder = folder
        self._is_back = threading.Event()
        self._read = curve_keys._read_accepted

    def come_back(self) -> None:
        self._is_back.set()

    def read(self, folder: Path) -> tuple[dict[bytes, str], dict[str, str]]:
        if folder == self._folder:
            self.looks += 1
            self._is_back.wait(60)
        return self._read(folder)


@pytest.mark.parametrize("whose", ["serving", "asking"])
def test_a_folder_that_hangs_leaves_the_keys_of_before(
    fleet: Fleet, whose: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is known is let in, and connects, meanwhile; what changed meanwhile counts as soon as it is back."""
    serving_member, asking_member = fleet.friends("serving", "asking")
    late_member = fleet.member("late")
    fleet.accept(serving_member, by=late_member)
    folder = (serving_member if whose == "serving" else asking_member).accepted

    async def main() -> None:
        members = (serving_member, asking_member, late_member)
        with ExitStack() as stack:
            serving, asking, late = (stack.enter_context(closing(each.channel())) for each in members)
            hangs = HangingFolder(folder)
            monkeypatch.setattr(curve_keys, "_read_accepted", hangs.read)
            monkeypatch.setattr(curve_keys, "LOOK_WAIT_SECONDS", 0.5)
            served = Served(serving)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(served.run)
                    for _ in range(3):
                        await ask(asking, served.port, seconds=AT_ONCE_SECONDS)
                    with closing(await asking.open_link(HOST, served.port, serving.public_key)) as link:
                        assert link.send([b"hello"])
                        assert await link.receive() == (b"hello",)
                    assert hangs.looks == 1, "one thread hangs, and not one for each that connects"
                    fleet.accept(late_member, by=serving_member)
                    if whose == "serving":
                        await refusal(late, served.port)
                    hangs.come_back()
                    monkeypatch.setattr(curve_keys, "LOOK_WAIT_SECONDS", ANSWERED_SECONDS)
                    await until(lambda: serving.access.keys is not None and serving.access.keys._look is None)
                    await ask(late, served.port)
                    await ask(asking, served.port)
                    nursery.cancel_scope.cancel()
            finally:
                hangs.come_back()

    run(main)
    assert caplog.text.count(f"{folder} does not answer; the keys of before stay in use") == 1


# --- engines without keys -------------------------------------------------------------------------------------------


def test_engines_without_keys_are_asked_where_that_is_allowed(fleet: Fleet) -> None:
    """And those with keys with theirs, also at the address where one without had been."""
    one, other = fleet.friends("one", "other")

    async def main() -> None:
        with closing(other.channel(allows_insecure=True)) as asking:
            port = 0
            for make in (ZmqSideChannel, one.channel, ZmqSideChannel):
                with closing(make()) as serving:
                    listener = serving.listen(HOST, port)
                    port = listener.port
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(serve, listener, lambda frames: frames)
                        for _ in range(2):
                            await ask(asking, port)
                        link = await asking.open_link(HOST, port, serving.public_key)
                        link.send([b"hello"])
                        assert await link.receive() == (b"hello",)
                        nursery.cancel_scope.cancel()

    run(main)


def test_no_engine_without_keys_is_asked_unless_that_is_allowed(fleet: Fleet) -> None:
    async def main() -> None:
        with closing(ZmqSideChannel()) as serving, closing(fleet.member("one").channel()) as asking:
            served = Served(serving)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                await refusal(asking, served.port)
                with pytest.raises(AccessRefused):
                    await asking.open_link(HOST, served.port)
                nursery.cancel_scope.cancel()
            assert served.heard == []

    run(main)


# --- strangers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unknown key", "no key"])
def test_a_stranger_is_refused_before_it_has_said_anything(
    fleet: Fleet, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine, where its thread goes on when libzmq has begun and ended the connection: there is nowhere
    to send to."""
    unknown = fleet.member("unknown")
    fleet.accept(serving_member := fleet.member("serving"), by=unknown)
    send = zmq.Socket.send_multipart

    def send_unless_asking(sender: zmq.Socket[bytes], *arguments: Any, **options: Any) -> Any:
        if sender.type == zmq.DEALER:
            raise zmq.Again
        return send(sender, *arguments, **options)

    async def main() -> None:
        made = unknown.channel() if kind == "unknown key" else ZmqSideChannel()
        with closing(serving_member.channel()) as serving, closing(made) as stranger:
            served = Served(serving)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                monkeypatch.setattr(zmq.Socket, "send_multipart", send_unless_asking)
                assert await refusal(stranger, served.port) == (NO_KEY_HERE if kind == "no key" else NOT_LET_IN)
                nursery.cancel_scope.cancel()
            assert served.heard == []

    run(main)


@pytest.mark.parametrize("kind", ["unknown key", "no key"])
def test_a_stranger_costs_nothing(fleet: Fleet, kind: str) -> None:
    """Hundreds of them, while members are served: neither descriptors nor sockets are left of them."""
    serving_member, asking_member = fleet.friends("serving", "asking")
    unknown = fleet.member("unknown")
    fleet.accept(serving_member, by=unknown)

    async def main() -> None:
        made = unknown.channel() if kind == "unknown key" else ZmqSideChannel()
        serving_channel, asking_channel = serving_member.channel(), asking_member.channel()
        with closing(serving_channel) as serving, closing(asking_channel) as asking, closing(made) as stranger:
            served = Served(serving)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                await ask(asking, served.port)
                await refusal(stranger, served.port)
                before = len(os.listdir("/proc/self/fd"))
                limit = trio.CapacityLimiter(20)

                async def knock() -> None:
                    async with limit:
                        with pytest.raises(AccessRefused):
                            await stranger.connect(HOST, served.port).ask([b"let me in"])

                async with trio.open_nursery() as strangers:
                    for _ in range(STRANGERS):
                        strangers.start_soon(knock)
                    for _ in range(10):
                        await ask(asking, served.port)
                await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
                nursery.cancel_scope.cancel()
            assert set(served.heard) == {(b"hello",)}

    run(main)


def test_a_listener_with_keys_says_no_word_to_who_speaks_without(fleet: Fleet) -> None:
    """A client that goes on as if it had been let in: greeting, READY, a question. Only the greeting comes back."""
    member = fleet.member("one")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"
    question = b"\x01\x00\x00\x05hello"

    async def main() -> None:
        with closing(member.channel()) as serving:
            served = Served(serving)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                said = b""
                async with await trio.open_tcp_stream(HOST, served.port) as stream:
                    await stream.send_all(greeting + ready + question)
                    with trio.move_on_after(AT_ONCE_SECONDS):
                        try:
                            async for chunk in stream:
                                said += chunk
                        except trio.BrokenResourceError:
                            pass
                assert len(said) <= 64
                assert served.heard == []
                nursery.cancel_scope.cancel()

    run(main)


def test_nobody_is_let_in_by_a_mistake(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    serving_member, asking_member = fleet.friends("serving", "asking")

    async def broken(*_: object) -> str | None:
        raise RuntimeError("injected")

    monkeypatch.setattr(Gate, "_find_fault", broken)

    async def main() -> None:
        with closing(serving_member.channel()) as serving, closing(asking_member.channel()) as asking:
            served = Served(serving)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                await refusal(asking, served.port)
                monkeypatch.undo()
                await ask(asking, served.port)
                nursery.cancel_scope.cancel()
            assert served.heard == [(b"hello",)]

    run(main)


@pytest.mark.parametrize("step", ["_take", "_reply"])
def test_a_gate_that_raises_goes_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """It is a task of the trio run itself: what comes out of it ends the run, and all that the process transfers."""
    serving_member, asking_member = fleet.friends("serving", "asking")
    whole = getattr(Gate, step)

    def broken(*_: object) -> None:
        monkeypatch.setattr(Gate, step, whole)
        raise RuntimeError("injected")

    async def main() -> None:
        with closing(serving_member.channel()) as serving, closing(asking_member.channel()) as asking:
            served = Served(serving)
            monkeypatch.setattr(Gate, step, broken)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                async with trio.open_nursery() as asks:  # it may get no answer
                    asks.start_soon(asking.connect(HOST, served.port).ask, [b"hello"])
                    await until(lambda: "injected" in caplog.text)
                    asks.cancel_scope.cancel()
                await ask(asking, served.port)
                nursery.cancel_scope.cancel()

    run(main)
    assert "injected" in caplog.text


def test_nobody_is_let_in_when_there_is_no_gate(fleet: Fleet) -> None:
    serving_member, asking_member = fleet.friends("serving", "asking")

    async def main() -> None:
        with closing(serving_member.channel()) as serving, closing(asking_member.channel()) as asking:
            served = Served(serving)
            assert serving._gate is not None
            serving._gate.close()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.run)
                with trio.move_on_after(1.0), contextlib.suppress(AccessRefused, PortRefused):
                    await asking.connect(HOST, served.port).ask([b"hello"])
                    raise AssertionError("it was let in")
                nursery.cancel_scope.cancel()
            assert served.heard == []

    run(main)


def test_a_server_of_something_else_is_still_told_from_one_with_keys(fleet: Fleet) -> None:
    async def main() -> None:
        with closing(fleet.member("one").channel()) as asking, socket.create_server((HOST, 0)) as other:

            def hang_up() -> None:
                while True:
                    try:
                        other.accept()[0].close()
                    except OSError:
                        return

            thread = threading.Thread(target=hang_up)
            thread.start()
            try:
                with trio.fail_after(10.0), pytest.raises(NotASideChannel):
                    await asking.connect(HOST, other.getsockname()[1]).ask([b"hello"])
            finally:
                other.shutdown(socket.SHUT_RDWR)
                await trio.to_thread.run_sync(thread.join)

    run(main)


# --- directories of keys --------------------------------------------------------------------------------------------


def test_a_pair_is_made_once_and_its_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    own, public = make_pair(directory, "prefill")
    keys = CurveKeys(str(directory))
    assert keys.accepted == {keys.public_key: "prefill"}
    assert own.stat().st_mode & 0o077 == 0
    assert keys.secret_key.decode() not in public.read_text()
    assert keys.secret_key.decode() not in repr(keys)
    with pytest.raises(FileExistsError):
        make_pair(directory, "prefill")
    with pytest.raises(FileExistsError):
        make_pair(directory, "again")
    assert CurveKeys(str(directory)).accepted == keys.accepted, "a pair that was not made leaves nothing"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("engine.key_secret", None),
        ("engine.key_secret", ""),
        ("engine.key_secret", 'public-key = "short"\nsecret-key = "short"'),
        ("engine.key_secret", f'public-key = "{"0" * 40}"'),
        ("accepted/odd.key", 'public-key = "' + "\\" * 40 + '"'),
        ("accepted/high.key", 'public-key = "' + "#" * 40 + '"'),
        ("accepted/empty.key", ""),
        ("accepted/large.key", "#" * 100_000),
    ],
)
def test_a_directory_that_cannot_be_used_names_the_file(tmp_path: Path, file: str, content: str | None) -> None:
    make_pair(tmp_path, "one")
    path = tmp_path / file
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(KeyDirectoryError, match=path.name):
        CurveKeys(str(tmp_path))


def test_a_directory_without_a_folder_of_accepted_keys_cannot_be_used(tmp_path: Path) -> None:
    make_pair(tmp_path, "one")
    (tmp_path / "accepted" / "one.key").unlink()
    assert CurveKeys(str(tmp_path)).accepted == {}
    (tmp_path / "accepted").rmdir()
    with pytest.raises(KeyDirectoryError, match="accepted"):
        CurveKeys(str(tmp_path))


# --- what listens where ---------------------------------------------------------------------------------------------


def test_a_listener_listens_at_its_address_only(fleet: Fleet) -> None:
    async def main() -> None:
        for make in (ZmqSideChannel, fleet.member("one").channel, lambda: ZmqSideChannel(LOOPBACK)):
            with closing(make()) as channel:
                port = channel.listen(HOST, 0).port
                for elsewhere in ("127.0.0.2", *_addresses_of_this_machine()):
                    with pytest.raises(ConnectionRefusedError):
                        socket.create_connection((elsewhere, port), timeout=5.0)
                socket.create_connection((HOST, port), timeout=5.0).close()

    run(main)


def _addresses_of_this_machine() -> list[str]:
    """Others than the loopback's."""
    found = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return sorted(str(each) for each in found if not str(each).startswith("127."))
