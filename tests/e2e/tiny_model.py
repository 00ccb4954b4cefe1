"""A Llama small enough to serve twice on two cores, made here so that nothing is downloaded.

Random weights with a standard deviation of 0.08 give varied greedy text: with the usual 0.02 the model repeats one
token, and an answer computed from wrong KV could not be told from a right one. float32 leaves no near ties for a
different order of summation to flip. The tokenizer maps each byte to one token, so that a prompt's length in tokens is
its length in bytes.

The model is built once per state of this file and kept in a cache folder; building writes beside it and renames, so
that two runs may meet.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

DEFAULT_CACHE = Path(__file__).resolve().parents[2] / ".state" / "models"

LAYERS = 4
HIDDEN_SIZE = 256
ATTENTION_HEADS = 8
KV_HEADS = 4
CONTEXT_TOKENS = 8192
WEIGHT_STANDARD_DEVIATION = 0.08
SEED = 20240607

HEAD_DIMENSION = HIDDEN_SIZE // ATTENTION_HEADS
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIMENSION * 4
"""Keys and values of all layers, float32."""

BEGIN_TOKEN, END_TOKEN = "<s>", "</s>"


def tiny_llama(cache: Path = DEFAULT_CACHE) -> Path:
    """Folder with the model and its tokenizer, as `save_pretrained` lays them out; built when it is not there yet."""
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache / f"tiny-llama-{key}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=cache))
    try:
        _save_model(unfinished)
        _save_tokenizer(unfinished)
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():  # otherwise another run was first, with the same bytes
            raise


def _save_model(folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=ATTENTION_HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=WEIGHT_STANDARD_DEVIATION,
        bos_token_id=_vocabulary()[BEGIN_TOKEN],
        eos_token_id=_vocabulary()[END_TOKEN],
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN_TOKEN, eos_token=END_TOKEN)
    wrapped.save_pretrained(folder)


def _vocabulary() -> dict[str, int]:
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), BEGIN_TOKEN, END_TOKEN]
    return {token: index for index, token in enumerate(tokens)}
