"""DeepSeek-V4, whose caches are compressed: answers of two engines equal those of the decode engine alone.

vLLM's CPU build lacks something to run this model by itself, see `interpreted_triton`; with that it is so slow that
there are few and short prompts. Its kernels for weights of 8 bits are in the build for AVX-512 only, so a machine
without shows nothing here; what is transferred is shown by bytes in `tests/unit/test_layout_remote.py`. The model
computes in bfloat16 and keeps latents in 8 bits: one request at a time leaves no other order of summation that
could flip a near tie.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import PrefillDecode
from tests.e2e.cluster import HANDSHAKE_TIMEOUT_SECONDS, Room, Traces, prompt
from tests.e2e.engines import ROOT, EngineOptions, EngineSet
from tests.e2e.tiny_deepseek_v4 import COMPRESS_RATIOS, SLIDING_WINDOW_TOKENS, tiny_deepseek_v4
from tests.plain_paths import LEASE_PATHS_PLAIN, REQUEST_PATHS_PLAIN

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK_SIZE_TOKENS = 256
"""The only one that the model's kernels take."""
LENGTHS = (3, 130, 191, 256, 301)
"""No whole entry of any kind; parts of entries; a window less a token and a whole block of it, of 64 tokens, which vLLM
has freed on P by then; a whole block; more than a block and than two windows."""
assert LENGTHS[0] < min(COMPRESS_RATIOS)
assert LENGTHS[-1] > 2 * SLIDING_WINDOW_TOKENS
ANSWER_TOKENS = 8
"""Each takes a good second of two engines; that wrong KV shows in so few is a test of its own."""
INTERPRETED_TRITON = Path(__file__).parent / "interpreted_triton"
CACHE_BLOCKS = 2000
"""Those of the compressors' states hold 4 tokens."""


def require_kernels() -> None:
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        pytest.skip("vLLM has no kernels for weights of 8 bits on this machine: it lacks AVX-512")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek-v4")


@pytest.fixture(scope="module")
def service(room: Room, directory: Path) -> Iterator[PrefillDecode]:
    require_kernels()
    room.clear()
    paths = [str(INTERPRETED_TRITON), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = [
        EngineOptions(
            name=name,
            model=tiny_deepseek_v4(),
            logs=directory / "logs",
            core=core,
            block_size=BLOCK_SIZE_TOKENS,
            extra_config={"kv_lease_duration": 120.0, "handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS},
            trace_directory=directory / "traces",
            context_tokens=1024,
            max_num_batched_tokens=1024,
            environment={"PYTHONPATH": os.pathsep.join(paths)},
            forks=False,  # each process imports vLLM with the interpreter that it finds
            arguments=("--dtype", "bfloat16", "--num-gpu-blocks-override", str(CACHE_BLOCKS)),
        )
        for core, name in enumerate(("prefill", "decode"))
    ]
    with EngineSet() as engines, PrefillDecode(*engines.start(*options)) as pair:
        # On a machine with AMX, vLLM's kernels for bfloat16 set its tiles up in a prefill only: an engine whose first
        # step is a decode dies of SIGILL.
        answer = pair.alone(prompt(LENGTHS[0], "deepseek-v4 first"), max_tokens=1)
        assert answer.ok, answer.error
        yield pair


@pytest.mark.parametrize("tokens", LENGTHS)
def test_answers_are_those_of_the_decode_engine_alone(service: PrefillDecode, directory: Path, tokens: int) -> None:
    text, key = prompt(tokens, f"deepseek-v4 {tokens}"), f"length-{tokens}"
    answer = service.pd_concurrently({key: text}, ANSWER_TOKENS)[key]
    assert answer.ok, answer.error
    assert answer.token_ids == service.alone(text, ANSWER_TOKENS).token_ids
    traces = Traces(directory / "traces")
    for request in traces.ended_on_ranks(key, 1):
        assert request.states in REQUEST_PATHS_PLAIN, request
    assert traces.ended_lease(key).states in LEASE_PATHS_PLAIN


def test_the_answer_shows_when_the_kv_is_that_of_another_prompt(service: PrefillDecode) -> None:
    """What the comparisons of answers rest on."""
    asked, other = prompt(140, "asked"), prompt(140, "other")
    wrong = service.decode_from_another(asked, other, ANSWER_TOKENS)
    assert wrong.ok, wrong.error
    assert wrong.token_ids != service.alone(asked, ANSWER_TOKENS).token_ids


def test_blocks_come_back_on_both_sides(service: PrefillDecode) -> None:
    assert service.prefill_client.blocks_are_free()
    assert service.decode_client.blocks_are_free()
