"""What we register and advertise, field by field against the built-in connector on the same real KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)

from connector.layout.geometry import RankId
from connector.layout.landing import Permute
from connector.layout.remote import layout_from_metadata
from connector.staging import advertised_layout_name
from connector.unsupported import UnsupportedCache
from connector.wire.handshake import decode_reply, encode_payload, encode_reply
from connector.wire.metadata import decode_agent_metadata, encode_agent_metadata
from connector.worker import cache_regions
from connector.worker.host_staging import make_host_buffers
from connector.worker.registration import Registration, derive_registration, require_supported
from tests.rig.facts import facts
from tests.rig.layouts import plan_engine
from tests.unit.builtin_worker import builtin_registration, differing_fields
from tests.unit.vllm_setup import (
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    allocate,
    allow_kernel_block_size,
    attention_spec,
    cache_config,
    engine_config,
    layer_name,
    single_rank,
    write_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    config = engine_config(model)
    with single_rank(config, tmp_path_factory.mktemp("rendezvous")):
        yield config


def _with_layout(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(config.cache_config, "kv_cache_layout", layout)


CASES = [
    pytest.param("LBHNC", LAYERS, 64, {}, id="layers outermost"),
    pytest.param("LBHNC", 1, 64, {}, id="one layer"),
    pytest.param("LBHNC", LAYERS, 32, {}, id="two kernel blocks per block"),
    pytest.param("LBHNC", 1, 64, {"page_size_padded": 70_000 * 4}, id="padded pages, one layer"),
    pytest.param("BLHNC", LAYERS, 64, {"page_size_padded": 70_000 * 4}, id="padded pages, layers within a block"),
    pytest.param("LBNHC", LAYERS, 64, {}, id="tokens before heads"),
    pytest.param("LBNHC", 1, 64, {}, id="tokens before heads, one layer"),
    pytest.param("BLHNC", LAYERS, 64, {}, id="layers within a block"),
    pytest.param("BLNHC", LAYERS, 64, {}, id="layers within a block, tokens before heads"),
    pytest.param("BHLNC", LAYERS, 64, {}, id="layers within a head"),
]


@pytest.mark.parametrize(("layout", "layers", "kernel_block_size", "spec_changes"), CASES)
def test_equals_the_builtin_registration(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    layers: int,
    kernel_block_size: int,
    spec_changes: dict[str, int],
) -> None:
    _with_layout(config, monkeypatch, layout)
    if kernel_block_size != 64:
        allow_kernel_block_size(monkeypatch, kernel_block_size)
    caches = cache_config(attention_spec(64, **spec_changes), layers=layers, layout=layout)
    tensors = allocate(caches, layout=layout, kernel_block_size=kernel_block_size)

    builtin, builtin_hash, builtin_ranges = builtin_registration(config, caches, tensors)
    ours = derive_registration(config, caches, tensors)

    advertised = ours.agent_metadata(builtin.agent_metadata)
    assert differing_fields(advertised, builtin) == {"region_members"}
    as_read = msgspec.msgpack.Decoder(NixlAgentMetadata).decode(encode_agent_metadata(advertised))
    assert differing_fields(advertised, as_read) == set()
    assert ours.compatibility_hash == builtin_hash
    assert [(r.address, r.length_bytes) for r in ours.ranges] == builtin_ranges
    assert ours.layout.memory_kind == "DRAM"


@pytest.mark.parametrize(("field", "value"), [("enable_expert_parallel", True), ("data_parallel_size", 2)])
def test_where_experts_and_other_engines_are_changes_nothing(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    """Engines that differ in it exchange KV, as built-in ones do."""
    caches = cache_config(attention_spec())
    tensors = allocate(caches)
    before = derive_registration(config, caches, tensors)
    monkeypatch.setattr(config.parallel_config, field, value)
    after = derive_registration(config, caches, tensors)
    assert msgspec.structs.asdict(after) == msgspec.structs.asdict(before)
    assert after.compatibility_hash == builtin_registration(config, caches, tensors)[1]


def test_regions_hold_the_bytes_of_their_blocks(config: VllmConfig) -> None:
    """Independent of the built-in connector: the address of each block is where the tensor's data is."""
    caches = cache_config(attention_spec())
    tensors = allocate(caches)
    layout = derive_registration(config, caches, tensors).layout
    assert [region.name for region in layout.regions] == [layer_name(index) for index in range(LAYERS)]
    for region in layout.regions:
        for block in (0, 7, 15):
            assert tensors[region.name][block].data_ptr() == region.base_address + block * region.block_stride_bytes
        assert region.block_length_bytes == tensors[region.name][0].nbytes == 64 * KV_HEADS * 2 * HEAD_SIZE * 4


