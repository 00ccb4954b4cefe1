"""The trace of real actors, when its file system hangs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio

from connector.config import ConnectorOptions
from connector.observe.trace_log import open_trace_log
from connector.observe.trace_writer import TraceWriter
from connector.tools.trace_reader import read_trace
from connector.wire.inspection import EngineRow
from tests.actors.engines import Engine, engine, until
from tests.actors.test_inspection import asked
from tests.stalled_file import StalledFile

OPTIONS = ConnectorOptions(
    request_timeout_seconds=20.0, handshake_timeout_seconds=15.0, kv_lease_duration=15.0, quiesce_timeout_seconds=1.0
)


@pytest.mark.parametrize("whose", ["d", "p"])
def test_a_trace_file_that_hangs_keeps_no_request_waiting(
    tmp_path: Path, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not on the engine whose file it is, nor on the other side; and what is missing is said."""
    log = open_trace_log(tmp_path, engine_id=whose, role="kv_both", rank=0)
    writer = TraceWriter(log, queue_records_max=6)
    stalled = StalledFile()

    async def main() -> None:
        async with (
            engine("p", serves=True, options=OPTIONS, also_trace=writer if whose == "p" else None) as p,
            engine("d", options=OPTIONS, also_trace=writer if whose == "d" else None) as d,
        ):
            mine = d if whose == "d" else p
            await serve(p, d, 1)
            await until(lambda: len(read_trace(tmp_path)) == len(mine.trace.records))
            stalled.take_the_place_of(log.path)
            for block in range(2, 6):
                await serve(p, d, block)
            stalled.go_on()
            await until(lambda: writer._put == writer._done)

    with caplog.at_level(logging.WARNING):
        trio.run(main)
        writer.close()
    said = [each for each in caplog.messages if str(log.path) in each]
    assert len(said) == 2
    assert "not complete from here on" in said[0]
    assert "did not keep up" in said[1]


def test_that_a_trace_is_interrupted_and_what_it_lacks_is_told_to_tools(tmp_path: Path) -> None:
    directory = tmp_path / "traces"
    writer = TraceWriter(open_trace_log(directory, engine_id="d", role="kv_both", rank=0))
    directory.rmdir()

    async def main() -> None:
        async with (
            engine("p", serves=True, options=OPTIONS) as p,
            engine("d", serves=True, options=OPTIONS, also_trace=writer) as d,
        ):
            await serve(p, d, 1)
            await until(lambda: writer.interrupted is not None and writer.missing == len(d.trace.records))
            found = await asked(d)
            of_d, of_p = found.engines
            (row,) = of_d.of(EngineRow)
            assert row.trace_interrupted is not None
            assert row.trace_interrupted.startswith(f"{directory}/d-kv_both-0-")
            assert "No such file" in row.trace_interrupted
            assert row.counts.trace_records_missing == len(d.trace.records)
            (other,) = of_p.of(EngineRow)
            assert (other.trace_interrupted, other.counts.trace_records_missing) == (None, 0)

    trio.run(main)
    writer.close()


async def serve(p: Engine, d: Engine, block: int) -> None:
    """One request from its grant to the end of its lease."""
    name = f"r{block}"
    p.lend(f"remote-{name}")
    d.pull(name, p, [block], [block])
    ended = await until(lambda: d.received(name), OPTIONS.request_timeout_seconds)
    assert ended.failure is None
    await until(lambda: p.sent(f"remote-{name}"), OPTIONS.request_timeout_seconds)
