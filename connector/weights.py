"""Which weights an engine has: a fingerprint that is equal where the files hold the same, wherever they are.

A connector sees the attention layers of the model and not its parameters, which each rank has cut and each back end
has repacked anyway. So the fingerprint is of the files that vLLM has loaded a moment ago: the name, type and shape of
every tensor in the safetensors files of the model, and a kilobyte from the middle of each, or of 2,048 of them, chosen
by the digest of their names. The page cache answers all of that: 2,000 tensors in four files took 40 ms. Into how many
files the tensors are divided does not matter, nor where these are: a directory, or a snapshot in the cache of the hub.
A fine-tuned model differs from its base in most bytes of the tensors that were tuned; why all tensors are looked at,
where they are that few, is that only some kinds of them may be.

Files of other formats are fingerprinted by name, size and sixteen kilobytes of each. Random weights
(`--load-format dummy`) are the same in all engines: vLLM draws them from a fixed seed, whatever --seed says.

An adapter (LoRA) is fingerprinted likewise, with those entries of its configuration that scale what its weights add.

Not known, and then not compared: weights that are no local files (object stores, tensorizer, another process's memory),
and what was changed in memory after loading.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from vllm import envs

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig

TENSORS_MAX = 2048
"""How many tensors are looked into."""
SAMPLE_BYTES = 1024
SAMPLES_OF_A_FILE = 16
HEADER_BYTES_MAX = 100_000_000
"""What the format allows."""

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""vLLM loads the first of them that is there, and looks at nothing else beside the configuration."""
_OF_ADAPTERS = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "bias",
    "target_modules",
    "modules_to_save",
)
"""Entries of an adapter's configuration that vLLM computes by; the others name its base, or are of its training."""

DUMMY = "dummy"
FROM_FILES = frozenset(
    (
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "mistral",
        "pt",
        "npcache",
        "bitsandbytes",
        "gguf",
    )
)
"""Load formats that load the files of the model's directory, whole. Those of plug-ins are unknown."""

_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.gguf")


class WeightsUnknown(Exception):
    """The files cannot be found or read; says why."""


class _Tensor(NamedTuple):
    """A tensor in a safetensors file: bytes `start` to `stop` of it."""

    name: str
    described: str
    file: Path
    start: int
    stop: int


def weights_fingerprint(model: ModelConfig, load: LoadConfig) -> str:
    """Equal for two engines that have the same weights. Raises WeightsUnknown.

    Reads files; called once, when a worker starts.
    """
    if load.load_format == DUMMY:
        return DUMMY
    if load.load_format not in FROM_FILES:
        raise WeightsUnknown(f"the load format is {load.load_format}")
    try:
        return fingerprint_of(_location(model, load))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsUnknown(f"{type(error).__name__}: {error}") from error


def fingerprint_of(location: Path) -> str:
    """The fingerprint of a model's directory, or of its only file. Raises OSError, or ValueError and others if
    malformed."""
    if files := _safetensors(location):
        return _of_tensors(files)
    files = [location] if location.is_file() else [file for each in _OTHER_FORMATS for file in location.glob(each)]
    if not files:
        raise FileNotFoundError(f"no weights in {location}")
    return _of_files(sorted(files))


def adapter_files(path: str) -> tuple[Path, Path]:
    """Configuration and weights of an adapter that vLLM has loaded from `path`. Raises OSError and WeightsUnknown."""
    location = Path(os.path.expanduser(path))
    if not (location.is_absolute() or location.exists()):
        location = _snapshot(path)
    weights = next((file for name in _ADAPTER_WEIGHTS if (file := location / name).is_file()), None)
    if weights is None:
        raise WeightsUnknown(f"{location} has no file that vLLM would load")
    return location / ADAPTER_CONFIG, weights


