"""The port: takes calls in a trio run, and hands them to the agent's thread.

How a call travels
The trio task puts a call into a queue and parks. The thread runs it, and puts the outcome into a `ThreadMailbox`, as
it does with events. The two threads share nothing else. No task parks for a READ: each turn of the trio loop that lies
between a request and its KV may be a wait for the interpreter, while the engine keeps that busy
(docs/performance.md).

A call that does not return (a driver or a device hangs) keeps the thread, and everything waits for it: it cannot be
known whether READs still write. To the waiting tasks it looks as if all peers hung at once. So a task of the trio run
looks at the thread now and then, and says in the log that it is this one.

Cancellation: a call that the thread has not begun is withdrawn; one that it has begun is waited for (as long as NIXL
takes for it), so a result is never lost and needs no disposal.

What this port cannot do
* Stop a READ; nor can NIXL.
* Vouch that nothing lands after the error of a READ with several descriptors, not even once its agent was removed.
* Keep the notifications of a poll that also brings the first one from a sender whose name is not UTF-8. Those of later
  polls are kept; see `names`.
* Notice every short READ. Over CMA, when part of one descriptor's remote memory is not mapped any more, UCX 1.23 copies
  what comes before the hole, and NIXL calls it done. It takes a peer that unmaps part of a registered range while it
  serves, which no engine does; a descriptor that is gone as a whole is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import trio

from connector.observe.advice import NIXL_HANGS
from connector.observe.hang_notice import HangNotice
from connector.observe.log import log_crash
from connector.ports.nixl import (
    AgentName,
    DescriptorIds,
    DescriptorListHandle,
    ListenerLost,
    MemoryRange,
    MemoryRun,
    NixlCallFailed,
    NixlEvent,
    PortBroken,
    PortClosed,
    PortCounts,
    ReadHandle,
)
from connector.ports.nixl_agent import listeners
from connector.ports.nixl_agent.calls import Call, CallRefused, FirstReadOver, Outgoing, ReadOrdered, ThreadEnded
from connector.ports.nixl_agent.core import AgentCore, Scratch
from connector.ports.nixl_agent.metadata import agent_named_in
from connector.ports.nixl_agent.other_back_ends import OtherBackEndCore
from connector.ports.nixl_agent.thread import AgentThread
from connector.thread_mailbox import ThreadMailbox

OPEN_SECONDS_MAX = 60.0
"""Creating an agent and registering little memory takes 0.5 s on a quiet machine; a NIC or GPU needs longer. An engine
has `registration_timeout_seconds` of `connector.config`."""

LOOKED_AT_SECONDS = 1.0
"""How often the thread is looked at. It hangs if it was found in the same turn again and again: after a pause of the
whole process it has not come round either, when it is looked at for the first time."""
LOOKS_UNTIL_LATE = 3
"""A call of NIXL that outlasts so many looks is late."""

_LISTENER_LOST = (
    "UCX has closed its TCP port {}, as it does when the process has no descriptor left (`ulimit -n`) for an engine "
    "that connects"
)

TEARDOWN_SECONDS_MAX = 10.0
"""How long `aclose` waits, after the grace, for a thread that may be stuck inside a NIXL call."""


_WHAT_MAY_LACK = (
    "UCX mostly has said why in the log just before: file descriptors, ulimit -n, memory, ports, UCX_TCP_PORT_RANGE, "
    "or transports, UCX_TLS and UCX_NET_DEVICES"
)


class RealNixlPort:
    """A NIXL agent on a thread of its own. Implements `NixlPort`; made by `open`.

    `set_event_callback` (or the first async call) ties the port to the trio run that it is called in.
    """

    def __init__(self, agent_name: AgentName, *, is_read_from: bool) -> None:
        self._agent_name = agent_name
        self._is_read_from = is_read_from
        self._handles = itertools.count(1)
        self._mailbox: ThreadMailbox[Outgoing] = ThreadMailbox(self._take, self._note_error)
        self._token: trio.lowlevel.TrioToken | None = None
        self._on_event: Callable[[NixlEvent], None] | None = None
        # What came before there was a callback to take it.
        self._early: list[NixlEvent] = []
        self.lag_seconds = 0.0
        """For how long NIXL has not come back from a call; 0 unless that is long. For any thread."""
        self._parked: dict[Call, trio.lowlevel.Task] = {}
        self._reaching: dict[AgentName, trio.Event] = {}
        """Set when it is worth asking again whether an agent is reached."""
        self._closing = False
        self._ended: ThreadEnded | None = None
        self._ended_event: trio.Event | None = None
        self._thread: AgentThread
        self._core: AgentCore

    @classmethod
    def open(
        cls,
        agent_name: AgentName,
        ranges: Sequence[MemoryRange],
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        *,
        ucx_config: str | None = None,
        package: str = "nixl",
        scratch: Scratch | None = None,
        owner: object = None,
        is_read_from: bool = True,
        prepare_thread: Callable[[], None] | None = None,
        timeout_seconds: float = OPEN_SECONDS_MAX,
        on_wait: Callable[[float], None] = lambda seconds: None,
    ) -> RealNixlPort:
        """Create the agent and register `ranges`; blocks the caller, which needs no trio run.

        `package` is NIXL's own name, which is another one in its wheel for ROCm. `scratch` is for the first READ from
        each peer with memory of that kind; None: on the host. `owner` is what keeps the memory of `ranges`; it lives
        until the agent is gone, which is until the process ends where a READ may still write. `num_threads` is for back
        ends other than UCX (0: none; otherwise NIXL locks its own state, too). `ucx_config`: variables of UCX for this
        agent alone, without their `UCX_`, joined by commas; those of the environment have precedence. `is_read_from`:
        peers connect to it, so `ListenerLost` is of interest. `prepare_thread` runs on the agent's thread first: for
        VRAM it must make the device current, or UCX finds no CUDA context and does without NVLink. `on_wait` is told
        from time to time how many seconds it has taken so far. Raises NixlCallFailed.
        """
        port = cls(agent_name, is_read_from=is_read_from)

        def make_core() -> AgentCore:
            if prepare_thread is not None:
                prepare_thread()
            kind = AgentCore if "UCX" in backends else OtherBackEndCore
            return kind(agent_name, ranges, backends, num_threads, ucx_config, package, scratch, owner)

        port._thread = AgentThread(make_core, f"nixl-{agent_name}"[:64], port._deliver, port._backlog)
        try:
            port._core = port._thread.open(timeout_seconds, on_wait)
        except CallRefused as refused:
            hint = "" if refused.no_descriptor_left else f" ({_WHAT_MAY_LACK})"
            raise NixlCallFailed("open", f"{refused.error}{hint}") from None
        return port

    @property
    def agent_name(self) -> AgentName:
        return self._agent_name

    @property
    def agent_metadata(self) -> bytes:
        return self._core.metadata

    def agent_named_in(self, metadata: bytes) -> AgentName | None:
        return agent_named_in(metadata)

    def set_event_callback(self, on_event: Callable[[NixlEvent], None]) -> None:
        self._attach()
        self._on_event = on_event
        for event in self._early:
            self._mailbox.append(event)
        self._early.clear()
        self._wake_trio()

    async def add_remote_agent(self, metadata: bytes) -> AgentName:
        name: AgentName = await self._call("add_remote_agent", lambda core: core.add_remote_agent(metadata))
        return name

    async def remove_remote_agent(self, name: AgentName) -> None:
        await self._call("remove_remote_agent", lambda core: core.remove_remote_agent(name))

    async def prepare_local(self, runs: Sequence[MemoryRun]) -> DescriptorListHandle:
        return await self._prepare("prepare_local", None, runs)

    async def prepare_remote(self, agent: AgentName, runs: Sequence[MemoryRun]) -> DescriptorListHandle:
        return await self._prepare("prepare_remote", agent, runs)

    async def _prepare(self, operation: str, agent: AgentName | None, runs: Sequence[MemoryRun]) -> int:
        handle = next(self._handles)
        await self._call(operation, lambda core: core.prepare(handle, agent, runs))
        return handle

    async def reach(self, agent: AgentName) -> None:
        while True:
            over = self._reaching.setdefault(agent, trio.Event())
            try:
                if await self._call("reach", lambda core: core.is_reached(agent)):
                    return
                await over.wait()
            finally:
                self._let_ask_again(agent)  # the others that wait for it, too

    async def release_descriptor_list(self, handle: DescriptorListHandle) -> None:
        await self._call("release_descriptor_list", lambda core: core.release_list(handle))

    def post_read(
        self,
        local: DescriptorListHandle,
        local_ids: DescriptorIds,
        remote: DescriptorListHandle,
        remote_ids: DescriptorIds,
    ) -> ReadHandle:
        self._refuse_if_closed()
        self._attach()
        handle = next(self._handles)
        if not self._thread.submit(ReadOrdered(handle, local, local_ids, remote, remote_ids)):
            raise PortClosed(self._agent_name)
        return handle

    async def send_notification(self, agent: AgentName, message: bytes) -> None:
        await self._call("send_notification", lambda core: core.send_notification(agent, message))

    def expect_notifications(self, expected: bool) -> None:
        self._thread.expect_notifications(expected)

    def counts(self) -> PortCounts:
        return PortCounts(
            remote_agents=len(self._core.agents),
            descriptor_lists=len(self._core.lists),
            reads=len(self._core.reads) + len(self._core.errored),
            registered_ranges=self._core.registered_ranges,
            errored_reads=len(self._core.errored),
            notification_polls_lost=self._core.notification_polls_lost,
            lag_seconds=self.lag_seconds,
        )

    async def aclose(self, grace_seconds: float) -> list[ReadHandle]:
        self._attach()
        if self._ended_event is None:
            self._ended_event = trio.Event()
        if self._ended is not None:
            self._ended_event.set()
        if not self._closing:
            self._closing = True
            self._thread.close(grace_seconds)
        try:
            with trio.move_on_after(grace_seconds + TEARDOWN_SECONDS_MAX):
                await self._wait_for_thread(self._ended_event)
        except trio.Cancelled:
            self._thread.close(0.0)
            with trio.move_on_after(TEARDOWN_SECONDS_MAX, shield=True):
                await self._wait_for_thread(self._ended_event)
            raise
        return self._abandoned()

    async def _wait_for_thread(self, ended: trio.Event) -> None:
        """Until the thread has said that it ends, and then the moment until it is gone."""
        await ended.wait()
        while self._thread.is_alive():
            await trio.sleep(0.001)

    def close_blocking(self, timeout_seconds: float) -> list[ReadHandle]:
        """Close without a trio run: for a port that never saw one, or has outlived it. No grace for READs."""
        self._closing = True
        self._thread.close(0.0)
        self._thread.join(timeout_seconds)
        return self._abandoned()

    def _abandoned(self) -> list[ReadHandle]:
        """READs that may still write; those of a thread that does not end, too."""
        if self._thread.ended:
            return list(self._thread.abandoned)
        return [*self._core.reads, *self._core.errored]

    async def _call(self, operation: str, run: Callable[[AgentCore], Any]) -> Any:
        """Run something on the agent's thread. Raises NixlCallFailed or PortClosed; see "Cancellation" above."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._refuse_if_closed()
        self._attach()
        call = Call(run)
        self._parked[call] = trio.lowlevel.current_task()
        try:
            if not self._thread.submit(call):
                raise PortClosed(self._agent_name)

            def withdraw(_raise_cancel: object) -> trio.lowlevel.Abort:
                return trio.lowlevel.Abort.SUCCEEDED if call.claim() else trio.lowlevel.Abort.FAILED

            await trio.lowlevel.wait_task_rescheduled(withdraw)
        finally:
            self._parked.pop(call, None)
        if call.closed:
            raise PortClosed(self._agent_name)
        if call.failure is not None:
            failure = call.failure
            raise NixlCallFailed(
                operation,
                failure.error,
                transport_lost=failure.transport_lost,
                no_descriptor_left=failure.no_descriptor_left,
            )
        return call.result

    def _refuse_if_closed(self) -> None:
        if self._closing or self._thread.ended:
            raise PortClosed(self._agent_name)

    def _attach(self) -> None:
        if self._token is None:
            self._token = trio.lowlevel.current_trio_token()
            self._wake_trio()
            trio.lowlevel.spawn_system_task(self._watch)

    async def _watch(self) -> None:
        """Until the thread has ended. A task of the run itself: the owner of the port need not know of it."""
        notice = HangNotice(self._thread.name, "calls of NIXL", NIXL_HANGS)
        turns, looks = self._thread.turns, 0
        watched = self._core.listeners if self._is_read_from else ()
        while not self._thread.ended:
            await trio.sleep(LOOKED_AT_SECONDS)
            # In this order: they also go when the agent is taken apart, but not before the thread was told to end.
            if (gone := listeners.lost(watched)) and not self._thread.is_closing:
                watched = ()
                self._take(ListenerLost(_LISTENER_LOST.format(", ".join(map(str, gone)))))
            looks = looks + 1 if self._thread.turns == turns else 0
            turns = self._thread.turns
            self.lag_seconds = looks * LOOKED_AT_SECONDS if looks >= LOOKS_UNTIL_LATE else 0.0
            notice.note(looks * LOOKED_AT_SECONDS)
        self.lag_seconds = 0.0

    # From here on, the way back: `_deliver`, `_backlog` and `_wake_trio` run on the agent's thread, the rest in trio.

    def _deliver(self, items: Sequence[Outgoing]) -> None:
        """Hand items to the trio thread."""
        for item in items:
            self._mailbox.append(item)
        self._wake_trio()

    def _backlog(self) -> int:
        """How many items wait in the trio thread."""
        return len(self._mailbox) + len(self._early)

    def _wake_trio(self) -> None:
        if self._token is None:
            return
        try:
            self._mailbox.flush(self._token)
        except trio.RunFinishedError:
            self._thread.close(0.0)  # no call will come any more

    def _take(self, item: Outgoing) -> None:
        if isinstance(item, Call):
            task = self._parked.pop(item, None)
            if task is not None:
                trio.lowlevel.reschedule(task)
        elif isinstance(item, FirstReadOver):
            self._let_ask_again(item.agent)
        elif isinstance(item, ThreadEnded):
            for agent in list(self._reaching):
                self._let_ask_again(agent)
            self._ended = item
            if self._ended_event is not None:
                self._ended_event.set()
        elif self._on_event is None:
            self._early.append(item)
        else:
            if isinstance(item, PortBroken):
                self._closing = True
            self._on_event(item)

    def _let_ask_again(self, agent: AgentName) -> None:
        over = self._reaching.pop(agent, None)
        if over is not None:
            over.set()

    def _note_error(self, error: BaseException) -> None:
        log_crash(f"NIXL port {self._agent_name}", error)
