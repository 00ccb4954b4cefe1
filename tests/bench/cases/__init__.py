"""What is measured side by side. A case makes rounds; a round gives one number for each of its figures."""

from __future__ import annotations

from tests.bench.case import Case
from tests.bench.cases import footprint, meetings, served, steps, transfers

CASES: tuple[Case, ...] = (
    *transfers.CASES,
    *steps.CASES,
    *meetings.CASES,
    *footprint.CASES,
    *served.CASES,
)
