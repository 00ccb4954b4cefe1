"""Two pairs of engines beside each other: one with vLLM's own connector, one with ours, in turns.

Whoever is not measured is stopped (SIGSTOP): the built-in connector's progress threads keep a core busy for each engine
even when it is idle, and two pairs would disturb each other. Nothing is called but `KVConnectorBase_V1`, by vLLM's own
engine core (tests/rig).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rig import (
    BUILTIN,
    OURS,
    Check,
    ConnectorChoice,
    EngineRig,
    RequestOutcome,
    RequestSpec,
    engine_pair,
    expected_output,
    prompt,
)

CHOICES = (BUILTIN, OURS)


class WrongResult(Exception):
    """A request was not answered, or with wrong bytes: its time means nothing."""


@dataclass(frozen=True)
class Transferred:
    """What it took to bring the KV of some requests to D, handed over before one step."""

    done_ms: list[float]
    """Of each request; see `done_ms`."""
    engine_thread_ms: float
    """Wall time on D's engine thread inside `start_load_kv` and `get_transfer_results`, idle polls included."""
    longest_stall_ms: float
    """The most that one step spent in the two."""
    cpu_seconds: float
    """Of all threads of D, forward passes included."""


@dataclass(frozen=True)
class Side:
    """One connector's two engines."""

    label: str
    prefill: EngineRig
    decode: EngineRig

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        for engine in (self.prefill, self.decode):
            engine.thaw()
        try:
            yield
        finally:
            for engine in (self.prefill, self.decode):
                engine.freeze()

    def prefill_all(self, names: Sequence[str], tokens: int) -> list[RequestSpec]:
        """Compute so many prompts on P; what D has to be given."""
        prompts = {name: prompt(f"{self.label}-{name}", tokens) for name in names}
        params = self.prefill.prefill_all(prompts)
        return [RequestSpec(name, ids, 1, params[name], Check.EDGES) for name, ids in prompts.items()]

    def transfer(self, names: Sequence[str], tokens: int) -> Transferred:
        """Compute so many prompts on P, hand all of them to D before one step, and wait for all.

        Raises:
            WrongResult: see `require_right`.
        """
        requests = self.prefill_all(names, tokens)
        before = self.decode.snapshot(reset_times=True)
        self.decode.submit(*requests)
        outcomes = self.wait_right(requests)
        after = self.decode.snapshot()
        return Transferred(
            done_ms=done_ms(outcomes),
            engine_thread_ms=(after.start_load_kv.wall_ns + after.get_transfer_results.wall_ns) / 1e6,
            longest_stall_ms=after.step_wall_ns_max / 1e6,
            cpu_seconds=after.cpu_seconds - before.cpu_seconds,
        )

    def wait_right(self, requests: Sequence[RequestSpec]) -> list[RequestOutcome]:
        """Wait for all of them on D.

        Raises:
            WrongResult: see `require_right`.
        """
        outcomes = self.decode.wait_all([request.request_id for request in requests])
        for request, outcome in zip(requests, outcomes, strict=True):
            self.require_right(outcome, request.prompt_token_ids)
        return outcomes

    def arrange_free_blocks(self, shuffle_seed: int | None) -> None:
        """Of both engines; see `EngineRig.arrange_free_blocks`."""
        for engine in (self.prefill, self.decode):
            engine.arrange_free_blocks(shuffle_seed)

    def require_right(self, outcome: RequestOutcome, prompt_token_ids: list[int]) -> None:
        """Raises WrongResult: it was not loaded, has a wrong page, or a wrong answer."""
        is_answered = outcome.output_token_ids == expected_output(prompt_token_ids, 1)
        if not (outcome.received and is_answered) or outcome.mismatched_pages:
            raise WrongResult(f"{self.label}: {outcome}")


@contextlib.contextmanager
def side(choice: ConnectorChoice, directory: Path, **options: Any) -> Iterator[Side]:
    """One pair; awake. Takes what `engine_pair` takes."""
    with engine_pair(choice, directory, **options) as (prefill, decode):
        yield Side(choice.label, prefill, decode)


@contextlib.contextmanager
def both_sides(directory: Path, **options: Any) -> Iterator[list[Side]]:
    """Both pairs, asleep."""
    with ExitStack() as stack:
        sides = []
        for choice in CHOICES:
            (own := directory / choice.label).mkdir()
            started = stack.enter_context(side(choice, own, **options))
            stack.callback(started.prefill.thaw)  # a stopped process cannot end in an orderly way
            stack.callback(started.decode.thaw)
            started.prefill.freeze()
            started.decode.freeze()
            sides.append(started)
        yield sides


def done_ms(outcomes: list[RequestOutcome]) -> list[float]:
    """From entry into `start_load_kv` until the report, in order of size."""
    return sorted(((each.received_ns or 0) - (each.load_started_ns or 0)) / 1e6 for each in outcomes)
