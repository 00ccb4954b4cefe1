"""Lines for people: what they say, that a burst is shortened, and that nothing from outside gets through raw."""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.clock import BootClock
from connector.observe import log
from connector.observe.advice import WHAT_TO_DO, advice_of
from connector.observe.event_log import EventLog, FailureLog, describe_wait
from connector.observe.log import (
    CAUSES_COUNTED_MAX,
    LINES_PER_CAUSE,
    LINES_PER_WINDOW,
    QUIET_SECONDS,
    STRANGERS_COUNTED_MAX,
    WINDOW_SECONDS,
    StrangerLog,
    get_logger,
    log_crash,
)
from connector.runtime.recorder import Recorder
from statemachine import lending, peer, remote_engine, request
from statemachine.failures import (
    AbortedByClient,
    ActorCrashed,
    BadParams,
    ConnectionRefused,
    DeadlineExceeded,
    Failure,
    HandshakeTimeout,
    Incompatible,
)
from statemachine.kernel import Event
from statemachine.lease import LeaseName
from statemachine.remote_engine.views import waits_for
from tests.unit.log_lines import Lines, listening
from tests.unit.properties import on_any_machine
from tests.unit.test_failures import EXAMPLES

TIMEOUT = DeadlineExceeded(timeout_seconds=120.0, phase="reading")


@pytest.fixture
def lines() -> Iterator[Lines]:
    with listening() as lines:
        yield lines


class Seconds:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


_AS_IN_AN_ENGINE = """
import logging
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from connector.observe.log import get_logger, log_crash
configure_logging(LoggingConfig(log_level="INFO"))
get_logger().info("ours at level info")
logging.getLogger("connector.elsewhere").info("not below vllm")
try:
    raise ValueError("ours with a traceback")
except ValueError as error:
    log_crash("actor", error)
"""

_WITHOUT_A_TERMINAL = """
import io, logging, os, sys
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from connector.observe.event_log import FailureLog
from connector.observe.log import get_logger, log_crash
from statemachine.failures import AbortedByClient, DeadlineExceeded
said = os.dup(1)
configure_logging(LoggingConfig(log_level="INFO"))
{close}
for _ in range(20):
    get_logger().critical("a line that is longer than nothing, and flushed")
    FailureLog("decode-1", 0)("request cmpl-7", DeadlineExceeded(timeout_seconds=1.0, phase="reading"))
    log_crash("actor", ValueError())
os.write(said, b"still here")
os._exit(0)
"""

_NOBODY_CAN_BE_TOLD = {
    "the streams are closed": "sys.stdout.close(); sys.stderr.close()",
    "their files are closed": "os.close(1); os.close(2)",
    "nobody reads the pipe": "r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2)",
    "the disk is full": "full = os.open('/dev/full', os.O_WRONLY); os.dup2(full, 1); os.dup2(full, 2)",
}

