"""The points of a run at which something may raise; see the package's docstring."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import trio

ROOT = str(Path(__file__).parents[3])
PRODUCTION = (f"{ROOT}/connector/", f"{ROOT}/statemachine/")

OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("owner")
"""The process that a task belongs to; nobody's have no points."""

FILE_AND_SOCKETS = frozenset({"side channel", "requester", "link", "listener", "trace file"})
"""Kinds of points that raise OSError as well."""


class Site(NamedTuple):
    """Where a point is: in which process, of what kind, and which call or line of production code."""

    owner: str
    kind: str
    place: str


class Injected(RuntimeError):
    """Raised at a point."""


class InjectedOs(OSError):
    """The same, where production code may expect an OSError."""


@dataclass
class Points:
    """Counts the points of a run while it is `armed`.

    Attributes:
        target: number of the one that raises, from 0; None: none does.
        error: what it raises.
        struck: number of the task, among those that wait at the moment of `strike`, whose await raises then.
        hit: where that was, and when.
    """

    target: int | None = None
    error: type[Exception] = Injected
    struck: int | None = None
    armed: bool = False
    hit: tuple[Site, float] | None = None

    def __post_init__(self) -> None:
        self.sites: list[Site] = []
        self.waiting: list[Site] = []
        """Where tasks waited at the moment of `strike`."""

    def strike(self) -> None:
        """Tasks that wait at this moment, most of them for something that will not come: let the await of one raise."""
        tasks = [(task, site) for task in _all_tasks() if (site := _site(task)) is not None]
        self.waiting = [site for _, site in tasks]
        if self.struck is None:
            return
        task, site = tasks[self.struck]
        self.hit = (site, trio.current_time())
        error = self.error(f"injected at {site.place}")

        def fail() -> None:
            raise error

        internals: Any = task
        assert hasattr(internals, "_attempt_abort"), "trio has changed; find its successor"
        internals._attempt_abort(fail)  # as a cancellation does, with another exception

    def meet(self, site: Site) -> Exception | None:
        """A point has been reached; returns what is to be raised there."""
        if not self.armed:
            return None
        self.sites.append(site)
        if self.target != len(self.sites) - 1:
            return None
        self.hit = (site, trio.current_time())
        return self.error(f"injected at {site.place}")

    def call(self, owner: str, kind: str, name: str) -> None:
        """A call of something that production code was given. Raises."""
        error = self.meet(Site(owner, kind, name))
        if error is not None:
            raise error


class Awaits(trio.abc.Instrument):
    """Has awaits of production code raise where they would go on."""

    def __init__(self, points: Points) -> None:
        self._points = points

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        internals: Any = task
        assert hasattr(internals, "_next_send_fn"), "trio has changed; find its successor"
        if internals._next_send_fn != task.coro.send:
            return  # an exception comes out of it already: a cancellation
        site = _site(task)
        error = None if site is None else self._points.meet(site)
        if error is not None:
            internals._next_send_fn, internals._next_send = task.coro.throw, error


def _site(task: trio.lowlevel.Task) -> Site | None:
    """The await of production code that a task waits in; None: it is nobody's, waits in none, has not begun, or waits
    where trio promises that nothing is raised."""
    owner, coroutine = task.context.get(OWNER), cast(Any, task.coro)
    if owner is None or inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        return None
    found = None
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            if code is trio.lowlevel.cancel_shielded_checkpoint.__code__:
                return None
            if code.co_filename.startswith(PRODUCTION):
                found = f"{code.co_filename.removeprefix(ROOT + '/')}:{frame.f_lineno} {code.co_qualname}"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return None if found is None else Site(owner, "await", found)


def _all_tasks() -> list[trio.lowlevel.Task]:
    """Of this run, oldest first."""
    found, rest = [], [trio.lowlevel.current_root_task()]
    while rest:
        task = rest.pop()
        assert task is not None
        found.append(task)
        rest += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    internals: list[Any] = list(found)
    assert hasattr(internals[0], "_counter"), "trio has changed; find its successor"
    return sorted(internals, key=lambda task: task._counter)


class Door:
    """Stands before what production code was given: each call of a method is a point.

    Args:
        kinds: of what methods return that is to stand behind a door of its own, by name of the method.
    """

    def __init__(self, points: Points, owner: str, kind: str, behind: Any, kinds: dict[str, str] | None = None) -> None:
        self._points = points
        self._owner = owner
        self._kind = kind
        self._behind = behind
        self._kinds = kinds or {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._behind, name)
        if not callable(found):
            return found
        if inspect.iscoroutinefunction(found):

            async def call_async(*arguments: Any, **named: Any) -> Any:
                self._points.call(self._owner, self._kind, name)
                return self._behind_a_door(name, await found(*arguments, **named))

            return call_async

        def call(*arguments: Any, **named: Any) -> Any:
            self._points.call(self._owner, self._kind, name)
            return self._behind_a_door(name, found(*arguments, **named))

        return call

    def _behind_a_door(self, name: str, result: Any) -> Any:
        kind = self._kinds.get(name)
        return result if kind is None else Door(self._points, self._owner, kind, result)


def guarded(points: Points, owner: str, kind: str, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function."""

    def call(*arguments: Any, **named: Any) -> Any:
        points.call(owner, kind, place)
        return function(*arguments, **named)

    return call
