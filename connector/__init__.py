"""An actor-model KV-transfer connector for vLLM's disaggregated prefill/decode.

    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_connector_module_path": "connector", ...}'

`NixlConnector` is looked up lazily, so that importing the package loads neither vLLM nor torch, NIXL or ZMQ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connector.nixl_connector import NixlActorConnector, NixlConnector

__all__ = ["NixlActorConnector", "NixlConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from connector import nixl_connector

    return getattr(nixl_connector, name)
