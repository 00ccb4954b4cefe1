"""What people ask running engines, and make of their traces: `nixl-actor`. No engine imports anything here.

cli              the command line
asking           the side channel of an engine, as tools ask it, and why there is no answer
live             what running engines say of themselves, asked over their sockets
explanation      why a request is where it is: from histories and live rows to words
diagnosis        what is wrong with a set of engines, or will be
administration   what tools change in running engines; all else here only looks
ucx_devices      which transports and devices UCX opens on this machine, for diagnosis
trace_reader     the trace files of all processes, read
summary          what all of their requests come to: outcomes, times, failures
course           one request in one time line
conformance      whether the records are what the machines allow
timeline         requests as a page
perfetto         requests as a file for Perfetto
durations        how long something took, in words
names            engines in a sentence, of a fleet too
"""
