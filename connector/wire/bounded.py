"""Decoding of untrusted bytes, and short text made from untrusted values.

Two things every decoder of this package needs. `decode_msgpack` turns the several exceptions that hostile input can
provoke (wrong types, broken UTF-8, nesting deeper than the interpreter's stack) into one, and looks at the outline of a
map before it builds any of its values. `render_untrusted` makes the `found` part of an error message: never longer than
asked for, never slower for a bigger value, and free of control characters, whatever the value is.

What an engine decodes is bounded by its type: every list and every map in it has a `max_length`, which is compared with
the length that is announced before an element is looked at. A text needs none for that: it costs a copy of its bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

RENDERED_LENGTH_MAX = 80
"""Longest text that an error message quotes from untrusted input, in characters."""

IDENTIFIER_PART_PATTERN = r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+"
IDENTIFIER_PATTERN = rf"\A{IDENTIFIER_PART_PATTERN}\Z"
"""Engine, request and layer names: at least one character, no control characters, encodable as UTF-8."""
OPTIONAL_IDENTIFIER_PATTERN = rf"\A(?:{IDENTIFIER_PART_PATTERN})?\Z"
"""The same, or nothing."""

HOST_PATTERN = r"\A[A-Za-z0-9_.:%\[\]-]+\Z"
"""Host names, IPv4 and IPv6 addresses. Anything else could change the meaning of a ZMQ endpoint."""
HOST_LENGTH_MAX = 255
PORT_MAX = 65_535
PLACE_PATTERN = r"\A[A-Za-z0-9_.:%\[\]-]+:[0-9]{1,5}\Z"
"""host:port of a side channel."""

ID_LENGTH_MAX = 512
"""Characters of the name of an engine, a request or a layer."""
RANKS_MAX = 1024
"""An engine has at most so many ranks."""
NUMBER_MAX = 2**63 - 1
"""The largest of 64 bits with a sign."""

Identifier: TypeAlias = Annotated[str, Meta(max_length=ID_LENGTH_MAX, pattern=IDENTIFIER_PATTERN)]
Place: TypeAlias = Annotated[str, Meta(max_length=HOST_LENGTH_MAX + 8, pattern=PLACE_PATTERN)]
Natural: TypeAlias = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]

FIELDS_MAX = 64
"""The outermost map of a message has at most so many fields. No message has half as many; a later version may have more
of them than this one."""

_SAMPLED_ELEMENTS = 3
_NESTING_RENDERED = 2
_INTEGER_BITS_RENDERED = 96

_Decoded = TypeVar("_Decoded")

Fields: TypeAlias = dict[str, msgspec.Raw]
"""The outermost map of a message, its values as they are encoded."""

_fields_decoder = msgspec.msgpack.Decoder(Fields)


class DecodeFailed(Exception):
    """Bytes from outside are not what the wire format says. `detail` is bounded, and fit for a log line or a reply."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


def decode_msgpack(
    decoder: msgspec.msgpack.Decoder[_Decoded],
    data: bytes,
    *,
    bytes_max: int,
    look: Callable[[Fields], None] = lambda fields: None,
) -> _Decoded:
    """Decode at most `bytes_max` bytes, or raise DecodeFailed.

    `look`: given the fields before any is decoded, raises DecodeFailed for what no type can bound.
    """
    if len(data) > bytes_max:
        raise DecodeFailed(f"{len(data)} bytes, the limit is {bytes_max}")
    try:
        look(_fields(data))
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeFailed(shorten(str(error), 200)) from None
    except RecursionError:
        raise DecodeFailed("nested too deeply") from None


def decode_frame(
    decoder: msgspec.msgpack.Decoder[_Decoded], frames_untrusted: Sequence[bytes], *, bytes_max: int
) -> _Decoded:
    """Decode a message, which is one frame of at most `bytes_max` bytes, or raise DecodeFailed."""
    if len(frames_untrusted) != 1:
        raise DecodeFailed(f"expected one frame, got {len(frames_untrusted)}")
    return decode_msgpack(decoder, frames_untrusted[0], bytes_max=bytes_max)


def require_beside(field: str, fields: Fields, bytes_all: int, bytes_max: int) -> None:
    """Raise DecodeFailed for more than `bytes_max` bytes, of `bytes_all`, that are not the value of `field`."""
    rest = bytes_all - memoryview(fields.get(field, b"")).nbytes
    if rest > bytes_max:
        raise DecodeFailed(f"{rest} bytes beside {field}, the limit is {bytes_max}")


def announced_length(encoded: bytes | memoryview) -> int:
    """How many elements or fields the head of a message pack array or map announces; 0: it is something else."""
    kind = encoded[0] if encoded else 0
    if 0x80 <= kind <= 0x9F:
        return kind & 0x0F
    size = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}.get(kind, 0)
    return int.from_bytes(encoded[1 : 1 + size], "big")


def _fields(data: bytes) -> Fields:
    """The fields of the outermost map; what is no map has none. Raises DecodeFailed where one is there twice: msgspec
    would build each of its values, and keep the last, so that the bounds of one value would bound nothing."""
    if not data or not (0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF)):
        return {}
    announced = announced_length(data)
    if announced > FIELDS_MAX:
        raise DecodeFailed(f"{announced} fields, the limit is {FIELDS_MAX}")
    fields = _fields_decoder.decode(data)
    if len(fields) != announced:
        raise DecodeFailed("a field is there twice")
    return fields


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
