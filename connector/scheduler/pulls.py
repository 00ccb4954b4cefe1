"""What of a request's prompt is read from another engine: decided when it comes, by its kv_transfer_params.

kv_transfer_params comes from outside. A request whose parameters cannot be decoded, or are not signed as those of this
fleet are (`connector.wire.signatures`), is parked like any other, and the worker fails it: only on that path the client
gets an error under the policy `fail`, and a recomputation under `recompute`. Until then nobody has heard of the engine
that they name.

Of a prompt that goes on from the one that was lent, as where a router has appended the token that P has sampled, what
was lent is loaded and the rest computed. Parameters may also come once more: with the other samples of a prompt, or,
where vLLM runs tools itself (`/v1/responses`), with each turn of a call. Which of these requests read is decided in
`statemachine/loads.py`; `lease_key` is the name by which it knows what they read.

An engine may have several KV cache groups (full attention next to sliding windows or states); both sides list the
block tables of a request group by group, in the same order. Which blocks of a table travel is in `cache_groups`. Blocks
are paired by position: after a prefix-cache hit of h blocks D reads P's blocks h.. into its own.

A chain of engines. A request may be loaded here and lent on (`lends`), with all of its prompt, whichever part was
loaded. Not of a model with states: a state is that of all tokens, and this engine has to compute one more.

Read-back (`bidirectional_kv_xfer`). D keeps the blocks of an answer (`lends`), and the next prompt of the conversation
comes to P with these parameters: P reads what it has not cached of what both are known to begin with (`prefix_digest`),
as D would, and computes the rest. All that this saves is time, so whatever is wrong with such parameters, or cannot be
read (a state of more tokens than the prompt has), P computes itself. Only from engines that answer for their leases: of
a built-in D nobody knows whether it still has the blocks. Parameters without a number are of such a one, or came
through a router that drops the keys that it does not know: nothing is read, and the blocks are released as if it had
been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from connector.addresses import join_address
from connector.clock import NS_PER_SECOND, Clock
from connector.config import ConnectorOptions
from connector.key_files import ParamsKeyFile
from connector.layout.compatibility import NUMBER_OF_GROUPS, SAME_GROUPS
from connector.observe import catalogue
from connector.observe.event_log import FailureLog, request_subject
from connector.observe.log import get_logger, is_said
from connector.protocol import LetGo, PeerAddress, RejectPull, ReleaseUnread, StartPull, TrackLease
from connector.scheduler.adapters import AdapterWeights
from connector.scheduler.cache_groups import CacheGroups
from connector.scheduler.media_names import MediaNames, differ
from connector.scheduler.prefix_digest import prefix_digests, prompt_digests
from connector.step_overlap import may_read
from connector.wire.params import (
    ParamsError,
    ParamsKind,
    RemotePrefill,
    classify,
    names_source,
    parse_remote_prefill,
    require_genuine,
)
from statemachine.failures import ADVICE_FOLLOWS, BadParams, Incompatible, ParamsFailure, WrongPrompt
from statemachine.lease import LeaseName

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

_log = get_logger()


@dataclass(frozen=True, slots=True)
class WaitingPull:
    """A request that is not scheduled yet, and of which something may be read.

    Attributes:
        remote: what its kv_transfer_params say, or why nothing is done about them.
        tokens: to be loaded, counted from the start of the request, prefix hits included.
        at_least: fewer tokens than these are computed here.
        heard_ns: when this engine first heard of it.
        prompt_tokens: of the request.
        named: what the parameters name of which nothing is done, where that can be read.
        computed_because: why nothing is to be loaded, as local prefills are counted; None: something is, or there is
            nothing to load.
        lease_key: unique across engines, and with the sizes by which requests describe them (`roster.PeerKey`): who is
            told of the lease is found by these. None: nothing is lent.
        is_made_up: by vLLM, under an id that nobody knows, to have the blocks of a request released that it has
            refused, or whose load has failed.
    """

    remote: RemotePrefill | ParamsFailure
    tokens: int
    at_least: int
    heard_ns: int
    prompt_tokens: int
    named: RemotePrefill | None = None
    computed_because: str | None = None
    is_made_up: bool = False

    @property
    def lease_key(self) -> str | None:
        remote = self.remote
        if not isinstance(remote, RemotePrefill):
            return None
        sizes = f"{remote.tp_size} {remote.dcp_size} {remote.pp_size}"
        return f"{remote.lease_number}\n{sizes}\n{remote.engine_id}\n{remote.request_id}"


class Pulls:
    """See the module's docstring. Lives on the scheduler's thread.

    Args:
        key_file: what parameters are signed with; None: they are not.
        adapters: what is known of them.
        clock: of this process.
        log_failure: where it is said what parameters cannot be used for, when no client is told.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        groups: CacheGroups,
        options: ConnectorOptions,
        key_file: ParamsKeyFile | None,
        adapters: AdapterWeights,
        *,
        clock: Clock,
        log_failure: FailureLog,
    ) -> None:
        self._groups = groups
        self._options = options
        self._key_file = key_file
        self._adapters = adapters
        self._may_read = may_read(vllm_config)
        self._media = MediaNames(vllm_config)
        self._clock = clock
        self._log_failure = log_failure
        # Prompts whose parameters name the blocks of an answer, and no lease.
        self._numberless = 0
        # Requests of whose adapter the lender has other weights.
        self._of_other_adapters = 0
        # Requests of whose images and the like the lender had others.
        self._of_other_media = 0

    def of_decode(self, request: Request) -> WaitingPull | None:
        """D: of a request whose KV is on P, as its parameters say; None: they name no P. It may be lent on."""
        params_untrusted = request.kv_transfer_params
        tokens, now_ns = self._tokens_to_load(request), self._clock.now_ns()
        because, named = None, None
        try:
            kind = classify(params_untrusted)
            if ParamsKind.REMOTE_PREFILL not in kind:
                return None
            if ParamsKind.REMOTE_DECODE in kind and self._groups.has_states:
                # What is lent to this engine is the state that the next one needs, and this one has to compute a token.
                expected = "false when do_remote_prefill is true, for this model, which has states or ring buffers"
                raise ParamsError(BadParams(field="do_remote_decode", expected=expected, found="true"))
            if not self._may_read:
                # A request that belongs to D. What is read for it could be overwritten: see `step_overlap`.
                expected = (
                    "false on an engine of kv_role kv_producer with steps that overlap (async scheduling, pipeline"
                    " stages), or with prefill_context_parallel_size above 1"
                )
                raise ParamsError(BadParams(field="do_remote_prefill", expected=expected, found="true"))
            named = parse_remote_prefill(params_untrusted)
            remote = self._genuine(named, lends_back=False)
            if remote.num_tokens is None:
                # What an engine with these options computes of it. Clipped tables are counted from their end.
                computed = max(0, request.num_prompt_tokens - self._groups.tokens_left_to_decode)
                remote = msgspec.structs.replace(remote, num_tokens=computed)
            lent = self._lent_beginning(remote, request)
            tokens = tokens if lent is None else lent
            if lent is None:
                # First: that they are another prompt's is why they would not fit.
                self._check_prompt(remote, request)
            self._check_fit(remote, request, tokens)
            if self._loads(request):
                tokens = self._tokens_to_go_on_from(remote, request, tokens)
                because = None if tokens else catalogue.WINDOW
                if self._has_other_adapter(remote, request):
                    tokens, because = 0, catalogue.ADAPTER
                elif self._has_other_media(remote, request):
                    tokens, because = 0, catalogue.MEDIA
        except ParamsError as error:
            return WaitingPull(
                error.failure,
                tokens=tokens,
                at_least=0,
                heard_ns=now_ns,
                prompt_tokens=request.num_prompt_tokens,
                named=named,
                is_made_up=request.abort_immediately,
            )
        self._media.separate(request, remote.media_names, remote.num_tokens or 0)
        at_least = self._options.decode_recompute_threshold
        return WaitingPull(
            remote,
            tokens=tokens,
            at_least=at_least,
            heard_ns=now_ns,
            prompt_tokens=request.num_prompt_tokens,
            computed_because=because,
        )

    def of_prefill(self, request: Request) -> WaitingPull | None:
        """P: of a prompt whose beginning a D has; None: there is none, or what it has is of no use."""
        params_untrusted = request.kv_transfer_params
        if not self._options.bidirectional_kv_xfer or not names_source(params_untrusted):
            return None
        heard_ns = self._clock.now_ns()
        try:
            remote = self._genuine(parse_remote_prefill(params_untrusted), lends_back=True)
        except ParamsError as error:
            age_seconds = self._age_seconds(heard_ns)
            subject = request_subject(request.request_id, age_seconds, "which is computed whole")
            self._log_failure(subject, error.failure)
            return None
        groups = len(self._groups.all)
        if len(remote.block_ids) != groups or len(remote.first_tokens) not in (0, groups):
            _log.debug("request %s is computed whole: its parameters are of another kind of engine", request.request_id)
            return None
        if remote.lease_number is None:
            self._note_numberless(request.request_id)
        is_other = self._has_other_adapter(remote, request)
        tokens = 0 if is_other else self._tokens_to_read_back(request, remote)
        at_least = self._options.kv_recompute_threshold
        return WaitingPull(
            remote, tokens=tokens, at_least=at_least, heard_ns=heard_ns, prompt_tokens=request.num_prompt_tokens
        )

    def track(self, request_id: str, pull: WaitingPull) -> TrackLease | None:
        """Keeps its lease from now on; None: it has none."""
        if not isinstance(pull.remote, RemotePrefill):
            return None
        age_seconds = self._age_seconds(pull.heard_ns)
        return TrackLease(
            request_id=request_id, lease=_lease(pull.remote), peer=_address(pull.remote), age_seconds=age_seconds
        )

    def load(
        self, request_id: str, pull: WaitingPull, blocks: KVCacheBlocks, *, keeps_lease: bool
    ) -> StartPull | RejectPull:
        """Reads into these blocks, or fails the load."""
        groups, remote, tokens = self._groups.all, pull.remote, pull.tokens
        tables: Sequence[Sequence[int]] = remote.block_ids if isinstance(remote, RemotePrefill) else [()] * len(groups)
        pulls = tuple(
            group.pull(blocks.blocks[group.group_id], table, tokens)
            for group, table in zip(groups, tables, strict=True)
        )
        if not isinstance(remote, RemotePrefill):
            local = [block_id for each in pulls for block_id in each.local_block_ids]
            age_seconds = self._age_seconds(pull.heard_ns)
            rejected = RejectPull(request_id=request_id, local_block_ids=local, failure=remote, age_seconds=age_seconds)
            if (named := pull.named) is None:
                return rejected
            return msgspec.structs.replace(rejected, lease=_lease(named), engine_id=named.engine_id)
        return StartPull(
            request_id=request_id,
            lease=_lease(remote),
            peer=_address(remote),
            groups=pulls,
            num_tokens=tokens,
            remote_num_tokens=remote.num_tokens,
            age_seconds=self._age_seconds(pull.heard_ns),
            keeps_lease=keeps_lease,
        )

    def release_unread(self, request_id: str, pull: WaitingPull) -> ReleaseUnread | None:
        """Nothing is read: has the prefill engine free its blocks, if it has any."""
        age_seconds = self._age_seconds(pull.heard_ns)
        if isinstance(pull.remote, RemotePrefill):
            return ReleaseUnread(
                request_id=request_id, lease=_lease(pull.remote), peer=_address(pull.remote), age_seconds=age_seconds
            )
        if pull.is_made_up:
            # The load that has failed has a line, and what vLLM has refused an answer that says why.
            _log.debug("nothing is released for %s: %s", request_id, pull.remote)
        else:
            self._log_failure(request_subject(request_id, age_seconds, "for which nothing is read"), pull.remote)
        return None

    def let_go(self, pull: WaitingPull) -> LetGo:
        """No request here wants anything of its lease any more."""
        assert isinstance(pull.remote, RemotePrefill)
        return LetGo(lease=_lease(pull.remote), peer=_address(pull.remote))

    # --- parameters -------------------------------------------------------------------------------------------------

    def _genuine(self, remote: RemotePrefill, *, lends_back: bool) -> RemotePrefill:
        """Raise ParamsError for parameters that no engine of this fleet has given out. See `require_genuine`."""
        if self._key_file is None:
            return remote
        allows_unsigned = self._options.allow_insecure_peers
        return require_genuine(remote, self._key_file.keys, lends_back=lends_back, allows_unsigned=allows_unsigned)

    def _check_fit(self, remote: RemotePrefill, request: Request, tokens: int) -> None:
        """Raise ParamsError for parameters that no READ of so many tokens of this request can satisfy; Incompatible, if
        they show that P is another kind of engine."""
        ours, theirs = len(self._groups.all), len(remote.block_ids)
        if theirs == 0:
            expected = f"block ids of {ours} KV cache group(s), as this engine has"
            raise ParamsError(BadParams(field="remote_block_ids", expected=expected, found="none"))
        if ours != theirs:
            # The handshake would find it too, but there is nowhere to put blocks of so many.
            raise ParamsError(
                Incompatible(
                    peer=remote.engine_id,
                    address=join_address(remote.host, remote.port),
                    field=NUMBER_OF_GROUPS,
                    local=str(ours),
                    remote=str(theirs),
                    advice=SAME_GROUPS,
                )
            )
        if remote.first_tokens and len(remote.first_tokens) != ours:
            expected = f"one for each of {ours} KV cache group(s)"
            raise ParamsError(BadParams(field="first_tokens", expected=expected, found=str(len(remote.first_tokens))))
        if not self._loads(request):
            return
        found = remote.num_tokens or 0
        if self._groups.has_states and found != tokens:
            expected = f"{tokens}, the state after exactly so many tokens"
            raise ParamsError(BadParams(field="remote_num_tokens", expected=expected, found=str(found)))
        if found < tokens:
            # A prefix hit covers the front: if anything is loaded, the last of these tokens is.
            expected = f"at least {tokens}, the tokens of the prompt that this engine loads"
            raise ParamsError(BadParams(field="remote_num_tokens", expected=expected, found=str(found)))

    def _check_prompt(self, remote: RemotePrefill, request: Request) -> None:
        """Raise ParamsError for parameters that were given out for another prompt (`prefix_digest`), or have lost what
        says for which. A built-in P does not say it; it numbers no lease."""
        if remote.lease_number is None or not self._loads(request):
            return
        if not remote.prefix_digests:
            expected = "a digest of the prompt, as there is beside each lease_number"
            raise ParamsError(BadParams(field="prefix_digests", expected=expected, found="nothing"))
        prompt = request.num_prompt_tokens
        # A digest of fewer tokens than are loaded shows nothing of the rest.
        said = {length: digest for length, digest in remote.prefix_digests if length <= prompt}
        ours = prompt_digests(request, [length for length in said if length >= self._tokens_to_load(request)])
        if not any(said[length] == digest for length, digest in ours):
            lent_tokens = remote.num_tokens or 0
            raise ParamsError(WrongPrompt(lent_tokens=lent_tokens, source=remote.source, tokens=prompt))

    def _has_other_adapter(self, remote: RemotePrefill, request: Request) -> bool:
        """Whether the lender is known to have had other weights under the name of the adapter."""
        if remote.adapter_weights is None:
            return False
        ours = self._adapters.of(request)
        if ours is None or ours == remote.adapter_weights:
            return False
        self._of_other_adapters += 1
        if is_said(self._of_other_adapters):
            assert request.lora_request is not None
            _log.warning(
                "the prompt of request %s is computed here: its adapter %s has other weights here (%s) than engine %s "
                f"had{ADVICE_FOLLOWS}load the same adapter on all engines; new weights under a new name need no such "
                "moment (number %d)",
                request.request_id,
                request.lora_request.lora_name,
                request.lora_request.lora_path,
                remote.engine_id,
                self._of_other_adapters,
            )
        return True

    def _has_other_media(self, remote: RemotePrefill, request: Request) -> bool:
        """Whether the lender is known to have had other images, or sound, in the places of the same tokens."""
        if remote.media_names is None:
            return False
        ours = self._media.to_compare(request, remote.num_tokens or 0)
        if ours is None or not differ(ours, remote.media_names):
            return False
        self._of_other_media += 1
        if is_said(self._of_other_media):
            _log.warning(
                "the prompt of request %s is computed here: it has other images (or sound, or video) than engine %s "
                f"has computed as %s{ADVICE_FOLLOWS}have the router send each request with the kv_transfer_params of "
                "its own prefill, and the same names (uuid) of images to both engines (number %d)",
                request.request_id,
                remote.engine_id,
                remote.request_id,
                self._of_other_media,
            )
        return True

    def _note_numberless(self, request_id: str) -> None:
        """P: parameters of an answer that say neither what is lent nor under which number: nothing is read."""
        self._numberless += 1
        if is_said(self._numberless):
            _log.warning(
                "prompt %s is computed whole, and the blocks of the answer that it goes on from are given back unread: "
                f"their kv_transfer_params have no lease_number{ADVICE_FOLLOWS}have the router forward all keys, and "
                "not only those that it knows, as llm-d's sidecar does; where D has the built-in connector, leave "
                "bidirectional_kv_xfer off (number %d)",
                request_id,
                self._numberless,
            )

    # --- tokens -----------------------------------------------------------------------------------------------------

    def _loads(self, request: Request) -> bool:
        """D: whether anything of its prompt is loaded. A request that must not read cached KV (prompt logprobs) loads
        nothing; nor does one that vLLM makes up, with a prompt of its own, to have the blocks of one released that it
        has refused."""
        is_made_up: bool = request.abort_immediately
        return self._tokens_to_load(request) > 0 and not request.skip_reading_prefix_cache and not is_made_up

    def _tokens_to_load(self, request: Request) -> int:
        """Counted from the start of the request, prefix hits included."""
        tokens: int = max(0, request.num_prompt_tokens - self._groups.tokens_left_to_decode)
        return tokens

    def _tokens_to_read_back(self, request: Request, remote: RemotePrefill) -> int:
        """How many of D's tokens this prompt is known to begin with (`prefix_digest`). If all of them were loaded, vLLM
        would compute the last one again, which a state does not allow."""
        if remote.lease_number is None:
            return 0
        theirs, ours = remote.num_tokens or 0, request.num_prompt_tokens
        said = {tokens: digest for tokens, digest in remote.prefix_digests if tokens <= min(theirs, ours)}
        known = prefix_digests(request, said, media_are_numbered=self._media.are_numbers)
        tokens = max((tokens for tokens, digest in known if said[tokens] == digest), default=0)
        if self._groups.keeps_everything:
            return tokens
        # A clipped table or a state is that of all of their tokens, and has to begin where ours needs it.
        is_whole = ours > tokens == theirs and self._tokens_to_go_on_from(remote, request, tokens) == tokens
        return tokens if is_whole else 0

    def _tokens_to_go_on_from(self, remote: RemotePrefill, request: Request, tokens: int) -> int:
        """How many to load, so many or one fewer. 0: the lender lends too little for either.

        Of a prompt that is loaded whole vLLM has the last token computed again, with block tables that are clipped for
        a token after it: where a block ends with what only the last one sees, that block is missing. If a token fewer
        is loaded, it is there, and is read if P lends its own.
        """
        if self._groups.keeps_all_tokens:
            return tokens
        firsts = self._first_tokens(remote)
        # A state is that of all tokens.
        fewest = tokens if self._groups.has_states else max(1, tokens - 1)
        for loaded in range(tokens, fewest - 1, -1):
            computed = min(loaded, request.num_prompt_tokens - 1)
            if all(
                max(first, group.first_in_table(loaded, group.block_size)) <= group.first_needed(loaded, computed)
                for group, first in zip(self._groups.all, firsts, strict=True)
            ):
                return loaded
        return 0

    def _first_tokens(self, remote: RemotePrefill) -> Sequence[int]:
        """Which token the lender's blocks of each group begin with."""
        if remote.first_tokens:
            return remote.first_tokens
        # A built-in one does not say, but clips its tables as ours are.
        theirs = remote.num_tokens or 0
        pairs = zip(self._groups.all, remote.block_ids, strict=True)
        ratio = max((group.remote_blocks_per_block(table, theirs) for group, table in pairs), default=1)
        return [group.first_in_table(theirs, max(1, group.block_size // ratio)) for group in self._groups.all]

    def _lent_beginning(self, remote: RemotePrefill, request: Request) -> int | None:
        """D: how many tokens are lent, where there are fewer than it loads and its prompt is known to begin with them;
        otherwise None."""
        tokens, lent = self._tokens_to_load(request), remote.num_tokens or 0
        said = [digest for length, digest in remote.prefix_digests if length == lent]
        if remote.lease_number is None or lent >= tokens or not said:
            return None
        return lent if prompt_digests(request, [lent]) == [(lent, said[0])] else None

    def _age_seconds(self, heard_ns: int) -> float:
        return (self._clock.now_ns() - heard_ns) / NS_PER_SECOND


def _lease(remote: RemotePrefill) -> LeaseName:
    return LeaseName(remote.request_id, remote.lease_number or 0)


def _address(remote: RemotePrefill) -> PeerAddress:
    return PeerAddress(
        engine_id=remote.engine_id,
        host=remote.host,
        port=remote.port,
        tp_size=remote.tp_size,
        dcp_size=remote.dcp_size,
        pp_size=remote.pp_size,
        registration=remote.registration,
    )
