"""Oracles: what must hold in every run, judged from outside of the product.

They see what a scheduler and a client see (commands, outcomes, memory) and what only the fake world knows (which READs
may still write, when a READ was over, what arrived at a control socket). They know nothing of the product's state. The
cluster tells them what happens; each complaint is a `Violation` with the moment of virtual time. A lease is one of each
rank that lends. Its consumers are requests, on those ranks of a decode engine that deal with that rank; its holders are
the engines that have asked for it, and it has been read when each of them has released it on all these ranks.

    report once     an awaited request has exactly one ReceiveEnded on each rank, another one has none
    bytes           a request that all ranks report done holds each rank's part of its own prompt's KV, then and until
                    its blocks are freed
    block reuse     a block that is freed or handed out is named by no READ that may still write
    free once       a lease that was granted ends exactly once, and one that was not never ends
    held            a lease ends as read only when every holder has released it, and as expired only at its deadline,
                    which a hold moves; where no fault is near, an engine with a consumer is a holder soon
    kept alive      where no fault is near, it does not expire while a consumer waits, but for the bound of its renewals
    handed back     where no fault is near, it ends soon after the last consumer has let go; where none but lost or late
                    messages are, soon after these
    in time         a lease that nobody keeps alive any more ends at its deadline
    proof           when a request is reported done, no rank of P had ended its lease before the last READ was over
    params          a request that names sizes which are not those of P ends as BadParams
    verify          a request ends as Corrupt only where READs lie, or its lease was over
    quarantine      while as many blocks are in quarantine as the options allow, a request that is to be read ends at
                    once as QuarantineFull, and otherwise none does
    retries         a request is tried again as often as the options say, no more
    agents          an agent is removed only when no READ from it is in flight
    bound           every awaited request ends in time, faults or not
    met             a prefill engine that a decode engine is to meet is connected within a bound after both are there
                    and no fault is between them, request or not; why it is not is said once until it has been
    isolation       a request between engines that no fault touches is done soon
    recovery        with the faults off, every pair of engines works again
    leaks           in the end nothing is in flight, lent, held or quarantined, and every actor has ended
    health          no actor crashes but those that a fault made crash
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import trio

from connector.clock import NS_PER_SECOND, to_ns
from connector.config import ConnectorOptions
from connector.runtime.restarts import RESTART_DELAY_SECONDS_MAX
from connector.wire import control
from statemachine.failures import (
    BadParams,
    BlocksConsumed,
    ConnectorStopped,
    Corrupt,
    Failure,
    LeaseOver,
    QuarantineFull,
)
from statemachine.lease import LeaseName
from tests.simulation.faults import HARMLESS_KINDS, KEEPER_KINDS, LOSSY_KINDS, Fault, Kind
from tests.simulation.shapes import HEARD_SECONDS_MAX
from tests.simulation.verdict import Violation

SCHEDULING_SLACK_SECONDS = 0.5
"""What a request may take beyond its time limits; a crash of its actor comes on top, with the restart's delay."""
SERVED_SOON_SECONDS = 0.5
"""How long an undisturbed request may take: a handshake, its READ, and a queue."""
AFTERMATH_SECONDS = 15.0
"""How long after its end a fault may be felt: back-off, draining, the deadline of what it left hanging."""

HANDED_BACK_SECONDS = 1.0
"""How long the news may take that nobody needs the blocks any more, where nothing holds it up."""
SAID_AGAIN_SECONDS = 6.0
"""The same after messages were lost: a connection is rebuilt, and the news are said again."""
HELD_SOON_SECONDS = 0.001
"""How long after its first consumer was announced an engine that has met P may take to hold a lease."""
CLOCK_PACE_MIN = 1 - 0.084
"""How slow a clock may run: what takes a second by it takes a little more."""

BUILTIN_READERS = "tp2"
"""Stands for decode engines with the built-in connector, which hold nothing."""


class InjectedCrash(Exception):
    """Raised inside an actor by a fault."""


