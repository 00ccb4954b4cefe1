"""Every byte that crosses a process: request parameters, handshake frames, agent metadata, notifications.

Whatever comes from outside is decoded here, by typed decoders with bounds, into frozen values; the rest of the code
never sees raw bytes or raw dicts. The formats are those of vLLM's built-in NIXL connector of the same version, so that
the two can serve each other; what this connector adds travels in extra keys that the built-in one ignores.

bounded         decoding that fails with one exception type, and bounded text made from untrusted values
params          `kv_transfer_params` of a request
signatures      signatures of them
handshake       frames of the side channel
metadata        what one rank says about its KV cache in the handshake
identity        what the bytes of that cache mean
device_allocations  how CUDA numbers the memory that it lies in
control         messages about leases between a D rank and a P worker
notifications   texts sent through NIXL, where one of two engines is a built-in one
inspection      questions of tools about what lives in a worker, and the answers
administration  messages of tools that change what an engine does
"""
