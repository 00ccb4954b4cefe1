"""Signatures of `kv_transfer_params`: an engine that lends signs where the KV is, and one that reads accepts nothing
else.

The parameters travel through routers and clients, and an engine that reads does what they say: it connects to an
address, asks for a lease, and reads blocks by their numbers. A signature binds all of it (`RemotePrefill`), and in
which direction it is meant, to a secret that only engines know. So no other process can make parameters, nor put parts
of two together. Genuine ones can be sent twice; that is what leases are for: a lease ends when it has been read, its
name is never used again, and the name is signed.

    signature   <key id>:<HMAC-SHA256 of the parameters, 64 hexadecimal digits>

What is signed is the parameters as they were understood, and not their text, which a router may write anew. Fields that
have their default are left out, so that a later version may add some. vLLM's proxy for conversations puts the host of
an engine's HTTP in the place of that of its side channel. So the host is there twice, and an engine that checks a
signature connects to the one that was signed (`signed_host`).

Several keys are known at a time: the first one signs, all are accepted, and a key can be replaced while engines run.
Engines of one fleet share the secrets, so a signature says that an engine of the fleet made it, and not which one.
"""

from __future__ import annotations

import functools
import hmac
import re

import msgspec

SECRET_BYTES_MIN = 32
SECRET_BYTES_MAX = 1024
KEYS_MAX = 64
KEY_ID_PATTERN = r"[A-Za-z0-9_.-]{1,64}"

_DOMAIN = b"nixl-actor kv_transfer_params 1\n"
_LENDS = b"prefill lends to decode\n"
_LENDS_BACK = b"decode lends back to prefill\n"

_KEY_LINE = re.compile(rf"({KEY_ID_PATTERN})[ \t]+((?:[0-9a-fA-F]{{2}})+)")
_SIGNATURE = re.compile(rf"({KEY_ID_PATTERN}):([0-9a-f]{{64}})")

_encoder = msgspec.msgpack.Encoder()


class KeysError(ValueError):
    """A file of keys makes no sense. The text names the line, and never shows a secret."""


class ParamsKey(msgspec.Struct, frozen=True):
    """`secret` is not in the representation, which may end in a log."""

    key_id: str
    secret: bytes

    def __repr__(self) -> str:
        return f"ParamsKey({self.key_id!r})"


class ParamsKeys(msgspec.Struct, frozen=True):
    """The first key signs, all are accepted. At least one; no id twice."""

    keys: tuple[ParamsKey, ...]

    def sign(self, params: msgspec.Struct, *, lends_back: bool) -> str:
        """The signature of parameters that carry none."""
        key = self.keys[0]
        return f"{key.key_id}:{_digest(key, params, lends_back).hex()}"

    def find_fault(self, signature_untrusted: str, params: msgspec.Struct, *, lends_back: bool) -> str | None:
        """What is wrong with a signature of `params`, which are given without it; None: it is genuine."""
        parts = _SIGNATURE.fullmatch(signature_untrusted)
        if parts is None:
            return "its signature is none"
        key_id, claimed = parts.groups()
        key = next((each for each in self.keys if each.key_id == key_id), None)
        if key is None:
            return f"it is signed with key {key_id}, which is not known here"
        if not hmac.compare_digest(_digest(key, params, lends_back), bytes.fromhex(claimed)):
            return f"its signature with key {key_id} is not that of these values"
        return None


def _digest(key: ParamsKey, params: msgspec.Struct, lends_back: bool) -> bytes:
    direction = _LENDS_BACK if lends_back else _LENDS
    # Not the struct itself: how msgspec writes the size of one depends on how many fields the type has, and a version
    # that has one more would sign the same values differently.
    said = {name: value for name, default in _defaults(type(params)) if (value := getattr(params, name)) != default}
    return hmac.digest(key.secret, _DOMAIN + direction + _encoder.encode(said), "sha256")


@functools.cache
def _defaults(params: type[msgspec.Struct]) -> list[tuple[str, object]]:
    return [(field.name, field.default) for field in msgspec.structs.fields(params)]


def parse_keys(text: str) -> ParamsKeys:
    """Read a file of keys: in each line an id, blanks, and the secret in hexadecimal digits. Raises KeysError.

    Empty lines and those that begin with # are ignored.
    """
    keys: dict[str, ParamsKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        parts = _KEY_LINE.fullmatch(line)
        if parts is None:
            raise KeysError(f"line {number} is not a key id, a blank and a secret in hexadecimal digits")
        key = ParamsKey(parts[1], bytes.fromhex(parts[2]))
        if not SECRET_BYTES_MIN <= len(key.secret) <= SECRET_BYTES_MAX:
            raise KeysError(f"the secret in line {number} has {len(key.secret)} bytes instead of {SECRET_BYTES_MIN}")
        if key.key_id in keys:
            raise KeysError(f"key {key.key_id} is there twice")
        keys[key.key_id] = key
    if not 0 < len(keys) <= KEYS_MAX:
        raise KeysError(f"it has {len(keys)} keys; 1 to {KEYS_MAX} are possible")
    return ParamsKeys(tuple(keys.values()))


def format_keys(keys: ParamsKeys) -> str:
    """The text of a file of keys."""
    head = "# Keys for kv_transfer_params: the first one signs, all are accepted. Keep secret.\n"
    return head + "".join(f"{key.key_id} {key.secret.hex()}\n" for key in keys.keys)
