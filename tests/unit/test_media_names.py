"""Images in the places of equal tokens: by what they are known, and what D does with those of another prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config.multimodal import MultiModalConfig
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    NestedTensors,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from connector.protocol import LocalPrefillsSeen, ReleaseUnread, StartPull
from connector.scheduler.media_names import MediaNames, differ
from tests.unit.hybrid_engine import BLOCK_TOKENS, REMOTE_DECODE, HybridEngine, full

PROMPT = list(range(1, 5 * BLOCK_TOKENS + 4))
IMAGE_TOKENS = 8


def config(
    model: str = "/models/m", *, cache_gb: float = 4, caches_prefixes: bool = True, algorithm: str = "blake3"
) -> Any:
    """As much of vLLM's configuration as names depend on."""
    multimodal = MultiModalConfig(mm_processor_cache_gb=cache_gb, mm_hasher_algorithm=algorithm)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal, model=model),
        cache_config=SimpleNamespace(enable_prefix_caching=caches_prefixes),
    )


PIXELS = torch.zeros(3, 8, 8)
GRID = torch.tensor([[1, 4, 4]])
EMBEDDINGS = torch.arange(64.0).reshape(8, 8)


def image(
    name: str,
    offset: int = BLOCK_TOKENS,
    *,
    adapter: str = "",
    fields: Mapping[str, NestedTensors] | None = MappingProxyType({"pixel_values": PIXELS, "image_grid_thw": GRID}),
) -> MultiModalFeatureSpec:
    """`fields`: what the model computes it from; None: this process has it not."""
    place = PlaceholderRange(offset=offset, length=IMAGE_TOKENS)
    data = None
    if fields is not None:
        shared = MultiModalSharedField(batch_size=1)
        data = MultiModalKwargsItem({key: MultiModalFieldElem(data=each, field=shared) for key, each in fields.items()})
    return MultiModalFeatureSpec(
        data=data, modality="image", identifier=adapter + name, mm_position=place, mm_hash=name
    )


def request(*images: MultiModalFeatureSpec) -> Request:
    return Request("r", PROMPT, SamplingParams(max_tokens=1), None, mm_features=list(images))


def test_other_images_have_other_names() -> None:
    names = MediaNames(config())
    prompts = [
        request(),
        request(image("a")),
        request(image("b")),
        request(image("a", 17)),
        request(image("a"), image("b", 40)),
        request(image("b"), image("a", 40)),
    ]
    found = [names.of(each, len(PROMPT)) for each in prompts]
    assert all(one is not None and len(one) <= 64 for one in found)
    for number, one in enumerate(found):
        assert [differ(str(one), str(other)) for other in found] == [other != number for other in range(len(found))]


def test_what_makes_no_difference() -> None:
    """The order in which they are listed, what comes behind the tokens in question, and an adapter, of which the
    weights are compared elsewhere."""
    names = MediaNames(config())
    plain = names.of(request(image("a"), image("b", 40)), 60)
    assert names.of(request(image("b", 40), image("a")), 60) == plain
    assert names.of(request(image("a"), image("b", 40), image("c", 60)), 60) == plain
    assert names.of(request(image("a", adapter="x:"), image("b", 40)), 60) == plain
    unhashed = image("a")
    unhashed.mm_hash = None
    assert names.of(request(unhashed, image("b", 40)), 60) == plain


@pytest.mark.parametrize(
    "other",
    [{"model": "/elsewhere/m"}, {"algorithm": "sha256"}],
    ids=lambda other: next(iter(other)),
)
def test_names_that_are_made_in_two_ways_are_not_compared(other: dict[str, Any]) -> None:
    one, same, made_otherwise = (MediaNames(config(**each)) for each in ({}, {}, other))
    a, b = request(image("a")), request(image("b"))
    assert differ(str(one.of(a, 40)), str(same.of(b, 40)))
    assert not differ(str(one.of(a, 40)), str(made_otherwise.of(b, 40)))


def test_another_vllm_makes_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not one that was built for another device."""
    found = []
    for version in ("0.32.0", "0.32.0+cpu", "0.32.1"):
        monkeypatch.setattr("vllm.__version__", version)
        found.append(str(MediaNames(config()).of(request(image(version)), 40)))
    assert differ(found[0], found[1])
    assert not differ(found[0], found[2])


@pytest.mark.parametrize("cache_gb", [0, 4])
@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_images_are_numbered_where_nothing_caches_them(cache_gb: float, caches_prefixes: bool) -> None:
    names = MediaNames(config(cache_gb=cache_gb, caches_prefixes=caches_prefixes))
    assert names.are_numbers == (not cache_gb and not caches_prefixes)
    assert (names.of(request(image("renderer0-mm-1-image-0")), 40) is None) == names.are_numbers


def test_a_model_of_text_has_none() -> None:
    text = config()
    text.model_config.multimodal_config = None
    assert not MediaNames(text).are_numbers
    assert MediaNames(text).of(request(), 40) is None


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, HybridEngine]:
    """P, and two D. One makes names in the way of P."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)
    made = {}
    for name, model in (("p", "/m"), ("d", "/m"), ("elsewhere", "/models/m")):
        for module in ("lends", "pulls"):
            of_images = MediaNames(config(model))
            monkeypatch.setattr(f"connector.scheduler.{module}.MediaNames", lambda _, of_images=of_images: of_images)
        made[name] = HybridEngine([full()], engine_id=name)
        # The model has no encoder; vLLM's scheduler asks whether there is room for what one would make.
        made[name].scheduler.max_num_encoder_input_tokens = 64
        made[name].scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    return made


