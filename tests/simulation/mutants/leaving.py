"""Mutants of engines that come and go: the machines draining and departure, what a rank of P says when its engine is to
end, what D makes of it, and engines that are met before their first request."""

from __future__ import annotations

from connector.scheduler.draining import SchedulerDraining
from statemachine import departure, draining, grant, introduction
from statemachine.lending import Lending
from statemachine.remote_engine import RemoteEngine
from statemachine.remote_engine.claims import Claims
from tests.simulation.faults import Kind
from tests.simulation.mutants.mutant import ByTest, Edit, Explored, Mutant, Seeds, fault
from tests.simulation.mutants.places import LEAVES, LENDING, within

SCHEDULER = "tests/unit/test_connector_scheduler.py"
LEAVING = "tests/unit/test_leaving_engine.py"
MACHINE = "tests/unit/test_draining_machine.py"
ENGINE = "tests/unit/test_remote_engine.py"
INTRODUCTIONS = "tests/unit/test_introductions.py"
SIGTERM = "tests/unit/test_sigterm.py"
KNOWN_AND_AWAY = (fault(Kind.KNOWN_PEER, "d0>p0", 0.0, 1.0), fault(Kind.CRASH_NEW_ID, "p0", 1.0, 20.0))
"""It is back when no requests come any more."""
DRAIN = (fault(Kind.DRAIN, "p0", 1.0, 0.1),)

