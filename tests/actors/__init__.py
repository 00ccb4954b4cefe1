"""The production actors on real ports (NIXL over UCX, ZMQ), without vLLM."""
