"""What running engines say of themselves, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from connector.observe.history import LeaseKey
from connector.tools.names import some_of
from connector.wire.inspection import (
    AnyRow,
    EngineFacts,
    EngineRow,
    HoldRow,
    PeerRow,
    QuarantineRow,
    RecordRow,
    RequestRow,
    Row,
)
from statemachine import hold
from statemachine.trace import TransitionRecord

if TYPE_CHECKING:
    from connector.tools.live import Silent

R = TypeVar("R", bound=AnyRow)


class Said(NamedTuple, Generic[R]):
    """A row and the worker that it came from."""

    engine_id: str
    rank: int
    row: R


@dataclass(frozen=True, kw_only=True)
class Live:
    """What running engines say. Without any, everything is empty."""

    rows: Mapping[type[Row], Sequence[Said[Any]]] = field(default_factory=dict)
    """By their type (`by_type`)."""
    silent: tuple[Silent, ...] = ()
    shifts: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """By how many seconds the clock of an engine's rank was moved in its trace, so that all clocks agree."""
    leaving: tuple[str, ...] = ()
    """Engines that drain, or have drained: since then they answer prefills without parameters, and record nothing."""

    def of(self, kind: type[R]) -> Sequence[Said[R]]:
        """All of one kind."""
        return self.rows.get(kind, ())

    def facts(self, engine_id: str | None) -> EngineFacts | None:
        return next((each.row.facts for each in self.of(EngineRow) if each.engine_id == engine_id), None)

    def peer_of(
        self, decode_id: str | None, rank: int | None, peer_id: str | None, *, because: str | None = None
    ) -> PeerRow | None:
        """The connection of this rank, for each has its own. Of two, where requests describe the engine by unlike
        sizes: of a request that has ended, the one of whose failure its own speaks (`because`), or that is connected;
        of another, the one that requests wait for or that has failed."""
        rows = [
            each.row
            for each in self.of(PeerRow)
            if (each.engine_id, each.rank, each.row.engine_id) == (decode_id, rank, peer_id)
        ]
        if because is not None:
            return max(
                rows,
                key=lambda row: (row.failure is not None and row.failure in because, row.ranks > 0),
                default=None,
            )
        return max(rows, key=lambda row: (row.requests > 0, row.failure is not None), default=None)

    def quarantined_from(self, decode_id: str) -> str:
        """The engines because of which blocks of this one are in quarantine now, in words; empty: there are none."""
        return some_of(sorted({each.row.peer for each in self.of(QuarantineRow) if each.engine_id == decode_id}))

    def age_of(self, record: TransitionRecord) -> float | None:
        """Seconds between a step and the answer in which a running engine has told it; None: none has."""
        return self._ages.get(_step_of(record))

    @cached_property
    def gone(self) -> Mapping[tuple[str, int, LeaseKey], str]:
        """Why P does not keep the blocks of a lease any more, as a rank of D knows it: by engine id and rank of D. Made
        once, because there may be ten thousand of both these and the requests that ask for one."""
        found: dict[tuple[str, int, LeaseKey], str] = {}
        for each in self.of(HoldRow):
            if each.row.state == hold.State.GONE.value:
                found.setdefault((each.engine_id, each.rank, key_on_d(each.row)), each.row.why or "")
        return found

    @cached_property
    def _ages(self) -> Mapping[tuple[object, ...], float]:
        """Of each step that was told. The newest came first."""
        return {_step_of(row.record): row.age_seconds for _, _, row in reversed(self.of(RecordRow))}

    def silence_of(self, engine_id: str | None, address: str | None) -> Silent | None:
        """Why nothing is known of this engine now."""
        return next(
            (
                each
                for each in self.silent
                if (each.engine_id is not None and each.engine_id == engine_id) or each.address == address
            ),
            None,
        )


def key_on_d(row: RequestRow | HoldRow) -> LeaseKey:
    """The lease, as D names it."""
    return LeaseKey(row.peer, row.remote_request_id, row.lease_number)


def _step_of(record: TransitionRecord) -> tuple[object, ...]:
    return record.engine_id, record.rank, record.mono_ns, record.subject, record.to_state


def by_type(rows: Iterable[tuple[str, int, AnyRow]]) -> dict[type[Row], list[Said[Any]]]:
    """`Live.rows` of rows as they came from workers: engine id, rank, row."""
    found: dict[type[Row], list[Said[Any]]] = {}
    for engine_id, rank, row in rows:
        found.setdefault(type(row), []).append(Said(engine_id, rank, row))
    return found


def live_of(
    rows: Iterable[tuple[str, int, AnyRow]], silent: Sequence[Silent] = (), leaving: Iterable[str] = ()
) -> tuple[list[TransitionRecord], Live]:
    """Rows as they came from workers (engine id, rank, row): their records, and the rest."""
    live = Live(rows=by_type(rows), silent=tuple(silent), leaving=tuple(leaving))
    # The newest came first; of those of one moment too.
    recorded = [each.row.record for each in reversed(live.of(RecordRow))]
    recorded.sort(key=lambda record: (record.engine_id, record.rank, record.mono_ns))
    return recorded, live
