"""Behind routers as people have them: vLLM's own (`vllm-router`), the proxy that vLLM's tests of its own connector use
(`toy_proxy_server.py` of its source distribution), and the one in docs/examples.

None knows which connector the engines have.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import ANSWER_TOKENS
from tests.e2e.cluster import LEASE_SECONDS, SETTLE_SECONDS, OnePrefillTwoDecode, prompt, wait_for
from tests.e2e.engines import LOOPBACK, Engine, free_port
from tests.upstream.source import NotFetched, may_be_missing, source_distribution, unpack

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
LENGTHS = (20, 96, 300)
TOY_PROXY = Path("tests/v1/kv_connector/nixl_integration/toy_proxy_server.py")
HEALTH_PATHS = ("/health", "/healthcheck")
"""Where a router says that it is up."""


def url_of(engine: Engine) -> str:
    return f"http://{LOOPBACK}:{engine.options.http_port}"


def example(prefill: Engine, decode: Engine, port: int, *more: str) -> list[str]:
    router = str(ROOT / "docs" / "examples" / "router.py")
    urls = ["--prefill", url_of(prefill), "--decode", url_of(decode)]
    return [sys.executable, router, *urls, "--port", str(port), *more]


def vllm_router(prefill: Engine, decode: Engine, port: int) -> list[str]:
    command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
    command += ["--prefill", url_of(prefill), "--decode", url_of(decode), "--policy", "round_robin"]
    command += ["--host", LOOPBACK, "--port", str(port), "--prometheus-port", str(free_port())]
    return [*command, "--worker-startup-check-interval", "1"]


def toy_proxy(prefill: Engine, decode: Engine, port: int, source: Path) -> list[str]:
    command = [sys.executable, str(source / TOY_PROXY), "--host", LOOPBACK, "--port", str(port)]
    for kind, engine in (("prefiller", prefill), ("decoder", decode)):
        command += [f"--{kind}-host", LOOPBACK, f"--{kind}-port", str(engine.options.http_port)]
    return command


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[httpx.Client]:
    """The router as a process; calls it."""
    # A proxy set for downloads has no business on the loopback.
    environment = os.environ | {"NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        client = httpx.Client(base_url=f"http://{LOOPBACK}:{port}", timeout=120, trust_env=False)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_up(client):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield client
        finally:
            client.close()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_up(client: httpx.Client) -> bool:
    try:
        return any(client.get(path).status_code == httpx.codes.OK for path in HEALTH_PATHS)
    except httpx.HTTPError:
        return False


def ask(client: httpx.Client, asked: str | list[int], key: str, conversation: str | None = None) -> tuple[int, ...]:
    """The tokens of an answer."""
    body = {"model": "tiny", "prompt": asked, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"X-Request-Id": key} | ({} if conversation is None else {"X-Conversation-Id": conversation})
    answer = client.post("/v1/completions", json=body | {"return_token_ids": True}, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    return tuple(answer.json()["choices"][0]["token_ids"])


def sources(tmp_path_factory: pytest.TempPathFactory, part: Path) -> Path:
    """The root of vLLM's source distribution, with a folder of it; skips where that may be missing."""
    try:
        archive = source_distribution()
    except NotFetched as error:
        if may_be_missing():
            pytest.skip(str(error))
        pytest.fail(str(error))
    return unpack(archive, tmp_path_factory.mktemp("source"), str(part))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory, TOY_PROXY.parent)


def assert_served(cluster: OnePrefillTwoDecode, name: str, command: list[str], port: int, log: Path) -> None:
    """The answers are those of D alone, and each prompt was read by D and released on P. The requests are told by what
    is new in the traces, because a router may give them ids of its own."""
    service, traces = cluster.fail, cluster.traces
    texts = {f"{name}-{tokens}": prompt(tokens, f"{name} {tokens}") for tokens in LENGTHS}
    alone = {key: service.alone(text).token_ids for key, text in texts.items()}
    before = traces.request_ids()
    with running(command, port, log) as client, ThreadPoolExecutor(len(texts)) as pool:
        answers = dict(zip(texts, pool.map(lambda key: ask(client, texts[key], key), texts), strict=True))
    assert answers == alone
    new = wait_for(
        lambda: found if len(found := traces.request_ids() - before) >= len(texts) else None, "requests in the traces"
    )
    assert len(new) == len(texts)
    for request_id in new:
        traces.assert_plain(request_id)
    assert service.prefill_client.blocks_are_free(LEASE_SECONDS + SETTLE_SECONDS)


@pytest.mark.parametrize(("name", "command_of"), [("example", example), ("vllm-router", vllm_router)])
def test_prompts_go_through_both_engines(
    name: str, command_of: Callable[[Engine, Engine, int], list[str]], cluster: OnePrefillTwoDecode, tmp_path: Path
) -> None:
    port = free_port()
    command = command_of(cluster.prefill, cluster.failing, port)
    assert_served(cluster, name, command, port, tmp_path / "router.log")


def test_prompts_go_through_both_engines_behind_the_toy_proxy(
    source: Path, cluster: OnePrefillTwoDecode, tmp_path: Path
) -> None:
    port = free_port()
    command = toy_proxy(cluster.prefill, cluster.failing, port, source)
    assert_served(cluster, "toy-proxy", command, port, tmp_path / "router.log")
