"""Real vLLM API servers as child processes, for the end-to-end tests and the demo.

Each engine is one process group with a log file of its own; pinned to one core, because two engines that share cores
slow each other down more than their number says. `Engine` starts, waits for, stops and kills one of them; `EngineSet`
is the context manager that ends all of them whatever happens inside.

Nothing started here may outlive the program that started it. Three nets, each for what the one before cannot see: the
context manager (an exception, Ctrl-C), `atexit` (a forgotten engine), and the reaper (`tests.e2e.reaper`), a small
process that reads the process groups to end from a pipe and ends them when the pipe closes (this program was killed
with SIGKILL).
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from tests.e2e import reaper
from tests.e2e.calm import CALM_POLLING, calm_environment
from tests.e2e.serve import CHANGES, ON_CUDA, ONE_THREAD, ForkedServer
from tests.rig.network import free_port
from tests.rig.process import wait_stopped

LOOPBACK = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]

START_TIMEOUT_SECONDS = 240.0
STOP_TIMEOUT_SECONDS = 15.0
STOP_AFTER_ERROR_TIMEOUT_SECONDS = 3.0
"""An engine that is still starting does not listen to SIGTERM, and nobody wants to wait for it after Ctrl-C."""
KILL_TIMEOUT_SECONDS = 60.0
"""The kernel takes seconds to take a killed process down, on a busy machine."""
POLL_SECONDS = 0.2
LOG_TAIL_LINES = 25
WORKER_LOST = "WorkerProc initialization failed"
WORKER_RAISED = "WorkerProc failed to start"
CONNECTOR_MADE = "Creating v1 connector"
"""What vLLM logs."""
TROUBLE = re.compile(r"ERROR|Traceback|Fatal Python error|terminate called|Killed")
TROUBLE_LINES = 25
"""What comes last in a log is what followed from the cause, in several processes; so from the first sign of it too."""

BLOCK_SIZE_TOKENS = 32
"""Smallest block that vLLM's CPU attention takes."""

ENVIRONMENT_ON_CUDA = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
}
"""float32 with products of all their bits, or answers would differ with how prompts are cut into steps; and what vLLM
sets by itself on CPUs only."""
OVER_TCP = "tcp,self,cuda_copy" if ON_CUDA else "tcp,self"
"""For UCX_TLS: READs that need the other side's help, however near it is."""
SHARE_OF_DEVICE = 0.05
"""That has to be free when an engine starts. What its KV cache takes is said apart."""

KvRole = Literal["kv_producer", "kv_consumer", "kv_both"]
LoadFailurePolicy = Literal["fail", "recompute"]
StartProgress = Callable[[Sequence["Engine"], float], None]
"""Called several times a second while engines start, with all of them and the seconds since the start."""

START_PHASES = (
    ("Started server process", "up"),
    ("(VllmWorker", "its worker loads the model and allocates the KV cache"),
    ("(EngineCore", "starting the engine core"),
    ("(APIServer", "reading the configuration"),
)
"""What a server's log contains once it has come this far, the furthest first."""


class EngineFailed(Exception):
    """An engine ended or did not become healthy; the message holds the end of its log."""


