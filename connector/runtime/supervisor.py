"""The supervisor of one worker process: starts the actors, routes commands to them, restarts them when they crash.

    engine thread --commands--> supervisor --> peer actors (one per remote engine) --> Reads --> NIXL port
                                          \\-> lease keeper <-- control socket, notifications
    engine thread <--outcomes------------------ all of them

`deliver` is called in the trio thread by the engine's mailbox, once per command, and never blocks.

Which actor a request belongs to is decided by what it says: the engine's id and its sizes. What a client says of sizes
may be wrong. Then its handshake fails for those who say the same, and for nobody else.

An actor that raises is a bug; it must not take the engine with it. The supervisor logs it, lets the actor fail what it
had in hand, and runs it again. The restart costs a growing delay, so that an actor that crashes on every message does
not spin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import trio

from connector.clock import Clock, to_ns
from connector.config import ConnectorOptions
from connector.layout.local import LocalRank
from connector.layout.plan_cache import PlanCache
from connector.ports.nixl import NixlPort, NotificationReceived
from connector.ports.side_channel import Listener, SideChannel
from connector.protocol import (
    AbortPull,
    Command,
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    Outcome,
    PeerAddress,
    ReceiveEnded,
    RejectPull,
    StartPull,
    TrackLease,
    WorkerStopped,
)
from connector.runtime.context import ActorContext
from connector.runtime.lease_keeper import LeaseKeeper, lending_limits
from connector.runtime.pace import Pace
from connector.runtime.peer_actor import PeerActor
from connector.runtime.reads import Reads
from connector.runtime.recorder import Recorder
from connector.runtime.restarts import keep_running
from statemachine import request
from statemachine.failures import ConnectorStopped, Failure, TooManyPeers
from statemachine.lease import LeaseName
from statemachine.remote_engine import Stop

SWEEP_INTERVAL_SECONDS = 30.0
SHUTDOWN_GRACE_SECONDS = 2.0
"""How long a stop waits for READs in flight before the memory under them is given up as still in use."""


class PeerKey(NamedTuple):
    """A remote engine as requests describe it."""

    engine_id: str
    tp_size: int
    dcp_size: int
    pp_size: int


class Supervisor:
    """See the module's docstring.

    Args:
        control: the control socket, of `side_channel`.
        emit: hands an outcome to the engine thread.
        log_failure: writes one line for people.
        log_crash: writes a line with a traceback: which actor, what it raised.
        hear_engine: calls `deliver` with what the engine has said until now and is still on its way.
    """

    def __init__(
        self,
        *,
        options: ConnectorOptions,
        local: LocalRank,
        nixl_port: NixlPort,
        side_channel: SideChannel,
        control: Listener,
        clock: Clock,
        recorder: Recorder,
        emit: Callable[[Outcome], None],
        log_failure: Callable[[str, Failure], None],
        log_crash: Callable[[str, BaseException], None],
        hear_engine: Callable[[], None] = lambda: None,
    ) -> None:
        self._log_crash = log_crash
        self._nixl_port = nixl_port
        self._side_channel = side_channel
        self._reads = Reads(
            port=nixl_port,
            clock=clock,
            emit=emit,
            on_notification=self._route_notification,
            on_broken=self._stop_everything,
            log_crash=log_crash,
        )
        self._lease_keeper = LeaseKeeper(
            limits=lending_limits(options),
            clock=clock,
            observe=recorder.observer(None),
            emit=emit,
            log_failure=log_failure,
            log_crash=log_crash,
            watch_notifications=nixl_port.expect_notifications,
            control=control,
            hear_engine=hear_engine,
        )
        self._context = ActorContext(
            options=options,
            local=local,
            reads=self._reads,
            side_channel=side_channel,
            clock=clock,
            recorder=recorder,
            plans=PlanCache(),
            pace=Pace(clock),
            emit=emit,
            log_failure=log_failure,
            log_crash=log_crash,
        )
        self._peers: dict[PeerKey, PeerActor] = {}
        self._peer_of_request: dict[str, PeerKey] = {}
        self._stopped: ConnectorStopped | None = None
        self._stop_requested = trio.Event()
        self._nursery: trio.Nursery | None = None

    # --- life ---------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until `stop`. Returns after every actor has ended and both doors are closed."""
        keeper = self._lease_keeper
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(keep_running, "lease keeper", keeper.run, self._log_crash)
                nursery.start_soon(self._sweep)
                task_status.started()
                await self._stop_requested.wait()
                await self._wind_down()
                self._nursery = None  # who is asked from here on has nobody left to answer for him: see `_actor`
                nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self._side_channel.close()
            with trio.CancelScope(shield=True):
                await self._nixl_port.aclose(SHUTDOWN_GRACE_SECONDS)

    def stop(self) -> None:
        """Trio thread: end. Open requests fail, READs in flight are waited for a moment."""
        self._stop_requested.set()

    async def _wind_down(self) -> None:
        self._stop_everything("it is shutting down")
        with trio.move_on_after(SHUTDOWN_GRACE_SECONDS):
            while self._peers or self._reads.in_flight:
                await trio.sleep(0.01)
        assert self._stopped is not None
        for actor in list(self._peers.values()):
            actor.end(self._stopped)
        await self._reads.release_local_lists()

    def _stop_everything(self, detail: str) -> None:
        if self._stopped is not None:
            return
        self._stopped = ConnectorStopped(detail=detail)
        if not self._stop_requested.is_set():
            self._context.log_failure("connector", self._stopped)
            self._context.emit(WorkerStopped(reason=detail))
        for actor in self._peers.values():
            actor.tell(Stop(failure=self._stopped))

    # --- routing ------------------------------------------------------------------------------------------------

    def deliver(self, command: Command) -> None:
        """Trio thread: hand a command to the actor that it concerns."""
        match command:
            case StartPull():
                self._start_pull(command)
            case AbortPull(request_id=request_id):
                key = self._peer_of_request.get(request_id)
                if key is not None and key in self._peers:
                    self._peers[key].put(command)
            case TrackLease():
                actor = self._actor(command.peer)
                if actor is not None:
                    actor.put(command)
            case RejectPull(failure=failure):
                self._refuse(command, request.ParamsRejected(failure=failure))
            case LeaseComputing() | LeaseGranted() | LeaseWithdrawn():
                self._lease_keeper.deliver(command)

    def _route_notification(self, event: NotificationReceived) -> None:
        self._lease_keeper.notify(event.sender, event.message_untrusted)

    def _start_pull(self, command: StartPull) -> None:
        actor = self._actor(command.peer)
        if actor is not None:
            if command.awaited:
                self._peer_of_request[command.request_id] = _key(command.peer)
            actor.put(command)
        elif command.awaited:
            limit = self._context.options.peer_limit
            too_many = TooManyPeers(peer=command.peer.engine_id, address=str(command.peer), limit=limit)
            self._refuse(command, request.PeerFailed(failure=self._stopped or too_many))

    def _refuse(self, command: StartPull | RejectPull, event: request.ParamsRejected | request.PeerFailed) -> None:
        """End a request that never reaches a peer; the trace shows it like any other."""
        peer, lease = "", LeaseName("", 0)
        if isinstance(command, StartPull):
            peer, lease = command.peer.engine_id, command.lease
        fresh = request.Request(request_id=command.request_id, lease=lease, peer=peer, retries_left=0)
        ended, _ = request.MACHINE.step(fresh, event)
        observe = self._context.recorder.observer(peer or None, lambda _: (len(command.local_block_ids), None, None))
        if observe is not None:
            observe("request", command.request_id, None, None, fresh)
            observe("request", command.request_id, fresh, event, ended)
        self._context.emit(
            ReceiveEnded(
                request_id=command.request_id,
                failure=ended.failure,
                local_block_ids=command.local_block_ids,
                quarantined=False,
            )
        )
        self._context.log_failure(command.request_id, event.failure)

    # --- peers --------------------------------------------------------------------------------------------------

    def _actor(self, address: PeerAddress) -> PeerActor | None:
        """The actor of a remote engine, made when it is new. None: too many are known and all are in use, or the
        connector has stopped."""
        if self._nursery is None:
            return None
        key = _key(address)
        actor = self._peers.get(key)
        if actor is not None:
            return actor
        if self._stopped is not None:
            return None
        staying = sum(not actor.is_leaving for actor in self._peers.values())
        if staying >= self._context.options.peer_limit and not self._evict_one():
            return None
        actor = PeerActor(
            self._context,
            key,
            address,
            on_request_ended=self._forget_request,
            on_connected=self._retire_replaced,
            on_disconnected=self._retire_sharers,
        )
        self._peers[key] = actor
        self._nursery.start_soon(self._run_peer, key, actor)
        return actor

    async def _run_peer(self, key: PeerKey, actor: PeerActor) -> None:
        await keep_running(f"peer actor of {key.engine_id}", actor.run, self._log_crash, actor.recover)
        del self._peers[key]
        # What arrived after its last look at the inbox goes to its successor.
        for command in actor.take_unheard():
            self.deliver(command)

    def _forget_request(self, request_id: str) -> None:
        self._peer_of_request.pop(request_id, None)

    def _retire_replaced(self, address: PeerAddress) -> None:
        """An engine has answered at `address`: any other engine that was known there is gone."""
        for actor in self._peers.values():
            same_place = (actor.address.host, actor.address.port) == (address.host, address.port)
            if same_place and actor.address.engine_id != address.engine_id:
                actor.retire()

    def _retire_sharers(self, address: PeerAddress) -> None:
        """A connection to this engine was given up. Unused actors that know it by other sizes stand on the same agents,
        which can be loaded again only when all have let go."""
        for key, actor in self._peers.items():
            shares = key.engine_id == address.engine_id and key != _key(address)
            if shares and actor.is_unused and actor.core.is_connected:
                actor.retire()

    def _evict_one(self) -> bool:
        """Make room: give up the peer that has been unused for longest, an unconnected one if there is one.

        A connected one goes too, because a dead engine that nobody uses looks connected: with a full table, engines
        that replaced others would never find a place.
        """
        unused = [actor for actor in self._peers.values() if actor.is_unused and not actor.is_leaving]
        if not unused:
            return False
        oldest = min(unused, key=lambda actor: (actor.core.is_connected, actor.last_used_ns))
        oldest.retire()
        return True

    async def _sweep(self) -> None:
        """Forget peers that are not connected and have not been asked for in a long time.

        A live connection is kept however idle it is: on NIXL 1.5.1 every remove + add leaks a file descriptor.
        """
        ttl_ns = to_ns(self._context.options.engine_ttl)
        while True:
            await trio.sleep(SWEEP_INTERVAL_SECONDS)
            now_ns = self._context.clock.now_ns()
            for actor in self._peers.values():
                if actor.is_unused and not actor.core.is_connected and now_ns - actor.last_used_ns > ttl_ns:
                    actor.retire()


def _key(address: PeerAddress) -> PeerKey:
    return PeerKey(address.engine_id, address.tp_size, address.dcp_size, address.pp_size)
