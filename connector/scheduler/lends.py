"""Which requests' blocks are kept for another engine, from when the request comes to the answer that names them.

When a request with `do_remote_decode` finishes, its blocks are kept, and the answer says where they are and what the
lease on them is called. A client may repeat a request's id; the number of the lease is not repeated, by this process or
by one that is started in its place. Once a worker says that it serves no more, nothing is lent: the answer names no
blocks, so the decode engine computes the prompt itself. An engine that is to end lends what it has accepted, and no
more (`draining`).

Some models make D compute the last tokens of every prompt itself (`CacheGroups.tokens_left_to_decode`). P then leaves
these tokens out of the prompt, because a state of one token more is another state. It does so when the request comes,
and only if it will lend. vLLM appends to the prompt of a session whose input is streamed: nobody knows then which
tokens will be the last, so such a session is computed whole, and not lent.

Read-back (`bidirectional_kv_xfer`). D keeps the blocks of a finished request as P does, for `decoder_kv_blocks_ttl`,
and its answer names them; what P does with them is in `pulls`. A lease of D ends in its time, whoever holds it.
Otherwise two engines can wait for each other: P's queue holds D's blocks, P has none free for its queue because they
are lent to D, and D's queue, which holds those, waits for D's. For the same reason D lends nothing while few of its
blocks are free.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from connector.clock import NS_PER_SECOND, Clock
from connector.config import ConnectorOptions
from connector.key_files import ParamsKeyFile
from connector.observe import catalogue
from connector.observe.log import get_logger, is_said
from connector.protocol import Command, LeaseComputing, LeaseGranted, LeaseWithdrawn, PeerAddress
from connector.runtime.draining import Lent
from connector.scheduler.cache_groups import CacheGroups
from connector.scheduler.draining import SchedulerDraining
from connector.scheduler.engine_figures import EngineFigures
from connector.scheduler.far_ends import FarEnds
from connector.scheduler.host_saves import blocks_to_save
from connector.scheduler.kept_blocks import KeptBlocks
from connector.scheduler.load_order import LoadOrder
from connector.scheduler.prefix_digest import numbers_media, prefix_digests, prompt_digests
from connector.staging import is_staged
from connector.wire.bounded import ID_LENGTH_MAX, shorten
from connector.wire.control import is_request_id
from connector.wire.params import ParamsError, ParamsKind, RemotePrefill, build_remote_prefill, classify
from statemachine.failures import ADVICE_FOLLOWS
from statemachine.lease import LeaseName

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

LEFT_TO_REQUESTS = 0.25
"""Share of D's blocks that has to be free for it to keep those of a request that has finished."""

_log = get_logger()


