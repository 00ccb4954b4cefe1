"""What `kv_transfer_params` cost for each request: P makes and D reads them, both on the engine thread.

`python -m tests.bench.bench_params` builds and parses the parameters of prompts of several lengths, with keys and
without, in turns. Blocks of 16 tokens.

Columns, microseconds of the fastest round
  digest          of the prompt: made on P, and on D once more to compare
  build, parse    the rest without keys: what every request costs on P, and on D
  sign, check     what keys add to each
  file            a look whether the file of keys has changed, which another thread does every few seconds
  embeddings      the digest of a prompt that is given as 64 MB of them
  adapter         its weights are read: 1,120 tensors, 147 MB; waited for once after they have changed
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.v1.request import Request

from connector.key_files import ParamsKeyFile
from connector.scheduler.prefix_digest import prompt_digests
from connector.weights import ADAPTER_CONFIG, adapter_files, adapter_fingerprint
from connector.wire.params import RemotePrefill, build_remote_prefill, parse_remote_prefill, require_genuine
from connector.wire.signatures import ParamsKey, ParamsKeys, format_keys

BLOCKS = (8, 128, 1024, 8192)
ROUNDS = 200
KEYS = ParamsKeys((ParamsKey("2026-01", bytes(range(32))),))


def build(blocks: int, keys: ParamsKeys | None) -> dict[str, Any]:
    lent = RemotePrefill(
        engine_id="c3a1d5de-4d5c-4f5c-9c43-2d3a1f7a5b10",
        request_id="cmpl-3f0a4b0d5f9e4c8e8d7a-0-9b1c",
        host="10.11.12.13",
        port=5600,
        block_ids=(tuple(range(blocks)),),
        tp_size=8,
        num_tokens=16 * blocks,
        lease_number=2**47 + 1,
        prefix_digests=((16 * blocks, "0" * 32),),
    )
    return build_remote_prefill(lent, keys=keys)


def fastest_us(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter_ns()
        run()
        best = min(best, (time.perf_counter_ns() - started) / 1e3)
    return best


def main() -> None:
    print(f"{'blocks':>8}{'digest':>8}{'build':>8}{'sign':>8}{'parse':>8}{'check':>8}")
    for blocks in BLOCKS:
        tokens = 16 * blocks
        request = Request("r", [100_000 + each for each in range(tokens)], SamplingParams(max_tokens=1), None)
        digest = fastest_us(partial(prompt_digests, request, [tokens]))
        raw = build(blocks, KEYS)

        def check(raw: dict[str, Any] = raw) -> None:
            require_genuine(parse_remote_prefill(raw), KEYS, lends_back=False)

        plain = fastest_us(lambda blocks=blocks: build(blocks, None))  # type: ignore[misc]
        signed = fastest_us(lambda blocks=blocks: build(blocks, KEYS))  # type: ignore[misc]
        parsed = fastest_us(lambda raw=raw: parse_remote_prefill(raw))  # type: ignore[misc]
        checked = fastest_us(check)
        print(f"{blocks:>8}{digest:>8.1f}{plain:>8.1f}{signed - plain:>8.1f}{parsed:>8.1f}{checked - parsed:>8.1f}")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "keys"
        path.write_text(format_keys(KEYS))
        print(f"file {fastest_us(ParamsKeyFile(str(path)).look_again):.1f}")
    embeddings = torch.ones(8192, 4096, dtype=torch.bfloat16)
    request = Request("r", None, SamplingParams(max_tokens=1), None, prompt_embeds=embeddings)
    print(f"embeddings {fastest_us(partial(prompt_digests, request, [8192]), rounds=5):.0f}")
    with tempfile.TemporaryDirectory() as directory:
        adapter = Path(directory)
        (adapter / ADAPTER_CONFIG).write_text('{"r": 16, "lora_alpha": 32}')
        tensor = torch.ones(16, 4096, dtype=torch.bfloat16)
        save_file({f"layer.{each}": tensor.clone() for each in range(1120)}, adapter / "adapter_model.safetensors")
        print(f"adapter {fastest_us(partial(adapter_fingerprint, *adapter_files(str(adapter))), rounds=5):.0f}")


if __name__ == "__main__":
    main()
