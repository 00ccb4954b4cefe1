"""Why a request is where it is: the first line names the cause, for every way to end and every state that waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import msgspec
import pytest

from connector.observe.advice import (
    ALREADY_READ,
    FREED_ON_P,
    NIXL_HANGS_ADVICE,
    NO_PARAMETERS,
    NO_ROOM,
    NOT_READ,
    OTHER_ADAPTER,
    OTHER_MEDIA,
    WHAT_TO_DO,
    advice_of,
    told,
)
from connector.observe.catalogue import LOCAL_PREFILLS
from connector.observe.traced import QUEUED
from connector.tools.asking import Address
from connector.tools.cli.output import plain
from connector.tools.course import brought_together
from connector.tools.explanation import Case, Explanation, Live, Said, explain, explain_nothing, find
from connector.tools.explanation.not_read import LEASE_WAITING, NOTHING_READ
from connector.tools.explanation.rows import by_type
from connector.tools.explanation.waiting import WAITING
from connector.tools.live import EngineReport, RankReport, Silent
from connector.wire.handshake import Advertisement
from connector.wire.inspection import (
    EngineCounts,
    EngineFacts,
    EngineRow,
    HolderRow,
    HoldRow,
    LeaseRow,
    LocalPrefillRow,
    PeerRow,
    QuarantineRow,
    RecordRow,
    RequestRow,
    WithoutRoomRow,
)
from statemachine import failures, lease, lending, remote_engine, request
from statemachine.failures import Failure
from statemachine.trace import TransitionRecord
from tests.rig.facts import facts as extension
from tests.unit.test_failures import EXAMPLES
from tests.unit.test_history import LENT, PULLED, Step, records

D_NAME, P_NAME = "cmpl-abc-0-d", "cmpl-abc-0-p"
FAILED: tuple[Step, ...] = (
    (None, "Created", "pending_handshake"),
    ("pending_handshake", "PeerFailed", "failed"),
)
EXPIRED: tuple[Step, ...] = ((None, "Created", "computing"), ("computing", "Granted", "held"), ("held", "X", "expired"))


LEASE_OVER = failures.LeaseOver(peer="P", remote_request_id=P_NAME, why="expired")


def pulled(steps: tuple[Step, ...] = PULLED, **fields: Any) -> list[TransitionRecord]:
    return records("request", "D", D_NAME, steps, **({"peer": "P", "remote_request_id": P_NAME} | fields))


def lent(steps: tuple[Step, ...] = LENT, **fields: Any) -> list[TransitionRecord]:
    return records("lease", "P", P_NAME, steps, **fields)


def ended_with(failure: Failure, steps: tuple[Step, ...] = FAILED) -> list[TransitionRecord]:
    *before, last = pulled(steps)
    fields = {name: getattr(last, name) for name in last.__struct_fields__}
    return [*before, TransitionRecord(**(fields | {"reason": failure.kind, "detail": str(failure)}))]


def row(state: str, **changes: Any) -> Said[RequestRow]:
    fields: dict[str, Any] = {
        "request_id": D_NAME,
        "remote_request_id": P_NAME,
        "lease_number": 1,
        "peer": "P",
        "address": "10.0.0.1:5600",
        "state": state,
        "waits_for": "something",
        "since_seconds": 3.0,
        "age_seconds": 4.0,
        "until_seconds": 100.0,
        "queue_position": None,
        "blocks": 4,
        "reads": 2,
        "bytes": None,
        "proven_seconds": 20.0,
        "retries_left": 1,
        "ending": None,
        "failure": None,
        "detail": None,
    }
    return Said("D", 0, RequestRow(**(fields | changes)))


def peer_row(state: str, **changes: Any) -> Said[PeerRow]:
    fields: dict[str, Any] = {
        "engine_id": "P",
        "address": "10.0.0.1:5600",
        "state": state,
        "since_seconds": 2.0,
        "failure": None,
        "detail": None,
        "failures": 0,
        "backoff_seconds": None,
        "is_builtin": False,
        "is_retiring": False,
        "ranks": 1,
        "requests": 1,
        "queued": 0,
        "holds": 1,
        "reads": 3,
        "quarantined_requests": 0,
        "quarantined_blocks": 0,
        "unasked_seconds": 0.0,
    }
    return Said("D", 0, PeerRow(**(fields | changes)))


def holder(engine_id: str, **where: Any) -> HolderRow:
    return HolderRow(engine_id=engine_id, ranks=1, released=(), released_count=0, **where)


GONE = holder("d", address="::5", is_connected=False)


def lease_row(state: str, holders: tuple[HolderRow, ...] = ()) -> Said[LeaseRow]:
    found = LeaseRow(
        request_id=P_NAME,
        lease_number=1,
        state=state,
        since_seconds=1.0,
        deadline_seconds=9.0,
        limit_seconds=90.0,
        blocks=4,
        holders=holders,
        holders_count=len(holders),
    )
    return Said("P", 0, found)


def engine_row(engine_id: str, **facts: Any) -> Said[EngineRow]:
    found = EngineRow(
        engine_id=engine_id,
        rank=0,
        tp_rank=0,
        pp_rank=0,
        tp_size=1,
        uptime_seconds=50.0,
        recorded_seconds=40.0,
        stopped=None,
        facts=EngineFacts(**facts),
        counts=EngineCounts(),
        peers_by_state={},
        leases_by_state={},
    )
    return Said(engine_id, 0, found)


def said_by(*said: Said[Any], **others: Any) -> Live:
    """What running engines say, in rows of any kinds; `others`: further fields of `Live`."""
    return Live(rows=by_type(said), **others)


def the_answer(found: list[TransitionRecord], live: Live | None = None, text: str = "abc") -> Explanation:
    live = live or Live()
    (case,) = find(text, found, live)
    return explain(case, live)


def happened(failure: Failure) -> str:
    """Its sentence without what to do."""
    return str(failure).partition("; what to do: ")[0]


def test_of_two_connections_to_one_engine_that_of_the_failure_is_told() -> None:
    """Requests that describe it by unlike sizes make two."""
    refused = peer_row("idle", failure="BadParams", detail="kv_transfer_params.tp_size: it has 1", ranks=0, requests=0)
    live = said_by(refused, peer_row("ready", requests=0))

    def connection(failure: Failure) -> str:
        (fact,) = (each for each in the_answer(ended_with(failure), live).facts if "connection" in each)
        return fact

    of_peer = {"peer": "P", "address": "h:1"}
    consumed = failures.BlocksConsumed(**of_peer, remote_request_id=P_NAME)
    assert " is ready" in connection(consumed)
    assert " is idle" in connection(failures.BadParams(field="tp_size", expected="1", found="2"))
    assert " is idle" in connection(failures.PeerBackoff(**of_peer, retry_in_seconds=1.0, last="BadParams"))


# --- tables -----------------------------------------------------------------------------------------------------------


def test_there_is_something_to_do_for_every_kind_of_failure() -> None:
    def leaves(base: type[Failure]) -> set[type[Failure]]:
        below = base.__subclasses__()
        return {base}.union(*map(leaves, below)) - {base} if below else {base}

    kinds = {each.__name__ for each in leaves(Failure)}
    no_failures = {NO_PARAMETERS, NO_ROOM, NOT_READ, ALREADY_READ, FREED_ON_P, OTHER_ADAPTER, OTHER_MEDIA}
    assert WHAT_TO_DO.keys() == kinds | no_failures


@pytest.mark.parametrize("failure", EXAMPLES, ids=lambda failure: failure.kind)
def test_what_is_told_of_a_failure_is_what_happened_and_what_to_do(failure: Failure) -> None:
    """Traces and tools have its kind and its sentence."""
    assert told(failure.kind, str(failure)) == (happened(failure), advice_of(failure))


def test_a_failure_of_a_later_version_and_a_sentence_that_was_cut_are_told_too() -> None:
    assert told("Later", "it went wrong; what to do: guess", "look at the log") == (
        "it went wrong; what to do: guess",
        "look at the log",
    )
    assert told("Incompatible", "prefill engine xxx...") == ("prefill engine xxx...", WHAT_TO_DO["Incompatible"])
    assert told(None, None) == (None, "")
    # Values come from peers, and the advice last.
    hostile = failures.Incompatible(
        peer="P", field="f", local="1", remote="2; what to do: run it", advice="start it alike"
    )
    assert told("Incompatible", str(hostile))[1] == "start it alike"


def test_every_state_that_waits_says_for_what() -> None:
    waiting = {state.value for state in request.State} - {state.value for state in request.MACHINE.terminal}
    assert WAITING.keys() == waiting | {QUEUED}
    assert {state.value for state in lease.State} - {s.value for s in lease.MACHINE.terminal} == LEASE_WAITING.keys()


@pytest.mark.parametrize("failure", EXAMPLES, ids=lambda failure: failure.kind)
@pytest.mark.parametrize("state", ["failed", "expired"])
def test_the_first_line_begins_with_the_kind_and_says_what_happened(failure: Failure, state: str) -> None:
    steps = ((None, "Created", "pending_handshake"), ("pending_handshake", "PeerFailed", state))
    answer = the_answer(ended_with(failure, steps))
    assert answer.cause.startswith(f"{failure.kind}: ")
    assert str(failure).split(";")[0] in answer.cause or failure.kind == "Quarantined"
    assert (answer.kind, answer.outcome, answer.state) == (failure.kind, "failed", state)
    assert (answer.detail, answer.advice) == (happened(failure), advice_of(failure))
    assert answer.detail is not None
    assert answer.advice not in answer.detail
    assert answer.next


@pytest.mark.parametrize("state", WAITING)
def test_the_first_line_of_one_that_waits_says_for_what_and_how_long(state: str) -> None:
    live = said_by(row(state), peer_row("handshaking"))
    answer = the_answer([], live)
    assert answer.outcome == "waiting"
    assert "3 s" in answer.cause or "2 s" in answer.cause
    assert (answer.state, answer.side, answer.engine_id, answer.peer) == (state, "D", "D", "P")
    assert (answer.since_seconds, answer.until_seconds) == (3.0, 100.0)
    assert answer.next == WAITING[state][1]


# --- causes that lie elsewhere ----------------------------------------------------------------------------------------


def test_one_that_was_refused_because_its_peer_backs_off_says_why_it_does() -> None:
    peer = records(
        "peer",
        "D",
        "P",
        ((None, "Created", "idle"), ("idle", "Wanted", "handshaking"), ("handshaking", "HandshakeFailed", "backoff")),
        at=-5.0,
        peer="P",
        reason="ConnectionRefused",
        detail="nothing listens at 10.0.0.1:5600; the engine has ended",
    )
    refused = ended_with(failures.PeerBackoff(peer="P", retry_in_seconds=3.0, last="ConnectionRefused"))
    answer = the_answer([*peer, *refused])
    assert answer.cause == (
        "PeerBackoff: ConnectionRefused: nothing listens at 10.0.0.1:5600; P was not tried again yet"
    )
    assert answer.advice == f"{WHAT_TO_DO['ConnectionRefused']}; P is tried again by itself"
    assert the_answer(refused).advice == WHAT_TO_DO["PeerBackoff"]


def test_why_its_peer_backed_off_is_not_what_is_wrong_with_the_peer_now() -> None:
    """A request may have ended long before it is asked for."""
    refused = ended_with(failures.PeerBackoff(peer="P", retry_in_seconds=3.0, last="HandshakeTimeout"))

    def cause(state: str, failure: str | None) -> str:
        return the_answer(refused, said_by(peer_row(state, failure=failure, detail="did not answer; check"))).cause

    because = "PeerBackoff: HandshakeTimeout: did not answer; P"
    assert cause("backoff", "HandshakeTimeout") == f"{because} is not tried again yet"
    assert cause("handshaking", "HandshakeTimeout") == f"{because} was not tried again yet"
    for state, failure in (("incompatible", "Incompatible"), ("backoff", "ConnectionRefused"), ("ready", None)):
        told = cause(state, failure)
        assert "failed recently (HandshakeTimeout)" in told
        assert "did not answer" not in told


def test_whether_blocks_of_one_that_was_quarantined_still_are_is_said() -> None:
    """Whoever reads that something hangs may restart it."""
    ended = ended_with(failures.Quarantined(reads=1, waited_seconds=8.0, cause="DeadlineExceeded"))
    kept = QuarantineRow(request_id=D_NAME, remote_request_id=P_NAME, peer="P", blocks=38, reads=2, since_seconds=9.0)
    over = "D has no block in quarantine any more: the READs have ended since"
    answer = the_answer(ended, said_by(engine_row("D")))
    assert over in answer.facts
    assert answer.advice == f"nothing, if it does not come again; else {WHAT_TO_DO['Quarantined']}"
    for live in (said_by(engine_row("D"), Said("D", 0, kept)), said_by()):
        answer = the_answer(ended, live)
        assert over not in answer.facts
        assert answer.advice == WHAT_TO_DO["Quarantined"]


def test_a_queued_one_whose_blocks_are_quarantined_says_so() -> None:
    kept = QuarantineRow(request_id="other", remote_request_id="o", peer="P", blocks=38, reads=2, since_seconds=9.0)
    live = said_by(engine_row("D", blocks=40), row("queued"), Said("D", 0, kept))
    answer = the_answer([], live)
    assert answer.cause.startswith("Quarantined: 38 of 40 KV blocks")
    assert "P have not ended" in answer.cause
    assert answer.advice == WHAT_TO_DO["Quarantined"]


def test_what_a_built_in_engine_does_not_say_is_not_said_to_be_known() -> None:
    """D takes its lease to be over in its time, whatever its heartbeats have kept."""
    builtin = peer_row("ready", is_builtin=True)
    for state in ("queued", "reading"):
        answer = the_answer([], said_by(row(state), builtin))
        assert not any("is known to keep" in fact for fact in answer.facts)
        assert any("D takes its lease to end in 20 s" in fact for fact in answer.facts)
    queued = the_answer([], said_by(row("queued"), builtin))
    assert "LeaseOver" in queued.next
    assert "keeps the lease on P alive" not in queued.next
    ours = the_answer([], said_by(row("reading"), peer_row("ready")))
    assert "P is known to keep the blocks for 20 s more" in ours.facts


def test_decode_engines_that_are_gone_are_not_to_be_asked() -> None:
    """While one of them is connected they are."""
    for holders, word in (((GONE,), "see whether those decode engines have ended"), ((GONE, holder("e")), "--engine")):
        assert word in the_answer(lent(LENT[:2]), said_by(lease_row("held", holders))).advice


def test_of_two_engines_with_one_id_the_first_line_has_both_addresses() -> None:
    """That the one which was asked has restarted is what it supposes, and mostly not so."""
    failure = failures.LeaseOver(
        peer="P", address="10.0.0.1:5600", remote_request_id=P_NAME, why="not lent here", named="10.0.0.2:5600"
    )
    cause = the_answer(ended_with(failure), said_by()).cause
    assert "P at 10.0.0.1:5600 does not keep" in cause
    assert "names this engine at 10.0.0.2:5600: if another process runs there, both have one engine_id" in cause


def test_a_queued_one_that_nothing_holds_up_may_be_in_an_engine_that_is_paused() -> None:
    """Which the connector is not told."""
    answer = the_answer([], said_by(row("queued"), peer_row("ready")))
    assert answer.advice.startswith("nothing yet")
    for way in ("/is_paused", "/is_sleeping"):
        assert way in answer.advice


@pytest.mark.parametrize("state", ["queued", "reading"])
def test_one_whose_peer_drains_says_how_long_its_blocks_are_kept_at_most(state: str) -> None:
    """One that waits in the queue for longer fails (PeerLeaving)."""
    drains = said_by(row(state), peer_row("ready", leaving_seconds=12.0))
    assert "P drains, and keeps what it lends for 12 s more at most" in the_answer([], drains).facts
    stays = said_by(row(state), peer_row("ready"))
    assert not any("drains" in fact for fact in the_answer([], stays).facts)


def test_a_few_quarantined_blocks_are_not_why_it_is_queued() -> None:
    kept = QuarantineRow(request_id="other", remote_request_id="o", peer="hangs", blocks=3, reads=2, since_seconds=9.0)
    live = said_by(engine_row("D", blocks=40), row("queued"), Said("D", 0, kept))
    answer = the_answer([], live)
    assert answer.kind is None
    assert answer.cause.startswith("It waits in the queue of vLLM's scheduler")
    assert any("READs from hangs have not ended" in fact for fact in answer.facts)


def hold_row(state: str, **changes: Any) -> Said[HoldRow]:
    fields: dict[str, Any] = {
        "remote_request_id": P_NAME,
        "lease_number": 1,
        "peer": "P",
        "rank": 0,
        "state": state,
        "since_seconds": 1.0,
        "proven_seconds": None,
        "why": None,
        "users": (D_NAME,),
        "users_count": 1,
    }
    return Said("D", 0, HoldRow(**(fields | changes)))


@pytest.mark.parametrize(
    ("why", "kind"), [(lending.EXPIRED, "LeaseOver"), (remote_engine.LEFT, "PeerLeaving")], ids=["expired", "left"]
)
def test_a_queued_one_whose_lease_is_over_says_so_before_it_is_scheduled(why: str, kind: str) -> None:
    """And not that it is kept alive. What is over for another rank, or of another lease, is not of it."""
    waits = row("queued", proven_seconds=None)
    others = (hold_row("held"), hold_row("gone", lease_number=2, why=why), hold_row("gone", why=why)._replace(rank=1))
    assert the_answer([], said_by(waits, *others)).kind is None
    facts = engine_row("D", load_failure_policy="recompute")
    live = said_by(facts, waits, *others, hold_row("gone", rank=1, why=why))
    answer = the_answer([], live)
    assert answer.cause.startswith(f"{kind}: prefill engine P does not keep its blocks any more ({why})")
    assert (answer.kind, answer.outcome, answer.advice) == (kind, "waiting", WHAT_TO_DO[kind])
    assert "it fails" in answer.next
    assert "recompute" in answer.next
    fails = the_answer([], said_by(engine_row("D", load_failure_policy="fail"), waits, hold_row("gone", why=why)))
    assert fails.next.endswith(
        "unless D has its blocks by then: the client gets an error (kv_load_failure_policy: fail)"
    )


@pytest.mark.parametrize(("engine_id", "is_said"), [("D", True), ("P", True), ("another", False)])
def test_a_call_of_nixl_that_does_not_return_stands_first_beside_what_the_request_waits_for(
    engine_id: str, is_said: bool
) -> None:
    name, rank, found = engine_row(engine_id)
    hangs = Said(name, rank, msgspec.structs.replace(found, counts=EngineCounts(nixl_lag_seconds=40)))
    answer = the_answer([], said_by(hangs, row("reading"), peer_row("ready")))
    said = [fact for fact in answer.facts if "NIXL has not returned from a call for 40 s" in fact]
    assert said == ([answer.facts[0]] if is_said else [])


@pytest.mark.parametrize(("engine_id", "is_said"), [("D", True), ("P", False)])
def test_what_to_do_where_nixl_hangs_on_d_is_not_what_the_failure_says_of_p(engine_id: str, is_said: bool) -> None:
    name, rank, found = engine_row(engine_id)
    hangs = Said(name, rank, msgspec.structs.replace(found, counts=EngineCounts(nixl_lag_seconds=40)))
    for failure in EXAMPLES:
        answer = the_answer(ended_with(failure), said_by(hangs))
        speaks_of_p = failure.kind in ("DeadlineExceeded", "Quarantined", "QuarantineFull", "ReadNeverEnded")
        assert (answer.advice == NIXL_HANGS_ADVICE) == (is_said and speaks_of_p), failure.kind


def test_one_that_a_rank_has_loaded_is_not_served_where_another_rank_does_not_answer() -> None:
    silent = Silent(address="d:5600", engine_id="D", kind="ControlLinkLost", problem="its control socket is silent")
    answer = the_answer(pulled(), Live(silent=(silent,)))
    assert (answer.outcome, answer.side) == ("waiting", "D")
    assert answer.cause.startswith(
        "Loaded on rank 0, and whether it is on all others is not known: d:5600 could not be"
    )
    other = replace(silent, engine_id="another", address="other:5600")
    assert the_answer(pulled(), Live(silent=(other,))).outcome == "served"


def test_a_queued_one_whose_peer_is_away_is_not_said_to_be_kept_alive() -> None:
    away = peer_row("backoff", failure="ConnectionRefused", detail="nothing listens there")
    answer = the_answer([], said_by(row("queued", proven_seconds=None), away))
    assert "cannot tell P to keep the lease" in answer.next
    connected = the_answer([], said_by(row("queued"), peer_row("ready")))
    assert connected.next == WAITING["queued"][1]


def test_blocks_of_which_each_rank_keeps_its_part_aside_count_once() -> None:
    kept = [
        QuarantineRow(request_id=name, remote_request_id="o", peer="P", blocks=blocks, reads=2, since_seconds=9.0)
        for name, blocks in (("both", 20), ("both", 20), ("one", 10))
    ]
    quarantines = tuple(Said("D", rank, each) for rank, each in zip((0, 1, 1), kept, strict=True))
    live = said_by(engine_row("D", blocks=40), row("queued"), *quarantines)
    assert the_answer([], live).cause.startswith("Quarantined: 30 of 40 KV blocks")


def test_one_that_a_full_quarantine_refused_says_whose_reads_have_not_ended() -> None:
    """As long as blocks are in quarantine, and not those of another engine."""
    refused = ended_with(failures.QuarantineFull(blocks=38, limit=20))
    kept = [
        QuarantineRow(request_id=name, remote_request_id=name, peer=peer, blocks=19, reads=2, since_seconds=9.0)
        for name, peer in (("a", "hangs"), ("b", "hangs"), ("c", "hangs-too"), ("d", "another"))
    ]
    owners = ("D", "D", "D", "another-D")
    live = said_by(*(Said(owner, 0, each) for owner, each in zip(owners, kept, strict=True)))
    answer = the_answer(refused, live)
    assert answer.cause.startswith("QuarantineFull: 38 KV blocks")
    assert answer.cause.endswith(": READs from hangs, hangs-too have not ended")
    assert "have not ended" in the_answer(refused).cause
    assert "hangs" not in the_answer(refused).cause


def test_to_explain_one_of_many_requests_takes_no_look_at_all_of_them() -> None:
    """`why cmpl-` is asked when thousands wait, and by somebody who does."""

    def calls_for(requests: int) -> int:
        calls = 0

        def count(frame: FrameType, event: str, arg: object) -> None:
            nonlocal calls
            calls += event == "call"

        def said(number: int) -> Iterator[Said[Any]]:
            name = f"cmpl-{number}-0-p"
            yield row("queued", request_id=f"cmpl-{number}-0-d", remote_request_id=name)
            yield row("queued", request_id=f"cmpl-{number}-1-d", remote_request_id=f"cmpl-{number}-1-p")
            yield hold_row("gone", remote_request_id=name)
            for lent in (lease_row("held"), lease_row("held")._replace(engine_id="P2")):
                yield lent._replace(row=msgspec.structs.replace(lent.row, request_id=name))

        recorded = [each for number in range(requests) for each in records("lease", "P", f"cmpl-r{number}-0-p", LENT)]
        live = said_by(*(each for number in range(requests) for each in said(number)))
        sys.setprofile(count)
        try:
            found = [explain(case, live) for case in find("cmpl-", recorded, live)]
        finally:
            sys.setprofile(None)
        assert len(found) == 4 * requests
        return calls

    assert calls_for(200) < 2.5 * calls_for(100)


@pytest.mark.parametrize("state", ["pending_handshake", "reading", "proving"])
def test_one_whose_peer_does_not_answer_the_tool_either_says_so(state: str) -> None:
    silent = Silent(address="10.0.0.1:5600", engine_id="P", kind="HandshakeTimeout", problem="no answer within 1 s")
    live = said_by(row(state), peer_row("ready"), silent=(silent,))
    answer = the_answer([], live)
    assert answer.cause.startswith("HandshakeTimeout: ")
    assert "no answer within 1 s" in answer.cause
    assert answer.advice == WHAT_TO_DO["HandshakeTimeout"]


@pytest.mark.parametrize("state", ["pending_handshake", "reading", "proving"])
@pytest.mark.parametrize("kind", ["NotAllowed", "AddressNotResolved"])
def test_that_only_the_tool_may_not_ask_its_peer_is_no_cause(kind: str, state: str) -> None:
    """D is connected. What the tool was told is a fact, and not what to correct on P or D."""
    silent = Silent(address="10.0.0.1:5600", engine_id="P", kind=kind, problem="this tool may not ask it (--keys)")
    live = said_by(row(state), peer_row("ready"), silent=(silent,))
    answer = the_answer([], live)
    assert answer.kind is None
    assert kind not in answer.cause
    assert answer.advice != WHAT_TO_DO[kind]
    assert "10.0.0.1:5600 was asked just now: this tool may not ask it (--keys)" in answer.facts


@pytest.mark.parametrize("state", ["pending_handshake", "queued", "reading", "proving"])
def test_that_the_tool_had_no_time_for_all_that_its_peer_says_is_no_cause(state: str) -> None:
    told = RankReport(
        rank=(0, 0),
        advertisement=Advertisement(compatibility_hash="h", metadata=None, actor=extension(), error=None),
        rows=(engine_row("P").row,),
        problem="has told 1 row(s), and not all in the time",
        ran_out=True,
    )
    silence = EngineReport(address=Address("10.0.0.1", 5600), ranks=(told,)).silence({})
    assert silence is not None
    answer = the_answer([], said_by(row(state), silent=(silence,)))
    assert answer.kind is None
    assert "row(s)" not in answer.cause
    assert any("not all in the time" in fact for fact in answer.facts)


def test_one_that_waits_for_its_turn_says_behind_how_many() -> None:
    live = said_by(row("reading", waits_for="turn", queue_position=7))
    assert the_answer([], live).cause == "Its READs wait for their turn, behind those of 7 request(s), for 3 s"
    first = said_by(row("reading", waits_for="turn", queue_position=0))
    assert the_answer([], first).cause == "Its READs wait for their turn, and are the next, for 3 s"


def test_one_whose_connection_is_given_up_says_why() -> None:
    lost = peer_row("draining", failure="ControlLinkLost", detail="the control connection was lost; it is rebuilt")
    live = said_by(row("pending_handshake"), lost)
    answer = the_answer([], live)
    assert answer.cause.startswith("ControlLinkLost: the control connection was lost; the connection is rebuilt when 3")


def test_one_that_waits_for_checksums_is_not_said_to_wait_for_the_connection() -> None:
    live = said_by(row("pending_handshake", waits_for="checksums"), peer_row("ready"))
    answer = the_answer([], live)
    assert answer.cause.startswith("Waiting for the checksums of its blocks (verify) from prefill engine P")
    assert answer.waits_for == "checksums"
    assert "its READs begin" in answer.next
    assert "checksums" in answer.advice


@pytest.mark.parametrize(
    ("last", "word"), [("ready", "the checksums of its blocks (verify)"), ("handshaking", "the connection")]
)
def test_one_that_took_too_long_says_what_did_not_come(last: str, word: str) -> None:
    begun: tuple[Step, ...] = ((None, "Created", "idle"), ("idle", "Wanted", "handshaking"))
    steps = (*begun, ("handshaking", "HandshakeSucceeded", "ready")) if last == "ready" else begun
    peer = records("peer", "D", "P", steps, at=-5.0, peer="P")
    late = failures.DeadlineExceeded(timeout_seconds=120.0, phase="pending_handshake")
    assert f": {word} from prefill engine P did not come in time" in the_answer([*peer, *ended_with(late)]).cause


@pytest.mark.parametrize(
    ("state", "since_seconds", "word"),
    [
        ("ready", 200.0, "the checksums of its blocks (verify)"),
        ("handshaking", 200.0, "the connection"),
        ("ready", 5.0, "the connection, or the checksums of its blocks (verify),"),
        ("ready", None, "the connection, or the checksums of its blocks (verify),"),
    ],
)
def test_one_that_took_too_long_is_told_by_running_engines_too(
    state: str, since_seconds: float | None, word: str
) -> None:
    """They are asked for the records of a request, and none of a connection is of one."""
    late = ended_with(failures.DeadlineExceeded(timeout_seconds=120.0, phase="pending_handshake"))
    told = [Said("D", 0, RecordRow(record=each, age_seconds=20.0)) for each in late]
    connection = peer_row(state, since_seconds=since_seconds)

    def cause(**options: str) -> str:
        return the_answer(late, said_by(engine_row("D", options=options), connection, *told)).cause

    assert f": {word} from prefill engine P did not come in time" in cause(verify='"sampled"')
    if since_seconds != 200.0:
        assert ": the connection from prefill engine P did not come in time" in cause(verify='"off"')


def test_a_rank_that_waits_is_told_with_its_own_connection() -> None:
    """The other rank is connected; and of two sizes of one engine, one is not waited for."""
    waits = row("pending_handshake")._replace(rank=1)
    handshaking = peer_row("handshaking")._replace(rank=1)
    for further in ((), (peer_row("ready", requests=0)._replace(rank=1),)):
        answer = the_answer([], said_by(waits, peer_row("ready"), *further, handshaking))
        assert answer.cause.startswith("Waiting for the handshake with prefill engine P")
        assert any("connection to P at 10.0.0.1:5600 is handshaking" in fact for fact in answer.facts)


def test_one_that_drains_says_what_it_failed_of() -> None:
    failure = failures.DeadlineExceeded(timeout_seconds=5.0, phase="reading")
    live = said_by(row("draining", failure=failure.kind, detail=str(failure), ending="expired"))
    answer = the_answer([], live)
    assert answer.cause.startswith("DeadlineExceeded: ")
    assert "READs have not ended" in answer.cause


def test_the_part_of_the_hash_that_differs_is_named_with_both_values() -> None:
    failure = failures.Incompatible(
        peer="P", field="compatibility_hash", local="a1", remote="b2", advice="start it alike"
    )
    live = said_by(
        engine_row("D", factors={"model": "llama", "dtype": "float16"}),
        engine_row("P", factors={"model": "gemma", "dtype": "float16"}),
    )
    answer = the_answer(ended_with(failure), live)
    assert answer.cause == "Incompatible: prefill engine P and this one differ: model: gemma on P, llama on D"
    assert (answer.detail, answer.advice) == (happened(failure), "start it alike")


def test_of_equal_weights_the_path_is_not_what_differs() -> None:
    failure = failures.Incompatible(
        peer="P", field="k_scale of a layer", local="0.5", remote="0.25", advice="start it alike"
    )
    same = {"model": "/here", "weights": "w"}
    live = said_by(engine_row("D", factors=same), engine_row("P", factors=same | {"model": "/elsewhere"}))
    answer = the_answer(ended_with(failure), live)
    assert answer.cause.startswith("Incompatible: ")
    assert "k_scale of a layer is 0.25 there and 0.5 here" in answer.cause
    assert "/elsewhere" not in answer.cause


@pytest.mark.parametrize(("policy", "word"), [("fail", "an error"), ("recompute", "need not ask again")])
def test_what_happens_next_depends_on_the_policy(policy: str, word: str) -> None:
    live = said_by(engine_row("D", load_failure_policy=policy))
    assert word in the_answer(ended_with(failures.ConnectionRefused(peer="P")), live).next


# --- no room in the cache ---------------------------------------------------------------------------------------------


def without_room(name: str = D_NAME) -> Said[WithoutRoomRow]:
    row = WithoutRoomRow(request_id=name, tokens=900, quarantined_blocks=7, lent_back_blocks=2, since_seconds=12.0)
    return Said("D", 0, row)


def test_one_that_lacks_room_says_so_whether_it_loads_or_not() -> None:
    for live, kinds in (
        (said_by(engine_row("D"), row("queued"), without_room()), "when vLLM schedules it, its READs begin"),
        (said_by(engine_row("D"), local_prefill(), without_room()), ""),
        (said_by(engine_row("D"), without_room()), ""),
    ):
        answer = the_answer([], live)
        assert (answer.kind, answer.outcome, answer.state, answer.side) == (NO_ROOM, "waiting", "queued", "D")
        assert "900 tokens" in answer.cause
        assert "7 in quarantine and 2 lent back" in answer.cause
        assert "12 s" in answer.cause
        assert kinds in answer.next
        assert answer.advice == WHAT_TO_DO[NO_ROOM]


def test_one_whose_load_has_failed_and_that_now_lacks_room_waits() -> None:
    ended = ended_with(failures.ConnectionRefused(peer="P"))
    answer = the_answer(ended, said_by(engine_row("D"), without_room()))
    assert (answer.kind, answer.outcome) == (NO_ROOM, "waiting")
    assert answer.happened


# --- parameters that were lost, and leases that nobody reads ----------------------------------------------------------


def local_prefill(name: str = D_NAME, *, reason: str = "absent") -> Said[LocalPrefillRow]:
    return Said("D", 0, LocalPrefillRow(request_id=name, reason=reason, tokens=100, age_seconds=2.0))


@pytest.mark.parametrize(
    ("reason", "word"), [("absent", "no kv_transfer_params"), ("unusable", "neither do_remote_prefill nor")]
)
def test_one_without_parameters(reason: str, word: str) -> None:
    live = said_by(local_prefill(reason=reason))
    answer = the_answer([], live)
    assert answer.cause.startswith(f"{NO_PARAMETERS}: ")
    assert word in answer.cause
    assert "D, which computed the prompt itself" in answer.cause
    assert answer.outcome == "computed_locally"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("continued", ALREADY_READ),
        ("window", FREED_ON_P),
        ("adapter", OTHER_ADAPTER),
        ("media", OTHER_MEDIA),
        ("no_room", NO_ROOM),
    ],
)
def test_one_of_which_nothing_was_read_though_it_had_parameters(reason: str, kind: str) -> None:
    """The router has lost nothing."""
    answer = the_answer(lent(LENT[:2]), said_by(local_prefill(reason=reason)))
    assert answer.cause.startswith(f"{kind}: D computed ")
    assert (answer.kind, answer.outcome, answer.side, answer.advice) == (
        kind,
        "computed_locally",
        "D",
        WHAT_TO_DO[kind],
    )
    assert not any("the router has lost" in fact for fact in answer.facts)


def test_each_reason_of_a_local_prefill_is_explained() -> None:
    reasons = {reason for (reason,) in LOCAL_PREFILLS.series}
    assert reasons == NOTHING_READ.keys() | {"absent", "unusable"}


def test_one_without_parameters_whose_blocks_are_lent_is_one_answer() -> None:
    live = said_by(local_prefill(), lease_row("held"))
    answer = the_answer(lent(LENT[:2]), live)
    assert answer.kind == NO_PARAMETERS
    assert any("the router has lost the parameters" in fact for fact in answer.facts)
    assert [line.side for line in answer.happened] == ["P", "P"]


def test_one_without_parameters_says_which_prefill_engine_gives_none() -> None:
    """Because it drains: the router has lost nothing. Not where the blocks were lent: then it has."""
    live = said_by(local_prefill(), leaving=("P",))
    assert "P drains" in the_answer([], live).cause
    assert "P drains" not in the_answer(lent(LENT[:2]), live).cause
    assert "P drains" in explain_nothing("abc", Live(leaving=("P",)), ["P at h:1"])


def test_a_prefill_engine_that_is_not_asked_to_lend() -> None:
    live = said_by(engine_row("D", role="kv_producer"), local_prefill())
    answer = the_answer([], live)
    assert "P, which did not lend" in answer.cause
    assert "do_remote_decode" in answer.advice


@pytest.mark.parametrize(
    ("steps", "rows", "word", "outcome"),
    [
        (LENT[:1], (lease_row("computing"),), "computes its prompt", "waiting"),
        (LENT[:2], (lease_row("held"),), "no decode engine is known to read them", "waiting"),
        (LENT[:2], (lease_row("held", (holder("other-d"),)),), "for other-d, ", "waiting"),
        (LENT[:2], (lease_row("held", (holder("d", address="::5"),)),), "for d at ::5, ", "waiting"),
        (LENT[:2], (lease_row("held", (GONE,)),), "for d at ::5, not connected any more, ", "waiting"),
        (EXPIRED, (), "LeaseExpired: ", "failed"),
        (LENT, (), "its own records were not found", "served"),
        ((LENT[0], ("computing", "Withdrawn", "withdrawn")), (), "without lending", "failed"),
        ((*LENT[:2], ("held", "Superseded", "superseded")), (), "used the request id again", "failed"),
    ],
)  # fmt: skip
def test_a_lease_of_which_no_decode_engine_knows(
    steps: tuple[Step, ...], rows: tuple[Any, ...], word: str, outcome: str
) -> None:
    answer = the_answer(lent(steps), said_by(*rows))
    assert word in answer.cause
    assert (answer.outcome, answer.side) == (outcome, "P")
    assert answer.since_wall == len(steps) - 1


def test_nobody_is_told_to_ask_the_holder_of_a_lease_where_an_engine_was_asked_and_is_silent() -> None:
    """It may be that one: which engine has an address is known of those alone that answer."""
    held = lease_row("held", (HolderRow(engine_id="other-d", ranks=1, released=(), released_count=0),))

    def advice(engine_id: str | None) -> str:
        silent = Silent(address="d:5600", engine_id=engine_id, kind="HandshakeTimeout", problem="no answer within 2 s")
        return the_answer(lent(LENT[:2]), said_by(held, silent=(silent,))).advice

    for engine_id in (None, "other-d"):
        assert "see why d:5600 could not be asked: if that is other-d, has it ended, or does it hang?" in advice(
            engine_id
        )
    assert "ask those decode engines too" in advice("another")


def test_nobody_is_sent_to_the_router_for_a_prompt_that_is_still_computed() -> None:
    """It sends the request to a decode engine when it has P's answer, and not before."""
    computing, held = (
        the_answer(lent(LENT[:count]), said_by(lease_row(state))) for count, state in ((1, "computing"), (2, "held"))
    )
    assert "whether the router sent it" not in computing.advice
    assert "whether the router sent it" in held.advice


