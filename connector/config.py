"""Options of the connector: `kv_connector_extra_config`, typed and checked at start.

A misspelt option of a serving system is found weeks later, by its absence. So every key must be known and every value
must have its type and bounds; what is wrong is an `OptionError` that names the option, shows the value, suggests the
name that was probably meant and lists all of them.

The built-in connector's options keep their names, defaults and meaning, so that a configuration can be taken over. A
value of another type that can mean one thing only there is taken for that (`_taken_over`); any other is refused.
`kv_recompute_threshold` and `decoder_kv_blocks_ttl` have no effect without `bidirectional_kv_xfer`, there as here. A
warning says so, as of every option that has none.

Options that contradict each other are refused as well: a value that is fine alone may make another one useless.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from connector.addresses import split_place
from connector.environment import PREFIX, TRACE_DIRECTORY_VARIABLE, VARIABLES
from connector.observe.log import get_logger
from connector.observe.trace_log import FILE_BYTES, FILES_KEPT, TraceDirectoryError, make_writable
from connector.wire.bounded import PORT_MAX, Place, render_untrusted, shorten
from statemachine.introduction import PLACES_MAX

_OF_A_SERVICE = re.compile("_(SERVICE_HOST|(SERVICE_)?PORT(_.+)?)$")
"""Variables that Kubernetes makes of the name of a service."""

_OF_READ_BACK = ("kv_recompute_threshold", "decoder_kv_blocks_ttl")
_OF_TRACE = ("trace_file_bytes", "trace_files_kept", "trace_sample")
_OF_KEYS = ("curve_directory", "params_keys_file")

_SHOWN_ALWAYS = ("kv_lease_duration", "request_timeout_seconds", "handshake_timeout_seconds")

_log = get_logger()

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_SecondsOrZero = Annotated[float, Meta(ge=0, le=86_400)]

_YEAR_SECONDS = 31_536_000
_SecondsOfBuiltin = Annotated[float, Meta(gt=0, le=_YEAR_SECONDS)]
"""The built-in connector has no limit, so this one is where nobody means the number."""

_TRUTHS_OF_BUILTIN = ("bidirectional_kv_xfer", "enforce_handshake_compat")
_WHOLE_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")


class ConnectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All options, under the names they have in `kv_connector_extra_config`. Times are in seconds."""

    kv_lease_duration: _SecondsOfBuiltin = 30.0
    """How long P keeps the blocks of a finished prefill for D. Of the built-in connector; may be fractional here."""
    backends: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=64)], ...], Meta(min_length=1)] = ("UCX",)
    """NIXL back ends, of the built-in connector."""
    num_threads: Annotated[int, Meta(ge=0, le=64)] = 0
    """Threads of NIXL's back ends, of the built-in connector. UCX gets none, and the connector's own thread moves the
    data: of what threads of UCX have read nobody can say whether all of it has arrived (docs/nixl.md fact 32)."""
    enforce_handshake_compat: bool = True
    """Refuse engines whose compatibility hash differs, of the built-in connector."""
    engine_ttl: Annotated[float, Meta(ge=0, le=_YEAR_SECONDS)] = 3600.0
    """A remote engine that is not connected and not used is forgotten after this long; 0: never. Of the built-in
    connector."""
    bidirectional_kv_xfer: bool = False
    """D keeps the blocks of finished requests for P, and P reads from D what a conversation's next prompt begins with.
    Of the built-in connector; set the same on P and D."""
    kv_recompute_threshold: Annotated[int, Meta(ge=0)] = 64
    """P computes fewer tokens than these itself, instead of reading them back; 0: it reads any. Of the built-in
    connector."""
    decoder_kv_blocks_ttl: _SecondsOfBuiltin = 480.0
    """How long D keeps the blocks of a finished request until P asks for them. Of the built-in connector."""
    decode_recompute_threshold: Annotated[int, Meta(ge=0)] = 0
    """D computes fewer tokens than these itself, instead of reading them from P."""

    request_timeout_seconds: _Seconds = 120.0
    """How long a request may wait for its KV in all, from when its blocks are allocated on D."""
    handshake_timeout_seconds: _Seconds = 5.0
    """How long a prefill engine may take for each answer while it is connected. An attempt has four rounds of them:
    its first rank, the others, their control sockets, 16 ranks at a time, and the first READs."""
    quiesce_timeout_seconds: _Seconds = 30.0
    """How long a failed request waits for its READs in flight before its blocks are quarantined."""
    lease_limit_seconds: _SecondsOfBuiltin = 900.0
    """How long P keeps the blocks of one request in all, however often D renews the lease: a D that never reads must
    not occupy P's memory for ever. At least kv_lease_duration, which raises it where it is not set."""
    lease_margin_seconds: _SecondsOrZero = 0.05
    """The margin by which D takes each lease to end earlier than it concludes from P's answer.

    P answers for how long it keeps the blocks, and D counts that time from when it asked, so the way of the answer is
    on the safe side. The different rates of the two clocks are accounted for apart from this (a sixth of the time). The
    margin is a reserve for what is neither, such as a virtual machine whose clock is stepped when it is moved.
    """
    backend_grace_seconds: _Seconds = 0.5
    """How long a READ that failed may go on writing after its connection was torn down. NIXL reports the first part of
    a READ that fails; the transport may be working on the others. Blocks are not used again before this has passed."""
    transfer_retries: Annotated[int, Meta(ge=0, le=10)] = 1
    """How often a request whose connection was lost is tried again, unless P has given the blocks up."""
    quarantine_limit: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of the KV cache's blocks that may be in quarantine before nothing new is read; 1: no limit. What is left of
    the pool serves requests that need no KV from elsewhere, and those whose prompt is computed here."""
    drain_grace_seconds: _SecondsOfBuiltin = 60.0
    """How long an engine that is to end waits for what it lends at most. At least kv_lease_duration, which raises it
    where it is not set: a lease that was granted lasts for its time. What was accepted to be lent before it began to
    drain is granted until kv_lease_duration before its end."""
    control_port: Annotated[int, Meta(ge=0, le=PORT_MAX)] = 0
    """Port of the control socket of the first rank of the first data-parallel engine; each further rank has the next
    one. 0: any free port for each."""
    known_peers: Annotated[tuple[Place, ...], Meta(max_length=PLACES_MAX)] = ()
    """Prefill engines that a decode engine connects before their first request, and again when they are back: host:port
    of their side channels. One that does not answer is tried again."""
    peer_limit: Annotated[int, Meta(ge=1, le=1 << 16)] = 1024
    """Most remote engines known at a time."""
    backoff_initial_seconds: _Seconds = 0.5
    """Pause before a failed prefill engine is tried again; doubles with each failure, with jitter. Not after a refused
    connection, which is tried again after the first pause."""
    backoff_max_seconds: _Seconds = 30.0
    incompatible_backoff_seconds: _Seconds = 10.0
    """Pause before a prefill engine that cannot exchange KV with this one is asked again: it may have been replaced."""
    registration_timeout_seconds: _Seconds = 1800.0
    """How long NIXL may take to register the KV cache when the engine starts. A network card pins all of it, which can
    take minutes for a hundred gigabytes."""
    switch_interval_seconds: Annotated[float, Meta(ge=0, le=1)] = 0.0001
    """While transfers are open, how long the engine thread may keep the Python interpreter from the connector's threads
    that ask for it (`sys.setswitchinterval`, for the whole process). 0: as it is."""
    verify: Literal["off", "sampled", "all"] = "off"
    """Checksums of lent blocks, which D compares with what it has read: of none, of some of each request, or of all. P
    has to make as many as D compares."""
    on_actor_death: Literal["degrade", "exit"] = "degrade"
    """What an engine does whose actors have died: go on without KV transfer, or end, so that it is started again."""
    params_keys_file: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """File of the secrets that `kv_transfer_params` are signed with (`connector/wire/signatures.py`). Unset: they are
    neither signed nor checked."""
    curve_directory: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """Directory of the keys with which the side channel and the control sockets are encrypted, and peers authenticated
    (`connector/ports/curve_keys.py`). Unset: they are not."""
    allowed_peers: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=256)] = ()
    """Address ranges of the engines and tools that may connect to this engine, and that it connects to. Empty: all."""
    allow_insecure_peers: bool = False
    """Whether this engine also deals with peers that have no keys, such as built-in ones: what params_keys_file and
    curve_directory ask of peers is given up where a peer does not offer it."""
    trace_directory: Annotated[str, Meta(min_length=1)] | None = None
    """Where each process writes its state transitions as JSON lines. Unset: the environment variable
    NIXL_ACTOR_TRACE_DIR, and no trace when that is unset too."""
    trace_file_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = FILE_BYTES
    """A trace file that has reached this size is followed by another one."""
    trace_files_kept: Annotated[int, Meta(ge=1, le=10_000)] = FILES_KEPT
    """How many trace files of one process are kept, the newest ones."""
    trace_sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of the requests that is traced, each as a whole, and the same ones on P and on D if both have the same."""


