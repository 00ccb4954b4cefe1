"""Adapters (LoRA) on disk, as PEFT writes them, as far as their fingerprint goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def save_adapter(directory: Path, weights: float, **config: Any) -> Path:
    """One that adds `weights`."""
    directory.mkdir(exist_ok=True)
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "a"}
    (directory / "adapter_config.json").write_text(json.dumps(settings | config))
    tensors = {"q.lora_A": torch.full((2, 8), weights), "q.lora_B": torch.ones(8, 2)}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
