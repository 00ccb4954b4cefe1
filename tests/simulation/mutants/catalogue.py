"""All mutants.

Dropped, because nothing that anybody outside can see depends on them:

* READING ignores PeerLost: the READ ends by itself, or the lease, the deadline and the drain bound the wait; the event
  only makes the failure come earlier.
* READING believes every ReadCompleted: the lease's timer has ended the belief before. Only with both gone do foreign
  bytes arrive ("believe what was begun").
* a retry that does not look at the lease: the next PeerReady does.
* DeadlinePassed of a lease that does not compare the deadline: setting a timer again moves it, so that the machine
  hears only of the last deadline.
* a failed handshake that is not announced: the requests are tried again after the back-off and end by their deadline.
* releases that wait for a connection and go to a restarted engine: it does not know the names and ignores them.
* READs posted although nobody wants them (without "post after failure"): they are drained like any other, so that
  is_wanted saves work and nothing else.
"""

from __future__ import annotations

from tests.simulation.mutants import actors, machines, wire
from tests.simulation.mutants.mutant import Mutant

CATALOGUE: dict[str, Mutant] = {each.name: each for each in (*machines.MUTANTS, *actors.MUTANTS, *wire.MUTANTS)}
