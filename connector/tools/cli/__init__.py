"""The command line `nixl-actor`. Each command imports what it needs when it runs, so that it starts at once.

main        the commands, and what they have in common
live        those that ask running engines: `why`, `ps`, `doctor`
tables      what `ps` shows
trace       those that read traces: `trace …`
administer  those that change what engines do: `drain`, `meet`
keys        those that make keys
output      what they print, and how
"""