@dataclass(kw_only=True)
class Pull:
    """One request on a decode engine of `ranks` ranks, as the outside sees it. `failure`: of the first that failed.

    `announced_seconds`: since when the connector knows of it. `read_until_seconds`: by rank, when its last READ so far
    was over.
    """

    request_id: str
    decode: str
    prefill: str
    ranks: int
    blocks: list[int]
    awaited: bool
    announced_seconds: float
    started_seconds: float
    owner: str
    remote_request_id: str
    may_fail: bool = False
    """Also where no fault touches it: what the client says is damaged or was used before."""
    is_aborted: bool = False
    has_bad_params: bool = False
    has_wrong_sizes: bool = False
    is_lost: bool = False
    """Its decode engine died over it."""
    reports: Counter[int] = field(default_factory=Counter)
    """By rank."""
    read_until_seconds: dict[int, float] = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def is_reported(self) -> bool:
        """By all ranks."""
        return len(self.reports) == self.ranks


@dataclass(kw_only=True)
class Holder:
    """A decode engine that has held or released a lease: how many of its ranks must release, and which have."""

    ranks: int
    released: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return len(self.released) >= self.ranks


@dataclass
class Quarantined:
    """Blocks of one rank that are in quarantine, as it has said. `full`: from when to when they were too many; the last
    time may go on."""

    limit_blocks: int
    blocks: int = 0
    full: list[tuple[float, float]] = field(default_factory=list)

    def change(self, blocks: int) -> None:
        was_full = self.blocks >= self.limit_blocks
        self.blocks += blocks
        now = trio.current_time()
        if self.blocks >= self.limit_blocks and not was_full:
            self.full.append((now, inf))
        elif was_full and self.blocks < self.limit_blocks:
            self.full[-1] = (self.full[-1][0], now)

    def is_full_throughout(self, since: float, until: float) -> bool:
        return any(begin < since and until < end for begin, end in self.full)

    def is_ever_full(self, since: float, until: float) -> bool:
        return any(begin <= until and since <= end for begin, end in self.full)


class Consumer(NamedTuple):
    """A request on one rank of a decode engine."""

    request_id: str
    rank: int