class Lends:
    """See the module's docstring. Lives on the scheduler's thread, but for `count` and `stop`.

    Args:
        told: the address of this engine, as its answers say it.
        key_file: what parameters are signed with; None: they are not.
        clock: of this process.
        life: of this run of the engine: 32 hex digits.
        draining: whether this engine is to end.
        kept, order: which blocks are lent back, and who waits for them.
        figures: where it is counted.
        tell: the worker; called with what it has to know with the next step.

    Attributes: asked for in every step.
        computing: leases of the requests that run and will be lent, by request id.
        prompts: those of these requests whose prompt another engine takes over.
        stopped: why nothing is lent any more; None: it is.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        groups: CacheGroups,
        options: ConnectorOptions,
        told: PeerAddress,
        key_file: ParamsKeyFile | None,
        *,
        clock: Clock,
        life: str,
        draining: SchedulerDraining,
        kept: KeptBlocks,
        order: LoadOrder,
        figures: EngineFigures,
        tell: Callable[[Command], None],
    ) -> None:
        self._groups = groups
        self._options = options
        self._told = told
        self._key_file = key_file
        self._clock = clock
        self._draining = draining
        self._kept = kept
        self._order = order
        self._figures = figures
        self._tell = tell
        self._drafts_max: int = vllm_config.num_speculative_tokens
        self._numbers_media = numbers_media(vllm_config)
        self._lends_back = options.bidirectional_kv_xfer and _can_lend_back(vllm_config, groups)
        # The first number is random, so that a later life of this engine repeats none: its peers may still ask for
        # leases of this one. 48 bits leave room up to the 63 of the wire.
        self._lease_numbers = itertools.count(1 + int(life[:12], 16))
        # When this engine first heard of the requests that will be lent and were not scheduled yet, by request id.
        self._heard_ns: dict[str, int] = {}
        # Requests of clients, whose answers this engine writes.
        self._answering: set[str] = set()
        # Prefills that were accepted and are not granted yet. Their number is what who drains waits for; answers are
        # in `computing` too where blocks are lent back, and no drain waits for these.
        self._accepted: set[str] = set()
        self.computing: dict[str, LeaseName] = {}
        self.prompts: dict[str, Request] = {}
        self.stopped: str | None = None
        # Where D computes more than the last token of every prompt, that one sees nothing that P gives back.
        self._far_ends = FarEnds(groups.all if not groups.tokens_left_to_decode else ())
        self._block_pool: BlockPool | None = None
        # Prefills that came while it drained or after it had stopped, and are not lent.
        self._not_lent = 0
        # Those whose ids no engine takes.
        self._unnameable = 0

    def bind(self, pool: BlockPool) -> None:
        """The pool of the engine's blocks."""
        self._block_pool = pool
        self._far_ends.bind(pool)

    def stop(self, reason: str) -> None:
        """Lend nothing any more. Also called in the listener's thread."""
        self.stopped = self.stopped or reason

    def count(self) -> Lent:
        """In the listener's thread."""
        lent = len(self._accepted) + self._figures.leases_held
        return Lent(lent=lent, not_lent=self._not_lent, answering=len(self._answering))

    # --- a request --------------------------------------------------------------------------------------------------

    def hear(self, request: Request) -> None:
        """It has come. Note when, if it will be lent."""
        is_for_decode = wants_remote_decode(request)
        is_lent = self._accepts_prefills and self._will_lend(request)
        if is_lent:
            self._heard_ns[request.request_id] = self._clock.now_ns()
        if not is_for_decode:
            self._answering.add(request.request_id)
            return
        self._note_not_lent(request.request_id)
        if is_lent:
            self._accepted.add(request.request_id)
            self._leave_tokens_to_decode(request)

    def begin(self, request: Request) -> None:
        """It has its blocks, and is computed from now on."""
        request_id = request.request_id
        if not self._begins_lease(request):
            return
        lease = self.computing[request_id] = self._new_lease(request_id)
        now_ns = self._clock.now_ns()
        age_seconds = (now_ns - self._heard_ns.pop(request_id, now_ns)) / NS_PER_SECOND
        self._tell(LeaseComputing(lease=lease, age_seconds=age_seconds))
        if wants_remote_decode(request):
            self._far_ends.expect(request)
            self.prompts[request_id] = request

    def end(self, request_id: str) -> None:
        """It has ended, however it did. `finish` follows if it was computed here."""
        self._answering.discard(request_id)
        self._heard_ns.pop(request_id, None)
        self.prompts.pop(request_id, None)
        if request_id not in self.computing:
            self._accepted.discard(request_id)

    def finish(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """What the answer of a request that has ended says of its blocks, which are kept then; None: they are not."""
        if not self._will_lend(request):
            return None
        request_id = request.request_id
        completed = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        lease = self.computing.get(request_id)
        keeps = (
            any(block_ids)
            and _computed_tokens(request) > 0
            and self._is_settled(request)
            and self._lends_at_its_end(request, is_accepted=lease is not None)
        )
        if not completed or not keeps:
            self._forget(request_id)
            if lease is not None:
                self._tell(LeaseWithdrawn(lease=lease))
            self._far_ends.let_go(request_id)
            return None
        answer = self._grant(request, lease or self._new_lease(request_id), block_ids)
        # After it counts as lent: the listener's thread, which counts both, would take this engine for drained.
        self._forget(request_id)
        return answer

    def _forget(self, request_id: str) -> None:
        self.computing.pop(request_id, None)
        self._accepted.discard(request_id)

    def free(self, request_id: str) -> None:
        """Its lease has ended, and vLLM frees its blocks."""
        self._far_ends.let_go(request_id)

    # --- a step -----------------------------------------------------------------------------------------------------

    def follow(self, output: SchedulerOutput) -> None:
        """A step is scheduled, while something is computed that will be lent."""
        self._far_ends.follow(output)

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
    def _accepts_prefills(self) -> bool:
        """Whether the blocks of prefills that come now will be lent."""
        return self.stopped is None and self._draining.accepts

    def _will_lend(self, request: Request) -> bool:
        """Whether its blocks are kept for another engine when it has finished."""
        if wants_remote_decode(request):
            # Streamed input: which tokens are left to D is known only at its end. Where none are, it is as any other.
            is_wanted = not (request.resumable and self._groups.tokens_left_to_decode)
        else:
            is_wanted = self._lends_back and bool(request.kv_transfer_params)
        return is_wanted and is_request_id(request.request_id)

    def _begins_lease(self, request: Request) -> bool:
        """Whether what is computed of it from now on is to be lent."""
        if self.stopped is not None or request.request_id in self.computing or not self._will_lend(request):
            return False
        return self._draining.accepts or request.request_id in self._heard_ns

    def _lends_at_its_end(self, request: Request, *, is_accepted: bool) -> bool:
        """Whether the blocks of a request that has finished are lent. `is_accepted`: it was announced to be."""
        if self.stopped is not None:
            return False
        if self._draining.accepts:
            return wants_remote_decode(request) or self._may_lend_back()
        return is_accepted and wants_remote_decode(request) and self._draining.grants

    def _may_lend_back(self) -> bool:
        if self._order.waits_for_lent_back:
            return False  # they would never find room, where answers end as fast as leases do
        pool = self._block_pool
        return pool is None or pool.get_num_free_blocks() >= LEFT_TO_REQUESTS * pool.num_gpu_blocks

    def _is_settled(self, request: Request) -> bool:
        """Whether its states are those of what would be lent. A step that is still under way moves a state on; so do
        drafts that were taken for right behind the last token of the answer."""
        if not self._groups.has_states:
            return True
        is_under_way: bool = request.num_in_flight_tokens > 0
        return not is_under_way and request.num_computed_tokens <= request.num_tokens

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

    def _note_not_lent(self, request_id: str) -> None:
        """A prefill has come whose blocks will not be lent, if this is one."""
        if not self._accepts_prefills:
            self._not_lent += 1
            self._figures.note_not_lent(catalogue.DRAINING_REASON if self.stopped is None else catalogue.STOPPED_REASON)
        elif not is_request_id(request_id):
            self._figures.note_not_lent(catalogue.REQUEST_ID_REASON)
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

    # --- the lease --------------------------------------------------------------------------------------------------

    def _new_lease(self, request_id: str) -> LeaseName:
        return LeaseName(request_id, next(self._lease_numbers))

    def _grant(self, request: Request, lease: LeaseName, block_ids: tuple[list[int], ...]) -> dict[str, Any]:
        groups = self._groups.all
        expires_seconds: float | None = None
        is_for_decode = wants_remote_decode(request)
        # More than it has tokens where drafts behind the last one were taken for right.
        computed = _computed_tokens(request)
        tokens = min(group.unbroken(block_ids[group.group_id], computed) for group in groups)
        if is_for_decode:
            lease_seconds = self._options.kv_lease_duration
            tokens = min(tokens, request.num_tokens)
        else:
            lease_seconds = self._options.decoder_kv_blocks_ttl
            expires_seconds = time.perf_counter() + lease_seconds
            tokens = min(tokens, request.num_tokens - 1)
        lengths = {min(tokens, request.num_prompt_tokens), tokens} - {0}
        if is_for_decode:
            digests = prompt_digests(request, lengths)
        else:
            digests = prefix_digests(request, lengths, numbers_media=self._numbers_media)
        far_ends = self._far_ends.lend(request.request_id, tokens)
        lent = [group.lend(block_ids[group.group_id], tokens, far_ends.get(group.group_id)) for group in groups]
        pairs = zip(groups, lent, strict=True)
        firsts = (
            () if self._groups.keeps_all_tokens else tuple(group.first_token(table, tokens) for group, table in pairs)
        )
        blocks = sum(map(len, lent))
        self._tell(
            LeaseGranted(
                lease=lease,
                lease_seconds=lease_seconds,
                blocks=blocks,
                is_renewable=is_for_decode,
                block_ids=tuple(lent) if self._options.verify != "off" else None,
            )
        )
        self._figures.grant(request.request_id, blocks, tokens)
        if not is_for_decode:
            self._kept.lend_back(request.request_id, (*block_ids, *lent))
        remote = RemotePrefill(
            engine_id=self._told.engine_id,
            request_id=lease.request_id,
            host=self._told.host,
            port=self._told.port,
            block_ids=tuple(map(tuple, lent)),
            tp_size=self._told.tp_size,
            dcp_size=self._told.dcp_size,
            pp_size=self._told.pp_size,
            num_tokens=tokens,
            lease_number=lease.number,
            prefix_digests=tuple(digests),
            first_tokens=firsts,
        )
        keys = self._key_file.keys if self._key_file is not None else None
        return build_remote_prefill(remote, expires_seconds=expires_seconds, keys=keys)


def wants_remote_decode(request: Request) -> bool:
    """Whether another engine goes on from its prompt."""
    try:
        return classify(request.kv_transfer_params) is ParamsKind.REMOTE_DECODE
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
