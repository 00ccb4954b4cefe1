"""How soon KV is there, and what it costs D: many bytes at once, one request after another, many requests at once,
blocks of several sizes."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from tests.bench.case import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LARGE_BLOCKS,
    LAYERS,
    OVER_TCP,
    SMALL_BLOCKS,
    Case,
    Round,
    pairs,
    percentile,
    room,
    while_it,
)
from tests.bench.sides import Side, Transferred
from tests.rig.messages import Forward

AT_ONCE = 4
IN_A_ROW = 100
IN_A_ROW_OVER_TCP = 40

# --- many bytes at once -----------------------------------------------------------------------------------------------


def _throughput(moved: Transferred, request_bytes: int) -> float:
    return len(moved.done_ms) * request_bytes / moved.done_ms[-1] / 1e6


def _four_at_once(each: Side, number: int, *, scattered: bool) -> Round:
    if scattered:
        each.arrange_free_blocks(number)
    moved = each.transfer([f"{number}-{n}" for n in range(AT_ONCE)], LARGE_BLOCKS * BLOCK_TOKENS)
    each.prefill.wait_until_idle()
    return {
        "engine thread per request, ms": moved.engine_thread_ms / AT_ONCE,
        "longest stall, ms": moved.longest_stall_ms,
        "first done, ms": moved.done_ms[0],
        "all done, ms": moved.done_ms[-1],
        "GB/s": _throughput(moved, LARGE_BLOCKS * BLOCK_BYTES),
        "CPU of D per request, s": moved.cpu_seconds / AT_ONCE,
    }


def _four(name: str, about: str, forward: Forward, *, scattered: bool = False, **options: Any) -> Case:
    measure = partial(_four_at_once, scattered=scattered)
    return Case(name, about, pairs(measure, **room(AT_ONCE, LARGE_BLOCKS), **while_it(forward), **options))


# --- one after another ------------------------------------------------------------------------------------------------


def _in_a_row(each: Side, number: int, *, requests: int) -> Round:
    moved = [each.transfer([f"{number}-{n}"], SMALL_BLOCKS * BLOCK_TOKENS) for n in range(requests)]
    each.prefill.wait_until_idle()
    done_ms = [one for each_moved in moved for one in each_moved.done_ms]
    return {
        "done p50, ms": statistics.median(done_ms),
        "done p99, ms": percentile(done_ms, 99),
        "longest stall, ms": max(each_moved.longest_stall_ms for each_moved in moved),
    }


def _row(
    name: str, about: str, forward: Forward, seconds: float = 0.005, requests: int = IN_A_ROW, **options: Any
) -> Case:
    measure = partial(_in_a_row, requests=requests)
    return Case(name, about, pairs(measure, **room(4, SMALL_BLOCKS), **while_it(forward, seconds), **options))


# --- many small requests at once --------------------------------------------------------------------------------------

FEW_SMALL = {"layers": 4, "kv_heads": 2}
"""A block of a request is 64 KiB, in four pages of 16 KiB."""


def _many_at_once(each: Side, number: int, *, requests: int) -> Round:
    moved = each.transfer([f"{number}-{n}" for n in range(requests)], BLOCK_TOKENS)
    each.prefill.wait_until_idle()
    return {
        "engine thread per request, us": moved.engine_thread_ms * 1000 / requests,
        "longest stall, ms": moved.longest_stall_ms,
        "done p50, ms": statistics.median(moved.done_ms),
        "done p99, ms": percentile(moved.done_ms, 99),
    }


def _many(requests: int) -> Case:
    return Case(
        f"at-once-{requests}",
        f"{requests:,} requests of one block of 64 KiB in one step",
        pairs(partial(_many_at_once, requests=requests), **room(requests, 2) | FEW_SMALL),
    )


# --- blocks of several sizes ------------------------------------------------------------------------------------------

SIZED_BYTES = 1 << 25
"""Of each of `AT_ONCE` requests."""


def _in_order_and_scattered(each: Side, number: int, *, tokens: int) -> Round:
    found: Round = {}
    for order, seed in (("in order", None), ("scattered", number)):
        each.arrange_free_blocks(seed)
        moved = each.transfer([f"{number}-{order}-{n}" for n in range(AT_ONCE)], tokens)
        each.prefill.wait_until_idle()
        found[f"GB/s, {order}"] = _throughput(moved, SIZED_BYTES)
        found[f"engine thread, {order}, ms"] = moved.engine_thread_ms / AT_ONCE
    return found


def _pages(size: str, page_bytes: int, **shape: int) -> Case:
    blocks = SIZED_BYTES // (LAYERS * page_bytes)
    return Case(
        f"pages-{size}",
        f"four requests of 34 MB in one step, in pages of {size}iB, in order and scattered",
        pairs(
            partial(_in_order_and_scattered, tokens=blocks * BLOCK_TOKENS),
            **room(AT_ONCE, blocks) | shape,
        ),
    )


PREFILL_TOKENS, DECODE_TOKENS = 16, 64
"""Of a block, where the two differ."""


def _unequal_blocks() -> Case:
    tokens = SIZED_BYTES // BLOCK_BYTES * BLOCK_TOKENS
    prefill, decode = (room(AT_ONCE, tokens // of, of) for of in (PREFILL_TOKENS, DECODE_TOKENS))
    return Case(
        "unequal-blocks",
        f"the same with blocks of {PREFILL_TOKENS} tokens on P and of {DECODE_TOKENS} on D",
        pairs(
            partial(_in_order_and_scattered, tokens=tokens),
            keeps_token_order=True,
            prefill_options=prefill,
            decode_options=decode,
        ),
    )


CASES: tuple[Case, ...] = (
    _four("four", "four requests of 134 MB in one step, in blocks as vLLM's pool gives them", Forward.NOTHING),
    _four("four-scattered", "the same, each request in random blocks", Forward.NOTHING, scattered=True),
    _four("four-sleeping", "four requests in blocks as vLLM's pool gives them, a step sleeps 5 ms", Forward.SLEEPS),
    _four("four-multiplying", "the same, a step multiplies matrices for 5 ms", Forward.MULTIPLIES),
    _four("four-holding", "the same, a step holds the interpreter for 5 ms", Forward.HOLDS),
    _four("four-tcp", "four requests of 134 MB in one step, over TCP", Forward.NOTHING, environment=OVER_TCP),
    _row("row-sleeping", "17 MB, one request after another; a step sleeps 5 ms", Forward.SLEEPS),
    _row("row-multiplying", "the same, a step multiplies matrices for 5 ms", Forward.MULTIPLIES),
    _row("row-holding", "the same, a step holds the interpreter for 5 ms", Forward.HOLDS),
    _row("row-holding-long", "the same, a step holds the interpreter for 10 ms", Forward.HOLDS, 0.010),
    _row(
        "row-sleeping-tcp",
        "17 MB, one request after another, over TCP; a step sleeps 5 ms",
        Forward.SLEEPS,
        requests=IN_A_ROW_OVER_TCP,
        environment=OVER_TCP,
    ),
    _many(64),
    _many(1000),
    _pages("4K", 4 * 1024, kv_heads=1, head_dim=32),
    _pages("16K", 16 * 1024, kv_heads=2),
    _pages("64K", 64 * 1024),
    _pages("1M", 1024 * 1024, kv_heads=32, head_dim=256),
    _unequal_blocks(),
)
