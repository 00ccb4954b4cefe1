"""The thread that writes the trace of a process, so that no file system can make the actors wait.

    actors --write--> queue --thread--> JsonLinesSink --> files

`write` only puts records into a queue. The thread takes what is there, makes lines of it, and writes these together;
that files follow each other is its affair too. While the file system keeps up, a record is with the operating system a
moment after its transition. A process that is killed loses what the thread had not come to.

A file system that hangs (its server is gone, its share of I/O is used up) costs records and nothing else. A full queue
takes none until half of it is written; what comes meanwhile is left out and counted. The log says so once when it
begins and once when it is over, and the trace has a `TraceGap` in that place.

An error of the file system interrupts the trace until it can be written again (`trace_log`). The thread goes on taking
records from the queue, which costs it nothing, and the sink counts them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from connector.cpu_affinity import leave_single_cpu
from connector.observe.log import get_logger
from connector.observe.trace_format import TraceGap
from connector.observe.trace_log import RETRY_SECONDS, JsonLinesSink
from connector.thread_limit import start_thread
from statemachine.trace import TransitionRecord

QUEUE_RECORDS_MAX = 1 << 15
"""Records that wait to be written, some twenty megabytes: of a thousand requests a second those of three seconds, of
ten those of some minutes."""

RECORDS_PER_WRITE_MAX = 256
"""Making the lines of so many keeps the interpreter for about 0.1 ms."""

CLOSE_SECONDS = 1.0
"""How long the end of a process waits for what is queued."""


class TraceWriter:
    """A `statemachine.trace.TraceSink` in front of `lines`, which is called by a thread of its own from here on.

    `write` belongs to one thread; `close` may come from another one, and what is written after it is dropped.

    Args:
        queue_records_max: with so many records in the queue it takes no more.
        on_missing: called in `write` with the number of records that were left out, or that an error has cost.

    Raises NoThreadLeft.
    """

    def __init__(
        self,
        lines: JsonLinesSink,
        *,
        queue_records_max: int = QUEUE_RECORDS_MAX,
        on_missing: Callable[[int], None] = lambda records: None,
    ) -> None:
        self._lines = lines
        self._on_missing = on_missing
        self._queue_records_max = queue_records_max
        # Records, the line for what is missing, and None at the end.
        self._queue: queue.SimpleQueue[tuple[TransitionRecord, ...] | TraceGap | None] = queue.SimpleQueue()
        # Records that were put into the queue, and those that have left it; each is changed by one thread only.
        self._put = 0
        self._done = 0
        # Of the records that the thread could not write, those that were told.
        self._told = 0
        # All that `on_missing` was called with.
        self._missing = 0
        # While records are left out: what is missing, and since when by time.monotonic.
        self._gap: TraceGap | None = None
        self._gap_since = 0.0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-transfer-trace", daemon=True)
        start_thread(self._thread)

    @property
    def interrupted(self) -> str | None:
        """The file that cannot be written, and why; None while it can."""
        return self._lines.interrupted

    @property
    def missing(self) -> int:
        """How many records were not written since the start."""
        return self._missing + self._lines.lost - self._told

    def write(self, *records: TransitionRecord) -> None:
        """Have a line written for each. Never waits for a file."""
        if self._is_closed:
            return
        self._tell_lost()
        waiting = self._put - self._done
        if self._gap is not None and waiting <= self._queue_records_max // 2:
            self._end_gap()
        if self._gap is not None or waiting >= self._queue_records_max:
            self._leave_out(records)
            return
        self._put += len(records)
        self._queue.put(records)

    def close(self) -> None:
        """Write what is queued, for CLOSE_SECONDS at most. Idempotent; never raises."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._gap is not None:
            self._end_gap()
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            get_logger().error(
                "the end of the state-transition trace %s is missing: its file system did not take %d record(s) within "
                "%g s",
                self._lines.path,
                self._put - self._done,
                CLOSE_SECONDS,
            )
        self._tell_lost()

    def _tell_lost(self) -> None:
        """Records that the thread has lost count as missing."""
        lost = self._lines.lost
        if missing := lost - self._told:
            self._told = lost
            self._note_missing(missing)

    def _leave_out(self, records: tuple[TransitionRecord, ...]) -> None:
        records = tuple(filter(self._lines.keeps, records))
        if not records:
            return
        gap = TraceGap.of(records)
        if self._gap is None:
            self._gap_since = time.monotonic()
            get_logger().warning(
                "the state-transition trace %s is not complete from here on: its file system does not take what is "
                "written, and %d records wait already; KV transfer goes on. Does the file system of trace_directory "
                "hang, or is it too slow?",
                self._lines.path,
                self._put - self._done,
            )
        self._gap = gap.behind(self._gap)
        self._note_missing(len(records))

    def _note_missing(self, records: int) -> None:
        self._missing += records
        self._on_missing(records)

    def _end_gap(self) -> None:
        gap, self._gap = self._gap, None
        assert gap is not None
        self._queue.put(gap)
        get_logger().warning(
            "%d record(s) are missing in the state-transition trace %s: its file system did not keep up for %.1f s",
            gap.missing,
            self._lines.path,
            time.monotonic() - self._gap_since,
        )

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        leave_single_cpu()
        waiting, lines = self._queue, self._lines
        records: list[TransitionRecord] = []
        while (item := self._next()) is not None:
            if isinstance(item, TraceGap):
                self._write(records)
                lines.note_gap(item)
                continue
            records += item
            if len(records) >= RECORDS_PER_WRITE_MAX or waiting.empty():
                self._write(records)
        self._write(records)
        lines.close()

    def _next(self) -> tuple[TransitionRecord, ...] | TraceGap | None:
        """What is next in the queue. Meanwhile the trace goes on where it can again, also if nothing comes."""
        while self._lines.interrupted is not None:
            try:
                return self._queue.get(timeout=RETRY_SECONDS)
            except queue.Empty:
                self._lines.write()
        return self._queue.get()

    def _write(self, records: list[TransitionRecord]) -> None:
        self._lines.write(*records)
        self._done += len(records)
        records.clear()
