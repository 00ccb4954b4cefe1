"""Mailboxes: nothing is lost, nothing overtakes, and nothing that a handler does can stop the loop.

The rules of the way from the engine thread are tested twice: with a token that only notes down what was scheduled, so
that the critical interleavings can be played by hand; and with a real trio loop and a real second thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import trio
import trio.testing

from connector.runtime.mailbox import EngineMailbox, Mailbox

STRESS_COMMANDS = 200_000
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


# --- engine thread -> trio thread, step by step ---------------------------------------------------------------------


def engine_mailbox(
    deliver: Callable[[int], None], on_error: Callable[[BaseException], None] = _raise
) -> tuple[EngineMailbox[int], FakeToken, Callable[[], None]]:
    """A mailbox, its token, and its flush."""
    mailbox: EngineMailbox[int] = EngineMailbox(deliver, on_error)
    token = FakeToken()
    return mailbox, token, lambda: mailbox.flush(token)  # type: ignore[arg-type]


def test_one_wake_up_carries_all_commands_of_a_step_in_order() -> None:
    delivered: list[int] = []
    mailbox, token, flush = engine_mailbox(delivered.append)
    for command in range(100):
        mailbox.append(command)
    assert token.scheduled == []  # appending costs no wake-up
    flush()
    flush()
    assert len(token.scheduled) == 1
    assert delivered == []  # the engine thread delivers nothing by itself
    token.run_all()
    assert delivered == list(range(100))


def test_an_empty_step_wakes_nobody() -> None:
    _, token, flush = engine_mailbox(_refuse)
    flush()
    assert token.scheduled == []


def test_steps_before_the_wake_up_ran_share_it() -> None:
    delivered: list[int] = []
    mailbox, token, flush = engine_mailbox(delivered.append)
    for command in range(3):
        mailbox.append(command)
        flush()
    assert len(token.scheduled) == 1
    token.run_all()
    assert delivered == [0, 1, 2]
    mailbox.append(3)
    flush()
    assert len(token.scheduled) == 1
    token.run_all()
    assert delivered == [0, 1, 2, 3]


def test_a_step_during_the_drain_schedules_another_one() -> None:
    """Rule one: `armed` is cleared before the deque is emptied, so whoever comes in between is not left behind."""
    delivered: list[int] = []
    wake_ups: list[int] = []

    def deliver(command: int) -> None:
        delivered.append(command)
        if command == 0:
            # The engine thread gets its turn here.
            mailbox.append(1)
            flush()
            wake_ups.append(len(token.scheduled))

    mailbox, token, flush = engine_mailbox(deliver)
    mailbox.append(0)
    flush()
    token.run_all()
    assert delivered == [0, 1]
    assert wake_ups == [1]


def test_a_step_right_after_the_last_look_at_the_deque_is_not_left_behind() -> None:
    """The narrowest gap: the drain has seen an empty deque and has not returned yet."""
    delivered: list[int] = []
    mailbox, token, flush = engine_mailbox(delivered.append)

    class Interrupted(type(mailbox._commands)):  # type: ignore[misc]
        """A deque that lets the engine thread run once between "it is empty" and what the drain does next."""

        def __len__(self) -> int:
            length: int = super().__len__()
            if length == 0 and delivered == [0]:
                delivered.append(-1)
                mailbox.append(1)
                flush()
                return 0  # what the drain saw
            return length

    mailbox._commands = Interrupted()
    mailbox.append(0)
    flush()
    token.run_all()
    assert delivered == [0, -1, 1]


def test_an_exception_of_one_command_costs_only_that_command() -> None:
    """Rule two: the drain never raises."""
    delivered: list[int] = []
    errors: list[BaseException] = []

    def deliver(command: int) -> None:
        if command % 2:
            raise ValueError(command)
        delivered.append(command)

    mailbox, token, flush = engine_mailbox(deliver, errors.append)
    for command in range(5):
        mailbox.append(command)
    flush()
    token.run_all()
    assert delivered == [0, 2, 4]
    assert [error.args for error in errors] == [(1,), (3,)]


def test_an_exception_of_the_error_handler_does_not_end_the_drain() -> None:
    """Never means: not even when reporting the failure fails."""
    delivered: list[int] = []

    def deliver(command: int) -> None:
        if command == 1:
            raise ValueError(command)
        delivered.append(command)

    mailbox, token, flush = engine_mailbox(deliver, _raise)
    for command in range(3):
        mailbox.append(command)
    flush()
    token.run_all()
    assert delivered == [0, 2]


def test_a_finished_run_is_told_to_the_engine_thread() -> None:
    mailbox, token, flush = engine_mailbox(_refuse)
    token.is_finished = True
    mailbox.append(0)
    with pytest.raises(trio.RunFinishedError):
        flush()


def _refuse(command: int) -> None:
    raise AssertionError(f"nothing should be delivered, got {command}")


# --- engine thread -> trio thread, for real -------------------------------------------------------------------------


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """So that the two threads interrupt each other in as many places as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.timeout(STRESS_TIMEOUT_SECONDS + 30)
@pytest.mark.usefixtures("frequent_thread_switches")
@pytest.mark.parametrize("commands_per_step", [1, 7, 1000])
def test_from_another_thread_none_is_lost_and_none_overtakes(commands_per_step: int) -> None:
    delivered: list[int] = []
    errors: list[BaseException] = []

    async def main() -> None:
        all_here = trio.Event()

        def deliver(command: int) -> None:
            delivered.append(command)
            if len(delivered) == STRESS_COMMANDS:
                all_here.set()

        mailbox: EngineMailbox[int] = EngineMailbox(deliver, errors.append)
        token = trio.lowlevel.current_trio_token()

        def engine() -> None:
            for first in range(0, STRESS_COMMANDS, commands_per_step):
                for command in range(first, min(first + commands_per_step, STRESS_COMMANDS)):
                    mailbox.append(command)
                mailbox.flush(token)

        thread = threading.Thread(target=engine)
        thread.start()
        try:
            with trio.fail_after(STRESS_TIMEOUT_SECONDS):
                await all_here.wait()
        finally:
            thread.join()

    trio.run(main)
    assert errors == []
    assert delivered == list(range(STRESS_COMMANDS))


