"""`python -m nestling` is the command line."""

import sys

from nestling.errors import explain_missing


def entry() -> None:
    """The command line, or in one line what it lacks here."""
    try:
        from nestling.cli import entry as run
    except ModuleNotFoundError as error:
        sys.exit(f"nestling: {explain_missing(error)}")
    run()


if __name__ == "__main__":
    entry()
