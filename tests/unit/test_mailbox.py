"""Mailboxes of actors: nothing is lost and nothing overtakes. The way from other threads: test_thread_mailbox.py."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from connector.runtime.mailbox import Mailbox


def test_messages_come_out_in_the_order_in_which_they_went_in() -> None:
    mailbox: Mailbox[str] = Mailbox()
    assert mailbox.take_one() is None
    for message in "abc":
        mailbox.put(message)
    assert len(mailbox) == 3
    assert [mailbox.take_one() for _ in range(4)] == ["a", "b", "c", None]


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
