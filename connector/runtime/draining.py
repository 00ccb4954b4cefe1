"""The executor of the `draining` machine (`statemachine/draining.py`), beside the handshake listener of an engine.

    nixl-actor drain --side channel--> listener --\
    SIGTERM --> scheduler's thread --mailbox-------> ask --> machine --> Leave to each worker's control socket
    scheduler's thread <--value--------------------------------/   \\--> lines for people

It lives in the thread of the listener, so that an engine that makes no step drains too. The scheduler's thread reads
`value`, which is frozen and replaced as a whole, and says how much is lent by `count`, which is asked COUNT_SECONDS
apart until the engine is drained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple, assert_never

import trio

from connector.addresses import join_address
from connector.clock import NS_PER_SECOND, Clock
from connector.ports.side_channel import SideChannel, SideChannelError
from connector.runtime.effects import carry_out
from connector.wire.administration import DrainReport, Leave, decode_leave_taken
from connector.wire.bounded import DecodeFailed
from connector.wire.control import encode_request
from statemachine import draining as machine
from statemachine.draining import Draining, State
from statemachine.granting import LentCounts
from statemachine.kernel import Event

COUNT_SECONDS = 0.02
TELL_SECONDS = 2.0
"""For one worker to answer that its decode engines are told."""


class OwnWorker(NamedTuple):
    """Where a worker of this engine takes messages.

    `key`: the public one of that socket, if it has one. `leave_secret`: shows the worker that its own engine tells it.
    """

    host: str
    port: int
    key: str | None
    leave_secret: bytes


class EngineDraining:
    """See the module's docstring. All but `value` belongs to the trio thread.

    Args:
        side_channel: to the workers; closed by `close`.
        workers: may be replaced by as many others.
        grace_ns: of the grace period, unless `ask` says otherwise.
        count: what is lent now. Called in this thread.
        on_change: called when the state has changed.
        say: writes a line for people.
        log_crash: writes a line with a traceback: which task, what it raised.
    """

    def __init__(
        self,
        *,
        side_channel: SideChannel,
        workers: Sequence[OwnWorker],
        clock: Clock,
        grace_ns: int,
        lease_ns: int,
        count: Callable[[], LentCounts],
        on_change: Callable[[Draining], None],
        say: Callable[[str], None],
        log_crash: Callable[[str, BaseException], None],
    ) -> None:
        self._side_channel = side_channel
        self.workers = workers
        self._clock = clock
        self._grace_ns = grace_ns
        self._count = count
        self._on_change = on_change
        self._say = say
        self._log_crash = log_crash
        self.value = Draining(lease_ns=lease_ns)
        self._begun = trio.Event()

    def ask(self, cause: str, grace_ns: int | None = None) -> None:
        """Begin, unless it has begun. `cause`: for people."""
        grace_ns = self._grace_ns if grace_ns is None else grace_ns
        self._step(
            machine.Asked(now_ns=self._clock.now_ns(), cause=cause, grace_ns=grace_ns, workers=len(self.workers))
        )

    def report(self) -> DrainReport:
        """How far it has come, for a tool that has asked."""
        value, now_ns, counted = self.value, self._clock.now_ns(), self._count()
        return DrainReport(
            state="drained" if value.state is State.DRAINED else "draining",
            seconds=(now_ns - value.began_ns) / NS_PER_SECOND,
            seconds_left=max(0, value.ends_ns - now_ns) / NS_PER_SECOND,
            lent=counted.lent,
            not_lent=counted.not_lent,
            answering=counted.answering,
        )

    def close(self) -> None:
        self._side_channel.close()

    async def run(self) -> None:
        """Until the engine is drained."""
        await self._begun.wait()
        async with trio.open_nursery() as nursery:
            for number in sorted(self.value.untold):
                nursery.start_soon(self._tell, number)
            while self.value.state is not State.DRAINED:
                self._step(machine.Counted(now_ns=self._clock.now_ns(), lent=self._count().lent))
                await trio.sleep(COUNT_SECONDS)

    async def _tell(self, number: int) -> None:
        host, port, key, secret = self.workers[number]
        try:
            with trio.fail_after(TELL_SECONDS), closing(await self._side_channel.open_link(host, port, key)) as link:
                grace_ns = max(0, self.value.ends_ns - self._clock.now_ns())
                link.send(encode_request(Leave(grace_ns=grace_ns, secret=secret)))
                decode_leave_taken(await link.receive())
        except (trio.TooSlowError, SideChannelError, DecodeFailed) as error:
            detail = str(error) or f"no answer within {TELL_SECONDS:g} s"
            self._say(
                f"worker {number} at {join_address(host, port)} could not be told that the engine drains: {detail}"
            )
        self._step(machine.WorkerDone(worker=number))

    def _step(self, event: Event) -> None:
        """What raises is logged, and only that is lost: the machine has taken the step, and it is not taken again."""
        before = self.value
        self.value, effects = machine.MACHINE.step(before, event)
        if self.value.state is not before.state:
            self._attempt(partial(self._on_change, self.value))
        carry_out(effects, self._execute, partial(self._log_crash, "draining"))

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._log_crash("draining", error)

    def _execute(self, effect: machine.TellWorkers | machine.SayDraining | machine.SayDrained) -> None:
        match effect:
            case machine.TellWorkers():
                self._begun.set()
            case machine.SayDraining():
                self._say_draining()
            case machine.SayDrained(lent=lent):
                self._say_drained(lent)
            case _:
                assert_never(effect)

    def _say_draining(self) -> None:
        value = self.value
        grace_seconds = (value.ends_ns - value.began_ns) / NS_PER_SECOND
        self._say(
            f"draining, because of {value.cause}: {self._count().lent} prefill(s) are lent or will be, and are "
            f"waited for, {grace_seconds:g} s at most; those that come now are answered without kv_transfer_params, so "
            "that decode engines compute them"
        )

    def _say_drained(self, lent: int) -> None:
        seconds = (self._clock.now_ns() - self.value.began_ns) / NS_PER_SECOND
        what = (
            "nothing is lent any more"
            if not lent
            else f"the grace period is over, and {lent} prefill(s) are still lent"
        )
        answering = self._count().answering
        end = (
            f"{answering} request(s) whose answers this engine writes are not waited for, but by vLLM, for "
            "--shutdown-timeout"
            if answering
            else "this engine may be ended"
        )
        self._say(f"drained after {seconds:.1f} s: {what}; {end}")
