"""A small prefill/decode client: what a router in front of the engines does, and nothing else.

A disaggregated request is two calls. The first asks the prefill engine for one token and for parameters that name the
blocks it keeps; the second hands these parameters to the decode engine, which fetches the blocks and goes on from
there. Greedy decoding of a fixed number of tokens, so that two answers can be compared token by token.

Errors of the engine are results here, not exceptions: the tests are about them.
"""

from __future__ import annotations

import http.client
import json
import select
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.e2e.engines import Engine

ANSWER_TOKENS = 16
CALL_TIMEOUT_SECONDS = 120.0

Prompt = str | list[int] | Mapping[str, Any]
"""Text, tokens, or fields of the call's body: with `messages` it is a chat, and `model` may name an adapter."""

NO_ANSWER = 0
"""Status of a call that got no HTTP answer at all: refused, reset or timed out."""

REQUEST_TRANSFER: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""kv_transfer_params that ask a prefill engine to keep the blocks of the prompt."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Outcome of one call."""

    status: int
    """HTTP status, or NO_ANSWER."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None
    prompt_tokens: int
    prompt_token_ids: tuple[int, ...]
    """Of a chat; an image is as many tokens there as the model sees."""
    cached_tokens: int
    """Prompt tokens that the engine did not compute itself, where it says so."""
    error: str
    """What the engine answered, when the status is not 200."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the engine computed an answer; a failed KV load is status 200 with finish reason `error`."""
        return self.status == httpx.codes.OK and self.finish_reason in ("length", "stop")


