"""Where steps overlap: an engine reads KV only where vLLM holds back blocks that a step under way may still write, and
lends nothing that such a step has still to write."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import RequestStatus

from connector.protocol import LeaseComputing, LeaseWithdrawn
from connector.step_overlap import may_read
from connector.unsupported import UnsupportedCache
from statemachine.failures import BadParams
from tests.unit.hybrid_engine import BLOCK_TOKENS, REMOTE_DECODE, SAMPLED_TOKEN, HybridEngine, full, mla, ring

BOTH_WAYS = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
PROMPT = list(range(1, 3 * BLOCK_TOKENS + 4))


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform of these tests is a CPU, where vLLM switches async scheduling off."""
    load_general_plugins()
    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(lambda cls, config: None))


def ours(role: str, *, reads_back: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"kv_connector": "NixlActorConnector", "kv_role": role}
    return config | {"kv_connector_extra_config": BOTH_WAYS} if reads_back else config


def within(role: str, child: dict[str, Any]) -> dict[str, Any]:
    """`MultiConnector`."""
    connectors = [{"kv_connector": "ExampleConnector", "kv_role": role}, child]
    extra = {"connectors": connectors}
    return {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": extra}


def configured(transfer: dict[str, Any], *, is_async: bool | None) -> VllmConfig:
    scheduler = SchedulerConfig.default_factory(async_scheduling=is_async)
    return VllmConfig(kv_transfer_config=KVTransferConfig(**transfer), scheduler_config=scheduler)


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("is_async", [True, None], ids=["async", "unset"])
@pytest.mark.parametrize(
    ("transfer", "says"),
    [
        (ours("kv_producer", reads_back=True), "kv_role of NixlActorConnector, kv_producer with bidirectional_kv_xfer"),
        (within("kv_producer", ours("kv_both", reads_back=True)), "kv_role of MultiConnector, kv_producer with bidir"),
        (within("kv_both", ours("kv_producer", reads_back=True)), "kv_role of NixlActorConnector, kv_producer with"),
        (within("kv_producer", ours("kv_consumer", reads_back=False)), "a connector of kv_role kv_consumer in it"),
    ],
    ids=["alone", "the whole is a producer", "one of several is a producer", "a consumer in a producer"],
)
def test_a_producer_that_reads_is_refused(transfer: dict[str, Any], says: str, is_async: bool | None) -> None:
    """In vLLM's configuration: before a model is loaded. Where nothing is said of it, vLLM schedules asynchronously."""
    with pytest.raises(UnsupportedCache, match=says) as refused:
        configured(transfer, is_async=is_async)
    assert "async scheduling" in refused.value.found
    assert "kv_both" in refused.value.expected
    assert "--no-async-scheduling" in refused.value.expected


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize(
    ("transfer", "is_async"),
    [
        (ours("kv_producer", reads_back=True), False),
        (ours("kv_producer", reads_back=False), True),
        (ours("kv_both", reads_back=True), True),
        (ours("kv_consumer", reads_back=True), True),
        (within("kv_both", ours("kv_both", reads_back=True)), True),
        (within("kv_producer", ours("kv_producer", reads_back=False)), True),
    ],
)
def test_others_are_not(transfer: dict[str, Any], is_async: bool) -> None:
    made = configured(transfer, is_async=is_async)
    assert made.scheduler_config.async_scheduling is is_async


def test_nor_is_a_producer_on_cpus() -> None:
    """Where vLLM has switched async scheduling off by then."""
    load_general_plugins()
    configured(ours("kv_producer", reads_back=True), is_async=None)


def test_the_connector_refuses_it_too() -> None:
    """Where vLLM's configuration was changed after it had been checked."""
    with pytest.raises(UnsupportedCache, match="kv_role of NixlConnector, kv_producer"):
        HybridEngine([full()], options=BOTH_WAYS, overlaps=True, role="kv_producer")
    for role, overlaps in (("kv_producer", False), ("kv_both", True), ("kv_consumer", True)):
        HybridEngine([full()], options=BOTH_WAYS, overlaps=overlaps, role=role)


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer", "kv_producer"])
def test_vllm_holds_blocks_back_in_consumers_only(role: str) -> None:
    """What the refusal rests on. If this fails, vLLM may have made it needless."""
    engine = HybridEngine([full()], overlaps=True, role=role)
    request = engine.submit("a", PROMPT, None)
    engine.scheduler.schedule()  # and the step is under way
    (table,) = engine.tables("a")
    blocks = list(table)
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert request.is_finished()
    assert [block.ref_cnt for block in blocks] == [int(role != "kv_producer")] * len(blocks)


def test_a_producer_refuses_what_belongs_to_d(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that mistakes P for D: reading for it could go wrong in the same way."""
    prefill = HybridEngine([full()], engine_id="another")
    prefill.run("a", PROMPT, {"do_remote_decode": True, "do_remote_prefill": False})
    params = prefill.params["a"]
    mistaken = HybridEngine([full()], overlaps=True, role="kv_producer")
    mistaken.submit("a", PROMPT, params)
    mistaken.step()
    failure = mistaken.rejection_of("a").failure
    assert isinstance(failure, BadParams)
    assert failure.field == "do_remote_prefill"
    in_turn = HybridEngine([full()], role="kv_producer")
    assert in_turn.load("a", PROMPT, params).local_block_ids
    monkeypatch.setattr(in_turn.config.parallel_config, "prefill_context_parallel_size", 2)
    assert not may_read(in_turn.config), "ranks that hold copies read nothing"


def prefill_with_a_step_under_way(*specs: KVCacheSpec) -> HybridEngine:
    """P meets the end of the answer when the step after it is scheduled."""
    prefill = HybridEngine(specs, overlaps=True, caches_prefixes=False)
    request = prefill.submit("a", PROMPT, REMOTE_DECODE, max_tokens=9)
    request.sampling_params.stop_token_ids = [SAMPLED_TOKEN]
    prompt_step = prefill.schedule()
    step_under_way = prefill.schedule()
    prefill.compute(prompt_step)
    assert request.is_finished()
    assert step_under_way.num_scheduled_tokens == {"a": 1}
    return prefill


def test_a_token_that_is_still_under_way_is_not_lent() -> None:
    """The prompt at D goes on behind it."""
    prefill, decode = prefill_with_a_step_under_way(full()), HybridEngine([full()], engine_id="another")
    pull = decode.load("b", [*PROMPT, SAMPLED_TOKEN, 1, 2], prefill.params["a"])
    assert pull.num_tokens == pull.remote_num_tokens == len(PROMPT)


def test_a_ring_buffer_that_a_step_under_way_writes_into_is_not_lent() -> None:
    prefill = prefill_with_a_step_under_way(mla(), ring())
    prefill.step()
    assert "a" not in prefill.params
    assert [type(each) for each in prefill.commands] == [LeaseComputing, LeaseWithdrawn]
