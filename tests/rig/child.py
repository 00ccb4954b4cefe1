"""The engine process: vLLM's engine core around a connector, its step loop, and the test's commands.

The loop is the one of vLLM's `EngineCoreProc`: take what has come in, make a step while there is anything to do (leases
count), and sleep a millisecond after a step that computed nothing. The process is forked from one that has imported
vLLM (`imported`), which reads its environment when it needs it; the test's own process imports this module without it.

The process ends when told to, when the test's end of the pipe closes, or when a step raises; in the last case it
reports the traceback first, because a real engine would have died of it too.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.rig import lan, messages
from tests.rig.call_recorder import CallRecorder
from tests.rig.inside import Inside
from tests.rig.messages import EngineOptions, Forward, Holdings, Report, RequestOutcome, RequestSpec
from tests.rig.process import native_threads, open_files, resident_bytes, thread_names

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    from tests.rig.worker import RigWorker

_IDLE_STEP_SECONDS = 0.001


def main(options: EngineOptions, connection: Connection, model_directory: Path, log_path: Path) -> None:
    """Entry point of the process; everything it prints goes to `log_path`."""
    _redirect_output(log_path)
    if options.machine is not None:
        lan.enter(options.machine)
    _set_environment(options, log_path.parent)
    try:
        EngineProcess(options, connection, model_directory).run()
    except (EOFError, BrokenPipeError):
        print("the test has gone; ending", file=sys.stderr)  # noqa: T201  (the log is all that is left)
    except BaseException:
        text = traceback.format_exc()
        print(text, file=sys.stderr)  # noqa: T201
        connection.send(messages.EngineDied(text))
    # Daemon threads of a connector that has died must not keep the process; the test waits for its end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _redirect_output(log_path: Path) -> None:
    log = os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _set_environment(options: EngineOptions, directory: Path) -> None:
    os.environ["TMPDIR"] = str(directory)  # where torch's rendezvous file is left behind
    tempfile.tempdir = None  # looked up already when vLLM was imported
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = options.side_channel_host
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(options.side_channel_port)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the CPU platform refuses the uniprocess executor otherwise
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.update(options.environment)


def _vllm_config(options: EngineOptions, model_directory: Path) -> VllmConfig:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model_directory),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        block_size=options.block_size_tokens,
        num_gpu_blocks_override=options.blocks,
        # One block is never handed out, and a decode engine needs room for the first token it samples.
        max_model_len=(options.blocks - 2) * options.block_size_tokens,
        max_num_batched_tokens=options.max_batched_tokens,
        max_num_seqs=options.max_requests,
        enable_chunked_prefill=True,
        distributed_executor_backend="uni",
        worker_cls="tests.rig.worker.RigWorker",
        kv_transfer_config=KVTransferConfig(
            kv_connector=options.connector.kv_connector,
            kv_connector_module_path=options.connector.kv_connector_module_path,
            engine_id=options.engine_id,
            kv_role=options.kv_role,
            kv_buffer_device="cpu",
            enable_permute_local_kv=options.permutes,
            kv_connector_extra_config=options.extra_config,
            kv_load_failure_policy=options.kv_load_failure_policy,
        ),
    ).create_engine_config()


@dataclass
class _Live:
    """A request between its submission and its outcome."""

    request: Request
    submitted_ns: int
    load_started_ns: int | None = None
    output_token_ids: list[int] = field(default_factory=list)
    local_cached_tokens: int = 0
    external_cached_tokens: int = 0


class EngineProcess:
    """An engine core, and the pipe to the test."""

    def __init__(self, options: EngineOptions, connection: Connection, model_directory: Path) -> None:
        import torch
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from tests.rig.accelerator import pretend_accelerator
        from tests.rig.attention import OrderedAttention
        from tests.rig.forward import forward_pass
        from tests.rig.worker import RigWorker

        torch.set_num_threads(1)  # two engines share the machine; neither may use it up with a copy
        self._connection = connection
        self._recorder = CallRecorder()
        if options.record_calls:
            self._recorder.install()
        config = _vllm_config(options, model_directory)
        config.cache_config.kv_cache_layout = options.layout
        if options.staged:
            pretend_accelerator()
        if options.keeps_token_order:
            RigWorker.attention_backend = OrderedAttention
        RigWorker.computes_on_cpus = options.computes_on_cpus
        self._core: EngineCore = EngineCore(config, UniProcExecutor, log_stats=False)
        self._worker: RigWorker = self._core.model_executor.driver_worker.worker
        self._worker.before_load = self._note_loads
        self._computes = options.forward is not Forward.NOTHING  # then each step counts as one that computed something
        self._worker.forward = forward_pass(options)
        self._inside = Inside.of(self._worker.connector, self._core.scheduler.connector)
        self._live: dict[str, _Live] = {}
        self._paused = False
        self._open = True
        self._recorder.reset()
        layout = self._core.vllm_config.cache_config.kv_cache_layout
        start_ns = self._worker.probe.start_ns
        self._send(messages.Ready(str(layout), self._worker.page_length_bytes, options.blocks, start_ns))

    def run(self) -> None:
        """Serve until told to shut down."""
        while self._open:
            idle = self._paused or not self._core.scheduler.has_requests()
            while self._open and self._connection.poll(None if idle else 0):
                self._handle(self._connection.recv())
                idle = False
            if self._open and not self._paused and self._core.scheduler.has_requests():
                self._step()
        self._shut_down()

    def _send(self, report: Report) -> None:
        self._connection.send(report)

    # ---- steps

    def _step(self) -> None:
        outputs, executed = self._core.step_fn()
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                self._take_output(output)
        self._core.post_step(executed)
        if not executed and not self._computes and self._core.scheduler.has_requests():
            time.sleep(_IDLE_STEP_SECONDS)

    def _note_loads(self, now_ns: int) -> None:
        """Right before `start_load_kv`: requests that the scheduler has just parked for remote KV start loading now."""
        from vllm.v1.request import RequestStatus

        for live in self._live.values():
            if live.load_started_ns is None and live.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                live.load_started_ns = now_ns

    def _take_output(self, output: EngineCoreOutput) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        live.output_token_ids.extend(output.new_token_ids)
        if output.prefill_stats is not None:
            live.local_cached_tokens = output.prefill_stats.num_local_cached_tokens
            live.external_cached_tokens = output.prefill_stats.num_external_cached_tokens
        if output.finish_reason is not None:
            self._end(output.request_id, str(output.finish_reason), output.kv_transfer_params)

    def _end(self, request_id: str, finish: str, params: dict[str, Any] | None) -> None:
        live, probe = self._live.pop(request_id), self._worker.probe
        reported_ns = probe.received_ns.get(request_id)
        failed = request_id in probe.failed
        self._send(
            RequestOutcome(
                request_id=request_id,
                finish=finish,
                output_token_ids=live.output_token_ids,
                kv_transfer_params=params,
                received=reported_ns is not None and not failed,
                receive_failed=failed,
                mismatched_pages=probe.mismatched_pages.get(request_id, 0),
                checked_pages=probe.checked_pages.get(request_id, 0),
                local_cached_tokens=live.local_cached_tokens,
                external_cached_tokens=live.external_cached_tokens,
                preemptions=live.request.num_preemptions,
                block_ids=self._worker.block_ids(request_id),
                submitted_ns=live.submitted_ns,
                load_started_ns=live.load_started_ns,
                received_ns=reported_ns,
                ended_ns=time.monotonic_ns(),
            )
        )
        probe.forget(request_id)

    # ---- commands

    def _handle(self, command: messages.Command) -> None:
        match command:
            case messages.Submit(requests):
                for spec in requests:
                    self._submit(spec)
            case messages.Abort(request_ids):
                self._abort(request_ids)
            case messages.SetPaused(paused):
                self._paused = paused
            case messages.OverwriteFreeBlocks(ticket):
                self._overwrite_free_blocks(ticket)
            case messages.ArrangeFreeBlocks(ticket, shuffle_seed):
                self._arrange_free_blocks(ticket, shuffle_seed)
            case messages.DamageBlock(ticket, block_id):
                self._worker.damage_block(block_id)
                self._send(self._snapshot(ticket))
            case messages.TakeSnapshot(ticket, reset_times):
                self._send(self._snapshot(ticket))
                if reset_times:
                    self._worker.probe.reset_times()
            case messages.Inspect(ticket, reset_calls):
                self._send(self._inspection(ticket))
                if reset_calls:
                    self._recorder.reset()
            case messages.CrashActors():
                assert self._inside is not None, "only our connector has actors"
                self._inside.crash_actors()
            case messages.Shutdown():
                self._open = False

    def _submit(self, spec: RequestSpec) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        extra: dict[str, Any] = {"rig_check": spec.check.value}
        if spec.kv_transfer_params is not None:
            extra["kv_transfer_params"] = spec.kv_transfer_params
        request, _wave = self._core.preprocess_add_request(
            EngineCoreRequest(
                request_id=spec.request_id,
                prompt_token_ids=spec.prompt_token_ids,
                mm_features=None,
                sampling_params=SamplingParams(
                    temperature=0.0, max_tokens=spec.max_tokens, ignore_eos=True, extra_args=extra
                ),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )
        self._live[spec.request_id] = _Live(request, time.monotonic_ns())
        self._core.add_request(request)

    def _abort(self, request_ids: tuple[str, ...]) -> None:
        open_ids = [request_id for request_id in request_ids if request_id in self._live]
        self._core.abort_requests(open_ids)
        # vLLM reports no outcome of an abort: the front end that asked for it knows.
        for request_id in open_ids:
            self._end(request_id, "abort", None)

    def _overwrite_free_blocks(self, ticket: int) -> None:
        self._core.scheduler.reset_prefix_cache()
        pool = self._core.scheduler.kv_cache_manager.block_pool
        block_ids = [block.block_id for block in pool.blocks if block.ref_cnt == 0 and not block.is_null]
        self._worker.overwrite_blocks(block_ids)
        self._send(messages.FreeBlocks(ticket, len(block_ids)))

    def _arrange_free_blocks(self, ticket: int, shuffle_seed: int | None) -> None:
        """Take all blocks off the queue that the scheduler takes them from, and put them back in another order."""
        queue = self._core.scheduler.kv_cache_manager.block_pool.free_block_queue
        blocks = sorted(queue.popleft_n(queue.num_free_blocks), key=lambda block: block.block_id)
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(blocks)
        queue.append_n(blocks)
        self._send(messages.FreeBlocks(ticket, len(blocks)))

    def _snapshot(self, ticket: int) -> messages.Snapshot:
        probe, scheduler = self._worker.probe, self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return messages.Snapshot(
            ticket=ticket,
            start_load_kv=probe.start_load_kv,
            get_transfer_results=probe.get_transfer_results,
            forward=probe.forward,
            step_wall_ns_max=probe.step_wall_ns_max,
            steps=probe.steps,
            free_blocks=pool.get_num_free_blocks(),
            blocks=pool.num_gpu_blocks,
            requests={request_id: request.status.name for request_id, request in scheduler.requests.items()},
            threads=thread_names(),
            native_threads=native_threads(),
            open_files=len(open_files()),
            resident_bytes=resident_bytes(),
            cpu_seconds=time.process_time(),
            switch_interval_seconds=sys.getswitchinterval(),
        )

    def _inspection(self, ticket: int) -> messages.Inspection:
        scheduler = self._core.scheduler
        manager = scheduler.kv_cache_manager
        owned = {block for request_id in scheduler.requests for block in manager.get_block_ids(request_id)[0]}
        held = {block.block_id for block in manager.block_pool.blocks if block.ref_cnt > 0 and not block.is_null}
        return messages.Inspection(
            ticket=ticket,
            holdings=None if self._inside is None else self._inside.holdings(),
            engine_thread_calls=self._recorder.of_engine_thread(),
            other_thread_calls=self._recorder.of_other_threads(),
            unowned_blocks=frozenset(held - owned),
        )

    def _shut_down(self) -> None:
        port = None if self._inside is None else self._inside.nixl_port
        before = self._worker.files_before_connector
        started = time.monotonic()
        self._core.shutdown()
        seconds = time.monotonic() - started
        holdings: Holdings | None = None
        if port is not None:
            counts = port.counts()
            holdings = Holdings(counts.remote_agents, counts.descriptor_lists, counts.reads)
        left_open = tuple(sorted(set(open_files().values()) - before))
        self._send(messages.Closed(seconds, thread_names(), left_open, holdings))
