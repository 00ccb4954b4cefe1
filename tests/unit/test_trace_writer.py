"""The thread that writes the trace: nobody waits for a file, and what is missing is known."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connector.observe import trace_log, trace_writer
from connector.observe.trace_log import JsonLinesSink, open_trace_log
from connector.observe.trace_writer import TraceWriter
from connector.thread_limit import NoThreadLeft
from connector.tools.cli.main import app
from connector.tools.conformance import check, check_records
from connector.tools.trace_reader import read_processes, read_trace, read_trace_about, read_trace_file
from statemachine.trace import TransitionRecord
from tests.rig.patience import PATIENCE_SECONDS
from tests.rig.thread_limit import no_thread_left
from tests.stalled_file import StalledFile
from tests.unit.traced_run import calm_run

QUEUE = 40


def record(seq: int, **changes: Any) -> TransitionRecord:
    """Of a peer, so that the records of one are what its table allows."""
    fields = TransitionRecord(
        seq=seq,
        wall=1_700_000_000.0 + seq,
        mono_ns=seq,
        engine_id="e",
        rank=0,
        role="kv_both",
        machine="request",
        subject=f"r-{seq}",
        from_state=None,
        event="Created",
        to_state="pending_handshake",
        remote_request_id=f"p-{seq}",
    )
    return msgspec.structs.replace(fields, **changes)


def opened(directory: Path, **changes: Any) -> JsonLinesSink:
    return open_trace_log(directory, engine_id="e", **({"role": "kv_both", "rank": 0} | changes))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process waits for the thread, however late that comes to run: what it has not written is missing."""
    monkeypatch.setattr(trace_writer, "CLOSE_SECONDS", PATIENCE_SECONDS)


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def stalled() -> Iterator[StalledFile]:
    made = StalledFile()
    yield made
    made.go_on()


@pytest.fixture
def small(tmp_path: Path, stalled: StalledFile) -> TraceWriter:
    """With a short queue, and a first record that is in its file."""
    lines = opened(tmp_path)
    writer = TraceWriter(lines, queue_records_max=QUEUE)
    writer.write(record(0))
    until(lambda: len(read_trace(tmp_path)) == 1 and writer._done == 1)  # or what waits would be one more
    stalled.take_the_place_of(lines.path)
    return writer


def test_what_is_written_is_soon_in_the_file_in_its_order(tmp_path: Path) -> None:
    writer = TraceWriter(opened(tmp_path))
    written = [record(seq) for seq in range(5000)]
    for at in range(0, len(written), 5):
        writer.write(*written[at : at + 5])
    until(lambda: read_trace(tmp_path) == written)
    writer.close()
    writer.close()
    writer.write(record(5000))
    assert read_trace(tmp_path) == written


def test_at_the_end_what_is_queued_is_written(tmp_path: Path) -> None:
    writer = TraceWriter(opened(tmp_path, file_bytes=20_000, files_kept=1000))
    for seq in range(2000):
        writer.write(record(seq))
    writer.close()
    assert [each.seq for each in read_trace(tmp_path)] == list(range(2000))
    assert not writer._thread.is_alive()


