"""Lets vLLM's Ray executor run workers that compute on a CPU. On the PYTHONPATH of such an engine and of its Ray only.

vLLM 0.32 places each worker on a device that Ray counts, and refuses platforms that name none. Ray counts what it is
told, so a node may say that it has as many GPUs as there are workers.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

_PLATFORM_MODULE = "vllm.platforms.cpu"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes the platform once its module is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PLATFORM_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_change(module: types.ModuleType) -> None:
            load(module)
            module.CpuPlatform.ray_device_key = "GPU"

        loader.exec_module = load_and_change
        return spec


sys.meta_path.insert(0, _AfterImport())
