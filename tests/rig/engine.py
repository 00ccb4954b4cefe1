"""The test's handle of one engine process.

Commands are sent as they come; reports are read by whoever waits for one, and the others are kept. There is no
thread: a handle belongs to one thread of the test. Every wait has a deadline, and fails at once, with the end of the
engine's log, when the process has died. The deadline of a wait is generous: it tells a hang from slowness, it
measures nothing.

A frozen process (`freeze`) does not run at all, as a host that hangs; a paused one (`pause_steps`) runs, and makes no
engine step; a killed one is gone without a word.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.rig import messages
from tests.rig.child import main
from tests.rig.content import VOCABULARY_SIZE
from tests.rig.messages import (
    Check,
    Closed,
    ConnectorChoice,
    EngineOptions,
    Inspection,
    Ready,
    RequestOutcome,
    RequestSpec,
    Snapshot,
)
from tests.rig.network import free_port
from tests.rig.process import stop_process

START_SECONDS = 240.0
"""An engine process needs about ten seconds alone on a quiet machine, nearly all of it imports; more on one
that is busy."""
WAIT_SECONDS = 60.0
CLOSE_SECONDS = 30.0
_LOG_TAIL_CHARACTERS = 3000


class RigError(Exception):
    """The engine process has died, or did not answer in time."""


def _write_model_config(options: EngineOptions, directory: Path) -> Path:
    """The directory of a Llama that is never computed: only the shape of its KV cache matters."""
    heads, head_dim = options.kv_heads, options.head_dim
    model_directory = directory / f"model-{options.layers}x{heads}x{head_dim}"
    if model_directory.exists():  # an engine that starts may be reading it
        return model_directory
    model_directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": heads * head_dim,
        "intermediate_size": heads * head_dim,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "bfloat16",
    }
    (model_directory / "config.json").write_text(json.dumps(config))
    return model_directory


class EngineRig:
    """One engine process. Use as a context manager, or call `start` and `close`."""

    def __init__(self, options: EngineOptions, directory: Path) -> None:
        """Prepare an engine; its log will be a file in `directory`.

        Engines that are to work together need the same directory: the model's path is part of what they compare when
        they meet, and the model's configuration is written there.
        """
        self.options = options
        self.log_path = directory / f"{options.engine_id}.log"
        self.ready: Ready | None = None
        self.closed: Closed | None = None
        """What the process said when it shut down in an orderly way."""
        # Forked from a process that has imported vLLM and started nothing: that takes eight seconds, once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.rig.imported"])
        self._connection, self._child_end = context.Pipe()
        self._process = context.Process(
            target=main,
            args=(options, self._child_end, _write_model_config(options, directory), self.log_path),
            name=options.engine_id,
            daemon=True,
        )
        self._outcomes: dict[str, RequestOutcome] = {}
        self._answers: dict[int, Snapshot | Inspection | messages.FreeBlocks] = {}
        self._ticket = 0
        self._frozen = False

    # ---- life

    def start(self) -> EngineRig:
        """Start the process and return; `wait_ready` waits until it serves."""
        self._process.start()
        self._child_end.close()
        return self

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> Ready:
        """Wait until the engine serves.

        Raises:
            RigError: it died (a connector that refuses its configuration does that), or took too long.
        """
        self._wait(lambda: self.ready is not None, timeout_seconds, "be ready")
        assert self.ready is not None
        return self.ready

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> Closed | None:
        """End the process, in an orderly way if it still can, by force if not; safe to call twice.

        Returns:
            What it said when it shut down, or None when it was dead already or had to be killed.
        """
        if self._process.pid is None:
            return None
        try:
            self._close_orderly(timeout_seconds)
        finally:
            if self._process.is_alive():
                self._process.kill()
            self._process.join(CLOSE_SECONDS)
            self._connection.close()
        return self.closed

    def _close_orderly(self, timeout_seconds: float) -> None:
        if not self._process.is_alive() or self._connection.closed:
            return
        with contextlib.suppress(RigError, OSError):
            self.thaw()
            self._connection.send(messages.Shutdown())
            self._wait(lambda: self.closed is not None, timeout_seconds, "shut down")
            self._process.join(CLOSE_SECONDS)

    def kill(self) -> float:
        """SIGKILL: the peer that ends without a word. Its sockets close when its memory is unmapped, which may take
        seconds.

        Returns:
            How many it took.
        """
        started = time.monotonic()
        self._process.kill()
        self._process.join(CLOSE_SECONDS)
        return time.monotonic() - started

    def freeze(self) -> None:
        """SIGSTOP: nothing of the process runs, its sockets stay open."""
        self._frozen = True
        stop_process(self.process_id)

    def thaw(self) -> None:
        """Undo `freeze`; nothing when the process has ended meanwhile."""
        if self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process_id, signal.SIGCONT)
            self._frozen = False

    @property
    def process_id(self) -> int:
        assert self._process.pid is not None, "the engine was not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def log_tail(self) -> str:
        """The end of what the process printed."""
        if not self.log_path.exists():
            return "(no log)"
        return self.log_path.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:]

    def __enter__(self) -> EngineRig:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- requests

    def submit(self, *requests: RequestSpec) -> None:
        """Hand requests to the engine; all of them enter the scheduler before its next step."""
        self._send(messages.Submit(requests))

    def wait(self, request_id: str, timeout_seconds: float = WAIT_SECONDS) -> RequestOutcome:
        """Wait for a request's outcome, and forget it.

        Raises:
            RigError: none came in time, or the engine died.
        """
        self._wait(lambda: request_id in self._outcomes, timeout_seconds, f"end request {request_id}")
        return self._outcomes.pop(request_id)

    def wait_all(self, request_ids: Sequence[str], timeout_seconds: float = WAIT_SECONDS) -> list[RequestOutcome]:
        """Outcomes of several requests, in the order given, all within one deadline."""
        wanted = set(request_ids)
        self._wait(lambda: wanted <= self._outcomes.keys(), timeout_seconds, f"end {len(wanted)} requests")
        return [self._outcomes.pop(request_id) for request_id in request_ids]

    def has_ended(self, request_id: str) -> bool:
        """Whether a request's outcome has arrived; does not wait."""
        self._drain(0)
        return request_id in self._outcomes

    def prefill(self, request_id: str, prompt_token_ids: list[int]) -> dict[str, Any]:
        """Compute a prompt's KV for a remote decode; the parameters that a router would hand to the decode engine."""
        return self.prefill_all({request_id: prompt_token_ids})[request_id]

    def prefill_all(self, prompts: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
        """`prefill` for several prompts at once, by request id."""
        wish = {"do_remote_decode": True, "do_remote_prefill": False}
        self.submit(*(RequestSpec(name, tokens, kv_transfer_params=dict(wish)) for name, tokens in prompts.items()))
        params: dict[str, dict[str, Any]] = {}
        for outcome in self.wait_all(list(prompts)):
            if outcome.kv_transfer_params is None:
                raise RigError(f"prefill of {outcome.request_id} ended {outcome.finish!r} without transfer parameters")
            # They reach the decode engine as JSON; tuples do not survive that, and must not be relied on here.
            params[outcome.request_id] = json.loads(json.dumps(outcome.kv_transfer_params))
        return params

    def decode(
        self, request_id: str, prompt_token_ids: list[int], params: dict[str, Any] | None, max_tokens: int = 1
    ) -> RequestOutcome:
        """Submit one request, with a prefill engine's parameters if any, and wait for its outcome."""
        self.submit(RequestSpec(request_id, prompt_token_ids, max_tokens, params, Check.EVERY_BYTE))
        return self.wait(request_id)

    def abort(self, *request_ids: str) -> None:
        """Abort requests; each gets an outcome with finish "abort" unless it has ended before."""
        self._send(messages.Abort(request_ids))

    # ---- the engine

    def pause_steps(self) -> None:
        """Make no engine step until `resume_steps`; commands are still taken."""
        self._send(messages.SetPaused(True))

    def resume_steps(self) -> None:
        """Undo `pause_steps`."""
        self._send(messages.SetPaused(False))

    def overwrite_free_blocks(self) -> int:
        """Fill all blocks that no request owns with bytes that are nobody's; how many there were.

        The prefix cache is forgotten with them, as far as vLLM allows (not while a request owns blocks).
        """
        self._ticket += 1
        ticket = self._ticket
        self._send(messages.OverwriteFreeBlocks(ticket))
        answer = self._answer(ticket)
        assert isinstance(answer, messages.FreeBlocks)
        return answer.blocks

    def damage_block(self, block_id: int) -> None:
        """Change one bit of a block, as faulty memory does, or a network card on the way."""
        self._ticket += 1
        ticket = self._ticket
        self._send(messages.DamageBlock(ticket, block_id))
        assert isinstance(self._answer(ticket), Snapshot)

    def arrange_free_blocks(self, shuffle_seed: int | None = None) -> int:
        """Have free blocks handed out in rising order, or shuffled as in a pool that has served for long; their number.

        What is free now: blocks that a request gives back later come behind them.
        """
        self._ticket += 1
        ticket = self._ticket
        self._send(messages.ArrangeFreeBlocks(ticket, shuffle_seed))
        answer = self._answer(ticket)
        assert isinstance(answer, messages.FreeBlocks)
        return answer.blocks

    def snapshot(self, *, reset_times: bool = False) -> Snapshot:
        """The engine's state between two steps; `reset_times` starts its connector times anew after it."""
        self._ticket += 1
        ticket = self._ticket
        self._send(messages.TakeSnapshot(ticket, reset_times))
        answer = self._answer(ticket)
        assert isinstance(answer, Snapshot)
        return answer

    def inspect(self, *, reset_calls: bool = False) -> Inspection:
        """What the connector holds, and who has called NIXL and ZMQ since the last reset."""
        self._ticket += 1
        ticket = self._ticket
        self._send(messages.Inspect(ticket, reset_calls))
        answer = self._answer(ticket)
        assert isinstance(answer, Inspection)
        return answer

    def crash_actors(self) -> None:
        """Make the actors of our connector fail, as a bug in them would."""
        self._send(messages.CrashActors())

    def wait_until_idle(self, timeout_seconds: float = WAIT_SECONDS) -> Snapshot:
        """Wait until the scheduler knows no request any more, which on a prefill engine includes blocks on loan."""
        deadline = time.monotonic() + timeout_seconds
        while (snapshot := self.snapshot()).requests:
            if time.monotonic() > deadline:
                raise RigError(f"{self.options.engine_id} still has {snapshot.requests} after {timeout_seconds} s")
            time.sleep(0.01)
        return snapshot

    def wait_until_whole(self, timeout_seconds: float = WAIT_SECONDS) -> Snapshot:
        """Wait until the scheduler knows no request and every block is free again.

        Raises:
            RigError: some block is still held after `timeout_seconds`.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            snapshot = self.wait_until_idle(max(0.0, deadline - time.monotonic()))
            if snapshot.free_blocks == snapshot.blocks - 1:  # one block is never handed out
                return snapshot
            if time.monotonic() > deadline:
                free = f"{snapshot.free_blocks} of {snapshot.blocks - 1} blocks free"
                raise RigError(f"{self.options.engine_id} has {free} after {timeout_seconds} s")
            time.sleep(0.01)

    # ---- the pipe

    def _send(self, command: messages.Command) -> None:
        try:
            self._connection.send(command)
        except OSError as error:
            raise self._dead("took no command") from error

    def _answer(self, ticket: int) -> Snapshot | Inspection | messages.FreeBlocks:
        self._wait(lambda: ticket in self._answers, WAIT_SECONDS, "answer")
        return self._answers.pop(ticket)

    def _wait(self, arrived: Callable[[], bool], timeout_seconds: float, what: str) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not arrived():
            left = deadline - time.monotonic()
            if left <= 0:
                raise RigError(f"{self.options.engine_id} did not {what} within {timeout_seconds} s\n{self.log_tail()}")
            self._drain(left)

    def _drain(self, timeout_seconds: float) -> None:
        """Take all reports that are there, waiting for the first."""
        try:
            while self._connection.poll(timeout_seconds):
                self._take(self._connection.recv())
                timeout_seconds = 0
        except (EOFError, OSError) as error:
            raise self._dead("ended") from error

    def _take(self, report: messages.Report) -> None:
        match report:
            case Ready():
                self.ready = report
            case RequestOutcome():
                self._outcomes[report.request_id] = report
            case Snapshot() | Inspection() | messages.FreeBlocks():
                self._answers[report.ticket] = report
            case Closed():
                self.closed = report
            case messages.EngineDied(text):
                raise RigError(f"{self.options.engine_id} died\n{text}")

    def _dead(self, what: str) -> RigError:
        self._process.join(1.0)
        return RigError(f"{self.options.engine_id} {what} (exit code {self._process.exitcode})\n{self.log_tail()}")


@contextlib.contextmanager
def engine_pair(
    connector: ConnectorChoice,
    directory: Path,
    *,
    decode_connector: ConnectorChoice | None = None,
    prefill_options: dict[str, Any] | None = None,
    decode_options: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[EngineRig, EngineRig]]:
    """A prefill and a decode engine, started together and ended whatever happens.

    Args:
        connector: of both engines, or of the prefill engine alone when `decode_connector` is given.
        directory: for their logs.
        options: fields of `EngineOptions` for both; `prefill_options` and `decode_options` override them for one.
    """
    with contextlib.ExitStack() as stack:
        engines = []
        for choice, role, own in (
            (connector, "kv_producer", prefill_options),
            (decode_connector or connector, "kv_consumer", decode_options),
        ):
            fields = {"connector": choice, "kv_role": role, "side_channel_port": free_port(), **options, **(own or {})}
            engines.append(stack.enter_context(EngineRig(EngineOptions(**fields), directory)))
        for engine in engines:
            engine.wait_ready()
        yield engines[0], engines[1]
