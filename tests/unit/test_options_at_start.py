"""Wrong options are found when vLLM makes its configuration: in the first process, before any model is loaded."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    CUDAGraphMode,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.aux_output import AuxOutputConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from connector.config import OptionError
from connector.plugin import register
from connector.unsupported import UnsupportedCache
from connector.wire.bounded import Identifier

WRONG: dict[str, Any] = {"kv_lease_durations": 3}
OURS: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "connector",
    "kv_role": "kv_both",
}
NAMED: dict[str, Any] = {"kv_connector": "NixlActorConnector", "kv_role": "kv_both"}
DERIVED = OURS | {"kv_connector_module_path": "tests.e2e.mortal_connector"}
ANOTHER: dict[str, Any] = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def several(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


OURS_WRONG = OURS | {"kv_connector_extra_config": WRONG}
WITH_WRONG: dict[str, dict[str, Any]] = {
    "alone": OURS_WRONG,
    "by the other name of the built-in one": OURS_WRONG | {"kv_connector": "NixlPullConnector"},
    "by its own name": NAMED | {"kv_connector_extra_config": WRONG},
    "a class derived from it": DERIVED | {"kv_connector_extra_config": WRONG},
    "one of several": several(OURS_WRONG),
    "behind another": several(ANOTHER, OURS_WRONG),
    "behind a right one": several(NAMED, OURS_WRONG),
}


@pytest.fixture(autouse=True)
def plugins() -> None:
    """As `EngineArgs` does before it makes a configuration."""
    load_general_plugins()


def with_full_graphs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The platform of these tests is a CPU, which knows no graphs; what is asked of vLLM is what it does with them."""
    platform = type(current_platform)
    monkeypatch.setattr(platform, "check_and_update_config", classmethod(lambda cls, config: None))
    monkeypatch.setattr(platform, "support_static_graph_mode", classmethod(lambda cls: True))
    return {"compilation_config": CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)}


def without_graphs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"compilation_config": CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE)}


