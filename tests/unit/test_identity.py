"""What two engines compare in place of the hash: which differences count, what is said of them, and what is bounded."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from connector.wire.bounded import RENDERED_LENGTH_MAX
from connector.wire.handshake import HandshakeError, decode_reply, encode_reply
from connector.wire.identity import (
    FACTORS_MAX,
    LAYERS_MAX,
    KvIdentity,
    LayerIdentity,
    differing_factors,
    differing_layers,
)
from connector.wire.metadata import encode_agent_metadata
from statemachine.failures import Incompatible
from tests.rig.facts import facts
from tests.unit.test_wire_handshake import METADATA

FACTORS = {"vllm_version": "1", "model": "/here", "revision": "none", "dtype": "float32", "weights": "3 tensors aa"}
LAYER = LayerIdentity(group=1, dtype="fp8", order="vec", k_scales=(0.5,), v_scales=(0.25,), content_bytes=(32, 16))
IDENTITY = KvIdentity(factors=FACTORS, layers={"layer": LAYER}, group_tokens=(16,))


def with_factors(**changes: str | None) -> KvIdentity:
    factors = {name: value for name, value in (FACTORS | changes).items() if value is not None}
    return msgspec.structs.replace(IDENTITY, factors=factors)


def with_layer(**changes: Any) -> KvIdentity:
    return msgspec.structs.replace(IDENTITY, layers={"layer": msgspec.structs.replace(LAYER, **changes)})


def handshake(
    theirs: KvIdentity | None, ours: KvIdentity = IDENTITY, *, hashes: tuple[str, str] = ("h", "h"), **more: Any
) -> Incompatible | None:
    """The failure, if D refuses. `theirs` None: P is a built-in engine. `hashes`: D's and P's."""
    said = {"compatibility_hash": hashes[1], "agent_metadata_bytes": encode_agent_metadata(METADATA)}
    actor = {} if theirs is None else {"actor": facts(identity=theirs)}
    expected = more.pop("expected_hash", hashes[0])
    try:
        decode_reply(
            encode_reply(msgspec.msgpack.encode(said | actor), 0.0),
            peer="prefill",
            address="host:5600",
            expected_hash=expected,
            identity=ours,
        )
    except HandshakeError as error:
        return cast(Incompatible, error.failure)
    return None


def test_equal_identities_are_compatible() -> None:
    assert handshake(IDENTITY) is None


@pytest.mark.parametrize("name", ["vllm_version", "dtype", "weights"])
def test_each_factor_is_named_with_both_values(name: str) -> None:
    failure = handshake(with_factors(**{name: "another"}))
    assert failure is not None
    assert (failure.field, failure.local, failure.remote) == (name, FACTORS[name], "another")
    assert "enforce_handshake_compat=false" in failure.advice


def test_of_the_hybrid_cache_manager_the_option_is_named_and_who_else_switches_it() -> None:
    """vLLM has no option of the factor's name, and a connector beside this one may have switched it."""
    failure = handshake(with_factors(is_hma_enabled="True"), with_factors(is_hma_enabled="False"))
    assert failure is not None
    assert failure.field == "is_hma_enabled"
    for named in ("--disable-hybrid-kv-cache-manager", "MultiConnector", "enforce_handshake_compat=false"):
        assert named in failure.advice


@pytest.mark.parametrize("name", ["model", "revision"])
def test_the_name_of_the_model_matters_only_where_the_weights_are_unknown(name: str) -> None:
    there = {name: "elsewhere"}
    assert handshake(with_factors(**there), hashes=("h", "another")) is None
    for ours, theirs in (
        (IDENTITY, with_factors(**there, weights=None)),
        (with_factors(weights=None), with_factors(**there)),
        (IDENTITY, with_factors(**there, weights="another")),
    ):
        failure = handshake(theirs, ours)
        assert failure is not None
        assert (failure.field, failure.remote) == (name, "elsewhere")


