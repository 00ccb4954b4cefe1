"""Questions of tools and their answers as bytes: within bounds in both directions, whatever arrives."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.wire.bounded import DecodeFailed
from connector.wire.control import decode_request, encode_request
from connector.wire.inspection import (
    ANSWER_BYTES_MAX,
    ENTRIES_MAX,
    MATCH_LENGTH_MAX,
    ROWS_BYTES_MAX,
    ROWS_MAX,
    TEXT_LENGTH_MAX,
    WHAT_LENGTH_MAX,
    WHATS,
    AnswerBuilder,
    EngineCounts,
    EngineFacts,
    EngineRow,
    HolderRow,
    Inspect,
    Inspected,
    LeaseRow,
    LocalPrefillRow,
    RecordRow,
    What,
    decode_inspected,
    text,
    texts,
)
from statemachine.trace import TransitionRecord
from tests.unit.properties import on_any_machine

QUESTION = Inspect(number=3, what="requests", match="abc", first=256)


def local_prefill(number: int) -> LocalPrefillRow:
    return LocalPrefillRow(request_id=f"r-{number}", reason="absent", tokens=number, age_seconds=0.5)


def widest_lease() -> LeaseRow:
    """Every text as long as it can be, of characters that take four bytes."""
    wide = "\U0001f600" * TEXT_LENGTH_MAX
    holder = HolderRow(engine_id=wide, ranks=2**60, released=(wide,) * 16, released_count=2**60)
    return LeaseRow(
        request_id=wide,
        lease_number=2**62,
        state="held",
        since_seconds=1.5,
        deadline_seconds=1.5,
        limit_seconds=1.5,
        blocks=2**31,
        holders=(holder,) * 16,
        holders_count=64,
    )


def answer(rows: list[Any], **changes: Any) -> Inspected:
    builder = AnswerBuilder(ROWS_MAX)
    for row in rows:
        builder.add(row)
    said = {"wall": 1.5, "total": 9, "first": 256, "next_row": None}
    return decode_inspected(builder.frames(QUESTION, **said | changes))


@pytest.mark.parametrize("what", WHATS)
def test_a_question_arrives_on_the_control_socket(what: Any) -> None:
    question = Inspect(number=1, what=what, match="x")
    assert decode_request(encode_request(question)) == question


def test_every_question_has_its_kind_of_rows() -> None:
    assert get_args(What) == WHATS


def test_an_answer_arrives_with_its_rows() -> None:
    record = TransitionRecord(
        seq=1, wall=2.0, mono_ns=3, engine_id="e", rank=0, role="worker", machine="request", subject="s",
        from_state=None, event="Created", to_state="pending_handshake",
    )  # fmt: skip
    rows = [local_prefill(1), widest_lease(), RecordRow(record=record, age_seconds=0.25)]
    assert answer(rows, next_row=300) == Inspected(
        number=3, what="requests", wall=1.5, total=9, first=256, next=300, rows=tuple(rows)
    )


def test_an_answer_is_full_by_rows_or_by_bytes() -> None:
    few = AnswerBuilder(2)
    few.add(local_prefill(0))
    assert not few.is_full
    few.add(local_prefill(1))
    assert few.is_full
    wide, rows = AnswerBuilder(ROWS_MAX), 0
    while not wide.is_full:
        wide.add(widest_lease())
        rows += 1
    (frame,) = wide.frames(QUESTION, wall=0.0, total=1, first=0, next_row=None)
    assert rows < ROWS_MAX
    assert ROWS_BYTES_MAX < len(frame) < ANSWER_BYTES_MAX
    assert len(decode_inspected([frame]).rows) == rows


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": -1},
        {"what": "x" * (WHAT_LENGTH_MAX + 1)},
        {"what": None},
        {"match": "x" * (MATCH_LENGTH_MAX + 1)},
        {"match": b"x"},
        {"first": -1},
        {"first": 2**64 - 1},
        {"rows": 0},
        {"rows": ROWS_MAX + 1},
        {"rows": 1.5},
    ],
    ids=repr,
)
def test_a_question_out_of_bounds_is_refused(wrong: dict[str, Any]) -> None:
    question = {"type": "inspect", "number": 1, "what": "leases", **wrong}
    with pytest.raises(DecodeFailed):
        decode_request([msgspec.msgpack.encode(question)])


def answer_of(rows: list[Any]) -> dict[str, Any]:
    """As it is encoded."""
    said = {"type": "inspected", "number": 1, "what": "leases", "wall": 0.0, "total": 1, "first": 0, "next": None}
    return said | {"rows": rows}


def test_an_answer_of_too_many_rows_or_bytes_is_refused() -> None:
    rows = [local_prefill(number) for number in range(ROWS_MAX + 1)]
    too_many = answer_of(rows)
    with pytest.raises(DecodeFailed):
        decode_inspected([msgspec.msgpack.encode(too_many)])
    with pytest.raises(DecodeFailed):
        decode_inspected([bytes(ANSWER_BYTES_MAX + 1)])
    with pytest.raises(DecodeFailed):
        decode_inspected([])


def test_a_field_that_a_tool_does_not_know_is_ignored() -> None:
    row = msgspec.to_builtins(local_prefill(1)) | {"added_later": [1, 2]}
    message = answer_of([row])
    assert decode_inspected([msgspec.msgpack.encode(message)]).rows == (local_prefill(1),)


def engine_row(counts: EngineCounts) -> EngineRow:
    return EngineRow(
        engine_id="e",
        rank=0,
        tp_rank=0,
        pp_rank=0,
        tp_size=1,
        uptime_seconds=1.5,
        recorded_seconds=None,
        stopped=None,
        facts=EngineFacts(),
        counts=counts,
        peers_by_state={"ready": 2},
        leases_by_state={"held": 3},
    )


def test_counts_that_a_tool_does_not_know_are_ignored_and_what_is_not_counted_is_none() -> None:
    counts = EngineCounts(leases=3, lent_blocks=12, nixl_lag_seconds=40)
    assert answer([engine_row(counts)]).rows == (engine_row(counts),)
    row = msgspec.to_builtins(engine_row(counts))
    row["counts"] = {"leases": 3, "lent_blocks": 12, "nixl_lag_seconds": 40, "added_later": 1}
    message = answer_of([row])
    assert decode_inspected([msgspec.msgpack.encode(message)]).rows == (engine_row(counts),)


def test_what_an_older_worker_does_not_say_is_nothing() -> None:
    assert set(msgspec.structs.astuple(EngineCounts())) == {0}
    lease = msgspec.to_builtins(widest_lease())
    del lease["is_lent_back"]
    for holder in lease["holders"]:
        del holder["others"], holder["address"], holder["is_connected"]
    (found,) = decode_inspected([msgspec.msgpack.encode(answer_of([lease]))]).rows
    assert isinstance(found, LeaseRow)
    assert not found.is_lent_back
    assert {(each.others, each.address, each.is_connected) for each in found.holders} == {(0, "", True)}


def test_texts_are_cut_and_fit_for_a_terminal() -> None:
    assert len(text("x" * 10_000)) == TEXT_LENGTH_MAX
    assert text("a\x1b[31m\n\ud800") == "a\\x1b[31m\\n\\ud800"
    many = texts({f"{number:05}": "\x00" * 10_000 for number in range(1000)})
    assert len(many) == ENTRIES_MAX
    assert all(len(value) <= TEXT_LENGTH_MAX for value in many.values())


@on_any_machine
@given(st.lists(st.binary(max_size=80), max_size=2))
def test_any_bytes(frames: list[bytes]) -> None:
    try:
        decode_inspected(frames)
    except DecodeFailed:
        return


@on_any_machine
@given(st.data())
def test_flipped_bytes(data: st.DataObject) -> None:
    """One byte of a good answer changed: still an answer within bounds, or refused."""
    builder = AnswerBuilder(ROWS_MAX)
    for row in (local_prefill(1), local_prefill(2)):
        builder.add(row)
    frame = bytearray(builder.frames(QUESTION, wall=1.0, total=2, first=0, next_row=2)[0])
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_inspected([bytes(frame)])
    except DecodeFailed:
        return
    assert len(found.rows) <= ROWS_MAX


@on_any_machine
@given(st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=20), max_size=5))
def test_any_map_as_a_question(fields: dict[str, Any]) -> None:
    try:
        question = decode_request([msgspec.msgpack.encode({"type": "inspect"} | fields)])
    except (DecodeFailed, OverflowError):
        return
    assert isinstance(question, Inspect)
    assert question.what in WHATS
    assert 1 <= question.rows <= ROWS_MAX
