"""What other engines are told of the address at which this one listens.

An address of all interfaces is one to listen at and none to connect to: an engine that tries it reaches its own
machine. The built-in connector hands it on all the same, and with a router that puts the right host into every
request's parameters that is good enough. A control socket is named in the handshake, which no router sees.
"""

from __future__ import annotations

from vllm.utils.network_utils import get_ip

from connector.addresses import is_all_interfaces


def told_host(host: str) -> str:
    """For a host to listen at: the same, or an address of this machine in place of all its interfaces. Where vLLM finds
    none, because the machine has no route, it is that of all again."""
    return get_ip() if is_all_interfaces(host) else host
