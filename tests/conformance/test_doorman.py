"""Strangers at a listener, over real TCP: who is ended, and who is served meanwhile.

The rules are tested by tests/unit/test_admission.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import itertools
import os
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import trio

from connector.clock import NS_PER_SECOND
from connector.ports import doorman, side_channel, zmq_bridge
from connector.ports.descriptors import TooFewDescriptors
from connector.ports.nixl import MemoryRange, NixlCallFailed
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.nixl_agent.thread import AGENT_DESCRIPTORS
from connector.ports.side_channel import DescriptorsExhausted, NameNotResolved, Reached
from connector.ports.tcp import peer_address, received_bytes, unread_bytes
from connector.ports.zmq_bridge import ZmqListener, ZmqRequester, ZmqSideChannel
from connector.ports.zmq_bridge.channel import CONTEXT_DESCRIPTORS
from connector.tools.cli.main import main as nixl_actor
from statemachine import admission
from tests.attack.zmtp import (
    EMPTY,
    GREETING,
    HELLO,
    MORE,
    await_hello,
    connect,
    endless,
    frame,
    is_ended,
    many_frames,
    message,
    ready,
)
from tests.rig import process
from tests.rig.network import has_ipv6

HOST = "127.0.0.1"
NAME = "nobody.invalid"
STRANGER = "127.0.0.2"
NEIGHBOUR = "127.0.0.3"
MB = 1 << 20
SECONDS = 60
ENDED_SECONDS = 30.0
"""In which a connection that is cut off has ended, also where libzmq's thread has no turn for a while."""
MINUTE_OUTSIDE = partial(admission.AdmissionLimits, rates=admission.AdmissionRates(shut_out_ns=60 * NS_PER_SECOND))
"""Who is shut out stays so for as long as a test looks, however slow the machine is."""
M_TRIM_THRESHOLD = -1
"""Of glibc's malloc.h."""


def a_hundred_kib_unfinished(**limits: Any) -> admission.AdmissionLimits:
    """Are what a connection may have received beyond its whole messages."""
    return admission.AdmissionLimits(**limits | {"unfinished_bytes_max": 100 << 10})


class Door:
    """A listener that answers everything with the same."""

    def __init__(self, units: int, host: str, **options: int) -> None:
        self.no_room: list[str] = []
        channel = ZmqSideChannel(on_no_room=self.no_room.append)
        self.cut_off: list[tuple[str, str]] = []
        self.channel = channel
        self.units = units
        self.served = 0
        self.listener: ZmqListener = channel.listen(
            host, 0, on_cut_off=lambda address, why: self.cut_off.append((address, why)), **options
        )

    async def serve(self) -> None:
        while True:
            request = await self.listener.receive()
            self.served += 1
            self.listener.charge(request.reply_address, self.units)
            self.listener.reply(request.reply_address, request.frames_untrusted)

    async def ask(self) -> None:
        """An engine of ours is served."""
        assert await self.channel.connect(HOST, self.listener.port).ask([b"hello"]) == (b"hello",)

    async def stranger(self, *said: bytes, source: str = STRANGER) -> socket.socket:
        return await trio.to_thread.run_sync(connect, (HOST, self.listener.port), source, said)

    async def only_descriptor(self) -> int:
        """Of the one connection that there is, when it is known."""
        await self.until_known(1)
        (descriptor,) = self.listener._doorman._by_descriptor
        return descriptor

    async def until_known(self, connections: int) -> None:
        """They have been accepted, which a thread of libzmq does when it has its turn."""
        while len(self.listener._doorman._by_descriptor) < connections:
            await trio.sleep(0.01)

    async def until_cut_off(self, count: int) -> None:
        while len(self.cut_off) < count:
            await trio.sleep(0.01)

    def received(self) -> int:
        """Bytes over all connections, since they were made."""
        return sum(map(received_bytes, self.listener._doorman._by_descriptor))

    def wait_until_read(self, received: int) -> None:
        """So many bytes in all have come, and libzmq's thread has read them. The loop stands still meanwhile."""
        deadline = time.monotonic() + SECONDS
        while self.received() < received or any(map(unread_bytes, self.listener._doorman._by_descriptor)):
            assert time.monotonic() < deadline, f"{self.received()} of {received} bytes have come"
            time.sleep(0.01)
        time.sleep(0.1)  # and has handed on what it has read last


@contextlib.asynccontextmanager
async def door(units: int = 1, host: str = HOST, **options: int) -> AsyncIterator[Door]:
    made = Door(units, host, **options)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.serve)
            yield made
            nursery.cancel_scope.cancel()
    finally:
        made.channel.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(SECONDS):
            await test()

    trio.run(main)


@contextlib.contextmanager
def memory_goes_back() -> Iterator[None]:
    """What is freed goes back to the system at once. Otherwise glibc keeps the end of a heap, for each thread that
    allocates, and `malloc_trim` leaves it alone: up to twice the largest block that was ever freed (64 MB at most), so
    it depends on what the process has done before."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:  # no glibc
        yield
        return
    set_option(M_TRIM_THRESHOLD, 128 << 10)
    try:
        yield
    finally:
        set_option(M_TRIM_THRESHOLD, 32 << 20)


def resident_bytes() -> int:
    """Without free pages in the middle of heaps."""
    with contextlib.suppress(AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)
    return process.resident_bytes()


def send_until_ended(connection: socket.socket, piece: bytes, bytes_max: int) -> int:
    """How many bytes were taken before the connection was ended."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < bytes_max:
            connection.sendall(piece)
            sent += len(piece)
    return sent


