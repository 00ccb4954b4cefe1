"""Blocks in quarantine or lent back hold up who needs them, and nobody else. On vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from connector.clock import NS_PER_SECOND
from connector.protocol import RoomFound, RoomLacking
from connector.scheduler.connector_scheduler import QUARANTINE_ASKED_NS
from connector.scheduler.kept_blocks import KeptBlocks
from connector.step_metadata import WorkerReport
from statemachine.load import State
from statemachine.loads import Room
from tests.rig.work import Counted
from tests.unit.hybrid_engine import BLOCK_TOKENS, HybridEngine, chunked, full, mla, state, tokens_of, window
from tests.unit.log_lines import listening

BLOCKS = 34
KEPT = tokens_of(18 * BLOCK_TOKENS)
LONG = tokens_of(20 * BLOCK_TOKENS, seed=3)
"""Fits into the pool, and not into what is left of it."""
SHORT = 5


@pytest.fixture(autouse=True)
def _any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


def report(*, quarantined: Sequence[Sequence[int]] = (), lifted: Sequence[Sequence[int]] = ()) -> WorkerReport:
    return WorkerReport(quarantined=list(quarantined), lifted=list(lifted))


def in_quarantine(*, recomputes: bool = False, drafts: int = 0) -> tuple[HybridEngine, list[int]]:
    """A decode engine of which a load has failed, and the blocks that its READ may still write into."""
    prefill, decode = (
        HybridEngine([full()], engine_id="p"),
        HybridEngine([full()], engine_id="d", blocks=BLOCKS, recomputes=recomputes, drafts=drafts),
    )
    prefill.prefill("kept", KEPT)
    block_ids = list(decode.load("kept", KEPT, prefill.params["kept"]).local_block_ids)
    failed = KVConnectorOutput(
        finished_recving={"kept"},
        failed_recving={"kept"},
        kv_connector_worker_meta=report(quarantined=[block_ids]),
    )
    decode.step(failed)
    assert len(block_ids) == 18
    return decode, block_ids


def submit_short(decode: HybridEngine) -> set[str]:
    for number in range(SHORT):
        decode.submit(f"short-{number}", tokens_of(20, seed=9 + number), None)
    return {f"short-{number}" for number in range(SHORT)}


def run(decode: HybridEngine, steps: int = 20) -> None:
    for _ in range(steps):
        decode.step()


@pytest.mark.parametrize("where", ["here", "on P"])
def test_a_prompt_that_does_not_fit_beside_a_quarantine_holds_nobody_up(where: str) -> None:
    """Nothing would be served until a READ ends that may never end."""
    decode, block_ids = in_quarantine()
    params = None
    if where == "on P":
        prefill = HybridEngine([full()], engine_id="p")
        prefill.prefill("long", LONG)
        params = prefill.params["long"]
    with listening() as lines:
        decode.submit("long", LONG, params)
        short = submit_short(decode)
        run(decode)
    assert short <= decode.finished.keys()
    assert "long" not in decode.finished
    (line,) = [each for each in lines.texts if "do not fit" in each]
    assert "18 blocks are in quarantine" in line

    decode.step(KVConnectorOutput(kv_connector_worker_meta=report(lifted=[block_ids])))
    run(decode, 3)
    if params is None:
        assert "long" in decode.finished
    else:
        assert not decode.is_released_unread("long")


@pytest.mark.parametrize("where", ["here", "on P"])
def test_nor_does_one_that_fits_but_for_the_slots_of_drafts(where: str) -> None:
    """vLLM begins no load without room for a step that speculates, and computes no prompt without slots behind it."""
    decode, block_ids = in_quarantine(drafts=3)
    tokens = tokens_of((BLOCKS - 1 - len(block_ids)) * BLOCK_TOKENS, seed=3)
    params = None
    if where == "on P":
        prefill = HybridEngine([full()], engine_id="p")
        prefill.prefill("long", tokens)
        params = prefill.params["long"]
    decode.submit("long", tokens, params)
    short = submit_short(decode)
    run(decode)
    assert short <= decode.finished.keys()
    assert "long" not in decode.finished

    decode.step(KVConnectorOutput(kv_connector_worker_meta=report(lifted=[block_ids])))
    run(decode, 3)
    if params is None:
        assert "long" in decode.finished
    else:
        assert not decode.is_released_unread("long")


def test_nor_does_one_that_is_to_be_computed_here_because_its_own_load_has_failed() -> None:
    """Loads that may begin wait for such a one otherwise, and vLLM keeps for it what they would need."""
    decode, block_ids = in_quarantine(recomputes=True)
    prefill = HybridEngine([full()], engine_id="p")
    prefill.prefill("other", tokens_of(40, seed=5))
    decode.submit("other", tokens_of(40, seed=5), prefill.params["other"])
    short = submit_short(decode)
    with listening() as lines:
        run(decode)
    assert [each for each in lines.texts if "no KV is loaded, and prompts are computed here" in each]
    assert short <= decode.finished.keys()
    assert decode.is_released_unread("other")
    assert decode.computed["other"] == 40
    with listening() as lines:
        decode.step(KVConnectorOutput(kv_connector_worker_meta=report(lifted=[block_ids])))
        run(decode)
    assert "kept" in decode.finished
    assert [each for each in lines.texts if "KV is loaded again" in each]


def test_the_worker_is_told_who_lacks_room_and_when_that_is_over() -> None:
    decode, block_ids = in_quarantine()
    decode.submit("long", LONG, None)
    decode.submit("leaves", LONG, None)
    run(decode, 3)
    (lacking, other) = [each for each in decode.commands if isinstance(each, RoomLacking)]
    assert (lacking.request_id, other.request_id) == ("long", "leaves")
    assert (lacking.num_tokens, lacking.quarantined, lacking.lent_back) == (len(LONG), len(block_ids), 0)
    decode.scheduler.finish_requests("leaves", RequestStatus.FINISHED_ABORTED)
    decode.step(KVConnectorOutput(kv_connector_worker_meta=report(lifted=[block_ids])))
    run(decode)
    found = [each.request_id for each in decode.commands if isinstance(each, RoomFound)]
    assert found == ["leaves", "long"]


def test_one_that_has_to_wait_for_a_step_is_not_one_that_does_not_fit() -> None:
    """vLLM asks for more blocks than there are where a state was cached in the same step, to have it wait."""
    decode = HybridEngine([full(), state("align")], engine_id="d", caches_prefixes=True)
    side = decode.scheduler.connector._scheduler  # type: ignore[union-attr]
    side._keep_quarantined(report(quarantined=[[1]]))
    tokens = tokens_of(4 * BLOCK_TOKENS + 1)
    with listening() as lines:
        decode.submit("first", tokens, None)
        decode.submit("same", tokens, None)
        run(decode)
    assert decode.finished.keys() == {"first", "same"}
    assert [each for each in lines.texts if "do not fit" in each] == []


@pytest.mark.parametrize("params", [None, {"do_remote_prefill": True, "remote_block_ids": "none"}])
def test_nor_does_one_with_bad_parameters_behind_such_a_failed_load(params: dict[str, Any] | None) -> None:
    """Nothing would be read for it, but it would wait like a load."""
    decode, _ = in_quarantine(recomputes=True)
    decode.submit("bad", tokens_of(40, seed=4), params)
    short = submit_short(decode)
    for _ in range(20):
        decode.step(KVConnectorOutput(finished_recving=decode.loading, failed_recving=decode.loading))
    assert short | {"bad"} <= decode.finished.keys()


def test_loads_begin_again_when_nothing_is_kept_although_the_failed_one_has_not_had_its_turn() -> None:
    decode, block_ids = in_quarantine(recomputes=True)
    side = decode.scheduler.connector._scheduler  # type: ignore[union-attr]
    run(decode, 3)
    assert set(side._loads._by_state[State.WITHOUT_ROOM]) == {"kept"}
    side._keep_quarantined(report(lifted=[block_ids]))
    side.build_step_metadata(SchedulerOutput.make_empty())
    assert (set(side._loads._by_state[State.WITHOUT_ROOM]), set(side._loads._by_state[State.TO_COMPUTE])) == (
        set(),
        {"kept"},
    )


def lending_back(prompt_tokens: int, *, max_tokens: int, drafts: int = 0) -> HybridEngine:
    """A decode engine of 40 blocks that has answered three prompts."""
    both_ways = {"bidirectional_kv_xfer": True}
    prefill = HybridEngine([full()], engine_id="p", options=both_ways)
    decode = HybridEngine([full()], engine_id="d", blocks=41, options=both_ways, drafts=drafts)
    for number in range(3):
        tokens, name = tokens_of(prompt_tokens, seed=20 + number), f"answer-{number}"
        prefill.prefill(name, tokens)
        decode.load(name, tokens, prefill.params[name], max_tokens=max_tokens)
        decode.loaded(name)
        run(decode, 2 * max_tokens)
    return decode


def test_a_prompt_that_does_not_fit_beside_what_is_lent_back_holds_nobody_up() -> None:
    decode = lending_back(8 * BLOCK_TOKENS, max_tokens=2)
    lent = {name for name in decode.params if name.startswith("answer")}
    assert lent
    decode.submit("long", LONG, None)
    short = submit_short(decode)
    run(decode)
    assert short <= decode.finished.keys()
    assert "long" not in decode.finished
    decode.step(KVConnectorOutput(finished_sending=lent))
    run(decode, 3)
    assert "long" in decode.finished


def test_a_prompt_that_found_no_room_is_served_although_others_go_on_being_lent_back() -> None:
    """Of each answer that is lent back the lease ends four turns later; together they always keep half of the pool."""
    both_ways = {"bidirectional_kv_xfer": True}
    prefill = HybridEngine([full()], engine_id="p", options=both_ways)
    decode = HybridEngine([full()], engine_id="d", blocks=41, options=both_ways)
    lent: dict[str, int] = {}
    for turn in range(40):
        if turn == 20:
            assert len(lent) > 1
            decode.submit("long", LONG, None)
        tokens, name = tokens_of(8 * BLOCK_TOKENS, seed=100 + turn), f"answer-{turn}"
        prefill.prefill(name, tokens)
        decode.submit(name, tokens, prefill.params[name], max_tokens=2)
        for _ in range(6):
            over = {each for each, granted in lent.items() if turn - granted >= 4}
            for each in over:
                del lent[each]
            before = set(decode.params)
            decode.step(KVConnectorOutput(finished_recving=decode.loading or None, finished_sending=over or None))
            lent |= {each: turn for each in decode.params.keys() - before if decode.params[each]}
        prefill.step(KVConnectorOutput(finished_sending={name}))
        if "long" in decode.finished:
            return
    pytest.fail(f"{len(decode.finished)} others were served meanwhile")


@pytest.mark.parametrize("reason", ["lent back", "quarantine"])
def test_nothing_more_is_lent_back_only_where_that_makes_room(reason: str) -> None:
    decode, block_ids = in_quarantine()
    side = decode.scheduler.connector._scheduler  # type: ignore[union-attr]
    if reason == "lent back":
        side._kept.lend_back("answer", [block_ids])
        side._kept.lift(block_ids)
    assert not side._loads.waits_for_lent_back
    decode.submit("long", LONG, None)
    run(decode, 2)
    assert "long" in side._loads._without_room
    assert side._loads.waits_for_lent_back == (reason == "lent back")


def test_an_idle_engine_hears_that_a_quarantine_has_ended_when_it_is_to_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM resets no prefix cache while there is one, and ends a pause by that; and an idle engine makes no step."""
    decode, block_ids = in_quarantine()
    now_ns = side_clock(decode, monkeypatch)
    run(decode, 3)
    assert not decode.scheduler.has_requests(), "it would go round and round"
    now_ns[0] += QUARANTINE_ASKED_NS
    assert decode.scheduler.has_requests()
    decode.step(KVConnectorOutput(kv_connector_worker_meta=report(lifted=[block_ids])))
    assert not decode.scheduler.has_requests()
    now_ns[0] += 1000 * NS_PER_SECOND
    assert not decode.scheduler.has_requests()
    assert decode.scheduler.reset_prefix_cache()


