"""The one thread that ever touches a NIXL agent.

`AgentCore` is the agent with everything that belongs to it (descriptor lists, READs in flight). `AgentThread` runs it:
it takes commands from a queue, polls the READs in flight and the notifications, and hands results and events to the
other side, `nixl_agent.RealNixlPort`, which explains why there is such a thread at all.

Rules
* NIXL objects (the agent, list handles, READ handles) never leave this thread, not even inside a traceback: their
  `__del__` calls the agent from whatever thread drops the last reference, and the agent is not thread-safe. Errors
  therefore cross as text, and both classes drop what they hold before the thread ends.
* A remote agent is removed only when no READ from it is in flight: NIXL would forget how to ask for the READ's state
  while its data keeps landing, and then nobody could say when the memory is free. The removal waits; new lists and
  READs for the agent are refused at once.
* NIXL (1.5, UCX) makes a request of every descriptor and keeps only the last one, followed by a flush; nobody looks at
  the status of the others. Three rules follow:
  - A READ of several descriptors that ended with an error may have requests in flight as long as its connection exists.
    There is nothing to wait for, so the removal of the agent, which takes the connection down, does not wait. The
    READ's handle is released after that.
  - A READ whose agent NIXL has forgotten by itself is forgotten, too: nobody can tell any more whether it writes. So it
    has ended with an error and may be in flight, however many descriptors it has (docs/nixl.md fact 28).
  - A READ of several descriptors that NIXL calls done may lack some. (Over CMA it did: one descriptor in the middle
    could not be read, and the state was "DONE".) UCX does mark the connection as failed then, at its next progress, and
    NIXL refuses to post over it from then on. So before such a READ counts as done, the first bytes of its last
    descriptor are read a second time, to the same place. If that is refused or fails, the READ has failed. It is short,
    so that the call mostly returns before the engine thread has noticed that it could have the interpreter.
    That holds for one connection. UCX's threads have one each, and nobody can ask in which state these are
    (docs/nixl.md fact 32). So UCX is given no threads.
* The first READ between two agents makes UCX's connections and takes it milliseconds longer than any further one,
  whatever was asked of NIXL before. So when the first list of an agent is prepared, the first bytes of its memory are
  read into a few of the port's own. Nobody waits for that READ, nobody is told of it, and it may fail: a request's own
  READ says why. The agent's removal does not wait for it either; its handle is released after that.
* Metadata that name an agent which is loaded are handed to NIXL only if they are those that it was loaded with. With
  others of the same connection NIXL would forget the agent when it comes to a mistake in them, while READs from it go
  on (docs/nixl.md fact 33); whoever answers a handshake can send those.
* Pauses follow activity: nothing but polling makes UCX progress (there is no progress thread, it would burn a core), so
  the loop polls without pause while a poll finds work, and then pauses a fraction of the time since it last did, up
  to a ceiling that depends on what it waits for. A command ends a pause at once.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import ctypes
import hashlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from connector.clock import BootClock
from connector.cpu_affinity import leave_single_cpu
from connector.observe.log import get_logger
from connector.ports.command_queue import CommandQueue
from connector.ports.nixl import (
    AgentName,
    DescriptorIds,
    DescriptorListHandle,
    MemoryRange,
    MemoryRun,
    NixlEvent,
    NotificationReceived,
    PortBroken,
    ReadEnded,
    ReadHandle,
    ReadMeasured,
    ReadPosted,
)

PAUSE_READING_SECONDS_MAX = 0.0005
"""Longest pause while READs are in flight: what a completion may go unnoticed, and P's blocks stay lent for nothing."""

PAUSE_EXPECTING_SECONDS_MAX = 0.002
"""Longest pause while notifications are expected: how long blocks that a built-in engine has released stay lent. Each
look may take the interpreter from the engine for a moment."""

PAUSE_IDLE_SECONDS_MAX = 0.05
"""Longest pause otherwise: 20 polls a second keep connections alive for well under 1 % of a core."""

PAUSE_SECONDS_MIN = 0.00005
"""Shorter pauses are not worth a system call (the kernel's timer slack alone is 50 us); the loop spins instead."""

PAUSE_FRACTION = 0.25
"""Pause this fraction of the time since the last activity: a wait overshoots by at most a quarter."""

