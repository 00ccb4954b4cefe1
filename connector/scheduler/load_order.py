"""In which order requests get blocks, where vLLM's own order would stand still.

vLLM serves its queue in order, and stops at the first request whose blocks it cannot have. What it takes for granted
does not hold here in three cases. `get_num_new_matched_tokens` can have a request passed over, and that is all that a
connector can do about the order.

A request whose load failed gives its blocks back and is scheduled again, under the policy `recompute`. vLLM 0.32 does
both at the head of the queue of those that hold blocks: if the pool has too few for it then, nobody behind it is
looked at any more, not even those that have all they need, and with nothing running the engine stands still for good.
So the first time that such a request asks, it is told to come again: vLLM then puts it at the head of the ordinary
queue, which is served after those that hold blocks (`_failed`).

Until it has blocks again, vLLM reserves as many as it needs: loads are begun only with what is left. Where the queue is
one of priorities, others stand before it, and if one of these is a load that does not fit beside what is reserved,
nobody behind it is looked at any more. So while such requests wait (`_to_compute`), a load that has got no blocks lets
them pass in the step after it, and nobody else (`_lets_pass`).

One that does not fit beside what is kept from the pool (`kept_blocks`) waits for nobody, and nobody for it. But vLLM
reserves all the same, so no load would begin: prompts are computed here until it has its blocks
(`_failed_without_room`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from connector.observe.event_log import EventLog
from connector.scheduler.kept_blocks import KeptBlocks

if TYPE_CHECKING:
    from vllm.v1.request import Request


class LoadOrder:
    """See the module's docstring. Lives on the scheduler's thread.

    Attributes:
        has_to_step: whether `step` has something to do. Asked for in every step.
    """

    def __init__(self, kept: KeptBlocks, event_log: EventLog) -> None:
        self._kept = kept
        self._event_log = event_log
        self.has_to_step = False
        # Loads that failed and have not asked again since.
        self._failed: set[str] = set()
        # Those of them that have asked, and have no blocks yet.
        self._to_compute: set[str] = set()
        # In this step: loads that may begin and have no blocks yet; and whether all others let those above pass.
        self._offered: set[str] = set()
        self._lets_pass = False
        # Requests that were passed over because what is kept leaves no room for them; those of them that would have
        # room if nothing were lent back; and those whose loads have failed.
        self._without_room: set[str] = set()
        self._behind_lent_back: set[str] = set()
        self._failed_without_room: set[str] = set()

    @property
    def waits_for_lent_back(self) -> bool:
        """Whether somebody would have room if nothing were lent back."""
        return bool(self._behind_lent_back)

    @property
    def begins_no_load(self) -> bool:
        """Whether vLLM keeps all that is free, and more, for one that has failed: no load would begin before it does,
        and nobody behind a load that cannot begin is looked at."""
        return bool(self._failed_without_room)

    def fail(self, request_ids: Iterable[str]) -> None:
        """Their loads have failed; vLLM is about to queue them again."""
        self._failed.update(request_ids)

    def may_ask(self, request: Request, loaded: int) -> bool:
        """Whether a request may have blocks now, or is to be passed over. `loaded`: of how many of its tokens the KV
        may be loaded or found here."""
        request_id = request.request_id
        if request_id in self._failed:
            self._failed.remove(request_id)
            self._to_compute.add(request_id)
            return False
        if not self._kept.leave_room(request, loaded):
            self._find_no_room(request, loaded)
            return False
        return not self._lets_pass or request_id in self._to_compute

    def offer(self, request_id: str) -> None:
        """Its load may begin in this step, if vLLM has blocks for it."""
        self._offered.add(request_id)
        self.has_to_step = True

    def leave(self, request_id: str) -> None:
        """It has blocks now, or has ended."""
        self._failed.discard(request_id)
        self._to_compute.discard(request_id)
        self._offered.discard(request_id)
        self._without_room.discard(request_id)
        self._behind_lent_back.discard(request_id)
        if request_id in self._failed_without_room:
            self._failed_without_room.remove(request_id)
            if not self._failed_without_room:
                self._event_log.loads_again()

    def step(self) -> None:
        """A step is scheduled: who asks from now on asks in the next one."""
        if self._failed_without_room and self._kept.is_none:
            # Their turn may be far off; what they need is kept for them as for all whose load has failed.
            self._to_compute |= self._failed_without_room
            self._failed_without_room.clear()
            self._event_log.loads_again()
        self._lets_pass = False
        if self._offered:
            self._lets_pass = len(self._to_compute) > 0
            self._offered.clear()
        self.has_to_step = self._lets_pass or len(self._failed_without_room) > 0

    def _find_no_room(self, request: Request, loaded: int) -> None:
        request_id = request.request_id
        subject = f"request {request_id}"
        if request_id in self._to_compute:
            self._to_compute.remove(request_id)  # nobody waits for it
            self._failed_without_room.add(request_id)
            self.has_to_step = True
            if len(self._failed_without_room) == 1:
                self._event_log.loads_nothing(subject)
        if request_id not in self._without_room:
            self._without_room.add(request_id)
            kept = self._kept
            self._event_log.finds_no_room(subject, request.num_tokens, kept.quarantined, kept.lent_back)
        # Asked of each such request in each step: only what the first question has not answered.
        is_known = request_id in self._behind_lent_back or not self._kept.lent_back
        if not is_known and self._kept.would_leave_room(request, loaded):
            self._behind_lent_back.add(request_id)
