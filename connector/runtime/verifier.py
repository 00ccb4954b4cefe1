"""Compares what READs have left with the checksums of the lease (option `verify`), between the port and the core.

Here is the one rule of this connector that no core has, because it would have to know checksums: that a READ has ended
well when its bytes are those that were lent. The core hears of its end when that is known, or when nobody wants to know
it any more.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from connector.protocol import SumsFound
from connector.runtime.block_tables import Check
from connector.runtime.verification import SumDesk, corrupt, difference, stretches
from statemachine.failures import ActorCrashed, Failure
from statemachine.lease import LeaseName
from statemachine.remote_engine import ReadEnded, RemoteEngine


class Verifier:
    """Compares what the READs of one peer actor have brought with the checksums of P.

    Args:
        desk: has the engine thread sum blocks.
        core: knows which requests still read.
        tell: takes the end of a READ, for the core.
    """

    def __init__(self, desk: SumDesk, core: RemoteEngine, tell: Callable[[ReadEnded], None]) -> None:
        self._desk = desk
        self._core = core
        self._tell = tell
        self.unverified: dict[int, ReadEnded] = {}
        """READs whose bytes are here and that the engine thread sums, by ticket."""

    def verify(self, ended: ReadEnded, check: Check, lease: LeaseName) -> None:
        """All bytes of this READ are here: it is told as it is if they are those that were lent, else as failed."""
        ticket = self._desk.order(
            stretches(check.compared.landed), lambda found: self._compare(ended, check, lease, found)
        )
        self.unverified[ticket] = ended

    def tell_what_nobody_wants(self) -> None:
        """READs of requests that have failed meanwhile are over, whatever they have left."""
        for ticket, ended in list(self.unverified.items()):
            if not self._core.is_reading(ended.request_id):
                del self.unverified[ticket]
                self._desk.withdraw(ticket)
                self._tell(ended)

    def _compare(self, ended: ReadEnded, check: Check, lease: LeaseName, found: SumsFound) -> None:
        """The engine thread has summed what a READ has left."""
        del self.unverified[found.ticket]
        failure: Failure | None = None
        if found.error is not None:
            failure = ActorCrashed(actor="checksums", error=found.error)
        elif (differs := difference(check.compared, found.sums, check.known, check.match)) is not None:
            failure = corrupt(
                differs,
                peer=self._core.engine_id,
                address=str(self._core.address),
                lease=lease,
                regions=check.regions,
            )
        self._tell(msgspec.structs.replace(ended, failure=failure))