def fill(connection: socket.socket, piece: bytes) -> int:
    """How many bytes the kernel takes before somebody has to read."""
    sent = 0
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += connection.send(piece)
    return sent


def test_a_message_without_end_is_ended_and_its_memory_given_back() -> None:
    async def test() -> None:
        async with door() as listening:
            await listening.ask()
            before = resident_bytes()
            stranger = await listening.stranger(HELLO, frame(b"", MORE))
            with stranger:
                sent = await trio.to_thread.run_sync(send_until_ended, stranger, endless() * 16, 4096 * MB)
            assert sent < 4096 * MB
            assert listening.cut_off == [(STRANGER, admission.ENDLESS)]
            await listening.ask()
            while resident_bytes() - before > 16 * MB:
                await trio.sleep(0.01)
            assert listening.served == 2

    with memory_goes_back():
        run(test)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                kept.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in kept:
            os.close(each)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """So many, and no more."""
    spare = [os.dup(0) for _ in range(count)]
    with no_descriptor_left():
        for each in spare:
            os.close(each)
        yield


def in_a_process_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    """Where no thread of another test, of UCX for instance, takes the descriptor that somebody else has given back."""

    @functools.wraps(test)
    def elsewhere(**arguments: Any) -> None:
        program = f"from {__name__} import {test.__name__} as test; test.__wrapped__(**{arguments!r})"
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=3 * SECONDS)
        if ran.returncode:
            pytest.fail(ran.stdout + ran.stderr)

    return elsewhere


async def knock(stranger: socket.socket, port: int) -> None:
    """The kernel connects it, whoever accepts it."""
    stranger.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        stranger.connect((HOST, port))


async def is_greeted(stranger: socket.socket) -> None:
    """It has been accepted."""
    while True:
        with contextlib.suppress(BlockingIOError):
            assert stranger.recv(1) == GREETING[:1]
            return
        await trio.sleep(0.01)


@in_a_process_of_its_own
def test_who_asks_without_a_descriptor_says_so() -> None:
    """With each number of descriptors that is too small: for a socket of libzmq, or for the connection."""

    async def outcome(count: int) -> str:
        channel = ZmqSideChannel()
        channel.listen(HOST, 0)  # as engines do; libzmq would end the process if it had to start a thread now
        try:
            with socket.create_server((HOST, 0)) as server:
                requester = channel.connect(HOST, server.getsockname()[1])
                with descriptors_left(count), trio.move_on_after(0.5):
                    await requester.ask([b"hello"])
            return requester.reached.name
        except DescriptorsExhausted:
            return "raised"
        finally:
            channel.close()

    async def test() -> None:
        seen: list[str] = []
        for count in itertools.count():
            seen.append(await outcome(count))
            while seen[-1] in (Reached.NOTHING.name, Reached.ADDRESS.name):  # a thread of libzmq has had no turn yet
                seen[-1] = await outcome(count)
            if seen[-1] == Reached.PORT.name:
                break
        assert seen[0] == "raised"
        assert set(seen) == {"raised", Reached.NO_DESCRIPTOR.name, Reached.PORT.name}

    run(test)


@in_a_process_of_its_own
def test_who_looks_again_without_a_descriptor_does_not_blame_the_other_end() -> None:
    """The other end has ended the connection without a greeting, and nothing is left to see why."""
    look = ZmqRequester._look_at_greeting

    async def look_without_a_descriptor(requester: ZmqRequester, address: str) -> bytes:
        with no_descriptor_left():
            return await look(requester, address)

    async def test() -> None:
        channel = ZmqSideChannel()
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, trio.SocketStream.aclose, 0, host=HOST))
            patched = mock.patch.object(ZmqRequester, "_look_at_greeting", look_without_a_descriptor)
            with patched, pytest.raises(DescriptorsExhausted):
                await channel.connect(HOST, listener.socket.getsockname()[1]).ask([b"hello"])
            nursery.cancel_scope.cancel()
        channel.close()

    run(test)


@in_a_process_of_its_own
def test_who_looks_a_name_up_without_a_descriptor_does_not_blame_the_name() -> None:
    async def test() -> None:
        channel = ZmqSideChannel()
        with no_descriptor_left():
            for use in (channel.connect(NAME, 5600).ask([b"hello"]), channel.open_link(NAME, 5600)):
                with pytest.raises(DescriptorsExhausted) as raised:
                    await use
                assert (raised.value.host, raised.value.port) == (NAME, 5600)
        with pytest.raises(NameNotResolved):
            await channel.connect(NAME, 5600).ask([b"hello"])
        channel.close()

    run(test)


@in_a_process_of_its_own
def test_a_channel_is_not_made_where_libzmq_would_end_the_process() -> None:
    """With each number of descriptors that is too small."""
    for count in range(CONTEXT_DESCRIPTORS):
        with descriptors_left(count), pytest.raises(TooFewDescriptors):
            ZmqSideChannel()
    with descriptors_left(CONTEXT_DESCRIPTORS):
        channel = ZmqSideChannel()
    channel.close()


