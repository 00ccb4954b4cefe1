"""What an engine tells of its KV, from vLLM's own configurations and attention layers: one factor differs at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from transformers import Llama4Config, Llama4TextConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.model_executor.models.llama4 import Llama4ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.ops import triton_turboquant_decode
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker.gpu_worker import Worker as GpuWorker

from connector.families import layer_shapes, layer_specs
from connector.layout.shapes import latent
from connector.wire.handshake import incompatibilities
from connector.wire.identity import FACTORS_MAX, VALUE_LENGTH_MAX, KvIdentity
from connector.worker.cpu_attention import as_stored
from connector.worker.kv_identity import kv_identity
from connector.worker.registration import derive_registration
from tests.unit.cache_families import be_rank
from tests.unit.vllm_setup import (
    KV_HEADS,
    allocate,
    attention_layers,
    cache_config,
    engine_config,
    layer_name,
    single_rank,
    write_model,
)

LAYERS = 2


@pytest.fixture(scope="module", autouse=True)
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    config = engine_config(write_model(tmp_path_factory.mktemp("model")))
    with single_rank(config, tmp_path_factory.mktemp("rendezvous")):
        yield


def model(directory: Path, seed: int = 1, **changes: Any) -> Path:
    write_model(directory, **({"num_hidden_layers": LAYERS} | changes))
    generator = torch.Generator().manual_seed(seed)
    save_file({"model.embed": torch.randn(64, 64, generator=generator)}, directory / "model.safetensors")
    return directory


def layers_of(config: VllmConfig, head_size: int = 32, kv_heads: int = KV_HEADS) -> list[Attention]:
    return attention_layers(config, LAYERS, head_size, kv_heads)


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses FP8 in the cache on one without AVX-512. Nothing is computed here."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)


def identity(
    config: VllmConfig,
    change: Callable[[list[Attention]], None] = lambda layers: None,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> KvIdentity:
    """Of an engine with this configuration, after `change` to its attention layers."""
    config.compilation_config.static_forward_context.clear()
    layers = layers_of(config, kv_heads=KV_HEADS // tp_size)
    spec = layers[0].get_kv_cache_spec(config)
    caches = cache_config(spec, layers=LAYERS)
    CPUAttentionBackend.get_builder_cls()(spec, caches.kv_cache_groups[0].layer_names, config, torch.device("cpu"))
    change(layers)
    specs = layer_specs(caches)
    shapes = layer_shapes(caches, config.model_config, tp_size, prefix_caching=False)
    shapes = as_stored(shapes, specs, config)
    return kv_identity(config, "CPU_ATTN", specs, shapes, tp_rank=tp_rank, tp_size=tp_size, groups=())


def fields(ours: KvIdentity, theirs: KvIdentity) -> list[str]:
    return [each.field for each in incompatibilities(ours, theirs, enforce_factors=True)]


def test_two_copies_of_a_model_fit(tmp_path: Path) -> None:
    first, second = (identity(engine_config(model(tmp_path / name))) for name in ("first", "second"))
    assert first.factors["model"] != second.factors["model"]
    assert fields(first, second) == fields(second, first) == []


def test_a_cache_type_that_is_written_out_is_the_same_as_the_models(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    written = engine_config(path, dtype="bfloat16", kv_cache_dtype="bfloat16")
    assert fields(identity(engine_config(path, dtype="bfloat16")), identity(written)) == []


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("weights", {"seed": 2}),
        ("config.rope_parameters", {"rope_theta": 5000.0}),
        ("config.rms_norm_eps", {"rms_norm_eps": 0.5}),
    ],
)
def test_another_model_of_the_same_shape_is_named(tmp_path: Path, named: str, changes: dict[str, Any]) -> None:
    ours = identity(engine_config(model(tmp_path / "ours")))
    theirs = identity(engine_config(model(tmp_path / "theirs", **changes)))
    assert named in fields(ours, theirs)
    assert set(fields(ours, theirs)) <= {"model", "weights", "config.rope_parameters", "config.rope_theta", named}


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("dtype", {"dtype": "bfloat16"}),
        ("cache_dtype", {"kv_cache_dtype": "fp8"}),
        ("config.rope_parameters", {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}}),
        ("is_hma_enabled", {"disable_hybrid_kv_cache_manager": True}),
    ],
)
def test_other_arguments_are_named(tmp_path: Path, named: str, arguments: dict[str, Any]) -> None:
    path = model(tmp_path / "model")
    assert named in fields(identity(engine_config(path)), identity(engine_config(path, **arguments)))


@pytest.mark.parametrize(
    "arguments", [{"max_model_len": 1024}, {"seed": 7}, {"block_size": 32}, {"max_num_seqs": 3}, {"revision": "abc"}]
)
def test_arguments_that_change_no_kv_do_not_matter(tmp_path: Path, arguments: dict[str, Any]) -> None:
    path = model(tmp_path / "model")
    assert fields(identity(engine_config(path)), identity(engine_config(path, **arguments))) == []


@pytest.mark.parametrize("is_nested", [False, True], ids=["for all layers", "by type of layer"])
def test_the_longest_request_is_named_where_keys_depend_on_it(tmp_path: Path, *, is_nested: bool) -> None:
    """LongRoPE has two lists of factors: one for engines that allow no longer requests than the model was first trained
    on, and one for all others, which rotates short prompts by it too."""
    one = [1.0] * 16  # half the size of a head
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": one, "long_factor": one}
    rope["original_max_position_embeddings"] = 1024
    path = model(tmp_path / "model")
    short, as_short, long = (
        identity(_with_rope(engine_config(path, max_model_len=tokens), {"full_attention": rope} if is_nested else rope))
        for tokens in (512, 1024, 2048)
    )
    assert fields(short, as_short) == []
    (found,) = incompatibilities(short, long, enforce_factors=True)
    assert (found.field, found.local, found.remote) == ("long_rope", "short", "long")
    assert "--max-model-len" in found.advice


def _with_rope(config: VllmConfig, rope: dict[str, Any]) -> VllmConfig:
    config.model_config.hf_text_config.rope_parameters = rope
    return config


@pytest.fixture
def only_text_of_llama_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks at the class of a model when it makes its configuration, and that with images needs torchvision, which
    this project does not install."""
    models = ModelRegistry.models
    monkeypatch.setitem(models, "Llama4ForConditionalGeneration", models["Llama4ForCausalLM"])


