r"""The executor of the `Introductions` core (`statemachine/introduction.py`): a decode rank meets engines before
requests.

    option known_peers, nixl-actor meet --Named--> core --AskWho--> side channel --Answered, Failed--> core
    supervisor --EngineConnected, Lost, NotMet------^ \--Meet--> a command to the roster, as a request's is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import assert_never

import trio

from connector.addresses import split_place
from connector.clock import NS_PER_SECOND, Clock, seconds_until, to_ns
from connector.config import ConnectorOptions
from connector.observe.advice import named
from connector.ports.side_channel import NotASideChannel, SideChannel, SideChannelError
from connector.protocol import MeetPeer, PeerAddress
from connector.runtime.effects import carry_out, internal_error
from connector.wire.administration import MEET_PLACES_MAX, PROBLEM_LENGTH_MAX, MeetReport, PlaceRow
from connector.wire.bounded import DecodeFailed, shorten
from connector.wire.handshake import decode_advertisement, encode_request
from statemachine import introduction as core
from statemachine.failures import Failure
from statemachine.introduction import IntroductionLimits, Introductions
from statemachine.kernel import Event
from statemachine.roster import PeerKey

BUILTIN = (
    "it runs the built-in connector, which does not say how many ranks it has; it is met when the first request comes"
)
TOO_MANY = f"not named: {core.PLACES_MAX} places are known already, and all are met, being asked or named by an option"


def answered_by(value: core.Introduction) -> str:
    """Of the engine that answered last; empty: none has."""
    return value.engine.engine_id if isinstance(value.engine, PeerKey) else ""


def kind_of(problem: core.Problem | None) -> str:
    """Empty: it has none."""
    return problem.kind if isinstance(problem, Failure) else ""


class Introducer:
    """See the module's docstring. All methods are called in the trio thread.

    Args:
        own_engine_id: of this engine.
        identity: of this rank.
        meet: hands the command to the roster.
        is_connected: whether this engine is connected now.
        say: writes a line for people.
        log_crash: writes a line with a traceback: what raised it, what it raised.
    """

    def __init__(
        self,
        *,
        options: ConnectorOptions,
        own_engine_id: str,
        identity: str,
        side_channel: SideChannel,
        clock: Clock,
        meet: Callable[[MeetPeer], None],
        is_connected: Callable[[PeerKey], bool],
        say: Callable[[str], None],
        log_crash: Callable[[str, BaseException], None],
    ) -> None:
        self._own_engine_id = own_engine_id
        self._side_channel = side_channel
        self._clock = clock
        self._timeout_seconds = options.handshake_timeout_seconds
        self._meet = meet
        self._is_connected = is_connected
        self._say = say
        self._log_crash = log_crash
        self._core = Introductions(
            IntroductionLimits(
                pause_first_ns=to_ns(options.backoff_initial_seconds),
                pause_max_ns=to_ns(options.backoff_max_seconds),
                handshake_ns=to_ns(options.handshake_timeout_seconds),
                forget_ns=to_ns(options.engine_ttl) if options.engine_ttl > 0 else None,
            ),
            identity,
        )
        self._to_name: list[str] = list(options.known_peers)
        self._nursery: trio.Nursery | None = None
        self._attention = trio.Event()

    @property
    def has_places(self) -> bool:
        """Whether anybody is named."""
        return bool(self._to_name or self._core.values())

    def unmet(self) -> tuple[core.Introduction, ...]:
        """Those that are still to be met."""
        done = (core.State.MET, core.State.OWN)
        return tuple(value for value in self._core.values() if value.state not in done)

    def get(self, place: str) -> core.Introduction | None:
        return self._core.get(place)

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                for value in self._core.values():
                    if value.state is core.State.ASKING:  # not begun, or by a task that ended with another nursery
                        nursery.start_soon(self._ask_who, value.place)
                self._feed(core.Named(places=tuple(self._to_name), is_kept=True))
                self._to_name.clear()
                while True:
                    self._attention = trio.Event()
                    with trio.move_on_after(seconds_until(self._core.next_deadline(), self._clock.now_ns())):
                        await self._attention.wait()
                    self._carry_out(self._core.advance(self._clock.now_ns()))
            finally:
                self._nursery = None

    def name(self, places: Sequence[str]) -> tuple[MeetReport, int]:
        """A tool names engines; how far each has come, and how many are asked because of it."""
        effects = self._feed(core.Named(places=tuple(places)))
        report = MeetReport(rows=tuple(self._row(place) for place in places[:MEET_PLACES_MAX]))
        return report, sum(isinstance(effect, core.AskWho) for effect in effects)

    def note_connected(self, key: PeerKey) -> None:
        """A member of the roster is connected."""
        self._feed(core.EngineConnected(engine=key))

    def note_lost(self, key: PeerKey) -> None:
        """A member has taken back its connection, or has ended."""
        self._feed(core.EngineLost(engine=key))

    def note_not_met(self, key: PeerKey, failure: Failure) -> None:
        """An attempt to connect it has failed, or was not made."""
        self._feed(core.EngineNotMet(engine=key, failure=failure))

    def _row(self, place: str) -> PlaceRow:
        value = self._core.get(place)
        if value is None:
            return PlaceRow(place=place, state="unknown", engine_id="", problem=TOO_MANY)
        return PlaceRow(
            place=place,
            state=value.state.value,
            engine_id=answered_by(value),
            problem=shorten(str(value.problem or ""), PROBLEM_LENGTH_MAX),
            kind=kind_of(value.problem),
        )

    def _feed(self, event: Event) -> list[core.CoreEffect]:
        """Returns what was carried out because of it."""
        effects = self._core.handle(event, self._clock.now_ns())
        self._carry_out(effects)
        return effects

    def _carry_out(self, effects: list[core.CoreEffect]) -> None:
        carry_out(effects, self._execute, partial(self._log_crash, "introductions"))
        self._attention.set()

    def _execute(self, effect: core.CoreEffect) -> None:
        match effect:
            case core.AskWho(place=place):
                if self._nursery is not None:  # otherwise `run` does
                    self._nursery.start_soon(self._ask_who, place)
            case core.Meet(place=place, engine=engine):
                host, port = split_place(place)
                address = PeerAddress(
                    engine_id=engine.engine_id,
                    host=host,
                    port=port,
                    tp_size=engine.tp_size,
                    dcp_size=engine.dcp_size,
                    pp_size=engine.pp_size,
                )
                self._meet(MeetPeer(peer=address))
            case core.SayFailed(place=place, problem=problem):
                why = named(kind_of(problem), str(problem))
                self._say(f"the engine at {place} cannot be met before its first request: {why}")
            case core.SayForgotten(place=place, unmet_ns=unmet_ns):
                seconds = unmet_ns / NS_PER_SECOND
                self._say(f"{place} is forgotten: nobody could be met there for {seconds:.0f} s")
            case _:
                assert_never(effect)

    async def _ask_who(self, place: str) -> None:
        try:
            event = await self._question(place)
        except Exception as error:
            # A bug costs one attempt.
            self._log_crash(f"introduction to {place}", error)
            event = core.Failed(place=place, problem=internal_error(error))
        self._feed(event)

    async def _question(self, place: str) -> core.Answered | core.Failed:
        """What to tell the core."""
        try:
            host, port = split_place(place)
        except ValueError as error:  # whoever has named it here was not checked
            return core.Failed(place=place, problem=str(error))
        try:
            with closing(self._side_channel.connect(host, port)) as requester:
                with trio.move_on_after(self._timeout_seconds) as scope:
                    said = decode_advertisement(await requester.ask([encode_request(0, 0)]))
                if scope.cancelled_caught:
                    return core.Failed(place=place, problem=f"no answer within {self._timeout_seconds:g} s")
        except SideChannelError as error:
            return core.Failed(place=place, problem=error.why)
        except DecodeFailed as error:
            return core.Failed(place=place, problem=NotASideChannel(host, port, error.detail).why)
        if said.error is not None:
            return core.Failed(place=place, problem=said.error)
        if said.actor is None or said.metadata is None:
            return core.Failed(place=place, problem=BUILTIN)
        engine_id = said.metadata.engine_id
        key = PeerKey(engine_id, said.actor.tp_size, said.actor.dcp_size, said.actor.pp_size)
        is_own = engine_id == self._own_engine_id
        return core.Answered(place=place, engine=key, is_own=is_own, is_connected=self._is_connected(key))
