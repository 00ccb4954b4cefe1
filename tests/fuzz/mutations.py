"""How a valid message becomes a damaged one: bytes and pieces, and the beginnings of huge things in message pack."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

HUGE = (
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xdb\xff\xff\xff\xff",  # a text, and bytes, of 4 GiB
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",  # 2**64 - 1
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",  # -2**63
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # not a number
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",  # infinity
    b"\x91" * 2000,  # nested deeply
    b"[" * 2000,
    b'{"a":' * 500,
    b"\xc0",
    b"\xff" * 40,
    b"\x00" * 40,
    b"\xed\xa0\x80",  # half of a surrogate pair
    b"9" * 400,
)


def mutate(seeds: Sequence[bytes], choose: random.Random) -> bytes:
    """One of the seeds, changed in a few places."""
    data = bytearray(choose.choice(seeds))
    for _ in range(choose.randint(1, 4)):
        at = choose.randint(0, len(data))
        match choose.randrange(8):
            case 0 if data:
                data[at % len(data)] = choose.randrange(256)
            case 1:
                data[at:at] = choose.choice(HUGE)
            case 2:
                piece = choose.choice(HUGE)
                data[at : at + len(piece)] = piece
            case 3:
                del data[at : at + choose.randint(1, 16)]
            case 4:
                end = at + choose.randint(1, 32)
                data[at:at] = data[at:end] * choose.choice((1, 2, 50))
            case 5:
                del data[at:]
            case 6:
                other = choose.choice(seeds)
                data[at:] = other[choose.randint(0, len(other)) :]
            case _:
                data[at:at] = bytes(choose.randrange(256) for _ in range(choose.randint(1, 8)))
    return bytes(data)


def with_other_values(seed: bytes, choose: random.Random) -> bytes:
    """A map in message pack with another value somewhere: right in form, wrong in type or range."""
    values = (None, True, -1, 0, 2**63, 2**64 - 1, 1.5, float("nan"), "", "x" * 600, b"", "a\n", [], [[]] * 600, {})
    try:
        fields = msgspec.msgpack.decode(seed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return seed
    if not isinstance(fields, dict):
        return msgspec.msgpack.encode(choose.choice(values))
    if not fields:
        return seed
    name = choose.choice(list(fields))
    fields[name] = choose.choice(values)
    return msgspec.msgpack.encode(fields)
