"""What may happen to requests of one engine in any order, under vLLM's own scheduler, drawn from a seed.

Requests load their KV, are lent, are computed here, or are sessions that go on; loads fail, and their blocks are
quarantined and come back; clients leave; scheduling is paused in both of vLLM's ways, and the prefix cache is reset;
the queue is one of priorities or not, steps overlap or not, hits in the prefix cache may end within blocks or not, and
vLLM keeps a reserve of blocks or not. There is no worker: what it would report is drawn. After each step every
reference to a block has an owner. In the end, when all that waits is reported, everything ends.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from connector.protocol import LeaseGranted, RejectPull, StartPull
from connector.step_metadata import StepMetadata, WorkerReport
from tests.unit.hybrid_engine import (
    MAX_MODEL_TOKENS,
    REMOTE_DECODE,
    HybridEngine,
    full,
    state,
    tokens_of,
    window,
)
from tests.unit.vllm_setup import block_hasher

SEEDS = (*range(50), 146, 174, 260)
"""In the last three a load of high priority finds too few blocks beside those of failed ones."""
TICKS = 120
STEPS_TO_THE_END = 400
OPEN_MAX = 14
TOKENS_MAX = 240
"""Of a prompt, and of a session that goes on."""
BLOCKS_MIN = 21
"""There is room for the longest request."""
FAMILIES: dict[str, Callable[[], Sequence[KVCacheSpec]]] = {
    "full": lambda: [full()],
    "window": lambda: [full(), window(40)],
    "cached states": lambda: [full(), state("align")],
    "one state": lambda: [full(), state("none")],
}
BLOCKS_FOR_WINDOWS = 30
BLOCKS_FOR_A_SESSION = 25
"""vLLM lets it keep its blocks while it waits for more, and others wait for these."""


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


class Engine(HybridEngine):
    """One whose steps write nothing that is looked at."""

    def _note_written(self, name: str, scheduled: int) -> None:
        pass


class Orders:
    """One seed."""

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        family = chance.choice(list(FAMILIES))
        caches = family != "one state"
        # vLLM refuses it for a single cache group.
        match_tokens = random.Random(f"matches {seed}").choice([None, 4, 8]) if len(FAMILIES[family]()) > 1 else None
        self.prefill = Engine(
            FAMILIES[family](), engine_id="p", blocks=400, caches_prefixes=caches, match_tokens=match_tokens
        )
        self.overlaps = chance.random() < 0.5
        self.role = chance.choice(["kv_both", "kv_consumer"])
        self.has_sessions = chance.random() < 0.3
        self.engine = Engine(
            FAMILIES[family](),
            engine_id="d",
            blocks=sum(
                (
                    chance.randint(BLOCKS_MIN, 40),
                    BLOCKS_FOR_WINDOWS if family == "window" else 0,
                    BLOCKS_FOR_A_SESSION if self.has_sessions else 0,
                )
            ),
            caches_prefixes=caches and chance.random() < 0.8,
            recomputes=chance.random() < 0.7,
            overlaps=self.overlaps,
            role=self.role,
            batch_tokens=chance.choice([32, 64, MAX_MODEL_TOKENS]),
            policy=chance.choice(["fcfs", "priority"]),
            match_tokens=match_tokens,
        )
        self.scheduler = self.engine.scheduler
        self.scheduler.max_num_active_reqs = chance.choice([2, 4, 8])
        # Options of vLLM that have to do with room; drawn apart, so that a seed stays what it is.
        rarely = random.Random(f"options {seed}")
        self.scheduler.kv_cache_manager.watermark_blocks = rarely.choice([0, 0, 1, 3])
        self.scheduler.scheduler_reserve_full_isl = rarely.random() < 0.7
        self.scheduler.scheduler_config.long_prefill_token_threshold = rarely.choice([0, 0, 16, 32])
        self.pool = self.scheduler.kv_cache_manager.block_pool
        shared = [tokens_of(chance.randint(5, TOKENS_MAX - 40), seed=chance.randint(0, 3)) for _ in range(6)]
        self.prompts = [[*tokens, *[chance.randint(0, 400)] * chance.randint(0, 40)] for tokens in shared]
        self.failing = chance.choice([0.1, 0.5, 0.9])
        """Share of the loads."""
        self.numbers = 0
        self.open: dict[str, Request] = {}
        self.sessions: dict[str, dict[str, Any] | None] = {}
        self.loads: dict[str, StartPull | RejectPull] = {}
        self.leases: set[str] = set()
        self.quarantined: list[list[int]] = []
        self.ahead: deque[SchedulerOutput] = deque()

    def play(self) -> None:
        for _ in range(TICKS):
            self.happen()
            self.step()
            self.open = {name: request for name, request in self.open.items() if not request.is_finished()}
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        for name in self.sessions.keys() & self.open.keys():
            self.scheduler.add_request(self.request(name, [0], None, resumable=False))
        for _ in range(STEPS_TO_THE_END):
            if not (self.scheduler.has_requests() or self.ahead):
                break
            self.step(is_end=True)
        waiting = [(each.request_id, each.status.name) for each in self.scheduler.requests.values()]
        assert waiting == [], f"with {self.pool.get_num_free_blocks()} blocks free"
        side = self.scheduler.connector._scheduler
        loads, granting = side._loads, side._lends._granting
        assert not any((loads._loads, loads._offered, loads._without_room, loads._behind_lent_back))
        assert not any((granting._grants, granting.prompts, side._lends._far_ends.held))
        assert granting.counts == (0, 0, 0)

    # --- what happens -------------------------------------------------------------------------------------------------

    def happen(self) -> None:
        chance, scheduler = self.chance, self.scheduler
        kind = chance.random()
        if kind < 0.35 and len(self.open) < OPEN_MAX:
            self.arrive()
        elif kind < 0.47 and self.sessions:
            self.go_on(chance.choice(list(self.sessions)))
        elif kind < 0.5 and self.open:
            scheduler.finish_requests(chance.choice(list(self.open)), RequestStatus.FINISHED_ABORTED)
        elif kind < 0.53:
            scheduler.set_pause_state(chance.choice(list(PauseState)))
        elif kind < 0.6:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        elif kind < 0.62:
            scheduler.reset_prefix_cache()
        elif kind < 0.64:
            self.reset_with_all_that_run()

    def reset_with_all_that_run(self) -> None:
        """It is refused while something is lent, loads, or is quarantined; what ran is preempted all the same."""
        with contextlib.suppress(RuntimeError):
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def arrive(self) -> None:
        chance = self.chance
        self.numbers += 1
        name, tokens, kind = f"r{self.numbers}", chance.choice(self.prompts), chance.random()
        params: dict[str, Any] | None = None
        if kind < 0.6:
            self.prefill.prefill(name, tokens)
            params = self.prefill.params[name]
        elif kind < 0.7:
            params = {"do_remote_prefill": True, "remote_block_ids": "none"}
        elif kind < 0.85 and self.role == "kv_both":
            params = REMOTE_DECODE
        is_session = self.has_sessions and chance.random() < 0.5 and not self.sessions
        request = self.open[name] = self.request(name, tokens, params, resumable=is_session)
        if is_session:
            self.sessions[name] = params
        self.scheduler.add_request(request)

    def go_on(self, name: str) -> None:
        """A session has its next input, or its end."""
        params, session = self.sessions[name], self.open.get(name)
        if session is None:
            del self.sessions[name]
            return
        if session.streaming_queue:
            return
        is_last = self.chance.random() < 0.4 or session.num_tokens > TOKENS_MAX
        tokens = tokens_of(self.chance.randint(1, 20), seed=9)
        self.scheduler.add_request(self.request(name, tokens, params, resumable=not is_last))
        if is_last:
            del self.sessions[name]

    def request(self, name: str, tokens: Sequence[int], params: dict[str, Any] | None, *, resumable: bool) -> Request:
        tokens_max = 1 if params is REMOTE_DECODE else self.chance.randint(1, 12)
        return Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(
                max_tokens=tokens_max,
                ignore_eos=True,
                prompt_logprobs=1 if self.chance.random() < 0.1 else None,
                extra_args={"kv_transfer_params": params},
            ),
            pooling_params=None,
            block_hasher=block_hasher(self.engine.match_tokens),
            priority=self.chance.randint(0, 3),
            resumable=resumable,
        )

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, *, is_end: bool = False) -> None:
        if self.scheduler.has_requests():
            self.ahead.append(self.schedule())
            may_be_aborted = not self.overlaps and self.open and not is_end
            if may_be_aborted and self.chance.random() < 0.2:  # while it is computed
                name = self.chance.choice(list(self.open))
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            if self.overlaps and not is_end and len(self.ahead) < 2 and self.chance.random() < 0.7:
                return
        if self.ahead:
            self.engine.compute(self.ahead.popleft(), self.draw_report(likely=is_end))
        self.check_references()

    def schedule(self) -> SchedulerOutput:
        output = self.engine.schedule()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        for command in metadata.commands:
            match command:
                case RejectPull(request_id=name) | StartPull(request_id=name):
                    assert name not in self.loads
                    self.loads[name] = command
                case LeaseGranted(lease=lease):
                    self.leases.add(lease.request_id)
                case _:
                    pass
        return output

    def draw_report(self, *, likely: bool) -> KVConnectorOutput:
        """Of the worker. `likely`: all that is open ends."""
        chance = self.chance
        report = WorkerReport()
        for blocks in [each for each in self.quarantined if likely or chance.random() < 0.1]:
            self.quarantined.remove(blocks)
            report.lifted.append(blocks)
        has_died = not likely and chance.random() < 0.05  # the engine that lends
        ended = {name: load for name, load in self.loads.items() if likely or has_died or chance.random() < 0.2}
        self.loads = {name: load for name, load in self.loads.items() if name not in ended}
        failed = {
            name for name, load in ended.items() if isinstance(load, RejectPull) or chance.random() < self.failing
        }
        for name, load in ended.items():
            if isinstance(load, StartPull) and name in failed and load.local_block_ids and chance.random() < 0.4:
                report.quarantined.append(load.local_block_ids)
        self.quarantined += report.quarantined
        read = {name for name in sorted(self.leases) if likely or chance.random() < 0.3}
        self.leases -= read
        return KVConnectorOutput(
            finished_recving=set(ended),
            failed_recving=failed,
            finished_sending=read,
            kv_connector_worker_meta=report,
        )

    def check_references(self) -> None:
        expected = [0] * self.pool.num_gpu_blocks
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        held = [blocks for manager in managers for blocks in manager.req_to_blocks.values()]
        for blocks in [*held, *(blocks for _, blocks in self.scheduler.deferred_frees)]:
            for block in blocks:
                expected[block.block_id] += not block.is_null
        kept = [*self.quarantined, *self.scheduler.connector._scheduler._lends._far_ends.held.values()]
        for block_id in (block_id for blocks in kept for block_id in blocks):
            expected[block_id] += 1
        assert [0 if block.is_null else block.ref_cnt for block in self.pool.blocks] == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_order(seed: int) -> None:
    Orders(seed).play()