def test_padding_is_part_of_a_block(config: VllmConfig) -> None:
    """The built-in connector cannot register this one; ours moves the padding along."""
    caches = cache_config(attention_spec(page_size_padded=70_000 * 4), layers=2)
    first, second = derive_registration(config, caches, allocate(caches)).layout.regions
    assert first.block_length_bytes == first.block_stride_bytes == 280_000
    assert second.base_address == first.base_address + 16 * 280_000


def test_kernel_blocks_are_told_from_blocks(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_kernel_block_size(monkeypatch, 32)
    caches = cache_config(attention_spec(64))
    layout = derive_registration(config, caches, allocate(caches, kernel_block_size=32)).layout
    assert (layout.kernel_block_size_tokens, layout.kernel_blocks_per_block) == (32, 2)
    assert {region.num_blocks for region in layout.regions} == {32}


def test_a_peer_understands_what_we_advertise(config: VllmConfig) -> None:
    """The whole way: register, encode, decode, plan; the result reads each layer of the peer into ours."""
    caches = cache_config(attention_spec())
    theirs = derive_registration(config, caches, allocate(caches))
    ours = _renamed(derive_registration(config, caches, allocate(caches)), "decode-engine")
    agent_metadata = encode_agent_metadata(theirs.agent_metadata(b"agent"))
    payload = encode_payload(theirs.compatibility_hash, agent_metadata, facts(identity=theirs.identity))
    reply = decode_reply(
        encode_reply(payload, 1.0),
        peer="prefill-engine",
        address="h:1",
        expected_hash=ours.compatibility_hash,
        identity=ours.identity,
    )
    assert layout_from_metadata(reply.metadata, rank=RankId(0, 0), tp_size=1, local=ours) == theirs.layout
    (plan,) = plan_engine(ours.layout, [theirs.layout]).reads
    assert [run.address for run in plan.remote_runs] == [r.base_address for r in theirs.layout.regions]
    assert sum(run.length_bytes for run in plan.local_runs) == LAYERS * attention_spec().page_size_bytes


def test_builtin_metadata_is_understood(config: VllmConfig) -> None:
    caches = cache_config(attention_spec())
    tensors = allocate(caches)
    builtin, _, _ = builtin_registration(config, caches, tensors)
    metadata = decode_agent_metadata(msgspec.msgpack.encode(builtin))
    ours = derive_registration(config, caches, tensors)
    assert layout_from_metadata(metadata, rank=RankId(0, 0), tp_size=1, local=ours) == ours.layout


def test_layers_of_different_sizes_in_one_group(config: VllmConfig) -> None:
    """A group whose layers differ in page size comes as a spec per layer."""
    specs = {layer_name(0): attention_spec(), layer_name(1): attention_spec(head_size=64)}
    names = list(specs)
    caches = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, UniformTypeKVCacheSpecs(64, specs))]
    )
    tensors = {name: torch.zeros(4, KV_HEADS, 64, 2 * specs[name].head_size) for name in names}
    builtin, _, builtin_ranges = builtin_registration(config, caches, tensors)
    ours = derive_registration(config, caches, tensors)
    assert [region.block_length_bytes for region in ours.layout.regions] == builtin.block_lens
    assert len(set(builtin.block_lens)) == 2
    assert [(r.address, r.length_bytes) for r in ours.ranges] == builtin_ranges


def test_layers_that_share_anothers_cache_are_skipped(config: VllmConfig) -> None:
    caches = cache_config(attention_spec(), layers=2)
    tensors = allocate(caches)
    tensors["model.layers.2.self_attn.attn"] = tensors[layer_name(1)]
    assert len(derive_registration(config, caches, tensors).layout.regions) == 2


def _refusal(config: VllmConfig, caches: KVCacheConfig, tensors: dict[str, torch.Tensor]) -> UnsupportedCache:
    with pytest.raises(UnsupportedCache) as caught:
        derive_registration(config, caches, tensors)
    return caught.value


