"""Where a worker's control socket listens, that peers are told an address at which it does, and its port."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from vllm.config import ParallelConfig
from vllm.v1.executor.ray_env_utils import get_driver_env_vars
from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

from connector import own_address
from connector.config import ConnectorOptions, OptionError, parse_options
from connector.ports.side_channel import Listener, SideChannelError
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.wire.control import HeldLease, Hold, HoldAnswer, decode_answer, decode_request, encode_answer
from connector.wire.control import encode_request as encode_control
from connector.worker import control_socket
from connector.worker.control_socket import (
    control_port,
    listening_host,
    open_control_socket,
    require_control_ports,
)
from statemachine.failures import Failure
from statemachine.lease import LeaseName
from tests.rig.network import BlackHole, free_port

ELSEWHERE = "203.0.113.7"  # reserved for documentation: nobody's
OWN_ADDRESS = "198.51.100.7"
HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"


def _refuse_failure(subject: str, failure: Failure) -> None:
    raise AssertionError(f"{subject}: {failure}")


def opened(monkeypatch: pytest.MonkeyPatch, host: str, own_address: str = "127.0.0.1", port: int = 0) -> HoldAnswer:
    """Open it at this host; the answer to a question at the address that peers are told."""
    monkeypatch.setattr(control_socket, "get_ip", lambda: own_address)
    # The largest message that there is: as many leases as fit in one, with long names.
    leases = tuple(LeaseName(f"{number:0512d}", 1) for number in range(512))
    asked = Hold(engine_id="d", rank=0, ranks=1, sent_ns=3, leases=leases)

    async def serve(listener: Listener) -> None:
        request = await listener.receive()
        message = decode_request(request.frames_untrusted)
        assert isinstance(message, Hold)
        held = tuple(HeldLease(*lease, remaining_ns=9) for lease in message.leases)
        listener.reply(request.reply_address, encode_answer(HoldAnswer(sent_ns=message.sent_ns, held=held)))

    async def main() -> HoldAnswer:
        channel = ZmqSideChannel()
        try:
            told, listener = open_control_socket(channel, host, _refuse_failure, port)
            assert port in (0, listener.port)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener)
                with trio.fail_after(30):
                    answer = decode_answer(await channel.connect(told, listener.port).ask(encode_control(asked)))
            assert isinstance(answer, HoldAnswer)
            assert len(answer.held) == len(leases)
            return msgspec.structs.replace(answer, held=answer.held[:1])
        finally:
            channel.close()

    return trio.run(main)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ELSEWHERE])
def test_it_listens_where_peers_are_told(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """A worker on another machine than the scheduler process inherits an address that is not its own."""
    answer = opened(monkeypatch, host)
    assert answer.sent_ns == 3
    assert answer.held[0].remaining_ns == 9


@pytest.mark.parametrize("variable", ["0.0.0.0", "::", "*"])
def test_who_listens_at_all_interfaces_says_one_of_them(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Another machine that tried to connect to all interfaces would reach itself."""
    monkeypatch.setattr(own_address, "get_ip", lambda: "127.0.0.7")

    async def main() -> None:
        channel = ZmqSideChannel()
        try:
            host, listener = open_control_socket(channel, variable, _refuse_failure)
            assert host == "127.0.0.7"
            with socket.create_connection((host, listener.port), timeout=30):
                pass
        finally:
            channel.close()

    trio.run(main)


def test_an_engine_without_an_address_of_its_own_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SideChannelError):
        opened(monkeypatch, ELSEWHERE, own_address=ELSEWHERE)