# --- inside the trio thread -----------------------------------------------------------------------------------------


def test_messages_come_out_in_the_order_in_which_they_went_in() -> None:
    mailbox: Mailbox[str] = Mailbox()
    assert mailbox.take_one() is None
    for message in "abc":
        assert mailbox.put(message)
    assert len(mailbox) == 3
    assert [mailbox.take_one() for _ in range(4)] == ["a", "b", "c", None]


def test_a_full_mailbox_refuses_and_keeps_what_it_has() -> None:
    mailbox: Mailbox[str] = Mailbox(limit=2)
    assert [mailbox.put(message) for message in "abc"] == [True, True, False]
    assert mailbox.take_one() == "a"
    assert mailbox.put("d")
    assert [mailbox.take_one() for _ in range(3)] == ["b", "d", None]


def test_a_waiting_actor_wakes_for_a_message_and_for_nothing_else() -> None:
    async def main() -> None:
        mailbox: Mailbox[str] = Mailbox()
        taken: list[tuple[str | None, float]] = []

        async def actor() -> None:
            for _ in range(2):
                await mailbox.wait(100.0)
                taken.append((mailbox.take_one(), trio.current_time() - start))

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actor)
            await trio.sleep(5)
            mailbox.put("a")
            await trio.sleep(5)
            mailbox.put("b")
        assert taken == [("a", 5.0), ("b", 10.0)]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_waiting_ends_after_the_timeout() -> None:
    async def main() -> None:
        mailbox: Mailbox[str] = Mailbox()
        start = trio.current_time()
        await mailbox.wait(3.0)
        assert trio.current_time() - start == pytest.approx(3.0)
        assert mailbox.take_one() is None

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("timeout_seconds", [0.0, 1.0, float("inf")])
def test_waiting_with_a_message_at_hand_returns_at_once_but_lets_others_run(timeout_seconds: float) -> None:
    async def main() -> None:
        mailbox: Mailbox[str] = Mailbox()
        mailbox.put("a")
        start = trio.current_time()
        with trio.testing.assert_checkpoints():
            await mailbox.wait(timeout_seconds)
        assert trio.current_time() == start
        assert mailbox.take_one() == "a"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_waiting_with_no_time_left_is_a_checkpoint_too() -> None:
    # An actor with a timer that is always due must not shut everybody else out.
    async def main() -> None:
        mailbox: Mailbox[str] = Mailbox()
        with trio.testing.assert_checkpoints():
            await mailbox.wait(0.0)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_message_put_before_the_wait_is_cancelled_is_still_there() -> None:
    async def main() -> None:
        mailbox: Mailbox[str] = Mailbox()
        with trio.move_on_after(1):
            await mailbox.wait(float("inf"))
        mailbox.put("a")
        with trio.fail_after(1):
            await mailbox.wait(float("inf"))
        assert mailbox.take_one() == "a"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
