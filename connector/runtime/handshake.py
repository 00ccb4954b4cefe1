"""One handshake with one remote engine, as a transaction.

`exchange` asks the peer's side channel what its rank looks like, and measures its clock on the way. `connect` does
that, plans the reads, loads the peer's agent and prepares its descriptors. Everything is validated before anything is
loaded; whatever was loaded is taken back when a later step fails or the attempt is cancelled. So an attempt ends in a
`Connection`, or without a trace.

Every attempt opens a socket of its own. The built-in listener has no room for a request id, so a reply that comes after
its timeout must have no socket to arrive at.
"""

from __future__ import annotations

import msgspec
import trio

from connector.layout.geometry import LayoutMismatch
from connector.layout.plan import ReadPlan, plan_reads
from connector.ports.nixl import AgentName, DescriptorListHandle, NixlCallFailed, PortClosed
from connector.ports.side_channel import Requester, SideChannelError
from connector.runtime.clock import ClockSample, to_ns
from connector.runtime.context import ActorContext
from connector.runtime.messages import PeerAddress
from connector.wire.handshake import HandshakeError, HandshakeReply, decode_reply, encode_request
from connector.wire.peer_layout import understand
from statemachine.failures import HandshakeRefused, HandshakeTimeout, Incompatible


class Connection(msgspec.Struct, kw_only=True):
    """A loaded peer. `open_reads` counts READ orders on it that have not ended; the actor that owns it keeps it."""

    agent: AgentName
    plan: ReadPlan
    local_list: DescriptorListHandle
    remote_list: DescriptorListHandle
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


async def exchange(context: ActorContext, peer: PeerAddress) -> Exchanged:
    """One question and its answer. Raises HandshakeError; bounded by the option handshake_timeout_seconds."""
    timeout_seconds = context.options.handshake_timeout_seconds
    sent_ns = context.clock.now_ns()
    with trio.move_on_after(timeout_seconds) as scope:
        frames_untrusted = await _ask(context, peer)
    received_ns = context.clock.now_ns()
    if scope.cancelled_caught:
        raise HandshakeError(HandshakeTimeout(peer=peer.engine_id, address=str(peer), timeout_seconds=timeout_seconds))
    expected_hash = context.local.compatibility_hash if context.options.enforce_handshake_compat else None
    reply = decode_reply(frames_untrusted, peer=peer.engine_id, address=str(peer), expected_hash=expected_hash)
    sample = ClockSample.from_round_trip(
        sent_ns=sent_ns, received_ns=received_ns, remote_ns=to_ns(reply.listener_clock_seconds)
    )
    return Exchanged(reply=reply, clock_sample=sample)


async def _ask(context: ActorContext, peer: PeerAddress) -> tuple[bytes, ...]:
    """Send the question over a socket of its own, and wait for as long as the caller lets us."""
    requester: Requester | None = None
    try:
        requester = context.side_channel.connect(peer.host, peer.port)
        return await requester.ask([encode_request(0, context.local.layout.tp_rank)])
    except SideChannelError as error:
        detail = f"its address cannot be used: {error.error}"
        raise HandshakeError(HandshakeRefused(peer=peer.engine_id, address=str(peer), detail=detail)) from error
    finally:
        if requester is not None:
            requester.close()


async def connect(context: ActorContext, peer: PeerAddress) -> Connection:
    """The whole handshake. Raises HandshakeError, and then nothing of the attempt is left."""
    local = context.local.layout
    exchanged = await exchange(context, peer)
    metadata = exchanged.reply.metadata
    try:
        remote = understand(metadata, tp_rank=local.tp_rank, tp_size=peer.tp_size, local=context.local)
        plan = plan_reads(local, remote)
    except LayoutMismatch as mismatch:
        raise HandshakeError(
            Incompatible(
                peer=peer.engine_id,
                address=str(peer),
                field=mismatch.field,
                local=mismatch.local,
                remote=mismatch.remote,
                advice=mismatch.advice,
            )
        ) from mismatch
    try:
        agent, local_list, remote_list = await _load(context, peer, metadata.agent_metadata, plan)
    except (NixlCallFailed, PortClosed) as error:
        raise HandshakeError(
            HandshakeRefused(peer=peer.engine_id, address=str(peer), detail=f"NIXL refused its metadata: {error}")
        ) from error
    return Connection(
        agent=agent,
        plan=plan,
        local_list=local_list,
        remote_list=remote_list,
        clock_sample=exchanged.clock_sample,
        incarnation=exchanged.incarnation,
    )


async def disconnect(context: ActorContext, connection: Connection) -> None:
    """Take back what `connect` loaded. No READ may be in flight on it."""
    try:
        await context.nixl.port.release_descriptor_list(connection.remote_list)
        await context.nixl.unload_agent(connection.agent)
    except (NixlCallFailed, PortClosed):
        return  # The port is gone or has forgotten the peer by itself; there is nothing left to take back.


async def _load(
    context: ActorContext, peer: PeerAddress, nixl_metadata: bytes, plan: ReadPlan
) -> tuple[AgentName, DescriptorListHandle, DescriptorListHandle]:
    nixl = context.nixl
    local_list = await nixl.local_list(plan.local_runs)
    agent = await nixl.load_agent(nixl_metadata)
    if agent is None:
        detail = "READs of the previous connection to it have not ended"
        raise HandshakeError(HandshakeRefused(peer=peer.engine_id, address=str(peer), detail=detail))
    try:
        remote_list = await nixl.port.prepare_remote(agent, plan.remote_runs)
    except BaseException:
        # Also on cancellation; the loop that would cancel this again is bounded by the port.
        with trio.CancelScope(shield=True):
            await nixl.unload_agent(agent)
        raise
    return agent, local_list, remote_list
