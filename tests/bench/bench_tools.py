"""How long an operator waits for the tools: the summary of a trace of 10,000 requests, its page, and a filter of it.

`python -m tests.bench.bench_tools` simulates plans of faults at level 2 until they have so many requests, with a minute
between two of them, and writes the traces as the engines would have. Then each command is run in a process of its own,
as an operator runs it, and the page is opened in a headless Chromium, if there is one.

Figures, the best of ROUNDS and the median
  summary, slow, failures, check   seconds from the start of the process to its end, and of processors: the latter is
                                   what it takes on a quiet machine
  export                           the same, of `export --html`
  page opens                       milliseconds from the navigation until everything is drawn
  filter                           milliseconds from a keystroke until what it leaves is drawn, the longest of several
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.unit.browser import Browser, find_browser
from tests.unit.traced_run import write_runs

REQUESTS = 10_000
ROUNDS = 5
FILTERS = ("cmpl", "TransferError", "s3-", "nobody")


def measure_command(name: str, *arguments: str) -> None:
    called = [sys.executable, "-m", "connector", "trace", name, *arguments]
    seconds, of_processors = [], []
    for _ in range(ROUNDS):
        started, used = time.perf_counter(), _children_seconds()
        # `check` and `failures` may have something to say, and say it by their status.
        subprocess.run(called, stdout=subprocess.DEVNULL, check=False)
        seconds.append(time.perf_counter() - started)
        of_processors.append(_children_seconds() - used)
    show(name, seconds, "s")
    show("", of_processors, "s of processors")


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(what: str, values: list[float], unit: str) -> None:
    print(f"{what:16}{min(values):10.2f}{statistics.median(values):10.2f} {unit}")


def measure_page(path: str, page: Path, profile: Path) -> tuple[list[float], list[float]]:
    opened, filtered = [], []
    with Browser(path, profile) as browser:
        for _ in range(ROUNDS):
            browser.open(page.as_uri())
            opened += browser.evaluate("performance.getEntriesByName('open').map((each) => each.duration)")
            worst = 0.0
            for text in FILTERS:
                browser.evaluate("byId('query').focus()")
                browser.evaluate("byId('query').select()")
                browser.type(text)
                worst = max(
                    worst, *browser.evaluate("performance.getEntriesByName('filter').map((each) => each.duration)")
                )
            filtered.append(worst)
        if browser.complaints:
            print("the page complains:", *browser.complaints, sep="\n")
    return opened, filtered


def main() -> None:
    with tempfile.TemporaryDirectory() as kept:
        traces, page = Path(kept) / "traces", Path(kept) / "page.html"
        requests, records = write_runs(traces, REQUESTS)
        print(f"{requests:,} requests, {records:,} records in {len(list(traces.iterdir()))} files; {ROUNDS} rounds")
        print(f"{'':16}{'best':>10}{'median':>10}")
        for name in ("summary", "slow", "failures", "check"):
            measure_command(name, str(traces))
        measure_command("export", str(traces), "--html", str(page))
        browser = find_browser()
        if browser is None:
            print("no browser: the page was not opened")
            return
        opened, filtered = measure_page(browser, page, Path(kept) / "profile")
        show("page opens", opened, "ms")
        show("filter", filtered, "ms")


if __name__ == "__main__":
    main()
