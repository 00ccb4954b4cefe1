"""See the package's docstring: `python -m tests.on_vllm [--or-skip] VERSION MODULE [options of the module]`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.on_vllm.versions import folder_of
from tests.python_path import looking_first_in
from tests.upstream.source import NotFetched, end_without


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.on_vllm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--or-skip", action="store_true", help="end well where it cannot be fetched; not where CI is set to true"
    )
    parser.add_argument("version", help="of vLLM, such as 0.33.0")
    parser.add_argument("module", help="what is run, such as pytest")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    try:
        folder = folder_of(arguments.version)
    except NotFetched as error:
        end_without(error, or_skip=arguments.or_skip)
    command = [sys.executable, "-m", arguments.module, *arguments.options]
    return subprocess.run(command, env=looking_first_in(folder), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
