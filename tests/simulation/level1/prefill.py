"""Prefill engines: prompts come in, are computed, and are lent; one lease machine per rank and prompt.

`PrefillEngine` outlives crashes; `PrefillLife` is one process: its pool, its ranks and their leases. The scheduler of
an engine is a script, and a rank does with effects what `connector.runtime.lease_keeper` does. What reaches a life
while it is paused waits until it goes on; what reaches a dead one is lost (`frozen_until_ns` says which).
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

from statemachine import lease
from statemachine.kernel import Event, ProtocolError
from tests.simulation.level1.clock import DriftingClock
from tests.simulation.level1.heap import FOREVER, MICROSECOND, MILLISECOND, Call
from tests.simulation.level1.oracles import JUNK, tags
from tests.simulation.level1.world import Give, block_pool, give_last, give_lowest, take

if TYPE_CHECKING:
    from tests.simulation.level1.actor import Question
    from tests.simulation.level1.decode import DecodeEngine, Pull
    from tests.simulation.level1.transport import Connection
    from tests.simulation.level1.world import World

STEP_NS_MAX = 5 * MILLISECOND
COMPUTE_NS_MAX = 40 * MILLISECOND
FORWARD_NS_MAX = 6 * MILLISECOND
"""From P's answer to D's ears."""
QUEUE_MAX = 64
"""Prompts that wait for blocks; what comes beyond is turned away."""
RATE_PPB_MAX = 45_000
"""Two clocks drift apart by at most twice this, which is within what the product allows for."""
WITHDRAWN = 0.03
WITHDRAWN_LATE = 0.01

_EARLY_COUNTED = lease.EarlyNotificationsCounted()
_WITHDRAWN = lease.Withdrawn()


class Prompt:
    """One prefill and what P says about it.

    `freed`: bits of the ranks that have freed their lease; `pulls`: the requests that came of it.
    """

    __slots__ = (
        "block_count",
        "blocks",
        "content",
        "decode",
        "engine",
        "expires_at_ns",
        "freed",
        "is_granted",
        "is_probe",
        "lease_ends_ns",
        "life",
        "pulls",
        "request_id",
    )

    life: PrefillLife

    def __init__(
        self, engine: PrefillEngine, decode: DecodeEngine, content: int, block_count: int, *, is_probe: bool = False
    ) -> None:
        self.engine = engine
        self.decode = decode
        self.content = content
        self.block_count = block_count
        self.is_probe = is_probe
        self.request_id = f"{engine.name}-r{content}"
        self.blocks: list[int] = []
        self.expires_at_ns = 0
        self.lease_ends_ns = 0
        self.is_granted = False
        self.freed = 0
        self.pulls: list[Pull] = []


class PrefillEngine:
    """What outlives a crash: name, address, clock. `is_incompatible`: it answers as another model's."""

    __slots__ = ("chance", "clock", "is_incompatible", "life", "lives", "name", "polls_from_ns", "world")

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.chance = world.chance(name)
        self.clock = draw_clock(self.chance)
        self.is_incompatible = False
        self.polls_from_ns = 0
        self.lives = 0
        self.life: PrefillLife
        self.start(name)

    def start(self, engine_id: str) -> None:
        """A new process, with an empty cache."""
        self.lives += 1
        self.life = PrefillLife(self, engine_id)

    def submit(self, prompt: Prompt) -> None:
        life = self.life
        heap = self.world.heap
        if life.frozen_until_ns > heap.now_ns:
            if not life.is_dead:
                heap.at(life.frozen_until_ns, self.submit, prompt)
            return
        life.accept(prompt)

    def answer(self, question: Question) -> None:
        """Somebody asks on the side channel; a dead engine says nothing."""
        life = self.life
        heap = self.world.heap
        if life.frozen_until_ns > heap.now_ns:
            if not life.is_dead:
                heap.at(life.frozen_until_ns, self.answer, question)
            return
        actor = question.actor
        link = self.world.links[self.name, actor.rank.life.engine.name]
        link.send(actor.hear, (question, life, self.is_incompatible, self.clock.local_ns(heap.now_ns)))


