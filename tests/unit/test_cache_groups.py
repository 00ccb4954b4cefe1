"""Which blocks of which cache group a pull and a grant name, decided with vLLM's own block tables.

Two oracles. One counts tokens: every token that D's next one looks at, by the definition of its attention, has a block
that is cached on D already or read from the block of the same place in P's table. The other is the built-in connector's
scheduler side, which gets the same tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import clip_ssm_state_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from connector.clock import NS_PER_SECOND
from connector.protocol import GroupPull, ReleaseUnread, StartPull
from connector.scheduler.cache_groups import NULL_BLOCK_ID, has_windows_of_other_blocks
from connector.step_metadata import WorkerReport
from connector.wire.params import RemotePrefill
from statemachine import draining
from tests.unit.hybrid_engine import (
    BLOCK_TOKENS,
    MAX_MODEL_TOKENS,
    REMOTE_DECODE,
    HybridEngine,
    chunked,
    full,
    mla,
    params_of_builtin_p,
    replayed,
    ring,
    run_streamed,
    state,
    tokens_of,
    window,
)

FAMILIES: dict[str, Sequence[KVCacheSpec]] = {
    "full attention": [full()],
    "MLA": [mla()],
    "window": [full(), window(40)],
    "window of one block": [window(BLOCK_TOKENS), full()],
    "several windows": [full(), window(33), window(96), window(2)],
    "window only": [window(40)],
    "chunked local": [full(), chunked(64)],
    "state": [full(), state("none")],
    "state with speculation": [state("none", speculative=2), full()],
    "cached states": [full(), state("align")],
    "cached states with speculation": [full(), state("align", speculative=3)],
    "everything": [mla(), window(40), state("align"), window(20)],
    "ring buffer": [mla(), ring()],
    "ring buffer and states": [full(), state("align"), ring(), state("align", speculative=2)],
    "ring buffer and a window": [mla(), window(40), ring()],
    "ring buffer and a window that is replayed": [mla(), replayed(40), ring()],
}
LENGTHS = (2, 15, 16, 17, 33, 55, 63, 64, 65, 97, 100, 128, 150, 151)


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


def engine(family: str, **changes: Any) -> HybridEngine:
    specs = FAMILIES[family]
    caches = not any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none" for spec in specs)
    return HybridEngine(specs, **{"caches_prefixes": caches, **changes})


def first_token_needed(spec: KVCacheSpec, computed: int) -> int:
    """The first token that the one after `computed` tokens looks at."""
    match spec:
        case SlidingWindowSpec(sliding_window=size):
            return max(0, computed - size + 1)
        case ChunkedLocalAttentionSpec(attention_chunk_size=size):
            return computed // size * size
        case _:
            return 0


def check_grant(prefill: HybridEngine, name: str, remote: RemotePrefill) -> None:
    """What P tells is still its own, and in the places that it says: what the built-in connector tells, and the far end
    of a window."""
    assert remote.num_tokens is not None
    builtin = NixlPullConnectorScheduler(prefill.config, "engine", prefill.cache_config)
    computed = prefill.scheduler.kv_cache_manager.get_block_ids_for_computed_tokens(name, remote.num_tokens)
    theirs = [list(table) for table in builtin.get_exchange_clipped_blocks(computed)]
    specs = [group.kv_cache_spec for group in prefill.cache_config.kv_cache_groups]
    for group, (spec, table) in enumerate(zip(specs, theirs, strict=True)):
        while table[:1] == [NULL_BLOCK_ID]:
            table.pop(0)
        told = list(remote.block_ids[group])
        gives_back = isinstance(spec, SlidingWindowSpec) and has_given_back([spec], remote.num_tokens)
        if gives_back and not _leaves_out(specs):
            assert told[1:] == table
        else:
            assert told == table
        if isinstance(spec, MambaSpec | CircularBufferSpec):
            continue
        first = remote.first_tokens[group] if remote.first_tokens else 0
        for place, block_id in enumerate(told, first // BLOCK_TOKENS):
            assert prefill.still_holds(block_id, name, group, place)
    told_ids = {block_id for group in remote.block_ids for block_id in group}
    assert all(prefill.scheduler.kv_cache_manager.block_pool.blocks[block_id].ref_cnt for block_id in told_ids)
    assert prefill.grant_of(name).blocks == sum(map(len, remote.block_ids))


def check_pull(decode: HybridEngine, name: str, pull: StartPull, prefill: HybridEngine, lent: str) -> None:
    """Both lists of each group stand for the same places, and nothing lacks that the next token looks at."""
    assert pull.num_tokens is not None
    assert pull.remote_num_tokens is not None
    specs = [group.kv_cache_spec for group in decode.cache_config.kv_cache_groups]
    assert len(pull.groups) == len(specs)
    pairs = zip(pull.groups, specs, decode.tables(name), prefill.tables(lent), strict=True)
    for number, (group, spec, ours, theirs) in enumerate(pairs):
        if isinstance(spec, MambaSpec | CircularBufferSpec):
            check_state(group, spec, [each.block_id for each in ours], [each.block_id for each in theirs])
            continue
        remote_first = 0
        if group.window_tokens is not None:
            remote_first = -(-pull.remote_num_tokens // BLOCK_TOKENS) - len(group.remote_block_ids)
        local = dict(enumerate(group.local_block_ids, group.local_first))
        remote = dict(enumerate(group.remote_block_ids, remote_first))
        assert [ours[place].block_id for place in local] == list(local.values())
        for place, block_id in remote.items():
            assert theirs[place].block_id == block_id or prefill.still_holds(block_id, lent, number, place)
        assert all(ours[place].block_hash is None and not ours[place].is_null for place in local)
        computed = min(pull.num_tokens, decode.scheduler.requests[name].num_prompt_tokens - 1)
        for token in range(first_token_needed(spec, computed), pull.num_tokens):
            place = token // BLOCK_TOKENS
            assert ours[place].block_hash is not None or (place in local and place in remote)
        if group.window_tokens is not None:
            assert pull.num_tokens - group.window_tokens <= first_token_needed(spec, pull.num_tokens)
    assert len(set(pull.local_block_ids)) == len(pull.local_block_ids)


def check_state(group: GroupPull, spec: MambaSpec | CircularBufferSpec, ours: list[int], theirs: list[int]) -> None:
    scratch = spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0
    assert group.local_block_ids == clip_ssm_state_blocks(ours, scratch)
    assert group.remote_block_ids == clip_ssm_state_blocks(theirs, scratch)
    assert len(group.local_block_ids) == len(group.remote_block_ids) == 1
    assert NULL_BLOCK_ID not in group.local_block_ids + group.remote_block_ids
    assert (group.local_first, group.window_tokens) == (0, None)


def has_given_back(specs: Sequence[KVCacheSpec], length: int) -> bool:
    """Whether vLLM frees a block on P, when a prompt has been computed, that its last token sees."""
    return any(
        first_token_needed(spec, length) // BLOCK_TOKENS > first_token_needed(spec, length - 1) // BLOCK_TOKENS
        for spec in specs
    )


def _leaves_out(specs: Sequence[KVCacheSpec]) -> bool:
    """Whether D computes the last token of every prompt without P having computed it."""
    return any(isinstance(spec, MambaSpec) or spec.prefix_replay_tokens for spec in specs)


def computes_whole(family: str, length: int) -> bool:
    """Whether D has to compute a prompt: P has given back a chunk, or a state is that of the last token too."""
    specs = FAMILIES[family]
    keeps = [spec for spec in specs if isinstance(spec, ChunkedLocalAttentionSpec)]
    if any(isinstance(spec, CircularBufferSpec) for spec in specs):
        keeps = list(specs)
    return not _leaves_out(specs) and has_given_back(keeps, length)


def check_as_builtin(decode: HybridEngine, name: str, pull: StartPull) -> None:
    """The built-in connector reads into the same blocks."""
    builtin = NixlPullConnectorScheduler(decode.config, "engine", decode.cache_config)
    blocks = decode.scheduler.kv_cache_manager.get_blocks(name)
    theirs = builtin.get_exchange_clipped_blocks(blocks.get_unhashed_block_ids_all_groups())
    assert [group.local_block_ids for group in pull.groups] == [list(table) for table in theirs]
    length = builtin._get_remote_prefill_token_count(decode.scheduler.requests[name].num_prompt_tokens)
    specs = [group.kv_cache_spec for group in decode.cache_config.kv_cache_groups]
    assert pull.num_tokens == length - (not _leaves_out(specs) and has_given_back(specs, length))


@pytest.mark.parametrize("retained", [3, 16, 40])
def test_what_is_kept_before_a_window_is_lent_too(retained: int) -> None:
    """For draft modules. A block of D that stayed empty would be in its prefix cache all the same."""
    specs = [full(), replace(window(40), extra_retained_tokens=retained)]
    prefill, decode = HybridEngine(specs), HybridEngine(specs)
    before_window = 0
    for length in LENGTHS:
        name, tokens = f"request-{length}", tokens_of(length, seed=length)
        prefill.prefill(name, tokens)
        group = decode.load(name, tokens, prefill.params[name]).groups[1]
        first = -(-length // BLOCK_TOKENS) - len(group.remote_block_ids)
        assert first <= group.local_first
        assert group.window_tokens == 39 + retained  # what a P that lends less cannot give
        before_window += (group.local_first + 1) * BLOCK_TOKENS <= length - 40
        decode.loaded(name)
        decode.step()
    assert before_window > 0 or retained == 3


@pytest.mark.parametrize("batch_tokens", [512, 48], ids=["at once", "in chunks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_all_lengths(monkeypatch: pytest.MonkeyPatch, family: str, batch_tokens: int) -> None:
    prefill, decode = engine(family, batch_tokens=batch_tokens), engine(family)
    given_back, reasons = 0, reasons_of(decode, monkeypatch)
    for length in LENGTHS:
        name, tokens = f"request-{length}", tokens_of(length, seed=length)
        remote = prefill.prefill(name, tokens)
        check_grant(prefill, name, remote)
        if computes_whole(family, length):
            decode.run(name, tokens, prefill.params[name])
            assert decode.is_released_unread(name)
            assert decode.computed[name] == length
            given_back += 1
            continue
        pull = decode.load(name, tokens, prefill.params[name])
        check_pull(decode, name, pull, prefill, name)
        check_as_builtin(decode, name, pull)
        decode.loaded(name)
        decode.step()
        assert (decode.finished[name], decode.computed[name]) == ("length", 1)
    assert reasons == ["window"] * given_back


def reasons_of(decode: HybridEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why which prompts are computed on D, from now on."""
    reasons: list[str] = []
    connector: Any = decode.scheduler.connector
    monkeypatch.setattr(connector._scheduler._figures, "note_local_prefill", reasons.append)
    return reasons


