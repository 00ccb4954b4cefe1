"""How long tests wait for what takes milliseconds where nothing else runs."""

PATIENCE_SECONDS = 30.0
"""A machine may stand still for some seconds, or have other things to do. Whoever waits so long has found a defect."""
