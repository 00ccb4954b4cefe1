"""A network that loses what is sent: real engines on machines of their own, with a router between them that drops it.

Nobody is told: no connection is refused or reset, as when a cable is pulled, a switch or a machine has lost its power,
or a firewall has a new rule. The READs go over UCX's TCP, so what becomes of them afterwards is the kernel's matter: it
sends again after pauses that double, up to two minutes.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from connector.addresses import join_address
from tests.integration.house import SHAPE, check_loaded, wait_for_reads
from tests.integration.traces import Traces
from tests.rig import OURS, EngineOptions, EngineRig, RequestOutcome, RequestSpec, free_port, prompt
from tests.rig.lan import Lan, NoNetworks, Way

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CONTROL_PORT = 5700
LEASE_SECONDS = 12.0
REQUEST_SECONDS = 10.0
QUIESCE_SECONDS = 2.0
PAUSE_SECONDS_MAX = 60.0
"""After attempts that failed in a row."""
ATTEMPTS = 5
"""While the network is away. Those that follow make the pauses longer still."""
IN_VAIN_MAX = 10
"""A second of them; the pauses have grown to many seconds by then."""
BOUND_SECONDS = REQUEST_SECONDS + QUIESCE_SECONDS + 1.5 * LEASE_SECONDS
TOLERANCE_SECONDS = 15.0
"""What a busy machine may stretch a time limit by; it tells an end from none."""
SENT_AGAIN_SECONDS = 125.0
"""The longest pause of the kernel before it sends what was lost again, and some."""
TOKENS = 300


class Machines:
    """Two prefill engines, `p` and `other`, and a decode engine `d`, each on a machine of its own."""

    def __init__(self, stack: ExitStack, directory: Path, lan: Lan) -> None:
        self.lan = lan
        self.traces = Traces(directory / "traces")
        self._stack, self._directory = stack, directory
        self._names = itertools.count()
        self.p, self.other, self.d = (self._start(name) for name in ("p", "other", "d"))
        for engine in (self.p, self.other, self.d):
            engine.wait_ready()

    def restart_p(self) -> None:
        """Another process at its address, under another id."""
        self.p = self._start("p")
        self.p.wait_ready()

    @property
    def control_ports(self) -> tuple[int, ...]:
        """All that is said between `p` and `d`, READs apart."""
        return CONTROL_PORT, self.p.options.side_channel_port

    def _start(self, name: str) -> EngineRig:
        machine = self.lan.machines[name]
        options = EngineOptions(
            OURS,
            "kv_consumer" if name == "d" else "kv_producer",
            free_port(),
            side_channel_host=machine.address,
            extra_config={
                "control_port": CONTROL_PORT,
                "kv_lease_duration": LEASE_SECONDS,
                "handshake_timeout_seconds": 5.0,
                "request_timeout_seconds": REQUEST_SECONDS,
                "quiesce_timeout_seconds": QUIESCE_SECONDS,
                "backoff_initial_seconds": 0.2,
                "backoff_max_seconds": PAUSE_SECONDS_MAX,
                "trace_directory": str(self._directory / "traces"),
            },
            machine=machine.process,
            environment={"UCX_TLS": "tcp,self"},
            **SHAPE,
        )
        return self._stack.enter_context(EngineRig(options, self._directory))

    def new(self, tokens: int = TOKENS) -> tuple[str, list[int]]:
        """A name and a prompt that nothing was called so far."""
        name = f"r{next(self._names)}"
        return name, prompt(name, tokens)

    def read(self, prefill: EngineRig) -> tuple[str, RequestOutcome]:
        """One prompt from there, of one block: the leases of many that fail fit into P's pool."""
        name, tokens = self.new(20)
        return name, self.d.decode(name, tokens, prefill.prefill(name, tokens))

    def meet_p(self) -> tuple[int, str]:
        """`nixl-actor meet` with `d` and `p`; its status and what it says."""
        where = self.lan.machines["d"].process
        options = (self.d.options, self.p.options)
        places = [join_address(each.side_channel_host, each.side_channel_port) for each in options]
        nixl_actor = str(Path(sys.executable).with_name("nixl-actor"))
        command = ["nsenter", f"--net=/proc/{where}/ns/net", nixl_actor, "meet", *places]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout

    def expect_read(self, prefill: EngineRig) -> None:
        name, tokens = self.new()
        check_loaded(self.d.decode(name, tokens, prefill.prefill(name, tokens)), tokens)

    def reason(self, name: str) -> str | None:
        """Why it has failed."""
        return self.traces.reason(name)

    def wait_until_read(self, seconds: float) -> int:
        """Until `p` is read again, asked ten times a second; returns how often it was not although no READ was left."""
        started, in_vain = time.monotonic(), 0
        while True:
            holdings = self.d.inspect().holdings
            _, outcome = self.read(self.p)
            if outcome.received:
                return in_vain
            assert time.monotonic() < started + seconds, f"not read within {seconds} s"
            in_vain += holdings is not None and not holdings.reads
            time.sleep(0.1)

    def wait_until_whole(self, seconds: float) -> None:
        """No request open and every block free, on all of them. They hear of it in a step, so there must be some."""
        for engine in (self.d, self.p, self.other):
            engine.wait_until_whole(seconds)


