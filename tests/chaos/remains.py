"""What engines hold: of their own, as they say it themselves, and of the operating system's.

Both are compared at moments at which no request is open. What is left then is what a leak leaves.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from connector.tools.live import EngineReport
from connector.wire.inspection import EngineRow, PeerRow
from statemachine.failures import FirstReadNeverEnded
from statemachine.peer import HandshakeSucceeded
from statemachine.trace import TransitionRecord
from tests.e2e.client import Client
from tests.e2e.engines import Engine

OPEN = (
    *("requests", "claims", "quarantined_requests", "quarantined_blocks", "reads_in_flight", "read_handles"),
    *("leases", "lent_blocks"),
)
"""Counts of a worker that are 0 while nothing is open."""
OF_A_RANK = ("remote_agents", "remote_descriptor_lists")
"""Counts of a worker of which each rank that it is connected to has one, where all engines are laid out alike."""
OF_A_WORKER = ("local_descriptor_lists",)
"""Counts of which it has one at most, where all engines are laid out alike."""
OPEN_IN_VLLM = ("vllm:num_requests_running", "vllm:num_requests_waiting")

_NUMBER = re.compile(r"[0-9a-f]{8,}|\d+")
"""In the name of a file, a socket or a pipe; it differs from process to process."""

SERVER, CORE, WORKER = "API server", "engine core", "worker"
ROLES = (SERVER, CORE, WORKER)
"""Each is the parent of the next."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of an engine, as Linux sees it.

    Attributes:
        files: descriptors that are no sockets.
        names: of threads and of files, how often there is which: so it can be said what there is more of.
    """

    pid: int
    threads: int
    sockets: int
    files: int
    resident_bytes: int
    names: dict[str, dict[str, int]] = {}


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
    place = f"/proc/{process.pid}"
    targets = Counter(_NUMBER.sub("*", each) for each in _read(os.readlink, f"{place}/fd"))
    threads = Counter(_read(lambda path: Path(path, "comm").read_text().strip(), f"{place}/task"))
    sockets = targets.pop("socket:[*]", 0)
    return Process(
        pid=process.pid,
        threads=threads.total(),
        sockets=sockets,
        files=targets.total(),
        resident_bytes=process.memory_info().rss,
        names={"threads": dict(threads), "files": dict(targets)},
    )


def _read(read: Callable[[str], str], directory: str) -> Iterator[str]:
    """Of each entry that is still there when its turn comes."""
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield read(f"{directory}/{name}")


def fewest(looks: Sequence[Processes]) -> Processes:
    """Of each process, the look that has seen the fewest threads, sockets and other files."""
    return {
        role: min(
            (look[role] for look in looks if role in look), key=lambda each: each.threads + each.sockets + each.files
        )
        for role in ROLES
        if any(role in look for look in looks)
    }


def grown(before: Processes, after: Processes, *, worker_sockets: int = 0) -> list[str]:
    """Threads, sockets and other files that there are more of than before, by process. `worker_sockets`: how many more
    the worker may have.

    The API server, in which nothing of the connector runs, starts the threads of its pools as they are needed.
    """
    return [
        f"{role}: {more} more {what}{_named(process, after[role], what)}"
        for role, process in before.items()
        for what in (("sockets", "files") if role == SERVER else ("threads", "sockets", "files"))
        if role in after
        and (more := getattr(after[role], what) - getattr(process, what))
        > (worker_sockets if (role, what) == (WORKER, "sockets") else 0)
    ]


def _named(before: Process, after: Process, what: str) -> str:
    more = Counter(after.names.get(what, {})) - Counter(before.names.get(what, {}))
    return f" ({', '.join(f'{count} {name}' for name, count in more.items())})" if more else ""


class Life(NamedTuple):
    """One of a prefill engine that has ended: Unix times at which it was started, at the latest, and ended."""

    engine_id: str
    since_wall: float
    until_wall: float


def sockets_of_reconnections(records: Iterable[TransitionRecord], life: Life, sockets_each: Mapping[str, int]) -> int:
    """Sockets that NIXL keeps in a prefill engine until the decode engines end, which removed it and connected to it
    anew, or tried to (docs/nixl.md fact 11). `sockets_each`: by engine id of a decode engine, how many a reconnection
    costs."""
    connected = Counter(
        record.engine_id
        for record in records
        if record.subject == life.engine_id
        if record.event == HandshakeSucceeded.__name__ or record.reason == FirstReadNeverEnded.__name__
        if life.since_wall <= record.wall <= life.until_wall
    )
    return sum((count - 1) * sockets_each[decode] for decode, count in connected.items())


def left_in_connector(report: EngineReport, live_peers: Collection[str]) -> list[str]:
    """What an engine of ours still holds, beside its connections to the engines in `live_peers`."""
    rows = report.of(EngineRow)
    if not rows:
        return [f"it does not answer: {report.problem or [rank.problem for rank in report.ranks]}"]
    counts = {name: sum(getattr(row.counts, name) for row in rows) for name in OPEN}
    left = [f"{count} {_in_words(name)}" for name, count in counts.items() if count]
    left += [f"stopped: {row.stopped}" for row in rows if row.stopped]
    peers = report.of(PeerRow)
    allowed = dict.fromkeys(OF_A_RANK, sum(peer.ranks for peer in peers)) | dict.fromkeys(OF_A_WORKER, len(rows))
    held = {name: sum(getattr(row.counts, name) for row in rows) for name in allowed}
    left += [f"{count} {_in_words(name)}, not {allowed[name]}" for name, count in held.items() if count > allowed[name]]
    strange = [f"{row.engine_id} ({row.state})" for row in peers if row.engine_id not in live_peers]
    return left + [f"peer {each}" for each in strange]


def _in_words(name: str) -> str:
    return name.replace("_", " ")


def left_in_vllm(client: Client) -> list[str]:
    """KV blocks and requests of an engine with any connector."""
    left = [] if client.blocks_are_free(timeout_seconds=1.0) else ["KV blocks"]
    values = {name: client.metric(name) for name in OPEN_IN_VLLM}
    return left + [f"{value:g} {name}" for name, value in values.items() if value]


def megabytes(seen: Mapping[str, Process], role: str) -> float | None:
    return seen[role].resident_bytes / 1e6 if role in seen else None
