"""The core of a decode rank for one remote prefill engine: its connection, every request that reads from it, the leases
that it wants from it, and what it owes.

Sans I/O, as h11 and aioquic are: `handle(event, now_ns)` returns what to do, `next_deadline()` says when
`advance(now_ns)` has something to do. The executor (`connector/runtime/peer_actor.py`) carries out effects in order,
feeds what comes of them, calls `advance` once something is due, and decides nothing. Nothing here reads a clock:
`now_ns` is the executor's, and never goes back. Production, the model checker and both levels of the simulator run
this object.

What is composed. One `peer` machine; one `departure` machine; one `request` machine for each request that is to be
read; one `hold` machine for each lease that somebody here wants and each partner on P.

    core         the rules: what each event leads to. Requests in pending_handshake or proving wait for the peer; who
                 waits for it is told when it is ready, and when it fails
    connections  READs by connection: what is in flight, what has failed and may still be written, what is quarantined
    claims       a lease with those here who want it (announced or reading) and its hold on each rank of P; what is due
                 to be said of it
    messages     limits, events, effects
    views        what lives, for people

Rules that are nobody's machine:

* A request holds its lease from the moment it is announced, which is before it is scheduled. The READ does not wait for
  the answer; the report does (`request.py`).
* The release is owed when the last of a claim's users has ended, and is said until P has confirmed it or the lease must
  be over. A lease that was released here is consumed: who names it again is refused. Where the scheduler has asked for
  it (`Started.keeps_lease`), the claim lasts until the scheduler lets go of it, which hears of the end of a request
  later than the core, and knows who else has come meanwhile.
* A READ that failed may go on in part. It counts as quiescent when NIXL has shown that it is over, or when its
  connection has been torn down and the grace of the back end has passed.
* What a READ has left may have to be checked; how, the core does not know. The READ is over all the same: its
  connection waits for no check, and a check that is answered after its request, or that attempt, has ended is nobody's.
* A request that is quarantined makes its connection suspect, as a lost transport does: nothing more is read over it.
* An engine that answers nothing of what is asked for the length of a lease makes its connection suspect: none of its
  leases has been renewed, and a READ that waits for it would be waited for until its deadline.
* An engine that had said that it would end, and whose connection has ended, is not waited for (`departure.py`): what
  wants anything of it fails with `PeerLeaving`, and what it is owed is forgotten. What fails because of the engine
  that is in its place says so.
* A connection is given up in this order: no new READ, the end of those in flight, the removal of its agents; the next
  handshake begins after that. One whose READs do not end, or whose agents cannot be removed because READs of somebody
  else do not end, is left standing until they do.
* Cores that know one engine by different sizes stand on the same agents. What makes a connection of one of them suspect
  makes those of the others suspect, and is over for none of them before the agents are removed for all.
* What is held of an engine that is given up ends with it: who is still in the scheduler's queue has it held anew. If
  READs that hang keep it, it may be recalled (`Recall`), and is connected anew beside them.
* Who comes when nobody is left in a core that is given up is parked for its successor, which begins as soon as the
  connection is torn down (`PassToSuccessor`). If READs of another core over the same agents keep the connection there
  will be no successor for long: who is parked fails like everybody else who comes.
* Nothing is assumed of a lease that has a number. Built-in engines give none out, so where one answers as the engine
  that has lent it, that one has ended: it was put back to the built-in connector under its id.

The cost of an event does not grow with the number of requests or leases in hand, but for events that concern all of
them (the peer is ready, or lost). Renewals of many leases travel in one message.
"""

from statemachine.remote_engine.claims import (
    ASSUMED_OVER,
    LEFT,
    REPLACED,
    RESIZED,
    RESTARTED,
    RETIRED,
)
from statemachine.remote_engine.core import MACHINES, RemoteEngine
from statemachine.remote_engine.messages import (
    AbortAsked,
    Address,
    Announced,
    BlocksRejected,
    BlocksResolved,
    CheckRead,
    Connected,
    ConnectFailed,
    Crashed,
    EngineEffect,
    EngineLimits,
    HoldAnswered,
    LeavingSaid,
    LetGo,
    LiftQuarantine,
    LinkLost,
    MeetAsked,
    NoteHandshakeFailure,
    NoteLeaving,
    NoteNotMet,
    NotificationFailed,
    NotifyReleases,
    PassToSuccessor,
    PostReads,
    ReadChecked,
    ReadEnded,
    Recall,
    ReleaseAnswered,
    ReleaseUnread,
    Report,
    ResolveBlocks,
    Retire,
    SendHeartbeat,
    SendHold,
    SendRelease,
    SharedAgentsLost,
    Started,
    StartHandshake,
    Stop,
    TearDown,
    TornDown,
    Unwatched,
    WithdrawReads,
)
from statemachine.remote_engine.views import ClaimView, EngineView, RequestView, WaitsFor

__all__ = (
    "ASSUMED_OVER",
    "LEFT",
    "MACHINES",
    "REPLACED",
    "RESIZED",
    "RESTARTED",
    "RETIRED",
    "AbortAsked",
    "Address",
    "Announced",
    "BlocksRejected",
    "BlocksResolved",
    "CheckRead",
    "ClaimView",
    "ConnectFailed",
    "Connected",
    "Crashed",
    "EngineEffect",
    "EngineLimits",
    "EngineView",
    "HoldAnswered",
    "LeavingSaid",
    "LetGo",
    "LiftQuarantine",
    "LinkLost",
    "MeetAsked",
    "NoteHandshakeFailure",
    "NoteLeaving",
    "NoteNotMet",
    "NotificationFailed",
    "NotifyReleases",
    "PassToSuccessor",
    "PostReads",
    "ReadChecked",
    "ReadEnded",
    "Recall",
    "ReleaseAnswered",
    "ReleaseUnread",
    "RemoteEngine",
    "Report",
    "RequestView",
    "ResolveBlocks",
    "Retire",
    "SendHeartbeat",
    "SendHold",
    "SendRelease",
    "SharedAgentsLost",
    "StartHandshake",
    "Started",
    "Stop",
    "TearDown",
    "TornDown",
    "Unwatched",
    "WaitsFor",
    "WithdrawReads",
)
