"""Notifications: the two texts, and everything that is neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.wire.bounded import RANKS_MAX
from connector.wire.notifications import (
    MESSAGE_BYTES_MAX,
    REQUEST_IDS_MAX,
    Heartbeat,
    Malformed,
    Release,
    encode_heartbeats,
    encode_release,
    parse_notification,
)
from tests.unit.properties import on_any_machine


def test_release() -> None:
    assert encode_release("cmpl-7", 2) == b"cmpl-7:2"
    assert parse_notification(b"cmpl-7:2") == Release("cmpl-7", 2)


def test_release_of_an_id_with_colons() -> None:
    assert parse_notification(encode_release("a:b:3", 1)) == Release("a:b:3", 1)


@pytest.mark.parametrize("consumers", [0, -1, RANKS_MAX + 1])
def test_release_needs_a_sensible_count(consumers: int) -> None:
    with pytest.raises(ValueError, match="consumers"):
        encode_release("r", consumers)


def test_heartbeat() -> None:
    assert encode_heartbeats(["a", "b:c"]) == [b"HB:a,b:c"]
    assert parse_notification(b"HB:a,b:c") == Heartbeat(("a", "b:c"), None)


def test_heartbeat_without_ids() -> None:
    assert encode_heartbeats([]) == []
    assert parse_notification(b"HB:") == Heartbeat(())
    assert parse_notification(b"HB:,a,,b,") == Heartbeat(("a", "b"))


def test_a_heartbeat_names_each_id_once_in_the_senders_order() -> None:
    assert parse_notification(b"HB:b,a,b,,b,c,a") == Heartbeat(("b", "a", "c"))


def test_no_more_heartbeats_than_it_takes() -> None:
    assert encode_heartbeats(["a", "b"], bytes_max=6) == [b"HB:a,b"]
    assert encode_heartbeats(["a", "b"], bytes_max=5) == [b"HB:a", b"HB:b"]


def test_heartbeats_are_split_by_size() -> None:
    ids = [f"request-{index:04}" for index in range(1000)]
    messages = encode_heartbeats(ids, bytes_max=256)
    assert all(len(message) <= 256 for message in messages)
    assert len(messages) <= 60
    named = [name for message in messages for name in parse_notification(message).request_ids]
    assert named == ids


def test_heartbeat_leaves_out_what_it_cannot_name() -> None:
    assert encode_heartbeats(["a,b", "", "c"]) == [b"HB:c"]


@pytest.mark.parametrize(
    ("request_id", "heartbeat"),
    [("HB:x", ("x:1",)), ("HB:", (":1",)), ("HB:a,b", ("a", "b:1")), ("HB:x:2", ("x:2:1",))],
)
def test_both_readings_of_a_release_whose_id_begins_like_a_heartbeat(
    request_id: str, heartbeat: tuple[str, ...]
) -> None:
    assert parse_notification(encode_release(request_id, 1)) == Heartbeat(heartbeat, Release(request_id, 1))


def test_a_text_that_can_only_be_a_release_is_one() -> None:
    """As a heartbeat it would name an id longer than there are."""
    request_id = "HB:" + "x" * 509
    assert parse_notification(encode_release(request_id, 1024)) == Release(request_id, 1024)


def test_a_count_out_of_range_leaves_a_heartbeat() -> None:
    assert parse_notification(b"HB:x:0") == Heartbeat(("x:0",), None)
    assert parse_notification(b"HB:x:1025") == Heartbeat(("x:1025",), None)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b":",
        b"no count",
        b":1",
        b"r:",
        b"r:x",
        b"r:-1",
        b"r:+1",
        b"r: 1",
        b"r:1 ",
        b"r:1_0",
        b"r:0",
        b"r:1025",
        b"r:99999999999999999999",
        "r:\u0661".encode(),
        b"\xff:1",
        b"HB:\xff",
        b"x" * 513 + b":1",
        b"HB:" + b"x" * 513,
        b"HB:" + b"a," * REQUEST_IDS_MAX + b"b",
        b"PUSH_REG:\x81\xa1a\xff",
        b"x" * (MESSAGE_BYTES_MAX + 1),
    ],
    ids=lambda message: repr(message[:20]),
)
def test_malformed(message: bytes) -> None:
    parsed = parse_notification(message)
    assert isinstance(parsed, Malformed)
    assert len(parsed.found) <= 80


@on_any_machine
@given(st.binary(max_size=64) | st.text(max_size=32).map(str.encode))
def test_anything_parses(message: bytes) -> None:
    parsed = parse_notification(message)
    release = parsed.or_release if isinstance(parsed, Heartbeat) else parsed
    if isinstance(release, Release):
        again = parse_notification(encode_release(release.request_id, release.consumers))
        assert release in (again, getattr(again, "or_release", None))


@on_any_machine
@given(
    st.lists(
        st.text(st.characters(exclude_characters=",", exclude_categories=["Cs"]), min_size=1, max_size=20), unique=True
    ),
    st.integers(8, 64),
)
def test_heartbeats_name_every_id_once(request_ids: list[str], bytes_max: int) -> None:
    named: list[str] = []
    for message in encode_heartbeats(request_ids, bytes_max):
        parsed = parse_notification(message)
        assert isinstance(parsed, Heartbeat)
        named += parsed.request_ids
    assert named == request_ids
