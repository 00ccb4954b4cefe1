"""Oracles of level 1: what must hold in every run, judged by what the world knows and the cores do not.

    report once     a rank reports an awaited request exactly once, and another one never
    proof           when a request is reported done, P had not freed its blocks when its last READ ended; of a built-in
                    P, which proves nothing, its READs ended within a lease of when D first heard of it
    bytes           a request reported done holds its own prompt's blocks, then and until they are freed
    block reuse     a block that is freed or handed out is named by no READ that may still write
    agent           a connection is torn down only when no READ on it is in flight
    suspect         nothing new is read over a connection that is known to be unsound
    free once       each rank frees a lease that was granted exactly once, and one that was not never
    held            a lease ends early only if every engine that held it has released it on all its ranks
    promise         a lease that runs out does so no earlier than P has said to any reader
    in time         and no later than what reached P would keep it
    kept alive      where no fault is near, it does not run out while somebody waits for it
    handed back     and it does not run out after everybody has let go of it
    over            a request is told that its lease is over only when it is
    bound           every awaited request ends in time, faults or not
    isolation       a request between engines that no fault touches is done soon
    recovery        with the faults off, every pair of engines works again
    leaks           in the end nothing is in flight, lent, held or quarantined
    health          no core raises, none ends a request because of an event that its tables declare impossible

A block holds a tag that says whose it is: content of the prompt and number of the block in it. So the bytes are right
when the tags are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from statemachine.failures import ActorCrashed, BlocksConsumed, Failure, LeaseOver, TransferError
from statemachine.remote_engine import RESTARTED
from tests.simulation.faults import HARMLESS_KINDS, Fault, Kind
from tests.simulation.level1.clock import SLEW_PPB_MAX
from tests.simulation.level1.heap import MILLISECOND, SECOND, EventHeap
from tests.simulation.verdict import Violation

if TYPE_CHECKING:
    from tests.simulation.level1.decode import Pull
    from tests.simulation.level1.prefill import Prompt
    from tests.simulation.level1.shape import Cluster

BLOCKS_OF_A_PROMPT_MAX = 64
"""Tags of two prompts never meet while prompts are no longer than this."""
JUNK = -1
"""What a freed block holds."""
SLACK_NS = SECOND // 2
"""What a request may take beyond its limits."""
SOON_NS = SECOND // 2
"""How long an undisturbed request may take: a handshake, its READ, and a queue."""
IN_TIME_NS = MILLISECOND
AFTERMATH_NS = 15 * SECOND
"""How long after its end a fault may be felt: back-off, draining, the deadline of what it left hanging."""
INCOMPATIBLE_AFTERMATH_NS = 75 * SECOND
"""An engine that was incompatible is not asked again for up to a minute."""
CRASH_NS_MAX = SECOND // 4


def tags(content: int, first_block: int, blocks: int) -> list[int]:
    """What these blocks of a prompt hold."""
    first = content * BLOCKS_OF_A_PROMPT_MAX + first_block
    return list(range(first, first + blocks))


class Oracles:
    """Collects what is wrong. Times are true nanoseconds, where nothing else is said."""

    __slots__ = (
        "_engine",
        "_heap",
        "_isolates",
        "_lending",
        "_limit_ns",
        "_stops",
        "_touched",
        "coverage",
        "handshake_failures",
        "leases",
        "pulls",
        "violations",
    )

    def __init__(self, heap: EventHeap, cluster: Cluster, faults: Sequence[Fault]) -> None:
        self._heap = heap
        self._engine = cluster.engine
        self._lending = cluster.lending
        limit_ns = cluster.engine.request_ns + cluster.engine.quiesce_ns
        self._limit_ns = limit_ns * SECOND // (SECOND - SLEW_PPB_MAX) + SLACK_NS
        engine_ids = cluster.base.prefills + sum(fault.kind is Kind.CRASH_NEW_ID for fault in faults)
        peers = 2 * engine_ids if cluster.describes_twice else engine_ids
        self._isolates = cluster.peer_limit >= peers
        self._touched = {
            (decode, prefill): [
                _felt(fault) for fault in faults if fault.kind not in HARMLESS_KINDS and fault.touches(decode, prefill)
            ]
            for decode in cluster.base.decode_names
            for prefill in cluster.base.prefill_names
        }
        self._stops: dict[str, list[tuple[int, int]]] = {}
        self.violations: list[Violation] = []
        self.pulls: list[Pull] = []
        self.leases: list[Prompt] = []
        self.coverage: Counter[str] = Counter()
        self.handshake_failures = 0

    @property
    def isolates(self) -> bool:
        """Whether undisturbed requests must succeed: not where fewer peers are allowed than there are."""
        return self._isolates

    def complain(self, oracle: str, detail: str) -> None:
        self.violations.append(Violation(oracle=oracle, detail=detail, at_seconds=self._heap.now_ns / SECOND))

    # --- decode -----------------------------------------------------------------------------------------------------

    def stop(self, engine: str, until_ns: int) -> None:
        """Nothing of this engine runs until then."""
        self._stops.setdefault(engine, []).append((self._heap.now_ns, until_ns))

    def crash(self, engine: str) -> None:
        """An actor of this engine crashed, and is started again within a bound."""
        self.stop(engine, self._heap.now_ns + CRASH_NS_MAX)

    def reported(self, pull: Pull, rank: int, failure: Failure | None) -> None:
        """A rank has reported, for the first time or not."""
        bit = 1 << rank
        if not pull.awaited:
            self.complain("report once", f"{pull.request_id} was reported by rank {rank}, and nobody waits for it")
        elif pull.reported & bit:
            self.complain("report once", f"{pull.request_id} was reported twice by rank {rank}")
        took_ns = self._heap.now_ns - pull.started_ns
        if took_ns > self._limit_ns and took_ns > self._limit_ns + self._stopped_ns(pull):
            self.complain("bound", f"{pull.request_id} took {took_ns / SECOND:.3f} s on rank {rank}")
        if failure is None:
            if pull.prompt.is_superseded:
                pull.is_unproven = True  # The engine has broken what P promised for it.
            elif pull.blocks:
                self._check_proof(pull, rank)
        elif isinstance(failure, LeaseOver):
            self._check_over(pull, failure)
        elif isinstance(failure, ActorCrashed) and "machine" in failure.actor:
            self.complain("health", f"{pull.request_id}: {failure}")

    def _stopped_ns(self, pull: Pull) -> int:
        now_ns = self._heap.now_ns
        stops = self._stops.get(pull.decode, ())
        return sum(end_ns - begin_ns for begin_ns, end_ns in stops if begin_ns < now_ns and end_ns > pull.started_ns)

    def _check_proof(self, pull: Pull, rank: int) -> None:
        prompt = pull.prompt
        for piece in range(prompt.pieces):
            found = pull.completed.get((rank, piece))
            if found is None:
                self.complain("proof", f"{pull.request_id} is done on rank {rank} without READ {piece}")
                continue
            completed_ns, completed_local_ns, life = found
            if life is not prompt.life:
                self.complain("proof", f"{pull.request_id} is done, and was read from {life.name}")
                continue
            freed_ns = prompt.freed_ns.get(self._source(pull, rank, piece, len(life.ranks)), completed_ns)
            if freed_ns >= completed_ns:
                continue
            if prompt.engine.is_builtin:
                self._check_assumption(pull, completed_local_ns)
            else:
                late_ms = (completed_ns - freed_ns) / MILLISECOND
                self.complain("proof", f"{pull.request_id} is done; its blocks were freed {late_ms:.3f} ms before")

    @staticmethod
    def _source(pull: Pull, rank: int, piece: int, prefill_ranks: int) -> int:
        decode_ranks = pull.prompt.decodes[0].world.cluster.decode_ranks
        if prefill_ranks >= decode_ranks:
            return rank * (prefill_ranks // decode_ranks) + piece
        return rank * prefill_ranks // decode_ranks

    def _check_assumption(self, pull: Pull, completed_local_ns: int) -> None:
        pull.is_unproven = True
        self.coverage["a built-in engine had freed what was read"] += 1
        latest_ns = pull.heard_local_ns + self._engine.lease_ns - self._engine.margin_ns
        if completed_local_ns > latest_ns or pull.is_repeated:
            self.complain("proof", f"{pull.request_id} believes in an assumed lease that is over, or was given back")

    def _check_over(self, pull: Pull, failure: LeaseOver) -> None:
        prompt = pull.prompt
        # Of an engine that came back nobody can tell which process lent what has no number.
        has_restarted = failure.why == RESTARTED and prompt.engine.lives > 1 and not prompt.name_for_clients.number
        if prompt.engine.is_builtin:
            heard_ns = min(
                each.heard_ns for each in prompt.pulls if each.decode == pull.decode and each.is_lost == pull.is_lost
            )
            latest_ns = heard_ns + (self._engine.lease_ns - self._engine.margin_ns) * 12 // 13
            is_over = prompt.life.is_dead or self._heap.now_ns >= latest_ns
        else:
            is_over = bool(prompt.freed) or prompt.is_superseded or prompt.life.is_dead
        if has_restarted and not is_over:
            self.coverage["a lease was lost for want of its number"] += 1
        elif not is_over:
            self.complain("over", f"{pull.request_id} is told that its lease is over, and it is not")

    def ended(self, pull: Pull, failure: Failure | None) -> None:
        """All ranks have reported."""
        now_ns = self._heap.now_ns
        took_ns = now_ns - pull.started_ns
        if failure is None and took_ns <= SOON_NS:
            if any(each.decode != pull.decode and each.ended_ns <= now_ns for each in pull.prompt.pulls):
                self.coverage["two engines were served from one lease"] += 1
            return
        if (
            not self._isolates
            or pull.is_aborted
            or pull.is_repeated
            or (isinstance(failure, LeaseOver | BlocksConsumed) and self._may_be_over(pull))
            or self.meets_another_life(pull, failure)
            or self._is_touched(pull, now_ns)
        ):
            return
        what = f"took {took_ns / SECOND:.3f} s" if failure is None else str(failure)
        prompt = pull.prompt
        self.complain("isolation", f"{pull.request_id} from {prompt.engine.name}, which no fault touches: {what}")

    def meets_another_life(self, pull: Pull, failure: Failure | None) -> bool:
        """Whether nothing was read by its engine yet from a built-in engine that came back, however long ago that was:
        when they meet, nobody can tell which process lent what was heard of before; and that the process of a
        connection is gone the first READ finds, which nothing repeats without `transfer_retries`. A request that found
        all it needed in its own cache has met nobody."""
        prompt = pull.prompt
        if prompt.engine.lives == 1:
            return False
        is_of_another = isinstance(failure, LeaseOver) and failure.why == RESTARTED
        is_of_the_dead = isinstance(failure, TransferError) and failure.transport_lost
        if not is_of_another and not (is_of_the_dead and prompt.engine.is_builtin and not self._engine.retries):
            return False
        return not any(
            each.prompt.life is prompt.life
            and each.decode == pull.decode
            and each.ended_ns < pull.heard_ns
            and (each.is_ended and each.failure is None)
            and each.completed
            for each in self.pulls
        )

    def _may_be_over(self, pull: Pull) -> bool:
        """Whether its lease may end before it is served, although nothing is wrong. That it has is judged elsewhere."""
        prompt = pull.prompt
        if prompt.engine.is_builtin:
            lasts_ns = self._engine.lease_ns * 11 // 12 - self._engine.margin_ns
            return self._heap.now_ns - pull.heard_ns > lasts_ns - SOON_NS
        comes_late = any(each.decode != pull.decode or each.is_repeated for each in prompt.pulls)
        comes_late |= any(freed_ns < pull.heard_ns + SOON_NS for freed_ns in prompt.freed_ns.values())
        return comes_late or prompt.is_superseded or self._has_lasted(prompt)

    def _has_lasted(self, prompt: Prompt) -> bool:
        """Whether its total bound may end it."""
        now_ns = prompt.engine.clock.local_ns(self._heap.now_ns)
        return now_ns >= prompt.granted_local_ns[0] + self._lending.total_ns - self._lending.lease_ns

    def _is_touched(self, pull: Pull, now_ns: int) -> bool:
        felt = self._touched[pull.decode, pull.prompt.engine.name]
        return any(begin_ns <= now_ns and pull.heard_ns <= end_ns for begin_ns, end_ns in felt)

    # --- prefill ----------------------------------------------------------------------------------------------------

    def lease_ended(self, prompt: Prompt, rank: int, now_local_ns: int, *, is_expired: bool, is_delayed: bool) -> None:
        """Of one of our engines; judged by what has reached it. `is_delayed`: the engine stood still until now, or
        takes in what it was sent meanwhile."""
        what = f"rank {rank} freed {prompt.request_id}"
        if not is_expired:
            holders = prompt.holders[rank]
            wanted = [name for name, (ranks, released) in holders.items() if len(released) < ranks]
            wanted += sorted(prompt.askers[rank])
            if len(prompt.notifiers[rank]) < prompt.notifier_ranks[rank]:
                wanted.append("an engine that notifies")
            if wanted or not (holders or prompt.notifiers[rank]):
                self.complain("held", f"{what}, and {wanted or 'nobody'} had not released it")
            if len(holders) > 1:
                self.coverage["two engines held one lease"] += 1
            return
        if now_local_ns < prompt.promised_ns[rank]:
            early_ms = (prompt.promised_ns[rank] - now_local_ns) / MILLISECOND
            self.complain("promise", f"{what} {early_ms:.3f} ms before it said")
        late_ns = now_local_ns - prompt.touched_ns[rank]
        if late_ns > IN_TIME_NS and not is_delayed:
            self.complain("in time", f"{what} {late_ns / MILLISECOND:.3f} ms after its deadline")

    def freed(self, prompt: Prompt, rank: int, *, is_expired: bool) -> None:
        """A rank has freed a lease, for the first time or not."""
        if not prompt.is_granted:
            self.complain("free once", f"rank {rank} freed {prompt.request_id}, which is not lent")
        elif prompt.freed & (1 << rank):
            self.complain("free once", f"rank {rank} freed {prompt.request_id} twice")
        elif is_expired and self._isolates and prompt.pulls and not prompt.engine.is_builtin:
            self._check_expiry(prompt)

    def _check_expiry(self, prompt: Prompt) -> None:
        now_ns = self._heap.now_ns
        if self._has_lasted(prompt) or any(self._is_touched(pull, now_ns) for pull in prompt.pulls):
            return
        # Who was told that the lease is of another process gives nothing back.
        if any(pull.is_lost or pull.is_refused or self.meets_another_life(pull, pull.failure) for pull in prompt.pulls):
            return
        first = prompt.pulls[0]
        waiting = [pull for pull in prompt.pulls if pull.ended_ns > now_ns and not pull.is_repeated]
        if waiting and not (len(waiting) < len(prompt.pulls) and waiting[0].heard_ns > now_ns - SOON_NS):
            if any(pull.announced or pull.is_guest for pull in waiting):
                self.complain("kept alive", f"{prompt.request_id} ran out, and {waiting[0].request_id} waits for it")
        elif not waiting and all(pull.ended_ns < now_ns - SOON_NS for pull in prompt.pulls):
            self.complain("handed back", f"{prompt.request_id} ran out; {first.request_id} has ended long before")

    def forget(self) -> None:
        """The run is over, and what it did is counted."""
        self.pulls.clear()
        self.leases.clear()

    # --- the end ----------------------------------------------------------------------------------------------------

    def check_all_ended(self, decode_ranks: int) -> None:
        """After the liveness phase."""
        reported = (1 << decode_ranks) - 1
        for pull in self.pulls:
            if pull.awaited and pull.reported != reported and not pull.is_lost:
                self.complain("bound", f"{pull.request_id} was not reported by every rank ({pull.reported:b})")
        for prompt in self.leases:
            freed = (1 << len(prompt.life.ranks)) - 1
            is_over = prompt.life.is_dead or prompt.is_superseded
            if prompt.is_granted and prompt.freed != freed and not is_over:
                self.complain("free once", f"{prompt.request_id} was not freed by every rank ({prompt.freed:b})")


def _felt(fault: Fault) -> tuple[int, int]:
    """From when to when requests may feel it."""
    aftermath_ns = INCOMPATIBLE_AFTERMATH_NS if fault.kind is Kind.INCOMPATIBLE else AFTERMATH_NS
    return round(fault.at_seconds * SECOND), round(fault.end_seconds * SECOND) + aftermath_ns
