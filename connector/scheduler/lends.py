"""Which blocks of a request are kept for another engine, and the answer that names them.

When a request with `do_remote_decode` finishes, its blocks are kept, and the answer says where they are and what the
lease on them is called; an answer that names none has the decode engine compute the prompt itself. Whether they are
kept is decided in `statemachine/grant.py`; this carries it out.

Some models make D compute the last tokens of every prompt itself (`CacheGroups.tokens_left_to_decode`). P then leaves
these tokens out of the prompt, because a state of one token more is another state. It does so when the request comes,
and only if it will lend. vLLM appends to the prompt of a session whose input is streamed: nobody knows then which
tokens will be the last, so such a session is computed whole, and not lent.

Read-back (`bidirectional_kv_xfer`). D keeps the blocks of a finished request as P does, for `decoder_kv_blocks_ttl`,
and its answer names them; what P does with them is in `pulls`. A lease of D ends in its time, whoever holds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, assert_never

from vllm.v1.request import RequestStatus

from connector.clock import NS_PER_SECOND, Clock
from connector.config import ConnectorOptions
from connector.key_files import ParamsKeyFile
from connector.observe.log import get_logger, is_said
from connector.protocol import Command, LeaseComputing, LeaseGranted, LeaseWithdrawn, PeerAddress
from connector.scheduler.adapters import AdapterWeights
from connector.scheduler.cache_groups import CacheGroups
from connector.scheduler.draining import SchedulerDraining
from connector.scheduler.engine_figures import EngineFigures
from connector.scheduler.far_ends import FarEnds
from connector.scheduler.host_saves import blocks_to_save
from connector.scheduler.kept_blocks import KeptBlocks
from connector.scheduler.media_names import MediaNames
from connector.scheduler.prefix_digest import prefix_digests, prompt_digests
from connector.staging import is_staged
from connector.wire.bounded import ID_LENGTH_MAX, shorten
from connector.wire.control import is_request_id
from connector.wire.params import ParamsError, ParamsKind, RemotePrefill, build_remote_prefill, classify
from statemachine.failures import ADVICE_FOLLOWS
from statemachine.grant import AnnounceLease, GrantLease, LeaveTokens, NoteNotLent, NotLent, Terms, WithdrawLease
from statemachine.granting import Arrived, Finished, GrantEffect, Granting, LeaseOver, LentCounts, Scheduled
from statemachine.loads import Loads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_log = get_logger()


class Lends:
    """See the module's docstring. Lives on the scheduler's thread, but for `counts` and `stop`.

    Args:
        advertised: the address of this engine, as its answers say it.
        key_file: what parameters are signed with; None: they are not.
        adapters: what is known of them.
        clock: of this process.
        life: of this run of the engine: 32 hex digits.
        draining: whether this engine is to end.
        kept: which blocks are lent back.
        loads: who waits for them.
        figures: where it is counted.
        tell: the worker; called with what it has to know with the next step.

    Attributes: asked for in every step.
        computing, prompts: as of `Granting`.
        stopped: why nothing is lent any more; None: it is.
        registration: how often the KV cache was registered anew, since this engine has slept.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        groups: CacheGroups,
        options: ConnectorOptions,
        advertised: PeerAddress,
        key_file: ParamsKeyFile | None,
        adapters: AdapterWeights,
        *,
        clock: Clock,
        life: str,
        draining: SchedulerDraining,
        kept: KeptBlocks,
        loads: Loads,
        figures: EngineFigures,
        tell: Callable[[Command], None],
    ) -> None:
        self._groups = groups
        self._options = options
        self._advertised = advertised
        self._key_file = key_file
        self._adapters = adapters
        self._clock = clock
        self._draining = draining
        self._kept = kept
        self._loads = loads
        self._figures = figures
        self._tell = tell
        self._drafts_max: int = vllm_config.num_speculative_tokens
        self._media = MediaNames(vllm_config)
        self._lends_back = options.bidirectional_kv_xfer and _can_lend_back(vllm_config, groups)
        # The first number is random, so that a later life of this engine repeats none: its peers may still ask for
        # leases of this one. 48 bits leave room up to the 63 of the wire.
        self._granting = Granting(1 + int(life[:12], 16))
        self.computing, self.prompts = self._granting.computing, self._granting.prompts
        self.stopped: str | None = None
        self.registration = 0
        # Where D computes more than the last token of every prompt, that one sees nothing that P gives back.
        self._far_ends = FarEnds(groups.all if not groups.tokens_left_to_decode else ())
        self._block_pool: BlockPool | None = None
        # Of prompts with states: how many tokens are computed when the last step is over, drafts among them.
        self._reach: dict[str, int] = {}
        # Prefills whose ids no engine takes.
        self._unnameable = 0

    def bind(self, pool: BlockPool) -> None:
        """The pool of the engine's blocks."""
        self._block_pool = pool
        self._far_ends.bind(pool)

    def stop(self, reason: str) -> None:
        """Lend nothing any more. Also called in the listener's thread."""
        self.stopped = self.stopped or reason

    def counts(self) -> LentCounts:
        """In the listener's thread."""
        return self._granting.counts

    # --- a request --------------------------------------------------------------------------------------------------

    def arrive(self, request: Request, *, for_decode: bool) -> None:
        """It has come. `for_decode`: another engine goes on from its prompt."""
        arrived = Arrived(
            request_id=request.request_id,
            request=request,
            for_decode=for_decode,
            is_wanted=self._is_wanted(request, for_decode=for_decode),
            is_nameable=is_request_id(request.request_id),
            terms=self._terms,
        )
        self._carry_out(self._granting.handle(arrived, self._clock.now_ns()))

    def schedule(self, request: Request) -> None:
        """It has its blocks, and is computed from now on."""
        known = self._granting.grant(request.request_id)
        if known is None:
            return
        is_wanted = self._is_wanted(request, for_decode=known.for_decode)
        scheduled = Scheduled(request_id=request.request_id, is_wanted=is_wanted, terms=self._terms)
        self._carry_out(self._granting.handle(scheduled, self._clock.now_ns()))

    def finish(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """It has ended. What its answer says of its blocks, which are kept then; None: they are not."""
        known = self._granting.grant(request.request_id)
        is_wanted = known is not None and self._is_wanted(request, for_decode=known.for_decode)
        finished = Finished(
            request_id=request.request_id,
            is_whole=is_wanted and self._is_whole(request, block_ids),
            free_share=self._free_share(),
            is_waited_for=self._loads.waits_for_lent_back,
            terms=self._terms,
        )
        answer = self._carry_out(self._granting.handle(finished, self._clock.now_ns()), block_ids)
        if answer is None:
            self._far_ends.let_go(request.request_id)
        self._reach.pop(request.request_id, None)
        return answer

    def end_leases(self, request_ids: Collection[str]) -> None:
        """The leases of these requests have ended, if they had any, and vLLM frees their blocks."""
        for request_id in request_ids:
            self._granting.handle(LeaseOver(request_id=request_id), self._clock.now_ns())
            self._far_ends.let_go(request_id)
        self._figures.end_leases(request_ids)
        self._kept.end(request_ids)

    # --- a step -----------------------------------------------------------------------------------------------------

    def follow(self, output: SchedulerOutput) -> None:
        """A step is scheduled, while prompts are computed that others go on from."""
        self._far_ends.follow(output, self.prompts)
        if self._groups.has_states:
            for request_id, request in self.prompts.items():
                if scheduled := output.num_scheduled_tokens.get(request_id):
                    self._reach[request_id] = request.num_computed_tokens + scheduled

    def saves(self, output: SchedulerOutput) -> tuple[list[int], ...]:
        """Blocks that the step has to save on the host, by group, where KV is staged there."""
        return blocks_to_save(output, self.computing, self._groups.all, drafts_max=self._drafts_max)

    def ends_prompt(self, output: SchedulerOutput) -> bool:
        """Whether one of the prompts has its first token after the step, which may be its last one."""
        scheduled = output.num_scheduled_tokens
        return any(
            request_id in scheduled and request.num_computed_tokens + scheduled[request_id] >= request.num_prompt_tokens
            for request_id, request in self.prompts.items()
        )

    # --- what is lent -----------------------------------------------------------------------------------------------

    @property
    def _terms(self) -> Terms:
        return Terms(self._draining.value, self.stopped is not None)

    def _is_wanted(self, request: Request, *, for_decode: bool) -> bool:
        """Whether another engine may go on from its blocks when it has finished."""
        if not is_request_id(request.request_id):
            return False
        if for_decode:
            # Streamed input: which tokens are left to D is known only at its end. Where none are, it is as any other.
            return not (request.resumable and self._groups.tokens_left_to_decode)
        return self._lends_back and bool(request.kv_transfer_params)

    def _is_whole(self, request: Request, block_ids: tuple[list[int], ...]) -> bool:
        """Whether it has blocks, and it is known what is in them."""
        completed = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        return completed and any(block_ids) and _computed_tokens(request) > 0 and self._is_settled(request)

    def _free_share(self) -> float:
        pool = self._block_pool
        return 1.0 if pool is None else float(pool.get_num_free_blocks() / pool.num_gpu_blocks)

    def _is_settled(self, request: Request) -> bool:
        """Whether its states are those of what would be lent. A step that is still under way moves a state on; so do
        drafts that were taken for right behind the last token of the answer. From 0.33 on vLLM does not count those,
        and they cannot be told from drafts that were refused."""
        if not self._groups.has_states:
            return True
        is_under_way: bool = request.num_in_flight_tokens > 0
        computed: int = request.num_computed_tokens
        return not is_under_way and self._reach.get(request.request_id, computed) <= computed <= request.num_tokens

    def _leave_tokens_to_decode(self, request: Request) -> None:
        """Take the tokens that D computes itself out of the prompt. What is sampled after it is of no use then."""
        count = self._groups.tokens_left_to_decode
        # D loads nothing for a request that must not read cached KV (prompt logprobs): it needs no particular state.
        if not count or request.num_prompt_tokens <= count or request.skip_reading_prefix_cache:
            return
        if request.prompt_token_ids is not None:
            request.prompt_token_ids = request.prompt_token_ids[:-count]
        if request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-count]
        if request.prompt_is_token_ids is not None:  # of a prompt that has both
            request.prompt_is_token_ids = request.prompt_is_token_ids[:-count]
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1

    def _note_unnameable(self, request_id: str) -> None:
        self._unnameable += 1
        if is_said(self._unnameable):
            _log.warning(
                "prefill %s is answered without kv_transfer_params, so that D computes the prompt: its id has more "
                f"than %d characters or control characters{ADVICE_FOLLOWS}have clients send ids of printable ASCII "
                "in X-Request-Id (number %d)",
                shorten(request_id),
                ID_LENGTH_MAX,
                self._unnameable,
            )

    # --- effects ----------------------------------------------------------------------------------------------------

    def _carry_out(
        self, effects: Iterable[GrantEffect], block_ids: tuple[list[int], ...] = ()
    ) -> dict[str, Any] | None:
        """`block_ids`: of the request that has ended. Returns what its answer carries, if it is lent."""
        answer = None
        for effect in effects:
            match effect:
                case LeaveTokens(request=request):
                    self._leave_tokens_to_decode(request)
                case NoteNotLent(request_id=request_id, why=why):
                    self._figures.note_not_lent(why.value)
                    if why is NotLent.REQUEST_ID:
                        self._note_unnameable(request_id)
                case AnnounceLease(lease=lease, heard_ns=heard_ns):
                    age_seconds = (self._clock.now_ns() - heard_ns) / NS_PER_SECOND
                    self._tell(LeaseComputing(lease=lease, age_seconds=age_seconds))
                case GrantLease():
                    answer = self._grant(effect, block_ids)
                case WithdrawLease(lease=lease):
                    self._tell(LeaseWithdrawn(lease=lease))
                case _:
                    assert_never(effect)
        return answer

    def _grant(self, grant: GrantLease, block_ids: tuple[list[int], ...]) -> dict[str, Any]:
        request, groups = grant.request, self._groups.all
        fixed_seconds: float | None = None
        expires_seconds: float | None = None
        # More than it has tokens where drafts behind the last one were taken for right.
        computed = _computed_tokens(request)
        tokens = min(group.unbroken(block_ids[group.group_id], computed) for group in groups)
        if grant.for_decode:
            tokens = min(tokens, request.num_tokens)
        else:
            fixed_seconds = self._options.decoder_kv_blocks_ttl
            expires_seconds = time.perf_counter() + fixed_seconds
            tokens = min(tokens, request.num_tokens - 1)
        lengths = {min(tokens, request.num_prompt_tokens), tokens} - {0}
        if grant.for_decode:
            digests = prompt_digests(request, lengths)
        else:
            digests = prefix_digests(request, lengths, media_are_numbered=self._media.are_numbers)
        far_ends = self._far_ends.lend(request, tokens)
        lent = [group.lend(block_ids[group.group_id], tokens, far_ends.get(group.group_id)) for group in groups]
        pairs = zip(groups, lent, strict=True)
        firsts = (
            () if self._groups.keeps_all_tokens else tuple(group.first_token(table, tokens) for group, table in pairs)
        )
        blocks = sum(map(len, lent))
        self._tell(
            LeaseGranted(
                lease=grant.lease,
                blocks=blocks,
                fixed_seconds=fixed_seconds,
                block_ids=tuple(lent) if self._options.verify != "off" else None,
            )
        )
        self._figures.grant(request.request_id, blocks, tokens)
        if not grant.for_decode:
            self._kept.lend_back(request.request_id, (*block_ids, *lent))
        remote = RemotePrefill(
            engine_id=self._advertised.engine_id,
            request_id=grant.lease.request_id,
            host=self._advertised.host,
            port=self._advertised.port,
            block_ids=tuple(map(tuple, lent)),
            tp_size=self._advertised.tp_size,
            dcp_size=self._advertised.dcp_size,
            pp_size=self._advertised.pp_size,
            num_tokens=tokens,
            lease_number=grant.lease.number,
            prefix_digests=tuple(digests),
            first_tokens=firsts,
            adapter_weights=self._adapters.of(request),
            # Those of what is lent back are in its digests.
            media_names=self._media.of(request, tokens) if grant.for_decode else None,
        )
        keys = self._key_file.keys if self._key_file is not None else None
        return build_remote_prefill(remote, registration=self.registration, expires_seconds=expires_seconds, keys=keys)


