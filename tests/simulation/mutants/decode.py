"""Mutants of the core of a decode rank: `RemoteEngine`, and the machines request, hold and peer; and of which samples
read."""

from __future__ import annotations

from connector.runtime import deferred_commands
from statemachine import hold, peer, request
from statemachine.deadlines import Deadlines
from statemachine.loads import Loads
from statemachine.remembered import Remembered
from statemachine.remote_engine import RemoteEngine
from statemachine.remote_engine.claims import Claim, Claims
from statemachine.remote_engine.connections import Connection, Connections
from tests.simulation.mutants.mutant import ByTest, Edit, Explored, Mutant, Seeds
from tests.simulation.mutants.places import (
    BUILTIN,
    CORE,
    ERRS_EARLY,
    KEPT,
    ONE,
    SAMPLES,
    SHARED,
    SIBLINGS,
    SUPERVISED,
    TWO_OF_P,
    within,
)

# --- what a request believes ----------------------------------------------------------------------------------------

PROOF = (
    Mutant(
        name="done without proof",
        rule="the report waits for the proof",
        row=1,
        broken="a request is done when its READs are, whether P still kept the blocks or not",
        changes=(Edit(request._finish_if_proven, "if request.last_completed_ns <= proven_until_ns:", "if True:"),),
        place=Explored(within(SIBLINGS, 1), "invariant 3"),
    ),
    Mutant(
        name="any answer proves",
        rule="the report waits for the proof",
        row=1,
        broken="a request whose READs ended after what was proven is done with the next proof, however short",
        changes=(Edit(request._prove, "if request.last_completed_ns <= event.proven_until_ns:", "if True:"),),
        place=ByTest(CORE + "::test_an_answer_to_an_earlier_question_does_not_prove_what_came_after_it"),
    ),
    Mutant(
        name="proof of the first READ",
        rule="the report waits for the proof",
        row=1,
        broken="the proof has to reach the end of the first READ, not of the last",
        changes=(
            Edit(
                request._complete,
                "max(request.last_completed_ns, event.completed_ns)",
                "request.last_completed_ns or event.completed_ns",
            ),
        ),
        place=ByTest(CORE + "::test_the_read_that_completed_last_counts_whichever_is_told_last"),
    ),
    Mutant(
        name="lease let go of with its last reader",
        rule="kept for the scheduler",
        broken="a lease that the scheduler has kept is released when the requests that the rank knows of have ended",
        changes=(Edit(Claims._end_if_unwanted, "claim.is_kept or ", ""),),
        place=Explored(within(KEPT, 1), "invariant 3"),
    ),
    Mutant(
        name="lease let go of with who is turned away",
        broken="a lease that is to be kept is released when the request that says so is turned away by the roster",
        changes=(Edit(RemoteEngine._release_unread, ", keeps=event.keeps_lease", ""),),
        place=Explored(within(KEPT, 1), "invariant 3"),
    ),
    Mutant(
        name="lease kept for good",
        rule="kept for the scheduler",
        broken="that the scheduler lets go of a lease is not heard",
        changes=(Edit(Claims.end_keeping, "claim.is_kept = False", "pass"),),
        place=Explored(within(KEPT, 1), "liveness"),
    ),
    Mutant(
        name="samples side by side",
        broken="a sample reads beside another one whose blocks it would find in the cache",
        changes=(Edit(Loads._answer, "self._shares and ", "False and "),),
        place=ByTest(SAMPLES + "::test_one_reads_and_the_others_find_it_in_the_cache"),
    ),
    Mutant(
        name="samples one after the other",
        broken="when the load of a sample has failed, each of the others waits for the next one",
        changes=(Edit(Loads._is_waited_for, " and not self._leases[lease].was_tried", ""),),
        place=ByTest(SAMPLES + "::test_where_a_load_fails_the_others_try_at_once"),
    ),
    Mutant(
        name="late samples read",
        broken="a sample whose others are loaded, and not in the cache any more, reads what was let go of",
        changes=(Edit(Loads.would_load, " and not self.is_taken(request_id)", ""),),
        place=ByTest(SAMPLES + "::test_one_that_comes_when_the_cache_has_lost_the_prompt_is_computed"),
    ),
    Mutant(
        name="kept for samples in the queue",
        broken="P keeps what a sample names for as long as it is queued, although another one has loaded it",
        changes=(Edit(Loads._let_go, "self._step(user, machine.Taken())", "pass"),),
        place=ByTest(SAMPLES + "::test_one_that_is_queued_for_long_has_p_keep_nothing_for_it"),
    ),
    Mutant(
        name="what has failed is computed in silence",
        broken="a router that tries a failed request again has it computed, whatever the policy says",
        changes=(Edit(Loads._let_go, "if lease.has_served:", "if True:"),),
        place=ByTest(SAMPLES + "::test_parameters_that_come_again_after_a_failed_load_are_the_ranks_matter"),
    ),
    Mutant(
        name="leases are not kept for samples",
        broken="ranks release a lease with the first READ, where each sample has to read",
        changes=(Edit(Loads._step, "keeps_lease=not self._shares", "keeps_lease=False"),),
        place=ByTest(SAMPLES + "::test_elsewhere_each_reads_until_nobody_wants_the_lease"),
    ),
    Mutant(
        name="lease let go of before its READ",
        broken="that a lease is let go of overtakes a READ of it that waits for the device",
        changes=(Edit(deferred_commands._subjects_of, "return request_id, lease", "return (request_id,)"),),
        place=ByTest("tests/unit/test_deferred_commands.py::test_a_lease_is_let_go_of_behind_the_last_read_of_it"),
    ),
    Mutant(
        name="no margin",
        rule="durations on our own clock",
        row=10,
        broken="the margin is not taken off what P says remains",
        changes=(Edit(Claims.prove, " - self._limits.margin_ns", ""),),
        place=ByTest(CORE + "::test_a_proof_reaches_from_the_question_for_what_remains_less_drift_and_margin"),
    ),
    Mutant(
        name="drift ignored",
        rule="durations on our own clock",
        row=77,
        broken="two clocks are taken to run equally fast while a lease lasts",
        changes=(Edit(Claims.prove, " - remaining_ns // DRIFT_DIVISOR", ""),),
        place=ByTest(CORE + "::test_a_proof_reaches_from_the_question_for_what_remains_less_drift_and_margin"),
    ),
    Mutant(
        name="counted from the answer",
        rule="durations on our own clock",
        row=77,
        broken="what remains is counted from when the answer came, not from when it was asked for",
        changes=(Edit(Claims.prove, "proven_until_ns=sent_ns + max", "proven_until_ns=now_ns + max"),),
        place=ByTest(CORE + "::test_a_proof_reaches_from_the_question_for_what_remains_less_drift_and_margin"),
    ),
    Mutant(
        name="one rank proves for all",
        rule="the report waits for the proof",
        row=1,
        broken="the rank of P that keeps the blocks for longest is taken to speak for the others",
        changes=(Edit(Claim.proven_until_ns, "min(", "max("),),
        place=ByTest(CORE + "::test_the_rank_that_keeps_the_blocks_for_the_shortest_time_counts"),
    ),
    Mutant(
        name="nothing is proven backwards",
        rule="Held proves what was before",
        broken="an answer that little remains is taken to prove less than the moment of asking",
        changes=(Edit(Claims.prove, "max(0, reach_ns)", "reach_ns"),),
        place=ByTest(CORE + "::test_any_answer_proves_what_was_before_its_question"),
    ),
    Mutant(
        name="proof never asked for",
        rule="asked once more",
        broken="a request that lacks a proof waits for the next renewal instead of asking now",
        changes=(Edit(Claims.ask_for_proof, "self.dues.set((lease, rank), now_ns)", "pass"),),
        place=ByTest(CORE + "::test_a_request_that_lacks_a_proof_asks_at_once_and_not_for_ever"),
    ),
    Mutant(
        name="proof asked of one rank alone",
        rule="asked once more",
        broken="a request that lacks proofs asks P's first rank, and waits for the renewals of the others",
        changes=(Edit(Claims.ask_for_proof, "range(self._ranks)", "range(1)"),),
        place=ByTest(CORE + "::test_a_proof_that_is_missing_is_asked_of_each_rank_that_has_not_given_it"),
    ),
    Mutant(
        name="ends without a word",
        broken="requests whose READs hang when their executor ends are never reported",
        changes=(Edit(RemoteEngine.handle, "self._give_up_on_reads(now_ns)", "pass"),),
        place=ByTest("tests/unit/test_remote_engine.py::test_an_executor_that_ends_leaves_no_request_behind"),
    ),
    Mutant(
        name="wait for a proof for ever",
        rule="asked once more",
        row=45,
        broken="nothing bounds the wait for P's answer",
        changes=(
            Edit(
                RemoteEngine._ask_for_proof,
                'self._timers.set(("proof", proving.request_id), now_ns + self._limits.lease_ns)\n',
                "\n",
            ),
        ),
        place=ByTest(CORE + "::test_a_request_that_lacks_a_proof_asks_at_once_and_not_for_ever"),
    ),
    Mutant(
        name="proofs outlive their connection",
        rule="asked again on a new connection",
        row=48,
        broken="what an earlier life of P has said still counts after it was connected anew",
        changes=(Edit(hold._ask_anew, "state=State.WANTED, proven_until_ns=-1", "state=State.WANTED"),),
        place=Explored(within(ONE, 2), "invariant 3"),
    ),
    Mutant(
        name="answers of another connection",
        rule="asked again on a new connection",
        row=48,
        broken="an answer that was given over an earlier connection is taken for one of this",
        changes=(Edit(RemoteEngine._take_hold_answer, "not self._connections.is_current(event.connection) or ", ""),),
        place=ByTest(CORE + "::test_answers_of_another_connection_or_to_a_question_of_the_future_prove_nothing"),
    ),
    Mutant(
        name="answers from the future",
        rule="durations on our own clock",
        row=77,
        broken="P can echo a time at which nothing was asked yet, and so prove what it likes",
        changes=(Edit(RemoteEngine._take_hold_answer, " or event.sent_ns > now_ns", ""),),
        place=ByTest(CORE + "::test_answers_of_another_connection_or_to_a_question_of_the_future_prove_nothing"),
    ),
    Mutant(
        name="Gone is not heard",
        rule="told why at once",
        row=69,
        broken="P says that it does not keep the blocks, and nothing follows from it",
        changes=(Edit(RemoteEngine._take_hold_answer, "self._claims.lose(lease, event.rank, why)", "None"),),
        place=ByTest(CORE + "::test_a_lease_that_is_gone_ends_its_request_with_the_words_of_p"),
    ),
    Mutant(
        name="Gone before the start is forgotten",
        rule="told why at once",
        row=69,
        broken="a request whose lease was lost while it waited in the queue is read all the same",
        changes=(Edit(RemoteEngine._start, "if claim.gone is not None:", "if False:"),),
        place=ByTest(CORE + "::test_a_lease_that_is_gone_before_its_request_starts_is_not_read"),
    ),
    Mutant(
        name="Gone without its reason",
        rule="told why at once",
        broken="the reason that P gives is not kept",
        changes=(Edit(hold._lose, "why=event.why", 'why="over"'),),
        place=ByTest(CORE + "::test_a_lease_that_is_gone_before_its_request_starts_is_not_read"),
    ),
    Mutant(
        name="Gone while proving is not heard",
        rule="told why at once",
        row=1,
        broken="a request that waits for a proof is not told that there will be none",
        changes=(
            Edit(
                RemoteEngine._tell_gone,
                "self._step_request(user, gone, now_ns)",
                "user in self._proving or self._step_request(user, gone, now_ns)",
            ),
        ),
        place=ByTest(CORE + "::test_a_lease_that_is_gone_ends_its_request_with_the_words_of_p"),
    ),
    Mutant(
        name="READs wait for P's answer",
        rule="the READ does not wait",
        broken="nothing is read before P has said Held",
        changes=(
            Edit(
                RemoteEngine._resolve,
                "if not is_ready or event.request_id not in self._waiting:",
                "waits = event.request_id in self._waiting\n"
                "    if not is_ready or not waits or "
                "self._claims.get(self._requests[event.request_id].lease).proven_until_ns < now_ns:",
            ),
        ),
        place=Explored(within(ONE, 0), "invariant 9"),
    ),
    Mutant(
        name="a built-in P's restart is not seen",
        rule="asked again on a new connection",
        row=48,
        broken="the leases of a built-in engine are taken to have outlived its process",
        changes=(Edit(RemoteEngine._connect, "if was_another:", "if False:"),),
        place=ByTest(CORE + "::test_a_builtin_engine_that_restarted_keeps_nothing"),
    ),
    Mutant(
        name="a lease without a number outlives its process",
        rule="asked again on a new connection",
        row=53,
        broken="P's next process is asked for a request id, and holds what it has lent under it",
        changes=(Edit(RemoteEngine._connect, "if was_another:", "if was_another and event.is_builtin:"),),
        place=ByTest(
            "tests/unit/test_remote_engine.py::test_what_has_no_number_is_not_asked_of_another_process_of_ours"
        ),
    ),
    Mutant(
        name="a built-in P is taken to lend what another one has lent",
        rule="assumed from when we heard",
        row=48,
        broken="a lease that has a number is assumed of a built-in engine, which numbers none",
        changes=(Edit(Claims._meet, "if link.is_builtin and claim.lease.number:", "if False:"),),
        place=ByTest("tests/unit/test_remote_engine.py::test_a_lease_that_has_a_number_is_not_assumed_of_a_builtin_p"),
    ),
    Mutant(
        name="an assumed lease begins late",
        rule="assumed from when we heard",
        row=1,
        broken="the lease of a built-in engine is taken to begin when it is connected",
        changes=(Edit(Claims._meet, "claim.heard_ns + self._limits", "now_ns + self._limits"),),
        place=Explored(within(BUILTIN, 1), "invariant 3"),
    ),
    Mutant(
        name="an assumed lease never ends",
        rule="assumed from when we heard",
        row=1,
        broken="what was assumed of a built-in engine is believed for ever",
        changes=(
            Edit(Claims._meet, "until_ns = claim.heard_ns + self._limits.lease_ns", "until_ns = now_ns + (1 << 60)"),
        ),
        place=Explored(within(BUILTIN, 1), "invariant 3"),
    ),
)

