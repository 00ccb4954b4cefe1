"""What a step of D's engine loop pays: while it waits for KV, and while it computes for others."""

from __future__ import annotations

import time
from typing import Any

from tests.bench.case import BLOCK_TOKENS, OVER_TCP, SMALL_BLOCKS, Case, Round, fresh, pairs, room
from tests.bench.cases.transfers import FEW_SMALL
from tests.bench.sides import Side, WrongResult
from tests.rig import BlackHole, Check, RequestSpec, Snapshot, dead_params, prompt
from tests.rig.messages import CallTimes, Forward

WAITING = 64
SETTLE_SECONDS = 0.3
"""Until the last READ is posted, and the first handshake is under way."""
IDLE_SECONDS = 1.0

# --- a step that has nothing to do but to ask -------------------------------------------------------------------------


def _idle_steps(each: Side, requests: list[RequestSpec]) -> Round:
    """Of D, to which nothing comes meanwhile."""
    each.decode.submit(*requests)
    time.sleep(SETTLE_SECONDS)
    each.decode.snapshot(reset_times=True)
    time.sleep(IDLE_SECONDS)
    after = each.decode.snapshot()
    waiting = sum(status == "WAITING_FOR_REMOTE_KVS" for status in after.requests.values())
    if waiting != len(requests):
        raise WrongResult(f"{each.label}: {waiting} of {len(requests)} requests were still waiting")
    calls = after.start_load_kv.calls
    return {
        "engine thread per step, us": (after.start_load_kv.wall_ns + after.get_transfer_results.wall_ns) / 1e3 / calls,
        "longest stall, ms": after.step_wall_ns_max / 1e6,
    }


def _reads_in_flight(each: Side, number: int) -> Round:
    """P is stopped: over TCP a READ then stays in flight."""
    requests = each.prefill_all([f"{number}-{n}" for n in range(WAITING)], BLOCK_TOKENS)
    if number == 0:
        each.decode.submit(*requests)  # they meet
        found: Round = {}
    else:
        each.prefill.freeze()
        found = _idle_steps(each, requests)
        each.prefill.thaw()
    each.wait_right(requests)
    each.prefill.wait_until_idle()
    return found


def _peer_awaited(each: Side, number: int) -> Round:
    """They wait for an engine that accepts TCP and never answers; new engines for the next round."""
    with BlackHole() as hole:
        return _idle_steps(
            each,
            [
                RequestSpec(f"{number}-{n}", prompt(f"{number}-{n}", BLOCK_TOKENS), 1, dead_params(hole.port, 1))
                for n in range(WAITING)
            ],
        )


# --- a step that computes for others ----------------------------------------------------------------------------------

PACED = 32
PACE_SECONDS = 0.01
"""Between two requests of 17 MB: 1.7 GB/s."""
LONG_TOKENS = 2000
"""Of the answer that D computes for another request meanwhile; more than there are steps."""
PIECES = {Forward.MULTIPLIES: 14, Forward.HOLDS: 250}
"""About 5 ms."""


def _step_ms(times: Snapshot) -> float:
    """Computing, and the connector; without what the rig checks and writes."""
    return _sum_ns(times.forward, times.start_load_kv, times.get_transfer_results) / 1e6 / times.forward.calls


def _sum_ns(*times: CallTimes) -> int:
    return sum(each.wall_ns for each in times)


def _busy(each: Side, number: int) -> Round:
    """The same work in each step, alone and with a request of 17 MB every two steps."""
    requests = each.prefill_all([f"{number}-{n}" for n in range(PACED)], SMALL_BLOCKS * BLOCK_TOKENS)
    other = f"{number}-other"
    each.decode.submit(RequestSpec(other, prompt(other, BLOCK_TOKENS), LONG_TOKENS, None, Check.EDGES))
    time.sleep(SETTLE_SECONDS)
    each.decode.snapshot(reset_times=True)
    time.sleep(PACED * PACE_SECONDS)
    alone = each.decode.snapshot(reset_times=True)
    for request in requests:
        each.decode.submit(request)
        time.sleep(PACE_SECONDS)
    each.wait_right(requests)
    beside = each.decode.snapshot()
    each.decode.abort(other)
    each.decode.wait(other)
    each.prefill.wait_until_idle()
    alone_ms, beside_ms = _step_ms(alone), _step_ms(beside)
    return {
        "step without transfers, ms": alone_ms,
        "step with transfers, ms": beside_ms,
        "with / without": beside_ms / alone_ms,
        "longest stall, ms": beside.step_wall_ns_max / 1e6,
        "lost per request, ms": (beside_ms - alone_ms) * beside.forward.calls / PACED,
    }


def _busy_case(name: str, about: str, forward: Forward) -> Case:
    options: dict[str, Any] = room(PACED, SMALL_BLOCKS)
    options["blocks"] += LONG_TOKENS // BLOCK_TOKENS
    decode = {"forward": forward, "forward_pieces": PIECES[forward]}
    return Case(name, about, pairs(_busy, **options, decode_options=decode))


_FEW_WAITING = room(WAITING, 2) | FEW_SMALL

CASES: tuple[Case, ...] = (
    Case(
        "idle-steps-reading",
        f"steps with {WAITING} READs in flight and nothing else to do",
        pairs(_reads_in_flight, environment=OVER_TCP, **_FEW_WAITING),
    ),
    Case(
        "idle-steps-meeting",
        f"steps with {WAITING} requests that wait for an engine which does not answer",
        fresh(_peer_awaited, **_FEW_WAITING),
    ),
    _busy_case(
        "busy-multiplying", "steps that multiply matrices, with 17 MB every 10 ms and without", Forward.MULTIPLIES
    ),
    _busy_case("busy-holding", "the same, the steps hold the interpreter", Forward.HOLDS),
)
