"""Behind routers as people have them: vLLM's own (`vllm-router`), and the one in docs/examples.

Neither knows which connector the engines have.
"""

from __future__ import annotations

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
from tests.e2e.cluster import OnePrefillTwoDecode, prompt
from tests.e2e.engines import LOOPBACK, Engine, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
LENGTHS = (20, 96, 300)


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


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[httpx.Client]:
    """The router as a process; calls it."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
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
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def ask(client: httpx.Client, asked: str | list[int], key: str, conversation: str | None = None) -> tuple[int, ...]:
    """The tokens of an answer."""
    body = {"model": "tiny", "prompt": asked, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"X-Request-Id": key} | ({} if conversation is None else {"X-Conversation-Id": conversation})
    answer = client.post("/v1/completions", json=body | {"return_token_ids": True}, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    return tuple(answer.json()["choices"][0]["token_ids"])


@pytest.mark.parametrize(("name", "command_of"), [("example", example), ("vllm-router", vllm_router)])
def test_prompts_go_through_both_engines(
    name: str, command_of: Callable[[Engine, Engine, int], list[str]], cluster: OnePrefillTwoDecode, tmp_path: Path
) -> None:
    port, service = free_port(), cluster.fail
    command = command_of(cluster.prefill, cluster.failing, port)
    before = service.decode_client.metric("vllm:nixl_actor_completed_receives_total")
    texts = {f"{name}-{tokens}": prompt(tokens, f"{name} {tokens}") for tokens in LENGTHS}
    with running(command, port, tmp_path / "router.log") as client, ThreadPoolExecutor(len(texts)) as pool:
        answers = dict(zip(texts, pool.map(lambda key: ask(client, texts[key], key), texts), strict=True))
    for key, text in texts.items():
        assert answers[key] == service.alone(text).token_ids
    assert service.decode_client.metric("vllm:nixl_actor_completed_receives_total") == before + len(texts)
    assert service.prefill_client.blocks_are_free()
