"""Models, parallel sizes and block sizes beyond the plain case: each answer equals that of the decode engine alone.

A route is a pair of engines, one of which lends and one of which reads. Engines take both roles and stay for the routes
that follow, as long as two are enough: so a pair that is used in both directions is started once. Engines compute on
their own in float32, and whatever P computed is used on D as it is: an answer that differs is a wrong block.

`test_more_families` has more routes. `--builtin` runs the same with vLLM's own connector, to tell what vLLM or the
machine cannot do from what this project's connector does wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.e2e.client import PrefillDecode
from tests.e2e.cluster import BUILTIN_CONFIG, CONTEXT_TOKENS, HANDSHAKE_TIMEOUT_SECONDS, Room, Traces, prompt
from tests.e2e.engines import BLOCK_SIZE_TOKENS, Engine, EngineOptions, EngineSet
from tests.e2e.serve import ON_CUDA
from tests.e2e.tiny_model import SLIDING_WINDOW_TOKENS, tiny_deepseek, tiny_gemma, tiny_granite, tiny_llama
from tests.plain_paths import LEASE_PATHS_PLAIN, REQUEST_PATHS_PLAIN

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

LONG_BLOCK_SIZE = 2 * BLOCK_SIZE_TOKENS
CACHE_BLOCKS = 300
LEASE_SECONDS = 120.0
"""Longer than any answer takes, and than the patience of `blocks_are_free`: only a notification ends it in time."""

LENGTHS = (1, 20, 95, 319, LONG_BLOCK_SIZE, 5 * LONG_BLOCK_SIZE, 300, 700)
"""Shorter than a block; a window less a token and whole blocks, whose last token sees the last one of a block that vLLM
has freed on P by then; one and several whole blocks of either size, and parts of one behind them. The last three are
several times as long as the sliding window."""
assert {length % BLOCK_SIZE_TOKENS for length in LENGTHS[2:4]} == {(SLIDING_WINDOW_TOKENS - 1) % BLOCK_SIZE_TOKENS}
assert LENGTHS[-3] > 4 * SLIDING_WINDOW_TOKENS


@dataclass(frozen=True)
class Family:
    """A model and what its engines have in common."""

    model: Callable[[], Path]
    prefix_caching: bool
    """MLA on a CPU has none, and vLLM's CPU kernels for state-space models do not write the states it needs."""
    attention_backend: str | None = None
    dtype_on_cuda: Literal["float32", "bfloat16"] = "float32"
    chunk_tokens: int | None = None
    left_to_decode: int = 0
    """Tokens at the end of a prompt that D computes itself."""

    def loads(self, tokens: int) -> bool:
        """Whether D reads anything of a prompt."""
        return tokens > self.left_to_decode


FAMILIES = {
    "llama": Family(tiny_llama, prefix_caching=True),
    "gemma": Family(tiny_gemma, prefix_caching=True, chunk_tokens=2 * SLIDING_WINDOW_TOKENS),
    "deepseek": Family(
        tiny_deepseek,
        prefix_caching=False,
        attention_backend="TRITON_MLA" if ON_CUDA else "CPU_MLA",
        dtype_on_cuda="bfloat16",
    ),
    "granite": Family(tiny_granite, prefix_caching=False, left_to_decode=1),
}
"""The Gemma in chunks: its P gives blocks back that have left the window before the prompt is at its end. The DeepSeek
with what vLLM has for MLA on every CPU: AMX_MLA, which it prefers where it can, computes in bfloat16 only."""


@dataclass(frozen=True)
class Kind:
    """What distinguishes one engine from another."""

    family: str
    ranks: int = 1
    block_size: int = BLOCK_SIZE_TOKENS
    stages: int = 1
    """Of a pipeline; an engine with more than one only lends."""
    number: int = 1
    """Of engines that are otherwise alike."""
    staged: bool = False
    """On a device: its KV is transferred from and to the host."""
    compiled: bool = False
    """As engines start by default: compiled, and with graphs of the device."""
    verifies: bool = False
    """Checksums of all that is read."""

    def __str__(self) -> str:
        stages = f"-{self.stages}-stages" if self.stages > 1 else ""
        more = "-staged" * self.staged + "-compiled" * self.compiled + "-verifies" * self.verifies
        return f"{self.family}-{self.number}-{self.ranks}-ranks{stages}-blocks-of-{self.block_size}{more}"


