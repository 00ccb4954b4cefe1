"""Engines of neighbouring versions understand each other: what version 0.1 sends is read as it was meant, and what is
sent now has in it all that version 0.1 reads.

tests/unit/wire_0_1.txt has the messages of version 0.1 as bytes, one in each line. Once that version is released, a
line that stands is never changed. Fields may be added, with a default that says what silence means; none is removed,
renamed, or given another meaning. A new message is sent only to who has said that it understands it. See
docs/operations/operating.md, "Versions side by side". `python -m tests.unit.test_wire_versions` prints the lines of
messages that have none yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
import pytest
import torch

from connector.layout.verification import spread
from connector.protocol import Stretch
from connector.scheduler.prefix_digest import prefix_digests, prompt_digests
from connector.weights import fingerprint_of
from connector.wire import administration, control, handshake, inspection, notifications
from connector.wire.identity import KvIdentity, LayerIdentity
from connector.wire.metadata import AgentMetadata, decode_agent_metadata, encode_agent_metadata
from connector.wire.params import RemotePrefill, build_remote_prefill, parse_remote_prefill, require_genuine
from connector.wire.signatures import parse_keys
from connector.worker.block_sums import BlockSums
from statemachine.lease import LeaseName
from statemachine.trace import TransitionRecord
from tests.rig.facts import LEAVE_SECRET, facts

LINES = Path(__file__).with_name("wire_0_1.txt")

ADDED = {"added_by_a_later_version": [1, {"x": "y"}]}
LEASE = LeaseName("p-1", 7)
KEYS = parse_keys("k1 " + "ab" * 32)
PROMPT = [1, 2, 3, 50_000]
INCARNATION = "cd" * 16

METADATA = AgentMetadata(
    engine_id="p",
    agent_metadata=b"nixl",
    kv_caches_base_addr=[4096],
    device_id=0,
    num_blocks=4,
    block_lens=[128],
    block_strides=[128],
    kv_cache_layout="LBHNC",
    block_size=16,
    ssm_sizes=(0, 0),
    attn_backend_name="FLASH_ATTN",
    physical_blocks_per_logical_kv_block=1,
    region_num_blocks=[4],
    region_group_ids=[0],
    region_names=["layers.0"],
    region_mem_types=["VRAM"],
    region_members=[["layers.0"]],
)
IDENTITY = KvIdentity(
    factors={"vllm_version": "0.32.0", "weights": "3 tensors aa"},
    layers={
        "layers.0": LayerIdentity(
            group=0,
            dtype="fp8",
            fp8="FNUZ",
            order="vec",
            k_scales=(0.5,),
            v_scales=(0.25,),
            first_head=2,
            heads=2,
            content_bytes=(32, 16),
        )
    },
    group_tokens=(16,),
)
RECORD = TransitionRecord(1, 2.5, 3, "p", 0, "kv_producer", "lease", "p-1", "computing", "Granted", "held", blocks=4)
REMOTE = RemotePrefill(
    engine_id="p",
    request_id="p-1",
    host="10.0.0.1",
    port=5600,
    block_ids=((3, 4), (9,)),
    tp_size=2,
    num_tokens=20,
    lease_number=7,
    prefix_digests=((20, "0123"),),
    first_tokens=(0, 4),
)


class Message(NamedTuple):
    """One that version 0.1 has: made by it, and read."""

    meant: Any
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _control(meant: Any, decode: Callable[[Sequence[bytes]], Any]) -> Message:
    return Message(meant, lambda said: control.encode_answer(said)[0], lambda frame: decode((frame,)))


def _advertisement(frame: bytes) -> handshake.Advertisement:
    return handshake.decode_advertisement((frame, b"\xcb" + b"\0" * 8))


def _inspected(meant: inspection.Inspected) -> bytes:
    builder = inspection.AnswerBuilder(9)
    for row in meant.rows:
        builder.add(row)
    asked = inspection.Inspect(number=meant.number, what=meant.what)
    return builder.frames(asked, wall=meant.wall, total=meant.total, first=meant.first, next_row=meant.next)[0]


ACTOR = msgspec.structs.replace(
    facts(tp_size=2, tp_rank=1, pp_size=3, pp_rank=2, control_key="k" * 40, identity=IDENTITY, verify="all"),
    draining="draining",
)
MESSAGES = {
    "metadata": Message(METADATA, encode_agent_metadata, decode_agent_metadata),
    "handshake": Message(
        handshake.Advertisement(compatibility_hash="hash", metadata=METADATA, actor=ACTOR, error=None),
        lambda said: handshake.encode_payload(
            said.compatibility_hash, encode_agent_metadata(said.metadata), said.actor
        ),
        _advertisement,
    ),
    "refusal": Message(
        handshake.Advertisement(compatibility_hash=None, metadata=None, actor=None, error="why"),
        lambda said: handshake.encode_error(said.error),
        _advertisement,
    ),
    "hold": _control(
        control.Hold(engine_id="d", rank=1, ranks=2, sent_ns=5, leases=(LEASE,), incarnation=INCARNATION),
        control.decode_request,
    ),
    "release": _control(
        control.Release(engine_id="d", rank=1, ranks=2, leases=(LEASE,), incarnation=INCARNATION),
        control.decode_request,
    ),
    "ask sums": _control(control.AskSums(lease=LEASE, part=1), control.decode_request),
    "inspect": _control(
        inspection.Inspect(number=3, what="requests", match="a", first=4, rows=5), control.decode_request
    ),
    "leave": _control(administration.Leave(grace_ns=5, secret=LEAVE_SECRET), control.decode_request),
    "meet": _control(administration.Meet(places=("10.0.0.1:5600",)), control.decode_request),
    "hold answer": _control(
        control.HoldAnswer(sent_ns=5, held=(control.HeldLease(*LEASE, 9),), gone=(control.GoneLease("p-2", 8, "why"),)),
        control.decode_answer,
    ),
    "released": _control(control.Released(leases=(LEASE,)), control.decode_answer),
    "sums": _control(control.Sums(lease=LEASE, part=1, parts=2, content=b"sums"), control.decode_answer),
    "leaving": _control(control.Leaving(grace_ns=5), control.decode_answer),
    "leave taken": _control(administration.LeaveTaken(leases=3), administration.decode_leave_taken),
    "meet report": _control(
        administration.MeetReport(
            rows=(administration.PlaceRow(place="10.0.0.1:5600", state="met", engine_id="p", problem=""),)
        ),
        administration.decode_meet_report,
    ),
    "sums of a lease": Message(
        control.LeaseSums(blocks=(b"\1\0\0\0",), sums=b"\2" * 8), control.encode_sums, control.decode_sums
    ),
    "drain report": Message(
        administration.DrainReport(state="drained", seconds=1.5, seconds_left=2.5, lent=3, not_lent=4, answering=5),
        administration.encode_report,
        lambda frame: administration.decode_report((frame, b"")),
    ),
    "inspected": Message(
        inspection.Inspected(
            number=3,
            what="records",
            wall=1.5,
            total=9,
            first=4,
            next=None,
            rows=(inspection.RecordRow(record=RECORD, age_seconds=2.5),),
        ),
        _inspected,
        lambda frame: inspection.decode_inspected((frame,)),
    ),
}
TEXTS = {
    "metadata request": handshake.encode_request(2, 1),
    "drain": administration.encode_drain(),
    "release notified": notifications.encode_release("p-1", 2),
    "heartbeat": notifications.encode_heartbeats(["p-1", "p-2"])[0],
}
"""Messages that have no names in them."""

TABLES = {"factors", "layers", "packed_member_layouts"}
"""Maps by name of something, and not of what a message says."""


def lines() -> dict[str, bytes]:
    pairs = (line.partition(": ")[::2] for line in LINES.read_text().splitlines())
    return {name: bytes.fromhex(said) for name, said in pairs}


def as_maps(said: Any) -> Any:
    """What a message says in maps, lists and values. What is a message in a message is one, too."""
    if isinstance(said, bytes):
        try:
            inner = msgspec.msgpack.decode(said)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return said
        return as_maps(inner) if isinstance(inner, dict) else said
    if isinstance(said, dict):
        return {key: as_maps(value) for key, value in said.items()}
    return [as_maps(value) for value in said] if isinstance(said, list) else said


def is_in(old: Any, new: Any) -> bool:
    """Whether a reader of the old finds all of it in the new."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and is_in(value, new[key]) for key, value in old.items())
    if isinstance(old, list):
        return isinstance(new, list) and len(old) == len(new) and all(map(is_in, old, new))
    return type(old) is type(new) and bool(old == new)