def llama_4(directory: Path, **generation: Any) -> Path:
    """The files of a model with images, whose second layer has no rotary embedding."""
    text = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "intermediate_size_mlp": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 32,
        "vocab_size": 512,
        "interleave_moe_layer_step": LAYERS + 1,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": None,
        "max_position_embeddings": 1 << 17,
    }
    config = Llama4Config(text_config=text)
    config.architectures = ["Llama4ForConditionalGeneration"]
    config.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.mark.usefixtures("only_text_of_llama_4")
@pytest.mark.parametrize(
    ("arguments", "generation", "tuning"),
    [
        ({"max_model_len": 32768}, {}, "off"),
        ({"max_model_len": 32769}, {}, "on"),
        ({"override_generation_config": {"attn_temperature_tuning": True}}, {}, "on"),
        ({"max_model_len": 32769, "override_generation_config": {"attn_temperature_tuning": False}}, {}, "off"),
        ({}, {"attn_temperature_tuning": True}, "on"),
        ({"override_generation_config": {"attn_temperature_tuning": False}}, {"attn_temperature_tuning": True}, "off"),
    ],
)
def test_whether_llama_4_scales_its_queries_is_named(
    tmp_path: Path, arguments: dict[str, Any], generation: dict[str, Any], tuning: str
) -> None:
    """vLLM decides it when it makes the language model, whose configuration is a copy: nobody else sees the result. The
    queries of a layer change the keys of those behind it."""
    path = llama_4(tmp_path / "model", **generation)
    config = engine_config(path, **arguments)
    ours = identity(config)
    assert ours.factors["attn_temperature_tuning"] == tuning
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config):
        text = config.with_hf_config(config.model_config.hf_text_config, ["LlamaForCausalLM"])
        layers = Llama4ForCausalLM(vllm_config=text).model.layers
    assert [bool(layer.self_attn.attn_temperature_tuning) for layer in layers] == [False, tuning == "on"]


