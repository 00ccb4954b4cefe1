"""One handshake with one remote engine, as a transaction.

The partners of a rank are those ranks of the engine that `partners` names, in each pipeline stage. `connect` asks the
side channel about all of them, plans the reads, opens a link to each rank's control socket, over which an empty hold
has to be answered, loads the agents, prepares the descriptors, and waits until something was read from each. Everything
is validated before anything is loaded; whatever was loaded is taken back when a later step fails or the attempt is
cancelled. So an attempt ends in a `Connection` to all of these ranks, or without a trace.

The links come first because each shows that the process of its rank lives. The side channel does not: it is answered
by the scheduler's process, which ends after its workers. The agent of a process that has ended should not be loaded:
UCX as it comes keeps a socket of each attempt (docs/nixl.md fact 30). And whoever answers over a link says which agent
is his: P may have been started again since it was asked, at the same ports, and UCX takes the agent of the process
before for that of the new one where that listens at its port (fact 44). What that one has lent would be proven, and
other memory read. So an agent of another name is not loaded.

The first READ is waited for so that this holds from then on: the connection belongs to one process, and what is asked
over the links later is asked of the same one, or of nobody. And where nothing can be read, because a firewall drops
what goes to the ports of UCX, no request's blocks have to wait for the end of its READs.

Sizes are facts of the engine. Rank (0, 0), which every engine has, is asked first: an engine with this connector says
there how many ranks it has, and a request that says otherwise is refused. Of a built-in engine only the client says it;
what can be verified from the lengths of blocks is (`layout`), and connections are kept for each set of sizes apart.

Every question opens a socket of its own. The built-in listener has no room for a request id, so a reply that comes
after its timeout must have no socket to arrive at.

A timeout says nothing of the peer where this process stood still meanwhile, stopped or without the interpreter: an
answer may have come that nobody took. What was waited for is begun anew then, once, and nobody else hears of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TypeVar

import msgspec
import trio

from connector.addresses import is_ip_address, join_address
from connector.clock import NS_PER_SECOND
from connector.layout.geometry import LayoutMismatch, RankId, RankLayout
from connector.layout.plan import EnginePlan, ReadPlan, plan_in_steps
from connector.layout.plan_cache import geometry_in_steps
from connector.layout.remote import layout_in_steps, own_regions, stated_by
from connector.layout.sources import partners
from connector.layout.steps import Steps
from connector.layout.verification import Match, match
from connector.ports.nixl import AgentName, DescriptorListHandle, NixlCallFailed, PortClosed
from connector.ports.side_channel import (
    AccessRefused,
    DescriptorsExhausted,
    Link,
    NameNotResolved,
    Reached,
    SideChannelError,
    failure_of,
)
from connector.protocol import PeerAddress
from connector.runtime.context import ActorContext
from connector.runtime.reads import AgentOwner
from connector.wire.bounded import RANKS_MAX, DecodeFailed
from connector.wire.control import Hold, HoldAnswer, decode_answer, encode_request
from connector.wire.handshake import ActorExtension, HandshakeError, HandshakeReply, decode_reply, worker_name
from connector.wire.handshake import encode_request as encode_metadata_request
from statemachine.failures import (
    BadParams,
    ControlLinkLost,
    Failure,
    FirstReadNeverEnded,
    HandshakeRefused,
    HandshakeTimeout,
    Incompatible,
    NoDescriptorLeft,
    NotAllowed,
    PreviousReadsInFlight,
    and_stood_still,
)

ASKED_AT_ONCE = 16
"""Questions that are open to one engine at a time: how many ranks it has is what a request says."""

FIRST_RANK = RankId(0, 0)

_REACHED_DETAIL = {
    Reached.NOTHING: (
        "nothing was sent, because this engine itself did not come to it: was its process stopped, or its machine "
        "overloaded?"
    ),
    Reached.ADDRESS: (
        "no connection came about: is its machine up, does VLLM_NIXL_SIDE_CHANNEL_HOST on it name an address that this "
        "engine can reach, does a firewall drop the packets?"
    ),
    Reached.PORT: (
        "the connection was accepted and nothing was heard over it: does the engine hang, or does something else "
        "listen on that port?"
    ),
    Reached.LISTENER: "the connection stands and the question was not answered: does the engine hang?",
}
"""What a timeout means, by how far the question came."""

T = TypeVar("T")


class RemoteRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of the peer that keeps blocks for us, and has to be told when we are done with them.

    Attributes:
        worker: its name, for people.
        consumers: how many ranks of our engine it is the partner of.
        link: to its control socket; None where it is a built-in one.
    """

    agent: AgentName
    worker: str
    consumers: int
    link: Link | None = None


