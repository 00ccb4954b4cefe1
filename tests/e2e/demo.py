"""`make demo`: KV moves between two real vLLM engines, and every answer is compared.

A prefill engine and a decode engine with this project's connector are started on loopback ports, a dozen prompts go
through both, and each answer is compared, token by token, with what the decode engine computes on its own. Then a
table shows the path of every request through the states of its machines, as the engines traced it, and the same is
written as a timeline page.

Exit status: 0 when every answer is right and every path is the plain one, 1 when not, 130 when interrupted. Everything
that was started is ended in each case.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from shlex import quote
from types import FrameType

from connector.observe.history import Story, histories, matching, stories
from connector.tools.summary import slow
from connector.tools.timeline.export import EXPLAIN, export_html
from connector.tools.trace_reader import read_trace
from tests.e2e.client import Answer, PrefillDecode
from tests.e2e.engines import BLOCK_SIZE_TOKENS, ROOT, Engine, EngineFailed, EngineOptions, EngineSet
from tests.e2e.tiny_model import tiny_llama
from tests.e2e.trace_table import Row, render

RUNS = ROOT / "traces"
TIMELINE = "timeline.html"
SETTLE_SECONDS = 10.0
"""How long after the last answer every lease must have ended: P hears of a finished read at its next poll."""

INTERRUPTED = 130

TEXT = (
    "A prefill engine computes the keys and values of a prompt once and keeps the blocks under a lease. "
    "A decode engine shakes hands with it, reads the blocks straight into its own paged cache, says so, and goes on "
    "from there token by token. Whatever can happen on the way has a name and a place in a table. "
)


@dataclass(frozen=True)
class Prompt:
    """One request of the demo. Prompts of the same wave are sent at the same time."""

    request_id: str
    kind: str
    text: str
    wave: int


def prompts() -> list[Prompt]:
    """A dozen prompts; one token is one byte."""
    block = BLOCK_SIZE_TOKENS
    prefix = _text(10, 3 * block)
    alone = [
        ("shorter than a block", _text(1, block - 12)),
        ("exactly one block", _text(2, block)),
        ("one token more", _text(3, block + 1)),
        ("several blocks", _text(4, 7 * block + 5)),
        ("common prefix, first", prefix + _text(5, 60)),
        ("common prefix, second", prefix + _text(6, 90)),
        ("long", _text(7, 2000)),
    ]
    together = [(f"one of five at once, {number}", _text(20 + number, 130 * number)) for number in range(1, 6)]
    waves = [(kind, text, wave) for wave, (kind, text) in enumerate(alone)]
    waves += [(kind, text, len(alone)) for kind, text in together]
    return [Prompt(f"demo-{n:02}", kind, text, wave) for n, (kind, text, wave) in enumerate(waves, start=1)]


def _text(which: int, tokens: int) -> str:
    """Text of `tokens` bytes that shares no first block with that of another `which`."""
    return (f"{which}. " + TEXT * (tokens // len(TEXT) + 1))[:tokens]


class StartReport:
    """Says every few seconds how far the engines have come."""

    INTERVAL_SECONDS = 5.0

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._next_seconds = self.INTERVAL_SECONDS

    def __call__(self, engines: Sequence[Engine], seconds: float) -> None:
        if seconds >= self._next_seconds:
            self._next_seconds = seconds + self.INTERVAL_SECONDS
            self._say("  " + "; ".join(f"{engine.name}: {engine.start_phase()}" for engine in engines))


class Demo:
    """One run, with a folder of its own for traces and logs."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.directory = RUNS / time.strftime("demo-%Y%m%d-%H%M%S")
        self.logs = self.directory / "logs"

    def say(self, text: str) -> None:
        print(f"demo [{time.monotonic() - self._started:4.0f} s] {text}", flush=True)

    def run(self) -> bool:
        """True when every answer is right and every path is the plain one."""
        self.say("a Llama of 4 layers with random weights, made here, nothing downloaded")
        model = tiny_llama()
        options = [
            EngineOptions(
                name=name, model=model, logs=self.logs, core=core, trace_directory=self.directory, forks=False
            )
            for core, name in enumerate(("prefill", "decode"))
        ]
        with EngineSet() as engines:
            self.say("starting a prefill engine (P) and a decode engine (D), up to a minute")
            prefill, decode = engines.start(*options, progress=StartReport(self.say))
            self.say(f"both are up: P on port {prefill.options.http_port}, D on port {decode.options.http_port}")
            with PrefillDecode(prefill, decode) as service:
                outcomes = self._ask(service)
            rows = self._rows_with_paths(outcomes)
            self.say("stopping both engines")
        return self._report(rows)

    def _ask(self, service: PrefillDecode) -> list[Outcome]:
        """All prompts through P and D, wave by wave, each then by D alone."""
        outcomes = []
        for _, group in groupby(prompts(), key=lambda prompt: prompt.wave):
            wave = list(group)
            answers = service.pd_concurrently({prompt.request_id: prompt.text for prompt in wave})
            for prompt in wave:
                outcome = Outcome(prompt, answers[prompt.request_id], service.alone(prompt.text))
                self.say(f"  {prompt.request_id} {prompt.kind}: {outcome.verdict}")
                outcomes.append(outcome)
        return outcomes

    def _rows_with_paths(self, outcomes: Sequence[Outcome]) -> list[Row]:
        """The table's rows, once the traces say that everything ended or the time for it is up."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            rows = rows_from(outcomes, self.directory)
            if all(row.settled for row in rows) or time.monotonic() > deadline:
                return rows
            time.sleep(0.2)

    def _report(self, rows: Sequence[Row]) -> bool:
        print(f"\n{render(rows)}\n")
        problems = [f"{row.request_id}: {problem}" for row in rows for problem in row.problems]
        for problem in problems:
            print(f"WRONG  {problem}")
        right = sum(row.right for row in rows)
        plain = sum(not row.path_problems for row in rows)
        print(f"answers equal to D's own: {right} of {len(rows)}; plain paths on both sides: {plain} of {len(rows)}")
        print(f"traces: {self.directory}   engine logs: {self.logs}")
        report_timeline(self.directory)
        return not problems


@dataclass(frozen=True)
class Outcome:
    """What came back for one prompt, through P and D and from D alone."""

    prompt: Prompt
    answer: Answer
    alone: Answer

    @property
    def right(self) -> bool:
        return self.answer.ok and self.alone.ok and self.answer.token_ids == self.alone.token_ids

    @property
    def verdict(self) -> str:
        if not self.answer.ok:
            return f"failed (status {self.answer.status}, {self.answer.finish_reason or self.answer.error[:60]})"
        return "equal" if self.right else "DIFFERENT"


def rows_from(outcomes: Sequence[Outcome], traces: Path) -> list[Row]:
    """One row per prompt, joined with what the traces in the folder say so far."""
    told = stories(histories(read_trace(traces)))
    rows = []
    for outcome in outcomes:
        story = next(iter(matching(told, outcome.prompt.request_id)), Story())
        rows.append(
            Row(
                request_id=outcome.prompt.request_id,
                kind=outcome.prompt.kind,
                prompt_tokens=outcome.alone.prompt_tokens,
                verdict=outcome.verdict,
                right=outcome.right,
                request=next(iter(story.requests), None),
                lease=next(iter(story.leases), None),
            )
        )
    return rows


def report_timeline(traces: Path) -> None:
    """Write the page beside the traces; print where it is, and the command that explains the slowest request."""
    told = stories(histories(read_trace(traces)))
    page = traces / TIMELINE
    export_html(told, page, title=f"make demo, {traces.name.removeprefix('demo-')}")
    print(f"timeline: {page}")
    for slowest in slow(told, 1):
        command = EXPLAIN.replace("REQUEST", quote(slowest.request_id)).replace("DIRECTORY", quote(str(traces)))
        # The one of this environment, which is not activated where `make demo` was called.
        command = os.path.join(quote(os.path.relpath(Path(sys.executable).parent)), command)
        print(f"the slowest request took {slowest.seconds * 1e3:.0f} ms; what it waited for: {command}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """The exit status."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    demo = Demo()
    try:
        return 0 if demo.run() else 1
    except EngineFailed as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ndemo interrupted, everything it started has been ended; logs: {demo.logs}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
