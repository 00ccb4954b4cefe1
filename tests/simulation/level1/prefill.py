"""Prefill engines: prompts come in, are computed, and are lent; one core with all leases of a rank.

`PrefillEngine` outlives crashes; `PrefillLife` is one process: its pool and its ranks. The scheduler of an engine is a
script; `PrefillRank` is the executor of a `Lending`, and a memory. What reaches a life while it is paused waits until
it goes on; what reaches a dead one is lost (`frozen_until_ns` says which).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

from statemachine import lending as core
from statemachine import remote_engine
from statemachine.lease import LeaseName
from tests.simulation.level1.builtin import BuiltinRank
from tests.simulation.level1.clock import draw_clock
from tests.simulation.level1.executor import Executor
from tests.simulation.level1.heap import FOREVER, MICROSECOND, MILLISECOND, Call
from tests.simulation.level1.oracles import JUNK, tags
from tests.simulation.level1.world import Give, block_pool, give_last, give_lowest, take

if TYPE_CHECKING:
    from tests.simulation.level1.decode import DecodeEngine, Pull
    from tests.simulation.level1.reader import Question
    from tests.simulation.level1.transport import Connection
    from tests.simulation.level1.world import World

STEP_NS_MAX = 5 * MILLISECOND
COMPUTE_NS_MAX = 40 * MILLISECOND
FORWARD_NS_MAX = 6 * MILLISECOND
"""From P's answer to D's ears."""
LATE_SHARE = 0.3
LATE_LEASES = 1.2
"""How often, and by how much, the second of two decode engines hears of a prompt later."""
QUEUE_MAX = 64
"""Prompts that wait for blocks; what comes beyond is turned away."""
WITHDRAWN = 0.03
WITHDRAWN_LATE = 0.01
PREEMPTED = 0.03
NAME_USED_AGAIN = 0.01
NUMBER_LOST = 0.02
"""How often somebody between the engines drops what is ours of the parameters."""
HEARTBEAT_NAMES = 0.05
"""How often a request's id looks like a heartbeat."""


class Prompt:
    """One prefill and what P says about it. All lists are by rank of P.

    Attributes:
        decodes: who gets the answer.
        pieces: READs that each rank of D needs for it.
        freed: bits of the ranks that have freed their lease; `freed_ns`: when, in true time.
        promised_ns: until when P has said to keep it; touched_ns: until when it would keep it, by what has reached it.
            Both by P's clock.
        holders: what has reached P from engines that hold: of how many ranks, and which of them have released.
        askers: by their names those that have asked to hold it and have not released it since.
        leavers: those that have released it. They will not hold it again: a hold that says so is late.
        notifiers: senders of notifications that have reached P.
        is_superseded: the engine has used its id again, and has freed it by itself.
        tp_size: by which requests describe its engine.
        pulls: the requests that came of it.
    """

    __slots__ = (
        "askers",
        "block_count",
        "blocks",
        "content",
        "decodes",
        "engine",
        "freed",
        "freed_ns",
        "granted_local_ns",
        "granted_ranks",
        "holders",
        "is_granted",
        "is_numbered",
        "is_probe",
        "is_superseded",
        "is_taken_back",
        "lease",
        "leavers",
        "life",
        "notifier_ranks",
        "notifiers",
        "pieces",
        "promised_ns",
        "pulls",
        "request_id",
        "touched_ns",
        "tp_size",
    )

    life: PrefillLife
    freed_ns: dict[int, int]
    granted_local_ns: list[int]
    promised_ns: list[int]
    touched_ns: list[int]
    holders: list[dict[str, tuple[int, set[int]]]]
    askers: list[set[str]]
    leavers: list[set[str]]
    notifiers: list[set[str]]
    notifier_ranks: list[int]

    def __init__(
        self,
        engine: PrefillEngine,
        decodes: list[DecodeEngine],
        content: int,
        block_count: int,
        *,
        is_probe: bool = False,
    ) -> None:
        self.engine = engine
        self.decodes = decodes
        self.content = content
        describes_twice = engine.is_builtin and engine.world.cluster.describes_twice
        self.tp_size = 1 + content % 2 if describes_twice else 1
        self.block_count = block_count
        self.is_probe = is_probe
        self.request_id = f"{engine.name}-r{content}"
        self.lease = LeaseName(self.request_id, 0)
        self.is_numbered = False
        self.blocks: list[int] = []
        self.pieces = 1
        self.is_granted = False
        self.is_superseded = False
        self.is_taken_back = False
        self.freed = 0
        self.freed_ns: dict[int, int] = {}
        self.granted_ranks = 0
        self.pulls: list[Pull] = []

    def begin(self, life: PrefillLife) -> None:
        """It has blocks, and is going to be lent."""
        ranks = len(life.ranks)
        self.life = life
        self.blocks = take(life.free, self.block_count)
        self.freed_ns = {}
        self.granted_local_ns = [0] * ranks
        self.promised_ns = [0] * ranks
        self.touched_ns = [0] * ranks
        self.holders = [{} for _ in range(ranks)]
        self.askers = [set() for _ in range(ranks)]
        self.leavers = [set() for _ in range(ranks)]
        self.notifiers = [set() for _ in range(ranks)]
        self.notifier_ranks = [0] * ranks

    @property
    def name_for_clients(self) -> LeaseName:
        """What its parameters say."""
        return self.lease if self.is_numbered else LeaseName(self.request_id, 0)


