"""Mutants of the actors: supervisor, peer actor, handshake, NIXL owner, lease keeper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import trio

from connector.ports.nixl import NixlCallFailed
from connector.runtime import handshake, lease_keeper, nixl_owner, peer_actor
from connector.runtime.consumed import ConsumedBlocks
from connector.runtime.context import ActorContext
from connector.runtime.handshake import Connection
from connector.runtime.lease_keeper import LeaseKeeper
from connector.runtime.messages import Outcome, PeerAddress, QuarantineLifted, ReceiveEnded, SendEnded, StartPull
from connector.runtime.nixl_owner import NixlOwner, Quarantine, ReadEnded, ReadOrder
from connector.runtime.peer_actor import PeerActor, ReadMoved
from connector.runtime.request_run import RequestRun
from connector.runtime.supervisor import Supervisor
from statemachine import request
from statemachine.failures import TransferError
from tests.simulation.faults import Kind
from tests.simulation.mutants.machines import QUICK_REPLACEMENTS, READ_ERRORS, STALLED_READS
from tests.simulation.mutants.mutant import Mutant, Patch, fault

NOT_AN_ERROR_OF_THE_PRODUCT = type("NeverRaised", (Exception,), {})
"""In an `except` clause: nothing is caught."""

LONG_QUEUE = (fault(Kind.LONG_QUEUE, "d0", 0.0, 6.0),)
ROUTER_RETRIES = (fault(Kind.ROUTER_RETRY, "d0", 0.0, 12.0),)
ABORTS_OF_A_CROWD = (
    fault(Kind.ABORT, "d0", 0.0, 8.0),
    fault(Kind.READ_SLOW, "d0>p0", 0.0, 8.0),
    *(fault(Kind.LONG_QUEUE, "d0", float(at), 0.95) for at in range(8)),
)
"""So many requests start at once that their READs wait for their turn, and some are aborted meanwhile."""
ACTOR_CRASHES = (fault(Kind.ACTOR_CRASH, "d0", 0.0, 4.0),)


def emitting(patch: Patch, change: Callable[[Outcome], Outcome | None]) -> None:
    """Change what the actors tell the engine; None keeps it from it."""
    original = Supervisor.__init__

    def changed(self: Supervisor, *, emit: Callable[[Outcome], None], **others: Any) -> None:
        def tell(outcome: Outcome) -> None:
            said = change(outcome)
            if said is not None:
                emit(said)

        original(self, emit=tell, **others)

    patch.attribute(Supervisor, "__init__", changed)


# --- what a request believes ----------------------------------------------------------------------------------------


def _believe_in_every_lease(patch: Patch) -> None:
    forever = request.Proof(proven_until_ns=2**62, basis="granted")
    patch.attribute(PeerActor, "_proof", lambda self, run, connection: forever)


def _forget_the_margin(patch: Patch) -> None:
    prove = PeerActor._proof

    def without_margin(self: PeerActor, run: RequestRun, connection: Connection) -> request.Proof:
        proof = prove(self, run, connection)
        margin_ns = round(self._context.options.lease_margin_seconds * 1e9)
        return msgspec.structs.replace(proof, proven_until_ns=proof.proven_until_ns + margin_ns)

    patch.attribute(PeerActor, "_proof", without_margin)


def _trust_the_incarnation(patch: Patch) -> None:
    offer = PeerActor._offer

    def offer_anyway(self: PeerActor, run: RequestRun) -> None:
        assert self._connection is not None
        run.command = msgspec.structs.replace(run.command, incarnation=self._connection.incarnation)
        offer(self, run)

    patch.attribute(PeerActor, "_offer", offer_anyway)


def _forget_what_was_consumed(patch: Patch) -> None:
    patch.attribute(ConsumedBlocks, "add", lambda self, engine_id, remote_request_id: None)


def _remember_in_the_actor(patch: Patch) -> None:
    original = PeerActor.__init__

    def changed(self: PeerActor, *arguments: Any, consumed: ConsumedBlocks, **others: Any) -> None:
        original(self, *arguments, consumed=ConsumedBlocks(), **others)

    patch.attribute(PeerActor, "__init__", changed)


PROOF = (
    Mutant(
        name="believe in every lease",
        row=1,
        broken="a request never doubts that its blocks are still lent",
        apply=_believe_in_every_lease,
        faults=(fault(Kind.PARTITION, "d0>p0", 1.0, 5.0),),
        oracle="bytes",
    ),
    Mutant(
        name="no margin",
        row=10,
        broken="the configured margin is not taken off the proof of a lease",
        apply=_forget_the_margin,
        oracle="proof",
    ),
    Mutant(
        name="incarnation not compared",
        row=48,
        broken="blocks that were granted before a restart under the same engine id are read after it",
        apply=_trust_the_incarnation,
        faults=tuple(fault(Kind.CRASH_SAME_ID, "p0", at, 0.05) for at in (1.0, 1.5, 2.0, 2.5, 3.0)),
        oracle="bytes",
    ),
    Mutant(
        name="consumed blocks forgotten",
        row=2,
        broken="parameters whose blocks were read and released are accepted once more",
        apply=_forget_what_was_consumed,
        faults=ROUTER_RETRIES,
        oracle="bytes",
    ),
    Mutant(
        name="consumed blocks forgotten with their engine",
        row=2,
        broken="parameters that were used are accepted once more after their engine was evicted",
        apply=_remember_in_the_actor,
        faults=(*ROUTER_RETRIES, fault(Kind.MESSAGE_DELAY, "d0>p0", 0.0, 12.0)),
        oracle="bytes",
        seeds=30,
    ),
)


# --- what is reported -----------------------------------------------------------------------------------------------


def _report_twice(patch: Patch) -> None:
    report = PeerActor._report

    def twice(self: PeerActor, run: RequestRun, effect: request.Report) -> None:
        report(self, run, effect)
        report(self, run, effect)

    patch.attribute(PeerActor, "_report", twice)


def _report_quarantined_blocks_as_free(patch: Patch) -> None:
    def lie(outcome: Outcome) -> Outcome:
        if isinstance(outcome, ReceiveEnded):
            return msgspec.structs.replace(outcome, quarantined=False)
        return outcome

    emitting(patch, lie)


def _lose_every_end_of_a_lease(patch: Patch) -> None:
    emitting(patch, lambda outcome: None if isinstance(outcome, SendEnded) else outcome)


def _lift_at_once(patch: Patch) -> None:
    quarantine_reads = NixlOwner.quarantine

    def quarantine(self: NixlOwner, quarantine: Quarantine) -> None:
        quarantine_reads(self, quarantine)
        self._emit(QuarantineLifted(local_block_ids=quarantine.local_block_ids))

    patch.attribute(NixlOwner, "quarantine", quarantine)


def _never_forget_a_request(patch: Patch) -> None:
    forget = PeerActor._forget

    def keep(self: PeerActor, run: RequestRun) -> None:
        forget(self, run)
        self._runs[run.request_id] = run

    patch.attribute(PeerActor, "_forget", keep)


REPORTS = (
    Mutant(
        name="reported twice",
        row=24,
        broken="the end of a request is reported twice",
        apply=_report_twice,
        oracle="report once",
    ),
    Mutant(
        name="quarantine not reported",
        row=5,
        broken="blocks that a READ may still write into are reported as free",
        apply=_report_quarantined_blocks_as_free,
        faults=STALLED_READS,
        oracle="block reuse",
    ),
    Mutant(
        name="quarantine lifted at once",
        row=5,
        broken="blocks leave the quarantine when nobody waits for their READ any more, not when it has ended",
        apply=_lift_at_once,
        faults=STALLED_READS,
        oracle="block reuse",
    ),
    Mutant(
        name="ends of leases lost",
        row=59,
        broken="the engine never hears that a lease has ended",
        apply=_lose_every_end_of_a_lease,
        oracle="free once",
    ),
    Mutant(
        name="requests never forgotten",
        row=57,
        broken="what is known of a request stays when it has ended",
        apply=_never_forget_a_request,
        oracle="leaks",
    ),
)


# --- leases, as D keeps and ends them -------------------------------------------------------------------------------


def _first_sample_lets_go(patch: Patch) -> None:
    leave = PeerActor._leave

    def leave_for_all(self: PeerActor, remote_request_id: str, request_id: str) -> None:
        if remote_request_id in self._owed_releases and remote_request_id in self._holders:
            self._holders[remote_request_id] = {request_id}
        leave(self, remote_request_id, request_id)

    patch.attribute(PeerActor, "_leave", leave_for_all)


def _never_beat(patch: Patch) -> None:
    patch.attribute(PeerActor, "_beat", lambda self: None)


def _unknown_ids_are_trusted(patch: Patch) -> None:
    class Trusting(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            return self[key]

    original = LeaseKeeper.__init__

    def changed(self: LeaseKeeper, **arguments: Any) -> None:
        original(self, **arguments)
        self._leases = Trusting()

    def lease(self: LeaseKeeper, request_id: str) -> Any:
        if request_id not in self._leases:
            machine = lease_keeper.lease.Lease(request_id=request_id)
            made = lease_keeper.Tracked(lease_keeper.lease.MACHINE, machine, self._recorder, subject=request_id)
            self._leases[request_id] = made
        return self._leases[request_id]

    patch.attribute(LeaseKeeper, "__init__", changed)
    patch.attribute(LeaseKeeper, "_lease", lease)


KEEPING = (
    Mutant(
        name="first sample lets go",
        row=56,
        broken="the first of several samples of a prompt releases the blocks that the others are to read",
        apply=_first_sample_lets_go,
        oracle="held",
    ),
    Mutant(
        name="no heartbeats",
        row=62,
        broken="nothing keeps the lease of a request that waits in the queue alive",
        apply=_never_beat,
        faults=LONG_QUEUE,
        oracle="kept alive",
    ),
    Mutant(
        name="unknown ids trusted",
        row=19,
        broken="a notification that names an unknown request is taken for one that is lent",
        apply=_unknown_ids_are_trusted,
        faults=(fault(Kind.GARBAGE, "p0", 0.5, 1.0),),
        oracle="health",
    ),
)


# --- peers ----------------------------------------------------------------------------------------------------------


def _one_handshake_at_a_time(patch: Patch) -> None:
    shake_hands = PeerActor._handshake
    locks: dict[int, trio.Lock] = {}

    async def in_turn(self: PeerActor, address: PeerAddress) -> None:
        async with locks.setdefault(id(self._context), trio.Lock()):
            await shake_hands(self, address)

    patch.attribute(PeerActor, "_handshake", in_turn)


def _table_without_limit(patch: Patch) -> None:
    patch.attribute(Supervisor, "_evict_one", lambda self: True)


def _never_evict(patch: Patch) -> None:
    patch.attribute(Supervisor, "_evict_one", lambda self: False)


def _keep_the_replaced(patch: Patch) -> None:
    patch.attribute(Supervisor, "_retire_others", lambda self, address: None)


def _keep_every_remote_list(patch: Patch) -> None:
    async def only_the_agent(context: ActorContext, connection: Connection) -> None:
        for rank in connection.ranks:
            await context.nixl.unload_agent(rank.agent)

    patch.attribute(peer_actor, "disconnect", only_the_agent)


def _keep_every_agent(patch: Patch) -> None:
    async def only_the_lists(context: ActorContext, connection: Connection) -> None:
        for source in connection.sources:
            await context.nixl.port.release_descriptor_list(source.remote_list)

    patch.attribute(peer_actor, "disconnect", only_the_lists)


def _keep_half_a_handshake(patch: Patch) -> None:
    load, unload = handshake._load, handshake._unload

    async def keep(*arguments: Any) -> None:
        """Nothing is taken back."""

    async def load_and_keep(*arguments: Any) -> Any:
        handshake._unload = keep
        try:
            return await load(*arguments)
        finally:
            handshake._unload = unload

    patch.attribute(handshake, "_load", load_and_keep)


def _disconnect_without_draining(patch: Patch) -> None:
    settle = PeerActor._settle

    def settle_at_once(self: PeerActor) -> None:
        connection = self._connection
        if connection is None or self._peer.value.state is not peer_actor.peer.State.DRAINING:
            settle(self)
            return
        self._connection = msgspec.structs.replace(connection, open_reads=0)
        settle(self)

    patch.attribute(PeerActor, "_settle", settle_at_once)


PEERS = (
    Mutant(
        name="one handshake at a time",
        row=61,
        broken="handshakes with healthy engines wait behind one with a dead engine",
        apply=_one_handshake_at_a_time,
        faults=(fault(Kind.PARTITION, "d0>p0", 0.0, 4.0),),
        oracle="isolation",
    ),
    Mutant(
        name="table without limit",
        row=50,
        broken="more engines are known than the limit says",
        apply=_table_without_limit,
        oracle="leaks",
        seeds=30,
    ),
    Mutant(
        name="nobody evicted",
        row=50,
        broken="a full table of engines stays full although none of them is in use",
        apply=_never_evict,
        oracle="recovery",
        seeds=30,
    ),
    Mutant(
        name="replaced engine kept",
        row=49,
        broken="what is loaded of an engine stays after another one has taken its address",
        apply=_keep_the_replaced,
        faults=QUICK_REPLACEMENTS,
        oracle="leaks",
    ),
    Mutant(
        name="descriptor lists kept",
        row=50,
        broken="the descriptor list of a connection stays when the connection is taken down",
        apply=_keep_every_remote_list,
        faults=READ_ERRORS,
        oracle="leaks",
    ),
    Mutant(
        name="agents kept",
        row=47,
        broken="the agent of a connection that broke stays loaded, so that it can never be loaded afresh",
        apply=_keep_every_agent,
        faults=READ_ERRORS,
        oracle="recovery",
    ),
    Mutant(
        name="half a handshake kept",
        row=51,
        broken="the agent of a handshake that failed half-way stays loaded",
        apply=_keep_half_a_handshake,
        faults=(fault(Kind.PREPARE_REFUSED, "d0>p0", 0.0, 1.0),),
        oracle="recovery",
    ),
    Mutant(
        name="disconnect without draining",
        row=14,
        broken="a connection that is to be given up is taken down without waiting for its READs",
        apply=_disconnect_without_draining,
        faults=QUICK_REPLACEMENTS,
        oracle="agents",
    ),
)


# --- READs ----------------------------------------------------------------------------------------------------------


def _trust_block_ids(patch: Patch) -> None:
    patch.attribute(peer_actor, "BlockIdError", NOT_AN_ERROR_OF_THE_PRODUCT)


def _post_after_failure(patch: Patch) -> None:
    end_unposted = NixlOwner._end_unposted

    async def post(self: NixlOwner, order: ReadOrder) -> None:
        with contextlib.suppress(NixlCallFailed):
            await self.port.post_read(order.local, order.local_ids, order.remote, order.remote_ids, b"")

    def end_and_post(self: NixlOwner, order: ReadOrder, failure: TransferError | None) -> None:
        end_unposted(self, order, failure)
        if failure is None:
            assert self._nursery is not None
            self._nursery.start_soon(post, self, order)

    patch.attribute(NixlOwner, "_end_unposted", end_and_post)


def _let_errors_of_nixl_through(patch: Patch) -> None:
    patch.attribute(nixl_owner, "NixlCallFailed", NOT_AN_ERROR_OF_THE_PRODUCT)


def _end_reads_twice(patch: Patch) -> None:
    def post_read_end(self: PeerActor, connection: Connection, ended: ReadEnded) -> None:
        for _ in range(2):
            self.inbox.put(ReadMoved(connection=connection, ended=ended))

    patch.attribute(PeerActor, "_post_read_end", post_read_end)


def _lose_failed_reads(patch: Patch) -> None:
    end = PeerActor._end_read

    def end_if_completed(self: PeerActor, connection: Connection, ended: ReadEnded) -> None:
        if ended.failure is None:
            end(self, connection, ended)

    patch.attribute(PeerActor, "_end_read", end_if_completed)


READS = (
    Mutant(
        name="post after failure",
        row=4,
        broken="a READ whose request was given up before its turn is posted all the same",
        apply=_post_after_failure,
        faults=ABORTS_OF_A_CROWD,
        oracle="bytes",
    ),
    Mutant(
        name="errors of NIXL raised",
        row=30,
        broken="an error of a NIXL call is not caught where a READ is posted",
        apply=_let_errors_of_nixl_through,
        faults=READ_ERRORS,
        oracle="health",
    ),
    Mutant(
        name="block ids trusted",
        row=32,
        broken="block ids that no engine has raise in the actor that looks them up",
        apply=_trust_block_ids,
        faults=(fault(Kind.BAD_PARAMS, "d0", 0.0, 4.0),),
        oracle="health",
    ),
    Mutant(
        name="READs end twice",
        row=28,
        broken="the end of a READ is delivered twice",
        apply=_end_reads_twice,
        oracle="leaks",
    ),
    Mutant(
        name="failed READs lost",
        row=45,
        broken="a READ that failed is never told to the actor that ordered it",
        apply=_lose_failed_reads,
        faults=READ_ERRORS,
        oracle="recovery",
    ),
)


# --- crashes --------------------------------------------------------------------------------------------------------


def _recover_nothing(patch: Patch) -> None:
    patch.attribute(PeerActor, "recover", lambda self, error: None)


def _restart_nobody(patch: Patch) -> None:
    async def run_once(self: Supervisor, name: str, run: Any, recover: Any) -> None:
        try:
            await run()
        except Exception as error:
            self._log_crash(name, error)

    patch.attribute(Supervisor, "_keep_running", run_once)


def _take_the_engine_along(patch: Patch) -> None:
    async def run_once(self: Supervisor, name: str, run: Any, recover: Any) -> None:
        await run()

    patch.attribute(Supervisor, "_keep_running", run_once)


def _lose_commands(patch: Patch) -> None:
    start = Supervisor._start_pull

    def start_some(self: Supervisor, command: StartPull) -> None:
        self._dropped = getattr(self, "_dropped", 0) + 1  # type: ignore[attr-defined]
        if self._dropped % 40:  # type: ignore[attr-defined]
            start(self, command)

    patch.attribute(Supervisor, "_start_pull", start_some)


def _owner_ends_with_its_first_bug(patch: Patch) -> None:
    async def run(self: NixlOwner) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                await self._inbox.wait(float("inf"))
                while (event := self._inbox.take_one()) is not None:
                    self._handle(event)

    patch.attribute(NixlOwner, "run", run)


def _stop_without_a_word(patch: Patch) -> None:
    handle = PeerActor._handle

    def handle_most(self: PeerActor, message: Any) -> None:
        if isinstance(message, peer_actor.StopPeer):
            self._runs.clear()
        handle(self, message)

    patch.attribute(PeerActor, "_handle", handle_most)


CRASHES = (
    Mutant(
        name="nothing recovered",
        row=43,
        broken="an actor that crashed during a handshake waits for its end for ever",
        apply=_recover_nothing,
        faults=(*ACTOR_CRASHES, fault(Kind.MESSAGE_DELAY, "p0>d0", 0.0, 4.0)),
        oracle="recovery",
    ),
    Mutant(
        name="nobody restarted",
        row=None,
        broken="an actor that crashed is not started again, and its requests are lost",
        apply=_restart_nobody,
        faults=(*ACTOR_CRASHES, *STALLED_READS),
        oracle="bound",
    ),
    Mutant(
        name="a crash takes the engine along",
        row=30,
        broken="an exception in one actor ends all of them",
        apply=_take_the_engine_along,
        faults=ACTOR_CRASHES,
        oracle="bound",
    ),
    Mutant(
        name="NIXL owner ends with its first bug",
        row=30,
        broken="an exception in the NIXL owner ends the posting of every READ",
        apply=_owner_ends_with_its_first_bug,
        faults=(fault(Kind.OWNER_CRASH, "d0", 0.0, 4.0), fault(Kind.READ_SLOW, "d0>p0", 0.0, 4.0)),
        oracle="health",
    ),
    Mutant(
        name="stop without a word",
        row=None,
        broken="requests that are open when the connector stops are not reported",
        apply=_stop_without_a_word,
        faults=(fault(Kind.STOP, "d0", 3.0, 0.1), *STALLED_READS),
        oracle="bound",
    ),
    Mutant(
        name="commands lost",
        row=44,
        broken="a command of the engine thread is lost now and then",
        apply=_lose_commands,
        oracle="bound",
    ),
)

MUTANTS = (*PROOF, *REPORTS, *KEEPING, *PEERS, *READS, *CRASHES)
