"""Engines with the built-in connector, as far as a peer of ours sees them.

`Guest` is one on the decode side: it says nothing until it is done, but for heartbeats, and then each of its ranks
notifies each rank of P that it deals with. What it reads is nobody's concern here.

`BuiltinRank` is one rank on the prefill side: it frees a lease when as many senders as they say there are have
notified it, or at its deadline, which heartbeats move. It answers nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statemachine.lending import HeartbeatNotified, ReleaseNotified
from tests.simulation.level1.heap import FOREVER, MICROSECOND, MILLISECOND, Call
from tests.simulation.level1.oracles import JUNK
from tests.simulation.level1.transport import sources

if TYPE_CHECKING:
    from tests.simulation.level1.decode import DecodeEngine, Pull
    from tests.simulation.level1.prefill import PrefillLife, Prompt

HEARTBEATS_PER_LEASE = 6
QUEUED = 0.2
QUEUED_LEASES = 2.2
NEVER_RELEASED = 0.03
READ_NS_MAX = 20 * MILLISECOND


class Guest:
    """One process of a decode engine with the built-in connector."""

    __slots__ = ("_names", "_random", "engine", "frozen_until_ns", "heap", "is_dead", "open_pulls", "ranks")

    def __init__(self, engine: DecodeEngine) -> None:
        self.engine = engine
        self.heap = engine.world.heap
        self.is_dead = False
        self.frozen_until_ns = 0
        self.open_pulls: dict[Pull, None] = {}
        self.ranks: list[Any] = []
        """None with cores of ours."""
        ranks = engine.world.cluster.decode_ranks
        self._names = [f"{engine.name}.{engine.lives}/{number}" for number in range(ranks)]
        self._random = engine.chance.random

    @property
    def is_busy(self) -> bool:
        return not self.is_dead and bool(self.open_pulls)

    def defer(self, call: Call, argument: Any) -> None:
        """It is paused, or dead."""
        if not self.is_dead:
            self.heap.at(self.frozen_until_ns, call, argument)

    def freeze(self, until_ns: int) -> None:
        self.frozen_until_ns = until_ns

    def die(self) -> None:
        self.is_dead = True
        self.frozen_until_ns = FOREVER
        for pull in self.open_pulls:
            pull.is_lost = True

    def accept(self, prompt: Prompt) -> None:
        heap, random = self.heap, self._random
        pull = self.engine.new_pull(prompt)
        pull.is_guest = True
        self.open_pulls[pull] = None
        heap.after(self.engine.world.cluster.lending.lease_ns // HEARTBEATS_PER_LEASE, self._beat, pull)
        takes_ns = 400 * MICROSECOND + int(random() * READ_NS_MAX)
        if random() < QUEUED and not prompt.is_probe:
            takes_ns += int(random() * QUEUED_LEASES * self.engine.world.cluster.lending.lease_ns)
        heap.after(takes_ns, self._end, pull)

    def _beat(self, pull: Pull) -> None:
        if self.frozen_until_ns > self.heap.now_ns:
            self.defer(self._beat, pull)
            return
        if pull not in self.open_pulls:
            return
        request_ids = (pull.prompt.request_id,)
        for name in self._names:
            self._tell(name, pull.prompt, HeartbeatNotified(sender=name, request_ids=request_ids))
        self.heap.after(self.engine.world.cluster.lending.lease_ns // HEARTBEATS_PER_LEASE, self._beat, pull)

    def _end(self, pull: Pull) -> None:
        if self.frozen_until_ns > self.heap.now_ns:
            self.defer(self._end, pull)
            return
        del self.open_pulls[pull]
        pull.ended_ns = self.heap.now_ns
        if self._random() < NEVER_RELEASED and not pull.prompt.is_probe:
            pull.is_lost = True
            return
        pull.is_ended = True
        pull.reported = (1 << len(self._names)) - 1
        request_id = pull.prompt.request_id
        for number, name in enumerate(self._names):
            _, consumers = sources(number, len(self._names), pull.prompt.life)
            release = ReleaseNotified(sender=name, request_id=request_id, ranks=consumers)
            if request_id.startswith("HB:"):
                # Its text may be either; who knows the leases decides.
                other = (request_id.removeprefix("HB:"),)
                self._tell(name, pull.prompt, HeartbeatNotified(sender=name, request_ids=other, or_release=release))
            else:
                self._tell(name, pull.prompt, release)

    def _tell(self, name: str, prompt: Prompt, event: HeartbeatNotified | ReleaseNotified) -> None:
        link = self.engine.world.links[self.engine.name, prompt.engine.name]
        targets, _ = sources(self._names.index(name), len(self._names), prompt.life)
        for target in targets:
            link.notify(target.hear_notification, event)


class BuiltinRank:
    """One rank of a prefill engine with the built-in connector, and its memory: a tag per block. `leases`: the deadline
    of each, and who has notified."""

    __slots__ = ("_clock", "_heap", "closed_until_ns", "is_watching", "leases", "life", "memory", "number")

    def __init__(self, life: PrefillLife, number: int, blocks: int) -> None:
        self.life = life
        self.number = number
        self.memory = [JUNK] * blocks
        self.leases: dict[Prompt, int] = {}
        self.closed_until_ns = 0
        self.is_watching = False
        self._heap = life.world.heap
        self._clock = life.engine.clock

    @property
    def open_leases(self) -> int:
        return len(self.leases)

    def look_at_clock(self) -> None:
        """Its deadlines are looked at when they come."""

    def announce(self, prompt: Prompt) -> None:
        """It keeps nothing of requests that are being computed."""

    def withdraw(self, prompt: Prompt) -> None:
        """Nor of those that never are."""

    def grant(self, prompt: Prompt) -> None:
        life = self.life
        if life.frozen_until_ns > self._heap.now_ns:
            life.defer(self.grant, prompt)
            return
        self._keep(prompt)
        prompt.notifiers[self.number].clear()
        self._look(prompt)

    def _keep(self, prompt: Prompt) -> None:
        lease_ns = self.life.world.cluster.engine.lease_ns
        self.leases[prompt] = self._clock.local_ns(self._heap.now_ns) + lease_ns

    def _look(self, prompt: Prompt) -> None:
        deadline_ns = self.leases.get(prompt)
        if deadline_ns is None:
            return
        if self.life.frozen_until_ns > self._heap.now_ns:
            self.life.defer(self._look, prompt)
        elif self._clock.local_ns(self._heap.now_ns) < deadline_ns:
            self._heap.at(max(self._heap.now_ns, self._clock.true_ns(deadline_ns)), self._look, prompt)
        else:
            self._free(prompt, expired=True)

    def hear_notification(self, event: HeartbeatNotified | ReleaseNotified) -> None:
        life = self.life
        if life.frozen_until_ns > self._heap.now_ns:
            life.defer(self.hear_notification, event)
            return
        if isinstance(event, HeartbeatNotified):
            for request_id in event.request_ids:
                prompt = life.newest.get(request_id)
                if prompt in self.leases:
                    self._keep(prompt)
            return
        prompt = life.newest.get(event.request_id)
        if prompt in self.leases:
            senders = prompt.notifiers[self.number]
            senders.add(event.sender)
            if len(senders) >= event.ranks:
                self._free(prompt, expired=False)

    def _free(self, prompt: Prompt, *, expired: bool) -> None:
        del self.leases[prompt]
        self.life.hear_end(prompt, self.number, is_expired=expired)
