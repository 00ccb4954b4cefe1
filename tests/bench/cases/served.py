"""Real vLLM engines, a prefill and a decode one with a tiny model, as users see them: not among the default cases.

Clients send a prompt to P and what P answers to D, while D answers others whose prompts it has computed itself: first
all clients at the same time, then one after another at a pace that both pairs can keep. In the first part the engines
have as much to do as they can, so the faster pair disturbs D's others more often in a second; what a request that
arrives costs the others is seen in the second. Both pairs run from the start; the one that is not measured is stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Literal

import psutil

from tests.bench.case import Case, Round, Rounds, percentile, turns
from tests.bench.sides import WrongResult
from tests.e2e.client import PrefillDecode
from tests.e2e.cluster import BUILTIN_CONFIG, prompt
from tests.e2e.engines import Engine, EngineOptions, EngineSet
from tests.e2e.tiny_model import KV_BYTES_PER_TOKEN, tiny_llama
from tests.rig import BUILTIN, OURS

CLIENTS = 8
REQUEST_BYTES = 1 << 24
PROMPT_TOKENS = REQUEST_BYTES // KV_BYTES_PER_TOKEN
ANSWER_TOKENS = 4
OTHERS = 2
OTHER_TOKENS = 2000
"""Of an answer to one of the others, who then asks again; it is broken off when the clients have theirs."""
PACED = 5
PACE_SECONDS = 5.0
"""Between two clients of the second part."""
CONNECTORS: tuple[tuple[str, Literal["builtin", "actor"]], ...] = ((BUILTIN.label, "builtin"), (OURS.label, "actor"))


@dataclass(frozen=True)
class _Pair:
    label: str
    prefill: Engine
    decode: Engine

    def pause(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.pause()

    def resume(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.resume()

    def cpu_seconds(self) -> float:
        """Of all processes of both engines so far."""
        total = 0.0
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) in (self.prefill.pid, self.decode.pid):
                    times = process.cpu_times()
                    total += times.user + times.system
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return total


def _options(directory: Path, label: str, connector: Literal["builtin", "actor"]) -> list[EngineOptions]:
    return [
        EngineOptions(
            name=f"{label}-{role}",
            model=tiny_llama(),
            logs=directory,
            core=core,
            kv_role=role,
            connector=connector,
            context_tokens=PROMPT_TOKENS + 64,
            extra_config=BUILTIN_CONFIG if connector == "builtin" else {},
            arguments=("--max-num-seqs", str(CLIENTS + OTHERS)),
        )
        for core, role in enumerate(("kv_producer", "kv_consumer"))
    ]


@contextmanager
def _served(directory: Path) -> Iterator[Rounds]:
    options = [_options(directory, label, connector) for label, connector in CONNECTORS]
    with EngineSet() as engines:
        started = engines.start(*(each for both in options for each in both))
        both = [_Pair(label, *started[2 * number : 2 * number + 2]) for number, (label, _) in enumerate(CONNECTORS)]
        for pair in both:
            pair.pause()

        def rounds(number: int) -> Iterator[tuple[str, Round]]:
            for pair in turns(both, number):
                pair.resume()
                try:
                    yield pair.label, _measure(pair, number)
                finally:
                    pair.pause()

        for _ in rounds(0):
            continue
        yield rounds


def _measure(pair: _Pair, number: int) -> Round:
    with PrefillDecode(pair.prefill, pair.decode) as service:
        before = pair.cpu_seconds()
        served, gaps = _beside_others(service, f"{number} at once", [0.0] * CLIENTS)
        spent = pair.cpu_seconds() - before
        paced, paced_gaps = _beside_others(service, f"{number} paced", [n * PACE_SECONDS for n in range(PACED)])
    return {
        "TTFT p50, ms": percentile([whole for whole, _ in served], 50) * 1e3,
        "first token after prefill p50, ms": percentile([after for _, after in served], 50) * 1e3,
        "inter-token p99 of others, ms": percentile(gaps, 99) * 1e3,
        "CPU per request, s": spent / CLIENTS,
        "paced: TTFT p50, ms": percentile([whole for whole, _ in paced], 50) * 1e3,
        "paced: inter-token p50 of others, ms": percentile(paced_gaps, 50) * 1e3,
        "paced: inter-token p99 of others, ms": percentile(paced_gaps, 99) * 1e3,
    }


def _beside_others(
    service: PrefillDecode, name: str, begin_seconds: Sequence[float]
) -> tuple[list[tuple[float, float]], list[float]]:
    """What each client, which begins so long after now, waited (`_client`), and the gaps between the others' tokens."""
    enough = Event()
    started = time.monotonic()

    def client(n: int) -> tuple[float, float]:
        time.sleep(max(0.0, started + begin_seconds[n] - time.monotonic()))
        return _client(service, f"client {name} {n}")

    with ThreadPoolExecutor(OTHERS) as aside, ThreadPoolExecutor(len(begin_seconds)) as pool:
        others = [aside.submit(_gaps, service, f"other {name} {n}", enough) for n in range(OTHERS)]
        try:
            served = list(pool.map(client, range(len(begin_seconds))))
        finally:
            enough.set()
        return served, [gap for each in others for gap in each.result()]


def _client(service: PrefillDecode, name: str) -> tuple[float, float]:
    """Seconds until the first token: from the question to P, and from P's answer."""
    text = prompt(PROMPT_TOKENS, name)
    started = time.monotonic()
    answer = service.prefill(text)
    prefilled = time.monotonic()
    if not answer.kv_transfer_params:
        raise WrongResult(f"P kept no blocks: {answer}")
    tokens = service.decode_client.stream(text, max_tokens=ANSWER_TOKENS, kv_transfer_params=answer.kv_transfer_params)
    if next(tokens, None) is None:
        raise WrongResult("D answered without a token")
    first = time.monotonic()
    for _ in tokens:
        continue
    return first - started, first - prefilled


def _gaps(service: PrefillDecode, name: str, enough: Event) -> list[float]:
    """Seconds between the tokens of answers, until it is enough."""
    gaps: list[float] = []
    while not enough.is_set():
        last: float | None = None
        tokens = service.decode_client.stream(prompt(64, name), max_tokens=OTHER_TOKENS)
        for _ in tokens:
            now = time.monotonic()
            if last is not None:
                gaps.append(now - last)
            last = now
            if enough.is_set():
                break
        tokens.close()
    return gaps


CASES: tuple[Case, ...] = (
    Case(
        "served",
        f"vLLM with a tiny model: {CLIENTS} clients with prompts of 17 MB, {OTHERS} others on D",
        _served,
        is_default=False,
    ),
)
