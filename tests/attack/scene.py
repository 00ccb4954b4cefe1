"""A prefill engine that is attacked, a decode engine that pulls prompts from it all the time, and what that shows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from connector.ports.zmq_bridge import ZmqSideChannel
from connector.wire.handshake import decode_advertisement, encode_request
from tests.attack.attackers import HANDSHAKE, Address, Attacker, Tally, kinds
from tests.rig import OURS, EngineRig, engine_pair, expected_output, prompt

HOST = "127.0.0.1"
STRANGER = "127.0.0.{}"
"""Each attack comes from an address of its own: who attacked before may be shut out."""
PROMPT_TOKENS = 96
BEGIN_SECONDS = 60.0
"""In which an attack has to be under way; attackers have the lowest priority."""
SETTLED_SECONDS = 15.0
"""In which memory comes back after an attack."""


@dataclass
class Pulls:
    """Prompts that were pulled, one after the other."""

    seconds: list[float] = field(default_factory=list)
    """From the prompt's arrival at D until it was answered there; the prefill is not in it."""
    problems: list[str] = field(default_factory=list)
    """Of each that failed: how."""

    @property
    def failed(self) -> int:
        return len(self.problems)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def slowest_tenth(self) -> float:
        return statistics.quantiles(self.seconds, n=10)[-1]


@dataclass
class Outcome:
    """One attack: what was tried, and what it did."""

    name: str
    tally: Tally
    calm: Pulls
    """Before it, and as many after it: the machine may be busier at one time than at another."""
    during: Pulls
    handshakes: Pulls
    """Of newcomers that are no strangers, while it went on."""
    memory: tuple[int, int, int]
    """Resident bytes of the prefill engine: before, the most meanwhile, and after."""
    descriptors: tuple[int, int]
    """Of it: the most meanwhile, and after."""

    @property
    def ratio(self) -> float:
        return self.during.median / self.calm.median


class Scene:
    """The two engines, and the attacks on the first."""

    def __init__(self, prefill: EngineRig, decode: EngineRig) -> None:
        self.prefill = prefill
        self.decode = decode
        self.side_channel = (HOST, prefill.options.side_channel_port)
        self._number = 0
        self._attacks = 0
        self.control = self._control_socket()

    def target(self, name: str) -> Address:
        return self.side_channel if kinds()[name].socket == HANDSHAKE else self.control

    def pull(self, pulls: Pulls, count: int) -> None:
        """So many prompts, each with all of its bytes compared."""
        for _ in range(count):
            self._number += 1
            name = f"pull-{self._number}"
            tokens = prompt(name, PROMPT_TOKENS)
            params = self.prefill.prefill(name, tokens)
            outcome = self.decode.decode(name, tokens, params)
            pulls.seconds.append((outcome.ended_ns - outcome.submitted_ns) / 1e9)
            if not outcome.received:
                pulls.problems.append(f"{name} was not loaded, {outcome.finish}")
            elif outcome.mismatched_pages or outcome.output_token_ids != expected_output(tokens, 1):
                pulls.problems.append(f"{name} has foreign KV on {outcome.mismatched_pages} pages")

    def handshake(self, handshakes: Pulls, timeout_seconds: float = 5.0) -> None:
        """As a decode engine that has just started does it."""

        async def main() -> None:
            channel = ZmqSideChannel()
            began = time.monotonic()
            try:
                with trio.fail_after(timeout_seconds):
                    decode_advertisement(await channel.connect(*self.side_channel).ask([encode_request(0, 0)]))
                handshakes.seconds.append(time.monotonic() - began)
            except Exception as error:
                handshakes.problems.append(f"a newcomer's handshake: {error!r}")
            finally:
                channel.close()

        trio.run(main)

    def attack(
        self,
        name: str,
        *,
        connections: int,
        rounds: int,
        pulls_each: int = 5,
        source: str | None = None,
        warm_up: float = 2,
    ) -> Outcome:
        """Pull, attack, pull meanwhile, look at what is left when it is over, and pull again."""
        calm, during, handshakes = Pulls(), Pulls(), Pulls()
        self.pull(calm, pulls_each * rounds)
        start = self.prefill.snapshot()
        most_bytes, most_files = start.resident_bytes, start.open_files
        self._attacks += 1
        address = source or STRANGER.format(1 + self._attacks)
        with Attacker(name, self.target(name), address, connections) as attacker:
            kind, deadline = kinds(connections)[name], time.monotonic() + BEGIN_SECONDS
            while time.monotonic() < deadline:
                tally = attacker.tally()
                if kind.has_begun(tally):
                    break
                time.sleep(0.2)
            time.sleep(warm_up)
            for _ in range(rounds):
                self.pull(during, pulls_each)
                self.handshake(handshakes)
                now = self.prefill.snapshot()
                most_bytes = max(most_bytes, now.resident_bytes)
                most_files = max(most_files, now.open_files)
            tally = attacker.tally()
        deadline = time.monotonic() + SETTLED_SECONDS
        while (now := self.prefill.snapshot()).open_files > start.open_files + 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        self.pull(calm, pulls_each * rounds)
        return Outcome(
            name=name,
            tally=tally,
            calm=calm,
            during=during,
            handshakes=handshakes,
            memory=(start.resident_bytes, most_bytes, now.resident_bytes),
            descriptors=(most_files, now.open_files),
        )

    def _control_socket(self) -> Address:
        found: list[Address] = []

        async def main() -> None:
            channel = ZmqSideChannel()
            try:
                with trio.fail_after(10):
                    said = decode_advertisement(await channel.connect(*self.side_channel).ask([encode_request(0, 0)]))
            finally:
                channel.close()
            assert said.actor is not None
            found.append((said.actor.control_host, said.actor.control_port))

        trio.run(main)
        return found[0]


@contextmanager
def scene(directory: Path) -> Iterator[Scene]:
    """Start the engines; they end with the block."""
    environment = {"UCX_TLS": "tcp,self"}
    with engine_pair(OURS, directory, environment=environment, layers=4, blocks=64) as (prefill, decode):
        made = Scene(prefill, decode)
        made.pull(Pulls(), 10)  # the first connects, and takes longer
        yield made