def test_the_draft_models_name_is_its_own_affair() -> None:
    draft = {"speculative.model": "/draft", "speculative.weights": "aa"}
    ours = with_factors(**draft)
    assert handshake(with_factors(**(draft | {"speculative.model": "/elsewhere"})), ours) is None
    failure = handshake(with_factors(**(draft | {"speculative.weights": "bb"})), ours)
    assert failure is not None
    assert failure.field == "speculative.weights"
    # Equal weights of the draft model say nothing of the model.
    without = {name: value for name, value in ours.factors.items() if name != "weights"}
    (found,) = differing_factors(without, without | {"model": "elsewhere"})
    assert found.field == "model"


def test_what_only_one_side_states_is_not_compared() -> None:
    assert handshake(with_factors(of_a_later_version="1")) is None
    assert handshake(IDENTITY, with_factors(of_a_later_version="1")) is None


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("cache_dtype", "fp8", "fp8_e4m3"),
        ("speculative.kv_cache_dtype", "fp8", "fp8_e4m3"),
        ("quantization", "awq", "awq_marlin"),
        ("quantization", "auto_gptq", "gptq_marlin"),
    ],
)
def test_two_names_of_the_same_fit_whoever_says_which(name: str, one: str, other: str) -> None:
    """Also where the other engine is of a version that knows only one of them, and so says what vLLM says."""
    for ours, theirs in ((one, other), (other, one)):
        assert handshake(with_factors(**{name: theirs}), with_factors(**{name: ours})) is None
    failure = handshake(with_factors(**{name: "another"}), with_factors(**{name: other}))
    assert failure is not None
    assert (failure.field, failure.local, failure.remote) == (name, other, "another")
    # What is a name of the same for one factor is none for another.
    assert handshake(with_factors(dtype=other), with_factors(dtype=one)) is not None


def test_two_names_of_a_layers_numbers_fit_whoever_says_which() -> None:
    assert handshake(with_layer(dtype="fp8_e4m3")) is None
    assert handshake(IDENTITY, with_layer(dtype="fp8_e4m3")) is None


def test_others_that_differ_are_named_too() -> None:
    theirs = with_factors(weights="another", **dict.fromkeys(("vllm_version", "dtype"), "another"))
    failure = handshake(theirs)
    assert failure is not None
    assert failure.field == "vllm_version"
    assert failure.advice.endswith("Also differ: dtype, weights")
    many = {f"n{index}": "a" for index in range(9)}
    failure = handshake(with_factors(**dict.fromkeys(many, "b")), with_factors(**many))
    assert failure is not None
    assert failure.advice.endswith("Also differ: n1, n2, n3, n4, n5 and 3 more")


@pytest.mark.parametrize(
    ("changes", "field", "local", "remote"),
    [
        ({"dtype": "fp8_e5m2"}, "KV cache dtype of layer", "fp8", "fp8_e5m2"),
        ({"fp8": "FNUZ"}, "kind of FP8 of layer", "OCP", "FNUZ"),
        ({"order": "amx"}, "order of elements in a block of layer", "vec", "amx"),
        ({"order": ""}, "order of elements in a block of layer", "vec", "as the tensor's shape"),
        ({"k_scales": (0.75,)}, "k_scale of layer", "0.5", "0.75"),
        ({"v_scales": (0.75,)}, "v_scale of layer", "0.25", "0.75"),
        ({"k_scales": ()}, "k_scale of layer", "0.5", "none"),
        ({"content_bytes": (32, 32)}, "content of layer", "32, 16 bytes", "32, 32 bytes"),
        ({"content_bytes": (48,)}, "content of layer", "32, 16 bytes", "48 bytes"),
    ],
)
@pytest.mark.parametrize("expected_hash", ["h", None])
def test_what_bytes_mean_is_compared_whatever_is_enforced(
    changes: dict[str, Any], field: str, local: str, remote: str, expected_hash: str | None
) -> None:
    failure = handshake(with_layer(**changes), expected_hash=expected_hash)
    assert failure is not None
    assert (failure.field, failure.local, failure.remote) == (field, local, remote)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"dtype": "bfloat16"}, "KV cache dtype of layer"), ({"order": "amx"}, "order of elements in a block of layer")],
)
def test_of_another_type_or_order_how_many_bytes_there_are_is_not_told(changes: dict[str, str], field: str) -> None:
    failure = handshake(with_layer(**changes, content_bytes=(64,)))
    assert failure is not None
    assert failure.field == field
    assert "Also differ" not in failure.advice


