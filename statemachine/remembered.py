"""Names that are remembered when what they named is over: the newest, up to a bound.

A core may remember many for as long as its engine runs, and a decode rank has one such core for each engine that it
reads from. What Python's collector of garbage knows of, it looks at again and again, all of it in one go, and no thread
of the process does anything else meanwhile: with a million tuples that is a tenth of a second. So names are texts here,
and they are in nothing but dicts of texts and numbers, which the collector leaves out; that of CPython 3.14 goes
through them again, which costs as much as the tuples would.
"""

from __future__ import annotations

from collections.abc import Hashable


class Remembered:
    """At most `names_max` names; the one that was added first goes first."""

    __slots__ = ("_added", "_by_number", "_names", "_names_max")

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._names: dict[str, None] = {}
        # The same names in the order in which they were added; the numbers end before `_added`, without gaps. So the
        # oldest one is known: in a dict the way to the oldest key leads past all that were deleted before it.
        self._by_number: dict[int, str] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """One that is remembered keeps its place."""
        if name in self._names:
            return
        self._names[name] = None
        self._by_number[self._added] = name
        self._added += 1
        if len(self._names) > self._names_max:
            del self._names[self._by_number.pop(self._added - len(self._by_number))]

    def copy(self) -> Remembered:
        other = type(self)(self._names_max)
        other._names, other._by_number = self._names.copy(), self._by_number.copy()
        other._added = self._added
        return other

    def freeze(self) -> Hashable:
        """Equal for two of which the same names are in."""
        return frozenset(self._names)
