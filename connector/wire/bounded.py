"""Decoding of untrusted bytes, and short text made from untrusted values.

Two things every decoder of this package needs. `decode_msgpack` turns the several exceptions that hostile input can
provoke (wrong types, broken UTF-8, nesting deeper than the interpreter's stack) into one. `render_untrusted` makes the
`found` part of an error message: never longer than asked for, never slower for a bigger value, and free of control
characters, whatever the value is.
"""

from __future__ import annotations

import itertools
from typing import TypeVar

import msgspec

RENDERED_LENGTH_MAX = 80
"""Longest text that an error message quotes from untrusted input, in characters."""

IDENTIFIER_PATTERN = r"\A[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+\Z"
"""Engine, request and layer names: at least one character, no control characters, encodable as UTF-8."""

HOST_PATTERN = r"\A[A-Za-z0-9_.:%\[\]-]+\Z"
"""Host names, IPv4 and IPv6 addresses. Anything else could change the meaning of a ZMQ endpoint."""
HOST_LENGTH_MAX = 255
PLACE_PATTERN = r"\A[A-Za-z0-9_.:%\[\]-]+:[0-9]{1,5}\Z"
"""host:port of a side channel."""

_SAMPLED_ELEMENTS = 3
_NESTING_RENDERED = 2
_INTEGER_BITS_RENDERED = 96

_Decoded = TypeVar("_Decoded")


def split_place(place: str) -> tuple[str, int]:
    """Host and port of what PLACE_PATTERN describes; an IPv6 address without its brackets. Raises ValueError."""
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


def split_address(address: str) -> tuple[str, int]:
    """Host, which may be empty, and port; an IPv6 address without its brackets, if it has any. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"{shorten(address)!r} is not host:port of a side channel")
    return host.strip("[]"), int(port)


class DecodeFailed(Exception):
    """Bytes from outside are not what the wire format says. `detail` is bounded and fit for a log line."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class BadFrame(Exception):
    """A message that is not one of ours. `detail` is bounded and fit for an error reply."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


def decode_msgpack(decoder: msgspec.msgpack.Decoder[_Decoded], data: bytes, *, bytes_max: int) -> _Decoded:
    """Decode at most `bytes_max` bytes, or raise DecodeFailed."""
    if len(data) > bytes_max:
        raise DecodeFailed(f"{len(data)} bytes, the limit is {bytes_max}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeFailed(shorten(str(error), 200)) from None
    except RecursionError:
        raise DecodeFailed("nested too deeply") from None


def shorten(text: str, length_max: int = RENDERED_LENGTH_MAX) -> str:
    """`text` cut to `length_max` characters, with control characters escaped."""
    printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: length_max + 1])
    return printable if len(printable) <= length_max else printable[: length_max - 3] + "..."


def render_untrusted(value: object, length_max: int = RENDERED_LENGTH_MAX) -> str:
    """A rendering of `value` of at most `length_max` characters; cost does not grow with the value."""
    return shorten(_render(value, length_max, _NESTING_RENDERED), length_max)


def _render(value: object, length_max: int, depth: int) -> str:
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        # The decimal form of a huge integer is slow to make, and Python refuses it beyond 4,300 digits.
        bits = value.bit_length()
        return repr(value) if bits <= _INTEGER_BITS_RENDERED else f"an integer of {bits} bits"
    if isinstance(value, (str, bytes)):
        if len(value) <= length_max:
            return repr(value)
        unit = "characters" if isinstance(value, str) else "bytes"
        return f"{len(value)} {unit} {value[: length_max // 2]!r}..."
    if isinstance(value, (list, tuple, dict)):
        return _render_container(value, length_max, depth)
    return f"a value of type {type(value).__name__}"


def _render_container(
    value: list[object] | tuple[object, ...] | dict[object, object], length_max: int, depth: int
) -> str:
    """The first few elements; of a dict the keys, which tell what was put there by mistake."""
    opening, closing, suffix = ("{", "}", ": ...") if isinstance(value, dict) else ("[", "]", "")
    sample = itertools.islice(value, _SAMPLED_ELEMENTS) if depth else ()
    elements = [_render(element, length_max, depth - 1) + suffix for element in sample]
    if len(elements) == len(value):
        return f"{opening}{', '.join(elements)}{closing}"
    return f"{type(value).__name__} of {len(value)} {opening}{', '.join([*elements, '...'])}{closing}"
