"""Prefill engines that decode engines are to meet before a request needs them: whether they do.

Judged from when both engines are there and no fault is between them. Of the product it is looked at which connections
it has; whether these lead to the process that lives now the fake NIXL knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from connector.config import ConnectorOptions
from connector.runtime.restarts import RESTART_DELAY_SECONDS_MAX
from statemachine.introduction import MEETING_TIMEOUTS
from tests.simulation.agenda import Agenda
from tests.simulation.faults import Kind
from tests.simulation.oracles import CLOCK_PACE_MIN, Oracles
from tests.simulation.process import Process, Rank, SimulatedEngine, Variant

LOOKED_AT_SECONDS = 0.1
SLACK_SECONDS = 0.5
CRASHES = frozenset({Kind.ACTOR_CRASH, Kind.CONTROL_CRASH, Kind.KEEPER_CRASH})


@dataclass(eq=False)
class _Pair:
    """`life`: of the decode engine, if only that one is to meet the other. `due_since`: it could be met, and is not;
    None: it has been, or cannot be now."""

    decode: SimulatedEngine
    prefill: SimulatedEngine
    life: Process | None
    lives: tuple[Process, Process] | None = None
    due_since: float | None = None


@dataclass(eq=False)
class Meetings:
    """See the module's docstring."""

    agenda: Agenda
    oracles: Oracles
    _pairs: list[_Pair] = field(default_factory=list)
    _is_over: bool = False

    def watch(self, decode: SimulatedEngine, prefill: SimulatedEngine, life: Process | None = None) -> None:
        """From now on they are to meet: all lives of the decode engine, or this one."""
        pair = _Pair(decode, prefill, life)
        self._pairs.append(pair)
        self.agenda.start(self._watch(pair))

    async def settle(self) -> None:
        """Until every pair that can meet has met, or it is late."""
        with trio.move_on_after(self._bound_seconds(self.oracles.options) + 2 * LOOKED_AT_SECONDS):
            while any(pair.due_since is not None for pair in self._pairs):
                await trio.sleep(LOOKED_AT_SECONDS)

    def end(self) -> None:
        """Engines are to stop from now on."""
        self._is_over = True

    async def _watch(self, pair: _Pair) -> None:
        while True:
            await self.agenda.sleep(LOOKED_AT_SECONDS)
            decode, prefill, now = pair.decode.process, pair.prefill.process, trio.current_time()
            if self._is_over or pair.life not in (None, decode):
                pair.due_since = None
                return
            are_the_same, pair.lives = pair.lives == (decode, prefill), (decode, prefill)
            if not self._can_meet(pair) or all(self._has_met(rank, pair.prefill) for rank in decode.ranks):
                pair.due_since = None
                continue
            if pair.due_since is None or not are_the_same:
                pair.due_since = now
            if now - pair.due_since > self._bound_seconds(self.oracles.options):
                seconds = now - pair.due_since
                who = f"{pair.decode.name} has not met {prefill.engine_id}, which it is to know"
                self.oracles.complain("met", f"{who}, for {seconds:.1f} s")
                pair.due_since = None
                return

    def _can_meet(self, pair: _Pair) -> bool:
        decode, prefill = pair.decode.process, pair.prefill.process
        are_there = all(
            not (each.has_died() or each.has_lost_a_rank or each.is_stopping)
            and not any(rank.has_stopped for rank in each.ranks)
            for each in (decode, prefill)
        )
        serves = prefill.accepts_prefills and prefill.refuses_because is None and prefill.variant is Variant.SAME
        return are_there and serves and not self.oracles.is_disturbed(pair.decode.name, pair.prefill.name)

    def _has_met(self, rank: Rank, prefill: SimulatedEngine) -> bool:
        """Whether it is connected to the process that is there now, as far as anybody can know: when NIXL forgets its
        agent, that is found out by the next READ."""
        engine_id, life = prefill.process.engine_id, prefill.process.life
        if not any(key.engine_id == engine_id and peer.is_connected for key, peer in rank.supervisor._peers.items()):
            return False
        forgets = any(fault.kind is Kind.METADATA_DROPPED for fault in self.oracles.faults)
        return forgets or any(agent.endswith(f".{life}") for agent in rank.port.agents_of(prefill.name))

    def _bound_seconds(self, options: ConnectorOptions) -> float:
        """An attempt that a fault has spoiled and that is given up, the pauses of who asks and of who connects, an old
        connection that is taken back, and an attempt that nothing disturbs."""
        attempt = (1 + MEETING_TIMEOUTS) * options.handshake_timeout_seconds
        pauses = 2 * options.backoff_max_seconds
        taken_back = options.quiesce_timeout_seconds + options.backend_grace_seconds
        crashed = any(fault.kind in CRASHES for fault in self.oracles.faults)
        restart = RESTART_DELAY_SECONDS_MAX if crashed else 0.0
        return (attempt + pauses + taken_back + restart) / CLOCK_PACE_MIN + SLACK_SECONDS
