"""Groups of engines that the end-to-end tests share, and the questions that the tests ask of their traces.

Starting a group costs a minute and holding it costs gigabytes, so there is one at a time (`Room`): tests name the group
they need, and it is started when the group before it has been stopped. A test that breaks an engine does not mend it;
whoever needs it calls for a working one.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from connector.observe.history import History, Story, histories, matching, stories
from connector.observe.traced import TERMINAL
from connector.tools.trace_reader import read_trace
from statemachine.trace import TransitionRecord
from tests.e2e.client import PrefillDecode
from tests.e2e.engines import BLOCK_SIZE_TOKENS, OVER_TCP, EngineOptions, EngineSet
from tests.e2e.tiny_model import KV_BYTES_PER_TOKEN, tiny_llama
from tests.plain_paths import LEASE_PATHS_PLAIN, REQUEST_PATHS_PLAIN

BLOCK_BYTES = BLOCK_SIZE_TOKENS * KV_BYTES_PER_TOKEN
SETTLE_SECONDS = 25.0
"""How long a test waits for something that takes milliseconds on an idle machine."""
POLL_SECONDS = 0.05

CONTEXT_TOKENS = 1024
CHUNK_TOKENS = 64
"""Tokens per step: any longer prompt is prefilled in chunks."""
PREFILL_BLOCKS = 200
DECODE_BLOCKS = 40
"""Blocks of the KV caches: so few that running requests are preempted and that freed blocks are soon used again."""

LEASE_SECONDS = 10.0
HANDSHAKE_TIMEOUT_SECONDS = 12.0
"""Longer than the default: a machine that stands still for some seconds must not use up the time in which others are to
be served while a request waits for a dead engine, nor that of a first request, which fails without its KV."""
REQUEST_TIMEOUT_SECONDS = 16.0
PREFILL_ENGINE_ID = "the-prefill-engine"

BUILTIN_CONFIG = {"num_threads": 0}
"""By default the built-in connector's NIXL agent keeps four progress threads spinning, on the core of its engine."""

T = TypeVar("T")


def prompt(tokens: int, seed: object) -> str:
    """Letters, one token each, that share no block with those of another seed."""
    letters = random.Random(f"prompt {seed}")
    return "".join(letters.choices(string.ascii_lowercase, k=tokens))


def blocks_of(tokens: int) -> int:
    """KV blocks that a prompt takes."""
    return -(-tokens // BLOCK_SIZE_TOKENS)


def wait_for(found: Callable[[], T | None], what: str, timeout_seconds: float = SETTLE_SECONDS) -> T:
    """The first value that is not None; fails the test, saying `what` did not come, when the time is up."""
    deadline = time.monotonic() + timeout_seconds
    while (value := found()) is None:
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_seconds:g} s")
        time.sleep(POLL_SECONDS)
    return value


