"""Requests that are stuck or have failed, made on purpose on real engines: `why` names the cause in its first line.

The command is run as an operator runs it, in a process of its own, with nothing but the address of a decode engine: the
prefill engine is found through it. No trace is read. For the last cause, a full quarantine, there are engines of their
own, whose READs count as endless after seconds.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from connector.observe import catalogue as c
from connector.observe.traced import TERMINAL
from tests.e2e.client import PrefillDecode
from tests.e2e.cluster import (
    DECODE_BLOCKS,
    LEASE_SECONDS,
    OnePrefillTwoDecode,
    Room,
    Traces,
    blocks_of,
    prompt,
    small_options,
    wait_for,
)
from tests.e2e.engines import LOOPBACK, OVER_TCP, ROOT, Engine, EngineSet
from tests.e2e.metrics_page import Page, assert_nothing_is_open
from tests.e2e.tiny_model import tiny_gemma
from tests.rig.network import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

TOKENS = 100
_log = logging.getLogger(__name__)
TIMEOUT_SECONDS = "10"
"""For each engine: the machine is busy, and a slow answer must not be taken for none."""
SILENT_SECONDS = "4"
"""For an engine that does not answer: a command that waits for it is through before the request that waits for it,
too, has used up its time."""
STARTS_MAX = 2
"""Of the command, whose work an answer may take, its own start included: an operator has it within a second."""
TRIES = 3
BYTECODE = ROOT / ".state" / "bytecode"
ASKS_NOBODY = ("why", "nobody", "--engine", f"{LOOPBACK}:1")
"""Where nothing listens: what the command does before it has heard anything."""


@dataclass(frozen=True)
class Said:
    """What the command printed, how it ended, and what it took: time, and of that time of a processor."""

    status: int
    text: str
    seconds: float
    processor_seconds: float

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


def run(*arguments: str) -> Said:
    compile_command()
    started, used = time.monotonic(), processor_seconds()
    finished = ended(*arguments)
    return Said(
        finished.returncode,
        finished.stdout + finished.stderr,
        time.monotonic() - started,
        processor_seconds() - used,
    )


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, after its end. Its modules are compiled, as they are where an operator has installed it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-m", "connector", *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPYCACHEPREFIX": str(BYTECODE)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@cache
def compile_command() -> None:
    """By its first use: one for each of the places where it looks."""
    ended(*ASKS_NOBODY)
    ended("why", "nobody", "--trace", str(ROOT / "nowhere"))


def processor_seconds() -> float:
    """Of all commands that have ended: engines are children of others, or run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def engine_option(engine: Engine) -> tuple[str, str]:
    return "--engine", f"{LOOPBACK}:{engine.options.side_channel_port}"


def why(key: str, engine: Engine, *others: str) -> Said:
    return timed(key, partial(run, "why", key, *engine_option(engine), "--timeout", TIMEOUT_SECONDS, *others))


def timed(key: str, ask: Callable[[], Said], first: Said | None = None) -> Said:
    """What `ask` says, or has said first. An answer that takes a second has to wait for it: for other programs, which
    these tests do not count, or for an engine that does not answer. Its own work is less, by a processor that starts
    the command in half of one. The time in which a virtual machine stands still may count as work, so what was too much
    is asked again."""
    first = said = ask() if first is None else first
    for _ in range(TRIES):
        _log.info("%s: %s  [%.2f s, %.2f s of them work]", key, said.first_line, said.seconds, said.processor_seconds)
        if said.processor_seconds < STARTS_MAX * run(*ASKS_NOBODY).processor_seconds:
            return first
        said = ask()
    pytest.fail(f"more work than {STARTS_MAX} starts of the command, each time: {first.text}")


def prefilled(service: PrefillDecode, key: str) -> dict[str, Any]:
    answer = service.prefill(prompt(TOKENS, key), key)
    assert answer.ok, answer.error
    assert answer.kv_transfer_params is not None
    return answer.kv_transfer_params


def assert_names(said: Said, kind: str, *words: str, status: int = 1) -> None:
    assert said.status == status, said.text
    assert said.first_line.startswith(kind), said.text
    for word in words:
        assert word in said.first_line, said.text


def test_one_that_was_served(cluster: OnePrefillTwoDecode) -> None:
    """And the whole answer: both sides in one order."""
    key = "why-served"
    answer = cluster.fail.pd(prompt(TOKENS, key), key)
    assert answer.ok, answer.error
    cluster.traces.assert_plain(key)
    said = why(key, cluster.failing)
    assert_names(said, "Done", status=0)
    for line in ("lease computing", "request reading", "request done", "lease done"):
        assert line in said.text
    found = json.loads(why(key, cluster.failing, "--json").text)
    (match,) = found["matches"]
    assert (match["outcome"], match["state"], match["peer"]) == ("served", "done", "the-prefill-engine")
    from_trace = timed(key, partial(run, "why", key, "--trace", str(cluster.traces.directory)))
    assert_names(from_trace, "Done", status=0)


