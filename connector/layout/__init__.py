"""KV geometry: what memory a rank's KV cache occupies, and which of another rank's bytes go where.

Pure arithmetic over frozen values: no NIXL, no vLLM, no I/O. `geometry` describes one rank and `shapes` derives that
from the model; `sources` says which ranks deal with each other, `copies` which bytes go where, `blocks` pairs two block
tables, and `plan` makes descriptors of all that. One algorithm for every model and parallel size; what tells models
apart is data. Everything is checked when the plan is made, at handshake time; during a step only block ids are checked.
"""
