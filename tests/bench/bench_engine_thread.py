"""What a connector costs the engine thread, how soon the bytes are there, and what dead prefill engines cost.

    python -m tests.bench.bench_engine_thread [--only built-in|ours] [--part thread|dead] [--rounds N] [--json FILE]

README.md says how to read the figures, and first what they do not show. Both connectors run on the rig (tests/rig):
real vLLM schedulers, real NIXL over UCX, two processes, no model; nothing is called but `KVConnectorBase_V1`.

Design
    thread  One pair of engines per connector, all started first. A round is one step's worth of new requests: four
            prompts are computed on P, then all four are handed to D at once. Rounds of the two connectors alternate,
            so that both see the same noise, and the pair that is not measured is stopped (SIGSTOP), because the
            built-in connector's progress threads keep a core busy per engine even when idle. The first round of each
            pair includes the handshake and has every byte compared; the others are the figures, with the first and
            last bytes of each page compared.
    dead    A fresh pair for each count, so that the healthy prefill engine is one that D has not met. Requests for the
            dead ones come first; half of these accept TCP and never answer, half are closed ports.

Exit status 1 when bytes were wrong or, with both connectors measured, when a promise is broken: ours takes at most
1/20 of the built-in's time on the engine thread, its bytes arrive no later, and a healthy engine's request is served
in under 0.5 s behind eight dead ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.rig import (
    BUILTIN,
    OURS,
    BlackHole,
    Check,
    ConnectorChoice,
    EngineRig,
    RequestOutcome,
    RequestSpec,
    Snapshot,
    dead_params,
    engine_pair,
    expected_output,
    free_port,
    prompt,
)

LAYERS = 32
BLOCKS_PER_REQUEST = 64
REQUESTS_PER_STEP = 4
BLOCK_SIZE_TOKENS = 32
POOL_BLOCKS = BLOCKS_PER_REQUEST * REQUESTS_PER_STEP + 32
DEAD_COUNTS = (0, 4, 8)

THREAD_SHARE_LIMIT = 1 / 20
ARRIVAL_RATIO_LIMIT = 1.1
"""Of the medians of alternating rounds: two equal connectors differ by a tenth on a busy machine."""
HEALTHY_SECONDS_LIMIT = 0.5

Pair = tuple[EngineRig, EngineRig]


@dataclass(frozen=True)
class Round:
    """One step's worth of requests through one pair. Times in milliseconds, per request where it says so."""

    connector: str
    warm_up: bool
    thread_wall_per_request: float
    """start_load_kv + get_transfer_results on D, all calls from submission to the last outcome."""
    thread_cpu_per_request: float
    start_load_kv_max: float
    step_max: float
    """The most that one step of D spent in the two."""
    prefill_thread_wall_per_request: float
    arrival_first: float
    """From entry into start_load_kv until D was told that the first request's bytes are there."""
    arrival_all: float
    gigabytes_per_second: float
    mismatched_pages: int
    failures: int


@dataclass(frozen=True)
class DeadRun:
    """One healthy request behind `dead` requests for engines that are gone."""

    connector: str
    dead: int
    healthy_seconds: float
    finish: str
    received: bool
    mismatched_pages: int


# ---- the engine thread


def measure_rounds(choices: Sequence[ConnectorChoice], rounds: int, directory: Path) -> list[Round]:
    """Alternate rounds of the connectors; the first round of each is marked as warm-up."""
    results = []
    with ExitStack() as stack:
        pairs = {choice.label: _start_pair(stack, choice, directory) for choice in choices}
        for index in range(rounds + 1):
            # Who goes first changes, so that neither always follows the other's cache misses.
            order = choices if index % 2 else list(reversed(choices))
            for choice in order:
                result = _with_thawed(pairs[choice.label], choice.label, index)
                results.append(result)
                _progress(f"round {index}/{rounds} {choice.label}: {result.thread_wall_per_request:.3f} ms a request")
    return results


def _start_pair(stack: ExitStack, choice: ConnectorChoice, directory: Path) -> Pair:
    _progress(f"starting two engines with the {choice.label} connector")
    pair = stack.enter_context(
        engine_pair(
            choice,
            directory,
            layers=LAYERS,
            blocks=POOL_BLOCKS,
            block_size_tokens=BLOCK_SIZE_TOKENS,
            max_batched_tokens=REQUESTS_PER_STEP * BLOCKS_PER_REQUEST * BLOCK_SIZE_TOKENS,
        )
    )
    for engine in pair:
        engine.freeze()
    return pair


def _with_thawed(pair: Pair, label: str, index: int) -> Round:
    for engine in pair:
        engine.thaw()
    try:
        return _measure_round(pair, label, index)
    finally:
        for engine in pair:
            engine.freeze()


