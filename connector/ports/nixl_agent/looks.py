"""Which READs in flight NIXL is asked about at a look.

NIXL tells nothing unasked, and each question takes the agent's thread a microsecond or two, while calls wait. Over a
network READs stay in flight, by the thousand when many requests come at once. If every look asked about all of them,
posting N READs would take N * N questions.

Rules
* Requests that NIXL has been given for one agent mostly end in the order in which it was given them. So READs stand in
  lines, the oldest first: one line for the READs of an agent, one for those of which the probe is in flight.
* A look goes from line to line and asks about the oldest READ of each. When that has left the line, it asks about the
  next. So READs that end in order are found at once.
* In this way it asks about OLDEST_MAX READs at most. The lines that it did not reach are the first at the next look.
* Then it asks about IN_TURN_MAX of the others: those which were not asked about for the longest time. This finds READs
  that end out of order or fail. One that never ends hides no other: of N READs, each is asked about at least once in
  N / IN_TURN_MAX looks, rounded up.
* No READ is asked about twice in one look. Up to IN_TURN_MAX READs are all asked about at each look.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import TypeAlias

from connector.ports.nixl import AgentName, ReadHandle

OLDEST_MAX = 32
IN_TURN_MAX = 32
"""A look takes 0.1 ms at most, half of the time that waiting calls get between two looks."""

Line: TypeAlias = tuple[AgentName, bool]
"""READs from an agent; True: those of which the probe is in flight."""


class Looks:
    """Handles of the READs in flight, and whose turn it is. See the module's docstring."""

    def __init__(self) -> None:
        # In the order of their turns; none is empty. Ordered dicts, because a dict looks for its first key among all
        # that it has lost.
        self._lines: OrderedDict[Line, OrderedDict[ReadHandle, None]] = OrderedDict()
        # The line of each READ; the one that was asked about longest ago comes first.
        self._line_of: OrderedDict[ReadHandle, Line] = OrderedDict()

    def add(self, handle: ReadHandle, line: Line) -> None:
        """NIXL is given a READ, whose state it tells at once: its turn comes after that of all others."""
        self._line_of[handle] = line
        self._lines.setdefault(line, OrderedDict())[handle] = None

    def move(self, handle: ReadHandle, line: Line) -> None:
        """A READ goes on in another line, as its last one."""
        self.remove(handle)
        self.add(handle, line)

    def remove(self, handle: ReadHandle) -> None:
        """A READ has ended."""
        line = self._line_of.pop(handle)
        of_line = self._lines[line]
        del of_line[handle]
        if not of_line:
            del self._lines[line]

    def due(self) -> Iterator[ReadHandle]:
        """The READs of one look. The caller asks about each and moves or removes it before it takes the next one."""
        asked: set[ReadHandle] = set()
        for line in list(islice(self._lines, OLDEST_MAX)):
            if len(asked) == OLDEST_MAX:
                break
            self._lines.move_to_end(line)
            while len(asked) < OLDEST_MAX and line in self._lines:
                oldest = next(iter(self._lines[line]))
                if oldest in asked:
                    break
                asked.add(oldest)
                self._line_of.move_to_end(oldest)
                yield oldest
        for handle in list(islice(self._line_of, IN_TURN_MAX)):
            if handle in asked:
                break
            self._line_of.move_to_end(handle)
            yield handle
