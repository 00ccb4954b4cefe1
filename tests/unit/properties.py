"""Settings of property tests: no verdict on the machine's speed.

Hypothesis fails a test whose examples are slow to draw or to run. On a fresh checkout the first draw of text builds a
character table for more than a second, and a shared machine stalls now and then; neither says anything about the code.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

on_any_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
