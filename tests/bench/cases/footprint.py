"""What engines use up that do nothing: processor time, and memory for what they wait for."""

from __future__ import annotations

import time

from tests.bench.case import BLOCK_TOKENS, OVER_TCP, Case, Round, fresh, pairs, room
from tests.bench.cases.meetings import SMALL
from tests.bench.cases.steps import SETTLE_SECONDS
from tests.bench.cases.transfers import FEW_SMALL
from tests.bench.sides import Side

IDLE_SECONDS = 2.0
MANY = 512


def _alone(each: Side, number: int) -> Round:
    """Nobody asks for anything."""
    engines = {"P": each.prefill, "D": each.decode}
    before = {name: engine.snapshot().cpu_seconds for name, engine in engines.items()}
    time.sleep(IDLE_SECONDS)
    return {
        f"cores of {name}": (engine.snapshot().cpu_seconds - before[name]) / IDLE_SECONDS
        for name, engine in engines.items()
    }


def _met(each: Side, number: int) -> Round:
    """They have met, and nobody asks for anything any more."""
    if number == 0:
        each.transfer(["meet"], BLOCK_TOKENS)
        each.prefill.wait_until_idle()
    return _alone(each, number)


def _memory(each: Side, number: int) -> Round:
    """What leases and READs in flight add to resident memory. P is stopped while they are counted.

    All blocks are written to before, so that the KV itself does not count.
    """
    each.transfer(["meet"], BLOCK_TOKENS)
    each.prefill.wait_until_idle()
    for engine in (each.prefill, each.decode):
        engine.overwrite_free_blocks()
    before = each.prefill.snapshot().resident_bytes
    requests = each.prefill_all([f"{number}-{n}" for n in range(MANY)], BLOCK_TOKENS)
    leases_bytes = each.prefill.snapshot().resident_bytes - before
    each.prefill.freeze()
    before = each.decode.snapshot().resident_bytes
    each.decode.submit(*requests)
    time.sleep(SETTLE_SECONDS)
    reads_bytes = each.decode.snapshot().resident_bytes - before
    each.prefill.thaw()
    each.wait_right(requests)
    each.prefill.wait_until_idle()
    return {"P per lease, KB": leases_bytes / 1e3 / MANY, "D per request in flight, KB": reads_bytes / 1e3 / MANY}


CASES: tuple[Case, ...] = (
    Case("idle-alone", "two engines that have not met and have nothing to do", pairs(_alone, **SMALL)),
    Case("idle", "two engines that have met and have nothing to do", pairs(_met, **SMALL)),
    Case(
        "memory",
        f"resident memory of {MANY} leases on P, and of as many READs in flight on D",
        fresh(_memory, environment=OVER_TCP, **room(MANY, 2) | FEW_SMALL),
    ),
)