class Answer:
    """What comes back on the side channel; `life` is None where nothing listens."""

    __slots__ = ("is_incompatible", "is_refusal", "life", "question")

    def __init__(self, question: Question, engine: PrefillEngine) -> None:
        life = engine.life
        self.question = question
        self.life = None if life.is_dead else life
        self.is_incompatible = engine.is_incompatible
        self.is_refusal = engine.refuses


class PrefillEngine:
    """What outlives a crash: name, address, clock. `is_incompatible`: it answers as another model's; `refuses`: with an
    error; `is_host_gone`: a dead one does not even refuse connections; `shared`: the fault by which prompts are read by
    two engines."""

    __slots__ = (
        "chance",
        "clock",
        "is_builtin",
        "is_host_gone",
        "is_incompatible",
        "life",
        "lives",
        "name",
        "polls_from_ns",
        "refuses",
        "world",
    )

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.chance = world.chance(name)
        self.clock = draw_clock(self.chance)
        self.is_builtin = name in world.cluster.builtin
        self.is_host_gone = False
        self.is_incompatible = False
        self.refuses = False
        self.polls_from_ns = 0
        self.lives = 0
        self.life: PrefillLife
        self.start((name, world.cluster.prefill_ranks))

    def start(self, identity: tuple[str, int]) -> None:
        """A new process of this engine id and so many ranks, with an empty cache."""
        self.lives += 1
        self.life = PrefillLife(self, *identity)

    def submit(self, prompt: Prompt) -> None:
        life = self.life
        heap = self.world.heap
        if life.frozen_until_ns > heap.now_ns:
            if not life.is_dead:
                heap.at(life.frozen_until_ns, self.submit, prompt)
            return
        life.accept(prompt)

    def answer(self, question: Question) -> None:
        """Somebody asks on the side channel. Without a listener the port refuses; a host that is gone says nothing."""
        life = self.life
        heap = self.world.heap
        if life.frozen_until_ns > heap.now_ns and not life.is_dead:
            heap.at(life.frozen_until_ns, self.answer, question)
        elif not life.is_dead or not self.is_host_gone:
            reader = question.reader
            link = self.world.links[self.name, reader.rank.life.engine.name]
            link.send(reader.hear_answer, Answer(question, self))


