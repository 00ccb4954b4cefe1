"""Mutants of the core of a prefill rank: `Lending`, and the machine lease."""

from __future__ import annotations

from connector.runtime.connections import Connections
from statemachine import lease, lending
from statemachine.lending import Lending
from tests.simulation.mutants.mutant import ByTest, Edit, Explored, Mutant
from tests.simulation.mutants.places import KEEPER, LEASE, LENDING, ONE, SIBLINGS, TWINS, TWO_NAMES, TWO_OF_D, within

STANDSTILL = "::test_who_has_stood_still_hears_what_was_sent_meanwhile_before_it_ends_a_lease"
USED_AGAIN = "::test_a_request_id_that_is_used_again_supersedes_its_lease_and_is_ambiguous_without_its_number"

# --- readers --------------------------------------------------------------------------------------------------------

READERS = (
    Mutant(
        name="the first engine lets go for all",
        rule="every holder",
        row=69,
        broken="the release of one decode engine frees the blocks that another still reads",
        changes=(Edit(lease._is_read, "all(", "any("),),
        place=Explored(within(SIBLINGS, 1), "invariant 5"),
    ),
    Mutant(
        name="the first rank lets go for its engine",
        rule="every holder",
        row=59,
        broken="the release of one rank of a decode engine counts for all its ranks",
        changes=(
            Edit(
                lease.Holder.is_complete,
                "len(self.released) >= self.ranks and not self.promised",
                "bool(self.released)",
            ),
        ),
        place=Explored(within(TWO_OF_D, 1), "invariant 5"),
    ),
    Mutant(
        name="releases are counted, not who sends them",
        rule="a sender counts once",
        row=19,
        broken="a rank that says twice that it is done is counted as two",
        changes=(
            Edit(
                lease._with_reader,
                "released | {event.rank}",
                "released | {len(released)}",
            ),
        ),
        place=ByTest(LEASE + "::test_a_rank_counts_once_however_often_it_says_so"),
    ),
    Mutant(
        name="readers of leases that are over are never forgotten",
        broken="each lease that expires leaves its readers behind for the life of the engine",
        changes=(Edit(Lending._forget, "self._readers_of_expired.pop(oldest, None)", "pass"),),
        place=ByTest(LENDING + "::test_what_is_known_of_those_that_are_over_is_forgotten_with_them"),
    ),
    Mutant(
        name="the smallest number of ranks counts",
        rule="resolved to the largest",
        broken="a rank that says that it reads alone ends the lease of its sibling",
        changes=(
            Edit(lease._with_reader, "max(event.ranks, known.ranks)", "min(event.ranks, known.ranks or event.ranks)"),
        ),
        place=ByTest(LEASE + "::test_ranks_that_disagree_about_their_number_are_resolved_to_the_largest"),
    ),
    Mutant(
        name="the first number of ranks counts",
        rule="resolved to the largest",
        broken="a rank that said that it reads alone ends the lease of the siblings that have come since",
        changes=(Edit(lease._with_reader, "max(event.ranks, known.ranks)", "known.ranks or event.ranks"),),
        place=ByTest(LEASE + "::test_ranks_that_disagree_about_their_number_are_resolved_to_the_largest"),
    ),
    Mutant(
        name="who holds again does not count",
        rule="a rank may hold again",
        row=69,
        broken="a rank that wants the blocks again after it released them is not waited for",
        changes=(Edit(lease._with_reader, "released - {event.rank}, promised | reader", "released, promised"),),
        place=ByTest(LEASE + "::test_a_rank_that_holds_again_after_its_release_wants_the_blocks_again"),
    ),
    Mutant(
        name="an engine id is enough to release",
        rule="who was promised",
        row=19,
        broken="a process releases what another one of the same engine id was promised",
        changes=(Edit(lease._with_reader, "promised - reader", "frozenset()"),),
        place=Explored(within(TWINS, 1), "invariant 5"),
    ),
    Mutant(
        name="a rank is known by one name for ever",
        rule="who was promised",
        row=19,
        broken="a release that was sent before P was evicted ends what the same rank has been promised since",
        changes=(Edit(Connections.__init__, "context.draw_name()", "'0' * 32"),),
        place=ByTest(
            "tests/actors/test_lent_blocks.py::test_a_late_release_of_who_was_evicted_ends_nothing_that_is_held_anew"
        ),
    ),
    Mutant(
        name="two names of a lease are one reader",
        rule="who was promised",
        row=19,
        broken="a request that names a lease without its number ends it for one that is read by its number",
        changes=(Edit(lending._reader, "name.number or not asked.incarnation", "True"),),
        place=Explored(within(TWO_NAMES, 1), "invariant 5"),
    ),
    Mutant(
        name="a hold that is late counts",
        rule="late and repeated messages",
        row=41,
        broken="a hold that comes behind its own release keeps blocks until they expire, for nobody",
        changes=(Edit(Lending._hold, "self._leases[known].has_left(asked.engine_id, reader)", "False"),),
        place=Explored(within(ONE, 2), "invariant 5"),
    ),
    Mutant(
        name="incarnations without bound",
        rule="late and repeated messages",
        row=50,
        broken="whoever names a lease under ever new incarnations makes each step of it dearer",
        changes=(Edit(Lending._is_full, "len(known.promised) >= machine.READERS_MAX", "False"),),
        place=ByTest(LENDING + "::test_a_lease_is_held_by_a_bounded_number_of_incarnations"),
    ),
    Mutant(
        name="who only releases is no reader",
        rule="a release counts as a hold",
        row=41,
        broken="the release of an engine that never held keeps nobody from the blocks, and frees nothing",
        changes=(
            Edit(
                lease._finish_reader,
                "lease = _with_reader(lease, event)",
                "held = any(each.engine_id == event.engine_id for each in lease.holders)\n"
                "    lease = _with_reader(lease, event) if held else lease",
            ),
        ),
        place=ByTest(LEASE + "::test_the_only_reader_ends_it_whether_or_not_it_has_held_it_before"),
    ),
    Mutant(
        name="holders without bound",
        rule="late and repeated messages",
        row=50,
        broken="whoever names a lease under ever new engine ids makes each step of it dearer",
        changes=(Edit(Lending._is_full, "len(lease.holders) >= HOLDERS_MAX", "False"),),
        place=ByTest(LENDING + "::test_a_lease_is_held_by_a_bounded_number_of_engines"),
    ),
    Mutant(
        name="holds before the grant are forgotten",
        rule="overtaking",
        row=56,
        broken="an engine that held while the prefill ran is not waited for",
        changes=(Edit(lease._grant, "state=State.HELD,", "state=State.HELD, holders=(),"),),
        place=ByTest(LEASE + "::test_readers_that_overtake_the_grant_are_remembered"),
    ),
    Mutant(
        name="early release dropped",
        rule="overtaking",
        row=56,
        broken="a release that arrives before the grant is not counted",
        changes=(Edit(lease._remember_reader, "_with_reader(lease, event)", "lease"),),
        place=ByTest(LEASE + "::test_readers_that_overtake_the_grant_are_remembered"),
    ),
    Mutant(
        name="an early promise is broken",
        rule="the grant keeps the promise",
        broken="what a holder was told before the grant is not kept by it",
        changes=(Edit(lease._grant, "max(lease.deadline_ns, event.deadline_ns)", "event.deadline_ns"),),
        place=ByTest(LEASE + "::test_what_a_hold_was_promised_before_the_grant_is_kept"),
    ),
    Mutant(
        name="built-in readers are one each",
        rule="built-in readers are one holder",
        row=59,
        broken="each rank of a built-in engine that notifies is taken for an engine of its own",
        changes=(Edit(Lending._count_notification, "engine_id=BUILTIN_READERS", "engine_id=notified.sender"),),
        place=ByTest(KEEPER + "::test_a_lease_ends_when_every_rank_of_a_builtin_reader_has_said_so_once"),
    ),
)