def wants_remote_decode(request: Request) -> bool:
    """Whether another engine goes on from its prompt."""
    try:
        return ParamsKind.REMOTE_DECODE in classify(request.kv_transfer_params)
    except ParamsError:
        return False


def _computed_tokens(request: Request) -> int:
    """How many tokens of a request that has ended are in its blocks. Those of a step that is still under way are left
    out, because D may read before they are there. vLLM has left them out of a session's count already; the result may
    then be negative."""
    computed: int = request.num_computed_tokens - request.num_in_flight_tokens
    return computed


def _can_lend_back(vllm_config: VllmConfig, groups: CacheGroups) -> bool:
    """Whether the blocks of a request that has decoded are known to be those of so many tokens when it finishes.

    Where steps overlap, one more may be under way then, which writes beyond them: a state is lost with it. Drafts that
    were refused do the same, and a window has moved with them. What is staged on the host is copied there after a
    prefill only.
    """
    overlaps, speculates = vllm_config.scheduler_config.async_scheduling, vllm_config.num_speculative_tokens > 0
    if is_staged(vllm_config):
        why = "its KV is staged in memory of the host (kv_buffer_device cpu)"
    elif groups.has_states and (overlaps or speculates):
        why = "its model has states, and steps overlap (async scheduling) or speculate"
    elif speculates and not groups.keeps_everything:
        why = "its model has windows, and steps speculate"
    else:
        return True
    _log.warning("bidirectional_kv_xfer: this engine lends no blocks of what it has decoded, because %s", why)
    return False
