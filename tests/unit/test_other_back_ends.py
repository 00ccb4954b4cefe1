"""What is done about back ends that say of errors neither whose they are nor that anything has ended: LIBFABRIC's.

NIXL is a fake here, which does what LIBFABRIC was seen to do. `tests/conformance/test_libfabric.py` runs the real one
where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from connector.ports.nixl import MemoryRange, MemoryRun, NotificationReceived, PortReadEnded, ReadPosted
from connector.ports.nixl_agent import RealNixlPort
from connector.ports.nixl_agent.calls import CallRefused, ReadOrdered
from connector.ports.nixl_agent.core import AgentCore
from connector.ports.nixl_agent.other_back_ends import OtherBackEndCore

PACKAGE = "nixl_of_a_test"
BLOCK_BYTES, BLOCKS = 64, 8


class BackendError(Exception):
    pass


class NotFoundError(Exception):
    pass


class FakeNixl:
    """Of one agent. `states`: of each READ by its handle, in the order of the handles; an exception is raised."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.backends = dict.fromkeys(config["backends"])
        self.calls: list[str] = []
        self.states: dict[int, str | Exception] = {}
        self.released: list[int] = []
        self.notifications: list[dict[str, list[bytes]] | Exception] = []
        self.loaded: set[str] = set()

    def register_memory(self, *args: object) -> object:
        return object()

    def deregister_memory(self, *args: object) -> None: ...

    def prep_xfer_dlist(self, *args: object) -> object:
        return object()

    def release_dlist_handle(self, *args: object) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.loaded.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.loaded.remove(name)

    def make_prepped_xfer(self, *args: object) -> int:
        handle = len(self.states)
        self.states[handle] = "PROC"
        return handle

    def transfer(self, handle: int) -> str:
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: int) -> str:
        self.calls.append("check")
        state = self.states[handle]
        if isinstance(state, Exception):
            raise state
        return state

    def release_xfer_handle(self, handle: int) -> None:
        self.released.append(handle)

    def get_xfer_telemetry(self, handle: int) -> object:
        return SimpleNamespace(xferDuration=1, postDuration=1)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.calls.append("notifications")
        found = self.notifications.pop(0) if self.notifications else {}
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def package() -> Iterator[None]:
    api = ModuleType(f"{PACKAGE}._api")
    api.__dict__.update(
        nixl_agent=FakeNixl,
        nixl_agent_config=lambda **given: given,
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_RW=1),
        nixlBind=SimpleNamespace(nixlNotFoundError=NotFoundError, nixlRemoteDisconnectError=ConnectionError),
    )
    sys.modules |= {PACKAGE: ModuleType(PACKAGE), api.__name__: api}
    yield
    del sys.modules[PACKAGE], sys.modules[api.__name__]


@pytest.fixture
def core() -> OtherBackEndCore:
    """With a peer, and a list on each side; its first READ is over."""
    memory = np.zeros(BLOCK_BYTES * BLOCKS, dtype=np.uint8)
    ranges = [MemoryRange(memory.ctypes.data, memory.nbytes)]
    core = OtherBackEndCore("d", ranges, ["LIBFABRIC"], 0, None, PACKAGE, None, memory)
    run = MemoryRun(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)
    core.prepare(1, None, [run])
    core.add_remote_agent(b"p")
    core.prepare(2, "p", [run])
    nixl(core).states[0] = "DONE"
    core.poll_reads()
    assert nixl(core).released == [0]
    return core


def nixl(core: AgentCore) -> FakeNixl:
    found = core._agent
    assert isinstance(found, FakeNixl)
    return found


def post(core: AgentCore, handle: int, blocks: int) -> int:
    """NIXL's handle of a READ of so many blocks."""
    ids = np.arange(blocks, dtype=np.int32)
    before = len(nixl(core).states)
    assert core.post_read(ReadOrdered(handle, 1, ids, 2, ids)) == ReadPosted(handle)
    return before


