"""The answer, and the sentences that several kinds of answers have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from connector.observe.history import (
    History,
    deciding_rank,
)
from connector.tools.durations import duration
from connector.tools.explanation.cases import Case
from connector.tools.explanation.rows import Live
from connector.tools.names import named_holder
from connector.wire.inspection import (
    EngineFacts,
    HolderRow,
    PeerRow,
)
from statemachine.lease import LENT_BACK

if TYPE_CHECKING:
    from connector.tools.live import Silent

HAPPENED_MAX = 40
"""Lines of what happened; of more the middle is left out."""

QUEUED_SECONDS_MIN = 0.001
QUEUED_SHARE_MIN = 0.01
"""A shorter wait in vLLM's queue, or one that is less of the whole time, is not worth a word."""


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """One line of what happened. `offset_seconds`: from the first of them; `wall`: Unix time."""

    offset_seconds: float
    wall: float
    side: str
    what: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `outcome`: served, failed, computed_locally, not_read or waiting.

    `engine_id`, `rank`: whose word it is; of several ranks, that which decides.
    `since_seconds`: for how long a running engine has had it in its state; `since_wall`: the Unix time from which on
    records have it there, which is that of its end where it has ended.
    """

    request: str
    cause: str
    outcome: str
    kind: str | None = None
    detail: str | None = None
    state: str
    side: str
    engine_id: str | None
    rank: int | None
    peer: str | None = None
    since_seconds: float | None = None
    since_wall: float | None = None
    waits_for: str | None = None
    until_seconds: float | None = None
    next: str
    advice: str
    happened: tuple[Happened, ...]
    facts: tuple[str, ...]
    """Further sentences that bear on it."""


def happened(case: Case) -> tuple[Happened, ...]:
    """Both sides in one order. Ranks that went through the same count as one."""
    lines: dict[tuple[str, str], tuple[float, int]] = {}

    def note(side: str, what: str, wall: float) -> None:
        first, ranks = lines.get((side, what), (wall, 0))
        lines[side, what] = (min(first, wall), ranks + 1)

    lender = "D" if case.is_lent_back else "P"
    for side, group in (("D", case.story.requests), ("D", case.story.holds), (lender, case.story.leases)):
        for history in group:
            if is_worth_a_word(history):
                heard = history.records[0].wall - (history.queued_seconds or 0.0)
                note(side, f"{history.machine} in vLLM's queue", heard)
            entered = 0.0
            for number, visit in enumerate(history.visits):
                # A running engine works out the time of day of each record, so two of one moment come out apart.
                entered = max(entered, visit.wall)
                reason = f" ({visit.reason})" if visit.reason else ""
                what = f"{history.machine} {visit.state}, by {visit.event}{reason}"
                # A state that is entered again is another line.
                again = sum(each.state == visit.state for each in history.visits[:number])
                note(side, what + " again" * again, entered)
    if not lines:
        return ()
    in_order = sorted(lines.items(), key=lambda item: item[1][0])
    first = in_order[0][1][0]
    happened = tuple(
        Happened(
            offset_seconds=round(wall - first, 6),
            wall=wall,
            side=side,
            what=what + (f" ({ranks} ranks)" if ranks > 1 else ""),
        )
        for (side, what), (wall, ranks) in in_order
    )
    if len(happened) <= HAPPENED_MAX:
        return happened
    half = HAPPENED_MAX // 2
    return (*happened[:half], *happened[-half:])


def is_worth_a_word(history: History) -> bool:
    """Whether the time is that it was in vLLM's queue."""
    queued_seconds = history.queued_seconds or 0.0
    return queued_seconds >= max(QUEUED_SECONDS_MIN, QUEUED_SHARE_MIN * history.whole_seconds)


def facts_of_queue(history: History) -> list[str]:
    """How long it was in vLLM's queue, where that is worth a word."""
    if not is_worth_a_word(history):
        return []
    return [f"before its blocks were allocated it was {how_long(history.queued_seconds)} in vLLM's queue on D"]


