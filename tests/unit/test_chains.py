"""A chain of engines: a request with `do_remote_prefill` and `do_remote_decode` is loaded from one engine, and lent on
to another.

Under vLLM's own scheduler on all sides; the worker is played here. With real bytes: `tests/integration/test_chains.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput

from connector.protocol import LeaseComputing, LeaseGranted, StartPull, TrackLease
from statemachine.failures import BadParams
from tests.unit.hybrid_engine import BLOCK_TOKENS, HybridEngine, full, mla, replayed, ring, state, tokens_of, window

LENGTHS = [BLOCK_TOKENS, 3 * BLOCK_TOKENS + 1, 5 * BLOCK_TOKENS - 1]


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


def engine(name: str, specs: list[KVCacheSpec], **settings: Any) -> HybridEngine:
    # One state for the whole request cannot be cached.
    caches_prefixes = not any(isinstance(spec, MambaSpec) for spec in specs)
    return HybridEngine(specs, engine_id=name, caches_prefixes=caches_prefixes, **settings)


def lent_on(params: dict[str, Any]) -> dict[str, Any]:
    """What a router sends a link of the chain."""
    return params | {"do_remote_decode": True}


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("specs", [[full()], [full(), window(40)]], ids=["full", "window"])
def test_what_was_loaded_is_lent_on(specs: list[KVCacheSpec], length: int, overlaps: bool) -> None:
    prompt = tokens_of(length)
    first, link, last = (engine(name, specs, overlaps=overlaps) for name in ("first", "link", "last"))
    first.prefill("r", prompt)

    pull = link.load("r", prompt, lent_on(first.params["r"]))
    assert pull.peer.engine_id == "first"
    link.loaded("r")
    for _ in range(3):
        link.step()
    assert link.computed["r"] == 1, "the last token, whose logits nobody has sent"
    kinds = (TrackLease, StartPull, LeaseComputing, LeaseGranted)
    assert sorted(type(each).__name__ for each in link.commands if isinstance(each, kinds)) == sorted(
        each.__name__ for each in kinds
    )

    assert link.params["r"]["remote_num_tokens"] == length
    assert link.params["r"]["do_remote_prefill"]
    pull = last.load("r", prompt, link.params["r"])
    assert (pull.peer.engine_id, pull.lease) == ("link", link.grant_of("r").lease)
    assert [list(group.remote_block_ids) for group in pull.groups] == [
        table[-len(group.remote_block_ids) :]
        for table, group in zip(link.params["r"]["remote_block_ids"], pull.groups, strict=True)
    ]
    last.loaded("r")
    for _ in range(3):
        last.step()
    assert last.finished == {"r": "length"}
    for held in (first, link):  # the worker reports that the readers have released
        held.step(KVConnectorOutput(finished_sending={"r"}))
        assert not held.scheduler.requests


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("specs", "lookahead"),
    [([full()], 3), ([full(), window(40)], 3), ([mla(), replayed(40)], 1)],
    ids=["drafts", "drafts and a window", "replayed"],
)
def test_each_link_leaves_the_last_tokens_to_the_next(
    specs: list[KVCacheSpec], lookahead: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models whose D computes more than the last token itself a link computes them too, or all where too little of a
    window is lent for a prompt that is shorter by so many tokens."""
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", lookahead)
    prompt = tokens_of(length)
    first, link, last = (engine(name, specs) for name in ("first", "link", "last"))
    left = link.scheduler.connector._scheduler._groups.tokens_left_to_decode  # type: ignore[union-attr]
    assert left
    first.prefill("r", prompt)
    lent = link.submit("r", prompt, lent_on(first.params["r"]))
    link.step()
    if link.is_released_unread("r"):
        assert len(specs) > 1
        loaded = 0
    else:
        loaded = link.pull_of("r").num_tokens
        assert length - 2 * left - 1 <= loaded <= length - 2 * left
        link.loaded("r")
    for _ in range(3):
        link.step()
    assert link.computed["r"] == length - left - loaded
    assert link.params["r"]["remote_num_tokens"] == lent.num_prompt_tokens == length - left
    last.submit("r", prompt, link.params["r"])
    last.step()
    if not last.is_released_unread("r"):
        assert last.pull_of("r").peer.engine_id == "link"


def test_a_link_whose_load_has_failed_lends_what_it_has_computed() -> None:
    prompt = tokens_of(LENGTHS[1])
    first, link = engine("first", [full()]), engine("link", [full()], recomputes=True)
    first.prefill("r", prompt)
    link.load("r", prompt, lent_on(first.params["r"]))
    link.step(KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"}))
    for _ in range(4):
        link.step()
    assert link.computed["r"] == len(prompt)
    assert link.params["r"]["remote_num_tokens"] == len(prompt)
    assert link.params["r"]["remote_engine_id"] == "link"


@pytest.mark.parametrize(
    "specs", [[full(), state("none")], [mla(), replayed(40), ring()]], ids=["state", "ring buffer"]
)
def test_a_state_is_not_lent_on(specs: list[KVCacheSpec]) -> None:
    """The state that the link would load is the one that the engine behind it needs. Under the policy `recompute` the
    link computes the prompt, and lends that."""
    prompt = tokens_of(LENGTHS[1])
    first, link, last = engine("first", specs), engine("link", specs, recomputes=True), engine("last", specs)
    first.prefill("r", prompt)
    link.submit("r", prompt, lent_on(first.params["r"]))
    link.step()
    rejection = link.rejection_of("r")
    assert isinstance(rejection.failure, BadParams)
    assert rejection.failure.field == "do_remote_decode"
    link.step(KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"}))
    for _ in range(4):
        link.step()
    assert last.load("r", prompt, link.params["r"]).peer.engine_id == "link"
