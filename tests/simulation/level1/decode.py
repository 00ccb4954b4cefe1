"""Decode engines: requests come with the blocks of a prompt on P, are pulled by every rank, decoded and freed.

`DecodeEngine` outlives crashes; `DecodeLife` is one process: the block pool and the script of its scheduler.
`DecodeRank` is what one worker has: memory, peer actors, and the agent with its READs (as
`connector.runtime.nixl_owner` runs them).

A request has ended when all ranks have reported. Its blocks return to the pool when it is through with decoding, and
blocks that a rank reported as quarantined when that rank has lifted it. A request that failed is computed anew in the
same blocks, so a READ that still writes into them is caught by their bytes too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from statemachine import request, transfer
from statemachine.failures import BadParams, Failure, TooManyPeers, TransferError
from statemachine.kernel import Event, ProtocolError
from tests.simulation.faults import Fault, Kind
from tests.simulation.level1.actor import Attempt, PeerActor, Run
from tests.simulation.level1.heap import FOREVER, MICROSECOND, MILLISECOND, SECOND, Call
from tests.simulation.level1.oracles import JUNK, tags
from tests.simulation.level1.prefill import STEP_NS_MAX, draw_clock
from tests.simulation.level1.transport import Connection, Read
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
ABORT_NS = (0, 300 * MICROSECOND, 2 * MILLISECOND, 100 * MILLISECOND, SECOND)

SAMPLES = 0.08
"""How often a prompt has two samples."""
TRACKED = 0.3
QUEUED = 0.1
CACHED = 0.2
ABORTED = 0.03
NOT_AWAITED = 0.06
NOTHING_TO_READ = 0.02
USED_AGAIN = 0.01
"""How often a client that was served comes again with the same parameters, which is an error of its own."""
USED_AGAIN_NS_MAX = SECOND // 2
POST_REFUSED = 0.2
"""Part of the READ errors that are refusals to post."""
RECOMPUTED = 1 << 40
"""Content of what D computes itself."""

_COMPLETED = transfer.Completed()
_ABANDONED = transfer.Abandoned()
_HANDLE_RELEASED = transfer.HandleReleased()
_READING = request.State.READING
_REJECTED = BadParams(field="remote_block_ids", expected="a list of block ids", found="'x'")


class Pull:
    """One request on a decode engine. `reported`: bits of the ranks that have; `blocks` are the same on all ranks.

    `quarantines` and `lifts` count ranks. `is_ended`: the scheduler has acted on the reports. `is_repeated`: another
    request has used its parameters before.
    """

    __slots__ = (
        "awaited",
        "blocks",
        "cached",
        "content",
        "decode",
        "ended_ns",
        "failure",
        "has_bad_params",
        "is_aborted",
        "is_ended",
        "is_lost",
        "is_repeated",
        "is_tracked",
        "lifts",
        "prompt",
        "quarantines",
        "reported",
        "request_id",
        "runs",
        "started_ns",
        "wanted_blocks",
    )

    def __init__(self, decode: str, prompt: Prompt, sample: int) -> None:
        self.decode = decode
        self.prompt = prompt
        self.request_id = f"{decode}-r{prompt.content}.{sample}"
        prompt.pulls.append(self)
        self.awaited = True
        self.cached = 0
        self.wanted_blocks = 0
        self.content = prompt.content
        self.blocks: list[int] = []
        self.runs: list[Run] = []
        self.has_bad_params = False
        self.is_repeated = False
        self.is_tracked = False
        self.is_aborted = False
        self.is_ended = False
        self.is_lost = False
        self.started_ns = 0
        self.ended_ns = FOREVER
        self.reported = 0
        self.failure: Failure | None = None
        self.quarantines = 0
        self.lifts = 0


class DecodeEngine:
    """What outlives a crash. `abort` and `bad_params`: the faults that are on."""

    __slots__ = (
        "abort",
        "bad_params",
        "chance",
        "clock",
        "life",
        "lives",
        "name",
        "polls_from_ns",
        "transport",
        "world",
    )

    def __init__(self, world: World, transport: Transport, name: str) -> None:
        self.world = world
        self.transport = transport
        self.name = name
        self.chance = world.chance(name)
        self.clock = draw_clock(self.chance)
        self.abort: Fault | None = None
        self.bad_params: Fault | None = None
        self.polls_from_ns = 0
        self.lives = 0
        self.life: DecodeLife
        self.start()

    def start(self) -> None:
        """A new process, with an empty cache."""
        self.lives += 1
        self.life = DecodeLife(self)

    def receive(self, prompt: Prompt) -> None:
        """A client brings what P answered; when D is dead, it goes away."""
        life = self.life
        heap = self.world.heap
        if life.frozen_until_ns > heap.now_ns:
            if not life.is_dead:
                heap.at(life.frozen_until_ns, self.receive, prompt)
            return
        life.accept(prompt)

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
        "free",
        "frozen_until_ns",
        "heap",
        "is_dead",
        "open_pulls",
        "ranks",
        "world",
    )

    def __init__(self, engine: DecodeEngine) -> None:
        world = engine.world
        self.world = world
        self.engine = engine
        self.heap = world.heap
        self.is_dead = False
        self.frozen_until_ns = 0
        self.open_pulls: dict[Pull, None] = {}
        blocks = world.cluster.decode_blocks
        self.free = block_pool(blocks)
        self.ranks = [DecodeRank(self, number, blocks) for number in range(world.cluster.decode_ranks)]
        self._all_ranks = (1 << len(self.ranks)) - 1
        self._give: Give = give_last if world.cluster.reuses_last else give_lowest
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
            for actor in rank.peers.values():
                actor.closed_until_ns = max(actor.closed_until_ns, until_ns)

    def die(self) -> None:
        """Its memory and its agents are gone; its clients too."""
        self.is_dead = True
        self.freeze(FOREVER)
        for pull in self.open_pulls:
            pull.is_lost = True
        for rank in self.ranks:
            for connection in rank.agents.values():
                del connection.life.connections[connection]
                for read in connection.flying:
                    read.is_flying = False
            rank.agents.clear()

    # --- requests ---------------------------------------------------------------------------------------------------

    def accept(self, prompt: Prompt) -> None:
        """Samples of one prompt arrive together, before one of them can let go of the blocks."""
        random = self._random
        if prompt.is_probe:
            self._schedule(Pull(self.engine.name, prompt, 0))
            return
        samples = 2 if random() < SAMPLES else 1
        pulls = [Pull(self.engine.name, prompt, sample) for sample in range(samples)]
        if samples > 1 or random() < TRACKED:
            for pull in pulls:
                pull.is_tracked = True
                for rank in self.ranks:
                    rank.track(pull)
        for pull in pulls:
            if random() < QUEUED:
                self._clients += 1
                self.heap.after(int(random() * QUEUED_NS_MAX), self._schedule_later, pull)
            else:
                self._schedule(pull)

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
                self._settle_without_reading(pull)
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
        else:
            self._settle_without_reading(pull)

    def _settle_without_reading(self, pull: Pull) -> None:
        """Everything is cached, or the client left before the request was scheduled."""
        pull.awaited = False
        self._start(pull)
        pull.ended_ns = self.heap.now_ns
        pull.runs.clear()

    def _begin(self, pull: Pull) -> None:
        if pull.wanted_blocks:
            pull.blocks = blocks = take(self.free, pull.wanted_blocks)
            self._check_unwritten(pull, blocks, "handed out")
        engine = self.engine
        self.open_pulls[pull] = None
        if engine.bad_params is not None and engine.strikes(engine.bad_params):
            pull.has_bad_params = True
            # What cannot be decoded is tracked on no peer.
            if not pull.is_tracked and self._random() < 0.5:
                self._reject(pull)
                return
        self._start(pull)
        if pull.prompt.is_probe:
            return
        stormy = engine.abort is not None and engine.strikes(engine.abort)
        if stormy or self._random() < ABORTED:
            after_ns = int(self._random() * ABORT_NS[int(self._random() * len(ABORT_NS))])
            self.heap.after(after_ns, self._abort, pull)

    def _start(self, pull: Pull) -> None:
        pull.started_ns = self.heap.now_ns
        self.world.oracles.pulls.append(pull)
        retries = self.world.options.transfer_retries
        pull.runs = [Run(rank, pull, retries) for rank in self.ranks]
        for run in pull.runs:
            run.rank.start(run)

    def _reject(self, pull: Pull) -> None:
        """The scheduler side has found the parameters malformed; no peer hears of the request."""
        pull.started_ns = self.heap.now_ns
        self.world.oracles.pulls.append(pull)
        for rank in self.ranks:
            rank.refuse(Run(rank, pull, 0), request.ParamsRejected(failure=_REJECTED))

    def _abort(self, pull: Pull) -> None:
        if self.frozen_until_ns > self.heap.now_ns:
            self.defer(self._abort, pull)
            return
        if not pull.is_ended:
            pull.is_aborted = True
            for run in pull.runs:
                run.rank.abort(run)

    # --- outcomes ---------------------------------------------------------------------------------------------------

    def hear_report(self, pull: Pull, rank: int, failure: Failure | None, *, is_quarantined: bool) -> None:
        """A rank has reported; the scheduler learns of it with the next step after the last of them."""
        oracles = self.world.oracles
        oracles.reported(pull, rank)
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
        if pull.failure is None and not pull.prompt.is_probe and self._random() < USED_AGAIN:
            self._repeat(pull)

    def _repeat(self, pull: Pull) -> None:
        """The client comes again with the same parameters."""
        again = Pull(self.engine.name, pull.prompt, len(pull.prompt.pulls))
        again.is_repeated = True
        self._clients += 1
        self.heap.after(int(self._random() * USED_AGAIN_NS_MAX), self._schedule_later, again)

    def _free(self, pull: Pull) -> None:
        blocks, free, waiting = pull.blocks, self.free, self._waiting
        self._check_unwritten(pull, blocks, "freed")
        for rank in self.ranks:
            rank.erase(blocks)
        self._give(free, blocks)
        del self.open_pulls[pull]
        pull.runs.clear()
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
        blocks = pull.blocks
        expected = tags(pull.content, pull.cached, len(blocks))
        for rank in self.ranks:
            for memory in rank.memory:
                if list(map(memory.__getitem__, blocks)) != expected:
                    self.world.oracles.complain(
                        "bytes", f"{pull.request_id} {when}: blocks {blocks} of rank {rank.number} hold something else"
                    )


class DecodeRank:
    """One worker: peer actors by engine id, and an agent.

    `memory` and `writing` have a part per READ that a block takes: its tag, and whether a READ may still write it.
    `agents` are the connections that are loaded, `consumed` the prompts whose blocks were released,
    `open_handles` counts those of READs that are not released.
    """

    __slots__ = (
        "_agent_free_ns",
        "_clock",
        "_heap",
        "_log",
        "_step",
        "agents",
        "consumed",
        "life",
        "memory",
        "name",
        "number",
        "open_handles",
        "peers",
        "random",
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
        self.peers: dict[str, PeerActor] = {}
        self.agents: dict[PrefillLife, Connection] = {}
        self.consumed: set[str] = set()
        self.open_handles = 0
        pieces = max(1, world.cluster.prefill_ranks // world.cluster.decode_ranks)
        self.memory = [[JUNK] * blocks for _ in range(pieces)]
        self.writing: list[set[int]] = [set() for _ in range(pieces)]
        self._agent_free_ns = 0
        self._heap = world.heap
        self._clock = life.engine.clock
        self._log = world.log.extend
        self._step = world.step_transfer

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

    # --- commands to actors -----------------------------------------------------------------------------------------

    def start(self, run: Run) -> None:
        prompt = run.pull.prompt
        actor = self._actor(prompt)
        if actor is None:
            engine_id = prompt.life.engine_id
            failure = TooManyPeers(peer=engine_id, limit=self.world.options.peer_limit)
            self.refuse(run, request.PeerFailed(failure=failure))
        elif actor.closed_until_ns > self._heap.now_ns:
            actor.defer(self.start, run)
        else:
            actor.start(run)

    def abort(self, run: Run) -> None:
        actor = self.peers.get(run.pull.prompt.life.engine_id)
        if actor is None:
            return
        if actor.closed_until_ns > self._heap.now_ns:
            actor.defer(self.abort, run)
        elif run.actor is actor:
            actor.abort(run)

    def track(self, pull: Pull) -> None:
        actor = self._actor(pull.prompt)
        if actor is None:
            return
        if actor.closed_until_ns > self._heap.now_ns:
            actor.defer(self.track, pull)
        else:
            actor.track(pull)

    def refuse(self, run: Run, event: Event) -> None:
        """End a request that never reaches a peer, through its machine like any other."""
        before = run.value
        self._log((self._heap.now_ns, run, before.state, event.__class__))
        run.value, effects = self.world.step_request(before, event)
        run.is_over = True
        for effect in effects:
            if isinstance(effect, request.Report):
                self.life.hear_report(run.pull, self.number, effect.failure, is_quarantined=False)

    # --- peers ------------------------------------------------------------------------------------------------------

    def _actor(self, prompt: Prompt) -> PeerActor | None:
        """The actor of a remote engine, made when it is new. None: too many are known and all are in use."""
        engine_id = prompt.life.engine_id
        actor = self.peers.get(engine_id)
        if actor is None:
            if len(self.peers) >= self.world.options.peer_limit and not self._evict_one():
                return None
            actor = self.peers[engine_id] = PeerActor(self, prompt.engine, engine_id)
        return actor

    def _evict_one(self) -> bool:
        """Give up the peer that has been unused for longest, an unconnected one if there is one."""
        unused = [actor for actor in self.peers.values() if actor.is_unused]
        if not unused:
            return False
        oldest = min(unused, key=lambda actor: (actor.is_connected, actor.last_used_ns))
        self._heap.after(0, oldest.retire, None)
        return True

    def retire_others(self, connected: PeerActor) -> None:
        """An engine has answered at its address: any other engine that was known there is gone."""
        for actor in self.peers.values():
            if actor.engine is connected.engine and actor is not connected:
                self._heap.after(0, actor.retire, None)

    def sweep(self) -> None:
        """Forget peers that are not connected and have not been asked for in a long time."""
        ttl_ns = self.world.limits.engine_ttl_ns
        for actor in list(self.peers.values()):
            idle_ns = self._heap.now_ns - actor.last_used_ns
            if actor.is_unused and not actor.is_connected and idle_ns > ttl_ns:
                actor.retire(None)

    def forget(self, actor: PeerActor) -> None:
        """The actor has ended."""
        if self.peers.get(actor.engine_id) is actor:
            del self.peers[actor.engine_id]

    # --- the agent --------------------------------------------------------------------------------------------------

    def order(self, read: Read) -> None:
        """Queue a READ; `PeerActor.end_read` hears of its end."""
        self._agent_free_ns = at_ns = max(self._heap.now_ns, self._agent_free_ns) + CALL_NS
        self._heap.at(at_ns, self._post, read)

    def quarantine(self, attempt: Attempt) -> None:
        """Nobody waits for these READs any more; the quarantine is over when the last one has ended."""
        attempt.is_quarantined = True
        for read in attempt.posted:
            if read.value is not None:
                self._apply(read, _ABANDONED)

    def _post(self, read: Read) -> None:
        life = self.life
        if life.frozen_until_ns > self._heap.now_ns:
            life.defer(self._post, read)
            return
        run, connection = read.run, read.connection
        if run.value.state is not _READING:
            read.is_skipped = True
            self._close(read)
            return
        link = connection.link
        refused = link.active and self.random() < POST_REFUSED and link.hit(Kind.READ_ERROR) is not None
        if connection.is_broken or refused:
            peer = connection.life.engine_id
            lost = bool(connection.is_broken)
            read.failure = TransferError(peer=peer, operation="post", error="refused", transport_lost=lost)
            self._close(read)
            return
        read.value = transfer.Transfer(request_id=run.pull.request_id, read=read.piece)
        read.attempt.posted.append(read)
        self.open_handles += 1
        life.engine.transport.launch(read)

    def see_end(self, read: Read) -> None:
        """A READ has ended; the agent looks when it runs."""
        life = self.life
        now_ns = self._heap.now_ns
        if life.frozen_until_ns > now_ns:
            life.defer(self.see_end, read)
            return
        failure = read.failure
        self._apply(read, _COMPLETED if failure is None else transfer.Errored(failure=failure))

    def _apply(self, read: Read, event: Event) -> None:
        before = read.value
        assert before is not None
        self._log((self._heap.now_ns, read, before.state, event.__class__))
        try:
            read.value, effects = self._step(before, event)
        except ProtocolError as error:
            self.world.oracles.complain("health", str(error))
            return
        for effect in effects:
            if effect.__class__ is transfer.ReleaseHandle:
                self._heap.after(CALL_NS, self._release_handle, read)
            else:  # Inform or LiftQuarantine
                self._close(read)

    def _release_handle(self, read: Read) -> None:
        life = self.life
        if life.frozen_until_ns > self._heap.now_ns:
            life.defer(self._release_handle, read)
            return
        self._apply(read, _HANDLE_RELEASED)
        self.open_handles -= 1

    def _close(self, read: Read) -> None:
        read.ended_ns = self._clock.local_ns(self._heap.now_ns)
        attempt = read.attempt
        attempt.open_reads -= 1
        if attempt.open_reads == 0:
            attempt.posted.clear()
            if attempt.is_quarantined:
                self.life.hear_lift(read.run.pull)
        actor = read.run.actor
        assert actor is not None
        actor.end_read(read)
