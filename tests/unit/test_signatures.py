"""Signed `kv_transfer_params`: what is bound, what is refused, how keys are rolled; in both directions."""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector import key_files
from connector.config import ConnectorOptions, OptionError
from connector.key_files import ParamsKeyFile, channel_access, params_key_file, warn_of_insecurity
from connector.protocol import RejectPull, ReleaseUnread, StartPull, TrackLease
from connector.wire.params import (
    ParamsError,
    RemotePrefill,
    build_remote_prefill,
    parse_remote_prefill,
    require_genuine,
)
from connector.wire.signatures import KeysError, ParamsKey, ParamsKeys, format_keys, parse_keys
from statemachine.failures import BadParams, ParamsForged
from tests.unit.hybrid_engine import SAMPLED_TOKEN, HybridEngine, full
from tests.unit.numbers_as_floats import as_floats
from tests.unit.properties import on_any_machine

OLD, NEW = ParamsKey("2026-01", bytes(range(32))), ParamsKey("2026-02", bytes(range(1, 33)))
KEYS = ParamsKeys((OLD,))
OTHERS = ParamsKeys((ParamsKey(OLD.key_id, bytes(32)),))
TOKENS = list(range(40))

LENT = RemotePrefill(
    engine_id="p",
    request_id="cmpl-1",
    host="10.0.0.1",
    port=5600,
    block_ids=((3, 1, 4), (1,)),
    tp_size=2,
    dcp_size=1,
    pp_size=3,
    num_tokens=200,
    lease_number=2**62,
    prefix_digests=((100, "ab"), (200, "cd")),
    first_tokens=(0, 176),
    adapter_weights="0123abcd",
    media_names="4567:89ef",
)

CHANGED: dict[str, Any] = {
    "engine_id": "q",
    "request_id": "cmpl-2",
    "host": "10.0.0.2",
    "port": 5601,
    "block_ids": ((3, 1, 5), (1,)),
    "tp_size": 1,
    "dcp_size": 2,
    "pp_size": 1,
    "num_tokens": 199,
    "lease_number": 2**62 + 1,
    "prefix_digests": ((100, "ab"), (200, "ce")),
    "first_tokens": (0, 160),
    "adapter_weights": None,
    "media_names": "4567:89ee",
    "registration": 3,
    "signed_host": "10.0.0.2",
}
"""Another value for each field of the parameters."""


def params(*, keys: ParamsKeys | None = KEYS, lends_back: bool = False) -> dict[str, Any]:
    """As they come out of a router."""
    made = build_remote_prefill(LENT, expires_seconds=7.5 if lends_back else None, keys=keys)
    returned: dict[str, Any] = json.loads(json.dumps(made))
    return returned


def fault(raw: dict[str, Any], keys: ParamsKeys = KEYS, *, lends_back: bool = False) -> str | None:
    """Why they are refused; None: they are not."""
    try:
        require_genuine(parse_remote_prefill(raw), keys, lends_back=lends_back)
    except ParamsError as error:
        return error.failure.why if isinstance(error.failure, ParamsForged) else str(error)
    return None


# --- what is bound ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lends_back", [False, True])
def test_what_an_engine_of_the_fleet_gives_out_is_genuine(lends_back: bool) -> None:
    assert fault(params(lends_back=lends_back), lends_back=lends_back) is None


def test_every_field_is_bound() -> None:
    assert set(CHANGED) | {"signature"} == set(RemotePrefill.__struct_fields__)
    signed = msgspec.structs.replace(LENT, signature=KEYS.sign(LENT, lends_back=True))
    require_genuine(signed, KEYS, lends_back=True)
    for name, value in CHANGED.items():
        changed = msgspec.structs.replace(signed, **{name: value})
        with pytest.raises(ParamsError, match="is not that of these values"):
            require_genuine(changed, KEYS, lends_back=True)


