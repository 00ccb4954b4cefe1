"""What the faults of a plan do to the fakes of level 2: `ActiveFaults` is what these ask, their rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

import trio

from tests.simulation.fake_network import NetworkRules
from tests.simulation.fake_nixl import NixlRules
from tests.simulation.faults import LATENCY_SECONDS, READ_SLOWDOWN, Fault, Kind, Plan, engine_of, generator


class ActiveFaults(NetworkRules, NixlRules):
    """What the faults of a plan do to messages, notifications and READs at the current moment.

    `fired` counts how often each kind did something.
    """

    def __init__(self, plan: Plan) -> None:
        self._faults: dict[tuple[Kind, str], list[Fault]] = {}
        self.expect(plan.faults)
        self._chance = generator(plan.seed, "transport")
        self.fired: Counter[Kind] = Counter()

    def expect(self, faults: Iterable[Fault]) -> None:
        """From now on these, and no others."""
        self._faults.clear()
        for fault in faults:
            self._faults.setdefault((fault.kind, _place(*fault.target.split(">"))), []).append(fault)

    def find(self, kind: Kind, *names: str) -> Fault | None:
        """The fault that is on, whatever its probability. `names`: an engine or one of its processes, or two in a link.

        A fault of one rank is not found for the engine as a whole.
        """
        faults = self._faults.get((kind, _place(*names)))
        if not faults:
            return None
        now = trio.current_time()
        return next((each for each in faults if each.at_seconds <= now < each.end_seconds and each.hits(names)), None)

    def hits(self, kind: Kind, *names: str) -> Fault | None:
        """The fault that is on, if it strikes this time."""
        fault = self.find(kind, *names)
        if fault is None or self._chance.random() >= fault.probability:
            return None
        self.fired[kind] += 1
        return fault

    # --- the side channel -------------------------------------------------------------------------------------------

    def delays(self, source: str, target: str) -> Sequence[float]:
        link = (source, target)
        if self.hits(Kind.MESSAGE_LOSS, *link) or self.hits(Kind.PARTITION, *link):
            return ()
        delay_seconds = LATENCY_SECONDS * self._chance.uniform(0.5, 3.0)
        if self.hits(Kind.MESSAGE_DELAY, *link):
            delay_seconds += self._chance.uniform(0.1, 2.0)
        if self.hits(Kind.MESSAGE_REORDER, *link):
            delay_seconds += self._chance.uniform(0.0, 0.05)
        now = trio.current_time()
        for held_up in (
            self.hits(Kind.CLOG, *link),
            self.find(Kind.PAUSE, source),
            self.find(Kind.PAUSE, target),
        ):
            if held_up is not None:
                delay_seconds = max(delay_seconds, held_up.end_seconds - now)
        if self.hits(Kind.MESSAGE_DUPLICATE, *link):
            return (delay_seconds, delay_seconds + self._chance.uniform(0.0, 0.5))
        return (delay_seconds,)

    def refuses(self, source: str, target: str) -> bool:
        return self.hits(Kind.HANDSHAKE_REFUSED, target) is not None

    # --- NIXL -------------------------------------------------------------------------------------------------------

    def read_seconds(self, initiator: str, target: str, length_bytes: int) -> float:
        seconds = self._chance.uniform(0.5, 2.0) * super().read_seconds(initiator, target, length_bytes)
        if self.hits(Kind.READ_SLOW, initiator, target):
            seconds *= READ_SLOWDOWN
        return seconds

    def read_error(self, initiator: str, target: str) -> bool:
        return self.hits(Kind.READ_ERROR, initiator, target) is not None

    def read_errs_early(self, initiator: str, target: str) -> bool:
        return self.hits(Kind.READ_ERRS_EARLY, initiator, target) is not None

    def read_lies(self, initiator: str, target: str) -> bool:
        return self.hits(Kind.READ_LIES, initiator, target) is not None

    def stray_seconds(self, initiator: str, target: str) -> float:
        return self._chance.choice([0.001, 0.05, 1.0, 5.0, inf])

    def read_stalls_until(self, initiator: str, target: str) -> float:
        # A READ needs both directions.
        found = (
            self.hits(Kind.READ_STALL, initiator, target),
            self.hits(Kind.FULL_QUARANTINE, initiator),
            self.find(Kind.PARTITION, initiator, target),
            self.find(Kind.PARTITION, target, initiator),
        )
        return max((fault.end_seconds for fault in found if fault is not None), default=0.0)

    def prepare_refused(self, initiator: str, target: str) -> bool:
        return self.hits(Kind.PREPARE_REFUSED, initiator, target) is not None

    def notification_delays(self, sender: str, receiver: str) -> Sequence[float]:
        link = (sender, receiver)
        if self.hits(Kind.NOTIFICATION_LOSS, *link) or self.hits(Kind.PARTITION, *link):
            return ()
        delay_seconds = LATENCY_SECONDS * self._chance.uniform(0.5, 3.0)
        if self.hits(Kind.NOTIFICATION_DELAY, *link):
            delay_seconds += self._chance.uniform(0.1, 3.0)
        if self.hits(Kind.NOTIFICATION_DUPLICATE, *link):
            return (delay_seconds, delay_seconds + self._chance.uniform(0.0, 1.0))
        return (delay_seconds,)


def _place(*names: str) -> str:
    """The engine or the link between engines that is meant."""
    return ">".join(map(engine_of, names))
