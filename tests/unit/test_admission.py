"""Who may stay connected and who is heard: floods, crowds, messages without end, and who is left alone by them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from statemachine import admission
from statemachine.admission import Admission, AdmissionLimits, AdmissionRates, CutOff, Untaken, Verdict
from tests.unit.properties import on_any_machine

SECOND = 1_000_000_000
MB = 1 << 20

RATES = AdmissionRates(
    unfinished_bytes_total_max=25 * MB,
    common_units=100,
    common_units_per_second=100,
    newcomer_units=4,
    own_units=40,
    own_units_per_second=10,
    dropped_max=5,
    connects=20,
    connects_per_second=2,
    shut_out_ns=SECOND,
    shut_out_ns_max=8 * SECOND,
    addresses_max=4,
)
LIMITS = AdmissionLimits(connections_max=8, unfinished_bytes_max=10 * MB, waiting_bytes_max=5 * MB, rates=RATES)


class Door:
    """An admission, the connections that were made, and those that were cut off."""

    def __init__(self, **changes: Any) -> None:
        self.core = Admission(replace(LIMITS, rates=replace(RATES, **changes)))
        self.numbers = itertools.count(1)
        self.now_ns = 0
        self.cut_off: list[CutOff] = []

    def open(self, address: str = "stranger") -> int:
        number = next(self.numbers)
        self.cut_off += self.core.opened(number, address, self.now_ns)
        return number

    def open_many(self, count: int, address: str = "stranger") -> list[int]:
        return [self.open(address) for _ in range(count)]

    def says(self, connection: int, units: int = 1, *, understood: bool = True, wire_bytes: int = 0) -> Verdict:
        """A message; served if it is heard."""
        verdict = self.core.arrived(connection, self.now_ns)
        self.core.taken(connection, wire_bytes)
        if verdict is Verdict.SERVE:
            self.core.served(connection, units, understood=understood, now_ns=self.now_ns)
        elif verdict is Verdict.CUT_OFF:
            self.cut_off += self.core.flooded(connection, self.now_ns)
        return verdict

    def flood(self, connection: int) -> list[Verdict]:
        """Until it is cut off."""
        verdicts = []
        while connection not in {each.connection for each in self.cut_off}:
            verdicts.append(self.says(connection))
        return verdicts

    def measure(
        self, received: Iterable[tuple[int, int]], untaken: Untaken = Untaken.NONE, unread_bytes: int = 0
    ) -> list[CutOff]:
        sizes = [(connection, received_bytes, unread_bytes) for connection, received_bytes in received]
        cut_off = self.core.measured(sizes, self.now_ns, untaken)
        self.cut_off += cut_off
        return cut_off

    def pass_seconds(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND)


def test_a_flood_is_served_as_far_as_it_goes_then_dropped_then_ended() -> None:
    door = Door()
    flooder = door.open()
    verdicts = door.flood(flooder)
    served = RATES.common_units + RATES.newcomer_units
    assert verdicts == [Verdict.SERVE] * served + [Verdict.DROP] * RATES.dropped_max + [Verdict.CUT_OFF]
    assert door.cut_off == [CutOff(flooder, "stranger", admission.FLOOD)]
    assert len(door.core) == 0


def test_who_was_there_before_is_heard_in_a_flood() -> None:
    """It has an allowance that others cannot use up, and it comes back."""
    door = Door()
    engine = door.open("engine")
    door.pass_seconds(10)
    flooder = door.open("flooder")
    assert set(door.flood(flooder)) == set(Verdict)
    assert [door.says(engine) for _ in range(RATES.own_units)] == [Verdict.SERVE] * RATES.own_units
    for _ in range(20):
        door.pass_seconds(0.5)
        again = door.open("another")
        door.flood(again)
        assert [door.says(engine) for _ in range(4)] == [Verdict.SERVE] * 4
    assert {each.address for each in door.cut_off} == {"flooder", "another"}


def test_the_dropped_are_counted() -> None:
    door = Door(common_units=0, common_units_per_second=0, newcomer_units=0, own_units_per_second=0)
    flooder = door.open()
    verdicts = [door.says(flooder) for _ in range(RATES.dropped_max + 1)]
    assert verdicts == [Verdict.DROP] * RATES.dropped_max + [Verdict.CUT_OFF]


def test_what_was_dropped_long_ago_is_forgiven() -> None:
    """A connection lasts for months: an engine that is not heard in a moment of each flood is none that goes on."""
    door = Door()
    engine = door.open("engine")
    for _ in range(10):
        door.pass_seconds(3600)
        door.flood(door.open("flooder"))
        while door.says(engine, units=5) is Verdict.SERVE:
            pass
    assert {each.address for each in door.cut_off} == {"flooder"}


def test_a_newcomer_is_heard_in_a_flood() -> None:
    """As often as a handshake needs."""
    door = Door()
    door.flood(door.open("flooder"))
    engine = door.open("engine")
    assert [door.says(engine) for _ in range(RATES.newcomer_units)] == [Verdict.SERVE] * RATES.newcomer_units
    assert door.says(engine) is Verdict.DROP


def test_a_message_costs_what_it_has_cost() -> None:
    """One of many leases counts as so many."""
    door = Door()
    asker = door.open()
    assert door.says(asker, units=RATES.common_units) is Verdict.SERVE
    assert door.says(asker, units=1_000) is Verdict.SERVE
    assert door.says(asker) is Verdict.DROP
    door.pass_seconds(0.5)  # the common allowance is back, and the debt is its own
    assert door.says(asker) is Verdict.SERVE


def test_allowances_have_a_top() -> None:
    door = Door()
    engine = door.open()
    door.pass_seconds(3600)
    served = [each for each in door.flood(engine) if each is Verdict.SERVE]
    assert len(served) == RATES.common_units + RATES.own_units


def test_the_oldest_silent_connection_makes_room() -> None:
    door = Door()
    engine = door.open()  # behind the same address
    door.says(engine)
    silent = door.open_many(LIMITS.connections_max - 1)
    door.open_many(3, "late")
    assert [each.connection for each in door.cut_off] == silent[:3]
    assert {each.why for each in door.cut_off} == {admission.TOO_MANY}
    assert len(door.core) == LIMITS.connections_max


def test_what_was_not_understood_is_no_word() -> None:
    door = Door()
    engine = door.open()
    door.says(engine)
    strangers = door.open_many(LIMITS.connections_max - 1)
    for each in strangers:
        door.says(each, understood=False)
    door.open("late")
    assert [each.connection for each in door.cut_off] == strangers[:1]


def test_of_those_who_speak_the_largest_crowd_makes_room() -> None:
    """In it, the one that has been silent for longest; who is alone at its address stays."""
    door = Door()
    engine = door.open("engine")
    door.says(engine)
    crowd = door.open_many(LIMITS.connections_max - 1, "crowd")
    for each in [*crowd, crowd[0]]:
        door.says(each)
    for name in ("late", "later"):
        door.says(door.open(name))
    assert [each.connection for each in door.cut_off] == crowd[1:3]


def test_without_descriptors_the_oldest_stranger_makes_room() -> None:
    door = Door()
    assert door.core.no_descriptor_left() == []
    silent = door.open()
    assert door.core.no_descriptor_left() == [CutOff(silent, "stranger", admission.NO_DESCRIPTORS)]
    assert len(door.core) == 0
    again, later = door.open(), door.open()  # it was not shut out
    assert [each.connection for each in door.core.no_descriptor_left()] == [again]
    assert [each.connection for each in door.core.no_descriptor_left()] == [later]


def test_without_descriptors_no_engine_makes_room() -> None:
    """Somebody else has used them up, and whoever knocks may be anybody."""
    door = Door()
    for each in door.open_many(3, "crowd"):
        door.says(each)
    assert door.core.no_descriptor_left() == []


def test_a_message_without_end_is_ended() -> None:
    door = Door()
    endless, engine = door.open(), door.open("engine")
    received = 0
    door.says(endless)
    door.measure([(endless, 0)])
    while not door.cut_off:
        received += 4 * MB
        door.says(engine, wire_bytes=4 * MB)
        door.measure([(endless, received), (engine, received)])
    assert door.cut_off == [CutOff(endless, "stranger", admission.ENDLESS)]
    assert received == 12 * MB


def test_what_the_transport_has_not_read_is_no_message_without_end() -> None:
    """Its thread had no turn: what has come meanwhile may be many whole messages."""
    door = Door()
    engine = door.open("engine")
    door.says(engine)
    door.measure([(engine, 0)])
    received = LIMITS.unfinished_bytes_max + admission.HANDSHAKE_BYTES_MAX + MB
    assert door.measure([(engine, received)], unread_bytes=MB) == []
    assert door.measure([(engine, received + 1)], unread_bytes=MB) == [CutOff(engine, "engine", admission.ENDLESS)]


def test_what_was_not_read_when_nothing_waited_is_not_taken_for_whole() -> None:
    """Behind a small message there may be the beginning of one without end, which the transport reads afterwards."""
    door = Door()
    stranger = door.open()
    endless = LIMITS.unfinished_bytes_max + LIMITS.waiting_bytes_max + admission.HANDSHAKE_BYTES_MAX + 1
    assert door.measure([(stranger, 100 + endless)], unread_bytes=endless) == []
    door.says(stranger, wire_bytes=100)
    assert door.measure([(stranger, 100 + endless)]) == [CutOff(stranger, "stranger", admission.ENDLESS)]


def test_what_the_transport_has_not_read_is_counted_together_only_while_it_is_full() -> None:
    """It reads it in a moment, and hands out what is whole; while nobody is taken from it cannot."""
    door = Door()
    engines = door.open_many(3, "engine")
    unread_bytes = 9 * MB
    assert 3 * unread_bytes > RATES.unfinished_bytes_total_max
    sizes = [(each, unread_bytes + admission.HANDSHAKE_BYTES_MAX) for each in engines]
    assert door.measure(sizes, Untaken.SOME, unread_bytes=unread_bytes) == []
    assert door.measure(sizes, Untaken.ALL, unread_bytes=unread_bytes) == [
        CutOff(each, "engine", admission.UNHEARD) for each in engines
    ]


def test_whole_messages_may_wait_behind_one_that_was_taken() -> None:
    """Until the next time that it is measured: by then they have been taken, or more of them."""
    door = Door()
    busy, still = door.open(), door.open()
    waits = LIMITS.unfinished_bytes_max + LIMITS.waiting_bytes_max
    for turn in range(1, 5):
        door.says(busy, wire_bytes=MB)
        assert door.measure([(busy, turn * MB + waits)], Untaken.SOME) == []
    assert door.measure([(busy, 4 * MB + waits)]) == [CutOff(busy, "stranger", admission.ENDLESS)]
    door.says(still, wire_bytes=MB)
    received = MB + waits + admission.HANDSHAKE_BYTES_MAX + 1
    assert door.measure([(still, received)]) == [CutOff(still, "stranger", admission.ENDLESS)]


def test_in_a_flood_of_nobody_who_sends_much_and_says_nothing_is_ended_at_once() -> None:
    door = Door(common_units=0, common_units_per_second=0)
    quiet, unheard = door.open("engine"), door.open()
    for _ in range(RATES.dropped_max + 1):
        assert door.says(0) is Verdict.DROP
    unheard_bytes_max = admission.HANDSHAKE_BYTES_MAX + admission.UNHEARD_BYTES_IN_A_FLOOD
    sizes = [(quiet, 100), (unheard, unheard_bytes_max + 1)]
    assert door.measure(sizes) == [CutOff(unheard, "stranger", admission.ENDLESS)]


def test_many_messages_without_end_share_a_bound() -> None:
    door = Door()
    many = door.open_many(3)
    for each in many:
        door.says(each)
    door.measure((each, 0) for each in many)
    assert door.measure((each, 8 * MB) for each in many) == []
    sizes = dict(zip(many, (8 * MB, 10 * MB, 9 * MB), strict=True))
    assert [each.connection for each in door.measure(sizes.items())] == [many[1]]


def test_who_is_not_measured_again_counts_as_before() -> None:
    """Only those are measured over whose connections something has come."""
    door = Door()
    quiet, heard, gone, last = door.open_many(4)
    for each in (quiet, heard, gone):
        assert door.measure([(each, 8 * MB)]) == []
    door.says(heard, wire_bytes=8 * MB)
    door.core.closed(gone)
    assert door.measure([(last, 9 * MB)]) == []
    assert door.measure([(heard, 8 * MB)]) == []
    assert door.measure([(heard, 8 * MB + 9 * MB)]) == [CutOff(last, "stranger", admission.ENDLESS)]
    assert door.measure([(heard, 0)]) == [], "it has ended, and nothing is known of it"


def test_what_has_come_behind_a_whole_message_is_not_done_with_it() -> None:
    """Whoever says a word and then something without end, over one connection after the other, would be allowed what
    came between two measurements over each of them."""
    door = Door()
    many = door.open_many(4)
    for each in many:
        door.says(each, wire_bytes=100)
        for _ in range(2):
            door.measure([(each, 100 + 8 * MB)])
    assert len(door.cut_off) == 1


def test_engines_that_are_heard_share_no_bound() -> None:
    """After a moment in which nobody was heard, whole messages of each of many engines wait."""
    door = Door()
    engines = [door.open(f"engine {number}") for number in range(LIMITS.connections_max)]
    for turn in range(1, 4):
        for each in engines:
            door.says(each, wire_bytes=MB)
        door.measure([(each, (turn + 8) * MB) for each in engines], Untaken.SOME)
    assert door.cut_off == []


def test_what_comes_while_nobody_is_heard_is_bounded() -> None:
    """Who was ended leaves what it has sent. Whoever has sent but little stays, and nobody is shut out for it."""
    door = Door()
    first, second, third, quiet = (door.open(name) for name in ("first", "second", "third", "quiet"))
    few = admission.HANDSHAKE_BYTES_MAX + admission.FEW_BYTES
    sizes = {first: 10 * MB, second: 9 * MB, quiet: few}
    assert door.measure(sizes.items(), Untaken.ALL) == []
    door.core.closed(first)
    assert door.measure([(second, 10 * MB), (third, 4 * MB)], Untaken.ALL) == []
    assert door.measure([(third, 6 * MB)], Untaken.ALL) == [
        CutOff(second, "second", admission.UNHEARD),
        CutOff(third, "third", admission.UNHEARD),
    ]
    assert [door.core.is_shut_out(name, door.now_ns) for name in ("second", "third")] == [False, False]
    assert door.measure([(quiet, few)], Untaken.ALL) == []
    again = door.open("again")
    assert door.measure([(again, few + 1)], Untaken.ALL) == [CutOff(again, "again", admission.UNHEARD)]
    assert door.measure([], Untaken.SOME) == []
    again = door.open("again")
    assert door.measure([(again, few + 1)], Untaken.ALL) == [], "what they have left was taken"


def test_what_comes_beside_messages_does_not_add_up() -> None:
    """A transport asks whether the other end is there, now and then, and a connection lasts for months."""
    door = Door()
    engine = door.open("engine")
    received = 0
    for _ in range(10):
        for _ in range(7):
            received += MB
            assert door.measure([(engine, received)]) == []
        received += 100
        door.says(engine, wire_bytes=100)
        assert door.measure([(engine, received)]) == []


def test_a_message_that_waited_ends_nothing_that_came_behind_it() -> None:
    """It had come by the time when its connection was measured: what has come by then may be of the next one."""
    door = Door()
    stranger = door.open()
    unfinished = LIMITS.unfinished_bytes_max + admission.HANDSHAKE_BYTES_MAX + 1
    door.says(stranger, wire_bytes=100)
    door.measure([(stranger, 200 + unfinished)], Untaken.SOME)
    door.says(stranger, wire_bytes=100)
    assert door.measure([(stranger, 200 + unfinished)]) == []
    assert door.measure([(stranger, 200 + unfinished)]) == [CutOff(stranger, "stranger", admission.ENDLESS)]


def test_a_message_of_somebody_else_gives_no_credit() -> None:
    """A connection whose descriptor was another's before may be taken for that one for a moment."""
    door = Door()
    stranger = door.open()
    door.says(stranger, wire_bytes=9 * MB)
    assert door.measure([(stranger, 100)]) == []
    assert door.measure([(stranger, 100)]) == []
    endless = 100 + LIMITS.unfinished_bytes_max + admission.HANDSHAKE_BYTES_MAX
    assert door.measure([(stranger, endless)]) == []
    assert door.measure([(stranger, endless + 1)]) == [CutOff(stranger, "stranger", admission.ENDLESS)]


