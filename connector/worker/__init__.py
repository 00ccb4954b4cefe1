"""The worker-process side of the connector, on the engine thread."""
