"""Strangers at a listener, over real TCP: who is ended, and who is served meanwhile.

The rules are tested by tests/unit/test_admission.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from connector.ports import doorman, zmq_bridge
from connector.ports.zmq_bridge import ZmqListener, ZmqSideChannel
from statemachine import admission
from tests.attack.zmtp import GREETING, HELLO, MORE, connect, endless, frame, is_ended, message

HOST = "127.0.0.1"
STRANGER = "127.0.0.2"
MB = 1 << 20
SECONDS = 60
M_TRIM_THRESHOLD = -1
"""Of glibc's malloc.h."""


class Door:
    """A listener that answers everything with the same."""

    def __init__(self, units: int, **options: int) -> None:
        self.refused: list[tuple[str, str]] = []
        channel = ZmqSideChannel(on_refusal=lambda stranger, said: self.refused.append((stranger, said)))
        self.cut_off: list[tuple[str, str]] = []
        self.channel = channel
        self.units = units
        self.served = 0
        self.listener: ZmqListener = channel.listen(
            HOST, 0, on_cut_off=lambda address, why: self.cut_off.append((address, why)), **options
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

    async def stranger(self, *said: bytes) -> socket.socket:
        return await trio.to_thread.run_sync(connect, (HOST, self.listener.port), STRANGER, said)

    async def until_cut_off(self, count: int) -> None:
        while len(self.cut_off) < count:
            await trio.sleep(0.01)


@contextlib.asynccontextmanager
async def door(units: int = 1, **options: int) -> AsyncIterator[Door]:
    made = Door(units, **options)
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
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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


def test_without_descriptors_a_stranger_makes_room_and_no_engine() -> None:
    async def test() -> None:
        async with door() as listening:
            engine = await listening.channel.open_link(HOST, listening.listener.port)
            engine.send([b"hello"])
            await engine.receive()
            with await listening.stranger() as first, await listening.stranger(), socket.socket() as late:
                with no_descriptor_left():
                    await knock(late, listening.listener.port)
                    await is_greeted(late)
                    await trio.sleep(0.5)
                    engine.send([b"I am here"])
                    await engine.receive()
                assert await trio.to_thread.run_sync(is_ended, first, 10.0)
                # Another one is cut off if a slow machine has not accepted anybody in the place of the first by then.
                assert listening.cut_off in ([(STRANGER, admission.NO_DESCRIPTORS)] * count for count in (1, 2))
                assert listening.refused == []

    run(test)


@pytest.mark.parametrize("engines", [0, 1])
def test_without_descriptors_newcomers_wait_if_there_is_no_stranger(engines: int) -> None:
    """Nothing spins meanwhile but libzmq, what it costs does not grow, and somebody is told."""

    async def test() -> None:
        async with door() as listening:
            links = [await listening.channel.open_link(HOST, listening.listener.port) for _ in range(engines)]
            for each in links:
                each.send([b"hello"])
                await each.receive()
            with socket.socket() as late:
                with no_descriptor_left():
                    await knock(late, listening.listener.port)
                    while not listening.refused:
                        await trio.sleep(0.01)
                    await trio.sleep(0.5)
                    for each in links:
                        each.send([b"I am here"])
                        await each.receive()
                await is_greeted(late)
            assert listening.cut_off == []
            stranger, said = listening.refused[0]
            assert stranger == zmq_bridge.NEWCOMERS
            assert "no file descriptor is left in this process, and 1 wait" in said
            assert len(listening.refused) < 20

    run(test)


def test_the_oldest_stranger_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a greeting, a whole one, or none: all the same."""
    monkeypatch.setattr(doorman, "CONNECTIONS_MAX", 8)

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


def test_a_flood_is_ended_while_who_was_there_before_is_served() -> None:
    async def test() -> None:
        async with door(units=1000) as listening:
            link = await listening.channel.open_link(HOST, listening.listener.port)
            link.send([b"engine"])
            assert await link.receive() == (b"engine",)
            stranger = await listening.stranger(HELLO)
            with stranger:
                await trio.to_thread.run_sync(send_until_ended, stranger, message(b"x" * 10) * 100, 64 * MB)
            assert listening.cut_off == [(STRANGER, admission.FLOOD)]
            counts = listening.listener.counts()
            assert counts.dropped_requests > 256
            assert counts.cut_off == 1
            link.send([b"engine"])
            assert await link.receive() == (b"engine",)
            again = await listening.stranger(HELLO)
            with again:
                assert await trio.to_thread.run_sync(is_ended, again, 5)
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


def test_a_message_of_very_many_frames_is_dropped_in_pieces() -> None:
    """Others have their turn between them."""

    async def test() -> None:
        async with door() as listening:
            stranger = await listening.stranger(HELLO)
            with stranger:
                await trio.to_thread.run_sync(stranger.sendall, frame(b"", MORE) * 50_000 + frame(b"end"))
                turns = 0
                while not listening.listener.counts().oversized_requests:
                    await trio.sleep(0.001)
                while listening.listener._dropping is not None:
                    await trio.lowlevel.checkpoint()
                    turns += 1
                await listening.ask()
            assert turns > 100
            assert listening.served == 1

    run(test)


def test_messages_of_an_address_that_is_shut_out_are_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even those that come with the greeting, before the doorman has looked at the connection: it never does."""
    minute = partial(admission.AdmissionLimits, shut_out_ns=60 * admission.NS_PER_SECOND)
    monkeypatch.setattr(zmq_bridge, "AdmissionLimits", minute)

    async def test() -> None:
        async with door(units=1000) as listening:
            with await listening.stranger(HELLO, message(b"x" * 10) * 1000):
                await listening.until_cut_off(1)
            before = -1
            while (dropped := listening.listener.counts().dropped_requests) != before:
                before = dropped
                await trio.sleep(0.2)
            monkeypatch.setattr(doorman.Doorman, "_shut_down", lambda doorman, connection: None)
            address = (HOST, listening.listener.port)
            with socket.create_connection(address, 5, source_address=(STRANGER, 0)) as stranger:
                stranger.sendall(HELLO)
                said = b""
                while len(said) <= len(GREETING):
                    said += await trio.to_thread.run_sync(stranger.recv, 1024)
                assert said[len(GREETING) :].startswith(b"\x04\x0a\x05ERROR\x03500")
                with contextlib.suppress(OSError):  # it may have ended
                    stranger.sendall(message(b"x" * 10) * 1000)
                assert await trio.to_thread.run_sync(is_ended, stranger, 5)
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
            assert await trio.to_thread.run_sync(is_ended, old, 5)
            await listening.ask()
            assert listening.served == 1
            for each in (old, *noise):
                each.close()

    run(test)


def test_a_greeting_may_not_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_bridge, "GREETING_LIMIT_SECONDS", 1)

    async def test() -> None:
        async with door() as listening:
            stranger = await listening.stranger(GREETING[:10])
            with stranger:
                for byte in range(10, 40):  # a byte now and then
                    with contextlib.suppress(OSError):
                        stranger.send(GREETING[byte : byte + 1])
                    await trio.sleep(0.1)
                assert await trio.to_thread.run_sync(is_ended, stranger, 5)
            await listening.ask()

    run(test)


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
                    for descriptor in (here.fileno(), accepted.fileno(), 9_999):
                        connection.descriptor = descriptor
                        listening.listener._doorman._shut_down(connection)
                    connection.descriptor = theirs
                    there.send(b"still open")
                    assert here.recv(20) == b"still open"
                    client.send(b"still open")
                    assert accepted.recv(20) == b"still open"
                listening.listener._doorman._shut_down(connection)
                assert await trio.to_thread.run_sync(is_ended, stranger, 5)

    run(test)
