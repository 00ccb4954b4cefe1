"""Programs that some tests need and skip without: a browser, and Prometheus with its promtool.

`python -m tests.programs` is the last part of `make test`. It names those that are missing, so that nobody takes a
test that was skipped for one that has passed. In continuous integration (`CI=true`) it fails then, if apt is there:
`.ci/run` has tried to get them, and what it could not get is a fault of that run, as is a package that could not be
installed.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from tests.unit.browser import find_browser

UNPACKED = str(Path(__file__).parents[1] / ".state" / "prometheus" / "usr" / "bin")
"""Where `make prometheus` leaves them."""


class Program(NamedTuple):
    """`found`: its path. `tests`: files whose tests skip without it. `source`: where to get it."""

    name: str
    found: str | None
    tests: tuple[str, ...]
    source: str


def find_prometheus(name: str, unpacked: str = UNPACKED) -> str | None:
    """Path of `prometheus` or `promtool`, if there is one."""
    return shutil.which(name) or shutil.which(name, path=unpacked)


def programs(unpacked: str = UNPACKED) -> list[Program]:
    prometheus = [find_prometheus(name, unpacked) for name in ("promtool", "prometheus")]
    return [
        Program(
            "browser",
            find_browser(),
            (
                "tests/unit/test_timeline_page.py",
                "tests/unit/test_timeline_drawing.py",
                "tests/unit/test_ten_thousand_requests.py",
            ),
            "apt-get install chromium-headless-shell",
        ),
        Program("promtool", prometheus[0], ("tests/unit/test_alerts.py",), "make prometheus"),
        Program("prometheus", prometheus[1], ("tests/integration/test_prometheus.py",), "make prometheus"),
    ]


def main(unpacked: str = UNPACKED) -> int:
    """The exit status."""
    missing = [each for each in programs(unpacked) if each.found is None]
    is_fault = os.environ.get("CI") == "true" and shutil.which("apt-get") is not None
    for each in missing:
        level = "ERROR" if is_fault else "NOT TESTED"
        sys.stdout.write(
            f"{level}: no {each.name}, so tests of {', '.join(each.tests)} were skipped; to get it: {each.source}\n"
        )
    return 1 if missing and is_fault else 0


if __name__ == "__main__":
    sys.exit(main())
