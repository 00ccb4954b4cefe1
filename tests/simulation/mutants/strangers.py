"""Mutants of who may stay connected to a listener and who is heard: `Admission`, and what carries it out."""

from __future__ import annotations

from connector.ports.doorman import Doorman
from connector.ports.gate import Gate
from connector.ports.zmq_bridge import ZmqListener
from connector.runtime.inspector import Inspector
from connector.runtime.lease_keeper import LeaseKeeper
from statemachine.admission import Admission
from tests.simulation.faults import Kind
from tests.simulation.mutants.mutant import ByTest, Edit, Mutant, Seeds, fault

CORE = "tests/unit/test_admission.py"
DOOR = "tests/conformance/test_doorman.py"
FLOOD = (fault(Kind.FLOOD, "p0", 0.3, 2.0),)

MUTANTS = (
    Mutant(
        name="floods are served",
        rule="who has no allowance is not heard",
        row=38,
        broken="whoever sends most gets most of the thread",
        changes=(
            Edit(
                Admission.arrived,
                "if self._common.is_left(now_ns) or known.own.is_left(now_ns):",
                "if True:",
            ),
        ),
        place=ByTest(f"{DOOR}::test_a_flood_is_ended_while_who_was_there_before_is_served"),
    ),
    Mutant(
        name="one allowance for all",
        rule="an allowance of one's own",
        broken="a flood uses up what engines need",
        changes=(Edit(Admission.arrived, " or known.own.is_left(now_ns)", ""),),
        place=Seeds(2, "isolation", faults=FLOOD),
    ),
    Mutant(
        name="floods are dropped for ever",
        rule="who goes on is cut off",
        broken="a connection that is not heard goes on sending, and each of its messages is taken",
        changes=(Edit(Admission.arrived, "if not known.drops.is_left(now_ns):", "if False:"),),
        place=ByTest(f"{CORE}::test_the_dropped_are_counted"),
    ),
    Mutant(
        name="nothing dropped is forgiven",
        rule="what was dropped long ago",
        broken="an engine's connection is ended for a few messages that were dropped in each of many floods",
        changes=(Edit(Admission.opened, "limits.dropped_per_second", "0"),),
        place=ByTest(f"{CORE}::test_what_was_dropped_long_ago_is_forgiven"),
    ),
    Mutant(
        name="what has ended is served",
        rule="what has ended",
        broken="who connects, sends and leaves, again and again, is served without end",
        changes=(
            Edit(
                Admission.arrived,
                "if self._common.is_left(now_ns):\n            return",
                "if True:\n            return",
            ),
        ),
        place=ByTest(f"{CORE}::test_what_is_left_of_a_connection_that_has_ended_has_no_allowance_of_its_own"),
    ),
    Mutant(
        name="newcomers have nothing",
        rule="a newcomer can shake hands",
        broken="no engine can meet this one while somebody floods it",
        changes=(Edit(Admission.opened, "Allowance(limits.newcomer_units,", "Allowance(0,"),),
        place=Seeds(2, "isolation", faults=FLOOD),
    ),
    Mutant(
        name="crowds are let in",
        rule="a limit to the connections",
        row=38,
        broken="strangers' connections use up the descriptors of the engine",
        changes=(Edit(Admission.opened, "if len(self._connections) >= limits.connections_max", "if False"),),
        place=ByTest(f"{DOOR}::test_the_oldest_stranger_makes_room"),
    ),
    Mutant(
        name="an engine makes room for strangers",
        rule="a limit to the connections",
        broken="idle strangers push out the links of engines",
        changes=(Edit(Admission._cut_off_one, "if self._strange:", "if False:"),),
        place=ByTest(f"{CORE}::test_the_oldest_silent_connection_makes_room"),
    ),
    Mutant(
        name="garbage makes an engine of a stranger",
        rule="a limit to the connections",
        broken="a stranger that has sent anything at all is taken for an engine",
        changes=(Edit(Admission.served, "known is not None and understood", "known is not None"),),
        place=ByTest(f"{CORE}::test_what_was_not_understood_is_no_word"),
    ),
    Mutant(
        name="no room without descriptors",
        rule="no descriptor left",
        broken="when strangers have used the descriptors up nobody is accepted any more, and libzmq's thread spins",
        changes=(Edit(Admission.no_descriptor_left, "if self._strange", "if False"),),
        place=ByTest(f"{CORE}::test_without_descriptors_the_oldest_stranger_makes_room"),
    ),
    Mutant(
        name="engines make room for strangers",
        rule="no descriptor left",
        broken="while others use the descriptors up, one engine after another is cut off for whoever knocks",
        changes=(Edit(Admission.no_descriptor_left, "if self._strange", "if self._connections"),),
        place=ByTest(f"{CORE}::test_without_descriptors_no_engine_makes_room"),
    ),
    Mutant(
        name="a message may have no end",
        rule="a message has to end",
        row=38,
        broken="libzmq keeps parts of a message that has no last one until the machine has no memory left",
        changes=(Edit(Admission.measured, "known.unfinished_bytes > bytes_max", "False"),),
        place=ByTest(f"{CORE}::test_a_message_without_end_is_ended"),
    ),
    Mutant(
        name="each may keep as much unfinished",
        rule="unfinished messages together",
        broken="a thousand connections in the middle of a message use up the memory",
        changes=(
            Edit(
                Admission.measured,
                "if total_bytes > self._limits.unfinished_bytes_total_max",
                "if False",
            ),
        ),
        place=ByTest(f"{CORE}::test_many_messages_without_end_share_a_bound"),
    ),
    Mutant(
        name="nobody is shut out",
        rule="shut out for a while",
        broken="who was cut off for a flood connects again at once, and floods again",
        changes=(Edit(Admission.opened, "self.is_shut_out(address, now_ns)", "False"),),
        place=ByTest(f"{CORE}::test_who_was_cut_off_for_cause_is_shut_out_longer_each_time"),
    ),
    Mutant(
        name="the whole address is ended",
        rule="shut out for a while",
        broken="an engine loses its link because of somebody else behind the same address",
        changes=(
            Edit(
                Admission.flooded,
                "[self._cut_off_for_cause(connection, FLOOD, now_ns)]",
                "[self._cut_off_for_cause(each, FLOOD, now_ns) for each in list(self._addresses[known.address].open)]",
            ),
        ),
        place=ByTest(f"{CORE}::test_others_at_the_address_stay"),
    ),
    Mutant(
        name="any descriptor is shut down",
        broken="a descriptor that libzmq has closed is another's by now, and is shut down",
        changes=(
            Edit(
                Doorman._shut_down,
                "if duplicate.getsockname()[1] == port and duplicate.getpeername()[0] == connection.address:",
                "if True:",
            ),
        ),
        place=ByTest(f"{DOOR}::test_somebody_elses_descriptor_is_never_shut_down"),
    ),
    Mutant(
        name="who is shut out passes the gate",
        broken="the messages of an address that is shut out are handed out, and dropped one by one",
        changes=(Edit(Gate._judge, "is_shut_out is None or is_shut_out(address)", "False"),),
        place=ByTest(f"{DOOR}::test_messages_of_an_address_that_is_shut_out_are_not_handed_out"),
    ),
    Mutant(
        name="large replies are copied",
        broken="who asks again and again and reads nothing has P keep a copy of its metadata each time",
        changes=(
            Edit(ZmqListener._shareable, "len(frame) < SHARED_FRAME_BYTES_MIN", "True"),
            Edit(ZmqListener.reply, "zmq.NOBLOCK, copy=False", "zmq.NOBLOCK"),
        ),
        place=ByTest(f"{DOOR}::test_large_replies_that_nobody_reads_are_kept_once"),
    ),
    Mutant(
        name="a message of many frames in one turn",
        broken="a message of very many frames keeps all other tasks waiting until it was dropped",
        changes=(Edit(ZmqListener._receive_rest, "len(frames) > self._frames_max", "False"),),
        place=ByTest(f"{DOOR}::test_a_message_of_very_many_frames_is_dropped_in_pieces"),
    ),
    Mutant(
        name="leases cost nothing",
        broken="a message of 512 leases counts as much as one of a single lease",
        changes=(Edit(LeaseKeeper._serve_control, "MESSAGE_UNITS + len(message.leases)", "MESSAGE_UNITS"),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_who_sends_pays_for_each_lease_and_for_garbage"),
    ),
    Mutant(
        name="one tool asks for all",
        broken="the questions of one tool leave no room for those of another",
        changes=(Edit(Inspector.ask, " and of_this_one < QUESTIONS_OF_ONE_MAX", ""),),
        place=ByTest("tests/actors/test_inspection.py::test_one_tool_leaves_room_for_another"),
    ),
)