def test_a_lease_that_one_rank_has_not_been_told_the_end_of_is_not_said_to_be_done() -> None:
    """Its blocks on the other one were kept for all of the lease."""
    for ranks in ((LENT, EXPIRED), (EXPIRED, LENT)):
        found = [each for rank, steps in enumerate(ranks) for each in lent(steps, rank=rank)]
        answer = the_answer(found)
        assert (answer.kind, answer.rank) == ("LeaseExpired", ranks.index(EXPIRED))
    open_one = [*lent(LENT, rank=0), *lent(LENT[:2], rank=1)]
    assert the_answer(open_one).state == "held"


def test_a_lease_that_expired_says_who_held_it() -> None:
    *before, last = lent(EXPIRED)
    held = "held by other-d (0 of 1 ranks are done)"
    answer = the_answer([*before, msgspec.structs.replace(last, detail=held)])
    assert answer.cause.endswith(f"not released: {held}")


HELD_UNREAD: tuple[Step, ...] = (
    (None, "Created", "wanted"),
    ("wanted", "HeldByPeer", "held"),
    ("held", "Unwanted", "releasing"),
    ("releasing", "ReleaseConfirmed", "released"),
)


def held(steps: tuple[Step, ...] = HELD_UNREAD, engine_id: str = "D") -> list[TransitionRecord]:
    return records("hold", engine_id, f"{P_NAME}/0", steps, peer="P", remote_request_id=P_NAME, at=1.5)


