"""Mutants that only engines of several ranks, or caches of several groups or block sizes, can show.

Which state a request needs is decided in the scheduler's side, so level `vllm` notices what is wrong with that.
"""

from __future__ import annotations

from typing import Any

import msgspec

from connector import families
from connector.layout import blocks, copies, remote
from connector.layout.blocks import GroupPair
from connector.nixl_connector import NixlActorConnector
from connector.protocol import StartPull
from connector.runtime import block_tables
from connector.runtime.connections import Connections
from connector.scheduler import cache_groups
from connector.scheduler.connector_scheduler import ConnectorScheduler
from connector.scheduler.far_ends import FarEnds
from connector.scheduler.lends import Lends
from connector.scheduler.pulls import Pulls
from tests.simulation.mutants.executors import level2
from tests.simulation.mutants.mutant import ByTest, Do, Edit, Mutant, Patch, Seeds, Set

_STATES_BLOCK_SIZES = "if stated is not None:\n            tokens = "

STATES = 16
"""A seed of level `vllm` whose engines keep one state for each request."""
UNNUMBERED = 47
"""One whose prefill engines number no leases besides: nobody says there of which prompt parameters are."""
WINDOWS = 3
"""One whose engines keep a window."""
LATE = 109
"""A seed with states whose devices are late; D caches them."""
_GOES_ON = Edit(Lends._leave_tokens_to_decode, "request.max_tokens = 1", "pass")


def with_vllm(oracle: str, first: int = STATES) -> Seeds:
    return Seeds(level="vllm", oracle=oracle, faults=(), first=first, count=1)


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
        name="no step is said to end a prompt",
        row=7,
        broken="workers are not told with which steps a prompt that will be lent may end, and wait for none",
        changes=(Edit(Lends.ends_prompt, "return any(", "return False and any("),),
        place=with_vllm("scheduler"),
    ),
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
        changes=(
            Edit(
                Connections._open,
                "remote.worker for remote in connection.ranks",
                "remote.worker for remote in connection.ranks[: len(connection.sources)]",
            ),
        ),
        place=level2("handed back"),
    ),
    Mutant(
        name="every rank reads the first heads",
        broken="where a rank needs a part of what another one holds, it takes the beginning of it",
        changes=(Edit(copies._address, "(unit - piece.start)", "0"),),
        place=level2("bytes"),
    ),
    Mutant(
        name="heads counted by the configuration",
        broken="a layer with more KV heads than the configuration's first entry says is taken to have as many as that",
        changes=(Set(families, "names_several_numbers_of_heads", lambda model_config: False),),
        place=ByTest("tests/unit/test_unlike_heads.py::test_each_rank_gets_its_heads[4-8-MiMo-64]"),
    ),
    Mutant(
        name="replicas counted by ranks",
        broken="of an engine with fewer heads than we have ranks, the head of a rank's number is read",
        changes=(Edit(remote._head_factors, "factors[shape.name] = factor", "pass"),),
        place=ByTest("tests/unit/test_unlike_heads.py::test_each_rank_gets_its_heads[4-16-MiMo-64]"),
    ),
    Mutant(
        name="block sizes in proportion",
        broken="the block sizes of a peer's cache groups are worked out where vLLM may have chosen others",
        changes=(Edit(remote._groups, _STATES_BLOCK_SIZES, "if False:\n            tokens = "),),
        place=ByTest("tests/unit/test_unlike_heads.py::test_each_rank_gets_its_heads[2-8-Gemma 4-64]"),
    ),
    Mutant(
        name="heads are not compared",
        broken="an engine that says that a layer has more KV heads than is guessed here is read from",
        changes=(
            Edit(remote._head_factors, "heads != expected", "False"),
            Edit(remote._groups, _STATES_BLOCK_SIZES, "if False:\n            tokens = "),
        ),
        place=ByTest("tests/unit/test_unlike_heads.py::test_a_guess_that_another_engine_knows_to_be_wrong_is_refused"),
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
    Mutant(
        name="any state will do",
        broken="D loads a state of more tokens than it asked for",
        changes=(Edit(Pulls._check_fit, "self._groups.has_states and found != tokens", "False"),),
        place=with_vllm("bytes", first=UNNUMBERED),
    ),
    Mutant(
        name="nothing left to compute",
        broken="where there are states, P computes the whole prompt, and D computes its last token after that again",
        changes=(Edit(cache_groups._tokens_left_to_decode, "for_state = 1 if", "for_state = 0 if"),),
        place=with_vllm("bytes"),
    ),
    Mutant(
        name="a state goes on",
        broken="P computes more tokens after those that D needs the state of, where a client asks for them",
        changes=(_GOES_ON,),
        place=with_vllm("params"),
    ),
    Mutant(
        name="a state goes on under its old number",
        broken="P lends the state of more tokens as that of the prompt",
        changes=(
            _GOES_ON,
            Edit(
                Lends._grant,
                "computed = _computed_tokens(request)",
                "computed = request.num_prompt_tokens - request.num_in_flight_tokens",
            ),
        ),
        place=with_vllm("bytes"),
    ),
    Mutant(
        name="far end let go when lent",
        broken="P names the block at the far end of a window, and lets anybody have it",
        changes=(
            Edit(
                FarEnds.lend,
                "return self._held.get(request.request_id, {})",
                "held = self._held.get(request.request_id, {}); self._free(request.request_id); return held",
            ),
        ),
        place=with_vllm("bytes", first=WINDOWS),
    ),
    Mutant(
        name="far end never let go",
        broken="the block at the far end of a window stays out of the pool when the lease has ended",
        changes=(Edit(Lends.end_leases, "self._far_ends.let_go(request_id)", "pass"),),
        place=with_vllm("blocks", first=WINDOWS),
    ),
    Mutant(
        name="the last token does not see its window",
        broken="a prompt is loaded whole whose last token is computed again without the far end of its window",
        changes=(Edit(Pulls._tokens_to_go_on_from, "if self._groups.keeps_all_tokens:", "if True:"),),
        place=with_vllm("bytes", first=WINDOWS),
    ),
    Mutant(
        name="cached attention is enough",
        broken="D computes a prompt whose attention is cached nearly whole, and of which no state is",
        changes=(Edit(ConnectorScheduler._tokens_to_compute, "return pull.tokens - cached", "return count"),),
        place=ByTest("tests/unit/test_cache_groups.py::test_few_tokens_are_those_that_vllm_would_compute"),
    ),
    Mutant(
        name="loaded blocks are zeroed",
        row=7,
        broken="vLLM is not told that blocks are loaded, so it zeroes them when the device comes to it",
        changes=(
            Edit(NixlActorConnector.get_loaded_kv_cache_group_ids, "self._kv_cache_config.transfer_group_ids", "()"),
        ),
        place=with_vllm("bytes", first=LATE),
    ),
)
