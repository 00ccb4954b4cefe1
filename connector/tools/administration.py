"""What tools change in running engines (`connector.wire.administration`); the rest of this package only looks.

    drain    side channel of an engine: begin to drain, and see how far it has come, until it has drained
    meet     control socket of each rank of a decode engine: connect prefill engines, and see until they are

An engine is first asked what it is. One that runs the built-in connector is sent none of these messages, and is an
`AdministrationError`. So is a name that several engines have, as that of a headless Service in Kubernetes: each
question could go to another of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import trio

from connector.addresses import join_address
from connector.ports.gate import ANYBODY, Access
from connector.ports.side_channel import SideChannel, SideChannelError
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.tools.asking import Address, NotAsked, advertisement, ask, engines_behind
from connector.wire import control
from connector.wire.administration import (
    DrainReport,
    Meet,
    MeetReport,
    decode_meet_report,
    decode_report,
    encode_drain,
)
from connector.wire.bounded import DecodeFailed
from connector.wire.handshake import ActorExtension, worker_name

ASK_SECONDS = 5.0
"""For one answer, or less where the caller waits less in all."""
POLL_SECONDS = 0.2
FINAL_STATES = ("met", "own", "unknown")
"""The states of a place after which nothing more is told of it."""


class AdministrationError(Exception):
    """An engine could not be asked, or does not do that."""


def drain(
    addresses: Sequence[Address],
    *,
    waits: bool,
    timeout_seconds: float | None = None,
    show: Callable[[Address, DrainReport], None] = lambda address, report: None,
    access: Access = ANYBODY,
) -> dict[Address, DrainReport | AdministrationError]:
    """Have engines drain, all at once; of each the last thing that it said, or why it could not be asked (any more).

    Args:
        waits: until they have drained. Otherwise until they have begun.
        timeout_seconds: of the wait, and of each question before it; None: the engines bound the wait.
        show: told of each answer.
        access: the keys of the tool.
    """

    seconds = ASK_SECONDS if timeout_seconds is None else min(ASK_SECONDS, timeout_seconds)
    ends: dict[Address, DrainReport | AdministrationError] = {}

    async def drain_one(side_channel: SideChannel, address: Address) -> None:
        try:
            await require_administration(side_channel, address, seconds)
            report = await _ask(side_channel, address, seconds)
            show(address, report)
            with trio.move_on_after(float("inf") if timeout_seconds is None else timeout_seconds):
                while waits and report.state != "drained":
                    await trio.sleep(POLL_SECONDS)
                    report = await _ask(side_channel, address, ASK_SECONDS)
                    show(address, report)
            ends[address] = report
        except AdministrationError as error:
            ends[address] = error

    async def run() -> None:
        side_channel = ZmqSideChannel(access)
        try:
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(drain_one, side_channel, address)
        finally:
            side_channel.close()

    trio.run(run)
    return {address: ends[address] for address in addresses}


def meet(
    address: Address, places: Sequence[str], *, timeout_seconds: float, access: Access = ANYBODY
) -> dict[tuple[int, int], MeetReport]:
    """Have every rank of a decode engine connect the engines at these places, all at once; what each rank said last, by
    pipeline and tensor rank. `timeout_seconds`: of the wait, and of each question before it. Raises
    AdministrationError, of the first rank that could not be asked."""
    seconds = min(ASK_SECONDS, timeout_seconds)
    reports: dict[tuple[int, int], MeetReport] = {}
    failures: list[AdministrationError] = []

    async def meet_on(
        side_channel: SideChannel, rank: tuple[int, int], deadline: float, all_ranks: trio.CancelScope
    ) -> None:
        try:
            reports[rank] = await _meet_on(side_channel, address, rank, places, seconds, deadline)
        except AdministrationError as error:
            failures.append(error)
            all_ranks.cancel()

    async def run() -> None:
        side_channel = ZmqSideChannel(access)
        try:
            actor = await require_administration(side_channel, address, seconds)
            deadline = trio.current_time() + timeout_seconds
            async with trio.open_nursery() as nursery:
                for rank in itertools.product(range(actor.pp_size), range(actor.tp_size)):
                    nursery.start_soon(meet_on, side_channel, rank, deadline, nursery.cancel_scope)
        finally:
            side_channel.close()

    trio.run(run)
    if failures:
        raise failures[0]
    return dict(sorted(reports.items()))


async def require_administration(
    side_channel: SideChannel, address: Address, seconds: float = ASK_SECONDS
) -> ActorExtension:
    """What the first rank of an engine says of it. Raises AdministrationError unless it is one of ours."""
    with _as_administration_error():
        await _require_one_engine(address, seconds)
        said = await advertisement(side_channel, address, (0, 0), seconds)
    if said.error is not None:
        raise AdministrationError(f"the engine at {address} serves no more: {said.error}")
    if said.actor is None:
        raise AdministrationError(f"the engine at {address} runs the built-in connector, which cannot be asked")
    return said.actor


@contextmanager
def _as_administration_error() -> Iterator[None]:
    try:
        yield
    except NotAsked as error:
        raise AdministrationError(str(error)) from error


async def _require_one_engine(address: Address, seconds: float) -> None:
    try:
        with trio.fail_after(seconds):
            behind = await engines_behind(address)
    except trio.TooSlowError as error:
        raise AdministrationError(f"no name server found {address.host} within {seconds:g} s") from error
    if len(behind) > 1:
        listed = ", ".join(map(str, behind))
        raise AdministrationError(f"{address} is {len(behind)} engines; name each that you mean: {listed}")


async def _ask(side_channel: SideChannel, address: Address, seconds: float) -> DrainReport:
    with _as_administration_error():
        frames_untrusted = await ask(side_channel, address, encode_drain(), seconds)
    try:
        return decode_report(frames_untrusted)
    except DecodeFailed as error:
        raise AdministrationError(f"the engine at {address}: {error.detail}") from error


async def _meet_on(
    side_channel: SideChannel,
    address: Address,
    rank: tuple[int, int],
    places: Sequence[str],
    seconds: float,
    deadline: float,
) -> MeetReport:
    """Until one rank has met all of them, or the time is up; `seconds` for each of its answers."""
    with _as_administration_error():
        actor = (await advertisement(side_channel, address, rank, seconds)).actor
    if actor is None:
        raise AdministrationError(f"the engine at {address} said nothing of its worker {worker_name(*rank)}")
    where = join_address(actor.control_host, actor.control_port)
    try:
        with trio.fail_after(seconds):  # its name server may hang
            link = await side_channel.open_link(actor.control_host, actor.control_port, actor.control_key)
        with closing(link):
            while True:
                link.send(control.encode_request(Meet(places=tuple(places))))
                with trio.fail_after(seconds):
                    report = decode_meet_report(await link.receive())
                is_over = all(row.state in FINAL_STATES for row in report.rows)
                if is_over or trio.current_time() + POLL_SECONDS > deadline:
                    return report
                await trio.sleep(POLL_SECONDS)
    except trio.TooSlowError as error:
        raise AdministrationError(
            f"{worker_name(*rank)} of the engine at {address} did not answer at {where} within {seconds:g} s"
        ) from error
    except (SideChannelError, DecodeFailed) as error:
        raise AdministrationError(f"{worker_name(*rank)} of the engine at {address}: {error}") from error
