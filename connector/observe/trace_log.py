"""The state-transition trace on disk: JSON lines, one transition per line, one file per process.

`open_trace_log` makes the sink that the machines of one process write to, `read_trace` gives the records of all
processes back. Every line holds all fields of `TransitionRecord`; a field without a value is null.

Writing is structlog's bound logger around a plain file: one processor, which renders with msgspec, and nothing of
structlog's global configuration, which belongs to whoever embeds vLLM. A line goes to the operating system in one
write before the call returns, so a process that is killed loses nothing that it traced. The file is created, never
continued: two processes that had the same id one after the other (as in containers, where an engine is process 1 after
every restart) get two files, each with numbers from 0 without gaps.

The trace must not cost a request anything. An error (the disk is full, the file system is gone) switches the sink off
with one line in the log, and no exception leaves `write`. The file grows without bound while it is on, by about 500
bytes per transition. What a transition costs is measured by tests/bench/bench_trace.py; a third of it is the write to
the operating system, which is not batched because the last lines before a kill are the ones that people look for.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog

from connector.observe.log import get_logger
from connector.wire.bounded import shorten
from statemachine.trace import TransitionRecord

FILE_NAME_LENGTH_MAX = 150
"""Longest part of a file name that is made from an engine id, in characters; file systems allow 255 bytes in all."""

FILES_PER_NAME_MAX = 1000
"""Files of processes with the same engine id, role, rank and process id in one directory."""

_NOT_IN_FILE_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TransitionRecord)


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


# --- writing --------------------------------------------------------------------------------------------------------


class JsonLinesSink:
    """A `statemachine.trace.TraceSink`: one line per record, to a file that it owns.

    `write` belongs to one thread; `close` may come from another one, and what is written after it is dropped.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._log: _TransitionLogger | None = _TransitionLogger(structlog.BytesLogger(file), [render_record], {})

    def write(self, record: TransitionRecord) -> None:
        """Append one line. Never raises: an error switches the sink off for good."""
        log = self._log
        if log is None:
            return
        try:
            log.transition(record)
        except Exception as error:  # whatever it is: a trace is not worth a request
            if self._log is not None:  # otherwise the file was closed under our hands
                get_logger().error("the state-transition trace %s ends here: %s", self.path, shorten(str(error), 300))
            self.close()

    def close(self) -> None:
        """Idempotent; never raises."""
        self._log = None
        with contextlib.suppress(OSError):  # what could not be written before cannot be written now
            self._file.close()


class _TransitionLogger(structlog.BoundLoggerBase):
    """structlog's wrapper with the one method that is needed, so that a record passes through as it is."""

    def transition(self, record: TransitionRecord) -> None:
        self._proxy_to_logger("msg", record=record)


def render_record(logger: object, method_name: str, event_dict: structlog.typing.EventDict) -> bytes:
    """structlog processor, pure: the line for the record in `event_dict`, without its end."""
    record = event_dict["record"]
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        # A lone surrogate, which a JSON document can smuggle into any string but UTF-8 cannot express.
        return _encoder.encode({name: _expressible(value) for name, value in msgspec.structs.asdict(record).items()})


def _expressible(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def open_trace_log(directory: str | Path, *, engine_id: str, role: str, rank: int) -> JsonLinesSink:
    """Create `directory` if needed, and in it `<engine id>-<role>-<rank>-<process id>.jsonl` for this process.

    Characters of the engine id that do not belong into a file name become `_`. If the name is taken, a number follows
    the process id.

    Raises TraceDirectoryError.
    """
    directory = Path(directory)
    name = _NOT_IN_FILE_NAMES.sub("_", engine_id)[:FILE_NAME_LENGTH_MAX]
    stem = f"{name}-{role}-{rank}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number in range(FILES_PER_NAME_MAX):
            path = directory / (f"{stem}-{number}.jsonl" if number else f"{stem}.jsonl")
            with contextlib.suppress(FileExistsError):
                return JsonLinesSink(path, open(path, "xb", opener=_open_for_append))
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise TraceDirectoryError(shorten(str(directory), 300), str(error)) from error
    raise TraceDirectoryError(shorten(str(directory), 300), f"{FILES_PER_NAME_MAX} files named {stem} are in it")


def _open_for_append(path: str, flags: int) -> int:
    # Appending lets a log rotation that truncates the file work as meant.
    return os.open(path, flags | os.O_APPEND, 0o644)


# --- reading --------------------------------------------------------------------------------------------------------


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """What one process wrote. `torn_bytes`: length of a last line without an end, which is not among the records."""

    records: list[TransitionRecord]
    torn_bytes: int


def read_trace_file(path: Path) -> TraceFile:
    """The records of one file, in the order in which they were written. Raises OSError and TraceFileError."""
    *lines, torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TraceFileError(path, number, shorten(str(error), 200)) from None
    return TraceFile(records=records, torn_bytes=len(torn))


def read_trace(directory: str | Path) -> list[TransitionRecord]:
    """The records of all processes that wrote to `directory`, by wall clock time and number.

    A line that its process was still writing, or was killed in, is left out; one log line says how many those are.
    Within one process the order is that of its numbers as long as the wall clock was not set back.

    Raises OSError, and TraceFileError when a whole line is not a transition record.
    """
    files = [read_trace_file(path) for path in sorted(Path(directory).glob("*.jsonl"))]
    torn_files = sum(file.torn_bytes > 0 for file in files)
    if torn_files:
        get_logger().warning("left out the unfinished last line of %d trace file(s) in %s", torn_files, directory)
    return sorted((record for file in files for record in file.records), key=lambda record: (record.wall, record.seq))
