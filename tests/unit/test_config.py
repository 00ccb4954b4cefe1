"""Options: defaults, what a configuration of the built-in connector becomes, and how errors read."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import connector
from connector.config import (
    ConnectorOptions,
    OptionError,
    in_force,
    parse_options,
    unknown_variables,
    warn_of_options,
)
from connector.environment import VARIABLES


def _error(extra: dict[Any, Any]) -> OptionError:
    with pytest.raises(OptionError) as caught:
        parse_options(extra, {})
    text = str(caught.value)
    assert "kv_lease_duration=30.0" in text
    assert 'backends=["UCX"]' in text
    assert len(text) < 1500
    return caught.value


def test_defaults() -> None:
    assert parse_options({}, {}) == ConnectorOptions()


def test_values_are_taken_over() -> None:
    options = parse_options(
        {"kv_lease_duration": 5.5, "backends": ["UCX", "GDS"], "num_threads": 4, "trace_directory": "/tmp/trace"}, {}
    )
    assert (options.kv_lease_duration, options.backends, options.num_threads) == (5.5, ("UCX", "GDS"), 4)
    assert options.trace_directory == "/tmp/trace"


def test_a_long_lease_raises_the_limit_of_all_its_renewals() -> None:
    assert parse_options({}, {}).lease_limit_seconds == 900.0
    assert parse_options({"kv_lease_duration": 1200}, {}).lease_limit_seconds == 1200.0
    assert parse_options({"kv_lease_duration": 30, "lease_limit_seconds": 30}, {}).lease_limit_seconds == 30.0


def test_a_limit_below_the_lease_itself_is_refused() -> None:
    error = _error({"kv_lease_duration": 60, "lease_limit_seconds": 59.5})
    assert error.option == "lease_limit_seconds"
    assert "lease_limit_seconds (59.5) is less than kv_lease_duration (60)" in str(error)


def test_whole_seconds_may_be_integers() -> None:
    assert parse_options({"kv_lease_duration": 6}, {}).kv_lease_duration == 6.0


def test_a_lease_may_last_for_days() -> None:
    options = parse_options({"kv_lease_duration": 604_800, "decoder_kv_blocks_ttl": 31_536_000}, {})
    assert (options.kv_lease_duration, options.lease_limit_seconds, options.drain_grace_seconds) == (604_800,) * 3
    assert options.decoder_kv_blocks_ttl == 31_536_000
    limited = parse_options({"kv_lease_duration": 604_800, "lease_limit_seconds": 1_209_600}, {})
    assert limited.lease_limit_seconds == 1_209_600


def test_unknown_option_suggests_the_nearest() -> None:
    error = _error({"kv_lease_durration": 3})
    assert error.option == "kv_lease_durration"
    assert "did you mean kv_lease_duration?" in str(error)


def test_unknown_option_without_a_near_one() -> None:
    assert "did you mean" not in str(_error({"zzz": 3}))


@pytest.mark.parametrize("name", ["kv_load_failure_policy", "kv_buffer_device", "enable_permute_local_kv", "kv_role"])
def test_options_of_vllm_are_shown_their_place(name: str) -> None:
    assert f"unknown option {name!r}: it is one of vLLM's own, and stands beside" in str(_error({name: "cpu"}))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("on_actor_death", "restart", "expected one of degrade, exit"),
        ("verify", True, "expected one of off, sampled, all"),
        ("known_peers", ["http://p:5600"], 'expected a list of at most 256 "host:port"'),
        ("known_peers", "p:5600", 'expected a list of at most 256 "host:port"'),
    ],
)
def test_what_an_option_may_be_is_said_in_words(name: str, value: Any, expected: str) -> None:
    assert expected in str(_error({name: value}))


@pytest.mark.parametrize("name", [7, "x" * 100_000, "new\nline", None])
def test_odd_names(name: Any) -> None:
    assert str(_error({name: 1})).isprintable()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_lease_duration", "30"),
        ("kv_lease_duration", 0),
        ("kv_lease_duration", -1),
        ("kv_lease_duration", None),
        ("kv_lease_duration", True),
        ("kv_lease_duration", float("nan")),
        ("kv_lease_duration", float("inf")),
        ("backends", "UCX"),
        ("backends", []),
        ("backends", [""]),
        ("num_threads", 1.5),
        ("num_threads", -1),
        ("num_threads", True),
        ("enforce_handshake_compat", "false"),
        ("enforce_handshake_compat", 2),
        ("enforce_handshake_compat", 1.0),
        ("enforce_handshake_compat", None),
        ("bidirectional_kv_xfer", "true"),
        ("transfer_retries", -1),
        ("transfer_retries", 11),
        ("peer_limit", 0),
        ("control_port", -1),
        ("control_port", 65_536),
        ("control_port", "5700"),
        ("engine_ttl", -1),
        ("request_timeout_seconds", 0),
        ("lease_limit_seconds", 0),
        ("backend_grace_seconds", -1),
        ("trace_directory", ""),
        ("trace_directory", 5),
        ("backoff_initial_seconds", []),
        ("kv_recompute_threshold", "64.0"),
        ("kv_recompute_threshold", "many"),
        ("kv_recompute_threshold", "9" * 19),
        ("kv_recompute_threshold", 64.5),
        ("kv_recompute_threshold", float("inf")),
        ("kv_recompute_threshold", True),
        ("kv_recompute_threshold", None),
        ("decode_recompute_threshold", "64"),
        ("decode_recompute_threshold", -1),
        ("kv_lease_duration", 31_536_001),
        ("decoder_kv_blocks_ttl", 31_536_001),
        ("decoder_kv_blocks_ttl", 0),
        ("request_timeout_seconds", 86_401),
        ("allowed_peers", "10.0.0.0/8"),
        ("params_keys_file", ""),
        ("curve_directory", 7),
        ("allow_insecure_peers", 1),
    ],
)
def test_ill_typed_value_is_named_and_shown(name: str, value: Any) -> None:
    error = _error({name: value})
    assert error.option == name
    assert f"option {name} has the value {value!r}" in str(error)


@pytest.mark.parametrize("text", ["10.0.0.1/8", "host", "", "10.0.0.0/33", "::/129", "10.0.0.0 "])
def test_an_address_range_that_is_none_is_named(text: str) -> None:
    error = _error({"allowed_peers": ["10.0.0.0/8", text]})
    assert error.option == "allowed_peers"
    assert repr(text) in str(error)


@pytest.mark.parametrize("text", ["prefill-0:0", "[::1]:99999", "::1", "fd00::1:5600", "[]:5600"])
def test_a_known_peer_that_cannot_be_one_is_named(text: str) -> None:
    error = _error({"known_peers": ["prefill-0:5600", text]})
    assert error.option == "known_peers"
    assert repr(text) in str(error)


def test_known_peers() -> None:
    peers = ("prefill-0:5600", "10.0.0.1:5600", "[fd00::1]:5600")
    assert parse_options({"known_peers": list(peers)}, {}).known_peers == peers


def test_address_ranges() -> None:
    peers = ("10.0.0.0/8", "fd00::/8", "192.0.2.7")
    assert parse_options({"allowed_peers": list(peers)}, {}).allowed_peers == peers


def test_allowing_insecure_peers_without_keys_is_said_to_be_idle(caplog: pytest.LogCaptureFixture) -> None:
    idle = {"allow_insecure_peers": True}
    with caplog.at_level(logging.WARNING):
        warn_of_options(idle, parse_options(idle, {}))
        assert len(caplog.records) == 1
        for name in ("curve_directory", "params_keys_file"):
            useful = {**idle, name: "/keys"}
            warn_of_options(useful, parse_options(useful, {}))
    assert len(caplog.records) == 1


def test_options_without_effect_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    options = {"kv_recompute_threshold": 128, "decoder_kv_blocks_ttl": 60}
    both = {**options, "bidirectional_kv_xfer": True}
    with caplog.at_level(logging.WARNING):
        warn_of_options(both, parse_options(both, {}))
        assert not caplog.records
        warn_of_options(options, parse_options(options, {}))
    assert [record.args for record in caplog.records] == [("kv_recompute_threshold",), ("decoder_kv_blocks_ttl",)]


def test_options_of_a_trace_that_is_not_written_are_said_to_be_idle(caplog: pytest.LogCaptureFixture) -> None:
    options = {"trace_sample": 0.1, "trace_file_bytes": 1 << 20, "trace_files_kept": 2}
    with caplog.at_level(logging.WARNING):
        warn_of_options(options, parse_options(options, {"NIXL_ACTOR_TRACE_DIR": "/tmp/trace"}))
        assert not caplog.records
        warn_of_options(options, parse_options(options, {}))
    assert [record.args for record in caplog.records] == [
        ("trace_file_bytes",),
        ("trace_files_kept",),
        ("trace_sample",),
    ]
    assert all("no effect without trace_directory" in record.message for record in caplog.records)


def test_no_warning_without_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_options({"transfer_retries": 2}, parse_options({"transfer_retries": 2}, {}))
    assert not caplog.records


@pytest.mark.parametrize(("backends", "is_idle"), [(["UCX"], True), (["GDS", "UCX"], True), (["LIBFABRIC"], False)])
def test_threads_of_ucx_are_said_to_be_idle(
    backends: list[str], is_idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"num_threads": 4, "backends": backends}
    with caplog.at_level(logging.WARNING):
        warn_of_options(options, parse_options(options, {}))
    assert ["has no effect" in each.message for each in caplog.records if "num_threads" in each.message] == [
        True
    ] * is_idle


def test_two_back_ends_for_one_read_are_refused() -> None:
    with pytest.raises(OptionError, match="name one of both") as refused:
        parse_options({"backends": ["LIBFABRIC", "UCX", "GDS"]}, {})
    assert refused.value.option == "backends"


@pytest.mark.parametrize("backends", [["UCX"], ["LIBFABRIC"], ["UCX", "GDS"]])
def test_other_back_ends_than_ucx_are_said_to_promise_less(
    backends: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_options({"backends": backends}, parse_options({"backends": backends}, {}))
    said = [each.message for each in caplog.records if "holds for UCX alone" in each.message]
    assert len(said) == (backends != ["UCX"])


@pytest.mark.parametrize(
    ("extra", "option"),
    [
        ({"backoff_initial_seconds": 10, "backoff_max_seconds": 5}, "backoff_max_seconds"),
        ({"kv_lease_duration": 0.05}, "lease_margin_seconds"),
        ({"kv_lease_duration": 3, "lease_margin_seconds": 1.6}, "lease_margin_seconds"),
        ({"request_timeout_seconds": 4}, "request_timeout_seconds"),
        ({"handshake_timeout_seconds": 121}, "request_timeout_seconds"),
        ({"handshake_timeout_seconds": 30}, "handshake_timeout_seconds"),
        ({"kv_lease_duration": 3}, "handshake_timeout_seconds"),
        ({"kv_lease_duration": 4, "handshake_timeout_seconds": 4}, "handshake_timeout_seconds"),
        ({"quiesce_timeout_seconds": 0.5}, "quiesce_timeout_seconds"),
        ({"backend_grace_seconds": 40}, "quiesce_timeout_seconds"),
        ({"engine_ttl": 20, "backoff_max_seconds": 30}, "engine_ttl"),
        ({"engine_ttl": 20, "incompatible_backoff_seconds": 30}, "engine_ttl"),
    ],
)
def test_options_that_contradict_each_other(extra: dict[str, float], option: str) -> None:
    error = _error(extra)
    assert error.option == option
    assert f"option {option} (" in str(error)


@pytest.mark.parametrize(
    "extra",
    [
        {"engine_ttl": 20},
        {"engine_ttl": 0, "backoff_max_seconds": 30},
        {"kv_lease_duration": 3, "lease_margin_seconds": 1.5, "handshake_timeout_seconds": 2.9},
        {"kv_lease_duration": 5.5},
        {"request_timeout_seconds": 5},
        {"quiesce_timeout_seconds": 0.6},
    ],
)
def test_options_that_go_together(extra: dict[str, float]) -> None:
    options = parse_options(extra, {})
    assert {name: getattr(options, name) for name in extra} == extra


def test_a_lease_of_a_builtin_configuration_that_is_too_short_is_refused_with_both_names() -> None:
    said = "option handshake_timeout_seconds (5) is not less than kv_lease_duration (3): "
    assert said in str(_error({"kv_lease_duration": 3}))


def test_what_is_in_force_names_what_matters_and_what_was_changed() -> None:
    assert in_force(parse_options({}, {})) == (
        "kv_lease_duration=30.0, request_timeout_seconds=120.0, handshake_timeout_seconds=5.0"
    )
    changed = in_force(parse_options({"backends": ["GDS"], "kv_lease_duration": 10}, {"NIXL_ACTOR_TRACE_DIR": "/t"}))
    assert 'kv_lease_duration=10.0, backends=["GDS"], ' in changed
    assert changed.endswith('trace_directory="/t"')


def test_trace_directory_from_the_environment() -> None:
    environment = {"NIXL_ACTOR_TRACE_DIR": "/from/environment"}
    assert parse_options({}, environment).trace_directory == "/from/environment"
    assert parse_options({"trace_directory": "/from/option"}, environment).trace_directory == "/from/option"
    assert parse_options({}, {"NIXL_ACTOR_TRACE_DIR": ""}).trace_directory is None


def test_all_variables_of_the_package_are_known() -> None:
    sources = "".join(path.read_text() for path in Path(connector.__file__).parent.rglob("*.py"))
    assert set(re.findall("NIXL_ACTOR_[A-Z_]*[A-Z]", sources)) == set(VARIABLES)


def test_a_variable_that_is_named_like_those_of_the_package_is_found() -> None:
    of_services = ["DECODE_SERVICE_HOST", "DECODE_SERVICE_PORT_KV", "DECODE_PORT", "DECODE_PORT_5600_TCP_ADDR"]
    misspelt = ["NIXL_ACTOR_CURVE_DIR", "NIXL_ACTOR_TRACE_DIRECTORY"]
    environment = dict.fromkeys([*VARIABLES, *misspelt, *(f"NIXL_ACTOR_{name}" for name in of_services)], "x")
    assert unknown_variables(environment) == misspelt


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_ACTOR_TRACE_DIR", "/from/process")
    assert parse_options({}).trace_directory == "/from/process"


def test_every_option_has_a_default_that_is_valid() -> None:
    defaults = msgspec.to_builtins(ConnectorOptions())
    assert parse_options(defaults | {"trace_directory": None}, {}) == ConnectorOptions()


# --- docs/options.md and README.md ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "options.md").read_text()
NOTHING = "none"
WITH_A_ROW_AMONG_THE_BUILTIN_ONES = ("bidirectional_kv_xfer", "kv_recompute_threshold", "decoder_kv_blocks_ttl")


def defaults_in(table: str) -> dict[str, str]:
    """By option."""
    found: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) \| .* \|$", table, re.MULTILINE):
        for name, default in zip(names.split(", "), defaults.split(", "), strict=True):
            assert name.strip("`") not in found, f"{name} is there twice"
            found[name.strip("`")] = default.strip("`")
    return found


DOCUMENTED = defaults_in(PAGE.partition("\n## Options of this connector\n")[2].partition("\n## ")[0])
OF_THE_README = defaults_in(README.partition("\n### Options\n")[2].partition("\n## ")[0])
"""The few that most people need."""


def test_the_table_has_every_option() -> None:
    options = set(msgspec.to_builtins(ConnectorOptions()))
    assert DOCUMENTED.keys() == options - set(WITH_A_ROW_AMONG_THE_BUILTIN_ONES)


@pytest.mark.parametrize("name", [*WITH_A_ROW_AMONG_THE_BUILTIN_ONES, "kv_lease_duration", "engine_ttl"])
def test_the_table_of_builtin_options_says_the_default_too(name: str) -> None:
    table = PAGE.partition("\n## Options of the built-in connector\n")[2]
    (row,) = re.findall(rf"^\| [^|]*`{name}`[^|]* \| (.*) \|$", table, re.MULTILINE)
    default = getattr(ConnectorOptions(), name)
    assert re.search(rf"\b{json_of(default)}\b", row)


def json_of(value: object) -> str:
    """Without a fraction that is zero."""
    return re.sub(r"\.0$", "", msgspec.json.encode(value).decode())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_table_has_the_default(name: str) -> None:
    default, documented = getattr(ConnectorOptions(), name), DOCUMENTED[name]
    if documented == NOTHING:
        assert default in (None, ())
    elif isinstance(default, str):
        assert documented == default
    else:
        assert msgspec.json.decode(documented) == msgspec.json.decode(msgspec.json.encode(default))


def test_the_readme_has_some_of_them_with_the_same_default() -> None:
    assert len(OF_THE_README) > 5
    assert OF_THE_README.items() <= DOCUMENTED.items()


def test_what_is_said_of_options_that_contradict_each_other_is_so() -> None:
    with pytest.raises(OptionError, match="request_timeout_seconds"):
        parse_options({"request_timeout_seconds": 4, "handshake_timeout_seconds": 5}, {})
    with pytest.raises(OptionError, match="lease_margin_seconds"):
        parse_options({"lease_margin_seconds": 16}, {})
    with pytest.raises(OptionError, match="handshake_timeout_seconds"):
        parse_options({"handshake_timeout_seconds": 30}, {})
    with pytest.raises(OptionError, match="handshake_timeout_seconds"):
        parse_options({"kv_lease_duration": 5}, {})