HOST_OFFLOADING = {"spec_name": "HostOffloadingSpec", "spec_module_path": "tests.e2e.host_offloading"}
OFFLOADING_BYTES = 1 << 29
"""Of host memory, for `beside_offloading`."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What one engine is started with. Ports are part of it: starting the same options again is a restart in place."""

    name: str
    """For people and for the log file."""
    model: Path
    logs: Path
    """Folder for the log file."""
    core: int = 0
    """Where its only worker runs; with more than one they take the cores from here on, in turn."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    """More than one needs the role of a producer."""
    data_parallel_size: int = 1
    """Each with ranks of its own; the handshakes of the n-th are served n ports above `side_channel_port`."""
    block_size: int = BLOCK_SIZE_TOKENS
    dtype: Literal["float32", "bfloat16"] = "float32"
    eager: bool = True
    staged_on_host: bool = False
    """On a device: KV is transferred from a buffer on the host into another one."""
    connector: Literal["actor", "plugin", "builtin"] | None = "actor"
    """This project's connector by its module path, or by the name that its plug-in registers, or vLLM's own; None: an
    engine that transfers nothing."""
    module_path: str = "connector"
    """Where that path leads; a test may put a class of its own in between."""
    beside_offloading: Literal["before", "after"] | None = None
    """Combined with vLLM's `OffloadingConnector`, and named before it or after it."""
    kv_role: KvRole = "kv_both"
    engine_id: str | None = None
    """None: vLLM draws one at each start."""
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """kv_connector_extra_config."""
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    trace_directory: Path | None = None
    """Where this project's connector writes its state transitions."""
    attention_backend: str | None = None
    """None: what vLLM prefers on this machine. For latent attention that depends on whether the machine has AMX."""
    prefix_caching: bool = True
    max_num_batched_tokens: int | None = None
    """Smaller than a prompt: the prompt is prefilled in chunks."""
    context_tokens: int = 4096
    kv_cache_gib: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Further arguments of the API server."""
    calm_polling: bool = False
    """For vLLM's own connector, whose NIXL thread otherwise polls as fast as it can, a core for each rank (`calm`)."""
    changes: str | None = None
    """Module that changes vLLM in the engine's processes (`tests.e2e.after_import`); for engines that are forked."""
    forks: bool = True
    """Whether its processes are forked, which starts it in a third of the time (`tests.e2e.serve`)."""
    host: str = LOOPBACK
    """Its address, for clients and for other engines."""
    machine: int | None = None
    """Process whose network it uses (`tests.rig.lan`), where it has this address; for engines that are forked."""
    http_port: int = field(default_factory=free_port)
    side_channel_port: int = field(default_factory=free_port)

    @property
    def side_channel(self) -> tuple[str, int]:
        """Its address."""
        return self.host, self.side_channel_port

    def start(self, log_path: Path) -> ForkedServer | subprocess.Popen[bytes]:
        """The server, in a process group of its own; its output is appended to the log file."""
        if self.forks:
            return ForkedServer(self.server_arguments(), self.process_environment(), log_path, self.machine)
        assert self.machine is None
        # `python -m`, not `vllm serve`: the command looks its version up under the distribution name vllm.
        return self.start_command(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self.server_arguments()], log_path
        )

    def start_command(self, command: Sequence[str], log_path: Path) -> subprocess.Popen[bytes]:
        """A program of its own."""
        return _in_a_group(command, self.process_environment(), log_path)

    def server_arguments(self) -> list[str]:
        """Of the API server's command line."""
        command = ["--model", str(self.model), "--served-model-name", "tiny", "--dtype", self.dtype]
        command += ["--host", self.host, "--port", str(self.http_port), "--seed", "0"]
        if self.eager and self.pipeline_parallel_size == 1:
            command += ["--enforce-eager"]
        elif self.eager:
            # Later stages make their input buffers in the warm-up, which vLLM leaves out on a CPU with --enforce-eager.
            command += ["--compilation-config", json.dumps({"mode": 1, "backend": "eager"})]
        command += ["--block-size", str(self.block_size), "--max-model-len", str(self.context_tokens)]
        command += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        command += ["--pipeline-parallel-size", str(self.pipeline_parallel_size)]
        command += ["--data-parallel-size", str(self.data_parallel_size)]
        command += ["--generation-config", "vllm"]
        if ON_CUDA:
            command += ["--gpu-memory-utilization", str(SHARE_OF_DEVICE)]
            command += ["--kv-cache-memory-bytes", str(self.kv_cache_gib << 30)]
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(self._transfer_config())]
        command += ["--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"]
        if self.attention_backend is not None:
            command += ["--attention-backend", self.attention_backend]
        if self.max_num_batched_tokens is not None:
            command += ["--max-num-batched-tokens", str(self.max_num_batched_tokens)]
        return [*command, *self.arguments]

    def _transfer_config(self) -> dict[str, Any]:
        """Of --kv-transfer-config."""
        own: dict[str, Any] = {
            "kv_connector": "NixlActorConnector" if self.connector == "plugin" else "NixlConnector",
            "kv_role": self.kv_role,
            "kv_buffer_device": "cuda" if ON_CUDA and not self.staged_on_host else "cpu",
            "kv_load_failure_policy": self.kv_load_failure_policy,
            "kv_connector_extra_config": dict(self.extra_config),
        }
        if self.connector == "actor":
            own["kv_connector_module_path"] = self.module_path
        whole = own
        if self.beside_offloading is not None:
            offloading = {
                "kv_connector": "OffloadingConnector",
                "kv_role": self.kv_role,
                "kv_connector_extra_config": {"cpu_bytes_to_use": OFFLOADING_BYTES}
                | ({} if ON_CUDA else HOST_OFFLOADING),
            }
            children = [own, offloading] if self.beside_offloading == "before" else [offloading, own]
            whole = {
                "kv_connector": "MultiConnector",
                "kv_role": self.kv_role,
                "kv_load_failure_policy": self.kv_load_failure_policy,
                "kv_connector_extra_config": {"connectors": children},
            }
        return whole if self.engine_id is None else whole | {"engine_id": self.engine_id}

    def process_environment(self) -> dict[str, str]:
        """The environment of the server and of the processes that it starts."""
        environment = dict(os.environ) | (ENVIRONMENT_ON_CUDA if ON_CUDA else calm_environment())
        environment |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(self._cores()),
            "VLLM_HOST_IP": self.host,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "TMPDIR": _scratch().name,
        }
        if self.forks:
            environment |= ONE_THREAD
        if self.changes is not None:
            assert self.forks
            environment[CHANGES] = self.changes
        if self.calm_polling:
            environment[CALM_POLLING] = "1"
        if self.trace_directory is not None:
            environment["NIXL_ACTOR_TRACE_DIR"] = str(self.trace_directory)
        return environment | dict(self.environment)

    def _cores(self) -> list[str]:
        """One for each worker, in the order of their ranks."""
        return cores(self.core, self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size)


