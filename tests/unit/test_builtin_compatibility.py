"""Our wire formats against the built-in connector's own encoders and decoders, on real vLLM configurations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlConnectorMetadata,
    NixlHandshakePayload,
    compute_nixl_compatibility_hash,
)

from connector.wire.handshake import (
    GET_METADATA,
    MetadataRequest,
    decode_reply,
    encode_error,
    encode_payload,
    encode_reply,
    encode_request,
    parse_request,
)
from connector.wire.metadata import AgentMetadata, decode_agent_metadata, encode_agent_metadata
from connector.wire.params import ParamsKind, RemotePrefill, build_remote_prefill, classify
from connector.worker.compatibility_hash import compatibility_hash
from tests.rig.facts import NO_IDENTITY, facts
from tests.unit.vllm_setup import engine_config, layer_name, write_model

BUILTIN_METADATA = NixlAgentMetadata(
    engine_id="engine",
    agent_metadata=b"\x00nixl\xff",
    kv_caches_base_addr=[4096, 1 << 40],
    device_id=0,
    num_blocks=8,
    block_lens=[64, 64],
    block_strides=[64, 128],
    kv_cache_layout="LBHNC",
    block_size=32,
    ssm_sizes=(0, 0),
    attn_backend_name="CPU_ATTN",
    physical_blocks_per_logical_kv_block=2,
    region_num_blocks=[8, 8],
    region_group_ids=[0, 0],
    region_names=[layer_name(0), layer_name(1)],
    region_mem_types=["DRAM", "DRAM"],
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "target": write_model(root / "target"),
        "draft": write_model(
            root / "draft",
            architectures=["LlamaForCausalLMEagle3"],
            num_hidden_layers=1,
            draft_vocab_size=512,
            eagle_aux_hidden_state_layer_ids=[1, 5, 9],
        ),
    }


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "no hybrid manager": {"disable_hybrid_kv_cache_manager": True},
    "eagle": {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 2}},
}


def _configure(models: dict[str, Path], name: str) -> Any:
    changes = dict(CONFIGURATIONS[name])
    if "speculative_config" in changes:
        changes["speculative_config"] = {**changes["speculative_config"], "model": str(models["draft"])}
    return engine_config(models["target"], **changes)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN"])
def test_hash_equals_the_builtin_one(models: dict[str, Path], name: str, backend: str) -> None:
    config = _configure(models, name)
    assert compatibility_hash(config, backend) == compute_nixl_compatibility_hash(config, backend, transfer_mode="pull")


def test_configurations_have_different_hashes(models: dict[str, Path]) -> None:
    """Guards the test above: a hash of constants would pass it."""
    hashes = {compatibility_hash(_configure(models, name), "CPU_ATTN") for name in CONFIGURATIONS}
    hashes.add(compatibility_hash(_configure(models, "plain"), "FLASH_ATTN"))
    assert len(hashes) == len(CONFIGURATIONS) + 1


def test_eagle_configuration_reaches_the_hash(models: dict[str, Path]) -> None:
    """Guards against a speculative configuration that vLLM does not take for an EAGLE-like one."""
    assert _configure(models, "eagle").speculative_config.use_eagle()


def test_metadata_has_the_builtin_fields_and_types() -> None:
    ours = {field.name: field for field in msgspec.structs.fields(AgentMetadata)}
    builtin = {field.name for field in msgspec.inspect.type_info(NixlAgentMetadata).fields}
    assert set(ours) == builtin


def test_builtin_decodes_our_metadata() -> None:
    ours = decode_agent_metadata(msgspec.msgpack.encode(BUILTIN_METADATA))
    again = msgspec.msgpack.Decoder(NixlAgentMetadata).decode(encode_agent_metadata(ours))
    assert again == BUILTIN_METADATA


def test_builtin_decodes_our_payload_and_ignores_the_extension() -> None:
    payload = encode_payload("hash", msgspec.msgpack.encode(BUILTIN_METADATA), facts())
    assert "actor" in msgspec.msgpack.decode(payload)
    decoded = msgspec.msgpack.Decoder(NixlHandshakePayload).decode(payload)
    assert decoded.compatibility_hash == "hash"
    assert msgspec.msgpack.Decoder(NixlAgentMetadata).decode(decoded.agent_metadata_bytes) == BUILTIN_METADATA


def test_builtin_takes_our_error_for_a_malformed_payload() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.Decoder(NixlHandshakePayload).decode(encode_error("no such rank"))


def test_we_decode_the_reply_of_a_builtin_listener() -> None:
    payload = NixlHandshakePayload("hash", msgspec.msgpack.encode(BUILTIN_METADATA))
    frames = (msgspec.msgpack.encode(payload), msgspec.msgpack.encode(time.perf_counter()))
    reply = decode_reply(frames, peer="engine", address="host:1", expected_hash="hash", identity=NO_IDENTITY)
    assert reply.actor is None
    assert msgspec.to_builtins(reply.metadata) == msgspec.to_builtins(BUILTIN_METADATA)


def test_request_frames_are_the_builtin_ones() -> None:
    assert GET_METADATA == GET_META_MSG
    assert encode_request(2, 3) == msgspec.msgpack.encode((GET_META_MSG, 2, 3))
    assert parse_request([msgspec.msgpack.encode((GET_META_MSG, 2, 3))]) == MetadataRequest(2, 3)
    assert parse_request([msgspec.msgpack.encode((GET_META_MSG, 3))]) == MetadataRequest(0, 3)


def test_clock_frame_is_what_the_builtin_consumer_reads() -> None:
    assert msgspec.msgpack.decode(encode_reply(b"payload", 12.5)[1]) == 12.5


def test_builtin_consumer_accepts_our_params() -> None:
    lent = RemotePrefill(
        engine_id="engine",
        request_id="request",
        host="127.0.0.1",
        port=5600,
        block_ids=((1, 2, 3),),
        tp_size=2,
        num_tokens=130,
        lease_number=2**63 - 1,
    )
    params = build_remote_prefill(lent)
    assert classify(params) is ParamsKind.REMOTE_PREFILL
    metadata = NixlConnectorMetadata()
    metadata.add_new_req_to_recv("local", ([7, 8, 9],), params)
    request = metadata.reqs_to_recv["local"]
    assert (request.tp_size, request.dcp_size, request.pp_size) == (2, 1, 1)
    assert request.remote is not None
    assert request.remote.block_ids == [[1, 2, 3]]
    assert (request.remote.host, request.remote.port) == ("127.0.0.1", 5600)
    assert (request.remote.engine_id, request.remote.request_id) == ("engine", "request")
    assert (request.remote.blocks_expiry_time, request.remote.num_tokens) == (None, 130)