def test_who_sends_far_too_many_frames_is_shut_out_and_so_are_its_strangers() -> None:
    """At once for as long as there is. An engine behind the same address keeps its link."""
    door = Door()
    engine, stranger, swamper = door.open("same"), door.open("same"), door.open("same")
    door.says(engine)
    door.says(swamper)
    other = door.open("other")
    cut_off = door.core.swamped(swamper, "same", door.now_ns)
    assert cut_off == [CutOff(each, "same", admission.MANY_FRAMES) for each in (swamper, stranger)]
    door.pass_seconds(RATES.shut_out_ns_max / SECOND - 0.1)
    assert door.core.is_shut_out("same", door.now_ns)
    assert door.says(engine) is Verdict.SERVE
    assert door.says(other) is Verdict.SERVE
    door.pass_seconds(0.1)
    assert not door.core.is_shut_out("same", door.now_ns)


def test_who_sends_far_too_many_frames_again_loses_all_of_its_connections() -> None:
    """It could have made thousands before, and each message that it sends keeps everybody waiting."""
    door = Door()
    many = door.open_many(4)
    for each in many:
        door.says(each)
    assert [each.connection for each in door.core.swamped(many[1], "stranger", door.now_ns)] == [many[1]]
    door.pass_seconds(RATES.shut_out_ns_max / SECOND + 1)
    again = [each.connection for each in door.core.swamped(many[3], "stranger", door.now_ns)]
    assert again == [many[3], many[0], many[2]]
    assert len(door.core) == 0


