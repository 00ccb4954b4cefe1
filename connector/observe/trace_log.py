"""The state-transition trace on disk: JSON lines, one transition per line, a sequence of files for each process.

`open_trace_log` makes the sink that the machines of one process write to; `read_processes` and `read_trace` give the
records of all processes back, `read_trace_about` those of some requests.

What a file holds. The first line is a `FileHeader`: the version of the schema, who writes (engine, rank, role, process,
version of the connector) and which file of the sequence this is. Every other line is one `TransitionRecord` with all
its fields, or a `TraceGap` in the place of records that are missing (`trace_writer` says when); a field without a value
is null. The schema has a number, `SCHEMA`. Fields are added without a new one, because a reader skips what it does not
know and takes what it does not find for null; where a field would change its meaning or go, the number grows, and a
reader refuses a number that it does not know (`TraceSchemaError`). An excerpt without a header, such as grep makes, is
read as well.

Size. A file that has reached `file_bytes` is followed by the next one, and the oldest is deleted when there are more
than `files_kept`. No file is renamed, so that whoever reads one is not disturbed. Numbers of records go on from file to
file without gaps. What processes left that have ended is not touched.

Sampling. Below a share of 1 only some requests are traced, and these whole: the choice is a hash of the request id on
P, which P's lease and D's request and hold have in common, so both sides choose the same without asking each other.
Transitions of peers are always traced. Failures are not preferred: that a request fails is known at its end, and to one
side. The log has lines of failures in any case, and shares of outcomes stay what they are. Numbers have gaps then.

Writing is structlog's logger of bytes, without its processors, which cost a fifth of the whole, and with nothing of its
global configuration, which belongs to whoever embeds vLLM. What is written together goes to the operating system in one
write before the call returns, so a process that is killed loses nothing that was written. A file is created, never
continued: two processes that had the same id one after the other (as in containers, where an engine is process 1 after
every restart) get two sequences, each with numbers from 0. The first one is created with the first record, so an engine
that fails to start leaves none; that a file can be created is tried at start all the same.

The trace must not cost a request anything. An error (the disk is full, the file system is gone) switches the sink off
with one line in the log, and no exception leaves `write`. A file system may also hang, and `write` with it: the actors
never call it themselves, but hand records to a thread that does (`trace_writer`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import FileIO
from operator import lt
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import msgspec
import structlog

from connector import DISTRIBUTION
from connector.observe.log import get_logger
from connector.versions import shown_version
from connector.wire.bounded import shorten
from statemachine.trace import TransitionRecord

SCHEMA = 1
"""Of what is written here; the highest that is read."""

FILE_BYTES = 256 << 20
FILES_KEPT = 8
"""Defaults: two gigabytes for each process, which are some four million transitions."""

FILE_NAME_LENGTH_MAX = 150
"""Longest part of a file name that is made from an engine id, in characters; file systems allow 255 bytes in all."""

FILES_PER_NAME_MAX = 1000
"""Sequences of processes with the same engine id, role, rank and process id in one directory."""

_NOT_IN_FILE_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_FILE_NAME = re.compile(r"(?P<stem>.+?)(?:\.(?P<part>\d+))?\.jsonl")
_HEADER_START = b'{"schema":'
_GAP_START = b'{"missing":'
"""In no other line: a text has its quotation marks escaped."""

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
    """A line in the place of records that were not written, because the file system did not keep up.

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


class _Schema(msgspec.Struct):
    """The part of a header that every version of it has."""

    schema: int
    version: str = "unknown"


