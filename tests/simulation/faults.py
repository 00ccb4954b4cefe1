"""Faults as data: what goes wrong in a simulated cluster, where, when and for how long.

A `Plan` is a seed and a list of faults. The seed decides everything else (the cluster's shape, the requests, every
delay), so a plan in a file replays exactly. `draw_plan` draws the faults from the seed too, by a swarm: each seed
allows some kinds only, so that rare combinations of few kinds occur besides the soup of all of them.

A fault ends with the safety phase at the latest. What it does is said by each level: `level1`, `active_faults`.

Engines are named "p0" and "d0", their ranks "p0.1". A target that names a rank hits that rank alone: what a link
carries to or from it, or the one process of the engine. Hosts and agents are named after ranks: "d0.1" is the host of
a worker process, "p0.sim" that of the engine's listener, "d0.1.2" the agent of a rank's second life.
"""

from __future__ import annotations

import enum
import functools
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from tests.simulation.shapes import BLOCK_TOKENS, BLOCK_TOKENS_MAX, EngineShape, Model, SecondGroup


class Kind(enum.Enum):
    """What goes wrong. The target of the first two groups is a link "from>to", of the others an engine; or of ranks."""

    MESSAGE_LOSS = "message_loss"
    MESSAGE_DUPLICATE = "message_duplicate"
    MESSAGE_DELAY = "message_delay"
    MESSAGE_REORDER = "message_reorder"
    CLOG = "clog"
    PARTITION = "partition"

    READ_ERROR = "read_error"
    READ_STALL = "read_stall"
    READ_SLOW = "read_slow"
    NOTIFICATION_LOSS = "notification_loss"
    NOTIFICATION_DUPLICATE = "notification_duplicate"
    NOTIFICATION_DELAY = "notification_delay"

    CRASH_NEW_ID = "crash_new_id"
    CRASH_SAME_ID = "crash_same_id"
    INCOMPATIBLE = "incompatible"
    CRASH_DECODE = "crash_decode"
    STOP = "stop"
    PAUSE = "pause"
    STOP_POLLING = "stop_polling"
    WALL_CLOCK_JUMP = "wall_clock_jump"
    GARBAGE = "garbage"

    ABORT = "abort"
    BAD_PARAMS = "bad_params"
    ACTOR_CRASH = "actor_crash"
    CONTROL_CRASH = "control_crash"
    KEEPER_CRASH = "keeper_crash"

    PREPARE_REFUSED = "prepare_refused"

    LONG_QUEUE = "long_queue"
    ROUTER_RETRY = "router_retry"
    TWO_RANKS = "two_ranks"

    TWO_HOLDERS = "two_holders"

    READ_LATE = "read_late"
    READ_ERRS_EARLY = "read_errs_early"
    READ_LIES = "read_lies"
    LINK_RESET = "link_reset"
    HANDSHAKE_REFUSED = "handshake_refused"
    CLOCK_SLEW = "clock_slew"

    WRONG_SIZES = "wrong_sizes"
    WORKER_STOPS = "worker_stops"
    FULL_QUARANTINE = "full_quarantine"

    METADATA_DROPPED = "metadata_dropped"

    DRAIN = "drain"
    FLOOD = "flood"

    KNOWN_PEER = "known_peer"

    SLEEP = "sleep"

    PORTS_KEPT = "ports_kept"


