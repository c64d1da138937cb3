"""`python -m moesaic`."""

import sys

from moesaic.cli.app import run


def main() -> None:
    """Run the command line with this process's arguments and exit with its status."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
