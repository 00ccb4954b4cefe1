"""Mutants of what goes over the wire, and of what reads it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from connector.runtime import handshake, listener
from connector.runtime.connections import Connections
from connector.wire import control, notifications
from connector.wire.handshake import HandshakeError, HandshakeReply, decode_reply
from connector.wire.notifications import Heartbeat, Notification, Release
from statemachine.failures import WrongEngine
from tests.simulation.faults import Kind
from tests.simulation.mutants.executors import GARBAGE, NOT_AN_ERROR_OF_THE_PRODUCT, REPLACEMENTS, level2
from tests.simulation.mutants.mutant import ByTest, Edit, Mutant, Set, fault


def _parse_without_checks(message: bytes) -> Notification:
    text = message.decode()
    if text.startswith("HB:"):
        return Heartbeat(tuple(text[3:].split(",")))
    request_id, _, consumers = text.rpartition(":")
    return Release(request_id, int(consumers))


def _talk_to_anybody(frames: Sequence[bytes], *, peer: str, address: str, expected_hash: str | None) -> HandshakeReply:
    try:
        return decode_reply(frames, peer=peer, address=address, expected_hash=expected_hash)
    except HandshakeError as error:
        if not isinstance(error.failure, WrongEngine):
            raise
        return decode_reply(frames, peer=error.failure.found, address=address, expected_hash=expected_hash)


async def _run_once(
    name: str, run: Callable[[], Awaitable[None]], log_crash: Callable[[str, BaseException], None]
) -> None:
    try:
        await run()
    except Exception as error:
        log_crash(name, error)


MUTANTS = (
    Mutant(
        name="bad frame kills the listener",
        row=38,
        broken="a malformed handshake request raises in the listener's loop",
        changes=(Set(listener, "BadFrame", NOT_AN_ERROR_OF_THE_PRODUCT),),
        place=level2("health", *GARBAGE),
    ),
    Mutant(
        name="listener not restarted",
        row=31,
        broken="a listener that crashed answers nobody any more",
        changes=(Set(listener, "keep_running", _run_once),),
        place=ByTest("tests/actors/test_listener.py::test_a_listener_that_crashed_serves_on_and_the_crash_is_logged"),
    ),
    Mutant(
        name="notifications unchecked",
        row=38,
        broken="a malformed notification raises in the lease keeper",
        changes=(Set(notifications, "parse_notification", _parse_without_checks),),
        place=level2("health", *GARBAGE),
    ),
    Mutant(
        name="any engine will do",
        row=66,
        broken="a handshake succeeds with whatever engine answers at the address",
        changes=(Set(handshake, "decode_reply", _talk_to_anybody),),
        place=level2("recovery", *REPLACEMENTS, fault(Kind.LONG_QUEUE, "d0", 0.5, 3.0)),
    ),
    Mutant(
        name="release by another name",
        row=53,
        broken="releases name the request as the decode engine calls it",
        changes=(
            Edit(
                Connections.release,
                "leases=leases",
                "leases=tuple(lease._replace(request_id='cmpl-' + lease.request_id) for lease in leases)",
            ),
        ),
        place=level2("handed back"),
    ),
    Mutant(
        name="too many consumers announced",
        row=54,
        broken="a rank says that one rank more of its engine deals with P",
        changes=(Edit(Connections._sender, "ranks[rank].consumers", "ranks[rank].consumers + 1"),),
        place=level2("handed back"),
    ),
    Mutant(
        name="heartbeat for one",
        row=62,
        broken="of all requests that wait for an engine, a heartbeat names only the first",
        changes=(Edit(notifications._heartbeat, 'b",".join(batch)', "batch[0]"),),
        place=ByTest("tests/unit/test_wire_notifications.py::test_heartbeat"),
    ),
    Mutant(
        name="a heartbeat is never a release",
        broken="a text that begins like a heartbeat is read as nothing else",
        changes=(Edit(notifications.parse_notification, "or_release=or_release", "or_release=None"),),
        place=ByTest(
            "tests/unit/test_wire_notifications.py::test_both_readings_of_a_release_whose_id_begins_like_a_heartbeat"
        ),
    ),
    Mutant(
        name="control messages without bound",
        row=75,
        broken="a control message may name any number of leases",
        changes=(Edit(control._require_bounded, "if count > LEASES_PER_MESSAGE_MAX:", "if False:"),),
        place=ByTest("tests/unit/test_wire_control.py::test_out_of_bounds"),
    ),
)