class TraceDirectoryError(Exception):
    """No trace file can be created. `directory` is the one asked for, `reason` what the operating system said."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(
            f"cannot write state-transition traces to {directory}: {reason}; "
            "name a directory that this process may write to, or switch traces off"
        )
        self.directory = directory
        self.reason = reason


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


# --- sampling -------------------------------------------------------------------------------------------------------


def is_sampled(request_id: str, share: float) -> bool:
    """Whether a request is among that share of all; `request_id` is the one on P."""
    return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) < share * 2**32


# --- writing --------------------------------------------------------------------------------------------------------


class JsonLinesSink:
    """A `statemachine.trace.TraceSink`: one line per record, to a sequence of files that it owns.

    `write` belongs to one thread; `close` may come from another one, and what is written after it is dropped.
    """

    def __init__(self, files: RotatingFiles, *, sample: float = 1.0) -> None:
        self._files = files
        self._sample = sample
        self._log: structlog.BytesLogger | None = structlog.BytesLogger(cast(BinaryIO, files))

    @property
    def path(self) -> Path:
        """The file that is written to, or will be with the first record."""
        return self._files.path

    @property
    def is_open(self) -> bool:
        """Whether what is written goes anywhere: it was not closed, and no error has switched it off."""
        return self._log is not None

    def keeps(self, record: TransitionRecord) -> bool:
        """Whether the sample takes it."""
        return self._sample >= 1.0 or self._is_sampled(record)

    def write(self, *records: TransitionRecord) -> None:
        """Append a line for each. Never raises: an error switches the sink off for good."""
        if self._log is None:
            return
        try:
            if self._sample < 1.0:
                records = tuple(filter(self._is_sampled, records))
            if records:
                self._append(render_lines(records))
        except Exception as error:  # whatever it is: a trace is not worth a request
            self._switch_off(error)

    def note_gap(self, gap: TraceGap) -> None:
        """Append the line for records that are missing. Never raises, as `write`."""
        try:
            self._append(_encoder.encode(gap))
        except Exception as error:
            self._switch_off(error)

    def _append(self, lines: bytes) -> None:
        if (log := self._log) is not None:
            log.msg(lines)

    def _switch_off(self, error: Exception) -> None:
        if self._log is not None:  # otherwise the file was closed under our hands
            get_logger().error("the state-transition trace %s ends here: %s", self.path, shorten(str(error), 300))
        self.close()

    def _is_sampled(self, record: TransitionRecord) -> bool:
        request_id = record.subject if record.machine == "lease" else record.remote_request_id
        # A peer is no request's; and parameters that make no sense name none.
        return request_id is None or is_sampled(request_id, self._sample)

    def close(self) -> None:
        """Idempotent; never raises."""
        self._log = None
        with contextlib.suppress(OSError):  # what could not be written before cannot be written now
            self._files.close()


class RotatingFiles:
    """The files of one process, as one binary file to append to; see the module's docstring.

    `write` is given whole lines, which stay together. Every method but `close` raises OSError.

    Args:
        stem: path of the first file, without its ending.
        header: of the first file.
        file_bytes, files_kept: a file ends with the lines that take it to so many bytes; so many files stay.
    """

    def __init__(self, stem: Path, header: FileHeader, *, file_bytes: int, files_kept: int) -> None:
        self.path = _part_path(stem, 0)
        self._stem = stem
        self._header = header
        self._file_bytes = file_bytes
        self._kept: deque[Path] = deque()
        self._files_kept = files_kept
        self._file: FileIO | None = None
        self._left_bytes = 0
        self._is_closed = False

    def write(self, lines: bytes) -> int:
        if self._left_bytes <= 0:
            self._begin()
        length = len(lines)
        self._left_bytes -= length
        written = self._file.write(lines)  # type: ignore[union-attr]
        if written != length:
            raise OSError(errno.ENOSPC, "the end of a line could not be written")
        return written

    def flush(self) -> None:
        """What was written is with the operating system already."""

    def close(self) -> None:
        self._is_closed = True
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        if self._is_closed:
            raise ValueError("write to closed files")
        if self._file is None:
            file = self._create_first()
        else:
            self._file.close()
            self._header = msgspec.structs.replace(self._header, part=self._header.part + 1)
            self.path = _part_path(self._stem, self._header.part)
            file = _create(self.path)
        self._file = file
        self._kept.append(self.path)
        if len(self._kept) > self._files_kept:
            with contextlib.suppress(FileNotFoundError):  # somebody has tidied up
                self._kept.popleft().unlink()
        line = _encoder.encode(self._header) + b"\n"
        file.write(line)
        self._left_bytes = max(1, self._file_bytes - len(line))

    def _create_first(self) -> FileIO:
        # Of a sequence that was rotated the first file is gone, and the others are in the way all the same.
        found = map(_FILE_NAME.fullmatch, os.listdir(self._stem.parent))
        taken = {named["stem"] for named in found if named is not None}
        for number in range(FILES_PER_NAME_MAX):
            stem = self._stem.with_name(f"{self._stem.name}-{number}") if number else self._stem
            if stem.name in taken:
                continue
            with contextlib.suppress(FileExistsError):
                self.path = _part_path(stem, 0)
                file = _create(self.path)
                self._stem = stem
                return file
        raise FileExistsError(f"{FILES_PER_NAME_MAX} files named {self._stem.name} are in {self._stem.parent}")


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
        return _encoder.encode({name: _expressible(value) for name, value in msgspec.structs.asdict(record).items()})


def _expressible(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def make_writable(directory: str | Path) -> None:
    """Create `directory` if needed, and make sure that files can be created in it. Leaves none.

    Raises TraceDirectoryError.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise TraceDirectoryError(shorten(str(directory), 300), str(error)) from error


