"""The scheduler side under vLLM's own scheduler: names of leases, what becomes of pulls, an engine that has stopped.

Which blocks travel is in `test_cache_groups`, failed loads are in `test_load_failures`.
"""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.pooling_params import PoolingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from connector.clock import NS_PER_SECOND
from connector.observe import catalogue
from connector.observe.stats import COUNTS, GAUGES
from connector.ports.side_channel import SideChannelError
from connector.protocol import (
    LOCAL_PREFILLS_NAMED_MAX,
    AbortPull,
    Command,
    LeaseComputing,
    LeaseGranted,
    LeaseWithdrawn,
    LocalPrefillsSeen,
    RejectPull,
    ReleaseUnread,
    StartPull,
    TrackLease,
)
from connector.scheduler.connector_scheduler import ConnectorScheduler
from connector.scheduler.prefix_digest import prompt_digests
from connector.step_metadata import StepMetadata, WorkerReport
from connector.wire.bounded import NUMBER_MAX
from statemachine import draining
from statemachine.draining import Draining, State
from statemachine.failures import Failure
from statemachine.load import State as LoadState
from tests.unit.hybrid_engine import BLOCK_TOKENS, MAX_MODEL_TOKENS, HybridEngine, full
from tests.unit.log_lines import listening
from tests.unit.vllm_setup import block_hasher, scheduling_config

TOKENS = list(range(40))
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
STOPPED = KVConnectorOutput(kv_connector_worker_meta=WorkerReport(stopped="its actors died"))


def side(engine: HybridEngine) -> ConnectorScheduler:
    connector = engine.scheduler.connector
    assert connector is not None
    found: ConnectorScheduler = connector._scheduler
    return found


def of_type(engine: HybridEngine, *kinds: type[Command]) -> list[type]:
    return [type(each) for each in engine.commands if isinstance(each, kinds)]


def free_blocks(engine: HybridEngine) -> int:
    count: int = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return count


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


# --- names of leases --------------------------------------------------------------------------------------------------


def test_a_restarted_engine_repeats_no_number_of_its_former_life() -> None:
    """The peers of the former life may still hold and release its leases."""
    numbers: set[int] = set()
    for _ in range(3):
        engine = HybridEngine([full()], engine_id="same")
        for name in ("a", "b"):
            engine.prefill(name, TOKENS)
        first, second = (engine.params[name]["lease_number"] for name in ("a", "b"))
        assert 0 < first < second < NUMBER_MAX
        numbers |= {first, second}
    assert len(numbers) == 6


def test_the_answer_of_a_prefill_names_the_lease_and_no_clock() -> None:
    engine = HybridEngine([full()])
    engine.prefill("a", TOKENS)
    params = engine.params["a"]
    assert (params["remote_request_id"], params["lease_number"]) == engine.grant_of("a").lease
    assert not {"lease_expires_at", "incarnation"} & params.keys()
    assert params["remote_blocks_expiry_time"] is None


