"""The agenda of a simulated world: what happens at which moment of trio's clock, and the scripts that live by it.

One heap for a whole world, instead of a task per message: cheaper, and things that fall due at the same moment happen
in the order in which they were entered. Two ways to carry the entries out:

    run       a trio task that sleeps until the next entry; under any clock
    drive     a hook in a `MockClock`: whenever every task waits, the clock jumps to the next entry, and it is carried
              out there and then. No task is scheduled for it: a thousand entries in a row cost a thousand calls. An
              hour of virtual time costs only what happens in it. The names that this needs are private in trio, and
              asserted to exist.

A `Script` is a coroutine that waits for nothing but the agenda (`Agenda.sleep`) and for signals (`Signal.wait`). So the
people and schedulers of a simulation can be written as straight code, and cost a fraction of what trio tasks do.
"""

from __future__ import annotations

import heapq
import types
from collections.abc import Callable, Coroutine, Generator
from math import inf
from typing import Any, Generic, TypeVar

import trio
from trio.testing import MockClock

T = TypeVar("T")
Call = Callable[[], None]
Trap = Callable[["Script[Any]"], None]


class Agenda:
    """Entries are plain calls that must not raise."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call]] = []
        self._entered = 0
        self._news = trio.Event()
        self._stopped = False

    def after(self, seconds: float, call: Call) -> None:
        """Enter `call` for `seconds` from now (0: as soon as the current task or script waits)."""
        self.at(trio.current_time() + seconds, call)

    def at(self, seconds: float, call: Call) -> None:
        """Enter `call` for the moment `seconds` of trio's clock."""
        self._entered += 1
        heapq.heappush(self._heap, (seconds, self._entered, call))
        if self._heap[0][1] == self._entered:
            self._news.set()

    def start(self, script: Coroutine[Any, Any, T], on_end: Call | None = None) -> Script[T]:
        """Begin a script now; `on_end` is called when it has returned."""
        return Script(self, script, on_end)

    @types.coroutine
    def sleep(self, seconds: float) -> Generator[Trap, None, None]:
        """In a script: wait."""
        yield lambda script: self.after(seconds, script.resume)

    # --- under any clock --------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Nothing that is entered happens any more."""
        self._stopped = True
        self._news.set()

    async def run(self) -> None:
        """Carry entries out until cancelled or `stop`."""
        while not self._stopped:
            if not self._carry_out_due():
                self._news = trio.Event()
                with trio.move_on_at(self._heap[0][0] if self._heap else float("inf")):
                    await self._news.wait()

    def _carry_out_due(self) -> bool:
        """Carry out the next entry if its time has come."""
        if not self._heap or self._heap[0][0] > trio.current_time():
            return False
        heapq.heappop(self._heap)[2]()
        return True

    # --- under a clock that jumps -----------------------------------------------------------------------------------

    def drive(self, clock: MockClock) -> None:
        """From now on `clock`, which must jump on its own, jumps to the entries of this agenda too."""
        internals: Any = clock
        for name in ("_autojump", "_virtual_base"):
            assert hasattr(internals, name), f"trio has changed; find the successor of {name}"
        assert clock.rate == 0.0, "the clock must stand still but for its jumps"
        internals._autojump = lambda: self._jump(clock)
        internals.current_time = lambda: internals._virtual_base  # asked 200 times per request, and the rate is zero

    def _jump(self, clock: MockClock) -> None:
        """Every task waits: go on to what comes next, an entry or a deadline of a task; entries first."""
        runner: Any = trio._core._run.GLOBAL_RUN_CONTEXT.runner  # public statistics cost twenty times as much
        heap, now = self._heap, clock.current_time()
        while not runner.runq:
            entry_at = heap[0][0] if heap else inf
            deadline_at = runner.deadlines.next_deadline()
            if entry_at > deadline_at:
                clock.jump(max(0.0, deadline_at - now))
                return
            if entry_at == inf:
                return
            if entry_at > now:
                clock.jump(entry_at - now)
                now = clock.current_time()
            heapq.heappop(heap)[2]()


class Script(Generic[T]):
    """A coroutine that runs on an agenda; see `Agenda.start`."""

    __slots__ = ("_agenda", "_coroutine", "_on_end")

    def __init__(self, agenda: Agenda, coroutine: Coroutine[Any, Any, T], on_end: Call | None) -> None:
        self._agenda = agenda
        self._coroutine = coroutine
        self._on_end = on_end
        self.resume()

    def resume(self) -> None:
        """Run it up to its next wait."""
        try:
            trap = self._coroutine.send(None)
        except StopIteration:
            if self._on_end is not None:
                self._on_end()
        else:
            trap(self)


class Signal:
    """Something that happens once, and that scripts wait for."""

    __slots__ = ("_agenda", "_waiting", "is_set")

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._waiting: list[Script[Any]] = []
        self.is_set = False

    def set(self) -> None:
        """Whoever waits goes on as soon as the current task or script waits."""
        self.is_set = True
        waiting, self._waiting = self._waiting, []
        for script in waiting:
            self._agenda.after(0.0, script.resume)

    async def wait(self) -> None:
        if not self.is_set:
            await self._wait()

    @types.coroutine
    def _wait(self) -> Generator[Trap, None, None]:
        yield self._waiting.append

    async def wait_at_most(self, seconds: float) -> bool:
        """Whether it happened in time."""
        if self.is_set:
            return True
        await self._wait_at_most(seconds)
        return self.is_set

    @types.coroutine
    def _wait_at_most(self, seconds: float) -> Generator[Trap, None, None]:
        def enter(script: Script[Any]) -> None:
            self._waiting.append(script)

            def give_up() -> None:
                if script in self._waiting:
                    self._waiting.remove(script)
                    script.resume()

            self._agenda.after(seconds, give_up)

        yield enter
