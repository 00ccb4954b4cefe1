"""See the package's docstring: `python -m tests.upstream [--source vllm-*.tar.gz] [--or-skip] [pytest options]`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.python_path import looking_first_in
from tests.upstream.source import NotFetched, end_without, source_distribution, unpack

ROOT = Path(__file__).resolve().parents[2]

TESTS = tuple(
    f"test_{name}"
    for name in (
        "remote_decode_lifecycle.py",
        "remote_prefill_lifecycle.py",
        "invalid_blocks_correctness.py",
        "error_propagation.py",
        "cache_pollution_prevention.py",
        "kv_load_failure_recovery.py",
        "bidirectional_kv_transfer.py",
        # Of vLLM's side of any connector; these have no NIXL connector made.
        "config.py",
        "scheduler_kv_connector_override.py",
        "kv_connector_lifecycle.py",
        # Beside another connector.
        "nixl_simple_cpu_offload.py",
        # Of the tests of the built-in connector, those that go through the scheduler.
        "nixl_connector.py::test_prompt_less_than_block_size",
        "nixl_connector.py::test_abort_immediately_remote_prefill_enqueues_empty_recv",
        "nixl_connector.py::test_prefill_exports_cached_tokens_in_kv_transfer_params",
    )
)
MODEL = "facebook/opt-125m"
"""Which these tests name. Nothing of it is computed, so its configuration is all that there has to be."""
CONFIGURATION = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, help="vLLM's source distribution, if it is there already")
    parser.add_argument(
        "--or-skip", action="store_true", help="end well where it cannot be fetched; not where CI is set to true"
    )
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="upstream-") as directory:
        try:
            source = arguments.source or source_distribution()
        except NotFetched as error:
            end_without(error, or_skip=arguments.or_skip)
        root = unpack(source, Path(directory) / "source", "tests")
        (root / "tests" / "conftest.py").unlink()  # it imports what models need
        work = Path(directory) / "work"
        (work / MODEL).mkdir(parents=True)
        (work / MODEL / "config.json").write_text(json.dumps(CONFIGURATION))
        (work / "pytest.ini").write_text("[pytest]\nmarkers = cpu_test: on CPUs\n")
        # Its `tests` must be found before ours, so the plug-in is named by itself.
        environment = looking_first_in(root, ROOT, Path(__file__).parent) | {"HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-rx", "-p", "in_its_place", "-p", "no:cacheprovider"]
        command += ["-c", str(work / "pytest.ini"), "--rootdir", str(root), *options]
        command += [str(root / "tests" / "v1" / "kv_connector" / "unit" / name) for name in TESTS]
        return subprocess.run(command, cwd=work, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
