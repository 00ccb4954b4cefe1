"""Mutants that only engines of several ranks, or caches of several groups or block sizes, can show."""

from __future__ import annotations

from typing import Any

import msgspec

from connector.layout import blocks, copies
from connector.layout.blocks import GroupPair
from connector.runtime import block_tables, peer_actor
from connector.runtime.block_tables import Resolved
from connector.runtime.handshake import Connection, RemoteRank
from connector.runtime.messages import Outcome, ReceiveEnded, StartPull
from connector.runtime.nixl_owner import Quarantine
from connector.runtime.peer_actor import PeerActor
from connector.runtime.request_run import RequestRun
from statemachine import request
from tests.simulation.faults import Kind
from tests.simulation.mutants.actors import emitting
from tests.simulation.mutants.mutant import Mutant, Patch, fault

SEEDS = 30
"""Of which a third is plain."""


def _read_from_one_rank(patch: Patch) -> None:
    resolve = peer_actor.resolve

    def resolve_one(engine_plan: Any, command: StartPull) -> Resolved:
        resolved = resolve(engine_plan, command)
        return msgspec.structs.replace(resolved, reads=resolved.reads[:1])

    patch.attribute(peer_actor, "resolve", resolve_one)


def _end_with_the_first_read(patch: Patch) -> None:
    offer = PeerActor._apply

    def count_one(self: PeerActor, run: RequestRun, event: Any) -> None:
        if isinstance(event, request.PeerReady):
            event = msgspec.structs.replace(event, reads=min(1, event.reads))
        offer(self, run, event)

    patch.attribute(PeerActor, "_apply", count_one)


def _tell_who_was_read(patch: Patch) -> None:
    def read_ranks(self: PeerActor) -> tuple[RemoteRank, ...]:
        connection: Connection | None = self._connection
        assert connection is not None
        return connection.ranks[: len(connection.sources)]

    patch.attribute(PeerActor, "_connected_ranks", read_ranks)


def _speak_for_all_ranks(patch: Patch) -> None:
    encode = peer_actor.encode_release
    patch.attribute(peer_actor, "encode_release", lambda request_id, consumers: encode(request_id, 1))


def _read_the_first_heads(patch: Patch) -> None:
    address = copies._address
    patch.attribute(copies, "_address", lambda region, piece, unit: address(region, piece, piece.start))


def _leave_the_tail(patch: Patch) -> None:
    def without_unfilled(outcome: Outcome) -> Outcome:
        return msgspec.structs.replace(outcome, unfilled=None) if isinstance(outcome, ReceiveEnded) else outcome

    emitting(patch, without_unfilled)


def _take_a_window_for_the_beginning(patch: Patch) -> None:
    patch.attribute(block_tables, "_remote_first", lambda pair, group, command: 0)
    patch.attribute(blocks, "_require_cover", lambda *arguments: None)


def _use_the_first_table_for_all(patch: Patch) -> None:
    tables = block_tables._tables
    first: dict[str, Any] = {}

    def of_the_first(pair: GroupPair, group: Any, command: StartPull) -> Any:
        if group is command.groups[0]:
            first[command.request_id] = group.remote_block_ids
        known = first[command.request_id][-len(group.remote_block_ids) :]
        return tables(pair, msgspec.structs.replace(group, remote_block_ids=known), command)

    patch.attribute(block_tables, "_tables", of_the_first)


def _lift_with_the_first_read(patch: Patch) -> None:
    original = Quarantine.__init__

    def one_read(self: Quarantine, local_block_ids: list[int], open_reads: int, is_active: bool = False) -> None:
        original(self, local_block_ids, min(1, open_reads), is_active)

    patch.attribute(Quarantine, "__init__", one_read)


MUTANTS = (
    Mutant(
        name="one of several sources read",
        row=None,
        broken="where several ranks hold what a rank needs, only the first one is read",
        apply=_read_from_one_rank,
        oracle="bytes",
        seeds=SEEDS,
    ),
    Mutant(
        name="first READ ends the request",
        row=None,
        broken="a request that reads from several ranks is reported when the first READ is complete",
        apply=_end_with_the_first_read,
        oracle="bytes",
        faults=(fault(Kind.READ_SLOW, "d0>p0.1", 0.0, 8.0), fault(Kind.READ_STALL, "d0>p0.1", 1.0, 1.0)),
        seeds=SEEDS,
    ),
    Mutant(
        name="only who was read is told",
        row=None,
        broken="a rank that holds a replica which was read elsewhere never hears that its blocks may be freed",
        apply=_tell_who_was_read,
        oracle="handed back",
        first_seed=5,
        seeds=SEEDS,
    ),
    Mutant(
        name="one rank speaks for all",
        row=None,
        broken="the release of one rank says that no other rank reads the blocks",
        apply=_speak_for_all_ranks,
        oracle="held",
        first_seed=15,
        seeds=SEEDS,
    ),
    Mutant(
        name="every rank reads the first heads",
        row=None,
        broken="where a rank needs a part of what another one holds, it takes the beginning of it",
        apply=_read_the_first_heads,
        oracle="bytes",
        seeds=SEEDS,
    ),
    Mutant(
        name="tail not zeroed",
        row=20,
        broken="what no READ has filled of a larger block keeps what another request left there",
        apply=_leave_the_tail,
        oracle="bytes",
        first_seed=5,
        seeds=SEEDS,
    ),
    Mutant(
        name="window taken for the beginning",
        row=None,
        broken="the blocks of a window are paired as if they began with the first token",
        apply=_take_a_window_for_the_beginning,
        oracle="bytes",
        first_seed=3,
        seeds=SEEDS,
    ),
    Mutant(
        name="first table used for all groups",
        row=None,
        broken="blocks of the second cache group are read where those of the first one lie",
        apply=_use_the_first_table_for_all,
        oracle="bytes",
        seeds=SEEDS,
    ),
    Mutant(
        name="quarantine lifted with the first READ",
        row=None,
        broken="blocks leave the quarantine when one of several READs has ended",
        apply=_lift_with_the_first_read,
        oracle="block reuse",
        faults=(fault(Kind.READ_STALL, "d0>p0.0", 0.0, 9.0), fault(Kind.READ_STALL, "d0>p0.1", 0.0, 12.0)),
        first_seed=6,
        seeds=SEEDS,
    ),
)
