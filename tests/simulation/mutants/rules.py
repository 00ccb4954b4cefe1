"""The rules of the cores, each by a short name, as the docstring says it that states it.

A test compares: every quotation stands in its module, and every rule is removed by at least one mutant.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from statemachine import admission, deadlines, hold, lease, lending, peer, quarantine, remote_engine, request, roster


class Rule(NamedTuple):
    where: ModuleType | type
    """The module or class that says so in its docstring."""
    quotation: str


RULES: dict[str, Rule] = {
    # a decode rank and one remote engine
    "held from the announcement": Rule(
        remote_engine, "A request holds its lease from the moment it is announced, which is before it is scheduled."
    ),
    "the READ does not wait": Rule(remote_engine, "The READ does not wait for the answer; the report does"),
    "released by the last": Rule(remote_engine, "The release is owed when the last of a claim's users has ended"),
    "kept for the scheduler": Rule(remote_engine, "the claim lasts until the scheduler lets go of it"),
    "released until confirmed": Rule(remote_engine, "is said until P has confirmed it or the lease must be over."),
    "held no longer than its engine": Rule(remote_engine, "What is held of an engine that is given up ends with it"),
    "a released lease is consumed": Rule(
        remote_engine, "A lease that was released here is consumed: who names it again is refused."
    ),
    "a READ that failed may go on": Rule(
        remote_engine,
        "A READ that failed may go on in part. It counts as quiescent when NIXL has shown that it is over",
    ),
    "the grace of the back end": Rule(
        remote_engine, "when its connection has been torn down and the grace of the back end has passed."
    ),
    "a quarantine makes suspect": Rule(
        remote_engine,
        "A request that is quarantined makes its connection suspect, as a lost transport does: nothing more is read "
        "over it.",
    ),
    "silence makes suspect": Rule(
        remote_engine,
        "An engine that answers nothing of what is asked for the length of a lease makes its connection suspect",
    ),
    "the order of giving up": Rule(
        remote_engine,
        "no new READ, the end of those in flight, the removal of its agents; the next handshake begins after that.",
    ),
    "left standing until READs end": Rule(
        remote_engine,
        "One whose READs do not end, or whose agents cannot be removed because READs of somebody else do not end, is "
        "left standing until they do.",
    ),
    "shared agents": Rule(
        remote_engine,
        "What makes a connection of one of them suspect makes those of the others suspect, and is over for none of "
        "them before the agents are removed for all.",
    ),
    "a connection of no use": Rule(
        peer,
        "One that was of no use is rebuilt at once, because it may have met a process that was about to end; the "
        "second in a row, and those after it, wait as after a failed attempt.",
    ),
    "who waits is told": Rule(remote_engine, "who waits for it is told when it is ready, and when it fails"),
    "many leases in one message": Rule(remote_engine, "Renewals of many leases travel in one message."),
    # one request
    "draining": Rule(
        request, "after the first failure the request waits until every READ is quiescent: known to write no more."
    ),
    "quarantine": Rule(
        request,
        "If that takes too long the request ends as failed(Quarantined): the client gets its answer, the blocks do not "
        "return to the pool.",
    ),
    "the report waits for the proof": Rule(
        request, "It must reach the end of the last READ before the request is `done`"
    ),
    "asked once more": Rule(request, "where it does not, P is asked once more"),
    "reported once": Rule(request, "to exactly one report."),
    "a retry": Rule(
        request,
        "A retry goes back to `pending_handshake` when the failure was the transport's, retries are left, and P is not "
        "known to have given the blocks up.",
    ),
    # one lease as a decode rank knows it
    "durations on our own clock": Rule(
        hold,
        "on our own clock the blocks are kept until `asked + remaining`, less what two clocks may part in that time "
        "and less a margin.",
    ),
    "Held proves what was before": Rule(hold, "the answer proves everything before the moment of asking too"),
    "asked again on a new connection": Rule(hold, "So everything is asked again."),
    "assumed from when we heard": Rule(hold, "its lease is taken to have begun when we first heard of the request"),
    "told why at once": Rule(hold, "P does not keep them"),
    # one connection
    "drained before rebuilt": Rule(peer, "READs in flight end first"),
    "fails at once in back-off": Rule(peer, "A failed peer fails requests at once while it backs off"),
    # which remote engines a decode rank knows
    "alike descriptions": Rule(roster, "Requests that describe an engine alike share a member, others do not."),
    "a limit to the quarantine": Rule(
        roster,
        "While too many blocks are in quarantine (`quarantine.py`), a request that is to be read is refused, whichever "
        "engine has its KV; that engine is told, as of one that needs nothing.",
    ),
    "until enough have come back": Rule(
        quarantine,
        "Once as many blocks are in it, nothing new is read from anywhere until enough have come back",
    ),
    "ids in quarantine": Rule(
        roster,
        "A request whose id is that of one in quarantine at the same member is refused in the same way: what is kept "
        "of that one goes by its id, and its blocks must come back, not those of its namesake.",
    ),
    "a limit to members": Rule(
        roster,
        "There is a limit to the members that stay. For a newcomer that finds no room, the unused member that was "
        "asked for longest ago is retired, one that is not connected before one that is.",
    ),
    "newcomers are refused": Rule(
        roster, "A newcomer is refused when nobody can be retired for it, and when the connector stops."
    ),
    "one engine at a place": Rule(
        roster,
        "When a member has connected, other engines that were looked for at the same place are gone: they are retired.",
    ),
    "the replaced replaces nobody": Rule(roster, "Not by one that is retired itself"),
    "idle members": Rule(
        roster,
        "A member that is unused and not connected is retired when it was not asked for in a long time. A live "
        "connection is kept however idle it is",
    ),
    "retired once": Rule(roster, "A member is retired once."),
    "an abort follows its request": Rule(roster, "An abort goes to the member that the request was handed to."),
    # a prefill rank
    "always answered": Rule(lending, "and are always answered"),
    "late and repeated messages": Rule(
        lending,
        "Everything that comes from a peer may be late, repeated, or about something that is not lent here; such a "
        "message is answered or counted, and changes nothing.",
    ),
    "who comes too late is told why": Rule(
        lending, "A lease that is over is remembered with the reason, so that who comes too late is told why."
    ),
    # one lease
    "names": Rule(lease.LeaseName, "a number that no other lease of this life of P has"),
    "every holder": Rule(lease, "The lease is done when every holder is complete"),
    "a release counts as a hold": Rule(lease, "a release counts as a hold too"),
    "a sender counts once": Rule(lease, "A sender counts once, however often it repeats itself."),
    "resolved to the largest": Rule(
        lease, "Holders that disagree about the number of ranks are resolved to the largest"
    ),
    "who was promised": Rule(lease, "Whoever was told that the blocks are held has to release them itself"),
    "a rank may hold again": Rule(lease, "A rank that holds after it has released wants the blocks again"),
    "built-in readers are one holder": Rule(
        lease, "They count as one holder, whose ranks are the senders' agent names"
    ),
    "overtaking": Rule(lease, "holds and releases in `computing` are remembered"),
    "the grant keeps the promise": Rule(
        lease, "the promise that a hold was given (`deadline_ns`) is kept by the grant"
    ),
    "over is over": Rule(lease, "A lease that is over never comes back."),
    "the total bound": Rule(lease, "Renewals end at `latest_ns`"),
    "deadlines move forward": Rule(lease, "the blocks are kept for readers until `deadline_ns`"),
    "a deadline ends a lease": Rule(lease, "nobody renewed it in time: the blocks are freed"),
    "freed once": Rule(
        lease, "every engine that held the lease has released it on all its ranks: the blocks are freed"
    ),
    # a listener
    "who has no allowance is not heard": Rule(admission, "A connection that has neither is not heard"),
    "an allowance of one's own": Rule(admission, "each connection has one of its own, which others cannot use up."),
    "who goes on is cut off": Rule(admission, "One that goes on all the same is cut off."),
    "what was dropped long ago": Rule(admission, "What was dropped long ago is forgiven"),
    "what has ended": Rule(
        admission,
        "What is left of a connection that has ended draws on the common allowance alone: who comes and goes has no "
        "other.",
    ),
    "what was left has too many frames": Rule(
        admission, "their address pays for these: it is shut out when it cannot any more."
    ),
    "nobody owes for minutes": Rule(admission, "Nobody owes more than an allowance holds when it is full"),
    "who connects too often": Rule(
        admission,
        "Of one that connects more often than any engine each connection is ended that comes too soon, and nothing is "
        "held against it",
    ),
    "a newcomer can shake hands": Rule(admission, "A newcomer's own allowance is enough for a handshake."),
    "a limit to the connections": Rule(
        admission,
        "For one too many, another is cut off: the oldest that has never said anything that was understood",
    ),
    "no descriptor left": Rule(
        admission, "Then the oldest that has never said anything that was understood makes room, and no other"
    ),
    "a message has to end": Rule(admission, "A message has to come to its end."),
    "unfinished messages together": Rule(
        admission, "when the unfinished messages of all connections together are too large, and the largest goes."
    ),
    "far too many frames": Rule(
        admission,
        "Its address is shut out for as long as there is, and so are its connections that have never said anything "
        "that was understood",
    ),
    "what comes while nobody is heard": Rule(
        admission, "If what comes meanwhile is too large, all go of whom more than a few words wait"
    ),
    "far too many frames again": Rule(admission, "for another one soon afterwards, all that it has."),
    "shut out for a while": Rule(
        admission,
        "An address one of whose connections was cut off for what it sent is shut out for a while, longer each time; "
        "what connections it has besides stay.",
    ),
    "who stood still hears first": Rule(lending, "It ends nothing before it has taken these messages in"),
    # both
    "told again": Rule(remote_engine.ReadEnded, "May be told again."),
    "every wait ends": Rule(request.DeadlinePassed, "The request as a whole took too long."),
    "one deadline at a time": Rule(deadlines, "Due keys are taken one at a time"),
}
