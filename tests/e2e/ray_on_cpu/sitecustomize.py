"""Lets vLLM's Ray executor run workers that compute on a CPU. On the PYTHONPATH of such an engine and of its Ray only.

vLLM 0.32 places each worker on a device that Ray counts, and refuses platforms that name none. Ray counts what it is
told, so a node may say that it has as many GPUs as there are workers.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.e2e.after_import import AfterImport


def _name_a_device(module: Any) -> None:
    module.CpuPlatform.ray_device_key = "GPU"


sys.meta_path.insert(0, AfterImport("vllm.platforms.cpu", _name_a_device))
