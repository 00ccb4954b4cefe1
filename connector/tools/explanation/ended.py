"""A request of D that has ended, or that its records leave open and no running engine knows: what the records say."""

from __future__ import annotations

import msgspec

from connector.observe.advice import told
from connector.observe.history import (
    DONE,
    History,
)
from connector.tools.explanation.answer import (
    Explanation,
    after_failure,
    blocks_in_words,
    facts_of_leases,
    facts_of_peer,
    facts_of_queue,
    first_clause,
    happened,
    holder_in_words,
    how_long,
    is_worth_a_word,
)
from connector.tools.explanation.cases import Case
from connector.tools.explanation.rows import Live
from connector.tools.explanation.waiting import WAITING
from connector.wire.identity import differing_factors
from connector.wire.inspection import EngineFacts, PeerRow

FACTORS_NAMED_MAX = 3
"""How many of the factors that make two engines incompatible are named in the first line."""


def explain_end(case: Case, ended: History, live: Live) -> Explanation:
    kind = ended.reason
    detail, advice = told(kind, ended.detail, "look at the log of D")
    peer = live.peer_of(ended.engine_id, ended.rank, ended.peer, because=f"{kind} {ended.detail}")
    facts = facts_of_peer(peer, live.silence_of(ended.peer, peer.address if peer is not None else None))
    others_unknown = live.silence_of(ended.engine_id, None)
    if ended.outcome == DONE and others_unknown is not None:
        cause = (
            f"Loaded on rank {ended.rank}, and whether it is on all others is not known: "
            f"{others_unknown.address} could not be asked: {others_unknown.problem}"
        )
        facts = []
        outcome, follows = "waiting", "when all ranks have loaded it, vLLM goes on with it"
        advice = "see with nixl-actor doctor which worker of D does not answer, and whether it hangs"
    elif ended.outcome == DONE:
        cause = f"Done: its KV was loaded in {how_long(ended.whole_seconds)}"
        if is_worth_a_word(ended):
            cause += f", {how_long(ended.queued_seconds)} of them in vLLM's queue on D"
        blocks = f"{blocks_in_words(ended.blocks)}, {ended.length_bytes / 1e6:.1f} MB"
        facts = [blocks, *_one_sided(case)]
        outcome, follows, advice = "served", "nothing", "nothing"
    else:
        differing = _differing_factors(kind, ended, live)
        cause = _cause_of_end(case, ended, peer, live)
        if differing:
            cause = (
                f"{kind}: prefill engine {ended.peer} and this one differ: {'; '.join(differing[:FACTORS_NAMED_MAX])}"
            )
        root = _root_of_backoff(case, ended, peer) if kind == "PeerBackoff" else None
        if root is not None and (of_root := told(*root)[1]):
            advice = f"{of_root}; P is tried again by itself"
        if kind == "Quarantined" and _has_none_in_quarantine(ended.engine_id, live):
            facts.append("D has no block in quarantine any more: the READs have ended since")
            advice = f"nothing, if it does not come again; else {advice}"
        facts += [*differing[FACTORS_NAMED_MAX:], *facts_of_queue(ended)]
        outcome, follows = "failed", after_failure(live.facts(ended.engine_id))
    if kind == "AbortedByClient":
        follows = "nothing"
    return Explanation(
        request=ended.subject,
        cause=cause,
        outcome=outcome,
        kind=kind,
        detail=detail,
        state=ended.state,
        side="D",
        engine_id=ended.engine_id,
        rank=ended.rank,
        peer=ended.peer,
        since_wall=ended.visits[-1].wall,
        next=follows,
        advice=advice,
        happened=happened(case),
        facts=(*facts, *facts_of_leases(case)),
    )


def explain_end_of_one_rank(case: Case, ended: History, live: Live) -> Explanation:
    """It has failed, and its client does not know yet: vLLM waits for all ranks."""
    answer = explain_end(case, ended, live)
    others = ", ".join(f"rank {each.rank} is {each.row.state}" for each in case.requests)
    return msgspec.structs.replace(
        answer,
        outcome="waiting",
        waits_for="other ranks",
        next=f"when all ranks have ended: {answer.next}",
        facts=(f"vLLM waits for the other ranks of D too: {others}", *answer.facts),
    )


def _one_sided(case: Case) -> list[str]:
    """D has loaded it, and P does not know."""
    held = [each for each in case.leases if each.row.state == "held"]
    if any(each.state == "expired" for each in case.story.leases):
        return ["P's lease expired all the same: the release did not reach it, or another reader never came"]
    if held and held[0].row.holders:
        return ["P still keeps the blocks, for " + ", ".join(map(holder_in_words, held[0].row.holders))]
    return []


