"""The table of the demo, on traces written by hand: what it must show, and that it does not pass what is wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from connector.observe.history import Story, histories, matching, stories
from connector.tools.trace_reader import read_trace
from statemachine.trace import TransitionRecord
from tests.e2e.trace_table import Row, milliseconds, render

MILLISECOND = 1_000_000

Step = tuple[int, str, str, str]
"""Time in ms, machine, subject, state to go to."""


def write_trace(path: Path, steps: list[Step], **fields: object) -> None:
    """One process's trace file, with `from_state` filled in from what came before."""
    latest: dict[str, str] = {}
    lines = []
    for number, (milliseconds_since_start, machine, subject, state) in enumerate(steps):
        record = TransitionRecord(
            seq=number,
            wall=1_700_000_000 + milliseconds_since_start / 1e3,
            mono_ns=milliseconds_since_start * MILLISECOND,
            engine_id="p" if machine == "lease" else "d",
            rank=0,
            role="kv_both",
            machine=machine,
            subject=subject,
            from_state=latest.get(subject),
            event="Event",
            to_state=state,
        )
        lines.append(msgspec.json.encode(msgspec.structs.replace(record, **fields)))
        latest[subject] = state
    path.write_bytes(b"\n".join(lines) + b"\n")


def decode_side(path: Path, *states: str, reason: str | None = None) -> None:
    steps = [(20 * number, "request", "cmpl-demo-01-0-dddd", state) for number, state in enumerate(states)]
    write_trace(path, steps, peer="p", remote_request_id="cmpl-demo-01-0-pppp", blocks=3, bytes=393_216, reason=reason)


def prefill_side(path: Path, *states: str) -> None:
    write_trace(path, [(7 * number, "lease", "cmpl-demo-01-0-pppp", state) for number, state in enumerate(states)])


def row_of(directory: Path, *, right: bool = True) -> Row:
    story = next(iter(matching(stories(histories(read_trace(directory))), "demo-01")), Story())
    return Row(
        request_id="demo-01",
        kind="several blocks",
        prompt_tokens=70,
        verdict="equal" if right else "DIFFERENT",
        right=right,
        request=next(iter(story.requests), None),
        lease=next(iter(story.leases), None),
    )


def test_plain_path_has_no_problem_and_is_shown_with_times_and_amounts(tmp_path: Path) -> None:
    decode_side(tmp_path / "d.jsonl", "pending_handshake", "reading", "reading", "done")
    prefill_side(tmp_path / "p.jsonl", "computing", "held", "done")
    row = row_of(tmp_path)
    assert row.problems == ()
    assert row.settled
    text = render([row])
    assert "pending_handshake 20 ms -> reading 40 ms -> done" in text
    assert "computing 7.0 ms -> held 7.0 ms -> done" in text
    assert "393216" in text
    assert "equal" in text


@pytest.mark.parametrize(
    ("request_states", "lease_states", "settled"),
    [
        (("pending_handshake", "failed"), ("computing", "held", "done"), True),
        (("pending_handshake", "reading", "draining", "failed"), ("computing", "held", "expired"), True),
        (("pending_handshake", "done"), ("computing", "held", "done"), True),
        (("pending_handshake", "reading"), ("computing", "held", "done"), False),
        (("pending_handshake", "reading", "done"), ("computing", "held"), False),
        (("pending_handshake", "reading", "done"), ("computing", "withdrawn"), True),
    ],
)
def test_any_other_path_is_a_problem(
    tmp_path: Path, request_states: tuple[str, ...], lease_states: tuple[str, ...], settled: bool
) -> None:
    decode_side(tmp_path / "d.jsonl", *request_states)
    prefill_side(tmp_path / "p.jsonl", *lease_states)
    row = row_of(tmp_path)
    assert row.path_problems
    assert row.settled is settled


def test_a_wrong_answer_is_a_problem_on_a_plain_path(tmp_path: Path) -> None:
    decode_side(tmp_path / "d.jsonl", "pending_handshake", "reading", "done")
    prefill_side(tmp_path / "p.jsonl", "computing", "held", "done")
    row = row_of(tmp_path, right=False)
    assert row.path_problems == ()
    assert row.problems == ("answer: DIFFERENT",)


def test_a_side_without_trace_is_a_problem(tmp_path: Path) -> None:
    assert row_of(tmp_path).path_problems
    prefill_side(tmp_path / "p.jsonl", "computing", "held", "done")
    row = row_of(tmp_path)
    assert row.lease is not None
    assert not row.settled
    assert "request on D: no record in the traces" in row.problems


def test_the_lease_is_joined_by_the_id_that_the_decode_engine_asked_for(tmp_path: Path) -> None:
    decode_side(tmp_path / "d.jsonl", "pending_handshake", "reading", "done")
    write_trace(tmp_path / "p.jsonl", [(0, "lease", "cmpl-demo-01-0-another", "computing")])
    assert row_of(tmp_path).lease is None


def test_the_reason_is_shown(tmp_path: Path) -> None:
    decode_side(tmp_path / "d.jsonl", "pending_handshake", "failed", reason="HandshakeTimeout")
    assert "failed (HandshakeTimeout)" in render([row_of(tmp_path)])


@pytest.mark.parametrize(("seconds", "shown"), [(0.0004, "0.4 ms"), (0.0099, "9.9 ms"), (0.103, "103 ms")])
def test_durations_are_shown_in_milliseconds(seconds: float, shown: str) -> None:
    assert milliseconds(seconds) == shown