def test_an_id_that_nobody_knows(cluster: OnePrefillTwoDecode) -> None:
    said = why("why-never-sent", cluster.failing)
    assert said.status == 3
    assert "No request with 'why-never-sent' in its id" in said.first_line


def test_parameters_lost_by_the_router(cluster: OnePrefillTwoDecode) -> None:
    """P has lent the blocks; D answers 200 all the same."""
    key = "why-lost"
    prefilled(cluster.fail, key)
    answer = cluster.fail.decode_client.complete(prompt(TOKENS, key), request_id=key)
    assert answer.ok, answer.error
    said = wait_for(lambda: found if (found := why(key, cluster.failing)).status == 1 else None, "the local prefill")
    assert_names(said, "NoTransferParams", "no kv_transfer_params", "computed the prompt itself")


LIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "sizes": ({"tp_size": 2}, "BadParams", "tp_size"),
    "address": ({"remote_engine_id": "moved-away", "remote_port": free_port()}, "ConnectionRefused", "nothing listens"),
    "dns": (
        {"remote_engine_id": "nowhere", "remote_host": "no-such-host.invalid"},
        "AddressNotResolved",
        "no-such-host.invalid",
    ),
}
"""By name: what is wrong with the parameters, the kind, and what the first line says of it."""


@pytest.mark.parametrize("name", LIES)
def test_parameters_that_are_wrong(cluster: OnePrefillTwoDecode, name: str) -> None:
    lie, kind, word = LIES[name]
    key = f"why-wrong-{name}"
    answer = cluster.fail.decode(prompt(TOKENS, key), prefilled(cluster.fail, key) | lie, key)
    assert answer.status == 500
    assert_names(why(key, cluster.failing), kind, word)


def test_parameters_that_were_used_before(cluster: OnePrefillTwoDecode) -> None:
    key = "why-repeated"
    params = prefilled(cluster.fail, f"{key}-first")
    assert cluster.fail.decode(prompt(TOKENS, f"{key}-first"), params, f"{key}-first").ok
    answer = cluster.fail.decode_client.complete(
        prompt(TOKENS, f"{key}-first"), request_id=f"{key}-again", kv_transfer_params=params, cache_salt="again"
    )
    assert answer.ok, "computed"
    assert_names(why(f"{key}-again", cluster.failing), "AlreadyRead", "another request")


def test_a_lease_that_has_expired(cluster: OnePrefillTwoDecode) -> None:
    """First as P knows it, of which no D has heard; then as D knows it."""
    compile_command()  # which the lease would not wait for
    key = "why-expired"
    params = prefilled(cluster.fail, key)
    said = why(key, cluster.prefill)
    assert said.status == 4
    assert "no decode engine is known to read them" in said.first_line
    cluster.traces.ended_lease(key, LEASE_SECONDS + 20)
    assert_names(why(key, cluster.prefill), "LeaseExpired", "no decode engine has asked for it")
    assert cluster.fail.decode(prompt(TOKENS, key), params, key).status == 500
    assert_names(why(key, cluster.failing), "LeaseOver", "expired")


def test_a_prefill_engine_that_is_stopped(cluster: OnePrefillTwoDecode) -> None:
    """All of its processes, in the middle of a READ. The request waits."""
    service, engine, key = cluster.recompute, cluster.recomputing, "why-stopped"
    silent = (*engine_option(engine), "--timeout", SILENT_SECONDS)

    def ask_again() -> Said:
        """When P has answered meanwhile."""
        cluster.prefill.pause()
        said = run("why", key, *silent)
        cluster.prefill.resume()
        return said

    assert service.pd(prompt(TOKENS, "why-before-the-stop"), "why-before-the-stop").ok
    compile_command()
    params = prefilled(service, key)
    cluster.prefill.pause()
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(service.decode, prompt(TOKENS, key), params, key)
            cluster.traces.request_in(key, "reading", "proving")
            said = run("why", key, *silent)
            ps = run("ps", *silent, "--json")
            cluster.prefill.resume()
            timed(key, ask_again, said)
            assert_names(said, "HandshakeTimeout", "does not answer", "the-prefill-engine", status=4)
            assert ps.status == 0, ps.text
            decode, *known = json.loads(ps.text)["engines"]
            problems = {each["address"]: each["problem_kind"] for each in known}
            assert problems[f"{LOOPBACK}:{cluster.prefill.options.side_channel_port}"] == "HandshakeTimeout"
            (row,) = decode["ranks"][0]["requests"]
            assert key in row["request_id"]
            assert answer.result().ok
    finally:
        cluster.prefill.resume()


