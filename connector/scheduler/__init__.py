"""The scheduler-process side of the connector, on the scheduler's thread but for `listener_thread`.

connector_scheduler  what vLLM's scheduler asks of the connector, and what the worker is told each step
pulls                what of a prompt is read from another engine
lends                which requests' blocks are kept for another engine
cache_groups         which blocks of a request travel, group by group
far_ends             blocks that vLLM frees with the last token of a prompt, and that D needs
host_saves           which blocks a step writes that are staged on the host
kept_blocks          blocks that are in quarantine or lent back, and who has no room beside them
vllm_admission       how many blocks vLLM asks for before it begins a request
beside_offloading    has `OffloadingConnector` copy blocks before KV is read into them
prefix_digest        what a request begins with, as a text that two engines can compare
adapters             which weights its adapter has, likewise
media_names          which images and other media it has, likewise
draining             ending an engine without a request noticing
listener_thread      the thread that answers handshakes
start_log            what an engine writes into its log at start
engine_figures       figures that concern a whole engine
request_spans        OpenTelemetry spans of requests, where vLLM traces
"""