def test_far_too_many_frames_are_forgiven_after_long() -> None:
    door = Door()
    many = door.open_many(3)
    for each in many:
        door.says(each)
    door.pass_seconds(3600)
    for each in many[:2]:
        assert [cut.connection for cut in door.core.swamped(each, "stranger", door.now_ns)] == [each]
        door.pass_seconds(2 * RATES.shut_out_ns_max / SECOND + 1)
    assert door.says(many[2]) is Verdict.SERVE


def test_who_sends_far_too_many_frames_and_leaves_is_shut_out_all_the_same() -> None:
    """What it has sent is handed out when its connection is gone."""
    door = Door()
    assert door.core.swamped(0, "stranger", door.now_ns) == []
    refused = door.open()
    assert door.cut_off == [CutOff(refused, "stranger", admission.SHUT_OUT)]


def test_who_was_cut_off_for_cause_is_shut_out_longer_each_time() -> None:
    door = Door(newcomer_units=0, common_units=0, connects=1_000)

    def seconds_shut_out() -> float:
        connection = door.open()
        door.flood(connection)
        since = door.now_ns
        while door.open() == door.cut_off[-1].connection:
            assert door.cut_off[-1].why == admission.SHUT_OUT
            door.pass_seconds(0.25)
        return (door.now_ns - since) / SECOND

    assert [seconds_shut_out() for _ in range(6)] == [1, 2, 4, 8, 8, 8]
    door.pass_seconds(17)
    assert seconds_shut_out() == 1


