"""The doors to the outside world.

`nixl` and `side_channel` are the contracts (Protocols and plain values; they import neither NIXL nor ZMQ).
`nixl_agent` and `zmq_bridge` are the real implementations; the simulator brings its own. Nothing else in the package
calls NIXL or ZMQ.
"""
