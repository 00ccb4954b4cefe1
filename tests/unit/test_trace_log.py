"""The trace on disk: complete, one line per transition, readable after a kill, and never a reason to fail."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from connector import DISTRIBUTION
from connector.clock import BootClock
from connector.config import ConnectorOptions
from connector.observe import trace_log
from connector.observe.history import histories, stories
from connector.observe.log import get_logger
from connector.observe.trace_format import (
    HEADER_START,
    SCHEMA,
    FileHeader,
    TraceFileError,
    TraceSchemaError,
    render_line,
)
from connector.observe.trace_log import JsonLinesSink, TraceDirectoryError, is_sampled, open_trace_log
from connector.runtime.context import engine_limits
from connector.runtime.lease_keeper import lending_limits
from connector.runtime.recorder import Recorder
from connector.tools.conformance import check
from connector.tools.explanation import Live, explain, find
from connector.tools.trace_reader import read_processes, read_trace, read_trace_about, read_trace_file
from connector.versions import shown_version
from statemachine import lending, remote_engine
from statemachine.failures import HandshakeTimeout
from statemachine.lease import LeaseName
from statemachine.trace import TraceSink, TransitionRecord
from tests.unit.properties import on_any_machine
from tests.unit.traced_run import faulty_run, write_run

ROOT = Path(__file__).parents[2]

FULL = TransitionRecord(
    seq=7,
    wall=1_700_000_000.25,
    mono_ns=123_456_789,
    engine_id="decode-1",
    rank=2,
    role="kv_consumer",
    machine="request",
    subject="cmpl-7",
    from_state="pending_handshake",
    event="PeerFailed",
    to_state="failed",
    reason="HandshakeTimeout",
    detail="prefill engine gone",
    peer="prefill-1",
    remote_request_id="cmpl-7-p",
    lease_number=12,
    blocks=3,
    bytes=393_216,
    descriptors=96,
    seconds_in_from=0.125,
    age_seconds=0.25,
    kept_until_ns=987_654_321,
)

OPTIONAL_FIELDS = [
    "from_state",
    "reason",
    "detail",
    "peer",
    "remote_request_id",
    "lease_number",
    "blocks",
    "bytes",
    "descriptors",
    "seconds_in_from",
    "age_seconds",
    "kept_until_ns",
]


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """What the connector logs."""
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Keep()
    get_logger().logger.addHandler(handler)
    yield texts
    get_logger().logger.removeHandler(handler)


def record(**changes: Any) -> TransitionRecord:
    return msgspec.structs.replace(FULL, **changes)


def opened(directory: Path, engine_id: str = "decode-1", **changes: Any) -> JsonLinesSink:
    return open_trace_log(directory, engine_id=engine_id, **({"role": "kv_consumer", "rank": 0} | changes))


def traced(directory: Path, records: Iterable[TransitionRecord], **changes: Any) -> None:
    """What one process has written."""
    sink = opened(directory, **changes)
    for each in records:
        sink.write(each)
    sink.close()


# --- writing --------------------------------------------------------------------------------------------------------


def test_every_field_comes_back(tmp_path: Path) -> None:
    sink: TraceSink = opened(tmp_path)
    empty = record(**dict.fromkeys(OPTIONAL_FIELDS))
    sink.write(FULL)
    sink.write(empty)
    sink.close()
    (path,) = tmp_path.iterdir()
    assert read_trace_file(path).records == [FULL, empty]
    # Every field is in every line, so that a reader need not know the defaults.
    assert [set(msgspec.json.decode(line)) for line in path.read_bytes().splitlines()[1:]] == [
        set(FULL.__struct_fields__)
    ] * 2


@pytest.mark.parametrize(("title", "struct"), [("Header", FileHeader), ("Record", TransitionRecord)])
def test_the_documented_schema_has_every_field(title: str, struct: type[msgspec.Struct]) -> None:
    """In its order; a row may have several."""
    schema = (ROOT / "docs/operations/traces.md").read_text().partition("\n## Schema ")[2].partition("\n## ")[0]
    assert schema.startswith(f"{SCHEMA}\n")
    table = re.split(rf"^{title}\b.*:$", schema, flags=re.MULTILINE)[1].strip().partition("\n\n")[0]
    names = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert re.findall(r"`(\w+)`", " ".join(names)) == list(struct.__struct_fields__)


def test_the_first_line_says_who_writes_what(tmp_path: Path) -> None:
    before = time.time()
    traced(tmp_path, [FULL], rank=3, role="kv_producer", sample=0.99)
    (process,) = read_processes(tmp_path)
    header = process.header
    assert header is not None
    assert (header.schema, header.part, header.engine_id, header.rank, header.role, header.process) == (
        SCHEMA,
        0,
        "decode-1",
        3,
        "kv_producer",
        "worker",
    )
    assert (header.pid, header.host, header.sample) == (os.getpid(), os.uname().nodename, 0.99)
    assert before <= header.started <= time.time()
    assert header.version == shown_version(DISTRIBUTION)


def test_an_engine_that_fails_to_start_leaves_no_file(tmp_path: Path) -> None:
    sink = opened(tmp_path / "traces")
    assert (tmp_path / "traces").is_dir()
    sink.close()
    assert list((tmp_path / "traces").iterdir()) == []


def test_the_cores_of_both_engines_trace_through_it(tmp_path: Path) -> None:
    """The production cores, one file for P and one for D, joined on the remote request id."""
    clock = BootClock()
    p_sink, d_sink = opened(tmp_path, "prefill-1"), opened(tmp_path, "decode-1")
    p = Recorder(engine_id="prefill-1", rank=0, role="kv_producer", clock=clock, sink=p_sink)
    d = Recorder(engine_id="decode-1", rank=0, role="kv_consumer", clock=clock, sink=d_sink)
    options, name = ConnectorOptions(), LeaseName("p-1", 1)
    lent = lending.Lending(lending_limits(options), p.observer(None))
    lent.handle(lending.Computing(lease=name), clock.now_ns())
    lent.handle(lending.Granted(lease=name, blocks=4), clock.now_ns())
    pulled = remote_engine.RemoteEngine("prefill-1", "h", engine_limits(options), observe=d.observer("prefill-1"))
    started = remote_engine.Started(request_id="d-1", lease=name, address="h", age_ns=0)
    pulled.handle(started, clock.now_ns())
    failure = HandshakeTimeout(peer="prefill-1", address="10.0.0.1:5600", timeout_seconds=5.0)
    pulled.handle(remote_engine.ConnectFailed(failure=failure), clock.now_ns())
    p.catch_up()
    d.catch_up()
    p_sink.close()
    d_sink.close()

    records = [each for each in read_trace(tmp_path) if each.machine in ("lease", "request")]
    assert [(r.engine_id, r.machine, r.to_state) for r in records] == [
        ("prefill-1", "lease", "computing"),
        ("prefill-1", "lease", "held"),
        ("decode-1", "request", "pending_handshake"),
        ("decode-1", "request", "failed"),
    ]
    assert {r.subject for r in records if r.machine == "lease"} == {
        r.remote_request_id for r in records if r.machine == "request"
    }
    assert (records[-1].reason, records[-1].detail) == ("HandshakeTimeout", str(failure))


def test_name_and_directory(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    sink = opened(directory, "../e vil/\x00\n.ü" + "x" * 1000, role="kv_both", rank=3)
    sink.write(FULL)
    sink.close()
    (path,) = directory.iterdir()
    assert path == sink.path
    assert path.name.startswith("___e_vil_____xxx")
    assert path.name.endswith(f"x-kv_both-3-{os.getpid()}.jsonl")
    assert len(path.name) < 255


def test_a_file_is_never_continued(tmp_path: Path) -> None:
    """An engine that restarts in a container has the process id of its predecessor."""
    sinks = [opened(tmp_path) for _ in range(3)]
    for number, sink in enumerate(sinks):
        sink.write(record(seq=0, wall=float(number)))
        sink.close()
    assert len({sink.path for sink in sinks}) == 3
    assert [len(read_trace_file(path).records) for path in tmp_path.iterdir()] == [1, 1, 1]
    assert [r.wall for r in read_trace(tmp_path)] == [0.0, 1.0, 2.0]


def test_the_number_of_sequences_of_one_name_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    monkeypatch.setattr(trace_log, "FILES_PER_NAME_MAX", 2)
    traced(tmp_path, [FULL])
    traced(tmp_path, [FULL])
    assert errors == []
    traced(tmp_path, [FULL])
    assert len(errors) == 1
    assert "2 files named decode-1-kv_consumer-0" in errors[0]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    for directory in (in_the_way, in_the_way / "below"):
        with pytest.raises(TraceDirectoryError) as caught:
            opened(directory)
        assert caught.value.directory == str(directory)
        assert str(directory) in str(caught.value)
        assert "switch traces off" in str(caught.value)
    with pytest.raises(TraceDirectoryError, match="null"):
        opened(Path("\x00"))


def test_a_full_disk_interrupts_the_trace_with_one_line_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs a device that is always full")
    sink = opened(tmp_path)
    monkeypatch.setattr(trace_log, "_create", lambda path: FileIO(full, "w"))
    for _ in range(3):
        sink.write(FULL)
    assert len(errors) == 1
    assert str(sink.path) in errors[0]
    assert "No space left on device" in errors[0]
    assert sink.lost == 3
    assert "No space left on device" in (sink.interrupted or "")
    sink.close()
    sink.close()
    assert len(errors) == 1


_UP_TO_A_LIMIT = """
import resource, sys
from pathlib import Path
from connector.observe.trace_log import open_trace_log
from statemachine.trace import TransitionRecord
import msgspec
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
record = msgspec.json.decode(sys.argv[2], type=TransitionRecord)
sink = open_trace_log(sys.argv[1], engine_id="e", role="kv_both", rank=0)
for seq in range(1000):
    sink.write(msgspec.structs.replace(record, seq=seq))
