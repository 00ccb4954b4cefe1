"""Reads the state-transition traces of a prefill and a decode engine and lays each request's path out for people.

A request is seen from two sides: the machine `request` in the decode engine's worker process, and the machine `lease`
in the prefill engine's. They join on the request id that the prefill engine gave: it is the subject
of the lease and the `remote_request_id` of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from statemachine.trace import TransitionRecord
from tests.plain_paths import LEASE_PATHS_PLAIN, REQUEST_PATHS_PLAIN

REQUEST_STATES_TERMINAL = frozenset({"done", "failed", "expired"})
LEASE_STATES_TERMINAL = frozenset({"done", "expired", "released"})

_decoder = msgspec.json.Decoder(TransitionRecord)


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One state that a machine was in; `seconds` is None for the state that it was in last."""

    state: str
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything that one machine instance went through."""

    machine: str
    subject: str
    remote_request_id: str | None
    visits: tuple[Visit, ...]
    reason: str | None
    blocks: int
    length_bytes: int

    @property
    def states(self) -> tuple[str, ...]:
        """The states in order, each stay counted once."""
        return tuple(visit.state for visit in self.visits)

    def __str__(self) -> str:
        steps = (
            visit.state if visit.seconds is None else f"{visit.state} {milliseconds(visit.seconds)}"
            for visit in self.visits
        )
        return " -> ".join(steps) + (f" ({self.reason})" if self.reason else "")


def read_records(directory: Path) -> list[list[TransitionRecord]]:
    """Records per process, from the .jsonl files in `directory`; a line that is still being written is left out.

    Raises msgspec.ValidationError or msgspec.DecodeError when a whole line is not a transition record.
    """
    processes = []
    for path in sorted(directory.glob("*.jsonl")):
        whole_lines = path.read_bytes().rpartition(b"\n")[0]
        processes.append([_decoder.decode(line) for line in whole_lines.splitlines() if line])
    return processes


def histories(processes: Iterable[Sequence[TransitionRecord]], machine: str) -> list[History]:
    """One history per instance of `machine`, in the order of their first records within each process."""
    return [_history(records) for process in processes for records in _instances(process, machine)]


def _instances(process: Sequence[TransitionRecord], machine: str) -> Iterator[list[TransitionRecord]]:
    """The records of each instance. A subject whose `from_state` is None again is a new instance."""
    latest: dict[tuple[int, str], list[TransitionRecord]] = {}
    instances: list[list[TransitionRecord]] = []
    for record in process:
        if record.machine != machine:
            continue
        key = (record.rank, record.subject)
        if record.from_state is None or key not in latest:
            latest[key] = []
            instances.append(latest[key])
        latest[key].append(record)
    return iter(instances)


def _history(records: Sequence[TransitionRecord]) -> History:
    entered = [records[0]]
    if records[0].from_state is not None:  # the creation is missing; show what is known
        entered.insert(0, msgspec.structs.replace(records[0], to_state=records[0].from_state))
    entered += [record for record in records[1:] if record.to_state != record.from_state]
    visits = [
        Visit(state=record.to_state, seconds=(following.mono_ns - record.mono_ns) / 1e9)
        for record, following in pairwise(entered)
    ]
    visits.append(Visit(state=entered[-1].to_state, seconds=None))
    return History(
        machine=records[0].machine,
        subject=records[0].subject,
        remote_request_id=next((record.remote_request_id for record in records if record.remote_request_id), None),
        visits=tuple(visits),
        reason=records[-1].reason,
        blocks=max(record.blocks or 0 for record in records),
        length_bytes=max(record.bytes or 0 for record in records),
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request of the table: the answer, and both sides of its path where they were found."""

    request_id: str
    kind: str
    prompt_tokens: int
    verdict: str
    right: bool
    """Whether the answer is the one that D computes alone."""
    request: History | None
    lease: History | None

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not as it should be, in words; empty when everything is."""
        return (*(() if self.right else (f"answer: {self.verdict}",)), *self.path_problems)

    @property
    def path_problems(self) -> tuple[str, ...]:
        """Where a machine's path is not the plain one."""
        return (
            *_path_problem("request on D", self.request, REQUEST_PATHS_PLAIN),
            *_path_problem("lease on P", self.lease, LEASE_PATHS_PLAIN),
        )

    @property
    def settled(self) -> bool:
        """Whether both machines ended, well or not."""
        return (
            self.request is not None
            and self.lease is not None
            and self.request.states[-1] in REQUEST_STATES_TERMINAL
            and self.lease.states[-1] in LEASE_STATES_TERMINAL
        )


def _path_problem(what: str, history: History | None, plain: tuple[tuple[str, ...], ...]) -> list[str]:
    if history is None:
        return [f"{what}: no record in the traces"]
    if history.states not in plain:
        return [f"{what}: went {' -> '.join(history.states)}, not {' -> '.join(plain[0])}"]
    return []


def joined(
    client_request_id: str, requests: Iterable[History], leases: Iterable[History]
) -> tuple[History | None, History | None]:
    """D's request and P's lease of one client request, found by the id that the client sent.

    vLLM wraps the client's id (`cmpl-<id>-0-<random>`), on P and on D with different random parts; the lease is joined
    by the id that D says it asked P for.
    """
    request = next((each for each in requests if f"-{client_request_id}-" in each.subject), None)
    if request is None:
        lease = next((each for each in leases if f"-{client_request_id}-" in each.subject), None)
    else:
        lease = next((each for each in leases if each.subject == request.remote_request_id), None)
    return request, lease


def render(rows: Sequence[Row]) -> str:
    """The table: a line for the request on D with the amounts and the verdict, and a line for the lease on P."""
    kind_width = max((len(row.kind) for row in rows), default=0)
    lines = [f"{'request':9}  {'prompt':{kind_width}}  tokens  blocks     bytes  answer     path"]
    lines.append("-" * (len(lines[0]) + 56))
    for row in rows:
        amounts = (row.request.blocks, row.request.length_bytes) if row.request else (0, 0)
        start = f"{row.request_id:9}  {row.kind:{kind_width}}  {row.prompt_tokens:6}  {amounts[0]:6}  {amounts[1]:8}"
        lines.append(f"{start}  {row.verdict:9}  D {row.request or 'no record in the traces'}")
        lines.append(f"{'':{len(start)}}  {'':9}  P {row.lease or 'no record in the traces'}")
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """A duration with the precision that it deserves."""
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