@pytest.mark.parametrize("lends_back", [False, True])
def test_a_router_may_put_another_host_in_and_the_signed_one_counts(lends_back: bool) -> None:
    """As vLLM's proxy for conversations does."""
    changed = parse_remote_prefill(params(lends_back=lends_back) | {"remote_host": "169.254.169.254"})
    assert changed.host == "169.254.169.254"
    genuine = require_genuine(changed, KEYS, lends_back=lends_back)
    assert genuine.host == LENT.host
    assert msgspec.structs.replace(genuine, signature=None) == LENT


def test_the_direction_is_bound() -> None:
    assert fault(params(lends_back=True), lends_back=False) is not None
    assert fault(params(lends_back=False), lends_back=True) is not None


@pytest.mark.parametrize("name", ["lease_number", "remote_num_tokens", "dcp_size", "pp_size"])
def test_what_is_left_out_is_missed(name: str) -> None:
    raw = params()
    del raw[name]
    if parse_remote_prefill(raw) != parse_remote_prefill(params()):
        assert fault(raw) is not None


def test_blocks_cannot_be_moved_between_groups() -> None:
    raw = params()
    raw["remote_block_ids"] = [[3, 1], [4, 1]]
    assert fault(raw) is not None


def test_a_router_may_write_them_anew_and_add_its_own() -> None:
    raw = dict(reversed(params().items())) | {"router_hint": [1, 2], "remote_blocks_expiry_time": 99.0}
    assert fault(raw) is None


# --- what is refused ------------------------------------------------------------------------------------------------


def test_parameters_without_a_signature_are_refused_unless_that_is_allowed() -> None:
    raw = params(keys=None)
    assert fault(raw) == "it is not signed"
    require_genuine(parse_remote_prefill(raw), KEYS, lends_back=False, allows_unsigned=True)


def test_a_wrong_signature_is_refused_even_where_none_is_needed() -> None:
    forged = parse_remote_prefill(params(keys=OTHERS))
    with pytest.raises(ParamsError):
        require_genuine(forged, KEYS, lends_back=False, allows_unsigned=True)


def test_a_key_of_the_same_name_with_another_secret_does_not_count() -> None:
    assert fault(params(keys=OTHERS)) == f"its signature with key {OLD.key_id} is not that of these values"


@pytest.mark.parametrize(
    "signature",
    [
        "",
        ":",
        OLD.key_id,
        f"{OLD.key_id}:",
        f"{OLD.key_id}:{'0' * 63}",
        f"{OLD.key_id}:{'0' * 64}",
        f"{OLD.key_id}:{'0' * 128}",
        f"{OLD.key_id}:{'é' * 64}",
        f"{OLD.key_id}:{'٣' * 64}",
        f"unknown:{'0' * 64}",
        "\0" * 64,
        f"{OLD.key_id}:{'0' * 64}\n",
    ],
)
def test_signatures_that_are_none(signature: str) -> None:
    found = fault(params() | {"signature": signature})
    assert found is not None
    assert str(ParamsForged(why=found, source="r on p")).isprintable()


@pytest.mark.parametrize("signature", [7, ["a"], "x" * 1000, {"key": "a"}])
def test_signatures_of_another_form_are_malformed_parameters(signature: Any) -> None:
    with pytest.raises(ParamsError) as caught:
        parse_remote_prefill(params() | {"signature": signature})
    assert isinstance(caught.value.failure, BadParams)
    assert caught.value.failure.field == "signature"


@on_any_machine
@given(st.integers(0, 63), st.sampled_from("0123456789abcdef"))
def test_one_digit_is_enough(place: int, digit: str) -> None:
    raw = params()
    key_id, digest = raw["signature"].split(":")
    changed = digest[:place] + digit + digest[place + 1 :]
    assert (fault(raw | {"signature": f"{key_id}:{changed}"}) is None) == (changed == digest)


def test_no_secret_is_shown() -> None:
    for shown in (repr(KEYS), str(OLD), repr(KEYS.keys)):
        assert OLD.secret.hex() not in shown
        assert repr(OLD.secret) not in shown


# --- keys and their file --------------------------------------------------------------------------------------------