# --- leases, as D keeps and ends them -------------------------------------------------------------------------------

KEEPING = (
    Mutant(
        name="held when started",
        rule="held from the announcement",
        row=62,
        broken="nothing is held for a request before it is scheduled",
        changes=(Edit(RemoteEngine._announce, "self._claims.want(", "None and self._claims.want("),),
        place=Explored(within(ONE, 1), "invariant 9"),
    ),
    Mutant(
        name="held once",
        rule="held from the announcement",
        row=62,
        broken="a lease is held once, and never renewed",
        changes=(
            Edit(
                Claims.prove,
                "self.dues.set((lease, rank), max(now_ns + self.resend_ns, sent_ns + reach_ns // 2))",
                "self.dues.cancel((lease, rank))",
            ),
        ),
        place=Explored(within(ONE, 1), "invariant 9"),
    ),
    Mutant(
        name="renewed at the last moment",
        rule="held from the announcement",
        row=62,
        broken="a lease is renewed when what is proven of it is over, not when half of it is",
        changes=(Edit(Claims.prove, "sent_ns + reach_ns // 2", "sent_ns + reach_ns * 6 // 5"),),
        place=Explored(within(ONE, 1), "invariant 9"),
    ),
    Mutant(
        name="holds without a pause",
        broken="of a lease that is nearly over, each answer is followed by the next question at once",
        changes=(
            Edit(
                Claims.prove,
                "max(now_ns + self.resend_ns, sent_ns + reach_ns // 2)",
                "sent_ns + reach_ns // 2",
            ),
        ),
        place=ByTest(CORE + "::test_a_lease_that_is_nearly_over_is_not_asked_for_without_a_pause"),
    ),
    Mutant(
        name="holds are asked once",
        rule="held from the announcement",
        row=62,
        broken="a hold whose answer is lost is not asked again",
        changes=(
            Edit(
                Claims._say,
                "for lease in leases:\n        self.dues.set((lease, rank), again_ns)",
                "for lease in leases:\n        if state is hold.State.RELEASING or link.is_builtin:\n"
                "            self.dues.set((lease, rank), again_ns)",
            ),
        ),
        place=ByTest(CORE + "::test_a_hold_is_asked_until_it_is_answered_and_renewed_before_half_of_it_is_gone"),
    ),
    Mutant(
        name="first sample lets go",
        rule="released by the last",
        row=56,
        broken="the first of several requests with the same parameters releases what the others are to read",
        changes=(
            Edit(Claims._end_if_unwanted, "if claim.is_kept or claim.users:\n        return", "claim.users.clear()"),
        ),
        place=Explored(within(SHARED, 0), "RemoteEngine raises"),
    ),
    Mutant(
        name="later samples are not counted",
        rule="released by the last",
        row=56,
        broken="a request that names a lease which is held already does not count as its user",
        changes=(Edit(Claims.want, "users[request_id] = None\n        claim.address", "address"),),
        place=Explored(within(SHARED, 0), "RemoteEngine raises"),
    ),
    Mutant(
        name="never released",
        rule="released by the last",
        row=54,
        broken="nobody tells P that the blocks are not needed any more",
        changes=(Edit(Claims._release_holds, "self._step_hold(claim, rank, hold.Unwanted())", "pass"),),
        place=ByTest(CORE + "::test_a_release_is_said_to_each_rank_until_it_is_confirmed"),
    ),
    Mutant(
        name="a release is owed for one lease time",
        rule="released by the last",
        broken="a release that P cannot hear is given up while P keeps the blocks for longer, as it had said",
        changes=(
            Edit(
                Claims._end_if_unwanted,
                "max([now_ns + self._limits.lease_ns, *(each.proven_until_ns for each in claim.holds)])",
                "now_ns + self._limits.lease_ns",
            ),
        ),
        place=ByTest("tests/unit/test_remote_engine.py::test_a_release_is_said_for_as_long_as_p_may_keep_the_blocks"),
    ),
    Mutant(
        name="not released before P is met",
        rule="released by the last",
        row=55,
        broken="a request that ends before P was met never releases its blocks",
        changes=(Edit(Claims._meet, "if not claim.is_wanted:", "if False:"),),
        place=ByTest(CORE + "::test_a_request_that_ends_before_p_was_met_is_released_when_it_is"),
    ),
    Mutant(
        name="a release is said once",
        rule="released until confirmed",
        row=54,
        broken="a release that is lost is not said again",
        changes=(
            Edit(
                Claims._say,
                "for lease in leases:\n        self.dues.set((lease, rank), again_ns)",
                "for lease in leases:\n        if state is not hold.State.RELEASING:\n"
                "            self.dues.set((lease, rank), again_ns)",
            ),
        ),
        place=ByTest(CORE + "::test_a_release_is_said_to_each_rank_until_it_is_confirmed"),
    ),
    Mutant(
        name="a release is forgotten with its connection",
        rule="released until confirmed",
        row=54,
        broken="what was owed over a connection is not said over the next one",
        changes=(
            Edit(
                Claims._meet,
                "if not hold.MACHINE.is_terminal(each):\n            self.dues",
                "if each.state is not hold.State.RELEASING:\n            self.dues",
            ),
        ),
        place=ByTest(CORE + "::test_a_release_that_is_owed_is_said_over_the_next_connection"),
    ),
    Mutant(
        name="a late answer puts off the release",
        rule="released until confirmed",
        broken="a lost release is said again when the lease would have been renewed",
        changes=(Edit(Claims.prove, "claim.holds[rank].state is hold.State.HELD and ", ""),),
        place=ByTest(CORE + "::test_a_late_answer_to_a_hold_does_not_put_off_a_release"),
    ),
    Mutant(
        name="a confirmation is not heard",
        rule="released until confirmed",
        broken="a release that P has confirmed is said on",
        changes=(Edit(Claims.confirm_release, "is hold.State.RELEASING", "is None"),),
        place=ByTest(CORE + "::test_a_release_is_said_to_each_rank_until_it_is_confirmed"),
    ),
    Mutant(
        name="released for ever",
        rule="released until confirmed",
        row=57,
        broken="a release that P does not confirm is said for ever",
        changes=(Edit(RemoteEngine._fire, "self._claims.give_up(subject)", "pass"),),
        place=ByTest(CORE + "::test_a_release_that_nobody_confirms_is_given_up_when_the_lease_must_be_over"),
    ),
    Mutant(
        name="one confirmation counts for all ranks",
        rule="released until confirmed",
        row=59,
        broken="when one rank of P has confirmed a release, the others are not told any more",
        changes=(
            Edit(
                Claims.confirm_release,
                "self._step_hold(claim, rank, hold.ReleaseConfirmed())\n        self.drop_if_over(claim)",
                "self._drop(claim)",
            ),
        ),
        place=ByTest(CORE + "::test_a_release_is_said_to_each_rank_until_it_is_confirmed"),
    ),
    Mutant(
        name="consumed leases are forgotten",
        rule="a released lease is consumed",
        row=2,
        broken="parameters whose blocks were read and released are accepted once more",
        changes=(Edit(Claims._release_holds, "self._consumed.add(_text(claim.lease))", "pass"),),
        place=ByTest(CORE + "::test_who_names_a_lease_that_was_released_here_is_refused"),
    ),
    Mutant(
        name="a lease that is owed a release is used again",
        rule="a released lease is consumed",
        row=2,
        broken="a request that names a lease whose release is under way is read",
        changes=(
            Edit(
                Claims.is_consumed,
                "_text(lease) in self._consumed or (claim is not None and bool(claim.holds) and not claim.is_wanted)",
                "False",
            ),
        ),
        place=ByTest(CORE + "::test_who_names_a_lease_that_was_released_here_is_refused"),
    ),
    Mutant(
        name="consumed leases pile up",
        rule="a released lease is consumed",
        row=50,
        broken="what was released is remembered for ever",
        changes=(Edit(Remembered.add, "if len(self._names) > self._names_max:", "if False:"),),
        place=ByTest(CORE + "::test_consumed_leases_are_remembered_up_to_a_bound"),
    ),
    Mutant(
        name="a resized engine is asked all the same",
        rule="asked again on a new connection",
        row=48,
        broken="an engine that has come back with another number of ranks is taken for the one before",
        changes=(
            Edit(
                Claims._meet,
                "if claim.holds and len(claim.holds) != link.ranks:",
                "if False:",
            ),
        ),
        place=ByTest(CORE + "::test_an_engine_that_comes_back_with_another_number_of_ranks_keeps_nothing"),
    ),
    Mutant(
        name="no heartbeats",
        rule="held from the announcement",
        row=62,
        broken="nothing keeps the lease of a built-in engine alive while a request waits",
        changes=(
            Edit(
                Claims._say,
                "effects.append(SendHeartbeat(connection=link.number, rank=rank, leases=leases))",
                "pass",
            ),
        ),
        place=ByTest(CORE + "::test_a_builtin_engine_hears_heartbeats_and_one_notification"),
    ),
    Mutant(
        name="a message for each lease",
        rule="many leases in one message",
        broken="each of many renewals travels in a message of its own",
        changes=(
            Edit(Claims.send_due, "len(leases), LEASES_PER_MESSAGE_MAX", "len(leases), 1"),
            Edit(Claims.send_due, "first + LEASES_PER_MESSAGE_MAX", "first + 1"),
        ),
        place=ByTest(CORE + "::test_many_leases_travel_in_few_messages_of_bounded_size"),
    ),
    Mutant(
        name="each lease in its own time",
        rule="many leases in one message",
        broken="leases that came at different moments are renewed at different moments for ever",
        changes=(Edit(Claims.send_due, " + self.resend_ns // SAID_EARLY_DIVISOR", ""),),
        place=ByTest("tests/unit/test_remote_engine.py::test_leases_that_came_one_after_another_are_renewed_together"),
    ),
    Mutant(
        name="messages without bound",
        rule="many leases in one message",
        broken="a message names more leases than its receiver takes",
        changes=(
            Edit(Claims.send_due, "len(leases), LEASES_PER_MESSAGE_MAX", "len(leases), 1 << 30"),
            Edit(Claims.send_due, "first + LEASES_PER_MESSAGE_MAX", "first + (1 << 30)"),
        ),
        place=ByTest(CORE + "::test_many_leases_travel_in_few_messages_of_bounded_size"),
    ),
    Mutant(
        name="held of nobody",
        rule="held no longer than its engine",
        broken="what was held of an engine that is given up stays held in the trace",
        changes=(Edit(Claims.drop_all, "self._lose_holds(claim, RETIRED)", "pass"),),
        place=ByTest("tests/unit/test_remote_engine.py::test_what_is_held_of_an_engine_that_is_given_up_ends_with_it"),
    ),
)

