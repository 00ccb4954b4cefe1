"""A request that D has in hand: what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from connector.observe.advice import NO_ROOM, WHAT_TO_DO, told
from connector.observe.traced import QUEUED
from connector.tools.explanation.answer import (
    Explanation,
    at_failure,
    blocks_in_words,
    capital,
    facts_of_leases,
    facts_of_peer,
    facts_of_queue,
    first_clause,
    happened,
    how_long,
)
from connector.tools.explanation.cases import Case
from connector.tools.explanation.rows import Live, Said, key_on_d
from connector.wire.inspection import (
    PeerRow,
    QuarantineRow,
    RequestRow,
    WithoutRoomRow,
    quarantined_blocks,
)
from statemachine import remote_engine
from statemachine.failures import LeaseOver, PeerLeaving

if TYPE_CHECKING:
    from connector.tools.live import Silent

WAITING: dict[str, tuple[str, str]] = {
    QUEUED: (
        "it waits in the queue of vLLM's scheduler on D, which has not allocated its blocks",
        "when vLLM schedules it, its READs begin; until then D keeps the lease on P alive",
    ),
    "pending_handshake": (
        "it waits for the connection to the prefill engine",
        "when P is connected its READs begin; when the attempt fails, so does the request",
    ),
    "reading": (
        "its READs from the prefill engine are under way",
        "when the last READ has ended and P is known to have kept the blocks, it is done",
    ),
    "proving": (
        "all bytes are here, and it waits for the prefill engine to confirm that it kept the blocks until then",
        "with P's answer it is done; without one it ends as LeaseNotProven",
    ),
    "draining": (
        "it has failed, and waits until none of its READs can write any more",
        "when the last READ has ended it is reported; if that takes too long its blocks are quarantined",
    ),
}
"""By state of a request that has not ended: what it waits for, and what follows."""


NO_CHECKSUMS = (
    "nothing yet; if it takes long, see whether P makes steps, with which it says the checksums of what it lends"
)


QUARANTINED_SHARE_MIN = 0.1
"""A quarantine that holds a smaller share of an engine's KV blocks is not why a request gets none."""


def explain_waiting(case: Case, said: Said[RequestRow], live: Live) -> Explanation:
    row = said.row
    waiting, follows = WAITING.get(row.state, (f"it is {row.state}", ""))
    peer = live.peer_of(said.engine_id, said.rank, row.peer)
    silence = live.silence_of(row.peer, row.address)
    kind, detail, facts = None, None, facts_of_peer(peer, silence)
    cause = f"{capital(waiting)}, for {how_long(row.since_seconds)}"
    advice = "nothing yet"
    if row.state == QUEUED:
        cause, kind, advice, follows = _why_queued(case, said, live, cause)
        if kind is None and (kept := live.quarantined_from(said.engine_id)):
            facts.append(f"a few KV blocks of D are quarantined, because READs from {kept} have not ended")
    elif row.state == "pending_handshake":
        cause, kind, detail, advice = _why_not_connected(row, peer, silence, cause)
        if row.waits_for == "checksums":
            follows = "when P has said them its READs begin"
    elif row.state in ("reading", "proving"):
        reads = f"{row.reads} READ(s) of {blocks_in_words(row.blocks)} from {row.peer}" if row.reads else row.peer
        if row.waits_for == "turn":
            behind = f"behind those of {row.queue_position} request(s)" if row.queue_position else "and are the next"
            cause = f"Its READs wait for their turn, {behind}, for {how_long(row.since_seconds)}"
        elif row.waits_for == "check":
            cause = f"Its bytes are here; with its next step D compares them with the checksums of {row.peer} (verify)"
        elif silence is not None and not silence.is_of_asker:
            kind = silence.kind
            cause = (
                f"{kind}: prefill engine {row.peer} at {row.address} does not answer ({silence.problem}); "
                f"waiting for {reads} for {how_long(row.since_seconds)}"
            )
            advice = WHAT_TO_DO.get(kind, advice)
        elif row.state == "reading":
            cause = f"Waiting for {reads}, for {how_long(row.since_seconds)}"
            advice = "nothing yet; if it takes long, see whether P hangs, or the network between P and D"
    elif row.state == "draining" and row.failure is not None:
        kind = row.failure
        detail, advice = told(kind, row.detail, advice)
        cause = f"{kind}: {first_clause(detail)}; its READs have not ended yet"
    if row.proven_seconds is not None:
        left = how_long(max(0.0, row.proven_seconds))
        if peer is not None and peer.is_builtin:
            facts.append(f"P is a built-in engine, which does not say: D takes its lease to end in {left}")
        else:
            facts.append(f"P is known to keep the blocks for {left} more")
    facts += [fact for each in case.story.requests if each.rank == said.rank for fact in facts_of_queue(each)]
    return Explanation(
        request=row.request_id,
        cause=cause,
        outcome="waiting",
        kind=kind,
        detail=detail,
        state=row.state,
        side="D",
        engine_id=said.engine_id,
        rank=said.rank,
        peer=row.peer,
        since_seconds=row.since_seconds,
        waits_for=row.waits_for,
        until_seconds=row.until_seconds,
        next=follows,
        advice=advice,
        happened=happened(case),
        facts=(*facts, *facts_of_leases(case)),
    )


class _Queued(NamedTuple):
    """What `why` says of a request that waits in vLLM's queue, as in `Explanation`."""

    cause: str
    kind: str | None
    advice: str
    next: str


