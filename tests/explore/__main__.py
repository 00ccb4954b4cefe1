"""`python -m tests.explore [--deviations N] [name ...]`: search the products, and what an engine's scheduler does with
its queue; say how large they were."""

from __future__ import annotations

import argparse
import sys

import msgspec

from tests.explore import PRODUCTS, Violation, explore
from tests.explore.queue import SETTINGS, Broken, search

NAMES = (*(product.name for product in PRODUCTS), *(setting.name for setting in SETTINGS))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="of what to search; all by default")
    parser.add_argument("--deviations", type=int, help="instead of each product's own number")
    parser.add_argument("--list", action="store_true", help="name the products")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        sys.stdout.writelines(f"{name}\n" for name in NAMES)
        return 0
    unknown = set(chosen.names) - set(NAMES)
    if unknown:
        parser.error(f"no product is called {', '.join(sorted(unknown))}")
    for product in PRODUCTS:
        if chosen.names and product.name not in chosen.names:
            continue
        if chosen.deviations is not None:
            product = msgspec.structs.replace(product, deviations=chosen.deviations)
        sys.stdout.write(f"{product.name}, {product.deviations} deviations: ")
        sys.stdout.flush()
        try:
            found = explore(product)
        except Violation as violation:
            sys.stdout.write(f"VIOLATION: {violation}\n")
            return 1
        sys.stdout.write(f"nothing wrong in {found}\n")
    for setting in SETTINGS:
        if chosen.names and setting.name not in chosen.names:
            continue
        try:
            states, edges = search(setting)
        except Broken as broken:
            sys.stdout.write(f"vLLM's queue, {setting.name}: VIOLATION: {broken}\n")
            return 1
        sys.stdout.write(f"vLLM's queue, {setting.name}: nothing wrong in {states:,} states, {edges:,} edges\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
