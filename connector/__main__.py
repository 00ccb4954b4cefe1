"""`python -m connector`: the command line `nixl-actor`."""

from connector.observe.cli.main import main

if __name__ == "__main__":
    main()