def _measure_round(pair: Pair, label: str, index: int) -> Round:
    prefill, decode = pair
    length = BLOCKS_PER_REQUEST * BLOCK_SIZE_TOKENS
    prompts = {f"{label}-{index}-{n}": prompt(f"{label}-{index}-{n}", length) for n in range(REQUESTS_PER_STEP)}
    params = prefill.prefill_all(prompts)
    check = Check.EVERY_BYTE if index == 0 else Check.EDGES
    prefill.snapshot(reset_times=True)
    decode.snapshot(reset_times=True)
    decode.submit(*(RequestSpec(name, tokens, 1, params[name], check) for name, tokens in prompts.items()))
    outcomes = decode.wait_all(list(prompts))
    decode_times, prefill_times = decode.snapshot(), prefill.wait_until_idle()
    failures = [outcome for outcome in outcomes if not _answered(outcome, prompts[outcome.request_id])]
    started_ns = min(outcome.load_started_ns or 0 for outcome in outcomes)
    arrived_ns = sorted((outcome.received_ns or 0) - started_ns for outcome in outcomes)
    transferred_bytes = len(prompts) * BLOCKS_PER_REQUEST * LAYERS * decode.options.page_length_bytes
    return Round(
        connector=label,
        warm_up=index == 0,
        thread_wall_per_request=_thread_ms(decode_times, "wall_ns"),
        thread_cpu_per_request=_thread_ms(decode_times, "cpu_ns"),
        start_load_kv_max=decode_times.start_load_kv.wall_ns_max / 1e6,
        step_max=decode_times.step_wall_ns_max / 1e6,
        prefill_thread_wall_per_request=_thread_ms(prefill_times, "wall_ns"),
        arrival_first=arrived_ns[0] / 1e6,
        arrival_all=arrived_ns[-1] / 1e6,
        gigabytes_per_second=transferred_bytes / arrived_ns[-1],
        mismatched_pages=sum(outcome.mismatched_pages for outcome in outcomes),
        failures=len(failures),
    )


def _answered(outcome: RequestOutcome, tokens: list[int]) -> bool:
    return outcome.received and outcome.output_token_ids == expected_output(tokens, 1)


def _thread_ms(snapshot: Snapshot, field: str) -> float:
    spent_ns: int = getattr(snapshot.start_load_kv, field) + getattr(snapshot.get_transfer_results, field)
    return spent_ns / 1e6 / REQUESTS_PER_STEP


# ---- dead prefill engines


def measure_dead(choices: Sequence[ConnectorChoice], directory: Path) -> list[DeadRun]:
    """A healthy engine's request behind 0, 4 and 8 dead ones, a fresh pair for each."""
    results = []
    for dead in DEAD_COUNTS:
        for choice in choices:
            results.append(_measure_behind_dead(choice, dead, directory))
            _progress(f"behind {dead} dead, {choice.label}: {results[-1].healthy_seconds:.2f} s")
    return results


