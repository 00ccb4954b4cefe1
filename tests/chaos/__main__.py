"""`make chaos MINUTES=5 SEED=1`: one run, or with `--builtin` a second one of the same plan with vLLM's own connector.

    --minutes N     how long the chaos lasts; starting, settling and the comparison at the end take two minutes more
    --seed N        what the plan and the requests are drawn from
    --plan FILE     replay the plan in this file, with its seed and its length
    --builtin       then the same plan with the built-in connector, reported beside it and not judged

The plan, the logs, the traces and the report as JSON are kept in `.state/chaos/seed-N/`. Exit status 1 when this
project's connector did not keep a promise.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import msgspec

from tests.chaos.cluster import ConnectorName
from tests.chaos.plan import draw_plan, load_plan, save_plan
from tests.chaos.report import Report, render
from tests.chaos.run import run

RUNS = Path(".state/chaos")
SHOWN_MAX = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--builtin", action="store_true")
    options = parser.parse_args()
    plan = load_plan(options.plan) if options.plan else draw_plan(options.seed, options.minutes * 60)
    directory = RUNS / f"seed-{plan.seed}"
    print(plan, flush=True)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"chaos [{time.monotonic() - started:4.0f} s] {text}", flush=True)

    connectors: tuple[ConnectorName, ...] = ("ours", "builtin") if options.builtin else ("ours",)
    reports: list[Report] = []
    for connector in connectors:
        place = (directory / connector).resolve()
        shutil.rmtree(place, ignore_errors=True)
        save_plan(plan, directory / "plan.json")
        reports.append(run(plan, connector, place, say))
        (place / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(reports[-1])))
    print(f"\n{render(reports)}\n")
    broken = reports[0].broken_promises
    for each in broken[:SHOWN_MAX]:
        print(f"NOT KEPT: {each}")
    if len(broken) > SHOWN_MAX:
        print(f"and {len(broken) - SHOWN_MAX} more")
    if broken:
        print(f"replay: .venv/bin/python -m tests.chaos --plan {directory / 'plan.json'}")
    else:
        print("every promise was kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
