"""Figures of the scheduler's process: those that concern a whole engine, and every gauge.

vLLM carries figures to the front end with a step, and to one of its front ends only. So whatever is sent has to be
complete in itself: the ranks report their gauges with the worker report when something has changed, this remembers the
last report of each, and sends all gauges together.

While the engine makes no step nothing is sent. Whatever waits for the connector keeps vLLM stepping: a request that
waits for KV, a lease that is held, a command that was not told. So when the engine falls asleep, requests, leases,
blocks and tokens are right until it wakes up. Peers are shown as they were with the last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from connector.clock import NS_PER_SECOND, Clock
from connector.observe import catalogue
from connector.observe.stats import EngineStats
from connector.observe.traced import QUEUED
from statemachine.draining import State

_QUEUED = catalogue.REQUESTS.key(QUEUED)
_COMPUTING, _HELD = catalogue.LEASES.key("computing"), catalogue.LEASES.key("held")
_LENT_BLOCKS, _LENT_TOKENS = catalogue.LENT_BLOCKS.key(), catalogue.LENT_TOKENS.key()
_KV_BLOCKS, _OLDEST_QUEUED = catalogue.KV_BLOCKS.key(), catalogue.OLDEST_QUEUED_SECONDS.key()
_QUARANTINED, _UP = catalogue.QUARANTINED_BLOCKS.key(), catalogue.UP.key()
_DRAINING, _DRAINED = catalogue.DRAINING.key(), catalogue.DRAINED.key()
_OLDEST_REQUEST, _OLDEST_LEASE = catalogue.OLDEST_REQUEST_SECONDS.key(), catalogue.OLDEST_LEASE_SECONDS.key()
_GRANTED_LEASES = catalogue.GRANTED_LEASES.key()
_GRANTED_BLOCKS, _GRANTED_TOKENS = catalogue.GRANTED_BLOCKS.key(), catalogue.GRANTED_TOKENS.key()

AGE_SECONDS = 10
"""Ages are shown in multiples of it: a step in which nothing else changes has nothing to tell."""


class EngineFigures:
    """See the module's docstring. Lives on the scheduler's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = EngineStats()
        # Blocks and tokens of the leases that are held, and since when, by request id, the oldest first; and the sums.
        self._lent: dict[str, tuple[int, int, int]] = {}
        self._lent_blocks = 0
        self._lent_tokens = 0
        self._kv_blocks = 0
        self._by_rank: dict[int, Mapping[str, float]] = {}
        self._totals: Mapping[str, int] = {}
        # Whether there is something to tell, beside what is compared with each step.
        self._has_news = False
        # What was shown last of it: requests that are queued, leases that are not granted yet, whether it drains,
        # whether it is up, blocks in quarantine, ages.
        self._shown = (0, 0, State.SERVING, True, 0, 0, 0, 0)

    def note_pool(self, blocks: int) -> None:
        """So many blocks the engine has for KV."""
        self._kv_blocks, self._has_news = blocks, True

    def grant(self, request_id: str, blocks: int, tokens: int) -> None:
        """A lease begins."""
        self._lent[request_id] = blocks, tokens, self._clock.now_ns()
        self._lent_blocks += blocks
        self._lent_tokens += tokens
        for key, amount in ((_GRANTED_LEASES, 1), (_GRANTED_BLOCKS, blocks), (_GRANTED_TOKENS, tokens)):
            self._next.count(key, amount)
        self._has_news = True

    def end_leases(self, request_ids: Iterable[str]) -> None:
        """vLLM frees the blocks of these requests."""
        for request_id in request_ids:
            blocks, tokens, _ = self._lent.pop(request_id, (0, 0, 0))
            self._lent_blocks -= blocks
            self._lent_tokens -= tokens
            self._has_news = True

    def note_wait(self, seconds: float, *, is_loaded: bool) -> None:
        """A request's wait for KV has ended."""
        outcome = catalogue.LOADED if is_loaded else catalogue.FAILED
        self._next.sample(catalogue.KV_WAIT_SECONDS.key(outcome), seconds)
        self._has_news = True

    def note_local_prefill(self, reason: str) -> None:
        """This engine computes a prompt that it was meant to load."""
        self._next.count(catalogue.LOCAL_PREFILLS.key(reason), 1)
        self._has_news = True

    def note_not_lent(self, reason: str) -> None:
        """A prefill has come that a decode engine was to read, and that it will not."""
        self._next.count(catalogue.PREFILLS_NOT_LENT.key(reason), 1)
        self._has_news = True

    def count_on(self, totals: Mapping[str, int]) -> None:
        """What another thread of this process has counted since its start, by the key of the series. It replaces the
        mapping when a number changes."""
        if totals is self._totals:
            return
        for key, total in totals.items():
            if more := total - self._totals.get(key, 0):
                self._next.count(key, more)
        self._totals, self._has_news = totals, True

    def take_over(self, by_rank: Mapping[int, Mapping[str, float]]) -> None:
        """What ranks say of themselves; nothing of a rank: as before."""
        if by_rank:
            self._by_rank.update(by_rank)
            self._has_news = True

    def take(
        self,
        queued: int,
        computing: int,
        draining: State = State.SERVING,
        *,
        is_up: bool = True,
        quarantined_blocks: int = 0,
        queued_since_ns: int | None = None,
        loading_since_ns: int | None = None,
    ) -> EngineStats | None:
        """Figures since the last call; None: nothing has changed.

        Args:
            queued: requests that will load KV and are not scheduled yet.
            computing: of the leases that are not granted yet.
            draining: whether this engine is to end.
            is_up: it serves KV.
            quarantined_blocks: kept out of the pool because READs may still write into them.
            queued_since_ns: when this engine heard of the oldest of those that are queued; None: there is none.
            loading_since_ns: when the oldest request that loads KV began to; None: there is none.
        """
        oldest_queued = oldest_request = oldest_lease = 0
        if queued_since_ns is not None:
            oldest_queued = self._age(queued_since_ns)
        if loading_since_ns is not None:
            oldest_request = self._age(loading_since_ns)
        if self._lent:
            oldest_lease = self._age(next(iter(self._lent.values()))[2])
        oldest = oldest_queued, oldest_request, oldest_lease
        shown = (queued, computing, draining, is_up, quarantined_blocks, *oldest)
        if not self._has_news and self._shown == shown:
            return None
        self._has_news, self._shown = False, shown
        stats, self._next = self._next, EngineStats()
        stats.set_gauges(self._gauges(*shown))
        return stats

    def _gauges(
        self,
        queued: int,
        computing: int,
        draining: State,
        is_up: bool,
        quarantined_blocks: int,
        oldest_queued: int,
        oldest_request: int,
        oldest_lease: int,
    ) -> dict[str, float]:
        gauges: dict[str, float] = {}
        for of_rank in self._by_rank.values():
            for key, value in of_rank.items():
                gauges[key] = max(gauges.get(key, 0), value)
        return gauges | {
            _QUEUED: queued,
            _COMPUTING: computing,
            _HELD: len(self._lent),
            _OLDEST_QUEUED: oldest_queued,
            _OLDEST_REQUEST: oldest_request,
            _OLDEST_LEASE: oldest_lease,
            _LENT_BLOCKS: self._lent_blocks,
            _KV_BLOCKS: self._kv_blocks,
            _LENT_TOKENS: self._lent_tokens,
            _QUARANTINED: quarantined_blocks,
            _UP: int(is_up),
            _DRAINING: int(draining is not State.SERVING),
            _DRAINED: int(draining is State.DRAINED),
        }

    def _age(self, since_ns: int) -> int:
        """In seconds, as it is shown."""
        return (self._clock.now_ns() - since_ns) // NS_PER_SECOND // AGE_SECONDS * AGE_SECONDS
