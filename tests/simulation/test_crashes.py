"""A part of the campaign of crashes (`tests/simulation/crashes`), another one with each run; `make crashes` is all."""

from __future__ import annotations

import random

import pytest

from connector.runtime.recorder import Recorder
from connector.runtime.thread import ActorThread
from connector.worker.ledger import TransferLedger
from tests.simulation.crashes.campaign import Found, Try, one_of_each_site, run, tries
from tests.simulation.crashes.points import InjectedOs
from tests.simulation.crashes.run import Verdict, play
from tests.simulation.mutants.mutant import Edit, Patch

RUNS = 60
"""Of some two thousand."""

WHOLE_RUN = ("Supervisor.run", "ActorThread._main_task", "HandshakeListener.run")
"""Where a whole trio run waits: what raises there ends it, in production its thread."""


@pytest.fixture(scope="module")
def reference() -> Verdict:
    return play()


@pytest.fixture(scope="module")
def everything(reference: Verdict) -> list[Try]:
    return tries(reference.sites)


def test_without_a_fault_all_goes_well_and_every_kind_of_point_is_met(reference: Verdict) -> None:
    assert reference.complaints == []
    assert not reference.died
    kinds = {"await", "nixl", "side channel", "requester", "link", "listener", "trace file", "figures", "log"}
    assert {site.kind for site in reference.sites} == kinds
    assert {site.owner for site in reference.sites} >= {"d", "p0", "p1", "p2", "p0 listener"}
    assert play().sites == reference.sites, "a run is the same each time"


def test_whatever_raises_at_some_points_costs_what_it_may(everything: list[Try]) -> None:
    seed = random.SystemRandom().randrange(1 << 16)
    candidates = one_of_each_site(everything, seed)
    chosen = random.Random(seed).sample(candidates, RUNS)
    found = Found()
    for tried, verdict in run(chosen):
        found.note(tried, verdict)
    assert found.tried == RUNS
    assert {what: [str(each) for each in those] for what, those in found.complaints.items()} == {}, f"seed {seed}"


@pytest.mark.parametrize("owner", ["d", "p0", "p0 listener"])
def test_only_what_ends_a_whole_run_ends_it_and_in_the_middle_too(everything: list[Try], owner: str) -> None:
    """Of one process, in the middle of everything: each of its tasks that waits."""
    waiting = [each for each in everything if each.moment == 2.0 and each.site.owner == owner]
    assert len(waiting) >= 3
    for tried, verdict in run(waiting):
        assert verdict.complaints == [], tried
        assert verdict.died == tried.site.place.endswith(WHOLE_RUN), tried


def test_a_socket_that_raises_an_os_error_is_tried_too(everything: list[Try]) -> None:
    assert any(each.error is InjectedOs for each in everything)


MISTAKES = {
    "add": Edit(TransferLedger.take_results, "except Exception as error:", "except ZeroDivisionError as error:"),
    "note_wake_up": Edit(ActorThread.__init__, 'log_crash(f"mailbox of {name}", error)', "None"),
    "transition": Edit(Recorder.catch_up, 'self._crashes.note("counting of transitions", error)', "pass"),
}
"""By the name of the call that raises: who is to bear it does not, or says nothing."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_product_that_does_not_bear_it_is_noticed(everything: list[Try], mistake: str) -> None:
    points = [each for each in everything if each.site.kind == "figures" and each.site.owner == "d"]
    chosen = [each for each in points if each.site.place == mistake][:6]
    assert chosen
    with Patch() as patch:
        MISTAKES[mistake].apply(patch)
        assert any(verdict.complaints for _, verdict in run(chosen))