def test_refuses_key_and_value_in_separate_segments(config: VllmConfig) -> None:
    caches = cache_config(attention_spec())
    names = caches.kv_cache_groups[0].layer_names
    tensors = {name: torch.zeros(2, 16, KV_HEADS, 64, HEAD_SIZE) for name in names}
    assert "shape" in _refusal(config, caches, tensors).field


def test_refuses_too_few_blocks(config: VllmConfig) -> None:
    caches = cache_config(attention_spec())
    tensors = {name: cache[:15] for name, cache in allocate(caches).items()}
    assert "(15, 4, 64, 64)" in str(_refusal(config, caches, tensors))


def test_refuses_a_missing_layer(config: VllmConfig) -> None:
    caches = cache_config(attention_spec())
    tensors = allocate(caches)
    del tensors[layer_name(3)]
    assert _refusal(config, caches, tensors).found == layer_name(3)


@pytest.mark.parametrize(
    ("layout", "advertised", "kernel_block_size", "spec_changes"),
    [
        pytest.param("LBHNC", "LBHNC", 64, {}, id="as on the device"),
        pytest.param("LBHNC", "LBHNC", 32, {}, id="two kernel blocks per block"),
        pytest.param("LBHNC", "LBHNC", 64, {"page_size_padded": 70_000 * 4}, id="without the padding of pages"),
        pytest.param("LBNHC", "LBNHC", 64, {}, id="tokens before heads"),
        pytest.param("LBNHC", "LBHNC", 32, {}, id="heads before tokens, unlike the device"),
    ],
)
def test_host_buffers_equal_the_builtin_ones(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    advertised: str,
    kernel_block_size: int,
    spec_changes: dict[str, int],
) -> None:
    """What peers are told, but for addresses: each connector has buffers of its own.

    The built-in one has given its buffers back by then, so that the allocator may hand out the same addresses again.
    """
    _with_layout(config, monkeypatch, layout)
    allow_kernel_block_size(monkeypatch, kernel_block_size)
    caches = cache_config(attention_spec(**spec_changes), layout=layout, layers=1 if spec_changes else LAYERS)
    tensors = allocate(caches, layout=layout, kernel_block_size=kernel_block_size)
    monkeypatch.setattr(current_platform, "device_type", "cuda")
    monkeypatch.setattr(config.kv_transfer_config, "enable_permute_local_kv", layout != advertised)
    builtin, builtin_hash, builtin_ranges = builtin_registration(config, caches, tensors)
    ours = _staged(config, caches, tensors)
    metadata = ours.agent_metadata(builtin.agent_metadata)
    addresses = metadata.kv_caches_base_addr
    assert differing_fields(metadata, builtin) - {"kv_caches_base_addr"} == {"region_members"}
    assert metadata.kv_cache_layout == advertised
    assert ours.compatibility_hash == builtin_hash
    assert [r.length_bytes for r in ours.ranges] == [length for _, length in builtin_ranges]
    assert [r.address for r in ours.ranges] == addresses
    assert ours.layout.memory_kind == "DRAM"
    assert not set(addresses) & {cache.data_ptr() for cache in tensors.values()}