@pytest.mark.parametrize(
    ("variable", "told"),
    [("0.0.0.0", "192.0.2.7"), ("::", "192.0.2.7"), ("*", "192.0.2.7"), ("192.0.2.8", "192.0.2.8")],
)
def test_the_answer_of_a_prefill_names_an_address_to_connect_to(
    monkeypatch: pytest.MonkeyPatch, variable: str, told: str
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", variable)
    monkeypatch.setattr("connector.own_address.get_ip", lambda: "192.0.2.7")
    engine = HybridEngine([full()])
    engine.prefill("a", TOKENS)
    assert engine.params["a"]["remote_host"] == told


def test_an_engine_names_a_variable_that_is_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_ACTOR_TRACE_DIRECTORY", "/traces")
    with listening() as lines:
        HybridEngine([full()])
    (said,) = [each for each in lines.texts if "NIXL_ACTOR_TRACE_DIRECTORY" in each]
    assert "there are NIXL_ACTOR_TRACE_DIR, " in said


@pytest.mark.parametrize(("found", "is_said"), [("192.0.2.7", False), ("0.0.0.0", True)])
def test_an_engine_that_has_no_address_to_tell_says_so(
    monkeypatch: pytest.MonkeyPatch, found: str, is_said: bool
) -> None:
    """vLLM finds its machine's address by the route to the outside. Others that are told 0.0.0.0 reach themselves."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "0.0.0.0")
    monkeypatch.setattr("connector.own_address.get_ip", lambda: found)
    with listening() as lines:
        HybridEngine([full()])
    assert any("set VLLM_HOST_IP" in text for text in lines.texts) is is_said


# --- steps ------------------------------------------------------------------------------------------------------------


def steps_that_end_a_prompt_to_lend(engine: HybridEngine, name: str) -> list[bool]:
    """For each step until the request has finished."""
    ends = []
    while name not in engine.finished:
        output = engine.schedule()
        assert isinstance(output.kv_connector_metadata, StepMetadata)
        ends.append(output.kv_connector_metadata.ends_prompt_to_lend)
        engine.compute(output)
    return ends


def test_the_worker_is_told_of_steps_with_which_a_prompt_to_lend_may_end() -> None:
    """It waits for what these write late, before anybody learns of the blocks; and for no other."""
    engine = HybridEngine([full()], batch_tokens=16, caches_prefixes=False)
    chunks = -(-len(TOKENS) // 16)
    engine.submit("own", TOKENS, None)
    assert steps_that_end_a_prompt_to_lend(engine, "own") == [False] * chunks
    engine.submit("lent", TOKENS, REMOTE_DECODE)
    assert steps_that_end_a_prompt_to_lend(engine, "lent") == [False] * (chunks - 1) + [True]
    assert not engine.schedule().kv_connector_metadata.ends_prompt_to_lend  # type: ignore[union-attr]


# --- pulls ------------------------------------------------------------------------------------------------------------


def lent() -> dict[str, Any]:
    prefill = HybridEngine([full()], engine_id="p")
    prefill.prefill("a", TOKENS)
    params: dict[str, Any] = prefill.params["a"]
    return params


def loads_of(engine: HybridEngine) -> dict[str, LoadState]:
    """Of the requests that are not over."""
    return {request_id: load.state for request_id, load in side(engine)._loads._loads.items()}


def test_a_pull_waits_then_loads_and_then_is_an_ordinary_request() -> None:
    decode, params = HybridEngine([full()]), lent()
    decode.submit("a", TOKENS, params, max_tokens=3)
    assert loads_of(decode) == {"a": LoadState.QUEUED}
    decode.step()
    assert loads_of(decode) == {"a": LoadState.LOADING}
    decode.loaded("a")
    assert loads_of(decode) == {}
    for _ in range(4):
        decode.step()
    assert decode.finished["a"] == "length"
    assert decode.computed["a"] == 3, "the prompt was loaded, and its last token is computed to sample from it"
    assert of_type(decode, StartPull, ReleaseUnread, AbortPull, RejectPull) == [StartPull]


@pytest.mark.parametrize(("steps", "expected"), [(0, [ReleaseUnread]), (1, [StartPull, AbortPull])])
def test_a_pull_that_is_aborted_leaves_nothing_behind(steps: int, expected: list[type]) -> None:
    """Before it is scheduled P is told that nothing is read; while it loads the worker is told to stop."""
    decode, params = HybridEngine([full()]), lent()
    decode.submit("a", TOKENS, params)
    for _ in range(steps):
        decode.step()
    decode.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    decode.step()
    assert of_type(decode, StartPull, ReleaseUnread, AbortPull) == expected
    assert loads_of(decode) == {}


def test_bad_parameters_park_the_request_like_good_ones() -> None:
    decode, params = HybridEngine([full()]), lent()
    decode.submit("a", TOKENS, {**params, "remote_port": 0})
    decode.step()
    assert decode.rejection_of("a").failure.field == "remote_port"
    assert loads_of(decode) == {"a": LoadState.LOADING}
    decode.step(KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"}))
    assert decode.finished["a"] == "error"
    assert loads_of(decode) == {}


def test_a_rejected_pull_that_is_aborted_is_logged_with_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker hears of it: its log line is the scheduler's."""
    decode, params = HybridEngine([full()]), lent()
    decode.submit("a", TOKENS, {**params, "remote_port": 0})
    logged: list[tuple[str, Failure]] = []
    monkeypatch.setattr(side(decode)._pulls, "_log_failure", lambda *said: logged.append(said))
    decode.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    ((subject, failure),) = logged
    assert re.fullmatch(r"request a, for which nothing is read, known for \d+\.\d s", subject)
    assert failure.kind == "BadParams"


def test_what_vllm_makes_up_for_a_request_that_has_failed_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same parameters, and an id that neither the client nor nixl-actor knows."""
    decode, params = HybridEngine([full()]), lent()
    logged: list[tuple[str, Failure]] = []
    monkeypatch.setattr(side(decode)._pulls, "_log_failure", lambda *said: logged.append(said))
    decode.submit("9b637cd7da1e655f", [0], {**params, "remote_port": 0}, abort_immediately=True)
    decode.scheduler.finish_requests("9b637cd7da1e655f", RequestStatus.FINISHED_ABORTED)
    assert logged == []


# --- an engine whose workers have stopped -----------------------------------------------------------------------------


LEASE_NS = 30 * NS_PER_SECOND


class Refusals:
    """In place of the listener's thread."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.draining = Draining(lease_ns=LEASE_NS)
        self.totals: dict[str, int] = {}
        self.is_dead = False

    def stop_serving(self, reason: str) -> None:
        self.reasons.append(reason)

    def stop(self) -> None:
        """Nothing runs."""


def test_nothing_is_lent_once_a_worker_has_stopped() -> None:
    engine, listener = HybridEngine([full()], caches_prefixes=False), Refusals()
    side(engine)._listener = listener  # type: ignore[assignment]
    free_before = free_blocks(engine)
    with listening() as log:
        for _ in range(2):
            engine.step(STOPPED)
    engine.run("a", TOKENS, REMOTE_DECODE)
    engine.step()
    assert "a" not in engine.params, "D would read what nobody can read"
    assert free_blocks(engine) == free_before
    assert of_type(engine, LeaseComputing, LeaseGranted, LeaseWithdrawn) == []
    assert listener.reasons == ["its actors died"]
    (line,) = [each.getMessage() for each in log.records if each.levelno == logging.CRITICAL]
    assert "its actors died" in line


def test_what_is_computing_when_a_worker_stops_is_not_lent_either() -> None:
    """Other ranks of this engine live on and are told."""
    engine = HybridEngine([full()], batch_tokens=16, caches_prefixes=False)
    free_before = free_blocks(engine)
    engine.submit("a", TOKENS, REMOTE_DECODE)
    engine.step()
    engine.step(STOPPED)
    for _ in range(4):
        engine.step()
    assert engine.finished["a"] == "length"
    assert "a" not in engine.params
    assert of_type(engine, LeaseComputing, LeaseGranted, LeaseWithdrawn) == [LeaseComputing, LeaseWithdrawn]
    assert free_blocks(engine) == free_before


def test_what_was_lent_before_stays_so_until_the_workers_give_it_back() -> None:
    engine = HybridEngine([full()], caches_prefixes=False)
    free_before = free_blocks(engine)
    engine.prefill("a", TOKENS)
    engine.step(STOPPED)
    assert free_blocks(engine) < free_before
    engine.step(KVConnectorOutput(finished_sending={"a"}))
    assert free_blocks(engine) == free_before


def test_requests_that_nobody_reads_are_served_as_ever_when_a_worker_has_stopped() -> None:
    engine = HybridEngine([full()])
    engine.step(STOPPED)
    engine.run("a", TOKENS, None, max_tokens=3)
    assert engine.finished["a"] == "length"


def is_up(engine: HybridEngine) -> bool:
    """What the gauge shows after the engine's last step."""
    figures = side(engine)._figures
    return bool(figures._gauges(*figures._shown)[catalogue.UP.key()])


@pytest.mark.parametrize("worker_stops", [False, True])
def test_the_gauge_of_an_engine_whose_listener_has_died_is_0(worker_stops: bool) -> None:
    engine = HybridEngine([full()], caches_prefixes=False)
    side(engine)._listener = Refusals()  # type: ignore[assignment]
    engine.step()
    assert is_up(engine)
    side(engine)._note_listener_death("the handshake listener died: RuntimeError()")
    engine.run("a", TOKENS, REMOTE_DECODE)
    assert "a" not in engine.params
    assert not is_up(engine)
    if worker_stops:
        engine.step(STOPPED)
        assert not is_up(engine)


def test_the_gauges_have_the_blocks_of_the_pool_and_for_how_long_the_first_of_the_queue_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode, params = HybridEngine([full()]), lent()
    decode.submit("first", TOKENS, params)
    scheduler = side(decode)
    later = SimpleNamespace(now_ns=lambda: scheduler._clock.now_ns() + 25 * NS_PER_SECOND)
    monkeypatch.setattr(scheduler._figures, "_clock", later)
    stats = scheduler.take_stats()
    assert stats is not None
    pool = decode.scheduler.kv_cache_manager.block_pool
    gauges = stats.data[GAUGES]
    assert (gauges["oldest_queued_seconds"], gauges["kv_blocks"]) == (20, pool.num_gpu_blocks)
    decode.step()
    stats = scheduler.take_stats()
    assert stats is None or stats.data[GAUGES]["oldest_queued_seconds"] == 0


def test_what_crashes_beside_the_listener_is_counted_with_the_next_step() -> None:
    engine, listener = HybridEngine([full()], caches_prefixes=False), Refusals()
    side(engine)._listener = listener  # type: ignore[assignment]
    side(engine).take_stats()
    listener.totals = {catalogue.CRASHES.key(): 2}
    stats = side(engine).take_stats()
    assert stats is not None
    assert stats.data[COUNTS] == {"crashes": 2}


# --- requests without parameters --------------------------------------------------------------------------------------


def local_prefills(engine: HybridEngine) -> list[LocalPrefillsSeen]:
    return [each for each in engine.commands if isinstance(each, LocalPrefillsSeen)]


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"remote_host": "h"}])
def test_the_workers_are_told_of_a_request_without_usable_parameters(params: dict[str, Any] | None) -> None:
    engine = HybridEngine([full()])
    engine.run("a", TOKENS, params)
    (seen,) = local_prefills(engine)
    (named,) = seen.named
    assert (seen.count, named.request_id, named.tokens) == (1, "a", len(TOKENS))
    assert named.reason == ("unusable" if params else "absent")


