"""What a worker counts beside its requests: mistakes in the connector, and strangers at its control socket."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from connector.config import ConnectorOptions
from connector.observe.stats import COUNTS
from connector.observe.trace_writer import TraceWriter
from connector.ports.side_channel import FRAMES_TOO_MANY_MAX, Link
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.protocol import LocalPrefillsSeen
from connector.runtime.supervisor import Supervisor
from connector.step_metadata import StepMetadata
from connector.wire.control import encode_request
from connector.wire.inspection import EngineRow, Inspect, decode_inspected
from connector.worker.connector_worker import ConnectorWorker
from tests.rig.patience import PATIENCE_SECONDS
from tests.unit.vllm_setup import allocate, attention_spec, cache_config, engine_config, single_rank, write_model

LOOK_SECONDS = 0.01


@contextmanager
def running(directory: Path, options: ConnectorOptions) -> Iterator[ConnectorWorker]:
    """A worker whose actors run."""
    config = engine_config(write_model(directory / "model"))
    (directory / "rendezvous").mkdir()
    caches = cache_config(attention_spec())
    with single_rank(config, directory / "rendezvous"):
        worker = ConnectorWorker(config, caches, options)
        worker.register_kv_caches(allocate(caches))
        try:
            yield worker
        finally:
            worker.shutdown()


def counted(worker: ConnectorWorker, key: str, at_least: int) -> int:
    """Of one series, when it has got so far."""
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while counts[key] < at_least and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        counts.update(newly_counted(worker))
    return counts[key]


def newly_counted(worker: ConnectorWorker) -> Mapping[str, int]:
    stats = worker.take_stats()
    return stats.data[COUNTS] if stats is not None else {}


def with_link(worker: ConnectorWorker, use: Callable[[Link], Awaitable[None]]) -> None:
    """To the control socket; it stays open until `use` is through with it."""
    metadata = worker.handshake_metadata
    assert metadata is not None
    where = metadata.extension

    async def main() -> None:
        channel = ZmqSideChannel()
        try:
            with trio.fail_after(PATIENCE_SECONDS):
                await use(await channel.open_link(where.control_host, where.control_port))
        finally:
            channel.close()

    trio.run(main)


def ask(worker: ConnectorWorker, *frames: bytes) -> Sequence[bytes]:
    answers: list[Sequence[bytes]] = []

    async def use(link: Link) -> None:
        link.send(frames)
        answers.append(await link.receive())

    with_link(worker, use)
    return answers[0]


def counted_of_a_stranger(worker: ConnectorWorker, key: str, *frames: bytes) -> int:
    """Of one series, when a stranger has sent this. He stays: what he has sent may come late."""
    counts: Counter[str] = Counter()

    async def use(link: Link) -> None:
        link.send(frames)
        while not counts[key]:
            await trio.sleep(LOOK_SECONDS)
            counts.update(newly_counted(worker))

    with_link(worker, use)
    return counts[key]


def test_a_message_with_which_the_actors_crash_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It concerns no request."""

    def broken(self: Supervisor, command: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(Supervisor, "_hand_out", broken)
    with running(tmp_path, ConnectorOptions()) as worker:
        worker.note_warm()
        worker.start_load_kv(StepMetadata([LocalPrefillsSeen(count=1, named=())]))
        assert counted(worker, "crashes", 2) == 2, "the word that the engine is warm is a message too"


def test_a_tool_is_told_that_the_trace_is_interrupted(tmp_path: Path) -> None:
    with running(tmp_path, ConnectorOptions(trace_directory=str(tmp_path / "traces"))) as worker:
        trace = worker._trace
        assert isinstance(trace, TraceWriter)
        for is_full in (False, True):
            if is_full:
                trace._lines._interrupt(OSError("the disk is full"))
            (row,) = decode_inspected(ask(worker, *encode_request(Inspect(number=1, what="engine")))).rows
            assert isinstance(row, EngineRow)
            assert (row.trace_interrupted or "").endswith("jsonl: the disk is full") == is_full


@pytest.mark.parametrize(
    ("allowed_peers", "frames", "why"),
    [
        (("10.0.0.0/8",), 1, "refused"),
        ((), 1, "malformed"),
        ((), FRAMES_TOO_MANY_MAX + 100, "cut_off"),
    ],
)
def test_strangers_at_the_control_socket_are_counted(
    tmp_path: Path, allowed_peers: tuple[str, ...], frames: int, why: str
) -> None:
    with running(tmp_path, ConnectorOptions(allowed_peers=allowed_peers)) as worker:
        assert counted_of_a_stranger(worker, f"turned_away|control_socket|{why}", *[b"?"] * frames) >= 1
