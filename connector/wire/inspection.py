"""Questions of tools about what lives in a worker, and the answers: read-only messages on its control socket.

    tool -> worker   Inspect     what to show, of which request, from which row on
    worker -> tool   Inspected   so many rows, and where to go on; or nothing, when too many questions wait

One msgpack map in one frame each, as all messages on that socket (`connector.wire.control`). A question names one kind
of rows (`What`). An answer has at most ROWS_MAX rows and about ROWS_BYTES_MAX bytes; `next` is the row from which to
ask on. The worker keeps its list of what there is while it is asked on: what has ended before its row was made is left
out, what has come since the first answer is missing, and nothing is told twice. It keeps few lists, and not for long
(`connector/runtime/inspector.py`). An answer from another list than the one before begins at the first row again, says
so in `first`, and takes the place of all answers before it. No clock reading crosses, only durations; `wall` is for
people.

Both sides distrust the other: the worker decodes a question within bounds, the tool an answer. Fields of rows may be
added; a tool ignores those that it does not know. Kinds of rows may be added too: a worker that does not know a kind
answers that it has none. Left without an answer, a newer tool would wait for it until its time is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from connector.wire.bounded import Natural, decode_frame, shorten
from statemachine.trace import TransitionRecord

ROWS_MAX = 256
"""An answer has at most so many rows."""
ROWS_BYTES_MAX = 1 << 20
"""The rows of an answer have at most so many bytes; the last row may go beyond that, by ROW_BYTES_MAX at most."""
ROW_BYTES_MAX = 1 << 19
ANSWER_BYTES_MAX = ROWS_BYTES_MAX + ROW_BYTES_MAX + 4096
WHAT_LENGTH_MAX = 64
MATCH_LENGTH_MAX = 512
TEXT_LENGTH_MAX = 512
"""Characters of an id or a name in a row; longer ones are cut."""
DETAIL_LENGTH_MAX = 1000
LIST_LENGTH_MAX = 16
"""Entries of a list within a row; further ones are counted."""
ENTRIES_MAX = 96
"""A map of options or of the environment has at most so many entries."""
START_DATE = "VLLM_SYSTEM_START_DATE"
"""In the environment: the date that vLLM writes into the prompts of some models (gpt-oss), in place of today's."""

What: TypeAlias = Literal[
    "engine",
    "peers",
    "requests",
    "holds",
    "leases",
    "reads",
    "quarantines",
    "local_prefills",
    "without_room",
    "introductions",
    "records",
]


class Inspect(msgspec.Struct, frozen=True, kw_only=True, tag="inspect"):
    """Show rows of one kind.

    Attributes:
        number: chosen by the tool; the answer repeats it.
        what: one of `What`. A newer tool may know more kinds: of these there are no rows.
        match: only rows about requests one of whose ids contains this; empty: all. Not for `engine`; for `peers`, those
            whose engine id contains it.
        first: 0, or `next` of the answer before.
        rows: how many at most.
    """

    number: Natural
    what: Annotated[str, Meta(max_length=WHAT_LENGTH_MAX)]
    match: Annotated[str, Meta(max_length=MATCH_LENGTH_MAX)] = ""
    first: Natural = 0
    rows: Annotated[int, Meta(ge=1, le=ROWS_MAX)] = ROWS_MAX


