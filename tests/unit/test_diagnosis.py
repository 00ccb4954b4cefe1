"""The checks of `doctor`, over what engines would say: each names both sides' values and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from connector.observe.advice import WHAT_TO_DO
from connector.tools.asking import Address
from connector.tools.cli.main import app
from connector.tools.cli.output import plain
from connector.tools.diagnosis import RECORDS_ASKED, Finding, diagnose, leases_to_look_for
from connector.tools.diagnosis.fit import settings
from connector.tools.diagnosis.reachable import unanswered
from connector.tools.live import EngineReport, Question, RankReport, Survey
from connector.tools.ucx_devices import Opened, Transport
from connector.wire.handshake import Advertisement
from connector.wire.identity import KvIdentity, LayerIdentity
from connector.wire.inspection import (
    EngineCounts,
    EngineFacts,
    EngineRow,
    IntroductionRow,
    LocalPrefillRow,
    PeerRow,
    QuarantineRow,
    RecordRow,
)
from statemachine import lease
from statemachine.failures import Incompatible
from statemachine.trace import TransitionRecord
from tests.rig.facts import facts as extension
from tests.unit.test_explanation import peer_row

FACTS = EngineFacts(
    role="kv_consumer",
    host_name="host-1",
    process_id=10,
    side_channel="10.0.0.1:5600",
    versions={"vllm": "0.32.0", "nixl": "1.5.1"},
    options={"kv_lease_duration": "30.0", "enforce_handshake_compat": "true"},
    factors={"model": "llama", "dtype": "float16"},
    backends=("UCX",),
    devices=("mlx5_0",),
    memory_kind="VRAM",
    blocks=100,
    utc_offsets="UTC+00:00",
)


def engine(name: str, *rows: Any, hash_: str = "h", counts: EngineCounts | None = None, **facts: Any) -> EngineReport:
    port = 5600 + len(name)
    known = msgspec.structs.replace(FACTS, **({"side_channel": f"10.0.0.1:{port}", "process_id": port} | facts))
    row = EngineRow(
        engine_id=name,
        rank=0,
        tp_rank=0,
        pp_rank=0,
        tp_size=1,
        uptime_seconds=5.0,
        recorded_seconds=5.0,
        stopped=None,
        facts=known,
        counts=counts or EngineCounts(),
        peers_by_state={},
        leases_by_state={},
    )
    said = Advertisement(compatibility_hash=hash_, metadata=None, actor=extension(), error=None)
    rank = RankReport(
        rank=(0, 0), advertisement=said, rows=(row, *rows), wall_ahead_seconds=0.0, round_trip_seconds=0.001
    )
    return EngineReport(address=Address("10.0.0.1", port), ranks=(rank,))


def pair(**of_prefill: Any) -> list[EngineReport]:
    return [engine("d"), engine("pp", **({"role": "kv_producer"} | of_prefill))]


def found(*engines: EngineReport, check: str | None = None) -> list[Finding]:
    findings = diagnose(Survey(list(engines)))
    return [each for each in findings if check in (None, each.check)]


def problems(*engines: EngineReport) -> list[str]:
    return [each.check for each in found(*engines) if each.level == "problem"]


def test_two_engines_that_fit_have_no_problem() -> None:
    assert [each for each in found(*pair()) if each.level != "note"] == []


def test_an_engine_that_does_not_answer_is_a_problem_with_its_kind() -> None:
    dead = EngineReport(
        address=Address("h", 1), problem="nothing listens there", problem_kind="ConnectionRefused", named_by=("d",)
    )
    (finding,) = found(engine("d"), dead, check="answers")
    assert finding.level == "problem"
    for word in ("ConnectionRefused", "h:1", "named by d", "nothing listens"):
        assert word in finding.what
    assert finding.advice == WHAT_TO_DO["ConnectionRefused"]


@pytest.mark.parametrize("kind", ["AddressNotResolved", "ConnectionRefused", "HandshakeTimeout", "HandshakeMalformed"])
def test_of_an_engine_that_was_named_it_is_not_said_that_it_is_a_prefill_engine(kind: str) -> None:
    silent = EngineReport(address=Address("h", 1), problem="it is silent", problem_kind=kind)
    (finding,) = found(silent, check="answers")
    assert finding.advice
    assert "P" not in re.findall(r"\w+", finding.advice)


def test_a_worker_whose_answers_did_not_end_in_time_is_not_said_to_hang() -> None:
    report = engine("d")
    cut_off = replace(report.ranks[0], problem="has told 9 row(s)", ran_out=True)
    (finding,) = found(replace(report, ranks=(cut_off,)), check="answers")
    assert (finding.level, finding.advice) == ("warning", "")


@pytest.mark.parametrize(("state", "level"), [("idle", "note"), ("backoff", "problem")])
def test_an_engine_that_has_ended_as_it_had_said_need_not_be_started_again(state: str, level: str) -> None:
    """Unless requests still want something of it; or somebody names it."""
    row: PeerRow = peer_row(state, failure="PeerLeaving", detail="was taken away, as it had said").row
    decode = engine("d", row)
    ended = EngineReport(
        address=Address("10.0.0.1", 5600), problem="nothing listens", problem_kind="ConnectionRefused", named_by=("d",)
    )
    (finding,) = found(decode, ended, check="answers")
    assert finding.level == level
    assert ("P at 10.0.0.1:5600 (named by d) has ended, as it had said" in finding.what) == (level == "note")
    assert [each.level for each in found(decode, ended, check="peers")] == ([] if level == "note" else ["problem"])
    for other in (
        found(decode, replace(ended, named_by=()), check="answers"),
        found(decode, engine("e", peer_row("idle", failure="ConnectionRefused").row), ended, check="answers"),
    ):
        assert [each.level for each in other] == ["problem"]


def test_a_worker_that_has_stopped_is_a_problem() -> None:
    healthy = engine("d")
    row = msgspec.structs.replace(healthy.ranks[0].rows[0], stopped="its NIXL thread died")
    stopped = replace(healthy, ranks=(replace(healthy.ranks[0], rows=(row,)),))
    (finding,) = found(stopped, check="answers")
    assert "its NIXL thread died" in finding.what


def test_both_engines_on_one_port() -> None:
    first, second = pair(side_channel="10.0.0.1:5601")
    assert problems(first, second) == ["address clash"]
    assert problems(first, engine("pp", role="kv_producer", side_channel="10.0.0.1:5601", host_name="host-2")) == []


def test_two_addresses_that_lead_to_one_engine() -> None:
    """As where both engines of a host have the same port: the second has ended, and the first answers for both."""
    decode = engine("d")
    again = replace(decode, address=Address("localhost", 5601))
    (finding,) = [each for each in found(decode, again, engine("pp", role="kv_producer")) if each.level == "problem"]
    assert (finding.check, finding.engines) == ("one engine", ("d",))
    assert finding.what == (
        "10.0.0.1:5601, localhost:5601 lead to one engine: d, process 5601 of host-1, side channel 10.0.0.1:5601"
    )
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT is the same" in finding.advice
    another = engine("d", host_name="host-2")
    assert problems(decode, again, another) == ["engine ids", "one engine"]
    assert problems(decode, another) == ["engine ids"]


def test_an_address_that_is_given_twice() -> None:
    d, p = pair()
    (finding,) = [each for each in diagnose(Survey([d]), [d.address, d.address]) if each.level == "problem"]
    assert finding.check == "one engine"
    assert finding.what == "10.0.0.1:5601 was named 2 times, and is the address of one engine"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT is the same" in finding.advice
    assert [each for each in diagnose(Survey([d, p]), [d.address, p.address]) if each.level == "problem"] == []


def test_both_engines_with_one_control_socket() -> None:
    first, second = engine("d", control="10.0.0.1:5701"), engine("pp", role="kv_producer", control="10.0.0.1:5700")
    assert problems(first, second) == []
    clashing = engine("d", control="10.0.0.1:5700")
    (finding,) = [each for each in found(clashing, second) if each.level == "problem"]
    assert finding.check == "address clash"
    assert "10.0.0.1:5700" in finding.what
    assert "control_port" in finding.advice
    assert problems(clashing, engine("pp", role="kv_producer", control="10.0.0.1:5700", host_name="host-2")) == []


def test_an_engine_id_that_two_engines_have() -> None:
    assert problems(engine("d"), engine("d", side_channel="10.0.0.9:5600", host_name="host-2")) == ["engine ids"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_localhost_is_a_problem_only_when_another_machine_is_there(host: str) -> None:
    apart = pair(side_channel=f"{host}:5600", host_name="host-2")
    (finding,) = [each for each in found(*apart, check="localhost") if each.level == "problem"]
    for word in (f"{host}:5600", "host-1", "host-2"):
        assert word in finding.what
    together = pair(side_channel=f"{host}:5600")
    assert {each.level for each in found(*together, check="localhost")} == {"note"}


def test_an_address_that_nobody_can_connect_to() -> None:
    assert problems(*pair(side_channel="0.0.0.0:5600")) == ["localhost"]


def test_a_name_that_an_engine_advertises_and_nobody_knows() -> None:
    d, p = pair(side_channel="prefill.invalid:5602")
    assert problems(d, p) == []
    (finding,) = found(d, replace(p, not_resolved="Name or service not known"), check="host names")
    assert (finding.level, finding.engines) == ("problem", ("pp",))
    for word in ("AddressNotResolved", "prefill.invalid:5602", "does not resolve here (Name or service not known)"):
        assert word in finding.what
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in finding.advice


def test_of_a_builtin_engine_the_hash_is_compared() -> None:
    decode, prefill = pair(hash_="other")
    (rank,) = prefill.ranks
    assert rank.advertisement is not None
    builtin = replace(rank, advertisement=msgspec.structs.replace(rank.advertisement, actor=None))
    (finding,) = found(decode, replace(prefill, ranks=(builtin,)), check="fit")
    assert (finding.level, finding.what) == ("problem", "compatibility hash other on pp, h on d")
    assert "the hash covers vLLM version" in finding.advice


def told(name: str, hash_: str, weights: str, scale: float = 1.0, *, order: str = "", **facts: Any) -> EngineReport:
    """An engine that tells what its KV is."""
    layer = LayerIdentity(group=0, dtype="fp8", k_scales=(scale,), order=order, content_bytes=(32,))
    identity = KvIdentity(factors={"model": name, "weights": weights}, layers={"layer": layer}, group_tokens=(16,))
    report = engine(name, hash_=hash_, **facts)
    said = report.ranks[0].advertisement
    assert said is not None
    actor = msgspec.structs.replace(extension(), identity=identity)
    rank = replace(report.ranks[0], advertisement=msgspec.structs.replace(said, actor=actor))
    return replace(report, ranks=(rank, rank))


def test_an_engine_on_cpus_fits_one_on_gpus_if_it_packs_what_it_reads() -> None:
    lenient = FACTS.options | {"enforce_handshake_compat": "false"}
    on_gpus = told("pp", "h", "a", role="kv_producer")
    refuses, packs = (told("d", "h", "a", order="vec", options=lenient, packs=packs) for packs in (False, True))
    (finding,) = found(refuses, on_gpus, check="fit")
    assert finding.level == "problem"
    assert "order of elements in a block of layer" in finding.what
    assert found(packs, on_gpus, check="fit") == []


def test_of_engines_that_tell_what_their_kv_is_that_counts_and_not_the_hash() -> None:
    d = told("d", "h", "a")
    assert found(d, told("pp", "other", "a", role="kv_producer"), check="fit") == []
    (finding,) = found(d, told("pp", "h", "b", role="kv_producer"), check="fit")
    assert (finding.level, finding.what) == ("problem", "model is pp on pp and d on d; weights is b on pp and a on d")
    assert "start both engines with the same model" in finding.advice
    lenient = told("d", "h", "a", options=FACTS.options | {"enforce_handshake_compat": "false"})
    assert found(lenient, told("pp", "h", "b", role="kv_producer"), check="fit")[0].level == "warning"
    (finding,) = found(lenient, told("pp", "h", "a", 0.5, role="kv_producer"), check="fit")
    assert (finding.level, finding.what) == ("problem", "k_scale of layer is 0.5 on pp and 1.0 on d")
    assert "the scales of its KV cache are in it" in finding.advice


def test_of_very_many_differences_the_first_are_named() -> None:
    def layered(report: EngineReport) -> EngineReport:
        said = report.ranks[0].advertisement
        assert said is not None
        assert said.actor is not None
        factors = {"dtype": report.name} | {f"KV cache dtype of layer {number}": report.name for number in range(80)}
        identity = msgspec.structs.replace(said.actor.identity, factors=factors)
        advertisement = msgspec.structs.replace(said, actor=msgspec.structs.replace(said.actor, identity=identity))
        return replace(report, ranks=(replace(report.ranks[0], advertisement=advertisement),))

    d, p = layered(told("d", "h", "a")), layered(told("pp", "h", "a", role="kv_producer"))
    (finding,) = found(d, p, check="fit")
    assert finding.what.startswith("dtype is pp on pp and d on d; KV cache dtype of layer 0 is pp on pp and d on d; ")
    assert finding.what.endswith("; KV cache dtype of layer 6 is pp on pp and d on d; and 73 more differ")


def test_two_prefill_engines_need_not_fit() -> None:
    same = {"role": "kv_producer"}
    assert found(engine("p", **same), engine("pp", hash_="other", **same), check="fit") == []


@pytest.mark.parametrize(
    ("environment", "level", "word"),
    [
        ({"UCX_TLS": "tcp"}, "problem", "no transport for it"),
        ({"UCX_TLS": "tcp,self,cuda"}, "note", "mlx5_0"),
        ({"UCX_NET_DEVICES": "mlx5_7:1"}, "problem", "names mlx5_7"),
        ({"UCX_NET_DEVICES": "eth0"}, "note", "eth0"),
        ({}, "note", "every transport that UCX finds"),
    ],
)
def test_transports(environment: dict[str, str], level: str, word: str) -> None:
    findings = found(engine("d", environment=environment), check="transports")
    assert any(each.level == level and word in each.what for each in findings)
    assert any(each.level == "problem" for each in findings) == (level == "problem")


def test_devices_that_are_left_unused() -> None:
    findings = found(engine("d", environment={"UCX_TLS": "tcp,self"}, memory_kind="DRAM"), check="transports")
    assert any(each.level == "warning" and "mlx5_0" in each.what for each in findings)


@pytest.mark.parametrize(
    ("environment", "advice"), [({"UCX_TLS": "tcp,sm"}, "unset UCX_TLS, or add rc"), ({}, "/dev/infiniband")]
)
def test_what_ucx_opens_is_not_told_again_by_what_its_variable_says(environment: dict[str, str], advice: str) -> None:
    d = engine("d", environment=environment, memory_kind="DRAM")
    (finding,) = [
        each for each in diagnose(Survey([d]), opened={("d", 0): Opened((TCP, CUDA))}) if each.level == "warning"
    ]
    assert "UCX opens none of the RDMA devices mlx5_0" in finding.what
    assert advice in finding.advice
    d = engine("d", environment={"UCX_TLS": "tcp"})
    found_vram = [each for each in diagnose(Survey([d]), opened={("d", 0): Opened((TCP,))}) if each.level == "problem"]
    assert [(each.what, each.advice) for each in found_vram] == [
        ("d: its KV cache is in device memory, and UCX opens no transport for it",
         "add cuda (or rocm) to UCX_TLS, or unset it"),
    ]  # fmt: skip
    unknown = diagnose(Survey([d]), opened={("d", 0): Opened(problem="ModuleNotFoundError: nixl")})
    assert any("UCX_TLS=tcp has no transport for it" in each.what for each in unknown)


def test_engines_without_a_transport_in_common() -> None:
    one = engine("d", environment={"UCX_TLS": "rc,cuda,self"})
    other = engine("pp", role="kv_producer", environment={"UCX_TLS": "tcp,rocm,self"})
    assert problems(one, other) == ["transports"]
    assert problems(one, engine("pp", role="kv_producer", environment={"UCX_TLS": "^tcp"})) == []


TCP, RC = Transport("network", "tcp", ("eth0", "lo")), Transport("network", "rc_mlx5", ("mlx5_0:1",))
SYSV, CUDA = Transport("intra-node", "sysv", ("memory",)), Transport("accelerator", "cuda_copy", ("cuda",))


@pytest.mark.parametrize(
    ("opened", "memory_kind", "level", "word"),
    [
        (Opened((TCP, RC, CUDA)), "VRAM", "note", "UCX opens tcp (eth0 lo), rc_mlx5 (mlx5_0:1), cuda_copy (cuda)"),
        (Opened((TCP, CUDA)), "VRAM", "warning", "none of the RDMA devices mlx5_0"),
        (Opened((TCP, RC)), "VRAM", "problem", "no transport for it"),
        (Opened((TCP, RC, CUDA), reads_over_cuda_ipc=False), "VRAM", "warning", "does not read over cuda_ipc"),
        (Opened((TCP, RC, CUDA), reads_over_cuda_ipc=False), "DRAM", "note", "UCX opens tcp"),
        (Opened((SYSV,)), "DRAM", "warning", "no network transport"),
        (Opened((TCP, RC), ("device 'x' is not available",)), "DRAM", "warning", "device 'x' is not available"),
        (Opened((), ("no usable transports",), "NIXL_ERR_BACKEND"), "DRAM", "problem", "no usable transports"),
        (Opened(problem="ModuleNotFoundError: nixl"), "DRAM", "note", "could not be asked"),
        (None, "DRAM", "note", "on host-1 alone"),
    ],
)
def test_what_ucx_opens(opened: Opened | None, memory_kind: str, level: str, word: str) -> None:
    d = engine("d", memory_kind=memory_kind)
    findings = diagnose(Survey([d]), opened={} if opened is None else {("d", 0): opened})
    found = [each for each in findings if each.check == "transports"]
    assert any(each.level == level and word in each.what for each in found)
    assert all(each.level == "note" or each.level == level for each in found)


def test_nothing_is_said_of_ucx_where_it_is_not_used() -> None:
    d = engine("d", backends=("LIBFABRIC",))
    assert not any("opens" in each.what for each in diagnose(Survey([d])))


def test_clocks_that_differ_by_more_than_the_answers_took() -> None:
    first, second = pair()
    ahead = replace(second, ranks=(replace(second.ranks[0], wall_ahead_seconds=5.0),))
    (finding,) = found(first, ahead, check="clocks")
    assert "5 s apart" in finding.what
    slow = replace(second, ranks=(replace(second.ranks[0], wall_ahead_seconds=5.0, round_trip_seconds=9.0),))
    assert found(first, slow, check="clocks") == []


def test_engines_that_write_unlike_dates_into_prompts() -> None:
    (zone,) = found(*pair(utc_offsets="UTC+09:00"), check="dates")
    assert (zone.level, zone.what) == ("warning", "local time is UTC+00:00 on d, and UTC+09:00 on pp")
    (pinned,) = found(*pair(environment={"VLLM_SYSTEM_START_DATE": "2026-01-01"}), check="dates")
    assert pinned.what == "VLLM_SYSTEM_START_DATE is (not set) on d, and 2026-01-01 on pp"
    assert "WrongPrompt" in zone.advice
    assert "WrongPrompt" in pinned.advice
    assert found(*pair(utc_offsets=""), check="dates") == [], "an older engine does not say"


def test_leases_and_versions_that_differ() -> None:
    options = FACTS.options | {"kv_lease_duration": "10.0"}
    engines = pair(options=options, versions=FACTS.versions | {"nixl": "1.6.0"})
    (lease,) = found(*engines, check="leases")
    assert (lease.level, lease.what) == ("problem", "kv_lease_duration is 30.0 on d, and 10.0 on pp")
    (version,) = found(*engines, check="versions")
    assert version.what == "nixl is 1.5.1 on d, and 1.6.0 on pp"


@pytest.mark.parametrize(
    ("on_p", "on_d", "levels"),
    [
        ("null", "null", []),
        ('"/k"', '"/k"', []),
        ("null", '"/k"', ["problem"]),
        ('"/k"', "null", ["warning"]),
        (None, '"/k"', []),
    ],
)
def test_keys_that_one_side_alone_has(on_p: str | None, on_d: str, levels: list[str]) -> None:
    def options(file: str | None) -> dict[str, str]:
        return FACTS.options if file is None else FACTS.options | {"params_keys_file": file}

    findings = found(
        engine("d", role="kv_consumer", options=options(on_d)),
        engine("pp", role="kv_producer", options=options(on_p)),
        check="keys",
    )
    assert [each.level for each in findings] == levels
    for each in findings:
        assert "params_keys_file" in each.what
        is_problem = each.level == "problem"
        assert each.what.startswith(
            "kv_transfer_params of pp are" if is_problem else "any kv_transfer_params are believed on d"
        )


@pytest.mark.parametrize(("state", "level"), [("backoff", "problem"), ("idle", "warning"), ("ready", None)])
def test_peers_that_failed(state: str, level: str | None) -> None:
    row: PeerRow = peer_row(state, failure="HandshakeTimeout", detail="did not answer").row
    assert [each.level for each in found(engine("d", row), check="peers")] == ([level] if level else [])


def test_what_to_do_about_a_peer_that_is_unlike_is_what_its_handshake_said() -> None:
    unlike = Incompatible(peer="P", field="model", local="llama", remote="gemma", advice="start it alike")
    row: PeerRow = peer_row("incompatible", failure=unlike.kind, detail=str(unlike)).row
    (finding,) = found(engine("d", row), check="peers")
    assert finding.what.endswith("model is gemma there and llama here")
    assert finding.advice == "start it alike"


def test_a_peer_that_several_ranks_could_not_reach_is_one_finding() -> None:
    bad: PeerRow = peer_row("backoff", failure="HandshakeTimeout", detail="did not answer").row
    good: PeerRow = peer_row("ready").row
    (first,) = engine("d", bad).ranks
    (other,) = engine("d", good).ranks
    numbers = [(0, 0), (0, 1), (0, 2)]
    for reached, suffix in ((0, ""), (1, " (on PP 0 TP 0, PP 0 TP 1 of 3 ranks)")):
        ranks = [first] * (3 - reached) + [other] * reached
        several = tuple(replace(rank, rank=number) for rank, number in zip(ranks, numbers, strict=True))
        (finding,) = found(replace(engine("d"), ranks=several), check="peers")
        assert finding.what.endswith(f" is backoff: HandshakeTimeout: did not answer{suffix}")


def test_a_peer_that_may_not_be_spoken_to_is_a_problem_also_while_nobody_tries() -> None:
    """Another attempt ends alike, and `doctor` ended with status 0."""
    row: PeerRow = peer_row(
        "idle", failure="NotAllowed", detail="it has a key that is not among the keys accepted here"
    ).row
    assert problems(engine("d", row)) == ["peers"]


@pytest.mark.parametrize(
    ("failure", "detail", "is_builtin", "level"),
    [
        (None, None, False, None),
        (None, "nothing listens there", False, "warning"),
        (None, "it runs the built-in connector", True, "note"),
        ("FirstReadNeverEnded", "nothing could be read", False, "warning"),
    ],
    ids=["not asked yet", "away", "built-in", "behind a firewall"],
)
def test_engines_that_are_to_be_met_and_were_not(
    failure: str | None, detail: str | None, is_builtin: bool, level: str | None
) -> None:
    """All ranks of D that could not are one finding."""
    row = IntroductionRow(
        place="10.0.0.9:5600",
        state="pausing",
        engine_id="",
        failures=3,
        failure=failure,
        detail=detail,
        is_builtin=is_builtin,
    )
    (first,) = engine("d", row).ranks
    several = replace(engine("d"), ranks=(first, replace(first, rank=(0, 1))))
    findings = found(several, check="known peers")
    assert [each.level for each in findings] == ([level] if level else [])
    for finding in findings:
        why = f"{failure}: {detail}" if failure else detail
        assert finding.what == f"d: the engine at 10.0.0.9:5600 cannot be met before its first request: {why}"
        assert finding.advice == (WHAT_TO_DO[failure] if failure else "")


@pytest.mark.parametrize(("value", "is_told"), [("n", True), ("No", True), ("off", True), ("y", False), (None, False)])
def test_ucx_that_is_to_connect_in_the_calling_thread(value: str | None, is_told: bool) -> None:
    environment = {} if value is None else {"UCX_TCP_CONN_NB": value}
    findings = found(engine("d", environment=environment), check="transports")
    told = [each for each in findings if each.level == "warning" and "UCX_TCP_CONN_NB" in each.what]
    assert len(told) == is_told


def test_quarantined_blocks() -> None:
    row = QuarantineRow(request_id="a", remote_request_id="b", peer="p", blocks=38, reads=1, since_seconds=3.0)
    one_rank = engine("d", row)
    for each in (one_rank, replace(one_rank, ranks=one_rank.ranks * 2)):
        (finding,) = found(each, check="quarantine")
        assert "38 of 100 KV blocks" in finding.what
        assert "nixl-actor doctor" not in finding.advice  # which says this


@pytest.mark.parametrize(
    ("role", "level", "word"),
    [
        ("kv_consumer", "warning", "with HTTP 200"),
        ("kv_producer", "warning", "do_remote_decode"),
        ("kv_both", "note", "with HTTP 200"),
    ],
)
def test_silent_local_prefill(role: str, level: str, word: str) -> None:
    (finding,) = found(
        engine("d", *lost(1), role=role, counts=EngineCounts(local_prefills=7)), check="silent local prefill"
    )
    assert finding.level == level
    for each in (word, "7 request(s)", "in the last 5 s 1 of 1 requests (100%)", "the last one was cmpl-x, 1 s ago"):
        assert each in finding.what
    assert found(engine("d", role=role), check="silent local prefill") == []


@pytest.mark.parametrize("role", ["kv_producer", "kv_both", "kv_consumer"])
def test_a_prefill_engine_that_drains_is_named_where_parameters_are_missing(role: str) -> None:
    """It answers without them; the router has lost nothing. Decode engines drain too, and answer no prefills."""
    (rank,) = engine("p", role=role).ranks
    draining = msgspec.structs.replace(extension(), draining="drained")
    said = Advertisement(compatibility_hash="h", metadata=None, actor=draining, error=None)
    drained = replace(engine("p", role=role), ranks=(replace(rank, advertisement=said),))
    decode = engine("d", *lost(1), role="kv_consumer", counts=EngineCounts(local_prefills=1))
    (finding,) = found(decode, drained, check="silent local prefill")
    assert ("p drains, and answers without them" in finding.what) is (role != "kv_consumer")


def lost(number: int, age_seconds: float = 1.0) -> list[LocalPrefillRow]:
    """Requests that came without parameters."""
    row = LocalPrefillRow(request_id="cmpl-x", reason="absent", tokens=9, age_seconds=age_seconds)
    return [row] * number


@pytest.mark.parametrize(
    ("lost_recently", "lost_before", "others", "level"),
    [
        (1, 0, 0, "warning"),
        (2, 500, 10, "warning"),
        (3, 0, 20, "problem"),
        (3, 0, 27, "warning"),
        (99, 0, 1000, "warning"),
        (100, 0, 1000, "problem"),
        (0, 1000, 0, "warning"),
    ],
)
@pytest.mark.parametrize(("role", "machine"), [("kv_consumer", "request"), ("kv_producer", "lease")])
def test_lost_parameters_are_a_problem_where_they_are_many_or_a_large_share_of_late(
    role: str, machine: str, lost_recently: int, lost_before: int, others: int, level: str
) -> None:
    rows = [*lost(lost_recently), *lost(lost_before, age_seconds=601.0)]
    made = [record(machine, "computing", f"r{number}", engine_id="d") for number in range(others)]
    created = [
        msgspec.structs.replace(each, record=msgspec.structs.replace(each.record, from_state=None)) for each in made
    ]
    report = engine("d", *rows, *created, role=role, counts=EngineCounts(local_prefills=len(rows)))
    row, *rest = report.ranks[0].rows
    assert isinstance(row, EngineRow)
    known = msgspec.structs.replace(row, uptime_seconds=5000.0)
    report = replace(report, ranks=(replace(report.ranks[0], rows=(known, *rest)),))
    (finding,) = found(report, check="silent local prefill")
    assert finding.level == level
    assert f"in the last 10 min {lost_recently} of {lost_recently + others} requests" in finding.what


def test_the_share_of_lost_parameters_is_that_of_the_time_that_the_records_reach() -> None:
    report = busy(recorded_seconds=60.0)
    rank = report.ranks[0]
    row, *rest = rank.rows
    assert isinstance(row, EngineRow)
    known = msgspec.structs.replace(row, counts=EngineCounts(local_prefills=50))
    rank = replace(rank, rows=(known, *rest, *lost(2, age_seconds=0.5), *lost(48, age_seconds=30.0)))
    (finding,) = found(replace(report, ranks=(rank,)), check="silent local prefill")
    assert "in the last 1 s 2 of 2 requests" in finding.what


def ends(count: int, state: str, reason: str | None = None, name: str = "r") -> list[RecordRow]:
    """Of requests of D."""
    return [record("request", state, f"{name}{number}", engine_id="d", reason=reason) for number in range(count)]


@pytest.mark.parametrize(
    ("failed", "done", "level"), [(3, 50, "problem"), (3, 57, "note"), (2, 0, "note"), (60, 1000, "problem")]
)
def test_requests_that_failed_are_told_by_kind_with_an_example_and_what_to_do(
    failed: int, done: int, level: str
) -> None:
    rows = [*ends(failed - 1, "failed", "LeaseOver"), *ends(1, "expired", "LeaseNotProven", name="x")]
    (finding,) = found(engine("d", *rows, *ends(done, "done", name="ok")), check="failed requests")
    assert finding.level == level
    assert f"d: {failed} of {failed + done} request(s) that ended in the last 5 s" in finding.what
    assert f"LeaseOver {failed - 1}, LeaseNotProven 1; the last LeaseOver was r" in finding.what
    assert finding.advice.startswith(f"LeaseOver: {WHAT_TO_DO['LeaseOver']}; nixl-actor why r")


def test_in_a_large_fleet_the_engine_that_differs_and_what_is_wrong_stand_in_one_line() -> None:
    names = [f"{'e' * 36}{number}" for number in range(150)]
    options = FACTS.options | {"kv_lease_duration": "20"}
    other = engine("other", options=options)
    (finding,) = [
        each
        for each in settings(
            [*(engine(name, options=FACTS.options | {"kv_lease_duration": "30"}) for name in names), other]
        )
        if each.check == "leases"
    ]
    assert "and 142 more, and 20 on other" in plain(finding.what)
    assert len(finding.engines) == 151
    silent = EngineReport(address=Address("h", 1), problem="it hangs", problem_kind="", named_by=tuple(names))
    (finding,) = unanswered(Survey([silent]))
    assert plain(finding.what).endswith("and 142 more): it hangs")


def test_the_command_for_a_request_can_be_pasted_whatever_its_client_calls_it() -> None:
    (finding,) = found(engine("d", *ends(1, "failed", "LeaseOver", name="a;touch b-")), check="failed requests")
    assert "; nixl-actor why 'a;touch b-" in finding.advice


def test_a_request_that_fails_on_several_ranks_is_one_and_of_the_kind_of_the_first() -> None:
    (first, second) = (ends(1, "failed", kind)[0] for kind in ("LeaseOver", "TransferError"))
    (later,) = engine("d", second, *ends(9, "done", name="ok")).ranks
    report = engine("d", msgspec.structs.replace(first, age_seconds=2.0))
    both = replace(report, ranks=(*report.ranks, replace(later, rank=(0, 1))))
    (finding,) = found(both, check="failed requests")
    assert "1 of 10 request(s)" in finding.what
    assert "KV: LeaseOver 1;" in finding.what


def test_neither_clients_that_left_nor_what_failed_long_ago_is_told() -> None:
    old = [msgspec.structs.replace(each, age_seconds=601.0) for each in ends(9, "failed", "LeaseOver")]
    assert found(engine("d", *ends(9, "failed", "AbortedByClient"), *old), check="failed requests") == []


def test_a_request_that_was_read_and_could_not_be_finished_has_failed() -> None:
    (finding,) = found(engine("d", *ends(1, "done", "PackingFailed")), check="failed requests")
    assert "PackingFailed 1" in finding.what


def record(machine: str, state: str, name: str, **fields: Any) -> RecordRow:
    made = TransitionRecord(
        seq=0, wall=0.0, mono_ns=0, rank=0, role="worker", machine=machine, subject=name, from_state="held", event="X",
        to_state=state, lease_number=4, **fields,
    )  # fmt: skip
    return RecordRow(record=made, age_seconds=1.0)


EXPIRED = record("lease", "expired", "cmpl-p", engine_id="pp", seconds_in_from=2.0)
"""A second ago, after it could be read for two."""
READ = record("request", "done", "cmpl-d", engine_id="d", peer="pp", remote_request_id="cmpl-p")


def test_leases_that_expired_with_and_without_a_reader() -> None:
    prefill = engine("pp", EXPIRED, role="kv_producer")
    (alone,) = found(engine("d"), prefill, check="expired leases")
    assert alone.what == "pp: 1 lease(s) expired that none of d has read (cmpl-p)"
    (one_sided,) = found(engine("d", READ), prefill, check="one-sided releases")
    assert "although a decode engine had read them" in one_sided.what
    assert found(engine("d", READ), prefill, check="expired leases") == []


def test_a_lease_that_expired_because_its_request_had_failed_on_d_is_no_riddle() -> None:
    failed = record(
        "request", "failed", "cmpl-d", engine_id="d", peer="pp", remote_request_id="cmpl-p", reason="NoDescriptorLeft"
    )
    prefill = engine("pp", EXPIRED, role="kv_producer")
    (finding,) = found(engine("d", failed), prefill, check="expired leases")
    assert (finding.level, finding.what) == (
        "note",
        "pp: 1 lease(s) expired because their requests had failed on a decode engine (cmpl-p: NoDescriptorLeft on d)",
    )
    assert finding.advice == "see what these failed of: nixl-actor why cmpl-d"
    (finding,) = found(engine("d", failed), engine("d2", READ), prefill, check="one-sided releases")
    assert finding.level == "warning"


def test_an_answer_that_was_lent_back_and_not_read_is_no_finding() -> None:
    unread = msgspec.structs.replace(EXPIRED, record=msgspec.structs.replace(EXPIRED.record, reason=lease.LENT_BACK))
    both = engine("pp", unread, role="kv_both")
    assert found(engine("d"), both, check="expired leases") == []
    assert leases_to_look_for(Survey([engine("d"), both])) == []


def test_a_lease_that_was_read_without_its_number_was_read() -> None:
    """Parameters that a router has copied in part name it by its request id, as `why` and `trace` take it too."""
    unnumbered = msgspec.structs.replace(READ, record=msgspec.structs.replace(READ.record, lease_number=0))
    prefill = engine("pp", EXPIRED, role="kv_producer")
    assert leases_to_look_for(Survey([engine("d", unnumbered), prefill])) == []
    (one_sided,) = found(engine("d", unnumbered), prefill, check="one-sided releases")
    assert "although a decode engine had read them (cmpl-p)" in one_sided.what
    assert found(engine("d", unnumbered), prefill, check="expired leases") == []


def test_of_two_leases_of_one_id_none_is_taken_for_read_without_its_number() -> None:
    unnumbered = msgspec.structs.replace(READ, record=msgspec.structs.replace(READ.record, lease_number=0))
    other = msgspec.structs.replace(EXPIRED, record=msgspec.structs.replace(EXPIRED.record, lease_number=5))
    prefill = engine("pp", EXPIRED, other, role="kv_producer")
    assert found(engine("d", unnumbered), prefill, check="one-sided releases") == []


def busy(*, recorded_seconds: float) -> EngineReport:
    """A decode engine that was asked for its newest records only, of which it has more."""
    others = [
        record("request", "done", f"cmpl-{number}", engine_id="d", peer="pp", remote_request_id=f"other-{number}")
        for number in range(RECORDS_ASKED)
    ]
    report = engine("d", *others)
    row, *rest = report.ranks[0].rows
    assert isinstance(row, EngineRow)
    known = msgspec.structs.replace(row, uptime_seconds=5000.0, recorded_seconds=recorded_seconds)
    return replace(report, ranks=(replace(report.ranks[0], rows=(known, *rest)),))


@pytest.mark.parametrize(
    ("recorded_seconds", "looked_for", "is_known"),
    [(3.0, ["cmpl-p"], False), (60.0, [], False), (60.0, ["another"], False), (60.0, ["cmpl-p"], True)],
)
def test_nobody_is_said_not_to_have_read_what_happened_before_its_records(
    recorded_seconds: float, looked_for: list[str], is_known: bool
) -> None:
    """D may have read it long ago."""
    survey = Survey([busy(recorded_seconds=recorded_seconds), engine("pp", EXPIRED, role="kv_producer")])
    assert leases_to_look_for(survey) == ["cmpl-p"]
    (finding,) = [each for each in diagnose(survey, looked_for=looked_for) if each.check == "expired leases"]
    assert ("none of d has read" in finding.what) == is_known
    if not is_known:
        assert "not known whether they were read (cmpl-p): the records of d do not reach back so far" in finding.what


@pytest.mark.parametrize("problem", [None, "its control socket did not answer"])
def test_doctor_asks_for_what_the_newest_records_do_not_show(
    monkeypatch: pytest.MonkeyPatch, problem: str | None
) -> None:
    d, p = busy(recorded_seconds=60.0), engine("pp", EXPIRED, role="kv_producer")
    asked: list[list[Question]] = []

    def survey(addresses: Iterable[Address], questions: list[Question], **_: Any) -> Survey:
        asked.append(questions)
        if len(asked) == 1:
            return Survey([d, p])
        assert list(addresses) == [d.address, p.address]
        row = d.ranks[0].rows[0]
        return Survey([replace(d, ranks=(replace(d.ranks[0], rows=(row, *told), problem=problem),)), p])

    monkeypatch.setattr("connector.tools.live.survey", survey)
    told: list[RecordRow] = [READ]
    said = CliRunner().invoke(app, ["doctor"]).output
    assert [each.match for each in asked[1] if each.what == "records"] == ["cmpl-p"]
    assert "although a decode engine had read them (cmpl-p)" in said
    assert "expired leases" not in said
    told, asked = [], []
    said = CliRunner().invoke(app, ["doctor"]).output
    assert ("none of d has read" in said) == (problem is None)
    assert ("not known whether they were read" in said) == (problem is not None)


def test_a_decode_engine_that_began_after_the_lease_says_nothing_of_it() -> None:
    """One that was there before it, with the same side channel, may have read it."""
    older = record("lease", "expired", "cmpl-p", engine_id="pp", seconds_in_from=30.0)
    (finding,) = found(engine("d"), engine("pp", older, role="kv_producer"), check="expired leases")
    assert "not known" in finding.what


def test_without_a_decode_engine_it_is_not_known_who_has_read() -> None:
    prefill = engine("pp", EXPIRED, role="kv_producer")
    (finding,) = found(prefill, check="expired leases")
    assert finding.what.endswith("(cmpl-p): no decode engine was asked")
    silent = EngineReport(address=Address("h", 1), problem="it hangs", problem_kind="HandshakeTimeout")
    (finding,) = found(engine("d"), prefill, silent, check="expired leases")
    assert finding.what.endswith("(cmpl-p): h:1 could not be asked")
    another_p = replace(silent, named_by=("d",))
    assert "none of d has read" in found(engine("d"), prefill, another_p, check="expired leases")[0].what


def test_releases_of_what_is_not_lent() -> None:
    (finding,) = found(
        engine("pp", role="kv_producer", counts=EngineCounts(late_releases=3)), check="one-sided releases"
    )
    assert "3 release(s)" in finding.what


def test_a_trace_that_is_interrupted_is_said_with_the_file_the_error_and_what_to_do() -> None:
    said = "/traces/d-kv_consumer-0-7.jsonl: [Errno 28] No space left on device"
    healthy = engine("d", counts=EngineCounts(trace_records_missing=12))
    (row,) = healthy.of(EngineRow)
    interrupted = replace(healthy.ranks[0], rows=(msgspec.structs.replace(row, trace_interrupted=said),))
    (finding,) = found(replace(healthy, ranks=(interrupted,)), check="traces")
    assert finding.level == "warning"
    assert finding.what.startswith(
        f"d: its trace is interrupted until it can be written ({said}): 12 record(s) are missing"
    )
    assert finding.advice.startswith("free space, make the directory again, raise the limit of open files")
    assert "(ulimit -f)" in finding.advice  # File too large
    (finding,) = found(replace(healthy, ranks=(healthy.ranks[0], interrupted)), check="traces")
    assert "is interrupted on 1 of 2 ranks" in finding.what
    assert "24 record(s)" in finding.what


def test_records_that_a_trace_lacks_are_said() -> None:
    (finding,) = found(engine("d", counts=EngineCounts(trace_records_missing=12)), check="traces")
    assert finding.level == "warning"
    assert finding.what.startswith("d: 12 record(s) are missing in its trace")
    assert found(engine("d"), check="traces") == []


def test_problems_come_first() -> None:
    levels = [each.level for each in found(*pair(options=FACTS.options | {"kv_lease_duration": "9"}))]
    assert levels == sorted(levels, key=["problem", "warning", "note"].index)


def test_a_call_of_nixl_that_does_not_return_is_a_problem_of_that_rank() -> None:
    """The failures that follow name prefill engines."""
    (finding,) = found(engine("d", counts=EngineCounts(nixl_lag_seconds=40)), check="answers")
    assert finding.level == "problem"
    assert finding.what.startswith("d rank 0: NIXL has not returned from a call for 40 s")
    assert "py-spy dump" in finding.advice
    assert found(engine("d", counts=EngineCounts(nixl_lag_seconds=0)), check="answers") == []


def two_ranks(here: dict[str, Any], there: dict[str, Any]) -> EngineReport:
    one, other = engine("d", **here), engine("d", **there)
    (row,) = other.of(EngineRow)
    second = replace(other.ranks[0], rank=(0, 1), rows=(msgspec.structs.replace(row, rank=1),))
    return replace(one, ranks=(*one.ranks, second))


def test_each_worker_may_have_a_network_card_of_its_own() -> None:
    """vLLM chooses it by VLLM_GPU_NIC_PCIE_MAPPING."""
    d = two_ranks(
        {"environment": {"UCX_NET_DEVICES": "mlx5_0:1"}, "devices": ("mlx5_0",)},
        {"environment": {"UCX_NET_DEVICES": "mlx5_7:1"}, "devices": ("mlx5_0",)},
    )
    opened = {("d", 0): Opened((RC, CUDA)), ("d", 1): Opened((), ("device 'mlx5_7:1' is not available",), "NIXL_ERR")}
    (problem,) = [
        each
        for each in diagnose(Survey([d]), opened=opened)
        if each.level == "problem" and "is not available" in each.what
    ]
    assert problem.what.startswith("d rank 1: UCX, told what this engine tells it, says: device 'mlx5_7:1'")


def test_workers_that_are_alike_are_one_finding() -> None:
    d = two_ranks({}, {})
    findings = [each for each in diagnose(Survey([d])) if each.check == "transports"]
    assert findings
    assert all(each.what.startswith("d: ") for each in findings)


def test_an_engine_on_several_machines_that_is_found_at_two_addresses_is_one() -> None:
    d = two_ranks({"host_name": "host-1", "process_id": 7}, {"host_name": "host-2", "process_id": 7})
    again = replace(d, address=Address("d.example", 5600))
    assert "engine ids" not in {each.check for each in diagnose(Survey([d, again]))}
