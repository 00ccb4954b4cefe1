"""The tables that `nixl-actor ps` shows: which there are, and what their columns say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from connector.observe.advice import NIXL_HANGS
from connector.tools.cli.output import plain
from connector.tools.durations import duration
from connector.tools.live import NOT_CONNECTED, EngineReport, RankReport, Survey
from connector.tools.names import named_holder
from connector.wire.inspection import (
    AnyRow,
    EngineRow,
    IntroductionRow,
    LeaseRow,
    LocalPrefillRow,
    PeerRow,
    QuarantineRow,
    ReadRow,
    RequestRow,
    WithoutRoomRow,
)

R = TypeVar("R", bound=AnyRow)

ROWS_SHOWN_MAX = 50
GAP = 2
"""Between two columns."""
KEYS_SHARE_MAX = 2 / 3
"""Of the width that ids may take in each part of a table that is too wide."""


class _Columns(NamedTuple, Generic[R]):
    """A table of the rows of one kind, behind a column for the worker that told them.

    Attributes:
        cells: by the head of its column, what a row has there.
        order: by what rows are sorted, so that none is cut off that is asked for; None: as they were told.
    """

    title: str
    kind: type[R]
    cells: dict[str, Callable[[R], object]]
    order: Callable[[R], float] | None = None
    rows_max: int = ROWS_SHOWN_MAX

    def tables(self, found: Survey, width: int | None) -> list[Table]:
        told = [
            (f"{engine.name}/{number}", row)
            for engine in found.engines
            for number, rank in enumerate(engine.ranks)
            for row in rank.of(self.kind)
        ]
        order = self.order
        if order is not None:
            told.sort(key=lambda each: order(each[1]))
        rows = [(on, *(cell(row) for cell in self.cells.values())) for on, row in told]
        return _split_tables(self.title, ["on", *self.cells], rows, width, self.rows_max)


def tables(found: Survey, width: int | None = None) -> list[Table]:
    """Those that have rows. One that is wider than `width` goes on in further ones, so that no id and no head is cut to
    pieces; None: none does."""
    return [*_engines(found, width), *(made for each in _TABLES for made in each.tables(found, width))]


def _engines(found: Survey, width: int | None) -> list[Table]:
    rows: list[tuple[object, ...]] = [
        (f"{row.engine_id}/{number}", engine.address, *(cell(engine, rank, row) for cell in _ENGINE_CELLS.values()))
        for engine in found.engines
        for number, rank in enumerate(engine.ranks)
        for row in rank.of(EngineRow)
    ]
    for engine in found.engines:
        silent = {engine.engine_id: engine.first_problem}
        if engine.answers:
            silent = {
                f"{engine.engine_id}/{number}": rank.problem
                for number, rank in enumerate(engine.ranks)
                if rank.engine is None and rank.problem is not None
            }
        rows += [
            (name, engine.address, *[None] * (len(_ENGINE_CELLS) - 1), problem) for name, problem in silent.items()
        ]
    return _split_tables("Engines", ["engine", "address", *_ENGINE_CELLS], rows, width)


def _split_tables(
    title: str,
    heads: Sequence[str],
    rows: Sequence[tuple[object, ...]],
    width: int | None,
    rows_max: int = ROWS_SHOWN_MAX,
) -> list[Table]:
    if not rows:
        return []
    shown = [[_shown(value) for value in row] for row in rows[:rows_max]]
    made: list[Table] = []
    for columns in _groups([*map(list, zip(heads, *shown, strict=True))], width):
        name = f"{title}, further columns" if made else title
        table = Table(title=name, title_justify="left", caption_justify="left", box=None, pad_edge=False)
        for column in columns:
            table.add_column(heads[column], overflow="fold")
        for row in shown:
            table.add_row(*(escape(row[column]) for column in columns))
        made.append(table)
    if len(rows) > rows_max:
        made[-1].caption = f"... {len(rows) - rows_max} more (--json has all)"
    return made


def _groups(columns: Sequence[Sequence[str]], width: int | None) -> list[list[int]]:
    """The numbers of the columns that fit beside each other. What tells rows apart, which the first two do, is there
    again in each group, if it leaves room for others."""
    if width is None:
        return [[*range(len(columns))]]
    widths = [max(map(cell_len, column)) + GAP for column in columns]
    keys = next(each for each in ([0, 1], [1], []) if sum(widths[key] for key in each) <= KEYS_SHARE_MAX * width)
    groups, taken = [[0]], widths[0]
    for column in range(1, len(columns)):
        if taken + widths[column] - GAP > width:
            groups.append([*keys])
            taken = sum(widths[key] for key in keys)
        groups[-1].append(column)
        taken += widths[column]
    return groups


# --- cells ------------------------------------------------------------------------------------------------------------


def _shown(value: object) -> str:
    if value is None:
        return ""
    return ("yes" if value else "no") if isinstance(value, bool) else plain(value)


def _age(seconds: float | None) -> str:
    return "?" if seconds is None else duration(seconds)


def _left(seconds: float | None) -> str | None:
    """Until something happens; nothing where it is not going to."""
    return None if seconds is None else duration(seconds)


def _lent_of_pool(row: EngineRow) -> str | int:
    """With how many blocks there are, where that is known and worth a word."""
    lent, blocks = row.counts.lent_blocks, row.facts.blocks
    return f"{lent} of {blocks}" if lent and blocks else lent


def _problem(engine: EngineReport, rank: RankReport, row: EngineRow) -> str | None:
    lag_seconds = row.counts.nixl_lag_seconds
    lag = (NIXL_HANGS % lag_seconds).partition(":")[0] if lag_seconds else None
    return row.stopped or rank.problem or lag or engine.refusal


def _waits_for(row: RequestRow) -> str | None:
    return row.waits_for if row.queue_position is None else f"{row.waits_for} ({row.queue_position} before it)"


def _holders(row: LeaseRow) -> str:
    return ", ".join(
        f"{named_holder(each, 'built-in')} ({each.released_count}/{each.ranks}"
        + (f", {each.others} other(s))" if each.others else ")")
        for each in row.holders
    )


# --- tables -----------------------------------------------------------------------------------------------------------

_ENGINE_CELLS: dict[str, Callable[[EngineReport, RankReport, EngineRow], object]] = {
    "role": lambda engine, rank, row: row.facts.role,
    "up": lambda engine, rank, row: _age(row.uptime_seconds),
    "drain": lambda engine, rank, row: rank.draining,
    "peers": lambda engine, rank, row: row.counts.peers,
    "requests": lambda engine, rank, row: row.counts.requests,
    "leases": lambda engine, rank, row: row.counts.leases,
    "lent blocks": lambda engine, rank, row: _lent_of_pool(row),
    "READs": lambda engine, rank, row: row.counts.reads_in_flight,
    "quarantined blocks": lambda engine, rank, row: row.counts.quarantined_blocks,
    "local prefills": lambda engine, rank, row: row.counts.local_prefills,
    "problem": _problem,
}

_PEERS = _Columns(
    "Peers",
    PeerRow,
    {
        "engine": lambda row: row.engine_id,
        "address": lambda row: row.address,
        "state": lambda row: row.state if row.leaving_seconds is None else f"{row.state}, leaves",
        "since": lambda row: _age(row.since_seconds),
        "last failure": lambda row: row.failure,
        "again in": lambda row: _left(row.backoff_seconds),
        "requests": lambda row: row.requests,
        "queued": lambda row: row.queued,
        "holds": lambda row: row.holds,
        "READs": lambda row: row.reads,
        "loading blocks": lambda row: row.loading_blocks,
        "quarantined blocks": lambda row: row.quarantined_blocks,
    },
    order=lambda row: row.state not in NOT_CONNECTED,  # many more may be well, and are cut off
)
_REQUESTS = _Columns(
    "Requests",
    RequestRow,
    {
        "request": lambda row: row.request_id,
        "state": lambda row: row.state,
        "since": lambda row: _age(row.since_seconds),
        "waits for": _waits_for,
        "until": lambda row: _left(row.until_seconds),
        "peer": lambda row: row.peer,
        "blocks": lambda row: row.blocks,
        "READs": lambda row: row.reads,
        "failure": lambda row: row.failure,
    },
    order=lambda row: -(row.age_seconds or 0),
)
_LEASES = _Columns(
    "Leases",
    LeaseRow,
    {
        "request": lambda row: row.request_id,
        "state": lambda row: row.state,
        "since": lambda row: _age(row.since_seconds),
        "expires in": lambda row: _left(row.deadline_seconds),
        "at most": lambda row: _left(row.limit_seconds),
        "blocks": lambda row: row.blocks,
        "held by (ranks done)": _holders,
    },
    order=lambda row: -(row.since_seconds or 0),
)
_READS = _Columns(
    "READs",
    ReadRow,
    {
        "request": lambda row: row.request_id,
        "number": lambda row: row.read,
        "peer": lambda row: row.peer,
        "age": lambda row: _age(row.age_seconds),
        "descriptors": lambda row: row.descriptors,
        "posted": lambda row: row.is_posted,
    },
    order=lambda row: -row.age_seconds,
)
_QUARANTINED = _Columns(
    "Quarantined blocks",
    QuarantineRow,
    {
        "request": lambda row: row.request_id,
        "peer": lambda row: row.peer,
        "blocks": lambda row: row.blocks,
        "READs": lambda row: row.reads,
        "since": lambda row: _age(row.since_seconds),
    },
    order=lambda row: -row.since_seconds,
)
_LOCAL_PREFILLS = _Columns(
    "Computed here",
    LocalPrefillRow,
    {
        "request": lambda row: row.request_id,
        "reason": lambda row: row.reason,
        "tokens": lambda row: row.tokens,
        "since": lambda row: _age(row.age_seconds),
    },
    rows_max=5,
)
_WITHOUT_ROOM = _Columns(
    "Without room in the KV cache",
    WithoutRoomRow,
    {
        "request": lambda row: row.request_id,
        "tokens": lambda row: row.tokens,
        "since": lambda row: _age(row.since_seconds),
        "quarantined then": lambda row: row.quarantined_blocks,
        "lent back then": lambda row: row.lent_back_blocks,
    },
)
_INTRODUCTIONS = _Columns(
    "To be met",
    IntroductionRow,
    {
        "at": lambda row: row.place,
        "state": lambda row: row.state,
        "engine": lambda row: row.engine_id,
        "attempts failed": lambda row: row.failures,
        "last failure": lambda row: row.failure or row.detail,
    },
)
_TABLES = (_PEERS, _INTRODUCTIONS, _REQUESTS, _LEASES, _READS, _QUARANTINED, _WITHOUT_ROOM, _LOCAL_PREFILLS)
