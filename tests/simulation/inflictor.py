"""Faults that are events: engines that die, are stopped, replaced, drained or flooded, clocks, links and actors.

Those that are states of the network or of the agents are looked up by the fakes (`active_faults`).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import inf
from typing import Any

import trio

from connector.runtime.mailbox import Mailbox
from connector.wire import control
from connector.wire.administration import Meet
from statemachine.draining import State
from statemachine.lease import Lease, LeaseName
from tests.simulation.fake_network import FakeLink
from tests.simulation.faults import Fault, Kind, Plan, engine_of, generator, rank_of
from tests.simulation.meetings import Meetings
from tests.simulation.oracles import InjectedCrash
from tests.simulation.process import (
    GRACE_LEASES,
    PORT,
    SLEW_PPB_MAX,
    Process,
    Rank,
    SimulatedEngine,
    Surroundings,
    Variant,
)
from tests.simulation.shapes import HEARD_SECONDS_MAX

SHUTDOWN_SECONDS = 10.0
RESTART_SECONDS_MIN = 0.01
LAST_RANK_SECONDS_MAX = 0.3
"""How long the rest of an engine may outlive one of its ranks."""
SLEW_SECONDS_MAX = 0.6
"""How long a clock keeps its rate while it is slewed, if not all the time."""
STOP_TOLD_SECONDS = 0.01
"""How soon a worker says that it can serve no more."""
RESET_SECONDS_MAX = 0.4
"""How often links are reset, or metadata dropped, while that fault lasts."""
GARBAGE_SECONDS = 0.02
"""How often garbage comes while that fault lasts."""
FLOODING_STRANGERS = 3
FLOOD_GAP_SECONDS = 0.005
"""How often each of them sends a message; most cost ten units."""
GARBAGE = (
    b"",
    b"\xff\xfe",
    b"nonsense",
    b"nobody:1",
    b"nobody:99999999999",
    b":1",
    b"HB:",
    b"HB:nobody,,nothing",
    b"HB:\xff",
    b"\x93\xacget_meta_msg\x00\x05",
    b"\x93\xacget_meta_msg\xff\xff",
    bytes(2000),
    *control.encode_request(
        control.Hold(engine_id="stranger", rank=0, ranks=1, sent_ns=1, leases=(LeaseName("nobody", 1),))
    ),
    *control.encode_request(
        control.Release(engine_id="stranger", rank=1, ranks=1024, leases=(LeaseName("nobody", 0),) * 3)
    ),
    *control.encode_answer(control.HoldAnswer(sent_ns=0)),
)


def _release_by_a_stranger(leases: Iterable[Lease]) -> tuple[bytes, ...] | None:
    """Of what a rank is promised: tools are told by which engine and under which name it is held."""
    for lease in leases:
        for holder in lease.holders:
            for reader in sorted(holder.promised):
                release = control.Release(
                    engine_id=holder.engine_id, rank=reader.rank, ranks=holder.ranks, leases=(lease.name,)
                )
                return control.encode_request(release)
    return None


class Inflictor:
    """Of one cluster.

    Args:
        fired: counts what has struck.
        run: runs a life of an engine until it ends.
    """

    def __init__(
        self,
        plan: Plan,
        engines: Sequence[SimulatedEngine],
        around: Surroundings,
        meetings: Meetings,
        fired: Counter[Kind],
        run: Callable[[Callable[[], Awaitable[None]]], None],
    ) -> None:
        self._plan = plan
        self._engines = engines
        self._around = around
        self._oracles = around.oracles
        self._meetings = meetings
        self._fired = fired
        self._run = run

    async def inflict(self, fault: Fault) -> None:
        """Faults that are events; the others are looked up by the fakes."""
        await trio.sleep_until(fault.at_seconds)
        match fault.kind:
            case Kind.CRASH_NEW_ID | Kind.CRASH_SAME_ID | Kind.CRASH_DECODE:
                await self._crash(self._engine(fault.target), fault)
            case Kind.STOP:
                engine = self._engine(fault.target)
                if not engine.process.has_died():
                    self._strike(fault)
                    await self._stop(engine, fault)
            case Kind.DRAIN:
                await self._drain(self._engine(fault.target), fault)
            case Kind.INCOMPATIBLE:
                await self._replace_by_another_model(self._engine(fault.target), fault)
            case Kind.PAUSE:
                self._strike(fault)
                ports = [rank.port for rank in self._ranks(fault)]
                for port in ports:
                    port.pause()
                await trio.sleep_until(fault.end_seconds)
                for port in ports:
                    port.resume()
            case Kind.WALL_CLOCK_JUMP:
                self._strike(fault)
                jump = generator(self._plan.seed, str(fault.at_seconds)).uniform(-1e5, 1e5)
                for rank in self._ranks(fault):
                    rank.clock.machine.wall_error_seconds += jump
            case Kind.CLOCK_SLEW:
                await self._slew_clocks(fault)
            case Kind.LINK_RESET:
                await self._reset_links(fault)
            case Kind.METADATA_DROPPED:
                await self._drop_metadata(fault)
            case Kind.WORKER_STOPS:
                await self._break_ports(self._engine(fault.target), fault)
            case Kind.KNOWN_PEER:
                self._name_peer(fault)
            case Kind.PORTS_KEPT:
                self._strike(fault)  # engines look it up when they start
            case Kind.GARBAGE:
                await self._send_garbage(fault)
            case Kind.FLOOD:
                await self._flood(fault)
            case Kind.ACTOR_CRASH | Kind.CONTROL_CRASH | Kind.KEEPER_CRASH:
                await self._crash_actors(fault)
            case _:
                pass

    async def _crash(self, engine: SimulatedEngine, fault: Fault) -> None:
        if engine.process.has_died():
            return  # It lies dead already; who killed it brings it back.
        self._strike(fault)
        old = engine.process
        ranks = self._ranks(fault)
        if len(ranks) < len(old.ranks):
            for rank in ranks:
                rank.kill()
            await trio.sleep(generator(self._plan.seed, str(fault.at_seconds)).uniform(0.0, LAST_RANK_SECONDS_MAX))
            if engine.process is not old or old.has_died():
                return
        engine.crash()
        # Counted from now: the last rank may have died late, and the port is free when its tasks have ended.
        await trio.sleep_until(max(fault.end_seconds, trio.current_time() + RESTART_SECONDS_MIN))
        self.restart(engine, old.engine_id if fault.kind is Kind.CRASH_SAME_ID else None)

    async def _drain(self, engine: SimulatedEngine, fault: Fault) -> None:
        """An operator lets an engine drain, ends it when it says that it has, and starts another in its place."""
        process = engine.process
        if process.has_died() or process.is_stopping or process.draining is None:
            return
        self._strike(fault)
        process.draining.ask("fault")
        draining = process.draining
        patience_seconds = 2 * GRACE_LEASES * self._oracles.options.kv_lease_duration
        with trio.move_on_after(patience_seconds):
            while draining.value.state is not State.DRAINED and engine.process is process and not process.has_died():
                await trio.sleep(0.01)
        if engine.process is not process or process.has_died() or process.is_stopping:
            return
        if draining.value.state is not State.DRAINED:
            self._oracles.complain("draining", f"{engine.name} did not drain within {patience_seconds:g} s")
        elif (lent := engine.lent_prefills) and process.listener_clock.now_ns() < draining.value.ends_ns:
            self._oracles.complain("draining", f"{engine.name} said that it had drained with {lent} prefill(s) lent")
        self._oracles.coverage["an engine drained"] += draining.value.state is State.DRAINED
        keeps_id = generator(self._plan.seed, f"drain at {fault.at_seconds}").random() < 0.5
        await self._stop(engine, fault, process.engine_id if keeps_id else None)

    async def _stop(self, engine: SimulatedEngine, fault: Fault, engine_id: str | None = None) -> None:
        """An orderly shutdown in the middle of everything, and a restart."""
        stopping = engine.process
        stopping.stop()
        with trio.move_on_after(SHUTDOWN_SECONDS):
            while not stopping.has_ended:
                await trio.sleep(0.01)
        if not stopping.has_ended:
            self._oracles.complain("leaks", f"{engine.name} did not stop")
        await trio.sleep(2 * HEARD_SECONDS_MAX)  # what was said before may still be on its way to a rank
        if stopping.has_died() or stopping.has_lost_a_rank:
            return
        self._oracles.check_all_reported(engine.name)
        engine.crash()
        await trio.sleep_until(max(fault.end_seconds, trio.current_time() + RESTART_SECONDS_MIN))
        self.restart(engine, engine_id)

    async def _replace_by_another_model(self, engine: SimulatedEngine, fault: Fault) -> None:
        """An operator's mistake, and its correction."""
        if engine.process.has_died():
            return
        self._strike(fault)
        engine.crash()
        await trio.sleep(RESTART_SECONDS_MIN)
        chance = generator(self._plan.seed, f"variant at {fault.at_seconds}")
        wrong = self.restart(
            engine, None, chance.choice([Variant.OTHER_MODEL, Variant.OTHER_BLOCKS, Variant.OTHER_WEIGHTS])
        )
        await trio.sleep_until(max(fault.end_seconds, trio.current_time()))
        if engine.process is wrong and not wrong.has_died():
            engine.crash()
            await trio.sleep(RESTART_SECONDS_MIN)
            self.restart(engine)

    def restart(
        self, engine: SimulatedEngine, engine_id: str | None = None, variant: Variant = Variant.SAME
    ) -> Process:
        """A new life; without an engine id, a new one is drawn, as vLLM does."""
        engine.start(engine_id or f"{engine.name}-life{engine.process.life + 1}", variant)
        self._run(engine.run)
        return engine.process

    def _name_peer(self, fault: Fault) -> None:
        """An operator names a prefill engine to a decode engine: by an option, or by a message to the life of now."""
        names = fault.target.split(">")
        decode, prefill = (self._engine(name) for name in names)
        told = decode.process
        if fault.at_seconds > 0.0:
            if told.has_died() or told.is_stopping:
                return
            meet = control.encode_request(Meet(places=(prefill.process.place,)))
            for rank in told.ranks:
                self._around.network.inject(rank.host, rank.control.port, meet)
        self._strike(fault)
        is_by_option = fault.at_seconds == 0.0
        # A message may be lost that comes while something else goes wrong.
        if self._oracles.isolates and (is_by_option or not self._oracles.is_disturbed(*names)):
            self._meetings.watch(decode, prefill, None if is_by_option else told)

    async def _send_garbage(self, fault: Fault) -> None:
        chance = generator(self._plan.seed, f"garbage at {fault.at_seconds}")
        while trio.current_time() < fault.end_seconds:
            self._strike(fault)
            frames = tuple(chance.choice(GARBAGE) for _ in range(chance.randint(0, 3)))
            self._around.network.inject(f"{fault.target}.sim", PORT, frames)
            rank = chance.choice(self._ranks(fault))
            self._around.network.inject(rank.host, rank.control.port, frames[:1] or (chance.choice(GARBAGE),))
            self._around.nixl.send("stranger.1", rank.port, chance.choice(GARBAGE))
            for each in self._ranks(fault):
                if (forged := _release_by_a_stranger(each.supervisor._lease_keeper.leases())) is not None:
                    self._around.network.inject(each.host, each.control.port, forged)
                    self._oracles.coverage["released by a stranger in the name of a holder"] += 1
            await trio.sleep(GARBAGE_SECONDS)

    async def _flood(self, fault: Fault) -> None:
        """Strangers send to all sockets of an engine whatever they can; who is cut off comes back from elsewhere."""
        chance = generator(self._plan.seed, f"flood at {fault.at_seconds}")
        network = self._around.network
        strangers = itertools.count(1)
        links: dict[tuple[str, int], list[FakeLink]] = {}
        while trio.current_time() < fault.end_seconds:
            self._strike(fault)
            sockets = [(f"{fault.target}.sim", PORT), *((r.host, r.control.port) for r in self._ranks(fault))]
            for address in sockets:
                open_links = links.setdefault(address, [])
                for ended in [link for link in open_links if not link.send((chance.choice(GARBAGE),))]:
                    ended.close()
                    open_links.remove(ended)
                if len(open_links) < FLOODING_STRANGERS:
                    open_links.append(FakeLink(network, f"stranger.{next(strangers)}", *address))
            await trio.sleep(FLOOD_GAP_SECONDS)
        for link in itertools.chain(*links.values()):
            link.close()

    async def _slew_clocks(self, fault: Fault) -> None:
        chance = generator(self._plan.seed, f"slew at {fault.at_seconds}")
        machines = [rank.clock.machine for rank in self._ranks(fault)]
        keeps_seconds = chance.choice([SLEW_SECONDS_MAX, inf])
        while trio.current_time() < fault.end_seconds:
            self._strike(fault)
            for machine in machines:
                machine.slew(chance.choice([-SLEW_PPB_MAX, SLEW_PPB_MAX, chance.randint(-SLEW_PPB_MAX, SLEW_PPB_MAX)]))
            rest_seconds = fault.end_seconds - trio.current_time()
            await trio.sleep(
                rest_seconds if keeps_seconds == inf else min(chance.uniform(0.0, keeps_seconds), rest_seconds)
            )
        for machine in machines:
            machine.slew(0)

    async def _reset_links(self, fault: Fault) -> None:
        chance = generator(self._plan.seed, f"resets at {fault.at_seconds}")
        decode, prefill = map(engine_of, fault.target.split(">"))

        def is_meant(source: str, target: str) -> bool:
            return (engine_of(source), engine_of(target)) == (decode, prefill) and fault.hits((source, target))

        while trio.current_time() < fault.end_seconds:
            if chance.random() < fault.probability and self._around.network.reset_links(is_meant):
                self._strike(fault)
            await trio.sleep(chance.uniform(0.0, RESET_SECONDS_MAX))

    async def _drop_metadata(self, fault: Fault) -> None:
        """NIXL forgets what was loaded of a prefill engine, again and again."""
        chance = generator(self._plan.seed, f"metadata dropped at {fault.at_seconds}")
        decode, prefill = map(engine_of, fault.target.split(">"))
        while trio.current_time() < fault.end_seconds:
            for rank in self._engine(decode).process.ranks:
                for agent in rank.port.agents_of(prefill):
                    if fault.hits((rank.port.agent_name, agent)) and chance.random() < fault.probability:
                        rank.port.forget_agent(agent)
                        self._strike(fault)
            await trio.sleep(chance.uniform(0.0, RESET_SECONDS_MAX))

    async def _break_ports(self, engine: SimulatedEngine, fault: Fault) -> None:
        """A worker can serve no more; its engine goes on until somebody restarts it. One that is shutting down does not
        say so."""
        broken = engine.process
        if broken.has_died() or broken.is_stopping or broken.is_asleep:
            return
        self._strike(fault)
        ranks = [rank for rank in self._ranks(fault) if not rank.is_dead]
        for rank in ranks:
            rank.port.break_down("a fault of the plan")
        await trio.sleep(STOP_TOLD_SECONDS)
        for rank in ranks:
            is_ending = rank.is_dead or broken.is_stopping or broken.is_asleep
            if not (rank.has_stopped or rank.port.is_paused or is_ending):
                self._oracles.complain(
                    "health", f"rank {rank.tp_rank} of {engine.name} does not say that it has stopped"
                )
        await trio.sleep_until(max(fault.end_seconds, trio.current_time() + RESTART_SECONDS_MIN))
        if engine.process is not broken or broken.has_died():
            return
        engine.crash()
        await trio.sleep(RESTART_SECONDS_MIN)
        self.restart(engine)

    async def _crash_actors(self, fault: Fault) -> None:
        chance = generator(self._plan.seed, f"crash at {fault.at_seconds}")
        while trio.current_time() < fault.end_seconds:
            self._crash_one(fault, chance)
            await trio.sleep(chance.uniform(0.05, 0.5))

    def _crash_one(self, fault: Fault, chance: random.Random) -> None:
        """Unless it waits for its restart: crashes would pile up in front of everything else."""
        if fault.kind is Kind.CONTROL_CRASH:
            listeners: list[Any] = [rank.control for rank in self._ranks(fault)]
            if rank_of(fault.target) is None:
                listeners.append(self._engine(fault.target).process.listener._listener)
            listener = chance.choice(listeners)
            if not listener.waiting:
                self._strike(fault)
                listener.poison(_Poison())
            return
        supervisor = chance.choice(self._ranks(fault)).supervisor
        if fault.kind is Kind.KEEPER_CRASH:
            inbox: Mailbox[Any] = supervisor._lease_keeper._inbox
            if len(inbox) == 0:
                self._strike(fault)
                inbox.put(_Poison())
            return
        actors = list(supervisor._peers.values())
        if actors and not (actor := chance.choice(actors))._inbox:
            self._strike(fault)
            poison: Any = _Poison()
            actor.tell(poison)

    def _strike(self, fault: Fault) -> None:
        self._fired[fault.kind] += 1

    def _engine(self, name: str) -> SimulatedEngine:
        return next(engine for engine in self._engines if engine.name == engine_of(name))

    def _ranks(self, fault: Fault) -> list[Rank]:
        """Those that a fault of an engine hits."""
        ranks, number = self._engine(fault.target).process.ranks, rank_of(fault.target)
        return ranks if number is None else [ranks[number]]


class _Poison:
    """A message on which an actor crashes: looking at its class, or at its frames, raises."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise InjectedCrash("a fault of the plan")

    @property
    def frames_untrusted(self) -> tuple[bytes, ...]:
        raise InjectedCrash("a fault of the plan")

    def __getattr__(self, name: str) -> Any:
        raise InjectedCrash("a fault of the plan")
