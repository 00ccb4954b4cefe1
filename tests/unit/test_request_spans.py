"""Spans that a running engine makes: from transition records on the ranks, and what its scheduler knows."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from connector.observe.log import CrashCount
from connector.observe.spans import Part, PullTimes
from connector.scheduler.request_spans import RequestSpans
from connector.worker.pull_timer import PullTimer
from statemachine.failures import DeviceMemoryExhausted
from tests.unit.hybrid_engine import HybridEngine, full
from tests.unit.traced_run import calm_run, faulty_run

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECOND = 1_000_000_000


class Made:
    """The spans that were made."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = RequestSpans(provider.get_tracer("test"))

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def roots(self) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == "kv_transfer"]


@pytest.fixture
def made() -> Made:
    return Made()


def a_request(name: str = "r", *, traced: bool = True) -> Request:
    request = Request(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        arrival_time=time.time() - 1.0,
    )
    if traced:
        request.trace_headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
    return request


def pull(name: str = "r", *, rank: int = 0, seconds: float = 0.5, **fields: Any) -> PullTimes:
    now_ns = time.time_ns()
    end_ns = now_ns + round(seconds * SECOND)
    middle_ns = (now_ns + end_ns) // 2
    parts = (Part("queued", now_ns, now_ns), Part("peer", now_ns, middle_ns), Part("read", middle_ns, end_ns))
    known = {"rank": rank, "peer": "P", "remote_request_id": "p", "parts": parts, "outcome": "done"} | fields
    return PullTimes(request_id=name, **known)


def test_the_span_is_made_with_the_first_token_below_the_caller_s(made: Made) -> None:
    request = a_request()
    made.spans.hear(request)
    made.spans.step()
    made.spans.report([pull()], ["r"])
    made.spans.step()
    assert made.all == ()
    request.append_output_token_ids(7)
    made.spans.step()
    (root,) = made.roots
    assert root.parent is not None
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    parts = [span for span in made.all if span is not root]
    assert [span.name for span in parts] == [
        f"kv_transfer.{name}" for name in ("arrival", "queued", "peer", "read", "reported")
    ]
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in parts)
    assert parts[0].start_time == round(request.arrival_time * SECOND)
    assert 0.9 * SECOND < parts[0].end_time - parts[0].start_time < 60 * SECOND
    made.spans.step()
    made.spans.end("r")
    assert len(made.roots) == 1


def test_without_a_caller_s_span_it_is_a_trace_of_its_own(made: Made) -> None:
    made.spans.hear(a_request(traced=False))
    made.spans.report([pull()], ["r"])
    made.spans.end("r")
    (root,) = made.roots
    assert root.parent is None


class BrokenTracer:
    """An exporter that somebody has set up, and that raises."""

    def start_span(self, *arguments: object, **named: object) -> object:
        raise ConnectionError("the collector is gone")


def test_a_tracer_that_raises_costs_no_step() -> None:
    spans = RequestSpans(BrokenTracer())  # type: ignore[arg-type]
    crashes: list[str] = []
    spans._crashes = CrashCount(lambda what, error: crashes.append(what))
    for number in range(5):
        request = a_request(f"r{number}")
        spans.hear(request)
        spans.report([pull(f"r{number}")], [f"r{number}"])
        request.append_output_token_ids(7)
        spans.step()
    assert spans._open == {}
    assert len(crashes) == 3  # the first, the second and the fourth


def test_of_several_ranks_the_one_that_was_waited_for_is_shown(made: Made) -> None:
    """They report when each is through, and vLLM is told when all are."""
    made.spans.hear(a_request())
    made.spans.report([pull(rank=1, seconds=0.1)], [])
    made.spans.end("r")
    assert made.all == ()
    made.spans.report([pull(rank=0, seconds=2.0)], ["r"])
    (root,) = made.roots
    assert root.attributes is not None
    assert (root.attributes["kv_transfer.rank"], root.attributes["kv_transfer.ranks"]) == (0, 2)


