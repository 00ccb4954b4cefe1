"""`nixl-actor` from the outside: what it prints and how it ends. Engines that answer are in `tests/actors` and
`tests/e2e`; here nobody does, or a trace is read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from rich.console import Console, Group
from typer.testing import CliRunner

from connector.observe.advice import advice_of
from connector.observe.trace_log import open_trace_log
from connector.tools.asking import Address, AddressError, chosen_addresses, parse_address
from connector.tools.cli.live import _fitted
from connector.tools.cli.main import app
from connector.tools.cli.tables import tables
from connector.tools.explanation import Live, live_of
from connector.tools.live import EngineReport, RankReport, Survey, Surveyor, opened_surveyor
from connector.wire.administration import MeetReport, PlaceRow
from connector.wire.handshake import Advertisement
from connector.wire.inspection import AnyRow, EngineCounts, PeerRow, ReadRow, RecordRow, RequestRow
from statemachine.failures import AbortedByClient, FirstReadNeverEnded, Incompatible
from statemachine.trace import TransitionRecord
from tests.rig.network import free_port
from tests.unit.test_diagnosis import engine
from tests.unit.test_explanation import LENT, ended_with, lent, peer_row, pulled, row, the_answer
from tests.unit.test_failures import EXAMPLES

runner = CliRunner()


def traced(directory: Path, records: list[TransitionRecord]) -> Path:
    for engine_id in {record.engine_id for record in records}:
        sink = open_trace_log(directory, engine_id=engine_id, role="worker", rank=0)
        for record in records:
            if record.engine_id == engine_id:
                sink.write(record)
        sink.close()
    return directory


def test_why_reads_a_trace_directory(tmp_path: Path) -> None:
    traced(tmp_path, [*lent(), *pulled(at=0.5)])
    answer = runner.invoke(app, ["why", "abc", "--trace", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    first, *rest = answer.output.splitlines()
    assert first.startswith("Done: its KV was loaded in")
    assert any("lease held" in line for line in rest)


@pytest.mark.parametrize("arguments", [["--help"], ["ps", "127.0.0.1:1"]], ids=lambda arguments: arguments[0])
def test_a_disk_that_is_full_is_said_in_a_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "connector", *arguments]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ran.stderr == "nixl-actor: [Errno 28] No space left on device\n"
    assert ran.returncode == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_has_no_bytes_for_is_escaped(tmp_path: Path, encoding: str) -> None:
    """Ids come from elsewhere, and the encoding from the locale. The directory's name is no UTF-8."""
    pi, directory = "\N{GREEK SMALL LETTER PI}\N{GRINNING FACE}", tmp_path / "\udce9"
    records = [msgspec.structs.replace(each, subject="cmpl-" + pi, engine_id="P" + pi) for each in lent()]
    records += [msgspec.structs.replace(each, engine_id="D" + pi) for each in pulled(at=0.5)]
    traced(directory, records)

    def said(*command: str) -> str:
        run = [sys.executable, "-m", "connector", *command]
        ran = subprocess.run(
            run,
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "300"},
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.decode(encoding)

    assert "cmpl-\\u03c0\\U0001f600" in said("trace", "show", "cmpl", str(directory))
    assert pi in str(json.loads(said("trace", "show", "cmpl", "--json", str(directory))))
    assert "D\\u03c0\\U0001f600" in said("trace", "summary", str(directory))
    said("trace", "export", "--html", str(tmp_path / "page.html"), str(directory))


def test_why_says_when_it_ended_and_when_what_happened_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    begun = 1_790_000_000.25
    try:
        traced(tmp_path, pulled(at=begun))
        said = runner.invoke(app, ["why", "abc", "--trace", str(tmp_path)]).output
        assert "state     done, since 2026-09-21 19:43:23.250+05:30\n" in said
        assert "happened  from 2026-09-21 19:43:20.250+05:30 on\n" in said
        traced(tmp_path / "open", pulled(at=begun)[:2])
        said = runner.invoke(app, ["why", "abc", "--trace", str(tmp_path / "open")]).output
        assert "state     reading, since 2026-09-21 19:43:21.250+05:30\n" in said
        now, ended = time.time(), [RecordRow(record=each, age_seconds=0.0) for each in pulled(at=time.time() - 53.0)]
        d = engine("D", *reversed(ended))
        monkeypatch.setattr("connector.tools.live.look_up", lambda *_, **__: Survey([d]))
        said = runner.invoke(app, ["why", "abc"]).output
        (since,) = re.findall(r"state     done, since \S+ \S+, ([0-9.]+) s ago", said)
        assert 49.9 <= float(since) <= 50.0 + time.time() - now + 0.1
    finally:
        monkeypatch.undo()
        time.tzset()


