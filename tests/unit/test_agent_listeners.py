"""Which listeners of a process are taken for UCX's, and when one of them counts as lost."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from connector.ports.nixl_agent.listeners import listening, lost, of_agent


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_with(port: int, before: int = 0x82) -> bytes:
    return b"\x20 some of it " + bytes([before, *port.to_bytes(2, "big")]) + b" the rest"


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


@pytest.mark.parametrize("before", [0x02, 0x82, 0x42])
def test_a_new_listener_whose_port_is_in_the_address_is_of_the_agent(before: int) -> None:
    there_before = listening()
    with socket.create_server(("127.0.0.1", 0)) as server:
        (found,) = of_agent(there_before, address_with(port_of(server), before))
        assert (found.descriptor, found.port) == (server.fileno(), port_of(server))


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_every_family_counts(family: socket.AddressFamily) -> None:
    there_before = listening()
    with socket.socket(family) as server:
        server.bind(("", 0))
        server.listen()
        assert [each.port for each in of_agent(there_before, address_with(port_of(server)))] == [port_of(server)]


def test_a_listener_that_another_thread_has_opened_is_not(server: socket.socket) -> None:
    """Also if its port happens to be among the bytes of the address, but not where ports are."""
    assert of_agent((), address_with(port_of(server) ^ 1)) == ()
    assert of_agent((), address_with(port_of(server), before=0x37)) == ()
    assert of_agent((), None) == of_agent((), b"") == ()


def test_a_listener_that_was_there_before_is_not(server: socket.socket) -> None:
    assert of_agent(listening(), address_with(port_of(server))) == ()


def test_sockets_that_do_not_listen_are_none() -> None:
    with socket.socketpair()[0] as one, socket.socket() as bound, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        bound.bind(("127.0.0.1", 0))
        datagrams.bind(("127.0.0.1", 0))
        assert {one.fileno(), bound.fileno(), datagrams.fileno()}.isdisjoint(each.descriptor for each in listening())


def test_a_listener_is_lost_when_it_is_closed_whoever_has_its_descriptor_then(server: socket.socket) -> None:
    watched = of_agent((), address_with(port_of(server)))
    port = port_of(server)
    assert lost(watched) == []
    with socket.create_server(("127.0.0.1", 0)) as other:
        os.dup2(other.fileno(), server.fileno())
        assert lost(watched) == [port]
    server.close()
    assert lost(watched) == [port]
    assert lost(()) == []
