"""What a decode engine keeps of peers that have come and gone: nothing. The short form of `tests/actors/churn.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.actors.churn import PEERS_PER_PROCESS, Figures, Manner

ROOT = Path(__file__).parents[2]
PEERS = len(Manner) * PEERS_PER_PROCESS
GROWTH_MAX = 2
"""Of descriptors and threads: those that come and go in this process anyway. One of each peer would be 60."""
RESIDENT_GROWTH_BYTES_MAX = 16 << 20
"""What an allocator keeps at hand varies by some megabytes; a peer has 9 MB while it lives in a process of its own."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sixty_peers_that_come_and_go_leave_nothing() -> None:
    """Scenarios 13, 47, 48, 49 and 50: they are killed, also under READs, restarted with their id, replaced at their
    address, or shut down; nobody says so."""
    command = [sys.executable, "-m", "tests.actors.churn", "--json", "--peers", str(PEERS)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=350)
    (line,) = (line for line in said.stdout.splitlines() if line.startswith("@"))
    figures = msgspec.json.decode(line[1:], type=Figures)
    before, after = figures.before, figures.after
    assert figures.peers == PEERS
    assert figures.forgotten >= PEERS - PEERS_PER_PROCESS  # those that came back with their id are the same for D
    assert figures.ends["done"] >= PEERS
    assert set(figures.ends) <= {"done", "ConnectionRefused", "PeerBackoff", "TransferError", "ControlLinkLost"}
    assert (after.peers, after.port.remote_agents, after.port.reads) == (0, 0, 0)
    assert after.port == before.port
    assert after.descriptors <= before.descriptors + GROWTH_MAX
    assert after.sockets <= before.sockets + GROWTH_MAX
    assert after.threads <= before.threads + GROWTH_MAX
    assert after.resident_bytes <= before.resident_bytes + RESIDENT_GROWTH_BYTES_MAX