def test_a_rank_that_failed_decides(made: Made) -> None:
    made.spans.hear(a_request())
    failed = pull(rank=1, seconds=0.1, outcome="failed", reason="TransferError", detail="lost")
    made.spans.report([failed, pull(rank=0, seconds=2.0)], ["r"])
    made.spans.end("r")
    (root,) = made.roots
    assert root.attributes is not None
    assert root.attributes["error.type"] == "TransferError"
    assert not root.status.is_ok
    assert root.status.description == "lost"


def test_a_request_that_ends_before_its_worker_has_said_anything_still_has_its_span(made: Made) -> None:
    """As vLLM does under the policy `fail`, and when the client leaves."""
    made.spans.hear(a_request())
    made.spans.end("r")
    assert made.all == ()
    made.spans.report([pull(outcome="failed", reason="AbortedByClient")], ["r"])
    assert len(made.roots) == 1


def test_nothing_is_kept_of_who_reads_nothing_or_whose_worker_is_dead(made: Made) -> None:
    made.spans.hear(a_request("hit"))
    made.spans.forget("hit")
    made.spans.hear(a_request("lost"))
    made.spans.end("lost")
    made.spans.report([], ["lost"])
    made.spans.report([pull("stranger")], ["stranger"])
    made.spans.end("stranger")
    assert made.all == ()
    assert made.spans._open == made.spans._computing == {}


# --- on a rank ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [calm_run, faulty_run])
def test_what_a_rank_tells_is_what_it_traced(run: Any) -> None:
    timers: dict[tuple[str, int], PullTimer] = {}
    ended = []
    for record in run():
        timer = timers.setdefault((record.engine_id, record.rank), PullTimer())
        timer.write(record)
        if record.machine == "request" and record.to_state in ("done", "failed", "expired"):
            ended.append((timer, record))
    found = 0
    for timer, record in ended:
        times = timer.take(record.subject)
        if times is None:
            continue  # its id was used again, and the later one was taken
        found += 1
        assert times.outcome == ("aborted" if record.reason == "AbortedByClient" else record.to_state)
        assert times.reason == record.reason
        assert times.parts[0].name == "queued"
        assert all(part.start_ns <= part.end_ns for part in times.parts)
        assert (times.parts[-1].name == "landing") == (record.to_state == "done")
    assert found > len(ended) / 2


def test_a_rank_keeps_nothing_of_what_was_taken() -> None:
    timer = PullTimer()
    records = [each for each in calm_run() if each.machine == "request"]
    first = records[0]
    own = [
        each
        for each in records
        if (each.engine_id, each.rank, each.subject) == (first.engine_id, first.rank, first.subject)
    ]
    for record in own:
        timer.write(record)
    assert timer.take(first.subject) is not None
    assert timer.take(first.subject) is None
    assert timer._open == timer._ended == {}
    timer.write(msgspec.structs.replace(own[-1], from_state="reading"))  # of one whose beginning was not seen
    assert timer._open == timer._ended == {}


def test_one_that_was_read_and_could_not_be_finished_has_an_error() -> None:
    timer = PullTimer()
    done = next(each for each in calm_run() if each.machine == "request" and each.to_state == "done")
    own = ("request", done.engine_id, done.rank, done.subject)
    for record in calm_run():
        if (record.machine, record.engine_id, record.rank, record.subject) == own:
            timer.write(record)
    times = timer.take(done.subject, DeviceMemoryExhausted(error="CUDA out of memory"))
    assert times is not None
    assert (times.outcome, times.reason, times.parts[-1].name) == ("failed", "DeviceMemoryExhausted", "landing")
    assert times.attributes()["error.type"] == "DeviceMemoryExhausted"


# --- switched on and off --------------------------------------------------------------------------------------------


def test_without_vllm_s_tracing_no_span_is_made_and_nothing_is_kept() -> None:
    assert HybridEngine([full()]).scheduler.connector._scheduler._spans is None  # type: ignore[union-attr]
