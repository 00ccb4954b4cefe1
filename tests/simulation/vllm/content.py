"""Which words and which answer belong to a prompt, as `tests.rig.content` defines them, in this simulator's shape.

A slot holds one word per layer: the digest of its token and of everything before it, xor a constant of the layer. The
answer to a prompt is a function of the prompt, so what an undisturbed engine would say is known in advance.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from tests.rig.content import VOCABULARY_SIZE, TokenDigests, place_words
from tests.simulation.engines import BLOCK_WORDS, LAYERS

BLOCK_TOKENS = BLOCK_WORDS
"""One word of a layer's block for each token."""

_PLACES = place_words(LAYERS, 1, 1).reshape(LAYERS, 1).view(np.uint64)


class Sequence:
    """A prompt and what follows it.

    Attributes:
        prompt: token ids.
        answer: the tokens that follow.
        words: KV of all of them, shape [layers, tokens].
    """

    def __init__(self, prompt: tuple[int, ...], answer_tokens: int) -> None:
        digests = TokenDigests()
        digests.extend(prompt)
        answer: list[int] = []
        for _ in range(answer_tokens):
            answer.append(digests.next_token())
            digests.extend(answer[-1:])
        self.prompt = prompt
        self.answer = answer
        self.words: npt.NDArray[np.uint64] = digests.words(0, len(digests)).view(np.uint64)[None, :] ^ _PLACES

    def next_token(self, tokens: int, *, kv_is_right: bool) -> int:
        """What a model says after the first `tokens` tokens; another token when it looked at wrong KV."""
        token = self.answer[tokens - len(self.prompt)]
        return token if kv_is_right else (token + 1) % VOCABULARY_SIZE

    def mismatches(self, memory: npt.NDArray[np.uint64], block_ids: list[int], tokens: int) -> list[int]:
        """Blocks in which the KV of the first `tokens` tokens is not what it should be.

        Args:
            memory: KV cache, shape [layers, blocks, tokens of a block].
        """
        blocks, slots = _slots(block_ids, 0, tokens)
        wrong = (memory[:, blocks, slots] != self.words[:, :tokens]).any(axis=0)
        return sorted(set(blocks[wrong].tolist())) if wrong.any() else []

    def write(self, memory: npt.NDArray[np.uint64], block_ids: list[int], start: int, stop: int) -> None:
        """Write the KV of tokens [start, stop)."""
        blocks, slots = _slots(block_ids, start, stop)
        memory[:, blocks, slots] = self.words[:, start:stop]


@functools.lru_cache(maxsize=1024)
def sequence(prompt: tuple[int, ...], answer_tokens: int) -> Sequence:
    return Sequence(prompt, answer_tokens)


def _slots(block_ids: list[int], start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    tokens = np.arange(start, stop)
    return np.array(block_ids, dtype=np.int64)[tokens // BLOCK_TOKENS], tokens % BLOCK_TOKENS
