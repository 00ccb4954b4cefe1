"""What is measured side by side. A case makes rounds; a round gives one number for each of its figures.

The pages of the KV cache are 64 KiB, as those of Llama 3 8B with 16-bit values and blocks of 16 tokens, in 32 layers:
a block of a request is 2 MiB.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.sides import CHOICES, Side, both_sides, done_ms, side
from tests.rig import BlackHole, RequestSpec, dead_params, free_port, prompt
from tests.rig.messages import Forward

LAYERS = 32
BLOCK_TOKENS = 32
BLOCK_BYTES = LAYERS * 65_536
LARGE_BLOCKS = 64
"""134 MB, the KV of a prompt of 2,048 tokens."""
SMALL_BLOCKS = 8
"""17 MB."""
AT_ONCE = 4
IN_A_ROW = 20
IDLE_SECONDS = 2.0
DEAD = 8

Round = dict[str, float]
Rounds = Callable[[int], Iterator[tuple[str, Round]]]
"""One round of each side: (label, figures)."""


@dataclass(frozen=True)
class Case:
    """One thing that is measured.

    Attributes:
        about: one line for the table.
        higher_is_better: the figures of which that is true; of all others, lower is.
        open: starts what it needs in a directory; inside, its rounds.
    """

    name: str
    about: str
    open: Callable[[Path], Any]
    higher_is_better: frozenset[str] = frozenset({"GB/s"})


def _in_turns(sides: list[Side], measure: Callable[[Side, int], Round]) -> Rounds:
    def rounds(number: int) -> Iterator[tuple[str, Round]]:
        # Who goes first changes, so that neither always follows the other's cache misses.
        for each in sides if number % 2 else reversed(sides):
            with each.awake():
                yield each.label, measure(each, number)

    return rounds


@contextmanager
def _pairs(directory: Path, measure: Callable[[Side, int], Round], **options: Any) -> Iterator[Rounds]:
    """Both sides, warm: they have met, and every size was moved once."""
    with both_sides(directory, **options) as sides:
        rounds = _in_turns(sides, measure)
        for _ in rounds(0):
            continue
        yield rounds


def _forward(forward: Forward, seconds: float) -> dict[str, Any]:
    return {"decode_options": {"forward": forward, "forward_seconds": seconds}}


# --- many bytes at once -----------------------------------------------------------------------------------------------


def _four_at_once(each: Side, number: int) -> Round:
    before = each.decode.snapshot()
    outcomes = each.transfer([f"{number}-{n}" for n in range(AT_ONCE)], LARGE_BLOCKS * BLOCK_TOKENS)
    after = each.decode.snapshot()
    done = done_ms(outcomes)
    thread_ns = after.start_load_kv.wall_ns + after.get_transfer_results.wall_ns
    each.prefill.wait_until_idle()
    return {
        "engine thread per request, ms": thread_ns / 1e6 / AT_ONCE,
        "longest step, ms": after.step_wall_ns_max / 1e6,
        "first done, ms": done[0],
        "all done, ms": done[-1],
        "GB/s": AT_ONCE * LARGE_BLOCKS * BLOCK_BYTES / done[-1] / 1e6,
        "CPU of D per request, s": (after.cpu_seconds - before.cpu_seconds) / AT_ONCE,
    }


def _four(name: str, about: str, forward: Forward, seconds: float) -> Case:
    options = {
        "layers": LAYERS,
        "blocks": LARGE_BLOCKS * AT_ONCE + 32,
        "block_size_tokens": BLOCK_TOKENS,
        "max_batched_tokens": AT_ONCE * LARGE_BLOCKS * BLOCK_TOKENS,
        **_forward(forward, seconds),
    }
    return Case(name, about, lambda directory: _pairs(directory, _four_at_once, **options))


# --- one after another ------------------------------------------------------------------------------------------------


def _in_a_row(each: Side, number: int) -> Round:
    done: list[float] = []
    for n in range(IN_A_ROW):
        done += done_ms(each.transfer([f"{number}-{n}"], SMALL_BLOCKS * BLOCK_TOKENS))
    each.prefill.wait_until_idle()
    done.sort()
    return {"done p50, ms": statistics.median(done), "done p95, ms": done[int(0.95 * (IN_A_ROW - 1))]}


def _row(name: str, about: str, forward: Forward, seconds: float) -> Case:
    options = {"layers": LAYERS, "blocks": 64, "block_size_tokens": BLOCK_TOKENS, **_forward(forward, seconds)}
    return Case(name, about, lambda directory: _pairs(directory, _in_a_row, **options))


# --- engines that meet ------------------------------------------------------------------------------------------------


@contextmanager
def _fresh(directory: Path, measure: Callable[[Side, int], Round], **options: Any) -> Iterator[Rounds]:
    """New engines for every round, one connector after the other."""
    numbers = itertools.count()

    def rounds(number: int) -> Iterator[tuple[str, Round]]:
        for choice in CHOICES if number % 2 else reversed(CHOICES):
            (own := directory / str(next(numbers))).mkdir()
            with side(choice, own, **options) as each:
                yield choice.label, measure(each, number)

    yield rounds


def _first_request(each: Side, number: int) -> Round:
    return {"done, ms": done_ms(each.transfer([f"first-{number}"], LARGE_BLOCKS * BLOCK_TOKENS))[-1]}


def _first(name: str, about: str, forward: Forward) -> Case:
    options = {"layers": LAYERS, "blocks": 96, "block_size_tokens": BLOCK_TOKENS, **_forward(forward, 0.005)}
    return Case(name, about, lambda directory: _fresh(directory, _first_request, **options))


def _behind_the_dead(each: Side, number: int) -> Round:
    """Half of the dead accept TCP and never answer, half have closed their ports."""
    with ExitStack() as stack:
        holes = [stack.enter_context(BlackHole()) for _ in range(DEAD // 2)]
        ports = [hole.port for hole in holes] + [free_port() for _ in range(DEAD - len(holes))]
        tokens = prompt(f"healthy-{number}", 4 * BLOCK_TOKENS)
        healthy = RequestSpec("healthy", tokens, 1, each.prefill.prefill("healthy", tokens))
        lost = [
            RequestSpec(f"dead-{n}", prompt(f"dead-{n}", 4 * BLOCK_TOKENS), 1, dead_params(port, 4))
            for n, port in enumerate(ports)
        ]
        each.decode.submit(*lost, healthy)
        outcome = each.decode.wait("healthy", 20.0 + 10.0 * DEAD)
        each.require_right(outcome, tokens)
    return {"served, ms": (outcome.ended_ns - outcome.submitted_ns) / 1e6}


# --- nothing ----------------------------------------------------------------------------------------------------------


def _idle(each: Side, number: int) -> Round:
    """They have met, and nobody asks for anything."""
    if number == 0:
        each.transfer(["meet"], BLOCK_TOKENS)
        each.prefill.wait_until_idle()
    engines = {"P": each.prefill, "D": each.decode}
    before = {name: engine.snapshot().cpu_seconds for name, engine in engines.items()}
    time.sleep(IDLE_SECONDS)
    return {
        f"cores of {name}": (engine.snapshot().cpu_seconds - before[name]) / IDLE_SECONDS
        for name, engine in engines.items()
    }


SMALL = {"layers": 4, "blocks": 128, "block_size_tokens": BLOCK_TOKENS}

CASES: tuple[Case, ...] = (
    _four("four", "four requests of 134 MB in one step", Forward.NOTHING, 0.0),
    _four("four-sleeping", "the same, a step sleeps 5 ms", Forward.SLEEPS, 0.005),
    _four("four-multiplying", "the same, a step multiplies matrices for 5 ms", Forward.MULTIPLIES, 0.005),
    _four("four-holding", "the same, a step holds the interpreter for 5 ms", Forward.HOLDS, 0.005),
    _row("row-sleeping", "17 MB, one request after another; a step sleeps 5 ms", Forward.SLEEPS, 0.005),
    _row("row-multiplying", "the same, a step multiplies matrices for 5 ms", Forward.MULTIPLIES, 0.005),
    _row("row-holding", "the same, a step holds the interpreter for 5 ms", Forward.HOLDS, 0.005),
    _row("row-holding-long", "the same, a step holds the interpreter for 10 ms", Forward.HOLDS, 0.010),
    _first("first-sleeping", "the first request between two engines, 134 MB; a step sleeps 5 ms", Forward.SLEEPS),
    _first("first-holding", "the same, a step holds the interpreter for 5 ms", Forward.HOLDS),
    Case(
        "behind-dead",
        f"a healthy engine that is met behind {DEAD} dead ones",
        partial(_fresh, measure=_behind_the_dead, **SMALL),
    ),
    Case("idle", "two engines that have met and have nothing to do", partial(_pairs, measure=_idle, **SMALL)),
)
