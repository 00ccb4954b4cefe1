"""Whose memory grows in a decode engine that computes prompts itself, while prefill engines come and go.

    python -m tests.bench.bench_memory vllm
        an engine without any connector: prompts of each length up to 256 tokens, each time in a new order, and then of
        one length; with and without the cache of oneDNN, which computes vLLM's matrix products on CPUs
    python -m tests.bench.bench_memory nixl
        the NIXL port alone, over TCP: processes that are met, read from, stopped, and killed in the middle of a READ

Both print a table in markdown, of resident megabytes. The third part of the answer, the whole connector between real
engine cores whose model computes nothing, is a test: `tests/integration/test_leaks.py`.
"""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import trio

from connector.ports.nixl import MemoryRun, NixlEvent, PortReadEnded
from connector.ports.nixl_agent import RealNixlPort
from tests.chaos.remains import WORKER, processes
from tests.conformance.nixl_suite import BLOCK_BYTES, BLOCKS, new_memory, whole
from tests.e2e.client import Client
from tests.e2e.cluster import prompt
from tests.e2e.engines import ROOT, EngineOptions, EngineSet
from tests.e2e.tiny_model import tiny_llama
from tests.rig.process import stop_process

STEP_TOKENS = 256
PASSES = 3
PEERS = 24
PEERS_A_ROW = 8
IN_FLIGHT_SECONDS = 0.1
CACHES = {"as it is": {}, "without oneDNN's cache": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}}


# --- vLLM -------------------------------------------------------------------------------------------------------------


def _prompts() -> Iterator[tuple[str, list[int]]]:
    """Names of the rows, and the lengths of the prompts."""
    yield "start", [3]
    for number in range(1, PASSES + 1):
        lengths = list(range(1, STEP_TOKENS + 1))
        random.Random(number).shuffle(lengths)
        yield f"{number}. time each length", lengths
    yield "one length", [STEP_TOKENS] * STEP_TOKENS


def _worker_megabytes(environment: dict[str, str]) -> dict[str, float]:
    found = {}
    with tempfile.TemporaryDirectory() as directory, EngineSet() as engines:
        (engine,) = engines.start(
            EngineOptions(
                name="alone",
                model=tiny_llama(),
                logs=Path(directory),
                connector=None,
                max_num_batched_tokens=STEP_TOKENS,
                environment=environment,
            )
        )
        with Client(engine) as client:
            for name, lengths in _prompts():
                for tokens in lengths:
                    # A salt of its own, so that nothing is cached.
                    answer = client.complete(prompt(tokens, name), max_tokens=1, cache_salt=f"{name} {tokens}")
                    assert answer.ok, answer.error
                found[name] = processes(engine)[WORKER].resident_bytes / 1e6
    return found


def vllm() -> None:
    columns = [_worker_megabytes(environment) for environment in CACHES.values()]
    print(f"| worker, MB | {' | '.join(CACHES)} |")
    print("| --- |" + " --- |" * len(CACHES))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{column[name]:.0f}" for column in columns) + " |")


# --- NIXL -------------------------------------------------------------------------------------------------------------


class _Reader:
    """A port whose READs are waited for."""

    def __init__(self) -> None:
        memory, self._run = new_memory()
        self.port = RealNixlPort.open(f"reader-{os.getpid()}", whole(memory))
        self.port.set_event_callback(self._on_event)
        self._memory = memory
        self._ended, self._ends = trio.open_memory_channel[PortReadEnded](BLOCKS)
        self._ids = np.arange(BLOCKS, dtype=np.int32)

    def _on_event(self, event: NixlEvent) -> None:
        if isinstance(event, PortReadEnded):
            self._ended.send_nowait(event)

    async def meet(self) -> None:
        """A process starts, is read from, and is killed in the middle of a READ."""
        command = [sys.executable, "-m", "tests.conformance.nixl_peer"]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
            assert peer.stdout is not None
            said = next(json.loads(line[1:]) for line in peer.stdout if line.startswith(b"@"))
            agent = await self.port.add_remote_agent(base64.b64decode(said["metadata"]))
            local = await self.port.prepare_local([self._run])
            remote = await self.port.prepare_remote(
                agent, [MemoryRun(said["address"], BLOCK_BYTES, BLOCK_BYTES, BLOCKS)]
            )
            self.port.post_read(local, self._ids, remote, self._ids)
            assert (await self._ends.receive()).error is None
            stop_process(peer.pid)
            self.port.post_read(local, self._ids, remote, self._ids)
            await trio.sleep(IN_FLIGHT_SECONDS)
            peer.kill()
            assert (await self._ends.receive()).error is not None
        for handle in (local, remote):
            await self.port.release_descriptor_list(handle)
        await self.port.remove_remote_agent(agent)


async def _nixl() -> None:
    reader = _Reader()
    process = psutil.Process()
    print("| peers so far | MB | descriptors |\n| --- | --- | --- |")
    for number in range(PEERS + 1):
        if number % PEERS_A_ROW == 0:
            print(f"| {number} | {process.memory_info().rss / 1e6:.1f} | {process.num_fds()} |", flush=True)
        await reader.meet()
    await reader.port.aclose(1.0)


def nixl() -> None:
    os.environ["UCX_TLS"] = "tcp,self"
    trio.run(_nixl)


if __name__ == "__main__":
    {"vllm": vllm, "nixl": nixl}[sys.argv[1]]()