def explain_no_room(case: Case, said: Said[WithoutRoomRow], live: Live) -> Explanation:
    """It has nothing to load, or no more, and waits in vLLM's queue."""
    facts = live.facts(said.engine_id)
    return Explanation(
        request=said.row.request_id,
        cause=_no_room(said.row),
        outcome="waiting",
        kind=NO_ROOM,
        state=QUEUED,
        side="P" if facts is not None and facts.role == "kv_producer" else "D",
        engine_id=said.engine_id,
        rank=said.rank,
        since_seconds=said.row.since_seconds,
        waits_for="room",
        next=_WITH_ROOM,
        advice=WHAT_TO_DO[NO_ROOM],
        happened=happened(case),
        facts=(*facts_of_leases(case),),
    )


def _no_room(row: WithoutRoomRow) -> str:
    return (
        f"{NO_ROOM}: its {row.tokens} tokens do not fit into the KV cache while blocks are kept from the pool "
        f"({row.quarantined_blocks} in quarantine and {row.lent_back_blocks} lent back when that was noticed); others "
        f"are served before it, for {how_long(row.since_seconds)}"
    )


_WITH_ROOM = "when enough of these blocks are back, vLLM schedules it"


def _why_queued(case: Case, said: Said[RequestRow], live: Live, cause: str) -> _Queued:
    """Its lease may be over already; and a pool whose blocks are quarantined has none for it."""
    row, facts = said.row, live.facts(said.engine_id)
    if (why := _gone(said, live)) is not None:
        kind = PeerLeaving.__name__ if why == remote_engine.LEFT else LeaseOver.__name__
        return _Queued(
            cause=(
                f"{kind}: prefill engine {row.peer} does not keep its blocks any more ({why}); it waits in vLLM's "
                f"queue, for {how_long(row.since_seconds)}"
            ),
            kind=kind,
            advice=WHAT_TO_DO[kind],
            next=f"when vLLM schedules it, it fails, unless D has its blocks by then: {at_failure(facts)}",
        )
    follows = WAITING[row.state][1]
    peer = live.peer_of(said.engine_id, said.rank, row.peer)
    if peer is not None and peer.failure is not None and peer.state != "ready":
        follows = (
            "D cannot tell P to keep the lease now: when vLLM schedules it, its READs begin if P is connected again "
            "and has kept the blocks; otherwise it fails"
        )
    elif peer is not None and peer.is_builtin:
        follows = (
            "when vLLM schedules it, its READs begin; it fails (LeaseOver) if they have not ended when D takes the "
            "lease of a built-in engine to be over: kv_lease_duration of D after it has heard of the request"
        )
    if case.without_room is not None:
        return _Queued(_no_room(case.without_room.row), NO_ROOM, WHAT_TO_DO[NO_ROOM], f"{_WITH_ROOM}; {follows}")
    kept = quarantined_blocks(each.row for each in live.of(QuarantineRow) if each.engine_id == said.engine_id)
    if not kept or (facts is not None and kept < QUARANTINED_SHARE_MIN * facts.blocks):
        advice = (
            "nothing yet; if it takes long, see whether D is paused or sleeps (/is_paused, /is_sleeping), how many "
            "requests run on it, and how full its KV cache is"
        )
        return _Queued(cause=cause, kind=None, advice=advice, next=follows)
    of = f" of {facts.blocks}" if facts is not None and facts.blocks else ""
    peers = live.quarantined_from(said.engine_id)
    cause = (
        f"Quarantined: {kept}{of} KV blocks of this engine are kept out of the pool, because READs from {peers} have "
        f"not ended; vLLM has not scheduled it for {how_long(row.since_seconds)}"
    )
    return _Queued(cause=cause, kind="Quarantined", advice=WHAT_TO_DO["Quarantined"], next=follows)


def _gone(said: Said[RequestRow], live: Live) -> str | None:
    """Why P does not keep the blocks of this request any more; None: as far as D knows it does."""
    return live.gone.get((said.engine_id, said.rank, key_on_d(said.row)))


def _why_not_connected(
    row: RequestRow, peer: PeerRow | None, silence: Silent | None, cause: str
) -> tuple[str, str | None, str | None, str]:
    where = f"prefill engine {row.peer} at {row.address}"
    if silence is not None and not silence.is_of_asker:
        cause = f"{silence.kind}: {where}: {silence.problem}; waiting for it for {how_long(row.since_seconds)}"
        return cause, silence.kind, None, WHAT_TO_DO.get(silence.kind, "see whether P runs")
    if row.waits_for == "checksums":
        cause = f"Waiting for the checksums of its blocks (verify) from {where}, for {how_long(row.since_seconds)}"
        return cause, None, None, NO_CHECKSUMS
    if peer is None:
        return cause, None, None, "nothing yet"
    detail, what_to_do = told(peer.failure, peer.detail, "nothing yet")
    if peer.state == "handshaking":
        last = f" (the last attempt: {peer.failure})" if peer.failure else ""
        cause = f"Waiting for the handshake with {where}{last}, for {how_long(peer.since_seconds)}"
        return cause, None, detail, "nothing yet; if it takes long, see whether P hangs"
    if peer.state in ("draining", "disconnecting") and peer.failure:
        cause = (
            f"{peer.failure}: {first_clause(detail)}; the connection is rebuilt when {peer.reads} READ(s) over it "
            f"have ended"
        )
        return cause, peer.failure, detail, what_to_do
    return f"Waiting for {where}, which is {peer.state}", None, detail, "nothing yet"
