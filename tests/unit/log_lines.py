"""What the connector logs, for tests of its lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from connector.observe.log import get_logger


class Lines(logging.Handler):
    """Keeps what is logged. At the logger itself, because vLLM's does not propagate to where pytest listens."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@contextmanager
def listening() -> Iterator[Lines]:
    """Lines from the level info on."""
    logger, handler = get_logger().logger, Lines()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
