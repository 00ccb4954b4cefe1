"""What a request begins with, as a short text that two engines can compare.

vLLM's own hashes of blocks do not serve for it: they differ between processes.

From P, for D (`prompt_digests`). Parameters get to another request than the one that they were given out for: routers
mistake one for the other, `/v1/completions` hands one set to all prompts of a call, and a chat template that tells the
time makes two prompts of one. KV depends on every token before it, so D loads only what is shown to be of the prompt
that it has, or of what that one begins with. The digest is of the tokens, of embeddings where the client has given
these, and of the adapter's name. It leaves out what may differ between two engines that compute the same, such as a
salt, which concerns the cache of one engine only. The weights of an adapter are compared beside it (`adapters`), and
images where they can be (`media_names`).

From D, for P (`prefix_digests`). A conversation's next prompt need not begin with what D has: clients edit what was
said, and chat templates leave out a model's thoughts or put tokens between. P reads back only what a digest of all that
KV depends on is equal for, the salt and what stands for images among the tokens too: nobody says that the two requests
are one, and what is not equal costs time only. Of a prompt with images there is no digest where these have numbers
(`media_names`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.request import Request

DIGEST_LENGTH = 32
"""Hexadecimal digits: 128 bits."""

_EMBEDDED = -1
"""Stands for an embedding among tokens."""

Digests = list[tuple[int, str]]
"""Numbers of tokens, in ascending order, each with the digest of so many."""


def prompt_digests(request: Request, lengths: Collection[int]) -> Digests:
    """Digests of tokens, embeddings and the adapter's name, one for each of `lengths`."""
    return _digests(request, lengths, repr(_adapter(request)), [])


def prefix_digests(request: Request, lengths: Collection[int], *, media_are_numbered: bool) -> Digests:
    """Digests of all that KV depends on, one for each of `lengths`; the weights of adapters are compared beside them
    (`adapters`). Empty where the prompt's images have no names of their own (`MediaNames.are_numbers`)."""
    media = request.mm_features or ()
    if media and media_are_numbered:
        return []
    features = sorted((each.mm_position.offset, each.identifier) for each in media)
    return _digests(request, lengths, repr((_adapter(request), request.cache_salt)), features)


def _adapter(request: Request) -> str | None:
    return None if request.lora_request is None else request.lora_request.lora_name


def _digests(request: Request, lengths: Collection[int], scope: str, features: Sequence[tuple[int, str]]) -> Digests:
    begun = hashlib.sha256(scope.encode())
    # By itself, so that a digest does not depend on which shorter ones are asked for.
    beside = hashlib.sha256()
    digests, start = [], 0
    for length in sorted(lengths):
        tokens = request.all_token_ids[start:length]
        if request.prompt_embeds is not None:
            is_token = _are_tokens(request, start, length)
            # vLLM has 0 there, which may be a token.
            tokens = [token if is_one else _EMBEDDED for token, is_one in zip(tokens, is_token, strict=True)]
            beside.update(_embeddings(request, start, is_token))
        # Faster than an array that is made from a list.
        begun.update(struct.pack(f"<{len(tokens)}q", *tokens))
        start = length
        whole = begun.copy()
        if request.prompt_embeds is not None:
            whole.update(beside.digest())
        whole.update(repr([each for each in features if each[0] < length]).encode())
        digests.append((length, whole.hexdigest()[:DIGEST_LENGTH]))
    return digests


def _are_tokens(request: Request, start: int, stop: int) -> list[bool]:
    """Which of these places of a prompt with embeddings, and of what was sampled behind it, are tokens."""
    mask, stop = request.prompt_is_token_ids, min(stop, request.num_tokens)
    found = mask[start:stop] if mask is not None else [False] * (min(stop, request.num_prompt_tokens) - start)
    return [*found, *[True] * (stop - start - len(found))]


def _embeddings(request: Request, start: int, is_token: Sequence[bool]) -> memoryview:
    """The bytes of those places from `start` on that are given as embeddings; in the others there may be anything."""
    rows = request.prompt_embeds[start : start + len(is_token)]
    if any(is_token):
        rows = rows[~torch.tensor(is_token[: len(rows)], dtype=torch.bool)]
    flat = rows.detach().reshape(-1)
    if flat.stride(0) != 1:  # also of nothing, or of a single number, which count as contiguous then
        flat = flat.clone(memory_format=torch.contiguous_format)
    return memoryview(flat.view(torch.uint8).numpy())
