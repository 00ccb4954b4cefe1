"""Lets vLLM's CPU build run DeepSeek-V4 where Triton has no back end for CPUs. On the PYTHONPATH of such engines only.

vLLM fills the attention metadata of this model with Triton kernels, on CPUs too, and takes Triton for absent without a
back end of that name. Triton's interpreter, which is slow and exact, does as well, so one is announced that nobody
calls. And vLLM 0.32.0 asks the CPU's metadata builder for two kinds of layers that it does not know of.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from triton.backends import backends

_BUILDER_MODULE = "vllm.models.deepseek_v4.cpu.cpu_mla"
_MISSING_KINDS = ("c1a", "c2a")


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes the metadata builder once its module is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _BUILDER_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_change(module: types.ModuleType) -> None:
            load(module)
            builder: Any = module.DeepseekV4CPUSparseSWAMetadataBuilder
            right = builder.build_tile_scheduler
            builder.build_tile_scheduler = lambda self, count: dict.fromkeys(_MISSING_KINDS) | right(self, count)

        loader.exec_module = load_and_change
        return spec


backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)  # type: ignore[assignment]
sys.meta_path.insert(0, _AfterImport())
