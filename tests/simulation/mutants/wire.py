"""Mutants of what goes over the wire, and of what reads it."""

from __future__ import annotations

import pkgutil
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from connector import weights
from connector.layout import verification
from connector.ports.nixl_agent import core
from connector.ports.nixl_agent.core import AgentCore
from connector.runtime import handshake, lease_keeper, listener, peer_actor
from connector.runtime.connections import Connections
from connector.wire import bounded, control, identity, metadata, notifications
from connector.wire import handshake as handshake_of_wire
from connector.wire.handshake import HandshakeError, HandshakeReply, decode_reply
from connector.wire.notifications import Heartbeat, Notification, Release
from statemachine import request
from statemachine.failures import WrongEngine
from statemachine.remote_engine import RemoteEngine
from tests.simulation.faults import Kind
from tests.simulation.mutants.executors import GARBAGE, NOT_AN_ERROR_OF_THE_PRODUCT, level2
from tests.simulation.mutants.mutant import SEEDS, ByTest, Do, Edit, Mutant, Seeds, Set, fault


def _parse_without_checks(message: bytes) -> Notification:
    text = message.decode()
    if text.startswith("HB:"):
        return Heartbeat(tuple(text[3:].split(",")))
    request_id, _, consumers = text.rpartition(":")
    return Release(request_id, int(consumers))


def _talk_to_anybody(frames: Sequence[bytes], *, peer: str, **others: Any) -> HandshakeReply:
    try:
        return decode_reply(frames, peer=peer, **others)
    except HandshakeError as error:
        if not isinstance(error.failure, WrongEngine):
            raise
        return decode_reply(frames, peer=error.failure.found, **others)


def _edit_late(function: str, before: str, after: str) -> Do:
    """An edit of a function of `connector` whose module imports vLLM: not before it is applied. `function`: its module,
    a colon, and its name there."""
    return Do(lambda patch: patch.edit(pkgutil.resolve_name(f"connector.{function}"), before, after))


_HOSTILE = "tests/unit/test_wire_handshake.py::TestWhatAHostileReplyCosts::"
_NEVER_LOADED = (
    "tests/conformance/test_nixl_agent.py::TestRealNixlPort::"
    "test_a_ucx_address_of_an_unknown_version_is_never_given_to_nixl"
)
_ORDER_ON_CPUS = "tests/unit/test_cpu_attention.py::"
_FROM_GPUS = _ORDER_ON_CPUS + "test_what_is_read_from_gpus_is_as_the_kernel_would_have_written_it"

LIES = tuple(fault(Kind.READ_LIES, f"d{at // 3}>p{at % 3}", 0.0, 20.0, 0.3) for at in range(9))

_IDENTITY = "tests/unit/test_identity.py::"
_OF_AN_ENGINE = "tests/unit/test_kv_identity.py::"
_OF_LAYOUTS = "tests/unit/test_layout_remote.py::"

PACKING = (
    Mutant(
        name="GPUs are read from whatever is enforced",
        broken="an engine on CPUs packs what it reads from one on GPUs without the option for it",
        changes=(
            _edit_late(
                "worker.cpu_attention:why_not_packed",
                'if vllm_config.kv_transfer_config.get_from_extra_config("enforce_handshake_compat", True):',
                "if False:",
            ),
        ),
        place=ByTest(_ORDER_ON_CPUS + "test_nothing_is_packed_without_the_option"),
    ),
    Mutant(
        name="quantized blocks are packed",
        broken="what was read quantized is given to layers that quantize it again",
        changes=(
            _edit_late(
                "worker.cpu_attention:why_not_packed", "if is_quantized_kv_cache(layer.kv_cache_dtype):", "if False:"
            ),
        ),
        place=ByTest(_ORDER_ON_CPUS + "test_nothing_is_packed_in_a_quantized_cache"),
    ),
    Mutant(
        name="what came from GPUs stays as it lies",
        broken="blocks that are to be packed are reported as loaded without it",
        changes=(_edit_late("worker.packing:PackedBlocks.pack", "for layer in self._layers:", "for layer in ():"),),
        place=ByTest(f"{_FROM_GPUS}[vec-LBHNC-64-64-1-decode_rank0]"),
    ),
    Mutant(
        name="packed blocks are zeroed by the place where tokens had landed",
        broken="what no READ has written is zeroed after packing, which has put tokens elsewhere",
        changes=(
            _edit_late(
                "worker.finishing:Finishing._change",
                "self._cache_memory.zero([each.unfilled for each in loaded if each.unfilled is not None])",
                "late = [each.unfilled for each in loaded if each.unfilled is not None]",
            ),
            _edit_late(
                "worker.finishing:Finishing._change",
                "self._pack(each.request_id, each.permutation)",
                "self._pack(each.request_id, each.permutation), self._cache_memory.zero(late)",
            ),
        ),
        place=ByTest("tests/unit/test_finishing.py::test_what_is_to_be_packed_is_zeroed_before_it"),
    ),
    Mutant(
        name="one request's kernel ends the engine",
        broken="what a kernel raises while it packs a request's blocks reaches vLLM",
        changes=(
            _edit_late("worker.finishing:Finishing._pack", "except Exception as error:", "except KeyError as error:"),
        ),
        place=ByTest("tests/unit/test_finishing.py::test_a_block_that_cannot_be_packed_fails_its_request_alone"),
    ),
    Mutant(
        name="a load is counted before it can be used",
        broken="a load that a device could not finish is a completed one in the figures of an earlier step",
        changes=(
            _edit_late(
                "worker.ledger:TransferLedger.take_results",
                "continue  # it is counted when it is told",
                "self._count(self._stats.count_loaded, 1); continue",
            ),
        ),
        place=ByTest("tests/unit/test_ledger.py::test_no_figure_goes_back_where_a_device_finishes_in_a_later_step"),
    ),
)

