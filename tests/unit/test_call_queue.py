"""The agent's thread waits for calls for fractions of a millisecond, millions of times, and always comes back."""

from __future__ import annotations

import threading
import time

import pytest

from connector.ports.nixl_agent.call_queue import CallQueue

WAIT_SECONDS = 0.00005


def test_items_come_in_order() -> None:
    queue: CallQueue[int] = CallQueue()
    for number in range(3):
        queue.put(number)
    assert [queue.take() for _ in range(4)] == [0, 1, 2, None]


def test_a_wait_ends_at_once_for_what_was_put_before_it_and_then_no_more() -> None:
    queue: CallQueue[int] = CallQueue()
    queue.put(1)
    started = time.monotonic()
    queue.wait(60.0)
    assert time.monotonic() - started < 30.0
    assert queue.take() == 1
    started = time.monotonic()
    queue.wait(0.05)
    assert time.monotonic() - started >= 0.04


def test_to_ring_twice_is_to_ring_once() -> None:
    queue: CallQueue[int] = CallQueue()
    queue.ring()
    queue.ring()
    queue.wait(5.0)
    assert queue.take() is None


@pytest.mark.timeout(60)
def test_short_waits_under_load_always_end() -> None:
    """What `queue.SimpleQueue.get(timeout)` fails: one consumer that is put off its core again and again, and that
    nobody puts anything for."""
    queue: CallQueue[int] = CallQueue()
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    rivals = [threading.Thread(target=compute) for _ in range(3)]
    for rival in rivals:
        rival.start()
    taken: list[int] = []

    def consume() -> None:
        while len(taken) < 200:
            queue.wait(WAIT_SECONDS)
            while (item := queue.take()) is not None:
                taken.append(item)

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    for number in range(200):
        queue.put(number)
        time.sleep(0.001)
    consumer.join(30)
    over.set()
    for rival in rivals:
        rival.join()
    assert taken == list(range(200))
