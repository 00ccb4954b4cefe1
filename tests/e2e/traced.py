"""Two real engines that send spans of requests, to a collector that speaks OTLP."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from connector.observe.traced import QUEUED
from tests.e2e.client import ANSWER_TOKENS, PrefillDecode
from tests.e2e.cluster import HANDSHAKE_TIMEOUT_SECONDS, prompt, wait_for
from tests.e2e.engines import LOOPBACK, EngineOptions, EngineSet
from tests.e2e.tiny_model import tiny_llama
from tests.rig.otlp_collector import HttpCollector, ReceivedSpan

TOKENS = 300
EXPORT_MILLISECONDS = 200
PARTS = ["arrival", QUEUED, "peer", "read", "proof", "drain", "landing", "reported"]


class Traced:
    """A producer and a consumer that send spans, and who takes them."""

    def __init__(self, directory: Path) -> None:
        self.collector = HttpCollector()
        common: dict[str, Any] = {
            "model": tiny_llama(),
            "logs": directory,
            "context_tokens": 4096,
            "extra_config": {"handshake_timeout_seconds": HANDSHAKE_TIMEOUT_SECONDS},
            "arguments": ("--otlp-traces-endpoint", self.collector.endpoint),
            "environment": {
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": self.collector.protocol,
                "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_MILLISECONDS),
            },
        }
        self._engines = EngineSet()
        self.prefill, self.decode = self._engines.start(
            EngineOptions(name="traced-prefill", kv_role="kv_producer", core=0, **common),
            EngineOptions(name="traced-decode", kv_role="kv_consumer", core=1, **common),
        )
        self.service = PrefillDecode(self.prefill, self.decode)

    def decoded(self, key: str, params: Any, tokens: int = TOKENS) -> Asked:
        """D's answer, asked for below a span of ours."""
        trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
        response = httpx.post(
            f"http://{LOOPBACK}:{self.decode.options.http_port}/v1/completions",
            json={
                "model": "tiny",
                "prompt": prompt(tokens, key),
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "kv_transfer_params": params,
            },
            headers={"X-Request-Id": key, "traceparent": f"00-{trace_id}-{span_id}-01"},
            timeout=120,
        )
        return Asked(response.status_code, trace_id, span_id)

    def ask(self, key: str, tokens: int = TOKENS) -> Asked:
        return self.decoded(key, self.service.prefill(prompt(tokens, key), key).kv_transfer_params, tokens)

    def spans_of(self, asked: Asked) -> Spans:
        """Those of D that belong to this call, once all have come."""

        def found() -> Spans | None:
            of_trace = [span for span in list(self.collector.spans) if span.trace_id == asked.trace_id]
            by_name = {span.name: span for span in of_trace if span.parent_span_id == asked.span_id}
            if not {"kv_transfer", "llm_request"} <= set(by_name):
                return None
            root = by_name["kv_transfer"]
            parts = sorted(
                (span for span in of_trace if span.parent_span_id == root.span_id),
                key=lambda span: (span.start_ns, PARTS.index(span.name.removeprefix("kv_transfer."))),
            )
            return Spans(by_name["llm_request"], root, parts)

        return wait_for(found, f"spans of {asked}")

    def close(self) -> None:
        self.service.close()
        self._engines.stop()
        self.collector.close()


@dataclass(frozen=True)
class Asked:
    status: int
    trace_id: str
    span_id: str


@dataclass(frozen=True)
class Spans:
    """vLLM's own of the request, ours, and its parts in order."""

    vllm: ReceivedSpan
    root: ReceivedSpan
    parts: list[ReceivedSpan]

    @property
    def to_first_seconds(self) -> float:
        """D's time to the first token, as vLLM's span has it."""
        return float(self.vllm.attributes["gen_ai.latency.time_to_first_token"])

    @property
    def explained_seconds(self) -> float:
        """How much of it lies in parts of ours."""
        begin_ns = self.vllm.start_ns
        end_ns = begin_ns + self.to_first_seconds * 1e9
        return sum(max(0, min(part.end_ns, end_ns) - max(part.start_ns, begin_ns)) for part in self.parts) / 1e9