@pytest.mark.parametrize("steps", [HELD_UNREAD, HELD_UNREAD[:3]], ids=["released", "not confirmed yet"])
def test_a_lease_that_a_decode_engine_let_go_of_without_a_read_is_not_said_to_be_loaded(
    steps: tuple[Step, ...],
) -> None:
    """As of a request whose client leaves while it is in vLLM's queue, of which D records nothing else."""
    answer = the_answer([*lent(), *held(steps)])
    assert answer.cause.startswith("NotRead: decode engine D ")
    assert (answer.kind, answer.outcome, answer.side) == ("NotRead", "not_read", "P")
    assert "hold releasing, by Unwanted" in [line.what for line in answer.happened]
    assert answer.advice == WHAT_TO_DO["NotRead"]


def test_where_the_beginning_of_its_hold_was_overwritten_nobody_knows_whether_it_was_read() -> None:
    assert the_answer([*lent(), *held()[2:]]).outcome == "served"
    assert the_answer([*lent(), *held(HELD_UNREAD[:2], "E"), *held()]).outcome == "served"


# --- an answer that is lent back --------------------------------------------------------------------------------------


def lent_back(last: str, **fields: Any) -> list[TransitionRecord]:
    """The lease of D's own answer, under the id that its request has there."""
    steps: tuple[Step, ...] = (LENT[0], LENT[1], ("held", "X", last))
    _, granted, *ended = records("lease", "D", D_NAME, steps, at=5, **fields)
    unread = [msgspec.structs.replace(each, reason=lease.LENT_BACK) for each in ended if last != "done"]
    return [_, msgspec.structs.replace(granted, reason=lease.LENT_BACK), *(unread or ended)]


