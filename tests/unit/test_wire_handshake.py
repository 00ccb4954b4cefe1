"""Handshake frames and metadata: the order of checks, the bounds, and hostile bytes."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.layout.advertised import describe
from connector.layout.geometry import CacheGroup, LayoutMismatch, RankId, RankLayout
from connector.layout.local import LocalRank
from connector.layout.remote import layout_from_metadata
from connector.ports.zmq_bridge.requester import REPLY_FRAME_BYTES_MAX
from connector.wire.bounded import NUMBER_MAX, DecodeFailed, render_untrusted, shorten
from connector.wire.handshake import (
    ERROR_LENGTH_MAX,
    EXTENSION_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    ActorExtension,
    HandshakeError,
    MetadataRequest,
    decode_advertisement,
    decode_reply,
    encode_error,
    encode_payload,
    encode_reply,
    encode_request,
    parse_request,
)
from connector.wire.identity import LAYERS_MAX, KvIdentity, LayerIdentity
from connector.wire.metadata import (
    AGENT_BYTES_MAX,
    FACTS_BYTES_MAX,
    MEMBERS_MAX,
    REGIONS_MAX,
    AgentMetadata,
    decode_agent_metadata,
    encode_agent_metadata,
)
from statemachine.failures import HandshakeMalformed, HandshakeRefused, Incompatible, WrongEngine
from tests.rig.facts import NO_IDENTITY, facts
from tests.rig.layouts import attention_rank, latent_shapes, plan_engine
from tests.unit.properties import on_any_machine
from tests.unit.work import Work

TOKENS = 32
"""Of a block."""
ACTOR = facts(tp_size=2, tp_rank=1, pp_size=3, pp_rank=2)
ACTOR_WIRE: dict[str, Any] = msgspec.to_builtins(ACTOR)


def side(layers: int, *, block_bytes: int = 128, tp_rank: int = 1, tp_size: int = 2) -> LocalRank:
    """The model has latent caches, so that all ranks look the same."""
    shapes = latent_shapes(layers=layers, bytes_per_token=block_bytes // TOKENS)
    layout = attention_rank(
        "prefill",
        shapes,
        address=1 << 40,
        blocks=16,
        tokens=TOKENS,
        stride_bytes=256,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )
    layout = msgspec.structs.replace(
        layout,
        kernel_blocks_per_block=2,
        attention_backend="CPU_ATTN",
        groups=(CacheGroup(tokens_per_kernel_block=TOKENS, kernel_blocks_per_block=2),),
    )
    return LocalRank(layout=layout, shapes=shapes, compatibility_hash="hash", identity=NO_IDENTITY)


SIDE = side(3)
LAYOUT = SIDE.layout
METADATA = describe(LAYOUT, b"agent")
WIRE: dict[str, Any] = msgspec.to_builtins(METADATA, builtin_types=(bytes,))


def _encoded(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(WIRE | changes)


def _reply(metadata: bytes | None = None, clock: float = 5.0) -> tuple[bytes, bytes]:
    return encode_reply(
        encode_payload("hash", encode_agent_metadata(METADATA) if metadata is None else metadata, ACTOR), clock
    )


def _decode(frames: Any, peer: str = "prefill", expected_hash: str | None = "hash") -> Any:
    return decode_reply(frames, peer=peer, address="host:5600", expected_hash=expected_hash, identity=NO_IDENTITY)


def _failure(frames: Any, peer: str = "prefill", expected_hash: str | None = "hash") -> Any:
    with pytest.raises(HandshakeError) as caught:
        _decode(frames, peer, expected_hash)
    failure = caught.value.failure
    assert (failure.peer, failure.address) == (peer, "host:5600")
    assert str(failure).isprintable()
    assert str(caught.value) == str(failure)
    return failure


class TestRequest:
    def test_round_trip(self) -> None:
        assert parse_request([encode_request(3, 7)]) == MetadataRequest(3, 7)

    def test_older_form(self) -> None:
        assert parse_request([msgspec.msgpack.encode((b"get_meta_msg", 7))]) == MetadataRequest(0, 7)

    @pytest.mark.parametrize(
        "frames",
        [
            [],
            [b""],
            [encode_request(0, 0), b""],
            [b"get_meta_msg"],
            [b"\xc1"],
            [b"GET / HTTP/1.1\r\n\r\n"],
            [b"\x91" * 60],
            [b"\x91" * 100_000],
            [b"\xdd\xff\xff\xff\xff"],
            [msgspec.msgpack.encode(("get_meta_msg", 0, 0))],
            [msgspec.msgpack.encode((b"other", 0, 0))],
            [msgspec.msgpack.encode((b"get_meta_msg",))],
            [msgspec.msgpack.encode((b"get_meta_msg", 0, 0, 0))],
            [msgspec.msgpack.encode((b"get_meta_msg", 0, -1))],
            [msgspec.msgpack.encode((b"get_meta_msg", 1024, 0))],
            [msgspec.msgpack.encode((b"get_meta_msg", 0, 2**64 - 1))],
            [msgspec.msgpack.encode((b"get_meta_msg", 0, True))],
            [msgspec.msgpack.encode((b"get_meta_msg", 0, 1.0))],
            [encode_request(0, 0) + b"\0"],
        ],
    )
    def test_bad_frames(self, frames: list[bytes]) -> None:
        with pytest.raises(DecodeFailed) as caught:
            parse_request(frames)
        assert len(caught.value.detail) < 300

    @on_any_machine
    @given(st.lists(st.binary(max_size=40), max_size=3))
    def test_any_bytes(self, frames: list[bytes]) -> None:
        try:
            parse_request(frames)
        except DecodeFailed:
            return
        assert len(frames) == 1


class TestReply:
    def test_round_trip(self) -> None:
        reply = _decode(_reply())
        assert reply.metadata == METADATA
        assert reply.actor == ACTOR

    @pytest.mark.parametrize("frames", [(), (b"",), (*_reply(), b""), (b"", b""), (b"\xff", _reply()[1])])
    def test_wrong_frames(self, frames: Any) -> None:
        assert isinstance(_failure(frames), HandshakeMalformed)

    def test_error_reply(self) -> None:
        failure = _failure(encode_reply(encode_error("no rank 7\n" * 1000), 1.0))
        assert isinstance(failure, HandshakeRefused)
        assert failure.detail.startswith("no rank 7\\n")
        assert len(failure.detail) <= ERROR_LENGTH_MAX

    def test_hash_of_a_builtin_engine_is_compared_before_the_metadata_is_decoded(self) -> None:
        said = {"compatibility_hash": "hash", "agent_metadata_bytes": b"\xc1 another version's"}
        frames = msgspec.msgpack.encode(said), b""
        failure = _failure(frames, expected_hash="ours")
        assert isinstance(failure, Incompatible)
        assert (failure.field, failure.local, failure.remote) == ("compatibility_hash", "ours", "hash")
        assert isinstance(_failure(frames), HandshakeMalformed)

    def test_hash_comparison_can_be_switched_off(self) -> None:
        assert _decode(_reply(), expected_hash=None).metadata == METADATA

    def test_wrong_engine(self) -> None:
        failure = _failure(_reply(), peer="somebody else")
        assert isinstance(failure, WrongEngine)
        assert failure.found == "prefill"

    @pytest.mark.parametrize("frame", [b"", b"\xc0", msgspec.msgpack.encode(float("nan")), b"\xcb" + b"\0" * 40])
    def test_the_clock_is_not_looked_at(self, frame: bytes) -> None:
        assert _decode((_reply()[0], frame)).actor == ACTOR

    def test_a_builtin_peer_sends_no_extension(self) -> None:
        payload = msgspec.msgpack.decode(_reply()[0])
        del payload["actor"]
        assert _decode((msgspec.msgpack.encode(payload), b"")).actor is None

    @pytest.mark.parametrize(
        "changes",
        [
            {"identity": None},
            {"life": "0" * 31},
            {"life": "G" * 32},
            {"life": "0" * 32 + "\n"},
            {"tp_size": 0},
            {"tp_size": 1025, "tp_rank": 0},
            {"tp_size": True},
            {"tp_rank": 2},
            {"tp_rank": -1},
            {"pp_size": 2},
            {"pp_size": "3"},
            {"dcp_size": 0},
            {"control_host": ""},
            {"control_host": "h" * 256},
            {"control_host": "host;tcp://elsewhere"},
            {"control_host": "host\n"},
            {"verify": "all\x1b[31m"},
            {"verify": "a" * 17},
            {"control_port": 0},
            {"control_port": 65536},
            {"control_port": 1.5},
        ],
        ids=repr,
    )
    def test_bounds_of_the_extension(self, changes: dict[str, Any]) -> None:
        failure = _failure((self._with_extension(ACTOR_WIRE | changes), b""))
        assert (failure.kind, failure.field) == ("HandshakeMalformed", "payload")
        assert len(failure.detail) <= 200

    @pytest.mark.parametrize(
        "field", [field.name for field in msgspec.structs.fields(ActorExtension) if field.required]
    )
    def test_every_fact_is_required(self, field: str) -> None:
        actor = {key: value for key, value in ACTOR_WIRE.items() if key != field}
        assert field in _failure((self._with_extension(actor), b"")).detail

    def test_facts_that_contradict_the_metadata(self) -> None:
        failure = _failure((self._with_extension(ACTOR_WIRE | {"dcp_size": 2}), b""))
        assert (failure.kind, failure.field) == ("HandshakeMalformed", "actor")
        assert failure.detail == "dcp_size is 1 in the metadata and 2 in the extension"

    def test_facts_that_contradict_each_other_are_not_sent_either(self) -> None:
        with pytest.raises(ValueError, match="rank 2, 2 is outside of 3 stages of 2 ranks"):
            msgspec.structs.replace(ACTOR, tp_rank=2)

    @staticmethod
    def _with_extension(actor: dict[str, Any]) -> bytes:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(_reply()[0]) | {"actor": actor})

    @pytest.mark.parametrize(
        "payload",
        [
            {"compatibility_hash": "hash"},
            {"agent_metadata_bytes": b""},
            {"compatibility_hash": "hash", "agent_metadata_bytes": "text"},
            {"compatibility_hash": "h" * 257, "agent_metadata_bytes": b""},
            {"compatibility_hash": "new\nline", "agent_metadata_bytes": b""},
            {
                "compatibility_hash": "hash",
                "agent_metadata_bytes": b"",
                "actor": [ACTOR_WIRE],
            },
            {"compatibility_hash": "hash", "agent_metadata_bytes": b"", "actor": {}},
            {"error": 5},
            [],
            "text",
        ],
    )
    def test_malformed_payload(self, payload: Any) -> None:
        failure = _failure((msgspec.msgpack.encode(payload), _reply()[1]))
        assert (failure.kind, failure.field) == ("HandshakeMalformed", "payload")

    def test_newer_extension_is_understood(self) -> None:
        payload = msgspec.msgpack.decode(_reply()[0])
        payload["actor"] |= {"later": [1, 2, 3]}
        payload["another"] = {"x": None}
        assert _decode((msgspec.msgpack.encode(payload), _reply()[1])).actor == ACTOR

    def test_deep_nesting_in_an_ignored_key(self) -> None:
        payload = b"\x81\xa1z" + b"\x91" * 1_000_000 + b"\xc0"
        assert "nested" in _failure((payload, _reply()[1])).detail

    @on_any_machine
    @given(st.binary(max_size=200), st.binary(max_size=12))
    def test_any_bytes(self, payload: bytes, clock: bytes) -> None:
        _failure((payload, clock))

    @on_any_machine
    @given(st.data())
    def test_flipped_bytes(self, data: st.DataObject) -> None:
        """One byte of a good reply changed: still a reply, or a typed failure."""
        payload = bytearray(_reply()[0])
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
        try:
            reply = _decode((bytes(payload), _reply()[1]))
        except HandshakeError:
            return
        assert isinstance(reply.metadata, AgentMetadata)


class TestAdvertisement:
    """What a tool reads, which expects nothing."""

    @pytest.mark.parametrize("frames", [(), _reply()[:1], (*_reply(), b"")])
    def test_wrong_frames(self, frames: Any) -> None:
        with pytest.raises(DecodeFailed, match=f"expected 2 frames, got {len(frames)}"):
            decode_advertisement(frames)

    def test_of_an_engine_that_refuses_the_reason_is_told_within_bounds(self) -> None:
        said = decode_advertisement(encode_reply(encode_error("no rank 7\n" * 1000, ACTOR), 1.0))
        assert (said.compatibility_hash, said.metadata, said.actor) == (None, None, ACTOR)
        assert said.error is not None
        assert said.error.startswith("no rank 7\\n")
        assert len(said.error) <= ERROR_LENGTH_MAX


class TestMetadata:
    def test_round_trip_of_a_layout(self) -> None:
        assert _understood(encode_agent_metadata(METADATA)) == LAYOUT

    @pytest.mark.parametrize(
        "changes",
        [
            {"engine_id": ""},
            {"engine_id": "e" * 513},
            {"agent_metadata": b""},
            {"agent_metadata": "text"},
            {"kv_caches_base_addr": []},
            {"kv_caches_base_addr": [0, 4096, 8192]},
            {"kv_caches_base_addr": [-1, 4096, 8192]},
            {"kv_caches_base_addr": [2**63, 4096, 8192]},
            {"kv_caches_base_addr": [2**63 - 100, 4096, 8192]},
            {"kv_caches_base_addr": [4096] * 100_001},
            {"kv_caches_base_addr": [1 << 40]},
            {"block_lens": [128, 128]},
            {"block_lens": [128, 0, 128]},
            {"block_lens": [128, 128, 257]},
            {"block_strides": [256, 256, 127]},
            {"block_strides": [256, 256, 2**62]},
            {"block_strides": []},
            {"num_blocks": 0},
            {"num_blocks": 2**31},
            {"num_blocks": 16.0},
            {"block_size": 0},
            {"physical_blocks_per_logical_kv_block": 0},
            {"region_num_blocks": [16, 16]},
            {"region_num_blocks": [16, 16, 0]},
            {"region_group_ids": [0]},
            {"region_group_ids": [0, 0, -2]},
            {"region_names": ["a", "b"]},
            {"region_names": ["a", "b", "c\n"]},
            {"region_members": [["a"], ["b"]]},
            {"region_mem_types": ["DRAM", "DRAM"]},
            {"region_mem_types": ["DRAM", "DRAM", "FILE"]},
            {"ssm_sizes": [0]},
            {"ssm_sizes": [0, -1]},
            {"dcp_size": 0},
            {"pcp_size": -1},
            {"device_id": -1},
            {"kv_cache_layout": 5},
            {"packed_member_layouts": {"a": [0]}},
        ],
        ids=lambda changes: repr(changes)[:40],
    )
    def test_bounds(self, changes: dict[str, Any]) -> None:
        with pytest.raises(DecodeFailed) as caught:
            decode_agent_metadata(_encoded(**changes))
        assert len(caught.value.detail) <= 200

    def test_a_region_may_end_where_the_address_space_does(self) -> None:
        lengths = METADATA.block_strides[0] * (METADATA.num_blocks - 1) + METADATA.block_lens[0]
        last = NUMBER_MAX - lengths
        decode_agent_metadata(_encoded(kv_caches_base_addr=[last, 4096, 8192]))
        with pytest.raises(DecodeFailed, match="past the end of the address space"):
            decode_agent_metadata(_encoded(kv_caches_base_addr=[last + 1, 4096, 8192]))

    def test_context_parallel_sizes_that_are_not_said_are_one(self) -> None:
        said = {key: value for key, value in WIRE.items() if key not in ("dcp_size", "pcp_size")}
        metadata = decode_agent_metadata(msgspec.msgpack.encode(said))
        assert (metadata.dcp_size, metadata.pcp_size) == (1, 1)

    @pytest.mark.parametrize(
        "field", ["engine_id", "agent_metadata", "kv_caches_base_addr", "block_lens", "num_blocks"]
    )
    def test_missing(self, field: str) -> None:
        with pytest.raises(DecodeFailed, match=field):
            decode_agent_metadata(msgspec.msgpack.encode({key: value for key, value in WIRE.items() if key != field}))

    @pytest.mark.parametrize(
        ("changes", "field", "local", "remote"),
        [
            (
                {"packed_member_layouts": {"layers.0": (0, 128)}},
                "place and length of layers.0 in a row of layers",
                "none",
                "(0, 128)",
            ),
            ({"ple_block_len": 64}, "ple_block_len", "None", "64"),
            ({"ssm_sizes": (64, 128)}, "ssm_sizes of 2 ranks", "(0, 0)", "(64, 128)"),
            ({"region_names": None}, "region_names", "required", "not sent"),
            ({"region_mem_types": None}, "region_mem_types", "required", "not sent"),
            ({"region_num_blocks": None}, "region_num_blocks", "required", "not sent"),
            ({"region_group_ids": None}, "region_group_ids", "required", "not sent"),
            ({"region_group_ids": [0, 1, 0]}, "cache group of layers.1", "0", "1"),
            ({"region_group_ids": [0, 0, -1]}, "cache group of layers.2", "0", "-1"),
            (
                {"region_names": ["layers.0", "layers.1", "layers.7"]},
                "KV cache region layers.7",
                "absent",
                "present",
            ),
            (
                {"region_names": ["layers.0", "layers.1", "layers.7"], "region_members": []},
                "KV cache region layers.7",
                "absent",
                "present",
            ),
            (
                {"region_members": [["layers.0"], ["layers.1"], ["layers.7"]]},
                "KV cache region layers.7",
                "absent",
                "present",
            ),
            (
                {"region_names": ["layers.0", "layers.1", "layers.1"]},
                "number of KV cache regions of layers.1",
                "1",
                "2",
            ),
            (
                {"region_members": [["layers.0"], ["layers.1"], ["layers.1"]]},
                "KV cache region of layers.1",
                "layers.1",
                "layers.2",
            ),
            ({"region_members": [["layers.0"], [], ["layers.2"]]}, "KV cache region layers.1", "absent", "present"),
            (
                {"region_members": [["layers.0", "layers.1"], ["layers.0"], ["layers.2"]]},
                "block length of layers.0 on rank 1 of 2",
                "192",
                "128",
            ),
            ({"kv_cache_layout": "NHD"}, "kv_cache_layout", "a known one", "NHD"),
            ({"kv_cache_layout": "LBHCN"}, "kv_cache_layout", "a known one", "LBHCN"),
            ({"block_lens": [128, 64, 128]}, "block length of layers.1 on rank 1 of 2", "128", "64"),
            ({"block_lens": [128, 128, 256]}, "block length of layers.2 on rank 1 of 2", "128", "256"),
            ({"block_size": 64}, "block length of layers.0 on rank 1 of 2", "256", "128"),
            ({"block_size": 1 << 20}, "block length of layers.0 on rank 1 of 2", str(4 << 20), "128"),
        ],
    )
    def test_what_the_model_would_not_have_is_refused(
        self, changes: dict[str, Any], field: str, local: str, remote: str
    ) -> None:
        with pytest.raises(LayoutMismatch) as caught:
            _understood(_encoded(**changes))
        assert (caught.value.field, caught.value.local, caught.value.remote) == (field, local, remote)
        assert f"{local} here and {remote} there" in str(caught.value)

    @pytest.mark.parametrize("members", [[], [["layers.0"], ["layers.1"]]])
    def test_a_missing_layer_is_seen_by_the_plan(self, members: list[list[str]]) -> None:
        """A rank of a pipeline stage may have some of the layers; but nobody has this one."""
        changes: dict[str, Any] = {
            key: values[:2] for key, values in WIRE.items() if isinstance(values, list) and len(values) == 3
        }
        found = _understood(_encoded(**changes | {"region_members": members}))
        decode = msgspec.structs.replace(LAYOUT, engine_id="decode")
        with pytest.raises(LayoutMismatch, match=r"KV cache of layers\.2 is present here and absent there"):
            plan_engine(decode, [found])

    def test_a_region_twice_is_refused(self) -> None:
        """Pieces of both would be taken for replicas of each other."""
        names = ["layers.0", "layers.1", "layers.2", "layers.2"]
        lists: dict[str, Any] = {
            key: values + values[-1:] for key, values in WIRE.items() if isinstance(values, list) and len(values) == 3
        }
        with pytest.raises(LayoutMismatch, match=r"number of KV cache regions of layers\.2 is 1 here and 2 there"):
            _understood(_encoded(**lists | {"region_names": names, "region_members": [[name] for name in names]}))

    @on_any_machine
    @given(
        st.lists(st.integers(1, 600), min_size=3, max_size=3),
        st.integers(1, 256),
        st.integers(1, 64),
        st.sampled_from(["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC", "LBHN"]),
    )
    def test_pieces_lie_in_the_blocks(self, lengths: list[int], tokens: int, ratio: int, layout: str) -> None:
        """Whatever the sizes say: refused, or a layout that stays inside of what was advertised."""
        changes = {"block_lens": lengths, "block_strides": [600] * 3, "block_size": tokens, "kv_cache_layout": layout}
        try:
            found = _understood(_encoded(physical_blocks_per_logical_kv_block=ratio, **changes))
        except LayoutMismatch:
            return
        for region in found.regions:
            for piece in region.pieces:
                end = piece.offset_bytes + (tokens - 1) * piece.token_stride_bytes + piece.bytes_per_unit
                assert 0 <= piece.offset_bytes < end <= region.block_length_bytes <= region.block_stride_bytes

    def test_sizes_of_a_large_model(self) -> None:
        """Ten times as many regions as any model has decode; a limit that is too tight would show here."""
        many = side(REGIONS_MAX)
        metadata = decode_agent_metadata(encode_agent_metadata(describe(many.layout, bytes(1 << 20))))
        assert layout_from_metadata(metadata, rank=RankId(0, 1), tp_size=2, local=many) == many.layout


MANY = 700_000
"""Elements of a list, each of which takes a few bytes in a reply."""

LONG_LISTS: dict[str, Any] = {
    "kv_caches_base_addr": 4096,
    "block_lens": 4096,
    "block_strides": 4096,
    "region_num_blocks": 4096,
    "region_group_ids": 4096,
    "region_names": "ab",
    "region_mem_types": "DRAM",
}


@pytest.fixture(scope="module")
def largest() -> int:
    """Bytes that are taken to decode the reply of an engine with as many regions and layers as there may be."""
    many = side(REGIONS_MAX)
    name = "language_model.model.layers.{}.self_attn.attn".format
    layer = LayerIdentity(
        group=0,
        dtype="fp8_e4m3",
        order="K and V in slots of their own",
        k_scales=(0.1,),
        v_scales=(0.1,),
        content_bytes=(128, 128),
    )
    layers = {name(number): layer for number in range(LAYERS_MAX)}
    identity = KvIdentity(factors={"model": "m" * 256}, layers=layers, group_tokens=(TOKENS,))
    metadata = msgspec.structs.replace(
        describe(many.layout, bytes(1 << 20)),
        region_names=list(layers),
        region_members=[[name] for name in layers],
    )
    payload = encode_payload("hash", encode_agent_metadata(metadata), msgspec.structs.replace(ACTOR, identity=identity))
    with Work() as work:
        reply = _decode((payload, b""))
    assert (reply.metadata, reply.actor.identity) == (metadata, identity)
    return work.peak_bytes


class TestWhatAHostileReplyCosts:
    """Whoever answers at the address in a request may send anything, and whatever decodes it keeps the interpreter from
    the engine: so it may not build more than for the largest reply that an engine sends."""

    def _refused(self, payload: bytes, largest: int) -> HandshakeMalformed:
        with Work() as work:
            failure = _failure((payload, b""))
        assert isinstance(failure, HandshakeMalformed)
        # The metadata is taken out of the payload as it is.
        assert work.peak_bytes <= largest + len(payload)
        with pytest.raises(DecodeFailed, match=re.escape(failure.detail)):
            decode_advertisement((payload, b""))
        return failure

    @staticmethod
    def _with_metadata(**changes: Any) -> bytes:
        return encode_payload("hash", _encoded(**changes), ACTOR)

    def test_every_list_is_tried(self) -> None:
        lists = {key for key, value in WIRE.items() if isinstance(value, list | tuple)}
        assert lists - LONG_LISTS.keys() == {"region_members", "ssm_sizes"}

    @pytest.mark.parametrize("field", LONG_LISTS)
    def test_lists_have_as_many_elements_as_there_may_be_regions(self, field: str, largest: int) -> None:
        failure = self._refused(self._with_metadata(**{field: [LONG_LISTS[field]] * MANY}), largest)
        assert failure.field == "agent_metadata"
        assert failure.detail == f"Expected `array` of length <= {REGIONS_MAX} - at `$.{field}`"

    @pytest.mark.parametrize(
        ("members", "problem"),
        [
            ([["ab"] * MANY], f"region_members has {MANY} names, the limit is {MEMBERS_MAX}"),
            ([["ab"] * 256] * REGIONS_MAX, f"region_members has {256 * REGIONS_MAX} names, the limit is {MEMBERS_MAX}"),
            ([[]] * MANY, f"Expected `array` of length <= {REGIONS_MAX}"),
        ],
        ids=["of one region", "of all regions", "regions"],
    )
    def test_members_are_bounded_over_all_regions(self, members: list[list[str]], problem: str, largest: int) -> None:
        assert self._refused(self._with_metadata(region_members=members), largest).detail == problem

    def test_a_field_comes_once(self, largest: int) -> None:
        names = msgspec.msgpack.encode("region_names") + msgspec.msgpack.encode(["a"] * REGIONS_MAX)
        whole = _encoded()
        fields = len(WIRE)
        assert whole[:3] == b"\xde" + fields.to_bytes(2, "big")
        for times, problem in ((1, "a field is there twice"), (300, f"{fields + 300} fields, the limit is 64")):
            metadata = b"\xde" + (fields + times).to_bytes(2, "big") + whole[3:] + names * times
            assert self._refused(encode_payload("hash", metadata, ACTOR), largest).detail == problem

    def test_what_is_not_nixls_own_is_small(self, largest: int) -> None:
        """Also what is not understood: it is looked through."""
        failure = self._refused(self._with_metadata(later=bytes(FACTS_BYTES_MAX)), largest)
        assert re.fullmatch(rf"\d+ bytes beside agent_metadata, the limit is {FACTS_BYTES_MAX}", failure.detail)
        assert _decode((self._with_metadata(agent_metadata=bytes(AGENT_BYTES_MAX)), b""))

    def test_what_is_said_beside_the_metadata_is_small(self, largest: int) -> None:
        """Factors of scales are many numbers in few bytes."""
        layers = {str(number): {"dtype": "x", "k_scales": [1] * 1024, "v_scales": [1] * 1024} for number in range(600)}
        actor = ACTOR_WIRE | {"identity": {"factors": {}, "layers": layers}}
        payload = {"compatibility_hash": "hash", "agent_metadata_bytes": _encoded(), "actor": actor}
        failure = self._refused(msgspec.msgpack.encode(payload), largest)
        assert failure.field == "payload"
        assert failure.detail.endswith(f"bytes beside agent_metadata_bytes, the limit is {EXTENSION_BYTES_MAX}")

    def test_the_largest_reply_is_taken_from_the_side_channel(self) -> None:
        assert PAYLOAD_BYTES_MAX <= REPLY_FRAME_BYTES_MAX


def _understood(metadata: bytes) -> RankLayout:
    """What our rank, which is like the one that sent it, makes of the metadata."""
    return layout_from_metadata(decode_agent_metadata(metadata), rank=RankId(0, 1), tp_size=2, local=SIDE)


class TestBoundedText:
    @pytest.mark.parametrize(
        ("value", "rendered"),
        [
            (None, "None"),
            (True, "True"),
            (-5, "-5"),
            pytest.param(10**5000, "an integer of 16610 bits", id="huge integer"),
            (float("nan"), "nan"),
            ("a\nb", r"'a\nb'"),
            (b"\0", r"b'\x00'"),
            ([1, [2, [3, [4]]], 5, 6], "list of 4 [1, [2, list of 2 [...]], 5, ...]"),
            ({"a": 1, "b": 2}, "{'a': ..., 'b': ...}"),
            (object(), "a value of type object"),
        ],
    )
    def test_rendering(self, value: Any, rendered: str) -> None:
        assert render_untrusted(value) == rendered

    @on_any_machine
    @given(st.recursive(st.none() | st.integers() | st.text() | st.binary() | st.floats(), st.lists, max_leaves=20))
    def test_is_bounded_and_printable(self, value: Any) -> None:
        text = render_untrusted(value, 40)
        assert len(text) <= 40
        assert text.isprintable()

    @on_any_machine
    @given(st.text())
    def test_shortening(self, text: str) -> None:
        assert len(shorten(text, 30)) <= 30
        assert shorten(text, 30).isprintable()
        if len(text) <= 30 and text.isprintable():
            assert shorten(text, 30) == text