class ReadSource(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of the peer that we read from."""

    plan: ReadPlan
    local_list: DescriptorListHandle
    remote_list: DescriptorListHandle
    rank: int
    """Its place among `Connection.ranks`."""
    match: Match | None
    """How its READs are compared with checksums; None: they are not."""
    regions: tuple[str, ...]
    """Names of that rank's regions."""


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded peer, at the address where it answered. `sources` are in the order of `plan.reads`; `owner` is who its
    agents are loaded for; `life` names its processes: agents of a restarted one have other names."""

    peer: PeerAddress
    plan: EnginePlan
    ranks: tuple[RemoteRank, ...]
    sources: tuple[ReadSource, ...]
    is_builtin: bool
    life: str
    owner: AgentOwner


async def connect(context: ActorContext, peer: PeerAddress, owner: AgentOwner) -> Connection:
    """The whole handshake. Raises HandshakeError, and then nothing of the attempt is left."""
    first = await _exchange(context, peer, FIRST_RANK)
    _require_true_sizes(peer, first.actor)
    ranks = _partners(context, peer)
    answers = {FIRST_RANK: first}

    async def ask(rank: RankId) -> None:
        answers[rank] = await _exchange(context, peer, rank)

    await _for_each(ask, [rank for rank in ranks if rank != FIRST_RANK])
    _require_one_life(peer, list(answers.values()))
    replies = [answers[rank] for rank in ranks]
    plan = await context.pace.run(_plan(context, peer, ranks, replies))
    matches = _matches(context, peer, ranks, replies, plan)
    _require_new_memory(context, peer, replies)
    try:
        return await _load(context, peer, owner, ranks, replies, plan, matches)
    except (NixlCallFailed, PortClosed) as error:
        if isinstance(error, NixlCallFailed) and error.no_descriptor_left:
            raise HandshakeError(NoDescriptorLeft(peer=peer.engine_id, address=str(peer))) from error
        # UCX connects over tcp while NIXL loads an agent or reads for the first time (docs/nixl.md fact 30).
        found = f"NIXL of this engine could not connect to P's UCX port, or refused its metadata: {error}"
        raise _refused(peer, found) from error


async def disconnect(
    context: ActorContext, connection: Connection, failure: Failure | None, on_over: Callable[[], None]
) -> None:
    """Take back what `connect` loaded. No READ may be in flight on it.

    Args:
        failure: what has made it useless to all connections that share its agents; None: nothing.
        on_over: called once, when all is taken back: perhaps after this has returned, when others have let go.
    """
    left = len(connection.ranks) + 1

    def one_less() -> None:
        nonlocal left
        left -= 1
        if not left:
            on_over()

    lists = [source.remote_list for source in connection.sources]
    agents = [rank.agent for rank in connection.ranks]
    await _unload(context, connection.owner, agents, lists, failure, one_less)
    _close(context, [rank.link for rank in connection.ranks if rank.link is not None])
    one_less()


# --- questions ------------------------------------------------------------------------------------------------------


async def _exchange(context: ActorContext, peer: PeerAddress, rank: RankId) -> HandshakeReply:
    """One question about one rank. Raises HandshakeError."""
    frames_untrusted = await _ask(context, peer, rank)
    expected_hash = context.local.compatibility_hash if context.options.enforce_handshake_compat else None
    reply = decode_reply(
        frames_untrusted,
        peer=peer.engine_id,
        address=str(peer),
        expected_hash=expected_hash,
        identity=context.local.identity,
        not_packed=context.local.not_packed,
    )
    if reply.actor is not None and (reply.actor.pp_rank, reply.actor.tp_rank) != rank:
        found = f"it answered about rank {(reply.actor.pp_rank, reply.actor.tp_rank)} when asked about {tuple(rank)}"
        raise _refused(peer, found)
    return reply


async def _ask(context: ActorContext, peer: PeerAddress, rank: RankId) -> tuple[bytes, ...]:
    """Send the question over a socket of its own, and wait for the reply's frames. Raises HandshakeError."""
    reached = Reached.NOTHING

    async def ask() -> tuple[bytes, ...]:
        nonlocal reached
        with closing(context.side_channel.connect(peer.host, peer.port)) as requester:
            try:
                return await requester.ask([encode_metadata_request(*rank)])
            finally:
                reached = requester.reached

    try:
        return await _in_time(context, ask)
    except _TooLate as late:
        raise HandshakeError(
            _unanswered(peer, reached, context.options.handshake_timeout_seconds, late.late_seconds)
        ) from None
    except SideChannelError as error:
        raise HandshakeError(failure_of(error, peer=peer.engine_id, address=str(peer))) from error


class _TooLate(Exception):
    """A wait has ended without what was waited for. `late_seconds`: for how long this process stood still meanwhile."""

    def __init__(self, late_seconds: int) -> None:
        super().__init__(late_seconds)
        self.late_seconds = late_seconds


async def _in_time(context: ActorContext, attempt: Callable[[], Awaitable[T]]) -> T:
    """What `attempt` returns within handshake_timeout_seconds; begun anew, once, if this process stood still. Raises
    _TooLate."""
    timeout_seconds, late_seconds = context.options.handshake_timeout_seconds, 0
    for _ in range(2):
        began_ns = context.clock.now_ns()
        with trio.move_on_after(timeout_seconds):
            return await attempt()
        waited_seconds = (context.clock.now_ns() - began_ns) / NS_PER_SECOND
        late_seconds = max(0, int(waited_seconds - timeout_seconds))
        if not late_seconds:
            break
    raise _TooLate(late_seconds)


def _unanswered(peer: PeerAddress, reached: Reached, timeout_seconds: float, late_seconds: int) -> Failure:
    if reached is Reached.NOTHING and not is_ip_address(peer.host):
        said = (
            f"no answer within {timeout_seconds:g} s: name servers are silent or slow; one that comes later counts for "
            "the next attempt"
        )
        error = NameNotResolved(peer.host, peer.port, said)
        return failure_of(error, peer=peer.engine_id, address=str(peer))
    if reached is Reached.NO_DESCRIPTOR:
        return NoDescriptorLeft(peer=peer.engine_id, address=str(peer))
    return HandshakeTimeout(
        peer=peer.engine_id,
        address=str(peer),
        timeout_seconds=timeout_seconds,
        detail=_REACHED_DETAIL[reached],
        late_seconds=late_seconds,
    )


async def _for_each(ask: Callable[[RankId], Awaitable[None]], ranks: Sequence[RankId]) -> None:
    """Ask about all ranks, some at a time. Raises the first rank's HandshakeError when any fails."""
    errors: dict[RankId, HandshakeError] = {}
    turns = trio.CapacityLimiter(ASKED_AT_ONCE)

    async def ask_one(rank: RankId, nursery: trio.Nursery) -> None:
        try:
            async with turns:
                await ask(rank)
        except HandshakeError as error:
            errors[rank] = error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for rank in ranks:
            nursery.start_soon(ask_one, rank, nursery)
    if errors:
        raise errors[min(errors)]


# --- what the answers must be ---------------------------------------------------------------------------------------


def _require_true_sizes(peer: PeerAddress, facts: ActorExtension | None) -> None:
    """The sizes in kv_transfer_params come from the client; those in the handshake are the engine's own."""
    if facts is None:
        return
    for field in ("tp_size", "dcp_size", "pp_size"):
        expected, found = getattr(facts, field), getattr(peer, field)
        if expected != found:
            said = f"{expected}, as engine {peer.engine_id} says itself"
            raise HandshakeError(BadParams(field=field, expected=said, found=str(found)))


def _require_one_life(peer: PeerAddress, replies: Sequence[HandshakeReply]) -> None:
    if len({reply.actor.life if reply.actor is not None else None for reply in replies}) > 1:
        raise _refused(peer, "it restarted while its ranks were asked")


def _partners(context: ActorContext, peer: PeerAddress) -> list[RankId]:
    """Raises HandshakeError(Incompatible) when they would be too many."""
    local = context.local.layout
    in_stage = partners(local.tp_rank, local.tp_size, peer.tp_size, local.dcp_size, peer.dcp_size)
    if not 0 < peer.pp_size * len(in_stage) <= RANKS_MAX:
        ranks = f"{len(in_stage)} in each of {peer.pp_size} stages"
        advice = f"a rank can have 1 to {RANKS_MAX} partners; are the parallel sizes in kv_transfer_params those of P?"
        raise _incompatible(peer, LayoutMismatch("number of ranks to read from", f"up to {RANKS_MAX}", ranks, advice))
    return [RankId(stage, tp_rank) for stage in range(peer.pp_size) for tp_rank in in_stage]


def _plan(
    context: ActorContext, peer: PeerAddress, ranks: Sequence[RankId], replies: Sequence[HandshakeReply]
) -> Steps[EnginePlan]:
    """Raises HandshakeError(Incompatible) when we cannot read what these ranks hold."""
    local = context.local
    stated = [stated_by(reply.actor.identity) if reply.actor is not None else None for reply in replies]
    geometry = yield from geometry_in_steps(
        [(rank, reply.metadata, said) for rank, reply, said in zip(ranks, replies, stated, strict=True)],
        own_engine_id=local.layout.engine_id,
        tp_size=peer.tp_size,
        dcp_size=peer.dcp_size,
    )
    plan = context.plans.find(geometry)
    if plan is not None:
        return plan
    try:
        ours = own_regions(local.layout)
        remotes: list[RankLayout] = []
        for rank, reply, said in zip(ranks, replies, stated, strict=True):
            remote = yield from layout_in_steps(
                reply.metadata, rank=rank, tp_size=peer.tp_size, local=local, ours=ours, stated=said
            )
            if remote.dcp_size != peer.dcp_size:
                advice = f"the engine itself says {remote.dcp_size}; kv_transfer_params have to be forwarded unchanged"
                raise LayoutMismatch("dcp_size", local.layout.dcp_size, peer.dcp_size, advice)
            remotes.append(remote)
        plan = yield from plan_in_steps(local.layout, remotes, local.permute)
    except LayoutMismatch as mismatch:
        raise _incompatible(peer, mismatch) from mismatch
    context.plans.keep(geometry, plan)
    return plan


def _matches(
    context: ActorContext,
    peer: PeerAddress,
    ranks: Sequence[RankId],
    replies: Sequence[HandshakeReply],
    plan: EnginePlan,
) -> Mapping[RankId, Match]:
    """How READs are compared with checksums, by rank; empty: they are not to be.

    Raises HandshakeError(Incompatible) when they are to be and cannot: nothing is read unverified then.
    """
    wanted = context.options.verify
    if wanted == "off":
        return {}
    by_rank = dict(zip(ranks, replies, strict=True))
    try:
        for reply in replies:
            made = reply.actor.verify if reply.actor is not None else "off, in the built-in connector"
            if made not in (wanted, "all"):
                advice = "set the option verify on that engine too, or off on this one"
                raise LayoutMismatch("verify", wanted, made, advice)
        return {read.remote_rank: match(read, by_rank[read.remote_rank].metadata) for read in plan.reads}
    except LayoutMismatch as mismatch:
        raise _incompatible(peer, mismatch) from mismatch


def _require_new_memory(context: ActorContext, peer: PeerAddress, replies: Sequence[HandshakeReply]) -> None:
    """Raises HandshakeError(Incompatible) for memory that UCX would take for another's."""
    try:
        for reply in replies:
            if reply.actor is not None:
                context.mapped.require_unlike(reply.actor.device_allocations, reply.actor.life)
    except LayoutMismatch as mismatch:
        raise _incompatible(peer, mismatch) from mismatch


# --- what is loaded -------------------------------------------------------------------------------------------------


async def _load(
    context: ActorContext,
    peer: PeerAddress,
    owner: AgentOwner,
    ranks: Sequence[RankId],
    replies: Sequence[HandshakeReply],
    plan: EnginePlan,
    matches: Mapping[RankId, Match],
) -> Connection:
    reads = context.reads
    consumers = {read.remote_rank: read.consumers for read in plan.reads}
    consumers |= {notified.remote_rank: notified.consumers for notified in plan.notify_only}
    local_lists = [await reads.local_list(read.local_runs) for read in plan.reads]
    agents: dict[RankId, AgentName] = {}
    remote_lists: list[DescriptorListHandle] = []
    links: dict[RankId, Link] = {}
    agents_there: dict[RankId, str] = {}
    facts = {rank: reply.actor for rank, reply in zip(ranks, replies, strict=True) if reply.actor is not None}

    async def open_link(rank: RankId) -> None:
        links[rank], agents_there[rank] = await _open_link(context, peer, facts[rank], consumers[rank])

    try:
        await _for_each(open_link, list(facts))
        for rank, reply in zip(ranks, replies, strict=True):
            metadata, there = reply.metadata.agent_metadata, agents_there.get(rank, "")
            _require_same_process(peer, there, reads.port.agent_named_in(metadata))
            agent = await reads.load_agent(metadata, owner)
            if agent is None:
                raise HandshakeError(PreviousReadsInFlight(peer=peer.engine_id, address=str(peer)))
            agents[rank] = agent
            _require_same_process(peer, there, agent)  # where only NIXL could make out the name
        for read in plan.reads:
            remote_list = await reads.port.prepare_remote(agents[read.remote_rank], read.remote_runs)
            remote_lists.append(remote_list)  # one by one: those before one that fails are taken back
        await _reach(context, peer, agents)
        if any(map(reads.is_lost, agents.values())):
            raise _refused(peer, "another connection to it has failed meanwhile")
        for said in facts.values():
            context.mapped.note(said.device_allocations, said.life)
    except BaseException:
        # Also on cancellation; the loop that would cancel this again is bounded by the port.
        _close(context, links.values())
        with trio.CancelScope(shield=True):
            await _unload(context, owner, list(agents.values()), remote_lists)
        raise
    sources = zip(plan.reads, local_lists, remote_lists, strict=True)
    names = {rank: tuple(reply.metadata.region_names or ()) for rank, reply in zip(ranks, replies, strict=True)}
    return Connection(
        peer=peer,
        plan=plan,
        ranks=tuple(
            RemoteRank(agent=agents[rank], worker=worker_name(*rank), consumers=consumers[rank], link=links.get(rank))
            for rank in ranks
        ),
        sources=tuple(
            ReadSource(
                plan=read,
                local_list=local,
                remote_list=remote,
                rank=ranks.index(read.remote_rank),
                match=matches.get(read.remote_rank),
                regions=names[read.remote_rank],
            )
            for read, local, remote in sources
        ),
        is_builtin=not facts,
        life=" ".join(sorted(agents.values())),
        owner=owner,
    )


async def _reach(context: ActorContext, peer: PeerAddress, agents: Mapping[RankId, AgentName]) -> None:
    """Wait for the first READ from each. Raises HandshakeError, NixlCallFailed."""
    worker = ""

    async def reach() -> None:
        nonlocal worker
        for rank, agent in agents.items():
            worker = worker_name(*rank)
            await context.reads.port.reach(agent)

    try:
        await _in_time(context, reach)
    except _TooLate as late:
        raise HandshakeError(
            FirstReadNeverEnded(
                peer=peer.engine_id,
                address=str(peer),
                worker=worker,
                timeout_seconds=context.options.handshake_timeout_seconds,
                late_seconds=late.late_seconds,
            )
        ) from None


def _require_same_process(peer: PeerAddress, there: str, agent: AgentName | None) -> None:
    """`there`: the agent of the process that answers for leases; empty: it does not say. None: nobody knows yet."""
    if agent is not None and there not in ("", agent):
        raise _refused(peer, "it was started again while it was asked")


async def _open_link(
    context: ActorContext, peer: PeerAddress, facts: ActorExtension, consumers: int
) -> tuple[Link, str]:
    """Connect to a rank's control socket, and see an empty hold answered: a firewall is found here, not later. Returns
    also the name of the agent there; empty: it does not say."""
    where = f"its control socket at {join_address(facts.control_host, facts.control_port)}"
    local = context.local.layout
    probe = Hold(engine_id=local.engine_id, rank=local.tp_rank, ranks=consumers, sent_ns=0, leases=())

    async def probed() -> tuple[Link, str]:
        link = await context.side_channel.open_link(facts.control_host, facts.control_port, facts.control_key)
        try:
            link.send(encode_request(probe))
            answer = decode_answer(await link.receive())
            if not isinstance(answer, HoldAnswer):
                raise DecodeFailed("not the answer to a hold")
        except BaseException:
            link.close()
            raise
        return link, answer.agent

    try:
        return await _in_time(context, probed)
    except AccessRefused as error:
        detail = f"{where}: {error.error}"
        raise HandshakeError(NotAllowed(peer=peer.engine_id, address=str(peer), detail=detail)) from error
    except DescriptorsExhausted as error:
        raise HandshakeError(failure_of(error, peer=peer.engine_id, address=str(peer))) from error
    except (_TooLate, SideChannelError, DecodeFailed) as error:
        if isinstance(error, _TooLate):
            stood_still = and_stood_still(error.late_seconds)
            reason = f"nothing came within {context.options.handshake_timeout_seconds:g} s{stood_still}"
        else:
            reason = error.error if isinstance(error, SideChannelError) else str(error)
        detail = f"{where} did not answer: {reason}"
        raise HandshakeError(ControlLinkLost(peer=peer.engine_id, address=str(peer), detail=detail)) from error


async def _unload(
    context: ActorContext,
    owner: AgentOwner,
    agents: Sequence[AgentName],
    remote_lists: Sequence[DescriptorListHandle],
    failure: Failure | None = None,
    on_removed: Callable[[], None] = lambda: None,
) -> None:
    """Never raises: what one call costs must not keep an agent loaded, which could never be loaded again."""
    reads = context.reads
    for remote_list in remote_lists:
        await _attempt(context, partial(reads.port.release_descriptor_list, remote_list))
    for agent in agents:
        await _attempt(context, partial(reads.unload_agent, agent, owner, failure, on_removed))


async def _attempt(context: ActorContext, call: Callable[[], Awaitable[None]]) -> None:
    try:
        await call()
    except (NixlCallFailed, PortClosed):
        return  # The port is gone or has forgotten the peer by itself, and what it held for it.
    except Exception as error:
        context.log_crash("tear-down of a connection", error)


def _close(context: ActorContext, links: Iterable[Link]) -> None:
    """All of them; never raises."""
    for link in links:
        try:
            link.close()
        except Exception as error:
            context.log_crash("closing of a control link", error)


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
