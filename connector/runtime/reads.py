"""READs and remote agents: everything that the actors of one rank share of the NIXL port.

Every `ReadOrder` is answered by exactly one `ReadEnded` event: when the port reported its end, when it was refused, or
when it was withdrawn, or not wanted any more by the time its turn came. What an end means is for the core to say.

Requests take turns of DESCRIPTORS_PER_TURN, first come, first served, and little is ordered ahead of the port: posting
may copy a whole READ (CMA), so a large request or a burst from one peer must not fill the agent's queue in front of
everything else, and an order that is withdrawn before its turn has come costs nothing. There is no task in between:
whoever orders posts, and so does the event that ends somebody's turn.

Agents are shared: two actors may talk to the same built-in engine, which different requests describe with different
sizes. Who stands on which, and when it is removed, is the matter of `statemachine/agents.py`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import trio

from connector.clock import Clock
from connector.observe.catalogue import READS_FAILED
from connector.ports.nixl import (
    AgentName,
    DescriptorIds,
    DescriptorListHandle,
    ListenerLost,
    MemoryRun,
    NixlCallFailed,
    NixlEvent,
    NixlPort,
    NotificationReceived,
    PortBroken,
    PortClosed,
    PortReadEnded,
    ReadHandle,
    ReadMeasured,
    ReadPosted,
)
from connector.protocol import WorkerEvent
from connector.runtime.effects import internal_error
from connector.runtime.figures import Figures
from statemachine import agents
from statemachine.agents import Agents, Loaded
from statemachine.failures import Failure, TransferError
from statemachine.remote_engine import ReadEnded

DESCRIPTORS_PER_TURN = 8192
"""Descriptors of one request that are ordered in its turn, while others wait. NIXL takes 1 to 3 us for each that it
cannot merge, and the agent does nothing else meanwhile."""

DESCRIPTORS_AHEAD_MAX = 8192
"""Descriptors of all orders that the port was given and has not come to. Whoever orders next has to wait for them."""

ORDERS_AHEAD_MIN = 2
"""However large they are: one is posted while the next one is on its way."""


@dataclass(frozen=True, kw_only=True)
class ReadOrder:
    """One READ: `remote_ids` of `remote` into `local_ids` of `local`.

    Attributes:
        request_id, read, connection: as in the core's events.
        peer: engine id.
        is_wanted: asked when its turn has come.
        on_end: called once, in the trio thread, with the end and the port's own event where it was posted.
    """

    request_id: str
    read: int
    connection: int
    peer: str
    local: DescriptorListHandle
    local_ids: DescriptorIds
    remote: DescriptorListHandle
    remote_ids: DescriptorIds
    is_wanted: Callable[[], bool]
    on_end: Callable[[ReadEnded, PortReadEnded | None], None]


class AgentOwner(Protocol):
    """Who stands on agents that were loaded for it."""

    def agent_lost(self, agent: AgentName, failure: Failure) -> None:
        """Another one has given this agent up: so have we to, as soon as our READs over it have ended."""


class Reads:
    """See the module's docstring.

    Args:
        figures: where READs that failed are counted.
        on_notification: called with each notification (untrusted bytes).
        on_unreachable: called once when nobody can connect to the port any more who has not before.
        on_broken: called once when the port is gone for good.
        log_crash: writes a line with a traceback: what raised it, what it raised.
        descriptors_ahead_max: of all orders that the port was given and has not come to.
    """

    def __init__(
        self,
        *,
        port: NixlPort,
        clock: Clock,
        figures: Figures,
        emit: Callable[[WorkerEvent], None],
        on_notification: Callable[[NotificationReceived], None],
        on_unreachable: Callable[[str], None],
        on_broken: Callable[[str], None],
        log_crash: Callable[[str, BaseException], None],
        descriptors_ahead_max: int = DESCRIPTORS_AHEAD_MAX,
    ) -> None:
        self.port = port
        self._figures = figures
        self._descriptors_ahead_max = descriptors_ahead_max
        self._clock = clock
        self._emit = emit
        self._on_notification = on_notification
        self._on_unreachable = on_unreachable
        self._on_broken = on_broken
        self._log_crash = log_crash
        # The orders of each request, in the order of their turns; empty if they were withdrawn. And by peer and request
        # those that are not.
        self._waiting: deque[deque[ReadOrder]] = deque()
        self._of_request: dict[tuple[str, str], deque[ReadOrder]] = {}
        self._left_of_turn = DESCRIPTORS_PER_TURN
        # Given to the port, whose thread may not have come to it, with its descriptors.
        self._ahead: dict[ReadHandle, int] = {}
        self._descriptors_ahead = 0
        self._posted: dict[ReadHandle, ReadOrder] = {}
        # When the port was given each of these.
        self._posted_ns: dict[ReadHandle, int] = {}
        self._local_lists: dict[tuple[MemoryRun, ...], DescriptorListHandle] = {}
        self._agents = Agents()
        port.set_event_callback(self._receive)

    @property
    def in_flight(self) -> int:
        """READs that the port was given and whose end it has not reported."""
        return len(self._posted)

    @property
    def local_lists(self) -> int:
        """Prepared lists of our own memory."""
        return len(self._local_lists)

    def in_hand(self) -> list[tuple[ReadOrder, int, bool]]:
        """Those, with when the port was given them and whether it has come to them."""
        return [(order, self._posted_ns[handle], handle not in self._ahead) for handle, order in self._posted.items()]

    def waiting(self) -> list[str]:
        """Requests of whose READs some wait for their turn, in the order of turns."""
        return [orders[0].request_id for orders in self._waiting if orders]

    # --- for the handshake --------------------------------------------------------------------------------------

    async def load_agent(self, metadata: bytes, owner: AgentOwner) -> AgentName | None:
        """Load a peer's agent for `owner`. None when it has to be removed before it can be of use again: somebody who
        stood on it has given it up, or READs of the owner's own last connection have not ended (docs/nixl.md)."""
        result, name = Loaded.AGAIN, None
        while result is Loaded.AGAIN:
            load, name = self._agents.begin_load(), None
            try:
                name = await self.port.add_remote_agent(metadata)
            finally:
                result = self._agents.end_load(load, name, owner)
        return name if result is Loaded.STANDS else None

    def is_lost(self, name: AgentName) -> bool:
        """Whether somebody has given up this loaded agent."""
        return self._agents.is_lost(name)

    async def unload_agent(
        self, name: AgentName, owner: AgentOwner, failure: Failure | None, on_removed: Callable[[], None]
    ) -> None:
        """`owner` stands on it no more; the last one removes it.

        Args:
            failure: what has made the agent useless: the others hear of it. None: they may go on.
            on_removed: called once when the agent is removed, or when the port has failed at it; without a failure,
                when `owner` has let go.
        """
        for effect in self._agents.let_go(name, owner, failure, on_removed):
            match effect:
                case agents.TellLost(agent=agent, owner=other):
                    other.agent_lost(agent, effect.failure)
                case agents.TellOver(waiting=over):
                    over()
                case agents.Remove(agent=agent):
                    try:
                        await self.port.remove_remote_agent(agent)
                    finally:
                        for each in effect.waiting:
                            each()
                case _:
                    assert_never(effect)

    async def local_list(self, runs: tuple[MemoryRun, ...]) -> DescriptorListHandle:
        """The prepared list of local memory for `runs`; shared by all peers and kept until the end."""
        handle = self._local_lists.get(runs)
        if handle is None:
            handle = await self.port.prepare_local(runs)
            # Another handshake may have prepared the same runs meanwhile; the first one stays.
            first = self._local_lists.setdefault(runs, handle)
            if first != handle:
                with trio.CancelScope(shield=True):  # nobody else knows of it
                    await self.port.release_descriptor_list(handle)
                handle = first
        return handle

    async def release_local_lists(self) -> None:
        """At the end. What cannot be released ends with the agent."""
        while self._local_lists:
            _, handle = self._local_lists.popitem()
            with contextlib.suppress(NixlCallFailed, PortClosed):
                await self.port.release_descriptor_list(handle)

    # --- for the peer actors ------------------------------------------------------------------------------------

    def order(self, orders: Sequence[ReadOrder]) -> None:
        """Queue the READs of a request; the end of each comes through its `on_end`, perhaps before this returns."""
        if orders:
            of_request = deque(orders)
            self._waiting.append(of_request)
            self._of_request[orders[0].peer, orders[0].request_id] = of_request
        self._post_next()

    def withdraw(self, peer: str, request_id: str) -> None:
        """Those of a request that wait for their turn are not posted, and end. Its own failure would wait for them
        otherwise, as for READs that may still write."""
        if (of_request := self._of_request.pop((peer, request_id), None)) is None:
            return
        orders = list(of_request)
        of_request.clear()
        for order in orders:
            self._end(order, None, was_wanted=False)
        self._post_next()

    # --- inside -------------------------------------------------------------------------------------------------

    def _post_next(self) -> None:
        while self._waiting:
            if not self._waiting[0]:  # withdrawn
                self._waiting.popleft()
                self._left_of_turn = DESCRIPTORS_PER_TURN
            elif self._has_room_for(self._waiting[0][0]):
                self._post(self._take_next())
            else:
                return

    def _has_room_for(self, order: ReadOrder) -> bool:
        if len(self._ahead) < ORDERS_AHEAD_MIN:
            return True
        return self._descriptors_ahead + order.local_ids.size <= self._descriptors_ahead_max

    def _take_next(self) -> ReadOrder:
        """The next order of the request whose turn it is. When the turn is over, or all was ordered, the next one's
        begins."""
        of_request = self._waiting[0]
        order = of_request.popleft()
        self._left_of_turn -= order.local_ids.size
        if not of_request and (order.peer, order.request_id) in self._of_request:
            del self._of_request[order.peer, order.request_id]
        if not of_request or self._left_of_turn < of_request[0].local_ids.size:
            self._waiting.popleft()
            self._left_of_turn = DESCRIPTORS_PER_TURN
            if of_request:
                self._waiting.append(of_request)
        return order

    def _post(self, order: ReadOrder) -> None:
        handle = None
        try:
            if order.is_wanted():
                handle = self.port.post_read(order.local, order.local_ids, order.remote, order.remote_ids)
        except PortClosed as closed:
            self._end(order, None, "post_read", str(closed))
            return
        except Exception as error:
            # A bug of whose READ it is, or of the port, which raises before it has ordered anything.
            self._log_crash("posting of a READ", error)
            self._end(order, None, "post_read", internal_error(error))
            return
        if handle is None:
            self._end(order, None, was_wanted=False)
            return
        self._ahead[handle] = order.local_ids.size
        self._descriptors_ahead += order.local_ids.size
        self._posted[handle] = order
        self._posted_ns[handle] = self._clock.now_ns()

    def _receive(self, event: NixlEvent) -> None:
        try:
            match event:
                case ReadPosted(handle=handle):
                    self._note_turn(handle)
                    self._post_next()
                case PortReadEnded(handle=handle):
                    self._note_turn(handle)
                    order = self._posted.pop(handle)
                    del self._posted_ns[handle]
                    try:
                        operation = "READ" if event.was_posted else "post_read"
                        self._end(order, event, operation, event.error, lost=event.transport_lost)
                    finally:
                        self._post_next()
                case ReadMeasured():
                    self._emit(event)
                case NotificationReceived():
                    self._on_notification(event)
                case ListenerLost():
                    self._on_unreachable(event.error)
                case PortBroken():
                    self._on_broken(event.error)
        except Exception as error:
            self._log_crash("NIXL events", error)

    def _note_turn(self, handle: ReadHandle) -> None:
        """The port has come to this order."""
        self._descriptors_ahead -= self._ahead.pop(handle, 0)

    def _end(
        self,
        order: ReadOrder,
        event: PortReadEnded | None,
        operation: str = "READ",
        error: str | None = None,
        *,
        lost: bool = False,
        was_wanted: bool = True,
    ) -> None:
        failure = None
        if error is not None:
            failure = TransferError(peer=order.peer, operation=operation, error=error, transport_lost=lost)
            self._figures.note_failed(READS_FAILED)
        ended = ReadEnded(
            request_id=order.request_id,
            read=order.read,
            connection=order.connection,
            ended_ns=event.ended_ns if event is not None else self._clock.now_ns(),
            failure=failure,
            is_quiescent=event.quiescent if event is not None else True,
            was_wanted=was_wanted,
        )
        order.on_end(ended, event)