def with_more(said: Any, name: str = "") -> Any:
    """The same from a later version, which says more in each map that is a message."""
    if isinstance(said, dict):
        more = {key: with_more(value, key) for key, value in said.items()}
        return more if name in TABLES else more | ADDED
    return [with_more(value) for value in said] if isinstance(said, list) else said


def test_every_message_on_the_control_socket_has_its_line() -> None:
    kinds = {kind for union in (control.ControlRequest, control.ControlAnswer) for kind in get_args(union)}
    assert kinds <= {type(message.meant) for message in MESSAGES.values()}
    assert lines().keys() == MESSAGES.keys() | TEXTS.keys() | {"parameters of P", "parameters of D"}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_version_0_1_says_is_read_as_it_was_meant(name: str) -> None:
    assert MESSAGES[name].decode(lines()[name]) == MESSAGES[name].meant


@pytest.mark.parametrize("name", MESSAGES)
def test_version_0_1_finds_what_it_reads_in_what_is_said_now(name: str) -> None:
    message = MESSAGES[name]
    old, new = (as_maps(msgspec.msgpack.decode(said)) for said in (lines()[name], message.encode(message.meant)))
    assert is_in(old, new), f"{old}\nis not in\n{new}"


@pytest.mark.parametrize("name", MESSAGES)
def test_what_a_later_version_says_beside_is_ignored(name: str) -> None:
    """The maps of its metadata and identity as well."""
    more = with_more(msgspec.msgpack.decode(lines()[name]))
    if "agent_metadata_bytes" in more:
        metadata = with_more(msgspec.msgpack.decode(more["agent_metadata_bytes"]))
        more["agent_metadata_bytes"] = msgspec.msgpack.encode(metadata)
    frame = msgspec.msgpack.encode(more)
    assert frame.count(next(iter(ADDED)).encode()) > 0
    assert MESSAGES[name].decode(frame) == MESSAGES[name].meant


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_those_of_version_0_1(name: str) -> None:
    assert lines()[name] == TEXTS[name]


