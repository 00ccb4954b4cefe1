"""Engines that are put together in other ways than one API server in front of one group of workers: data parallelism,
speculative decoding, vLLM's Ray executor. Every answer equals that of the decode engine alone.

Not here: expert parallelism. vLLM's CPU build does not run it (0.32.0: the all-to-all of data-parallel ranks is not
implemented for CPUs, and among tensor-parallel ranks its kernel crashes). What it changes is where weights lie;
`tests/unit/test_registration.py` shows that nothing is registered in another way.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Client, PrefillDecode
from tests.e2e.cluster import CONTEXT_TOKENS, Traces, prompt, wait_for
from tests.e2e.engines import LOOPBACK, ROOT, Engine, EngineOptions, EngineSet, free_port, process_group
from tests.e2e.tiny_model import tiny_llama
from tests.plain_paths import LEASE_PATHS_PLAIN, REQUEST_PATHS_PLAIN

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

LENGTHS = (1, 20, 33, 300, 700)
LEASE_SECONDS = 120.0
"""Longer than the patience of `blocks_are_free`: only a notification ends it in time."""


def options(directory: Path, name: str, **others: Any) -> EngineOptions:
    return EngineOptions(
        name=name,
        model=tiny_llama(),
        logs=directory / "logs",
        trace_directory=directory / "traces",
        context_tokens=CONTEXT_TOKENS,
        extra_config={"kv_lease_duration": LEASE_SECONDS},
        **others,
    )


def assert_serves(service: PrefillDecode, traces: Traces, name: str, ranks: int = 1) -> None:
    """Prompts of several lengths, one after another."""
    for tokens in LENGTHS:
        text, key = prompt(tokens, f"{name} {tokens}"), f"{name}-{tokens}"
        answer = service.pd(text, key)
        assert answer.ok, answer.error
        assert answer.token_ids == service.alone(text).token_ids
        requests = traces.ended_on_ranks(key, ranks)
        assert all(request.states in REQUEST_PATHS_PLAIN for request in requests), requests
    assert service.prefill_client.blocks_are_free()
    assert service.decode_client.blocks_are_free()


# --- data parallelism -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine, Traces]]:
    """P and D with two engines each behind one API server."""
    directory = tmp_path_factory.mktemp("data-parallel")
    with EngineSet() as engines:
        prefill, decode = engines.start(
            options(directory, "prefill", data_parallel_size=2, kv_role="kv_producer"),
            options(directory, "decode", data_parallel_size=2, kv_role="kv_consumer"),
        )
        yield prefill, decode, Traces(directory / "traces")


def test_each_data_parallel_engine_serves_each(data_parallel: tuple[Engine, Engine, Traces]) -> None:
    """They are engines of their own: with an id, and a side channel at the next port."""
    prefill, decode, traces = data_parallel
    named: dict[int, tuple[str, int]] = {}
    for p_rank in range(2):
        for d_rank in range(2):
            name = f"data-parallel-{p_rank}-{d_rank}"
            with PrefillDecode(prefill, decode, data_parallel_ranks=(p_rank, d_rank)) as service:
                params = service.prefill(prompt(20, name)).kv_transfer_params
                assert params is not None
                named[p_rank] = params["remote_engine_id"], params["remote_port"]
                assert service.decode(prompt(20, name), params).ok
                assert_serves(service, traces, name)
    # One page shows all engines of an API server: each has served and lent to two others, as often as it was asked.
    asked = 2 * (1 + len(LENGTHS))
    for rank in range(2):
        with PrefillDecode(prefill, decode, data_parallel_ranks=(rank, rank)) as service:
            assert service.decode_client.metric("vllm:nixl_actor_completed_receives_total") == asked
            assert service.decode_client.metric("vllm:nixl_actor_kv_wait_seconds_count") == asked
            assert service.decode_client.metric("vllm:nixl_actor_peers") == 2
            assert service.decode_client.metric("vllm:nixl_actor_up") == 1
            assert service.prefill_client.metric("vllm:nixl_actor_granted_leases_total") == asked
            assert service.prefill_client.metric("vllm:nixl_actor_lent_blocks") == 0
    (first_id, first_port), (second_id, second_port) = named[0], named[1]
    assert first_id != second_id
    assert (first_port, second_port) == (prefill.options.side_channel_port, prefill.options.side_channel_port + 1)


def test_samples_of_one_prompt_on_several_engines_read_the_same_blocks(
    data_parallel: tuple[Engine, Engine, Traces],
) -> None:
    """vLLM sends the samples of a prompt to different engines, all with the same parameters."""
    prefill, decode, traces = data_parallel
    with PrefillDecode(prefill, decode) as service:
        text, key = prompt(200, "samples"), "samples"
        params = service.prefill(text, key).kv_transfer_params
        samples = service.decode_client.samples(text, 4, key, params)
        assert set(samples) == {service.alone(text).token_ids}
        lease = traces.ended_lease(key)
        assert lease.states in LEASE_PATHS_PLAIN
        assert len(traces.readers_of(lease.subject)) == 2


# --- speculative decoding ---------------------------------------------------------------------------------------------

DRAFTS = 2
FROM_THE_PROMPT = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def by_a_model() -> dict[str, Any]:
    """Drafts of a model that has KV of its own, which travels too."""
    return {"method": "draft_model", "model": str(tiny_llama()), "num_speculative_tokens": DRAFTS}


def speculating(config: dict[str, Any] | None) -> tuple[str, ...]:
    return () if config is None else ("--speculative-config", json.dumps(config))


@pytest.fixture(scope="module")
def speculative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Engine], Traces]]:
    """Two with a draft model, one that drafts from the prompt, and one that does not speculate."""
    directory = tmp_path_factory.mktemp("speculative")
    kinds = {"prefill": by_a_model(), "decode": by_a_model(), "from-prompt": FROM_THE_PROMPT, "plain": None}
    with EngineSet() as engines:
        started = engines.start(
            *(
                options(directory, name, core=core % 2, arguments=speculating(config))
                for core, (name, config) in enumerate(kinds.items())
            )
        )
        yield dict(zip(kinds, started, strict=True)), Traces(directory / "traces")


def test_the_kv_of_a_draft_model_travels_too(speculative: tuple[dict[str, Engine], Traces]) -> None:
    """The drafts are those of the model itself, so nearly all are accepted, if its KV is right."""
    engines, traces = speculative
    with PrefillDecode(engines["prefill"], engines["decode"]) as service:
        drafted, accepted = (
            service.decode_client.metric(f"vllm:spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted")
        )
        for tokens in LENGTHS:
            text, key = prompt(tokens, f"drafts {tokens}"), f"drafts-{tokens}"
            answer = service.pd(text, key)
            assert answer.ok, answer.error
        drafted = service.decode_client.metric("vllm:spec_decode_num_draft_tokens_total") - drafted
        accepted = service.decode_client.metric("vllm:spec_decode_num_accepted_tokens_total") - accepted
        assert drafted > 0
        assert accepted >= 0.8 * drafted
        assert_serves(service, traces, "draft-model")


def test_an_engine_without_the_draft_model_is_incompatible(speculative: tuple[dict[str, Engine], Traces]) -> None:
    """It has fewer layers; the log of D says so with both numbers, and nothing is read."""
    engines, traces = speculative
    with PrefillDecode(engines["from-prompt"], engines["decode"]) as service:
        answer = service.pd(prompt(100, "no draft model"), "no-draft-model")
        assert not answer.ok
        assert traces.ended_request("no-draft-model").reason == "Incompatible"


def test_drafts_from_the_prompt(speculative: tuple[dict[str, Engine], Traces]) -> None:
    """One side drafts, the other does not: there is no KV of drafts. The prompts repeat themselves."""
    engines, traces = speculative
    for prefill, decode in (("plain", "from-prompt"), ("from-prompt", "plain")):
        with PrefillDecode(engines[prefill], engines[decode]) as service:
            for tokens in LENGTHS:
                text, key = ("abcabcabd" * tokens)[:tokens], f"repeats-{prefill}-{tokens}"
                answer = service.pd(text, key)
                assert answer.ok, answer.error
                assert answer.token_ids == service.alone(text).token_ids
                traces.assert_plain(key)
    with Client(engines["from-prompt"]) as client:
        assert client.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


# --- vLLM's Ray executor ----------------------------------------------------------------------------------------------

RAY_ON_CPU = ROOT / "tests" / "e2e" / "ray_on_cpu"
RANKS = 2
RAY_START_SECONDS = 120.0
OBJECT_STORE_BYTES = 100 << 20
"""About the least that Ray takes; vLLM's executor sends nothing through it."""


