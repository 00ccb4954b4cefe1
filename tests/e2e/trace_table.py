"""The table that the demo shows: each request's path through the states of its machines, on D and on P."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connector.observe.history import History
from tests.plain_paths import LEASE_PATHS_PLAIN, REQUEST_PATHS_PLAIN


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
        return all(history is not None and history.is_over for history in (self.request, self.lease))


def _path_problem(what: str, history: History | None, plain: tuple[tuple[str, ...], ...]) -> list[str]:
    if history is None:
        return [f"{what}: no record in the traces"]
    if history.states not in plain:
        return [f"{what}: went {' -> '.join(history.states)}, not {' -> '.join(plain[0])}"]
    return []


def render(rows: Sequence[Row]) -> str:
    """The table: a line for the request on D with the amounts and the verdict, and a line for the lease on P."""
    kind_width = max((len(row.kind) for row in rows), default=0)
    lines = [f"{'request':9}  {'prompt':{kind_width}}  tokens  blocks     bytes  answer     path"]
    lines.append("-" * (len(lines[0]) + 56))
    for row in rows:
        amounts = (row.request.blocks, row.request.length_bytes) if row.request else (0, 0)
        start = f"{row.request_id:9}  {row.kind:{kind_width}}  {row.prompt_tokens:6}  {amounts[0]:6}  {amounts[1]:8}"
        lines.append(f"{start}  {row.verdict:9}  D {_path(row.request)}")
        lines.append(f"{'':{len(start)}}  {'':9}  P {_path(row.lease)}")
    return "\n".join(lines)


def _path(history: History | None) -> str:
    if history is None:
        return "no record in the traces"
    steps = (
        visit.state if visit.seconds is None else f"{visit.state} {milliseconds(visit.seconds)}"
        for visit in history.visits
    )
    return " -> ".join(steps) + (f" ({history.reason})" if history.reason else "")


def milliseconds(seconds: float) -> str:
    """A duration with the precision that it deserves."""
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