@in_a_process_of_its_own
def test_an_agent_is_not_made_where_ucx_would_end_the_process() -> None:
    """With each number of descriptors that is too small on any machine."""
    memory = np.zeros(4096, np.uint8)
    for count in range(AGENT_DESCRIPTORS):
        with descriptors_left(count), pytest.raises(NixlCallFailed, match="too few file descriptors") as failed:
            RealNixlPort.open("x", [MemoryRange(memory.ctypes.data, memory.nbytes)])
        assert "UCX" not in str(failed.value)  # nobody has asked it


def test_a_command_that_has_too_few_descriptors_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["nixl-actor", "ps", f"{HOST}:1"])
    refused = mock.patch.object(zmq_bridge.channel, "require_descriptors", side_effect=TooFewDescriptors)
    with refused, pytest.raises(SystemExit) as ended:
        nixl_actor()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"nixl-actor cannot ask: {TooFewDescriptors()}\n"


@in_a_process_of_its_own
def test_who_listens_without_a_descriptor_says_so() -> None:
    """With each number of descriptors that is too small. None stays open."""

    async def test() -> None:
        ZmqSideChannel().close()
        for count in itertools.count():
            before = os.listdir("/proc/self/fd")
            channel = ZmqSideChannel()  # one for each: libzmq has given back what it has used when that is closed
            with descriptors_left(count), contextlib.suppress(DescriptorsExhausted):
                channel.listen(HOST, 0)
                break
            channel.close()
            assert os.listdir("/proc/self/fd") == before, f"{count} were left"
        assert count > 5
        channel.close()

    run(test)


@in_a_process_of_its_own
def test_without_descriptors_a_stranger_makes_room_and_no_engine() -> None:
    async def test() -> None:
        async with door() as listening:
            engine = await listening.channel.open_link(HOST, listening.listener.port)
            engine.send([b"hello"])
            await engine.receive()
            with await listening.stranger() as first, await listening.stranger(), socket.socket() as late:
                await listening.until_known(3)
                with no_descriptor_left():
                    await knock(late, listening.listener.port)
                    await is_greeted(late)
                    await trio.sleep(0.5)
                    engine.send([b"I am here"])
                    await engine.receive()
                assert await trio.to_thread.run_sync(is_ended, first, ENDED_SECONDS)
                # Another one is cut off if a slow machine has not accepted anybody in the place of the first by then.
                assert listening.cut_off in ([(STRANGER, admission.NO_DESCRIPTORS)] * count for count in (1, 2))
                assert listening.no_room == []

    run(test)


@pytest.mark.parametrize("engines", [0, 1])
@in_a_process_of_its_own
def test_without_descriptors_newcomers_wait_if_there_is_no_stranger(engines: int) -> None:
    """Nothing spins meanwhile but libzmq, what it costs does not grow, and somebody is told."""

    async def test() -> None:
        async with door() as listening:
            links = [await listening.channel.open_link(HOST, listening.listener.port) for _ in range(engines)]
            for each in links:
                each.send([b"hello"])
                await each.receive()
            with socket.socket() as late:
                began = trio.current_time()
                with no_descriptor_left():
                    await knock(late, listening.listener.port)
                    while not listening.no_room:
                        await trio.sleep(0.01)
                    await trio.sleep(0.5)
                    for each in links:
                        each.send([b"I am here"])
                        await each.receive()
                seconds = trio.current_time() - began
                await is_greeted(late)
            assert listening.cut_off == []
            assert "no file descriptor is left in this process, and 1 wait" in listening.no_room[0]
            looks_per_second = NS_PER_SECOND // doorman.MEASURED_EVERY_NS
            assert len(listening.no_room) <= 2 + seconds * looks_per_second, "said more often than it is looked"

    run(test)


