"""One handshake with one remote engine, as a transaction.

A rank deals with those ranks of the engine that `partners` names, in each pipeline stage. `exchange` asks the side
channel what one of them looks like, and measures the engine's clock on the way. `connect` does that for all of them at
once, plans the reads, loads the agents and prepares the descriptors. Everything is validated before anything is loaded;
whatever was loaded is taken back when a later step fails or the attempt is cancelled. So an attempt ends in a
`Connection` to all of these ranks, or without a trace.

Every question opens a socket of its own. The built-in listener has no room for a request id, so a reply that comes
after its timeout must have no socket to arrive at.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import trio

from connector.layout.geometry import LayoutMismatch, RankId, RankLayout
from connector.layout.plan import EnginePlan, ReadPlan, plan_engine
from connector.layout.sources import partners
from connector.ports.nixl import AgentName, DescriptorListHandle, NixlCallFailed, PortClosed
from connector.ports.side_channel import Requester, SideChannelError
from connector.runtime.clock import ClockSample, to_ns
from connector.runtime.context import ActorContext, LocalRank
from connector.runtime.messages import PeerAddress
from connector.wire.handshake import HandshakeError, HandshakeReply, decode_reply, encode_request
from connector.wire.peer_layout import understand
from statemachine.failures import HandshakeRefused, HandshakeTimeout, Incompatible

ASKED_AT_ONCE = 16
"""Questions that are open to one engine at a time: how many ranks it has is what a request says."""

RANKS_MAX = 1024
"""Ranks of one engine that a rank deals with."""


class RemoteRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of the peer that keeps blocks for us, and has to be told when we are done with them."""

    agent: AgentName
    consumers: int
    """How many ranks of our engine it waits for."""


