"""Prefill engines that are drained and ended as operators do it, what came of it, and who is to blame for what failed.

Two ways: the command `nixl-actor drain`, after which the engine is ended; and SIGTERM, for which vLLM leaves time
(`--shutdown-timeout`). Only engines of ours drain; what a built-in one does at SIGTERM is not looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from connector.tools.administration import AdministrationError, drain
from connector.tools.asking import Address
from tests.chaos.cluster import DRAIN_GRACE_SECONDS, SHUTDOWN_SECONDS, Prefill
from tests.chaos.load import Call, Usage
from tests.chaos.plan import LEASE_SECONDS

COMMAND_SECONDS_MAX = 2 * DRAIN_GRACE_SECONDS
END_SECONDS_MAX = 2.0 * SHUTDOWN_SECONDS
"""vLLM kills the engine core before, so who is not gone by then hangs."""

COMMAND, SIGTERM = "nixl-actor drain", "SIGTERM"

_BEGAN = re.compile(r"draining, because of SIGTERM: (\d+) prefill")
_DRAINED = re.compile(r"drained after \S+ s: (?:nothing is lent|the grace period is over, and (\d+) prefill)")
_TEARDOWN, _KILLED = "starting resource teardown", "force killing remaining process"
"""vLLM's engine core: nothing is left to do. vLLM's API server: the core has not ended within `--shutdown-timeout`."""

End = Literal["by itself", "killed in their teardown", "killed"]
"""How processes ended that were asked to. vLLM's teardown comes when all is served and connections are closed; on a
machine that is busy enough it takes longer than is left of vLLM's time, and no request notices that it is cut short."""


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """One drain of a prefill engine, up to the end of its processes.

    Attributes:
        way: COMMAND or SIGTERM.
        from_seconds, to_seconds: after the start of the load.
        lent_first: prefills that were lent, or would be, when it began; None: it did not say.
        lent_last: those that were still lent when it was over; None: it was never over, or never began.
        problem: why it could not be asked to drain; it is ended all the same.
    """

    engine: str
    way: Literal["nixl-actor drain", "SIGTERM"]
    from_seconds: float
    to_seconds: float
    lent_first: int | None = None
    lent_last: int | None = None
    end: End
    problem: str = ""

    @property
    def broken_promises(self) -> list[str]:
        said = f"{self.engine}, drained by {self.way} at {self.from_seconds:.0f} s"
        broken = []
        if self.lent_last is None and not self.problem:
            broken.append(f"{said}: its drain was not over {self.to_seconds - self.from_seconds:.0f} s later")
        if self.end == "killed":
            broken.append(f"{said}: it had to be killed")
        return broken


class Disturbance(NamedTuple):
    """Something else that was done to a prefill engine, or on the way to it: seconds after the start of the load."""

    engine: str
    from_seconds: float
    to_seconds: float


def by_command(prefill: Prefill, now: Callable[[], float]) -> Drain:
    """`nixl-actor drain`, and then its end. One that cannot be asked is ended all the same: strangers may just have all
    the room that its side channel has for connections from one address. `now`: seconds after the start of the load."""
    from_seconds = now()
    address = Address(*prefill.engine.options.side_channel)
    lent: list[int] = []
    lent_last, problem = None, ""
    (last,) = drain(
        [address], waits=True, timeout_seconds=COMMAND_SECONDS_MAX, show=lambda _, each: lent.append(each.lent)
    ).values()
    if isinstance(last, AdministrationError):
        problem = str(last)
    elif last.state == "drained":
        lent_last = last.lent
    end = _end(prefill)
    return Drain(
        engine=prefill.engine.name,
        way=COMMAND,
        from_seconds=from_seconds,
        to_seconds=now(),
        lent_first=lent[0] if lent else None,
        lent_last=lent_last,
        end=end,
        problem=problem,
    )


def by_sigterm(prefill: Prefill, now: Callable[[], float]) -> Drain:
    """SIGTERM, and nothing else. What it lends is in its log: its side channel closes as soon as it has drained."""
    from_seconds = now()
    end = _end(prefill)
    log = prefill.engine.log_of_this_start()
    began, drained = _BEGAN.search(log), _DRAINED.search(log)
    return Drain(
        engine=prefill.engine.name,
        way=SIGTERM,
        from_seconds=from_seconds,
        to_seconds=now(),
        lent_first=int(began[1]) if began else None,
        lent_last=int(drained[1] or 0) if drained else None,
        end=end,
    )


def _end(prefill: Prefill) -> End:
    went = prefill.end_life(lambda: prefill.engine.stop(END_SECONDS_MAX))
    before, killed, _ = prefill.engine.log_of_this_start().partition(_KILLED)
    if went and not killed:
        return "by itself"
    return "killed in their teardown" if _TEARDOWN in before else "killed"


def failed_in(drains: Iterable[Drain], calls: Sequence[Call]) -> list[tuple[Drain, Call]]:
    """Plain requests that failed, and that named an engine which was drained while they were served."""
    return [
        (each, call)
        for each in drains
        for call in calls
        if call.usage is Usage.PLAIN and call.error and call.prefill == each.engine
        if call.at_seconds <= each.to_seconds and call.at_seconds + call.seconds >= each.from_seconds
    ]


def is_excused(call: Call, drain: Drain, disturbances: Iterable[Disturbance]) -> bool:
    """Whether something else of the plan may be why: it was done to the same engine while the request was served, or at
    most a lease before. Or the engine could not be asked to drain, and was ended with all that it lent."""
    return bool(drain.problem) or any(
        each.engine == drain.engine
        and each.from_seconds <= call.at_seconds + call.seconds
        and each.to_seconds + LEASE_SECONDS >= call.at_seconds
        for each in disturbances
    )


def counts(drains: Sequence[Drain]) -> dict[str, int]:
    """How many drains ended how, and what they had to wait for."""
    found: Counter[str] = Counter()
    for each in drains:
        if each.problem:
            result = "could not be asked"
        elif each.lent_last is None:
            result = "not over"
        else:
            result = f"over, {each.lent_last or 'no'} prefill(s) still lent"
        found[f"{each.way}: {result}"] += 1
        found[f"{each.way}: prefills lent when it began"] += each.lent_first or 0
        found[f"{each.way}: processes ended, {each.end}"] += 1
    return dict(sorted(found.items()))
