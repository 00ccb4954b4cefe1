"""Unpacks Prometheus and promtool into .state/prometheus, from the package of this machine's Debian or Ubuntu.

No rights are needed and nothing is installed. Only the tests of the alerts and of the dashboard use it; they skip
where it is missing.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / ".state" / "prometheus"
BINARIES = TARGET / "usr" / "bin"


def main() -> int:
    """Exit status 0 when both programs are there."""
    if (BINARIES / "promtool").exists():
        return 0
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, check=True, stderr=subprocess.DEVNULL)
            (package,) = Path(folder).glob("prometheus_*.deb")
            subprocess.run(["dpkg", "-x", package, TARGET], check=True)
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            print(f"prometheus could not be fetched: {error}; put prometheus and promtool on the PATH", file=sys.stderr)
            return 1
    print(f"prometheus and promtool are in {BINARIES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
