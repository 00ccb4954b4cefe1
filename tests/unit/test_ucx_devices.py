"""What UCX opens, read from the log of a real agent; and from a table with devices that this machine may not have."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from connector.tools import ucx_devices
from connector.tools.ucx_devices import NETWORK, Opened, Transport, open_as, opened_for
from tests.unit.test_diagnosis import engine

TABLE = """
[1] [h:1]   ucp_context.c  UCX  WARN  transport 'ugni' is not available
[1] [h:1]   | Available Transports and Devices (ctx: devices)                          |
[1] [h:1]   +------------+-----------+-----------+-------------------------------------+
[1] [h:1]   | Type       | Component | Transport | Device (System device)              |
[1] [h:1]   +------------+-----------+-----------+-------------------------------------+
[1] [h:1]   | network    | mlx5_0    | + rc_mlx5 | + mlx5_0:1 (mlx5_0)  - mlx5_1:1     |
[1] [h:1]   |            |           |           | + mlx5_2:1 (mlx5_2)                 |
[1] [h:1]   |            |           | - ud_mlx5 | + mlx5_0:1 (mlx5_0)                 |
[1] [h:1]   |            +-----------+-----------+-------------------------------------+
[1] [h:1]   |            | tcp       | + tcp     | - eth0                              |
[1] [h:1]   | accelerator| cuda_cpy  | + cuda_copy | + cuda                            |
[1] [h:1]   | Legend: + = enabled, - = disabled                                        |
[1] [h:1]   | cfg        | other     | + table   | + device                            |
"""


PATIENCE_SECONDS = 200.0
"""For an agent that is made in a process of its own, on a machine that has other things to do."""


def test_a_table_with_devices_of_many_kinds() -> None:
    assert tuple(ucx_devices._used(TABLE)) == (
        Transport("network", "rc_mlx5", ("mlx5_0:1", "mlx5_2:1")),
        Transport("accelerator", "cuda_copy", ("cuda",)),
    )
    assert tuple(ucx_devices._used("nothing of the kind")) == ()


def test_what_ucx_opens_here_follows_the_variables_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self")  # of this process, which is not the engine's
    variables = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_LOG_FILE": "/nowhere/at/all"}
    opened = open_as(variables, PATIENCE_SECONDS)
    assert opened.of_kind(NETWORK) == (Transport("network", "tcp", ("lo",)),)
    assert (opened.complaints, opened.problem) == ((), "")


def test_what_ucx_says_of_a_device_that_is_not_there() -> None:
    opened = open_as({"UCX_NET_DEVICES": "no-such-device"}, PATIENCE_SECONDS)
    assert any("'no-such-device' is not available" in each for each in opened.complaints)


def test_ucx_that_does_not_answer_in_time() -> None:
    assert open_as({}, seconds=0.001).problem == "no answer within 0.001 s; is the machine busy?"


def test_only_engines_of_this_machine_are_tried_and_the_same_variables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def opened(environment: Any) -> Opened:
        tried.append(environment)
        return Opened((Transport("network", "tcp", ("lo",)),))

    monkeypatch.setattr(ucx_devices, "open_as", opened)
    here = {"host_name": socket.gethostname(), "environment": {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "INFO"}}
    engines = [
        engine("a", **here),
        engine("bb", **(here | {"environment": {"UCX_TLS": "tcp"}})),
        engine("ccc", **(here | {"environment": {}})),
        engine("dddd", **(here | {"backends": ("LIBFABRIC",)})),
        engine("eeeee", host_name="another"),
        replace(engine("ffffff"), ranks=()),
    ]
    assert set(opened_for(engines)) == {("a", 0), ("bb", 0), ("ccc", 0)}
    assert len(tried) == 2
