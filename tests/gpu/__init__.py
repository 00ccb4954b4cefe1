"""What NIXL and the device do with KV in a device's memory, without vLLM: `make test-gpu`, needs torch, NIXL and CUDA.

READs of every family's plans between two processes, judged byte by byte; what is left to do on a device that is busy;
memory of unlike kinds on the two sides; KV that is staged on the host; throughput beside NIXL alone.

`make test` runs the same files with `--device cpu`, on memory of the host, so that they work when a device is at hand.
Whole engines are another matter: docs/first-gpu-run.md.
"""