IDENTITY = (
    Mutant(
        name="any weights will do",
        row=15,
        broken="weights are not compared, as long as the model has the same name",
        changes=(
            Edit(
                identity.differing_factors,
                "if name not in skipped and",
                "if name != WEIGHTS and name not in skipped and",
            ),
        ),
        # One in three is an engine with other weights.
        place=Seeds(2, "bytes", (fault(Kind.INCOMPATIBLE, "p0", 0.5, 3.0),), count=4 * SEEDS),
    ),
    Mutant(
        name="weights are known by their shapes",
        row=15,
        broken="the fingerprint of the weights is one of names, types and shapes alone",
        changes=(Edit(weights._of_tensors, "digest.update(samples[name])", "pass"),),
        place=ByTest("tests/unit/test_weights.py::test_one_tensor_that_differs_is_seen_whichever_it_is"),
    ),
    Mutant(
        name="weights are known by one kind of tensor",
        row=15,
        broken="of the tensors only some are looked at, by their order",
        changes=(Edit(weights._of_tensors, "heapq.nsmallest(TENSORS_MAX, tensors,", "heapq.nsmallest(5, tensors,"),),
        place=ByTest("tests/unit/test_weights.py::test_one_tensor_that_differs_is_seen_whichever_it_is"),
    ),
    Mutant(
        name="adapters are known by their names",
        broken="an adapter of the same name is taken for the same, whatever weights P had under it",
        changes=(
            _edit_late("scheduler.pulls:Pulls._has_other_adapter", "if remote.adapter_weights is None:", "if True:"),
        ),
        place=ByTest("tests/unit/test_other_prompts.py::test_the_weights_of_an_adapter_are_compared"),
    ),
    Mutant(
        name="images are all alike",
        row=32,
        broken="a prompt is known by its tokens alone, whatever images there are in their places",
        changes=(_edit_late("scheduler.pulls:Pulls._has_other_media", "if remote.media_names is None:", "if True:"),),
        place=ByTest("tests/unit/test_media_names.py::test_a_prompt_with_other_images_is_computed"),
    ),
    Mutant(
        name="names of images are compared however they were made",
        broken="where P and D name images in two ways, D computes every prompt that has one",
        changes=(
            _edit_late("scheduler.media_names:differ", 'one.partition(":")[0] == other.partition(":")[0]', "True"),
        ),
        place=ByTest("tests/unit/test_media_names.py::test_names_that_are_made_in_two_ways_are_not_compared"),
    ),
    Mutant(
        name="a prompt is computed without its images",
        broken="D computes a prompt with other images although it was sent their sizes alone, which ends it",
        changes=(_edit_late("scheduler.media_names:MediaNames.of", " or not all(map(_is_there, named))", ""),),
        place=ByTest("tests/unit/test_media_names.py::test_a_prompt_with_other_images_is_computed"),
    ),
    Mutant(
        name="a prompt is computed with one number for its embeddings",
        broken="D computes a prompt with other images although it was sent nothing that they could be seen in",
        changes=(_edit_late("scheduler.media_names:_is_stand_in", "_EMBEDDINGS not in name", "True"),),
        place=ByTest("tests/unit/test_media_names.py::test_a_prompt_with_other_images_is_computed"),
    ),
    Mutant(
        name="the tokens of an image are computed without it",
        broken="D computes a prompt that P had with images although it was sent none, only their tokens",
        changes=(
            _edit_late("scheduler.media_names:MediaNames.to_compare", "if _beginning(request, tokens) else None", ""),
        ),
        place=ByTest("tests/unit/test_media_names.py::test_a_prompt_with_other_images_is_computed"),
    ),
    Mutant(
        name="the prefix cache takes images that D was not given for equal",
        broken="of D's prefix cache one image's KV is used for another one, of which D was sent the tokens alone",
        changes=(
            _edit_late("scheduler.media_names:MediaNames._is_hidden", "theirs != self.of(request, tokens)", "False"),
        ),
        place=ByTest(
            "tests/unit/test_media_names.py::"
            "test_the_prefix_cache_of_d_tells_images_apart_that_it_was_not_given[None-tokens alone]"
        ),
    ),
    Mutant(
        name="the prefix cache takes images for hidden that another process has",
        broken="what D was given is not found in its prefix cache when it comes without parameters",
        changes=(_edit_late("scheduler.media_names:MediaNames._is_hidden", "each.data is not None and not", "not"),),
        place=ByTest(
            "tests/unit/test_media_names.py::"
            "test_what_tells_its_images_itself_or_has_none_is_in_the_cache_under_its_own_hashes"
        ),
    ),
    Mutant(
        name="embeddings are all alike",
        row=32,
        broken="a prompt that is given as embeddings is known by their number",
        changes=(
            _edit_late(
                "scheduler.prefix_digest:_digests", "beside.update(_embeddings(request, start, is_token))", "pass"
            ),
        ),
        place=ByTest("tests/unit/test_other_prompts.py::test_embeddings_of_another_prompt_are_not_taken_for_this_ones"),
    ),
    Mutant(
        name="a model is its path",
        broken="the name of the model is compared although the weights are the same",
        changes=(Edit(identity.differing_factors, "for name in (MODEL, REVISION)", "for name in ()"),),
        place=ByTest(_IDENTITY + "test_the_name_of_the_model_matters_only_where_the_weights_are_unknown"),
    ),
    Mutant(
        name="unknown weights are equal",
        broken="the name of the model is not compared where one side does not know its weights",
        changes=(
            Edit(
                identity._both_state,
                "name in ours and theirs.get(name) == ours[name]",
                "theirs.get(name) == ours.get(name)",
            ),
        ),
        place=ByTest(_IDENTITY + "test_the_draft_models_name_is_its_own_affair"),
    ),
    Mutant(
        name="any draft model will do",
        broken="which weights the draft model has is not told",
        changes=(
            _edit_late(
                "worker.kv_identity:_of_draft",
                "**_of_model(DRAFT, draft, speculative.draft_load_config or vllm_config.load_config)",
                "**{}",
            ),
        ),
        place=ByTest(_OF_AN_ENGINE + "test_the_draft_model_is_named"),
    ),
    Mutant(
        name="any configuration will do",
        broken="the configuration of the model is not told",
        changes=(_edit_late("worker.kv_identity:_factors", "factors |= _of_configuration(model)", "pass"),),
        place=ByTest(_OF_AN_ENGINE + "test_another_model_of_the_same_shape_is_named"),
    ),
    Mutant(
        name="queries may be scaled on one engine",
        broken="whether Llama 4 scales its queries is told as its configuration says, which vLLM overrides",
        changes=(_edit_late("worker.kv_identity:_of_temperature_tuning", "== _LLAMA_4", "== ''"),),
        place=ByTest(_OF_AN_ENGINE + "test_engines_of_which_one_scales_the_queries_of_llama_4_do_not_fit"),
    ),
    Mutant(
        name="two names of the same are told apart",
        broken="a cache type or a quantization that has two names fits only under the same one",
        changes=(Edit(identity._is_same, "names.get(local, local) == names.get(remote, remote)", "local == remote"),),
        place=ByTest(_IDENTITY + "test_two_names_of_the_same_fit_whoever_says_which"),
    ),
    Mutant(
        name="any quantization will do",
        broken="how the weights are quantized is not told",
        changes=(_edit_late("worker.kv_identity:_factors", "_text(model.quantization or NONE)", "NONE"),),
        place=ByTest(_OF_AN_ENGINE + "test_quantization_is_named"),
    ),
    Mutant(
        name="any scales will do",
        broken="what stored numbers are multiplied by is not compared",
        changes=(Edit(identity.differing_layers, 'for field in ("k_scale", "v_scale"):', "for field in ():"),),
        place=ByTest(_IDENTITY + "test_what_bytes_mean_is_compared_whatever_is_enforced"),
    ),
    Mutant(
        name="scales are not told",
        broken="an engine does not say what it multiplies stored numbers by",
        changes=(_edit_late("worker.kv_identity:_layers", "scales = _scales(layers)", "scales = {}"),),
        place=ByTest(_OF_AN_ENGINE + "test_scales_of_a_quantized_cache_are_named"),
    ),
    Mutant(
        name="scales are laid out over what was read",
        broken="scales that lie in the cache are set to 1 with the first forward pass, as vLLM does by itself",
        changes=(_edit_late("worker.token_scales:_lay_out", "getattr(attention, _LAY_OUT)(layer.kv_cache)", "return"),),
        place=ByTest("tests/unit/test_token_scales.py::test_what_was_read_before_the_first_pass_stays"),
    ),
    Mutant(
        name="every rank has the first head",
        broken="scales of heads are compared by their place on the rank",
        changes=(
            Edit(
                identity._differing_scales,
                "local[head - ours.first_head], remote[head - theirs.first_head]",
                "local[head - first], remote[head - first]",
            ),
        ),
        place=ByTest(_IDENTITY + "test_scales_of_heads_are_compared_where_both_ranks_have_the_head"),
    ),
    Mutant(
        name="any order of elements will do",
        broken="the order in which attention on CPUs keeps K and V is not told",
        changes=(_edit_late("worker.kv_identity:_order", 'element_order(layer) if layer is not None else ""', '""'),),
        place=ByTest(_OF_AN_ENGINE + "test_the_order_on_cpus_is_named"),
    ),
    Mutant(
        name="all slots are alike",
        broken="which back end has filled slots of K and V is told by a factor alone, which can be skipped",
        changes=(_edit_late("worker.kv_identity:_order", "IN_SLOTS if layer is None else", "IN_SLOTS if True else"),),
        place=ByTest("tests/unit/test_rocm.py::test_back_ends_that_fill_their_slots_in_unlike_ways_do_not_fit"),
    ),
    Mutant(
        name="blocks in arrays have the order of others",
        broken="an engine with FlyDSL does not say that TurboQuant has another order there",
        changes=(_edit_late("worker.kv_identity:_order", "if is_in_arrays(layer):", "if False:"),),
        place=ByTest("tests/unit/test_turboquant.py::test_an_order_that_one_engine_only_has_is_named"),
    ),
    Mutant(
        name="blocks in arrays are cut",
        broken="tokens and heads are read out of blocks whose metadata lie behind the data of all of them",
        changes=(_edit_late("worker.turboquant:undivided", "if is_in_arrays(layer)", "if False"),),
        place=ByTest("tests/unit/test_turboquant.py::test_blocks_in_arrays_are_not_cut"),
    ),
    Mutant(
        name="any type of numbers will do",
        broken="the type of the numbers in each layer's cache is not compared",
        changes=(Edit(identity.differing_layers, "(DTYPE, layer.dtype, other.dtype),", ""),),
        place=ByTest(_IDENTITY + "test_what_bytes_mean_is_compared_whatever_is_enforced"),
    ),
    Mutant(
        name="any amount will do",
        broken="how many bytes a state or an entry of a layer has is not compared",
        changes=(Edit(identity._differing_content, "if local != remote:", "if False:"),),
        place=ByTest(_IDENTITY + "test_what_bytes_mean_is_compared_whatever_is_enforced"),
    ),
    Mutant(
        name="how much a layer keeps is not told",
        broken="an engine does not say how many bytes a state or an entry of a layer has",
        changes=(_edit_late("worker.kv_identity:_layers", "_content_bytes(shape, specs[name])", "()"),),
        place=ByTest(_OF_LAYOUTS + "test_states_of_engines_that_draft_unlike_numbers_of_tokens_do_not_fit"),
    ),
    Mutant(
        name="any kind of FP8 will do",
        broken="an engine on MI300 does not say that its FP8 is of another kind",
        changes=(_edit_late("worker.kv_identity:_kind_of_fp8", "if has_fp8 and", "if False and"),),
        place=ByTest(_OF_AN_ENGINE + "test_fp8_of_another_kind_in_an_indexer_is_named"),
    ),
    Mutant(
        name="kinds of FP8 are not compared",
        broken="which kind of FP8 lies in each layer's cache is not compared",
        changes=(Edit(identity.differing_layers, "(FP8, layer.fp8 or OCP, other.fp8 or OCP),", ""),),
        place=ByTest(_IDENTITY + "test_what_bytes_mean_is_compared_whatever_is_enforced"),
    ),
    Mutant(
        name="what bytes mean can be skipped",
        broken="enforce_handshake_compat=false skips scales and orders of elements, too",
        changes=(
            Edit(
                handshake_of_wire.incompatibilities,
                "*differing_layers(ours.layers, theirs.layers, not_packed=not_packed)",
                "*(differing_layers(ours.layers, theirs.layers) if enforce_factors else ())",
            ),
        ),
        place=ByTest(_IDENTITY + "test_what_bytes_mean_is_compared_whatever_is_enforced"),
    ),
    Mutant(
        name="a built-in engine is believed",
        row=16,
        broken="the hash of an engine that says no more is not compared",
        changes=(Edit(decode_reply, "elif expected_hash is not None and", "elif False and"),),
        place=ByTest(_IDENTITY + "test_a_builtin_engine_is_compared_by_its_hash"),
    ),
)