@pytest.mark.parametrize("host", ["127.0.0.1", ELSEWHERE])
def test_it_listens_at_the_port_that_was_chosen(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    assert opened(monkeypatch, host, port=free_port()).sent_ns == 3


@pytest.mark.parametrize("host", ["127.0.0.1", ELSEWHERE])
def test_a_port_that_is_taken_is_an_error_of_the_option(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """And no reason to listen at another address, where nobody was told to look."""
    own_address = "127.0.0.1" if host == ELSEWHERE else "127.0.0.2"
    with BlackHole() as other:
        said = rf"port {other.port}, .* 127\.0\.0\.1 .*in use"
        with pytest.raises(OptionError, match=said) as taken:
            opened(monkeypatch, host, own_address, other.port)
    assert taken.value.option == "control_port"


# --- addresses --------------------------------------------------------------------------------------------------------


def environment_of_a_worker(monkeypatch: pytest.MonkeyPatch, parallel: ParallelConfig) -> None:
    """Of an engine at ELSEWHERE, for which nobody but the scheduler process knows it: as vLLM's executors make it."""
    monkeypatch.setenv(HOST, ELSEWHERE)
    handed_on = get_driver_env_vars(WORKER_SPECIFIC_ENV_VARS) if parallel.use_ray else {}
    monkeypatch.delenv(HOST)
    if HOST in handed_on:
        monkeypatch.setenv(HOST, handed_on[HOST])


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        (ParallelConfig(), "localhost"),
        (ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp"), "localhost"),
        (ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="ray"), OWN_ADDRESS),
        (ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp", nnodes=2), OWN_ADDRESS),
    ],
    ids=["one process", "processes", "actors of Ray", "two nodes"],
)
def test_a_worker_that_is_not_told_its_engines_address_listens_where_others_can_connect(
    parallel: ParallelConfig, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "get_ip", lambda: OWN_ADDRESS)
    environment_of_a_worker(monkeypatch, parallel)
    assert listening_host(parallel) == expected
    monkeypatch.setenv(HOST, ELSEWHERE)
    assert listening_host(parallel) == ELSEWHERE


# --- ports ------------------------------------------------------------------------------------------------------------


def of(**sizes: int) -> Any:
    """What these functions look at of a configuration."""
    every = {
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }
    return SimpleNamespace(parallel_config=SimpleNamespace(**(every | sizes)))


def chosen(first: int) -> ConnectorOptions:
    return parse_options({"control_port": first}, {})


SIZES: list[tuple[dict[str, int], int]] = [
    ({}, 1),
    ({"tensor_parallel_size": 4}, 4),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
    ({"prefill_context_parallel_size": 4}, 1),
    ({"prefill_context_parallel_size": 4, "decode_context_parallel_size": 4}, 4),
    ({"tensor_parallel_size": 4, "decode_context_parallel_size": 4}, 4),
]


@pytest.mark.parametrize(("sizes", "ranks"), SIZES, ids=str)
def test_every_rank_of_every_engine_has_a_port_of_its_own(sizes: dict[str, int], ranks: int) -> None:
    """One after another, as the documentation of the option says."""
    ports = [
        control_port(of(**sizes, data_parallel_size=3, data_parallel_index=engine), chosen(7000), rank)
        for engine in range(3)
        for rank in range(ranks)
    ]
    assert ports == list(range(7000, 7000 + 3 * ranks))


def test_any_port_unless_one_is_chosen() -> None:
    assert control_port(of(data_parallel_index=3), parse_options({}, {}), 7) == 0
    require_control_ports(of(data_parallel_size=70_000), parse_options({}, {}))


def test_a_range_that_ends_behind_the_last_port_is_refused() -> None:
    many = of(tensor_parallel_size=8, data_parallel_size=4)
    require_control_ports(many, chosen(65_535 - 31))
    with pytest.raises(OptionError, match=r"\(65505\).*4 data-parallel engines of 8 ranks: 65536 is above") as refused:
        require_control_ports(many, chosen(65_535 - 30))
    assert refused.value.option == "control_port"


def test_an_engine_that_knows_of_no_others_counts_them_by_its_index() -> None:
    """vLLM sets the size to 1 for models without experts, and leaves the index."""
    with pytest.raises(OptionError):
        require_control_ports(of(data_parallel_index=5), chosen(65_531))
    require_control_ports(of(data_parallel_index=5), chosen(65_530))


@pytest.mark.parametrize(("first", "clashes"), [(5596, False), (5597, True), (5601, True), (5602, False)])
def test_a_range_with_the_ports_of_the_side_channels_is_refused(
    monkeypatch: pytest.MonkeyPatch, first: int, clashes: bool
) -> None:
    """Two engines of two ranks have four control sockets, and two side channels at 5600 and 5601."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    two = of(data_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(OptionError, match="VLLM_NIXL_SIDE_CHANNEL_PORT") if clashes else nullcontext():
        require_control_ports(two, chosen(first))
