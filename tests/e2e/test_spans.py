"""Spans of requests between two real engines that trace: whose children they are, and what they say."""

from __future__ import annotations

from itertools import pairwise

import httpx
import pytest

from connector.observe.traced import QUEUED
from tests.e2e.tiny_model import KV_BYTES_PER_TOKEN
from tests.e2e.traced import TOKENS, Traced
from tests.rig.network import dead_params, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]


def test_a_request_has_a_span_beside_vllm_s_with_a_part_for_each_thing_it_waited_for(traced: Traced) -> None:
    traced.spans_of(traced.ask("first-meeting"))
    asked = traced.ask("plain")
    assert asked.status == httpx.codes.OK
    spans = traced.spans_of(asked)
    assert spans.root.parent_span_id == spans.vllm.parent_span_id == asked.span_id
    names = [part.name.removeprefix("kv_transfer.") for part in spans.parts]
    assert [name for name in names if name != "proof"] == ["arrival", QUEUED, "peer", "read", "landing", "reported"]
    assert (spans.parts[0].start_ns, spans.parts[-1].end_ns) == (spans.root.start_ns, spans.root.end_ns)
    assert all(part.end_ns == following.start_ns for part, following in pairwise(spans.parts))
    attributes = spans.root.attributes
    assert attributes["gen_ai.request.id"].startswith("cmpl-plain-")
    assert attributes["gen_ai.usage.prompt_tokens"] == TOKENS == spans.vllm.attributes["gen_ai.usage.prompt_tokens"]
    assert attributes["kv_transfer.outcome"] == "done"
    assert attributes["kv_transfer.bytes"] >= (TOKENS - 16) * KV_BYTES_PER_TOKEN
    assert attributes["kv_transfer.remote.request_id"].startswith("cmpl-plain-")
    assert "error.type" not in attributes
    assert "vllm.instrumenting_module_name" in spans.root.resource


def test_a_request_that_fails_has_its_kind_as_the_error(traced: Traced) -> None:
    asked = traced.decoded("fails", dead_params(free_port(), 10))
    spans = traced.spans_of(asked)
    assert spans.root.attributes["error.type"] == "ConnectionRefused"
    assert spans.root.attributes["kv_transfer.outcome"] == "failed"
    assert spans.root.status == 2  # error