def with_hybrid_manager(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Said on the command line: so vLLM does not look whether the connector can do with it."""
    return _hybrid_manager(is_disabled=False)


def without_hybrid_manager(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return _hybrid_manager(is_disabled=True)


def _hybrid_manager(is_disabled: bool) -> dict[str, Any]:
    scheduler = SchedulerConfig.default_factory(disable_hybrid_kv_cache_manager=is_disabled)
    return {"scheduler_config": scheduler}


Setting = Callable[[pytest.MonkeyPatch], dict[str, Any]]
SETTINGS: tuple[Setting, ...] = (with_full_graphs, without_graphs, with_hybrid_manager, without_hybrid_manager)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("how", WITH_WRONG)
def test_the_error_is_that_of_the_option(monkeypatch: pytest.MonkeyPatch, setting: Setting, how: str) -> None:
    """And comes out as it is: the last line of a traceback begins with its name."""
    others = setting(monkeypatch)
    with pytest.raises(OptionError, match="did you mean kv_lease_duration") as refused:
        VllmConfig(kv_transfer_config=KVTransferConfig(**WITH_WRONG[how]), **others)
    assert refused.value.option == "kv_lease_durations"


@pytest.mark.parametrize("engine_id", ["", "pre\tfill", "p" * 505, "\ud800"], ids=["", "tab", "long", "surrogate"])
@pytest.mark.parametrize("wrap", [lambda ours: ours, several], ids=["alone", "one of several"])
def test_an_engine_id_that_no_engine_takes(wrap: Callable[[dict[str, Any]], dict[str, Any]], engine_id: str) -> None:
    """Or the one that vLLM makes of it for a data-parallel engine."""
    with pytest.raises(UnsupportedCache, match=r"engine_id .*leave engine_id out of --kv-transfer-config") as refused:
        VllmConfig(kv_transfer_config=KVTransferConfig(**wrap(OURS | {"engine_id": engine_id})))
    assert refused.value.field == "engine_id"
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("engine_id", ["p", "p" * 504, "p" * 504 + "_dp12345"], ids=["short", "long", "of a rank"])
def test_an_engine_id_that_engines_take(engine_id: str) -> None:
    assert msgspec.convert(engine_id, Identifier) == engine_id
    VllmConfig(kv_transfer_config=KVTransferConfig(**OURS, engine_id=engine_id))


@pytest.mark.parametrize(("backend", "is_simple"), [("native", False), ("native", True), ("lmcache", False)])
def test_an_option_of_vllm_that_puts_another_connector_in_its_place(
    monkeypatch: pytest.MonkeyPatch, backend: str, is_simple: bool
) -> None:
    """vLLM keeps the module's path then. What it says itself, that a class is not in it, names no option."""
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", str(int(is_simple)))
    offloading = CacheConfig(kv_offloading_size=1.0, kv_offloading_backend=backend)
    with pytest.raises(UnsupportedCache, match=r"--kv-offloading-size .*MultiConnector") as refused:
        VllmConfig(cache_config=offloading, kv_transfer_config=KVTransferConfig(**OURS))
    assert refused.value.field == "kv_connector"


def test_options_that_contradict_each_other_and_files_that_are_missing(tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.touch()
    for option, wrong in {
        "lease_margin_seconds": {"lease_margin_seconds": 3, "kv_lease_duration": 4},
        "params_keys_file": {"params_keys_file": str(tmp_path / "missing")},
        "curve_directory": {"curve_directory": str(tmp_path / "missing")},
        "trace_directory": {"trace_directory": str(a_file / "below")},
    }.items():
        with pytest.raises(OptionError) as refused:
            VllmConfig(kv_transfer_config=KVTransferConfig(**OURS, kv_connector_extra_config=wrong))
        assert refused.value.option == option


def test_a_trace_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "yet"
    options = {"trace_directory": str(directory)}
    VllmConfig(kv_transfer_config=KVTransferConfig(**OURS, kv_connector_extra_config=options))
    assert list(directory.iterdir()) == []


def test_a_trace_directory_of_the_environment_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NIXL_ACTOR_TRACE_DIR", str(tmp_path / "file"))
    with pytest.raises(OptionError, match=r"NIXL_ACTOR_TRACE_DIR.*cannot write state-transition traces"):
        VllmConfig(kv_transfer_config=KVTransferConfig(**OURS))


@pytest.mark.parametrize("config", [OURS, NAMED, several(ANOTHER, OURS)], ids=["alone", "named", "one of several"])
def test_right_options_change_nothing(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    made = VllmConfig(kv_transfer_config=KVTransferConfig(**config), **with_full_graphs(monkeypatch))
    assert made.compilation_config.cudagraph_mode is CUDAGraphMode.FULL


@pytest.mark.parametrize(
    "config",
    [NAMED, several(ANOTHER, NAMED), several(several(NAMED))],
    ids=["named", "one of several", "one of several of one of several"],
)
def test_routed_experts_are_refused_under_any_name(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    """vLLM looks for the name NixlConnector. Whether the model has experts is not the matter here."""
    monkeypatch.setattr(VllmConfig, "_verify_aux_output_compatibility", lambda self: None)
    experts = AuxOutputConfig(enable_return_routed_experts=True)
    with pytest.raises(UnsupportedCache, match="leave --enable-return-routed-experts out") as refused:
        VllmConfig(kv_transfer_config=KVTransferConfig(**config), aux_output_config=experts)
    assert refused.value.field == "enable_return_routed_experts"
    VllmConfig(kv_transfer_config=KVTransferConfig(**ANOTHER), aux_output_config=experts)


@pytest.mark.parametrize("config", [OURS, NAMED, several(ANOTHER, NAMED)], ids=["alone", "named", "one of several"])
def test_an_engine_that_would_go_on_after_a_failed_step_is_refused(config: dict[str, Any]) -> None:
    """What is told with such a step is lost: commands and outcomes are given out once."""
    parallel = ParallelConfig(enable_fault_tolerance=True)
    with pytest.raises(UnsupportedCache, match="leave --enable-fault-tolerance out") as refused:
        VllmConfig(kv_transfer_config=KVTransferConfig(**config), parallel_config=parallel)
    assert refused.value.field == "enable_fault_tolerance"
    VllmConfig(kv_transfer_config=KVTransferConfig(**ANOTHER), parallel_config=parallel)


@pytest.mark.parametrize("config", [OURS, NAMED, several(ANOTHER, NAMED)], ids=["alone", "named", "one of several"])
def test_vllm_itself_refuses_states_that_are_behind_what_was_computed(config: dict[str, Any]) -> None:
    """With ReplaySSM a state is brought up to date every so many tokens, and how many are missing only its engine
    knows: nothing here would know what it lends."""
    cache = CacheConfig(use_replayssm=True)
    with pytest.raises(ValueError, match="--use-replayssm is incompatible with KV connectors"):
        VllmConfig(kv_transfer_config=KVTransferConfig(**config), cache_config=cache)
    VllmConfig(cache_config=cache)


@pytest.mark.parametrize("config", [OURS, NAMED, several(ANOTHER, NAMED)], ids=["alone", "named", "one of several"])
def test_an_engine_whose_number_of_workers_may_change_is_refused(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    """Whether such an engine could be started here is not the matter."""
    parallel = ParallelConfig()
    monkeypatch.setattr(parallel, "enable_elastic_ep", True)
    with pytest.raises(UnsupportedCache, match="leave --enable-elastic-ep out") as refused:
        VllmConfig(kv_transfer_config=KVTransferConfig(**config), parallel_config=parallel)
    assert refused.value.field == "enable_elastic_ep"
    VllmConfig(kv_transfer_config=KVTransferConfig(**ANOTHER), parallel_config=parallel)


def test_stages_beside_a_connector_that_raises_for_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's base class does, when the model is loaded already, and names that connector."""
    parallel = ParallelConfig()
    monkeypatch.setattr(parallel, "pipeline_parallel_size", 2)
    producer = NAMED | {"kv_role": "kv_producer"}
    for children in (
        (ANOTHER, producer),
        (producer, ANOTHER),
        (producer, several(ANOTHER)),
        (several(producer), ANOTHER),
    ):
        with pytest.raises(UnsupportedCache, match="ExampleConnector beside it") as refused:
            VllmConfig(kv_transfer_config=KVTransferConfig(**several(*children)), parallel_config=parallel)
        assert refused.value.field == "pipeline_parallel_size with MultiConnector"
    for config in (producer, several(producer), several(ANOTHER)):
        VllmConfig(kv_transfer_config=KVTransferConfig(**config), parallel_config=parallel)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize(
    "inside", [lambda config: config, lambda config: several(ANOTHER, config)], ids=["alone", "in"]
)
def test_memory_that_moves_is_refused_under_all_names_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, inside: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """vLLM looks at PYTORCH_CUDA_ALLOC_CONF alone."""
    on_device = inside(NAMED | {"kv_buffer_device": "cuda"})
    monkeypatch.setenv(variable, "max_split_size_mb:512, expandable_segments:True")
    with pytest.raises(UnsupportedCache, match="--enable-cumem-allocator") as refused:
        VllmConfig(kv_transfer_config=KVTransferConfig(**on_device))
    assert refused.value.field == variable
    for config in (ANOTHER, inside(NAMED | {"kv_buffer_device": "cpu"})):
        VllmConfig(kv_transfer_config=KVTransferConfig(**config))
    monkeypatch.setenv(variable, "max_split_size_mb:512,expandable_segments:False")
    VllmConfig(kv_transfer_config=KVTransferConfig(**on_device))


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_one_of_several_knows_the_policy_that_counts(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's scheduler looks at that of MultiConnector; the others keep what they have."""
    name = "kv_load_failure_policy"
    its_own = NAMED | {name: "recompute"}
    before = several(NAMED, its_own, ANOTHER, several(OURS)) | {name: policy}
    expected = copy.deepcopy(before)
    with caplog.at_level(logging.WARNING, logger="vllm.nixl_actor_connector"):
        made = VllmConfig(kv_transfer_config=KVTransferConfig(**before))
    found = [child.kv_transfer_config for _, child in MultiConnector._get_connector_classes_and_configs(made)]
    assert [each.kv_load_failure_policy for each in found] == [policy, policy, "fail", policy]
    (inner,) = found[3].kv_connector_extra_config["connectors"]
    assert inner == OURS | {name: policy}
    assert before == expected, "dictionaries of the caller"
    said = [each.getMessage() for each in caplog.records if name in each.getMessage()]
    assert len(said) == (policy != "recompute")
    assert all("recompute of NixlActorConnector does not count" in each for each in said)


def test_options_of_other_connectors_are_theirs() -> None:
    VllmConfig(kv_transfer_config=KVTransferConfig(**ANOTHER, kv_connector_extra_config=WRONG))
    VllmConfig(kv_transfer_config=KVTransferConfig(**several(ANOTHER | {"kv_connector_extra_config": WRONG})))
    VllmConfig(kv_transfer_config=KVTransferConfig(), **_hybrid_manager(is_disabled=False))
    VllmConfig()


def test_what_vllm_refuses_itself_it_still_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ValueError, match="expandable_segments"):
        VllmConfig(kv_transfer_config=KVTransferConfig(**OURS))


def test_a_plugin_that_is_loaded_again_checks_once() -> None:
    before = VllmConfig._verify_kv_transfer_compat
    register()
    assert VllmConfig._verify_kv_transfer_compat is before