def test_the_oldest_stranger_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a greeting, a whole one, or none: all the same."""
    monkeypatch.setattr(doorman, "CONNECTIONS_MAX", 8)
    # Who has not greeted is ended by nobody else.
    monkeypatch.setattr(zmq_bridge.channel, "GREETING_LIMIT_SECONDS", SECONDS)

    async def test() -> None:
        async with door() as listening:
            link = await listening.channel.open_link(HOST, listening.listener.port)
            link.send([b"engine"])
            assert await link.receive() == (b"engine",)
            strangers = [await listening.stranger([b"", GREETING[:20], HELLO][number % 3]) for number in range(20)]
            await listening.until_cut_off(13)
            await listening.ask()
            link.send([b"engine"])
            assert await link.receive() == (b"engine",)
            ended = [await trio.to_thread.run_sync(is_ended, each, 0.2) for each in strangers]
            for each in strangers:
                each.close()
            assert ended == [True] * 14 + [False] * 6  # `ask` has taken one more place
            assert set(listening.cut_off) == {(STRANGER, admission.TOO_MANY)}

    run(test)


def test_a_flood_is_ended_while_who_was_there_before_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_bridge.channel, "AdmissionLimits", MINUTE_OUTSIDE)

    async def test() -> None:
        async with door(units=1000) as listening:
            link = await listening.channel.open_link(HOST, listening.listener.port)
            link.send([b"engine"])
            assert await link.receive() == (b"engine",)
            stranger = await listening.stranger(HELLO)
            with stranger:
                await trio.to_thread.run_sync(send_until_ended, stranger, message(b"x" * 10) * 100, 64 * MB)
            assert listening.cut_off == [(STRANGER, admission.FLOOD)]
            assert listening.listener.counts().dropped_requests > 256
            link.send([b"engine"])
            assert await link.receive() == (b"engine",)
            again = await listening.stranger(HELLO)
            with again:
                assert await trio.to_thread.run_sync(is_ended, again, ENDED_SECONDS)
            # The gate or the doorman, who comes first.
            assert listening.cut_off[1:] in ([], [(STRANGER, admission.SHUT_OUT)])

    run(test)


def test_what_the_kernel_has_of_a_flood_goes_with_its_connection() -> None:
    """Thousands of small messages, of which each would take its turn between those of others. libzmq reads no more of a
    connection that has ended while its messages wait."""

    async def test() -> None:
        async with door(units=1000) as listening:
            said = message(b"x" * 10)
            with await listening.stranger(HELLO) as stranger:
                await listening.ask()
                sent = fill(stranger, said * 100)  # the listener has no turn meanwhile
                await listening.until_cut_off(1)
                assert listening.cut_off == [(STRANGER, admission.FLOOD)]
                dropped = -1
                while (now := listening.listener.counts().dropped_requests) != dropped:
                    dropped = now
                    await trio.sleep(0.5)
            assert sent // len(said) > 10_000
            assert 256 < dropped < 3_000  # those that libzmq had: a buffer of 8 KiB and a few

    run(test)


MANY_FRAMES = many_frames(50_000)
SOME_TOO_MANY = 4_000
"""Frames that alone shut nobody out."""
HELLO_AND_A_WORD = (HELLO, message(b"x"))


def test_a_message_of_very_many_frames_is_dropped_in_pieces() -> None:
    """Other tasks have their turn between them, and another client is answered afterwards. Whoever sent it is ended
    before the last frame, and its address shut out."""

    async def test() -> None:
        async with door() as listening:
            engine = await listening.channel.open_link(HOST, listening.listener.port)
            engine.send([b"hello"])
            await engine.receive()
            with await listening.stranger(*HELLO_AND_A_WORD) as stranger:
                stranger.sendall(MANY_FRAMES)  # the kernel takes them, and this loop does not look yet
                while not listening.cut_off:
                    await trio.lowlevel.checkpoint()
                assert listening.listener._dropping is not None
                engine.send([b"hello"])
                turns = 0
                while listening.listener._dropping is not None:
                    await trio.lowlevel.checkpoint()
                    turns += 1
                await engine.receive()
                assert await trio.to_thread.run_sync(is_ended, stranger, ENDED_SECONDS)
            assert turns >= 50_000 // zmq_bridge.listener.DROPPED_AT_A_TIME // 2
            assert listening.cut_off == [(STRANGER, admission.MANY_FRAMES)]
            assert listening.listener.counts().oversized_requests == 1
            with await listening.stranger(*HELLO_AND_A_WORD) as again:
                assert await trio.to_thread.run_sync(is_ended, again, ENDED_SECONDS)
            await listening.ask()
            assert listening.served == 4

    run(test)


def test_nobody_is_let_in_while_nobody_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What he sent would have to be kept: whoever has many addresses would use up the memory. Afterwards he is."""

    async def test() -> None:
        async with door(frame_bytes_max=2 * MB) as listening, trio.open_nursery() as nursery:
            let_in: list[socket.socket] = []

            async def come() -> None:
                let_in.append(await listening.stranger(*HELLO_AND_A_WORD, source=NEIGHBOUR))

            with await listening.stranger(*HELLO_AND_A_WORD) as stranger:
                await trio.to_thread.run_sync(stranger.sendall, many_frames(300_000))
                await listening.until_cut_off(1)
                served = listening.served
                nursery.start_soon(come)
                known = listening.listener._doorman._connections
                with monkeypatch.context() as patched:
                    # Not before he is there are the other frames dropped: his thread, or libzmq's, may be slow.
                    patched.setattr(zmq_bridge.listener, "DROPPED_AT_A_TIME", 0)
                    while NEIGHBOUR not in {each.address for each in known.values()}:
                        await trio.lowlevel.checkpoint()
                assert listening.listener._dropping is not None, "the test shows nothing"
                while listening.listener._dropping is not None:
                    assert let_in == []
                    await trio.lowlevel.checkpoint()
            while listening.served == served or not let_in:
                await trio.sleep(0.01)
            (newcomer,) = let_in
            newcomer.close()
            assert listening.cut_off == [(STRANGER, admission.MANY_FRAMES)]

    run(test)


def test_many_messages_of_many_frames_are_dropped_in_pieces() -> None:
    """Of few enough frames that they are dropped without another word."""

    async def test() -> None:
        async with door() as listening:
            frames = 20
            count = 500
            with await listening.stranger(HELLO) as stranger:
                said = many_frames(frames - 1) * count
                stranger.sendall(said)  # the kernel takes it, and this loop does not look yet
                turns = 0
                while listening.listener.counts().oversized_requests < count:
                    await trio.lowlevel.checkpoint()
                    turns += 1
            assert turns >= count * frames // zmq_bridge.listener.DROPPED_AT_A_TIME // 2
            assert listening.cut_off == []

    run(test)


