"""`python -m connector` is `nixl-actor`."""

from connector.tools.cli.main import main

if __name__ == "__main__":
    main()