def test_a_prefill_engine_that_is_dead(cluster: OnePrefillTwoDecode) -> None:
    key = "why-dead"
    params = prefilled(cluster.fail, key)
    cluster.prefill.kill()
    assert cluster.fail.decode(prompt(TOKENS, key), params, key).status == 500
    assert_names(why(key, cluster.failing), "ConnectionRefused", "nothing listens")
    doctor = run("doctor", *engine_option(cluster.failing), "--timeout", TIMEOUT_SECONDS)
    assert doctor.status == 1
    assert "ConnectionRefused" in doctor.text
    assert "silent local prefill" in doctor.text
    assert "UCX opens tcp" in doctor.text
    nobody = run("doctor", *engine_option(cluster.prefill), "--timeout", TIMEOUT_SECONDS)
    assert nobody.status == 2


def test_a_prefill_engine_with_another_model(unmended: OnePrefillTwoDecode) -> None:
    """In the place of the dead one. Both models have the same tokenizer."""
    cluster, key = unmended, "why-model"
    cluster.restart_prefill(model=tiny_gemma(), engine_id="another-model")
    params = prefilled(cluster.fail, key)
    # The number of block tables differs too, which D's scheduler would find first.
    for of_each_table in ("remote_block_ids", "first_tokens"):
        params[of_each_table] = params[of_each_table][:1]
    assert cluster.fail.decode(prompt(TOKENS, key), params, key).status == 500
    said = why(key, cluster.failing)
    assert_names(said, "Incompatible", "model: ", "gemma", "llama")
    doctor = run("doctor", *engine_option(cluster.failing), "--timeout", TIMEOUT_SECONDS)
    assert doctor.status == 1
    assert "gemma" in doctor.text


# --- a full quarantine ------------------------------------------------------------------------------------------------

STUCK = ("why-stuck-1", "why-stuck-2")
"""Requests whose READs do not end. The blocks of one alone do not fill the quarantine."""
STUCK_BLOCKS = len(STUCK) * blocks_of(TOKENS)
LIMIT_BLOCKS = STUCK_BLOCKS - 1
SHORT_SECONDS = 6.0
"""For a request as a whole, and for a handshake."""
QUIESCE_SECONDS = 2.0
"""How long each of the stuck ones then waits for its READs, and the longest back-off."""
SERVED_AGAIN_SECONDS = 60.0
BESIDE_ONE_THAT_HANGS = ("--timeout", "4")
"""The command waits for the stopped engine until then."""
LONG_LEASE_SECONDS = 120.0
"""Longer than P is stopped."""
HANGING_ID, HEALTHY_ID = "the-hanging-engine", "the-healthy-engine"


class TwoPrefillOneDecode:
    """READs go over TCP: they need the help of the engine that lends, and do not end while it is stopped."""

    def __init__(self, directory: Path) -> None:
        self.traces = Traces(directory / "traces")
        common: dict[str, Any] = {
            "trace_directory": self.traces.directory,
            "environment": {"UCX_TLS": OVER_TCP},
            "arguments": ("--num-gpu-blocks-override", str(DECODE_BLOCKS)),
        }
        lends: dict[str, Any] = common | {
            "kv_role": "kv_producer",
            "extra_config": {"kv_lease_duration": LONG_LEASE_SECONDS},
        }
        reads: dict[str, Any] = common | {
            "kv_role": "kv_consumer",
            "extra_config": {
                "handshake_timeout_seconds": SHORT_SECONDS,
                "request_timeout_seconds": SHORT_SECONDS,
                "quiesce_timeout_seconds": QUIESCE_SECONDS,
                "backoff_max_seconds": QUIESCE_SECONDS,
                "quarantine_limit": (LIMIT_BLOCKS + 0.5) / DECODE_BLOCKS,
            },
        }
        self._engines = EngineSet()
        self.hanging, self.healthy, self.decode = self._engines.start(
            small_options(directory, "hanging", core=0, engine_id=HANGING_ID, **lends),
            small_options(directory, "healthy", core=0, engine_id=HEALTHY_ID, **lends),
            small_options(directory, "decode", core=1, **reads),
        )
        self.from_hanging = PrefillDecode(self.hanging, self.decode)
        self.from_healthy = PrefillDecode(self.healthy, self.decode)

    def close(self) -> None:
        for service in (self.from_hanging, self.from_healthy):
            service.close()
        self._engines.stop()


@pytest.fixture
def two_prefill(room: Room) -> Iterator[TwoPrefillOneDecode]:
    """Both prefill engines run at the end, whatever the test has done."""
    group = room.occupy(TwoPrefillOneDecode)
    yield group
    group.hanging.resume()