# --- rows -------------------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all rows. Seconds are durations until, or since, the moment of the answer.

    `what`: the question that rows of this kind answer.
    """

    what: ClassVar[What]

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for the rows of one worker that are about the same thing; here, where there is one of its kind."""
        return (self.what,)


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a worker lives. Texts are cut to bounds where they are made (`facts`).

    Attributes:
        role: vLLM's `kv_role`.
        versions: of this package, vLLM, NIXL, Python.
        options: those in force, as JSON values.
        environment: variables of UCX, NIXL and vLLM's side channel that are set in this process, and the one that pins
            the date in prompts.
        factors: those of `identity.KvIdentity`, without the model's configuration.
        devices: RDMA devices of this machine, as Linux lists them.
        addresses: IP addresses of this machine.
        packs: whether what is read from an engine on GPUs is put in the order of attention on CPUs here.
        utc_offsets: of local time, all the year round. Chat templates write dates in it.
    """

    role: str = ""
    model: str = ""
    load_failure_policy: str = ""
    host_name: str = ""
    process_id: int = 0
    side_channel: str = ""
    control: str = ""
    versions: dict[str, str] = {}
    options: dict[str, str] = {}
    environment: dict[str, str] = {}
    factors: dict[str, str] = {}
    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    memory_kind: str = ""
    registered_bytes: int = 0
    blocks: int = 0
    """Logical blocks of the KV cache."""
    block_tokens: int = 0
    packs: bool = False
    utc_offsets: str = ""


class EngineCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many of what lives now in a worker, what it holds of NIXL's included, and what was counted since its start.

    Attributes:
        nixl_lag_seconds: for how long NIXL has not come back from a call; 0 unless that is long.
        local_prefills, late_releases, notifications_dropped, trace_records_missing: since the start.
    """

    peers: int = 0
    requests: int = 0
    claims: int = 0
    quarantined_requests: int = 0
    quarantined_blocks: int = 0
    leases: int = 0
    lent_blocks: int = 0
    commands_that_wait_for_the_device: int = 0
    reads_in_flight: int = 0
    read_handles: int = 0
    nixl_lag_seconds: int = 0
    remote_agents: int = 0
    local_descriptor_lists: int = 0
    remote_descriptor_lists: int = 0
    local_prefills: int = 0
    late_releases: int = 0
    notifications_dropped: int = 0
    trace_records_missing: int = 0


class EngineRow(Row, frozen=True, kw_only=True):
    """This worker.

    Attributes:
        recorded_seconds: how far back every step is kept; None: nothing has happened yet.
        peers_by_state, leases_by_state: how many there are, by their states.
        trace_interrupted: the trace file that cannot be written, and why; None while it can.
    """

    what: ClassVar[What] = "engine"

    engine_id: str
    rank: int
    tp_rank: int
    pp_rank: int
    tp_size: int
    uptime_seconds: float
    recorded_seconds: float | None
    stopped: str | None
    facts: EngineFacts
    counts: EngineCounts
    peers_by_state: dict[str, int]
    leases_by_state: dict[str, int]
    trace_interrupted: str | None = None


class PeerRow(Row, frozen=True, kw_only=True):
    """A remote engine as this worker reads from it.

    Attributes:
        since_seconds: in its state; None: not known.
        failure, detail: kind and sentence of the last failure.
        ranks: of it that are connected.
        queued: requests that are announced and wait in vLLM's queue; `requests` have their blocks.
        loading_blocks: of this engine, which `requests` have: their KV is still to come, or on its way.
        holds: leases that are wanted of it, or owed a release.
        quarantined_blocks: that READs from it may still write into.
        leaving_seconds: it is to end, and keeps what it lends for so long at most; None: it has not said so.
    """

    what: ClassVar[What] = "peers"

    engine_id: str
    address: str
    state: str
    since_seconds: float | None
    failure: str | None
    detail: str | None
    failures: int
    backoff_seconds: float | None
    is_builtin: bool
    is_retiring: bool
    ranks: int
    requests: int
    queued: int
    holds: int
    reads: int
    quarantined_requests: int
    quarantined_blocks: int
    unasked_seconds: float
    leaving_seconds: float | None = None
    loading_blocks: int = 0

    @property
    def identity(self) -> tuple[object, ...]:
        return self.what, self.engine_id, self.address


class RequestRow(Row, frozen=True, kw_only=True):
    """A request on D that has not ended: `queued` while it waits in vLLM's queue, and then a state of `request`.

    Attributes:
        waits_for: scheduler, peer, checksums (with the option verify, which P has not said yet), turn (its READs wait
            for those of other requests), reads, check (with the option verify: all bytes are here, and are compared
            with P's checksums), proof or quiescence.
        since_seconds: in its state; None: not known.
        age_seconds: since its blocks were allocated; of a queued one, since this engine first heard of its lease.
        until_seconds: until its state ends at the latest; None: not bounded by the connector.
        queue_position: of its READs among the requests whose turn has not come, from 0.
        reads: READs that have not ended, or are not checked yet; `bytes`: of those that have.
        proven_seconds: how much longer P is known to keep the blocks; None: it has not said, or does not keep them.
        ending, failure, detail: of a draining request: how it will end, and why.
    """

    what: ClassVar[What] = "requests"

    request_id: str
    remote_request_id: str
    lease_number: int
    peer: str
    address: str
    state: str
    waits_for: str
    since_seconds: float | None
    age_seconds: float | None
    until_seconds: float | None
    queue_position: int | None
    blocks: int | None
    reads: int
    bytes: int | None
    proven_seconds: float | None
    retries_left: int
    ending: str | None
    failure: str | None
    detail: str | None

    @property
    def identity(self) -> tuple[object, ...]:
        return self.what, self.request_id