def kept_row(holders: tuple[HolderRow, ...] = ()) -> Said[LeaseRow]:
    named = msgspec.structs.replace(lease_row("held", holders).row, request_id=D_NAME, is_lent_back=True)
    return Said("D", 0, named)


@pytest.mark.parametrize(
    ("kept", "rows", "fact"),
    [
        (lent_back("held"), (kept_row(),), "D keeps its blocks for read-back, for 9 s more; nobody has asked for them"),
        ([], (kept_row((holder("P"),)),), "; P has asked for"),
        (lent_back("held")[:2], (), "D keeps its blocks for read-back"),
        (lent_back("expired"), (), "D kept its blocks for read-back, and nobody has read them"),
        (lent_back("done"), (), "D kept its blocks for read-back, until that lease was done"),
    ],
)
@pytest.mark.parametrize("of_p", [lent(), []], ids=["P is asked", "P is not"])
def test_an_answer_that_is_lent_back_is_one_case_with_its_request(
    kept: list[TransitionRecord], rows: tuple[Any, ...], fact: str, of_p: list[TransitionRecord]
) -> None:
    answer = the_answer([*of_p, *pulled(), *kept], said_by(*rows))
    assert (answer.outcome, answer.side, answer.state) == ("served", "D", "done")
    assert answer.cause.startswith("Done: its KV was loaded")
    assert len([each for each in answer.facts if fact in each]) == 1
    assert not any("expired" in each for each in answer.facts)


