"""What protobuf's Struct makes of a JSON value: it has one kind of number."""

from __future__ import annotations

from typing import Any


def as_floats(value: Any) -> Any:
    """The value with a float for each integer in it."""
    if type(value) is int:
        return float(value)
    if isinstance(value, list):
        return [as_floats(each) for each in value]
    return {key: as_floats(each) for key, each in value.items()} if isinstance(value, dict) else value
