"""Oracles of level 1: what must hold in every run, judged by what the world knows and the machines do not.

    report once     a rank reports an awaited request exactly once, and another one never
    bytes           a request reported done holds its own prompt's blocks, then and until they are freed
    block reuse     a block that is freed or handed out is named by no READ that may still write
    agent           a connection is taken down only when no READ on it may still write
    free once       each rank frees a lease that was granted exactly once, and one that was not never
    bound           every awaited request ends in time, faults or not
    isolation       a request between engines that no fault touches is done soon
    give back       a lease between such engines does not run out long after its last request has ended
    recovery        with the faults off, every pair of engines works again
    leaks           in the end nothing is in flight, lent, held or quarantined
    health          no event arrives that a table declares impossible

A block holds a tag that says whose it is: content of the prompt and number of the block in it. So the bytes are right
when the tags are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from connector.runtime.supervisor import RESTART_DELAY_SECONDS_MAX
from statemachine.failures import AbortedByClient, Failure
from tests.simulation.faults import Fault, Kind
from tests.simulation.level1.heap import SECOND, EventHeap
from tests.simulation.oracles import (
    AFTERMATH_SECONDS,
    SCHEDULING_SLACK_SECONDS,
    SERVED_SOON_SECONDS,
    Violation,
)

if TYPE_CHECKING:
    from tests.simulation.level1.decode import Pull
    from tests.simulation.level1.prefill import Prompt
    from tests.simulation.level1.shape import Cluster

BLOCKS_OF_A_PROMPT_MAX = 64
"""Tags of two prompts never meet while prompts are no longer than this."""
JUNK = -1
"""What a freed block holds."""
INCOMPATIBLE_AFTERMATH_SECONDS = 75.0
"""An engine that was incompatible is not asked again for a minute."""

_SOON_NS = round(SERVED_SOON_SECONDS * SECOND)
_RESTART_NS = round(RESTART_DELAY_SECONDS_MAX * SECOND)


def tags(content: int, first_block: int, blocks: int) -> list[int]:
    """What these blocks of a prompt hold."""
    first = content * BLOCKS_OF_A_PROMPT_MAX + first_block
    return list(range(first, first + blocks))


class Oracles:
    """Collects what is wrong. Times are true nanoseconds."""

    __slots__ = ("_heap", "_isolates", "_limit_ns", "_stops", "_touched", "leases", "pulls", "violations")

    def __init__(self, heap: EventHeap, cluster: Cluster, faults: Sequence[Fault]) -> None:
        self._heap = heap
        options = cluster.options
        limit_seconds = options.request_timeout_seconds + options.quiesce_timeout_seconds + SCHEDULING_SLACK_SECONDS
        self._limit_ns = round(limit_seconds * SECOND)
        engine_ids = cluster.base.prefills + sum(fault.kind is Kind.CRASH_NEW_ID for fault in faults)
        self._isolates = options.peer_limit >= engine_ids
        self._touched = {
            (decode, prefill): [_felt(fault) for fault in faults if fault.touches(decode, prefill)]
            for decode in cluster.base.decode_names
            for prefill in cluster.base.prefill_names
        }
        self._stops: dict[str, list[tuple[int, int]]] = {}
        self.violations: list[Violation] = []
        self.pulls: list[Pull] = []
        self.leases: list[Prompt] = []

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
        self.stop(engine, self._heap.now_ns + _RESTART_NS)

    def reported(self, pull: Pull, rank: int) -> None:
        """A rank has reported, for the first time or not."""
        bit = 1 << rank
        if not pull.awaited:
            self.complain("report once", f"{pull.request_id} was reported by rank {rank}, and nobody waits for it")
        elif pull.reported & bit:
            self.complain("report once", f"{pull.request_id} was reported twice by rank {rank}")
        took_ns = self._heap.now_ns - pull.started_ns
        if took_ns > self._limit_ns and took_ns > self._limit_ns + self._stopped_ns(pull):
            self.complain("bound", f"{pull.request_id} took {took_ns / SECOND:.3f} s on rank {rank}")

    def _stopped_ns(self, pull: Pull) -> int:
        now_ns = self._heap.now_ns
        stops = self._stops.get(pull.decode, ())
        return sum(end_ns - begin_ns for begin_ns, end_ns in stops if begin_ns < now_ns and end_ns > pull.started_ns)

    def ended(self, pull: Pull, failure: Failure | None) -> None:
        """All ranks have reported."""
        now_ns = self._heap.now_ns
        took_ns = now_ns - pull.started_ns
        if failure is None and took_ns <= _SOON_NS:
            return
        prompt = pull.prompt
        if (
            not self._isolates
            or pull.is_aborted
            or pull.is_repeated
            or prompt.lease_ends_ns - pull.started_ns < _SOON_NS
            or self._is_touched(pull, now_ns)
        ):
            return
        what = f"took {took_ns / SECOND:.3f} s" if failure is None else str(failure)
        self.complain("isolation", f"{pull.request_id} from {prompt.engine.name}, which no fault touches: {what}")

    def _is_touched(self, pull: Pull, now_ns: int) -> bool:
        felt = self._touched[pull.decode, pull.prompt.engine.name]
        return any(begin_ns <= now_ns and pull.started_ns <= end_ns for begin_ns, end_ns in felt)

    # --- prefill ----------------------------------------------------------------------------------------------------

    def freed(self, prompt: Prompt, rank: int, *, is_expired: bool) -> None:
        """A rank has freed a lease, for the first time or not."""
        if not prompt.is_granted:
            self.complain("free once", f"rank {rank} freed {prompt.request_id}, which is not lent")
        elif prompt.freed & (1 << rank):
            self.complain("free once", f"rank {rank} freed {prompt.request_id} twice")
        elif is_expired and self._isolates and prompt.pulls:
            self._check_given_back(prompt)

    def _check_given_back(self, prompt: Prompt) -> None:
        """Requests that are served, aborted or not awaited say that they need the blocks no more."""
        latest_ns = self._heap.now_ns - _SOON_NS
        first = prompt.pulls[0]
        for pull in prompt.pulls:
            failed = pull.failure is not None and not isinstance(pull.failure, AbortedByClient)
            if failed or pull.ended_ns > latest_ns:
                return
        if not self._is_touched(first, self._heap.now_ns):
            self.complain("give back", f"{prompt.request_id} ran out; {first.request_id} has ended long before")

    def forget(self) -> None:
        """The run is over, and what it did is counted."""
        self.pulls.clear()
        self.leases.clear()

    # --- the end ----------------------------------------------------------------------------------------------------

    def check_all_ended(self, decode_ranks: int, prefill_ranks: int) -> None:
        """After the liveness phase."""
        reported, freed = (1 << decode_ranks) - 1, (1 << prefill_ranks) - 1
        for pull in self.pulls:
            if pull.awaited and pull.reported != reported and not pull.is_lost:
                self.complain("bound", f"{pull.request_id} was not reported by every rank ({pull.reported:b})")
        for prompt in self.leases:
            if prompt.is_granted and prompt.freed != freed and not prompt.life.is_dead:
                self.complain("free once", f"{prompt.request_id} was not freed by every rank ({prompt.freed:b})")


def _felt(fault: Fault) -> tuple[int, int]:
    """From when to when requests may feel it."""
    aftermath = INCOMPATIBLE_AFTERMATH_SECONDS if fault.kind is Kind.INCOMPATIBLE else AFTERMATH_SECONDS
    return round(fault.at_seconds * SECOND), round((fault.end_seconds + aftermath) * SECOND)
