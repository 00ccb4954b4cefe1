"""The command line `nixl-actor`. Each command imports what it needs when it runs, so that it starts at once."""