def side_clock(decode: HybridEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clock of its connector stands still; the number in the list is what it shows."""
    side = decode.scheduler.connector._scheduler  # type: ignore[union-attr]
    now_ns = [side._clock.now_ns()]
    monkeypatch.setattr(side, "_clock", SimpleNamespace(now_ns=lambda: now_ns[0]))
    return now_ns


# --- what fits --------------------------------------------------------------------------------------------------------

TOKENS = BLOCK_TOKENS


def engine(*specs: KVCacheSpec, blocks: int = 11) -> tuple[HybridEngine, KeptBlocks]:
    """With one block more than it has for requests."""
    found = HybridEngine(specs or [full()], engine_id="d", blocks=blocks)
    return found, found.scheduler.connector._scheduler._kept  # type: ignore[union-attr]


def asked(decode: HybridEngine, tokens: int, *, seed: int = 1) -> Request:
    name = f"asked-{tokens}-{seed}"
    decode.submit(name, tokens_of(tokens, seed=seed), None)
    return decode.scheduler.requests[name]


def test_everything_fits_where_nothing_is_kept() -> None:
    decode, kept = engine()
    assert kept.room_for(asked(decode, 11 * TOKENS), None) is Room.ENOUGH, "vLLM refuses what is longer than the pool"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_left_is_counted_once_for_all_ranks(ranks: int) -> None:
    decode, kept = engine()
    for _ in range(ranks):
        kept.quarantine([1, 2, 3])
    assert kept.quarantined == 3
    assert kept.room_for(asked(decode, 7 * TOKENS), None) is Room.ENOUGH
    assert kept.room_for(asked(decode, 7 * TOKENS + 1), None) is Room.LACKING
    for rank in range(ranks):
        assert kept.room_for(asked(decode, 8 * TOKENS, seed=rank), None) is Room.LACKING
        kept.lift([1, 2, 3])
    assert kept.room_for(asked(decode, 8 * TOKENS, seed=2), None) is Room.ENOUGH


def test_blocks_of_two_answers_are_lent_back_until_both_have_ended() -> None:
    _, kept = engine()
    kept.lend_back("a", [[1, 2, 3, 4], [4]])
    kept.lend_back("b", [[0, 1, 2, 5]])
    assert kept.lent_back == 5
    kept.end(["a", "somebody else"])
    assert kept.lent_back == 3
    kept.end(["b"])
    assert kept.lent_back == 0


@pytest.mark.parametrize(("holder", "fits"), [("nobody", False), ("who lends it back", True), ("somebody else", False)])
def test_what_it_finds_cached_is_there_already_only_where_that_is_kept(holder: str, fits: bool) -> None:
    """Of ten blocks four are lent back, and it finds four of the seven that it needs."""
    decode, kept = engine()
    prompt = tokens_of(7 * TOKENS)
    decode.run("earlier", prompt[: 4 * TOKENS], None)
    pool = decode.scheduler.kv_cache_manager.block_pool
    decode.submit("asked", prompt, None)
    request = decode.scheduler.requests["asked"]
    found = decode.scheduler.kv_cache_manager.get_computed_blocks(request)[0].blocks[0]
    cached = [block.block_id for block in found]
    assert len(cached) == 4
    others = [block.block_id for block in pool.blocks[1:] if block.block_id not in cached]
    kept.lend_back("answer", [cached if holder == "who lends it back" else others[:4]])
    if holder != "nobody":
        pool.touch(found)
    assert kept.room_for(request, None) is (Room.ENOUGH if fits else Room.TAKEN_BY_LENT_BACK)


def test_windows_need_what_vllm_asks_of_them_and_fewer_where_their_kv_is_loaded() -> None:
    decode, kept = engine(full(), window(2 * TOKENS), window(2 * TOKENS), blocks=40)
    kept.quarantine(range(1, 10))
    request = asked(decode, 12 * TOKENS)
    assert kept.room_for(request, None) is Room.LACKING, "its windows count"
    assert kept.room_for(request, 12 * TOKENS - 1) is Room.ENOUGH, "of what is loaded a window keeps its end only"


def beside(blocks: Sequence[int], *, batch_tokens: int = 512, **options: Any) -> tuple[HybridEngine, HybridEngine]:
    """P, and a D of whose blocks READs may still write into these; of a model with a window."""
    specs = [full(), window(40)]
    prefill = HybridEngine(specs, engine_id="p")
    decode = HybridEngine(specs, engine_id="d", blocks=BLOCKS, batch_tokens=batch_tokens, options=options)
    side = decode.scheduler.connector._scheduler  # type: ignore[union-attr]
    side._keep_quarantined(report(quarantined=[blocks]))
    return prefill, decode


@pytest.mark.parametrize("why", ["it loads", "others have read it", "it is computed sooner", "nothing is lent"])
def test_a_prompt_is_judged_by_what_vllm_asks_for_it(why: str) -> None:
    """Of a window it asks for more than the bound of a step says, where most of a long prompt is loaded; and for more
    where it is computed."""
    batch_tokens, tokens = (48, tokens_of(226, seed=3)) if why == "it loads" else (512, tokens_of(190, seed=3))
    options = {"decode_recompute_threshold": 1000} if why == "it is computed sooner" else {}
    prefill, decode = beside(range(1, 17), batch_tokens=batch_tokens, **options)
    prefill.prefill("long", tokens)
    params = None if why == "nothing is lent" else prefill.params["long"]
    if why == "others have read it":
        decode.load("first", tokens, params)
        decode.loaded("first")
        run(decode, 5)
        assert "first" in decode.finished
    decode.submit("long", tokens, params)
    short = submit_short(decode)
    run(decode, 40)
    assert short <= decode.finished.keys()
    assert "long" not in decode.finished


def test_a_prompt_of_which_vllm_computes_more_than_its_threshold_at_once_holds_nobody_up() -> None:
    """The adaptive threshold is as high as half of a step, where two requests are in the queue."""
    specs, earlier = [full(), window(40)], tokens_of(279, seed=1)
    decode = HybridEngine(specs, engine_id="d", blocks=90, batch_tokens=256, long_prefill_tokens=16)
    decode.run("earlier", earlier, None)
    side = decode.scheduler.connector._scheduler  # type: ignore[union-attr]
    side._keep_quarantined(report(quarantined=[range(1, 75)]))
    decode.submit("long", earlier + tokens_of(140, seed=2), None)
    decode.submit("short", tokens_of(10, seed=3), None)
    run(decode)
    assert decode.finished.keys() == {"earlier", "short"}
    side._keep_quarantined(report(lifted=[range(1, 75)]))
    run(decode, 40)
    assert "long" in decode.finished


def test_blocks_that_an_answer_has_for_drafts_are_lent_back_with_it() -> None:
    """vLLM keeps them as long; of what is computed the last block is full."""
    decode = lending_back(8 * BLOCK_TOKENS - 2, max_tokens=3, drafts=3)
    assert all(decode.params[f"answer-{number}"] for number in range(3))
    kept = decode.scheduler.connector._scheduler._kept  # type: ignore[union-attr]
    pool = decode.scheduler.kv_cache_manager.block_pool
    assert kept.lent_back == pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() == 27


@pytest.mark.parametrize("model", ["window", "two windows", "chunks", "states", "latent"])
@pytest.mark.parametrize("loads", [True, False])
def test_vllm_admits_what_is_said_to_fit_and_nothing_else(model: str, loads: bool) -> None:
    specs: list[KVCacheSpec] = {
        "window": [full(), window(40)],
        "two windows": [full(), window(24), window(100)],
        "chunks": [full(), chunked(48)],
        "states": [full(), state("align")],
        "latent": [mla()],
    }[model]
    random = Random(f"{model} {loads}")
    answers = set()
    for number in range(40):
        prefill = HybridEngine(specs, engine_id="p")
        decode = HybridEngine(
            specs, engine_id="d", blocks=90, batch_tokens=random.choice([48, 100, 512]), admits_what_fits=True
        )
        kept = decode.scheduler.connector._scheduler._kept  # type: ignore[union-attr]
        earlier, length = tokens_of(random.randint(1, 200), seed=number), random.randint(1, 400)
        if random.random() < 0.5:  # something is found
            decode.run("earlier", earlier, None)
        tokens = (earlier + tokens_of(length, seed=1000 + number))[:length]
        kept.quarantine(range(1, random.randint(2, 90)))
        params = None
        if loads:
            prefill.prefill("asked", tokens)
            params = prefill.params["asked"]
        decode.submit("asked", tokens, params)
        decode.step()
        request = decode.scheduler.requests.get("asked")
        is_admitted = request is None or request.status is not RequestStatus.WAITING
        lacks_room = any(isinstance(each, RoomLacking) for each in decode.commands)
        assert is_admitted != lacks_room, f"number {number}: {length} tokens beside {kept.quarantined} blocks"
        answers.add(is_admitted)
    assert answers == {True, False}


def test_what_comes_back_from_quarantine_costs_the_same_however_much_is_left() -> None:
    """Of an engine that hung and has ended, hundreds of requests come back at once, on the scheduler's thread."""
    found, lines = KeptBlocks(), []
    requests = [range(first, first + 10) for first in range(0, 2000, 10)]
    for blocks in requests:
        found.quarantine(blocks)
    for blocks in requests:
        with Counted() as work:
            found.lift(blocks)
        lines.append(work.lines)
    assert max(lines) == min(lines)
