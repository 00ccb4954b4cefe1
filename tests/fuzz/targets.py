"""Entry points for bytes from outside: what each is given, what it may raise, and valid messages to begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from connector.wire import administration, control, handshake, inspection, metadata, notifications, params
from connector.wire.bounded import DecodeFailed
from connector.wire.handshake import ActorExtension, HandshakeError
from connector.wire.identity import KvIdentity, LayerIdentity
from connector.wire.inspection import Inspect
from connector.wire.params import ParamsError
from connector.wire.signatures import ParamsKey, ParamsKeys
from statemachine import lending
from statemachine.lease import LeaseName
from statemachine.lending import Lending, LendingLimits

ERROR_LENGTH_MAX = 1500
"""Characters of what is said of a damaged message; it goes into logs."""


class Target(NamedTuple):
    """`decode` takes any bytes; it returns, or raises one of `errors`."""

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]


def check(target: Target, data: bytes) -> bool:
    """Whether it was understood. Raises what the target may not raise, and AssertionError for an unfit error."""
    try:
        target.decode(data)
    except target.errors as error:
        said = str(error)
        assert len(said) <= ERROR_LENGTH_MAX, f"an error of {len(said)} characters"
        assert said.isprintable(), "an error that is not fit for a log"
        return False
    return True


# --- handshake --------------------------------------------------------------------------------------------------------

_CLOCK = msgspec.msgpack.encode(1.5)

METADATA = metadata.AgentMetadata(
    engine_id="prefill",
    agent_metadata=b"nixl",
    kv_caches_base_addr=[4096, 1 << 20],
    device_id=0,
    num_blocks=8,
    block_lens=[1024, 2048],
    block_strides=[1024, 4096],
    kv_cache_layout="HND",
    block_size=16,
    ssm_sizes=(0, 0),
    attn_backend_name="TORCH_SDPA",
    physical_blocks_per_logical_kv_block=1,
    region_num_blocks=[8, 8],
    region_group_ids=[0, -1],
    region_names=["a", "b"],
    region_mem_types=["DRAM", "VRAM"],
    region_members=[["layer.0"], ["layer.1", "layer.2"]],
    packed_member_layouts={"layer.1": (0, 512)},
)
_EXTENSION = ActorExtension(
    life="0" * 32,
    tp_size=2,
    dcp_size=1,
    pp_size=1,
    tp_rank=1,
    pp_rank=0,
    control_host="127.0.0.1",
    control_port=1,
    verify="off",
    identity=KvIdentity(
        factors={"model": "m"},
        layers={"layer.0": LayerIdentity(group=0, dtype="bfloat16", content_bytes=(4, 4))},
        group_tokens=(16,),
    ),
)
_PAYLOAD = handshake.encode_payload("hash", metadata.encode_agent_metadata(METADATA), _EXTENSION)


def _decode_reply(data: bytes, *, expected_hash: str | None) -> object:
    return handshake.decode_reply(
        (data, _CLOCK),
        peer="prefill",
        address="10.0.0.1:5600",
        expected_hash=expected_hash,
        identity=_EXTENSION.identity,
    )


def _reply(data: bytes) -> object:
    return _decode_reply(data, expected_hash="hash")


def _reply_of_any_hash(data: bytes) -> object:
    return _decode_reply(data, expected_hash=None)


# --- control socket ---------------------------------------------------------------------------------------------------

_LEASES = (LeaseName("cmpl-1", 7), LeaseName("cmpl-2", 0), LeaseName("HB:x", 2**63 - 1))
_HOLD = control.Hold(engine_id="decode", rank=1, ranks=2, sent_ns=5, leases=_LEASES)
_RELEASE = control.Release(engine_id="decode", rank=1, ranks=2, leases=_LEASES)
_INSPECT = Inspect(number=1, what="requests", match="cmpl", first=3, rows=10)
_ASK_SUMS = control.AskSums(lease=_LEASES[0], part=1)
_LEAVE = administration.Leave(grace_ns=30_000_000_000, secret=bytes(range(16)))
MEET = administration.Meet(places=("127.0.0.1:1", "[::1]:1"))
_ROW = inspection.LocalPrefillRow(request_id="cmpl-1", reason="absent", tokens=5, age_seconds=1.5)
_LIMITS = LendingLimits(lease_ns=30_000_000_000, total_ns=900_000_000_000)


def _same_again(message: Any, encode: Callable[[Any], Sequence[bytes]], decode: Callable[[Any], Any]) -> object:
    """What was understood can be said, and is understood as the same."""
    assert decode(encode(message)) == message, "what was decoded is not what is encoded"
    return message


def _request(data: bytes) -> object:
    return _same_again(control.decode_request((data,)), control.encode_request, control.decode_request)


def _answer(data: bytes) -> object:
    return _same_again(control.decode_answer((data,)), control.encode_answer, control.decode_answer)


def _sums(data: bytes) -> object:
    """All parts, joined; what was understood is cut into parts again, and these join to the same."""
    sums = control.decode_sums(data)
    encoded = control.encode_sums(sums)
    parts = [
        control.sums_answer(control.AskSums(lease=_LEASES[0], part=part), encoded)
        for part in range(control.parts_of_sums(encoded))
    ]
    assert control.decode_sums(b"".join(part.content for part in parts if part is not None)) == sums
    return sums


def _lend(data: bytes) -> object:
    """A message about leases, what the core makes of it, and the answer to it."""
    message = control.decode_request((data,))
    if not isinstance(message, control.Hold | control.Release):
        return message
    core = Lending(_LIMITS)
    for lease in _LEASES[:2]:
        core.handle(lending.Granted(lease=lease, blocks=1), 0)
    fields = {"reply_to": b"", "engine_id": message.engine_id, "rank": message.rank, "ranks": message.ranks}
    if isinstance(message, control.Hold):
        asked = lending.HoldAsked(**fields, sent_ns=message.sent_ns, leases=message.leases)
        (answer,) = core.handle(asked, 1)
        assert isinstance(answer, lending.AnswerHold)
        held = tuple(control.HeldLease(*lease, remaining_ns) for lease, remaining_ns in answer.held)
        gone = tuple(control.gone_lease(lease, why) for lease, why in answer.gone)
        assert len(held) + len(gone) == len(message.leases)
        return _answer(control.encode_answer(control.HoldAnswer(sent_ns=answer.sent_ns, held=held, gone=gone))[0])
    *_, released = core.handle(lending.ReleaseAsked(**fields, leases=message.leases), 1)
    assert isinstance(released, lending.AnswerRelease)
    return _answer(control.encode_answer(control.Released(leases=released.leases))[0])


def _inspected() -> bytes:
    builder = inspection.AnswerBuilder(10)
    builder.add(_ROW)
    return builder.frames(_INSPECT, wall=1.5, total=9, first=3, next_row=None)[0]


# --- administration ---------------------------------------------------------------------------------------------------

_REPORT = administration.DrainReport(state="draining", seconds=1.5, seconds_left=28.5, lent=2, not_lent=1, answering=0)
_MET = administration.MeetReport(
    rows=(administration.PlaceRow(place="127.0.0.1:1", state="met", engine_id="prefill", problem=""),)
)
_OF_A_WORKER: tuple[control.ControlRequest, ...] = (_HOLD, _RELEASE, _INSPECT, _ASK_SUMS, _LEAVE, MEET)
"""One message of each type."""


def _leave_taken(data: bytes) -> object:
    decode = administration.decode_leave_taken
    return _same_again(decode((data,)), control.encode_answer, decode)


def _meet_report(data: bytes) -> object:
    decode = administration.decode_meet_report
    return _same_again(decode((data,)), control.encode_answer, decode)


# --- kv_transfer_params -----------------------------------------------------------------------------------------------

_PARAMS = params.build_remote_prefill(
    params.RemotePrefill(
        engine_id="prefill",
        request_id="cmpl-1",
        host="10.0.0.1",
        port=5600,
        block_ids=((1, 2, 3), (4,)),
        tp_size=2,
        num_tokens=50,
        lease_number=7,
    )
)
_LENT_BACK = params.build_remote_prefill(
    params.RemotePrefill(
        engine_id="decode",
        request_id="cmpl-2",
        host="d.local",
        port=5600,
        block_ids=((1,),),
        tp_size=1,
        num_tokens=16,
        lease_number=1,
        prefix_digests=((16, "abc"),),
        first_tokens=(0,),
    ),
    expires_seconds=1.5,
)


def _params(data: bytes) -> object:
    """As vLLM has them: any value that JSON has."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    kind = params.classify(raw)
    if kind == params.ParamsKind.REMOTE_DECODE:
        params.names_source(raw)
    return params.parse_remote_prefill(raw)


