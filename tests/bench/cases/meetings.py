"""Engines that meet: the first request, many engines, dead engines, caches of many blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.bench.case import (
    BLOCK_TOKENS,
    LARGE_BLOCKS,
    Case,
    Round,
    Rounds,
    fresh,
    room,
    turns,
    while_it,
)
from tests.bench.sides import CHOICES, Side, done_ms
from tests.rig import (
    OURS,
    BlackHole,
    ConnectorChoice,
    EngineOptions,
    EngineRig,
    RequestSpec,
    dead_params,
    free_port,
    prompt,
)
from tests.rig.messages import Forward

SMALL: dict[str, Any] = {"layers": 4, "blocks": 128, "block_size_tokens": BLOCK_TOKENS}

# --- the first request ------------------------------------------------------------------------------------------------


def _first_request(each: Side, number: int) -> Round:
    return {"done, ms": each.transfer([f"first-{number}"], LARGE_BLOCKS * BLOCK_TOKENS).done_ms[-1]}


def _first(name: str, about: str, forward: Forward) -> Case:
    return Case(name, about, fresh(_first_request, **room(1, LARGE_BLOCKS), **while_it(forward)))


# --- dead engines -----------------------------------------------------------------------------------------------------

DEAD = 8


def _behind_the_dead(each: Side, number: int) -> Round:
    """Half of the dead accept TCP and never answer, half have closed their ports."""
    with ExitStack() as stack:
        holes = [stack.enter_context(BlackHole()) for _ in range(DEAD // 2)]
        ports = [hole.port for hole in holes] + [free_port() for _ in range(DEAD - len(holes))]
        (healthy,) = each.prefill_all([f"healthy-{number}"], 4 * BLOCK_TOKENS)
        lost = [
            RequestSpec(f"dead-{n}", prompt(f"dead-{n}", 4 * BLOCK_TOKENS), 1, dead_params(port, 4))
            for n, port in enumerate(ports)
        ]
        each.decode.submit(*lost, healthy)
        outcome = each.decode.wait(healthy.request_id, 20.0 + 10.0 * DEAD)
        each.require_right(outcome, healthy.prompt_token_ids)
    return {"served, ms": (outcome.ended_ns - outcome.submitted_ns) / 1e6}


# --- caches of many blocks --------------------------------------------------------------------------------------------


def _register_and_meet(each: Side, number: int) -> Round:
    first, second = (each.transfer([f"{which}-{number}"], BLOCK_TOKENS) for which in ("first", "second"))
    assert each.decode.ready is not None
    return {
        "connector's start, ms": each.decode.ready.connector_start_ns / 1e6,
        "first request done, ms": first.done_ms[0],
        "second request done, ms": second.done_ms[0],
        "longest stall at the first, ms": first.longest_stall_ms,
    }


def _geometry(layers: int, blocks: int) -> Case:
    """Pages are as small as they can be, 4 KiB: what is measured depends on their number."""
    return Case(
        f"meet-{layers}x{blocks}",
        f"start and first request with {layers} layers of {blocks:,} blocks of 4 KiB",
        fresh(
            _register_and_meet,
            layers=layers,
            blocks=blocks,
            block_size_tokens=BLOCK_TOKENS,
            kv_heads=1,
            head_dim=32,
        ),
    )


# --- many engines -----------------------------------------------------------------------------------------------------

PEERS = 32
QUIET_SECONDS = 2.0


def _engine(choice: ConnectorChoice, role: Any) -> EngineOptions:
    return EngineOptions(choice, role, free_port(), engine_id=f"{role}-{uuid4().hex[:12]}", **SMALL)


@contextmanager
def _crowd(directory: Path) -> Iterator[Rounds]:
    """The same prefill engines in all rounds, and a new decode engine of each connector for each round.

    All prefill engines have our connector. So many of the built-in one, whose progress threads keep a core busy each,
    would leave no decode engine a core to meet them with.
    """
    with ExitStack() as stack:
        prefills = [stack.enter_context(EngineRig(_engine(OURS, "kv_producer"), directory)) for _ in range(PEERS)]
        for engine in prefills:
            engine.wait_ready()

        def rounds(number: int) -> Iterator[tuple[str, Round]]:
            for choice in turns(CHOICES, number):
                with EngineRig(_engine(choice, "kv_consumer"), directory) as decode:
                    decode.wait_ready()
                    yield choice.label, _meet_all([Side(choice.label, each, decode) for each in prefills], number)

        yield rounds


def _meet_all(sides: list[Side], number: int) -> Round:
    """One request for each prefill engine, all of them before one step.

    The prefill engines make no steps meanwhile: an engine that has lent blocks makes a thousand a second, and all of
    them would use up the machine.
    """
    decode = sides[0].decode
    requests: list[RequestSpec] = []
    for n, each in enumerate(sides):
        requests += each.prefill_all([f"{number}-{n}"], BLOCK_TOKENS)
    for each in sides:
        each.prefill.pause_steps()
    before = decode.snapshot(reset_times=True)
    decode.submit(*requests)
    outcomes = sides[0].wait_right(requests)
    met = decode.snapshot()
    with ExitStack() as stack:
        for each in sides:
            each.prefill.resume_steps()
            each.prefill.wait_until_idle()
            each.prefill.freeze()
            stack.callback(each.prefill.thaw)
        quiet = decode.snapshot()
        time.sleep(QUIET_SECONDS)
        cpu_seconds = decode.snapshot().cpu_seconds - quiet.cpu_seconds
    return {
        "first done, ms": done_ms(outcomes)[0],
        "all done, ms": done_ms(outcomes)[-1],
        "longest stall, ms": met.step_wall_ns_max / 1e6,
        "RSS of D per peer, KB": (met.resident_bytes - before.resident_bytes) / 1e3 / len(sides),
        "cores of idle D": cpu_seconds / QUIET_SECONDS,
    }


CASES: tuple[Case, ...] = (
    _first("first-sleeping", "the first request between two engines, 134 MB; a step sleeps 5 ms", Forward.SLEEPS),
    _first("first-holding", "the same, a step holds the interpreter for 5 ms", Forward.HOLDS),
    Case(
        "behind-dead",
        f"a healthy engine that is met behind {DEAD} dead ones",
        fresh(_behind_the_dead, **SMALL),
    ),
    _geometry(4, 128),
    _geometry(32, 1024),
    _geometry(32, 8192),
    Case("peers", f"{PEERS} live engines that are met at once", _crowd),
)
