"""The end of `make demo`: the timeline page, and the command that explains its slowest request."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from connector.observe.history import histories
from tests.e2e.demo import TIMELINE, report_timeline
from tests.unit.traced_run import calm_run, write_run


def test_the_page_is_there_and_the_command_explains_the_slowest_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = tmp_path / "demo 20260101"  # what is printed has to be fit for a shell
    traces.mkdir()
    # The wait in vLLM's queue counts, and here it is all that makes one the slowest.
    delayed = min(
        (each for each in histories(calm_run()) if each.machine == "request" and each.state == "done"),
        key=lambda each: each.seconds,
    )
    records = [
        msgspec.structs.replace(each, age_seconds=60.0) if each is delayed.records[0] else each for each in calm_run()
    ]
    write_run(traces, records)
    report_timeline(traces)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"timeline: {traces / TIMELINE}"
    assert "<html" in (traces / TIMELINE).read_text()
    said = re.fullmatch(r"the slowest request took (\d+) ms; what it waited for: (.+)", lines[1])
    assert said is not None
    asked = subprocess.run(said[2], shell=True, capture_output=True, text=True, timeout=250)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert asked.stdout.startswith("Done"), asked.stdout
    named = re.search(r"why (\S+) --trace ", said[2])
    assert named is not None
    assert named[1] in asked.stdout
    begun, took = {}, {}
    for record in records:
        instance = record.engine_id, record.rank, record.subject
        if record.machine == "request":
            begun.setdefault(instance, record.mono_ns - round((record.age_seconds or 0.0) * 1e9))
            took[instance] = record.mono_ns - begun[instance]
    longest = max(took.values())
    assert longest in [ns for (_, _, subject), ns in took.items() if subject == named[1]]
    assert int(said[1]) == round(longest / 1e6)
    assert named[1] == delayed.subject
    assert "in vLLM's queue on D" in asked.stdout


def test_traces_without_a_request_have_a_page_and_no_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, [record for record in calm_run() if record.machine == "peer"])
    report_timeline(tmp_path)
    assert capsys.readouterr().out == f"timeline: {tmp_path / TIMELINE}\n"
    assert (tmp_path / TIMELINE).exists()
