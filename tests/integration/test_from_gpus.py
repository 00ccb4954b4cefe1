"""A decode engine on CPUs that reads from prefill engines on GPUs, over real NIXL: every byte as its kernels write it.

There is no GPU here. The prefill engines have a back end of another name, and in main memory the blocks that
FlashAttention would have on a device: K and V of a head side by side in each token, heads and tokens in either order.
The decode engine has vLLM's own attention on CPUs, and compares what has arrived with what its layers write for the
same K and V.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.house import LONG_HANDSHAKE, check_not_loaded, check_pair
from tests.rig import BUILTIN, OURS, EngineOptions, EngineRig, free_port, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DECODE_BLOCK = 64


@dataclass(frozen=True)
class Engines:
    """P's by name, a D that packs what it reads, and one that does not."""

    prefill: dict[str, EngineRig]
    decode: EngineRig
    enforcing: EngineRig


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    shape: dict[str, Any] = {"layers": 2, "blocks": 128, "max_requests": 8}
    on_gpus: dict[str, Any] = {"keeps_token_order": True, "max_batched_tokens": 96, **shape}
    on_cpus: dict[str, Any] = {"computes_on_cpus": True, "block_size_tokens": DECODE_BLOCK, **shape}
    lenient = {"enforce_handshake_compat": False} | LONG_HANDSHAKE
    options = (
        EngineOptions(OURS, "kv_producer", free_port(), layout="LBNHC", block_size_tokens=16, **on_gpus),
        EngineOptions(OURS, "kv_producer", free_port(), layout="LBHNC", block_size_tokens=DECODE_BLOCK, **on_gpus),
        EngineOptions(BUILTIN, "kv_producer", free_port(), layout="LBHNC", block_size_tokens=32, **on_gpus),
        EngineOptions(OURS, "kv_consumer", free_port(), extra_config=lenient, **on_cpus),
        EngineOptions(OURS, "kv_consumer", free_port(), extra_config=LONG_HANDSHAKE, **on_cpus),
    )
    directory = tmp_path_factory.mktemp("from-gpus")
    with ExitStack() as stack:
        rigs = [stack.enter_context(EngineRig(each, directory)) for each in options]
        for rig in rigs:
            rig.wait_ready()
        yield Engines(dict(zip(PREFILL, rigs, strict=False)), *rigs[len(PREFILL) :])


PREFILL = ("small blocks, tokens first", "equal blocks", "built-in, smaller blocks")


@pytest.mark.parametrize("kind", PREFILL)
def test_prompts_of_several_lengths(engines: Engines, kind: str) -> None:
    """Several at once, with a common prefix that the next one finds in D's prefix cache."""
    check_pair(engines.prefill[kind], engines.decode, kind, shared_tokens=2 * DECODE_BLOCK, freed_seconds=20)


def test_without_the_option_nothing_is_read(engines: Engines) -> None:
    tokens = prompt("enforced", 100)
    params = engines.prefill["equal blocks"].prefill("enforced", tokens)
    check_not_loaded(engines.enforcing, engines.enforcing.decode("enforced", tokens, params), tokens)
    assert "Incompatible: " in engines.enforcing.log_path.read_text()
