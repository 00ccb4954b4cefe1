"""Both prefill engines are replaced under load, drained one after the other: no request fails, no answer is wrong.

The router is the smallest that does what a deployment does: it sends each prompt to the next prefill engine in turn and
then to D, and it learns late that one of them leaves. Load-failure policy `fail`: whatever the connector could not
serve would be an error for its client.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from connector.tools.cli.main import app
from tests.e2e.client import REQUEST_TRANSFER, Answer, Client
from tests.e2e.cluster import HANDSHAKE_TIMEOUT_SECONDS, prompt, small_options, wait_for
from tests.e2e.engines import LOOPBACK, Engine, EngineSet

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 4
PAUSE_SECONDS = 0.15
"""Each of their answers is computed again at the end."""
TOKENS = 90
LEASE_SECONDS = 10.0
GRACE_SECONDS = 30.0
SHUTDOWN_SECONDS = 60
LEARNS_LATE_SECONDS = 1.0
"""How long the router goes on to use an engine that drains."""
END_SECONDS = 80.0
LAST, LAST_PROMPT_TOKENS, LAST_TOKENS = 8, 700, 100
DECODE_OPTIONS = {"handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS}

runner = CliRunner()


@dataclass
class Served:
    key: str
    prefill: str
    lent: bool
    """Whether P has answered with parameters."""
    answer: Answer


@dataclass
class Router:
    """Sends each prompt to the next of the prefill engines in use, and then to D."""

    decode: Client
    prefills: dict[str, Client]
    in_use: list[str] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    prefilling: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.in_use = list(self.prefills)
        self.prefilling = dict.fromkeys(self.prefills, 0)
        self._turn = itertools.count()
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def serve(self) -> None:
        with self._lock:
            key = f"rolling-{next(self._numbers)}"
            name = self.in_use[next(self._turn) % len(self.in_use)]
            self.prefilling[name] += 1
        text = prompt(TOKENS, key)
        prefilled = self.prefills[name].complete(
            text, max_tokens=1, request_id=key, kv_transfer_params=REQUEST_TRANSFER
        )
        with self._lock:
            self.prefilling[name] -= 1
        params = prefilled.kv_transfer_params
        answer = self.decode.complete(text, request_id=key, kv_transfer_params=params) if prefilled.ok else prefilled
        self.served.append(Served(key, name, bool(params), answer))

    def stop_using(self, name: str) -> None:
        with self._lock:
            self.in_use.remove(name)

    def use(self, name: str) -> None:
        with self._lock:
            self.in_use.append(name)

    def has_no_prefill(self, name: str) -> bool:
        with self._lock:
            return not self.prefilling[name]

    def lent_by(self, name: str) -> int:
        return sum(each.lent for each in self.served if each.prefill == name)


@contextmanager
def load(router: Router) -> Iterator[None]:
    """Clients that rest for a moment after each answer."""
    is_over = threading.Event()

    def client() -> None:
        while not is_over.is_set():
            router.serve()
            is_over.wait(PAUSE_SECONDS)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            yield
        finally:
            is_over.set()
    for each in clients:
        each.result()


def more_lent(router: Router, name: str, count: int = 5) -> None:
    """Wait until this engine has lent so many further prefills."""
    before = router.lent_by(name)
    wait_for(lambda: True if router.lent_by(name) >= before + count else None, f"{name} serves", 60)


def drained_at_its_end(engine: Engine, log: str) -> None:
    """The engine said that it had drained, and only then let go of what it had."""
    said = log.index("this engine may be ended")
    assert "drained after " in log
    assert "nothing is lent any more" in log
    if "starting resource teardown" in log:
        assert said < log.index("starting resource teardown")


def test_both_prefill_engines_are_restarted_under_load_and_no_request_fails(tmp_path: Path) -> None:
    prefill = {
        "kv_role": "kv_producer",
        "extra_config": {"kv_lease_duration": LEASE_SECONDS, "drain_grace_seconds": GRACE_SECONDS},
        "arguments": ("--shutdown-timeout", str(SHUTDOWN_SECONDS)),
    }
    with EngineSet() as engines:
        first, second, decode = engines.start(
            small_options(tmp_path, "first", core=0, **prefill),
            small_options(tmp_path, "second", core=0, engine_id="second-prefill", **prefill),
            small_options(tmp_path, "decode", core=1, kv_role="kv_consumer", extra_config=DECODE_OPTIONS),
        )
        with Client(first) as to_first, Client(second) as to_second, Client(decode) as to_decode:
            router = Router(to_decode, {"first": to_first, "second": to_second})
            with load(router):
                more_lent(router, "first")
                more_lent(router, "second")
                replace_by_drain(router, first, to_first)
                replace_by_sigterm(router, second)
                more_lent(router, "first")
                more_lent(router, "second")
            failed = [each for each in router.served if not each.answer.ok]
            assert failed == []
            with ThreadPoolExecutor(CLIENTS) as pool:
                alone = pool.map(
                    lambda each: to_decode.complete(prompt(TOKENS, each.key), cache_salt="computed-alone"),
                    router.served,
                )
                for each, answer in zip(router.served, alone, strict=True):
                    assert each.answer.token_ids == answer.token_ids, each
            assert len({each.key for each in router.served}) == len(router.served) > 20
            assert to_decode.blocks_are_free()
            assert to_decode.metric("vllm:nixl_actor_failed_receives_total") == 0
        log = decode.log()
    assert log.count(" leaves: what it lends can be read for ") == 2, "D was told by both"
    assert log.count(" has ended or sleeps, as it had said") == 2
    assert " is lost: " not in log, "and took neither end for a failure"


def replace_by_drain(router: Router, engine: Engine, client: Client) -> None:
    """An operator drains it; the router learns of it later; then it is ended, and another one takes its place."""
    address = f"{LOOPBACK}:{engine.options.side_channel_port}"
    began = runner.invoke(app, ["drain", address, "--no-wait"])
    assert began.exit_code == 0, began.output
    assert began.output.startswith("draining for ")
    before = len(router.served)

    def not_lent() -> list[Served]:
        return [each for each in router.served[before:] if each.prefill == "first" and not each.lent]

    time.sleep(LEARNS_LATE_SECONDS)
    wait_for(lambda: True if not_lent() else None, "a request that the draining engine does not lend", END_SECONDS)
    router.stop_using("first")
    ended = runner.invoke(app, ["drain", address])
    assert ended.exit_code == 0, ended.output
    assert "drained after " in ended.output
    assert client.complete("it still answers", max_tokens=1).ok
    shown = runner.invoke(app, ["ps", "--engine", address])
    assert " drained " in shown.output
    assert client.metric("vllm:nixl_actor_draining") == client.metric("vllm:nixl_actor_drained") == 1
    assert client.metric("vllm:nixl_actor_prefills_not_lent_total") >= len(not_lent())
    assert engine.stop(END_SECONDS), "it went by itself"
    drained_at_its_end(engine, engine.log())
    engine.restart().wait_healthy()
    router.use("first")
    more_lent(router, "first")


def replace_by_sigterm(router: Router, engine: Engine) -> None:
    """The router stops using it, and when its last prefill is answered it is ended: leases of it are still held."""
    router.stop_using("second")
    wait_for(lambda: True if router.has_no_prefill("second") else None, "the last prefill", 60)
    assert engine.stop(END_SECONDS), "it went by itself"
    drained_at_its_end(engine, engine.log())
    assert "draining, because of SIGTERM" in engine.log()
    engine.restart().wait_healthy()
    router.use("second")
    more_lent(router, "second")


def test_a_decode_engine_that_is_ended_finishes_its_answers_and_loads_what_still_waits(tmp_path: Path) -> None:
    """With a `--shutdown-timeout`. It has blocks for one request at a time: P keeps those of all others meanwhile."""
    with EngineSet() as engines:
        prefill, decode = engines.start(
            small_options(tmp_path, "prefill", core=0, kv_role="kv_producer"),
            small_options(
                tmp_path,
                "decode",
                core=1,
                kv_role="kv_consumer",
                extra_config=DECODE_OPTIONS,
                arguments=("--shutdown-timeout", str(SHUTDOWN_SECONDS), "--num-gpu-blocks-override", "70"),
            ),
        )
        with Client(prefill) as to_prefill, Client(decode) as to_decode:
            keys = [f"last-{number}" for number in range(LAST)]
            texts = {key: prompt(LAST_PROMPT_TOKENS, key) for key in keys}
            alone = {
                key: to_decode.complete(texts[key], max_tokens=LAST_TOKENS, cache_salt="alone").token_ids
                for key in keys
            }
            params = {
                key: to_prefill.complete(
                    texts[key], max_tokens=1, request_id=key, kv_transfer_params=REQUEST_TRANSFER
                ).kv_transfer_params
                for key in keys
            }
            with ThreadPoolExecutor(LAST) as pool:
                answers = {
                    key: pool.submit(
                        to_decode.complete,
                        texts[key],
                        max_tokens=LAST_TOKENS,
                        request_id=key,
                        kv_transfer_params=params[key],
                    )
                    for key in keys
                }
                loaded = wait_for(
                    lambda: to_decode.metric("vllm:nixl_actor_completed_receives_total") or None,
                    "the first that is loaded",
                )
                assert decode.stop(END_SECONDS), "it went by itself"
            for key, answer in answers.items():
                assert answer.result().ok, answer.result()
                assert answer.result().token_ids == alone[key]
            assert loaded < LAST, "some had still to be loaded"
            assert to_prefill.blocks_are_free()
        assert "request(s) whose answers this engine writes are not waited for" in decode.log()