def test_keys_are_rolled_while_both_are_accepted() -> None:
    """One engine after the other, in each of the three steps; all that is under way stays genuine."""
    accepts_new, signs_new, drops_old = ParamsKeys((OLD, NEW)), ParamsKeys((NEW, OLD)), ParamsKeys((NEW,))
    for before, after in ((KEYS, accepts_new), (accepts_new, signs_new), (signs_new, drops_old)):
        for signer, reader in ((before, after), (after, before)):
            assert fault(params(keys=signer), reader) is None
    assert fault(params(keys=KEYS), drops_old) == f"it is signed with key {OLD.key_id}, which is not known here"


def test_a_file_is_read_as_it_was_written() -> None:
    keys = ParamsKeys((NEW, OLD))
    assert parse_keys(format_keys(keys)) == keys
    assert parse_keys(f"\n # a remark\n\t a \t {'0a' * 32} \n") == ParamsKeys((ParamsKey("a", b"\n" * 32),))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 keys"),
        ("# nothing\n", "0 keys"),
        ("a", "line 1"),
        (f"# x\na {'zz' * 32}", "line 2"),
        (f"a {'0' * 63}", "line 1"),
        (f"a b {'0a' * 32}", "line 1"),
        ("a 0a0b", "has 2 bytes"),
        (f"a {'0a' * 2000}", "has 2000 bytes"),
        (f"a {'0a' * 32}\na {'0b' * 32}", "key a is there twice"),
        ("".join(f"k{number} {'0a' * 32}\n" for number in range(65)), "65 keys"),
    ],
)
def test_a_file_that_makes_no_sense_says_where_and_shows_no_secret(text: str, problem: str) -> None:
    with pytest.raises(KeysError, match=problem) as caught:
        parse_keys(text)
    assert "0a0b" not in str(caught.value)
    assert "0a0a" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"x" * (1 << 21)], ids=["absent", "empty", "odd", "huge"])
def test_an_engine_does_not_start_with_a_file_that_cannot_be_used(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError) as caught:
        params_key_file(ConnectorOptions(params_keys_file=str(path)))
    assert caught.value.option == "params_keys_file"
    assert str(path) in str(caught.value)


def test_without_the_option_there_are_no_keys() -> None:
    assert params_key_file(ConnectorOptions()) is None


def test_a_file_that_has_changed_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text(format_keys(KEYS))
    file = ParamsKeyFile(str(path))
    rolled = tmp_path / "new"
    rolled.write_text(format_keys(ParamsKeys((NEW, OLD))))
    with caplog.at_level(logging.INFO):
        file.look_again()
        assert (file.keys, caplog.records) == (KEYS, [])
        os.replace(rolled, path)
        for _ in range(3):
            file.look_again()
            assert file.keys == ParamsKeys((NEW, OLD))
        path.write_text("half writ")
        for _ in range(3):
            file.look_again()
        path.unlink()
        for _ in range(3):
            file.look_again()
    assert file.keys == ParamsKeys((NEW, OLD)), "the keys of before stay in use"
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR", "ERROR"]
    assert not any(key.secret.hex() in caplog.text for key in (OLD, NEW))