class PrefillLife:
    """One process of a prefill engine."""

    __slots__ = (
        "_computing",
        "_give",
        "_outcomes",
        "_polls",
        "_queue",
        "_random",
        "connections",
        "engine",
        "engine_id",
        "free",
        "frozen_until_ns",
        "heap",
        "incarnation",
        "is_dead",
        "ranks",
        "world",
    )

    def __init__(self, engine: PrefillEngine, engine_id: str) -> None:
        world = engine.world
        self.world = world
        self.engine = engine
        self.engine_id = engine_id
        self.incarnation = f"{engine.name}#{engine.lives}"
        self.heap = world.heap
        self.is_dead = False
        self.frozen_until_ns = 0
        self.connections: dict[Connection, None] = {}
        blocks = world.cluster.prefill_blocks
        self.free = block_pool(blocks)
        self.ranks = [PrefillRank(self, number, blocks) for number in range(world.cluster.prefill_ranks)]
        self._give: Give = give_last if world.cluster.reuses_last else give_lowest
        self._random = engine.chance.random
        self._queue: deque[Prompt] = deque()
        self._computing = 0
        self._outcomes: list[Prompt] = []
        self._polls = False

    @property
    def is_busy(self) -> bool:
        """Whether prompts wait or are being computed."""
        return not self.is_dead and bool(self._queue or self._computing)

    def defer(self, call: Call, argument: Any) -> None:
        """It is paused, or dead."""
        if not self.is_dead:
            self.heap.at(self.frozen_until_ns, call, argument)

    def freeze(self, until_ns: int) -> None:
        self.frozen_until_ns = until_ns

    def die(self) -> None:
        self.is_dead = True
        self.frozen_until_ns = FOREVER
        for rank in self.ranks:
            rank.leases.clear()

    # --- prompts ----------------------------------------------------------------------------------------------------

    def accept(self, prompt: Prompt) -> None:
        if not self._queue and len(self.free) >= prompt.block_count:
            self._begin(prompt)
        elif len(self._queue) < QUEUE_MAX or prompt.is_probe:
            self._queue.append(prompt)

    def _begin(self, prompt: Prompt) -> None:
        prompt.life = self
        prompt.blocks = take(self.free, prompt.block_count)
        self.world.oracles.leases.append(prompt)
        for rank in self.ranks:
            rank.announce(prompt)
        self._computing += 1
        self.heap.after(MILLISECOND + int(self._random() * COMPUTE_NS_MAX), self._compute, prompt)

    def _compute(self, prompt: Prompt) -> None:
        """The prefill is through."""
        heap = self.heap
        if self.frozen_until_ns > heap.now_ns:
            self.defer(self._compute, prompt)
            return
        self._computing -= 1
        chance = self._random()
        if chance < WITHDRAWN and not prompt.is_probe:
            for rank in self.ranks:
                rank.withdraw(prompt)
            self._take_back(prompt)
            return
        filled = list(zip(prompt.blocks, tags(prompt.content, 0, len(prompt.blocks)), strict=True))
        for rank in self.ranks:
            memory = rank.memory
            for block, tag in filled:
                memory[block] = tag
        lease_ns = self.world.limits.lease_ns
        prompt.is_granted = True
        prompt.expires_at_ns = self.engine.clock.local_ns(heap.now_ns) + lease_ns
        prompt.lease_ends_ns = heap.now_ns + lease_ns
        # The workers hear of the grant with the next step, perhaps later than the client has its answer.
        for rank in self.ranks:
            heap.after(int(self._random() * STEP_NS_MAX), rank.grant, prompt)
        if chance > 1 - WITHDRAWN_LATE:
            for rank in self.ranks:
                heap.after(int(self._random() * 2 * STEP_NS_MAX), rank.withdraw, prompt)
        delay_ns = 100 * MICROSECOND + int(self._random() * FORWARD_NS_MAX)
        heap.after(delay_ns, prompt.decode.receive, prompt)

    def _take_back(self, prompt: Prompt) -> None:
        """The blocks of this prompt are free; whoever waits for blocks gets them."""
        free, blocks = self.free, prompt.blocks
        for rank in self.ranks:
            memory = rank.memory
            for block in blocks:
                memory[block] = JUNK
        self._give(free, blocks)
        queue = self._queue
        while queue and len(free) >= queue[0].block_count:
            self._begin(queue.popleft())

    # --- outcomes ---------------------------------------------------------------------------------------------------

    def hear_end(self, prompt: Prompt, rank: int, *, is_expired: bool) -> None:
        """A rank has freed its lease; the scheduler learns of it with the next step."""
        self.world.oracles.freed(prompt, rank, is_expired=is_expired)
        before = prompt.freed
        prompt.freed = before | 1 << rank
        if prompt.freed == before or prompt.freed + 1 != 1 << len(self.ranks):
            return
        self._outcomes.append(prompt)
        if not self._polls:
            self._polls = True
            heap = self.heap
            at_ns = heap.now_ns + int(self._random() * STEP_NS_MAX)
            heap.at(max(at_ns, self.engine.polls_from_ns), self._poll, None)

    def _poll(self, _: None) -> None:
        if self.frozen_until_ns > self.heap.now_ns:
            self.defer(self._poll, None)
            return
        self._polls = False
        ended, self._outcomes = self._outcomes, []
        for prompt in ended:
            self._take_back(prompt)


class Lent:
    """One lease on one rank. `timer_ns`: the local time for which its timer is set."""

    __slots__ = ("is_over", "prompt", "rank", "timer_ns", "value")

    def __init__(self, rank: PrefillRank, prompt: Prompt) -> None:
        self.rank = rank
        self.prompt = prompt
        self.value = lease.Lease(request_id=prompt.request_id)
        self.timer_ns = 0
        self.is_over = False

    def names(self) -> tuple[str, int, str]:
        return self.rank.life.engine_id, self.rank.number, self.prompt.request_id


