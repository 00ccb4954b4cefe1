"""The state-transition trace on disk, written: a sequence of files for each process, of lines as in `trace_format`.

`open_trace_log` makes the sink that the machines of one process write to.

Size. A file that has reached `file_bytes` is followed by the next one, and the oldest is deleted when there are more
than `files_kept`. No file is renamed, so that a process that reads one is not disturbed. Numbers of records go on from
file to file without gaps. What processes left that have ended is not touched. Where somebody deletes the file that is
being written, as one that is older than a week because nothing has happened since, the next one begins.

Sampling. Below a share of 1 only some requests are traced, and these whole: the choice is a hash of the request id on
P, which P's lease and D's request and hold have in common, so both sides choose the same without asking each other.
Transitions of peers are always traced. Failures are not preferred: that a request fails is known at its end, and to one
side. The log has lines of failures in any case, and shares of outcomes stay what they are. Numbers have gaps then.

Writing is structlog's logger of bytes, without its processors, which cost a fifth of the whole, and with nothing of its
global configuration, which belongs to the program that embeds vLLM. What is written together goes to the operating
system in one write before the call returns, so a process that is killed loses nothing that was written. A file is
created, never continued: two processes that had the same id one after the other (as in containers, where an engine is
process 1 after every restart) get two sequences, each with numbers from 0. The first one is created with the first
record, so an engine that fails to start leaves none; that a file can be created is tried at start all the same.

The trace must not cost a request anything, and no exception leaves `write`. An error (the disk is full, the file system
is gone) interrupts the trace, with one line in the log. What comes then is counted and not written. Every
RETRY_SECONDS it is tried again: where that works there is a `TraceGap` in the place of what is missing, and one more
line in the log. It goes on in the same file, of which a line that was cut is taken back: a new one for each attempt
would have rotation delete what was written before. A file system may also hang, and `write` with it: the actors never
call it themselves, but hand records to a thread that does (`trace_writer`).
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
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast

import structlog
from msgspec.structs import replace

from connector import DISTRIBUTION
from connector.observe.advice import TRACE_INTERRUPTED_ADVICE
from connector.observe.log import get_logger
from connector.observe.trace_format import (
    SCHEMA,
    FileHeader,
    TraceGap,
    expressible,
    part_path,
    render_lines,
    render_note,
    split_name,
)
from connector.versions import shown_version
from connector.wire.bounded import shorten
from statemachine.failures import ADVICE_FOLLOWS
from statemachine.trace import TransitionRecord

FILE_BYTES = 256 << 20
FILES_KEPT = 8
"""Defaults: two gigabytes for each process, which are some four million transitions."""

FILE_NAME_LENGTH_MAX = 150
"""Longest part of a file name that is made from an engine id, in characters; file systems allow 255 bytes in all."""

RETRY_SECONDS = 30.0
"""A trace that is interrupted is tried again so often. That is soon for whoever has freed space and looks whether it
goes on, and a disk that somebody else keeps full becomes four lines in the log a minute at most."""

FILES_PER_NAME_MAX = 1000
"""Sequences of processes with the same engine id, role, rank and process id in one directory."""

_NOT_IN_FILE_NAMES = re.compile(r"[^A-Za-z0-9_-]")


class TraceDirectoryError(Exception):
    """No trace file can be created. `directory` is the one asked for, `reason` what the operating system said."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(
            f"cannot write state-transition traces to {directory}: {reason}; "
            "name a directory that this process may write to, or switch traces off"
        )
        self.directory = directory
        self.reason = reason


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
        engine_id=expressible(engine_id),
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


def is_sampled(request_id: str, share: float) -> bool:
    """Whether a request is among that share of all; `request_id` is the one on P."""
    return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) < share * 2**32


