"""vLLM's Ray executor, whose ranks are Ray's actors, on one node on the loopback."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.client import PrefillDecode
from tests.e2e.cluster import Traces, wait_for
from tests.e2e.deployments import assert_serves, options
from tests.e2e.engines import LOOPBACK, ROOT, Engine, EngineSet, free_port, process_group

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

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
            "RAY_memory_monitor_refresh_ms": "0",  # what else the machine does is none of its business
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
