"""Broken variants of the product, and the runner that asks the oracles whether they notice.

An oracle that is silent says little until one knows what it would complain of. Each mutant breaks one thing in the
product, where one fits in the way in which a real system was broken (`row`: the number of the field failure that it
repeats). One that survives is a hole in the oracles.

mutant      what a mutant is: how something is broken and mended again, and where an oracle must notice it
rules       the rules of the cores, as their docstrings say them; each is removed by a mutant
places      small products of the model checker
decode      the core of a decode rank, and its machines
prefill     the core of a prefill rank, and its machine
leaving     engines that come and go
executors   what carries out what the cores say
wire        messages and frames
ranks       engines of several ranks, caches of several groups
catalogue   all of them, and the table of what notices each (TABLE.md)
runner      runs mutants, each in a process of its own, and the unbroken product in the same places
"""