def test_why_says_a_long_wait_in_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    d = engine("D", row("reading", since_seconds=1234.0, until_seconds=4000.0).row)
    monkeypatch.setattr("connector.tools.live.look_up", lambda *_, **__: Survey([d]))
    said = runner.invoke(app, ["why", "abc"]).output
    assert "reading, for 20 min 34 s, waits for something, until 1 h 7 min from now at the latest\n" in said


@pytest.mark.parametrize("wall", [1e12, -1e12, 1e18])
def test_why_says_a_time_that_no_calendar_has_as_a_number(tmp_path: Path, wall: float) -> None:
    traced(tmp_path, [msgspec.structs.replace(each, wall=wall) for each in pulled()])
    answer = runner.invoke(app, ["why", "abc", "--trace", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    assert f"since {wall:.3f} (Unix time)\n" in answer.output


@pytest.mark.parametrize("failure", EXAMPLES[:3], ids=lambda failure: failure.kind)
def test_why_ends_with_1_for_a_request_that_failed(tmp_path: Path, failure: object) -> None:
    traced(tmp_path, ended_with(failure))  # type: ignore[arg-type]
    answer = runner.invoke(app, ["why", "abc", "--trace", str(tmp_path)])
    assert answer.exit_code == 1
    assert answer.output.startswith(type(failure).__name__)
    assert "to do" in answer.output


def test_why_ends_with_4_for_a_request_that_waits(tmp_path: Path) -> None:
    traced(tmp_path, pulled()[:2])
    assert runner.invoke(app, ["why", "abc", "--trace", str(tmp_path)]).exit_code == 4


def test_why_lists_several_that_match(tmp_path: Path) -> None:
    other = [
        msgspec.structs.replace(each, subject="cmpl-abcd-0-x", remote_request_id="cmpl-abcd-0-y") for each in pulled()
    ]
    traced(tmp_path, [*pulled(), *other])
    answer = runner.invoke(app, ["why", "ab", "--trace", str(tmp_path)])
    assert answer.output.startswith("2 requests match")
    assert "cmpl-abcd-0-x" in answer.output


def many(directory: Path) -> Path:
    """Of 31 requests one has failed, one waits and one's client has left; none of them is among the newest."""
    found = []
    for number in range(31):
        steps = {
            3: ended_with(EXAMPLES[0]),
            4: ended_with(AbortedByClient()),
            5: pulled()[:2],
        }.get(number, pulled())
        found += [
            msgspec.structs.replace(
                each,
                subject=f"cmpl-n{number:02}-0-d",
                remote_request_id=f"cmpl-n{number:02}-0-p",
                seq=number * 10 + each.seq,
                wall=number * 10 + each.wall,
                mono_ns=number * 10**10 + each.mono_ns,
            )
            for each in steps
        ]
    return traced(directory, found)


def test_of_many_that_match_what_went_wrong_comes_first_and_none_is_left_out_in_silence(tmp_path: Path) -> None:
    answer = runner.invoke(app, ["why", "cmpl-", "--trace", str(many(tmp_path))])
    assert answer.exit_code == 1
    first, *lines = answer.output.splitlines()
    assert first.startswith("31 requests match")
    named = [line.split()[0] for line in lines if line.startswith("  cmpl-")]
    assert named[:4] == ["cmpl-n03-0-d", "cmpl-n05-0-d", "cmpl-n30-0-d", "cmpl-n29-0-d"]
    assert len(named) == 20
    assert lines[-1] == "  ... and 11 more (--json has all)"


def test_a_load_that_failed_comes_before_any_number_of_leases_that_nobody_has_read(tmp_path: Path) -> None:
    """As of the minute in which a decode engine was away."""
    found = ended_with(EXAMPLES[0])
    for number in range(25):
        found += [
            msgspec.structs.replace(
                each,
                subject=f"cmpl-n{number:02}-0-p",
                remote_request_id=f"cmpl-n{number:02}-0-p",
                seq=(number + 1) * 10 + each.seq,
                wall=(number + 1) * 10 + each.wall,
                mono_ns=(number + 1) * 10**10 + each.mono_ns,
            )
            for each in lent((*LENT[:2], ("held", "Expired", "expired")))
        ]
    answer = runner.invoke(app, ["why", "cmpl-", "--failed", "--trace", str(traced(tmp_path, found))])
    first, failed, cause, newest, *_ = answer.output.splitlines()
    assert first.startswith("26 requests match")
    assert " on D " in failed
    assert EXAMPLES[0].kind in cause
    assert newest.startswith("  cmpl-n24-0-p on P ")


def test_why_can_be_asked_for_what_went_wrong_alone(tmp_path: Path) -> None:
    directory = str(many(tmp_path))
    answer = runner.invoke(app, ["why", "cmpl-", "--failed", "--trace", directory])
    assert answer.exit_code == 1
    assert answer.output.startswith(EXAMPLES[0].kind)
    assert "cmpl-n03-0-d on D" in answer.output
    answer = runner.invoke(app, ["why", "cmpl-", "--failed", "--json", "--trace", directory])
    assert [each["request"] for each in msgspec.json.decode(answer.output)["matches"]] == ["cmpl-n03-0-d"]
    answer = runner.invoke(app, ["why", "cmpl-n1", "--failed", "--trace", directory])
    assert (answer.exit_code, answer.output) == (0, "Of 10 request(s) with 'cmpl-n1' in an id none has failed.\n")


@pytest.mark.parametrize(("text", "status"), [("abc", 0), ("abcd", 1), ("ab", 1)])
def test_the_exit_status_of_why_is_not_that_of_a_request_whose_id_begins_alike(
    tmp_path: Path, text: str, status: int
) -> None:
    other = [
        msgspec.structs.replace(each, subject="cmpl-abcd-0-x", remote_request_id="cmpl-abcd-0-y", seq=100 + each.seq)
        for each in ended_with(EXAMPLES[0])
    ]
    traced(tmp_path, [*pulled(), *other])
    assert runner.invoke(app, ["why", text, "--trace", str(tmp_path)]).exit_code == status


def test_equal_ids_of_several_engines_are_told_apart(tmp_path: Path) -> None:
    """A router may send one id to two decode engines."""
    same = {"subject": "same", "remote_request_id": "same"}
    others = {"engine_id": "D2", "rank": 3, "lease_number": 2, "peer": "P2"}
    on_d = [msgspec.structs.replace(each, **same) for each in pulled()]
    on_d2 = [msgspec.structs.replace(each, **same | others) for each in pulled()]
    on_p = [msgspec.structs.replace(each, subject="same-lent", lease_number=9) for each in lent()]
    traced(tmp_path, [*on_d, *on_d2, *on_p])
    said = runner.invoke(app, ["why", "sam", "--trace", str(tmp_path)]).output.splitlines()
    assert {line.strip() for line in said if line.startswith("  same")} == {
        "same on D (D rank 0)",
        "same on D (D2 rank 3)",
        "same-lent on P (P rank 0)",
    }


def test_texts_from_elsewhere_do_not_steer_the_terminal(tmp_path: Path) -> None:
    *before, last = pulled()
    forged = msgspec.structs.replace(last, to_state="failed", reason="X\x1b[2J", detail="a\nConnectionRefused: forged")
    traced(tmp_path, [*before, forged])
    answer = runner.invoke(app, ["why", "abc", "--trace", str(tmp_path)])
    assert "\x1b" not in answer.output
    assert not any(line.startswith("ConnectionRefused") for line in answer.output.splitlines())


def test_why_as_json(tmp_path: Path) -> None:
    traced(tmp_path, pulled())
    answer = runner.invoke(app, ["why", "abc", "--trace", str(tmp_path), "--json"])
    found = msgspec.json.decode(answer.output)
    assert found["schema"] == 1
    assert [(each["outcome"], each["state"], each["side"]) for each in found["matches"]] == [("served", "done", "D")]


def test_why_of_something_unknown(tmp_path: Path) -> None:
    traced(tmp_path, pulled())
    answer = runner.invoke(app, ["why", "xyz", "--trace", str(tmp_path)])
    assert answer.exit_code == 3
    assert "'xyz'" in answer.output
    assert str(tmp_path) in answer.output
    assert "without kv_transfer_params" in answer.output
    assert "the running engines do (without --trace)" in answer.output


@pytest.mark.parametrize("name", ["excerpt.txt", "excerpt", "x.jsonl.old", "x.2.jsonl"])
def test_why_reads_a_file_whatever_its_name(tmp_path: Path, name: str) -> None:
    directory = traced(tmp_path / "traces", pulled())
    (tmp_path / name).write_bytes(b"".join(path.read_bytes() for path in directory.iterdir()))
    answer = runner.invoke(app, ["why", "abc", "--trace", str(tmp_path / name)])
    assert answer.output.startswith("Done: ")
    assert answer.exit_code == 0


def test_why_of_a_directory_without_trace_files_does_not_say_that_the_request_never_came(tmp_path: Path) -> None:
    (tmp_path / "excerpt.txt").write_text("not read")
    answer = runner.invoke(app, ["why", "abc", "--trace", str(tmp_path)])
    assert answer.output == f"{tmp_path}: no trace file is there: their names end in .jsonl\n"
    assert answer.exit_code == 2


def test_why_of_a_directory_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("nonsense\n")
    assert runner.invoke(app, ["why", "xyz", "--trace", str(tmp_path)]).exit_code == 2


def test_why_of_a_trace_that_a_later_version_wrote_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"schema":99,"version":"7.1.0"}\n')
    answer = runner.invoke(app, ["why", "xyz", "--trace", str(tmp_path)])
    assert answer.exit_code == 2
    assert isinstance(answer.exception, SystemExit)
    (line,) = answer.output.splitlines()
    assert "schema 99" in line


@pytest.mark.parametrize("command", [["why", "abc"], ["ps"], ["ps", "--json"], ["doctor"], ["doctor", "--json"]])
def test_where_nobody_listens_the_exit_status_says_so(command: list[str]) -> None:
    port = free_port()
    answer = runner.invoke(app, [*command, "--engine", f"127.0.0.1:{port}"])
    assert answer.exit_code == 2
    assert "nothing listens" in answer.output
    assert str(port) in answer.output


@pytest.mark.parametrize(
    "command", [["why", "abc", "--engine"], ["ps"], ["doctor"], ["drain"], ["meet", "127.0.0.1:1"]]
)
def test_ctrl_c_while_an_engine_is_silent_ends_it_quietly(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        arguments = [command[0], address, command[1]] if command[0] == "meet" else [*command, address]
        asking = subprocess.Popen(
            [sys.executable, "-m", "connector", *arguments, "--timeout", "60"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        connection, _ = silent.accept()
        with connection:
            asking.send_signal(signal.SIGINT)
            said, _ = asking.communicate(timeout=60)
    assert asking.returncode == 130
    drains = "interrupted; engines that were told to drain go on draining: nixl-actor ps shows which\n"
    assert said == (drains if command[0] == "drain" else "")


def test_more_engines_are_asked_than_a_shell_allows_sockets() -> None:
    """Its soft limit of descriptors is raised."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(40)]
        places = [f"127.0.0.1:{server.getsockname()[1]}" for server in silent]
        command = [sys.executable, "-m", "connector", "ps", "--json", *places]
        limited = ["sh", "-c", 'ulimit -S -n 64; exec "$@"', "sh", *command]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert {each["problem_kind"] for each in json.loads(done.stdout)["engines"]} == {"HandshakeTimeout"}


@pytest.mark.parametrize("command", ["ps", "doctor"])
def test_an_engine_is_named_with_the_option_or_without(command: str) -> None:
    ports = [free_port(), free_port()]
    answer = runner.invoke(app, [command, f"127.0.0.1:{ports[0]}", "--engine", f"127.0.0.1:{ports[1]}"])
    assert answer.exit_code == 2
    assert "unexpected" not in answer.output
    assert all(f"127.0.0.1:{port}" in answer.output for port in ports)


@pytest.mark.parametrize(
    ("lent", "pool", "shown"), [(3000, 12000, "3000 of 12000"), (0, 12000, "0"), (3000, 0, "3000")]
)
def test_ps_says_of_how_many_blocks_some_are_lent(
    monkeypatch: pytest.MonkeyPatch, lent: int, pool: int, shown: str
) -> None:
    found = Survey([engine("P", counts=EngineCounts(lent_blocks=lent), blocks=pool)])
    monkeypatch.setattr("connector.tools.cli.live._survey_everything", lambda *_: found)
    header, row = runner.invoke(app, ["ps"]).output.splitlines()[1:3]
    begin = header.index("lent blocks")
    assert row[begin : header.index("READs")].strip() == shown


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that `ps --watch` looks at three times."""
    looks = iter([None, None])

    def sleep(_: float) -> None:
        if next(looks, KeyboardInterrupt) is KeyboardInterrupt:
            raise KeyboardInterrupt

    monkeypatch.setattr("connector.tools.cli.live._survey_everything", lambda *_: Survey([engine("D")]))
    monkeypatch.setattr("connector.tools.cli.live.time.sleep", sleep)


@pytest.mark.usefixtures("watched")
def test_ps_that_watches_without_a_terminal_prints_the_tables_again_and_again() -> None:
    said = runner.invoke(app, ["ps", "--watch"]).output
    looks = re.split(r"^--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\S*\n", said, flags=re.MULTILINE)
    assert looks[0] == ""
    assert len(looks) == 4
    assert all(re.match(r"Engines *\nengine .*\nD/0 ", look) for look in looks[1:])


@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "screen"])
def test_ps_that_watches_ends_with_its_terminal(form: list[str]) -> None:
    """As one in a container does not get a signal when the client of `kubectl exec` goes."""
    ours, theirs = os.openpty()
    watch = [sys.executable, "-m", "connector", "ps", "--watch", "--interval", "0.1", *form, str(free_port())]
    process = subprocess.Popen(watch, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        said = b""
        while b"nothing listens" not in said:
            said += os.read(ours, 1 << 16)
        os.close(ours)
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("peers", "left_out"), [(3, None), (30, 16)])
def test_a_screen_that_is_too_low_says_so(peers: int, left_out: int | None) -> None:
    """Two titles and heads, one engine, and its peers, on twenty lines."""
    shown = Group(*tables(Survey([engine("D", *[peer_row("ready").row] * peers)]), 300))
    console = Console(width=300, height=20, file=io.StringIO(), force_terminal=True)
    (first, *_) = ["".join(part.text for part in line) for line in console.render_lines(_fitted(console, shown))]
    assert re.match("Engines" if left_out is None else f"{left_out} lines do not fit on this screen", first)


@pytest.mark.usefixtures("watched")
def test_ps_that_watches_prints_an_object_a_line() -> None:
    lines = runner.invoke(app, ["ps", "--watch", "--json"]).output.splitlines()
    assert [msgspec.json.decode(line)["engines"][0]["engine_id"] for line in lines] == ["D"] * 3


@pytest.mark.parametrize(("no_color", "is_styled"), [(None, True), ("", True), ("1", False), ("0", False)])
@pytest.mark.parametrize("command", [["doctor"], ["why", "abc"]])
def test_who_asks_for_no_colours_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], no_color: str | None, is_styled: bool
) -> None:
    if no_color is None:
        monkeypatch.delenv("NO_COLOR", raising=False)
    else:
        monkeypatch.setenv("NO_COLOR", no_color)
    where = ["--trace", str(traced(tmp_path, pulled()))] if command[0] == "why" else ["-e", f"127.0.0.1:{free_port()}"]
    answer = runner.invoke(app, [*command, *where], color=True)  # as on a terminal
    assert ("\x1b[" in answer.output) == is_styled


