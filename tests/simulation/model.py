"""What simulated engines cache: a model, the KV of a prompt, and the memory in which a rank keeps its part of it.

Every model has layers of full attention. A seed may add a second cache group, of a sliding window or of states, and
decides how many KV heads there are and how each engine is built: over how many ranks it is spread, and how many tokens
its blocks hold. A word stands for one head of one token in one layer. What it is follows from the prompt, the layer,
the head and the token, so that a word in a wrong place is a wrong word; of a state, from its unit and the place in it,
and from how many tokens went into it.

Where a rank's part lies is this file's own idea, in numpy axes; what the product is told of it is a layout, made of the
shapes that it would make itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from connector.layout.geometry import CacheGroup, RankLayout
from connector.layout.shapes import LayerShape, attention, mamba
from connector.protocol import Memory
from tests.rig.layouts import attention_rank
from tests.simulation.shapes import BLOCK_TOKENS_MAX, EngineShape, Model, SecondGroup

Words = npt.NDArray[np.uint64]

LAYERS = 3
"""Of full attention."""
SECOND_LAYERS = 2
"""Of the second cache group, if there is one."""
WINDOW_TOKENS = 20
"""So many of the last tokens are kept by a sliding window."""
STATE_UNITS = 2
STATE_WORDS = 4
"""Words of one unit of a state: one of the convolution's channel, the others of the head."""
WORD_BYTES = 8
JUNK = np.uint64(0xEEEEEEEEEEEEEEEE)
"""What is in a block that belongs to nobody."""


class Table(NamedTuple):
    """Blocks of a prompt in one cache group: so many of them, from number `first` on."""

    first: int
    blocks: list[int]


