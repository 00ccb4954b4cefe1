"""The fingerprint of an engine's weights: equal for equal weights wherever they lie, other for others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from connector import weights
from connector.weights import WeightsUnknown, fingerprint_of, weights_fingerprint

LAYERS = 5
KINDS = ("q_proj", "k_proj", "mlp.down_proj")


def tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {
        f"model.layers.{layer}.{kind}.weight": torch.randn(96, 64, generator=generator).bfloat16()
        for layer in range(LAYERS)
        for kind in KINDS
    }
    return found | {"model.norm.weight": torch.randn(64, generator=generator)}


def write(directory: Path, content: dict[str, torch.Tensor], files: int = 1, index: bool = False) -> Path:
    directory.mkdir()
    names = sorted(content)
    entries: dict[str, str] = {}
    for part in range(files):
        file = f"model-{part + 1:05}-of-{files:05}.safetensors"
        save_file({name: content[name] for name in names[part::files]}, directory / file)
        entries |= dict.fromkeys(names[part::files], file)
    if index:
        shown = ",".join(f'"{name}":"{file}"' for name, file in entries.items())
        (directory / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{shown}}}}}')
    return directory


def engine(model: Path | str, load_format: str = "auto", **changes: Any) -> tuple[Any, Any]:
    fields = {"model": str(model), "revision": None, "model_weights": ""} | changes
    return SimpleNamespace(**fields), SimpleNamespace(load_format=load_format, download_dir=None)


def test_equal_weights_elsewhere_are_the_same(tmp_path: Path) -> None:
    first = write(tmp_path / "first", tensors())
    copied = shutil.copytree(first, tmp_path / "copied")
    in_three = write(tmp_path / "in three files", tensors(), files=3, index=True)
    assert len({weights_fingerprint(*engine(each)) for each in (first, copied, in_three)}) == 1


def test_a_second_form_of_the_weights_is_not_looked_at(tmp_path: Path) -> None:
    first = write(tmp_path / "first", tensors())
    alone = fingerprint_of(first)
    save_file(tensors(2), first / "consolidated.safetensors")
    assert fingerprint_of(first) == alone
    indexed = write(tmp_path / "indexed", tensors(), files=2, index=True)
    save_file(tensors(2), indexed / "model.safetensors")
    assert fingerprint_of(indexed) == alone


@pytest.mark.parametrize("name", sorted(tensors()))
def test_one_tensor_that_differs_is_seen_whichever_it_is(tmp_path: Path, name: str) -> None:
    changed = tensors()
    changed[name] = changed[name] * 1.25
    assert fingerprint_of(write(tmp_path / "a", tensors())) != fingerprint_of(write(tmp_path / "b", changed))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda found: found | {"extra": torch.zeros(1)}, id="one more"),
        pytest.param(lambda found: {name.replace("norm", "form"): each for name, each in found.items()}, id="a name"),
        pytest.param(lambda found: {name: each.reshape(-1) for name, each in found.items()}, id="shapes"),
        pytest.param(lambda found: {name: each.view(torch.int8) for name, each in found.items()}, id="types"),
        pytest.param(lambda found: tensors(2), id="another seed"),
    ],
)
def test_what_makes_other_weights(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    first = fingerprint_of(write(tmp_path / "a", tensors()))
    assert fingerprint_of(write(tmp_path / "b", change(tensors()))) != first


def test_reading_is_bounded_whatever_the_size_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of each file, and a sample of each of a bounded number of tensors."""
    read: list[int] = []
    pread = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        read.append(length)
        return pread(descriptor, length, offset)

    directory = write(tmp_path / "a", tensors(), files=2)
    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(weights, "TENSORS_MAX", 4)
    fingerprint_of(directory)
    headers = 2 * 2
    assert len(read) == headers + 4
    assert all(length <= weights.SAMPLE_BYTES for length in read[headers:])


def test_which_tensors_are_looked_at_does_not_depend_on_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "TENSORS_MAX", 4)
    assert fingerprint_of(write(tmp_path / "a", tensors())) == fingerprint_of(write(tmp_path / "b", tensors(), files=3))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_other_formats(tmp_path: Path, name: str) -> None:
    content = bytes(range(256)) * 400
    paths = []
    for directory, data in (("a", content), ("b", content), ("c", content[:-1] + b"x"), ("d", content + b"x")):
        (tmp_path / directory).mkdir()
        paths.append(tmp_path / directory / name)
        paths[-1].write_bytes(data)
    a, b, c, d = (fingerprint_of(path.parent) for path in paths)
    assert a == b
    assert len({a, c, d}) == 3
    assert fingerprint_of(paths[0]) == a


def test_a_snapshot_of_the_hub_is_the_same_as_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a question to the hub: the files are those that the engine has loaded."""
    snapshot = tmp_path / "cache" / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    write(snapshot, tensors())
    (tmp_path / "cache" / "models--org--name" / "refs").mkdir()
    (tmp_path / "cache" / "models--org--name" / "refs" / "main").write_text("0" * 40)
    model, load = engine("org/name")
    load.download_dir = str(tmp_path / "cache")
    assert weights_fingerprint(model, load) == fingerprint_of(write(tmp_path / "copy", tensors()))


def test_random_weights_of_vllm_are_the_same_everywhere() -> None:
    assert weights_fingerprint(*engine("anything", load_format="dummy")) == "dummy"


@pytest.mark.parametrize(
    "of",
    [
        lambda path: engine(path, load_format="tensorizer"),
        lambda path: engine(path, model_weights="s3://bucket/model"),
        lambda path: engine(path / "empty"),
        lambda path: engine(path / "damaged"),
        lambda path: engine(path / "cut"),
        lambda path: engine("no/such-model"),
        lambda path: engine("not a name"),
    ],
)
def test_what_is_not_known_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Callable[[Path], tuple[Any, Any]]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\xff" * 64)
    cut = write(tmp_path / "cut", tensors()) / "model-00001-of-00001.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10_000])
    model, load = of(tmp_path)
    load.download_dir = str(tmp_path / "nothing")
    with pytest.raises(WeightsUnknown):
        weights_fingerprint(model, load)
