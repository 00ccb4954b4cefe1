"""Decode engines: requests come with the blocks of a prompt on P, are read by every rank, decoded and freed.

`DecodeEngine` outlives crashes; `DecodeLife` is one process: the block pool and the script of its scheduler.
`DecodeRank` is what one worker has: memory, the executors of its cores, and the thread of the agent with its READs.
It executes the roster of its peers too, as the supervisor of a worker does.

A request has ended when all ranks have reported. Its blocks return to the pool when it is through with decoding, and
blocks that a rank reported as quarantined when that rank has lifted it. A request that failed is computed anew in the
same blocks, so a READ that still writes into them is caught by their bytes too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, assert_never

from statemachine import remote_engine as core
from statemachine import roster
from statemachine.failures import BadParams, Failure, TransferError
from statemachine.kernel import Event
from statemachine.lease import LeaseName
from statemachine.roster import PeerKey
from tests.simulation.faults import Fault, Kind
from tests.simulation.level1.builtin import Guest
from tests.simulation.level1.clock import draw_clock
from tests.simulation.level1.heap import FOREVER, MICROSECOND, MILLISECOND, SECOND, Call
from tests.simulation.level1.oracles import JUNK, tags
from tests.simulation.level1.prefill import STEP_NS_MAX
from tests.simulation.level1.reader import Reader
from tests.simulation.level1.shape import RANKS_MAX
from tests.simulation.level1.transport import Agent, Connection, Read
from tests.simulation.level1.world import Give, block_pool, give_last, give_lowest, take

if TYPE_CHECKING:
    from tests.simulation.level1.prefill import PrefillLife, Prompt
    from tests.simulation.level1.transport import Transport
    from tests.simulation.level1.world import World

CALL_NS = 20 * MICROSECOND
"""How long the one thread of the agent takes for a call."""
QUEUE_MAX = 64
"""Requests that wait for blocks; clients of further ones go away."""
QUEUED_NS_MAX = 2 * SECOND
LONG_QUEUE_LEASES = 3.2
ABORT_NS = (0, 300 * MICROSECOND, 2 * MILLISECOND, 100 * MILLISECOND, SECOND)

SAMPLES = 0.08
"""How often a prompt has two samples on one engine."""
ANNOUNCED = 0.4
"""How often a request is known before it is scheduled, though it need not wait."""
QUEUED = 0.06
QUEUED_LONG = 0.003
CACHED = 0.2
ABORTED = 0.03
NOT_AWAITED = 0.06
NOTHING_TO_READ = 0.02
USED_AGAIN = 0.01
"""How often a client that was served comes again with the same parameters, which is an error of its own."""
USED_AGAIN_ELSEWHERE = 0.4
USED_AGAIN_NS_MAX = SECOND // 2
POST_REFUSED = 0.2
"""Part of the READ errors that are refusals to post."""
RECOMPUTED = 1 << 40
"""Content of what D computes itself."""

_REJECTED = BadParams(field="remote_block_ids", expected="a list of block ids", found="'x'")


class Pull:
    """One request on a decode engine. `reported`: bits of the ranks that have; `blocks` are the same on all ranks.

    Attributes:
        heard_ns, heard_local_ns: when the engine first heard of it, in true time and by its own clock.
        announced: whether the cores know of it; until it starts, or will never.
        completed: when the READs of the last attempt had ended, in true time and by D's clock, by rank and piece.
        quarantines, lifts: ranks that have said so.
        is_ended: the scheduler has acted on the reports.
        is_repeated: another request has used its parameters before.
        is_refused: it ended before any core heard of it.
        is_unproven: read from a built-in engine that had freed the blocks, which nobody can know.
        is_guest: its engine has the built-in connector.
    """

    __slots__ = (
        "announced",
        "awaited",
        "blocks",
        "cached",
        "completed",
        "content",
        "decode",
        "ended_ns",
        "failure",
        "has_bad_params",
        "heard_local_ns",
        "heard_ns",
        "is_aborted",
        "is_ended",
        "is_guest",
        "is_lost",
        "is_refused",
        "is_repeated",
        "is_unproven",
        "lease",
        "lifts",
        "prompt",
        "quarantines",
        "reported",
        "request_id",
        "started_ns",
        "wanted_blocks",
    )

    def __init__(self, decode: str, prompt: Prompt, heard_ns: int, heard_local_ns: int) -> None:
        self.decode = decode
        self.prompt = prompt
        self.request_id = f"{decode}-r{prompt.content}.{len(prompt.pulls)}"
        self.lease: LeaseName = prompt.name_for_clients
        prompt.pulls.append(self)
        self.heard_ns = heard_ns
        self.heard_local_ns = heard_local_ns
        self.announced = False
        self.awaited = True
        self.cached = 0
        self.wanted_blocks = 0
        self.content = prompt.content
        self.blocks: list[int] = []
        self.completed: dict[tuple[int, int], tuple[int, int, PrefillLife]] = {}
        self.has_bad_params = False
        self.is_repeated = False
        self.is_aborted = False
        self.is_ended = False
        self.is_guest = False
        self.is_lost = False
        self.is_refused = False
        self.is_unproven = False
        self.started_ns = heard_ns
        self.ended_ns = FOREVER
        self.reported = 0
        self.failure: Failure | None = None
        self.quarantines = 0
        self.lifts = 0


class DecodeEngine:
    """What outlives a crash. The faults that are on: `abort`, `bad_params`, `retry`; `queue_until_ns`: nothing is
    scheduled until then."""

    __slots__ = (
        "abort",
        "bad_params",
        "chance",
        "clock",
        "is_builtin",
        "life",
        "lives",
        "name",
        "others",
        "polls_from_ns",
        "queue_until_ns",
        "retry",
        "transport",
        "world",
    )

    def __init__(self, world: World, transport: Transport, name: str) -> None:
        self.world = world
        self.transport = transport
        self.name = name
        self.chance = world.chance(name)
        self.clock = draw_clock(self.chance)
        self.is_builtin = name in world.cluster.builtin
        self.others: list[DecodeEngine] = []
        self.abort: Fault | None = None
        self.bad_params: Fault | None = None
        self.retry: Fault | None = None
        self.queue_until_ns = 0
        self.polls_from_ns = 0
        self.lives = 0
        self.life: DecodeLife | Guest
        self.start()

    def start(self) -> None:
        """A new process, with an empty cache."""
        self.lives += 1
        self.life = Guest(self) if self.is_builtin else DecodeLife(self)

    def receive(self, prompt: Prompt) -> None:
        """A client brings what P answered; when D is dead, it goes away."""
        life = self.life
        heap = self.world.heap
        if life.frozen_until_ns > heap.now_ns:
            if not life.is_dead:
                heap.at(life.frozen_until_ns, self.receive, prompt)
            return
        life.accept(prompt)

    def new_pull(self, prompt: Prompt) -> Pull:
        now_ns = self.world.heap.now_ns
        pull = Pull(self.name, prompt, now_ns, self.clock.local_ns(now_ns))
        self.world.oracles.pulls.append(pull)
        return pull

    def strikes(self, fault: Fault | None) -> bool:
        if fault is None or self.chance.random() >= fault.probability:
            return False
        self.world.fired[fault.kind] += 1
        return True


class DecodeLife:
    """One process of a decode engine."""

    __slots__ = (
        "_all_ranks",
        "_clients",
        "_give",
        "_outcomes",
        "_polls",
        "_random",
        "_waiting",
        "engine",
        "engine_id",
        "free",
        "frozen_until_ns",
        "heap",
        "heard",
        "is_dead",
        "open_pulls",
        "ranks",
        "world",
    )

    def __init__(self, engine: DecodeEngine) -> None:
        world = engine.world
        cluster = world.cluster
        self.world = world
        self.engine = engine
        name = "twin" if cluster.has_twins else engine.name
        self.engine_id = name if cluster.keeps_decode_id else f"{name}-life{engine.lives}"
        self.heap = world.heap
        self.is_dead = False
        self.frozen_until_ns = 0
        self.heard: dict[Pull, None] = {}
        self.open_pulls: dict[Pull, None] = {}
        self.free = block_pool(cluster.decode_blocks)
        self.ranks = [DecodeRank(self, number, cluster.decode_blocks) for number in range(cluster.decode_ranks)]
        self._all_ranks = (1 << len(self.ranks)) - 1
        self._give: Give = give_last if cluster.reuses_last else give_lowest
        self._random = engine.chance.random
        self._clients = 0
        self._waiting: deque[Pull] = deque()
        self._outcomes: list[Pull] = []
        self._polls = False

    @property
    def is_busy(self) -> bool:
        """Whether requests are in its hands, or will come back to it."""
        return not self.is_dead and bool(self.open_pulls or self._clients)

    def defer(self, call: Call, argument: Any) -> None:
        """It is paused, or dead."""
        if not self.is_dead:
            self.heap.at(self.frozen_until_ns, call, argument)

    def freeze(self, until_ns: int) -> None:
        self.frozen_until_ns = until_ns
        for rank in self.ranks:
            for reader in rank.readers.values():
                reader.closed_until_ns = max(reader.closed_until_ns, until_ns)

    def die(self) -> None:
        """Its memory and its agents are gone; its clients too."""
        self.is_dead = True
        self.freeze(FOREVER)
        for pull in self.heard:
            pull.is_lost = True
        for rank in self.ranks:
            for connection in rank.connections():
                del connection.life.connections[connection]
                for read in connection.flying:
                    read.is_flying = False
            rank.agents.clear()

    # --- requests ---------------------------------------------------------------------------------------------------

    def accept(self, prompt: Prompt) -> None:
        """Samples of one prompt arrive together, before one of them can let go of the blocks."""
        random = self._random
        if prompt.is_probe:
            self._schedule(self._hear(prompt))
            return
        samples = 2 if random() < SAMPLES else 1
        pulls = [self._hear(prompt) for _ in range(samples)]
        waits = [self._draw_queue_ns() for _ in pulls]
        if samples > 1 or waits[0] or random() < ANNOUNCED:
            for pull in pulls:
                self._announce(pull)
        for pull, queue_ns in zip(pulls, waits, strict=True):
            if queue_ns:
                self._clients += 1
                self.heap.after(queue_ns, self._schedule_later, pull)
            else:
                self._schedule(pull)

    def _hear(self, prompt: Prompt) -> Pull:
        pull = self.engine.new_pull(prompt)
        self.heard[pull] = None
        return pull

    def _draw_queue_ns(self) -> int:
        random, engine = self._random, self.engine
        if engine.queue_until_ns > self.heap.now_ns:
            self.world.fired[Kind.LONG_QUEUE] += 1
            return engine.queue_until_ns - self.heap.now_ns
        chance = random()
        if chance < QUEUED_LONG:
            return int(random() * LONG_QUEUE_LEASES * self.world.cluster.lending.lease_ns)
        return int(random() * QUEUED_NS_MAX) if chance < QUEUED else 0

    def _announce(self, pull: Pull) -> None:
        pull.announced = True
        for rank in self.ranks:
            rank.announce(pull)

    def _schedule_later(self, pull: Pull) -> None:
        if self.frozen_until_ns > self.heap.now_ns:
            self.defer(self._schedule_later, pull)
            return
        self._clients -= 1
        self._schedule(pull)

    def _schedule(self, pull: Pull) -> None:
        random = self._random
        blocks = len(pull.prompt.blocks)
        if not pull.prompt.is_probe:
            kind = random()
            if kind < NOT_AWAITED:
                self._need_nothing(pull)
                return
            if kind > 1 - NOTHING_TO_READ:
                pull.cached = blocks
            elif random() < CACHED:
                pull.cached = int(random() * blocks)
        pull.wanted_blocks = blocks - pull.cached
        if not self._waiting and len(self.free) >= pull.wanted_blocks:
            self._begin(pull)
        elif len(self._waiting) < QUEUE_MAX or pull.prompt.is_probe:
            self._waiting.append(pull)
            self._clients += 1
            if not pull.announced:
                self._announce(pull)
        else:
            self._need_nothing(pull)

    def _need_nothing(self, pull: Pull) -> None:
        """Everything is cached, or the client left before the request was scheduled."""
        pull.awaited = False
        pull.ended_ns = self.heap.now_ns
        del self.heard[pull]
        for rank in self.ranks:
            rank.need_nothing(pull)

    def _begin(self, pull: Pull) -> None:
        if pull.wanted_blocks:
            pull.blocks = blocks = take(self.free, pull.wanted_blocks)
            self._check_unwritten(pull, blocks, "handed out")
        engine = self.engine
        self.open_pulls[pull] = None
        pull.started_ns = self.heap.now_ns
        if engine.bad_params is not None and engine.strikes(engine.bad_params):
            pull.has_bad_params = True
            # What cannot be decoded is known to no core.
            if not pull.announced and self._random() < 0.5:
                pull.is_refused = True
                for rank in self.ranks:
                    self.hear_report(pull, rank.number, _REJECTED, is_quarantined=False)
                return
        for rank in self.ranks:
            rank.start(pull)
        if pull.prompt.is_probe:
            return
        stormy = engine.abort is not None and engine.strikes(engine.abort)
        if stormy or self._random() < ABORTED:
            after_ns = int(self._random() * ABORT_NS[int(self._random() * len(ABORT_NS))])
            self.heap.after(after_ns, self._abort, pull)

    def _abort(self, pull: Pull) -> None:
        if self.frozen_until_ns > self.heap.now_ns:
            self.defer(self._abort, pull)
            return
        if not pull.is_ended:
            pull.is_aborted = True
            for rank in self.ranks:
                rank.abort(pull)

    # --- outcomes ---------------------------------------------------------------------------------------------------

    def hear_report(self, pull: Pull, rank: int, failure: Failure | None, *, is_quarantined: bool) -> None:
        """A rank has reported; the scheduler learns of it with the next step after the last of them."""
        oracles = self.world.oracles
        oracles.reported(pull, rank, failure)
        before = pull.reported
        pull.reported = before | 1 << rank
        if pull.failure is None:
            pull.failure = failure
        pull.quarantines += is_quarantined
        if pull.reported != before and pull.reported == self._all_ranks:
            pull.ended_ns = self.heap.now_ns
            oracles.ended(pull, pull.failure)
            self._tell(pull)

    def hear_lift(self, pull: Pull) -> None:
        """A rank's quarantine of these blocks is over."""
        pull.lifts += 1
        if pull.is_ended and pull.lifts == pull.quarantines:
            self._tell(pull)

    def _tell(self, pull: Pull) -> None:
        self._outcomes.append(pull)
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
        outcomes, self._outcomes = self._outcomes, []
        for pull in outcomes:
            if pull.is_ended:
                self._free(pull)
            else:
                pull.is_ended = True
                self._go_on(pull)

    def _go_on(self, pull: Pull) -> None:
        """All ranks have reported: decode, or wait for the end of the quarantine."""
        if pull.quarantines:
            if pull.lifts == pull.quarantines:
                self._free(pull)
            return
        if pull.failure is not None:
            pull.content = pull.prompt.content + RECOMPUTED
            for rank in self.ranks:
                rank.fill(pull)
        self._check_bytes(pull, "at the start of decoding")
        decoding_ns = self.world.cluster.decoding_seconds * SECOND
        self.heap.after(int(self._random() * decoding_ns), self._finish, pull)

    def _finish(self, pull: Pull) -> None:
        if self.frozen_until_ns > self.heap.now_ns:
            self.defer(self._finish, pull)
            return
        self._check_bytes(pull, "when decoding ended")
        self._free(pull)
        if pull.failure is not None or pull.prompt.is_probe:
            return
        if self._random() < USED_AGAIN or (self.engine.retry is not None and self.engine.strikes(self.engine.retry)):
            self._use_again(pull)

    def _use_again(self, pull: Pull) -> None:
        """The client comes again with the same parameters, here or elsewhere. A built-in P cannot tell who is late, so
        there it comes again only where it is remembered."""
        engine, cluster = self.engine, self.world.cluster
        others = engine.others
        if pull.prompt.engine.is_builtin:
            if not cluster.remembers_peers:
                return
        elif others and self._random() < USED_AGAIN_ELSEWHERE:
            engine = others[int(self._random() * len(others))]
        self._clients += 1
        self.heap.after(int(self._random() * USED_AGAIN_NS_MAX), self._come_again, (engine, pull.prompt))

    def _come_again(self, what: tuple[DecodeEngine, Prompt]) -> None:
        if self.frozen_until_ns > self.heap.now_ns:
            self.defer(self._come_again, what)
            return
        self._clients -= 1
        engine, prompt = what
        life = engine.life
        if isinstance(life, DecodeLife) and life.frozen_until_ns <= self.heap.now_ns:
            again = life._hear(prompt)
            again.is_repeated = True
            life._schedule(again)

    def _free(self, pull: Pull) -> None:
        blocks, free, waiting = pull.blocks, self.free, self._waiting
        self._check_unwritten(pull, blocks, "freed")
        for rank in self.ranks:
            rank.erase(blocks)
            rank.pulls.pop(pull.request_id, None)
        self._give(free, blocks)
        del self.open_pulls[pull], self.heard[pull]
        while waiting and len(free) >= waiting[0].wanted_blocks:
            self._clients -= 1
            self._begin(waiting.popleft())

    def _check_unwritten(self, pull: Pull, blocks: list[int], action: str) -> None:
        for rank in self.ranks:
            for writing in rank.writing:
                if writing and not writing.isdisjoint(blocks):
                    found = sorted(writing.intersection(blocks))
                    self.world.oracles.complain(
                        "block reuse", f"{pull.request_id}: {found} are {action} while a READ may write into them"
                    )

    def _check_bytes(self, pull: Pull, when: str) -> None:
        if pull.is_unproven:
            return
        blocks = pull.blocks
        expected = tags(pull.content, pull.cached, len(blocks))
        for rank in self.ranks:
            for memory in rank.memory[: pull.prompt.pieces]:
                if list(map(memory.__getitem__, blocks)) != expected:
                    self.world.oracles.complain(
                        "bytes", f"{pull.request_id} {when}: blocks {blocks} of rank {rank.number} hold something else"
                    )