def _measure_behind_dead(choice: ConnectorChoice, dead: int, directory: Path) -> DeadRun:
    with ExitStack() as stack:
        holes = [stack.enter_context(BlackHole()) for _ in range(dead // 2)]
        ports = [hole.port for hole in holes] + [free_port() for _ in range(dead - len(holes))]
        prefill, decode = stack.enter_context(engine_pair(choice, directory, layers=4, blocks=128))
        tokens = prompt("healthy", 4 * BLOCK_SIZE_TOKENS)
        healthy = RequestSpec("healthy", tokens, 1, prefill.prefill("healthy", tokens))
        lost = [
            RequestSpec(f"dead-{n}", prompt(f"dead-{n}", 4 * BLOCK_SIZE_TOKENS), 1, dead_params(port, 4))
            for n, port in enumerate(ports)
        ]
        decode.submit(*lost, healthy)
        outcome = decode.wait("healthy", 20.0 + 10.0 * dead)
        return DeadRun(
            connector=choice.label,
            dead=dead,
            healthy_seconds=(outcome.ended_ns - outcome.submitted_ns) / 1e9,
            finish=outcome.finish,
            received=outcome.received,
            mismatched_pages=outcome.mismatched_pages,
        )


# ---- the report

_COLUMNS: tuple[tuple[str, Callable[[Round], float]], ...] = (
    ("D thread/request", lambda r: r.thread_wall_per_request),
    ("of it CPU", lambda r: r.thread_cpu_per_request),
    ("start_load_kv max", lambda r: r.start_load_kv_max),
    ("step max", lambda r: r.step_max),
    ("P thread/request", lambda r: r.prefill_thread_wall_per_request),
    ("first arrival", lambda r: r.arrival_first),
    ("all arrived", lambda r: r.arrival_all),
    ("GB/s", lambda r: r.gigabytes_per_second),
)


def print_rounds(rounds: Sequence[Round]) -> None:
    """Medians and maxima per connector, in milliseconds."""
    request_megabytes = BLOCKS_PER_REQUEST * LAYERS * 65_536 / 1e6
    print(
        f"\nEngine thread, {REQUESTS_PER_STEP} new requests a step, each {request_megabytes:.0f} MB in "
        f"{BLOCKS_PER_REQUEST * LAYERS} descriptors of 64 KiB. Milliseconds (GB/s: the max column holds the minimum)."
    )
    for label, chosen in _by_connector(rounds).items():
        print(f"\n  {label}: {len(chosen)} rounds after one warm-up")
        print(f"    {'':20}{'median':>10}{'max':>10}")
        for name, value in _COLUMNS:
            values = [value(r) for r in chosen]
            worst = min(values) if name == "GB/s" else max(values)
            print(f"    {name:20}{statistics.median(values):>10.3f}{worst:>10.3f}")
        first = next(r for r in rounds if r.connector == label and r.warm_up)
        print(f"    warm-up round (handshake, every byte compared): all arrived after {first.arrival_all:.1f}")
        print(f"    wrong pages {_wrong(rounds, label)}, requests without their answer {_lost(rounds, label)}")


def _by_connector(rounds: Sequence[Round]) -> dict[str, list[Round]]:
    labels = dict.fromkeys(r.connector for r in rounds)
    return {label: [r for r in rounds if r.connector == label and not r.warm_up] for label in labels}


def _wrong(rounds: Sequence[Round], label: str) -> int:
    return sum(r.mismatched_pages for r in rounds if r.connector == label)


def _lost(rounds: Sequence[Round], label: str) -> int:
    return sum(r.failures for r in rounds if r.connector == label)


def print_dead(runs: Sequence[DeadRun]) -> None:
    """Seconds until a healthy engine's request had ended, per connector and number of dead engines."""
    print("\nA healthy prefill engine's request behind requests for dead ones (half closed ports, half silent).")
    print(f"    {'connector':12}{'dead':>6}{'seconds':>10}  outcome")
    for run in runs:
        verdict = f"{run.finish}, {'received' if run.received else 'not received'}, wrong pages {run.mismatched_pages}"
        print(f"    {run.connector:12}{run.dead:>6}{run.healthy_seconds:>10.3f}  {verdict}")


def verdicts(rounds: Sequence[Round], runs: Sequence[DeadRun]) -> list[tuple[str, bool]]:
    """What was promised, and whether it holds, as far as it was measured."""
    checks = [
        (f"{label}: every request answered, every byte right", not _wrong(rounds, label) and not _lost(rounds, label))
        for label in _by_connector(rounds)
    ]
    by_connector = _by_connector(rounds)
    if by_connector.keys() == {BUILTIN.label, OURS.label}:
        theirs, ours = by_connector[BUILTIN.label], by_connector[OURS.label]
        share = _ratio(ours, theirs, lambda r: r.thread_wall_per_request)
        late = _ratio(ours, theirs, lambda r: r.arrival_all)
        checks += [
            (f"engine thread: ours / built-in = 1/{1 / share:.0f}, at most 1/20", share <= THREAD_SHARE_LIMIT),
            (f"all arrived: ours / built-in = {late:.2f}, at most {ARRIVAL_RATIO_LIMIT}", late <= ARRIVAL_RATIO_LIMIT),
        ]
    for run in runs:
        if run.connector == OURS.label and run.dead == max(DEAD_COUNTS):
            fine = run.received and not run.mismatched_pages and run.healthy_seconds < HEALTHY_SECONDS_LIMIT
            checks.append((f"healthy behind {run.dead} dead: {run.healthy_seconds:.3f} s, under 0.5 s", fine))
    return checks


def _ratio(ours: Sequence[Round], theirs: Sequence[Round], value: Callable[[Round], float]) -> float:
    return statistics.median(map(value, ours)) / statistics.median(map(value, theirs))


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Measure, print, and say whether what was promised holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[BUILTIN.label, OURS.label], help="measure one connector")
    parser.add_argument("--part", choices=["thread", "dead"], help="measure one part")
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds per connector (default 8)")
    parser.add_argument("--json", type=Path, help="write every round and run to this file")
    arguments = parser.parse_args()
    choices = [choice for choice in (BUILTIN, OURS) if arguments.only in (None, choice.label)]
    rounds: list[Round] = []
    runs: list[DeadRun] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        if arguments.part != "dead":
            rounds = measure_rounds(choices, arguments.rounds, Path(directory))
        if arguments.part != "thread":
            runs = measure_dead(choices, Path(directory))
    if rounds:
        print_rounds(rounds)
    if runs:
        print_dead(runs)
    print("\nHow to read this, and what it does not show: tests/bench/README.md")
    if arguments.json is not None:
        machine = {"platform": platform.platform(), "python": platform.python_version()}
        report = {"machine": machine, "rounds": [asdict(r) for r in rounds], "dead": [asdict(r) for r in runs]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    checks = verdicts(rounds, runs)
    for text, holds in checks:
        print(f"  {'ok    ' if holds else 'BROKEN'} {text}")
    return 0 if all(holds for _, holds in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