class PrefillRank:
    """The lease keeper of one rank, and its memory: a tag per block."""

    __slots__ = ("_clock", "_heap", "_log", "_step", "leases", "life", "memory", "number")

    def __init__(self, life: PrefillLife, number: int, blocks: int) -> None:
        world = life.world
        self.life = life
        self.number = number
        self.memory = [JUNK] * blocks
        self.leases: dict[str, Lent] = {}
        self._heap = world.heap
        self._clock = life.engine.clock
        self._step = world.step_lease
        self._log = world.log.extend

    # --- the scheduler ----------------------------------------------------------------------------------------------

    def announce(self, prompt: Prompt) -> None:
        self.leases[prompt.request_id] = Lent(self, prompt)

    def grant(self, prompt: Prompt) -> None:
        life = self.life
        now_ns = self._heap.now_ns
        if life.frozen_until_ns > now_ns:
            life.defer(self.grant, prompt)
            return
        deadline_ns = self._clock.local_ns(now_ns) + life.world.limits.lease_ns
        self._apply(self.leases[prompt.request_id], lease.Granted(deadline_ns=deadline_ns))

    def withdraw(self, prompt: Prompt) -> None:
        life = self.life
        if life.frozen_until_ns > self._heap.now_ns:
            life.defer(self.withdraw, prompt)
            return
        lent = self.leases.get(prompt.request_id)
        # Withdrawn is what ends a prefill; after that it is an abort that comes too late, and never before the grant.
        if lent is not None and (lent.timer_ns or not prompt.is_granted):
            self._apply(lent, _WITHDRAWN)

    # --- notifications ----------------------------------------------------------------------------------------------

    def hear_release(self, release: tuple[str, str, int]) -> None:
        """(sender, request id, consumers) from a rank of D."""
        life = self.life
        if life.frozen_until_ns > self._heap.now_ns:
            life.defer(self.hear_release, release)
            return
        sender, request_id, consumers = release
        lent = self.leases.get(request_id)
        if lent is not None:
            self._apply(lent, lease.ConsumerNotified(sender=sender, expected=consumers))

    def hear_heartbeat(self, request_ids: tuple[str, ...]) -> None:
        life = self.life
        now_ns = self._heap.now_ns
        if life.frozen_until_ns > now_ns:
            life.defer(self.hear_heartbeat, request_ids)
            return
        renewed = lease.Renewed(deadline_ns=self._clock.local_ns(now_ns) + life.world.limits.renewal_ns)
        for request_id in request_ids:
            lent = self.leases.get(request_id)
            if lent is not None:
                self._apply(lent, renewed)

    # --- the machine ------------------------------------------------------------------------------------------------

    def _apply(self, lent: Lent, event: Event) -> None:
        before = lent.value
        self._log((self._heap.now_ns, lent, before.state, event.__class__))
        try:
            value, effects = self._step(before, event)
        except ProtocolError as error:
            self.life.world.oracles.complain("health", str(error))
            return
        lent.value = value
        for effect in effects:
            kind = effect.__class__
            if kind is lease.StartLeaseTimer:
                self._start_timer(lent, effect.deadline_ns)  # type: ignore[attr-defined]
            elif kind is lease.FreeBlocks:
                self.life.hear_end(lent.prompt, self.number, is_expired=value.state is lease.State.EXPIRED)
            elif kind is lease.CountEarlyNotifications:
                self._apply(lent, _EARLY_COUNTED)
        if value.state in _ENDED:
            lent.is_over = True
            self.leases.pop(lent.prompt.request_id, None)

    def _start_timer(self, lent: Lent, deadline_ns: int) -> None:
        lent.timer_ns = deadline_ns
        at_ns = max(self._clock.true_ns(deadline_ns), self._heap.now_ns)
        self._heap.unless_over(at_ns, self._expire, (lent, deadline_ns), lent)

    def _expire(self, timer: tuple[Lent, int]) -> None:
        lent, deadline_ns = timer
        if lent.timer_ns != deadline_ns or lent.is_over:
            return  # It was moved, or what it was for has ended.
        life = self.life
        if life.frozen_until_ns > self._heap.now_ns:
            life.defer(self._expire, timer)
            return
        now_ns = self._clock.local_ns(self._heap.now_ns)
        if now_ns < deadline_ns:  # The clock has slowed down since the timer was set.
            self._start_timer(lent, deadline_ns)
            return
        self._apply(lent, lease.DeadlinePassed(now_ns=now_ns))


_ENDED = lease.MACHINE.terminal


def draw_clock(chance: random.Random) -> DriftingClock:
    return DriftingClock(zero_ns=chance.randrange(10**15), rate_ppb=chance.randint(-RATE_PPB_MAX, RATE_PPB_MAX))
