"""Level 1 of `bench_scale`: the cores alone. What one says to another is handed over at once; time hardly moves."""

from __future__ import annotations

from collections import deque

from statemachine import lending, remote_engine
from statemachine.kernel import Effect, Event
from statemachine.lease import LeaseName
from statemachine.lending import Lending
from statemachine.remote_engine import RemoteEngine
from tests.bench.bench_cores import ADDRESS, ENGINE, LENDING
from tests.bench.scale_load import Load
from tests.simulation.bare_engines import request_name

STEP_NS = 1_000


class Cores:
    """See `scale_load.Side`. A `RemoteEngine` for each peer, and a `Lending` for each rank of each peer."""

    def __init__(self, load: Load) -> None:
        self._ranks = load.ranks
        self._workers = tuple(map(str, range(load.ranks)))
        self._engines = [RemoteEngine(f"p{peer}", ADDRESS, ENGINE) for peer in range(load.peers)]
        self._lendings = [[Lending(LENDING) for _ in range(load.ranks)] for _ in range(load.peers)]
        self._now_ns = STEP_NS
        self._reported = 0
        self._reading: deque[tuple[int, str]] = deque()

    async def begin(self, first: int, stop: int) -> None:
        for number in range(first, stop):
            self._begin(number % len(self._engines), LeaseName(request_name(number), 7))

    def _begin(self, peer: int, lease: LeaseName) -> None:
        for lender in self._lendings[peer]:
            lender.handle(lending.Computing(lease=lease), self._now_ns)
            lender.handle(lending.Granted(lease=lease), self._now_ns)
        wanted = {"request_id": lease.request_id, "lease": lease, "address": ADDRESS, "age_ns": 0}
        self._feed(peer, remote_engine.Announced(**wanted))
        self._feed(peer, remote_engine.Started(**wanted))

    async def end(self, count: int) -> None:
        expected = self._reported + count
        for _ in range(count):
            peer, request_id = self._reading.popleft()
            for read in range(self._ranks):
                now_ns = self._now_ns
                self._feed(
                    peer, remote_engine.ReadEnded(request_id=request_id, read=read, connection=1, ended_ns=now_ns)
                )
        assert self._reported == expected

    def _feed(self, peer: int, event: Event) -> None:
        """As an executor does: the event, what it leads to, and what is due then."""
        engine = self._engines[peer]
        self._now_ns += STEP_NS
        self._carry_out(peer, engine.handle(event, self._now_ns))
        deadline_ns = engine.next_deadline()
        if deadline_ns is not None and deadline_ns <= self._now_ns:
            self._carry_out(peer, engine.advance(self._now_ns))

    def _carry_out(self, peer: int, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case remote_engine.ResolveBlocks(request_id=request_id, connection=connection):
                    resolved = remote_engine.BlocksResolved(
                        request_id=request_id, connection=connection, reads=self._ranks
                    )
                    self._feed(peer, resolved)
                case remote_engine.PostReads(request_id=request_id):
                    self._reading.append((peer, request_id))
                case remote_engine.SendHold(rank=rank, sent_ns=sent_ns, leases=leases):
                    asked = lending.HoldAsked(
                        reply_to=None, engine_id="d", rank=0, ranks=1, sent_ns=sent_ns, leases=leases
                    )
                    for answer in self._lendings[peer][rank].handle(asked, self._now_ns):
                        if isinstance(answer, lending.AnswerHold):
                            held = remote_engine.HoldAnswered(
                                connection=1, rank=rank, sent_ns=sent_ns, held=answer.held, gone=answer.gone
                            )
                            self._feed(peer, held)
                case remote_engine.SendRelease(rank=rank, leases=leases):
                    released = lending.ReleaseAsked(reply_to=None, engine_id="d", rank=0, ranks=1, leases=leases)
                    self._lendings[peer][rank].handle(released, self._now_ns)
                    self._feed(peer, remote_engine.ReleaseAnswered(connection=1, rank=rank, leases=leases))
                case remote_engine.StartHandshake():
                    self._feed(
                        peer,
                        remote_engine.Connected(connection=1, workers=self._workers, is_builtin=False, life="1"),
                    )
                case remote_engine.Report(failure=failure):
                    assert failure is None
                    self._reported += 1
                case _:
                    raise TypeError(f"{effect} was not to be expected")
