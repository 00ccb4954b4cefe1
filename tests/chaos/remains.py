"""What engines hold: of their own, as they say it themselves, and of the operating system's.

Both are compared at moments at which no request is open. What is left then is what a leak leaves.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import msgspec
import psutil

from connector.observe.live import EngineReport
from connector.wire.inspection import EngineRow, PeerRow
from tests.e2e.client import Client
from tests.e2e.engines import Engine

OPEN = ("requests", "claims", "quarantined requests", "quarantined blocks", "reads in flight", "leases", "lent blocks")
"""Counts of a worker that are 0 while nothing is open."""
OPEN_IN_VLLM = ("vllm:num_requests_running", "vllm:num_requests_waiting")

SERVER, CORE, WORKER = "API server", "engine core", "worker"
ROLES = (SERVER, CORE, WORKER)
"""Each is the parent of the next."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of an engine, as Linux sees it."""

    pid: int
    threads: int
    sockets: int
    files: int
    """Descriptors of all kinds."""
    resident_bytes: int


Processes = dict[str, Process]
"""By role."""


def processes(engine: Engine) -> Processes:
    """The processes of an engine with one worker; fewer when some have ended."""
    found: Processes = {}
    try:
        process = psutil.Process(engine.pid)
        for role in ROLES:
            found[role] = _seen(process)
            # Beside it there may be the resource tracker of multiprocessing, which is small.
            children = process.children()
            if not children:
                break
            process = max(children, key=lambda child: child.memory_info().rss)
    except (psutil.NoSuchProcess, FileNotFoundError):
        pass  # it ended while it was looked at
    return found


def _seen(process: psutil.Process) -> Process:
    files = 0
    sockets = 0
    for name in os.listdir(f"/proc/{process.pid}/fd"):
        try:
            target = os.readlink(f"/proc/{process.pid}/fd/{name}")
        except FileNotFoundError:
            continue
        files += 1
        sockets += target.startswith("socket:")
    return Process(
        pid=process.pid,
        threads=process.num_threads(),
        sockets=sockets,
        files=files,
        resident_bytes=process.memory_info().rss,
    )


def grown(before: Processes, after: Processes) -> list[str]:
    """Threads and sockets that there are more of than before, by process.

    The API server, in which nothing of the connector runs, starts the threads of its pools as they are needed.
    """
    return [
        f"{role}: {getattr(after[role], what) - count} more {what}"
        for role, process in before.items()
        for what in (("sockets",) if role == SERVER else ("threads", "sockets"))
        if role in after and getattr(after[role], what) > (count := getattr(process, what))
    ]


def left_in_connector(report: EngineReport, live_peers: Collection[str]) -> list[str]:
    """What an engine of ours still holds, beside its connections to the engines in `live_peers`."""
    rows = report.of(EngineRow)
    if not rows:
        return [f"it does not answer: {report.problem or [rank.problem for rank in report.ranks]}"]
    counts = {name: sum(row.counts.get(name, 0) for row in rows) for name in OPEN}
    left = [f"{count} {name}" for name, count in counts.items() if count]
    left += [f"stopped: {row.stopped}" for row in rows if row.stopped]
    strange = [f"{row.engine_id} ({row.state})" for row in report.of(PeerRow) if row.engine_id not in live_peers]
    return left + [f"peer {each}" for each in strange]


def left_in_vllm(client: Client) -> list[str]:
    """KV blocks and requests of an engine with any connector."""
    left = [] if client.blocks_are_free(timeout_seconds=1.0) else ["KV blocks"]
    values = {name: client.metric(name) for name in OPEN_IN_VLLM}
    return left + [f"{value:g} {name}" for name, value in values.items() if value]


def megabytes(seen: Mapping[str, Process], role: str) -> float | None:
    return seen[role].resident_bytes / 1e6 if role in seen else None