@contextmanager
def ray_node(log: Path) -> Iterator[dict[str, str]]:
    """One node of Ray on the loopback, and the environment of an engine that uses it."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        port = free_port()
        environment = {
            "PYTHONPATH": os.pathsep.join([str(RAY_ON_CPU), str(ROOT)]),
            "RAY_ADDRESS": f"{LOOPBACK}:{port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
        command += ["--node-ip-address", LOOPBACK, "--temp-dir", folder, "--include-dashboard", "false"]
        command += [
            "--num-cpus",
            str(RANKS),
            "--num-gpus",
            str(RANKS),
            "--object-store-memory",
            str(OBJECT_STORE_BYTES),
        ]
        with process_group(command, os.environ | environment, log):
            wait_for(lambda: "Ray runtime started" in log.read_text() or None, "Ray's node", RAY_START_SECONDS)
            yield environment


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine, Traces]]:
    """One engine whose two ranks are Ray's actors, and a plain one."""
    directory = tmp_path_factory.mktemp("ray")
    with ray_node(directory / "ray.log") as environment, EngineSet() as engines:
        two_ranks, plain = engines.start(
            options(
                directory,
                "on-ray",
                tensor_parallel_size=RANKS,
                arguments=("--distributed-executor-backend", "ray"),
                environment=environment,
                forks=False,
            ),
            options(directory, "plain", core=1),
        )
        yield two_ranks, plain, Traces(directory / "traces")


def test_ranks_that_are_actors_of_ray(on_ray: tuple[Engine, Engine, Traces]) -> None:
    """As prefill and as decode engine."""
    two_ranks, plain, traces = on_ray
    with PrefillDecode(two_ranks, plain) as service:
        assert_serves(service, traces, "from-ray")
    with PrefillDecode(plain, two_ranks) as service:
        assert_serves(service, traces, "to-ray", ranks=RANKS)
