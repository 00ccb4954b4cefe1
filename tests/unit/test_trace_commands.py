"""`nixl-actor trace …` on the files of simulated runs: what it says is what happened, and it starts at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from connector.observe.advice import WHAT_TO_DO
from connector.observe.clocks import clocks, lease_of_each_hold
from connector.observe.history import histories, matching, stories
from connector.observe.traced import QUEUED
from connector.tools.cli.main import app
from connector.tools.cli.trace import CANDIDATES_MAX
from connector.tools.course import course
from statemachine import lease
from statemachine.trace import TransitionRecord
from tests.unit.test_history import records
from tests.unit.traced_run import calm_run, faulty_run, write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faulty")
    write_run(directory, faulty_run())
    return directory


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("calm")
    write_run(directory, calm_run())
    return directory


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def as_json(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json"))


# --- summary --------------------------------------------------------------------------------------------------------


def test_every_request_has_one_outcome(faulty: Path) -> None:
    found = as_json("summary", faulty)
    told = [story for story in stories(histories(faulty_run())) if story.requests]
    assert found["requests"] == len(told) == sum(each["count"] for each in found["outcomes"])
    done = sum(all(each.state == "done" for each in story.requests) for story in told)
    assert next(each["count"] for each in found["outcomes"] if each["state"] == "done") == done > 0
    assert {each["reason"] for each in found["outcomes"] if each["state"] == "failed"} <= set(WHAT_TO_DO)
    assert found["records"] == len(faulty_run())


def test_times_are_those_of_the_visits(calm: Path) -> None:
    found = as_json("summary", calm)
    visits = Counter(
        (each.machine, visit.state)
        for each in histories(calm_run())
        for visit in each.visits
        if visit.seconds is not None
    )
    shown = {(each["machine"], each["state"]): each for each in found["states"]}
    of_machines = [key for key in shown if key[1] != QUEUED]
    assert {key: shown[key]["times"]["count"] for key in of_machines} == {key: visits[key] for key in of_machines}
    reading = shown["request", "reading"]["times"]
    assert 0 < reading["p50"] <= reading["p95"] <= reading["p99"] <= reading["longest"] <= reading["total"]
    assert shown["request", QUEUED]["times"]["count"] > 0


def test_the_table_has_what_the_values_have(faulty: Path) -> None:
    found, text = as_json("summary", faulty), run("summary", faulty)
    for each in found["states"]:
        assert each["state"] in text
    for each in found["peers"]:
        assert each["peer"] in text
        assert each["engine_id"] in text


# --- one request, and the slow and the failed ones ------------------------------------------------------------------


def test_one_request_is_shown_on_both_sides_in_order(calm: Path) -> None:
    story = next(each for each in stories(histories(calm_run())) if each.requests and each.leases)
    request = story.requests[0].subject
    moments, *_ = as_json("show", request, calm)
    assert {each["side"] for each in moments} == {"D", "P"}
    offsets = [each["offset_seconds"] for each in moments]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    steps = [(each["machine"], each["event"]) for each in moments]
    assert steps.index(("lease", "Created")) < steps.index(("request", "Created"))
    assert steps.index(("request", "PeerReady")) < len(steps) - 1 - steps[::-1].index(("lease", "ReaderDone"))
    text = run("show", request, calm)
    assert request in text
    assert "reading" in text


def test_answers_come_after_their_questions_though_the_clock_of_p_is_wrong(tmp_path: Path) -> None:
    """P's wall clock is an hour behind."""
    prefill = {record.engine_id for record in calm_run() if record.machine == "lease"}

    def late(record: TransitionRecord) -> TransitionRecord:
        return msgspec.structs.replace(record, wall=record.wall - 3600) if record.engine_id in prefill else record

    write_run(tmp_path, map(late, calm_run()))
    story = next(each for each in stories(histories(calm_run())) if each.requests and each.leases)
    moments, *_ = as_json("show", story.requests[0].subject, tmp_path)
    compared = 0
    for held, lent in zip(story.holds, lease_of_each_hold(story), strict=True):
        assert lent is not None
        of_lease = [at for at, each in enumerate(moments) if (each["machine"], each["rank"]) == ("lease", lent.rank)]
        of_hold = [
            at
            for at, each in enumerate(moments)
            if (each["machine"], each["subject"], each["rank"]) == ("hold", held.subject, held.rank)
        ]
        asked = next(at for at in of_lease if moments[at]["event"] == "Held")
        told = next(at for at in of_hold if moments[at]["event"] == "HeldByPeer")
        let_go = next(at for at in of_hold if moments[at]["event"] == "Unwanted")
        assert asked < told < let_go < of_lease[-1]
        compared += 1
    assert compared > 0
    assert moments[-1]["offset_seconds"] < 60
    assert "was moved by" in run("show", story.requests[0].subject, tmp_path)