def test_others_at_the_address_stay() -> None:
    door = Door()
    engine, flooder = door.open("same"), door.open("same")
    door.pass_seconds(10)
    door.flood(flooder)
    assert door.says(engine) is Verdict.SERVE
    assert [each.connection for each in door.cut_off] == [flooder]
    assert door.open("same") == door.cut_off[-1].connection


def test_an_address_that_only_connects_is_let_in_as_often_as_engines_connect() -> None:
    """And no less often for it: a thousand engines behind one address come back at once."""
    door = Door()
    for _ in range(RATES.connects):
        door.core.closed(door.open())
    assert door.cut_off == []
    refused = door.open_many(30)
    assert door.cut_off == [CutOff(each, "stranger", admission.TOO_OFTEN) for each in refused]
    assert not door.core.is_shut_out("stranger", door.now_ns)
    door.open("engine")
    assert len(door.cut_off) == 30
    door.pass_seconds(1)
    for _ in range(RATES.connects_per_second):
        door.core.closed(door.open())
    assert len(door.cut_off) == 30
    door.open()
    assert len(door.cut_off) == 31


def test_what_a_flood_has_cost_is_owed_for_a_moment() -> None:
    """A decode engine that was there all the time is heard soon after it."""
    door = Door(newcomer_units=0, own_units_per_second=0)
    engine = door.open("engine")
    for _ in range(1000):
        door.core.served(0, 100, understood=False, now_ns=door.now_ns)
    assert door.says(engine) is Verdict.DROP
    door.pass_seconds(RATES.common_units / RATES.common_units_per_second + 0.1)
    assert door.says(engine) is Verdict.SERVE


