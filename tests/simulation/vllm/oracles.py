"""Oracles for engines with a real scheduler, beside those of `tests.simulation.oracles`, which judge the connector.

    bytes        every slot that a request is computed from holds its own prompt's KV, and a state is that after exactly
                 the tokens that are computed: when the connector reports it loaded, and at the start and at the end of
                 every step
    answer       a request that ends normally has the tokens that an engine alone would have given it; one whose load
                 failed ends with an error under the policy `fail`, and no other does
    params       no request is refused whose parameters are those that P has given out for this very prompt
    blocks       each block is referenced by the requests that hold it and by its quarantine, and by nothing else
    block reuse  a block that the scheduler frees or hands out is named by no READ that may still write
    scheduler    vLLM's scheduler and the connector in it raise nothing
    bound        every request ends, load or no load
    standstill   no request that has no room beside a quarantine or what is lent back has others wait behind it
    sleep        an engine falls asleep only when nothing is in flight, and nobody writes into its memory until it is
                 awake
    leaks        at rest no request, lease, pull or heartbeat is left, and every block is free

`Requests` is the book of what clients asked for. Coverage counts what must occur somewhere in the seeds, so that a test
can say that it did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import trio

from tests.simulation.oracles import Oracles
from tests.simulation.vllm.content import Sequence, sequence

ENGINE_DIED = "engine died"
ABORTED = "abort"


@dataclass(eq=False, kw_only=True)
class Ask:
    """A request of a client to one engine, and what came of it.

    Attributes:
        sequence: the tokens that this engine computes, and what it has to answer.
        left_to_decode: the end of the prompt, which it gets as well and does not compute: what P lends, it leaves to D.
        max_tokens: asked for; P says one token, whatever that is, where it leaves some to D.
        stops_after: so many tokens of the answer, the last of which the client has named as one to stop at; None: the
            answer ends by its length.
        params: kv_transfer_params.
        priority: the lower, the earlier it is served.
        abort_in: status of the request, as vLLM names it or LOADED, in which the client leaves; None: it stays.
        may_fail: the load may fail although no fault touches it, because the parameters are damaged or were used.
        comes_while_draining: its engine was to end when it came, and lends nothing of it.
        finish: how it ended, as vLLM names it, or ABORTED or ENGINE_DIED; None while it is open.
        answer_params: kv_transfer_params of the answer.
    """

    request_id: str
    sequence: Sequence
    max_tokens: int
    left_to_decode: tuple[int, ...] = ()
    stops_after: int | None = None
    params: dict[str, Any] | None
    priority: int = 0
    abort_in: str | None = None
    may_fail: bool = False
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    answer_params: dict[str, Any] | None = None
    has_failed_load: bool = False
    comes_while_draining: bool = False
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def prompt_tokens(self) -> int:
        return len(self.sequence.prompt)

    def leave_nothing(self) -> None:
        """P lends nothing, so it computes all of the prompt."""
        self.sequence = sequence((*self.sequence.prompt, *self.left_to_decode), self.max_tokens)
        self.left_to_decode = ()

    @property
    def answer(self) -> list[int]:
        """What the client has to hear."""
        return self.sequence.answer[: self.stops_after]


class Requests:
    """See the module's docstring.

    Args:
        recomputes: the policy for failed loads.
        circumstances: what happens is counted once more under each of these.
    """

    def __init__(self, oracles: Oracles, *, recomputes: bool, circumstances: Iterable[str] = ()) -> None:
        self._oracles = oracles
        self._recomputes = recomputes
        self.asks: dict[str, Ask] = {}
        self.owners: dict[str, str] = {}
        """Which life of P has computed a request."""
        self._coverage = oracles.coverage
        self._circumstances = tuple(circumstances)
        self._wrong: set[str] = set()

    def begin(self, ask: Ask) -> None:
        self.asks[ask.request_id] = ask

    def cover(self, what: str, times: int = 1) -> None:
        """Count what must occur somewhere in the seeds."""
        self._coverage[what] += times
        for circumstance in self._circumstances:
            self._coverage[f"{what}, {circumstance}"] += times

    # --- bytes ------------------------------------------------------------------------------------------------------

    def wrong_bytes(self, request_id: str, engine: str, blocks: list[int], when: str) -> None:
        """Once for a request: what is wrong stays wrong."""
        if request_id not in self._wrong:
            self._wrong.add(request_id)
            self._oracles.complain("bytes", f"{request_id} {when}: blocks {blocks} of {engine} hold something else")

    # --- answers ----------------------------------------------------------------------------------------------------

    def tell(self, ask: Ask, tokens: Iterable[int]) -> None:
        """The engine has said something."""
        ask.tokens.extend(tokens)
        if ask.tokens != ask.answer[: len(ask.tokens)] and ask.request_id not in self._wrong:
            self._oracles.complain("answer", f"{ask.request_id} is told {ask.tokens}")

    def end(self, ask: Ask, finish: str) -> None:
        """The request has ended."""
        ask.finish = finish
        ask.ended.set()
        if finish in (ABORTED, ENGINE_DIED):
            return
        must_fail = ask.has_failed_load and not self._recomputes
        if ask.has_failed_load:
            self.cover("load failed, " + ("recomputed" if self._recomputes else "request failed"))
        if must_fail != (finish == "error"):
            failed = "failed" if ask.has_failed_load else "did not fail"
            self._oracles.complain("answer", f"{ask.request_id} ended with {finish}, and its load {failed}")
        elif finish == ("length" if ask.stops_after is None else "stop"):
            self.cover("stopped", ask.stops_after is not None)
            if len(ask.tokens) != len(ask.answer):
                wanted = len(ask.answer)
                self._oracles.complain("answer", f"{ask.request_id} has {len(ask.tokens)} tokens instead of {wanted}")
        elif finish != "error":
            self._oracles.complain("answer", f"{ask.request_id} ended with {finish}")

    def cover_prefix(self, ask: Ask, cached_tokens: int, block_tokens: int, role: str) -> None:
        """Count a prefix-cache hit. At most everything but the last token can hit; all whole blocks are a full one."""
        most = (ask.prompt_tokens - 1) // block_tokens * block_tokens
        if 0 < most <= cached_tokens:
            self.cover(f"full prefix hit on {role}")
        elif cached_tokens:
            self.cover(f"partial prefix hit on {role}")

    def complain_about_open_ones(self) -> None:
        """At the end: nobody waits any more."""
        for ask in self.asks.values():
            if ask.finish is None:
                self._oracles.complain("bound", f"{ask.request_id} never ended")