@dataclass(frozen=True)
class Route:
    """Who computes and who reads."""

    prefill: Kind
    decode: Kind

    def __str__(self) -> str:
        return f"{self.prefill} to {self.decode}"


ROUTES_ON_CPU = (
    Route(Kind("llama", ranks=2), Kind("llama")),
    Route(Kind("llama"), Kind("llama", ranks=2)),
    Route(Kind("llama"), Kind("llama", block_size=LONG_BLOCK_SIZE)),
    Route(Kind("gemma", stages=2), Kind("gemma")),
    Route(Kind("deepseek", ranks=2), Kind("deepseek")),
    Route(Kind("granite", ranks=2), Kind("granite")),
)
MORE_ROUTES_ON_CPU = (
    Route(Kind("deepseek"), Kind("deepseek", ranks=2)),
    Route(Kind("deepseek"), Kind("deepseek", number=2)),
    Route(Kind("granite"), Kind("granite", ranks=2)),
)
ROUTES_ON_ONE_DEVICE = (
    Route(Kind("llama"), Kind("llama", block_size=LONG_BLOCK_SIZE)),
    Route(Kind("llama"), Kind("llama", staged=True)),
    Route(Kind("llama", staged=True), Kind("llama")),
    *(Route(Kind(family), Kind(family, number=2)) for family in FAMILIES if family != "llama"),
    Route(Kind("llama", compiled=True), Kind("llama", compiled=True, number=2)),
    Route(Kind("llama", verifies=True), Kind("llama", verifies=True, number=2)),
)


def _routes() -> tuple[Route, ...]:
    """Those that this machine has devices for; each rank needs one of its own, ranks of two engines may share it."""
    if not ON_CUDA:
        return ROUTES_ON_CPU
    devices, on_cpu = torch.cuda.device_count(), (*ROUTES_ON_CPU, *MORE_ROUTES_ON_CPU)
    many = (each for each in on_cpu if max(k.ranks * k.stages for k in (each.prefill, each.decode)) <= devices)
    return (*ROUTES_ON_ONE_DEVICE, *(each for each in many if each not in ROUTES_ON_ONE_DEVICE))


ROUTES = _routes()
MORE_ROUTES = () if ON_CUDA else MORE_ROUTES_ON_CPU