def facts_of_peer(peer: PeerRow | None, silence: Silent | None) -> list[str]:
    """What is known of D's connection to P, and why P could not be asked."""
    facts = []
    if peer is not None:
        failed = f", last failure {peer.failure}: {first_clause(peer.detail)}" if peer.failure else ""
        backoff = f", tried again in {how_long(peer.backoff_seconds)}" if peer.backoff_seconds is not None else ""
        facts.append(f"D's connection to {peer.engine_id} at {peer.address} is {peer.state}{backoff}{failed}")
        if peer.leaving_seconds is not None:
            left = how_long(max(0.0, peer.leaving_seconds))
            facts.append(f"{peer.engine_id} drains, and keeps what it lends for {left} more at most")
    if silence is not None:
        facts.append(f"{silence.address} was asked just now: {silence.problem}")
    return facts


def facts_of_leases(case: Case) -> list[str]:
    """What P says of its leases, or what is recorded of them."""
    facts = []
    for said in case.leases:
        row = said.row
        left = f", {how_long(row.deadline_seconds)} until it expires" if row.deadline_seconds is not None else ""
        readers = ", ".join(map(_reader, row.holders))
        facts.append(
            f"on P ({said.engine_id}, rank {said.rank}) its lease is {row.state}{left}; held by {readers or 'nobody'}"
        )
    if not case.leases:
        facts += [f"on P ({each.engine_id}, rank {each.rank}) its lease is {each.state}" for each in case.story.leases]
    return facts


def fact_of_read_back(case: Case) -> str:
    """What has become of a lease that lends an answer back."""
    if case.leases:
        engine_id, _, row = case.leases[0]
        left = f", for {how_long(row.deadline_seconds)} more" if row.deadline_seconds is not None else ""
        readers = ", ".join(map(holder_in_words, row.holders))
        return f"{engine_id} keeps its blocks for read-back{left}; {readers or 'nobody'} has asked for them"
    recorded = deciding_rank(case.story.leases)
    kept = f"{recorded.engine_id} keeps its blocks for read-back"
    if not recorded.is_over:
        return kept
    kept = kept.replace("keeps", "kept")
    if recorded.reason == LENT_BACK:
        return f"{kept}, and nobody has read them: the conversation did not go on"
    return f"{kept}, until that lease was {recorded.state}" + (f": {recorded.detail}" if recorded.detail else "")


def _reader(holder: HolderRow) -> str:
    others = f", and not {holder.others} other process(es) of that id: did it start again, or have two one id?"
    done = f"{holder.released_count} of {holder.ranks} ranks done"
    return f"{holder_in_words(holder)} ({done}{others if holder.others else ''})"


def holder_in_words(holder: HolderRow) -> str:
    return named_holder(holder, "built-in engines")


def facts_of_silent(live: Live) -> list[str]:
    """Engines that could not be asked."""
    return [f"{each.address} could not be asked: {each.problem}" for each in live.silent]


def after_failure(facts: EngineFacts | None) -> str:
    """What vLLM on D does with a request that has failed."""
    policy = facts.load_failure_policy if facts is not None else ""
    if policy == "recompute":
        return (
            "D computes the prompt itself (kv_load_failure_policy: recompute): the client gets a right answer, later, "
            "and need not ask again"
        )
    if policy == "fail":
        return "nothing: the client got an error (kv_load_failure_policy: fail)"
    return "kv_load_failure_policy of D decides: the client got an error, or D computes the prompt itself"


def at_failure(facts: EngineFacts | None) -> str:
    """What it will do with one that fails later."""
    return after_failure(facts).removeprefix("nothing: ").replace("client got", "client gets")


def first_clause(detail: str | None) -> str:
    """The part of a failure's sentence that says what has happened, without what to do about it."""
    return (detail or "").split(";")[0]


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def blocks_in_words(count: int | None) -> str:
    return f"{count} block(s)" if count is not None else "its blocks"


def how_long(seconds: float | None) -> str:
    if seconds is None:
        return "longer than the records reach"
    return duration(seconds)
