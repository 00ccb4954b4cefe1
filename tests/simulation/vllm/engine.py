"""One engine with a real scheduler: its lives, its step loop, and what is watched while it runs.

The loop is that of vLLM's engine core: take what has come in, make a step while there is anything to do (blocks that
are lent count), and pause for a moment after a step that computed nothing. With `Knobs.overlaps` a step is scheduled
while the one before it is computed, as asynchronous scheduling does; steps are computed one after another then as well.
Every rank has a worker of its own, and takes part in every step; what they report is put together by vLLM's
`KVOutputAggregator`, where there are several.

Everything that passes between vLLM and the connector, and between the connector and its actors, goes through here and
is told to the oracles. A block is overwritten when the scheduler frees it, or, if the prefix cache may still use it,
when it is handed out again. An exception of the scheduler or of the connector in it is a violation, and the death of
the engine, as it would be in vLLM.
"""

from __future__ import annotations

import functools
import random
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable

import trio
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.protocol import (
    AbortPull,
    Command,
    LeaseComputing,
    LeaseGranted,
    QuarantineLifted,
    ReceiveEnded,
    RejectPull,
    ReleaseUnread,
    SendEnded,
    StartPull,
    TrackLease,
    WorkerEvent,
)
from connector.scheduler.connector_scheduler import ConnectorScheduler
from connector.step_metadata import StepMetadata, WorkerReport
from connector.step_overlap import may_read
from connector.wire.params import ParamsKind, classify
from statemachine.draining import Draining
from statemachine.lease import LeaseName
from tests.rig.content import VOCABULARY_SIZE
from tests.simulation.faults import Kind, engine_of
from tests.simulation.oracles import Lent, Pull
from tests.simulation.process import Process, Rank, Surroundings, Variant
from tests.simulation.shapes import DEVICE_SECONDS_MAX, EngineShape
from tests.simulation.vllm.config import Knobs, engine_configuration
from tests.simulation.vllm.connector import Birth, NixlConnector, being_born
from tests.simulation.vllm.content import sequence
from tests.simulation.vllm.oracles import ABORTED, ENGINE_DIED, Ask, Requests
from tests.simulation.vllm.sleep import Sleep
from tests.simulation.vllm.worker import SimulatedRunner
from tests.unit.vllm_setup import block_hasher

PREFILL, DECODE = "P", "D"

STEP_SECONDS_MIN = 0.0005
STEP_SECONDS_MAX = 0.012
IDLE_SECONDS_MIN = 0.001
IDLE_SECONDS_MAX = 0.005
STANDSTILL_STEPS = 50
"""In a row, in which an engine that has what it needs would have served somebody."""
STEPS_AHEAD = 2
"""Steps that are scheduled and not yet completed with asynchronous scheduling."""
LOADED = "WAITING_FOR_REMOTE_KVS, loaded"
"""The status of a request whose load has ended, until the scheduler looks at it again."""


class _InOrder(Scheduler):
    """Ends requests in the order of their names: vLLM keeps them in sets, whose order differs between processes."""

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        if request_ids is None or isinstance(request_ids, str):
            ended: list[Request] = super().finish_requests(request_ids, finished_status)
            return ended
        return [
            request
            for request_id in sorted(request_ids)
            for request in super(_InOrder, self).finish_requests(request_id, finished_status)
        ]


class _PlainScheduler(_InOrder):
    """Steps one after another."""


class _OverlappingScheduler(_InOrder, AsyncScheduler):
    """Steps overlap."""


