"""What every side channel must do: the contract of `connector.ports.side_channel`, line by line, as tests.

A subclass says how to make a side channel and how to run a scenario (`test_zmq_bridge.py`: real sockets and the real
clock; a fake brings its own). Nothing here knows what is behind the Protocol. The waits of the scenarios are generous:
they only bound a test that fails.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pytest
import trio

from connector.ports.side_channel import (
    FRAMES_TOO_MANY_MAX,
    AccessRefused,
    ConnectionEnded,
    Link,
    LinkEnded,
    Listener,
    NameNotResolved,
    PortRefused,
    PortUnavailable,
    Reached,
    Requester,
    SideChannel,
    SideChannelError,
)
from tests.rig.network import free_port

HOST = "127.0.0.1"
CLIENTS = 200
AT_ONCE_SECONDS = 20.0
"""What is noticed at once is noticed sooner than this: in a few milliseconds on a quiet machine, and in seconds on one
that stands still. What is not is noticed by a time limit of the kernel, half a minute at least, or never."""


async def serve(
    listener: Listener, answer: Callable[[tuple[bytes, ...]], Sequence[bytes]], units: int | None = None
) -> None:
    """Answer every request at once, until cancelled; `units`: what each has cost, if that is said."""
    while True:
        request = await listener.receive()
        if units is not None:
            listener.charge(request.reply_address, units)
        listener.reply(request.reply_address, answer(request.frames_untrusted))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that nothing announces; the scenario's time limit bounds it."""
    while not condition():
        await trio.sleep(0.01)


class PeerProcess(ABC):
    """Another process, with a listener at (host, port) that answers every request with the same frames."""

    host: str
    port: int

    @abstractmethod
    async def kill(self) -> None: ...


async def lost_soon(link: Link) -> LinkEnded:
    """The link must be lost at once, and stay lost."""
    with trio.fail_after(AT_ONCE_SECONDS), pytest.raises(LinkEnded) as lost:
        await link.receive()
    assert not link.send([b"into the void"])
    with pytest.raises(LinkEnded):
        await link.receive()
    assert lost.value.error
    return lost.value


