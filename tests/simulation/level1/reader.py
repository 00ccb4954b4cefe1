"""The executor of a `RemoteEngine`: what one rank of a decode engine does about one prefill engine.

Each effect is carried out by a few lines: a question on the side channel, READs through the agent of the rank, messages
over the links, reports to the engine. What comes of it is an event for the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from statemachine import remote_engine as core
from statemachine import roster
from statemachine.failures import (
    ActorCrashed,
    BadParams,
    ConnectionRefused,
    Failure,
    HandshakeRefused,
    HandshakeTimeout,
    Incompatible,
    PreviousReadsInFlight,
    TransferError,
    WrongEngine,
)
from statemachine.lending import HeartbeatNotified, HoldAsked, ReleaseAsked, ReleaseNotified
from statemachine.peer import State
from statemachine.roster import PeerKey
from tests.simulation.level1.executor import Executor
from tests.simulation.level1.heap import FOREVER, MICROSECOND, MILLISECOND, SECOND
from tests.simulation.level1.transport import Agent, Connection, Read

if TYPE_CHECKING:
    from tests.simulation.level1.decode import DecodeRank
    from tests.simulation.level1.prefill import Answer, PrefillEngine, PrefillLife, PrefillRank

SEND_NS = 20 * MICROSECOND
"""How long it takes to learn that a notification cannot be sent."""
TEAR_DOWN_NS = 200 * MICROSECOND
CHECK_NS = 5 * MILLISECOND
"""How long a READ waits to be checked: for a step of the engine."""
RESET_NOTICED_NS_MAX = MILLISECOND
RESTART_NS_MAX = SECOND // 4
"""How long a crashed actor stays away."""
HANDSHAKE_SURVIVES = 0.5
"""How often a handshake has ended, unseen, when its actor crashes."""

_GONE = State.GONE
_BAD_PARAMS = BadParams(field="remote_block_ids", expected="blocks that the engine has", found="others")


class Question:
    """One handshake on its way."""

    __slots__ = ("is_over", "reader")

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.is_over = False


class Reader(Executor):
    """See the module's docstring. `engine` stands for the address, `key` is its name in the roster."""

    __slots__ = ("_connections", "_incarnation", "_question", "core", "engine", "engine_id", "key", "rank")

    def __init__(self, rank: DecodeRank, engine: PrefillEngine, key: PeerKey) -> None:
        world = rank.world
        super().__init__(
            world,
            rank.life.engine.clock,
            {
                core.StartHandshake: self._start_handshake,
                core.ResolveBlocks: self._resolve_blocks,
                core.PostReads: self._post_reads,
                core.WithdrawReads: lambda _: None,  # the agent's thread comes to each, and posts none
                core.CheckRead: self._check_read,
                core.TearDown: self._tear_down,
                core.SendHold: self._send_hold,
                core.SendRelease: self._send_release,
                core.SendHeartbeat: self._send_heartbeat,
                core.NotifyReleases: self._notify_releases,
                core.Report: self._report,
                core.LiftQuarantine: self._lift_quarantine,
                core.PassToSuccessor: self._pass_to_successor,
                core.NoteHandshakeFailure: self._note_handshake_failure,
                core.NoteNotMet: lambda _: None,  # nobody meets engines here before a request does
            },
        )
        self.rank = rank
        self.engine = engine
        self.key = key
        self.engine_id = key.engine_id
        self.core = self._core = world.cores.remote_engine(
            key.engine_id, engine.name, world.cluster.engine, identity=rank.name, observe=self.observer
        )
        self._incarnation = rank.draw_name()
        self._connections: dict[int, Connection] = {}
        self._question: Question | None = None

    def names(self) -> tuple[str, int]:
        return self.rank.life.engine.name, self.rank.number

    def _carry_out(self, effects: Sequence[Any]) -> None:
        super()._carry_out(effects)
        if self.core.state is _GONE and self.core.is_finished:
            self.closed_until_ns = FOREVER
            if self._question is not None:
                self._question.is_over = True  # its task ends with the actor
            self.rank.forget(self)
            # Requests that wait for it are somebody else's now.
            for call, argument in self._mailbox:
                if call in (self.rank.announce, self.rank.start):
                    self._heap.after(0, call, argument)
            self._mailbox.clear()

    def crash(self) -> None:
        """Its loop raises: it comes again after a while, and its tasks are gone."""
        heap, chance = self._heap, self.rank.random
        self.closed_until_ns = heap.now_ns + int(chance() * RESTART_NS_MAX)
        crash = core.Crashed(failure=ActorCrashed(actor=self.engine_id, error="a fault of the plan"))
        self.hold_back(self.deliver, crash)
        if self._question is not None and chance() >= HANDSHAKE_SURVIVES:
            self._question.is_over = True

    # --- handshakes -------------------------------------------------------------------------------------------------

    def _start_handshake(self, effect: core.StartHandshake) -> None:
        assert effect.address == self.engine.name
        self.rank.tell_roster(roster.Connecting(key=self.key, place=self.engine.name))
        question = self._question = Question(self)
        self.world.links[self.rank.life.engine.name, self.engine.name].send(self.engine.answer, question)
        self._heap.after(self.world.cluster.handshake_ns, self._give_up, question)

    def _give_up(self, question: Question) -> None:
        if not question.is_over:
            question.is_over = True
            seconds = self.world.cluster.handshake_ns / SECOND
            self._fail_handshake(HandshakeTimeout(peer=self.engine_id, timeout_seconds=seconds))

    def _fail_handshake(self, failure: Failure) -> None:
        self.deliver(core.ConnectFailed(failure=failure))

    def hear_answer(self, answer: Answer) -> None:
        """Perhaps one that comes twice or too late."""
        question = answer.question
        if question.is_over:
            return
        rank = self.rank
        if rank.life.frozen_until_ns > self._heap.now_ns:
            rank.life.defer(self.hear_answer, answer)
            return
        question.is_over = True
        life = answer.life
        if life is None:
            self._fail_handshake(ConnectionRefused(peer=self.engine_id, address=self.engine.name))
        elif answer.is_refusal:
            self._fail_handshake(HandshakeRefused(peer=self.engine_id, detail="its workers have died"))
        elif life.engine_id != self.engine_id:
            self._fail_handshake(WrongEngine(peer=self.engine_id, found=life.engine_id))
        elif answer.is_incompatible:
            self._fail_handshake(
                Incompatible(peer=self.engine_id, field="model", local="one", remote="another", advice="start it alike")
            )
        elif self._must_wait_for(life):
            self._fail_handshake(PreviousReadsInFlight(peer=self.engine_id, address=self.engine.name))
        else:
            self._connect(Connection(self, life, rank.next_connection()))

    def _must_wait_for(self, life: PrefillLife) -> bool:
        """Its agent has to be removed before it is of use again, and READs over it have not ended."""
        agent = self.rank.agents.get(life)
        return agent is not None and (
            agent.failure is not None or any(each.reader is self for each in agent.connections)
        )

    def _connect(self, connection: Connection) -> None:
        life = connection.life
        self.rank.agents.setdefault(life, Agent()).connections[connection] = None
        life.connections[connection] = None
        self._connections[connection.number] = connection
        self.rank.tell_roster(roster.Connected(key=self.key))
        self.deliver(
            core.Connected(
                connection=connection.number,
                workers=tuple(map(str, range(len(connection.ranks)))),
                is_builtin=life.engine.is_builtin,
                life=life.name,
            )
        )

    def _tear_down(self, effect: core.TearDown) -> None:
        self._heap.after(TEAR_DOWN_NS, self._end_tear_down, effect)

    def _end_tear_down(self, effect: core.TearDown) -> None:
        """In the thread of the agent."""
        rank = self.rank
        if rank.life.frozen_until_ns > self._heap.now_ns:
            rank.life.defer(self._end_tear_down, effect)
            return
        connection = self._connections[effect.connection]
        agent = rank.agents[connection.life]
        del agent.connections[connection]
        if not agent.connections:
            del rank.agents[connection.life]
            for each in (*agent.leaving, connection):
                rank.life.engine.transport.tear_down(each)
                each.reader.end_connection(each)
        elif effect.failure is None:
            self.end_connection(connection)  # what is left of READs that failed goes on
        else:
            self.world.oracles.coverage["a shared agent given up"] += 1
            agent.leaving.append(connection)
            agent.failure = effect.failure
            for each in agent.connections:
                each.reader.hear_that_it_is_lost(each, effect.failure)

    def end_connection(self, connection: Connection) -> None:
        """It stands on its agent no more."""
        del connection.life.connections[connection]
        del self._connections[connection.number]
        self.deliver(core.TornDown(connection=connection.number))

    def hear_that_it_is_lost(self, connection: Connection, failure: Failure) -> None:
        """Who shares its agent has given it up."""
        if not self.is_closed:
            connection.is_suspect = True
        self.deliver(core.SharedAgentsLost(connection=connection.number, failure=failure))

    def lose_link(self, connection: Connection) -> None:
        """A control connection was reset; what is under way over it is gone."""
        if not connection.is_reset and not connection.life.engine.is_builtin:
            connection.is_reset = True
            delay_ns = int(self.rank.random() * RESET_NOTICED_NS_MAX)
            self._heap.after(delay_ns, self._hear_reset, connection)

    def _hear_reset(self, connection: Connection) -> None:
        if not self.is_closed:
            connection.is_suspect = True
        self.deliver(core.LinkLost(connection=connection.number, detail="reset"))

    # --- READs ------------------------------------------------------------------------------------------------------

    def _resolve_blocks(self, effect: core.ResolveBlocks) -> None:
        pull = self.rank.pulls[effect.request_id]
        request_id, number = effect.request_id, effect.connection
        if pull.has_bad_params:
            self.answers.append(core.BlocksRejected(request_id=request_id, failure=_BAD_PARAMS))
            return
        reads = self._connections[number].pieces if pull.blocks else 0
        are_checked = self.world.cluster.checks_reads and not self.engine.is_builtin
        resolved = core.BlocksResolved(request_id=request_id, connection=number, reads=reads, are_checked=are_checked)
        self.answers.append(resolved)

    def _post_reads(self, effect: core.PostReads) -> None:
        connection = self._connections[effect.connection]
        pull = self.rank.pulls[effect.request_id]
        if connection.is_suspect:
            self.world.oracles.complain("suspect", f"{pull.request_id} reads over a connection that is not sound")
        connection.open_reads += connection.pieces
        for piece in range(connection.pieces):
            self.rank.order(Read(pull, connection, piece))

    def end_read(self, read: Read, *, was_wanted: bool) -> None:
        """The thread of the agent has seen the end of a READ, or has not posted it."""
        connection, failure = read.connection, read.failure
        connection.open_reads -= 1
        is_quiescent = failure is None or read.is_merged
        if failure is not None and (failure.transport_lost or not is_quiescent) and not self.is_closed:
            connection.is_suspect = True
        self.deliver(
            core.ReadEnded(
                request_id=read.pull.request_id,
                read=read.piece,
                connection=connection.number,
                ended_ns=self._clock.local_ns(self._heap.now_ns),
                failure=failure,
                is_quiescent=is_quiescent,
                was_wanted=was_wanted,
            )
        )

    def _check_read(self, effect: core.CheckRead) -> None:
        self._heap.after(CHECK_NS, self._end_check, effect)

    def _end_check(self, effect: core.CheckRead) -> None:
        """In a step of the engine."""
        life = self.rank.life
        if life.frozen_until_ns > self._heap.now_ns:
            life.defer(self._end_check, effect)
            return
        self.deliver(core.ReadChecked(request_id=effect.request_id, read=effect.read, connection=effect.connection))

    # --- messages to the peer ---------------------------------------------------------------------------------------

    def _send_hold(self, effect: core.SendHold) -> None:
        connection = self._connections[effect.connection]
        asked = HoldAsked(
            reply_to=(connection, effect.rank),
            engine_id=self.rank.life.engine_id,
            rank=self.rank.number,
            ranks=connection.consumers,
            sent_ns=effect.sent_ns,
            leases=effect.leases,
            incarnation=self._incarnation,
        )
        connection.link.send(connection.ranks[effect.rank].hear, asked)

    def _send_release(self, effect: core.SendRelease) -> None:
        connection = self._connections[effect.connection]
        asked = ReleaseAsked(
            reply_to=(connection, effect.rank),
            engine_id=self.rank.life.engine_id,
            rank=self.rank.number,
            ranks=connection.consumers,
            leases=effect.leases,
            incarnation=self._incarnation,
        )
        connection.link.send(connection.ranks[effect.rank].hear, asked)

    def _send_heartbeat(self, effect: core.SendHeartbeat) -> None:
        beat = HeartbeatNotified(sender=self.rank.name, request_ids=tuple(lease.request_id for lease in effect.leases))
        self._notify(self._connections[effect.connection], effect.rank, beat)

    def _notify_releases(self, effect: core.NotifyReleases) -> None:
        connection = self._connections[effect.connection]
        for lease in effect.leases:
            release = ReleaseNotified(sender=self.rank.name, request_id=lease.request_id, ranks=connection.consumers)
            self._notify(connection, effect.rank, release)

    def _notify(self, connection: Connection, rank: int, event: HeartbeatNotified | ReleaseNotified) -> None:
        if not connection.is_broken:
            target: PrefillRank = connection.ranks[rank]
            connection.link.notify(target.hear_notification, event)
            return
        lost = TransferError(peer=self.engine_id, operation="notify", error="lost", transport_lost=True)
        failed = core.NotificationFailed(connection=connection.number, failure=lost)
        self._heap.after(SEND_NS, self.deliver, failed)

    def hear_peer(self, message: tuple[Connection, core.HoldAnswered | core.ReleaseAnswered]) -> None:
        """An answer over the control connection, if that still stands."""
        connection, event = message
        if not (connection.is_reset or connection.is_torn_down):
            self.deliver(event)

    # --- the engine -------------------------------------------------------------------------------------------------

    def _report(self, effect: core.Report) -> None:
        rank = self.rank
        pull = rank.pulls[effect.request_id]
        rank.life.hear_report(pull, rank.number, effect.failure, is_quarantined=effect.is_quarantined)
        rank.tell_roster(roster.RequestEnded(request_id=effect.request_id))

    def _lift_quarantine(self, effect: core.LiftQuarantine) -> None:
        self.rank.life.hear_lift(self.rank.pulls[effect.request_id])

    def _pass_to_successor(self, effect: core.PassToSuccessor) -> None:
        call, argument = effect.event.message
        self._heap.after(0, call, argument)

    def _note_handshake_failure(self, effect: core.NoteHandshakeFailure) -> None:
        self.world.oracles.handshake_failures += 1
