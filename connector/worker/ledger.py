"""What vLLM waits for, and what it is told: the engine thread's book of open transfers.

Commands pass through on their way to the actors (`enter`), worker events on their way back (`record`, called in the
trio thread; `take_results`, on the engine thread). In between the ledger remembers only what must be given back when
the actors are gone: the requests that wait for KV and the leases that vLLM holds blocks for.

If the actors die, everything fails closed (`fail_closed`). Waiting requests are reported as failed with their blocks
quarantined, because nobody watches their READs any more; leases are given back when no reader can believe in them any
more (`end_without_core_ns` in `statemachine/lending.py`); new requests are refused. The scheduler process is told, as
it is when the actors themselves say that they have stopped (`WorkerStopped`), so that it lends nothing more.

A load fails as a whole: requests are reported, not blocks. vLLM takes single blocks only from an engine with one cache
group, and makes nothing of them for a request that is reported as failed: the request ends, or starts again from its
first token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import ParamSpec

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from connector.actor_death import REASON_LENGTH_MAX
from connector.clock import Clock, to_ns
from connector.observe.log import CrashCount, root_cause
from connector.observe.spans import PullTimes
from connector.observe.stats import ConnectorStats
from connector.protocol import (
    Command,
    LeaseComputing,
    LeaseGranted,
    QuarantineLifted,
    ReceiveEnded,
    RejectPull,
    ReleaseUnread,
    SendEnded,
    StartPull,
    SumsWanted,
    TrackLease,
    WorkerEvent,
    WorkerStopped,
)
from connector.step_metadata import WorkerReport
from connector.wire.bounded import shorten
from connector.worker.finishing import Loaded
from statemachine.failures import ConnectorStopped, Failure
from statemachine.lease import LeaseName
from statemachine.lending import end_without_core_ns

_Figures = ParamSpec("_Figures")


class TransferLedger:
    """See the module's docstring.

    Args:
        clock: of this process.
        lease_seconds: how long a lease lasts after it was granted or renewed.
    """

    def __init__(self, clock: Clock, lease_seconds: float) -> None:
        self._clock = clock
        self._lease_ns = to_ns(lease_seconds)
        self._events: deque[WorkerEvent] = deque()
        self._stats = ConnectorStats()
        self._crashes = CrashCount()
        self._report = WorkerReport()
        # Whether worker events have come since the last `take_stats`, and whether the report says anything.
        self._has_figures = False
        self._has_news = False
        self._loaded: list[Loaded] = []
        self.sums_wanted: list[SumsWanted] = []
        """What is to be summed, as `take_results` found."""
        # By request id, what vLLM has parked until its KV is here, with the blocks of each group.
        self._open_receives: dict[str, tuple[list[int], ...]] = {}
        # And whose blocks it keeps until it is told that they were read: by which lease, since when, and for what fixed
        # time. Clients' ids may come again (`ids_repeat`), and the end of an earlier lease is late when our thread is.
        self._open_sends: dict[str, tuple[LeaseName, int, int | None]] = {}
        # By request id, of requests in the scheduler's queue whose leases the actors keep alive: what these were told,
        # and when.
        self._tracked: dict[str, tuple[TrackLease, int]] = {}
        self._dead_since_ns: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether vLLM waits for anything, or soon will: the peers of requests in its queue are met meanwhile."""
        return bool(self._open_receives or self._open_sends or self._tracked)

    @property
    def transfers(self) -> int:
        """How many loads and leases vLLM waits for."""
        return len(self._open_receives) + len(self._open_sends)

    @property
    def tracked(self) -> list[tuple[TrackLease, int]]:
        """What the actors were told of requests that are still in the scheduler's queue, and when, by our clock."""
        return list(self._tracked.values())

    # --- on the way to the actors -------------------------------------------------------------------------------

    def enter(self, command: Command) -> None:
        """Remember what vLLM will wait for because of this command."""
        match command:
            case TrackLease(request_id=request_id):
                self._tracked[request_id] = command, self._clock.now_ns()
            case StartPull(request_id=request_id, groups=groups):
                self._tracked.pop(request_id, None)
                self._open_receives[request_id] = tuple(group.local_block_ids for group in groups)
            case ReleaseUnread(request_id=request_id):
                self._tracked.pop(request_id, None)
            case RejectPull(local_block_ids=block_ids):
                self._open_receives[command.request_id] = (block_ids,)
            case LeaseComputing(lease=lease):
                # Of an earlier request of this id, if it lent blocks: vLLM keeps them no longer, and is told no end.
                self._open_sends.pop(lease.request_id, None)
            case LeaseGranted(lease=lease, fixed_seconds=seconds):
                fixed_ns = None if seconds is None else to_ns(seconds)
                self._open_sends[lease.request_id] = (lease, self._clock.now_ns(), fixed_ns)
            case _:
                pass

    def refuse(self, command: Command, detail: str) -> None:
        """There are no actors who will see this command, for this reason: no READ of it exists, so its blocks are
        free."""
        match command:
            case StartPull() | RejectPull():
                failure = command.failure if isinstance(command, RejectPull) else ConnectorStopped(detail=detail)
                self._events.append(
                    ReceiveEnded(
                        request_id=command.request_id,
                        failure=failure,
                        local_block_ids=command.local_block_ids,
                        quarantined=False,
                    )
                )
            case _:
                pass

    # --- on the way back ----------------------------------------------------------------------------------------

    def record(self, event: WorkerEvent) -> None:
        """Something has ended. It is told with the next `take_results`. Any thread."""
        self._events.append(event)

    def take_results(self) -> KVConnectorTransferResults:
        """What has ended since the last call, but for requests that were loaded: see `take_loaded`."""
        results = KVConnectorTransferResults()
        while self._events:
            event = self._events.popleft()
            if self._is_repeated(event):
                continue
            match event:
                case SumsWanted():
                    self.sums_wanted.append(event)
                    continue
                case ReceiveEnded(failure=None):
                    tables = self._open_receives.pop(event.request_id)
                    self._loaded.append(Loaded(event.request_id, tables, event.permutation, event.unfilled))
                    continue  # it is counted when it is told
            self._count(self._stats.add, event)
            match event:
                case ReceiveEnded():
                    self._end_receive(event, results)
                case SendEnded(lease=lease):
                    del self._open_sends[lease.request_id]
                    results.finished_sending.add(lease.request_id)
                case QuarantineLifted(local_block_ids=block_ids):
                    self._report.lifted.append(block_ids)
                    self._has_news = True
                case WorkerStopped(reason=reason):
                    self._note_stop(reason)
                case _:
                    pass
        return results

    def take_loaded(self) -> list[Loaded]:
        """Those whose READs have ended, as `take_results` found. Each is told to vLLM when it has been finished."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def end_loaded(
        self, finished: set[str], failed: Mapping[str, Failure], results: KVConnectorTransferResults
    ) -> None:
        """Requests that `take_loaded` has handed out, perhaps in an earlier step, may be used (`finished`) or could not
        be finished (`failed`). Nothing is in flight any more. They are counted only now: a figure that was sent cannot
        be taken back."""
        if finished:
            self._count(self._stats.count_loaded, len(finished))
            results.finished_recving |= finished
        for request_id, failure in failed.items():
            self._count(self._stats.count_failed, failure)
            results.finished_recving.add(request_id)
            results.failed_recving.add(request_id)

    def take_sums_wanted(self) -> list[SumsWanted]:
        """What is to be summed, as `take_results` found."""
        wanted, self.sums_wanted = self.sums_wanted, []
        return wanted

    def note_pull(self, times: PullTimes) -> None:
        """For the spans that the scheduler process makes."""
        self._report.pulls.append(times)
        self._has_news = True

    def take_report(self) -> WorkerReport | None:
        """News for the scheduler process, if there are any. Each is told once, with the first report after it."""
        if not self._has_news:
            return None
        self._has_news = False
        report, self._report = self._report, WorkerReport()
        return report

    def take_stats(self) -> ConnectorStats | None:
        """Figures since the last call, or None when nothing happened."""
        if not self._has_figures:
            return None
        self._has_figures = False
        return None if self._stats.is_empty() else self._stats.clone_and_reset()

    def fail_closed(self, death: BaseException | None) -> None:
        """The actors have died: end on their behalf what can be ended now. Called again with every step."""
        now_ns = self._clock.now_ns()
        cause = root_cause(death) if death is not None else None
        if self._dead_since_ns is None:
            self._dead_since_ns = now_ns
            self._note_stop(f"its actors died: {cause!r}")
        failure = ConnectorStopped(detail=f"its actors died: {cause!r}")
        for request_id, tables in self._open_receives.items():
            block_ids = [block_id for table in tables for block_id in table]
            self._events.append(
                ReceiveEnded(request_id=request_id, failure=failure, local_block_ids=block_ids, quarantined=True)
            )
        for lease, granted_ns, fixed_ns in self._open_sends.values():
            if now_ns >= end_without_core_ns(granted_ns, fixed_ns, self._dead_since_ns, self._lease_ns):
                self._events.append(SendEnded(lease=lease, expired=True))

    # --- inside -------------------------------------------------------------------------------------------------

    def _count(self, count: Callable[_Figures, None], *figures: _Figures.args, **named: _Figures.kwargs) -> None:
        try:
            count(*figures, **named)
        except Exception as error:  # a figure is not worth a request
            self._crashes.note("counting of worker events", error)
        self._has_figures = True

    def _note_stop(self, reason: str) -> None:
        if self._report.stopped is None:
            self._report.stopped = shorten(reason, REASON_LENGTH_MAX)
            self._has_news = True

    def _is_repeated(self, event: WorkerEvent) -> bool:
        """Whether vLLM was told already: when the actors died, what was open was ended on their behalf; or waits for
        it no longer."""
        match event:
            case ReceiveEnded(request_id=request_id):
                return request_id not in self._open_receives
            case SendEnded(lease=lease):
                known = self._open_sends.get(lease.request_id)
                return known is None or known[0] != lease
            case _:
                return False

    def _end_receive(self, event: ReceiveEnded, results: KVConnectorTransferResults) -> None:
        del self._open_receives[event.request_id]
        results.finished_recving.add(event.request_id)
        results.failed_recving.add(event.request_id)
        if event.quarantined:
            self._report.quarantined.append(event.local_block_ids)
            self._has_news = True
