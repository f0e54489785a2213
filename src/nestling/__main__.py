"""`python -m nestling` is the command line."""

import sys

from nestling.errors import explain_missing, tell


def entry() -> None:
    """The command line, or in one line what it lacks here."""
    try:
        from nestling.commands.cli import entry as run
    except ModuleNotFoundError as error:
        tell(explain_missing(error), as_json="--json" in sys.argv)
        sys.exit(1)
    run()


if __name__ == "__main__":
    entry()