WORKLOAD_KINDS = frozenset(
    {
        Kind.LONG_QUEUE,
        Kind.ROUTER_RETRY,
        Kind.TWO_RANKS,
        Kind.TWO_HOLDERS,
        Kind.WRONG_SIZES,
        Kind.KNOWN_PEER,
        Kind.PORTS_KEPT,
    }
)
"""No faults but unusual use, which must disturb nobody: requests that wait in the queue of a decode engine, a router
that sends a prompt once more with the parameters of before, prompts of a prefill engine that an engine of two ranks
takes over, prompts whose samples two decode engines read, requests that name other sizes than those of the prefill
engine, prefill engines that a decode engine is to meet before a request needs them, prefill engines that have the same
ports in all their lives, also that of UCX, which takes the agent of one life for that of another then."""
HARMLESS_KINDS = WORKLOAD_KINDS | {Kind.CLOCK_SLEW, Kind.WALL_CLOCK_JUMP, Kind.FLOOD}
"""What must not be felt: those, clocks that run at different rates or jump, and strangers that send without end."""
LOSSY_KINDS = frozenset(
    {
        Kind.MESSAGE_LOSS,
        Kind.MESSAGE_DUPLICATE,
        Kind.MESSAGE_DELAY,
        Kind.MESSAGE_REORDER,
        Kind.CLOG,
        Kind.PARTITION,
        Kind.LINK_RESET,
        Kind.NOTIFICATION_LOSS,
        Kind.NOTIFICATION_DUPLICATE,
        Kind.NOTIFICATION_DELAY,
    }
)
"""What keeps two engines that live from hearing of each other."""
KEEPER_KINDS = frozenset({Kind.KEEPER_CRASH, Kind.CONTROL_CRASH})
"""What may keep a prefill engine from hearing messages about leases that have arrived."""
LEVEL1_ONLY = frozenset({Kind.READ_LATE})
"""What only the level of the bare cores does: a READ that nothing ends and that writes much later."""
LEVEL2_ONLY = frozenset(
    {
        Kind.TWO_RANKS,
        Kind.GARBAGE,
        Kind.STOP,
        Kind.CONTROL_CRASH,
        Kind.KEEPER_CRASH,
        Kind.PREPARE_REFUSED,
        Kind.WRONG_SIZES,
        Kind.WORKER_STOPS,
        Kind.FULL_QUARANTINE,
        Kind.METADATA_DROPPED,
        Kind.READ_LIES,
        Kind.DRAIN,
        Kind.FLOOD,
        Kind.KNOWN_PEER,
        Kind.PORTS_KEPT,
    }
)
"""What there is nothing of at the level of the bare cores: frames, ports, and actors other than those of peers."""
VLLM_ONLY = frozenset({Kind.SLEEP})
"""What there is nothing of without vLLM's scheduler: it is paused, empties its cache, and outlives the actors."""
LEVEL1_KINDS = tuple(kind for kind in Kind if kind not in LEVEL2_ONLY | VLLM_ONLY)
LEVEL2_KINDS = tuple(kind for kind in Kind if kind not in LEVEL1_ONLY | VLLM_ONLY)
NOT_WITH_VLLM = WORKLOAD_KINDS | {
    Kind.BAD_PARAMS,
    Kind.STOP,
    Kind.INCOMPATIBLE,
    Kind.FULL_QUARANTINE,
    Kind.READ_LIES,
}
"""Use that the clients of vLLM's schedulers make by themselves, and what those engines have no life or option for."""
VLLM_KINDS = (*(kind for kind in LEVEL2_KINDS if kind not in NOT_WITH_VLLM), *VLLM_ONLY)
MESSAGE_KINDS = (
    Kind.MESSAGE_LOSS,
    Kind.MESSAGE_DUPLICATE,
    Kind.MESSAGE_DELAY,
    Kind.MESSAGE_REORDER,
    Kind.CLOG,
    Kind.PARTITION,
)
"""Links in both directions between decode and prefill."""
DECODE_LINK_KINDS = (
    Kind.READ_ERROR,
    Kind.READ_STALL,
    Kind.READ_SLOW,
    Kind.NOTIFICATION_LOSS,
    Kind.NOTIFICATION_DUPLICATE,
    Kind.NOTIFICATION_DELAY,
    Kind.PREPARE_REFUSED,
    Kind.READ_LATE,
    Kind.READ_ERRS_EARLY,
    Kind.LINK_RESET,
    Kind.METADATA_DROPPED,
    Kind.READ_LIES,
    Kind.KNOWN_PEER,
)
"""METADATA_DROPPED: NIXL forgets agents that were loaded. READ_LIES: a READ is complete, and what it has left is wrong;
all engines verify then. KNOWN_PEER: from the start by an option of the decode engine, later by a message to the life
that it has then. Links from a decode engine to a prefill engine."""
DRAWN_APART = frozenset(
    {
        Kind.METADATA_DROPPED,
        Kind.DRAIN,
        Kind.FLOOD,
        Kind.READ_LIES,
        Kind.KNOWN_PEER,
        Kind.SLEEP,
        Kind.PORTS_KEPT,
    }
)
"""Kinds that are drawn by generators of their own, so that the plans of all other seeds stay what they were."""
PREFILL_KINDS = (
    Kind.CRASH_NEW_ID,
    Kind.CRASH_SAME_ID,
    Kind.INCOMPATIBLE,
    Kind.KEEPER_CRASH,
    Kind.TWO_RANKS,
    Kind.TWO_HOLDERS,
    Kind.HANDSHAKE_REFUSED,
    Kind.DRAIN,
    Kind.FLOOD,
    Kind.PORTS_KEPT,
)
"""DRAIN: it is to end, says so, ends when it has drained, and is started again; at level vllm, where a decode engine
lends too, one of those as well. INCOMPATIBLE: it is replaced by an engine of another model for a while."""
DECODE_KINDS = (
    Kind.CRASH_DECODE,
    Kind.ABORT,
    Kind.BAD_PARAMS,
    Kind.ACTOR_CRASH,
    Kind.LONG_QUEUE,
    Kind.ROUTER_RETRY,
    Kind.WRONG_SIZES,
    Kind.FULL_QUARANTINE,
)
"""FULL_QUARANTINE: some of its READs hang, whoever they are from, until requests end in quarantine, which a few blocks
fill. If all hung at once nothing new would begin: all blocks were those of requests that hang."""

