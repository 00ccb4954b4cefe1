"""The NIXL owner: the one actor in front of the agent.

It posts READs for the peer actors, runs one transfer machine per handle, and routes what the port reports: the end of
a READ to the actor that ordered it, notifications to the lease keeper. Peer actors never see a handle.

Two rules keep the promise that memory is given back only when nothing writes into it any more:

* Every `ReadOrder` is answered by exactly one `ReadEnded`: after the end of its READ was seen, or when it was refused,
  or skipped because nobody wanted it any more by the time its turn came.
* A READ that nobody waits for any more (its request was quarantined) is watched on; when all READs of that request
  have ended, the quarantine is lifted.

Orders are posted first come, first served, a few at a time: posting may copy a whole READ (CMA), so a burst from one
peer must not fill the agent's queue in front of everything else, and an order that is given up early costs nothing.
Posting runs in the owner's nursery, because an actor that dies must not take a half-posted READ with it.

A bug that raises here costs the one event or order that it concerns: everything else that is posted needs the owner to
see its end. What became of that READ is not known, so it is not answered for, and its blocks end in quarantine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import trio

from connector.ports.nixl import (
    AgentName,
    DescriptorIds,
    DescriptorListHandle,
    MemoryRun,
    NixlCallFailed,
    NixlEvent,
    NixlPort,
    NotificationReceived,
    PortBroken,
    PortClosed,
    ReadDone,
    ReadErrored,
    ReadHandle,
)
from connector.runtime.mailbox import Mailbox
from connector.runtime.messages import Outcome, QuarantineLifted, TransferFailureNoted, TransferMeasured
from connector.runtime.tracked import Recorder, Tracked
from statemachine import transfer
from statemachine.failures import TransferError

POSTS_AT_ONCE = 4
"""Orders handed to the port at the same time."""


@dataclass(frozen=True, kw_only=True)
class ReadOrder:
    """One READ. `is_wanted` is asked just before posting; `on_end` is called once, in the trio thread."""

    request_id: str
    read: int
    peer: str
    blocks: int
    local: DescriptorListHandle
    local_ids: DescriptorIds
    remote: DescriptorListHandle
    remote_ids: DescriptorIds
    quarantine: Quarantine
    is_wanted: Callable[[], bool]
    on_end: Callable[[ReadEnded], None]


@dataclass
class Quarantine:
    """The READs of one attempt of one request, and whether its blocks are quarantined until they end."""

    local_block_ids: list[int]
    open_reads: int
    is_active: bool = False


class ReadEnded(msgspec.Struct, frozen=True, kw_only=True):
    """How a READ order ended. `skipped`: never posted. Otherwise `failure` None means that all bytes are here."""

    request_id: str
    read: int
    ended_ns: int
    failure: TransferError | None
    skipped: bool
    bytes: int = 0
    descriptors: int = 0


@dataclass
class _Posted:
    order: ReadOrder
    machine: Tracked[transfer.Transfer]
    event: ReadDone | ReadErrored | None = field(default=None)


class NixlOwner:
    """See the module's docstring.

    Args:
        on_notification: called with sender and message (untrusted bytes) of each notification.
        on_broken: called once when the port is gone for good.
        log_crash: writes a line with a traceback: which actor, what it raised.
    """

    def __init__(
        self,
        *,
        port: NixlPort,
        recorder: Recorder,
        emit: Callable[[Outcome], None],
        on_notification: Callable[[NotificationReceived], None],
        on_broken: Callable[[str], None],
        log_crash: Callable[[str, BaseException], None],
    ) -> None:
        self.port = port
        self._recorder = recorder
        self._emit = emit
        self._on_notification = on_notification
        self._on_broken = on_broken
        self._log_crash = log_crash
        self._inbox: Mailbox[NixlEvent] = Mailbox()
        self._nursery: trio.Nursery | None = None
        self._turns = trio.CapacityLimiter(POSTS_AT_ONCE)
        self._posted: dict[ReadHandle, _Posted] = {}
        self._unclaimed: dict[ReadHandle, ReadDone | ReadErrored] = {}
        self._local_lists: dict[tuple[MemoryRun, ...], DescriptorListHandle] = {}
        self._agents: set[AgentName] = set()
        port.set_event_callback(self._receive)

    # --- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                await self._inbox.wait(float("inf"))
                while (event := self._inbox.take_one()) is not None:
                    try:
                        self._handle(event)
                    except Exception as error:
                        self._log_crash("NIXL owner", error)

    @property
    def open_reads(self) -> int:
        """READs that are posted and not known to have ended."""
        return sum(1 for posted in self._posted.values() if posted.machine.value.state in _IN_FLIGHT)

    # --- for the handshake --------------------------------------------------------------------------------------

    async def load_agent(self, metadata: bytes) -> AgentName | None:
        """Load a peer's agent. None when it is loaded already: adding it again would be a silent no-op that leaves a
        broken connection broken (nixl.md fact 7), and removing it would hide the end of READs in flight."""
        agent = await self.port.add_remote_agent(metadata)
        if agent in self._agents:
            return None
        self._agents.add(agent)
        return agent

    async def unload_agent(self, agent: AgentName) -> None:
        self._agents.discard(agent)
        await self.port.remove_remote_agent(agent)

    async def local_list(self, runs: tuple[MemoryRun, ...]) -> DescriptorListHandle:
        """The prepared list of local memory for `runs`; shared by all peers and kept until the end."""
        handle = self._local_lists.get(runs)
        if handle is None:
            handle = await self.port.prepare_local(runs)
            # Another handshake may have prepared the same runs meanwhile; the first one stays.
            first = self._local_lists.setdefault(runs, handle)
            if first != handle:
                await self.port.release_descriptor_list(handle)
                handle = first
        return handle

    async def release_local_lists(self) -> None:
        while self._local_lists:
            _, handle = self._local_lists.popitem()
            await self.port.release_descriptor_list(handle)

    # --- for the peer actors ------------------------------------------------------------------------------------

    def order(self, order: ReadOrder) -> None:
        """Queue a READ; its end comes through `order.on_end`."""
        if self._nursery is None:
            self._end_unposted(order, self._failure(order, "post", "the NIXL owner is not running", lost=False))
            return
        self._nursery.start_soon(self._post, order)

    def quarantine(self, quarantine: Quarantine) -> None:
        """Nobody waits for these READs any more; lift the quarantine when the last one has ended."""
        quarantine.is_active = True
        for posted in list(self._posted.values()):
            if posted.order.quarantine is quarantine:
                self._apply(posted, transfer.Abandoned())

    # --- inside -------------------------------------------------------------------------------------------------

    def _receive(self, event: NixlEvent) -> None:
        self._inbox.put(event)

    async def _post(self, order: ReadOrder) -> None:
        try:
            await self._post_in_turn(order)
        except Exception as error:
            self._log_crash("NIXL owner", error)

    async def _post_in_turn(self, order: ReadOrder) -> None:
        async with self._turns:
            if not order.is_wanted():
                self._end_unposted(order, None)
                return
            try:
                handle = await self.port.post_read(order.local, order.local_ids, order.remote, order.remote_ids, b"")
            except NixlCallFailed as error:
                failure = self._failure(order, error.operation, error.error, lost=error.transport_lost)
                self._end_unposted(order, failure)
                return
            except PortClosed as error:
                self._end_unposted(order, self._failure(order, "post", str(error), lost=False))
                return
        machine = Tracked(
            transfer.MACHINE,
            transfer.Transfer(request_id=order.request_id, read=order.read),
            self._recorder,
            subject=f"{order.request_id}/{order.read}",
            peer=order.peer,
            blocks=order.blocks,
        )
        posted = _Posted(order, machine)
        self._posted[handle] = posted
        if order.quarantine.is_active:
            self._apply(posted, transfer.Abandoned())
        # The port reports in the trio thread, so the end of a short READ may be known before this task runs again.
        early = self._unclaimed.pop(handle, None)
        if early is not None:
            self._end(handle, posted, early)

    def _handle(self, event: NixlEvent) -> None:
        if isinstance(event, NotificationReceived):
            self._on_notification(event)
        elif isinstance(event, PortBroken):
            self._on_broken(event.error)
        else:
            posted = self._posted.get(event.handle)
            if posted is None:
                self._unclaimed[event.handle] = event
            else:
                self._end(event.handle, posted, event)

    def _end(self, handle: ReadHandle, posted: _Posted, event: ReadDone | ReadErrored) -> None:
        posted.event = event
        if isinstance(event, ReadDone):
            posted.machine.bytes = event.bytes
            posted.machine.descriptors = event.descriptors
            self._emit(
                TransferMeasured(
                    seconds_in_transport=event.seconds_in_transport,
                    seconds_to_post=event.seconds_to_post,
                    bytes=event.bytes,
                    descriptors=event.descriptors,
                )
            )
            self._apply(posted, transfer.Completed(), handle)
        else:
            failure = self._failure(posted.order, "READ", event.error, lost=event.transport_lost)
            self._apply(posted, transfer.Errored(failure=failure), handle)

    def _apply(
        self,
        posted: _Posted,
        event: transfer.Completed | transfer.Errored | transfer.Abandoned,
        handle: ReadHandle | None = None,
    ) -> None:
        for effect in posted.machine.apply(event):
            if isinstance(effect, transfer.Inform | transfer.LiftQuarantine):
                self._report_end(posted)
            elif isinstance(effect, transfer.ReleaseHandle):
                assert self._nursery is not None
                assert handle is not None
                self._nursery.start_soon(self._release, handle, posted)

    async def _release(self, handle: ReadHandle, posted: _Posted) -> None:
        try:
            await self.port.release_read(handle)
        except (NixlCallFailed, PortClosed):
            return  # The READ has ended; all that is lost is a little memory inside NIXL, counted by port.counts().
        except Exception as error:
            self._log_crash("NIXL owner", error)
            return
        posted.machine.apply(transfer.HandleReleased())
        del self._posted[handle]

    def _report_end(self, posted: _Posted) -> None:
        event = posted.event
        assert event is not None
        failure = posted.machine.value.failure
        assert failure is None or isinstance(failure, TransferError)
        self._close(
            posted.order,
            ReadEnded(
                request_id=posted.order.request_id,
                read=posted.order.read,
                ended_ns=event.completed_ns,
                failure=failure,
                skipped=False,
                bytes=event.bytes if isinstance(event, ReadDone) else 0,
                descriptors=event.descriptors if isinstance(event, ReadDone) else 0,
            ),
        )

    def _end_unposted(self, order: ReadOrder, failure: TransferError | None) -> None:
        self._close(
            order,
            ReadEnded(
                request_id=order.request_id,
                read=order.read,
                ended_ns=self._recorder.clock.now_ns(),
                failure=failure,
                skipped=failure is None,
            ),
        )

    def _close(self, order: ReadOrder, ended: ReadEnded) -> None:
        if ended.failure is not None:
            self._emit(TransferFailureNoted())
        quarantine = order.quarantine
        quarantine.open_reads -= 1
        if quarantine.is_active and quarantine.open_reads == 0:
            self._emit(QuarantineLifted(local_block_ids=quarantine.local_block_ids))
        order.on_end(ended)

    def _failure(self, order: ReadOrder, operation: str, error: str, *, lost: bool) -> TransferError:
        return TransferError(peer=order.peer, operation=operation, error=error, transport_lost=lost)


_IN_FLIGHT: frozenset[transfer.State] = frozenset({transfer.State.POSTED, transfer.State.STUCK})
