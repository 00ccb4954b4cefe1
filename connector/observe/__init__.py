"""What people and dashboards see of the connector. Nothing here decides anything, and nothing here may fail a request.

trace_log  state-transition records as JSON lines, one file per process, and their reader
stats      figures per interval: vLLM's periodic log line and Prometheus
log        the few lines that are for people: failures and crashes

flight_recorder  the last steps of all machines of this process, always
history          records of several processes, put together to what each request went through
live             what running engines say of themselves, asked over their sockets
explanation      why a request is where it is: from histories and live rows to words
diagnosis        what is wrong with a set of engines, or will be
ucx_devices      which transports and devices UCX opens on this machine, for it
cli              the command line `nixl-actor`
"""
