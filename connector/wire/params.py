"""`kv_transfer_params`: how a router tells D where P keeps a request's KV.

P puts the dict that `build_remote_prefill` makes into its response, the router forwards it, D reads it back with
`parse_remote_prefill`. Between the two lies a program that we do not know, so the dict is untrusted: every field has a
type and a bound, and the first one that is wrong is named, together with what was expected and a short rendering of
what was found. Keys that are not listed here are ignored, because routers add their own. Some routers hand the dict on
in protobuf's Struct, which has one kind of number: what P said in integers comes as floats, and is taken for integers
where it is whole. Dynamo's sidecar for vLLM sends `remote_port`, and no other, as a text, for the built-in connector's
sake, which would put the float into an address.

The keys and their meaning are those of the built-in connector. Seven are ours, and ignored by a built-in engine, which
does not send them: `lease_number`, `prefix_digests`, `first_tokens`, `adapter_weights`, `media_names`
(`RemotePrefill`), `signature` and, beside it, `signed_host` (`connector.wire.signatures`).

Parsing runs on the engine's scheduler thread. The whole dict is converted in one call of msgspec; only when that fails
are such numbers looked for, and then the fields one by one to find the culprit, so the common case stays cheap.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from connector.wire.bounded import (
    HOST_LENGTH_MAX,
    HOST_PATTERN,
    ID_LENGTH_MAX,
    NUMBER_MAX,
    PORT_MAX,
    RANKS_MAX,
    Identifier,
    render_untrusted,
)
from connector.wire.signatures import ParamsKeys
from statemachine.failures import BadParams, ParamsFailure, ParamsForged

PREFIX_DIGESTS_MAX = 8
SIGNATURE_LENGTH_MAX = 256
_PORT_TEXT = re.compile("[1-9][0-9]{0,4}")
_NOT_CONVERTED = (msgspec.ValidationError, RecursionError, UnicodeEncodeError)
"""What msgspec raises for what does not fit; the last one for a text that is no UTF-8, where none is expected: JSON can
put half a surrogate pair into any text."""
_ENCODABLE_PATTERN = r"\A[^\ud800-\udfff]*\Z"
"""A text that is UTF-8, as what is signed has to be."""
_NESTING_MAX = 2
"""Lists of lists: no field has more."""
_SOURCE_KEYS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""All of which parameters have that name an engine to read from."""

# Upper bounds on what a router may hand us, far above what vLLM produces.
BLOCKS_MAX = 1 << 20
"""A request has at most so many blocks, in all cache groups together."""
GROUPS_MAX = 64
BLOCK_ID_MAX = 2**31 - 1
TOKENS_MAX = 2**31 - 1


