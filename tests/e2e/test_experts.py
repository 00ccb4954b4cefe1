"""Experts that are divided among data-parallel engines: the engines of a side compute every step together.

vLLM steps such engines in waves. One that has nothing to compute computes along with the others, and its connector is
not asked in such a step. A wave ends when none has a request left, also while blocks are lent. `experts_on_cpu` adds
what vLLM's CPU build lacks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from tests.e2e.client import PrefillDecode
from tests.e2e.cluster import Traces, prompt
from tests.e2e.deployments import LENGTHS, assert_serves, options
from tests.e2e.engines import Engine, EngineOptions, EngineSet, KvRole
from tests.e2e.tiny_model import tiny_mixtral

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ENGINES = 2
SETS = 6


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine, Traces]]:
    """P and D with two engines each, which have half of the experts each."""
    directory = tmp_path_factory.mktemp("experts")

    def with_experts(name: str, kv_role: KvRole) -> EngineOptions:
        return options(
            directory,
            name,
            ("--enable-expert-parallel",),
            model=tiny_mixtral(),
            data_parallel_size=ENGINES,
            kv_role=kv_role,
            changes="tests.e2e.experts_on_cpu",
        )

    with EngineSet() as engines:
        prefill, decode = engines.start(with_experts("prefill", "kv_producer"), with_experts("decode", "kv_consumer"))
        yield prefill, decode, Traces(directory / "traces")


def test_experts_are_divided(divided: tuple[Engine, Engine, Traces]) -> None:
    """Or the other tests show nothing."""
    for engine in divided[:2]:
        assert engine.log().count("Local/global number of experts: 4/8") == ENGINES


@pytest.mark.parametrize(("p_rank", "d_rank"), list(product(range(ENGINES), repeat=2)))
def test_each_serves_each(divided: tuple[Engine, Engine, Traces], p_rank: int, d_rank: int) -> None:
    """While the other engine of its side has nothing to do."""
    prefill, decode, traces = divided
    with PrefillDecode(prefill, decode, data_parallel_ranks=(p_rank, d_rank)) as service:
        assert_serves(service, traces, f"experts-{p_rank}-{d_rank}")


def test_all_at_once(divided: tuple[Engine, Engine, Traces]) -> None:
    prefill, decode, _ = divided
    with PrefillDecode(prefill, decode) as service:
        texts = {f"at-once-{n}-{tokens}": prompt(tokens, f"experts {n}") for n in range(SETS) for tokens in LENGTHS}
        answers = service.pd_concurrently(texts)
        for key, text in texts.items():
            assert answers[key].ok, answers[key].error
            assert answers[key].token_ids == service.alone(text).token_ids
        assert service.prefill_client.blocks_are_free()
        assert service.decode_client.blocks_are_free()