def test_a_request_that_loads_nothing_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes one up to have blocks released; another needs its whole prompt computed."""
    prefill, decode = engine("window"), engine("window")
    reasons = reasons_of(decode, monkeypatch)
    prefill.prefill("a", tokens_of(151))
    for settings in ({"abort_immediately": True}, {"prompt_logprobs": 1}):
        decode.submit(str(settings), tokens_of(151), prefill.params["a"], **settings)
        decode.step()
    assert reasons == []
    decode.run("b", tokens_of(151), _as_builtin_says(prefill.params["a"]))
    assert reasons == ["window"]


@pytest.mark.parametrize("length", [12, 54, 55, 56, 57, 63, 71, 87, 103])
def test_smaller_blocks_of_p_end_more_often(length: int) -> None:
    """Of its blocks P says nothing but how many of them hold the prompt."""
    for size in (4, 8, 16, 32, 64):
        decode = engine("window")
        kept = max(0, length - 39) // size * size
        tables = [list(range(1, -(-length // size) + 1)), list(range(1, -(-length // size) - kept // size + 1))]
        params = params_of_builtin_p(tables, length)
        decode.submit(f"{size}", tokens_of(length), params)
        decode.step()
        lacks = kept > max(0, length - 40)
        assert decode.is_released_unread(f"{size}") is (lacks if size <= BLOCK_TOKENS else (length - 39) % 16 == 0)


def test_what_a_compressor_has_given_back_is_not_missed() -> None:
    """It reads its window when an entry is complete, and then none of its blocks has just been freed."""
    compressor = replace(replayed(8), bounded_replay=False)
    prefill, decode = (HybridEngine([mla(), compressor]) for _ in range(2))
    for length in (39, 55, 71):
        assert (length - 7) % BLOCK_TOKENS == 0
        prefill.prefill(f"{length}", tokens_of(length, seed=length))
        assert decode.load(f"{length}", tokens_of(length, seed=length), prefill.params[f"{length}"]).local_block_ids


def test_tables_that_make_no_sense_are_no_error_of_the_engine() -> None:
    """As a client may write them: so many blocks for so few tokens, and more of them than a block has tokens. The
    worker finds out what they lack, or they are refused, or nothing is read."""
    decode = engine("window", blocks=2000)
    free = decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for length, blocks in ((100, 100), (100, 5000), (2, 100), (100, 0), (0, 3)):
        for told in (length, None):
            name, params = f"{length}-{blocks}-{told}", params_of_builtin_p([list(range(1, blocks + 1))] * 2, told)
            decode.submit(name, tokens_of(100), params)
            decode.step()
            if name in decode.loading:
                decode.step(KVConnectorOutput(finished_recving={name}, failed_recving={name}))
            for _ in range(2):
                decode.step()
            assert decode.finished[name] in ("length", "error")
            assert decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def _as_builtin_says(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of P as a built-in one would have said them: without what vLLM has freed."""
    ours = ("lease_number", "prefix_digests", "first_tokens")
    said = {key: value for key, value in params.items() if key not in ours}
    first, num_tokens = params["first_tokens"], params["remote_num_tokens"]
    kept = [0, max(0, num_tokens - 39) // BLOCK_TOKENS]
    tables = zip(params["remote_block_ids"], kept, first, strict=True)
    return {**said, "remote_block_ids": [table[place - start // BLOCK_TOKENS :] for table, place, start in tables]}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("state", "state with speculation")])
@pytest.mark.parametrize("cached", [16, 64, 100, 149])
def test_after_a_prefix_hit(family: str, cached: int) -> None:
    """D computed another prompt before that begins alike."""
    prefill, decode = engine(family), engine(family)
    tokens = tokens_of(150)
    decode.run("warm", [*tokens[:cached], *tokens_of(20, seed=1)], None)
    remote = prefill.prefill("a", tokens)
    check_grant(prefill, "a", remote)
    pull = decode.load("a", tokens, prefill.params["a"])
    check_pull(decode, "a", pull, prefill, "a")
    check_as_builtin(decode, "a", pull)
    for group, spec in zip(pull.groups, FAMILIES[family], strict=True):
        whole = not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec | CircularBufferSpec)
        if whole and family != "everything":
            assert group.local_first == cached // BLOCK_TOKENS


@pytest.mark.parametrize("cached", [48, 112, 144])
def test_a_window_that_is_replayed_is_whole_after_a_load(cached: int) -> None:
    """P computes the end of a prefix hit anew, to have the window; D has the window from P and computes one token."""
    family = "ring buffer and a window that is replayed"
    prefill, decode = engine(family), engine(family)
    tokens = tokens_of(150)
    prefill.run("warm", [*tokens[:cached], *tokens_of(20, seed=1)], None)
    remote = prefill.prefill("a", tokens)
    assert prefill.computed["a"] == 149 - cached + 40
    check_grant(prefill, "a", remote)
    decode.run("warm", [*tokens[:64], *tokens_of(20, seed=2)], None)
    pull = decode.load("a", tokens, prefill.params["a"])
    check_pull(decode, "a", pull, prefill, "a")
    check_as_builtin(decode, "a", pull)
    assert [group.local_first for group in pull.groups] == [4, 6, 0]
    decode.loaded("a")
    decode.step()
    assert (decode.finished["a"], decode.computed["a"]) == ("length", 1)


def test_a_window_that_is_partly_cached() -> None:
    """The front of the window is there, the rest is read."""
    prefill, decode = (HybridEngine([full(), window(96)]) for _ in range(2))
    tokens = tokens_of(150)
    decode.run("warm", tokens[:100], None)
    prefill.prefill("a", tokens)
    pull = decode.load("a", tokens, prefill.params["a"])
    check_pull(decode, "a", pull, prefill, "a")
    _, windowed = pull.groups
    # Tokens 55 to 149 are in the window, 0 to 95 in cached blocks.
    assert [block.is_null for block in decode.tables("a")[1][:6]] == [True] * 3 + [False] * 3
    assert (windowed.local_first, len(windowed.local_block_ids), len(windowed.remote_block_ids)) == (6, 4, 7)


def test_a_prefix_hit_deeper_than_the_last_cached_state() -> None:
    """Another prompt left attention blocks behind, but no state where the two part: the load brings the state."""
    prefill, decode = engine("cached states"), engine("cached states")
    tokens = tokens_of(150)
    decode.run("warm", [*tokens[:70], *tokens_of(60, seed=1)], None)
    prefill.prefill("a", tokens)
    pull = decode.load("a", tokens, prefill.params["a"])
    check_pull(decode, "a", pull, prefill, "a")
    attention, states = pull.groups
    assert attention.local_first == 4
    assert len(states.local_block_ids) == 1


@pytest.mark.parametrize(("threshold", "is_read"), [(149, True), (150, False)])
def test_few_tokens_are_those_that_vllm_would_compute(threshold: int, is_read: bool) -> None:
    """Without the load nothing that is cached is of use: there is no state to go on from."""
    specs = [full(), state("align")]
    prefill, decode = HybridEngine(specs), HybridEngine(specs, options={"decode_recompute_threshold": threshold})
    tokens = tokens_of(150)
    decode.run("warm", [*tokens[:70], *tokens_of(60, seed=1)], None)
    prefill.prefill("a", tokens)
    decode.submit("a", tokens, prefill.params["a"])
    for _ in range(5):
        decode.step()
    assert decode.is_released_unread("a") is not is_read
    assert decode.computed["a"] == (0 if is_read else len(tokens))


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([full(), state("align")], True),
        ([full(), window(40), state("align")], True),
        ([replace(full(), block_size=32), replace(state("align"), block_size=32), window(40)], False),
    ],
)
def test_a_window_of_other_blocks_allows_no_hit_that_is_deeper_than_a_state(
    specs: list[KVCacheSpec], expected: bool
) -> None:
    """vLLM takes it that only states may lag behind, and ends the engine where a window does."""
    connector = HybridEngine(specs, caches_prefixes=True).scheduler.connector
    assert connector.supports_divergent_local_hybrid_hits is expected


SHARED = replace(window(40), dcp_sharded=False)


@pytest.mark.parametrize(
    ("specs", "dcp_size", "expected"),
    [
        ([mla(), SHARED, state("align")], 1, False),
        ([mla(), SHARED, state("align")], 2, True),
        ([full(), window(40), replace(state("align"), block_size=64)], 1, True),
        ([full(), replace(state("align"), block_size=64)], 1, False),
    ],
)
def test_whose_blocks_are_of_other_sizes(specs: list[KVCacheSpec], dcp_size: int, expected: bool) -> None:
    """With context parallelism a block of some groups counts for so many times as many tokens."""
    assert has_windows_of_other_blocks(specs, dcp_size) is expected


def test_a_last_token_that_is_not_cached_is_read() -> None:
    prefill, decode = engine("window"), engine("window")
    tokens = tokens_of(100)
    decode.run("warm", tokens, None)
    prefill.prefill("a", tokens[:97])
    decode.submit("a", tokens[:97], prefill.params["a"])
    decode.step()
    pull = decode.pull_of("a")
    assert [len(group.local_block_ids) for group in pull.groups] == [1, 1]


# --- the end of a prompt that D computes itself ----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["state", "cached states", "everything"])
def test_prefill_stops_one_token_before_the_end_for_a_state(family: str) -> None:
    prefill = engine(family)
    request = prefill.submit("a", tokens_of(100), REMOTE_DECODE, max_tokens=9)
    assert (request.num_prompt_tokens, request.num_tokens, request.max_tokens) == (99, 99, 1)
    assert list(request.prompt_token_ids) == list(request.all_token_ids) == tokens_of(99)
    prefill.step()
    prefill.step()  # States are cached at block boundaries, so a step ends there.
    assert prefill.params["a"]["remote_num_tokens"] == 99
    others = engine("window")
    request = others.submit("a", tokens_of(100), REMOTE_DECODE, max_tokens=9)
    assert (request.num_prompt_tokens, request.max_tokens) == (100, 9)


def test_a_prompt_of_token_ids_and_embeddings_is_left_out_of_as_one() -> None:
    """vLLM's model runner takes what is scheduled; it ends the engine over lengths that differ."""
    prefill, length = engine("state", caches_prefixes=False), 40
    are_ids = [position < 30 for position in range(length)]
    request = Request(
        "a",
        tokens_of(length),
        SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": REMOTE_DECODE}),
        None,
        prompt_embeds=torch.arange(8.0 * length).reshape(length, 8),
        prompt_is_token_ids=are_ids,
    )
    prefill.scheduler.add_request(request)
    (scheduled,) = prefill.scheduler.schedule().scheduled_new_reqs
    batch = InputBatch(
        max_num_reqs=1,
        max_model_len=MAX_MODEL_TOKENS,
        max_num_batched_tokens=MAX_MODEL_TOKENS,
        device=torch.device("cpu"),
        vocab_size=512,
        block_sizes=[BLOCK_TOKENS, MAX_MODEL_TOKENS],
        max_num_blocks_per_req=[MAX_MODEL_TOKENS // BLOCK_TOKENS, 1],
    )
    batch.add_request(
        CachedRequestState(
            req_id="a",
            prompt_token_ids=scheduled.prompt_token_ids,
            prompt_embeds=scheduled.prompt_embeds,
            prompt_is_token_ids=scheduled.prompt_is_token_ids,
            mm_features=[],
            sampling_params=scheduled.sampling_params,
            generator=None,
            block_ids=scheduled.block_ids,
            num_computed_tokens=0,
            output_token_ids=[],
        )
    )
    assert batch.num_prompt_tokens[0] == length - 1
    assert batch.is_token_ids[0, : length - 1].tolist() == are_ids[:-1]
    assert torch.equal(batch.req_prompt_embeds[0], torch.arange(8.0 * (length - 1)).reshape(length - 1, 8))


@pytest.mark.parametrize("why", ["stopped", "draining"])
def test_what_p_will_not_lend_it_computes_whole(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Its client may be one that takes the answer of P."""
    prefill = engine("state")
    connector = prefill.scheduler.connector
    assert connector is not None
    if why == "stopped":
        report = WorkerReport(stopped="its actors died")
        connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    else:
        sigterm = draining.Asked(now_ns=0, cause="SIGTERM", grace_ns=NS_PER_SECOND, workers=0)
        monkeypatch.setattr(connector._scheduler._draining, "sigterm", sigterm)
    request = prefill.submit("a", tokens_of(40), REMOTE_DECODE, max_tokens=9)
    assert (request.num_prompt_tokens, request.max_tokens) == (40, 9)


@pytest.mark.parametrize("family", ["state", "cached states"])
def test_a_streamed_prompt_keeps_all_of_its_tokens_and_is_not_lent(family: str) -> None:
    """Nobody knows which are its last: a state would be of other tokens than D expects, and the input has a gap."""
    prefill, tokens = engine(family), tokens_of(70)
    session = run_streamed(prefill, tokens[:40], tokens[40:])
    assert list(session.prompt_token_ids) == tokens
    assert prefill.params == {}
    prefill.step()
    assert prefill.commands == []


@pytest.mark.parametrize("family", ["full attention", "window"])
def test_a_streamed_prompt_is_lent_where_all_of_it_is_loaded(family: str) -> None:
    prefill, decode, tokens = engine(family), engine(family), tokens_of(70)
    run_streamed(prefill, tokens[:40], tokens[40:])
    prefill.step()
    check_pull(decode, "b", decode.load("b", tokens, prefill.params["a"]), prefill, "a")


def test_an_ordinary_request_keeps_its_last_token() -> None:
    prefill = engine("state")
    assert prefill.submit("a", tokens_of(100), None).num_prompt_tokens == 100


def test_a_prompt_of_one_token_is_computed_on_both_sides() -> None:
    prefill, decode = engine("state"), engine("state")
    prefill.prefill("a", [5])
    decode.submit("a", [5], prefill.params["a"])
    decode.step()
    assert decode.is_released_unread("a")
    assert decode.finished == {"a": "length"}


def test_a_request_for_prompt_logprobs_is_computed_on_both_sides() -> None:
    """It may not read cached KV, so D loads nothing and P computes all of it."""
    prefill, decode = engine("state"), engine("state")
    prefill.submit("a", tokens_of(50), REMOTE_DECODE, prompt_logprobs=1)
    prefill.step()
    assert prefill.params["a"]["remote_num_tokens"] == 50
    decode.submit("a", tokens_of(50), prefill.params["a"], prompt_logprobs=1)
    decode.step()
    assert decode.is_released_unread("a")
    assert decode.finished == {"a": "length"}


def test_a_state_after_another_number_of_tokens_is_refused() -> None:
    prefill, decode = engine("state"), engine("state")
    prefill.prefill("a", tokens_of(101))
    decode.submit("a", tokens_of(100), prefill.params["a"])
    decode.step()
    rejection = decode.rejection_of("a")
    assert (rejection.failure.field, rejection.failure.found) == ("remote_num_tokens", "100")
    assert rejection.failure.expected.startswith("99")
    assert len(rejection.local_block_ids) == 7 + 1


def test_a_ring_buffer_after_another_number_of_tokens_is_refused() -> None:
    """What the tokens behind the prompt have overwritten there is not known here."""
    prefill, decode = engine("ring buffer"), engine("ring buffer")
    prefill.prefill("a", tokens_of(100))
    decode.submit("a", tokens_of(100), prefill.params["a"] | {"remote_num_tokens": 101})
    decode.step()
    failure = decode.rejection_of("a").failure
    assert (failure.field, failure.found) == ("remote_num_tokens", "101")
    assert failure.expected.startswith("100")


@pytest.mark.parametrize("family", ["full attention", "window"])
def test_fewer_tokens_than_are_loaded_are_refused(family: str) -> None:
    """The blocks after them hold what was there before, and would enter the prefix cache of D."""
    prefill, decode = engine(family), engine(family)
    prefill.prefill("a", tokens_of(100))
    decode.submit("a", tokens_of(100), prefill.params["a"] | {"remote_num_tokens": 97})
    decode.step()
    rejection = decode.rejection_of("a")
    assert (rejection.failure.field, rejection.failure.found) == ("remote_num_tokens", "97")
    assert rejection.failure.expected == "at least 100, the tokens of the prompt that this engine loads"
    local = [block.block_id for table in decode.tables("a") for block in table if not block.is_null]
    assert rejection.local_block_ids == local
    decode.step(KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"}))
    assert decode.finished == {"a": "error"}
    assert not any(isinstance(command, StartPull | ReleaseUnread) for command in decode.commands)


def test_a_prefix_hit_does_not_make_up_for_missing_tokens() -> None:
    """P lacks the tokens at the end, which a hit on D never covers."""
    prefill, decode = engine("full attention"), engine("full attention")
    tokens = tokens_of(100)
    decode.run("warm", tokens, None)
    prefill.prefill("a", tokens)
    decode.submit("a", tokens, prefill.params["a"] | {"remote_num_tokens": 97})
    decode.step()
    assert decode.rejection_of("a").failure.found == "97"


@pytest.mark.parametrize("told", [100, 101, None])
def test_as_many_tokens_as_are_loaded_are_enough(told: int | None) -> None:
    """P may have computed more, and need not say how many."""
    prefill, decode = engine("full attention"), engine("full attention")
    prefill.prefill("a", tokens_of(100))
    pull = decode.load("a", tokens_of(100), prefill.params["a"] | {"remote_num_tokens": told})
    assert (pull.num_tokens, pull.remote_num_tokens) == (100, told or 100)


def test_a_request_that_loads_nothing_may_find_fewer_tokens_on_its_peer() -> None:
    prefill, decode = engine("full attention"), engine("full attention")
    prefill.prefill("a", tokens_of(40))
    decode.submit("a", tokens_of(50), prefill.params["a"], prompt_logprobs=1)
    decode.step()
    assert decode.is_released_unread("a")
    assert decode.finished == {"a": "length"}


def test_parameters_without_any_cache_group_are_refused() -> None:
    prefill, decode = engine("full attention"), engine("full attention")
    prefill.prefill("a", tokens_of(100))
    decode.submit("a", tokens_of(100), prefill.params["a"] | {"remote_block_ids": []})
    decode.step()
    failure = decode.rejection_of("a").failure
    assert (failure.kind, failure.field, failure.found) == ("BadParams", "remote_block_ids", "none")


def test_an_engine_with_other_cache_groups_is_refused() -> None:
    prefill, decode = engine("full attention"), engine("window")
    prefill.prefill("a", tokens_of(100))
    decode.submit("a", tokens_of(100), prefill.params["a"])
    decode.step()
    rejection = decode.rejection_of("a")
    # No router is to blame for it.
    assert rejection.failure.kind == "Incompatible"
    assert "number of KV cache groups is 1 there and 2 here" in str(rejection.failure)
    assert "the same model, and the hybrid KV cache manager on or off on both" in rejection.failure.advice
    local = [block.block_id for table in decode.tables("a") for block in table if not block.is_null]
    assert rejection.local_block_ids == local


# --- preemption ------------------------------------------------------------------------------------------------------


def test_a_prefill_that_was_preempted_tells_the_blocks_of_its_second_life() -> None:
    prefill, decode = engine("window", blocks=20, batch_tokens=32, admits_what_fits=False), engine("window")
    prefill.submit("local", tokens_of(60, seed=1), None, max_tokens=60)
    prefill.step()
    prefill.step()
    tokens = tokens_of(120)
    request = prefill.submit("a", tokens, REMOTE_DECODE)
    for _ in range(200):
        prefill.step()
        if request.num_preemptions:
            break
    assert request.num_preemptions
    for _ in range(200):
        prefill.step()
        if "a" in prefill.finished:
            break
    pull = decode.load("a", tokens, prefill.params["a"])
    check_pull(decode, "a", pull, prefill, "a")


def test_a_loaded_request_that_is_preempted_loads_nothing_again() -> None:
    prefill, decode = engine("window"), engine("window", blocks=19)
    tokens = tokens_of(60)
    prefill.prefill("a", tokens)
    decode.submit("local", tokens_of(60, seed=1), None, max_tokens=100)
    decode.step()
    decode.load("a", tokens, prefill.params["a"], max_tokens=100)
    decode.loaded("a")
    request = decode.scheduler.requests["a"]
    for _ in range(300):
        decode.step()
        if not decode.scheduler.requests:
            break
    assert request.num_preemptions
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert len([each for each in decode.commands if isinstance(each, StartPull | ReleaseUnread)]) == 1
