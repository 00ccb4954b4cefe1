"""Hosts and ports as text."""

from __future__ import annotations

import pytest

from connector.addresses import is_all_interfaces, is_loopback, join_address, split_address
from connector.protocol import PeerAddress


@pytest.mark.parametrize(
    ("host", "written"),
    [("prefill-0", "prefill-0:5600"), ("10.0.0.1", "10.0.0.1:5600"), ("fd00::1", "[fd00::1]:5600")],
)
def test_an_address_is_written_as_it_is_read(host: str, written: str) -> None:
    assert join_address(host, 5600) == str(PeerAddress(engine_id="p", host=host, port=5600, tp_size=1)) == written
    assert split_address(written) == (host, 5600)
    assert join_address("[fd00::1]", 5600) == "[fd00::1]:5600", "as an option may have it"


@pytest.mark.parametrize(
    ("host", "of_this_machine", "of_all_interfaces"),
    [
        ("localhost", True, False),
        ("127.0.0.2", True, False),
        ("[::1]", True, False),
        ("0.0.0.0", False, True),
        ("[::]", False, True),
        ("*", False, True),
        ("10.0.0.1", False, False),
        ("prefill-0", False, False),
    ],
)
def test_hosts_that_do_not_lead_to_another_machine(host: str, of_this_machine: bool, of_all_interfaces: bool) -> None:
    assert (is_loopback(host), is_all_interfaces(host)) == (of_this_machine, of_all_interfaces)