def open_trace_log(
    directory: str | Path,
    *,
    engine_id: str,
    role: str,
    rank: int,
    file_bytes: int = FILE_BYTES,
    files_kept: int = FILES_KEPT,
    sample: float = 1.0,
) -> JsonLinesSink:
    """Create `directory` if needed, and make sure that files can be created in it; they are with the first record.

    They are called `<engine id>-<role>-<rank>-<process id>.jsonl`, `….1.jsonl`, `….2.jsonl` and so on. Characters of
    the engine id that do not belong into a file name become `_`. If the name is taken, a number follows the process id.

    Raises TraceDirectoryError.
    """
    directory = Path(directory)
    make_writable(directory)
    name = _NOT_IN_FILE_NAMES.sub("_", engine_id)[:FILE_NAME_LENGTH_MAX]
    header = FileHeader(
        schema=SCHEMA,
        part=0,
        engine_id=_expressible(engine_id),
        rank=rank,
        role=role,
        process="worker",
        pid=os.getpid(),
        host=os.uname().nodename,
        version=shown_version(DISTRIBUTION),
        started=time.time(),
        sample=sample,
    )
    stem = directory / f"{name}-{role}-{rank}-{header.pid}"
    return JsonLinesSink(RotatingFiles(stem, header, file_bytes=file_bytes, files_kept=files_kept), sample=sample)


def _part_path(stem: Path, part: int) -> Path:
    return stem.with_name(f"{stem.name}.{part}.jsonl" if part else f"{stem.name}.jsonl")


def _create(path: Path) -> FileIO:
    return FileIO(path, "x", opener=_open_for_append)


def _open_for_append(path: str, flags: int) -> int:
    # Appending lets a log rotation that truncates the file work as meant.
    return os.open(path, flags | os.O_APPEND, 0o644)