# --- deadlines ------------------------------------------------------------------------------------------------------

DEADLINES = (
    Mutant(
        name="lease never expires",
        rule="a deadline ends a lease",
        row=54,
        broken="blocks whose reader is gone are kept for ever",
        changes=(
            Edit(lease._grant, "return held, (StartLeaseTimer(deadline_ns=deadline_ns),)", "return held, NO_EFFECTS"),
        ),
        place=Explored(within(ONE, 1), "liveness"),
    ),
    Mutant(
        name="what a dead core has promised ends with the grant",
        broken="blocks are freed when the grant alone would end, though the core that has died may have promised more",
        changes=(Edit(lending.end_without_core_ns, "max(granted_ns, died_ns)", "granted_ns"),),
        place=ByTest(LENDING + "::test_without_its_core_no_lease_ends_before_what_the_core_may_have_promised"),
    ),
    Mutant(
        name="renewal forgets the timer",
        rule="a deadline ends a lease",
        row=52,
        broken="a lease that was renewed when its timer fired gets no other",
        changes=(
            Edit(
                lease._expire,
                "return lease, (StartLeaseTimer(deadline_ns=lease.deadline_ns),)",
                "return lease, NO_EFFECTS",
            ),
        ),
        place=ByTest(LEASE + "::test_a_renewal_moves_the_deadline_and_the_timer_follows_when_it_fires"),
    ),
    Mutant(
        name="renewals are not looked at",
        rule="a deadline ends a lease",
        row=62,
        broken="the timer of the grant ends a lease that was renewed since",
        changes=(Edit(lease._expire, "if event.now_ns < lease.deadline_ns:", "if False:"),),
        place=Explored(within(ONE, 2), "invariant 5"),
    ),
    Mutant(
        name="renewal shortens",
        rule="deadlines move forward",
        row=62,
        broken="a renewal can bring the end of a lease closer",
        changes=(Edit(lease._extended, "max(lease.deadline_ns, deadline_ns)", "deadline_ns"),),
        place=ByTest(LEASE + "::test_no_renewal_moves_the_deadline_earlier"),
    ),
    Mutant(
        name="no total bound",
        rule="the total bound",
        row=54,
        broken="a reader that never reads can pin the blocks for ever",
        changes=(Edit(lease._extended, "min(deadline_ns, lease.latest_ns)", "deadline_ns"),),
        place=ByTest(LEASE + "::test_no_renewal_goes_beyond_the_total_bound"),
    ),
    Mutant(
        name="promised beyond the bound",
        rule="the total bound",
        row=1,
        broken="a holder is told a whole lease although the total bound comes first",
        changes=(Edit(Lending._hold, "self._leases[known].deadline_ns - now_ns", "deadline_ns - now_ns"),),
        place=ByTest(LENDING + "::test_holds_reach_no_further_than_the_total_bound"),
    ),
    Mutant(
        name="Held at the very end",
        rule="over is over",
        row=1,
        broken="a lease whose bound is reached is said to be held, and freed in the same moment",
        changes=(Edit(Lending._hold, "if remaining_ns > 0:", "if True:"),),
        place=Explored(within(ONE, 2), "invariant"),
    ),
    Mutant(
        name="Held after the end",
        rule="over is over",
        row=1,
        broken="P says Held of what it has freed",
        changes=(Edit(Lending._hold, "gone.append((name, why))", "held.append((name, self._limits.lease_ns))"),),
        place=Explored(within(ONE, 2), "invariant"),
    ),
    Mutant(
        name="a lease comes back",
        rule="over is over",
        row=48,
        broken="a lease that is unknown is begun by whoever holds it",
        changes=(
            Edit(
                Lending._hold,
                "if known is None:",
                "if known is None and why == UNKNOWN:\n"
                "            self._begin(name)\n"
                "            known = name\n"
                "        if known is None:",
            ),
        ),
        place=ByTest(LENDING + "::test_a_lease_of_another_life_is_not_this_one"),
    ),
    Mutant(
        name="all leases due are taken at once",
        rule="one deadline at a time",
        row=76,
        broken="everything due is taken before the first lease is ended, and lost when that raises",
        changes=(
            Edit(
                Lending.advance,
                "while (due := self._timers.take_due(now_ns)) is not None:",
                "for due in list(iter(lambda: self._timers.take_due(now_ns), None)):",
            ),
        ),
        place=ByTest(LENDING + "::test_a_deadline_whose_step_raises_leaves_the_others_due"),
    ),
    Mutant(
        name="deadlines before messages",
        rule="who stood still hears first",
        row=77,
        broken="a process that was stopped ends leases whose renewals and releases wait at its socket",
        changes=(Edit(Lending._hears_first, "if due_ns is None or now_ns - due_ns < standstill_ns:", "if True:"),),
        place=ByTest(LENDING + STANDSTILL),
    ),
    Mutant(
        name="it hears for ever",
        rule="who stood still hears first",
        row=77,
        broken="a process that comes late to its deadlines ends no lease any more",
        changes=(Edit(Lending._hears_first, "return now_ns < self._hears_until_ns", "return True"),),
        place=ByTest(LENDING + STANDSTILL),
    ),
    Mutant(
        name="put off each time",
        rule="who stood still hears first",
        row=77,
        broken="a process that is always late puts each deadline off again and again",
        changes=(Edit(Lending._hears_first, "if self._hears_until_ns is None:", "if True:"),),
        place=ByTest(LENDING + "::test_what_is_due_is_put_off_once_however_late_the_executor_is"),
    ),
)

