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
* lengths of blocks that are not compared in the handshake: NIXL refuses descriptors of different lengths, and requests
  fail one by one with what it says.
* READs posted although nobody wants them (without "post after failure"): they are drained like any other, so that
  is_wanted saves work and nothing else.
"""

from __future__ import annotations

from tests.simulation.mutants import actors, machines, ranks, wire
from tests.simulation.mutants.mutant import Mutant

FIELD_FAILURES = {
    1: "blocks whose lease ran out are read, and the READ succeeds",
    2: "blocks that were consumed are read once more, with the parameters of before",
    3: "a failure is reported while a READ goes on writing",
    4: "READs are posted after the request has failed",
    5: "a READ that was given up is taken for one that has ended",
    8: "an abort frees the destination of a READ in flight",
    9: "a deadline is compared with another clock than the one that stamped it",
    10: "a lease is read up to its very end",
    13: "a restarted engine's endpoint is replaced while READs from it are in flight",
    14: "an engine is evicted while it is being read from",
    16: "engines whose KV means different things are paired",
    19: "any peer may free any request",
    20: "the tail of a block that is filled in part keeps what another request left there",
    24: "a failed transfer is cleaned up twice",
    25: "a request that only notifies is reported as received",
    26: "a failed handshake is treated as success",
    28: "the completion of a READ comes twice",
    29: "a lease frees what was freed already",
    30: "a fabric error raised by a call takes the engine down",
    32: "block ids that came with the request drive an assertion",
    38: "one bad frame ends the side channel",
    40: "an engine in back-off is never tried again",
    41: "a full local hit is never reported",
    43: "a handshake fails, and nobody fails the requests that wait for it",
    44: "a message between threads is lost",
    45: "nothing bounds the wait for a READ that hangs",
    47: "a broken connection is never made afresh",
    48: "an engine restarts under its old engine id",
    49: "what was loaded of a dead engine stays",
    50: "what is kept of each engine ever seen grows",
    51: "a handshake that fails half-way leaves something behind",
    52: "the reaper stops at the first lease that is not due",
    53: "a release names the request as the other side does not know it",
    54: "blocks whose consumer is gone stay lent",
    55: "a request that ends before it was read does not release its blocks",
    56: "several samples, or an early notification: a release is counted for the wrong one, or dropped",
    57: "what is known of a request stays after its end",
    59: "ends of leases do not reach the engine",
    61: "handshakes with healthy engines wait for a dead one",
    62: "heartbeats do not go out",
    66: "another engine answers at the address",
}
"""Failures that real systems had, by the numbers that `Mutant.row` refers to."""

CATALOGUE: dict[str, Mutant] = {
    each.name: each for each in (*machines.MUTANTS, *actors.MUTANTS, *ranks.MUTANTS, *wire.MUTANTS)
}
