"""SIGTERM reaches the part that drains an engine before vLLM's own handler, and nobody else's is touched."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from connector.clock import BootClock, to_ns
from connector.scheduler.draining import SchedulerDraining
from statemachine.draining import Draining, State

GRACE_NS = to_ns(20)


class Listener:
    """In place of the listener's thread."""

    def __init__(self) -> None:
        self.draining = Draining(lease_ns=to_ns(10))
        self.is_dead = False
        self.asked: list[tuple[str, int]] = []

    def drain(self, cause: str, grace_ns: int) -> None:
        self.asked.append((cause, grace_ns))


@pytest.fixture(autouse=True)
def handler_of_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def made(listener: Any, grace_ns: int = GRACE_NS) -> SchedulerDraining:
    return SchedulerDraining(BootClock(), lambda: listener, grace_ns=grace_ns, lease_ns=to_ns(10))


def handler(heard: list[int], module: str = "vllm.v1.engine.core") -> Any:
    def on_signal(number: int, frame: object) -> None:
        heard.append(number)

    on_signal.__module__ = module
    signal.signal(signal.SIGTERM, on_signal)
    return on_signal


def test_sigterm_begins_to_drain_at_once_and_vllm_hears_it_too() -> None:
    listener, heard = Listener(), list[int]()
    former = handler(heard)
    draining = made(listener)
    draining.catch_sigterm()
    assert (draining.value.accepts, draining.keeps_stepping) == (True, False)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (heard, listener.asked) == ([signal.SIGTERM], [("SIGTERM", GRACE_NS)])
    assert listener.draining.state is State.SERVING, "the listener's thread has not come to it"
    value = draining.value
    assert (value.accepts, value.grants(BootClock().now_ns()), draining.keeps_stepping) == (False, True, True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (len(heard), len(listener.asked)) == (2, 1)
    draining.forget_sigterm()
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.parametrize("module", ["somebody.else", "vllmish"])
def test_the_handler_of_another_program_is_left_alone(module: str) -> None:
    heard = list[int]()
    former = handler(heard, module)
    draining = made(Listener())
    draining.catch_sigterm()
    assert signal.getsignal(signal.SIGTERM) is former
    draining.forget_sigterm()
    assert signal.getsignal(signal.SIGTERM) is former


def test_where_vllm_leaves_no_time_the_signal_is_vllms_alone() -> None:
    former = handler([])
    made(Listener(), grace_ns=0).catch_sigterm()
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_thread_that_takes_no_signals_catches_none() -> None:
    former = handler([])
    thread = threading.Thread(target=made(Listener()).catch_sigterm)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_handler_that_somebody_else_has_set_since_stays() -> None:
    draining = made(Listener())
    handler([])
    draining.catch_sigterm()
    later = handler([])
    draining.forget_sigterm()
    assert signal.getsignal(signal.SIGTERM) is later


def test_sigterm_before_anything_is_served_is_vllms_alone() -> None:
    heard = list[int]()
    handler(heard)
    draining = made(None)
    draining.catch_sigterm()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert (draining.value.accepts, draining.keeps_stepping) == (True, False)