class VllmEngine:
    """See the module's docstring."""

    def __init__(
        self, around: Surroundings, name: str, chance: random.Random, knobs: Knobs, requests: Requests, *, role: str
    ) -> None:
        self.around = around
        self.name = name
        self.role = role
        self.process: Process
        self.scheduler: Scheduler
        self._chance = chance
        self._knobs = knobs
        self._requests = requests
        self._lives = 0
        self._drafter = random.Random(chance.random()) if knobs.drafts else None
        self.start(name)

    # --- lives ------------------------------------------------------------------------------------------------------

    @property
    def owner(self) -> str:
        """One life of this engine."""
        return f"{self.name}.{self._lives}"

    def start(self, engine_id: str, variant: Variant = Variant.SAME) -> None:
        """A new life, with an empty cache."""
        self._lives += 1
        self._shape = self.around.engines.get(self.name, EngineShape())
        config, cache_config = engine_configuration(
            knobs=self._knobs,
            model=self.around.model,
            shape=self._shape,
            is_prefill=self.role == PREFILL,
            engine_id=engine_id,
            options=self.around.options,
        )
        process = self.process = Process(
            self.around,
            self,
            engine_id,
            self._lives,
            self._chance,
            variant=variant,
            blocks=cache_config.num_blocks,
            listener_offset_ns=self._chance.randrange(10**15),
        )
        self.may_read = may_read(config)
        """Whether requests may have it load what they name."""
        block_size, self._hash_block_size = resolve_kv_cache_block_sizes(cache_config, config)
        make_scheduler = _OverlappingScheduler if self._knobs.overlaps else _PlainScheduler
        with being_born(self._birth(process.ranks[0])):
            self.scheduler = make_scheduler(
                vllm_config=config,
                kv_cache_config=cache_config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                hash_block_size=self._hash_block_size,
            )
        self._connectors: list[NixlConnector] = []
        for rank in process.ranks:
            with being_born(self._birth(rank)):
                connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config)
            self._connectors.append(connector)
        self._runners = [
            SimulatedRunner(
                connector=connector,
                rank=rank,
                overseer=self,
                collects_early=self._knobs.collects_early,
                drafts=self._knobs.drafts,
                run=functools.partial(self._run_later, rank),
            )
            for connector, rank in zip(self._connectors, process.ranks, strict=True)
        ]
        self._aggregator = KVOutputAggregator(len(process.ranks))
        self._pool = self.scheduler.kv_cache_manager.block_pool
        _watch(self._pool, on_take=self._take_blocks, on_free=self._free_blocks)
        self._to_copy: deque[set[int]] = deque()
        _watch_copies(self.scheduler.kv_cache_manager, self._to_copy.append)
        self._scope = trio.CancelScope()
        self._news = trio.Event()
        self._open: dict[str, Ask] = {}
        self._arrived: deque[Ask] = deque()
        self._leaving: deque[Ask] = deque()
        self._ahead: deque[SchedulerOutput] = deque()
        self._heard: list[list[WorkerEvent]] = [[] for _ in process.ranks]
        self._collected: list[WorkerEvent] = []
        self._sent = [0] * len(process.ranks)
        self._quarantined: Counter[int] = Counter()
        self._announced: dict[str, float] = {}
        self._loaded_tokens: dict[str, int] = {}
        self._has_stopped_lending = False
        self._steps_stood = 0
        self.sleep = Sleep(self, self._connectors)

    def _birth(self, rank: Rank) -> Birth:
        process, tp_rank = self.process, rank.tp_rank
        return Birth(
            host=process.address.host,
            port=process.address.port,
            life=process.life_name,
            scheduler_clock=process.listener_clock,
            worker_clock=rank.clock,
            memory=rank.memory,
            send=lambda commands: self._send(process.ranks[tp_rank], commands),
            make_actors=lambda: process.replace(process.ranks[tp_rank]),
            actors_gave_memory_back=lambda: process.ranks[tp_rank].has_given_memory_back,
            serve_anew=process.serve_anew,
            run=functools.partial(self._run_later, rank),
            stop_serving=process.stop_serving,
            draining=lambda: process.draining.value if process.draining is not None else Draining(lease_ns=0),
        )

    @property
    def lent_prefills(self) -> int:
        """What has to end before it has drained."""
        return self.scheduler_side._lends.counts().lent

    @property
    def scheduler_side(self) -> ConnectorScheduler:
        connector = self.scheduler.connector
        assert isinstance(connector, NixlConnector)
        return connector.scheduler_side

    def _run_later(self, rank: Rank, work: Callable[[], None]) -> Callable[[], bool]:
        """See `connector.worker.finishing.Run`."""
        done = False

        def do() -> None:
            nonlocal done
            if not rank.is_dead:
                work()
            done = True

        if self._knobs.device_is_late:
            self._requests.cover("a device is late")
            self.around.agenda.after(self._chance.uniform(0.0, DEVICE_SECONDS_MAX), do)
        else:
            do()
        return lambda: done

    async def run(self) -> None:
        """Until the process stops or dies; a stopped one makes no step any more."""
        process, scope = self.process, self._scope
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.run)
            with scope:
                await self._step_forever()

    def crash(self) -> None:
        """The process is gone, with all requests that it had."""
        self.process.kill()
        self._scope.cancel()
        self.around.oracles.forget_leases(self.owner)
        self.around.oracles.forget_pulls(self.name)
        for ask in list(self._open.values()):
            self._end(ask, ENGINE_DIED)

    # --- sleep ------------------------------------------------------------------------------------------------------

    def wake_core(self) -> None:
        """There is something to look at."""
        self._news.set()

    def begin_anew(self) -> None:
        """For peers this is another life; for the scheduler it is the same one."""
        self.around.oracles.forget_acquaintances(self.name)
        self._lives += 1
        self.process.begin_anew(self._lives)

    def note_abort(self, request_id: str) -> None:
        """The engine has ended the request, and its client hears of that."""
        if (ask := self._open.get(request_id)) is not None:
            self._end(ask, ABORTED)

    def cover_sleep(self, what: str, times: int = 1) -> None:
        self._requests.cover(f"{self.role} {what}", times)

    def complain_of_sleep(self, what: str) -> None:
        self.around.oracles.complain("sleep", f"{self.name} {what}")

    # --- clients ----------------------------------------------------------------------------------------------------

    def submit(self, ask: Ask) -> None:
        """A request has arrived; the engine looks at it between two steps."""
        self._requests.begin(ask)
        if self.process.has_died():
            self._requests.end(ask, ENGINE_DIED)
            return
        self._open[ask.request_id] = ask
        self._arrived.append(ask)
        self.wake_core()

    def leave(self, ask: Ask) -> None:
        """The client has gone; perhaps after its answer, as it happens."""
        if not self.process.has_died():
            self._leaving.append(ask)
            self.wake_core()

    def _end(self, ask: Ask, finish: str) -> None:
        del self._open[ask.request_id]
        self._requests.end(ask, finish)

    # --- steps ------------------------------------------------------------------------------------------------------

    async def _step_forever(self) -> None:
        try:
            while True:
                self.sleep.look()
                self._take_input()
                if not self._has_work:
                    if await self.sleep.falls_asleep():
                        continue
                    self._news = trio.Event()
                    await self._news.wait()
                    continue
                await self._stand_still()
                computed = await self._step()
                self._check_standstill(computed)
                if not computed and self.scheduler.has_requests():
                    await trio.sleep(self._chance.uniform(IDLE_SECONDS_MIN, IDLE_SECONDS_MAX))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.name}, line {frame.lineno}"
            self.around.oracles.complain("scheduler", f"vLLM's scheduler raised on {self.name}: {error!r} in {where}")
            self.crash()

    @property
    def _has_work(self) -> bool:
        return bool(self.scheduler.has_requests() or self._ahead)

    async def _stand_still(self) -> None:
        stopped = self.around.faults.hits(Kind.STOP_POLLING, self.name)
        if stopped is not None:
            self._requests.cover(f"{self.role} stands still")
            await trio.sleep_until(stopped.end_seconds)

    async def _step(self) -> bool:
        """Whether anything was computed, or scheduled to be."""
        if not self._knobs.overlaps:
            output = self.scheduler.schedule()
            await self._complete(output)
            return bool(output.total_num_scheduled_tokens > 0)
        computed = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            computed = bool(output.total_num_scheduled_tokens > 0)
            self._ahead.append(output)
            if len(self._ahead) < STEPS_AHEAD and (computed or self.scheduler.has_requests()):
                return computed
        await self._complete(self._ahead.popleft())
        return computed

    async def _complete(self, output: SchedulerOutput) -> None:
        self._cover(output)
        result = await self._execute(output)
        self._to_copy.popleft()
        self._let_go()
        if result.kv_connector_output is not None:
            self._check_loads(result.kv_connector_output)
        answers = self.scheduler.update_from_output(output, result)
        for answer in answers[0].outputs if answers else ():
            self._check_waited_for(answer, output)
            self._take_answer(answer)
        if self._drafter is not None and output.total_num_scheduled_tokens:
            self._cover_drafts(output, result)
            self._draft(self._drafter, list(output.num_scheduled_tokens))
        report = result.kv_connector_output.kv_connector_worker_meta if result.kv_connector_output else None
        if isinstance(report, WorkerReport) and report.stopped is not None:
            self._requests.cover(f"a worker stopped on {self.role}")
            self._has_stopped_lending = True
        self._check_blocks()

    def _draft(self, drafter: random.Random, request_ids: list[str]) -> None:
        """After a step: tokens that may follow, of which the first ones are right."""
        drafted: dict[str, list[int]] = {}
        for request_id in request_ids:
            ask, request = self._open.get(request_id), self.scheduler.requests.get(request_id)
            if ask is None or request is None:
                continue
            right = sequence(ask.sequence.prompt, ask.max_tokens + self._knobs.drafts).answer[
                request.num_output_tokens :
            ]
            count = drafter.randint(0, self._knobs.drafts)
            wrong = [(token + 1) % VOCABULARY_SIZE for token in right[count : self._knobs.drafts]]
            drafted[request_id] = right[:count] + wrong
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafted), list(drafted.values())))

    async def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The step on all ranks, which wait for each other, and what they report together."""
        seconds = self._chance.uniform(STEP_SECONDS_MIN, STEP_SECONDS_MAX)
        if len(self._runners) == 1:
            return await self._runners[0].execute(output, seconds)
        results: dict[int, ModelRunnerOutput] = {}

        async def execute(tp_rank: int) -> None:
            results[tp_rank] = await self._runners[tp_rank].execute(output, seconds)

        async with trio.open_nursery() as nursery:
            for tp_rank in range(len(self._runners)):
                nursery.start_soon(execute, tp_rank)
        outputs = [results[tp_rank] for tp_rank in range(len(self._runners))]
        for each in outputs:
            # What vLLM's executor gets from a worker that has nothing to say.
            each.kv_connector_output = each.kv_connector_output or KVConnectorOutput()
        result = self._aggregator.aggregate(outputs)
        assert result is not None
        reported = result.kv_connector_output
        assert reported is not None
        # As the lists of a single worker: in an order that is the same in every process.
        reported.finished_sending = sorted(reported.finished_sending or ())
        reported.finished_recving = sorted(reported.finished_recving or ())
        return result

    def _take_input(self) -> None:
        while self._arrived:
            ask = self._arrived.popleft()
            ask.comes_while_draining = not self.process.accepts_prefills
            self._requests.cover(f"{self.role} drains when a request comes", ask.comes_while_draining)
            if (self._has_stopped_lending or ask.comes_while_draining) and ask.left_to_decode:
                self._requests.cover("a prompt is computed whole, because nothing is lent")
                ask.leave_nothing()
            self.scheduler.add_request(_request(ask, self._hash_block_size))
        self._let_go()

    def _let_go(self) -> None:
        """End the requests whose clients have left, now or because of the status that the request has reached."""
        for ask in [ask for ask in self._open.values() if ask.abort_in is not None]:
            if self._status(ask) == ask.abort_in:
                self._abort(ask)
        for _ in range(len(self._leaving)):
            ask = self._leaving.popleft()
            if ask in self._arrived:
                self._leaving.append(ask)
            else:
                self._abort(ask)

    def _status(self, ask: Ask) -> str | None:
        request = self.scheduler.requests.get(ask.request_id)
        if request is None:
            return None
        if ask.request_id in self.scheduler.finished_recving_kv_req_ids:
            return LOADED
        return str(request.status.name)

    def _abort(self, ask: Ask) -> None:
        self._requests.cover(f"abort on {self.role} in {self._status(ask)}")
        self.scheduler.finish_requests([ask.request_id], RequestStatus.FINISHED_ABORTED)
        if ask.finish is None:
            self._end(ask, ABORTED)

    def _take_answer(self, answer: EngineCoreOutput) -> None:
        ask = self._open.get(answer.request_id)
        if ask is None:
            return
        self._requests.tell(ask, answer.new_token_ids)
        if answer.prefill_stats is not None:
            cached_tokens = answer.prefill_stats.num_local_cached_tokens
            self._requests.cover_prefix(ask, cached_tokens, self._shape.block_tokens, self.role)
        if answer.finish_reason is not None:
            ask.answer_params = answer.kv_transfer_params
            if ask.answer_params is not None and self._has_stopped_lending:
                self.around.oracles.complain("scheduler", f"{self.name} lends KV that a worker cannot serve")
            if ask.answer_params is not None and ask.comes_while_draining:
                self.around.oracles.complain("draining", f"{self.name} lends what came when it was to end")
            self._end(ask, str(answer.finish_reason))

    def _check_waited_for(self, answer: EngineCoreOutput, output: SchedulerOutput) -> None:
        """The step that ends a prompt that is lent to a decode engine is one of those that a worker waits for."""
        ask = self._open.get(answer.request_id)
        is_lent = answer.finish_reason is not None and answer.kv_transfer_params is not None
        if ask is None or not is_lent or not (ask.params or {}).get("do_remote_decode"):
            return
        self._requests.cover("a prompt was lent by the step that ended it")
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        if not metadata.ends_prompt_to_lend:
            self.around.oracles.complain(
                "scheduler", f"{self.name} lends {answer.request_id}, and no worker was told that its step may end it"
            )

    def _cover(self, output: SchedulerOutput) -> None:
        """Count what a test wants to have happened."""
        cover, scheduled = self._requests.cover, output.num_scheduled_tokens
        cover("several requests in a step", len(scheduled) > 1)
        cover(f"preemption on {self.role}", len(output.preempted_req_ids or ()))
        cover(f"prefix hit within a block on {self.role}", len(output.kv_cache_block_copies or ()))
        for new in output.scheduled_new_reqs:
            tokens = len(new.prompt_token_ids or ())
            cover(f"prompt in chunks on {self.role}", new.num_computed_tokens + scheduled[new.req_id] < tokens)
            cover(f"prompt below a block on {self.role}", tokens < self._shape.block_tokens)

    def _cover_drafts(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            taken = len(result.sampled_token_ids[result.req_id_to_index[request_id]]) - 1
            self._requests.cover(f"drafts taken on {self.role}", taken)
            self._requests.cover(f"drafts refused on {self.role}", len(drafts) - taken)

    # --- the connector ----------------------------------------------------------------------------------------------

    def _send(self, rank: Rank, commands: list[Command]) -> None:
        """A worker side hands commands to its actors. All ranks get the same; it is noted when the first one does."""
        before = max(self._sent)
        self._sent[rank.tp_rank] += 1
        if self._sent[rank.tp_rank] > before:
            for command in commands:
                self._note_command(command)

        def deliver() -> None:
            if not rank.is_dead:
                for command in commands:
                    rank.deliver(command)

        self.around.agenda.after(0.0, deliver)

    def _note_command(self, command: Command) -> None:
        oracles = self.around.oracles
        match command:
            case StartPull() | ReleaseUnread() | RejectPull():
                self._note_pull(command)
            case AbortPull(request_id=request_id):
                oracles.pulls[request_id].is_aborted = True
            case LeaseComputing(lease=lease):
                self._note_lease(lease)
            case LeaseGranted(lease=lease, fixed_seconds=fixed_seconds):
                if (self.owner, lease.request_id) not in oracles.leases:
                    self._note_lease(lease)
                now_ns = [rank.clock.now_ns() for rank in self.process.ranks]
                oracles.grant(self.owner, lease.request_id, now_ns, fixed_seconds)
            case TrackLease(request_id=request_id, lease=lease):
                self._announced[request_id] = trio.current_time()
                if not self._requests.asks[request_id].may_fail:
                    owner = self._requests.owners[lease.request_id]
                    oracles.take_over(owner, lease.request_id, self.name, request_id, self._shape.tp_size)
            case _:
                pass

    def _note_lease(self, lease: LeaseName) -> None:
        self._requests.owners[lease.request_id] = self.owner
        self.around.oracles.lend(
            [
                Lent(
                    request_id=lease.request_id,
                    number=lease.number,
                    owner=self.owner,
                    prefill=self.name,
                    tp_rank=tp_rank,
                )
                for tp_rank in range(self._shape.tp_size)
            ]
        )

    def _note_pull(self, command: StartPull | ReleaseUnread | RejectPull) -> None:
        request_id, now = command.request_id, trio.current_time()
        if request_id in self.around.oracles.pulls:
            self.around.oracles.complain("report once", f"{request_id} was started twice")
        pull = Pull(
            request_id=request_id,
            decode=self.name,
            prefill="",
            ranks=self._shape.tp_size,
            blocks=[] if isinstance(command, ReleaseUnread) else command.local_block_ids,
            awaited=not isinstance(command, ReleaseUnread),
            announced_seconds=self._announced.pop(request_id, now),
            started_seconds=now,
            owner="",
            remote_request_id="",
            may_fail=True,
        )
        if isinstance(command, RejectPull) and not self._requests.asks[request_id].may_fail:
            self.around.oracles.complain("params", f"{request_id} was refused: {command.failure}")
        if not isinstance(command, RejectPull):
            pull.prefill = engine_of(command.peer.host)
            pull.owner = self._requests.owners[command.lease.request_id]
            pull.remote_request_id = command.lease.request_id
            pull.may_fail = self._requests.asks[request_id].may_fail
            if isinstance(command, StartPull):
                self._loaded_tokens[request_id] = command.num_tokens or 0
                kind = classify(self._requests.asks[request_id].params)
                self._requests.cover("read back", kind == ParamsKind.REMOTE_DECODE)
                self._requests.cover("loaded by a link", kind == ParamsKind.REMOTE_PREFILL | ParamsKind.REMOTE_DECODE)
        self.around.oracles.start(pull)

    def hear(self, tp_rank: int, event: WorkerEvent) -> None:
        """The connector's actors emitted a worker event; the worker side of the rank learns of it at its next look."""
        match event:
            case ReceiveEnded(request_id=request_id, failure=failure):
                self.around.oracles.report(request_id, tp_rank, failure)
                self._requests.cover("quarantine", event.quarantined)
            case SendEnded(lease=lease, expired=expired):
                now_ns = self.process.ranks[tp_rank].clock.now_ns()
                self.around.oracles.free(self.owner, lease.request_id, tp_rank, now_ns, expired=expired)
            case _:
                pass
        self._heard[tp_rank].append(event)
        self._connectors[tp_rank].worker_side.ledger.record(event)

    def collects(self, tp_rank: int) -> None:
        """See `worker.Overseer`."""
        self._collected += self._heard[tp_rank]
        self._heard[tp_rank] = []

    def _check_loads(self, reported: KVConnectorOutput) -> None:
        """What the connector tells vLLM of its loads, before vLLM acts on it."""
        for request_id in reported.finished_recving or ():
            request = self.scheduler.requests.get(request_id)
            ask = self._open.get(request_id)
            if ask is None or request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                continue
            if request_id in reported.failed_recving:
                ask.has_failed_load = True
                continue
            self._requests.cover(f"loaded on {self.role}")
            # Of what was refused nothing was asked for, and yet vLLM would take it for the prompt's.
            blocks, tokens = self._blocks_of(request_id), self._loaded_tokens.get(request_id, ask.prompt_tokens)
            for rank in self.process.ranks:
                if wrong := ask.sequence.mismatches(rank.memory, blocks, tokens):
                    self.wrong_bytes(request_id, wrong, "when it was reported as loaded")

    # --- blocks -----------------------------------------------------------------------------------------------------

    @property
    def _held(self) -> list[dict[str, list[KVCacheBlock]]]:
        """By cache group and request."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return [manager.req_to_blocks for manager in managers]

    def _blocks_of(self, request_id: str) -> list[list[int]]:
        return [[block.block_id for block in held.get(request_id, ())] for held in self._held]

    def is_current(self, request_id: str, block_ids: list[list[int]]) -> bool:
        """See `worker.Overseer`. A window may have passed some of them since."""
        request = self.scheduler.requests.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            return False
        null = self._pool.null_block.block_id
        return all(
            len(now) >= len(then) and all(ours in (theirs, null) for ours, theirs in zip(now, then, strict=False))
            for now, then in zip(self._blocks_of(request_id), block_ids, strict=True)
        )

    def wrong_bytes(self, request_id: str, blocks: list[int], when: str) -> None:
        """See `worker.Overseer`."""
        self._requests.wrong_bytes(request_id, self.name, blocks, when)

    def _take_blocks(self, block_ids: list[int]) -> None:
        """The scheduler hands out blocks; what was in them is gone."""
        self._check_unwritten(block_ids, "hands out")
        self._forget(block_ids)

    def _forget(self, block_ids: list[int]) -> None:
        """But for those that a step has yet to copy elsewhere: the device does so before it writes there."""
        for rank, runner in zip(self.process.ranks, self._runners, strict=True):
            to_copy = runner.to_copy.union(*self._to_copy)
            rank.memory.forget([block_id for block_id in block_ids if block_id not in to_copy])

    def _free_blocks(self, blocks: list[KVCacheBlock]) -> None:
        """The scheduler gave up references. A block that the prefix cache knows keeps what it holds for now."""
        free = [block for block in blocks if block.ref_cnt == 0]
        self._check_unwritten([block.block_id for block in free], "frees")
        self._forget([block.block_id for block in free if block.block_hash is None])

    def _check_unwritten(self, block_ids: list[int], action: str) -> None:
        self.around.oracles.check_unwritten(self.name, block_ids, self.process.blocks_written_to(), action)

    def _check_blocks(self) -> None:
        """Every reference belongs to a request, to a step that is under way, to a quarantine, or to the far end of a
        window of a request that is lent or computed to be."""
        for event in self._collected:
            match event:
                case ReceiveEnded(quarantined=True):
                    self._quarantined.update(event.local_block_ids)
                case QuarantineLifted():
                    self._quarantined.subtract(event.local_block_ids)
                case _:
                    pass
        self._collected = []
        expected = [0] * self._pool.num_gpu_blocks
        for block_id, count in self._quarantined.items():
            expected[block_id] += count
        far_ends = self.scheduler_side._lends._far_ends.held
        for block_id in (block_id for blocks in far_ends.values() for block_id in blocks):
            expected[block_id] += 1
        held = [blocks for group in self._held for blocks in group.values()]
        for blocks in [*held, *(blocks for _, blocks in self.scheduler.deferred_frees)]:
            for block in blocks:
                expected[block.block_id] += not block.is_null
        found = [0 if block.is_null else block.ref_cnt for block in self._pool.blocks]
        if found != expected:
            wrong = [number for number, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
            detail = ", ".join(f"block {number}: {found[number]} of {expected[number]}" for number in wrong)
            self.around.oracles.complain("blocks", f"{self.name} counts wrong references: {detail}")
            self._quarantined.update({number: found[number] - expected[number] for number in wrong})
        strangers = set(far_ends).union(*self._held) - self.scheduler.requests.keys()
        if strangers:
            self.around.oracles.complain("blocks", f"{self.name}: {sorted(strangers)} are gone and hold blocks")

    @property
    def _blocks_in_use(self) -> int:
        """Out of the pool, whoever has them; without the null block."""
        return int(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())

    def _check_standstill(self, computed: bool) -> None:
        """Nobody is served for the sake of one that waits for blocks in quarantine or lent back, and not for others."""
        side = self.scheduler_side
        kept = side._kept
        in_use = self._blocks_in_use
        waiting = [
            request_id
            for request_id, request in self.scheduler.requests.items()
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and request_id not in side._loads._without_room
        ]
        may_serve = bool(waiting) and self.scheduler.pause_state is PauseState.UNPAUSED
        stands = may_serve and not computed and not kept.is_none and in_use == kept.quarantined + kept.lent_back
        self._steps_stood = self._steps_stood + 1 if stands else 0
        if self._steps_stood == STANDSTILL_STEPS:
            self.around.oracles.complain(
                "standstill",
                f"{self.name} serves nobody beside {in_use} kept blocks, and passes over none of {waiting}",
            )

    # --- at rest ----------------------------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """What should not be there when nobody wants anything any more."""
        side = self.scheduler_side
        counts = {
            "requests that load KV": len(side._loads._loads),
            "requests that are answered or lent": len(side._lends._granting._grants),
            "far ends of windows": len(side._lends._far_ends.held),
            "requests": len(self.scheduler.requests),
            "blocks in use": self._blocks_in_use,
        }
        for rank, connector in zip(self.process.ranks, self._connectors, strict=True):
            supervisor, ledger = rank.supervisor, connector.worker_side.ledger
            counts |= {
                f"READs on rank {rank.tp_rank}": rank.port.counts().reads,
                f"open leases on rank {rank.tp_rank}": len(supervisor._lease_keeper.leases()),
                f"busy peers on rank {rank.tp_rank}": sum(not each.is_unused for each in supervisor._peers.values()),
                f"receives in the ledger of rank {rank.tp_rank}": len(ledger._open_receives),
                f"sends in the ledger of rank {rank.tp_rank}": len(ledger._open_sends),
            }
        return [f"{self.name} has {count} {what}" for what, count in counts.items() if count]


def _request(ask: Ask, hash_block_tokens: int) -> Request:
    extra = None if ask.params is None else {"kv_transfer_params": ask.params}
    sampling = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True, extra_args=extra)
    if ask.stops_after is not None:
        sampling.stop_token_ids = ask.answer[-1:]
    return Request(
        request_id=ask.request_id,
        prompt_token_ids=[*ask.sequence.prompt, *ask.left_to_decode],
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=trio.current_time(),
        block_hasher=block_hasher(hash_block_tokens),
        priority=ask.priority,
    )


def _watch(
    pool: BlockPool,
    *,
    on_take: Callable[[list[int]], None],
    on_free: Callable[[list[KVCacheBlock]], None],
) -> None:
    """Look over the shoulder of vLLM's block pool, which vLLM makes itself."""
    take, free = pool.get_new_blocks, pool.free_blocks

    def watched_take(count: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = take(count)
        on_take([block.block_id for block in blocks])
        return blocks

    def watched_free(ordered: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered)
        free(blocks)
        on_free(blocks)

    pool.get_new_blocks, pool.free_blocks = watched_take, watched_free


def _watch_copies(manager: KVCacheManager, on_schedule: Callable[[set[int]], None]) -> None:
    """Hear, with each step that is scheduled, from which blocks it will copy. vLLM may give them up with that."""
    take = manager.take_kv_cache_block_copies

    def watched_take() -> tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]:
        copies, retained = take()
        on_schedule({copy.src_block_id for copy in copies})
        return copies, retained

    manager.take_kv_cache_block_copies = watched_take