# --- READs ----------------------------------------------------------------------------------------------------------

READS = (
    Mutant(
        name="an error is the end",
        rule="a READ that failed may go on",
        row=70,
        broken="a READ that failed is taken to write no more",
        changes=(
            Edit(
                RemoteEngine._take_read_end,
                "if not event.is_quiescent:\n        connection.unsettled[event.request_id, event.read] = None",
                "",
            ),
            Edit(RemoteEngine._take_read_end, "is_quiescent=event.is_quiescent)", "is_quiescent=True)"),
        ),
        place=Explored(within(ONE, 2), "invariant 1"),
    ),
    Mutant(
        name="no grace",
        rule="the grace of the back end",
        row=70,
        broken="what failed on a connection is taken to be over as soon as that is torn down",
        changes=(Edit(RemoteEngine._end_tear_down, "now_ns + self._limits.grace_ns", "now_ns"),),
        place=Explored(within(ONE, 2), "invariant 1"),
    ),
    Mutant(
        name="grace without tear-down",
        rule="the grace of the back end",
        row=70,
        broken="the grace runs from the failure, while the agents are still loaded",
        changes=(
            Edit(
                RemoteEngine._take_read_end,
                "connection.unsettled[event.request_id, event.read] = None",
                "connection.unsettled[event.request_id, event.read] = None\n"
                "        self._timers.set(('grace', connection.number), now_ns + self._limits.grace_ns)",
            ),
            Edit(
                RemoteEngine._settle_reads,
                "self._connections.forget(connection)",
                "connection.unsettled, unsettled = {}, connection.unsettled",
            ),
            Edit(RemoteEngine._settle_reads, "in connection.unsettled:", "in unsettled:"),
        ),
        place=ByTest(CORE + "::test_the_grace_begins_when_the_agents_are_removed"),
    ),
    Mutant(
        name="quarantine lifted with the first READ",
        rule="a READ that failed may go on",
        row=5,
        broken="blocks leave the quarantine when one of several READs has ended",
        changes=(Edit(Connections.quiesce, "if writing:", "if False:"),),
        place=ByTest(CORE + "::test_a_quarantine_is_lifted_with_its_last_read"),
    ),
    Mutant(
        name="an error lifts the quarantine",
        rule="a READ that failed may go on",
        row=70,
        broken="blocks leave the quarantine when their READ has failed in part, and the rest of it may still write",
        changes=(Edit(RemoteEngine._take_read_end, "if event.is_quiescent:", "if True:"),),
        place=ByTest(CORE + "::test_a_read_that_fails_in_part_does_not_lift_a_quarantine"),
    ),
    Mutant(
        name="quarantine never lifted",
        rule="a READ that failed may go on",
        row=5,
        broken="blocks stay in quarantine after their READ has ended",
        changes=(Edit(Connections.quiesce, "if writing:", "if True:"),),
        place=ByTest(CORE + "::test_a_quarantine_is_lifted_with_its_last_read"),
    ),
    Mutant(
        name="quarantine not reported",
        rule="quarantine",
        row=5,
        broken="blocks that a READ may still write into are reported as free",
        changes=(Edit(RemoteEngine._end_request, "is_quarantined=bool(ended.in_flight)", "is_quarantined=False"),),
        place=Explored(within(ONE, 2), "invariant 1"),
    ),
    Mutant(
        name="a quarantine raises no suspicion",
        rule="a quarantine makes suspect",
        row=74,
        broken="READs from one engine never end, and request after request is sent there",
        changes=(
            Edit(
                RemoteEngine._end_request, "self._suspect(ended.connection", "None and self._suspect(ended.connection"
            ),
        ),
        place=ByTest(CORE + "::test_a_quarantine_is_lifted_with_its_last_read"),
    ),
    Mutant(
        name="a lost transport raises no suspicion",
        rule="a quarantine makes suspect",
        row=47,
        broken="READs go on over a connection that is known to be lost",
        changes=(
            Edit(
                RemoteEngine._take_read_end,
                "(is_transport_lost(failure) or not event.is_quiescent)",
                "(not event.is_quiescent)",
            ),
        ),
        place=Explored(within(ONE, 2), "invariant 7"),
    ),
    Mutant(
        name="a READ that errs early raises no suspicion",
        rule="a quarantine makes suspect",
        row=70,
        broken="READs go on over a connection on which one has failed in part",
        changes=(
            Edit(
                RemoteEngine._take_read_end,
                "(is_transport_lost(failure) or not event.is_quiescent)",
                "is_transport_lost(failure)",
            ),
        ),
        place=Seeds(level=1, oracle="suspect", faults=ERRS_EARLY),
    ),
    Mutant(
        name="a reset raises no suspicion",
        rule="a quarantine makes suspect",
        row=83,
        broken="a control connection that was reset is not noticed",
        changes=(
            Edit(
                RemoteEngine.handle,
                "self._suspect(number, ControlLinkLost(**self._of_peer(), detail=detail), now_ns)",
                "pass",
            ),
        ),
        place=Explored(within(ONE, 2), "invariant 7"),
    ),
    Mutant(
        name="a built-in P that has slept is read as before",
        broken="a request is read over a connection that was made before P registered its KV cache anew",
        changes=(Edit(RemoteEngine._require_registration, "current.registration < self._registration", "False"),),
        place=ByTest("tests/unit/test_remote_engine.py::test_nothing_is_read_over_a_connection_that_was_made_before"),
    ),
    Mutant(
        name="a lost notification raises no suspicion",
        rule="a quarantine makes suspect",
        row=47,
        broken="a notification that finds the transport lost is not followed by a new connection",
        changes=(
            Edit(
                RemoteEngine.handle,
                "if failure.transport_lost:\n                self._suspect",
                "if False:\n                self._suspect",
            ),
        ),
        place=ByTest(CORE + "::test_a_builtin_engine_that_restarted_keeps_nothing"),
    ),
    Mutant(
        name="posted on a suspect connection",
        rule="a quarantine makes suspect",
        row=4,
        broken="a READ that has waited for its turn is posted although its connection became suspect meanwhile",
        changes=(Edit(RemoteEngine.wants, "self._peer.state is peer.State.READY and ", ""),),
        place=Explored(within(ONE, 2), "invariant 7"),
    ),
    Mutant(
        name="ends are counted twice",
        rule="told again",
        row=28,
        broken="the end of a READ that is told again is taken in again",
        changes=(Edit(RemoteEngine._end_read, " or (event.request_id, event.read) not in connection.open_reads", ""),),
        place=ByTest(CORE + "::test_an_end_that_is_told_twice_counts_once"),
    ),
)

