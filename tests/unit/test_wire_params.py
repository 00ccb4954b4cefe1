"""`kv_transfer_params` from a router: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.wire.params import (
    BLOCKS_MAX,
    ParamsError,
    ParamsKind,
    RemotePrefill,
    build_remote_prefill,
    classify,
    parse_remote_prefill,
)
from tests.rig.work import Counted
from tests.unit.numbers_as_floats import as_floats
from tests.unit.properties import on_any_machine

LENT = RemotePrefill(
    engine_id="engine-1",
    request_id="cmpl-a:b-0",
    host="10.0.0.1",
    port=5600,
    block_ids=((3, 1, 4), (1,)),
    tp_size=2,
    num_tokens=200,
    lease_number=7,
)
VALID = build_remote_prefill(LENT)

NOT_ALWAYS_SAID = ["first_tokens", "adapter_weights", "media_names", "signature", "signed_host"]
REQUIRED = ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"]


def _failure(raw: Any) -> Any:
    with pytest.raises(ParamsError) as caught:
        parse_remote_prefill(raw)
    assert len(caught.value.failure.found) <= 80
    assert str(caught.value).isprintable()
    return caught.value.failure


def test_round_trip_through_json() -> None:
    assert parse_remote_prefill(json.loads(json.dumps(VALID))) == LENT


@pytest.mark.parametrize("last", [199, 199.0])
def test_many_integers_may_come_as_floats(last: float) -> None:
    numbers = list(range(200))
    as_said = parse_remote_prefill(VALID | {"remote_block_ids": [numbers]})
    assert parse_remote_prefill(VALID | {"remote_block_ids": [[*map(float, numbers[:-1]), last]]}) == as_said


@pytest.mark.parametrize("wrong", [1.5, 2.0**53, 10**400, float("nan"), float("inf"), "x", True])
def test_of_many_floats_the_one_that_stands_for_no_block_is_named(wrong: object) -> None:
    numbers = [*map(float, range(200)), wrong, 201.0]
    with pytest.raises(ParamsError, match=r"remote_block_ids\[0\]\[200\]"):
        parse_remote_prefill(VALID | {"remote_block_ids": [numbers]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_block_ids": [[]] * 100_000},
        {"remote_block_ids": [[0.0] * (BLOCKS_MAX + 1)]},
        {"prefix_digests": [[1, "a"]] * 100_000},
        {"first_tokens": [1.0] * 100_000},
    ],
    ids=["groups", "blocks", "digests", "tokens"],
)
def test_what_has_too_many_elements_is_refused_without_a_step_for_each(wrong: dict[str, Any]) -> None:
    """The engine's scheduler waits meanwhile: a million empty lists took it seconds."""
    with Counted() as work, pytest.raises(ParamsError):
        parse_remote_prefill(VALID | wrong)
    assert work.calls + work.lines < 20_000


def test_integers_may_come_as_floats() -> None:
    """As from routers that hand parameters on in protobuf's Struct, Dynamo's sidecar for vLLM among them."""
    raw = VALID | {"lease_number": 2**48 + 1, "prefix_digests": [[100, "ab"], [200, "cd"]], "dcp_size": 1, "pp_size": 3}
    raw["first_tokens"] = [0, 176]
    assert parse_remote_prefill(as_floats(raw)) == parse_remote_prefill(raw)
    ends = raw | {"remote_blocks_expiry_time": 12.0}
    assert parse_remote_prefill(as_floats(ends)) == parse_remote_prefill(ends)


def test_the_port_may_come_as_a_text() -> None:
    """As from Dynamo's sidecar for vLLM, beside floats in all other places. Ids that are all digits stay texts."""
    raw = VALID | {"remote_engine_id": "17", "remote_request_id": "5600", "signed_host": "10"}
    assert parse_remote_prefill(as_floats(raw | {"remote_port": str(raw["remote_port"])})) == parse_remote_prefill(raw)


def test_params_of_a_builtin_prefill() -> None:
    """A built-in P numbers no lease, sends tuples in process, and possibly no blocks at all."""
    raw = {key: value for key, value in VALID.items() if key != "lease_number"}
    parsed = parse_remote_prefill(raw | {"remote_block_ids": ([],)})
    assert (parsed.lease_number, parsed.block_ids) == (None, ((),))


def test_how_often_a_builtin_prefill_has_registered_its_cache() -> None:
    """Ours says it for built-in decode engines; a decode engine of ours hears of it otherwise."""
    raw = build_remote_prefill(LENT, registration=3)
    assert raw["remote_registration_generation"] == 3
    assert parse_remote_prefill(raw) == LENT
    assert parse_remote_prefill(raw | {"lease_number": None}).registration == 3
    assert "remote_registration_generation" not in VALID