class JsonLinesSink:
    """A `statemachine.trace.TraceSink`: one line per record, to a sequence of files that it owns.

    `write` and `note_gap` belong to one thread; `close` may come from another one, and what is written after it is
    dropped.

    Attributes:
        interrupted: the file that cannot be written, and why; None while it can.
        lost: how many records could not be written since the start.
    """

    def __init__(self, files: RotatingFiles, *, sample: float = 1.0) -> None:
        self.interrupted: str | None = None
        self.lost = 0
        self._files = files
        self._sample = sample
        self._log = structlog.BytesLogger(cast(BinaryIO, files))
        self._is_closed = False
        # What is missing before the next line.
        self._gap: TraceGap | None = None
        # While it is interrupted: since when and until when by time.monotonic, and what is missing since then.
        self._since = self._retry_at = 0.0
        self._missing = 0

    @property
    def path(self) -> Path:
        """The file that is written to, or will be with the first record."""
        return self._files.path

    def keeps(self, record: TransitionRecord) -> bool:
        """Whether the sample takes it."""
        return self._sample >= 1.0 or self._is_sampled(record)

    def write(self, *records: TransitionRecord) -> None:
        """Append a line for each. Never raises. Without a record it only tries again what is due."""
        if self._sample < 1.0:
            records = tuple(filter(self._is_sampled, records))
        if self._is_waiting():
            self._lose(records)
        elif records or self._gap is not None:
            self._append(records)

    def note_gap(self, gap: TraceGap) -> None:
        """Append the line for records that are missing, which whoever calls has counted. Never raises."""
        self._add_to_gap(gap)
        if not self._is_waiting():
            self._append(())

    def close(self) -> None:
        """Idempotent; never raises."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # what could not be written before cannot be written now
            self._files.close()

    def _is_waiting(self) -> bool:
        return self.interrupted is not None and time.monotonic() < self._retry_at

    def _append(self, records: Sequence[TransitionRecord]) -> None:
        gap = self._gap
        try:
            lines = [] if gap is None else [render_note(gap)]
            if records:
                lines.append(render_lines(records))
            self._log.msg(b"\n".join(lines))
        except Exception as error:  # whatever it is: a trace is not worth a request
            if self._is_closed:  # under our hands
                return
            written = error.lines if isinstance(error, LinesCut) else 0
            if gap is not None and written:
                self._gap, written = None, written - 1
            self._interrupt(error)
            self._lose(records[written:])
            return
        self._gap = None
        if self.interrupted is not None:
            self._go_on()

    def _interrupt(self, error: Exception) -> None:
        now = time.monotonic()
        reason = shorten(str(error), 300)
        is_new = self.interrupted is None
        self.interrupted = f"{self.path}: {reason}"
        self._retry_at = now + RETRY_SECONDS
        if not is_new:
            return
        self._since, self._missing = now, 0
        get_logger().error(
            "the state-transition trace %s is interrupted: %s; KV transfer goes on, and so does the trace once it can "
            "be written, which is tried every %g s%s%s",
            self.path,
            reason,
            RETRY_SECONDS,
            ADVICE_FOLLOWS,
            TRACE_INTERRUPTED_ADVICE,
        )

    def _go_on(self) -> None:
        self.interrupted = None
        get_logger().warning(
            "the state-transition trace goes on in %s: it could not be written for %.1f s; %d record(s) are missing",
            self.path,
            time.monotonic() - self._since,
            self._missing,
        )

    def _lose(self, records: Sequence[TransitionRecord]) -> None:
        if not records or self._is_closed:
            return
        self.lost += len(records)
        self._add_to_gap(TraceGap.of(records))

    def _add_to_gap(self, more: TraceGap) -> None:
        self._missing += more.missing
        self._gap = more.behind(self._gap)

    def _is_sampled(self, record: TransitionRecord) -> bool:
        request_id = record.subject if record.machine == "lease" else record.remote_request_id
        # A peer is no request's; and parameters that make no sense name none.
        return request_id is None or is_sampled(request_id, self._sample)


class LinesCut(OSError):
    """Not all was written. `lines`: how many are in the file, whole."""

    def __init__(self, lines: int) -> None:
        super().__init__(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: the end of a line could not be written")
        self.lines = lines


class RotatingFiles:
    """The files of one process, as one binary file to append to; see the module's docstring.

    `write` is given whole lines, which stay together. Every method but `close` raises OSError, and may be called again
    after it.

    Args:
        stem: path of the first file, without its ending.
        header: of the first file.
        file_bytes, files_kept: a file ends with the lines that take it to so many bytes; so many files stay.
    """

    def __init__(self, stem: Path, header: FileHeader, *, file_bytes: int, files_kept: int) -> None:
        self.path = part_path(stem, 0)
        self._stem = stem
        self._header = header
        self._file_bytes = file_bytes
        self._kept: deque[Path] = deque()
        self._files_kept = files_kept
        self._file: FileIO | None = None
        self._left_bytes = 0
        self._is_closed = False

    def write(self, lines: bytes) -> int:
        """Raises LinesCut where some of it is in the file."""
        if self._is_closed:
            raise ValueError("write to closed files")
        file = self._open() if self._left_bytes > 0 else None
        if file is None:
            file = self._begin()
        length = len(lines)
        try:
            written = file.write(lines)
        except OSError:
            self._let_go()  # it may be good for nothing any more, as after a server of it has started again
            raise
        if written != length:
            raise self._cut(file, lines[:written])
        self._left_bytes -= length
        return length

    def flush(self) -> None:
        """What was written is with the operating system already."""

    def close(self) -> None:
        self._is_closed = True
        if self._file is not None:
            self._file.close()

    def _open(self) -> FileIO | None:
        """The file to go on in. None: it is not there any more."""
        if self._file is not None and _is_deleted(self._file):
            self._let_go()
        if self._file is None:
            with contextlib.suppress(FileNotFoundError):
                self._file = FileIO(self.path, "a", opener=_open_existing)
        return self._file

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _cut(self, file: FileIO, written: bytes) -> LinesCut:
        """Take back the line that has no end."""
        whole = written.rfind(b"\n") + 1
        self._left_bytes -= whole
        try:
            os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - (len(written) - whole))
        except OSError:
            self._left_bytes = 0  # the next line would go on in that one: it begins another file
        self._let_go()
        return LinesCut(written.count(b"\n"))

    def _begin(self) -> FileIO:
        if not self._kept:
            file = self._create_first()
        else:
            self._let_go()
            part = self._header.part + 1
            path = part_path(self._stem, part)
            file = _create(path)
            self.path, self._header = path, replace(self._header, part=part)
        line = render_note(self._header) + b"\n"
        try:
            if file.write(line) != len(line):
                raise LinesCut(0)
        except OSError:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise
        self._file = file
        self._left_bytes = max(1, self._file_bytes - len(line))
        self._kept.append(self.path)
        if len(self._kept) > self._files_kept:
            with contextlib.suppress(FileNotFoundError):  # somebody has tidied up
                self._kept.popleft().unlink()
        return file

    def _create_first(self) -> FileIO:
        # Of a sequence that was rotated the first file is gone, and the others are in the way all the same.
        taken = {named.stem for named in map(split_name, os.listdir(self._stem.parent)) if named is not None}
        for number in range(FILES_PER_NAME_MAX):
            stem = self._stem.with_name(f"{self._stem.name}-{number}") if number else self._stem
            if stem.name in taken:
                continue
            with contextlib.suppress(FileExistsError):
                self.path = part_path(stem, 0)
                file = _create(self.path)
                self._stem = stem
                return file
        raise FileExistsError(f"{FILES_PER_NAME_MAX} files named {self._stem.name} are in {self._stem.parent}")


def _create(path: Path) -> FileIO:
    return FileIO(path, "x", opener=_open_for_append)


def _is_deleted(file: FileIO) -> bool:
    """Whether somebody has: what is written to it then nobody can read."""
    with contextlib.suppress(OSError):  # which writing to it will say
        return os.fstat(file.fileno()).st_nlink == 0
    return False


def _open_for_append(path: str, flags: int) -> int:
    # Appending lets a log rotation that truncates the file work as meant.
    return os.open(path, flags | os.O_APPEND, 0o644)


def _open_existing(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT)