@pytest.mark.parametrize("blocks", [1, 3])
def test_an_error_is_no_end_of_a_read(core: OtherBackEndCore, blocks: int, caplog: pytest.LogCaptureFixture) -> None:
    transfer = post(core, 7, blocks)
    nixl(core).states[transfer] = BackendError("NIXL_ERR_BACKEND")
    for _ in range(5):
        assert core.poll_reads() == []
    assert list(core.reads) == [7]
    assert core.errored == {}
    assert transfer not in nixl(core).released
    assert len([each for each in caplog.messages if "may be of any READ in flight" in each]) == 3  # 1st, 2nd, 4th


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_read_is_done_when_nixl_says_so(core: OtherBackEndCore, blocks: int) -> None:
    """And nothing of it is read twice."""
    transfer = post(core, 7, blocks)
    nixl(core).states[transfer] = "DONE"
    (ended,) = core.poll_reads()
    assert isinstance(ended, PortReadEnded)
    assert (ended.error, ended.quiescent, ended.descriptors) == (None, True, blocks)
    core.tidy()
    assert transfer in nixl(core).released
    assert core.reads == {}


def test_a_read_whose_post_has_failed_may_be_on_its_way(core: OtherBackEndCore) -> None:
    """Some of its parts may have been handed over."""
    fake, ids = nixl(core), np.arange(2, dtype=np.int32)
    make = fake.make_prepped_xfer

    def make_broken(*args: object) -> int:
        handle = make(*args)
        fake.states[handle] = BackendError("not connected")
        return handle

    fake.make_prepped_xfer = make_broken  # type: ignore[method-assign]
    assert core.post_read(ReadOrdered(7, 1, ids, 2, ids)) == ReadPosted(7)
    fake.states |= dict.fromkeys(fake.states, "DONE")
    assert core.poll_reads() == []
    assert list(core.reads) == [7]


def test_an_error_that_is_met_by_a_poll_for_notifications_costs_nothing(core: OtherBackEndCore) -> None:
    """It comes first, so that errors are met there and not where they would be a READ's."""
    transfer = post(core, 7, 2)
    fake = nixl(core)
    fake.calls.clear()
    fake.notifications = [BackendError("of somebody's READ"), {"p": [b"said"]}]
    assert core.poll_reads() == []
    assert fake.calls[:2] == ["notifications", "check"]
    assert core.poll_notifications() == [NotificationReceived("p", b"said")]
    fake.states[transfer] = "DONE"
    (ended,) = core.poll_reads()
    assert isinstance(ended, PortReadEnded)


def test_an_agent_that_was_loaded_stays_loaded(core: OtherBackEndCore) -> None:
    core.remove_remote_agent("p")
    assert core.agents == set()
    assert nixl(core).loaded == {"p"}
    with pytest.raises(CallRefused, match="was removed"):
        core.post_read(ReadOrdered(7, 1, np.zeros(1, np.int32), 2, np.zeros(1, np.int32)))
    assert core.add_remote_agent(b"p") == "p"
    assert list(core.agents) == ["p"]


def test_a_first_read_in_doubt_keeps_the_agent() -> None:
    memory = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    core = OtherBackEndCore(
        "d", [MemoryRange(memory.ctypes.data, memory.nbytes)], ["LIBFABRIC"], 0, None, PACKAGE, None, memory
    )
    core.add_remote_agent(b"p")
    core.prepare(2, "p", [MemoryRun(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, 1)])
    nixl(core).states[0] = BackendError("of somebody's READ")
    core.poll_reads()
    assert core.first_reads == {}
    assert nixl(core).released == []
    core.destroy()
    assert core.registered_ranges == 1, "nothing is taken apart"


@pytest.mark.parametrize(
    ("backends", "kind"), [(("UCX",), AgentCore), (("UCX", "GDS"), AgentCore), (("LIBFABRIC",), OtherBackEndCore)]
)
def test_which_back_ends_are_meant(backends: tuple[str, ...], kind: type[AgentCore]) -> None:
    memory = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    port = RealNixlPort.open("d", [MemoryRange(memory.ctypes.data, memory.nbytes)], backends, package=PACKAGE)
    try:
        assert type(port._core) is kind
    finally:
        port.close_blocking(1.0)