_KEYS = ParamsKeys((ParamsKey("new", b"x" * 32), ParamsKey("old", b"y" * 32)))


_SIGNED = params.build_remote_prefill(
    params.RemotePrefill(
        engine_id="prefill",
        request_id="cmpl-1",
        host="10.0.0.1",
        port=5600,
        block_ids=((1, 2, 3),),
        tp_size=1,
        num_tokens=48,
        lease_number=7,
    ),
    keys=_KEYS,
)


def _genuine(data: bytes) -> object:
    remote = _params(data)
    if isinstance(remote, params.RemotePrefill):
        params.require_genuine(remote, _KEYS, lends_back=False)
    return remote


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "handshake-request",
            lambda data: handshake.parse_request((data,)),
            (DecodeFailed,),
            (handshake.encode_request(0, 1), msgspec.msgpack.encode((handshake.GET_METADATA, 3))),
        ),
        Target(
            "handshake-reply",
            _reply,
            (HandshakeError,),
            (_PAYLOAD, handshake.encode_error("no such rank"), msgspec.msgpack.encode({"error": "x"})),
        ),
        Target("handshake-reply-of-any-hash", _reply_of_any_hash, (HandshakeError,), (_PAYLOAD,)),
        Target(
            "handshake-advertisement",
            lambda data: handshake.decode_advertisement((data, _CLOCK)),
            (DecodeFailed,),
            (_PAYLOAD, handshake.encode_error("no such rank")),
        ),
        Target(
            "metadata",
            metadata.decode_agent_metadata,
            (DecodeFailed,),
            (metadata.encode_agent_metadata(METADATA),),
        ),
        Target(
            "control-request",
            _request,
            (DecodeFailed,),
            tuple(control.encode_request(each)[0] for each in _OF_A_WORKER),
        ),
        Target(
            "control-answer",
            _answer,
            (DecodeFailed,),
            tuple(
                control.encode_answer(each)[0]
                for each in (
                    control.HoldAnswer(
                        sent_ns=5, held=(control.HeldLease("a", 1, 9),), gone=(control.GoneLease("b", 0, "expired"),)
                    ),
                    control.Released(leases=_LEASES),
                    control.Sums(lease=_LEASES[0], part=0, parts=2, content=b"part"),
                    control.Leaving(grace_ns=30_000_000_000),
                )
            ),
        ),
        Target(
            "lending",
            _lend,
            (DecodeFailed,),
            tuple(control.encode_request(each)[0] for each in _OF_A_WORKER),
        ),
        Target(
            "sums",
            _sums,
            (DecodeFailed,),
            (control.encode_sums(control.LeaseSums(blocks=(b"\1\0\0\0\2\0\0\0", b"\3\0\0\0"), sums=bytes(range(24)))),),
        ),
        Target("drain-request", lambda data: administration.is_drain((data,)), (), (administration.encode_drain(),)),
        Target(
            "drain-report",
            lambda data: administration.decode_report((data, _CLOCK)),
            (DecodeFailed,),
            (administration.encode_report(_REPORT), handshake.encode_error("it does not drain"), b"\x80"),
        ),
        Target(
            "leave-taken",
            _leave_taken,
            (DecodeFailed,),
            control.encode_answer(administration.LeaveTaken(leases=3)),
        ),
        Target("meet-report", _meet_report, (DecodeFailed,), control.encode_answer(_MET)),
        Target(
            "inspected",
            lambda data: inspection.decode_inspected((data,)),
            (DecodeFailed,),
            (_inspected(),),
        ),
        Target(
            "notification",
            notifications.parse_notification,
            (),
            (
                notifications.encode_release("cmpl-1", 2),
                *notifications.encode_heartbeats(["cmpl-1", "cmpl-2"]),
                b"HB:x:2",
            ),
        ),
        Target(
            "params",
            _params,
            (ParamsError,),
            (msgspec.json.encode(_PARAMS), msgspec.json.encode(_LENT_BACK)),
        ),
        Target("params-signed", _genuine, (ParamsError,), (msgspec.json.encode(_SIGNED), msgspec.json.encode(_PARAMS))),
    )
}