def test_an_address_pays_for_the_frames_that_it_has_left() -> None:
    """Of connections that have ended, which pay for nothing."""
    door = Door(left_frames=100, left_frames_per_second=10)
    for _ in range(2):
        door.core.left("stranger", 60, door.now_ns)
        assert not door.core.is_shut_out("stranger", door.now_ns)
    door.core.left("stranger", 60, door.now_ns)
    assert door.core.is_shut_out("stranger", door.now_ns)
    assert not door.core.is_shut_out("engine", door.now_ns)
    door.pass_seconds(10)
    door.core.left("stranger", 60, door.now_ns)
    assert not door.core.is_shut_out("stranger", door.now_ns)


def test_what_is_left_of_a_connection_that_has_ended_has_no_allowance_of_its_own() -> None:
    door = Door()
    gone = door.open()
    door.core.closed(gone)
    door.core.closed(gone)
    assert [door.says(gone) for _ in range(RATES.common_units + 3)] == (
        [Verdict.SERVE] * RATES.common_units + [Verdict.DROP] * 3
    )
    assert door.core.flooded(gone, 0) == []
    assert door.measure([(gone, 100 * MB)]) == []
    assert len(door.core) == 0


def test_addresses_are_forgotten_but_none_that_is_connected() -> None:
    door = Door(connects=10_000)
    engine = door.open("engine")
    for number in range(100):
        door.core.closed(door.open(f"stranger {number}"))
    assert len(door.core._addresses) <= RATES.addresses_max
    assert "engine" in door.core._addresses
    door.core.closed(engine)


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "close", "say", "garbage", "measure", "swamp", "no descriptor", "wait"]),
        st.integers(0, 30),
        st.integers(0, 3),
    ),
    max_size=120,
)