PROCESS_KINDS = frozenset(
    {
        Kind.CRASH_NEW_ID,
        Kind.CRASH_SAME_ID,
        Kind.CRASH_DECODE,
        Kind.PAUSE,
        Kind.ACTOR_CRASH,
        Kind.CONTROL_CRASH,
        Kind.KEEPER_CRASH,
        Kind.CLOCK_SLEW,
        Kind.WORKER_STOPS,
    }
)
"""What may hit one rank of an engine only. The others follow a rank that dies, a moment later."""

LATENCY_SECONDS = 50e-6
"""Of a message, about."""
DEATH_NOTICED_SECONDS = 0.055
"""How long after the death of a process its connections break."""
READ_SLOWDOWN = 50
QUARANTINE_SHARE = 0.1
"""Of the blocks of an engine whose quarantine is to be filled."""
QUARANTINE_PROBABILITY = 0.1
"""How many READs hang for that."""
QUARANTINE_AFTER_SECONDS_MAX = 1.0
"""When READs begin to hang for that: before the first request that hung by itself can have ended in quarantine."""
QUARANTINE_SECONDS = 2.0
"""How long they go on hanging when the first request has."""
QUIESCE_SECONDS = 1.5
"""How long a failed request waits for its READs."""
ONE_RANK_SHARE = 0.5
"""How many of the faults that can hit one rank only do so, where there are several."""
FAULTS_MAX = 16
ENGINES_MAX = 3
"""Of each role."""
PLAIN_SHARE = 0.33
NUMBERED_SHARE = 0.75
SHORT_LIMIT_SHARE = 0.15
"""How many seeds have leases that cannot be renewed for long."""
BLOCK_SIZES = (BLOCK_TOKENS // 2, BLOCK_TOKENS, BLOCK_TOKENS_MAX)
STOP_WHILE_DRAINING_SHARE = 0.08
ABORT_WHILE_DRAINING_SHARE = 0.05
METADATA_DROPPED_SHARE = 0.1
DRAIN_SHARE = 0.2
FLOOD_SHARE = 0.15
FLOOD_SECONDS_MAX = 2.0
LIES_SHARE = 0.1
LIES_MAX = 3
KNOWN_SHARE = 0.15
KNOWN_BY_OPTION_SHARE = 0.7
SLEEP_SHARE = 0.2
SLEEP_SECONDS_MIN = 0.5
"""An engine does not fall asleep before nothing is lent any more."""
PORTS_KEPT_SHARE = 0.2
RESTARTS_AT_MEETINGS_SHARE = 0.5
"""How many of those have engines that are started again while they are met."""
SKEWED_SHARE = 0.06
"""How many seeds have faults that would hardly ever meet by themselves."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """`probability`: how likely each single message, READ or request is hit while the fault lasts."""

    kind: Kind
    target: str
    at_seconds: float
    duration_seconds: float
    probability: float = 1.0

    @property
    def end_seconds(self) -> float:
        return self.at_seconds + self.duration_seconds

    def touches(self, decode: str, prefill: str) -> bool:
        """Whether requests of this pair may feel it."""
        engines = {engine_of(each) for each in self.target.split(">")}
        return engines == {decode, prefill} if len(engines) > 1 else not engines.isdisjoint((decode, prefill))

    def hits(self, names: Sequence[str]) -> bool:
        """Whether ranks, hosts or agents of the engines that it names are those that it means."""
        wanted = (rank_of(each) for each in self.target.split(">"))
        return all(rank is None or rank == rank_of(name) for rank, name in zip(wanted, names, strict=True))


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster of a seed. `verify`: that option of all engines."""

    prefills: int
    decodes: int
    safety_seconds: float
    requests_per_second: float
    reads_inline: bool
    peer_limit: int
    lease_seconds: float
    lease_limit_seconds: float
    numbers_leases: bool
    """Whether routers pass the numbers of leases on."""
    request_timeout_seconds: float
    handshake_timeout_seconds: float
    model: Model
    engines: dict[str, EngineShape]
    verify: Literal["off", "sampled", "all"] = "off"

    @property
    def prefill_names(self) -> list[str]:
        return [f"p{number}" for number in range(self.prefills)]

    @property
    def decode_names(self) -> list[str]:
        return [f"d{number}" for number in range(self.decodes)]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a run depends on. `comment` is for people."""

    seed: int
    faults: list[Fault]
    comment: str = ""


def generator(seed: int, concern: str) -> random.Random:
    """A generator of its own for each concern, so that a draw more in one moves nothing in another."""
    return random.Random(f"{seed}/{concern}")


def draw_shape(seed: int) -> Shape:
    chance = generator(seed, "shape")
    of_leases = generator(seed, "leases")
    model, engines = draw_model_and_engines(generator(seed, "ranks"))
    shape = Shape(
        model=model,
        engines=engines,
        prefills=chance.randint(1, ENGINES_MAX),
        decodes=chance.randint(1, ENGINES_MAX),
        safety_seconds=chance.uniform(4.0, 12.0),
        requests_per_second=chance.uniform(10.0, 50.0),
        reads_inline=chance.random() < 0.3,
        peer_limit=1024 if chance.random() < 0.85 else chance.randint(1, 2),
        lease_seconds=chance.choice([4.0, 4.0, 10.0]),
        lease_limit_seconds=900.0,
        numbers_leases=of_leases.random() < NUMBERED_SHARE,
        request_timeout_seconds=chance.choice([6.0, 6.0, 1.0]),
        handshake_timeout_seconds=chance.choice([0.8, 0.8, 3.0]),
    )
    if of_leases.random() < SHORT_LIMIT_SHARE:
        return msgspec.structs.replace(shape, lease_limit_seconds=2 * shape.lease_seconds)
    return shape


def draw_model_and_engines(
    chance: random.Random, engines_max: int = ENGINES_MAX
) -> tuple[Model, dict[str, EngineShape]]:
    """One seed in three is plain: one rank, one cache group, blocks of one size. Engines that there are not, too."""
    names = [f"{role}{number}" for role in "pd" for number in range(engines_max)]
    if chance.random() < PLAIN_SHARE:
        return Model(), dict.fromkeys(names, EngineShape())
    second = chance.choice([SecondGroup.NONE, SecondGroup.NONE, SecondGroup.WINDOW, SecondGroup.STATE])
    sizes = dict.fromkeys("pd", chance.choice([(BLOCK_TOKENS,), BLOCK_SIZES]))
    if second is SecondGroup.WINDOW and len(sizes["d"]) > 1:
        sizes = {"p": BLOCK_SIZES[1:], "d": BLOCK_SIZES[:2]}  # D refuses blocks that do not fill whole ones of its own.
    engines = {
        name: EngineShape(tp_size=chance.randint(1, 2), block_tokens=chance.choice(sizes[name[0]])) for name in names
    }
    return Model(heads=chance.randint(1, 2), second=second), engines


def shape_of(plan: Plan) -> Shape:
    """The cluster of the plan: that of its seed, and where READs lie one whose engines can verify and do."""
    shape = draw_shape(plan.seed)
    return verifying(shape) if any(fault.kind is Kind.READ_LIES for fault in plan.faults) else shape


def verifying(shape: Shape) -> Shape:
    """The same with engines that verify everything, of sizes for which they can."""
    engines = {
        name: msgspec.structs.replace(each, tp_size=2 if name.startswith("p") else 1, block_tokens=BLOCK_TOKENS)
        for name, each in shape.engines.items()
    }
    model = Model(heads=2)
    return msgspec.structs.replace(shape, model=model, engines=engines, verify="all", request_timeout_seconds=6.0)


def draw_plan(seed: int, kinds: Sequence[Kind] = LEVEL2_KINDS) -> Plan:
    """The faults of a seed; one seed in ten has none. `kinds`: those that the level of the simulator knows."""
    chance = generator(seed, "faults")
    shape = draw_shape(seed)
    if chance.random() < 0.1:
        return Plan(seed=seed, faults=[])
    of_lies = generator(seed, "lying reads")
    lies = Kind.READ_LIES in kinds and of_lies.random() < LIES_SHARE
    if lies:
        shape = verifying(shape)
    swarm = [kind for kind in kinds if kind not in DRAWN_APART]
    allowed = [kind for kind in swarm if chance.random() < 0.3] or [chance.choice(swarm)]
    weights = [chance.uniform(0.1, 1.0) for _ in allowed]
    count = chance.randint(1, FAULTS_MAX)
    faults = [draw_fault(kind, shape, chance) for kind in chance.choices(allowed, weights, k=count)]
    if LEVEL1_ONLY.isdisjoint(kinds):
        of_ranks = generator(seed, "faults of ranks")
        faults = [perhaps_of_one_rank(fault, shape, of_ranks) for fault in faults]
    if Kind.STOP in kinds and chance.random() < STOP_WHILE_DRAINING_SHARE:
        faults += _stop_while_draining(shape, chance)
    if Kind.LONG_QUEUE in kinds and chance.random() < ABORT_WHILE_DRAINING_SHARE:
        faults += _abort_while_draining(shape, chance)
    if Kind.CLOCK_SLEW in kinds:
        skewed = generator(seed, "skewed clocks")
        if skewed.random() < SKEWED_SHARE:
            faults += _read_across_the_end_of_leases(shape, skewed)
    if Kind.METADATA_DROPPED in kinds:
        dropped = generator(seed, "dropped metadata")
        if dropped.random() < METADATA_DROPPED_SHARE:
            faults.append(draw_fault(Kind.METADATA_DROPPED, shape, dropped))
    if Kind.DRAIN in kinds:
        of_drains = generator(seed, "drains")
        if of_drains.random() < DRAIN_SHARE:
            faults += [draw_fault(Kind.DRAIN, shape, of_drains) for _ in range(of_drains.randint(1, 2))]
    if Kind.DRAIN in kinds and set(kinds) >= VLLM_ONLY:
        of_lenders = generator(seed, "drains of decode engines")
        if of_lenders.random() < DRAIN_SHARE:
            drain = draw_fault(Kind.DRAIN, shape, of_lenders)
            faults.append(msgspec.structs.replace(drain, target=of_lenders.choice(shape.decode_names)))
    if Kind.FLOOD in kinds:
        of_floods = generator(seed, "floods")
        if of_floods.random() < FLOOD_SHARE:
            flood = draw_fault(Kind.FLOOD, shape, of_floods)
            seconds = min(flood.duration_seconds, FLOOD_SECONDS_MAX)
            faults.append(msgspec.structs.replace(flood, duration_seconds=seconds))
    if lies:
        faults += [draw_fault(Kind.READ_LIES, shape, of_lies) for _ in range(of_lies.randint(1, LIES_MAX))]
    if Kind.KNOWN_PEER in kinds:
        named = generator(seed, "named peers")
        if named.random() < KNOWN_SHARE:
            faults += _known_peers(shape, named)
    if Kind.SLEEP in kinds:
        of_sleep = generator(seed, "sleep")
        if of_sleep.random() < SLEEP_SHARE:
            faults += [draw_fault(Kind.SLEEP, shape, of_sleep) for _ in range(of_sleep.randint(1, 3))]
    if Kind.PORTS_KEPT in kinds:
        of_ports = generator(seed, "kept ports")
        if of_ports.random() < PORTS_KEPT_SHARE:
            faults += _kept_ports(shape, of_ports)
    return Plan(seed=seed, faults=sorted(faults, key=lambda fault: fault.at_seconds))


def _kept_ports(shape: Shape, chance: random.Random) -> list[Fault]:
    """All prefill engines keep their ports; perhaps one is started again several times, while who meets it hears of it
    late."""
    faults = [
        Fault(kind=Kind.PORTS_KEPT, target=each, at_seconds=0.0, duration_seconds=shape.safety_seconds)
        for each in shape.prefill_names
    ]
    if chance.random() >= RESTARTS_AT_MEETINGS_SHARE:
        return faults
    prefill, seconds = chance.choice(shape.prefill_names), shape.safety_seconds * 0.6
    faults += [
        Fault(
            kind=Kind.MESSAGE_DELAY,
            target=f"{decode}>{prefill}",
            at_seconds=0.0,
            duration_seconds=round(seconds, 3),
            probability=0.5,
        )
        for decode in shape.decode_names
    ]
    faults += [
        Fault(
            kind=Kind.CRASH_SAME_ID,
            target=prefill,
            at_seconds=round(chance.uniform(0.1, seconds), 3),
            duration_seconds=0.05,
        )
        for _ in range(chance.randint(2, 5))
    ]
    return faults


def _known_peers(shape: Shape, chance: random.Random) -> list[Fault]:
    """Some prefill engines that some decode engines are to meet; one of each at least."""
    pairs = [(decode, prefill) for decode in shape.decode_names for prefill in shape.prefill_names]
    chosen = chance.sample(pairs, chance.randint(1, len(pairs)))
    drawn = [draw_fault(Kind.KNOWN_PEER, shape, chance) for _ in chosen]
    return [
        msgspec.structs.replace(
            each,
            target=f"{decode}>{prefill}",
            at_seconds=0.0 if chance.random() < KNOWN_BY_OPTION_SHARE else each.at_seconds,
            probability=1.0,
        )
        for each, (decode, prefill) in zip(drawn, chosen, strict=True)
    ]


def _stop_while_draining(shape: Shape, chance: random.Random) -> list[Fault]:
    """READs hang, their prefill engine is replaced, and before their end is noticed, which the replaced one waits for,
    the decode engine is stopped."""
    decode, prefill = chance.choice(shape.decode_names), chance.choice(shape.prefill_names)
    at_seconds = round(chance.uniform(0.2, shape.safety_seconds * 0.5), 3)
    replaced_seconds = at_seconds + 0.3
    stopped_seconds = round(replaced_seconds + 0.9 * DEATH_NOTICED_SECONDS, 3)
    return [
        Fault(kind=Kind.READ_STALL, target=f"{decode}>{prefill}", at_seconds=at_seconds, duration_seconds=1.0),
        Fault(kind=Kind.CRASH_NEW_ID, target=prefill, at_seconds=replaced_seconds, duration_seconds=0.0),
        Fault(kind=Kind.STOP, target=decode, at_seconds=stopped_seconds, duration_seconds=0.1),
    ]


def _abort_while_draining(shape: Shape, chance: random.Random) -> list[Fault]:
    """Requests queue until shortly before the end of their leases; then their READs hang, and clients leave."""
    decode, prefill = chance.choice(shape.decode_names), chance.choice(shape.prefill_names)
    queue_seconds = shape.lease_seconds - 0.5
    served_seconds = round(0.1 + queue_seconds, 3)
    link = f"{decode}>{prefill}"
    return [
        Fault(kind=Kind.LONG_QUEUE, target=decode, at_seconds=0.1, duration_seconds=queue_seconds),
        Fault(kind=Kind.READ_STALL, target=link, at_seconds=served_seconds, duration_seconds=1.4),
        Fault(kind=Kind.ABORT, target=decode, at_seconds=served_seconds, duration_seconds=1.0),
    ]


def _read_across_the_end_of_leases(shape: Shape, chance: random.Random) -> list[Fault]:
    """READs hang, and no hold arrives, for about as long as a lease lasts; the clocks of the two engines part."""
    decode, prefill = chance.choice(shape.decode_names), chance.choice(shape.prefill_names)
    at_seconds = round(chance.uniform(0.3, shape.safety_seconds * 0.5), 3)
    cut_seconds = round(shape.lease_seconds * chance.uniform(0.85, 1.1), 3)
    hang_seconds = 0.2
    link = f"{decode}>{prefill}"
    slews = [
        Fault(kind=Kind.CLOCK_SLEW, target=engine, at_seconds=0.0, duration_seconds=at_seconds + cut_seconds + 1.0)
        for engine in (decode, prefill)
    ]
    return [
        *slews,
        Fault(
            kind=Kind.READ_STALL,
            target=link,
            at_seconds=at_seconds,
            duration_seconds=round(hang_seconds + cut_seconds, 3),
        ),
        Fault(
            kind=Kind.PARTITION,
            target=link,
            at_seconds=round(at_seconds + hang_seconds, 3),
            duration_seconds=cut_seconds,
        ),
    ]


def draw_fault(kind: Kind, shape: Shape, chance: random.Random) -> Fault:
    at_seconds = chance.uniform(0.0, shape.safety_seconds * 0.8)
    if kind in MESSAGE_KINDS and chance.random() < 0.6:
        at_seconds = 0.0  # engines speak on the side channel when they meet, and rarely afterwards
    if kind is Kind.FULL_QUARANTINE:
        at_seconds = min(at_seconds, QUARANTINE_AFTER_SECONDS_MAX)
    longest = shape.safety_seconds - at_seconds
    duration_seconds = min(longest, chance.choice([0.05, 0.3, 1.0, 4.0, longest]))
    probability = chance.choice([0.1, 0.5, 1.0])
    if kind is Kind.FULL_QUARANTINE:
        duration_seconds = min(longest, shape.request_timeout_seconds + QUIESCE_SECONDS + QUARANTINE_SECONDS)
        probability = QUARANTINE_PROBABILITY
    if kind is Kind.SLEEP:
        duration_seconds = min(longest, max(duration_seconds, SLEEP_SECONDS_MIN))
    return Fault(
        kind=kind,
        target=_draw_target(kind, shape, chance),
        at_seconds=round(at_seconds, 3),
        duration_seconds=round(duration_seconds, 3),
        probability=probability,
    )


def _draw_target(kind: Kind, shape: Shape, chance: random.Random) -> str:
    decode, prefill = chance.choice(shape.decode_names), chance.choice(shape.prefill_names)
    if kind in DECODE_LINK_KINDS:
        return f"{decode}>{prefill}"
    if kind in MESSAGE_KINDS:
        return chance.choice([f"{decode}>{prefill}", f"{prefill}>{decode}"])
    if kind in PREFILL_KINDS:
        return prefill
    if kind in DECODE_KINDS:
        return decode
    return chance.choice([decode, prefill])


def perhaps_of_one_rank(fault: Fault, shape: Shape, chance: random.Random) -> Fault:
    """A fault of an engine or a link, narrowed to one rank where there are two: for links, perhaps to one at each end.

    The side channel of a prefill engine is not a rank's, so messages are narrowed on the decode engine's side only.
    """
    if fault.kind not in PROCESS_KINDS and fault.kind not in (*MESSAGE_KINDS, *DECODE_LINK_KINDS):
        return fault
    names = []
    for name in fault.target.split(">"):
        has_rank = fault.kind not in MESSAGE_KINDS or name in shape.decode_names
        narrows = chance.random() < ONE_RANK_SHARE and has_rank and shape.engines[name].tp_size > 1
        names.append(f"{name}.{chance.randrange(shape.engines[name].tp_size)}" if narrows else name)
    return msgspec.structs.replace(fault, target=">".join(names))


@functools.lru_cache(maxsize=1024)  # asked several times for each message
def engine_of(name: str) -> str:
    """The engine that a rank, a host or an agent belongs to."""
    return name.partition(".")[0]


@functools.lru_cache(maxsize=1024)
def rank_of(name: str) -> int | None:
    """The rank that a host or an agent belongs to; None: none in particular."""
    _, *rest = name.split(".")
    return int(rest[0]) if rest and rest[0].isdigit() else None