sink.close()
print("still here")
"""


def test_a_quota_that_is_used_up_in_the_middle_interrupts_the_trace_only(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow beyond a limit; what was written until then can be read."""
    command = [sys.executable, "-c", _UP_TO_A_LIMIT, str(tmp_path), msgspec.json.encode(FULL).decode()]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, timeout=250)
    assert ended.stdout.endswith(b"still here\n")
    assert ended.stderr.count(b"is interrupted") == 1
    assert read_trace(tmp_path)[0] == record(seq=0)
    assert 50 < len(read_trace(tmp_path)) < 1000


def test_a_directory_that_is_gone_when_the_next_file_begins_interrupts_the_trace_only(
    tmp_path: Path, errors: list[str]
) -> None:
    directory = tmp_path / "traces"
    sink = open_trace_log(directory, engine_id="e", role="kv_both", rank=0, file_bytes=1 << 10)
    sink.write(FULL)
    shutil.rmtree(directory)
    for _ in range(20):
        sink.write(FULL)
    assert len(errors) == 1
    assert "is interrupted" in errors[0]


@pytest.mark.parametrize("error_number", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("written_before", [True, False])
def test_a_directory_that_can_only_be_read_by_now_interrupts_the_trace_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str], error_number: int, written_before: bool
) -> None:
    """Storage that fails is often mounted again for reading only. What was written until then can be read."""
    sink = opened(tmp_path, file_bytes=1 << 10)
    if written_before:
        sink.write(FULL)

    def refused(path: Path) -> FileIO:
        raise OSError(error_number, os.strerror(error_number), str(path))

    monkeypatch.setattr(trace_log, "_create", refused)
    for _ in range(20):
        sink.write(FULL)
    sink.close()
    assert len(errors) == 1
    assert "is interrupted" in errors[0]
    assert str(sink.path) in errors[0]
    assert os.strerror(error_number) in errors[0]
    found = read_trace(tmp_path)
    assert found == [FULL] * len(found)
    assert bool(found) is written_before


