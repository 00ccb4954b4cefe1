"""What tests take from vLLM that stands in another module from one version to the next."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLANNING = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")
_COMMAND_LINE = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")


def _first(modules: tuple[str, ...], name: str) -> Any:
    """The newest version's place comes first."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"this version of vLLM has {name} in none of {', '.join(modules)}")


get_kv_cache_groups = _first(_PLANNING, "get_kv_cache_groups")
get_kv_cache_config_from_groups = _first(_PLANNING, "get_kv_cache_config_from_groups")
project_kv_cache_groups_to_worker = _first(_PLANNING, "_project_kv_cache_groups_to_worker")


def make_arg_parser(parser: Any) -> Any:
    """Found when it is called: its module imports the whole server."""
    return _first(_COMMAND_LINE, "make_arg_parser")(parser)
