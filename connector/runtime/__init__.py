"""The shell around the cores: trio tasks, mailboxes, timers, and the thread that they run in.

`supervisor` starts and restarts actors, as the roster says; `peer_actor` owns one remote engine and the requests that
read from it, with its `connections`; `reads` stands in front of the NIXL agent; `lease_keeper` holds what this engine
lends; `listener` answers handshakes in the scheduler process. `thread` is the only place where another thread is
touched.
"""
