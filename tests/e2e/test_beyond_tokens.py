"""Requests whose KV depends on more than their token ids: on an adapter, on images, on embeddings given by the client.

Each kind has several requests with the same token ids and KV of their own. Through P and D each is answered as D alone
answers it, and no block of one is used for another: none of D's prefix cache, and none that D lends to P after it has
answered. P keeps no cached prefixes, so that whatever it does not read it computes. Chunks of 64 tokens end within
images and embeddings.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from PIL import Image

from connector.observe import catalogue
from tests.e2e.client import Answer, PrefillDecode, Prompt
from tests.e2e.cluster import (
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    HANDSHAKE_TIMEOUT_SECONDS,
    SETTLE_SECONDS,
    Traces,
    blocks_of,
    prompt,
)
from tests.e2e.engines import BLOCK_SIZE_TOKENS, EngineOptions, EngineSet
from tests.e2e.metrics_page import Page
from tests.e2e.tiny_idefics import ADAPTER_RANK, IMAGE_PIXELS, adapter, tiny_idefics
from tests.e2e.tiny_model import HIDDEN_SIZE, WEIGHT_STANDARD_DEVIATION

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

ADAPTERS = ("one", "other")
KEPT_SECONDS = 10.0
"""Longer than a busy machine takes from D's answer to P's read-back."""
TEXT_TOKENS = 90
EMBEDDED_TOKENS = 2 * BLOCK_SIZE_TOKENS + 7
READS = "vllm:nixl_actor_completed_receives_total"
FURTHER = "and so on"
"""What a client says in addition, in a conversation."""


@cache
def image(seed: str, uuid: str | None = None) -> dict[str, Any]:
    """A part of a message; `uuid` stands for its content, where it is given."""
    noise = random.Random(f"image {seed}").randbytes(3 * IMAGE_PIXELS**2)
    file = io.BytesIO()
    Image.frombytes("RGB", (IMAGE_PIXELS, IMAGE_PIXELS), noise).save(file, "PNG")
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(file)}"}}
    return part if uuid is None else part | {"uuid": uuid}


@cache
def embeddings(seed: str, tokens: int) -> str:
    """As clients send them. Fewer tokens of one seed are the first of more."""
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(32))
    file = io.BytesIO()
    torch.save(torch.randn(tokens, HIDDEN_SIZE, generator=generator) * WEIGHT_STANDARD_DEVIATION, file)
    return _base64(file)


def _base64(file: io.BytesIO) -> str:
    return base64.b64encode(file.getvalue()).decode()


def chat(*parts: Mapping[str, Any], text: str) -> Prompt:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


class Kind(Protocol):
    """Prompts with equal token ids, by name; none of them shares a block with one of another topic. `further` makes
    prompts that begin with those without."""

    __name__: str

    def __call__(self, topic: str, further: str = "") -> Mapping[str, Prompt]: ...


def of_adapters(topic: str, further: str = "") -> dict[str, Prompt]:
    text = prompt(TEXT_TOKENS, topic) + further
    return {model: {"model": model, "prompt": text} for model in ("tiny", *ADAPTERS)}


def of_images(topic: str, further: str = "") -> dict[str, Prompt]:
    """In front of the text, in whichever order; one image may be there twice."""
    text, pairs = prompt(TEXT_TOKENS, topic) + further, ["ab", "ba", "aa"]
    return {f"images-{each}": chat(*(image(f"{topic} {one}") for one in each), text=text) for each in pairs}


def of_embeddings(topic: str, further: str = "") -> dict[str, Prompt]:
    """Nothing but embeddings."""
    tokens = TEXT_TOKENS + len(further)
    return {f"embeds-{each}": {"prompt_embeds": embeddings(f"{topic} {each}", tokens)} for each in "ab"}


def of_embeddings_in_a_chat(topic: str, further: str = "") -> dict[str, Prompt]:
    """In the place of tokens, with text behind them."""
    text = prompt(TEXT_TOKENS, topic) + further
    # Of seeds of their own: KV of embeddings that begin alike is rightly the same, whatever follows them.
    data = {each: embeddings(f"{topic} chat {each}", EMBEDDED_TOKENS) for each in "ab"}
    return {f"embedded-{each}": chat({"type": "prompt_embeds", "data": data[each]}, text=text) for each in "ab"}


KINDS: tuple[Kind, ...] = (of_adapters, of_images, of_embeddings, of_embeddings_in_a_chat)


class Pair:
    """A producer and a consumer that reads from it, and lends to it what it has answered."""

    def __init__(self, directory: Path, engines: EngineSet) -> None:
        self.traces = Traces(directory / "traces")
        self.adapters = {name: adapter(directory / name, seed) for seed, name in enumerate(ADAPTERS)}
        adapters = [f"{name}={path}" for name, path in self.adapters.items()]
        common: dict[str, Any] = {
            "model": tiny_idefics(),
            "logs": directory / "logs",
            "trace_directory": self.traces.directory,
            "context_tokens": CONTEXT_TOKENS,
            "environment": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
            "max_num_batched_tokens": CHUNK_TOKENS,
            "arguments": (
                *("--enable-lora", "--max-lora-rank", str(ADAPTER_RANK), "--max-loras", str(len(ADAPTERS))),
                *("--lora-modules", *adapters),
                "--enable-prompt-embeds",
                "--no-async-scheduling",
            ),
            "extra_config": {
                "handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS,
                "bidirectional_kv_xfer": True,
                "kv_recompute_threshold": BLOCK_SIZE_TOKENS,
                "decoder_kv_blocks_ttl": KEPT_SECONDS,
            },
        }
        self.prefill, self.decode = engines.start(
            EngineOptions(
                name="prefill",
                core=0,
                kv_role="kv_producer",
                kv_load_failure_policy="recompute",
                prefix_caching=False,
                **common,
            ),
            EngineOptions(name="decode", core=1, kv_role="kv_consumer", **common),
        )
        self.service = PrefillDecode(self.prefill, self.decode)

    def assert_read(self, answer: Answer, alone: Answer, key: str, blocks: int) -> None:
        """The answer is right, and D has read so many blocks for it, in the plain way."""
        assert answer.ok, answer.error
        assert answer.token_ids == alone.token_ids
        request, lease = self.traces.assert_plain(key)
        assert request.blocks == blocks
        assert lease.blocks == blocks_of(answer.prompt_tokens)

    def computed_for_other_media(self) -> float:
        """Prompts that D has computed because P had other images in the places of the same tokens."""
        return Page.of(self.service.decode_client)[catalogue.LOCAL_PREFILLS, "media"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with EngineSet() as engines:
        started = Pair(tmp_path_factory.mktemp("beyond-tokens"), engines)
        with started.service:
            yield started


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__.removeprefix("of_"))
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


def test_equal_tokens_do_not_share_kv(pair: Pair, kind: Kind) -> None:
    """One after another: of none D has anything yet. Asked again, it has all of its own but the last block."""
    prompts = kind("equal tokens")
    alone = {name: pair.service.alone(each) for name, each in prompts.items()}
    assert len({answer.prompt_tokens for answer in alone.values()}) == 1
    assert len({answer.token_ids for answer in alone.values()}) == len(prompts)
    for time in ("first", "again"):
        for name, each in prompts.items():
            key = f"{name}-{time}-alike"
            answer = pair.service.pd(each, key)
            blocks = blocks_of(answer.prompt_tokens) if time == "first" else 1
            pair.assert_read(answer, alone[name], key, blocks)


def test_in_one_step(pair: Pair, kind: Kind) -> None:
    # In one step with requests that have adapters, vLLM's CPU kernels compute one without wrongly, transfers or not.
    prompts = {f"{name}-at-once": each for name, each in kind("at once").items() if name != "tiny"}
    answers = pair.service.pd_concurrently(prompts)
    for key, each in prompts.items():
        pair.assert_read(answers[key], pair.service.alone(each), key, blocks_of(answers[key].prompt_tokens))


def test_the_parameters_of_another_prompt(pair: Pair, kind: Kind) -> None:
    """KV of another one is not read. D has nothing of what it was asked for in its prefix cache, and computes a prompt
    with other images, which a client may name as it likes; parameters of another prompt are a mistake."""
    prompts = kind("another")
    for (name, asked), (other_name, other) in permutations(prompts.items(), 2):
        params = pair.service.prefill(other).kv_transfer_params
        assert params is not None
        right, key = pair.service.alone(asked).token_ids, f"{name}-{other_name}-wrong"
        # No block of it stays in D's prefix cache under the name of what was asked for.
        ask = partial(pair.service.decode_client.complete, kv_transfer_params=params, cache_salt="wrong")
        before = pair.computed_for_other_media()
        wrong = ask(asked, request_id=key)
        if kind is not of_images:
            assert wrong.status == 500
            assert pair.traces.last_record(key).reason == "WrongPrompt"
            # vLLM has the blocks of a request that fails released: they are of no use to the other either.
            assert ask(other, request_id=f"{key}-next").status == 500
            assert pair.traces.last_record(f"{key}-next").reason == "BlocksConsumed"
        else:
            assert wrong.ok, wrong.error
            assert wrong.token_ids == right
            assert pair.computed_for_other_media() == before + 1


def test_what_a_client_calls_an_image_is_its_name(pair: Pair) -> None:
    """So D reads what it is called alike for, and computes what is not."""
    text = prompt(TEXT_TOKENS, "named")
    named, renamed, unnamed = (chat(image("named", uuid), text=text) for uuid in ("mine", "on-d", None))
    right = pair.service.alone(unnamed)
    for for_d, key in ((named, "named-image"), (renamed, "renamed-image")):
        params = pair.service.prefill(named, key).kv_transfer_params
        assert params is not None
        before = pair.computed_for_other_media()
        answer = pair.service.decode(for_d, params, key)
        if for_d is named:
            pair.assert_read(answer, right, key, blocks_of(answer.prompt_tokens))
        else:
            assert answer.token_ids == right.token_ids
            assert pair.computed_for_other_media() == before + 1


def test_images_of_which_d_is_sent_the_tokens_alone(pair: Pair) -> None:
    """As by a router that expects D to load everything. D's prefix cache has each under its own name."""
    prompts = of_images("tokens alone")
    for time in ("first", "again"):
        for name, each in prompts.items():
            key = f"{name}-{time}-tokens"
            prefilled = pair.service.prefill(each, key)
            assert prefilled.kv_transfer_params is not None
            answer = pair.service.decode(list(prefilled.prompt_token_ids), prefilled.kv_transfer_params, key)
            blocks = blocks_of(answer.prompt_tokens) if time == "first" else 1
            pair.assert_read(answer, pair.service.alone(each), key, blocks)


