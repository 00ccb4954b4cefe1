"""Every byte that crosses a process: request parameters, handshake frames, agent metadata, notifications.

Whatever comes from outside is decoded here, by typed decoders with bounds, into frozen values; the rest of the code
never sees raw bytes or raw dicts. The formats are those of vLLM's built-in NIXL connector of the same version, so that
the two can serve each other; what this connector adds travels in extra keys that the built-in one ignores.

bounded        decoding that fails with one exception type, and bounded text made from untrusted values
params         `kv_transfer_params` of a request
handshake      frames of the side channel
control        messages about leases between a D rank and a P worker
metadata       what one rank says about its KV cache in the handshake
notifications  texts sent through NIXL
"""
