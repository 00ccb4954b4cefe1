"""The transfer machine (one NIXL READ handle), against its specification.

A handle is released once, after the end of its READ was seen and never before; and that end is told to exactly one
side: to the request that waits for it, or to the quarantine that outlived the request.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statemachine.failures import TransferError
from statemachine.kernel import Effect, Event, ProtocolError
from statemachine.transfer import (
    MACHINE,
    Abandoned,
    Completed,
    Errored,
    HandleReleased,
    Inform,
    LiftQuarantine,
    ReleaseHandle,
    State,
    Transfer,
)

POSTED = Transfer(request_id="decode-1", read=2)
LOST = TransferError(peer="prefill", operation="READ", error="REMOTE_DISCONNECT", transport_lost=True)
ERRORED = Errored(failure=LOST)


def run(transfer: Transfer, *events: Event) -> tuple[Transfer, list[Effect]]:
    """Feed `events`; all effects in order."""
    effects: list[Effect] = []
    for event in events:
        transfer, more = MACHINE.step(transfer, event)
        effects += more
    return transfer, effects


def test_a_completed_read_is_told_to_its_request_and_released() -> None:
    transfer, effects = run(POSTED, Completed())
    assert (transfer.state, transfer.failure) == (State.DONE, None)
    assert effects == [Inform(failure=None), ReleaseHandle()]
    assert run(transfer, HandleReleased())[0].state is State.RELEASED


def test_an_errored_read_is_told_to_its_request_and_released() -> None:
    transfer, effects = run(POSTED, ERRORED)
    assert (transfer.state, transfer.failure) == (State.ERRORED, LOST)
    assert effects == [Inform(failure=LOST), ReleaseHandle()]
    assert run(transfer, HandleReleased())[0].state is State.RELEASED


def test_giving_a_read_up_does_not_release_its_handle() -> None:
    transfer, effects = run(POSTED, Abandoned(), Abandoned())
    assert (transfer.state, effects) == (State.STUCK, [])


@pytest.mark.parametrize(("end", "state"), [(Completed(), State.DONE), (ERRORED, State.ERRORED)])
def test_the_late_end_of_an_abandoned_read_lifts_the_quarantine(end: Event, state: State) -> None:
    transfer, effects = run(POSTED, Abandoned(), end)
    assert transfer.state is state
    assert effects == [LiftQuarantine(), ReleaseHandle()]


@pytest.mark.parametrize("end", [Completed(), ERRORED])
def test_giving_up_a_read_that_has_ended_changes_nothing(end: Event) -> None:
    ended, _ = run(POSTED, end)
    assert run(ended, Abandoned()) == (ended, [])


@pytest.mark.parametrize("before", [(), (Abandoned(),)])
def test_no_handle_is_released_before_its_end_was_seen(before: tuple[Event, ...]) -> None:
    transfer, _ = run(POSTED, *before)
    with pytest.raises(ProtocolError, match="only after its end"):
        MACHINE.step(transfer, HandleReleased())


@pytest.mark.parametrize("first", [Completed(), ERRORED])
@pytest.mark.parametrize("second", [Completed(), ERRORED])
def test_a_read_ends_once(first: Event, second: Event) -> None:
    with pytest.raises(ProtocolError, match="ends once"):
        run(POSTED, first, second)


def test_a_released_handle_absorbs_everything() -> None:
    released, _ = run(POSTED, Completed(), HandleReleased())
    assert run(released, Completed(), ERRORED, Abandoned(), HandleReleased()) == (released, [])


@given(events=st.lists(st.sampled_from([Completed(), ERRORED, Abandoned(), HandleReleased()]), max_size=12))
@settings(max_examples=500, deadline=None)
def test_in_every_history_the_end_is_told_once_and_the_handle_released_after_it(events: list[Event]) -> None:
    transfer = POSTED
    told: list[Effect] = []
    released = 0
    ended = abandoned_in_flight = False
    for event in events:
        try:
            after, effects = MACHINE.step(transfer, event)
        except ProtocolError:
            continue
        is_end = not ended and isinstance(event, Completed | Errored)
        abandoned_in_flight = abandoned_in_flight or (not ended and isinstance(event, Abandoned))
        ended = ended or is_end
        told += [effect for effect in effects if isinstance(effect, Inform | LiftQuarantine)]
        released += effects.count(ReleaseHandle())
        assert released == (1 if ended else 0)
        assert (effects != ()) == is_end
        transfer = after
    assert len(told) == (1 if ended else 0)
    assert all(isinstance(effect, LiftQuarantine) == abandoned_in_flight for effect in told)
    # Whatever happened, the end of the READ and of its handle lead to the end of the machine.
    rest = (HandleReleased(),) if ended else (Completed(), HandleReleased())
    assert run(transfer, *rest)[0].state is State.RELEASED