def test_a_file_that_could_not_be_read_is_read_when_it_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may read a file changes nothing of what shows that it was written."""
    path = tmp_path / "keys"
    path.write_text(format_keys(KEYS))
    file = ParamsKeyFile(str(path))
    path.write_text(format_keys(ParamsKeys((NEW, OLD))))
    read = key_files._text

    def forbidden(path: str) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(key_files, "_text", forbidden)
    for _ in range(3):
        file.look_again()
    assert (file.keys, len(caplog.records)) == (KEYS, 1)
    monkeypatch.setattr(key_files, "_text", read)
    file.look_again()
    assert file.keys == ParamsKeys((NEW, OLD))


def test_ipv4_addresses_in_the_form_of_ipv6_are_ipv4() -> None:
    """A range of them is compared with addresses that are IPv4 by then."""
    peers = ("::ffff:10.0.0.0/104", "::ffff:192.0.2.7", "::/0", "fd00::/8")
    assert channel_access(ConnectorOptions(allowed_peers=peers)).networks == tuple(
        ipaddress.ip_network(each) for each in ("10.0.0.0/8", "192.0.2.7/32", "::/0", "fd00::/8")
    )


# --- what is said at start ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["no security: whoever reaches the side channel at h:1 can"]),
        ({"allow_insecure_peers": True}, ["no security"]),
        ({"allowed_peers": ("10.0.0.0/8",)}, []),
        ({"params_keys_file": "f"}, []),
        ({"curve_directory": "d"}, []),
        ({"curve_directory": "d", "params_keys_file": "f", "allowed_peers": ("10.0.0.0/8",)}, []),
        (
            {"curve_directory": "d", "allow_insecure_peers": True},
            ["allow_insecure_peers: the side channel at h:1 is open to peers without a key (docs/"],
        ),
        (
            {"curve_directory": "d", "params_keys_file": "f", "allow_insecure_peers": True},
            ["open to peers without a key; kv_transfer_params without a signature are believed"],
        ),
    ],
)
def test_one_warning_at_start_says_what_is_open(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], expected: list[str]
) -> None:
    warn_of_insecurity(ConnectorOptions(**options), "h:1")
    assert len(caplog.records) == len(expected)
    for record, text in zip(caplog.records, expected, strict=True):
        assert text in record.getMessage()
        assert record.levelname == "WARNING"


# --- the scheduler side ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


def engine(tmp_path: Path, name: str, keys: ParamsKeys | None = KEYS, **options: Any) -> HybridEngine:
    if keys is not None:
        path = tmp_path / name
        path.write_text(format_keys(keys))
        options["params_keys_file"] = str(path)
    return HybridEngine([full()], engine_id=name, options=options)


def lent(prefill: HybridEngine, name: str = "a") -> dict[str, Any]:
    prefill.prefill(name, TOKENS)
    found: dict[str, Any] = prefill.params[name]
    return found


def commands(decode: HybridEngine) -> list[type]:
    kinds = TrackLease | StartPull | ReleaseUnread | RejectPull
    return [type(each) for each in decode.commands if isinstance(each, kinds)]


def test_d_reads_what_p_has_signed(tmp_path: Path) -> None:
    decode = engine(tmp_path, "d")
    decode.submit("a", TOKENS, lent(engine(tmp_path, "p")))
    decode.step()
    assert commands(decode) == [TrackLease, StartPull]


def test_d_reads_what_p_has_signed_when_a_router_makes_floats_of_integers(tmp_path: Path) -> None:
    decode = engine(tmp_path, "d")
    params = lent(engine(tmp_path, "p"))
    decode.submit("a", TOKENS, as_floats(params) | {"remote_port": str(params["remote_port"])})
    decode.step()
    assert commands(decode) == [TrackLease, StartPull]


HOST = {"remote_host": "169.254.169.254"}


@pytest.mark.parametrize(
    "change",
    [{"signed_host": "169.254.169.254"}, HOST | {"signed_host": None}, {"signature": None}, {"lease_number": 1}],
)
def test_d_hears_of_no_engine_that_forged_parameters_name(tmp_path: Path, change: dict[str, Any]) -> None:
    """The request fails as others do, and says which engine they name; nothing was sent to the address."""
    decode = engine(tmp_path, "d")
    params = lent(engine(tmp_path, "p")) | change
    decode.submit("a", TOKENS, params)
    decode.step()
    assert commands(decode) == [RejectPull]
    failure = decode.rejection_of("a").failure
    assert failure.kind == "ParamsForged"
    assert f"{params['remote_request_id']} on prefill engine {params['remote_engine_id']} (" in str(failure)


def test_d_connects_to_the_host_that_was_signed(tmp_path: Path) -> None:
    decode = engine(tmp_path, "d")
    decode.submit("a", TOKENS, lent(engine(tmp_path, "p")) | HOST)
    decode.step()
    assert commands(decode) == [TrackLease, StartPull]
    named = {command.peer.host for command in decode.commands if isinstance(command, TrackLease | StartPull)}
    assert named == {lent(engine(tmp_path, "p"))["signed_host"]}


def test_without_keys_it_is_the_host_that_the_router_names(tmp_path: Path) -> None:
    """As with the built-in connector: nothing says who wrote it."""
    decode = engine(tmp_path, "d", None)
    decode.submit("a", TOKENS, lent(engine(tmp_path, "p")) | HOST)
    decode.step()
    assert {command.peer.host for command in decode.commands if isinstance(command, TrackLease | StartPull)} == {
        HOST["remote_host"]
    }


def test_parts_of_genuine_parameters_are_not_genuine(tmp_path: Path) -> None:
    prefill, decode = engine(tmp_path, "p"), engine(tmp_path, "d")
    one, other = lent(prefill, "one"), lent(prefill, "other")
    decode.submit("a", TOKENS, one | {"remote_block_ids": other["remote_block_ids"]})
    decode.step()
    assert commands(decode) == [RejectPull]


def test_an_engine_without_keys_signs_nothing_and_reads_what_is_signed(tmp_path: Path) -> None:
    decode = engine(tmp_path, "d", None)
    assert "signature" not in lent(engine(tmp_path, "p0", None))
    decode.submit("a", TOKENS, lent(engine(tmp_path, "p")))
    decode.step()
    assert commands(decode) == [TrackLease, StartPull]


@pytest.mark.parametrize(("allow", "expected"), [(False, [RejectPull]), (True, [TrackLease, StartPull])])
def test_a_mixed_fleet_has_to_be_asked_for(tmp_path: Path, allow: bool, expected: list[type]) -> None:
    decode = engine(tmp_path, "d", allow_insecure_peers=allow)
    decode.submit("a", TOKENS, lent(engine(tmp_path, "p", None)))
    decode.step()
    assert commands(decode) == expected


@pytest.mark.parametrize("is_forged", [False, True])
def test_p_reads_back_only_what_d_has_signed(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_forged: bool) -> None:
    """A prompt that comes with forged parameters is computed whole, and D is not asked for anything."""
    both = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
    prefill, decode = engine(tmp_path, "p", **both), engine(tmp_path, "d", **both)
    decode.load("a", TOKENS, lent(prefill), max_tokens=6)
    decode.loaded("a")
    for _ in range(8):
        decode.step()
    back = decode.params["a"]
    assert back["do_remote_decode"]
    if is_forged:
        back = back | {"remote_port": 22}
    other = engine(tmp_path, "p2", **both)
    other.submit("next", [*TOKENS, *[SAMPLED_TOKEN] * 6, *range(100, 120)], back)
    other.step()
    assert commands(other) == ([] if is_forged else [TrackLease, StartPull])
    assert ("ParamsForged" in caplog.text) == is_forged


def test_parameters_of_one_direction_are_of_no_use_in_the_other(tmp_path: Path) -> None:
    both = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 1}
    prefill = engine(tmp_path, "p", **both)
    turned = lent(engine(tmp_path, "p2")) | {"do_remote_prefill": False, "do_remote_decode": True}
    prefill.submit("next", TOKENS, turned)
    prefill.step()
    assert commands(prefill) == []


def test_keys_that_were_rolled_are_used_at_once(tmp_path: Path) -> None:
    prefill, decode = engine(tmp_path, "p"), engine(tmp_path, "d")
    (tmp_path / "d").write_text(format_keys(ParamsKeys((OLD, NEW))))
    (tmp_path / "p").write_text(format_keys(ParamsKeys((NEW, OLD))))
    for each in (prefill, decode):
        connector = each.scheduler.connector
        assert connector is not None
        key_file = connector._scheduler._lends._key_file
        assert key_file is not None
        key_file.look_again()
    rolled = lent(prefill)
    assert rolled["signature"].startswith(NEW.key_id)
    decode.submit("a", TOKENS, rolled)
    decode.step()
    assert commands(decode) == [TrackLease, StartPull]