def test_only_its_own_conversation_reads_an_answer_back(pair: Pair, kind: Kind) -> None:
    """Of embeddings the prompt alone: what D has sampled behind it comes back as embeddings, not as tokens."""
    topic = "conversation"
    (name, begun), *_ = kind(topic).items()
    for next_name, continued in kind(topic, FURTHER).items():
        key = f"{name}-{next_name}-talk"
        answered = pair.service.pd(begun, f"{key}-begun")
        assert answered.ok, answered.error
        reads = pair.service.prefill_client.metric(READS)
        again = pair.service.prefill_client.complete(
            continued, max_tokens=1, request_id=f"{key}-p", kv_transfer_params=answered.kv_transfer_params
        )
        assert again.kv_transfer_params is not None, again.error
        is_read_back = next_name == name
        assert pair.service.prefill_client.metric(READS) == reads + is_read_back
        if is_read_back:
            request, _ = pair.traces.assert_plain(f"{key}-p")
            assert request.blocks == blocks_of(answered.prompt_tokens)
        answer = pair.service.decode(continued, again.kv_transfer_params, f"{key}-d")
        assert answer.ok, answer.error
        assert answer.token_ids == pair.service.alone(continued).token_ids


def test_new_weights_under_a_name_come_to_one_engine_first(pair: Pair) -> None:
    """D computes what P has computed with those of before, and reads when P has the same again; nor does P read back
    what D has answered with those of before."""
    one, other = pair.adapters.values()
    engines = (pair.service.prefill_client, pair.service.decode_client)
    texts = {each: prompt(TEXT_TOKENS, f"rolled {each}") for each in ("one", "two", "three")}
    asked = {each: {"model": "rolled", "prompt": text} for each, text in texts.items()}
    for engine in engines:
        engine.load_adapter("rolled", one)
    begun = pair.service.pd(asked["one"], "rolled-before")
    pair.assert_read(begun, pair.service.alone(asked["one"]), "rolled-before", blocks_of(begun.prompt_tokens))

    pair.service.decode_client.load_adapter("rolled", other)
    reads = pair.service.decode_client.metric(READS)
    between = pair.service.pd(asked["two"], "rolled-between")
    right = pair.service.alone(asked["two"]).token_ids
    assert between.token_ids == right != pair.service.prefill_client.complete(asked["two"]).token_ids
    assert pair.service.decode_client.metric(READS) == reads
    assert pair.service.decode_client.complete(asked["two"]).token_ids == right, "from its prefix cache"

    pair.service.prefill_client.load_adapter("rolled", other)
    after = pair.service.pd(asked["three"], "rolled-after")
    pair.assert_read(after, pair.service.alone(asked["three"]), "rolled-after", blocks_of(after.prompt_tokens))
    reads = pair.service.prefill_client.metric(READS)
    continued = {"model": "rolled", "prompt": texts["one"] + FURTHER}
    again = pair.service.prefill_client.complete(continued, max_tokens=1, kv_transfer_params=begun.kv_transfer_params)
    assert pair.service.prefill_client.metric(READS) == reads
    answer = pair.service.decode(continued, again.kv_transfer_params, "rolled-on")
    pair.assert_read(answer, pair.service.alone(continued), "rolled-on", blocks_of(answer.prompt_tokens))


def test_blocks_come_back_on_both_sides(pair: Pair) -> None:
    assert pair.service.prefill_client.blocks_are_free()
    assert pair.service.decode_client.blocks_are_free(KEPT_SECONDS + SETTLE_SECONDS)
    for engine in (pair.prefill, pair.decode):
        assert "Traceback" not in engine.log()