MUTANTS = (
    Mutant(
        name="a draining engine lends on",
        broken="prefills that come after it began to drain are lent, so it never drains",
        changes=(
            Edit(grant._schedule, "event.terms.accept or is_promised", "True"),
            Edit(grant._lends, " and grant.state is State.COMPUTING", ""),
        ),
        place=ByTest(SCHEDULER + "::test_a_prefill_that_comes_while_the_engine_drains_is_answered_without_parameters"),
    ),
    Mutant(
        name="what was accepted is dropped",
        broken="prefills that were accepted before it began to drain are not lent, although they are computed",
        changes=(Edit(grant._schedule, " or is_promised", ""),),
        place=ByTest(SCHEDULER + "::test_a_prefill_that_was_accepted_before_is_lent"),
    ),
    Mutant(
        name="granted until the end",
        broken="a lease is granted in the last moment of the grace period, and outlasts it",
        changes=(Edit(draining.Draining.stops_granting_ns, " - self.lease_ns", ""),),
        place=ByTest(SCHEDULER + "::test_nothing_is_granted_whose_lease_would_outlast_the_grace_period"),
    ),
    Mutant(
        name="ended before its leases",
        broken="an engine says that it has drained while it lends, and is ended",
        changes=(Edit(draining._count, "event.lent or draining.untold", "draining.untold"),),
        place=Seeds(2, "draining", faults=DRAIN),
    ),
    Mutant(
        name="ended before its decode engines are told",
        broken="an engine that lends nothing ends without a word, which decode engines take for a failure",
        changes=(Edit(draining._count, "event.lent or draining.untold", "event.lent"),),
        place=ByTest(MACHINE + "::test_it_waits_until_every_worker_was_told_and_nothing_is_lent"),
    ),
    Mutant(
        name="the grace period never ends",
        broken="a decode engine that is dead, or holds for ever, keeps an engine from draining",
        changes=(Edit(draining._count, "event.now_ns < draining.ends_ns", "True"),),
        place=ByTest(MACHINE + "::test_the_grace_period_bounds_the_wait"),
    ),
    Mutant(
        name="renewed beyond the grace period",
        broken="whoever asks keeps the blocks of an engine that is to end",
        changes=(Edit(Lending._bounded, "if self._leaves_ns is None", "if True"),),
        place=ByTest(
            LENDING + "::test_what_is_lent_when_the_engine_leaves_is_served_until_the_end_of_the_grace_period"
        ),
    ),
    Mutant(
        name="who comes later is not told",
        broken="a decode engine that meets one which leaves takes its end for a failure",
        changes=(Edit(Lending._note_hearer, "is_new and self._leaves_ns is not None", "False"),),
        place=ByTest(LENDING + "::test_each_decode_rank_that_has_asked_is_told_once_that_the_engine_leaves"),
    ),
    Mutant(
        name="D ignores Leaving",
        broken="when an engine that had said so has ended, D connects again, waits, and says releases to nobody",
        changes=(Edit(departure._say, "state=State.LEAVING", "state=State.STAYS"),),
        place=ByTest(LEAVING + "::test_when_its_process_is_gone_everybody_fails_at_once_and_nobody_connects"),
    ),
    Mutant(
        name="every failure is a departure",
        broken="a READ that fails for another reason costs all requests of an engine that leaves",
        changes=(Edit(RemoteEngine._suspect, "if has_ended:", "if True:"),),
        place=ByTest(LEAVING + "::test_a_read_that_fails_for_another_reason_does_not_mean_that_it_is_gone"),
    ),
    Mutant(
        name="a pause after a refusal",
        broken="the process that takes the place of one that left is not found before a pause is over",
        changes=(
            Edit(
                RemoteEngine._fail_handshake,
                "is_awaited and not (has_left and isinstance(failure, ConnectionRefused))",
                "is_awaited",
            ),
        ),
        place=ByTest(LEAVING + "::test_it_is_tried_once_for_who_comes_later_and_without_a_pause"),
    ),
    Mutant(
        name="who has left is blamed for who came",
        broken="an engine that does not fit, in the place of one that left, is told as the departure of that one",
        changes=(Edit(RemoteEngine._fail_handshake, "Incompatible | BadParams | NotAllowed", "Incompatible"),),
        place=ByTest(LEAVING + "::test_what_does_not_fit_in_its_place_says_so"),
    ),
    Mutant(
        name="an attempt anywhere ends a departure",
        broken="one request with a wrong address costs all others what the process lends that took the place of one",
        changes=(
            Edit(
                RemoteEngine._fail_handshake,
                "was_there and self._departure.state is not departure.State.STAYS",
                "self._departure.state is not departure.State.STAYS",
            ),
        ),
        place=ByTest(LEAVING + "::test_an_attempt_at_another_address_costs_nobody_what_is_lent_where_the_engine_was"),
    ),
    Mutant(
        name="held after the end",
        broken="a hold that overtakes the grant is promised something by an engine that is to end at once",
        changes=(
            Edit(
                Lending._hold, "machine.State.COMPUTING and deadline_ns <= now_ns", "machine.State.COMPUTING and False"
            ),
        ),
        place=Explored(within(LEAVES, 2), "Lending raises"),
    ),
    Mutant(
        name="what was lost with an engine is wanted by whoever names it",
        broken="D connects an engine that is gone because a request in its queue has ended",
        changes=(Edit(Claims.want, "lease not in self._wanted and claim.gone is None", "lease not in self._wanted"),),
        place=Explored(within(LEAVES, 2), "invariant 10"),
    ),
    Mutant(
        name="what is announced of an engine that left is wanted",
        broken="D tries to connect an engine that is gone again and again, for requests in its queue",
        changes=(Edit(RemoteEngine._lose_everything, "self._claims.want_none()", "pass"),),
        place=ByTest(LEAVING + "::test_what_is_announced_of_an_engine_that_is_gone_makes_one_attempt"),
    ),
    Mutant(
        name="SIGTERM is kept from vLLM",
        broken="the engine drains and does not end",
        changes=(Edit(SchedulerDraining._on_sigterm, "self._former_handler(number, frame)", "pass"),),
        place=ByTest(SIGTERM + "::test_sigterm_begins_to_drain_at_once_and_vllm_hears_it_too"),
    ),
    Mutant(
        name="vLLM ends before the engine has drained",
        broken="after SIGTERM the sockets close before decode engines are told",
        changes=(Edit(SchedulerDraining.keeps_stepping, "return self._clock", "return False and self._clock"),),
        place=ByTest(SCHEDULER + "::test_vllm_is_kept_going_until_the_engine_has_drained_and_the_gauge_has_shown_it"),
    ),
    Mutant(
        name="met once",
        broken="an engine that was met and has come back is cold again",
        changes=(Edit(introduction._lose, "StartPause(failures=1),", ""),),
        place=Seeds(2, "met", faults=KNOWN_AND_AWAY),
    ),
    Mutant(
        name="ranks come back together",
        broken="all ranks of all decode engines ask an engine that has come back in the same moment",
        changes=(
            Edit(introduction.Introductions._step, "spread_ns(pause_ns, self._identity, place, failures)", "pause_ns"),
        ),
        place=ByTest(INTRODUCTIONS + "::test_ranks_that_lose_an_engine_together_do_not_come_back_together"),
    ),
    Mutant(
        name="who meets an engine is not told of an attempt that failed",
        broken="why an engine cannot be met is known to the log alone, and it is asked again late",
        changes=(
            Edit(RemoteEngine._fail_handshake, "self._outcome.effects.append(NoteNotMet(failure=cause))", "pass"),
        ),
        place=ByTest(
            ENGINE + "::test_who_wants_to_meet_it_is_told_of_each_attempt_that_fails_and_of_the_pause_after"
            "_one_of_a_request"
        ),
    ),
    Mutant(
        name="attempts of others count as an answer",
        broken="an engine that is asked who it is answers to somebody who waits no more, and its place is stuck",
        changes=(Edit(introduction.Introductions.handle, "self._values[place].state is State.MEETING", "True"),),
        place=ByTest(INTRODUCTIONS + "::test_who_hears_why_an_attempt_failed_pauses_at_once"),
    ),
    Mutant(
        name="said each time",
        broken="an address that does not answer fills the log",
        changes=(Edit(introduction._pause, "if value.problem is None:", "if True:"),),
        place=Seeds(2, "met", faults=KNOWN_AND_AWAY),
    ),
    Mutant(
        name="asked as often as it is said",
        broken="whoever repeats a message makes this engine connect to any address at any rate",
        changes=(Edit(introduction.Introductions._name, "paused_ns + self._limits.pause_first_ns", "now_ns"),),
        place=ByTest(INTRODUCTIONS + "::test_who_is_named_again_is_asked_once_a_first_pause_is_over"),
    ),
    Mutant(
        name="places are kept for ever",
        broken="once 256 pods have come and gone nobody new can be met",
        changes=(Edit(introduction.Introductions._is_over, "since_ns is not None", "False"),),
        place=ByTest(INTRODUCTIONS + "::test_a_place_that_is_unmet_for_long_is_forgotten"),
    ),
)
