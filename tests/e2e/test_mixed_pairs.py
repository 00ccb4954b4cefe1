"""This project's connector and vLLM's own as each other's prefill and decode engine, where one has two ranks and one
has one: answers, prefix hits, clients that go away, and what both engines log meanwhile.

Each test runs both ways round, with two ranks of ours, and with two of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import BLOCK_BYTES, Room, blocks_of, prompt
from tests.e2e.engines import BLOCK_SIZE_TOKENS, Engine
from tests.e2e.mixed_pairs import (
    RECOMPUTED_TOKENS,
    RUNNING_MAX,
    BuiltinWithReplicas,
    BuiltinWithTwoRanks,
    Mixed,
    OursWithTwoRanks,
    Way,
    both_ways,
    occupied,
)
from tests.e2e.tiny_model import LATENT_BLOCK_TOKENS, LATENT_BYTES_PER_TOKEN

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

LENGTHS = (RECOMPUTED_TOKENS + 1, 20, 32, 33, 500)
STILL_SECONDS = 1.0
"""After this long the blocks of a READ that cannot end have still not come back."""
BYTES_READ = "vllm:nixl_bytes_transferred_sum"


@pytest.fixture(scope="module", params=[OursWithTwoRanks, BuiltinWithTwoRanks], ids=lambda kind: kind.__name__)
def mixed(room: Room, request: pytest.FixtureRequest) -> Iterator[Mixed]:
    with both_ways(room.occupy(request.param)) as mixed:
        yield mixed


@contextmanager
def paused(engine: Engine) -> Iterator[None]:
    """All processes of the engine stand still."""
    engine.pause()
    try:
        yield
    finally:
        engine.resume()


def assert_serves(way: Way, name: str) -> None:
    """The next request is answered rightly, and nothing of the earlier ones is left."""
    text, key = prompt(100, way.key(name)), way.key(name)
    answer = way.service.pd(text, key)
    assert answer.ok, answer.error
    assert answer.token_ids == way.service.alone(text).token_ids
    way.assert_read(key)
    way.assert_blocks_are_free()


def test_prompts_of_several_lengths(mixed: Mixed) -> None:
    for way in mixed.ways:
        for tokens in LENGTHS:
            text, key = prompt(tokens, way.key(tokens)), way.key(f"length-{tokens}")
            answer = way.service.pd(text, key)
            assert answer.ok, answer.error
            assert answer.token_ids == way.service.alone(text).token_ids
            way.assert_read(key, blocks_of(tokens))


def test_several_requests_at_once(mixed: Mixed) -> None:
    for way in mixed.ways:
        prompts = {way.key(f"at-once-{n}"): prompt(40 + 110 * n, way.key(f"at once {n}")) for n in range(RUNNING_MAX)}
        answers = way.service.pd_concurrently(prompts)
        for key, text in prompts.items():
            assert answers[key].ok, answers[key].error
            assert answers[key].token_ids == way.service.alone(text).token_ids
            way.assert_read(key)


def test_the_answer_shows_when_the_kv_is_that_of_another_prompt(mixed: Mixed) -> None:
    """What all comparisons of answers rest on."""
    for way in mixed.ways:
        asked, other = prompt(200, way.key("asked")), prompt(200, way.key("other"))
        wrong = way.service.decode_from_another(asked, other)
        assert wrong.ok, wrong.error
        assert wrong.token_ids != way.service.alone(asked).token_ids


def test_what_d_has_cached_is_not_read_again(mixed: Mixed) -> None:
    """A prompt of whole blocks and one token more, twice. Of a prompt that D has cached vLLM leaves the last token to
    be computed: our D computes it without its block, so that nothing is read and P is only told; the built-in one has
    no such option, and reads the one block that the token lies in."""
    before = mixed.troubles()
    for way in mixed.ways:
        text = prompt(3 * BLOCK_SIZE_TOKENS + RECOMPUTED_TOKENS, way.key("cached"))
        alone = way.service.alone(text).token_ids
        read = []
        for key in (way.key("cached-first"), way.key("cached-again")):
            bytes_before = way.service.decode_client.metric(BYTES_READ)
            answer = way.service.pd(text, key)
            assert answer.ok, answer.error
            assert answer.token_ids == alone
            way.assert_released(key)
            way.assert_blocks_are_free()
            read.append(way.service.decode_client.metric(BYTES_READ) - bytes_before)
        assert read == [4 * BLOCK_BYTES, 0 if way.is_to_ours else BLOCK_BYTES]
    assert mixed.pair.traces.both(mixed.to_ours.key("cached-again")) == (None, None)
    assert mixed.troubles() == before


def test_a_client_goes_away_while_its_request_waits_in_the_queue(mixed: Mixed) -> None:
    """P's blocks come back while D is still busy with others."""
    before = mixed.troubles()
    for way in mixed.ways:
        text, key = prompt(100, way.key("queued")), way.key("queued")
        with occupied(way.decode):
            params = way.prefilled(text, key)
            way.leave_in_queue(text, key, params)
            way.assert_released(key)
            assert way.service.prefill_client.blocks_are_free()
        assert_serves(way, "queued-next")
    assert mixed.troubles() == before


