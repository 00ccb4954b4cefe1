"""Lets vLLM's CPU build run DeepSeek-V4 where Triton has no back end for CPUs. On the PYTHONPATH of such engines only.

vLLM fills the attention metadata of this model with Triton kernels, on CPUs too, and takes Triton for absent without a
back end of that name. Triton's interpreter, which is slow and exact, does as well, so one is announced that nobody
calls. And vLLM 0.32.0 asks the CPU's metadata builder for two kinds of layers that it does not know of.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from triton.backends import backends

from tests.e2e.after_import import AfterImport

_BUILDER_MODULE = "vllm.models.deepseek_v4.cpu.cpu_mla"
_MISSING_KINDS = ("c1a", "c2a")


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


def _add_the_missing_kinds(module: Any) -> None:
    builder = module.DeepseekV4CPUSparseSWAMetadataBuilder
    right = builder.build_tile_scheduler
    builder.build_tile_scheduler = lambda self, count: dict.fromkeys(_MISSING_KINDS) | right(self, count)


backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)  # type: ignore[assignment]
sys.meta_path.insert(0, AfterImport(_BUILDER_MODULE, _add_the_missing_kinds))
