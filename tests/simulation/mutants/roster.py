"""Mutants of the roster: which remote engines a decode rank knows."""

from __future__ import annotations

from connector.runtime import supervisor
from connector.runtime.peer_actor import PeerActor
from statemachine.quarantine import Quarantine
from statemachine.roster import Roster
from tests.simulation.mutants.executors import FULL_QUARANTINE, REPLACEMENTS, WRONG_SIZES, level2
from tests.simulation.mutants.mutant import ByTest, Edit, Mutant
from tests.simulation.mutants.places import ROSTER

MUTANTS = (
    Mutant(
        name="sizes share an actor",
        rule="alike descriptions",
        row=68,
        broken="requests that say different sizes of an engine share one connection",
        changes=(Edit(supervisor._key, "peer.tp_size, peer.dcp_size, peer.pp_size", "1, 1, 1"),),
        place=level2("isolation", *WRONG_SIZES),
    ),
    Mutant(
        name="table without limit",
        rule="a limit to members",
        row=50,
        broken="more remote engines are kept than the options allow",
        changes=(Edit(Roster._hand_over, "if self._staying >= self._members_max:", "if False:"),),
        place=level2("leaks", *REPLACEMENTS),
    ),
    Mutant(
        name="who is recalled is looked for at its old place",
        broken="a member that was recalled is retired when another engine answers where it was before",
        changes=(Edit(Roster._hand_over, "self._forget(key)", "pass"),),
        place=ByTest(ROSTER + "::test_who_was_recalled_at_another_place_is_replaced_by_nobody_at_the_old_one"),
    ),
    Mutant(
        name="who would not end is not recalled",
        broken="an engine that was retired while its READs hang is refused for as long as they do",
        changes=(
            Edit(
                Roster._hand_over,
                "entry is not None and entry.is_retired and self._member(key).may_be_recalled",
                "False",
            ),
        ),
        place=ByTest(
            "tests/actors/test_quiescence.py::"
            "test_a_peer_that_comes_back_elsewhere_is_read_from_while_a_read_from_before_hangs"
        ),
    ),
    Mutant(
        name="nobody evicted",
        rule="a limit to members",
        row=50,
        broken="a full table never makes room",
        changes=(Edit(Roster._make_room, "if found is not None else []", "if False else []"),),
        place=level2("recovery", *REPLACEMENTS),
    ),
    Mutant(
        name="one in use evicted",
        rule="a limit to members",
        broken="an engine that is read from is retired for a newcomer",
        changes=(Edit(Roster._make_room, "or not member.is_unused", ""),),
        place=ByTest(f"{ROSTER}::test_one_that_is_in_use_never_makes_room"),
    ),
    Mutant(
        name="the connected first",
        rule="a limit to members",
        broken="a live connection makes room while an engine that is not connected stays",
        changes=(Edit(Roster._make_room, "(member.is_connected,", "(not member.is_connected,"),),
        place=ByTest(f"{ROSTER}::test_one_that_is_connected_makes_room_only_when_no_other_can"),
    ),
    Mutant(
        name="the connected for nobody",
        rule="a limit to members",
        broken="a live connection makes room for an engine that no request needs",
        changes=(Edit(Roster._make_room, "member.is_connected or member", "member"),),
        place=ByTest(f"{ROSTER}::test_none_that_is_connected_makes_room_for_one_that_is_only_to_be_met"),
    ),
    Mutant(
        name="who is just being connected for nobody",
        rule="a limit to members",
        broken="of two engines that are to be met, with one place, neither is ever met if its handshake takes long",
        changes=(Edit(Roster._make_room, " or member.is_shaking_hands", ""),),
        place=ByTest(f"{ROSTER}::test_nor_does_one_that_is_just_being_connected"),
    ),
    Mutant(
        name="the latest first",
        rule="a limit to members",
        broken="that a member was asked for again is not noted",
        changes=(Edit(Roster._hand_over, "entry.asked_ns = now_ns", "pass"),),
        place=ByTest(f"{ROSTER}::test_the_unused_member_that_was_asked_for_longest_ago_makes_room"),
    ),
    Mutant(
        name="refused requests are not reported",
        rule="newcomers are refused",
        row=43,
        broken="a request that finds no room for its peer is dropped",
        changes=(Edit(Roster._turn_away, "if not asked.is_awaited:", "if True:"),),
        place=ByTest("tests/actors/test_peers.py::test_too_many_peers"),
    ),
    Mutant(
        name="newcomers admitted while it stops",
        rule="newcomers are refused",
        broken="a connector that stops starts actors for new peers",
        changes=(Edit(Roster._ask, "self._stopped is not None and (entry is None or asked.is_awaited)", "False"),),
        place=ByTest(f"{ROSTER}::test_after_the_stop_only_who_is_known_gets_messages"),
    ),
    Mutant(
        name="replaced engine kept",
        rule="one engine at a place",
        row=49,
        broken="what is loaded of an engine stays after another one has taken its address",
        changes=(Edit(Roster._replaced_by, "if other.engine_id != key.engine_id", "if False"),),
        place=ByTest("tests/actors/test_peers.py::test_engine_replaced_at_its_address_is_given_up"),
    ),
    Mutant(
        name="the replaced replaces",
        rule="the replaced replaces nobody",
        row=49,
        broken="a late answer of an engine that was replaced retires the one that has replaced it",
        changes=(Edit(Roster._replaced_by, "entry is None or entry.is_retired", "entry is None"),),
        place=ByTest(f"{ROSTER}::test_one_that_was_replaced_replaces_nobody_when_its_answer_comes_late"),
    ),
    Mutant(
        name="looked for at the first place for ever",
        rule="one engine at a place",
        broken="an engine that has moved is retired when another one takes its old address",
        changes=(Edit(Roster._look_at, "entry.place != place", "False"),),
        place=ByTest(f"{ROSTER}::test_an_engine_that_is_looked_for_elsewhere_since_is_not_retired"),
    ),
    Mutant(
        name="idle connections retired",
        rule="idle members",
        broken="a live connection is torn down because nobody used it for a while",
        changes=(Edit(Roster.advance, " and not member.is_connected", ""),),
        place=ByTest(f"{ROSTER}::test_a_connection_or_a_request_keeps_a_member"),
    ),
    Mutant(
        name="nobody is idle",
        rule="idle members",
        broken="an engine that has gone for good is never forgotten",
        changes=(Edit(Roster.advance, "effects += self._retire([key])", "pass"),),
        place=ByTest(f"{ROSTER}::test_a_member_that_nobody_asks_for_is_retired"),
    ),
    Mutant(
        name="one place given away twice",
        rule="retired once",
        broken="an engine that was retired and has not ended yet makes room for every newcomer",
        changes=(
            Edit(Roster._make_room, "entry.is_retired or ", ""),
            Edit(Roster._retire, "if not entry.is_retired:", "if True:"),
        ),
        place=ByTest("tests/actors/test_peers.py::test_one_place_in_a_full_table_is_given_away_once"),
    ),
    Mutant(
        name="a retirement is forgotten in a crash",
        rule="retired once",
        broken="an actor that crashes over being retired lives on, and no longer counts",
        changes=(Edit(PeerActor.recover, "core.ReadEnded | core.LetGo | core.Retire", "core.ReadEnded"),),
        place=ByTest("tests/actors/test_peers.py::test_actor_that_crashes_over_being_retired_ends_all_the_same"),
    ),
    Mutant(
        name="aborts are not routed",
        rule="an abort follows its request",
        row=8,
        broken="an abort does not reach the actor that reads for the request",
        changes=(Edit(Roster._ask, "self._of_request[asked.request_id] = key", "pass"),),
        place=ByTest("tests/actors/test_pull.py::test_abort_while_the_peer_is_silent_ends_at_once"),
    ),
    Mutant(
        name="a quarantine without limit",
        rule="a limit to the quarantine",
        row=5,
        broken="however many blocks are in quarantine, requests go on being read",
        changes=(Edit(Roster._ask, "if asked.is_awaited and self._quarantine.is_full", "if False"),),
        place=level2("quarantine", *FULL_QUARANTINE, first=2),
    ),
    Mutant(
        name="a namesake of one in quarantine",
        rule="ids in quarantine",
        broken="blocks of a request that is being read come back for those of an earlier one of its id",
        changes=(Edit(Roster._ask, "blocks := self._quarantine.blocks_of((key, asked.request_id))", "blocks := 0"),),
        place=ByTest(f"{ROSTER}::test_an_id_whose_blocks_are_in_quarantine_is_not_used_again_at_the_same_engine"),
    ),
    Mutant(
        name="a full quarantine stays full",
        rule="until enough have come back",
        broken="nothing is read any more when the quarantine was full once",
        changes=(
            Edit(
                Quarantine.keep,
                "self.is_full = self.blocks >= self.limit_blocks",
                "self.is_full |= self.blocks >= self.limit_blocks",
            ),
        ),
        place=level2("recovery", *FULL_QUARANTINE, first=2),
    ),
    Mutant(
        name="the roster hears of no end of a quarantine",
        rule="until enough have come back",
        broken="blocks that have come back to the pool still count as quarantined",
        changes=(
            Edit(
                PeerActor._lift_quarantine,
                "self._tell_roster(roster.QuarantineEnded(key=self._key, request_id=effect.request_id))",
                "pass",
            ),
        ),
        place=level2("leaks", *FULL_QUARANTINE, first=2),
    ),
    Mutant(
        name="who is refused keeps its lease",
        rule="a limit to the quarantine",
        broken="the lease of a request that a full quarantine refuses is held for as long as its bound allows",
        changes=(
            Edit(Roster._turn_away_for_now, "return refused if entry is None else", "return refused if True else"),
        ),
        place=level2("leaks", *FULL_QUARANTINE, first=2),
    ),
    Mutant(
        name="the queue is refused",
        rule="a limit to the quarantine",
        broken="the lease of a request that waits in the queue is not held while the quarantine is full",
        changes=(Edit(Roster._ask, "asked.is_awaited and self._quarantine.is_full", "self._quarantine.is_full"),),
        place=ByTest(f"{ROSTER}::test_who_waits_in_the_queue_or_needs_nothing_is_not_refused"),
    ),
)
