"""What a decode engine keeps of peers that have come and gone: nothing. The short form of `tests/actors/churn.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connector.ports.nixl import PortCounts
from tests.actors.churn import GROWTH_BYTES_MAX, PEERS_PER_PROCESS, Figures, Held, Manner

ROOT = Path(__file__).parents[2]
PEERS = len(Manner) * PEERS_PER_PROCESS
PORT = PortCounts(remote_agents=0, descriptor_lists=1, reads=0, registered_ranges=1)
HELD = Held(descriptors=40, sockets=11, threads=7, resident_bytes=1 << 28, port=PORT, peers=0)
FIGURES = Figures(
    peers=PEERS,
    by_manner=dict.fromkeys((manner.name for manner in Manner), PEERS_PER_PROCESS),
    forgotten=PEERS - PEERS_PER_PROCESS,
    ends={"done": PEERS - PEERS_PER_PROCESS, "ControlLinkLost": PEERS_PER_PROCESS},
    before=HELD,
    after=HELD,
    peers_of_a_round=PEERS,
    grown_bytes=(PEERS * GROWTH_BYTES_MAX,),
)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", [[], ["--tcp"]], ids=["memory", "tcp"])
def test_peers_that_come_and_go_leave_nothing(transport: list[str]) -> None:
    """Scenarios 13, 47, 48, 49 and 50: they are killed, also under READs, restarted with their id, replaced at their
    address, or shut down, also in part; nobody says so."""
    command = [sys.executable, "-m", "tests.actors.churn", "--peers", str(PEERS), *transport]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert said.returncode == 0, f"{said.stdout}\n{said.stderr}"


def changed(**changes: Any) -> Figures:
    return msgspec.structs.replace(FIGURES, **changes)


def holding(**changes: Any) -> Figures:
    return changed(after=msgspec.structs.replace(HELD, **changes))


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (FIGURES, ""),
        (holding(descriptors=39, sockets=10, threads=6), ""),
        (holding(descriptors=41), "41 descriptors, not 40"),
        (holding(sockets=12), "12 sockets, not 11"),
        (holding(threads=8), "8 threads, not 7"),
        (holding(peers=1), "1 peers"),
        (holding(port=PortCounts(1, 1, 0, 1)), "remote_agents=1"),
        (holding(port=PortCounts(0, 2, 0, 1)), "descriptor_lists=2"),
        (changed(forgotten=PEERS - PEERS_PER_PROCESS - 1), "peers given up"),
        (changed(ends={"done": PEERS - PEERS_PER_PROCESS - 1}), "READs done"),
        (changed(ends=FIGURES.ends | {"ActorCrashed": 1}), "1 requests ended as ActorCrashed"),
        (changed(grown_bytes=(PEERS * GROWTH_BYTES_MAX + 1,)), "memory grew"),
        (changed(grown_bytes=(PEERS * GROWTH_BYTES_MAX + 1, 0)), ""),
    ],
    ids=str,
)
def test_the_exit_status_judges_all_that_is_counted(figures: Figures, said: str) -> None:
    assert said in " ".join(figures.left)
    assert len(figures.left) == bool(said)
