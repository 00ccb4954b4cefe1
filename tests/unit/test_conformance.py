"""The check of traces: what the simulator's engines did is allowed, and whatever is changed in it is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from connector.observe.trace_log import is_sampled, open_trace_log
from connector.observe.traced import MACHINES
from connector.tools.conformance import check, check_records
from connector.tools.trace_reader import read_processes
from statemachine.trace import TransitionRecord
from tests.unit.traced_run import calm_run, faulty_run, write_run

Records = list[TransitionRecord]


@pytest.mark.parametrize("run", [calm_run, faulty_run])
def test_what_the_cores_did_is_allowed(run: Callable[[], tuple[TransitionRecord, ...]]) -> None:
    verdict = check_records(run())
    assert verdict.findings == ()
    assert verdict.records == len(run()) > 500
    assert {record.machine for record in run()} == {machine.name for machine in MACHINES}


def test_files_and_lines_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, calm_run())
    assert check(read_processes(tmp_path)).findings == ()
    path = next(each for each in sorted(tmp_path.iterdir()) if b'"machine":"request"' in each.read_bytes())
    lines = path.read_bytes().splitlines(True)
    number = next(at for at, line in enumerate(lines, 1) if b'"to_state":"done"' in line and b'"request"' in line)
    lines[number - 1] = lines[number - 1].replace(b'"to_state":"done"', b'"to_state":"draining"')
    path.write_bytes(b"".join(lines))
    finding = check(read_processes(tmp_path)).findings[0]
    assert (finding.path, finding.line) == (path, number)
    assert str(finding).startswith(f"{path}:{number}: ")


# --- one thing is wrong ---------------------------------------------------------------------------------------------


def _only(records: Records, machine: str, **fields: object) -> int:
    """Index of the first such record."""
    return next(
        index
        for index, record in enumerate(records)
        if record.machine == machine and all(getattr(record, name) == value for name, value in fields.items())
    )


def _change(records: Records, index: int, **fields: object) -> None:
    records[index] = msgspec.structs.replace(records[index], **fields)


def _lose_a_record(records: Records) -> None:
    del records[_only(records, "lease", event="Held")]


def _repeat_a_number(records: Records) -> None:
    index = _only(records, "hold", event="Unwanted")
    _change(records, index, seq=records[index].seq - 1)


def _turn_the_clock_back(records: Records) -> None:
    index = _only(records, "hold", event="Unwanted")
    _change(records, index, mono_ns=0)


def _take_a_way_that_is_not_in_the_table(records: Records) -> None:
    _change(records, _only(records, "request", event="PeerReady"), to_state="proving")


def _take_an_impossible_event(records: Records) -> None:
    _change(records, _only(records, "request", event="PeerReady"), event="ReadQuiesced")


def _take_an_ignored_event(records: Records) -> None:
    _change(records, _only(records, "lease", event="Granted", to_state="held"), event="Renewed")


def _name_an_event_that_there_is_not(records: Records) -> None:
    _change(records, _only(records, "hold", event="Unwanted"), event="LetItBe")


def _name_a_state_that_there_is_not(records: Records) -> None:
    _change(records, _only(records, "peer", event="Wanted"), to_state="excited")


def _name_a_machine_that_there_is_not(records: Records) -> None:
    _change(records, _only(records, "lease", event="Granted"), machine="loan")


def _begin_in_another_state(records: Records) -> None:
    _change(records, _only(records, "lease", event="Created"), to_state="held")


def _make_a_request_twice(records: Records) -> None:
    index = _only(records, "request", event="PeerReady")
    _change(records, index, event="Created", from_state=None, to_state="pending_handshake")


def _lend_under_the_name_of_another_lease(records: Records) -> None:
    first = records[_only(records, "lease", event="ReaderDone", to_state="done")]
    for index, record in enumerate(records):
        if record.machine == "lease" and record.from_state is None and record.engine_id == first.engine_id:
            last = index
    _change(records, last, subject=first.subject, lease_number=first.lease_number)


def _free_a_lease_twice(records: Records) -> None:
    index = _only(records, "lease", event="ReaderDone", to_state="done")
    key = (records[index].engine_id, records[index].rank)
    later = next(
        at
        for at in range(index + 1, len(records))
        if (records[at].engine_id, records[at].rank) == key and records[at].machine == "lease"
    )
    again = {name: getattr(records[index], name) for name in ("subject", "lease_number", "from_state", "event")}
    _change(records, later, **again, to_state="done")


def _fail_without_a_reason(records: Records) -> None:
    index = _only(records, "request", event="PeerReady")
    _change(records, index, event="PeerFailed", to_state="failed")


def _succeed_with_a_reason(records: Records) -> None:
    _change(records, _only(records, "request", to_state="done"), reason="TransferError")


def _be_done_without_a_proof(records: Records) -> None:
    index = _only(records, "request", to_state="done", from_state="reading")
    done = records[index]
    for at, record in enumerate(records):
        if (
            record.machine == "hold"
            and (record.remote_request_id, record.engine_id, record.rank)
            == (done.remote_request_id, done.engine_id, done.rank)
            and record.event == "HeldByPeer"
        ):
            _change(records, at, event="Reconnected", to_state="wanted")


def _read_while_the_peer_is_not_ready(records: Records) -> None:
    index = _only(records, "peer", event="HandshakeSucceeded")
    _change(records, index, event="HandshakeFailed", to_state="backoff", reason="HandshakeTimeout")


def _read_what_was_withdrawn(records: Records) -> None:
    done = records[_only(records, "request", to_state="done", from_state="reading")]
    for at, record in enumerate(records):
        if record.machine == "lease" and record.subject == done.remote_request_id:
            ends = record.to_state == "done"
            if record.event == "Granted" and not ends:
                _change(records, at, event="Held", to_state="computing")
            elif ends:
                _change(records, at, event="Withdrawn", from_state="computing", to_state="withdrawn")
            else:
                _change(records, at, from_state=record.from_state and "computing", to_state="computing")


def _hold_what_all_readers_have_released(records: Records) -> None:
    index = _only(records, "hold", event="Unwanted")
    let_go = records[index]
    for at, record in enumerate(records):
        is_of_lease = record.machine == "hold" and record.remote_request_id == let_go.remote_request_id
        if is_of_lease and record.event in ("Unwanted", "ReleaseConfirmed"):
            _change(records, at, event="HeldByPeer", from_state="held", to_state="held")


def _hold_what_p_has_never_made(records: Records) -> None:
    """Neither the first nor the last lease of its P: what was before or after may be of another life of P."""
    told = [record for record in records if record.event == "HeldByPeer"]
    middle = told[len(told) // 2]
    for at, record in reversed(list(enumerate(records))):
        if record.machine == "lease" and record.subject == middle.remote_request_id:
            del records[at]
    numbers: dict[tuple[str, int], int] = {}
    for at, record in enumerate(records):
        seq = numbers.get((record.engine_id, record.rank), -1) + 1
        numbers[record.engine_id, record.rank] = seq
        _change(records, at, seq=seq)


@pytest.mark.parametrize(
    ("tamper", "problem"),
    [
        (_lose_a_record, "its number is"),
        (_repeat_a_number, "its number is"),
        (_turn_the_clock_back, "the clock of its process went back"),
        (_take_a_way_that_is_not_in_the_table, "this event leads to done, reading"),
        (_take_an_impossible_event, "this event is impossible in that state (no READ is ordered before"),
        (_take_an_ignored_event, "this event changes nothing in that state (the grant starts a fresh lease"),
        (_name_an_event_that_there_is_not, "LetItBe is no event"),
        (_name_a_state_that_there_is_not, "excited is no state"),
        (_name_a_machine_that_there_is_not, "there is no machine loan"),
        (_begin_in_another_state, "is made in state computing"),
        (_make_a_request_twice, "it is in state pending_handshake already"),
        (_lend_under_the_name_of_another_lease, "a lease that is over never comes back"),
        (_free_a_lease_twice, "it is over, or was never made"),
        (_fail_without_a_reason, "no kind of failure"),
        (_succeed_with_a_reason, "it is done, and has a reason"),
        (_be_done_without_a_proof, "its lease is not proven"),
        (_read_while_the_peer_is_not_ready, "its peer is not ready (backoff)"),
        (_read_what_was_withdrawn, "it has read a lease that P withdrew"),
        (_hold_what_all_readers_have_released, "its readers were done, and"),
        (_hold_what_p_has_never_made, "it was told that a lease is held which P has never made"),
    ],
    ids=lambda value: value.__name__.lstrip("_") if callable(value) else "",
)
def test_what_is_changed_is_found(tamper: Callable[[Records], None], problem: str) -> None:
    records = list(calm_run())
    tamper(records)
    problems = [finding.problem for finding in check_records(records).findings]
    assert any(problem in each for each in problems), problems[:3]


# --- what is not there ----------------------------------------------------------------------------------------------


def test_nothing_is_concluded_from_what_rotation_has_deleted() -> None:
    for run in (calm_run(), faulty_run()):
        for share in (0.2, 0.5, 0.8):
            assert check_records(run[int(share * len(run)) :], is_whole=False).findings == ()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_nothing_is_concluded_from_what_is_not_sampled(share: float) -> None:
    for run in (calm_run(), faulty_run()):
        sampled = [
            record
            for record in run
            if record.machine == "peer" or is_sampled(record.remote_request_id or record.subject, share)
        ]
        assert len(sampled) < len(run)
        assert check_records(sampled, is_whole=False).findings == ()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("machine", ["request", "lease"])
def test_nothing_is_concluded_from_what_one_process_has_not_written_any_more(machine: str, share: float) -> None:
    """On a full disk; or its file was copied earlier than those of the others."""
    run = calm_run()
    whose = {(record.engine_id, record.rank) for record in run if record.machine == machine}
    for process in sorted(whose):
        of_process = [record for record in run if (record.engine_id, record.rank) == process]
        kept = {id(record) for record in of_process[: int(share * len(of_process))]}
        left = [record for record in run if (record.engine_id, record.rank) != process or id(record) in kept]
        assert check_records(left).findings == ()


def test_one_side_alone_is_checked() -> None:
    for machines in ({"lease"}, {"request", "hold", "peer"}):
        alone = [record for record in faulty_run() if record.machine in machines]
        assert check_records(alone).findings == ()


def test_a_process_that_made_one_record_has_a_successor() -> None:
    """Under the same engine id, on a clock that began later."""
    first = next(record for record in calm_run() if record.machine == "lease" and record.seq == 0)
    successor = [
        msgspec.structs.replace(record, mono_ns=record.mono_ns - first.mono_ns)
        for record in calm_run()
        if (record.engine_id, record.rank) == (first.engine_id, first.rank)
    ]
    verdict = check_records([first, *successor])
    assert verdict.processes == 2
    problems = [finding.problem for finding in verdict.findings]
    assert [each for each in problems if "its number is" in each or "the clock" in each] == []


def test_a_successor_is_known_also_where_its_first_records_are_missing() -> None:
    """As in an excerpt of the files of both."""
    own = [each for each in calm_run() if (each.machine, each.rank) == ("lease", 0)]
    own = [each for each in own if each.engine_id == own[0].engine_id]
    successor = [
        msgspec.structs.replace(
            each, mono_ns=each.mono_ns - own[0].mono_ns, lease_number=(each.lease_number or 0) + 1_000_000
        )
        for each in own[3:]
    ]
    verdict = check_records([*own[5:], *successor], is_whole=False)
    assert (verdict.processes, verdict.findings) == (2, ())
    # Where everything should be there the missing ones are noticed all the same.
    problems = [finding.problem for finding in check_records([*own, *successor]).findings]
    assert f"its number is {own[3].seq}, and it is the first of its process" in problems


def test_a_process_that_has_its_files_to_itself_has_no_successor_in_them(tmp_path: Path) -> None:
    own = [each for each in calm_run() if (each.machine, each.rank) == ("lease", 0)]
    own = [each for each in own if each.engine_id == own[0].engine_id]
    sink = open_trace_log(tmp_path, engine_id="p", role="kv_producer", rank=0, sample=0.9999)
    sink.write(*own[:5], own[6], own[5], *own[7:])
    sink.close()
    problems = [finding.problem for finding in check(read_processes(tmp_path)).findings]
    assert f"its number is {own[5].seq}, and that of the record before {own[6].seq}" in problems