@pytest.fixture(scope="module", params=[4, 6], ids=["IPv4", "IPv6 only"])
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with ExitStack() as stack:
        try:
            lan = stack.enter_context(Lan("p", "other", "d", version=request.param))
        except NoNetworks as reason:
            pytest.skip(f"no network can be made here: {reason}")
        yield Machines(stack, tmp_path_factory.mktemp("networks"), lan)


@pytest.fixture(autouse=True)
def whole_network(machines: Machines) -> Iterator[None]:
    """Before and after each test."""
    machines.expect_read(machines.p)
    machines.expect_read(machines.other)
    yield
    machines.lan.heal()
    machines.wait_until_read(SENT_AGAIN_SECONDS)
    machines.wait_until_whole(LEASE_SECONDS + TOLERANCE_SECONDS)


def test_reads_cross_the_network(machines: Machines) -> None:
    """Also where nothing has an address of IPv4."""
    names = [machines.new() for _ in range(4)]
    params = machines.p.prefill_all(dict(names))
    machines.d.submit(*(RequestSpec(name, tokens, 1, params[name]) for name, tokens in names))
    for outcome in machines.d.wait_all([name for name, _ in names]):
        check_loaded(outcome, dict(names)[outcome.request_id])


@pytest.mark.parametrize("way", ["both ways", "there", "back"])
def test_what_is_lost_costs_its_own_requests_and_those_in_bounded_time(machines: Machines, way: Way) -> None:
    """From `p` to `d`, or back. Whoever reads from another engine notices nothing."""
    name, tokens = machines.new()
    params = machines.p.prefill(name, tokens)
    machines.lan.cut("p", "d", way)
    machines.d.submit(RequestSpec(name, tokens, 1, params))
    started = time.monotonic()
    while not machines.d.has_ended(name):
        machines.expect_read(machines.other)
        assert time.monotonic() < started + BOUND_SECONDS + TOLERANCE_SECONDS, "it waits for ever"
    assert machines.d.wait(name).finish == "error"
    assert machines.reason(name) in ("PeerSilent", "Quarantined", "DeadlineExceeded", "LeaseNotProven")


def test_an_engine_whose_memory_cannot_be_reached_costs_no_blocks_and_holds_up_nobody(machines: Machines) -> None:
    """As where a firewall drops what goes to the ports of UCX: all else gets through, and D has never read from it."""
    machines.p.kill()
    machines.restart_p()
    machines.lan.cut("p", "d", but_ports=machines.control_ports)
    refused = Counter[str | None]()
    while refused["FirstReadNeverEnded"] < 2:
        name, tokens = machines.new(20)
        machines.d.submit(RequestSpec(name, tokens, 1, machines.p.prefill(name, tokens)))
        while not machines.d.has_ended(name):
            machines.expect_read(machines.other)
        assert machines.d.wait(name).finish == "error"
        refused[machines.reason(name)] += 1
        holdings = machines.d.inspect().holdings
        assert holdings is not None
        assert holdings.reads == 0
    assert set(refused) <= {"FirstReadNeverEnded", "PeerBackoff"}
    status, said = machines.meet_p()
    assert status == 1
    assert re.search(r"FirstReadNeverEnded|PeerBackoff.*\(FirstReadNeverEnded\)", said), said
    machines.lan.heal()
    machines.wait_until_read(PAUSE_SECONDS_MAX + TOLERANCE_SECONDS)


def test_reads_that_the_network_swallows_are_waited_for_and_p_is_read_again_when_they_have_ended(
    machines: Machines,
) -> None:
    """What is said about leases gets through, so `p` is known to be well. As long as a READ may still write nobody else
    gets the blocks, and no connection is made over it; with its end both are possible at once, however long the pause
    between attempts has become."""
    name, tokens = machines.new()
    params = machines.p.prefill(name, tokens)
    machines.lan.cut("p", "d", but_ports=machines.control_ports)
    machines.d.submit(RequestSpec(name, tokens, 1, params))
    assert machines.d.wait(name).finish == "error"
    assert machines.reason(name) in ("Quarantined", "ReadNeverEnded")
    refused = Counter[str | None]()
    while refused["PreviousReadsInFlight"] < ATTEMPTS:
        other, outcome = machines.read(machines.p)
        assert outcome.finish == "error"
        refused[machines.reason(other)] += 1
    assert set(refused) <= {"PreviousReadsInFlight", "PeerBackoff", "ReadNeverEnded"}
    machines.expect_read(machines.other)
    machines.lan.heal()
    assert machines.wait_until_read(SENT_AGAIN_SECONDS) <= IN_VAIN_MAX


def test_another_process_in_the_place_of_a_machine_that_lost_its_power_is_read_at_once(machines: Machines) -> None:
    """With a READ in flight, of which nobody says that it is over."""
    name, tokens = machines.new()
    params = machines.p.prefill(name, tokens)
    machines.lan.cut("p", "d", but_ports=machines.control_ports)
    machines.d.submit(RequestSpec(name, tokens, 1, params))
    wait_for_reads(machines.d, 1)
    machines.lan.cut("p", "d")  # the end of its process is not seen either
    machines.p.kill()
    machines.lan.heal()
    machines.restart_p()
    machines.expect_read(machines.p)
    assert machines.d.wait(name).finish == "error"