def test_absent_sizes_are_one_and_unknown_keys_are_ignored() -> None:
    raw = {key: VALID[key] for key in REQUIRED} | {"router_hint": object(), 7: "odd"}
    parsed = parse_remote_prefill(raw)
    assert (parsed.dcp_size, parsed.pp_size, parsed.num_tokens) == (1, 1, None)


@pytest.mark.parametrize("host", ["localhost", "node_3.cluster.local", "::1", "[fe80::1%eth0]", "192.168.0.1"])
def test_hosts(host: str) -> None:
    assert parse_remote_prefill(VALID | {"remote_host": host}).host == host


@pytest.mark.parametrize("field", REQUIRED)
def test_missing(field: str) -> None:
    raw = dict(VALID)
    del raw[field]
    failure = _failure(raw)
    assert (failure.field, failure.found) == (field, "nothing")


WRONG: list[tuple[str, Any]] = [
    ("remote_engine_id", None),
    ("remote_engine_id", 5),
    ("remote_engine_id", ""),
    ("remote_engine_id", "x" * 513),
    ("remote_engine_id", "line\nfeed"),
    ("remote_engine_id", "trailing\n"),
    ("remote_engine_id", "nul\0"),
    ("remote_engine_id", "\x85"),
    ("remote_request_id", b"bytes"),
    ("remote_request_id", "lone surrogate \ud800"),
    ("remote_host", ""),
    ("remote_host", "h" * 256),
    ("remote_host", "host;tcp://elsewhere"),
    ("remote_host", "*/x"),
    ("remote_host", "with space"),
    ("remote_host", "host\n"),
    ("remote_port", 0),
    ("remote_port", -1),
    ("remote_port", 65536),
    ("remote_port", ""),
    ("remote_port", "0"),
    ("remote_port", "05600"),
    ("remote_port", "5600.0"),
    ("remote_port", "+5600"),
    ("remote_port", " 5600"),
    ("remote_port", "5600\n"),
    ("remote_port", "\u0665\u0666"),
    ("remote_port", "65536"),
    ("remote_port", "9" * 5000),
    ("remote_port", b"5600"),
    ("remote_port", 5600.5),
    ("remote_port", True),
    ("remote_block_ids", None),
    ("remote_block_ids", "12"),
    ("remote_block_ids", 3),
    ("remote_block_ids", {"0": [1]}),
    ("remote_block_ids", [[]] * 65),
    ("tp_size", 0),
    ("tp_size", -2),
    ("tp_size", 1025),
    ("tp_size", 10**5000),
    ("tp_size", None),
    ("tp_size", True),
    ("dcp_size", 0),
    ("pp_size", "1"),
    ("remote_num_tokens", -1),
    ("remote_num_tokens", 1.5),
    ("remote_num_tokens", 2**31),
    ("remote_blocks_expiry_time", "soon"),
    ("transfer_mode", "push"),
    ("transfer_mode", None),
    ("remote_blocks_expiry_time", float("nan")),
    ("remote_blocks_expiry_time", float("inf")),
    ("remote_blocks_expiry_time", -1.0),
    ("remote_blocks_expiry_time", 10**400),
    ("first_tokens", [-1]),
    ("first_tokens", [0.5]),
    ("first_tokens", [2**31]),
    ("first_tokens", [0] * 65),
    ("first_tokens", 16),
    ("first_tokens", None),
    ("lease_number", 0),
    ("lease_number", -1),
    ("lease_number", 2**63),
    ("lease_number", 10**400),
    ("lease_number", 7.25),
    ("lease_number", 2.0**53),
    ("lease_number", float("inf")),
    ("lease_number", "7"),
    ("lease_number", True),
]


# Explicit ids: pytest would make them from the values, and Python refuses to write out the longest integer.
@pytest.mark.parametrize(
    ("field", "value"), [pytest.param(*case, id=f"{case[0]}-{index}") for index, case in enumerate(WRONG)]
)
def test_wrong_value_is_named(field: str, value: Any) -> None:
    assert _failure(VALID | {field: value}).field == field


@pytest.mark.parametrize("field", sorted({*VALID, *NOT_ALWAYS_SAID} - {"do_remote_prefill", "do_remote_decode"}))
@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [[text]], lambda text: [[1, text]]])
def test_half_a_surrogate_pair_is_refused_wherever_it_is(field: str, wrap: Callable[[str], Any]) -> None:
    """JSON can put one into any text, and no UTF-8 stands for it."""
    assert _failure(VALID | {field: wrap("\ud800")}).field.split("[")[0] == field


