"""Hosts and ports as text: how they are written, and what can be told of a host without asking anybody."""

from __future__ import annotations

import ipaddress


def join_address(host: str, port: int | str) -> str:
    """As everybody writes it, and `wire.bounded.split_address` reads it: an IPv6 address in brackets."""
    bare = unbracketed(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


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
