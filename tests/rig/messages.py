"""What crosses the pipe between a test and an engine process, and how an engine is described.

Plain frozen dataclasses; both ends are this package, so nothing here is checked as input from outside would be. Times
are `time.monotonic_ns()`, which on Linux is one clock for all processes of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal
from uuid import uuid4


@dataclass(frozen=True)
class ConnectorChoice:
    """A connector as vLLM's configuration names it."""

    label: str
    kv_connector: str
    kv_connector_module_path: str | None


BUILTIN = ConnectorChoice("built-in", "NixlConnector", None)
OURS = ConnectorChoice("ours", "NixlConnector", "connector")


class Forward(Enum):
    """What the forward pass of each step does besides checking and writing KV, for `forward_seconds`."""

    NOTHING = "nothing"
    SLEEPS = "sleeps"
    """Waits without the interpreter and without a core, as for an accelerator."""
    MULTIPLIES = "multiplies"
    """Keeps a core busy without the interpreter, but for short calls: matrix products in torch."""
    HOLDS = "holds"
    """Keeps a core and the interpreter: pure Python."""


@dataclass(frozen=True)
class EngineOptions:
    """One engine. The defaults give 32 layers whose blocks are 64 KiB: a block of a request is 2 MiB in 32 pages."""

    connector: ConnectorChoice
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    side_channel_port: int
    side_channel_host: str = "127.0.0.1"
    engine_id: str = field(default_factory=lambda: f"rig-{uuid4().hex[:12]}")
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    extra_config: dict[str, Any] = field(default_factory=dict)
    machine: int | None = None
    """A process whose network the engine shares (`lan`); None: the one of the test."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set in the engine process before NIXL is imported, for instance UCX_TLS."""
    forward: Forward = Forward.NOTHING
    forward_seconds: float = 0.005
    forward_pieces: int | None = None
    """A step does so many pieces of that work (see `forward`), instead of working for `forward_seconds`: then whatever
    takes the core or the interpreter away makes the step longer. Not for `SLEEPS`."""
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    block_size_tokens: int = 32
    blocks: int = 128
    max_batched_tokens: int = 8192
    """Fewer than a prompt has make a chunked prefill."""
    max_requests: int = 64
    layout: str | None = None
    """Order of the axes of the KV cache, also one that no attention back end for CPUs has; None: vLLM's choice."""
    staged: bool = False
    """The KV cache counts as an accelerator's, which NIXL cannot reach; see `accelerator`."""
    permutes: bool = False
    """`enable_permute_local_kv`: host buffers may have another order of axes than the KV cache."""
    keeps_token_order: bool = False
    """The attention back end is one that blocks of another size can be read for; see `attention`."""
    computes_on_cpus: bool = False
    """K and V lie where the kernels of attention on CPUs write them. Otherwise they lie as the shape of the cache says,
    which is how attention on GPUs keeps them, whatever the back end is."""
    record_calls: bool = False
    """Note which thread calls NIXL and ZMQ; see `call_recorder`."""

    @property
    def page_length_bytes(self) -> int:
        """Bytes of one block of one layer: K and V of two bytes an element."""
        return self.kv_heads * self.block_size_tokens * 2 * self.head_dim * 2


class Check(Enum):
    """How much of what a connector has loaded is compared before the engine uses it."""

    EVERY_BYTE = "every byte"
    EDGES = "corners of the first and last token of each page"
    """The first and last bytes of a page among them. For measurements, where comparing 134 MB between two steps would
    delay what is measured."""


@dataclass(frozen=True)
class RequestSpec:
    """A request as the engine core gets it."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int = 1
    kv_transfer_params: dict[str, Any] | None = None
    check: Check = Check.EVERY_BYTE


# ---- commands: test -> engine process


@dataclass(frozen=True)
class Submit:
    """All of them enter the scheduler before its next step."""

    requests: tuple[RequestSpec, ...]


@dataclass(frozen=True)
class Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class SetPaused:
    """A paused engine takes commands but makes no step, as one that is stuck in a long forward pass."""

    paused: bool


@dataclass(frozen=True)
class OverwriteFreeBlocks:
    """Forget the prefix cache and fill every block that no request owns with bytes that are nobody's."""

    ticket: int


@dataclass(frozen=True)
class ArrangeFreeBlocks:
    """Have the scheduler hand out its free blocks in rising order, or in one that is drawn from `shuffle_seed`."""

    ticket: int
    shuffle_seed: int | None


@dataclass(frozen=True)
class DamageBlock:
    """Change one bit of a block, in one layer, as faulty memory does. Answered with a `Snapshot`."""

    ticket: int
    block_id: int


@dataclass(frozen=True)
class TakeSnapshot:
    """Ask for a `Snapshot`; `reset_times` starts the connector times anew after it."""

    ticket: int
    reset_times: bool


@dataclass(frozen=True)
class Inspect:
    """Ask for an `Inspection`; `reset_calls` forgets which thread called what, after it."""

    ticket: int
    reset_calls: bool


