"""Oracles: what must hold in every run, judged from outside of the product.

They see what a scheduler and a client see (commands, outcomes, memory) and what only the fake world knows (which READs
may still write). They know nothing of the product's state. The cluster tells them what happens; each complaint is a
`Violation` with the moment of virtual time. A lease is one of each rank that lends, and its consumers are the ranks of
the decode engine that deal with that rank.

    report once     an awaited request has exactly one ReceiveEnded on each rank, another one has none
    bytes           a request that all ranks report done holds each rank's part of its own prompt's KV, then and until
                    its blocks are freed
    block reuse     a block that is freed or handed out is named by no READ that may still write
    free once       a lease that was granted ends exactly once, and one that was not never ends
    held            a lease ends before its time only when every consumer of its blocks has let go
    kept alive      where no fault is near, it does not end while a consumer waits
    handed back     where no fault is near, it ends soon after the last consumer has let go
    in time         a lease that nobody keeps alive any more ends at its deadline
    proof           what a request believes about its lease is true, with the margin to spare
    retries         a request is tried again as often as the options say, no more
    agents          an agent is removed only when no READ from it is in flight
    bound           every awaited request ends in time, faults or not
    isolation       a request between engines that no fault touches is done soon
    recovery        with the faults off, every pair of engines works again
    leaks           in the end nothing is in flight, lent, held or quarantined, and every actor has ended
    health          no actor crashes but those that a fault made crash
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import trio

from connector.config import ConnectorOptions
from connector.runtime.supervisor import RENEWAL_FRACTION, RESTART_DELAY_SECONDS_MAX
from statemachine.failures import Failure, LeaseNotProven
from tests.simulation.faults import WORKLOAD_KINDS, Fault, Kind

SCHEDULING_SLACK_SECONDS = 0.5
"""What a request may take beyond its time limits; a crash of its actor comes on top, with the restart's delay."""
SERVED_SOON_SECONDS = 0.5
"""How long an undisturbed request may take: a handshake, its READ, and a queue."""
AFTERMATH_SECONDS = 15.0
"""How long after its end a fault may be felt: back-off, draining, the deadline of what it left hanging."""

HANDED_BACK_SECONDS = 1.0
"""How long the news may take that nobody needs the blocks any more, where nothing holds it up."""
CLOCK_RESOLUTION_SECONDS = 1e-6
"""True time is a float; a millionth of a second is well above what rounding does to it."""