@pytest.mark.parametrize(
    ("there", "images", "reads"),
    [
        ("d", [image("a")], True),
        ("d", [image("b")], False),
        ("d", [image("a"), image("b", 40)], False),
        ("elsewhere", [image("b")], True),
        # Computing these would end D.
        ("d", [image("b", fields={"image_grid_thw": GRID})], True),
        ("d", [image("b", fields={"image_grid_thw": [GRID[0]]})], True),
        ("d", [image("b", fields=None)], True),
        ("d", [image("b", fields={"image_embeds": [EMBEDDINGS, EMBEDDINGS]})], False),
        # What Dynamo gives a decode engine. Computing these would answer to no image.
        ("d", [], True),
        ("d", [image("b", fields={"image_embeds": torch.full((8, 8), 3.0), "image_grid_thw": GRID})], True),
        ("d", [image("b", fields={"image_embeds": [torch.zeros(4, 8), torch.zeros(4, 8)]})], True),
        ("d", [image("b", fields={"pixel_values": torch.ones(3, 8, 8)})], False),
    ],
    ids=[
        *("equal", "other", "one more", "named in another way"),
        *("left out", "left out of a list", "not in this process", "embeddings"),
        *("tokens alone", "one number for embeddings", "one number in a list", "of one colour"),
    ],
)
def test_a_prompt_with_other_images_is_computed(
    engines: dict[str, HybridEngine],
    there: str,
    images: list[MultiModalFeatureSpec],
    reads: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill, decode = engines["p"], engines[there]
    prefill.run("a", PROMPT, REMOTE_DECODE, mm_features=[image("a")])
    params = json.loads(json.dumps(prefill.params["a"]))
    decode.submit("r", PROMPT, params, max_tokens=2, mm_features=images)
    decode.step()
    (told,) = [each for each in decode.commands if isinstance(each, StartPull | ReleaseUnread)]
    assert isinstance(told, StartPull if reads else ReleaseUnread)
    assert ("it has other images (or sound, or video) than engine p has computed as a" in caplog.text) is not reads
    if not reads:
        decode.step()
        assert decode.computed["r"] >= len(PROMPT)
        (seen,) = [each for each in decode.commands if isinstance(each, LocalPrefillsSeen)]
        assert [(each.request_id, each.reason) for each in seen.named] == [("r", "media")]


def test_names_of_what_p_was_sent_without_its_embeddings_are_not_said(engines: dict[str, HybridEngine]) -> None:
    engines["p"].run("a", PROMPT, REMOTE_DECODE, mm_features=[image("a", fields={"image_grid_thw": GRID})])
    assert "media_names" not in engines["p"].params["a"]
    assert engines["d"].load("r", PROMPT, engines["p"].params["a"], mm_features=[image("b")]).num_tokens


def test_an_image_where_p_had_none_is_computed(engines: dict[str, HybridEngine]) -> None:
    engines["p"].run("a", PROMPT, REMOTE_DECODE, mm_features=[])
    engines["d"].submit("r", PROMPT, engines["p"].params["a"], max_tokens=2, mm_features=[image("b")])
    engines["d"].step()
    assert [type(each) for each in engines["d"].commands if isinstance(each, StartPull | ReleaseUnread)] == [
        ReleaseUnread
    ]


STAND_INS = {
    "tokens alone": [],
    "one number for embeddings": [image("x", fields={"image_embeds": torch.zeros(8, 8), "image_grid_thw": GRID})],
    "left out": [image("x", fields={"image_grid_thw": GRID})],
}


@pytest.mark.parametrize("images", STAND_INS.values(), ids=STAND_INS)
@pytest.mark.parametrize("salt", [None, "of a tenant"])
def test_the_prefix_cache_of_d_tells_images_apart_that_it_was_not_given(
    engines: dict[str, HybridEngine], images: list[MultiModalFeatureSpec], salt: str | None
) -> None:
    prefill, decode = engines["p"], engines["d"]
    reads = []
    for prefilled, name in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        prefill.run(prefilled, PROMPT, REMOTE_DECODE, mm_features=[image(name)])
        decode.submit(prefilled, PROMPT, prefill.params[prefilled], mm_features=images, cache_salt=salt)
        decode.step()
        if decode.is_released_unread(prefilled):
            reads.append(0)
        else:
            reads.append(sum(len(each.local_block_ids) for each in decode.pull_of(prefilled).groups))
            decode.loaded(prefilled)
        while prefilled not in decode.finished:
            decode.step()
    whole = -(-len(PROMPT) // BLOCK_TOKENS)
    assert reads[:2] == [whole, whole]
    assert reads[2] < whole, "the same image again is in the cache"


def test_what_tells_its_images_itself_or_has_none_is_in_the_cache_under_its_own_hashes(
    engines: dict[str, HybridEngine],
) -> None:
    prefill, decode = engines["p"], engines["d"]
    for name, images in {"text": [], "image": [image("a")], "elsewhere": [image("a", fields=None)]}.items():
        prefill.run(name, PROMPT, REMOTE_DECODE, mm_features=images and [image("a")])
        given = {"mm_features": images}
        plain = decode.submit(f"{name} alone", PROMPT, None, **given)
        pulled = decode.submit(name, PROMPT, prefill.params[name], **given)
        assert pulled.block_hashes == plain.block_hashes


def test_a_prompt_that_goes_on_with_another_image_is_loaded_as_far(engines: dict[str, HybridEngine]) -> None:
    engines["p"].run("a", PROMPT, REMOTE_DECODE, mm_features=[image("a")])
    more = [image("a"), image("b", len(PROMPT))]
    told = engines["d"].load("r", [*PROMPT, *range(IMAGE_TOKENS + 3)], engines["p"].params["a"], mm_features=more)
    assert told.num_tokens == told.remote_num_tokens