@dataclass(frozen=True)
class CrashActors:
    """Make the actors of our connector fail, as a bug would."""


@dataclass(frozen=True)
class Shutdown:
    """End the engine in an orderly way."""


Command = (
    Submit
    | Abort
    | SetPaused
    | OverwriteFreeBlocks
    | DamageBlock
    | ArrangeFreeBlocks
    | TakeSnapshot
    | Inspect
    | CrashActors
    | Shutdown
)


# ---- reports: engine process -> test


@dataclass(frozen=True)
class Ready:
    """The engine serves."""

    layout: str
    page_length_bytes: int
    blocks: int
    connector_start_ns: int
    """How long the worker side took until it was made, and in `register_kv_caches`. Connectors load NIXL in the one or
    the other."""


@dataclass(frozen=True)
class RequestOutcome:
    """How a request ended. Times that did not happen are None."""

    request_id: str
    finish: str
    """vLLM's finish reason: "length", "stop", "error"; or "abort"."""
    output_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None
    received: bool
    """The connector reported the receive finished, and not failed."""
    receive_failed: bool
    """The connector reported the receive failed."""
    mismatched_pages: int
    """Pages (a block of a layer) with a byte that is not the prompt's, each time a load was used."""
    checked_pages: int
    local_cached_tokens: int
    external_cached_tokens: int
    preemptions: int
    block_ids: tuple[int, ...]
    """Blocks it computed in; empty when it was never scheduled."""
    submitted_ns: int
    load_started_ns: int | None
    """Entry into `start_load_kv` of the step that handed the request to the connector."""
    received_ns: int | None
    """Return of the `get_transfer_results` that reported it, failed or not."""
    ended_ns: int


@dataclass(frozen=True)
class CallTimes:
    """Time on the engine thread inside one method."""

    calls: int = 0
    wall_ns: int = 0
    cpu_ns: int = 0
    """CPU time of the engine thread alone: less than wall_ns when the call waits, or when the thread is not given a
    core."""
    wall_ns_max: int = 0

    def plus(self, wall_ns: int, cpu_ns: int) -> CallTimes:
        """These times and one more call."""
        return CallTimes(self.calls + 1, self.wall_ns + wall_ns, self.cpu_ns + cpu_ns, max(self.wall_ns_max, wall_ns))


@dataclass(frozen=True)
class Snapshot:
    """The state of an engine process between two steps."""

    ticket: int
    start_load_kv: CallTimes
    get_transfer_results: CallTimes
    forward: CallTimes
    """Times of what `EngineOptions.forward` makes a forward pass do, without the rig's checking and writing of KV."""
    step_wall_ns_max: int
    """The most time one step spent in `start_load_kv` and `get_transfer_results`."""
    steps: int
    free_blocks: int
    blocks: int
    requests: dict[str, str]
    """Status of each request the scheduler still knows, finished ones with blocks on loan included."""
    threads: tuple[str, ...]
    """Names of the Python threads."""
    native_threads: int
    open_files: int
    resident_bytes: int
    cpu_seconds: float
    """CPU time that all threads of the process have used so far."""
    switch_interval_seconds: float
    """The switch interval of its interpreter."""


@dataclass(frozen=True)
class Holdings:
    """What our connector holds in one engine process, counted; see `inside`.

    The first three are NIXL's. `pulls` and `prefills` are entries of the scheduler side, `receives` and `sends` of the
    engine thread's worker side, `requests_of_actors` and `leases` (lent, kept alive, or to be released) of the actors.
    """

    remote_agents: int
    descriptor_lists: int
    reads: int
    peer_actors: int = 0
    pulls: int = 0
    prefills: int = 0
    receives: int = 0
    sends: int = 0
    requests_of_actors: int = 0
    leases: int = 0


@dataclass(frozen=True)
class Inspection:
    """A look inside an engine process, between two steps."""

    ticket: int
    holdings: Holdings | None
    """None for the built-in connector."""
    engine_thread_calls: dict[str, int]
    """Calls of NIXL and ZMQ made by the engine thread, by name; always empty without `record_calls`."""
    other_thread_calls: int
    unowned_blocks: frozenset[int]
    """Blocks that are not free and belong to no request that the scheduler knows."""


@dataclass(frozen=True)
class FreeBlocks:
    """Done with `OverwriteFreeBlocks` or `ArrangeFreeBlocks`; how many blocks were free."""

    ticket: int
    blocks: int


@dataclass(frozen=True)
class EngineDied:
    """A step or a command raised; a real engine would have died of it, and this one has."""

    traceback: str


@dataclass(frozen=True)
class Closed:
    """The engine has shut down; the process ends after this."""

    seconds: float
    threads: tuple[str, ...]
    """Python threads still alive, the main thread left out."""
    left_open: tuple[str, ...]
    """What the descriptors refer to that are open now and were not before the connector was made."""
    holdings: Holdings | None
    """What the NIXL port still holds; None for the built-in connector."""


Report = Ready | RequestOutcome | Snapshot | Inspection | FreeBlocks | EngineDied | Closed