# --- reading --------------------------------------------------------------------------------------------------------


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file.

    Attributes:
        header: None in an excerpt.
        torn_bytes: length of a last line without an end, which is not among the records.
        places: of the records among the lines behind the header, where some of these are left out; None: all are here.
        gaps: where records were not written: numbers of lines, from 1, and what stands there.
    """

    path: Path
    header: FileHeader | None
    records: list[TransitionRecord]
    torn_bytes: int
    places: tuple[int, ...] | None = None
    gaps: tuple[tuple[int, TraceGap], ...] = ()

    def located(self) -> Iterator[tuple[int, TransitionRecord]]:
        """The records with the numbers of their lines, from 1."""
        first = 1 if self.header is None else 2
        if self.places is None:
            return enumerate(self.records, start=first)
        return ((first + place, record) for place, record in zip(self.places, self.records, strict=True))


class ProcessTrace(NamedTuple):
    """What is left of what one process wrote: its files in order."""

    files: tuple[TraceFile, ...]

    @property
    def header(self) -> FileHeader | None:
        """Of the first file that is left."""
        return self.files[0].header

    @property
    def is_whole(self) -> bool:
        """Whether every transition of the process, from its first one, is here."""
        return all(
            file.header is not None and file.header.part == part and file.header.sample == 1.0 and not file.gaps
            for part, file in enumerate(self.files)
        )

    @property
    def records(self) -> list[TransitionRecord]:
        """In the order in which they were written."""
        return [record for file in self.files for record in file.records]


def read_trace_file(path: Path) -> TraceFile:
    """One file. Raises OSError, TraceFileError and TraceSchemaError."""
    header, start, whole, end, torn = _split(path)
    if _GAP_START in whole:
        return _read_with_gaps(path)
    try:
        records = _decoder.decode_lines(whole) if end else []
        if len(records) != whole.count(b"\n") + bool(end):  # empty lines are skipped
            raise msgspec.DecodeError("an empty line")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        records = list(_decode_one_by_one(path, whole.split(b"\n"), start))
    return TraceFile(path=path, header=header, records=records, torn_bytes=len(torn))


def _read_with_gaps(path: Path) -> TraceFile:
    header, start, whole, _, torn = _split(path)
    places, lines, gaps = [], [], []
    for place, line in enumerate(whole.split(b"\n")):
        if line.startswith(_GAP_START):
            gaps.append((start + place + 1, _decode_gap(path, start + place + 1, line)))
        else:
            places.append(place)
            lines.append(line)
    records = [_decode(path, start + place + 1, line) for place, line in zip(places, lines, strict=True)]
    return TraceFile(
        path=path, header=header, records=records, torn_bytes=len(torn), places=tuple(places), gaps=tuple(gaps)
    )


def _split(path: Path) -> tuple[FileHeader | None, int, bytes, bytes, bytes]:
    """Header, the number of lines that it takes, the other lines without the end of the last one, that end (empty:
    there are none), and what was torn."""
    whole, end, torn = path.read_bytes().rpartition(b"\n")
    header, start = None, 0
    if whole.startswith(_HEADER_START):
        first, _, rest = whole.partition(b"\n")
        header, whole, start = _read_header(path, first), rest, 1
        if not rest:
            end = b""
    return header, start, whole, end, torn


def _decode_one_by_one(path: Path, lines: Sequence[bytes], start: int) -> Iterator[TransitionRecord]:
    """To say which line is wrong."""
    for number, line in enumerate(lines, start=start + 1):
        yield _decode(path, number, line)


def _decode(path: Path, number: int, line: bytes) -> TransitionRecord:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFileError(path, number, shorten(str(error), 200)) from None


def _decode_gap(path: Path, number: int, line: bytes) -> TraceGap:
    try:
        return msgspec.json.decode(line, type=TraceGap)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFileError(path, number, shorten(str(error), 200)) from None


def _read_header(path: Path, line: bytes) -> FileHeader:
    try:
        schema = msgspec.json.decode(line, type=_Schema)
        if schema.schema > SCHEMA:
            raise TraceSchemaError(path, schema.schema, schema.version)
        return msgspec.json.decode(line, type=FileHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFileError(path, 1, shorten(str(error), 200)) from None


def trace_files(directory: str | Path) -> list[Path]:
    """Those in it whose names are those of trace files; where it is a file itself, that one, whatever its name. Raises
    OSError."""
    directory = Path(directory)
    if directory.is_file():
        return [directory]
    return sorted(path for path in directory.iterdir() if _FILE_NAME.fullmatch(path.name) is not None)


NO_TRACE_FILE = "no trace file is there: their names end in .jsonl"


def read_processes(directory: str | Path) -> list[ProcessTrace]:
    """What each process wrote that traced to `directory`, which may be a single file of any name too.

    A line that its process was still writing, or was killed in, is left out, and so is a record that is there again, as
    where somebody has copied a file; a log line for each says of how many files that is.

    Raises OSError; TraceFileError when a whole line is not a transition record; TraceSchemaError.
    """
    return _told_apart(_read_processes(directory, read_trace_file), directory)


def _told_apart(processes: list[ProcessTrace], directory: str | Path) -> list[ProcessTrace]:
    torn_files = sum(file.torn_bytes > 0 for process in processes for file in process.files)
    if torn_files:
        get_logger().warning("left out the unfinished last line of %d trace file(s) in %s", torn_files, directory)
    once, repeating = _without_repetitions(processes)
    for file in (file for process in once for file in process.files if file.gaps):
        line, first = file.gaps[0]
        get_logger().warning(
            "%d record(s) are missing in %s, because its file system did not keep up: the first at line %d, from %s to "
            "%s (UTC). What is said of that time is not complete",
            sum(gap.missing for _, gap in file.gaps),
            file.path,
            line,
            _time_of_day(first.wall),
            _time_of_day(first.until_wall),
        )
    if repeating:
        more = f" and {len(repeating) - 1} more file(s)" if len(repeating) > 1 else ""
        get_logger().warning(
            "left out %d record(s) of %s%s that are there twice; is one a copy of another?",
            sum(repeating.values()),
            next(iter(repeating)),
            more,
        )
    return once


def _time_of_day(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(wall))


def _without_repetitions(processes: list[ProcessTrace]) -> tuple[list[ProcessTrace], dict[Path, int]]:
    """Each record once, and of how many records of which files there was another. The process that has most of them
    keeps its own, so that a copy of a part makes no gap in the whole."""
    seen = _Seen()
    kept: dict[int, ProcessTrace] = {}
    repeating: dict[Path, int] = {}
    lengths = [sum(len(file.records) for file in process.files) for process in processes]
    for at in sorted(range(len(processes)), key=lambda at: -lengths[at]):
        files = []
        for file in processes[at].files:
            places = seen.new_among(file.records)
            if len(places) < len(file.records):
                repeating[file.path] = len(file.records) - len(places)
                if not places:
                    continue
                records = [file.records[place] for place in places]
                lines = places if file.places is None else [file.places[place] for place in places]
                file = msgspec.structs.replace(file, records=records, places=tuple(lines))
            files.append(file)
        if files:
            kept[at] = ProcessTrace(tuple(files))
    return [kept[at] for at in sorted(kept)], repeating


_Moment: TypeAlias = tuple[int, int]
"""`mono_ns` and `seq` of a record: they grow from one of a process to the next."""


class _Seen:
    """What was read. A process's records come in order, so that nearly always two ends tell that files have none in
    common; only where they do not are single records compared."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str, int], list[tuple[_Moment, _Moment, list[TransitionRecord]]]] = {}

    def new_among(self, records: Sequence[TransitionRecord]) -> Sequence[int]:
        """Places of those that were in no earlier call, nor are there before."""
        of_writers: dict[tuple[str, str, int], list[int]] = {}
        for place, record in enumerate(records):
            of_writers.setdefault((record.engine_id, record.role, record.rank), []).append(place)
        found: list[int] = []
        for writer, places in of_writers.items():
            found += self._new_of(writer, records, places)
        return range(len(records)) if len(found) == len(records) else sorted(found)

    def _new_of(
        self, writer: tuple[str, str, int], records: Sequence[TransitionRecord], places: list[int]
    ) -> list[int]:
        moments = [(records[place].mono_ns, records[place].seq) for place in places]
        first, last = min(moments), max(moments)
        before = self._files.setdefault(writer, [])
        known = {record for begin, end, others in before if begin <= last and first <= end for record in others}
        if known or not all(map(lt, moments, moments[1:])):
            new = []
            for place in places:
                if records[place] not in known:
                    known.add(records[place])
                    new.append(place)
            places = new
        if places:
            before.append((first, last, [records[place] for place in places]))
        return places