class DecodeRank:
    """One worker: the executors of its cores, and an agent.

    `memory` and `writing` have a part per READ that a block takes: its tag, and whether a READ may still write it.
    `agents` are the lives of P that are loaded, `pulls` the requests that cores have in hand.
    """

    __slots__ = (
        "_agent_free_ns",
        "_clock",
        "_connections",
        "_heap",
        "_names",
        "_roster",
        "agents",
        "life",
        "memory",
        "name",
        "number",
        "pulls",
        "random",
        "readers",
        "world",
        "writing",
    )

    def __init__(self, life: DecodeLife, number: int, blocks: int) -> None:
        world = life.world
        self.life = life
        self.world = world
        self.number = number
        self.name = f"{life.engine.name}.{life.engine.lives}/{number}"
        self.random = life.engine.chance.random
        # Those of the members of the roster.
        self.readers: dict[PeerKey, Reader] = {}
        self._roster = world.cores.roster(
            members_max=world.cluster.peer_limit,
            idle_ns=world.cluster.engine_ttl_ns,
            quarantine_blocks_max=blocks,  # which it is not told of: level 2 fills it
            member=lambda key: self.readers[key].core,
        )
        self.agents: dict[PrefillLife, Agent] = {}
        self.pulls: dict[str, Pull] = {}
        pieces = max(1, RANKS_MAX // world.cluster.decode_ranks)
        self.memory = [[JUNK] * blocks for _ in range(pieces)]
        self.writing: list[set[int]] = [set() for _ in range(pieces)]
        self._agent_free_ns = 0
        self._connections = 0
        self._names = 0
        self._heap = world.heap
        self._clock = life.engine.clock

    def connections(self) -> list[Connection]:
        """All whose agents are loaded."""
        return [each for agent in self.agents.values() for each in (*agent.connections, *agent.leaving)]

    def draw_name(self) -> str:
        """Another one with each call."""
        self._names += 1
        return f"{self.name} {self._names}"

    def next_connection(self) -> int:
        self._connections += 1
        return self._connections

    # --- memory -----------------------------------------------------------------------------------------------------

    def fill(self, pull: Pull) -> None:
        """Compute these blocks here."""
        for memory in self.memory:
            for block, tag in zip(pull.blocks, tags(pull.content, pull.cached, len(pull.blocks)), strict=True):
                memory[block] = tag

    def erase(self, blocks: list[int]) -> None:
        for memory in self.memory:
            for block in blocks:
                memory[block] = JUNK

    # --- commands to cores; how long ago the engine heard of a request is worked out when they are carried out -------

    def announce(self, pull: Pull) -> None:
        reader = self._reader(pull, is_awaited=False)
        if reader is None:
            return
        if reader.is_closed:
            reader.hold_back(self.announce, pull)
            return
        reader.deliver(
            core.Announced(
                request_id=pull.request_id,
                lease=pull.lease,
                address=pull.prompt.engine.name,
                age_ns=self._clock.local_ns(self._heap.now_ns) - pull.heard_local_ns,
                message=(self.announce, pull),
            )
        )

    def start(self, pull: Pull) -> None:
        reader = self._reader(pull, is_awaited=True)
        if reader is None:
            return
        if reader.is_closed:
            reader.hold_back(self.start, pull)
            return
        self.pulls[pull.request_id] = pull
        reader.deliver(
            core.Started(
                request_id=pull.request_id,
                lease=pull.lease,
                address=pull.prompt.engine.name,
                age_ns=self._clock.local_ns(self._heap.now_ns) - pull.heard_local_ns,
                message=(self.start, pull),
            )
        )

    def need_nothing(self, pull: Pull) -> None:
        reader = self._reader(pull, is_awaited=False)
        if reader is not None:
            self._tell_unread(reader, pull)

    def _tell_unread(self, reader: Reader, pull: Pull) -> None:
        reader.deliver(
            core.ReleaseUnread(
                request_id=pull.request_id,
                lease=pull.lease,
                address=pull.prompt.engine.name,
                message=(self.need_nothing, pull),
            )
        )

    def abort(self, pull: Pull) -> None:
        reader = self.tell_roster(roster.AbortAsked(request_id=pull.request_id, message=pull))
        if reader is not None:
            reader.deliver(core.AbortAsked(request_id=pull.request_id, message=(self.abort, pull)))

    # --- the roster -------------------------------------------------------------------------------------------------

    def _reader(self, pull: Pull, *, is_awaited: bool) -> Reader | None:
        """The executor for a request's remote engine, made when it is new. None: the request is refused."""
        prompt = pull.prompt
        return self.tell_roster(
            roster.Asked(
                key=PeerKey(prompt.life.engine_id, prompt.tp_size, 1, 1),
                place=prompt.engine.name,
                request_id=pull.request_id,
                lease=pull.lease,
                is_awaited=is_awaited,
                message=pull,
            )
        )

    def tell_roster(self, event: Event) -> Reader | None:
        """The executor that is to have what has come, if there is one."""
        return self._carry_out(self._roster.handle(event, self._heap.now_ns))

    def retire_idle(self) -> None:
        """It is some time later."""
        self._carry_out(self._roster.advance(self._heap.now_ns))

    def _carry_out(self, effects: list[roster.RosterEffect]) -> Reader | None:
        found: Reader | None = None
        for effect in effects:
            match effect:
                case roster.HandOver(key=key):
                    found = self.readers[key]
                case roster.Admit(key=key, message=pull):
                    self.readers[key] = Reader(self, pull.prompt.engine, key)
                case roster.Retire(key=key):
                    self._heap.after(0, self.readers[key].deliver, core.Retire())
                case roster.Recall(key=key, message=pull):
                    self.readers[key].deliver(core.Recall(address=pull.prompt.engine.name))
                case roster.Refuse(message=pull, ended=ended):
                    self.life.hear_report(pull, self.number, ended.failure, is_quarantined=False)
                case roster.TellUnread(key=key, message=pull):
                    self._tell_unread(self.readers[key], pull)
                case roster.NoteQuarantine() | roster.NoteNotMet():
                    pass  # for people
                case _:
                    assert_never(effect)
        return found

    def forget(self, reader: Reader) -> None:
        """The core is finished."""
        if self.readers.get(reader.key) is reader:
            del self.readers[reader.key]
            self.tell_roster(roster.Ended(key=reader.key))

    # --- the thread of the agent ------------------------------------------------------------------------------------

    def order(self, read: Read) -> None:
        """Queue a READ; `Reader.end_read` hears of its end."""
        self._agent_free_ns = at_ns = max(self._heap.now_ns, self._agent_free_ns) + CALL_NS
        self._heap.at(at_ns, self._post, read)

    def _post(self, read: Read) -> None:
        life = self.life
        if life.frozen_until_ns > self._heap.now_ns:
            life.defer(self._post, read)
            return
        connection = read.connection
        reader = connection.reader
        if not reader.core.wants(read.pull.request_id):
            reader.end_read(read, was_wanted=False)
            return
        link = connection.link
        refused = link.active and self.random() < POST_REFUSED and link.hit(Kind.READ_ERROR) is not None
        if connection.is_broken or refused:
            peer = connection.life.engine_id
            lost = connection.is_broken
            read.failure = TransferError(peer=peer, operation="post", error="refused", transport_lost=lost)
            reader.end_read(read, was_wanted=True)
            return
        life.engine.transport.launch(read)

    def see_end(self, read: Read) -> None:
        """A READ has ended, or an error of it was told; the thread looks when it runs."""
        life = self.life
        now_ns = self._heap.now_ns
        if life.frozen_until_ns > now_ns:
            life.defer(self.see_end, read)
            return
        connection = read.connection
        if read.failure is None:
            times = (read.completed_ns, self._clock.local_ns(now_ns), connection.life)
            read.pull.completed[self.number, read.piece] = times
        connection.reader.end_read(read, was_wanted=True)
