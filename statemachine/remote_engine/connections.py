"""The connections of one rank to one prefill engine, the READs that stand on them, and the blocks that are quarantined.

There is one current connection at most. Others are those that were given up while something still stood on them: READs
that hang, or that have failed and may go on in part until the grace of the back end is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from statemachine.failures import Failure
from statemachine.remote_engine.messages import Address


class Connection:
    """One connection, for as long as something stands on it.

    Attributes:
        workers: names of our partners on P, for people.
        address: where P was found.
        open_reads: READs ordered on it that have not ended, as (request id, number). Its agents are removed only when
            there is none.
        unsettled: READs that failed on it and may still write, as (request id, number).
        was_of_use: a READ has ended well over it.
        of_use_from_ns: if it is lost after that, and nobody reads over it then, it has been of use all the same.
        registration: of P's KV cache, the newest that was known when it was made.
        failure: what first made it suspect.
        is_torn_down: its agents are removed. It is forgotten when nothing is unsettled either.
    """

    __slots__ = (
        "address",
        "failure",
        "is_builtin",
        "is_tearing_down",
        "is_torn_down",
        "number",
        "of_use_from_ns",
        "open_reads",
        "registration",
        "unsettled",
        "was_of_use",
        "workers",
    )

    def __init__(
        self,
        number: int,
        workers: tuple[str, ...],
        of_use_from_ns: int,
        *,
        address: Address,
        is_builtin: bool,
        registration: int = 0,
    ) -> None:
        self.number = number
        self.address = address
        self.of_use_from_ns = of_use_from_ns
        self.workers = workers
        self.is_builtin = is_builtin
        self.registration = registration
        self.open_reads: dict[tuple[str, int], None] = {}
        self.unsettled: dict[tuple[str, int], None] = {}
        self.was_of_use = False
        self.failure: Failure | None = None
        self.is_tearing_down = False
        self.is_torn_down = False

    @property
    def ranks(self) -> int:
        """How many partners we have on P."""
        return len(self.workers)

    def has_stood_idle(self, now_ns: int) -> bool:
        """Whether it has stood for long enough to be of use, and nobody reads over it."""
        return now_ns >= self.of_use_from_ns and not (self.open_reads or self.unsettled)

    def copy(self) -> Connection:
        other = Connection(
            self.number,
            self.workers,
            self.of_use_from_ns,
            address=self.address,
            is_builtin=self.is_builtin,
            registration=self.registration,
        )
        other.open_reads = dict(self.open_reads)
        other.unsettled = dict(self.unsettled)
        other.was_of_use = self.was_of_use
        other.failure = self.failure
        other.is_tearing_down, other.is_torn_down = self.is_tearing_down, self.is_torn_down
        return other

    def freeze(self, now_ns: int) -> Hashable:
        return (
            self.number,
            max(0, self.of_use_from_ns - now_ns),
            self.ranks,
            self.address,
            self.is_builtin,
            self.registration,
            frozenset(self.open_reads),
            frozenset(self.unsettled),
            self.was_of_use,
            type(self.failure),
            self.is_tearing_down,
            self.is_torn_down,
        )


class Connections:
    """The connections of one core, in the order in which they were made.

    Attributes:
        current: the one that is ready, draining or disconnecting; None in every other state of the peer.
    """

    __slots__ = ("_by_number", "_quarantined", "current")

    def __init__(self) -> None:
        self.current: Connection | None = None
        # Everything that something still stands on, the current one included.
        self._by_number: dict[int, Connection] = {}
        # Requests that ended in quarantine, with their READs that may still write; never empty sets.
        self._quarantined: dict[str, set[int]] = {}

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._by_number.values())

    def get(self, number: int) -> Connection | None:
        return self._by_number.get(number)

    def add(self, connection: Connection) -> None:
        self._by_number[connection.number] = connection

    def forget(self, connection: Connection) -> None:
        del self._by_number[connection.number]

    def given_up(self) -> Iterable[Connection]:
        """All but the current one; asked for after every event, and mostly there is none."""
        if len(self._by_number) == (self.current is not None):
            return ()
        return [each for each in self._by_number.values() if each is not self.current]

    def is_current(self, number: int) -> bool:
        return self.current is not None and number == self.current.number

    @property
    def are_unused(self) -> bool:
        """No READ stands on any, and no connection but the current one is left."""
        return not self._quarantined and all(
            each is self.current and not each.open_reads for each in self._by_number.values()
        )

    @property
    def are_over(self) -> bool:
        """Nothing stands on any connection any more, and none is left."""
        return not self._by_number and not self._quarantined

    def quarantine(self, request_id: str, reads: Iterable[int]) -> None:
        """It has ended, and these READs may still write into its blocks."""
        self._quarantined[request_id] = set(reads)

    def quiesce(self, request_id: str, read: int) -> bool:
        """This READ writes no more. Returns whether it was the last one that kept its request in quarantine."""
        writing = self._quarantined.get(request_id)
        if writing is None:
            return False
        writing.discard(read)
        if writing:
            return False
        del self._quarantined[request_id]
        return True

    def quarantined(self) -> list[tuple[str, int]]:
        """The requests in quarantine, with how many of their READs are left."""
        return [(request_id, len(reads)) for request_id, reads in self._quarantined.items()]

    def copy(self) -> Connections:
        other = type(self)()
        other._by_number = {number: connection.copy() for number, connection in self._by_number.items()}
        other.current = other._by_number[self.current.number] if self.current is not None else None
        other._quarantined = {request_id: set(reads) for request_id, reads in self._quarantined.items()}
        return other

    def freeze(self, now_ns: int) -> Hashable:
        return (
            frozenset(each.freeze(now_ns) for each in self._by_number.values()),
            self.current.number if self.current is not None else None,
            frozenset((request_id, frozenset(reads)) for request_id, reads in self._quarantined.items()),
        )
