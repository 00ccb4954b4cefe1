"""Which words and which answer belong to a prompt, as `tests.rig.content` defines them, in this simulator's shape.

A slot holds one word per layer and head: the digest of its token and of everything before it, xor a constant of the
place. So does a state, of the last token that went into it: the state of another number of tokens, or of another
request, holds other words. The answer to a prompt is a function of the prompt, so what an undisturbed engine would say
is known in advance.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence as Several

import numpy as np
import numpy.typing as npt

from tests.rig.content import VOCABULARY_SIZE, TokenDigests, place_words
from tests.simulation.model import (
    LAYERS,
    SECOND_LAYERS,
    STATE_UNITS,
    STATE_WORDS,
    WINDOW_TOKENS,
    RankMemory,
    Words,
    state_block,
)
from tests.simulation.shapes import SecondGroup

_HEADS_MAX = 2
_PLACES = place_words(LAYERS + SECOND_LAYERS, _HEADS_MAX, 1)[:, :, 0].view(np.uint64)
_STATE_PLACES = place_words(LAYERS + 2 * SECOND_LAYERS, STATE_UNITS, STATE_WORDS)[-SECOND_LAYERS:].view(np.uint64)
"""Constants of other places than those of slots."""

_NOBODYS = np.uint64(0x5A5A5A5A5A5A5A5A)

BlockTables = Several[Several[int]]
"""Ids of the blocks of a request from its first token on, by cache group. A window has placeholders in front, and so
have states that are cached: one for each block of tokens. Otherwise the only block holds the state of the request."""


class Sequence:
    """A prompt and what follows it.

    Attributes:
        prompt: token ids.
        answer: the tokens that follow.
        words: KV of all of them, shape [tokens, layers, heads].
        states: after each of them, shape [tokens, layers, units, words].
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
        each = digests.words(0, len(digests)).view(np.uint64)
        self.words: Words = each[:, None, None] ^ _PLACES
        self.states: Words = each[:, None, None, None] ^ _STATE_PLACES

    def next_token(self, tokens: int, *, kv_is_right: bool) -> int:
        """What a model says after the first `tokens` tokens; another token when it looked at wrong KV."""
        token = self.answer[tokens - len(self.prompt)]
        return token if kv_is_right else (token + 1) % VOCABULARY_SIZE

    def count_right(self, drafts: Several[int], tokens: int) -> int:
        """How many of these follow the first `tokens` tokens."""
        first = tokens - len(self.prompt)
        pairs = zip(drafts, self.answer[first : first + len(drafts)], strict=False)
        return sum(itertools.takewhile(bool, (draft == right for draft, right in pairs)))

    def mismatches(self, memory: RankMemory, tables: BlockTables, tokens: int) -> list[int]:
        """Blocks in which the KV of the first `tokens` tokens is not what it should be, as far as the next one sees."""
        wrong: set[int] = set()
        for group, table in enumerate(tables):
            if _is_state(memory, group):
                block = _state_block(memory, table, tokens)
                if (memory.groups[group][:, block] != self._expected_state(memory, group, tokens)).any():
                    wrong.add(block)
                continue
            start = max(0, tokens - WINDOW_TOKENS + 1) if group else 0
            found, expected, blocks = self._parts(memory, group, table, start, tokens)
            differs = (found != expected).any(axis=(1, 2))
            wrong.update(blocks[differs].tolist())
        return sorted(wrong)

    def write(self, memory: RankMemory, tables: BlockTables, start: int, stop: int) -> None:
        """Write the KV of tokens [start, stop), and the state after them."""
        for group, table in enumerate(tables):
            if _is_state(memory, group):
                block = _state_block(memory, table, stop)
                memory.groups[group][:, block] = self._expected_state(memory, group, stop)
                continue
            blocks, slots = _slots(memory, table, start, stop)
            memory.groups[group][:, blocks, :, slots] = self._expected(memory, group, start, stop)

    def spoil(self, memory: RankMemory, tables: BlockTables, start: int, stop: int) -> None:
        """Write what belongs to no token into the slots of tokens [start, stop), as far as there are blocks."""
        for group, table in enumerate(tables):
            blocks, slots = _slots(memory, table, start, max(start, min(stop, len(table) * memory.block_tokens)))
            memory.groups[group][:, blocks, :, slots] = _NOBODYS

    def _parts(
        self, memory: RankMemory, group: int, table: Several[int], start: int, stop: int
    ) -> tuple[Words, Words, npt.NDArray[np.int64]]:
        """What tokens [start, stop) are, what they should be, [tokens, layers, heads] both, and their blocks."""
        blocks, slots = _slots(memory, table, start, stop)
        return memory.groups[group][:, blocks, :, slots], self._expected(memory, group, start, stop), blocks

    def _expected(self, memory: RankMemory, group: int, start: int, stop: int) -> Words:
        held = memory.held[group]
        layers = slice(LAYERS, None) if group else slice(0, LAYERS)
        return self.words[start:stop, layers, held.start : held.stop]

    def _expected_state(self, memory: RankMemory, group: int, tokens: int) -> Words:
        """The state after so many tokens, [layers, words of a block]."""
        held = memory.held[group]
        return state_block(self.states[tokens - 1, :, held.start : held.stop])


@functools.lru_cache(maxsize=1024)
def sequence(prompt: tuple[int, ...], answer_tokens: int) -> Sequence:
    return Sequence(prompt, answer_tokens)


def _is_state(memory: RankMemory, group: int) -> bool:
    return memory.model.groups[group] is SecondGroup.STATE


def _state_block(memory: RankMemory, table: Several[int], tokens: int) -> int:
    """Where the state after so many tokens is: in the block of the last of them, or in the only one."""
    return table[min((tokens - 1) // memory.block_tokens, len(table) - 1)]


def _slots(
    memory: RankMemory, table: Several[int], start: int, stop: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    tokens = np.arange(start, stop)
    size = memory.block_tokens
    return np.array(table, dtype=np.int64)[tokens // size], tokens % size