@dataclass
class Stable:
    """Has place for two engines, and for what they write."""

    directory: Path
    builtin: bool
    engines: EngineSet = field(default_factory=EngineSet)
    running: dict[Kind, Engine] = field(default_factory=dict)

    def pair(self, route: Route) -> tuple[Engine, Engine]:
        """Both engines of the route; those of the route before are stopped unless they are needed."""
        wanted = (route.prefill, route.decode)
        for kind in set(self.running) - set(wanted):
            self.running.pop(kind).stop()
        missing = [kind for kind in wanted if kind not in self.running]
        # A core of its own for each, where there are so many.
        options = [self.options(kind, core=wanted.index(kind)) for kind in missing]
        self.running |= dict(zip(missing, self.engines.start(*options), strict=True))
        return self.running[route.prefill], self.running[route.decode]

    @contextmanager
    def serve(self, route: Route) -> Iterator[Served]:
        """The route with its engines up."""
        traces = None if self.builtin else Traces(self.directory / "traces")
        with PrefillDecode(*self.pair(route)) as service:
            yield Served(route, service, traces)

    def options(self, kind: Kind, core: int = 0) -> EngineOptions:
        """How an engine is started."""
        family = FAMILIES[kind.family]
        extra: Mapping[str, Any] = {"handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS} | (
            {"verify": "all"} if kind.verifies else {}
        )
        return EngineOptions(
            name=str(kind),
            model=family.model(),
            logs=self.directory / "logs",
            core=core,
            tensor_parallel_size=kind.ranks,
            pipeline_parallel_size=kind.stages,
            kv_role="kv_producer" if kind.stages > 1 else "kv_both",
            block_size=kind.block_size,
            connector="builtin" if self.builtin else "actor",
            calm_polling=self.builtin,
            extra_config={"kv_lease_duration": LEASE_SECONDS} | (BUILTIN_CONFIG if self.builtin else extra),
            trace_directory=self.directory / "traces",
            staged_on_host=kind.staged,
            eager=not kind.compiled,
            dtype=family.dtype_on_cuda if ON_CUDA else "float32",
            attention_backend=family.attention_backend,
            prefix_caching=family.prefix_caching,
            max_num_batched_tokens=family.chunk_tokens,
            context_tokens=CONTEXT_TOKENS,
            arguments=("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
        )


@dataclass(frozen=True)
class Served:
    """A route with its engines up."""

    route: Route
    service: PrefillDecode
    traces: Traces | None
    """None with the built-in connector, which writes none."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.route.decode.family]

    def text(self, tokens: int, seed: object) -> str:
        """A prompt that no other route has seen."""
        return prompt(tokens, f"{self.route} {seed}")

    def key(self, name: object) -> str:
        """A request id of this route."""
        return f"{(*ROUTES, *MORE_ROUTES).index(self.route)}-{name}"

    def assert_right(self, prompts: Mapping[str, str]) -> None:
        """All at once through P and D: the answers are those of D alone, and every rank took the plain path."""
        answers = self.service.pd_concurrently(prompts)
        for key, text in prompts.items():
            assert answers[key].ok, answers[key].error
            assert answers[key].token_ids == self.service.alone(text).token_ids, f"{key}: {len(text)} tokens"
            if self.traces is not None:
                # For a request of which D computes everything nothing is read, and its blocks on P are released.
                if self.family.loads(len(text)):
                    for request in self.traces.ended_on_ranks(key, self.route.decode.ranks):
                        assert request.states in REQUEST_PATHS_PLAIN, request
                assert self.traces.ended_lease(key).states in LEASE_PATHS_PLAIN


@pytest.fixture(scope="module")
def stable(room: Room, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Stable]:
    room.clear()
    stable = Stable(tmp_path_factory.mktemp("families"), pytestconfig.getoption("--builtin", default=False))
    with stable.engines:
        yield stable


@pytest.fixture(scope="module", params=ROUTES, ids=str)
def served(stable: Stable, request: pytest.FixtureRequest) -> Iterator[Served]:
    with stable.serve(request.param) as served:
        yield served


def test_prompts_of_several_lengths(served: Served) -> None:
    for tokens in LENGTHS:
        served.assert_right({served.key(f"length-{tokens}"): served.text(tokens, tokens)})


def test_several_requests_at_once(served: Served) -> None:
    served.assert_right({served.key(f"at-once-{n}"): served.text(40 + 110 * n, f"at once {n}") for n in range(4)})


def test_what_lies_behind_a_common_prefix(served: Served) -> None:
    """D has the prefix already, where its prefix cache works."""
    common = served.text(4 * LONG_BLOCK_SIZE, "common")
    served.assert_right({served.key("prefix-itself"): common})
    hits = served.service.decode_client.metric("vllm:prefix_cache_hits_total")
    served.assert_right({served.key("behind-prefix"): common + served.text(100, "behind")})
    gained = served.service.decode_client.metric("vllm:prefix_cache_hits_total") - hits
    assert (gained > 0) == served.family.prefix_caching


def test_the_answer_shows_when_the_kv_is_that_of_another_prompt(served: Served) -> None:
    """What all comparisons of answers rest on."""
    asked, other = served.text(200, "asked"), served.text(200, "other")
    wrong = served.service.decode_from_another(asked, other)
    assert wrong.ok, wrong.error
    assert wrong.token_ids != served.service.alone(asked).token_ids


def test_blocks_come_back_on_both_sides(served: Served) -> None:
    assert served.service.prefill_client.blocks_are_free()
    assert served.service.decode_client.blocks_are_free()