def test_requests_that_are_lent_read_or_malformed_are_none_of_these() -> None:
    engine = HybridEngine([full()])
    engine.prefill("lent", TOKENS)
    engine.load("read", TOKENS, lent())
    engine.submit("malformed", TOKENS, lent() | {"remote_port": "x"})
    engine.step()
    assert local_prefills(engine) == []


def test_nor_is_one_for_an_embedding() -> None:
    engine = HybridEngine([full()])
    pooled = Request(
        request_id="embedding",
        prompt_token_ids=list(TOKENS),
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
        block_hasher=block_hasher(engine.match_tokens),
    )
    engine.scheduler.add_request(pooled)
    engine.schedule()
    assert local_prefills(engine) == []


def test_many_of_one_step_are_one_command_that_names_some() -> None:
    engine = HybridEngine([full()])
    for number in range(3 * LOCAL_PREFILLS_NAMED_MAX):
        engine.submit(f"r{number}", TOKENS, None)
    engine.step()
    engine.step()
    (seen,) = local_prefills(engine)
    assert seen.count == 3 * LOCAL_PREFILLS_NAMED_MAX
    assert [each.request_id for each in seen.named] == [f"r{number}" for number in range(LOCAL_PREFILLS_NAMED_MAX)]


# --- an engine that is to end -----------------------------------------------------------------------------------------