def test_a_record_that_cannot_be_written_interrupts_the_trace_only(tmp_path: Path, errors: list[str]) -> None:
    sink = opened(tmp_path)
    sink.write(FULL)
    sink.write(record(blocks=object()))
    sink.write(FULL)
    assert len(errors) == 1
    assert read_trace(tmp_path) == [FULL]


_UNTIL_THERE_IS_ROOM_AGAIN = """
import resource, sys
from connector.observe import trace_log
from connector.observe.trace_log import open_trace_log
from statemachine.trace import TransitionRecord
import msgspec
limit = 100_000
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
record = msgspec.json.decode(sys.argv[2], type=TransitionRecord)
sink = open_trace_log(sys.argv[1], engine_id="e", role="kv_both", rank=0)
seq, lost = 0, []
def write(count):
    global seq
    sink.write(*(msgspec.structs.replace(record, seq=seq + more, wall=float(seq + more)) for more in range(count)))
    seq += count
for _ in range(3):
    while sink.interrupted is None:
        write(7)
    trace_log.RETRY_SECONDS = 0.0
    for _ in range(5):
        write(2)
    trace_log.RETRY_SECONDS = 1000.0
    write(3)
    write(4)
    sink._retry_at = 0.0
    limit += 20_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    write(1)
    assert sink.interrupted is None
    lost.append(sink.lost)
sink.close()
print(seq, *lost)
"""


