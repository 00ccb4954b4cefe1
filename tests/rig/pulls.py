"""Block tables as the scheduler side hands them to the actors, for tests without a scheduler."""

from __future__ import annotations

from connector.runtime.messages import GroupPull


def one_group(local: list[int], remote: list[int], *, local_first: int = 0) -> tuple[GroupPull, ...]:
    """The block tables of a request in an engine with a single cache group that keeps everything."""
    return (GroupPull(local_block_ids=local, local_first=local_first, remote_block_ids=remote),)
