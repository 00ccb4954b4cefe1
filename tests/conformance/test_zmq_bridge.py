"""The real ZMQ side channel: the contract's suite, and what only real sockets can show."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import trio
import trio.testing
import zmq

from connector.ports import zmq_bridge
from connector.ports.side_channel import (
    ConnectionEnded,
    LinkEnded,
    NameNotResolved,
    NotASideChannel,
    PortRefused,
    Reached,
    SideChannel,
)
from connector.ports.zmq_bridge import ZmqLink, ZmqSideChannel
from connector.ports.zmq_bridge.channel import OVERSIZE_FACTOR, REPLIES_QUEUED_MAX
from connector.ports.zmq_bridge.requester import A_LINE, GREETING_SECONDS
from connector.wire import control, handshake, inspection
from tests.attack import zmtp
from tests.conformance.side_channel_suite import HOST, PeerProcess, SideChannelSuite, lost_soon, serve, until
from tests.rig.key_files import Fleet
from tests.rig.looks import look_patiently
from tests.rig.name_server import name_server
from tests.rig.network import OTHER_SERVERS, BlackHole, has_ipv6
from tests.rig.process import stop_process

ROOT = Path(__file__).parents[2]

GARBAGE = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, bytes(10), b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\xff" * 54]


class RealPeerProcess(PeerProcess):
    """`side_channel_peer` in a process."""

    def __init__(self, process: trio.Process, port: int) -> None:
        self.host = HOST
        self.port = port
        self.process = process

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def peer_process() -> AsyncIterator[RealPeerProcess]:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tests.conformance.side_channel_peer"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    try:
        said = b""
        while not said.endswith(b"\n"):
            chunk = await process.stdout.receive_some()
            assert chunk, "the peer process ended"
            said += chunk
        yield RealPeerProcess(process, int(said))
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()


SOON_SECONDS = 30.0
"""Of what takes a second or two: the greeting that does not come, and the look at who listens."""


@pytest.fixture
def looks_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    look_patiently(monkeypatch, SOON_SECONDS)


class TestZmqSideChannel(SideChannelSuite):
    def make_channel(self) -> SideChannel:
        return ZmqSideChannel()

    def peer_process(self, channel: SideChannel) -> AbstractAsyncContextManager[PeerProcess]:
        return peer_process()

    @pytest.fixture(autouse=True)
    def fleet(self, tmp_path: Path) -> None:
        self.fleet_of = Fleet(tmp_path)

    def make_guarded(self) -> tuple[SideChannel, SideChannel, SideChannel]:
        """A stranger with keys of its own, which it would accept everybody with."""
        fleet = self.fleet_of
        member, guarded, stranger = (fleet.member(name) for name in ("member", "guarded", "stranger"))
        fleet.accept(member, by=guarded)
        fleet.accept(guarded, by=member)
        fleet.accept(guarded, by=stranger)
        return guarded.channel(), member.channel(), stranger.channel()

    def test_a_req_socket_is_served_many_times(self) -> None:
        """The built-in decode side asks with one REQ socket for each rank in turn."""

        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            replies: list[list[bytes]] = []

            def client() -> None:
                with zmq.Context() as context, context.socket(zmq.REQ) as req:
                    req.setsockopt(zmq.LINGER, 0)
                    req.setsockopt(zmq.RCVTIMEO, 20_000)
                    req.connect(f"tcp://{HOST}:{listener.port}")
                    for turn in range(5):
                        req.send(b"ask %d" % turn)
                        replies.append(req.recv_multipart())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: (b"payload of " + frames[0], b"clock"))
                await trio.to_thread.run_sync(client)
                nursery.cancel_scope.cancel()
            assert replies == [[b"payload of ask %d" % turn, b"clock"] for turn in range(5)]

        self.run(scenario)

    def test_a_plain_router_is_understood(self) -> None:
        """The built-in prefill side answers from a ROUTER: identity, delimiter, payload, clock."""

        async def scenario(channel: SideChannel) -> None:
            context = zmq.Context()
            router = context.socket(zmq.ROUTER)
            router.setsockopt(zmq.RCVTIMEO, 20_000)
            port = router.bind_to_random_port(f"tcp://{HOST}")
            seen: list[list[bytes]] = []

            def server() -> None:
                message = router.recv_multipart()
                seen.append(message)
                router.send_multipart([message[0], b"", b"payload", b"clock"])

            thread = threading.Thread(target=server)
            thread.start()
            try:
                assert await channel.connect(HOST, port).ask([b"get"]) == (b"payload", b"clock")
                assert seen[0][1:] == [b"", b"get"]
            finally:
                await trio.to_thread.run_sync(thread.join)
                router.close(0)
                context.term()

        self.run(scenario)

    def test_a_reply_does_not_swallow_the_news_of_a_request(self) -> None:
        """libzmq's descriptor is edge-triggered: sending uses up the edge that a parked `receive` waits for."""

        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.connect(f"tcp://{HOST}:{listener.port}")
                dealer.send_multipart([b"", b"first"])
                first = await listener.receive()
                for turn in range(20):
                    async with trio.open_nursery() as nursery:

                        async def receive(turn: int = turn) -> None:
                            assert (await listener.receive()).frames_untrusted == (b"%d" % turn,)

                        nursery.start_soon(receive)
                        await trio.testing.wait_all_tasks_blocked()
                        dealer.send_multipart([b"", b"%d" % turn])
                        time.sleep(0.02)  # the request arrives while this loop does not look
                        listener.reply(first.reply_address, [b"reply"])

        self.run(scenario)

    def test_requests_without_delimiter_are_counted(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.connect(f"tcp://{HOST}:{listener.port}")
                for message in ([b"no delimiter"], [b""], [b"no", b"delimiter"]):
                    dealer.send_multipart(message)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(serve, listener, lambda frames: frames)
                    await until(lambda: listener.counts().undelimited_requests == 3)
                    assert await channel.connect(HOST, listener.port).ask([b"well formed"]) == (b"well formed",)
                    nursery.cancel_scope.cancel()

        self.run(scenario)

    def test_bytes_that_are_not_zmq_disturb_nobody(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                connections = [socket.create_connection((HOST, listener.port)) for _ in GARBAGE]
                try:
                    for connection, garbage in zip(connections, GARBAGE, strict=True):
                        connection.sendall(garbage)
                    for turn in range(20):
                        assert await channel.connect(HOST, listener.port).ask([b"%d" % turn]) == (b"%d" % turn,)
                finally:
                    for connection in connections:
                        connection.close()
                nursery.cancel_scope.cancel()

        self.run(scenario)

    def test_a_frame_beyond_all_bounds_never_gets_here(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0, frame_bytes_max=1000)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                with trio.fail_after(SOON_SECONDS), pytest.raises(ConnectionEnded):
                    await channel.connect(HOST, listener.port).ask([b"x" * (1000 * OVERSIZE_FACTOR + 1)])
                assert listener.counts().oversized_requests == 0
                assert await channel.connect(HOST, listener.port).ask([b"small"]) == (b"small",)
                nursery.cancel_scope.cancel()

        self.run(scenario)

    def test_replies_to_a_client_that_does_not_read_are_dropped(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.setsockopt(zmq.RCVHWM, 1)
                dealer.setsockopt(zmq.RCVBUF, 4096)
                dealer.connect(f"tcp://{HOST}:{listener.port}")
                dealer.send_multipart([b"", b"flood me"])
                request = await listener.receive()
                for _ in range(REPLIES_QUEUED_MAX * 3):
                    listener.reply(request.reply_address, [bytes(10_000)])
                assert listener.counts().dropped_replies > 0

        self.run(scenario)

    @pytest.mark.parametrize("reply", [[b"not delimited"], [b""], [b""] * 40], ids=["undelimited", "bare", "long"])
    def test_a_reply_that_is_none_fails_at_once(self, reply: list[bytes]) -> None:
        async def scenario(channel: SideChannel) -> None:
            context = zmq.Context()
            router = context.socket(zmq.ROUTER)
            router.setsockopt(zmq.RCVTIMEO, 20_000)
            port = router.bind_to_random_port(f"tcp://{HOST}")
            thread = threading.Thread(target=lambda: router.send_multipart([router.recv_multipart()[0], *reply]))
            thread.start()
            try:
                with pytest.raises(NotASideChannel):
                    await channel.connect(HOST, port).ask([b"get"])
            finally:
                await trio.to_thread.run_sync(thread.join)
                router.close(0)
                context.term()

        self.run(scenario)

    @pytest.mark.parametrize(("bind", "connect"), [("::1", "::1"), ("[::1]", "[::1]"), ("localhost", "localhost")])
    def test_other_ways_to_write_this_machine(self, bind: str, connect: str) -> None:
        if ":" in bind and not has_ipv6():
            pytest.skip("no IPv6 loopback here")

        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(bind, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                assert await channel.connect(connect, listener.port).ask([b"hello"]) == (b"hello",)
                link = await channel.open_link(connect, listener.port)
                assert link.send([b"hello"])
                assert await link.receive() == (b"hello",)
                nursery.cancel_scope.cancel()

        self.run(scenario)

    def test_a_name_that_has_an_ipv6_address_alone_can_be_listened_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a cluster without IPv4. A name with addresses of both kinds is tested above."""
        if not has_ipv6():
            pytest.skip("no IPv6 loopback here")
        bind, resolve = zmq.Socket.bind, socket.getaddrinfo

        def bind_by_name(router: zmq.Socket[bytes], address: str) -> Any:
            if "six.example" in address and not router.getsockopt(zmq.IPV6):
                raise zmq.ZMQError(errno.ENODEV)  # as libzmq says that it found no address
            return bind(router, address.replace("six.example", "[::1]"))

        monkeypatch.setattr(zmq.Socket, "bind", bind_by_name)
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: resolve("::1", *rest, **more))

        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen("six.example", 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                assert await channel.connect("six.example", listener.port).ask([b"hello"]) == (b"hello",)
                nursery.cancel_scope.cancel()

        self.run(scenario)

    def test_a_name_server_that_hangs_or_knows_nothing_delays_nobody_else(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            with pytest.raises(NameNotResolved) as failed:
                await channel.connect("unknown.example", 5600).ask([b"hello"])
            assert (failed.value.host, failed.value.port) == ("unknown.example", 5600)
            with pytest.raises(NameNotResolved):
                await channel.open_link("unknown.example", 5600)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                nursery.start_soon(channel.connect("hanging.example", 5600).ask, [b"hello"])
                hanging = channel.connect("hanging.example", 5600)

                async def closed_while_it_waits() -> None:
                    with pytest.raises(trio.ClosedResourceError):
                        await hanging.ask([b"hello"])

                nursery.start_soon(closed_while_it_waits)
                nursery.start_soon(channel.open_link, "hanging.example", 5600)
                for turn in range(20):
                    assert await channel.connect(HOST, listener.port).ask([b"%d" % turn]) == (b"%d" % turn,)
                hanging.close()
                nursery.cancel_scope.cancel()

        with name_server():
            self.run(scenario)

    @pytest.mark.usefixtures("looks_patiently")
    @pytest.mark.parametrize("other", OTHER_SERVERS)
    def test_a_server_of_something_else_is_noticed_by_a_question(self, other: str) -> None:
        """By one that ends the connection at once; by one that waits for a line, or says nothing of use, soon."""

        async def scenario(channel: SideChannel) -> None:
            with OTHER_SERVERS[other]() as port:
                for _ in range(2):
                    with trio.fail_after(SOON_SECONDS), pytest.raises(NotASideChannel) as found:
                        await channel.connect(HOST, port).ask([b"get"])
                    assert (found.value.host, found.value.port) == (HOST, port)

        self.run(scenario)

    @pytest.mark.usefixtures("looks_patiently")
    def test_a_process_that_ends_before_it_greets_is_nobody_else(self) -> None:
        """The kernel has accepted the connection for it, and resets it."""

        async def scenario(channel: SideChannel) -> None:
            with BlackHole() as hole:
                requester = channel.connect(HOST, hole.port)

                async def die() -> None:
                    while requester.reached is not Reached.PORT:
                        await trio.sleep(0.001)
                    hole.close()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(die)
                    with trio.fail_after(SOON_SECONDS), pytest.raises(PortRefused):
                        await requester.ask([b"get"])

        self.run(scenario)

    @pytest.mark.usefixtures("looks_patiently")
    def test_a_listener_that_closes_while_somebody_looks_at_it_is_nobody_else(self) -> None:
        """It resets whoever has just come, and refuses the next."""
        server = socket.create_server((HOST, 0))

        def close() -> None:
            server.accept()[0].close()  # who asks
            looks, _ = server.accept()
            server.close()
            looks.close()

        async def scenario(channel: SideChannel) -> None:
            with trio.fail_after(SOON_SECONDS), pytest.raises(PortRefused):
                await channel.connect(HOST, server.getsockname()[1]).ask([b"get"])

        thread = threading.Thread(target=close)
        thread.start()
        try:
            self.run(scenario)
        finally:
            thread.join()

    def test_who_ends_a_connection_and_then_hangs_is_nobody_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("connector.ports.zmq_bridge.requester.GREETING_SECONDS", 0.2)
        server = socket.create_server((HOST, 0))

        async def scenario(channel: SideChannel) -> None:
            with trio.fail_after(SOON_SECONDS), pytest.raises(ConnectionEnded, match="before anything was said"):
                await channel.connect(HOST, server.getsockname()[1]).ask([b"get"])

        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        try:
            with server:
                self.run(scenario)
        finally:
            thread.join()

    def test_a_question_whose_connection_has_ended_was_not_refused(self) -> None:
        """Also where libzmq has connected again, and been refused, before this loop looks."""

        async def scenario(channel: SideChannel) -> None:
            other = self.make_channel()
            requester = channel.connect(HOST, other.listen(HOST, 0).port)

            async def ask() -> None:
                with pytest.raises(ConnectionEnded):
                    await requester.ask([b"hello?"])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await until(lambda: requester.reached is Reached.LISTENER)
                other.close()  # a listener that is closed alone ends its connections when the gate has had its turn
                time.sleep(0.5)  # longer than libzmq waits before it connects again

        self.run(scenario)

    def test_how_far_a_question_came_when_nobody_speaks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that is stopped: the kernel accepts the connection, and the other one that looks who it is."""
        greeting_seconds = 2.0  # so that a pause of this process does not end the look before it has said its line
        monkeypatch.setattr(zmq_bridge.requester, "GREETING_SECONDS", greeting_seconds)

        async def scenario(channel: SideChannel) -> None:
            with socket.create_server((HOST, 0)) as stopped:
                stopped.settimeout(SOON_SECONDS)
                requester = channel.connect(HOST, stopped.getsockname()[1])
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(requester.ask, [b"hello?"])
                    first, _ = await trio.to_thread.run_sync(stopped.accept)
                    second, _ = await trio.to_thread.run_sync(stopped.accept)
                    with first, second:
                        second.settimeout(SOON_SECONDS)
                        assert await trio.to_thread.run_sync(second.recv, 100) == A_LINE
                        await trio.sleep(2.5 * greeting_seconds)
                        assert requester.reached is Reached.PORT
                        nursery.cancel_scope.cancel()
                stopped.setblocking(False)
                with pytest.raises(BlockingIOError):  # it looked once
                    stopped.accept()

        self.run(scenario)

    def test_a_listener_that_greets_late_is_waited_for(self) -> None:
        """The first connections come to a process that is stopped, which then goes on and answers."""

        async def scenario(channel: SideChannel) -> None:
            async with peer_process() as peer, trio.open_nursery() as nursery:
                stop_process(peer.process.pid)

                async def go_on() -> None:
                    await trio.sleep(1.5 * GREETING_SECONDS)
                    peer.process.send_signal(signal.SIGCONT)

                nursery.start_soon(go_on)
                assert await channel.connect(peer.host, peer.port).ask([b"hello"]) == (b"hello",)

        self.run(scenario)

    def test_a_peer_that_hangs_is_not_lost(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            async with peer_process() as peer:
                link = await channel.open_link(peer.host, peer.port)
                assert link.send([b"hello"])
                assert await link.receive() == (b"hello",)
                stop_process(peer.process.pid)
                assert link.send([b"are you there?"])
                with trio.move_on_after(1) as patience:
                    await link.receive()
                assert patience.cancelled_caught
                peer.process.send_signal(signal.SIGCONT)
                assert await link.receive() == (b"are you there?",)

        self.run(scenario)

    def test_an_answer_does_not_get_stuck_behind_the_news_of_a_send(self) -> None:
        """Sending uses up the edge that a parked `receive` waits for, as with listeners."""

        async def scenario(channel: SideChannel) -> None:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.setsockopt(zmq.LINGER, 0)
                port = router.bind_to_random_port(f"tcp://{HOST}")
                link = await channel.open_link(HOST, port)
                assert link.send([b"hello"])
                address = (await trio.to_thread.run_sync(router.recv_multipart))[0]
                for turn in range(20):
                    async with trio.open_nursery() as nursery:

                        async def receive(turn: int = turn) -> None:
                            assert await link.receive() == (b"%d" % turn,)

                        nursery.start_soon(receive)
                        await trio.testing.wait_all_tasks_blocked()
                        router.send_multipart([address, b"", b"%d" % turn])
                        time.sleep(0.02)  # the answer arrives while this loop does not look
                        assert link.send([b"more"])

        self.run(scenario)

    @pytest.mark.parametrize(
        "answer",
        [[b"not delimited"], [b""], [b""] * 40, [b"", bytes(5 << 20)]],
        ids=["undelimited", "bare", "long", "big"],
    )
    def test_an_answer_that_is_none_ends_the_link(self, answer: list[bytes]) -> None:
        async def scenario(channel: SideChannel) -> None:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.setsockopt(zmq.LINGER, 0)
                link = await channel.open_link(HOST, router.bind_to_random_port(f"tcp://{HOST}"))
                assert link.send([b"hello"])
                address = (await trio.to_thread.run_sync(router.recv_multipart))[0]
                router.send_multipart([address, b"", b"welcome"])
                router.send_multipart([address, *answer])
                assert await link.receive() == (b"welcome",)
                await lost_soon(link)

        self.run(scenario)

    def test_a_server_of_something_else_ends_the_link(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            with socket.create_server((HOST, 0)) as server:
                link = await channel.open_link(HOST, server.getsockname()[1])
                connection, _ = await trio.to_thread.run_sync(server.accept)
                with connection:
                    connection.sendall(b"220 mail.example ESMTP\r\n" * 10)
                    await lost_soon(link)

        self.run(scenario)

    def test_a_link_is_lost_over_a_message_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """libzmq would keep all of it."""
        monkeypatch.setattr(zmq_bridge.link, "LINK_UNFINISHED_BYTES_MAX", 8 << 20)

        async def scenario(channel: SideChannel) -> None:
            with babbler(zmtp.endless()) as port:
                link = await channel.open_link(HOST, port)
                with pytest.raises(LinkEnded, match="message without end"):
                    await link.receive()
                assert not link.send([b"still there?"])

        self.run(scenario)

    def test_who_answers_with_a_message_without_end_is_something_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zmq_bridge.requester, "REPLY_UNFINISHED_BYTES_MAX", 8 << 20)

        async def scenario(channel: SideChannel) -> None:
            with babbler(zmtp.endless()) as port, pytest.raises(NotASideChannel, match="message without end"):
                await channel.connect(HOST, port).ask([b"who is there?"])

        self.run(scenario)

    def test_the_largest_of_what_peers_answer_is_within_the_bounds_of_clients(self) -> None:
        """With what encryption adds to each frame, and no more room than that for who sends something else."""
        encryption = 1 << 10
        reply = handshake.PAYLOAD_BYTES_MAX + encryption
        answer = max(control.ANSWER_BYTES_MAX, inspection.ANSWER_BYTES_MAX) + encryption
        unfinished_reply = zmq_bridge.requester.REPLY_UNFINISHED_BYTES_MAX
        assert reply <= zmq_bridge.requester.REPLY_FRAME_BYTES_MAX < unfinished_reply <= 2 * reply
        assert unfinished_reply <= zmq_bridge.channel.CLIENTS_UNFINISHED_BYTES_MAX <= 2 * reply
        assert answer <= zmq_bridge.link.LINK_FRAME_BYTES_MAX <= 2 * answer
        waiting = zmq_bridge.link.LINK_WAITING_MAX * answer + 2 * zmq_bridge.channel.RECEIVE_BUFFER_BYTES
        assert waiting < zmq_bridge.link.LINK_UNFINISHED_BYTES_MAX <= 2 * waiting

    @pytest.mark.parametrize("client", ["requester", "link", "link that has ended"])
    def test_of_a_message_of_very_many_frames_few_are_taken(
        self, client: str, frames_taken: FramesTaken, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They cost their sender two bytes each, and this loop would stand still while it takes them."""
        said = zmtp.many_frames(MANY_FRAMES)

        async def scenario(channel: SideChannel) -> None:
            with babbler(said, times=1, ends=client == "link that has ended") as port:
                if client == "requester":
                    with pytest.raises(NotASideChannel):
                        await channel.connect(HOST, port).ask([b"who is there?"])
                else:
                    link = await channel.open_link(HOST, port)
                    if client == "link that has ended":
                        assert isinstance(link, ZmqLink)
                        await until(lambda: link._lost is not None)  # the channel looks at it now and then
                    await lost_soon(link)

        self.run(scenario)
        most = max(zmq_bridge.requester.REPLY_FRAMES_MAX, zmq_bridge.link.LINK_FRAMES_MAX)
        assert 0 < frames_taken(zmq.DEALER) <= most + 1

    def test_clients_share_a_bound_and_the_largest_message_without_end_is_lost(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        part = bytes(1 << 20)
        monkeypatch.setattr(zmq_bridge.channel, "CLIENTS_UNFINISHED_BYTES_MAX", 16 << 20)
        monkeypatch.setattr(zmq_bridge.channel, "CLIENTS_MEASURED_EVERY_SECONDS", 0.05)

        async def scenario(channel: SideChannel) -> None:
            with ExitStack() as stack:
                links = [
                    await channel.open_link(HOST, stack.enter_context(babbler(zmtp.endless(part), times=size)))
                    for size in (1, 2) * 4
                ]
                await trio.sleep(0.5)
                assert all(link.send([b"still there?"]) for link in links)
                port = stack.enter_context(babbler(zmtp.endless(part), times=7))
                with pytest.raises(LinkEnded, match="message without end"):
                    await (await channel.open_link(HOST, port)).receive()
                assert all(link.send([b"still there?"]) for link in links)

        self.run(scenario)

    def test_messages_that_wait_to_be_taken_are_not_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a pause of the loop there may be some for each link. The task that measures may have the first turn."""
        monkeypatch.setattr(zmq_bridge.channel, "CLIENTS_UNFINISHED_BYTES_MAX", 1 << 20)
        monkeypatch.setattr(zmq_bridge.channel, "CLIENTS_MEASURED_EVERY_SECONDS", 0.05)

        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            links = [await channel.open_link(HOST, listener.port) for _ in range(4)]
            for link in links:
                assert link.send([b"hello"])
            addresses = [(await listener.receive()).reply_address for _ in links]
            await trio.sleep(0.2)  # they are measured meanwhile
            for _ in range(5):
                async with trio.open_nursery() as nursery:
                    for address in addresses:
                        listener.reply(address, [bytes(1 << 20)])
                    for link in links:
                        nursery.start_soon(link.receive)
                    for link in links:  # the loop stands still until all of them are whole
                        assert link._dealer.poll(60_000)
                    time.sleep(0.1)  # it is time to measure
                await trio.sleep(0.1)

        self.run(scenario)

    def test_other_tasks_have_their_turns_while_many_clients_are_measured(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(zmq_bridge.channel, "CLIENTS_MEASURED_EVERY_SECONDS", 0.01)
        measured, in_a_turn = 0, [0]

        def measure(link: ZmqLink) -> int:
            nonlocal measured
            measured += 1
            return 0

        monkeypatch.setattr(ZmqLink, "measure", measure)

        async def scenario(channel: SideChannel) -> None:
            nonlocal measured
            with socket.create_server((HOST, 0)) as server:
                for _ in range(200):
                    await channel.open_link(HOST, server.getsockname()[1])
                while sum(in_a_turn) < 1000:
                    measured = 0
                    await trio.lowlevel.checkpoint()
                    in_a_turn.append(measured)
            # The other task may come before us in one round of the loop, and after us in the one before.
            assert max(in_a_turn) <= 2 * zmq_bridge.channel.CLIENTS_MEASURED_AT_A_TIME

        self.run(scenario)

    def test_a_client_that_is_closed_while_others_are_measured_is_left_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(zmq_bridge.channel, "CLIENTS_MEASURED_EVERY_SECONDS", 0.01)
        monkeypatch.setattr(zmq_bridge.channel, "CLIENTS_MEASURED_AT_A_TIME", 1)
        crashes: list[str] = []
        monkeypatch.setattr(zmq_bridge.channel, "log_crash", lambda what, error: crashes.append(f"{what}: {error!r}"))

        async def scenario(channel: SideChannel) -> None:
            with socket.create_server((HOST, 0)) as server:
                for _ in range(20):
                    links = [await channel.open_link(HOST, server.getsockname()[1]) for _ in range(10)]
                    await trio.sleep(0.01)
                    for link in links:
                        link.close()
                        await trio.lowlevel.checkpoint()
            assert crashes == []

        self.run(scenario)

    def test_a_link_is_looked_at_only_when_there_is_news_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """There is one for each rank of each engine that is connected, and most of them are quiet. The end of one that
        nobody receives from is noticed all the same."""
        looks, look = 0, zmq_bridge.monitor.Monitor.catch_up

        def counted(monitor: zmq_bridge.monitor.Monitor) -> None:
            nonlocal looks
            looks += 1
            look(monitor)

        monkeypatch.setattr(zmq_bridge.monitor.Monitor, "catch_up", counted)

        async def scenario(channel: SideChannel) -> None:
            nonlocal looks
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)
            assert isinstance(link, ZmqLink)
            assert link.send([b"hello"])
            listener.reply((await listener.receive()).reply_address, [b"welcome"])
            assert await link.receive() == (b"welcome",)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.receive)
                await trio.sleep(0.1)
                looks = 0
                for _ in range(10):
                    link.measure()
                assert looks == 0
                nursery.cancel_scope.cancel()
            listener.close()
            while link._lost is None:
                await trio.sleep(0.01)
                link.measure()

        self.run(scenario)

    def test_messages_that_are_taken_may_be_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zmq_bridge.link, "LINK_UNFINISHED_BYTES_MAX", 32 << 20)
        monkeypatch.setattr(zmq_bridge.channel, "CLIENTS_MEASURED_EVERY_SECONDS", 0.01)

        async def scenario(channel: SideChannel) -> None:
            with babbler(zmtp.message(bytes(1 << 18))) as port:
                link = await channel.open_link(HOST, port)
                for _ in range(400):
                    assert len((await link.receive())[0]) == 1 << 18
                link.close()

        self.run(scenario)

    def test_a_connection_that_is_reset_ends_the_link(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            with socket.create_server((HOST, 0)) as server:
                link = await channel.open_link(HOST, server.getsockname()[1])
                connection, _ = await trio.to_thread.run_sync(server.accept)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.close()
                await lost_soon(link)

        self.run(scenario)

    def test_the_kernel_asks_from_both_ends_of_a_connection_that_is_silent(self) -> None:
        """Without that, an engine that nobody asks for anything would look connected for ever."""

        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                link = await channel.open_link(HOST, listener.port)
                link.send([b"hello"])
                assert await link.receive() == (b"hello",)
                await until(lambda: _timers(listener.port) == ["keepalive", "keepalive"])
                nursery.cancel_scope.cancel()

        self.run(scenario)

    @pytest.mark.parametrize("said", [["--asked"], []], ids=["while it is asked", "while nothing is said"])
    def test_a_machine_that_vanishes_is_noticed_within_bounds(self, said: list[str]) -> None:
        """What was sent the kernel would send again and again by itself, for a quarter of an hour."""
        assert _in_a_network_that_goes_away(*said).startswith("lost after "), "not within a minute"

    def test_a_silent_connection_survives_a_question_of_the_kernel_that_the_network_has_lost(self) -> None:
        assert _in_a_network_that_goes_away("--loses-a-probe") == "goes on"

    def test_nothing_is_left_behind(self) -> None:
        """Descriptors and threads, after a thousand exchanges, hundreds that failed, and hundreds of links."""

        async def exchanges(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                for turn in range(1000):
                    assert await channel.connect(HOST, listener.port).ask([b"%d" % turn]) == (b"%d" % turn,)
                for _ in range(100):
                    with trio.move_on_after(0.001), suppress(PortRefused):
                        await channel.connect(HOST, nobody).ask([b"nobody listens there"])
                for turn in range(200):
                    link = await channel.open_link(HOST, listener.port if turn % 2 else nobody)
                    if turn % 4 < 2:
                        with suppress(LinkEnded), trio.move_on_after(0.002):
                            await link.receive()
                    link.close()
                for _ in range(20):
                    await lost_soon(await channel.open_link(HOST, nobody))  # a lost link holds nothing
                await until(lambda: _descriptors() <= with_listener + FEW)
                nursery.cancel_scope.cancel()
            channel.close()
            await until(lambda: _descriptors() <= before[0] and _threads() <= before[1])

        async def main() -> None:
            nonlocal before, with_listener
            before = (_descriptors(), _threads())
            channel = self.make_channel()
            channel.listen(HOST, 0).close()
            with_listener = _descriptors()
            with trio.fail_after(60):
                await exchanges(channel)

        before, with_listener = (0, 0), 0
        with socket.socket() as bound_but_not_listening:
            bound_but_not_listening.bind((HOST, 0))
            nobody = bound_but_not_listening.getsockname()[1]
            trio.run(main)

    def test_the_threads_of_a_channel_are_there_before_its_first_connection(self) -> None:
        """Where there may be no more of them libzmq ends the process that would start some."""

        async def main() -> None:
            channel = self.make_channel()
            before = _threads()
            link = await channel.open_link(HOST, 1)
            assert _threads() == before
            link.close()
            channel.close()

        trio.run(main)


MANY_FRAMES = 200_000

FramesTaken: TypeAlias = "Callable[[int], int]"


@pytest.fixture
def frames_taken(monkeypatch: pytest.MonkeyPatch) -> FramesTaken:
    """How many frames were taken from sockets of a kind."""
    taken: Counter[int] = Counter()
    recv = zmq.Socket.recv

    def counted(socket: zmq.Socket[bytes], *arguments: Any, **options: Any) -> Any:
        frame = recv(socket, *arguments, **options)
        taken[socket.type] += 1
        return frame

    monkeypatch.setattr(zmq.Socket, "recv", counted)
    return taken.__getitem__


@contextmanager
def babbler(said: bytes, *, times: int | None = None, ends: bool = False) -> Iterator[int]:
    """A server that says this again and again, as soon as somebody has greeted it; its port.

    `times`: only so often; `ends`: it closes the connection then.
    """

    def talk() -> None:
        with suppress(OSError):
            connection, _ = server.accept()
            with connection:
                connection.sendall(zmtp.GREETING + zmtp.ready(b"ROUTER"))
                zmtp.await_hello(connection)
                for _ in itertools.count() if times is None else range(times):
                    connection.sendall(said)
                if not ends:
                    is_over.wait()

    is_over = threading.Event()
    with socket.create_server((HOST, 0)) as server:
        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            is_over.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _in_a_network_that_goes_away(*how: str) -> str:
    """What became of a link; see vanished.py."""
    in_its_own_network = ["unshare", "--map-root-user", "--net"]
    tried = subprocess.run([*in_its_own_network, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no network namespace can be made: {tried.stderr.strip()}")
    ended = subprocess.run(
        [*in_its_own_network, sys.executable, "-m", "tests.conformance.vanished", "--faster", "5", *how],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


FEW = 10
"""Sockets that libzmq may still be closing in its own time."""


def _timers(port: int) -> list[str]:
    """Of both ends of the connections to this port of HOST, what the kernel waits for."""
    kinds = {"00": "nothing", "01": "an acknowledgement", "02": "keepalive"}
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, _, timer, *_ = line.split()
        if state == "01" and f"{port:04X}" in (local[-4:], remote[-4:]):
            found.append(kinds.get(timer[:2], timer))
    return found


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