def drain(engine: HybridEngine, state: State = State.DRAINING, *, left_seconds: float = 60.0) -> Refusals:
    """`left_seconds`: of the grace period."""
    listener = Refusals()
    now_ns = side(engine)._clock.now_ns()
    ends_ns = now_ns + round(left_seconds * NS_PER_SECOND)
    listener.draining = Draining(lease_ns=LEASE_NS, state=state, began_ns=now_ns, ends_ns=ends_ns)
    side(engine)._listener = listener  # type: ignore[assignment]
    return listener


def not_lent(engine: HybridEngine, reason: str = catalogue.DRAINING_REASON) -> int:
    counts = side(engine)._figures._next.data[COUNTS]
    count: int = counts.get(catalogue.PREFILLS_NOT_LENT.key(reason), 0)
    return count


def test_a_prefill_that_comes_while_the_engine_drains_is_answered_without_parameters() -> None:
    """Its client is served by D, which computes the prompt."""
    engine = HybridEngine([full()], caches_prefixes=False)
    free_before = free_blocks(engine)
    drain(engine)
    engine.submit("a", TOKENS, REMOTE_DECODE)
    assert not_lent(engine) == 1
    for _ in range(2):
        engine.step()
    assert engine.finished["a"] == "length"
    assert "a" not in engine.params
    assert of_type(engine, LeaseComputing, LeaseGranted, LeaseWithdrawn) == []
    assert free_blocks(engine) == free_before
    assert side(engine)._lends.counts() == (0, 1, 0)


