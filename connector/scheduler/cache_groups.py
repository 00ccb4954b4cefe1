"""Which blocks of a request travel, one KV cache group at a time. Pure: block tables in, block tables out.

What a table still has after n tokens depends on the kind of cache (`families.Keeps`). vLLM clips both sides' tables by
these rules, for the token after the n-th: on P after the tokens that it has computed, on D after the tokens to load. So
neither has a block for what only the n-th token itself sees, although vLLM has D compute that one again, as the last
token of a prompt that was loaded whole. D has the block if it loads a token fewer. P keeps its own longer than vLLM
does (`far_ends`), and lends it in its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.families import Keeps, keeps
from connector.protocol import GroupPull

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheSpec

_Block = TypeVar("_Block")

NULL_BLOCK_ID = 0
"""vLLM's placeholder in block tables; never a block of a request, in any engine."""


@dataclass(frozen=True, kw_only=True)
class TransferGroup:
    """A cache group that takes part in transfers.

    Attributes:
        group_id: its place in block tables of the engine.
        block_size: tokens of a block.
        keeps: which blocks its tables still have.
    """

    group_id: int
    block_size: int
    keeps: Keeps

    def pull(self, blocks: Sequence[KVCacheBlock], remote_block_ids: Sequence[int], num_tokens: int) -> GroupPull:
        """D: what has to be read so that the first `num_tokens` of a request are there.

        A prefix hit or a window may have filled or emptied the front of `blocks`: the blocks still to be loaded are the
        trailing ones that have no hash.
        """
        table = self._last_state(blocks[: self._blocks_of(num_tokens)])
        tail = list(itertools.takewhile(_is_to_be_filled, reversed(table)))
        return GroupPull(
            local_block_ids=[block.block_id for block in reversed(tail)],
            local_first=len(table) - len(tail),
            remote_block_ids=self._without_placeholders(self._last_state(remote_block_ids)),
            window_tokens=self._tokens_kept(num_tokens),
        )

    def far_end(self, num_tokens: int) -> int | None:
        """P: the place of the block that a table after so many tokens has just given back, and that the last of them
        sees. None: there is none. Of a chunk it would be all blocks, of which a built-in D could not leave any out."""
        if self.keeps.window is None:
            return None
        seen, kept = (self._first_kept(tokens) // self.block_size for tokens in (num_tokens - 1, num_tokens))
        return seen if seen < kept else None

    def lend(self, block_ids: Sequence[int], num_tokens: int, far_end_id: int | None = None) -> list[int]:
        """P: what D may need of a request of which `num_tokens` are computed. `far_end_id`: of the block that was in
        the place `far_end`, if it is still P's.

        A built-in D pairs from the end and takes windows to be clipped to this number of blocks, or to fewer.
        """
        table = self._last_state(block_ids[: self._blocks_of(num_tokens)])
        place = self.far_end(num_tokens)
        if place is not None and far_end_id is not None:
            table = [*table[:place], far_end_id, *table[place + 1 :]]
        if self.keeps.window is not None:
            table = table[-(self._blocks_of(self.keeps.window + self.keeps.retained) + 1) :]
        return self._without_placeholders(table)

    def first_token(self, lent: Sequence[int], num_tokens: int) -> int:
        """P: which token the first of these blocks begins with, where all of them hold the end of so many. 0: of a
        state."""
        return 0 if self.keeps.is_state else (self._blocks_of(num_tokens) - len(lent)) * self.block_size

    def first_needed(self, num_loaded: int, num_tokens: int) -> int:
        """D: the first token that has to be there so that the one after the first `num_tokens` can be computed, of
        which `num_loaded`, as many or one more, are loaded."""
        return self._first_kept(num_tokens if self.keeps.is_read_again else num_loaded)

    def first_in_table(self, num_tokens: int, block_size: int) -> int:
        """D: which token the first block of a table begins with that is clipped after so many. `block_size`: tokens of
        a block of that table, which may be P's."""
        return self._first_kept(num_tokens) // block_size * block_size

    def remote_blocks_per_block(self, remote_block_ids: Sequence[int], remote_num_tokens: int) -> int:
        """D: how many of P's blocks may make one of ours, at most, as P's table of so many tokens says if it keeps
        everything. 1: P's are as large, or larger, or it says nothing. P says it in the handshake, which may be still
        to come."""
        count, size = len(remote_block_ids), self.block_size
        if self.keeps != Keeps() or count <= self._blocks_of(remote_num_tokens):
            return 1
        ratios = (ratio for ratio in range(2, size + 1) if size % ratio == 0)
        return max((ratio for ratio in ratios if -(-remote_num_tokens * ratio // size) == count), default=1)

    def unbroken(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """P: of how many of these tokens a table that keeps everything has all blocks. R-SWA has none of answers but
        for their last tokens."""
        if self.keeps != Keeps() or NULL_BLOCK_ID not in block_ids:
            return num_tokens
        return min(num_tokens, list(block_ids).index(NULL_BLOCK_ID) * self.block_size)

    def written(self, block_ids: Sequence[int], first: int, stop: int) -> list[int]:
        """P: the blocks of tokens `first` to `stop`, or of the states after them, as far as they are kept."""
        table = block_ids[first // self.block_size : self._blocks_of(stop)]
        return [block_id for block_id in table if block_id != NULL_BLOCK_ID]

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _last_state(self, table: Sequence[_Block]) -> Sequence[_Block]:
        return table[-1:] if self.keeps.is_state else table

    def _first_kept(self, num_tokens: int) -> int:
        """The first token of those that a table after `num_tokens` holds for certain."""
        kept = self._tokens_kept(num_tokens)
        return 0 if kept is None else max(0, num_tokens - kept)

    def _tokens_kept(self, num_tokens: int) -> int | None:
        """How many of the last of `num_tokens` tokens a table holds for certain; None: all."""
        if self.keeps.window is not None:
            return self.keeps.window - 1 + self.keeps.retained
        return num_tokens % self.keeps.chunk if self.keeps.chunk is not None else None

    def _without_placeholders(self, block_ids: Sequence[int]) -> list[int]:
        """A table that keeps everything has none, and its first entry counts as the request's first block."""
        if self.keeps == Keeps():
            return list(block_ids)
        return list(itertools.dropwhile(lambda block_id: block_id == NULL_BLOCK_ID, block_ids))


class CacheGroups:
    """All groups of an engine that take part in transfers.

    Attributes:
        all: in the order in which both sides list them.
        tokens_left_to_decode: how many tokens at the end of a prompt D computes itself; the built-in connector uses the
            same number. A state (Mamba) cannot be rewound to before the token that samples, and draft modules that look
            several tokens ahead must not see drafts.
        has_states: a group has a state.
        keeps_all_tokens: no group has a table that is clipped.
        keeps_everything: neither.
        tokens_not_found: at most, at the end of a prompt whose blocks are all in the prefix cache: vLLM has the last
            token computed, finds whole blocks of all groups, and one fewer for a draft module that reads before them.
        are_shared: a request finds in the prefix cache what another one with the same beginning has loaded, but for the
            end. With windows or a state it may find nothing: what was loaded is that of one length.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        dcp_size = vllm_config.parallel_config.decode_context_parallel_size
        config = kv_cache_config
        self.all = tuple(
            TransferGroup(
                group_id=group_id,
                block_size=resolve_dcp_kv_block_size(group.kv_cache_spec, dcp_size),
                keeps=keeps(group.kv_cache_spec),
            )
            for group_id, group in zip(config.transfer_group_ids, config.transfer_groups, strict=True)
        )
        self.tokens_left_to_decode = _tokens_left_to_decode(vllm_config, config)
        self.has_states = any(group.keeps.is_state for group in self.all)
        self.keeps_all_tokens = not any(group.keeps.is_clipped for group in self.all)
        self.keeps_everything = all(group.keeps == Keeps() for group in self.all)
        blocks_not_found = 1 if vllm_config.speculative_config is None else 2
        self.tokens_not_found = blocks_not_found * math.lcm(*(group.block_size for group in self.all))
        self.are_shared = self.keeps_everything and bool(vllm_config.cache_config.enable_prefix_caching)


def has_windows_of_other_blocks(specs: Sequence[KVCacheSpec], dcp_size: int) -> bool:
    """Whether there are clipped tables in an engine whose groups have blocks of unlike numbers of tokens, states
    included: all of them decide how far a hit reaches that vLLM cuts to whole blocks. Ranks of decode context
    parallelism share the tokens of a block of some groups, and not of others."""
    block_sizes = {resolve_dcp_kv_block_size(spec, dcp_size) for spec in specs}
    return len(block_sizes) > 1 and any(keeps(spec).is_clipped for spec in specs)


def _tokens_left_to_decode(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    replays = any(group.kv_cache_spec.prefix_replay_tokens > 0 for group in kv_cache_config.kv_cache_groups)
    for_state = 1 if kv_cache_config.has_mamba_layers or replays else 0
    count: int = max(for_state, vllm_config.num_prefill_lookahead_tokens - 1)
    return count


def _is_to_be_filled(block: KVCacheBlock) -> bool:
    return block.block_hash is None and not block.is_null