# --- the life of a request ------------------------------------------------------------------------------------------

REQUESTS = (
    Mutant(
        name="abort without draining",
        rule="draining",
        row=8,
        broken="an abort frees the destination of a READ in flight",
        changes=(Edit(request._abort_reading, "return _drain(request,", "return _end(request,"),),
        place=Explored(within(ONE, 2), "invariant 1"),
    ),
    Mutant(
        name="deadline without draining",
        rule="draining",
        row=5,
        broken="a READ that was given up at the deadline is taken for one that has ended",
        changes=(Edit(request._time_out_reading, "return _drain(request,", "return _end(request,"),),
        place=Explored(within(ONE, 2), "invariant 1"),
    ),
    Mutant(
        name="report before drained",
        rule="draining",
        row=3,
        broken="the first READ that fails ends the request while the others write on",
        changes=(
            Edit(
                request._fail_reading,
                "return _drain(request, State.FAILED, event.failure, is_retryable=is_transport_lost(event.failure))",
                "return _end(request, State.FAILED, event.failure)",
            ),
        ),
        place=Explored(within(TWO_OF_P, 1), "invariant 1"),
    ),
    Mutant(
        name="lease lost without draining",
        rule="draining",
        row=5,
        broken="a request whose lease is over while it reads ends at once",
        changes=(Edit(request._lose_lease, "return _drain(request,", "return _end(request,"),),
        place=ByTest(CORE + "::test_a_lease_that_is_gone_ends_its_request_with_the_words_of_p"),
    ),
    Mutant(
        name="one READ drained is all drained",
        rule="draining",
        row=3,
        broken="draining ends with the first READ that becomes quiescent",
        changes=(
            Edit(
                request._drain_one,
                "return (request, NO_EFFECTS) if request.in_flight else _finish_draining(request)",
                "return _finish_draining(msgspec.structs.replace(request, in_flight=frozenset()))",
            ),
        ),
        place=ByTest(CORE + "::test_a_failure_waits_for_every_other_read"),
    ),
    Mutant(
        name="first READ ends the request",
        rule="the report waits for the proof",
        row=81,
        broken="a request that reads from several ranks is done when the first READ is complete",
        changes=(
            Edit(
                request._finish_if_proven,
                "if request.awaited:\n        return request, NO_EFFECTS",
                "request = msgspec.structs.replace(request, in_flight=frozenset())",
            ),
        ),
        place=Explored(within(TWO_OF_P, 1), "invariant"),
    ),
    Mutant(
        name="drain for ever",
        rule="quarantine",
        row=45,
        broken="nothing bounds the wait for a READ that does not end",
        changes=(
            Edit(
                RemoteEngine._step_request,
                'self._timers.set(("quiesce", request_id), now_ns + self._limits.quiesce_ns)',
                "pass",
            ),
        ),
        place=Explored(within(ONE, 2), "liveness"),
    ),
    Mutant(
        name="no deadline",
        rule="every wait ends",
        row=45,
        broken="nothing bounds the whole of a request",
        changes=(
            Edit(
                RemoteEngine._start,
                'self._timers.set(("deadline", request_id), now_ns + self._limits.request_ns)',
                "pass",
            ),
        ),
        place=ByTest(CORE + "::test_a_deadline_that_raises_leaves_the_others_due"),
    ),
    Mutant(
        name="reported twice",
        rule="reported once",
        row=24,
        broken="the end of a request is reported twice",
        changes=(
            Edit(
                RemoteEngine._end_request,
                "self._outcome.effects.append(report)",
                "self._outcome.effects += [report, report]",
            ),
        ),
        place=Explored(within(ONE, 0), "invariant 2"),
    ),
    Mutant(
        name="report who only gives back",
        rule="reported once",
        row=25,
        broken="a request for which nothing is to be read, and that nobody awaits, is reported",
        changes=(
            Edit(
                RemoteEngine._release_unread,
                "self.address = event.address",
                "self.address = event.address\n"
                "    report = Report(request_id=event.request_id, failure=None, is_quarantined=False)\n"
                "    self._outcome.effects.append(report)",
            ),
        ),
        place=Explored(within(ONE, 1), "invariant 2"),
    ),
    Mutant(
        name="park full hits",
        rule="reported once",
        row=41,
        broken="a request for which there is nothing to read is never reported",
        changes=(Edit(request._on_peer_ready, "return _finish(request)", "return request, NO_EFFECTS"),),
        place=ByTest(CORE + "::test_a_request_that_needs_no_read_is_done_at_once"),
    ),
    Mutant(
        name="fail without report",
        rule="reported once",
        row=43,
        broken="the requests that wait for a peer whose handshake failed are forgotten",
        changes=(
            Edit(
                RemoteEngine._announce_failed,
                "for request_id in (*self._waiting, *self._proving):",
                "for request_id in self._proving:",
            ),
        ),
        place=ByTest(CORE + "::test_the_delay_after_failed_handshakes_grows_up_to_its_bound"),
    ),
    Mutant(
        name="retries without end",
        rule="a retry",
        row=45,
        broken="a lost transport is tried again however often it was",
        changes=(
            Edit(
                request._finish_draining, "retries_left=request.retries_left - 1", "retries_left=request.retries_left"
            ),
        ),
        place=ByTest(CORE + "::test_a_lost_transport_is_tried_again_as_often_as_the_limits_say"),
    ),
    Mutant(
        name="no retry",
        rule="a retry",
        row=47,
        broken="a request whose transport was lost is not tried again",
        changes=(Edit(request._drain, "is_retryable=is_retryable and request.retries_left > 0", "is_retryable=False"),),
        place=ByTest(CORE + "::test_a_lost_transport_is_tried_again_as_often_as_the_limits_say"),
    ),
    Mutant(
        name="retry under a lost lease",
        rule="a retry",
        row=1,
        broken="a request is tried again although P has given its blocks up, or the client has",
        changes=(Edit(request._stop_retry, "msgspec.structs.replace(request, is_retryable=False)", "request"),),
        place=ByTest(CORE + "::test_what_ends_a_draining_request_for_good"),
    ),
    Mutant(
        name="a refused READ is tried again",
        rule="a retry",
        broken="a READ that NIXL refused is tried again as if the transport had been lost",
        changes=(Edit(request._fail_reading, "is_retryable=is_transport_lost(event.failure)", "is_retryable=True"),),
        place=ByTest(CORE + "::test_a_read_that_nixl_refuses_is_not_tried_again"),
    ),
)

