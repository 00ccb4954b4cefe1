"""The connections of one peer actor: opened, listened to, spoken over and taken back.

What takes time is a child task of the actor's nursery, which ends by putting an event for the core into the actor's
inbox. When a connection is opened and when it is taken back is the core's matter (`statemachine/remote_engine/`);
how a handshake goes is that of `connector/runtime/handshake.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from connector.observe.catalogue import FAILED_NOTIFICATIONS
from connector.ports.nixl import AgentName, NixlCallFailed, PortClosed
from connector.ports.side_channel import Link, SideChannelError
from connector.protocol import PeerAddress
from connector.runtime.context import ActorContext
from connector.runtime.effects import internal_error
from connector.runtime.handshake import Connection, connect, disconnect
from connector.wire import control
from connector.wire.bounded import DecodeFailed
from connector.wire.handshake import HandshakeError
from statemachine import remote_engine as core
from statemachine.failures import Failure, HandshakeRefused, TransferError
from statemachine.kernel import Event
from statemachine.lease import LeaseName


class Connections:
    """See the module's docstring. Their numbers are the core's names for them. Their agents are loaded for this object.

    Args:
        put: how an event reaches the actor.
        on_connected: called when a handshake has succeeded.
        on_sums: called with what a rank has answered about checksums.
    """

    def __init__(
        self,
        context: ActorContext,
        put: Callable[[Event], None],
        *,
        on_connected: Callable[[], None],
        on_sums: Callable[[int, int, control.Sums], None],
    ) -> None:
        self._context = context
        self._put = put
        # What that engine alone knows us by: nobody else speaks for us there, and nothing that is late from whoever was
        # in our place before.
        self._incarnation = context.draw_name()
        self._on_connected = on_connected
        self._on_sums = on_sums
        self._by_number: dict[int, Connection] = {}
        self._opened = 0
        self._nursery: trio.Nursery | None = None
        # What is to begin with the next nursery; empty while there is one.
        self._postponed: list[tuple[Callable[..., Awaitable[None]], tuple[object, ...]]] = []

    def __getitem__(self, number: int) -> Connection:
        return self._by_number[number]

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def attach(self, nursery: trio.Nursery) -> None:
        """From now on tasks run here. Those of an earlier nursery are gone: what was open is listened to again."""
        self._nursery = nursery
        for number, connection in self._by_number.items():
            self._listen(number, connection)
        postponed, self._postponed = self._postponed, []
        for task, arguments in postponed:
            self.spawn(task, *arguments)

    def detach(self) -> None:
        """The nursery ends. What is asked for from now on begins with the next one, if there is one."""
        self._nursery = None

    # --- what the actor asks for --------------------------------------------------------------------------------

    def open(self, address: PeerAddress) -> None:
        """Connected or ConnectFailed follows."""
        self.spawn(self._open, address)

    def take_back(self, number: int, failure: Failure | None) -> None:
        """TornDown follows. `failure`: what has made its agents useless to others, too."""
        self.spawn(self._take_back, number, failure)

    def agent_lost(self, agent: AgentName, failure: Failure) -> None:
        """Another actor has given up an agent on which some of these stand, perhaps."""
        for number, connection in list(self._by_number.items()):
            if any(rank.agent == agent for rank in connection.ranks):
                self._put(core.SharedAgentsLost(connection=number, failure=failure))

    def hold(self, number: int, rank: int, sent_ns: int, leases: tuple[LeaseName, ...]) -> None:
        """Ask a rank to keep these leases; HoldAnswered may follow."""
        message = control.Hold(**self._sender(number, rank), sent_ns=sent_ns, leases=leases)
        self._link(number, rank).send(control.encode_request(message))

    def release(self, number: int, rank: int, leases: tuple[LeaseName, ...]) -> None:
        """Tell a rank that we are done with these leases; ReleaseAnswered may follow."""
        message = control.Release(**self._sender(number, rank), leases=leases)
        self._link(number, rank).send(control.encode_request(message))

    def ask_sums(self, number: int, rank: int, asked: control.AskSums) -> bool:
        """Ask a rank for checksums; False: it is not connected any more."""
        if number not in self._by_number:
            return False
        self._link(number, rank).send(control.encode_request(asked))
        return True

    def notify(self, number: int, rank: int, message: bytes) -> None:
        """Send a notification of NIXL to a rank of a built-in engine. NotificationFailed may follow."""
        self.spawn(self._notify, number, rank, message)

    def spawn(self, task: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task beside those of the connections; without a nursery, when there is one."""
        if self._nursery is not None:
            self._nursery.start_soon(task, *args)
        else:
            self._postponed.append((task, args))

    # --- how ----------------------------------------------------------------------------------------------------

    def _sender(self, number: int, rank: int) -> dict[str, Any]:
        local = self._context.local.layout
        ranks = self._by_number[number].ranks[rank].consumers
        return {"engine_id": local.engine_id, "rank": local.tp_rank, "ranks": ranks, "incarnation": self._incarnation}

    def _link(self, number: int, rank: int) -> Link:
        link = self._by_number[number].ranks[rank].link
        assert link is not None, "only an engine with control sockets is asked"
        return link

    async def _open(self, address: PeerAddress) -> None:
        failure: Failure
        try:
            connection = await connect(self._context, address, self)
        except HandshakeError as error:
            failure = error.failure
        except Exception as error:
            # A bug in the handshake costs the requests that wait for it, not the actor.
            self._context.log_crash(f"handshake with {address.engine_id}", error)
            detail = internal_error(error)
            failure = HandshakeRefused(peer=address.engine_id, address=str(address), detail=detail)
        else:
            self._opened += 1
            number = self._opened
            self._by_number[number] = connection
            # The core first: what it has not heard of is never torn down, and its agents can never be loaded again.
            self._put(
                core.Connected(
                    connection=number,
                    workers=tuple(remote.worker for remote in connection.ranks),
                    is_builtin=connection.is_builtin,
                    life=connection.life,
                )
            )
            self._listen(number, connection)
            self._on_connected()
            return
        self._put(core.ConnectFailed(failure=failure))

    def _listen(self, number: int, connection: Connection) -> None:
        if self._nursery is None:
            return  # `attach` does
        for rank, remote in enumerate(connection.ranks):
            if remote.link is not None:
                self.spawn(self._receive, number, rank, remote.link)

    async def _receive(self, number: int, rank: int, link: Link) -> None:
        """Answers of one rank, until its link is lost or closed."""
        try:
            while True:
                answer = control.decode_answer(await link.receive())
                if isinstance(answer, control.Sums):
                    self._on_sums(number, rank, answer)
                else:
                    self._put(_event_of(answer, number, rank))
        except trio.ClosedResourceError:
            return  # it was torn down
        except (SideChannelError, DecodeFailed) as error:
            self._put(core.LinkLost(connection=number, detail=str(error)))

    async def _notify(self, number: int, rank: int, message: bytes) -> None:
        connection = self._by_number.get(number)
        if connection is None:
            return  # it was torn down meanwhile
        try:
            await self._context.reads.port.send_notification(connection.ranks[rank].agent, message)
        except NixlCallFailed as error:
            self._context.figures.note_failed(FAILED_NOTIFICATIONS)
            failure = TransferError(
                peer=connection.peer.engine_id,
                operation=error.operation,
                error=error.error,
                transport_lost=error.transport_lost,
            )
            self._put(core.NotificationFailed(connection=number, failure=failure))
        except PortClosed:
            return  # the port is broken, which all actors are told

    async def _take_back(self, number: int, failure: Failure | None) -> None:
        await trio.lowlevel.cancel_shielded_checkpoint()  # behind the notifications of the turn that ordered it
        connection = self._by_number.pop(number)
        # An agent that stays loaded by accident could never be loaded again.
        with trio.CancelScope(shield=True):
            await disconnect(self._context, connection, failure, partial(self._end_take_back, number))

    def _end_take_back(self, number: int) -> None:
        self._put(core.TornDown(connection=number))


def _event_of(answer: control.Released | control.HoldAnswer | control.Leaving, connection: int, rank: int) -> Event:
    if isinstance(answer, control.Leaving):
        return core.LeavingSaid(connection=connection, grace_ns=answer.grace_ns)
    if isinstance(answer, control.Released):
        return core.ReleaseAnswered(connection=connection, rank=rank, leases=answer.leases)
    return core.HoldAnswered(
        connection=connection,
        rank=rank,
        sent_ns=answer.sent_ns,
        held=tuple((each.lease, each.remaining_ns) for each in answer.held),
        gone=tuple((each.lease, each.why) for each in answer.gone),
    )
