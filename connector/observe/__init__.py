"""What an engine notes of what it does: log, metrics, trace and spans. Nothing here decides anything, and nothing here
may fail a request. `connector/tools` reads it.

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
trace_writer     the thread that writes them
sinks            several readers of the same records
history          records of one or several processes, put together to what each request went through
clocks           the wall clocks of several processes, brought together by what one heard from the other
spans            requests as OpenTelemetry spans
otlp             those spans by way of OpenTelemetry
"""
