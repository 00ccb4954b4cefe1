"""Engines with other weights under the same shapes, and with the same weights at another path.

The built-in connector would serve the former, if the path were the same, and refuse the latter.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.client import PrefillDecode
from tests.e2e.cluster import Traces, prompt
from tests.e2e.deployments import assert_serves, options
from tests.e2e.engines import LOOPBACK, ROOT, Engine, EngineSet
from tests.e2e.tiny_model import tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]


@dataclass(frozen=True)
class Engines:
    """`copied` has the weights of `decode`, at another path; `tuned` has others."""

    decode: Engine
    copied: Engine
    tuned: Engine
    traces: Traces


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    directory = tmp_path_factory.mktemp("weights")
    models = {
        "decode": tiny_llama(),
        "copied": shutil.copytree(tiny_llama(), directory / "copied"),
        "tuned": tuned(shutil.copytree(tiny_llama(), directory / "tuned")),
    }
    with EngineSet() as started:
        found = started.start(
            *(
                replace(options(directory, name, core=core % 2), model=model)
                for core, (name, model) in enumerate(models.items())
            )
        )
        yield Engines(*found, Traces(directory / "traces"))


def tuned(model: Path) -> Path:
    """As after fine-tuning of one kind of tensors."""
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        if "v_proj" in name:
            tensors[name] += 0.02 * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors, file, metadata={"format": "pt"})
    return model


def run(*arguments: str, engine: Engine) -> tuple[int, str]:
    where = f"{LOOPBACK}:{engine.options.side_channel_port}"
    finished = subprocess.run(
        [sys.executable, "-m", "connector", *arguments, "--engine", where, "--timeout", "10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return finished.returncode, finished.stdout + finished.stderr


def test_the_same_weights_at_another_path(engines: Engines) -> None:
    with PrefillDecode(engines.copied, engines.decode) as service:
        assert_serves(service, engines.traces, "copied")


def test_other_weights_of_the_same_shapes(engines: Engines) -> None:
    """Nothing is read; the log, `why` and `doctor` name the weights, with both values."""
    with PrefillDecode(engines.tuned, engines.decode) as service:
        key = "other-weights"
        answer = service.pd(prompt(100, key), key)
        assert not answer.ok
        ended = engines.traces.ended_request(key)
        assert ended.reason == "Incompatible"
        assert "reading" not in ended.states
        log = engines.decode.log_path.read_text()
        (line,) = [line for line in log.splitlines() if "Incompatible" in line and key in line]
        assert "weights" in line
        status, said = run("why", key, engine=engines.decode)
        assert status == 1
        assert said.startswith("Incompatible")
        assert "weights: " in said.partition("\n")[0]
        status, said = run("doctor", engine=engines.decode)
        assert status == 1
        assert "weights is " in said


def test_configurations_differ_in_nothing_else(engines: Engines) -> None:
    """Guards the test above: it is the weights alone."""
    configurations = [
        json.loads((Path(engine.options.model) / "config.json").read_text())
        for engine in (engines.decode, engines.tuned)
    ]
    assert configurations[0] == configurations[1]