def test_some_frames_too_many_shut_nobody_out_and_are_paid_for() -> None:
    """Behind its sender's address there may be engines. Who goes on is ended as any flood is."""

    async def test() -> None:
        async with door() as listening:
            said = many_frames(4 + side_channel.FRAMES_TOO_MANY_MAX)  # with the delimiter and those that are served
            began = trio.current_time()
            with await listening.stranger(HELLO) as stranger:
                await trio.to_thread.run_sync(stranger.sendall, said)
                while listening.listener.counts().oversized_requests == 0:
                    await trio.sleep(0.01)
                with await listening.stranger(*HELLO_AND_A_WORD):
                    while listening.served == 0:
                        await trio.sleep(0.01)
                assert listening.cut_off == []
                await trio.to_thread.run_sync(send_until_ended, stranger, said, 64 * MB)
            # ENDLESS if this loop is so slow that more has come meanwhile than may wait.
            assert listening.cut_off[0] in ((STRANGER, admission.FLOOD), (STRANGER, admission.ENDLESS))
            seconds = trio.current_time() - began
            assert listening.listener.counts().oversized_requests < 20 + 6 * seconds, "five a second, at 20,000 units"

    run(test)


def test_who_sends_very_many_frames_and_leaves_is_shut_out() -> None:
    """Its message is handed out all the same, when its connection is gone."""

    async def test() -> None:
        async with door() as listening:
            with await listening.stranger(HELLO) as stranger:
                stranger.sendall(MANY_FRAMES)
            time.sleep(0.5)  # libzmq's thread notices the end, while this loop does not look
            await listening.until_cut_off(1)
            assert listening.cut_off == [(STRANGER, admission.MANY_FRAMES)]
            with await listening.stranger(*HELLO_AND_A_WORD) as again:
                assert await trio.to_thread.run_sync(is_ended, again, ENDED_SECONDS)
            await listening.ask()
            assert listening.served == 1

    run(test)


def wait_for_descriptor(descriptor: int, *, is_open: bool) -> None:
    """In this process; the loop stands still meanwhile."""
    deadline = time.monotonic() + SECONDS
    while os.path.exists(f"/proc/self/fd/{descriptor}") is not is_open:
        assert time.monotonic() < deadline, f"descriptor {descriptor}"
        time.sleep(0.01)


def test_nobody_is_ended_for_the_frames_of_whose_descriptor_it_has() -> None:
    """libzmq has closed it, and accepted somebody else with the same one, before the message is taken."""

    async def test() -> None:
        async with door() as listening:
            with await listening.stranger(HELLO) as stranger:
                before = await listening.only_descriptor()
                stranger.sendall(MANY_FRAMES)
            # libzmq's thread goes on, while this loop does not look.
            wait_for_descriptor(before, is_open=False)
            with socket.create_connection((HOST, listening.listener.port)) as newcomer:
                wait_for_descriptor(before, is_open=True)
                await listening.until_cut_off(1)
                assert listening.cut_off == [(STRANGER, admission.MANY_FRAMES)]
                assert list(listening.listener._doorman._by_descriptor) == [before], "the test shows nothing"
                assert not await trio.to_thread.run_sync(is_ended, newcomer, 1)

    run(test)


def test_what_was_left_is_not_paid_by_whose_descriptor_it_has() -> None:
    """Somebody of another address, who has said nothing yet."""

    async def test() -> None:
        async with door() as listening:
            keeper = listening.listener._doorman
            with await listening.stranger(HELLO) as stranger:
                before = await listening.only_descriptor()
                stranger.sendall(many_frames(SOME_TOO_MANY))
            # libzmq's thread goes on, while this loop does not look.
            wait_for_descriptor(before, is_open=False)
            address = (HOST, listening.listener.port)
            with socket.create_connection(address, source_address=(NEIGHBOUR, 0)):
                wait_for_descriptor(before, is_open=True)
                while not listening.listener.counts().oversized_requests:
                    await trio.sleep(0.01)
                newcomer = keeper._connections[keeper._by_descriptor[before]]
                assert (newcomer.address, newcomer.identity) == (NEIGHBOUR, None)
                assert listening.cut_off == []

    run(test)