# --- ends -----------------------------------------------------------------------------------------------------------

ENDS = (
    Mutant(
        name="freed and still held",
        rule="freed once",
        row=29,
        broken="a lease that was read frees its blocks, and frees them again when it expires",
        changes=(
            Edit(lease._finish_reader, "return msgspec.structs.replace(lease, state=State.DONE), (", "return lease, ("),
        ),
        place=Explored(within(ONE, 1), "invariant 5"),
    ),
    Mutant(
        name="keep what was read",
        rule="freed once",
        row=54,
        broken="the engine is not told that what was read may be freed",
        changes=(Edit(lease._finish_reader, "(FreeBlocks(expired=False),)", "NO_EFFECTS"),),
        place=Explored(within(ONE, 0), "liveness"),
    ),
    Mutant(
        name="keep what was read before the grant",
        rule="freed once",
        row=56,
        broken="a lease whose readers were done before it was granted waits for its deadline",
        changes=(Edit(lease._grant, "if _is_read(held):", "if False:"),),
        place=ByTest(LEASE + "::test_when_everybody_overtakes_the_grant_it_is_done_with_it"),
    ),
    Mutant(
        name="superseded and kept",
        rule="freed once",
        row=57,
        broken="what is kept of a lease is forgotten only when its blocks are freed, not when the engine has",
        changes=(
            Edit(
                Lending._forget,
                "self._outcome.effects.append(ForgetLease(lease=name))",
                "self._outcome.effects += [ForgetLease(lease=name)] if why in (RELEASED, EXPIRED) else []",
            ),
        ),
        place=ByTest(KEEPER + "::test_nothing_is_kept_of_a_lease_that_the_engine_has_freed_by_itself"),
    ),
    Mutant(
        name="withdrawn and freed",
        rule="freed once",
        row=29,
        broken="an abort after the prefill frees what is lent",
        changes=(
            Edit(
                Lending.handle,
                "self._step(lease, machine.Withdrawn())",
                "self._step(lease, machine.Superseded())\n"
                "                self._outcome.effects.append(FreeBlocks(lease=lease, expired=False))",
            ),
        ),
        place=ByTest(KEEPER + "::test_what_is_withdrawn_frees_nothing"),
    ),
    Mutant(
        name="withdrawn and kept",
        rule="freed once",
        row=57,
        broken="what was announced and never lent is remembered for ever",
        changes=(Edit(Lending.handle, "if lease in self._leases:", "if False:"),),
        place=ByTest(KEEPER + "::test_what_is_withdrawn_frees_nothing"),
    ),
    Mutant(
        name="a request id that is used again names the old lease",
        rule="names",
        row=53,
        broken="the lease before is not ended when its request id is used again",
        changes=(Edit(Lending._begin, "if before in self._leases:", "if False:"),),
        place=ByTest(LENDING + USED_AGAIN),
    ),
    Mutant(
        name="preemption begins anew",
        rule="names",
        broken="a request that is scheduled again after a preemption has lost its readers",
        changes=(Edit(Lending._begin, "if name in self._leases:\n        return", ""),),
        place=ByTest(LENDING + "::test_a_preempted_request_is_announced_again_and_remembers_its_readers"),
    ),
    Mutant(
        name="number 0 means the newest",
        rule="names",
        row=53,
        broken="parameters without a number mean the newest lease of a request id that was used twice",
        changes=(Edit(Lending._find, "name.request_id in self._reused:", "False:"),),
        place=ByTest(LENDING + USED_AGAIN),
    ),
    Mutant(
        name="number 0 means the newest of this life",
        rule="names",
        row=53,
        broken="parameters without a number mean another life's lease where clients' request ids come again",
        changes=(Edit(Lending._find, "self._limits.ids_repeat or ", ""),),
        place=ByTest(LENDING + "::test_where_request_ids_come_again_one_without_its_number_names_no_lease"),
    ),
    Mutant(
        name="number 0 means nothing",
        rule="names",
        row=53,
        broken="parameters that lost their number find no lease",
        changes=(Edit(Lending._find, "if name.number == 0 and", "if False and"),),
        place=ByTest(LENDING + USED_AGAIN),
    ),
    Mutant(
        name="the number is not looked at",
        rule="names",
        row=48,
        broken="a lease of an earlier life is taken for this life's of the same request id",
        changes=(Edit(Lending._find, "if name.number == 0 and", "if"),),
        place=ByTest(LENDING + "::test_a_lease_of_another_life_is_not_this_one"),
    ),
    Mutant(
        name="ends are forgotten",
        rule="who comes too late is told why",
        broken="why a lease is over is not remembered",
        changes=(Edit(Lending._forget, "self._ended[name] = why", "self._ended[name] = UNKNOWN"),),
        place=ByTest(LENDING + "::test_who_comes_too_late_is_told_why"),
    ),
    Mutant(
        name="ends pile up",
        rule="who comes too late is told why",
        row=57,
        broken="every lease that ever ended is remembered",
        changes=(Edit(Lending._forget, "if len(self._ended) > ENDED_MAX:", "if False:"),),
        place=ByTest(LENDING + "::test_what_is_over_is_forgotten_in_the_end"),
    ),
)