def _cause_of_end(case: Case, ended: History, peer: PeerRow | None, live: Live) -> str:
    kind, clause = ended.reason or ended.state, first_clause(ended.detail)
    if kind == "PeerBackoff":
        root = _root_of_backoff(case, ended, peer)
        if root is not None:
            is_or_was = "is" if peer is not None and _is_same(peer, ended) and peer.state == "backoff" else "was"
            return f"{kind}: {root[0]}: {first_clause(root[1])}; P {is_or_was} not tried again yet"
    if kind == "DeadlineExceeded":
        phase = next((visit.state for visit in reversed(ended.visits) if visit.state not in _ENDS), "")
        waited = {"reading": "READs", "draining": "READs", "proving": "an answer"}.get(phase, "the connection")
        if phase == "pending_handshake":
            waited = _what_kept_it_pending(_was_connected(case, ended, peer, live), live.facts(ended.engine_id))
        return f"{kind}: {clause}: {waited} from prefill engine {ended.peer} did not come in time"
    if kind == "Quarantined":
        return f"{kind}: READs from prefill engine {ended.peer} did not end in time: {clause}"
    if kind == "QuarantineFull" and (hanging := live.quarantined_from(ended.engine_id)):
        # Which need not be the engine that this request was to be read from.
        return f"{kind}: {clause}: READs from {hanging} have not ended"
    return f"{kind}: {clause}"


OFF = msgspec.json.encode("off").decode()
"""An option, as engines show it (`EngineFacts.options`)."""
_ENDS = frozenset({"failed", "expired", "done"})


def _what_kept_it_pending(was_connected: bool | None, facts: EngineFacts | None) -> str:
    """In words, of a request whose READs had not begun. `facts`: of D."""
    connection, checksums = "the connection", "the checksums of its blocks (verify)"
    if was_connected is None and facts is not None and facts.options.get("verify", OFF) != OFF:
        return f"{connection}, or {checksums},"
    return checksums if was_connected else connection


def _was_connected(case: Case, ended: History, peer: PeerRow | None, live: Live) -> bool | None:
    """Whether the connection of its rank stood when it ended; None: that is not known. Records of it are read from
    traces; a running engine says for how long it is what it is now."""
    ended_ns = ended.records[-1].mono_ns
    before = [
        each
        for history in case.peers
        if history.rank == ended.rank
        for each in history.records
        if each.mono_ns <= ended_ns
    ]
    if before:
        return max(before, key=lambda each: each.mono_ns).to_state == "ready"
    if peer is None or peer.since_seconds is None:
        return None
    age_seconds = live.age_of(ended.records[-1])
    if age_seconds is None or peer.since_seconds < age_seconds:
        return None
    return peer.state == "ready"


def _has_none_in_quarantine(decode_id: str, live: Live) -> bool:
    """As all ranks of this D say."""
    all_answer = live.facts(decode_id) is not None and live.silence_of(decode_id, None) is None
    return all_answer and not live.quarantined_from(decode_id)


def _is_same(peer: PeerRow, ended: History) -> bool:
    """Whether P's connection has failed last by what a request was refused for: what it is now may have begun long
    after that."""
    return f"({peer.failure})" in (ended.detail or "")


def _root_of_backoff(case: Case, ended: History, peer: PeerRow | None) -> tuple[str, str | None] | None:
    """The failure that the back-off began with, and its sentence. `peer`: P's connection."""
    ended_ns = ended.records[-1].mono_ns
    for history in case.peers:
        if history.rank != ended.rank:
            continue
        before = [each for each in history.records if each.mono_ns <= ended_ns and each.reason]
        if before:
            return str(before[-1].reason), before[-1].detail
    if peer is not None and peer.failure is not None and _is_same(peer, ended):
        return peer.failure, peer.detail
    return None


def _differing_factors(kind: str | None, ended: History, live: Live) -> list[str]:
    """What differs of that which decides whether KV means the same, where both engines answer."""
    here, there = live.facts(ended.engine_id), live.facts(ended.peer)
    if kind != "Incompatible" or here is None or there is None:
        return []
    differing = differing_factors(here.factors, there.factors)
    return [f"{each.field}: {each.remote} on P, {each.local} on D" for each in differing]


def explain_recorded(case: Case, open_one: History, live: Live) -> Explanation:
    """It has not ended as far as records go, and no engine knows it: they were written by processes that are gone."""
    waiting, follows = WAITING.get(open_one.state, (f"it is {open_one.state}", ""))
    may_be_recalled = live.facts(open_one.engine_id) is not None
    peer_failures = [each for history in case.peers for each in history.records if each.reason]
    last = f" (P: {peer_failures[-1].reason})" if peer_failures and open_one.state == "pending_handshake" else ""
    cause = f"Not ended when the records do: {waiting}{last}"
    return Explanation(
        request=open_one.subject,
        cause=cause if not may_be_recalled else f"It ended a moment ago; before that {waiting}",
        outcome="waiting",
        state=open_one.state,
        side="D",
        engine_id=open_one.engine_id,
        rank=open_one.rank,
        peer=open_one.peer,
        since_wall=open_one.visits[-1].wall,
        next=follows,
        advice="ask the running engines (without --trace), or see whether D has ended",
        happened=happened(case),
        facts=(*facts_of_queue(open_one), *facts_of_leases(case)),
    )