@pytest.mark.parametrize(
    ("block_ids", "field"),
    [
        ([1, 2], "remote_block_ids[0]"),
        ([[1], None], "remote_block_ids[1]"),
        ([[1, 2, -3]], "remote_block_ids[0][2]"),
        ([[1], [2, 2**31]], "remote_block_ids[1][1]"),
        ([[1, True]], "remote_block_ids[0][1]"),
        ([[1, "2"]], "remote_block_ids[0][1]"),
        ([[1.5]], "remote_block_ids[0][0]"),
        ([[1.0, "2"]], "remote_block_ids[0][1]"),
        ([[float("nan")]], "remote_block_ids[0][0]"),
        ([[[1.0]]], "remote_block_ids[0][0]"),
        ([[[1]]], "remote_block_ids[0][0]"),
    ],
)
def test_wrong_block_is_pointed_at(block_ids: Any, field: str) -> None:
    assert _failure(VALID | {"remote_block_ids": block_ids}).field == field


def test_values_at_the_bounds_are_taken() -> None:
    for changes in (
        {"remote_block_ids": [[0] * (BLOCKS_MAX - 1), [2**31 - 1]]},
        {"remote_block_ids": [[1]] * 64, "first_tokens": [2**31 - 1] * 64},
        {"remote_engine_id": "e" * 512, "remote_request_id": "r" * 512, "remote_host": "h" * 255},
        {"tp_size": 1024, "dcp_size": 1024, "pp_size": 1024, "remote_num_tokens": 2**31 - 1},
    ):
        found = parse_remote_prefill(VALID | changes)
        for name, value in changes.items():
            field = getattr(found, name.removeprefix("remote_"))
            assert (list(map(list, field)) if name == "remote_block_ids" else field) == (
                tuple(value) if name == "first_tokens" else value
            )


def test_more_blocks_than_any_request_has_are_refused() -> None:
    half = [0] * (BLOCKS_MAX // 2)
    assert _failure(VALID | {"remote_block_ids": [half, [*half, 0]]}).field == "remote_block_ids"
    assert _failure(VALID | {"remote_block_ids": [[*half, *half, 0]]}).field == "remote_block_ids[0]"


@pytest.mark.parametrize("raw", [[], "text", 5, True, [("remote_port", 1)]])
def test_not_a_dict(raw: Any) -> None:
    _failure(raw)
    with pytest.raises(ParamsError):
        classify(raw)


def test_huge_values_are_refused_quickly_and_quoted_briefly() -> None:
    huge = "x" * 50_000_000
    began = time.thread_time()  # that of a processor: a machine may stand still for longer than this takes
    for field in ("remote_engine_id", "remote_host", "lease_number"):
        assert "50000000 characters" in _failure(VALID | {field: huge}).found
    assert time.thread_time() - began < 5


def test_deep_nesting() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    assert _failure(VALID | {"remote_block_ids": nested}).field.startswith("remote_block_ids")


def test_classify() -> None:
    assert classify(None) is ParamsKind.NONE
    assert classify({}) is ParamsKind.NONE
    assert classify({"do_remote_prefill": False, "do_remote_decode": None}) is ParamsKind.NONE
    assert classify({"do_remote_decode": True, "do_remote_prefill": False}) is ParamsKind.REMOTE_DECODE
    assert classify(VALID) is ParamsKind.REMOTE_PREFILL
    both = classify(VALID | {"do_remote_decode": True})
    assert both == ParamsKind.REMOTE_PREFILL | ParamsKind.REMOTE_DECODE


@pytest.mark.parametrize(
    "raw",
    [
        {"do_remote_prefill": "true"},
        {"do_remote_decode": 1},
        {"do_remote_prefill": []},
    ],
)
def test_classify_refuses_flags_that_are_not(raw: Any) -> None:
    with pytest.raises(ParamsError) as caught:
        classify(raw)
    assert caught.value.failure.field in ("do_remote_prefill", "do_remote_decode")


def test_a_long_prompt_is_parsed_in_under_a_millisecond() -> None:
    """4,000 blocks; seen: 0.05 ms, so this allows a factor of 20 for a busy machine."""
    raw = json.loads(json.dumps(VALID | {"remote_block_ids": [list(range(4000))]}))
    parse_remote_prefill(raw)
    durations = []
    for _ in range(50):
        began = time.perf_counter()
        parse_remote_prefill(raw)
        durations.append(time.perf_counter() - began)
    assert min(durations) < 1e-3


_json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters() | st.sampled_from("\ud800\udfff"), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@on_any_machine
@given(st.dictionaries(st.sampled_from(sorted(VALID)), _json_values, max_size=4))
def test_any_json_is_parsed_or_refused(changes: dict[str, Any]) -> None:
    raw = VALID | changes
    try:
        parsed = parse_remote_prefill(raw)
    except ParamsError:
        assert _failure(raw).field.split("[")[0] in changes
    else:
        assert 1 <= parsed.port <= 65535
        assert all(0 <= block < 2**31 for group in parsed.block_ids for block in group)
        parsed.request_id.encode()