def test_who_leaves_frames_behind_and_comes_again_is_shut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection sends messages with some frames too many, and ends before they are taken: nobody pays for them
    but the address."""
    monkeypatch.setattr(zmq_bridge.channel, "AdmissionLimits", MINUTE_OUTSIDE)

    async def test() -> None:
        async with door() as listening:
            address, said = (HOST, listening.listener.port), many_frames(SOME_TOO_MANY) * 8
            while not listening.cut_off:
                with await trio.to_thread.run_sync(connect, address, STRANGER, (HELLO, said)):
                    pass
            assert listening.cut_off[0] == (STRANGER, admission.MANY_FRAMES)
            with await listening.stranger(*HELLO_AND_A_WORD) as again:
                assert await trio.to_thread.run_sync(is_ended, again, ENDED_SECONDS)
            await listening.ask()

    run(test)


@pytest.mark.parametrize(("bound", "address"), [("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")])
def test_who_comes_over_either_family_is_known_by_his_address(bound: str, address: str) -> None:
    """And is ended, and nobody else is."""
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")

    async def test() -> None:
        async with door(host=bound) as listening:
            with socket.create_connection((address, listening.listener.port)) as stranger:
                stranger.sendall(HELLO)
                await trio.to_thread.run_sync(await_hello, stranger)
                stranger.sendall(MANY_FRAMES)
                assert await trio.to_thread.run_sync(is_ended, stranger, ENDED_SECONDS)
            (said, why) = listening.cut_off[0]
            assert ipaddress.ip_address(said) in (ipaddress.ip_address(address), mapped(address))
            assert why == admission.MANY_FRAMES

    run(test)


def test_an_address_of_sixteen_bytes_is_told_whole() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as server,
        socket.create_connection(server.getsockname()[:2]) as client,
        server.accept()[0] as accepted,
    ):
        assert peer_address(accepted.fileno()) == "::1"
        assert client.send(b"still open") == 10
        assert accepted.recv(20) == b"still open"


def mapped(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """As a socket of both families says one of IPv4."""
    return ipaddress.ip_address(address if ":" in address else f"::ffff:{address}")


def test_nobody_pays_for_who_had_its_descriptor_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have come and gone over it while the loop did not look."""
    seldom = partial(admission.AdmissionLimits, rates=admission.AdmissionRates(connects=5, connects_per_second=0))
    monkeypatch.setattr(zmq_bridge.channel, "AdmissionLimits", seldom)

    async def test() -> None:
        async with door() as listening:
            keeper, address = listening.listener._doorman, (HOST, listening.listener.port)
            with await listening.stranger(HELLO):
                descriptor = await listening.only_descriptor()
            wait_for_descriptor(descriptor, is_open=False)
            for _ in range(10):
                with socket.create_connection(address, source_address=(STRANGER, 0)):
                    wait_for_descriptor(descriptor, is_open=True)
                wait_for_descriptor(descriptor, is_open=False)
            with socket.create_connection(address, source_address=(NEIGHBOUR, 0)) as newcomer:
                wait_for_descriptor(descriptor, is_open=True)
                assert not await trio.to_thread.run_sync(is_ended, newcomer, 1)
                assert listening.cut_off == []
                assert keeper._connections[keeper._by_descriptor[descriptor]].address == NEIGHBOUR

    run(test)


def test_who_sends_very_many_frames_again_is_ended_whole() -> None:
    """Over connections that it has made, and said something over, before."""

    async def test() -> None:
        async with door() as listening, contextlib.AsyncExitStack() as stack:
            strangers = [stack.enter_context(await listening.stranger(*HELLO_AND_A_WORD)) for _ in range(8)]
            while listening.served < len(strangers):
                await trio.sleep(0.01)
            for each in strangers[:2]:
                await trio.to_thread.run_sync(each.sendall, MANY_FRAMES)
                while listening.listener.counts().oversized_requests <= strangers.index(each):
                    await trio.sleep(0.01)
            await listening.until_cut_off(len(strangers))
            assert listening.cut_off == [(STRANGER, admission.MANY_FRAMES)] * len(strangers)
            for each in strangers:
                assert await trio.to_thread.run_sync(is_ended, each, ENDED_SECONDS)
            await listening.ask()

    run(test)


def test_empty_frames_without_end_share_a_bound_and_their_memory_is_given_back() -> None:
    """Each has two bytes on the wire, and 64 in memory."""

    async def test() -> None:
        async with door(frame_bytes_max=2 * MB) as listening, contextlib.AsyncExitStack() as stack:
            await listening.ask()
            before = resident_bytes()
            said = EMPTY * (3 * MB // 2)
            strangers = [stack.enter_context(await listening.stranger(*HELLO_AND_A_WORD)) for _ in range(4)]
            while listening.served <= len(strangers):
                await trio.sleep(0.01)
            for each in strangers:
                with contextlib.suppress(OSError):  # the others are shut out for a while
                    await trio.to_thread.run_sync(each.sendall, said)
            await listening.until_cut_off(2)
            assert set(listening.cut_off) == {(STRANGER, admission.ENDLESS)}
            assert resident_bytes() - before < 400 * MB  # all of them have 12 MB, which is 384 MB
            await listening.ask()
            for each in strangers:
                each.close()
            while resident_bytes() - before > 16 * MB:
                await trio.sleep(0.01)

    with memory_goes_back():
        run(test)


def test_messages_that_wait_are_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause of the loop there may be some of each connection, which are larger together than what may be
    unfinished."""
    little = partial(admission.AdmissionLimits, rates=admission.AdmissionRates(unfinished_bytes_total_max=64 << 10))
    monkeypatch.setattr(zmq_bridge.channel, "AdmissionLimits", little)

    async def test() -> None:
        async with door() as listening:
            links = [await listening.channel.open_link(HOST, listening.listener.port) for _ in range(8)]
            for link in links:  # each is let in, so that all of them send at once below
                link.send([b"hello"])
                await link.receive()
            for turn in range(2, 7):
                before = listening.received()
                for link in links:
                    link.send([bytes(60 << 10)])
                listening.wait_until_read(before + len(links) * len(message(bytes(60 << 10))))
                while listening.served < turn * len(links):
                    await trio.sleep(0.01)
            assert listening.cut_off == []

    run(test)


def test_several_messages_of_one_engine_that_wait_are_not_one_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause of the loop there may be some of one connection, which are larger than what one may be."""

    monkeypatch.setattr(zmq_bridge.channel, "AdmissionLimits", a_hundred_kib_unfinished)

    async def test() -> None:
        async with door() as listening:
            link = await listening.channel.open_link(HOST, listening.listener.port)
            link.send([b"hello"])
            await link.receive()
            for turn in range(4):
                await trio.sleep(0.3)  # it is measured while nothing waits
                before = listening.received()
                for _ in range(2):
                    link.send([bytes(60 << 10)])
                listening.wait_until_read(before + 2 * len(message(bytes(60 << 10))))
                time.sleep(0.2)  # it is time to measure
                while listening.served < 1 + 2 * (turn + 1):
                    await trio.sleep(0.01)
            assert listening.cut_off == []

    run(test)


def test_what_libzmq_has_not_read_yet_is_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may get no turn while the kernel goes on."""
    unread = True

    def unread_bytes_of_the_kernel(descriptor: int) -> int:
        return received_bytes(descriptor) if unread else unread_bytes(descriptor)

    monkeypatch.setattr(doorman, "unread_bytes", unread_bytes_of_the_kernel)

    async def test() -> None:
        nonlocal unread
        async with door() as listening:
            with await listening.stranger(HELLO) as stranger:
                await listening.until_known(1)
                await trio.to_thread.run_sync(stranger.sendall, endless() * 8)
                while listening.received() < 8 * len(endless()):
                    await trio.sleep(0.01)
                await trio.sleep(0.3)  # it is measured some times
                assert listening.cut_off == []
                unread = False
                await listening.until_cut_off(1)
                assert listening.cut_off == [(STRANGER, admission.ENDLESS)]

    run(test)


class StandsStill:
    """The doorman's look for connections over which something comes, in which the process stands still once."""

    def __init__(self, looked: select.epoll, meanwhile: Callable[[], None]) -> None:
        self._looked = looked
        self._meanwhile: Callable[[], None] | None = meanwhile

    def poll(self, seconds: float, events_max: int) -> list[tuple[int, int]]:
        if self._meanwhile is not None:
            self._meanwhile()
            self._meanwhile = None
            time.sleep(0.2)  # longer than a measurement may take
        return self._looked.poll(seconds, events_max)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._looked, name)


