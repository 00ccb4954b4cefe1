"""What the log says of peers, of requests that wait or fail, and of leases that expire: real NIXL and sockets."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import trio

from connector.config import ConnectorOptions
from connector.protocol import PeerAddress
from connector.runtime import wait_notices
from connector.runtime.lease_keeper import LeaseKeeper
from statemachine.failures import DeadlineExceeded
from tests.actors.engines import WarpedClock, engine, lease_of, lend_by_all, parallel_engine, until
from tests.actors.test_peers import failure_of, nobody, reads, rested
from tests.actors.test_pull import run
from tests.rig.network import BlackHole, free_port

SOON_SECONDS = 1.0
PATIENT = ConnectorOptions(handshake_timeout_seconds=20.0)
"""An engine that does not answer is waited for throughout a test."""


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """The lines of one engine so far."""
    caplog.set_level(logging.INFO, logger="vllm.nixl_actor_connector")

    def of(engine_id: str) -> list[str]:
        return [text for record in caplog.records if (text := record.getMessage()).endswith(f"[{engine_id} rank 0]")]

    return of


def test_a_peer_is_connected_lost_and_back(said: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    # Its process ends without a word, as if it were killed.
    monkeypatch.setattr(LeaseKeeper, "leave_now", lambda self: None)

    async def test() -> None:
        options = ConnectorOptions(backoff_initial_seconds=0.1)
        async with engine("d", options=options) as d:
            async with engine("p", serves=True) as p:
                await reads(d, p, "before")
                port, control_port = p.address.port, p.control.port
                assert len(said("d")) == 1
                assert re.match(r"engine p at 127.0.0.1:\d+ \(TP 1\) is connected; the handshake took", said("d")[0])
                for number in range(3):  # a request that is served says nothing
                    await reads(d, p, f"served-{number}")
                assert len(said("d")) == 1
            await until(lambda: len(said("d")) >= 2)
            assert "is lost: ControlLinkLost: " in said("d")[1]
            assert f"(control socket 127.0.0.1:{control_port}: " in said("d")[1]
            d.pull("a", nobody("p", port), [1], [1])  # maybe after an attempt of D's own, to say a release
            await failure_of(d, "a")
            assert "cannot be reached: ConnectionRefused: " in said("d")[2]
            async with engine("p", serves=True, port=port) as again:
                await rested(d, "p")
                await reads(d, again, "after")
                assert re.search(r"is back after \d+\.\d s; the handshake took", said("d")[-1])
                assert len(said("d")) == 4

    run(test)


def test_a_request_that_fails_is_named_with_its_engine_and_its_age(said: Callable[[str], list[str]]) -> None:
    async def test() -> None:
        async with engine("d") as d:
            d.pull("a", nobody("gone", port := free_port()), [1], [1])
            await failure_of(d, "a")
            ((subject, failure),) = d.failures
            assert re.fullmatch(rf"request a, engine gone at 127.0.0.1:{port} \(TP 1\), known for \d+\.\d s", subject)
            assert failure.kind == "ConnectionRefused"

    run(test)


def test_a_request_that_waits_is_said_once(said: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def still_waits(engine_id: str) -> list[str]:
        return [line for line in said(engine_id) if "still waits" in line]

    async def test() -> None:
        with BlackHole() as silent:
            async with engine("p", serves=True) as p, engine("d", options=PATIENT) as d:
                await reads(d, p, "before")  # the first takes longest
                monkeypatch.setattr(wait_notices, "WAIT_SAID_AFTER_SECONDS", SOON_SECONDS)
                d.pull("waits", nobody("hung", silent.port), [1], [1])
                await trio.sleep(SOON_SECONDS / 10)
                began = trio.current_time()
                await reads(d, p, "served")
                was_slow = trio.current_time() - began > 0.9 * SOON_SECONDS  # then it has waited, too
                waiting = await until(lambda: [line for line in still_waits("d") if line.startswith("request waits,")])
                assert len(waiting) == 1
                assert was_slow or still_waits("d") == waiting
                assert waiting[0].startswith("request waits, engine hung at 127.0.0.1:")
                assert re.search(r"still waits: for the handshake with that engine; at most \d+ s longer", waiting[0])
                before = still_waits("d")
                await trio.sleep(2 * SOON_SECONDS)
                assert still_waits("d") == before
                assert d.received("waits") is None

    run(test)


def test_a_request_that_waits_says_how_long_its_state_lasts_at_most(
    said: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof of a lease is waited for as long as a lease, and not for as long as a request may take."""
    options = ConnectorOptions(kv_lease_duration=20, request_timeout_seconds=100)

    async def test() -> None:
        async with engine("p", serves=True, options=options) as p, engine("d", options=options) as d:
            await reads(d, p, "before")
            monkeypatch.setattr(wait_notices, "WAIT_SAID_AFTER_SECONDS", SOON_SECONDS)
            monkeypatch.setattr(LeaseKeeper, "_answer", lambda self, reply_to, answer: None)
            p.lend("remote-waits", [1])
            d.pull("waits", p, [1], [1])
            (waiting,) = await until(lambda: [line for line in said("d") if "still waits" in line])
            found = re.search(r"asked whether it still kept the blocks; at most (\d+) s longer", waiting)
            assert found is not None, waiting
            assert 10 < int(found[1]) <= 20

    run(test)


