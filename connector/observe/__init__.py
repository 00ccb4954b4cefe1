"""What people and dashboards see of the connector. Nothing here decides anything, and nothing here may fail a request.

trace_log  state-transition records as JSON lines, one file per process, and their reader
stats      figures per interval: vLLM's periodic log line and Prometheus
log        the few lines that are for people: failures and crashes
"""
