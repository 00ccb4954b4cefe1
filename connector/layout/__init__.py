"""KV geometry: what memory a rank's KV cache occupies, and which of another rank's bytes go where.

Pure arithmetic over frozen values: no NIXL, no vLLM, no I/O. One algorithm serves every model and parallel size; what
tells models apart is data. Everything is checked at handshake time, when the plan is made or one that was made for the
same geometry is found; during a step only block ids are checked.

geometry       one rank: regions of blocks, pieces of layers in them
shapes         what a model caches per layer, and which part of it a rank holds
local          this rank
advertised     what peers are told about it
remote         what a peer's metadata means
compatibility  what a peer must have in common with us
sources        which ranks read from which
copies         which bytes go where
blocks         how the block tables of the two sides are paired
landing        another order inside of our blocks, for longer stretches or for attention on CPUs
plan           descriptors made of all that
plan_cache     one plan for all engines that differ in addresses only
verification   checksums of blocks: which ones P makes, and which D can compare
steps          computing that can be interrupted
"""
