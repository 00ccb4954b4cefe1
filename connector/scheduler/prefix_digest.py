"""What a request begins with, as a short text that two engines can compare.

A conversation's next prompt need not begin with what D has: clients edit what was said, and chat templates leave out a
model's thoughts or put tokens between. KV depends on every token before it, on what stands for images among them, and
on the adapter, so P reads back only what a digest of all that is equal for. vLLM's own hashes of blocks do not serve
for it: they differ between processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.request import Request

DIGEST_LENGTH = 32
"""Hexadecimal digits: 128 bits."""


def prefix_digests(request: Request, lengths: Sequence[int]) -> list[tuple[int, str]]:
    """Each of these numbers of tokens, in ascending order, with the digest of so many. Empty where the prompt is given
    as embeddings."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return []
    lora = None if request.lora_request is None else request.lora_request.lora_name
    begun = hashlib.sha256(repr((lora, request.cache_salt)).encode())
    tokens = np.array(request.all_token_ids[: max(lengths, default=0)], dtype=np.int64)
    features = sorted((each.mm_position.offset, each.identifier) for each in request.mm_features or ())
    digests, start = [], 0
    for length in lengths:
        begun.update(tokens[start:length].tobytes())
        start = length
        whole = begun.copy()
        whole.update(repr([each for each in features if each[0] < length]).encode())
        digests.append((length, whole.hexdigest()[:DIGEST_LENGTH]))
    return digests