def block_counts(model: Model, shape: EngineShape, tokens: int, cached: int = 0) -> list[tuple[int, int]]:
    """The first block and the number of blocks that a prompt needs in each cache group, `cached` ones not counted."""
    counts = []
    end = shape.blocks_of(tokens)
    for group in model.groups:
        if group is SecondGroup.STATE:
            counts.append((0, 1 if cached < end else 0))
            continue
        kept = WINDOW_TOKENS if group is SecondGroup.WINDOW else tokens
        first = min(end, max(cached, max(0, tokens - kept) // shape.block_tokens))
        counts.append((first, end - first))
    return counts


def tables(counts: Sequence[tuple[int, int]], blocks: Sequence[int]) -> tuple[Table, ...]:
    """Give each cache group its share of `blocks`."""
    found, start = [], 0
    for first, count in counts:
        found.append(Table(first, list(blocks[start : start + count])))
        start += count
    return tuple(found)


class Prompt:
    """The KV of a prompt of `tokens` tokens, on all ranks together.

    It goes on beyond the last token: what an engine leaves in the rest of its last block.
    """

    def __init__(self, model: Model, content: int, tokens: int) -> None:
        self.model = model
        self.content = content
        self.tokens = tokens
        padded = -(-tokens // BLOCK_TOKENS_MAX) * BLOCK_TOKENS_MAX
        heads = np.arange(model.heads)
        self._words = [_words(content, np.arange(LAYERS), heads, np.arange(padded))]
        second_layers = np.arange(LAYERS, LAYERS + SECOND_LAYERS)
        if model.second is SecondGroup.WINDOW:
            self._words.append(_words(content, second_layers, heads, np.arange(padded)))
        elif model.second is SecondGroup.STATE:
            places = np.arange(STATE_WORDS) + STATE_WORDS * tokens
            self._words.append(_words(~content & 0xFFFFFFFF, second_layers, np.arange(STATE_UNITS), places))

    def otherwise(self) -> Prompt:
        """As long, and of other KV: what an engine makes of it that computes it anew, or another model."""
        return Prompt(self.model, ~self.content & 0xFFFFFFFF, self.tokens)

    def part(self, group: int, held: range, first: int, count: int, block_tokens: int) -> Words:
        """What blocks `first` to `first + count` of a group hold on a rank: [layers, blocks, words of a block...].

        `held`: the rank's heads, or units of a state.
        """
        words = self._words[group][:, held.start : held.stop]
        if self.model.groups[group] is SecondGroup.STATE:
            return np.repeat(state_block(words)[:, None], count, axis=1)
        start = first * block_tokens
        words = words[:, :, start : start + count * block_tokens]
        return words.reshape(len(words), len(held), count, block_tokens).swapaxes(1, 2)


def state_block(words: Words) -> Words:
    """What a block holds of a state, [layers, words of a block], given the words [layers, units, words of a unit]: the
    convolution's channels of all units, and then their heads."""
    layers = len(words)
    return np.concatenate([words[:, :, :1].reshape(layers, -1), words[:, :, 1:].reshape(layers, -1)], axis=1)


def _words(
    content: int, layers: npt.NDArray[np.int64], units: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> Words:
    """Shape [layers, units, positions]."""
    with np.errstate(over="ignore"):
        key = np.uint64(content) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64) + np.uint64(1)
        words: Words = (
            key * np.uint64(0xBF58476D1CE4E5B9)
            + layers.astype(np.uint64)[:, None, None] * np.uint64(0x94D049BB133111EB)
            + units.astype(np.uint64)[:, None] * np.uint64(0xD6E8FEB86659FD93)
        )
    return words


def held_units(units: int, tp_rank: int, tp_size: int) -> range:
    """The heads or units of a state that a rank holds; alike on all ranks where there are fewer than these."""
    if units < tp_size:
        return range(tp_rank * units // tp_size, tp_rank * units // tp_size + 1)
    each = units // tp_size
    return range(tp_rank * each, tp_rank * each + each)


class RankMemory:
    """The KV cache of one rank.

    Attributes:
        model: what it caches.
        held: by cache group, the heads or the units of a state that the rank holds.
        flat: all of it.
        groups: by cache group, [layers, blocks, heads, tokens], or [layers, blocks, words] of states.
    """

    def __init__(self, model: Model, shape: EngineShape, tp_rank: int, blocks: int) -> None:
        self.model = model
        self._shape = shape
        self._tp_rank = tp_rank
        self._blocks = blocks
        self.held = [
            held_units(STATE_UNITS if group is SecondGroup.STATE else model.heads, tp_rank, shape.tp_size)
            for group in model.groups
        ]
        axes: list[tuple[int, ...]] = []
        for number, (group, held) in enumerate(zip(model.groups, self.held, strict=True)):
            layers = SECOND_LAYERS if number else LAYERS
            is_state = group is SecondGroup.STATE
            block = (len(held) * STATE_WORDS,) if is_state else (len(held), shape.block_tokens)
            axes.append((layers, blocks, *block))
        sizes = [int(np.prod(each)) for each in axes]
        self.flat: Words = np.full(sum(sizes), JUNK, np.uint64)
        parts = np.split(self.flat, np.cumsum(sizes)[:-1])
        self.groups = [part.reshape(each) for part, each in zip(parts, axes, strict=True)]
        self._bytes = self.flat.view(np.uint8)

    @property
    def block_tokens(self) -> int:
        return self._shape.block_tokens

    @property
    def address(self) -> int:
        return self.flat.ctypes.data

    def write(self, tables: Sequence[Table], prompt: Prompt) -> None:
        """As a forward pass does, or a recomputation."""
        for group, table in enumerate(tables):
            self.groups[group][:, table.blocks] = self._part(group, table, prompt)

    def forget(self, blocks: Sequence[int]) -> None:
        """They belong to nobody now, whatever their group was."""
        for words in self.groups:
            words[:, blocks] = JUNK

    def zero(self, memory: Memory) -> None:
        base = self.address
        for address, length in zip(memory.addresses.tolist(), memory.lengths.tolist(), strict=True):
            assert base <= address
            assert address + length <= base + self._bytes.size
            self._bytes[address - base : address - base + length] = 0

    def wrong_blocks(self, tables: Sequence[Table], prompt: Prompt) -> list[int]:
        """Blocks that do not hold what they should of `prompt`.

        What no token of the request needs may be zero as well: the rest of the last block, what a window has passed.
        """
        wrong: list[int] = []
        for group, table in enumerate(tables):
            found, expected = self.groups[group][:, table.blocks], self._part(group, table, prompt)
            differs = found != expected
            if not differs.any():
                continue
            if self.model.groups[group] is not SecondGroup.STATE:
                differs &= (found != 0) | self._is_needed(group, table, prompt.tokens)[:, None]
            at = np.flatnonzero(differs.any(axis=tuple(axis for axis in range(differs.ndim) if axis != 1)))
            wrong += [table.blocks[number] for number in at]
        return wrong

    def _is_needed(self, group: int, table: Table, tokens: int) -> npt.NDArray[np.bool_]:
        """Shape [blocks, tokens of a block]."""
        tokens_of_block = self._shape.block_tokens
        positions = (np.arange(len(table.blocks) * tokens_of_block) + table.first * tokens_of_block).reshape(
            -1, tokens_of_block
        )
        kept = WINDOW_TOKENS if self.model.groups[group] is SecondGroup.WINDOW else tokens
        needed: npt.NDArray[np.bool_] = (positions < tokens) & (positions >= tokens - kept)
        return needed

    def _part(self, group: int, table: Table, prompt: Prompt) -> Words:
        return prompt.part(group, self.held[group], table.first, len(table.blocks), self._shape.block_tokens)

    def blocks_at(self, addresses: Iterable[int]) -> set[int]:
        """The blocks that these addresses are in."""
        starts = [words.ctypes.data for words in self.groups]
        found = set()
        for address in addresses:
            group = max(number for number, start in enumerate(starts) if start <= address)
            block_bytes = self.groups[group].strides[1]
            found.add((address - starts[group]) // block_bytes % self._blocks)
        return found

    # --- what the product is told -----------------------------------------------------------------------------------

    def shapes(self, *, word_bytes: int = WORD_BYTES) -> dict[str, LayerShape]:
        """Layers by name. `word_bytes`: other than WORD_BYTES, for engines of another model."""
        half = word_bytes // 2
        shapes: list[LayerShape] = []
        for number, group in enumerate(self.model.groups):
            for _ in range(SECOND_LAYERS if number else LAYERS):
                name = f"layers.{len(shapes)}"
                if group is SecondGroup.STATE:
                    shapes.append(_state(name, number))
                else:
                    shapes.append(attention(name, heads=self.model.heads, k_bytes=half, v_bytes=half, group=number))
        return {shape.name: shape for shape in shapes}

    def layout(self, engine_id: str, shapes: dict[str, LayerShape]) -> RankLayout:
        """Blocks lie where those of this memory do, also if `shapes` fill a part of them only."""
        tokens = self._shape.block_tokens
        return attention_rank(
            engine_id,
            shapes,
            address=self.address,
            blocks=self._blocks,
            tokens=tokens,
            stride_bytes=len(self.held[0]) * tokens * WORD_BYTES,
            tp_rank=self._tp_rank,
            tp_size=self._shape.tp_size,
            groups=tuple(
                CacheGroup(tokens_per_kernel_block=0 if group is SecondGroup.STATE else tokens)
                for group in self.model.groups
            ),
        )


def _state(name: str, group: int) -> LayerShape:
    return mamba(
        name,
        channels=STATE_UNITS,
        groups=0,
        heads=STATE_UNITS,
        channel_bytes=WORD_BYTES,
        group_bytes=0,
        head_bytes=(STATE_WORDS - 1) * WORD_BYTES,
        group=group,
    )
