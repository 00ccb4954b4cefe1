"""Mutants of the executors: peer actor, reads, handshake, lease keeper, supervisor, restarts; of the ports; and of what
the scheduler's side makes vLLM do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from connector.observe.trace_writer import TraceWriter
from connector.ports.nixl_agent import RealNixlPort, core, poll_cost
from connector.ports.nixl_agent.core import AgentCore
from connector.ports.nixl_agent.looks import Looks
from connector.ports.nixl_agent.poll_cost import PollCost
from connector.ports.nixl_agent.thread import AgentThread
from connector.ports.zmq_bridge import ZmqRequester
from connector.ports.zmq_bridge.monitor import Monitor
from connector.runtime import connections, effects, handshake, lease_keeper, peer_actor, restarts
from connector.runtime.connections import Connections
from connector.runtime.deferred_commands import DeferredCommands
from connector.runtime.lease_keeper import LeaseKeeper
from connector.runtime.mailbox import Mailbox
from connector.runtime.peer_actor import PeerActor
from connector.runtime.reads import Reads
from connector.runtime.supervisor import Supervisor
from connector.scheduler import kept_blocks, vllm_admission
from connector.scheduler.connector_scheduler import ConnectorScheduler
from connector.worker.actors import WorkerActors
from connector.worker.connector_worker import ConnectorWorker
from connector.worker.ledger import TransferLedger
from statemachine import grant
from statemachine.agents import Agents
from statemachine.loads import Loads
from tests.simulation.faults import Kind
from tests.simulation.mutants.mutant import ByTest, Do, Edit, Mutant, Patch, Seeds, Set, fault

NOT_AN_ERROR_OF_THE_PRODUCT = type("NeverRaised", (Exception,), {})
"""In an `except` clause: nothing is caught."""

READ_ERRORS = (fault(Kind.READ_ERROR, "d0>p0", 0.5, 3.0, 0.3),)
STALLED_READS = (fault(Kind.READ_STALL, "d0>p0", 0.5, 9.0),)
LONG_QUEUE = (fault(Kind.LONG_QUEUE, "d0", 0.0, 6.0),)
ABORTS_OF_A_CROWD = (
    fault(Kind.ABORT, "d0", 0.0, 8.0),
    fault(Kind.READ_SLOW, "d0>p0", 0.0, 8.0),
    *(fault(Kind.LONG_QUEUE, "d0", float(at), 0.95) for at in range(8)),
)
"""So many requests start at once that their READs wait for their turn, and some are aborted meanwhile."""
ACTOR_CRASHES = (fault(Kind.ACTOR_CRASH, "d0", 0.0, 4.0),)
REPLACEMENTS = tuple(fault(Kind.CRASH_NEW_ID, "p0", at, 0.05) for at in (1.0, 1.5, 2.0, 2.5, 3.0))
GARBAGE = (fault(Kind.GARBAGE, "p0", 0.5, 1.0),)
BAD_PARAMS = (fault(Kind.BAD_PARAMS, "d0", 0.0, 4.0),)
WRONG_SIZES = tuple(fault(Kind.WRONG_SIZES, f"d{number}", 0.0, 4.0, 0.5) for number in range(3))
WORKER_STOPS = (fault(Kind.WORKER_STOPS, "p0", 1.0, 0.1),)
REFUSED = (fault(Kind.PREPARE_REFUSED, "d0>p0", 0.0, 1.0),)
COMINGS_AND_GOINGS = "tests/actors/test_comings_and_goings.py"
OF_THE_PROCESS_BEFORE = "test_the_agent_of_the_process_before_is_not_read_while_the_new_one_answers_for_leases"
RESTARTED_AT_MEETINGS = (
    fault(Kind.PORTS_KEPT, "p0", 0.0, 8.0),
    *(fault(Kind.MESSAGE_DELAY, f"d{number}>p0", 0.0, 8.0, 0.5) for number in range(3)),
    *(fault(Kind.CRASH_SAME_ID, "p0", at, 0.05) for at in (0.7, 1.3, 1.9, 2.5, 3.1, 3.7)),
)
"""While P is met it is started again, at the same ports."""
RESTARTED_WHILE_A_READER_STANDS_STILL = (
    fault(Kind.PORTS_KEPT, "p0", 0.0, 8.0),
    fault(Kind.READ_STALL, "d0>p0", 0.0, 0.6),
    fault(Kind.PAUSE, "d0", 0.3, 0.5),
    fault(Kind.CRASH_NEW_ID, "p0", 0.4, 0.1),
    fault(Kind.MESSAGE_DELAY, "p0>d0", 0.39, 1.5),
)
"""P has been met, and UCX of D has not connected yet. D hears late that the links to that P are gone."""
RESETS = (fault(Kind.LINK_RESET, "d0>p0", 0.5, 4.0),)
ERRS_EARLY = (fault(Kind.READ_ERRS_EARLY, "d0>p0", 0.2, 6.0, 0.5),)
FULL_QUARANTINE = (fault(Kind.FULL_QUARANTINE, "d0", 0.5, 4.0, 0.1),)


async def _once(run: Callable[[], Awaitable[None]], log_crash: Callable[[str, BaseException], None]) -> None:
    try:
        await run()
    except Exception as error:
        log_crash("control socket", error)


def _run_once(patch: Patch) -> None:
    keep_running = partial(restarts.keep_running)
    keep_running.once = _once  # type: ignore[attr-defined]
    patch.attribute(lease_keeper, "keep_running", keep_running)


def _lose_commands(patch: Patch) -> None:
    deliver = Supervisor.deliver
    counts: dict[int, int] = {}

    def deliver_most(self: Supervisor, command: Any) -> None:
        counts[id(self)] = counts.get(id(self), 0) + 1
        if counts[id(self)] % 40:
            deliver(self, command)

    patch.attribute(Supervisor, "deliver", deliver_most)


def _lose_messages(patch: Patch) -> None:
    tell = PeerActor.tell
    counts: dict[int, int] = {}

    def tell_most(self: PeerActor, message: Any) -> None:
        counts[id(self)] = counts.get(id(self), 0) + 1
        if counts[id(self)] % 50:
            tell(self, message)

    patch.attribute(PeerActor, "tell", tell_most)


def _one_handshake_at_a_time(patch: Patch) -> None:
    shake_hands = Connections._open
    locks: dict[int, trio.Lock] = {}

    async def in_turn(self: Connections, address: Any) -> None:
        async with locks.setdefault(id(self._context), trio.Lock()):
            await shake_hands(self, address)

    patch.attribute(Connections, "_open", in_turn)


def level2(oracle: str, *faults: Any, first: int = 0) -> Seeds:
    return Seeds(level=2, oracle=oracle, faults=faults, first=first)


# --- the peer actor -------------------------------------------------------------------------------------------------

ACTORS = (
    Mutant(
        name="a request whose time is over is said to wait",
        broken="whoever has stood still says that requests wait for minus so many seconds at most",
        changes=(
            Edit(
                PeerActor._work,
                "if advance:\n",
                "if advance:\n            self._notices.write(self._context.clock.now_ns())\n",
            ),
        ),
        place=ByTest(
            "tests/actors/test_log.py::test_a_request_whose_time_was_over_when_the_process_went_on_is_not_said_to_wait"
        ),
    ),
    Mutant(
        name="post after failure",
        row=4,
        broken="a READ whose request was given up before its turn is posted all the same",
        changes=(
            Edit(PeerActor._carry_out, "self._context.reads.withdraw(self.core.engine_id, request_id)", "pass"),
            Edit(Reads._post, "if order.is_wanted():", "if True:"),
        ),
        place=ByTest(
            "tests/actors/test_in_flight.py::test_reads_whose_turn_has_not_come_are_not_posted_after_a_failure"
        ),
    ),
    Mutant(
        name="links are not listened to again",
        row=31,
        broken="an actor that crashed hears nothing over the control connections that it had",
        changes=(
            Edit(
                Connections.attach,
                "for number, connection in self._by_number.items():",
                "for number, connection in ():",
            ),
        ),
        place=ByTest("tests/actors/test_peers.py::test_actor_that_crashes_on_the_end_of_a_read_quarantines_nothing"),
    ),
    Mutant(
        name="every answer is of the first rank",
        rule="the report waits for the proof",
        row=59,
        broken="what a rank of P answers is taken for the answer of the first",
        changes=(Edit(connections._event_of, "rank=rank,\n        sent_ns", "rank=0,\n        sent_ns"),),
        place=level2("recovery", first=1),
    ),
    Mutant(
        name="a reset is not told",
        row=83,
        broken="the actor does not tell its core that a control connection was reset",
        changes=(
            Edit(
                Connections._receive,
                "self._put(core.LinkLost(connection=number, detail=str(error)))",
                "pass",
            ),
        ),
        place=level2("handed back", *RESETS),
    ),
    Mutant(
        name="block ids trusted",
        row=32,
        broken="block ids that no engine has raise in the actor that looks them up",
        changes=(Set(peer_actor, "BlockIdError", NOT_AN_ERROR_OF_THE_PRODUCT),),
        place=level2("health", *BAD_PARAMS),
    ),
    Mutant(
        name="the executor drops the quarantine",
        row=5,
        broken="the actor tells the engine that quarantined blocks are free",
        changes=(Edit(PeerActor._report, "quarantined=effect.is_quarantined,", "quarantined=False,"),),
        place=level2("block reuse", *STALLED_READS),
    ),
    Mutant(
        name="a quarantine names no blocks",
        row=5,
        broken="the actor says that blocks are quarantined, and not which",
        changes=(Edit(PeerActor._report, "pull.command.local_block_ids if effect.is_quarantined else []", "[]"),),
        place=level2("block reuse", *STALLED_READS),
    ),
    Mutant(
        name="lifted quarantines are not told",
        row=5,
        broken="the engine never hears that quarantined blocks may be used again",
        changes=(
            Edit(
                PeerActor._lift_quarantine,
                "self._context.emit(QuarantineLifted(local_block_ids=pull.command.local_block_ids))",
                "del pull",
            ),
        ),
        place=level2("leaks", *STALLED_READS),
    ),
    Mutant(
        name="an effect that raises costs the others",
        row=31,
        broken="when an effect raises, those behind it are not carried out",
        changes=(Edit(PeerActor._carry_out, "errors.append(error)", "raise error"),),
        place=ByTest("tests/actors/test_peers.py::test_an_effect_that_raises_costs_no_other"),
    ),
    Mutant(
        name="nothing recovered",
        row=43,
        broken="the core is not told that its executor crashed, and waits for tasks that are gone",
        changes=(Edit(PeerActor.recover, "self._feed(core.Crashed(failure=failure))", "del failure"),),
        place=level2("recovery", *ACTOR_CRASHES, fault(Kind.MESSAGE_DELAY, "p0>d0", 0.0, 4.0)),
    ),
    Mutant(
        name="the end of a READ is lost in a crash",
        row=31,
        broken="an actor that crashes over the end of a READ never tells its core of it",
        changes=(
            Edit(
                PeerActor.recover,
                "isinstance(message, core.ReadEnded | core.LetGo | core.Retire | core.Recall)",
                "isinstance(message, core.Retire)",
            ),
        ),
        place=ByTest("tests/actors/test_peers.py::test_actor_that_crashes_on_the_end_of_a_read_quarantines_nothing"),
    ),
    Mutant(
        name="a recall is lost in a crash",
        row=31,
        broken="an actor that crashes over being wanted after all never tells its core of it",
        changes=(
            Edit(
                PeerActor.recover,
                "isinstance(message, core.ReadEnded | core.LetGo | core.Retire | core.Recall)",
                "isinstance(message, core.ReadEnded | core.LetGo | core.Retire)",
            ),
        ),
        place=ByTest("tests/unit/test_peer_actor_crash.py::test_what_is_told_after_a_crash_waits_for_the_recovery"),
    ),
    Mutant(
        name="a report is lost in a crash",
        row=31,
        broken="a request that its core has ended, and whose report raises, is never reported",
        changes=(Edit(PeerActor.recover, "self._report_lost(failure)", "pass"),),
        place=ByTest("tests/actors/test_mistakes.py::test_a_report_that_raises_is_made_once_more"),
    ),
    Mutant(
        name="what is given up waits for its turn",
        row=8,
        broken="an aborted request of which nothing was read waits behind all others, until it is quarantined for it",
        changes=(Edit(Reads.withdraw, "self._end(order, None, was_wanted=False)", "self.order([order])"),),
        place=ByTest("tests/actors/test_in_flight.py::test_a_request_whose_turn_has_not_come_ends_without_it"),
    ),
    Mutant(
        name="a prompt is judged by one of vLLM's questions",
        row=60,
        broken="a load that does not fit beside a quarantine stands before everybody, because of its window",
        changes=(
            Edit(
                vllm_admission.Admission.needs,
                "max(ask(tokens, is_whole=True), ask(now, is_whole=False))",
                "ask(tokens, is_whole=True)",
            ),
        ),
        place=ByTest("tests/unit/test_kept_blocks.py::test_a_prompt_is_judged_by_what_vllm_asks_for_it[it loads]"),
    ),
    Mutant(
        name="a prompt is judged by a load that does not come",
        row=60,
        broken="a prompt that is computed, and does not fit beside a quarantine, stands before everybody",
        changes=(
            Edit(ConnectorScheduler.get_num_new_matched_tokens, "self._loads.would_load(request.request_id)", "True"),
        ),
        place=ByTest(
            "tests/unit/test_kept_blocks.py::test_a_prompt_is_judged_by_what_vllm_asks_for_it[others have read it]"
        ),
    ),
    Mutant(
        name="the slots of an answer's drafts are not lent back",
        row=60,
        broken="a prompt that fits but for blocks that vLLM keeps with answers that are lent back holds up everybody",
        changes=(
            Edit(
                kept_blocks.KeptBlocks.lend_back,
                "block_ids |= self._admission.blocks_of(request_id)",
                "pass",
            ),
        ),
        place=ByTest("tests/unit/test_kept_blocks.py::test_blocks_that_an_answer_has_for_drafts_are_lent_back_with_it"),
    ),
    Mutant(
        name="a lost end is not missed",
        row=31,
        broken="a bug over a grant costs its blocks until the engine is started again",
        changes=(Edit(LeaseKeeper._end_overdue, "self._owed_before = dict(self._owed)", "pass"),),
        place=ByTest(
            "tests/actors/test_mistakes.py::test_an_end_that_is_lost_is_made_up_when_no_reader_can_believe_in_the_lease"
        ),
    ),
    Mutant(
        name="the end of an earlier lease ends its successor",
        row=53,
        broken="the late end of a lease frees the blocks of the next request of that id",
        changes=(
            Edit(
                TransferLedger._is_repeated,
                "return known is None or known[0] != lease",
                "return known is None",
            ),
        ),
        place=ByTest(
            "tests/unit/test_ledger.py::test_a_request_id_that_is_used_again_waits_for_no_end_of_the_former_lease"
        ),
    ),
    Mutant(
        name="whom nobody could admit stays known",
        row=31,
        broken="a bug over the first request to an engine costs all later ones",
        changes=(Edit(Supervisor._carry_out, "self._tell_roster(roster.Ended(key=key))", "pass"),),
        place=ByTest(
            "tests/actors/test_mistakes.py::test_an_engine_that_could_not_be_admitted_is_met_by_the_next_request"
        ),
    ),
    Mutant(
        name="failed handshake is not told",
        row=26,
        broken="the core never hears that a handshake has failed",
        changes=(
            Edit(
                Connections._open,
                "self._put(core.ConnectFailed(failure=failure))",
                "del failure",
            ),
        ),
        place=level2("leaks", *REPLACEMENTS, first=1),
    ),
    Mutant(
        name="torn down without a word",
        row=47,
        broken="the core never hears that a connection has been torn down",
        changes=(Edit(Connections._end_take_back, "self._put(core.TornDown(connection=number))", "pass"),),
        place=level2("recovery", *READ_ERRORS),
    ),
    Mutant(
        name="one rank speaks for all",
        rule="every holder",
        row=59,
        broken="what a rank tells P says that no other rank of its engine is a partner of P",
        changes=(
            Edit(
                Connections._sender,
                "ranks = self._by_number[number].ranks[rank].consumers",
                "ranks = 1",
            ),
        ),
        place=ByTest("tests/actors/test_parallel.py::test_a_lease_waits_for_ranks_that_have_said_nothing_yet"),
    ),
    Mutant(
        name="every rank is the first",
        rule="a sender counts once",
        row=59,
        broken="all ranks of an engine give P the same number",
        changes=(Edit(Connections._sender, '"rank": local.tp_rank', '"rank": 0'),),
        place=level2("handed back", first=7),
    ),
    Mutant(
        name="tail not zeroed",
        row=20,
        broken="what no READ has filled of a larger block keeps what another request left there",
        changes=(
            Edit(PeerActor._report, "unfilled=resolved.unfilled if resolved is not None else None", "unfilled=None"),
        ),
        place=level2("bytes", first=41),
    ),
)

# --- READs and agents -----------------------------------------------------------------------------------------------

READS = (
    Mutant(
        name="the port's word on quiescence is ignored",
        rule="a READ that failed may go on",
        row=70,
        broken="the translation of a READ's end says that it is over, whatever the port knows",
        changes=(Edit(Reads._end, "event.quiescent if event is not None else True", "True"),),
        place=level2("block reuse", *ERRS_EARLY),
    ),
    Mutant(
        name="failed READs lost",
        row=45,
        broken="the end of a READ that failed is not told to who ordered it",
        changes=(Edit(Reads._end, "order.on_end(ended, event)", "failure is None and order.on_end(ended, event)"),),
        place=level2("recovery", *READ_ERRORS),
    ),
    Mutant(
        name="READs that nobody wants have no end",
        rule="the order of giving up",
        row=45,
        broken="a READ that is not posted is never told to have ended",
        changes=(Edit(Reads.withdraw, "self._end(order, None, was_wanted=False)", "pass"),),
        place=level2("leaks", *ABORTS_OF_A_CROWD),
    ),
    Mutant(
        name="errors of NIXL raised",
        row=30,
        broken="the end of a READ that NIXL refused to post is told to nobody",
        changes=(
            Edit(
                Reads._receive,
                "case PortReadEnded(handle=handle):",
                "case PortReadEnded(handle=handle, was_posted=True):",
            ),
        ),
        place=ByTest("tests/unit/test_reads.py::test_a_read_that_nixl_refuses_to_post_has_ended"),
    ),
    Mutant(
        name="a turn that is not passed on",
        row=45,
        broken="READs that wait for their turn are not posted when another's is over",
        changes=(
            Edit(
                Reads._receive,
                "finally:\n                    self._post_next()",
                "finally:\n                    pass",
            ),
        ),
        place=ByTest("tests/unit/test_reads.py::test_little_is_ordered_ahead_of_the_port"),
    ),
    Mutant(
        name="a large request keeps its turn",
        broken="all parts of a large request are read before anybody else's READ",
        changes=(Edit(Reads._take_next, "self._waiting.append(of_request)", "self._waiting.appendleft(of_request)"),),
        place=ByTest("tests/unit/test_reads.py::test_a_large_request_lets_others_in_between"),
    ),
    Mutant(
        name="a burst is ordered at once",
        broken="all that waits is ordered ahead of the port, and posted even if it is given up meanwhile",
        changes=(Edit(Reads._has_room_for, "self._descriptors_ahead_max", "10**9"),),
        place=ByTest("tests/unit/test_reads.py::test_a_read_that_is_given_up_before_its_turn_is_not_posted"),
    ),
    Mutant(
        name="a READ beside the drafts of a step",
        row=7,
        broken="a READ begins while a step that vLLM knows the end of may still write into its blocks",
        changes=(Edit(DeferredCommands._let_through, "are_over is not None and not are_over()", "False"),),
        place=level2("bytes"),
    ),
    Mutant(
        name="the device of another rank is asked",
        broken="the actors ask whether a step is over in a thread without a current device; CUDA asks the first one",
        changes=(Edit(WorkerActors._make_supervisor, "make_current(self._device)", "pass"),),
        place=ByTest("tests/unit/test_step_fence.py::test_the_threads_that_call_cuda_have_made_the_device_current"),
    ),
    Mutant(
        name="an engine sleeps over what it lends",
        row=36,
        broken="the memory of the KV cache goes although transfers have not ended",
        changes=(Edit(ConnectorWorker.unregister_kv_caches, "if self.ledger.transfers:", "if False:"),),
        place=ByTest("tests/unit/test_sleep_mode.py::test_an_engine_that_lends_does_not_fall_asleep"),
    ),
    Mutant(
        name="memory goes that NIXL keeps",
        row=36,
        broken="the memory of the KV cache goes although NIXL has not given it back: a READ may still write there",
        changes=(Edit(ConnectorWorker.unregister_kv_caches, "if not actors.stop():", "if actors.stop() is None:"),),
        place=ByTest("tests/unit/test_sleep_mode.py::test_memory_that_nixl_keeps_does_not_go"),
    ),
    Mutant(
        name="a device that has failed holds up nobody",
        broken="a READ begins although the device cannot be asked whether it still writes into the blocks",
        changes=(
            Edit(DeferredCommands._let_through, "self._on_failed(error)\n            return", "self._on_failed(error)"),
        ),
        place=ByTest(
            "tests/unit/test_deferred_commands.py::test_nothing_is_let_through_for_a_device_that_cannot_be_asked"
        ),
    ),
    Mutant(
        name="a prompt is lent beside the drafts of its step",
        row=7,
        broken="P answers while a step that vLLM knows the end of may still write the blocks that the answer lends",
        changes=(Edit(ConnectorWorker.note_step, "if metadata.ends_prompt_to_lend:", "if False:"),),
        place=ByTest(
            "tests/unit/test_step_fence.py::"
            "test_the_worker_tells_the_actors_what_a_read_waits_for_and_waits_for_a_prompt_to_lend"
        ),
    ),
    Mutant(
        name="an abort overtakes its READ",
        broken="the actors hear that a request was given up before they hear that it is to be read",
        changes=(Edit(DeferredCommands.take, "self._subjects.keys().isdisjoint(subjects)", "True"),),
        place=ByTest("tests/unit/test_deferred_commands.py::test_an_abort_stays_behind_the_read_that_it_is_to_end"),
    ),
    Mutant(
        name="deferred after the stop",
        broken="a READ that has to wait for the device is asked for once the actors have stopped, and waits for ever",
        changes=(Edit(DeferredCommands.release, "self._is_released = True", "pass"),),
        place=ByTest("tests/unit/test_deferred_commands.py::test_nothing_waits_any_more_once_the_actors_have_stopped"),
    ),
    Mutant(
        name="leases wait behind READs",
        broken="P is asked for a lease of which its workers have not heard, because a READ of its own has to wait",
        changes=(Edit(DeferredCommands.take, "self._subjects.keys().isdisjoint(subjects)", "not self._deferred"),),
        place=ByTest("tests/unit/test_deferred_commands.py::test_everything_else_passes"),
    ),
    Mutant(
        name="agents are removed under others",
        row=14,
        broken="who lets go of an agent removes it, although another stands on it",
        changes=(Edit(Agents.let_go, "if not found.owners:", "if True:"),),
        place=ByTest("tests/unit/test_reads.py::test_an_agent_is_removed_when_the_last_who_stands_on_it_lets_go"),
    ),
    Mutant(
        name="agents kept",
        row=47,
        broken="the agent of a connection that broke stays loaded, so that it can never be loaded afresh",
        changes=(
            Edit(Agents.let_go, "del self._by_name[agent]", "found.owners[owner] = None"),
            Edit(Reads.unload_agent, "await self.port.remove_remote_agent(agent)", "pass"),
        ),
        place=level2("recovery", *READ_ERRORS),
    ),
    Mutant(
        name="loaded while it was removed",
        broken="an agent whose last owner lets go while another one loads it is taken for loaded",
        changes=(Edit(Agents.end_load, "if agent in removed:", "if False:"),),
        place=ByTest(
            "tests/actors/test_shared_agents.py::test_an_agent_that_is_loaded_while_its_last_owner_lets_go_stays_loaded"
        ),
    ),
    Mutant(
        name="what was not heard waits for the device",
        broken="a request that a retired actor has not heard of goes to its successor behind its own end",
        changes=(Edit(Supervisor._run_peer, "self._deliver_now(command)", "self.deliver(command)"),),
        place=ByTest(
            "tests/unit/test_deferred_commands.py::"
            "test_what_a_retired_actor_has_not_heard_goes_to_its_successor_before_what_waits_for_the_device"
        ),
    ),
    Mutant(
        name="over while another keeps the agent",
        row=70,
        broken="what failed over an agent is taken to be over soon, although another keeps that agent loaded",
        changes=(Edit(Agents.let_go, "found.waiting.append(waiting)", "waiting()"),),
        place=ByTest("tests/unit/test_reads.py::test_who_gave_up_a_shared_agent_waits_for_those_who_still_read"),
    ),
    Mutant(
        name="others keep a broken agent",
        row=47,
        broken="nobody tells those who share an agent that it has failed, and nobody can load it afresh",
        changes=(Edit(Reads.unload_agent, "other.agent_lost(agent, effect.failure)", "pass"),),
        place=ByTest("tests/actors/test_shared_agents.py::test_what_fails_at_one_is_rebuilt_by_all"),
    ),
    Mutant(
        name="an agent that is lost to who is told",
        row=47,
        broken="an actor does not find the connection whose agent another has given up",
        changes=(Edit(Connections.agent_lost, "rank.agent == agent", "False"),),
        place=ByTest("tests/actors/test_shared_agents.py::test_what_fails_at_one_is_rebuilt_by_all"),
    ),
    Mutant(
        name="who retires takes the agent with it",
        row=47,
        broken="an actor that needs an agent no more has the others give it up",
        changes=(Edit(Agents.let_go, "if failure is None:", "if False:"),),
        place=ByTest("tests/unit/test_reads.py::test_an_agent_is_removed_when_the_last_who_stands_on_it_lets_go"),
    ),
    Mutant(
        name="a broken port is not told",
        row=73,
        broken="nobody learns that the NIXL thread has died",
        changes=(Edit(Reads._receive, "self._on_broken(event.error)", "pass"),),
        place=level2("health", *WORKER_STOPS),
    ),
)

# --- the handshake --------------------------------------------------------------------------------------------------

HANDSHAKE = (
    Mutant(
        name="sizes believed",
        row=68,
        broken="the sizes that the client says are not compared with those that P says",
        changes=(Edit(handshake._require_true_sizes, "if facts is None:", "if True:"),),
        place=level2("params", *WRONG_SIZES),
    ),
    Mutant(
        name="two lives in one connection",
        row=48,
        broken="ranks of two lives of an engine make one connection",
        changes=(Edit(handshake._require_one_life, "> 1", "> 99"),),
        place=ByTest("tests/unit/test_handshake_answers.py::test_ranks_of_two_lives_of_an_engine_make_no_connection"),
    ),
    Mutant(
        name="answers about another rank",
        row=68,
        broken="an answer about another rank than was asked about is taken",
        changes=(
            Edit(
                handshake._exchange,
                "if reply.actor is not None and (reply.actor.pp_rank, reply.actor.tp_rank) != rank:",
                "if False:",
            ),
        ),
        place=ByTest(
            "tests/unit/test_handshake_answers.py::test_an_answer_about_another_rank_than_was_asked_about_is_refused"
        ),
    ),
    Mutant(
        name="any hash will do",
        row=16,
        broken="the hash of what two engines must have in common is not compared",
        changes=(
            Edit(
                handshake._exchange,
                "context.local.compatibility_hash if context.options.enforce_handshake_compat else None",
                "None",
            ),
        ),
        place=level2("bytes", fault(Kind.INCOMPATIBLE, "p0", 0.5, 3.0)),
    ),
    Mutant(
        name="half a handshake kept",
        row=51,
        broken="what a handshake that failed half-way has loaded stays loaded",
        changes=(Edit(handshake._load, "await _unload(context, owner, list(agents.values()), remote_lists)", "pass"),),
        place=level2("recovery", *REFUSED),
    ),
    Mutant(
        name="links of a failed handshake stay open",
        row=51,
        broken="the control connections of a handshake that failed are not closed",
        changes=(Edit(handshake._load, "_close(context, links.values())", "pass"),),
        place=ByTest(
            "tests/unit/test_handshake_answers.py::test_a_handshake_that_fails_at_its_last_control_socket_leaves_nothing"
        ),
    ),
    Mutant(
        name="descriptor lists kept",
        row=50,
        broken="the descriptor lists of a connection stay when the connection is torn down",
        changes=(Edit(handshake._unload, "for remote_list in remote_lists:", "for remote_list in ():"),),
        place=level2("leaks", *READ_ERRORS),
    ),
    Mutant(
        name="links kept",
        row=50,
        broken="the control connections stay open when the connection is torn down",
        changes=(
            Edit(
                handshake.disconnect,
                "_close(context, [rank.link for rank in connection.ranks if rank.link is not None])",
                "pass",
            ),
        ),
        place=level2("leaks", *READ_ERRORS),
    ),
    Mutant(
        name="the control socket is not tried",
        row=66,
        broken="a connection is made although nobody answers at the control socket",
        changes=(
            Edit(
                handshake._open_link,
                "answer = decode_answer(await link.receive())\n"
                "            if not isinstance(answer, HoldAnswer):\n"
                '                raise DecodeFailed("not the answer to a hold")',
                'answer = HoldAnswer(sent_ns=0, agent="its")',
            ),
        ),
        place=ByTest(
            "tests/unit/test_handshake_answers.py::test_a_control_socket_that_answers_something_else_is_refused"
        ),
    ),
    Mutant(
        name="the process that answers may be another one",
        row=48,
        broken="it is not looked whether the process that answers for leases is that of the agent",
        changes=(Edit(handshake._require_same_process, 'there not in ("", agent)', "False"),),
        place=level2("bytes", *RESTARTED_AT_MEETINGS),
    ),
    Mutant(
        name="looked at when it is loaded",
        row=48,
        broken="the agent of a process that has ended is loaded in the one at its place, and then refused",
        changes=(
            Edit(
                handshake._load,
                "_require_same_process(peer, there, reads.port.agent_named_in(metadata))",
                "pass",
            ),
        ),
        place=ByTest(f"{COMINGS_AND_GOINGS}::{OF_THE_PROCESS_BEFORE}"),
    ),
    Mutant(
        name="the first READ is not waited for",
        row=48,
        broken="a connection is used before it is known which process it leads to",
        changes=(Edit(handshake._load, "await _reach(context, peer, agents)", "pass"),),
        place=level2("proof", *RESTARTED_WHILE_A_READER_STANDS_STILL),
    ),
    Mutant(
        name="UCX waits for its connections",
        row=45,
        broken="loading an agent whose packets are dropped holds up all others",
        changes=(
            Edit(
                core._import_nixl,
                'os.environ.setdefault("UCX_TCP_CONN_NB", "y")',
                'os.environ["UCX_TCP_CONN_NB"] = "n"',
            ),
        ),
        place=ByTest(
            "tests/conformance/test_nixl_agent.py::TestRealNixlPort"
            "::test_an_engine_whose_ports_drop_everything_holds_up_nobody"
        ),
    ),
    Mutant(
        name="the first READ is waited for without end",
        row=45,
        broken="a first READ that never ends keeps the handshake",
        changes=(Edit(handshake._reach, "await _in_time(context, reach)", "await reach()"),),
        place=ByTest(
            "tests/actors/test_peers.py"
            "::test_an_engine_that_answers_and_cannot_be_read_ends_nothing_but_its_own_handshakes"
        ),
    ),
    Mutant(
        name="handshakes wait for ever",
        row=45,
        broken="a question that nobody answers is waited for without bound",
        changes=(Edit(handshake._ask, "await _in_time(context, ask)", "await ask()"),),
        place=level2("recovery", fault(Kind.PARTITION, "d0>p0", 0.0, 4.0)),
    ),
    Mutant(
        name="who has stood still believes its timeouts",
        broken="requests fail because their own engine was stopped while it was being connected",
        changes=(Edit(handshake._in_time, "range(2)", "range(1)"),),
        place=ByTest("tests/actors/test_peers.py::test_who_stood_still_while_it_was_connected_asks_once_more"),
    ),
)

# --- the lease keeper -----------------------------------------------------------------------------------------------

KEEPER = (
    Mutant(
        name="notifications without bound",
        row=75,
        broken="whoever knows our agent can fill our memory with notifications",
        changes=(Edit(LeaseKeeper.notify, "self._notifications_waiting >= NOTIFICATIONS_WAITING_MAX", "False"),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_a_flood_of_notifications_costs_no_grant"),
    ),
    Mutant(
        name="bytes of notifications without bound",
        row=75,
        broken="notifications that wait may be as long as NIXL delivers them",
        changes=(Edit(LeaseKeeper.notify, " or bytes_waiting > NOTIFICATION_BYTES_WAITING_MAX", ""),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_notifications_that_wait_have_so_many_bytes"),
    ),
    Mutant(
        name="commands share the notifications' bound",
        row=75,
        broken="a grant that comes in a flood of notifications is dropped",
        changes=(
            Edit(
                LeaseKeeper.deliver,
                "self._inbox.put(_command_event(command))",
                "self._notifications_waiting < NOTIFICATIONS_WAITING_MAX and self._inbox.put(_command_event(command))",
            ),
        ),
        place=ByTest("tests/unit/test_lease_keeper.py::test_a_flood_of_notifications_costs_no_grant"),
    ),
    Mutant(
        name="a flood keeps deadlines waiting",
        row=52,
        broken="the keeper empties its inbox before it looks at its deadlines, however full it is",
        changes=(
            Edit(
                LeaseKeeper.run,
                "for _ in range(MESSAGES_PER_TURN_MAX):\n"
                "                if (message := self._inbox.take_one()) is None:\n"
                "                    is_empty = True\n"
                "                    break\n",
                "while (message := self._inbox.take_one()) is not None:\n",
            ),
        ),
        place=ByTest("tests/unit/test_lease_keeper.py::test_a_flood_does_not_keep_other_tasks_waiting"),
    ),
    Mutant(
        name="a turn of any number of leases",
        broken="messages that name very many leases keep all other tasks waiting, though they are few",
        changes=(Edit(LeaseKeeper.run, "self._named_in_turn >= LEASES_PER_TURN_MAX", "False"),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_few_messages_that_name_many_leases_do_not_either"),
    ),
    Mutant(
        name="control task not restarted",
        row=31,
        broken="a control socket whose task crashed serves nobody any more",
        changes=(
            Edit(
                LeaseKeeper.run,
                'nursery.start_soon(keep_running, "control socket", self._serve_control, self._log_crash)',
                "nursery.start_soon(keep_running.once, self._serve_control, self._log_crash)",
            ),
            Do(_run_once),
        ),
        place=ByTest("tests/unit/test_lease_keeper.py::test_a_crash_of_the_control_socket_is_logged_and_it_serves_on"),
    ),
    Mutant(
        name="bad frames end the control task's turn",
        row=38,
        broken="a frame that is no message raises in the task of the control socket",
        changes=(Set(lease_keeper, "DecodeFailed", NOT_AN_ERROR_OF_THE_PRODUCT),),
        place=level2("health", *GARBAGE),
    ),
    Mutant(
        name="a message that raises costs the others",
        row=31,
        broken="what raises in the keeper's core ends the keeper",
        changes=(Edit(LeaseKeeper._step, 'self._log_crash("lease keeper", error)\n        return', "raise"),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_a_crash_with_one_message_costs_no_other"),
    ),
    Mutant(
        name="an end that raises costs the others",
        row=76,
        broken="an effect that raises costs the effects behind it",
        changes=(Edit(effects.carry_out, "on_error(error)", "raise error"),),
        place=ByTest("tests/unit/test_lease_keeper.py::test_a_crash_with_one_effect_costs_no_other"),
    ),
    Mutant(
        name="ends of leases lost",
        row=59,
        broken="the engine never hears that a lease has ended",
        changes=(
            Edit(
                LeaseKeeper._end,
                "self._emit(SendEnded(lease=lease, expired=expired))",
                "pass",
            ),
        ),
        place=level2("free once"),
    ),
    Mutant(
        name="ends under another name",
        row=53,
        broken="ends of leases name a request that the engine does not know",
        changes=(
            Edit(LeaseKeeper._end, "SendEnded(lease=lease,", "SendEnded(lease=lease._replace(request_id=str(lease)),"),
        ),
        place=level2("free once"),
    ),
    Mutant(
        name="answers to nobody",
        row=59,
        broken="nobody is told of the leases that are gone",
        changes=(Edit(LeaseKeeper._execute, "held=held, gone=gone,", "held=held, gone=(),"),),
        place=level2("isolation"),
    ),
    Mutant(
        name="what is due after a standstill is taken for lost",
        broken="whoever has stood still logs as a bug what it is about to end, and says twice that it ended",
        changes=(Edit(LeaseKeeper.run, "if not self._core.hears_first:", "if True:"),),
        place=ByTest(
            "tests/unit/test_lease_keeper.py::test_what_is_due_when_this_process_has_stood_still_was_not_lost"
        ),
    ),
    Mutant(
        name="decode engines are heard from nowhere",
        broken="an operator who sees that a decode engine holds blocks is not told where to find it",
        changes=(
            Edit(LeaseKeeper._note_sender, "known.address = self._control.sender_of(reply_to)", "known.address = ''"),
        ),
        place=ByTest(
            "tests/unit/test_lease_keeper.py::test_it_is_known_from_where_so_many_decode_engines_were_heard_last"
        ),
    ),
    Mutant(
        name="a decode engine that has ended is connected",
        broken="an operator looks for the holder of a lease that has ended long ago",
        changes=(
            Edit(
                LeaseKeeper.is_connected,
                "any(self._control.sender_of(each) for each in known.ranks.values())",
                "len(known.ranks) > 0",
            ),
        ),
        place=ByTest("tests/unit/test_lease_keeper.py::test_a_decode_engine_is_connected_while_one_of_its_ranks_is"),
    ),
    Mutant(
        name="the end of an earlier lease is that of its successor in the book",
        row=53,
        broken="a bug over the end of a lease costs its blocks, where an earlier one of that id ended after its grant",
        changes=(
            Edit(
                LeaseKeeper._end, "if self._owed.get(lease.request_id) == lease:", "if lease.request_id in self._owed:"
            ),
        ),
        place=ByTest(
            "tests/unit/test_lease_keeper.py::test_the_end_of_an_earlier_lease_of_the_same_id_is_not_that_of_the_later_one"
        ),
    ),
)

# --- the supervisor -------------------------------------------------------------------------------------------------

SUPERVISOR = (
    Mutant(
        name="nobody restarted",
        row=31,
        broken="an actor that crashed is not started again, and its requests are lost",
        changes=(
            Edit(
                restarts.keep_running,
                "        log_crash(name, error)\n",
                "        log_crash(name, error)\n            return\n",
            ),
        ),
        place=level2("bound", *ACTOR_CRASHES, *STALLED_READS),
    ),
    Mutant(
        name="a crash takes the engine along",
        row=30,
        broken="an exception in one actor ends all of them",
        changes=(Edit(restarts.keep_running, "        log_crash(name, error)\n", "        raise\n"),),
        place=ByTest("tests/actors/test_peers.py::test_actor_that_crashes_fails_its_requests_and_goes_on"),
    ),
    Mutant(
        name="a crash while all stop takes the engine along",
        row=30,
        broken="an actor that crashes, and is cancelled before it has ended, is the end of all of them",
        changes=(Edit(restarts.keep_running, "raise cancelled from None", "raise"),),
        place=ByTest(
            "tests/unit/test_lease_keeper.py::test_what_crashes_and_is_cancelled_before_it_has_ended_takes_nobody_along"
        ),
    ),
    Mutant(
        name="asked for while it recovers",
        broken="what an actor that has crashed asks for before it runs again, such as tearing down, never begins",
        changes=(Edit(PeerActor.run, "self._connections.detach()", "pass"),),
        place=ByTest(
            "tests/actors/test_peers.py::test_what_an_actor_asks_for_while_it_recovers_begins_when_it_runs_again"
        ),
    ),
    Mutant(
        name="restarts without delay",
        row=31,
        broken="a task that crashes at once spins",
        changes=(
            Edit(
                restarts.keep_running,
                "await trio.sleep(doubled_ns(first_ns, max_ns, crashes_in_a_row - 1) / NS_PER_SECOND)",
                "await trio.sleep(0)",
            ),
        ),
        place=ByTest(
            "tests/unit/test_lease_keeper.py::test_what_crashes_at_once_is_started_again_ever_more_slowly_and_for_ever"
        ),
    ),
    Mutant(
        name="a dead worker says nothing",
        row=73,
        broken="the scheduler goes on lending blocks of a worker that is dead",
        changes=(Edit(Supervisor._stop_everything, "self._context.emit(WorkerStopped(reason=detail))", "pass"),),
        place=level2("health", *WORKER_STOPS),
    ),
    Mutant(
        name="stop without a word",
        row=27,
        broken="requests that are open when the connector stops are not reported",
        changes=(Edit(Supervisor._stop_everything, "actor.tell(core.Stop(failure=self._stopped))", "pass"),),
        place=ByTest("tests/actors/test_peers.py::test_a_worker_that_stops_fails_what_is_open_at_once"),
    ),
    Mutant(
        name="wake-up missed",
        row=44,
        broken="a message that arrives before its actor waits does not wake it",
        changes=(Edit(Mailbox.wait, "if self._messages:", "if False:"),),
        place=ByTest(
            "tests/unit/test_mailbox.py::test_waiting_with_a_message_at_hand_returns_at_once_but_lets_others_run"
        ),
    ),
    Mutant(
        name="commands lost",
        row=44,
        broken="every fortieth command of the engine thread is lost",
        changes=(Do(_lose_commands),),
        place=level2("bound"),
    ),
    Mutant(
        name="messages lost",
        row=44,
        broken="every fiftieth message to a peer actor is lost",
        changes=(Do(_lose_messages),),
        place=level2("bound"),
    ),
    Mutant(
        name="earlier deadlines slept over",
        row=44,
        broken="an actor sleeps until the deadline that it knew when it fell asleep, though an earlier one has come",
        changes=(Edit(PeerActor.tell, "or is_too_late", "or False"),),
        place=level2("bound"),
    ),
    Mutant(
        name="what is due waits for a clock that stood still",
        rule="durations on our own clock",
        row=77,
        broken="an actor that has slept beyond its deadline, as trio's clock lags behind ours, is not woken up",
        changes=(Edit(PeerActor._sleeps_beyond, " or deadline_ns <= self._context.clock.now_ns()", ""),),
        place=ByTest(
            "tests/actors/test_clocks.py::"
            "test_a_lease_is_held_at_once_when_the_next_deadline_passed_while_the_machine_was_suspended"
        ),
    ),
    Mutant(
        name="one handshake at a time",
        row=61,
        broken="handshakes with healthy engines wait for a dead one",
        changes=(Do(_one_handshake_at_a_time),),
        place=level2("isolation", fault(Kind.PARTITION, "d0>p0", 0.0, 4.0)),
    ),
    Mutant(
        name="leases timed by the wall clock",
        row=9,
        broken="leases end by a clock that is set back and forth",
        changes=(
            Edit(LeaseKeeper._step, "self._clock.now_ns()", "to_ns(self._clock.wall())"),
            Edit(LeaseKeeper.run, "self._clock.now_ns()", "to_ns(self._clock.wall())"),
        ),
        place=level2("held", *(fault(Kind.WALL_CLOCK_JUMP, "p0", at, 0.1) for at in (1.0, 2.0, 3.0))),
    ),
    Mutant(
        name="sockets wait for a call of NIXL that hangs",
        broken="an engine that stops answers strangers and tools until its process ends, if NIXL hangs",
        changes=(
            Edit(
                Supervisor.run,
                "            self._context.side_channel.close()\n    finally:",
                "            pass\n    finally:",
            ),
        ),
        place=ByTest(
            "tests/actors/test_in_flight.py::test_the_control_socket_closes_although_nixl_hangs_while_its_worker_stops"
        ),
    ),
)

# --- the ports ------------------------------------------------------------------------------------------------------

PORTS = (
    Mutant(
        name="what NIXL forgot is not lost",
        row=47,
        broken="a READ from an agent that NIXL has dropped by itself fails, and the connection is kept",
        changes=(Edit(AgentCore.post_read, "transport_lost=True) from None", "transport_lost=False) from None"),),
        place=ByTest(
            "tests/actors/test_peers.py::"
            "test_metadata_that_nixl_dropped_costs_a_new_connection_and_at_most_the_first_request"
        ),
    ),
    Mutant(
        name="a READ that NIXL forgot is over",
        row=5,
        broken="a READ of one descriptor whose agent NIXL has dropped by itself is taken to write no more",
        changes=(Edit(AgentCore._end, " and not is_forgotten", ""),),
        place=ByTest(
            "tests/conformance/test_nixl_agent.py::TestRealNixlPort::"
            "test_a_read_whose_peer_was_forgotten_may_go_on_writing"
        ),
    ),
    Mutant(
        name="only the oldest READs are asked about",
        broken="a READ that stays in flight hides the ends of all that were posted behind it",
        changes=(Edit(Looks.due, "list(islice(self._line_of, IN_TURN_MAX))", "()"),),
        place=ByTest("tests/unit/test_looks.py::test_every_read_is_asked_about_in_a_round"),
    ),
    Mutant(
        name="an idle agent spins",
        broken="what an empty poll costs is the same on all machines: where it costs more, each is taken for work",
        changes=(Edit(PollCost.learn, "(self._cold if after_pause else self._warm).learn(cpu_seconds)", "pass"),),
        place=ByTest("tests/unit/test_poll_cost.py::test_what_finds_nothing_is_not_taken_for_work"),
    ),
    Mutant(
        name="nothing moves data any more",
        broken="what a poll costs is learned from polls that move data too, without a bound",
        changes=(
            Edit(
                poll_cost._Empty.learn,
                "self._seconds = min(max(learned, self._least), self._most)",
                "self._seconds = learned",
            ),
        ),
        place=ByTest("tests/unit/test_poll_cost.py::test_a_long_transfer_is_not_taken_for_nothing"),
    ),
    Mutant(
        name="an agent without its memory",
        broken="nobody keeps the memory that a READ may still write into when its agent is left behind",
        changes=(Edit(AgentCore.__init__, "self._owner = owner", "self._owner = None"),),
        place=ByTest(
            "tests/conformance/test_nixl_agent.py::TestRealNixlPort::"
            "test_memory_is_kept_with_an_agent_that_cannot_be_destroyed"
        ),
    ),
    Mutant(
        name="a hanging call of NIXL is nobody's",
        broken="a call of NIXL that does not return is not said: all prefill engines seem to hang",
        changes=(Edit(RealNixlPort._watch, "looks + 1 if", "0 if"),),
        place=ByTest(
            "tests/conformance/test_nixl_agent.py::TestRealNixlPort::"
            "test_a_call_that_does_not_return_is_said_once_and_so_is_that_it_has"
        ),
    ),
    Mutant(
        name="a trace that seems complete",
        broken="records that the trace's file system did not take are missing without a line in their place",
        changes=(Edit(TraceWriter._end_gap, "self._queue.put(gap)", "pass"),),
        place=ByTest("tests/unit/test_trace_writer.py::test_a_file_that_hangs_costs_records_and_nobody_waits"),
    ),
    Mutant(
        name="dead before it greets is somebody else",
        row=43,
        broken="an engine that ends before it has greeted is taken for something that is no engine",
        changes=(
            Edit(
                ZmqRequester._look_at_greeting,
                "raise PortRefused(self._host, self._port, REFUSED) from error",
                "pass",
            ),
        ),
        place=ByTest(
            "tests/conformance/test_zmq_bridge.py::TestZmqSideChannel::test_a_process_that_ends_before_it_greets_is_nobody_else"
        ),
    ),
    Mutant(
        name="a listener that closes is somebody else",
        row=43,
        broken="an engine that stops listening while somebody looks at it is taken for something that is no engine",
        changes=(Edit(ZmqRequester._look_at_greeting, "for _ in range(2):", "for _ in range(1):"),),
        place=ByTest(
            "tests/conformance/test_zmq_bridge.py::TestZmqSideChannel::test_a_listener_that_closes_while_somebody_looks_at_it_is_nobody_else"
        ),
    ),
    Mutant(
        name="an engine that hangs is somebody else",
        row=43,
        broken="an engine that has ended a connection, and says nothing over the next, is taken for something else",
        changes=(Edit(ZmqRequester._look_at_greeting, "if patience.cancelled_caught and not said:", "if False:"),),
        place=ByTest(
            "tests/conformance/test_zmq_bridge.py::TestZmqSideChannel::test_who_ends_a_connection_and_then_hangs_is_nobody_else"
        ),
    ),
    Mutant(
        name="an ended connection is a refused one",
        row=43,
        broken="a connection that was ended counts as one that never stood, when libzmq connects again and is refused",
        changes=(
            Edit(Monitor.catch_up, "event == zmq.EVENT_CLOSED and not self.connected", "event == zmq.EVENT_CLOSED"),
        ),
        place=ByTest(
            "tests/conformance/test_zmq_bridge.py::TestZmqSideChannel::test_a_question_whose_connection_has_ended_was_not_refused"
        ),
    ),
    Mutant(
        name="an ended connection is waited for",
        row=43,
        broken="a question whose connection was ended is waited for until its time is up",
        changes=(Edit(ZmqRequester._await_reply, "if monitor.ended_after_greeting:", "if False:"),),
        place=ByTest(
            "tests/conformance/test_zmq_bridge.py"
            "::TestZmqSideChannel::test_a_question_whose_connection_ends_is_not_waited_for"
        ),
    ),
    Mutant(
        name="a copy reports no load",
        broken="vLLM waits for ever for the rank that holds a copy when a request that loads is refused",
        changes=(Edit(ConnectorWorker._answer_as_copy, "case StartPull() | RejectPull():", "case StartPull():"),),
        place=ByTest("tests/unit/test_parallelism.py::test_a_copy_serves_nobody_and_keeps_nothing_back"),
    ),
    Mutant(
        name="a port that was closed posts READs",
        broken="what was ordered while NIXL hung is posted after whoever closed the port was told that nothing is",
        changes=(
            Edit(
                AgentThread._serve,
                "if self._close_at is not None and time.monotonic() >= self._close_at:",
                "if False:",
            ),
        ),
        place=ByTest(
            "tests/conformance/test_nixl_agent.py::TestRealNixlPort::test_a_read_that_was_ordered_while_nixl_hung_is_not_posted_after_the_port_was_closed"
        ),
    ),
)

LOAD_FAILURES = "tests/unit/test_load_failures.py"

SCHEDULER = (
    Mutant(
        name="a failed load before those that have blocks",
        row=60,
        broken="a load that failed and finds too few blocks stands before those that have all they need",
        changes=(
            Edit(
                Loads._answer,
                "if before is State.FAILED:",
                "if False:",
            ),
        ),
        place=ByTest(LOAD_FAILURES + "::test_who_has_blocks_is_served_while_a_failed_load_finds_too_few"),
    ),
    Mutant(
        name="answers are lent back before those who find no room",
        row=60,
        broken="answers go on being lent back while a prompt does not fit beside those that are; it is never served",
        changes=(Edit(grant._lends, " and not event.is_waited_for", ""),),
        place=ByTest(
            "tests/unit/test_kept_blocks.py::"
            "test_a_prompt_that_found_no_room_is_served_although_others_go_on_being_lent_back"
        ),
    ),
    Mutant(
        name="the slots of drafts are not counted",
        row=60,
        broken="a prompt that fits beside a quarantine but for what vLLM keeps for drafts stands before everybody",
        changes=(Edit(kept_blocks._fits, " + for_a_step", ""),),
        place=ByTest("tests/unit/test_kept_blocks.py::test_nor_does_one_that_fits_but_for_the_slots_of_drafts[on P]"),
    ),
    Mutant(
        name="a load lets nobody pass",
        row=60,
        broken="a load of higher priority that finds too few blocks stands before those that they are kept for",
        changes=(
            Edit(
                Loads._begin_step,
                "self._lets_pass = bool(self._offered) and behind > 0",
                "pass",
            ),
        ),
        place=ByTest(
            LOAD_FAILURES + "::test_failed_loads_are_computed_although_loads_of_higher_priority_find_too_few_blocks"
        ),
    ),
    Mutant(
        name="a load lets those that have asked pass alone",
        row=60,
        broken="a load that has failed, and was skipped for want of a place for its adapter, waits for one before it",
        changes=(Edit(Loads._begin_step, "len(self._by_state[State.FAILED]) + ", ""),),
        place=ByTest(
            LOAD_FAILURES + "::test_nor_do_they_wait_for_one_when_the_places_for_adapters_were_taken_as_they_failed"
        ),
    ),
)

MUTANTS = (*ACTORS, *READS, *HANDSHAKE, *KEEPER, *SUPERVISOR, *PORTS, *SCHEDULER)
