"""Machines with a network between them that loses what it is told to lose.

Each machine is a network namespace of the kernel, and so is the router that joins them: what goes from one to another
is forwarded there, or dropped without a word to anybody, as by a cable that was pulled, a switch that has lost its
power, or a firewall. Nothing of it is visible from outside. A process enters a machine by `enter`, a thread for a while
by `Lan.inside`.

Needs the right to make namespaces (root has it), and the commands unshare, nsenter and ip.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

Version = Literal[4, 6]
Way = Literal["both ways", "there", "back"]

_START_SECONDS = 10.0
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_KEPT, _LOST = 100, 200
"""Priorities of rules: the lower is looked at first."""


class NoNetworks(Exception):
    """No namespace can be made here; the text says why."""


def enter(machine: int) -> None:
    """Have this process, which must have one thread, use the network of this machine. Its /sys too: UCX looks there for
    network cards.

    Raises:
        OSError: it may not, or there is no such machine.
    """
    for kind, flag in (("net", _CLONE_NEWNET), ("mnt", _CLONE_NEWNS)):
        with open(f"/proc/{machine}/ns/{kind}") as namespace:
            _set_namespace(namespace.fileno(), flag)


@dataclass(frozen=True)
class Machine:
    """One of them. `process`: one that lives in it."""

    name: str
    address: str
    process: int


class Lan:
    """A context manager: the machines, one for each name, and the router between them."""

    def __init__(self, *names: str, version: Version = 4) -> None:
        self._names = names
        self._version = version
        self._holders: list[subprocess.Popen[bytes]] = []
        self._rules: list[str] = []
        self.machines: dict[str, Machine] = {}

    def __enter__(self) -> Lan:
        try:
            self._router = self._hold()
            kind, setting = ("ipv6", "conf/all/forwarding") if self._version == 6 else ("ipv4", "ip_forward")
            self._on(self._router, f"echo 1 > /proc/sys/net/{kind}/{setting}")
            for number, name in enumerate(self._names, 1):
                self._add(name, number)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread uses the network of this machine meanwhile, and so do threads and processes that it starts."""
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self.machines[name].process}/ns/net") as there:
            _set_namespace(there.fileno(), _CLONE_NEWNET)
            try:
                yield
            finally:
                _set_namespace(before.fileno(), _CLONE_NEWNET)

    def cut(self, source: str, target: str, way: Way = "both ways", *, but_ports: Sequence[int] = ()) -> None:
        """From now on what one sends to the other is lost, whatever was said of the two before. `but_ports`: not what
        goes to or comes from these of TCP."""
        for pair in self._pairs(source, target, way):
            self._end_rules(pair)
            for port in but_ports:
                for end in ("sport", "dport"):
                    self._rule(f"pref {_KEPT} {pair} ipproto tcp {end} {port} lookup main")
            self._rule(f"pref {_LOST} {pair} blackhole")

    def mend(self, source: str, target: str) -> None:
        """Nothing between the two is lost any more."""
        for pair in self._pairs(source, target, "both ways"):
            self._end_rules(pair)

    def heal(self) -> None:
        """Nothing is lost any more."""
        self._end_rules("")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _pairs(self, source: str, target: str, way: Way) -> list[str]:
        """Whose packets those are, as rules say it."""
        ends = (self.machines[source].address, self.machines[target].address)
        there, back = (f"from {sender} to {receiver}" for sender, receiver in (ends, ends[::-1]))
        return {"both ways": [there, back], "there": [there], "back": [back]}[way]

    def _add(self, name: str, number: int) -> None:
        process = self._hold()
        router, host = (f"fd77:{number}::{end}" if self._version == 6 else f"10.77.{number}.{end}" for end in (1, 2))
        length, at_once = (64, " nodad") if self._version == 6 else (24, "")
        self._ip(self._router, f"link add to{number} type veth peer name net0 netns {process}")
        for where, device, address in ((self._router, f"to{number}", router), (process, "net0", host)):
            self._ip(where, f"addr add {address}/{length} dev {device}{at_once}")
            self._ip(where, f"link set {device} up")
        self._ip(process, "link set lo up")
        self._ip(process, f"route add default via {router}")
        self.machines[name] = Machine(name, host, process)

    def _hold(self) -> int:
        """A process in namespaces of its own, for as long as this lasts: it reads a pipe that ends with this program,
        however that ends."""
        command = "mount -t sysfs none /sys && echo && exec cat"
        try:
            holder = subprocess.Popen(
                ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.PIPE,
            )
        except FileNotFoundError as error:
            raise NoNetworks(f"the command {error.filename} is missing") from None
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            raise NoNetworks(holder.stderr.read().decode(errors="replace").strip())
        return holder.pid

    def _rule(self, rule: str) -> None:
        self._ip(self._router, f"rule add {rule}")
        self._rules.append(rule)

    def _end_rules(self, pair: str) -> None:
        """Those that say something of this pair."""
        for rule in [rule for rule in self._rules if pair in rule]:
            self._ip(self._router, f"rule del {rule}")
            self._rules.remove(rule)

    def _ip(self, process: int, command: str) -> None:
        self._on(process, f"ip -{self._version} {command}")

    def _on(self, process: int, command: str) -> None:
        enter_it = ["nsenter", f"--net=/proc/{process}/ns/net", "sh", "-c", command]
        try:
            done = subprocess.run(enter_it, capture_output=True, text=True, timeout=_START_SECONDS, check=False)
        except FileNotFoundError as error:
            raise NoNetworks(f"the command {error.filename} is missing") from None
        if done.returncode:
            raise NoNetworks(f"{command}: {done.stderr.strip()}")

    def _end(self) -> None:
        """The namespaces go with the last process in them."""
        for holder in self._holders:
            holder.kill()
        for holder in self._holders:
            holder.wait()
            for pipe in (holder.stdin, holder.stdout, holder.stderr):
                assert pipe is not None
                pipe.close()


def _set_namespace(namespace: int, kind: int) -> None:
    """Of this thread. `namespace`: an open file."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, kind):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