def test_messages_that_come_while_connections_are_measured_are_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waited when that began; and then another thread had the interpreter, or garbage was collected."""
    little = partial(admission.AdmissionLimits, rates=admission.AdmissionRates(unfinished_bytes_total_max=64 << 10))
    monkeypatch.setattr(zmq_bridge.channel, "AdmissionLimits", little)

    async def test() -> None:
        async with door() as listening:
            links = [await listening.channel.open_link(HOST, listening.listener.port) for _ in range(8)]

            def all_send() -> None:
                before = listening.received()
                for link in links:
                    link.send([bytes(60 << 10)])
                listening.wait_until_read(before + len(links) * len(message(bytes(60 << 10))))

            for link in links:  # each is let in, so that all of them send at once below
                link.send([b"hello"])
                await link.receive()
            all_send()
            while listening.served < 2 * len(links):
                await trio.sleep(0.01)
            await trio.sleep(0.3)  # measured: no message has come since
            keeper = listening.listener._doorman
            monkeypatch.setattr(keeper, "_busy", StandsStill(keeper._busy, all_send))
            while listening.served < 3 * len(links):
                await trio.sleep(0.01)
            await trio.sleep(0.3)
            assert listening.cut_off == []

    run(test)


def test_who_sends_without_a_pause_is_not_hidden_by_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured before most of the others have had their turn."""
    crowd_size = 200
    monkeypatch.setattr(doorman, "MEASURED_AT_A_TIME", 1)
    measured: list[int] = []
    received_bytes = doorman.received_bytes

    def counted(descriptor: int) -> int:
        measured.append(descriptor)
        return received_bytes(descriptor)

    async def test() -> None:
        async with door() as listening, contextlib.AsyncExitStack() as stack:
            stranger = stack.enter_context(await listening.stranger(*HELLO_AND_A_WORD))
            for _ in range(crowd_size):
                stack.enter_context(await listening.stranger(HELLO))
            monkeypatch.setattr(doorman, "received_bytes", counted)
            await trio.to_thread.run_sync(send_until_ended, stranger, endless(), 4096 * MB)
            assert listening.cut_off == [(STRANGER, admission.ENDLESS)]
            assert len(measured) < crowd_size // 2

    run(test)