def cores(first: int, count: int) -> list[str]:
    """So many numbers of processors, in turn, of those that this program may use: in a container they may be any."""
    available = sorted(os.sched_getaffinity(0))
    return [str(available[(first + number) % len(available)]) for number in range(count)]


def _in_a_group(command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Engine:
    """One running API server. `start` returns at once; `wait_healthy` waits."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.log_path = options.logs / f"{options.name}.log"
        self._process: ForkedServer | subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._terminating = False
        self._log_start = 0
        self._shared_memory: set[Path] = set()

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def pid(self) -> int:
        """Process id of the API server, which is also its process group."""
        if self._process is None:
            raise RuntimeError(f"engine {self.name} has not been started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Engine:
        """Start the server; its output is appended to the log file."""
        if self.running:
            raise RuntimeError(f"engine {self.name} runs already")
        self.options.logs.mkdir(parents=True, exist_ok=True)
        if self.options.trace_directory is not None:
            self.options.trace_directory.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._process = self.options.start(self.log_path)
        self._started_at = time.monotonic()
        self._terminating = False
        self._shared_memory = set()
        _guard.watch(self._process.pid)
        return self

    def wait_healthy(
        self, timeout_seconds: float = START_TIMEOUT_SECONDS, progress: Callable[[float], None] | None = None
    ) -> Engine:
        """Return once /health answers 200; `EngineFailed` when the server ends before or the time is up. One that has
        lost a worker before there was a connector is started once more, with a warning."""
        deadline = time.monotonic() + timeout_seconds
        again = False
        while True:
            if progress is not None:
                progress(time.monotonic() - self._started_at)
            if self.healthy():
                return self
            if not self.running:
                if again or not self._lost_a_worker_of_vllm():
                    raise EngineFailed(f"engine {self.name} ended while starting\n{self.log_tail()}")
                again = True
                warnings.warn(f"engine {self.name} lost a worker: started again\n{self.log_tail()}", stacklevel=2)
                self.restart()
            if time.monotonic() > deadline:
                raise EngineFailed(f"engine {self.name} not up after {timeout_seconds:g} s\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)

    def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        connection = http.client.HTTPConnection(self.options.host, self.options.http_port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL to the whole group at once: the machine lost power, seen from its peers."""
        self.start_to_kill()
        self._reap(KILL_TIMEOUT_SECONDS)

    def start_to_kill(self) -> None:
        """`kill` without the wait until everything is gone, which takes the kernel seconds on a busy machine."""
        self._see_shared_memory()
        self._signal_group(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP to the whole group: everything stays open and nothing answers."""
        self._signal_group(signal.SIGSTOP)
        if self._process is not None:
            wait_stopped(partial(reaper.members, self._process.pid))

    def resume(self) -> None:
        """Undo `pause`."""
        self._signal_group(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM to the server, once: vLLM restores the default action before it cleans up, a second would kill it."""
        if self._process is not None and self.running and not self._terminating:
            self._terminating = True
            self._see_shared_memory()
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()  # it ends its own children; `stop` ends what is left of the group
            self.resume()

    def stop(self, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> bool:
        """SIGTERM, then SIGKILL to what is left of the group. True when the server went by itself."""
        if self._process is None:
            return True
        graceful = True
        if self.running:
            self.terminate()
            try:
                self._process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                graceful = False
        self.start_to_kill()
        self._reap(KILL_TIMEOUT_SECONDS)
        return graceful

    def restart(self, **changes: Any) -> Engine:
        """Start again on the same ports, with the same engine id if one was set; `changes` replace options."""
        self.stop()
        self.options = replace(self.options, **changes)
        return self.start()

    def log(self) -> str:
        """Everything that the engine has logged, over all its starts."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self) -> str:
        """For error messages: this start's log from the first sign of trouble on, and its end."""
        try:
            lines = self.log_of_this_start().splitlines()
        except OSError as error:
            return f"(no log: {error})"
        tail = max(0, len(lines) - LOG_TAIL_LINES)
        first = next((number for number, line in enumerate(lines) if TROUBLE.search(line)), tail)
        left_out = ["..."] if first + TROUBLE_LINES < tail else []
        shown = [*lines[first : min(first + TROUBLE_LINES, tail)], *left_out, *lines[tail:]]
        return "\n".join("  | " + line for line in shown) + f"\nthe whole log is in {self.log_path}"

    def log_of_this_start(self) -> str:
        return self.log_path.read_bytes()[self._log_start :].decode(errors="replace")

    def start_phase(self) -> str:
        """How far the server has come with its start, in words."""
        try:
            text = self.log_of_this_start()
        except OSError:
            text = ""
        return next((phase for sign, phase in START_PHASES if sign in text), "importing vLLM")

    def _lost_a_worker_of_vllm(self) -> bool:
        """Whether a worker has ended without an exception while it loaded the model, which it does before it makes a
        connector: seen once in some hundred runs of the tests."""
        log = self.log_of_this_start()
        return WORKER_LOST in log and WORKER_RAISED not in log and CONNECTOR_MADE not in log

    def _see_shared_memory(self) -> None:
        """Before its processes end: afterwards nobody knows whose it was."""
        if self._process is not None:
            self._shared_memory |= reaper.shared_memory(self._process.pid)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _reap(self, timeout_seconds: float) -> None:
        if self._process is None:
            return
        self._process.wait(timeout_seconds)
        reaper.wait_gone(self._process.pid, timeout_seconds)
        reaper.remove(self._shared_memory)
        _guard.forget(self._process.pid)


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """For what engines that are killed leave behind: sockets, torch's rendezvous. It goes with this program."""
    return tempfile.TemporaryDirectory(prefix="engines-", ignore_cleanup_errors=True)


@contextlib.contextmanager
def process_group(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    """Another program that engines need, in a process group of its own, which is killed at the end."""
    process = _in_a_group(command, environment, log)
    _guard.watch(process.pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(KILL_TIMEOUT_SECONDS)
        reaper.wait_gone(process.pid, KILL_TIMEOUT_SECONDS)
        _guard.forget(process.pid)


class EngineSet:
    """Starts engines side by side and ends them all when the `with` block is left.

    >>> with EngineSet() as engines:  # doctest: +SKIP
    ...     prefill, decode = engines.start(prefill_options, decode_options)
    """

    def __init__(self) -> None:
        self._engines: list[Engine] = []

    def __enter__(self) -> EngineSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(STOP_TIMEOUT_SECONDS if value is None else STOP_AFTER_ERROR_TIMEOUT_SECONDS)

    def start(self, *options: EngineOptions, progress: StartProgress | None = None) -> list[Engine]:
        """Start all, then wait until all are healthy. Starting takes most of a minute, so side by side pays. If one
        fails, all of these are ended."""
        started: list[Engine] = []
        try:
            started.extend(self.launch(each) for each in options)
            deadline = time.monotonic() + START_TIMEOUT_SECONDS
            report = None if progress is None else partial(progress, started)
            for engine in started:
                engine.wait_healthy(max(1.0, deadline - time.monotonic()), report)
        except BaseException:
            _end(started, STOP_AFTER_ERROR_TIMEOUT_SECONDS)
            raise
        return started

    def launch(self, options: EngineOptions) -> Engine:
        """Start one without waiting for it."""
        engine = Engine(options)
        self._engines.append(engine)
        return engine.start()

    def stop(self, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> None:
        """End all of them."""
        _end(self._engines, timeout_seconds)
        self._engines.clear()


def _end(engines: Sequence[Engine], timeout_seconds: float) -> None:
    """SIGTERM goes to all before any is waited for, and the time is for all together."""
    deadline = time.monotonic() + timeout_seconds
    for engine in engines:
        engine.terminate()
    for engine in engines:
        engine.stop(max(0.0, deadline - time.monotonic()))


class _Guard:
    """Ends process groups that are still watched when this program ends, however it ends."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._reaper: subprocess.Popen[str] | None = None

    def watch(self, group: int) -> None:
        self._groups.add(group)
        self._tell("watch", group)

    def forget(self, group: int) -> None:
        self._groups.discard(group)
        self._tell("forget", group)

    def kill_all(self) -> None:
        """Called at exit; the reaper ends with the pipe."""
        reaper.end(self._groups)

    def _tell(self, word: str, group: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            pipe = self._pipe()
            pipe.write(f"{word} {group}\n")
            pipe.flush()

    def _pipe(self) -> IO[str]:
        if self._reaper is None:
            # A session of its own: Ctrl-C in the terminal must not end it before its work is done.
            self._reaper = subprocess.Popen(
                [sys.executable, "-S", reaper.__file__], stdin=subprocess.PIPE, text=True, start_new_session=True
            )
            atexit.register(self.kill_all)
        assert self._reaper.stdin is not None
        return self._reaper.stdin


_guard = _Guard()
