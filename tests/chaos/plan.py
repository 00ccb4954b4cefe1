"""What happens in a run of chaos, when and to whom: a value that the seed decides, printable and replayable.

Kinds are dealt from shuffled decks, so that every kind occurs before one occurs again. Faults in the life of a prefill
engine (killed, stopped, ended) follow each other on that engine: one whose turn comes while the engine still starts
waits for it. Faults of the network and of proxies, and strangers' visits, have threads of their own, and overlap with
everything.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

PREFILL = ("p0", "p1")
DECODE = ("fail", "recompute")
"""Names of the decode engines: their load-failure policies."""
LEASE_SECONDS = 6.0

T = TypeVar("T")


class Kind(enum.Enum):
    """What goes wrong. The target of a fault of a life or of the network is an engine, that of the others one of its
    sockets."""

    KILL_SAME_ID = "kill, back with the same engine id"
    KILL_NEW_ID = "kill, back with a new engine id"
    SIGTERM_SAME_ID = "SIGTERM that drains, back with the same engine id"
    DRAIN_NEW_ID = "nixl-actor drain, back with a new engine id"
    STOP_SHORT = "SIGSTOP for less than a lease"
    STOP_LONG = "SIGSTOP for longer than a lease"

    LOSE_ALL = "network loses all but what clients say"
    LOSE_SENT = "network loses all that it sends but answers to clients"
    LOSE_READS = "network loses READs"

    DELAY = "proxy delays"
    CUT = "proxy holds everything back"
    RESET = "proxy resets"
    REFUSE = "proxy refuses"

    GARBAGE = "garbage"
    HALF_OPEN = "half-open connections"


LIFE_KINDS = (
    Kind.KILL_SAME_ID,
    Kind.STOP_LONG,
    Kind.DRAIN_NEW_ID,
    Kind.STOP_SHORT,
    Kind.KILL_NEW_ID,
    Kind.SIGTERM_SAME_ID,
)
NETWORK_KINDS = (Kind.LOSE_ALL, Kind.LOSE_SENT, Kind.LOSE_READS)
PROXY_KINDS = (Kind.DELAY, Kind.CUT, Kind.RESET, Kind.REFUSE)
STRANGER_KINDS = (Kind.GARBAGE, Kind.HALF_OPEN)

SIDE, CONTROL = "side channel", "control socket"
SOCKETS = (SIDE, CONTROL)

_SECONDS_OF: dict[Kind, tuple[float, float]] = {
    Kind.KILL_SAME_ID: (0.0, 4.0),
    Kind.KILL_NEW_ID: (0.0, 4.0),
    Kind.SIGTERM_SAME_ID: (0.0, 2.0),
    Kind.DRAIN_NEW_ID: (0.0, 2.0),
    Kind.STOP_SHORT: (0.5, LEASE_SECONDS / 2),
    Kind.STOP_LONG: (LEASE_SECONDS * 1.3, LEASE_SECONDS * 1.8),
    Kind.LOSE_ALL: (0.5, LEASE_SECONDS * 1.5),
    Kind.LOSE_SENT: (0.5, LEASE_SECONDS * 1.5),
    Kind.LOSE_READS: (0.5, LEASE_SECONDS * 1.5),
    Kind.DELAY: (1.0, 4.0),
    Kind.CUT: (0.5, LEASE_SECONDS * 1.5),
    Kind.RESET: (0.0, 0.0),
    Kind.REFUSE: (0.5, 4.0),
    Kind.GARBAGE: (0.0, 0.0),
    Kind.HALF_OPEN: (1.0, 8.0),
}
"""How long it lasts, least and most; of kills, until the engine is started again."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong.

    Attributes:
        at_seconds: after the start of the load, at the earliest.
        target: name of an engine; with a socket behind it ("p0 side channel") for what proxies and strangers do.
        seconds: how long.
    """

    at_seconds: float
    kind: Kind
    target: str
    seconds: float

    @property
    def engine(self) -> str:
        return self.target.partition(" ")[0]

    @property
    def socket(self) -> str:
        return self.target.partition(" ")[2]

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at_seconds:6.1f} s  {self.target:26}{self.kind.value}{lasts}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the seed decides; the load draws its requests from the seed, too."""

    seed: int
    seconds: float
    faults: tuple[Fault, ...]

    def of(self, kinds: Iterable[Kind]) -> list[Fault]:
        wanted = set(kinds)
        return [fault for fault in self.faults if fault.kind in wanted]

    def __str__(self) -> str:
        head = f"seed {self.seed}, {self.seconds:g} s, {len(self.faults)} faults"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


def draw_plan(seed: int, seconds: float, *, life_gap_seconds: float = 14.0, other_gap_seconds: float = 2.5) -> Plan:
    """A plan of so many seconds. The gaps are means: between faults in lives, and between all others."""
    rng = random.Random(f"chaos {seed}")
    # In turns: two faults in a row would mostly wait for the start of one engine while the other is well.
    first = rng.randrange(len(PREFILL))
    lives = [
        _fault(rng, at, kind, PREFILL[(first + number) % len(PREFILL)])
        for number, (at, kind) in enumerate(zip(_times(rng, seconds, life_gap_seconds), _deal(rng, LIFE_KINDS)))  # noqa: B905
    ]
    network = [(kind, engine) for kind in NETWORK_KINDS for engine in PREFILL]
    proxies = [(kind, f"{engine} {socket}") for kind in PROXY_KINDS for engine in PREFILL for socket in SOCKETS]
    strangers = [
        (kind, f"{name} {socket}") for kind in STRANGER_KINDS for name in PREFILL + DECODE for socket in SOCKETS
    ]
    cards = (*network, *proxies, *strangers)
    others = [
        _fault(rng, at, kind, target)
        for at, (kind, target) in zip(_times(rng, seconds, other_gap_seconds), _deal(rng, cards))  # noqa: B905
    ]
    return Plan(seed=seed, seconds=seconds, faults=tuple(sorted(lives + others, key=lambda each: each.at_seconds)))


def _fault(rng: random.Random, at: float, kind: Kind, target: str) -> Fault:
    return Fault(at_seconds=round(at, 1), kind=kind, target=target, seconds=round(rng.uniform(*_SECONDS_OF[kind]), 1))


def _times(rng: random.Random, seconds: float, gap_seconds: float) -> Iterator[float]:
    at = rng.uniform(0.2, 1.0) * gap_seconds
    while at < seconds:
        yield at
        at += rng.uniform(0.3, 1.7) * gap_seconds


def _deal(rng: random.Random, deck: Sequence[T]) -> Iterator[T]:
    """Every card before one comes again."""
    while True:
        yield from rng.sample(deck, len(deck))


def save_plan(plan: Plan, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan)))


def load_plan(path: Path) -> Plan:
    """Raises msgspec.ValidationError for a file that holds no plan."""
    return msgspec.json.decode(path.read_bytes(), type=Plan)
