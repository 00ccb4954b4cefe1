"""The scenes: what the engines go through while something raises; see the package's docstring.

Pulls       requests in every way: served, tried again, aborted, refused for their parameters, quarantined, killed
            over; a lease that nobody takes, garbage on both sockets, a tool that asks
Comings     engines are met before a request needs them; one of two ranks drains with something lent
Builtin     a prefill engine whose handshake is that of the built-in connector: notifications instead of links
Verified    the option `verify`; a tool asks for everything while READs hang
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import msgspec
import trio

from connector.clock import NS_PER_SECOND
from connector.protocol import AbortPull
from connector.runtime.lease_keeper import MESSAGES_PER_TURN_MAX
from connector.wire.inspection import WHATS
from connector.wire.notifications import encode_release
from statemachine.draining import State
from tests.simulation.agenda import Agenda
from tests.simulation.crashes.engines import BLOCKS, PORT, Shape
from tests.simulation.crashes.points import Injected, Points
from tests.simulation.crashes.run import OPTIONS, STEP_SECONDS, Scene, Verdict, play_scene

CLEAN = Shape(has_points=False)


class Pulls(Scene):
    """See the module's docstring."""

    shapes: ClassVar = {"p0": Shape(), "p1": Shape(), "p2": Shape(), "p3": CLEAN}
    moments = (0.4, 1.0, 2.0, 2.25, 9.0)
    """Idle and connected, one READ hangs, another one does, P dies over one, all is quiet."""
    probes_at = 14.0
    probed = ("p0", "p1", "p3")

    async def play(self) -> None:
        rules, agenda = self._rules, self._agenda
        sleep = trio.sleep_until
        await self._ask("served", "p0")
        await self._ask("meets p2", "p2")
        await sleep(self.moments[0])
        for number, prefill in enumerate(("p0", "p1", "p0")):
            await self._ask(f"together {number}", prefill)
        await sleep(0.6)
        rules.failing["p0.0"] = 1
        await self._ask("tried again", "p0")
        await sleep(0.9)
        rules.stalled_until["p0.0"] = 1.1
        await self._ask("aborted", "p0")
        await trio.sleep(2 * STEP_SECONDS)
        self.decode.commands.append(AbortPull(request_id="aborted"))
        await sleep(1.3)
        await self._ask("of blocks that there are not", "p0", remote=[BLOCKS + 9])
        self._announce("needs nothing", "p0")
        self._need_nothing("needs nothing", "p0")
        await sleep(1.5)
        await self._ask("used before", "p0", lease=self._leases["served"])
        await self._ask("of wrong sizes", "p0", tp_size=2)
        self._announce("left the queue", "p1")
        self._lend("p1", "left the queue", range(3))
        await trio.sleep(4 * STEP_SECONDS)
        self._need_nothing("left the queue", "p1")
        await sleep(1.8)
        rules.stalled_until["p1.0"] = 4.4
        await self._ask("in quarantine", "p1")
        self._lend("p0", "nobody's", range(3))
        p0 = self.prefills["p0"]
        agenda.after(0.0, lambda: self._network.inject(p0.host, PORT, (b"garbage",)))
        agenda.after(0.0, lambda: self._network.inject(p0.ranks[0].host, p0.ranks[0].control.port, (b"garbage",)))
        self._world.send("stranger", p0.ranks[0].port, b"garbage")
        await self._inspect("p0", ASKED)
        await self._inspect("d", ASKED)
        await sleep(2.2)
        rules.stalled_until["p2.0"] = 9.0
        await self._ask("killed over", "p2")
        await trio.sleep(3 * STEP_SECONDS)
        self.prefills["p2"].kill()
        await sleep(2.6)
        await self._ask("of the dead", "p2")
        await sleep(6.0)
        for name in ("p0", "p1"):
            await self._ask(f"in the end {name}", name)


ASKED = ("engine", "peers", "requests", "leases", "records")
MUTE = [f"mute{number}.host:5600" for number in range(12)]
"""Engines that do not answer."""