class OptionError(Exception):
    """An option of `kv_connector_extra_config` is unknown, has a value that it cannot have, or contradicts another one.

    Not a ValueError: pydantic, which checks vLLM's configuration, would wrap one, and end with lines of its own.
    """

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(
            f"kv_connector_extra_config: {problem}. Options of this connector and their defaults: {_listed_options()}"
        )
        self.option = option


def parse_options(extra_config: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> ConnectorOptions:
    """Check `kv_connector_extra_config`. Raises OptionError.

    `environment` is where NIXL_ACTOR_TRACE_DIR is looked up, by default that of the process.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(ConnectorOptions)}
    values: dict[str, Any] = {}
    for name, value in extra_config.items():
        if name not in types:
            raise OptionError(str(name), _unknown(name, list(types)))
        values[name] = _taken_over(name, value)
        try:
            msgspec.convert(values[name], types[name])
        except msgspec.ValidationError as error:
            problem = _expected(name, types[name]) or str(error)
            raise OptionError(name, f"option {name} has the value {render_untrusted(value)}: {problem}") from None
    options = msgspec.convert(values, ConnectorOptions)
    if "lease_limit_seconds" not in extra_config:
        # A long lease may come from a configuration of the built-in connector, which has no such option.
        limit_seconds = max(options.lease_limit_seconds, options.kv_lease_duration)
        options = msgspec.structs.replace(options, lease_limit_seconds=limit_seconds)
    if "drain_grace_seconds" not in extra_config:
        grace_seconds = max(options.drain_grace_seconds, options.kv_lease_duration)
        options = msgspec.structs.replace(options, drain_grace_seconds=grace_seconds)
    _check_together(options, extra_config)
    for text in options.allowed_peers:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise OptionError("allowed_peers", f"option allowed_peers has {render_untrusted(text)}: {error}") from None
    for text in options.known_peers:
        try:
            split_place(text)
        except ValueError as error:
            raise OptionError("known_peers", f"option known_peers: {error}") from None
    if options.trace_directory is None:
        directory = (os.environ if environment is None else environment).get(TRACE_DIRECTORY_VARIABLE)
        return msgspec.structs.replace(options, trace_directory=directory or None)
    return options


def _taken_over(name: str, value: Any) -> Any:
    """What the built-in connector makes of this value of an option of its own, if that is one thing only: it asks
    whether 1 is true, and int() what "64" is. Any other value as it is."""
    if name in _TRUTHS_OF_BUILTIN and type(value) is int and value in (0, 1):
        return bool(value)
    if name == "kv_recompute_threshold":
        if (isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value)) or (
            isinstance(value, float) and value.is_integer()
        ):
            value = int(value)
        if type(value) is int:
            return max(value, 0)  # a negative one is off there
    return value


def check_trace_directory(options: ConnectorOptions) -> None:
    """Raises OptionError when an engine with these options could not start, because its workers could not trace."""
    if options.trace_directory is None:
        return
    try:
        make_writable(options.trace_directory)
    except TraceDirectoryError as error:
        problem = f"option trace_directory (or environment variable {TRACE_DIRECTORY_VARIABLE}): {error}"
        raise OptionError("trace_directory", problem) from None


def warn_of_options(extra_config: Mapping[str, Any], options: ConnectorOptions) -> None:
    """One line for each option that was set and has no effect, or takes a promise away."""
    for name in _OF_READ_BACK:
        if name in extra_config and not options.bidirectional_kv_xfer:
            _log.warning("Option %s has no effect without bidirectional_kv_xfer", name)
    for name in _OF_TRACE:
        if name in extra_config and options.trace_directory is None:
            _log.warning("Option %s has no effect without trace_directory", name)
    if options.num_threads and "UCX" in options.backends:
        _log.warning("Option num_threads has no effect with the back end UCX: its threads may lose blocks unnoticed")
    if set(options.backends) != {"UCX"}:
        _log.warning(
            "Option backends is %s: what is promised of READs that fail holds for UCX alone (docs/limits.md)",
            ", ".join(options.backends),
        )
    if options.allow_insecure_peers and all(getattr(options, name) is None for name in _OF_KEYS):
        _log.warning("Option allow_insecure_peers has no effect without %s", " or ".join(_OF_KEYS))


def _check_together(options: ConnectorOptions, extra_config: Mapping[str, Any]) -> None:
    """What no option can be blamed for alone."""

    def require(holds: bool, option: str, relation: str, other: str, why: str) -> None:
        if not holds:
            values = msgspec.structs.asdict(options)
            problem = f"option {option} ({values[option]:g}) is {relation} {other} ({values[other]:g}): {why}"
            raise OptionError(option, problem)

    if {"UCX", "LIBFABRIC"} <= set(options.backends):
        problem = (
            "option backends names UCX and LIBFABRIC: NIXL would choose one for each READ, and what an error of a READ "
            "says depends on which; name one of both"
        )
        raise OptionError("backends", problem)
    lease_seconds, request_seconds = options.kv_lease_duration, options.request_timeout_seconds
    require(
        options.backoff_max_seconds >= options.backoff_initial_seconds,
        "backoff_max_seconds",
        "less than",
        "backoff_initial_seconds",
        "pauses only grow",
    )
    require(
        options.lease_limit_seconds >= lease_seconds,
        "lease_limit_seconds",
        "less than",
        "kv_lease_duration",
        "blocks would be given up before their first lease has ended",
    )
    require(
        options.drain_grace_seconds >= lease_seconds,
        "drain_grace_seconds",
        "less than",
        "kv_lease_duration",
        "an engine that is to end has to keep what it has lent for as long as it has promised",
    )
    require(
        2 * options.lease_margin_seconds <= lease_seconds,
        "lease_margin_seconds",
        "more than half of",
        "kv_lease_duration",
        "too little of a lease is left to prove anything by, and requests would end with LeaseNotProven",
    )
    require(
        request_seconds >= options.handshake_timeout_seconds,
        "request_timeout_seconds",
        "less than",
        "handshake_timeout_seconds",
        "a request would end with DeadlineExceeded before it is known that its prefill engine does not answer",
    )
    require(
        options.handshake_timeout_seconds < lease_seconds,
        "handshake_timeout_seconds",
        "not less than",
        "kv_lease_duration",
        "a prefill engine is asked to keep blocks only after the handshake, so one that took its time would end in a "
        "lease that is over; set both",
    )
    require(
        options.quiesce_timeout_seconds > options.backend_grace_seconds,
        "quiesce_timeout_seconds",
        "not more than",
        "backend_grace_seconds",
        "the blocks of every READ that fails would be quarantined before it counts as ended",
    )
    for name in ("backoff_max_seconds", "incompatible_backoff_seconds"):
        # Not where only engine_ttl is set: that may come from a configuration of the built-in connector.
        is_asked_for = name in extra_config and options.engine_ttl > 0
        require(
            not is_asked_for or options.engine_ttl >= getattr(options, name),
            "engine_ttl",
            "less than",
            name,
            "an engine would be forgotten during its pause, and tried again at once",
        )


def in_force(options: ConnectorOptions) -> str:
    """For the log: the options that matter to everybody, and those that are not left at their defaults."""
    values, defaults = msgspec.to_builtins(options), msgspec.to_builtins(ConnectorOptions())
    shown = [name for name, value in values.items() if name in _SHOWN_ALWAYS or value != defaults[name]]
    return ", ".join(f"{name}={msgspec.json.encode(values[name]).decode()}" for name in shown)


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Environment variables that are named like those of this package, and are none of them."""
    names = os.environ if environment is None else environment
    return sorted(
        shorten(name)
        for name in names
        if name.startswith(PREFIX) and name not in VARIABLES and not _OF_A_SERVICE.search(name)
    )


def _expected(name: str, kind: Any) -> str | None:
    """What an option may be, where msgspec does not say it in words."""
    if name == "known_peers":
        return f'expected a list of at most {PLACES_MAX} "host:port", side channels of prefill engines'
    if get_origin(kind) is Literal:
        return f"expected one of {', '.join(get_args(kind))}"
    return None


def _unknown(name: object, valid: list[str]) -> str:
    from vllm.config import KVTransferConfig

    problem = f"unknown option {render_untrusted(name)}"
    if name in {field.name for field in dataclasses.fields(KVTransferConfig)}:
        return f"{problem}: it is one of vLLM's own, and stands beside kv_connector_extra_config"
    close = difflib.get_close_matches(str(name)[:100], valid, n=1)
    return f"{problem}, did you mean {close[0]}?" if close else problem


def _listed_options() -> str:
    defaults = msgspec.to_builtins(ConnectorOptions())
    return ", ".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in defaults.items())