def test_doctor_says_which_address_was_given_twice() -> None:
    address = f"127.0.0.1:{free_port()}"
    answer = runner.invoke(app, ["doctor", "--engine", address, "--engine", address])
    assert answer.exit_code == 2
    assert f"[one engine] {address} was named 2 times" in answer.output
    assert answer.output.count("ConnectionRefused") == 1


def test_a_text_that_engines_are_not_asked_for_is_an_error_of_usage() -> None:
    """They take it for a malformed message, and warn of who sends it."""
    answer = runner.invoke(app, ["why", "a" * 513, "--engine", f"127.0.0.1:{free_port()}"])
    assert answer.exit_code == 2
    assert "at most 512 characters" in answer.output
    assert "could be asked" not in answer.output


def test_an_address_that_is_none_is_an_error_of_usage() -> None:
    answer = runner.invoke(app, ["ps", "--engine", "nowhere"])
    assert answer.exit_code == 2
    assert "HOST:PORT" in answer.output


@pytest.mark.parametrize(
    ("named", "environment", "expected"),
    [
        (["h:1", "[::1]:2"], {"NIXL_ACTOR_ENGINES": "x:9"}, [Address("h", 1), Address("::1", 2)]),
        (["h:1", "h:1"], {}, [Address("h", 1), Address("h", 1)]),
        ([], {"NIXL_ACTOR_ENGINES": "a:1, b:2 c:3"}, [Address("a", 1), Address("b", 2), Address("c", 3)]),
        ([], {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5700"}, [Address("127.0.0.1", 5700)]),
        ([], {"VLLM_NIXL_SIDE_CHANNEL_HOST": "h"}, [Address("h", 5600)]),
        ([], {"VLLM_NIXL_SIDE_CHANNEL_HOST": "fe80::1%eth0"}, [Address("fe80::1%eth0", 5600)]),
        ([], {"VLLM_NIXL_SIDE_CHANNEL_HOST": "[::1]"}, [Address("::1", 5600)]),
        ([], {}, [Address("127.0.0.1", 5600)]),
        (["5601"], {}, [Address("127.0.0.1", 5601)]),
    ],
)
def test_which_engines_are_asked(named: list[str], environment: dict[str, str], expected: list[Address]) -> None:
    assert chosen_addresses(named, environment) == expected


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NIXL_ACTOR_ENGINES": "a:b c"}, "NIXL_ACTOR_ENGINES: 'a:b' is not HOST:PORT"),
        ({"VLLM_NIXL_SIDE_CHANNEL_PORT": "p"}, "VLLM_NIXL_SIDE_CHANNEL_PORT: '127.0.0.1:p' is not HOST:PORT"),
        ({"VLLM_NIXL_SIDE_CHANNEL_HOST": "h" * 300}, "VLLM_NIXL_SIDE_CHANNEL_HOST and "),
    ],
)
def test_a_variable_that_is_wrong_is_named(variables: dict[str, str], said: str) -> None:
    answer = runner.invoke(app, ["ps"], env={"NIXL_ACTOR_ENGINES": None, "COLUMNS": "400", **variables})
    assert answer.exit_code == 2
    assert said in answer.output
    with pytest.raises(AddressError, match=r"^'a:b' is not HOST:PORT"):  # what was typed needs no name
        chosen_addresses(["a:b"], variables)