class Leaving:
    """A client that has sent its call, reads no answer, and goes away when it is told to."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    @property
    def is_answered(self) -> bool:
        """Whether the engine has said anything yet, or has closed the connection."""
        return bool(select.select([self._connection.sock], [], [], 0)[0])


class Client:
    """Calls one engine; of several data-parallel ones, the one with that rank. Threads may share it."""

    def __init__(
        self, engine: Engine, timeout_seconds: float = CALL_TIMEOUT_SECONDS, data_parallel_rank: int | None = None
    ) -> None:
        self._engine_label = "" if data_parallel_rank is None else f'engine="{data_parallel_rank}"'
        self._rank_header = {} if data_parallel_rank is None else {"X-data-parallel-rank": str(data_parallel_rank)}
        self._host, self._port = engine.options.host, engine.options.http_port
        self._http = httpx.Client(
            base_url=f"http://{self._host}:{self._port}",
            timeout=httpx.Timeout(timeout_seconds),
            # A connection each: the server closes one that was idle for five seconds, perhaps as a request is sent.
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=0),
            trust_env=False,  # a proxy set for downloads has no business on the loopback
            headers=self._rank_header,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; calls under way fail."""
        self._http.close()

    def complete(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = ANSWER_TOKENS,
        request_id: str | None = None,
        kv_transfer_params: Any = None,
        cache_salt: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Answer:
        """One completion. `cache_salt` keeps the request away from cached prefixes of requests without that salt.

        After `timeout_seconds` without an answer the connection is closed: the engine sees a client that went away.
        """
        body = _body(prompt, max_tokens, kv_transfer_params)
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_seconds is None else httpx.Timeout(timeout_seconds)
        started = time.perf_counter()
        try:
            response = self._http.post(
                _path(body), content=_encoded(body), headers=_headers(request_id), timeout=timeout
            )
        except httpx.HTTPError as error:
            return _no_answer(f"{type(error).__name__}: {error}", time.perf_counter() - started)
        return _answer(response, time.perf_counter() - started)

    @contextmanager
    def leaving(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = ANSWER_TOKENS,
        request_id: str | None = None,
        kv_transfer_params: Any = None,
    ) -> Iterator[Leaving]:
        """One completion whose client goes away when the block is left. So it can wait until the engine has come as far
        as it wants, where a timeout of `complete` leaves that to the machine."""
        body, headers = _body(prompt, max_tokens, kv_transfer_params), _headers(request_id) | self._rank_header
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CALL_TIMEOUT_SECONDS)
        try:
            connection.request("POST", _path(body), _encoded(body), headers)
            yield Leaving(connection)
        finally:
            connection.close()

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int = ANSWER_TOKENS,
        request_id: str | None = None,
        kv_transfer_params: Any = None,
    ) -> Generator[int, None, None]:
        """One completion, token by token. Closing the generator closes the connection in the middle of the answer.

        Raises httpx.HTTPStatusError when the engine answers with an error before the first token.
        """
        body = _body(prompt, max_tokens, kv_transfer_params) | {"stream": True}
        headers = _headers(request_id)
        with self._http.stream("POST", "/v1/completions", content=_encoded(body), headers=headers) as response:
            response.raise_for_status()
            for line in _lines(response.iter_bytes()):
                event = line.strip().removeprefix(b"data: ")
                if event and event != b"[DONE]":
                    yield from json.loads(event)["choices"][0]["token_ids"]

    def samples(self, prompt: str, count: int, request_id: str, kv_transfer_params: Any) -> list[tuple[int, ...]]:
        """The tokens of `count` answers to one prompt. Raises httpx.HTTPStatusError."""
        # Of the most probable token only: vLLM gives several answers to sampling alone.
        body = _body(prompt, ANSWER_TOKENS, kv_transfer_params) | {"n": count, "temperature": 1, "top_k": 1}
        response = self._http.post("/v1/completions", content=_encoded(body), headers=_headers(request_id))
        return [tuple(choice["token_ids"]) for choice in response.raise_for_status().json()["choices"]]

    def session(
        self, inputs: Iterable[tuple[list[int], int]], request_id: str, kv_transfer_params: Any, *, in_turns: bool
    ) -> tuple[list[int], Any]:
        """A session of streamed input, each with how many tokens answer it: all of these, and the `kv_transfer_params`
        of the answer. The engine needs `tests.e2e.streamed_input`, which says what `in_turns` is. Raises
        httpx.HTTPStatusError."""
        body = {
            "id": request_id,
            "kv_transfer_params": kv_transfer_params,
            "inputs": [{"tokens": tokens, "max_tokens": count} for tokens, count in inputs],
            "in_turns": in_turns,
        }
        answer = self._http.post("/session", json=body).raise_for_status().json()
        return answer["token_ids"], answer["kv_transfer_params"]

    def logprobs(
        self,
        prompt: str,
        *,
        request_id: str | None = None,
        kv_transfer_params: Any = None,
        cache_salt: str | None = None,
    ) -> list[dict[str, float]]:
        """For each token of one completion, the logarithms of the probabilities of the five most probable ones, by the
        token's id as vLLM writes it. Raises httpx.HTTPStatusError.
        """
        body = _body(prompt, ANSWER_TOKENS, kv_transfer_params) | {"logprobs": 5, "return_tokens_as_token_ids": True}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        response = self._http.post("/v1/completions", content=_encoded(body), headers=_headers(request_id))
        found: list[dict[str, float]] = response.raise_for_status().json()["choices"][0]["logprobs"]["top_logprobs"]
        return found

    def reset_cache(self, *, with_running: bool = False) -> bool | None:
        """What vLLM's /reset_prefix_cache says to a reset that includes the connector; None: it answers with an error.
        The engine needs VLLM_SERVER_DEV_MODE."""
        asked = {"reset_external": "true", "reset_running_requests": str(with_running).lower()}
        response = self._http.post("/reset_prefix_cache", params=asked)
        return response.json()["success"] if response.status_code == httpx.codes.OK else None

    def sleep(self) -> bool:
        """Have the engine give the memory of its KV cache up, when nothing is under way; False: it answers with an
        error. The engine needs VLLM_SERVER_DEV_MODE and --enable-sleep-mode."""
        return self._http.post("/sleep", params={"level": "1", "mode": "abort"}).status_code == httpx.codes.OK

    def wake_up(self) -> None:
        """End a sleep."""
        self._http.post("/wake_up").raise_for_status()

    def load_adapter(self, name: str, path: Path) -> None:
        """Have the weights at `path` stand under that name, whatever has. The engine needs
        VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
        self._http.post("/v1/load_lora_adapter", json=body).raise_for_status()

    def metrics_page(self) -> str:
        """Everything that the server shows to Prometheus."""
        return self._http.get("/metrics").raise_for_status().text

    def metric(self, name: str) -> float:
        """Value of a counter or gauge of the engine, added up over its labels; 0 when it does not exist yet."""
        values = (line.rpartition(" ") for line in self.metrics_page().splitlines())
        return sum(
            float(value)
            for labelled, _, value in values
            if labelled.partition("{")[0] == name and self._engine_label in labelled
        )

    def blocks_are_free(self, timeout_seconds: float = 20.0) -> bool:
        """Whether the engine gets to a state where no request holds KV blocks.

        The gauge is written when the engine steps, and blocks of a lease that has ended are freed at a step: so a
        small request of its own makes it step.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            self.complete("step", max_tokens=1)
            if self.metric("vllm:kv_cache_usage_perc") == 0:
                return True
            time.sleep(0.1)
        return False