def test_a_trace_goes_on_where_it_was_interrupted_once_there_is_room(tmp_path: Path) -> None:
    """In the same file. Every record is there, or counts in a gap in its place; no line is cut."""
    command = [sys.executable, "-c", _UNTIL_THERE_IS_ROOM_AGAIN, str(tmp_path), msgspec.json.encode(FULL).decode()]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True, timeout=250
    )
    written, *lost = map(int, ended.stdout.split())
    (path,) = tmp_path.iterdir()
    trace = read_trace_file(path)
    assert (trace.torn_bytes, trace.damaged) == (0, ())
    missing = [seq for _, gap in trace.gaps for seq in range(gap.seq, gap.seq + gap.missing)]
    numbers = [each.seq for each in trace.records]
    assert sorted(numbers + missing) == list(range(written))
    assert numbers == sorted(numbers)
    assert len(missing) == lost[-1] > lost[0] > 0
    # A gap stands before the first record after it, and says when it was.
    after = {line + 1: gap for line, gap in trace.gaps}
    assert {line: each.seq for line, each in trace.located() if line in after} == {
        line: gap.seq + gap.missing for line, gap in after.items() if line not in {at for at, _ in trace.gaps}
    }
    assert all((gap.wall, gap.until_wall) == (gap.seq, gap.seq + gap.missing - 1) for _, gap in trace.gaps)
    assert ended.stderr.count("is interrupted") == ended.stderr.count("goes on in") == 3
    assert not read_processes(tmp_path)[0].is_whole


