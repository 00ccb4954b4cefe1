"""Level 2: the production actors, with schedulers and clients that are scripts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import trio

from connector.observe import catalogue
from connector.wire.notifications import encode_release
from statemachine.lease import LeaseName
from tests.simulation.agenda import Signal
from tests.simulation.cluster import SPREAD_SHARE, Cluster, Result, run_cluster
from tests.simulation.engines import REQUEST_BLOCKS_MAX, DecodeEngine, Prefilled, PrefillEngine, prompt_tokens
from tests.simulation.faults import Kind, Plan
from tests.simulation.oracles import BUILTIN_READERS
from tests.simulation.process import Rank, Surroundings

SAMPLES_SHARE = 0.08
"""How many prompts have two samples on one engine."""


def simulate(plan: Plan) -> Result:
    """Run a plan. Whatever the product does wrong is in `violations`; what raises is a fault of the simulator."""
    return run_cluster(plan, ScriptedCluster)


class ScriptedCluster(Cluster[PrefillEngine, DecodeEngine]):
    """See the module's docstring."""

    def _make_engines(self, around: Surroundings) -> None:
        self._prefills = [PrefillEngine(around, name, self._engine_chance(name)) for name in self._shape.prefill_names]
        self._decodes = [DecodeEngine(around, name, self._engine_chance(name)) for name in self._shape.decode_names]

    async def _ask(self, prefill: PrefillEngine, decode: DecodeEngine) -> None:
        """One prompt through both engines; sometimes with several samples, which share P's blocks."""
        self._numbers += 1
        number = self._numbers
        blocks = self._chance.randint(1, REQUEST_BLOCKS_MAX)
        prefilled = await prefill.prefill(f"{prefill.name}-r{number}", number, prompt_tokens(number, blocks))
        if prefilled is None:
            return
        if not self._shape.numbers_leases:
            prefilled = replace(prefilled, lease=LeaseName(prefilled.request_id, 0))
        await self._agenda.sleep(self._chance.uniform(0.0001, 0.006))
        if self._faults.hits(Kind.TWO_RANKS, prefill.name):
            await self._read_with_two_ranks(prefill, prefilled)
            return
        samples = self._draw_samples(prefill, decode, number)
        misdirected = None
        if self._faults.hits(Kind.WRONG_SIZES, decode.name):
            misdirected = self._begin(decode.serve_misdirected(f"{decode.name}-r{number}.astray", prefilled))
        served: list[Signal | trio.Event] = []
        for engine, request_ids in samples:
            if engine.process.has_died():
                continue
            engine.announce(request_ids, prefilled)
            served += [self._begin(engine.serve(request_id, prefilled)) for request_id in request_ids]
        for each in (*served, misdirected):
            if each is not None:
                await each.wait()
        await self._repeat(decode, number, prefilled)

    def _draw_samples(
        self, prefill: PrefillEngine, decode: DecodeEngine, number: int
    ) -> list[tuple[DecodeEngine, list[str]]]:
        """Which engines are asked for which samples. A balancer may spread the samples of a prompt over engines."""
        chance = self._chance
        kind = chance.random()
        counts = {decode.name: 2 if kind < SAMPLES_SHARE else 1}
        spreads = self._faults.hits(Kind.TWO_HOLDERS, prefill.name) or kind > 1.0 - SPREAD_SHARE
        if spreads and len(self._decodes) > 1:
            self._oracles.coverage["samples on several engines"] += 1
            for other in self._decodes:
                if other is not decode and (len(self._decodes) == 2 or chance.random() < 0.7):
                    counts[other.name] = chance.randint(1, 2)
        return [
            (engine, [f"{engine.name}-r{number}.{sample}" for sample in range(counts[engine.name])])
            for engine in self._decodes
            if engine.name in counts
        ]

    async def _repeat(self, decode: DecodeEngine, number: int, prefilled: Prefilled) -> None:
        """A router repeats itself: on the same engine, which may have restarted since, or on another one."""
        if self._faults.hits(Kind.ROUTER_RETRY, decode.name) is None:
            return
        await self._agenda.sleep(self._chance.uniform(0.0, 0.3))
        engine = decode if self._chance.random() < 0.5 else self._chance.choice(self._decodes)
        await engine.serve_again(f"{engine.name}-r{number}.again", prefilled)

    async def _read_with_two_ranks(self, prefill: PrefillEngine, prefilled: Prefilled) -> None:
        """A built-in engine whose two ranks both read from this one, and say so; the first one says it twice."""
        ranks, oracles, name = prefill.process.ranks, self._oracles, BUILTIN_READERS
        oracles.take_over(prefilled.owner, prefilled.request_id, name, name, 2)
        for reader in (0, 0, 1):
            await self._agenda.sleep(self._chance.uniform(0.0, 0.2))
            oracles.let_go(prefilled.owner, prefilled.request_id, name, reader)
            rank = ranks[reader * len(ranks) // 2]
            release = encode_release(prefilled.request_id, 2 // len(ranks))
            self._around.nixl.send(f"{name}.{reader}", rank.port, release)

    async def _probe(self, request_id: str, prefill: PrefillEngine, decode: DecodeEngine) -> None:
        """A request of this pair; the oracles judge it like any other, except that it must succeed."""
        prefilled: Prefilled | None = None
        while prefilled is None and not prefill.process.has_died():  # one in some is given up
            self._numbers += 1
            prefilled = await prefill.prefill(f"{prefill.name}-r{self._numbers}", self._numbers, 32)
        assert prefilled is not None, "every engine lives again when the faults are over"
        decode.announce([request_id], prefilled)
        await decode.serve(request_id, prefilled, is_urgent=True)

    async def _check_at_rest(self, when: str) -> None:
        for engine in self._engines:
            if len(engine.pool) != engine.pool.blocks:
                missing = engine.pool.blocks - len(engine.pool)
                self._oracles.complain("leaks", f"{when} {engine.name} misses {missing} blocks")
            for rank in engine.process.ranks:
                for leftover in self._leftovers(rank):
                    self._oracles.complain("leaks", f"{when} rank {rank.tp_rank} of {engine.name} {leftover}")
        for read in self._around.nixl.reads_in_flight():
            self._oracles.complain("leaks", f"{when} READ {read.handle} of {read.initiator.agent_name} is in flight")

    def _leftovers(self, rank: Rank) -> list[str]:
        """What a rank should not have when nobody wants anything any more."""
        supervisor, counts = rank.supervisor, rank.port.counts()
        found = [f"has READs: {counts}"] if counts.reads else []
        if supervisor._lease_keeper.leases():
            found.append("has open leases")
        quarantined = sum(actor.quarantined_blocks() for actor in supervisor._peers.values())
        if (counted := supervisor._roster.quarantined_blocks) or quarantined:
            found.append(f"counts {counted} blocks in quarantine, and has {quarantined}")
        if len(supervisor._peers) > self._shape.peer_limit:
            found.append(f"knows {len(supervisor._peers)} peers")
        connections = [each for actor in supervisor._peers.values() for each in actor._connections._by_number.values()]
        wanted = sum(remote.link is not None for connection in connections for remote in connection.ranks)
        if (opened := self._around.network.unclosed_links(rank.host)) != wanted:
            found.append(f"has {opened} control connections open, and {wanted} in use")
        gauges = {key: value for key, value in rank.figures.gauges().items() if value}
        peers = Counter(catalogue.PEERS.key(actor.core.state.value) for actor in supervisor._peers.values())
        if gauges != peers:
            found.append(f"shows {gauges} and has {dict(peers)}")
        busy = [engine_id for engine_id, actor in supervisor._peers.items() if not actor.is_unused]
        return found + [f"has something to do for {engine_id}" for engine_id in busy]
