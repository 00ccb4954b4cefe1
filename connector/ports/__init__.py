"""The doors to the outside world: two contracts (Protocols and plain values; they import neither NIXL nor ZMQ), and the
real ones behind them. The simulator brings its own. No other module of the package imports NIXL or ZMQ, but for
`tools/ucx_devices.py`, which asks NIXL in a process of its own.

nixl          contract: a NIXL agent
nixl_agent    the real one: an agent on a thread of its own
side_channel  contract: request and reply between engines, links, listeners
zmq_bridge    the real one: ZMQ sockets in a trio loop
doorman       carries out what `statemachine/admission.py` says of the connections of a listener
gate          who may connect, and to whom: address ranges and keys
curve_keys    the directory with those keys
host_names    addresses of hosts
descriptors   whether this process has a file descriptor left
tcp           what the kernel says of a connection
"""