def test_messages_of_an_address_that_is_shut_out_are_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even those that come with the greeting, before the doorman has looked at the connection: it never does."""
    monkeypatch.setattr(zmq_bridge.channel, "AdmissionLimits", MINUTE_OUTSIDE)

    async def test() -> None:
        async with door(units=1000) as listening:
            with await listening.stranger(HELLO, message(b"x" * 10) * 1000):
                await listening.until_cut_off(1)
            before = -1
            # Until libzmq has closed the connection, and all that it had read was dropped.
            while (dropped := listening.listener.counts().dropped_requests) != before or listening.received():
                before = dropped
                await trio.sleep(0.2)
            monkeypatch.setattr(doorman.Doorman, "_shut_down", lambda doorman, connection: None)
            address = (HOST, listening.listener.port)
            with socket.create_connection(address, ENDED_SECONDS, source_address=(STRANGER, 0)) as stranger:
                stranger.sendall(HELLO)
                said = b""
                while len(said) <= len(GREETING):
                    said += await trio.to_thread.run_sync(stranger.recv, 1024)
                assert said[len(GREETING) :].startswith(b"\x04\x0a\x05ERROR\x03500")
                with contextlib.suppress(OSError):  # it may have ended
                    stranger.sendall(message(b"x" * 10) * 1000)
                assert await trio.to_thread.run_sync(is_ended, stranger, ENDED_SECONDS)
            served = listening.served
            await listening.ask()
            assert listening.served == served + 1
            assert listening.listener.counts().dropped_requests == dropped

    run(test)


def test_old_protocols_and_noise_harm_nobody() -> None:
    """libzmq cannot ask the gate about its first protocol, which knows no mechanisms, and ends it."""

    async def test() -> None:
        async with door(units=1000, frame_bytes_max=1024) as listening:
            choose = random.Random(1)
            old = await listening.stranger(b"\x01\x00", b"\x01\x01\x02\x00x")  # no identity, a delimiter, an "x"
            noise = [await listening.stranger(choose.randbytes(4096)) for _ in range(30)]
            assert await trio.to_thread.run_sync(is_ended, old, ENDED_SECONDS)
            await listening.ask()
            assert listening.served == 1
            for each in (old, *noise):
                each.close()

    run(test)


def test_a_greeting_may_not_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_bridge.channel, "GREETING_LIMIT_SECONDS", 1)

    async def test() -> None:
        async with door() as listening:
            stranger = await listening.stranger(GREETING[:10])
            with stranger:
                for byte in range(10, 40):  # a byte now and then
                    with contextlib.suppress(OSError):
                        stranger.send(GREETING[byte : byte + 1])
                    await trio.sleep(0.1)
                assert await trio.to_thread.run_sync(is_ended, stranger, ENDED_SECONDS)
            await listening.ask()

    run(test)


async def name_of_the_first(listening: Door) -> int:
    """The number by which libzmq names the first connection, which has none of its own."""
    with await listening.stranger(HELLO, message(b"x")):
        while not listening.served:
            await trio.sleep(0.01)
        (name,) = listening.listener._doorman._by_identity
        return int.from_bytes(name, "big")


async def named(listening: Door, number: int) -> socket.socket:
    """A stranger that has named itself as libzmq names a connection of this number, and has spoken."""
    stranger = await listening.stranger(GREETING + ready(identity=struct.pack(">xI", number)))
    await trio.to_thread.run_sync(await_hello, stranger)
    stranger.sendall(message(b"x"))
    return stranger


def test_nobody_knows_the_names_of_connections() -> None:
    async def test() -> None:
        numbers = set()
        for _ in range(2):
            ctypes.CDLL(None).srand(1)  # as C begins
            async with door() as listening:
                numbers.add(await name_of_the_first(listening))
        assert len(numbers) == 2

    run(test)


@in_a_process_of_its_own
def test_libzmq_ends_the_process_if_a_stranger_has_the_next_name() -> None:
    """Why nobody may know it."""

    async def give_one_name_twice() -> None:
        async with door() as listening:
            following = (await name_of_the_first(listening) + 1) % (1 << 32)
            with await named(listening, following):
                while listening.served < 2:
                    await trio.sleep(0.01)
                await listening.ask()

    child = os.fork()
    if not child:
        os.close(2)  # where it says why
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        run(give_one_name_twice)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGABRT


def test_large_replies_that_nobody_reads_are_kept_once() -> None:
    async def test() -> None:
        payload = bytes(4 * MB)
        async with door(frame_bytes_max=1024) as listening:
            before = resident_bytes()
            strangers = [await listening.stranger(HELLO, message(b"x")) for _ in range(40)]
            while listening.served < 40:
                await trio.sleep(0.01)
            for identity in list(listening.listener._doorman._by_identity):
                for _ in range(10):
                    listening.listener.reply(identity, [payload])
            assert listening.listener.counts().dropped_replies == 0
            grown = resident_bytes() - before
            for each in strangers:
                each.close()
            assert grown < 100 * MB  # 1,600 MB were queued

    run(test)


def test_no_descriptor_is_left_behind() -> None:
    async def test() -> None:
        before = len(os.listdir("/proc/self/fd"))
        async with door() as listening:
            for _ in range(20):
                (await listening.stranger(HELLO, message(b"x"))).close()
            await listening.ask()
        while len(os.listdir("/proc/self/fd")) > before + 2:
            await trio.sleep(0.01)

    run(test)


def test_somebody_elses_descriptor_is_never_shut_down() -> None:
    """libzmq has closed it, and its number was used again before the doorman looked."""

    async def test() -> None:
        async with door() as listening:
            stranger = await listening.stranger(HELLO, message(b"x"))
            while not listening.served:
                await trio.sleep(0.01)
            here, there = socket.socketpair()
            with stranger, here, there, socket.create_server((HOST, 0)) as server:
                with connect(server.getsockname()) as client, server.accept()[0] as accepted:
                    (connection,) = listening.listener._doorman._connections.values()
                    theirs = connection.descriptor
                    reads, writes = os.pipe()
                    for descriptor in (here.fileno(), accepted.fileno(), reads, 9_999):
                        connection.descriptor = descriptor
                        listening.listener._doorman._shut_down(connection)
                    for each in (reads, writes):
                        os.close(each)
                    connection.descriptor = theirs
                    there.send(b"still open")
                    assert here.recv(20) == b"still open"
                    client.send(b"still open")
                    assert accepted.recv(20) == b"still open"
                listening.listener._doorman._shut_down(connection)
                assert await trio.to_thread.run_sync(is_ended, stranger, ENDED_SECONDS)

    run(test)