@pytest.mark.parametrize("name", ["a" * 513, "caf\xc3\x89"], ids=["too long", "UTF-8 in a header"])
def test_a_prefill_whose_id_no_engine_takes_is_answered_without_parameters(name: str) -> None:
    """D would refuse its parameters; so it computes the prompt. vLLM reads the bytes of a header as Latin-1."""
    engine = HybridEngine([full()], caches_prefixes=False)
    free_before = free_blocks(engine)
    with listening() as lines:
        engine.submit(name, TOKENS, REMOTE_DECODE)
        assert not_lent(engine, catalogue.REQUEST_ID_REASON) == 1
    for _ in range(2):
        engine.step()
    assert engine.finished[name] == "length"
    assert name not in engine.params
    assert of_type(engine, LeaseComputing, LeaseGranted, LeaseWithdrawn) == []
    assert free_blocks(engine) == free_before
    assert side(engine)._lends.counts() == (0, 0, 0), "it counts for no drain"
    (line,) = [each for each in lines.texts if "X-Request-Id" in each]
    assert "answered without kv_transfer_params" in line


@pytest.mark.parametrize("steps", [0, 1])
def test_a_prefill_that_was_accepted_before_is_lent(steps: int) -> None:
    """It is queued, or half computed."""
    engine = HybridEngine([full()], batch_tokens=16, caches_prefixes=False)
    engine.submit("a", TOKENS, REMOTE_DECODE)
    for _ in range(steps):
        engine.step()
    drain(engine)
    assert side(engine)._lends.counts() == (1, 0, 0)
    for _ in range(4):
        engine.step()
    assert engine.params["a"]["remote_request_id"] == "a"
    assert of_type(engine, LeaseComputing, LeaseGranted, LeaseWithdrawn) == [LeaseComputing, LeaseGranted]
    assert side(engine)._lends.counts() == (1, 0, 0), "until vLLM has freed its blocks"
    engine.step(KVConnectorOutput(finished_sending={"a"}))
    assert side(engine)._lends.counts() == (0, 0, 0)


def test_a_prefill_that_is_being_lent_is_counted_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener's thread counts while its parameters are made. An engine that is found drained once stays so."""
    engine = HybridEngine([full()], caches_prefixes=False)
    seen = []

    def digests(*args: Any) -> Any:
        seen.append(side(engine)._lends.counts().lent)
        return prompt_digests(*args)

    monkeypatch.setattr("connector.scheduler.lends.prompt_digests", digests)
    engine.prefill("a", TOKENS)
    assert seen == [1]
    assert side(engine)._lends.counts() == (1, 0, 0)


def test_requests_whose_answers_the_engine_writes_are_counted_until_they_end() -> None:
    """Draining does not wait for them, and says so. Prompts that it computes for a decode engine are none of them."""
    engine = HybridEngine([full()], caches_prefixes=False)
    engine.submit("answered", TOKENS, None, max_tokens=2)
    engine.submit("aborted in the queue", TOKENS, None)
    engine.submit("lent", TOKENS, REMOTE_DECODE)
    assert side(engine)._lends.counts() == (1, 0, 2)
    engine.scheduler.finish_requests("aborted in the queue", RequestStatus.FINISHED_ABORTED)
    assert side(engine)._lends.counts().answering == 1
    for _ in range(2):
        engine.step()
    assert engine.finished["answered"] == "length"
    assert side(engine)._lends.counts() == (1, 0, 0)


