"""The clients of a run: requests with known answers, in the ways in which clients and routers treat engines.

Each client does what a router does: it asks a prefill engine, and the decode engine with that one's parameters. A
prefill engine that does not answer in time is left alone for a moment; without any the decode engine gets the prompt
without parameters. What a prefill engine did not answer is no error of the service, and is counted apart.

Requests are drawn from the seed by number. What became of each call to a decode engine is a `Call`.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from tests.chaos.cluster import ChaosCluster
from tests.chaos.plan import LEASE_SECONDS
from tests.e2e.client import NO_ANSWER, REQUEST_TRANSFER, Answer, Client
from tests.e2e.cluster import CHUNK_TOKENS, prompt

ANSWER_TOKENS = 12
PROMPTS = 40
PROMPT_TOKENS = (20, 700)
COMMON_PREFIX_TOKENS = 200
CLIENTS_PER_ENGINE = 3
PAUSE_SECONDS_MAX = 0.3
PREFILL_TIMEOUT_SECONDS = 4.0
LEFT_ALONE_SECONDS = 1.5
"""For how long a client does not ask a prefill engine that did not answer."""
CALL_TIMEOUT_SECONDS = 60.0
"""A call to a decode engine that lasts so long counts as one that never ends."""
COMPUTE_AT_ONCE = 4
PAIR_ATTEMPTS = 3
LARGE_BYTES = 100_000
"""Of parameters; one of MALFORMED has so many."""
BLOCKS_UNKNOWN = 1 << 20
"""A block that no engine here has."""


class Usage(enum.Enum):
    """How a client treats a request."""

    PLAIN = "plain"
    LEFT_IN_PREFILL = "client leaves during the prefill"
    LEFT_WAITING = "client leaves before the answer begins"
    LEFT_IN_ANSWER = "client leaves in the middle of the answer"
    TWICE = "parameters used twice"
    BOTH = "parameters used on both decode engines"
    LATE = "parameters used while their lease may end"
    MALFORMED = "malformed parameters"
    LOST = "parameters lost"


_WEIGHTS = {
    Usage.PLAIN: 60,
    Usage.LEFT_IN_PREFILL: 4,
    Usage.LEFT_WAITING: 6,
    Usage.LEFT_IN_ANSWER: 4,
    Usage.TWICE: 6,
    Usage.BOTH: 5,
    Usage.LATE: 3,
    Usage.MALFORMED: 8,
    Usage.LOST: 2,
}

CAUSED_BY_CLIENT = {Usage.TWICE, Usage.LATE, Usage.MALFORMED}
"""Whose errors are the client's own under the policy `fail`. Under `recompute` only one of them remains: parameters
that vLLM itself refuses."""

Params = dict[str, Any]


def _with(**fields: Any) -> Callable[[Params], Params]:
    return lambda params: params | fields


def _without(name: str) -> Callable[[Params], Params]:
    return lambda params: {key: value for key, value in params.items() if key != name}


MALFORMED: tuple[Callable[[Params], Any], ...] = (
    _without("remote_engine_id"),
    _without("remote_port"),
    _with(remote_port="5600"),
    _with(remote_port=-1),
    _with(remote_host="127.0.0.1:1,ipc:///tmp/x"),
    _with(remote_engine_id=7),
    _with(remote_engine_id="somebody-else"),
    _with(remote_request_id="x" * LARGE_BYTES),
    _with(tp_size=0),
    _with(tp_size=2),
    _with(pp_size=2**62),
    _with(remote_block_ids=[]),
    _with(remote_block_ids=[["1"]]),
    _with(remote_block_ids=[[-1]]),
    _with(remote_block_ids=[[BLOCKS_UNKNOWN] * 4]),
    _with(do_remote_prefill="yes"),
    _with(lease_number="first"),
    lambda _: ["do_remote_prefill"],
    lambda _: "text",
)
"""What a router may make of parameters. The last two are refused by vLLM."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call to a decode engine.

    Attributes:
        error: what the client saw; empty: an answer, or it left.
        is_right: None: there was no answer to compare.
        name: the id that it sent.
        prefill: the prefill engine that had answered it; empty: none had.
    """

    engine: str
    name: str
    usage: Usage
    at_seconds: float
    seconds: float
    error: str = ""
    is_right: bool | None = None
    prefill: str = ""
    left: bool = False

    @property
    def is_wrong(self) -> bool:
        return self.is_right is False

    @property
    def never_ended(self) -> bool:
        return self.seconds >= CALL_TIMEOUT_SECONDS and not self.left

    @property
    def is_caused_by_client(self) -> bool:
        return self.usage in CAUSED_BY_CLIENT


@dataclass(frozen=True)
class Prompt:
    text: str
    answer: tuple[int, ...]


@dataclass
class Results:
    """What all clients saw."""

    calls: list[Call] = field(default_factory=list)
    lost_prefills: Counter[str] = field(default_factory=Counter)
    """Calls to prefill engines that gave no parameters, by what the router saw."""


class Load:
    """Steady load on both decode engines, from `start` to `stop`."""

    def __init__(self, cluster: ChaosCluster, seed: int) -> None:
        self._seed = seed
        self._prefill = {name: Client(each.engine) for name, each in cluster.prefill.items()}
        self._host = cluster.host
        self._ports = {name: each.proxy.port for name, each in cluster.prefill.items()}
        self._decode = {name: Client(engine, CALL_TIMEOUT_SECONDS) for name, engine in cluster.decode.items()}
        self._left_alone: dict[str, float] = {}
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._started = time.monotonic()
        self._failure: BaseException | None = None
        self._warm_up()
        self._prompts = self._computed()
        self.results = Results()

    def start(self) -> None:
        self._started = time.monotonic()
        for engine in self._decode:
            for number in range(CLIENTS_PER_ENGINE):
                thread = threading.Thread(target=self._run, args=(engine,), name=f"client-{engine}-{number}")
                thread.start()
                self._threads.append(thread)

    def stop(self) -> None:
        """No new request; returns when every call has ended. Raises what a client ran into that is a mistake here."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        for client in (*self._prefill.values(), *self._decode.values()):
            client.close()

    def one_of_each(self) -> list[str]:
        """A plain request for each pair of engines, so that all are connected; what went wrong. One that was not served
        is asked for again: the machine may stand still for as long as a handshake may take. A wrong answer is none."""
        problems = []
        for prefill, decode in itertools.product(self._prefill, self._decode):
            for _ in range(PAIR_ATTEMPTS):
                problem, is_final = self._one_of_pair(prefill, decode)
                if is_final:
                    break
            if problem:
                problems.append(f"{prefill} to {decode}: {problem}")
        return problems

    def _one_of_pair(self, prefill: str, decode: str) -> tuple[str, bool]:
        """What went wrong, empty if nothing did; and whether there was an answer from lent KV, right or not."""
        wanted = self._prompts[next(self._numbers) % PROMPTS]
        name = f"pair-{prefill}-{decode}-{next(self._numbers)}"
        params = self._ask(prefill, wanted.text, name, name, CALL_TIMEOUT_SECONDS)
        if params is None:
            return "no parameters", False
        answer = self._decode[decode].complete(
            wanted.text, max_tokens=ANSWER_TOKENS, request_id=name, kv_transfer_params=params, cache_salt=name
        )
        if not answer.ok:
            return answer.error or f"finish reason {answer.finish_reason}", False
        return "" if answer.token_ids == wanted.answer else "a wrong answer", True

    # --- requests ---------------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """What is kept once it has been needed is not to be taken for a leak.

        A step of each size on each decode engine: vLLM's matrix products on CPUs keep memory for each number of tokens
        that they have once computed (docs/performance.md). And a large message: with the first one of 64 KiB, which
        vLLM's server sends to its engine core without a copy, pyzmq starts a thread that frees such messages, with a
        context of its own (three threads and seven files).
        """
        for name, client in self._decode.items():
            client.complete(prompt(1, name), max_tokens=1, kv_transfer_params={"unknown": "x" * LARGE_BYTES})
            for tokens in range(1, CHUNK_TOKENS + 1):
                client.complete(prompt(tokens, f"{name} {tokens}"), max_tokens=1, cache_salt="warm-up")

    def _computed(self) -> list[Prompt]:
        """Prompts, and what an engine answers that computes them by itself. A third have a prefix in common."""
        rng = random.Random(f"prompts {self._seed}")
        prefix = prompt(COMMON_PREFIX_TOKENS, f"prefix {self._seed}")
        texts = [
            (prefix if number % 3 == 0 else "") + prompt(rng.randint(*PROMPT_TOKENS), f"{self._seed} {number}")
            for number in range(PROMPTS)
        ]
        client = next(iter(self._decode.values()))
        compute = partial(client.complete, max_tokens=ANSWER_TOKENS, cache_salt="computed-alone")
        with ThreadPoolExecutor(COMPUTE_AT_ONCE) as pool:
            answers = list(pool.map(compute, texts))
        if bad := [answer.error for answer in answers if not answer.ok]:
            raise RuntimeError(f"no answers to compare with: {bad[0]}")
        return [Prompt(text, answer.token_ids) for text, answer in zip(texts, answers, strict=True)]

    def _run(self, engine: str) -> None:
        try:
            while not self._stop.is_set():
                rng = random.Random(f"{self._seed} request {next(self._numbers)}")
                self._request(engine, rng, f"chaos-{rng.getrandbits(40):010x}")
                self._stop.wait(rng.uniform(0, PAUSE_SECONDS_MAX))
        except BaseException as error:
            self._failure = error
            self._stop.set()

    def _request(self, engine: str, rng: random.Random, name: str) -> None:
        (usage,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        wanted = rng.choice(self._prompts)
        # Mostly a salt of its own, so that nothing is cached and all is transferred.
        salt = name if rng.random() < 0.7 else f"salt-{rng.randrange(4)}"
        if usage is Usage.LOST:
            params = None
        elif usage is Usage.LEFT_IN_PREFILL:
            self._ask(rng.choice(list(self._prefill)), wanted.text, name, salt, rng.uniform(0.001, 0.1))
            return
        else:
            params = self._prefilled(rng, wanted.text, name, salt)
        send = partial(self._send, usage=usage, wanted=wanted, salt=salt)
        match usage:
            case Usage.LEFT_WAITING if params is not None:
                send(engine, name, params, timeout_seconds=rng.uniform(0.001, 0.3))
            case Usage.LEFT_IN_ANSWER if params is not None:
                self._leave_in_answer(engine, name, params, wanted)
            case Usage.TWICE if params is not None:
                send(engine, name, params)
                send(engine, f"{name}-again", params, salt=f"{salt}-again")
            case Usage.BOTH if params is not None:
                others = [threading.Thread(target=send, args=(each, name, params)) for each in self._decode]
                for other in others:
                    other.start()
                for other in others:
                    other.join()
            case Usage.LATE if params is not None:
                self._stop.wait(rng.uniform(0.5, 1.5) * LEASE_SECONDS)
                send(engine, name, params)
            case Usage.MALFORMED if params is not None:
                send(engine, name, rng.choice(MALFORMED)(params))
            case _:
                send(engine, name, params, usage=Usage.LOST if params is None else Usage.PLAIN)

    def _prefilled(self, rng: random.Random, text: str, name: str, salt: str) -> Params | None:
        """Parameters of the first prefill engine that answers."""
        for prefill in rng.sample(list(self._prefill), len(self._prefill)):
            if self._left_alone.get(prefill, 0.0) < time.monotonic():
                params = self._ask(prefill, text, name, salt)
                if params is not None:
                    return params
        return None

    def _ask(
        self, prefill: str, text: str, name: str, salt: str, timeout_seconds: float = PREFILL_TIMEOUT_SECONDS
    ) -> Params | None:
        answer = self._prefill[prefill].complete(
            text,
            max_tokens=1,
            request_id=name,
            kv_transfer_params=REQUEST_TRANSFER,
            cache_salt=salt,
            timeout_seconds=timeout_seconds,
        )
        if answer.ok and answer.kv_transfer_params:
            return answer.kv_transfer_params | {"remote_host": self._host, "remote_port": self._ports[prefill]}
        if timeout_seconds == PREFILL_TIMEOUT_SECONDS:
            self._left_alone[prefill] = time.monotonic() + LEFT_ALONE_SECONDS
            self.results.lost_prefills[_seen(answer) or "no parameters"] += 1
        return None

    def _send(
        self,
        engine: str,
        name: str,
        params: Any,
        *,
        usage: Usage,
        wanted: Prompt,
        salt: str,
        timeout_seconds: float | None = None,
    ) -> None:
        at_seconds = time.monotonic() - self._started
        answer = self._decode[engine].complete(
            wanted.text,
            max_tokens=ANSWER_TOKENS,
            request_id=name,
            kv_transfer_params=params,
            cache_salt=salt,
            timeout_seconds=timeout_seconds,
        )
        left = timeout_seconds is not None and answer.status == NO_ANSWER and "Timeout" in answer.error
        self.results.calls.append(
            Call(
                engine=engine,
                name=name,
                usage=usage,
                at_seconds=at_seconds,
                seconds=answer.seconds,
                error="" if left else _seen(answer),
                is_right=answer.token_ids == wanted.answer if answer.ok else None,
                prefill=self._prefill_of(params),
                left=left,
            )
        )

    def _leave_in_answer(self, engine: str, name: str, params: Mapping[str, Any], wanted: Prompt) -> None:
        started = time.monotonic()
        stream = self._decode[engine].stream(
            wanted.text, max_tokens=ANSWER_TOKENS, request_id=name, kv_transfer_params=params
        )
        error, tokens = "", []
        with contextlib.closing(stream):
            try:
                tokens = list(itertools.islice(stream, ANSWER_TOKENS // 2))
            except httpx.HTTPStatusError as failure:
                error = f"HTTP {failure.response.status_code}"
            except httpx.HTTPError as failure:
                error = type(failure).__name__
            except KeyError:
                error = "error in the stream"
        self.results.calls.append(
            Call(
                engine=engine,
                name=name,
                usage=Usage.LEFT_IN_ANSWER,
                at_seconds=started - self._started,
                seconds=time.monotonic() - started,
                error=error,
                is_right=tuple(tokens) == wanted.answer[: len(tokens)] if tokens else None,
                prefill=self._prefill_of(params),
                left=not error,
            )
        )

    def _prefill_of(self, params: Any) -> str:
        """By the port of its proxy, which no two have in common."""
        port = params.get("remote_port") if isinstance(params, dict) else None
        return next((name for name, known in self._ports.items() if known == port), "")


def _seen(answer: Answer) -> str:
    """What a client saw that got no answer; empty: it got one."""
    if answer.ok:
        return ""
    if answer.status == NO_ANSWER:
        return answer.error.partition(":")[0]
    return f"HTTP {answer.status}" if answer.status != httpx.codes.OK else f"finish reason {answer.finish_reason}"
