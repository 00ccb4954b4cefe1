"""Directories of CURVE keys, and side channels that use them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.ports.curve_keys import ACCEPTED_FOLDER, CurveKeys, make_pair
from connector.ports.gate import Access
from connector.ports.zmq_bridge import ZmqSideChannel


@dataclass(frozen=True)
class Member:
    """Somebody with a pair, whose own key it accepts."""

    name: str
    directory: Path

    @property
    def accepted(self) -> Path:
        return self.directory / ACCEPTED_FOLDER

    @property
    def public(self) -> Path:
        return self.accepted / f"{self.name}.key"

    def keys(self) -> CurveKeys:
        return CurveKeys(str(self.directory))

    def channel(self, **access: Any) -> ZmqSideChannel:
        """`access`: fields of `Access`, beside the keys. Within a trio run."""
        return ZmqSideChannel(Access(keys=self.keys(), **access))


class Fleet:
    """Members in directories below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def member(self, name: str) -> Member:
        made = Member(name, self._directory / name)
        make_pair(made.directory, name)
        return made

    def friends(self, *names: str) -> list[Member]:
        """New members all of whom accept each other."""
        members = [self.member(name) for name in names]
        for member in members:
            for other in members:
                if other is not member:
                    self.accept(other, by=member)
        return members

    def accept(self, member: Member, *, by: Member) -> None:
        shutil.copy(member.public, by.accepted)

    def forget(self, member: Member, *, by: Member) -> None:
        (by.accepted / member.public.name).unlink()
