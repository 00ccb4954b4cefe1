"""The supervisor of one worker process: starts the actors, routes commands to them, restarts them when they crash.

    engine thread --commands--> supervisor --> peer actors (one per remote engine) --> NIXL owner --> port
                                          \\-> lease keeper <-- notifications ------------/
    engine thread <--outcomes------------------ all of them

`deliver` is called in the trio thread by the engine mailbox, once per command, and never blocks.

An actor that raises is a bug; it must not take the engine with it. The supervisor logs it, lets the actor fail what it
had in hand, and runs it again. The restart costs a growing delay, so that an actor that crashes on every message does
not spin.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import trio

from connector.config import ConnectorOptions
from connector.ports.nixl import NixlPort, NotificationReceived
from connector.ports.side_channel import SideChannel
from connector.runtime.clock import Clock, to_ns
from connector.runtime.consumed import ConsumedBlocks
from connector.runtime.context import ActorContext, LocalRank
from connector.runtime.lease_keeper import LeaseKeeper
from connector.runtime.messages import (
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
)
from connector.runtime.nixl_owner import NixlOwner
from connector.runtime.peer_actor import PeerActor, RetirePeer, StopPeer
from connector.runtime.tracked import Recorder, Tracked
from statemachine import request
from statemachine.failures import ConnectorStopped, Failure, TooManyPeers

RESTART_DELAY_SECONDS_MAX = 5.0
RESTART_FORGIVEN_SECONDS = 1.0
"""An actor that ran for so long starts again without delay after a crash: it does not crash on every message."""
SWEEP_INTERVAL_SECONDS = 30.0
RENEWAL_FRACTION = 2 / 3
"""A heartbeat extends a lease by this part of its duration, as in the built-in connector."""
SHUTDOWN_GRACE_SECONDS = 2.0
"""How long a stop waits for READs in flight before the memory under them is given up as still in use."""


class Supervisor:
    """See the module's docstring.

    Args:
        emit: hands an outcome to the engine thread.
        log_failure: writes one line for people.
        log_crash: writes a line with a traceback: which actor, what it raised.
    """

    def __init__(
        self,
        *,
        options: ConnectorOptions,
        local: LocalRank,
        nixl_port: NixlPort,
        side_channel: SideChannel,
        clock: Clock,
        recorder: Recorder,
        emit: Callable[[Outcome], None],
        log_failure: Callable[[str, Failure], None],
        log_crash: Callable[[str, BaseException], None],
        jitter: random.Random,
    ) -> None:
        self._log_crash = log_crash
        self._nixl_port = nixl_port
        self._side_channel = side_channel
        self._lease_keeper = LeaseKeeper(
            renewal_seconds=options.kv_lease_duration * RENEWAL_FRACTION,
            recorder=recorder,
            emit=emit,
            log_failure=log_failure,
            expect_notifications=nixl_port.expect_notifications,
        )
        nixl = NixlOwner(
            port=nixl_port,
            recorder=recorder,
            emit=emit,
            on_notification=self._route_notification,
            on_broken=self._stop_everything,
            log_crash=log_crash,
        )
        self._context = ActorContext(
            options=options,
            local=local,
            nixl=nixl,
            side_channel=side_channel,
            clock=clock,
            recorder=recorder,
            emit=emit,
            log_failure=log_failure,
            jitter=jitter,
        )
        self._peers: dict[str, PeerActor] = {}
        self._peer_of_request: dict[str, str] = {}
        self._consumed = ConsumedBlocks()
        self._stopped: ConnectorStopped | None = None
        self._stop_requested = trio.Event()
        self._nursery: trio.Nursery | None = None

    # --- life ---------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until `stop`. Returns after every actor has ended and both doors are closed."""
        nixl, keeper = self._context.nixl, self._lease_keeper
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._keep_running, "NIXL owner", nixl.run, _nothing_to_recover)
                nursery.start_soon(self._keep_running, "lease keeper", keeper.run, _nothing_to_recover)
                nursery.start_soon(self._sweep)
                task_status.started()
                await self._stop_requested.wait()
                await self._wind_down()
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
            while self._peers or self._context.nixl.open_reads:
                await trio.sleep(0.01)
        await self._context.nixl.release_local_lists()

    def _stop_everything(self, detail: str) -> None:
        if self._stopped is not None:
            return
        self._stopped = ConnectorStopped(detail=detail)
        if not self._stop_requested.is_set():
            self._context.log_failure("connector", self._stopped)
        for actor in self._peers.values():
            actor.inbox.put(StopPeer(failure=self._stopped))

    async def _keep_running(
        self,
        name: str,
        run: Callable[[], Awaitable[None]],
        recover: Callable[[BaseException], None],
    ) -> None:
        crashes = 0
        while True:
            started_ns = self._context.clock.now_ns()
            try:
                await run()
            except Exception as error:
                lasted_ns = self._context.clock.now_ns() - started_ns
                crashes = crashes + 1 if lasted_ns < to_ns(RESTART_FORGIVEN_SECONDS) else 1
                self._log_crash(name, error)
                recover(error)
                await trio.sleep(min(RESTART_DELAY_SECONDS_MAX, 0.001 * 2**crashes))
            else:
                return

    # --- routing ------------------------------------------------------------------------------------------------

    def deliver(self, command: Command) -> None:
        """Trio thread: hand a command to the actor that it concerns."""
        match command:
            case StartPull():
                self._start_pull(command)
            case AbortPull(request_id=request_id):
                engine_id = self._peer_of_request.get(request_id)
                if engine_id is not None and engine_id in self._peers:
                    self._peers[engine_id].inbox.put(command)
            case TrackLease():
                actor = self._actor(command.peer)
                if actor is not None:
                    actor.inbox.put(command)
            case RejectPull():
                self._refuse(command, request.ParamsRejected(failure=command.failure))
            case LeaseComputing() | LeaseGranted() | LeaseWithdrawn():
                self._lease_keeper.inbox.put(command)

    def _route_notification(self, event: NotificationReceived) -> None:
        self._lease_keeper.inbox.put(event)

    def _start_pull(self, command: StartPull) -> None:
        if self._stopped is not None:
            self._refuse(command, request.ShellFailed(failure=self._stopped))
            return
        actor = self._actor(command.peer)
        if actor is None:
            failure = TooManyPeers(
                peer=command.peer.engine_id, address=str(command.peer), limit=self._context.options.peer_limit
            )
            self._refuse(command, request.PeerFailed(failure=failure))
            return
        self._peer_of_request[command.request_id] = command.peer.engine_id
        actor.inbox.put(command)

    def _refuse(
        self,
        command: StartPull | RejectPull,
        event: request.ShellFailed | request.PeerFailed | request.ParamsRejected,
    ) -> None:
        """End a request that never reaches a peer, through its machine like any other."""
        pull = command if isinstance(command, StartPull) else None
        machine = Tracked(
            request.MACHINE,
            request.Request(
                request_id=command.request_id,
                remote_request_id=pull.remote_request_id if pull else "",
                peer=pull.peer.engine_id if pull else "",
                awaited=pull.awaited if pull else True,
                retries_left=0,
            ),
            self._context.recorder,
            subject=command.request_id,
            peer=pull.peer.engine_id if pull else None,
            remote_request_id=pull.remote_request_id if pull else None,
            blocks=len(command.local_block_ids),
        )
        for effect in machine.apply(event):
            if isinstance(effect, request.Report):
                ended = ReceiveEnded(
                    request_id=command.request_id,
                    failure=effect.failure,
                    local_block_ids=command.local_block_ids,
                    quarantined=False,
                )
                self._context.emit(ended)
        self._context.log_failure(command.request_id, event.failure)

    # --- peers --------------------------------------------------------------------------------------------------

    def _actor(self, address: PeerAddress) -> PeerActor | None:
        """The actor of a remote engine, made when it is new. None: too many are known and all are in use."""
        actor = self._peers.get(address.engine_id)
        if actor is not None:
            return actor
        if self._stopped is not None or self._nursery is None:
            return None
        if len(self._peers) >= self._context.options.peer_limit and not self._evict_one():
            return None
        actor = PeerActor(
            self._context,
            address,
            consumed=self._consumed,
            on_request_ended=self._forget_request,
            on_connected=self._retire_others,
        )
        self._peers[address.engine_id] = actor
        self._nursery.start_soon(self._run_peer, actor)
        return actor

    async def _run_peer(self, actor: PeerActor) -> None:
        await self._keep_running(f"peer actor of {actor.address.engine_id}", actor.run, actor.recover)
        del self._peers[actor.address.engine_id]
        # What arrived after its last look at the mailbox goes to its successor.
        while (message := actor.inbox.take_one()) is not None:
            if isinstance(message, StartPull | TrackLease | AbortPull):
                self.deliver(message)

    def _forget_request(self, request_id: str) -> None:
        self._peer_of_request.pop(request_id, None)

    def _retire_others(self, address: PeerAddress) -> None:
        """An engine has answered at `address`: any other engine that was known there is gone."""
        for actor in self._peers.values():
            same_place = (actor.address.host, actor.address.port) == (address.host, address.port)
            if same_place and actor.address.engine_id != address.engine_id:
                actor.inbox.put(RetirePeer())

    def _evict_one(self) -> bool:
        """Make room: give up the peer that has been unused for longest, an unconnected one if there is one.

        A connected one goes too, because a dead engine that nobody uses looks connected: with a full table, engines
        that replaced others would never find a place.
        """
        unused = [actor for actor in self._peers.values() if actor.is_unused]
        if not unused:
            return False
        oldest = min(unused, key=lambda actor: (actor.is_connected, actor.last_used_ns))
        oldest.inbox.put(RetirePeer())
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
                if actor.is_unused and not actor.is_connected and now_ns - actor.last_used_ns > ttl_ns:
                    actor.inbox.put(RetirePeer())


def _nothing_to_recover(error: BaseException) -> None:
    """The actor's state is good as it stands; the message that it crashed on is lost, and deadlines cover that."""