def test_an_order_that_is_made_ours_hides_no_other_amount() -> None:
    theirs = msgspec.structs.replace(LAYER, order="", content_bytes=(64, 32))
    (found,) = differing_layers({"l": LAYER}, {"l": theirs}, not_packed="")
    assert found.field == "content of l"


def test_scales_of_heads_are_compared_where_both_ranks_have_the_head() -> None:
    whole = msgspec.structs.replace(LAYER, k_scales=(1.0, 2.0, 3.0, 4.0), v_scales=())
    second = msgspec.structs.replace(LAYER, k_scales=(3.0, 4.0), v_scales=(), first_head=2)
    third = msgspec.structs.replace(LAYER, k_scales=(3.0,), v_scales=(), first_head=2)
    last = msgspec.structs.replace(LAYER, k_scales=(4.0,), v_scales=(), first_head=3)
    for one in (whole, second, last):
        for other in (whole, second, last):
            assert not list(differing_layers({"l": one}, {"l": other}))
    assert not list(differing_layers({"l": whole}, {"l": third}))
    wrong = msgspec.structs.replace(second, k_scales=(3.0, 5.0))
    (found,) = differing_layers({"l": whole}, {"l": wrong})
    assert (found.field, found.local, found.remote) == ("k_scale of head 3 of l", "4.0", "5.0")
    first = msgspec.structs.replace(second, first_head=0)
    (found,) = differing_layers({"l": whole}, {"l": first})
    assert found.field == "k_scale of head 0 of l"


@pytest.mark.parametrize("heads_first", [True, False])
def test_one_scale_of_a_layer_is_compared_with_those_of_all_its_heads(heads_first: bool) -> None:
    """Of the same model quantized in two ways; enforce_handshake_compat=false does not let it pass."""
    one = msgspec.structs.replace(LAYER, k_scales=(), v_scales=(1.0,), heads=4)
    alike = msgspec.structs.replace(one, v_scales=(1.0, 1.0, 1.0, 1.0))
    unlike = msgspec.structs.replace(one, v_scales=(1.0, 1.0, 1.0, 2.0))
    of_last = msgspec.structs.replace(one, v_scales=(2.0, 2.0), heads=2, first_head=2)
    found = []
    for each in (alike, unlike, of_last):
        ours, theirs = (each, one) if heads_first else (one, each)
        found += [difference.field for difference in differing_layers({"l": ours}, {"l": theirs})]
    assert found == ["v_scale of head 3 of l", "v_scale of head 2 of l"]


def test_of_many_scales_where_the_other_side_has_none_the_first_are_named() -> None:
    few = msgspec.structs.replace(LAYER, k_scales=(), v_scales=())
    many = msgspec.structs.replace(few, k_scales=tuple(number + 0.125 for number in range(1024)))
    (found,) = differing_layers({"l": few}, {"l": many})
    assert (found.field, found.local) == ("k_scale of l", "none")
    assert found.remote.startswith("0.125, 1.125, ")
    assert len(found.remote) <= RENDERED_LENGTH_MAX


def test_layers_that_one_side_does_not_have_are_not_compared() -> None:
    """A pipeline stage of P has some of D's layers; what is missing on both is the layout's affair."""
    theirs = msgspec.structs.replace(IDENTITY, layers={"another layer": with_layer(order="amx").layers["layer"]})
    assert handshake(theirs) is None


