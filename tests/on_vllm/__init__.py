"""Tests on another version of vLLM than the installed one, where no build of it for CPUs can be installed.

`python -m tests.on_vllm VERSION pytest ...` runs a module of Python, and whatever it starts, with that version in front
of the installed one. `versions` makes it: its Python, from the source distribution, beside the compiled code for CPUs
of the installed version. What a connector meets of vLLM is Python (the scheduler, the worker, the configuration, the
interface of connectors), so all of that is the real one; only the kernels are another version's, and answers of two
engines are compared on the same kernels.
"""
