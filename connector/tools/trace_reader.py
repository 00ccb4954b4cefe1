"""The state-transition trace on disk, read: `read_processes` and `read_trace` give the records of all processes back,
`read_trace_about` those of some requests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from connector.observe.log import get_logger
from connector.observe.trace_format import (
    GAP_START,
    HEADER_START,
    RECORD_START,
    FileHeader,
    TraceFileError,
    TraceGap,
    decode_gap,
    decode_header,
    decode_record,
    decode_records,
    expressible,
    render_line,
    split_name,
)
from statemachine.trace import TransitionRecord


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file.

    Attributes:
        header: None in an excerpt, and where it is damaged.
        torn_bytes: length of a last line without an end, which is not among the records.
        places: of the records among the lines behind the header, where some of these are left out; None: all are here.
        gaps: where records were not written: numbers of lines, from 1, and what stands there.
        damaged: lines that are neither, and are left out: their numbers, and what is wrong.
    """

    path: Path
    header: FileHeader | None
    records: list[TransitionRecord]
    torn_bytes: int
    places: tuple[int, ...] | None = None
    gaps: tuple[tuple[int, TraceGap], ...] = ()
    damaged: tuple[tuple[int, str], ...] = ()

    @property
    def holes(self) -> list[int]:
        """The lines in whose place records are missing, in order."""
        return sorted(line for line, _ in (*self.gaps, *self.damaged))

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
        """The header of the first file that is left."""
        return self.files[0].header

    @property
    def is_whole(self) -> bool:
        """Whether every transition of the process, from its first one, is here."""
        return all(
            file.header is not None and file.header.part == part and file.header.sample == 1.0 and not file.holes
            for part, file in enumerate(self.files)
        )

    @property
    def records(self) -> list[TransitionRecord]:
        """In the order in which they were written."""
        return [record for file in self.files for record in file.records]


def read_trace_file(path: Path) -> TraceFile:
    """One file. Raises OSError, TraceFileError where it has lines and none is a record, and TraceSchemaError."""
    header, start, whole, end, torn = _split(path)
    if not end:
        return TraceFile(path=path, header=header, records=[], torn_bytes=len(torn))
    if GAP_START not in whole and (all_records := decode_records(whole)) is not None:
        return TraceFile(path=path, header=header, records=all_records, torn_bytes=len(torn))
    places, records, gaps, damaged = [], [], [], []
    for place, line in enumerate(whole.split(b"\n")):
        number = start + place + 1
        try:
            if line.startswith(GAP_START):
                gaps.append((number, decode_gap(path, number, line)))
            else:
                records.append(decode_record(path, number, line))
                places.append(place)
        except TraceFileError as error:
            damaged.append(error)
    if damaged and not records:
        raise damaged[0]
    return TraceFile(
        path=path,
        header=header,
        records=records,
        torn_bytes=len(torn),
        places=tuple(places),
        gaps=tuple(gaps),
        damaged=tuple((error.line, error.reason) for error in damaged),
    )


def _split(path: Path) -> tuple[FileHeader | None, int, bytes, bytes, bytes]:
    """Header, the number of lines that it takes, the other lines without the end of the last one, that end (empty:
    there are none), and what was torn."""
    whole, end, torn = path.read_bytes().rpartition(b"\n")
    header, start = None, 0
    if whole.startswith(HEADER_START):
        first, _, rest = whole.partition(b"\n")
        with contextlib.suppress(TraceFileError):  # then it is a damaged line among the others
            header, whole, start = decode_header(path, first), rest, 1
            if not rest:
                end = b""
    return header, start, whole, end, torn


def trace_files(directory: str | Path) -> list[Path]:
    """Those in it whose names are those of trace files; where it is a file itself, that one, whatever its name. Raises
    OSError."""
    directory = Path(directory)
    if directory.is_file():
        return [directory]
    try:
        return sorted(path for path in directory.iterdir() if split_name(path.name) is not None)
    except NotADirectoryError:
        raise NotADirectoryError(f"{directory} is neither a directory nor a trace file") from None


def require_trace_files(directory: str | Path) -> None:
    """Raises OSError where `trace_files` finds none: whoever has named it meant another one."""
    if not trace_files(directory):
        raise FileNotFoundError(f"{directory}: no trace file is there: their names end in .jsonl")


def read_processes(directory: str | Path) -> list[ProcessTrace]:
    """What each process wrote that traced to `directory`, which may be a single file of any name too.

    A line that its process was still writing, or was killed in, is left out; a log line says in how many files that
    was so. So is a line that is damaged; a log line says of each file how many are, and which is the first.

    Raises OSError; TraceFileError when no line of a file is a transition record; TraceSchemaError.
    """
    processes = _read_processes(directory, read_trace_file)
    _warn_of_gaps(processes, directory)
    return processes