POLL_WORKED_CPU_SECONDS = 0.00002
POLL_WORKED_CPU_SECONDS_PER_READ = 0.000005
"""A poll that computed for longer than this moved data (an empty one takes 2 us, and 1 more for each READ), so the next
one follows at once. Waiting does not count: not for a core, and not for the interpreter."""

LOOK_SECONDS = 0.0002
"""Commands that wait are run for so long before there is another look at the READs in flight."""

OPEN_PROGRESS_SECONDS = 10.0
"""How often whoever waits for the agent is told for how long."""

EXIT_SECONDS_MAX = 2.0
"""How long the end of the process waits for a port that nobody closed."""

UNDELIVERED_EVENTS_MAX = 10_000
"""Notifications are left inside NIXL while so many events wait for the trio thread."""

PROBE_BYTES = 8
"""Of a descriptor that is read a second time, or for the sake of the connection, if it is so long."""

_METADATA_BEGIN = b"nixlSerDes|Agent"
_LENGTH_BYTES = 8
"""Of an agent's metadata: what they begin with, and the length of the name that follows."""

_ONE = np.zeros(1, dtype=np.int32)
"""The ids of a READ of the first descriptor of a list."""

CLOCK = BootClock()

_log = get_logger()


class Scratch(NamedTuple):
    """Memory of PROBE_BYTES for the first READ from each peer, and who keeps it."""

    memory: MemoryRange
    owner: object


class CallRefused(Exception):
    """A command failed before or inside NIXL. Carries text only (see the module's first rule)."""

    def __init__(self, error: str, *, transport_lost: bool = False) -> None:
        super().__init__(error)
        self.error = error
        self.transport_lost = transport_lost


class _Queued:
    """Something on its way to the agent's thread.

    Either the thread or a canceller claims it, whoever comes first; a lock taken once is the atomic test-and-set.
    """

    __slots__ = ("_claim",)

    def __init__(self) -> None:
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """True for the first caller only."""
        return self._claim.acquire(blocking=False)


class Command(_Queued):
    """One call on its way to the agent's thread and back.

    `failure` is set when the call failed, `closed` when the thread ended before it came to it, else `result` holds.
    """

    __slots__ = ("call", "closed", "failure", "result")

    def __init__(self, call: Callable[[AgentCore], Any]) -> None:
        super().__init__()
        self.call = call
        self.result: Any = None
        self.failure: CallRefused | None = None
        self.closed = False


class ReadOrdered(_Queued):
    """A READ whose turn comes. Nobody waits for it: what becomes of it are events."""

    __slots__ = ("handle", "local", "local_ids", "remote", "remote_ids")

    def __init__(
        self,
        handle: ReadHandle,
        local: DescriptorListHandle,
        local_ids: DescriptorIds,
        remote: DescriptorListHandle,
        remote_ids: DescriptorIds,
    ) -> None:
        super().__init__()
        self.handle = handle
        self.local = local
        self.local_ids = local_ids
        self.remote = remote
        self.remote_ids = remote_ids

    def refused(self, error: str, *, transport_lost: bool = False) -> ReadEnded:
        """Nothing of it was handed to NIXL."""
        return ReadEnded(
            handle=self.handle,
            ended_ns=CLOCK.now_ns(),
            error=error,
            transport_lost=transport_lost,
            was_posted=False,
        )


class ThreadEnded(msgspec.Struct, frozen=True):
    """The last thing the thread says. `abandoned`: READs that may still write, so their memory must not be reused."""

    abandoned: tuple[ReadHandle, ...]


Outgoing = Command | ThreadEnded | NixlEvent


class _Prepared(NamedTuple):
    """NIXL's handles of a list, and of the list of the first bytes of each of its descriptors."""

    whole: Any
    probe: Any


class _List:
    """A prepared descriptor list. `prepared` is None once its remote agent is gone."""

    __slots__ = ("agent", "block_length_bytes", "prepared", "run_ends", "run_lengths_bytes")

    def __init__(self, agent: AgentName | None, runs: Sequence[MemoryRun], prepared: _Prepared) -> None:
        self.agent = agent
        self.prepared: _Prepared | None = prepared
        lengths = {run.length_bytes for run in runs}
        self.block_length_bytes = lengths.pop() if len(lengths) == 1 else None
        self.run_lengths_bytes = np.array([run.length_bytes for run in runs], dtype=np.int64)
        self.run_ends = np.cumsum([run.count for run in runs])

    def length_bytes(self, ids: DescriptorIds) -> int:
        """Bytes named by `ids`, which NIXL has found valid."""
        if self.block_length_bytes is not None:
            return self.block_length_bytes * len(ids)
        return int(self.run_lengths_bytes[np.searchsorted(self.run_ends, ids, side="right")].sum())


