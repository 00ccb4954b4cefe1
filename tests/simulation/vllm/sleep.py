"""How a simulated engine falls asleep and wakes up, as vLLM's engine core does it from 0.33 on.

An operator asks for it in one of vLLM's modes. The scheduler is paused: what comes from then on stays in its queue.
When the engine has nothing to do any more, its device stands still and its prefix cache is cleared; if that cannot be,
it stays awake and paused until it is told to wake up. Then the worker sides give the memory up: the actors have stopped
before, as in production they do in that call, and nothing of theirs may read or write there any more. While the engine
sleeps the memory holds what nobody has written, and at the end it must hold that still. Other memory stands there when
it wakes up, with other actors: for its peers that is another life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import trio
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from connector.step_metadata import HandshakeMetadata
from connector.worker.sleep_mode import MemoryInUse
from tests.rig.facts import LEAVE_SECRET, facts
from tests.simulation.inflictor import SHUTDOWN_SECONDS
from tests.simulation.model import JUNK
from tests.simulation.shapes import DEVICE_SECONDS_MAX, LATE_DEVICE_SECONDS_MAX
from tests.simulation.vllm.connector import NixlConnector

if TYPE_CHECKING:
    from tests.simulation.vllm.engine import VllmEngine

Mode = Literal["abort", "wait", "keep"]
MODES: tuple[Mode, ...] = ("abort", "wait", "keep")
"""What becomes of the requests that there are: they are aborted, the engine waits for their ends, or it keeps them."""
DEVICE_SECONDS = max(LATE_DEVICE_SECONDS_MAX, DEVICE_SECONDS_MAX)
"""After so long a device has done all that it was given."""

_ASLEEP = np.uint64(0x5EE9_5EE9_5EE9_5EE9)
"""What the memory of a sleeping engine holds."""


class Sleep:
    """Of one life of an engine's scheduler."""

    def __init__(self, engine: VllmEngine, connectors: Sequence[NixlConnector]) -> None:
        self.is_asleep = False
        self.has_failed = False
        """The memory could not be given up: the connector transfers nothing any more."""
        self._engine = engine
        self._connectors = connectors
        self._asked: Mode | None = None
        self._mode: Mode | None = None
        self._is_to_wake_up = False

    # --- the operator -----------------------------------------------------------------------------------------------

    def ask(self, mode: Mode) -> None:
        self._asked = mode
        self._engine.wake_core()

    def wake_up(self) -> None:
        """It may not have fallen asleep; then it is no longer to."""
        self._is_to_wake_up = True
        self._engine.wake_core()

    # --- the engine core --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Do what the operator wants, between two steps."""
        mode, self._asked = self._asked, None
        if mode is not None:
            self._pause(mode)
        if self._is_to_wake_up:
            self._is_to_wake_up = False
            if self.is_asleep:
                self._restore()
            self._mode = None
            self._engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _pause(self, mode: Mode) -> None:
        engine = self._engine
        if mode == "abort":
            for request in engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED):
                engine.note_abort(request.request_id)
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        self._mode = mode

    async def falls_asleep(self) -> bool:
        """There is nothing to do. Whether it has fallen asleep because of that."""
        mode, self._mode = self._mode, None
        if mode is None:
            return False
        await trio.sleep(DEVICE_SECONDS)
        if not self._clears_cache():
            self._engine.cover_sleep(f"cannot sleep in mode {mode}")
            return False
        for connector in self._connectors:
            if transfers := connector.worker_side.ledger.transfers:
                self._engine.complain_of_sleep(f"falls asleep with {transfers} transfer(s)")
        await self._engine.process.fall_asleep(SHUTDOWN_SECONDS)
        try:
            for connector in self._connectors:
                connector.unregister_kv_caches()
        except MemoryInUse as error:
            self.has_failed = True
            excuses = (each.has_stopped or not each.has_ended.is_set() for each in self._engine.process.ranks)
            if not any(excuses):
                self._engine.complain_of_sleep(str(error))
            return False
        for rank in self._engine.process.ranks:
            rank.memory.flat[:] = _ASLEEP
        self._engine.cover_sleep(f"asleep in mode {mode}")
        self.is_asleep = True
        return True

    def _clears_cache(self) -> bool:
        scheduler = self._engine.scheduler
        try:
            cleared: bool = scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        except RuntimeError:
            return False
        return cleared

    def _restore(self) -> None:
        engine, process = self._engine, self._engine.process
        for rank in process.ranks:
            if np.any(rank.memory.flat != _ASLEEP):
                engine.complain_of_sleep(f"rank {rank.tp_rank} has written into its memory while it was asleep")
            rank.memory.flat[:] = JUNK
        engine.begin_anew()
        for connector in self._connectors:
            connector.restore_kv_caches()
        engine.scheduler_side.serve_handshakes(
            {
                (0, rank.tp_rank): HandshakeMetadata(
                    compatibility_hash="same",
                    agent_metadata=rank.port.agent_metadata,
                    extension=facts(tp_rank=rank.tp_rank, tp_size=len(process.ranks)),
                    leave_secret=LEAVE_SECRET,
                )
                for rank in process.ranks
            }
        )
        waiting = sum(not request.is_finished() for request in engine.scheduler.requests.values())
        engine.cover_sleep("woke up, and requests were waiting", waiting > 0)
        self.is_asleep = False
