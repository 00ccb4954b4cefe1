"""What the files of a state-transition trace hold: JSON lines, and how they are called.

The first line of a file is a `FileHeader`: the version of the schema, who writes (engine, rank, role, process, version
of the connector) and which file of the sequence this is. Every other line is one `TransitionRecord` with all its
fields, or a `TraceGap` in the place of records that are missing (`trace_writer` says when); a field without a value is
null. The schema has a number, `SCHEMA`. Fields are added without a new one, because a reader skips what it does not
know and takes what it does not find for null; where a field would change its meaning or go, the number grows, and a
reader refuses a number that it does not know (`TraceSchemaError`). An excerpt without a header, such as grep makes, is
read as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from connector import DISTRIBUTION
from connector.versions import shown_version
from connector.wire.bounded import shorten
from statemachine.trace import TransitionRecord

SCHEMA = 1
"""The number of the format that is written here. Files with a higher number are not read."""

HEADER_START = b'{"schema":'
GAP_START = b'{"missing":'
"""In no other line: a text has its quotation marks escaped."""
RECORD_START = b'{"seq":'
"""As records are written here; a tool may have put them in another form."""

_FILE_NAME = re.compile(r"(?P<stem>.+?)(?:\.(?P<part>\d+))?\.jsonl")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TransitionRecord)


class FileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file.

    Attributes:
        schema: version of the meaning of all lines.
        part: number of the file in its process's sequence, from 0.
        engine_id, rank, role: as in every record.
        process: kind of the process: `worker`.
        pid, host: which process, on which machine.
        version: of the connector.
        started: when the sink was opened, Unix time in seconds.
        sample: share of the requests that is traced.
    """

    schema: int  # first, so that a reader can tell a header from a record
    part: int
    engine_id: str
    rank: int
    role: str
    process: str
    pid: int
    host: str
    version: str
    started: float
    sample: float


class TraceGap(msgspec.Struct, frozen=True, kw_only=True):
    """A line in the place of records that were not written, because the file system did not keep up or refused them.

    Attributes:
        missing: how many, of those that the sample takes.
        seq, wall, mono_ns: of the first of them, as in a record.
        until_wall: of the last of them.
    """

    missing: int  # first, so that a reader can tell it from a record
    seq: int
    wall: float
    mono_ns: int
    until_wall: float

    @classmethod
    def of(cls, records: Sequence[TransitionRecord]) -> TraceGap:
        """These are missing; there is at least one."""
        first, last = records[0], records[-1]
        return cls(missing=len(records), seq=first.seq, wall=first.wall, mono_ns=first.mono_ns, until_wall=last.wall)

    def behind(self, earlier: TraceGap | None) -> TraceGap:
        """Both as one, if nothing was written between them."""
        if earlier is None:
            return self
        return msgspec.structs.replace(earlier, missing=earlier.missing + self.missing, until_wall=self.until_wall)


class _Schema(msgspec.Struct):
    """The part of a header that every version of it has."""

    schema: int
    version: str = "unknown"


class TraceFileError(Exception):
    """A file of a trace directory holds something else than transition records. `line` counts from 1."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: not a transition record: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


class TraceSchemaError(Exception):
    """A file was written by a later version, in a schema that this one does not know."""

    def __init__(self, path: Path, schema: int, version: str) -> None:
        super().__init__(
            f"{path} has schema {schema}, and this version of {DISTRIBUTION} ({shown_version(DISTRIBUTION)}) reads "
            f"{SCHEMA} at most; read it with version {shorten(version, 50)}, which wrote it, or a later one"
        )
        self.path = path
        self.schema = schema


# --- names of files -------------------------------------------------------------------------------------------------


def part_path(stem: Path, part: int) -> Path:
    """The path of one file of a sequence."""
    return stem.with_name(f"{stem.name}.{part}.jsonl" if part else f"{stem.name}.jsonl")


class FileName(NamedTuple):
    """The name of a sequence of files, and which of them it is, from 0."""

    stem: str
    part: int


def split_name(name: str) -> FileName | None:
    """None: it is no trace file's."""
    named = _FILE_NAME.fullmatch(name)
    return None if named is None else FileName(named["stem"], int(named["part"] or 0))


# --- lines ----------------------------------------------------------------------------------------------------------


def render_lines(records: Sequence[TransitionRecord]) -> bytes:
    """The lines for some records, without the end of the last one."""
    try:
        return _encoder.encode_lines(records)[:-1] if len(records) > 1 else _encoder.encode(records[0])
    except UnicodeEncodeError:
        return b"\n".join(map(render_line, records))


def render_line(record: TransitionRecord) -> bytes:
    """The line for a record, without its end."""
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        # A lone surrogate, which a JSON document can smuggle into any string but UTF-8 cannot express.
        return _encoder.encode({name: expressible(value) for name, value in msgspec.structs.asdict(record).items()})


def render_note(note: FileHeader | TraceGap) -> bytes:
    """The line for what is not a record, without its end."""
    return _encoder.encode(note)


def expressible(value: Any) -> Any:
    """In UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def decode_records(lines: bytes) -> list[TransitionRecord] | None:
    """The records in `lines`, which lack the end of the last line. None: not every line is one."""
    try:
        records = _decoder.decode_lines(lines)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return records if len(records) == lines.count(b"\n") + 1 else None  # an empty one is skipped


def decode_record(path: Path, number: int, line: bytes) -> TransitionRecord:
    """Raises TraceFileError; so do the others."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFileError(path, number, shorten(str(error), 200)) from None


def decode_gap(path: Path, number: int, line: bytes) -> TraceGap:
    """A line that begins with `GAP_START`."""
    try:
        return msgspec.json.decode(line, type=TraceGap)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFileError(path, number, shorten(str(error), 200)) from None


def decode_header(path: Path, line: bytes) -> FileHeader:
    """A line that begins with `HEADER_START`. Raises TraceSchemaError too."""
    try:
        schema = msgspec.json.decode(line, type=_Schema)
        if schema.schema > SCHEMA:
            raise TraceSchemaError(path, schema.schema, schema.version)
        return msgspec.json.decode(line, type=FileHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFileError(path, 1, shorten(str(error), 200)) from None