# --- what peers say -------------------------------------------------------------------------------------------------

MESSAGES = (
    Mutant(
        name="a late release is not answered",
        rule="always answered",
        row=54,
        broken="a release of what is over is not confirmed, and is said again and again",
        changes=(
            Edit(
                Lending._release,
                "AnswerRelease(reply_to=asked.reply_to, leases=asked.leases)",
                "AnswerRelease(reply_to=asked.reply_to, leases=tuple(set(asked.leases) & self._leases.keys()))",
            ),
        ),
        place=ByTest(LENDING + "::test_who_comes_too_late_is_told_why"),
    ),
    Mutant(
        name="a release that is repeated counts as late",
        rule="late and repeated messages",
        row=2,
        broken="a release that is said again after it was heard is counted as one after expiry",
        changes=(Edit(Lending._note_late, "if why == RELEASED:", "if False:"),),
        place=ByTest(LENDING + "::test_a_repeated_release_is_answered_and_is_not_late"),
    ),
    Mutant(
        name="a late release is not counted",
        rule="late and repeated messages",
        broken="nobody learns that a reader was done after its lease had expired",
        changes=(Edit(Lending._note_late, "if why == RELEASED:", "if True:"),),
        place=ByTest(LENDING + "::test_a_release_of_what_is_over_otherwise_is_late"),
    ),
    Mutant(
        name="unknown ids trusted",
        rule="late and repeated messages",
        row=19,
        broken="a notification that names an unknown request is taken for one that is lent",
        changes=(
            Edit(Lending._count_notification, "if name in self._leases:", "if name in self._leases or name is None:"),
        ),
        place=ByTest(LENDING + "::test_a_release_of_what_is_over_otherwise_is_late"),
    ),
    Mutant(
        name="heartbeats are not heard",
        rule="late and repeated messages",
        row=62,
        broken="the heartbeats of a built-in reader renew nothing",
        changes=(Edit(Lending._renew, "if name is not None and name in self._leases:", "if False:"),),
        place=ByTest(LENDING + "::test_heartbeats_count_for_less_than_holds_and_name_the_newest_lease"),
    ),
    Mutant(
        name="a release that looks like a heartbeat",
        rule="late and repeated messages",
        broken="the release of a request whose id begins with HB: is taken for a heartbeat",
        changes=(Edit(Lending._renew, "if release is not None and release.request_id in self._newest:", "if False:"),),
        place=ByTest(LENDING + "::test_a_text_with_two_readings_is_what_makes_sense_here"),
    ),
    Mutant(
        name="nobody looks for notifications",
        rule="late and repeated messages",
        broken="notifications are not looked for often while something is lent",
        changes=(Edit(Lending._begin, "if len(self._leases) == 1:", "if False:"),),
        place=ByTest(KEEPER + "::test_notifications_are_watched_while_anything_is_lent"),
    ),
)

MUTANTS = (*READERS, *DEADLINES, *ENDS, *MESSAGES)
