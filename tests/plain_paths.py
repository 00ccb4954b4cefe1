"""What a request and its lease go through when nothing goes wrong.

Two ways each: P's answer to a hold may come after the READ's end, and P's worker hears of a grant with P's next step,
which a fast reader may overtake. A test that says which of the two it was would fail on a machine of another speed.
"""

from __future__ import annotations

REQUEST_PATHS_PLAIN = (
    ("pending_handshake", "reading", "done"),
    # The READ was faster than P's answer that it keeps the blocks.
    ("pending_handshake", "reading", "proving", "done"),
)
LEASE_PATHS_PLAIN = (
    ("computing", "held", "done"),
    # D was through before P's worker heard of the grant.
    ("computing", "done"),
)
