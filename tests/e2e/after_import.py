"""Changes a module of vLLM once it is loaded, in processes that tests do not start themselves.

For `sitecustomize`, and for modules that `EngineOptions.changes` names.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any


def change_module(name: str, change: Callable[[Any], None]) -> None:
    """Now, if it is loaded, or else when it will be."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport(name, change))


class AfterImport(importlib.abc.MetaPathFinder):
    """Has `change` called with the module `name` when it has been loaded, once `sys.meta_path` begins with this."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_change(module: types.ModuleType) -> None:
            load(module)
            self._change(module)

        loader.exec_module = load_and_change
        return spec