@on_any_machine
@given(_STEPS)
def test_whatever_happens_the_limits_hold(steps: list[tuple[str, int, int]]) -> None:
    """Each connection is cut off at most once, never after it has ended, and the tables name the same ones."""
    door = Door()
    ended: set[int] = set()
    received: dict[int, int] = {}
    for what, number, more in steps:
        before = len(door.cut_off)
        match what:
            case "open":
                door.open(f"address {more}")
            case "close":
                if number in door.core._connections:
                    ended.add(number)
                door.core.closed(number)
            case "say" | "garbage":
                door.says(number, units=1 + 20 * more, understood=what == "say")
            case "measure":
                received[number] = received.get(number, 0) + more * 4 * MB
                door.measure(received.items())
            case "swamp":
                known = door.core._connections.get(number)
                address = known.address if known is not None else f"address {more}"
                door.cut_off += door.core.swamped(number, address, door.now_ns)
            case "no descriptor":
                door.cut_off += door.core.no_descriptor_left()
            case "wait":
                door.pass_seconds(more)
        for each in door.cut_off[before:]:
            assert each.connection not in ended
            ended.add(each.connection)
        core = door.core
        assert len(core) <= LIMITS.connections_max
        assert set(core._strange) <= core._connections.keys()
        of_addresses = [each for known in core._addresses.values() for each in known.open]
        assert sorted(of_addresses) == sorted(core._connections)
        assert core._unfinished_bytes == sum(each.unfinished_bytes for each in core._connections.values())
        assert core._unfinished_bytes <= RATES.unfinished_bytes_total_max