class PrefillDecode:
    """A prefill engine and a decode engine as one service; of several data-parallel ones, those with these ranks."""

    def __init__(
        self,
        prefill: Engine,
        decode: Engine,
        timeout_seconds: float = CALL_TIMEOUT_SECONDS,
        data_parallel_ranks: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.decode_engine = decode
        self.prefill_client = Client(prefill, timeout_seconds, data_parallel_ranks[0])
        self.decode_client = Client(decode, timeout_seconds, data_parallel_ranks[1])

    def __enter__(self) -> PrefillDecode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to both engines."""
        self.prefill_client.close()
        self.decode_client.close()

    def decode_from_another(self, asked: Prompt, other: Prompt, max_tokens: int = ANSWER_TOKENS) -> Answer:
        """D's answer to `asked` with the KV of `other`: a router takes one for the other, and the digest that shows it
        too. Both leases end."""
        of_other, own = self.prefill(other).kv_transfer_params, self.prefill(asked).kv_transfer_params
        assert of_other is not None
        assert own is not None
        shown = {key: own[key] for key in ("prefix_digests",) if key in own}
        answer = self.decode(asked, of_other | shown, max_tokens=max_tokens)
        self.decode(asked, own, max_tokens=max_tokens)
        return answer

    def prefill(self, prompt: Prompt, request_id: str | None = None) -> Answer:
        """Compute the prompt on P; `kv_transfer_params` of the answer says where the blocks are."""
        return self.prefill_client.complete(
            prompt, max_tokens=1, request_id=request_id, kv_transfer_params=REQUEST_TRANSFER
        )

    def decode(
        self,
        prompt: Prompt,
        kv_transfer_params: Mapping[str, Any],
        request_id: str | None = None,
        max_tokens: int = ANSWER_TOKENS,
        timeout_seconds: float | None = None,
    ) -> Answer:
        """Answer on D from blocks that P keeps."""
        return self.decode_client.complete(
            prompt,
            max_tokens=max_tokens,
            request_id=request_id,
            kv_transfer_params=kv_transfer_params,
            timeout_seconds=timeout_seconds,
        )

    def pd(self, prompt: Prompt, request_id: str | None = None, max_tokens: int = ANSWER_TOKENS) -> Answer:
        """Both calls. The answer is D's, or P's when P did not answer or kept no blocks."""
        prefilled = self.prefill(prompt, request_id)
        if not prefilled.ok or not prefilled.kv_transfer_params:
            return prefilled
        return self.decode(prompt, prefilled.kv_transfer_params, request_id, max_tokens)

    def alone(self, prompt: Prompt, max_tokens: int = ANSWER_TOKENS) -> Answer:
        """What D computes without P. Salted: neither uses cached blocks of a transferred request nor leaves any."""
        return self.decode_client.complete(prompt, max_tokens=max_tokens, cache_salt="computed-alone")

    def prefill_concurrently(self, prompts: Mapping[str, Prompt]) -> dict[str, dict[str, Any]]:
        """The parameters of all prompts, computed on P at once, by request id. Raises RuntimeError when P fails."""
        answers = _at_once({key: partial(self.prefill, prompt, key) for key, prompt in prompts.items()})
        params = {key: answer.kv_transfer_params for key, answer in answers.items()}
        if missing := [key for key, each in params.items() if not each]:
            raise RuntimeError(f"P kept no blocks for {missing}: {answers[missing[0]].error}")
        return {key: each for key, each in params.items() if each}

    def decode_concurrently(
        self, prompts: Mapping[str, Prompt], params: Mapping[str, Mapping[str, Any]], max_tokens: int = ANSWER_TOKENS
    ) -> dict[str, Answer]:
        """`decode` for all at once, by request id."""
        return _at_once(
            {key: partial(self.decode, prompt, params[key], key, max_tokens) for key, prompt in prompts.items()}
        )

    def pd_concurrently(self, prompts: Mapping[str, Prompt], max_tokens: int = ANSWER_TOKENS) -> dict[str, Answer]:
        """`pd` for all at once, by request id."""
        return _at_once({key: partial(self.pd, prompt, key, max_tokens) for key, prompt in prompts.items()})


def _at_once(calls: Mapping[str, Callable[[], Answer]]) -> dict[str, Answer]:
    with ThreadPoolExecutor(max_workers=max(1, len(calls))) as pool:
        answers = {key: pool.submit(call) for key, call in calls.items()}
        return {key: answer.result() for key, answer in answers.items()}


def _body(prompt: Prompt, max_tokens: int, kv_transfer_params: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    body |= prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return body


def _path(body: Mapping[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Ended by a line feed and nothing else: a token's text may hold other characters that end lines in Unicode."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole


def _encoded(body: Mapping[str, Any]) -> bytes:
    """JSON that may hold NaN, which httpx refuses to send and vLLM accepts."""
    return json.dumps(body).encode()


def _headers(request_id: str | None) -> dict[str, str]:
    content = {"Content-Type": "application/json"}
    return content if request_id is None else content | {"X-Request-Id": request_id}


def _answer(response: httpx.Response, seconds: float) -> Answer:
    if response.status_code != httpx.codes.OK:
        return _no_answer(response.text, seconds, response.status_code)
    body = response.json()
    choice = body["choices"][0]
    usage = body.get("usage") or {}
    return Answer(
        status=response.status_code,
        text=choice["message"]["content"] if "message" in choice else choice["text"],
        token_ids=tuple(choice.get("token_ids") or ()),
        finish_reason=choice["finish_reason"],
        kv_transfer_params=body.get("kv_transfer_params"),
        prompt_tokens=usage.get("prompt_tokens", 0),
        prompt_token_ids=tuple(body.get("prompt_token_ids") or ()),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        error="",
        seconds=seconds,
    )


def _no_answer(error: str, seconds: float, status: int = NO_ANSWER) -> Answer:
    return Answer(
        status=status,
        text="",
        token_ids=(),
        finish_reason=None,
        kv_transfer_params=None,
        prompt_tokens=0,
        prompt_token_ids=(),
        cached_tokens=0,
        error=error,
        seconds=seconds,
    )
