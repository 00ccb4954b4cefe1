"""Which images, sound and the like a prompt has, as a text that two engines can compare.

Among the tokens an image is one token, repeated, whatever it shows. vLLM names each (`MultiModalFeatureSpec.mm_hash`)
for caches of one engine. Names of two engines can be compared where both make them in the same way: by a hash of the
same algorithm, of the file as the client sent it and of the model as it was named at start, with the same version of
vLLM. What is sent therefore says how its names were made, and where they were made in two ways nothing is compared. A
client may give a name itself (`uuid`), which counts as any other: one that calls an image otherwise on D than on P has
the prompt computed there.

An engine that loads KV may be sent an image whose embeddings are left out, with a name that is then of what is left. So
where not all is there nothing is compared either. To compute such a prompt would end D (docs/limits.md). Or it is sent
the tokens alone, or embeddings that are one number over and over, as by Dynamo, because what it loads needs no more:
nothing is compared there either, and to compute such a prompt would answer to no image at all. vLLM's prefix cache sees
no more than D was sent, and would give one image's KV to a prompt with another one behind equal tokens. So what P says
of them goes into the hashes of such a prompt.

Where vLLM caches neither prefixes nor media it hashes nothing and numbers them: the first one of each engine has the
same name, so that those are no names at all.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

_BYTES_OF_A_TOKEN_MIN = 16
"""What is left without pixels and embeddings are a few numbers for a whole image."""
_EMBEDDINGS = "embeds"
"""In the names of fields that hold what an encoder made of an image."""
_DIGITS = 24
"""Hexadecimal: 96 bits of how names are made, and as many of the names."""


class MediaNames:
    """How this engine names what is not text.

    Attributes:
        are_numbers: they say nothing about what they stand for.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        multimodal = model.multimodal_config
        has_cache = vllm_config.cache_config.enable_prefix_caching
        self.are_numbers = multimodal is not None and multimodal.mm_processor_cache_gb == 0 and not has_cache
        self._made_by: str | None = None
        if multimodal is not None and not self.are_numbers:
            version = vllm.__version__.partition("+")[0]  # without what it was built for
            self._made_by = _digest((version, model.model, multimodal.mm_hasher_algorithm))

    def of(self, request: Request, tokens: int) -> str | None:
        """Of what begins among so many tokens, which may be nothing; None: the model takes text only, the names are
        numbers, or not all is there."""
        named = _beginning(request, tokens)
        if self._made_by is None or not all(map(_is_there, named)):
            return None
        # An identifier has the adapter's name in front, where media go through the adapter too.
        names = sorted((each.mm_position.offset, each.mm_hash or each.identifier) for each in named)
        return f"{self._made_by}:{_digest(names)}"

    def to_compare(self, request: Request, tokens: int) -> str | None:
        """D: as `of`. None where nothing begins there, too: an image that P had left its tokens in the prompt, which
        nobody can compute without it."""
        return self.of(request, tokens) if _beginning(request, tokens) else None

    def separate(self, request: Request, theirs: str | None, tokens: int) -> None:
        """D: where a prompt does not show the media that P had among so many tokens, let `theirs`, P's names of them,
        tell its blocks apart in the prefix cache. For a request that the scheduler has not looked at."""
        if theirs is None or self._made_by is None or not self._is_hidden(request, theirs, tokens):
            return
        request.cache_salt = f"{request.cache_salt or ''}{theirs}"
        request.block_hashes.clear()
        request.update_block_hashes()

    def _is_hidden(self, request: Request, theirs: str, tokens: int) -> bool:
        named = _beginning(request, tokens)
        if not named:
            return theirs != self.of(request, tokens)
        # What is not in this process was, when it was named.
        return any(each.data is not None and not _is_there(each) for each in named)


def differ(one: str, other: str) -> bool:
    """Whether these are known to be of other media: made in the same way, and not equal."""
    return one != other and one.partition(":")[0] == other.partition(":")[0]


def _beginning(request: Request, tokens: int) -> list[MultiModalFeatureSpec]:
    """What begins among so many tokens."""
    return [each for each in request.mm_features or () if each.mm_position.offset < tokens]


def _is_there(media: MultiModalFeatureSpec) -> bool:
    """Whether it could be computed. What vLLM keeps in memory that its processes share (`mm_processor_cache_type` shm)
    is not seen, and counts as missing."""
    if media.data is None or any(_is_stand_in(name, field.data) for name, field in media.data.items()):
        return False
    tokens: int = media.mm_position.length
    return sum(_bytes(field.data) for field in media.data.values()) >= _BYTES_OF_A_TOKEN_MIN * tokens


def _is_stand_in(name: str, data: object) -> bool:
    """Whether it is in the place of embeddings, and is none: no encoder makes a row of one number."""
    if isinstance(data, list | tuple):
        return len(data) > 0 and all(_is_stand_in(name, each) for each in data)
    if _EMBEDDINGS not in name or not isinstance(data, torch.Tensor) or not data.numel():
        return False
    row = data
    while row.dim() > 1:
        row = row[0]
    return bool((row == row.reshape(-1)[0]).all())


def _bytes(data: object) -> int:
    if isinstance(data, torch.Tensor):
        return int(data.nbytes)
    return sum(map(_bytes, data)) if isinstance(data, list | tuple) else 0


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:_DIGITS]