def test_on_the_other_side_the_ids_of_the_request_that_is_meant_are_looked_for() -> None:
    """More requests have ids that begin alike than are looked for at once."""

    def waits(number: int) -> RequestRow:
        return row("queued", request_id=f"cmpl-req-{number}-0-x", remote_request_id=f"lent-{number}").row

    found = Survey([engine("D", *map(waits, range(10, 30)), waits(1))])
    assert found.other_names("req-1") == found.other_names("cmpl-req-1-0-x") == ["lent-1"]
    assert len(found.other_names("req-")) == 21
    assert found.other_names("lent-1") == ["cmpl-req-1-0-x"]


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_in_a_narrow_terminal_no_id_and_no_head_is_cut_to_pieces(columns: int) -> None:
    """Its tables go on in further ones. Sixty requests are more than are shown."""
    ids = [f"cmpl-{number:036}-0-0123abcd" for number in range(60)]
    found = Survey([engine("decode-1", peer_row("backoff").row, *(row("queued", request_id=each).row for each in ids))])
    with io.StringIO() as printed:
        Console(width=columns, file=printed).print(*tables(found, columns), sep="\n")
        said = printed.getvalue()
    assert max(map(len, said.splitlines())) <= columns
    words = said.split()
    for head in ("quarantined", "requests", "problem", "holds", "failure", "10.0.0.1:5600", *ids[:50]):
        assert head in words
    assert "... 10 more (--json has all)" in said
    assert ("further columns" in said) == (columns < 200)