class _Read:
    """A READ from `agent`.

    Attributes:
        transfer: its handle.
        probe: handle of the second reading from its last descriptor; None when there is only one. See the module's
            rules.
        is_probing: the probe was posted, so its state counts.
        post_error: what posting raised: (text, transport_lost).
    """

    __slots__ = ("agent", "bytes", "descriptors", "is_probing", "post_error", "probe", "transfer")

    def __init__(self, agent: AgentName, transfer: Any, probe: Any | None, length_bytes: int, descriptors: int) -> None:
        self.agent = agent
        self.transfer = transfer
        self.probe = probe
        self.is_probing = False
        self.bytes = length_bytes
        self.descriptors = descriptors
        self.post_error: tuple[str, bool] | None = None


class AgentCore:
    """A NIXL agent and what belongs to it. Created, used and destroyed on one thread.

    Every method may raise whatever NIXL raises; `describe` turns that into text.
    """

    def __init__(
        self,
        agent_name: AgentName,
        ranges: Sequence[MemoryRange],
        backends: Sequence[str],
        num_threads: int,
        package: str,
        scratch: Scratch | None,
        owner: object,
    ) -> None:
        self._nixl = _import_nixl(package)
        self._name = agent_name
        if "UCX" in backends:
            num_threads = 0  # see the module's rules
        config = self._nixl.nixl_agent_config(
            enable_prog_thread=False,
            capture_telemetry=True,
            num_threads=num_threads,
            backends=list(backends),
            # The backend's threads use the agent too, and NIXL guards nothing by default (docs/nixl.md fact 20).
            sync_mode=self._nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW if num_threads > 0 else None,
        )
        self._agent = self._nixl.nixl_agent(agent_name, config)
        missing = [backend for backend in backends if backend not in self._agent.backends]
        if missing:
            raise CallRefused(f"NIXL has no usable backend {', '.join(missing)}")
        # Whoever keeps the memory of `ranges`: for as long as NIXL may write there, so do we.
        self._owner = owner
        self._registrations: list[Any] = []
        for kind in dict.fromkeys(each.memory_kind for each in ranges):
            described = [(r.address, r.length_bytes, r.device_id, "") for r in ranges if r.memory_kind == kind]
            self._registrations.append(self._agent.register_memory(described, kind, list(backends)))
        self.registered_ranges = len(ranges)
        memory, self._scratch_owner = scratch or _scratch_on_host()
        row, self._scratch_kind = (memory.address, PROBE_BYTES, memory.device_id), memory.memory_kind
        self._registrations.append(self._agent.register_memory([(*row, "")], memory.memory_kind, list(backends)))
        self._scratch: Any = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", [row], memory.memory_kind)
        self.metadata: bytes = bytes(self._agent.get_agent_metadata())
        self.agents: dict[AgentName, bytes] = {}
        """With a digest of the metadata that each was loaded with."""
        self.lists: dict[DescriptorListHandle, _List] = {}
        self.reads: dict[ReadHandle, _Read] = {}
        """READs in flight."""
        self.errored: dict[ReadHandle, _Read] = {}
        """READs that ended with an error and may still write; their handles are kept."""
        self.first_reads: dict[AgentName, Any] = {}
        """Handles of READs that nobody has asked for, in flight. See the module's rules."""
        self._met: set[AgentName] = set()
        """Agents from which something was read."""
        self.notification_polls_lost = 0
        self._leaving: set[AgentName] = set()
        self._done: list[tuple[ReadHandle, _Read]] = []
        """READs that are done and not yet tidied up."""
        self._unreleasable: list[_Read] = []
        self._received: list[NixlEvent] = []

    def add_remote_agent(self, metadata: bytes) -> AgentName:
        """Load a peer, or keep it if its removal is still waiting for a READ."""
        named, digest = _agent_named_in(metadata), hashlib.sha256(metadata).digest()
        if named is not None and self.agents.get(named, digest) != digest:
            raise CallRefused(f"agent {named} is loaded, with other metadata")
        loaded: bytes | str = self._agent.add_remote_agent(metadata)
        name = _text(loaded)
        if isinstance(loaded, bytes) and name.encode() != loaded:
            self._agent.remove_remote_agent(loaded)
            raise CallRefused(f"the agent's name is not UTF-8: {name}")
        self.agents[name] = digest
        self._leaving.discard(name)
        return name

    def remove_remote_agent(self, name: AgentName) -> None:
        """Forget a peer, now or when no READ from it is in flight; its lists are of no use from now on."""
        if name not in self.agents:
            return
        for known in self.lists.values():
            if known.agent == name:
                self._release_prepared(known)
        self._leaving.add(name)
        self._finish_removal(name)

    def _finish_removal(self, name: AgentName) -> None:
        if name not in self._leaving or any(read.agent == name for read in self.reads.values()):
            return
        if any(read.agent == name for _, read in self._done):
            return
        self._leaving.discard(name)
        del self.agents[name]
        self._met.discard(name)
        self._agent.remove_remote_agent(name)
        self._forget_first_read(name)
        for handle in [handle for handle, read in self.errored.items() if read.agent == name]:
            if self._release(self.errored[handle]):
                del self.errored[handle]

    def prepare(self, handle: DescriptorListHandle, agent: AgentName | None, runs: Sequence[MemoryRun]) -> None:
        """Prepare a list under the port's `handle`; `agent` is None for local memory."""
        if not runs:
            raise CallRefused("no memory runs given")
        kind, *others = dict.fromkeys(run.memory_kind for run in runs)
        if others:
            raise CallRefused(f"one list has runs of {kind} and of {', '.join(others)}")
        if agent is not None and (agent not in self.agents or agent in self._leaving):
            raise CallRefused(f"remote agent {agent} is not loaded")
        rows = np.array(
            [(run.address, run.length_bytes, run.device_id, run.stride_bytes, run.count) for run in runs],
            dtype=np.uint64,
        )
        side = "NIXL_INIT_AGENT" if agent is None else agent
        whole = self._agent.prep_xfer_dlist(side, rows, kind)
        rows[:, 1] = np.minimum(rows[:, 1], PROBE_BYTES)
        try:
            probe = self._agent.prep_xfer_dlist(side, rows, kind)
        except Exception:
            self._agent.release_dlist_handle(whole)
            raise
        self.lists[handle] = _List(agent, runs, _Prepared(whole, probe))
        if agent is not None and kind == self._scratch_kind and runs[0].length_bytes >= PROBE_BYTES:
            self._read_first(agent, probe)

    def _read_first(self, agent: AgentName, probe: Any) -> None:
        """Have UCX make its connections, unless it has."""
        if agent in self._met:
            return
        self._met.add(agent)
        try:
            self.first_reads[agent] = self._make_read(self._scratch, _ONE, probe, _ONE)
            self._agent.transfer(self.first_reads[agent])
        except Exception:
            self._forget_first_read(agent)

    def _forget_first_read(self, agent: AgentName) -> None:
        transfer = self.first_reads.pop(agent, None)
        if transfer is not None:
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(transfer)

    def release_list(self, handle: DescriptorListHandle) -> None:
        """Unknown handles are ignored."""
        known = self.lists.pop(handle, None)
        if known is not None:
            self._release_prepared(known)

    def _release_prepared(self, known: _List) -> None:
        prepared, known.prepared = known.prepared, None
        for handle in prepared or ():
            self._agent.release_dlist_handle(handle)

    def post_read(self, order: ReadOrdered) -> ReadPosted | ReadEnded:
        """Post a READ; returns its end if that is known already.

        Raises only when nothing was handed to the back end.
        """
        local_list, remote_list = self._usable(order.local), self._usable(order.remote)
        if local_list.agent is not None or remote_list.agent is None:
            raise CallRefused("a READ goes from a remote list to a local one")
        handle, local_ids, remote_ids = order.handle, order.local_ids, order.remote_ids
        for ids in (local_ids, remote_ids):
            if ids.dtype != np.int32 or ids.ndim != 1:  # NIXL truncates floats without a word
                raise CallRefused(f"descriptor ids must be int32 in one dimension, not {ids.dtype} in {ids.ndim}")
        local_prepared, remote_prepared = local_list.prepared, remote_list.prepared
        assert local_prepared is not None
        assert remote_prepared is not None
        probe = None
        try:
            transfer = self._make_read(local_prepared.whole, local_ids, remote_prepared.whole, remote_ids)
            if len(local_ids) > 1:
                probe = self._make_read(local_prepared.probe, local_ids[-1:], remote_prepared.probe, remote_ids[-1:])
        except self._nixl.nixlBind.nixlNotFoundError as error:
            raise CallRefused(f"NIXL has forgotten agent {remote_list.agent}: {error}", transport_lost=True) from None
        length_bytes = local_list.length_bytes(local_ids)
        read = self.reads[handle] = _Read(remote_list.agent, transfer, probe, length_bytes, len(local_ids))
        try:
            state = self._agent.transfer(transfer)
        except Exception as error:
            # Some of its requests may be on their way, so it counts as posted.
            read.post_error = self.describe(error)
            return self._look_at(handle, read) or ReadPosted(handle)
        return self._take_state(handle, read, state) or ReadPosted(handle)

    def _make_read(self, local: Any, local_ids: DescriptorIds, remote: Any, remote_ids: DescriptorIds) -> Any:
        """A READ of NIXL's, between two of its prepared lists."""
        return self._agent.make_prepped_xfer(
            "READ", local, np.ascontiguousarray(local_ids), remote, np.ascontiguousarray(remote_ids)
        )

    def _usable(self, handle: DescriptorListHandle) -> _List:
        prepared = self.lists.get(handle)
        if prepared is None:
            raise CallRefused(f"descriptor list {handle} is not known")
        if prepared.prepared is None:
            raise CallRefused(f"remote agent {prepared.agent} was removed; prepare its list again", transport_lost=True)
        return prepared

    def send_notification(self, agent: AgentName, message: bytes) -> None:
        try:
            self._agent.send_notif(agent, message)
        except self._nixl.nixlBind.nixlNotFoundError as error:
            raise CallRefused(f"NIXL does not know agent {agent}: {error}", transport_lost=True) from None

    def poll_reads(self) -> list[NixlEvent]:
        """Ask for the state of every READ in flight; this also makes them progress and sends their notifications."""
        for agent, transfer in list(self.first_reads.items()):
            try:
                is_over = self._agent.check_xfer_state(transfer) == "DONE"
            except Exception:
                is_over = True
            if is_over:
                self._forget_first_read(agent)
        ended = [self._look_at(handle, read) for handle, read in list(self.reads.items())]
        return [event for event in ended if event is not None]

    def _look_at(self, handle: ReadHandle, read: _Read) -> ReadEnded | None:
        """The end of a READ, if it has one by now."""
        try:
            state = self._agent.check_xfer_state(read.probe if read.is_probing else read.transfer)
        except self._nixl.nixlBind.nixlNotFoundError as error:
            # NIXL has forgotten the peer, and the READ with it, which may go on all the same (docs/nixl.md fact 28).
            text = f"NIXL has forgotten agent {read.agent}: {error}"
            return self._end(handle, read, read.post_error or (text, True), is_forgotten=True)
        except Exception as error:
            return self._end(handle, read, read.post_error or self.describe(error))
        return self._take_state(handle, read, state)

    def _take_state(self, handle: ReadHandle, read: _Read, state: str) -> ReadEnded | None:
        """What NIXL's state means for a READ: its end, or None while it is in flight."""
        if state != "DONE":
            return None
        if read.post_error is None and read.probe is not None and not read.is_probing:
            try:
                # This makes UCX progress: it may have a failed request to deal with.
                self._received += self._take_notifications()
                read.is_probing = True
                state = self._agent.transfer(read.probe)
            except Exception as error:
                return self._end(handle, read, self.describe(error))
            if state != "DONE":
                return None
        # Of a READ whose post raised, some descriptors may never have been handed over: then "DONE" means less.
        return self._end(handle, read, read.post_error)

    def _end(
        self, handle: ReadHandle, read: _Read, failure: tuple[str, bool] | None, *, is_forgotten: bool = False
    ) -> ReadEnded:
        """Take a READ out of flight. `is_forgotten`: NIXL knows nothing of it any more, also not whether it is over."""
        ended_ns = CLOCK.now_ns()
        quiescent = failure is None
        del self.reads[handle]
        if failure is None:
            self._done.append((handle, read))
        else:
            if read.descriptors == 1 and not is_forgotten and self._release(read):
                quiescent = True  # its only request is the one that failed
            else:
                self.errored[handle] = read
            self._finish_removal(read.agent)
        error, transport_lost = failure or (None, False)
        return ReadEnded(
            handle=handle,
            ended_ns=ended_ns,
            error=error,
            transport_lost=transport_lost,
            quiescent=quiescent,
            bytes=read.bytes,
            descriptors=read.descriptors,
        )

    def tidy(self) -> list[NixlEvent]:
        """Measure and release what is done. Not before its end was delivered, for which a request waits."""
        measured: list[NixlEvent] = []
        while self._done:
            handle, read = self._done.pop()
            in_transport, to_post = self._durations_seconds(read.transfer)
            measured.append(
                ReadMeasured(
                    handle=handle,
                    bytes=read.bytes,
                    descriptors=read.descriptors,
                    seconds_in_transport=in_transport,
                    seconds_to_post=to_post,
                )
            )
            if not self._release(read):
                self._unreleasable.append(read)
            self._finish_removal(read.agent)
        return measured

    def _durations_seconds(self, transfer: Any) -> tuple[float, float]:
        """What telemetry says of a READ that is done (before that it says garbage)."""
        try:
            telemetry = self._agent.get_xfer_telemetry(transfer)
            return telemetry.xferDuration / 1e6, telemetry.postDuration / 1e6
        except Exception:
            return 0.0, 0.0

    def _release(self, read: _Read) -> bool:
        """Release a READ. False when NIXL refuses; then somebody has to keep it until the agent's end."""
        try:
            for transfer in (read.transfer, read.probe):
                if transfer is not None:
                    self._agent.release_xfer_handle(transfer)
        except Exception:
            return False
        return True

    def poll_notifications(self) -> list[NixlEvent]:
        """What has arrived since the last call."""
        received, self._received = self._received + self._take_notifications(), []
        return received

    def _take_notifications(self) -> list[NixlEvent]:
        """Take notifications out of NIXL. A poll that fails for a sender's name is counted; what it got is lost."""
        try:
            with _lenient_decoding(self.notification_polls_lost > 0):
                received: dict[Any, list[bytes]] = self._agent.get_new_notifs()
        except UnicodeDecodeError as error:
            self.notification_polls_lost += 1
            if self.notification_polls_lost == 1:
                _log.warning(
                    "NIXL agent %s lost notifications: the name of a sender, %s, is not UTF-8",
                    self._name,
                    repr(error.object)[:200],
                )
            return []
        return [
            NotificationReceived(_text(sender), bytes(message))
            for sender, messages in received.items()
            for message in messages
        ]

    def describe(self, error: Exception) -> tuple[str, bool]:
        """(text, transport_lost) of something that a method raised."""
        if isinstance(error, CallRefused):
            return error.error, error.transport_lost
        lost = isinstance(error, self._nixl.nixlBind.nixlRemoteDisconnectError)
        return f"{type(error).__name__}: {error}", lost

    def destroy(self) -> None:
        """Give everything back; only without READs that may still write. NIXL's objects die here, on this thread."""
        self.tidy()
        for handle in list(self.lists):
            self.release_list(handle)
        for name in list(self.agents):
            self._agent.remove_remote_agent(name)
        for name in list(self.first_reads):
            self._forget_first_read(name)
        self._agent.release_dlist_handle(self._scratch)
        for each in self._registrations:
            self._agent.deregister_memory(each)
        self.agents.clear()
        self._unreleasable.clear()
        self._registrations = []
        self.registered_ranges = 0
        del self._agent, self._scratch, self._owner

    def leak(self) -> None:
        """Keep everything alive for the life of the process, the registered memory too, on purpose: a READ may still
        write.

        Releasing it would not stop it, and taking the agent apart under it is worse. One more reference than the
        interpreter can drop keeps the destructors from running even when the process ends.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


class AgentThread:
    """Runs one `AgentCore`.

    `deliver` is called on this thread with everything that goes back; `backlog` tells how much of it still waits there.
    """

    def __init__(
        self,
        make_core: Callable[[], AgentCore],
        name: str,
        deliver: Callable[[Sequence[Outgoing]], None],
        backlog: Callable[[], int],
    ) -> None:
        self._deliver = deliver
        self._backlog = backlog
        self._commands: CommandQueue[Command | ReadOrdered] = CommandQueue()
        self._opened = threading.Event()
        self._open_failure: CallRefused | None = None
        self._ended = threading.Event()
        self._close_at: float | None = None
        self._expecting = False
        self.turns = 0
        """How often its loop has come round, which it does several times a second unless a call does not return."""
        self.core: AgentCore | None = None
        self.abandoned: tuple[ReadHandle, ...] = ()
        self.name = name
        self._thread = threading.Thread(target=self._main, args=(make_core,), name=name, daemon=True)

    def open(self, timeout_seconds: float, on_wait: Callable[[float], None]) -> AgentCore:
        """Start the thread and wait for its agent; `on_wait` hears for how long so far. Raises CallRefused."""
        atexit.register(self._end_before_exit)
        self._thread.start()
        started = time.monotonic()
        while not self._opened.wait(min(OPEN_PROGRESS_SECONDS, max(0.0, started + timeout_seconds - time.monotonic()))):
            waited_seconds = time.monotonic() - started
            if waited_seconds >= timeout_seconds:
                self.close(0.0)
                raise CallRefused(f"no NIXL agent within {timeout_seconds:g} s")
            on_wait(waited_seconds)
        if self.core is None:
            raise self._open_failure or CallRefused("the agent's thread ended")
        return self.core

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, queued: Command | ReadOrdered) -> bool:
        """Queue something. False (and the caller keeps it) when the thread has ended."""
        self._commands.put(queued)
        return not (self._ended.is_set() and queued.claim())

    def expect_notifications(self, expected: bool) -> None:
        self._expecting = expected
        self._commands.ring()

    def close(self, grace_seconds: float) -> None:
        """End the thread when no READ is in flight, or after `grace_seconds`; may be called again to hurry it."""
        self._close_at = time.monotonic() + grace_seconds
        self._commands.ring()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def _end_before_exit(self) -> None:
        """End while there is time: a thread that is stopped inside C++ may abort the process (1 run of 6 did)."""
        self.close(0.0)
        self.join(EXIT_SECONDS_MAX)

    def _main(self, make_core: Callable[[], AgentCore]) -> None:
        leave_single_cpu()
        try:
            self.core = make_core()
        except Exception as error:
            # A new exception: the traceback of this one would carry NIXL objects to another thread.
            self._open_failure = (
                CallRefused(error.error) if isinstance(error, CallRefused) else CallRefused(f"{_kind(error)}: {error}")
            )
        self._opened.set()
        if self.core is not None:
            self._run(self.core)
        self._ended.set()
        atexit.unregister(self._end_before_exit)

    def _run(self, core: AgentCore) -> None:
        failure: str | None = None
        try:
            self._serve(core)
        except Exception as error:
            failure = f"{_kind(error)}: {error}"
        self.abandoned = (*core.reads, *core.errored)
        if self.abandoned or core.first_reads or failure is not None:
            if self.abandoned:
                _log.warning(
                    "%d READ(s) have not ended: their NIXL agent is kept until this process ends, with the memory that "
                    "they may still write into",
                    len(self.abandoned),
                )
            core.leak()
        else:
            try:
                core.destroy()
            except Exception as error:
                failure = f"{_kind(error)}: {error}"
                core.leak()
        self._ended.set()  # before the last look at the queue: see `submit`
        refused = self._refuse_queued()
        broken = [PortBroken(failure)] if failure is not None else []
        self._deliver([*refused, *broken, ThreadEnded(self.abandoned)])

    def _refuse_queued(self) -> list[Outgoing]:
        refused: list[Outgoing] = []
        while (queued := self._commands.take()) is not None:
            if not queued.claim():
                continue
            if isinstance(queued, ReadOrdered):
                refused.append(queued.refused("the port is closed"))
            else:
                queued.closed = True
                refused.append(queued)
        return refused

    def _serve(self, core: AgentCore) -> None:
        """One command at a time. A burst of them hides no completion for longer than one takes, and is not slowed down
        by looks at all READs after each."""
        active_at = looked_at = time.monotonic()
        notifications_at = 0.0
        pause_seconds = 0.0
        while True:
            self.turns += 1
            if self._execute_next(core, pause_seconds):
                active_at = time.monotonic()
                if active_at - looked_at < LOOK_SECONDS and not self._commands.is_empty:
                    continue
            started, started_cpu = time.monotonic(), time.thread_time()
            if self._close_at is not None and (not core.reads or started >= self._close_at):
                return
            events = core.poll_reads() if core.reads or core.first_reads else []
            ceiling_seconds = self._pause_seconds_max(core)
            # Without READs this is what makes UCX progress: a peer may be reading from us.
            is_due = not core.reads or started >= notifications_at
            if is_due and self._backlog() < UNDELIVERED_EVENTS_MAX:
                events += core.poll_notifications()
                notifications_at = started + min(ceiling_seconds, PAUSE_EXPECTING_SECONDS_MAX)
            now, cpu_seconds = time.monotonic(), time.thread_time() - started_cpu
            looked_at = now
            if events:
                self._deliver(events)
                self._tidy(core)
            worked = cpu_seconds > POLL_WORKED_CPU_SECONDS + POLL_WORKED_CPU_SECONDS_PER_READ * len(core.reads)
            if events or worked:
                # After a pause the caches are cold, and an empty poll takes as long: the next one will tell.
                if events or pause_seconds < PAUSE_SECONDS_MIN:
                    active_at = now
                notifications_at = now
                pause_seconds = 0.0
            else:
                floor_seconds = 0.0 if core.reads else PAUSE_SECONDS_MIN
                pause_seconds = max(min((now - active_at) * PAUSE_FRACTION, ceiling_seconds), floor_seconds)

    def _pause_seconds_max(self, core: AgentCore) -> float:
        if core.reads:
            return PAUSE_READING_SECONDS_MAX
        return PAUSE_EXPECTING_SECONDS_MAX if self._expecting or core.first_reads else PAUSE_IDLE_SECONDS_MAX

    def _execute_next(self, core: AgentCore, pause_seconds: float) -> bool:
        """Wait for a command and run it. False when the pause went by without one."""
        command = self._commands.take()
        if command is None and pause_seconds >= PAUSE_SECONDS_MIN:
            self._commands.wait(pause_seconds)
            command = self._commands.take()
        if command is None:
            return False
        if command.claim():
            self._deliver(
                [self._post(core, command) if isinstance(command, ReadOrdered) else self._call(core, command)]
            )
            self._tidy(core)
        return True

    def _call(self, core: AgentCore, command: Command) -> Command:
        try:
            command.result = command.call(core)
        except Exception as error:
            text, lost = core.describe(error)
            command.failure = CallRefused(text, transport_lost=lost)
        return command

    def _post(self, core: AgentCore, order: ReadOrdered) -> ReadPosted | ReadEnded:
        try:
            return core.post_read(order)
        except Exception as error:
            text, lost = core.describe(error)
            return order.refused(text, transport_lost=lost)

    def _tidy(self, core: AgentCore) -> None:
        """After what is waited for has been delivered."""
        measured = core.tidy()
        if measured:
            self._deliver(measured)


def _scratch_on_host() -> Scratch:
    owner = np.zeros(PROBE_BYTES, dtype=np.uint8)
    return Scratch(MemoryRange(owner.ctypes.data, owner.nbytes), owner)


def _import_nixl(package: str) -> Any:
    """The NIXL Python API.

    UCX keeps unreleased registrations without bound unless told otherwise before it is loaded; vLLM sets the same
    limit for its own connector.
    """
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    return importlib.import_module(f"{package}._api")


_thread_state = threading.local()


@contextlib.contextmanager
def _lenient_decoding(wanted: bool) -> Iterator[None]:
    """Let a call of NIXL, on this thread, replace bytes that are not UTF-8 instead of raising.

    `getNotifs` takes all notifications out of the agent, and then decodes the names of their senders. If one name is
    not UTF-8, the exception takes the notifications of all senders with it, and no call of the binding gets around
    that: each returns the same map. What it does honour is Python's registry of codec error handlers, where "strict"
    can be replaced. The replacement acts as before for every other call and thread. Still it is process-wide, so it is
    made only in a process that such a sender has reached.
    """
    if wanted:
        codecs.register_error("strict", _strict_but_here)
    _thread_state.is_lenient = wanted
    try:
        yield
    finally:
        _thread_state.is_lenient = False


def _strict_but_here(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeDecodeError) and getattr(_thread_state, "is_lenient", False):
        return codecs.backslashreplace_errors(error)
    return codecs.strict_errors(error)


def _agent_named_in(metadata: bytes) -> AgentName | None:
    """Whose metadata these are, which NIXL writes first; None: no agent's."""
    name_at = len(_METADATA_BEGIN) + _LENGTH_BYTES
    if not metadata.startswith(_METADATA_BEGIN):
        return None
    length = int.from_bytes(metadata[len(_METADATA_BEGIN) : name_at], "little")
    return _text(metadata[name_at : name_at + length])


def _text(name: str | bytes) -> AgentName:
    """An agent name as text; one that is not UTF-8 stays distinguishable."""
    return name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else name


def _kind(error: Exception) -> str:
    return type(error).__name__
