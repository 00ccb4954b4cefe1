"""What a request went through as OpenTelemetry spans: names, times and attributes, without OpenTelemetry.

The same spans are made while an engine runs (`connector/scheduler/request_spans.py`) and from a trace
(`nixl-actor trace export --otlp`). One span for the request, `kv_transfer`, and one below it for each part of its time:

    kv_transfer.arrival   vLLM's front end had it, before the scheduler of D heard of it       only while an engine runs
    kv_transfer.queued    it waited in D's queue; P was asked to keep its blocks meanwhile
    kv_transfer.peer      its blocks were allocated, and D waited for the connection to P
    kv_transfer.read      READs
    kv_transfer.proof     all bytes were here, and P was asked whether it had kept the blocks until then
    kv_transfer.drain     it had failed, and READs that had begun were waited for
    kv_transfer.landing   blocks were put in order on the device                               only while an engine runs
    kv_transfer.reported  vLLM was told, and computed the request's first token                only while an engine runs

Attributes follow vLLM's (`gen_ai.*`) where it has one, and are under `kv_transfer.` where it has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from connector.clock import NS_PER_SECOND
from connector.observe.history import History, Visit
from connector.observe.traced import QUEUED
from statemachine import request

REQUEST_SPAN = "kv_transfer"
ARRIVAL, LANDING, REPORTED = "arrival", "landing", "reported"

PART_OF_STATE = {
    request.State.PENDING_HANDSHAKE.value: "peer",
    request.State.READING.value: "read",
    request.State.PROVING.value: "proof",
    request.State.DRAINING.value: "drain",
}
"""Which part of a request's time a state of its machine is."""

Attribute = str | int | float | bool


UNIX_NS_MAX = 2**63 - 1


def exported_ns(unix_ns: int) -> int:
    """The time as the formats of other tools can have it. A clock that was never set shows one before 1970 once what
    was waited for is taken from it, and a trace that was damaged may have any."""
    return min(max(unix_ns, 0), UNIX_NS_MAX)


def makes_spans(vllm_config: Any) -> bool:
    """Whether this engine was started with an endpoint for spans (`--otlp-traces-endpoint`)."""
    return vllm_config.observability_config.otlp_traces_endpoint is not None


class Part(msgspec.Struct, frozen=True):
    """A part of a request's time. Unix time in nanoseconds."""

    name: str
    start_ns: int
    end_ns: int


class PullTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of D knows of a request that it has read, or failed to.

    Attributes:
        parts: one after another, without gaps.
        outcome: one of `history.OUTCOMES`, but never open.
        reason, detail: of a failure, its kind and its text.
        retries: attempts after the first.
    """

    request_id: str
    rank: int
    peer: str | None
    remote_request_id: str | None
    parts: tuple[Part, ...]
    outcome: str
    reason: str | None = None
    detail: str | None = None
    blocks: int = 0
    bytes: int = 0
    descriptors: int = 0
    retries: int = 0

    @property
    def start_ns(self) -> int:
        return self.parts[0].start_ns

    @property
    def end_ns(self) -> int:
        return self.parts[-1].end_ns

    @property
    def whole_seconds(self) -> float:
        """From when D's scheduler heard of it to its end."""
        return (self.end_ns - self.start_ns) / NS_PER_SECOND

    def attributes(self) -> dict[str, Attribute]:
        """The attributes of the request's span, by name."""
        found: dict[str, Attribute | None] = {
            "gen_ai.request.id": self.request_id,
            "kv_transfer.remote.engine_id": self.peer,
            "kv_transfer.remote.request_id": self.remote_request_id,
            "kv_transfer.outcome": self.outcome,
            "kv_transfer.blocks": self.blocks,
            "kv_transfer.bytes": self.bytes,
            "kv_transfer.descriptors": self.descriptors,
            "kv_transfer.retries": self.retries,
            "kv_transfer.rank": self.rank,
            "error.type": self.reason,
        }
        found |= {f"kv_transfer.latency.{name}": seconds for name, seconds in self.seconds().items()}
        return {name: value for name, value in found.items() if value is not None}

    def seconds(self) -> dict[str, float]:
        """By part; a part that came again counts together."""
        found: dict[str, float] = {}
        for part in self.parts:
            found[part.name] = found.get(part.name, 0.0) + (part.end_ns - part.start_ns) / NS_PER_SECOND
        return found


def times_of(history: History, zero_ns: int | None = None) -> PullTimes | None:
    """The times of a request on one rank of D; None while it is not over.

    `zero_ns`: Unix time at which the clock of its process shows 0; by default as its first record says.
    """
    if not history.is_over:
        return None
    first, last = history.records[0], history.records[-1]
    if zero_ns is None:
        zero_ns = round(first.wall * NS_PER_SECOND) - first.mono_ns
    heard_ns = first.mono_ns - round((history.queued_seconds or 0.0) * NS_PER_SECOND)
    parts = [Part(QUEUED, zero_ns + heard_ns, zero_ns + first.mono_ns)]
    parts += _parts_of_states(history.visits, zero_ns)
    states = [visit.state for visit in history.visits]
    return PullTimes(
        request_id=history.subject,
        rank=history.rank,
        peer=history.peer,
        remote_request_id=history.remote_request_id,
        parts=tuple(parts),
        outcome=history.outcome,
        reason=history.reason,
        detail=last.detail,
        blocks=history.blocks,
        bytes=history.length_bytes,
        descriptors=max(record.descriptors or 0 for record in history.records),
        # Where the beginning was not recorded there may be no attempt at all.
        retries=max(0, states.count(request.State.PENDING_HANDSHAKE.value) - 1),
    )


def _parts_of_states(visits: Sequence[Visit], zero_ns: int) -> list[Part]:
    # A state that a later version has made, or one of a record in disorder, is a part by its own name.
    return [
        Part(PART_OF_STATE.get(visit.state, visit.state), zero_ns + visit.entered_ns, zero_ns + following.entered_ns)
        for visit, following in itertools.pairwise(visits)
    ]
