"""What UCX goes over between engines, and what it lacks for device memory, NVLink and RDMA."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

import msgspec

from connector.tools.diagnosis.finding import UNSET, Finding, about, first_facts
from connector.tools.live import EngineReport
from connector.tools.ucx_devices import NETWORK, READS_WITHOUT_NVLINK, VARIABLES, Opened
from connector.wire.inspection import (
    EngineFacts,
    EngineRow,
)

CONNECTS_IN_BACKGROUND = "UCX_TCP_CONN_NB"
_NO = ("n", "no", "off", "0")
"""As UCX reads them, whatever their case."""
_OF_DEVICES = ("cuda", "rocm")
"""What the names of UCX's transports for device memory begin with."""


def transports(engines: Sequence[EngineReport], opened: Mapping[tuple[str, int], Opened]) -> Iterator[Finding]:
    for engine in engines:
        name, alike = engine.name, _with_the_same_transports(engine)
        for rows in alike:
            findings = _transports_of(engine, rows[0].facts, opened.get((name, rows[0].rank)))
            of_which = f"{name} rank {', '.join(str(row.rank) for row in rows)}" if len(alike) > 1 else name
            for each in findings:
                yield msgspec.structs.replace(each, what=f"{of_which}{each.what.removeprefix(name)}")
    for one, other in combinations(engines, 2):
        first, second = first_facts(one), first_facts(other)
        if first is None or second is None:
            continue
        chosen_first, chosen_second = (_transport_names(each.environment.get("UCX_TLS")) for each in (first, second))
        if chosen_first and chosen_second and not chosen_first & chosen_second - {"self"}:
            yield Finding(
                level="problem",
                check="transports",
                engines=(one.name, other.name),
                what=(
                    f"UCX_TLS is {first.environment['UCX_TLS']} on {one.name} and {second.environment['UCX_TLS']} on "
                    f"{other.name}: they have no transport in common"
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
    """What is found about workers that are alike; `facts` are those of one of them."""
    tls = facts.environment.get("UCX_TLS")
    devices = ", ".join(facts.devices) or "none"
    chosen = facts.environment.get("UCX_NET_DEVICES")
    yield about(
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
    yield from _connecting(engine, facts)
    yield from _opened(engine, facts, known)


def _chosen_transports(engine: EngineReport, facts: EngineFacts) -> Iterator[Finding]:
    tls = facts.environment.get("UCX_TLS")
    if facts.memory_kind == "VRAM" and _lacks_device_memory(facts):
        yield about(
            engine,
            "transports",
            "problem",
            f"its KV cache is in device memory, and UCX_TLS={tls} has no transport for it",
            _ADD_DEVICE_MEMORY,
        )
    if facts.devices and _lacks_rdma(facts):
        yield about(
            engine,
            "transports",
            "warning",
            f"UCX_TLS={tls} leaves the RDMA devices {', '.join(facts.devices)} unused",
            _ADD_RDMA,
        )


def _connecting(engine: EngineReport, facts: EngineFacts) -> Iterator[Finding]:
    """docs/nixl.md fact 45; the connector sets it, unless it is set."""
    set_to = facts.environment.get(CONNECTS_IN_BACKGROUND, "")
    if set_to.lower() in _NO:
        yield about(
            engine,
            "transports",
            "warning",
            f"{CONNECTS_IN_BACKGROUND}={set_to}: while UCX connects to an engine behind a firewall, for minutes, "
            "nothing is read from any other",
            f"unset {CONNECTS_IN_BACKGROUND}: the connector sets it to y",
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
        yield about(
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
        yield about(
            engine,
            "transports",
            "note",
            f"what UCX opens can be seen on {facts.host_name} alone",
            "run nixl-actor doctor there as well, in the engine's container if it has one",
        )
        return
    if opened.complaints:
        yield about(
            engine,
            "transports",
            "problem" if opened.problem else "warning",
            f"UCX, told what this engine tells it, says: {'; '.join(opened.complaints)}",
            "correct UCX_TLS and UCX_NET_DEVICES of the engine, or unset them",
        )
    if opened.problem:
        if not opened.complaints:
            yield about(engine, "transports", "note", f"UCX could not be asked what it opens: {opened.problem}")
        return
    listed = ", ".join(f"{each.name} ({' '.join(each.devices)})" for each in opened.transports)
    yield about(engine, "transports", "note", f"UCX opens {listed or 'nothing that it names'}")
    if facts.memory_kind == "VRAM" and not any(each.name.startswith(_OF_DEVICES) for each in opened.transports):
        yield about(
            engine,
            "transports",
            "problem",
            "its KV cache is in device memory, and UCX opens no transport for it",
            _ADD_DEVICE_MEMORY
            if _lacks_device_memory(facts)
            else "see whether this NIXL is built for the device, and whether the process sees it",
        )
    elif facts.memory_kind == "VRAM" and not opened.reads_over_cuda_ipc:
        yield about(
            engine,
            "transports",
            "warning",
            "UCX finds no NVLink and does not read over cuda_ipc: KV of engines on the same machine goes over the"
            " network, over TCP if there is no other",
            f"{READS_WITHOUT_NVLINK}=y in the environment of both engines",
        )
    network = opened.of_kind(NETWORK)
    if opened.transports and not network:
        yield about(
            engine,
            "transports",
            "warning",
            f"UCX opens no network transport, so only engines on {facts.host_name} exchange KV with it",
            "add rc (RDMA) or tcp to UCX_TLS, or unset it",
        )
    elif facts.devices and all(each.name == "tcp" for each in network):
        yield about(
            engine,
            "transports",
            "warning",
            f"UCX opens none of the RDMA devices {', '.join(facts.devices)}: KV travels over TCP between machines",
            _ADD_RDMA
            if _lacks_rdma(facts)
            else "see whether the process may use them: /dev/infiniband in the container, and locked memory without "
            "limit (ulimit -l)",
        )


def _transport_names(tls: str | None) -> frozenset[str]:
    """The transports that UCX_TLS names; empty when it leaves the choice to UCX."""
    names: Iterable[str] = (each.strip() for each in (tls or "").split(","))
    chosen = frozenset(each for each in names if each)
    return frozenset() if "all" in chosen or any(each.startswith("^") for each in chosen) else chosen
