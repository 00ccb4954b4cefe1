"""What is raised when an engine is started with a KV cache that the connector cannot transfer."""

from __future__ import annotations


class UnsupportedCache(Exception):
    """This engine's configuration or KV cache is outside of what the connector can transfer.

    `field` is what stands in the way, `found` its value, `expected` what is supported.
    """

    def __init__(self, field: str, found: object, expected: object) -> None:
        super().__init__(f"the KV connector does not support {field} {found}; supported: {expected}")
        self.field = field
        self.found = str(found)
        self.expected = str(expected)