@pytest.mark.parametrize("last", ["held", "expired"])
def test_an_answer_that_is_lent_back_and_whose_request_is_forgotten_has_not_failed(last: str) -> None:
    answer = the_answer(lent_back(last), said_by(*([kept_row()] if last == "held" else [])))
    assert (answer.outcome, answer.side, answer.kind) == ("served", "D", None)
    assert "for read-back" in answer.cause
    assert {line.side for line in answer.happened} == {"D"}


def test_what_an_engine_lends_after_it_has_read_back_is_not_taken_for_lent_back() -> None:
    """Of the next turn: P reads the answer before, and lends what it computed under the same id."""
    read = records("request", "P", P_NAME, PULLED, peer="D", remote_request_id="cmpl-before-0-d")
    found = find("abc", [*read, *lent(EXPIRED)], Live())
    assert sorted(explain(case, Live()).outcome for case in found) == ["failed", "served"]


# --- what happened, and which request is meant ------------------------------------------------------------------------


def test_both_sides_are_one_order_with_offsets() -> None:
    found = [*lent(), *pulled(at=1.25)]
    answer = the_answer(found)
    assert answer.cause.startswith("Done")
    assert answer.since_wall == 4.25
    assert [line.wall - line.offset_seconds for line in answer.happened] == [0.0] * 6
    assert [(line.side, line.offset_seconds) for line in answer.happened] == [
        ("P", 0.0),
        ("P", 1.0),
        ("D", 1.25),
        ("P", 2.0),
        ("D", 2.25),
        ("D", 4.25),
    ]