def _warn_of_gaps(processes: Iterable[ProcessTrace], directory: str | Path) -> None:
    """Log what the files of `directory` do not have."""
    torn_files = sum(file.torn_bytes > 0 for process in processes for file in process.files)
    if torn_files:
        get_logger().warning("left out the unfinished last line of %d trace file(s) in %s", torn_files, directory)
    for file in (file for process in processes for file in process.files if file.damaged):
        line, reason = file.damaged[0]
        get_logger().warning(
            "left out %d damaged line(s) of %s: the first is line %d: %s", len(file.damaged), file.path, line, reason
        )
    for file in (file for process in processes for file in process.files if file.gaps):
        line, first = file.gaps[0]
        get_logger().warning(
            "%d record(s) are missing in %s, because its file system did not take them: the first at line %d, from %s "
            "to %s (UTC). What is said of that time is not complete",
            sum(gap.missing for _, gap in file.gaps),
            file.path,
            line,
            _time_of_day(first.wall),
            _time_of_day(first.until_wall),
        )


def _time_of_day(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(wall))


def _read_processes(directory: str | Path, read: Callable[[Path], TraceFile]) -> list[ProcessTrace]:
    sequences: dict[str, list[tuple[int, Path]]] = {}
    for path in trace_files(directory):
        stem, part = split_name(path.name) or (path.name, 0)
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


# --- about some requests ----------------------------------------------------------------------------------------------

NAMES_SOUGHT_MAX = 32
"""Ids that files are searched for at once; for more it is quicker to read everything."""

_OF_A_PEER = b'"machine":"peer"'


def read_trace_about(directory: str | Path, text: str) -> list[TransitionRecord]:
    """Read what bears on requests with `text` in an id: all records that name such an id or the one on the other side,
    and those of connections. There may be others among them. For the rest see `read_trace`.

    Lines are chosen by their bytes and only these are decoded, so a damaged line is found only where it is one of them,
    the first of its file, or does not begin and end as lines do.
    """
    sought = [_as_written(text), _OF_A_PEER]
    processes = _read_with(directory, sought)
    names = {
        name
        for process in processes
        for record in process.records
        for name in (record.subject if record.machine in ("request", "lease") else None, record.remote_request_id)
        if name is not None and (text in record.subject or text in (record.remote_request_id or ""))
    }
    # What contains the text has been found by it. Ids that do not are those of the other side.
    others = [name for name in names if text not in name]
    if len(others) >= NAMES_SOUGHT_MAX:
        return read_trace(directory)
    if others:
        processes = _read_with(directory, [*sought, *map(_as_written, sorted(others))])
    _warn_of_gaps(processes, directory)
    return merged(processes)


def _as_written(name: str) -> bytes:
    """The bytes that stand for a name in a line, without the quotation marks."""
    return msgspec.json.encode(expressible(name))[1:-1]


def _read_with(directory: str | Path, needles: Sequence[bytes]) -> list[ProcessTrace]:
    """Only the lines in which one of them is."""
    return _read_processes(directory, lambda path: _read_file_with(path, needles))


def _read_file_with(path: Path, needles: Sequence[bytes]) -> TraceFile:
    header, start, whole, end, torn = _split(path)
    if not end:
        return TraceFile(path=path, header=header, records=[], torn_bytes=len(torn))
    if not _looks_as_written(whole):
        return read_trace_file(path)
    records, gaps = [], []
    number, counted = start + 1, 0
    try:
        for begin, after in _lines_with(whole, [*needles, GAP_START]):
            number, counted = number + whole.count(b"\n", counted, begin), begin
            line = whole[begin:after]
            if line.startswith(GAP_START):
                gaps.append((number, decode_gap(path, number, line)))
            else:
                records.append(decode_record(path, number, line))
    except TraceFileError:
        return read_trace_file(path)
    return TraceFile(path=path, header=header, records=records, torn_bytes=len(torn), gaps=tuple(gaps))


def _looks_as_written(lines: bytes) -> bool:
    """False: a tool, or a later version, has put them in another form; or a line is damaged. Looks at the whole first
    line, and at how the others begin and end."""
    first = lines.partition(b"\n")[0]
    records = decode_records(first)
    if not records or render_line(records[0]) != first:
        return False
    others = lines.count(b"\n")
    begun = lines.count(b"\n" + RECORD_START) + lines.count(b"\n" + GAP_START)
    return begun == others and lines.count(b"}\n") == others and lines.endswith(b"}")


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
