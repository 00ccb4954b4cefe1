"""The scheduler-process side of the connector."""
