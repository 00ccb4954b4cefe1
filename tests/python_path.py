"""Other folders in front of those in which Python looks for modules, for programs that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def looking_first_in(*folders: Path) -> dict[str, str]:
    """The environment of this process, for one that looks there first."""
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
