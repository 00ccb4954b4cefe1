"""What D is not known to have read: a lease, a prompt that was computed where it came to, or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence

from connector.observe import catalogue
from connector.observe.advice import (
    ALREADY_READ,
    FREED_ON_P,
    NO_PARAMETERS,
    NO_ROOM,
    NOT_READ,
    OTHER_ADAPTER,
    OTHER_MEDIA,
    WHAT_TO_DO,
)
from connector.observe.history import (
    deciding_rank,
)
from connector.tools.explanation.answer import (
    Explanation,
    capital,
    fact_of_read_back,
    facts_of_leases,
    facts_of_silent,
    happened,
    holder_in_words,
    how_long,
)
from connector.tools.explanation.cases import Case
from connector.tools.explanation.rows import Live, Said
from connector.tools.names import NAMES_MAX, some_of
from connector.wire.inspection import EngineRow, LocalPrefillRow
from statemachine import hold
from statemachine.failures import LeaseExpired

HOLDERS_GONE_ADVICE = (
    "see whether those decode engines have ended: one that has not connects again by itself, and of one that has the "
    "blocks come back with the end of the lease"
)
LEASE_WAITING: dict[str, tuple[str, str, str]] = {
    "computing": (
        "the prefill engine computes its prompt, or waits for more of it where input is streamed",
        "when the prompt is computed, its blocks are lent to D",
        "nothing: the router sends it to a decode engine when it has the answer of the prefill engine; if that takes "
        "too long, see how many requests that one serves (vllm:num_requests_running, vllm:num_requests_waiting)",
    ),
    "held": (
        "the prefill engine keeps its blocks, and no decode engine is known to read them",
        "when nobody asks for them in time, the lease expires and the blocks are freed",
        "see whether the router sent it to a decode engine",
    ),
}
"""By state of a lease, where no D is known: what it waits for, what comes next, what to do."""


def explain_lease(case: Case, live: Live) -> Explanation:
    """Only P knows of it."""
    if case.is_lent_back:
        return _explain_read_back(case, live)
    recorded = deciding_rank(case.story.leases) if case.story.leases else None
    said = case.leases[0] if case.leases else None
    state = said.row.state if said is not None else recorded.state if recorded is not None else ""
    teller = said or recorded
    engine_id = teller.engine_id if teller is not None else None
    since = said.row.since_seconds if said is not None else None
    until = said.row.deadline_seconds if said is not None else None
    kind, outcome, advice, follows = None, "waiting", "nothing", "nothing"
    if state == "held" and said is not None and said.row.holders:
        readers = ", ".join(map(holder_in_words, said.row.holders))
        cause = f"The prefill engine keeps its blocks for {readers}, for {how_long(since)}"
        follows = "when all of them have released it, or none of them has had it renewed in time, the blocks are freed"
        are_gone = all(each.address and not each.is_connected for each in said.row.holders)
        advice = HOLDERS_GONE_ADVICE if are_gone else "ask those decode engines too (--engine)"
        # Nobody knows the id of an engine that has never answered.
        ids = {None, *(each.engine_id for each in said.row.holders)}
        if unheard := [each.address for each in live.silent if each.engine_id in ids]:
            holders = " or ".join(each.engine_id or "built-in engines" for each in said.row.holders)
            advice = (
                f"see why {some_of(unheard)} could not be asked: if that is {holders}, has it ended, or does it hang?"
            )
    elif state in LEASE_WAITING:
        waiting, follows, advice = LEASE_WAITING[state]
        cause = f"{capital(waiting)}, for {how_long(since)}"
    elif state == "expired":
        kind, outcome, advice = LeaseExpired.__name__, "failed", WHAT_TO_DO[LeaseExpired.__name__]
        who = f": {recorded.detail}" if recorded is not None and recorded.detail else ""
        cause = (
            f"{kind}: prefill engine {engine_id} kept its blocks until the lease ended, and they were not released{who}"
        )
    elif state == "done" and (readers := _let_go_unread(case)):
        kind, outcome, advice = NOT_READ, "not_read", WHAT_TO_DO[NOT_READ]
        cause = (
            f"{kind}: decode engine {readers} had its blocks held and released them without a READ: vLLM refused the "
            "request there (HTTP 400), the client left while it was in vLLM's queue, or D had these blocks or computed "
            "them itself"
        )
    elif state == "done":
        outcome, advice = "served", "nothing"
        cause = "Done: a decode engine released its blocks, as after a READ; its own records were not found"
    elif state == "superseded":
        outcome, advice = "failed", "whoever gives requests their ids must give none twice"
        cause = "The prefill engine has used the request id again, and has not kept the blocks of the former request"
    else:
        outcome = "failed"
        advice = (
            "nothing: the prefill ended without lending (aborted, as vLLM ends a session of streamed input whose end "
            "comes when all is answered; or nothing was computed; or the engine was to end)"
        )
        cause = "The prefill engine ended it without lending its blocks"
    return Explanation(
        request=case.name,
        cause=cause,
        outcome=outcome,
        kind=kind,
        state=state,
        side="P",
        engine_id=engine_id,
        rank=teller.rank if teller is not None else None,
        since_seconds=since,
        since_wall=recorded.visits[-1].wall if recorded is not None else None,
        waits_for="a decode engine" if state == "held" else None,
        until_seconds=until,
        next=follows,
        advice=advice,
        happened=happened(case),
        facts=(*facts_of_leases(case), *facts_of_silent(live)),
    )


def _explain_read_back(case: Case, live: Live) -> Explanation:
    """An answer that is lent back, whose request nobody remembers: that lease is written when it has been given."""
    recorded = deciding_rank(case.story.leases) if case.story.leases else None
    said = case.leases[0] if case.leases else None
    teller = said or recorded
    is_kept = said is not None or (recorded is not None and not recorded.is_over)
    return Explanation(
        request=case.name,
        cause=f"Done: {fact_of_read_back(case)}; the records of the request itself were not found",
        outcome="served",
        state=said.row.state if said is not None else recorded.state if recorded is not None else "",
        side="D",
        engine_id=teller.engine_id if teller is not None else None,
        rank=teller.rank if teller is not None else None,
        since_seconds=said.row.since_seconds if said is not None else None,
        since_wall=recorded.visits[-1].wall if recorded is not None else None,
        until_seconds=said.row.deadline_seconds if said is not None else None,
        next="when nobody reads them, the blocks are freed with the end of the lease" if is_kept else "nothing",
        advice="nothing",
        happened=happened(case),
        facts=tuple(facts_of_silent(live)),
    )


_LET_GO = frozenset({hold.State.RELEASING.value, hold.State.RELEASED.value})


def _let_go_unread(case: Case) -> str:
    """The decode engines that held a lease of which no request is recorded, and let go of it; empty: none is known.

    A request that reads is made before it lets go. So where the beginning of each hold is recorded nothing that came
    after it was overwritten, and there was no request.
    """
    holds = case.story.holds
    if any(each.records[0].from_state is not None or each.state not in _LET_GO for each in holds):
        return ""
    return ", ".join(sorted({each.engine_id for each in holds}))


NOTHING_READ = {
    catalogue.CONTINUED: (
        ALREADY_READ,
        "{engine} computed what it had not cached of it: it had let go of what the kv_transfer_params name, "
        "which another request with the same ones had read",
    ),
    catalogue.WINDOW: (
        FREED_ON_P,
        "{engine} computed the prompt itself: P lends too little of a window, which had moved on there",
    ),
    catalogue.ADAPTER: (
        OTHER_ADAPTER,
        "{engine} computed the prompt itself: P had other weights under the name of its adapter",
    ),
    catalogue.MEDIA: (
        OTHER_MEDIA,
        "{engine} computed the prompt itself: P had computed other images or sound in the places of the same tokens",
    ),
    catalogue.NO_ROOM: (
        NO_ROOM,
        "{engine} computed the prompt itself: it began no load, because another request, whose load had failed, did "
        "not fit into its cache beside blocks in quarantine or lent back",
    ),
}
"""By reason, of local prefills that did come with parameters: the kind, and the cause."""


def explain_local_prefill(case: Case, said: Said[LocalPrefillRow], live: Live) -> Explanation:
    row, facts = said.row, live.facts(said.engine_id)
    if row.reason in NOTHING_READ:
        kind, cause = NOTHING_READ[row.reason]
        return _explain_computed(case, said, kind, f"{kind}: {cause.format(engine=said.engine_id)}", WHAT_TO_DO[kind])
    had = (
        "no kv_transfer_params"
        if row.reason == catalogue.ABSENT
        else "kv_transfer_params with neither do_remote_prefill nor do_remote_decode"
    )
    is_prefill = facts is not None and facts.role == "kv_producer"
    where = "P, which did not lend what it computed" if is_prefill else "D, which computed the prompt itself"
    cause = f"{NO_PARAMETERS}: the request came with {had} to {where}"
    advice = WHAT_TO_DO[NO_PARAMETERS]
    if is_prefill:
        advice = 'have the router send kv_transfer_params {"do_remote_decode": true} to P'
    elif live.leaving and not (case.leases or case.story.leases):
        cause += f"; {_say_who_leaves(live.leaving)}"
    lost: tuple[str, ...] = ()
    if case.leases or case.story.leases:
        lost = ("a prefill engine lent the blocks of this prompt: the router has lost the parameters on the way",)
    return _explain_computed(case, said, NO_PARAMETERS, cause, advice, lost, side="P" if is_prefill else "D")


def _explain_computed(
    case: Case,
    said: Said[LocalPrefillRow],
    kind: str,
    cause: str,
    advice: str,
    more: tuple[str, ...] = (),
    *,
    side: str = "D",
) -> Explanation:
    row = said.row
    return Explanation(
        request=row.request_id,
        cause=cause,
        outcome="computed_locally",
        kind=kind,
        state="computed locally",
        side=side,
        engine_id=said.engine_id,
        rank=said.rank,
        since_seconds=row.age_seconds,
        next="nothing: the client gets a right answer, later than it could",
        advice=advice,
        happened=happened(case),
        facts=(f"{row.tokens} tokens of prompt, {how_long(row.age_seconds)} ago", *more, *facts_of_leases(case)),
    )


def _say_who_leaves(leaving: Sequence[str]) -> str:
    return f"{some_of(leaving)} drains, and answers prefills that come since then without kv_transfer_params"


TRACE_LACKS = (
    " Or it came without kv_transfer_params and was computed where it came to: traces do not have such requests, the "
    "running engines do (without --trace). Or the trace could not be written then, as on a full disk: `nixl-actor "
    "doctor` on the engine says so, and its log (`is interrupted`)."
)


def explain_nothing(text: str, live: Live, looked_at: Sequence[str], *, is_trace: bool = False) -> str:
    """When nothing matches: what that may mean. `is_trace`: traces were looked at, and no running engine."""
    where = some_of(looked_at) or "nothing"
    reach = [each.row.recorded_seconds for each in live.of(EngineRow) if each.row.recorded_seconds is not None]
    back = f" Their records reach back {how_long(min(reach))}." if reach else ""
    silent = "".join(f" {each.address} could not be asked: {each.problem}." for each in live.silent[:NAMES_MAX])
    if len(live.silent) > NAMES_MAX:
        silent += f" Nor could {len(live.silent) - NAMES_MAX} more."
    leaves = f" {_say_who_leaves(live.leaving)}; these are not recorded." if live.leaving else ""
    return (
        f"No request with {text!r} in its id. Looked at: {where}.{back}{silent}{leaves} Either the router never sent "
        "it to these engines, or under another id; or it waits in vLLM's queue, on a prefill engine, or on D with "
        "parameters that will be refused; or it ended before their records begin; or its client left while it was in "
        "vLLM's queue; or nothing had to be read for it: D had it cached." + (TRACE_LACKS if is_trace else "")
    )
