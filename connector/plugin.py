"""vLLM plug-in: makes the connector known under the name `NixlActorConnector`.

vLLM calls `register` through the entry point group `vllm.general_plugins`, once in every process and sometimes twice.
"""

from __future__ import annotations

CONNECTOR_NAME = "NixlActorConnector"


def register() -> None:
    """Register the connector with vLLM's factory. Calling it again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "connector.nixl_connector", CONNECTOR_NAME)
    except ValueError:
        return  # Registered already.
