"""The worker of a simulated engine: what vLLM's worker does with a connector, and a stand-in for the forward pass.

The order is that of vLLM's model runner. A step binds the connector to what the scheduler says, starts loads after the
forward pass was launched, asks for results, errors, statistics and the connector's own report, and unbinds it. A step
without tokens does the same without a forward pass. Whether the forward pass is over when the connector is asked
depends on the device (`Knobs.collects_early`); what the scheduler is told is the same.

What vLLM wants zeroed before a forward pass is zeroed before it, and then copied what it wants copied from block to
block, in all cache groups, as if they shared their memory. Where the device is late and no forward pass follows, this
may be done some time later.

A forward pass looks at all KV before its tokens, writes theirs, takes time, and looks again. The token that follows
comes out of that KV (`content`). Drafts that were wrong, and the drafter, write what is nobody's into the slots behind.
"""

from __future__ import annotations

import pickle
from typing import Protocol

import trio
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from connector.worker.finishing import Run
from tests.simulation.process import Rank
from tests.simulation.vllm.connector import NixlConnector
from tests.simulation.vllm.content import sequence


class Overseer(Protocol):
    """Who judges what the worker sees: the engine."""

    def is_current(self, request_id: str, block_ids: list[list[int]]) -> bool:
        """Whether the request still has these blocks; it may have lost them since the step was scheduled."""

    def wrong_bytes(self, request_id: str, blocks: list[int], when: str) -> None:
        """KV of a request is not its own."""

    def collects(self, tp_rank: int) -> None:
        """The connector of this rank is being asked for results."""


class _Running:
    """What a worker remembers of a request."""

    def __init__(self, new: NewRequestData, drafts: int) -> None:
        assert new.prompt_token_ids is not None
        assert new.sampling_params is not None
        assert new.sampling_params.max_tokens is not None
        self.sequence = sequence(tuple(new.prompt_token_ids), new.sampling_params.max_tokens + drafts)
        """Drafts may go beyond the answer, and be right."""
        self.block_ids: list[list[int]] = [list(group) for group in new.block_ids]
        """By cache group."""
        self.computed = new.num_computed_tokens
        self.known = len(new.prompt_token_ids)
        """Tokens that there are; a step that goes as far as that gives another one."""
        self.right_drafts = 0
        """Of the step that is under way."""


class SimulatedRunner:
    """See the module's docstring. One for each rank; all ranks of an engine do the same."""

    def __init__(
        self,
        *,
        connector: NixlConnector,
        rank: Rank,
        overseer: Overseer,
        collects_early: bool,
        drafts: int,
        run: Run,
    ) -> None:
        self._connector = connector
        self._drafts = drafts
        self._rank = rank
        self._memory = rank.memory
        self._overseer = overseer
        self._collects_early = collects_early
        self._run = run
        self._to_prepare: list[tuple[list[int], list[KVCacheBlockCopy]]] = []
        """What is to be zeroed and copied, of each step that the device has not come to."""
        self._running: dict[str, _Running] = {}

    @property
    def to_copy(self) -> set[int]:
        """Blocks that the device has yet to copy elsewhere."""
        return {copy.src_block_id for _, copies in self._to_prepare for copy in copies}

    async def execute(self, output: SchedulerOutput, seconds: float) -> ModelRunnerOutput:
        """One step, whose forward pass takes so long."""
        assert not output.has_sync_kv_loads, "the connector loads asynchronously only"
        self._connector.handle_preemptions(output.kv_connector_metadata)
        self._update(output)
        if output.new_block_ids_to_zero or output.kv_cache_block_copies:
            self._to_prepare.append((output.new_block_ids_to_zero or [], output.kv_cache_block_copies or []))
        if output.total_num_scheduled_tokens:
            self._prepare()
        elif self._to_prepare:
            self._run(self._prepare)
        self._connector.bind_connector_metadata(pickle.loads(pickle.dumps(output.kv_connector_metadata)))
        sampled: dict[str, list[int]] = {}
        reported: KVConnectorOutput | None = None
        if output.total_num_scheduled_tokens:
            for request_id, scheduled in output.num_scheduled_tokens.items():
                self._begin(request_id, scheduled, output.scheduled_spec_decode_tokens.get(request_id, []))
            if self._collects_early:
                reported = self._serve_connector(output)
            await trio.sleep(seconds)
            for request_id, scheduled in output.num_scheduled_tokens.items():
                drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                sampled[request_id] = self._finish(request_id, scheduled, drafts)
        if reported is None:
            reported = self._serve_connector(output)
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=None if reported.is_empty() else reported,
        )

    def _prepare(self) -> None:
        steps, self._to_prepare = self._to_prepare, []
        for to_zero, copies in steps:
            for words in self._memory.groups:
                words[:, to_zero] = 0
                words[:, [copy.dst_block_id for copy in copies]] = words[:, [copy.src_block_id for copy in copies]]

    # --- the connector ----------------------------------------------------------------------------------------------

    def _serve_connector(self, output: SchedulerOutput) -> KVConnectorOutput:
        connector = self._connector
        connector.start_load_kv(None)
        connector.wait_for_save()
        self._overseer.collects(self._rank.tp_rank)
        results = connector.get_transfer_results(output.finished_req_ids)
        # vLLM only iterates over these, so lists keep a run independent of the order of sets.
        reported = KVConnectorOutput(
            finished_sending=sorted(results.finished_sending),
            finished_recving=sorted(results.finished_recving),
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return reported

    # --- the forward pass -------------------------------------------------------------------------------------------

    def _update(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self._running.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._running[new.req_id] = _Running(new, self._drafts)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed, outputs in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            running = self._running[request_id]
            if request_id in cached.resumed_req_ids:
                running.block_ids = [[] for _ in running.block_ids]
            if blocks is not None:
                for known, more in zip(running.block_ids, blocks, strict=True):
                    known.extend(more)
            running.computed = computed
            running.known = len(running.sequence.prompt) + outputs

    def _begin(self, request_id: str, scheduled: int, drafts: list[int]) -> None:
        running = self._running[request_id]
        self._is_right(request_id, running, running.computed, "before a step")
        stop = running.computed + scheduled
        running.right_drafts = running.sequence.count_right(drafts, stop - len(drafts))
        right = stop - len(drafts) + running.right_drafts
        running.sequence.write(self._memory, running.block_ids, running.computed, right)
        # Drafts that are wrong, and those that are made after the step.
        if self._drafts:
            running.sequence.spoil(self._memory, running.block_ids, right, stop + self._drafts)

    def _finish(self, request_id: str, scheduled: int, drafts: int) -> list[int]:
        """The tokens sampled: none in the middle of a prompt."""
        running = self._running[request_id]
        start, stop = (
            running.computed + scheduled - drafts,
            running.computed + scheduled - drafts + running.right_drafts,
        )
        is_right = self._is_right(request_id, running, stop, "after a step")
        if start < running.known:
            return []
        return [running.sequence.next_token(each, kv_is_right=is_right) for each in range(start, stop + 1)]

    def _is_right(self, request_id: str, running: _Running, tokens: int, when: str) -> bool:
        if not self._overseer.is_current(request_id, running.block_ids):
            return True  # Nobody will hear of it.
        wrong = running.sequence.mismatches(self._memory, running.block_ids, tokens) if tokens else []
        if wrong:
            self._overseer.wrong_bytes(request_id, wrong, when)
        return not wrong