def _read_processes(directory: str | Path, read: Callable[[Path], TraceFile]) -> list[ProcessTrace]:
    sequences: dict[str, list[tuple[int, Path]]] = {}
    for path in trace_files(directory):
        named = _FILE_NAME.fullmatch(path.name)
        stem, part = (path.name, 0) if named is None else (named["stem"], int(named["part"] or 0))
        sequences.setdefault(stem, []).append((part, path))
    processes = [ProcessTrace(tuple(_read_parts(parts, read))) for parts in sequences.values()]
    return [process for process in processes if process.files]


def _read_parts(parts: Iterable[tuple[int, Path]], read: Callable[[Path], TraceFile]) -> Iterator[TraceFile]:
    for _, path in sorted(parts):
        with contextlib.suppress(FileNotFoundError):  # its process has deleted it meanwhile
            yield read(path)


def merged(processes: Iterable[ProcessTrace]) -> list[TransitionRecord]:
    """The records of all of them by wall clock time; those of one process in the order in which they were written, also
    where its wall clock was set back."""
    keyed: list[tuple[float, int, TransitionRecord]] = []
    for process in processes:
        latest = 0.0
        for file in process.files:
            for record in file.records:
                latest = max(latest, record.wall)
                keyed.append((latest, record.seq, record))
    keyed.sort(key=lambda each: each[:2])
    return [record for _, _, record in keyed]