class PrefillLife:
    """One process of a prefill engine. `prompts`: by the names that clients have; `newest`: by request id."""

    __slots__ = (
        "_computing",
        "_give",
        "_numbers",
        "_outcomes",
        "_polls",
        "_queue",
        "_random",
        "_recent",
        "connections",
        "engine",
        "engine_id",
        "free",
        "frozen_until_ns",
        "heap",
        "is_dead",
        "name",
        "newest",
        "prompts",
        "ranks",
        "world",
    )

    def __init__(self, engine: PrefillEngine, engine_id: str, ranks: int) -> None:
        world = engine.world
        self.world = world
        self.engine = engine
        self.engine_id = engine_id
        self.name = f"{engine.name}#{engine.lives}"
        self.heap = world.heap
        self.is_dead = False
        self.frozen_until_ns = 0
        self.connections: dict[Connection, None] = {}
        self.prompts: dict[LeaseName, Prompt] = {}
        self.newest: dict[str, Prompt] = {}
        blocks = world.cluster.prefill_blocks
        self.free = block_pool(blocks)
        rank_class = BuiltinRank if engine.is_builtin else PrefillRank
        self.ranks: list[Any] = [rank_class(self, number, blocks) for number in range(ranks)]
        self._give: Give = give_last if world.cluster.reuses_last else give_lowest
        self._random = engine.chance.random
        self._numbers = engine.chance.getrandbits(40)
        self._queue: deque[Prompt] = deque()
        self._recent: Prompt | None = None
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
        for rank in self.ranks:
            rank.closed_until_ns = until_ns

    def die(self) -> None:
        self.is_dead = True
        self.freeze(FOREVER)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def accept(self, prompt: Prompt) -> None:
        if not self._queue and len(self.free) >= prompt.block_count:
            self._begin(prompt)
        elif len(self._queue) < QUEUE_MAX or prompt.is_probe:
            self._queue.append(prompt)

    def _begin(self, prompt: Prompt) -> None:
        cluster = self.world.cluster
        prompt.begin(self)
        prompt.pieces = 1 if cluster.is_replicated else max(1, len(self.ranks) // cluster.decode_ranks)
        self.world.oracles.leases.append(prompt)
        superseded = self._name(prompt)
        for rank in self.ranks:
            rank.announce(prompt)
        if superseded is not None:
            superseded.is_superseded = True
            if superseded.is_granted:
                self._take_back(superseded)
        self._computing += 1
        compute_ns = MILLISECOND + int(self._random() * COMPUTE_NS_MAX)
        self.heap.after(compute_ns, self._compute, prompt)
        if self._random() < PREEMPTED:
            self.heap.after(int(self._random() * compute_ns), self._resume, prompt)

    def _name(self, prompt: Prompt) -> Prompt | None:
        """Give it a name that no other lease of this life has; returns the one whose request id it uses again."""
        random, superseded = self._random, None
        if not prompt.is_probe and not self.engine.is_builtin:
            draw = random()
            recent, self._recent = self._recent, None
            if draw < NAME_USED_AGAIN and recent is not None and not recent.is_taken_back:
                if recent.granted_ranks == len(self.ranks) or not recent.is_granted:
                    prompt.request_id, superseded = recent.request_id, recent
            elif draw > 1 - HEARTBEAT_NAMES:
                prompt.request_id = f"HB:{prompt.request_id}"
        self._numbers += 1
        if self.engine.is_builtin:
            prompt.lease = LeaseName(prompt.request_id, 0)
        else:
            prompt.lease = LeaseName(prompt.request_id, self._numbers)
            prompt.is_numbered = superseded is not None or random() >= NUMBER_LOST
            if prompt.is_numbered and not prompt.decodes[0].is_builtin and len(prompt.decodes) == 1:
                self._recent = prompt
        self.prompts[prompt.lease] = prompt
        self.prompts[prompt.name_for_clients] = prompt
        self.newest[prompt.request_id] = prompt
        return superseded

    def _resume(self, prompt: Prompt) -> None:
        """It was preempted, and is scheduled again."""
        if self.frozen_until_ns > self.heap.now_ns:
            self.defer(self._resume, prompt)
        elif not (prompt.is_granted or prompt.is_taken_back or prompt.is_superseded):
            for rank in self.ranks:
                rank.announce(prompt)

    def _compute(self, prompt: Prompt) -> None:
        """The prefill is through."""
        heap = self.heap
        if self.frozen_until_ns > heap.now_ns:
            self.defer(self._compute, prompt)
            return
        self._computing -= 1
        chance = self._random()
        if prompt.is_superseded or (chance < WITHDRAWN and not prompt.is_probe):
            for rank in self.ranks:
                rank.withdraw(prompt)
            self._take_back(prompt)
            return
        filled = list(zip(prompt.blocks, tags(prompt.content, 0, len(prompt.blocks)), strict=True))
        for rank in self.ranks:
            memory = rank.memory
            for block, tag in filled:
                memory[block] = tag
        prompt.is_granted = True
        # The workers hear of the grant with the next step, perhaps later than the client has its answer.
        for rank in self.ranks:
            grant_ns = int(self._random() * STEP_NS_MAX)
            heap.after(grant_ns, rank.grant, prompt)
            if chance > 1 - WITHDRAWN_LATE:
                heap.after(grant_ns + int(self._random() * STEP_NS_MAX), rank.withdraw, prompt)
        delay_ns = 100 * MICROSECOND + int(self._random() * FORWARD_NS_MAX)
        for decode in prompt.decodes:
            heap.after(delay_ns, decode.receive, prompt)
            if self._random() < LATE_SHARE:
                delay_ns += int(self._random() * LATE_LEASES * self.world.cluster.lending.lease_ns)
            else:
                delay_ns += int(self._random() * FORWARD_NS_MAX)

    def _take_back(self, prompt: Prompt) -> None:
        """The blocks of this prompt are free; whoever waits for blocks gets them."""
        prompt.is_taken_back = True
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
        prompt.freed_ns.setdefault(rank, self.heap.now_ns)
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
            if not prompt.is_taken_back:
                self._take_back(prompt)


class PrefillRank(Executor):
    """The executor of a `Lending`, and the memory of its rank: a tag per block."""

    __slots__ = ("core", "is_watching", "kept", "life", "memory", "number")

    def __init__(self, life: PrefillLife, number: int, blocks: int) -> None:
        world = life.world
        super().__init__(
            world,
            life.engine.clock,
            {
                core.AnswerHold: self._answer_hold,
                core.AnswerRelease: self._answer_release,
                core.FreeBlocks: self._free_blocks,
                core.ForgetLease: self._forget_lease,
                core.WatchNotifications: self._watch_notifications,
                core.NoteLateRelease: self._note_late_release,
            },
        )
        self.life = life
        self.number = number
        self.memory = [JUNK] * blocks
        self.is_watching = False
        # Granted leases of which an executor may keep something.
        self.kept: set[LeaseName] = set()
        self.core = self._core = world.cores.lending(world.cluster.lending, observe=self.observer)

    def names(self) -> tuple[str, int]:
        return self.life.engine_id, self.number

    @property
    def open_leases(self) -> int:
        return len(self.kept.union(lease.name for lease in self.core.leases()))

    # --- the scheduler ----------------------------------------------------------------------------------------------

    def announce(self, prompt: Prompt) -> None:
        self.deliver(core.Computing(lease=prompt.lease))

    def grant(self, prompt: Prompt) -> None:
        if self.is_closed:
            self.hold_back(self.grant, prompt)
            return
        prompt.granted_ranks += 1
        now_ns = self._clock.local_ns(self._heap.now_ns)
        prompt.granted_local_ns[self.number] = now_ns
        self._touch(prompt, now_ns + self.world.cluster.lending.lease_ns)
        self.kept.add(prompt.lease)
        self.deliver(core.Granted(lease=prompt.lease, blocks=len(prompt.blocks)))

    def withdraw(self, prompt: Prompt) -> None:
        self.deliver(core.Withdrawn(lease=prompt.lease))

    # --- peers ------------------------------------------------------------------------------------------------------

    def hear(self, asked: core.HoldAsked | core.ReleaseAsked) -> None:
        """Over a control connection, which may be no more."""
        connection, _ = cast("tuple[Connection, int]", asked.reply_to)
        if connection.is_reset:
            return
        if self.is_closed:
            self.hold_back(self.hear, asked)
            return
        is_release = isinstance(asked, core.ReleaseAsked)
        until_ns = self._clock.local_ns(self._heap.now_ns) + self.world.cluster.lending.lease_ns
        for name in asked.leases:
            prompt = self.life.prompts.get(name)
            if prompt is None:
                continue
            holders = prompt.holders[self.number]
            ranks, released = holders.get(asked.engine_id, (0, set()))
            if is_release:
                released.add(asked.rank)
                prompt.askers[self.number].discard(asked.incarnation)
                prompt.leavers[self.number].add(asked.incarnation)
            elif asked.incarnation not in prompt.leavers[self.number]:
                released.discard(asked.rank)
                prompt.askers[self.number].add(asked.incarnation)
                self._touch(prompt, until_ns)
            holders[asked.engine_id] = (max(ranks, asked.ranks), released)
        self.deliver(asked)

    def hear_notification(self, event: core.HeartbeatNotified | core.ReleaseNotified) -> None:
        if self.is_closed:
            self.hold_back(self.hear_notification, event)
            return
        release = event.or_release if isinstance(event, core.HeartbeatNotified) else event
        if release is not None:
            prompt = self.life.newest.get(release.request_id)
            if prompt is not None:
                prompt.notifiers[self.number].add(release.sender)
                prompt.notifier_ranks[self.number] = max(prompt.notifier_ranks[self.number], release.ranks)
        else:
            until_ns = self._clock.local_ns(self._heap.now_ns) + self.world.cluster.lending.heartbeat_ns
            for request_id in event.request_ids:  # type: ignore[union-attr]
                prompt = self.life.newest.get(request_id)
                if prompt is not None:
                    self._touch(prompt, until_ns)
        self.deliver(event)

    def _touch(self, prompt: Prompt, until_ns: int) -> None:
        prompt.touched_ns[self.number] = max(prompt.touched_ns[self.number], until_ns)

    def _answer_hold(self, effect: core.AnswerHold) -> None:
        connection, rank = cast("tuple[Connection, int]", effect.reply_to)
        now_ns = self._clock.local_ns(self._heap.now_ns)
        for name, remaining_ns in effect.held:
            promised_ns = self.life.prompts[name].promised_ns
            promised_ns[self.number] = max(promised_ns[self.number], now_ns + remaining_ns)
        answered = remote_engine.HoldAnswered(
            connection=connection.number, rank=rank, sent_ns=effect.sent_ns, held=effect.held, gone=effect.gone
        )
        connection.back.send(connection.reader.hear_peer, (connection, answered))

    def _answer_release(self, effect: core.AnswerRelease) -> None:
        connection, rank = cast("tuple[Connection, int]", effect.reply_to)
        answered = remote_engine.ReleaseAnswered(connection=connection.number, rank=rank, leases=effect.leases)
        connection.back.send(connection.reader.hear_peer, (connection, answered))

    def _note_late_release(self, effect: core.NoteLateRelease) -> None:
        self.world.oracles.coverage["release of what is not lent"] += 1

    # --- the engine -------------------------------------------------------------------------------------------------

    def _free_blocks(self, effect: core.FreeBlocks) -> None:
        prompt = self.life.prompts[effect.lease]
        now_ns = self._clock.local_ns(self._heap.now_ns)
        stood_still_until_ns = self._clock.local_ns(self.closed_until_ns)
        is_delayed = 0 <= now_ns - stood_still_until_ns <= self.world.cluster.lending.standstill_ns
        self.world.oracles.lease_ended(prompt, self.number, now_ns, is_expired=effect.expired, is_delayed=is_delayed)
        self.life.hear_end(prompt, self.number, is_expired=effect.expired)

    def _forget_lease(self, effect: core.ForgetLease) -> None:
        self.kept.discard(effect.lease)

    def _watch_notifications(self, effect: core.WatchNotifications) -> None:
        self.is_watching = effect.is_expected