class ReadSource(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of the peer that we read from."""

    plan: ReadPlan
    local_list: DescriptorListHandle
    remote_list: DescriptorListHandle


class Connection(msgspec.Struct, kw_only=True):
    """A loaded peer. `open_reads` counts READ orders on it that have not ended; the actor that owns it keeps it."""

    plan: EnginePlan
    ranks: tuple[RemoteRank, ...]
    sources: tuple[ReadSource, ...]
    """In the order of `plan.reads`."""
    clock_sample: ClockSample
    incarnation: str | None
    open_reads: int = 0


class Exchanged(msgspec.Struct, frozen=True, kw_only=True):
    """What the peer's side channel said."""

    reply: HandshakeReply
    clock_sample: ClockSample

    @property
    def incarnation(self) -> str | None:
        return self.reply.actor.incarnation if self.reply.actor is not None else None


async def exchange(context: ActorContext, peer: PeerAddress, rank: RankId | None = None) -> Exchanged:
    """One question about one rank (None: any that we deal with) and its answer.

    Raises HandshakeError; bounded by the option handshake_timeout_seconds.
    """
    if rank is None:
        rank = _partners(context, peer)[0]
    timeout_seconds = context.options.handshake_timeout_seconds
    sent_ns = context.clock.now_ns()
    with trio.move_on_after(timeout_seconds) as scope:
        frames_untrusted = await _ask(context, peer, rank)
    received_ns = context.clock.now_ns()
    if scope.cancelled_caught:
        raise HandshakeError(HandshakeTimeout(peer=peer.engine_id, address=str(peer), timeout_seconds=timeout_seconds))
    expected_hash = context.local.compatibility_hash if context.options.enforce_handshake_compat else None
    reply = decode_reply(frames_untrusted, peer=peer.engine_id, address=str(peer), expected_hash=expected_hash)
    sample = ClockSample.from_round_trip(
        sent_ns=sent_ns, received_ns=received_ns, remote_ns=to_ns(reply.listener_clock_seconds)
    )
    return Exchanged(reply=reply, clock_sample=sample)


async def _ask(context: ActorContext, peer: PeerAddress, rank: RankId) -> tuple[bytes, ...]:
    """Send the question over a socket of its own, and wait for as long as the caller lets us."""
    requester: Requester | None = None
    try:
        requester = context.side_channel.connect(peer.host, peer.port)
        return await requester.ask([encode_request(*rank)])
    except SideChannelError as error:
        raise _refused(peer, f"its address cannot be used: {error.error}") from error
    finally:
        if requester is not None:
            requester.close()


def _partners(context: ActorContext, peer: PeerAddress) -> list[RankId]:
    """Raises HandshakeError(Incompatible) when they would be too many."""
    local = context.local.layout
    in_stage = partners(local.tp_rank, local.tp_size, peer.tp_size, local.dcp_size, peer.dcp_size)
    if not 0 < peer.pp_size * len(in_stage) <= RANKS_MAX:
        ranks = f"{len(in_stage)} in each of {peer.pp_size} stages"
        advice = f"a rank can deal with 1 to {RANKS_MAX}; are the parallel sizes in kv_transfer_params those of P?"
        raise _incompatible(peer, LayoutMismatch("number of ranks to read from", f"up to {RANKS_MAX}", ranks, advice))
    return [RankId(stage, tp_rank) for stage in range(peer.pp_size) for tp_rank in in_stage]


async def connect(context: ActorContext, peer: PeerAddress) -> Connection:
    """The whole handshake. Raises HandshakeError, and then nothing of the attempt is left."""
    ranks = _partners(context, peer)
    answers = await _exchange_all(context, peer, ranks)
    incarnations = {answer.incarnation for answer in answers}
    if len(incarnations) > 1:
        raise _refused(peer, "it restarted while its ranks were asked")
    plan = _plan(context, peer, ranks, answers)
    try:
        remote_ranks, sources = await _load(context, peer, ranks, answers, plan)
    except (NixlCallFailed, PortClosed) as error:
        raise _refused(peer, f"NIXL refused its metadata: {error}") from error
    return Connection(
        plan=plan,
        ranks=remote_ranks,
        sources=sources,
        clock_sample=min((answer.clock_sample for answer in answers), key=lambda sample: sample.error_ns),
        incarnation=answers[0].incarnation,
    )


async def _exchange_all(context: ActorContext, peer: PeerAddress, ranks: Sequence[RankId]) -> list[Exchanged]:
    """The answers about all ranks, in their order. Raises the first rank's HandshakeError when any fails."""
    answers: dict[RankId, Exchanged] = {}
    errors: dict[RankId, HandshakeError] = {}
    turns = trio.CapacityLimiter(ASKED_AT_ONCE)

    async def ask(rank: RankId, nursery: trio.Nursery) -> None:
        try:
            async with turns:
                answers[rank] = await exchange(context, peer, rank)
        except HandshakeError as error:
            errors[rank] = error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for rank in ranks:
            nursery.start_soon(ask, rank, nursery)
    if errors:
        raise errors[min(errors)]
    return [answers[rank] for rank in ranks]


def _plan(
    context: ActorContext, peer: PeerAddress, ranks: Sequence[RankId], answers: Sequence[Exchanged]
) -> EnginePlan:
    """Raises HandshakeError(Incompatible) when we cannot read what these ranks hold."""
    try:
        remotes: list[RankLayout] = []
        for rank, answer in zip(ranks, answers, strict=True):
            remote = understand(answer.reply.metadata, rank=rank, tp_size=peer.tp_size, local=context.local)
            if remote.dcp_size != peer.dcp_size:
                advice = f"the engine itself says {remote.dcp_size}; kv_transfer_params have to be forwarded unchanged"
                raise LayoutMismatch("dcp_size", context.local.layout.dcp_size, peer.dcp_size, advice)
            remotes.append(remote)
        return plan_engine(context.local.layout, remotes, _landing(context.local, remotes))
    except LayoutMismatch as mismatch:
        raise _incompatible(peer, mismatch) from mismatch


def _landing(local: LocalRank, remotes: Sequence[RankLayout]) -> RankLayout | None:
    """Where READs are to land, if it is not where the KV is to stay: what lies innermost is as the peer has it."""
    landing = local.landing
    if landing is not None and all(remote.layout_name[-2:] == landing.layout_name[-2:] for remote in remotes):
        return landing
    return None


async def disconnect(context: ActorContext, connection: Connection) -> None:
    """Take back what `connect` loaded. No READ may be in flight on it."""
    await _unload(context, [rank.agent for rank in connection.ranks], [each.remote_list for each in connection.sources])


async def _load(
    context: ActorContext, peer: PeerAddress, ranks: Sequence[RankId], answers: Sequence[Exchanged], plan: EnginePlan
) -> tuple[tuple[RemoteRank, ...], tuple[ReadSource, ...]]:
    nixl = context.nixl
    consumers = {read.remote_rank: read.consumers for read in plan.reads}
    consumers |= {notified.remote_rank: notified.consumers for notified in plan.notify_only}
    local_lists = [await nixl.local_list(read.local_runs) for read in plan.reads]
    agents: dict[RankId, AgentName] = {}
    remote_lists: list[DescriptorListHandle] = []
    try:
        for rank, answer in zip(ranks, answers, strict=True):
            agent = await nixl.load_agent(answer.reply.metadata.agent_metadata)
            if agent is None:
                raise _refused(peer, "READs of the previous connection to it have not ended")
            agents[rank] = agent
        for read in plan.reads:
            remote_list = await nixl.port.prepare_remote(agents[read.remote_rank], read.remote_runs)
            remote_lists.append(remote_list)  # one by one: those before one that fails are taken back
    except BaseException:
        # Also on cancellation; the loop that would cancel this again is bounded by the port.
        with trio.CancelScope(shield=True):
            await _unload(context, list(agents.values()), remote_lists)
        raise
    sources = zip(plan.reads, local_lists, remote_lists, strict=True)
    return (
        tuple(RemoteRank(agent=agents[rank], consumers=consumers[rank]) for rank in ranks),
        tuple(ReadSource(plan=read, local_list=local, remote_list=remote) for read, local, remote in sources),
    )


async def _unload(
    context: ActorContext, agents: Sequence[AgentName], remote_lists: Sequence[DescriptorListHandle]
) -> None:
    try:
        for remote_list in remote_lists:
            await context.nixl.port.release_descriptor_list(remote_list)
    except (NixlCallFailed, PortClosed):
        pass  # The port is gone or has forgotten the peer by itself, and its lists with it.
    for agent in agents:
        try:
            await context.nixl.unload_agent(agent)
        except (NixlCallFailed, PortClosed):
            continue  # Likewise; there is nothing left to take back.


def _incompatible(peer: PeerAddress, mismatch: LayoutMismatch) -> HandshakeError:
    return HandshakeError(
        Incompatible(
            peer=peer.engine_id,
            address=str(peer),
            field=mismatch.field,
            local=mismatch.local,
            remote=mismatch.remote,
            advice=mismatch.advice,
        )
    )


def _refused(peer: PeerAddress, detail: str) -> HandshakeError:
    return HandshakeError(HandshakeRefused(peer=peer.engine_id, address=str(peer), detail=detail))
