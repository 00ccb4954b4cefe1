"""A NIXL agent with everything that belongs to it: descriptor lists, READs in flight, agents of peers.

Rules
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
    so that the call mostly returns before the engine thread has noticed that it could have the interpreter. That holds
    for one connection. UCX's threads have one each, and it cannot be asked in which state these are (docs/nixl.md fact
    32). So UCX is given no threads.
* The first READ between two agents makes UCX's connections and takes it milliseconds longer than any further one,
  whatever was asked of NIXL before. So when the first list of an agent is prepared, the first bytes of its memory are
  read into a few of the port's own. Whoever wants to read more can wait for its end (`FirstReadOver`): from then on the
  connection belongs to the process that answered (docs/nixl.md fact 44). The agent's removal does not wait for it; its
  handle is released after that.
* Metadata that name an agent which is loaded are handed to NIXL only if they are those that it was loaded with. With
  others of the same connection NIXL would forget the agent when it comes to a mistake in them, while READs from it go
  on (docs/nixl.md fact 33); any process that answers a handshake can send those.
* Metadata that would end the process are refused (fact 37): those with an address of a version that UCX does not know
  or a type of memory that NIXL does not know, and those in which nobody can tell the version, if it can be told of the
  agent's own. NIXL reads what it would never write.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from connector.observe.log import get_logger
from connector.ports.descriptors import is_descriptor_left
from connector.ports.nixl import (
    AgentName,
    DescriptorIds,
    DescriptorListHandle,
    MemoryRange,
    MemoryRun,
    NixlEvent,
    NotificationReceived,
    PortReadEnded,
    ReadHandle,
    ReadMeasured,
    ReadPosted,
)
from connector.ports.nixl_agent import listeners
from connector.ports.nixl_agent.calls import CLOCK, CallRefused, FirstReadOver, ReadOrdered
from connector.ports.nixl_agent.looks import Looks
from connector.ports.nixl_agent.metadata import (
    MEMORY_TYPE_KNOWN,
    UCX_ADDRESS_VERSION_KNOWN,
    MetadataUnreadable,
    agent_named_in,
    newest_memory_type,
    ucx_address_in,
    ucx_version,
)
from connector.ports.nixl_agent.names import agent_text, lenient_decoding

PROBE_BYTES = 8
"""Bytes of a descriptor that are read where it is read a second time or only to open the connection; all of a shorter
one."""

_ONE = np.zeros(1, dtype=np.int32)
"""The ids of a READ of the first descriptor of a list."""

_log = get_logger()


class Scratch(NamedTuple):
    """Memory of PROBE_BYTES for the first READ from each peer, and who keeps it."""

    memory: MemoryRange
    owner: object


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


class Read:
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
        ucx_config: str | None,
        package: str,
        scratch: Scratch | None,
        owner: object,
    ) -> None:
        self._nixl = _import_nixl(package)
        self._name = agent_name
        if "UCX" in backends:
            num_threads = 0  # see the module's rules
        # NIXL makes no back end with such settings by itself.
        made_by_nixl = [each for each in backends if each != "UCX" or ucx_config is None]
        config = self._nixl.nixl_agent_config(
            enable_prog_thread=False,
            capture_telemetry=True,
            num_threads=num_threads,
            backends=made_by_nixl,
            # The backend's threads use the agent too, and NIXL guards nothing by default (docs/nixl.md fact 20).
            sync_mode=self._nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW if num_threads > 0 else None,
        )
        listening = listeners.listening()
        self._agent = self._nixl.nixl_agent(agent_name, config)
        if ucx_config is not None and "UCX" in backends:
            self._agent.create_backend("UCX", {"num_threads": str(num_threads), "engine_config": ucx_config})
        missing = [backend for backend in backends if backend not in self._agent.backends]
        if missing:
            raise CallRefused(f"NIXL has no usable backend {', '.join(missing)}")
        # What keeps the memory of `ranges`: for as long as NIXL may write there, so do we.
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
        self.listeners = listeners.of_agent(listening, ucx_address_in(self.metadata))
        """At which other engines connect to it."""
        self._ucx_version_max = UCX_ADDRESS_VERSION_KNOWN
        self._are_metadata_readable = True
        """Those that this NIXL writes."""
        try:
            self._ucx_version_max = max(self._ucx_version_max, ucx_version(self.metadata) or 0)
        except MetadataUnreadable:
            self._are_metadata_readable = False
        self.agents: set[AgentName] = set()
        """Those that were added and not removed yet."""
        self._loaded: dict[AgentName, bytes] = {}
        """What NIXL has loaded, with a digest of the metadata of each."""
        self.lists: dict[DescriptorListHandle, _List] = {}
        self.reads: dict[ReadHandle, Read] = {}
        """READs in flight."""
        self._looks = Looks()  # has the same READs
        self.looked_at = 0
        """READs that the last poll asked about: of those in flight, and the first ones from peers."""
        self.errored: dict[ReadHandle, Read] = {}
        """READs that ended with an error and may still write; their handles are kept."""
        self.first_reads: dict[AgentName, Any] = {}
        """Handles of READs that no request has asked for, in flight. See the module's rules."""
        self._met: set[AgentName] = set()
        """Agents from which something was read."""
        self._first_failures: dict[AgentName, tuple[str, bool]] = {}
        """How the first READ from an agent failed, as `describe` has it."""
        self._first_reads_over: list[FirstReadOver] = []
        self.notification_polls_lost = 0
        self._leaving: set[AgentName] = set()
        self._done: list[tuple[ReadHandle, Read]] = []
        """READs that are done and not yet tidied up."""
        self._unreleasable: list[Read] = []
        self._received: list[NixlEvent] = []

    def add_remote_agent(self, metadata: bytes) -> AgentName:
        """Load a peer, or keep it if its removal is still waiting for a READ."""
        named, digest = agent_named_in(metadata), hashlib.sha256(metadata).digest()
        if named is not None and self._loaded.get(named, digest) != digest:
            raise CallRefused(f"agent {named} is loaded, with other metadata")
        self._require_known_version(metadata)
        _require_known_memory(metadata)
        try:
            loaded: bytes | str = self._agent.add_remote_agent(metadata)
        except Exception as error:
            if is_descriptor_left():
                raise
            raise CallRefused(f"no descriptor is left: {self.describe(error)[0]}", no_descriptor_left=True) from None
        name = agent_text(loaded)
        if isinstance(loaded, bytes) and name.encode() != loaded:
            self._agent.remove_remote_agent(loaded)
            raise CallRefused(f"the agent's name is not UTF-8: {name}")
        self.agents.add(name)
        self._loaded[name] = digest
        self._leaving.discard(name)
        return name

    def _require_known_version(self, metadata: bytes) -> None:
        """See the module's rules."""
        try:
            version = ucx_version(metadata) or 0
        except MetadataUnreadable:
            if not self._are_metadata_readable:
                return
            raise CallRefused(
                "its metadata are not as NIXL writes them; somebody has changed them on their way"
            ) from None
        if version > self._ucx_version_max:
            raise CallRefused(
                f"its UCX address is of version {version}, and UCX of this engine knows {self._ucx_version_max} at "
                "most; somebody has changed the metadata on their way, or its UCX is newer"
            )

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
        self.agents.remove(name)
        self._forget_agent(name)
        for handle in [handle for handle, read in self.errored.items() if read.agent == name]:
            if self._release(self.errored[handle]):
                del self.errored[handle]

    def _forget_agent(self, name: AgentName) -> None:
        del self._loaded[name]
        self._met.discard(name)
        self._first_failures.pop(name, None)
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            # Nothing is raised: this may come after the end of a READ, which somebody waits for.
            _log.warning("NIXL keeps agent %s, which nobody reads from any more: %s", name, self.describe(error)[0])
        self._end_first_read(name)

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
        except Exception:
            return  # says nothing about the connection
        try:
            self._agent.transfer(self.first_reads[agent])
        except Exception as error:
            self._end_first_read(agent, self.describe(error))

    def is_reached(self, agent: AgentName) -> bool:
        """Whether the first READ from an agent is over, or there is none. Raises when it failed."""
        if agent not in self.agents or agent in self._leaving:
            raise CallRefused(f"remote agent {agent} is not loaded")
        if failure := self._first_failures.get(agent):
            text, lost = failure
            raise CallRefused(text, transport_lost=lost)
        return agent not in self.first_reads

    def _end_first_read(self, agent: AgentName, failure: tuple[str, bool] | None = None) -> None:
        if failure is not None:
            self._first_failures[agent] = failure
        if agent in self.first_reads:
            self._forget_first_read(agent)
            self._first_reads_over.append(FirstReadOver(agent))

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

    def post_read(self, order: ReadOrdered) -> ReadPosted | PortReadEnded:
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
        read = self.reads[handle] = Read(remote_list.agent, transfer, probe, length_bytes, len(local_ids))
        self._looks.add(handle, (read.agent, False))
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

    def poll_reads(self) -> list[NixlEvent | FirstReadOver]:
        """Ask for the state of READs in flight, of those whose turn it is; this also makes all of them progress."""
        self.looked_at = len(self.first_reads)
        for agent, transfer in list(self.first_reads.items()):
            try:
                if self._agent.check_xfer_state(transfer) == "DONE":
                    self._end_first_read(agent)
            except Exception as error:
                self._end_first_read(agent, self.describe(error))
        ended: list[NixlEvent | FirstReadOver] = [*self._first_reads_over]
        self._first_reads_over.clear()
        for handle in self._looks.due():
            self.looked_at += 1
            event = self._look_at(handle, self.reads[handle])
            if event is not None:
                ended.append(event)
        return ended

    def _look_at(self, handle: ReadHandle, read: Read) -> PortReadEnded | None:
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

    def _take_state(self, handle: ReadHandle, read: Read, state: str) -> PortReadEnded | None:
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
                self._looks.move(handle, (read.agent, True))
                return None
        # Of a READ whose post raised, some descriptors may never have been handed over: then "DONE" means less.
        return self._end(handle, read, read.post_error)

    def _end(
        self, handle: ReadHandle, read: Read, failure: tuple[str, bool] | None, *, is_forgotten: bool = False
    ) -> PortReadEnded:
        """Take a READ out of flight. `is_forgotten`: NIXL knows nothing of it any more, also not whether it is over."""
        ended_ns = CLOCK.now_ns()
        quiescent = failure is None
        del self.reads[handle]
        self._looks.remove(handle)
        if failure is None:
            self._done.append((handle, read))
        else:
            if read.descriptors == 1 and not is_forgotten and self._release(read):
                quiescent = True  # its only request is the one that failed
            else:
                self.errored[handle] = read
            self._finish_removal(read.agent)
        error, transport_lost = failure or (None, False)
        return PortReadEnded(
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

    def _release(self, read: Read) -> bool:
        """Release a READ. False when NIXL refuses; then its handle has to be kept until the agent's end."""
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
            with lenient_decoding(self.notification_polls_lost > 0):
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
            NotificationReceived(agent_text(sender), bytes(message))
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


def _require_known_memory(metadata: bytes) -> None:
    """See the module's rules."""
    if (memory_type := newest_memory_type(metadata)) > MEMORY_TYPE_KNOWN:
        raise CallRefused(f"its memory is of type {memory_type}, and NIXL knows {MEMORY_TYPE_KNOWN} at most")


def _scratch_on_host() -> Scratch:
    owner = np.zeros(PROBE_BYTES, dtype=np.uint8)
    return Scratch(MemoryRange(owner.ctypes.data, owner.nbytes), owner)


def _import_nixl(package: str) -> Any:
    """The NIXL Python API, with what has to be said to UCX before it is loaded.

    It keeps unreleased registrations without bound unless told otherwise; vLLM sets the same limit for its own
    connector. It waits in the calling thread for its TCP connections, for minutes where a firewall drops what it sends
    (docs/nixl.md fact 45). And it takes SIGHUP, also where `nohup` has it ignored, as the order to log what it does
    (fact 43).
    """
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    os.environ.setdefault("UCX_TCP_CONN_NB", "y")
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    return importlib.import_module(f"{package}._api")