class HoldRow(Row, frozen=True, kw_only=True):
    """One lease on one rank of P, as D knows it; `unmet` while P was not connected since it is wanted."""

    what: ClassVar[What] = "holds"

    remote_request_id: str
    lease_number: int
    peer: str
    rank: int
    state: str
    since_seconds: float | None
    proven_seconds: float | None
    why: str | None
    users: tuple[str, ...]
    users_count: int

    @property
    def identity(self) -> tuple[object, ...]:
        return self.what, self.remote_request_id, self.lease_number, self.peer, self.rank


class HolderRow(msgspec.Struct, frozen=True, kw_only=True):
    """A decode engine that reads a lease; empty: the built-in ones, whose ranks are agents' names. `others`: processes
    of that id that are waited for although all ranks are done. `address`: from where one of its ranks was last heard;
    empty: that is not known. `is_connected`: over a connection that stands; meaningless without an address."""

    engine_id: str
    ranks: int
    released: tuple[str, ...]
    released_count: int
    others: int = 0
    address: str = ""
    is_connected: bool = True


class LeaseRow(Row, frozen=True, kw_only=True):
    """What P lends. `deadline_seconds`: until it expires unless it is renewed; `limit_seconds`: however it is.
    `is_lent_back`: these are the blocks of an answer, kept for read-back for a fixed time."""

    what: ClassVar[What] = "leases"

    request_id: str
    lease_number: int
    state: str
    since_seconds: float | None
    deadline_seconds: float | None
    limit_seconds: float | None
    blocks: int
    holders: tuple[HolderRow, ...]
    holders_count: int
    is_lent_back: bool = False

    @property
    def identity(self) -> tuple[object, ...]:
        return self.what, self.request_id, self.lease_number


class ReadRow(Row, frozen=True, kw_only=True):
    """A READ that NIXL was given and has not ended. `is_posted` false: its turn has not come."""

    what: ClassVar[What] = "reads"

    request_id: str
    read: int
    peer: str
    age_seconds: float
    descriptors: int
    is_posted: bool

    @property
    def identity(self) -> tuple[object, ...]:
        return self.what, self.request_id, self.read


class QuarantineRow(Row, frozen=True, kw_only=True):
    """A request that ended while READs might still write into its blocks; these stay out of the pool until they end."""

    what: ClassVar[What] = "quarantines"

    request_id: str
    remote_request_id: str
    peer: str
    blocks: int
    reads: int
    since_seconds: float

    @property
    def identity(self) -> tuple[object, ...]:
        return self.what, self.request_id


def quarantined_blocks(rows: Iterable[QuarantineRow]) -> int:
    """How many blocks of one engine are in quarantine. A block counts once, however many ranks keep their part of it
    aside."""
    of_request: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (row.peer, row.request_id)
        of_request[key] = max(row.blocks, of_request.get(key, 0))
    return sum(of_request.values())


class LocalPrefillRow(Row, frozen=True, kw_only=True):
    """A request whose prompt this engine computed itself, without anybody having asked for that.

    `reason`: as the metric `local_prefills` counts it. `tokens`: of the prompt, computed as far as they were not
    cached.
    """

    what: ClassVar[What] = "local_prefills"

    request_id: str
    reason: str
    tokens: int
    age_seconds: float

    @property
    def identity(self) -> tuple[object, ...]:
        return self.what, self.request_id


class WithoutRoomRow(Row, frozen=True, kw_only=True):
    """A request that waits in vLLM's queue, because it needs more blocks than are left beside those that are kept from
    the pool.

    Attributes:
        tokens: that it has.
        quarantined_blocks, lent_back_blocks: kept when that was noticed, `since_seconds` ago.
    """

    what: ClassVar[What] = "without_room"

    request_id: str
    tokens: int
    quarantined_blocks: int
    lent_back_blocks: int
    since_seconds: float

    @property
    def identity(self) -> tuple[object, ...]:
        return self.what, self.request_id


