"""What people and dashboards see of the connector. Nothing here decides anything, and nothing here may fail a request.

log              lines for people: the logger, and how many lines there may be
event_log        what becomes of peers, leases and requests, in lines: every request that went wrong
advice           what to do about each kind of failure, in one line
hang_notice      says that a thread hangs, once, and when it goes on
stats            figures per interval: vLLM's periodic log line and Prometheus
catalogue        every metric, as data
traced           what is recorded of it: which machines, and the name of the step that makes one
flight_recorder  the last steps of the machines of this process, always
trace_format     state-transition records as lines of JSON
trace_log        a sequence of files of them for each process
trace_reader     those of all processes, read
trace_writer     the thread that writes them
sinks            several readers of the same records
durations        how long something took, in words
history          records of several processes, put together to what each request went through
course           one request in one time line
summary          what all of them come to: outcomes, times, failures
conformance      whether the records are what the machines allow
spans            requests as OpenTelemetry spans
otlp             those spans by way of OpenTelemetry
perfetto         requests as a file for Perfetto
timeline         requests as a page
asking           the side channel of an engine, as tools ask it, and why there is no answer
live             what running engines say of themselves, asked over their sockets
explanation      why a request is where it is: from histories and live rows to words
diagnosis        what is wrong with a set of engines, or will be
administration   what tools change in running engines; all else here only looks
ucx_devices      which transports and devices UCX opens on this machine, for diagnosis
cli              the command line `nixl-actor`
"""
