"""Stories as a file for https://ui.perfetto.dev: a track for each engine and rank, a slice for each state.

    engine (P before D)
      rank 0: leases, requests, holds    as many tracks of a kind as there were instances at a time
      rank 0: peers                      one for each

A flow leads from P's grant to D's READ and on to D's release and the end of P's lease. Times are those of the
processes' monotonic clocks, brought together by `connector/observe/clocks.py`. The format is written by the package
`perfetto`, which is an extra of this project.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from connector.clock import NS_PER_SECOND
from connector.observe.clocks import Clock
from connector.observe.history import History, Story
from connector.observe.spans import exported_ns
from connector.observe.traced import QUEUED
from statemachine import hold, lease, peer, request

if TYPE_CHECKING:
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

SEQUENCE_ID = 1
"""All packets are of one writer."""

_PLURAL = {
    lease.MACHINE.name: "leases",
    request.MACHINE.name: "requests",
    hold.MACHINE.name: "holds",
    peer.MACHINE.name: "peers",
}
_FLOW_STATES = frozenset(
    {
        (lease.MACHINE.name, lease.State.HELD.value),
        (lease.MACHINE.name, lease.State.DONE.value),
        (request.MACHINE.name, request.State.READING.value),
        (hold.MACHINE.name, hold.State.RELEASING.value),
    }
)
"""What a flow goes through: the grant, the READ, the release, and the end that it brings about."""

Place: TypeAlias = tuple[bool, str, int]
"""P first; engine id; rank."""


def export_perfetto(
    stories: Sequence[Story], histories: Iterable[History], clock_of: Mapping[int, Clock], path: Path
) -> int:
    """Write `path`; returns how many slices it has. Raises OSError, and ImportError without the package `perfetto`."""
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    with path.open("wb") as file:
        return _Export(StreamingTraceProtoBuilder(file), clock_of, _flows(stories)).run(histories)


def _flows(stories: Sequence[Story]) -> dict[int, list[int]]:
    """Ids of the flows through each history."""
    found: dict[int, list[int]] = {}
    for number, story in enumerate(stories, start=1):
        if story.requests and story.leases:
            for history in (*story.requests, *story.holds, *story.leases):
                found.setdefault(id(history), []).append(number)
    return found


class _Export:
    def __init__(
        self, builder: StreamingTraceProtoBuilder, clock_of: Mapping[int, Clock], flows: Mapping[int, list[int]]
    ) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2

        self._event = perfetto_trace_pb2.TrackEvent
        self._builder = builder
        self._clock_of = clock_of
        self._flows = flows
        self._tracks = 0
        self._slices = 0

    def run(self, histories: Iterable[History]) -> int:
        places: dict[Place, list[History]] = {}
        for history in histories:
            is_decode = history.machine != lease.MACHINE.name
            places.setdefault((is_decode, history.engine_id, history.rank), []).append(history)
        engines: dict[tuple[bool, str], int] = {}
        for (is_decode, engine_id, rank), found in sorted(places.items(), key=lambda each: each[0]):
            key = (is_decode, engine_id)
            if key not in engines:
                engines[key] = self._track(f"{'D' if is_decode else 'P'} {engine_id}", process=len(engines) + 1)
            for machine, plural in _PLURAL.items():
                self._lay_out(
                    f"rank {rank}: {plural}", [each for each in found if each.machine == machine], engines[key]
                )
        return self._slices

    def _lay_out(self, name: str, histories: list[History], parent: int) -> None:
        """Instances that overlap get tracks of their own, as few as possible."""
        free: list[tuple[int, int]] = []
        for history in sorted(histories, key=self._begin_ns):
            begin_ns, end_ns = self._begin_ns(history), self._at(history, history.records[-1].mono_ns)
            if free and free[0][0] <= begin_ns:
                _, track = heapq.heappop(free)
            else:
                track = self._track(name, parent=parent)
            heapq.heappush(free, (end_ns + 1, track))
            self._draw(history, track, begin_ns)

    def _draw(self, history: History, track: int, begin_ns: int) -> None:
        entered = [(visit, self._at(history, visit.entered_ns)) for visit in history.visits]
        if begin_ns < entered[0][1]:
            self._begin(track, begin_ns, QUEUED, history, [], notes={})
            self._end(track, entered[0][1])
        for number, (visit, at_ns) in enumerate(entered):
            is_flow = (history.machine, visit.state) in _FLOW_STATES
            flows = self._flows.get(id(history), []) if is_flow else []
            notes: dict[str, str | None] = {"event": visit.event, "reason": visit.reason, "detail": visit.detail}
            if visit.seconds is not None:
                self._begin(track, at_ns, visit.state, history, flows, notes=notes)
                self._end(track, entered[number + 1][1])
            else:
                name = f"{visit.state} ({visit.reason})" if visit.reason else visit.state
                self._begin(track, at_ns, name, history, flows, notes=notes, is_instant=True)

    def _clock(self, history: History) -> Clock | None:
        return self._clock_of.get(id(history))

    def _at(self, history: History, mono_ns: int) -> int:
        clock = self._clock(history)
        if clock is not None:
            return clock.at(mono_ns)
        first = history.records[0]  # a peer is in no story
        return round(first.wall * NS_PER_SECOND) - first.mono_ns + mono_ns

    def _begin_ns(self, history: History) -> int:
        queued_ns = round((history.queued_seconds or 0.0) * NS_PER_SECOND)
        return self._at(history, history.records[0].mono_ns) - queued_ns

    def _track(self, name: str, *, process: int | None = None, parent: int | None = None) -> int:
        self._tracks += 1
        packet = self._builder.create_packet()
        packet.track_descriptor.uuid = self._tracks
        if process is not None:
            packet.track_descriptor.process.pid = process
            packet.track_descriptor.process.process_name = name
        else:
            assert parent is not None
            packet.track_descriptor.name = name
            packet.track_descriptor.parent_uuid = parent
        self._builder.write_packet(packet)
        return self._tracks

    def _begin(
        self,
        track: int,
        at_ns: int,
        name: str,
        history: History,
        flows: Sequence[int],
        *,
        notes: Mapping[str, str | None],
        is_instant: bool = False,
    ) -> None:
        packet = self._builder.create_packet()
        packet.timestamp = exported_ns(at_ns)
        packet.trusted_packet_sequence_id = SEQUENCE_ID
        event = packet.track_event
        event.type = self._event.TYPE_INSTANT if is_instant else self._event.TYPE_SLICE_BEGIN
        event.track_uuid = track
        event.name = name
        event.categories.append(history.machine)
        event.flow_ids.extend(flows)
        known = {"subject": history.subject, "peer": history.peer, "on P": history.remote_request_id} | dict(notes)
        for key, value in known.items():
            if value is not None:
                annotation = event.debug_annotations.add()
                annotation.name, annotation.string_value = key, value
        self._builder.write_packet(packet)
        self._slices += 1

    def _end(self, track: int, at_ns: int) -> None:
        packet = self._builder.create_packet()
        packet.timestamp = exported_ns(at_ns)
        packet.trusted_packet_sequence_id = SEQUENCE_ID
        packet.track_event.type = self._event.TYPE_SLICE_END
        packet.track_event.track_uuid = track
        self._builder.write_packet(packet)
