"""The side channel of an engine, as tools ask it: where it is, with which keys, and why there is no answer.

Whatever goes wrong is one exception, with a kind and a sentence for people. Where several engines have one name, as
that of a headless Service in Kubernetes, each has an address of its own (`engines_behind`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

import trio

from connector.addresses import join_address, lacks_brackets, split_address
from connector.environment import CURVE_DIRECTORY_VARIABLE, ENGINES_VARIABLE
from connector.ports.curve_keys import CurveKeys
from connector.ports.gate import ANYBODY, Access
from connector.ports.host_names import HostNames
from connector.ports.side_channel import (
    AccessRefused,
    NotASideChannel,
    SideChannel,
    SideChannelError,
    failure_of,
)
from connector.wire.bounded import HOST_LENGTH_MAX, DecodeFailed, shorten
from connector.wire.handshake import Advertisement, decode_advertisement, encode_request
from statemachine import failures

PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
DEFAULT_PORT = 5600
_KEYS_OF_A_TOOL = (
    f"a tool has the keys of --keys or {CURVE_DIRECTORY_VARIABLE}, and each end needs the other's public key in its "
    "folder accepted"
)


class AddressError(ValueError):
    """Not an address of an engine."""


@dataclass(frozen=True, order=True)
class Address:
    """Where an engine's side channel is."""

    host: str
    port: int

    def __str__(self) -> str:
        """The form that `parse_address` reads."""
        return join_address(self.host, self.port)


class NotAsked(Exception):
    """An engine could not be asked.

    Attributes:
        kind: the failure as a decode engine would call it.
        sentence: why, behind the address: "there" is where it was looked for.
    """

    def __init__(self, address: Address, kind: str, sentence: str) -> None:
        super().__init__(f"{address}: {sentence}")
        self.kind = kind
        self.sentence = sentence


def parse_address(text: str) -> Address:
    """`HOST:PORT` as people write it, or a port of this machine. Raises AddressError."""
    if lacks_brackets(text.strip()):
        raise AddressError(
            f"{shorten(text)!r} is not HOST:PORT of an engine's side channel; "
            "an IPv6 address is written in brackets, as in [::1]:5600"
        )
    with suppress(ValueError):
        host, port = split_address(text.strip())
        if len(host) <= HOST_LENGTH_MAX:
            return Address(host or "127.0.0.1", port)
    raise AddressError(f"{shorten(text)!r} is not HOST:PORT of an engine's side channel")


def chosen_addresses(named: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[Address]:
    """Those named, else those in NIXL_ACTOR_ENGINES (separated by commas or spaces), else the side channel that this
    environment would give an engine. One that is named twice is there twice. Raises AddressError, which names a
    variable that is wrong."""
    if named:
        return [parse_address(each) for each in named]
    if texts := environment.get(ENGINES_VARIABLE, "").replace(",", " ").split():
        source = ENGINES_VARIABLE
    else:
        source = f"{HOST_VARIABLE} and {PORT_VARIABLE}"
        port = environment.get(PORT_VARIABLE, str(DEFAULT_PORT))
        texts = [join_address(environment.get(HOST_VARIABLE) or "127.0.0.1", port)]
    try:
        return [parse_address(each) for each in texts]
    except AddressError as error:
        raise AddressError(f"in the environment, {source}: {error}") from None


def tool_access(directory: str | None) -> Access:
    """What a tool with keys in this directory may do; None: a tool without keys. Raises KeyDirectoryError.

    It asks engines without keys too: it tells them nothing but the id of a request.
    """
    return ANYBODY if directory is None else Access(keys=CurveKeys(directory), allows_insecure=True)


async def engines_behind(address: Address) -> list[Address]:
    """The addresses that the host of `address` has, where it has several; else the given one. Raises NotAsked."""
    try:
        found = await HostNames().addresses(address.host, address.port)
    except SideChannelError as error:
        raise _not_asked(address, error) from error
    return [Address(each, address.port) for each in found] if len(found) > 1 else [address]


async def ask(
    side_channel: SideChannel, address: Address, frame: bytes, seconds: float = math.inf
) -> tuple[bytes, ...]:
    """The frames of the answer to one question, not decoded. `seconds`: for the answer. Raises NotAsked."""
    try:
        with trio.fail_after(seconds), closing(side_channel.connect(address.host, address.port)) as requester:
            return await requester.ask([frame])
    except trio.TooSlowError as error:
        why = f"no answer within {seconds:g} s: it hangs or is stopped, or cannot be reached"
        raise NotAsked(address, failures.HandshakeTimeout.__name__, why) from error
    except SideChannelError as error:
        raise _not_asked(address, error) from error


async def advertisement(
    side_channel: SideChannel, address: Address, rank: tuple[int, int], seconds: float = math.inf
) -> Advertisement:
    """What a rank (pipeline, tensor) of the engine says to a decode engine. Raises NotAsked."""
    frames_untrusted = await ask(side_channel, address, encode_request(*rank), seconds)
    try:
        return decode_advertisement(frames_untrusted)
    except DecodeFailed as error:
        raise _not_asked(address, NotASideChannel(address.host, address.port, error.detail)) from error


def _not_asked(address: Address, error: SideChannelError) -> NotAsked:
    failure = failure_of(error, peer="", address=str(address))
    is_refused = isinstance(error, AccessRefused)
    why = f"this tool may not ask it: {error.why}; {_KEYS_OF_A_TOOL}" if is_refused else error.why
    return NotAsked(address, failure.kind, why)