def quarantines(engine: Engine) -> list[dict[str, Any]]:
    """What `ps` says of the blocks that this decode engine keeps aside."""
    ps = run("ps", *engine_option(engine), *BESIDE_ONE_THAT_HANGS, "--json")
    assert ps.status == 0, ps.text
    found: list[dict[str, Any]] = json.loads(ps.text)["engines"][0]["ranks"][0].get("quarantines", [])
    return found


def served(group: TwoPrefillOneDecode, service: PrefillDecode, key: str) -> bool | None:
    """True if a request of that name is answered, which is then with KV that was read."""
    answer = service.pd(prompt(TOKENS, key), key)
    if not answer.ok:
        return None
    assert answer.token_ids == service.alone(prompt(TOKENS, key)).token_ids
    group.traces.assert_plain(key)
    return True


def served_soon(group: TwoPrefillOneDecode, service: PrefillDecode, name: str) -> None:
    """Once D is connected, for which it has no more time than for a request."""
    keys = (f"{name}-{number}" for number in itertools.count())
    wait_for(lambda: served(group, service, next(keys)), f"{name}: a request that is served", SERVED_AGAIN_SECONDS)


def test_a_full_quarantine(two_prefill: TwoPrefillOneDecode) -> None:
    """READs from a stopped engine do not end; so nothing is read from a healthy one either, until its blocks are back.

    D is connected before the stop, and a READ does not wait for an answer of P: so D orders the READs whose source is
    stopped already, and they cannot be over before.
    """
    group, decode, refused = two_prefill, two_prefill.decode, "why-refused"
    client = group.from_hanging.decode_client
    for name, service in (("hanging", group.from_hanging), ("healthy", group.from_healthy)):
        served_soon(group, service, f"why-before-{name}")
    assert client.blocks_are_free()
    before = Page.of(client)
    assert before[c.QUARANTINED_BLOCKS] == 0
    params = {key: prefilled(group.from_hanging, key) for key in STUCK}
    group.hanging.pause()
    with ThreadPoolExecutor(len(STUCK)) as pool:
        answers = [pool.submit(group.from_hanging.decode, prompt(TOKENS, key), params[key], key) for key in STUCK]
        for key in STUCK:
            group.traces.request_in(key, "reading", "draining", *TERMINAL["request"])  # see their states below
        assert [each.result().status for each in answers] == [500] * len(STUCK)
    for key in STUCK:
        request = group.traces.ended_request(key)
        assert request.states == ("pending_handshake", "reading", "draining", "failed")
        assert_names(
            why(key, decode, *BESIDE_ONE_THAT_HANGS),
            "Quarantined",
            f"READs from prefill engine {HANGING_ID} did not end in time",
        )

    answer = group.from_healthy.decode(prompt(TOKENS, refused), prefilled(group.from_healthy, refused), refused)
    assert answer.status == 500
    said = why(refused, decode, *BESIDE_ONE_THAT_HANGS)
    assert_names(said, "QuarantineFull", f"{STUCK_BLOCKS} KV blocks", f"allows {LIMIT_BLOCKS}", HANGING_ID)
    assert HEALTHY_ID not in said.first_line
    group.traces.ended_lease(refused)  # P is told: long before its time is over
    kept = quarantines(decode)
    assert sorted((row["peer"], row["blocks"]) for row in kept) == [(HANGING_ID, blocks_of(TOKENS))] * len(STUCK)
    assert group.from_healthy.alone(prompt(TOKENS, "needs-no-other-engine")).ok
    page = wait_for(
        lambda: found if (found := Page.of(client))[c.QUARANTINED_BLOCKS] == STUCK_BLOCKS else None, "the gauge"
    )
    assert page[c.QUARANTINED_BLOCKS] == STUCK_BLOCKS == sum(row["blocks"] for row in kept)
    assert page[c.QUARANTINED] - before[c.QUARANTINED] == len(STUCK)
    for kind, requests in (("Quarantined", len(STUCK)), ("QuarantineFull", 1)):
        assert page[c.FAILED_BY_KIND, kind] - before[c.FAILED_BY_KIND, kind] == requests
    assert group.from_healthy.decode_client.metric("vllm:kv_cache_usage_perc") > 0

    group.hanging.resume()
    wait_for(lambda: True if not quarantines(decode) else None, "the end of the quarantine")
    assert client.blocks_are_free()
    assert_nothing_is_open(client)
    assert Page.of(client)[c.QUARANTINED] == page[c.QUARANTINED]
    served_soon(group, group.from_healthy, "why-after-healthy")
    served_soon(group, group.from_hanging, "why-after-hanging")
    for line in ("from now on nothing is read from any engine", "KV is read again"):
        assert decode.log().count(line) == 1