@pytest.mark.parametrize("ahead_seconds", [3600.0, -3600.0])
def test_traces_of_machines_whose_clocks_differ_are_told_in_one_order(ahead_seconds: float) -> None:
    asked = ("held", "Held", "held")
    whole = [*lent((*LENT[:2], asked, asked, LENT[2])), *held(), *pulled(at=1.5)]
    assert brought_together(whole) == (whole, {})
    apart = [msgspec.structs.replace(each, wall=each.wall + ahead_seconds * (each.engine_id == "D")) for each in whole]
    together, shifts = brought_together(apart)
    answer = the_answer(together, Live(shifts=shifts))
    offsets = {f"{line.side} {line.what}": line.offset_seconds for line in answer.happened}
    for before, after in (
        ("P lease held, by Granted", "D hold held, by HeldByPeer"),
        ("D hold releasing, by Unwanted", "P lease done, by ReaderDone"),
        ("P lease done, by ReaderDone", "D hold released, by ReleaseConfirmed"),
    ):
        assert offsets[before] <= offsets[after] + 1e-6, offsets
    assert answer.happened[-1].offset_seconds < 10
    ((engine_id, rank),) = shifts
    assert f"the clock of {engine_id} rank {rank} was moved by" in answer.facts[-1]


def test_what_one_moment_saw_is_told_in_the_order_in_which_it_happened() -> None:
    """Also where the times of day of its records were worked out one after the other, the newest first."""
    created, failed = pulled(FAILED, reason="WrongPrompt", detail="another prompt")
    failed = msgspec.structs.replace(failed, mono_ns=created.mono_ns, wall=created.wall - 1e-6)
    assert [line.what for line in the_answer([created, failed]).happened] == [
        "request pending_handshake, by Created (WrongPrompt)",
        "request failed, by PeerFailed (WrongPrompt)",
    ]


