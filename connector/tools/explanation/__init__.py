"""Why a request is where it is: from what was recorded of it, and what engines say of it now, to an answer in words.

    records --stories--> Story \\
                                Case --explain--> Explanation
    rows of running engines ---/

`explain` is a pure function. Its first line is the cause: the kind of the failure first where there is one, otherwise
what is waited for. A failure that only follows from another one names that: a request that was refused because its peer
backs off, says why it backs off. What to do is a table by kind (`WHAT_TO_DO`).

A Case is one request of one decode engine, or a lease that no decode engine is known to have read, or a request that
came without parameters or lacks room in the cache. `find` puts together those that a person may mean by a text. A lease
under which an engine keeps its answer for read-back belongs to the case of that answer's request.

rows      what running engines say of themselves, by kind
cases     records and rows, put together to requests
answer    the answer, and the sentences that all kinds of answers have
waiting   a request that D has in hand, or that lacks room in an engine's cache
ended     a request of D that has ended, or that its records leave open
not_read  a lease that nobody is known to have read, a prompt that was computed where it came to, nothing at all
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from connector.observe.advice import NIXL_HANGS, NIXL_HANGS_ADVICE
from connector.observe.history import DONE, deciding_rank
from connector.tools.explanation.answer import Explanation, Happened, fact_of_read_back, facts_of_silent
from connector.tools.explanation.cases import Case, find
from connector.tools.explanation.ended import explain_end, explain_end_of_one_rank, explain_recorded
from connector.tools.explanation.not_read import explain_lease, explain_local_prefill, explain_nothing
from connector.tools.explanation.rows import Live, Said, live_of
from connector.tools.explanation.waiting import explain_no_room, explain_waiting
from connector.wire.inspection import EngineRow, RequestRow

__all__ = [
    "Case",
    "Explanation",
    "Happened",
    "Live",
    "Said",
    "explain",
    "explain_nothing",
    "facts_of_silent",
    "find",
    "live_of",
]


def explain(case: Case, live: Live) -> Explanation:
    """See the module's docstring."""
    answer = _explain(case, live)
    every = (*case.story.requests, *case.story.holds, *case.story.leases)
    moved = tuple(
        f"the clock of {name} rank {rank} was moved by {live.shifts[name, rank]:+.3f} s to agree with the others"
        for name, rank in sorted({(each.engine_id, each.rank) for each in every}.intersection(live.shifts))
    )
    read_back = (fact_of_read_back(each) for each in case.read_back)
    hanging = list(_hanging(answer, live))
    if any(engine_id == answer.engine_id for engine_id, _ in hanging) and answer.kind in LOOK_LIKE_A_HANG:
        # The failure speaks of the other engine.
        answer = msgspec.structs.replace(answer, advice=NIXL_HANGS_ADVICE)
    facts = (*(fact for _, fact in hanging), *answer.facts, *read_back, *moved)
    return msgspec.structs.replace(answer, facts=facts) if facts != answer.facts else answer


LOOK_LIKE_A_HANG = frozenset({"DeadlineExceeded", "Quarantined", "QuarantineFull", "ReadNeverEnded"})
"""Kinds of failures by which a request ends whose READs hang, on whichever side."""


def _hanging(answer: Explanation, live: Live) -> Iterator[tuple[str, str]]:
    """Ranks of both engines of a request in which NIXL hangs, which looks like a bug of another engine: which
    engine, and what is to be said of it."""
    for engine_id, rank, row in live.of(EngineRow):
        if engine_id in (answer.engine_id, answer.peer) and row.counts.nixl_lag_seconds:
            yield engine_id, f"{engine_id} rank {rank}: {NIXL_HANGS % row.counts.nixl_lag_seconds}"


def _explain(case: Case, live: Live) -> Explanation:
    worst = deciding_rank(case.story.requests) if case.story.requests else None
    if case.requests:
        said = max(case.requests, key=_how_bad)
        if worst is not None and worst.is_over and worst.outcome != DONE and said.row.failure is None:
            return explain_end_of_one_rank(case, worst, live)
        return explain_waiting(case, said, live)
    if case.without_room is not None:
        return explain_no_room(case, case.without_room, live)
    if worst is not None and worst.is_over:
        return explain_end(case, worst, live)
    if worst is not None:
        return explain_recorded(case, worst, live)
    if case.local_prefill is not None:
        return explain_local_prefill(case, case.local_prefill, live)
    return explain_lease(case, live)


def _how_bad(said: Said[RequestRow]) -> tuple[bool, float]:
    """Orders the ranks of a request that lives. One that has failed decides, else the one that has waited longest."""
    return said.row.failure is not None, said.row.since_seconds if said.row.since_seconds is not None else math.inf