def test_where_a_cut_line_cannot_be_taken_back_the_trace_goes_on_in_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(FileIO):
        def write(self, data: Any) -> int:
            return super().write(data if data.startswith(HEADER_START) else data[:-5]) or 0

    def refused(descriptor: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    sink = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(trace_log, "_create", lambda path: Short(path, "x"))
        patch.setattr(os, "ftruncate", refused)
        sink.write(record(seq=0), record(seq=1))
    assert sink.lost == 1
    sink._retry_at = 0.0
    sink.write(record(seq=2))
    (process,) = read_processes(tmp_path)
    assert [[each.seq for each in file.records] for file in process.files] == [[0], [2]]
    assert [len(file.gaps) for file in process.files] == [0, 1]
    assert process.files[0].torn_bytes > 0


def test_a_trace_goes_on_when_its_directory_is_back(tmp_path: Path, errors: list[str]) -> None:
    directory = tmp_path / "traces"
    sink = opened(directory, file_bytes=1 << 10)
    shutil.rmtree(directory)
    sink.write(record(seq=0))
    assert "No such file" in (sink.interrupted or "")
    sink._retry_at = 0.0
    sink.write(record(seq=1))
    directory.mkdir()
    sink._retry_at = 0.0
    sink.write()
    assert sink.interrupted is None
    sink.write(record(seq=2))
    assert len(errors) == 2  # that it is interrupted, and that it goes on
    assert [each.seq for each in read_trace(directory)] == [2]
    ((_, gap),) = read_processes(directory)[0].files[0].gaps
    assert (gap.seq, gap.missing) == (0, 2)


def test_attempts_leave_no_files_and_delete_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a disk that stays full."""
    sink = opened(tmp_path, file_bytes=1, files_kept=3)
    for seq in range(3):
        sink.write(record(seq=seq))
    before = sorted(tmp_path.iterdir())

    class Full(FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(trace_log, "_create", lambda path: Full(path, "x"))
        for _ in range(20):
            sink._retry_at = 0.0
            sink.write(record(seq=3))
    assert sorted(tmp_path.iterdir()) == before
    sink._retry_at = 0.0
    sink.write(record(seq=23))
    assert [each.seq for each in read_trace(tmp_path)] == [1, 2, 23]


def test_records_that_are_written_together_go_to_the_system_in_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves all of them or none, and so many cost little more than one."""
    written: list[bytes] = []

    class Watched(FileIO):
        def write(self, data: Any) -> int | None:
            written.append(bytes(data))
            return super().write(data)

    monkeypatch.setattr(trace_log, "_create", lambda path: Watched(path, "x"))
    records = [record(seq=seq, subject=text) for seq, text in enumerate(("plain", "lone \ud800", "ü"))]
    sink = opened(tmp_path)
    sink.write(*records[:1], *records[2:])
    sink.write(*records)
    sink.close()
    assert len(written) == 3  # the header first
    assert [line.count(b"\n") for line in written] == [1, 2, 3]
    found = [each.subject for each in read_trace_file(sink.path).records]
    assert found == ["plain", "ü", "plain", "lone \\ud800", "ü"]


def test_after_close_records_are_dropped(tmp_path: Path, errors: list[str]) -> None:
    sink = opened(tmp_path)
    sink.write(FULL)
    sink.close()
    sink.close()
    sink.write(FULL)
    assert read_trace(tmp_path) == [FULL]
    assert errors == []


def test_a_close_in_the_middle_of_a_write_is_quiet(tmp_path: Path, errors: list[str]) -> None:
    """The engine thread closes when the actors did not stop in time: the file may go between two steps of a write."""
    sink = opened(tmp_path)

    class ClosesMeanwhile:
        def msg(self, line: bytes) -> None:
            sink.close()
            sink._files.write(line)

    sink._log = ClosesMeanwhile()  # type: ignore[assignment]
    sink.write(FULL)
    assert errors == []


def test_the_application_s_structlog_configuration_is_left_alone(tmp_path: Path) -> None:
    def refuse(logger: object, method_name: str, event_dict: dict[str, Any]) -> dict[str, Any]:
        raise structlog.DropEvent

    assert not structlog.is_configured()
    structlog.configure(processors=[refuse])
    try:
        sink = opened(tmp_path)
        sink.write(FULL)
        sink.close()
        assert structlog.get_config()["processors"] == [refuse]
    finally:
        structlog.reset_defaults()
    assert read_trace(tmp_path) == [FULL]


@on_any_machine
@given(
    subject=st.text(st.characters() | st.sampled_from("\ud800\n\r\x00")),
    detail=st.none() | st.text(st.characters()),
    seconds=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_record_is_one_line_that_decodes(subject: str, detail: str | None, seconds: float | None) -> None:
    original = record(subject=subject, detail=detail, seconds_in_from=seconds)
    line = render_line(original)
    assert b"\n" not in line
    decoded = msgspec.json.decode(line, type=TransitionRecord)
    expected = subject.encode("utf-8", "backslashreplace").decode()
    assert decoded.subject == expected
    assert decoded.seconds_in_from == seconds


# --- what is left after a process has been killed -------------------------------------------------------------------

_WRITES_AND_IS_KILLED = """
import os, signal, sys
from connector.observe.trace_log import open_trace_log
from statemachine.trace import TransitionRecord
sink = open_trace_log(sys.argv[1], engine_id="killed", role="kv_both", rank=0)
for seq in range(int(sys.argv[2])):
    sink.write(TransitionRecord(seq=seq, wall=float(seq), mono_ns=seq, engine_id="killed", rank=0, role="kv_both",
                                machine="lease", subject="x", from_state=None, event="Created", to_state="computing"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_has_lost_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WRITES_AND_IS_KILLED, str(tmp_path), "100"]
    child = subprocess.run(command, timeout=250, cwd=Path(__file__).parents[2], check=False)
    assert child.returncode == -signal.SIGKILL
    assert [r.seq for r in read_trace(tmp_path)] == list(range(100))


def test_a_torn_last_line_is_left_out_and_counted(tmp_path: Path, errors: list[str]) -> None:
    whole = render_line(FULL)
    (tmp_path / "a.jsonl").write_bytes(whole + b"\n" + whole[:100])
    (tmp_path / "b.jsonl").write_bytes(render_line(record(seq=8)) + b"\n")
    assert read_trace_file(tmp_path / "a.jsonl").torn_bytes == 100
    assert read_trace_file(tmp_path / "b.jsonl").torn_bytes == 0
    assert read_trace(tmp_path) == [FULL, record(seq=8)]
    assert len(errors) == 1
    assert "1 trace file(s)" in errors[0]


@pytest.mark.parametrize("bad", [b"{}", b"", b"\xff", b"[" * 100_000, b'{"seq": "1"}'])
def test_a_whole_line_that_is_no_record_is_left_out_and_named(tmp_path: Path, bad: bytes, errors: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    second = record(seq=8)
    path.write_bytes(b"\n".join([render_line(FULL), bad, render_line(second), bad, b""]))
    assert read_trace(tmp_path) == [FULL, second] == read_trace_about(tmp_path, FULL.subject)
    assert len(errors) == (1 if bad.startswith(b'{"seq"') else 2)  # one that looks like a line, who decodes all finds
    for said in errors:
        assert said.startswith(f"left out 2 damaged line(s) of {path}: the first is line 2: ")
    file = read_trace_file(path)
    assert [line for line, _ in file.located()] == [1, 3]
    assert file.holes == [2, 4]
    verdict = check(read_processes(tmp_path))
    assert [finding.line for finding in verdict.findings if finding.record is None] == [2, 4]
    assert str(verdict.findings[0]).startswith(f"{path}:2: this line is damaged: ")


@pytest.mark.parametrize("bad", [b"{}", b"", b"\xff", b"nonsense"])
def test_a_file_that_has_no_record_is_refused(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(bad + b"\n")
    with pytest.raises(TraceFileError, match="line 1") as caught:
        read_trace(tmp_path)
    assert caught.value.path == path


def test_processes_are_merged_by_time_then_number(tmp_path: Path) -> None:
    first, second = opened(tmp_path, "a"), opened(tmp_path, "b")
    for seq, wall in enumerate((1.0, 3.0, 3.0)):
        first.write(record(engine_id="a", seq=seq, wall=wall))
    for seq, wall in enumerate((2.0, 3.0, 4.0)):
        second.write(record(engine_id="b", seq=seq, wall=wall))
    first.close()
    second.close()
    (tmp_path / "notes.txt").write_text("not a trace")
    assert [(r.wall, r.seq, r.engine_id) for r in read_trace(tmp_path)] == [
        (1.0, 0, "a"),
        (2.0, 0, "b"),
        (3.0, 1, "a"),
        (3.0, 1, "b"),
        (3.0, 2, "a"),
        (4.0, 2, "b"),
    ]


def test_a_wall_clock_that_is_set_back_does_not_disturb_the_order_of_one_process(tmp_path: Path) -> None:
    traced(tmp_path, [record(seq=seq, wall=wall) for seq, wall in enumerate((10.0, 5.0, 6.0))])
    traced(tmp_path, [record(engine_id="b", wall=11.0)], engine_id="b")
    assert [(r.engine_id, r.wall) for r in read_trace(tmp_path)] == [
        ("decode-1", 10.0),
        ("decode-1", 5.0),
        ("decode-1", 6.0),
        ("b", 11.0),
    ]


# --- size, sampling and versions ------------------------------------------------------------------------------------


def test_files_follow_each_other_and_the_oldest_go(tmp_path: Path) -> None:
    total, bound, kept = 400, 20_000, 3
    sink = opened(tmp_path, file_bytes=bound, files_kept=kept)
    for seq in range(total):
        sink.write(record(seq=seq))
        assert len(list(tmp_path.iterdir())) <= kept
    sink.close()
    line_bytes = len(render_line(record(seq=total))) + 1
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == kept
    assert max(sizes) < bound + line_bytes
    (process,) = read_processes(tmp_path)
    first = total - len(process.records)
    assert first > 0
    assert [each.seq for each in process.records] == list(range(first, total))
    parts = [file.header.part for file in process.files if file.header is not None]
    assert parts == list(range(parts[0], parts[0] + kept))
    assert not process.is_whole


def test_more_than_nine_files_stay_in_order(tmp_path: Path) -> None:
    traced(tmp_path, [record(seq=seq) for seq in range(60)], file_bytes=2000, files_kept=100)
    (process,) = read_processes(tmp_path)
    assert len(process.files) > 10
    assert [each.seq for each in process.records] == list(range(60))
    assert process.is_whole


def test_a_process_of_the_same_name_does_not_continue_the_sequence(tmp_path: Path) -> None:
    for life in range(2):
        lines = [record(seq=seq, mono_ns=1000 * life + seq) for seq in range(20)]
        traced(tmp_path, lines, file_bytes=2000, files_kept=100)
    assert [[each.seq for each in process.records] for process in read_processes(tmp_path)] == [list(range(20))] * 2


def test_a_process_of_the_same_name_takes_no_place_in_a_sequence_whose_first_files_are_gone(
    tmp_path: Path, errors: list[str]
) -> None:
    """The next files of that sequence would be in its way."""
    kept = 3
    for life in range(2):
        lines = [record(seq=seq, mono_ns=1000 * life + seq) for seq in range(60)]
        traced(tmp_path, lines, file_bytes=2000, files_kept=kept)
    assert errors == []
    lasts = [[each.seq for each in process.records][-1] for process in read_processes(tmp_path)]
    assert lasts == [59, 59]
    assert len(list(tmp_path.iterdir())) == 2 * kept


def test_a_file_that_somebody_has_deleted_is_not_missed(tmp_path: Path, errors: list[str]) -> None:
    sink = opened(tmp_path, file_bytes=2000, files_kept=2)
    for seq in range(40):
        sink.write(record(seq=seq))
        for path in tmp_path.iterdir():
            if path != sink.path:
                path.unlink()
    sink.close()
    assert errors == []
    assert read_trace(tmp_path)[-1].seq == 39


def test_a_trace_goes_on_in_the_next_file_when_somebody_deletes_the_one_that_is_written(
    tmp_path: Path, errors: list[str]
) -> None:
    """As what tidies old files up does with that of an engine that nobody has asked for anything in a week."""
    sink = opened(tmp_path)
    sink.write(record(seq=0))
    sink.path.unlink()
    sink.write(record(seq=1))
    sink.write(record(seq=2))
    sink.close()
    assert errors == []
    (process,) = read_processes(tmp_path)
    assert [each.seq for each in process.records] == [1, 2]
    assert [file.header.part for file in process.files if file.header is not None] == [1]


def test_the_log_says_when_the_directory_of_the_trace_is_deleted(tmp_path: Path, errors: list[str]) -> None:
    directory = tmp_path / "traces"
    sink = opened(directory)
    sink.write(record(seq=0))
    shutil.rmtree(directory)
    sink.write(record(seq=1))
    assert "No such file" in (sink.interrupted or "")
    assert len(errors) == 1


def test_the_same_requests_are_sampled_on_both_sides_and_each_as_a_whole(tmp_path: Path) -> None:
    share, names = 0.3, [f"cmpl-{number}-p" for number in range(500)]
    p, d = opened(tmp_path, "p-engine", sample=share), opened(tmp_path, "d-engine", sample=share)
    for name in names:
        for state in ("computing", "held", "done"):
            p.write(record(machine="lease", subject=name, to_state=state, remote_request_id=None))
        for machine in ("request", "hold"):
            d.write(record(machine=machine, subject=f"{name}/0", remote_request_id=name))
    d.write(record(machine="peer", subject="p", remote_request_id=None))
    p.close()
    d.close()
    d_records, p_records = (process.records for process in read_processes(tmp_path))
    chosen = {name for name in names if is_sampled(name, share)}
    assert 0.2 * len(names) < len(chosen) < 0.4 * len(names)
    assert Counter(each.subject for each in p_records) == dict.fromkeys(chosen, 3)
    assert Counter(each.remote_request_id for each in d_records) == dict.fromkeys(chosen, 2) | {None: 1}
    assert not any(process.is_whole for process in read_processes(tmp_path))


def test_a_share_of_nothing_or_of_all() -> None:
    names = [f"r-{number}" for number in range(100)]
    assert not any(is_sampled(name, 0.0) for name in names)
    assert all(is_sampled(name, 1.0) for name in names)


def test_a_later_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"schema":99,"version":"7.1.0","other":[1]}\n{"anything":1}\n')
    with pytest.raises(TraceSchemaError, match=r"schema 99.*version 7\.1\.0") as caught:
        read_trace(tmp_path)
    assert caught.value.path == path


@pytest.mark.parametrize("bad", [b'{"schema":1}', b'{"schema":"one"}', b'{"schema":'])
def test_a_damaged_header_is_named(tmp_path: Path, bad: bytes, errors: list[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(bad + b"\n" + render_line(FULL) + b"\n")
    assert read_trace(tmp_path) == [FULL]
    assert "the first is line 1: " in errors[0]
    (process,) = read_processes(tmp_path)
    assert not process.is_whole


def test_fields_of_a_version_to_come_are_skipped_and_those_it_lacks_are_null(tmp_path: Path) -> None:
    fields = msgspec.to_builtins(FULL) | {"of_the_future": 1}
    del fields["age_seconds"]
    (tmp_path / "a.jsonl").write_bytes(msgspec.json.encode(fields) + b"\n")
    assert read_trace(tmp_path) == [record(age_seconds=None)]


def test_an_excerpt_without_a_header_is_read(tmp_path: Path) -> None:
    traced(tmp_path, [FULL, record(seq=8)])
    (path,) = tmp_path.iterdir()
    excerpt = tmp_path / "excerpt.jsonl"
    excerpt.write_bytes(b"".join(path.read_bytes().splitlines(True)[1:]))
    (process,) = read_processes(excerpt)
    assert process.header is None
    assert process.records == [FULL, record(seq=8)]
    assert [number for number, _ in process.files[0].located()] == [1, 2]


def test_an_empty_directory_is_an_empty_trace(tmp_path: Path) -> None:
    assert read_trace(tmp_path) == []


# --- reading about some requests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ids on P that say nothing of those on D, some of which JSON writes otherwise."""
    directory = tmp_path_factory.mktemp("faulty")
    write_run(directory, map(_renamed, faulty_run()))
    return directory


def _renamed(found: TransitionRecord) -> TransitionRecord:
    names: dict[str, Any] = {}
    if found.remote_request_id is not None:
        names["remote_request_id"] = _on_p(found.remote_request_id)
    if found.machine == "lease":
        names["subject"] = _on_p(found.subject)
    elif found.machine == "hold":
        name, _, rank = found.subject.rpartition("/")
        names["subject"] = f"{_on_p(name)}/{rank}"
    elif found.machine == "request":
        names["subject"] = f'"ü\\{found.subject}\x1b'
    return msgspec.structs.replace(found, **names)


def _on_p(name: str) -> str:
    return f"lent-{zlib.crc32(name.encode())}"


def test_what_is_read_about_a_request_explains_it_as_everything_does(faulty: Path) -> None:
    everything = read_trace(faulty)
    names = {each for story in stories(histories(everything)) for each in story.names}
    sought = [*sorted(names)[::7], "ü", 'r1"', "r2", "lent-1", "", "nobody", "p0", "\udc80"]
    matched = 0
    for text in sought:
        chosen = read_trace_about(faulty, text)
        explained = [explain(case, Live()) for case in find(text, chosen, Live())]
        assert explained == [explain(case, Live()) for case in find(text, everything, Live())], text
        matched += len(explained)
    assert matched > 200
    assert len(read_trace_about(faulty, min(names))) < len(everything) / 3


def test_a_trace_that_a_tool_has_written_anew_is_read_as_a_whole(faulty: Path, tmp_path: Path) -> None:
    for path in faulty.iterdir():
        anew = (json.dumps(json.loads(line)) + "\n" for line in path.read_text().splitlines())
        (tmp_path / path.name).write_text("".join(anew))
    for text in ("ü", "r2", "nobody"):
        explained = [
            [explain(case, Live()) for case in find(text, read_trace_about(directory, text), Live())]
            for directory in (faulty, tmp_path)
        ]
        assert explained[0] == explained[1]


def test_of_lines_about_a_request_the_damaged_one_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    second = record(seq=8)
    # The last one looks as it was written, so it is found because it names the request.
    lines = [render_line(FULL), b"nonsense", render_line(second), b'{"seq":"' + FULL.subject.encode() + b'"}']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([*lines[:3], b"torn"]))
    with caplog.at_level(logging.WARNING):
        assert read_trace_about(tmp_path, FULL.subject) == [FULL, second]
    assert len([each for each in caplog.messages if "unfinished last line of 1" in each]) == 1
    assert len([each for each in caplog.messages if "1 damaged line(s)" in each and "line 2" in each]) == 1
    path.write_bytes(b"\n".join([lines[0], *lines[2:], b""]))
    with caplog.at_level(logging.WARNING):
        assert read_trace_about(tmp_path, FULL.subject) == [FULL, second]
    assert len([each for each in caplog.messages if "1 damaged line(s)" in each and "line 3" in each]) == 1
    path.write_bytes(b"nonsense\n")
    with pytest.raises(TraceFileError, match="line 1"):
        read_trace_about(tmp_path, "x")
    path.write_bytes(b'{"schema":99,"version":"7.1.0"}\n')
    with pytest.raises(TraceSchemaError):
        read_trace_about(tmp_path, "x")
    path.write_bytes(b"")
    assert read_trace_about(tmp_path, "x") == []