_EACH_IN_A_CHILD = """
import json, os, sys, tempfile, traceback
import vllm.config.logging, vllm.logger  # seconds, once for all

def run(program):
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                exec(program, {})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return status, said.read().decode()

print(json.dumps({name: run(program) for name, program in json.load(sys.stdin).items()}))
"""


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str]]:
    """The exit status and what was said of each program.

    Each runs in a process of its own, because setting logging up is not undone, and forked, because importing vLLM
    takes seconds.
    """
    programs = {name: _WITHOUT_A_TERMINAL.format(close=close) for name, close in _NOBODY_CAN_BE_TOLD.items()}
    programs["as in an engine"] = _AS_IN_AN_ENGINE
    output = subprocess.run(
        [sys.executable, "-c", _EACH_IN_A_CHILD],
        cwd=Path(__file__).parents[2],
        input=json.dumps(programs),
        check=True,
        timeout=250,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    answers: dict[str, tuple[int, str]] = json.loads(output.splitlines()[-1])
    return answers


def test_lines_reach_the_handler_that_vllm_sets_up(ended: dict[str, tuple[int, str]]) -> None:
    status, output = ended["as in an engine"]
    assert status == 0
    assert re.search(r"INFO .* ours at level info$", output, re.MULTILINE)
    assert "not below vllm" not in output
    # vLLM puts its prefix before every line of an entry, ours is a bar.
    assert re.search(r"ERROR .*  \| ValueError: ours with a traceback$", output, re.MULTILINE)


@pytest.mark.parametrize("why", _NOBODY_CAN_BE_TOLD)
def test_logging_raises_nothing_when_nobody_can_be_told(ended: dict[str, tuple[int, str]], why: str) -> None:
    """Standard output and standard error end in the middle."""
    status, output = ended[why]
    assert status == 0
    assert output.endswith("still here")


def test_a_line_names_kind_subject_and_writer_and_says_why(lines: Lines) -> None:
    FailureLog("decode-1", 3)("request cmpl-7", TIMEOUT)
    (text,) = lines.texts
    advice = WHAT_TO_DO["DeadlineExceeded"]
    assert text == f"DeadlineExceeded: request cmpl-7: {TIMEOUT}; what to do: {advice} [decode-1 rank 3]"
    assert lines.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("failure", EXAMPLES, ids=lambda failure: failure.kind)
def test_a_line_says_what_to_do_once_at_its_end(lines: Lines, failure: Failure) -> None:
    get_logger().setLevel(logging.DEBUG)  # an abort is said there
    FailureLog("decode-1", 3)("request cmpl-7", failure)
    (text,) = lines.texts
    advice = advice_of(failure)
    assert text.endswith(f"; what to do: {advice} [decode-1 rank 3]")
    assert (text.count(advice), text.count("what to do")) == (1, 1)
    assert text.isprintable()


def test_the_longest_sentence_does_not_cut_off_what_to_do(lines: Lines) -> None:
    FailureLog("decode-1", 0)("r", BadParams(field="f", expected="e", found="x" * 1_000_000))
    told = Told()
    told.want()
    longest = HandshakeTimeout(peer="prefill-1", address="h:1", timeout_seconds=5, detail="x" * 1_000_000)
    told.feed(remote_engine.ConnectFailed(failure=longest))
    unlike = Incompatible(peer="prefill-1", field="model", local="x" * 1_000_000, remote="y", advice="start it alike")
    FailureLog("decode-1", 0)("r", unlike)
    advices = (WHAT_TO_DO["BadParams"], WHAT_TO_DO["HandshakeTimeout"], "start it alike")
    for text, advice in zip(lines.texts, advices, strict=True):
        assert f"...; what to do: {advice} [decode-1 rank 0]" in text


class Broken(logging.Handler):
    """Somebody else's, for instance one whose pipe is closed."""

    def emit(self, record: logging.LogRecord) -> None:
        raise BrokenPipeError("nobody reads what is logged")


def test_a_handler_that_raises_costs_nobody_but_its_reader(lines: Lines) -> None:
    broken = Broken()
    get_logger().logger.addHandler(broken)
    try:
        get_logger().warning("a line")
        get_logger().log(logging.WARNING, "a line")
        FailureLog("decode-1", 0)("cmpl-7", TIMEOUT)
        log_crash("actor", ValueError())
    finally:
        get_logger().logger.removeHandler(broken)
    assert len(lines.records) == 4


def test_a_line_is_said_to_come_from_where_it_was_written(lines: Lines) -> None:
    get_logger().info("here")
    get_logger().log(logging.INFO, "and here")
    assert [record.filename for record in lines.records] == [Path(__file__).name] * 2


def test_the_limit_of_the_quarantine_is_said_with_what_follows_and_so_is_its_end(lines: Lines) -> None:
    events = EventLog("decode-1", 0, clock=BootClock(), log_failure=FailureLog("decode-1", 0))
    events.quarantine(513, 512, is_full=True)
    events.quarantine(500, 512, is_full=False)
    full, over = lines.texts
    what_to_do = "; what to do: nixl-actor ps names the engines whose READs do not end"
    for word in ("513 KV blocks", "512", "quarantine_limit", "QuarantineFull", what_to_do, "[decode-1 rank 0]"):
        assert word in full
    assert "500 are left" in over
    assert [record.levelno for record in lines.records] == [logging.WARNING] * 2


@pytest.mark.parametrize(
    "request_id",
    [
        "cmpl-abc-0-d",
        "cmpl-___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_93923d63113b4b338973f24d19d4bf11-0-d",
        "x" * 500,
        "it's $(touch b); `c`",
        "\x1b[31mred",
    ],
)
def test_the_command_that_a_waiting_request_names_finds_it_and_nothing_else_is_run(
    lines: Lines, request_id: str
) -> None:
    events = EventLog("decode-1", 0, clock=BootClock(), log_failure=FailureLog("decode-1", 0))
    events.queued("request r", request_id)
    (text,) = lines.texts
    command, *arguments = shlex.split(text.partition("; what to do: ")[2].removesuffix(" [decode-1 rank 0]"))
    assert (command, arguments[0], len(arguments)) == ("nixl-actor", "why", 2)
    assert arguments[1] in request_id
    assert len(arguments[1]) > 3


def test_a_stranger_that_goes_on_has_a_line_for_each_power_of_two(lines: Lines) -> None:
    clock = Seconds()
    log = StrangerLog("side channel", now=clock)
    for _ in range(2000):
        log("10.0.0.9", "10.0.0.9 may not connect: no key")
        clock.now += 1
    assert [text.rpartition(" ")[2] for text in lines.texts] == [f"{1 << power})" for power in range(11)]
    assert lines.texts[0] == "side channel: 10.0.0.9 may not connect: no key (10.0.0.9, number 1)"


def test_a_stranger_keeps_nobody_else_out_of_the_log(lines: Lines) -> None:
    """Neither one that has knocked for long, nor many at once."""
    clock = Seconds()
    log = StrangerLog("side channel", now=clock)
    for _ in range(5000):
        log("10.0.0.9", "scans ports")
        clock.now += 1
    lines.records.clear()
    log("10.20.0.7", "its key is not accepted")
    assert [text.startswith("side channel: its key is not accepted") for text in lines.texts] == [True]

    lines.records.clear()
    clock.now += WINDOW_SECONDS
    for number in range(10 * STRANGERS_COUNTED_MAX):
        log(f"fd00::{number:x}", "scans ports")
    assert LINES_PER_WINDOW // 2 < len(lines.texts) <= LINES_PER_WINDOW + CAUSES_COUNTED_MAX + 2


def test_a_stranger_that_was_quiet_is_counted_from_one_again(lines: Lines) -> None:
    clock = Seconds()
    log = StrangerLog("side channel", now=clock)
    for _ in range(3):
        log("10.0.0.9", "no key")
    clock.now += QUIET_SECONDS + 1
    lines.records.clear()
    log("10.0.0.9", "no key")
    assert lines.texts == ["side channel: no key (10.0.0.9, number 1)"]


def test_an_abort_is_a_debug_line_only(lines: Lines) -> None:
    failure_log = FailureLog("decode-1", 0)
    failure_log("cmpl-7", AbortedByClient())
    assert lines.texts == []
    get_logger().setLevel(logging.DEBUG)
    failure_log("cmpl-7", AbortedByClient())
    assert [record.levelno for record in lines.records] == [logging.DEBUG]


def refused(engine: int) -> Failure:
    return ConnectionRefused(peer=f"prefill-{engine}", address="h:1")


def test_a_burst_of_one_cause_is_shortened_and_counted(lines: Lines) -> None:
    clock = Seconds()
    failure_log = FailureLog("decode-1", 0, now=clock)
    for number in range(1000):
        failure_log(f"cmpl-{number}", refused(1))
    # Those that fit, and one line that says that the silence which follows is not a recovery.
    assert len(lines.texts) == LINES_PER_CAUSE + 1
    assert lines.texts[-1].startswith("ConnectionRefused of engine prefill-1: further lines are only counted")

    clock.now += WINDOW_SECONDS
    lines.records.clear()
    failure_log("cmpl-after", refused(1))
    said, after = lines.texts
    assert said.startswith("995 more lines were left out: ConnectionRefused of engine prefill-1 995")
    assert "cmpl-after" in after

    # Said once.
    clock.now += WINDOW_SECONDS
    lines.records.clear()
    failure_log("cmpl-later", refused(1))
    assert len(lines.texts) == 1


def test_a_burst_that_is_counted_long_afterwards_is_not_taken_for_one_of_now(lines: Lines) -> None:
    """Nothing is written before the next line, which may come the next day."""
    clock = Seconds()
    failure_log = FailureLog("decode-1", 0, now=clock)
    for number in range(10):
        failure_log(f"cmpl-{number}", refused(1))
    clock.now += 753
    failure_log("cmpl-after", refused(1))
    assert (
        "5 more lines were left out: ConnectionRefused of engine prefill-1 5; the last one 753 s ago" in lines.texts[-2]
    )


def test_a_burst_leaves_room_for_what_fails_otherwise(lines: Lines) -> None:
    failure_log = FailureLog("decode-1", 0, now=Seconds())
    for number in range(1000):
        failure_log(f"cmpl-{number}", refused(1))
    lines.records.clear()
    failure_log("cmpl-x", TIMEOUT)
    failure_log("cmpl-y", refused(2))
    assert [text.split(":")[0] for text in lines.texts] == ["DeadlineExceeded", "ConnectionRefused"]


@pytest.mark.parametrize("is_in_turns", [True, False], ids=["in turns", "one after another"])
def test_many_causes_are_bounded_together(lines: Lines, is_in_turns: bool) -> None:
    """Whether each of them has a line or two, or the first ones have taken all that there are."""
    clock = Seconds()
    failure_log = FailureLog("decode-1", 0, now=clock)
    for number in range(50_000):
        engine = number % 50 if is_in_turns else number // 1000
        failure_log(f"cmpl-{number}", refused(engine))
    first = len(lines.texts)
    assert LINES_PER_WINDOW < first <= LINES_PER_WINDOW + CAUSES_COUNTED_MAX + 1
    clock.now += WINDOW_SECONDS
    failure_log("cmpl-after", TIMEOUT)
    counted = lines.texts[first]
    assert counted.startswith(f"{50_000 - LINES_PER_WINDOW} more lines were left out")
    assert "other causes" in counted
    assert len(counted) < 3000


def test_a_new_window_has_its_lines_again(lines: Lines) -> None:
    clock = Seconds()
    failure_log = FailureLog("decode-1", 0, now=clock)
    for _ in range(3):
        for number in range(LINES_PER_CAUSE):
            failure_log(f"cmpl-{number}", TIMEOUT)
        clock.now += WINDOW_SECONDS
    assert len(lines.texts) == 3 * LINES_PER_CAUSE
    assert not any("left out" in text for text in lines.texts)


def test_aborts_take_no_other_failure_s_place(lines: Lines) -> None:
    failure_log = FailureLog("decode-1", 0, now=Seconds())
    for number in range(10 * LINES_PER_WINDOW):
        failure_log(f"cmpl-{number}", AbortedByClient())
    failure_log("cmpl-x", TIMEOUT)
    assert len(lines.texts) == 1


HOSTILE = "\x1b[2Jok\r\nERROR forged\x00\x9b31m\u202e\ud800"


@pytest.mark.parametrize(
    "failure",
    [
        BadParams(field="remote_port", expected="an integer", found=HOSTILE),
        ActorCrashed(actor=HOSTILE, error=HOSTILE),
    ],
    ids=lambda failure: failure.kind,
)
def test_control_characters_are_escaped(lines: Lines, failure: Failure) -> None:
    FailureLog(HOSTILE, 0)(HOSTILE, failure)
    (text,) = lines.texts
    assert text.isprintable()
    assert "\\x1b[2Jok\\r\\nERROR forged" in text


def test_lines_are_bounded(lines: Lines) -> None:
    FailureLog("e" * 100_000, 0)("s" * 100_000, BadParams(field="f", expected="e", found="x" * 1_000_000))
    assert len(lines.texts[0]) < 2000


def _raise_from_depth(depth: int, text: str) -> None:
    if depth:
        _raise_from_depth(depth - 1, text)
    else:
        raise ValueError(text)


def _crash(text: str, depth: int = 0) -> Exception:
    try:
        _raise_from_depth(depth, text)
    except ValueError as error:
        return error
    raise AssertionError


def test_a_crash_is_logged_with_its_traceback(lines: Lines) -> None:
    log_crash("peer actor of prefill-7", _crash("no such block"))
    (text,) = lines.texts
    assert text.startswith("peer actor of prefill-7 crashed")
    assert "_raise_from_depth" in text
    assert text.endswith("ValueError: no such block")
    assert lines.records[0].levelno == logging.ERROR


def test_a_crash_of_several_tasks_shows_each(lines: Lines) -> None:
    log_crash("supervisor", ExceptionGroup("two", [_crash("first"), _crash("second")]))
    assert "ValueError: first" in lines.texts[0]
    assert "ValueError: second" in lines.texts[0]


def test_the_root_cause_is_what_was_raised_first() -> None:
    first = ValueError("first")
    wrapped = RuntimeError("internal error")
    wrapped.__cause__ = ExceptionGroup("nursery", [ExceptionGroup("nursery", [first, KeyError("second")])])
    assert log.root_cause(wrapped) is first
    assert log.root_cause(first) is first


@on_any_machine
@given(text=st.text())
def test_no_text_in_an_exception_can_pass_for_a_log_line(text: str) -> None:
    handler = Lines()
    get_logger().logger.addHandler(handler)
    try:
        log_crash(f"actor {text}", _crash(text))
    finally:
        get_logger().logger.removeHandler(handler)
    first, *others = handler.texts[0].split("\n")
    assert first.startswith("actor ")
    assert all(line.startswith("  | ") for line in others)
    assert all(line.isprintable() for line in (first, *others))


def test_a_long_traceback_keeps_its_start_and_its_end(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "TRACEBACK_LINES_AT_START", 3)
    monkeypatch.setattr(log, "TRACEBACK_LINES_AT_END", 4)
    log_crash("actor", _crash("\n".join(f"line {number}" for number in range(1000)) + "x" * 10_000))
    shown = lines.texts[0].split("\n")
    assert len(shown) == 1 + 3 + 1 + 4
    assert shown[1] == "  | Traceback (most recent call last):"
    assert "lines left out" in shown[4]
    assert shown[-1].startswith("  | line 999x")
    assert len(shown[-1]) < 600


# --- peers and leases, as the cores tell of them ----------------------------------------------------------------------

SECOND = 1_000_000_000
LEASE = LeaseName("cmpl-p", 7)


class CoreClock:
    """Of cores and their log."""

    def __init__(self) -> None:
        self.ns = 1000 * SECOND

    def now_ns(self) -> int:
        return self.ns

    def wall(self) -> float:
        raise AssertionError("not for people's lines")


def recorder(clock: CoreClock) -> Recorder:
    return Recorder(engine_id="engine", rank=0, role="kv_both", clock=clock, sink=None)


class Told:
    """A core of a decode rank, and its log."""

    def __init__(self) -> None:
        self.clock = CoreClock()
        self.log = EventLog("decode-1", 0, clock=self.clock, log_failure=FailureLog("decode-1", 0), now=Seconds())
        limits = remote_engine.EngineLimits(
            lease_ns=30 * SECOND,
            margin_ns=SECOND,
            request_ns=120 * SECOND,
            quiesce_ns=30 * SECOND,
            grace_ns=SECOND,
            backoff_first_ns=SECOND,
            backoff_max_ns=30 * SECOND,
            incompatible_ns=60 * SECOND,
            retries=1,
        )
        self.recorder = recorder(self.clock)
        observe = self.recorder.observer("prefill-1", log=self.log.observer_of_peer(lambda: "prefill-1 at h:1 (TP 2)"))
        self.core = remote_engine.RemoteEngine("prefill-1", "h:1", limits, observe=observe)
        self.requests = 0
        self.connections = 0

    def feed(self, event: Event, seconds: float = 0.0) -> None:
        self.clock.ns += round(seconds * SECOND)
        effects = self.core.handle(event, self.clock.ns)
        self.recorder.catch_up()
        for effect in effects:
            if isinstance(effect, remote_engine.TearDown):
                self.feed(remote_engine.TornDown(connection=effect.connection))

    def want(self) -> str:
        self.requests += 1
        name = f"cmpl-{self.requests}"
        self.feed(remote_engine.Started(request_id=name, lease=LeaseName(name, self.requests), address="h:1", age_ns=0))
        return name

    def pass_time(self, seconds: float) -> None:
        self.clock.ns += round(seconds * SECOND)
        self.core.advance(self.clock.ns)
        self.recorder.catch_up()

    def connect(self, seconds: float) -> None:
        self.connections += 1
        connected = remote_engine.Connected(
            connection=self.connections, workers=("PP 0 TP 0",), is_builtin=False, life="a"
        )
        self.feed(connected, seconds)


def test_a_peer_is_connected_lost_and_back(lines: Lines) -> None:
    told = Told()
    told.want()
    told.connect(0.25)
    assert lines.texts == ["engine prefill-1 at h:1 (TP 2) is connected; the handshake took 0.250 s [decode-1 rank 0]"]
    lines.records.clear()
    told.feed(remote_engine.LinkLost(connection=1, detail="reset by peer"))
    (text,) = lines.texts
    assert text.startswith("engine prefill-1 at h:1 (TP 2) is lost: ControlLinkLost: ")
    assert "reset by peer" in text
    lines.records.clear()
    told.want()
    told.feed(remote_engine.ConnectFailed(failure=refused(1)), 0.5)
    # Otherwise than before, which tells more of the cause; and once, however often it is tried.
    for _ in range(3):
        told.pass_time(40)
        told.want()
        told.feed(remote_engine.ConnectFailed(failure=refused(1)))
    (text,) = lines.texts
    assert "cannot be reached: ConnectionRefused" in text
    lines.records.clear()
    told.pass_time(9.5)
    told.want()
    told.connect(0.0)
    assert lines.texts == [
        "engine prefill-1 at h:1 (TP 2) is back after 130.0 s; the handshake took 0.000 s [decode-1 rank 0]"
    ]
    assert {record.levelno for record in lines.records} == {logging.INFO}


def test_a_peer_that_leaves_is_not_said_to_be_lost(lines: Lines) -> None:
    told = Told()
    told.want()
    told.connect(0)
    told.feed(remote_engine.LeavingSaid(connection=1, grace_ns=60 * SECOND))
    lines.records.clear()
    told.feed(remote_engine.LinkLost(connection=1, detail="closed"))
    told.want()
    told.feed(remote_engine.ConnectFailed(failure=refused(1)))
    (text,) = lines.texts
    assert text.startswith("engine prefill-1 at h:1 (TP 2) has ended or sleeps, as it had said")
    told.want()
    told.connect(2.0)
    assert "is back after 2.0 s" in lines.texts[-1]


def test_a_peer_that_was_never_reached(lines: Lines) -> None:
    told = Told()
    told.want()
    told.feed(remote_engine.ConnectFailed(failure=HandshakeTimeout(peer="prefill-1", address="h:1", timeout_seconds=5)))
    (text,) = lines.texts
    assert "cannot be reached: HandshakeTimeout" in text
    assert f"; what to do: {WHAT_TO_DO['HandshakeTimeout']} [" in text


def test_a_peer_that_is_given_up(lines: Lines) -> None:
    told = Told()
    told.want()
    told.connect(0)
    lines.records.clear()
    told.feed(remote_engine.Retire())
    (text,) = lines.texts
    assert "is given up" in text


def test_a_request_that_is_served_says_nothing_more(lines: Lines) -> None:
    told = Told()
    told.want()
    told.connect(0)
    lines.records.clear()
    for _ in range(3):
        told.want()
    told.pass_time(10)
    assert lines.texts == []


class Lender:
    def __init__(self, where: Callable[[str], str] = lambda engine_id: "") -> None:
        self.clock = CoreClock()
        log = EventLog("prefill-1", 0, clock=self.clock, log_failure=FailureLog("prefill-1", 0), now=Seconds())
        limits = lending.LendingLimits(lease_ns=30 * SECOND, total_ns=900 * SECOND)
        self.recorder = recorder(self.clock)
        self.core = lending.Lending(limits, self.recorder.observer(None, log=log.observer_of_lease(where)))

    def feed(self, event: lending.Event) -> None:
        self.core.handle(event, self.clock.ns)
        self.recorder.catch_up()

    def pass_time(self, seconds: float) -> None:
        self.clock.ns += round(seconds * SECOND)
        self.core.advance(self.clock.ns)
        self.recorder.catch_up()


HELD = lending.HoldAsked(reply_to=b"", engine_id="decode-1", rank=0, ranks=2, sent_ns=0, leases=(LEASE,))
RELEASED = lending.ReleaseAsked(reply_to=b"", engine_id="decode-1", rank=0, ranks=2, leases=(LEASE,))


def test_a_lease_that_nobody_asked_for_is_said_when_it_expires(lines: Lines) -> None:
    lender = Lender()
    lender.feed(lending.Granted(lease=LEASE, blocks=4))
    lender.pass_time(30.5)
    (text,) = lines.texts
    assert text.startswith("LeaseExpired: request cmpl-p: 4 block(s) were lent for 30.5 s and not released (no decode")
    assert "kv_transfer_params" in text
    assert lines.records[0].levelno == logging.WARNING


def test_a_lease_that_expires_names_its_holders(lines: Lines) -> None:
    lender = Lender()
    lender.feed(lending.Granted(lease=LEASE, blocks=4))
    lender.pass_time(20)
    lender.feed(HELD)
    lender.feed(RELEASED)
    lender.pass_time(10)
    lender.pass_time(20)
    (text,) = lines.texts
    assert "lent for 50.0 s" in text
    assert "held by decode-1 (1 of 2 ranks are done)" in text
    assert "and renewed until" not in text


def test_a_lease_that_expires_says_from_where_its_holders_were_heard(lines: Lines) -> None:
    """Whoever reads it has to find that engine: another one's log names it by its id alone."""
    lender = Lender({"decode-1": "10.0.3.9"}.__getitem__)
    lender.feed(lending.Granted(lease=LEASE, blocks=4))
    lender.feed(HELD)
    lender.pass_time(30)
    (text,) = lines.texts
    assert "held by decode-1 at 10.0.3.9 (0 of 2 ranks are done)" in text


def test_a_lease_that_was_renewed_until_its_limit_is_not_told_as_one_that_is_too_short(lines: Lines) -> None:
    """Its decode engine lives, and its queue is longer than the limit: a longer kv_lease_duration changes nothing."""
    lender = Lender()
    lender.feed(lending.Granted(lease=LEASE, blocks=4))
    for _ in range(60):
        lender.feed(HELD)
        lender.pass_time(15)
    (text,) = lines.texts
    assert "lent for 900.0 s" in text
    assert "held by decode-1 (0 of 2 ranks are done), and renewed until its limit (lease_limit_seconds" in text
    assert "lease_limit_seconds" in text.partition("what to do")[2]


def test_a_lease_that_was_read_or_lent_back_says_nothing(lines: Lines) -> None:
    lender = Lender()
    lender.feed(lending.Granted(lease=LEASE, blocks=4))
    for rank in range(2):
        lender.feed(msgspec.structs.replace(RELEASED, rank=rank))
    lender.feed(lending.Granted(lease=LeaseName("back", 8), blocks=4, fixed_ns=480 * SECOND))
    lender.pass_time(480)
    assert lender.core.leases() == ()
    assert lines.texts == []


def waiting(state: request.State, **fields: Any) -> request.Request:
    return request.Request(
        request_id="r",
        lease=LEASE,
        peer="prefill-1",
        retries_left=1,
        state=state,
        **{"in_flight": frozenset({0, 1}), **fields},
    )


def view_of(value: request.Request, peer_state: peer.State) -> remote_engine.RequestView:
    """As the core makes it."""
    return remote_engine.RequestView(
        value=value,
        waits_for=waits_for(value, peer_state),
        started_ns=None,
        until_ns=None,
    )


@pytest.mark.parametrize(
    ("of", "peer_state", "said"),
    [
        (waiting(request.State.PENDING_HANDSHAKE), peer.State.HANDSHAKING, "for the handshake"),
        (waiting(request.State.PENDING_HANDSHAKE), peer.State.DRAINING, "which is draining"),
        (waiting(request.State.PENDING_HANDSHAKE), peer.State.READY, "for the checksums of its blocks"),
        (waiting(request.State.READING), peer.State.READY, "for 2 READ(s)"),
        (waiting(request.State.READING, in_flight=frozenset(), unchecked=frozenset({0})), peer.State.READY, "compared"),
        (waiting(request.State.PROVING), peer.State.READY, "asked whether it still kept the blocks"),
        (waiting(request.State.DRAINING, failure=TIMEOUT), peer.State.READY, "it has failed (DeadlineExceeded)"),
    ],
)
def test_what_a_request_waits_for(of: request.Request, peer_state: peer.State, said: str) -> None:
    assert said in describe_wait(view_of(of, peer_state), peer_state)