@pytest.mark.parametrize("told", [lambda found: list(found.rows()), tables], ids=["why", "ps"])
def test_to_tell_rows_takes_no_look_at_all_of_them_for_each(told: Callable[[Survey], Sequence[object]]) -> None:
    """A worker has ten thousands of them to tell when nobody has read what it lent for a while."""

    def looks_at(requests: int) -> int:
        looks = 0

        class Rows(tuple[AnyRow, ...]):
            def __iter__(self) -> Iterator[AnyRow]:
                nonlocal looks
                looks += 1
                return super().__iter__()

        report = engine("D", *(row("queued", request_id=f"cmpl-{number}").row for number in range(requests)))
        counted = replace(report, ranks=tuple(replace(each, rows=Rows(each.rows)) for each in report.ranks))
        assert told(Survey([counted]))
        return looks

    assert looks_at(100) == looks_at(1)


@pytest.mark.parametrize("text", ["", "h:", "h:0", "h:70000", "h:-1", "h:x", "x" * 300 + ":1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(AddressError):
        parse_address(text)


@pytest.mark.parametrize("text", ["::1", "::1:5600", "fe80::1%eth0", "[::1]", "[::1:5600", "::1]:5600"])
def test_an_ipv6_address_without_brackets_is_refused_with_what_to_write(text: str) -> None:
    answer = runner.invoke(app, ["ps", "-e", text], env={"COLUMNS": "200"})
    assert answer.exit_code == 2
    assert "an IPv6 address is written in brackets, as in [::1]:5600" in answer.output


def test_an_ipv6_address_is_said_as_it_may_be_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    address = parse_address("[::1]:5600")
    assert address == Address("::1", 5600)
    assert parse_address(str(address)) == address
    met: list[str] = []
    monkeypatch.setattr("connector.tools.administration.meet", lambda engine, places, **_: met.extend(places) or {})
    assert runner.invoke(app, ["meet", "h:1", "[::1]:5600", "h:2"]).exit_code == 0
    assert met == ["[::1]:5600", "h:2"]


def test_who_could_not_be_met_is_told_with_the_reason_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    unlike = Incompatible(peer="p", address="h:1", field="dtype", local="bf16", remote="fp8", advice="start both alike")
    unread = FirstReadNeverEnded(peer="q", address="h:2", worker="PP 0 TP 1", timeout_seconds=5.0)
    rows = (
        PlaceRow(place="h:1", state="pausing", engine_id="p", problem=str(unlike), kind=unlike.kind),
        PlaceRow(place="h:2", state="asking", engine_id="q", problem=str(unread), kind=unread.kind),
        PlaceRow(place="h:3", state="pausing", engine_id="", problem="nothing listens there"),
        PlaceRow(place="h:4", state="met", engine_id="r", problem=""),
        PlaceRow(place="h:5", state="pausing", engine_id="s", problem="as later versions say", kind="OfALaterVersion"),
    )
    reports = {(0, 0): MeetReport(rows=rows)}
    monkeypatch.setattr("connector.tools.administration.meet", lambda *_, **__: reports)
    answer = runner.invoke(app, ["meet", "d:1", "h:1"])
    assert answer.exit_code == 1
    assert answer.output.splitlines() == [
        "rank 0.0, h:1: pausing engine p: Incompatible: prefill engine p at h:1 is incompatible: dtype is fp8 there "
        "and bf16 here",
        "    start both alike",
        f"rank 0.0, h:2: asking engine q: FirstReadNeverEnded: {unread}",
        f"    {advice_of(unread)}",
        "rank 0.0, h:3: pausing: nothing listens there",
        "rank 0.0, h:4: met engine r",
        "rank 0.0, h:5: pausing engine s: OfALaterVersion: as later versions say",
    ]


def test_an_engine_that_is_silent_at_an_ipv6_address_is_the_peer_that_is_known_there() -> None:
    d = engine("D", peer_row("ready", address="[::1]:5600").row)
    p = EngineReport(address=Address("::1", 5600), problem="nothing listens there", problem_kind="ConnectionRefused")
    (silent,) = Survey([d, p]).silent()
    assert (silent.engine_id, silent.address) == ("P", "[::1]:5600")
    assert Live(silent=(silent,)).silence_of(None, "[::1]:5600") is silent
    assert Live(silent=(silent,)).silence_of(None, None) is None


def test_who_has_not_answered_is_told_with_the_first_reason_that_there_is() -> None:
    """One that serves no more and still answers has; so has one of another connector, which says nothing of itself."""
    d = engine("D")
    mute = replace(d.ranks[0], rows=(), problem="no answer from its worker")
    of_builtin = Advertisement(compatibility_hash="h", metadata=None, actor=None, error=None)
    builtin = replace(mute, advertisement=of_builtin, problem="it is built in")
    told = [
        (replace(d, refusal="its device is gone"), None),
        (replace(d, ranks=(builtin,)), None),
        (replace(d, ranks=(replace(mute, advertisement=None), *d.ranks)), ("ControlLinkLost", mute.problem)),
        (replace(d, ranks=(*d.ranks, builtin, mute)), ("ControlLinkLost", "no answer from its worker")),
        (replace(d, ranks=(mute,), refusal="it ends"), ("HandshakeRefused", "it ends")),
        (replace(d, ranks=(mute,), problem="hangs", problem_kind="HandshakeTimeout"), ("HandshakeTimeout", "hangs")),
    ]
    for report, said in told:
        silence = report.silence({})
        assert (None if silence is None else (silence.kind, silence.problem)) == said
        assert Survey([report]).silent() == ([] if silence is None else [silence])
    assert [report.first_problem for report, _ in told] == [
        *("its device is gone", "it is built in", "no answer from its worker"),
        *("it is built in", "it ends", "hangs"),
    ]


def test_of_two_connections_to_one_engine_none_is_lost_where_it_is_asked_again() -> None:
    """Requests that describe it by unlike sizes make two; engines are asked again where an id on P is another."""
    waits, fails = peer_row("handshaking"), peer_row("backoff", failure="BadParams", requests=0)
    said = engine("D", waits.row, fails.row, row("pending_handshake").row)
    found = Survey([said]).with_rows_of(Survey([engine("D", row("pending_handshake", since_seconds=9.0).row)]))
    _, live = live_of(found.rows())
    assert [each.row.state for each in live.of(PeerRow)] == ["handshaking", "backoff"]
    assert [each.row.since_seconds for each in live.of(RequestRow)] == [9.0]
    assert "handshake" in the_answer([], live).cause


def test_an_engine_is_named_once_by_another_whose_ranks_all_read_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (rank,) = engine("D", peer_row("ready").row).ranks
    d = replace(engine("D"), ranks=tuple(replace(rank, rank=(0, number)) for number in range(4)))

    async def found(self: Surveyor, address: Address, named_by: tuple[str, ...], *_: Any) -> EngineReport:
        return replace(d, address=address) if not named_by else EngineReport(address=address, named_by=named_by)

    monkeypatch.setattr(Surveyor, "_ask_engine", found)

    async def test() -> Survey:
        async with opened_surveyor() as surveyor:
            return await surveyor.survey([Address("127.0.0.1", 5600)], [])

    assert [each.named_by for each in trio.run(test).engines] == [(), ("D",)]


# --- workers that do not answer ---------------------------------------------------------------------------------------


def with_a_silent_rank(report: EngineReport) -> EngineReport:
    (answering,) = report.ranks
    silent = RankReport(rank=(0, 1), advertisement=answering.advertisement, problem="its control socket is silent")
    return replace(report, ranks=(answering, silent))


def test_ps_shows_a_worker_that_does_not_answer_beside_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Survey([with_a_silent_rank(engine("decode-1"))])
    monkeypatch.setattr("connector.tools.live.survey", lambda *_, **__: found)
    answer = runner.invoke(app, ["ps", "decode:5600"], env={"COLUMNS": "400"})
    assert answer.exit_code == 0
    lines = [line for line in answer.output.splitlines() if line.startswith("decode-1/")]
    assert [line.split()[0] for line in lines] == ["decode-1/0", "decode-1/1"]
    assert ["its control socket is silent" in line for line in lines] == [False, True]


def test_why_says_which_engines_it_could_not_ask_whatever_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    served = [RecordRow(record=each, age_seconds=0.0) for each in reversed(pulled())]
    others = [msgspec.structs.replace(each, subject="cmpl-abcd-0-x", remote_request_id="y") for each in pulled()]
    rows = [*served, *(RecordRow(record=each, age_seconds=0.0) for each in reversed(others))]
    ill = replace(engine("ill"), address=Address("ill", 5600), ranks=(), problem="it does not answer")
    monkeypatch.setattr("connector.tools.live.look_up", lambda *_, **__: Survey([engine("D", *rows), ill]))
    said = "ill:5600 could not be asked: it does not answer"
    for arguments, status in ((("ab",), 0), (("ab", "--failed"), 2), (("ab", "--json"), 0)):
        answer = runner.invoke(app, ["why", *arguments, "-e", "decode:5600"])
        assert answer.exit_code == status, answer.output
        assert said in answer.output


def test_a_rank_that_had_no_time_to_say_who_it_is_may_not_have_loaded_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm serve` is busy: its listener answers for one rank in time, and not for the other."""
    served = [RecordRow(record=each, age_seconds=0.0) for each in reversed(pulled())]
    d = engine("D", *served)
    late = RankReport(rank=(0, 1), problem="its handshake: no answer in the time that was left", ran_out=True)
    monkeypatch.setattr("connector.tools.live.look_up", lambda *_, **__: Survey([replace(d, ranks=(*d.ranks, late))]))
    answer = runner.invoke(app, ["why", "abc"])
    assert answer.exit_code == 4
    assert answer.output.startswith("Loaded on rank 0, and whether it is on all others is not known")


def test_where_one_engine_knows_nothing_and_another_is_silent_what_has_failed_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ill = replace(engine("ill"), address=Address("ill", 5600), ranks=(), problem="it does not answer")
    monkeypatch.setattr("connector.tools.live.look_up", lambda *_, **__: Survey([engine("D"), ill]))
    for arguments, status in ((("abc",), 3), (("abc", "--failed"), 2), (("abc", "--failed", "--json"), 2)):
        answer = runner.invoke(app, ["why", *arguments, "-e", "decode:5600"])
        assert answer.exit_code == status, answer.output
        assert "ill:5600 could not be asked" in answer.output


def test_an_id_that_is_no_text_is_refused_in_a_line() -> None:
    """As of a terminal with another encoding."""
    answer = runner.invoke(app, ["why", "cmpl-\udce9", "-e", "127.0.0.1:1"])
    assert answer.exit_code == 2
    assert "not UTF-8" in answer.output


def test_what_is_wrong_is_not_among_the_rows_that_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(age_seconds: float) -> ReadRow:
        return ReadRow(request_id="r", read=0, peer="P", age_seconds=age_seconds, descriptors=1, is_posted=True)

    busy = engine("busy", *[peer_row("ready").row] * 60, *[read(0.5)] * 60)
    ill = engine("ill", peer_row("backoff").row, read(59.0))
    monkeypatch.setattr("connector.tools.live.survey", lambda *_, **__: Survey([busy, ill]))
    said = runner.invoke(app, ["ps", "decode:5600"]).output
    for words in (("backoff",), ("59", "s")):
        (line,) = [each for each in said.splitlines() if set(words) <= set(each.split())]
        assert line.startswith("ill/0")


def test_who_names_no_address_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NIXL_ACTOR_ENGINES", raising=False)
    ill = replace(engine("ill"), ranks=(), problem="nothing listens there")
    monkeypatch.setattr("connector.tools.live.look_up", lambda *_, **__: Survey([ill]))
    assert "--engine HOST:PORT" in runner.invoke(app, ["why", "abc"]).output
    assert "--engine HOST:PORT" not in runner.invoke(app, ["why", "abc", "-e", "ill:5600"]).output