def test_a_request_whose_time_was_over_when_the_process_went_on_is_not_said_to_wait(
    said: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_notices, "WAIT_SAID_AFTER_SECONDS", SOON_SECONDS)
    clock = WarpedClock()

    async def test() -> None:
        with BlackHole() as silent:
            async with engine("d", options=PATIENT, clock=clock) as d:
                d.pull("late", nobody("hung", silent.port), [1], [1])
                await trio.sleep(SOON_SECONDS / 10)
                clock.leap(2 * PATIENT.request_timeout_seconds)
                failure = await failure_of(d, "late")
                assert isinstance(failure, DeadlineExceeded)
                assert failure.late_seconds > PATIENT.request_timeout_seconds / 2, failure
                assert not [line for line in said("d") if "still waits" in line]

    run(test)


def queued(lines: list[str]) -> list[str]:
    return [line for line in lines if "in vLLM's queue" in line]


def test_a_request_that_waits_in_the_queue_of_vllm_is_said_once(
    said: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again when it waits for its KV, which is another wait."""
    monkeypatch.setattr("connector.runtime.wait_notices.WAIT_SAID_AFTER_SECONDS", SOON_SECONDS)

    async def test() -> None:
        with BlackHole() as silent:
            hung = nobody("hung", silent.port)
            async with engine("d", options=PATIENT) as d:
                d.wait_for("waits", lease_of("remote-waits"), hung)
                d.wait_for("goes", lease_of("remote-goes"), hung)
                d.wait_for("starts", lease_of("remote-starts"), hung)
                # In the same turn: a machine that stands still here does not make them wait.
                d.release_unread("goes", hung)
                d.pull("starts", hung, [2], [2])
                lines = await until(lambda: queued(said("d")))
                assert re.match(
                    rf"request waits, engine hung at 127.0.0.1:{silent.port} \(TP 1\), known for \d+\.\d s still "
                    r"waits: in vLLM's queue, for blocks to load its KV into; "
                    r"what to do: nixl-actor why waits \[d rank 0\]$",
                    lines[0],
                )
                await trio.sleep(2 * SOON_SECONDS)
                assert queued(said("d")) == lines, "it is said once, and of no other"
                d.pull("waits", hung, [1], [1])
                await until(
                    lambda: [line for line in said("d") if line.startswith("request waits") and "at most" in line]
                )
                assert queued(said("d")) == lines

    run(test)


def test_a_request_that_is_named_again_waits_from_then_on(
    said: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connector.runtime.wait_notices.WAIT_SAID_AFTER_SECONDS", 2 * SOON_SECONDS)

    async def test() -> None:
        with BlackHole() as silent:
            hung = nobody("hung", silent.port)
            async with engine("d", options=PATIENT) as d:
                d.wait_for("a", lease_of("remote-a"), hung)
                await trio.sleep(SOON_SECONDS)
                before = queued(said("d"))  # none, unless the machine stood still
                d.release_unread("a", hung)
                d.wait_for("a", lease_of("remote-a"), hung)
                named_again = trio.current_time()
                await until(lambda: len(queued(said("d"))) > len(before))
                assert trio.current_time() - named_again > 1.5 * SOON_SECONDS

    run(test)


def test_of_several_ranks_the_first_says_who_is_in_the_queue(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one queue."""
    monkeypatch.setattr("connector.runtime.wait_notices.WAIT_SAID_AFTER_SECONDS", SOON_SECONDS)
    caplog.set_level(logging.INFO, logger="vllm.nixl_actor_connector")

    async def test() -> None:
        with BlackHole() as silent:
            async with parallel_engine("d", 2, options=PATIENT) as ranks:
                for rank in reversed(ranks):
                    rank.wait_for("waits", lease_of("remote-waits"), nobody("hung", silent.port))
                await until(lambda: queued([record.getMessage() for record in caplog.records]))
                await trio.sleep(SOON_SECONDS)
                (line,) = queued([record.getMessage() for record in caplog.records])
                assert line.endswith("[d rank 0]")

    run(test)


def test_a_lease_that_expires_is_said_on_p(said: Callable[[str], list[str]]) -> None:
    async def test() -> None:
        options = ConnectorOptions(kv_lease_duration=0.3)
        async with engine("p", serves=True, options=options) as p:
            lend_by_all([p], "forgotten")
            await until(lambda: p.sent("forgotten"))
            ((subject, failure),) = p.failures
            assert subject == "request forgotten"
            assert failure.kind == "LeaseExpired"
            assert "no decode engine has asked for it" in str(failure)

    run(test)


def test_the_name_of_a_peer_cannot_forge_a_line(said: Callable[[str], list[str]]) -> None:
    async def test() -> None:
        async with engine("d") as d:
            forged = PeerAddress(engine_id="p\nERROR forged", host="127.0.0.1", port=free_port(), tp_size=1)
            d.pull("a", forged, [1], [1])
            await failure_of(d, "a")
            (line,) = said("d")
            assert line.isprintable()

    run(test)
