"""What is searched.

Durations are small integers: nanoseconds of clocks that advance by 5, 6 or 7 a tick, 6 being right. The hours of P and
of each decode engine are values of their own, and only differences of one clock ever matter.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from statemachine.lending import Lending, LendingLimits
from statemachine.remote_engine import EngineLimits, RemoteEngine

TICK_NS = 6
"""What a clock that is right advances by in one tick."""

SLOW_NS = 5
"""The slowest clock that a proof has to bear: by `DRIFT_DIVISOR`, a sixth is lost."""

ENGINE_LIMITS = EngineLimits(
    lease_ns=120,
    margin_ns=2,
    request_ns=150,
    quiesce_ns=36,
    grace_ns=12,
    backoff_first_ns=12,
    backoff_max_ns=24,
    incompatible_ns=48,
    retries=1,
)
LEAVING_GRACE_NS = 150
"""How long P lends for, when it is to end; more than a lease lasts, as `drain_grace_seconds` has to be."""

LENDING_LIMITS = LendingLimits(lease_ns=120, total_ns=240, standstill_ns=12)


class Cores(msgspec.Struct, frozen=True, kw_only=True):
    """The classes to search over: production's, unless a test breaks one. A broken one is a subclass."""

    remote_engine: Callable[..., RemoteEngine] = RemoteEngine
    lending: Callable[..., Lending] = Lending


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """One product of cores, and what may happen to it.

    Attributes:
        requests: for each request the decode engine that it is on and the lease that it names, both by number.
        decode_ranks, prefill_ranks: every rank of a decode engine reads from every rank of P, one READ each.
        deviations: how many in one execution.
        is_builtin: P has the built-in connector: it is notified, never asked, and its leases are assumed.
        restarts: P may crash, and a new life with the same engine id is there at once.
        leaves: P may be told to leave, and ends then.
        hangs: a rank of P may hang: it takes nothing and does nothing, and may go on later.
        dies: decode engines may crash for good.
        supervised: the executor may crash, and the supervisor may give the engine up.
        aborts: the client may abort, or be served by the prefix cache before it is scheduled.
        keeps: D's scheduler has leases kept until it lets go of them.
        checks: what READs leave is checked, and may be other bytes than P's memory had.
        twins: all decode engines have one engine id.
        unnumbered: requests, by number, whose parameters name their lease without its number.
        clocks: what a decode engine's clock advances by in a tick; another one than the first is a deviation.
    """

    name: str
    requests: tuple[tuple[int, int], ...] = ((0, 0),)
    decode_ranks: int = 1
    prefill_ranks: int = 1
    deviations: int = 1
    is_builtin: bool = False
    restarts: bool = False
    leaves: bool = False
    hangs: bool = False
    dies: bool = False
    supervised: bool = False
    aborts: bool = True
    keeps: bool = False
    checks: bool = False
    twins: bool = False
    unnumbered: tuple[int, ...] = ()
    clocks: tuple[int, ...] = (TICK_NS, SLOW_NS)
    engine_limits: EngineLimits = ENGINE_LIMITS
    lending_limits: LendingLimits = LENDING_LIMITS
    states_max: int = 4_000_000

    @property
    def decode_engines(self) -> int:
        return 1 + max(engine for engine, _ in self.requests)

    def decode_id(self, engine: int) -> str:
        return "d" if self.twins else f"d{engine}"

    @property
    def leases(self) -> int:
        return 1 + max(lease for _, lease in self.requests)


_TWO, _THREE = ((0, 0), (0, 1)), ((0, 0), (0, 1), (0, 2))

PRODUCTS: tuple[Product, ...] = (
    Product(name="one request", deviations=2, restarts=True),
    Product(name="one request under a supervisor", deviations=2, restarts=True, supervised=True, dies=True),
    Product(name="one request that is checked", deviations=2, checks=True, restarts=True),
    Product(name="one request that is checked, under a supervisor", deviations=2, checks=True, supervised=True),
    Product(name="a checked request, two ranks of P", prefill_ranks=2, deviations=1, checks=True, supervised=True),
    Product(name="two requests", requests=_TWO, deviations=2, restarts=True),
    Product(name="three requests", requests=_THREE, deviations=1, restarts=True),
    Product(name="two requests, one lease", requests=((0, 0), (0, 0)), deviations=2, restarts=True),
    Product(name="two requests, one lease that is kept", requests=((0, 0), (0, 0)), deviations=2, keeps=True),
    Product(
        name="two requests, one lease that is kept, P restarts or hangs",
        requests=((0, 0), (0, 0)),
        deviations=2,
        keeps=True,
        restarts=True,
        hangs=True,
        clocks=(TICK_NS,),
    ),
    Product(
        name="two requests, one lease that is kept, P leaves",
        requests=((0, 0), (0, 0)),
        deviations=2,
        keeps=True,
        leaves=True,
        clocks=(TICK_NS,),
    ),
    Product(
        name="two requests that are checked, one lease that is kept",
        requests=((0, 0), (0, 0)),
        deviations=2,
        keeps=True,
        checks=True,
        clocks=(TICK_NS,),
    ),
    Product(
        name="two requests, one lease that is kept, under a supervisor",
        requests=((0, 0), (0, 0)),
        deviations=2,
        keeps=True,
        supervised=True,
        clocks=(TICK_NS,),
    ),
    Product(
        name="two requests, one lease, under a supervisor",
        requests=((0, 0), (0, 0)),
        deviations=2,
        supervised=True,
        clocks=(TICK_NS,),
    ),
    Product(name="two requests, one lease, one name without its number", requests=((0, 0), (0, 0)), unnumbered=(1,)),
    Product(name="one request, its lease is kept", deviations=2, keeps=True, restarts=True, supervised=True),
    Product(name="two ranks of P", prefill_ranks=2, deviations=2, restarts=True),
    Product(name="two ranks of D", decode_ranks=2, deviations=2),
    Product(name="two engines, one lease", requests=((0, 0), (1, 0)), deviations=2, restarts=True, dies=True),
    Product(name="two engines of one id", requests=((0, 0), (1, 0)), deviations=2, twins=True, dies=True),
    Product(name="P hangs", deviations=2, hangs=True),
    Product(
        name="P hangs or restarts, under a supervisor",
        deviations=2,
        hangs=True,
        restarts=True,
        supervised=True,
        clocks=(TICK_NS,),
    ),
    Product(name="P hangs, two requests", requests=_TWO, deviations=1, hangs=True, restarts=True),
    Product(name="P hangs, two ranks of P", prefill_ranks=2, deviations=1, hangs=True, restarts=True),
    Product(name="P leaves", requests=_TWO, deviations=2, leaves=True),
    Product(name="P leaves, two requests, one lease", requests=((0, 0), (0, 0)), deviations=2, leaves=True),
    Product(name="P leaves, two ranks of P", prefill_ranks=2, deviations=1, leaves=True, restarts=True),
    Product(name="P leaves, two engines", requests=((0, 0), (1, 0)), deviations=1, leaves=True, dies=True),
    Product(name="built-in P", requests=_TWO, deviations=2, is_builtin=True, restarts=True),
    Product(name="built-in P, kept leases", requests=((0, 0), (0, 0)), deviations=2, is_builtin=True, keeps=True),
    Product(name="built-in P, two ranks of D", decode_ranks=2, deviations=2, is_builtin=True),
)
