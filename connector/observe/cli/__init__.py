"""The command line `nixl-actor`. `main` makes it; each group of commands has a module of its own."""
