"""Hosts and ports as text: how they are written, and what can be told of a host without asking anybody."""

from __future__ import annotations

import ipaddress

from connector.wire.bounded import PORT_MAX, shorten


def join_address(host: str, port: int | str) -> str:
    """Join host and port as everybody writes them and `split_address` reads them: an IPv6 address is in brackets."""
    bare = unbracketed(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host, which may be empty, and port; an IPv6 address without its brackets, if it has any. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        raise ValueError(f"{shorten(address)!r} is not host:port of a side channel")
    return host.strip("[]"), int(port)


def split_place(place: str) -> tuple[str, int]:
    """Host and port of a `Place` (`wire.bounded`); an IPv6 address without its brackets. Raises ValueError."""
    if lacks_brackets(place):
        raise ValueError(
            f"{shorten(place)!r} is not host:port: an IPv6 address has to be in brackets, as in [::1]:5600"
        )
    host, port = split_address(place)
    if not host:
        raise ValueError(f"{shorten(place)!r} is not host:port of a side channel")
    return host, port


def lacks_brackets(address: str) -> bool:
    """Whether its host is an IPv6 address without brackets. Of one that a person wrote nobody can tell whether it has a
    port at all: `::1` would be host `:` and port 1."""
    host = address.rpartition(":")[0]
    return ":" in host and not (host.startswith("[") and host.endswith("]"))


def unbracketed(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(unbracketed(host))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether it is this machine's own, and reaches no other."""
    return host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(unbracketed(host)).is_loopback)


def is_all_interfaces(host: str) -> bool:
    """Whether it is one to listen at, and none to connect to."""
    return unbracketed(host) in ("0.0.0.0", "::", "*")


def without_interface(address: str) -> str:
    """A numeric address as libzmq says it. A link-local one comes with its interface, which is no part of it."""
    return address.partition("%")[0]