class InjectedCrash(Exception):
    """Raised inside an actor by a fault."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    oracle: str
    detail: str
    at_seconds: float


@dataclass(kw_only=True)
class Pull:
    """One request on a decode engine of `ranks` ranks, as the outside sees it. `failure`: of the first that failed."""

    request_id: str
    decode: str
    prefill: str
    ranks: int
    blocks: list[int]
    awaited: bool
    started_seconds: float
    lease_ends_seconds: float
    owner: str
    remote_request_id: str
    may_fail: bool = False
    """Also where no fault touches it: what the client says is damaged or was used before."""
    is_aborted: bool = False
    has_bad_params: bool = False
    is_lost: bool = False
    """Its decode engine died over it."""
    reports: Counter[int] = field(default_factory=Counter)
    """By rank."""
    failure: Failure | None = None

    @property
    def is_reported(self) -> bool:
        """By all ranks."""
        return len(self.reports) == self.ranks


@dataclass(kw_only=True)
class Lent:
    """One lease of one rank of one life of a prefill engine.

    Attributes:
        ends_seconds: when it was promised to end, in true time.
        decode: the engine that has taken the prompt over; None when nobody has.
        waiting: the consumers there that have not let go of the blocks: requests and ranks.
        let_go_seconds: when the last of them did.
        has_lapsed: a consumer gave up because the lease was over for it; it says nothing to the prefill engine.
    """

    request_id: str
    owner: str
    prefill: str
    tp_rank: int = 0
    is_granted: bool = False
    granted_seconds: float = 0.0
    ends_seconds: float = 0.0
    ends: int = 0
    decode: str | None = None
    waiting: set[tuple[str, int]] = field(default_factory=set)
    let_go_seconds: float = 0.0
    has_lapsed: bool = False


@dataclass
class Oracles:
    """Collects what happens and what is wrong with it."""

    options: ConnectorOptions
    faults: list[Fault]
    isolates: bool
    """Whether undisturbed requests must succeed: not where the number of peers is limited below what is there."""
    violations: list[Violation] = field(default_factory=list)
    pulls: dict[str, Pull] = field(default_factory=dict)
    leases: dict[tuple[str, str], list[Lent]] = field(default_factory=dict)
    """By owner and request, one for each rank of the owner."""
    coverage: Counter[str] = field(default_factory=Counter)
    """What must occur somewhere in the seeds, so that a test can say that it did."""
    _crashes: list[tuple[str, float]] = field(default_factory=list)

    def complain(self, oracle: str, detail: str) -> None:
        self.violations.append(Violation(oracle=oracle, detail=detail, at_seconds=trio.current_time()))

    # --- decode -----------------------------------------------------------------------------------------------------

    def start(self, pull: Pull) -> None:
        self.pulls[pull.request_id] = pull
        if not pull.awaited:
            self.let_go(pull.owner, pull.remote_request_id, pull.request_id)

    def report(self, request_id: str, tp_rank: int, failure: Failure | None) -> None:
        """The connector emitted a ReceiveEnded on this rank."""
        pull = self.pulls.get(request_id)
        if pull is None or not pull.awaited:
            self.complain("report once", f"{request_id} was reported, and nobody waits for it")
            return
        pull.reports[tp_rank] += 1
        if pull.reports[tp_rank] > 1:
            self.complain("report once", f"rank {tp_rank} reported {request_id} {pull.reports[tp_rank]} times")
            return
        if pull.ranks > 1 and pull.is_reported and (pull.failure is None) != (failure is None):
            self.coverage["a rank failed alone"] += 1
        if pull.failure is None:
            pull.failure = failure
        if pull.has_bad_params and failure is None:
            self.complain("bytes", f"{request_id} is done although its parameters name no blocks of its prompt")
        has_lapsed = failure is not None and failure.kind == LeaseNotProven.__name__
        self.let_go(pull.owner, pull.remote_request_id, request_id, tp_rank, has_lapsed=has_lapsed)
        self._check_cause(f"request {request_id}", failure)
        self._check_isolation(pull, failure)
        self._check_bound(pull)

    def forget_pulls(self, decode: str) -> None:
        """A decode engine has died."""
        for pull in self.pulls.values():
            if pull.decode == decode and not pull.is_reported:
                pull.is_lost = True
        for lents in self.leases.values():
            for lent in lents:
                if lent.decode == decode:
                    lent.waiting.clear()

    def check_bytes(self, pull: Pull, tp_rank: int, wrong: list[int], when: str) -> None:
        """`wrong`: blocks that do not hold this rank's part of the prompt's KV."""
        if wrong:
            where = f"rank {tp_rank} of {pull.decode}"
            self.complain("bytes", f"{pull.request_id} {when}: blocks {wrong} of {where} hold something else")

    def check_proof(self, request_id: str, proven_until_seconds: float) -> None:
        """A request believes in its lease until then, in true time."""
        pull = self.pulls[request_id]
        latest = pull.lease_ends_seconds - self.options.lease_margin_seconds
        if proven_until_seconds > latest + CLOCK_RESOLUTION_SECONDS:
            late_ms = (proven_until_seconds - latest) * 1e3
            self.complain("proof", f"{request_id} believes in its lease {late_ms:.3f} ms longer than it may")

    def check_attempts(self, attempts: int, request_id: str) -> None:
        if attempts > self.options.transfer_retries + 1:
            self.complain("retries", f"{request_id} was tried {attempts} times")

    def check_unwritten(self, engine: str, blocks: Iterable[int], written: set[int], action: str) -> None:
        """`written`: blocks of the engine that READs may still write into."""
        bad = written.intersection(blocks)
        if bad:
            self.complain("block reuse", f"{engine} {action} blocks {sorted(bad)} while a READ may write into them")

    def _check_bound(self, pull: Pull) -> None:
        took_seconds = trio.current_time() - pull.started_seconds
        earliest = pull.started_seconds - RESTART_DELAY_SECONDS_MAX
        crashes = sum(name == pull.decode and at >= earliest for name, at in self._crashes)
        limit = self.options.request_timeout_seconds + self.options.quiesce_timeout_seconds
        limit += SCHEDULING_SLACK_SECONDS + crashes * RESTART_DELAY_SECONDS_MAX
        if took_seconds > limit:
            self.complain("bound", f"{pull.request_id} took {took_seconds:.3f} s, limit {limit:g} s")

    def _check_isolation(self, pull: Pull, failure: Failure | None) -> None:
        now = trio.current_time()
        touched = self._is_touched(pull.decode, pull.prefill, pull.started_seconds, now)
        if not self.isolates or pull.is_aborted or pull.may_fail or touched:
            return
        took_seconds = now - pull.started_seconds
        if pull.lease_ends_seconds - pull.started_seconds < SERVED_SOON_SECONDS:
            return
        if failure is not None:
            self.complain(
                "isolation",
                f"{pull.request_id} of {pull.decode} from {pull.prefill}, which no fault touches: {failure}",
            )
        elif took_seconds > SERVED_SOON_SECONDS:
            self.complain(
                "isolation",
                f"{pull.request_id} of {pull.decode} from {pull.prefill}, which no fault touches, took "
                f"{took_seconds:.3f} s",
            )

    def _is_touched(self, decode: str, prefill: str, since: float, until: float, but_for: Kind | None = None) -> bool:
        """Whether a fault may be felt between these two engines at that time."""
        return any(
            fault.kind not in WORKLOAD_KINDS
            and fault.kind is not but_for
            and fault.touches(decode, prefill)
            and fault.at_seconds <= until
            and since <= fault.end_seconds + AFTERMATH_SECONDS
            for fault in self.faults
        )

    # --- prefill ----------------------------------------------------------------------------------------------------

    def lend(self, lents: list[Lent]) -> None:
        """`lents`: of all ranks of an engine, in their order."""
        self.leases[lents[0].owner, lents[0].request_id] = lents

    def take_over(self, owner: str, request_id: str, decode: str, consumer: str, ranks: int) -> None:
        """`consumer` on the ranks of `decode` is going to read the blocks."""
        for lent, readers in self._readers(owner, request_id, ranks):
            if lent.ends == 0:
                lent.decode = decode
                lent.waiting.update((consumer, reader) for reader in readers)

    def let_go(
        self, owner: str, request_id: str, consumer: str, tp_rank: int | None = None, *, has_lapsed: bool = False
    ) -> None:
        """`consumer` needs the blocks no more; on this rank, or (None) on none."""
        for lent in self.leases.get((owner, request_id), ()):
            gone = {each for each in lent.waiting if each[0] == consumer and tp_rank in (None, each[1])}
            if gone:
                lent.waiting -= gone
                lent.let_go_seconds = trio.current_time()
                lent.has_lapsed |= has_lapsed

    def _readers(self, owner: str, request_id: str, ranks: int) -> list[tuple[Lent, list[int]]]:
        """The ranks out of `ranks` that have to let go of each rank's blocks: those whose part of the model overlaps
        with its own."""
        lents = self.leases.get((owner, request_id), [])
        return [
            (lent, [reader for reader in range(ranks) if _overlap(lent.tp_rank, len(lents), reader, ranks)])
            for lent in lents
        ]

    def free(self, owner: str, request_id: str, tp_rank: int) -> bool:
        """The connector emitted a SendEnded on this rank; returns whether it was due."""
        lents = self.leases.get((owner, request_id))
        if lents is None or not lents[tp_rank].is_granted:
            self.complain("free once", f"rank {tp_rank} of {owner} freed {request_id}, which it does not lend")
            return False
        lent = lents[tp_rank]
        lent.ends += 1
        if lent.ends > 1:
            self.complain("free once", f"rank {tp_rank} of {owner} freed {request_id} {lent.ends} times")
            return False
        self._check_moment(lent)
        return True

    def _check_moment(self, lent: Lent) -> None:
        """A lease ends now: not too early, and not too late."""
        now = trio.current_time()
        wanted = lent.decode is None or bool(lent.waiting)
        if now < lent.ends_seconds:
            # A consumer that waits in the queue is not known to the actors where the table of peers is full.
            if wanted and self.isolates:
                who = sorted(lent.waiting) or "a decode engine that is to come"
                self.complain("held", f"{lent.owner} freed {lent.request_id} early, and {who} wants it")
            return
        if lent.decode is None or not self.isolates:
            return
        if not wanted:
            self._check_deadline(lent)
        if self._is_touched(lent.decode, lent.prefill, lent.granted_seconds, now):
            return
        if wanted:
            self.complain("kept alive", f"{lent.owner} freed {lent.request_id}, and {sorted(lent.waiting)} wait for it")
        elif not lent.has_lapsed and now - lent.let_go_seconds > HANDED_BACK_SECONDS:
            late_seconds = now - lent.let_go_seconds
            self.complain(
                "handed back", f"{lent.owner} freed {lent.request_id} {late_seconds:.3f} s after its last use"
            )

    def _check_deadline(self, lent: Lent) -> None:
        """A lease that everybody has let go of ends now, and nobody but the clock has ended it."""
        now = trio.current_time()
        renewed_until = lent.let_go_seconds + RENEWAL_FRACTION * self.options.kv_lease_duration
        late_seconds = now - max(lent.ends_seconds, renewed_until)
        assert lent.decode is not None
        if late_seconds > HANDED_BACK_SECONDS and not self._is_touched(
            lent.decode, lent.prefill, lent.granted_seconds, now, but_for=Kind.NOTIFICATION_LOSS
        ):
            self.complain("in time", f"{lent.owner} freed {lent.request_id} {late_seconds:.3f} s after its deadline")

    def forget_leases(self, owner: str) -> None:
        """A prefill engine has died."""
        for key in [key for key in self.leases if key[0] == owner]:
            del self.leases[key]

    # --- health -----------------------------------------------------------------------------------------------------

    def crash(self, engine: str, actor: str, error: BaseException) -> None:
        self._crashes.append((engine, trio.current_time()))
        if not _is_injected(error):
            self.complain("health", f"{actor} of {engine} crashed: {error!r}")

    def note_failure(self, engine: str, subject: str, failure: Failure) -> None:
        self._check_cause(f"{engine}, {subject}", failure)

    def _check_cause(self, subject: str, failure: Failure | None) -> None:
        if failure is None or InjectedCrash.__name__ in str(failure):
            return
        if failure.kind == "ActorCrashed" or "internal error" in str(failure):
            self.complain("health", f"{subject}: {failure}")

    # --- the end ----------------------------------------------------------------------------------------------------

    def check_all_reported(self, decode: str | None = None) -> None:
        """Nobody waits any more: after the liveness phase on any engine, after the end of a process on that one."""
        for pull in self.pulls.values():
            if pull.awaited and not pull.is_reported and not pull.is_lost and decode in (None, pull.decode):
                self.complain("bound", f"{pull.request_id} of {pull.decode} from {pull.prefill} was never reported")

    def check_all_ended(self) -> None:
        """After the liveness phase."""
        self.check_all_reported()
        for lent in (lent for lents in self.leases.values() for lent in lents):
            if lent.is_granted and lent.ends == 0:
                self.complain("free once", f"rank {lent.tp_rank} of {lent.owner} never freed {lent.request_id}")


def _overlap(rank: int, ranks: int, other: int, others: int) -> bool:
    """Whether two ranks stand for stretches of the model that overlap."""
    return rank * others < (other + 1) * ranks and other * ranks < (rank + 1) * others


def _is_injected(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_injected(each) for each in error.exceptions)
    return isinstance(error, InjectedCrash)