def adapter_fingerprint(config_file: Path, weights: Path) -> str:
    """Equal for two adapters of the same weights. Reads files. Raises WeightsUnknown."""
    try:
        config = json.loads(config_file.read_bytes())
        # Versions of PEFT differ in which entries they write that say nothing.
        said = {key: config.get(key) or None for key in _OF_ADAPTERS}
        if isinstance(modules := said["target_modules"], list):
            said["target_modules"] = sorted(modules)  # a set, where it was written
        whole = f"{json.dumps(said, sort_keys=True)} {fingerprint_of(weights)}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsUnknown(f"{type(error).__name__}: {error}") from error
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


def _location(model: ModelConfig, load: LoadConfig) -> Path:
    """Raises WeightsUnknown."""
    if model.model_weights and model.model_weights != model.model:
        raise WeightsUnknown(f"they were read from {model.model_weights}")
    if os.path.exists(model.model):
        return Path(model.model)
    return _snapshot(model.model, revision=model.revision, cache_dir=load.download_dir)


def _snapshot(name: str, **where: Any) -> Path:
    """Where the cache of the hub has it; nothing is asked of the hub. Raises WeightsUnknown."""
    if envs.VLLM_USE_MODELSCOPE:
        raise WeightsUnknown(f"{name} is of ModelScope")
    try:
        return Path(str(huggingface_hub.snapshot_download(name, local_files_only=True, **where)))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
        raise WeightsUnknown(f"{name} is neither a path nor in the cache of the hub") from error


def _safetensors(location: Path) -> list[Path]:
    """The files that hold the model, where the directory has it in a second form too."""
    if location.is_file():
        return [location] if location.suffix == ".safetensors" else []
    index = location / _INDEX
    if index.is_file():
        return sorted({location / file for file in json.loads(index.read_bytes())["weight_map"].values()})
    files = sorted(location.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def _of_tensors(files: list[Path]) -> str:
    digest = hashlib.sha256()
    tensors = sorted(tensor for file in files for tensor in _tensors(file))
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.described}\n".encode())
    chosen = heapq.nsmallest(TENSORS_MAX, tensors, key=lambda tensor: hashlib.sha256(tensor.name.encode()).digest())
    by_file: dict[Path, list[_Tensor]] = {}
    for tensor in chosen:
        by_file.setdefault(tensor.file, []).append(tensor)
    samples: dict[str, bytes] = {}
    for file, of_file in by_file.items():
        with file.open("rb") as opened:
            for tensor in of_file:
                middle = tensor.start + max(0, tensor.stop - tensor.start - SAMPLE_BYTES) // 2
                samples[tensor.name] = _read(opened.fileno(), middle, min(SAMPLE_BYTES, tensor.stop - middle))
    for name in sorted(samples):
        digest.update(samples[name])
    return f"{len(tensors)} tensors {digest.hexdigest()[:32]}"


def _tensors(file: Path) -> Iterator[_Tensor]:
    """What the header of a safetensors file lists: its length in 8 bytes, and a map in JSON."""
    with file.open("rb") as opened:
        length = int.from_bytes(_read(opened.fileno(), 0, 8), "little")
        if length > HEADER_BYTES_MAX:
            raise ValueError(f"{file} is not a safetensors file")
        header: dict[str, Any] = json.loads(_read(opened.fileno(), 8, length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        yield _Tensor(name, f"{entry['dtype']} {entry['shape']}", file, 8 + length + start, 8 + length + stop)


def _of_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for sample in range(SAMPLES_OF_A_FILE):
                start = max(0, size - SAMPLE_BYTES) * sample // (SAMPLES_OF_A_FILE - 1)
                digest.update(_read(opened.fileno(), start, min(SAMPLE_BYTES, size)))
    return f"{len(files)} files {digest.hexdigest()[:32]}"


def _read(descriptor: int, start: int, length: int) -> bytes:
    found = os.pread(descriptor, length, start)
    if len(found) != length:
        raise ValueError("a file of weights is shorter than it says")
    return found