def test_any_of_its_ids_finds_a_request_and_another_one_finds_none(calm: Path) -> None:
    story = next(each for each in stories(histories(calm_run())) if each.requests)
    remote = story.requests[0].remote_request_id
    assert story.requests[0].subject in run("show", remote, calm)
    assert "is called nobody-knows" in run("show", "nobody-knows", calm, status=1)


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_how_many_more_have_it_in_their_ids_is_said(calm: Path, options: tuple[str, ...]) -> None:
    requests = as_json("summary", calm)["requests"]
    result = CliRunner().invoke(app, ["trace", "show", "", str(calm), *options])
    assert requests > 10
    said = result.stderr if options else result.stdout
    assert "more requests have " in said


def test_a_request_is_shown_as_from_all_records_though_few_are_decoded(
    faulty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = histories(faulty_run())
    known = stories(told)
    wanted = [each.requests[0].subject for each in known if each.requests][::25]
    assert wanted
    from_all = {
        name: [course(each, clocks(known), told) for each in matching(known, name)[:CANDIDATES_MAX]] for name in wanted
    }
    monkeypatch.setattr("connector.tools.trace_reader.read_trace_file", lambda path: pytest.fail(f"all of {path}"))
    for name, courses in from_all.items():
        shown = as_json("show", name, faulty)
        # Their order between two processes depends on how well the clocks are known.
        assert [
            sorted((m["engine_id"], m["rank"], m["seq"], m["event"], str(m["dwell_seconds"])) for m in one)
            for one in shown
        ] == [
            sorted(
                (m.record.engine_id, m.record.rank, m.record.seq, m.record.event, str(m.dwell_seconds))
                for m in one.moments
            )
            for one in courses
        ]


def test_the_slowest_come_first_with_what_took_their_time(faulty: Path) -> None:
    found = as_json("slow", faulty, "-n", 1000)
    assert len(found) == as_json("summary", faulty)["requests"]
    assert [each["seconds"] for each in found] == sorted((each["seconds"] for each in found), reverse=True)
    for each in found:
        parts = dict(each["parts"])
        assert each["state_seconds"] == max(parts.values(), default=0.0)
        assert each["seconds"] == pytest.approx(sum(parts.values()))
    assert len(as_json("slow", faulty, "-n", 3)) == 3
    assert f"trace show {found[0]['request_id']}" in run("slow", faulty)


def test_failures_are_grouped_with_examples_and_advice(faulty: Path) -> None:
    found = as_json("failures", faulty)
    ended = [each for each in histories(faulty_run()) if each.machine == "request" and each.is_over]
    expected = Counter(each.reason for each in ended if each.state != "done")
    assert {each["kind"]: each["count"] for each in found if each["of"] == "request"} == expected
    assert {each["of"] for each in found} >= {"request", "peer"}
    for each in found:
        assert each["advice"] == WHAT_TO_DO[each["kind"]]
        assert 1 <= len(each["examples"]) <= min(3, each["count"])
    text = run("failures", faulty)
    lines = text.splitlines()
    assert all(each["kind"] in text for each in found)
    assert all(f"  what to do: {each['advice']}" in lines for each in found)


def failed_at(*walls: float) -> list[TransitionRecord]:
    """A request each that failed then."""
    ended = next(each for each in faulty_run() if each.machine == "request" and each.reason)
    one = [each for each in faulty_run() if (each.machine, each.subject) == (ended.machine, ended.subject)]
    return [
        msgspec.structs.replace(each, subject=f"r-{number}", wall=wall, seq=number * len(one) + at)
        for number, wall in enumerate(walls)
        for at, each in enumerate(one)
    ]


def test_the_examples_are_the_last_ones_with_their_dates(tmp_path: Path) -> None:
    begun = 1_790_000_000.25
    write_run(tmp_path, failed_at(*(begun + 3600 * late for late in (4, 0, 3, 1, 2))))
    (found,) = as_json("failures", tmp_path)
    assert [each["subject"] for each in found["examples"]] == ["r-4", "r-2", "r-0"]
    assert found["first_wall"] == begun
    text = run("failures", tmp_path)
    last = datetime.fromtimestamp(begun + 4 * 3600).astimezone().isoformat(" ", "milliseconds")
    assert f"  {last} r-0: " in text
    assert f" to {last}" in text


def test_what_is_older_can_be_left_out(tmp_path: Path) -> None:
    now = time.time()
    write_run(tmp_path, failed_at(now - 7200, now - 1800, now - 60))
    counts = {since: as_json("failures", tmp_path, "--since", since)[0]["count"] for since in ("1d", "1h", "120s")}
    assert counts == {"1d": 3, "1h": 2, "120s": 1}
    assert run("failures", tmp_path, "--since", "1s").endswith("\nnothing has failed\n")
    assert {each["request_id"] for each in as_json("slow", tmp_path, "--since", "1h")} == {"r-1", "r-2"}
    assert "no request on D of that time" in run("slow", tmp_path, "--since", "1s", status=1)
    assert "as in 1h" in run("failures", tmp_path, "--since", "soon", status=2)


def by_two_engines(d_wall: float, p_wall: float) -> list[TransitionRecord]:
    """A request that failed on D, and what another engine has recorded, each at some time of its own clock."""
    failed = failed_at(d_wall - 100, d_wall)
    return failed + [msgspec.structs.replace(each, engine_id="another", wall=p_wall) for each in failed]


@pytest.mark.parametrize("command", ["failures", "slow"])
def test_what_is_left_out_because_the_clock_of_its_engine_is_behind_is_no_secret(tmp_path: Path, command: str) -> None:
    now, engine_id = time.time(), failed_at(0)[0].engine_id
    write_run(tmp_path, by_two_engines(now - 3 * 3600, now))
    result = CliRunner().invoke(app, ["trace", command, str(tmp_path), "--since", "1h"])
    (line,) = result.stderr.splitlines()
    last = datetime.fromtimestamp(now - 3 * 3600).astimezone().isoformat(" ", "seconds")[:16]
    assert "may be left out" in line
    assert re.search(rf"another rank 0 ends .*; {engine_id} rank 0 {last}\S*, 3 h earlier$", line)
    for more in (["--json"], ["--since", "1d"]):
        result = CliRunner().invoke(app, ["trace", command, str(tmp_path), "--since", "1h", *more])
        assert result.stderr == ""


def test_of_clocks_that_agree_nothing_is_said(tmp_path: Path) -> None:
    now = time.time()
    write_run(tmp_path, by_two_engines(now - 30, now))
    assert CliRunner().invoke(app, ["trace", "failures", str(tmp_path), "--since", "60s"]).stderr == ""


def test_traces_that_end_before_that_time_are_named_with_their_end(tmp_path: Path) -> None:
    now = time.time()
    write_run(tmp_path, by_two_engines(now - 7230, now - 7200))
    result = CliRunner().invoke(app, ["trace", "slow", str(tmp_path), "--since", "1h"])
    first, second = result.stderr.splitlines()
    assert "By its own clock another rank 0 ends" in first
    assert second == "no request on D of that time is in these traces"


def test_an_answer_that_was_lent_back_and_not_read_is_no_failure(tmp_path: Path) -> None:
    *before, last = records("lease", "D", "cmpl-d", ((None, "Created", "computing"), ("held", "X", "expired")))
    write_run(tmp_path, [*before, msgspec.structs.replace(last, reason=lease.LENT_BACK)])
    assert as_json("failures", tmp_path) == []
    assert as_json("summary", tmp_path)["lease_outcomes"] == [{"state": "expired", "reason": "lent_back", "count": 1}]


def test_a_long_sentence_is_one_line_in_a_pipe(tmp_path: Path) -> None:
    """So that it is found by what it says."""
    detail = " ".join(f"word-{number}" for number in range(60))
    ended = next(each for each in faulty_run() if each.machine == "request" and each.reason)
    records = [
        msgspec.structs.replace(each, detail=detail if each.reason else None)
        for each in faulty_run()
        if each.subject == ended.subject
    ]
    write_run(tmp_path, records)
    for command in (("failures",), ("show", ended.subject)):
        assert detail in run(*command, tmp_path), command


def test_a_row_is_one_line_in_a_pipe_however_long_ids_are(tmp_path: Path) -> None:
    """Such ids routers make."""
    where = "cmpl-___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_93923d63113b4b338973f24d19d4bf11"
    records = [
        msgspec.structs.replace(each, subject=f"{where}-{each.subject}", peer=each.peer and f"{'e' * 36}-{each.peer}")
        if each.machine == "request"
        else each
        for each in faulty_run()
    ]
    write_run(tmp_path, records)
    lines = run("slow", tmp_path).splitlines()
    for each in as_json("slow", tmp_path):
        (line,) = (line for line in lines if line.split()[:1] == [each["request_id"]])
        assert all(part in line for part, _ in each["parts"])


# --- check and errors -----------------------------------------------------------------------------------------------


def test_check_names_file_and_line_and_says_so_by_its_status(calm: Path, tmp_path: Path) -> None:
    assert "all allowed" in run("check", calm)
    records = list(calm_run())
    at = next(at for at, record in enumerate(records) if record.event == "PeerReady")
    records[at] = msgspec.structs.replace(records[at], to_state="proving")
    write_run(tmp_path, records)
    text = run("check", tmp_path, status=1)
    assert ".jsonl:" in text
    assert "this event leads to done, reading" in text
    result = CliRunner().invoke(app, ["trace", "check", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["findings"][0]["record"]["event"] == "PeerReady"


def test_one_damaged_line_takes_nothing_else_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`check` names it, and concludes nothing from what stood there."""
    write_run(tmp_path, calm_run())
    path = max(tmp_path.iterdir(), key=lambda each: each.stat().st_size)
    lines = path.read_bytes().split(b"\n")
    lines[len(lines) // 2] = b"\0" * 300
    path.write_bytes(b"\n".join(lines))
    named = f"left out 1 damaged line(s) of {path}: the first is line {len(lines) // 2 + 1}: "
    assert as_json("summary", tmp_path)["records"] == len(calm_run()) - 1
    assert any(each.startswith(named) for each in caplog.messages)
    text = run("check", tmp_path, status=1)
    assert text.startswith(f"{path}:{len(lines) // 2 + 1}: this line is damaged: ")
    assert text.endswith(": 1 finding(s)\n")
    (finding,) = json.loads(run("check", tmp_path, "--json", status=1))["findings"]
    assert finding["record"] is None


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    assert run("summary", tmp_path, status=2) == f"{tmp_path}: no trace file is there: their names end in .jsonl\n"
    assert run("summary", "/dev/null", status=2) == "/dev/null is neither a directory nor a trace file\n"
    (tmp_path / "a.jsonl").touch()
    assert run("summary", tmp_path, status=1) == f"no transition is recorded in {tmp_path}\n"
    (tmp_path / "a.jsonl").write_bytes(b'{"schema":99,"version":"7.1.0"}\n')
    text = run("summary", tmp_path, status=2)
    assert "schema 99" in text
    assert len(text.splitlines()) == 1
    (tmp_path / "a.jsonl").write_bytes(b"nonsense\n")
    assert "line 1: not a transition record" in run("check", tmp_path, status=2)


def test_a_machine_of_a_later_version_comes_last(tmp_path: Path) -> None:
    write_run(tmp_path, calm_run()[:200])
    later = [msgspec.structs.replace(calm_run()[0], engine_id=f"e{n}", machine=f"later{n}") for n in (1, 2)]
    write_run(tmp_path, later)
    machines = list(dict.fromkeys(each["machine"] for each in as_json("summary", tmp_path)["states"]))
    assert machines[-2:] == ["later1", "later2"]
    assert "later1" in run("summary", tmp_path)


@pytest.mark.parametrize("wall", [1e12, -1e12, 1e18])
def test_a_time_that_no_calendar_has_is_a_number(tmp_path: Path, wall: float) -> None:
    write_run(tmp_path, [msgspec.structs.replace(each, wall=wall) for each in faulty_run()])
    for command in (["summary"], ["slow"], ["failures"]):
        run(*command, tmp_path)
    assert f"{wall:.3f}" in run("failures", tmp_path)


EVIL = "[red]evil[/nothing]\x1b[31m\x1b]0;title\x07\x9b31m\nConnectionRefused: forged"
"""Request ids come from clients; other texts from files that may have been sent by somebody."""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A trace in which texts of every kind are meant for the terminal."""
    records = [
        msgspec.structs.replace(
            each,
            subject=EVIL + each.subject,
            peer=each.peer and EVIL + each.peer,
            event="PeerReady" if each.event == "Created" and each.seq % 7 else each.event,  # for `check` to find
            reason=each.reason or EVIL,
            detail=EVIL,
        )
        for each in faulty_run()[:400]
    ]
    write_run(tmp_path, records)
    return tmp_path


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("command", [["summary"], ["slow"], ["failures"], ["show", "evil"], ["check"]])
def test_text_from_outside_steers_no_terminal_and_is_no_markup(
    hostile: Path, command: list[str], as_json: bool
) -> None:
    text = run(*command, hostile, *["--json"] * as_json, status=command == ["check"])
    assert "evil" in text
    assert [char for char in text if not char.isprintable() and char != "\n"] == []
    assert not any(line.startswith("ConnectionRefused: forged") for line in text.splitlines())
    assert as_json or command == ["summary"] or "[red]evil[/nothing]" in text.replace("\n", "")


def test_what_is_not_found_steers_no_terminal(calm: Path) -> None:
    said = run("show", EVIL, calm, status=1)
    assert "\x1b" not in said
    assert len(said.splitlines()) == 1


def test_the_command_that_slow_names_can_be_pasted(tmp_path: Path) -> None:
    records = [
        msgspec.structs.replace(each, subject="a;touch b") if each.machine == "request" else each
        for each in calm_run()[:200]
    ]
    write_run(tmp_path, records)
    assert f"nixl-actor trace show 'a;touch b' {tmp_path}" in run("slow", tmp_path)


# --- the program ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["--help"], ["trace", "--help"]])
def test_the_program_starts_without_what_only_engines_need(command: list[str]) -> None:
    program = (
        "import sys, runpy\n"
        "try: runpy.run_module('connector', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(sorted(set(sys.modules) & {'torch', 'vllm', 'nixl', 'zmq', 'trio', 'numpy', 'opentelemetry'}))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, text=True, timeout=250, check=True
    )
    assert "nixl-actor" in finished.stdout
    assert finished.stdout.splitlines()[-1] == "[]"


def test_reading_traces_loads_nothing_of_engines(calm: Path) -> None:
    program = (
        "import sys, runpy\n"
        "try: runpy.run_module('connector', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(sorted(set(sys.modules) & {'torch', 'vllm', 'nixl', 'zmq', 'trio', 'opentelemetry'}))"
    )
    command = [sys.executable, "-c", program, "trace", "summary", str(calm)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"