def queued(found: list[TransitionRecord], seconds: float) -> list[TransitionRecord]:
    """The same, after a wait in vLLM's queue."""
    first, *others = found
    return [msgspec.structs.replace(first, age_seconds=seconds), *others]


def test_the_wait_in_the_queue_of_vllm_is_part_of_the_time() -> None:
    answer = the_answer(queued(pulled(at=20.0), 12.8))
    assert answer.cause == "Done: its KV was loaded in 15.8 s, 12.8 s of them in vLLM's queue on D"
    assert [(line.offset_seconds, line.what) for line in answer.happened][:2] == [
        (0.0, "request in vLLM's queue"),
        (12.8, "request pending_handshake, by Created"),
    ]
    assert the_answer(queued(pulled(), 0.02)).cause == "Done: its KV was loaded in 3.02 s"
    assert the_answer(pulled()).cause == "Done: its KV was loaded in 3 s"


def test_of_ranks_that_have_loaded_it_the_slowest_counts() -> None:
    found = [*queued(pulled(rank=0), 0.5), *queued(pulled(rank=1), 2.0)]
    assert the_answer(found).cause == "Done: its KV was loaded in 5 s, 2 s of them in vLLM's queue on D"


def test_one_that_failed_or_waits_says_how_long_it_was_in_the_queue() -> None:
    word = "it was 12.8 s in vLLM's queue on D"
    failed = the_answer(queued(ended_with(failures.ConnectionRefused(peer="P")), 12.8))
    assert any(word in fact for fact in failed.facts)
    assert any(word in fact for fact in the_answer(queued(pulled(PULLED[:2]), 12.8)).facts)
    live = said_by(row("reading"))
    assert any(word in fact for fact in the_answer(queued(pulled(PULLED[:2]), 12.8), live).facts)


def test_ranks_that_went_the_same_way_are_one_line_and_the_one_that_failed_decides() -> None:
    found = [*pulled(rank=0), *pulled(rank=1)]
    assert all(line.what.endswith("(2 ranks)") for line in the_answer(found).happened)
    failed = [
        TransitionRecord(**({name: getattr(each, name) for name in each.__struct_fields__} | {"rank": 1}))
        for each in ended_with(failures.ConnectionRefused(peer="P"))
    ]
    assert the_answer([*pulled(rank=0), *failed]).kind == "ConnectionRefused"


def test_of_several_ranks_that_wait_the_one_that_failed_decides_then_the_one_that_waits_longest() -> None:
    ranks = [row("reading", since_seconds=1.0), row("proving", since_seconds=9.0)]
    live = said_by(*(each._replace(rank=number) for number, each in enumerate(ranks)))
    assert the_answer([], live).state == "proving"
    failed = row("draining", since_seconds=0.5, failure="DeadlineExceeded", detail="too long")._replace(rank=2)
    assert the_answer([], said_by(*live.of(RequestRow), failed)).state == "draining"


