"""Whether engines and workers answer, and whether others find them where they say that they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from connector.addresses import is_all_interfaces, is_loopback
from connector.observe.advice import NIXL_HANGS, NIXL_HANGS_ADVICE, WHAT_TO_DO
from connector.tools.asking import Address
from connector.tools.diagnosis.finding import Finding, facts_of, first_facts, host_of
from connector.tools.live import EngineReport, Survey
from connector.tools.names import some_of
from connector.wire.handshake import worker_name
from connector.wire.inspection import (
    EngineRow,
    PeerRow,
)
from statemachine import peer
from statemachine.failures import ConnectionRefused, PeerLeaving

_SEE_WORKER = (
    "see whether its worker runs, whether that port can be reached, and whether the engine sleeps (/is_sleeping)"
)
_ANOTHER_WAS_MEANT = (
    "if another engine was meant, see whether its VLLM_NIXL_SIDE_CHANNEL_PORT is the same: on one host the second of "
    "two such engines cannot start"
)
_ANOTHER_HOST = "set VLLM_NIXL_SIDE_CHANNEL_HOST on it to an address that the other engines can reach"


def unanswered(found: Survey) -> Iterator[Finding]:
    for engine in found.engines:
        if (has_left := _has_left(engine, found)) is not None:
            yield has_left
        elif engine.problem is not None:
            by = f" (named by {some_of(engine.named_by)})" if engine.named_by else ""
            kind = engine.problem_kind or ""
            yield Finding(
                level="problem",
                check="answers",
                engines=(str(engine.address),),
                what=f"{kind}: {engine.address}{by}: {engine.problem}",
                advice=WHAT_TO_DO.get(kind, ""),
            )
        if engine.refusal is not None and not any(row.stopped for row in engine.of(EngineRow)):
            yield _serves_no_more(engine, engine.name, engine.refusal)
        for rank in engine.ranks:
            if rank.problem is not None:
                yield Finding(
                    level="note" if rank.is_builtin else "warning" if rank.ran_out else "problem",
                    check="answers",
                    engines=(engine.name,),
                    what=f"{engine.name}, {worker_name(*rank.rank)}: {rank.problem}",
                    advice="" if rank.is_builtin or rank.ran_out else _SEE_WORKER,
                )
        for row in engine.of(EngineRow):
            if row.stopped is not None:
                yield _serves_no_more(engine, f"{engine.name} rank {row.rank}", row.stopped)
            if row.counts.nixl_lag_seconds:
                yield Finding(
                    level="problem",
                    check="answers",
                    engines=(engine.name,),
                    what=f"{engine.name} rank {row.rank}: {NIXL_HANGS % row.counts.nixl_lag_seconds}",
                    advice=NIXL_HANGS_ADVICE,
                )


def _serves_no_more(engine: EngineReport, who: str, why: str) -> Finding:
    """`who`: all of the engine, or a rank of it."""
    what, advice = f"{who} serves no KV any more: {why}", WHAT_TO_DO["ConnectorStopped"]
    return Finding(level="problem", check="answers", engines=(engine.name,), what=what, advice=advice)


def _has_left(engine: EngineReport, found: Survey) -> Finding | None:
    """The note that an engine out of reach has ended, as it had told its decode engines, so that nobody has to start it
    again. None: it had not told them, or the operator named it."""
    if engine.problem_kind != ConnectionRefused.__name__ or not engine.named_by:
        return None
    rows = [row for _, row in found.of(PeerRow) if row.address == str(engine.address)]
    if not rows or any(not left_in_peace(row) for row in rows):
        return None
    names = ", ".join(sorted({row.engine_id for row in rows}))
    what = f"{names} at {engine.address} (named by {some_of(engine.named_by)}) has ended, as it had said"
    return Finding(level="note", check="answers", engines=(str(engine.address),), what=what)


def left_in_peace(row: PeerRow) -> bool:
    """It has ended, as it had said, and nothing is wanted of it."""
    return row.failure == PeerLeaving.__name__ and row.state == peer.State.IDLE.value


def addresses(found: Survey) -> Iterator[Finding]:
    answering = [engine for engine in found.engines if engine.answers]
    by_id: dict[str, list[EngineReport]] = {}
    for engine in answering:
        by_id.setdefault(engine.name, []).append(engine)
    for engine_id, same in by_id.items():
        yield from _used_by_several(engine_id, same)
    for engine_id, same in by_id.items():
        yield from _found_twice(engine_id, same)
    for one, other in combinations(answering, 2):
        if one.name != other.name:
            yield from _clash(one, other)
            yield from _own_loopback(one, other)
            yield from _own_loopback(other, one)
    host_names = {facts.host_name for engine in answering for facts in facts_of(engine)}
    for engine in answering:
        yield from _unreachable(engine, is_alone=len(host_names) == 1)


def _used_by_several(engine_id: str, reports: Sequence[EngineReport]) -> Iterator[Finding]:
    """One engine id of engines that have no process in common."""
    processes: list[set[tuple[str, int]]] = []
    for report in reports:
        found_here = {(f.host_name, f.process_id) for f in facts_of(report)}
        known = next((each for each in processes if each & found_here), None)
        if known is None:
            processes.append(found_here)
        else:
            known |= found_here
    if len(processes) > 1:
        where = some_of(str(report.address) for report in reports)
        yield Finding(
            level="problem",
            check="engine ids",
            engines=(engine_id,),
            what=f"engine id {engine_id} is used by {len(processes)} engines: {where}",
            advice="give each engine an engine_id of its own, or let vLLM draw one",
        )


def _clash(one: EngineReport, other: EngineReport) -> Iterator[Finding]:
    """Two engines of one host that say that they listen at the same address."""
    here, there = first_facts(one), first_facts(other)
    if here is None or there is None or here.host_name != there.host_name:
        return
    if here.side_channel == there.side_channel:
        yield Finding(
            level="problem",
            check="address clash",
            engines=(one.name, other.name),
            what=f"{one.name} and {other.name} both have the side channel {here.side_channel}",
            advice="give each engine on a host a VLLM_NIXL_SIDE_CHANNEL_PORT of its own",
        )
    shared = {f.control for f in facts_of(one)} & {f.control for f in facts_of(other)} - {""}
    if shared:
        yield Finding(
            level="problem",
            check="address clash",
            engines=(one.name, other.name),
            what=f"{one.name} and {other.name} both have the control socket {min(shared)}",
            advice="give each engine on a host a control_port of its own, with a port for each rank",
        )


def _own_loopback(local: EngineReport, remote: EngineReport) -> Iterator[Finding]:
    """`local` advertises a loopback address to `remote`, whose host takes it for itself."""
    facts, theirs = first_facts(local), first_facts(remote)
    if facts is None or theirs is None or facts.host_name == theirs.host_name:
        return
    if is_loopback(host_of(facts.side_channel)):
        yield Finding(
            level="problem",
            check="localhost",
            engines=(local.name, remote.name),
            what=(
                f"{local.name} advertises {facts.side_channel}, which on {theirs.host_name} of "
                f"{remote.name} is another machine ({facts.host_name})"
            ),
            advice=_ANOTHER_HOST,
        )


def _unreachable(engine: EngineReport, *, is_alone: bool) -> Iterator[Finding]:
    """What it advertises cannot be connected to, or not from other hosts. `is_alone`: no engine is on another host."""
    facts = first_facts(engine)
    if facts is None:
        return
    host = host_of(facts.side_channel)
    if engine.not_resolved is not None:
        yield Finding(
            level="problem",
            check="host names",
            engines=(engine.name,),
            what=(
                f"AddressNotResolved: {engine.name} advertises {facts.side_channel}, and the host name "
                f"{host} does not resolve here ({engine.not_resolved})"
            ),
            advice=WHAT_TO_DO["AddressNotResolved"],
        )
    if is_all_interfaces(host):
        yield Finding(
            level="problem",
            check="localhost",
            engines=(engine.name,),
            what=f"{engine.name} advertises {facts.side_channel}, which is no address to connect to",
            advice=_ANOTHER_HOST,
        )
    elif is_loopback(host) and is_alone:
        yield Finding(
            level="note",
            check="localhost",
            engines=(engine.name,),
            what=f"{engine.name} advertises {facts.side_channel}: only engines on {facts.host_name} reach it",
        )


def _found_twice(engine_id: str, reports: Sequence[EngineReport]) -> Iterator[Finding]:
    """One engine behind several addresses: the one that was meant by another of them is not there."""
    by_process: dict[tuple[str, int, str], list[EngineReport]] = {}
    for report in reports:
        for facts in facts_of(report)[:1]:
            by_process.setdefault((facts.host_name, facts.process_id, facts.side_channel), []).append(report)
    for (host_name, process_id, side_channel), same in by_process.items():
        if len(same) > 1:
            where = some_of(str(each.address) for each in same)
            yield Finding(
                level="problem",
                check="one engine",
                engines=(engine_id,),
                what=(
                    f"{where} lead to one engine: {engine_id}, process {process_id} of {host_name}, side channel "
                    f"{side_channel}"
                ),
                advice=_ANOTHER_WAS_MEANT,
            )


def named_twice(named: Sequence[Address]) -> Iterator[Finding]:
    for address, times in Counter(named).items():
        if times > 1:
            yield Finding(
                level="problem",
                check="one engine",
                engines=(str(address),),
                what=f"{address} was named {times} times, and is the address of one engine",
                advice=_ANOTHER_WAS_MEANT,
            )