# --- the connection -------------------------------------------------------------------------------------------------

PEERS = (
    Mutant(
        name="torn down under READs",
        rule="drained before rebuilt",
        row=14,
        broken="the agents of a suspect connection are removed while READs from them are in flight",
        changes=(Edit(RemoteEngine._follow_up, " and not current.open_reads", ""),),
        place=Explored(within(ONE, 2), "invariant 6"),
    ),
    Mutant(
        name="an abandoned connection is torn down under READs",
        rule="left standing until READs end",
        row=14,
        broken="a connection whose READs did not end in time is torn down at once",
        changes=(
            Edit(
                RemoteEngine._follow_up,
                "(connection.open_reads or connection.is_tearing_down)",
                "connection.is_tearing_down",
            ),
        ),
        place=Explored(within(ONE, 2), "invariant 6"),
    ),
    Mutant(
        name="an abandoned connection is kept",
        rule="left standing until READs end",
        row=49,
        broken="a connection whose READs ended late is never torn down",
        changes=(Edit(RemoteEngine._follow_up, "in self._connections.given_up():", "in ():"),),
        place=ByTest(CORE + "::test_reads_that_do_not_end_cost_their_connection_and_keep_it_standing"),
    ),
    Mutant(
        name="connected before disconnected",
        rule="the order of giving up",
        row=13,
        broken="the next handshake begins while the agents are still being removed",
        changes=(
            Edit(
                peer._tear_down,
                "return msgspec.structs.replace(peer, state=State.DISCONNECTING), (TearDown(),)",
                "after, effects = msgspec.structs.replace(peer, state=State.DISCONNECTING), (TearDown(),)\n"
                "    return after, (*effects, StartHandshake())",
            ),
        ),
        place=ByTest(CORE + "::test_a_connection_that_is_given_up_is_torn_down_before_the_next_handshake"),
    ),
    Mutant(
        name="draining for ever",
        rule="left standing until READs end",
        row=45,
        broken="a suspect connection waits for its READs without bound",
        changes=(
            Edit(
                RemoteEngine._step_peer,
                'self._claims.fall_silent()\n                self._timers.set(("drain", None), now_ns',
                'self._claims.fall_silent()\n                (("drain", None), now_ns',
            ),
        ),
        place=ByTest(CORE + "::test_reads_that_do_not_end_cost_their_connection_and_keep_it_standing"),
    ),
    Mutant(
        name="held up by another's READs",
        rule="left standing until READs end",
        row=45,
        broken="who gave up an agent waits without bound for others who still read over it",
        changes=(
            Edit(
                RemoteEngine._step_peer,
                'self._timers.set(("drain", None), now_ns + self._limits.quiesce_ns)\n                self._tear_down',
                'self._timers.cancel(("drain", None))\n                self._tear_down',
            ),
        ),
        place=ByTest(
            "tests/unit/test_remote_engine.py::test_a_connection_whose_agents_are_not_removed_is_abandoned_until_they_are"
        ),
    ),
    Mutant(
        name="silence is borne",
        rule="silence makes suspect",
        row=45,
        broken="READs from an engine that hangs are waited for until the deadlines of their requests",
        changes=(
            Edit(
                Claims._say,
                'self._timers.set(("answer", rank), now_ns + self._limits.lease_ns - self.resend_ns)',
                "pass",
            ),
        ),
        place=ByTest(
            "tests/unit/test_remote_engine.py::"
            "test_an_engine_that_answers_nothing_for_the_length_of_a_lease_is_not_waited_for_until_the_deadline"
        ),
    ),
    Mutant(
        name="silence begins anew with each question",
        rule="silence makes suspect",
        broken="each question that is asked again begins the wait for an answer anew",
        changes=(Edit(Claims._say, " and not self._expects_answer(rank)", ""),),
        place=ByTest(
            "tests/unit/test_remote_engine.py::"
            "test_an_engine_that_answers_nothing_for_the_length_of_a_lease_is_not_waited_for_until_the_deadline"
        ),
    ),
    Mutant(
        name="our own standstill is the silence of others",
        rule="silence makes suspect",
        broken="an engine is suspected for an answer that has come while this process stood still",
        changes=(
            Edit(
                RemoteEngine._fire,
                """self._timers.set(("answer_grace", subject), now_ns + self._claims.resend_ns)""",
                """self._timers.set(("answer_grace", subject), now_ns)""",
            ),
        ),
        place=ByTest(
            "tests/unit/test_remote_engine.py::test_an_answer_that_waited_while_this_process_stood_still_is_heard_"
            "before_its_sender_is_suspected[hold]"
        ),
    ),
    Mutant(
        name="silence outlives its connection",
        rule="silence makes suspect",
        broken="an engine that is connected anew has to answer what was asked over the connection before",
        changes=(
            Edit(
                Claims._be_silent,
                "for rank in range(self._ranks):\n        self.note_answer(",
                "for rank in range(self._ranks):\n        (",
            ),
        ),
        place=ByTest("tests/unit/test_remote_engine.py::test_a_new_connection_has_the_length_of_a_lease_to_answer"),
    ),
    Mutant(
        name="a release confirmed is no sign of life",
        rule="silence makes suspect",
        broken="an engine that answers releases counts as silent",
        changes=(
            Edit(
                RemoteEngine._take_release_answer,
                "self._claims.note_answer(event.rank)",
                "pass",
            ),
        ),
        place=ByTest("tests/unit/test_remote_engine.py::test_any_answer_is_a_sign_of_life[release]"),
    ),
    Mutant(
        name="given up without a word",
        rule="shared agents",
        row=70,
        broken="who gives up an agent for a failure does not say so, and others keep it loaded",
        changes=(Edit(RemoteEngine._tear_down, "failure=connection.failure", "failure=None"),),
        place=ByTest("tests/simulation/test_level1.py::test_regression[a-shared-agent-stays-loaded]"),
    ),
    Mutant(
        name="another's failure is another's",
        rule="shared agents",
        row=70,
        broken="an agent that another has given up is read from on and on, and stays loaded",
        changes=(
            Edit(
                RemoteEngine.handle,
                "case SharedAgentsLost(connection=number, failure=failure):\n            self._suspect(",
                "case SharedAgentsLost(connection=number, failure=failure):\n            (",
            ),
        ),
        place=ByTest(
            "tests/unit/test_remote_engine.py::test_a_connection_whose_agents_another_has_given_up_is_rebuilt"
        ),
    ),
    Mutant(
        name="never rebuilt",
        rule="who waits is told",
        row=47,
        broken="who waits while a connection is given up is not given the next one",
        changes=(Edit(RemoteEngine._follow_up, "if self._peer.state is peer.State.IDLE and", "if False and"),),
        place=ByTest(CORE + "::test_what_was_proven_over_one_connection_is_not_over_the_next"),
    ),
    Mutant(
        name="the connection is offered to nobody",
        rule="who waits is told",
        row=41,
        broken="requests that wait for a peer are not told that it is ready",
        changes=(
            Edit(RemoteEngine._announce_ready, "for request_id in list(self._waiting):", "for request_id in ():"),
        ),
        place=Explored(within(ONE, 0), "invariant 9"),
    ),
    Mutant(
        name="back off for ever",
        rule="fails at once in back-off",
        row=40,
        broken="an engine whose handshake failed is never tried again",
        changes=(Edit(RemoteEngine._back_off, 'self._timers.set(("backoff", None), self._backoff_until_ns)', "pass"),),
        place=ByTest(CORE + "::test_the_delay_after_failed_handshakes_grows_up_to_its_bound"),
    ),
    Mutant(
        name="wait out the back-off",
        rule="fails at once in back-off",
        row=61,
        broken="requests for an engine that backs off are not failed, and fill the pool",
        changes=(Edit(peer._reject, "return peer, (Refuse(failure=peer.failure),)", "return peer, ()"),),
        place=ByTest(CORE + "::test_the_delay_after_failed_handshakes_grows_up_to_its_bound"),
    ),
    Mutant(
        name="back-off without bound",
        rule="fails at once in back-off",
        row=40,
        broken="the delay after failed handshakes doubles without end",
        changes=(
            Edit(
                RemoteEngine._back_off,
                "doubled_ns(limits.backoff_first_ns, limits.backoff_max_ns, effect.failures - 1)",
                "limits.backoff_first_ns << min(effect.failures + 6, 30)",
            ),
        ),
        place=ByTest(CORE + "::test_the_delay_after_failed_handshakes_grows_up_to_its_bound"),
    ),
    Mutant(
        name="retired and rebuilt",
        rule="who waits is told",
        row=49,
        broken="an engine that is given up while it is being torn down is connected once more",
        changes=(Edit(peer._disconnect, "if peer.is_retiring:", "if False:"),),
        place=ByTest(CORE + "::test_an_engine_that_is_given_up_takes_nobody_and_is_finished"),
    ),
    Mutant(
        name="who comes to a retiring peer waits",
        rule="who waits is told",
        row=43,
        broken="a request for an engine that is being given up is not told",
        changes=(
            Edit(
                RemoteEngine._follow_up,
                "self._announce_failed(PeerRetired(peer=self.engine_id), now_ns)",
                "pass",
            ),
        ),
        place=ByTest(CORE + "::test_an_engine_that_is_given_up_takes_nobody_and_is_finished"),
    ),
    Mutant(
        name="who came too late waits for ever",
        rule="who waits is told",
        row=45,
        broken="a request for an engine that is given up waits for its successor, however long the connection stays",
        changes=(Edit(RemoteEngine._follow_up, "if self._parked and not self._passes_to_successor:", "if False:"),),
        place=ByTest(
            "tests/unit/test_remote_engine.py::test_nobody_waits_for_the_successor_of_an_engine_whose_connection_stays"
        ),
    ),
    Mutant(
        name="who comes while a last attempt hangs waits for ever",
        rule="who waits is told",
        row=45,
        broken="a request for an engine that is given up waits for the end of a last attempt, which has no bound",
        changes=(
            Edit(
                RemoteEngine._passes_to_successor,
                "is_left = self.is_retired and not (self._is_stopped or is_connecting)",
                "is_left = self.is_retired and not self._is_stopped",
            ),
        ),
        place=Explored(within(SUPERVISED, 2), "liveness"),
    ),
    Mutant(
        name="attempts to say releases hold requests up",
        rule="fails at once in back-off",
        row=48,
        broken="a failed attempt that nobody waits for begins a back-off, in which requests for the next engine fail",
        changes=(Edit(peer._fail, "if not event.begins_backoff:", "if False:"),),
        place=ByTest("tests/unit/test_remote_engine.py::test_attempts_to_say_releases_hold_nobody_up"),
    ),
    Mutant(
        name="a refused connection lengthens the back-off",
        rule="fails at once in back-off",
        row=48,
        broken="an engine that is started again is not tried again for as long as if its attempts had timed out",
        changes=(Edit(RemoteEngine._back_off, "isinstance(self._peer.failure, ConnectionRefused)", "False"),),
        place=ByTest("tests/unit/test_remote_engine.py::test_the_delay_after_a_refused_connection_does_not_grow"),
    ),
    Mutant(
        name="met for each request",
        rule="a connection of no use",
        broken="an engine that answers handshakes, and whose data nobody can read, is met again for each request",
        changes=(Edit(peer._disconnect, "if peer.losses > LOSSES_BEFORE_BACKOFF:", "if False:"),),
        place=ByTest(CORE + "::test_an_engine_that_can_only_be_shaken_hands_with_is_not_met_for_each_request"),
    ),
    Mutant(
        name="idle losses pile up",
        broken="an engine that is seldom asked, and whose idle connection was lost now and then, is not met at once",
        changes=(Edit(RemoteEngine._suspect, "(has_ended and connection.has_stood_idle(now_ns))", "False"),),
        place=ByTest("tests/unit/test_remote_engine.py::test_a_connection_that_stood_idle_for_long_was_of_use"),
    ),
    Mutant(
        name="every idle connection was of use",
        broken="an engine whose connections are lost as soon as they stand is met again without a pause",
        changes=(Edit(Connection.has_stood_idle, "now_ns >= self.of_use_from_ns and ", ""),),
        place=ByTest(
            "tests/unit/test_remote_engine.py"
            "::test_a_connection_that_is_lost_soon_or_while_it_is_read_over_was_of_no_use"
        ),
    ),
    Mutant(
        name="a crash loses the handshake",
        rule="who waits is told",
        row=76,
        broken="the handshake that a crash of the executor has ended is waited for",
        changes=(Edit(RemoteEngine.handle, "self._fail_handshake(crash, now_ns, is_awaited=is_awaited)", "pass"),),
        place=ByTest(CORE + "::test_a_crash_fails_what_was_in_hand_and_the_handshake_with_it"),
    ),
    Mutant(
        name="a crash loses the requests",
        rule="who waits is told",
        row=31,
        broken="what an executor had in hand when it crashed is not failed",
        changes=(Edit(RemoteEngine.handle, "self._fail_requests(crash, now_ns)", "pass"),),
        place=ByTest(CORE + "::test_a_crash_fails_what_is_being_read_once_its_reads_have_ended"),
    ),
    Mutant(
        name="an answer of a rank that was not asked counts",
        broken="an engine that has come back with more ranks crashes its actor with what it says of an old lease",
        changes=(Edit(Claims._asked_for, "rank < len(claim.holds)", "claim.holds"),),
        place=ByTest(
            "tests/unit/test_remote_engine.py::"
            "test_an_engine_that_has_come_back_with_more_ranks_says_nothing_of_what_the_one_before_lent"
        ),
    ),
    Mutant(
        name="a client counts registrations up",
        broken="a client that makes parameters up costs others the connection to an engine of ours",
        changes=(Edit(RemoteEngine._require_registration, "current.is_builtin and ", ""),),
        place=ByTest(
            "tests/unit/test_remote_engine.py::test_what_a_request_says_of_an_engine_of_ours_costs_nobody_the_connection"
        ),
    ),
    Mutant(
        name="a standstill of this process is not told",
        broken="a request whose time ran out while its own engine stood still blames the prefill engine alone",
        changes=(Edit(RemoteEngine._fire, "late_seconds=(now_ns - due_ns) // NS_PER_SECOND", "late_seconds=0"),),
        place=ByTest(
            "tests/unit/test_remote_engine.py::"
            "test_of_a_request_that_took_too_long_it_is_told_that_this_rank_stood_still_itself"
        ),
    ),
    Mutant(
        name="all deadlines taken at once",
        rule="one deadline at a time",
        row=76,
        broken="everything due is taken before the first is handled, and lost when that raises",
        changes=(
            Edit(
                RemoteEngine.advance,
                "while (due_ns := self._timers.next_ns()) is not None and "
                "(key := self._timers.take_due(now_ns)) is not None:",
                "for due_ns, key in list(iter(lambda: (now_ns, self._timers.take_due(now_ns)), (now_ns, None))):",
            ),
        ),
        place=ByTest(CORE + "::test_a_deadline_that_raises_leaves_the_others_due"),
    ),
    Mutant(
        name="deadlines in the order of setting",
        rule="one deadline at a time",
        row=52,
        broken="the first deadline that was set is waited for, whatever is due before it",
        changes=(
            Edit(
                Deadlines.set,
                "entry = (at_ns, self._set_count)",
                "entry = (max(at_ns, *(e[0] for e in self._entries.values()), at_ns), self._set_count)",
            ),
        ),
        place=ByTest(CORE + "::test_a_request_that_lacks_a_proof_asks_at_once_and_not_for_ever"),
    ),
)

MUTANTS = (*PROOF, *KEEPING, *READS, *REQUESTS, *PEERS)
