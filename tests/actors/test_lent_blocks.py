"""What P has lent comes back: whatever floods it, whatever crashes, and whatever the request is called."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
import trio

from connector.config import ConnectorOptions
from connector.observe.catalogue import LATE_NOTIFICATIONS
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.protocol import SendEnded
from connector.runtime.connections import Connections
from connector.wire.control import Release, Released, decode_answer, encode_request
from statemachine.lease import LeaseName
from tests.actors.engines import HELD_SECONDS, HOST, LEASE_SECONDS, Engine, engine, lend_by_all, until
from tests.actors.stranger import stranger
from tests.actors.test_peers import reads
from tests.actors.test_pull import run

FLOOD = (1 << 16) + 1
"""Notifications that wait: more than any bound on what comes from outside."""

FLOODS = 12
"""Whether a grant comes when every place is taken is a matter of the order in which trio runs its tasks."""

BRIEF = ConnectorOptions(kv_lease_duration=0.3)

ODD_IDS = ["HB:x", "HB:", "a,b", ",", "a:7", "cmpl-7,0-1"]


async def ended(p: Engine, names: list[str], awaited: int, seconds: float = 30.0) -> list[str]:
    """Which of these leases have ended by then, or when so many have."""
    with trio.move_on_after(seconds):
        while sum(p.sent(name) is not None for name in names) < awaited:
            await trio.sleep(0.01)
    return [name for name in names if p.sent(name)]


def test_no_grant_is_lost_in_a_flood_of_notifications() -> None:
    """Scenario 75. A lease whose grant was dropped has no deadline: its blocks never come back."""

    async def test() -> None:
        async with engine("p", serves=True, options=BRIEF) as p:
            names = [f"lent-{number}" for number in range(3 * FLOODS)]
            for number, name in enumerate(names):
                if number % 3 == 0:
                    for _ in range(FLOOD):
                        p.hear("stranger", b"?")
                p.lend(name)
                await trio.lowlevel.checkpoint()  # so that grants come before, between and after what the actors do
            found = await ended(p, names, len(names))
            assert found == names, f"{sorted(set(names) - set(found))} are lent for ever"

    run(test)


def test_a_crash_in_one_lease_costs_no_other_its_deadline() -> None:
    """Scenario 76. All are due before any of them is looked at."""

    async def test() -> None:
        async with engine("p", serves=True, options=BRIEF) as p:
            names = [f"lent-{number}" for number in range(6)]
            for name in names:
                p.lend(name)
            p.events.breaks_on = SendEnded
            await until(lambda: all("held" in p.trace.path("lease", name) for name in names))
            time.sleep(0.4)
            found = await ended(p, names, len(names) - 1)
            assert p.events.breaks_on is None, "nothing has crashed"
            assert len(found) >= len(names) - 1, f"only {found} of {names} have ended"

    run(test)


@pytest.mark.parametrize("request_id", ODD_IDS)
def test_a_release_by_a_built_in_engine_is_one_whatever_the_request_is_called(request_id: str) -> None:
    """Its text is `<request id>:<consumers>`, and may begin as a heartbeat does."""

    async def test() -> None:
        async with engine("p", serves=True) as p:
            p.lend(request_id)
            with stranger() as builtin:
                builtin.notify(builtin.meet(p.port.agent_metadata), f"{request_id}:1".encode())

                def released() -> SendEnded | None:
                    builtin.progress()
                    return p.sent(request_id)

                assert not (await until(released)).expired

    run(test)


def test_a_lease_is_held_and_released_whatever_the_request_is_called() -> None:
    """By an engine of ours, for longer than it would last. All at once, as each takes that long."""

    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS)
        async with engine("p", serves=True, options=options) as p, engine("d", options=options) as d:
            loans = {request_id: lend_by_all([p], request_id) for request_id in ODD_IDS}
            for number, loan in enumerate(loans.values()):
                d.wait_for(f"a-{number}", loan, p.address)
            await trio.sleep(HELD_SECONDS)
            ended = [request_id for request_id in ODD_IDS if p.sent(request_id) is not None]
            assert ended == [], "leases have ended although D waits"
            for number, (request_id, loan) in enumerate(loans.items()):
                d.release_unread(f"a-{number}", p, remote_request_id=loan.request_id)
                assert not (await until(lambda request_id=request_id: p.sent(request_id))).expired
                others = [each for each in ODD_IDS[number + 1 :] if p.sent(each) is not None]
                assert others == [], f"released with {request_id}"

    run(test)


def test_what_is_released_already_is_not_counted_as_late() -> None:
    """The parameters of a request come a second time, and D needs none of the blocks: it has them cached."""

    async def test() -> None:
        async with engine("p", serves=True) as p, engine("d") as d:
            loan = lend_by_all([p], "remote-a")
            d.borrow("first", loan, p.address, [1], [1])
            assert (await until(lambda: d.received("first"))).failure is None
            await until(lambda: p.sent("remote-a"))
            for number in range(3):
                d.release_unread(f"again-{number}", p, remote_request_id=loan.request_id)
            await trio.sleep(0.3)
            taken = p.figures.take()
            assert taken is None or LATE_NOTIFICATIONS.key() not in taken.counts
            assert p.failures == []

    run(test)


def test_what_an_engine_holds_is_not_freed_by_the_word_of_a_stranger() -> None:
    """Scenario 19: anybody who has P's metadata can name any request, once or often, for as many as he likes. What he
    can do is have it lent until its time is over."""

    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS)
        async with engine("p", serves=True, options=options) as p, engine("d", options=options) as d:
            with stranger() as liar:
                agent = liar.meet(p.port.agent_metadata)
                loan = lend_by_all([p], "remote-a")
                p.memory[:, 1] = 7
                d.wait_for("a", loan, p.address)
                await until(lambda: d.trace.path("hold", "remote-a/0")[-1:] == ["held"])
                for word in (b"remote-a:1", b"remote-a:1", b"remote-a:2", b"HB:remote-a"):
                    liar.notify(agent, word)
                with trio.move_on_after(1.0):
                    while True:
                        liar.progress()
                        await trio.sleep(0.01)
            assert p.sent("remote-a") is None, "freed while D waits for it"
            d.borrow("a", loan, p.address, [2], [1])
            assert (await until(lambda: d.received("a"))).failure is None
            assert (d.blocks([2]) == 7).all()
            await until(lambda: p.sent("remote-a"))

    run(test)


def test_two_engines_of_one_id_do_not_release_for_each_other() -> None:
    """Replicas of a D whose engine id is pinned, and a router that tries again elsewhere: one gives the request up, and
    the other is still to read."""

    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS)
        async with (
            engine("p", serves=True, options=options) as p,
            engine("d", options=options) as one,
            engine("d", options=options) as other,
        ):
            loan = lend_by_all([p], "remote-a")
            p.memory[:, 1] = 7
            for each in (one, other):
                each.wait_for("a", loan, p.address)
                await until(lambda each=each: each.trace.path("hold", "remote-a/0")[-1:] == ["held"])
            one.release_unread("a", p, remote_request_id=loan.request_id)
            await until(lambda: one.trace.path("hold", "remote-a/0")[-1:] == ["released"])
            assert p.sent("remote-a") is None, "freed, and the other one was told that it is held"
            other.borrow("a", loan, p.address, [2], [1])
            assert (await until(lambda: other.received("a"))).failure is None
            assert (other.blocks([2]) == 7).all()
            assert not (await until(lambda: p.sent("remote-a"))).expired

    run(test)


def test_a_late_release_of_who_was_evicted_ends_nothing_that_is_held_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on its way, over a connection that is closed, while P is evicted on D, met again, and asked for the same
    blocks: whoever sends them the same parameters again."""
    late: list[bytes] = []

    def hold_up(connections: Connections, number: int, rank: int, leases: tuple[LeaseName, ...]) -> None:
        late.append(encode_request(Release(**connections._sender(number, rank), leases=leases)))

    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS, peer_limit=1)
        async with (
            engine("p", serves=True, options=options) as p,
            engine("other", serves=True) as other,
            engine("d", options=options) as d,
        ):
            loan = lend_by_all([p], "remote-a")
            d.wait_for("a", loan, p.address)
            await until(lambda: d.trace.path("hold", "remote-a/0")[-1:] == ["held"])
            with monkeypatch.context() as patch:
                patch.setattr(Connections, "release", hold_up)
                d.release_unread("a", p, remote_request_id=loan.request_id)
                await until(lambda: late)
                await reads(d, other, "x")
                await until(lambda: d.trace.path("peer", "p")[-1] == "gone")
            d.wait_for("b", loan, p.address)
            await until(lambda: d.trace.path("hold", "remote-a/0")[-1:] == ["held"])
            with closing(ZmqSideChannel()) as channel:
                link = await channel.open_link(HOST, p.control.port)
                link.send(late[0])
                assert decode_answer(await link.receive()) == Released(leases=(loan,))
            assert p.sent("remote-a") is None, "freed while D waits for it"
            d.release_unread("b", p, remote_request_id=loan.request_id)
            assert not (await until(lambda: p.sent("remote-a"))).expired

    run(test)


def test_what_an_engine_holds_is_not_released_by_a_stranger_who_knows_its_id() -> None:
    """Engine ids stand in logs and in what tools are told."""

    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=LEASE_SECONDS)
        async with engine("p", serves=True, options=options) as p, engine("d", options=options) as d:
            loan = lend_by_all([p], "remote-a")
            d.wait_for("a", loan, p.address)
            await until(lambda: d.trace.path("hold", "remote-a/0")[-1:] == ["held"])
            with closing(ZmqSideChannel()) as channel:
                link = await channel.open_link(HOST, p.control.port)
                for incarnation in ("", "0" * 32):
                    forged = Release(engine_id="d", rank=0, ranks=1, leases=(loan,), incarnation=incarnation)
                    link.send(encode_request(forged))
                    assert decode_answer(await link.receive()) == Released(leases=(loan,))
            assert p.sent("remote-a") is None, "freed while D waits for it"
            d.release_unread("a", p, remote_request_id=loan.request_id)
            assert not (await until(lambda: p.sent("remote-a"))).expired

    run(test)
