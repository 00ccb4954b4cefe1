"""What is read of an agent's metadata: right of real ones, and nothing of others."""

from __future__ import annotations

import contextlib
import random

import pytest

from connector.ports.nixl_agent.metadata import (
    MetadataUnreadable,
    agent_named_in,
    newest_memory_type,
    ucx_address_in,
    ucx_version,
)

ADDRESS = b"\x20 an address | with a bar"


def field(key: bytes, value: bytes) -> bytes:
    return key + len(value).to_bytes(8, "little") + value + b"|"


def metadata(*connections: tuple[bytes, bytes], count: int | None = None) -> bytes:
    """As NIXL writes them."""
    number = len(connections) if count is None else count
    fields = [field(b"t", name) + field(b"c", address) for name, address in connections]
    return b"".join(
        [b"nixlSerDes|", field(b"Agent", b"p"), field(b"Conns", number.to_bytes(8, "little")), *fields, b"MemSection|"]
    )


WHOLE = metadata((b"POSIX", b"elsewhere"), (b"UCX", ADDRESS))


def test_the_address_is_that_of_ucx() -> None:
    assert agent_named_in(WHOLE) == "p"
    assert ucx_address_in(WHOLE) == ADDRESS
    assert ucx_version(WHOLE) == 0
    assert ucx_version(metadata((b"UCX", b"\x7f"))) == 15


@pytest.mark.parametrize(
    "other",
    [
        metadata(),
        metadata((b"POSIX", b"elsewhere")),
        metadata((b"UCX", b"")),
        metadata((b"UCX", ADDRESS), count=0),
    ],
)
def test_where_there_is_no_address_there_is_no_version(other: bytes) -> None:
    assert ucx_version(other) is None


@pytest.mark.parametrize(
    "other",
    [
        metadata(count=1 << 63),
        b"",
        b"nixlSerDes|Agent",
        WHOLE.replace(b"Conns", b"Links"),
        WHOLE.replace(b"UCX|", b"UCX!"),
        WHOLE.replace(field(b"Agent", b"p"), b"Agent" + b"\xff" * 8),
        metadata(*[(b"POSIX", b"elsewhere")] * 64, (b"UCX", ADDRESS)),
    ],
)
def test_of_what_nixl_never_writes_no_version_is_told(other: bytes) -> None:
    """NIXL finds an address of UCX in the last three (docs/nixl.md fact 37)."""
    assert ucx_address_in(other) is None
    with pytest.raises(MetadataUnreadable):
        ucx_version(other)


def test_of_several_addresses_the_newest_version_counts() -> None:
    assert ucx_version(metadata((b"UCX", b"\x00"), (b"UCX", b"\x02"), (b"UCX", b"\x01"))) == 2


def test_damage_is_read_as_nothing_or_as_an_address() -> None:
    seed = random.SystemRandom().randrange(1 << 16)
    rng = random.Random(seed)
    for _ in range(2000):
        damaged = bytearray(WHOLE[: rng.randrange(len(WHOLE) + 1)])
        for _ in range(min(len(damaged), rng.randrange(4))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        agent_named_in(bytes(damaged))
        with contextlib.suppress(MetadataUnreadable):
            assert ucx_version(bytes(damaged)) in (None, *range(16)), seed


def test_a_type_of_memory_is_found_wherever_nixl_may_look() -> None:
    def listed(number: int, bar: bytes = b"|") -> bytes:
        return b"nixlSDList" + bar + field(b"t", number.to_bytes(4, "little"))

    assert newest_memory_type(WHOLE) == 0
    assert newest_memory_type(WHOLE + listed(1) + listed(7, b"\n") + listed(2)) == 7
    assert newest_memory_type(b"nixlSDList|t" + listed(9)) >= 9, "one within another"