def test_an_engine_that_traces_nothing_leaves_no_file(tmp_path: Path) -> None:
    TraceWriter(opened(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


_WRITES_AND_IS_KILLED = """
import os, pathlib, signal, sys, time
from connector.observe.trace_log import open_trace_log
from connector.observe.trace_writer import TraceWriter
from statemachine.trace import TransitionRecord
writer = TraceWriter(open_trace_log(sys.argv[1], engine_id="killed", role="kv_both", rank=0))
for seq in range(100):
    writer.write(TransitionRecord(seq=seq, wall=float(seq), mono_ns=seq, engine_id="killed", rank=0, role="kv_both",
                                  machine="lease", subject="x", from_state=None, event="Created", to_state="computing"))
ends_at = time.monotonic() + 30
while sum(path.read_bytes().count(b"\\n") for path in pathlib.Path(sys.argv[1]).iterdir()) < 101:  # with the header
    assert time.monotonic() < ends_at
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_has_lost_the_last_moment_at_most(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WRITES_AND_IS_KILLED, str(tmp_path)]
    subprocess.run(command, timeout=250, cwd=Path(__file__).parents[2], check=False)
    assert [r.seq for r in read_trace(tmp_path)] == list(range(100))


# --- a file that hangs ----------------------------------------------------------------------------------------------


def test_a_file_that_hangs_costs_records_and_nobody_waits(
    tmp_path: Path, small: TraceWriter, stalled: StalledFile, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    for seq in range(1, 1000):
        small.write(record(seq))
    assert time.monotonic() - began < 10
    warnings = [each for each in caplog.messages if "not complete" in each]
    assert len(warnings) == 1
    assert "trace_directory" in warnings[0]
    written = stalled.go_on()
    until(lambda: small._put == small._done)
    small.write(record(1000))
    small.close()
    ended = [each for each in caplog.messages if "did not keep up" in each]
    lines = b"".join(written()).splitlines()
    assert len(ended) == 1
    # What the pipe was given is not in the file: put it there, as a file system that is back does.
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in lines)
    trace = read_trace_file(path)
    ((line, gap),) = trace.gaps
    numbers = [each.seq for each in trace.records]
    assert numbers == [*range(gap.seq), 1000]
    assert gap.seq + gap.missing == 1000
    assert (gap.wall, gap.until_wall) == (record(gap.seq).wall, record(999).wall)
    assert line == gap.seq + 2  # behind the header and those before
    assert f"{gap.missing} record(s) are missing" in ended[0]


def test_records_are_taken_again_when_half_of_the_queue_is_written(small: TraceWriter) -> None:
    """And not one by one, each behind a gap of its own."""
    for seq in range(1, QUEUE + 2):
        small.write(record(seq))
    assert small._gap is not None
    small._done += QUEUE // 2 - 1
    small.write(record(QUEUE + 2))
    assert small._gap.missing >= 2
    small._done += 1
    small.write(record(QUEUE + 3))
    assert small._gap is None


def test_the_end_of_a_process_does_not_wait_for_a_file_that_hangs(
    small: TraceWriter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_writer, "CLOSE_SECONDS", 0.2)
    for seq in range(1, 10):
        small.write(record(seq))
    began = time.monotonic()
    small.close()
    assert 0.2 <= time.monotonic() - began < 10
    assert [each for each in caplog.messages if "the end of the state-transition trace" in each]


def test_of_what_the_sample_leaves_out_nothing_is_missing(tmp_path: Path, stalled: StalledFile) -> None:
    lines = opened(tmp_path, sample=0.0)
    missing: list[int] = []
    writer = TraceWriter(lines, queue_records_max=QUEUE, on_missing=missing.append)
    peer = record(0, machine="peer", remote_request_id=None)
    writer.write(peer)
    until(lambda: len(read_trace(tmp_path)) == 1)
    stalled.take_the_place_of(lines.path)
    writer.write(*[peer] * QUEUE)
    for seq in range(1, 100):
        writer.write(record(seq))
    assert writer._gap is None
    writer.write(peer, record(100), peer)
    assert writer._gap is not None
    assert writer._gap.missing == 2
    assert missing == [2]


def test_what_comes_while_the_trace_is_interrupted_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = opened(tmp_path / "traces")
    missing: list[int] = []
    writer = TraceWriter(lines, on_missing=missing.append)
    (tmp_path / "traces").rmdir()
    for seq in range(0, 100, 2):
        writer.write(record(seq), record(seq + 1))
    until(lambda: writer._done == 100)
    assert writer.missing == 100
    writer.write(record(100))
    assert sum(missing) >= 100
    writer.close()
    writer.write(record(101))
    assert sum(missing) == writer.missing == 101
    (said,) = [each for each in caplog.messages if "is interrupted" in each]
    assert "so does the trace once it can be written" in said
    assert "; what to do: free space, make the directory again" in said


def test_a_trace_goes_on_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when nothing comes that would be written."""
    for module in (trace_log, trace_writer):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    directory = tmp_path / "traces"
    missing: list[int] = []
    writer = TraceWriter(opened(directory), on_missing=missing.append)
    directory.rmdir()
    writer.write(record(0), record(1))
    until(lambda: writer.interrupted is not None)
    directory.mkdir()
    until(lambda: writer.interrupted is None)
    writer.write(record(2))
    writer.close()
    assert [each.seq for each in read_trace(directory)] == [2]
    assert missing == [2]
    (said,) = [each for each in caplog.messages if "goes on in" in each]
    assert "2 record(s) are missing" in said


def test_what_an_interruption_has_cost_counts_although_nothing_is_written_after_it(tmp_path: Path) -> None:
    lines = opened(tmp_path / "traces")
    missing: list[int] = []
    writer = TraceWriter(lines, on_missing=missing.append)
    (tmp_path / "traces").rmdir()
    writer.write(record(0), record(1))
    writer.close()
    assert missing == [2]


def test_of_what_is_lost_in_an_interruption_the_sample_counts(tmp_path: Path) -> None:
    lines = opened(tmp_path / "traces", sample=0.0)
    missing: list[int] = []
    writer = TraceWriter(lines, on_missing=missing.append)
    (tmp_path / "traces").rmdir()
    peer = record(0, machine="peer", remote_request_id=None)
    writer.write(peer, record(1))
    until(lambda: writer._done == 2)
    writer.write(record(2), peer, record(3))
    until(lambda: writer._done == 5)
    writer.write(record(4))
    assert sum(missing) == writer.missing == 2
    writer.close()


def test_what_a_full_queue_has_left_out_counts_once_in_an_interruption(
    tmp_path: Path, small: TraceWriter, stalled: StalledFile
) -> None:
    """It is in the gap of the interruption, and was counted when it was left out."""
    for seq in range(1, 1000):
        small.write(record(seq))
    stalled.go_on()
    until(lambda: small._put == small._done)
    small._lines.interrupted = "by another error"
    small._lines._retry_at = time.monotonic() + 100
    small.write(record(1000))
    until(lambda: small._put == small._done)
    small.close()
    gap = small._lines._gap
    assert gap is not None
    assert gap.until_wall == record(1000).wall
    assert gap.missing == small.missing


def test_that_there_is_no_thread_for_it_is_said(tmp_path: Path) -> None:
    with no_thread_left(), pytest.raises(NoThreadLeft, match="may have no more threads"):
        TraceWriter(opened(tmp_path))


_FILLS_THE_DISK = """
import resource, sys, time
from connector.observe.trace_log import open_trace_log
from connector.observe.trace_writer import TraceWriter
from statemachine.trace import TransitionRecord
import msgspec
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
record = msgspec.json.decode(sys.argv[2], type=TransitionRecord)
lines = open_trace_log(sys.argv[1], engine_id="e", role="kv_both", rank=0)
missing = []
writer = TraceWriter(lines, on_missing=missing.append)
seq = 0
while lines.interrupted is None:
    writer.write(msgspec.structs.replace(record, seq=seq))
    seq += 1
    time.sleep(0.0001)
while writer._done < writer._put:
    time.sleep(0.01)
writer.write(msgspec.structs.replace(record, seq=seq))
writer.close()
print(seq + 1, sum(missing))
"""


def test_of_a_disk_that_is_full_every_record_is_in_the_trace_or_counts(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow beyond a limit."""
    command = [sys.executable, "-c", _FILLS_THE_DISK, str(tmp_path), msgspec.json.encode(record(0)).decode()]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True, timeout=250
    )
    written, missing = map(int, ended.stdout.split())
    kept = len(read_trace(tmp_path))
    assert kept + missing == written
    assert kept > 50
    assert missing > 0


# --- what reads a trace with a gap ----------------------------------------------------------------------------------


@pytest.fixture
def with_gap(tmp_path: Path) -> Path:
    """A run of both sides, of which each process has lost what it did in the middle of it."""
    sinks: dict[tuple[str, int], JsonLinesSink] = {}
    lost: dict[tuple[str, int], list[TransitionRecord]] = {}
    run = calm_run()
    for number, each in enumerate(run):
        key = (each.engine_id, each.rank)
        if key not in sinks:
            sinks[key] = open_trace_log(tmp_path, engine_id=each.engine_id, role=each.role, rank=each.rank)
        if len(run) // 3 < number < len(run) // 2:
            lost.setdefault(key, []).append(each)
            continue
        for missed in [lost.pop(key)] if key in lost and number >= len(run) // 2 else []:
            sinks[key].note_gap(gap_of(missed))
        sinks[key].write(each)
    for sink in sinks.values():
        sink.close()
    return tmp_path


def gap_of(missed: list[TransitionRecord]) -> trace_writer.TraceGap:
    first = missed[0]
    return trace_writer.TraceGap(
        missing=len(missed), seq=first.seq, wall=first.wall, mono_ns=first.mono_ns, until_wall=missed[-1].wall
    )


def test_what_is_missing_in_the_middle_is_concluded_nothing_from(
    with_gap: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = read_processes(with_gap)
    kept = [each for process in processes for file in process.files for each in file.records]
    missing = len(calm_run()) - len(kept)
    assert missing > 50
    verdict = check(processes)
    assert verdict.findings == ()
    assert 0 < verdict.missing <= missing
    assert check_records(kept).findings != ()  # without the lines for what is missing
    with pytest.raises(SystemExit) as ended:
        app(["trace", "check", str(with_gap)])
    assert ended.value.code == 0
    assert f"all allowed; {verdict.missing} are missing" in capsys.readouterr().out
    gaps = [file for process in processes for file in process.files if file.gaps]
    assert gaps
    for file in gaps:
        assert [each for each in caplog.messages if str(file.path) in each and "are missing" in each]


def test_why_and_the_others_say_that_records_are_missing(with_gap: Path, caplog: pytest.LogCaptureFixture) -> None:
    subject = next(each.subject for each in calm_run() if each.machine == "request")
    about = read_trace_about(with_gap, subject)
    assert [each for each in about if each.subject == subject]
    assert [each for each in caplog.messages if "are missing" in each]


def test_a_gap_at_the_end_of_a_file_is_before_the_first_record_of_the_next(tmp_path: Path) -> None:
    sized = opened(tmp_path / "sized")
    sized.write(record(0), record(1))
    # Their headers may differ by some digits of the time.
    lines = opened(tmp_path, file_bytes=sized.path.stat().st_size + 20)
    lines.write(record(0), record(1))
    lines.note_gap(gap_of([record(2), record(3)]))
    # It goes on under a name that was in use: what ended it is missing.
    lines.write(record(4, subject="r-0"))
    lines.close()
    sized.close()
    (process,) = read_processes(tmp_path)
    first, second = process.files
    assert ([line for line, _ in first.gaps], len(first.records), len(second.records)) == ([4], 2, 1)
    assert check([process]).findings == ()


def test_the_lines_of_a_file_with_a_gap_are_numbered_right(tmp_path: Path) -> None:
    lines = opened(tmp_path)
    lines.note_gap(gap_of([record(0)]))
    lines.write(record(1), record(2))
    lines.note_gap(gap_of([record(3), record(4)]))
    lines.write(record(5))
    lines.close()
    (process,) = read_processes(tmp_path)
    (file,) = process.files
    assert [(line, each.seq) for line, each in file.located()] == [(3, 1), (4, 2), (6, 5)]
    assert [line for line, _ in file.gaps] == [2, 5]
    assert not process.is_whole


def test_it_runs_where_the_process_may(tmp_path: Path) -> None:
    """vLLM pins its main thread to one CPU."""
    before = os.sched_getaffinity(0)
    writer: list[TraceWriter] = []

    def make() -> None:
        os.sched_setaffinity(0, {min(before)})
        writer.append(TraceWriter(opened(tmp_path)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    native_id = writer[0]._thread.native_id
    assert native_id is not None
    until(lambda: os.sched_getaffinity(native_id) == os.sched_getaffinity(os.getppid()))
    writer[0].close()


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
