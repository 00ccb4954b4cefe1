"""`python -m tests.lowest [options of pytest]`: tests with the oldest libraries that pyproject.toml admits.

An engine's environment is vLLM's, which pins hardly any of them: users have whichever version came with it, and
`make setup` installs the newest ones. Here the lowest version of each dependency is put in front of them, without what
it needs itself. Not numpy, whose version torch and vLLM decide.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.python_path import looking_first_in

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".state" / "lowest"
NOT_OURS_TO_CHOOSE = ("numpy",)
TESTS = (
    "tests/actors/test_inspection.py",
    "tests/actors/test_pull.py",
    "tests/conformance/test_zmq_bridge.py",
    "tests/simulation/test_simulation.py",
    "tests/unit/test_command_line.py",
    "tests/unit/test_trace_commands.py",
    "tests/unit/test_trace_log.py",
    "tests/unit/test_wire_control.py",
    "tests/unit/test_wire_handshake.py",
    "tests/unit/test_wire_inspection.py",
)
"""Where these libraries do most."""


def lowest_versions() -> list[str]:
    """Such as `trio==0.30`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = []
    for requirement in map(Requirement, project["dependencies"]):
        (bound,) = (each for each in requirement.specifier if each.operator == ">=")
        if requirement.name not in NOT_OURS_TO_CHOOSE:
            found.append(f"{requirement.name}=={bound.version}")
    return sorted(found)


def folder_of(wanted: list[str]) -> Path:
    """Where they are; fetched the first time."""
    kept = KEPT / "-".join(wanted)
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as directory:
            fetched = Path(directory) / "fetched"
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", str(fetched), *wanted], check=True)
            fetched.rename(kept)
    return kept


def main() -> int:
    wanted = lowest_versions()
    sys.stderr.write(f"with {', '.join(wanted)}\n")
    command = [sys.executable, "-m", "pytest", *sys.argv[1:], *TESTS]
    return subprocess.run(command, cwd=ROOT, env=looking_first_in(folder_of(wanted)), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
