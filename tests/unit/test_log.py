"""Lines for people: what they say, that a burst is shortened, and that nothing from outside gets through raw."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.observe import log
from connector.observe.log import LINES_PER_WINDOW, WINDOW_SECONDS, FailureLog, get_logger, log_crash
from statemachine.failures import AbortedByClient, ActorCrashed, BadParams, DeadlineExceeded, Failure

TIMEOUT = DeadlineExceeded(timeout_seconds=120.0, phase="reading")


class Lines(logging.Handler):
    """Keeps what is logged. At the logger itself, because vLLM's does not propagate to where pytest listens."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = get_logger(), Lines()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


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


def test_lines_reach_the_handler_that_vllm_sets_up() -> None:
    """In a process of its own, because setting logging up is not undone."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _AS_IN_AN_ENGINE]
    output = subprocess.run(
        command, cwd=root, check=True, timeout=100, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout
    assert re.search(r"INFO .* ours at level info$", output, re.MULTILINE)
    assert "not below vllm" not in output
    # vLLM puts its prefix before every line of an entry, ours is a bar.
    assert re.search(r"ERROR .*  \| ValueError: ours with a traceback$", output, re.MULTILINE)


def test_a_line_names_writer_subject_kind_and_says_why(lines: Lines) -> None:
    FailureLog("decode-1", 3)("cmpl-7", TIMEOUT)
    (text,) = lines.texts
    assert text == f"[decode-1 rank 3] cmpl-7: DeadlineExceeded: {TIMEOUT}"
    assert lines.records[0].levelno == logging.WARNING


def test_an_abort_is_a_debug_line_only(lines: Lines) -> None:
    failure_log = FailureLog("decode-1", 0)
    failure_log("cmpl-7", AbortedByClient())
    assert lines.texts == []
    get_logger().setLevel(logging.DEBUG)
    failure_log("cmpl-7", AbortedByClient())
    assert [record.levelno for record in lines.records] == [logging.DEBUG]


def test_a_burst_is_shortened_and_counted(lines: Lines) -> None:
    clock = Seconds()
    failure_log = FailureLog("decode-1", 0, now=clock)
    for number in range(LINES_PER_WINDOW + 70):
        failure_log(f"cmpl-{number}", TIMEOUT)
    # All that fit, and one line that says that the silence which follows is not a recovery.
    assert len(lines.texts) == LINES_PER_WINDOW + 1
    assert f"{LINES_PER_WINDOW} failures within {WINDOW_SECONDS:g} s" in lines.texts[-1]

    clock.now += WINDOW_SECONDS
    lines.records.clear()
    failure_log("cmpl-after", TIMEOUT)
    assert len(lines.texts) == 2
    assert "70 more failures were not logged" in lines.texts[0]
    assert "cmpl-after" in lines.texts[1]

    # Said once.
    clock.now += WINDOW_SECONDS
    lines.records.clear()
    failure_log("cmpl-later", TIMEOUT)
    assert len(lines.texts) == 1


def test_a_new_window_has_its_lines_again(lines: Lines) -> None:
    clock = Seconds()
    failure_log = FailureLog("decode-1", 0, now=clock)
    for _ in range(3):
        for number in range(LINES_PER_WINDOW):
            failure_log(f"cmpl-{number}", TIMEOUT)
        clock.now += WINDOW_SECONDS
    assert len(lines.texts) == 3 * LINES_PER_WINDOW
    assert not any("not logged" in text for text in lines.texts)


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


@given(text=st.text())
def test_no_text_in_an_exception_can_pass_for_a_log_line(text: str) -> None:
    handler = Lines()
    get_logger().addHandler(handler)
    try:
        log_crash(f"actor {text}", _crash(text))
    finally:
        get_logger().removeHandler(handler)
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