def test_where_one_rank_has_failed_that_is_the_cause_although_another_still_waits() -> None:
    """vLLM waits for all of them."""
    found = [msgspec.structs.replace(each, rank=1) for each in ended_with(LEASE_OVER)]
    live = said_by(engine_row("D", load_failure_policy="fail"), row("reading"))
    answer = the_answer([*pulled(PULLED[:2]), *found], live)
    assert answer.cause.startswith("LeaseOver: ")
    assert (answer.kind, answer.outcome, answer.rank) == ("LeaseOver", "waiting", 1)
    assert "vLLM waits for the other ranks of D too: rank 0 is reading" in answer.facts
    assert answer.next.startswith("when all ranks have ended: ")
    loaded = [msgspec.structs.replace(each, rank=1) for each in pulled()]
    assert the_answer([*pulled(PULLED[:2]), *loaded], live).state == "reading"


@pytest.mark.parametrize("ended", [pulled(), ended_with(LEASE_OVER)], ids=["done", "failed"])
def test_where_one_rank_has_ended_and_the_records_of_another_were_overwritten_it_is_one_request(
    ended: list[TransitionRecord],
) -> None:
    """As of one that has waited for long, on an engine that is busy; the ends of those that fail are kept longest."""
    answer = the_answer(ended, said_by(Said("D", 1, row("reading", since_seconds=500.0).row)))
    assert answer.outcome == "waiting"


def test_one_whose_id_comes_again_is_not_the_one_that_ended() -> None:
    (ended, lives) = find("abc", pulled(), said_by(row("reading", lease_number=2)))
    assert (ended.requests, len(lives.requests)) == ([], 1)
    (ended, lives) = find("abc", pulled(), said_by(row("reading")))
    assert (ended.requests, len(lives.requests)) == ([], 1)


def test_one_that_was_read_and_could_not_be_finished_has_failed() -> None:
    failure = failures.DeviceMemoryExhausted(error="CUDA out of memory")
    *before, last = pulled()
    found = [*before, msgspec.structs.replace(last, reason=failure.kind, detail=str(failure))]
    answer = the_answer(found)
    assert answer.cause.startswith("DeviceMemoryExhausted: its KV has arrived")
    assert (answer.kind, answer.outcome, answer.advice) == (failure.kind, "failed", WHAT_TO_DO[failure.kind])
    other_rank = [msgspec.structs.replace(each, rank=1) for each in pulled()]
    assert the_answer([*found, *other_rank]).kind == failure.kind


def test_one_that_lives_is_told_with_its_records() -> None:
    live = said_by(row("reading"), lease_row("held"))
    answer = the_answer([*lent(LENT[:2]), *pulled(PULLED[:2])], live)
    assert answer.outcome == "waiting"
    assert len(answer.happened) == 4
    assert any("its lease is held" in fact for fact in answer.facts)


def test_a_queued_one_is_one_case_with_its_lease() -> None:
    live = said_by(row("queued"), lease_row("held"))
    (case,) = find("abc", lent(LENT[:2]), live)
    assert len(case.leases) == 1
    assert case.name == D_NAME


@pytest.mark.parametrize("number", [0, 1])
def test_a_lease_whose_id_on_p_is_another_is_that_of_the_request_also_without_its_number(number: int) -> None:
    on_p = Said("P", 0, msgspec.structs.replace(lease_row("held").row, request_id="other"))
    waits = row("reading", remote_request_id="other", lease_number=number)
    (case,) = find("abc", [], said_by(waits, on_p))
    assert case.leases == [on_p]
    twice = Said("P", 0, msgspec.structs.replace(on_p.row, lease_number=2))
    (case,) = find("abc", [], said_by(waits, on_p, twice))
    assert case.leases == [on_p] * number


def test_a_lease_belongs_to_the_request_whose_parameters_name_it_wrongly() -> None:
    """Another engine, or parameters that make no sense: what the client calls it is the same on both sides."""
    wrong = pulled(FAILED, peer="another", reason="ConnectionRefused", detail="nothing listens")
    senseless = pulled(FAILED, peer=None, remote_request_id=None, lease_number=0, reason="BadParams", detail="bad")
    for each in (wrong, senseless):
        (case,) = find("abc", [*lent(LENT[:2]), *each], said_by(lease_row("held")))
        assert len(case.story.leases) == 1
        assert len(case.leases) == 1
        assert explain(case, Live()).outcome == "failed"


def test_several_that_match_are_all_found() -> None:
    other = records("request", "D", "cmpl-abd-0-d", PULLED, peer="P", remote_request_id="cmpl-abd-0-p", at=10)
    assert [case.name for case in find("ab", [*other, *pulled()], Live())] == [D_NAME, "cmpl-abd-0-d"]
    assert find("xyz", [*other, *pulled()], Live()) == []


def test_an_id_that_begins_another_one_names_its_own_request() -> None:
    """By the client's id, by D's, by P's, and where the other one still lives; a part of both names both."""
    other = records("request", "D", "cmpl-abcd-0-d", FAILED, peer="P", remote_request_id="cmpl-abcd-0-p", at=10)
    prefix = records("request", "D", f"{D_NAME}d", FAILED, peer="P", remote_request_id=f"{P_NAME}p", at=20)
    live = said_by(
        row("queued", request_id="cmpl-abcde-0-d", remote_request_id="cmpl-abcde-0-p"),
        lease_row("held"),
        local_prefill("cmpl-abc-0-dx"),
    )
    everything = [*other, *prefix, *lent(LENT[:2]), *pulled()]
    for text in (D_NAME, P_NAME):
        assert [case.name for case in find(text, everything, live)] == [D_NAME], text
    for text in ("abcd", "abcd-0", "cmpl-abcd-0-d", "cmpl-abcd-0-p"):
        assert [case.name for case in find(text, everything, live)] == ["cmpl-abcd-0-d"], text
    assert [case.name for case in find("abcde", everything, live)] == ["cmpl-abcde-0-d"]
    assert len(find("ab", everything, live)) == 5


def test_nothing_found_says_what_was_looked_at() -> None:
    silent = Silent(address="h:1", engine_id=None, kind="ConnectionRefused", problem="nothing listens there")
    said = explain_nothing("abc", said_by(engine_row("D"), silent=(silent,)), ["D at h:2"])
    queues = ("waits in vLLM's queue, on a prefill engine", "on D with parameters that will be refused")
    for word in ("'abc'", "D at h:2", "40 s", "h:1", "nothing listens there", "never sent it", *queues):
        assert word in said
    assert "--trace" not in said


def test_nothing_found_in_a_large_fleet_says_in_one_line_who_could_not_be_asked_and_what_that_may_mean() -> None:
    silent = [Silent(address=f"d{number}:5600", engine_id=None, kind="", problem="it hangs") for number in range(30)]
    looked_at = [f"{'d' * 36}{number} at 10.0.0.{number}:5600" for number in range(250)]
    said = plain(explain_nothing("abc", said_by(engine_row("D"), silent=tuple(silent)), looked_at))
    for words in ("and 242 more", "d0:5600 could not be asked: it hangs", "Nor could 22 more", "D had it cached"):
        assert words in said


def test_a_case_without_anything_has_no_name() -> None:
    assert Case().name == ""