@dataclass(kw_only=True)
class Lent:
    """One lease of one rank of one life of a prefill engine. Times in nanoseconds are of the clock of that rank.

    Attributes:
        granted_seconds: when its engine decided to lend.
        deadline_ns: until when its holders and the grant keep it.
        latest_ns: no hold keeps it longer.
        overtaken_ns: a hold that came as the engine had decided, and this rank may not have heard of it yet, may have
            been promised so much.
        freed_seconds: when it ended, or its process did.
        holders: by engine id, as far as messages have arrived.
        promised: by their names those that have asked to hold it and have not released it since.
        left: those that have released it. They will not hold it again: a hold that says so is late.
        waiting: the consumers that have not let go of the blocks: their engine, and since when they were announced.
        consumed: the ranks of decode engines on which all consumers have let go: what comes after that is not held.
        decodes: the engines that have taken the prompt over.
        let_go_seconds: when the last consumer let go.
        is_reused: a router has repeated itself, perhaps in time to hold it anew.
    """

    request_id: str
    number: int
    owner: str
    prefill: str
    tp_rank: int = 0
    is_granted: bool = False
    granted_seconds: float = 0.0
    deadline_ns: int = 0
    latest_ns: int | None = None
    overtaken_ns: int = 0
    ends: int = 0
    freed_seconds: float = inf
    holders: dict[str, Holder] = field(default_factory=dict)
    promised: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    waiting: dict[Consumer, tuple[str, float]] = field(default_factory=dict)
    consumed: set[tuple[str, int]] = field(default_factory=set)
    decodes: set[str] = field(default_factory=set)
    let_go_seconds: float = 0.0
    is_reused: bool = False

    @property
    def is_at_its_bound(self) -> bool:
        return self.latest_ns is not None and self.deadline_ns >= self.latest_ns


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
    _quarantined: dict[tuple[str, int], Quarantined] = field(default_factory=dict)
    """By decode engine and rank."""
    _crashes: list[tuple[str, float]] = field(default_factory=list)
    _pull_of_block: dict[tuple[str, int], Pull] = field(default_factory=dict)
    """By engine and block, the last one that reads into it."""
    _acquainted: dict[tuple[str, int, str], float] = field(default_factory=dict)
    """Decode engine, rank of it and owner of leases, once a request between them was done there; until the decode
    engine dies."""
    _too_late: set[tuple[str, str, str]] = field(default_factory=set)
    """Decode engine, owner and id of the leases that were over before it could hold them."""

    def complain(self, oracle: str, detail: str) -> None:
        self.violations.append(Violation(oracle=oracle, detail=detail, at_seconds=trio.current_time()))

    # --- decode -----------------------------------------------------------------------------------------------------

    def start(self, pull: Pull) -> None:
        self.pulls[pull.request_id] = pull
        if not pull.awaited:
            self.let_go(pull.owner, pull.remote_request_id, pull.request_id)
            return
        for block in pull.blocks:
            self._pull_of_block[pull.decode, block] = pull

    def note_read_end(self, decode: str, tp_rank: int, block: int) -> None:
        """All bytes of a READ are here; `block` is one of those it was for."""
        pull = self._pull_of_block.get((decode, block))
        if pull is not None:
            pull.read_until_seconds[tp_rank] = trio.current_time()

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
        if failure is None:
            self._check_proof(pull, tp_rank)
            self._acquainted.setdefault((pull.decode, tp_rank, pull.owner), trio.current_time())
        self._check_params(pull, failure)
        self._check_corrupt(pull, failure)
        self._check_quarantine(pull, tp_rank, failure)
        self.let_go(pull.owner, pull.remote_request_id, request_id, tp_rank)
        self._check_cause(f"request {request_id}", failure)
        self._check_isolation(pull, failure)
        self._check_bound(pull)

    def keep_aside(self, decode: str, tp_rank: int, blocks: int, limit_blocks: int) -> None:
        """A rank has said that so many blocks more may still be written into (less than none: so many fewer), of which
        so many are allowed."""
        self._quarantined.setdefault((decode, tp_rank), Quarantined(limit_blocks)).change(blocks)

    def _check_quarantine(self, pull: Pull, tp_rank: int, failure: Failure | None) -> None:
        kept, now = self._quarantined.get((pull.decode, tp_rank)), trio.current_time()
        heard_until = pull.started_seconds + HEARD_SECONDS_MAX
        if isinstance(failure, QuarantineFull):
            self.coverage["refused by a full quarantine"] += 1
            if kept is None or not kept.is_ever_full(pull.started_seconds, now):
                self.complain("quarantine", f"{pull.request_id} was refused, and there is room: {failure}")
            elif now > heard_until:
                self.complain("quarantine", f"{pull.request_id} was refused {now - heard_until:.3f} s late")
            return
        is_excused = pull.has_bad_params or isinstance(failure, ConnectorStopped)
        if kept is not None and kept.is_full_throughout(pull.started_seconds, heard_until) and not is_excused:
            self.complain(
                "quarantine", f"{pull.request_id} began when the quarantine was full, and ended with {failure}"
            )

    def forget_pulls(self, decode: str) -> None:
        """A decode engine has died."""
        self._quarantined = {whose: kept for whose, kept in self._quarantined.items() if whose[0] != decode}
        for pull in self.pulls.values():
            if pull.decode == decode and not pull.is_reported:
                pull.is_lost = True
        for lents in self.leases.values():
            for lent in lents:
                for consumer in [each for each, (engine, _) in lent.waiting.items() if engine == decode]:
                    del lent.waiting[consumer]
                lent.consumed = {whose for whose in lent.consumed if whose[0] != decode}
        self.forget_acquaintances(decode)

    def forget_acquaintances(self, decode: str) -> None:
        """It has to meet everybody anew."""
        self._acquainted = {who: since for who, since in self._acquainted.items() if who[0] != decode}

    def check_bytes(self, pull: Pull, tp_rank: int, wrong: list[int], when: str) -> None:
        """`wrong`: blocks that do not hold this rank's part of the prompt's KV."""
        if wrong:
            where = f"rank {tp_rank} of {pull.decode}"
            self.complain("bytes", f"{pull.request_id} {when}: blocks {wrong} of {where} hold something else")

    def _check_proof(self, pull: Pull, tp_rank: int) -> None:
        """One rank has reported it as done."""
        read_until = pull.read_until_seconds.get(tp_rank)
        if read_until is None:
            return  # a rank that reads nothing
        for lent, readers in self._readers(pull.owner, pull.remote_request_id, pull.ranks):
            if tp_rank in readers and lent.freed_seconds < read_until:
                late_ms = (read_until - lent.freed_seconds) * 1e3
                whose = f"rank {lent.tp_rank} of {lent.owner}"
                self.complain(
                    "proof",
                    f"{pull.request_id} is done on rank {tp_rank}, and its last READ was over {late_ms:.3f} ms after "
                    f"{whose} had ended the lease",
                )

    def _check_params(self, pull: Pull, failure: Failure | None) -> None:
        if not (pull.has_wrong_sizes and self.isolates) or isinstance(failure, BadParams) or pull.is_aborted:
            return
        if not self._is_touched([pull.decode], pull.prefill, pull.announced_seconds, trio.current_time()):
            self.complain("params", f"{pull.request_id} named wrong sizes, and ended with {failure}")

    def _check_corrupt(self, pull: Pull, failure: Failure | None) -> None:
        if not isinstance(failure, Corrupt):
            return
        lies = any(
            fault.kind is Kind.READ_LIES
            and fault.at_seconds <= trio.current_time()
            and pull.started_seconds <= fault.end_seconds
            and fault.touches(pull.decode, pull.prefill)
            for fault in self.faults
        )
        lents = self.leases.get((pull.owner, pull.remote_request_id), ())
        if not lies and all(lent.freed_seconds == inf for lent in lents):
            self.complain("verify", f"{pull.request_id} is corrupt, and no READ from {pull.prefill} lies: {failure}")

    def is_disturbed(self, decode: str, prefill: str) -> bool:
        """Whether a fault is between these two now."""
        now = trio.current_time()
        return any(
            fault.kind not in HARMLESS_KINDS
            and fault.at_seconds <= now <= fault.end_seconds
            and fault.touches(decode, prefill)
            for fault in self.faults
        )

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
        limit /= CLOCK_PACE_MIN
        limit += SCHEDULING_SLACK_SECONDS + crashes * RESTART_DELAY_SECONDS_MAX
        if took_seconds > limit:
            self.complain("bound", f"{pull.request_id} took {took_seconds:.3f} s, limit {limit:g} s")

    def _check_isolation(self, pull: Pull, failure: Failure | None) -> None:
        now = trio.current_time()
        touched = self._is_touched([pull.decode], pull.prefill, pull.announced_seconds, now)
        if not self.isolates or pull.is_aborted or pull.may_fail or touched:
            return
        took_seconds = now - pull.started_seconds
        if failure is not None and not self._came_too_late(pull, failure):
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

    def _came_too_late(self, pull: Pull, failure: Failure) -> bool:
        """Whether its engine had no time to hold the lease before others had released it, or it was at its bound; or
        has let go of it because of that."""
        key = pull.decode, pull.owner, pull.remote_request_id
        if isinstance(failure, LeaseOver) and self._is_over_early(pull):
            self._too_late.add(key)
            return True
        return isinstance(failure, BlocksConsumed) and key in self._too_late

    def _is_over_early(self, pull: Pull) -> bool:
        heard = pull.announced_seconds
        soon = max(self._hold_seconds(pull.decode, rank, pull.owner, heard) for rank in range(pull.ranks))
        return any(
            lent.is_at_its_bound or lent.freed_seconds < pull.announced_seconds + soon
            for lent in self.leases.get((pull.owner, pull.remote_request_id), ())
        )

    def _hold_seconds(self, decode: str, tp_rank: int, owner: str, heard_seconds: float) -> float:
        """How soon a rank of a decode engine holds a lease of whose consumer it hears now."""
        is_acquainted = self._acquainted.get((decode, tp_rank, owner), inf) <= heard_seconds
        return HELD_SOON_SECONDS if is_acquainted else SERVED_SOON_SECONDS

    def _is_touched(
        self,
        decodes: Iterable[str],
        prefill: str,
        since: float,
        until: float,
        harmless: frozenset[Kind] = HARMLESS_KINDS,
    ) -> bool:
        """Whether a fault may be felt between one of these engines and that one at that time."""
        return any(
            fault.kind not in harmless
            and fault.at_seconds <= until
            and since <= fault.end_seconds + AFTERMATH_SECONDS
            and any(fault.touches(decode, prefill) for decode in decodes)
            for fault in self.faults
        )

    # --- prefill ----------------------------------------------------------------------------------------------------

    def lend(self, lents: list[Lent]) -> None:
        """`lents`: of all ranks of an engine, in their order."""
        self.leases[lents[0].owner, lents[0].request_id] = lents

    def grant(self, owner: str, request_id: str, now_ns: Sequence[int], fixed_seconds: float | None = None) -> None:
        """The engine has decided to lend, for so long and no longer; None: as the options say. `now_ns`: of the clock
        of each rank."""
        lease_ns, total_ns = to_ns(self.options.kv_lease_duration), to_ns(self.options.lease_limit_seconds)
        if fixed_seconds is not None:
            lease_ns = total_ns = to_ns(fixed_seconds)
        for lent, at_ns in zip(self.leases[owner, request_id], now_ns, strict=True):
            lent.is_granted, lent.granted_seconds = True, trio.current_time()
            lent.deadline_ns = max(lent.deadline_ns, at_ns + lease_ns)
            lent.latest_ns = max(lent.deadline_ns, at_ns + total_ns)

    def lent(self, owner: str, name: LeaseName, tp_rank: int) -> Lent | None:
        """The lease of one rank that a message names, unless it is over."""
        lents = self.leases.get((owner, name.request_id))
        if lents is None or lents[tp_rank].ends or name.number not in (0, lents[tp_rank].number):
            return None
        return lents[tp_rank]

    def hold(self, lent: Lent, asked: control.Hold, now_ns: int, leaves_ns: int | None = None) -> None:
        """A message has arrived that asks for it; a rank that has released it and has met P anew wants it again.
        `leaves_ns`: when the grace period is over of an engine that is to end."""
        if asked.incarnation in lent.left:
            return
        holder = lent.holders.setdefault(asked.engine_id, Holder(ranks=asked.ranks))
        holder.ranks = max(holder.ranks, asked.ranks)
        holder.released.discard(asked.rank)
        lent.promised.add(asked.incarnation)
        deadline_ns = now_ns + to_ns(self.options.kv_lease_duration)
        if leaves_ns is not None:
            deadline_ns = min(deadline_ns, leaves_ns)
        if lent.latest_ns is not None:
            if trio.current_time() <= lent.granted_seconds + HEARD_SECONDS_MAX:
                lent.overtaken_ns = max(lent.overtaken_ns, deadline_ns)
            deadline_ns = min(deadline_ns, lent.latest_ns)
        lent.deadline_ns = max(lent.deadline_ns, deadline_ns)

    def release(self, lent: Lent, asked: control.Release) -> None:
        """A message has arrived that it is needed no more."""
        holder = lent.holders.setdefault(asked.engine_id, Holder(ranks=asked.ranks))
        holder.ranks = max(holder.ranks, asked.ranks)
        holder.released.add(asked.rank)
        lent.promised.discard(asked.incarnation)
        lent.left.add(asked.incarnation)

    def take_over(self, owner: str, request_id: str, decode: str, consumer: str, ranks: int) -> None:
        """`consumer` on the ranks of `decode` is going to read the blocks."""
        now = trio.current_time()
        for lent, readers in self._readers(owner, request_id, ranks):
            if lent.ends == 0:
                lent.decodes.add(decode)
                holding = [reader for reader in readers if (decode, reader) not in lent.consumed]
                lent.waiting.update({Consumer(consumer, reader): (decode, now) for reader in holding})

    def reuse(self, owner: str, request_id: str) -> None:
        """A router repeats itself: who reads once more may be too late, or may keep the blocks for longer."""
        for lent in self.leases.get((owner, request_id), ()):
            lent.is_reused = True

    def let_go(self, owner: str, request_id: str, consumer: str, tp_rank: int | None = None) -> None:
        """`consumer` needs the blocks no more; on this rank, or (None) on none."""
        for lent in self.leases.get((owner, request_id), ()):
            gone = [each for each in lent.waiting if each.request_id == consumer and tp_rank in (None, each.rank)]
            for each in gone:
                decode, _ = lent.waiting.pop(each)
                lent.let_go_seconds = trio.current_time()
                others = {(engine, other.rank) for other, (engine, _) in lent.waiting.items()}
                lent.consumed |= {(decode, each.rank)} - others

    def _readers(self, owner: str, request_id: str, ranks: int) -> list[tuple[Lent, list[int]]]:
        """The ranks out of `ranks` that have to let go of each rank's blocks: those whose part of the model overlaps
        with its own."""
        lents = self.leases.get((owner, request_id), [])
        return [
            (lent, [reader for reader in range(ranks) if _overlap(lent.tp_rank, len(lents), reader, ranks)])
            for lent in lents
        ]

    def free(self, owner: str, request_id: str, tp_rank: int, now_ns: int, *, expired: bool) -> bool:
        """The connector emitted a SendEnded on this rank, whose clock shows `now_ns`; returns whether it was due."""
        lents = self.leases.get((owner, request_id))
        if lents is None or not lents[tp_rank].is_granted:
            self.complain("free once", f"rank {tp_rank} of {owner} freed {request_id}, which it does not lend")
            return False
        lent = lents[tp_rank]
        lent.ends += 1
        if lent.ends > 1:
            self.complain("free once", f"rank {tp_rank} of {owner} freed {request_id} {lent.ends} times")
            return False
        lent.freed_seconds = trio.current_time()
        if expired:
            self._check_expiry(lent, now_ns)
        else:
            self._check_reading(lent)
        self._check_in_time(lent, now_ns)
        self._check_handed_back(lent)
        return True

    def _check_expiry(self, lent: Lent, now_ns: int) -> None:
        """It ends because its time is over."""
        whose = f"rank {lent.tp_rank} of {lent.owner}"
        # A crash may have held up the messages that would have kept it.
        if now_ns < lent.deadline_ns and not self._keeper_crashed(lent):
            early_ms = (lent.deadline_ns - now_ns) / 1e6
            self.complain("held", f"{whose} let {lent.request_id} expire {early_ms:.3f} ms before its deadline")
        if lent.waiting and self.isolates and not lent.is_at_its_bound and not self._is_near_a_fault(lent):
            waiting = sorted(each.request_id for each in lent.waiting)
            self.complain("kept alive", f"{whose} let {lent.request_id} expire, and {waiting} wait for it")

    def _check_reading(self, lent: Lent) -> None:
        """It ends because everybody has read it."""
        whose = f"rank {lent.tp_rank} of {lent.owner}"
        readers = [each for each, (decode, _) in lent.waiting.items() if decode == BUILTIN_READERS]
        open_holders = [engine_id for engine_id, holder in lent.holders.items() if not holder.is_complete]
        open_holders += sorted(lent.promised)
        if self._keeper_crashed(lent):
            open_holders = []  # what they asked may have been lost in the crash; they are told that they came too late
        if readers or open_holders or not (lent.holders or BUILTIN_READERS in lent.decodes):
            who = open_holders or readers or "nobody has read it"
            self.complain("held", f"{whose} freed {lent.request_id} as read: {who}")
            return
        self.coverage["a lease read by several engines"] += len(lent.holders) > 1
        if not self.isolates or self._is_near_a_fault(lent):
            return
        for consumer, (decode, announced_seconds) in lent.waiting.items():
            waited_seconds = lent.freed_seconds - announced_seconds
            if waited_seconds > self._hold_seconds(decode, consumer.rank, lent.owner, announced_seconds):
                self.complain(
                    "held",
                    f"{whose} freed {lent.request_id}, and {consumer.request_id} has waited for it for "
                    f"{waited_seconds:.3f} s",
                )

    def _check_in_time(self, lent: Lent, now_ns: int) -> None:
        late_seconds = (now_ns - max(lent.deadline_ns, lent.overtaken_ns)) / NS_PER_SECOND
        if late_seconds > HANDED_BACK_SECONDS and not self._keeper_crashed(lent):
            whose = f"rank {lent.tp_rank} of {lent.owner}"
            self.complain("in time", f"{whose} freed {lent.request_id} {late_seconds:.3f} s after its deadline")

    def _check_handed_back(self, lent: Lent) -> None:
        if not lent.decodes or lent.waiting or lent.is_reused or not self.isolates:
            return
        lossy = [
            fault.end_seconds
            for fault in self.faults
            if fault.kind in LOSSY_KINDS and any(fault.touches(decode, lent.prefill) for decode in lent.decodes)
        ]
        if any(lent.granted_seconds <= end + AFTERMATH_SECONDS for end in lossy):
            late_seconds = lent.freed_seconds - max(lent.let_go_seconds, *lossy)
            limit_seconds = SAID_AGAIN_SECONDS
        else:
            late_seconds = lent.freed_seconds - lent.let_go_seconds
            limit_seconds = HANDED_BACK_SECONDS
        others = HARMLESS_KINDS | LOSSY_KINDS
        if late_seconds > limit_seconds and not self._is_near_a_fault(lent, others):
            whose = f"rank {lent.tp_rank} of {lent.owner}"
            self.complain("handed back", f"{whose} freed {lent.request_id} {late_seconds:.3f} s after its last use")

    def _is_near_a_fault(self, lent: Lent, harmless: frozenset[Kind] = HARMLESS_KINDS) -> bool:
        return self._is_touched(lent.decodes, lent.prefill, lent.granted_seconds, lent.freed_seconds, harmless)

    def _keeper_crashed(self, lent: Lent) -> bool:
        """Whether its lease keeper, which starts again after a while, may have been away when it mattered."""
        since = lent.granted_seconds
        return any(
            fault.kind in KEEPER_KINDS
            and fault.touches(lent.prefill, lent.prefill)
            and since <= fault.end_seconds + AFTERMATH_SECONDS
            for fault in self.faults
        )

    def forget_leases(self, owner: str) -> None:
        """A prefill engine has died, and with it whatever it lent."""
        for (whose, _), lents in self.leases.items():
            if whose == owner:
                for lent in lents:
                    lent.is_granted = False
                    lent.freed_seconds = min(lent.freed_seconds, trio.current_time())

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
        """Nobody waits any more: after the liveness phase on any engine, after the end of a process on that one. Of
        what has begun just now not every rank has heard."""
        begun_until = trio.current_time() - HEARD_SECONDS_MAX
        for pull in self.pulls.values():
            is_due = pull.awaited and not pull.is_lost and pull.started_seconds <= begun_until
            if is_due and not pull.is_reported and decode in (None, pull.decode):
                self.complain("bound", f"{pull.request_id} of {pull.decode} from {pull.prefill} was never reported")

    def check_all_ended(self) -> None:
        """After the liveness phase."""
        self.check_all_reported()
        for lent in (lent for lents in self.leases.values() for lent in lents):
            if lent.is_granted and lent.ends == 0:
                self.complain("free once", f"rank {lent.tp_rank} of {lent.owner} never freed {lent.request_id}")

    def outcomes(self) -> Counter[str]:
        """How the requests ended, as far as they are remembered."""
        return Counter(
            "not awaited"
            if not pull.awaited
            else "lost"
            if pull.is_lost
            else "done"
            if pull.failure is None
            else pull.failure.kind
            for pull in self.pulls.values()
        )

    def forget_the_past(self, owners: Container[str]) -> None:
        """When everything has ended, in a run that goes on: nothing of it can be judged any more. `owners`: those who
        lend and live."""
        self.pulls.clear()
        self.leases.clear()
        self._crashes.clear()
        self._pull_of_block.clear()
        self._acquainted = {who: since for who, since in self._acquainted.items() if who[2] in owners}


def _overlap(rank: int, ranks: int, other: int, others: int) -> bool:
    """Whether two ranks stand for stretches of the model that overlap."""
    return rank * others < (other + 1) * ranks and other * ranks < (rank + 1) * others


def _is_injected(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_injected(each) for each in error.exceptions)
    return isinstance(error, InjectedCrash)
