"""What requests have come to, and what lives in the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from connector.observe import catalogue
from connector.observe.advice import NO_PARAMETERS, TRACE_INTERRUPTED_ADVICE, WHAT_TO_DO, named, told, why_command
from connector.observe.history import LeaseKey, LeasesGiven
from connector.tools.diagnosis.finding import Finding, about, facts_of
from connector.tools.diagnosis.reachable import left_in_peace
from connector.tools.durations import duration
from connector.tools.live import NOT_CONNECTED, EngineReport, RankReport, Survey
from connector.tools.names import some_of
from connector.wire.handshake import worker_name
from connector.wire.inspection import (
    EngineRow,
    IntroductionRow,
    LocalPrefillRow,
    PeerRow,
    QuarantineRow,
    RecordRow,
    quarantined_blocks,
)
from statemachine import lease, request
from statemachine.failures import AbortedByClient, LeaseExpired, NotAllowed
from statemachine.trace import TransitionRecord

RECORDS_ASKED = 2048
"""Each worker is asked for so many of its newest records: a few seconds of a busy engine. The readers of a lease that
expired before that are looked for by its id."""
ANSWERS_APART_SECONDS = 1.0
"""Between the answers of two workers; durations of the two are compared no more exactly than that."""
RECENT_SECONDS = 600.0
LOCAL_PREFILLS_SHARE = 0.1
LOCAL_PREFILLS_FEW = 3
LOCAL_PREFILLS_MANY = 100
"""Requests without parameters are a problem where they are more than this share of the recent ones, and not so few; or
so many. The share is that of the alert NixlActorSilentLocalPrefill."""
FAILED_SHARE = 0.05
FAILED_FEW = 3
"""Requests that failed are a problem where they are more than this share of those that have ended of late, and not so
few. The share is that of the alert NixlActorReceivesFail."""
_ENDS = frozenset(state.value for state in request.MACHINE.terminal)


def peers(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    for engine in engines:
        # Ranks that have met the same are one finding.
        met: dict[tuple[str, str, str], dict[tuple[int, int], PeerRow]] = {}
        for rank in engine.ranks:
            for row in rank.of(PeerRow):
                if not (row.failure is None or row.state == "ready" or row.is_retiring or left_in_peace(row)):
                    met.setdefault((row.engine_id, row.state, row.failure), {})[rank.rank] = row
        for (engine_id, state, failure), rows in met.items():
            # Who is not allowed is not by the next attempt either, unless somebody changes keys or addresses.
            is_now = failure == NotAllowed.__name__ or state in NOT_CONNECTED
            detail, advice = told(failure, next(iter(rows.values())).detail)
            what = f"{engine.name}: prefill engine {engine_id} is {state}: {failure}: {detail}{_on(rows, engine)}"
            yield Finding(
                level="problem" if is_now else "warning",
                check="peers",
                engines=(engine.name, engine_id),
                what=what,
                advice=advice,
            )


def introductions(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    """Prefill engines of `known_peers` and `nixl-actor meet` that could not be met so far."""
    for engine in engines:
        unmet: dict[tuple[str, str | None], dict[tuple[int, int], IntroductionRow]] = {}
        for rank in engine.ranks:
            for row in rank.of(IntroductionRow):
                if row.detail is not None:
                    unmet.setdefault((row.place, row.failure), {})[rank.rank] = row
        for (place, failure), rows in unmet.items():
            row = next(iter(rows.values()))
            detail, advice = told(failure, row.detail)
            why = named(failure, detail or "")
            what = f"the engine at {place} cannot be met before its first request: {why}{_on(rows, engine)}"
            yield about(engine, "known peers", "note" if row.is_builtin else "warning", what, advice)


def _on(rows: Collection[tuple[int, int]], engine: EngineReport) -> str:
    """The ranks of it that these are, unless they are all."""
    if len(rows) == len(engine.ranks):
        return ""
    return f" (on {', '.join(worker_name(*rank) for rank in sorted(rows))} of {len(engine.ranks)} ranks)"


def blocks(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    for engine in engines:
        rows = engine.of(QuarantineRow)
        if rows:
            blocks, total = quarantined_blocks(rows), next((f.blocks for f in facts_of(engine)), 0)
            peers = some_of(sorted({row.peer for row in rows}))
            what = f"{blocks} of {total} KV blocks are quarantined: READs from {peers} have not ended"
            advice = (
                f"{peers} hangs, or the network to it; or NIXL on this engine, which a finding beside this one then "
                "says. Restart what hangs, this engine last"
            )
            yield about(engine, "quarantine", "problem", what, advice)


def failed_requests(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    """Requests that did not get their KV of late, by kind. What one rank has failed the others have not loaded."""
    for engine in engines:
        ended: set[str] = set()
        failed: dict[str, RecordRow] = {}
        seconds = 0.0
        for rank in (each for each in engine.ranks if each.engine is not None):
            recent_seconds = min(RECENT_SECONDS, _reach_seconds(rank))
            seconds = max(seconds, recent_seconds)
            for row in rank.of(RecordRow):
                record = row.record
                if record.machine != request.MACHINE.name or record.to_state not in _ENDS:
                    continue
                if row.age_seconds > recent_seconds or record.reason == AbortedByClient.__name__:
                    continue
                ended.add(record.subject)
                # One that was read may have failed after that.
                if record.to_state != request.State.DONE.value or record.reason is not None:
                    known = failed.get(record.subject)
                    if known is None or known.age_seconds < row.age_seconds:  # the first rank decides
                        failed[record.subject] = row
        if not failed:
            continue
        kinds = Counter(_kind(row) for row in failed.values()).most_common()
        most = min((row for row in failed.values() if _kind(row) == kinds[0][0]), key=lambda row: row.age_seconds)
        _, advice = told(most.record.reason, most.record.detail, "look at the log of this engine")
        is_many = len(failed) >= FAILED_FEW and len(failed) > FAILED_SHARE * len(ended)
        yield about(
            engine,
            "failed requests",
            "problem" if is_many else "note",
            (
                f"{len(failed)} of {len(ended)} request(s) that ended in the last {duration(seconds)} did not get "
                f"their KV: {', '.join(f'{kind} {count}' for kind, count in kinds)}; the last {kinds[0][0]} was "
                f"{most.record.subject}, {duration(most.age_seconds)} ago"
            ),
            f"{kinds[0][0]}: {advice}; {why_command(most.record.subject)} says more",
        )


def _kind(row: RecordRow) -> str:
    return row.record.reason or row.record.to_state


def local_prefills(engines: Sequence[EngineReport], leaving: Sequence[str]) -> Iterator[Finding]:
    for engine in engines:
        ranks = [(row.counts.local_prefills, rank) for rank in engine.ranks for row in rank.of(EngineRow)]
        # Every worker is told of all of them.
        count, rank = max(ranks, key=lambda each: each[0])
        if not count:
            continue
        recent, others, seconds = _recent_local_prefills(rank, "lease" if engine.role == "kv_producer" else "request")
        share = recent / (recent + others) if recent else 0.0
        is_many = recent >= LOCAL_PREFILLS_MANY or (recent >= LOCAL_PREFILLS_FEW and share > LOCAL_PREFILLS_SHARE)
        last = f"; in the last {duration(seconds)} {recent} of {recent + others} requests ({share:.0%})"
        if (example := next(_without_parameters(rank), None)) is not None:
            last += f"; the last one was {example.request_id}, {duration(example.age_seconds)} ago"
        if engine.role == "kv_producer":
            what = f"{count} request(s) came to {engine.name} without do_remote_decode, and were not lent{last}"
            advice = 'have the router send kv_transfer_params {"do_remote_decode": true} to P'
        else:
            what = f"{count} request(s) came to {engine.name} without usable kv_transfer_params: it computed the " + (
                f"prompts itself, with HTTP 200{last}"
            )
            if leaving:
                what += f"; {some_of(leaving)} drains, and answers without them"
            advice = WHAT_TO_DO[NO_PARAMETERS]
        yield Finding(
            level="note" if engine.role == "kv_both" else "problem" if is_many else "warning",
            check="silent local prefill",
            engines=(engine.name,),
            what=what,
            advice=advice,
        )


def _recent_local_prefills(rank: RankReport, machine: str) -> tuple[int, int, float]:
    """How many requests came without parameters, how many others of which `machine` has one each, in how many seconds:
    the last RECENT_SECONDS, as far as the records reach."""
    seconds = min(RECENT_SECONDS, _reach_seconds(rank))
    others = sum(
        row.record.machine == machine and row.record.from_state is None and row.age_seconds <= seconds
        for row in rank.of(RecordRow)
    )
    return sum(row.age_seconds <= seconds for row in _without_parameters(rank)), others, seconds


def _without_parameters(rank: RankReport) -> Iterator[LocalPrefillRow]:
    return (row for row in rank.of(LocalPrefillRow) if row.reason in (catalogue.ABSENT, catalogue.UNUSABLE))


def _reach_seconds(rank: RankReport) -> float:
    """How far back the newest records of a worker reach, of which it was asked for RECORDS_ASKED. What it was asked for
    besides is older."""
    ages = sorted(row.age_seconds for row in rank.of(RecordRow))
    assert rank.engine is not None
    return ages[RECORDS_ASKED - 1] if len(ages) >= RECORDS_ASKED else rank.engine.uptime_seconds


def leases_to_look_for(found: Survey) -> list[str]:
    """Request ids on P of leases that expired, and that nobody has read as far as `found` goes; the newest first."""
    done = _leases_read(found)
    expired = [row.record for row in _expired(found.engines)]
    return list(dict.fromkeys(record.subject for record in expired if LeaseKey.of(record) not in done))


def releases(found: Survey, looked_for: Collection[str]) -> Iterator[Finding]:
    done, failures = _leases_read(found), _leases_failed(found)
    for engine in (each for each in found.engines if each.answers):
        readers = [each for each in found.engines if each is not engine and _may_read(each)]
        one_sided: set[str] = set()
        failed: dict[str, TransitionRecord] = {}
        unread: set[str] = set()
        unknown: set[str] = set()
        for row in _expired([engine]):
            if LeaseKey.of(row.record) in done:
                one_sided.add(row.record.subject)
            elif (end := failures.get(LeaseKey.of(row.record))) is not None:
                failed[row.record.subject] = end
            elif readers and all(_would_know(reader, row, looked_for) for reader in readers):
                unread.add(row.record.subject)
            else:
                unknown.add(row.record.subject)
        names = some_of(each.name for each in readers)
        if one_sided:
            yield about(
                engine,
                "one-sided releases",
                "warning",
                f"{len(one_sided)} lease(s) expired although a decode engine had read them ({min(one_sided)})",
                "see whether D can reach P's control sockets, and whether another engine held them too",
            )
        if failed:
            end = failed[min(failed)]
            yield about(
                engine,
                "expired leases",
                "note",
                f"{len(failed)} lease(s) expired because their requests had failed on a decode engine ({min(failed)}: "
                f"{end.reason or end.to_state} on {end.engine_id})",
                f"see what these failed of: {why_command(end.subject)}",
            )
        if unread:
            what = f"{len(unread)} lease(s) expired that none of {names} has read ({min(unread)})"
            yield about(engine, "expired leases", "warning", what, WHAT_TO_DO[LeaseExpired.__name__])
        if unknown:
            why = f"the records of {names} do not reach back so far" if readers else "no decode engine was asked"
            if silent := some_of(each.name for each in readers if not each.answers):
                why = f"{silent} could not be asked"
            yield about(
                engine,
                "expired leases",
                "warning",
                f"{len(unknown)} lease(s) expired of which it is not known whether they were read "
                f"({min(unknown)}): {why}",
                "name every decode engine that may read them (--engine), or see their traces",
            )
        late = sum(row.counts.late_releases for row in engine.of(EngineRow))
        if late:
            what = f"{late} release(s) of blocks that were not lent (any more)"
            yield about(engine, "one-sided releases", "warning", what, WHAT_TO_DO["ConsumerUnknown"])


def traces(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    """Those that lack records, which not everybody sees who reads them."""
    for engine in engines:
        rows = engine.of(EngineRow)
        missing = sum(row.counts.trace_records_missing for row in rows)
        interrupted = [row for row in rows if row.trace_interrupted is not None]
        if interrupted:
            where = f" on {len(interrupted)} of {len(rows)} ranks" if len(interrupted) < len(rows) else ""
            what = (
                f"its trace is interrupted{where} until it can be written ({interrupted[0].trace_interrupted}): "
                f"{missing} record(s) are missing so far. Requests lose nothing; what reads the trace does not see them"
            )
            yield about(engine, "traces", "warning", what, TRACE_INTERRUPTED_ADVICE)
        elif missing:
            what = (
                f"{missing} record(s) are missing in its trace, since its file system did not keep up or refused them. "
                "Requests lose nothing; `nixl-actor trace summary` says when"
            )
            advice = "see whether the file system of trace_directory hangs or fills, use another, or lower trace_sample"
            yield about(engine, "traces", "warning", what, advice)


def _leases_read(found: Survey) -> set[LeaseKey]:
    """By what decode engines say; as P calls them."""
    records = [row.record for _, row in found.of(RecordRow)]
    given = LeasesGiven(LeaseKey.of(record) for record in records if record.machine == "lease")
    return {
        given.lent_as(LeaseKey.of(record))
        for record in records
        if record.machine == "request" and record.to_state == "done"
    }


def _leases_failed(found: Survey) -> dict[LeaseKey, TransitionRecord]:
    """The ends of requests on decode engines that have failed, by their leases as P calls them."""
    records = [row.record for _, row in found.of(RecordRow)]
    given = LeasesGiven(LeaseKey.of(record) for record in records if record.machine == "lease")
    return {
        given.lent_as(LeaseKey.of(record)): record
        for record in records
        if record.machine == "request" and record.to_state in ("failed", "expired")
    }


def _expired(engines: Sequence[EngineReport]) -> list[RecordRow]:
    """The ends of leases that expired, the newest first; not of answers that were lent back and that nobody has asked
    for, as of each conversation's last turn."""
    rows = (row for engine in engines for row in engine.of(RecordRow))
    ended = [
        row
        for row in rows
        if row.record.machine == "lease" and row.record.to_state == "expired" and row.record.reason != lease.LENT_BACK
    ]
    return sorted(ended, key=lambda row: row.age_seconds)


def _may_read(engine: EngineReport) -> bool:
    """Whether it may be a decode engine. Of one that said nothing it is known if another reads from it."""
    return engine.role != "kv_producer" if engine.answers else not engine.named_by


def _would_know(reader: EngineReport, expired: RecordRow, looked_for: Collection[str]) -> bool:
    """Whether a READ of this lease would be among what the reader has said: all its workers were there when the lease
    could be read first, and have given what they wrote since then."""
    if expired.record.seconds_in_from is None or not reader.ranks:
        return False
    needed_seconds = expired.age_seconds + expired.record.seconds_in_from + ANSWERS_APART_SECONDS
    for rank in reader.ranks:
        row = rank.engine
        if row is None or rank.problem is not None:
            return False
        if len(rank.of(RecordRow)) < RECORDS_ASKED:  # everything since its start
            reach_seconds = row.uptime_seconds
        elif expired.record.subject in looked_for:
            reach_seconds = row.recorded_seconds or 0.0
        else:
            return False
        if reach_seconds < needed_seconds:
            return False
    return True
