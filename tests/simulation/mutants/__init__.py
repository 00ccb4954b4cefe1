"""Broken variants of the product, and the runner that asks the simulator whether it notices.

A simulator that passes says little until one knows what it would fail on. Each mutant breaks one thing in the product,
where one fits in the way in which a real system was broken (`row`: the number of the field failure that it repeats).
One that survives is a hole in the oracles.

mutant      what a mutant is, and the patch that breaks the product and mends it again
machines    broken tables
actors      broken actors
wire        broken messages, frames, clocks and timers
catalogue   all of them, and those that were dropped because they change nothing that can be seen
runner      runs mutants, each in a process of its own, and the unbroken product on the same plans
"""