def test_a_client_goes_away_while_its_request_is_read(mixed: Mixed) -> None:
    """The READ hangs while P stands still, and D keeps its blocks; all come back when it has ended."""
    before = mixed.troubles()
    for way in mixed.ways:
        text, key = prompt(900, way.key("reading")), way.key("reading")
        params = way.prefilled(text, key)
        with paused(way.prefill):
            way.leave_in_read(text, key, params)
            if way.is_to_ours:
                mixed.pair.traces.request_in(key, "draining")
            assert not way.service.decode_client.blocks_are_free(STILL_SECONDS)
        way.assert_released(key)
        assert_serves(way, "reading-next")
    for request in mixed.pair.traces.ended_on_ranks(mixed.to_ours.key("reading"), mixed.pair.our_ranks):
        assert request.states == ("pending_handshake", "reading", "draining", "failed")
        assert request.reason == "AbortedByClient"
    assert mixed.troubles() == before


def test_a_client_goes_away_while_its_answer_is_decoded(mixed: Mixed) -> None:
    before = mixed.troubles()
    for way in mixed.ways:
        text, key = prompt(100, way.key("decoding")), way.key("decoding")
        params = way.prefilled(text, key)
        tokens = way.service.decode_client.stream(text, max_tokens=800, request_id=key, kv_transfer_params=params)
        next(tokens)
        tokens.close()
        way.assert_read(key)
        assert_serves(way, "decoding-next")
    assert mixed.troubles() == before


def test_neither_log_says_that_anything_is_wrong(mixed: Mixed) -> None:
    """Last of a pair."""
    for way in mixed.ways:
        way.assert_blocks_are_free()
    mixed.assert_logs_are_clean()


def test_a_rank_whose_replica_nobody_reads_gives_its_blocks_back_too(room: Room) -> None:
    """D reads the KV of one rank, and tells both that it is done. A built-in engine frees what all its ranks have been
    told of, and counts what is only freed at the end of its lease. Scenario 53."""
    with both_ways(room.occupy(BuiltinWithReplicas)) as mixed:
        way, before = mixed.to_ours, mixed.troubles()
        read_before = way.service.decode_client.metric(BYTES_READ)
        prompts = {way.key(f"replica-{n}"): prompt(40 + 110 * n, way.key(n)) for n in range(RUNNING_MAX)}
        answers = way.service.pd_concurrently(prompts)
        for key, text in prompts.items():
            assert answers[key].ok, answers[key].error
            assert answers[key].token_ids == way.service.alone(text).token_ids
            way.assert_read(key)
        way.assert_blocks_are_free()
        assert mixed.troubles() == before
        tokens = sum(-(-len(text) // LATENT_BLOCK_TOKENS) * LATENT_BLOCK_TOKENS for text in prompts.values())
        read = way.service.decode_client.metric(BYTES_READ) - read_before
        assert read == tokens * LATENT_BYTES_PER_TOKEN, "both replicas were read, or less than one"