def made_to_fit(config: VllmConfig, tokens: int) -> VllmConfig:
    """As vLLM leaves the configuration in a worker with --max-model-len auto, once the layers have been made."""
    assert config.model_config.max_model_len > tokens
    GpuWorker.update_max_model_len(SimpleNamespace(model_config=config.model_config, model_runner=None), tokens)
    assert config.model_config.max_model_len == tokens
    return config


@pytest.mark.usefixtures("only_text_of_llama_4")
def test_with_an_automatic_length_that_counts_with_which_llama_4_was_made(tmp_path: Path) -> None:
    path = llama_4(tmp_path / "model")
    config = engine_config(path, max_model_len=-1)
    with set_current_vllm_config(config):
        text = config.with_hf_config(config.model_config.hf_text_config, ["LlamaForCausalLM"])
        layers = Llama4ForCausalLM(vllm_config=text).model.layers
    assert [bool(layer.self_attn.attn_temperature_tuning) for layer in layers] == [False, True]
    fitting = identity(made_to_fit(config, 4096))
    assert fitting.factors["attn_temperature_tuning"] == "on"
    assert fields(fitting, identity(engine_config(path, max_model_len=40000))) == []
    assert fields(fitting, identity(engine_config(path, max_model_len=4096))) == ["attn_temperature_tuning"]


def test_with_an_automatic_length_that_counts_with_which_rotary_factors_were_taken(tmp_path: Path) -> None:
    one = [1.0] * 16
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": one, "long_factor": one}
    path = model(tmp_path / "model")
    for limit, taken in ((1024, "long"), (2048, "short")):
        config = engine_config(path, max_model_len=-1)
        assert config.model_config.max_model_len == 2048
        of_limit = rope | {"original_max_position_embeddings": limit}
        fitting = identity(made_to_fit(_with_rope(config, of_limit), 512))
        assert fitting.factors["long_rope"] == taken


@pytest.mark.usefixtures("only_text_of_llama_4")
def test_engines_of_which_one_scales_the_queries_of_llama_4_do_not_fit(tmp_path: Path) -> None:
    path = llama_4(tmp_path / "model")
    short, as_short, long = (identity(engine_config(path, max_model_len=tokens)) for tokens in (512, 32768, 40000))
    assert fields(short, as_short) == []
    (found,) = incompatibilities(short, long, enforce_factors=True)
    assert (found.field, found.local, found.remote) == ("attn_temperature_tuning", "off", "on")
    for option in ("--max-model-len", "--override-generation-config"):
        assert option in found.advice


@pytest.mark.usefixtures("only_text_of_llama_4")
@pytest.mark.parametrize("is_for_text_only", [False, True])
def test_what_vllm_has_written_into_the_configuration_is_named_once(tmp_path: Path, *, is_for_text_only: bool) -> None:
    """A Llama 4 that has no images has one configuration only."""
    path = llama_4(tmp_path / "model")
    if is_for_text_only:
        text = Llama4Config.from_pretrained(path).text_config
        assert isinstance(text, Llama4TextConfig)
        text.architectures = ["Llama4ForCausalLM"]
        text.save_pretrained(path)
    configs = [engine_config(path, max_model_len=tokens) for tokens in (512, 40000)]
    for config in configs:
        config.model_config.hf_text_config.attn_temperature_tuning = config.model_config.max_model_len > 32768
    assert fields(*map(identity, configs)) == ["attn_temperature_tuning"]


def test_a_length_that_sizes_the_rotary_cache_alone_does_not_matter(tmp_path: Path) -> None:
    """vLLM writes it into the configuration of MiniMax-M2."""
    path = model(tmp_path / "model")
    configs = [engine_config(path, max_model_len=tokens) for tokens in (1024, 2048)]
    for config in configs:
        config.model_config.hf_config.max_model_len = config.model_config.max_model_len
    assert fields(*map(identity, configs)) == []


