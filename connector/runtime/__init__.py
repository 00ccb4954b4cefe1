"""The shell around the cores: trio tasks, mailboxes, timers, and the thread that they run in. It carries out what cores
say, and decides nothing.

thread         the thread of the actors, seen from the engine thread
supervisor     starts and restarts the actors of a worker, as the roster says
context        what they share
peer_actor     executor of `RemoteEngine`: one prefill engine, and the requests that read from it
connections    its connections: opened, listened to, spoken over, taken back
handshake      how one is made
mapped_memory  device memory that UCX would take for that of a process before
pace           how much of the interpreter the planning of handshakes may take
block_tables   from block tables to the descriptors of READs
reads          READs and remote agents of all of them: what stands in front of the NIXL port
deferred_commands  READs that wait for the device, and what must not overtake them
verification   checksums of lent blocks (option `verify`): asked for, made, compared
wait_notices   says in the log which requests wait for long, and for what
introducer     executor of `Introductions`: engines that are met before a request needs them
lease_keeper   executor of `Lending`: what this rank lends, and its control socket
listener       answers handshakes, in the scheduler's process; it has a thread there, and checks keys in another one
draining       executor of `Draining`, beside it
mailbox        how messages reach an actor that waits for them in the trio thread
effects        how executors carry out what a core says
restarts       tasks that must go on
recorder       every step of every core, for the flight recorder and the trace
figures        counts what the machines do
inspector      answers the questions of tools about what lives in this worker
"""
