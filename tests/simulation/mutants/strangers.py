"""Mutants of who may stay connected to a listener and who is heard: `Admission`, and what carries it out."""

from __future__ import annotations

from connector.ports.doorman import Doorman
from connector.ports.gate import Gate
from connector.ports.tcp import peer_address
from connector.ports.zmq_bridge import ZmqListener, ZmqSideChannel
from connector.runtime.inspector import Inspector
from connector.runtime.lease_keeper import LeaseKeeper
from statemachine.admission import Admission, Allowance
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
        changes=(Edit(Admission.opened, "rates.dropped_per_second", "0"),),
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
        name="frames that were left cost nothing",
        rule="what was left has too many frames",
        broken="who connects, sends many messages of many frames and leaves, again and again, is let in each time",
        changes=(Edit(Admission.left, "self._shut_out(known, now_ns)", "pass"),),
        place=ByTest(f"{DOOR}::test_who_leaves_frames_behind_and_comes_again_is_shut_out"),
    ),
    Mutant(
        name="floods are owed for",
        rule="nobody owes for minutes",
        broken="for minutes after a flood engines are not heard, and their leases lapse",
        changes=(Edit(Allowance.spend, "max(-self._units_max, self._units - units)", "self._units - units"),),
        place=ByTest(f"{CORE}::test_what_a_flood_has_cost_is_owed_for_a_moment"),
    ),
    Mutant(
        name="who connects too often is shut out",
        rule="who connects too often",
        broken="a thousand engines behind one address that come back at once are kept out for minutes",
        changes=(
            Edit(
                Admission.opened,
                "return [CutOff(connection, address, TOO_OFTEN)]",
                "self._shut_out(known, now_ns)\n        return [CutOff(connection, address, TOO_OFTEN)]",
            ),
        ),
        place=ByTest(f"{CORE}::test_an_address_that_only_connects_is_let_in_as_often_as_engines_connect"),
    ),
    Mutant(
        name="what was left is whose descriptor it has",
        broken="an engine pays for what a stranger has left over the descriptor that it has been accepted with",
        changes=(Edit(Doorman._bind, " or self._connections[number].address != _address_of(first)", ""),),
        place=ByTest(f"{DOOR}::test_what_was_left_is_not_paid_by_whose_descriptor_it_has"),
    ),
    Mutant(
        name="who comes and goes is whose descriptor it had",
        broken="an engine is ended for a stranger's connections that were accepted with the same descriptor before",
        changes=(Edit(Doorman._catch_up, " and last[descriptor] == at", ""),),
        place=ByTest(f"{DOOR}::test_nobody_pays_for_who_had_its_descriptor_before"),
    ),
    Mutant(
        name="what comes in a pause is without end",
        broken="engines are ended whose messages came while the process stood still over a measurement",
        changes=(Edit(Doorman._measure, "if untaken is not Untaken.ALL and self._is_late():", "if False:"),),
        place=ByTest(f"{DOOR}::test_messages_that_come_while_connections_are_measured_are_not_without_end"),
    ),
    Mutant(
        name="all addresses have four bytes",
        broken="who comes over IPv6 has another address each time, and can neither be ended nor shut out",
        changes=(
            Edit(
                peer_address,
                "socket.socket(fileno=descriptor)",
                "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)",
            ),
        ),
        place=ByTest(f"{DOOR}::test_an_address_of_sixteen_bytes_is_told_whole"),
    ),
    Mutant(
        name="newcomers have nothing",
        rule="a newcomer can shake hands",
        broken="no engine can meet this one while somebody floods it",
        changes=(Edit(Admission.opened, "Allowance(rates.newcomer_units,", "Allowance(0,"),),
        place=ByTest("tests/unit/test_admission.py::test_a_newcomer_is_heard_in_a_flood"),
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
        changes=(Edit(Admission.measured, "kept_bytes > bytes_max:", "False:"),),
        place=ByTest(f"{CORE}::test_a_message_without_end_is_ended"),
    ),
    Mutant(
        name="what nobody has read has no end",
        rule="a message has to end",
        broken="an engine is cut off for whole messages that libzmq's thread had no turn to read",
        changes=(Edit(Admission.measured, "kept_bytes > bytes_max:", "unfinished_bytes > bytes_max:"),),
        place=ByTest(f"{CORE}::test_what_the_transport_has_not_read_is_no_message_without_end"),
    ),
    Mutant(
        name="what nobody has read is whole",
        rule="a message has to end",
        broken="behind a whole message a connection hides as much of one without end as the kernel keeps",
        changes=(Edit(Admission.measured, "max(0, received_bytes - unread_bytes)", "received_bytes"),),
        place=ByTest(f"{CORE}::test_what_was_not_read_when_nothing_waited_is_not_taken_for_whole"),
    ),
    Mutant(
        name="what nobody has read is counted together",
        rule="unfinished messages together",
        broken="many engines that say much at once are cut off while libzmq's thread has no turn",
        changes=(
            Edit(Admission.measured, "unfinished_bytes if untaken is Untaken.ALL else kept_bytes", "unfinished_bytes"),
        ),
        place=ByTest(f"{CORE}::test_what_the_transport_has_not_read_is_counted_together_only_while_it_is_full"),
    ),
    Mutant(
        name="each may keep as much unfinished",
        rule="unfinished messages together",
        broken="a thousand connections in the middle of a message use up the memory",
        changes=(
            Edit(
                Admission.measured,
                "if self._unfinished_bytes + self._left_bytes > rates.unfinished_bytes_total_max",
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
        changes=(Edit(Gate._judge, "doorman is None or doorman.is_shut_out(address)", "False"),),
        place=ByTest(f"{DOOR}::test_messages_of_an_address_that_is_shut_out_are_not_handed_out"),
    ),
    Mutant(
        name="connections have names that everybody knows",
        broken="a stranger that names itself as libzmq will name the next connection ends the process",
        changes=(Edit(ZmqSideChannel.listen, "_seed_rand()", "pass"),),
        place=ByTest(f"{DOOR}::test_nobody_knows_the_names_of_connections"),
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
        name="who sends very many frames stays",
        rule="far too many frames",
        row=38,
        broken="whoever sends a message of a million empty frames may send the next one",
        changes=(Edit(ZmqListener._drop, "self._doorman.swamped(message.sender, message.first)", "pass"),),
        place=ByTest(f"{DOOR}::test_a_message_of_very_many_frames_is_dropped_in_pieces"),
    ),
    Mutant(
        name="who sends very many frames has more connections",
        rule="far too many frames again",
        broken="whoever has made a thousand connections keeps everybody waiting for a thousand messages",
        changes=(Edit(Admission.swamped, "known.has_swamped or each in self._strange", "each in self._strange"),),
        place=ByTest(f"{DOOR}::test_who_sends_very_many_frames_again_is_ended_whole"),
    ),
    Mutant(
        name="an engine is ended for its neighbour's frames",
        rule="far too many frames",
        broken="an engine loses its links because of one message of somebody else behind the same address",
        changes=(Edit(Admission.swamped, "known.has_swamped or each in self._strange", "True"),),
        place=ByTest(f"{CORE}::test_who_sends_far_too_many_frames_is_shut_out_and_so_are_its_strangers"),
    ),
    Mutant(
        name="who has gone is not shut out",
        rule="far too many frames",
        broken="whoever sends very many frames, leaves and connects again is let in each time",
        changes=(
            Edit(
                Doorman.swamped,
                "cut_off = self._admission.swamped(number, address, now_ns)",
                "cut_off = self._admission.swamped(number, address, now_ns) if number else []",
            ),
        ),
        place=ByTest(f"{DOOR}::test_who_sends_very_many_frames_and_leaves_is_shut_out"),
    ),
    Mutant(
        name="messages that wait are without end",
        rule="a message has to end",
        broken="after a pause of the loop engines are ended whose messages nobody has taken yet",
        changes=(Edit(Doorman.look, "if self._taken > TURNS * len(self._connections):", "if True:"),),
        place=ByTest(f"{DOOR}::test_several_messages_of_one_engine_that_wait_are_not_one_without_end"),
    ),
    Mutant(
        name="engines whose messages wait share a bound",
        rule="a message has to end",
        broken="after a pause of the loop the busiest of many engines is ended for all of their messages",
        changes=(
            Edit(
                Admission.measured,
                "self._set_unfinished(known, 0 if known.is_heard else counts_bytes)",
                "self._set_unfinished(known, counts_bytes)",
            ),
        ),
        place=ByTest(f"{CORE}::test_engines_that_are_heard_share_no_bound"),
    ),
    Mutant(
        name="what comes beside messages adds up",
        rule="a message has to end",
        broken="a connection whose other end asks now and then whether we are there is ended after weeks",
        changes=(
            Edit(
                Admission.measured,
                "known.finished_bytes = max(known.finished_bytes, known.measured_bytes)",
                "pass",
            ),
        ),
        place=ByTest(f"{CORE}::test_what_comes_beside_messages_does_not_add_up"),
    ),
    Mutant(
        name="a message that waited is taken for one that came later",
        rule="a message has to end",
        broken="in a flood of whole messages, what has come of one without end is forgotten again and again",
        changes=(Edit(Admission.measured, "if untaken is Untaken.NONE:", "if True:"),),
        place=ByTest(f"{CORE}::test_a_message_that_waited_ends_nothing_that_came_behind_it"),
    ),
    Mutant(
        name="strangers are let in while nobody is heard",
        rule="what comes while nobody is heard",
        broken="whoever has many addresses sends one message of very many frames after the other: no memory is left",
        changes=(Edit(Doorman.swamped, "self._is_deaf = True", "pass"),),
        place=ByTest(f"{DOOR}::test_nobody_is_let_in_while_nobody_is_heard"),
    ),
    Mutant(
        name="the largest alone is ended while nobody is heard",
        rule="what comes while nobody is heard",
        broken="of a thousand connections each takes the place of the one that was ended, and its messages stay",
        changes=(
            Edit(
                Admission.measured,
                "self._end_most() if untaken is Untaken.ALL else self._end_largest(now_ns)",
                "self._end_largest(now_ns)",
            ),
        ),
        place=ByTest(f"{CORE}::test_what_comes_while_nobody_is_heard_is_bounded"),
    ),
    Mutant(
        name="what was left counts for nothing",
        rule="what comes while nobody is heard",
        broken="each connection sends what it may and ends: its messages stay, and the next one does the same",
        changes=(Edit(Admission.closed, "self._left_bytes += known.unfinished_bytes", "pass"),),
        place=ByTest(f"{CORE}::test_what_comes_while_nobody_is_heard_is_bounded"),
    ),
    Mutant(
        name="what came behind a message is forgotten",
        rule="a message has to end",
        broken="a word, and then a message without end, over each of a thousand connections use up the memory",
        changes=(Edit(Admission.taken, "known.finished_bytes += wire_bytes", "known.finished_bytes = 1 << 60"),),
        place=ByTest(f"{CORE}::test_what_has_come_behind_a_whole_message_is_not_done_with_it"),
    ),
    Mutant(
        name="leases cost nothing",
        broken="a message of 512 leases counts as much as one of a single lease",
        changes=(Edit(LeaseKeeper._serve_control, "MESSAGE_UNITS + len(message.leases)", "MESSAGE_UNITS"),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_who_sends_pays_for_each_lease_and_for_garbage"),
    ),
    Mutant(
        name="length costs nothing",
        broken="a message of two megabytes that is none counts as much as one of a few bytes",
        changes=(Edit(LeaseKeeper._serve_control, "units_to_decode(asked.frames_untrusted)", "0"),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_who_sends_pays_for_the_length_of_what_is_sent"),
    ),
    Mutant(
        name="checksums cost nothing",
        broken="a megabyte of checksums counts as much as none",
        changes=(Edit(LeaseKeeper._serve_control, "MESSAGE_UNITS + units_to_send(frames)", "MESSAGE_UNITS"),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_who_asks_for_checksums_pays_for_the_length_of_the_answer"),
    ),
    Mutant(
        name="one tool asks for all",
        broken="the questions of one tool leave no room for those of another",
        changes=(Edit(Inspector.ask, " and of_this_one < QUESTIONS_OF_ONE_MAX", ""),),
        place=ByTest("tests/actors/test_inspection.py::test_one_tool_leaves_room_for_another"),
    ),
    Mutant(
        name="a list is made again for each answer",
        broken="what lives is not told when older ones end between two answers to a tool",
        changes=(
            Edit(
                Inspector._answer,
                "if kept is not None and (question.first or question.number == kept.number):",
                "if False:",
            ),
            Edit(
                Inspector._answer,
                "first, source = 0, await self._source(question)",
                "first, source = question.first, await self._source(question)",
            ),
        ),
        place=ByTest(
            "tests/actors/test_inspection.py::test_what_lives_all_the_while_is_told_whatever_ends_between_two_answers"
        ),
    ),
)
