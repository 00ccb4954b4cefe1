"""Which transports and devices UCX opens on this machine, as an engine with these variables would have it.

UCX chooses by what is there, what the process may use, and its variables. It says in its log alone what it has chosen:
a table "Available Transports and Devices", at level debug, when a context is made (UCX 1.23). So a NIXL agent is made
in a process of its own, which ends at once, and its log is read. Nothing of it touches a running engine.

    | network    | tcp       | + tcp     | + eth0  - lo   |    + what UCX uses, - what its variables rule out
    | intra-node | sysv      | + sysv    | + memory       |
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from connector.wire.inspection import EngineRow

if TYPE_CHECKING:
    from connector.tools.live import EngineReport  # brings ZMQ, which tests on a device do without

READS_WITHOUT_NVLINK = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_SHM_DEVICES", "UCX_ACC_DEVICES", READS_WITHOUT_NVLINK)
"""The variables that are taken from an engine's environment. No others are: an engine that lies could name a file to
write, or a library to load."""
SECONDS = 30.0
NETWORK = "network"

_TITLE, _LEGEND = "Available Transports and Devices", "Legend:"
_NO_READS = "cuda-ipc get zcopy disabled"
_DEVICE = re.compile(r"([+-]) (\S+)")
_COMPLAINT = re.compile(r"UCX +(?:WARN|ERROR) +(.+)")
_PROGRAM = """
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

modules = ["nixl", "nixl_rocm"]
try:
    # With a torch for CPUs, nixl imports all of it to see that there is no CUDA, which takes seconds, and takes these.
    if version("torch").endswith("+cpu"):
        modules = ["nixl_cu13", "nixl_cu12", *modules]
except PackageNotFoundError:
    pass
for name in modules:
    try:
        api = import_module(f"{name}._api")
        break
    except ImportError as error:
        problem = error
else:
    raise problem
api.nixl_agent("devices", api.nixl_agent_config(backends=["UCX"]))
"""


class Transport(NamedTuple):
    """One that UCX uses. `kind`: network, intra-node, accelerator or loopback, in UCX's words."""

    kind: str
    name: str
    devices: tuple[str, ...]


class Opened(NamedTuple):
    """What UCX has opened, and what it has complained of, in its own words. `problem`: no agent could be made."""

    transports: tuple[Transport, ...] = ()
    complaints: tuple[str, ...] = ()
    problem: str = ""
    reads_over_cuda_ipc: bool = True
    """False where it has found no NVLink; then it writes over cuda_ipc only, unless `READS_WITHOUT_NVLINK` is set."""

    def of_kind(self, kind: str) -> tuple[Transport, ...]:
        return tuple(each for each in self.transports if each.kind == kind)


def opened_for(engines: Iterable[EngineReport]) -> dict[tuple[str, int], Opened]:
    """By engine id and number of the worker, of those that use UCX and run on this machine. What has the same variables
    is tried once; vLLM may give each worker of an engine a network card of its own (VLLM_GPU_NIC_PCIE_MAPPING)."""
    host_name = socket.gethostname()
    by_variables: dict[tuple[str | None, ...], Opened] = {}
    found: dict[tuple[str, int], Opened] = {}
    for engine in engines:
        for row in engine.of(EngineRow):
            if row.facts.host_name != host_name or "UCX" not in row.facts.backends:
                continue
            environment = row.facts.environment
            variables = tuple(environment.get(name) for name in VARIABLES)
            if variables not in by_variables:
                by_variables[variables] = open_as(environment)
            found[row.engine_id, row.rank] = by_variables[variables]
    return found


def open_as(environment: Mapping[str, str], seconds: float = SECONDS) -> Opened:
    """What UCX opens here under an engine's variables (`VARIABLES` of `environment`). Never raises."""
    chosen = {name: environment[name] for name in VARIABLES if name in environment}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=inherited | chosen | {"UCX_LOG_LEVEL": "debug"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:  # whose text is the program
        return Opened(problem=f"no answer within {seconds:g} s; is the machine busy?")
    except OSError as error:
        return Opened(problem=str(error))
    said = child.stdout.decode(errors="replace")
    complaints = tuple(dict.fromkeys(match.group(1).strip() for match in _COMPLAINT.finditer(said)))
    lines = said.rstrip().splitlines()
    return Opened(
        transports=tuple(_used(said)),
        complaints=complaints,
        problem=lines[-1] if child.returncode and lines else "",
        reads_over_cuda_ipc=_NO_READS not in said,
    )


def _used(log: str) -> Iterator[Transport]:
    """The rows of the table. A row without a transport goes on with the devices of the one above it."""
    kind, name, is_used, devices = "", "", False, list[str]()
    for line in log[log.find(_TITLE) + 1 :].splitlines() if _TITLE in log else ():
        if _LEGEND in line:
            break
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 4 or not _DEVICE.search(cells[3]):
            continue
        if cells[2]:
            if is_used and devices:
                yield Transport(kind, name, tuple(devices))
            kind = cells[0] or kind
            sign, name = cells[2].split(maxsplit=1)
            is_used, devices = sign == "+", []
        devices += [device for sign, device in _DEVICE.findall(cells[3]) if sign == "+"]
    if is_used and devices:
        yield Transport(kind, name, tuple(devices))
