"""The way into the trio thread: nothing is lost, nothing overtakes, and nothing that a handler does stops the loop.

The rules are tested twice: with a token that only notes down what was scheduled, so that the critical interleavings can
be played by hand; and with a real trio loop and real threads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import trio

from connector.thread_mailbox import ThreadMailbox

STRESS_ITEMS = 200_000
STRESS_TIMEOUT_SECONDS = 90.0


class FakeToken:
    """Notes down the callbacks that trio would run soon."""

    def __init__(self) -> None:
        self.scheduled: list[Callable[[], object]] = []
        self.is_finished = False

    def run_sync_soon(self, callback: Callable[[], object]) -> None:
        if self.is_finished:
            raise trio.RunFinishedError
        self.scheduled.append(callback)

    def run_all(self) -> None:
        while self.scheduled:
            self.scheduled.pop(0)()


def _raise(error: BaseException) -> None:
    raise error


def test_who_drains_early_takes_everything_and_the_loop_finds_nothing() -> None:
    taken: list[int] = []
    mailbox, token, flush = new_mailbox(taken.append)
    mailbox.append(1)
    flush()
    mailbox.append(2)
    mailbox.drain()
    assert taken == [1, 2]
    mailbox.append(3)
    flush()
    token.run_all()
    assert taken == [1, 2, 3]


# --- step by step ---------------------------------------------------------------------


def new_mailbox(
    deliver: Callable[[int], None], on_error: Callable[[BaseException], None] = _raise
) -> tuple[ThreadMailbox[int], FakeToken, Callable[[], None]]:
    """A mailbox, its token, and its flush."""
    mailbox: ThreadMailbox[int] = ThreadMailbox(deliver, on_error)
    token = FakeToken()
    return mailbox, token, lambda: mailbox.flush(token)  # type: ignore[arg-type]


def test_one_wake_up_carries_all_items_in_order() -> None:
    delivered: list[int] = []
    mailbox, token, flush = new_mailbox(delivered.append)
    for item in range(100):
        mailbox.append(item)
    assert token.scheduled == []  # appending costs no wake-up
    flush()
    flush()
    assert len(token.scheduled) == 1
    assert delivered == []  # the other thread delivers nothing by itself
    token.run_all()
    assert delivered == list(range(100))


def test_an_empty_flush_wakes_nobody() -> None:
    _, token, flush = new_mailbox(_refuse)
    flush()
    assert token.scheduled == []


def test_flushes_before_the_wake_up_ran_share_it() -> None:
    delivered: list[int] = []
    mailbox, token, flush = new_mailbox(delivered.append)
    for item in range(3):
        mailbox.append(item)
        flush()
    assert len(token.scheduled) == 1
    token.run_all()
    assert delivered == [0, 1, 2]
    mailbox.append(3)
    flush()
    assert len(token.scheduled) == 1
    token.run_all()
    assert delivered == [0, 1, 2, 3]


def test_a_flush_during_the_drain_schedules_another_one() -> None:
    """Rule one: `armed` is cleared before the deque is emptied, so whoever comes in between is not left behind."""
    delivered: list[int] = []
    wake_ups: list[int] = []

    def deliver(item: int) -> None:
        delivered.append(item)
        if item == 0:
            # The other thread gets its turn here.
            mailbox.append(1)
            flush()
            wake_ups.append(len(token.scheduled))

    mailbox, token, flush = new_mailbox(deliver)
    mailbox.append(0)
    flush()
    token.run_all()
    assert delivered == [0, 1]
    assert wake_ups == [1]


def test_an_item_right_after_the_last_look_at_the_deque_is_not_left_behind() -> None:
    """The narrowest gap: the drain has seen an empty deque and has not returned yet."""
    delivered: list[int] = []
    mailbox, token, flush = new_mailbox(delivered.append)

    class Interrupted(type(mailbox._items)):  # type: ignore[misc]
        """A deque that lets the other thread run once between "it is empty" and what the drain does next."""

        def __len__(self) -> int:
            length: int = super().__len__()
            if length == 0 and delivered == [0]:
                delivered.append(-1)
                mailbox.append(1)
                flush()
                return 0  # what the drain saw
            return length

    mailbox._items = Interrupted()
    mailbox.append(0)
    flush()
    token.run_all()
    assert delivered == [0, -1, 1]


def test_an_exception_of_one_item_costs_only_that_item() -> None:
    """Rule two: the drain never raises."""
    delivered: list[int] = []
    errors: list[BaseException] = []

    def deliver(item: int) -> None:
        if item % 2:
            raise ValueError(item)
        delivered.append(item)

    mailbox, token, flush = new_mailbox(deliver, errors.append)
    for item in range(5):
        mailbox.append(item)
    flush()
    token.run_all()
    assert delivered == [0, 2, 4]
    assert [error.args for error in errors] == [(1,), (3,)]


def test_an_exception_of_the_error_handler_does_not_end_the_drain() -> None:
    """Never means: not even when reporting the failure fails."""
    delivered: list[int] = []

    def deliver(item: int) -> None:
        if item == 1:
            raise ValueError(item)
        delivered.append(item)

    mailbox, token, flush = new_mailbox(deliver, _raise)
    for item in range(3):
        mailbox.append(item)
    flush()
    token.run_all()
    assert delivered == [0, 2]


def test_a_finished_run_is_told_to_the_other_thread() -> None:
    mailbox, token, flush = new_mailbox(_refuse)
    token.is_finished = True
    mailbox.append(0)
    for _ in range(2):  # every time, not only the first
        with pytest.raises(trio.RunFinishedError):
            flush()
    assert len(mailbox) == 1


def _refuse(item: int) -> None:
    raise AssertionError(f"nothing should be delivered, got {item}")


# --- for real -------------------------------------------------------------------------


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """So that the two threads interrupt each other in as many places as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.timeout(STRESS_TIMEOUT_SECONDS + 30)
@pytest.mark.usefixtures("frequent_thread_switches")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("items_per_flush", [1, 7, 1000])
def test_from_other_threads_none_is_lost_and_none_overtakes(items_per_flush: int, threads: int) -> None:
    delivered: list[list[int]] = [[] for _ in range(threads)]
    errors: list[BaseException] = []
    items = STRESS_ITEMS // threads

    async def main() -> None:
        all_here = trio.Event()

        def deliver(item: tuple[int, int]) -> None:
            sender, number = item
            delivered[sender].append(number)
            if number == items - 1 and all(len(each) == items for each in delivered):
                all_here.set()

        mailbox: ThreadMailbox[tuple[int, int]] = ThreadMailbox(deliver, errors.append)
        token = trio.lowlevel.current_trio_token()

        def send(sender: int) -> None:
            for first in range(0, items, items_per_flush):
                for number in range(first, min(first + items_per_flush, items)):
                    mailbox.append((sender, number))
                mailbox.flush(token)

        senders = [threading.Thread(target=send, args=(sender,)) for sender in range(threads)]
        for sender in senders:
            sender.start()
        try:
            with trio.fail_after(STRESS_TIMEOUT_SECONDS):
                await all_here.wait()
        finally:
            for sender in senders:
                sender.join()

    trio.run(main)
    assert errors == []
    assert delivered == [list(range(items))] * threads
