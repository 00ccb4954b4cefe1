"""One run: engines, load, faults, and what is left; from a plan to a report."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx

from connector.observe.catalogue import COMPLETED, ENDING_KINDS, FAILED_BY_KIND
from connector.tools.conformance import check
from connector.tools.trace_reader import merged, read_processes
from tests.chaos.cluster import SOCKETS_OF_A_RECONNECTION, ChaosCluster, ConnectorName, Prefill
from tests.chaos.drains import END_SECONDS_MAX, Disturbance, by_command, by_sigterm
from tests.chaos.load import Load
from tests.chaos.plan import CONTROL, LIFE_KINDS, NETWORK_KINDS, PREFILL, SIDE, STRANGER_KINDS, Fault, Kind, Plan
from tests.chaos.remains import (
    WORKER,
    Life,
    Processes,
    fewest,
    grown,
    left_in_connector,
    left_in_vllm,
    megabytes,
    processes,
    sockets_of_reconnections,
)
from tests.chaos.report import Memory, Report
from tests.chaos.strangers import keep_half_open, send_garbage
from tests.e2e.client import Client
from tests.e2e.engines import Engine
from tests.e2e.metrics_page import Page

STRANGERS_AT_ONCE = 16
DELAY_FRACTION = 0.1
"""A proxy that delays for so many seconds delays each chunk by this part of them."""
SERVES_SECONDS = 6.0
"""How long a prefill engine is left alone between two faults of its life."""
LATE_MAX = 2.0
"""A fault of a prefill engine's life whose turn comes later than after so many times the plan's length is left out."""
LOOKS = 3
LOOK_SECONDS = 1.0
WATCH_SECONDS = 1.0
MEMORY_SECONDS = 5.0
SETTLE_SECONDS = 90.0
"""Leases end, engines that are gone are forgotten, and releases that are owed to them are given up."""
SETTLE_POLL_SECONDS = 1.0

Say = Callable[[str], None]


def run(plan: Plan, connector: ConnectorName, directory: Path, say: Say, late_max: float = LATE_MAX) -> Report:
    """Carry out the plan. Raises what is a mistake of the run itself, such as an engine that does not start."""
    with ChaosCluster(connector, directory) as cluster:
        say(f"{connector}: two prefill and two decode engines are up; computing the answers to compare with")
        if cluster.no_networks:
            say(f"the network loses nothing, because none can be made here: {cluster.no_networks}")
        load = Load(cluster, plan.seed)
        try:
            return _Run(plan, cluster, load, say, late_max).carry_out()
        finally:
            load.close()


class _Run:
    def __init__(self, plan: Plan, cluster: ChaosCluster, load: Load, say: Say, late_max: float) -> None:
        self._plan = plan
        self._late_max = late_max
        self._cluster = cluster
        self._load = load
        self._say = say
        self._started = time.monotonic()
        self._over = threading.Event()
        self._faults: Counter[str] = Counter()
        self._impossible: Counter[str] = Counter()
        self._disturbances: list[Disturbance] = []
        self._report = Report(connector=cluster.connector, seed=plan.seed, seconds=plan.seconds)
        self._alive = {name: _pids(engine) for name, engine in cluster.decode.items()}

    def carry_out(self) -> Report:
        report = self._report
        self._connect_all("before the chaos")
        report.processes_before = self._settled("before the chaos")
        loads_before = self._loads()
        self._started = time.monotonic()
        self._say(f"chaos for {self._plan.seconds:g} s")
        watcher = threading.Thread(target=self._watch, name="watcher")
        watcher.start()
        self._load.start()
        try:
            self._break_things()
        finally:
            self._load.stop()
            self._over.set()
            watcher.join()
        self._say("the load has stopped; waiting until all has settled")
        report.count(self._load.results, self._disturbances)
        report.faults, report.impossible_faults = dict(self._faults), dict(self._impossible)
        report.lives = {name: each.lives for name, each in self._cluster.prefill.items()}
        loads_after = self._loads()
        for engine, (loaded, failed) in loads_before.items():
            # The counts begin anew where an engine has ended, so those of before may be missing.
            report.calls[engine].loaded = loads_after[engine][0] - loaded
            report.calls[engine].failures = dict(loads_after[engine][1] - failed)
        settling = time.monotonic()
        report.processes_ended = self._settled("after the chaos")
        report.settled_seconds = time.monotonic() - settling
        # NIXL keeps sockets of each connection that was made anew until the other process ends (docs/nixl.md fact 11):
        # so both prefill engines are replaced before descriptors of decode engines are compared.
        ended = {
            name: Life(str(each.engine.options.engine_id), each.since_wall, time.time())
            for name, each in self._cluster.prefill.items()
        }
        for prefill in self._cluster.prefill.values():
            prefill.end_life(prefill.engine.stop)
            prefill.begin_life(new_id=False)
        self._connect_all("after the chaos")
        report.processes_after = self._settled("with new prefill engines")
        for engine in self._cluster.decode:
            self._compare(engine, report.processes_before[engine], report.processes_after[engine])
        if self._cluster.connector == "ours":
            self._check_traces(ended)
        return report

    # --- faults -----------------------------------------------------------------------------------------------------

    def _break_things(self) -> None:
        """All faults of the plan; returns when the time is over, they are, and both prefill engines serve."""
        lives = {name: [f for f in self._plan.of(LIFE_KINDS) if f.engine == name] for name in PREFILL}
        with ThreadPoolExecutor(STRANGERS_AT_ONCE) as pool:
            running: list[Future[None]] = [pool.submit(self._live, name, faults) for name, faults in lives.items()]
            for fault in self._plan.faults:
                if fault.kind not in LIFE_KINDS:
                    self._sleep_until(fault.at_seconds)
                    running.append(pool.submit(self._disturb, fault))
            self._sleep_until(self._plan.seconds)
            for each in running:
                each.result()

    def _sleep_until(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds - self._now()))

    def _now(self) -> float:
        """Seconds after the start of the load."""
        return time.monotonic() - self._started

    def _live(self, name: str, faults: list[Fault]) -> None:
        """The faults of one prefill engine, between which it serves for a while. Where it starts so slowly that they
        take much longer than planned, the others are left out."""
        for fault in faults:
            self._sleep_until(fault.at_seconds)
            if self._now() > self._late_max * self._plan.seconds:
                self._impossible[fault.kind.value] += 1
                continue
            self._strike(self._cluster.prefill[name], fault)
            self._faults[fault.kind.value] += 1
            time.sleep(SERVES_SECONDS)

    def _strike(self, prefill: Prefill, fault: Fault) -> None:
        match fault.kind:
            case Kind.STOP_SHORT | Kind.STOP_LONG:
                prefill.engine.pause()
                try:
                    time.sleep(fault.seconds)
                finally:
                    prefill.engine.resume()
            case _:
                self._end(prefill, fault.kind)
                time.sleep(fault.seconds)
                prefill.begin_life(new_id=fault.kind in (Kind.KILL_NEW_ID, Kind.DRAIN_NEW_ID))

    def _end(self, prefill: Prefill, kind: Kind) -> None:
        is_ours = self._cluster.connector == "ours"
        match kind:
            case Kind.DRAIN_NEW_ID if is_ours:
                drain = by_command(prefill, self._now)
            case Kind.SIGTERM_SAME_ID if is_ours:
                drain = by_sigterm(prefill, self._now)
            case Kind.KILL_SAME_ID | Kind.KILL_NEW_ID:
                prefill.end_life(prefill.engine.kill)
                return
            case _:
                prefill.end_life(lambda: prefill.engine.stop(END_SECONDS_MAX))
                return
        if drain.problem:
            self._say(f"{prefill.engine.name} could not be drained: {drain.problem}")
        self._report.drains.append(drain)

    def _disturb(self, fault: Fault) -> None:
        from_seconds = self._now()
        if fault.kind in STRANGER_KINDS:
            is_possible = self._visit(fault)
        elif fault.kind in NETWORK_KINDS:
            is_possible = self._cluster.lose(fault.kind, fault.engine, fault.seconds)
        else:
            is_possible = self._delay_or_cut(fault)
        self._disturbances.append(Disturbance(fault.engine, from_seconds, self._now()))
        (self._faults if is_possible else self._impossible)[fault.kind.value] += 1

    def _visit(self, fault: Fault) -> bool:
        if fault.socket == CONTROL:
            address = self._cluster.control(fault.engine)
        else:
            address = self._cluster.engines[fault.engine].options.side_channel
        if address is None:
            return False
        if fault.kind is Kind.GARBAGE:
            send_garbage(address, random.Random(f"{self._plan.seed} {fault}"))
            return True
        return keep_half_open(address, fault.seconds, self._over) > 0

    def _delay_or_cut(self, fault: Fault) -> bool:
        prefill = self._cluster.prefill[fault.engine]
        proxy = prefill.proxy if fault.socket == SIDE else prefill.proxy.control
        if proxy is None:
            return False
        match fault.kind:
            case Kind.RESET:
                proxy.reset()
            case Kind.DELAY:
                proxy.delay_seconds = fault.seconds * DELAY_FRACTION
                time.sleep(fault.seconds)
                proxy.delay_seconds = 0.0
            case Kind.CUT:
                proxy.holds_back = True
                time.sleep(fault.seconds)
                proxy.holds_back = False
            case Kind.REFUSE:
                proxy.refuse()
                time.sleep(fault.seconds)
                prefill.end_refusal(proxy)
        return True

    # --- watching ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Decode engines that end are counted and started again; the memory of their workers is noted."""
        memory_at = 0.0
        while not self._over.wait(WATCH_SECONDS):
            at_seconds = self._now()
            for name, engine in self._cluster.decode.items():
                self._start_again_if_ended(name, engine)
                used = megabytes(processes(engine), WORKER)
                if at_seconds >= memory_at and used is not None:
                    self._report.memory.append(Memory(engine=name, at_seconds=round(at_seconds, 1), megabytes=used))
            if at_seconds >= memory_at:
                memory_at += MEMORY_SECONDS

    def _start_again_if_ended(self, name: str, engine: Engine) -> None:
        if _pids(engine) != self._alive[name]:
            self._report.deaths.append(f"{name}: a process ended after {self._now():.0f} s")
            engine.restart().wait_healthy()
            self._alive[name] = _pids(engine)

    def _loads(self) -> dict[str, tuple[int, Counter[str]]]:
        """Of each decode engine of ours: loads that went well, and those that failed, by kind."""
        if self._cluster.connector != "ours":
            return {}
        found: dict[str, tuple[int, Counter[str]]] = {}
        for name, engine in self._cluster.decode.items():
            with Client(engine) as client:
                page = Page.of(client)
            failed = Counter({kind: int(page[FAILED_BY_KIND, kind]) for kind in ENDING_KINDS})
            found[name] = int(page[COMPLETED]), failed
        return found

    # --- what is left -----------------------------------------------------------------------------------------------

    def _connect_all(self, when: str) -> None:
        problems = self._load.one_of_each()
        if problems and self._cluster.connector == "ours":
            self._report.left += [f"{when}, {each}" for each in problems]

    def _settled(self, when: str) -> dict[str, Processes]:
        """Wait until no engine holds anything, and say what it is if that does not come; their processes then, which
        are looked at several times: what leaks is in each look, and a connection that somebody has just opened is not.
        An engine may end now, too, of what came over it before."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(SETTLE_POLL_SECONDS)
        self._report.left += [f"{when}, {each}" for each in left]
        looks = []
        for look in range(LOOKS):
            if look:
                time.sleep(LOOK_SECONDS)
            looks.append({name: processes(engine) for name, engine in self._cluster.engines.items()})
        return {name: fewest([look[name] for look in looks]) for name in self._cluster.engines}

    def _left(self) -> list[str]:
        live = {str(each.engine.options.engine_id) for each in self._cluster.prefill.values()}
        left: list[str] = []
        for name, engine in self._cluster.decode.items():
            self._start_again_if_ended(name, engine)
        for name, engine in self._cluster.engines.items():
            try:
                with Client(engine) as client:
                    left += [f"{name}: {each}" for each in left_in_vllm(client)]
            except httpx.TransportError as error:
                left.append(f"{name}: does not answer ({error})")
                continue
            if self._cluster.connector == "ours":
                report = self._cluster.ask(name, "engine", "peers")
                left += [f"{name}: {each}" for each in left_in_connector(report, live)]
        return left

    def _compare(self, engine: str, before: Processes, after: Processes, *, worker_sockets: int = 0) -> None:
        self._report.left += [f"{engine}, {each}" for each in grown(before, after, worker_sockets=worker_sockets)]

    def _check_traces(self, ended: Mapping[str, Life]) -> None:
        """And compare the lives of prefill engines that the chaos has left, `ended`, with the ones after them, of which
        each decode engine has read once."""
        report = self._report
        written = read_processes(self._cluster.directory / "traces")
        verdict = check(written)
        report.traced = verdict.records
        report.traces_wrong = [str(each) for each in verdict.findings]
        records = merged(written)
        for name, life in ended.items():
            kept = report.sockets_kept[name] = sockets_of_reconnections(records, life, SOCKETS_OF_A_RECONNECTION)
            self._compare(name, report.processes_after[name], report.processes_ended[name], worker_sockets=kept)


def _pids(engine: Engine) -> set[int]:
    return {each.pid for each in processes(engine).values()}
