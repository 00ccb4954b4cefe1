"""Which bytes belong to which token: a stand-in for what a model would compute.

A token's digest depends on the token and on everything before it, as its keys and values do in a causal model. The
64-bit words of a token's slot are the digest xor a constant of the word's place (layer, head, column). Hence
* equal prompts give equal bytes in whatever process, and a shared prefix gives shared blocks, as the prefix cache
  assumes;
* two slots of different prompts, positions, layers or heads differ, so a block that landed in the wrong place, came
  from the wrong request or arrived only in part is seen;
* the next token is a function of the last digest, so the right answer is known without an engine.

Pure: no vLLM, no torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

VOCABULARY_SIZE = 32_000

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The finalizer of splitmix64: a bijection on 64 bits in which every input bit reaches every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class TokenDigests:
    """The digests of a growing sequence of tokens."""

    def __init__(self) -> None:
        self._digests: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append `token_ids` to the sequence."""
        last = self._digests[-1] if self._digests else _GOLDEN
        for token_id in token_ids:
            last = _mix(last * _GOLDEN + token_id + 1)
            self._digests.append(last)

    def next_token(self) -> int:
        """The token that follows the sequence so far."""
        return _mix(self._digests[-1] ^ _GOLDEN) % VOCABULARY_SIZE

    def words(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Digests of the tokens [start, stop), shape [stop - start]."""
        return np.array([_signed(digest) for digest in self._digests[start:stop]], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._digests)


def place_words(layers: int, heads: int, columns: int) -> npt.NDArray[np.int64]:
    """The constant of each place, shape [layers, heads, columns], a column being 8 bytes of a slot; all different."""
    flat = [_signed(_mix(place * _GOLDEN + 1)) for place in range(layers * heads * columns)]
    return np.array(flat, dtype=np.int64).reshape(layers, heads, columns)


def prompt(name: str, length_tokens: int, prefix: Sequence[int] = ()) -> list[int]:
    """A prompt of `length_tokens` tokens that begins with `prefix`; other names give other tokens after it."""
    state = zlib.crc32(name.encode())
    tail = [_mix(state * _GOLDEN + position) % VOCABULARY_SIZE for position in range(length_tokens - len(prefix))]
    return [*prefix, *tail][:length_tokens]


def expected_output(prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """What an engine answers to a prompt when all its KV is right."""
    digests = TokenDigests()
    digests.extend(prompt_token_ids)
    output: list[int] = []
    for _ in range(max_tokens):
        output.append(digests.next_token())
        digests.extend(output[-1:])
    return output