_VERIFY = "tests/actors/test_verification.py::"

VERIFICATION = (
    Mutant(
        name="sums are not compared",
        row=23,
        broken="a READ counts as completed whatever its checksums are",
        changes=(Edit(peer_actor.PeerActor._check_read, "failure=failure", "failure=None"),),
        place=Seeds(2, "bytes", LIES),
    ),
    Mutant(
        name="checksums that have come wake nobody",
        broken="what P's checksums allow, as a release where nothing is to be read, waits for the next timer",
        changes=(
            Edit(
                peer_actor.PeerActor._resolve_when_sums_are_known,
                "self.tell(self._resolve(effect, known))",
                "self._feed(self._resolve(effect, known))",
            ),
        ),
        place=Seeds(2, "handed back", (fault(Kind.READ_LIES, "d8>p8", 0.0, 0.0),), first=40),
    ),
    Mutant(
        name="sums of samples alone",
        row=23,
        broken="only samples are compared although all blocks are to be",
        changes=(
            Edit(
                peer_actor.PeerActor._resolve,
                'self._context.options.verify == "sampled"',
                "True",
            ),
        ),
        place=ByTest(_VERIFY + "test_all_blocks_of_a_cache_are_compared"),
    ),
    Mutant(
        name="blocks without sums are read",
        broken="of a block that was not lent there is nothing to compare, and it is read",
        changes=(Edit(verification.compared, "if not sampled and (places == _NOT_COMPARED).any():", "if False:"),),
        place=ByTest(_VERIFY + "test_blocks_that_were_not_lent_with_the_lease_are_refused"),
    ),
    Mutant(
        name="parts of blocks are read unverified",
        broken="where a READ takes parts of blocks nothing is compared, and nobody is told",
        changes=(Edit(handshake._matches, 'if wanted == "off":', "if True:"),),
        place=ByTest(_VERIFY + "test_parts_of_blocks_are_refused_and_not_read_unverified"),
    ),
    Mutant(
        name="fewer sums will do",
        broken="how many blocks P sums is not compared",
        changes=(Edit(handshake._matches, 'if made not in (wanted, "all"):', "if False:"),),
        place=ByTest(_VERIFY + "test_an_engine_that_makes_fewer_checksums_is_refused"),
    ),
    Mutant(
        name="sums are waited for after the end",
        broken="a request that was aborted while its blocks are summed waits for the engine thread",
        changes=(Edit(request._drain, "unchecked=frozenset()", "in_flight=request.awaited"),),
        place=ByTest(_VERIFY + "test_a_request_that_is_aborted_while_its_blocks_are_summed_ends"),
    ),
    Mutant(
        name="a check is lost with its connection",
        broken="what a READ has left over a connection that is lost before it is checked waits for the deadline",
        changes=(
            Edit(
                RemoteEngine._end_check,
                "found.connection != event.connection",
                "not self._connections.is_current(event.connection)",
            ),
        ),
        place=ByTest(_VERIFY + "test_what_was_read_over_a_connection_that_is_lost_meanwhile_is_compared_too"),
    ),
    Mutant(
        name="sums of an earlier request",
        broken="what was summed for a request that has ended is taken for that of the next one of its id",
        changes=(Edit(peer_actor.PeerActor._report, "self._context.sums.withdraw(ticket)", "pass"),),
        place=ByTest(_VERIFY + "test_what_was_summed_for_a_request_that_has_ended_says_nothing_of_the_next_one"),
    ),
    Mutant(
        name="checks are lost with what hangs beside them",
        broken="a request whose bytes are all here is tried again because READs of others hang on its connection",
        changes=(Edit(request._lose_peer, "if not request.in_flight:", "if False:"),),
        place=ByTest(
            "tests/unit/test_remote_engine.py"
            "::test_a_connection_that_is_abandoned_takes_no_request_along_whose_bytes_are_here"
        ),
    ),
    Mutant(
        name="sums of a lease without its number",
        broken="a reader whose parameters carried no number gets no checksums",
        changes=(
            Edit(
                lease_keeper.LeaseKeeper._sums_frames,
                "self._core.lent_as(asked.lease)",
                "asked.lease",
            ),
        ),
        place=ByTest("tests/simulation/test_verify.py::test_no_request_is_done_with_what_a_lying_read_has_left"),
    ),
    Mutant(
        name="sums are kept",
        broken="the checksums of a lease that is over stay",
        changes=(Edit(lease_keeper.LeaseKeeper._execute, "self._sums.pop(lease, None)", "pass"),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_checksums_are_told_while_a_lease_lasts"),
    ),
)


async def _run_once(
    name: str, run: Callable[[], Awaitable[None]], log_crash: Callable[[str, BaseException], None]
) -> None:
    try:
        await run()
    except Exception as error:
        log_crash(name, error)


MUTANTS = (
    *IDENTITY,
    *PACKING,
    *VERIFICATION,
    Mutant(
        name="bad frame kills the listener",
        row=38,
        broken="a malformed handshake request raises in the listener's loop",
        changes=(Set(listener, "DecodeFailed", NOT_AN_ERROR_OF_THE_PRODUCT),),
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
        place=ByTest("tests/actors/test_peers.py::test_another_engine_at_the_address_is_named"),
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
        broken="a rank says that one rank more of its engine is a partner of P",
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
        name="a heartbeat for one over and over",
        row=75,
        broken="a heartbeat that names one lease 65,536 times has it renewed as often",
        changes=(Edit(notifications._parse_heartbeat, 'dict.fromkeys(listed.split(","))', 'listed.split(",")'),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_a_heartbeat_renews_a_lease_once_however_often_it_names_it"),
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
    Mutant(
        name="members without bound",
        row=75,
        broken="the regions of a rank may name any number of layers together",
        changes=(Edit(metadata._require_bounded, "members > MEMBERS_MAX", "False"),),
        place=ByTest(_HOSTILE + "test_members_are_bounded_over_all_regions"),
    ),
    Mutant(
        name="metadata without bound",
        row=75,
        broken="all that a reply may have may be what NIXL does not need",
        changes=(Edit(bounded.require_beside, "rest > bytes_max", "False"),),
        place=ByTest(_HOSTILE + "test_what_is_not_nixls_own_is_small"),
    ),
    Mutant(
        name="a field over and over",
        row=75,
        broken="a message may have a field many times, each with as many leases as one may name",
        changes=(Edit(bounded._fields, "len(fields) != announced", "False"),),
        place=ByTest("tests/unit/test_wire_control.py::test_a_field_that_is_there_twice_is_refused"),
    ),
    Mutant(
        name="a newer UCX is loaded",
        broken="an address of UCX of a version that this engine's does not know goes to NIXL, which ends the process",
        changes=(Edit(AgentCore._require_known_version, "version > self._ucx_version_max", "False"),),
        place=ByTest(_NEVER_LOADED),
    ),
    Mutant(
        name="what NIXL would not write is loaded",
        broken="the version of UCX's address is hidden by metadata that the port cannot read and NIXL can",
        changes=(Edit(AgentCore._require_known_version, "not self._are_metadata_readable", "True"),),
        place=ByTest(_NEVER_LOADED),
    ),
    Mutant(
        name="memory of a type that nobody knows",
        broken="metadata whose memory is of a type that NIXL does not know are given to it, which ends the process",
        changes=(Edit(core._require_known_memory, "> MEMORY_TYPE_KNOWN", "> 1 << 64"),),
        place=ByTest(_NEVER_LOADED),
    ),
)
