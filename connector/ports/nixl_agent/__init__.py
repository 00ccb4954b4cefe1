"""The real NIXL agent. Implements `ports.nixl.NixlPort`.

    port        the port: takes calls in a trio run
    calls       what is handed to the agent's thread, and what comes back
    call_queue  how it gets there
    thread      the loop of that thread
    core        the agent with everything that belongs to it
    other_back_ends  the same, where its data does not move over UCX
    listeners   at which UCX is connected to
    looks       which READs in flight it asks about when
    poll_cost   whether a poll has moved data, by what it cost
    metadata    what can be read of an agent's metadata
    names       names of agents, as bytes and as text

Why a thread of its own
`transfer` may copy a whole READ before it returns (docs/nixl.md fact 19). A trio loop that made the call would stand
still for it, and with it every handshake, timeout and lease of every other peer. The call releases the GIL, so a thread
of its own really takes it off the loop. Calls that are short could stay in the loop, but an agent belongs to one thread
(fact 17), so all of them moved. The figures stand in docs/performance.md.

NIXL objects (the agent, list handles, READ handles) never leave this thread, not even inside a traceback: their
`__del__` calls the agent from whatever thread drops the last reference, and the agent is not thread-safe. Errors
therefore cross as text, and `AgentCore` and `AgentThread` drop what they hold before the thread ends.
"""

from connector.ports.nixl_agent.port import RealNixlPort

__all__ = ("RealNixlPort",)
