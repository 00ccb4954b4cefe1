"""The points of a run at which something may raise; see the package's docstring."""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import trio

ROOT = str(Path(__file__).parents[3])
PRODUCTION = (f"{ROOT}/connector/", f"{ROOT}/statemachine/")

OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("owner")
"""The process that a task belongs to; nobody's have no points."""

FILE_AND_SOCKETS = frozenset({"side channel", "requester", "link", "listener", "trace file", "device"})
"""Kinds of points that raise OSError as well; of a device, so that it is not a RuntimeError of torch's each time."""


class Site(NamedTuple):
    """Where a point is: in which process, of what kind, and which call or line of production code."""

    owner: str
    kind: str
    place: str


class Span(NamedTuple):
    """Where an expression or a statement of production code stands."""

    path: str
    first_line: int | None
    last_line: int | None
    first_column: int | None
    last_column: int | None


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
        reached: what was executed of production code at each point: the await that waits or the call that is made, and
            the awaits around it, through which the exception would have come; None: nobody wants to know.
    """

    target: int | None = None
    error: type[Exception] = Injected
    struck: int | None = None
    armed: bool = False
    hit: tuple[Site, float] | None = None
    reached: set[Span] | None = None

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

    def meet(self, site: Site, frames: Callable[[], Iterator[FrameType]]) -> Exception | None:
        """A point has been reached, `frames` being those of who is there; returns what is to be raised there."""
        if not self.armed:
            return None
        self.sites.append(site)
        if self.reached is not None:
            self.reached.update(_span(frame) for frame in frames() if _is_production(frame))
        if self.target != len(self.sites) - 1:
            return None
        self.hit = (site, trio.current_time())
        return self.error(f"injected at {site.place}")

    def call(self, owner: str, kind: str, name: str) -> None:
        """A call of something that production code was given. Raises."""
        error = self.meet(Site(owner, kind, name), _callers)
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
        error = None if site is None else self._points.meet(site, lambda: _frames(task.coro))
        if error is None:
            return
        nursery = next((frame.f_locals["self"] for frame in _frames(task.coro) if frame.f_code is _IN_NURSERY), None)
        if nursery is None:
            internals._next_send_fn, internals._next_send = task.coro.throw, error
        else:
            nursery._add_exc(error, None)  # as trio does itself: the end of a nursery tidies up before it raises


def _site(task: trio.lowlevel.Task) -> Site | None:
    """The await of production code that a task waits in; None: it is nobody's, waits in none, has not begun, or waits
    where trio promises that nothing is raised when it goes on: it has got a lock, or its cancellation would be raised
    with the next checkpoint. (A plain checkpoint waits in such a place too, and raises afterwards.)"""
    owner = task.context.get(OWNER)
    if owner is None or inspect.getcoroutinestate(cast(Any, task.coro)) == inspect.CORO_CREATED:
        return None
    found, outer = None, None
    for frame in _frames(task.coro):
        code = frame.f_code
        if code is _LOCK or (code is _SHIELDED and outer is not _CHECKPOINT):
            return None
        if _is_production(frame):
            found = f"{code.co_filename.removeprefix(ROOT + '/')}:{frame.f_lineno} {code.co_qualname}"
        outer = code
    return None if found is None else Site(owner, "await", found)


_SHIELDED, _CHECKPOINT, _LOCK, _IN_NURSERY = (
    cast(Any, inspect.unwrap(each)).__code__
    for each in (
        trio.lowlevel.cancel_shielded_checkpoint,
        trio.lowlevel.checkpoint,
        trio.Lock.acquire,
        trio.Nursery._nested_child_finished,  # should trio change: find its successor
    )
)


def _frames(coroutine: Any) -> Iterator[FrameType]:
    """Of a task that waits, outermost first."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _callers() -> Iterator[FrameType]:
    """Of the call that is being made, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_production(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PRODUCTION)


def _span(frame: FrameType) -> Span:
    """What a frame executes."""
    path = frame.f_code.co_filename.removeprefix(ROOT + "/")
    first_line, last_line, first_column, last_column = _positions(frame.f_code)[frame.f_lasti // 2]
    return Span(path, first_line, last_line, first_column, last_column)


@functools.cache
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())


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
