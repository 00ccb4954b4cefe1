"""The prefill engine of test_layouts.py: memory and NIXL agents of all its ranks, in a process of its own.

One process serves all cases, one after another. For a case it fills the memory of each prefill rank as the oracle says,
registers it with an agent of its own, says where it lies, waits until the decode ranks have read, and answers whether
its memory is as it was. It computes nothing else: who reads what is the other side's business.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch

from connector.layout.geometry import RankId, RankLayout
from connector.ports.nixl_agent import RealNixlPort
from tests.gpu.device_memory import DeviceMemory, make_current, use
from tests.gpu.patience import patient
from tests.unit.layout_oracle import Case, Engine, Rank, make_content, write_prefill

START_SECONDS = patient(120.0)
"""Imports take a few seconds, and a minute where the machine is busy and its disk cold."""
ANSWER_SECONDS = patient(60.0)
CLOSE_SECONDS = patient(10.0)


class PrefillRank(msgspec.Struct, frozen=True):
    """What a decode rank has to know of a prefill rank."""

    layout: RankLayout
    agent_metadata: bytes


def open_port(engine: Engine, rank: Rank, memory: DeviceMemory) -> RealNixlPort:
    """An agent that has registered a rank's memory, and nothing else."""
    name = f"{engine.engine_id}-{rank.rank}-{uuid.uuid4()}"
    return RealNixlPort.open(name, memory.ranges, prepare_thread=make_current(memory.device))


class PrefillProcess:
    """The test's handle of the process. Every wait has a deadline, and ends when the process does.

    A process that misses a deadline is killed, or its answer would be taken for that of the next case.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        context = multiprocessing.get_context("spawn")
        self._connection, self._child_end = context.Pipe()
        self._process = context.Process(target=_main, args=(self._child_end, device), name="prefill-ranks", daemon=True)

    def __enter__(self) -> PrefillProcess:
        self._process.start()
        self._child_end.close()
        try:
            self._answer(START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @contextlib.contextmanager
    def ranks(self, case: Case) -> Iterator[dict[RankId, PrefillRank]]:
        """All prefill ranks of a case. Once they were read: AssertionError if that changed their memory."""
        self._connection.send(case)
        ranks = self._answer()
        try:
            yield ranks
        finally:
            self._connection.send("read")
            changed = self._answer()
        assert changed == [], f"prefill ranks {changed} are not what they were"

    def _answer(self, timeout_seconds: float = ANSWER_SECONDS) -> Any:
        if not self._connection.poll(timeout_seconds):
            self._process.kill()
            raise AssertionError(f"no answer from the prefill ranks within {timeout_seconds:g} s")
        return self._connection.recv()


def _main(connection: Connection, device: torch.device) -> None:
    """Entry point of the process; it ends when the test's end of the pipe is closed."""
    use(device)
    RealNixlPort.open("warm-up", []).close_blocking(CLOSE_SECONDS)  # loads NIXL, which brings torch
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            _serve(connection, connection.recv(), device)


def _serve(connection: Connection, case: Case, device: torch.device) -> None:
    noise = np.random.default_rng(case.noise)
    content = make_content(case, noise)
    homes = [DeviceMemory(device) for _ in case.prefill.ranks]
    ranks = [
        Rank(case, case.prefill, number, noise, home=home)
        for number, home in zip(case.prefill.ranks, homes, strict=True)
    ]
    for rank, home in zip(ranks, homes, strict=True):
        write_prefill(case, rank, content)
        home.upload()
    before = [[array.copy() for array in rank.memory] for rank in ranks]
    ports: list[RealNixlPort] = []
    try:
        for rank, home in zip(ranks, homes, strict=True):
            ports.append(open_port(case.prefill, rank, home))
            ports[-1].expect_notifications(True)  # a first READ needs this side's polls to connect
        connection.send(
            {rank.rank: PrefillRank(rank.layout, port.agent_metadata) for rank, port in zip(ranks, ports, strict=True)}
        )
        connection.recv()
        for home in homes:
            home.download()
        changed = [
            rank.rank for rank, old in zip(ranks, before, strict=True) if not all(map(np.array_equal, rank.memory, old))
        ]
    finally:
        for port in ports:
            port.close_blocking(CLOSE_SECONDS)
    connection.send(changed)
