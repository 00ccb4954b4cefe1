"""Control messages: what is sent arrives, what is out of bounds is neither sent nor read, and hostile bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.wire.administration import (
    DrainReport,
    Leave,
    LeaveTaken,
    decode_leave_taken,
    decode_report,
    encode_drain,
    encode_report,
    is_drain,
)
from connector.wire.bounded import ID_LENGTH_MAX, DecodeFailed
from connector.wire.control import (
    ANSWER_BYTES_MAX,
    REQUEST_BYTES_MAX,
    SUMS_PART_BYTES,
    SUMS_PARTS_MAX,
    WHY_LENGTH_MAX,
    AskSums,
    GoneLease,
    HeldLease,
    Hold,
    HoldAnswer,
    Leaving,
    Release,
    Released,
    Sums,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    gone_lease,
)
from statemachine.lease import LEASES_PER_MESSAGE_MAX, LeaseName
from tests.unit.properties import on_any_machine
from tests.unit.work import Work

NUMBER_MAX = 2**63 - 1
LEASES = (LeaseName("cmpl-a:b,c", 7), LeaseName("HB:x", 0))
INCARNATION = "0123456789abcdef" * 2
HOLD = Hold(engine_id="decode", rank=3, ranks=2, sent_ns=5_000, leases=LEASES, incarnation=INCARNATION)
RELEASE = Release(engine_id="decode", rank=3, ranks=2, leases=LEASES, incarnation=INCARNATION)
ANSWER = HoldAnswer(
    sent_ns=5_000,
    held=(HeldLease("cmpl-a:b,c", 7, 30_000_000_000),),
    gone=(GoneLease("HB:x", 0, "expired"),),
    agent="agent-7",
)
RELEASED = Released(leases=LEASES)
LEAVE, LEAVING = Leave(grace_ns=5_000, secret=bytes(range(16))), Leaving(grace_ns=4_000)
ASK_SUMS = AskSums(lease=LEASES[0], part=1)
SUMS = Sums(lease=LEASES[0], part=1, parts=2, content=b"\0\xff")
MESSAGES = [HOLD, RELEASE, ANSWER, RELEASED, LEAVE, LEAVING, ASK_SUMS, SUMS]
REQUESTS = (Hold, Release, Leave, AskSums)

# The longest text in bytes: a character that is printable and takes four.
WIDE = "\U00020000"


def _decoder(message: Any) -> Callable[[Any], Any]:
    return decode_request if isinstance(message, REQUESTS) else decode_answer


def _encode(message: Any) -> tuple[bytes]:
    return encode_request(message) if isinstance(message, REQUESTS) else encode_answer(message)


def _wire(message: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.msgpack.decode(_encode(message)[0])
    return decoded


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Any) -> None:
    (frame,) = _encode(message)
    assert _decoder(message)([frame]) == message


def test_leases_arrive_as_lease_names() -> None:
    """The protocol keys its tables with them and reads their fields."""
    for decoded in (decode_request(encode_request(HOLD)), decode_answer(encode_answer(RELEASED))):
        assert all(isinstance(lease, LeaseName) for lease in decoded.leases)  # type: ignore[union-attr]
    answer = decode_answer(encode_answer(ANSWER))
    assert isinstance(answer, HoldAnswer)
    assert (answer.held[0].lease, answer.gone[0].lease) == LEASES


def test_what_is_on_the_wire() -> None:
    leases = [["cmpl-a:b,c", 7], ["HB:x", 0]]
    assert _wire(HOLD) == {
        "type": "hold",
        "engine_id": "decode",
        "rank": 3,
        "ranks": 2,
        "sent_ns": 5_000,
        "leases": leases,
        "incarnation": INCARNATION,
    }
    assert _wire(LEAVING) == {"type": "leaving", "grace_ns": 4_000}
    assert _wire(LEAVE) == {"type": "leave", "grace_ns": 5_000, "secret": bytes(range(16))}
    assert _wire(RELEASE) == {
        "type": "release",
        "engine_id": "decode",
        "rank": 3,
        "ranks": 2,
        "leases": leases,
        "incarnation": INCARNATION,
    }
    assert _wire(ANSWER) == {
        "type": "hold_answer",
        "sent_ns": 5_000,
        "held": [["cmpl-a:b,c", 7, 30_000_000_000]],
        "gone": [["HB:x", 0, "expired"]],
        "agent": "agent-7",
    }
    assert _wire(RELEASED) == {"type": "released", "leases": leases}
    assert _wire(ASK_SUMS) == {"type": "ask_sums", "lease": leases[0], "part": 1}
    assert _wire(SUMS) == {"type": "sums", "lease": leases[0], "part": 1, "parts": 2, "content": b"\0\xff"}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_later_versions_may_add_fields(message: Any) -> None:
    frame = msgspec.msgpack.encode(_wire(message) | {"later": [1, {"x": None}]})
    assert _decoder(message)([frame]) == message


@pytest.mark.parametrize("frames", [[], [b"", b""], [*encode_request(HOLD), b""]])
@pytest.mark.parametrize("decode", [decode_request, decode_answer])
def test_one_frame_is_a_message(decode: Callable[[Any], Any], frames: list[bytes]) -> None:
    with pytest.raises(DecodeFailed, match="expected one frame"):
        decode(frames)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_the_other_direction_is_refused(message: Any) -> None:
    decode = decode_answer if isinstance(message, REQUESTS) else decode_request
    with pytest.raises(DecodeFailed, match="Invalid value"):
        decode(_encode(message))


OUT_OF_BOUNDS: list[tuple[Any, dict[str, Any]]] = [
    (HOLD, {"engine_id": ""}),
    (HOLD, {"engine_id": "e" * (ID_LENGTH_MAX + 1)}),
    (HOLD, {"engine_id": "line\nfeed"}),
    (HOLD, {"engine_id": b"bytes"}),
    (HOLD, {"rank": -1}),
    (HOLD, {"rank": 1024}),
    (HOLD, {"rank": True}),
    (HOLD, {"ranks": 0}),
    (HOLD, {"ranks": 1025}),
    (HOLD, {"ranks": 1.0}),
    (HOLD, {"sent_ns": -1}),
    (HOLD, {"sent_ns": NUMBER_MAX + 1}),
    (LEAVE, {"grace_ns": -1}),
    (LEAVE, {"grace_ns": None}),
    (LEAVING, {"grace_ns": NUMBER_MAX + 1}),
    (HOLD, {"leases": None}),
    (HOLD, {"leases": [["a", 1]] * (LEASES_PER_MESSAGE_MAX + 1)}),
    (HOLD, {"leases": [["a"]]}),
    (HOLD, {"leases": [["a", 1, 2]]}),
    (HOLD, {"leases": ["a"]}),
    (HOLD, {"leases": {"a": 1}}),
    (HOLD, {"leases": [["", 1]]}),
    (HOLD, {"leases": [["a" * (ID_LENGTH_MAX + 1), 1]]}),
    (HOLD, {"leases": [["a\0", 1]]}),
    (HOLD, {"leases": [["a\n", 1]]}),
    (HOLD, {"leases": [["a", -1]]}),
    (HOLD, {"leases": [["a", NUMBER_MAX + 1]]}),
    (HOLD, {"leases": [["a", True]]}),
    (HOLD, {"leases": [["a", "1"]]}),
    (RELEASE, {"leases": [["a", 1]] * (LEASES_PER_MESSAGE_MAX + 1)}),
    (RELEASE, {"leases": [["", 1]]}),
    (RELEASE, {"ranks": 0}),
    (ANSWER, {"sent_ns": -1}),
    (ANSWER, {"held": [["a", 1, -1]]}),
    (ANSWER, {"held": [["a", 1, NUMBER_MAX + 1]]}),
    (ANSWER, {"held": [["a", 1, 1.5]]}),
    (ANSWER, {"held": [["a", 1]]}),
    (ANSWER, {"held": [["", 1, 1]]}),
    (ANSWER, {"held": [["a", 1, 1]] * LEASES_PER_MESSAGE_MAX}),
    (ANSWER, {"gone": [["a", 1, "x" * (WHY_LENGTH_MAX + 1)]]}),
    (ANSWER, {"gone": [["a", 1, "line\nfeed"]]}),
    (ANSWER, {"gone": [["a", 1, None]]}),
    (ANSWER, {"gone": [["a\x85", 1, "expired"]]}),
    (RELEASED, {"leases": [["a", -1]]}),
    (RELEASED, {"leases": [["a", 1]] * (LEASES_PER_MESSAGE_MAX + 1)}),
    (ASK_SUMS, {"lease": ["", 1]}),
    (ASK_SUMS, {"lease": ["a", -1]}),
    (ASK_SUMS, {"part": -1}),
    (ASK_SUMS, {"part": SUMS_PARTS_MAX}),
    (SUMS, {"lease": ["a\n", 1]}),
    (SUMS, {"lease": ["a", NUMBER_MAX + 1]}),
    (SUMS, {"part": SUMS_PARTS_MAX}),
    (SUMS, {"parts": 0}),
    (SUMS, {"parts": SUMS_PARTS_MAX + 1}),
    (SUMS, {"content": bytes(SUMS_PART_BYTES + 1)}),
]


@pytest.mark.parametrize(
    ("message", "changes"),
    OUT_OF_BOUNDS,
    ids=[f"{type(message).__name__}-{next(iter(changes))}-{i}" for i, (message, changes) in enumerate(OUT_OF_BOUNDS)],
)
def test_out_of_bounds(message: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(DecodeFailed) as caught:
        _decoder(message)([msgspec.msgpack.encode(_wire(message) | changes)])
    assert len(caught.value.detail) <= 200
    assert caught.value.detail.isprintable()


def over_and_over(message: Any, field: str, value: Any, times: int) -> bytes:
    """With a field that is there many times. No value of it is out of bounds."""
    once = msgspec.msgpack.encode(field) + msgspec.msgpack.encode(value)
    others = msgspec.msgpack.encode({key: each for key, each in _wire(message).items() if key != field})
    return b"\xde" + (others[0] - 0x80 + times).to_bytes(2, "big") + others[1:] + once * times


LONG_LISTS = [(HOLD, "leases", ["a", 1]), (RELEASE, "leases", ["a", 1]), (RELEASED, "leases", ["a", 1])]
LONG_LISTS += [(ANSWER, "held", ["a", 1, 1]), (ANSWER, "gone", ["a", 1, ""])]


@pytest.mark.parametrize(("message", "field", "element"), LONG_LISTS)
def test_a_list_that_is_too_long_is_refused_before_any_of_it_is_built(
    message: Any, field: str, element: list[Any]
) -> None:
    """A message of the largest size has room for half a million leases."""
    (most,) = _encode(
        msgspec.convert(_wire(message) | {field: [element] * (LEASES_PER_MESSAGE_MAX - 1)}, type(message))
    )
    with Work() as allowed:
        _decoder(message)([most])
    too_many = [element] * ((REQUEST_BYTES_MAX - 1000) // len(msgspec.msgpack.encode(element)))
    hostile = msgspec.msgpack.encode(_wire(message) | {field: too_many})
    with Work() as refused, pytest.raises(DecodeFailed, match=rf"length <= {LEASES_PER_MESSAGE_MAX} - at `\$.{field}"):
        _decoder(message)([hostile])
    assert refused.peak_bytes < allowed.peak_bytes


@pytest.mark.parametrize(("message", "field", "element"), LONG_LISTS)
def test_a_field_that_is_there_twice_is_refused(message: Any, field: str, element: list[Any]) -> None:
    """All of its values would be built, and only the last one counts: that is no bound."""
    for times, problem in ((2, "a field is there twice"), (100, "the limit is 64")):
        with pytest.raises(DecodeFailed, match=problem):
            _decoder(message)([over_and_over(message, field, [element], times)])
    assert _decoder(message)([over_and_over(message, field, [element], 1)])


OPTIONAL = ("held", "gone", "incarnation", "agent")
REQUIRED = [(message, field) for message in MESSAGES for field in _wire(message) if field not in OPTIONAL]


@pytest.mark.parametrize(("message", "field"), REQUIRED, ids=lambda value: getattr(value, "__class__", value).__name__)
def test_missing_field(message: Any, field: str) -> None:
    wire = _wire(message)
    del wire[field]
    with pytest.raises(DecodeFailed, match=field):
        _decoder(message)([msgspec.msgpack.encode(wire)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: msgspec.structs.replace(HOLD, leases=(LeaseName("a", 1),) * (LEASES_PER_MESSAGE_MAX + 1)),
        lambda: msgspec.structs.replace(RELEASE, leases=(LeaseName("", 1),)),
        lambda: Released(leases=(LeaseName("a", -1),)),
        lambda: HoldAnswer(sent_ns=1, held=(HeldLease("a", 1, -1),)),
        lambda: HoldAnswer(sent_ns=1, gone=(GoneLease("a", 1, "x" * 201),)),
    ],
)
def test_what_could_not_be_read_is_not_made(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"leases|request id|number|remaining_ns|why"):
        make()


def test_a_reason_of_any_kind_can_be_told() -> None:
    gone = gone_lease(LeaseName("a", 1), "line\nfeed " + "x" * 1000)
    assert gone.why.startswith("line\\nfeed x")
    assert decode_answer(encode_answer(HoldAnswer(sent_ns=1, gone=(gone,)))) == HoldAnswer(sent_ns=1, gone=(gone,))


def test_the_largest_messages_fit() -> None:
    ids = [WIDE * (ID_LENGTH_MAX - 3) + f"{i:03}" for i in range(LEASES_PER_MESSAGE_MAX)]
    hold = Hold(
        engine_id=WIDE * ID_LENGTH_MAX,
        rank=1023,
        ranks=1024,
        sent_ns=NUMBER_MAX,
        leases=tuple(LeaseName(request_id, NUMBER_MAX) for request_id in ids),
    )
    gone = tuple(GoneLease(request_id, NUMBER_MAX, WIDE * WHY_LENGTH_MAX) for request_id in ids)
    answer = HoldAnswer(sent_ns=NUMBER_MAX, gone=gone)
    assert decode_request(encode_request(hold)) == hold
    assert decode_answer(encode_answer(answer)) == answer
    # What a stranger may send beside a message has the same bound: it is not much larger than need be.
    assert 1.1 * len(encode_request(hold)[0]) > REQUEST_BYTES_MAX


@pytest.mark.parametrize("decode", [decode_request, decode_answer])
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc0",
        b"\xc1",
        b"\x80",
        b"\x91" * 100_000,
        b"\x81\xa1z" + b"\x91" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        msgspec.msgpack.encode({"type": "unknown"}),
        msgspec.msgpack.encode({"type": 1}),
        encode_request(HOLD)[0] + b"\0",
        encode_request(HOLD)[0][:-1],
        encode_answer(RELEASED)[0] + b"\0",
        bytes(ANSWER_BYTES_MAX + 1),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else value.__name__,
)
def test_what_is_no_message(decode: Callable[[Any], Any], frame: bytes) -> None:
    with pytest.raises(DecodeFailed) as caught:
        decode([frame])
    assert len(caught.value.detail) <= 200


_ids = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
_numbers = st.integers(0, NUMBER_MAX)
_leases = st.lists(st.builds(LeaseName, _ids, _numbers), max_size=5).map(tuple)
_messages = st.one_of(
    st.builds(
        Hold, engine_id=_ids, rank=st.integers(0, 1023), ranks=st.integers(1, 1024), sent_ns=_numbers, leases=_leases
    ),
    st.builds(Release, engine_id=_ids, rank=st.integers(0, 1023), ranks=st.integers(1, 1024), leases=_leases),
    st.builds(
        HoldAnswer,
        sent_ns=_numbers,
        held=st.lists(st.builds(HeldLease, _ids, _numbers, _numbers), max_size=5).map(tuple),
        gone=st.lists(st.builds(gone_lease, st.builds(LeaseName, _ids, _numbers), st.text()), max_size=5).map(tuple),
    ),
    st.builds(Released, leases=_leases),
)


@on_any_machine
@given(_messages)
def test_any_message_arrives(message: Any) -> None:
    assert _decoder(message)(_encode(message)) == message


@on_any_machine
@given(st.lists(st.binary(max_size=80), max_size=2), st.sampled_from([decode_request, decode_answer]))
def test_any_bytes(frames: list[bytes], decode: Callable[[Any], Any]) -> None:
    try:
        message = decode(frames)
    except DecodeFailed:
        return
    assert decode(_encode(message)) == message


@on_any_machine
@given(st.sampled_from(MESSAGES), st.data())
def test_flipped_bytes(message: Any, data: st.DataObject) -> None:
    """One byte of a good message changed: still a message within bounds, or refused."""
    frame = bytearray(_encode(message)[0])
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = _decoder(message)([bytes(frame)])
    except DecodeFailed:
        return
    for lease in getattr(decoded, "leases", ()):
        assert 1 <= len(lease.request_id) <= ID_LENGTH_MAX
        assert 0 <= lease.number <= NUMBER_MAX


_any_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@on_any_machine
@given(st.sampled_from(MESSAGES), st.data())
def test_any_value_in_any_field(message: Any, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(sorted(_wire(message))))
    frame = msgspec.msgpack.encode(_wire(message) | {field: data.draw(_any_value)})
    try:
        decoded = _decoder(message)([frame])
    except DecodeFailed:
        return
    assert _decoder(decoded)(_encode(decoded)) == decoded


# --- administration ---------------------------------------------------------------------------------------------------

REPORT = DrainReport(state="draining", seconds=1.5, seconds_left=58.5, lent=3, not_lent=2, answering=1)


def test_what_an_engine_and_its_workers_tell_each_other() -> None:
    assert decode_request(encode_request(LEAVE)) == LEAVE
    assert decode_leave_taken(encode_answer(LeaveTaken(leases=4))) == LeaveTaken(leases=4)
    for frames in ([], [b"", b""], [b"?"], encode_answer(RELEASED)):
        with pytest.raises(DecodeFailed):
            decode_leave_taken(frames)


def test_a_question_to_drain_is_that_and_nothing_else_is() -> None:
    assert is_drain([encode_drain()])
    for frames in ([], [encode_drain(), b""], [b""], [encode_drain() + b"?"], [msgspec.msgpack.encode((b"drain",))]):
        assert not is_drain(frames)


def test_a_report_arrives_and_a_refusal_is_an_error_that_says_why() -> None:
    assert decode_report([encode_report(REPORT), b"clock"]) == REPORT
    with pytest.raises(DecodeFailed, match="its workers died"):
        decode_report([msgspec.msgpack.encode({"error": "its workers died"}), b"clock"])
    with pytest.raises(DecodeFailed, match="expected 2 frames"):
        decode_report([encode_report(REPORT)])
    with pytest.raises(DecodeFailed):
        decode_report([msgspec.msgpack.encode({"drain": {"state": "?"}}), b"clock"])


@on_any_machine
@given(st.binary(max_size=200))
def test_hostile_bytes_cost_no_more_than_an_error(frame: bytes) -> None:
    is_drain([frame])
    for decode in (decode_leave_taken, decode_report):
        with pytest.raises(DecodeFailed):
            decode([frame] if decode is decode_leave_taken else [frame, b""])