class Traces:
    """What the engines of a group have written so far. Requests are named by the id that the client sent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def both(self, request_id: str) -> tuple[History | None, History | None]:
        """D's request and P's lease."""
        found = self.stories(request_id)
        request = next((each for story in found for each in story.requests), None)
        leases = [each for story in found for each in story.leases]
        if request is not None:  # which may have asked another engine than the one that lends
            leases = [each for each in leases if each.subject == request.remote_request_id]
        return request, next(iter(leases), None)

    def stories(self, request_id: str) -> list[Story]:
        """Everything that went by this name."""
        told = stories(histories(read_trace(self.directory)))
        # With what vLLM puts around the id, so that `a` is found neither in `b-a` nor in `a-next`; with nothing that
        # ends it where it was a chat.
        return matching(told, f"cmpl-{request_id}-0") or matching(told, f"chatcmpl-{request_id}")

    def request_ids(self) -> set[str]:
        """The ids that clients have sent with all that D has been asked to read so far."""
        requests = (each for each in histories(read_trace(self.directory)) if each.machine == "request")
        return {each.subject.removeprefix("cmpl-").rpartition("-0-")[0] for each in requests}

    def request_in(self, request_id: str, *states: str) -> History:
        """D's request once it has come to one of `states`."""
        return wait_for(
            lambda: _reached(self.both(request_id)[0], set(states)), f"request {request_id} in {' or '.join(states)}"
        )

    def all_in_d(self, request_ids: Iterable[str]) -> None:
        """Wait until D has begun with each of these. The traces are read once for all: a test that holds many requests
        open has little time."""
        wanted = set(request_ids)
        wait_for(lambda: wanted <= self.request_ids() or None, f"requests {sorted(wanted)} on D")

    def ended_request(self, request_id: str) -> History:
        """D's request once it has ended."""
        ended = TERMINAL["request"]
        return wait_for(lambda: _reached(self.both(request_id)[0], ended), f"end of request {request_id}")

    def ended_on_ranks(self, request_id: str, ranks: int) -> list[History]:
        """D's request as each of its ranks saw it, once it has ended on all of them."""
        return self._ended_on_ranks(lambda story: story.requests, request_id, ranks)

    def ended_leases(self, request_id: str, ranks: int) -> list[History]:
        """P's lease as each of its ranks saw it, once it has ended on all of them."""
        return self._ended_on_ranks(lambda story: story.leases, request_id, ranks)

    def ended_prompts(self, request_id: str, count: int) -> list[History]:
        """D's requests for the prompts of one call, in their order, once all have ended."""
        prefixes = [f"cmpl-{request_id}-{number}-" for number in range(count)]

        def ended() -> list[History] | None:
            requests = [each for each in histories(read_trace(self.directory)) if each.machine == "request"]
            found = [each for prefix in prefixes for each in requests if each.subject.startswith(prefix)]
            return found if len(found) == count and all(each.is_over for each in found) else None

        return wait_for(ended, f"end of all {count} prompts of {request_id}")

    def ended_samples(self, request_id: str) -> list[History]:
        """D's requests for those samples of one call that were read, once all have ended."""

        def ended() -> list[History] | None:
            requests = [each for each in histories(read_trace(self.directory)) if each.machine == "request"]
            found = [each for each in requests if f"_cmpl-{request_id}-0-" in each.subject]
            return found if found and all(each.is_over for each in found) else None

        return wait_for(ended, f"end of the samples of {request_id}")

    def _ended_on_ranks(self, side: Callable[[Story], list[History]], request_id: str, ranks: int) -> list[History]:
        def ended() -> list[History] | None:
            found = [history for story in self.stories(request_id) for history in side(story)]
            return found if len(found) == ranks and all(each.is_over for each in found) else None

        return wait_for(ended, f"end of {request_id} on {ranks} ranks")

    def readers_of(self, remote_request_id: str) -> set[str]:
        """Ids of the engines that have asked for the lease of this request id on P."""
        found = histories(read_trace(self.directory))
        return {
            each.engine_id
            for each in found
            if each.machine == "request" and each.remote_request_id == remote_request_id
        }

    def ended_lease(self, request_id: str, timeout_seconds: float = SETTLE_SECONDS) -> History:
        """P's lease once it has ended."""
        ended = TERMINAL["lease"]
        return wait_for(
            lambda: _reached(self.both(request_id)[1], ended), f"end of the lease of {request_id}", timeout_seconds
        )

    def last_record(self, request_id: str) -> TransitionRecord:
        """The record with which D's request ended."""
        return self.ended_request(request_id).records[-1]

    def assert_plain(self, request_id: str) -> tuple[History, History]:
        """Both sides once they have ended: the request was read and the lease ended by its release."""
        request, lease = self.ended_request(request_id), self.ended_lease(request_id)
        assert request.states in REQUEST_PATHS_PLAIN, request
        assert lease.states in LEASE_PATHS_PLAIN, lease
        return request, lease


def _reached(history: History | None, states: set[str] | frozenset[str]) -> History | None:
    return history if history is not None and history.states[-1] in states else None


class Group(Protocol):
    """Engines that were started together."""

    def __init__(self, directory: Path) -> None: ...

    def close(self) -> None: ...


G = TypeVar("G", bound=Group)