def read_trace(directory: str | Path) -> list[TransitionRecord]:
    """The records of all processes that wrote to `directory`; `merged`, and raises as `read_processes` does."""
    return merged(read_processes(directory))


# --- reading about some requests ------------------------------------------------------------------------------------

NAMES_SOUGHT_MAX = 32
"""Ids that files are searched for at once; for more it is quicker to read everything."""

_OF_A_PEER = b'"machine":"peer"'


def read_trace_about(directory: str | Path, text: str) -> list[TransitionRecord]:
    """As `read_trace`, but only what bears on requests with `text` in an id: all records that name such an id or the
    one on the other side, and those of connections. There may be others among them.

    Lines are chosen by their bytes and only these are decoded, so a line that is not a record is found only where it is
    one of them, or the first of its file.
    """
    found = _read_with(directory, [_as_written(text)])
    names = {
        name
        for process in found
        for record in process.records
        for name in (record.subject if record.machine in ("request", "lease") else None, record.remote_request_id)
        if name is not None and (text in record.subject or text in (record.remote_request_id or ""))
    }
    # What contains the text has been found by it: this looks for the ids that do not.
    sought = [_as_written(text), *map(_as_written, sorted(name for name in names if text not in name))]
    if len(sought) > NAMES_SOUGHT_MAX:
        return read_trace(directory)
    return merged(_told_apart(_read_with(directory, [*sought, _OF_A_PEER]), directory))


def _as_written(name: str) -> bytes:
    """As it is in a line, without the quotation marks."""
    return msgspec.json.encode(_expressible(name))[1:-1]


def _read_with(directory: str | Path, needles: Sequence[bytes]) -> list[ProcessTrace]:
    """Only the lines in which one of them is."""
    return _read_processes(directory, lambda path: _read_file_with(path, needles))


def _read_file_with(path: Path, needles: Sequence[bytes]) -> TraceFile:
    header, start, whole, end, torn = _split(path)
    if not end:
        return TraceFile(path=path, header=header, records=[], torn_bytes=len(torn))
    first = whole.partition(b"\n")[0]
    if first.startswith(_GAP_START):
        return read_trace_file(path)
    if [render_line(record) for record in _decode_one_by_one(path, [first], start)] != [first]:
        return read_trace_file(path)  # not as it was written: a tool has put it in another form, or a later version
    records, gaps = [], []
    for begin, after in _lines_with(whole, [*needles, _GAP_START]):
        line = whole[begin:after]
        if line.startswith(_GAP_START):
            number = start + 1 + whole.count(b"\n", 0, begin)
            gaps.append((number, _decode_gap(path, number, line)))
            continue
        try:
            records.append(_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            number = start + 1 + whole.count(b"\n", 0, begin)
            raise TraceFileError(path, number, shorten(str(error), 200)) from None
    return TraceFile(path=path, header=header, records=records, torn_bytes=len(torn), gaps=tuple(gaps))


def _lines_with(lines: bytes, needles: Sequence[bytes]) -> list[tuple[int, int]]:
    """From where to where those reach in which one of them is."""
    found: dict[int, int] = {}
    for needle in needles:
        at = lines.find(needle)
        while at >= 0:
            after = lines.find(b"\n", at)
            after = len(lines) if after < 0 else after
            found[lines.rfind(b"\n", 0, at) + 1] = after
            at = lines.find(needle, after + 1)
    return sorted(found.items())
