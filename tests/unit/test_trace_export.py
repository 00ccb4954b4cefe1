"""Exports: what other tools are given is what happened; a collector is one that speaks OTLP over real connections."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from typer.testing import CliRunner

from connector.observe.history import histories, stories
from connector.observe.spans import times_of
from connector.tools.cli.main import app
from statemachine.trace import TransitionRecord
from tests.rig.otlp_collector import GrpcCollector, HttpCollector, ReceivedSpan, refused_endpoint
from tests.unit.test_history import PULLED, records
from tests.unit.traced_run import calm_run, faulty_run, write_run


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faulty")
    write_run(directory, faulty_run())
    return directory


@pytest.fixture(params=[GrpcCollector, HttpCollector], ids=["grpc", "http"])
def collector(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GrpcCollector | HttpCollector]:
    with request.param() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", made.protocol)
        yield made


def export(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["trace", "export", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


# --- OTLP -----------------------------------------------------------------------------------------------------------


def test_a_collector_gets_a_span_for_each_request_and_each_part_of_its_time(
    faulty: Path, collector: GrpcCollector | HttpCollector
) -> None:
    output = export(faulty, "--otlp", collector.endpoint)
    received = collector.spans
    assert f"{len(received)} spans sent" in output
    told = [each for each in stories(histories(faulty_run())) if each.requests and each.deciding.is_over]
    roots = [span for span in received if span.name == "kv_transfer"]
    assert Counter(span.attributes["gen_ai.request.id"] for span in roots) == Counter(
        story.requests[0].subject for story in told
    )
    assert {span.attributes["kv_transfer.outcome"] for span in roots} == {"done", "failed", "expired", "aborted"}
    below = {span.name for span in received if span.parent_span_id}
    assert {"kv_transfer.queued", "kv_transfer.peer", "kv_transfer.read", "kv_transfer.lease"} <= below
    for root in roots:
        children = [span for span in received if span.parent_span_id == root.span_id]
        assert {span.trace_id for span in children} == {root.trace_id}
        parts = sorted((span for span in children if span.name != "kv_transfer.lease"), key=lambda span: span.start_ns)
        assert (parts[0].start_ns, parts[-1].end_ns) == (root.start_ns, root.end_ns)
        assert all(part.end_ns == following.start_ns for part, following in itertools.pairwise(parts))
        is_error = root.status == Status.STATUS_CODE_ERROR
        assert is_error == ("error.type" in root.attributes) == (root.attributes["kv_transfer.outcome"] != "done")
    engines = {span.service_instance for span in received}
    assert engines >= {story.requests[0].engine_id for story in told}


def test_spans_that_are_sent_again_are_the_same(tmp_path: Path, collector: GrpcCollector | HttpCollector) -> None:
    write_run(tmp_path, calm_run())
    sent: list[list[ReceivedSpan]] = []
    for _ in range(2):
        export(tmp_path, "--otlp", collector.endpoint)
        sent.append(sorted(collector.spans, key=lambda span: (span.trace_id, span.span_id)))
        collector.spans.clear()
    assert sent[0] == sent[1] != []
    assert len({span.span_id for span in sent[0]}) == len(sent[0])


def test_a_collector_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    write_run(tmp_path, calm_run()[:300])
    assert "has not taken the spans" in export(tmp_path, "--otlp", refused_endpoint(), status=2)


def test_a_state_that_no_part_is_known_for_is_one_by_its_own_name() -> None:
    written = records("request", "D", "r", (*PULLED, ("done", "Moved", "elsewhere"), ("elsewhere", "X", "done")))
    (history,) = histories(written)
    found = times_of(history)
    assert found is not None
    assert [part.name for part in found.parts] == ["queued", "peer", "read", "done", "elsewhere"]
    assert all(before.end_ns == after.start_ns for before, after in itertools.pairwise(found.parts))


def test_nothing_to_export_to_is_an_error(faulty: Path) -> None:
    assert "name at least one" in export(faulty, status=2)


WALLS = [-1.7e9, -5.0, 1.7e18]
"""Of a clock that was never set, and of a damaged trace."""


def with_walls_from(wall: float) -> list[TransitionRecord]:
    first = calm_run()[0].wall
    return [msgspec.structs.replace(each, wall=each.wall - first + wall) for each in calm_run()[:300]]


@pytest.mark.parametrize("wall", WALLS)
def test_spans_of_times_that_no_collector_has_are_sent(
    tmp_path: Path, collector: GrpcCollector | HttpCollector, wall: float
) -> None:
    write_run(tmp_path, with_walls_from(wall))
    assert "spans sent" in export(tmp_path, "--otlp", collector.endpoint)
    assert collector.spans


# --- Perfetto -------------------------------------------------------------------------------------------------------


def test_perfetto_gets_a_slice_for_each_state_and_flows_from_grant_to_release(faulty: Path, tmp_path: Path) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    file = tmp_path / "trace.pftrace"
    export(faulty, "--perfetto", file)
    trace = protos.Trace()
    trace.ParseFromString(file.read_bytes())
    tracks = {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in trace.packet
        if packet.HasField("track_descriptor")
    }
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    told = histories(faulty_run())

    visits = Counter((each.machine, visit.state) for each in told for visit in each.visits if visit.seconds is not None)
    kind = protos.TrackEvent
    begun = [each.track_event for each in events if each.track_event.type == kind.TYPE_SLICE_BEGIN]
    assert Counter((each.categories[0], each.name) for each in begun if each.name != "queued") == visits

    processes = {each.process.process_name for each in tracks.values() if each.HasField("process")}
    assert processes == {f"{'P' if each.machine == 'lease' else 'D'} {each.engine_id}" for each in told}

    # On each track slices begin and end in turns, in the order of time: nothing overlaps.
    by_track: dict[int, list[tuple[int, int]]] = {}
    for each in events:
        by_track.setdefault(each.track_event.track_uuid, []).append((each.timestamp, each.track_event.type))
    assert set(by_track) <= set(tracks)
    for drawn in by_track.values():
        assert [at for at, _ in drawn] == sorted(at for at, _ in drawn)
        open_slices = 0
        for _, type_ in drawn:
            open_slices += {kind.TYPE_SLICE_BEGIN: 1, kind.TYPE_SLICE_END: -1}.get(type_, 0)
            assert open_slices in (0, 1)

    flows: dict[int, set[tuple[str, str]]] = {}
    for each in events:
        for flow in each.track_event.flow_ids:
            flows.setdefault(flow, set()).add((each.track_event.categories[0], each.track_event.name))
    whole = {("lease", "held"), ("request", "reading"), ("hold", "releasing"), ("lease", "done")}
    assert sum(passed >= whole for passed in flows.values()) > len(flows) / 2


# --- the timeline page ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wall", WALLS)
def test_perfetto_gets_times_that_it_cannot_have_as_the_nearest_that_it_can(tmp_path: Path, wall: float) -> None:
    write_run(tmp_path, with_walls_from(wall))
    file = tmp_path / "trace.pftrace"
    export(tmp_path, "--perfetto", file)
    assert file.stat().st_size > 1000


def test_the_page_has_every_request(faulty: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    export(faulty, "--html", file)
    page = file.read_text()
    told = stories(histories(faulty_run()))
    assert all(request.subject in page for story in told for request in story.requests)


def test_a_request_whose_beginning_is_missing_was_not_tried_again() -> None:
    """Its first records were in a file that was deleted when there were too many."""
    (found,) = histories(records("request", "D", "r", PULLED, peer="P")[2:])
    times = times_of(found)
    assert times is not None
    assert times.attributes()["kv_transfer.retries"] == 0
