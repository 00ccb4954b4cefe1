"""The worker-process side of the connector, on the engine thread.

connector_worker    registration once, then commands out and worker events in
actors              what runs beside the engine thread
sleep_mode          an engine that sleeps, and its memory with it
ledger              what vLLM waits for, and what it is told
finishing           what is left to do when READs have ended, and when vLLM may be told
registration        from KV cache tensors to what is registered with NIXL and told to peers
cache_regions       from one layer's tensor to regions of blocks
cache_memory        the KV cache as plain memory
device_allocations  how CUDA numbers that memory, and how UCX tells it from that of another process
cuda_driver         what of CUDA's driver is called for it
memory_stays        keeps that memory where it is
memory_shortage     whether something was raised for want of memory
token_scales        has scales that lie in it laid out before anything is read
parallelism         which part of the KV cache this worker holds
kv_identity         what its bytes mean
compatibility_hash  what two engines must have in common, as one value
turboquant          the two orders of a block of TurboQuant
cpu_attention       the order of attention on CPUs
packing             puts blocks into that order
landing             permutes blocks that came in the peer's order
host_staging        buffers on the host, and the copies to and from the device
device_stream       the stream of our own work on the device, and waits for a device
step_fence          what a step writes late, and who waits for it
block_sums          checksums of blocks, where they lie
control_socket      at which port the worker listens
switch_interval     how soon our threads get the interpreter
engine_facts        what tools are told of this worker
pull_timer          when each request was in which state, for spans
"""
