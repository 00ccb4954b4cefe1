"""What is wrong with a set of engines, or will be: the checks of `nixl-actor doctor`.

Before there is traffic: addresses, whether the engines fit together, devices and transports, clocks, leases, versions.
With traffic: what the workers have counted and what lives in them. `diagnose` is a pure function of what the engines
said (`connector.tools.live.Survey`); each check is a function that yields findings, with both sides' values.

A problem will cost requests, or does; a warning may, or costs time; a note is for an operator who looks for something.

finding     what a check finds
reachable   whether engines and workers answer, and are found where they say that they are
fit         whether they can exchange KV, and have options and clocks alike
transports  what UCX goes over between them
traffic     what requests have come to, and what lives in the workers
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from connector.tools.asking import Address
from connector.tools.diagnosis.finding import Finding
from connector.tools.diagnosis.fit import clocks, fit, keys, settings
from connector.tools.diagnosis.reachable import addresses, named_twice, unanswered
from connector.tools.diagnosis.traffic import (
    RECORDS_ASKED,
    blocks,
    failed_requests,
    introductions,
    leases_to_look_for,
    local_prefills,
    peers,
    releases,
    traces,
)
from connector.tools.diagnosis.transports import transports
from connector.tools.live import Survey
from connector.tools.ucx_devices import Opened

__all__ = ["RECORDS_ASKED", "Finding", "diagnose", "leases_to_look_for"]


def diagnose(
    found: Survey,
    named: Sequence[Address] = (),
    opened: Mapping[tuple[str, int], Opened] = MappingProxyType({}),
    looked_for: Collection[str] = (),
) -> list[Finding]:
    """All findings, problems first.

    Args:
        named: the addresses that were given, each as often as it was.
        opened: what UCX opens for the workers, by engine id and number, that run on the machine of this process.
        looked_for: request ids on P about which every worker gave all its records, beside the newest RECORDS_ASKED.
    """
    answering = [engine for engine in found.engines if engine.answers]
    findings = [
        *unanswered(found),
        *addresses(found),
        *named_twice(named),
        *fit(found),
        *transports(answering, opened),
        *clocks(answering),
        *settings(answering),
        *keys(answering),
        *peers(answering),
        *introductions(answering),
        *blocks(answering),
        *failed_requests(answering),
        *local_prefills(answering, found.leaving()),
        *releases(found, looked_for),
        *traces(answering),
    ]
    order = ("problem", "warning", "note")
    return sorted(findings, key=lambda finding: order.index(finding.level))