class Room:
    """Has place for one group."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._group: Group | None = None

    def occupy(self, kind: type[G]) -> G:
        """The group of this kind, started now unless it is the one inside."""
        if not isinstance(self._group, kind):
            self.clear()
            self._group = kind(self._directory / kind.__name__)
        assert isinstance(self._group, kind)
        return self._group

    def clear(self) -> None:
        """Stop the group inside, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def small_options(directory: Path, name: str, core: int, **others: Any) -> EngineOptions:
    """Of an engine with the small Llama, unless it is said which model, and a short context."""
    others = {"model": tiny_llama(), "context_tokens": CONTEXT_TOKENS} | others
    return EngineOptions(name=name, logs=directory / "logs", core=core, **others)


def _blocks(count: int) -> tuple[str, str]:
    return ("--num-gpu-blocks-override", str(count))


class OnePrefillTwoDecode:
    """A producer and two consumers with this project's connector: one fails requests whose KV does not come, the other
    computes it itself.

    The second one talks to the producer over TCP: a READ then needs the producer's help, so that stopping its processes
    holds the READ up in the middle. Over shared memory a READ is over before anybody could step in.
    """

    def __init__(self, directory: Path) -> None:
        self.traces = Traces(directory / "traces")
        common: dict[str, Any] = {
            "trace_directory": self.traces.directory,
            "max_num_batched_tokens": CHUNK_TOKENS,
            "environment": {"VLLM_SERVER_DEV_MODE": "1"},  # caches can be reset from outside
            "changes": "tests.e2e.streamed_input",
        }
        decode: dict[str, Any] = common | {
            "core": 1,
            "kv_role": "kv_consumer",
            "arguments": _blocks(DECODE_BLOCKS),
            "extra_config": {
                "handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS,
                "request_timeout_seconds": REQUEST_TIMEOUT_SECONDS,
            },
        }
        self._engines = EngineSet()
        self.prefill, self.failing, self.recomputing = self._engines.start(
            small_options(
                directory,
                "prefill",
                core=0,
                kv_role="kv_producer",
                engine_id=PREFILL_ENGINE_ID,
                extra_config={"kv_lease_duration": LEASE_SECONDS},
                arguments=_blocks(PREFILL_BLOCKS),
                **common,
            ),
            small_options(directory, "decode-fail", **decode),
            small_options(
                directory,
                "decode-recompute",
                kv_load_failure_policy="recompute",
                **decode | {"environment": common["environment"] | {"UCX_TLS": OVER_TCP}},
            ),
        )
        self.fail = PrefillDecode(self.prefill, self.failing)
        self.recompute = PrefillDecode(self.prefill, self.recomputing)
        self.services = (self.fail, self.recompute)

    def restart_prefill(self, **changes: Any) -> None:
        """A new producer process at the same address; by default nothing else is different."""
        self.prefill.restart(**changes).wait_healthy()

    def need_prefill(self) -> None:
        """Have a working producer of the model that the others have."""
        model = self.failing.options.model
        if self.prefill.options.model != model:
            self.restart_prefill(model=model, engine_id=PREFILL_ENGINE_ID)
        elif not self.prefill.running:
            self.restart_prefill()

    def assert_serves(self, service: PrefillDecode, key: str) -> None:
        """The next request goes the plain way; what earlier ones did is over."""
        text = prompt(100, key)
        answer = service.pd(text, key)
        assert answer.ok, f"{answer.error}; {self.traces.both(key)}"
        assert answer.token_ids == service.alone(text).token_ids
        self.traces.assert_plain(key)

    def close(self) -> None:
        for service in (self.fail, self.recompute):
            service.close()
        self._engines.stop()


class BuiltinAndOurs:
    """One engine with vLLM's own connector and one with this project's, which is loaded by its plug-in's name.

    Each takes both roles. A pair of built-in ones is in the integration tests.
    """

    def __init__(self, directory: Path) -> None:
        self.traces = Traces(directory / "traces")
        self._engines = EngineSet()
        self.ours, self.builtin = self._engines.start(
            small_options(
                directory,
                "ours",
                core=0,
                connector="plugin",
                trace_directory=self.traces.directory,
                extra_config={"handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS},
            ),
            small_options(
                directory, "builtin", core=1, connector="builtin", calm_polling=True, extra_config=BUILTIN_CONFIG
            ),
        )

    def close(self) -> None:
        self._engines.stop()
