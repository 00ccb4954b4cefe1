"""Damaged messages for the listener and the control socket of a real prefill engine, over real TCP.

They come at a pace at which all are looked at, from many addresses of this machine, over libzmq and by hand. Some are
undamaged by chance; of these, what the engine would obey is not sent (to drain, to leave, to meet engines elsewhere):
it is to serve until the end, and to call nobody. After each batch the engine has to answer a handshake and a hold as
ever. What it could not take is in its log, or it is dead; then the batch is written down.
"""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import trio
import zmq

from connector.ports.zmq_bridge import ZmqSideChannel
from connector.wire import control
from connector.wire.administration import Leave, Meet, is_drain
from connector.wire.bounded import DecodeFailed
from connector.wire.handshake import decode_advertisement, encode_request
from statemachine.lease import LeaseName
from tests.attack.zmtp import HELLO, MORE, await_hello, frame
from tests.fuzz.mutations import mutate, with_other_values
from tests.fuzz.targets import MEET, TARGETS
from tests.rig import OURS, EngineOptions, EngineRig, RigError, free_port

HOST = "127.0.0.1"
MESSAGES_PER_BATCH = 200
MESSAGES_PER_CONNECTION = 20
ANSWER_SECONDS = 30.0
CRASHES = ("Traceback (most recent call last)", "internal error in")

SENT = ("handshake-request", "drain-request", "control-request")
"""Targets whose seeds are what these sockets take."""

SEEDS = tuple(seed for name in SENT for seed in TARGETS[name].seeds)


@dataclass
class Tried:
    messages: int = 0
    connections: int = 0
    problem: str = ""


class Broken(Exception):
    """The engine does not answer, is dead, or has logged a crash."""


def fuzz_sockets(seconds: float, seed: int, corpus: list[bytes], directory: Path) -> Tried:
    """Start an engine and send it damaged messages for so long. `directory`: for its log, and for a reproducer."""
    tried = Tried()
    choose = random.Random(seed)
    options = EngineOptions(OURS, "kv_producer", free_port(), environment={"UCX_TLS": "tcp,self"}, layers=2, blocks=32)
    batch: list[bytes] = []
    with EngineRig(options, directory) as engine:
        engine.wait_ready()
        side_channel = (HOST, options.side_channel_port)
        control_socket = _check(engine, side_channel)
        deadline = time.monotonic() + seconds
        seeds = (*SEEDS, *corpus)
        try:
            for number in itertools.count():
                if time.monotonic() >= deadline:
                    return tried
                batch = [damaged(seeds, choose) for _ in range(MESSAGES_PER_BATCH)]
                address = (side_channel, control_socket)[number % 2]
                for messages in _pieces(batch):
                    source = f"127.{choose.randint(1, 250)}.{choose.randint(0, 250)}.{choose.randint(2, 250)}"
                    (_send_by_hand if choose.random() < 0.5 else _send)(address, source, messages, choose)
                    tried.messages += len(messages)
                    tried.connections += 1
                _check(engine, side_channel)
        except (Broken, RigError) as error:
            tried.problem = f"{error} (log: {engine.log_path}, the last messages: {_write_down(batch, directory)})"
    return tried


def damaged(seeds: tuple[bytes, ...], choose: random.Random) -> bytes:
    while True:
        change_values = choose.random() < 0.3
        message = with_other_values(choose.choice(seeds), choose) if change_values else mutate(seeds, choose)
        if not is_obeyed(message):
            return message


def is_obeyed(message: bytes) -> bool:
    """Whether the engine would leave, drain, or call engines at places that are not those of the seed."""
    if is_drain((message,)):
        return True
    try:
        understood = control.decode_request((message,))
    except DecodeFailed:
        return False
    return isinstance(understood, Leave) or (
        isinstance(understood, Meet) and not set(understood.places) <= set(MEET.places)
    )


def _pieces(batch: list[bytes]) -> Iterator[list[bytes]]:
    for first in range(0, len(batch), MESSAGES_PER_CONNECTION):
        yield batch[first : first + MESSAGES_PER_CONNECTION]


def _send(address: tuple[str, int], source: str, messages: list[bytes], choose: random.Random) -> None:
    """Over libzmq, in a frame or in several, with and without the delimiter."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(f"tcp://{source}:0;{address[0]}:{address[1]}")
        for message in messages:
            cut = choose.randint(0, len(message))
            frames = [[b"", message], [b"", message[:cut], message[cut:]], [message]][min(2, choose.randrange(8))]
            dealer.send_multipart(frames if choose.random() < 0.2 else [b"", message])


def _send_by_hand(address: tuple[str, int], source: str, messages: list[bytes], choose: random.Random) -> None:
    """With damage to what is libzmq's own, too."""
    try:
        with socket.create_connection(address, timeout=5, source_address=(source, 0)) as connection:
            hello = mutate([HELLO], choose) if choose.random() < 0.2 else HELLO
            connection.sendall(hello)
            if hello == HELLO:
                await_hello(connection)
            for message in messages:
                said = frame(b"", MORE) + frame(message)
                connection.sendall(mutate([said], choose) if choose.random() < 0.2 else said)
    except OSError:
        return  # it was ended, as it may be


def _check(engine: EngineRig, side_channel: tuple[str, int]) -> tuple[str, int]:
    """The engine serves; where its control socket is. Raises Broken."""
    lease = LeaseName("no such lease", 1)
    hold = control.Hold(engine_id="decode", rank=0, ranks=1, sent_ns=1, leases=(lease,))
    found: list[tuple[str, int]] = []

    async def main() -> None:
        channel = ZmqSideChannel()
        try:
            with trio.fail_after(ANSWER_SECONDS):
                said = decode_advertisement(await channel.connect(*side_channel).ask([encode_request(0, 0)]))
                assert said.actor is not None
                found.append((said.actor.control_host, said.actor.control_port))
                answer = await channel.connect(*found[0]).ask(control.encode_request(hold))
        finally:
            channel.close()
        gone = control.decode_answer(answer)
        assert isinstance(gone, control.HoldAnswer)
        assert [each.lease for each in gone.gone] == [lease]

    try:
        trio.run(main)
    except Exception as error:
        raise Broken(f"the engine does not serve any more: {error!r}") from error
    log = engine.log_path.read_text(errors="replace")
    if any(sign in log for sign in CRASHES):
        raise Broken("the engine has logged a crash")
    if not engine.alive:
        raise Broken("the engine is dead")
    return found[0]


def _write_down(batch: list[bytes], directory: Path) -> Path:
    """One message a line, in hexadecimal."""
    crashes = directory / "crashes"
    crashes.mkdir(exist_ok=True)
    path = crashes / f"sockets-{int(time.time())}.txt"
    path.write_text("".join(f"{message.hex()}\n" for message in batch))
    return path
