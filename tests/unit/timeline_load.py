"""Made-up traces of any length for the timeline page: what two prefill and two decode engines would have written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from connector.clock import to_ns
from statemachine.trace import TransitionRecord

LEASE_SECONDS = 30.0
MARGIN_SECONDS = 1.0
REQUESTS_PER_SECOND = 40.0
BEGIN_WALL = 1_790_000_000.0

FAILURES = {
    "TransferError": "failed",
    "HandshakeTimeout": "failed",
    "AbortedByClient": "failed",
    "DeadlineExceeded": "expired",
    "LeaseOver": "expired",
}


@dataclass
class Writer:
    """One process. `ahead_seconds`: by how much its wall clock is wrong."""

    engine_id: str
    ahead_seconds: float = 0.0
    records: list[TransitionRecord] = field(default_factory=list)

    def write(self, at: float, machine: str, subject: str, came: str | None, event: str, to: str, **more: Any) -> None:
        """`keeps`: for how many seconds from then on the blocks are kept."""
        keeps = more.pop("keeps", None)
        self.records.append(
            TransitionRecord(
                seq=0,
                wall=BEGIN_WALL + at + self.ahead_seconds,
                mono_ns=to_ns(1000 + at),
                engine_id=self.engine_id,
                rank=0,
                role="worker",
                machine=machine,
                subject=subject,
                from_state=came,
                event=event,
                to_state=to,
                kept_until_ns=None if keeps is None else to_ns(1000 + at + keeps),
                **more,
            )
        )


def trace(requests: int, *, ahead_seconds: float = 0.0, seed: int = 0) -> list[TransitionRecord]:
    """About one in 16 requests does not end well, one in 50 is tried again, and a few are open. `ahead_seconds`: of the
    wall clocks of prefill engines."""
    chance = random.Random(seed)
    prefills = [Writer(name, ahead_seconds) for name in ("prefill-a", "prefill-b")]
    decodes = [Writer(name) for name in ("decode-a", "decode-b")]
    at = 0.0
    for number in range(requests):
        at += chance.expovariate(REQUESTS_PER_SECOND)
        _request(number, at, chance.choice(prefills), chance.choice(decodes), chance)
    return [record for writer in (*prefills, *decodes) for record in _numbered(writer)]


def _numbered(writer: Writer) -> Iterator[TransitionRecord]:
    for seq, record in enumerate(sorted(writer.records, key=lambda each: each.mono_ns)):
        yield msgspec.structs.replace(record, seq=seq)


def _request(number: int, at: float, prefill: Writer, decode: Writer, chance: random.Random) -> None:
    on_p, on_d = f"cmpl-{number:05}-0-p", f"cmpl-{number:05}-0-d"
    named: dict[str, Any] = {"peer": prefill.engine_id, "remote_request_id": on_p, "lease_number": number + 1}
    blocks = chance.randint(2, 400)
    granted = at + chance.uniform(0.02, 0.6)
    prefill.write(at, "lease", on_p, None, "Created", "computing", lease_number=number + 1)
    lent: dict[str, Any] = {"lease_number": number + 1, "blocks": blocks}
    prefill.write(granted, "lease", on_p, "computing", "Granted", "held", keeps=LEASE_SECONDS, **lent)
    asked = granted + chance.uniform(0.001, 0.01)
    size: dict[str, Any] = {"blocks": blocks, "bytes": blocks * 65536, "descriptors": blocks, **named}
    decode.write(asked, "request", on_d, None, "Created", "pending_handshake", **size)
    decode.write(asked, "hold", on_p + "/0", None, "Created", "wanted", **named)
    prefill.write(asked + 0.0002, "lease", on_p, "held", "Held", "held", keeps=LEASE_SECONDS, **lent)
    proven = LEASE_SECONDS - MARGIN_SECONDS
    decode.write(asked + 0.0005, "hold", on_p + "/0", "wanted", "HeldByPeer", "held", keeps=proven, **named)
    began = asked + 0.0006 + (chance.expovariate(20) if chance.random() < 0.2 else 0.0)
    took = chance.uniform(0.004, 0.08) * (10 if chance.random() < 0.02 else 1)
    if chance.random() < 0.02:
        decode.write(began, "request", on_d, "pending_handshake", "PeerReady", "reading", **size)
        decode.write(began + took, "request", on_d, "reading", "ReadFailed", "draining", reason="TransferError", **size)
        began += took + 0.05
        decode.write(began, "request", on_d, "draining", "ReadQuiesced", "pending_handshake", **size)
        began += 0.03
    decode.write(began, "request", on_d, "pending_handshake", "PeerReady", "reading", **size)
    if chance.random() < 0.003:
        return  # open
    ended = began + took
    if chance.random() < 0.06:
        kind = chance.choice(list(FAILURES))
        end = {"reason": kind, "detail": f"made up: {kind} of {on_d}", **size}
        decode.write(ended, "request", on_d, "reading", "ReadFailed", "draining", **end)
        ended += chance.uniform(0.001, 0.2)
        decode.write(ended, "request", on_d, "draining", "ReadQuiesced", FAILURES[kind], **end)
        if kind == "LeaseOver":
            decode.write(ended, "hold", on_p + "/0", "held", "GoneAtPeer", "gone", reason="expired", **named)
            prefill.write(ended - 0.0005, "lease", on_p, "held", "DeadlinePassed", "expired", keeps=0.0, **lent)
            return
    else:
        decode.write(ended, "request", on_d, "reading", "ReadCompleted", "done", **size)
    keeps = proven - (ended - asked)
    decode.write(ended, "hold", on_p + "/0", "held", "Unwanted", "releasing", keeps=keeps, **named)
    prefill.write(ended + 0.0003, "lease", on_p, "held", "ReaderDone", "done", keeps=keeps, **lent)
    decode.write(ended + 0.0006, "hold", on_p + "/0", "releasing", "ReleaseConfirmed", "released", keeps=keeps, **named)
