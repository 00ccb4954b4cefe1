"""Every decoder of bytes from outside, with arbitrary bytes, arbitrary values and damaged messages: only the documented
errors come out, and memory and work are bounded by the size of what came in.

The longer form is `make fuzz` (`tests/fuzz/__init__.py`).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import sys
import tracemalloc
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector import wire
from connector.wire.bounded import DecodeFailed
from tests.fuzz.mutations import HUGE, mutate, with_other_values
from tests.fuzz.sockets import SEEDS, damaged, is_obeyed
from tests.fuzz.targets import TARGETS, Target, check
from tests.unit.properties import on_any_machine

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)

PEAK_BYTES, PEAK_BYTES_PER_BYTE = 256 << 10, 100
"""What a decoder may take, and for each byte that it is given: an element of a list may be a byte, and 90 in Python."""
CALLS, CALLS_PER_BYTE = 3_000, 20
"""Calls of functions in Python and of built-in ones."""


NOT_FROM_OUTSIDE = frozenset({"parse_keys"})
"""A file of the operator."""


def decoders() -> Iterator[tuple[str, CodeType]]:
    """Every public function and method of `connector.wire` that takes something from outside, as its name or the names
    of its arguments say."""
    for found in pkgutil.iter_modules(wire.__path__, "connector.wire."):
        module = importlib.import_module(found.name)
        own = [each for each in vars(module).values() if getattr(each, "__module__", None) == found.name]
        holders = [module, *(each for each in own if inspect.isclass(each))]
        for name, function in (pair for holder in holders for pair in vars(holder).items()):
            if not isinstance(function, FunctionType) or function.__module__ != found.name or name.startswith("_"):
                continue
            takes_untrusted = any(each.endswith("_untrusted") for each in inspect.signature(function).parameters)
            is_named_so = name.startswith(("decode_", "parse_")) and name not in NOT_FROM_OUTSIDE
            if takes_untrusted or is_named_so:
                yield f"{found.name}.{function.__qualname__}", function.__code__


def test_every_decoder_of_bytes_from_outside_has_a_target() -> None:
    """One that is given its seeds, at least."""
    called: set[CodeType] = set()
    sys.setprofile(lambda frame, event, argument: called.add(frame.f_code))
    try:
        for target in TARGETS.values():
            for seed in target.seeds:
                check(target, seed)
    finally:
        sys.setprofile(None)
    found = dict(decoders())
    assert len(found) > 15
    assert [name for name, code in found.items() if code not in called] == []


@each_target
def test_valid_messages_are_understood(target: Target) -> None:
    """Those after the first may be refusals."""
    assert check(target, target.seeds[0])
    for seed in target.seeds:
        check(target, seed)


@on_any_machine
@given(data=st.binary(max_size=2000))
@each_target
def test_any_bytes(target: Target, data: bytes) -> None:
    check(target, data)


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=6),
    max_leaves=30,
)


@on_any_machine
@given(value=_values)
@each_target
def test_any_value(target: Target, value: Any) -> None:
    check(target, msgspec.msgpack.encode(value))


@on_any_machine
@given(choose=st.randoms(use_true_random=False))
@each_target
def test_damaged_messages(target: Target, choose: random.Random) -> None:
    check(target, mutate(target.seeds, choose))
    check(target, with_other_values(choose.choice(target.seeds), choose))


LARGE: dict[str, bytes] = {
    "an array of nothing": b"\xdd\x00\x0f\x42\x40" + b"\xc0" * 1_000_000,
    "nested arrays": b"\x91" * 1_000_000,
    "one text": b"\xdb\x00\x0f\x42\x40" + b"x" * 1_000_000,
    "JSON, nested": b"[" * 1_000_000,
    "JSON, a number": b'{"remote_port":' + b"9" * 1_000_000 + b"}",
    "ids of a heartbeat": b"HB:" + b"," * 1_000_000,
    "digits": b"x:" + b"9" * 1_000_000,
    "leases": msgspec.msgpack.encode(
        {"type": "hold", "engine_id": "e", "rank": 0, "ranks": 1, "sent_ns": 1, "leases": [("a", 1)] * 250_000}
    ),
    "empty regions": msgspec.msgpack.encode({"kv_caches_base_addr": [1] * 900_000}),
}


class Work:
    """Counts calls, and the most memory that was taken meanwhile."""

    def __init__(self) -> None:
        self.calls = 0
        self.peak_bytes = 0

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")

    def __enter__(self) -> Work:
        tracemalloc.start()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def _assert_bounded(target: Target, data: bytes) -> None:
    with Work() as work:
        check(target, data)
    assert work.peak_bytes <= PEAK_BYTES + PEAK_BYTES_PER_BYTE * len(data)
    assert work.calls <= CALLS + CALLS_PER_BYTE * len(data)


@each_target
@pytest.mark.parametrize("name", LARGE)
def test_large_messages_cost_no_more_than_their_size(target: Target, name: str) -> None:
    _assert_bounded(target, LARGE[name])


@each_target
def test_a_few_bytes_that_announce_much_cost_little(target: Target) -> None:
    """Nothing is taken before it has come."""
    for seed in target.seeds:
        for huge in HUGE:
            _assert_bounded(target, huge)
            for at in range(0, len(seed), 3):
                _assert_bounded(target, seed[:at] + huge + seed[at:])


def test_a_decoder_that_raises_something_else_is_noticed() -> None:
    """The check can fail."""

    def broken(data: bytes) -> object:
        raise KeyError(data) if data else DecodeFailed("x" * 5000)

    target = Target("broken", broken, (DecodeFailed,), (b"",))
    with pytest.raises(KeyError):
        check(target, b"a")
    with pytest.raises(AssertionError, match="an error of 5000 characters"):
        check(target, b"")


@pytest.mark.parametrize(
    "seed",
    [
        b"\x81\xa1a\xa1\xa6",  # no UTF-8
        b"\x91" * 2000,
        b"\x80",
        b"\x81\x91\x01\x01",  # a list for a key
        b"\x82\x01\x01\xa1a\x01",  # keys of several types
    ],
    ids=["text", "deep", "empty", "list for a key", "keys"],
)
def test_what_was_kept_because_it_is_odd_can_be_damaged_further(seed: bytes) -> None:
    choose = random.Random(0)
    for _ in range(50):
        assert isinstance(with_other_values(seed, choose), bytes)


def test_the_engine_whose_sockets_are_fuzzed_is_sent_nothing_that_would_make_it_leave() -> None:
    """Undamaged, some of the seeds would."""
    choose = random.Random(0)
    obeyed = [seed for seed in SEEDS if is_obeyed(seed)]
    assert len(obeyed) == 2
    for _ in range(300):
        assert not is_obeyed(damaged(tuple(obeyed), choose))