class SideChannelSuite(ABC):
    @abstractmethod
    def make_channel(self) -> SideChannel:
        """A fresh side channel, inside the trio run."""

    @abstractmethod
    def peer_process(self, channel: SideChannel) -> AbstractAsyncContextManager[PeerProcess]:
        """A fresh peer that `channel` can reach; leaving the context ends it."""

    @abstractmethod
    def make_guarded(self) -> tuple[SideChannel, SideChannel, SideChannel]:
        """Inside the trio run: one whose listeners let the second in and not the third, which is a stranger."""

    def run(self, scenario: Callable[[SideChannel], Awaitable[None]], limit_seconds: float = 120.0) -> None:
        """Run a scenario on a fresh channel and close it."""

        async def main() -> None:
            channel = self.make_channel()
            try:
                with trio.fail_after(limit_seconds):
                    await scenario(channel)
            finally:
                channel.close()

        trio.run(main)

    @pytest.mark.parametrize(
        "frames",
        [(b"one",), (b"",), (b"first", b"", b"third"), (bytes(range(256)) * 100, b"\xff")],
        ids=["one", "empty", "several", "binary"],
    )
    def test_frames_arrive_and_come_back_as_they_were(self, frames: tuple[bytes, ...]) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            async with trio.open_nursery() as nursery:
                seen: list[tuple[bytes, ...]] = []

                def answer(request: tuple[bytes, ...]) -> Sequence[bytes]:
                    seen.append(request)
                    return (b"reply", *request)

                nursery.start_soon(serve, listener, answer)
                assert await channel.connect(HOST, listener.port).ask(frames) == (b"reply", *frames)
                assert seen == [frames]
                nursery.cancel_scope.cancel()

        self.run(scenario)

    def test_requests_come_in_order_of_arrival_and_each_reply_finds_its_requester(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            replies: dict[int, tuple[bytes, ...]] = {}

            async def ask(number: int) -> None:
                replies[number] = await channel.connect(HOST, listener.port).ask([b"%d" % number])

            async with trio.open_nursery() as nursery:
                requests = []
                for number in range(20):
                    nursery.start_soon(ask, number)
                    requests.append(await listener.receive())
                assert [request.frames_untrusted for request in requests] == [(b"%d" % n,) for n in range(20)]
                for request in reversed(requests):
                    listener.reply(request.reply_address, [b"reply to", *request.frames_untrusted])
            assert replies == {n: (b"reply to", b"%d" % n) for n in range(20)}

        self.run(scenario)

    def test_many_clients_while_replies_come_from_other_tasks(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            answered = 0

            async def receive_all(nursery: trio.Nursery) -> None:
                while True:
                    request = await listener.receive()
                    nursery.start_soon(reply_later, request.reply_address, request.frames_untrusted)

            async def reply_later(address: bytes, frames: tuple[bytes, ...]) -> None:
                await trio.sleep(random.Random(frames[0]).uniform(0, 0.01))
                listener.reply(address, frames)

            async def client(number: int) -> None:
                nonlocal answered
                for turn in range(10):
                    frames = (b"%d/%d" % (number, turn),)
                    assert await channel.connect(HOST, listener.port).ask(frames) == frames
                    answered += 1

            async with trio.open_nursery() as server:
                server.start_soon(receive_all, server)
                async with trio.open_nursery() as clients:
                    for number in range(CLIENTS):
                        clients.start_soon(client, number)
                server.cancel_scope.cancel()
            assert answered == CLIENTS * 10
            assert listener.counts().dropped_replies == 0

        self.run(scenario)

    def test_a_requester_serves_one_exchange(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                requester = channel.connect(HOST, listener.port)
                await requester.ask([b"once"])
                with pytest.raises((RuntimeError, trio.ClosedResourceError)):
                    await requester.ask([b"twice"])
                nursery.cancel_scope.cancel()

        self.run(scenario)

    def test_silence_lasts_as_long_as_the_caller_lets_it(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            mute = channel.listen(HOST, 0)
            requester = channel.connect(HOST, mute.port)
            assert requester.reached is Reached.NOTHING
            async with trio.open_nursery() as nursery:
                nursery.start_soon(requester.ask, [b"hello?"])
                await until(lambda: requester.reached is Reached.LISTENER)
                await trio.sleep(0.3)
                assert nursery.child_tasks, "it has ended by itself"
                nursery.cancel_scope.cancel()
            assert requester.reached is Reached.LISTENER

        self.run(scenario)

    def test_a_port_where_nobody_listens_refuses_at_once(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, free_port())  # the kernel gives nobody else that port meanwhile
            nobody = listener.port
            listener.close()
            for _ in range(3):
                with trio.fail_after(AT_ONCE_SECONDS), pytest.raises(PortRefused) as refused:
                    await channel.connect(HOST, nobody).ask([b"anybody?"])
                assert (refused.value.host, refused.value.port) == (HOST, nobody)

        self.run(scenario)

    def test_a_request_whose_process_dies_is_refused_at_once(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            async with self.peer_process(channel) as peer:
                assert await channel.connect(peer.host, peer.port).ask([b"hello"]) == (b"hello",)
                await peer.kill()
                with trio.fail_after(AT_ONCE_SECONDS), pytest.raises(PortRefused):
                    await channel.connect(peer.host, peer.port).ask([b"hello?"])

        self.run(scenario)

    def test_a_question_whose_connection_ends_is_not_waited_for(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            mute = channel.listen(HOST, 0)
            requester = channel.connect(HOST, mute.port)
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def ask() -> None:
                    with pytest.raises(ConnectionEnded) as ended:
                        await requester.ask([b"hello?"])
                    assert (ended.value.host, ended.value.port) == (HOST, mute.port)

                await until(lambda: requester.reached is Reached.LISTENER)
                mute.close()
                with trio.fail_after(AT_ONCE_SECONDS):
                    await until(lambda: not nursery.child_tasks)

        self.run(scenario)

    def test_what_was_answered_before_the_connection_ends_arrives(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            replies = list[tuple[bytes, ...]]()

            async def ask(requester: Requester) -> None:
                replies.append(await requester.ask([b"hello?"]))

            for _ in range(20):
                listener = channel.listen(HOST, 0)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask, channel.connect(HOST, listener.port))
                    request = await listener.receive()
                    listener.reply(request.reply_address, [b"here"])
                    await trio.sleep(0.05)  # closing does not linger
                    listener.close()
            assert replies == [(b"here",)] * 20

        self.run(scenario)

    def test_a_late_reply_goes_nowhere(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            for turn in range(20):
                with trio.move_on_after(0.02):
                    await channel.connect(HOST, listener.port).ask([b"impatient", b"%d" % turn])
                async with trio.open_nursery() as nursery:

                    async def ask_again(turn: int = turn) -> None:
                        reply = await channel.connect(HOST, listener.port).ask([b"patient", b"%d" % turn])
                        assert reply == (b"for the patient", b"%d" % turn)

                    nursery.start_soon(ask_again)
                    while True:
                        request = await listener.receive()
                        who, number = request.frames_untrusted
                        listener.reply(request.reply_address, [b"for the " + who, number])
                        if (who, number) == (b"patient", b"%d" % turn):
                            break

        self.run(scenario)

    def test_a_cancelled_ask_costs_only_itself(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            outcomes = {"answered": 0, "cancelled": 0}

            async def ask(number: int) -> None:
                patience_seconds = random.Random(number).choice([0.0, 0.001, 0.005, 20.0])
                with trio.move_on_after(patience_seconds) as patience:
                    assert await channel.connect(HOST, listener.port).ask([b"%d" % number]) == (b"%d" % number,)
                outcomes["cancelled" if patience.cancelled_caught else "answered"] += 1

            async with trio.open_nursery() as server:
                server.start_soon(serve, listener, lambda frames: frames)
                async with trio.open_nursery() as nursery:
                    for number in range(300):
                        nursery.start_soon(ask, number)
                server.cancel_scope.cancel()
            patient = sum(random.Random(n).choice([0.0, 0.001, 0.005, 20.0]) == 20.0 for n in range(300))
            assert outcomes["answered"] >= patient
            assert outcomes["cancelled"] > 0

        self.run(scenario)

    def test_a_cancelled_receive_loses_no_request(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            asks = 400
            received: list[bytes] = []
            cancelled = 0
            limiter = trio.CapacityLimiter(20)

            async def ask(number: int) -> None:
                async with limiter:
                    assert await channel.connect(HOST, listener.port).ask([b"%d" % number]) == (b"ok",)

            async with trio.open_nursery() as nursery:
                for number in range(asks):
                    nursery.start_soon(ask, number)
                chance = random.Random(1)
                while len(received) < asks:
                    with trio.move_on_after(chance.choice([0.0, 0.0001, 0.001])) as brief:
                        request = await listener.receive()
                        received.append(request.frames_untrusted[0])
                        listener.reply(request.reply_address, [b"ok"])
                    cancelled += brief.cancelled_caught
            assert sorted(received, key=int) == [b"%d" % n for n in range(asks)]
            assert cancelled > 0

        self.run(scenario)

    def test_requests_out_of_bounds_are_dropped_and_counted(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0, frames_max=2, frame_bytes_max=100)

            async def ask_in_vain(frames: list[bytes]) -> None:
                with trio.move_on_after(5):
                    await channel.connect(HOST, listener.port).ask(frames)
                    raise AssertionError("a request out of bounds was answered")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                async with trio.open_nursery() as askers:
                    askers.start_soon(ask_in_vain, [b"x" * 101])
                    askers.start_soon(ask_in_vain, [b"1", b"2", b"3"])
                    await until(lambda: listener.counts().oversized_requests == 2)
                    askers.cancel_scope.cancel()
                within = [b"x" * 100, b"2"]
                assert await channel.connect(HOST, listener.port).ask(within) == tuple(within)
                assert listener.counts().oversized_requests == 2
                nursery.cancel_scope.cancel()

        self.run(scenario)

    def test_who_sends_far_too_many_frames_is_ended_and_nobody_else(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0, frames_max=2)
            engine, clumsy, swamper = [await channel.open_link(HOST, listener.port) for _ in range(3)]

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames, 1)
                for each in (engine, clumsy, swamper):
                    assert each.send([b"hello"])
                    assert await each.receive() == (b"hello",)
                assert clumsy.send([b""] * (2 + FRAMES_TOO_MANY_MAX))
                assert swamper.send([b""] * (3 + FRAMES_TOO_MANY_MAX))
                await lost_soon(swamper)
                for each in (engine, clumsy):
                    assert each.send([b"hello"])
                    assert await each.receive() == (b"hello",)
                late = await channel.open_link(HOST, listener.port)
                late.send([b"hello"])  # false if it is lost already
                await lost_soon(late)
                nursery.cancel_scope.cancel()
            counts = listener.counts()
            assert (counts.oversized_requests, counts.undelimited_requests) == (2, 0)

        self.run(scenario)

    def test_it_is_known_from_where_a_request_came_until_its_connection_has_ended(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            assert listener.sender_of(b"nobody has this address") == ""
            link = await channel.open_link(HOST, listener.port)
            link.send([b"hello"])
            address = (await listener.receive()).reply_address
            assert listener.sender_of(address) == HOST
            link.close()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listener.receive)
                await until(lambda: listener.sender_of(address) == "")
                nursery.cancel_scope.cancel()

        self.run(scenario)

    def test_a_reply_that_cannot_be_delivered_is_dropped_and_counted(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            listener.reply(b"nobody has this address", [b"hello"])
            assert listener.counts().dropped_replies == 1
            async with trio.open_nursery() as nursery:
                nursery.start_soon(channel.connect(HOST, listener.port).ask, [b"bye"])
                request = await listener.receive()
                nursery.cancel_scope.cancel()

            def dropped() -> bool:
                listener.reply(request.reply_address, [b"too late"])
                return listener.counts().dropped_replies >= 2

            await until(dropped)

        self.run(scenario)

    def test_addresses_that_cannot_be_used_say_so(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            with pytest.raises(PortUnavailable) as refused:
                channel.listen(HOST, listener.port)
            assert (refused.value.host, refused.value.port) == (HOST, listener.port)
            with pytest.raises(SideChannelError) as not_ours:
                channel.listen("192.0.2.1", 0)  # reserved for documentation: nobody's address
            assert not isinstance(not_ours.value, PortUnavailable)
            for host in ("", "no spaces", "semi;colon", "nul\0", "a" * 300):
                with pytest.raises(SideChannelError):
                    channel.connect(host, 5600)
                with pytest.raises(SideChannelError):
                    await channel.open_link(host, 5600)
            for port in (0, -1, 65536):
                with pytest.raises(SideChannelError):
                    channel.connect(HOST, port)
                with pytest.raises(SideChannelError):
                    await channel.open_link(HOST, port)
            for use in (
                lambda: channel.connect("nobody.invalid", 5600).ask([b"hello"]),
                lambda: channel.open_link("nobody.invalid", 5600),
            ):
                with pytest.raises(NameNotResolved) as unknown:
                    await use()
                assert (unknown.value.host, unknown.value.port) == ("nobody.invalid", 5600)

        self.run(scenario)

    def test_a_port_is_free_again_after_its_listener_closed(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            first = channel.listen(HOST, 0)
            port = first.port
            assert port > 0
            first.close()
            second = None
            while second is None:  # a real port may take a moment
                try:
                    second = channel.listen(HOST, port)
                except SideChannelError:
                    await trio.sleep(0.01)
            assert second.port == port

        self.run(scenario)

    def test_closing_wakes_who_waits(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            mute = channel.listen(HOST, 0)
            requester = channel.connect(HOST, mute.port)
            woken: list[str] = []

            async def wait(name: str, wait_for: Callable[[], Awaitable[object]]) -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await wait_for()
                woken.append(name)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, "receive", listener.receive)
                nursery.start_soon(wait, "ask", lambda: requester.ask([b"hello"]))
                await mute.receive()
                for closed in (listener, requester):
                    closed.close()
                    closed.close()
            assert sorted(woken) == ["ask", "receive"]
            with pytest.raises(trio.ClosedResourceError):
                await listener.receive()
            with pytest.raises(trio.ClosedResourceError):
                listener.reply(b"x", [b"y"])
            unused: Requester = channel.connect(HOST, mute.port)
            unused.close()
            with pytest.raises(trio.ClosedResourceError):
                await unused.ask([b"hello"])

        self.run(scenario)

    def test_closing_the_channel_closes_everything(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            asked = channel.connect(HOST, listener.port)

            async def wait(wait_for: Callable[[], Awaitable[object]]) -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await wait_for()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, lambda: asked.ask([b"hello"]))
                await listener.receive()
                nursery.start_soon(wait, listener.receive)
                await trio.sleep(0.05)
                channel.close()
                channel.close()
            with pytest.raises(trio.ClosedResourceError):
                channel.connect(HOST, 5600)
            with pytest.raises(trio.ClosedResourceError):
                channel.listen(HOST, 0)
            with pytest.raises(trio.ClosedResourceError):
                await channel.open_link(HOST, 5600)

        self.run(scenario)

    def test_one_task_receives_at_a_time(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listener.receive)
                await trio.sleep(0.05)
                with pytest.raises(trio.BusyResourceError):
                    await listener.receive()
                nursery.cancel_scope.cancel()

        self.run(scenario)

    # Links

    def test_messages_of_a_link_go_both_ways_in_order(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)
            for number in range(100):  # the connection does not stand yet
                assert link.send([b"%d" % number, b""])
            requests = [await listener.receive() for _ in range(100)]
            assert [request.frames_untrusted for request in requests] == [(b"%d" % n, b"") for n in range(100)]
            (address,) = {request.reply_address for request in requests}
            for number in range(100):  # an answer needs no question
                listener.reply(address, [b"a", b"%d" % number])
                listener.reply(address, [b"b"])
            for number in range(100):
                assert await link.receive() == (b"a", b"%d" % number)
                assert await link.receive() == (b"b",)
            assert listener.counts().dropped_replies == 0

        self.run(scenario)

    def test_links_do_not_mix(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            links = [await channel.open_link(HOST, listener.port) for _ in range(20)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                for turn in range(5):
                    for number, link in enumerate(links):
                        assert link.send([b"%d/%d" % (number, turn)])
                for number, link in enumerate(links):
                    for turn in range(5):
                        assert await link.receive() == (b"%d/%d" % (number, turn),)
                nursery.cancel_scope.cancel()

        self.run(scenario)

    def test_sending_while_another_task_receives(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)
            received: list[tuple[bytes, ...]] = []

            async def receive() -> None:
                while True:
                    received.append(await link.receive())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                nursery.start_soon(receive)
                chance = random.Random(3)
                for number in range(300):
                    assert link.send([b"%d" % number])
                    await trio.sleep(chance.choice([0.0, 0.0, 0.0001, 0.001]))
                await until(lambda: len(received) == 300)
                nursery.cancel_scope.cancel()
            assert received == [(b"%d" % number,) for number in range(300)]

        self.run(scenario)

    def test_a_link_to_a_port_where_nobody_listens_is_lost_at_once(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, free_port())  # the kernel gives nobody else that port meanwhile
            nobody = listener.port
            listener.close()
            refused = ""
            while "refused" not in refused:  # a real port may take a moment, and end connections until then
                with pytest.raises(PortRefused) as excinfo:
                    await channel.connect(HOST, nobody).ask([b"anybody?"])
                refused = excinfo.value.error
            link = await channel.open_link(HOST, nobody)
            link.send([b"anybody?"])  # false if the refusal has come already
            lost = await lost_soon(link)
            assert (lost.host, lost.port) == (HOST, nobody)
            assert "refused" in lost.error, lost.error

        self.run(scenario)

    def test_a_link_is_lost_at_once_when_its_peer_dies(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            async with self.peer_process(channel) as peer:
                idle = await channel.open_link(peer.host, peer.port)
                link = await channel.open_link(peer.host, peer.port)
                for each in (idle, link):
                    assert each.send([b"hello"])
                    assert await each.receive() == (b"hello",)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lost_soon, idle)
                    await trio.sleep(0.1)
                    await peer.kill()
                await lost_soon(link)

        self.run(scenario)

    def test_a_link_is_lost_at_once_when_its_listener_closes_and_stays_lost(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)
            assert link.send([b"hello"])
            request = await listener.receive()
            listener.reply(request.reply_address, [b"welcome"])
            assert await link.receive() == (b"welcome",)
            port = listener.port
            listener.close()
            await lost_soon(link)
            again: Listener | None = None
            while again is None:  # a real port may take a moment
                try:
                    again = channel.listen(HOST, port)
                except SideChannelError:
                    await trio.sleep(0.01)
            with trio.move_on_after(0.5) as patience:
                await again.receive()
            assert patience.cancelled_caught
            await lost_soon(link)

        self.run(scenario)

    def test_what_arrived_before_the_end_is_received(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            async with self.peer_process(channel) as peer:
                link, beside = [await channel.open_link(peer.host, peer.port) for _ in range(2)]
                for each in (link, beside):
                    assert each.send([b"hello"])
                    assert await each.receive() == (b"hello",)
                for number in range(50):
                    assert link.send([b"%d" % number])
                # The peer takes the messages of its connections in turn: all are answered when as many are over another
                # one, and more for those that were on their way, also when a thread of libzmq is slow.
                for _ in range(200):
                    assert beside.send([b"and I"])
                    assert await beside.receive() == (b"and I",)
                await peer.kill()
                await trio.sleep(0.5)  # and so is the end
                for number in range(50):
                    assert await link.receive() == (b"%d" % number,)
                await lost_soon(link)

        self.run(scenario)

    def test_sending_notices_the_end_and_wakes_who_receives(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            async with self.peer_process(channel) as peer:
                link = await channel.open_link(peer.host, peer.port)
                await peer.kill()
                with trio.fail_after(AT_ONCE_SECONDS):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(lost_soon, link)
                        while link.send([b"hello?"]):
                            await trio.sleep(0.001)

        self.run(scenario)

    def test_sending_never_blocks(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)
            frame = bytes(10_000)
            taken = 0
            while link.send([b"%d" % taken, frame]):
                taken += 1
                assert taken < 100_000
            for number in range(taken):
                assert (await listener.receive()).frames_untrusted == (b"%d" % number, frame)
            while not link.send([b"room again"]):
                await trio.sleep(0.01)
            assert (await listener.receive()).frames_untrusted == (b"room again",)

        self.run(scenario)

    def test_a_cancelled_receive_of_a_link_loses_nothing(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)
            received: list[tuple[bytes, ...]] = []
            cancelled = 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                chance = random.Random(2)
                for number in range(200):
                    assert link.send([b"%d" % number])
                    with trio.move_on_after(chance.choice([0.0, 0.0001, 0.001])) as brief:
                        received.append(await link.receive())
                    cancelled += brief.cancelled_caught
                while len(received) < 200:
                    received.append(await link.receive())
                nursery.cancel_scope.cancel()
            assert received == [(b"%d" % number,) for number in range(200)]
            assert cancelled > 0

        self.run(scenario)

    def test_an_answer_to_a_closed_link_is_dropped_and_counted(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)
            assert link.send([b"bye"])
            request = await listener.receive()
            link.close()

            def dropped() -> bool:
                listener.reply(request.reply_address, [b"too late"])
                return listener.counts().dropped_replies > 0

            await until(dropped)

        self.run(scenario)

    @pytest.mark.parametrize("closed_by", ["link", "channel"])
    def test_closing_a_link_wakes_who_receives(self, closed_by: str) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)

            async def receive() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await link.receive()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await trio.sleep(0.05)
                with pytest.raises(trio.BusyResourceError):
                    await link.receive()
                for _ in range(2):
                    (link if closed_by == "link" else channel).close()
            with pytest.raises(trio.ClosedResourceError):
                await link.receive()
            with pytest.raises(trio.ClosedResourceError):
                link.send([b"hello"])

        self.run(scenario)

    def test_a_lost_link_can_be_closed(self) -> None:
        async def scenario(channel: SideChannel) -> None:
            listener = channel.listen(HOST, 0)
            link = await channel.open_link(HOST, listener.port)
            listener.close()
            await lost_soon(link)
            link.close()
            link.close()
            with pytest.raises(trio.ClosedResourceError):
                await link.receive()

        self.run(scenario)

    # Strangers

    def run_guarded(self, scenario: Callable[[SideChannel, SideChannel, SideChannel], Awaitable[None]]) -> None:
        async def main() -> None:
            channels = self.make_guarded()
            try:
                with trio.fail_after(120.0):
                    await scenario(*channels)
            finally:
                for channel in channels:
                    channel.close()

        self.run_trio(main)

    def run_trio(self, main: Callable[[], Awaitable[None]]) -> None:
        trio.run(main)

    def test_a_stranger_is_refused_at_once_and_not_heard(self) -> None:
        async def scenario(guarded: SideChannel, member: SideChannel, stranger: SideChannel) -> None:
            listener = guarded.listen(HOST, 0)
            heard: list[tuple[bytes, ...]] = []

            def answer(frames: tuple[bytes, ...]) -> Sequence[bytes]:
                heard.append(frames)
                return frames

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, answer)
                for turn in range(5):
                    with trio.fail_after(AT_ONCE_SECONDS), pytest.raises(AccessRefused) as refused:
                        await stranger.connect(HOST, listener.port).ask([b"let me in"])
                    assert (refused.value.host, refused.value.port) == (HOST, listener.port)
                    assert refused.value.error
                    assert await member.connect(HOST, listener.port).ask([b"%d" % turn]) == (b"%d" % turn,)
                nursery.cancel_scope.cancel()
            assert heard == [(b"%d" % turn,) for turn in range(5)]

        self.run_guarded(scenario)

    def test_a_link_of_a_stranger_is_lost_at_once_and_not_heard(self) -> None:
        async def scenario(guarded: SideChannel, member: SideChannel, stranger: SideChannel) -> None:
            listener = guarded.listen(HOST, 0)
            known = await member.open_link(HOST, listener.port, guarded.public_key)
            link = await stranger.open_link(HOST, listener.port, guarded.public_key)
            link.send([b"let me in"])  # false if the refusal has come already
            for _ in range(2):
                with trio.fail_after(AT_ONCE_SECONDS), pytest.raises(AccessRefused):
                    await link.receive()
                assert not link.send([b"into the void"])
            assert known.send([b"hello"])
            request = await listener.receive()
            assert request.frames_untrusted == (b"hello",)
            listener.reply(request.reply_address, [b"welcome"])
            assert await known.receive() == (b"welcome",)

        self.run_guarded(scenario)

    def test_many_strangers_keep_no_member_out(self) -> None:
        async def scenario(guarded: SideChannel, member: SideChannel, stranger: SideChannel) -> None:
            listener = guarded.listen(HOST, 0)
            refused = 0

            async def knock() -> None:
                nonlocal refused
                with pytest.raises(AccessRefused):
                    await stranger.connect(HOST, listener.port).ask([b"let me in"])
                refused += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener, lambda frames: frames)
                async with trio.open_nursery() as strangers:
                    for _ in range(CLIENTS):
                        strangers.start_soon(knock)
                    for turn in range(10):
                        assert await member.connect(HOST, listener.port).ask([b"%d" % turn]) == (b"%d" % turn,)
                nursery.cancel_scope.cancel()
            assert refused == CLIENTS

        self.run_guarded(scenario)