class RemotePrefill(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the KV of one prefilled request lies. Checked for form only: P may still not know the request.

    Everything that the reader acts on is here, because these fields are what is signed: their names, their order and
    their defaults are part of the wire.
    """

    engine_id: str
    request_id: str
    """The request's name on P, which differs from its name on D."""
    host: str
    port: int
    """Side channel of P's scheduler process."""
    block_ids: tuple[tuple[int, ...], ...]
    """Logical block ids on P, one tuple per cache group."""
    tp_size: int
    dcp_size: int = 1
    pp_size: int = 1
    num_tokens: int | None = None
    """Tokens whose KV the blocks hold."""
    lease_number: int | None = None
    """Tells apart leases of requests with the same id on P; None when P is a built-in one."""
    prefix_digests: tuple[tuple[int, str], ...] = ()
    """Numbers of tokens that the blocks hold, and a digest of so many (`connector.scheduler.prefix_digest`). None: of
    a built-in engine, or of a prompt that is given as embeddings."""
    first_tokens: tuple[int, ...] = ()
    """Per cache group, the token that its first block begins with (0: of a state). None: each begins with the first, or
    P is a built-in one."""
    adapter_weights: str | None = None
    """Fingerprint of the weights of the request's adapter (`connector.scheduler.adapters`). None: it has none, they are
    not known, or P is a built-in one."""
    media_names: str | None = None
    """How P names images and other media, and a digest of the names of those among `num_tokens`
    (`connector.scheduler.media_names`). None: not known, the model has none, or P is a built-in one."""
    signature: str | None = None
    """The signature covers all other fields; see `require_genuine`."""
    signed_host: str | None = None
    """What `host` was when it was signed: some routers put the host of P's HTTP there."""
    registration: int = 0
    """How often P, a built-in one, had registered its KV cache when it lent these blocks: it does so again when it has
    slept, and who is connected has to connect anew. 0: it does not say, or P is one of ours, of which D hears it."""

    @property
    def source(self) -> str:
        """Whose blocks these are, for people."""
        return f"{self.request_id} on prefill engine {self.engine_id} ({self.host}, port {self.port})"


class ParamsKind(enum.Flag):
    """What a request asks of the connector. With both, this engine is a link of a chain: it reads from one engine, and
    another one reads from it."""

    NONE = 0
    REMOTE_PREFILL = enum.auto()
    """We are D: read the KV from P."""
    REMOTE_DECODE = enum.auto()
    """We are P: keep the KV for D. Alone, the parameters may name a D to read the beginning of the prompt back from."""


class ParamsError(ValueError):
    """`kv_transfer_params` is malformed or not genuine; `failure` says what is wrong with it."""

    def __init__(self, failure: ParamsFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def classify(raw_untrusted: object) -> ParamsKind:
    """Which sides of transfers a request is on, from the two flags alone. Raises ParamsError: one is not a boolean."""
    if raw_untrusted is None:
        return ParamsKind.NONE
    raw = _require_dict(raw_untrusted)
    kind = ParamsKind.REMOTE_PREFILL if _flag(raw, "do_remote_prefill") else ParamsKind.NONE
    return kind | ParamsKind.REMOTE_DECODE if _flag(raw, "do_remote_decode") else kind


def names_source(raw_untrusted: object) -> bool:
    """Whether parameters of kind REMOTE_DECODE name blocks of another engine. Raises ParamsError: not an object."""
    raw = _require_dict(raw_untrusted)
    return all(key in raw for key in _SOURCE_KEYS) and bool(raw["remote_block_ids"])


def parse_remote_prefill(raw_untrusted: object) -> RemotePrefill:
    """Check `kv_transfer_params` of a request whose KV is to be read from P, or read back from D.

    Raises ParamsError naming the first field that is missing, of the wrong type or out of bounds. Does not look at
    the two `do_remote_*` flags: that is `classify`.
    """
    raw = _require_dict(raw_untrusted)
    known = {field.key: raw[field.key] for field in _FIELDS if field.key in raw}
    try:
        wire = msgspec.convert(known, _Wire)
    except _NOT_CONVERTED:
        known = {key: _with_integers(value) for key, value in known.items()}
        port = known.get("remote_port")
        if isinstance(port, str) and _PORT_TEXT.fullmatch(port):
            known["remote_port"] = int(port)
        try:
            wire = msgspec.convert(known, _Wire)
        except _NOT_CONVERTED:
            raise _first_error(known) from None
    block_ids: tuple[tuple[int, ...], ...] = wire.remote_block_ids
    block_count = sum(map(len, block_ids))
    if block_count > BLOCKS_MAX:
        raise _error("remote_block_ids", f"at most {BLOCKS_MAX} blocks", block_count)
    return RemotePrefill(
        engine_id=wire.remote_engine_id,
        request_id=wire.remote_request_id,
        host=wire.remote_host,
        port=wire.remote_port,
        block_ids=block_ids,
        tp_size=wire.tp_size,
        dcp_size=wire.dcp_size,
        pp_size=wire.pp_size,
        num_tokens=wire.remote_num_tokens,
        lease_number=wire.lease_number,
        prefix_digests=wire.prefix_digests,
        first_tokens=wire.first_tokens,
        adapter_weights=wire.adapter_weights,
        media_names=wire.media_names,
        signature=wire.signature,
        signed_host=wire.signed_host,
        registration=wire.remote_registration_generation if wire.lease_number is None else 0,
    )


def require_genuine(
    remote: RemotePrefill, keys: ParamsKeys, *, lends_back: bool, allows_unsigned: bool = False
) -> RemotePrefill:
    """Raise ParamsError (ParamsForged) unless an engine with one of these keys has given these parameters out.

    Returns them with the host that was signed, whatever stands in its place now.

    `lends_back`: in which direction they are used; those of D, for P, are no parameters of P, for D.
    """
    if remote.signature is None:
        if allows_unsigned:
            return remote
        fault: str | None = "it is not signed"
    else:
        host = remote.signed_host or remote.host
        unsigned = msgspec.structs.replace(remote, host=host, signature=None, signed_host=None)
        fault = keys.find_fault(remote.signature, unsigned, lends_back=lends_back)
        remote = msgspec.structs.replace(unsigned, signature=remote.signature)
    if fault is not None:
        raise ParamsError(ParamsForged(why=fault, source=remote.source))
    return remote


def build_remote_prefill(
    remote: RemotePrefill,
    *,
    registration: int = 0,
    expires_seconds: float | None = None,
    keys: ParamsKeys | None = None,
) -> dict[str, Any]:
    """What an engine returns for a request whose blocks it lends: JSON-serialisable, understood by a built-in peer too.

    `remote`: where they lie; it carries no signature yet.

    `registration`: how often this engine has registered its KV cache anew, for built-in peers, which hear of it here
    alone (from vLLM 0.33 on).

    `expires_seconds` None: P lends to D, which reads the whole prompt. Otherwise D lends to P, for the next prompt of
    the conversation; it is the end of the lease by the clock that the listener tells (`time.perf_counter`), in seconds.
    Only a built-in P takes it from there; ours asks. For a D it has to be None: a built-in one takes it for the end of
    a lease that nobody renews.

    `keys`: to sign with; None: not signed.
    """
    lends_back = expires_seconds is not None
    made = {
        "do_remote_prefill": not lends_back,
        "do_remote_decode": lends_back,
        "remote_block_ids": [list(group) for group in remote.block_ids],
        "remote_engine_id": remote.engine_id,
        "remote_request_id": remote.request_id,
        "remote_host": remote.host,
        "remote_port": remote.port,
        "tp_size": remote.tp_size,
        "dcp_size": remote.dcp_size,
        "pp_size": remote.pp_size,
        "remote_num_tokens": remote.num_tokens,
        "remote_blocks_expiry_time": expires_seconds,
        "transfer_mode": "pull",
        "lease_number": remote.lease_number,
        "prefix_digests": [list(each) for each in remote.prefix_digests],
    }
    if remote.first_tokens:
        made["first_tokens"] = list(remote.first_tokens)
    if remote.adapter_weights is not None:
        made["adapter_weights"] = remote.adapter_weights
    if remote.media_names is not None:
        made["media_names"] = remote.media_names
    if registration:
        made["remote_registration_generation"] = registration
    if keys is not None:
        made["signature"] = keys.sign(remote, lends_back=lends_back)
        made["signed_host"] = remote.host
    return made


class _WireField(msgspec.Struct, frozen=True):
    """One key of the dict: its type with bounds, the words for it, and the default when it may be absent."""

    key: str
    type: Any
    expected: str
    default: Any = ...
    """Ellipsis: the key is required."""


_Host: TypeAlias = Annotated[str, Meta(max_length=HOST_LENGTH_MAX, pattern=HOST_PATTERN)]
_BlockId: TypeAlias = Annotated[int, Meta(ge=0, le=BLOCK_ID_MAX)]
_Group: TypeAlias = Annotated[tuple[_BlockId, ...], Meta(max_length=BLOCKS_MAX)]
_Size: TypeAlias = Annotated[int, Meta(ge=1, le=RANKS_MAX)]
_Length: TypeAlias = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
_Digest: TypeAlias = Annotated[str, Meta(max_length=64, pattern=_ENCODABLE_PATTERN)]
_Token: TypeAlias = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]

_IDENTIFIER_WORDS = f"1 to {ID_LENGTH_MAX} characters without control characters"
_HOST_WORDS = f"a host name or address of at most {HOST_LENGTH_MAX} characters"
_SIZE_WORDS = f"an integer from 1 to {RANKS_MAX}"

_FIELDS = (
    _WireField("remote_engine_id", Identifier, _IDENTIFIER_WORDS),
    _WireField("remote_request_id", Identifier, _IDENTIFIER_WORDS),
    _WireField("remote_host", _Host, _HOST_WORDS),
    _WireField("remote_port", Annotated[int, Meta(ge=1, le=PORT_MAX)], f"an integer from 1 to {PORT_MAX}"),
    _WireField(
        "remote_block_ids",
        Annotated[tuple[_Group, ...], Meta(max_length=GROUPS_MAX)],
        f"at most {GROUPS_MAX} lists of block ids, each at most {BLOCK_ID_MAX}",
    ),
    _WireField("tp_size", _Size, _SIZE_WORDS),
    _WireField("dcp_size", _Size, _SIZE_WORDS, 1),
    _WireField("pp_size", _Size, _SIZE_WORDS, 1),
    _WireField("remote_num_tokens", _Token | None, f"an integer from 0 to {TOKENS_MAX}, or null", None),
    _WireField("remote_blocks_expiry_time", _Seconds | None, "a finite number of seconds, or null", None),
    _WireField(
        "remote_registration_generation",
        Annotated[int, Meta(ge=0, le=NUMBER_MAX)],
        f"an integer from 0 to {NUMBER_MAX}",
        0,
    ),
    _WireField("transfer_mode", Literal["pull"], '"pull" (push transfers are not supported)', "pull"),
    _WireField(
        "lease_number",
        Annotated[int, Meta(ge=1, le=NUMBER_MAX)] | None,  # 0 is no number here: it stands for their silence
        f"an integer from 1 to {NUMBER_MAX}, or null",
        None,
    ),
    _WireField(
        "prefix_digests",
        Annotated[tuple[tuple[_Length, _Digest], ...], Meta(max_length=PREFIX_DIGESTS_MAX)],
        f"at most {PREFIX_DIGESTS_MAX} pairs of a number of tokens and a digest",
        (),
    ),
    _WireField(
        "first_tokens",
        Annotated[tuple[_Token, ...], Meta(max_length=GROUPS_MAX)],
        f"at most {GROUPS_MAX} numbers of a token, each at most {TOKENS_MAX}",
        (),
    ),
    _WireField("adapter_weights", _Digest | None, "a text of at most 64 characters, or null", None),
    _WireField("media_names", _Digest | None, "a text of at most 64 characters, or null", None),
    _WireField(
        "signature",
        Annotated[str, Meta(max_length=SIGNATURE_LENGTH_MAX, pattern=_ENCODABLE_PATTERN)] | None,
        f"a text of at most {SIGNATURE_LENGTH_MAX} characters, or null",
        None,
    ),
    _WireField("signed_host", _Host | None, f"{_HOST_WORDS}, or null", None),
)
_Wire: Any = msgspec.defstruct(
    "KvTransferParams",
    [(each.key, each.type) if each.default is ... else (each.key, each.type, each.default) for each in _FIELDS],
    frozen=True,
    kw_only=True,
)


def _with_integers(value: Any, depth: int = _NESTING_MAX) -> Any:
    """The value with integers in place of floats that are whole, as far in as our fields go."""
    if type(value) is float:
        return int(value) if _is_whole(value) else value
    if not depth or not isinstance(value, (list, tuple)):
        return value
    if len(value) > GROUPS_MAX:
        return _all_integers(value)
    return [_with_integers(each, depth - 1) for each in value]


def _is_whole(number: float) -> bool:
    """From 2**53 on a float may stand for another integer than was said."""
    return number.is_integer() and abs(number) < 2**53


def _all_integers(values: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    """The same of a long list, which in our fields has numbers alone; any other is left as it is. Nothing is done in
    Python for each element: there may be a million, and the engine waits."""
    kinds = set(map(type, values))
    if len(values) > BLOCKS_MAX or float not in kinds or not kinds <= {int, float}:
        return values
    try:
        are_whole = all(map(float.is_integer, map(float, values))) and max(map(abs, values)) < 2**53
    except OverflowError:  # an integer that no float can stand for
        return values
    return list(map(int, values)) if are_whole else values


def _first_error(known: dict[str, Any]) -> ParamsError:
    """The error of the first field that does not convert; called only when some field does not."""
    for field in _FIELDS:
        if field.key not in known:
            if field.default is ...:
                return ParamsError(BadParams(field=field.key, expected=field.expected, found="nothing"))
            continue
        try:
            msgspec.convert(known[field.key], field.type)
        except _NOT_CONVERTED:
            if field.key == "remote_block_ids":
                return _block_ids_error(known[field.key], field.expected)
            return _error(field.key, field.expected, known[field.key])
    # Only the depth of the whole can be too much when no part of it is.
    return _error("(the whole)", "less deeply nested values", known)


def _block_ids_error(block_ids: object, expected: str) -> ParamsError:
    """Point at the group or the block that is wrong: a rendering of the whole list helps nobody."""
    if not isinstance(block_ids, (list, tuple)) or len(block_ids) > GROUPS_MAX:
        return _error("remote_block_ids", expected, block_ids)
    for group_index, group in enumerate(block_ids):
        where = f"remote_block_ids[{group_index}]"
        if not isinstance(group, (list, tuple)) or len(group) > BLOCKS_MAX:
            return _error(where, f"a list of at most {BLOCKS_MAX} integers", group)
        for index, block in enumerate(group):
            is_integer = type(block) is int or (type(block) is float and _is_whole(block))
            if not is_integer or not 0 <= block <= BLOCK_ID_MAX:
                return _error(f"{where}[{index}]", f"an integer from 0 to {BLOCK_ID_MAX}", block)
    return _error("remote_block_ids", expected, block_ids)


def _require_dict(raw_untrusted: object) -> dict[str, Any]:
    if not isinstance(raw_untrusted, dict):
        raise _error("(the whole)", "an object", raw_untrusted)
    return raw_untrusted


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise _error(key, "a boolean", value)
    return bool(value)


def _error(field: str, expected: str, found: object) -> ParamsError:
    return ParamsError(BadParams(field=field, expected=expected, found=render_untrusted(found)))
