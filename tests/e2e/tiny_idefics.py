"""An Idefics3 with random weights, which sees images, and adapters for the language model in it, the tiny Llama's size.

Of the models that see images it is one that vLLM loads without torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.tiny_model import (
    ATTENTION_HEADS,
    DEFAULT_CACHE,
    HIDDEN_SIZE,
    KV_HEADS,
    LAYERS,
    SEED,
    WEIGHT_STANDARD_DEVIATION,
    cached_model,
    common,
    save_model,
    vocabulary,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IMAGE_PIXELS = 64
_PATCH_PIXELS = 8
_PATCHES_PER_SIDE_OF_A_TOKEN = 2
IMAGE_TOKENS = (IMAGE_PIXELS // _PATCH_PIXELS // _PATCHES_PER_SIDE_OF_A_TOKEN) ** 2
"""Of one image, whatever its size; with a few more around them, which are text."""
_IMAGE_TOKEN = "<image>"
_SPECIAL_TOKENS = (_IMAGE_TOKEN, "<fake_token_around_image>", "<end_of_utterance>")
"""Those that the processor of images asks for; its further words are bytes, as any text."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Nothing around what was said; vLLM writes the token of an image in front of the text."""

ADAPTER_RANK = 8
_ADAPTER_STANDARD_DEVIATION = 0.2
"""So that what it adds is of the size of the model's own weights."""


def tiny_idefics(cache: Path = DEFAULT_CACHE) -> Path:
    """Folder with the model, its tokenizer and its processor of images, built when it is not there yet."""
    return cached_model("idefics", _save, cache, Path(__file__), special_tokens=_SPECIAL_TOKENS)


def _save(folder: Path) -> None:
    from transformers import AutoModelForImageTextToText

    save_model(AutoModelForImageTextToText, _idefics, folder)
    size = {"longest_edge": IMAGE_PIXELS}
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": size,
        "max_image_size": size,
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _idefics() -> PretrainedConfig:
    from transformers import Idefics3Config, LlamaConfig
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    text = common() | {"vocab_size": len(vocabulary()) + len(_SPECIAL_TOKENS)}
    return Idefics3Config(
        text_config=LlamaConfig(num_hidden_layers=LAYERS, intermediate_size=2 * HIDDEN_SIZE, **text),
        vision_config=Idefics3VisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=IMAGE_PIXELS,
            patch_size=_PATCH_PIXELS,
            initializer_range=WEIGHT_STANDARD_DEVIATION,
        ),
        image_token_id=len(vocabulary()) + _SPECIAL_TOKENS.index(_IMAGE_TOKEN),
        pad_token_id=text["pad_token_id"],
        scale_factor=_PATCHES_PER_SIDE_OF_A_TOKEN,
        initializer_range=WEIGHT_STANDARD_DEVIATION,
    )


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of queries, keys and values, with random weights."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED + seed)
    kv_size = HIDDEN_SIZE * KV_HEADS // ATTENTION_HEADS
    tensors = {}
    for layer in range(LAYERS):
        for name, size in {"q_proj": HIDDEN_SIZE, "k_proj": kv_size, "v_proj": kv_size}.items():
            path = f"base_model.model.model.text_model.layers.{layer}.self_attn.{name}"
            for half, shape in (("A", (ADAPTER_RANK, HIDDEN_SIZE)), ("B", (size, ADAPTER_RANK))):
                weights = torch.randn(shape, generator=generator) * _ADAPTER_STANDARD_DEVIATION
                tensors[f"{path}.lora_{half}.weight"] = weights
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": ADAPTER_RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
