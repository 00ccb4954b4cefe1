"""What the scheduler side hands to the actors, for tests without a scheduler."""

from __future__ import annotations

from connector.protocol import GroupPull, LetGo, PeerAddress, ReleaseUnread, StartPull
from statemachine.lease import LeaseName

_PEER = PeerAddress(engine_id="p", host="h", port=1, tp_size=1)


def one_group(local: list[int], remote: list[int], *, local_first: int = 0) -> tuple[GroupPull, ...]:
    """The block tables of a request in an engine with a single cache group that keeps everything."""
    return (GroupPull(local_block_ids=local, local_first=local_first, remote_block_ids=remote),)


def pull(request_id: str, blocks: list[int]) -> StartPull:
    """A command to read blocks from a peer that does not exist, where they have the same ids."""
    return StartPull(
        request_id=request_id,
        lease=_lease_of(request_id),
        peer=_PEER,
        groups=one_group(blocks, blocks),
        num_tokens=None,
        remote_num_tokens=None,
        age_seconds=0.0,
    )


def release_unread(request_id: str) -> ReleaseUnread:
    """The command where nothing is read of what `pull` would read."""
    return ReleaseUnread(request_id=request_id, lease=_lease_of(request_id), peer=_PEER, age_seconds=0.0)


def let_go(request_id: str) -> LetGo:
    """The command when nobody wants any more what `pull` would read."""
    return LetGo(lease=_lease_of(request_id), peer=_PEER)


def _lease_of(request_id: str) -> LeaseName:
    return LeaseName(f"remote-{request_id}", 1)