@pytest.mark.parametrize("lends_back", [False, True])
def test_parameters_and_their_signatures_are_those_of_version_0_1(lends_back: bool) -> None:
    old = msgspec.json.decode(lines()["parameters of D" if lends_back else "parameters of P"])
    new = build_remote_prefill(REMOTE, expires_seconds=12.5 if lends_back else None, keys=KEYS)
    assert is_in(old, msgspec.json.decode(msgspec.json.encode(new)))
    remote = parse_remote_prefill(old | ADDED)
    assert remote == parse_remote_prefill(new)
    assert require_genuine(remote, KEYS, lends_back=lends_back).lease_number == 7


def test_digests_of_a_prompt_are_those_of_version_0_1() -> None:
    """Another way to make them would have all requests between two versions fail as `WrongPrompt`."""
    lora = SimpleNamespace(lora_name="adapter")
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=1), identifier="image")
    request: Any = SimpleNamespace(
        prompt_token_ids=PROMPT,
        all_token_ids=PROMPT,
        prompt_embeds=None,
        lora_request=lora,
        cache_salt="salt",
        mm_features=[image],
    )
    assert [digest for _, digest in prompt_digests(request, [2, 4])] == [
        "d8a08c4a8b6935b50678b17823d4c13d",
        "4077e69d15870212ec68b8bb8fc5964b",
    ]
    assert [digest for _, digest in prefix_digests(request, [4], media_are_numbered=False)] == [
        "6f03ea55210518e62c92a8177c1ff7bf"
    ]


def test_the_fingerprint_of_weights_is_that_of_version_0_1(tmp_path: Path) -> None:
    """Another way to make it would have all engines of two versions refuse each other."""
    header = msgspec.json.encode(
        {
            "a": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [1024], "data_offsets": [8, 4104]},
        }
    )
    data = bytes(number % 251 for number in range(4104))
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert fingerprint_of(tmp_path) == "2 tensors cc6934ce2f2a14e455b5ed17dfb918f6"
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert fingerprint_of(tmp_path) == "1 files 433b8b9f5e13fe27186e4d721364036e"


def test_checksums_of_blocks_are_those_of_version_0_1() -> None:
    """Other sums would have all requests with `verify` end as `Corrupt`; of other blocks, nothing would be compared."""
    memory = torch.arange(4096, dtype=torch.int64).view(torch.uint8)[: 1 << 12].contiguous()
    blocks = np.array([0, 3, 7], np.int64)
    found = BlockSums([memory]).of(
        [
            Stretch(address=memory.data_ptr() + first, stride_bytes=256, length_bytes=length, count=8, blocks=blocks)
            for first, length in ((0, 256), (3, 7))
        ]
    )
    assert found.tolist() == [
        3080590358428569208,
        -4164734454641663112,
        -7676252847498789000,
        6038094601263162091,
        -4600634036178928885,
        -6487776170295349109,
    ]
    assert spread(np.arange(100)).tolist() == [0, 14, 28, 42, 56, 70, 84, 99]


def _missing() -> dict[str, bytes]:
    said = {name: message.encode(message.meant) for name, message in MESSAGES.items()} | TEXTS
    for name, expires in (("parameters of P", None), ("parameters of D", 12.5)):
        said[name] = msgspec.json.encode(build_remote_prefill(REMOTE, expires_seconds=expires, keys=KEYS))
    there = lines() if LINES.exists() else {}
    return {name: frame for name, frame in said.items() if name not in there}


if __name__ == "__main__":
    for name, frame in _missing().items():
        print(f"{name}: {frame.hex()}")  # noqa: T201