class IntroductionRow(Row, frozen=True, kw_only=True):
    """A prefill engine that is to be met before a request needs it, by an option or a tool, and is not yet.

    Attributes:
        place: host:port of its side channel.
        state: that of `statemachine.introduction`.
        engine_id: of the engine that answered there last; empty: none has.
        failures: attempts that failed in a row.
        failure, detail: kind, if it has one, and sentence of why the last one did; None: none has.
        is_builtin: it runs the built-in connector, and is met with its first request.
    """

    what: ClassVar[What] = "introductions"

    place: str
    state: str
    engine_id: str
    failures: int
    failure: str | None
    detail: str | None
    is_builtin: bool

    @property
    def identity(self) -> tuple[object, ...]:
        return self.what, self.place


class RecordRow(Row, frozen=True, kw_only=True):
    """A step of the flight recorder; the newest come first. `age_seconds`: since it was taken."""

    what: ClassVar[What] = "records"

    record: TransitionRecord
    age_seconds: float

    @property
    def identity(self) -> tuple[object, ...]:
        return self.what, self.record.mono_ns, self.record.machine, self.record.subject, self.record.to_state


AnyRow: TypeAlias = (
    EngineRow
    | PeerRow
    | RequestRow
    | HoldRow
    | LeaseRow
    | ReadRow
    | QuarantineRow
    | LocalPrefillRow
    | WithoutRoomRow
    | IntroductionRow
    | RecordRow
)
WHATS: tuple[What, ...] = tuple(kind.what for kind in get_args(AnyRow))


class Inspected(msgspec.Struct, frozen=True, kw_only=True, tag="inspected"):
    """The answer.

    Attributes:
        total: rows of this kind, whether they match or not.
        first: that of the question; 0, if the list in which it was to go on is not kept any more.
        next: None: there are no more rows.
    """

    number: Natural
    what: What
    wall: float
    total: Natural
    first: Natural
    next: Natural | None
    rows: Annotated[tuple[AnyRow, ...], Meta(max_length=ROWS_MAX)]


class _Encoded(msgspec.Struct, frozen=True, kw_only=True, tag="inspected"):
    """`Inspected` with rows that are encoded already."""

    number: int
    what: str
    wall: float
    total: int
    first: int
    next: int | None
    rows: list[msgspec.Raw]


# --- the worker's side ------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Inspected] = msgspec.msgpack.Decoder(Inspected)


class AnswerBuilder:
    """Collects the rows of one answer until it is full."""

    def __init__(self, rows_max: int) -> None:
        self._rows: list[msgspec.Raw] = []
        self._rows_max = min(rows_max, ROWS_MAX)
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return len(self._rows) >= self._rows_max or self._bytes >= ROWS_BYTES_MAX

    def add(self, row: AnyRow) -> None:
        encoded = _encoder.encode(row)
        self._bytes += len(encoded)
        self._rows.append(msgspec.Raw(encoded))

    def frames(self, question: Inspect, *, wall: float, total: int, first: int, next_row: int | None) -> tuple[bytes]:
        answer = _Encoded(
            number=question.number,
            what=question.what,
            wall=wall,
            total=total,
            first=first,
            next=next_row,
            rows=self._rows,
        )
        return (_encoder.encode(answer),)


def text(value: object) -> str:
    """An id or a name, fit for a row and for a terminal."""
    said = str(value)
    return said if len(said) <= TEXT_LENGTH_MAX and said.isprintable() else shorten(said, TEXT_LENGTH_MAX)


def optional_text(value: object | None, length_max: int = TEXT_LENGTH_MAX) -> str | None:
    return None if value is None else shorten(str(value), length_max)


def texts(values: dict[str, Any]) -> dict[str, str]:
    """A map of options or of the environment, within bounds."""
    chosen = sorted(values.items())[:ENTRIES_MAX]
    return {text(name): text(value) for name, value in chosen}


def with_texts(record: TransitionRecord, values: dict[str, str | None]) -> TransitionRecord:
    """The record with these fields in place of its own."""
    return msgspec.structs.replace(record, **values)


# --- the tool's side --------------------------------------------------------------------------------------------------


def decode_inspected(frames_untrusted: Sequence[bytes]) -> Inspected:
    """Read what a worker sent. Raises DecodeFailed."""
    return decode_frame(_decoder, frames_untrusted, bytes_max=ANSWER_BYTES_MAX)