class Comings(Scene):
    """See the module's docstring."""

    shapes: ClassVar = {"p0": Shape(ranks=2, looks_at_files=True), "p1": Shape(), "p2": Shape(), "p3": CLEAN}
    options = msgspec.structs.replace(OPTIONS, known_peers=("p1.host:5600", "p2.host:5600"))
    moments = (0.15, 0.7, 1.5, 3.0)
    """Nobody answers, engines are met, one drains, it has drained."""
    probes_at = 10.0
    probed = ("p0", "p1", "p3")
    decode_shape = Shape(is_busy=True)
    named = ("p0.host:5600", "p1.host:5600", "nowhere.host:5600", "silent.host:5600")

    def __init__(self, points: Points, agenda: Agenda, moment: float | None) -> None:
        super().__init__(points, agenda, moment)
        self._lost.hosts |= {"p1.host", "p2.host", "silent.host", *(place.split(":")[0] for place in MUTE)}
        self._rules.refusing["p2.0"] = 1

    async def play(self) -> None:
        await trio.sleep_until(0.2)
        self._lost.hosts -= {"p1.host", "p2.host"}
        await trio.sleep_until(0.6)
        await self._meet(self.named)
        await self._ask("met before", "p1")
        await self._ask("of two ranks", "p0")
        self.prefills["p0"].ranks[0].control.poison(None)  # a mistake of ours: what serves it begins anew
        await trio.sleep_until(1.0)
        self._rules.stalled_until["p0.1"] = 1.8
        await self._ask("read from one that leaves", "p0")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drain, "p0")
            await self._ask("meanwhile", "p1")
            await self._ask("that comes too late", "p0")
            await trio.sleep_until(1.6)
            await self._meet(self.named)
        await self._ask("afterwards", "p1")
        self._lost.hosts.add("p2.0")  # its worker does not hear of it
        p2 = self.prefills["p2"].listener
        p2.post(lambda listener: listener.drain("SIGTERM", NS_PER_SECOND))
        p2.flush()

    async def check_later(self) -> None:
        p0 = self.prefills["p0"]
        for engine in (p0, self.prefills["p2"]):
            if engine.draining.value.state is not State.DRAINED and not engine.has_died:
                self._complain(f"{engine.name} has not drained")
        if not self._is_excused("p1") and (await self._meet(self.named)).get("p1.host:5600") != "met":
            self._complain("p1 is not met")

    async def before_the_end(self) -> None:
        # So many that they do not all end before who waits for them does.
        await self._meet(MUTE)


class Builtin(Scene):
    """See the module's docstring."""

    shapes: ClassVar = {"p0": Shape(is_builtin=True), "p1": Shape(is_builtin=True), "p3": CLEAN}
    moments = (0.4, 1.5)
    """Idle, a request waits in the queue."""
    probes_at = 9.0
    probed = ("p0", "p3")

    async def play(self) -> None:
        async with trio.open_nursery() as nursery:
            for name in ("p0", "p1"):
                nursery.start_soon(self._ask, f"both at once {name}", name)
        for _ in range(MESSAGES_PER_TURN_MAX + 1):
            self._world.send("stranger", self.prefills["p0"].ranks[0].port, encode_release("nobody's", 1))
        await trio.sleep_until(0.5)
        await self._ask("in the queue for long", "p0", waits_seconds=1.2)
        self._rules.failing["p0.0"] = 1
        await self._ask("tried again", "p0")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(self._ask, "of the dead", "p1", waits_seconds=1.0))
            await trio.sleep(0.5)
            self.prefills["p1"].kill()


class Verified(Scene):
    """See the module's docstring."""

    shapes: ClassVar = {"p0": Shape(), "p1": Shape(ranks=2), "p3": CLEAN}
    options = msgspec.structs.replace(OPTIONS, verify="all")
    moments = (0.4, 1.1)
    """Idle, a READ hangs."""
    probes_at = 9.0
    probed = ("p0", "p1", "p3")
    asked_at_once = 1

    async def play(self) -> None:
        await self._ask("served", "p0")
        await self._ask("of two ranks", "p1")
        await trio.sleep_until(0.5)
        self._rules.lying["p0.0"] = 1
        await self._ask("lied to", "p0")
        await trio.sleep_until(0.9)
        self._rules.lying.clear()
        self._rules.stalled_until["p1.1"] = 1.5
        await self._ask("held up", "p1")
        self._lend("p0", "in the queue", range(3))
        self._announce("in the queue", "p0")
        await trio.sleep(3 * STEP_SECONDS)
        await self._inspect("d", WHATS)
        await self._inspect("p0", WHATS)
        await self._ask("aborted", "p0")
        self.decode.commands.append(AbortPull(request_id="aborted"))
        await trio.sleep_until(2.0)
        self._need_nothing("in the queue", "p0")


SCENES: dict[str, type[Scene]] = {scene.__name__: scene for scene in (Pulls, Comings, Builtin, Verified)}


def play(
    scene: str,
    target: int | None = None,
    error: type[Exception] = Injected,
    *,
    moment: float | None = None,
    struck: int | None = None,
) -> Verdict:
    """As `play_scene`."""
    return play_scene(SCENES[scene], target, error, moment=moment, struck=struck)
