"""Mutants that only engines of several ranks, or caches of several groups or block sizes, can show."""

from __future__ import annotations

from typing import Any

import msgspec

from connector.layout import blocks, copies
from connector.layout.blocks import GroupPair
from connector.protocol import StartPull
from connector.runtime import block_tables
from connector.runtime.connections import Connections
from tests.simulation.mutants.executors import level2
from tests.simulation.mutants.mutant import Do, Edit, Mutant, Patch, Set


def _use_the_first_table_for_all(patch: Patch) -> None:
    tables = block_tables._tables
    first: dict[str, Any] = {}

    def of_the_first(pair: GroupPair, group: Any, command: StartPull) -> Any:
        if group is command.groups[0]:
            first[command.request_id] = group.remote_block_ids
        known = first[command.request_id][-len(group.remote_block_ids) :]
        return tables(pair, msgspec.structs.replace(group, remote_block_ids=known), command)

    patch.attribute(block_tables, "_tables", of_the_first)


MUTANTS = (
    Mutant(
        name="one of several sources read",
        broken="where several ranks hold what a rank needs, only the first one is read",
        changes=(Edit(block_tables.resolve, "range(0, local_ids.size,", "range(0, 0 if reads else local_ids.size,"),),
        place=level2("bytes"),
    ),
    Mutant(
        name="only who was read is told",
        row=59,
        broken="a rank that holds a replica which was read elsewhere never hears that its blocks may be freed",
        changes=(Edit(Connections._open, "ranks=len(connection.ranks)", "ranks=len(connection.sources)"),),
        place=level2("handed back"),
    ),
    Mutant(
        name="every rank reads the first heads",
        broken="where a rank needs a part of what another one holds, it takes the beginning of it",
        changes=(Edit(copies._address, "(unit - piece.start)", "0"),),
        place=level2("bytes"),
    ),
    Mutant(
        name="window taken for the beginning",
        broken="the blocks of a window are paired as if they began with the first token",
        changes=(
            Set(block_tables, "_remote_first", lambda pair, group, command: 0),
            Set(blocks, "_require_cover", lambda *arguments: None),
        ),
        place=level2("bytes"),
    ),
    Mutant(
        name="first table used for all groups",
        broken="blocks of the second cache group are read where those of the first one lie",
        changes=(Do(_use_the_first_table_for_all),),
        place=level2("bytes"),
    ),
)