def test_factors_can_be_left_unenforced() -> None:
    assert handshake(with_factors(weights="another"), expected_hash=None, hashes=("h", "another")) is None


def test_a_builtin_engine_is_compared_by_its_hash() -> None:
    assert handshake(None) is None
    failure = handshake(None, hashes=("h", "another"))
    assert failure is not None
    assert failure.field == "compatibility_hash"
    assert handshake(None, hashes=("h", "another"), expected_hash=None) is None


def test_an_identity_takes_the_place_of_the_hash() -> None:
    assert handshake(IDENTITY, hashes=("h", "another")) is None


ONE_LAYER = {"group": 0, "dtype": "fp8", "content_bytes": []}


def one_layer(**changes: Any) -> dict[str, Any]:
    """As it is encoded; what is None is left out."""
    return {"layers": {"layer": {name: said for name, said in (ONE_LAYER | changes).items() if said is not None}}}


def refusal(changes: dict[str, Any]) -> Any:
    """Of an identity of which this was changed where it is encoded; None: it is taken."""
    actor = msgspec.to_builtins(msgspec.structs.replace(facts(), identity=IDENTITY))
    actor["identity"] |= changes
    payload = {"compatibility_hash": "h", "agent_metadata_bytes": encode_agent_metadata(METADATA), "actor": actor}
    try:
        decode_reply(
            (msgspec.msgpack.encode(payload), b""),
            peer="prefill",
            address="host:5600",
            expected_hash="h",
            identity=msgspec.structs.replace(IDENTITY, layers={}),
        )
    except HandshakeError as error:
        return error.failure
    return None


@pytest.mark.parametrize(
    "changes",
    [
        {"factors": {"name": "v" * 256}},
        {"factors": {f"n{index}": "v" for index in range(FACTORS_MAX)}},
        one_layer(),
        one_layer(k_scales=[1.0] * 1024, heads=1024),
        one_layer(group=4095),
        one_layer(order="", fp8=""),
        one_layer(order="o" * 256),
        one_layer(content_bytes=[0, 1 << 48]),
        one_layer(content_bytes=[1] * 64),
        {"layers": {f"l{index}": ONE_LAYER for index in range(LAYERS_MAX)}},
        {"group_tokens": [0, 1 << 20]},
        {"group_tokens": [16] * 4096},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_what_is_within_bounds_is_taken(changes: dict[str, Any]) -> None:
    assert refusal(changes) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"factors": {"name": "v" * 257}},
        {"factors": {"name": "two\nlines"}},
        {"factors": {"name": 5}},
        {"factors": {f"n{index}": "v" for index in range(FACTORS_MAX + 1)}},
        one_layer(k_scales=[1.0] * 1025),
        one_layer(k_scales=["1.0"]),
        one_layer(first_head=-1),
        one_layer(heads=1025),
        one_layer(group=None),
        one_layer(group=-1),
        one_layer(group=4096),
        one_layer(dtype=None),
        one_layer(dtype=""),
        one_layer(order="as\nsaid"),
        one_layer(order="o" * 257),
        one_layer(fp8="\x1b[31m"),
        one_layer(content_bytes=None),
        one_layer(content_bytes=[-1]),
        one_layer(content_bytes=[1] * 65),
        one_layer(content_bytes=[1.5]),
        one_layer(content_bytes=[(1 << 48) + 1]),
        {"layers": {f"l{index}": ONE_LAYER for index in range(LAYERS_MAX + 1)}},
        {"layers": {"": ONE_LAYER}},
        {"group_tokens": [-1]},
        {"group_tokens": [16] * 4097},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_bounds(changes: dict[str, Any]) -> None:
    failure = refusal(changes)
    assert failure is not None
    assert (failure.kind, failure.field) == ("HandshakeMalformed", "payload")