def test_quantization_is_named(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    quantized = engine_config(path)
    quantized.model_config.quantization = "fp8"
    assert fields(identity(engine_config(path)), identity(quantized)) == ["quantization"]


@pytest.mark.parametrize("names", [("awq", "awq_marlin", "auto_awq"), ("gptq", "gptq_marlin", "auto_gptq")])
def test_names_under_which_vllm_reads_the_same_files_do_not_matter(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = model(tmp_path / "model")
    configs = [engine_config(path) for _ in names]
    for config, name in zip(configs, names, strict=True):
        config.model_config.quantization = name
    ours, *others = map(identity, configs)
    assert [fields(ours, theirs) for theirs in others] == [[], []]


def test_the_draft_model_is_named(tmp_path: Path) -> None:
    def speculating(seed: int, drafts: int = 2) -> KvIdentity:
        draft = model(
            tmp_path / f"draft {seed}",
            seed,
            architectures=["LlamaForCausalLMEagle3"],
            num_hidden_layers=1,
            draft_vocab_size=512,
        )
        speculative = {"method": "eagle3", "num_speculative_tokens": drafts, "model": str(draft)}
        return identity(engine_config(path, speculative_config=speculative))

    path = model(tmp_path / "model")
    assert fields(identity(engine_config(path)), speculating(1)) == ["speculative.method"]
    assert fields(speculating(1), speculating(2)) == ["speculative.model", "speculative.weights"]
    # How many tokens are drafted changes no KV.
    assert fields(speculating(1), speculating(1, drafts=3)) == []


def test_speculation_without_kv_of_its_own_does_not_matter(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    guessing = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert fields(identity(engine_config(path)), identity(engine_config(path, speculative_config=guessing))) == []


# --- layers -----------------------------------------------------------------------------------------------------------


def scaled(k: Any, v: Any) -> Callable[[list[Attention]], None]:
    """As after loading a checkpoint with scales of its KV cache, in the second layer."""

    def change(layers: list[Attention]) -> None:
        layers[1]._k_scale, layers[1]._v_scale = torch.tensor(k), torch.tensor(v)

    return change


def test_scales_of_a_quantized_cache_are_named(tmp_path: Path) -> None:
    config = engine_config(model(tmp_path / "model"), dtype="bfloat16", kv_cache_dtype="fp8")
    ours = identity(config, scaled(0.5, 0.25))
    assert fields(ours, identity(config, scaled(0.5, 0.25))) == []
    assert fields(ours, identity(config, scaled(0.75, 0.25))) == [f"k_scale of {layer_name(1)}"]
    assert fields(ours, identity(config, scaled(0.5, 0.75))) == [f"v_scale of {layer_name(1)}"]
    assert ours.layers[layer_name(0)].k_scales == (1.0,)


def test_scales_of_heads_fit_the_ranks_that_have_them(tmp_path: Path) -> None:
    config = engine_config(model(tmp_path / "model"), dtype="bfloat16", kv_cache_dtype="fp8")
    k, v = [0.5, 1.0, 2.0, 4.0], [1.0, 2.0, 3.0, 4.0]
    whole = identity(config, scaled(k, v))
    for rank in range(2):
        heads = slice(2 * rank, 2 * rank + 2)
        assert fields(whole, identity(config, scaled(k[heads], v[heads]), tp_rank=rank, tp_size=2)) == []
        wrong = identity(config, scaled(k[heads], [1.0, 9.0]), tp_rank=rank, tp_size=2)
        head = 2 * rank if rank else 1
        assert fields(whole, wrong) == [f"v_scale of head {head} of {layer_name(1)}"]


def test_scales_of_a_cache_that_is_not_quantized_do_not_matter(tmp_path: Path) -> None:
    config = engine_config(model(tmp_path / "model"))
    assert fields(identity(config, scaled(0.5, 0.5)), identity(config)) == []
    assert identity(config).layers[layer_name(0)].k_scales == ()


def test_layers_that_are_exempt_from_quantization_are_named(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    fp8 = engine_config(path, dtype="bfloat16", kv_cache_dtype="fp8")

    def exempt(layers: list[Attention]) -> None:
        layers[1].kv_cache_dtype = "auto"

    assert fields(identity(fp8), identity(fp8, exempt))[0] == f"KV cache dtype of {layer_name(1)}"


def with_cache_type(path: Path, name: str) -> KvIdentity:
    """Of an engine with that --kv-cache-dtype, which attention on this machine's processor need not have."""
    config = engine_config(path, dtype="bfloat16")

    def change(layers: list[Attention]) -> None:
        config.cache_config.cache_dtype = name
        for layer in layers:
            layer.kv_cache_dtype = name

    return identity(config, change)


def test_the_same_cache_type_has_two_names(tmp_path: Path) -> None:
    """The longer one is that of checkpoints from ModelOpt, whose type is taken with `auto`."""
    path = model(tmp_path / "model")
    short, long, other = (with_cache_type(path, name) for name in ("fp8", "fp8_e4m3", "fp8_e5m2"))
    assert fields(short, long) == fields(long, short) == []
    assert fields(short, other)[:2] == ["cache_dtype", f"KV cache dtype of {layer_name(0)}"]


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_ds_mla", "fp8_per_token_head"])
def test_fp8_of_another_kind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On MI300 a byte is half the number that it is elsewhere."""
    path = model(tmp_path / "model")
    ours = with_cache_type(path, name)
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    theirs = with_cache_type(path, name)
    found = incompatibilities(ours, theirs, enforce_factors=False)
    assert [each.field for each in found] == [f"kind of FP8 of {layer_name(layer)}" for layer in range(LAYERS)]
    assert {(each.local, each.remote) for each in found} == {("OCP", "FNUZ")}
    assert "--kv-cache-dtype" in found[0].advice
    assert fields(theirs, with_cache_type(path, name)) == []


@pytest.mark.parametrize("name", ["auto", "bfloat16", "nvfp4", "int8_per_token_head", "turboquant_4bit_nc"])
def test_the_kind_of_fp8_does_not_matter_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = model(tmp_path / "model")
    ours = with_cache_type(path, name)
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    assert fields(ours, with_cache_type(path, name)) == []


def of_an_indexer(config: VllmConfig, block_size: int = 64) -> KvIdentity:
    """Its cache is of plain bytes, and of no type that has a name."""
    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, max_tp_shards=1, head_size=132, dtype=torch.uint8)
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config):
        layer = DeepseekV32IndexerCache(132, torch.uint8, "indexer.k_cache", config.cache_config)
    shapes = {layer.prefix: latent(layer.prefix, bytes_per_token=132)}
    return kv_identity(config, "INDEXER", {layer.prefix: spec}, shapes, tp_rank=0, tp_size=1, groups=())


def test_fp8_of_another_kind_in_an_indexer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(model(tmp_path / "model"))
    ours = of_an_indexer(config)
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    (found,) = incompatibilities(ours, of_an_indexer(config), enforce_factors=True)
    assert (found.field, found.local, found.remote) == ("kind of FP8 of indexer.k_cache", "OCP", "FNUZ")


def test_an_indexer_that_rocm_orders_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is enforced: the same model, the same back end by name, the same shape."""
    config = engine_config(model(tmp_path / "model"))
    ours = of_an_indexer(config)
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    theirs = of_an_indexer(config)
    assert incompatibilities(theirs, of_an_indexer(config), enforce_factors=True) == []
    for one, other in ((ours, theirs), (theirs, ours), (theirs, of_an_indexer(config, block_size=1))):
        (found,) = incompatibilities(one, other, enforce_factors=False)
        assert found.field == "order of elements in a block of indexer.k_cache"
        assert found.advice.startswith("run both engines on ROCm")


def test_keys_that_older_gpus_store_in_fp8_of_another_kind_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path / "model")

    def on(capability: tuple[int, int], name: str = "turboquant_k8v4") -> KvIdentity:
        with monkeypatch.context() as patch:
            patch.setattr(triton_turboquant_decode, "_FP8_E4B15", {})
            patch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
            patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
            return with_cache_type(path, name)

    ampere, ada, hopper = on((8, 0)), on((8, 9)), on((9, 0))
    assert fields(ada, hopper) == fields(ada, with_cache_type(path, "turboquant_k8v4")) == []
    found = incompatibilities(hopper, ampere, enforce_factors=False)
    assert {(each.local, each.remote) for each in found} == {("OCP", "E4B15")}
    assert fields(on((8, 0), "turboquant_4bit_nc"), on((9, 0), "turboquant_4bit_nc")) == []


def test_the_order_on_cpus_is_named(tmp_path: Path) -> None:
    config = engine_config(model(tmp_path / "model"))

    def computed_with(isa: str) -> KvIdentity:
        def change(layers: list[Attention]) -> None:
            for layer in layers:
                layer.isa = isa

        return identity(config, change)

    order = f"order of elements in a block of {layer_name(0)}"
    assert fields(computed_with("vec"), computed_with("amx"))[0] == order
    assert fields(computed_with("neon"), computed_with("rvv"))[0] == order
    # Both keep K by its elements, and V by tokens.
    assert fields(computed_with("vec"), computed_with("vec16")) == []


def test_an_engine_on_cpus_does_not_fit_one_on_gpus(tmp_path: Path) -> None:
    """Whatever is enforced: attention on GPUs keeps K and V as the tensor's shape says. An engine that packs what it
    reads is one on CPUs, and reads from GPUs only."""

    class OnGpus(CPUAttentionBackend):
        @staticmethod
        def get_name() -> str:
            return "FLASH_ATTN"

    def change(layers: list[Attention]) -> None:
        for layer in layers:
            layer.attn_backend = OnGpus

    config = engine_config(model(tmp_path / "model"))
    on_cpus, on_gpus = identity(config), identity(config, change)
    assert {layer.order for layer in on_gpus.layers.values()} == {""}
    orders = [f"order of elements in a block of {layer_name(layer)}" for layer in range(LAYERS)]
    for ours, theirs in ((on_cpus, on_gpus), (on_gpus, on_cpus)):
        assert [each.field for each in incompatibilities(ours, theirs, enforce_factors=False)] == orders
    assert not incompatibilities(on_cpus, on_gpus, enforce_factors=False, not_packed="")
    backwards = incompatibilities(on_gpus, on_cpus, enforce_factors=False, not_packed="")
    assert [each.field for each in backwards] == orders
    refused = incompatibilities(on_cpus, on_gpus, enforce_factors=False, not_packed="set the option")
    assert {each.advice for each in refused} == {"set the option"}


def test_an_engine_that_packs_fits_no_other_order_of_cpus(tmp_path: Path) -> None:
    config = engine_config(model(tmp_path / "model"))

    def on_another_processor(layers: list[Attention]) -> None:
        for layer in layers:
            layer.isa = "neon"

    ours, theirs = identity(config), identity(config, on_another_processor)
    found = incompatibilities(ours, theirs, enforce_factors=False, not_packed="")
    assert [each.field for each in found] == [
        f"order of elements in a block of {layer_name(layer)}" for layer in range(LAYERS)
    ]


@pytest.mark.skipif(current_platform.get_cpu_architecture() is not CpuArchEnum.X86, reason="instruction sets of x86")
def test_what_vllm_chooses_is_what_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(model(tmp_path / "model"), dtype="bfloat16")
    told = {}
    for has_tiles in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_tiles=has_tiles: has_tiles)
        told[has_tiles] = identity(config).layers[layer_name(0)].order
    assert told == {False: "vec", True: "amx"}


# --- bounds, and the way to the peer ----------------------------------------------------------------------------------


def test_whatever_a_configuration_holds_is_within_the_bounds_of_the_wire(tmp_path: Path) -> None:
    path = model(tmp_path / "model")
    first, second = engine_config(path), engine_config(path)
    for config, last in ((first, "a"), (second, "b")):
        config.model_config.hf_text_config.update({f"entry_{index}": index for index in range(1000)})
        config.model_config.hf_text_config.update({"a_long_one": ["x" * 5000, last], "an_odd_one": "two\nlines"})
    ours, theirs = identity(first), identity(second)
    assert len(ours.factors) == FACTORS_MAX
    assert max(map(len, ours.factors.values())) <= VALUE_LENGTH_MAX
    assert all(value.isprintable() for value in ours.factors.values())
    assert fields(ours, theirs) == ["config.a_long_one"]


def test_the_registration_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(model(tmp_path / "model"))
    ours = identity(config)
    caches = cache_config(layers_of_context(config), layers=LAYERS)
    be_rank(monkeypatch, "connector.worker.parallelism", 0, 1)
    registered = derive_registration(config, caches, allocate(caches))
    tokens = registered.layout.kernel_block_size_tokens
    assert registered.identity == msgspec.structs.replace(ours, group_tokens=(tokens,))


def layers_of_context(config: VllmConfig) -> Any:
    layer = config.compilation_config.static_forward_context[layer_name(0)]
    return layer.get_kv_cache_spec(config)
