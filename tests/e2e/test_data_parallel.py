"""Several engines behind one API server. Every answer equals that of the decode engine alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.e2e.client import PrefillDecode
from tests.e2e.cluster import Traces, prompt
from tests.e2e.deployments import LENGTHS, assert_serves, options
from tests.e2e.engines import Engine, EngineSet, free_port
from tests.plain_paths import LEASE_PATHS_PLAIN

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine, Traces]]:
    """P and D with two engines each behind one API server."""
    directory = tmp_path_factory.mktemp("data-parallel")
    with EngineSet() as engines:
        prefill, decode = engines.start(
            options(
                directory,
                "prefill",
                data_parallel_size=2,
                kv_role="kv_producer",
                extra_config={"control_port": free_port()},
            ),
            options(
                directory, "decode", data_parallel_size=2, kv_role="kv_consumer", kv_load_failure_policy="recompute"
            ),
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


def test_each_has_a_control_socket_of_its_own(data_parallel: tuple[Engine, Engine, Traces]) -> None:
    """At the port that was chosen, and the next one."""
    prefill, _, _ = data_parallel
    first = prefill.options.extra_config["control_port"]
    assert sorted(re.findall(r"control socket \S+:(\d+);", prefill.log())) == [str(first), str(first + 1)]


def test_samples_of_one_prompt_on_several_engines_read_the_same_blocks(
    data_parallel: tuple[Engine, Engine, Traces],
) -> None:
    """vLLM sends the samples of a prompt to different engines, all with the same parameters. One that comes when the
    others have read and released the blocks computes the prompt itself."""
    prefill, decode, traces = data_parallel
    with PrefillDecode(prefill, decode) as service:
        text, key = prompt(200, "samples"), "samples"
        params = service.prefill(text, key).kv_transfer_params
        samples = service.decode_client.samples(text, 4, key, params)
        assert set(samples) == {service.alone(text).token_ids}
        lease = traces.ended_lease(key)
        assert lease.states in LEASE_PATHS_PLAIN
        assert len(traces.readers_of(lease.subject)) == 2
