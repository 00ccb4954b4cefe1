"""What the bytes of a rank's KV cache mean: what two engines must have in common beyond sizes and layouts.

The compatibility hash is the built-in connector's, so that both kinds of engines understand each other. It knows the
model by its name, and says neither which weights stand behind that name nor which factor differs. Two engines of ours
tell each other more: `KvIdentity`, a field of the handshake extension, which takes the place of the hash:

* `factors` are those of the hash, one by one, and those that it lacks: weights, configuration of the model,
  quantization, draft model. Only what both sides state is compared, so that a later version may state more. The name
  and the revision of the model do not matter where both sides state the same weights: another path to the same files is
  the same model. The option enforce_handshake_compat=false skips the factors, as it skips the hash.
* `layers` say which group's block table each layer has, and what the bytes of its blocks are: numbers of which type, of
  which kind of FP8, multiplied by which scales, in which order where the shape of the tensor does not say it, and how
  many there are of a head, a latent or a state. Bytes that are read in another order, or scaled by another number, are
  other numbers, so nothing skips this part. Only the order of a peer that has that of the shape does not matter to an
  engine that puts what it reads from such a one in its own (`layout.landing`). Layers that only one side has are the
  layout's affair, and so are the numbers of heads and the sizes of blocks, which may differ. The lengths of blocks in
  the metadata do not say how many bytes there are: pages are padded to the length of other layers' pages, and a row has
  pages of several layers.

Values are told as vLLM has them, and two names of the same are taken for one where they are compared, and nowhere else:
so a version that learns of another pair of names refuses no engine of the version before, which cannot know of it.

A value that differs is an `Incompatible` that names the field and both values (`wire.handshake`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from connector.wire.bounded import IDENTIFIER_PATTERN, OPTIONAL_IDENTIFIER_PATTERN, Identifier, shorten

FACTORS_MAX = 256
LAYERS_MAX = 4096
GROUPS_MAX = 4096
HEADS_MAX = 1024
COMPONENTS_MAX = 64
VALUE_LENGTH_MAX = 256

AS_SHAPED = "as the tensor's shape"

ORDER = "order of elements in a block"

IN_SLOTS = "K and V in slots of their own"
"""Begins the order of a back end that has slots in place of heads, which nothing else that peers are told shows."""

IN_ARRAYS = "the metadata of all tokens behind the data of all"
"""The order of TurboQuant where FlyDSL is there."""

OF_ROCM = "as ROCm orders an indexer"
"""Begins the order of what chooses the tokens of sparse attention, on ROCm."""

DTYPE = "KV cache dtype"

FP8 = "kind of FP8"

CONTENT = "content"

FNUZ, E4B15 = "FNUZ", "E4B15"
"""Kinds of FP8 that the name of a type does not tell from OCP's: what MI300 and MI325 have, and TurboQuant on GPUs of
NVIDIA before SM 8.9."""
OCP = "OCP"

NOT_PACKED = "start both engines with the same attention back end"
"""The advice where an engine never puts what it reads in an order of its own."""

MODEL = "model"
REVISION = "revision"
WEIGHTS = "weights"
DRAFT = "speculative."
"""Begins the names of what is said of the draft model: `speculative.weights`."""
CACHE_DTYPE = "cache_dtype"
DRAFT_CACHE_DTYPE = "kv_cache_dtype"
QUANTIZATION = "quantization"
HYBRID = "is_hma_enabled"
"""Whether vLLM's hybrid KV cache manager is on. Named as in the hash of the built-in connector."""
CONFIG = "config."
"""Begins the names of entries of the model's configuration."""
LONG_ROPE = "long_rope"
"""Which of its two lists of rotary factors an engine takes whose model has LongRoPE: `long` or `short`."""
TEMPERATURE_TUNING = "attn_temperature_tuning"
"""Whether an engine with Llama 4 scales queries by their position: `on` or `off`. Named as in the configuration."""

_SAME_NUMBERS = {"fp8": "fp8_e4m3"}
"""Two names of a cache type: one that people write, and that of a checkpoint from ModelOpt with `auto`."""

_SAME_FILES = {"auto_awq": "awq", "awq_marlin": "awq", "auto_gptq": "gptq", "gptq_marlin": "gptq"}
"""Names under which vLLM reads the same quantized weights. Which one it takes depends on the platform, and changes the
kernels alone."""

_NAMES_OF_THE_SAME = {
    CACHE_DTYPE: _SAME_NUMBERS,
    DRAFT + DRAFT_CACHE_DTYPE: _SAME_NUMBERS,
    QUANTIZATION: _SAME_FILES,
}

_Value: TypeAlias = Annotated[str, Meta(max_length=VALUE_LENGTH_MAX, pattern=IDENTIFIER_PATTERN)]
_OptionalValue: TypeAlias = Annotated[str, Meta(max_length=VALUE_LENGTH_MAX, pattern=OPTIONAL_IDENTIFIER_PATTERN)]
_Scales: TypeAlias = Annotated[tuple[float, ...], Meta(max_length=HEADS_MAX)]
_Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 48)]


class LayerIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the bytes of one layer's blocks on one rank mean.

    Attributes:
        group: number of its KV cache group, whose block table says where its blocks are. Layers of several groups may
            share memory, and then nothing else that peers are told shows it (`layout.remote`).
        dtype: of the numbers in the cache; `fp8_e4m3` for instance.
        fp8: which kind of FP8 they are; empty: OCP's, or no FP8.
        order: how the elements of a head lie in a block, where the tensor's shape does not say it; empty: it does.
        k_scales, v_scales: what stored K and V are multiplied by: one factor for the whole layer, or one for each KV
            head of this rank; empty: nothing.
        first_head: of this rank, among the KV heads of the model.
        heads: KV heads of this rank. 0: it holds something else.
        content_bytes: of one unit of each component of the layer (`layout.shapes`), without padding: of K and of V of a
            head of one token, of a latent, of each part of a state. Whatever the number of ranks: of slots it is what
            they hold of a KV head, and of a state that is not known to be divided, what all ranks hold.
    """

    group: Annotated[int, Meta(ge=0, lt=GROUPS_MAX)]
    dtype: _Value
    fp8: _OptionalValue = ""
    order: _OptionalValue = ""
    k_scales: _Scales = ()
    v_scales: _Scales = ()
    first_head: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    heads: Annotated[int, Meta(ge=0, le=HEADS_MAX)] = 0
    content_bytes: Annotated[tuple[_Bytes, ...], Meta(max_length=COMPONENTS_MAX)]


class KvIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes of one rank's KV cache mean; see the module's docstring. Differences are told in the order of
    `factors`.

    Attributes:
        group_tokens: tokens of a kernel block of each cache group, 0 where a block is a state.
    """

    factors: Annotated[dict[Identifier, _Value], Meta(max_length=FACTORS_MAX)]
    layers: Annotated[dict[Identifier, LayerIdentity], Meta(max_length=LAYERS_MAX)]
    group_tokens: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 20)], ...], Meta(max_length=GROUPS_MAX)]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A field that differs, with both values and what to do. Fit for `failures.Incompatible`."""

    field: str
    local: str
    remote: str
    advice: str


def differing_factors(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Difference]:
    """The differences between factors that both state, in our order. Empty if the engines may exchange KV as far as
    these go."""
    same_weights = {prefix for prefix in ("", DRAFT) if _both_state(ours, theirs, prefix + WEIGHTS)}
    skipped = {prefix + name for prefix in same_weights for name in (MODEL, REVISION)}
    return [
        Difference(field=name, local=value, remote=theirs[name], advice=_advice(name))
        for name, value in ours.items()
        if name not in skipped and not _is_same(_NAMES_OF_THE_SAME.get(name, {}), value, theirs.get(name, value))
    ]


_NAMED_ORDERS = (IN_SLOTS, IN_ARRAYS, OF_ROCM)
"""These orders have advice of their own."""


def differing_layers(
    ours: Mapping[str, LayerIdentity], theirs: Mapping[str, LayerIdentity], *, not_packed: str = NOT_PACKED
) -> Iterator[Difference]:
    """Yield the differences between layers that both have, in our order.

    `not_packed` says why we do not put K and V in our order that lie as the shape says; empty: we do.
    """
    for name, layer in ours.items():
        other = theirs.get(name)
        if other is None or other == layer:
            continue
        told: list[Difference] = []
        for field, local, remote in (
            (DTYPE, layer.dtype, other.dtype),
            (FP8, layer.fp8 or OCP, other.fp8 or OCP),
            (ORDER, layer.order, other.order),
        ):
            if _is_same(_SAME_NUMBERS if field == DTYPE else {}, local, remote):
                continue
            named = (order for order in _NAMED_ORDERS if local.startswith(order) or remote.startswith(order))
            advice = next(named, field)
            found = _of_layer(f"{field} of {name}", local or AS_SHAPED, remote or AS_SHAPED, advice)
            if advice != ORDER or remote:
                told.append(found)
            elif not_packed:
                told.append(msgspec.structs.replace(found, advice=not_packed))
        # Bytes of another type or order may be more or fewer, and then that is why.
        yield from told or _differing_content(name, layer, other)
        for field in ("k_scale", "v_scale"):
            yield from _differing_scales(field, name, layer, other)


def _differing_content(name: str, ours: LayerIdentity, theirs: LayerIdentity) -> Iterator[Difference]:
    local, remote = ours.content_bytes, theirs.content_bytes
    if local != remote:
        here, there = (f"{', '.join(map(str, sizes))} bytes" for sizes in (local, remote))
        yield _of_layer(f"{CONTENT} of {name}", here, there, CONTENT)


def _is_same(names: Mapping[str, str], local: str, remote: str) -> bool:
    """`names`: two names of the same, the second of which stands for both."""
    return names.get(local, local) == names.get(remote, remote)


def _both_state(ours: Mapping[str, str], theirs: Mapping[str, str], name: str) -> bool:
    return name in ours and theirs.get(name) == ours[name]


def _differing_scales(field: str, name: str, ours: LayerIdentity, theirs: LayerIdentity) -> Iterator[Difference]:
    """The first one of the heads that both ranks have."""
    local, remote = ((each.k_scales if field == "k_scale" else each.v_scales) for each in (ours, theirs))
    if len(local) > 1 or len(remote) > 1:
        local, remote = _of_each_head(local, ours.heads), _of_each_head(remote, theirs.heads)
        first = max(ours.first_head, theirs.first_head)
        last = min(ours.first_head + len(local), theirs.first_head + len(remote))
        for head in range(first, last):
            factors = local[head - ours.first_head], remote[head - theirs.first_head]
            if factors[0] != factors[1]:
                yield _of_layer(f"{field} of head {head} of {name}", repr(factors[0]), repr(factors[1]), field)
                return
        if local and remote:
            return
    if local != remote:
        # There are many only where the other side has none: then how they begin says enough.
        here, there = (shorten(", ".join(map(repr, scales))) or "none" for scales in (local, remote))
        yield _of_layer(f"{field} of {name}", here, there, field)


def _of_each_head(scales: _Scales, heads: int) -> _Scales:
    """One factor is that of all heads of a rank, however many it has."""
    return scales * max(1, heads) if len(scales) == 1 else scales


def _of_layer(field: str, local: str, remote: str, kind: str) -> Difference:
    return Difference(field=field, local=local, remote=remote, advice=_LAYER_ADVICE[kind])


_LAYER_ADVICE = {
    DTYPE: (
        "start both engines with the same --kv-cache-dtype and the same layers exempt from it; the type of a state is"
        " that of --mamba-cache-dtype and --mamba-ssm-cache-dtype, an indexer's that of indexer_kv_dtype in"
        " --attention-config"
    ),
    CONTENT: (
        "start both engines with the same num_speculative_tokens in --speculative-config, by which the convolution of a"
        " state and a ring buffer are longer, and with the same indexer_kv_dtype in --attention-config; DeepSeek-V4.1"
        " needs GPUs that keep its latents in the same form"
    ),
    FP8: (
        "the GPUs of both engines store FP8 in unlike ways, and the same byte is another number: use GPUs that store it"
        " alike, or, if the model allows it, a --kv-cache-dtype without FP8"
    ),
    ORDER: (
        "attention on CPUs orders K and V as suits the instruction set: run both engines on the same kind of processor"
    ),
    IN_SLOTS: (
        "attention keeps K and V apart, and each back end in a way of its own: start both engines with the same"
        " attention back end and, with ROCm, the same VLLM_ROCM_USE_AITER and VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"
    ),
    IN_ARRAYS: (
        "TurboQuant orders its blocks otherwise on gfx950 with FlyDSL: have it on both engines, or uninstall it on both"
    ),
    OF_ROCM: (
        "run both engines on ROCm, with KV blocks of one token on both or on neither: another platform orders what"
        " chooses the tokens of sparse attention in another way"
    ),
    "k_scale": "start both engines with the same checkpoint: the scales of its KV cache are in it",
    "v_scale": "start both engines with the same checkpoint: the scales of its KV cache are in it",
}

_UNENFORCED = "the option enforce_handshake_compat=false skips this comparison"


_AUTO_LENGTH = "auto counts as the length that vLLM takes from the model's configuration, whatever fits into memory"


def _advice(name: str) -> str:
    kind = name.removeprefix(DRAFT)
    if kind == WEIGHTS:
        said = "the files of the model hold other weights: give both engines the same revision of it"
    elif kind.startswith(CONFIG):
        said = "give both engines the same config.json, and the same --hf-overrides"
    elif kind == LONG_ROPE:
        said = (
            "start both engines with the same --max-model-len: one beyond original_max_position_embeddings of the model"
            f" makes vLLM rotate the keys of all prompts by other factors; {_AUTO_LENGTH}"
        )
    elif kind == TEMPERATURE_TUNING:
        said = (
            "start both engines with a --max-model-len up to 32768, or both with one beyond, where vLLM scales the"
            " queries of all prompts, or both with the same attn_temperature_tuning in --override-generation-config;"
            f" {_AUTO_LENGTH}"
        )
    elif kind == HYBRID:
        said = (
            "start both engines with --disable-hybrid-kv-cache-manager, or both without; beside a connector in"
            " MultiConnector that does not support that manager vLLM switches it off by itself"
        )
    else:
        said = f"start both engines with the same {name}"
    return f"{said}; {_UNENFORCED}"
