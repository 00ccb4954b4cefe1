"""OpenTelemetry spans of requests that read KV, below the span that their callers have sent along.

Only where vLLM traces (`--otlp-traces-endpoint`). What a request went through on a rank is known in the worker
(`connector/worker/pull_timer.py`) and comes with its report; whose child the span is, when the request arrived and when
it had its first token is known here. So spans are made here, when the first token is there or the request has ended,
with the times that they have had; of several ranks, those of the one that decides. vLLM's own span of the
request, `llm_request`, is made by its front end when the request ends and has a name of its own making: a child of the
same parent is as near to it as a span can be. Exporting is the business of the tracer that vLLM has set up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from vllm.tracing import extract_trace_context

from connector.clock import NS_PER_SECOND
from connector.observe.history import deciding_rank
from connector.observe.log import CrashCount
from connector.observe.spans import ARRIVAL, REPORTED, Attribute, Part, PullTimes, makes_spans
from connector.observe.traced import QUEUED

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def request_spans(vllm_config: VllmConfig) -> RequestSpans | None:
    """None where vLLM does not trace."""
    if not makes_spans(vllm_config):
        return None
    from opentelemetry.trace import get_tracer

    from connector.observe.otlp import TRACER

    return RequestSpans(get_tracer(TRACER))


@dataclass
class _Open:
    """A request whose span has not been made.

    Attributes:
        heard_ns: when the scheduler heard of it. Unix time, as all times here.
        told: whether vLLM knows that its KV is here, or does not come.
        ended_ns: when it ended; None while it is there.
    """

    request: Request
    heard_ns: int
    pulls: list[PullTimes] = field(default_factory=list)
    told: bool = False
    ended_ns: int | None = None


class RequestSpans:
    """See the module's docstring. On the scheduler's thread; what the tracer raises ends here."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry.context import Context

        from connector.observe.otlp import record_spans

        self._tracer = tracer
        self._no_context = Context()
        self._record = record_spans
        self._crashes = CrashCount()
        self._open: dict[str, _Open] = {}
        # Of these, those whose KV is here and that have no token yet.
        self._computing: dict[str, _Open] = {}

    def hear(self, request: Request) -> None:
        """The scheduler hears of a request whose KV is to be read."""
        self._open[request.request_id] = _Open(request, time.time_ns())

    def forget(self, request_id: str) -> None:
        """Nothing is read for it."""
        self._open.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """The request has ended. What the worker says of it may still be on its way."""
        found = self._open.get(request_id)
        if found is None:
            return
        found.ended_ns = time.time_ns()
        if found.told:
            self._make(request_id, found, found.ended_ns)

    def report(self, pulls: Iterable[PullTimes], told: Iterable[str]) -> None:
        """What workers say of requests, and those of which vLLM is now told that all ranks have ended."""
        for times in pulls:
            if (found := self._open.get(times.request_id)) is not None:
                found.pulls.append(times)
        for request_id in told:
            if (found := self._open.get(request_id)) is None:
                continue
            found.told = True
            if found.ended_ns is not None:
                self._make(request_id, found, found.ended_ns)
            else:
                self._computing[request_id] = found

    def step(self) -> None:
        """Before a step: requests may have had their first token in the one before."""
        if not self._computing:
            return
        now_ns = time.time_ns()
        for request_id, found in list(self._computing.items()):
            if found.request.num_output_tokens:
                self._make(request_id, found, now_ns)

    def _make(self, request_id: str, found: _Open, end_ns: int) -> None:
        del self._open[request_id]
        self._computing.pop(request_id, None)
        if not found.pulls:
            return  # its worker's actors are dead
        try:
            self._write(found, end_ns)
        except Exception as error:  # of a tracer that somebody has set up; a span is not worth a step
            self._crashes.note("span of a request", error)

    def _write(self, found: _Open, end_ns: int) -> None:
        times = deciding_rank(found.pulls)
        arrived_ns = min(round(found.request.arrival_time * NS_PER_SECOND), found.heard_ns)
        parts = [Part(ARRIVAL, arrived_ns, found.heard_ns)]
        for part in times.parts:
            # The worker knows how long it was held, and not when: on its way to the worker it waited too.
            start_ns = found.heard_ns if part.name == QUEUED else part.start_ns
            parts.append(Part(part.name, start_ns, max(start_ns, part.end_ns)))
        parts.append(Part(REPORTED, parts[-1].end_ns, max(parts[-1].end_ns, end_ns)))
        more: dict[str, Attribute] = {
            "gen_ai.usage.prompt_tokens": found.request.num_prompt_tokens,
            "kv_transfer.ranks": len(found.pulls),
        }
        context = extract_trace_context(found.request.trace_headers) or self._no_context
        self._record(self._tracer, msgspec.structs.replace(times, parts=tuple(parts)), context, more)