def test_layers_that_share_anothers_cache_have_no_host_buffer(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = cache_config(attention_spec(), layers=2)
    tensors = allocate(caches)
    tensors["model.layers.2.self_attn.attn"] = tensors[layer_name(1)]
    monkeypatch.setattr(current_platform, "device_type", "cuda")
    assert len(_staged(config, caches, tensors).ranges) == 2


@pytest.mark.parametrize(
    ("kind", "option", "expected"),
    [
        ("DRAM", False, Permute.NEVER),
        ("VRAM", False, Permute.BLOCK_SIZES),
        ("DRAM", True, Permute.ORDERS),
        ("VRAM", True, Permute.ORDERS),
    ],
)
def test_when_blocks_are_permuted(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, kind: str, option: bool, expected: Permute
) -> None:
    """On a processor the engine thread would wait for it, so there it has to be asked for."""
    monkeypatch.setattr(cache_regions, "memory_kind", lambda cache: kind)
    monkeypatch.setattr(config.kv_transfer_config, "enable_permute_local_kv", option)
    caches = cache_config(attention_spec())
    assert derive_registration(config, caches, allocate(caches)).permute is expected


@pytest.mark.parametrize(("platform_says", "kind"), [(None, "VRAM"), ("VRAM", "VRAM"), ("DRAM", "DRAM")])
def test_a_platform_may_say_what_nixl_calls_its_memory(
    monkeypatch: pytest.MonkeyPatch, platform_says: str | None, kind: str
) -> None:
    """vLLM's own say nothing. Memory of the host, as of host buffers, is what it is on any platform."""
    assert current_platform.get_nixl_memory_type() is None
    monkeypatch.setattr(current_platform, "get_nixl_memory_type", lambda: platform_says)
    assert cache_regions.memory_kind(torch.empty(1, device="meta")) == kind
    assert cache_regions.memory_kind(torch.empty(1)) == "DRAM"


def test_refuses_a_memory_that_no_descriptor_can_name(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "get_nixl_memory_type", lambda: "OBJ")
    caches = cache_config(attention_spec())
    on_the_host = allocate(caches)
    on_a_device = {name: cache.to("meta") for name, cache in on_the_host.items()}
    refusal = _refusal(config, caches, on_a_device)
    assert (refusal.field, refusal.found) == ("NIXL memory type of the platform", "OBJ")
    assert "DRAM or VRAM" in str(refusal)
    assert derive_registration(config, caches, on_the_host).layout.memory_kind == "DRAM"


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "BHLNC"])
def test_refuses_host_buffers_with_blocks_outermost(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    _with_layout(config, monkeypatch, layout)
    caches = cache_config(attention_spec(), layout=layout)
    tensors = allocate(caches, layout=layout)
    monkeypatch.setattr(current_platform, "device_type", "cuda")
    with pytest.raises(UnsupportedCache, match=f"layout {layout}; .*LBHNC"):
        _staged(config, caches, tensors)


def test_refuses_the_buffers_of_another_device(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.kv_transfer_config, "kv_buffer_device", "cuda")
    with pytest.raises(UnsupportedCache, match="kv_buffer_device cuda"):
        require_supported(config, cache_config(attention_spec()))


@pytest.mark.parametrize(
    ("stages", "speculates", "runner", "device", "is_refused"),
    [
        (2, True, "V1", "cuda", True),
        (1, True, "V1", "cuda", False),
        (2, False, "V1", "cuda", False),
        (2, True, "V2", "cuda", False),
        (2, True, "V1", "cpu", False),
    ],
)
def test_refuses_host_buffers_that_not_all_stages_would_write(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    speculates: bool,
    runner: str,
    device: str,
    is_refused: bool,
) -> None:
    """With drafts vLLM's V1 model runner calls `wait_for_save` in the last stage only."""
    monkeypatch.setattr(config.kv_transfer_config, "kv_role", "kv_producer")
    monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", stages)
    monkeypatch.setattr(config, "speculative_config", object() if speculates else None)
    monkeypatch.setattr(type(config), "use_v2_model_runner", runner == "V2")
    monkeypatch.setattr(current_platform, "device_type", device)
    caches = cache_config(attention_spec())
    if not is_refused:
        require_supported(config, caches)
        return
    with pytest.raises(UnsupportedCache, match=r"pipeline_parallel_size 2.*only the last stage"):
        require_supported(config, caches)


def test_takes_the_allocator_of_sleep_mode_without_it(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of vLLM's own allocator stays where it is unless the engine sleeps."""
    monkeypatch.setattr(config.model_config, "enable_cumem_allocator", True)
    require_supported(config, cache_config(attention_spec()))


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [("host_resident", True, "in memory of the host"), ("enable_kv_transfer", False, "on the device only")],
)
def test_refuses_the_groups_of_hisparse(config: VllmConfig, field: str, value: bool, where: str) -> None:
    caches = cache_config(attention_spec())
    setattr(caches.kv_cache_groups[0], field, value)
    with pytest.raises(UnsupportedCache, match=rf"group .*{layer_name(0)}.*{where}.*without HiSparse"):
        require_supported(config, caches)


def test_refuses_a_model_without_a_cache(config: VllmConfig) -> None:
    """As encoders are, whose engines pool."""
    caches = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    with pytest.raises(UnsupportedCache, match=r"a model without a KV cache; .*leave --kv-transfer-config out"):
        require_supported(config, caches)


def _staged(config: VllmConfig, caches: KVCacheConfig, tensors: dict[str, torch.Tensor]) -> Registration:
    return derive_registration(config, caches, make_host_buffers(caches, tensors, advertised_layout_name(config)))


def _renamed(registration: Registration, engine_id: str) -> Registration:
    layout = msgspec.structs.replace(registration.layout, engine_id=engine_id)
    return msgspec.structs.replace(registration, layout=layout)
