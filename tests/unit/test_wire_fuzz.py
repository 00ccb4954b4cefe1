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
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect as msgspec_types

from connector import wire
from connector.wire.bounded import DecodeFailed
from tests.fuzz.mutations import HUGE, mutate, with_other_values
from tests.fuzz.sockets import SEEDS, damaged, is_obeyed
from tests.fuzz.targets import TARGETS, Target, check
from tests.unit.properties import on_any_machine
from tests.unit.work import Work

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)

PEAK_BYTES, PEAK_BYTES_PER_BYTE = 256 << 10, 8
"""What a decoder may take, and for each byte that it is given: some copies of it. An element of a list may be a byte,
and 90 in Python, so long lists have to be refused before they are built."""
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


NOT_OF_AN_ENGINE = {
    # Read by a tool, of an engine that it asked. Rows grow with versions, and an answer has a bound in bytes.
    "connector.wire.inspection._decoder",
    # Of FIELDS_MAX fields, which is looked at before.
    "connector.wire.bounded._fields_decoder",
}


LISTS = (msgspec_types.ListType, msgspec_types.VarTupleType, msgspec_types.DictType)


def _without_bound(found: msgspec_types.Type, where: str, seen: set[type]) -> Iterator[str]:
    """The lists and maps in a type whose number of elements has none."""
    parts: list[tuple[str, msgspec_types.Type]] = []
    match found:
        case msgspec_types.ListType(item_type=item) | msgspec_types.VarTupleType(item_type=item):
            parts = [("[]", item)]
        case msgspec_types.DictType(key_type=key, value_type=value):
            parts = [(" key", key), ("[]", value)]
        case msgspec_types.TupleType(item_types=items) | msgspec_types.UnionType(types=items):
            parts = [(f"[{at}]", item) for at, item in enumerate(items)]
        case msgspec_types.StructType() | msgspec_types.NamedTupleType() if found.cls not in seen:
            seen.add(found.cls)
            parts = [(f".{each.name}", each.type) for each in found.fields]
    if isinstance(found, LISTS) and found.max_length is None:
        yield where
    for name, part in parts:
        yield from _without_bound(part, where + name, seen)


def test_every_list_that_an_engine_decodes_has_a_bound() -> None:
    """Texts have the bound of the bytes that came: they are copied. An element of a list is an object."""
    decoders = {
        f"{module.name}.{name}": value
        for module in pkgutil.iter_modules(wire.__path__, "connector.wire.")
        for name, value in vars(importlib.import_module(module.name)).items()
        if isinstance(value, msgspec.msgpack.Decoder)
    }
    assert len(decoders) > 10
    for name in decoders.keys() - NOT_OF_AN_ENGINE:
        assert list(_without_bound(msgspec_types.type_info(decoders[name].type), name, set())) == []
    inspected = decoders["connector.wire.inspection._decoder"].type
    assert list(_without_bound(msgspec_types.type_info(inspected), "", set())), "the check can fail"


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
    "leases, over and over": b"\xde\x03\xe9\xa4type\xa4hold"
    + (b"\xa6leases" + msgspec.msgpack.encode([("a", 1)] * 250)) * 1000,
    "names of regions": msgspec.msgpack.encode({"region_names": ["ab"] * 300_000}),
    "members of a region": msgspec.msgpack.encode({"region_members": [["ab"] * 300_000]}),
    "empty regions": msgspec.msgpack.encode({"kv_caches_base_addr": [1] * 900_000}),
}


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