def test_an_answer_that_would_be_lent_back_is_waited_for_no_more_than_others() -> None:
    """Its blocks are not lent when it ends: the engine drains."""
    options = {"bidirectional_kv_xfer": True}
    prefill, decode = (HybridEngine([full()], engine_id=name, options=options) for name in ("p", "d"))
    prefill.prefill("a", TOKENS)
    decode.load("a", TOKENS, prefill.params["a"], max_tokens=4)
    decode.loaded("a")
    decode.step()
    drain(decode)
    assert "a" in side(decode)._lends.computing, "it is computed"
    assert side(decode)._lends.counts() == (0, 0, 1)
    for _ in range(5):
        decode.step()
    assert decode.finished["a"] == "length"
    assert "a" not in decode.params
    assert side(decode)._lends.counts() == (0, 0, 0)
    assert of_type(decode, LeaseComputing, LeaseGranted, LeaseWithdrawn) == [LeaseComputing, LeaseWithdrawn]


def test_nothing_is_granted_whose_lease_would_outlast_the_grace_period() -> None:
    engine = HybridEngine([full()], batch_tokens=16, caches_prefixes=False)
    free_before = free_blocks(engine)
    engine.submit("a", TOKENS, REMOTE_DECODE)
    engine.step()
    drain(engine, left_seconds=29.0)
    for _ in range(4):
        engine.step()
    assert "a" not in engine.params
    assert of_type(engine, LeaseComputing, LeaseGranted, LeaseWithdrawn) == [LeaseComputing, LeaseWithdrawn]
    assert free_blocks(engine) == free_before


def test_vllm_is_kept_going_until_the_engine_has_drained_and_the_gauge_has_shown_it() -> None:
    engine = HybridEngine([full()])
    scheduler = engine.scheduler
    assert not scheduler.has_requests()
    listener = drain(engine)
    assert scheduler.has_requests()
    engine.step()
    gauges = catalogue.DRAINING.key(), catalogue.DRAINED.key()
    figures = side(engine)._figures
    assert [figures._gauges(*figures._shown)[key] for key in gauges] == [1, 0]
    listener.draining, _ = draining.MACHINE.step(
        listener.draining, draining.Counted(now_ns=listener.draining.began_ns, lent=0)
    )
    assert scheduler.has_requests(), "nobody has seen the gauge"
    engine.step()
    assert [figures._gauges(*figures._shown)[key] for key in gauges] == [1, 1]
    assert not scheduler.has_requests()


def test_vllm_is_not_kept_going_by_a_listener_that_never_says_that_it_is_over() -> None:
    engine = HybridEngine([full()])
    listener = drain(engine, left_seconds=-6.0)
    assert not engine.scheduler.has_requests()
    drain(engine)
    assert engine.scheduler.has_requests()
    listener = drain(engine)
    listener.is_dead = True
    assert not engine.scheduler.has_requests()


# --- an engine that is paused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW], ids=["all", "new"])
def test_a_request_that_comes_while_the_engine_is_paused_is_held_on_p(pause: PauseState) -> None:
    """vLLM has nothing to do then, and steps once all the same; after that the pause is complete."""
    params, engine = lent(), HybridEngine([full()])
    engine.scheduler.set_pause_state(pause)
    for name in ("a", "b"):
        engine.submit(name, TOKENS, params)
        assert engine.scheduler.has_requests()
        engine.step()
        assert of_type(engine, TrackLease).count(TrackLease) == 1
        assert not engine.scheduler.has_requests(), "an engine core would spin, and a pause never be complete"
        engine.commands.clear()
    engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert of_type(engine, StartPull, ReleaseUnread, AbortPull) == [ReleaseUnread]
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.step()
    assert not engine.is_released_unread("b")


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_side_channel_that_nobody_could_name_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    """An engine with port 0 would listen somewhere, and tell D to ask at port 0."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", port)
    with pytest.raises(SideChannelError, match=r"VLLM_NIXL_SIDE_CHANNEL_PORT, plus the index .* must be 1 to 65535"):
        HybridEngine([full()])


@pytest.mark.parametrize(("api_servers", "seconds"), [(1, 60), (2, 0), (2, 60)])
def test_an_engine_that_sigterm_does_not_drain_says_so_at_start(
    monkeypatch: pytest.MonkeyPatch, api_servers: int, seconds: int
) -> None:
    config = scheduling_config(BLOCK_TOKENS, MAX_MODEL_TOKENS)
    monkeypatch.setattr(config.parallel_config, "_api_process_count", api_servers)
    monkeypatch.setattr(config, "shutdown_timeout", seconds)
    with listening() as lines:
        HybridEngine([full()])
    said = [each for each in lines.texts if "API servers" in each]
    assert len(said) == (api_servers == 2 and seconds > 0)
