"""KV geometry: what memory a rank's KV cache occupies, and which of another rank's bytes go where.

Pure arithmetic over frozen values: no NIXL, no vLLM, no I/O. `geometry` describes one rank, `plan` pairs two of them.
Everything is checked when the plan is made, at handshake time; during a step only block ids are checked.
"""

from connector.layout.geometry import BlockIdError, LayoutMismatch, MemoryKind, RankLayout, Region
from connector.layout.plan import ReadPlan, plan_reads

__all__ = [
    "BlockIdError",
    "LayoutMismatch",
    "MemoryKind",
    "RankLayout",
    "ReadPlan",
    "Region",
    "plan_reads",
]
