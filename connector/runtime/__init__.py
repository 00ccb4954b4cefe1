"""The shell around the machines: trio tasks, mailboxes, timers, and the thread that they run in.

`supervisor` starts and restarts the actors; `peer_actor` owns one remote engine and the requests that read from it;
`nixl_owner` stands in front of the agent; `lease_keeper` holds what this engine lends; `listener` answers handshakes in
the scheduler process. `thread` is the only place where another thread is touched.
"""
