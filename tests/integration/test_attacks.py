"""Strangers attack a prefill engine over real TCP, and a decode engine pulls from it all the time.

A short form of `make attack` (`tests/attack/__main__.py`), whose figures are in docs/performance.md. Limits here are
generous: the attackers, the engines and other tests share the cores.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attack.attackers import kinds
from tests.attack.scene import Scene, scene

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CONNECTIONS = 5_000
"""More than a listener has."""
RATIO_MAX = 5.0
SLACK_SECONDS = 0.1
MEMORY_MAX = 400 << 20
"""That one attack may add: 4,096 connections take 50 KB each, unfinished messages 256 MiB together if all of their
frames are empty (8 MiB on the wire), and what comes before they are measured is more."""
DESCRIPTORS_MAX = 5_000
LEFT_MAX = 200
"""Descriptors after an attack."""

ATTACKS = (
    "idle connections",
    "half a message",
    "come and go",
    "handshakes, unread",
    "garbage, control",
    "holds",
    "small holds",
    "large holds",
    "questions",
    "meets, spread",
    "oversize frames",
    "endless messages",
    "endless messages, empty frames",
    "many frames",
    "many frames, side channel",
    "many frames, spread",
)
DEAFENING = ("many frames, spread",)
"""Each of its messages keeps everybody waiting while it is dropped, and the next one comes from an address that is not
shut out: how many pulls meet one is a matter of how often the attackers get a core."""
PULL_SECONDS_MAX = 30.0
"""Of a pull meanwhile; the engines would wait for longer than this."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("attacks")) as made:
        yield made


@pytest.mark.parametrize("name", ATTACKS)
def test_pulls_go_on_under_attack(engines: Scene, name: str) -> None:
    """Scenarios 38 and 43: answers or drops, bounded memory, and whoever has business here is served."""
    outcome = engines.attack(name, connections=CONNECTIONS, rounds=3)
    tally = outcome.tally
    assert not tally.problem
    assert tally.connections, tally
    assert tally.tried > kinds()[name].begun, tally
    assert outcome.during.failed == 0
    assert outcome.handshakes.failed == 0
    assert outcome.calm.failed == 0
    if name in DEAFENING:
        assert max(outcome.during.seconds) <= PULL_SECONDS_MAX
    else:
        assert outcome.during.median <= outcome.calm.median * RATIO_MAX + SLACK_SECONDS
    before, most, _ = outcome.memory
    assert most - before <= MEMORY_MAX
    most_files, files = outcome.descriptors
    assert most_files <= DESCRIPTORS_MAX
    assert files <= LEFT_MAX


def test_every_attack_is_on_a_socket_of_the_engine(engines: Scene) -> None:
    targets = {engines.target(name) for name in kinds()}
    assert targets == {engines.side_channel, engines.control}


def test_the_log_has_few_lines_and_no_traceback(engines: Scene) -> None:
    """After everything above."""
    log = engines.prefill.log_path.read_text()
    assert "Traceback" not in log
    assert len(log.splitlines()) < 500
